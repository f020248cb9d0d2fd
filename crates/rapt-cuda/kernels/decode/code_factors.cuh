// Factors and zero points of codes as decode_codes.cu takes them: of heads and columns out of memory, of keys and blocks out of a tile.
// Deliberately absent: where each is multiplied.

#pragma once
#include "decode/columns.cuh"
#include "decode/load_codes.cuh"

// 2^n.
__device__ inline float exp2_of(int n) { return __uint_as_float((u32)(n + 127) << 23); }

// Two factors of 8 bits, in the lower half of a word, as they multiply a pair of operands.
template <int DTYPE>
__device__ inline u32 factor_pair(u32 codes) {
    if constexpr (DTYPE == SCALE_E8M0) {
        return __float_as_uint(e8m0_to_float(codes & 0xff)) >> 16 | (__float_as_uint(e8m0_to_float(codes >> 8 & 0xff)) & 0xffff0000u);
    } else {
#if __CUDA_ARCH__ >= 890
        return e4m3x2_to_f16x2(codes);
#else
        return pack_as<true>(e4m3fn_to_float(codes & 0xff), e4m3fn_to_float(codes >> 8 & 0xff));
#endif
    }
}
// The factors of key j and the runs of a lane.
__device__ inline void load_key_factors(u32 (&pairs)[Keys::RUNS], const u8* factors, int j) {
    const int t = threadIdx.x % 4;
    const u8* row = factors + j * K_SCALE_BYTES;
#pragma unroll
    for (int run = 0; run < Keys::RUNS; run++) {
        // Where each of four lanes has a block of its own they lie in one word.
        const u32 twice = K_RUN == K_BLOCK ? __byte_perm(((const u32*)row)[run], 0, t * 0x11) : row[(4 * run + t) * K_RUN / K_BLOCK] * 0x101;
        pairs[run] = factor_pair<K_SCALE_DTYPE>(twice);
    }
}
// The factors of keys j and j+1 and a lane's columns of each unit of values.
__device__ inline void load_value_factors(u32 (&pairs)[Values::UNITS], const u8* factors, int j) {
    const int g = threadIdx.x % 32 / 4;
    const u8* row = factors + j * V_SCALE_BYTES;
    if constexpr (V_BLOCK * 2 == Values::UNIT_COLUMNS && V_SCALE_BYTES % 4 == 0) {
        // A word has the blocks of two units, of each the lane's.
        const u32* words = (const u32*)row;
#pragma unroll
        for (int unit = 0; unit < Values::UNITS; unit += 2) {
            const u32 both_units = __byte_perm(words[unit / 2], words[V_SCALE_BYTES / 4 + unit / 2], g < 4 ? 0x6240 : 0x7351);
            pairs[unit] = factor_pair<V_SCALE_DTYPE>(both_units), pairs[unit + 1] = factor_pair<V_SCALE_DTYPE>(both_units >> 16);
        }
    } else {
#pragma unroll
        for (int unit = 0; unit < Values::UNITS; unit++) {
            const int block = min(unit * Values::UNIT_COLUMNS + g * Values::LANE_COLUMNS, DV - 1) / V_BLOCK;
            pairs[unit] = factor_pair<V_SCALE_DTYPE>(row[block] | row[V_SCALE_BYTES + block] << 8);
        }
    }
}
// Column d's factor of a head, 1 where factors are no columns'.
template <int SCALES>
__device__ inline float channel_factor(const Codes& codes, const Item& item, int d) {
    if (SCALES != CHANNEL) return 1;
    const i64 at = item.batch * codes.descale_stride[0] + item.kv_head * codes.descale_stride[1] + d * codes.descale_stride[3];
    return ((const float*)codes.descale)[at];
}
// The factor of all sums of a head.
template <int SCALES>
__device__ inline float head_factor(const Codes& codes, const Item& item) {
    if (SCALES == BLOCK) return codes.global_scale;
    if (SCALES != UNIFORM) return 1;
    return ((const float*)codes.descale)[item.batch * codes.descale_stride[0] + item.kv_head * codes.descale_stride[1]];
}
// What is taken from the uint8 codes of key j, as they are multiplied.
template <class Operand>
__device__ inline float zero_point(const Params& p, const Codes& codes, const Item& item, int j) {
    const KeyPlace key(p, item.batch, item.sequence.first_key() + min(j, item.sequence.kv_len(p) - 1));
    if (!key.exists(p)) return 0;
    const int of = codes.in_pages ? key.block : item.batch;
    const i64 at = of * codes.zero_point_stride[0] + item.kv_head * codes.zero_point_stride[1];
    return codes.zero_point[at + key.row * codes.zero_point_stride[2]] - Operand::OFFSET;
}
// What belongs to each of a lane's keys of a tile.
template <class F>
__device__ inline void of_keys(OfKeys& to, F f) {
#pragma unroll
    for (int n = 0; n < MT * 2; n++) to[n / 2][n % 2] = f(n * 8 + lane_row((int)threadIdx.x));
}

// The factors of a lane's keys of values, those of tokens; CAREFUL: 0 for one that is not finite, and whether there is one.
template <bool CAREFUL>
__device__ inline bool load_token_factors(OfKeys& factor, const u8* factors) {
    bool is_odd = false;
    if (V_SCALES != TOKEN) return is_odd;
    of_keys(factor, [&](int j) {
        const float x = ((const float*)factors)[j];
        if (!CAREFUL || is_finite(x)) return x;
        is_odd = true;
        return 0.f;
    });
    return is_odd;
}
// Whether a column of values of the lane has a factor that is not finite.
__device__ inline bool has_odd_channel(const Params& p, const Item& item) {
    bool is_odd = false;
    if (V_SCALES != CHANNEL) return is_odd;
    for (int d = threadIdx.x % 32; d < p.head_dim_v; d += 32) is_odd |= !is_finite(channel_factor<V_SCALES>(p.v_codes, item, d));
    return is_odd;
}
