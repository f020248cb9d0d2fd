// kernels/backward/hopper_items.cuh compiled for the host: reads Items, prints their items. recorded/host/items.rs judges them.
//
//   out   batch, head, tile of keys, whole from and up to, then each tile of queries and its turn; a line for an item

#include <cstdio>

#include "backward/hopper_items.cuh"

int main() {
    Items of;
    while (std::fread(&of, sizeof of, 1, stdin) == 1) {
        for (int number = 0; number < of.count; number++) {
            const Item item = item_of(of, number);
            std::printf("%d %d %d %d %d", item.batch, item.kv_head, item.tile, whole_from(of, item), whole_to(of, item));
            for (int n = 0; n < item.tiles; n++) {
                const int i = item.first_tile + n * of.step;
                std::printf(" %d %u", i, turn_of(of, item.tile, i));
            }
            std::putchar('\n');
        }
    }
    return 0;
}
