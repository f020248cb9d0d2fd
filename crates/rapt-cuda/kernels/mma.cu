// Attention on the tensor cores by mma.sync, for many queries.
//
//   4 warps, each 16*MT rows of a tile of BLOCK_M = 64*MT queries; keys in blocks of BLOCK_N from key 0:
//     wait for K; begin V             s = q @ K.T
//     wait for V; begin the next K    s -> p, acc_o rescaled
//                                     acc_o += p @ V
//
// One buffer each for Q, K and V: while one product runs, the operand of the other is on its way, and a second block on the
// same multiprocessor fills what is left. Rows do not depend on one another, and blocks of keys do not depend on the rows.
// Rows and columns that cp.async cannot move (16-byte alignment, inner stride 1) are loaded element by element into the
// same tiles: the bits are the same. Rows that lie in pages are gathered, and looked up a tile ahead (common/gather.cuh).
// K and V that are codes (CODES) come a tile ahead as they lie; each becomes a number in the same tiles when its turn has come
// (mma/coded_tiles.cuh):
//
//     wait for K and V; make numbers of them; begin the next            s = q @ K.T    s -> p    acc_o += p @ V
//
// Deliberately absent: splitting of the keys (decode.cu).

#include "common/dropout.cuh"
#include "common/gather.cuh"
#include "common/scores.cuh"
#include "common/online_softmax.cuh"
#include "common/epilogue.cuh"
#if CODES
#include "mma/coded_tiles.cuh"
#include "mma/weighed_softmax.cuh"
#else
constexpr int K_TERMS = 1, V_TERMS = 1;
#endif

constexpr int THREADS = 128, BM = BLOCK_M, BN = BLOCK_N, FRAGMENTS = BM / 64, NT = BN / 8;

constexpr int OUT_ROW = DV + 4;  // floats

struct Shared {
    union {
        struct {
            Elem q[BM * K_ROW], k[K_TERMS * BN * K_ROW], v[V_TERMS * BN * V_ROW];
#if CODES
            CodedStages codes;
#endif
        };
        float out[4][16 * OUT_ROW];
    };
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and mma.cu disagree on shared memory");

using Place = RowBlock<BM>;

// Weights of keys n0.. become zeros where they are dropped. Rows of a block are of one head.
template <int MT>
__device__ inline void drop(OperandA<NT / 2> (&weights)[MT], const Queries& queries, int n0) {
#if DROPOUT
    const DroppingHead head(queries.p.dropping, queries.task.dropping_batch(), queries.task.head);
    const auto halves = [&](u32 low, u32 high) {
        return (head.keeps(low) ? 0xffffu : 0x8000u) | (head.keeps(high) ? 0xffff0000u : 0x80000000u);
    };
#pragma unroll
    for (int kt = 0; kt < NT / 2; kt++)
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const PhiloxBlock of = head.block(queries.row(mt, h).i, n0 / 4 + kt * 4 + (int)threadIdx.x % 4);
                weights[mt][kt][operand_word(0, h)] &= halves(of.word[0], of.word[1]);
                weights[mt][kt][operand_word(1, h)] &= halves(of.word[2], of.word[3]);
            }
#endif
}

#if PAGED && !CODES
// Where column c of row r of a tile stands.
template <int WIDTH>
struct TilePlace {
    Elem* tile;
    __device__ Elem* operator()(int r, int c) const { return tile + place<WIDTH>(r, c & ~7) + c % 8; }
};

// Tiles of K and V out of pages, in the order in which a block takes them: the keys of a tile, then its values.
struct PagedTiles {
    const Params& p;
    const Task& task;
    Shared& sh;
    GatheredRows<BN> here{}, ahead{};
    int from = -1;  // the first key of the tile that is looked up ahead

    __device__ void load_keys(int n0) {
        if (n0 != from) ahead.find(p, task, n0);
        here = ahead;
        load<D>(sh.k, p.k, p.k_stride, n0, p.head_dim);
    }
    __device__ void load_values(int n0) {
        load<DV>(sh.v, p.v, p.v_stride, n0, p.head_dim_v);
        from = n0 + BN;
        ahead.find(p, task, from);
    }

  private:
    template <int WIDTH>
    __device__ void load(Elem* tile, const void* base, const i64 (&stride)[4], int n0, int dim) const {
        const Elem* head = (const Elem*)base + kv_head(p, task) * stride[1];
        here.load<WIDTH, VECTOR ? 8 : 1>(p, head, stride, task.sequence.kv_len(p) - n0, dim, TilePlace<WIDTH>{tile});
        cp_async_commit();
    }
};
#endif

// The block's index, read again: what is computed from it a second time takes no register meanwhile.
__device__ inline u32 reread_ctaid() {
    u32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

// 16 rows of a warp, from shared memory.
__device__ inline void store_rows(const Params& p, const Task& task, int r0, const float* staged, int lane) {
    const int rows = min(16, task.rows(p) - r0);
    if (p.out_vector) {
        const int units = p.head_dim_v / 8;
        int r = lane / units, c = lane % units;
#pragma unroll 1
        while (r < rows) {
            const float* x = staged + r * OUT_ROW + c * 8;
            const uint4 packed = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
            *(uint4*)((Elem*)p.out + Row(p, task, r0 + r).offset(p.out_stride) + c * 8) = packed;
            c += 32;
            while (c >= units) c -= units, r++;
        }
    } else {
#pragma unroll 1
        for (int at = lane; at < rows * p.head_dim_v; at += 32) {
            const int r = at / p.head_dim_v, c = at % p.head_dim_v;
            const i64 to = Row(p, task, r0 + r).offset(p.out_stride) + c * p.out_stride[3];
            store_as(p.out, p.out_dtype, to, staged[r * OUT_ROW + c]);
        }
    }
}

// A fragment at a time through shared memory, so that whole rows are written; in loops, since straight code that runs
// once a block is fetched from far away.
template <int MT, class Softmax>
__device__ inline void store_fragments(const Params& p, Shared& sh, const Softmax& softmax, int first_fragment) {
    __syncthreads();
    const Place again(p, reread_ctaid());
    const int lane = threadIdx.x % 32, warp_again = threadIdx.x / 32, warp_r0 = again.r0 + (warp_again * FRAGMENTS + first_fragment) * 16;
    float* staged = sh.out[warp_again];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = lane / 4 + h * 8;
            const Row row(p, again.task, min(warp_r0 + mt * 16 + r, again.task.rows(p) - 1));
#if CODES
            const float l = softmax.row_sum[mt][h] * WEIGHT_UNIT, row_max = softmax.natural_max_of(p, mt, h);
#else
            const float l = softmax.row_sum[mt][h], row_max = natural_max(p, softmax.row_max[mt][h]);
#endif
            const RowEnd row_end(p, row, row_max, l);
            if (lane % 4 == 0 && warp_r0 + mt * 16 + r < again.task.rows(p)) store_lse(p, row, row_end);
#pragma unroll
            for (int nt = 0; nt < DV / 8; nt++) {
                const float* pair = &softmax.acc_o[mt][nt][h * 2];
                float2 x = {row_end.normalise(l, pair[0]), row_end.normalise(l, pair[1])};
#if CODES
                const int column = nt * 8 + lane_column((int)threadIdx.x);
                x.x *= column_factor(p, again.task, column) * WEIGHT_UNIT, x.y *= column_factor(p, again.task, column + 1) * WEIGHT_UNIT;
#endif
                *(float2*)(staged + r * OUT_ROW + nt * 8 + lane_column(lane)) = x;
            }
        }
        __syncwarp();
        store_rows(p, again.task, warp_r0 + mt * 16, staged, lane);
        __syncwarp();
    }
}

// Computes MT fragments of each warp from its fragment `first_fragment` on; false if a sum is not finite, with nothing
// written (never if CAREFUL).
template <bool CAREFUL, int MT>
__device__ inline bool attend(const Params& p, Shared& sh, int first_fragment) {
    const int tid = threadIdx.x, warp = tid / 32;
    const Place place(p, blockIdx.x);
    const int r0 = place.r0;
    const Task& task = place.task;
    const int rows = min(BM, task.rows(p) - r0);
#if !CODES
    const Elem* k = (const Elem*)p.k + task.batch * p.k_stride[0] + kv_head(p, task) * p.k_stride[1] +
                    task.sequence.first_key() * p.k_stride[2];
    const Elem* v = (const Elem*)p.v + task.batch * p.v_stride[0] + kv_head(p, task) * p.v_stride[1] +
                    task.sequence.first_key() * p.v_stride[2];
#endif

    if (p.task_heads == 1) {
        const Elem* q = (const Elem*)p.q + Row(p, task, r0).offset(p.q_stride);
        load_even_tile<BM, D, THREADS>(sh.q, {q, p.q_stride[3], p.q_stride[2], rows, p.head_dim}, tid);
    } else {
        const auto offset = [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); };
        load_tile<BM, D, THREADS>(sh.q, {(const Elem*)p.q, p.q_stride[3], p.q_stride[2], rows, p.head_dim}, offset, tid);
    }
#if CODES
    CodedTiles tiles(p, task, sh.codes);
#elif PAGED
    PagedTiles tiles{p, task, sh};
    auto load_next_k = [&](int n0) { tiles.load_keys(n0); };
    auto load_next_v = [&](int n0) { tiles.load_values(n0); };
#else
    auto load_next_k = [&](int n0) {
        const SourceRows k_rows{k, p.k_stride[3], p.k_stride[2], task.sequence.kv_len(p) - n0, p.head_dim};
        load_even_tile<BN, D, THREADS>(sh.k, k_rows, tid);
        cp_async_commit();
        k += BN * p.k_stride[2];
    };
    auto load_next_v = [&](int n0) {
        const SourceRows v_rows{v, p.v_stride[3], p.v_stride[2], task.sequence.kv_len(p) - n0, p.head_dim_v};
        load_even_tile<BN, DV, THREADS>(sh.v, v_rows, tid);
        cp_async_commit();
        v += BN * p.v_stride[2];
    };
#endif

    const Seen seen(p, task, r0, r0 + rows);
    const int start = seen.lo / BN * BN;
    const float c = exponent_factor(p);
    const int warp_row = warp * 16 * FRAGMENTS + first_fragment * 16;
    const Queries queries{p, task, r0 + warp_row};

    // Without keys nothing else would wait for Q, and its copies would land on the rows that are staged in its place.
#if CODES
    WeighedSoftmax<MT> softmax;
    softmax.clear();
    tiles.begin(start);
    start < seen.hi ? tiles.load(start) : cp_async_commit();
#else
    OnlineSoftmax<MT> softmax;
    softmax.clear();
    k += start * p.k_stride[2], v += start * p.v_stride[2];
    start < seen.hi ? load_next_k(start) : cp_async_commit();
#endif
    for (int n0 = start; n0 < seen.hi; n0 += BN) {
        cp_async_wait<0>();
        __syncthreads();
#if CODES
        tiles.to_numbers<CAREFUL>(sh.k, sh.v, n0);
        if (n0 + BN < seen.hi) tiles.load(n0 + BN);
#else
        load_next_v(n0);
#endif
        Accumulator<NT> s[MT];
        MaskTile<MT, NT> mask;
        mask.fetch(p, queries, n0);
        multiply_keys<MT, NT>(s, sh.q + warp_row * K_ROW, sh.k);
#if CODES
        if constexpr (K_TERMS == 2) multiply_keys<MT, NT, true>(s, sh.q + warp_row * K_ROW, sh.k + BN * K_ROW);
        tiles.multiply_scores<MT, NT>(s);
#endif
        const bool positions = n0 < seen.all_lo || n0 + BN > seen.all_hi;
        if (NATURAL || MASK != NO_MASK || positions) {
            apply_scores<MT, NT>(s, p, queries, mask, n0, task.sequence.kv_len(p), positions);
        }
        OperandA<NT / 2> p_rounded[MT];
#if CODES
        softmax.template add_keys<CAREFUL, NT>(p_rounded, s, sh.codes, c, SLACK);
        if constexpr (V_TERMS == 2) softmax.template add_values<CAREFUL, NT / 2>(p_rounded, sh.v + BN * V_ROW);
#else
        cp_async_wait<0>();
        __syncthreads();
        if (n0 + BN < seen.hi) load_next_k(n0 + BN);
        softmax.template add_keys<CAREFUL, NT>(p_rounded, s, c, SLACK);
#endif
        drop<MT>(p_rounded, queries, n0);
        softmax.template add_values<CAREFUL, NT / 2>(p_rounded, sh.v);
    }
    cp_async_wait<0>();
    if (!CAREFUL && __syncthreads_or(softmax.has_non_finite())) return false;
    softmax.reduce();

    store_fragments<MT>(p, sh, softmax, first_fragment);
    return true;
}

// A fragment at a time: this is rare, and its code should be small.
__device__ __noinline__ void attend_carefully(const Params& p, Shared& sh) {
    for (int fragment = 0; fragment < FRAGMENTS; fragment++) {
        attend<true, 1>(p, sh, fragment);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
#if VARLEN
    if (is_beyond(p, blockIdx.x)) return;
#endif
    if (!attend<false, FRAGMENTS>(p, sh, 0)) attend_carefully(p, sh);
}
