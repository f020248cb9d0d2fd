// What deviation.cu found of rows, to what is known of each head: the largest epsilon, and sums of squares.
//
//   for each row of the head: where keys are split, its chunks put together (deviation/row.cuh), else as it was left
//
// A block for each head, a warp for each row. Deliberately absent: keys and values.

#include "deviation/row.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

struct Shared {
    Deviation rows[WARPS];
    float largest[2][WARPS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and deviation_end.cu disagree on shared memory");

__device__ inline float max_of_warp(float x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// The chunks of a row, put together by a warp.
__device__ inline Deviation put_together(const DeviationParams& of, const Row& row, i64 matrix, const float (&largest)[2]) {
    const Params& p = of.all;
    const int lane = threadIdx.x % 32;
    const i64 at = row_index(p, row);
    float row_max = negative_infinity(), most[MOST] = {};
    for (int split = 0; split < p.num_splits; split++) row_max = maximum(row_max, partial_row(of, at, split).row_max);
    double sums[SUMS] = {};
    for (int split = 0; split < p.num_splits; split++) {
        const PartialRow& part = partial_row(of, at, split);
        // A chunk that no query attends weighs nothing, and one that has the greatest score counts as it is.
        const double by = part.row_max == row_max ? 1 : exponential(part.row_max - row_max);
#pragma unroll
        for (int n = 0; n < SUMS; n++) sums[n] += part.sums[n] * (n < SQUARES ? by : by * by);
#pragma unroll
        for (int n = 0; n < MOST; n++) most[n] = larger(part.most[n], most[n]);
    }
    const double factor = row_factor(p, row.head, sums[P], row_max);
    ColumnSums columns;
    for (int column = lane; column < p.head_dim_v; column += 32) {
        float o = 0, g = 0;
        for (int split = 0; split < p.num_splits; split++) {
            PartialRow& part = partial_row(of, at, split);
            const float by = part.row_max == row_max ? 1 : exponential(part.row_max - row_max);
            o += part.columns()[column] * by, g += part.columns()[p.head_dim_v + column] * (by * by);
        }
        columns.add(o, g, factor, of.v.numbers == nullptr ? 0 : of.v.mean(matrix)[column]);
    }
    const i64 q_row = row.offset(p.q_stride);
    for (int d = lane; d < p.head_dim; d += 32) {
        const float share = of.k.numbers == nullptr ? 0 : of.k.share(matrix)[d];
        columns.add_query(widen(((const Elem*)p.q)[q_row + d * p.q_stride[3]]), share);
    }
    columns.over_lanes<32>();
    return deviation_of(of, {matrix, factor, sums, most, largest}, columns);
}

__device__ inline void add(Deviation& to, const Deviation& row) {
    to.epsilon = larger(row.epsilon, to.epsilon);
    to.estimate += row.estimate, to.before += row.before, to.after += row.after, to.norm += row.norm;
}

extern "C" __global__ void __launch_bounds__(THREADS) deviation_end(const __grid_constant__ DeviationParams of) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const Params& p = of.all;
    const int batch = blockIdx.x / p.heads, head = blockIdx.x - batch * p.heads, warp = threadIdx.x / 32;
    const i64 matrix = matrix_index(p, batch, head);
    const float of_thread[2] = {largest_of(of.k, matrix, threadIdx.x, THREADS), largest_of(of.v, matrix, threadIdx.x, THREADS)};
    for (int n = 0; n < 2; n++) {
        const float most = max_of_warp(of_thread[n]);
        if (threadIdx.x % 32 == 0) sh.largest[n][warp] = most;
    }
    __syncthreads();
    float largest[2] = {};
    for (int n = 0; n < 2; n++) {
        for (int of_warp = 0; of_warp < WARPS; of_warp++) largest[n] = fmaxf(largest[n], sh.largest[n][of_warp]);
        if (largest[n] == 0) largest[n] = 1;
    }
    Deviation all = {0, 0, 0, 0, 0};
    for (int i = warp; i < p.q_len; i += WARPS) {
        const Row row(p, Task(batch, head, Sequence(p, batch)), i);
        add(all, p.num_splits > 1 ? put_together(of, row, matrix, largest) : of.rows[row_index(p, row)]);
    }
    if (threadIdx.x % 32 == 0) sh.rows[warp] = all;
    __syncthreads();
    if (threadIdx.x != 0) return;
    Deviation found = {0, 0, 0, 0, 0};
    for (int n = 0; n < WARPS; n++) add(found, sh.rows[n]);
    of.heads[blockIdx.x] = {found.epsilon, sqrt(found.estimate), sqrt(found.before), sqrt(found.after), sqrt(found.norm)};
}
