//! The table of tiles as requests meet it. Where classes end is asserted where they are declared, when this crate is compiled.

use rapt_core::{Arch, Caps, Causal, DType, Device, Extent, Options, Shape, Spec, View};
use rapt_cpu::select;
use rapt_cpu::tiles::{DecodeTile, ForwardTile, Tiles};

const ARCHES: [Arch; 5] = [Arch::Avx2, Arch::Avx512, Arch::Avx512Bf16, Arch::Amx, Arch::Scalar];
const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// The spec of tensors that are never read.
fn spec(dtype: DType, q_len: usize, head_dim: usize, head_dim_v: usize) -> Spec {
    spec_of(dtype, [2, q_len, 77], [head_dim, head_dim_v], &Options::default())
}

fn spec_of(
    dtype: DType,
    [heads, q_len, kv_len]: [usize; 3],
    [head_dim, head_dim_v]: [usize; 2],
    options: &Options,
) -> Spec {
    let view = |name, shape: [usize; 4]| {
        let shape = Shape::from(shape);
        let nowhere = std::ptr::without_provenance(1 << 20);
        let strides = shape.contiguous().unwrap();
        // SAFETY: a spec is made of it, which holds no pointer; nobody reads it.
        unsafe { View::from_raw_parts(name, nowhere, dtype, shape, strides, Device::Cpu, Extent::Declared) }.unwrap()
    };
    let (q, k) = (view("q", [1, heads, q_len, head_dim]), view("k", [1, heads, kv_len, head_dim]));
    Spec::builder(&q, &k, &view("v", [1, heads, kv_len, head_dim_v]), options).build().unwrap()
}

#[test]
fn items_in_intels_tiles_end_together() {
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    let plain = Options::default();
    let items = |dtype, heads, len, threads, options: &Options| {
        let caps = Caps { arch: Arch::Amx, threads, clock_hz: None };
        select(&spec_of(dtype, [heads, len, len], [128; 2], options), &caps).unwrap().items()
    };
    // K and V are packed for each: of one head there are as many as threads, or where rows see half of the keys a few more.
    assert_eq!(items(DType::BF16, 1, 512, 2, &plain), 2);
    assert_eq!(items(DType::F32, 1, 512, 2, &plain), 2);
    assert_eq!(items(DType::BF16, 1, 1024, 2, &plain.with_causal(Causal::TopLeft)), 4);
    // Whole heads where there are many to a thread, halves where the last round would leave half of the threads idle.
    assert_eq!(items(DType::F32, 24, 1024, 2, &plain), 24);
    assert_eq!(items(DType::F32, 24, 1024, 16, &plain), 48);
}

#[test]
fn requests_of_one_class_have_one_tile() {
    for (arch, dtype) in ARCHES.iter().flat_map(|arch| DTYPES.map(|dtype| (*arch, dtype))) {
        let of = |q_len, head_dim| Tiles::of(&spec(dtype, q_len, head_dim, head_dim), arch);
        for head_dim in [1, 63, 64] {
            assert_eq!(of(20, head_dim), of(20, 40), "{arch:?} {dtype} {head_dim}");
        }
        for head_dim in [65, 127, 128] {
            assert_eq!(of(20, head_dim), of(20, 80), "{arch:?} {dtype} {head_dim}");
        }
        for head_dim in [129, 1000] {
            assert_eq!(of(20, head_dim), of(20, 256), "{arch:?} {dtype} {head_dim}");
        }
        for (q_len, other) in [(2, 255), (256, 1023), (1024, 5000)] {
            assert_eq!(of(q_len, 64), of(other, 64), "{arch:?} {dtype} {q_len}");
        }
        // The wider of the two decides.
        let uneven = |head_dim, head_dim_v| Tiles::of(&spec(dtype, 20, head_dim, head_dim_v), arch);
        assert_eq!(uneven(64, 129), of(20, 129), "{arch:?} {dtype}");
        assert_eq!(uneven(129, 64), of(20, 129), "{arch:?} {dtype}");
    }
}

#[test]
fn more_queries_leave_the_blocks_of_keys_alone() {
    for (arch, dtype) in ARCHES.iter().flat_map(|arch| DTYPES.map(|dtype| (*arch, dtype))) {
        for head_dim in [64, 128, 256] {
            let block_n = |q_len| Tiles::of(&spec(dtype, q_len, head_dim, head_dim), arch).forward.numbers()[0];
            for q_len in [255, 256, 1023, 1024] {
                assert_eq!(block_n(q_len), block_n(2), "{arch:?} {dtype} {head_dim} {q_len}");
            }
        }
    }
}

#[test]
fn numbers_outside_the_lists_make_no_tile() {
    assert!(ForwardTile::new(128, 256, false).is_some());
    assert!(ForwardTile::new(0, 256, false).is_none() && ForwardTile::new(128, 100, false).is_none());
    assert!(DecodeTile::new(512, 8, 0, 4096).is_some());
    assert!(DecodeTile::new(512, 7, 0, 0).is_none() && DecodeTile::new(512, 8, 1, 0).is_none());
}
