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

// Batch entries batch .. entries, heads head .. heads, tiles of ROWS queries from query on, and tiles of COLUMNS keys from key on.
template <int ROWS, int COLUMNS>
struct SummedTile {
    int batch, entries, head, heads, query, query_end, key, key_end;
    __device__ SummedTile(const BackwardParams& b, u32 block) {
        const Params& p = b.all;
        const int* size = b.d_mask_size;
        const int query_tiles = (p.q_len + ROWS - 1) / ROWS, key_tiles = (p.kv_len + COLUMNS - 1) / COLUMNS;
        const int rows = size[2] == 1 ? 1 : query_tiles, columns = size[3] == 1 ? 1 : key_tiles;
        key = block % columns, query = block / columns % rows;
        head = block / columns / rows % size[1], batch = block / columns / rows / size[1];
        heads = size[1] == 1 ? p.heads : head + 1, entries = size[0] == 1 ? b.batch : batch + 1;
        query_end = size[2] == 1 ? query_tiles : query + 1, key_end = size[3] == 1 ? key_tiles : key + 1;
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
    // Writes sums of pairs, of row r and column c `at(r, c)`: of a size of 1, all of them in order.
    template <int THREADS, class At>
    __device__ void store(const BackwardParams& b, At at) const {
        const int* size = b.d_mask_size;
        const i64 first = row_offset(b.d_mask_stride, batch, head, query * ROWS) + key * COLUMNS * b.d_mask_stride[3];
        const bool is_row = size[2] == 1, is_column = size[3] == 1;
        const int rows = is_row ? 1 : min(ROWS, size[2] - query * ROWS), columns = is_column ? 1 : min(COLUMNS, size[3] - key * COLUMNS);
#pragma unroll 4
        for (int n = threadIdx.x; n < ROWS * COLUMNS; n += THREADS) {
            const int r = n / COLUMNS, c = n % COLUMNS;
            if (r >= rows || c >= columns) continue;
            Acc sum = at(r, c);
            if (is_row || is_column) {
                sum = 0;
                for (int row = r; row < (is_row ? ROWS : r + 1); row++)
                    for (int column = c; column < (is_column ? COLUMNS : c + 1); column++) sum += at(row, column);
            }
            store_as(b.d_mask, MASK_DTYPE, first + r * b.d_mask_stride[2] + c * b.d_mask_stride[3], sum);
        }
    }
};
