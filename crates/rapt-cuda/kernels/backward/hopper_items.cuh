// What the blocks of backward_hopper.cu work off, and in which order; and what backward_parts.cu waits for.
//
//   item     BLOCK_N keys of a key head, and the tiles of BLOCK_M queries that see them. Taken from one count in device memory: a tile of keys
//            of each of `heads` heads, then the next tile of each, and when these heads are done the next ones.
//   step     1: last keys first, and queries from the first on;  -1: first keys first, and queries from the last back. A sequence has its own
//            (KeyTile), which is the other one from `long_queries` on
//   turns    dq of a tile of queries, a half of its columns or of its 128 queries: how many items have added to it, of those whose keys it sees, in
//            that order of keys
//
// Whoever waits for a turn waits for an item that another block has taken before: that is at work on it or on one taken still earlier, and waits at most
// for earlier ones. Of sequences that lie one after another tiles are a sequence's own: backward_rows.cu has found which (KeyTile).
// Plain C++ but for __device__: recorded/host/items.rs runs it for whole requests.

#pragma once
#include "backward/key_tile.cuh"

constexpr int BM = BLOCK_M, BN = BLOCK_N;

// Byte for byte HopperItems of backward.rs.
struct Items {
    int count, key_tiles, heads, step;
    int matrices, kv_heads;  // of all batch entries, and of one
    Extent all;
    int sequences, long_queries;  // tiles of how many sequences are taken together: backward_rows.cu is told both by BackwardParams
};

// Which tile of queries is taken first, and how many there are: none where nobody sees the keys.
struct Item {
    int batch, kv_head, tile, first_tile, tiles;
#if VARLEN
    int number, first_query, first_key;
    Extent of;
    int query_tile, sums_tile, step;
#endif
    __device__ int first() const { return tile * BN; }
};

__device__ inline int between(int x, int most) { return x < 0 ? 0 : x > most ? most : x; }

// The queries of `item` that see a key of it.
__device__ inline void find_queries(Item& item, const Extent& of, int step) {
    const int end = item.first() + BN;
    const int lo = between(item.first() - of.hi_shift + 1, of.q_len), hi = between((end < of.kv_len ? end : of.kv_len) - of.lo_shift, of.q_len);
    const int first_tile = lo / BM, end_tile = (hi + BM - 1) / BM;
    item.first_tile = step > 0 ? first_tile : end_tile - 1, item.tiles = hi > lo ? end_tile - first_tile : 0;
}

// Of sequences: of the tiles that `key_tiles` has in their order.
__device__ inline Item item_of(const Items& of, int number, const void* key_tiles = nullptr) {
    const int set = number / (of.heads * of.key_tiles), in_set = number - set * of.heads * of.key_tiles, left = of.matrices - set * of.heads;
    const int heads = left < of.heads ? left : of.heads, nth = in_set / heads;
    Item item;
    item.tile = of.step > 0 ? of.key_tiles - 1 - nth : nth;
    const int matrix = set * of.heads + in_set - nth * heads;
    item.batch = matrix / of.kv_heads, item.kv_head = matrix - item.batch * of.kv_heads;
#if VARLEN
    const KeyTile& found = ((const KeyTile*)key_tiles)[nth];
    item.tile = found.tile, item.number = found.number, item.first_query = found.first_query, item.first_key = found.first_key;
    item.of = found.of, item.query_tile = found.query_tile, item.sums_tile = found.sums_tile, item.step = found.step;
    find_queries(item, item.of, item.step);
#else
    find_queries(item, of.all, of.step);
#endif
    return item;
}

// The first and the last tile of keys that tile i of queries sees, if it sees any.
__device__ inline int first_seen(const Extent& of, int i) { return between(i * BM + of.lo_shift, of.kv_len) / BN; }
__device__ inline int last_seen(const Extent& of, int i) {
    const int end = i * BM + BM, last = (end < of.q_len ? end : of.q_len) - 1;
    return (between(last + of.hi_shift, of.kv_len) - 1) / BN;
}
// How many items add to tile i of queries before that of a tile of keys: those of keys taken earlier that it sees.
__device__ inline u32 turn_of(const Extent& of, int step, int tile, int i) { return step < 0 ? tile - first_seen(of, i) : last_seen(of, i) - tile; }
// And how many in all.
__device__ inline u32 turns_in_all(const Extent& of, int i) { return last_seen(of, i) - first_seen(of, i) + 1; }

// Tiles of which no pair is left out by its position: those of queries from the first number up to the second.
constexpr int NO_ROW = 1 << 30;
__device__ inline int whole_from(const Extent& of, const Item& item) {
    return item.first() + BN > of.kv_len ? NO_ROW : item.first() + BN - of.hi_shift;
}
__device__ inline int whole_to(const Extent& of, const Item& item) {
    const int end = item.first() - of.lo_shift + 1;
    return (end < of.q_len ? end : of.q_len) - BM;
}
