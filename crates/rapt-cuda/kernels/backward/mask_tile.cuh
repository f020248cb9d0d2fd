// A tile of the gradient of a mask, and what is summed in it: of all that the mask is broadcast to, a gradient of size 1 has one number.
// Its biases are the same for all of that: they are read once, to shared memory.
// Deliberately absent: what a pair adds (backward.cu, backward_mma.cu).

#pragma once
#include "backward/request.cuh"

#define OF_MASK 3

#if MASK == ADDITIVE_MASK
// Biases of ROWS queries and COLUMNS keys; of 16 bits as they are stored. Rows are padded so that what a warp reads falls into distinct banks.
constexpr bool HAS_NARROW_BIASES = MASK_DTYPE == F16 || MASK_DTYPE == BF16;
template <int ROWS, int COLUMNS, bool NARROW = HAS_NARROW_BIASES>
struct BiasTile {
    u16 of[ROWS][COLUMNS + 8];
    __device__ void set(const Params& p, int r, int c, i64 at) { of[r][c] = ((const u16*)p.mask)[at]; }
    // Of two neighbouring keys, the first of them even.
    __device__ float2 pair(int r, int c) const {
        const u32 two = *(const u32*)&of[r][c];
        return {bias_of_pair(two, 0), bias_of_pair(two, 1)};
    }
};
template <int ROWS, int COLUMNS>
struct BiasTile<ROWS, COLUMNS, false> {
    float of[ROWS][COLUMNS + 8];
    __device__ void set(const Params& p, int r, int c, i64 at) { of[r][c] = (float)load_as(p.mask, MASK_DTYPE, at); }
    __device__ float2 pair(int r, int c) const { return *(const float2*)&of[r][c]; }
};
#endif

// A tile of ROWS queries and COLUMNS keys, and which summands of it a block adds up: with few tiles several blocks sum parts of each, in
// b.mask_sums, and backward_mask.cu adds those. A summand has one batch entry, one head and one tile of queries, and all tiles of keys from key to key_end.
template <int ROWS, int COLUMNS>
struct SummedTile {
    int batch, head, query, key, key_end;  // first ones along a size of 1
    u32 heads, queries;                    // so many of a batch entry, and of a head
    u32 first, end;                        // summands of the block
    __device__ SummedTile(const BackwardParams& b, u32 block) {
        const Params& p = b.all;
        const int* size = b.d_mask_size;
        const u32 parts = (u32)b.mask_parts, tile = block / parts, part = block - tile * parts;
        const int query_tiles = (p.q_len + ROWS - 1) / ROWS, key_tiles = (p.kv_len + COLUMNS - 1) / COLUMNS;
        const int rows = size[2] == 1 ? 1 : query_tiles, columns = size[3] == 1 ? 1 : key_tiles;
        key = tile % columns, query = tile / columns % rows;
        head = tile / columns / rows % size[1], batch = tile / columns / rows / size[1];
        heads = size[1] == 1 ? p.heads : 1, queries = size[2] == 1 ? query_tiles : 1;
        key_end = size[3] == 1 ? key_tiles : key + 1;
        const u32 summands = (size[0] == 1 ? b.batch : 1) * heads * queries, least = summands / parts, more = summands % parts;
        first = part * least + min(part, more), end = first + least + (part < more);
    }
    struct Summand {
        int batch, head, query;
    };
    // Batch entries outermost, tiles of queries innermost.
    __device__ Summand at(u32 n) const {
        const u32 of_heads = n / queries, of_batches = of_heads / heads;
        return {batch + (int)of_batches, head + (int)(of_heads - of_batches * heads), query + (int)(n - of_heads * queries)};
    }
#if MASK == ADDITIVE_MASK
    // Reads biases; zeros beyond the mask.
    template <int THREADS>
    __device__ void load(const Params& p, BiasTile<ROWS, COLUMNS>& to) const {
#pragma unroll 8
        for (int n = threadIdx.x; n < ROWS * COLUMNS; n += THREADS) {
            const int r = n / COLUMNS, c = n % COLUMNS, i = query * ROWS + r, j = key * COLUMNS + c;
            if (i < p.q_len && j < p.kv_len) to.set(p, r, c, mask_key(p, row_offset(p.mask_stride, batch, head, i), j));
            else to.of[r][c] = 0;
        }
    }
#endif
    // Where the numbers of a block's part begin.
    __device__ static Acc* part_of(const BackwardParams& b, u32 block) { return (Acc*)b.mask_sums + (i64)block * (ROWS * COLUMNS); }
    __device__ static bool is_row(const BackwardParams& b) { return b.d_mask_size[2] == 1; }
    __device__ static bool is_column(const BackwardParams& b) { return b.d_mask_size[3] == 1; }
    // Whether the gradient has a number of the tile's row r and column c.
    __device__ bool has(const BackwardParams& b, int r, int c) const {
        const int rows = is_row(b) ? 1 : b.d_mask_size[2] - query * ROWS, columns = is_column(b) ? 1 : b.d_mask_size[3] - key * COLUMNS;
        return r < rows && c < columns;
    }
    __device__ void store_number(const BackwardParams& b, int r, int c, Acc sum) const {
        const i64 row = row_offset(b.d_mask_stride, batch, head, query * ROWS + r);
        store_as(b.d_mask, MASK_DTYPE, row + (key * COLUMNS + c) * b.d_mask_stride[3], sum);
    }
    // Writes sums of pairs, of row r and column c `at(r, c)`: of a size of 1, all of them in order.
    template <int THREADS, class At>
    __device__ void store(const BackwardParams& b, At at) const {
#pragma unroll 4
        for (int n = threadIdx.x; n < ROWS * COLUMNS; n += THREADS) {
            const int r = n / COLUMNS, c = n % COLUMNS;
            if (!has(b, r, c)) continue;
            Acc sum = at(r, c);
            if (is_row(b) || is_column(b)) {
                sum = 0;
                for (int row = r; row < (is_row(b) ? ROWS : r + 1); row++)
                    for (int column = c; column < (is_column(b) ? COLUMNS : c + 1); column++) sum += at(row, column);
            }
            if (b.mask_parts > 1) part_of(b, blockIdx.x)[n] = sum;
            else store_number(b, r, c, sum);
        }
    }
};
