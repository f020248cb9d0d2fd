// The end of a row, in every kernel: what its sums are multiplied with, its lse, and splits put together.
//
//   out = acc_o / (row_sum + exp(sink - row_max))        lse = row_max + log(row_sum + exp(sink - row_max))
//
// A row with every key masked gives zeros and lse = -inf, even with a sink. row_max here is in natural units.
// Deliberately absent: the stores themselves, which follow each kernel's fragments.

#pragma once
#include "common/math.cuh"
#include "common/params.cuh"

// Split after split of a row: m (row_max), l (row_sum) and sums so far, and the next split's. A split without an attended key has
// l = 0 and sums of 0. decode.cu does this where a block sees all of a row, combine.cu elsewhere, with the same bits.
struct Fold {
    Acc before, next;  // weights
    // m_next is -inf where l_next is 0; m moves on.
    __device__ Fold(Acc& m, Acc m_next) {
        const Acc top = maximum(m, m_next);
        before = m == top ? (Acc)1 : exponential(m - top);
        next = m_next == negative_infinity() ? (Acc)0 : exponential(m_next - top);
        m = top;
    }
    __device__ Fold() {}
    __device__ Acc weigh(Acc x) const { return next == 0 && !is_finite(x) ? x : times(next, x); }
    __device__ Acc add_weighed(Acc sum, Acc x) const {
        return plus(before == 0 && !is_finite(sum) ? sum : times(before, sum), x);
    }
    __device__ Acc add(Acc sum, Acc x) const { return add_weighed(sum, weigh(x)); }
};

// What the sums of one row are multiplied with, and what its lse is made of.
struct RowEnd {
    Acc factor, top, total;
    // l = 0 means that every key was masked.
    __device__ RowEnd(const Params& p, const Row& row, Acc m, Acc l) {
        if (l == 0) {
            factor = 0, top = negative_infinity(), total = 1;
        } else if (p.sinks == nullptr) {
            factor = 1 / l, top = m, total = l;
        } else {
            Acc sink = load_as(p.sinks, p.sinks_dtype, row.head * p.sinks_stride);
            top = sink > m ? sink : m;
            Acc weight = exponential(m - top);
            total = fused(l, weight, exponential(sink - top)), factor = weight / total;
        }
    }
    __device__ Acc lse() const { return top + logarithm(total); }
};

__device__ inline void store_lse(const Params& p, const Row& row, const RowEnd& row_end) {
    if (p.lse != nullptr) {
        const i64 at = row.batch * p.lse_stride[0] + row.head * p.lse_stride[1] + row.i * p.lse_stride[2];
        ((Acc*)p.lse)[at] = row_end.lse();
    }
}
