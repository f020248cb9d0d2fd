// Gradients of float16, bfloat16 and float32 on the tensor cores by mma.sync: two passes of one scheme, whose own rows stay and others stream by.
//
//   PASS KEYS      own: keys, streamed: queries that see them, of all heads of the group      dv += P^T.d_o, dk += dS^T.q
//   PASS QUERIES   own: queries, streamed: keys that they see                                 dq += dS.k
//
//   4 warps, each 16*FRAGMENTS own rows; tiles of BLOCK_N streamed rows from row 0, in STAGES buffers that cp.async fills:
//     s = own @ streamed.T                 of q and k, float32
//     dp = own @ streamed.T                of d_o and v, float32
//     s, dp -> p, ds                       backward/request.cuh; in 16 bits p and ds are rounded to the storage dtype where they are multiplied, and nowhere else
//     sums += p @ streamed, ds @ streamed  float32
//
// dq takes a second pass over scores: seven products where five would do with sums that several blocks add to. In return no block waits for
// another, nothing but a row's state lies in memory, and every sum has one order: bits depend neither on other blocks nor on strides.
// SPLIT: heads of more than 128 columns have no registers for both sums of KEYS: half of the blocks sums dk, half dv.
// A block whose sums are not finite runs again as CAREFUL: weights of pairs that are not attended are MASKED there, and what is not finite in
// streamed rows reaches only the rows that attend it. Finite sums have the same bits both ways.
// AGAIN: behind backward_hopper.cu few blocks compute the heads again that it has noted, of all blocks of a launch of its own.
// Deliberately absent: gradients of masks and sinks (backward.cu, backward_rows.cu).

#include "backward/sequences.cuh"
#include "backward/products.cuh"

#ifndef AGAIN
#define AGAIN 0
#endif
#define KEYS 1
#define QUERIES 2
constexpr int THREADS = 128, BM = BLOCK_M, BN = BLOCK_N, FRAGMENTS = BM / 64, NT = BN / 8, KT = BN / 16;
static_assert(BN % 16 == 0, "weights are operands of whole products");

// Rows of q and d_o, or of k and v. Swizzled tiles begin at lines of 128 bytes: `beyond` turns bits of addresses.
template <int ROWS>
struct Pair {
    __align__(128) u16 a[ROWS * A_ROW];
    __align__(128) u16 b[ROWS * B_ROW];
};
struct Stage {
    Pair<BN> rows;
    RowState states[PASS == KEYS ? BN : 1];
};
struct Shared {
    Pair<BM> own;
    Stage stages[STAGES];
    RowState states[PASS == QUERIES ? BM : 1];
#if AGAIN
    u32 at;  // which block of a launch of all this is
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and backward_mma.cu disagree on shared memory");

__device__ inline u32 block_at(const Shared& sh) {
#if AGAIN
    return sh.at;
#else
    return blockIdx.x;
#endif
}

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
    int batch, head, kv_head;  // head: of QUERIES alone
    OwnRows<BM, PASS == KEYS> own;
    __device__ Block(const BackwardParams& b, u32 block) : Block(b, Unit(b, block)) {}
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
    // Whether there is one more, which it is then.
    __device__ bool next() {
        n0 += BN;
        if (n0 < hi) return true;
        n0 = lo;
        return head++ < last_head;
    }
};

template <int ROWS>
__device__ inline void load_queries(const BackwardParams& b, Pair<ROWS>& to, const Block& block, int head, int i0) {
    const Params& p = b.all;
    const Sequence& of = block.own.sequence;
    const int rows = of.q_len(p) - i0, row = of.first_query() + i0;
    const Elem* q = (const Elem*)p.q + row_offset(p.q_stride, block.batch, head, row);
    const Elem* d_o = (const Elem*)b.d_o + row_offset(b.d_o_stride, block.batch, head, row);
    load_rows<ROWS, D_WORDS, THREADS>(to.a, {q, p.q_stride[3], p.q_stride[2], rows, p.head_dim}, threadIdx.x);
    load_rows<ROWS, DV_WORDS, THREADS>(to.b, {d_o, b.d_o_stride[3], b.d_o_stride[2], rows, p.head_dim_v}, threadIdx.x);
}
template <int ROWS>
__device__ inline void load_keys(const BackwardParams& b, Pair<ROWS>& to, const Block& block, int j0) {
    const Params& p = b.all;
    const Sequence& of = block.own.sequence;
    const int rows = of.kv_len(p) - j0, row = of.first_key() + j0;
    const Elem* k = (const Elem*)p.k + row_offset(p.k_stride, block.batch, block.kv_head, row);
    const Elem* v = (const Elem*)p.v + row_offset(p.v_stride, block.batch, block.kv_head, row);
    load_rows<ROWS, D_WORDS, THREADS>(to.a, {k, p.k_stride[3], p.k_stride[2], rows, p.head_dim}, threadIdx.x);
    load_rows<ROWS, DV_WORDS, THREADS>(to.b, {v, p.v_stride[3], p.v_stride[2], rows, p.head_dim_v}, threadIdx.x);
}
// The states of ROWS queries; of those that there are not, zeros.
template <int ROWS>
__device__ inline void load_states(const BackwardParams& b, RowState* to, const Block& block, int head, int i0) {
    const Sequence& of = block.own.sequence;
    const RowState* states = b.states + state_index(b.all, block.batch, head, of.first_query() + i0);
    for (int r = threadIdx.x; r < ROWS; r += THREADS) {
        const bool inside = i0 + r < of.q_len(b.all);
        cp_async_zfill<16>(shared_address(to + r), inside ? states + r : b.states, inside);
    }
}
__device__ inline void load_stage(const BackwardParams& b, Stage& to, const Block& block, const Tiles& at) {
    if (PASS == QUERIES) {
        load_keys<BN>(b, to.rows, block, at.n0);
    } else {
        load_queries<BN>(b, to.rows, block, at.head, at.n0);
        load_states<BN>(b, to.states, block, at.head, at.n0);
    }
    cp_async_commit();
}

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
#if PASS == QUERIES
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

// x = q.k and dp = d_o.v become p and ds, of a pair that positions do not leave out. p is scaled with the sums that it becomes.
template <bool CAREFUL>
__device__ inline void weigh(const Params& p, const Query& query, int j, float& x, float& dp, bool kept) {
    bool masked = CAREFUL && is_dead(query.state);
    float bias = 0;
    if (MASK != NO_MASK && !masked && j < p.kv_len) masked = is_masked(p, query.mask_row, j, bias);
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
    if (NATURAL) ds *= rises;
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
        const int warp_row = threadIdx.x / 32 * 16 * FRAGMENTS + lane_row((int)threadIdx.x);
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

// The sums of a block: `by_ds` with streamed rows of q or k, `by_p` with those of d_o; false if one is not finite (never if CAREFUL).
template <bool CAREFUL, class ByDs, class ByP>
__device__ inline bool attend(const BackwardParams& b, Shared& sh, ByDs& by_ds, ByP& by_p) {
    constexpr bool HAS_DS = !is_same<ByDs, NoSums>, HAS_P = !is_same<ByP, NoSums>;
    const Params& p = b.all;
    const Block block(b, block_at(sh));
    const Sequence& sequence = block.own.sequence;
    const int first = block.own.first;
    Tiles tiles(b, block);
    const int warp_row = threadIdx.x / 32 * 16 * FRAGMENTS;
    by_ds.clear(), by_p.clear();
    if (PASS == KEYS) {
        load_keys<BM>(b, sh.own, block, first);
    } else {
        load_queries<BM>(b, sh.own, block, block.head, first);
        load_states<BM>(b, sh.states, block, block.head, first);
    }
    Tiles ahead = tiles;
    bool is_left = tiles.has_any(), is_ahead = is_left;
#pragma unroll
    for (int n = 0; n < STAGES - 1; n++) {
        is_ahead ? load_stage(b, sh.stages[n], block, ahead) : cp_async_commit();
        if (is_ahead) is_ahead = ahead.next();
    }
    for (int stage = 0; is_left; stage = stage + 1 == STAGES ? 0 : stage + 1) {
        {
            // The buffer that was read last is filled next.
            Stage& filled = sh.stages[STAGES == 1 ? 0 : stage == 0 ? STAGES - 1 : stage - 1];
            is_ahead ? load_stage(b, filled, block, ahead) : cp_async_commit();
            if (is_ahead) is_ahead = ahead.next();
        }
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        Stage& now = sh.stages[stage];
        Accumulator<NT> s[FRAGMENTS], dp[FRAGMENTS];
        multiply_rows<D_WORDS, FRAGMENTS, NT>(s, sh.own.a + warp_row * A_ROW, now.rows.a);
        if (HAS_DS) multiply_rows<DV_WORDS, FRAGMENTS, NT>(dp, sh.own.b + warp_row * B_ROW, now.rows.b);
        else
#pragma unroll
            for (int mt = 0; mt < FRAGMENTS; mt++) zero(dp[mt]);
        const int own_row = warp_row + lane_row((int)threadIdx.x), streamed_row = lane_column((int)threadIdx.x);
        const u32 kept = kept_weights(p, block, tiles, warp_row);
        if (PASS == KEYS) {
#pragma unroll
            for (int column = 0; column < NT * 2; column++) {
                const int nt = column / 2, e = column % 2, r = nt * 8 + streamed_row + e;
                const Query query(p, block, now.states[r], tiles.head, tiles.n0 + r);
#pragma unroll
                for (int row = 0; row < FRAGMENTS * 2; row++) {
                    const int mt = row / 2, at = row % 2 * 2 + e;
                    const bool is_kept = kept >> ((mt * NT + nt) * 4 + at) & 1;
                    weigh<CAREFUL>(p, query, first + own_row + row * 8, s[mt][nt][at], dp[mt][nt][at], is_kept);
                }
            }
        } else {
#pragma unroll
            for (int row = 0; row < FRAGMENTS * 2; row++) {
                const Query query(p, block, sh.states[own_row + row * 8], block.head, first + own_row + row * 8);
#pragma unroll
                for (int column = 0; column < NT * 2; column++) {
                    const int mt = row / 2, nt = column / 2, at = row % 2 * 2 + column % 2;
                    const bool is_kept = kept >> ((mt * NT + nt) * 4 + at) & 1;
                    weigh<CAREFUL>(p, query, tiles.n0 + nt * 8 + streamed_row + column % 2, s[mt][nt][at], dp[mt][nt][at], is_kept);
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
        if constexpr (CAREFUL) {
            if constexpr (HAS_DS) add_non_finite<D, FRAGMENTS, NT>(by_ds.of, dp, now.rows.a);
            if constexpr (HAS_P) add_non_finite<DV, FRAGMENTS, NT>(by_p.of, s, now.rows.b);
            __syncthreads();
            clear_non_finite<THREADS>(now.rows.a, BN * A_ROW), clear_non_finite<THREADS>(now.rows.b, BN * B_ROW);
            __syncthreads();
        }
        if constexpr (HAS_P) add_rows<DV, FRAGMENTS, NT>(by_p.of, s, now.rows.b);
        if constexpr (HAS_DS) add_rows<D, FRAGMENTS, NT>(by_ds.of, dp, now.rows.a);
        is_left = tiles.next();
        __syncthreads();
    }
    cp_async_wait<0>();
    return CAREFUL || !__syncthreads_or(by_ds.has_non_finite() || by_p.has_non_finite());
}

// Rows of the gradients.
template <class ByDs, class ByP>
__device__ inline void store(const BackwardParams& b, const Shared& sh, const ByDs& by_ds, const ByP& by_p) {
    const Params& p = b.all;
    const Block block(b, block_at(sh));
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

// Rare: its code is apart.
template <class ByDs, class ByP>
__device__ __noinline__ void run_carefully(const BackwardParams& b, Shared& sh) {
    ByDs by_ds;
    ByP by_p;
    attend<true>(b, sh, by_ds, by_p);
    store(b, sh, by_ds, by_p);
}

template <class ByDs, class ByP>
__device__ inline void run(const BackwardParams& b, Shared& sh) {
    ByDs by_ds;
    ByP by_p;
    if (attend<false>(b, sh, by_ds, by_p)) store(b, sh, by_ds, by_p);
    else run_carefully<ByDs, ByP>(b, sh);
}

#if AGAIN
// The next block of a launch of all, from the given one on, whose head is to be computed again; false if there is none.
__device__ inline bool next_again(const BackwardParams& b, Shared& sh, u32 at) {
    for (; at < (u32)b.again; at += gridDim.x) {
        const Block block(b, at);
        if (is_odd(b, block.batch, block.kv_head)) break;
    }
    // Tiles of the block before have been read when those of this one come.
    __syncthreads();
    sh.at = at;
    __syncthreads();
    return at < (u32)b.again;
}
#endif

__device__ inline void run_block(const BackwardParams& b, Shared& sh) {
#if VARLEN
    if (Block(b, block_at(sh)).own.rows <= 0) return;
#endif
#if PASS == QUERIES
    run<Sums<D>, NoSums>(b, sh);
#elif SPLIT
    if (block_at(sh) % 2 == 0) {
        if (b.dk != nullptr) run<Sums<D>, NoSums>(b, sh);
    } else if (b.dv != nullptr) {
        run<NoSums, Sums<DV>>(b, sh);
    }
#else
    run<Sums<D>, Sums<DV>>(b, sh);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward(const __grid_constant__ BackwardParams b) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
#if AGAIN
    if (!is_any_odd(b)) return;
#pragma unroll 1
    for (u32 at = blockIdx.x; next_again(b, sh, at); at = sh.at + gridDim.x) run_block(b, sh);
#else
    run_block(b, sh);
#endif
}
