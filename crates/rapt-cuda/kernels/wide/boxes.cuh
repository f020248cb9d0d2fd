// Boxes of wide heads in shared memory, as ldmatrix and wgmma read them, and how all threads of a block fill them by cp.async.
//
//   box     rows of 128 bytes, their 16-byte units at unit ^ row % 8 (swizzle_128b, as ldmatrix reads them without conflicts)
//   piece   two boxes of BLOCK_N keys
//
// What cp.async cannot move (16-byte alignment, inner stride 1) is loaded element by element into the same boxes: the bits are the same.
// Deliberately absent: which box is loaded when (wide/pieces.cuh, latent.cu).

#pragma once
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

// Whether products are those of wgmma, which are waited for a piece later.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && STORAGE != F32
#define BY_WGMMA 1
#else
#define BY_WGMMA 0
#endif
constexpr int WIDE_THREADS = 256, KEYS = BLOCK_N;
constexpr int UNIT = 16 / sizeof(Elem), COLUMNS = 8 * UNIT;  // elements of 16 bytes, and of a row of a box
constexpr int HALF = DV / 2;                                 // value columns of a warp
static_assert(D % COLUMNS == 0 && HALF % COLUMNS == 0, "head dims are padded to whole boxes");

typedef Elem Box[KEYS * COLUMNS];
struct Piece {
    Box boxes[2];
};

// Element c of row r of a box.
__device__ inline int box_place(int r, int c) { return r * COLUMNS + ((c / UNIT) ^ r % 8) * UNIT + c % UNIT; }

// ROWS rows of `source`, zero beyond those, and beyond the columns, that it has. `offset(r)` is where row r begins, in elements.
template <int ROWS, class Offset>
__device__ inline void load_box(Elem* box, const SourceRows& source, Offset offset) {
    if constexpr (VECTOR) {
#pragma unroll 1
        for (int at = threadIdx.x; at < ROWS * 8; at += WIDE_THREADS) {
            const int r = at / 8, c = at % 8 * UNIT;
            const bool inside = r < source.rows && c < source.dim;
            cp_async(box + box_place(r, c), inside ? source.base + offset(r) + c : source.base, inside ? 16 : 0);
        }
    } else {
        // Neighbouring threads take what lies side by side.
        const bool by_rows = source.row_step == 1 && source.step != 1;
#pragma unroll 1
        for (int at = threadIdx.x; at < ROWS * COLUMNS; at += WIDE_THREADS) {
            const int r = by_rows ? at % ROWS : at / COLUMNS, c = by_rows ? at / ROWS : at % COLUMNS;
            const bool inside = r < source.rows && c < source.dim;
            box[box_place(r, c)] = inside ? source.base[offset(r) + c * source.step] : (Elem)0;
        }
    }
}

// Where an ldmatrix of a warp's 16 queries begins in a box, and one of its half of the keys (the lanes are those of tile.cuh).
__device__ inline u32 query_rows(const Elem* box, int slab) {
    const int lane = threadIdx.x % 32;
    return shared_address(box) + (slab * 16 + lane % 16) * 128 + (lane / 16 * 16 ^ lane % 8 * 16);
}
__device__ inline u32 key_rows(const Elem* box, int half) {
    const int lane = threadIdx.x % 32;
    return shared_address(box) + (half * (KEYS / 2) + lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 * 16 ^ lane % 8 * 16);
}

// A matrix of a task from column `column` on: at least its address, where there is no such column.
__device__ inline SourceRows columns_from(const Elem* base, const i64 (&stride)[4], int rows, int dim, int column) {
    return {dim > column ? base + column * stride[3] : base, stride[3], stride[2], rows, dim - column};
}
