// Products of bytes on the tensor cores, and the tiles that they read.
//
//   integers   A sum of mma.sync begins at MAGIC_BITS instead of 0: read as a float32 it is then MAGIC + the sum, exactly, as long as the sum
//              stays below 2^22. Sums of head_dim <= 256 products of codes, and of 128 of 8 bits with codes, do.
//   tiles      Rows of bytes where ldmatrix finds units of 16 as in common/fragment.cuh: a byte is half of an element there.
//   values     Values lie key by key, where a product over keys wants four keys of a column in a word. ldmatrix.trans exchanges pairs of
//              bytes: a word holds columns 2n, 2n+1 of two keys. So even columns of 16 are one tile of a product and odd ones the next, and
//              a thread has columns 4t.. of its rows in the end, four side by side.
//
//   thread 4*g + t     columns 16*c + 4*t + {0, 2} of tile 2c, and {1, 3} of tile 2c+1; rows g and g+8
//
// The order of keys in a word of weights is that of the scores: 2t, 2t+1 of one tile of 8 keys, and of the next.
// Deliberately absent: what becomes of sums.

#pragma once
#include "common/fragment.cuh"
#include "common/ptx.cuh"

constexpr int D = HEAD_DIM, DV = HEAD_DIM_V;
constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23
constexpr int MAGIC_BITS = 0x4b400000;

// Elements of 16 bits that a row of so many bytes is.
__device__ constexpr int halves_of(int bytes) { return bytes / 2; }
// Bytes from row to row of a tile, and where byte c of row r stands.
__device__ constexpr int byte_row(int bytes) { return row_of(halves_of(bytes)) * 2; }
template <int BYTES>
__device__ constexpr int byte_place(int r, int c) {
    return place<halves_of(BYTES)>(r, c / 16 * 8) * 2 + c % 16;
}
// The address of unit `unit` of a row, from that of its first.
template <int BYTES>
__device__ constexpr u32 unit_of(u32 first, int unit) {
    return is_swizzled(halves_of(BYTES)) ? (first ^ unit % 8 * 16) + unit / 8 * 128 : first + unit * 16;
}

// The tile that column c of a thread's values belongs to, and its place in the thread's four: for columns 4t.. of 16.
__device__ constexpr int value_tile(int c) { return c % 2; }
__device__ constexpr int value_sum(int c) { return c / 2; }

// Two tiles of 8 columns out of a unit of 32 keys: words of ldmatrix.trans to operands.
struct ValuePair {
    u32 even[2], odd[2];
    __device__ explicit ValuePair(const u32 (&words)[4]) {
        even[0] = __byte_perm(words[0], words[1], 0x6420), even[1] = __byte_perm(words[2], words[3], 0x6420);
        odd[0] = __byte_perm(words[0], words[1], 0x7531), odd[1] = __byte_perm(words[2], words[3], 0x7531);
    }
};

// The low bytes of four words.
__device__ inline u32 low_bytes(u32 a, u32 b, u32 c, u32 d) { return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410); }
