// What a text in Metal's language includes as <metal_stdlib>, for a C++20 compiler of this machine: vectors, functions, atomics, barriers; behind them simdgroups
// (simdgroup.h).
//
// Address spaces are no part of C++: pointers are pointers, and what is read and written through them is told by the compiler's hooks for
// ThreadSanitizer (lockstep.cpp). Deliberately absent: everything that texts do not use, bfloat among it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

using half = _Float16;
using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;

#define device
#define constant const
#define threadgroup
#define kernel

namespace metal {

using ::uint;

template <class T, int N>
struct vec;

// Two of a vector's elements, read.
template <class T, int N, int FIRST>
struct Pair {
    T of[N];
    operator vec<T, 2>() const { return {of[FIRST], of[FIRST + 1]}; }
};

// Copies are written out: a compiler has no hook where a call takes an object from memory, or stores one there, by itself.
#define RAPT_VECTOR(T, N, ...)                                                                                                \
    template <>                                                                                                               \
    struct vec<T, N> {                                                                                                        \
        typedef T all __attribute__((vector_size(N * sizeof(T))));                                                            \
        union {                                                                                                               \
            all v;                                                                                                            \
            struct {                                                                                                          \
                T __VA_ARGS__;                                                                                                \
            };                                                                                                                \
            Pair<T, N, 0> xy;                                                                                                 \
            Pair<T, N, N - 2> zw;                                                                                             \
        };                                                                                                                    \
        vec() = default;                                                                                                      \
        vec(const vec& of) : v(of.v) {}                                                                                       \
        vec& operator=(const vec& of) {                                                                                       \
            v = of.v;                                                                                                         \
            return *this;                                                                                                     \
        }                                                                                                                     \
        explicit vec(all of) : v(of) {}                                                                                       \
        template <class U>                                                                                                    \
        explicit vec(vec<U, N> of) : v(__builtin_convertvector(of.v, all)) {}                                                 \
        T& operator[](uint at) { return reinterpret_cast<T*>(this)[at]; }                                                     \
        T operator[](uint at) const { return reinterpret_cast<const T*>(this)[at]; }

#define RAPT_PAIR(T)                                                                                                          \
    RAPT_VECTOR(T, 2, x, y)                                                                                                   \
        explicit vec(T a) : v{a, a} {}                                                                                        \
        vec(T a, T b) : v{a, b} {}                                                                                            \
    };

#define RAPT_FOUR(T)                                                                                                          \
    RAPT_VECTOR(T, 4, x, y, z, w)                                                                                             \
        explicit vec(T a) : v{a, a, a, a} {}                                                                                  \
        vec(T a, T b, T c, T d) : v{a, b, c, d} {}                                                                            \
        vec(vec<T, 2> a, vec<T, 2> b) : v{a.x, a.y, b.x, b.y} {}                                                              \
    };

RAPT_PAIR(float)
RAPT_PAIR(half)
RAPT_PAIR(uint)
RAPT_PAIR(int)
RAPT_PAIR(short)
RAPT_PAIR(ushort)
RAPT_FOUR(float)
RAPT_FOUR(half)
RAPT_FOUR(uint)
RAPT_FOUR(int)
RAPT_FOUR(ushort)

using float2 = vec<float, 2>;
using float4 = vec<float, 4>;
using half2 = vec<half, 2>;
using half4 = vec<half, 4>;
using short2 = vec<short, 2>;
using ushort4 = vec<ushort, 4>;
using uint2 = vec<uint, 2>;
using uint4 = vec<uint, 4>;
using int2 = vec<int, 2>;
using int4 = vec<int, 4>;

struct alignas(16) uint3 {
    uint x, y, z;
};
struct alignas(32) ulong3 {
    ulong x, y, z;
};

// Vectors of no more alignment than their elements have.
template <class T>
struct packed_vec4 {
    typedef T all __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T))));
    all v;
    operator vec<T, 4>() const { return vec<T, 4>(v); }
};
using packed_ushort4 = packed_vec4<ushort>;
using packed_uint4 = packed_vec4<uint>;

struct bool4 {
    bool x, y, z, w;
    bool4() = default;
    explicit bool4(bool of) : x(of), y(of), z(of), w(of) {}
    bool4(bool a, bool b, bool c, bool d) : x(a), y(b), z(c), w(d) {}
    // Of a comparison: −1 is true.
    explicit bool4(int4::all of) : x(of[0] != 0), y(of[1] != 0), z(of[2] != 0), w(of[3] != 0) {}
    bool& operator[](uint at) { return (&x)[at]; }
    bool operator[](uint at) const { return (&x)[at]; }
    bool4 operator!() const { return {!x, !y, !z, !w}; }
    bool4 operator&(bool4 o) const { return {x && o.x, y && o.y, z && o.z, w && o.w}; }
    bool4 operator|(bool4 o) const { return {x || o.x, y || o.y, z || o.z, w || o.w}; }
    bool4& operator&=(bool4 o) { return *this = *this & o; }
    bool4& operator|=(bool4 o) { return *this = *this | o; }
};

struct bool2 {
    bool x, y;
    explicit bool2(int2::all of) : x(of[0] != 0), y(of[1] != 0) {}
};

#define RAPT_OPERATOR(op)                                                                                                     \
    template <class T, int N>                                                                                                 \
    inline vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {                                                                  \
        return vec<T, N>(a.v op b.v);                                                                                         \
    }                                                                                                                         \
    template <class T, int N>                                                                                                 \
    inline vec<T, N> operator op(vec<T, N> a, T b) {                                                                          \
        return a op vec<T, N>(b);                                                                                             \
    }                                                                                                                         \
    template <class T, int N>                                                                                                 \
    inline vec<T, N> operator op(T a, vec<T, N> b) {                                                                          \
        return vec<T, N>(a) op b;                                                                                             \
    }                                                                                                                         \
    template <class T, int N, class U>                                                                                        \
    inline vec<T, N>& operator op##=(vec<T, N>& a, U b) {                                                                     \
        return a = a op b;                                                                                                    \
    }

RAPT_OPERATOR(+)
RAPT_OPERATOR(-)
RAPT_OPERATOR(*)
RAPT_OPERATOR(/)
RAPT_OPERATOR(&)
RAPT_OPERATOR(|)
RAPT_OPERATOR(<<)
RAPT_OPERATOR(>>)

template <class T, int N>
inline vec<T, N> operator~(vec<T, N> a) {
    return vec<T, N>(~a.v);
}
template <class T, int N>
inline vec<T, N> operator-(vec<T, N> a) {
    return vec<T, N>(-a.v);
}

#define RAPT_COMPARISON(op)                                                                                                   \
    template <class T>                                                                                                        \
    inline bool4 operator op(vec<T, 4> a, vec<T, 4> b) {                                                                      \
        return bool4(a.v op b.v);                                                                                             \
    }                                                                                                                         \
    template <class T>                                                                                                        \
    inline bool4 operator op(vec<T, 4> a, T b) {                                                                              \
        return a op vec<T, 4>(b);                                                                                             \
    }

RAPT_COMPARISON(==)
RAPT_COMPARISON(!=)
RAPT_COMPARISON(<)
RAPT_COMPARISON(>)
RAPT_COMPARISON(<=)
RAPT_COMPARISON(>=)

inline bool2 operator!=(uint2 a, uint2 b) { return bool2(a.v != b.v); }
inline bool any(bool2 of) { return of.x || of.y; }
inline bool any(bool4 of) { return of.x || of.y || of.z || of.w; }
inline bool all(bool4 of) { return of.x && of.y && of.z && of.w; }

inline uint select(uint a, uint b, bool c) { return c ? b : a; }
inline int select(int a, int b, bool c) { return c ? b : a; }
inline float select(float a, float b, bool c) { return c ? b : a; }
template <class T>
inline vec<T, 4> select(vec<T, 4> a, vec<T, 4> b, bool4 c) {
    return {c.x ? b.x : a.x, c.y ? b.y : a.y, c.z ? b.z : a.z, c.w ? b.w : a.w};
}

inline uint min(uint a, uint b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline float max(float a, float b) { return a > b ? a : b; }
template <class T, int N>
inline vec<T, N> min(vec<T, N> a, vec<T, N> b) {
    return vec<T, N>(a.v < b.v ? a.v : b.v);
}
template <class T, int N>
inline vec<T, N> max(vec<T, N> a, vec<T, N> b) {
    return vec<T, N>(a.v > b.v ? a.v : b.v);
}
template <class T, int N>
inline vec<T, N> clamp(vec<T, N> a, vec<T, N> low, vec<T, N> high) {
    return min(max(a, low), high);
}
template <class T, int N>
inline vec<T, N> clamp(vec<T, N> a, T low, T high) {
    return clamp(a, vec<T, N>(low), vec<T, N>(high));
}
inline float abs(float a) { return __builtin_fabsf(a); }
inline int abs(int a) { return a < 0 ? -a : a; }
inline float4 abs(float4 a) {
    return {__builtin_fabsf(a.x), __builtin_fabsf(a.y), __builtin_fabsf(a.z), __builtin_fabsf(a.w)};
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float4 fma(float4 a, float4 b, float4 c) {
    return {__builtin_fmaf(a.x, b.x, c.x), __builtin_fmaf(a.y, b.y, c.y), __builtin_fmaf(a.z, b.z, c.z),
            __builtin_fmaf(a.w, b.w, c.w)};
}
inline float4 exp2(float4 a) {
    return {__builtin_exp2f(a.x), __builtin_exp2f(a.y), __builtin_exp2f(a.z), __builtin_exp2f(a.w)};
}
inline float4 rint(float4 a) {
    return {__builtin_rintf(a.x), __builtin_rintf(a.y), __builtin_rintf(a.z), __builtin_rintf(a.w)};
}

struct atomic_uint {
    uint value;
};
enum memory_order { memory_order_relaxed };
enum class mem_flags { mem_none, mem_device, mem_threadgroup };

}  // namespace metal

// lockstep.cpp has these: an access of one thread to what others access too, and the end of a stretch between barriers. `line` tells barriers apart.
extern "C" void rapt_atomic_store(uint* at, uint value);
extern "C" uint rapt_atomic_load(const uint* at);
extern "C" uint rapt_atomic_min(uint* at, uint value);
extern "C" uint rapt_atomic_max(uint* at, uint value);
extern "C" void rapt_barrier(int line);
// The kernel has these bytes as workgroup memory; said by the lines that the host adds behind their declarations.
extern "C" void rapt_space(const char* name, void* at, unsigned long bytes);

namespace metal {
inline void atomic_store_explicit(atomic_uint* at, uint value, memory_order) { rapt_atomic_store(&at->value, value); }
inline uint atomic_load_explicit(const atomic_uint* at, memory_order) { return rapt_atomic_load(&at->value); }
inline uint atomic_fetch_min_explicit(atomic_uint* at, uint value, memory_order) { return rapt_atomic_min(&at->value, value); }
inline uint atomic_fetch_max_explicit(atomic_uint* at, uint value, memory_order) { return rapt_atomic_max(&at->value, value); }
inline void barrier_at(mem_flags, int line) { rapt_barrier(line); }
}  // namespace metal
#define threadgroup_barrier(flags) barrier_at(flags, __LINE__)

// The compiler's own type of a number or a vector.
template <class T>
struct Bits {
    using type = T;
    static T of(T number) { return number; }
};
template <class T, int N>
struct Bits<metal::vec<T, N>> {
    using type = typename metal::vec<T, N>::all;
    static type of(metal::vec<T, N> vector) { return vector.v; }
};
template <class To, class From>
inline To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From));
    return To(__builtin_bit_cast(typename Bits<To>::type, Bits<From>::of(from)));
}

#include "simdgroup.h"
