// Which tile of keys a warp loads next, and where its keys lie, if they lie in pages. Deliberately absent: what a tile holds.
//
// An entry that is not in L1 takes as long as keys do, several tiles, where memory is the limit. Where 16 keys or more lie in a page,
// all entries of an item are loaded at once, and a lane has the entry of 16 keys (16 × 8 heads, 8192 keys in pages of 16: 131 µs,
// and 136 by an entry for each tile; not beside codes, which leave no register for it: 105 and 97; H200, 2026-11). Else every key
// has an entry of its own. Both are loaded before they are needed, by a tile.
#pragma once
#include "common/pages.cuh"
#include "decode/items.cuh"

#if PAGED
__device__ inline i64 shuffle(i64 x, int lane) {
    const u32 low = __shfl_sync(~0u, (u32)x, lane), high = __shfl_sync(~0u, (u32)(x >> 32), lane);
    return (i64)((u64)high << 32 | low);
}

struct TilePages {
    static constexpr int PARTS = TILE / 16, STEP = WARPS * TILE, MOST = 32 / PARTS;  // tiles whose entries a warp holds
    static constexpr bool BY_ITEM = !CODES;

    static constexpr int OWN = (TILE + 31) / 32;

    KeyPlace own[OWN];          // of key lane % TILE of the next tile, and of that 32 further on, as far as there is one
    int entries = 0, from = 0;  // where pages are even: those of the item's tiles from key `from` on

    // Whether each 16 keys of a tile are evenly spaced rows of one page.
    __device__ static bool are_even(const Params& p) { return p.ragged.page_size % 16 == 0; }
    // Where one of the lane's keys begins, in what strides count.
    __device__ i64 offset(const i64 (&stride)[4], int n = 0) const { return own[n].block * stride[0] + own[n].row * stride[2]; }
    __device__ bool any_is_bad(const Params& p) const {
        bool is_bad = false;
#pragma unroll
        for (const KeyPlace& of : own) is_bad |= !of.exists(p);
        return __any_sync(~0u, is_bad);
    }

    // To an item whose first tile begins at key n0.
    __device__ void enter(const Params& p, const Item& item, int n0) {
        if (BY_ITEM && are_even(p)) entries = load(p, item, n0), from = n0;
    }
    // To the tile from key n0 on.
    __device__ void advance(const Params& p, const Item& item, int n0) {
        if (BY_ITEM && are_even(p)) return;
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const int j = n0 + n * 32 + threadIdx.x % (TILE < 32 ? TILE : 32);
            own[n].block = 0, own[n].row = 0;
            if (j < item.sequence.kv_len(p)) own[n] = KeyPlace(p, item.batch, j);
        }
    }
    // What was loaded for it is needed.
    __device__ void settle(const Params& p, const Item& item, int n0) {
        if (!BY_ITEM || !are_even(p)) return;
        int tile = (n0 - from) / STEP;
        if (tile >= MOST) entries = load(p, item, n0), from = n0, tile = 0;
        const int in_tile = threadIdx.x % TILE, j = n0 + in_tile;
        own[0].block = __shfl_sync(~0u, entries, tile * PARTS + in_tile / 16);
        own[0].row = j - divide(j, p.ragged.by_page_size) * p.ragged.page_size;
    }

  private:
    // The lane's entry of the tiles from key n0 on.
    __device__ static int load(const Params& p, const Item& item, int n0) {
        const int lane = threadIdx.x % 32, j = n0 + lane / PARTS * STEP + lane % PARTS * 16;
        return j < item.sequence.kv_len(p) ? KeyPlace(p, item.batch, j).block : 0;
    }
};
#endif

// Tile after tile, item after item: where a warp's loads are.
struct Walk {
    Item item;
    u32 left;
    int n0, end;
#if PAGED
    TilePages pages;
#endif
    __device__ Walk(const Item& first, u32 count) : item(first), left(count) {}

    // To before the first tile of the item.
    __device__ void enter(const Params& p) {
        const Tiles tiles(p, item, item.seen(p));
        n0 = tiles.n0 - WARPS * TILE, end = tiles.end;
#if PAGED
        pages.enter(p, item, tiles.n0);
#endif
    }
    // To the next tile; `entered()` follows where that is of another item.
    template <class Entered>
    __device__ void advance(const Params& p, Entered entered) {
        n0 += WARPS * TILE;
        while (n0 >= end && left > 1) left--, item.step(p), enter(p), entered(), n0 += WARPS * TILE;
#if PAGED
        pages.advance(p, item, n0);
#endif
    }
};
