// Eight codes of a row as float16 or bfloat16 in their order: exact, and not finite where the code is not.
//
//   float16    int8, uint8, int4   bits in place of a mantissa (1024 + n), less a number
//              e4m3fn              by one conversion, or bits in their place times 2^8
//              e5m2                its bits are the upper half
//              e2m1                the upper half out of a table of 8 bytes, beside the sign
//   bfloat16   int8, uint8         bits in place of a mantissa (128 + n, of 7 bits), less a power of two by the highest bit
//              int4, e2m1          as above
//              e4m3fn, e5m2        by way of float16
//
// A zero point of uint8 is taken away here. Plain C++: tests/fragments.rs compiles this file for the host and compares every code.
// Deliberately absent: where factors of 32 bits go.

#pragma once
#include "common/codes.cuh"
#include "common/ptx.cuh"

__device__ constexpr u32 twice(u32 half) { return half << 16 | half; }
// Of pairs, rounded once.
template <bool HALF>
__device__ inline u32 multiply_pairs(u32 a, u32 b) {
    return HALF ? fma_f16x2(a, b, twice(0x8000)) : fma_bf16x2(a, b, twice(0x8000));
}
template <bool HALF>
__device__ inline u32 add_pairs(u32 a, u32 b) {
    return HALF ? fma_f16x2(a, twice(0x3c00), b) : fma_bf16x2(a, twice(0x3f80), b);
}

// Bytes 2*HIGH and the next of a word as the upper halves, or the lower ones, of a pair.
template <int HIGH>
__device__ inline u32 upper_halves(u32 w) {
    return __byte_perm(w, 0, HIGH ? 0x3424 : 0x1404);
}
template <int HIGH>
__device__ inline u32 lower_halves(u32 w) {
    return __byte_perm(w, 0, HIGH ? 0x4342 : 0x4140);
}

// Two bytes of a word as pairs.
template <int KIND, bool HALF, int HIGH>
__device__ inline u32 pair_of_bytes(u32 w, u32 zero_point) {
    if constexpr (KIND == INT8 && HALF) {
        return add_pairs<true>(__byte_perm(w ^ 0x80808080u, 0x64646464u, HIGH ? 0x4342 : 0x4140), twice(0xe480));
    } else if constexpr (KIND == UINT8 && HALF) {
        // -(1024 + zero point) has the zero point as its mantissa.
        return add_pairs<true>(__byte_perm(w, 0x64646464u, HIGH ? 0x4342 : 0x4140), twice(0xe400 | zero_point));
    } else if constexpr (KIND == INT8 || KIND == UINT8) {
        const u32 x = lower_halves<HIGH>(w);
        // 128 + the lower 7 bits, less 128 or 256: uint8 is 128 too small then.
        const u32 low = (x & twice(0x7f)) | twice(0x4300), high = ((KIND == INT8 ? x : ~x) & twice(0x80)) | twice(0xc300);
        const u32 sum = add_pairs<false>(low, high);
        if constexpr (KIND == INT8) return sum;
        // 128 less the zero point: both have few bits.
        return add_pairs<false>(sum, pack_as<false>(128.f - (float)zero_point, 128.f - (float)zero_point));
    } else {
        u32 half;
        if constexpr (KIND == E5M2) {
            half = upper_halves<HIGH>(w);
        } else {
#if __CUDA_ARCH__ >= 890
            half = e4m3x2_to_f16x2(HIGH ? w >> 16 : w);
#else
            const u32 x = upper_halves<HIGH>(w);
            half = multiply_pairs<true>((x >> 1 & twice(0x3f80)) | (x & twice(0x8000)), twice(0x5c00));
            // In bit 7 of a byte whether it is NaN.
            const u32 odd = upper_halves<HIGH>((w & 0x7f7f7f7fu) + 0x01010101u) >> 15 & twice(1);
            half |= odd * 0x7e00u;
#endif
        }
        return HALF ? half : pack_as<false>(f16_to_float(half), f16_to_float(half >> 16));
    }
}

// Eight codes of 4 bits of a word as pairs.
template <int KIND, bool HALF>
__device__ inline void pairs_of_nibbles(u32 (&pairs)[4], u32 w) {
    if constexpr (KIND == INT4) {
        // 1024 + 8 + code, or 128 + 8 + code, less as much: numbers n and n + 4 are a pair at first.
        constexpr u32 BIASED = HALF ? 0x6408 : 0x4308, BIAS = HALF ? 0xe408 : 0xc308;
        u32 x[4];
#pragma unroll
        for (int n = 0; n < 4; n++) x[n] = add_pairs<HALF>((w >> 4 * n & twice(0xf)) ^ twice(BIASED), twice(BIAS));
        pairs[0] = __byte_perm(x[0], x[1], 0x5410), pairs[1] = __byte_perm(x[2], x[3], 0x5410);
        pairs[2] = __byte_perm(x[0], x[1], 0x7632), pairs[3] = __byte_perm(x[2], x[3], 0x7632);
    } else {
        // 0, 0.5, 1, 1.5, 2, 3, 4, 6: upper bytes, and lower ones, which float16 has none of.
        constexpr u32 UPPER[2] = {HALF ? 0x3e3c3800u : 0x3f3f3f00u, HALF ? 0x46444240u : 0x40404040u};
        constexpr u32 LOWER[2] = {0xc0800000u, 0xc0804000u};
        const u32 size = w & 0x77777777u, even = w << 4 & 0x80808080u, odd = w & 0x80808080u;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 which = half == 0 ? size : size >> 16;
            const u32 upper = __byte_perm(UPPER[0], UPPER[1], which) | __byte_perm(even, odd, half == 0 ? 0x5140 : 0x7362);
            if constexpr (HALF) {
                pairs[half * 2] = upper_halves<0>(upper), pairs[half * 2 + 1] = upper_halves<1>(upper);
            } else {
                const u32 lower = __byte_perm(LOWER[0], LOWER[1], which);
                pairs[half * 2] = __byte_perm(lower, upper, 0x5140), pairs[half * 2 + 1] = __byte_perm(lower, upper, 0x7362);
            }
        }
    }
}

// A factor of 8 bits twice: e4m3fn, or a power of two (which bfloat16 holds alone).
template <int DTYPE, bool HALF>
__device__ inline u32 factor_pair(u32 code) {
    if constexpr (DTYPE == SCALE_E4M3FN) {
        return pair_of_bytes<E4M3FN, HALF, 0>(code * 0x101, 0);
    } else {
        return twice(code == 0 ? 0x40 : code == 255 ? 0x7fff : code << 7);
    }
}

// Words of eight codes.
__device__ constexpr int words_of(int kind) { return is_packed(kind) ? 1 : 2; }

// Eight codes, and what is taken away from those of uint8.
template <int KIND, bool HALF>
__device__ inline void pairs_of_codes(u32 (&pairs)[4], const u32 (&words)[words_of(KIND)], u32 zero_point) {
    if constexpr (is_packed(KIND)) {
        pairs_of_nibbles<KIND, HALF>(pairs, words[0]);
    } else {
        pairs[0] = pair_of_bytes<KIND, HALF, 0>(words[0], zero_point), pairs[1] = pair_of_bytes<KIND, HALF, 1>(words[0], zero_point);
        pairs[2] = pair_of_bytes<KIND, HALF, 0>(words[1], zero_point), pairs[3] = pair_of_bytes<KIND, HALF, 1>(words[1], zero_point);
    }
}
