// Tiles of backward_mma.cu in shared memory and the products on them, and the same with numbers that are not finite told apart.
//
// A tile is rows of 16-bit words, an element of float32 two of them: what ldmatrix brings of 4 words is one of 2 elements or of 4, as the operands
// of both products want it. float32 is multiplied as two of TF32, three products for one, as wide/tf32.cuh has it:
//
//   x = hi + lo          a.b = hi.hi + hi.lo + lo.hi
//
// The tensor cores cut each sum off: few steps are summed there, and those sums added in float32. Streamed rows 2t and 2t+1 of 8 are columns t and
// t+4 of weights as an operand, as lanes hold them, and rows t and t+4 of the other.
// Deliberately absent: what becomes of scores between the products.

#pragma once
#include "common/softmax.cuh"
#include "common/tile.cuh"

// 16-bit words of an element, of a row of q and k and of one of v and d_o, and from row to row.
constexpr int WORDS = sizeof(Elem) / 2, D_WORDS = D * WORDS, DV_WORDS = DV * WORDS, A_ROW = row_of(D_WORDS), B_ROW = row_of(DV_WORDS);
constexpr bool IS_F32 = STORAGE == F32;

// Column c of row r of a tile whose rows have WIDTH words.
template <int WIDTH>
__device__ inline Elem* element(u16* tile, int r, int c) {
    return (Elem*)(tile + place<WIDTH>(r, c * WORDS & ~7) + c * WORDS % 8);
}

// ROWS rows of `source`, zero beyond those that it has, to a tile.
template <int ROWS, int WIDTH, int LANES>
__device__ inline void load_rows(u16* tile, const SourceRows& source, int lane) {
#if STORAGE == F32
    if constexpr (VECTOR) {
        constexpr int UNITS = WIDTH / 8;
#pragma unroll 4
        for (int at = lane; at < ROWS * UNITS; at += LANES) {
            const int r = at / UNITS, c = at % UNITS * 8;
            const bool inside = r < source.rows && c < source.dim * WORDS;
            const u16* from = (const u16*)source.base + (inside ? r * source.row_step * WORDS + c : 0);
            cp_async_zfill<16>(shared_address(tile + place<WIDTH>(r, c)), from, inside);
        }
    } else {
        for (int at = lane; at < ROWS * (WIDTH / WORDS); at += LANES) {
            const int r = at / (WIDTH / WORDS), c = at % (WIDTH / WORDS);
            const bool inside = r < source.rows && c < source.dim;
            *element<WIDTH>(tile, r, c) = inside ? source.base[r * source.row_step + c * source.step] : (Elem)0;
        }
    }
#else
    load_even_tile<ROWS, WIDTH, LANES>(tile, source, lane);
#endif
}

// A number as two of TF32. (cvt.rna.tf32 is four instructions.)
__device__ inline void split(float x, u32& hi, u32& lo) {
    hi = (__float_as_uint(x) + 0x1000u) & 0xffffe000u, lo = __float_as_uint(x - __uint_as_float(hi));
}
// Steps of 8 columns that are summed on the tensor cores at a time.
constexpr int TF32_STEPS = 4;

// s = own.streamed over WIDTH words: MT fragments of 16 rows, NT*8 streamed rows. Fragments are loaded one product ahead of their use.
#if STORAGE == F32
template <int WIDTH, int MT, int NT>
__device__ inline void multiply_rows(Accumulator<NT> (&s)[MT], const u16* own, const u16* streamed) {
    const int lane = threadIdx.x % 32;
    const u32 own_at = shared_address(own + place<WIDTH>(lane % 16, lane / 16 * 8));
    const u32 streamed_at = shared_address(streamed + place<WIDTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
    constexpr int ROWS_16 = 16 * row_of(WIDTH) * 2;
    Accumulator<NT> small[MT];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) zero(s[mt]), zero(small[mt]);
#pragma unroll 1
    for (int first = 0; first < WIDTH / 16; first += TF32_STEPS) {
        Accumulator<NT> large[MT];
#pragma unroll
        for (int mt = 0; mt < MT; mt++) zero(large[mt]);
#pragma unroll
        for (int n = 0; n < TF32_STEPS; n++) {
            const int step = first + n;
            if (step >= WIDTH / 16) break;
            u32 hi[MT][4], lo[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                u32 a[4];
                ldmatrix(a, beyond<WIDTH>(own_at, step * 16) + mt * ROWS_16);
#pragma unroll
                for (int e = 0; e < 4; e++) split(__uint_as_float(a[e]), hi[mt][e], lo[mt][e]);
            }
#pragma unroll
            for (int pair = 0; pair < NT / 2; pair++) {
                u32 b[4], b_hi[4], b_lo[4];
                ldmatrix(b, beyond<WIDTH>(streamed_at, step * 16) + pair * ROWS_16);
#pragma unroll
                for (int e = 0; e < 4; e++) split(__uint_as_float(b[e]), b_hi[e], b_lo[e]);
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int nt = pair * 2 + e;
                        mma_tf32(small[mt][nt], lo[mt], b_hi[e * 2], b_hi[e * 2 + 1]);
                        mma_tf32(large[mt][nt], hi[mt], b_hi[e * 2], b_hi[e * 2 + 1]);
                        mma_tf32(small[mt][nt], hi[mt], b_lo[e * 2], b_lo[e * 2 + 1]);
                    }
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[mt][nt][e] += large[mt][nt][e];
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[mt][nt][e] += small[mt][nt][e];
}

#else
template <int WIDTH, int MT, int NT>
__device__ inline void multiply_rows(Accumulator<NT> (&s)[MT], const u16* own, const u16* streamed) {
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
#endif

// sums += w.rows: weights of NT*8 streamed rows, in 16 bits rounded to the storage dtype, and COLUMNS columns of those.
#if STORAGE == F32
template <int COLUMNS, int MT, int NT>
__device__ inline void add_rows(Accumulator<COLUMNS / 8> (&sums)[MT], const Accumulator<NT> (&w)[MT], const u16* rows) {
    constexpr int WIDTH = COLUMNS * WORDS;
    u32 hi[MT][NT][4], lo[MT][NT][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int kt = 0; kt < NT; kt++)
#pragma unroll
            for (int e = 0; e < 4; e++) split(w[mt][kt][e % 2 * 2 + e / 2], hi[mt][kt][e], lo[mt][kt][e]);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int nt = 0; nt < COLUMNS / 8; nt++) {
        float large[MT][4] = {}, small[MT][4] = {};
#pragma unroll
        for (int kt = 0; kt < NT; kt++) {
            u32 b_hi[2], b_lo[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float x = *element<WIDTH>((u16*)rows, kt * 8 + lane_column(lane) + e, nt * 8 + lane_row(lane));
                split(x, b_hi[e], b_lo[e]);
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_tf32(small[mt], lo[mt][kt], b_hi[0], b_hi[1]);
                mma_tf32(large[mt], hi[mt][kt], b_hi[0], b_hi[1]);
                mma_tf32(small[mt], hi[mt][kt], b_lo[0], b_lo[1]);
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[mt][nt][e] += large[mt][e] + small[mt][e];
    }
}
#else
template <int COLUMNS, int MT, int NT>
__device__ inline void add_rows(Accumulator<COLUMNS / 8> (&sums)[MT], const Accumulator<NT> (&w)[MT], const u16* rows) {
    OperandA<NT / 2> a[MT];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) pack_weights<NT>(a[mt], w[mt]);
    const int lane = threadIdx.x % 32;
    const u32 at = shared_address(rows + place<COLUMNS>(lane % 16, lane / 16 * 8));
#pragma unroll
    for (int kt = 0; kt < NT / 2; kt++)
#pragma unroll
        for (int nt = 0; nt < COLUMNS / 8; nt += 2) {
            u32 b[4];
            ldmatrix_trans(b, beyond<COLUMNS>(at, nt * 8) + kt * 16 * row_of(COLUMNS) * 2);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma(sums[mt][nt], a[mt][kt], b[0], b[1]);
                mma(sums[mt][nt + 1], a[mt][kt], b[2], b[3]);
            }
        }
}
#endif

// sums += w*x of those elements x of streamed rows that are not finite, for rows that attend them: weights of others are MASKED.
template <int COLUMNS, int MT, int NT>
__device__ inline void add_non_finite(Accumulator<COLUMNS / 8> (&sums)[MT], const Accumulator<NT> (&w)[MT], u16* rows) {
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
                        for (int nt = 0; nt < COLUMNS / 8; nt++)
#pragma unroll
                            for (int of = 0; of < 2; of++) {
                                const float x = widen(*element<COLUMNS * WORDS>(rows, r, nt * 8 + lane_column(lane) + of));
                                if (attends && !is_finite(x)) sums[mt][nt][h * 2 + of] += weight * x;
                            }
                    }
            }
        }
}
// What is not finite in a tile of so many words becomes 0.
template <int THREADS>
__device__ inline void clear_non_finite(u16* tile, int words) {
    Elem* elements = (Elem*)tile;
    for (int at = threadIdx.x; at < words / WORDS; at += THREADS) {
        if (!is_finite(widen(elements[at]))) elements[at] = 0;
    }
}
