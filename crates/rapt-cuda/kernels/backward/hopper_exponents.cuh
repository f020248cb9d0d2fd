// How scores become exponents of 2 in backward_hopper.cu and backward_hopper_wide.cu, and by how much a score rises with what is before its softcap.
//
//   x * c - lse                  rises by 1              c = scale * log2(e)
//   c * tanh(x * inner) - lse    rises by 1 - tanh^2     c = cap * log2(e), inner = scale / cap        [NATURAL]
//
// The tanh is found of p again, where no register keeps it: log2(p) + lse is c * tanh, if no bias is in the exponent.
// Deliberately absent: biases beside softcap, and slopes.

#pragma once
#include "common/math.cuh"

struct Exponents {
    float c, inner, inverse_c;
    __device__ Exponents(double scale, double softcap, double inverse_softcap)
        : c((float)(NATURAL ? softcap : scale) * LOG2_E), inner(NATURAL ? (float)(scale * inverse_softcap) : 1.f),
          inverse_c((float)inverse_softcap * LN_2) {
        static_assert(!NATURAL || MASK != ADDITIVE_MASK, "the bias would be taken for a part of the score");
    }
    __device__ float below(float x, float lse) const { return __fmaf_rn(NATURAL ? hyperbolic_tangent(x * inner) : x, c, -lse); }
    // Of a p of 0 nothing is known, and nothing needed: rows behind the last, and dead ones, have an infinite lse. NaN stays what p makes it.
    __device__ float rises(float p, float lse) const {
        const float t = (log2_approx(p) + lse) * inverse_c;
        return p > 0 ? __fmaf_rn(-t, t, 1) : 0.f;
    }
};
