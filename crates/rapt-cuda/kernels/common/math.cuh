// Arithmetic of `Acc` whose rounding is fixed by name: the compiler must not fuse a product and a sum in one kernel alone.
#pragma once
#include "common/dtype.cuh"

__device__ inline Acc maximum(Acc a, Acc b) {  // passes over NaN
#if STORAGE == F64
    return fmax(a, b);
#else
    return fmaxf(a, b);
#endif
}
__device__ inline Acc exponential(Acc x) {
#if STORAGE == F64
    return exp(x);
#else
    return expf(x);
#endif
}
__device__ inline Acc logarithm(Acc x) {
#if STORAGE == F64
    return log(x);
#else
    return logf(x);
#endif
}
__device__ inline Acc hyperbolic_tangent(Acc x) {
#if STORAGE == F64
    return tanh(x);
#else
    return tanhf(x);
#endif
}
__device__ inline bool is_finite(Acc x) { return x - x == (Acc)0; }
// a * b + c rounded once, and a * b rounded by itself whatever is added to it later: where one sum is reached in two ways, the
// compiler must not fuse in one of them alone.
#if STORAGE == F64
__device__ inline Acc fused(Acc a, Acc b, Acc c) { return __fma_rn(a, b, c); }
__device__ inline Acc product(Acc a, Acc b) { return __dmul_rn(a, b); }
#else
__device__ inline Acc fused(Acc a, Acc b, Acc c) { return __fmaf_rn(a, b, c); }
__device__ inline Acc product(Acc a, Acc b) { return __fmul_rn(a, b); }
#endif
// weight * x for a weight that is above 0 even where it has sunk below the least number: an attended infinity stays one.
__device__ inline bool outweighs(Acc weight, Acc x) { return weight == 0 && !is_finite(x); }
__device__ inline Acc weighed(Acc weight, Acc x) { return outweighs(weight, x) ? x : product(weight, x); }

// Rounded as written, in every kernel: what two of them compute of the same numbers is the same.
__device__ inline Acc times(Acc a, Acc b) {
#if STORAGE == F64
    return __dmul_rn(a, b);
#else
    return __fmul_rn(a, b);
#endif
}
__device__ inline Acc plus(Acc a, Acc b) {
#if STORAGE == F64
    return __dadd_rn(a, b);
#else
    return __fadd_rn(a, b);
#endif
}
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;
__device__ inline float not_a_number() { return __uint_as_float(0x7fffffffu); }
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
