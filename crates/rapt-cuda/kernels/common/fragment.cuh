// Which thread holds which element: the fragments of mma.sync and wgmma, and where units of 16 bytes stand in shared memory.
//
//   lane = 4*g + t     A (16x16): rows g, g+8; columns 2t, 2t+1, +8        B (16x8): rows 2t, 2t+1, +8; column g
//                      C (16x8):  rows g, g+8; columns 2t, 2t+1
//   wgmma              D (64 x N): warp w holds rows 16w.. as C, tile nt its columns 8*nt..
//
// The maps are plain C++: tests/fragments.rs compiles this file for the host and compares them, for all threads and elements,
// with rapt-layout's atlas of the instructions. Deliberately absent: instructions (ptx.cuh).

#pragma once
#include "common/types.cuh"

// f32 sums of a warp's 16 rows and 8*TILES columns: element e of tile nt. (Aliases, not structs: with a struct around its sums
// hopper_f32.cu spilled 24 bytes at head_dim 128; NVRTC 13.2, 2026-11.)
template <int TILES>
using Accumulator = float[TILES][4];
// 16-bit operands of a warp's 16 rows and 16*TILES columns, two to a word.
template <int TILES>
using OperandA = u32[TILES][4];

// So many tiles of sums or operands from one on.
template <int TILES, class Of>
__device__ inline Of (&tiles_from(Of* first))[TILES] {
    return *(Of(*)[TILES])first;
}

template <int TILES>
__device__ inline void zero(float (&sums)[TILES][4]) {
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[nt][e] = 0;
}

// A lane's first row of its warp's 16 (the second is 8 further on), and its first two columns of each tile.
template <class Thread>
__device__ constexpr Thread lane_row(Thread thread) {
    return thread % 32 / 4;
}
template <class Thread>
__device__ constexpr Thread lane_column(Thread thread) {
    return thread % 4 * 2;
}
// So element e of tile nt lies in row lane_row + 8*(e/2), column 8*nt + lane_column + e%2.
// The word of an operand that columns e of row r of tile nt of the sums become, together: sums of two tiles are one of A.
__device__ constexpr int operand_tile(int nt) { return nt / 2; }
__device__ constexpr int operand_word(int nt, int r) { return nt % 2 * 2 + r; }

// --- tiles that ldmatrix reads: rows of `width` 16-bit elements ------------------------------------------------------------

// The 8 rows of an ldmatrix fall into distinct banks: where a row is whole lines of 128 bytes, its 16-byte units stand at
// unit ^ row % 8, within their line; else it is padded by a unit, and their number is odd. (Padded rows of whole lines cost
// a tenth of the bandwidth: a line that lies across two of shared memory is asked of L2 twice; H200, 2026-11.)
__device__ constexpr bool is_swizzled(int width) { return width % 64 == 0; }
__device__ constexpr int row_of(int width) { return is_swizzled(width) ? width : width + 8; }

// Where the unit of 8 elements at column c of row r stands, in elements.
template <int WIDTH>
__device__ constexpr int place(int r, int c) {
    return r * row_of(WIDTH) + (is_swizzled(WIDTH) ? c ^ r % 8 * 8 : c);
}
// The address `column` columns, a multiple of 16, beyond that of one of a row's first two units.
template <int WIDTH>
__device__ constexpr u32 beyond(u32 at, int column) {
    return is_swizzled(WIDTH) ? (at ^ column % 64 * 2) + column / 64 * 128 : at + column * 2;
}

// --- boxes that TMA writes and wgmma reads: rows of 64 16-bit elements, 128-byte swizzle -----------------------------------

constexpr int BOX = 64;  // columns of a box, 128 bytes

// The byte of row r, column c of a box.
__device__ constexpr u32 swizzle_128b(int r, int c) { return r * 128 + ((c * 2) ^ (r % 8 * 16)); }

// Where the row that a lane names for stmatrix.x4 stands in boxes of 16 rows, in bytes: rows 0 to 7 and 8 to 15 of columns 8*nt..,
// then of the next 8. Its row begins `stmatrix_row` behind box `first`.
__device__ constexpr u32 stmatrix_row(int lane) { return lane % 16 * 128; }
__device__ constexpr u32 stmatrix_unit(u32 row, int lane, int nt, int first) {
    return row + (nt / 8 - first) * (16 * 128) + ((nt % 8 + lane / 16) ^ (lane % 8)) * 16;
}
// The same for stmatrix.x4.trans, where columns of sums become rows of a box: 8 of them, and the next 8. The warp's 16 rows are columns 16*warp.. there.
__device__ constexpr u32 stmatrix_turned(int warp, int lane) {
    return (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
}

// Rows that a lane writes out, 16 bytes of each: the ith of 4, its column, and the lane whose first (i < 2) or second row it is.
__device__ constexpr int out_row(int lane, int i) { return i * 4 + lane / 8; }
__device__ constexpr int out_column(int lane) { return lane % 8 * 8; }
__device__ constexpr int out_owner(int lane, int i) { return (i % 2 * 4 + lane / 8) * 4; }

// --- what a mask says of a tile, in shared memory --------------------------------------------------------------------------

// Where unit u of row r of a tile of biases stands: boxes of BOX_UNITS units and ROWS rows, swizzled as TMA does it.
template <int BOX_UNITS, int ROWS>
__device__ constexpr int bias_unit(int r, int u) {
    const int turned = r / (8 / BOX_UNITS) % BOX_UNITS;
    return u / BOX_UNITS * (ROWS * BOX_UNITS) + r * BOX_UNITS + ((u % BOX_UNITS) ^ turned);
}
// Unit u, which is even, from one of a row's first two units: bits of the address that turn, then bytes further on.
template <int BOX_UNITS>
__device__ constexpr u64 bias_unit_turn(int u) {
    return u % BOX_UNITS * 16;
}
template <int BOX_UNITS, int ROWS>
__device__ constexpr int bias_unit_step(int u) {
    return u / BOX_UNITS * (ROWS * BOX_UNITS * 16);
}

// The bit of key e of tile nt of a lane's keys: pairs 8 apart, two bits each.
__device__ constexpr int key_bit(int nt, int e) { return nt * 2 + e; }
// How many of a lane's keys come before key n, counted from its first.
__device__ constexpr int keys_before(int n) { return n / 8 * 2 + (n % 8 < 2 ? n % 8 : 2); }
