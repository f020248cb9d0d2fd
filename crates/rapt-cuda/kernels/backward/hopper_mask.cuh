// What a mask says of a tile of scores of backward_hopper.cu or backward_hopper_wide.cu, whose rows are keys: read from shared memory, where warps that
// load have left it as it lies in the tensor.
//
//   boolean   a row of 128 bytes for each query        additive   biases of 16 bits: boxes of 64 keys, a row of 128 bytes for each query
//
// Units of 16 bytes of a row are turned by the row (swizzle_128b), as TMA leaves them: what a warp reads falls into distinct banks. Where all queries
// share a row, that one is there. Keys and queries outside the tensor are zeros: positions leave such keys out, and such queries weigh nothing.

#pragma once
#include "backward/hopper_load.cuh"

// Of a group's keys, the first of them `keys`, and queries from column 8 * `first` of the tile on.
struct MaskColumns {
#if MASK == NO_MASK
    __device__ MaskColumns(const Params&, const Shared&, int, int) {}
    __device__ void load(int) {}
    __device__ float applied(float x, int, int, int) const { return x; }
#elif MASK == BOOL_MASK
    const Shared& sh;
    const int step;  // bytes to the queries of the next tile of 8 columns
    int key;         // this thread's first
    const int first;
    int seen[2];  // where it is, of the queries of this thread's columns 0 and 1
    __device__ MaskColumns(const Params& p, const Shared& sh, int keys, int first)
        : sh(sh), step(is_one_row(p) ? 0 : 8 * 128), key(keys + threadIdx.x % 128 / 32 * 16 + lane_row((int)threadIdx.x)), first(first) {}
    __device__ void load(int nt) {
        if (nt % 8 > 0) return;
        // Found again for each box: kept, they were spilled.
        const int at = opaque(key);
        for (int e = 0; e < 2; e++) seen[e] = step == 0 ? at : swizzle_128b(lane_column((int)threadIdx.x) + e, at / 2) + at % 2;
    }
    // -inf where the query does not see the key.
    __device__ float applied(float x, int nt, int r, int e) const { return sh.mask[0][seen[e] + (first + nt) * step + r * 8] != 0 ? x : negative_infinity(); }
#else
    const Shared& sh;
    const int step;
    const int box, first;
    u32 at;  // the row that this lane names for ldmatrix: of two eights of queries, and two of keys
    u32 four[4];
    __device__ MaskColumns(const Params& p, const Shared& sh, int keys, int first)
        : sh(sh), step(is_one_row(p) ? 0 : 8 * 128), box(keys / BOX), first(first) {}
    // Biases of columns 8 * nt.. and of the next 8, where nt is even.
    __device__ void load(int nt) {
        if (nt % 8 == 0) {
            // Found again for each box of queries: kept, it was spilled.
            const int thread = opaque((int)threadIdx.x), lane = thread % 32, unit = thread % 128 / 32 * 2 + lane / 8 % 2;
            at = shared_address(sh.mask[box]) + (first + nt + lane / 16) * step + swizzle_128b(step == 0 ? 0 : lane % 8, unit * 8);
        }
        if (nt % 2 == 0) ldmatrix_trans(four, at + nt % 8 * step);
    }
    // In units of log2, as x is.
    __device__ float applied(float x, int nt, int r, int e) const { return __fmaf_rn(bias_of_pair(four[nt % 2 * 2 + r], e), LOG2_E, x); }
#endif
};
