//! Caches of sequences with lengths of their own: what each launch is given.

use super::*;
use crate::params::{HopperCacheParams, HopperItems, MOST_LEN};

#[test]
fn lengths_and_pages_are_passed_to_both_kernels_that_read_them() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    for is_coded in [false, true] {
        let request = Request { is_cache: true, is_coded, ..Request::new(1, 5000) };
        let ran = recorded.run(request, 1 << 24).unwrap();
        assert_eq!(ran.len(), 2, "{ran:?}");
        for call in &ran {
            let Call::Launch { params, grid, .. } = call else { panic!("{ran:?}") };
            assert_eq!(params.len(), LaunchParams::bytes_of(true, true));
            assert!(grid.overlaps);
            let word = |at: usize| usize::from_le_bytes(params[at..at + 8].try_into().unwrap());
            let first = LaunchParams::bytes_of(true, false);
            assert_eq!([word(first), word(first + 8)], [at(11, 0).addr(), at(10, 0).addr()]);
            // Of one sequence: strides of its batch are none. Then batch and new keys, pages and their size.
            assert_eq!([word(first + 16), word(first + 24), word(first + 32)], [0, 0, 1]);
            assert_eq!([word(first + 40), word(first + 48)], [1, 16 << 32 | 1000]);
        }
    }
}

#[test]
fn many_queries_of_a_cache_are_launched_once_for_each_tile_that_its_sequences_have() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    for (head_dim, kv_len, tiles) in [
        (64, 5000, vec![(128, [0, MOST_LEN])]),
        (96, 2047, vec![(96, [0, MOST_LEN])]),
        (96, 2048, vec![(96, [0, 2048]), (112, [2048, MOST_LEN])]),
    ] {
        let request = Request { is_cache: true, head_dim, ..Request::new(300, kv_len) };
        let ran = recorded.run(request, 0).unwrap();
        let launches: Vec<_> = ran
            .iter()
            .filter_map(|call| if let Call::Launch { grid, params, .. } = call { Some((grid, params)) } else { None })
            .collect();
        assert_eq!(launches.len(), tiles.len(), "{head_dim} {kv_len}");
        for ((grid, params), (_, keys)) in launches.into_iter().zip(&tiles) {
            assert_eq!((params.len(), grid.overlaps), (size_of::<HopperCacheParams>(), false));
            let at_byte = |at: usize| &params[at..at + 8];
            let word = |at: usize| usize::from_le_bytes(at_byte(at).try_into().unwrap());
            let maps = 5 * size_of::<TensorMap>();
            let ragged = maps + LaunchParams::bytes_of(true, false);
            assert_eq!([word(maps), word(maps + 8)], [at(1, 0).addr(), at(2, 0).addr()]);
            assert_eq!([word(ragged), word(ragged + 8)], [at(11, 0).addr(), at(10, 0).addr()]);
            let own = maps + size_of::<LaunchParams>() + size_of::<HopperItems>();
            let int = |n: usize| i32::from_le_bytes(params[own + 4 * n..][..4].try_into().unwrap());
            assert_eq!([int(0), int(1), int(2)], [keys[0] as i32, keys[1] as i32, 16]);
        }
        // Pages as TMA steps through them: boxes of one page each.
        let boxes: Vec<_> = ran
            .iter()
            .filter_map(|call| match call {
                Call::Encode { tensor, address } => Some((address >> 32, tensor.sizes, tensor.box_rows)),
                _ => None,
            })
            .filter(|(tensor, ..)| [2, 3].contains(tensor))
            .collect();
        let of = |tensor| (tensor, [head_dim as u64, 16, 2, 1000], 16);
        assert_eq!(boxes, tiles.iter().flat_map(|_| [of(2), of(3)]).collect::<Vec<_>>());
        let plan = recorded.plan(request).unwrap();
        let says = plan.why().contains("sequences of other lengths by hopper bfloat16 96/96 paged");
        assert_eq!((plan.block_n(), says), (tiles[tiles.len() - 1].0, tiles.len() > 1), "{}", plan.why());
    }
}
