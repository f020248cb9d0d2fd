// Folds the splits of a row, one after another (Fold of common/epilogue.cuh):
//
//   m = max m_s    acc = exp(m_before - m) acc + exp(m_s - m) acc_s    out = acc / (l, sink included)
//
// A warp takes 32 columns of a row, a lane a column, and TILE splits at a time: all loads under way at once, then a lane finds
// the weights of a split, then every lane adds. It is launched while the splits are still computed, where the architecture
// can, and waits for them here; the blocks are small, that they find room beside those of decode.cu.
//
// Where rows are many (wide.cu), instructions are the limit and not the way of one row: a lane takes LANE_COLUMNS columns, each lane finds
// the weights, and one split follows another. The bits are the same.

#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "decode/deal.cuh"

constexpr int COLUMNS = 32 * LANE_COLUMNS, THREADS = 64, TILE = 32;

struct __align__(4 * sizeof(Acc)) Step {
    Acc before, next, share, unused;
};

// A row whose splits are folded, and COLUMNS columns of it.
struct Place {
    int task_index, r, column0;
    bool inside;
    Task task;
#if RAGGED
    // Nowhere.
    __device__ Place() : task_index(0), r(0), column0(0), inside(false), task(0, 0, Sequence()) {}
    // A row is left here where its splits are of several blocks of decode.cu: one that is cut by a block's beginning, the first such
    // where they are several. Lengths may be what a launch before this one writes.
    __device__ Place(const Params& p, u32 place) : inside(false), task(0, 0, Sequence()) {
        const u32 column_blocks = (p.head_dim_v + COLUMNS - 1) / COLUMNS, all_rows = place / column_blocks;
        column0 = (place - all_rows * column_blocks) * COLUMNS;
        if (p.ragged.blocks == 0) {
            task_index = all_rows / p.rows, r = all_rows - task_index * p.rows;
            if (task_index >= divide(divide(p.items, p.by_num_splits), p.by_row_blocks)) return;
            task = Task(p, task_index);
            inside = task.sequence.num_splits(p) > 1;
            return;
        }
        const u32 rows = min(16, p.rows), block = all_rows / rows + 1;
        const Deal deal(p);
        const u32 unit = deal.first(block);
        if (deal.whole_rows || unit >= deal.items) return;
        const Item item(p, deal, unit);
        task_index = item.task_index(p), r = item.r0() + all_rows % rows, task = item.task(p);
        inside = item.split > 0 && item.row_begin >= deal.first(block - 1) && r < p.rows;
    }
#else
    __device__ Place(const Params& p, u32 place) : Place(p, place, (p.head_dim_v + COLUMNS - 1) / COLUMNS) {}

  private:
    __device__ Place(const Params& p, u32 place, u32 column_blocks) : Place(p, place, column_blocks, place / column_blocks) {}
    __device__ Place(const Params& p, u32 place, u32 column_blocks, u32 all_rows)
        : task_index(all_rows / p.rows),
          r(all_rows % p.rows),
          column0((place - all_rows * column_blocks) * COLUMNS),
          inside(task_index < divide(divide(p.items, p.by_num_splits), p.by_row_blocks)),
          task(p, inside ? task_index : 0) {
        if (!inside) task_index = 0;
    }
#endif
};

#if LANE_COLUMNS > 1
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ Params p) {
    constexpr int AT_ONCE = 4;  // splits whose loads are under way together
    const int lane = threadIdx.x % 32;
    const Place place(p, blockIdx.x * (THREADS / 32) + threadIdx.x / 32);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (!place.inside) return;
    const Row row(p, place.task, place.r);
    const Acc* const first = partial(p, place.task_index, place.r, 0);
    const int width = p.head_dim_v + 2, column = place.column0 + lane;
    Acc m = negative_infinity(), l = 0, sum[LANE_COLUMNS] = {};
#pragma unroll 1
    for (int s0 = 0; s0 < p.num_splits; s0 += AT_ONCE) {
        Acc x[AT_ONCE][LANE_COLUMNS], own_m[AT_ONCE], share[AT_ONCE];
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) {
            const Acc* const from = first + (i64)min(s0 + s, p.num_splits - 1) * width;
            own_m[s] = from[p.head_dim_v], share[s] = from[p.head_dim_v + 1];
#pragma unroll
            for (int n = 0; n < LANE_COLUMNS; n++) x[s][n] = from[min(column + n * 32, p.head_dim_v - 1)];
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) {
            if (s0 + s >= p.num_splits) break;
            const Fold fold(m, share[s] == 0 ? negative_infinity() : own_m[s]);
            l = fold.add(l, share[s]);
#pragma unroll
            for (int n = 0; n < LANE_COLUMNS; n++) sum[n] = fold.add(sum[n], x[s][n]);
        }
    }
    const RowEnd row_end(p, row, m, l);
    const i64 to = row.offset(p.out_stride);
#pragma unroll
    for (int n = 0; n < LANE_COLUMNS; n++) store_column(p, to, column + n * 32, row_end.normalise(l, sum[n]));
    if (column == 0) store_lse(p, row, row_end);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ Params p) {
    __shared__ Step steps[THREADS / 32][TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 index = blockIdx.x * (THREADS / 32) + warp;
    const i64 width = p.head_dim_v + 2;
#if RAGGED
    Place place;
#else
    const Place place(p, index);
#endif
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
        if (is_real) griddepcontrol_wait();
#if RAGGED
        // Lengths may be what a launch before this one writes.
        if (is_real) place = Place(p, index);
        if (is_real && !place.inside) return;
#endif
        const bool inside = place.inside;
        const int task_index = place.task_index, r = place.r, column = place.column0 + lane;
        const Task& task = place.task;
        const Row row(p, task, r);
        const Acc* column_at = partial(p, task_index, r, 0) + min(column, p.head_dim_v - 1);
        const Acc* state_at = partial(p, task_index, r, lane) + p.head_dim_v;
        const i64 to = row.offset(p.out_stride) + column * p.out_stride[3];
        const int num_splits = is_real ? task.sequence.num_splits(p) : 0;
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
#endif
