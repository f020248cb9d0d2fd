// Rows of booleans as bits: 4 words, one for each lane of a quad, with a bit for each of the lane's keys (`key_bit`), 1 where it is
// seen. A word holds a lane's 32 keys of 128: tiles 0 to 7 in the low half, 8 to 15 in the high one.
// tests/fragments.rs compiles this file for the host. Deliberately absent: what hides a key (mask.cuh).

#pragma once
#include "common/fragment.cuh"
#include "common/ptx.cuh"

// A byte of 1 for each byte that is not 0.
__device__ inline u32 ones(u32 x) { return ((((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u) >> 7; }

// A byte for each lane of a quad: a bit for each of its 8 of 32 keys. Bytes of x and y are 0 or 1.
__device__ inline u32 seen_keys(const uint4& x, const uint4& y) {
    // Keys 2*lane and the next of two eights: the lower halves of two words, or the upper ones.
    const auto of_lane = [](u32 x0, u32 x8, u32 x16, u32 x24, u32 halves) {
        const u32 low = __byte_perm(x0, x8, halves), high = __byte_perm(x16, x24, halves);
        return dp4a(high, 0x80402010u, dp4a(low, 0x08040201u, 0));
    };
    const u32 low = of_lane(x.x, x.z, y.x, y.z, 0x5410) | of_lane(x.x, x.z, y.x, y.z, 0x7632) << 8;
    const u32 high = of_lane(x.y, x.w, y.y, y.w, 0x5410) | of_lane(x.y, x.w, y.y, y.w, 0x7632) << 8;
    return low | high << 16;
}
// Stores them as keys 32*pair.. of a row.
__device__ inline void store_seen_keys(u8* row, int pair, u32 seen) {
    u8* to = row + pair;
    to[0] = seen, to[4] = seen >> 8, to[8] = seen >> 16, to[12] = seen >> 24;
}
// The half of a lane's word that holds tile nt.
__device__ inline u32 bits_of_tile(u32 word, int nt) { return nt < 8 ? word : word >> 16; }
