// Attention on the tensor cores for few queries over K and V that are codes: decode.cu, with tiles of codes.
//
//   s = q.k of the codes, then scaled; p, scaled, times the codes of v
//
// Codes are multiplied as bfloat16, which holds them exactly (decode/codes.cuh); q and p are as many bfloat16 as hold them: one of
// bfloat16, two of float16, three of float32. Where a factor goes:
//
//   K_SCALES, V_SCALES   K                                    V
//   UNIFORM              the sum                              the sum
//   TOKEN                the sum                              p
//   CHANNEL              q, before it is rounded              the sum
//   BLOCK, float32       a sum for each block                 p, for each block
//   BLOCK, 8 bits        the operand: exact in bfloat16       the operand
//
// A code that is not finite is multiplied as a number, and its item computed once more: there the score of an attended such key is
// summed by itself, and an attended such value added to the sums. Finite sums have the same bits both ways.
// One bfloat16 for p with a key's factor is off by up to 2^-8, where p alone is exact for one key: over many keys that averages
// out, and rows of few keys are computed once more with two.
// Deliberately absent: what decode.cu says of items, blocks and rings.

#include "common/scores.cuh"
#include "decode/codes.cuh"
#include "decode/hand_over.cuh"
#include "decode/pages.cuh"

#define UNIFORM 0
#define TOKEN 1
#define CHANNEL 2
#define BLOCK 3

constexpr int NT = TILE / 8;
constexpr int TERMS = STORAGE == F32 ? 3 : STORAGE == F16 ? 2 : 1;
constexpr int Q_TERMS = K_SCALES == CHANNEL && TERMS == 1 ? 2 : TERMS;
// Factors of blocks: in sums and weights where they are float32, else in the operands.
constexpr bool K_SUMMED = K_SCALES == BLOCK && K_SCALE_DTYPE == F32, K_SCALED = K_SCALES == BLOCK && !K_SUMMED;
constexpr bool V_WEIGHED = V_SCALES == BLOCK && V_SCALE_DTYPE == F32, V_SCALED = V_SCALES == BLOCK && !V_WEIGHED;
// Terms of p where an item is computed once more: there a second one is 0 but for rows of at most FEW_KEYS keys.
constexpr bool TWO_FOR_FEW = TERMS == 1 && (V_SCALES == TOKEN || V_WEIGHED);
constexpr int CAREFUL_TERMS = TWO_FOR_FEW ? 2 : TERMS;
constexpr int FEW_KEYS = 128;
// Bytes of the factors of a key that lie in a tile.
constexpr int scale_bytes(int scales, int dim, int block, int dtype) {
    return scales == TOKEN ? 4 : scales == BLOCK ? dim / block * (dtype == F32 ? 4 : 1) : 0;
}
constexpr int K_SCALE_BYTES = scale_bytes(K_SCALES, D, K_BLOCK, K_SCALE_DTYPE);
constexpr int V_SCALE_BYTES = scale_bytes(V_SCALES, DV, V_BLOCK, V_SCALE_DTYPE);
using Keys = KeyRows<K_KIND, D, K_RUN>;
using Values = ValueRows<V_KIND, DV, V_RUN>;
constexpr int K_STEPS = Keys::RUNS * Keys::STEPS;

struct Stage {
    static constexpr int V = TILE * Keys::PITCH, K_FACTORS = V + TILE * Values::PITCH, V_FACTORS = K_FACTORS + TILE * K_SCALE_BYTES;
    u8 bytes[V_FACTORS + TILE * V_SCALE_BYTES];
    __device__ u8* k() { return bytes; }
    __device__ u8* v() { return bytes + V; }
    __device__ u8* k_factors() { return bytes + K_FACTORS; }
    __device__ u8* v_factors() { return bytes + V_FACTORS; }
};
struct Shared {
    Stage ring[STAGES][WARPS];
    uint4 q[Q_TERMS][K_STEPS][32];  // operands A of each lane
    HandOver over;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and decode_codes.cu disagree on shared memory");

template <int I>
struct Index {
    static constexpr int value = I;
};
// f of 0 to N - 1, each a constant.
template <int N, class F>
__device__ inline void each(F f) {
    if constexpr (N > 0) {
        each<N - 1>(f);
        f(Index<N - 1>());
    }
}

// What of a warp's codes and factors of an item is not finite.
struct Odd {
    u32 codes = 0;
    float factors = 0;  // NaN if one is not finite
    __device__ void see(float factor) { factors = __fmaf_rn(factor, 0.f, factors); }
    __device__ bool any() const { return __any_sync(~0u, (codes & 0x80808080u) != 0 || factors != 0); }
};

__device__ inline float factor_at(const u8* factors, int dtype, int n) { return load_scale(factors, dtype, n); }
// A number that bfloat16 holds, as its upper half.
__device__ inline u32 bf16_of(float x) { return __float_as_uint(x) >> 16; }
// The factor of a block of 8 bits as it multiplies operands of KIND: e2m1 comes 2^-126 too small out of its bits, and the factor of
// nvfp4 makes up for 2^118 of that. The rest is in `block_factor`.
template <int KIND, int DTYPE>
__device__ inline u32 operand_factor(const u8* at, bool careful, Odd& odd) {
    float x = load_scale(at, DTYPE, 0);
    odd.see(x);
    if (careful && !is_finite(x)) x = 0;
    return bf16_of(KIND == E2M1 && DTYPE == SCALE_E4M3FN ? x * 0x1p118f : x);
}
template <int KIND, int DTYPE>
__device__ constexpr float block_factor() {
    return KIND == E2M1 && DTYPE == SCALE_E4M3FN ? 256.f : 1.f;
}
template <int KIND, int DTYPE>
__device__ inline u32 scaled(u32 pair, u32 factors) {
    if (KIND == E2M1 && DTYPE == SCALE_E8M0) pair = multiply_bf16x2(pair, both(bf16_exp2(126)));
    return multiply_bf16x2(pair, factors);
}

// x as the sum of bfloat16 numbers, term after term.
__device__ inline float next_term(float& x) {
    const float term = __uint_as_float(__float_as_uint(x) & 0xffff0000u);
    x = is_finite(x) ? x - term : 0.f;
    return term;
}

// Where the rows of a tile, or their factors, lie in memory: `rows` of them, strides in bytes.
struct BytesOfRows {
    const u8* base;
    i64 row_step, step;
    int rows, count;  // count: of codes' bytes, or of factors, in a row
#if PAGED
    bool is_even;  // each 16 rows are evenly spaced
    i64 own;       // where row lane % TILE begins
#endif
    // Where row r begins, for a whole warp.
    __device__ const u8* row(int r) const {
#if PAGED
        return base + shuffle(own, r);
#else
        return base + r * row_step;
#endif
    }
};

// Moves the tile's rows of codes. VECTOR: every row can be moved 16 bytes at a time.
template <class Rows>
__device__ inline void load_codes(u8* to, const BytesOfRows& from, const PassingCopy& copy) {
    const int lane = threadIdx.x % 32;
    if constexpr (VECTOR) {
        constexpr int UNITS = Rows::ROW / 16, ALL = TILE * UNITS;
        if constexpr (32 % UNITS == 0 && ALL % 32 == 0 && Rows::PERIOD <= 32 / UNITS) {
            // A lane's units stand in one column, and their places a constant apart.
            constexpr int STEP = 32 / UNITS;
            const int r = lane / UNITS, c = lane % UNITS * 16;
            const u8* at = from.base + r * from.row_step + c;
            const i64 step = STEP * from.row_step;
            const u32 place = shared_address(to + Rows::place(r, c));
#if PAGED
            if (STEP <= 16 && from.is_even && from.rows >= TILE) {
#pragma unroll
                for (int n = 0; n < ALL / 32; n++) {
                    if (n * STEP % 16 == 0) at = from.row(n * STEP) + r * from.row_step + c;
                    copy(place + n * (STEP * Rows::PITCH), at), at += step;
                }
            } else {
#pragma unroll 1
                for (int n = 0; n < ALL / 32; n++) {
                    const u8* row = from.row(r + n * STEP);
                    const bool inside = r + n * STEP < from.rows;
                    cp_async_zfill<16>(place + n * (STEP * Rows::PITCH), inside ? row + c : from.base, inside);
                }
            }
#else
            if (from.rows >= TILE) {
#pragma unroll
                for (int n = 0; n < ALL / 32; n++) copy(place + n * (STEP * Rows::PITCH), at), at += step;
            } else {
#pragma unroll 1
                for (int n = 0; n < ALL / 32; n++) {
                    const bool inside = r + n * STEP < from.rows;
                    cp_async_zfill<16>(place + n * (STEP * Rows::PITCH), inside ? at : from.base, inside);
                    at += step;
                }
            }
#endif
        } else {
            for (int at = lane; at < ALL; at += 32) {
                const int r = at / UNITS, c = at % UNITS * 16;
                const u8* row = from.row(r);
                const bool inside = r < from.rows;
                cp_async_zfill<16>(shared_address(to + Rows::place(r, c)), inside ? row + c : from.base, inside);
            }
        }
    } else {
        for (int at = lane; at < TILE * Rows::ROW; at += 32) {
            const int r = at / Rows::ROW, c = at % Rows::ROW;
            const u8* row = from.row(r);
            to[Rows::place(r, c)] = r < from.rows && c < from.count ? row[c * from.step] : 0;
        }
    }
}
// The factors of the tile's keys, BYTES of each. VECTOR: those of 8 bits can be moved four at a time, if there are as many.
template <int BYTES, int DTYPE>
__device__ inline void load_factors(u8* to, const BytesOfRows& from) {
    constexpr bool BY_4 = DTYPE == F32 || (VECTOR && BYTES % 4 == 0);
    constexpr int UNIT = BY_4 ? 4 : 1, UNITS = BYTES / UNIT;
    for (int at = threadIdx.x % 32; at < TILE * UNITS; at += 32) {
        const int r = at / UNITS, c = at % UNITS;
        const u8* row = from.row(r);
        const bool inside = r < from.rows;
        const u8* place = inside ? row + c * from.step * (DTYPE == F32 ? 1 : UNIT) : from.base;
        if constexpr (BY_4) cp_async_zfill<4>(shared_address(to + r * BYTES + c * 4), place, inside);
        else to[r * BYTES + c] = inside ? *place : 0;
    }
}

// Fills a warp's ring, tile after tile, item after item: first the keys of a tile, later its values.
struct Loader : Walk {
    const u8 *k, *v, *k_factors, *v_factors;
#if PAGED
    u32 bad_tiles = 0;  // a bit for each tile of the ring, the latest lowest: the table names no page for a key of it
#endif
    const PassingCopy copy;

    __device__ Loader(const Params& p, const Item& first, u32 count) : Walk(first, count), copy(p) {
        enter(p);
        enter_heads(p);
        if (PAGED) to_next(p);
    }

    // Whether the tile that is multiplied next has keys in no page.
    __device__ bool next_is_bad() const {
#if PAGED
        return (bad_tiles >> (STAGES - 1) & 1) != 0;
#else
        return false;
#endif
    }
    __device__ const u8* factors(const Codes& codes) const {
        const i64 at = (PAGED ? 0 : item.batch * codes.descale_stride[0]) + item.kv_head * codes.descale_stride[1];
        return codes.descale + at * (codes.scale_dtype == F32 ? 4 : 1);
    }
    // What of a tile from key n0 on lies in memory; nothing of one that is bad.
    __device__ BytesOfRows rows(const Params& p, const u8* base, const i64 (&stride)[4], int size, int count) const {
        BytesOfRows rows{base, stride[2] * size, stride[3] * size, item.sequence.kv_len(p) - n0, count};
#if PAGED
        rows.own = pages.offset(stride) * size, rows.is_even = TilePages::are_even(p);
        if (bad_tiles & 1) rows.rows = 0;
#else
        rows.base += n0 * rows.row_step;
#endif
        return rows;
    }
    template <int DTYPE>
    __device__ BytesOfRows rows_of_factors(const Params& p, const u8* base, const Codes& codes) const {
        return rows(p, base, codes.descale_stride, DTYPE == F32 ? 4 : 1, 0);
    }
    __device__ void enter_heads(const Params& p) {
        k = (const u8*)p.k + item.kv_head * p.k_stride[1], v = (const u8*)p.v + item.kv_head * p.v_stride[1];
        if (!PAGED) k += item.batch * p.k_stride[0], v += item.batch * p.v_stride[0];
        k_factors = factors(p.k_codes), v_factors = factors(p.v_codes);
    }
    __device__ void to_next(const Params& p) {
        advance(p, [&] { enter_heads(p); });
    }
    // Pages are looked up while the tiles before arrive.
    __device__ void load_keys(const Params& p, Stage& to) {
        if (!PAGED) to_next(p);
#if PAGED
        if (n0 < end) pages.settle(p, item, n0);
        bad_tiles = bad_tiles << 1 | (n0 < end && pages.any_is_bad(p));
#endif
        if (n0 < end) {
            load_codes<Keys>(to.k(), rows(p, k, p.k_stride, 1, is_packed(K_KIND) ? (p.head_dim + 1) / 2 : p.head_dim), copy);
            if constexpr (K_SCALE_BYTES > 0) {
                load_factors<K_SCALE_BYTES, K_SCALE_DTYPE>(to.k_factors(), rows_of_factors<K_SCALE_DTYPE>(p, k_factors, p.k_codes));
            }
        }
        cp_async_commit();
    }
    __device__ void load_values(const Params& p, Stage& to) {
        if (n0 < end) {
            load_codes<Values>(to.v(), rows(p, v, p.v_stride, 1, is_packed(V_KIND) ? (p.head_dim_v + 1) / 2 : p.head_dim_v), copy);
            if constexpr (V_SCALE_BYTES > 0) {
                load_factors<V_SCALE_BYTES, V_SCALE_DTYPE>(to.v_factors(), rows_of_factors<V_SCALE_DTYPE>(p, v_factors, p.v_codes));
            }
        }
        cp_async_commit();
        if (PAGED) to_next(p);
    }
};

// Column d's factor of a head, 1 where factors are no columns'.
template <int SCALES>
__device__ inline float channel_factor(const Codes& codes, const Item& item, int d) {
    if (SCALES != CHANNEL) return 1;
    const i64 at = item.batch * codes.descale_stride[0] + item.kv_head * codes.descale_stride[1] + d * codes.descale_stride[3];
    return ((const float*)codes.descale)[at];
}
// The factor of all sums of a head.
template <int SCALES, int KIND, int DTYPE>
__device__ inline float head_factor(const Codes& codes, const Item& item) {
    if (SCALES == BLOCK) return codes.global_scale * block_factor<KIND, DTYPE>();
    if (SCALES != UNIFORM) return 1;
    return ((const float*)codes.descale)[item.batch * codes.descale_stride[0] + item.kv_head * codes.descale_stride[1]];
}
// What is taken from an uint8 code of key j, as `pair_of_bytes` gives it.
template <int KIND>
__device__ inline float zero_point(const Params& p, const Codes& codes, const Item& item, int j) {
    if (KIND != UINT8) return 0;
    const KeyPlace key(p, item.batch, min(j, item.sequence.kv_len(p) - 1));
    if (!key.exists(p)) return 0;
    const int of = codes.in_pages ? key.block : item.batch;
    const i64 at = of * codes.zero_point_stride[0] + item.kv_head * codes.zero_point_stride[1];
    return codes.zero_point[at + key.row * codes.zero_point_stride[2]] - code_offset(KIND);
}

// An item's rows of q as operands, by all warps that read.
__device__ inline void load_queries(const Params& p, Shared& sh, const Item& item) {
    const Task task = item.task(p);
    const int r0 = item.r0();
    for (int at = threadIdx.x; at < K_STEPS * 32 * 4; at += WARPS * 32) {
        const int word = at % 4, lane = at / 4 % 32, step = at / 128;
        const int r = r0 + lane / 4 + word % 2 * 8;
        float x[2] = {0, 0};
        if (r < p.rows) {
            const i64 row = Row(p, task, r).offset(p.q_stride);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int d = Keys::q_column(step / Keys::STEPS, step % Keys::STEPS, lane % 4, word / 2 * 2 + e);
                if (d >= p.head_dim) continue;
                x[e] = product(widen(((const Elem*)p.q)[row + d * p.q_stride[3]]), channel_factor<K_SCALES>(p.k_codes, item, d));
            }
        }
#pragma unroll
        for (int term = 0; term < Q_TERMS; term++) {
            ((u32*)&sh.q[term][step][lane])[word] = bf16_of(next_term(x[0])) | bf16_of(next_term(x[1])) << 16;
        }
    }
}

// A tile of an item's keys, from n0 on.
struct Tile {
    const Params& p;
    const Item& item;
    Stage& stage;
    int n0;
};

// s = q.k of a tile. `odd_keys`: of key 8*nt + g, of the lane's own runs.
__device__ inline void multiply_key_codes(
    float (&s)[NT][4], const Shared& sh, const Tile& tile, const CodeBits<K_KIND>& bits, bool careful, Odd& odd, u32 (&odd_keys)[NT]
) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 minus_zero_point[NT];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        odd_keys[nt] = 0;
        if (K_KIND == UINT8) minus_zero_point[nt] = both(bf16_of(-zero_point<K_KIND>(tile.p, tile.p.k_codes, tile.item, tile.n0 + nt * 8 + g)));
    }
    zero(s);
    float sums[NT][4];
#pragma unroll
    for (int run = 0; run < Keys::RUNS; run++) {
        const int d = (4 * run + t) * K_RUN;
        u32 words[NT][Keys::WORDS], factors[NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            Keys::load(words[nt], tile.stage.k() + Keys::place(nt * 8 + g, (4 * run + t) * Keys::RUN_BYTES));
#pragma unroll
            for (int w = 0; w < Keys::WORDS; w++) odd_keys[nt] |= not_finite<K_KIND>(words[nt][w]);
            if constexpr (K_SCALED) {
                const u8* at = tile.stage.k_factors() + (nt * 8 + g) * K_SCALE_BYTES + d / K_BLOCK;
                factors[nt] = both(operand_factor<K_KIND, K_SCALE_DTYPE>(at, careful, odd));
            }
        }
        if (K_SUMMED && run * 4 * K_RUN % K_BLOCK == 0) zero(sums);
        each<Keys::STEPS>([&](auto step) {
            uint4 q[Q_TERMS];
#pragma unroll
            for (int term = 0; term < Q_TERMS; term++) q[term] = sh.q[term][run * Keys::STEPS + step.value][lane];
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                u32 b0, b1;
                Keys::template operand<decltype(step)::value>(words[nt], bits, b0, b1);
                if (K_KIND == UINT8) b0 = add_bf16x2(b0, minus_zero_point[nt]), b1 = add_bf16x2(b1, minus_zero_point[nt]);
                if constexpr (K_SCALED) {
                    b0 = scaled<K_KIND, K_SCALE_DTYPE>(b0, factors[nt]), b1 = scaled<K_KIND, K_SCALE_DTYPE>(b1, factors[nt]);
                }
#pragma unroll
                for (int term = Q_TERMS - 1; term >= 0; term--) {
                    const u32 a[4] = {q[term].x, q[term].y, q[term].z, q[term].w};
                    mma(K_SUMMED ? sums[nt] : s[nt], a, b0, b1);
                }
            }
        });
        if (K_SUMMED && (run + 1) * 4 * K_RUN % K_BLOCK == 0) {
            constexpr int BLOCKS = K_SCALE_BYTES / 4;
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int j = nt * 8 + t * 2 + e % 2;
                    const float factor = ((const float*)tile.stage.k_factors())[j * BLOCKS + run * 4 * K_RUN / K_BLOCK];
                    odd.see(factor);
                    s[nt][e] = fused(sums[nt][e], factor, s[nt][e]);
                }
        }
    }
    const float all = head_factor<K_SCALES, K_KIND, K_SCALE_DTYPE>(tile.p.k_codes, tile.item);
    odd.see(all);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        odd.codes |= odd_keys[nt];
        float2 factor = {all, all};
        if (K_SCALES == TOKEN) factor = ((const float2*)tile.stage.k_factors())[nt * 4 + t], odd.see(factor.x), odd.see(factor.y);
#pragma unroll
        for (int e = 0; e < 4; e++) s[nt][e] = product(s[nt][e], e % 2 ? factor.y : factor.x);
    }
}

// q.k of one row and key, in numbers: where a code or a factor is not finite.
__device__ __noinline__ float sum_of_numbers(const Params& p, const Row& row, const Item& item, int j) {
    const KeyPlace at(p, item.batch, j);
    if (!at.exists(p)) return not_a_number();
    const CodedRow key(p.k_stride, p.k_codes, item.batch, item.kv_head, at.block, at.row);
    const Elem* q = (const Elem*)p.q + row.offset(p.q_stride);
    float sum = 0;
    for (int d = 0; d < p.head_dim; d++) sum = fused(widen(q[d * p.q_stride[3]]), key.number(p.k, p.k_stride[3], p.k_codes, d), sum);
    return sum;
}

// Scores of attended keys that have a number which is not finite.
__device__ inline void sum_odd_keys(
    float (&s)[NT][4], const float (&scores)[NT][4], const Queries& queries, const Tile& tile, bool all, const u32 (&odd_keys)[NT]
) {
    const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        u32 of_key = all ? ~0u : odd_keys[nt];
        of_key |= __shfl_xor_sync(~0u, of_key, 1);
        of_key |= __shfl_xor_sync(~0u, of_key, 2);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool is_odd = (__shfl_sync(~0u, of_key, (t * 2 + e % 2) * 4) & 0x80808080u) != 0;
            const int j = tile.n0 + nt * 8 + t * 2 + e % 2;
            if (is_odd && j < tile.item.sequence.kv_len(tile.p) && scores[nt][e] != negative_infinity()) {
                s[nt][e] = sum_of_numbers(tile.p, queries.row(0, e / 2), tile.item, j);
            }
        }
    }
}

// The weights of 16 keys as operands. The factor of each of a lane's keys (2t, 2t+1, 2t+8, 2t+9).
template <int COUNT>
__device__ inline void weigh(u32 (&a)[COUNT][4], const float (&s)[NT][4], int kt, const float (&factor)[4], bool is_few) {
#pragma unroll
    for (int word = 0; word < 4; word++) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int nt = kt * 2 + word / 2;
            x[e] = product(s[nt][word % 2 * 2 + e], factor[word / 2 * 2 + e]);
        }
#pragma unroll
        for (int term = 0; term < COUNT; term++) {
            a[term][word] = pack(x[0], x[1]);
            if (term + 1 < COUNT) {
                x[0] -= __uint_as_float(a[term][word] << 16), x[1] -= __uint_as_float(a[term][word] & 0xffff0000u);
                if (TERMS == 1 && !is_few) x[0] = x[1] = 0;
            }
        }
    }
}

// acc_o += p.v of a tile, p in `s`.
template <bool CAREFUL>
__device__ inline void multiply_value_codes(
    float (&acc_o)[DV / 8][4], const float (&s)[NT][4], const Tile& tile, const CodeBits<V_KIND>& bits, bool is_few, Odd& odd
) {
    constexpr int P_TERMS = CAREFUL ? CAREFUL_TERMS : TERMS;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int kt = 0; kt < NT / 2; kt++) {
        int j[4];
        float factor[4];
        u32 minus_zero_points[2];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            j[n] = kt * 16 + t * 2 + n % 2 + n / 2 * 8, factor[n] = 1;
            if (V_SCALES == TOKEN) {
                factor[n] = ((const float*)tile.stage.v_factors())[j[n]];
                odd.see(factor[n]);
                if (CAREFUL && !is_finite(factor[n])) factor[n] = 0;
            }
        }
        if (V_KIND == UINT8) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float low = zero_point<V_KIND>(tile.p, tile.p.v_codes, tile.item, tile.n0 + j[n * 2]);
                const float high = zero_point<V_KIND>(tile.p, tile.p.v_codes, tile.item, tile.n0 + j[n * 2 + 1]);
                minus_zero_points[n] = bf16_of(-low) | bf16_of(-high) << 16;
            }
        }
        u32 a[P_TERMS][4];
        if (!V_WEIGHED) weigh(a, s, kt, factor, is_few);
#pragma unroll
        for (int run = 0; run < Values::RUNS; run++) {
            u32 words[4][Values::WORDS], factors[2];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                Values::load(words[n], tile.stage.v() + Values::place(j[n], (8 * run + g) * Values::RUN_BYTES));
#pragma unroll
                for (int w = 0; w < Values::WORDS; w++) odd.codes |= not_finite<V_KIND>(words[n][w]);
            }
            if (V_WEIGHED && run * 8 * V_RUN % V_BLOCK == 0) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    factor[n] = ((const float*)tile.stage.v_factors())[j[n] * (V_SCALE_BYTES / 4) + run * 8 * V_RUN / V_BLOCK];
                    odd.see(factor[n]);
                    if (CAREFUL && !is_finite(factor[n])) factor[n] = 0;
                }
                weigh(a, s, kt, factor, is_few);
            }
            if constexpr (V_SCALED) {
                u32 of[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const u8* at = tile.stage.v_factors() + j[n] * V_SCALE_BYTES + (8 * run + g) * V_RUN / V_BLOCK;
                    of[n] = operand_factor<V_KIND, V_SCALE_DTYPE>(at, CAREFUL, odd);
                }
                factors[0] = of[0] | of[1] << 16, factors[1] = of[2] | of[3] << 16;
            }
            each<V_RUN>([&](auto column) {
                constexpr int I = decltype(column)::value;
                u32 b0 = Values::template operand<I>(words[0], words[1], bits), b1 = Values::template operand<I>(words[2], words[3], bits);
                if (V_KIND == UINT8) b0 = add_bf16x2(b0, minus_zero_points[0]), b1 = add_bf16x2(b1, minus_zero_points[1]);
                if constexpr (V_SCALED) {
                    b0 = scaled<V_KIND, V_SCALE_DTYPE>(b0, factors[0]), b1 = scaled<V_KIND, V_SCALE_DTYPE>(b1, factors[1]);
                }
#pragma unroll
                for (int term = P_TERMS - 1; term >= 0; term--) mma(acc_o[run * V_RUN + I], a[term], b0, b1);
            });
        }
    }
}

// A number of value j, by itself.
__device__ __noinline__ float number_of_value(const Params& p, const Item& item, int j, int column) {
    const KeyPlace at(p, item.batch, j);
    if (!at.exists(p)) return not_a_number();
    return CodedRow(p.v_stride, p.v_codes, item.batch, item.kv_head, at.block, at.row).number(p.v, p.v_stride[3], p.v_codes, column);
}

// Adds the values of a tile that are not finite to the rows that attend them: p is not -0 there.
__device__ inline void add_odd_values(float (&acc_o)[DV / 8][4], const float (&s)[NT][4], const Tile& tile) {
    const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll 1
        for (int n = 0; n < 8; n++) {
            const int j = tile.n0 + nt * 8 + n;
            bool attends[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float own = n % 2 ? s[nt][h * 2 + 1] : s[nt][h * 2];
                attends[h] = !signbit(__shfl_sync(~0u, own, (lane & ~3) | n / 2));
            }
            if (j >= tile.item.sequence.kv_len(tile.p) || !__any_sync(~0u, attends[0] || attends[1])) continue;
#pragma unroll
            for (int block = 0; block < DV / 8; block++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = Values::value_column(block, t * 2 + e);
                    if (column >= tile.p.head_dim_v) continue;
                    const float x = number_of_value(tile.p, tile.item, j, column);
                    if (is_finite(x)) continue;
                    if (attends[0]) acc_o[block][e] += x;
                    if (attends[1]) acc_o[block][2 + e] += x;
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
    const CodeBits<K_KIND> of_k(zero);
    const CodeBits<V_KIND> of_v(zero);
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
        const Queries queries{p, task, r0};
        OnlineSoftmax<1> softmax;
        softmax.clear();
        Odd odd;
        const Tiles tiles(p, item, seen);
        const float all = head_factor<V_SCALES, V_KIND, V_SCALE_DTYPE>(p.v_codes, item);
        bool is_bad = false;
        const bool is_few = TWO_FOR_FEW && seen.hi - seen.lo <= FEW_KEYS;
        for (int n0 = tiles.n0; n0 < tiles.end; n0 += WARPS * TILE) {
            const Tile tile{p, item, sh.ring[stage][warp], n0};
            is_bad |= loader.next_is_bad();
            Accumulator<NT> s[1];
            u32 odd_keys[NT];
            Odd of_keys;
            MaskTile<1, NT> mask;
            mask.fetch(p, queries, n0);
            cp_async_wait<PENDING>();
            __syncwarp();
            multiply_key_codes(s[0], sh, tile, of_k, CAREFUL, CAREFUL ? of_keys : odd, odd_keys);
            __syncwarp();
            loader.load_keys(p, tile.stage);
            const bool positions = n0 < seen.all_lo || n0 + TILE > min(seen.all_hi, tiles.end);
            const bool is_applied = NATURAL || MASK != NO_MASK || positions;
            if (CAREFUL && of_keys.any()) {
                Accumulator<NT> scores[1];
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int e = 0; e < 4; e++) scores[0][nt][e] = 0;
                if (is_applied) apply_scores<1, NT>(scores, p, queries, mask, n0, tiles.end, positions);
                sum_odd_keys(s[0], scores[0], queries, tile, __any_sync(~0u, of_keys.factors != 0), odd_keys);
            }
            if (is_applied) apply_scores<1, NT>(s, p, queries, mask, n0, tiles.end, positions);
            OperandA<NT / 2> unused[1];
            softmax.template add_keys<CAREFUL, NT>(unused, s, c, 0.f);
            cp_async_wait<PENDING>();
            __syncwarp();
            Odd of_values;
            multiply_value_codes<CAREFUL>(softmax.acc_o[0], s[0], tile, of_v, is_few, CAREFUL ? of_values : odd);
            if (CAREFUL) {
                of_values.see(all);
                if (V_SCALES == CHANNEL) {
                    for (int d = lane; d < p.head_dim_v; d += 32) of_values.see(channel_factor<V_SCALES>(p.v_codes, item, d));
                }
                if (of_values.any()) add_odd_values(softmax.acc_o[0], s[0], tile);
            }
            __syncwarp();
            loader.load_values(p, tile.stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        softmax.reduce();
        if (is_bad) softmax.row_sum[0][0] = softmax.row_sum[0][1] = not_a_number();
        const float poison = is_bad || (!CAREFUL && (is_few || odd.any())) ? not_a_number() : 0.f;
        hand_over(p, sh.over, softmax, rows, handed, [&](float* row, int nt, int h) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = Values::value_column(nt, lane_column(lane) + e);
                float factor = V_SCALES == CHANNEL ? channel_factor<V_SCALES>(p.v_codes, item, min(column, p.head_dim_v - 1)) : all;
                if (CAREFUL && !is_finite(factor)) factor = 1;
                row[column] = softmax.acc_o[0][nt][h * 2 + e] * factor + poison;
            }
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
