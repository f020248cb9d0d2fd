//! `select` over requests whose keys and values are codes, without a device.

mod common;

use common::{caps, spec_of_cache, spec_of_codes, spec_of_int8, spec_of_int8_cache, spec_of_varlen, view};
use rapt_core::{
    Arch, CodesForm, Compute, DType, Device, Format, Granularity, Kernel, Options, PRounding, Plan, Qkv, ScaleLayout,
    Spec, View, swizzle,
};
use rapt_cuda::{Algorithm, Codes, CudaLaunch, KernelVariant, Loads, Sequences, TileCodes, select, variants};

fn variant(plan: &Plan) -> KernelVariant {
    *plan.launch_plan::<CudaLaunch>().unwrap().variant().unwrap()
}

/// Of granularity `Tensor` to `Block`, each with a dtype of q.
const ASKED: [(Granularity, DType); 8] = [
    (Granularity::Tensor, DType::BF16),
    (Granularity::Head, DType::F32),
    (Granularity::Token, DType::F16),
    (Granularity::Token, DType::BF16),
    (Granularity::Channel, DType::BF16),
    (Granularity::Channel, DType::F16),
    (Granularity::Block(32), DType::F32),
    (Granularity::Block(32), DType::BF16),
];

#[test]
fn codes_of_k_and_v_take_the_tensor_cores_and_all_else_that_is_codes_is_read_in_place() {
    let plain = Options::default();
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm120] {
        for (format, (granularity, dtype)) in Format::ALL.into_iter().flat_map(|format| ASKED.map(|of| (format, of))) {
            for (q_len, head_dim) in
                [(1, 128usize), (16, 64), (3, 256), (17, 128), (300, 64), (300, 80), (4000, 256), (1, 512), (40, 257)]
            {
                // Blocks divide the head dim.
                let block = format.own_block_size().or(match granularity {
                    Granularity::Block(size) => Some(size),
                    _ => None,
                });
                if !head_dim.is_multiple_of(block.unwrap_or(1) * format.codes_per_byte()) {
                    continue;
                }
                let spec = spec_of_codes(dtype, [4, q_len, 3000, head_dim], format, granularity, &plain);
                let plan = select(&spec, &caps(arch)).unwrap();
                let found = variant(&plan);
                // Zero points of columns and blocks are taken away one by one.
                let tiled = head_dim <= 256
                    && (format != Format::Uint8
                        || !matches!(granularity, Granularity::Channel | Granularity::Block(_)));
                // Three terms of q at head_dim 256 need more shared memory than the smaller devices have.
                let small =
                    head_dim > 128 && caps(arch).shared_bytes < 100 * 1024 && found.algorithm == Algorithm::Generic;
                // Beside what float16 does not hold q is bfloat16.
                let is_held = match format {
                    Format::Mxfp8 | Format::Mxfp4 => false,
                    Format::Nvfp4 => true,
                    _ => !matches!(granularity, Granularity::Channel | Granularity::Block(_)),
                };
                let expected = match (tiled, q_len <= 16) {
                    (true, true) if !small => Algorithm::DecodeCodes,
                    (true, false) if dtype == DType::BF16 || (dtype == DType::F16 && is_held) => Algorithm::Mma,
                    _ => Algorithm::Generic,
                };
                let asked = format!("{arch:?} {format} {granularity} {dtype} {q_len} {head_dim}");
                assert_eq!(found.algorithm, expected, "{asked}");
                assert_ne!(found.codes, Codes::None, "{asked}");
                assert_eq!(plan.why_not_faster().is_empty(), expected != Algorithm::Generic, "{asked}");
                assert_eq!(plan.key().kernel == Kernel::Forward, expected == Algorithm::Mma, "{asked}");
                let shared = plan.launch().unwrap().shared_bytes;
                assert!(shared <= caps(arch).shared_bytes as usize, "{asked}");
                assert!(expected != Algorithm::Mma || shared <= 99 * 1024, "{asked}: the tile is the bits'");
                let numbers = variants(&common::spec(dtype, [4, q_len, 3000, head_dim], None, &plain), &caps(arch));
                assert_eq!(numbers.unwrap()[0].codes, Codes::None);
            }
        }
    }
    // Blocks of 8 are shorter than a product of few queries; q that is codes is read in place.
    let of = |q_len| spec_of_codes(DType::BF16, [4, q_len, 3000, 64], Format::Int8, Granularity::Block(8), &plain);
    assert_eq!(variant(&select(&of(1), &caps(Arch::Sm90a)).unwrap()).algorithm, Algorithm::Generic);
    assert_eq!(variant(&select(&of(100), &caps(Arch::Sm90a)).unwrap()).algorithm, Algorithm::Mma);
    for q_len in [1, 100] {
        let token = |name| CodesForm::new(Format::Int8, &view(name, DType::F32, &[1, 4, q_len]));
        let [q, k, v] = ["q", "k", "v"].map(|name| view(name, DType::I8, &[1, 4, q_len, 64]));
        let options = Options { out_dtype: Some(DType::F32), ..Options::default() };
        let all = Qkv { q: Some(token("q_descale")), k: Some(token("k_descale")), v: Some(token("v_descale")) };
        let spec = Spec::builder(&q, &k, &v, &options).codes(all).build().unwrap();
        let plan = select(&spec, &caps(Arch::Sm90a)).unwrap();
        assert_eq!(variant(&plan).algorithm, Algorithm::Generic);
        assert!(plan.why_not_faster().contains("q as numbers"), "{}", plan.why_not_faster());
    }
}

#[test]
fn many_queries_say_why_the_tensor_cores_do_not_take_their_codes() {
    let plain = Options::default();
    for (dtype, format, granularity, says) in [
        (DType::F32, Format::Int8, Granularity::Token, "at most 16 queries of float32"),
        (DType::F16, Format::Mxfp4, Granularity::Tensor, "no mx formats"),
        (DType::F16, Format::Int4, Granularity::Channel, "no channels of K"),
        (DType::BF16, Format::Uint8, Granularity::Channel, "zero points of tensors, heads or tokens"),
        (DType::BF16, Format::Int4, Granularity::Block(4), "factors of blocks of 8"),
    ] {
        let spec = spec_of_codes(dtype, [4, 100, 300, 64], format, granularity, &plain);
        let plan = select(&spec, &caps(Arch::Sm80)).unwrap();
        assert_eq!(plan.key().kernel, Kernel::Generic);
        assert!(plan.why_not_faster().contains(says), "{}", plan.why_not_faster());
    }
}

#[test]
fn many_queries_of_a_cache_of_codes_take_the_kernel_of_each_sequence_alone() {
    let plain = Options::default();
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm120] {
        for (head_dim, page_size) in [(64, 0), (64, 16), (128, 1), (80, 7), (256, 64)] {
            for (format, q_len) in [(Format::Int8, 17), (Format::Int4, 300), (Format::E4m3fn, 300)] {
                let cached =
                    spec_of_cache(DType::BF16, [3, 8, 2, q_len, 9000], [head_dim, page_size], Some(format), &plain);
                let all = variants(&cached, &caps(arch)).unwrap();
                let sequences = if page_size == 0 { Sequences::Ragged } else { Sequences::Paged };
                for kv_len in [20, 2047, 9000] {
                    let alone =
                        spec_of_codes(DType::BF16, [8, q_len, kv_len, head_dim], format, Granularity::Token, &plain);
                    let mut alone = variant(&select(&alone, &caps(arch)).unwrap());
                    assert_eq!(alone.algorithm, Algorithm::Mma);
                    alone.sequences = sequences;
                    let attending: Vec<_> = all.iter().filter(|of| of.algorithm != Algorithm::Append).collect();
                    assert_eq!(attending, [&alone], "{arch:?} {format} {head_dim} {page_size} {q_len} {kv_len}");
                }
            }
        }
    }
}

#[test]
fn swizzled_scales_take_the_kernel_of_scales_in_rows() {
    let of = |dtype, [q_len, head_dim]: [usize; 2], format: Format, scale_layout, step: isize, address| {
        let (device, extent, len) = (Device::Cuda(0), rapt_core::Extent::Declared, 900);
        let groups = head_dim / format.own_block_size().unwrap();
        let shape = match scale_layout {
            ScaleLayout::Plain => vec![1, 4, len, groups],
            ScaleLayout::Swizzle32x4x4 => vec![1, 4, swizzle::padded_numel(len, groups).unwrap()],
        };
        let shape = rapt_core::Shape::new(&shape).unwrap();
        let strides: Vec<isize> = shape.contiguous().unwrap().iter().map(|stride| stride * step).collect();
        let (at, strides) = (std::ptr::without_provenance(address), rapt_core::Strides::new(&strides).unwrap());
        // SAFETY: nobody reads it.
        let descale =
            unsafe { View::from_raw_parts("descale", at, format.scale_dtype(), shape, strides, device, extent) };
        let mut form = CodesForm { scale_layout, ..CodesForm::new(format, &descale.unwrap()) };
        form.has_global_scale = format.has_global_scale();
        let q = view("q", dtype, &[1, 4, q_len, head_dim]);
        let k = view("k", format.code_dtype(), &[1, 4, len, head_dim / format.codes_per_byte()]);
        let codes = Qkv { q: None, k: Some(form), v: Some(form) };
        let spec = Spec::builder(&q, &k, &k, &Options::default()).codes(codes).build().unwrap();
        variant(&select(&spec, &caps(Arch::Sm90a)).unwrap())
    };
    let of_codes = |codes: Codes, to: ScaleLayout| match codes {
        Codes::Tiles { k, v } => {
            let lying = |of| TileCodes { scale_layout: to, ..of };
            Codes::Tiles { k: lying(k), v: lying(v) }
        }
        other => other,
    };
    for format in [Format::Mxfp8, Format::Mxfp4, Format::Nvfp4] {
        for (dtype, q_len, head_dim) in [
            (DType::BF16, 1, 128),
            (DType::BF16, 100, 128),
            (DType::F32, 100, 64),
            (DType::F16, 3, 96),
            (DType::BF16, 9, 320),
        ] {
            let sizes = [q_len, head_dim];
            let plain = of(dtype, sizes, format, ScaleLayout::Plain, 1, 1 << 20);
            let swizzled = of(dtype, sizes, format, ScaleLayout::Swizzle32x4x4, 1, 1 << 20);
            let mut expected = plain;
            expected.codes = of_codes(plain.codes, ScaleLayout::Swizzle32x4x4);
            // By fours where a row has as many, side by side.
            assert_eq!(swizzled, expected, "{format} {dtype} {sizes:?}");
            for (step, address) in [(2, 1 << 20), (1, (1 << 20) + 2)] {
                let moved = of(dtype, sizes, format, ScaleLayout::Swizzle32x4x4, step, address);
                let groups = head_dim / format.own_block_size().unwrap();
                if groups.is_multiple_of(4) {
                    expected.loads = Loads::ByElement;
                }
                assert_eq!(moved, expected, "{format} {dtype} {sizes:?} {step} {address}");
            }
        }
    }
}

#[test]
fn sequences_over_codes_one_after_another_have_the_kernel_of_each_alone() {
    let plain = Options::default();
    let granularities = [Granularity::Head, Granularity::Token, Granularity::Channel, Granularity::Block(16)];
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm120] {
        for (format, granularity) in Format::ALL.into_iter().flat_map(|format| granularities.map(|of| (format, of))) {
            for (dtype, head_dim) in
                [(DType::BF16, 128), (DType::F16, 64), (DType::F32, 64), (DType::BF16, 256), (DType::F16, 288)]
            {
                let codes = Some((format, granularity));
                let together = spec_of_varlen(dtype, [8, 8, 9000, 9000], head_dim, codes, &plain);
                let all = variants(&together, &caps(arch)).unwrap();
                for (q_len, kv_len) in [(1, 1), (8, 300), (9, 4000), (16, 600), (17, 2048), (8000, 100), (100, 8000)] {
                    let alone = spec_of_codes(dtype, [8, q_len, kv_len, head_dim], format, granularity, &plain);
                    let mut alone = variant(&select(&alone, &caps(arch)).unwrap());
                    alone.sequences = Sequences::Varlen;
                    let asked = format!("{arch:?} {format} {granularity} {dtype} {head_dim} {q_len} {kv_len}");
                    assert!(all.contains(&alone), "{asked}: {alone} is none of {all:?}");
                }
            }
        }
    }
}

#[test]
fn chunks_of_codes_grow_with_the_keys_and_sooner_where_a_byte_holds_two() {
    for (kv_len, bytes, halves) in [
        (1, 1024, 1024),
        (8191, 1024, 1024),
        (8192, 1024, 2048),
        (16_383, 1024, 2048),
        (16_384, 2048, 2048),
        (65_535, 2048, 2048),
        (65_536, 4096, 4096),
    ] {
        for (arch, heads) in [(Arch::Sm80, 1), (Arch::Sm90a, 1), (Arch::Sm90a, 64)] {
            for (format, chunk) in
                [(Format::Int8, bytes), (Format::Mxfp8, bytes), (Format::Int4, halves), (Format::Nvfp4, halves)]
            {
                let spec =
                    spec_of_codes(DType::BF16, [heads, 1, kv_len, 64], format, Granularity::Token, &Options::default());
                let plan = select(&spec, &caps(arch)).unwrap();
                assert_eq!(plan.num_splits(), kv_len.div_ceil(chunk), "{arch:?} {format} {kv_len}");
            }
        }
    }
}

#[test]
fn strides_of_codes_choose_the_loads_and_nothing_else() {
    let of = |q_len: usize, step: isize, address: usize, format: Format| {
        let (device, extent) = (Device::Cuda(0), rapt_core::Extent::Declared);
        let q = view("q", DType::BF16, &[1, 4, q_len, 64]);
        let shape = rapt_core::Shape::from([1, 4, 900, 64 / format.codes_per_byte()]);
        let row = step * shape[3] as isize;
        let strides = rapt_core::Strides::from([3600 * row, 900 * row, row, step]);
        let at = std::ptr::without_provenance(address);
        // SAFETY: nobody reads it.
        let k = unsafe { View::from_raw_parts("k", at, format.code_dtype(), shape, strides, device, extent) }.unwrap();
        let n = format.own_block_size().map_or(1, |size| 64 / size);
        let mut form = CodesForm::new(
            format,
            &view("descale", format.scale_dtype(), &[1, 4, 900, n][..if n > 1 { 4 } else { 3 }]),
        );
        form.has_global_scale = format.has_global_scale();
        let codes = Qkv { q: None, k: Some(form), v: Some(form) };
        let spec = Spec::builder(&q, &k, &k, &Options::default()).codes(codes).build().unwrap();
        variant(&select(&spec, &caps(Arch::Sm90a)).unwrap())
    };
    for (format, q_len) in [Format::Int8, Format::Int4, Format::Nvfp4].into_iter().flat_map(|of| [(of, 1), (of, 100)]) {
        let first = of(q_len, 1, 1 << 20, format);
        assert_eq!(first.loads, Loads::By16Bytes, "{format}");
        for (step, address) in [(2, 1 << 20), (1, (1 << 20) + 8), (3, (1 << 20) + 1)] {
            let mut other = of(q_len, step, address, format);
            assert_eq!(other.loads, Loads::ByElement, "{format} {step} {address}");
            other.loads = first.loads;
            assert_eq!(other, first, "{format} {step} {address}");
        }
    }
}

#[test]
fn products_of_int8_have_one_kernel_where_they_are_asked_for() {
    let (plain, capped) = (Options::default(), Options::default().with_softcap(30.0));
    let (token, channel, head) = (Granularity::Token, Granularity::Channel, Granularity::Head);
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm120] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (q_len, dims) in [(1, [128, 128]), (17, [64, 80]), (4000, [256, 33]), (300, [1, 256])] {
                for (of, options) in [([token, channel], &plain), ([head, Granularity::Tensor], &capped)] {
                    let spec = spec_of_int8(dtype, [8, 2, q_len, 3000], dims, of, None, options);
                    let plan = select(&spec, &caps(arch)).unwrap();
                    let (found, key) = (variant(&plan), plan.key());
                    assert_eq!((found.algorithm, key.kernel), (Algorithm::Int8, Kernel::ForwardInt8), "{spec:?}");
                    assert_eq!((key.p_rounding, plan.block_n(), plan.num_splits()), (PRounding::Block, 128, 1));
                    assert!(plan.why_not_faster().is_empty() && plan.why().contains("products of integers"));
                    assert_eq!(found.loads == Loads::By16Bytes, dims[0] % 16 == 0 && dims[1] % 16 == 0);
                    assert!(plan.launch().unwrap().shared_bytes <= 99 * 1024 && plan.workspace_bytes() == 0);
                }
            }
        }
        // A cache and sequences one after another have the kernel of each sequence alone, and no other.
        for page_size in [0, 1, 16] {
            let cached = spec_of_int8_cache([3, 8, 2, 40, 9000], [128, page_size], &plain);
            let all = variants(&cached, &caps(arch)).unwrap();
            let sequences = if page_size == 0 { Sequences::Ragged } else { Sequences::Paged };
            let alone =
                spec_of_int8(DType::BF16, [8, 2, 40, 9000], [128, 128], [token, Granularity::Tensor], None, &plain);
            let mut alone = variant(&select(&alone, &caps(arch)).unwrap());
            alone.sequences = sequences;
            let attending: Vec<_> = all.iter().filter(|of| of.algorithm != Algorithm::Append).collect();
            assert_eq!(attending, [&alone], "{arch:?} {page_size}");
        }
        let int8 = plain.with_compute(Compute::Int8);
        let varlen = spec_of_varlen(DType::BF16, [8, 2, 9000, 9000], 64, Some((Format::Int8, head)), &int8);
        let all = variants(&varlen, &caps(arch)).unwrap();
        let attending: Vec<_> = all.iter().filter(|of| of.algorithm != Algorithm::Varlen).collect();
        assert!(!attending.is_empty() && attending.iter().all(|of| of.algorithm == Algorithm::Int8), "{all:?}");
    }
    for dims in [[257, 64], [64, 264]] {
        let spec = spec_of_int8(DType::BF16, [8, 2, 40, 300], dims, [token, channel], None, &plain);
        let error = select(&spec, &caps(Arch::Sm90a)).unwrap_err().to_string();
        assert!(error.contains("compute=\"int8\" with head dim 2") && error.contains("\"exact\""), "{error}");
    }
}
