// What MLX's headers of attention ask of <metal_stdlib> besides, and of their own headers of other numbers (mlx.rs). Included before them.
#pragma once

#include <metal_stdlib>

using std::size_t;

// Address spaces are no part of C++.
#undef constant
#define constant
#define thread
#define METAL_FUNC inline
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f

namespace metal {

using std::bool_constant;
using std::conditional_t;
using std::enable_if_t;
using std::is_integral;
using std::is_same_v;
using std::numeric_limits;
using std::remove_cv_t;
template <class T>
using remove_addrspace_t = std::remove_cv_t<T>;
template <class T>
using pointer_element_t = std::remove_cv_t<std::remove_pointer_t<T>>;

template <>
struct vec<bool, 2> {
    bool x, y;
    bool& operator[](uint at) { return (&x)[at]; }
};

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float log2(float x) { return __builtin_log2f(x); }
namespace fast {
inline float exp(float x) { return __builtin_expf(x); }
inline float exp2(float x) { return __builtin_exp2f(x); }
}  // namespace fast

}  // namespace metal

using namespace metal;

template <class T>
struct Limits {
    static constexpr T finite_min = T(sizeof(T) == 2 ? -65504.0f : -3.40282347e38f);
};
