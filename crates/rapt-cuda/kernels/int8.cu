// Attention with products of int8, as rapt_reference::int8 defines it: q is rounded to int8 row by row, weights to 8 bits block by block.
//
//   4 warps, each 16*FRAGMENTS rows of a tile of BLOCK_M queries; keys in blocks of 128 from key 0, which are the definition's:
//     wait for K; begin V             s = qc @ kc.T                           integers, exact
//                                     x = s * factor of the key               y = x * scale of the row, or a score in natural units
//                                     m_b = max y;  p = 2^(y - m_b);  pc = round(255 p)
//     wait for V; begin the next K    acc_o = acc_o * 2^(m - m') + (pc @ vc) * 2^(m_b - m')
//   out = acc_o / 255 / sum * factors of v
//
// Sums of integers are exact, and all else of a row is computed of its own numbers in an order that nothing else decides: its bits depend
// on itself and the keys that it attends. Few queries and many take the same way. Codes have no NaN: what is not finite is a factor or a
// scale, and reaches the rows that attend with it.
// Deliberately absent: head dims above 256, whose sums leave 22 bits; splitting of the keys.

#include "common/epilogue.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "int8/queries.cuh"
#include "int8/tiles.cuh"

constexpr int THREADS = 128, BM = BLOCK_M, BN = BLOCK_N, FRAGMENTS = BM / 64, NT = BN / 8, ROWS = 16 * FRAGMENTS;
static_assert(BN == 128 && D <= 256, "blocks of the definition, and sums below 2^22");

struct Shared {
    KeyTiles tiles;
    __align__(128) u8 q[BM * byte_row(D)];
    float scales[BM];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and int8.cu disagree on shared memory");

using Place = RowBlock<BM>;

// Weights of 16 rows and 128 keys, and what a row has so far.
struct Rows {
    float factor[FRAGMENTS][2];                       // of products: to the base 2, or (NATURAL) scores before softcap
    float row_max[FRAGMENTS][2], row_sum[FRAGMENTS][2];  // to the base 2, or natural; sums are the thread's own
    Accumulator<DV / 8> acc_o[FRAGMENTS];             // 255 times; tiles of products.cuh
};

// Products of a block as numbers: exact.
template <int MT>
__device__ inline void multiply_codes(Accumulator<NT> (&x)[MT], const u8* q_tile, const u8* k_tile) {
    const int lane = threadIdx.x % 32;
    const u32 q_at = shared_address(q_tile + byte_place<D>(lane % 16, 0)), q_unit = lane / 16;
    const u32 k_at = shared_address(k_tile + byte_place<D>(lane / 16 * 8 + lane % 8, 0)), k_unit = lane / 8 % 2;
    constexpr int ROWS_16 = 16 * byte_row(D);
    const u32 q_turned = unit_of<D>(q_at, q_unit), k_turned = unit_of<D>(k_at, k_unit);
    int s[MT][NT][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[mt][nt][e] = MAGIC_BITS;
    // Fragments are loaded one product ahead of their use.
    constexpr int PAIRS = NT / 2, STEPS = D / 32;
    u32 a[2][MT][4], b[2][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) ldmatrix(a[0][mt], q_turned + mt * ROWS_16);
    ldmatrix(b[0], k_turned);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const int now = (step * PAIRS + pair) % 2;
            if (pair + 1 < PAIRS) {
                ldmatrix(b[1 - now], unit_of<D>(k_turned, step * 2) + (pair + 1) * ROWS_16);
            } else if (step + 1 < STEPS) {
#pragma unroll
                for (int mt = 0; mt < MT; mt++) ldmatrix(a[(step + 1) % 2][mt], unit_of<D>(q_turned, step * 2 + 2) + mt * ROWS_16);
                ldmatrix(b[1 - now], unit_of<D>(k_turned, step * 2 + 2));
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_int8<false>(s[mt][pair * 2], a[step % 2][mt], b[now][0], b[now][1]);
                mma_int8<false>(s[mt][pair * 2 + 1], a[step % 2][mt], b[now][2], b[now][3]);
            }
        }
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[mt][nt][e] = __fadd_rn(__int_as_float(s[mt][nt][e]), -MAGIC);
}

// Products become exponents of 2, or (NATURAL) what scale and softcap are yet to be applied to.
template <int MT>
__device__ inline void scale_products(Accumulator<NT> (&x)[MT], const Rows& rows, const KeyTiles& tiles) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        float of_key[2] = {1, 1};
        if constexpr (KEY_FACTORS) *(float2*)of_key = *(const float2*)&tiles.factors[nt * 8 + lane_column(threadIdx.x)];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (KEY_FACTORS) x[mt][nt][e] = product(x[mt][nt][e], of_key[e % 2]);
                if (!NATURAL) x[mt][nt][e] = product(x[mt][nt][e], rows.factor[mt][e / 2]);
            }
    }
}

// 2^(x*c), where scores are natural.
__device__ inline float power(float x) { return exp2_approx(NATURAL ? product(x, LOG2_E) : x); }
// A maximum as it is taken from scores: those of a row without a key are compared with 0.
__device__ inline float taken(float row_max) { return row_max == negative_infinity() ? 0.f : row_max; }

// Scores of a block become weights of 8 bits, operands of the product with its values; `weight` is what that is added with.
template <int MT>
__device__ inline void weigh(OperandA<NT / 4> (&p)[MT], float (&weight)[MT][2], Accumulator<NT> (&y)[MT], Rows& rows) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        float factor[2];
        bool has_risen = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float block_max = max_of_row(y[mt], h, negative_infinity()), base = taken(block_max);
            float sum = 0;
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = y[mt][nt][h * 2 + e];
                    x = power(x - base);
                    sum += x;
                    // The nearest integer, ties to even, as the low bits of a float32.
                    x = __fmaf_rn(x, 255.f, MAGIC);
                }
            const float before = rows.row_max[mt][h], top = fmaxf(before, block_max);
            factor[h] = before == top ? 1.f : power(before - top);
            weight[mt][h] = block_max == top ? 1.f : power(block_max - top);
            has_risen |= before != top;
            rows.row_max[mt][h] = top;
            rows.row_sum[mt][h] = __fmaf_rn(sum, weight[mt][h], product(rows.row_sum[mt][h], factor[h]));
        }
        if (__any_sync(~0u, has_risen)) rescale(rows.acc_o[mt], factor, false);
#pragma unroll
        for (int step = 0; step < NT / 4; step++)
#pragma unroll
            for (int word = 0; word < 4; word++) {
                const int nt = step * 4 + word / 2 * 2, h = word % 2;
                const auto bits = [&](int nt, int e) { return __float_as_uint(y[mt][nt][h * 2 + e]); };
                p[mt][step][word] = low_bytes(bits(nt, 0), bits(nt, 1), bits(nt + 1, 0), bits(nt + 1, 1));
            }
    }
}

// acc_o += (pc @ vc) * weight
template <int MT>
__device__ inline void add_values(Rows& rows, const OperandA<NT / 4> (&p)[MT], const float (&weight)[MT][2], const u8* v_tile) {
    // So many units of 16 columns at a time: the sums of one wait for its product of 32 keys before, those of others do not.
    constexpr int UNITS = DV % 64 == 0 ? 4 : 2, STEPS = NT / 4;
    const int lane = threadIdx.x % 32;
    const u32 v_at = shared_address(v_tile + byte_place<DV>(lane, 0));
    u32 words[2][4];
    const auto load = [&](int n) {
        const int unit = n / (UNITS * STEPS) * UNITS + n % UNITS, step = n / UNITS % STEPS;
        ldmatrix_trans(words[n % 2], unit_of<DV>(v_at, unit) + step * 32 * byte_row(DV));
    };
    load(0);
#pragma unroll
    for (int first = 0; first < DV / 16; first += UNITS) {
        int sums[MT][UNITS * 2][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int tile = 0; tile < UNITS * 2; tile++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[mt][tile][e] = MAGIC_BITS;
#pragma unroll
        for (int at = 0; at < UNITS * STEPS; at++) {
            const int n = first * STEPS + at, unit = at % UNITS, step = at / UNITS;
            if (n + 1 < DV / 16 * STEPS) load(n + 1);
            const ValuePair pair(words[n % 2]);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_int8<true>(sums[mt][unit * 2], p[mt][step], pair.even[0], pair.even[1]);
                mma_int8<true>(sums[mt][unit * 2 + 1], p[mt][step], pair.odd[0], pair.odd[1]);
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int tile = 0; tile < UNITS * 2; tile++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float& sum = rows.acc_o[mt][first * 2 + tile][e];
                    sum = __fmaf_rn(__fadd_rn(__int_as_float(sums[mt][tile][e]), -MAGIC), weight[mt][e / 2], sum);
                }
    }
}

// The factor of column d of the head's values, over 255.
__device__ inline float column_factor(const Params& p, const Task& task, int d) {
    const Codes& codes = p.v_codes;
    const i64 at = task.batch * codes.descale_stride[0] + kv_head(p, task) * codes.descale_stride[1] + (V_SCALES == CHANNEL ? d * codes.descale_stride[3] : 0);
    return ((const float*)codes.descale)[at] * (1.f / 255.f);
}

// Rows of out and lse: a thread has four columns of 16 side by side.
template <int MT>
__device__ inline void store(const Params& p, const Queries& queries, Rows& rows) {
    const Task& task = queries.task;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float l = sum_of_lanes<4>(rows.row_sum[mt][h]);
            if (queries.r0 + mt * 16 + lane_row(lane) + h * 8 >= task.rows(p)) continue;
            const Row row = queries.row(mt, h);
            const RowEnd row_end(p, row, rows.row_max[mt][h] * (NATURAL ? 1.f : LN_2), l);
            if (lane % 4 == 0) store_lse(p, row, row_end);
            const i64 to = row.offset(p.out_stride);
#pragma unroll
            for (int unit = 0; unit < DV / 16; unit++) {
                const int first = unit * 16 + lane % 4 * 4;
                if (first >= p.head_dim_v) break;
                float x[4];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    x[c] = row_end.normalise(l, rows.acc_o[mt][unit * 2 + value_tile(c)][h * 2 + value_sum(c)]);
                    if (l != 0) x[c] *= column_factor(p, task, min(first + c, p.head_dim_v - 1));
                }
                if (!p.out_vector) {
#pragma unroll
                    for (int c = 0; c < 4; c++) store_column(p, to, first + c, x[c]);
                    continue;
                }
#if STORAGE == F32
                *(float4*)((float*)p.out + to + first) = {x[0], x[1], x[2], x[3]};
#else
                *(uint2*)((Elem*)p.out + to + first) = {pack(x[0], x[1]), pack(x[2], x[3])};
#endif
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
#if VARLEN
    if (is_beyond(p, blockIdx.x)) return;
#endif
    constexpr int MT = FRAGMENTS;
    const int warp = threadIdx.x / 32;
    const Place place(p, blockIdx.x);
    const Task& task = place.task;
    const int end = min(place.r0 + BM, task.rows(p)), warp_row = warp * ROWS;
    const Queries queries{p, task, place.r0 + warp_row};
    const Seen seen(p, task, place.r0, end);
    const int start = seen.lo / BN * BN;

    Tiles tiles(p, task, sh.tiles);
    tiles.begin(start);
    start < seen.hi ? tiles.load_keys(start) : cp_async_commit();
    // A warp's own rows: no other waits for them.
    round_rows<D, ROWS>(sh.q + warp_row * byte_row(D), sh.scales + warp_row, p, task, place.r0 + warp_row);
    __syncwarp();

    Rows rows;
    {
        double of_all = p.scale * (NATURAL ? 1.0 : 1.4426950408889634);
        if (K_SCALES == UNIFORM) {
            const Codes& codes = p.k_codes;
            const i64 at = task.batch * codes.descale_stride[0] + kv_head(p, task) * codes.descale_stride[1];
            of_all *= (double)finite_or_nan(((const float*)codes.descale)[at]);
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            zero(rows.acc_o[mt]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                rows.factor[mt][h] = (float)(of_all * (double)sh.scales[warp_row + mt * 16 + lane_row((int)threadIdx.x) + h * 8]);
                rows.row_max[mt][h] = negative_infinity(), rows.row_sum[mt][h] = 0;
            }
        }
    }
    const auto scale_of = [&](int mt, int h) { return rows.factor[mt][h]; };

    for (int n0 = start; n0 < seen.hi; n0 += BN) {
        cp_async_wait<0>();
        tiles.leave_factors();
        __syncthreads();
        tiles.load_values(n0);
        tiles.go_on(n0);
        Accumulator<NT> s[MT];
        MaskTile<MT, NT> mask;
        mask.fetch(p, queries, n0);
        multiply_codes<MT>(s, sh.q + warp_row * byte_row(D), sh.tiles.k);
        scale_products<MT>(s, rows, sh.tiles);
        const bool positions = n0 < seen.all_lo || n0 + BN > seen.all_hi;
        if (NATURAL || MASK != NO_MASK || positions) {
            apply_scaled_scores<MT, NT>(s, p, queries, mask, {n0, task.sequence.kv_len(p), positions}, scale_of);
        }
        OperandA<NT / 4> p_codes[MT];
        float weight[MT][2];
        weigh<MT>(p_codes, weight, s, rows);
        cp_async_wait<0>();
        __syncthreads();
        if (n0 + BN < seen.hi) tiles.load_keys(n0 + BN);
        add_values<MT>(rows, p_codes, weight, sh.tiles.v);
    }
    cp_async_wait<0>();
    store<MT>(p, queries, rows);
}
