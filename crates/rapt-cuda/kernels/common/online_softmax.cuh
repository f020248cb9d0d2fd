// The running state of MT*16 rows of a warp in mma.sync's fragments: two rows per fragment and thread; row_sum is the thread's own
// share until `reduce`. Values lie in tiles that ldmatrix reads (tile.cuh).
//
//   add_keys:    row_max, row_sum, acc_o and p as above, rescaled only when a maximum has risen by more than `slack` powers of 2
//   add_values:  acc_o += p.v

#pragma once
#include "common/softmax.cuh"
#include "common/tile.cuh"

// What was counted of values that are not finite (1 for +inf, 2^7 for -inf, 2^14 for NaN), added to the sum that they belong to.
__device__ inline void add_counted(float& sum, int found) {
    if (found >= 1 << 14 || (found % 128 != 0 && found >= 128)) {
        sum = not_a_number();
    } else if (found != 0) {
        sum += found >= 128 ? negative_infinity() : -negative_infinity();
    }
}

// HALF: weights and values are float16, else bfloat16; weights are 2^SHIFT times p.
template <int MT, bool HALF = MMA_HALF, int SHIFT = 0>
struct OnlineSoftmax {
    float row_max[MT][2], row_sum[MT][2];
    Accumulator<DV / 8> acc_o[MT];

    __device__ void clear() {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            row_max[mt][0] = row_max[mt][1] = negative_infinity(), row_sum[mt][0] = row_sum[mt][1] = 0;
            zero(acc_o[mt]);
        }
    }

    // Scores become p, packed as A operands. At a slack of 8, p stays below 256, and sums are seldom rescaled; at 0 the greatest p is
    // 1 and not rounded. What is rare stands apart, so that the rest is one run of instructions in which exponentials and products
    // overlap.
    template <bool CAREFUL, int NT>
    __device__ void add_keys(OperandA<NT / 2> (&p)[MT], Accumulator<NT> (&s)[MT], float c, float slack) {
        float top[MT][2], exponent_max[MT][2];
        bool has_risen = false;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                top[mt][h] = max_of_row(s[mt], h, row_max[mt][h]);
                has_risen |= (top[mt][h] - row_max[mt][h]) * c > slack;
            }
        if (__any_sync(~0u, has_risen)) {
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                float factor[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float rise = (top[mt][h] - row_max[mt][h]) * c;
                    factor[h] = rise > slack ? exp2_approx(-rise) : 1.f;
                    row_max[mt][h] = rise > slack ? top[mt][h] : row_max[mt][h];
                    row_sum[mt][h] *= factor[h];
                }
                rescale(acc_o[mt], factor, CAREFUL);
            }
        }
        subtract_far(s, row_max, exponent_max, c);
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = row_sum[mt][h];
                const float subtracted = exponent_max[mt][h] - SHIFT;
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[mt][nt][h * 2 + e];
                        const bool masked = x == negative_infinity();
                        x = SHIFT == 0 ? exponential_of(x, c, exponent_max[mt][h]) : exponential_below(x, c, subtracted);
                        sum += x;
                        if (CAREFUL && masked) x = -0.f;
                    }
                row_sum[mt][h] = sum;
            }
            pack_weights<NT, HALF>(p[mt], s[mt]);
        }
    }

    // acc_o += p.v
    template <bool CAREFUL, int KT>
    __device__ void add_values(const OperandA<KT> (&p)[MT], const Elem* v_tile) {
        if constexpr (CAREFUL) {
            add_values_carefully<KT>(p, v_tile);
        } else {
            add_finite_values<KT>(p, v_tile);
        }
    }

    template <int KT>
    __device__ void add_finite_values(const OperandA<KT> (&p)[MT], const Elem* v_tile) {
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
                    mma_of<HALF>(acc_o[mt][nt], p[mt][kt], b[0], b[1]);
                    mma_of<HALF>(acc_o[mt][nt + 1], p[mt][kt], b[2], b[3]);
                }
            }
    }

    // The same with values that are not finite told apart: they are left out of the product, and counted per row among
    // the keys that it attends (1 for +inf, 2^7 for -inf, 2^14 for NaN: at most 64 keys at a time).
    template <int KT>
    __device__ void add_values_carefully(const OperandA<KT> (&p)[MT], const Elem* v_tile) {
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
                        attends[e] = (p[mt][kt][e] & 0x8000u ? 0 : ONE) | (p[mt][kt][e] >> 31 ? 0 : ONE << 16);
                    }
                    mma_of<HALF>(acc_o[mt][nt], p[mt][kt], finite[0], finite[1]);
                    mma_of<HALF>(acc_o[mt][nt + 1], p[mt][kt], finite[2], finite[3]);
                    mma_of<HALF>(count[mt][0], attends, kind[0], kind[1]);
                    mma_of<HALF>(count[mt][1], attends, kind[2], kind[3]);
                }
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) add_counted(acc_o[mt][nt + n][e], (int)count[mt][n][e]);
        }
    }

    static constexpr u32 ONE = HALF ? 0x3c00u : 0x3f80u;

    __device__ static void split_finite(u32 pair, u32& finite, u32& kind) {
        constexpr u32 EXPONENT = HALF ? 0x7c00u : 0x7f80u;
        constexpr u32 NEGATIVE = HALF ? 0x5800u : 0x4300u, NAN_KIND = HALF ? 0x7400u : 0x4680u;
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
        float any = 0;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) any += non_finite(acc_o[mt]);
        return any != 0;
    }

    // row_sum of the whole row.
    __device__ void reduce() {
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) row_sum[mt][h] = sum_of_lanes<4>(row_sum[mt][h]);
    }
};
