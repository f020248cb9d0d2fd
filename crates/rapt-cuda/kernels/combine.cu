// Puts the splits of a row together, in an order that follows their number alone.
//
//   m = max m_s    w_s = exp(m_s - m)    l = sum w_s l_s    out = sum w_s acc_s / (l, sink included)
//
// One block per row. Splits come in runs of 512, a weight per thread; then 128 columns at a time, a run dealt to 4 groups
// of threads, the groups added in order.

constexpr int GROUPS = 4, COLUMNS = 128, THREADS = GROUPS * COLUMNS, WARPS = THREADS / 32;

// The sum over the block, the same for every thread.
__device__ inline Acc sum_of_block(Acc x, Acc (&shares)[WARPS]) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32] = x;
    __syncthreads();
    Acc sum = 0;
    for (int w = 0; w < WARPS; w++) sum += shares[w];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ Params p) {
    __shared__ Acc weights[THREADS], sums[GROUPS][COLUMNS], shares[WARPS];
    const int tid = threadIdx.x, group = tid / COLUMNS, lane = tid % COLUMNS;
    const int task_index = blockIdx.x / p.rows, r = blockIdx.x % p.rows, width = p.head_dim_v + 2;
    const Task task(p, task_index);
    const Row row(p, task, r);
    const Acc* from = partial(p, task_index, r, 0);

    Acc m = negative_infinity();
    for (int s = tid; s < p.num_splits; s += THREADS) m = maximum(m, from[(i64)s * width + p.head_dim_v]);
    for (int step = 16; step > 0; step /= 2) m = maximum(m, __shfl_xor_sync(~0u, m, step));
    if (tid % 32 == 0) shares[tid / 32] = m;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) m = maximum(m, shares[w]);

    // The weight of split s, and what it adds to l. A split without an attended key has sums of 0.
    auto weigh = [&](int s, Acc& l) {
        const Acc* part = from + (i64)s * width + p.head_dim_v;
        const Acc weight = s >= p.num_splits || part[1] == 0 ? (Acc)0 : exponential(part[0] - m);
        if (weight != 0) l += weight * part[1];
        return weight;
    };
    Acc l = 0;
    for (int s0 = 0; s0 < p.num_splits; s0 += THREADS) weights[tid] = weigh(s0 + tid, l);
    l = sum_of_block(l, shares);
    const Finished finished(p, row, m, l);
    if (tid == 0) store_lse(p, row, finished.lse);

    for (int column0 = 0; column0 < p.head_dim_v; column0 += COLUMNS) {
        const int column = column0 + lane;
        Acc sum = 0;
        for (int s0 = 0; s0 < p.num_splits; s0 += THREADS) {
            if (p.num_splits > THREADS) {
                Acc unused = 0;
                __syncthreads();
                weights[tid] = weigh(s0 + tid, unused);
                __syncthreads();
            }
            const int run = (min(THREADS, p.num_splits - s0) + GROUPS - 1) / GROUPS;
            const int end = min((group + 1) * run, p.num_splits - s0);
            if (column < p.head_dim_v) {
#pragma unroll 8
                for (int s = group * run; s < end; s++) sum += weighed(weights[s], from[(i64)(s0 + s) * width + column]);
            }
        }
        __syncthreads();
        sums[group][lane] = sum;
        __syncthreads();
        if (group == 0 && column < p.head_dim_v) {
            for (int g = 1; g < GROUPS; g++) sum += sums[g][lane];
            const i64 at = row.offset(p.out_stride) + column * p.out_stride[3];
            store_as(p.out, p.out_dtype, at, l == 0 ? (Acc)0 : sum * finished.factor);
        }
    }
}
