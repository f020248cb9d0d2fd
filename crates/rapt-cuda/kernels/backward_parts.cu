// dq of the sums that backward_hopper.cu leaves: rows of a gradient, multiplied by softmax_scale. A tile that sees no key has none: zeros.
//
//   A block 64 rows. Sums lie in fragments, of as many warps as there are 16 rows, all columns or half of them after the other, 64 at a time: through
//   shared memory they become rows. Where columns of dq were rows of the product (DQ_TURNED), a block is a tile of queries: fragments of 64 columns and
//   of the others, of as many eights of queries as 16 rows have.
//   turns   This is launched beside backward_hopper.cu, once each block of that has begun, and so behind the pass over rows: a block waits until its tile
//           has all its parts, so that blocks run where multiprocessors have no keys left while others still have. The last block ends behind that launch,
//           for those that follow.
//
// A head with a sum that is not finite, or with a lse that is not relied on, is noted: backward_mma.cu computes it again.

#include "backward/hopper_items.cuh"
#include "backward/sequences.cuh"
#include "common/tile.cuh"

constexpr int THREADS = 256, ROWS = DQ_TURNED ? BM : 64, COLUMNS = DQ_ROW, ROW = COLUMNS + 8;  // elements of a row: its units are odd in number
constexpr int PIECE = DQ_COLUMNS < 64 ? DQ_COLUMNS : 64;                                       // columns

struct Shared {
    __align__(16) Elem rows[ROWS * ROW];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and backward_parts.cu disagree on shared memory");

// Four sums of the warp's 32 lanes, the at-th of a block with so many rows of 16, to their rows: all lanes.
#if DQ_TURNED
__device__ inline void put(Elem* rows, const float4& x, float scale, int at, int sixteens) {
    const int of_first = sixteens * 256, threads = at < of_first ? 128 : (COLUMNS - 64) * 2, in_group = at < of_first ? at : at - of_first;
    const int eight = in_group / threads, thread = in_group - eight * threads;
    // A lane has two queries of a column, and of that 8 columns further on; the lane of the next column has its first or second query beside them.
    const u32 low = pack(x.x * scale, x.y * scale), high = pack(x.z * scale, x.w * scale);
    const u32 other_low = __shfl_xor_sync(~0u, low, 4), other_high = __shfl_xor_sync(~0u, high, 4);
    const int second = lane_row(thread) % 2;
    const auto pair = [&](u32 own, u32 other) { return second ? other >> 16 | (own & 0xffff0000u) : (own & 0xffffu) | other << 16; };
    Elem* to = rows + (eight * 8 + lane_column(thread) + second) * ROW + (at < of_first ? 0 : 64) + thread / 32 * 16 + lane_row(thread) - second;
    *(u32*)to = pair(low, other_low), *(u32*)(to + 8) = pair(high, other_high);
}
#else
__device__ inline void put(Elem* rows, const float4& x, float scale, int at, int sixteens) {
    const int of_piece = sixteens * (16 * PIECE / 4), piece = at / of_piece, in_piece = at - piece * of_piece;
    const int nt = in_piece / (sixteens * 32), thread = in_piece - nt * (sixteens * 32);
    Elem* to = rows + (thread / 32 * 16 + lane_row(thread)) * ROW + piece * PIECE + nt * 8 + lane_column(thread);
    *(u32*)to = pack(x.x * scale, x.y * scale), *(u32*)(to + 8 * ROW) = pack(x.z * scale, x.w * scale);
}
#endif

// Until all items that see the block's tile of queries, the i-th of a sequence, have added to it: a thread. Of 128 queries each half has turns of its own,
// else each half of the columns. Whoever has asked for milliseconds waits for the whole launch: offsets that changed since would have turns that never come.
__device__ inline void wait_for_turns(const BackwardParams& b, int at_block, const Sequence& of, int i) {
    const Params& p = b.all;
    constexpr int BLOCKS = BM / ROWS;  // of a tile
    const int lag = of.lag(p);
    const u32* turns = turns_of(b) + (at_block / BLOCKS * 2 + at_block % BLOCKS);
    const u32 all = turns_in_all({of.q_len(p), of.kv_len(p), p.lo_shift - lag, p.hi_shift - lag}, i);
#pragma unroll 1
    for (int n = 0, asked = 0; n < (BLOCKS > 1 ? 1 : 2); n++)
        for (; load_acquire(turns + n) != all; asked++) {
            if (asked == 4096) return griddepcontrol_wait();
            nanosleep(200);
        }
}

// A block's rows.
__device__ inline void make_rows(const BackwardParams& b, Shared& sh, int at_block) {
    const Params& p = b.all;
    const int tiles = b.padded_rows / ROWS, matrix = at_block / tiles, tile = at_block - matrix * tiles;
    const int batch = matrix / p.heads, head = matrix - batch * p.heads;
    // Queries of a head or sequence from i0 on; how many sixteens of rows of theirs there are, and where in dq_sums.
#if VARLEN
    const OwnRows<BLOCK_M, false> own(b, 0, tile * ROWS / BLOCK_M);
    const Sequence& sequence = own.sequence;
    const int within = tile * ROWS % BLOCK_M, i0 = own.first + within, rows = min(ROWS, own.rows - within);
    if (rows <= 0) return;
    const int begin = clamp(sequence.q0, 0, p.q_len) / 16 + sequence.number + 1, sixteens = (rows + 15) / 16;
    const i64 at_row = (i64)matrix * b.sum_rows + begin * 16 + i0;
    const bool is_in_order = ((const KeyTile*)b.key_tiles)->is_in_order != 0;
#else
    const Sequence sequence(p, batch);
    const int i0 = tile * ROWS, rows = min(ROWS, p.q_len - i0);
    // Beyond the last row: of a tile of 128 queries.
    if (rows <= 0) return;
    constexpr int sixteens = ROWS / 16;
    const i64 at_row = (i64)at_block * ROWS;
    constexpr bool is_in_order = true;
#endif
    const Seen seen(p, Task(batch, head, sequence), i0, i0 + rows);
    const bool is_empty = seen.lo >= seen.hi || !is_in_order;
    if (threadIdx.x == 0 && !is_empty) wait_for_turns(b, at_block, sequence, i0 / BM);
    __syncthreads();
    const float4* sums = (const float4*)(b.dq_sums + at_row * COLUMNS);
    const float scale = (float)p.scale;
    // Sums that nobody has added to are computed behind this.
    float odd = is_in_order ? 0 : not_a_number();
#pragma unroll 4
    for (int at = threadIdx.x; at < sixteens * (16 * COLUMNS / 4); at += THREADS) {
        const float4 x = is_empty ? float4{0, 0, 0, 0} : sums[at];
        odd += 0 * x.x + 0 * x.y + 0 * x.z + 0 * x.w;
        put(sh.rows, x, scale, at, sixteens);
    }
    // A lse that is no number is of a row with a sum that is none.
    if (threadIdx.x < rows) {
        const RowState state = b.states[state_index(p, batch, head, sequence.first_query() + i0 + threadIdx.x)];
        if (!is_dead(state) && (state.top > LARGE_LSE || state.top < -LARGE_LSE || state.log2_sum != 0)) odd = not_a_number();
    }
    if (odd != 0) note_odd(b, entry_of(batch, sequence), divide(head, p.by_group));
    __syncthreads();
    Elem* dq = (Elem*)b.dq + row_offset(b.dq_stride, batch, head, sequence.first_query() + i0);
    if (b.dq_wide) {
        for (int at = threadIdx.x; at < rows * (COLUMNS / 8); at += THREADS) {
            const int r = at / (COLUMNS / 8), c = at % (COLUMNS / 8) * 8;
            if (c < p.head_dim) *(uint4*)(dq + r * b.dq_stride[2] + c) = *(const uint4*)(sh.rows + r * ROW + c);
        }
    } else {
        for (int at = threadIdx.x; at < rows * COLUMNS; at += THREADS) {
            const int r = at / COLUMNS, c = at % COLUMNS;
            if (c < p.head_dim) dq[r * b.dq_stride[2] + c * b.dq_stride[3]] = sh.rows[r * ROW + c];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ BackwardParams b) {
    extern __shared__ __align__(128) u8 memory[];
    griddepcontrol_launch_dependents();
    make_rows(b, *(Shared*)memory, blockIdx.x);
    // This launch ends behind the one before it.
    if (blockIdx.x == gridDim.x - 1) griddepcontrol_wait();
}
