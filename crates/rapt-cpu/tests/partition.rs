//! How a request is cut, compiled by itself: the library has no unit tests.

#[allow(dead_code)]
#[path = "../src/partition.rs"]
mod partition;

use std::collections::HashSet;

use partition::{Order, Partition};

#[test]
fn every_order_deals_each_item_once() {
    for (batch, heads, chunks) in [(1, 1, 1), (2, 3, 4), (3, 1, 5), (1, 7, 1)] {
        let tasks: usize = batch * heads;
        let last = [1, tasks.div_ceil(2), tasks].map(|last_tasks| Order::LastRows { last_tasks });
        for order in [Order::Tasks, Order::Heads { tasks: heads }].into_iter().chain(last) {
            let partition = Partition {
                tasks,
                heads: 1,
                rows: 8,
                chunk_rows: 8,
                chunks,
                order,
                block_n: 16,
                narrow: false,
                pv_keys: 8,
                ahead_bytes: 0,
                k_in_place: true,
                v_in_place: true,
            };
            let items: HashSet<_> = (0..partition.items())
                .map(|n| partition.item(n))
                .inspect(|item| assert!(item.task < tasks && item.chunk < chunks, "{order:?}: {item:?}"))
                .map(|item| (item.task, item.chunk))
                .collect();
            assert_eq!(items.len(), tasks * chunks, "{order:?}");
            for (n, threads) in (0..partition.items()).flat_map(|n| [(n, 1), (n, 2), (n, 64)]) {
                let turn = partition.turn(n, threads);
                let next = (n + threads < partition.items()).then(|| partition.item(n + threads));
                assert_eq!((turn.item, turn.next), (partition.item(n), next), "{order:?}");
            }
        }
    }
}
