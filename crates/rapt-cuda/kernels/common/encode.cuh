// From numbers to codes, as rapt-quant's `quantize` does it: step by step in float64, so that codes and factors are the same bits.
//
//   reach of a group     its least and its greatest finite element, and 0;  absmax: the larger size
//   factor               float32: reach / largest;  e8m0: 2^(floor(log2(absmax)) - largest exponent);  e4m3fn: absmax / (6 * global)
//   code                 x / factor, rounded to nearest even, saturated
//
// A group that holds what its format has no code for, or whose factor would overflow, gets the factor NaN: whoever attends to it gets NaN.
// Deliberately absent: which elements are a group, and where codes go (append.cu).

#pragma once
#include "common/codes.cuh"

// A float of at most 8 bits with a sign and subnormals; `largest`: the code of the greatest finite number.
struct Minifloat {
    int mantissa_bits, bias;
    u32 largest, sign;
};
constexpr Minifloat OF_E4M3FN{3, 7, 0x7e, 0x80}, OF_E5M2{2, 15, 0x7b, 0x80}, OF_E2M1{1, 1, 0x7, 0x8};

__device__ inline double exp2_of(int n) { return __longlong_as_double((i64)(n + 1023) << 52); }
__device__ inline bool is_negative(double x) { return __double_as_longlong(x) < 0; }
__device__ inline bool is_finite_double(double x) { return (__double_as_longlong(x) >> 52 & 0x7ff) != 0x7ff; }
// The nearest integer, ties to even, of what is at most 2^51 in size.
__device__ inline double nearest_integer(double x) {
    constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52: no bit behind the point is left
    return (x + ROUND) - ROUND;
}
__device__ inline double within(double x, double lo, double hi) { return x < lo ? lo : x > hi ? hi : x; }

// The code of a finite number.
__device__ inline u32 encode_minifloat(const Minifloat& of, double x) {
    const double size = is_negative(x) ? -x : x;
    u64 code;
    if (size < exp2_of(1 - of.bias)) {
        // Steps of the subnormals: one that rounds up to the least normal number carries into the exponent.
        code = (u64)nearest_integer(size * exp2_of(of.mantissa_bits - 1 + of.bias));
    } else {
        const int dropped = 52 - of.mantissa_bits;
        const u64 bits = (u64)__double_as_longlong(size), half_less_one = (1ull << (dropped - 1)) - 1;
        code = ((bits + half_less_one + (bits >> dropped & 1)) >> dropped) - ((u64)(1023 - of.bias) << of.mantissa_bits);
    }
    return (is_negative(x) ? of.sign : 0) | (u32)(code < of.largest ? code : of.largest);
}

// The code of any number that is finite, or of a kind that `has_nan`.
__device__ inline u32 encode(int kind, double x, u32 zero_point) {
    const u32 sign = is_negative(x) ? 0x80 : 0;
    switch (kind) {
        case INT8: return (u32)(int)nearest_integer(within(x, -127, 127)) & 0xff;
        case UINT8: return (u32)within(nearest_integer(within(x, -512, 512)) + (double)zero_point, 0, 255);
        case INT4: return (u32)(int)nearest_integer(within(x, -7, 7)) & 0xf;
        case E4M3FN: return is_finite_double(x) ? encode_minifloat(OF_E4M3FN, x) : 0x7f | sign;
        case E5M2:
            if (is_finite_double(x)) return encode_minifloat(OF_E5M2, x);
            return (x != x ? 0x7e : 0x7c) | sign;
        default: return encode_minifloat(OF_E2M1, x);
    }
}
// Whether the kind has codes for what is not finite.
__device__ inline bool has_nan(int kind) { return kind == E4M3FN || kind == E5M2; }
__device__ inline double largest_of(int kind) {
    switch (kind) {
        case INT8: return 127;
        case UINT8: return 255;
        case INT4: return 7;
        case E4M3FN: return 448;
        case E5M2: return 57344;
        default: return 6;
    }
}

// The greatest power of two that is at most x, as its exponent. x is finite and above 0.
__device__ inline int floor_log2(double x) {
    const int exponent = (int)(__double_as_longlong(x) >> 52 & 0x7ff);
    if (exponent != 0) return exponent - 1023;
    return (int)(__double_as_longlong(x * exp2_of(64)) >> 52 & 0x7ff) - 1023 - 64;
}

// The least and the greatest finite element of a group, and 0; `odd`: whether one has no code.
struct Reach {
    double low = 0, high = 0;
    bool odd = false;
    __device__ void add(int kind, double x) {
        if (is_finite_double(x)) {
            if (x < low) low = x;
            if (x > high) high = x;
        } else if (!has_nan(kind)) {
            odd = true;
        }
    }
    __device__ double absmax() const { return high > -low ? high : -low; }
};

// The factor of a group: as it is stored, and what numbers are divided by.
struct Factor {
    u32 stored;  // bits, of float32 or 8 of them
    double step;
    u32 zero_point;
};

// reach / largest in float32; one that is subnormal is rounded up.
__device__ inline float f32_factor(double reach, double largest) {
    if (reach == 0) return 1;
    const float scale = __double2float_rn(reach / largest);
    const bool is_short = scale < 0x1p-126f && (double)scale * largest < reach;
    return is_short ? __uint_as_float(__float_as_uint(scale) + 1) : scale;
}

__device__ inline Factor factor_of(int kind, int scale_dtype, float global, const Reach& reach) {
    constexpr u32 NAN_F32 = 0x7fc00000, NAN_E8M0 = 255, NAN_E4M3FN = 0x7f;
    const double absmax = reach.absmax(), largest = largest_of(kind);
    if (scale_dtype == SCALE_E8M0) {
        const int exponent = absmax == 0 ? 0 : floor_log2(absmax) - (kind == E4M3FN ? 8 : 2);
        const u32 code = reach.odd || exponent > 127 ? NAN_E8M0 : (u32)((exponent > -127 ? exponent : -127) + 127);
        return {code, exp2_of((int)code - 127), 0};
    }
    if (scale_dtype == SCALE_E4M3FN) {
        // What the greatest factor stands for, and what rounds to it.
        const double most = largest * (double)global * (448 + 16);
        u32 code = 0x38;
        if (absmax != 0) {
            code = encode(E4M3FN, absmax / (largest * (double)global), 0);
            if (code < 0x08 && (double)e4m3fn_to_float(code) * largest * (double)global < absmax) code++;
        }
        const double step = (double)e4m3fn_to_float(code) * (double)global;
        return {reach.odd || absmax > most ? NAN_E4M3FN : code, step, 0};
    }
    const float scale = f32_factor(kind == UINT8 ? reach.high - reach.low : absmax, largest);
    const bool is_bad = reach.odd || !is_finite_double((double)scale);
    const u32 zero_point = kind == UINT8 ? encode(UINT8, -reach.low / (double)scale, 0) : 0;
    return {is_bad ? NAN_F32 : __float_as_uint(scale), (double)scale, zero_point};
}
