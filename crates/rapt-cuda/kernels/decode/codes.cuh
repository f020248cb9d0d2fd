// Tiles of codes in shared memory, and pairs of them as the operands of mma.sync: bfloat16, which holds every code exactly.
//
//   lane = 4*g + t        K: key g of a tile of 8, its head_dim in runs: run r of lane t begins at d = (4*r + t) * K_RUN
//                         V: keys 2t, 2t+1, +8, columns in runs: run c of lane g begins at column (8*c + g) * V_RUN
// A lane loads a run at once and multiplies the codes in the order in which they come apart, so q and the columns of the sums follow
// (`q_column`, `value_column`). Rows are padded, or their units swizzled, so that lanes fall into distinct banks.
//
// A pair becomes two bfloat16 by exact steps: bits put in place of a mantissa and a power of two taken away, or put in place of
// exponent and mantissa and multiplied by a power of two. Codes that are not finite (e4m3fn, e5m2) come out finite: `not_finite`
// finds them. Deliberately absent: factors, and what is done with such codes.

#pragma once
#include "common/codes.cuh"
#include "common/ptx.cuh"

__device__ constexpr u32 both(u32 half) { return half << 16 | half; }
__device__ inline u32 add_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, both(0x3f80), b); }
__device__ inline u32 multiply_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, both(0x8000)); }
// The bfloat16 of 2^n.
__device__ constexpr u32 bf16_exp2(int n) { return (u32)(n + 127) << 7; }

// What an integer code of 8 bits is before its zero point is taken away: uint8 comes out 128 too small.
__device__ constexpr float code_offset(int kind) { return kind == UINT8 ? 128.f : 0.f; }

// The bits that are taken out of words of codes, in registers: an instruction has room for one constant, and the compiler makes others
// anew each time if it knows them. (int8, head_dim 128: 232 of 1,500 instructions of the loop; NVRTC 13.2.)
template <int KIND>
struct CodeBits {
    u32 size, sign;
    // `zero` is 0, and the compiler does not know it.
    __device__ explicit CodeBits(u32 zero)
        : size(both(KIND == E4M3FN ? 0x7f0 : KIND == E5M2 ? 0xfe0 : KIND == INT4 ? 0xf : KIND == E2M1 ? 0x1c0 : 0x7f) + zero),
          sign(both(KIND == INT8 || KIND == UINT8 ? 0x80 : 0x8000) + zero) {}
};

// Codes of 8 bits, bytes 0 and 2 of a word, or 1 and 3.
template <int KIND, bool ODD>
__device__ inline u32 pair_of_bytes(u32 w, const CodeBits<KIND>& bits) {
    if constexpr (KIND == INT8 || KIND == UINT8) {
        if (ODD) w >>= 8;
        // 128 + the lower 7 bits, minus 128 or 256 by the highest.
        const u32 low = (w & bits.size) | both(0x4300);
        const u32 high = ((KIND == INT8 ? w : ~w) & bits.sign) | both(0xc300);
        return add_bf16x2(low, high);
    } else {
        constexpr int SHIFT = KIND == E4M3FN ? 4 : 5;
        const u32 size = ODD ? w >> (8 - SHIFT) : w << SHIFT, sign = ODD ? w : w << 8;
        return multiply_bf16x2((size & bits.size) | (sign & bits.sign), both(bf16_exp2(KIND == E4M3FN ? 120 : 112)));
    }
}

// Codes of 4 bits: number I of each half of a word. e2m1 comes out 2^-126 times its number: its scale makes up for it.
template <int KIND, int I>
__device__ inline u32 pair_of_nibbles(u32 w, const CodeBits<KIND>& bits) {
    if constexpr (KIND == INT4) {
        // 128 + 8 + code, minus 136.
        return add_bf16x2(((w >> 4 * I) & bits.size) ^ both(0x4308), both(0xc308));
    } else {
        const u32 size = I == 0 ? w << 6 : I == 1 ? w << 2 : I == 2 ? w >> 2 : w >> 6;
        const u32 sign = I == 3 ? w : w << (12 - 4 * I);
        return (size & bits.size) | (sign & bits.sign);
    }
}

// In bit 7 of a byte whether a code of a word of four is not finite.
template <int KIND>
__device__ inline u32 not_finite(u32 w) {
    if constexpr (KIND == E4M3FN) return (w & 0x7f7f7f7f) + 0x01010101;
    if constexpr (KIND == E5M2) return (w & 0x7c7c7c7c) + 0x04040404;
    return 0;
}

// The rows of K or V of a tile: RUN codes of KIND at a time to a lane.
template <int KIND, int DIM, int RUN>
struct CodeRows {
    static constexpr bool PACKED = is_packed(KIND);
    static constexpr int ROW = PACKED ? DIM / 2 : DIM;      // bytes
    static constexpr int RUN_BYTES = PACKED ? RUN / 2 : RUN;
    static constexpr int WORDS = RUN_BYTES < 4 ? 1 : RUN_BYTES / 4;
    static constexpr int WHOLE_ROW = (ROW + 15) / 16 * 16;  // in units of 16 bytes
    static_assert((RUN_BYTES & (RUN_BYTES - 1)) == 0 && RUN_BYTES <= 16, "a lane loads a run at once");

    __device__ static void load(u32 (&words)[WORDS], const u8* at) {
        if constexpr (RUN_BYTES == 1) {
            words[0] = *at;
        } else if constexpr (RUN_BYTES == 2) {
            words[0] = *(const u16*)at;
        } else if constexpr (RUN_BYTES == 4) {
            words[0] = *(const u32*)at;
        } else if constexpr (RUN_BYTES == 8) {
            *(uint2*)words = *(const uint2*)at;
        } else {
            *(uint4*)words = *(const uint4*)at;
        }
    }
};

// Keys: 8 lanes of one t read 8 rows, 4 lanes of a row a unit of 4 runs.
template <int KIND, int DIM, int RUN>
struct KeyRows : CodeRows<KIND, DIM, RUN> {
    using Rows = CodeRows<KIND, DIM, RUN>;
    static constexpr int STEP = Rows::RUN_BYTES < 4 ? 1 : Rows::RUN_BYTES / 4;  // units of 16 bytes from row to row
    static constexpr bool SWIZZLED = Rows::ROW % 128 == 0;
    static constexpr int padded(int pitch) {
        return SWIZZLED || pitch % (32 * STEP) == 16 * STEP ? pitch : padded(pitch + 16);
    }
    static constexpr int PITCH = padded(Rows::WHOLE_ROW);
    static constexpr int PERIOD = SWIZZLED ? 8 / STEP : 1;  // rows after which units are swizzled as before
    // Where byte `at` of row r stands.
    __device__ static int place(int r, int at) { return r * PITCH + (SWIZZLED ? at ^ (r * STEP % 8 * 16) : at); }
    static constexpr int RUNS = DIM / (4 * RUN), STEPS = RUN / 4;  // steps of 16 columns of q of a run
    // The column of q that element e (of 2t, 2t+1, 2t+8, 2t+9) of step `step` of run r multiplies in lane t.
    __device__ static int q_column(int r, int step, int t, int e) {
        const int first = (4 * r + t) * RUN;
        if (!Rows::PACKED || RUN == 4) return first + 4 * step + (e == 1 ? 2 : e == 2 ? 1 : e);
        return first + step / 2 * 8 + step % 2 * 2 + (e == 1 ? 4 : e == 2 ? 1 : e == 3 ? 5 : 0);
    }
    // The operand of step `step`, b0 and b1, of a run in `words`.
    template <int STEP_OF_RUN>
    __device__ static void operand(const u32 (&words)[Rows::WORDS], const CodeBits<KIND>& bits, u32& b0, u32& b1) {
        if constexpr (!Rows::PACKED) {
            const u32 w = words[STEP_OF_RUN];
            b0 = pair_of_bytes<KIND, false>(w, bits), b1 = pair_of_bytes<KIND, true>(w, bits);
        } else if constexpr (RUN == 4) {
            const u32 w = (words[0] & 0xff) | (words[0] >> 8 << 16);
            b0 = pair_of_nibbles<KIND, 0>(w, bits), b1 = pair_of_nibbles<KIND, 1>(w, bits);
        } else {
            const u32 w = words[STEP_OF_RUN / 2];
            b0 = pair_of_nibbles<KIND, STEP_OF_RUN % 2 * 2>(w, bits), b1 = pair_of_nibbles<KIND, STEP_OF_RUN % 2 * 2 + 1>(w, bits);
        }
    }
};

// Values: 4 lanes of one g read rows 2 apart, 8 lanes of a row neighbouring runs.
template <int KIND, int DIM, int RUN>
struct ValueRows : CodeRows<KIND, DIM, RUN> {
    using Rows = CodeRows<KIND, DIM, RUN>;
    static constexpr int PITCH = Rows::WHOLE_ROW % 32 == 0 ? Rows::WHOLE_ROW + 16 : Rows::WHOLE_ROW;
    static constexpr int PERIOD = 1;
    __device__ static int place(int r, int at) { return r * PITCH + at; }
    static constexpr int RUNS = DIM / (8 * RUN);
    // The column of values of column n of tile nt of the sums.
    __device__ static int value_column(int nt, int n) { return (8 * (nt / RUN) + n) * RUN + nt % RUN; }
    // The operand's word of column I of a run, of two rows.
    template <int I>
    __device__ static u32 operand(const u32 (&row0)[Rows::WORDS], const u32 (&row1)[Rows::WORDS], const CodeBits<KIND>& bits) {
        constexpr int PER_WORD = Rows::PACKED ? 8 : 4, HALF = PER_WORD / 2, AT = RUN < PER_WORD ? I : I % HALF;
        u32 w;
        if constexpr (RUN < PER_WORD) w = row0[0] | row1[0] << 16;
        else w = __byte_perm(row0[I / PER_WORD], row1[I / PER_WORD], I % PER_WORD < HALF ? 0x5410 : 0x7632);
        if constexpr (Rows::PACKED) return pair_of_nibbles<KIND, AT>(w, bits);
        else return pair_of_bytes<KIND, AT == 1>(w, bits);
    }
};
