// A request for gradients as the host passes it, and what becomes of one pair of a query and a key.
//
//   p  = exp(s - top) / sum        ds = p * (m * d_o.v - delta)        dx = ds * (1 - tanh^2)
//
// m is 1, or with dropout 0 where the weight was dropped and 1 / (1 - p) elsewhere; dv is of m * p. A dropped pair is attended: its NaN is not hidden.
// top and sum are lse and 1 but where lse is large (backward_rows.cu). A pair that is not attended weighs nothing, whatever lies there: it is
// MASKED, -0, in p and in ds. Every other ds has a zero added to it, so that none is -0.
// Deliberately absent: products, and softmax_scale, which dq and dk are multiplied with once they are sums.

#pragma once
#include "common/dropout.cuh"
#include "common/mask.cuh"
#include "common/scores.cuh"

// What is known of a row before any product: backward_rows.cu writes it, [batch, heads, q_len]. top is +inf where nothing is attended.
struct __align__(16) RowState {
    Acc top, delta, log2_sum, inverse_sum;
};

// Byte for byte BackwardParams of backward.rs.
struct BackwardParams {
    Params all;
    const void *d_o, *d_lse;
    void *dq, *dk, *dv, *d_mask, *d_sinks;
    RowState* states;
    // Of backward_hopper.cu alone, but for the words that are zeroed, which backward_halves.cu has too; else null: what is known of rows, [2, batch, heads, padded_rows], lse in units of log2 (+inf where nothing is
    // attended) and delta; sums of dq as backward_hopper.cu leaves them; and words that the first launch makes zeros: how many items are taken,
    // whether any head is odd, whether each is ([batch or sequences, kv_heads]), turns ([batch, heads, tiles of queries, 2]), and of sequences that lie one
    // after another zeros; and of these the tiles of keys (key_tile.cuh).
    float *log2_lse, *dq_sums;
    u32* zeroed;
    void* key_tiles;
    void* mask_sums;  // of a mask's gradient of several parts: their tiles (mask_tile.cuh)
    i64 d_o_stride[4], dq_stride[4], dk_stride[4], dv_stride[4], d_mask_stride[4], d_lse_stride[3], d_sinks_stride;
    int d_mask_size[4];                 // 1 where it is a sum
    const int *offsets_q, *offsets_kv;  // where sequences begin that lie one after another
    i64 offsets_q_step, offsets_kv_step;
    i64 mask_parts;                     // blocks that sum a tile of a mask's gradient
    int sequences, bottom_right;
    int batch, kv_heads, units;         // units: blocks of own rows of a head
    int dq_pairs, dk_pairs, dv_pairs;   // whether rows of a gradient can be written two elements at a time
    int dq_wide, dk_wide, dv_wide;      // the same, 16 bytes at a time
    int rows_wide;                      // whether rows of d_o and out can be read 16 bytes at a time, in the storage dtype
    int padded_rows, sum_rows, zeroed_words;  // rows of a head in log2_lse, and in dq_sums
    int key_units, key_set, key_step;   // how many tiles of keys there may be, of how many sequences at a time, and which is first (hopper_items.cuh)
    int long_queries;                   // and of sequences of how many queries on the other one is first
    int again;                          // blocks of a launch of all, of one that computes odd heads again
};
static_assert(sizeof(BackwardParams) == BACKWARD_BYTES, "backward.rs and backward/request.cuh disagree on BackwardParams");

// Beyond this much a lse is not relied on: its rounding is 2^-14 of a probability in float32.
constexpr int LARGE_LSE = 1024;

// As many zeros as a box of 128 rows has: the last of those words.
constexpr int ZERO_WORDS = 128 * 128 / 4;
__device__ inline const void* zeros_of(const BackwardParams& b) { return b.zeroed + (b.zeroed_words - ZERO_WORDS); }
// Batch entries, or sequences: heads of each are odd by themselves.
__device__ inline int entries_of(const BackwardParams& b) {
#if VARLEN
    return b.sequences;
#else
    return b.batch;
#endif
}
__device__ inline bool is_any_odd(const BackwardParams& b) { return b.zeroed[1] != 0; }
__device__ inline bool is_odd(const BackwardParams& b, int entry, int kv_head) {
    // Rows of no sequence are never computed again.
    return (u32)entry < (u32)entries_of(b) && b.zeroed[2 + entry * b.kv_heads + kv_head] != 0;
}
__device__ inline void note_odd(const BackwardParams& b, int entry, int kv_head) {
    if ((u32)entry < (u32)entries_of(b)) b.zeroed[1] = 1, b.zeroed[2 + entry * b.kv_heads + kv_head] = 1;
}
__device__ inline u32* turns_of(const BackwardParams& b) { return b.zeroed + 2 + entries_of(b) * b.kv_heads; }
__device__ inline int entry_of(int batch, const Sequence& sequence) {
#if VARLEN
    return sequence.number;
#else
    return batch;
#endif
}

__device__ inline Acc positive_infinity() { return -negative_infinity(); }
__device__ inline bool is_dead(const RowState& of) { return of.top == positive_infinity(); }
// `i`: where the query lies in its tensor.
__device__ inline i64 state_index(const Params& p, int batch, int head, int i) { return ((i64)batch * p.heads + head) * p.q_len + i; }
__device__ inline i64 offset_of(const i64 (&stride)[4], int batch, int head) { return batch * stride[0] + head * stride[1]; }
__device__ inline i64 row_offset(const i64 (&stride)[4], int batch, int head, int i) { return offset_of(stride, batch, head) + i * stride[2]; }

#if STORAGE == F64
__device__ inline bool is_masked_weight(Acc w) { return __double_as_longlong(w) == (i64)0x8000000000000000ull; }
#else
__device__ inline bool is_masked_weight(Acc w) { return __float_as_uint(w) == 0x80000000u; }
#endif
constexpr Acc MASKED = -(Acc)0;

// A score in natural units, and the derivative of softcap there.
struct Score {
    Acc s, rises;
    __device__ Score(const Params& p, Acc x, Acc slope, int distance, Acc bias) : s(product(x, (Acc)p.scale)), rises(1) {
        if (p.softcap != 0) {
            const Acc t = hyperbolic_tangent(s * (Acc)p.inverse_softcap);
            s = (Acc)p.softcap * t, rises = fused(-t, t, 1);
        }
        if (p.alibi != nullptr) s = fused(-slope, (Acc)abs(distance), s);
        if (MASK == ADDITIVE_MASK) s += bias;
    }
};
__device__ inline Acc slope_of(const Params& p, int head) {
    return p.alibi == nullptr ? (Acc)0 : load_as(p.alibi, p.alibi_dtype, head * p.alibi_stride);
}

// The queries of a sequence that see a key of first..end.
struct Seeing {
    int lo, hi;
    __device__ Seeing(const Params& p, const Sequence& of, int first, int end) {
        const int lag = of.lag(p), q_len = of.q_len(p);
        lo = clamp(first - p.hi_shift + lag + 1, 0, q_len), hi = clamp(end - p.lo_shift + lag, 0, q_len);
    }
};
