// wide.cu of 16-bit numbers: its products by wgmma (compute capability 9.0) or mma.sync, p rounded to the storage dtype.
//
// Of wgmma the four warps of one half are a group: they multiply their 64 queries with the group's keys, and p, which each warp has in
// registers, with the group's columns. Lanes hold what they hold of mma.sync.

#pragma once
#include "common/online_softmax.cuh"
#include "wide/boxes.cuh"

#if STORAGE == F16 || STORAGE == BF16
// By how many powers of 2 a maximum may rise before sums are rescaled.
constexpr float RISE = SLACK;

// p of a warp's 16 rows and a tile of keys, in shared memory: an operand for each 16 keys, in which each lane has what it needs.
typedef uint4 WeightTiles[KEYS / 16][32];

// Puts the weights of TILES tiles of 8 keys from tile `first` on there.
template <int TILES>
__device__ inline void store_weights(WeightTiles& tiles, const Accumulator<TILES>& p, int first) {
    OperandA<TILES / 2> packed;
    pack_weights<TILES>(packed, p);
#pragma unroll
    for (int kt = 0; kt < TILES / 2; kt++) {
        tiles[first / 2 + kt][threadIdx.x % 32] = {packed[kt][0], packed[kt][1], packed[kt][2], packed[kt][3]};
    }
}

// The weights of a tile of keys, in registers.
struct Weights {
    OperandA<KEYS / 16> p[1];

    __device__ explicit Weights(const WeightTiles& tiles) {
#pragma unroll
        for (int kt = 0; kt < KEYS / 16; kt++) {
            const uint4 words = tiles[kt][threadIdx.x % 32];
            p[0][kt][0] = words.x, p[0][kt][1] = words.y, p[0][kt][2] = words.z, p[0][kt][3] = words.w;
        }
    }
};

// Values of a box that are not finite, counted per row among the keys that it attends, and what they make of the row's sums. In a loop:
// this is rare, and its code should be small.
__device__ inline void count_non_finite(float (*sums)[4], const Weights& weights, const Elem* box) {
    const int lane = threadIdx.x % 32;
    const u32 v_at = shared_address(box + place<COLUMNS>(lane % 16, lane / 16 * 8));
#pragma unroll 1
    for (int nt = 0; nt < COLUMNS / 8; nt += 2) {
        float count[2][4] = {};
#pragma unroll
        for (int kt = 0; kt < KEYS / 16; kt++) {
            u32 b[4], finite, kinds[4], attends[4];
            ldmatrix_trans(b, beyond<COLUMNS>(v_at, nt * 8) + kt * 16 * COLUMNS * 2);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const u32 p = weights.p[0][kt][n];
                OnlineSoftmax<1>::split_finite(b[n], finite, kinds[n]);
                attends[n] = (p & 0x8000u ? 0 : OnlineSoftmax<1>::ONE) | (p >> 31 ? 0 : OnlineSoftmax<1>::ONE << 16);
            }
            mma(count[0], attends, kinds[0], kinds[1]);
            mma(count[1], attends, kinds[2], kinds[3]);
        }
#pragma unroll
        for (int to = 0; to < COLUMNS / 8; to++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (to - to % 2 == nt) add_counted(sums[to][e], (int)count[to % 2][e]);
            }
    }
}
__device__ inline u32 finite_of(u32 pair) {
    u32 finite, kinds;
    OnlineSoftmax<1>::split_finite(pair, finite, kinds);
    return finite;
}

#if BY_WGMMA
static_assert(KEYS == 64, "32 keys for each of two groups");
DEFINE_WGMMA_QK(wgmma_keys, 32)
DEFINE_WGMMA_PV(wgmma_box, 64)

// s += q.k of a piece of columns.
template <bool CAREFUL, int TILES>
__device__ inline void multiply_piece(Accumulator<TILES>& s, const Elem* q, const Piece& keys, int, int half) {
    const u32 queries = tile_low(q, 0), columns = tile_low(keys.boxes[0] + half * (KEYS / 2 * COLUMNS), 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; step++) {
        const u32 within = step % 4 * 32 / 16;
        wgmma_keys(s, queries + step / 4 * (64 * 128 / 16) + within, columns + step / 4 * (KEYS * 128 / 16) + within, 1);
    }
    wgmma_commit();
}
// The products of all pieces are in s.
template <int TILES>
__device__ inline void await_scores(Accumulator<TILES>& s) {
    wgmma_wait<0>(s);
}

// Values that are not finite leave a box, by the group whose it is: they have been counted.
__device__ inline void clean_box(Elem* box, int half) {
    bar_sync(5 + half, WIDE_THREADS / 2);
#pragma unroll 1
    for (int at = threadIdx.x % (WIDE_THREADS / 2); at < KEYS * COLUMNS / 2; at += WIDE_THREADS / 2) {
        u32& pair = ((u32*)box)[at];
        pair = finite_of(pair);
    }
    fence_proxy_async();
    bar_sync(5 + half, WIDE_THREADS / 2);
}

// acc_o += p.v for the columns of a box, the `piece`th of a warp's.
template <bool CAREFUL>
__device__ inline void add_box(Accumulator<HALF / 8> (&acc_o)[1], Weights& weights, Elem* box, int piece, int half) {
    constexpr int TILES = COLUMNS / 8;
    if constexpr (CAREFUL) {
        count_non_finite(acc_o[0] + piece * TILES, weights, box);
        clean_box(box, half);
    }
    Accumulator<TILES>& sums = *(Accumulator<TILES>*)acc_o[0][piece * TILES];
    wgmma_fence();
#pragma unroll
    for (int kt = 0; kt < KEYS / 16; kt++) wgmma_box(sums, weights.p[0][kt], tile_low(box, 0) + kt * (16 * 128 / 16), 1);
    wgmma_commit();
    if (CAREFUL) wgmma_wait<0>(sums);
}
// The products of all pieces are in acc_o.
__device__ inline void await_sums(Accumulator<HALF / 8>& acc_o) { wgmma_wait<0>(acc_o); }
#else
// s += q.k of a piece of columns.
template <bool CAREFUL, int TILES>
__device__ inline void multiply_piece(Accumulator<TILES>& s, const Elem* q, const Piece& keys, int slab, int half) {
    const u32 q_at = query_rows(q, slab), k_at = key_rows(keys.boxes[0], half);
#pragma unroll
    for (int step = 0; step < 8; step++) {
        u32 a[4], b[4];
        ldmatrix(a, (q_at ^ step % 4 * 32) + step / 4 * (64 * 128));
#pragma unroll
        for (int pair = 0; pair < TILES / 2; pair++) {
            ldmatrix(b, (k_at ^ step % 4 * 32) + step / 4 * (KEYS * 128) + pair * (16 * 128));
            mma(s[pair * 2], a, b[0], b[1]);
            mma(s[pair * 2 + 1], a, b[2], b[3]);
        }
    }
}
template <int TILES>
__device__ inline void await_scores(Accumulator<TILES>&) {}

// acc_o += p.v for the columns of a box, the `piece`th of a warp's.
template <bool CAREFUL>
__device__ inline void add_box(Accumulator<HALF / 8> (&acc_o)[1], const Weights& weights, const Elem* box, int piece, int) {
    const int lane = threadIdx.x % 32;
    const u32 v_at = shared_address(box + place<COLUMNS>(lane % 16, lane / 16 * 8));
    float(*sums)[4] = acc_o[0] + piece * (COLUMNS / 8);
    if (CAREFUL) count_non_finite(sums, weights, box);
#pragma unroll
    for (int kt = 0; kt < KEYS / 16; kt++)
#pragma unroll
        for (int nt = 0; nt < COLUMNS / 8; nt += 2) {
            u32 b[4];
            ldmatrix_trans(b, beyond<COLUMNS>(v_at, nt * 8) + kt * 16 * COLUMNS * 2);
#pragma unroll
            for (int n = 0; CAREFUL && n < 4; n++) b[n] = finite_of(b[n]);
            mma(sums[nt], weights.p[0][kt], b[0], b[1]);
            mma(sums[nt + 1], weights.p[0][kt], b[2], b[3]);
        }
}
__device__ inline void await_sums(Accumulator<HALF / 8>&) {}
#endif

// Two neighbouring sums of a lane's row h: the ith pair, its first column, and how it is stored.
__device__ inline float2 sum_pair(const Accumulator<HALF / 8>& acc_o, int i, int h) { return {acc_o[i][h * 2], acc_o[i][h * 2 + 1]}; }
__device__ inline int pair_column(int i) { return i * 8 + lane_column(threadIdx.x); }
__device__ inline void store_pair(void* out, i64 at, float2 x) { *(u32*)((Elem*)out + at) = pack(x.x, x.y); }
#endif
