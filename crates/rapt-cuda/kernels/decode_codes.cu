// Attention on the tensor cores for few queries over K and V that are codes: decode.cu, with tiles of codes.
//
//   s^T = k.q^T of the codes, then scaled; out^T += v^T.p^T, p scaled
//
// Keys, and columns of values, are the rows of mma.sync's products, rows of queries their columns: few queries fill 8 of these, and
// each code is made an operand once. Where a factor goes:
//
//   K_SCALES, V_SCALES     K                                    V
//   UNIFORM                the sum                              the sum
//   TOKEN                  the sum                              p
//   CHANNEL                q, before it is rounded              the sum
//   BLOCK, float32         a sum for each block                 p, for each block, as two terms
//   BLOCK, powers of two   a sum for each block                 p, for each block: exact
//   BLOCK, e4m3fn          the operand: exact                   the operand: exact
//
// Operands are float16, and p and v bfloat16 where p has factors of blocks (V_HALF); both hold every code exactly (decode/codes.cuh).
// A row of q is scaled by a power of two. q and p are as many terms as hold q: one of float16 where q has 16 bits; q with factors of
// its columns is two.
// A sum that is not finite makes its item be computed once more: there the score of an attended key that is not finite is summed by
// itself, and an attended value that is not finite added to the sums. Finite sums have the same bits both ways.
// Deliberately absent: what decode.cu says of items, blocks and rings.

#include "decode/code_factors.cuh"

// Whether p and v are float16: not where p has factors of blocks.
constexpr bool V_HALF = V_SCALES != BLOCK || V_SCALE_DTYPE == SCALE_E4M3FN;
// Factors of blocks: in the operands where they are e4m3fn, else in sums and weights; powers of two in weights that are rounded.
constexpr bool K_SCALED = K_SCALES == BLOCK && K_SCALE_DTYPE == SCALE_E4M3FN, K_SUMMED = K_SCALES == BLOCK && !K_SCALED;
constexpr bool V_SCALED = V_SCALES == BLOCK && V_SCALE_DTYPE == SCALE_E4M3FN, V_SHIFTED = V_SCALES == BLOCK && V_SCALE_DTYPE == SCALE_E8M0;
constexpr bool V_WEIGHED = V_SCALES == BLOCK && V_SCALE_DTYPE == F32;
constexpr int Q_TERMS = STORAGE == F32 ? 3 : K_SCALES == CHANNEL ? 2 : 1;
constexpr int P_TERMS = STORAGE == F32 ? 3 : V_WEIGHED || (V_SHIFTED && STORAGE == F16) ? 2 : 1;
constexpr int K_STEPS = Keys::RUNS * Keys::STEPS;
// Where float32 needs all bits, or blocks are summed apart, codes have no bias.
using KeyCodes = CodeOperand<K_KIND, true, STORAGE == F32 || K_SUMMED>;
using ValueCodes = CodeOperand<V_KIND, V_HALF, STORAGE == F32>;
using Softmax = ColumnSoftmax<V_HALF, V_SCALES == TOKEN>;

struct Shared {
    Stage ring[STAGES][WARPS];
    uint2 q[Q_TERMS][K_STEPS][QT][32];  // operands B of each lane
    float q_unit[BLOCK_M];              // what a row of them is multiplied by
    HandOver over;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and decode_codes.cu disagree on shared memory");

// A tile of an item's keys, from n0 on.
struct Tile {
    const Params& p;
    const Item& item;
    Stage& stage;
    int n0;
};

// --- q -----------------------------------------------------------------------------------------------------------------------

// x as the sum of float16 numbers, term after term.
__device__ inline u32 next_term(float& x) {
    const u32 bits = float_to_f16(x);
    const float term = f16_to_float(bits);
    x = is_finite(x) ? x - term : 0.f;
    return bits;
}

// Row r of an item's queries, 0 beyond those that there are.
struct QueryRow {
    const Params& p;
    const Item& item;
    const Elem* at;
    int dim;
    __device__ QueryRow(const Params& p, const Item& item, const Task& task, int r) : p(p), item(item) {
        const int rows = task.rows(p);
        at = (const Elem*)p.q + Row(p, task, min(r, rows - 1)).offset(p.q_stride), dim = r < rows ? p.head_dim : 0;
    }
    // Element d, with the factor of its column.
    __device__ float number(int d) const {
        return d < dim ? product(widen(at[d * p.q_stride[3]]), channel_factor<K_SCALES>(p.k_codes, item, d)) : 0.f;
    }
};

// An item's rows of q as operands, by all warps that read. The greatest finite number of a row is 2^14 to 2^15.
__device__ inline void load_queries(const Params& p, Shared& sh, const Item& item) {
    const Task task = item.task(p);
    for (int r = threadIdx.x / 32; r < BLOCK_M; r += WARPS) {
        const QueryRow row(p, item, task, item.r0() + r);
        u32 most = 0;
#pragma unroll
        for (int n = 0; n < (D + 31) / 32; n++) {
            const float x = fabsf(row.number(n * 32 + threadIdx.x % 32));
            if (is_finite(x)) most = max(most, __float_as_uint(x));
        }
        const int exponent = (int)(__reduce_max_sync(~0u, most) >> 23) - 127;
        if (threadIdx.x % 32 == 0) sh.q_unit[r] = exp2_of(max(exponent - 14, -100));
    }
    bar_sync_readers();
    // A thread has one word of a lane, of some steps.
    const int word = threadIdx.x % 2, lane = threadIdx.x / 2 % 32;
#pragma unroll
    for (int qt = 0; qt < QT; qt++) {
        const int r = qt * 8 + lane / 4;
        const QueryRow row(p, item, task, item.r0() + r);
        const float by = (KeyCodes::WIDENED && word == 1 ? 0.0625f : 1.f) / sh.q_unit[r];
#pragma unroll 4
        for (int step = threadIdx.x / 64; step < K_STEPS; step += WARPS / 2) {
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int d = Keys::q_column(step / Keys::STEPS, step % Keys::STEPS, lane % 4, word * 2 + e, KeyCodes::CONVERTED);
                x[e] = product(row.number(d), by);
            }
#pragma unroll
            for (int term = 0; term < Q_TERMS; term++) {
                const u32 low = next_term(x[0]), high = next_term(x[1]);
                (word == 0 ? sh.q[term][step][qt][lane].x : sh.q[term][step][qt][lane].y) = low | high << 16;
            }
        }
    }
}

// What scores of a lane's rows are of the sums of products: sum * factor + offset; of uint8 codes, `sum` of q is taken as often as their
// zero point says.
struct OfQueries {
    OfRows factor, offset, sum;
    __device__ void read(const Params& p, const Shared& sh, const Item& item) {
        const int lane = threadIdx.x % 32;
        const float all = head_factor<K_SCALES>(p.k_codes, item);
#pragma unroll
        for (int qt = 0; qt < QT; qt++) {
            float sums[4] = {};
            if (KeyCodes::BIASED || K_KIND == UINT8) {
                const u32 low = KeyCodes::BIASED ? KeyCodes::bias(0) : both(KeyCodes::ONE);
                const u32 high = KeyCodes::BIASED ? KeyCodes::bias(1) : low;
                const u32 ones[4] = {low, low, high, high};
#pragma unroll
                for (int step = 0; step < K_STEPS; step++)
#pragma unroll
                    for (int term = Q_TERMS - 1; term >= 0; term--) {
                        const uint2 b = sh.q[term][step][qt][lane];
                        mma_of<true>(sums, ones, b.x, b.y);
                    }
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float unit = sh.q_unit[qt * 8 + lane_column(lane) + e];
                factor[qt][e] = product(all * exp2_of(KeyCodes::EXPONENT), unit);
                offset[qt][e] = KeyCodes::BIASED ? -product(sums[e], factor[qt][e]) : 0.f;
                sum[qt][e] = sums[e];
            }
        }
    }
};

// --- q.k ---------------------------------------------------------------------------------------------------------------------

// s = q.k of a tile. `odd`: of `odd_of`, of any code.
template <bool CAREFUL>
__device__ inline void multiply_key_codes(
    Scores& s, const Shared& sh, const Tile& tile, const KeyCodes& codes, const OfQueries& queries, u32& odd
) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Scores sums;
    u32 factors[MT * 2][Keys::RUNS];
    if constexpr (K_SCALED) {
#pragma unroll
        for (int n = 0; n < MT * 2; n++) load_key_factors(factors[n], tile.stage.k_factors(), n * 8 + g);
    }
#pragma unroll
    for (int qt = 0; qt < QT; qt++) zero(s[qt]);
#pragma unroll
    for (int run = 0; run < Keys::RUNS; run++) {
        u32 words[MT][2][Keys::WORDS];
        const u8* at = tile.stage.k() + Keys::place(g, (4 * run + t) * Keys::RUN_BYTES);
#pragma unroll
        for (int n = 0; n < MT * 2; n++) {
            Keys::load(words[n / 2][n % 2], at + n * 8 * Keys::PITCH);
        }
        if (K_SUMMED && run * 4 * K_RUN % K_BLOCK == 0) {
#pragma unroll
            for (int qt = 0; qt < QT; qt++) zero(sums[qt]);
        }
#pragma unroll
        for (int word = 0; word < Keys::WORDS; word++) {
            u32 pairs[MT][2][KeyCodes::PAIRS];
#pragma unroll
            for (int n = 0; n < MT * 2; n++) {
                codes.template split<true, CAREFUL>(words[n / 2][n % 2][word], pairs[n / 2][n % 2]);
                odd |= KeyCodes::odd_of(words[n / 2][n % 2][word]);
                if constexpr (K_SCALED) {
#pragma unroll
                    for (u32& pair : pairs[n / 2][n % 2]) pair = multiply_f16x2(pair, factors[n][run]);
                }
            }
#pragma unroll
            for (int of_word = 0; of_word < Keys::WORD_STEPS; of_word++)
#pragma unroll
                for (int qt = 0; qt < QT; qt++)
#pragma unroll
                    for (int term = Q_TERMS - 1; term >= 0; term--) {
                        const uint2 b = sh.q[term][run * Keys::STEPS + word * Keys::WORD_STEPS + of_word][qt][lane];
#pragma unroll
                        for (int mt = 0; mt < MT; mt++) {
                            const u32 a[4] = {
                                pairs[mt][0][of_word * 2], pairs[mt][1][of_word * 2], pairs[mt][0][of_word * 2 + 1],
                                pairs[mt][1][of_word * 2 + 1]
                            };
                            mma_of<true>(K_SUMMED ? sums[qt][mt] : s[qt][mt], a, b.x, b.y);
                        }
                    }
        }
        if (K_SUMMED && (run + 1) * 4 * K_RUN % K_BLOCK == 0) {
            OfKeys factor;
            of_keys(factor, [&](int j) {
                return load_scale(tile.stage.k_factors(), K_SCALE_DTYPE, j * (D / K_BLOCK) + run * 4 * K_RUN / K_BLOCK);
            });
#pragma unroll
            for (int qt = 0; qt < QT; qt++)
#pragma unroll
                for (int n = 0; n < MT * 4; n++) {
                    s[qt][n / 4][n % 4] = fused(sums[qt][n / 4][n % 4], factor[n / 4][n % 4 / 2], s[qt][n / 4][n % 4]);
                }
        }
    }
    OfKeys factor, zero_points;
    if (K_SCALES == TOKEN) of_keys(factor, [&](int j) { return ((const float*)tile.stage.k_factors())[j]; });
    if (K_KIND == UINT8) of_keys(zero_points, [&](int j) { return zero_point<KeyCodes>(tile.p, tile.p.k_codes, tile.item, tile.n0 + j); });
#pragma unroll
    for (int qt = 0; qt < QT; qt++)
#pragma unroll
        for (int n = 0; n < MT * 4; n++) {
            float& x = s[qt][n / 4][n % 4];
            const int h = n % 4 / 2, e = n % 2;
            if (K_KIND == UINT8) x = fused(-zero_points[n / 4][h], queries.sum[qt][e], x);
            x = KeyCodes::BIASED ? fused(x, queries.factor[qt][e], queries.offset[qt][e]) : product(x, queries.factor[qt][e]);
            if (K_SCALES == TOKEN) x = product(x, factor[n / 4][h]);
        }
}

// q.k of one row and key, in numbers.
__device__ __noinline__ float sum_of_numbers(const Params& p, const Row& row, const Item& item, int j) {
    const KeyPlace at(p, item.batch, item.sequence.first_key() + j);
    if (!at.exists(p)) return not_a_number();
    const CodedRow key(p.k_stride, p.k_codes, item.batch, item.kv_head, at.block, at.row);
    const Elem* q = (const Elem*)p.q + row.offset(p.q_stride);
    float sum = 0;
    for (int d = 0; d < p.head_dim; d++) sum = fused(widen(q[d * p.q_stride[3]]), key.number(p.k, p.k_stride[3], p.k_codes, d), sum);
    return sum;
}

// Whether a warp has a score that is not finite.
__device__ inline bool has_odd_scores(const Scores& s) {
    bool is_odd = false;
#pragma unroll
    for (int qt = 0; qt < QT; qt++)
#pragma unroll
        for (int n = 0; n < MT * 4; n++) is_odd |= !is_finite(s[qt][n / 4][n % 4]);
    return __any_sync(~0u, is_odd);
}

// Scores that are not finite and attended (`scores` is what becomes of 0), each by itself.
__device__ inline void sum_odd_scores(Scores& s, const Scores& scores, const Columns& columns, const Tile& tile) {
#pragma unroll
    for (int qt = 0; qt < QT; qt++)
#pragma unroll
        for (int n = 0; n < MT * 4; n++) {
            float& x = s[qt][n / 4][n % 4];
            const int j = tile.n0 + n / 2 * 8 + lane_row((int)threadIdx.x);
            if (!is_finite(x) && j < tile.item.sequence.kv_len(tile.p) && scores[qt][n / 4][n % 4] != negative_infinity()) {
                x = sum_of_numbers(tile.p, columns.row(qt, n % 2), tile.item, j);
            }
        }
}

// --- p.v ---------------------------------------------------------------------------------------------------------------------

// Sums of a warp's rows: columns of values by tiles, what a bias makes of each sum, and what zero points do.
struct Sums {
    float acc[QT][Values::TILES][4], bias[QT][4];
    OfRows zero_points;
    __device__ void clear() {
#pragma unroll
        for (int qt = 0; qt < QT; qt++) {
            zero(acc[qt]);
            bias[qt][0] = bias[qt][1] = bias[qt][2] = bias[qt][3] = zero_points[qt][0] = zero_points[qt][1] = 0;
        }
    }
    // Those of row e of tile qt follow its maximum.
    template <bool CAREFUL>
    __device__ void rescale(int qt, int e, float by) {
#pragma unroll
        for (int tile = 0; tile < Values::TILES; tile++)
#pragma unroll
            for (int n = e; n < 4; n += 2) acc[qt][tile][n] = CAREFUL ? weighed(by, acc[qt][tile][n]) : acc[qt][tile][n] * by;
        bias[qt][e] *= by, bias[qt][e + 2] *= by, zero_points[qt][e] *= by;
    }
    // Of the operands, but for what is the same for all of a row: columns h of a lane's two of a tile.
    __device__ float value(int qt, int tile, int h, int e) const {
        float x = acc[qt][tile][h * 2 + e];
        if (ValueCodes::BIASED) x -= bias[qt][h * 2 + e];
        if (V_KIND == UINT8) x -= zero_points[qt][e];
        return ValueCodes::WIDENED && h == 1 ? x * 0.0625f : x;
    }
};

// The weights of 16 keys, times a factor of each of a lane's two, as operands.
using Weights = u32[QT][P_TERMS][2];
__device__ inline void pack_weights(Weights& b, const Scores& s, int kt, float factor0, float factor1) {
#pragma unroll
    for (int qt = 0; qt < QT; qt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                x[e] = s[qt][kt][h * 2 + e];
                if (V_WEIGHED) x[e] = product(x[e], h == 0 ? factor0 : factor1);
            }
#pragma unroll
            for (int term = 0; term < P_TERMS; term++) {
                const u32 pair = pack_as<V_HALF>(x[0], x[1]);
                b[qt][term][h] = movmatrix_trans(pair);
                if (term + 1 < P_TERMS) {
                    x[0] -= V_HALF ? f16_to_float(pair) : bf16_to_float(pair);
                    x[1] -= V_HALF ? f16_to_float(pair >> 16) : bf16_to_float(pair >> 16);
                }
            }
        }
}

// Takes out of a pair of operands what is not finite, and says whether there was any.
__device__ inline bool take_finite(u32& pair) {
    constexpr u32 EXPONENT = V_HALF ? 0x7c00 : 0x7f80;
    const bool low = (pair & EXPONENT) == EXPONENT, high = (pair >> 16 & EXPONENT) == EXPONENT;
    pair &= (low ? 0 : 0xffffu) | (high ? 0 : 0xffff0000u);
    return low || high;
}

// What the zero points of a tile's keys make of its rows' sums, p in `s`.
__device__ inline void add_zero_points(Sums& sums, const Scores& s, const Tile& tile) {
    OfKeys zero_points;
    of_keys(zero_points, [&](int j) { return zero_point<ValueCodes>(tile.p, tile.p.v_codes, tile.item, tile.n0 + j); });
    // Of the weights that are multiplied: with one term, the rounded ones.
#pragma unroll
    for (int qt = 0; qt < QT; qt++)
#pragma unroll
        for (int n = 0; n < MT * 4; n++) {
            const float weight = s[qt][n / 4][n % 4], rounded = P_TERMS == 1 ? f16_to_float(float_to_f16(weight)) : weight;
            const float unit = exp2_of(-ValueCodes::EXPONENT);
            sums.zero_points[qt][n % 2] = fused(rounded * unit, zero_points[n / 4][n % 4 / 2], sums.zero_points[qt][n % 2]);
        }
}

// sums += p.v of a tile, p in `s`. CAREFUL: of values that are finite; whether others are among the lane's. `odd`: of `odd_of`, of any code.
template <bool CAREFUL>
__device__ inline bool multiply_value_codes(Sums& sums, const Scores& s, const Tile& tile, const ValueCodes& codes, u32& odd) {
    // Blocks of 16 columns that do not fill a unit: its lanes have one or the other.
    constexpr int PARTS = V_WEIGHED && V_BLOCK % Values::UNIT_COLUMNS != 0 ? Values::UNIT_COLUMNS / 16 : 1;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    bool is_odd = false;
#pragma unroll
    for (int kt = 0; kt < MT; kt++) {
        Weights b;
        if (!V_WEIGHED) pack_weights(b, s, kt, 1, 1);
        if constexpr (ValueCodes::BIASED) {
            const u32 bias[4] = {ValueCodes::bias(0), ValueCodes::bias(1), ValueCodes::bias(0), ValueCodes::bias(1)};
#pragma unroll
            for (int qt = 0; qt < QT; qt++)
#pragma unroll
                for (int term = P_TERMS - 1; term >= 0; term--) mma_of<V_HALF>(sums.bias[qt], bias, b[qt][term][0], b[qt][term][1]);
        }
        u32 factors[2][Values::UNITS];
        if constexpr (V_SCALED || V_SHIFTED) {
#pragma unroll
            for (int h = 0; h < 2; h++) load_value_factors(factors[h], tile.stage.v_factors(), kt * 16 + h * 8 + t * 2);
        }
        const u32 at = shared_address(tile.stage.v()) + (kt * 16 + lane % 16) * Values::PITCH;
#pragma unroll
        for (int unit = 0; unit < Values::UNITS; unit++) {
            // Units are read two at a time.
            u32 both_units[4];
            if (unit % 2 == 0) {
                const u32 turn = Values::turn(lane % 16);
                if (unit + 1 < Values::UNITS) {
                    ldmatrix_trans(both_units, at + (((unit + lane / 16) * 16) ^ turn));
                } else {
                    u32 one_unit[2];
                    ldmatrix_trans(one_unit, at + ((unit * 16) ^ turn));
                    both_units[0] = one_unit[0], both_units[1] = one_unit[1];
                }
            }
            u32 pairs[2][ValueCodes::PAIRS];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                codes.template split<false, CAREFUL>(both_units[unit % 2 * 2 + h], pairs[h]);
                odd |= ValueCodes::odd_of(both_units[unit % 2 * 2 + h]);
#pragma unroll
                for (u32& pair : pairs[h]) {
                    if constexpr (V_SCALED) pair = multiply_f16x2(pair, factors[h][unit]);
                    if (CAREFUL) is_odd |= take_finite(pair);
                }
            }
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                if (V_WEIGHED) {
                    const int column = min(unit * Values::UNIT_COLUMNS + part * 16, DV - 1);
                    float factor[2];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const int j = kt * 16 + h * 8 + g;
                        factor[h] = ((const float*)tile.stage.v_factors())[j * (V_SCALE_BYTES / 4) + column / V_BLOCK];
                        if (CAREFUL && !is_finite(factor[h])) factor[h] = 0, is_odd = true;
                    }
                    pack_weights(b, s, kt, factor[0], factor[1]);
                }
                Weights weights;
#pragma unroll
                for (int qt = 0; qt < QT; qt++)
#pragma unroll
                    for (int n = 0; n < P_TERMS * 2; n++) {
                        u32& pair = weights[qt][n / 2][n % 2];
                        pair = b[qt][n / 2][n % 2];
                        if constexpr (V_SHIFTED) {
                            u32 factor = factors[n % 2][unit];
                            if (CAREFUL) is_odd |= take_finite(factor);
                            pair = multiply_bf16x2(pair, factor);
                        }
                    }
                const bool is_own = PARTS == 1 || g / (8 / PARTS) == part;
#pragma unroll
                for (int n = 0; n < Values::UNIT_TILES; n++) {
                    u32 a[4] = {pairs[0][n * 2], pairs[0][n * 2 + 1], pairs[1][n * 2], pairs[1][n * 2 + 1]};
#pragma unroll
                    for (u32& pair : a) pair = is_own ? pair : 0;
#pragma unroll
                    for (int qt = 0; qt < QT; qt++)
#pragma unroll
                        for (int term = P_TERMS - 1; term >= 0; term--) {
                            mma_of<V_HALF>(sums.acc[qt][unit * Values::UNIT_TILES + n], a, weights[qt][term][0], weights[qt][term][1]);
                        }
                }
            }
        }
    }
    if constexpr (V_KIND == UINT8) add_zero_points(sums, s, tile);
    return is_odd;
}

// A number of value j, by itself.
__device__ __noinline__ float number_of_value(const Params& p, const Item& item, int j, int column) {
    const KeyPlace at(p, item.batch, item.sequence.first_key() + j);
    if (!at.exists(p)) return not_a_number();
    return CodedRow(p.v_stride, p.v_codes, item.batch, item.kv_head, at.block, at.row).number(p.v, p.v_stride[3], p.v_codes, column);
}

// Adds the values of a tile that are not finite to the rows that attend them: p is not -0 there. `factor(column)` follows.
template <class Factor>
__device__ inline void add_odd_values(Sums& sums, const Scores& s, const Tile& tile, Factor factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < MT * 2; n++)
#pragma unroll 1
        for (int key = 0; key < 8; key++) {
            const int j = tile.n0 + n * 8 + key;
            bool attends[QT][2], any = false;
#pragma unroll
            for (int qt = 0; qt < QT; qt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    attends[qt][e] = !signbit(__shfl_sync(~0u, s[qt][n / 2][n % 2 * 2 + e], key * 4 + lane % 4));
                    any |= attends[qt][e];
                }
            if (j >= tile.item.sequence.kv_len(tile.p) || !__any_sync(~0u, any)) continue;
#pragma unroll
            for (int of = 0; of < Values::TILES * 2; of++) {
                const int column = Values::column(of / 2, of % 2, lane / 4);
                if (column >= tile.p.head_dim_v) continue;
                float x = number_of_value(tile.p, tile.item, j, column);
                if (is_finite(x)) continue;
                if (signbit(factor(column))) x = -x;
#pragma unroll
                for (int qt = 0; qt < QT; qt++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (attends[qt][e]) sums.acc[qt][of / 2][of % 2 * 2 + e] += x;
                    }
            }
        }
}

// Rows of a warp from `first` on, `count` of them.
struct PartOfRows {
    int first, count;
};

// Those rows to `over`: their sums times factor(qt, e, column), and `poison`, which is 0 or NaN.
template <class Factor>
__device__ inline void leave(
    const Params& p, HandOver& over, PartOfRows rows, const Softmax& softmax, const Sums& sums, Factor factor, float poison
) {
    const int first = rows.first, here = rows.count;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int qt = first / 8, g = lane / 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int r = qt * 8 + lane_column(lane) + e - first;
        if (r < 0 || r >= here) continue;
        float* row = over.left[warp][r];
#pragma unroll
        for (int of = 0; of < Values::TILES; of++) {
            const int column = Values::column(of, 0, g);
            if (column >= DV) continue;
            float2 pair = {sums.value(qt, of, 0, e), sums.value(qt, of, 1, e)};
            pair.x = pair.x * factor(qt, e, column) + poison, pair.y = pair.y * factor(qt, e, column + 1) + poison;
            *(float2*)&row[column] = pair;
        }
        if (g == 0) {
            over.left_m[warp][r] = natural_max(p, softmax.row_max[qt][e]), over.left_l[warp][r] = softmax.row_sum[qt][e];
        }
    }
}

// The part of the warps that read: `count` items from `item` on. `handed` counts what was handed over.
template <bool CAREFUL>
__device__ inline void attend(const Params& p, Shared& sh, Item item, u32 count, u32& handed) {
    constexpr int PENDING = 2 * STAGES - 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Loader loader(p, item, count);
    griddepcontrol_wait();
    load_queries(p, sh, item);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        loader.load_keys(p, sh.ring[stage][warp]);
        loader.load_values(p, sh.ring[stage][warp]);
    }
    bar_sync_readers();
    const float c = exponent_factor(p);
    const u32 zero = (u32)p.items >> 31;
    const KeyCodes key_codes(zero);
    const ValueCodes value_codes(zero);
    OfQueries queries;
    int stage = 0;
    for (u32 done = 0; done < count; done++, item.step(p)) {
        const Task task = item.task(p);
        const Seen seen = item.seen(p);
        const int r0 = item.r0(), rows = item.rows(p);
        if (done > 0 && item.split == 0) {
            // Other rows than before.
            bar_sync_readers();
            load_queries(p, sh, item);
            bar_sync_readers();
        }
        if (done == 0 || item.split == 0) queries.read(p, sh, item);
        const Columns columns{p, task, r0};
        Softmax softmax;
        Sums sums;
        softmax.clear(), sums.clear();
        const Tiles tiles(p, item, seen);
        const float all = head_factor<V_SCALES>(p.v_codes, item);
        const auto factor_of = [&](int column) {
            const float factor = V_SCALES == CHANNEL ? channel_factor<V_SCALES>(p.v_codes, item, min(column, p.head_dim_v - 1)) : all;
            return CAREFUL && !is_finite(factor) ? 1.f : factor;
        };
        bool is_bad = false;
        u32 odd = 0;
        for (int n0 = tiles.n0; n0 < tiles.end; n0 += WARPS * TILE) {
            const Tile tile{p, item, sh.ring[stage][warp], n0};
            is_bad |= loader.next_is_bad();
            Scores s;
            HiddenScores hidden;
            hidden.fetch(p, columns, n0);
            cp_async_wait<PENDING>();
            __syncwarp();
            multiply_key_codes<CAREFUL>(s, sh, tile, key_codes, queries, odd);
            __syncwarp();
            loader.load_keys(p, tile.stage);
            const bool positions = n0 < seen.all_lo || n0 + TILE > min(seen.all_hi, tiles.end);
            const bool is_applied = NATURAL || MASK != NO_MASK || positions;
            if (CAREFUL && has_odd_scores(s)) {
                Scores scores = {};
                if (is_applied) apply_to_columns(scores, p, columns, hidden, n0, tiles.end, positions);
                sum_odd_scores(s, scores, columns, tile);
            }
            if (is_applied) apply_to_columns(s, p, columns, hidden, n0, tiles.end, positions);
            cp_async_wait<PENDING>();
            __syncwarp();
            OfKeys factor;
            bool is_odd = load_token_factors<CAREFUL>(factor, tile.stage.v_factors());
            softmax.template add_keys<CAREFUL>(s, factor, c, [&](int qt, int e, float by) { sums.template rescale<CAREFUL>(qt, e, by); });
            is_odd |= multiply_value_codes<CAREFUL>(sums, s, tile, value_codes, odd);
            if (CAREFUL) {
                is_odd |= !is_finite(all) || has_odd_channel(p, item);
                if (__any_sync(~0u, is_odd)) add_odd_values(sums, s, tile, factor_of);
            }
            __syncwarp();
            loader.load_values(p, tile.stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        OfRows unshifted;
#pragma unroll
        for (int n = 0; n < QT * 2; n++) {
            const int qt = n / 2, e = n % 2;
            unshifted[qt][e] = softmax.unshifted(qt, e);
            softmax.row_sum[qt][e] = is_bad ? not_a_number() : sum_of_keys(softmax.row_sum[qt][e]) * unshifted[qt][e];
            if (V_KIND == UINT8) sums.zero_points[qt][e] = sum_of_keys(sums.zero_points[qt][e]);
            unshifted[qt][e] *= exp2_of(ValueCodes::EXPONENT);
        }
        const bool is_seen = !CAREFUL && __any_sync(~0u, (odd & 0x80808080u) != 0);
        const float poison = is_bad || is_seen ? not_a_number() : 0.f;
        hand_over<BLOCK_M>(sh.over, rows, handed, [&](int first, int here) {
            leave(p, sh.over, {first, here}, softmax, sums, [&](int qt, int e, int column) {
                return unshifted[qt][e] * factor_of(column);
            }, poison);
        });
    }
    cp_async_wait<0>();
}

__device__ __noinline__ void attend_carefully(const Params& p, Shared& sh, Item item, u32 count, u32 handed) {
    attend<true>(p, sh, item, count, handed);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
    run_block(
        p, sh.over, [&](const Item& item, u32 count, u32& handed) { attend<false>(p, sh, item, count, handed); },
        [&](const Item& item, u32 count, u32 handed) { attend_carefully(p, sh, item, count, handed); }
    );
}
