// How far rows of attention on codes may be off, from what was measured of K and V: each query's sums, and what follows of them.
//
//   for each block of BLOCK_M rows that share a head of K and V, each chunk of its keys where they are split
//     for each block of BN keys
//       s = q.k;  row_max' = max(row_max, s), p = exp(s - row_max');  w = (p*a)^2
//       o = o*f + p.v;  g = g*f^2 + w.v                                f = exp(row_max - row_max')
//       sums of p, p*a and their like                                  deviation/row.cuh
//     the row's Deviation; or, where keys are split, its sums for deviation_end.cu
//
// 256 threads as 16x16; each has R rows, 4 keys of a block and COLS columns. Values are read DVC columns at a time: where they have more,
// scores are computed anew for each. A masked p is -0, and left out of the products of a tile that has a value that is not finite.
// Products are float32, as those that define the estimate are; out and lse are not touched. Deliberately absent: tensor cores, pages.

#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "deviation/row.cuh"

constexpr int BM = BLOCK_M, BN = 64, BK = 32, VK = 32, THREADS = 256;
constexpr int ROWS = BM / 16, DVC = 128, COLS = DVC / 16;
constexpr int PAD = BM + 4, K_PAD = BN + 4, V_PAD = DVC + 8;

struct Shared {
    float p[BN][PAD], w[BN][PAD];
    union {
        struct {
            float q[BK][PAD], k[BK][K_PAD];
        };
        float v[VK][V_PAD];
    };
    // Of the keys of a block.
    float a[BN], b[BN], r[BN], squares[BN];
    double sums[BM][SUMS];
    ColumnSums columns[BM];
    float most[BM][MOST + 1];
    float largest[2][THREADS / 32];
    i64 mask_row[BM];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and deviation.cu disagree on shared memory");

// Which rows and keys a block has.
struct Block {
    RowBlock<BM> of;
    int rows, split, first, end;  // keys: the first of its first tile, and the one behind its last; a chunk is whole tiles
    i64 matrix;
    __device__ explicit Block(const Params& p) : Block(p, divide(blockIdx.x, p.by_num_splits)) {}
    __device__ const Task& task() const { return of.task; }
    __device__ Row row(const Params& p, int r) const { return Row(p, of.task, of.r0 + min(r, rows - 1)); }

  private:
    __device__ Block(const Params& p, u32 run) : of(p, run) {
        rows = min(BM, p.rows - of.r0), split = blockIdx.x - run * p.num_splits;
        matrix = matrix_index(p, task().batch, task().head);
        const Seen seen(p, task(), of.r0, of.r0 + rows);
        first = max(seen.lo, split * p.chunk) / BN * BN;
        end = min(seen.hi, p.chunk == 0 ? p.kv_len : min(p.kv_len, (split + 1) * p.chunk));
    }
};

__device__ inline int thread_column() { return threadIdx.x % 16 * 4; }
__device__ inline int thread_row() { return threadIdx.x / 16 * ROWS; }
__device__ inline int value_column(int c) { return thread_column() + c % 4 + c / 4 * 64; }
// Of -0, which is no NaN of any sign.
__device__ inline bool is_masked_weight(float p) { return __float_as_uint(p) == 0x80000000u; }

// Elements d0.. of a row of `dim`, 0 behind it.
template <int N>
__device__ inline void load_run(float (&x)[N], const CodedRow& row, const void* base, i64 step, const Codes& codes, int d0, int dim) {
    const int n = min(N, dim - d0);
    if (n <= 0 || codes.kind == NUMBERS) {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = i < n ? widen(((const Elem*)base)[row.row + (d0 + i) * step]) : 0;
        return;
    }
    const int group = d0 / codes.chunk;
    if ((d0 + n - 1) / codes.chunk != group) {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = i < n ? row.number(base, step, codes, d0 + i) : 0;
        return;
    }
    // As CodedRow::number, with what all of them share.
    const bool packed = is_packed(codes.kind);
    const int along = codes.swizzled_tiles == 0 ? group : along_swizzled_row(group);
    const float scale = load_scale(codes.descale, codes.scale_dtype, row.descale + along * codes.descale_stride[3]);
    const float zero = codes.zero_point == nullptr ? 0 : codes.zero_point[row.zero_point + group * codes.zero_point_stride[3]];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int d = min(d0 + i, dim - 1);
        u32 code = ((const u8*)base)[row.row + (packed ? d / 2 : d) * step];
        if (packed) code = code >> d % 2 * 4 & 0xf;
        x[i] = i < n ? product(product(decode_code(codes.kind, code) - zero, scale), codes.global_scale) : 0;
    }
}

// Columns d0.. of the queries and of keys n0.. to shared memory.
__device__ inline void load_queries_and_keys(const Params& p, Shared& sh, const Block& block, int n0, int d0) {
    constexpr int RUN = BM * BK / THREADS;
    const int r = threadIdx.x % BM, q_column = threadIdx.x / BM * RUN;
    const i64 q_row = block.row(p, r).offset(p.q_stride);
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        const int d = d0 + q_column + i;
        sh.q[q_column + i][r] = d < p.head_dim && r < block.rows ? widen(((const Elem*)p.q)[q_row + d * p.q_stride[3]]) : 0;
    }
    constexpr int KEY_RUN = BN * BK / THREADS;
    const int j = threadIdx.x % BN, k_column = threadIdx.x / BN * KEY_RUN;
    float x[KEY_RUN] = {};
    if (n0 + j < p.kv_len) {
        const int batch = block.task().batch;
        const CodedRow row(p.k_stride, p.k_codes, batch, kv_head(p, block.task()), batch, n0 + j);
        load_run(x, row, p.k, p.k_stride[3], p.k_codes, d0 + k_column, p.head_dim);
    }
#pragma unroll
    for (int i = 0; i < KEY_RUN; i++) sh.k[k_column + i][j] = x[i];
}

// Columns c0.. of values j0.. to shared memory. Whether one of them is not finite.
__device__ inline bool load_values(const Params& p, Shared& sh, const Block& block, int j0, int c0) {
    const int j = threadIdx.x / 8, lane = threadIdx.x % 8 * 4, batch = block.task().batch;
    const CodedRow row(p.v_stride, p.v_codes, batch, kv_head(p, block.task()), batch, min(j0 + j, p.kv_len - 1));
    bool is_odd = false;
#pragma unroll
    for (int c = lane; c < DVC; c += 32) {
        float x[4] = {};
        if (j0 + j < p.kv_len) load_run(x, row, p.v, p.v_stride[3], p.v_codes, c0 + c, p.head_dim_v);
#pragma unroll
        for (int i = 0; i < 4; i++) is_odd |= !is_finite(x[i]), sh.v[j][c + i] = x[i];
    }
    return is_odd;
}

// The squares of a tile's values, to those of its keys.
__device__ inline void add_squares(Shared& sh, int j0) {
    const int j = threadIdx.x / 8, lane = threadIdx.x % 8;
    float sum = 0;
#pragma unroll
    for (int c = lane; c < DVC; c += 8) sum = fused(sh.v[j][c], sh.v[j][c], sum);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) sh.squares[j0 + j] += sum;
}

// s += q.k of keys n0.., in sums of 16 products as generic.cu has them.
__device__ inline void multiply_keys(float (&s)[ROWS][4], const Params& p, Shared& sh, const Block& block, int n0) {
    for (int d0 = 0; d0 < p.head_dim; d0 += BK) {
        __syncthreads();
        load_queries_and_keys(p, sh, block, n0, d0);
        __syncthreads();
#pragma unroll
        for (int d1 = 0; d1 < BK; d1 += 16) {
            float part[ROWS][4] = {};
#pragma unroll 8
            for (int d = d1; d < d1 + 16; d++) {
#pragma unroll
                for (int a = 0; a < ROWS; a++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        part[a][c] = fused(sh.q[d][thread_row() + a], sh.k[d][thread_column() + c], part[a][c]);
            }
#pragma unroll
            for (int a = 0; a < ROWS; a++)
#pragma unroll
                for (int c = 0; c < 4; c++) s[a][c] += part[a][c];
        }
    }
}

// A thread's rows: their sums by columns, and by how much the last block of keys made those before it smaller.
struct Sums {
    float o[ROWS][COLS], g[ROWS][COLS], row_max[ROWS], factor[ROWS];

    __device__ void clear() {
#pragma unroll
        for (int a = 0; a < ROWS; a++) {
            row_max[a] = negative_infinity();
#pragma unroll
            for (int c = 0; c < COLS; c++) o[a][c] = g[a][c] = 0;
        }
    }
    // Products with keys n0.. become weights, in shared memory.
    __device__ void add_keys(float (&s)[ROWS][4], const Params& p, Shared& sh, const Block& block, int n0) {
        const float scale = (float)p.scale, cap = (float)p.softcap, inverse_cap = (float)p.inverse_softcap;
#pragma unroll
        for (int a = 0; a < ROWS; a++) {
            const Row row = block.row(p, thread_row() + a);
            const float slope = p.alibi == nullptr ? 0 : load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride);
            const Sequence& of = block.task().sequence;
            const int lo = keys_lo(p, of, row.i), hi = min(keys_hi(p, of, row.i), block.end);
            const i64 mask_at = sh.mask_row[min(thread_row() + a, block.rows - 1)];
            float top = row_max[a];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int j = n0 + thread_column() + c;
                float bias = 0;
                bool masked = j < lo || j >= hi;
                if (MASK != NO_MASK && !masked) masked = is_masked(p, mask_at, j, bias);
                const float x = natural_score(p, s[a][c], scale, cap, inverse_cap, slope, row.i + p.diagonal - j) + bias;
                s[a][c] = masked ? negative_infinity() : x;
                top = maximum(top, s[a][c]);
            }
            top = max_of_lanes<16>(top);
            factor[a] = top == row_max[a] ? 1 : exponential(row_max[a] - top);
            row_max[a] = top;
#pragma unroll
            for (int c = 0; c < COLS; c++) o[a][c] *= factor[a], g[a][c] *= factor[a] * factor[a];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int j = thread_column() + c;
                const bool masked = s[a][c] == negative_infinity();
                const float weight = exponential(s[a][c] - top), error = weight * sh.a[j];
                sh.p[j][thread_row() + a] = masked ? -0.f : weight;
                sh.w[j][thread_row() + a] = masked ? -0.f : error * error;
            }
        }
    }
    // o += p.v and g += w.v of a tile of values j0..; CAREFUL: masked products are left out.
    template <bool CAREFUL>
    __device__ void add_values(const Shared& sh, int j0) {
        float part_o[ROWS][COLS] = {}, part_g[ROWS][COLS] = {};
#pragma unroll 2
        for (int j = 0; j < VK; j++) {
            float x[COLS];
#pragma unroll
            for (int c = 0; c < COLS; c++) x[c] = sh.v[j][value_column(c)];
#pragma unroll
            for (int a = 0; a < ROWS; a++) {
                const float p = sh.p[j0 + j][thread_row() + a], w = sh.w[j0 + j][thread_row() + a];
                if (CAREFUL && is_masked_weight(p)) continue;
#pragma unroll
                for (int c = 0; c < COLS; c++) part_o[a][c] = fused(p, x[c], part_o[a][c]), part_g[a][c] = fused(w, x[c], part_g[a][c]);
            }
        }
#pragma unroll
        for (int a = 0; a < ROWS; a++)
#pragma unroll
            for (int c = 0; c < COLS; c++) o[a][c] += part_o[a][c], g[a][c] += part_g[a][c];
    }
    // What a block of keys adds to the sums of rows.
    __device__ void weigh(Shared& sh, bool is_measured) const {
        const int lane = threadIdx.x % 16;
#pragma unroll
        for (int a = 0; a < ROWS; a++) {
            const int r = thread_row() + a;
            float add[SUMS] = {}, most[MOST] = {};
#pragma unroll
            for (int j = lane; j < BN; j += 16) {
                const float p = sh.p[j][r], w = sh.w[j][r];
                if (is_masked_weight(p)) continue;
                const float size = sqrtf(sh.squares[j]);
                // Rounded up where it bounds something.
                const float of_key = sh.a[j], of_value = sh.b[j], far = is_measured ? sh.r[j] : size * 1.00001f;
                const float pa = p * of_key, pb = p * of_value, pv = p * size;
                add[P] += p, add[PA] += pa, add[PAR] += pa * far, add[PB] += pb, add[PV] += pv;
                add[PB2] += pb * pb, add[W] += w, add[WV] += w * sh.squares[j], add[PV2] += pv * pv;
                most[A] = larger(of_key, most[A]), most[B] = larger(of_value, most[B]), most[R] = larger(far, most[R]);
            }
#pragma unroll
            for (int n = 0; n < SUMS; n++) add[n] = sum_of_lanes<16>(add[n]);
#pragma unroll
            for (int n = 0; n < MOST; n++)
#pragma unroll
                for (int step = 1; step < 16; step *= 2) most[n] = larger(__shfl_xor_sync(~0u, most[n], step), most[n]);
            // A lane for each.
#pragma unroll
            for (int n = 0; n < SUMS; n++) {
                if (lane != n) continue;
                const double by = factor[a];
                sh.sums[r][n] = sh.sums[r][n] * (n < SQUARES ? by : by * by) + add[n];
            }
#pragma unroll
            for (int n = 0; n < MOST; n++) {
                if (lane == SUMS + n) sh.most[r][n] = larger(most[n], sh.most[r][n]);
            }
        }
    }
};
static_assert(SUMS + MOST <= 16, "a row has 16 lanes");

// The largest errors of K and V of the block's head; all threads have them.
__device__ inline void find_largest(float (&largest)[2], const DeviationParams& of, Shared& sh, i64 matrix) {
    float mine[2] = {largest_of(of.k, matrix, threadIdx.x, THREADS), largest_of(of.v, matrix, threadIdx.x, THREADS)};
#pragma unroll
    for (int n = 0; n < 2; n++) {
        mine[n] = max_of_lanes<32>(mine[n]);
        if (threadIdx.x % 32 == 0) sh.largest[n][threadIdx.x / 32] = mine[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float most = 0;
        for (int warp = 0; warp < THREADS / 32; warp++) most = fmaxf(most, sh.largest[n][warp]);
        largest[n] = most > 0 ? most : 1;
    }
}

// Errors of keys n0.., the first two over their largest.
__device__ inline void load_errors(const DeviationParams& of, Shared& sh, const float (&largest)[2], i64 matrix, int n0) {
    if (threadIdx.x >= BN) return;
    const int n = threadIdx.x, j = n0 + n;
    const bool inside = j < of.all.kv_len;
    sh.a[n] = inside && of.k.numbers != nullptr ? of.k.error(matrix)[j] / largest[0] : 0;
    sh.b[n] = inside && of.v.numbers != nullptr ? of.v.error(matrix)[j] / largest[1] : 0;
    sh.r[n] = inside && of.v.numbers != nullptr ? of.v.spread(matrix)[j] : 0;
    sh.squares[n] = 0;
}

// The rows' Deviation, or what deviation_end.cu makes it of.
__device__ inline void store(const DeviationParams& of, const Shared& sh, const Block& block, const Sums& sums, const float (&largest)[2]) {
    const Params& p = of.all;
    const int lane = threadIdx.x % 16;
#pragma unroll
    for (int a = 0; a < ROWS; a++) {
        const int r = thread_row() + a;
        const bool is_row = r < block.rows;
        const Row row = block.row(p, r);
        if (p.num_splits > 1) {
            if (!is_row) continue;
            PartialRow& to = partial_row(of, row_index(p, row), block.split);
#pragma unroll
            for (int n = 0; n < SUMS; n++)
                if (lane == n) to.sums[n] = sh.sums[r][n];
#pragma unroll
            for (int n = 0; n < MOST; n++)
                if (lane == SUMS + n) to.most[n] = sh.most[r][n];
            if (lane == SUMS + MOST) to.row_max = sums.row_max[a];
            continue;
        }
        // Lanes of a warp stay together.
        ColumnSums columns = sh.columns[min(r, BM - 1)];
        ColumnSums of_query;
        const i64 at = row.offset(p.q_stride);
        for (int d = lane; d < p.head_dim; d += 16) {
            const float share = of.k.numbers == nullptr ? 0 : of.k.share(block.matrix)[d];
            of_query.add_query(widen(((const Elem*)p.q)[at + d * p.q_stride[3]]), share);
        }
        of_query.over_lanes<16>();
        columns.q = of_query.q, columns.q_shares = of_query.q_shares;
        if (!is_row || lane != 0) continue;
        const double factor = row_factor(p, row.head, sh.sums[r][P], sums.row_max[a]);
        const float most[MOST] = {sh.most[r][A], sh.most[r][B], sh.most[r][R]};
        of.rows[row_index(p, row)] = deviation_of(of, {block.matrix, factor, sh.sums[r], most, largest}, columns);
    }
}

// Columns c0.. of the rows, all keys seen: added up for the row, or left to deviation_end.cu.
__device__ inline void end_columns(const DeviationParams& of, Shared& sh, const Block& block, const Sums& sums, int c0) {
    const Params& p = of.all;
#pragma unroll
    for (int a = 0; a < ROWS; a++) {
        const int r = thread_row() + a;
        const Row row = block.row(p, r);
        const double factor = row_factor(p, row.head, sh.sums[r][P], sums.row_max[a]);
        ColumnSums columns;
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            const int column = c0 + value_column(c);
            if (column >= p.head_dim_v) continue;
            if (p.num_splits > 1) {
                if (r >= block.rows) continue;
                float* to = partial_row(of, row_index(p, row), block.split).columns();
                to[column] = sums.o[a][c], to[p.head_dim_v + column] = sums.g[a][c];
            } else {
                columns.add(sums.o[a][c], sums.g[a][c], factor, of.v.numbers == nullptr ? 0 : of.v.mean(block.matrix)[column]);
            }
        }
        if (p.num_splits > 1) continue;
        columns.over_lanes<16>();
        if (threadIdx.x % 16 != 0) continue;
        ColumnSums& to = sh.columns[r];
        to.along += columns.along, to.squares += columns.squares, to.from_mean += columns.from_mean, to.mean += columns.mean;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) deviation(const __grid_constant__ DeviationParams of) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const Params& p = of.all;
    const Block block(p);
    if ((int)threadIdx.x < BM) {
        sh.mask_row[threadIdx.x] = mask_row(p, block.row(p, threadIdx.x));
        for (int n = 0; n < SUMS; n++) sh.sums[threadIdx.x][n] = 0;
        for (int n = 0; n < MOST; n++) sh.most[threadIdx.x][n] = 0;
        sh.columns[threadIdx.x] = ColumnSums();
    }
    float largest[2];
    find_largest(largest, of, sh, block.matrix);
    Sums sums;
    for (int c0 = 0; c0 < p.head_dim_v; c0 += DVC) {
        sums.clear();
        for (int n0 = block.first; n0 < block.end; n0 += BN) {
            __syncthreads();
            load_errors(of, sh, largest, block.matrix, n0);
            float s[ROWS][4] = {};
            multiply_keys(s, p, sh, block, n0);
            sums.add_keys(s, p, sh, block, n0);
            for (int j0 = 0; j0 < BN && n0 + j0 < block.end; j0 += VK) {
                // Lengths of values are those of all columns.
                for (int c = c0 == 0 ? 0 : c0; c < (c0 == 0 ? p.head_dim_v : c0 + 1); c += DVC) {
                    __syncthreads();
                    const bool careful = __syncthreads_or(load_values(p, sh, block, n0 + j0, c));
                    if (c0 == 0) add_squares(sh, j0);
                    if (c != c0) continue;
                    if (careful) sums.add_values<true>(sh, j0);
                    else sums.add_values<false>(sh, j0);
                }
            }
            if (c0 == 0) {
                __syncthreads();
                sums.weigh(sh, of.v.numbers != nullptr);
            }
        }
        __syncthreads();
        end_columns(of, sh, block, sums, c0);
    }
    __syncthreads();
    store(of, sh, block, sums, largest);
}
