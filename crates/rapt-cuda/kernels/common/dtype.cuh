// Numbers as they are stored and as they are computed with: the storage dtype occurs at load and store, `Acc` between.
#pragma once
#include "common/types.cuh"

#if STORAGE == F64
typedef double Acc;
#else
typedef float Acc;
#endif

#if STORAGE == F64
typedef double Elem;
#elif STORAGE == F32
typedef float Elem;
#else
typedef u16 Elem;
#endif

__device__ inline float f16_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ inline float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ inline u16 float_to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ inline u16 double_to_f16(double x) {
    u16 bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(x));
    return bits;
}
__device__ inline u16 float_to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// An element of q, k or v.
__device__ inline Acc widen(Elem x) {
#if STORAGE == F16
    return f16_to_float(x);
#elif STORAGE == BF16
    return bf16_to_float(x);
#else
    return x;
#endif
}

// A number of a dtype known at run time: sinks, slopes, biases.
__device__ inline Acc load_as(const void* base, int dtype, i64 at) {
    switch (dtype) {
        case F16: return f16_to_float(((const u16*)base)[at]);
        case BF16: return bf16_to_float(((const u16*)base)[at]);
        case F32: return ((const float*)base)[at];
        default: return (Acc)((const double*)base)[at];
    }
}

__device__ inline void store_as(void* base, int dtype, i64 at, Acc x) {
    switch (dtype) {
        case F16:
#if STORAGE == F64
            ((u16*)base)[at] = double_to_f16(x);
#else
            ((u16*)base)[at] = float_to_f16(x);
#endif
            break;
        case BF16: ((u16*)base)[at] = float_to_bf16((float)x); break;
        case F32: ((float*)base)[at] = (float)x; break;
        default: ((double*)base)[at] = x;
    }
}

__device__ inline Acc negative_infinity() {
#if STORAGE == F64
    return __longlong_as_double(0xfff0000000000000ll);
#else
    return __uint_as_float(0xff800000u);
#endif
}
