// Attention on the tensor cores for few queries: bound by how fast K and V arrive.
//
//   An item is 16 rows (the queries of all heads that share K and V) and one chunk of keys. A block takes a run of items:
//     WARPS warps read TILE keys at a time, warp w the tiles w, w+WARPS, ... of a chunk, each through a ring of its own that
//     runs on from item to item: no warp waits for another, and no load for an item's end. A place of the ring is filled again
//     as soon as it has been multiplied, that of K while V is still to be
//     at the end of an item they leave their states to one warp more, which puts them together in the order of the warps
//     and folds chunk after chunk, or, where the block does not see the whole row (p.is_cut), leaves the chunk to combine.cu
//
// Blocks are as many as fit the device at once: none starts while another ends. Chunks follow kv_len alone, and with them
// the bits of a row; which block takes an item is no matter. Blocks take their places while the launch before this one runs,
// where the architecture can, and read nothing until it has ended. Deliberately absent: more rows than 16 an item.

#include "common/scores.cuh"
#include "common/online_softmax.cuh"
#include "common/epilogue.cuh"

constexpr int THREADS = (WARPS + 1) * 32, NT = TILE / 8;
constexpr int STATE_ROW = DV + 8;  // floats: 4 rows of 8 fall into distinct banks
// Rows that are handed over at a time: a lane of the warp that takes them weighs what one warp left of one row.
constexpr int PART = 32 / WARPS, PARTS = 16 / PART;

struct Stage {
    Elem k[TILE * K_ROW], v[TILE * V_ROW];
};
struct Shared {
    Stage ring[STAGES][WARPS];
    Elem q[16 * K_ROW];
    // What the warps leave.
    float left[WARPS][PART][STATE_ROW], left_m[WARPS][PART], left_l[WARPS][PART];
    // The rows so far, of the last warp alone: m and l of a row in each of its WARPS lanes.
    float acc[16][DV], m[PARTS][32], l[PARTS][32];
    // Passed when all warps have left their states, and when the last has taken them.
    u64 full, empty;
    // Items with a sum that is not finite lie within.
    u32 odd_from, odd_to;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and decode.cu disagree on shared memory");

// The named barrier of the warps that read.
__device__ inline void bar_sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// What an item is: rows r0.. of a task (all heads of kv_head), and the keys of one split. Divided out once: the items of a
// run follow one another.
struct Item {
    int split, row_block, kv_head, batch;
    __device__ Item(const Params& p, u32 item) {
        const u32 rows = divide(item, p.by_num_splits), task = divide(rows, p.by_row_blocks);
        split = item - rows * p.num_splits, row_block = rows - task * p.row_blocks;
        batch = divide(task, p.by_tasks), kv_head = task - batch * kv_heads(p);
    }
    __device__ void step(const Params& p) {
        if (++split < p.num_splits) return;
        split = 0;
        if (++row_block < p.row_blocks) return;
        row_block = 0;
        if (++kv_head < kv_heads(p)) return;
        kv_head = 0, batch++;
    }
    __device__ static int kv_heads(const Params& p) { return divide(p.heads, p.by_group); }
    __device__ int r0() const { return row_block * 16; }
    __device__ Task task(const Params& p) const { return Task(batch, kv_head * p.group); }
    __device__ int task_index(const Params& p) const { return batch * kv_heads(p) + kv_head; }
    __device__ Seen seen(const Params& p) const { return Seen(p, task(p), r0(), min(r0() + 16, p.rows)); }
};

// A warp's tiles of an item: those from n0 on, WARPS tiles apart, that begin before `end`.
struct Tiles {
    int n0, end;
    __device__ Tiles(const Params& p, const Item& item, const Seen& seen) {
        const int warp = threadIdx.x / 32;
        const int first = max(seen.lo, item.split * p.chunk) / TILE * TILE;
        end = min(seen.hi, min(p.kv_len, (item.split + 1) * p.chunk));
        // Dealt by their place in the chunk, so that what is skipped before them moves none to another warp.
        const int place = (first - item.split * p.chunk) / TILE;
        n0 = first + ((warp - place) % WARPS + WARPS) % WARPS * TILE;
    }
};

// Moves 16 bytes that are the first to give way in L2 where no other run of rows of the task reads them: what else lies there
// (the code, other blocks' partial rows) stays. K and V that batches share by a stride of 0 may be read again then. 1.3 µs of 71.5 at 4 x 8 heads, 16,384 keys; H200, 2026-11.
struct PassingCopy {
    u64 policy;
    __device__ PassingCopy(const Params& p) {
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
        if (p.row_blocks == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    }
    __device__ void operator()(u32 to, const Elem* from) const {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy));
    }
};

// Fills a warp's ring, tile after tile, item after item: first the keys of a tile, later its values.
struct Loader {
    Item item;
    u32 left;
    int n0, end;
    const Elem *k, *v;
    const PassingCopy copy;

    __device__ Loader(const Params& p, const Item& first, u32 count) : item(first), left(count), copy(p) { enter(p); }

    // To before the first tile of an item.
    __device__ void enter(const Params& p) {
        const Tiles tiles(p, item, item.seen(p));
        n0 = tiles.n0 - WARPS * TILE, end = tiles.end;
        k = (const Elem*)p.k + item.batch * p.k_stride[0] + item.kv_head * p.k_stride[1];
        v = (const Elem*)p.v + item.batch * p.v_stride[0] + item.kv_head * p.v_stride[1];
    }

    __device__ void load_keys(const Params& p, Stage& to) {
        n0 += WARPS * TILE;
        while (n0 >= end && left > 1) left--, item.step(p), enter(p), n0 += WARPS * TILE;
        if (n0 < end) {
            const SourceRows keys{k + n0 * p.k_stride[2], p.k_stride[3], p.k_stride[2], p.kv_len - n0, p.head_dim};
            load_even_tile<TILE, D, 32>(to.k, keys, threadIdx.x % 32, copy);
        }
        cp_async_commit();
    }

    __device__ void load_values(const Params& p, Stage& to) const {
        if (n0 < end) {
            const SourceRows values{v + n0 * p.v_stride[2], p.v_stride[3], p.v_stride[2], p.kv_len - n0, p.head_dim_v};
            load_even_tile<TILE, DV, 32>(to.v, values, threadIdx.x % 32, copy);
        }
        cp_async_commit();
    }
};

// An item's rows of q, by all warps that read.
__device__ inline void load_queries(const Params& p, Shared& sh, const Item& item) {
    const Task task = item.task(p);
    const int r0 = item.r0();
    const SourceRows queries{(const Elem*)p.q, p.q_stride[3], p.q_stride[2], min(16, p.rows - r0), p.head_dim};
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
        const int r0 = item.r0(), rows = min(16, p.rows - r0);
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
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int first = part * PART, h = first / 8, r = h * 8 + lane / 4 - first;
            if (first >= rows) break;
            if (handed > 0) mbarrier_wait(sh.empty, (handed - 1) % 2);
            handed++;
            if (r >= 0 && r < min(PART, rows - first)) {
#pragma unroll
                for (int nt = 0; nt < DV / 8; nt++) {
                    const float2 pair = {softmax.acc_o[0][nt][h * 2], softmax.acc_o[0][nt][h * 2 + 1]};
                    *(float2*)&sh.left[warp][r][nt * 8 + lane_column(lane)] = pair;
                }
                if (lane % 4 == 0) sh.left_m[warp][r] = natural_max(p, softmax.row_max[0][h]), sh.left_l[warp][r] = softmax.row_sum[0][h];
            }
            mbarrier_arrive(sh.full);
        }
    }
    cp_async_wait<0>();
}

// The last warp's part of the same items. Lane WARPS*g + w weighs what warp w left of row g; then a lane takes columns,
// four at a time.
template <bool CAREFUL>
__device__ inline void gather(const Params& p, Shared& sh, Item item, u32 count, u32& handed) {
    // Groups of four columns in a row, and rounds of 32 groups in a part.
    constexpr int GROUPS = DV / 4, ROUNDS = (PART * GROUPS + 31) / 32;
    const int lane = threadIdx.x % 32, w = lane % WARPS, g = lane / WARPS;
    u32 odd_from = count, odd_to = 0;
    griddepcontrol_wait();
    for (u32 done = 0; done < count; done++, item.step(p)) {
        const int r0 = item.r0(), rows = min(16, p.rows - r0);
        const bool is_first = item.split == 0, is_last = !p.is_cut && item.split + 1 == p.num_splits;
        bool is_odd = false;
#pragma unroll 1
        for (int part = 0; part * PART < rows; part++) {
            const int first = part * PART, here = min(PART, rows - first);
            mbarrier_wait(sh.full, handed++ % 2);
            const float share = g < here ? sh.left_l[w][g] : 0.f, own_m = g < here ? sh.left_m[w][g] : 0.f;
            const float m = max_of_lanes<WARPS>(share == 0 ? negative_infinity() : own_m);
            const float weight = share == 0 ? 0.f : expf(own_m - m);
            float l = sum_of_lanes<WARPS>(weight * share);
            const bool speaks = g < here && w == 0;
            Fold fold;
            float factor = 0;
            if (p.is_cut) {
                float* to = partial(p, item.task_index(p), r0 + first + g, item.split) + p.head_dim_v;
                if (speaks) to[0] = m, to[1] = l;
            } else {
                float so_far = is_first ? negative_infinity() : sh.m[part][lane];
                fold = Fold(so_far, m);
                l = fold.add(is_first ? 0.f : sh.l[part][lane], l);
                sh.m[part][lane] = so_far, sh.l[part][lane] = l;
                if (is_last) {
                    const Row row(p, item.task(p), r0 + first + min(g, here - 1));
                    const RowEnd row_end(p, row, so_far, l);
                    factor = row_end.factor;
                    if (speaks) store_lse(p, row, row_end);
                }
            }
#pragma unroll 2
            for (int n = 0; n < ROUNDS; n++) {
                if (n * 32 >= here * GROUPS) break;
                const int at = n * 32 + lane, r = min(at / GROUPS, here - 1), column = at % GROUPS * 4;
                float x[WARPS][4], zero = 0;
#pragma unroll
                for (int k = 0; k < WARPS; k++) {
                    const float by = __shfl_sync(~0u, weight, r * WARPS + k);
                    *(float4*)x[k] = *(const float4*)&sh.left[k][r][column];
#pragma unroll
                    for (int e = 0; e < 4; e++) x[k][e] = CAREFUL ? weighed(by, x[k][e]) : product(by, x[k][e]);
                }
#pragma unroll
                for (int step = 1; step < WARPS; step *= 2)
#pragma unroll
                    for (int k = 0; k < WARPS; k += 2 * step)
#pragma unroll
                        for (int e = 0; e < 4; e++) x[k][e] += x[k + step][e];
                float(&sum)[4] = x[0];
#pragma unroll
                for (int e = 0; e < 4; e++) zero = fused(sum[e], 0.f, zero);  // NaN where a sum is not finite
                is_odd |= zero != 0;
                Fold of;
                of.before = __shfl_sync(~0u, fold.before, r * WARPS), of.next = __shfl_sync(~0u, fold.next, r * WARPS);
                const float row_factor = __shfl_sync(~0u, factor, r * WARPS);
                const bool is_empty = __shfl_sync(~0u, l, r * WARPS) == 0;
                if (at >= here * GROUPS) continue;
                if (p.is_cut) {
                    float* to = partial(p, item.task_index(p), r0 + first + r, item.split) + column;
                    if (p.head_dim_v % 4 == 0 && column < p.head_dim_v) {
                        *(float2*)to = {sum[0], sum[1]}, *(float2*)(to + 2) = {sum[2], sum[3]};
                    } else {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            if (column + e < p.head_dim_v) to[e] = sum[e];
                        }
                    }
                    continue;
                }
                float4& acc = *(float4*)&sh.acc[first + r][column];
                const float4 so_far = is_first ? float4{0, 0, 0, 0} : acc;
                sum[0] = of.add(so_far.x, sum[0]), sum[1] = of.add(so_far.y, sum[1]);
                sum[2] = of.add(so_far.z, sum[2]), sum[3] = of.add(so_far.w, sum[3]);
                acc = *(const float4*)sum;
                if (!is_last) continue;
#pragma unroll
                for (int e = 0; e < 4; e++) sum[e] = is_empty ? 0.f : sum[e] * row_factor;
                const i64 to = Row(p, item.task(p), r0 + first + r).offset(p.out_stride) + column * p.out_stride[3];
                if (p.out_vector) {
                    if (column < p.head_dim_v) *(uint2*)((Elem*)p.out + to) = {pack(sum[0], sum[1]), pack(sum[2], sum[3])};
                } else {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (column + e < p.head_dim_v) store_as(p.out, p.out_dtype, to + e * p.out_stride[3], sum[e]);
                    }
                }
            }
            mbarrier_arrive(sh.empty);
        }
        if (__any_sync(~0u, is_odd)) odd_from = min(odd_from, done), odd_to = done + 1;
    }
    if (lane == 0) sh.odd_from = odd_from, sh.odd_to = odd_to;
}

__device__ __noinline__ void attend_carefully(const Params& p, Shared& sh, Item item, u32 count, u32 handed) {
    attend<true>(p, sh, item, count, handed);
}
__device__ __noinline__ void gather_carefully(const Params& p, Shared& sh, Item item, u32 count, u32 handed) {
    gather<true>(p, sh, item, count, handed);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
    griddepcontrol_launch_dependents();
    if (threadIdx.x == WARPS * 32) mbarrier_init(sh.full, WARPS * 32), mbarrier_init(sh.empty, 32);
    // Runs of whole rows, or of chunks wherever they cut a row; the first runs take what is left over.
    const u32 unit = p.is_cut ? 1 : p.num_splits;
    const u32 units = p.is_cut ? p.items : divide(p.items, p.by_num_splits);
    const u32 each = units / gridDim.x, over = units - each * gridDim.x;
    const u32 first = (each * blockIdx.x + min(blockIdx.x, over)) * unit;
    const u32 count = (each + (blockIdx.x < over ? 1 : 0)) * unit;
    Item item(p, first);
    const bool is_reader = threadIdx.x < WARPS * 32;
    u32 handed = 0;
    __syncthreads();
    if (is_reader) attend<false>(p, sh, item, count, handed);
    else gather<false>(p, sh, item, count, handed);
    __syncthreads();
    if (sh.odd_from >= sh.odd_to) return;
    // The rows, or chunks, from the first such to the last, once more.
    const u32 from = sh.odd_from / unit * unit, to = (sh.odd_to + unit - 1) / unit * unit;
    for (u32 n = 0; n < from; n++) item.step(p);
    __syncthreads();
    if (is_reader) attend_carefully(p, sh, item, to - from, handed);
    else gather_carefully(p, sh, item, to - from, handed);
}
