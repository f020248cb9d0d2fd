// The rows of a block of wide heads, and their softmax: 64 rows, 16 to a pair of warps.
//
//   row_max' = max(row_max, max s)      of both warps' keys, through shared memory
//   p                                   of a warp's half of the keys
//   acc_o                               of a warp's half of the value columns
//
// Deliberately absent: the products (wide/half.cuh, wide/tf32.cuh), and what is loaded when.

#pragma once
#include "common/epilogue.cuh"
#include "wide/half.cuh"
#include "wide/tf32.cuh"

constexpr int OWN = KEYS / 16;  // tiles of 8 keys of which a warp computes the products

// Of each row, what the two warps share.
typedef float Beside[4][2][16];

// A warp of a pair: its 16 rows, its half of the keys and of the value columns, and what it shares with the other.
struct Warp {
    int lane, slab, half;
    Beside& beside;
    __device__ explicit Warp(Beside& beside) : lane(threadIdx.x % 32), slab(threadIdx.x / 32 % 4), half(threadIdx.x / 128), beside(beside) {}

    // Numbers of a lane's two rows, which all lanes of a row have alike; behind `sync_pair`, `shared` are those of either warp.
    __device__ void share(const float (&x)[2]) {
        if (lane % 4 == 0) beside[slab][half][lane_row(lane)] = x[0], beside[slab][half][lane_row(lane) + 8] = x[1];
    }
    __device__ float shared(int of, int h) const { return beside[slab][of][lane_row(lane) + h * 8]; }
    __device__ void sync_pair() { bar_sync(1 + slab, 64); }
};

// The sums of a warp's 16 rows and half of the value columns; row_sum is the thread's own share, of the warp's keys, until `reduce`.
struct RowSums {
    float row_max[1][2], row_sum[2];
    Accumulator<HALF / 8> acc_o[1];

    __device__ void clear() {
        row_max[0][0] = row_max[0][1] = negative_infinity(), row_sum[0] = row_sum[1] = 0;
        zero(acc_o[0]);
    }

    // Scores of a warp's keys become p; `top` are the maxima of both warps. A tile's sum is rounded into row_sum once.
    template <bool CAREFUL>
    __device__ void weigh(Accumulator<OWN> (&s)[1], const float (&top)[2], float c) {
        float factor[2] = {1, 1}, exponent_max[1][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float rise = (top[h] - row_max[0][h]) * c;  // NaN where there is no key yet
            if (rise > RISE) factor[h] = exp2_approx(-rise), row_max[0][h] = top[h];
        }
        if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) rescale(acc_o[0], factor, CAREFUL);
        subtract_far(s, row_max, exponent_max, c);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0;
#pragma unroll
            for (int nt = 0; nt < OWN; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[0][nt][h * 2 + e];
                    const bool masked = x == negative_infinity();
                    x = exponential_of(x, c, exponent_max[0][h]);
                    sum += x;
                    if (CAREFUL && masked) x = -0.f;
                }
            row_sum[h] = __fmaf_rn(row_sum[h], factor[h], sum);
        }
    }

    // row_sum of the whole row.
    __device__ void reduce(Warp& warp) {
#pragma unroll
        for (int h = 0; h < 2; h++) row_sum[h] = sum_of_lanes<4>(row_sum[h]);
        warp.share(row_sum);
        warp.sync_pair();
#pragma unroll
        for (int h = 0; h < 2; h++) row_sum[h] = warp.shared(0, h) + warp.shared(1, h);
    }
};

// Sums of a row and a chunk of keys for combine.cu.
__device__ inline void store_partial(const Params& p, float* to, const RowSums& sums, int h, int half) {
    const bool even = p.head_dim_v % 2 == 0;  // rows begin at whole pairs then
#pragma unroll
    for (int i = 0; i < HALF / 8; i++) {
        const int column = half * HALF + pair_column(i);
        const float2 x = sum_pair(sums.acc_o[0], i, h);
        if (even) {
            if (column < p.head_dim_v) *(float2*)(to + column) = x;
        } else {
            if (column < p.head_dim_v) to[column] = x.x;
            if (column + 1 < p.head_dim_v) to[column + 1] = x.y;
        }
    }
    if (half == 0 && threadIdx.x % 4 == 0) {
        to[p.head_dim_v] = natural_max(p, sums.row_max[0][h]), to[p.head_dim_v + 1] = sums.row_sum[h];
    }
}

// A row of out, half of its columns.
__device__ inline void store_row(const Params& p, const Row& row, const RowSums& sums, int h, int half) {
    const float l = sums.row_sum[h];
    const RowEnd row_end(p, row, natural_max(p, sums.row_max[0][h]), l);
    if (half == 0 && threadIdx.x % 4 == 0) store_lse(p, row, row_end);
    const i64 to = row.offset(p.out_stride);
#pragma unroll
    for (int i = 0; i < HALF / 8; i++) {
        const int column = half * HALF + pair_column(i);
        const float2 sum = sum_pair(sums.acc_o[0], i, h);
        const float2 x = {row_end.normalise(l, sum.x), row_end.normalise(l, sum.y)};
        if (p.out_vector) {
            if (column < p.head_dim_v) store_pair(p.out, to + column, x);
        } else {
            store_column(p, to, column, x.x), store_column(p, to, column + 1, x.y);
        }
    }
}
