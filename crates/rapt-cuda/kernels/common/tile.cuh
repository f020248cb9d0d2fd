// Tiles of q, k and v in shared memory as cp.async fills them, and the product q.k of mma.sync on them.
//
// Head dims are rounded up to 16 and zero-filled beyond head_dim. What cp.async cannot move (16-byte alignment, inner stride 1)
// is loaded element by element into the same tiles: the bits are the same.
// Deliberately absent: which keys belong to whom (params.cuh).

#pragma once
#include "common/fragment.cuh"
#include "common/params.cuh"
#include "common/ptx.cuh"

constexpr int D = HEAD_DIM, DV = HEAD_DIM_V;
constexpr int K_ROW = row_of(D), V_ROW = row_of(DV);  // elements

// Rows of q, k or v in memory, from which a tile is loaded: `rows` of them, of `dim` elements each.
struct SourceRows {
    const Elem* base;
    i64 step, row_step;  // from an element of a row to the next, and from row to row where they are evenly spaced
    int rows, dim;
};

// ROWS rows of `source`, zero beyond those that it has, to a tile of WIDTH columns; `lane` of LANES threads takes part.
// `offset(r)` is where row r begins, in elements. VECTOR: every row of q, k and v can be moved 16 bytes at a time.
template <int ROWS, int WIDTH, int LANES, class Offset>
__device__ inline void load_tile(Elem* tile, SourceRows source, Offset offset, int lane) {
    const Elem* base = source.base;
    const i64 step = source.step, row_step = source.row_step;
    const int rows = source.rows, dim = source.dim;
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

// The same for evenly spaced rows: one pointer that steps. `copy` moves 16 bytes of a whole tile.
template <int ROWS, int WIDTH, int LANES, class Copy = Copy16>
__device__ inline void load_even_tile(Elem* tile, SourceRows source, int lane, Copy copy = Copy()) {
    constexpr int UNITS = WIDTH / 8;
    if constexpr (VECTOR && LANES % UNITS == 0 && ROWS * UNITS % LANES == 0) {
        constexpr int STEP = LANES / UNITS;
        const int c = lane % UNITS * 8, first = lane / UNITS;
        const i64 row_step = source.row_step;
        const Elem* from = source.base + first * row_step + c;
        if (source.rows >= ROWS && source.dim == WIDTH) {
            // A whole tile, as nearly all are: no question per row.
            const u32 to = shared_address(tile + place<WIDTH>(first, c));
#pragma unroll
            for (int n = 0; n < ROWS / STEP; n++) {
                const int r = n * STEP;
                copy((is_swizzled(WIDTH) ? to ^ r % 8 * 16 : to) + r * row_of(WIDTH) * 2, from);
                from += STEP * row_step;
            }
        } else {
            const int rows = c < source.dim ? source.rows : 0;
#pragma unroll 1
            for (int r = first; r < ROWS; r += STEP) {
                cp_async(tile + place<WIDTH>(r, c), r < rows ? from : source.base, r < rows ? 16 : 0);
                from += STEP * row_step;
            }
        }
    } else {
        load_tile<ROWS, WIDTH, LANES>(tile, source, [&](int r) { return r * source.row_step; }, lane);
    }
}

// s = q.k of a tile of NT*8 keys; ADD: s += q.k.
template <int MT, int NT, bool ADD = false>
__device__ inline void multiply_keys(Accumulator<NT> (&s)[MT], const Elem* q_tile, const Elem* k_tile) {
    const int lane = threadIdx.x % 32;
    const u32 q_at = shared_address(q_tile + place<D>(lane % 16, lane / 16 * 8));
    const u32 k_at = shared_address(k_tile + place<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
    constexpr int ROWS_16 = 16 * K_ROW * 2;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        if (!ADD) zero(s[mt]);
    }
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
