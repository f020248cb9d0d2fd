// A mask tensor: where its elements lie, what a stored one means, and what hides a key. Whoever reads one does it by these functions.
//
//   boolean    a byte for each key                   0 hides the key
//   additive   a bias for each key, MASK_DTYPE       -inf hides the key; any other bias is a number that its score is added to
//
//   is_masked              one key                                                       generic.cu, hopper/careful.cuh
//   MaskTile               a thread's keys of a tile, which it loads itself              mma.cu, decode.cu, hopper_f32.cu
//   hopper/mask_ring.cuh   a block's tile in shared memory, loaded by other warps        hopper.cu
//   backward/hopper_mask   the same of scores whose rows are keys                        backward_hopper.cu
//   backward/mask_tile     biases of a tile that many heads share, read once             backward_mma.cu, of a mask's gradient
//
// hopper.cu has a ring because a thread's own loads do not keep up with its products: a tile ahead they gave 478 TFLOP/s with booleans
// and 291 with bfloat16 biases, where warps that only load gave 505 and 446, before TMA (4096 keys; H200, 2026-11; docs/lab/hopper.md).
// mma.cu and decode.cu have no such warps, and beside the tiles of hopper_f32.cu there is no room for two of a mask (head_dim 128).

#pragma once
#include "common/fragment.cuh"
#include "common/mask_bits.cuh"
#include "common/math.cuh"
#include "common/params.cuh"

// Where key 0 of a row lies, and key j of a row that begins at `row`, in elements.
__device__ inline i64 mask_row(const Params& p, const Row& row) { return row.offset(p.mask_stride); }
__device__ inline i64 mask_key(const Params& p, i64 row, int j) { return row + j * p.mask_stride[3]; }
// Whether all rows of a task are one: a padding mask.
__device__ inline bool is_one_row(const Params& p) {
    return p.mask_stride[2] == 0 && (p.task_heads == 1 || p.mask_stride[1] == 0);
}

// Key j of a row: whether it is masked, and what is added to its score where it is not.
__device__ inline bool is_masked(const Params& p, i64 row, int j, Acc& bias) {
    bias = 0;
#if MASK == BOOL_MASK
    return ((const u8*)p.mask)[mask_key(p, row, j)] == 0;
#elif MASK == ADDITIVE_MASK
    bias = load_as(p.mask, MASK_DTYPE, mask_key(p, row, j));
    return bias == negative_infinity();
#else
    return false;
#endif
}

// Bias e of a pair of 16 bits each.
__device__ inline float bias_of_pair(u32 pair, int e) {
    const u16 stored = pair >> e * 16;
    return MASK_DTYPE == F16 ? f16_to_float(stored) : bf16_to_float(stored);
}

#if STORAGE != F64
// Two neighbouring scores of a thread: of the tile `nt` of 8 keys in row h of its two in the fragment `mt`.
struct ScorePair {
    int mt, h, nt;
};

// What the mask says of a thread's keys of a tile, loaded by that thread: booleans before the product that they mask, as a bit for each
// key; biases where they are added, two at a time where rows allow (mask_pairs).
template <int MT, int NT>
struct MaskTile {
    u32 hidden[MT][2];  // booleans: a bit for each key in the order of `key_bit`, 1 where it is masked

    // Before the product that is masked: the loads are under way while it runs.
    __device__ void fetch(const Params& p, const Queries& queries, int n0) {
#if MASK == BOOL_MASK
        const int j0 = n0 + lane_column(threadIdx.x);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i64 row = mask_row(p, queries.row(mt, h));
                u32 bits = 0;
                if (p.mask_pairs) {
                    const u16* at = (const u16*)((const u8*)p.mask + row + j0);
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
                        if (j < p.kv_len && is_masked(p, row, j, bias)) bits |= 1u << e;
                    }
                }
                hidden[mt][h] = bits;
            }
#endif
    }

    // Whether keys j and j+1 of a row, whose scores are `pair`, are masked, and what is added where they are not.
    __device__ void read(
        const Params& p, i64 row, const ScorePair& pair, int j, bool (&masked)[2], float (&bias)[2]
    ) const {
        bias[0] = bias[1] = 0;
#if MASK == BOOL_MASK
        const u32 bits = hidden[pair.mt][pair.h];
        masked[0] |= bits >> pair.nt * 2 & 1, masked[1] |= bits >> (pair.nt * 2 + 1) & 1;
#elif MASK == ADDITIVE_MASK
        if (p.mask_pairs && j + 1 < p.kv_len) {
#if MASK_DTYPE == F32
            const float2 biases = *(const float2*)((const float*)p.mask + row + j);
            bias[0] = biases.x, bias[1] = biases.y;
#else
            const u32 biases = *(const u32*)((const u16*)p.mask + row + j);
            bias[0] = bias_of_pair(biases, 0), bias[1] = bias_of_pair(biases, 1);
#endif
        } else {
            for (int e = 0; e < 2; e++) {
                if (j + e < p.kv_len) bias[e] = load_as(p.mask, MASK_DTYPE, mask_key(p, row, j + e));
            }
        }
        masked[0] |= bias[0] == negative_infinity(), masked[1] |= bias[1] == negative_infinity();
#endif
    }
};
#endif
