// The softmax of mma.cu over codes: weights of float16 make use of its range, and may have a factor of their key in them.
//
//   p = 2^(s*c - row_max + SHIFT);  weight = p * factor      row_sum sums p, row_max is a reference in powers of 2
//
// Beside factors of keys (TOKEN) row_max is the maximum of s*c + log2(factor): so the greatest weight is 2^SHIFT when it is taken, and not
// rounded, whatever the factors are. Else all is as in online_softmax.cuh, and row_max the greatest score.

#pragma once
#include "common/online_softmax.cuh"
#include "mma/coded_tiles.cuh"

// Weights are at most 2^(WEIGHT_SHIFT + SLACK), which float16 holds; the least normal ones are 2^-21 of the greatest, or less.
constexpr int WEIGHT_SHIFT = V_HALF ? 7 : 0;
constexpr float WEIGHT_UNIT = V_HALF ? 0x1p-7f : 1.f;

template <int MT>
struct WeighedSoftmax : OnlineSoftmax<MT, V_HALF, WEIGHT_SHIFT> {
    using Base = OnlineSoftmax<MT, V_HALF, WEIGHT_SHIFT>;
    using Base::acc_o, Base::row_max, Base::row_sum;

    template <bool CAREFUL, int NT>
    __device__ void add_keys(OperandA<NT / 2> (&p)[MT], Accumulator<NT> (&s)[MT], const CodedStages& sh, float c, float slack) {
        if constexpr (V_SCALES == TOKEN) add_weighed_keys<CAREFUL, NT>(p, s, sh.weighing + lane_column(threadIdx.x), c, slack);
        else Base::template add_keys<CAREFUL, NT>(p, s, c, slack);
    }

    // A row's maximum in natural units.
    __device__ float natural_max_of(const Params& p, int mt, int h) const {
        return V_SCALES == TOKEN ? row_max[mt][h] * LN_2 : natural_max(p, row_max[mt][h]);
    }

  private:
    // `keys`: of the lane's first key.
    template <bool CAREFUL, int NT>
    __device__ void add_weighed_keys(OperandA<NT / 2> (&p)[MT], Accumulator<NT> (&s)[MT], const Weighing* keys, float c, float slack) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            float top[2] = {row_max[mt][0], row_max[mt][1]};
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                const float log2[2] = {keys[nt * 8].log2, keys[nt * 8 + 1].log2};
#pragma unroll
                for (int e = 0; e < 4; e++) top[e / 2] = fmaxf(top[e / 2], __fmaf_rn(s[mt][nt][e], c, log2[e % 2]));
            }
            bool has_risen = false;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                top[h] = max_of_lanes<4>(top[h]);
                has_risen |= top[h] - row_max[mt][h] > slack;
            }
            if (__any_sync(~0u, has_risen)) {
                float factor[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float rise = top[h] - row_max[mt][h];
                    factor[h] = rise > slack ? exp2_approx(-rise) : 1.f;
                    row_max[mt][h] = rise > slack ? top[h] : row_max[mt][h];
                    row_sum[mt][h] *= factor[h];
                }
                rescale(acc_o[mt], factor, CAREFUL);
            }
            float subtracted[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                subtracted[h] = (row_max[mt][h] == negative_infinity() ? 0.f : row_max[mt][h]) - WEIGHT_SHIFT;
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                float factor[2] = {keys[nt * 8].factor, keys[nt * 8 + 1].factor};
                if (CAREFUL) factor[0] = fabsf(factor[0]), factor[1] = fabsf(factor[1]);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float& x = s[mt][nt][e];
                    const bool masked = x == negative_infinity();
                    x = exponential_below(x, c, subtracted[e / 2]);
                    row_sum[mt][e / 2] += x;
                    x = CAREFUL && masked ? -0.f : product(x, factor[e % 2]);
                }
            }
            pack_weights<NT, V_HALF>(p[mt], s[mt]);
        }
    }
};
