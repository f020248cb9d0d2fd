// kernels/backward/hopper_items.cuh compiled for the host: reads Items, and where VARLEN their KeyTiles; prints their items. recorded/host/items.rs and
// key_tiles.rs judge them.
//
//   out   batch or sequence, head, tile of keys, whole from and up to, then each tile of queries, its turn, and how many turns it has in all; a line for an
//         item

#include <cstdio>
#include <vector>

#include "backward/hopper_items.cuh"

int main() {
    Items of;
    while (std::fread(&of, sizeof of, 1, stdin) == 1) {
        std::vector<KeyTile> key_tiles(VARLEN ? of.key_tiles : 0);
        if (VARLEN && std::fread(key_tiles.data(), sizeof(KeyTile), key_tiles.size(), stdin) != key_tiles.size()) return 1;
        for (int number = 0; number < of.count; number++) {
            const Item item = item_of(of, number, key_tiles.data());
#if VARLEN
            const Extent extent = item.of;
            const int entry = item.number, step = item.step;
            if (extent.kv_len == 0) continue;
#else
            const Extent extent = of.all;
            const int entry = item.batch, step = of.step;
#endif
            std::printf("%d %d %d %d %d", entry, item.kv_head, item.tile, whole_from(extent, item), whole_to(extent, item));
            for (int n = 0; n < item.tiles; n++) {
                const int i = item.first_tile + n * step;
                std::printf(" %d %u %u", i, turn_of(extent, step, item.tile, i), turns_in_all(extent, i));
            }
            std::putchar('\n');
        }
    }
    return 0;
}
