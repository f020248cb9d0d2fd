// A block of threads of a kernel on a processor: what CUDA C++ has that C++ has not, and the instructions that those kernels execute which run here.
//
//   threads     one context each, which runs until it has to wait for others: for its warp, or for the block. They are begun by setcontext and
//               go on by longjmp, which asks nothing of the system
//   together    what a warp executes together is computed by the lane that comes last
//   cp.async    copies when it is waited for and not before: a kernel that does not wait reads what was there
//   asm         ends the program: each instruction that is reached has a stand-in here
//
// src/recorded/host.rs puts this before a kernel's source, with the definitions of what stands in renamed, and loads what is compiled.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define asm(...) unknown_instruction()

namespace host {

constexpr int WARP = 32, MOST_THREADS = 512, STACK = 256 << 10, MOST_SHARED = 256 << 10;

struct Copy {
    unsigned char* to;
    const void* from;
    int bytes, group;
    bool inside;
};
struct Thread {
    ucontext_t context;
    jmp_buf at;
    char* stack;  // as long as the program runs
    bool begun, done;
    std::vector<Copy> copies;
    int groups;  // of copies, committed so far
};
// Who waits for one another: how many have come, and how often all had.
struct Together {
    int come = 0, all = 0, threads = 0;
};
// What a lane brings along.
struct Brought {
    const unsigned* in[2];
    unsigned* out;
    unsigned at, word;
};

inline Thread threads[MOST_THREADS];
inline Together warps[MOST_THREADS / WARP], block;
inline Brought brought[MOST_THREADS];
inline jmp_buf outside;
inline int running, count;
alignas(1024) inline unsigned char shared[MOST_SHARED];
inline bool is_stuck;

inline void let_others() {
    if (_setjmp(threads[running].at) == 0) _longjmp(outside, 1);
}
// Runs a thread until it lets others. A frame of its own: what the caller has in registers is as it was.
__attribute__((noinline)) inline void go_on(Thread& thread) {
    if (_setjmp(outside) != 0) return;
    if (thread.begun) _longjmp(thread.at, 1);
    thread.begun = true;
    setcontext(&thread.context);
}
// Waits until all have come; the last of them does `work`.
template <class Work>
void together(Together& of, Work work) {
    const int before = of.all;
    if (++of.come == of.threads) {
        work();
        of.come = 0, of.all++;
        is_stuck = false;
        return;
    }
    while (of.all == before) let_others();
}
template <class Work>
void warp(Work work) {
    const int first = running / WARP * WARP;
    together(warps[running / WARP], [&] { work(first); });
}
template <class To, class From>
To bits_as(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "as many bits");
    std::memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace host

struct Dim {
    unsigned x;
};
inline Dim threadIdx, blockIdx, gridDim;
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

[[noreturn]] inline void unknown_instruction() { std::fputs("an instruction without a stand-in\n", stderr), std::abort(); }
using std::signbit;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float __uint_as_float(unsigned bits) { return host::bits_as<float>(bits); }
inline float __int_as_float(int bits) { return host::bits_as<float>(bits); }
inline unsigned __float_as_uint(float x) { return host::bits_as<unsigned>(x); }
inline double __longlong_as_double(long long bits) { return host::bits_as<double>(bits); }
inline long long __double_as_longlong(double x) { return host::bits_as<long long>(x); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
    const unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned picked = 0;
    for (int n = 0; n < 4; n++) picked |= (unsigned)(both >> (which >> n * 4 & 7) * 8 & 0xff) << n * 8;
    return picked;
}

inline void __syncthreads() { host::together(host::block, [] {}); }
inline void __syncwarp() {
    host::warp([](int) {});
}
inline bool __syncthreads_or(bool is) {
    static bool any[2];
    // Whoever goes on first from one such wait may come to the next before others have read this one's answer.
    const int turn = host::block.all % 2;
    any[turn] = (host::block.come > 0 && any[turn]) || is;
    host::together(host::block, [] {});
    return any[turn];
}
// x of the lane that `from` names for each.
template <class T, class From>
T exchanged(T x, From from) {
    constexpr int WORDS = sizeof(T) / 4;
    unsigned words[WORDS], got[WORDS];
    std::memcpy(words, &x, sizeof words);
    host::brought[host::running].in[0] = words, host::brought[host::running].out = got;
    host::warp([from](int first) {
        for (int lane = 0; lane < host::WARP; lane++)
            for (int n = 0; n < WORDS; n++) host::brought[first + lane].out[n] = host::brought[first + from(lane)].in[0][n];
    });
    std::memcpy(&x, got, sizeof x);
    return x;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    return exchanged(x, [mask](int lane) { return lane ^ mask; });
}
template <class T>
T __shfl_sync(unsigned, T x, int of) {
    return exchanged(x, [of](int) { return of; });
}
inline bool __any_sync(unsigned, bool is) {
    unsigned got = 0;
    host::brought[host::running].word = is, host::brought[host::running].out = &got;
    host::warp([](int first) {
        unsigned any = 0;
        for (int lane = 0; lane < host::WARP; lane++) any |= host::brought[first + lane].word;
        for (int lane = 0; lane < host::WARP; lane++) *host::brought[first + lane].out = any;
    });
    return got != 0;
}

inline unsigned __ballot_sync(unsigned, bool is) {
    unsigned got = 0;
    host::brought[host::running].word = is, host::brought[host::running].out = &got;
    host::warp([](int first) {
        unsigned of = 0;
        for (int lane = 0; lane < host::WARP; lane++) of |= host::brought[first + lane].word << lane;
        for (int lane = 0; lane < host::WARP; lane++) *host::brought[first + lane].out = of;
    });
    return got;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }
inline unsigned shared_address(const void* p) { return (unsigned)((const unsigned char*)p - host::shared); }
// Row r of matrix m is named by lane 8*m + r; TRANSPOSED: rows and columns exchanged.
template <bool TRANSPOSED>
void load_matrices(unsigned (&r)[4], unsigned at) {
    if (at % 16 != 0 || at + 16 > host::MOST_SHARED) std::fputs("ldmatrix at a bad address\n", stderr), std::abort();
    host::brought[host::running].at = at, host::brought[host::running].out = r;
    host::warp([](int first) {
        for (int matrix = 0; matrix < 4; matrix++) {
            unsigned short of[8][8];
            for (int row = 0; row < 8; row++) std::memcpy(of[row], host::shared + host::brought[first + matrix * 8 + row].at, 16);
            for (int lane = 0; lane < host::WARP; lane++) {
                const int g = lane / 4, t = lane % 4 * 2;
                const unsigned low = TRANSPOSED ? of[t][g] : of[g][t], high = TRANSPOSED ? of[t + 1][g] : of[g][t + 1];
                host::brought[first + lane].out[matrix] = low | high << 16;
            }
        }
    });
}
inline void ldmatrix(unsigned (&r)[4], unsigned at) { load_matrices<false>(r, at); }
inline void ldmatrix_trans(unsigned (&r)[4], unsigned at) { load_matrices<true>(r, at); }

// m16n8k32, by the maps of PTX: A has rows g, g+8 and columns 4t.., 16+4t..; B rows 4t.., 16+4t.. and column g; C columns 2t, 2t+1.
template <bool UNSIGNED>
void mma_int8(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned b[2] = {b0, b1};
    host::Brought& own = host::brought[host::running];
    own.in[0] = a, own.in[1] = b, own.out = (unsigned*)c;
    host::warp([](int first) {
        int of_a[16][32], of_b[32][8];
        for (int lane = 0; lane < host::WARP; lane++) {
            const host::Brought& of = host::brought[first + lane];
            const int g = lane / 4, t = lane % 4;
            for (int word = 0; word < 4; word++)
                for (int e = 0; e < 4; e++) {
                    const unsigned char byte = of.in[0][word] >> e * 8;
                    of_a[g + word % 2 * 8][word / 2 * 16 + 4 * t + e] = UNSIGNED ? (int)byte : (int)(signed char)byte;
                }
            for (int word = 0; word < 2; word++)
                for (int e = 0; e < 4; e++) of_b[word * 16 + 4 * t + e][g] = (signed char)(of.in[1][word] >> e * 8);
        }
        for (int lane = 0; lane < host::WARP; lane++)
            for (int e = 0; e < 4; e++) {
                const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
                int sum = 0;
                for (int k = 0; k < 32; k++) sum += of_a[row][k] * of_b[k][column];
                host::brought[first + lane].out[e] += (unsigned)sum;
            }
    });
}

template <int BYTES>
void cp_async_zfill(unsigned to, const void* from, bool inside) {
    if (to % BYTES != 0 || (inside && (size_t)from % BYTES != 0)) std::fputs("cp.async at a bad address\n", stderr), std::abort();
    host::Thread& thread = host::threads[host::running];
    thread.copies.push_back({host::shared + to, from, BYTES, thread.groups, inside});
    // Until it is waited for, nobody knows what is there.
    std::memset(host::shared + to, 0x5a, BYTES);
}
template <class Element>
void cp_async(Element* to, const Element* from, int bytes) {
    cp_async_zfill<16>(shared_address(to), from, bytes != 0);
}
template <class Element>
void cp_async(unsigned to, const Element* from) {
    cp_async_zfill<16>(to, from, true);
}
inline void cp_async_commit() { host::threads[host::running].groups++; }
// All but the last PENDING groups are there.
template <int PENDING>
void cp_async_wait() {
    host::Thread& thread = host::threads[host::running];
    std::vector<host::Copy> left;
    for (const host::Copy& copy : thread.copies) {
        if (copy.group >= thread.groups - PENDING) left.push_back(copy);
        else if (copy.inside) std::memcpy(copy.to, copy.from, copy.bytes);
        else std::memset(copy.to, 0, copy.bytes);
    }
    thread.copies = std::move(left);
}

// m16n8k16, by the maps of PTX: A has rows g, g+8 and columns 2t.., 8+2t..; B rows 2t.., 8+2t.. and column g; C columns 2t, 2t+1. Products are
// exact, sums float32 in one order.
inline float f16_to_float(unsigned short bits);
inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned b[2] = {b0, b1};
    host::Brought& own = host::brought[host::running];
    own.in[0] = a, own.in[1] = b, own.out = (unsigned*)c;
    host::warp([](int first) {
        const auto number = [](unsigned pair, int e) {
            const unsigned short bits = pair >> e * 16;
            return STORAGE == 6 ? f16_to_float(bits) : __uint_as_float((unsigned)bits << 16);
        };
        float of_a[16][16], of_b[16][8];
        for (int lane = 0; lane < host::WARP; lane++) {
            const host::Brought& of = host::brought[first + lane];
            const int g = lane / 4, t = lane % 4 * 2;
            for (int word = 0; word < 4; word++)
                for (int e = 0; e < 2; e++) of_a[g + word % 2 * 8][word / 2 * 8 + t + e] = number(of.in[0][word], e);
            for (int word = 0; word < 2; word++)
                for (int e = 0; e < 2; e++) of_b[word * 8 + t + e][g] = number(of.in[1][word], e);
        }
        for (int lane = 0; lane < host::WARP; lane++)
            for (int e = 0; e < 4; e++) {
                const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
                float& sum = ((float*)host::brought[first + lane].out)[e];
                for (int k = 0; k < 16; k++) sum = (float)((double)sum + (double)of_a[row][k] * of_b[k][column]);
            }
    });
}

template <bool HALF>
void mma_of(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma(c, a, b0, b1);
}
inline unsigned reread_ctaid() { return blockIdx.x; }
inline unsigned load_acquire(const unsigned* at) { return *at; }
// Blocks run one after another: what has not come never will.
inline void nanosleep(unsigned) { std::abort(); }

// m16n8k8 of TF32: A has rows g, g+8 and columns t, t+4; B rows t, t+4 and column g; of each number 11 bits are read.
inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned b[2] = {b0, b1};
    host::Brought& own = host::brought[host::running];
    own.in[0] = a, own.in[1] = b, own.out = (unsigned*)c;
    host::warp([](int first) {
        const auto number = [](unsigned bits) { return __uint_as_float(bits & 0xffffe000u); };
        float of_a[16][8], of_b[8][8];
        for (int lane = 0; lane < host::WARP; lane++) {
            const host::Brought& of = host::brought[first + lane];
            const int g = lane / 4, t = lane % 4;
            for (int word = 0; word < 4; word++) of_a[g + word % 2 * 8][word / 2 * 4 + t] = number(of.in[0][word]);
            for (int word = 0; word < 2; word++) of_b[word * 4 + t][g] = number(of.in[1][word]);
        }
        for (int lane = 0; lane < host::WARP; lane++)
            for (int e = 0; e < 4; e++) {
                const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
                float& sum = ((float*)host::brought[first + lane].out)[e];
                for (int k = 0; k < 8; k++) sum = (float)((double)sum + (double)of_a[row][k] * of_b[k][column]);
            }
    });
}

// As exact as float32 is, where the instruction is off by two units; subnormal results are 0.
inline float exp2_approx(float x) {
    const float y = (float)std::exp2((double)x);
    return y < 0x1p-126f ? 0.f : y;
}
inline float f16_to_float(unsigned short bits) {
    const int exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
    const float size = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp((float)mantissa, -24)
                                       : std::ldexp((float)(1024 + mantissa), exponent - 25);
    return bits & 0x8000 ? -size : size;
}
// Rounded to nearest even: so many bits of a mantissa are left, and an exponent as narrow.
inline unsigned short narrowed(float x, int mantissa_bits, int least_exponent, unsigned infinity) {
    const unsigned sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7fff;
    const double size = std::fabs((double)x);
    if (std::isinf(x)) return sign | infinity;
    int exponent = size == 0 ? least_exponent : std::max(least_exponent, std::ilogb(size));
    const double step = std::ldexp(1.0, exponent - mantissa_bits);
    const unsigned whole = (unsigned)std::nearbyint(size / step);
    const unsigned bits = ((unsigned)(exponent - least_exponent) << mantissa_bits) + whole;
    return sign | (bits > infinity ? infinity : bits);
}
inline unsigned short float_to_f16(float x) { return narrowed(x, 10, -14, 0x7c00); }
inline unsigned short float_to_bf16(float x) { return narrowed(x, 7, -126, 0x7f80); }
inline unsigned short double_to_f16(double x) { return float_to_f16((float)x); }
template <bool HALF>
unsigned packed(float low, float high) {
    const auto of = [](float x) -> unsigned { return HALF ? float_to_f16(x) : float_to_bf16(x); };
    return of(low) | of(high) << 16;
}
template <bool HALF>
unsigned pack_as(float low, float high) {
    return packed<HALF>(low, high);
}
