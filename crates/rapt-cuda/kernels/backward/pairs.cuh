// The passes of gradients whose own rows stay and others stream by: which rows a block has, what scores become, and where sums go.
//
//   PASS KEYS      own: keys, streamed: queries that see them, of all heads of the group      dv += P^T.d_o, dk += dS^T.q
//   PASS QUERIES   own: queries, streamed: keys that they see                                 dq += dS.k
//   PASS OF_MASK   own: queries, streamed: keys, one tile of each after another               d_mask += dS
//
//   BLOCK_M own rows, 16*FRAGMENTS of them a warp, of ROW_WARPS warps from FIRST_ROW_WARP on; tiles of BLOCK_N streamed rows from row 0
//   SPLIT: half of the blocks of KEYS sums dk, half dv
//
// backward_mma.cu multiplies by mma.sync, backward_halves.cu float32 by wgmma. Deliberately absent: products, and how tiles come.

#pragma once
#include "backward/mask_tile.cuh"
#include "backward/sequences.cuh"
#include "common/softmax.cuh"
#include "common/tile.cuh"

#ifndef ROW_WARPS
#define ROW_WARPS 4
#define FIRST_ROW_WARP 0
#endif
#define KEYS 1
#define QUERIES 2
constexpr int BM = BLOCK_M, BN = BLOCK_N, FRAGMENTS = BM / 16 / ROW_WARPS, NT = BN / 8, KT = BN / 16;
static_assert(BN % 16 == 0, "weights are operands of whole products");

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// Where two tiles of scores and a sum leave few registers, what follows from a thread's number is found in each tile anew.
__device__ inline int row_thread() { return ROW_WARPS > 4 ? reread_tid() : (int)threadIdx.x; }
// The first row of this warp of the block's own.
__device__ inline int first_own_row() { return (int)((u32)row_thread() / 32 - FIRST_ROW_WARP) * 16 * FRAGMENTS; }

// Which block of rows of a head a block has.
struct Unit {
    int matrix, at;
    __device__ Unit(const BackwardParams& b, u32 block) {
        const int unit = PASS == KEYS && SPLIT ? block / 2 : block;
        matrix = unit / b.units, at = unit - matrix * b.units;
        // Early keys are seen by the most queries under a causal mask, late queries see the most keys: they go first.
        if (PASS == QUERIES) at = b.units - 1 - at;
    }
};
struct Block {
    int batch, head, kv_head;  // head: not of KEYS
    OwnRows<BM, PASS == KEYS> own;
    __device__ Block(const BackwardParams& b, u32 block) : Block(b, Unit(b, block)) {}
    // Of the queries of a head those of block `at`.
    __device__ Block(const BackwardParams& b, int batch, int head, int at)
        : batch(batch), head(head), kv_head(divide(head, b.all.by_group)), own(b, batch, at) {}
    // The row of its own tensors that is its first.
    __device__ int first_row() const { return (PASS == KEYS ? own.sequence.first_key() : own.sequence.first_query()) + own.first; }

  private:
    __device__ Block(const BackwardParams& b, const Unit& unit) : Block(b, unit, unit.matrix / (PASS == KEYS ? b.kv_heads : b.all.heads)) {}
    __device__ Block(const BackwardParams& b, const Unit& unit, int batch) : batch(batch), own(b, batch, unit.at) {
        const int of_batch = unit.matrix - batch * (PASS == KEYS ? b.kv_heads : b.all.heads);
        head = PASS == KEYS ? 0 : of_batch, kv_head = PASS == KEYS ? of_batch : divide(of_batch, b.all.by_group);
    }
};

// The streamed tiles of a block, one after another: of KEYS those of each head of the group in turn.
struct Tiles {
    int head, last_head, n0, lo, hi;
    __device__ Tiles(const BackwardParams& b, const Block& block) {
        const Params& p = b.all;
        if (PASS == KEYS) {
            const Seeing seeing(p, block.own.sequence, block.own.first, block.own.first + block.own.rows);
            lo = seeing.lo / BN * BN, hi = seeing.hi, head = block.kv_head * p.group, last_head = head + p.group - 1;
        } else {
            const Seen seen(p, Task(block.batch, block.head, block.own.sequence), block.own.first, block.own.first + block.own.rows);
            lo = seen.lo / BN * BN, hi = seen.hi, head = last_head = block.head;
        }
        n0 = lo;
    }
    __device__ bool has_any() const { return lo < hi; }
    // Whether tile `at` is one of them, which it is then.
    __device__ bool seek(int at) {
        n0 = at * BN;
        return lo <= n0 && n0 < hi;
    }
    __device__ int count() const { return has_any() ? (hi - lo + BN - 1) / BN * (last_head - head + 1) : 0; }
    // Whether there is one more, which it is then.
    __device__ bool next() {
        n0 += BN;
        if (n0 < hi) return true;
        n0 = lo;
        return head++ < last_head;
    }
};

// A query as its pairs need it; `diagonal` is the key of slope 0.
struct Query {
    RowState state;
    float slope;
    int diagonal;
    i64 mask_row;
    __device__ Query(const Params& p, const Block& block, const RowState& state, int head, int i) : state(state) {
        slope = NATURAL ? slope_of(p, head) : 0.f, diagonal = i + p.diagonal - block.own.sequence.lag(p);
        mask_row = MASK == NO_MASK ? 0 : offset_of(p.mask_stride, block.batch, head) + min(i, p.q_len - 1) * p.mask_stride[2];
    }
};

// Which weights of a tile are kept: bit (mt*NT + nt)*4 + e for element e of tile nt of fragment mt. `warp_row`: the warp's first own row of the
// block's.
__device__ inline u32 kept_weights(const Params& p, const Block& block, const Tiles& tiles, int warp_row) {
#if DROPOUT
    const Task task(block.batch, tiles.head, block.own.sequence);
    const DroppingHead head(p.dropping, task.dropping_batch(), task.head);
    const int own0 = block.own.first + warp_row, n0 = tiles.n0;
    static_assert(FRAGMENTS * NT * 4 <= 32, "a word has a bit for each");
    const int g = lane_row((int)threadIdx.x), t = threadIdx.x % 4, odd = g % 2;
    u32 kept = 0, beside = 0;
#pragma unroll
    for (int mt = 0; mt < FRAGMENTS; mt++) {
#if PASS != KEYS
#pragma unroll
        for (int pair = 0; pair < NT / 2; pair++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const PhiloxBlock of = head.block(own0 + mt * 16 + h * 8 + g, n0 / 4 + pair * 4 + t);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    if (head.keeps(of.word[n])) kept |= 1u << ((mt * NT + pair * 2 + n / 2) * 4 + h * 2 + n % 2);
                }
            }
#else
        // A block is of two keys of this lane and of two of the lane whose key is beside: each finds those of every other query for both.
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const PhiloxBlock of = head.block(n0 + nt * 8 + t * 2 + odd, (own0 / 16 + mt) * 4 + g / 2);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 bit = 1u << ((mt * NT + nt) * 4 + h * 2) << odd;
                if (head.keeps(odd ? of.word[h * 2 + 1] : of.word[h * 2])) kept |= bit;
                if (head.keeps(odd ? of.word[h * 2] : of.word[h * 2 + 1])) beside |= bit;
            }
        }
#endif
    }
    return PASS == KEYS ? kept | __shfl_xor_sync(~0u, beside, 4) : kept;
#else
    return ~0u;
#endif
}

// Booleans of a tile, as bits like those of weights that are kept: 1 hides the pair. Registers hold these, where they do not hold a tile's loads beside
// two of scores and a sum.
constexpr bool HIDES_AHEAD = ROW_WARPS > 4 && MASK == BOOL_MASK;
__device__ inline u32 hidden_pairs(const Params& p, const Block& block, const Tiles& tiles) {
    u32 hidden = 0;
#if MASK == BOOL_MASK
    if (!HIDES_AHEAD) return 0;
    static_assert(!HIDES_AHEAD || FRAGMENTS * NT * 4 <= 32, "a word has a bit for each");
    const int own0 = block.own.first + first_own_row() + lane_row(row_thread()), n0 = tiles.n0 + lane_column(row_thread());
    const i64 head = offset_of(p.mask_stride, block.batch, PASS == KEYS ? tiles.head : block.head);
#pragma unroll 1
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int mt = 0; mt < FRAGMENTS; mt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int own = own0 + mt * 16 + e / 2 * 8, streamed = n0 + nt * 8 + e % 2;
                const int i = min(PASS == KEYS ? streamed : own, p.q_len - 1), j = min(PASS == KEYS ? own : streamed, p.kv_len - 1);
                float none;
                if (is_masked(p, head + i * p.mask_stride[2], j, none)) hidden |= 1u << ((mt * NT + nt) * 4 + e);
            }
    }
#endif
    return hidden;
}

// What is known of a pair before it is weighed; `bias`: of OF_MASK, read ahead.
struct Known {
    bool hidden, kept;
    float bias;
};

// x = q.k and dp = d_o.v become p and ds, of a pair that positions do not leave out. p is scaled with the sums that it becomes.
template <bool CAREFUL>
__device__ inline void weigh(const Params& p, const Query& query, int j, float& x, float& dp, const Known& known) {
    const bool kept = known.kept;
    bool masked = known.hidden || (CAREFUL && is_dead(query.state));
    float bias = known.bias;
    if (PASS == OF_MASK) masked |= bias == negative_infinity();
    else if (MASK != NO_MASK && !HIDES_AHEAD && !masked && j < p.kv_len) masked = is_masked(p, query.mask_row, j, bias);
    float below, rises = 1;
    if (NATURAL) {
        const Score score(p, x, query.slope, query.diagonal - j, bias);
        below = score.s - query.state.top, rises = score.rises;
    } else {
        below = __fmaf_rn(x, (float)p.scale, -query.state.top);
    }
    const float weight = exp2_approx(__fmaf_rn(below, LOG2_E, -query.state.log2_sum));
    if (DROPOUT) dp *= kept ? (float)p.dropping.scale : 0.f;
    float ds = weight * (dp - query.state.delta);
    // A mask is added behind softcap.
    if (NATURAL && PASS != OF_MASK) ds *= rises;
    x = masked ? CAREFUL ? MASKED : 0.f : DROPOUT ? weight * (kept ? 1.f : 0.f) : weight;
    dp = masked ? CAREFUL ? MASKED : 0.f : CAREFUL ? ds + 0.f : ds;
}

// The keys that a query sees by its position: none of a row that there is not.
struct SeenKeys {
    int lo, hi;
    __device__ SeenKeys(const Params& p, const Sequence& of, int i) {
        lo = keys_lo(p, of, i), hi = i < of.q_len(p) ? keys_hi(p, of, i) : 0;
    }
    // Weights of key j, if it is left out.
    template <bool CAREFUL>
    __device__ void leave_out(int j, float& weight, float& ds) const {
        if (j < lo || j >= hi) weight = ds = CAREFUL ? MASKED : 0.f;
    }
};

// Biases that no pass but OF_MASK reads ahead.
struct NoBiases {
    __device__ float2 pair(int, int) const { return {0, 0}; }
};

// x = q.k and dp = d_o.v of a tile become p and ds. `state_of(r)`: what is known of streamed query r of the tile, else of own query r of the block.
template <bool CAREFUL, class StateOf, class Biases = NoBiases>
__device__ inline void weigh_tile(
    const Params& p, const Block& block, const Tiles& tiles, Accumulator<NT> (&s)[FRAGMENTS], Accumulator<NT> (&dp)[FRAGMENTS], StateOf state_of,
    const Biases& biases = {}
) {
    const Sequence& sequence = block.own.sequence;
    const int first = block.own.first, warp_row = first_own_row();
    const int own_row = warp_row + lane_row(row_thread()), streamed_row = lane_column(row_thread());
    const u32 kept = kept_weights(p, block, tiles, warp_row), hidden = hidden_pairs(p, block, tiles);
    if (PASS == KEYS) {
#pragma unroll
        for (int column = 0; column < NT * 2; column++) {
            const int nt = column / 2, e = column % 2, r = nt * 8 + streamed_row + e;
            const Query query(p, block, state_of(r), tiles.head, tiles.n0 + r);
#pragma unroll
            for (int row = 0; row < FRAGMENTS * 2; row++) {
                const int mt = row / 2, at = row % 2 * 2 + e;
                const int bit = (mt * NT + nt) * 4 + at;
                weigh<CAREFUL>(p, query, first + own_row + row * 8, s[mt][nt][at], dp[mt][nt][at], {(hidden >> bit & 1) != 0, (kept >> bit & 1) != 0, 0});
            }
        }
    } else {
#pragma unroll
        for (int row = 0; row < FRAGMENTS * 2; row++) {
            const Query query(p, block, state_of(own_row + row * 8), block.head, first + own_row + row * 8);
#pragma unroll
            for (int column = 0; column < NT * 2; column++) {
                const int mt = row / 2, nt = column / 2, at = row % 2 * 2 + column % 2, bit = (mt * NT + nt) * 4 + at, of_pair = nt * 8 + streamed_row;
                const float2 pair = biases.pair(own_row + row * 8, of_pair);
                const Known known = {(hidden >> bit & 1) != 0, (kept >> bit & 1) != 0, column % 2 == 0 ? pair.x : pair.y};
                weigh<CAREFUL>(p, query, tiles.n0 + of_pair + column % 2, s[mt][nt][at], dp[mt][nt][at], known);
            }
        }
    }
    // Whether some pair of the tile is left out by its position.
    bool positions;
    if (PASS == KEYS) {
        const int q_len = sequence.q_len(p), end = min(tiles.n0 + BN, q_len);
        positions = keys_lo(p, sequence, end - 1) > first || keys_hi(p, sequence, tiles.n0) < first + BM || tiles.n0 + BN > q_len;
    } else {
        const Seen seen(p, Task(block.batch, block.head, sequence), first, first + block.own.rows);
        positions = tiles.n0 < seen.all_lo || tiles.n0 + BN > seen.all_hi;
        // Rows behind the last one are never stored, but a mask's gradient may sum all of a tile.
        if (PASS == OF_MASK) positions |= block.own.rows < BM;
    }
    if (positions) {
#pragma unroll
        for (int streamed = 0; streamed < NT * 2; streamed++)
#pragma unroll
            for (int own = 0; own < FRAGMENTS * 2; own++) {
                const int mt = own / 2, nt = streamed / 2, at = own % 2 * 2 + streamed % 2;
                const int row = first + own_row + own * 8, column = tiles.n0 + nt * 8 + streamed_row + streamed % 2;
                const SeenKeys seen(p, sequence, PASS == KEYS ? column : row);
                seen.leave_out<CAREFUL>(PASS == KEYS ? row : column, s[mt][nt][at], dp[mt][nt][at]);
            }
    }
}

template <int WIDTH>
struct Sums {
    Accumulator<WIDTH / 8> of[FRAGMENTS];
    __device__ void clear() {
#pragma unroll
        for (int mt = 0; mt < FRAGMENTS; mt++) zero(of[mt]);
    }
    __device__ bool has_non_finite() const {
        float any = 0;
#pragma unroll
        for (int mt = 0; mt < FRAGMENTS; mt++) any += non_finite(of[mt]);
        return any != 0;
    }
    // Rows of a gradient from row `first` on, of which there are `rows`.
    __device__ void store(void* to, const i64 (&stride)[4], i64 at, int rows, int dim, bool pairs, float factor) const {
        if (to == nullptr) return;
        const int warp_row = first_own_row() + lane_row((int)threadIdx.x);
#pragma unroll
        for (int mt = 0; mt < FRAGMENTS; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int r = warp_row + mt * 16 + h * 8;
                if (r >= rows) continue;
                Elem* row = (Elem*)to + at + r * stride[2];
#pragma unroll
                for (int nt = 0; nt < WIDTH / 8; nt++) {
                    const int c = nt * 8 + lane_column((int)threadIdx.x);
#if STORAGE == F32
                    const float2 pair = {of[mt][nt][h * 2] * factor, of[mt][nt][h * 2 + 1] * factor};
                    if (pairs) {
                        if (c < dim) *(float2*)(row + c) = pair;
                    } else {
                        if (c < dim) row[c * stride[3]] = pair.x;
                        if (c + 1 < dim) row[(c + 1) * stride[3]] = pair.y;
                    }
#else
                    const u32 pair = pack(of[mt][nt][h * 2] * factor, of[mt][nt][h * 2 + 1] * factor);
                    if (pairs) {
                        if (c < dim) *(u32*)(row + c) = pair;
                    } else {
                        if (c < dim) row[c * stride[3]] = (Elem)pair;
                        if (c + 1 < dim) row[(c + 1) * stride[3]] = (Elem)(pair >> 16);
                    }
#endif
                }
            }
    }
};
// Of sums that a block does not have.
struct NoSums {
    __device__ void clear() {}
    __device__ bool has_non_finite() const { return false; }
};

// Rows of the gradients.
template <class ByDs, class ByP>
__device__ inline void store(const BackwardParams& b, const Block& block, const ByDs& by_ds, const ByP& by_p) {
    const Params& p = b.all;
    const float scale = (float)p.scale;
    const auto at = [&](const i64 (&stride)[4]) {
        return row_offset(stride, block.batch, PASS == KEYS ? block.kv_head : block.head, block.first_row());
    };
    if constexpr (PASS == QUERIES) {
        by_ds.store(b.dq, b.dq_stride, at(b.dq_stride), block.own.rows, p.head_dim, b.dq_pairs, scale);
    } else {
        if constexpr (!is_same<ByDs, NoSums>) by_ds.store(b.dk, b.dk_stride, at(b.dk_stride), block.own.rows, p.head_dim, b.dk_pairs, scale);
        const float of_p = DROPOUT ? (float)p.dropping.scale : 1.f;
        if constexpr (!is_same<ByP, NoSums>) by_p.store(b.dv, b.dv_stride, at(b.dv_stride), block.own.rows, p.head_dim_v, b.dv_pairs, of_p);
    }
}
