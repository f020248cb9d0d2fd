// Gradients of float32 on the tensor cores of compute capability 9.0, by two f16 for each number (hopper/halves.cuh), in the passes of
// backward/pairs.cuh.
//
//   warpgroup 0, 3   streamed rows of q or k, of d_o or v: from memory, through registers, split into the swizzle_128b tiles of a ring
//   warpgroup 1, 2   64 own rows each, split once; per tile of 64 streamed rows
//
//     s = own @ streamed.T, dp = own @ streamed.T      times the powers of both rows
//     s, dp -> p, ds                                   backward/pairs.cuh
//     part = p @ streamed, or ds @ streamed            weights times the powers of streamed rows, split under a power of the largest of an own row
//     sums += part * power
//
// A part is summed by itself: the sum inside the tensor cores cuts bits off, which a long one would show. What cannot be read 16 bytes at a time is
// read element by element into the same tiles: the bits are the same.
// Of heads with more than 64 columns registers hold one sum: dk, dv and dq take eight products where five would do with sums that blocks hand over.
// They are three for one of halves, and no wait for another block is among them.
// A head with a sum that is not finite is noted: backward_mma.cu computes it again.
// Deliberately absent: head dims above 128, gradients of masks and sinks (backward.cu, backward_rows.cu).

#define ROW_WARPS 8
#define FIRST_ROW_WARP 4
#include "backward/pairs.cuh"
#include "hopper/halves.cuh"
#include "hopper/tma.cuh"

constexpr int THREADS = 512, STREAMING = 128;
constexpr int A_BOXES = (D + BOX - 1) / BOX, B_BOXES = (DV + BOX - 1) / BOX;
constexpr int LAST_A = D - (A_BOXES - 1) * BOX, LAST_B = DV - (B_BOXES - 1) * BOX;
static_assert(BM == 128 && BN == 64, "two warpgroups of 64 own rows, tiles of 64 streamed rows");
static_assert(LAST_A == LAST_COLUMNS && LAST_B == LAST_COLUMNS_V, "the host and backward_halves.cu disagree on the last box");

DEFINE_WGMMA_QK(multiply_rows, BLOCK_N)
DEFINE_WGMMA_PV(multiply_box, 64)
DEFINE_WGMMA_PV(multiply_last_a, LAST_COLUMNS)
DEFINE_WGMMA_PV(multiply_last_b, LAST_COLUMNS_V)

struct Shared {
    // a: rows of q and k, b: rows of d_o and v. Own ones of each warpgroup, and a ring of streamed ones.
    u8 own_a[2][2][A_BOXES][BOX_BYTES], own_b[2][2][B_BOXES][BOX_BYTES];
    u8 a[A_STAGES][2][A_BOXES][BOX_BYTES], b[1][2][B_BOXES][BOX_BYTES];
    RowState states[PASS == KEYS ? BN : 1];  // of the queries of b
    float own_a_down[2][64], own_b_down[2][64], a_down[A_STAGES][BN], b_down[1][BN];
    u64 a_full[A_STAGES], a_empty[A_STAGES], b_full[1], b_empty[1];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and backward_halves.cu disagree on shared memory");

// Rows of a tensor that tiles are loaded from: of the block's batch entry, from a sequence's first row on.
struct Source {
    const float* base;
    const i64 (&stride)[4];
    int rows, dim;
    __device__ const float* row(int head, int r) const { return base + head * stride[1] + r * stride[2]; }
};
__device__ inline Source source_of(const void* base, const i64 (&stride)[4], const Block& block, int first, int rows, int dim) {
    return {(const float*)base + block.batch * stride[0] + first * stride[2], stride, rows, dim};
}
// Which tensors they are: own or streamed, a or b.
template <bool OWN, bool A>
__device__ inline Source source_of(const BackwardParams& b, const Block& block) {
    const Params& p = b.all;
    const Sequence& of = block.own.sequence;
    if constexpr (OWN == (PASS == KEYS)) {
        if (A) return source_of(p.k, p.k_stride, block, of.first_key(), of.kv_len(p), p.head_dim);
        return source_of(p.v, p.v_stride, block, of.first_key(), of.kv_len(p), p.head_dim_v);
    } else {
        if (A) return source_of(p.q, p.q_stride, block, of.first_query(), of.q_len(p), p.head_dim);
        return source_of(b.d_o, b.d_o_stride, block, of.first_query(), of.q_len(p), p.head_dim_v);
    }
}

// A ring of streamed tiles.
template <int BOXES, int N>
struct Streamed {
    u8 (&tiles)[N][2][BOXES][BOX_BYTES];
    float (&down)[N][BN];
    u64 (&full)[N];
    u64 (&empty)[N];
};

// The tiles of a block, QUARTERS of one under way while the next is split. With states of queries beside b.
template <bool A, int BOXES, int N>
__device__ inline void stream(const BackwardParams& b, const Block& block, const Streamed<BOXES, N>& to, RowState* states) {
    const int lane = threadIdx.x % 128;
    const Source from = source_of<false, A>(b, block);
    Quarter<BOXES> part[QUARTERS];
    Tiles ahead(b, block);
    bool is_ahead = ahead.has_any();
    const auto load_next = [&](Quarter<BOXES>& next, int n) {
        const int r = ahead.n0 + Quarter<BOXES>::first_row(lane) + Quarter<BOXES>::ahead(n);
        next.load(from.row(PASS == KEYS ? ahead.head : block.kv_head, r), is_ahead && r < from.rows, from.stride[3], from.dim, lane);
        if (n == 3 && is_ahead) is_ahead = ahead.next();
    };
    Ring<N> ring;
#pragma unroll
    for (int n = 0; n < QUARTERS; n++) load_next(part[n], n);
#pragma unroll 1
    for (int left = ahead.count(); left > 0; left--) {
        RowState state = {positive_infinity(), 0, 0, 1};
        if (PASS == KEYS && !A) {
            const int i = ahead.n0 + lane;
            if (lane < BN && i < from.rows) state = b.states[state_index(b.all, block.batch, ahead.head, block.own.sequence.first_query() + i)];
        }
        mbarrier_wait(to.empty[ring.at], ring.phase ^ 1);
        if (PASS == KEYS && !A && lane < BN) states[lane] = state;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            part[n % QUARTERS].store(false, to.tiles[ring.at], to.down[ring.at], lane, n);
            load_next(part[n % QUARTERS], (n + QUARTERS) % 4);
        }
        fence_proxy_async();
        mbarrier_arrive(to.full[ring.at]);
        ring.next();
    }
}

// A warpgroup's own rows: split, into its tiles.
template <bool A, int BOXES>
__device__ inline void load_own(
    const BackwardParams& b, const Block& block, u8 (&tiles)[2][BOXES][BOX_BYTES], float* down, int group
) {
    const int lane = threadIdx.x % 128;
    const Source from = source_of<true, A>(b, block);
    Quarter<BOXES> part;
#pragma unroll 1
    for (int n = 0; n < 4; n++) {
        const int r = group * 64 + Quarter<BOXES>::first_row(lane) + Quarter<BOXES>::ahead(n);
        const bool inside = r < block.own.rows;
        part.load(from.row(PASS == KEYS ? block.kv_head : block.head, block.own.first + r), inside, from.stride[3], from.dim, lane);
        part.store(false, tiles, down, lane, n);
    }
}

// Products of halves become those of their numbers.
__device__ inline void scale_rows(Accumulator<NT>& x, const float* own_down, const float* down) {
    const int row = reread_tid() % 128 / 32 * 16 + lane_row(reread_tid());
    const float own[2] = {own_down[row], own_down[row + 8]};
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const float2 of = *(const float2*)(down + nt * 8 + lane_column(reread_tid()));
#pragma unroll
        for (int e = 0; e < 4; e++) x[nt][e] = x[nt][e] * own[e / 2] * (e % 2 ? of.y : of.x);
    }
}

// sums += w.rows over the columns of a tile.
template <int BOXES, int LAST, int ALL, class MultiplyLast>
__device__ inline void add_rows(
    Accumulator<ALL>& sums, Accumulator<NT>& w, const float* down, const u8 (&rows)[2][BOXES][BOX_BYTES], MultiplyLast multiply_last
) {
    u32 top[2] = {};
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const float2 of = *(const float2*)(down + nt * 8 + lane_column(reread_tid()));
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float& x = w[nt][e];
            x *= e % 2 ? of.y : of.x;
            top[e / 2] = max(top[e / 2], __float_as_uint(x) & 0x7fffffffu);
        }
    }
    OperandA<KT> halves[2];
    float downs[2];
    const Weights<KT> weights{halves, downs};
    split_weights(weights, w, top);
    if constexpr (BOXES > 1) add_box<0, 8>(sums, weights, rows[0][0], rows[1][0], multiply_box);
    add_box<(BOXES - 1) * 8, LAST / 8>(sums, weights, rows[0][BOXES - 1], rows[1][BOXES - 1], multiply_last);
}

// By a warpgroup that multiplies: `by_ds` with streamed rows of a, `by_p` with those of b.
template <class ByDs, class ByP>
__device__ inline void multiply(const BackwardParams& b, Shared& sh, ByDs& by_ds, ByP& by_p) {
    constexpr bool HAS_DS = !is_same<ByDs, NoSums>, HAS_P = !is_same<ByP, NoSums>;
    const Params& p = b.all;
    const Block block(b, blockIdx.x);
    const int group = uniform(threadIdx.x / 128) - 1;
    load_own<true>(b, block, sh.own_a[group], sh.own_a_down[group], group);
    if (HAS_DS) load_own<false>(b, block, sh.own_b[group], sh.own_b_down[group], group);
    fence_proxy_async();
    bar_sync(1 + group, 128);
    by_ds.clear(), by_p.clear();
    Tiles tiles(b, block);
    Ring<A_STAGES> a;
    Ring<1> of_b;
    // Of the own query a thread has, where it has some.
    const auto state_of = [&](int r) -> RowState {
        if (PASS == KEYS) return sh.states[r];
        return b.states[state_index(p, block.batch, block.head, block.own.sequence.first_query() + block.own.first + min(r, block.own.rows - 1))];
    };
#pragma unroll 1
    for (int left = tiles.count(); left > 0; left--) {
        Accumulator<NT> s[1], dp[1];
        mbarrier_wait(sh.a_full[a.at], a.phase);
        multiply_halves<D>(s[0], sh.own_a[group], sh.a[a.at], multiply_rows);
        mbarrier_wait(sh.b_full[0], of_b.phase);
        if constexpr (HAS_DS) {
            multiply_halves<DV>(dp[0], sh.own_b[group], sh.b[0], multiply_rows);
            wgmma_wait<1>(s[0]);
            scale_rows(s[0], sh.own_a_down[group], sh.a_down[a.at]);
            wgmma_wait<0>(dp[0]);
            scale_rows(dp[0], sh.own_b_down[group], sh.b_down[0]);
        } else {
            wgmma_wait<0>(s[0]);
            scale_rows(s[0], sh.own_a_down[group], sh.a_down[a.at]);
            zero(dp[0]);
        }
        weigh_tile<false>(p, block, tiles, s, dp, state_of);
        if constexpr (HAS_P) add_rows<B_BOXES, LAST_B>(by_p.of[0], s[0], sh.b_down[0], sh.b[0], multiply_last_b);
        mbarrier_arrive(sh.b_empty[0]);
        of_b.next();
        if constexpr (HAS_DS) add_rows<A_BOXES, LAST_A>(by_ds.of[0], dp[0], sh.a_down[a.at], sh.a[a.at], multiply_last_a);
        mbarrier_arrive(sh.a_empty[a.at]);
        a.next();
        tiles.next();
    }
}

template <class ByDs, class ByP>
__device__ inline void run(const BackwardParams& b, Shared& sh) {
    ByDs by_ds;
    ByP by_p;
    multiply(b, sh, by_ds, by_p);
    const Block block(b, blockIdx.x);
    if (by_ds.has_non_finite() || by_p.has_non_finite()) note_odd(b, entry_of(block.batch, block.own.sequence), block.kv_head);
    store(b, block, by_ds, by_p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ BackwardParams b) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const Block block(b, blockIdx.x);
#if VARLEN
    if (block.own.rows <= 0) return;
#endif
    if (threadIdx.x == 0) {
        for (int at = 0; at < A_STAGES; at++) mbarrier_init(sh.a_full[at], STREAMING), mbarrier_init(sh.a_empty[at], ROW_WARPS * 32);
        mbarrier_init(sh.b_full[0], STREAMING), mbarrier_init(sh.b_empty[0], ROW_WARPS * 32);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int group = uniform(threadIdx.x / 128);
    if (group == 0) {
        setmaxnreg_dec<LOADING_REGISTERS>();
        stream<true>(b, block, Streamed<A_BOXES, A_STAGES>{sh.a, sh.a_down, sh.a_full, sh.a_empty}, nullptr);
    } else if (group == 3) {
        setmaxnreg_dec<LOADING_REGISTERS>();
        stream<false>(b, block, Streamed<B_BOXES, 1>{sh.b, sh.b_down, sh.b_full, sh.b_empty}, sh.states);
    } else {
        setmaxnreg_inc<MULTIPLYING_REGISTERS>();
#if PASS == QUERIES
        run<Sums<D>, NoSums>(b, sh);
#elif SPLIT
        if (blockIdx.x % 2 == 0) run<Sums<D>, NoSums>(b, sh);
        else run<NoSums, Sums<DV>>(b, sh);
#else
        run<Sums<D>, Sums<DV>>(b, sh);
#endif
    }
}
