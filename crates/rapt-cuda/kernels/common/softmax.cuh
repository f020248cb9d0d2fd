// The softmax of every kernel: row maxima, weights and sums, key block by key block ("online").
//
//   for each block of keys
//     row_max' = max(row_max, max s)
//     acc_o, row_sum *= 2^((row_max - row_max')*c)     `rescale`
//     p = 2^((s - row_max')*c)                         `subtract_far`, `exponential_of`, `pack_weights`
//     row_sum += sum p;  acc_o += p.v                  p rounded to the storage dtype, row_sum of the unrounded p
//
// Scores are compared raw where they may be (NATURAL 0) and the scale goes into the exponent:
//
//   raw       p = 2^(s*c - row_max*c)       c = softmax_scale * log2(e)
//   natural   p = 2^((s - row_max)*c)       c = log2(e), s with scale, softcap, slope and bias in it
//
// OnlineSoftmax (online_softmax.cuh) is that of mma.cu and decode.cu. hopper_f32.cu, hopper/softmax.cuh and generic.cu have the same
// steps in an order of their own, and say why at the place.
//
// Values that nobody attends: a block first multiplies every p, 0 where masked. If a sum is not finite in the end, it runs
// again as CAREFUL: a masked p is -0 there, and values that are not finite reach only rows that attend them. Finite sums
// have the same bits both ways.
// Deliberately absent: scale, softcap, slopes and masks (mask.cuh), and what rows are divided by (epilogue.cuh).

#pragma once
#include "common/fragment.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "common/ptx.cuh"

// Beyond this row_max*c is off by more than a unit in the exponent: s - row_max is taken first then.
constexpr float EXACT = 4194304.f;
// By how many powers of 2 a row's maximum may rise before its sums are rescaled: weights are at most 2^SLACK.
constexpr float SLACK = 8;

// c, the factor of an exponent of 2, and a row's maximum in natural units.
__device__ inline float exponent_factor(const Params& p) { return NATURAL ? LOG2_E : (float)(p.scale * 1.4426950408889634); }
__device__ inline float natural_max(const Params& p, float row_max) { return NATURAL ? row_max : row_max * (float)p.scale; }

// The maximum, and the sum, over LANES neighbouring lanes; each has it.
template <int LANES>
__device__ inline Acc max_of_lanes(Acc x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) x = maximum(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
template <int LANES>
__device__ inline Acc sum_of_lanes(Acc x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

#if STORAGE != F64
// The maximum of `start` and the scores of row h of a lane's two.
template <int NT>
__device__ inline float max_of_row(const Accumulator<NT>& s, int h, float start) {
    float x = start;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) x = fmaxf(x, fmaxf(s[nt][h * 2], s[nt][h * 2 + 1]));
    return max_of_lanes<4>(x);
}

// Sums follow a maximum that has risen; `careful`: an infinity stays one where a factor is 0.
template <int TILES>
__device__ inline void rescale(Accumulator<TILES>& acc_o, const float (&factor)[2], bool careful) {
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float& sum = acc_o[nt][e];
            sum = careful ? weighed(factor[e / 2], sum) : sum * factor[e / 2];
        }
}

// What is taken from a raw exponent: row_max*c. Where that is inexact, and where scores are natural, `far` row maxima are taken from
// the scores themselves, and 0 from the exponents. Each row by itself: its bits are its own. A row without a key yet keeps row_max
// at -inf and compares with 0.
template <int MT, int NT>
__device__ inline void subtract_far(
    Accumulator<NT> (&s)[MT], const float (&row_max)[MT][2], float (&exponent_max)[MT][2], float c
) {
    bool any_far = NATURAL;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float base = row_max[mt][h] == negative_infinity() ? 0.f : row_max[mt][h];
            exponent_max[mt][h] = NATURAL ? base : base * c;
            if (!NATURAL) any_far |= fabsf(exponent_max[mt][h]) > EXACT;
        }
    if (!NATURAL && !__any_sync(~0u, any_far)) return;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const bool far = NATURAL || fabsf(exponent_max[mt][h]) > EXACT;
            const float base = far && row_max[mt][h] != negative_infinity() ? row_max[mt][h] : 0.f;
            if (far) exponent_max[mt][h] = 0;
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) s[mt][nt][h * 2 + e] -= base;
        }
}
// 2^(x*c - subtracted), and the weight of a score after `subtract_far`, which leaves 0 to subtract where scores are natural.
__device__ inline float exponential_below(float x, float c, float subtracted) { return exp2_approx(__fmaf_rn(x, c, -subtracted)); }
__device__ inline float exponential_of(float x, float c, float exponent_max) {
    return NATURAL ? exp2_approx(x * c) : exponential_below(x, c, exponent_max);
}

// Weights become the operand of the product with v, rounded to the dtype of that: the storage dtype as a rule.
template <int NT, bool HALF = MMA_HALF>
__device__ inline void pack_weights(OperandA<NT / 2>& p, const Accumulator<NT>& s) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int r = 0; r < 2; r++) p[operand_tile(nt)][operand_word(nt, r)] = pack_as<HALF>(s[nt][r * 2], s[nt][r * 2 + 1]);
}

// NaN where a sum is infinite or NaN, else 0: a multiply-add a sum, in four chains.
template <int TILES>
__device__ inline float non_finite(const Accumulator<TILES>& acc_o) {
    float zero[4] = {};
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) zero[e] = __fmaf_rn(acc_o[nt][e], 0.f, zero[e]);
    return zero[0] + zero[1] + (zero[2] + zero[3]);
}
#endif
