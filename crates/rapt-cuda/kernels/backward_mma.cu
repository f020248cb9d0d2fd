// Gradients of float16, bfloat16 and float32 on the tensor cores by mma.sync: passes of one scheme, whose own rows stay and others stream by.
//
//   PASS KEYS      own: keys, streamed: queries that see them, of all heads of the group      dv += P^T.d_o, dk += dS^T.q
//   PASS QUERIES   own: queries, streamed: keys that they see                                 dq += dS.k
//   PASS OF_MASK   own: queries, streamed: keys, one tile of each for all that a mask is broadcast to, or a part of that      d_mask += dS
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
// Of a mask, dS is not rounded, and no product has its pairs: none is computed again. Where a tile of a mask is one of a head, both of its operands
// are read for two products: blocks that share a multiprocessor load while others multiply, and STAGES is 1.
// Deliberately absent: gradients of sinks (backward_rows.cu).

#include "backward/pairs.cuh"
#include "backward/products.cuh"

#ifndef AGAIN
#define AGAIN 0
#endif
constexpr int THREADS = 128;

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
    RowState states[PASS == KEYS ? 1 : BM];
#if PASS == OF_MASK
    BiasTile<BM, BN> biases;
#endif
#if AGAIN
    u32 at;  // which block of a launch of all this is
#endif
};
#if PASS == OF_MASK
// Sums of a tile as they are written.
struct MaskSums {
    float of[BM][BN + 1];
};
static_assert((sizeof(Shared) > sizeof(MaskSums) ? sizeof(Shared) : sizeof(MaskSums)) == SHARED_BYTES, "the host and backward_mma.cu disagree on shared memory");
#else
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and backward_mma.cu disagree on shared memory");
#endif

__device__ inline u32 block_at(const Shared& sh) {
#if AGAIN
    return sh.at;
#else
    return blockIdx.x;
#endif
}

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

// The sums of a block: `by_ds` with streamed rows of q or k, `by_p` with those of d_o; false if one is not finite (never if CAREFUL).
template <bool CAREFUL, class ByDs, class ByP>
__device__ inline bool attend(const BackwardParams& b, Shared& sh, ByDs& by_ds, ByP& by_p) {
    constexpr bool HAS_DS = !is_same<ByDs, NoSums>, HAS_P = !is_same<ByP, NoSums>;
    const Params& p = b.all;
    const Block block(b, block_at(sh));
    const int first = block.own.first;
    Tiles tiles(b, block);
    const int warp_row = first_own_row();
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
        weigh_tile<CAREFUL>(p, block, tiles, s, dp, [&](int r) -> const RowState& { return PASS == KEYS ? now.states[r] : sh.states[r]; });
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

// Rare: its code is apart.
template <class ByDs, class ByP>
__device__ __noinline__ void run_carefully(const BackwardParams& b, Shared& sh) {
    ByDs by_ds;
    ByP by_p;
    attend<true>(b, sh, by_ds, by_p);
    store(b, Block(b, block_at(sh)), by_ds, by_p);
}

template <class ByDs, class ByP>
__device__ inline void run(const BackwardParams& b, Shared& sh) {
    ByDs by_ds;
    ByP by_p;
    if (attend<false>(b, sh, by_ds, by_p)) store(b, Block(b, block_at(sh)), by_ds, by_p);
    else run_carefully<ByDs, ByP>(b, sh);
}

#if AGAIN
// The next block of a launch of all, from the given one on, whose head is to be computed again; false if there is none.
__device__ inline bool next_again(const BackwardParams& b, Shared& sh, u32 at) {
    for (; at < (u32)b.again; at += gridDim.x) {
        const Block block(b, at);
        if (is_odd(b, entry_of(block.batch, block.own.sequence), block.kv_head)) break;
    }
    // Tiles of the block before have been read when those of this one come.
    __syncthreads();
    sh.at = at;
    __syncthreads();
    return at < (u32)b.again;
}
#endif

#if PASS == OF_MASK
#if STORAGE == F32
// Products that are not finite, once more without parts: of an infinity TF32 leaves NaN.
template <int WIDTH>
__device__ inline void again_if_not_finite(Accumulator<NT> (&s)[FRAGMENTS], u16* own, u16* streamed) {
    const int row = first_own_row() + lane_row((int)threadIdx.x), column = lane_column((int)threadIdx.x);
#pragma unroll
    for (int mt = 0; mt < FRAGMENTS; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (is_finite(s[mt][nt][e])) continue;
                float sum = 0;
#pragma unroll 1
                for (int c = 0; c < WIDTH / WORDS; c++) {
                    const float x = *element<WIDTH>(own, row + mt * 16 + e / 2 * 8, c), y = *element<WIDTH>(streamed, column + nt * 8 + e % 2, c);
                    sum = __fmaf_rn(x, y, sum);
                }
                s[mt][nt][e] = sum;
            }
}
#endif

// A tile of the gradient of a mask, or a block's part of it.
__device__ inline void run_mask(const BackwardParams& b, Shared& sh) {
    const SummedTile<BM, BN> tile(b, blockIdx.x);
    Stage& streamed = sh.stages[0];
    Accumulator<NT> sums[FRAGMENTS];
#pragma unroll
    for (int mt = 0; mt < FRAGMENTS; mt++) zero(sums[mt]);
    tile.load<THREADS>(b.all, sh.biases);
    const int warp_row = first_own_row();
#pragma unroll 1
    for (u32 n = tile.first; n < tile.end; n++) {
        const auto of = tile.at(n);
        const Block block(b, of.batch, of.head, of.query);
        Tiles tiles(b, block);
        bool has_queries = false;
#pragma unroll 1
        for (int key = tile.key; key < tile.key_end; key++) {
            if (!tiles.seek(key)) continue;
            if (!has_queries) {
                load_queries<BM>(b, sh.own, block, of.head, block.own.first);
                load_states<BM>(b, sh.states, block, of.head, block.own.first);
            }
            has_queries = true;
            load_keys<BN>(b, streamed.rows, block, tiles.n0);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
            Accumulator<NT> s[FRAGMENTS], dp[FRAGMENTS];
            multiply_rows<D_WORDS, FRAGMENTS, NT>(s, sh.own.a + warp_row * A_ROW, streamed.rows.a);
            multiply_rows<DV_WORDS, FRAGMENTS, NT>(dp, sh.own.b + warp_row * B_ROW, streamed.rows.b);
#if STORAGE == F32
            again_if_not_finite<D_WORDS>(s, sh.own.a, streamed.rows.a), again_if_not_finite<DV_WORDS>(dp, sh.own.b, streamed.rows.b);
#endif
            weigh_tile<true>(b.all, block, tiles, s, dp, [&](int r) -> const RowState& { return sh.states[r]; }, sh.biases);
#pragma unroll
            for (int mt = 0; mt < FRAGMENTS; mt++)
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sums[mt][nt][e] += dp[mt][nt][e];
            __syncthreads();
        }
    }
    // Where nobody attends, biases were written last.
    __syncthreads();
    MaskSums& written = (MaskSums&)sh;
    const int row = warp_row + lane_row((int)threadIdx.x), column = lane_column((int)threadIdx.x);
#pragma unroll
    for (int mt = 0; mt < FRAGMENTS; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) written.of[row + mt * 16 + e / 2 * 8][column + nt * 8 + e % 2] = sums[mt][nt][e];
    __syncthreads();
    tile.store<THREADS>(b, [&](int row, int column) { return written.of[row][column]; });
}
#else
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
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward(const __grid_constant__ BackwardParams b) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
#if AGAIN
    // Not where the next launch is somebody else's.
    if (PASS == KEYS && b.dq != nullptr) griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (!is_any_odd(b)) return;
#pragma unroll 1
    for (u32 at = blockIdx.x; next_again(b, sh, at); at = sh.at + gridDim.x) run_block(b, sh);
#elif PASS == OF_MASK
    run_mask(b, sh);
#else
    run_block(b, sh);
#endif
}
