// Tiles of codes in shared memory, and codes as the operand A of mma.sync: keys, or columns of values, are the rows of the product.
//
//   lane = 4*g + t        K: keys g and g+8 of 16, head_dim in runs: run r of lane t begins at d = (4*r + t) * RUN
//                         V: ldmatrix gives a lane keys 2t, 2t+1 (and +8) of the codes in 16 bits, 2 or 4 columns of them
// A word of codes comes apart into pairs; q and the columns of the sums follow in the order in which they do (`q_column`,
// `column`). Units of 16 bytes are swizzled, so that lanes fall into distinct banks.
//
// A pair is multiplied as two float16 or two bfloat16. What is exact in few instructions:
//
//   float16    int8, uint8, int4   bits of an integer are a subnormal number: 2^-24 times code + bias, where bias is 128, 0 or 8;
//                                  without a bias (CENTERED) a normal one, 2^-9 times the code
//              e2m1                bits of exponent and mantissa in their place: 2^-14 times its number
//              e4m3fn              by one conversion, or bits in their place: 2^-8 times its number
//              e5m2                its bits are the upper half of float16
//   bfloat16   integers            bits in place of a mantissa, less a power of two
//              e4m3fn, e5m2, e2m1  bits in their place, times a power of two
// Tensor cores align the products of a sum by the exponents of their operands, and a subnormal one counts as 2^-14: a sum of int4 has 17
// bits, one of int8 21. So where q has 32 bits codes are CENTERED; biases are taken away by sums of q and of p else.
// The second of two int4 of a byte comes out 16 times as large (`WIDENED`). Where codes that are not finite come out finite (`BLIND`) they
// are looked for, and marked at a price.
// Deliberately absent: factors.

#pragma once
#include "common/codes.cuh"
#include "common/ptx.cuh"

__device__ constexpr u32 both(u32 half) { return half << 16 | half; }
__device__ inline u32 add_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, both(0x3f80), b); }
__device__ inline u32 multiply_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, both(0x8000)); }
__device__ inline u32 multiply_f16x2(u32 a, u32 b) { return fma_f16x2(a, b, both(0x8000)); }
// The bfloat16 of 2^n.
__device__ constexpr u32 bf16_exp2(int n) { return (u32)(n + 127) << 7; }

// As what codes of KIND are multiplied: as float16 (HALF) or bfloat16; CENTERED: without a bias.
template <int KIND, bool HALF, bool CENTERED>
struct CodeOperand {
    static constexpr bool PACKED = is_packed(KIND);
    static constexpr bool INTEGER = KIND == INT8 || KIND == UINT8 || KIND == INT4;
    static constexpr int PAIRS = PACKED ? 4 : 2;  // of a word
#if __CUDA_ARCH__ >= 890
    static constexpr bool CONVERTED = HALF && KIND == E4M3FN;
#else
    static constexpr bool CONVERTED = false;
#endif
    // Whether codes that are not finite come out finite in few instructions; `odd_of` finds them.
    static constexpr bool BLIND = KIND == E4M3FN ? !CONVERTED : KIND == E5M2 && !HALF;
    // Whether the second and fourth pair of a word are 16 times as large.
    static constexpr bool WIDENED = HALF && KIND == INT4;
    static constexpr bool BIASED = HALF && !CENTERED && (KIND == INT8 || KIND == INT4);
    // 2^EXPONENT is the unit.
    static constexpr int EXPONENT = !HALF ? 0 : INTEGER ? (CENTERED ? 9 : 24) : KIND == E2M1 ? 14 : KIND == E4M3FN && !CONVERTED ? 8 : 0;
    // What a uint8 code is before its zero point is taken away: so much too small.
    static constexpr float OFFSET = KIND == UINT8 && (!HALF || CENTERED) ? 128.f : 0.f;
    // The operand of the integer 1.
    static constexpr u32 ONE = CENTERED ? 0x1800 : 1;
    // The operand of the bias, of a pair.
    static constexpr u32 bias(int pair) { return both(KIND == INT8 ? 128 : pair % 2 ? 128 : 8); }

    // Masks in registers: an instruction has room for one constant, and the compiler makes others anew each time if it knows them.
    // (int8, head_dim 128: 232 of 1,500 instructions of a loop; NVRTC 13.2.)
    u32 size, sign, next;
    // `zero` is 0, and the compiler does not know it.
    __device__ explicit CodeOperand(u32 zero) {
        if constexpr (HALF) {
            size = KIND == INT4 ? both(0xf) : KIND == E2M1 ? both(0x0e0e) : KIND == E4M3FN ? both(0x3f80) : both(0xff);
            sign = KIND == INT8 || KIND == E2M1 ? both(0x8080) : KIND == INT4 ? both(0x8888) : both(0x8000);
            next = both(KIND == INT4 ? 0xf0 : 0xff00);
        } else {
            size = both(KIND == E4M3FN ? 0x7f0 : KIND == E5M2 ? 0xfe0 : KIND == INT4 ? 0xf : KIND == E2M1 ? 0x1c0 : 0x7f);
            sign = both(KIND == INT8 || KIND == UINT8 ? 0x80 : 0x8000);
            next = 0;
        }
        size += zero, sign += zero, next += zero;
    }

    // The pairs of a word: bytes 0 and 2, then 1 and 3; of packed codes number n of each half. ADJACENT: bytes 0 and 1, then 2 and 3,
    // where e4m3fn is converted. MARKED: those that are not finite come out so.
    template <bool ADJACENT, bool MARKED>
    __device__ void split(u32 w, u32 (&pairs)[PAIRS]) const {
        if constexpr (HALF) split_f16<ADJACENT>(w, pairs);
        else split_bf16(w, pairs);
        if constexpr (MARKED && BLIND) {
            const u32 odd = odd_of(w), exponent = HALF ? 0x7c00 : 0x7f80;
            pairs[0] |= (odd & both(0x80)) * (exponent >> 7), pairs[1] |= (odd >> 8 & both(0x80)) * (exponent >> 7);
        }
    }
    // In bit 7 of a byte whether a code of a word is not finite, where BLIND.
    __device__ static u32 odd_of(u32 w) {
        if constexpr (!BLIND) return 0;
        return KIND == E4M3FN ? (w & 0x7f7f7f7f) + 0x01010101 : (w & 0x7c7c7c7c) + 0x04040404;
    }

  private:
    template <bool ADJACENT>
    __device__ void split_f16(u32 w, u32 (&pairs)[PAIRS]) const {
        if constexpr (KIND == INT8 || KIND == UINT8) {
            pairs[0] = KIND == INT8 ? (w ^ sign) & size : w & size;
            pairs[1] = __byte_perm(KIND == INT8 ? w ^ sign : w, 0, 0x4341);
            if constexpr (CENTERED) pairs[0] = centered(pairs[0], 128), pairs[1] = centered(pairs[1], 128);
        } else if constexpr (KIND == INT4) {
            const u32 second = w >> 8;
            pairs[0] = xor_and(w, sign, size), pairs[1] = xor_and(w, sign, next);
            pairs[2] = xor_and(second, sign, size), pairs[3] = xor_and(second, sign, next);
            if constexpr (CENTERED) {
#pragma unroll
                for (int n = 0; n < 4; n++) pairs[n] = centered(pairs[n], n % 2 ? 128 : 8);
            }
        } else if constexpr (KIND == E5M2) {
            pairs[0] = __byte_perm(w, 0, 0x2404), pairs[1] = w & next;
        } else if constexpr (KIND == E2M1) {
            const u32 odd = (w & sign) | ((w >> 3) & size), even = (w << 4 & sign) | (w << 1 & size);
            pairs[0] = __byte_perm(even, 0, 0x2404), pairs[2] = even & next;
            pairs[1] = __byte_perm(odd, 0, 0x2404), pairs[3] = odd & next;
        } else if constexpr (CONVERTED) {
            const u32 x = ADJACENT ? w : __byte_perm(w, 0, 0x3120);
            pairs[0] = e4m3x2_to_f16x2(x), pairs[1] = e4m3x2_to_f16x2(x >> 16);
        } else {
            pairs[0] = (w << 7 & size) | (w << 8 & sign), pairs[1] = (w >> 1 & size) | (w & sign);
        }
    }
    // Bits of an integer less a bias, which has one bit, as a normal number.
    __device__ static u32 centered(u32 pair, int bias) {
        // 2^15, and the bias times -2^-9.
        return fma_f16x2(pair, both(0x7800), both(bias == 128 ? 0xb400 : 0xa400));
    }
    __device__ void split_bf16(u32 w, u32 (&pairs)[PAIRS]) const {
        if constexpr (KIND == INT8 || KIND == UINT8) {
#pragma unroll
            for (int n = 0; n < 2; n++, w >>= 8) {
                // 128 + the lower 7 bits, minus 128 or 256 by the highest.
                const u32 low = (w & size) | both(0x4300), high = ((KIND == INT8 ? w : ~w) & sign) | both(0xc300);
                pairs[n] = add_bf16x2(low, high);
            }
        } else if constexpr (KIND == INT4) {
            // 128 + 8 + code, minus 136.
#pragma unroll
            for (int n = 0; n < 4; n++) pairs[n] = add_bf16x2((w >> 4 * n & size) ^ both(0x4308), both(0xc308));
        } else if constexpr (KIND == E2M1) {
            pairs[0] = (w << 6 & size) | (w << 12 & sign), pairs[1] = (w << 2 & size) | (w << 8 & sign);
            pairs[2] = (w >> 2 & size) | (w << 4 & sign), pairs[3] = (w >> 6 & size) | (w & sign);
#pragma unroll
            for (u32& pair : pairs) pair = multiply_bf16x2(pair, both(bf16_exp2(126)));
        } else {
            constexpr int SHIFT = KIND == E4M3FN ? 4 : 5;
            const u32 scale = both(bf16_exp2(KIND == E4M3FN ? 120 : 112));
            pairs[0] = multiply_bf16x2((w << SHIFT & size) | (w << 8 & sign), scale);
            pairs[1] = multiply_bf16x2((w >> (8 - SHIFT) & size) | (w & sign), scale);
        }
    }
};

// Rows of codes of KIND in a tile. From row to row units are swizzled by STEP units of 16 bytes.
template <int KIND, int DIM, int STEP>
struct CodeRows {
    static constexpr int ROW = is_packed(KIND) ? DIM / 2 : DIM;  // bytes
    static constexpr int UNITS = (ROW + 15) / 16;
    // Whole lines of 128 bytes, or equal parts of one.
    static constexpr int PITCH = UNITS <= 1 ? 16 : UNITS <= 2 ? 32 : UNITS <= 4 ? 64 : (UNITS + 7) / 8 * 128;
    static constexpr int OF_LINE = PITCH < 128 ? 128 / PITCH : 1, TURNED = PITCH < 128 ? PITCH / 16 : 8;
    // Rows after which units are swizzled as before.
    static constexpr int PERIOD = STEP < TURNED ? OF_LINE * (TURNED / STEP) : 1;
    __device__ static constexpr int turn(int r) { return r / OF_LINE * STEP % TURNED * 16; }
    // Where byte `at` of row r stands.
    __device__ static constexpr int place(int r, int at) { return r * PITCH + (at ^ turn(r)); }
};

// Keys: 8 lanes of one t read 8 rows, 4 lanes of a row a unit of 4 runs of RUN codes.
template <int KIND, int DIM, int RUN>
struct KeyRows : CodeRows<KIND, DIM, (is_packed(KIND) ? RUN / 2 : RUN) <= 4 ? 1 : (is_packed(KIND) ? RUN / 2 : RUN) / 4> {
    static constexpr bool PACKED = is_packed(KIND);
    static constexpr int RUN_BYTES = PACKED ? RUN / 2 : RUN, WORDS = RUN_BYTES < 4 ? 1 : RUN_BYTES / 4;
    static_assert((RUN_BYTES & (RUN_BYTES - 1)) == 0 && RUN_BYTES >= 2 && RUN_BYTES <= 16, "a lane loads a run at once");
    static constexpr int RUNS = DIM / (4 * RUN), STEPS = RUN / 4;       // steps of 16 columns of q of a run
    static constexpr int WORD_STEPS = STEPS < 2 ? 1 : PACKED ? 2 : 1;  // of a word

    // The run's words, so that `split` gives the pairs that are multiplied.
    __device__ static void load(u32 (&words)[WORDS], const u8* at) {
        if constexpr (RUN_BYTES == 2) {
            const u32 w = *(const u16*)at;
            words[0] = (w & 0xff) | w >> 8 << 16;
        } else if constexpr (RUN_BYTES == 4) {
            words[0] = *(const u32*)at;
        } else if constexpr (RUN_BYTES == 8) {
            *(uint2*)words = *(const uint2*)at;
        } else {
            *(uint4*)words = *(const uint4*)at;
        }
    }
    // The column of q that element e (of 2t, 2t+1, 2t+8, 2t+9) of step `step` of run r multiplies in lane t. ADJACENT: as `split` has it.
    __device__ static int q_column(int r, int step, int t, int e, bool adjacent) {
        const int first = (4 * r + t) * RUN;
        if (!PACKED || RUN == 4) return first + 4 * step + (adjacent || e % 3 == 0 ? e : 3 - e);
        return first + step / 2 * 8 + step % 2 * 2 + e / 2 + e % 2 * 4;
    }
};

// Values: ldmatrix reads a unit of 16 bytes of each of 8 rows.
template <int KIND, int DIM>
struct ValueRows : CodeRows<KIND, DIM, 1> {
    static constexpr bool PACKED = is_packed(KIND);
    static constexpr int UNIT_COLUMNS = PACKED ? 32 : 16, UNIT_TILES = PACKED ? 2 : 1;
    static constexpr int LANE_COLUMNS = PACKED ? 4 : 2;  // neighbours
    static constexpr int TILES = CodeRows<KIND, DIM, 1>::UNITS * UNIT_TILES;
    // The column of values of row 8*h + g of tile `tile` of the sums.
    __device__ static constexpr int column(int tile, int h, int g) {
        return tile / UNIT_TILES * UNIT_COLUMNS + g * LANE_COLUMNS + tile % UNIT_TILES * 2 + h;
    }
};
