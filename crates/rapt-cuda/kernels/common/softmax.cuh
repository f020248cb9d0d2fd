// softmax
#pragma once
#include "common/math.cuh"
#include "common/tile.cuh"

// Beyond this m*c is off by more than a unit in the exponent: s - m is taken first then.
constexpr float EXACT = 4194304.f;
// By how many powers of 2 a row's maximum may rise before its sums are rescaled: weights are at most 2^SLACK.
constexpr float SLACK = 8;

// The running state of MT*16 rows: two per fragment and thread; l is the thread's own share until `reduce`.
template <int MT>
struct Sums {
    float m[MT][2], l[MT][2], acc[MT][DV / 8][4];

    __device__ void clear() {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            m[mt][0] = m[mt][1] = negative_infinity(), l[mt][0] = l[mt][1] = 0;
#pragma unroll
            for (int nt = 0; nt < DV / 8; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[mt][nt][e] = 0;
        }
    }

    // Scores become p, packed as A operands; m and l move on, acc is rescaled. m, what a row's scores are compared with,
    // follows their maximum only when that has risen by more than `slack` powers of 2: at 8, p stays below 256, and sums are
    // seldom rescaled; at 0 the greatest p is 1 and not rounded. What is rare stands apart, so that the rest is
    // one run of instructions in which exponentials and products overlap.
    template <bool CAREFUL, int NT>
    __device__ void weigh(u32 (&a)[MT][NT / 2][4], float (&s)[MT][NT][4], float c, float slack) {
        float top[MT][2], reference[MT][2];
        bool moved = false, big = NATURAL;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float& x = top[mt][h];
                x = m[mt][h];
#pragma unroll
                for (int nt = 0; nt < NT; nt++) x = fmaxf(x, fmaxf(s[mt][nt][h * 2], s[mt][nt][h * 2 + 1]));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                moved |= (x - m[mt][h]) * c > slack;
            }
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                float rescale[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float rise = (top[mt][h] - m[mt][h]) * c;
                    rescale[h] = rise > slack ? exp2_approx(-rise) : 1.f;
                    m[mt][h] = rise > slack ? top[mt][h] : m[mt][h];
                    l[mt][h] *= rescale[h];
                }
#pragma unroll
                for (int nt = 0; nt < DV / 8; nt++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& sum = acc[mt][nt][e];
                        sum = CAREFUL ? weighed(rescale[e / 2], sum) : sum * rescale[e / 2];
                    }
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // A row without a key yet keeps m at -inf and compares with 0.
                const float base = m[mt][h] == negative_infinity() ? 0.f : m[mt][h];
                reference[mt][h] = NATURAL ? base : base * c;
                if (!NATURAL) big |= fabsf(reference[mt][h]) > EXACT;
            }
        if (NATURAL || __any_sync(~0u, big)) {
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    // Each row by itself: its bits are its own.
                    const bool far = NATURAL || fabsf(reference[mt][h]) > EXACT;
                    const float base = far && m[mt][h] != negative_infinity() ? m[mt][h] : 0.f;
                    if (far) reference[mt][h] = 0;
#pragma unroll
                    for (int nt = 0; nt < NT; nt++)
#pragma unroll
                        for (int e = 0; e < 2; e++) s[mt][nt][h * 2 + e] -= base;
                }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = l[mt][h];
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[mt][nt][h * 2 + e];
                        const bool masked = x == negative_infinity();
                        x = exp2_approx(NATURAL ? x * c : __fmaf_rn(x, c, -reference[mt][h]));
                        sum += x;
                        if (CAREFUL && masked) x = -0.f;
                    }
                    a[mt][nt / 2][nt % 2 * 2 + h] = pack(s[mt][nt][h * 2], s[mt][nt][h * 2 + 1]);
                }
                l[mt][h] = sum;
            }
    }

    // acc += p.v
    template <bool CAREFUL, int KT>
    __device__ void add_values(const u32 (&a)[MT][KT][4], const Elem* v_tile) {
        if constexpr (CAREFUL) {
            add_values_carefully<KT>(a, v_tile);
        } else {
            add_finite_values<KT>(a, v_tile);
        }
    }

    template <int KT>
    __device__ void add_finite_values(const u32 (&a)[MT][KT][4], const Elem* v_tile) {
        const int lane = threadIdx.x % 32;
        const u32 v_at = shared_address(v_tile + place<DV>(lane % 16, lane / 16 * 8));
#pragma unroll
        for (int kt = 0; kt < KT; kt++)
#pragma unroll
            for (int nt = 0; nt < DV / 8; nt += 2) {
                u32 b[4];
                ldmatrix_trans(b, beyond<DV>(v_at, nt * 8) + kt * 16 * V_ROW * 2);
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    mma(acc[mt][nt], a[mt][kt], b[0], b[1]);
                    mma(acc[mt][nt + 1], a[mt][kt], b[2], b[3]);
                }
            }
    }

    // The same with values that are not finite told apart: they are left out of the product, and counted per row among
    // the keys that it attends (1 for +inf, 2^7 for -inf, 2^14 for NaN: at most 64 keys at a time).
    template <int KT>
    __device__ void add_values_carefully(const u32 (&a)[MT][KT][4], const Elem* v_tile) {
        const int lane = threadIdx.x % 32;
        const u32 v_at = shared_address(v_tile + place<DV>(lane % 16, lane / 16 * 8));
#pragma unroll
        for (int n0 = 0; n0 < DV / 8 * ((KT + 3) / 4); n0 += 2) {
            const int nt = n0 % (DV / 8), first = n0 / (DV / 8) * 4;
            float count[MT][2][4] = {};
#pragma unroll
            for (int kt = first; kt < (first + 4 < KT ? first + 4 : KT); kt++) {
                u32 b[4], finite[4], kind[4];
                ldmatrix_trans(b, beyond<DV>(v_at, nt * 8) + kt * 16 * V_ROW * 2);
#pragma unroll
                for (int n = 0; n < 4; n++) split_finite(b[n], finite[n], kind[n]);
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    u32 attends[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        attends[e] = (a[mt][kt][e] & 0x8000u ? 0 : ONE) | (a[mt][kt][e] >> 31 ? 0 : ONE << 16);
                    }
                    mma(acc[mt][nt], a[mt][kt], finite[0], finite[1]);
                    mma(acc[mt][nt + 1], a[mt][kt], finite[2], finite[3]);
                    mma(count[mt][0], attends, kind[0], kind[1]);
                    mma(count[mt][1], attends, kind[2], kind[3]);
                }
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int found = (int)count[mt][n][e];
                        const float nan = not_a_number();
                        if (found >= 1 << 14 || (found % 128 != 0 && found >= 128)) {
                            acc[mt][nt + n][e] = nan;
                        } else if (found != 0) {
                            acc[mt][nt + n][e] += found >= 128 ? negative_infinity() : -negative_infinity();
                        }
                    }
        }
    }

    static constexpr u32 ONE = STORAGE == F16 ? 0x3c00u : 0x3f80u;

    __device__ static void split_finite(u32 pair, u32& finite, u32& kind) {
        constexpr u32 EXPONENT = STORAGE == F16 ? 0x7c00u : 0x7f80u;
        constexpr u32 NEGATIVE = STORAGE == F16 ? 0x5800u : 0x4300u, NAN_KIND = STORAGE == F16 ? 0x7400u : 0x4680u;
        finite = kind = 0;
#pragma unroll
        for (int shift = 0; shift < 32; shift += 16) {
            const u32 x = pair >> shift & 0xffffu;
            if ((x & EXPONENT) != EXPONENT) {
                finite |= x << shift;
            } else {
                kind |= ((x & 0x7fffu) != EXPONENT ? NAN_KIND : x >> 15 ? NEGATIVE : ONE) << shift;
            }
        }
    }

    __device__ bool has_non_finite() const {
        u32 most = 0;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int nt = 0; nt < DV / 8; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) most = max(most, __float_as_uint(acc[mt][nt][e]) & 0x7fffffffu);
        return most >= 0x7f800000u;
    }

    // l of the whole row.
    __device__ void reduce() {
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                l[mt][h] += __shfl_xor_sync(~0u, l[mt][h], 1);
                l[mt][h] += __shfl_xor_sync(~0u, l[mt][h], 2);
            }
    }
};

// The factor of an exponent of 2, and of m to be in natural units.
__device__ inline float exponent_factor(const Params& p) { return NATURAL ? LOG2_E : (float)(p.scale * 1.4426950408889634); }
__device__ inline float natural_max(const Params& p, float m) { return NATURAL ? m : m * (float)p.scale; }
