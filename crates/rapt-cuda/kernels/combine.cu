// Folds the splits of a row, one after another (Fold in common.cu):
//
//   m = max m_s    acc = exp(m_before - m) acc + exp(m_s - m) acc_s    out = acc / (l, sink included)
//
// A block takes 64 columns of a row: splits come 64 at a time into shared memory, all under way at once, while a warp finds
// their weights; all threads weigh, and a thread per column adds. It is launched while the splits are still computed, where
// the architecture can, and waits for them here.

constexpr int COLUMNS = 64, THREADS = 256, TILE = 64;

__device__ inline void copy_async(Acc* to, const Acc* from) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"((int)sizeof(Acc)));
}

extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ Params p) {
    __shared__ Acc x[TILE][COLUMNS], share[TILE], end_m;
    __shared__ Fold folds[TILE];
    const int tid = threadIdx.x, lane = tid % 32;
    const int column_blocks = (p.head_dim_v + COLUMNS - 1) / COLUMNS;
    const int column0 = blockIdx.x % column_blocks * COLUMNS, all_rows = blockIdx.x / column_blocks;
    const int task_index = all_rows / p.rows, r = all_rows % p.rows;
    const i64 width = p.head_dim_v + 2;
    const Task task(p, task_index);
    const Row row(p, task, r);
    const Acc* from = partial(p, task_index, r, 0);
    const int columns = min(COLUMNS, p.head_dim_v - column0);
    wait_for_predecessors();

    Acc m = negative_infinity(), l = 0, sum = 0;  // m: of the first warp alone
    for (int s0 = 0; s0 < p.num_splits; s0 += TILE) {
        const int count = min(TILE, p.num_splits - s0), c = tid % COLUMNS;
        const Acc* at = from + s0 * width;
        for (int s = tid / COLUMNS; s < count; s += THREADS / COLUMNS) {
            if (c < columns) copy_async(&x[s][c], at + s * width + column0 + c);
        }
        if (tid < 32) {
            Acc own[TILE / 32];
#pragma unroll
            for (int n = 0; n < TILE / 32; n++) {
                const int s = n * 32 + lane;
                const Acc part = s < count ? at[s * width + p.head_dim_v + 1] : (Acc)0;
                own[n] = s < count ? at[s * width + p.head_dim_v] : (Acc)0;
                if (part == 0) own[n] = negative_infinity();
                share[s] = part;
            }
#pragma unroll
            for (int n = 0; n < TILE / 32; n++) {
                // What m is before each split: a running maximum over the lanes.
                Acc running = own[n];
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const Acc other = __shfl_up_sync(~0u, running, step);
                    if (lane >= step) running = maximum(running, other);
                }
                Acc before = __shfl_up_sync(~0u, running, 1);
                before = lane == 0 ? m : maximum(before, m);
                folds[n * 32 + lane] = Fold(before, own[n]);
                m = maximum(m, __shfl_sync(~0u, running, 31));
            }
            if (lane == 0) end_m = m;
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        for (int s = tid / COLUMNS; s < count; s += THREADS / COLUMNS) x[s][c] = folds[s].weigh(x[s][c]);
        __syncthreads();
        if (tid < COLUMNS) {
#pragma unroll 8
            for (int s = 0; s < count; s++) {
                sum = folds[s].add_weighed(sum, x[s][tid]);
                l = folds[s].add_weighed(l, folds[s].weigh(share[s]));
            }
        }
        __syncthreads();
    }
    if (tid < columns) {
        const Finished finished(p, row, end_m, l);
        const i64 to = row.offset(p.out_stride) + (column0 + tid) * p.out_stride[3];
        store_as(p.out, p.out_dtype, to, l == 0 ? (Acc)0 : sum * finished.factor);
        if (tid == 0 && column0 == 0) store_lse(p, row, finished.lse);
    }
}
