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
#include "common/epilogue.cuh"
#include "wide/half.cuh"
#include "wide/tf32.cuh"

constexpr int BM = BLOCK_M, OWN = KEYS / 16;  // OWN: tiles of 8 keys of which a warp computes the products
static_assert(BM == 64, "four warps of 16 queries");

struct Shared {
    Elem q[D / COLUMNS][BM * COLUMNS];
    Piece pieces[STAGES];
    WeightTiles weights[4];
    float beside[4][2][16];  // of each row, what the two warps share
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

// A warp of a pair: its 16 rows, its half of the keys and of the value columns, and what it shares with the other.
struct Warp {
    int lane, slab, half;
    Shared& sh;
    __device__ explicit Warp(Shared& sh) : lane(threadIdx.x % 32), slab(threadIdx.x / 32 % 4), half(threadIdx.x / 128), sh(sh) {}

    // Numbers of a lane's two rows, which all lanes of a row have alike; behind `sync_pair`, `shared` are those of either warp.
    __device__ void share(const float (&x)[2]) {
        if (lane % 4 == 0) sh.beside[slab][half][lane_row(lane)] = x[0], sh.beside[slab][half][lane_row(lane) + 8] = x[1];
    }
    __device__ float shared(int of, int h) const { return sh.beside[slab][of][lane_row(lane) + h * 8]; }
    __device__ void sync_pair() { bar_sync(1 + slab, 64); }
};

// The sums of a warp's 16 rows and half of the value columns; row_sum is the thread's own share, of the warp's keys, until `reduce`.
struct RowSums {
    float row_max[1][2], row_sum[2];
    Accumulator<HALF / 8> acc_o[1];

    __device__ void clear() {
        row_max[0][0] = row_max[0][1] = negative_infinity(), row_sum[0] = row_sum[1] = 0;
        zero(acc_o[0]);
    }

    // Scores of a warp's keys become p; `top` are the maxima of both warps. A tile's sum is rounded into row_sum once.
    template <bool CAREFUL>
    __device__ void weigh(Accumulator<OWN> (&s)[1], const float (&top)[2], float c) {
        float factor[2] = {1, 1}, exponent_max[1][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float rise = (top[h] - row_max[0][h]) * c;  // NaN where there is no key yet
            if (rise > RISE) factor[h] = exp2_approx(-rise), row_max[0][h] = top[h];
        }
        if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) rescale(acc_o[0], factor, CAREFUL);
        subtract_far(s, row_max, exponent_max, c);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0;
#pragma unroll
            for (int nt = 0; nt < OWN; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[0][nt][h * 2 + e];
                    const bool masked = x == negative_infinity();
                    x = exponential_of(x, c, exponent_max[0][h]);
                    sum += x;
                    if (CAREFUL && masked) x = -0.f;
                }
            row_sum[h] = __fmaf_rn(row_sum[h], factor[h], sum);
        }
    }

    // row_sum of the whole row.
    __device__ void reduce(Warp& warp) {
#pragma unroll
        for (int h = 0; h < 2; h++) row_sum[h] = sum_of_lanes<4>(row_sum[h]);
        warp.share(row_sum);
        warp.sync_pair();
#pragma unroll
        for (int h = 0; h < 2; h++) row_sum[h] = warp.shared(0, h) + warp.shared(1, h);
    }
};

// Sums for combine.cu.
__device__ inline void store_partial(const Params& p, const Block& block, const RowSums& sums, int r, int h, int half) {
    float* to = partial(p, block.task_index, r, block.split);
    const bool even = p.head_dim_v % 2 == 0;  // rows begin at whole pairs then
#pragma unroll
    for (int i = 0; i < HALF / 8; i++) {
        const int column = half * HALF + pair_column(i);
        const float2 x = sum_pair(sums.acc_o[0], i, h);
        if (even) {
            if (column < p.head_dim_v) *(float2*)(to + column) = x;
        } else {
            if (column < p.head_dim_v) to[column] = x.x;
            if (column + 1 < p.head_dim_v) to[column + 1] = x.y;
        }
    }
    if (half == 0 && threadIdx.x % 4 == 0) {
        to[p.head_dim_v] = natural_max(p, sums.row_max[0][h]), to[p.head_dim_v + 1] = sums.row_sum[h];
    }
}

// A row of out, half of its columns.
__device__ inline void store_row(const Params& p, const Row& row, const RowSums& sums, int h, int half) {
    const float l = sums.row_sum[h];
    const RowEnd row_end(p, row, natural_max(p, sums.row_max[0][h]), l);
    if (half == 0 && threadIdx.x % 4 == 0) store_lse(p, row, row_end);
    const i64 to = row.offset(p.out_stride);
#pragma unroll
    for (int i = 0; i < HALF / 8; i++) {
        const int column = half * HALF + pair_column(i);
        const float2 sum = sum_pair(sums.acc_o[0], i, h);
        const float2 x = {row_end.normalise(l, sum.x), row_end.normalise(l, sum.y)};
        if (p.out_vector) {
            if (column < p.head_dim_v) store_pair(p.out, to + column, x);
        } else {
            store_column(p, to, column, x.x), store_column(p, to, column + 1, x.y);
        }
    }
}

// Computes the block's rows; false if a sum is not finite, with nothing written (never if CAREFUL).
template <bool CAREFUL>
__device__ inline bool attend(const Params& p, Shared& sh) {
    const Block block(p);
    Warp warp(sh);
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
            store_partial(p, block, sums, r, h, half);
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
