// What stands between a product q.k and a score: scale, softcap, slopes, biases, masks and positions.
//
//   s = softcap(q.k * softmax_scale) - slope*|i + diagonal - j| + bias;  -inf where masked
//
// A mask tensor is read here, and by the MaskReader of hopper/mask_ring.cuh, which loads whole tiles into shared memory; nowhere else.
// Masked is False of a boolean, and -inf of a bias; any other bias is a number.

#pragma once
#include "common/fragment.cuh"
#include "common/math.cuh"
#include "common/params.cuh"

// Whether key j is masked, and what is added where it is not.
__device__ inline bool is_masked(const Params& p, i64 row, int j, Acc& bias) {
    bias = 0;
#if MASK == BOOL_MASK
    return ((const u8*)p.mask)[row + j * p.mask_stride[3]] == 0;
#elif MASK == ADDITIVE_MASK
    bias = load_as(p.mask, MASK_DTYPE, row + j * p.mask_stride[3]);
    return bias == negative_infinity();
#else
    return false;
#endif
}

// The end of a row: what its sums are multiplied with, and its lse.

// A product q.k in natural units: scale, softcap, and the slope of a key `distance` away.
__device__ inline Acc natural_score(
    const Params& p, Acc x, Acc scale, Acc cap, Acc inverse_cap, Acc slope, int distance
) {
    x *= scale;
    if (p.softcap != 0) x = cap * hyperbolic_tangent(x * inverse_cap);
    if (p.alibi != nullptr) x -= slope * (Acc)abs(distance);
    return x;
}

#if STORAGE != F64
// What the mask says of a thread's pairs of keys in a tile.
template <int MT, int NT>
struct MaskTile {
    u32 hidden[MT][2];  // bool: two bits for each pair

    // Before the product that is masked: the loads are under way while it runs.
    __device__ void fetch(const Params& p, const Queries& queries, int n0) {
#if MASK == BOOL_MASK
        const int j0 = n0 + lane_column(threadIdx.x);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i64 mask_row = queries.row(mt, h).offset(p.mask_stride);
                u32 bits = 0;
                if (p.mask_pairs) {
                    const u16* at = (const u16*)((const u8*)p.mask + mask_row + j0);
#pragma unroll
                    for (int nt = 0; nt < NT; nt++) {
                        const int left = p.kv_len - j0 - nt * 8;
                        const u32 pair = left >= 2 ? at[nt * 4] : left == 1 ? *(const u8*)(at + nt * 4) : 0;
                        bits |= ((pair & 0xffu) == 0 ? 1u : 0u) << nt * 2 | (pair >> 8 == 0 ? 2u : 0u) << nt * 2;
                    }
                } else {
#pragma unroll
                    for (int e = 0; e < NT * 2; e++) {
                        const int j = j0 + e / 2 * 8 + e % 2;
                        float bias;
                        if (j < p.kv_len && is_masked(p, mask_row, j, bias)) bits |= 1u << e;
                    }
                }
                hidden[mt][h] = bits;
            }
#endif
    }

    // Whether keys j and j+1, the pair `nt` of a row, are masked, and what is added where they are not.
    __device__ void read(
        const Params& p, i64 row, int mt, int h, int nt, int j, bool (&masked)[2], float (&bias)[2]
    ) const {
        bias[0] = bias[1] = 0;
#if MASK == BOOL_MASK
        masked[0] |= hidden[mt][h] >> nt * 2 & 1, masked[1] |= hidden[mt][h] >> (nt * 2 + 1) & 1;
#elif MASK == ADDITIVE_MASK
        if (p.mask_pairs && j + 1 < p.kv_len) {
#if MASK_DTYPE == F32
            const float2 pair = *(const float2*)((const float*)p.mask + row + j);
            bias[0] = pair.x, bias[1] = pair.y;
#else
            const u32 pair = *(const u32*)((const u16*)p.mask + row + j);
            bias[0] = MASK_DTYPE == F16 ? f16_to_float(pair) : bf16_to_float(pair);
            bias[1] = MASK_DTYPE == F16 ? f16_to_float(pair >> 16) : bf16_to_float(pair >> 16);
#endif
        } else {
            for (int e = 0; e < 2; e++) {
                if (j + e < p.kv_len) bias[e] = load_as(p.mask, MASK_DTYPE, row + (j + e) * p.mask_stride[3]);
            }
        }
        masked[0] |= bias[0] == negative_infinity(), masked[1] |= bias[1] == negative_infinity();
#endif
    }
};

// Scale, softcap, slopes, biases and masks, for keys n0.. of which those below `end` count.
template <int MT, int NT>
__device__ inline void apply_scores(
    Accumulator<NT> (&s)[MT], const Params& p, const Queries& queries, const MaskTile<MT, NT>& mask, int n0, int end,
    bool positions
) {
    const float scale = (float)p.scale, cap = (float)p.softcap;
    const float inverse_cap = (float)p.inverse_softcap;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Row row = queries.row(mt, h);
            const i64 mask_row = MASK == ADDITIVE_MASK ? row.offset(p.mask_stride) : 0;
            const float slope =
                NATURAL && p.alibi != nullptr ? load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride) : 0.f;
            const int i = row.i;
            // Counted from the thread's first key, so that what an element is compared with is a constant.
            const int first = n0 + lane_column(threadIdx.x);
            const int lo = positions ? keys_lo(p, i) - first : 0;
            const int hi = positions ? min(keys_hi(p, i), end) - first : NT * 8;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                const int j0 = first + nt * 8;
                bool masked[2] = {nt * 8 < lo || nt * 8 >= hi, nt * 8 + 1 < lo || nt * 8 + 1 >= hi};
                float bias[2];
                mask.read(p, mask_row, mt, h, nt, j0, masked, bias);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[mt][nt][h * 2 + e];
                    if (NATURAL) {
                        x = natural_score(p, x, scale, cap, inverse_cap, slope, i + p.diagonal - j0 - e);
                        if (MASK == ADDITIVE_MASK) x += bias[e];
                    }
                    if (masked[e]) x = negative_infinity();
                }
            }
        }
}
#endif
