// What 32 threads do together, for texts in Metal's language: matrices of 8 by 8, and an exchange of numbers. Included by <metal_stdlib>.
//
// A thread has two elements of a matrix, where lockstep.cpp says; those of a load and of a store are accesses of that thread. Texts of Rapt do not ask which they are;
// kernels that were published for Apple's GPUs do.
#pragma once

// lockstep.cpp has these: a thread gives what it has, and goes on when all of its simdgroup have called.
extern "C" void rapt_exchange(uint mine, uint* all);
extern "C" void rapt_multiply(const float* a, const float* b, float* c);
// The thread's number in its simdgroup.
extern "C" uint rapt_lane();

namespace metal {

template <class T, int Columns, int Rows>
struct simdgroup_matrix;

template <class T>
struct simdgroup_matrix<T, 8, 8> {
    vec<T, 2> mine;
    vec<T, 2>& thread_elements() { return mine; }
    const vec<T, 2>& thread_elements() const { return mine; }
};
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

template <class T, int N>
inline simdgroup_matrix<T, N, N> make_filled_simdgroup_matrix(T value) {
    return {vec<T, 2>(value, value)};
}

// Where the first of a thread's elements lies.
inline ulong place_in_matrix(uint lane, ulong pitch, bool is_transposed) {
    const uint row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
    return is_transposed ? column * pitch + row : row * pitch + column;
}

template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const T* from, ulong pitch = 8, ulong = 0, bool is_transposed = false) {
    const T* at = from + place_in_matrix(rapt_lane(), pitch, is_transposed);
    to.mine = {at[0], at[is_transposed ? pitch : 1]};
}
template <class T>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> of, T* to, ulong pitch = 8, ulong = 0, bool is_transposed = false) {
    T* at = to + place_in_matrix(rapt_lane(), pitch, is_transposed);
    at[0] = of.mine.x;
    at[is_transposed ? pitch : 1] = of.mine.y;
}

// Sums of float32, in the order of the products.
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
    const float of_a[2] = {float(a.mine.x), float(a.mine.y)}, of_b[2] = {float(b.mine.x), float(b.mine.y)};
    float sum[2] = {float(c.mine.x), float(c.mine.y)};
    rapt_multiply(of_a, of_b, sum);
    d.mine = {D(sum[0]), D(sum[1])};
}

// The numbers of all threads of the simdgroup.
struct Exchanged {
    uint words[32];
    explicit Exchanged(float mine) { rapt_exchange(__builtin_bit_cast(uint, mine), words); }
    float operator[](uint lane) const { return __builtin_bit_cast(float, words[lane]); }
};

inline float simd_shuffle_xor(float mine, ushort mask) { return Exchanged(mine)[rapt_lane() ^ mask]; }
inline float simd_sum(float mine) {
    const Exchanged all(mine);
    float sum = 0;
    for (uint lane = 0; lane < 32; lane++) sum += all[lane];
    return sum;
}
inline float simd_max(float mine) {
    const Exchanged all(mine);
    float top = all[0];
    for (uint lane = 1; lane < 32; lane++) top = all[lane] > top ? all[lane] : top;
    return top;
}
// That orders instructions, and no access.
inline void simdgroup_barrier(mem_flags) {}

}  // namespace metal
