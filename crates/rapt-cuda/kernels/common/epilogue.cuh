// The end of a row, in every kernel: what its sums are multiplied with, its lse, splits put together, and columns of out.
//
//   out = acc_o / (row_sum + exp(sink - row_max))        lse = row_max + log(row_sum + exp(sink - row_max))
//
// A row with every key masked gives zeros and lse = -inf, even with a sink. row_max here is in natural units.
//
// Columns of out go one by one (`store_column`, store_as) where out is of another dtype than q or its rows cannot be written 16 bytes
// at a time. Else a kernel writes at once what a thread has side by side: mma.cu and hopper/store.cuh 16 bytes of rows that went
// through shared memory (8 where lanes exchanged them), decode.cu and hopper_f32.cu 8 bytes out of registers, generic.cu and combine.cu
// nothing. hopper/store.cuh and combine.cu have the address as it was computed earlier: beside products, and before the wait for splits.
// By `store_column` hopper.cu has 8 instructions more (of 7432 at head_dim 128) and decode.cu 64 to 72 (of 10208 and 12344; NVRTC 13.2).

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
#if VARLEN
            if (row.is_bad) factor = top = not_a_number();
#elif RAGGED
            if (Sequence(p, row.batch).is_bad) factor = top = not_a_number();
#endif
        } else if (p.sinks == nullptr) {
            factor = 1 / l, top = m, total = l;
        } else {
            Acc sink = load_as(p.sinks, p.sinks_dtype, row.head * p.sinks_stride);
            top = sink > m ? sink : m;
            Acc weight = exponential(m - top);
            total = fused(l, weight, exponential(sink - top)), factor = weight / total;
        }
#if DROPOUT
        factor *= (Acc)p.dropping.scale;
#endif
    }
    // A column of out: 0 (or NaN) where every key was masked, whatever the sum is.
    __device__ Acc normalise(Acc l, Acc sum) const { return l == 0 ? factor : sum * factor; }
    __device__ Acc lse() const { return top + logarithm(total); }
};

__device__ inline void store_lse(const Params& p, const Row& row, const RowEnd& row_end) {
    if (p.lse != nullptr) {
        const i64 at = row.batch * p.lse_stride[0] + row.head * p.lse_stride[1] + row.place() * p.lse_stride[2];
        ((Acc*)p.lse)[at] = row_end.lse();
    }
}

// One column of the row of out that begins at `row`, in out's dtype.
__device__ inline void store_column(const Params& p, i64 row, int column, Acc x) {
    if (column < p.head_dim_v) store_as(p.out, p.out_dtype, row + column * p.out_stride[3], x);
}
