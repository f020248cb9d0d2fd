// A tile of keys as backward_hopper.cu takes it: of a request, or of one of the sequences that lie one after another in it.
//
// Of sequences backward_rows.cu finds these, a KeyTile for each that there may be, in the order in which they are taken: some sequences at a time, and
// of these always the one of which most is left. Who multiplies reads no offsets. Plain C++ but for __device__.

#pragma once
#include "common/types.cuh"

// Query i sees keys i + lo_shift .. i + hi_shift of those there are.
struct Extent {
    int q_len, kv_len, lo_shift, hi_shift;
};

// The tile-th of a sequence; no keys where there is none. Where the sequence's queries and keys begin in their tensors, and its rows in what is kept of
// queries: in tiles of BLOCK_M rows, and of 16. All have no keys where offsets are not in order: tiles of two sequences could be one.
struct KeyTile {
    int number, tile, first_query, first_key;
    Extent of;
    int query_tile, sums_tile, is_in_order, step;  // step: as of Items, of the sequence
};
