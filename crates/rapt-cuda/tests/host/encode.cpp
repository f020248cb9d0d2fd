// kernels/common/encode.cuh compiled for the host: reads groups of numbers, prints their factor and codes. tests/encode.rs compares
// them with rapt-quant's.
//
//   in    int32 kind, int32 dtype of the factor, float32 global factor, int32 count, count float64        until there are no more
//   out   bits of the factor, its zero point, then each code; a line for a group

#include <cstdio>
#include <vector>

#include "numbers.hpp"

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
