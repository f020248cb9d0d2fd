// kernels/backward/hopper_exponents.cuh compiled for the host, with softcap: prints what tests/exponents.rs compares.
//
//   out   cap, score, lse, p, what the score rises by; a line for each

#include <cstdio>
#include <initializer_list>

#include "numbers.hpp"

// Conversions and approximations of the device: none of the former is asked for here, and the latter have stand-ins.
#define asm(...) (void)0

#define exp2_approx exp2_of_device
#define log2_approx log2_of_device
#include "common/math.cuh"
#undef exp2_approx
#undef log2_approx

namespace {

// Neither knows numbers below the least normal one.
float exp2_approx(float x) { return x < -126 ? 0 : std::exp2(x); }
float log2_approx(float x) { return std::log2(x); }

}  // namespace

#include "backward/hopper_exponents.cuh"

int main() {
    const float infinity = INFINITY;
    for (double cap : {1.0, 5.0, 30.0, 1e3, 9e5}) {
        const Exponents exponents(0.25, cap, 1 / cap);
        for (double score : {0.0, 1e-3, -0.5, 1.0, 3.0, -20.0, 90.0, 1e4}) {
            const float top = (float)(cap * std::tanh(score / cap) * 1.4426950408889634);
            // A weight of 1 and less, one that has sunk to 0, and one of a row that attends nothing.
            for (float lse : {top, top + 3, top + 100, top + 300, infinity}) {
                const float p = exp2_approx(exponents.below((float)(score / 0.25), lse));
                std::printf("%.17g %.17g %.9g %.9g %.9g\n", cap, score, lse, p, exponents.rises(p, lse));
            }
        }
    }
}
