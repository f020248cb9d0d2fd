// Float32 attention on the tensor cores of compute capability 9.0, by two f16 for each number (hopper/halves.cuh).
//
// A row of q, k or v has a power of its own. A key's power for v goes into its weights p, and the largest of these is computed again in every
// block of keys, per query, among the keys that it attends: what nobody attends scales nothing.
//
//   warpgroup 0, 3   K and V: from memory, through registers, split into the swizzle_128b tiles of a ring of STAGES
//   warpgroup 1, 2   64 queries each: s = q.K, softmax, part = p.V by wgmma; acc_o = acc_o*factor + part
//
// p.V of a block is summed by itself and added to acc in f32: the sum inside the tensor cores cuts bits off, which a long one
// would show. What cannot be read 16 bytes at a time is read element by element into the same tiles: the bits are the same.
//
// Values that nobody attends: as in common/softmax.cuh. A block with a sum that is not finite runs again; numbers of q, k and v that are
// not finite are read as 0 then, the scores that they belong to are computed one by one, and what they add to the sums of the
// rows that attend them is added apart. Finite sums have the same bits both ways.
// Rows that lie in pages are looked up a quarter of a block ahead; those of a page that does not exist are NaN.
// Deliberately absent: splitting of the keys, head dims above 128.

#include "common/pages.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "common/tile.cuh"
#include "common/epilogue.cuh"
#include "hopper/halves.cuh"
#include "hopper/tma.cuh"

DEFINE_WGMMA_QK(wgmma_qk, BLOCK_N)
DEFINE_WGMMA_PV(wgmma_pv, HEAD_DIM_V)

constexpr int BM = BLOCK_M, BN = BLOCK_N, NT = BN / 8, KT = BN / 16, VT = DV / 8, THREADS = 512;
constexpr int K_BOXES = (D + BOX - 1) / BOX, V_BOXES = (DV + BOX - 1) / BOX;
static_assert(BM == 128 && BN == 64, "two warpgroups of 64 queries, blocks of 64 keys");

struct Shared {
    u8 q[2][2][K_BOXES][BOX_BYTES];  // of a warpgroup: hi, lo
    u8 k[STAGES][2][K_BOXES][BOX_BYTES], v[STAGES][2][V_BOXES][BOX_BYTES];
    float q_down[2][64], k_down[STAGES][BN], v_down[STAGES][BN];       // 1 / up
    u64 k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    u16 q_odd[2][4], k_odd[STAGES][4], v_odd[STAGES][4];  // a bit for each row that holds what is not finite
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and hopper_f32.cu disagree on shared memory");

// --- loading ---------------------------------------------------------------------------------------------------------------

struct Place : RowBlock<BM> {
    using RowBlock::RowBlock;
    // What this block computes, read again wherever it is needed.
    __device__ static Place here(const Params& p) { return Place(p, opaque(blockIdx.x)); }
    __device__ Seen seen(const Params& p) const { return Seen(p, task, r0, r0 + min(BM, task.rows(p) - r0)); }
};

__device__ inline const float* head_of(const void* base, const i64 (&stride)[4], const Params& p, const Task& task) {
    if (PAGED) return (const float*)base + kv_head(p, task) * stride[1];  // in the first page
    return (const float*)base + task.batch * stride[0] + task.head / p.group * stride[1] + task.sequence.first_key() * stride[2];
}

// K or V of a task in memory.
struct Operand {
    const float* base;
    const i64 (&stride)[4];
    int dim;
#if PAGED
    int batch;
#endif
};

#if PAGED
// Row j of a head; null where its page does not exist.
__device__ inline const float* row_in_pages(const float* head, const i64 (&stride)[4], const Params& p, int batch, int j) {
    const KeyPlace at(p, batch, j);
    return at.exists(p) ? head + (at.block * stride[0] + at.row * stride[2]) : nullptr;
}
#endif

// Its blocks in shared memory, one for each place of the ring: tiles, 1 / up, rows that hold what is not finite, and barriers.
template <int BOXES>
struct Blocks {
    u8 (&tiles)[STAGES][2][BOXES][BOX_BYTES];
    float (&down)[STAGES][BN];
    u16 (&odd)[STAGES][4];
    u64 (&full)[STAGES];
    u64 (&empty)[STAGES];
};

// The keys' (or values') rows, two quarters of a block under way while a third is split.
template <int BOXES>
__device__ inline void load_blocks(
    bool careful, const Params& p, const Sequence& of, const Seen& seen, Ring<STAGES>& ring, const Operand& operand,
    const Blocks<BOXES>& blocks
) {
    const i64(&stride)[4] = operand.stride;
    const int lane = threadIdx.x % 128, start = seen.lo / BN * BN;
    if (start >= seen.hi) return;
    Quarter<BOXES> part[2];
    // The quarter that is read next: this thread's row of it, and that row's key.
    int j = start + Quarter<BOXES>::first_row(lane);
#if PAGED
    const auto row = [&] { return j < of.kv_len(p) ? row_in_pages(operand.base, stride, p, operand.batch, j) : operand.base; };
    const float* from = row();
    auto load_next = [&](Quarter<BOXES>& to, int n) {
        to.load(from, from != nullptr && j < of.kv_len(p), stride[3], operand.dim, lane);
        if (from == nullptr) to.spoil(operand.dim, lane);
        j += n == 3 ? BN - Quarter<BOXES>::ahead(3) : Quarter<BOXES>::ahead(n + 1) - Quarter<BOXES>::ahead(n);
        from = row();
    };
#else
    const float* from = operand.base + j * stride[2];
    auto load_next = [&](Quarter<BOXES>& to, int n) {
        to.load(from, j < of.kv_len(p), stride[3], operand.dim, lane);
        const int rows = n == 3 ? BN - Quarter<BOXES>::ahead(3) : Quarter<BOXES>::ahead(n + 1) - Quarter<BOXES>::ahead(n);
        j += rows, from += rows * stride[2];
    };
#endif
    load_next(part[0], 0);
    load_next(part[1], 1);
#pragma unroll 1
    for (int n0 = start; n0 < seen.hi; n0 += BN) {
        u32 odd = 0;
        mbarrier_wait(blocks.empty[ring.at], ring.phase ^ 1);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            odd |= part[n % 2].store(careful, blocks.tiles[ring.at], blocks.down[ring.at], lane, n);
            if (n < 2 || n0 + BN < seen.hi) load_next(part[n % 2], (n + 2) % 4);
        }
        if (careful && lane % 32 == 0) blocks.odd[ring.at][lane / 32] = odd;
        fence_proxy_async();
        mbarrier_arrive(blocks.full[ring.at]);
        ring.next();
    }
}

// --- multiplying -----------------------------------------------------------------------------------------------------------

// The products with v come box by box, which takes half the registers: the last may have fewer columns.
constexpr int LAST = DV - (V_BOXES - 1) * BOX;
static_assert(LAST == LAST_COLUMNS, "the host and hopper_f32.cu disagree on the last box");
#if HEAD_DIM_V > 64
DEFINE_WGMMA_PV(multiply_box, 64)
DEFINE_WGMMA_PV(multiply_last, LAST_COLUMNS)
#endif

// The sums of 64 rows: two rows a thread.
struct RowSums {
    float row_max[2], row_sum[2];
    Accumulator<VT> acc_o;

    __device__ bool has_non_finite() const { return non_finite(acc_o) != 0; }
};

// q.k as IEEE has it.
__device__ inline float plain_score(const Params& p, const float* q, const float* k) {
    float sum = 0;
#pragma unroll 1
    for (int d = 0; d < p.head_dim; d++) sum += q[d * p.q_stride[3]] * k[d * p.k_stride[3]];
    return sum;
}

// A warpgroup's queries: split, into its tiles.
__device__ inline void load_queries(bool careful, const Params& p, Shared& sh, const Place& place, int rows, int wg, int lane) {
    u32 odd = 0;
    Quarter<K_BOXES> part;
#pragma unroll 1
    for (int n = 0; n < 4; n++) {
        const int r = wg * 64 + Quarter<K_BOXES>::first_row(lane) + Quarter<K_BOXES>::ahead(n);
        const Row row(p, place.task, place.r0 + min(r, rows - 1));
        part.load((const float*)p.q + row.offset(p.q_stride), r < rows, p.q_stride[3], p.head_dim, lane);
        odd |= part.store(careful, sh.q[wg], sh.q_down[wg], lane, n);
    }
    if (careful && lane % 32 == 0) sh.q_odd[wg][lane / 32] = odd;
    fence_proxy_async();
    bar_sync(1 + wg, 128);
}

// Scores of keys and rows that hold what is not finite, as IEEE has them.
template <class MakeQueries>
__device__ inline void recompute_scores(
    Accumulator<NT>& s, const Params& p, const Shared& sh, const Ring<STAGES>& ring, int n0, const bool (&q_odd)[2], MakeQueries queries
) {
    const int quad = lane_column(threadIdx.x % 128);
    const u64 k_odd = *(const u64*)sh.k_odd[ring.at];
    const Place place = Place::here(p);
#if PAGED
    const float* k = head_of(p.k, p.k_stride, p, place.task);
#else
    const float* k = head_of(p.k, p.k_stride, p, place.task) + n0 * p.k_stride[2];
#endif
    const bool any = k_odd != 0 || q_odd[0] || q_odd[1];
#pragma unroll 1
    for (int n = 0; any && n < NT * 4; n++) {
        const int j = n / 4 * 8 + quad + n % 2, h = n / 2 % 2;
        if (((k_odd >> j & 1) == 0 && !(h == 0 ? q_odd[0] : q_odd[1])) || n0 + j >= place.task.sequence.kv_len(p)) continue;
        const float* q = (const float*)p.q + queries().row(0, h).offset(p.q_stride);
#if PAGED
        const float* row = row_in_pages(k, p.k_stride, p, place.task.batch, n0 + j);
        const float x = row != nullptr ? plain_score(p, q, row) : not_a_number();
#else
        const float x = plain_score(p, q, k + j * p.k_stride[2]);
#endif
#pragma unroll
        for (int i = 0; i < NT * 4; i++) {
            if (i == n) s[i / 4][i % 4] = x;
        }
    }
}

// What values that are not finite add to the sums of the rows that attend them; they are 0 in the tile.
__device__ inline void add_non_finite_values(
    Accumulator<VT>& acc_o, const Accumulator<NT>& s, const Params& p, const Shared& sh, const Ring<STAGES>& ring, int n0
) {
    const int quad = lane_column(threadIdx.x % 128);
    const u64 v_odd = *(const u64*)sh.v_odd[ring.at];
#if PAGED
    const int batch = Place::here(p).task.batch;
    const float* v = head_of(p.v, p.v_stride, p, Place::here(p).task);
#else
    const float* v = head_of(p.v, p.v_stride, p, Place::here(p).task) + n0 * p.v_stride[2];
#endif
    u32 hidden = 0;
#pragma unroll
    for (int n = 0; n < NT * 4; n++) hidden |= (s[n / 4][n % 4] == negative_infinity() ? 1u : 0u) << n;
#pragma unroll 1
    for (int j = 0; j < BN; j++) {
        if ((v_odd >> j & 1) == 0) continue;
#if PAGED
        const float* row = row_in_pages(v, p.v_stride, p, batch, n0 + j);
#endif
        const u32 hidden_j = __shfl_sync(~0u, hidden, j % 8 / 2, 4) >> (j / 8 * 4 + j % 2);
#pragma unroll 1
        for (int at = 0; at < VT * 2; at++) {
            const int column = at / 2 * 8 + quad + at % 2;
#if PAGED
            const float x = column >= p.head_dim_v ? 0.f : row != nullptr ? row[column * p.v_stride[3]] : not_a_number();
#else
            const float x = column < p.head_dim_v ? v[j * p.v_stride[2] + column * p.v_stride[3]] : 0.f;
#endif
            if (is_finite(x)) continue;
#pragma unroll
            for (int n = 0; n < VT * 4; n++) {
                // Its weight is above 0, however small: what is not finite stays what it is.
                if (n / 4 * 2 + n % 2 == at && (hidden_j >> n / 2 % 2 * 2 & 1) == 0) acc_o[n / 4][n % 4] += x;
            }
        }
    }
}

// Scores become p, and `weights` p times its key's power for v, split.
__device__ inline void weigh_values(
    const Weights<KT>& weights, float (&row_sum)[2], Accumulator<NT>& s, float c, const float (&exponent_max)[2], const float (&factor)[2],
    const float* v_downs
) {
    const int quad = lane_column(threadIdx.x % 128);
    u32 top[2] = {};
    float sum[2] = {};
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const float2 v_down = *(const float2*)(v_downs + nt * 8 + quad);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float& x = s[nt][e];
            x = exponential_of(x, c, exponent_max[e / 2]);
            sum[e / 2] += x;
            x *= e % 2 ? v_down.y : v_down.x;
            top[e / 2] = max(top[e / 2], __float_as_uint(x));
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) row_sum[h] = __fmaf_rn(row_sum[h], factor[h], sum[h]);
    split_weights(weights, s, top);
}

// By a warpgroup that multiplies:
//
//   for each block of keys
//     s = (q_hi @ k_hi + q_hi @ k_lo + q_lo @ k_hi) / powers;  scores, masks
//     row_max' = max(row_max, max s);  acc_o *= 2^((row_max - row_max')*c)
//     p = 2^((s - row_max')*c);  row_sum = row_sum * factor + sum p;  p times its key's power for v, split
//     acc_o += p_hi @ v_hi + p_hi @ v_lo + p_lo @ v_hi, summed by itself first
//
// Which warpgroup it is, its rows and their powers are computed again in each block of keys: kept, they
// would take registers that the sums need.
__device__ inline void multiply(bool careful, const Params& p, Shared& sh, Ring<STAGES>& ring, RowSums& sums) {
    const auto group = [] { return uniform(reread_tid() / 128) - 1; };
    const Place place = Place::here(p);
    const int lane = threadIdx.x % 128, quad = lane_column(lane);
    const int rows = min(BM, place.task.rows(p) - place.r0);
    const auto queries = [&] {
        const Place here = Place::here(p);
        return Queries{p, here.task, here.r0 + reread_tid() / 32 * 16 - 64};
    };
    load_queries(careful, p, sh, place, rows, group(), lane);
    bool q_odd[2] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (careful) q_odd[h] = sh.q_odd[group()][lane / 32] >> (lane % 32 / 4 + h * 8) & 1;
    }
    const float c = exponent_factor(p);
    sums.row_max[0] = sums.row_max[1] = negative_infinity(), sums.row_sum[0] = sums.row_sum[1] = 0;
    zero(sums.acc_o);

#pragma unroll 1
    for (int n0 = place.seen(p).lo / BN * BN;; n0 += BN) {
        Seen seen = Place::here(p).seen(p);
        if (n0 >= seen.hi) break;
        Accumulator<NT> s[1];
        MaskTile<1, NT> mask;
        const int wg = group();
        mask.fetch(p, queries(), n0);
        mbarrier_wait(sh.k_full[ring.at], ring.phase);
        multiply_halves<D>(s[0], sh.q[wg], sh.k[ring.at], wgmma_qk);
        wgmma_wait<0>(s[0]);
        const float* const first_down = sh.q_down[wg] + reread_tid() % 128 / 32 * 16 + lane_row(threadIdx.x);
        const float q_down[2] = {first_down[0], first_down[8]};
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float2 k_down = *(const float2*)(sh.k_down[ring.at] + nt * 8 + quad);
#pragma unroll
            for (int e = 0; e < 4; e++) s[0][nt][e] = s[0][nt][e] * q_down[e / 2] * (e % 2 ? k_down.y : k_down.x);
        }
        if (careful) recompute_scores(s[0], p, sh, ring, n0, q_odd, queries);
        mbarrier_arrive(sh.k_empty[ring.at]);
        if (!VECTOR) seen = Place::here(p).seen(p);  // again: registers are scarcer there
        const bool positions = n0 < seen.all_lo || n0 + BN > seen.all_hi;
        if (NATURAL || MASK != NO_MASK || positions) apply_scores<1, NT>(s, p, queries(), mask, n0, place.task.sequence.kv_len(p), positions);

        // The maximum is followed in every block of keys, by however little it rises, as in OnlineSoftmax at a slack of 0. Apart
        // from it because row_sum takes the factor in `weigh_values`, where that and the block's sum are rounded once.
        float factor[2], exponent_max[1][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = max_of_row(s[0], h, sums.row_max[h]);
            const float base = top == negative_infinity() ? 0.f : top;
            factor[h] = top == sums.row_max[h] ? 1.f : exp2_approx((sums.row_max[h] - base) * c);
            sums.row_max[h] = top;
        }
        if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
            rescale(sums.acc_o, factor, careful);
        }
        mbarrier_wait(sh.v_full[ring.at], ring.phase);
        if (careful) add_non_finite_values(sums.acc_o, s[0], p, sh, ring, n0);
        const float row_max[1][2] = {{sums.row_max[0], sums.row_max[1]}};
        subtract_far(s, row_max, exponent_max, c);
        // No members of Weights: the compiler would give them other registers (NVRTC 13.2).
        OperandA<KT> p_split[2];
        float down[2];
        const Weights<KT> weights{p_split, down};
        weigh_values(weights, sums.row_sum, s[0], c, exponent_max[0], factor, sh.v_down[ring.at]);
        u8(&v)[2][V_BOXES][BOX_BYTES] = sh.v[ring.at];
#if HEAD_DIM_V > 64
        add_box<0, 8>(sums.acc_o, weights, v[0][0], v[1][0], multiply_box);
        add_box<8, LAST / 8>(sums.acc_o, weights, v[0][1], v[1][1], multiply_last);
#else
        add_box<0, VT>(sums.acc_o, weights, v[0][0], v[1][0], wgmma_pv);
#endif
        mbarrier_arrive(sh.v_empty[ring.at]);
        ring.next();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) sums.row_sum[h] = sum_of_lanes<4>(sums.row_sum[h]);
}

__device__ inline void finish(const Params& p, const Place& place, const RowSums& sums) {
    const int lane = threadIdx.x % 32, first = place.r0 + (threadIdx.x / 32 - 4) * 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = first + lane / 4 + h * 8;
        if (r >= place.task.rows(p)) continue;
        const Row row(p, place.task, r);
        const float l = sums.row_sum[h];
        const RowEnd row_end(p, row, natural_max(p, sums.row_max[h]), l);
        if (lane % 4 == 0) store_lse(p, row, row_end);
        const i64 to = row.offset(p.out_stride);
#pragma unroll
        for (int nt = 0; nt < VT; nt++) {
            const int column = nt * 8 + lane_column(lane);
            const float* pair = &sums.acc_o[nt][h * 2];
            const float2 x = {row_end.normalise(l, pair[0]), row_end.normalise(l, pair[1])};
            if (p.out_vector) {
                if (column < p.head_dim_v) *(float2*)((float*)p.out + to + column) = x;
            } else {
                store_column(p, to, column, x.x), store_column(p, to, column + 1, x.y);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
#if VARLEN
    if (is_beyond(p, blockIdx.x)) return;
#endif
    if (threadIdx.x == 0) {
        for (int at = 0; at < STAGES; at++) {
            mbarrier_init(sh.k_full[at], 128), mbarrier_init(sh.v_full[at], 128);
            mbarrier_init(sh.k_empty[at], 256), mbarrier_init(sh.v_empty[at], 256);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    Ring<STAGES> ring;
    const int group = uniform(threadIdx.x / 128);
    if (group == 0 || group == 3) {
        setmaxnreg_dec<LOADING_REGISTERS>();
        const Place place = Place::here(p);
        const Seen seen = place.seen(p);
        for (int careful = 0; careful < 2; careful++) {
            if (group == 0) {
#if PAGED
                const Operand k{head_of(p.k, p.k_stride, p, place.task), p.k_stride, p.head_dim, place.task.batch};
#else
                const Operand k{head_of(p.k, p.k_stride, p, place.task), p.k_stride, p.head_dim};
#endif
                const Blocks<K_BOXES> blocks{sh.k, sh.k_down, sh.k_odd, sh.k_full, sh.k_empty};
                load_blocks(careful, p, place.task.sequence, seen, ring, k, blocks);
            } else {
#if PAGED
                const Operand v{head_of(p.v, p.v_stride, p, place.task), p.v_stride, p.head_dim_v, place.task.batch};
#else
                const Operand v{head_of(p.v, p.v_stride, p, place.task), p.v_stride, p.head_dim_v};
#endif
                const Blocks<V_BOXES> blocks{sh.v, sh.v_down, sh.v_odd, sh.v_full, sh.v_empty};
                load_blocks(careful, p, place.task.sequence, seen, ring, v, blocks);
            }
            if (!__syncthreads_or(0)) break;
        }
    } else {
        setmaxnreg_inc<MULTIPLYING_REGISTERS>();
        RowSums sums;
        multiply(false, p, sh, ring, sums);
        if (__syncthreads_or(sums.has_non_finite())) {
            multiply(true, p, sh, ring, sums);
            __syncthreads_or(0);
        }
        finish(p, Place::here(p), sums);
    }
}
