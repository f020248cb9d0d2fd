// The products of backward_mma.cu on tiles in shared memory, and the same with numbers that are not finite told apart.
//
// Deliberately absent: what becomes of scores between them.

#pragma once
#include "common/softmax.cuh"
#include "common/tile.cuh"

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// s = own.streamed over WIDTH columns: MT fragments of 16 rows, NT*8 streamed rows. Fragments are loaded one product ahead of their use.
template <int WIDTH, int MT, int NT>
__device__ inline void multiply_rows(Accumulator<NT> (&s)[MT], const Elem* own, const Elem* streamed) {
    const int lane = threadIdx.x % 32;
    const u32 own_at = shared_address(own + place<WIDTH>(lane % 16, lane / 16 * 8));
    const u32 streamed_at = shared_address(streamed + place<WIDTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
    constexpr int ROWS_16 = 16 * row_of(WIDTH) * 2, PAIRS = NT / 2, STEPS = WIDTH / 16;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) zero(s[mt]);
    u32 a[2][MT][4], b[2][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) ldmatrix(a[0][mt], own_at + mt * ROWS_16);
    ldmatrix(b[0], streamed_at);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const int now = (step * PAIRS + pair) % 2;
            if (pair + 1 < PAIRS) {
                ldmatrix(b[1 - now], beyond<WIDTH>(streamed_at, step * 16) + (pair + 1) * ROWS_16);
            } else if (step + 1 < STEPS) {
#pragma unroll
                for (int mt = 0; mt < MT; mt++) ldmatrix(a[(step + 1) % 2][mt], beyond<WIDTH>(own_at, (step + 1) * 16) + mt * ROWS_16);
                ldmatrix(b[1 - now], beyond<WIDTH>(streamed_at, (step + 1) * 16));
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma(s[mt][pair * 2], a[step % 2][mt], b[now][0], b[now][1]);
                mma(s[mt][pair * 2 + 1], a[step % 2][mt], b[now][2], b[now][3]);
            }
        }
    }
}

// sums += w.rows: weights of NT*8 streamed rows, rounded to the storage dtype, and WIDTH columns of those.
template <int WIDTH, int MT, int NT>
__device__ inline void add_rows(Accumulator<WIDTH / 8> (&sums)[MT], const Accumulator<NT> (&w)[MT], const Elem* rows) {
    OperandA<NT / 2> a[MT];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) pack_weights<NT>(a[mt], w[mt]);
    const int lane = threadIdx.x % 32;
    const u32 at = shared_address(rows + place<WIDTH>(lane % 16, lane / 16 * 8));
#pragma unroll
    for (int kt = 0; kt < NT / 2; kt++)
#pragma unroll
        for (int nt = 0; nt < WIDTH / 8; nt += 2) {
            u32 b[4];
            ldmatrix_trans(b, beyond<WIDTH>(at, nt * 8) + kt * 16 * row_of(WIDTH) * 2);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma(sums[mt][nt], a[mt][kt], b[0], b[1]);
                mma(sums[mt][nt + 1], a[mt][kt], b[2], b[3]);
            }
        }
}

__device__ inline bool is_finite_element(Elem x) {
    constexpr u32 EXPONENT = MMA_HALF ? 0x7c00u : 0x7f80u;
    return (x & EXPONENT) != EXPONENT;
}
// sums += w*x of those elements x of streamed rows that are not finite, for rows that attend them: weights of others are MASKED.
template <int WIDTH, int MT, int NT>
__device__ inline void add_non_finite(Accumulator<WIDTH / 8> (&sums)[MT], const Accumulator<NT> (&w)[MT], const Elem* rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int wide = 0; wide < NT; wide++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float own[MT][2];
#pragma unroll
            for (int mt = 0; mt < MT; mt++) own[mt][0] = w[mt][wide][e], own[mt][1] = w[mt][wide][2 + e];
#pragma unroll 1
            for (int step = 0; step < 4; step++) {
                // A lane of its quad has the weights of two streamed rows in each tile of 8: each comes by in turn.
                const int r = wide * 8 + lane_column(lane ^ step) + e;
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float weight = __shfl_xor_sync(~0u, own[mt][h], step);
                        const bool attends = __float_as_uint(weight) != 0x80000000u;
#pragma unroll
                        for (int nt = 0; nt < WIDTH / 8; nt++)
#pragma unroll
                            for (int of = 0; of < 2; of++) {
                                const Elem x = rows[place<WIDTH>(r, nt * 8) + lane_column(lane) + of];
                                if (attends && !is_finite_element(x)) sums[mt][nt][h * 2 + of] += weight * widen(x);
                            }
                    }
            }
        }
}
// What is not finite in a tile becomes 0.
template <int THREADS>
__device__ inline void clear_non_finite(Elem* tile, int elements) {
    for (int at = threadIdx.x; at < elements; at += THREADS) {
        if (!is_finite_element(tile[at])) tile[at] = 0;
    }
}
