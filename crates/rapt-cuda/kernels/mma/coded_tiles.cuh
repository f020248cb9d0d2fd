// Tiles of K and V that are codes: loaded as they lie, then made numbers of 16 bits in the tiles that ldmatrix reads.
//
//   load         codes, factors and zero points of a tile to shared memory, by cp.async where rows allow
//   to_numbers   each code to its number, and what is multiplied beside numbers to where scores and weights find it
//
// A number is exact in 16 bits, or the sum of two bfloat16 (TERMS); what it does not hold is multiplied into
//
//   K_SCALES, V_SCALES       K                        V
//   UNIFORM                  the score                the sum
//   TOKEN                    the score                the weight, before it is rounded
//   CHANNEL                  the number: two terms    the sum
//   BLOCK, e4m3fn            the number, and the      the number, and the
//                            global one the score     global one the sum
//   BLOCK, powers of two     the number               the number
//   BLOCK, float32           the number: two terms    the number: two terms
//
// K is of the storage dtype. V is float16, which holds weights to 2^-12 of themselves: less than results of bfloat16 may be off, so that
// factors in weights cost nothing. Where float16 does not hold the numbers V is bfloat16, and no factor is in a weight.
// Factors of UNIFORM, TOKEN and CHANNEL that are not finite are multiplied into numbers, which shows whom they reach, and count as 1. Such
// rows, and keys in pages that do not exist, are written once more when a tile is done: `rewrite_odd`.
// Deliberately absent: q that is codes; zero points of channels and blocks.

#pragma once
#include "common/code_scales.cuh"
#include "common/pages.cuh"
#include "common/tile.cuh"
#include "mma/numbers.cuh"

constexpr int KEYS = BLOCK_N, LOADERS = 128;

template <int KIND_, int SCALES_, int BLOCK_, int DTYPE_, bool SWIZZLED_, int DIM_, bool HALF_, bool IS_V_>
struct CodedOperand {
    static constexpr int KIND = KIND_, SCALES = SCALES_, BLOCK_SIZE = BLOCK_, DTYPE = DTYPE_, DIM = DIM_;
    static constexpr bool SWIZZLED = SWIZZLED_, HALF = HALF_, IS_V = IS_V_, PACKED = is_packed(KIND);
    static constexpr int TERMS = (SCALES == CHANNEL && !IS_V) || (SCALES == BLOCK && DTYPE == F32) ? 2 : 1;
    static constexpr int ROW = PACKED ? DIM / 2 : DIM, PITCH = (ROW + 15) / 16 * 16;  // bytes
    static constexpr int FACTOR_BYTES = scale_bytes(SCALES, DIM, BLOCK_SIZE, DTYPE);
    // Factors of 8 bits are those of blocks.
    static constexpr int FACTOR_SIZE = SCALES == BLOCK && DTYPE != F32 ? 1 : 4;
};
constexpr bool V_POWERS = V_SCALES == BLOCK && V_SCALE_DTYPE == SCALE_E8M0, V_FLOATS = V_SCALES == BLOCK && V_SCALE_DTYPE == F32;
using CodedKeys = CodedOperand<K_KIND, K_SCALES, K_BLOCK, K_SCALE_DTYPE, K_SWIZZLED, D, STORAGE == F16, false>;
using CodedValues = CodedOperand<V_KIND, V_SCALES, V_BLOCK, V_SCALE_DTYPE, V_SWIZZLED, DV, !V_POWERS && !V_FLOATS, true>;
constexpr int K_TERMS = CodedKeys::TERMS, V_TERMS = CodedValues::TERMS;
constexpr bool V_HALF = CodedValues::HALF;

// A tile as it lies in memory, in rows.
template <class Of>
struct Stage {
    __align__(16) u8 codes[KEYS * Of::PITCH];
    __align__(16) u8 factors[KEYS * (Of::FACTOR_BYTES > 0 ? Of::FACTOR_BYTES : 1)];
    u8 zero_points[KEYS];
};
// A value's factor, and the logarithm of its size to the base 2, as weights take it.
struct Weighing {
    float factor, log2;
};
struct CodedStages {
    Stage<CodedKeys> k;
    Stage<CodedValues> v;
    float k_factors[KEYS];  // of scores
    Weighing weighing[KEYS];
    float channels[K_SCALES == CHANNEL ? D : 4];
    int block[KEYS], row[KEYS];  // where keys of a tile to come lie, in pages
    u8 is_missing[KEYS];         // of the tile that was loaded: keys whose pages do not exist
    // Of the head, where they take no register: where its rows of the sequence and their factors begin (in memory, or in a page), the factor of all scores, and
    // whether one of the head, or of a column of values, is not finite.
    const u8 *rows[2], *factors[2];  // of K and of V
    float k_factor;
    int is_k_odd, is_v_odd, unused;
};

// Eight codes of a row, and the zero point or the factor of 8 bits that they have.
template <class Of>
struct Eight {
    u32 words[words_of(Of::KIND)], beside;
    __device__ void read(const Stage<Of>& from, u32 r, u32 c) {
        const u8* const codes = from.codes + r * Of::PITCH + (Of::PACKED ? c / 2 : c);
        if constexpr (Of::PACKED) words[0] = *(const u32*)codes;
        else *(uint2*)words = *(const uint2*)codes;
        beside = 0;
        if (Of::KIND == UINT8) beside = from.zero_points[r];
        else if (Of::SCALES == BLOCK && Of::FACTOR_SIZE == 1) beside = from.factors[r * Of::FACTOR_BYTES + c / Of::BLOCK_SIZE];
    }
};
// `place` of numbers that have no sign.
template <class Of>
__device__ constexpr u32 place_of(u32 r, u32 c) {
    return r * row_of(Of::DIM) + (is_swizzled(Of::DIM) ? c ^ r % 8 * 8 : c);
}
// A thread's codes of a tile, eight by eight.
template <class Of>
struct Eights {
    static constexpr u32 UNITS = Of::DIM / 8, ROWS = LOADERS / UNITS;
    // Where a thread's codes stand in one column, they are read at once.
    static constexpr bool AT_ONCE = LOADERS % UNITS == 0;
    static constexpr u32 COUNT = AT_ONCE ? (KEYS + ROWS - 1) / ROWS : 1;
    const Stage<Of>& from;
    const u32 tid;
    Eight<Of> eights[COUNT];

    __device__ bool is_inside(u32 n) const { return KEYS % ROWS == 0 || tid / UNITS + n * ROWS < KEYS; }
    __device__ explicit Eights(const Stage<Of>& from) : from(from), tid(reread_tid()) {
        if (!AT_ONCE) return;
#pragma unroll
        for (u32 n = 0; n < COUNT; n++) {
            if (is_inside(n)) eights[n].read(from, tid / UNITS + n * ROWS, tid % UNITS * 8);
        }
    }
    // f(row, first column, where they go in a tile, codes)
    template <class F>
    __device__ void each(F f) {
        if constexpr (AT_ONCE) {
            // 8 rows on units stand as before.
            constexpr bool STEPS = ROWS % 8 == 0;
            const u32 first = tid / UNITS, c = tid % UNITS * 8, place = place_of<Of>(first, c);
#pragma unroll
            for (u32 n = 0; n < COUNT; n++) {
                const u32 r = first + n * ROWS;
                if (is_inside(n)) f(r, c, STEPS ? place + n * (ROWS * row_of(Of::DIM)) : place_of<Of>(r, c), eights[n]);
            }
        } else {
#pragma unroll 2
            for (u32 at = tid; at < KEYS * UNITS; at += LOADERS) {
                const u32 r = at / UNITS, c = at % UNITS * 8;
                eights[0].read(from, r, c);
                f(r, c, place_of<Of>(r, c), eights[0]);
            }
        }
    }
};

// A factor as it is multiplied into numbers: 1 where it is multiplied beside them.
__device__ inline float odd_factor(float factor) { return is_finite(factor) ? 1.f : factor; }
__device__ inline float even_factor(float factor) { return is_finite(factor) ? factor : 1.f; }

// Counts as a factor of a weight where that is less: so sums of weights without factors stay finite.
constexpr float LEAST_FACTOR = 0x1p-90f;
__device__ inline Weighing weighing_of(float factor) {
    factor = even_factor(factor);
    return {factor, log2_approx(fmaxf(fabsf(factor), LEAST_FACTOR))};
}

// The factor of all of a head, and that of its column d.
template <int SCALES>
__device__ inline float head_factor(const Params& p, const Task& task, const Codes& codes) {
    if (SCALES == BLOCK) return codes.global_scale;
    if (SCALES != UNIFORM) return 1;
    return ((const float*)codes.descale)[task.batch * codes.descale_stride[0] + kv_head(p, task) * codes.descale_stride[1]];
}
__device__ inline float channel_factor(const Params& p, const Task& task, const Codes& codes, int d) {
    const i64 at = task.batch * codes.descale_stride[0] + kv_head(p, task) * codes.descale_stride[1] + d * codes.descale_stride[3];
    return ((const float*)codes.descale)[at];
}
// What the sums of a column of values are multiplied by.
__device__ inline float column_factor(const Params& p, const Task& task, int column) {
    if (V_SCALES == CHANNEL) return even_factor(channel_factor(p, task, p.v_codes, min(column, p.head_dim_v - 1)));
    return even_factor(head_factor<V_SCALES>(p, task, p.v_codes));
}

// A task's codes, tile after tile. All threads of a block call each function together.
struct CodedTiles {
    const Params& p;
    const Task& task;
    CodedStages& sh;
#if PAGED
    KeyPlace ahead;  // where the thread's key of the tile after the next lies
#endif

    __device__ CodedTiles(const Params& p, const Task& task, CodedStages& sh) : p(p), task(task), sh(sh) {
        const float factor = head_factor<K_SCALES>(p, task, p.k_codes);
        bool is_odd = !is_finite(head_factor<V_SCALES>(p, task, p.v_codes));
        if (V_SCALES == CHANNEL) {
            for (int d = threadIdx.x; d < p.head_dim_v; d += LOADERS) is_odd |= !is_finite(channel_factor(p, task, p.v_codes, d));
            is_odd = __syncthreads_or(is_odd);
        }
        if (threadIdx.x == 0) {
            sh.k_factor = even_factor(factor), sh.is_k_odd = !is_finite(factor), sh.is_v_odd = is_odd;
            set_bases<CodedKeys>(p.k, p.k_stride, p.k_codes), set_bases<CodedValues>(p.v, p.v_stride, p.v_codes);
        }
        if constexpr (K_SCALES == CHANNEL) {
            for (int d = threadIdx.x; d < D; d += LOADERS) sh.channels[d] = d < p.head_dim ? channel_factor(p, task, p.k_codes, d) : 0.f;
        }
    }

    // Before the first tile, from key n0 on.
    __device__ void begin(int n0) {
#if PAGED
        find(n0);
        leave_places();
#endif
        __syncthreads();
#if PAGED
        find(n0 + KEYS);
#endif
    }

    // Begins to load the tile from key n0 on.
    __device__ void load(int n0) {
        load_operand<CodedKeys>(sh.k, p.k_stride, p.k_codes, n0, p.head_dim);
        load_operand<CodedValues>(sh.v, p.v_stride, p.v_codes, n0, p.head_dim_v);
        cp_async_commit();
#if PAGED
        if (threadIdx.x < KEYS) {
            const int r = threadIdx.x;
            sh.is_missing[r] = r < task.sequence.kv_len(p) - n0 && !place(n0, r).exists(p);
        }
#endif
    }

    // Makes numbers of the tile that was loaded; then all threads may read them, and load the next. CAREFUL: weights are not negative, and
    // values have the sign of their factor.
    template <bool CAREFUL>
    __device__ void to_numbers(Elem* k, Elem* v, int n0) {
        constexpr bool HAS_ODD_ROWS = PAGED || K_SCALES == TOKEN || V_SCALES == TOKEN;
        bool has_odd = sh.is_k_odd || sh.is_v_odd;
#if PAGED
        // Nobody reads where keys lie now.
        leave_places();
        find(n0 + 2 * KEYS);
#endif
        if (HAS_ODD_ROWS && threadIdx.x < KEYS) {
            const int r = threadIdx.x;
            has_odd |= is_odd_row(sh.k, r) || is_odd_row(sh.v, r);
            if (K_SCALES == TOKEN) sh.k_factors[r] = even_factor(token_factor(sh.k, r));
            if (V_SCALES == TOKEN) sh.weighing[r] = weighing_of(token_factor(sh.v, r));
        }
        // All codes are read before a number is written: what is read does not wait for what is written.
        Eights<CodedKeys> of_k(sh.k);
        Eights<CodedValues> of_v(sh.v);
        of_k.each([&](u32 r, u32 c, u32 to, const auto& eight) { write_numbers<CodedKeys, false>(k + to, sh.k, r, c, eight); });
        of_v.each([&](u32 r, u32 c, u32 to, const auto& eight) { write_numbers<CodedValues, CAREFUL>(v + to, sh.v, r, c, eight); });
        if (HAS_ODD_ROWS) has_odd = __syncthreads_or(has_odd);
        else __syncthreads();
        if (has_odd) {
            rewrite_odd(k, sh.k, p.k_codes, sh.is_k_odd);
            rewrite_odd(v, sh.v, p.v_codes, sh.is_v_odd);
            __syncthreads();
        }
    }

    // Products become scores but for the scale: times the factors of their keys.
    template <int MT, int NT>
    __device__ void multiply_scores(Accumulator<NT> (&s)[MT]) const {
        if (K_SCALES == CHANNEL) return;
        const float of_all = sh.k_factor;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float factor[2] = {of_all, of_all};
            if constexpr (K_SCALES == TOKEN) *(float2*)factor = *(const float2*)&sh.k_factors[nt * 8 + lane_column(threadIdx.x)];
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[mt][nt][e] = product(s[mt][nt][e], factor[e % 2]);
        }
    }

  private:
    // Where row r of the tile from key n0 on lies: in a page, or behind the first key.
    __device__ KeyPlace place(int n0, int r) const {
        KeyPlace at;
#if PAGED
        at.block = sh.block[r], at.row = sh.row[r];
#else
        at.block = task.batch, at.row = n0 + r;
#endif
        return at;
    }
#if PAGED
    // Looks up the keys from n0 on, the thread its own; no entry behind the last key is read.
    __device__ void find(int n0) {
        const int j = n0 + threadIdx.x;
        ahead.block = ahead.row = 0;
        if (threadIdx.x < KEYS && j < task.sequence.kv_len(p)) ahead = KeyPlace(p, task.batch, j);
    }
    __device__ void leave_places() {
        if (threadIdx.x < KEYS) sh.block[threadIdx.x] = ahead.block, sh.row[threadIdx.x] = ahead.row;
    }
#endif

    template <class Of>
    __device__ void set_bases(const void* base, const i64 (&stride)[4], const Codes& codes) {
        const i64 head = kv_head(p, task), first = task.sequence.first_key();
        sh.rows[Of::IS_V] = (const u8*)base + head * stride[1] + first * stride[2] + (PAGED ? 0 : task.batch * stride[0]);
        const i64 at = head * codes.descale_stride[1] + first * codes.descale_stride[2] + (codes.in_pages ? 0 : task.batch * codes.descale_stride[0]);
        sh.factors[Of::IS_V] = codes.descale + at * Of::FACTOR_SIZE;
    }

    template <class Of>
    __device__ void load_operand(Stage<Of>& to, const i64 (&stride)[4], const Codes& codes, int n0, int dim) const {
        const int rows = task.sequence.kv_len(p) - n0;
        // Rows, whole ones or by the byte; zeros behind the last.
        constexpr u32 UNIT = VECTOR ? 16 : 1, UNITS = VECTOR ? Of::PITCH / 16 : Of::ROW;
        const u8* const base = sh.rows[Of::IS_V];
        if constexpr (VECTOR && !PAGED && LOADERS % UNITS == 0) {
            // A thread's units stand in one column.
            constexpr u32 STEP = LOADERS / UNITS;
            const u32 tid = reread_tid(), first = tid / UNITS, c = tid % UNITS * UNIT;
            const u8* at = base + ((n0 + first) * stride[2] + c);
            const i64 step = STEP * stride[2];
            const u32 code = shared_address(to.codes + first * Of::PITCH + c);
#pragma unroll
            for (u32 n = 0; n < (KEYS + STEP - 1) / STEP; n++, at += step) {
                const int r = first + n * STEP;
                if (KEYS % STEP != 0 && r >= KEYS) break;
                if (rows >= KEYS) cp_async(code + n * (STEP * Of::PITCH), (const Elem*)at);
                else cp_async_zfill<16>(code + n * (STEP * Of::PITCH), r < rows ? at : base, r < rows);
            }
        } else {
            const int bytes = Of::PACKED ? (dim + 1) / 2 : dim;
            for (u32 at = reread_tid(); at < KEYS * UNITS; at += LOADERS) {
                const int r = at / UNITS, c = at % UNITS * UNIT;
                const KeyPlace from = place(n0, r);
                const bool inside = r < rows && from.exists(p) && c < bytes;
                const u8* const row = base + (PAGED ? from.block * stride[0] : 0) + from.row * stride[2];
                u8* const code = to.codes + r * Of::PITCH + c;
                if constexpr (VECTOR) cp_async_zfill<16>(shared_address(code), inside ? row + c : base, inside);
                else *code = inside ? row[c * stride[3]] : 0;
            }
        }
        if constexpr (Of::FACTOR_BYTES > 0) {
            constexpr u32 SIZE = Of::FACTOR_SIZE;
            constexpr bool BY_4 = SIZE == 4 || (VECTOR && Of::FACTOR_BYTES % 4 == 0);
            constexpr u32 STEP = BY_4 ? 4 : 1, FACTORS = Of::FACTOR_BYTES / STEP;
            const u8* const base = sh.factors[Of::IS_V];
            for (u32 at = reread_tid(); at < KEYS * FACTORS; at += LOADERS) {
                const int r = at / FACTORS, c = at % FACTORS * (STEP / SIZE);
                const KeyPlace from = place(n0, r);
                const bool inside = r < rows && from.exists(p);
                i64 row = (Of::SWIZZLED ? swizzled_row(from.row, codes.swizzled_tiles) : from.row) * codes.descale_stride[2];
                if (PAGED && codes.in_pages) row += from.block * codes.descale_stride[0];
                const i64 along = Of::SWIZZLED ? along_swizzled_row(c) : c;
                const u8* const stored = base + (row + (FACTORS == 1 ? 0 : along * codes.descale_stride[3])) * SIZE;
                u8* const factor = to.factors + r * Of::FACTOR_BYTES + c * SIZE;
                if constexpr (BY_4) cp_async_zfill<4>(shared_address(factor), inside ? stored : base, inside);
                else *factor = inside ? *stored : 0;
            }
        }
        if constexpr (Of::KIND == UINT8) {
            for (int r = threadIdx.x; r < KEYS; r += LOADERS) {
                const KeyPlace from = place(n0, r);
                const bool inside = r < rows && from.exists(p);
                const i64 at = (codes.in_pages ? from.block : task.batch) * codes.zero_point_stride[0] +
                               kv_head(p, task) * codes.zero_point_stride[1] +
                               (task.sequence.first_key() + from.row) * codes.zero_point_stride[2];
                to.zero_points[r] = inside ? codes.zero_point[at] : 0;
            }
        }
    }

    // The eight codes from column c of row r on. SIGNED: with the sign of the row's factor.
    template <class Of, bool SIGNED>
    __device__ void write_numbers(Elem* to, const Stage<Of>& from, u32 r, u32 c, const Eight<Of>& eight) const {
        u32 pairs[4];
        pairs_of_codes<Of::KIND, Of::HALF>(pairs, eight.words, eight.beside);
        if constexpr (Of::TERMS == 2) {
            u32 rest[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float by = Of::SCALES == CHANNEL ? sh.channels[c + n * 2 + e] : block_factor(from, r, c);
                    x[e] = product(bf16_to_float(pairs[n] >> e * 16), by);
                }
                pairs[n] = pack_as<false>(x[0], x[1]);
#pragma unroll
                for (int e = 0; e < 2; e++) x[e] = is_finite(x[e]) ? x[e] - bf16_to_float(pairs[n] >> e * 16) : 0.f;
                rest[n] = pack_as<false>(x[0], x[1]);
            }
            *(uint4*)(to + KEYS * row_of(Of::DIM)) = {rest[0], rest[1], rest[2], rest[3]};
        } else if constexpr (Of::SCALES == BLOCK) {
            const u32 by = factor_pair<Of::DTYPE, Of::HALF>(eight.beside);
#pragma unroll
            for (u32& pair : pairs) pair = multiply_pairs<Of::HALF>(pair, by);
        } else if constexpr (Of::SCALES == TOKEN && SIGNED) {
            const u32 sign = __float_as_uint(token_factor(from, r)) >> 31 ? twice(0x8000) : 0;
#pragma unroll
            for (u32& pair : pairs) pair ^= sign;
        }
        *(uint4*)to = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }

    template <class Of>
    __device__ static float token_factor(const Stage<Of>& from, int r) {
        return ((const float*)from.factors)[r];
    }
    // Whether a row's numbers are not those of its codes: 0 times an infinite code is NaN.
    template <class Of>
    __device__ bool is_odd_row(const Stage<Of>& from, int r) const {
        if (PAGED && sh.is_missing[r]) return true;
        if (Of::SCALES != TOKEN) return false;
        const float factor = token_factor(from, r);
        return !is_finite(factor) || (Of::IS_V && Of::KIND == E5M2 && factor == 0);
    }
    // Writes numbers once more with factors that are not finite, one by one. `all_odd`: one of the head, or of a column.
    template <class Of>
    __device__ void rewrite_odd(Elem* tile, const Stage<Of>& from, const Codes& codes, bool all_odd) const {
#pragma unroll 1
        for (int at = threadIdx.x; at < KEYS * Of::DIM; at += LOADERS) {
            const int r = at / Of::DIM, d = at % Of::DIM;
            const bool is_missing = PAGED && sh.is_missing[r];
            if (!is_odd_row(from, r) && !(all_odd && Of::TERMS == 1)) continue;
            float x = not_a_number();
            if (!is_missing) {
                const u8* const row = from.codes + r * Of::PITCH;
                const u32 code = Of::PACKED ? row[d / 2] >> d % 2 * 4 & 0xf : row[d];
                x = decode_code(Of::KIND, code) - (Of::KIND == UINT8 ? (float)from.zero_points[r] : 0.f);
                float by;
                if (Of::SCALES == TOKEN) by = token_factor(from, r);
                else if (Of::SCALES == CHANNEL) by = odd_factor(channel_factor(p, task, codes, min(d, p.head_dim_v - 1)));
                else by = odd_factor(head_factor<Of::SCALES>(p, task, codes));
                x = product(product(x, block_factor(from, r, d)), by);
            }
            tile[place_of<Of>(r, d & ~7) + d % 8] = Of::HALF ? float_to_f16(x) : float_to_bf16(x);
        }
    }

    template <class Of>
    __device__ static float block_factor(const Stage<Of>& from, int r, int d) {
        if (Of::SCALES != BLOCK) return 1;
        return load_scale(from.factors, Of::DTYPE, r * (Of::FACTOR_BYTES / Of::FACTOR_SIZE) + d / Of::BLOCK_SIZE);
    }
};
