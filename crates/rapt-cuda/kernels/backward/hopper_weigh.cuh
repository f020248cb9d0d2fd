// What becomes of scores between the products of backward_hopper.cu and backward_hopper_wide.cu, and what they write of keys. Rows of scores are keys, 16 of
// a warp; columns are queries.

#pragma once
#include "backward/hopper_exponents.cuh"
#include "backward/hopper_mask.cuh"
#include "common/softmax.cuh"
#include "hopper/wgmma.cuh"

// This thread's first row of its group's keys.
__device__ inline int key_of_thread() {
    // Found again for each tile of sequences: kept, it was spilled at 64 columns. Found again, others were at 32 and 48. And where dq is turned: kept, it was
    // spilled at 128.
    const u32 thread = DQ_TURNED ? reread_tid() : VARLEN && D > 48 ? opaque((int)threadIdx.x) : threadIdx.x;
    return thread % 128 / 32 * 16 + lane_row((int)thread);
}

// Weights of pairs that positions leave out become 0: of a group's keys from one on, and queries from i0 on.
template <int NT>
__device__ inline void leave_out(Accumulator<NT>& p, const Extent& q, int key, int i0) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int j = key + key_of_thread() + r * 8;
        // Queries first..end see the key.
        int first = max(0, j - q.hi_shift + 1), end = min(q.q_len, j - q.lo_shift + 1);
        if (j >= q.kv_len) end = first;
        first -= i0 + (int)lane_column(threadIdx.x), end -= i0 + (int)lane_column(threadIdx.x);
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (nt * 8 + e < first || nt * 8 + e >= end) p[nt][r * 2 + e] = 0;
            }
    }
}

// Numbers of this thread's queries of columns 8 * nt.. of scores.
__device__ inline float2 of_queries(const float* numbers, int nt) { return *(const float2*)(numbers + nt * 8 + lane_column((int)threadIdx.x)); }

// Scores become p: tiles of 8 columns from `first` on of those that `mask` knows.
template <int NT>
__device__ inline void exponentiate(Accumulator<NT>& s, const Exponents& exponents, const float* lse, MaskColumns& mask, int first = 0) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const float2 of = of_queries(lse, nt);
        mask.load(first + nt);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            s[nt][r * 2] = exp2_approx(mask.applied(exponents.below(s[nt][r * 2], of.x), first + nt, r, 0));
            s[nt][r * 2 + 1] = exp2_approx(mask.applied(exponents.below(s[nt][r * 2 + 1], of.y), first + nt, r, 1));
        }
    }
}
// ds, as an operand.
template <int NT>
__device__ inline void weigh(
    OperandA<NT / 2>& ds, const Accumulator<NT>& p, const Accumulator<NT>& dp, const float* delta, const Exponents& exponents, const float* lse
) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const float2 of = of_queries(delta, nt), lse_of = NATURAL ? of_queries(lse, nt) : float2{};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float low = p[nt][r * 2] * (dp[nt][r * 2] - of.x), high = p[nt][r * 2 + 1] * (dp[nt][r * 2 + 1] - of.y);
            if (NATURAL) low *= exponents.rises(p[nt][r * 2], lse_of.x), high *= exponents.rises(p[nt][r * 2 + 1], lse_of.y);
            ds[operand_tile(nt)][operand_word(nt, r)] = pack(low, high);
        }
    }
}
// An operand to the columns from unit `first` on of a tile with the group's keys as rows.
template <int KT>
__device__ inline void put_weights(Elem* tile, int first, const OperandA<KT>& of) {
    const int lane = threadIdx.x % 32;
    const u32 row = shared_address(tile) + threadIdx.x % 128 / 32 * (16 * 128) + stmatrix_row(lane);
#pragma unroll
    for (int kt = 0; kt < KT; kt++) {
        const u32 at = stmatrix_unit(row, lane, (first + kt * 2) % 8, 0) + (first + kt * 2) / 8 * (K_BOX * 2);
        stmatrix(at, of[kt][0], of[kt][1], of[kt][2], of[kt][3]);
    }
}

// An operand to a tile with queries as rows, whose columns are the group's keys.
template <int KT>
__device__ inline void put_turned(Elem* tile, const OperandA<KT>& of) {
    const u32 at = shared_address(tile) + stmatrix_turned(threadIdx.x % 128 / 32, threadIdx.x % 32);
#pragma unroll
    for (int kt = 0; kt < KT; kt++) stmatrix_trans(at + kt * (16 * 128), of[kt][0], of[kt][1], of[kt][2], of[kt][3]);
}

// Rows of dk or dv from a group's first key on, and of so many columns.
struct KeyRows {
    Elem* first;
    const i64 (&stride)[4];
    int rows, dim;
    bool wide;
};
__device__ inline KeyRows rows_of_keys(void* to, const i64 (&stride)[4], const Item& item, int j, int kv_len, int dim, bool wide) {
    return {(Elem*)to + row_offset(stride, item.batch, item.kv_head, first_key_of(item) + j), stride, kv_len - j, dim, wide};
}
// Sums of a group's keys to such rows: a warp's 16 through its rows of BOXES_AT_ONCE tiles at `tile`, which nobody reads any more.
template <int BOXES_AT_ONCE, int TILES>
__device__ inline void store_rows(Elem* tile, const Accumulator<TILES>& sums, const KeyRows& to, float factor) {
    // Read again for the same reason as there.
    const int lane = threadIdx.x % 32, row = (DQ_TURNED ? reread_tid() : threadIdx.x) % 128 / 32 * 16;
    const int rows = min(16, to.rows - row), c = out_column(lane);
    u8* const own = (u8*)tile + row * 128;
    const u32 at = shared_address(own) + stmatrix_row(lane);
    const auto word = [&](int nt, int r) { return pack(sums[nt][r * 2] * factor, sums[nt][r * 2 + 1] * factor); };
    Elem* const from = to.first + row * to.stride[2];
#pragma unroll
    for (int begin = 0; begin < TILES; begin += 8 * BOXES_AT_ONCE) {
        const int end = TILES < begin + 8 * BOXES_AT_ONCE ? TILES : begin + 8 * BOXES_AT_ONCE;
        __syncwarp();
#pragma unroll
        for (int nt = begin; nt < end; nt += 2) {
            const u32 unit = stmatrix_unit(at, lane, nt % 8, 0) + (nt - begin) / 8 * (K_BOX * 2);
            stmatrix(unit, word(nt, 0), word(nt, 1), word(nt + 1, 0), word(nt + 1, 1));
        }
        __syncwarp();
#pragma unroll
        for (int box = begin / 8; box < (end + 7) / 8; box++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = out_row(lane, i), first = box * BOX + c;
                if (r >= rows || first >= to.dim) continue;
                const uint4 x = *(const uint4*)(own + (box - begin / 8) * (K_BOX * 2) + swizzle_128b(r, c));
                if (to.wide) {
                    *(uint4*)(from + r * to.stride[2] + first) = x;
                } else {
                    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int e = 0; e < 8; e++) {
                        if (first + e < to.dim) from[r * to.stride[2] + (first + e) * to.stride[3]] = (Elem)(words[e / 2] >> e % 2 * 16);
                    }
                }
            }
    }
}

// Of keys that no query sees.
__device__ inline void store_nothing(const BackwardParams& b, const Item& item, int kv_len) {
    for (int at = threadIdx.x; at < BN * max(b.all.head_dim, b.all.head_dim_v); at += CONSUMERS) {
        const int in_sequence = item.first() + at % BN, j = first_key_of(item) + in_sequence, c = at / BN;
        if (in_sequence >= kv_len) continue;
        if (c < b.all.head_dim) ((Elem*)b.dk)[row_offset(b.dk_stride, item.batch, item.kv_head, j) + c * b.dk_stride[3]] = 0;
        if (c < b.all.head_dim_v) ((Elem*)b.dv)[row_offset(b.dv_stride, item.batch, item.kv_head, j) + c * b.dv_stride[3]] = 0;
    }
}

// Waits for an item, and has scores of its first tile computed.
template <class Consumer, int NT>
__device__ inline void begin_item(Consumer& of, Accumulator<NT>& s) {
    mbarrier_wait(of.sh.k_full, of.kv_phase);
    mbarrier_wait(of.sh.q_full[of.done % 2], of.done / 2 & 1);
    of.template multiply_rows<D>(s, of.sh.k, of.sh.q[of.done % 2]);
    wgmma_wait<0>(s);
    mbarrier_wait(of.sh.v_full, of.kv_phase);
    of.kv_phase ^= 1;
}

// A group's part of dq of the nth tile, to those that add it in its turn: a piece at a time.
__device__ inline void hand_over(Shared& sh, int group, const Accumulator<DQ_TILES>& dq, u32 tile) {
    constexpr int TILES = DQ_TILES / DQ_PIECES;
    const int threads = threads_of(group), thread = threadIdx.x % 128;
#pragma unroll
    for (int piece = 0; piece < DQ_PIECES; piece++) {
        const u32 n = tile * DQ_PIECES + piece, stage = n % DQ_STAGES;
        float4* to = (float4*)sh.dq[group][stage] + thread;
        mbarrier_wait(sh.dq_empty[group][stage], n / DQ_STAGES & 1 ^ 1);
#pragma unroll
        for (int nt = 0; nt < TILES; nt++) {
            const float(&x)[4] = dq[piece * TILES + nt];
            if (threads == 128 || thread < threads) to[nt * threads] = {x[0], x[1], x[2], x[3]};
        }
        fence_proxy_async();
        mbarrier_arrive(sh.dq_full[group][stage]);
    }
}

// A block: two groups that multiply, and the warps beside them.
template <class Consumer>
__device__ inline void run_block(const BackwardHopperParams& h) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const int group = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) init_barriers(sh);
    griddepcontrol_wait();
    // Rows of dq are made beside this, on the multiprocessors that are left. Behind the wait: backward_parts.cu waits for turns alone, and takes for granted
    // that backward_rows.cu has ended, which made these zeros.
    griddepcontrol_launch_dependents();
    __syncthreads();
    if (group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        work_beside(h, sh);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer consumer{h, sh, group};
        consumer.run();
    }
}
