// Which weights are dropped: Philox 4x32-10 as a function of their places, which rapt_core::dropout defines.
//
//   head    (a, b, c, d) = philox(counter (offset, batch, head), key seed)
//   words   of row i at the four columns of a group = philox(counter (c, group, d, i), key (a, b))
//   dropped where word <= last; lse knows nothing of it
//
// A group is columns n, n+1, n+8, n+9: what a lane holds of a row in two tiles of 8 keys, so that no word is found twice. Three of the ten rounds
// are the same along a row or down a column, and the compiler finds them once for a tile that is unrolled. A dropped weight is a zero of its own
// sign: that of a masked key stays -0. Weights that are kept are scaled where their sums end.
// Deliberately absent: a mask in memory.

#pragma once
#include "common/params.cuh"

#if DROPOUT
struct PhiloxBlock {
    u32 word[4];
};
__device__ inline PhiloxBlock philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 key0, u32 key1) {
    constexpr u32 MULTIPLIERS[2] = {0xD2511F53u, 0xCD9E8D57u}, INCREMENTS[2] = {0x9E3779B9u, 0xBB67AE85u};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 high0 = __umulhi(c0, MULTIPLIERS[0]), low0 = c0 * MULTIPLIERS[0];
        const u32 high1 = __umulhi(c2, MULTIPLIERS[1]), low1 = c2 * MULTIPLIERS[1];
        c0 = high1 ^ c1 ^ key0, c1 = low1, c2 = high0 ^ c3 ^ key1, c3 = low0;
        key0 += INCREMENTS[0], key1 += INCREMENTS[1];
    }
    return {{c0, c1, c2, c3}};
}

// The blocks of one query head. `batch` counts from the first batch entry of the call; of sequences one after another it is their number.
struct DroppingHead {
    PhiloxBlock of;
    u32 last;
    __device__ DroppingHead(const Dropping& d, int batch, int head) : last(d.last) {
        u64 seed = (u64)d.seed[1] << 32 | d.seed[0], offset = (u64)d.offset[1] << 32 | d.offset[0];
        if (d.draw) seed = d.draw[0], offset = d.draw[1];
        of = philox((u32)offset, (u32)(offset >> 32), d.first_batch + (u32)batch, (u32)head, (u32)seed, (u32)(seed >> 32));
    }
    __device__ PhiloxBlock block(int row, int group) const {
        return philox(of.word[2], (u32)group, of.word[3], (u32)row, of.word[0], of.word[1]);
    }
    __device__ bool keeps(u32 word) const { return word > last; }
    // Whether column `column`, which is even, and the next are kept, as two bits.
    __device__ u32 keeps_pair(int row, int column) const {
        const PhiloxBlock found = block(row, column / 16 * 4 + column % 8 / 2);
        const bool late = column % 16 >= 8;
        return (keeps(late ? found.word[2] : found.word[0]) ? 1u : 0u) | (keeps(late ? found.word[3] : found.word[1]) ? 2u : 0u);
    }
};
#endif
