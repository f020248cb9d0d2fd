// Attention on the tensor cores for few queries: bound by how fast K and V arrive.
//
//   An item is 16 rows (the queries of all heads that share K and V) and one chunk of keys. A block takes a run of items:
//     WARPS warps read TILE keys at a time, warp w the tiles w, w+WARPS, ... of a chunk, each through a ring of its own that
//     runs on from item to item: no warp waits for another, and no load for an item's end. A place of the ring is filled again
//     as soon as it has been multiplied, that of K while V is still to be
//     at the end of an item they leave their states to one warp more, which puts them together in the order of the warps
//     and folds chunk after chunk, or, where the block does not see the whole row, leaves the chunk to combine.cu
//
// Blocks are as many as fit the device at once: none starts while another ends. Chunks follow kv_len alone, and with them
// the bits of a row; which block takes an item is no matter. Blocks take their places while the launch before this one runs,
// where the architecture can, and read nothing until it has ended. Deliberately absent: more rows than 16 an item.

#include "common/scores.cuh"
#include "decode/hand_over.cuh"
#include "decode/pages.cuh"

constexpr int NT = TILE / 8;

struct Stage {
    Elem k[TILE * K_ROW], v[TILE * V_ROW];
};
struct Shared {
    Stage ring[STAGES][WARPS];
    Elem q[16 * K_ROW];
    HandOver over;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and decode.cu disagree on shared memory");

#if PAGED
// A tile of keys that lie in pages, the lane's `own` from source.base; those of an entry that names no page are NaN.
template <int WIDTH>
__device__ inline void load_paged_tile(
    Elem* tile, const Params& p, const TilePages& pages, const SourceRows& source, i64 own, const PassingCopy& copy
) {
    constexpr int UNIT = VECTOR ? 8 : 1, UNITS = WIDTH / UNIT;
    const int lane = threadIdx.x % 32;
    const Elem* base = source.base;
    const int rows = source.rows, dim = source.dim;
    const u32 known = __ballot_sync(~0u, pages.own[0].exists(p));
    if (known == ~0u) {
        if (TilePages::are_even(p)) {
#pragma unroll
            for (int r = 0; r < TILE; r += 16) {
                const SourceRows of_page{base + shuffle(own, r), source.step, source.row_step, rows - r, dim};
                load_even_tile<16, WIDTH, 32>(tile + r * row_of(WIDTH), of_page, lane, copy);
            }
            return;
        }
        if constexpr (VECTOR && 32 % UNITS == 0 && TILE * UNITS % 32 == 0) {
            constexpr int STEP = 32 / UNITS;
            if (rows >= TILE && dim == WIDTH) {
                const int c = lane % UNITS * UNIT, first = lane / UNITS;
#pragma unroll
                for (int r = first; r < TILE; r += STEP) {
                    copy(shared_address(tile + place<WIDTH>(r, c)), base + shuffle(own, r) + c);
                }
                return;
            }
        }
    }
#pragma unroll 1
    for (int at = lane; at < TILE * UNITS; at += 32) {
        const int r = at / UNITS, c = at % UNITS * UNIT;
        const bool inside = r < rows && c < dim, is_known = (known >> r & 1) != 0;
        const i64 row = shuffle(own, r);
        const Elem* from = base + (inside && is_known ? row + c * source.step : 0);
        if constexpr (VECTOR) {
            Elem* to = tile + place<WIDTH>(r, c);
            if (inside && !is_known) *(uint4*)to = {0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff};
            else cp_async(to, from, inside ? 16 : 0);
        } else {
            tile[place<WIDTH>(r, c & ~7) + c % 8] = !inside ? (Elem)0 : is_known ? *from : (Elem)0x7fff;
        }
    }
}
#endif

// Fills a warp's ring, tile after tile, item after item: first the keys of a tile, later its values.
struct Loader : Walk {
    const Elem *k, *v;
    const PassingCopy copy;

    __device__ Loader(const Params& p, const Item& first, u32 count) : Walk(first, count), copy(p) {
        enter(p);
        enter_heads(p);
        if (PAGED) to_next(p);
    }

    __device__ void enter_heads(const Params& p) {
        k = (const Elem*)p.k + item.kv_head * p.k_stride[1], v = (const Elem*)p.v + item.kv_head * p.v_stride[1];
        if (!PAGED) k += item.batch * p.k_stride[0] + item.sequence.first_key() * p.k_stride[2], v += item.batch * p.v_stride[0] + item.sequence.first_key() * p.v_stride[2];
    }
    __device__ void to_next(const Params& p) {
        advance(p, [&] { enter_heads(p); });
    }

    // Pages are looked up while the tiles before arrive.
    __device__ void load_keys(const Params& p, Stage& to) {
        if (!PAGED) to_next(p);
#if PAGED
        if (n0 < end) pages.settle(p, item, n0);
#endif
        if (n0 < end) load_rows<D>(to.k, p, k, p.k_stride, p.head_dim);
        cp_async_commit();
    }

    __device__ void load_values(const Params& p, Stage& to) {
        if (n0 < end) load_rows<DV>(to.v, p, v, p.v_stride, p.head_dim_v);
        cp_async_commit();
        if (PAGED) to_next(p);
    }

  private:
    template <int WIDTH>
    __device__ void load_rows(Elem* tile, const Params& p, const Elem* base, const i64 (&stride)[4], int dim) const {
        const int rows = item.sequence.kv_len(p) - n0;
#if PAGED
        load_paged_tile<WIDTH>(tile, p, pages, {base, stride[3], stride[2], rows, dim}, pages.offset(stride), copy);
#else
        const SourceRows source{base + n0 * stride[2], stride[3], stride[2], rows, dim};
        load_even_tile<TILE, WIDTH, 32>(tile, source, threadIdx.x % 32, copy);
#endif
    }
};

// An item's rows of q, by all warps that read.
__device__ inline void load_queries(const Params& p, Shared& sh, const Item& item) {
    const Task task = item.task(p);
    const int r0 = item.r0();
    const SourceRows queries{(const Elem*)p.q, p.q_stride[3], p.q_stride[2], item.rows(p), p.head_dim};
    const auto offset = [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); };
    load_tile<16, D, WARPS * 32>(sh.q, queries, offset, threadIdx.x);
    cp_async_commit();
}

// The part of the warps that read: `count` items from `item` on. `handed` counts what was handed over.
template <bool CAREFUL>
__device__ inline void attend(const Params& p, Shared& sh, Item item, u32 count, u32& handed) {
    constexpr int PENDING = 2 * STAGES - 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Loader loader(p, item, count);
    griddepcontrol_wait();
    load_queries(p, sh, item);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        loader.load_keys(p, sh.ring[stage][warp]);
        loader.load_values(p, sh.ring[stage][warp]);
    }
    cp_async_wait<PENDING + 1>();
    bar_sync_readers();
    const float c = exponent_factor(p);
    int stage = 0;
    for (u32 done = 0; done < count; done++, item.step(p)) {
        const Task task = item.task(p);
        const Seen seen = item.seen(p);
        const int r0 = item.r0(), rows = item.rows(p);
        if (done > 0 && item.split == 0) {
            // Other rows than before.
            bar_sync_readers();
            load_queries(p, sh, item);
            cp_async_wait<0>();
            bar_sync_readers();
        }
        const Queries queries{p, task, r0};
        OnlineSoftmax<1> softmax;
        softmax.clear();
        const Tiles tiles(p, item, seen);
        for (int n0 = tiles.n0; n0 < tiles.end; n0 += WARPS * TILE) {
            Stage& tile = sh.ring[stage][warp];
            Accumulator<NT> s[1];
            MaskTile<1, NT> mask;
            mask.fetch(p, queries, n0);
            cp_async_wait<PENDING>();
            __syncwarp();
            multiply_keys<1, NT>(s, sh.q, tile.k);
            __syncwarp();
            loader.load_keys(p, tile);
            const bool positions = n0 < seen.all_lo || n0 + TILE > min(seen.all_hi, tiles.end);
            if (NATURAL || MASK != NO_MASK || positions) {
                apply_scores<1, NT>(s, p, queries, mask, n0, tiles.end, positions);
            }
            OperandA<NT / 2> p_rounded[1];
            softmax.template add_keys<CAREFUL, NT>(p_rounded, s, c, 0.f);
            cp_async_wait<PENDING>();
            __syncwarp();
            softmax.template add_values<CAREFUL, NT / 2>(p_rounded, tile.v);
            __syncwarp();
            loader.load_values(p, tile);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        softmax.reduce();
        hand_over<16>(sh.over, rows, handed, [&](int first, int here) {
            const int h = first / 8, r = h * 8 + lane / 4 - first;
            if (r < 0 || r >= here) return;
            float* row = sh.over.left[warp][r];
#pragma unroll
            for (int nt = 0; nt < DV / 8; nt++) {
                const float2 pair = {softmax.acc_o[0][nt][h * 2], softmax.acc_o[0][nt][h * 2 + 1]};
                *(float2*)&row[nt * 8 + lane_column(lane)] = pair;
            }
            if (lane % 4 == 0) {
                sh.over.left_m[warp][r] = natural_max(p, softmax.row_max[0][h]), sh.over.left_l[warp][r] = softmax.row_sum[0][h];
            }
        });
    }
    cp_async_wait<0>();
}

__device__ __noinline__ void attend_carefully(const Params& p, Shared& sh, Item item, u32 count, u32 handed) {
    attend<true>(p, sh, item, count, handed);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
    run_block(
        p, sh.over, [&](const Item& item, u32 count, u32& handed) { attend<false>(p, sh, item, count, handed); },
        [&](const Item& item, u32 count, u32 handed) { attend_carefully(p, sh, item, count, handed); }
    );
}
