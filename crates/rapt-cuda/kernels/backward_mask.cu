// The gradient of a mask whose tiles several blocks have summed: their parts, added in one order.
//
//   A block THREADS numbers of a tile. Parts of a tile lie one after another.

#include "backward/mask_tile.cuh"

constexpr int THREADS = 256, OF_TILE = BLOCK_M * BLOCK_N, BLOCKS = OF_TILE / THREADS;  // numbers and blocks of a tile
static_assert(OF_TILE % THREADS == 0, "a tile is whole blocks");

extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ BackwardParams b) {
    using Tile = SummedTile<BLOCK_M, BLOCK_N>;
    const u32 parts = (u32)b.mask_parts, first = blockIdx.x / BLOCKS * parts;
    const int n = blockIdx.x % BLOCKS * THREADS + threadIdx.x, r = n / BLOCK_N, c = n % BLOCK_N;
    const Tile tile(b, first);
    if (!tile.has(b, r, c)) return;
    Acc sum = 0;
#pragma unroll 16
    for (u32 part = 0; part < parts; part++) sum += Tile::part_of(b, first + part)[n];
    tile.store_number(b, r, c, sum);
}
