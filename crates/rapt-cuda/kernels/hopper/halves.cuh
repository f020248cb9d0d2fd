// float32 on the tensor cores of compute capability 9.0: each number as two f16 under a power of two, three products for one.
//
//   x*up = hi + lo           up = 2^e brings the largest of a row into [2^14, 2^15)
//   a.b = (hi.hi + hi.lo + lo.hi) / (up_a up_b)
//
// hi and lo hold 22 bits of what lies within 2^18 of its row's largest, and every other number to 2^-40 of that largest; lo.lo
// lies below both. Where rows are what a product sums over, their powers go into its weights, which have a power of their own: that of the
// largest of a row, in every tile anew.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022, for two halves and the sum outside.
// Deliberately absent: which rows they are.

#pragma once
#include "common/softmax.cuh"
#include "hopper/wgmma.cuh"

constexpr int BOX_BYTES = 64 * BOX * 2;  // 64 rows

__device__ inline void split(float x, float y, u32& hi, u32& lo) {
    hi = pack(x, y);
    lo = pack(x - f16_to_float((u16)hi), y - f16_to_float((u16)(hi >> 16)));
}
// The power of two that brings a number of these bits into [2^14, 2^15), and its inverse.
__device__ inline void find_scale(u32 bits, float& up, float& down) {
    const int e = max((int)(bits >> 23), 15);
    up = __int_as_float((268 - e) << 23), down = __int_as_float((e - 14) << 23);
}
__device__ inline u32 finite_magnitude(float x) {
    const u32 bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0;
}

// A quarter of 64 rows, in the registers of 128 threads: 8 lanes a row, 4 rows a warp, such that 16 lanes that store together
// use no bank twice.
template <int BOXES>
struct Quarter {
    float4 x[2 * BOXES];

    // This thread's row of quarter 0; quarter n lies `ahead(n)` rows further on.
    __device__ static int first_row(int lane) { return lane / 32 * 16 + lane / 8 % 2 * 4 + lane / 16 % 2; }
    __device__ static int ahead(int n) { return n / 2 * 8 + n % 2 * 2; }

    __device__ void load(const float* from, bool inside, i64 step, int dim, int lane) {
#pragma unroll
        for (int i = 0; i < 2 * BOXES; i++) {
            const int c = (lane % 8 + i * 8) * 4;
            x[i].x = x[i].y = x[i].z = x[i].w = 0;
            if constexpr (VECTOR) {
                if (inside && c < dim) x[i] = *(const float4*)(from + c);
            } else {
                if (inside && c < dim) x[i].x = from[c * step];
                if (inside && c + 1 < dim) x[i].y = from[(c + 1) * step];
                if (inside && c + 2 < dim) x[i].z = from[(c + 2) * step];
                if (inside && c + 3 < dim) x[i].w = from[(c + 3) * step];
            }
        }
    }

#if PAGED
    // NaN in place of what does not exist.
    __device__ void spoil(int dim, int lane) {
#pragma unroll
        for (int i = 0; i < 8 * BOXES; i++) {
            if ((lane % 8 + i / 4 * 8) * 4 + i % 4 < dim) ((float*)x)[i] = not_a_number();
        }
    }
#endif

    // Splits it into two tiles. If `careful`, what is not finite becomes 0, and a bit is answered for each such row of the
    // warp's 16.
    __device__ u32 store(bool careful, u8 (&tiles)[2][BOXES][BOX_BYTES], float* down, int lane, int n) {
        const int row = first_row(lane);
        u32 odd = 0, top = 0;
        if (careful) {
            bool is_odd = false;
#pragma unroll
            for (int i = 0; i < 8 * BOXES; i++) {
                float& each = ((float*)x)[i];
                if (!is_finite(each)) each = 0, is_odd = true;
            }
            const u32 lanes = __ballot_sync(~0u, is_odd);
            for (int group = 0; group < 4; group++) {
                if (lanes >> group * 8 & 0xff) odd |= 1u << (ahead(n) + group % 2 * 4 + group / 2);
            }
        }
#pragma unroll
        for (int i = 0; i < 8 * BOXES; i++) top = max(top, finite_magnitude(((const float*)x)[i]));
#pragma unroll
        for (int step = 1; step < 8; step *= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
        float up, one_down;
        find_scale(top, up, one_down);
        down[row + ahead(n)] = one_down;  // of all 8 lanes: a warp that parts here has no uniform registers from then on
        // swizzle_128b(row + ahead(n), c), whose parts do not carry into one another.
        const u32 at = swizzle_128b(row, lane % 8 * 4);
#pragma unroll
        for (int i = 0; i < 2 * BOXES; i++) {
            const u32 to = (at ^ i % 2 * 64 ^ n % 2 * 32) + ahead(n) * 128;
            uint2 hi, lo;
            split(x[i].x * up, x[i].y * up, hi.x, lo.x);
            split(x[i].z * up, x[i].w * up, hi.y, lo.y);
            *(uint2*)(tiles[0][i / 2] + to) = hi;
            *(uint2*)(tiles[1][i / 2] + to) = lo;
        }
        return odd;
    }
};

// A place in a ring of N, and the parity of its barriers' phase.
template <int N>
struct Ring {
    u32 at = 0, phase = 0;
    __device__ void next() {
        if (++at == N) at = 0, phase ^= 1;
    }
};

// Weights of a tile of rows as the product with these takes them: hi and lo, and 1 / up of a thread's two rows.
template <int KT>
struct Weights {
    OperandA<KT> (&p)[2];
    float (&down)[2];
};

// Weights of two rows, the largest of which are `top` among a thread's, become an operand.
template <int NT>
__device__ inline void split_weights(const Weights<NT / 2>& weights, const Accumulator<NT>& w, u32 (&top)[2]) {
    float up[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        top[h] = max(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = max(top[h], __shfl_xor_sync(~0u, top[h], 2));
        find_scale(min(top[h], 0x7f7fffffu), up[h], weights.down[h]);
    }
#pragma unroll
    for (int kt = 0; kt < NT / 2; kt++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float* pair = &w[kt * 2 + n / 2][n % 2 * 2];
            split(pair[0] * up[n % 2], pair[1] * up[n % 2], weights.p[0][kt][n], weights.p[1][kt][n]);
        }
}

// x = a.b over COLUMNS columns of tiles of rows, hi and lo, by `multiply`.
template <int COLUMNS, int NT, int BOXES, class Multiply>
__device__ inline void multiply_halves(
    Accumulator<NT>& x, const u8 (&a)[2][BOXES][BOX_BYTES], const u8 (&b)[2][BOXES][BOX_BYTES], Multiply multiply
) {
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; product++)  // the small ones first
#pragma unroll
        for (int d = 0; d < COLUMNS; d += 16) {
            const u32 at = (d / BOX * BOX_BYTES + d % BOX * 2) / 16;
            const u32 of_a = tile_low(a[product == 0], 0), of_b = tile_low(b[product == 1], 0);
            multiply(x, of_a + at, of_b + at, product + d > 0);
        }
    wgmma_commit();
}

// sums += part*down for tiles of columns from FIRST on; part = weights.rows, by `multiply`, is summed by itself. `hi` and `lo` are tiles of
// rows.
template <int FIRST, int TILES, int ALL, int KT, class Multiply>
__device__ inline void add_box(Accumulator<ALL>& sums, const Weights<KT>& weights, const u8* hi, const u8* lo, Multiply multiply) {
    Accumulator<TILES> part;
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; product++) {  // the small ones first
        const u32 tile = tile_low(product == 1 ? lo : hi, BOX_BYTES);
#pragma unroll
        for (int kt = 0; kt < KT; kt++) multiply(part, weights.p[product == 0][kt], tile + kt * 16 * BOX * 2 / 16, product + kt > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(part);
#pragma unroll
    for (int n = 0; n < TILES * 4; n++) {
        float& sum = sums[FIRST + n / 4][n % 4];
        sum = __fmaf_rn(part[n / 4][n % 4], weights.down[n / 2 % 2], sum);
    }
}
