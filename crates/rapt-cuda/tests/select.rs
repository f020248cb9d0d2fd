//! `select` over a grid of requests, without a device.

mod common;

use common::{
    backward_spec, backward_spec_of_dims, caps, spec, spec_of_cache, spec_of_dims, spec_of_latent, spec_of_varlen, view,
};
use rapt_core::{
    Arch, BackwardSpec, Causal, DType, Device, Error, Format, GradientForms, Kernel, Options, PRounding, Plan, Spec,
    View,
};
use rapt_cuda::{Algorithm, CudaLaunch, KernelVariant, Loads, Sequences, backward_variants, select, variants};

fn launch_plan(plan: &Plan) -> &CudaLaunch {
    plan.launch_plan().unwrap()
}

fn variant(plan: &Plan) -> KernelVariant {
    *launch_plan(plan).variant().unwrap()
}

const ARCHS: [Arch; 4] = [Arch::Sm80, Arch::Sm86, Arch::Sm90a, Arch::Sm120];

#[test]
fn every_request_is_served_and_tensor_cores_serve_what_they_can() {
    for arch in ARCHS {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for (q_len, kv_len) in [(1, 1), (1, 8192), (16, 100), (17, 100), (4096, 4096), (5, 0)] {
                for head_dim in [1, 8, 33, 64, 80, 128, 192, 256, 257, 512, 513, 1000] {
                    for mask in [None, Some(DType::Bool), Some(dtype)] {
                        let spec = spec(dtype, [4, q_len, kv_len, head_dim], mask, &Options::default());
                        let plan = select(&spec, &caps(arch)).unwrap();
                        let launch = plan.launch().unwrap();
                        assert!(launch.shared_bytes <= caps(arch).shared_bytes as usize, "{arch:?} {spec:?}");
                        assert!(launch.blocks >= 1 && launch.block_threads.is_multiple_of(32));
                        // Widest head of the tensor cores, and of those of its kernels that are for narrower ones.
                        let (widest, narrow) = match dtype {
                            DType::F16 | DType::BF16 => (if q_len > 16 { 512 } else { 256 }, 256),
                            DType::F32 if arch == Arch::Sm90a && q_len > 16 => (512, 128),
                            _ => (0, 0),
                        };
                        let cores = head_dim <= widest && kv_len > 0;
                        let expected = match (cores, q_len <= 16) {
                            (false, _) => Kernel::Generic,
                            (true, true) => Kernel::Decode,
                            (true, false) => Kernel::Forward,
                        };
                        // Decoding at head_dim 256 needs more shared memory than the smaller devices have.
                        let small = plan.key().kernel == Kernel::Generic
                            && head_dim > 128
                            && caps(arch).shared_bytes < 150 * 1024;
                        assert!(plan.key().kernel == expected || small, "{arch:?} {dtype} {q_len} {head_dim}");
                        let fast = plan.key().kernel != Kernel::Generic;
                        assert_eq!(plan.key().p_rounding == PRounding::Storage, fast && dtype != DType::F32);
                        assert_eq!(plan.why_not_faster().is_empty(), fast);
                        let expected = match (plan.key().kernel, arch, dtype) {
                            (Kernel::Forward, ..) if head_dim > narrow => Algorithm::Wide,
                            (Kernel::Forward, Arch::Sm90a, DType::F32) => Algorithm::HopperF32,
                            (Kernel::Forward, Arch::Sm90a, _) => Algorithm::Hopper,
                            (Kernel::Forward, ..) => Algorithm::Mma,
                            (Kernel::Decode, ..) => Algorithm::Decode,
                            _ => Algorithm::Generic,
                        };
                        assert_eq!(variant(&plan).algorithm, expected, "{arch:?} {dtype} {q_len} {head_dim}");
                        assert_eq!((variant(&plan).storage, variant(&plan).mask), (dtype, mask));
                        assert!(plan.explain().to_string().contains("multiprocessors"));
                    }
                }
            }
        }
    }
}

#[test]
fn the_batch_and_the_strides_change_no_tile_of_keys_and_no_split() {
    let of = |batch: usize, heads: usize, [q_len, kv_len]: [usize; 2], permuted: bool| {
        let shape = if permuted { [batch, q_len, heads, 64] } else { [batch, heads, q_len, 64] };
        let layout = if permuted { rapt_core::TensorLayout::Bshd } else { rapt_core::TensorLayout::Bhsd };
        let (q, k) = (view("q", DType::BF16, &shape), {
            let shape = if permuted { [batch, kv_len, heads, 64] } else { [batch, heads, kv_len, 64] };
            view("k", DType::BF16, &shape)
        });
        Spec::builder(&q, &k, &k, &Options::default().with_layout(layout)).build().unwrap()
    };
    // Where keys are some, blocks have more queries if there are many.
    for (lengths, many) in [([1, 5000], 0), ([7, 5000], 0), ([100, 5000], 0), ([3000, 5000], 0), ([3000, 300], 256)] {
        let first = of(1, 1, lengths, false);
        let (plan, of_first) =
            (select(&first, &caps(Arch::Sm90a)).unwrap(), variants(&first, &caps(Arch::Sm90a)).unwrap());
        for (batch, heads, permuted) in [(1, 8, false), (64, 1, false), (16, 32, true)] {
            let other = of(batch, heads, lengths, permuted);
            let other_plan = select(&other, &caps(Arch::Sm90a)).unwrap();
            let mut expected = of_first.clone();
            if many > 0 && batch * heads > 8 {
                expected[0].block_m = many;
            }
            assert_eq!(variants(&other, &caps(Arch::Sm90a)).unwrap(), expected);
            assert_eq!((other_plan.num_splits(), other_plan.block_n()), (plan.num_splits(), plan.block_n()));
        }
    }
}

#[test]
fn chunks_of_decoding_grow_with_the_keys_and_with_nothing_else() {
    for (kv_len, tensor_cores, generic) in [
        (1, 512, 512),
        (512, 512, 512),
        (16_383, 512, 512),
        (16_384, 1024, 512),
        (32_767, 1024, 512),
        (32_768, 1024, 1024),
        (65_535, 1024, 1024),
        (65_536, 2048, 1024),
        (1 << 20, 2048, 1024),
    ] {
        for arch in ARCHS {
            for heads in [1, 64] {
                for (dtype, chunk) in [(DType::F16, tensor_cores), (DType::F32, generic)] {
                    let spec = spec(dtype, [heads, 1, kv_len, 64], None, &Options::default());
                    let plan = select(&spec, &caps(arch)).unwrap();
                    assert_eq!(plan.num_splits(), kv_len.div_ceil(chunk), "{arch:?} {dtype} {kv_len}");
                }
            }
        }
    }
}

#[test]
fn decoding_has_eight_warps_and_one_block_to_a_multiprocessor_where_memory_is_fastest() {
    for (arch, head_dim, threads, most) in [
        (Arch::Sm90a, 64, 288, 132),
        (Arch::Sm90a, 128, 288, 132),
        (Arch::Sm90a, 256, 160, 132),
        (Arch::Sm80, 128, 160, 108),
        (Arch::Sm80, 64, 160, 216),
        (Arch::Sm120, 128, 160, 128),
    ] {
        let spec = spec(DType::BF16, [512, 1, 8192, head_dim], None, &Options::default());
        let launch = select(&spec, &caps(arch)).unwrap().launch().unwrap();
        assert_eq!((launch.block_threads, launch.blocks), (threads, most), "{arch:?} {head_dim}");
    }
}

#[test]
fn hoppers_blocks_are_the_same_whether_positions_bound_keys_or_not() {
    let causal = Options::default().with_causal(Causal::TopLeft);
    let window = causal.with_window(Some(300), Some(0));
    for (head_dim, block) in
        [(64, (192, 128)), (72, (192, 96)), (80, (192, 112)), (88, (192, 96)), (96, (192, 112)), (128, (128, 128))]
    {
        for options in [&Options::default(), &causal, &window] {
            let plan =
                select(&spec(DType::BF16, [8, 2048, 2048, head_dim], None, options), &caps(Arch::Sm90a)).unwrap();
            assert_eq!((plan.block_m(), plan.block_n()), block, "{head_dim}");
        }
    }
}

#[test]
fn hoppers_tiles_are_wider_where_the_last_is_one_of_many() {
    for (kv_len, head_dim, keys) in [(1024, 96, 96), (2047, 80, 96), (2048, 80, 112), (4096, 72, 96), (4096, 64, 128)] {
        let spec = spec(DType::BF16, [64, 1024, kv_len, head_dim], None, &Options::default());
        assert_eq!(select(&spec, &caps(Arch::Sm90a)).unwrap().block_n(), keys, "{kv_len} {head_dim}");
    }
}

#[test]
fn few_keys_have_tiles_that_leave_room_for_the_next_items_queries() {
    let plain = Options::default();
    let capped = plain.with_softcap(30.0);
    let of = |kv_len, mask, options| {
        variant(&select(&spec(DType::F16, [80, 4096, kv_len, 64], mask, options), &caps(Arch::Sm90a)).unwrap())
    };
    for (kv_len, keys) in [(1, 80), (77, 80), (80, 80), (81, 64), (512, 64), (513, 128)] {
        assert_eq!(of(kv_len, None, &plain).block_n, keys, "{kv_len}");
    }
    // Masks, and scores that are changed, have tiles of their own.
    assert_eq!(of(77, Some(DType::Bool), &plain).block_n, 128);
    assert_eq!(of(77, None, &capped).block_n, 128);
    assert_eq!(of(300, Some(DType::Bool), &plain).block_n, 128);
    assert_eq!(of(300, None, &capped).block_n, 128);
}

#[test]
fn four_groups_share_tiles_of_64_keys_where_there_are_items_for_all_multiprocessors() {
    let plain = Options::default();
    for (heads, q_len, rows) in [(768, 197, 256), (132, 256, 256), (131, 256, 128), (66, 257, 256), (12, 512, 128)] {
        let spec = spec(DType::BF16, [heads, q_len, 256, 64], None, &plain);
        let plan = select(&spec, &caps(Arch::Sm90a)).unwrap();
        assert_eq!((variant(&plan).block_m, variant(&plan).block_n), (rows, 64), "{heads} {q_len}");
    }
    // Element by element the warps that load need registers.
    let odd = spec(DType::BF16, [768, 256, 256, 60], None, &plain);
    let odd = variant(&select(&odd, &caps(Arch::Sm90a)).unwrap());
    assert_eq!((odd.loads, odd.block_m, odd.block_n), (Loads::ByElement, 128, 64));
}

#[test]
fn hoppers_items_have_fewer_rows_where_a_launch_would_leave_multiprocessors_idle() {
    let (full, causal) = (Options::default(), Options::default().with_causal(Causal::TopLeft));
    for (heads, len, head_dim, options, rows, items) in [
        // A block for each group of 64 rows.
        (12, 77, 64, &full, 64, 24),
        (12, 512, 64, &causal, 64, 96),
        (8, 1024, 128, &causal, 64, 128),
        // Two rounds of five sixths, not two whole ones; a round of two thirds with pairs of rows.
        (32, 1024, 64, &full, 128, 256),
        (4, 4096, 128, &causal, 64, 256),
        // An item's ends count: one of two tiles, not two of one.
        (64, 256, 64, &causal, 128, 128),
        // Nobody is idle.
        (512, 1024, 64, &full, 192, 3072),
        (128, 4096, 64, &causal, 192, 2816),
        (256, 1024, 128, &full, 128, 2048),
        (8, 16384, 256, &full, 128, 1024),
    ] {
        let plan = select(&spec(DType::BF16, [heads, len, len, head_dim], None, options), &caps(Arch::Sm90a)).unwrap();
        let blocks = plan.launch().unwrap().blocks;
        assert_eq!((plan.items(), blocks), (items, items.min(132)), "{heads} {len} {head_dim}");
        assert_eq!(launch_plan(&plan).item_rows(), Some(rows));
    }
    // Rows late and early see about as many keys: a pair of 64 would take longer than 128 alone.
    let (bottom, window) =
        (Options::default().with_causal(Causal::BottomRight), Options::default().with_window(Some(256), Some(256)));
    for (heads, q_len, kv_len, options, items) in
        [(32, 512, 32768, &bottom, 128), (8, 2048, 16384, &bottom, 128), (8, 2048, 2048, &window, 128)]
    {
        let spec = spec(DType::BF16, [heads, q_len, kv_len, 128], None, options);
        assert_eq!(select(&spec, &caps(Arch::Sm90a)).unwrap().items(), items, "{heads} {q_len} {kv_len}");
    }
    // A task has rows for two groups of three, whoever is idle.
    let plan = select(&spec(DType::BF16, [512, 77, 77, 64], None, &full), &caps(Arch::Sm90a)).unwrap();
    assert_eq!((plan.items(), launch_plan(&plan).item_rows()), (512, Some(192)));
}

#[test]
fn every_plan_states_a_partition_that_its_certificate_proves() {
    for dtype in [DType::F32, DType::BF16] {
        for (q_len, kv_len) in [(1, 1), (1, 8192), (16, 600), (17, 100), (200, 300), (5, 0)] {
            for head_dim in [8, 64, 192, 1000] {
                let (q_shape, k_shape) = ([2, 6, q_len, head_dim], [2, 3, kv_len, head_dim]);
                let (q, k) = (view("q", dtype, &q_shape), view("k", dtype, &k_shape));
                let shape = rapt_core::Shape::from(q_shape);
                let (at, strides) = (std::ptr::without_provenance_mut(1 << 30), shape.contiguous().unwrap());
                let (device, extent) = (Device::Cuda(0), rapt_core::Extent::Declared);
                // SAFETY: nobody writes it.
                let out =
                    unsafe { rapt_core::ViewMut::from_raw_parts("out", at, dtype, shape, strides, device, extent) };
                let out = out.unwrap();
                let spec = Spec::builder(&q, &k, &k, &Options::default()).build().unwrap();
                let plan = select(&spec, &caps(Arch::Sm90a)).unwrap();
                let tensors = rapt_core::Tensors::new(q, k, k, out);
                let operands = rapt_core::Operands::check(tensors, plan.spec()).unwrap();
                let coverage = plan.certificate(&operands).unwrap().coverage;
                assert_eq!(coverage.rows, 2 * 6 * q_len as u128);
                assert_eq!(coverage.work.is_some(), kv_len > 0, "{q_len} {kv_len} {head_dim}");
                assert_eq!(coverage.parts, if q_len <= 16 { kv_len.div_ceil(512).max(1) } else { 1 });
            }
        }
    }
}

#[test]
fn keys_of_wide_heads_are_split_where_the_queries_of_one_head_are_few() {
    for (q_len, kv_len, splits) in [
        (16_384, 16_384, 1),
        (8192, 8192, 1),
        (4096, 4096, 2),
        (4096, 511, 1),
        (1024, 1024, 4),
        (100, 16_384, 64),
        (4096, 0, 1),
    ] {
        for heads in [1, 8] {
            for dtype in [DType::F16, DType::F32] {
                let plan =
                    select(&spec(dtype, [heads, q_len, kv_len, 512], None, &Options::default()), &caps(Arch::Sm90a))
                        .unwrap();
                assert_eq!(plan.num_splits(), splits, "{q_len} {kv_len} {dtype}");
                assert_eq!(launch_plan(&plan).combine().is_some(), splits > 1);
            }
        }
    }
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let cpu = {
        let data = [0f32; 4];
        let q = View::contiguous("q", &data, [1, 1, 2, 2].into()).unwrap();
        Spec::builder(&q, &q, &q, &Options::default()).build().unwrap()
    };
    let refused = select(&cpu, &caps(Arch::Sm90a)).unwrap_err();
    assert!(matches!(refused, Error::DeviceUnavailable { device: Device::Cpu, .. }), "{refused}");
    let long = spec(DType::BF16, [1, 1 << 29, 1, 1], None, &Options::default());
    assert!(matches!(select(&long, &caps(Arch::Sm90a)), Err(Error::Unsupported { .. })));
    let many = spec(DType::BF16, [1 << 28, 1 << 10, 1, 1], None, &Options::default().with_causal(Causal::TopLeft));
    assert!(matches!(select(&many, &caps(Arch::Sm90a)), Err(Error::Unsupported { .. })));
}

#[test]
fn strides_and_alignment_choose_the_loads_and_nothing_else() {
    let plan_of = |arch, dtype, [q_len, head_dim]: [usize; 2], offset: usize, is_inner_one: bool| {
        let (device, extent) = (Device::Cuda(0), rapt_core::Extent::Declared);
        let at = |name, len: usize| {
            let shape = rapt_core::Shape::from([1, 8, len, head_dim]);
            let [row, step] = if is_inner_one { [head_dim, 1] } else { [2 * head_dim, 2] }.map(|n| n as isize);
            let strides = rapt_core::Strides::from([8 * row * len as isize, row * len as isize, row, step]);
            let address = std::ptr::without_provenance((1 << 20) + offset);
            // SAFETY: nobody reads it.
            unsafe { View::from_raw_parts(name, address, dtype, shape, strides, device, extent) }.unwrap()
        };
        let (q, k) = (at("q", q_len), at("k", 4096));
        select(&Spec::builder(&q, &k, &k, &Options::default()).build().unwrap(), &caps(arch)).unwrap()
    };
    for (arch, dtype, sizes, loads) in [
        (Arch::Sm90a, DType::BF16, [2048, 64], Loads::Tma),
        (Arch::Sm90a, DType::BF16, [2048, 60], Loads::ByElement),
        (Arch::Sm90a, DType::F32, [2048, 64], Loads::By16Bytes),
        (Arch::Sm90a, DType::BF16, [1, 128], Loads::By16Bytes),
        (Arch::Sm80, DType::F16, [2048, 128], Loads::By16Bytes),
        (Arch::Sm80, DType::F16, [2048, 124], Loads::ByElement),
        (Arch::Sm120, DType::F64, [2048, 64], Loads::ByElement),
    ] {
        let aligned = plan_of(arch, dtype, sizes, 0, true);
        assert_eq!(variant(&aligned).loads, loads, "{arch:?} {dtype} {sizes:?}");
        for (offset, is_inner_one) in [(8, true), (0, false), (16, true)] {
            let plan = plan_of(arch, dtype, sizes, offset, is_inner_one);
            let expected = if offset == 16 { loads } else { Loads::ByElement };
            assert_eq!(variant(&plan).loads, expected, "{arch:?} {dtype} {sizes:?} {offset} {is_inner_one}");
            let mut same = variant(&plan);
            same.loads = loads;
            // Loads of one element leave hopper.cu registers for two groups of 64 queries only; keys and splits stay.
            if same.algorithm == Algorithm::Hopper {
                same.block_m = variant(&aligned).block_m;
            }
            assert_eq!(same, variant(&aligned), "{arch:?} {dtype} {sizes:?} {offset} {is_inner_one}");
            assert_eq!(plan.num_splits(), aligned.num_splits());
        }
    }
}

#[test]
fn a_cache_takes_the_kernel_of_its_sequences_alone() {
    let plain = Options::default();
    for arch in ARCHS {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for (head_dim, page_size) in [(64, 0), (64, 16), (80, 1), (128, 7), (257, 256)] {
                for q_len in [1, 5, 16] {
                    let cached = spec_of_cache(dtype, [3, 8, 2, q_len, 9000], [head_dim, page_size], None, &plain);
                    let plan = select(&cached, &caps(arch)).unwrap();
                    let sequences = if page_size == 0 { Sequences::Ragged } else { Sequences::Paged };
                    assert_eq!(variant(&plan).sequences, sequences);
                    for kv_len in [1, 512, 9000] {
                        let q = view("q", dtype, &[1, 8, q_len, head_dim]);
                        let k = view("k", dtype, &[1, 2, kv_len, head_dim]);
                        let alone = Spec::builder(&q, &k, &k, &plain).build().unwrap();
                        let mut alone = variant(&select(&alone, &caps(arch)).unwrap());
                        alone.sequences = sequences;
                        assert_eq!(alone, variant(&plan), "{arch:?} {dtype} {head_dim} {kv_len}");
                    }
                }
            }
        }
    }
}

#[test]
fn sequences_one_after_another_take_the_kernels_of_each_alone() {
    let plain = Options::default();
    for arch in ARCHS {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for head_dim in [64, 72, 80, 96, 128, 257] {
                let together = spec_of_varlen(dtype, [8, 2, 9000, 9000], head_dim, None, &plain);
                if head_dim == 257 && dtype != DType::F64 && (dtype != DType::F32 || arch == Arch::Sm90a) {
                    let refused = select(&together, &caps(arch)).unwrap_err();
                    assert!(refused.to_string().contains("head dim 257"), "{refused}");
                    continue;
                }
                let all = variants(&together, &caps(arch)).unwrap();
                for (q_len, kv_len) in
                    [(1, 1), (16, 4000), (17, 2047), (17, 2048), (8000, 100), (300, 512), (8000, 513), (100, 8000)]
                {
                    let q = view("q", dtype, &[1, 8, q_len, head_dim]);
                    let k = view("k", dtype, &[1, 2, kv_len, head_dim]);
                    let alone = Spec::builder(&q, &k, &k, &plain).build().unwrap();
                    let mut alone = variant(&select(&alone, &caps(arch)).unwrap());
                    alone.sequences = Sequences::Varlen;
                    assert!(
                        all.iter().any(|variant| with_loads_of(*variant, &alone) == alone),
                        "{arch:?} {dtype} {head_dim} {q_len} {kv_len}"
                    );
                }
            }
        }
    }
}

#[test]
fn new_keys_come_first_and_the_chunks_of_cut_rows_last() {
    let plain = Options::default();
    for format in [None, Some(Format::Int8), Some(Format::E4m3fn)] {
        let spec = spec_of_cache(DType::BF16, [16, 32, 8, 1, 8192], [128, 16], format, &plain);
        let all = variants(&spec, &caps(Arch::Sm90a)).unwrap();
        let of: Vec<_> = all.iter().map(|variant| (variant.algorithm, variant.sequences)).collect();
        let main = if format.is_some() { Algorithm::DecodeCodes } else { Algorithm::Decode };
        let expected =
            [(main, Sequences::Paged), (Algorithm::Combine, Sequences::Ragged), (Algorithm::Append, Sequences::Paged)];
        assert_eq!(of, expected);
    }
    let short = spec_of_cache(DType::BF16, [16, 32, 8, 1, 512], [128, 0], None, &plain);
    let of = variants(&short, &caps(Arch::Sm90a)).unwrap();
    assert_eq!(of.iter().map(|variant| variant.algorithm).collect::<Vec<_>>(), [Algorithm::Decode, Algorithm::Append]);
}

/// As loaded by another's means, which choose how many queries of `hopper` a block has.
fn with_loads_of(mut variant: KernelVariant, other: &KernelVariant) -> KernelVariant {
    variant.loads = other.loads;
    if variant.algorithm == Algorithm::Hopper {
        variant.block_m = other.block_m;
    }
    variant
}

#[test]
fn many_queries_of_a_cache_take_the_kernels_of_each_sequence_alone() {
    let plain = Options::default();
    for arch in ARCHS {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for (head_dim, page_size) in
                [(64, 0), (64, 16), (72, 1), (80, 0), (80, 16), (96, 7), (96, 24), (128, 64), (256, 256), (33, 16)]
            {
                // Wide heads alone take a kernel that reads neither lengths nor page tables.
                if arch == Arch::Sm90a && dtype == DType::F32 && head_dim > 128 {
                    continue;
                }
                for q_len in [17, 300] {
                    let cached = spec_of_cache(dtype, [3, 8, 2, q_len, 9000], [head_dim, page_size], None, &plain);
                    let all = variants(&cached, &caps(arch)).unwrap();
                    let sequences = if page_size == 0 { Sequences::Ragged } else { Sequences::Paged };
                    let attending = all.iter().filter(|variant| variant.algorithm != Algorithm::Append);
                    assert!(attending.clone().all(|variant| variant.sequences == sequences));
                    for kv_len in [81, 512, 513, 2047, 2048, 9000] {
                        let q = view("q", dtype, &[1, 8, q_len, head_dim]);
                        let k = view("k", dtype, &[1, 2, kv_len, head_dim]);
                        let alone = Spec::builder(&q, &k, &k, &plain).build().unwrap();
                        let mut alone = variant(&select(&alone, &caps(arch)).unwrap());
                        alone.sequences = sequences;
                        let mut found = attending.clone().map(|variant| with_loads_of(*variant, &alone));
                        let asked = format!("{arch:?} {dtype} {head_dim} {page_size} {q_len} {kv_len}");
                        assert!(found.any(|variant| variant == alone), "{asked}: {alone} in {all:?}");
                    }
                    // What has tiles of its own for few keys is launched a second time, and nothing else is.
                    let of_hopper = variant(&select(&cached, &caps(arch)).unwrap()).algorithm == Algorithm::Hopper;
                    let twice = of_hopper && dtype != DType::F32 && matches!(head_dim, 33 | 64 | 80 | 96);
                    assert_eq!(attending.count(), 1 + usize::from(twice), "{arch:?} {dtype} {head_dim}");
                }
            }
        }
    }
}

#[test]
fn pages_of_whole_lines_come_by_tma_and_others_by_loads_of_16_bytes() {
    let plain = Options::default();
    for (dtype, head_dim, page_size, loads) in [
        (DType::BF16, 128, 16, Loads::Tma),
        (DType::F16, 64, 8, Loads::Tma),
        (DType::BF16, 80, 24, Loads::Tma),
        (DType::BF16, 128, 256, Loads::Tma),
        (DType::BF16, 128, 1, Loads::By16Bytes),
        (DType::F16, 64, 4, Loads::By16Bytes),
        (DType::BF16, 128, 12, Loads::By16Bytes),
        (DType::BF16, 127, 16, Loads::ByElement),
        (DType::BF16, 127, 1, Loads::ByElement),
        (DType::F32, 64, 1, Loads::By16Bytes),
    ] {
        let spec = spec_of_cache(dtype, [3, 8, 8, 300, 9000], [head_dim, page_size], None, &plain);
        let plan = select(&spec, &caps(Arch::Sm90a)).unwrap();
        assert_eq!(variant(&plan).loads, loads, "{dtype} {head_dim} {page_size}");
        let says = plan.why().contains("TMA loads those of multiples of 8");
        assert_eq!(says, dtype != DType::F32 && loads == Loads::By16Bytes, "{}", plan.why());
    }
    // Elsewhere the one kernel gathers rows of any page.
    for page_size in [1, 16, 12] {
        let spec = spec_of_cache(DType::BF16, [3, 8, 8, 300, 9000], [128, page_size], None, &plain);
        let of = variant(&select(&spec, &caps(Arch::Sm80)).unwrap());
        assert_eq!((of.algorithm, of.loads), (Algorithm::Mma, Loads::By16Bytes));
    }
}

#[test]
fn many_queries_of_wide_heads_over_a_cache_are_served_by_the_kernel_of_every_request() {
    for (dtype, head_dim) in [(DType::BF16, 320), (DType::F32, 256), (DType::F64, 64)] {
        let spec = spec_of_cache(dtype, [3, 8, 8, 100, 9000], [head_dim, 16], None, &Options::default());
        assert_eq!(variant(&select(&spec, &caps(Arch::Sm90a)).unwrap()).algorithm, Algorithm::Generic);
    }
}

#[test]
fn latent_heads_of_few_queries_take_the_tensor_cores() {
    let plain = Options::default();
    let of = |dtype, sizes, dims, page_size, arch| {
        select(&spec_of_latent(dtype, sizes, dims, page_size, &plain), &caps(arch)).unwrap()
    };
    for dtype in [DType::F16, DType::BF16] {
        for (heads, q_len) in [(1, 1), (16, 1), (128, 1), (16, 4), (128, 4), (32, 16)] {
            for page_size in [None, Some(0), Some(1), Some(64)] {
                for (arch, block_n) in [(Arch::Sm80, 32), (Arch::Sm90a, 64)] {
                    let plan = of(dtype, [16, heads, q_len, 8192], [576, 512], page_size, arch);
                    assert_eq!((plan.key().kernel, plan.key().p_rounding), (Kernel::Decode, PRounding::Storage));
                    let variant = variant(&plan);
                    assert_eq!((variant.algorithm, variant.loads), (Algorithm::Latent, Loads::By16Bytes));
                    assert_eq!((variant.block_m, variant.block_n, variant.dims), (64, block_n, (576, 512)));
                    let launch = plan.launch().unwrap();
                    assert!(launch.blocks <= launch.multiprocessors, "blocks stay on their multiprocessor");
                    assert!(launch.shared_bytes <= caps(arch).shared_bytes as usize);
                }
            }
        }
        // Two tiles of keys beside q are more than smaller devices have room for.
        let plan = of(dtype, [16, 16, 1, 8192], [576, 512], None, Arch::Sm86);
        assert_eq!(variant(&plan).algorithm, Algorithm::Generic);
        assert!(plan.why_not_faster().contains("shared memory"), "{}", plan.why_not_faster());
    }
    for (dtype, sizes, dims) in [
        (DType::F32, [2, 16, 1, 8192], [576, 512]),
        (DType::BF16, [2, 16, 17, 8192], [576, 512]),
        (DType::BF16, [2, 128, 5, 8192], [576, 512]),
        (DType::BF16, [2, 16, 1, 8192], [577, 512]),
        (DType::BF16, [2, 16, 1, 8192], [576, 513]),
        (DType::BF16, [2, 16, 1, 0], [576, 512]),
    ] {
        let algorithm = variant(&of(dtype, sizes, dims, None, Arch::Sm90a)).algorithm;
        assert_eq!(algorithm, Algorithm::Generic, "{dtype} {sizes:?} {dims:?}");
    }
    // Odd dims are padded, and loaded element by element.
    let odd = variant(&of(DType::BF16, [2, 3, 1, 100], [575, 300], None, Arch::Sm90a));
    assert_eq!((odd.algorithm, odd.loads, odd.dims), (Algorithm::Latent, Loads::ByElement, (576, 384)));
}

#[test]
fn chunks_of_latent_keys_follow_the_rows_and_keys_of_one_sequence() {
    for (heads, q_len, kv_len, chunk) in [
        (16, 1, 512, 512),
        (16, 1, 16_383, 512),
        (16, 1, 16_384, 1024),
        (16, 1, 65_536, 2048),
        (128, 1, 4095, 512),
        (128, 1, 4096, 1024),
        (16, 4, 32_767, 1024),
        (128, 4, 32_768, 2048),
    ] {
        for batch in [1, 64] {
            let of = |page_size| {
                spec_of_latent(DType::BF16, [batch, heads, q_len, kv_len], [576, 512], page_size, &Options::default())
            };
            for arch in [Arch::Sm80, Arch::Sm90a] {
                let plan = select(&of(None), &caps(arch)).unwrap();
                assert_eq!(plan.num_splits(), kv_len.div_ceil(chunk), "{heads} {q_len} {kv_len}");
                // A cache has room for the chunks of any shorter sequence too.
                let cache = select(&of(Some(64)), &caps(arch)).unwrap();
                assert!(cache.num_splits() >= plan.num_splits());
                assert!(cache.workspace_bytes() >= plan.workspace_bytes());
            }
        }
    }
}

#[test]
fn dropout_is_of_two_kernels_and_over_a_cache_refused_with_the_reason() {
    let dropping = Options::default().with_dropout_p(0.25);
    let of = |dtype, lengths, options: &Options| select(&spec(dtype, lengths, None, options), &caps(Arch::Sm90a));
    for (dtype, [q_len, kv_len], head_dim, algorithm, why) in [
        (DType::F16, [640, 640], 128, Algorithm::Mma, "by wgmma"),
        (DType::BF16, [1, 9000], 64, Algorithm::Mma, "few queries drop no weights"),
        (DType::F32, [640, 640], 64, Algorithm::Generic, "of float16 and bfloat16 are dropped"),
        (DType::BF16, [640, 640], 512, Algorithm::Generic, "of heads up to 256"),
        (DType::F64, [1, 9000], 64, Algorithm::Generic, "not used for float64"),
    ] {
        let plan = of(dtype, [2, q_len, kv_len, head_dim], &dropping).unwrap();
        let (variant, text) = (variant(&plan), plan.explain().to_string());
        assert!(variant.dropout && variant.algorithm == algorithm && plan.num_splits() == 1, "{variant}");
        assert!(text.contains(why) && text.contains("Philox"), "{text}");
        let without = of(dtype, [2, q_len, kv_len, head_dim], &dropping.with_dropout_p(0.0)).unwrap();
        assert!(!self::variant(&without).dropout, "{without:?}");
    }
    let cache = spec_of_cache(DType::BF16, [4, 8, 2, 1, 8192], [64, 16], None, &dropping);
    let error = select(&cache, &caps(Arch::Sm90a)).unwrap_err();
    let Error::Unsupported { what, instead, .. } = &error else { panic!("{error}") };
    assert!(what == "dropout_p=0.25 over a cache on cuda:0" && instead == "dropout_p=0.0", "{error}");
}

#[test]
fn sequences_of_latent_heads_one_after_another_are_refused() {
    let plain = Options::default();
    let of = |dtype, dims: [usize; 2]| {
        let (q, k) = (view("q", dtype, &[50, 16, dims[0]]), view("k", dtype, &[5000, 1, dims[0]]));
        let (v, offsets) = (view("v", dtype, &[5000, 1, dims[1]]), view("cu_seqlens", DType::I32, &[4]));
        let options = Options { layout: rapt_core::TensorLayout::Bshd, ..plain };
        let spec = Spec::builder(&q, &k, &v, &options).varlen(&offsets, &offsets).build().unwrap();
        [Arch::Sm90a, Arch::Sm120].map(|arch| select(&spec, &caps(arch)))
    };
    let [refused, served] = of(DType::BF16, [576, 512]);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    assert!(served.is_ok(), "a sequence alone has the same kernel there");
    assert!(of(DType::F32, [576, 512]).iter().all(Result::is_ok));
    assert!(of(DType::BF16, [577, 512]).iter().all(Result::is_ok));
    let alone = spec_of_dims(DType::BF16, [16, 1, 5000], [576, 512], None, &plain);
    assert_eq!(variant(&select(&alone, &caps(Arch::Sm90a)).unwrap()).algorithm, Algorithm::Latent);
}

#[test]
fn gradients_of_more_sequences_than_tiles_can_be_counted_are_of_the_kernels_that_keep_no_tiles() {
    let has_together = |sequences: usize| {
        let tensor = view("q", DType::BF16, &[5000, 2, 64]);
        let offsets = view("cu_seqlens", DType::I32, &[sequences + 1]);
        let options = Options { layout: rapt_core::TensorLayout::Bshd, ..Options::default() };
        let mut builder = Spec::builder(&tensor, &tensor, &tensor, &options);
        let forward = builder.varlen(&offsets, &offsets).return_lse(true).build().unwrap();
        let form = Some((&tensor).into());
        let forms = GradientForms { dq: form, dk: form, dv: form, ..GradientForms::new(&tensor) };
        let spec = BackwardSpec::new(forward, &forms).unwrap();
        let variants = backward_variants(&spec, &caps(Arch::Sm90a)).unwrap();
        variants.iter().any(|variant| variant.algorithm == Algorithm::BackwardHopper)
    };
    assert!(has_together(5) && has_together(1 << 20) && !has_together(1 << 24));
}

#[test]
fn gradients_under_masks_of_booleans_and_of_16_bits_are_computed_together_on_hopper() {
    let plain = Options::default();
    let together = |arch, mask, head_dim, kv_len, options: &Options| {
        let spec = backward_spec(DType::BF16, [4, 300, kv_len, head_dim], mask, options);
        let variants = backward_variants(&spec, &caps(arch)).unwrap();
        variants.into_iter().find(|variant| variant.algorithm == Algorithm::BackwardHopper)
    };
    for mask in [None, Some(DType::Bool), Some(DType::F16), Some(DType::BF16)] {
        // Beside a mask there is no room for 80 queries.
        let rows = if mask.is_none() { 80 } else { 64 };
        let [narrow, middle, wide] = [[128; 2], [rows, 128], [64; 2]];
        let tiles = [(8, narrow), (64, narrow), (72, middle), (128, middle), (136, wide), (256, wide)];
        for (head_dim, tile) in tiles {
            let variant = together(Arch::Sm90a, mask, head_dim, 512, &plain).unwrap();
            assert_eq!((variant.mask, variant.loads), (mask, Loads::Tma), "{variant}");
            assert_eq!([variant.block_m, variant.block_n], tile, "{variant}");
        }
        assert!(together(Arch::Sm90a, mask, 264, 512, &plain).is_none());
        // Of dims of two kinds too, in what a block may have of shared memory.
        for dims in (8..=256).step_by(8).flat_map(|dim| [16, 64, 96, 128, 256].map(|dim_v| [dim, dim_v])) {
            let spec = backward_spec_of_dims(DType::BF16, [4, 300, 512], dims, mask, &plain);
            let variants = backward_variants(&spec, &caps(Arch::Sm90a)).unwrap();
            let is_one = |variant: &KernelVariant| variant.algorithm == Algorithm::BackwardHopper;
            assert!(variants.iter().any(is_one), "{dims:?} {mask:?}");
        }
        // Beside softcap what a score rises by is found of its weight, in which a bias would be too.
        let has_bias = matches!(mask, Some(DType::F16 | DType::BF16));
        for (head_dim, tile) in [(32, [64, 128]), (64, [64, 128]), (128, [64, 128]), (256, [64; 2])] {
            let capped = together(Arch::Sm90a, mask, head_dim, 512, &plain.with_softcap(30.0));
            assert_eq!(capped.is_none(), has_bias);
            assert!(capped.is_none_or(|variant| variant.natural && [variant.block_m, variant.block_n] == tile));
        }
        for cap in [0.5, 1e7] {
            assert!(together(Arch::Sm90a, mask, 64, 512, &plain.with_softcap(cap)).is_none());
        }
        assert!(together(Arch::Sm80, mask, 64, 512, &plain).is_none());
    }
    assert!(together(Arch::Sm90a, Some(DType::F32), 64, 512, &plain).is_none());
}
