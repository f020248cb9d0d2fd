// wide.cu of float32: each number as two of TF32, three products for one, by mma.sync.
//
//   x = hi + lo         hi: x rounded to TF32 (11 bits), lo: the rest, of which the tensor cores read 11 bits
//   a.b = hi.hi + hi.lo + lo.hi
//
// TF32 has float32's exponents: nothing is scaled. Products of a piece of columns, and of a tile of keys, are summed by themselves and
// added in float32: the sum inside the tensor cores cuts bits off, which a long one would show. p is not rounded.
//
// Where numbers are not finite (CAREFUL), they have no rest, and what it would be multiplied with is left out: scores are as IEEE has
// them. Values that are not finite are told apart as in online_softmax.cuh.
//
// Keys 2t and 2t+1 of 8 are columns t and t+4 of the operand p, as lanes hold them, and rows t and t+4 of v. Column g of the nth
// of four tiles of value columns is 4*g + n, so that a lane reads 16 bytes of a row.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022.

#pragma once
#include "common/online_softmax.cuh"
#include "wide/boxes.cuh"

#if STORAGE == F32
// N numbers as hi and lo; `beside_lo` is what the other factor's lo is multiplied with.
template <bool CAREFUL, int N>
struct Split {
    u32 hi[N], lo[N], beside_lo[N];

    __device__ void set(int n, float x) {
        // cvt.rna.tf32 is four instructions.
        hi[n] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
        // The greatest numbers would round to infinity: they are cut off.
        if (CAREFUL && !is_finite(__uint_as_float(hi[n]))) hi[n] = __float_as_uint(x) & 0xffffe000u;
        lo[n] = __float_as_uint(x - __uint_as_float(hi[n]));
        beside_lo[n] = hi[n];
        if (CAREFUL && !is_finite(x)) hi[n] = __float_as_uint(x), lo[n] = beside_lo[n] = 0;
    }
};

// Sums of products, the small ones by themselves: the tensor cores cut each sum off, which of these is nothing, and the other sum has a
// third of the steps.
template <int TILES>
struct SplitSums {
    Accumulator<TILES> large, small;

    __device__ SplitSums() { zero(large), zero(small); }
    // a.b for COUNT tiles of 8 columns from tile `first` on.
    template <bool CAREFUL, int COUNT>
    __device__ void add(int first, const Split<CAREFUL, 4>& a, const Split<CAREFUL, 2> (&b)[COUNT]) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) mma_tf32(small[first + n], a.lo, b[n].beside_lo[0], b[n].beside_lo[1]);
#pragma unroll
        for (int n = 0; n < COUNT; n++) mma_tf32(large[first + n], a.hi, b[n].hi[0], b[n].hi[1]);
#pragma unroll
        for (int n = 0; n < COUNT; n++) mma_tf32(small[first + n], a.beside_lo, b[n].lo[0], b[n].lo[1]);
    }
    __device__ float sum(int n) const { return large[n / 4][n % 4] + small[n / 4][n % 4]; }
};

// s += q.k of a piece of columns: a warp's 16 queries and its half of the keys, 8 columns at a time.
template <bool CAREFUL, int TILES>
__device__ inline void multiply_piece(Accumulator<TILES>& s, const Elem* q, const Piece& keys, int slab, int half) {
    const u32 q_at = query_rows(q, slab), k_at = key_rows(keys.boxes[0], half);
    SplitSums<TILES> part;
#pragma unroll(CAREFUL ? 1 : 8)
    for (int step = 0; step < 8; step++) {
        u32 words[4];
        Split<CAREFUL, 4> a;
        ldmatrix(words, (q_at ^ step % 4 * 32) + step / 4 * (64 * 128));
#pragma unroll
        for (int n = 0; n < 4; n++) a.set(n, __uint_as_float(words[n]));
#pragma unroll
        for (int pair = 0; pair < TILES / 2; pair++) {
            Split<CAREFUL, 2> b[2];
            ldmatrix(words, (k_at ^ step % 4 * 32) + step / 4 * (KEYS * 128) + pair * (16 * 128));
#pragma unroll
            for (int n = 0; n < 4; n++) b[n / 2].set(n % 2, __uint_as_float(words[n]));
            part.add(pair * 2, a, b);
        }
    }
#pragma unroll
    for (int n = 0; n < TILES * 4; n++) s[n / 4][n % 4] += part.sum(n);
}
template <int TILES>
__device__ inline void await_scores(Accumulator<TILES>&) {}

// Maxima are followed, by however little they rise: the greatest p is 1.
constexpr float RISE = 0;

// p of a warp's 16 rows and a tile of keys, in shared memory: what each lane holds of 8 keys.
typedef float4 WeightTiles[KEYS / 8][32];

// Puts TILES tiles of 8 keys from tile `first` on there.
template <int TILES>
__device__ inline void store_weights(WeightTiles& tiles, const Accumulator<TILES>& p, int first) {
#pragma unroll
    for (int nt = 0; nt < TILES; nt++) tiles[first + nt][threadIdx.x % 32] = {p[nt][0], p[nt][1], p[nt][2], p[nt][3]};
}

// They stay there: registers are for sums.
struct Weights {
    const WeightTiles& tiles;
    __device__ explicit Weights(const WeightTiles& tiles) : tiles(tiles) {}
};

__device__ inline u32 kind_of(float x) {
    return __float_as_uint(is_finite(x) ? 0.f : x != x ? 16384.f : x > 0 ? 1.f : 128.f);
}

// A lane's values of a box: of keys 2t + r of the `kt`th 8, columns 4*g...
template <int TILES>
__device__ inline void load_values(float (&x)[TILES], const Elem* box, int kt, int r) {
    const int lane = threadIdx.x % 32;
    const float4 row = *(const float4*)(box + box_place(kt * 8 + lane % 4 * 2 + r, lane / 4 * UNIT));
    x[0] = row.x, x[1] = row.y, x[2] = row.z, x[3] = row.w;
}

// Values of a box that are not finite, counted per row among the keys that it attends, and what they make of the row's sums.
template <int TILES>
__device__ inline void count_values(float (*sums)[4], const WeightTiles& tiles, const Elem* box) {
    Accumulator<TILES> count;
    zero(count);
#pragma unroll 1
    for (int kt = 0; kt < KEYS / 8; kt++) {
        const float4 p = tiles[kt][threadIdx.x % 32];
        const float weights[4] = {p.x, p.z, p.y, p.w};
        u32 attends[4];
        float x[2][TILES];
#pragma unroll
        for (int n = 0; n < 4; n++) attends[n] = signbit(weights[n]) ? 0 : __float_as_uint(1.f);
        load_values(x[0], box, kt, 0), load_values(x[1], box, kt, 1);
#pragma unroll
        for (int n = 0; n < TILES; n++) mma_tf32(count[n], attends, kind_of(x[0][n]), kind_of(x[1][n]));
    }
#pragma unroll
    for (int n = 0; n < TILES * 4; n++) add_counted(sums[n / 4][n % 4], (int)count[n / 4][n % 4]);
}

// acc_o += p.v for the columns of a box, the `piece`th of a warp's.
template <bool CAREFUL>
__device__ inline void add_box(Accumulator<HALF / 8> (&acc_o)[1], const Weights& of, const Elem* box, int piece, int) {
    constexpr int TILES = COLUMNS / 8;
    float(*sums)[4] = acc_o[0] + piece * TILES;
    if (CAREFUL) count_values<TILES>(sums, of.tiles, box);
    SplitSums<TILES> part;
#pragma unroll(CAREFUL ? 1 : KEYS / 8)
    for (int kt = 0; kt < KEYS / 8; kt++) {
        const float4 p = of.tiles[kt][threadIdx.x % 32];
        const float weights[4] = {p.x, p.z, p.y, p.w};
        Split<CAREFUL, 4> a;
#pragma unroll
        for (int n = 0; n < 4; n++) a.set(n, weights[n]);
        Split<CAREFUL, 2> v[TILES];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x[TILES];
            load_values(x, box, kt, r);
#pragma unroll
            for (int n = 0; n < TILES; n++) v[n].set(r, CAREFUL && !is_finite(x[n]) ? 0.f : x[n]);
        }
        part.add(0, a, v);
    }
#pragma unroll
    for (int n = 0; n < TILES * 4; n++) sums[n / 4][n % 4] += part.sum(n);
}
__device__ inline void await_sums(Accumulator<HALF / 8>&) {}

// Two neighbouring sums of a lane's row h: the ith pair, its first column, and how it is stored.
__device__ inline float2 sum_pair(const Accumulator<HALF / 8>& acc_o, int i, int h) {
    const int tile = i / 4 * 4 + i % 2 * 2, e = h * 2 + i / 2 % 2;
    return {acc_o[tile][e], acc_o[tile + 1][e]};
}
__device__ inline int pair_column(int i) { return i / 4 * 32 + threadIdx.x % 4 * 8 + i / 2 % 2 * 4 + i % 2 * 2; }
__device__ inline void store_pair(void* out, i64 at, float2 x) { *(float2*)((float*)out + at) = x; }
#endif
