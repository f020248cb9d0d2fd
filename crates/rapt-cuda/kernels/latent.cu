// Attention on the tensor cores for few queries of heads up to 576 whose values are up to 512 wide: multi-head latent attention, where many
// query heads share one head of keys, and a value is the first numbers of its key.
//
//   An item is 64 rows (the queries of all heads that share K and V) and one chunk of keys, in tiles of BLOCK_N. A block takes a run of
//   items; 8 warps, 4 x 16 rows, and of each 16 a pair of warps, one for either half of the value columns:
//     s = q @ K.T                of a warp's half of the tile's keys; scores, masks
//     row_max' = max(row_max, max s)        the maxima of both halves, through shared memory
//     p                          of a warp's half of the keys, into shared memory
//     acc_o += p @ V             of all the tile's keys and a warp's half of the columns
//
// There is room for two tiles beside q. Where rows of V are the beginnings of those of K, in the same memory, a tile of K is V's too: each
// byte is loaded once, and the next tile arrives meanwhile. Else one place is K's and one V's: K of the next tile arrives while V is
// multiplied, V while K is. Both ways have the same bits. Chunks of several follow from the rows and keys of one sequence and are folded in
// order by combine.cu. Deliberately absent: sequences one after another, narrower heads (decode.cu), more rows (generic.cu).

#define ITEM_ROWS BLOCK_M
#include "common/pages.cuh"
#include "common/scores.cuh"
#include "decode/deal.cuh"
#include "wide/rows.cuh"

constexpr int K_BOXES = D / COLUMNS, V_BOXES = DV / COLUMNS;
static_assert(BLOCK_M == 64 && DV <= D && KEYS % 32 == 0, "four warps of 16 queries, and room for V where K would be");

typedef Box Tile[K_BOXES];
struct Shared {
    Elem q[K_BOXES][BLOCK_M * COLUMNS];
    Tile tiles[2];
    WeightTiles weights[4];
    Beside beside;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and latent.cu disagree on shared memory");

// Whether rows of V are the beginnings of those of K.
__device__ inline bool values_begin_keys(const Params& p) {
    bool same = p.k == p.v && p.head_dim_v <= p.head_dim;
#pragma unroll
    for (int d = 0; d < 4; d++) same &= p.k_stride[d] == p.v_stride[d];
    return same;
}

// Where those rows of a tile lie that a thread loads: row threadIdx.x / 8 and every 32nd from there on, of which it takes units c, c + 8, ...
struct OwnRows {
    static constexpr int COUNT = KEYS / 32;
    KeyPlace places[COUNT];
    bool inside[COUNT];

    // Looks up those of the tile from key n0 on; no entry of a page table behind the last key is read.
    __device__ void find(const Params& p, const Item& item, int n0, int end) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const int j = n0 + (int)threadIdx.x / 8 + n * 32;
            inside[n] = j < end;
            places[n].block = places[n].row = 0;
            if (inside[n]) places[n] = KeyPlace(p, item.batch, j);
        }
    }

    // Loads BOXES boxes of the rows of a tensor whose head begins at `head`: zero beyond those and beyond the `dim` columns that it has, NaN
    // in rows of pages that do not exist.
    template <int BOXES>
    __device__ void load(Tile& tile, const Params& p, const Elem* head, const i64 (&stride)[4], int dim) const {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const int r = (int)threadIdx.x / 8 + n * 32, c = (int)threadIdx.x % 8 * (VECTOR ? UNIT : 1);
            const Elem* row = head + (places[n].block * stride[0] + places[n].row * stride[2]);
            const bool exists = places[n].exists(p);
            if constexpr (VECTOR) {
                const u32 to = shared_address(tile[0] + box_place(r, c));
                if (inside[n] && exists && dim == BOXES * COLUMNS) {
#pragma unroll
                    for (int box = 0; box < BOXES; box++) cp_async(to + box * (u32)sizeof(Box), row + (c + box * COLUMNS));
                    continue;
                }
#pragma unroll 1
                for (int box = 0; box < BOXES; box++) {
                    const bool is_there = inside[n] && c + box * COLUMNS < dim;
                    Elem* at = tile[box] + box_place(r, c);
                    if (is_there && !exists) *(uint4*)at = {NAN_PAIR, NAN_PAIR, NAN_PAIR, NAN_PAIR};
                    else cp_async(at, is_there ? row + (c + box * COLUMNS) : head, is_there ? 16 : 0);
                }
            } else {
#pragma unroll 1
                for (int column = c; column < BOXES * COLUMNS; column += 8) {
                    const bool is_there = inside[n] && column < dim;
                    const Elem x = !is_there ? (Elem)0 : exists ? row[column * stride[3]] : (Elem)NAN_PAIR;
                    tile[column / COLUMNS][box_place(r, column % COLUMNS)] = x;
                }
            }
        }
    }

  private:
    static constexpr u32 NAN_PAIR = 0x7fff7fff;  // of float16 and of bfloat16
};

// What a block loads of an item, tile after tile.
struct Loader {
    const Params& p;
    const Item& item;
    const Elem *k, *v;
    int end;
    OwnRows rows;

    __device__ Loader(const Params& p, const Item& item) : p(p), item(item) {
        k = (const Elem*)p.k + item.kv_head * p.k_stride[1], v = (const Elem*)p.v + item.kv_head * p.v_stride[1];
        end = item.sequence.kv_len(p);
    }
    // To the tile from key n0 on.
    __device__ void find(int n0) { rows.find(p, item, n0, end); }
    __device__ void load_keys(Tile& tile, bool is_wanted) const {
        if (is_wanted) rows.load<K_BOXES>(tile, p, k, p.k_stride, p.head_dim);
        cp_async_commit();
    }
    __device__ void load_values(Tile& tile, bool is_wanted) const {
        if (is_wanted) rows.load<V_BOXES>(tile, p, v, p.v_stride, p.head_dim_v);
        cp_async_commit();
    }
};

// What was asked for first of what is under way has come, for all threads.
__device__ inline void await_tile() {
    cp_async_wait<1>();
    if (BY_WGMMA) fence_proxy_async();
    __syncthreads();
}

// s = q.k of a tile: a warp's 16 rows and its half of the keys.
__device__ inline void multiply_tile(Accumulator<OWN>& s, const Shared& sh, const Tile& keys, int slab, int half) {
    zero(s);
#if BY_WGMMA
    const u32 queries = tile_low(sh.q[0], 0), columns = tile_low(keys[0] + half * (KEYS / 2 * COLUMNS), 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K_BOXES * 4; step++) {
        const u32 within = step % 4 * 32 / 16;
        wgmma_keys(s, queries + step / 4 * (BLOCK_M * 128 / 16) + within, columns + step / 4 * (KEYS * 128 / 16) + within, 1);
    }
    wgmma_commit();
    wgmma_wait<0>(s);
#else
    const u32 q_at = query_rows(sh.q[0], slab), k_at = key_rows(keys[0], half);
#pragma unroll 4
    for (int step = 0; step < K_BOXES * 4; step++) {
        u32 a[4], b[4];
        ldmatrix(a, (q_at ^ step % 4 * 32) + step / 4 * (BLOCK_M * 128));
#pragma unroll
        for (int pair = 0; pair < OWN / 2; pair++) {
            ldmatrix(b, (k_at ^ step % 4 * 32) + step / 4 * (KEYS * 128) + pair * (16 * 128));
            mma(s[pair * 2], a, b[0], b[1]);
            mma(s[pair * 2 + 1], a, b[2], b[3]);
        }
    }
#endif
}

// Computes an item, its rows of q where they are not those of the item before; false if a sum is not finite, with nothing written (never if
// CAREFUL).
template <bool CAREFUL>
__device__ inline bool attend(const Params& p, Shared& sh, const Item& item, bool has_queries) {
    const Task task = item.task(p);
    const int r0 = item.r0(), rows = item.rows(p);
    const Seen seen = item.seen(p);
    const int chunk = item.sequence.chunk(p), first = max(seen.lo, item.split * chunk) / KEYS * KEYS;
    const int end = min(seen.hi, min(item.sequence.kv_len(p), (item.split + 1) * chunk));
    const bool with_keys = values_begin_keys(p);
    const int ahead = with_keys ? 2 * KEYS : KEYS;
    Warp warp(sh.beside);
    const int lane = warp.lane, slab = warp.slab, half = warp.half;
    // Warps without rows have nothing to multiply; but groups of four multiply together.
    const bool is_idle = !BY_WGMMA && slab * 16 >= rows;
    if (!has_queries) {
        for (int box = 0; box < K_BOXES; box++) {
            const SourceRows queries = columns_from((const Elem*)p.q, p.q_stride, rows, p.head_dim, box * COLUMNS);
            load_box<BLOCK_M>(sh.q[box], queries, [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); });
        }
    }
    Loader loader(p, item);
    loader.find(first);
    loader.load_keys(sh.tiles[0], first < end);
    if (with_keys) loader.find(first + KEYS), loader.load_keys(sh.tiles[1], first + KEYS < end);
    else loader.load_values(sh.tiles[1], first < end);

    const Queries queries{p, task, r0 + slab * 16};
    const float c = exponent_factor(p);
    RowSums sums;
    sums.clear();
    int place = 0;
#pragma unroll 1
    for (int n0 = first; n0 < end; n0 += KEYS) {
        const int own_n0 = n0 + half * (KEYS / 2), next = n0 + ahead;
        Tile& keys = sh.tiles[place];
        Tile& values = sh.tiles[with_keys ? place : 1];
        loader.find(next);
        MaskTile<1, OWN> mask;
        Accumulator<OWN> s[1];
        if (!is_idle) mask.fetch(p, queries, own_n0);
        await_tile();
        if (!is_idle) {
            multiply_tile(s[0], sh, keys, slab, half);
            const bool positions = n0 < seen.all_lo || n0 + KEYS > seen.all_hi;
            if (NATURAL || MASK != NO_MASK || positions) {
                apply_scores<1, OWN>(s, p, queries, mask, own_n0, item.sequence.kv_len(p), positions);
            }
            float top[2];
#pragma unroll
            for (int h = 0; h < 2; h++) top[h] = max_of_row(s[0], h, negative_infinity());
            warp.share(top);
            warp.sync_pair();
#pragma unroll
            for (int h = 0; h < 2; h++) top[h] = fmaxf(sums.row_max[0][h], fmaxf(warp.shared(0, h), warp.shared(1, h)));
            sums.weigh<CAREFUL>(s, top, c);
            store_weights<OWN>(sh.weights[slab], s[0], half * OWN);
        }
        if (!with_keys) {
            // All have read K.
            __syncthreads();
            loader.load_keys(keys, next < end);
            await_tile();
        } else if (CAREFUL) {
            // The other group has read K, in which values that are not finite are replaced.
            __syncthreads();
        } else if (!is_idle) {
            warp.sync_pair();
        }
        if (!is_idle) {
            Weights weights(sh.weights[slab]);
#pragma unroll
            for (int box = 0; box < V_BOXES / 2; box++) {
                add_box<CAREFUL>(sums.acc_o, weights, values[half * (V_BOXES / 2) + box], box, half);
            }
            await_sums(sums.acc_o[0]);
        }
        __syncthreads();
        if (with_keys) loader.load_keys(keys, next < end), place ^= 1;
        else loader.load_values(values, next < end);
    }
    cp_async_wait<0>();
    // Also: tiles and q may be written again.
    const bool odd = __syncthreads_or(non_finite(sums.acc_o[0]) != 0);
    if (!CAREFUL && odd) return false;
    sums.reduce(warp);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = slab * 16 + lane_row(lane) + h * 8;
        if (r >= rows) continue;
        if (item.sequence.num_splits(p) > 1) {
            store_partial(p, partial(p, item.task_index(p), r0 + r, item.split), sums, h, half);
        } else {
            store_row(p, Row(p, task, r0 + r), sums, h, half);
        }
    }
    return true;
}

// Its code stands apart, as this is rare; but beside a call products of wgmma would be made one by one (C7510).
#if BY_WGMMA
__device__ inline
#else
__device__ __noinline__
#endif
void attend_carefully(const Params& p, Shared& sh, const Item& item) { attend<true>(p, sh, item, true); }

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
#if RAGGED
    const Deal deal(p, gridDim.x, false);
    const u32 begin = deal.first(blockIdx.x), count = deal.first(blockIdx.x + 1) - begin;
    if (count == 0) return;
    Item item(p, deal, begin);
#else
    const u32 each = p.items / gridDim.x, rest = p.items - each * gridDim.x;
    const u32 begin = each * blockIdx.x + min(blockIdx.x, rest), count = each + (blockIdx.x < rest ? 1 : 0);
    Item item(p, begin);
#endif
#pragma unroll 1
    for (u32 done = 0; done < count; done++, item.step(p)) {
        if (!attend<false>(p, sh, item, done > 0 && item.split > 0)) attend_carefully(p, sh, item);
    }
}
