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

#include "common/scores.cuh"
#include "common/epilogue.cuh"
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

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const int tid = threadIdx.x, tx = tid % 16, ty = tid / 16;
    u32 block = blockIdx.x;
    const int dv_block = block % p.dv_blocks;
    block /= p.dv_blocks;
    const u32 after = divide(block, p.by_num_splits);
    const int split = block - after * p.num_splits;
    block = after;
    // Late rows see the most keys under a causal mask: they go first.
    const int task_index = divide(block, p.by_row_blocks);
    const int r0 = (p.row_blocks - 1 - (int)(block - task_index * p.row_blocks)) * BM;
    const Task task(p, task_index);
    const int rows = min(BM, p.rows - r0);
    const int column0 = dv_block * DVC;

    const Elem* q = (const Elem*)p.q;
    const Elem* k = (const Elem*)p.k + task.batch * p.k_stride[0] + kv_head(p, task) * p.k_stride[1];
    const Elem* v = (const Elem*)p.v + task.batch * p.v_stride[0] + kv_head(p, task) * p.v_stride[1];
    if (tid < rows) {
        Row row(p, task, r0 + tid);
        sh.q_row[tid] = row.offset(p.q_stride);
        sh.mask_row[tid] = mask_row(p, row);
    }
    __syncthreads();

    const Seen seen(p, task, r0, r0 + rows);
    const int first = max(seen.lo, split * p.chunk) / BN * BN;
    const int end = min(seen.hi, p.chunk == 0 ? p.kv_len : min(p.kv_len, (split + 1) * p.chunk));
    int i[4];
    Acc slope[4];
    for (int a = 0; a < 4; a++) {
        Row row(p, task, r0 + min(ty * 4 + a, rows - 1));
        i[a] = row.i;
        slope[a] = p.alibi == nullptr ? (Acc)0 : load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride);
    }
    const Acc scale = (Acc)p.scale, cap = (Acc)p.softcap, inverse_cap = (Acc)p.inverse_softcap;

    Acc acc_o[4][COLS], row_max[4], row_sum[4];
    for (int careful = 0; careful < 2; careful++) {
#pragma unroll
        for (int a = 0; a < 4; a++) {
            row_max[a] = negative_infinity(), row_sum[a] = 0;
#pragma unroll
            for (int c = 0; c < COLS; c++) acc_o[a][c] = 0;
        }
        for (int n0 = first; n0 < end; n0 += BN) {
            Acc s[4][4] = {};
            // Sums of 16 products, and of these: at head_dim 64 a running one is off by 2.4 times as much, sums of 32 by 1.6 (root
            // mean square of 40 problems of N(0, 1), float32 by numpy, 2026-11).
            for (int d0 = 0; d0 < p.head_dim; d0 += BK) {
                __syncthreads();
                for (int at = tid; at < BM * BK; at += THREADS) {
                    int d = at % BK, r = at / BK;
                    bool inside = d0 + d < p.head_dim;
                    sh.q[d][r] = inside && r < rows ? widen(q[sh.q_row[r] + (d0 + d) * p.q_stride[3]]) : (Acc)0;
                }
                for (int at = tid; at < BN * BK; at += THREADS) {
                    int d = at % BK, j = at / BK;
                    bool inside = d0 + d < p.head_dim && n0 + j < p.kv_len;
                    sh.k[d][j] =
                        inside ? widen(k[(n0 + j) * p.k_stride[2] + (d0 + d) * p.k_stride[3]]) : (Acc)0;
                }
                __syncthreads();
#pragma unroll
                for (int d1 = 0; d1 < BK; d1 += 16) {
                    Acc part[4][4] = {};
#pragma unroll 8
                    for (int d = d1; d < d1 + 16; d++) {
                        Acc a[4], b[4];
#pragma unroll
                        for (int c = 0; c < 4; c++) a[c] = sh.q[d][ty * 4 + c], b[c] = sh.k[d][tx * 4 + c];
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
#pragma unroll
            for (int a = 0; a < 4; a++) {
                const int lo = keys_lo(p, i[a]), hi = min(keys_hi(p, i[a]), end);
                const i64 mask_at = sh.mask_row[min(ty * 4 + a, rows - 1)];
                Acc top = row_max[a];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int j = n0 + tx * 4 + c;
                    Acc bias = 0;
                    bool masked = j < lo || j >= hi;
                    if (MASK != NO_MASK && !masked) masked = is_masked(p, mask_at, j, bias);
                    const Acc x = natural_score(p, s[a][c], scale, cap, inverse_cap, slope[a], i[a] + p.diagonal - j) + bias;
                    s[a][c] = masked ? negative_infinity() : x;
                    top = maximum(top, s[a][c]);
                }
                top = max_of_lanes<16>(top);
                const Acc factor = top == row_max[a] ? (Acc)1 : exponential(row_max[a] - top);
                row_max[a] = top;
                row_sum[a] *= factor;
#pragma unroll
                for (int c = 0; c < COLS; c++) acc_o[a][c] = careful ? weighed(factor, acc_o[a][c]) : product(factor, acc_o[a][c]);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const Acc weight = s[a][c] == negative_infinity() ? -(Acc)0 : exponential(s[a][c] - top);
                    row_sum[a] += weight;
                    sh.p[tx * 4 + c][ty * 4 + a] = weight;
                }
            }
            for (int j0 = 0; j0 < BN && n0 + j0 < end; j0 += VK) {
                __syncthreads();
                for (int at = tid; at < VK * DVC; at += THREADS) {
                    int c = at % DVC, j = at / DVC;
                    bool inside = n0 + j0 + j < p.kv_len && column0 + c < p.head_dim_v;
                    sh.v[j][c] =
                        inside ? widen(v[(n0 + j0 + j) * p.v_stride[2] + (column0 + c) * p.v_stride[3]]) : (Acc)0;
                }
                __syncthreads();
                Acc part[4][COLS] = {};
#pragma unroll 4
                for (int j = 0; j < VK; j++) {
                    Acc w[4], x[COLS];
#pragma unroll
                    for (int a = 0; a < 4; a++) w[a] = sh.p[j0 + j][ty * 4 + a];
#pragma unroll
                    for (int c = 0; c < COLS; c++) x[c] = sh.v[j][tx * 4 + c % 4 + c / 4 * 64];
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
                                if (!signbit(w[a]))
                                    part[a][c] = outweighs(w[a], x[c]) ? part[a][c] + x[c] : fused(w[a], x[c], part[a][c]);
                    }
                }
#pragma unroll
                for (int a = 0; a < 4; a++)
#pragma unroll
                    for (int c = 0; c < COLS; c++) acc_o[a][c] += part[a][c];
            }
        }
        bool suspicious = false;
#pragma unroll
        for (int a = 0; a < 4; a++)
#pragma unroll
            for (int c = 0; c < COLS; c++) suspicious |= !is_finite(acc_o[a][c]);
        if (!__syncthreads_or(suspicious)) break;
    }

#pragma unroll
    for (int a = 0; a < 4; a++) {
        row_sum[a] = sum_of_lanes<16>(row_sum[a]);
        const int r = ty * 4 + a;
        if (r >= rows) continue;
        Row row(p, task, r0 + r);
        if (p.num_splits > 1) {
            Acc* to = partial(p, task_index, r0 + r, split);
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const int column = column0 + tx * 4 + c % 4 + c / 4 * 64;
                if (column < p.head_dim_v) to[column] = acc_o[a][c];
            }
            if (dv_block == 0 && tx == 0) to[p.head_dim_v] = row_max[a], to[p.head_dim_v + 1] = row_sum[a];
            continue;
        }
        const RowEnd row_end(p, row, row_max[a], row_sum[a]);
        const i64 out_row = row.offset(p.out_stride);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            const int column = column0 + tx * 4 + c % 4 + c / 4 * 64;
            const Acc x = row_sum[a] == 0 ? (Acc)0 : acc_o[a][c] * row_end.factor;
            if (column < p.head_dim_v) store_as(p.out, p.out_dtype, out_row + column * p.out_stride[3], x);
        }
        if (dv_block == 0 && tx == 0) store_lse(p, row, row_end);
    }
}
