// What the tensor-core kernels share: tiles in shared memory, fragments of mma.sync m16n8k16, and the streaming softmax on
// them. f16 and bf16 in, f32 sums.
//
//   lane = 4*g + t     A (16x16): rows g, g+8; columns 2t, 2t+1, +8        B (16x8): rows 2t, 2t+1, +8; column g
//                      C (16x8):  rows g, g+8; columns 2t, 2t+1
//
// The 8 rows of an ldmatrix fall into distinct banks: where a row is whole lines of 128 bytes, its 16-byte units stand at
// unit ^ row % 8, within their line; else it is padded by a unit, and their number is odd. (Padded rows of whole lines cost
// a tenth of the bandwidth: a line that lies across two of shared memory is asked of L2 twice; H200, 2026-11.)
// p is rounded to the storage dtype between the two products; its sum l is of the unrounded p.
// Scores are compared raw where they may be (NATURAL 0) and the scale goes into the exponent:
//
//   raw       p = 2^(s*c - m*c)       c = scale * log2(e)
//   natural   p = 2^((s - m)*c)       c = log2(e), s with scale, softcap, slope and bias in it
//
// Values that nobody attends: a block first multiplies every p, 0 where masked. If a sum is not finite in the end, it runs
// again as CAREFUL: a masked p is -0 there, and values that are not finite reach only rows that attend them. Finite sums
// have the same bits both ways.
// Deliberately absent: which keys belong to whom.

#pragma once
#include "common/params.cuh"
#include "common/ptx.cuh"

constexpr int D = HEAD_DIM, DV = HEAD_DIM_V;      // multiples of 16, zero-filled beyond head_dim
__device__ constexpr bool is_swizzled(int width) { return width % 64 == 0; }
__device__ constexpr int row_of(int width) { return is_swizzled(width) ? width : width + 8; }
constexpr int K_ROW = row_of(D), V_ROW = row_of(DV);  // elements

// Where the unit of 8 elements at column c of row r stands.
template <int WIDTH>
__device__ inline int place(int r, int c) {
    return r * row_of(WIDTH) + (is_swizzled(WIDTH) ? c ^ r % 8 * 8 : c);
}
// The address `column` columns, a multiple of 16, beyond that of one of a row's first two units.
template <int WIDTH>
__device__ inline u32 beyond(u32 at, int column) {
    return is_swizzled(WIDTH) ? (at ^ column % 64 * 2) + column / 64 * 128 : at + column * 2;
}

// ROWS rows of dim elements, zero beyond `rows` and `dim`, to a tile of WIDTH columns; `lane` of LANES threads takes part.
// `offset(r)` is where row r begins, in elements. VECTOR: every row of q, k and v can be moved 16 bytes at a time.
template <int ROWS, int WIDTH, int LANES, class Offset>
__device__ inline void load_tile(
    Elem* tile, const Elem* base, Offset offset, i64 step, i64 row_step, int rows, int dim, int lane
) {
    if constexpr (VECTOR) {
        constexpr int UNITS = WIDTH / 8;
#pragma unroll 2
        for (int at = lane; at < ROWS * UNITS; at += LANES) {
            int r = at / UNITS, c = at % UNITS * 8;
            bool inside = r < rows && c < dim;
            cp_async(tile + place<WIDTH>(r, c), inside ? base + offset(r) + c : base, inside ? 16 : 0);
        }
    } else if (row_step == 1 && step != 1) {
        // Rows lie side by side: neighbouring threads take neighbouring rows.
        for (int at = lane; at < ROWS * WIDTH; at += LANES) {
            int r = at % ROWS, c = at / ROWS;
            tile[place<WIDTH>(r, c & ~7) + c % 8] = r < rows && c < dim ? base[offset(r) + c * step] : (Elem)0;
        }
    } else {
        for (int at = lane; at < ROWS * WIDTH; at += LANES) {
            int r = at / WIDTH, c = at % WIDTH;
            tile[place<WIDTH>(r, c & ~7) + c % 8] = r < rows && c < dim ? base[offset(r) + c * step] : (Elem)0;
        }
    }
}

struct Copy16 {
    __device__ void operator()(u32 to, const Elem* from) const { cp_async(to, from); }
};

// The same for evenly spaced rows from `base` on: one pointer that steps. `copy` moves 16 bytes of a whole tile.
template <int ROWS, int WIDTH, int LANES, class Copy = Copy16>
__device__ inline void load_even_tile(
    Elem* tile, const Elem* base, i64 step, i64 row_step, int rows, int dim, int lane, Copy copy = Copy()
) {
    constexpr int UNITS = WIDTH / 8;
    if constexpr (VECTOR && LANES % UNITS == 0 && ROWS * UNITS % LANES == 0) {
        constexpr int STEP = LANES / UNITS;
        const int c = lane % UNITS * 8, first = lane / UNITS;
        const Elem* from = base + first * row_step + c;
        if (rows >= ROWS && dim == WIDTH) {
            // A whole tile, as nearly all are: no question per row.
            const u32 to = shared_address(tile + place<WIDTH>(first, c));
#pragma unroll
            for (int n = 0; n < ROWS / STEP; n++) {
                const int r = n * STEP;
                copy((is_swizzled(WIDTH) ? to ^ r % 8 * 16 : to) + r * row_of(WIDTH) * 2, from);
                from += STEP * row_step;
            }
        } else {
            if (c >= dim) rows = 0;
#pragma unroll 1
            for (int r = first; r < ROWS; r += STEP) {
                cp_async(tile + place<WIDTH>(r, c), r < rows ? from : base, r < rows ? 16 : 0);
                from += STEP * row_step;
            }
        }
    } else {
        load_tile<ROWS, WIDTH, LANES>(
            tile, base, [&](int r) { return r * row_step; }, step, row_step, rows, dim, lane
        );
    }
}

// s = q.k of a tile of NT*8 keys.
template <int MT, int NT>
__device__ inline void multiply_keys(float (&s)[MT][NT][4], const Elem* q_tile, const Elem* k_tile) {
    const int lane = threadIdx.x % 32;
    const u32 q_at = shared_address(q_tile + place<D>(lane % 16, lane / 16 * 8));
    const u32 k_at = shared_address(k_tile + place<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
    constexpr int ROWS_16 = 16 * K_ROW * 2;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[mt][nt][e] = 0;
    // Fragments are loaded one product ahead of their use.
    constexpr int PAIRS = NT / 2, STEPS = D / 16;
    u32 a[2][MT][4], b[2][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) ldmatrix(a[0][mt], q_at + mt * ROWS_16);
    ldmatrix(b[0], k_at);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const int now = (step * PAIRS + pair) % 2;
            if (pair + 1 < PAIRS) {
                ldmatrix(b[1 - now], beyond<D>(k_at, step * 16) + (pair + 1) * ROWS_16);
            } else if (step + 1 < STEPS) {
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    ldmatrix(a[(step + 1) % 2][mt], beyond<D>(q_at, (step + 1) * 16) + mt * ROWS_16);
                }
                ldmatrix(b[1 - now], beyond<D>(k_at, (step + 1) * 16));
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma(s[mt][pair * 2], a[step % 2][mt], b[now][0], b[now][1]);
                mma(s[mt][pair * 2 + 1], a[step % 2][mt], b[now][2], b[now][3]);
            }
        }
    }
}
