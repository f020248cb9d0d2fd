// kernels/common/encode.cuh compiled for the host: reads groups of numbers, prints their factor and codes. tests/encode.rs compares
// them with rapt-quant's.
//
//   in    int32 kind, int32 dtype of the factor, float32 global factor, int32 count, count float64        until there are no more
//   out   bits of the factor, its zero point, then each code; a line for a group

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#define __device__

namespace {

template <class To, class From>
To bits_as(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "as many bits");
    std::memcpy(&to, &from, sizeof to);
    return to;
}
double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
long long __double_as_longlong(double x) { return bits_as<long long>(x); }
float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
float __double2float_rn(double x) { return (float)x; }
float __fmul_rn(float a, float b) { return a * b; }
float __fadd_rn(float a, float b) { return a + b; }
float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

}  // namespace

#include "common/encode.cuh"

namespace {

template <class T>
bool read(T& to, size_t count = 1) {
    return std::fread(&to, sizeof to, count, stdin) == count;
}

}  // namespace

int main() {
    int kind, dtype, count;
    float global;
    while (read(kind) && read(dtype) && read(global) && read(count)) {
        std::vector<double> numbers(count);
        if (!read(numbers[0], count)) return 1;
        Reach reach;
        for (double x : numbers) reach.add(kind, x);
        const Factor factor = factor_of(kind, dtype, global, reach);
        std::printf("%u %u", factor.stored, factor.zero_point);
        for (double x : numbers) std::printf(" %u", encode(kind, x / factor.step, factor.zero_point));
        std::putchar('\n');
    }
    return 0;
}
