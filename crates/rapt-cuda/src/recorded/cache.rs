//! Caches of sequences with lengths of their own: what each launch is given.

use super::*;
use crate::append::{AppendParams, NewKeys};
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
        (64, 80, vec![(80, [0, MOST_LEN])]),
        (64, 512, vec![(128, [513, 81]), (64, [81, 513])]),
        (64, 5000, vec![(64, [81, 513]), (128, [513, 81])]),
        (128, 5000, vec![(128, [0, MOST_LEN])]),
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
        let says =
            plan.why().contains(&format!("sequences of other lengths by hopper bfloat16 {head_dim}/{head_dim} paged"));
        assert_eq!((plan.block_n(), says), (tiles[tiles.len() - 1].0, tiles.len() > 1), "{}", plan.why());
    }
}

/// Caches of 16 keys a page in `format` with factors by token, or of bfloat16, for which `new` keys of this dtype come.
fn with_new_keys<T>(
    format: Option<Format>,
    new: (usize, DType),
    answer: impl FnOnce(&Spec, Tensors<'_>, &NewKeys<'_>) -> T,
) -> T {
    let device = Device::Cuda(0);
    let read = |name, n: usize, dtype, shape: &[usize]| {
        let shape = Shape::new(shape).unwrap();
        let strides = shape.contiguous().unwrap();
        // SAFETY: the recorded driver reads nothing.
        unsafe { View::from_raw_parts(name, at(n, 0), dtype, shape, strides, device, Extent::Declared) }.unwrap()
    };
    let (count, dtype) = new;
    let q = read("q", 1, DType::BF16, &[2, count, 4, 64]);
    let [k, v] = [("k", 2), ("v", 3)].map(|(name, n)| {
        let width = format.map_or(64, |format| 64 / format.codes_per_byte());
        read(name, n, format.map_or(DType::BF16, Format::code_dtype), &[1000, 16, 2, width])
    });
    let (table, lengths) = (read("page_table", 10, DType::I32, &[2, 100]), read("cache_seqlens", 11, DType::I32, &[2]));
    let codes = |name, n| format.map(|format| Box::new(Codes::new(format, read(name, n, DType::F32, &[1000, 16, 2]))));
    let codes = Qkv { q: None, k: codes("k_descale", 6), v: codes("v_descale", 7) };
    let shape = Shape::from([2, count, 4, 64]);
    let (strides, ptr) = (shape.contiguous().unwrap(), at(4, 0));
    // SAFETY: the recorded driver writes nothing.
    let out = unsafe { ViewMut::from_raw_parts("out", ptr, DType::BF16, shape, strides, device, Extent::Declared) };
    let out = out.unwrap();
    let options = Options { layout: rapt_core::TensorLayout::Bshd, ..Options::default() };
    let mut builder = Spec::builder(&q, &k, &v, &options);
    builder.pages(&table, 1600).lengths(Some(&lengths), count);
    let spec = builder.codes(codes.as_deref()).out(&out).build().unwrap();
    let [new_k, new_v] = [("k", 12), ("v", 13)].map(|(name, n)| read(name, n, dtype, &[2, count, 2, 64]));
    let tensors = Tensors { codes, page_table: Some(table), lengths: Some(lengths), ..Tensors::new(q, k, v, out) };
    answer(&spec, tensors, &NewKeys { k: new_k, v: Some(new_v) })
}

#[test]
fn new_keys_are_written_first_as_bits_or_as_codes() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let first_words = |params: &[u8], from: usize| {
        let word = |n: usize| usize::from_le_bytes(params[from + 8 * n..][..8].try_into().unwrap());
        [word(0), word(1)]
    };
    for (format, count, dtype) in [
        (None, 1, DType::BF16),
        (None, 300, DType::BF16),
        (Some(Format::Int8), 1, DType::F32),
        (Some(Format::Int4), 300, DType::F64),
    ] {
        with_new_keys(format, (count, dtype), |spec, tensors, new| {
            let plan = recorded.backend.plan(spec).unwrap();
            let mut operands = Operands::check(tensors, plan.spec()).unwrap();
            let memory = DeviceMemory { address: at(9, 0).addr(), len_bytes: plan.workspace_bytes() };
            recorded.log.take();
            // SAFETY: the recorded driver touches no memory.
            let run = || unsafe { recorded.backend.append_and_run(&plan, &mut operands, new, memory, 77) };
            recorded.log.during_run(run).unwrap();
            let calls = recorded.log.take();
            let mut launches = calls.iter().filter_map(|call| match call {
                Call::Launch { grid, params, .. } => Some((grid.blocks as usize, params)),
                _ => None,
            });
            let (blocks, params) = launches.next().unwrap();
            assert_eq!((blocks, params.len()), (2 * count, AppendParams::bytes_of(format.is_some())));
            // Where new keys lie, and where they go.
            let side = size_of::<LaunchParams>();
            assert_eq!(first_words(params, side), [at(12, 0).addr(), at(2, 0).addr()]);
            if format.is_some() {
                let ints = &params[AppendParams::bytes_of(false)..];
                let int = |n: usize| i32::from_le_bytes(ints[4 * n..][..4].try_into().unwrap());
                assert_eq!([int(0), int(1), int(2), int(3)], [i32::from(dtype.code()), i32::from(dtype.code()), 1, 1]);
            }
            assert!(launches.next().is_some(), "{calls:?}");
        });
    }
    // Numbers of another dtype than the cache of numbers has, and what is no number.
    for (format, dtype) in [(None, DType::F16), (Some(Format::Int8), DType::I8)] {
        with_new_keys(format, (1, dtype), |spec, tensors, new| {
            let plan = recorded.backend.plan(spec).unwrap();
            let mut operands = Operands::check(tensors, plan.spec()).unwrap();
            let memory = DeviceMemory { address: at(9, 0).addr(), len_bytes: plan.workspace_bytes() };
            recorded.log.take();
            // SAFETY: the recorded driver touches no memory.
            let refused = unsafe { recorded.backend.append_and_run(&plan, &mut operands, new, memory, 77) };
            assert!(matches!(refused, Err(Error::NotAsPlanned { tensor: "k", .. })), "{refused:?}");
            assert_eq!(recorded.log.take(), []);
        });
    }
}
