// Attention on the tensor cores by mma.sync for heads too wide for the registers of four warps, many queries.
//
//   8 warps: 4 x 16 queries, and of each 16 a pair of warps, one for either half of the value columns; keys in tiles of BLOCK_N:
//     s = q @ K.T                of a warp's half of the tile's keys, piece by piece of K's columns; scores, masks
//     row_max' = max(row_max, max s)        the maxima of both halves, through shared memory
//     p                          of a warp's half of the keys, into shared memory
//     acc_o += p @ V             of all the tile's keys and a warp's half of the columns, piece by piece
//
// Q stays in shared memory, K and V come through a ring of pieces (wide/pieces.cuh). 64 queries a block are few for a short problem: its
// keys are split over blocks, and combine.cu folds the splits in order. The split follows q_len and kv_len alone.
// float32 is multiplied as three products of TF32 (wide/tf32.cuh), 16-bit numbers as they are (wide/half.cuh).
// Deliberately absent: few queries (decode.cu, generic.cu), sequences with lengths of their own.

#include "common/scores.cuh"
#include "wide/pieces.cuh"
#include "wide/rows.cuh"

constexpr int BM = BLOCK_M;
static_assert(BM == 64, "four warps of 16 queries");

struct Shared {
    Elem q[D / COLUMNS][BM * COLUMNS];
    Piece pieces[STAGES];
    WeightTiles weights[4];
    Beside beside;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and wide.cu disagree on shared memory");

// Which rows of which task, and which of its keys, a block computes.
struct Block {
    int task_index;
    Task task;
    int r0, rows, split, first, end;
    __device__ explicit Block(const Params& p) : Block(p, blockIdx.x, divide(blockIdx.x, p.by_num_splits)) {}

  private:
    __device__ Block(const Params& p, u32 chunk, u32 run)
        : task_index(divide(run, p.by_row_blocks)),
          task(p, task_index),
          // Late rows see the most keys under a causal mask: they go first.
          r0((p.row_blocks - 1 - (int)(run - task_index * p.row_blocks)) * BM),
          rows(min(BM, p.rows - r0)),
          split(chunk - run * p.num_splits) {
        const Seen seen(p, task, r0, r0 + rows);
        first = max(seen.lo, split * p.chunk) / KEYS * KEYS;
        end = min(seen.hi, p.chunk == 0 ? p.kv_len : min(p.kv_len, (split + 1) * p.chunk));
    }
};

// Computes the block's rows; false if a sum is not finite, with nothing written (never if CAREFUL).
template <bool CAREFUL>
__device__ inline bool attend(const Params& p, Shared& sh) {
    const Block block(p);
    Warp warp(sh.beside);
    const int lane = warp.lane, slab = warp.slab, half = warp.half;
    for (int box = 0; box < D / COLUMNS; box++) {
        const SourceRows rows = columns_from((const Elem*)p.q, p.q_stride, block.rows, p.head_dim, box * COLUMNS);
        load_box<BM>(sh.q[box], rows, [&](int r) { return Row(p, block.task, block.r0 + r).offset(p.q_stride); });
    }
    PieceRing ring(p, sh.pieces, block.task, block.first, block.end);
    ring.begin();

    const Seen seen(p, block.task, block.r0, block.r0 + block.rows);
    const Queries queries{p, block.task, block.r0 + slab * 16};
    const float c = exponent_factor(p);
    RowSums sums;
    sums.clear();
#pragma unroll 1
    for (int n0 = block.first; n0 < block.end; n0 += KEYS) {
        const int own_n0 = n0 + half * (KEYS / 2);
        MaskTile<1, OWN> mask;
        mask.fetch(p, queries, own_n0);
        Accumulator<OWN> s[1];
        zero(s[0]);
#pragma unroll(BY_WGMMA ? K_PIECES : 1)
        for (int piece = 0; piece < K_PIECES; piece++) {
            multiply_piece<CAREFUL>(s[0], sh.q[piece * 2], ring.next(), slab, half);
            ring.release();
        }
        await_scores(s[0]);
        const bool positions = n0 < seen.all_lo || n0 + KEYS > seen.all_hi;
        if (NATURAL || MASK != NO_MASK || positions) {
            apply_scores<1, OWN>(s, p, queries, mask, own_n0, p.kv_len, positions);
        }
        float top[2];
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = max_of_row(s[0], h, negative_infinity());
        warp.share(top);
        warp.sync_pair();
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = fmaxf(sums.row_max[0][h], fmaxf(warp.shared(0, h), warp.shared(1, h)));
        sums.weigh<CAREFUL>(s, top, c);
        store_weights<OWN>(sh.weights[slab], s[0], half * OWN);
        warp.sync_pair();
        Weights weights(sh.weights[slab]);
#pragma unroll
        for (int piece = 0; piece < V_PIECES; piece++) {
            add_box<CAREFUL>(sums.acc_o, weights, ring.next().boxes[half], piece, half);
            ring.release();
        }
        await_sums(sums.acc_o[0]);
    }
    cp_async_wait<0>();
    // Also: the ring may be filled again.
    const bool odd = __syncthreads_or(non_finite(sums.acc_o[0]) != 0);
    if (!CAREFUL && odd) return false;
    sums.reduce(warp);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = block.r0 + slab * 16 + lane_row(lane) + h * 8;
        if (r >= p.rows) continue;
        if (p.num_splits > 1) {
            store_partial(p, partial(p, block.task_index, r, block.split), sums, h, half);
        } else {
            store_row(p, Row(p, block.task, r), sums, h, half);
        }
    }
    return true;
}

// Its code stands apart, as this is rare; but beside a call products of wgmma would be made one by one (C7510).
#if BY_WGMMA
__device__ inline
#else
__device__ __noinline__
#endif
void attend_carefully(const Params& p, Shared& sh) { attend<true>(p, sh); }

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
    if (!attend<false>(p, sh)) attend_carefully(p, sh);
}
