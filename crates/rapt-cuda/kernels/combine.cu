// Folds the splits of a row, one after another (Fold of common/epilogue.cuh):
//
//   m = max m_s    acc = exp(m_before - m) acc + exp(m_s - m) acc_s    out = acc / (l, sink included)
//
// A warp takes 32 columns of a row, a lane a column, and TILE splits at a time: all loads under way at once, then a lane finds
// the weights of a split, then every lane adds. It is launched while the splits are still computed, where the architecture
// can, and waits for them here; the blocks are small, that they find room beside those of decode.cu.

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

constexpr int COLUMNS = 32, THREADS = 64, TILE = 32;

struct __align__(4 * sizeof(Acc)) Step {
    Acc before, next, share, unused;
};

extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ Params p) {
    __shared__ Step steps[THREADS / 32][TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 column_blocks = (p.head_dim_v + COLUMNS - 1) / COLUMNS;
    const u32 place = blockIdx.x * (THREADS / 32) + warp, all_rows = place / column_blocks;
    const int column = (place - all_rows * column_blocks) * COLUMNS + lane;
    const u32 tasks = divide(divide(p.items, p.by_num_splits), p.by_row_blocks);
    const bool inside = all_rows / p.rows < tasks;
    const int task_index = inside ? all_rows / p.rows : 0, r = all_rows % p.rows;
    const i64 width = p.head_dim_v + 2;
    const Task task(p, task_index);
    const Row row(p, task, r);
    const Acc* column_at = partial(p, task_index, r, 0) + min(column, p.head_dim_v - 1);
    const Acc* state_at = partial(p, task_index, r, lane) + p.head_dim_v;
    const i64 to = row.offset(p.out_stride) + column * p.out_stride[3];
    griddepcontrol_launch_dependents();
#if __CUDA_ARCH__ >= 900
    // The first pass, over no split, fetches the instructions while the splits are still computed.
    constexpr int PASSES = 2;
#else
    constexpr int PASSES = 1;
#endif
#pragma unroll 1
    for (int pass = 1; pass <= PASSES; pass++) {
        const bool is_real = pass == PASSES;
        const int num_splits = is_real ? p.num_splits : 0;
        if (is_real) griddepcontrol_wait();
        Acc m = negative_infinity(), l = 0, sum = 0;
        int s0 = 0;
        do {
            const int count = num_splits - s0;
            Acc x[TILE], own_m = 0, share = 0;
            if (lane < count) own_m = state_at[s0 * width], share = state_at[s0 * width + 1];
#pragma unroll
            for (int s = 0; s < TILE; s++) x[s] = s < count ? column_at[(s0 + s) * width] : (Acc)0;
            if (share == 0) own_m = negative_infinity();
            // What m is before each split: a running maximum over the lanes.
            Acc running = own_m;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const Acc other = __shfl_up_sync(~0u, running, step);
                if (lane >= step) running = maximum(running, other);
            }
            Acc before = __shfl_up_sync(~0u, running, 1);
            before = lane == 0 ? m : maximum(before, m);
            m = maximum(m, __shfl_sync(~0u, running, 31));
            // Beyond the last split: weights 1 and 0 of 0, which change no sum.
            const Fold fold(before, own_m);
            const bool is_plain = lane >= count || (fold.next != 0 && (fold.before != 0 || s0 + lane == 0));
            __syncwarp();
            steps[warp][lane] = {fold.before, fold.next, fold.weigh(share), 0};
            __syncwarp();
            if (__all_sync(~0u, is_plain)) {
                // No weight has sunk to 0: Fold::add without its questions.
#pragma unroll
                for (int s = 0; s < TILE; s++) {
                    const Step f = steps[warp][s];
                    sum = plus(times(f.before, sum), times(f.next, x[s]));
                    l = plus(times(f.before, l), f.share);
                }
            } else {
#pragma unroll 1
                for (int s = 0; s < min(count, TILE); s++) {
                    Fold f;
                    f.before = steps[warp][s].before, f.next = steps[warp][s].next;
                    sum = f.add(sum, column_at[(s0 + s) * width]);
                    l = f.add_weighed(l, steps[warp][s].share);
                }
            }
            s0 += TILE;
        } while (s0 < num_splits);
        if (!is_real) l = 1, m = 0;
        const RowEnd row_end(p, row, m, l);
        if (is_real && inside) {
            if (column < p.head_dim_v) store_as(p.out, p.out_dtype, to, row_end.normalise(l, sum));
            if (column == 0) store_lse(p, row, row_end);
        }
    }
}
