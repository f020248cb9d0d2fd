// kernels/common/ptx.cuh for a host compiler: instructions that leave a trace instead of having an effect.
//
//   ldmatrix    (0, address, 0, 0), and each word of the answer names its call: 4 * call + word
//   mma         (1, tile, first word of A, first word of B): the accumulator by its distance from the first, operands by name
//   cp.async    (2, address in shared memory, address in global memory, bytes)

#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "common/params.cuh"

inline float float_of_bits(u32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline u32 bits_of_float(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of_f16(u32 bits) {
    const int exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
    if (exponent == 0x1f) std::abort();
    const float size = exponent == 0 ? std::ldexp((float)mantissa, -24) : std::ldexp((float)(1024 + mantissa), exponent - 25);
    return bits & 0x8000 ? -size : size;
}
// Exact or an error.
inline u32 f16_of_float(float x) {
    const u32 sign = std::signbit(x) ? 0x8000 : 0;
    int exponent;
    const float mantissa = std::frexp(std::fabs(x), &exponent);
    const u32 bits = std::fabs(x) < std::ldexp(1.f, -14) ? (u32)std::ldexp(std::fabs(x), 24)
                                                         : (u32)(exponent + 14) << 10 | (u32)(std::ldexp(mantissa, 11) - 1024);
    if (bits >= 0x7c00 || float_of_f16(sign | bits) != x) std::abort();
    return sign | bits;
}

inline float f16_to_float(u16 bits) {
    if ((bits & 0x7c00) != 0x7c00) return float_of_f16(bits);
    return (bits & 0x3ff) != 0 ? NAN : bits & 0x8000 ? -INFINITY : INFINITY;
}
// A pair of float16 (HALF) or bfloat16: exact or an error.
template <bool HALF>
inline u32 pack_as(float low, float high) {
    const auto of = [](float x) -> u32 {
        if (!std::isfinite(x)) return (std::signbit(x) ? 0x8000 : 0) | (HALF ? 0x7c00 : 0x7f80) | (std::isnan(x) ? 1 : 0);
        if (HALF) return f16_of_float(x);
        if ((bits_of_float(x) & 0xffff) != 0) std::abort();
        return bits_of_float(x) >> 16;
    };
    return of(low) | of(high) << 16;
}

struct Event {
    u32 what;
    u64 a, b, c;
};
// One lane's trace; addresses count from `shared_base`, accumulators from `sums_base`.
inline Event events[4096];
inline int event_count, ldmatrix_count;
inline const void* shared_base;
inline const float* sums_base;
inline void record(Event event) { events[event_count++] = event; }

inline u32 shared_address(const void* p) { return (u32)((const u8*)p - (const u8*)shared_base); }
inline void ldmatrix(u32 (&r)[4], u32 at) {
    record({0, at, 0, 0});
    for (int n = 0; n < 4; n++) r[n] = ldmatrix_count * 4 + n;
    ldmatrix_count++;
}
inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    // Words of one operand come from one ldmatrix, in order.
    const bool in_order = a[1] == a[0] + 1 && a[2] == a[0] + 2 && a[3] == a[0] + 3 && b1 == b0 + 1;
    record({in_order ? 1u : 9u, (u64)(c - sums_base) / 4, a[0], b0});
}
inline void cp_async(Elem* to, const Elem* from, int bytes) { record({2, shared_address(to), (u64)from, (u64)bytes}); }
inline void cp_async(u32 to, const Elem* from) { record({2, to, (u64)from, 16}); }
inline u32 dp4a(u32 a, u32 b, u32 sum) {
    for (int n = 0; n < 32; n += 8) sum += (a >> n & 0xff) * (b >> n & 0xff);
    return sum;
}
// Exact or an error: what the maps multiply and add has few bits.
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 x = 0;
    for (int n = 0; n < 32; n += 16) {
        const auto of = [&](u32 pair) { return (double)float_of_bits((pair >> n & 0xffff) << 16); };
        const float sum = (float)(of(a) * of(b) + of(c));
        if (of(a) * of(b) + of(c) != (double)sum || (bits_of_float(sum) & 0xffff) != 0) std::abort();
        x |= bits_of_float(sum) >> 16 << n;
    }
    return x;
}
inline u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 x = 0;
    for (int n = 0; n < 32; n += 16) {
        const auto of = [&](u32 pair) { return float_of_f16(pair >> n & 0xffff); };
        x |= f16_of_float(of(a) * of(b) + of(c)) << n;
    }
    return x;
}
inline u32 xor_and(u32 a, u32 b, u32 c) { return (a ^ b) & c; }
inline u32 e4m3x2_to_f16x2(u32 codes) {
    u32 x = 0;
    for (int n = 0; n < 2; n++) {
        const u32 code = codes >> n * 8 & 0xff;
        if ((code & 0x7f) == 0x7f) {
            x |= 0x7fffu << n * 16;
            continue;
        }
        x |= f16_of_float(std::ldexp(float_of_f16((code & 0x80) << 8 | (code & 0x7f) << 7), 8)) << n * 16;
    }
    return x;
}
