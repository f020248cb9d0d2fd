// A block of decode.cu and decode_codes.cu: the warps that read leave their states at the end of an item, and a warp more puts
// them together. Deliberately absent: how they read and multiply.
#pragma once
#include "common/epilogue.cuh"
#include "common/online_softmax.cuh"
#include "decode/items.cuh"

constexpr int STATE_ROW = DV + 8;  // floats: 4 rows of 8 fall into distinct banks
// Rows that are handed over at a time: a lane of the warp that takes them weighs what one warp left of one row.
constexpr int PART = 32 / WARPS, PARTS = 16 / PART;

struct HandOver {
    // What the warps leave.
    float left[WARPS][PART][STATE_ROW], left_m[WARPS][PART], left_l[WARPS][PART];
    // The rows so far, of the last warp alone: m and l of a row in each of its WARPS lanes.
    float acc[16][DV], m[PARTS][32], l[PARTS][32];
    // Passed when all warps have left their states, and when the last has taken them.
    u64 full, empty;
    // Items with a sum that is not finite lie within.
    u32 odd_from, odd_to;
};

// A warp's state of `rows` rows, of ROWS that it may have, at the end of an item, for the last warp. `handed` counts what was handed over.
// `leave(first, here)` writes those of rows first, first+1, ..., `here` of them, as the first of `over`; `first` is a constant.
template <int ROWS, class Leave>
__device__ inline void hand_over(HandOver& over, int rows, u32& handed, Leave leave) {
#pragma unroll
    for (int part = 0; part < (ROWS + PART - 1) / PART; part++) {
        const int first = part * PART;
        if (first >= rows) break;
        if (handed > 0) mbarrier_wait(over.empty, (handed - 1) % 2);
        handed++;
        leave(first, min(PART, rows - first));
        mbarrier_arrive(over.full);
    }
}

// The last warp's part of the same items. Lane WARPS*g + w weighs what warp w left of row g; then a lane takes columns,
// four at a time.
template <bool CAREFUL>
__device__ inline void gather(const Params& p, HandOver& over, const Run& run, Item item, u32 count, u32& handed) {
    // Groups of four columns in a row, and rounds of 32 groups in a part.
    constexpr int GROUPS = DV / 4, ROUNDS = (PART * GROUPS + 31) / 32;
    const int lane = threadIdx.x % 32, w = lane % WARPS, g = lane / WARPS;
    u32 odd_from = count, odd_to = 0;
    griddepcontrol_wait();
    for (u32 done = 0; done < count; done++, item.step(p)) {
        const int r0 = item.r0(), rows = item.rows(p);
        const bool is_cut = run.cuts(p, item);
        const bool is_first = item.split == 0, is_last = !is_cut && item.split + 1 == item.sequence.num_splits(p);
        bool is_odd = false;
#pragma unroll 1
        for (int part = 0; part * PART < rows; part++) {
            const int first = part * PART, here = min(PART, rows - first);
            mbarrier_wait(over.full, handed++ % 2);
            const float share = g < here ? over.left_l[w][g] : 0.f, own_m = g < here ? over.left_m[w][g] : 0.f;
            const float m = max_of_lanes<WARPS>(share == 0 ? negative_infinity() : own_m);
            const float weight = share == 0 ? 0.f : expf(own_m - m);
            float l = sum_of_lanes<WARPS>(weight * share);
            const bool speaks = g < here && w == 0;
            Fold fold;
            float factor = 0;
            if (is_cut) {
                float* to = partial(p, item.task_index(p), r0 + first + g, item.split) + p.head_dim_v;
                if (speaks) to[0] = m, to[1] = l;
            } else {
                float so_far = is_first ? negative_infinity() : over.m[part][lane];
                fold = Fold(so_far, m);
                l = fold.add(is_first ? 0.f : over.l[part][lane], l);
                over.m[part][lane] = so_far, over.l[part][lane] = l;
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
                    *(float4*)x[k] = *(const float4*)&over.left[k][r][column];
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
                if (is_cut) {
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
                float4& acc = *(float4*)&over.acc[first + r][column];
                const float4 so_far = is_first ? float4{0, 0, 0, 0} : acc;
                sum[0] = of.add(so_far.x, sum[0]), sum[1] = of.add(so_far.y, sum[1]);
                sum[2] = of.add(so_far.z, sum[2]), sum[3] = of.add(so_far.w, sum[3]);
                acc = *(const float4*)sum;
                if (!is_last) continue;
#pragma unroll
                for (int e = 0; e < 4; e++) sum[e] = is_empty ? row_factor : sum[e] * row_factor;
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
            mbarrier_arrive(over.empty);
        }
        if (__any_sync(~0u, is_odd)) odd_from = min(odd_from, done), odd_to = done + 1;
    }
    if (lane == 0) over.odd_from = odd_from, over.odd_to = odd_to;
}

__device__ __noinline__ void gather_carefully(const Params& p, HandOver& over, const Run& run, Item item, u32 count, u32 handed) {
    gather<true>(p, over, run, item, count, handed);
}

// The block's run of items, and once more those within which a sum is not finite. `attend` is the part of the warps that read.
template <class Attend, class AttendCarefully>
__device__ inline void run_block(const Params& p, HandOver& over, Attend attend, AttendCarefully attend_carefully) {
    griddepcontrol_launch_dependents();
    if (threadIdx.x == WARPS * 32) mbarrier_init(over.full, WARPS * 32), mbarrier_init(over.empty, 32);
    // Runs of whole rows, or of chunks wherever they cut a row; the first runs take what is left over.
#if VARLEN
    // Sequences are what the launch before this one writes. Runs of units.
    griddepcontrol_wait();
    const u32 units = varlen_table(p).units * (p.heads / p.group), each = units / gridDim.x, rest = units - each * gridDim.x;
    const u32 begin = each * blockIdx.x + min(blockIdx.x, rest), end = begin + each + (blockIdx.x < rest);
    if (begin == end) return;
    u32 chunks = 0;
    for (u32 unit = begin; unit < end; unit++) chunks += Sequence(varlen_entry(p, unit)).num_splits(p);
    const Run run{Item(p, begin), 0, chunks};
#elif RAGGED
    // Lengths may be what the launch before this one writes.
    griddepcontrol_wait();
    const Deal deal(p);
    const u32 begin = deal.first(blockIdx.x), units = deal.first(blockIdx.x + 1) - begin;
    if (units == 0) return;
    Run run{Item(p, deal, begin), begin, units};
    if (deal.whole_rows) run.first = 0, run.count = run.item.sequence.num_splits(p);
#else
    const u32 unit = p.is_cut ? 1 : p.num_splits;
    const u32 units = p.is_cut ? p.items : divide(p.items, p.by_num_splits);
    const u32 each = units / gridDim.x, rest = units - each * gridDim.x;
    const u32 first = (each * blockIdx.x + min(blockIdx.x, rest)) * unit;
    const Run run{Item(p, first), first, (each + (blockIdx.x < rest ? 1 : 0)) * unit};
#endif
    const bool is_reader = threadIdx.x < WARPS * 32;
    u32 handed = 0;
    __syncthreads();
    if (is_reader) attend(run.item, run.count, handed);
    else gather<false>(p, over, run, run.item, run.count, handed);
    __syncthreads();
    if (over.odd_from >= over.odd_to) return;
    // The rows, or chunks, from the first such to the last, once more.
    Item item = run.item, again = run.item;
    u32 from = 0, to = 0;
    for (u32 n = 0; n < over.odd_to; n++, item.step(p)) {
        const bool is_alone = run.cuts(p, item);
        if (n <= over.odd_from && (is_alone || item.split == 0)) from = n, again = item;
        to = is_alone ? n + 1 : n - item.split + item.sequence.num_splits(p);
    }
    __syncthreads();
    if (is_reader) attend_carefully(again, to - from, handed);
    else gather_carefully(p, over, run, again, to - from, handed);
}
