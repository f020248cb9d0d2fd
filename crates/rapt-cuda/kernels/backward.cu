// Gradients of every request: any dtype, head dims and strides, on the ordinary arithmetic units.
//
//   PASS KEYS      64 keys, and of all queries that see them, of all heads of the group:    dv += p.d_o, or dk += ds.q
//   PASS QUERIES   64 queries, and of all keys that they see:                               dq += ds.k
//   PASS MASK      64 queries and 64 keys of a mask, and of all that it is broadcast to:    d_mask += ds
//
//   for each tile of 64 streamed rows, from row 0 in steps of 64:
//     s = q.k, dp = d_o.v over head dims in steps of BK         both tiles through shared memory, d-major
//     s, dp -> weights in shared memory                         backward/request.cuh
//     sums += weights.x over streamed rows in steps of BK       CHUNK columns of one gradient
//
// 256 threads as 16x16; each holds 4x4 scores and 4x(CHUNK/16) sums. A block has its rows and columns of one gradient alone, and adds in one
// order: bits depend neither on other blocks nor on strides. A masked weight is -0. First it is simply multiplied; if a sum is not finite in the
// end, what nobody attends may have been NaN, and the block runs once more with masked products left out. Rows that attend nothing are zeros.
// Deliberately absent: tensor cores (backward_mma.cu), and speed beyond tiling.

#include "backward/mask_tile.cuh"
#include "backward/sequences.cuh"
#include "common/softmax.cuh"

#define KEYS 1
#define QUERIES 2
constexpr int TILE = 64, THREADS = 256, BK = STORAGE == F64 ? 16 : 32;
constexpr int CHUNK = DV_COLUMNS, COLS = CHUNK / 16, PAD = TILE + 4;

// A query of a tile.
struct Query {
    i64 mask_row;
    Acc top, delta, inverse_sum, slope;
    // The keys lo..hi that it sees by its position, none of a row that attends nothing; diagonal: the key of slope 0.
    int i, lo, hi, diagonal;
};

struct Shared {
    Acc w[TILE][PAD];  // streamed row, own row
    union {
        struct {
            Acc own[BK][PAD], streamed[BK][PAD];
        };
        Acc x[BK][CHUNK];
    };
    Query queries[TILE];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and backward.cu disagree on shared memory");

__device__ inline int thread_streamed() { return threadIdx.x % 16 * 4; }
__device__ inline int thread_own() { return threadIdx.x / 16 * 4; }
__device__ inline int sum_column(int c) { return thread_streamed() + c % 4 + c / 4 * 64; }

// Rows of q, k, v or d_o; those of queries that attend nothing are zeros.
struct Source {
    const void* base;
    int dtype;
    i64 row_step, step;
    int rows, dim;
    const Query* queries;
    __device__ Acc at(int r, int d) const {
        if (r >= rows || d >= dim || (queries != nullptr && queries[r].hi == 0)) return 0;
        return load_as(base, dtype, r * row_step + d * step);
    }
};

// What both tiles of a block's pairs are.
struct Place {
    int batch, head, kv_head;
    Sequence of;
    int i0, j0;  // the first query and key
};
// The row of a tensor of `dtype` that lies `offset` elements behind its first.
__device__ inline const void* row_at(const void* base, int dtype, i64 offset) {
    return (const u8*)base + offset * (dtype == F64 ? 8 : dtype == F32 ? 4 : 2);
}
__device__ inline Source queries_of(const BackwardParams& b, const Shared& sh, const Place& at) {
    const Params& p = b.all;
    const void* first = row_at(p.q, STORAGE, row_offset(p.q_stride, at.batch, at.head, at.of.first_query() + at.i0));
    return {first, STORAGE, p.q_stride[2], p.q_stride[3], at.of.q_len(p) - at.i0, p.head_dim, sh.queries};
}
__device__ inline Source arriving_of(const BackwardParams& b, const Shared& sh, const Place& at) {
    const Params& p = b.all;
    const void* first = row_at(b.d_o, p.out_dtype, row_offset(b.d_o_stride, at.batch, at.head, at.of.first_query() + at.i0));
    return {first, p.out_dtype, b.d_o_stride[2], b.d_o_stride[3], at.of.q_len(p) - at.i0, p.head_dim_v, sh.queries};
}
__device__ inline Source keys_of(const BackwardParams& b, const Place& at) {
    const Params& p = b.all;
    const void* first = row_at(p.k, STORAGE, row_offset(p.k_stride, at.batch, at.kv_head, at.of.first_key() + at.j0));
    return {first, STORAGE, p.k_stride[2], p.k_stride[3], at.of.kv_len(p) - at.j0, p.head_dim, nullptr};
}
__device__ inline Source values_of(const BackwardParams& b, const Place& at) {
    const Params& p = b.all;
    const void* first = row_at(p.v, STORAGE, row_offset(p.v_stride, at.batch, at.kv_head, at.of.first_key() + at.j0));
    return {first, STORAGE, p.v_stride[2], p.v_stride[3], at.of.kv_len(p) - at.j0, p.head_dim_v, nullptr};
}

// The queries of a tile to shared memory.
__device__ inline void load_queries(const BackwardParams& b, Shared& sh, const Place& at) {
    const Params& p = b.all;
    __syncthreads();
    if (threadIdx.x < TILE) {
        Query of = {0, 0, 0, 1, 0, at.i0 + (int)threadIdx.x, 0, 0, 0};
        if (of.i < at.of.q_len(p)) {
            const RowState state = b.states[state_index(p, at.batch, at.head, at.of.first_query() + of.i)];
            of.mask_row = mask_row(p, Row(p, Task(at.batch, at.head, at.of), of.i)), of.slope = slope_of(p, at.head);
            of.top = state.top, of.delta = state.delta, of.inverse_sum = state.inverse_sum;
            of.diagonal = of.i + p.diagonal - at.of.lag(p);
            if (!is_dead(state)) of.lo = keys_lo(p, at.of, of.i), of.hi = keys_hi(p, at.of, of.i);
        }
        sh.queries[threadIdx.x] = of;
    }
    __syncthreads();
}

// s += own.streamed over a head dim, in sums of 16 products and of these, as generic.cu.
__device__ inline void multiply(Acc (&s)[4][4], Shared& sh, const Source& own, const Source& streamed) {
    for (int d0 = 0; d0 < own.dim; d0 += BK) {
        __syncthreads();
        for (int at = threadIdx.x; at < TILE * BK; at += THREADS) {
            const int d = at % BK, r = at / BK;
            sh.own[d][r] = own.at(r, d0 + d), sh.streamed[d][r] = streamed.at(r, d0 + d);
        }
        __syncthreads();
#pragma unroll
        for (int d1 = 0; d1 < BK; d1 += 16) {
            Acc part[4][4] = {};
#pragma unroll 8
            for (int d = d1; d < d1 + 16; d++) {
                Acc a[4], c[4];
#pragma unroll
                for (int n = 0; n < 4; n++) a[n] = sh.own[d][thread_own() + n], c[n] = sh.streamed[d][thread_streamed() + n];
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int n = 0; n < 4; n++) part[r][n] = fused(a[r], c[n], part[r][n]);
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int n = 0; n < 4; n++) s[r][n] += part[r][n];
        }
    }
}

// Products of a query and a key, and of what arrives and the value, become a weight: p, or ds with or without what softcap makes of it.
enum class Weight { P, DS, DX };
template <Weight WEIGHT>
__device__ inline Acc weight_of(const Params& p, const Query& query, int j, Acc x, Acc dp, bool kept) {
    Acc bias = 0;
    bool masked = j < query.lo || j >= query.hi;
    if (MASK != NO_MASK && !masked) masked = is_masked(p, query.mask_row, j, bias);
    if (masked) return MASKED;
    const Score score(p, x, query.slope, query.diagonal - j, bias);
    const Acc weight = product(exponential(score.s - query.top), query.inverse_sum);
    const Acc m = kept ? (Acc)p.dropping.scale : (Acc)0;
    if (WEIGHT == Weight::P) return DROPOUT ? product(weight, m) : weight;
    const Acc ds = product(weight, (DROPOUT ? product(dp, m) : dp) - query.delta);
    return (WEIGHT == Weight::DX ? product(ds, score.rises) : ds) + (Acc)0;
}

// Weights of a tile's pairs, own rows by streamed ones.
template <Weight WEIGHT>
__device__ inline void weigh(Acc (&w)[4][4], const BackwardParams& b, Shared& sh, const Place& at) {
    const Source q = queries_of(b, sh, at), k = keys_of(b, at), d_o = arriving_of(b, sh, at), v = values_of(b, at);
    Acc dp[4][4] = {};
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) w[r][c] = 0;
    multiply(w, sh, PASS == KEYS ? k : q, PASS == KEYS ? q : k);
    if (WEIGHT != Weight::P) multiply(dp, sh, PASS == KEYS ? v : d_o, PASS == KEYS ? d_o : v);
#if DROPOUT
    const Task task(at.batch, at.head, at.of);
    const DroppingHead dropping(b.all.dropping, task.dropping_batch(), task.head);
#endif
    // Of each query, whether the key and the one behind it are kept.
    u32 kept[4];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int own = thread_own() + r, streamed = thread_streamed() + c;
            const Query& query = sh.queries[PASS == KEYS ? streamed : own];
            const int j = at.j0 + (PASS == KEYS ? own : streamed), key = PASS == KEYS ? r : c;
            u32& of_query = kept[PASS == KEYS ? c : r];
#if DROPOUT
            if (key % 2 == 0) of_query = dropping.keeps_pair(query.i, j);
#else
            of_query = 3;
#endif
            w[r][c] = weight_of<WEIGHT>(b.all, query, j, w[r][c], dp[r][c], of_query >> key % 2 & 1);
        }
}

// A block's own rows and columns of one gradient.
struct Sums {
    Acc of[4][COLS];

    __device__ void clear() {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < COLS; c++) of[r][c] = 0;
    }
    __device__ bool has_non_finite() const {
        bool any = false;
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < COLS; c++) any |= !is_finite(of[r][c]);
        return any;
    }
    // of += w.x of a tile; `careful`: masked products are left out.
    template <Weight WEIGHT>
    __device__ void add(const BackwardParams& b, Shared& sh, const Place& at, const Source& x, int column0, bool careful) {
        Acc w[4][4];
        weigh<WEIGHT>(w, b, sh, at);
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) sh.w[thread_streamed() + c][thread_own() + r] = w[r][c];
        for (int first = 0; first < TILE && first < x.rows; first += BK) {
            __syncthreads();
            for (int n = threadIdx.x; n < BK * CHUNK; n += THREADS) sh.x[n / CHUNK][n % CHUNK] = x.at(first + n / CHUNK, column0 + n % CHUNK);
            __syncthreads();
            Acc part[4][COLS] = {};
#pragma unroll 4
            for (int s = 0; s < BK; s++) {
                Acc weight[4], row[COLS];
#pragma unroll
                for (int r = 0; r < 4; r++) weight[r] = sh.w[first + s][thread_own() + r];
#pragma unroll
                for (int c = 0; c < COLS; c++) row[c] = sh.x[s][sum_column(c)];
#pragma unroll
                for (int r = 0; r < 4; r++)
                    if (!careful || !is_masked_weight(weight[r])) {
#pragma unroll
                        for (int c = 0; c < COLS; c++) part[r][c] = fused(weight[r], row[c], part[r][c]);
                    }
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < COLS; c++) of[r][c] += part[r][c];
        }
    }
    __device__ void store(void* to, const i64 (&stride)[4], i64 first_row, int rows, int column0, int dim, Acc factor) const {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const int row = thread_own() + r, column = column0 + sum_column(c);
                if (row < rows && column < dim) store_as(to, STORAGE, first_row + row * stride[2] + column * stride[3], of[r][c] * factor);
            }
    }
};

#if PASS == KEYS
// dv of weights P, else dk.
template <Weight WEIGHT>
__device__ inline void sum_keys(const BackwardParams& b, Shared& sh, Place at, int column0) {
    const Params& p = b.all;
    const int rows = min(TILE, at.of.kv_len(p) - at.j0), row = at.of.first_key() + at.j0;
    const Seeing seeing(p, at.of, at.j0, at.j0 + rows);
    Sums sums;
    for (int careful = 0; careful < 2; careful++) {
        sums.clear();
        for (int of_group = 0; of_group < p.group; of_group++) {
            at.head = at.kv_head * p.group + of_group;
            for (at.i0 = seeing.lo / TILE * TILE; at.i0 < seeing.hi; at.i0 += TILE) {
                load_queries(b, sh, at);
                sums.add<WEIGHT>(b, sh, at, WEIGHT == Weight::P ? arriving_of(b, sh, at) : queries_of(b, sh, at), column0, careful);
            }
        }
        if (!__syncthreads_or(sums.has_non_finite())) break;
    }
    if (WEIGHT == Weight::P) {
        sums.store(b.dv, b.dv_stride, row_offset(b.dv_stride, at.batch, at.kv_head, row), rows, column0, p.head_dim_v, 1);
    } else {
        sums.store(b.dk, b.dk_stride, row_offset(b.dk_stride, at.batch, at.kv_head, row), rows, column0, p.head_dim, (Acc)p.scale);
    }
}

__device__ inline void run(const BackwardParams& b, Shared& sh) {
    const int of_dk = b.dk == nullptr ? 0 : (b.all.head_dim + CHUNK - 1) / CHUNK;
    const int of_dv = b.dv == nullptr ? 0 : (b.all.head_dim_v + CHUNK - 1) / CHUNK;
    const int unit = blockIdx.x / (of_dk + of_dv), target = blockIdx.x - unit * (of_dk + of_dv), head = unit / b.units;
    const OwnRows<TILE, true> own(b, head / b.kv_heads, unit - head * b.units);
    if (VARLEN && own.rows <= 0) return;
    const Place at = {head / b.kv_heads, 0, head % b.kv_heads, own.sequence, 0, own.first};
    if (target < of_dk) sum_keys<Weight::DX>(b, sh, at, target * CHUNK);
    else sum_keys<Weight::P>(b, sh, at, (target - of_dk) * CHUNK);
}
#elif PASS == QUERIES
__device__ inline void run(const BackwardParams& b, Shared& sh) {
    const Params& p = b.all;
    const int chunks = (p.head_dim + CHUNK - 1) / CHUNK, unit = blockIdx.x / chunks, column0 = (blockIdx.x - unit * chunks) * CHUNK;
    const int head = unit / b.units % p.heads, batch = unit / b.units / p.heads;
    // Late rows see the most keys under a causal mask: they go first.
    const OwnRows<TILE, false> own(b, batch, b.units - 1 - unit % b.units);
    if (VARLEN && own.rows <= 0) return;
    Place at = {batch, head, (int)divide(head, p.by_group), own.sequence, own.first, 0};
    const Seen seen(p, Task(batch, head, at.of), at.i0, at.i0 + own.rows);
    load_queries(b, sh, at);
    Sums sums;
    for (int careful = 0; careful < 2; careful++) {
        sums.clear();
        for (at.j0 = seen.lo / TILE * TILE; at.j0 < seen.hi; at.j0 += TILE) sums.add<Weight::DX>(b, sh, at, keys_of(b, at), column0, careful);
        if (!__syncthreads_or(sums.has_non_finite())) break;
    }
    sums.store(b.dq, b.dq_stride, row_offset(b.dq_stride, batch, head, at.of.first_query() + at.i0), own.rows, column0, p.head_dim, (Acc)p.scale);
}
#else
__device__ inline void run(const BackwardParams& b, Shared& sh) {
    const Params& p = b.all;
    const SummedTile<TILE, TILE> tile(b, blockIdx.x);
    Acc sums[4][4] = {};
    Place at = {0, 0, 0, Sequence(p, 0), 0, 0};
    for (u32 n = tile.first; n < tile.end; n++) {
        const auto of = tile.at(n);
        at.batch = of.batch, at.head = of.head, at.kv_head = divide(of.head, p.by_group), at.i0 = of.query * TILE;
        const Seen seen(p, Task(at.batch, at.head, Sequence(p, at.batch)), at.i0, min(at.i0 + TILE, p.q_len));
        load_queries(b, sh, at);
        for (int key = tile.key; key < tile.key_end; key++) {
            at.j0 = key * TILE;
            if (at.j0 + TILE <= seen.lo || at.j0 >= seen.hi) continue;
            Acc ds[4][4];
            weigh<Weight::DS>(ds, b, sh, at);
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < 4; c++) sums[r][c] += ds[r][c];
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) sh.w[thread_streamed() + c][thread_own() + r] = sums[r][c];
    __syncthreads();
    tile.store<THREADS>(b, [&](int row, int key) { return sh.w[key][row]; });
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ BackwardParams b) {
    extern __shared__ __align__(128) u8 memory[];
    run(b, *(Shared*)memory);
}
