// The kernel that serves every problem: any dtype, head_dim and strides, on the ordinary arithmetic units.
//
//   for each tile of BM rows, each block of DVC value columns
//     for each block of BN keys (from key 0 in steps of BN, whatever the rows)
//       s = q.k over head_dim in steps of BK          both tiles through shared memory, d-major
//       s -> masked, row_max' = max(row_max, s), p = exp(s - row_max'), row_sum and acc_o rescaled
//       acc_o += p.v over keys in steps of VK
//
// 256 threads as 16x16; each holds 4x4 scores and 4x(DVC/16) sums. A row belongs to 16 neighbouring lanes, so its maximum
// needs shuffles only, and no operation crosses rows: its bits do not depend on the rows beside it.
// A masked p is -0. First it is simply multiplied; if a sum is not finite in the end, a value that nobody attends may have
// been NaN, and the tile runs once more with masked products left out. Finite sums have the same bits both ways.
// Deliberately absent: tensor cores, and speed beyond tiling.

#include "common/dropout.cuh"
#include "common/epilogue.cuh"
#include "common/pages.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"

constexpr int BM = 64, BN = 64, THREADS = 256;
constexpr int BK = STORAGE == F64 ? 16 : 32, VK = BK;
constexpr int DVC = DV_COLUMNS, COLS = DVC / 16;
constexpr int PAD = BM + 4;

struct Shared {
    Acc p[BN][PAD];
    union {
        struct {
            Acc q[BK][PAD], k[BK][PAD];
        };
        Acc v[VK][DVC];
    };
    i64 q_row[BM], mask_row[BM];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and generic.cu disagree on shared memory");

// Which rows, keys and columns of values a block computes.
struct Block {
    int task_index;
    Task task;
    int r0, rows, split, dv_block, column0;
    int first, end;  // keys: the first of its first tile, and the one behind its last
    __device__ explicit Block(const Params& p) : Block(p, blockIdx.x / p.dv_blocks) {}

#if VARLEN
    // Chunk after chunk.
    __device__ void go_to(const Params& p, int next) { set_keys(p, split = next); }

  private:
    __device__ Block(const Params& p, u32 unit) : Block(p, RowBlock<BM>(p, unit)) {}
    __device__ Block(const Params& p, const RowBlock<BM>& of)
        : task_index(0), task(of.task), r0(of.r0), rows(min(BM, task.rows(p) - r0)), split(0), dv_block(blockIdx.x % p.dv_blocks),
          column0(dv_block * DVC) {
        set_keys(p, 0);
    }
#else
  private:
    __device__ Block(const Params& p, u32 chunk) : Block(p, chunk, divide(chunk, p.by_num_splits)) {}
    __device__ Block(const Params& p, u32 chunk, u32 run)
        : task_index(divide(run, p.by_row_blocks)),
          task(p, task_index),
          // Late rows see the most keys under a causal mask: they go first.
          r0((p.row_blocks - 1 - (int)(run - task_index * p.row_blocks)) * BM),
          rows(min(BM, p.rows - r0)),
          split(chunk - run * p.num_splits),
          dv_block(blockIdx.x % p.dv_blocks),
          column0(dv_block * DVC) {
        set_keys(p, split);
    }
#endif
    __device__ void set_keys(const Params& p, int split) {
        const Seen seen(p, task, r0, r0 + rows);
        const int keys = task.sequence.chunk(p), kv_len = task.sequence.kv_len(p);
        first = max(seen.lo, split * keys) / BN * BN;
        end = min(seen.hi, keys == 0 ? kv_len : min(kv_len, (split + 1) * keys));
    }
};

// A thread's column of keys or values, the first of four; its others of values are 64 further on.
__device__ inline int thread_column() { return threadIdx.x % 16 * 4; }
__device__ inline int thread_row() { return threadIdx.x / 16 * 4; }
__device__ inline int value_column(int c) { return thread_column() + c % 4 + c / 4 * 64; }

// A thread's four rows: their queries and slopes.
struct OwnRows {
    int i[4];
    Acc slope[4];
    __device__ OwnRows(const Params& p, const Block& block) {
        for (int a = 0; a < 4; a++) {
            const Row row(p, block.task, block.r0 + min(thread_row() + a, block.rows - 1));
            i[a] = row.i;
            slope[a] = p.alibi == nullptr ? (Acc)0 : load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride);
        }
    }
    __device__ Acc apply_scores(
        Acc (&s)[4], const Params& p, const Shared& sh, const Block& block, int a, int n0, Acc row_max
    ) const;
};

// Their sums so far; row_sum is the thread's own share.
struct Sums {
    Acc acc_o[4][COLS], row_max[4], row_sum[4];

    __device__ void clear() {
#pragma unroll
        for (int a = 0; a < 4; a++) {
            row_max[a] = negative_infinity(), row_sum[a] = 0;
#pragma unroll
            for (int c = 0; c < COLS; c++) acc_o[a][c] = 0;
        }
    }
    __device__ bool has_non_finite() const {
        bool any = false;
#pragma unroll
        for (int a = 0; a < 4; a++)
#pragma unroll
            for (int c = 0; c < COLS; c++) any |= !is_finite(acc_o[a][c]);
        return any;
    }
    __device__ void add_keys(
        Acc (&s)[4][4], const Params& p, Shared& sh, const Block& block, const OwnRows& own, int n0, bool careful
    );
    __device__ void add_values(const Params& p, Shared& sh, const Block& block, int n0, bool careful);
};

// Elements d of row r of the queries and of key j, and element c of value j.
__device__ inline Acc query(const Params& p, const Shared& sh, const Block& block, int r, int d) {
#if CODES
    const Row row(p, block.task, block.r0 + r);
    return CodedRow(p.q_stride, p.q_codes, row.batch, row.head, row.batch, row.place()).number(p.q, p.q_stride[3], p.q_codes, d);
#else
    return widen(((const Elem*)p.q)[sh.q_row[r] + d * p.q_stride[3]]);
#endif
}
__device__ inline Acc key(const Params& p, const Block& block, int j, int d) {
    const KeyPlace at(p, block.task.batch, block.task.sequence.first_key() + j);
    if (!at.exists(p)) return not_a_number();
#if CODES
    const CodedRow row(p.k_stride, p.k_codes, block.task.batch, kv_head(p, block.task), at.block, at.row);
    return row.number(p.k, p.k_stride[3], p.k_codes, d);
#else
    const Elem* k = (const Elem*)p.k + at.block * p.k_stride[0] + kv_head(p, block.task) * p.k_stride[1];
    return widen(k[at.row * p.k_stride[2] + d * p.k_stride[3]]);
#endif
}
__device__ inline Acc value(const Params& p, const Block& block, int j, int c) {
    const KeyPlace at(p, block.task.batch, block.task.sequence.first_key() + j);
    if (!at.exists(p)) return not_a_number();
#if CODES
    const CodedRow row(p.v_stride, p.v_codes, block.task.batch, kv_head(p, block.task), at.block, at.row);
    return row.number(p.v, p.v_stride[3], p.v_codes, c);
#else
    const Elem* v = (const Elem*)p.v + at.block * p.v_stride[0] + kv_head(p, block.task) * p.v_stride[1];
    return widen(v[at.row * p.v_stride[2] + c * p.v_stride[3]]);
#endif
}

// Columns d0.. of the queries and of keys n0.. to shared memory, zero outside.
__device__ inline void load_queries_and_keys(const Params& p, Shared& sh, const Block& block, int n0, int d0) {
    for (int at = threadIdx.x; at < BM * BK; at += THREADS) {
        const int d = at % BK, r = at / BK;
        const bool inside = d0 + d < p.head_dim && r < block.rows;
        sh.q[d][r] = inside ? query(p, sh, block, r, d0 + d) : (Acc)0;
    }
    for (int at = threadIdx.x; at < BN * BK; at += THREADS) {
        const int d = at % BK, j = at / BK;
        const bool inside = d0 + d < p.head_dim && n0 + j < block.task.sequence.kv_len(p);
        sh.k[d][j] = inside ? key(p, block, n0 + j, d0 + d) : (Acc)0;
    }
}

// s += q.k of keys n0... Sums of 16 products, and of these: at head_dim 64 a running one is off by 2.4 times as much, sums of 32 by
// 1.6 (root mean square of 40 problems of N(0, 1), float32 by numpy, 2026-11).
__device__ inline void multiply_keys(Acc (&s)[4][4], const Params& p, Shared& sh, const Block& block, int n0) {
    for (int d0 = 0; d0 < p.head_dim; d0 += BK) {
        __syncthreads();
        load_queries_and_keys(p, sh, block, n0, d0);
        __syncthreads();
#pragma unroll
        for (int d1 = 0; d1 < BK; d1 += 16) {
            Acc part[4][4] = {};
#pragma unroll 8
            for (int d = d1; d < d1 + 16; d++) {
                Acc a[4], b[4];
#pragma unroll
                for (int c = 0; c < 4; c++) a[c] = sh.q[d][thread_row() + c], b[c] = sh.k[d][thread_column() + c];
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int c = 0; c < 4; c++) part[r][c] += a[r] * b[c];
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < 4; c++) s[r][c] += part[r][c];
        }
    }
}

// Products of row a and keys n0.. become scores; the answer is the greatest of them and row_max.
__device__ inline Acc OwnRows::apply_scores(
    Acc (&s)[4], const Params& p, const Shared& sh, const Block& block, int a, int n0, Acc row_max
) const {
    const Acc scale = (Acc)p.scale, cap = (Acc)p.softcap, inverse_cap = (Acc)p.inverse_softcap;
    const Sequence& of = block.task.sequence;
    const int lo = keys_lo(p, of, i[a]), hi = min(keys_hi(p, of, i[a]), block.end);
    const i64 mask_at = sh.mask_row[min(thread_row() + a, block.rows - 1)];
    Acc top = row_max;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int j = n0 + thread_column() + c;
        Acc bias = 0;
        bool masked = j < lo || j >= hi;
        if (MASK != NO_MASK && !masked) masked = is_masked(p, mask_at, j, bias);
        const Acc x = natural_score(p, s[c], scale, cap, inverse_cap, slope[a], i[a] + p.diagonal - of.lag(p) - j) + bias;
        s[c] = masked ? negative_infinity() : x;
        top = maximum(top, s[c]);
    }
    return max_of_lanes<16>(top);
}

// Products with keys n0.. become weights, in shared memory; row_max, row_sum and acc_o follow. Exponentials are those of e,
// exact to the last places, where common/softmax.cuh has ex2.approx: float64 has no such instruction, and p is not rounded here.
// A masked weight is -0.
__device__ inline void Sums::add_keys(
    Acc (&s)[4][4], const Params& p, Shared& sh, const Block& block, const OwnRows& own, int n0, bool careful
) {
#if DROPOUT
    const DroppingHead dropping(p.dropping, block.task.dropping_batch(), block.task.head);
    u32 kept = 0;
#endif
#pragma unroll
    for (int a = 0; a < 4; a++) {
        const Acc top = own.apply_scores(s[a], p, sh, block, a, n0, row_max[a]);
        const Acc factor = top == row_max[a] ? (Acc)1 : exponential(row_max[a] - top);
        row_max[a] = top;
        row_sum[a] *= factor;
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            Acc& sum = acc_o[a][c];
            sum = careful ? weighed(factor, sum) : product(factor, sum);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            Acc weight = s[a][c] == negative_infinity() ? -(Acc)0 : exponential(s[a][c] - top);
            row_sum[a] += weight;
#if DROPOUT
            // Rows of a block are of one head.
            if (c % 2 == 0) kept = dropping.keeps_pair(own.i[a], n0 + thread_column() + c);
            if ((kept >> c % 2 & 1) == 0 && weight > 0) weight = 0;
#endif
            sh.p[thread_column() + c][thread_row() + a] = weight;
        }
    }
}

// Columns of values j0.. to shared memory, zero outside.
__device__ inline void load_values(const Params& p, Shared& sh, const Block& block, int j0) {
    for (int at = threadIdx.x; at < VK * DVC; at += THREADS) {
        const int c = at % DVC, j = at / DVC;
        const bool inside = j0 + j < block.task.sequence.kv_len(p) && block.column0 + c < p.head_dim_v;
        sh.v[j][c] = inside ? value(p, block, j0 + j, block.column0 + c) : (Acc)0;
    }
}

// acc_o += p.v of keys n0... If `careful`, masked products are left out, and an attended infinity stays one under a weight of 0.
__device__ inline void Sums::add_values(const Params& p, Shared& sh, const Block& block, int n0, bool careful) {
    for (int j0 = 0; j0 < BN && n0 + j0 < block.end; j0 += VK) {
        __syncthreads();
        load_values(p, sh, block, n0 + j0);
        __syncthreads();
        Acc part[4][COLS] = {};
#pragma unroll 4
        for (int j = 0; j < VK; j++) {
            Acc w[4], x[COLS];
#pragma unroll
            for (int a = 0; a < 4; a++) w[a] = sh.p[j0 + j][thread_row() + a];
#pragma unroll
            for (int c = 0; c < COLS; c++) x[c] = sh.v[j][value_column(c)];
            if (!careful) {
#pragma unroll
                for (int a = 0; a < 4; a++)
#pragma unroll
                    for (int c = 0; c < COLS; c++) part[a][c] = fused(w[a], x[c], part[a][c]);
            } else {
#pragma unroll
                for (int a = 0; a < 4; a++)
#pragma unroll
                    for (int c = 0; c < COLS; c++)
                        if (!signbit(w[a])) part[a][c] = outweighs(w[a], x[c]) ? part[a][c] + x[c] : fused(w[a], x[c], part[a][c]);
            }
        }
#pragma unroll
        for (int a = 0; a < 4; a++)
#pragma unroll
            for (int c = 0; c < COLS; c++) acc_o[a][c] += part[a][c];
    }
}

// Rows of out and lse; or, where keys are split, sums for combine.cu. The threads of a row have its row_sum.
__device__ inline void store(const Params& p, const Block& block, const Sums& sums) {
    const bool is_first = block.dv_block == 0 && threadIdx.x % 16 == 0;
#pragma unroll
    for (int a = 0; a < 4; a++) {
        const Acc row_max = sums.row_max[a], row_sum = sums.row_sum[a];
        const int r = thread_row() + a;
        if (r >= block.rows) continue;
        const Row row(p, block.task, block.r0 + r);
        if (!VARLEN && block.task.sequence.num_splits(p) > 1) {
            Acc* to = partial(p, block.task_index, block.r0 + r, block.split);
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const int column = block.column0 + value_column(c);
                if (column < p.head_dim_v) to[column] = sums.acc_o[a][c];
            }
            if (is_first) to[p.head_dim_v] = row_max, to[p.head_dim_v + 1] = row_sum;
            continue;
        }
        const RowEnd row_end(p, row, row_max, row_sum);
        const i64 out_row = row.offset(p.out_stride);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            store_column(p, out_row, block.column0 + value_column(c), row_end.normalise(row_sum, sums.acc_o[a][c]));
        }
        if (is_first) store_lse(p, row, row_end);
    }
}

// The sums of a block's keys; row_sum is that of the row.
__device__ inline void attend(const Params& p, Shared& sh, const Block& block, const OwnRows& own, Sums& sums) {
    for (int careful = 0; careful < 2; careful++) {
        sums.clear();
        for (int n0 = block.first; n0 < block.end; n0 += BN) {
            Acc s[4][4] = {};
            multiply_keys(s, p, sh, block, n0);
            sums.add_keys(s, p, sh, block, own, n0, careful);
            sums.add_values(p, sh, block, n0, careful);
        }
        if (!__syncthreads_or(sums.has_non_finite())) break;
    }
#pragma unroll
    for (int a = 0; a < 4; a++) sums.row_sum[a] = sum_of_lanes<16>(sums.row_sum[a]);
}

#if VARLEN
// The sums of chunks before, and of one more: as combine.cu folds them.
__device__ inline void fold(Sums& sums, const Sums& next) {
#pragma unroll
    for (int a = 0; a < 4; a++) {
        const Fold of(sums.row_max[a], next.row_sum[a] == 0 ? negative_infinity() : next.row_max[a]);
        sums.row_sum[a] = of.add(sums.row_sum[a], next.row_sum[a]);
#pragma unroll
        for (int c = 0; c < COLS; c++) sums.acc_o[a][c] = of.add(sums.acc_o[a][c], next.acc_o[a][c]);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *(Shared*)memory;
#if VARLEN
    if (is_beyond(p, blockIdx.x / p.dv_blocks)) return;
    Block block(p);
#else
    const Block block(p);
#endif
    if (RAGGED && block.split >= block.task.sequence.num_splits(p)) return;
    if ((int)threadIdx.x < block.rows) {
        const Row row(p, block.task, block.r0 + threadIdx.x);
        sh.q_row[threadIdx.x] = row.offset(p.q_stride);
        sh.mask_row[threadIdx.x] = mask_row(p, row);
    }
    __syncthreads();
    const OwnRows own(p, block);
    Sums sums;
    attend(p, sh, block, own, sums);
#if VARLEN
    const int num_splits = block.task.sequence.num_splits(p);
    if (num_splits > 1) {
        Sums so_far;
        so_far.clear();
        fold(so_far, sums);
        for (int split = 1; split < num_splits; split++) {
            block.go_to(p, split);
            attend(p, sh, block, own, sums);
            fold(so_far, sums);
        }
        sums = so_far;
    }
#endif
    store(p, block, sums);
}
