// Conversions and roundings of CUDA C++ for a kernel's file that is compiled for the host by itself. Deliberately absent: what a block of threads does (block.hpp).

#pragma once
#include <cmath>
#include <cstring>

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
