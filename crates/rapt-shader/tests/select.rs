//! What is refused, and how memory is cut.

use rapt_core::{DType, Dims, Error, Kernel, Options, Shape, Spec, Strides, TensorForm};
use rapt_shader::{
    Algorithm, Caps, KernelVariant, MatrixTiles, MatrixUnits, Place, Range, ShaderLaunch, Window, lane_variants,
    matrix_variants, select, select_kernel, variants,
};

const DEVICE: rapt_core::Device = rapt_core::Device::Cpu;

fn form(dtype: DType, shape: &[usize]) -> TensorForm {
    let shape = Shape::new(shape).unwrap();
    TensorForm::new(dtype, shape, shape.contiguous().unwrap(), DEVICE)
}

fn spec(dtype: DType, q: [usize; 4], kv_heads: usize, kv_len: usize) -> Spec {
    let kv = [q[0], kv_heads, kv_len, q[3]];
    Spec::builder(form(dtype, &q), form(dtype, &kv), form(dtype, &kv), &Options::default())
        .return_lse(true)
        .build()
        .unwrap()
}

fn windows(spec: &Spec, caps: &Caps) -> Vec<Window> {
    select(spec, caps).unwrap().launch_plan::<ShaderLaunch>().unwrap().windows.clone()
}

#[test]
fn float64_is_refused_with_the_reason() {
    let error = select(&spec(DType::F64, [1, 1, 4, 8], 1, 4), &Caps::WEBGPU).unwrap_err();
    let Error::Unsupported { what, why, instead } = error else { panic!("{error}") };
    assert!(
        what.contains("float64") && why.contains("64-bit") && instead.contains("float32"),
        "{what} {why} {instead}"
    );
}

#[test]
fn dropout_is_refused_with_the_reason() {
    let q = form(DType::F32, &[1, 1, 4, 8]);
    let spec = Spec::builder(q, q, q, &Options::default().with_dropout_p(0.25)).build().unwrap();
    let Error::Unsupported { what, instead, .. } = select(&spec, &Caps::WEBGPU).unwrap_err() else { panic!() };
    assert!(what == "dropout_p=0.25 on this device, in WGSL" && instead == "dropout_p=0.0", "{what} {instead}");
}

/// A device with as much workgroup memory as most have.
const COMMON: Caps = Caps { max_shared_bytes: 32 << 10, ..Caps::WEBGPU };

#[test]
fn forward_serves_where_its_tiles_fit_and_the_plan_says_why_it_does_not() {
    let plan = |shape, caps: &Caps| select(&spec(DType::F32, shape, 1, 50), caps).unwrap();
    let little = Caps { max_shared_bytes: 4 << 10, ..Caps::WEBGPU };
    let (fits, small) = (plan([1, 1, 100, 64], &Caps::WEBGPU), plan([1, 1, 100, 64], &little));
    assert_eq!((fits.key().kernel, fits.why_not_faster().as_str()), (Kernel::Forward, ""));
    assert_eq!(fits.block_n(), 64);
    assert_eq!((small.key().kernel, small.block_n()), (Kernel::Generic, 32));
    assert_eq!(small.why_not_faster(), "forward takes 7308 bytes of workgroup memory, the device has 4096");
    let long = plan([1, 1, 100, 257], &COMMON);
    assert_eq!(long.key().kernel, Kernel::Generic);
    assert_eq!(long.why_not_faster(), "forward sums up to 256 products in one go, head_dim is 257");
    // Blocks of 64 rows where there are many, of 32 where there are few.
    assert_eq!([[32, 1, 127, 64], [32, 1, 129, 64]].map(|shape| plan(shape, &COMMON).block_m()), [32, 64]);
    let few = plan([1, 1, 100, 64], &Caps { max_threads: 64, ..COMMON });
    assert!(few.why_not_faster().contains("128 threads"), "{}", few.why_not_faster());
}

/// An NVIDIA GPU, and Mesa's lavapipe.
const MATRICES: [Caps; 2] = [
    Caps {
        max_shared_bytes: 48 << 10,
        matrices: Some(MatrixUnits { tile: 16, subgroup_threads: 32, has_floats: false }),
        ..Caps::WEBGPU
    },
    Caps { matrices: Some(MatrixUnits { tile: 8, subgroup_threads: 8, has_floats: false }), ..COMMON },
];

#[test]
fn matrices_serve_float16_where_the_device_has_them_and_the_plan_says_why_they_do_not() {
    let plan = |dtype, dim, caps: &Caps| select(&spec(dtype, [1, 1, 100, dim], 1, 50), caps).unwrap();
    for caps in &MATRICES {
        for dim in [1, 64, 65, 128] {
            let plan = plan(DType::F16, dim, caps);
            assert_eq!((plan.key().kernel, plan.why_not_faster().as_str()), (Kernel::Matrices, ""), "{dim}");
            assert_eq!((plan.key().p_rounding, plan.block_n()), (rapt_core::PRounding::Storage, 32));
            let variant = plan.launch_plan::<ShaderLaunch>().unwrap().variant.unwrap();
            let Algorithm::Matrices(MatrixTiles { depth, block_dv, .. }) = variant.algorithm else {
                panic!("{variant}")
            };
            assert_eq!((depth, block_dv), if dim > 64 { (128, 128) } else { (64, 64) });
            assert!(matrix_variants().contains(&variant), "{variant}");
        }
        let check = |plan: rapt_core::Plan, why: &str| {
            assert_eq!((plan.key().kernel, plan.why_not_faster().as_str()), (Kernel::Forward, why));
        };
        check(plan(DType::F32, 64, caps), "");
        check(plan(DType::BF16, 64, caps), "matrices are of float16 in WGSL, q is bfloat16");
        check(plan(DType::F16, 129, caps), "matrices hold 128 columns of q, head_dim is 129");
        let odd = Caps { matrices: Some(MatrixUnits { tile: 16, subgroup_threads: 48, has_floats: false }), ..*caps };
        assert!(plan(DType::F16, 64, &odd).why_not_faster().starts_with("no tiles of matrices fit the device"));
    }
    let without = plan(DType::F16, 64, &COMMON);
    assert!(without.why_not_faster().contains("no cooperative matrices of float16"), "{}", without.why_not_faster());
    let error = select_kernel(&spec(DType::F32, [1, 1, 100, 64], 1, 50), &MATRICES[0], Kernel::Matrices).unwrap_err();
    assert!(error.to_string().contains("matrices are of float16"), "{error}");
}

const PROCESSOR: Caps = Caps { has_lanes: true, ..COMMON };

#[test]
fn a_processor_has_a_forward_of_its_own_up_to_64_columns() {
    let is_lanes = |dtype, dim| {
        let plan = select(&spec(dtype, [1, 1, 100, dim], 1, 50), &PROCESSOR).unwrap();
        assert_eq!(plan.key().kernel, Kernel::Forward, "{dim}");
        let variant = plan.launch_plan::<ShaderLaunch>().unwrap().variant.unwrap();
        variant.algorithm == Algorithm::Lanes
    };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert!(is_lanes(dtype, 1) && is_lanes(dtype, 64));
        assert!(!is_lanes(dtype, 65));
    }
}

/// Which of two texts with the same bits runs follows from where k and v lie.
#[test]
fn rows_that_lie_in_vectors_are_loaded_as_such() {
    let is_wide = |spec: &Spec, caps: &Caps, k_offset: u64| {
        let plan = select(spec, caps).unwrap();
        let launch = plan.launch_plan::<ShaderLaunch>().unwrap();
        let place =
            |(buffer, offset_bytes)| Some(Place { buffer, buffer_bytes: 1 << 20, offset_bytes, is_storage: true });
        let mut places = [None; 8];
        for (at, offset) in [(0, 2), (1, k_offset), (2, 64), (6, 0)] {
            places[at] = place((at, offset));
        }
        let window = launch.bound(spec, &launch.windows[0], &places, 256, 65_535).unwrap();
        let Algorithm::Matrices(tiles) = window.variant.unwrap().algorithm else { panic!("{:?}", window.variant) };
        assert!(matrix_variants().contains(&window.variant.unwrap()));
        tiles.wide
    };
    let of = |dim| {
        let kv = form(DType::F16, &[1, 2, 50, dim]);
        Spec::builder(form(DType::F16, &[1, 2, 100, dim]), kv, kv, &Options::default()).build().unwrap()
    };
    assert!(is_wide(&of(64), &MATRICES[0], 0) && is_wide(&of(128), &MATRICES[0], 16));
    assert!(!is_wide(&of(64), &MATRICES[0], 8), "k begins in the middle of a vector");
    assert!(!is_wide(&of(60), &MATRICES[0], 0), "a row ends in the middle of one");
    assert!(!is_wide(&of(64), &MATRICES[1], 0), "matrices of 8 have no such text");
    let mut columns_first = of(64);
    columns_first.v.strides = [6400, 3200, 1, 50];
    assert!(!is_wide(&columns_first, &MATRICES[0], 0), "columns do not lie side by side");
}

#[test]
fn few_rows_of_float16_are_on_matrices_where_the_device_has_them() {
    let with_lanes = Caps { has_lanes: true, ..MATRICES[0] };
    let algorithm = |dtype, shape, caps: &Caps| {
        let plan = select(&spec(dtype, shape, 2, 1000), caps).unwrap();
        assert_eq!(plan.key().kernel, Kernel::Decode);
        (plan.launch_plan::<ShaderLaunch>().unwrap().variant.unwrap().algorithm, plan.key().p_rounding, plan.why())
    };
    for (caps, threads) in [(&MATRICES[0], 64), (&Caps::METAL, 128)] {
        for (shape, columns) in [([1, 2, 1, 128], 128), ([2, 16, 2, 64], 64), ([1, 2, 16, 1], 64)] {
            let (algorithm, rounding, why) = algorithm(DType::F16, shape, caps);
            let Algorithm::Matrices(tiles) = algorithm else { panic!("{algorithm:?}") };
            assert_eq!((tiles.block_m, tiles.threads, tiles.depth, tiles.block_dv), (16, threads, columns, columns));
            // Of which a multiprocessor of NVIDIA's has four at once.
            assert!(tiles.shared_bytes() <= 12 << 10);
            assert_eq!(rounding, rapt_core::PRounding::Storage);
            assert!(why.contains("read once for 16 of them, on cooperative matrices"), "{why}");
        }
    }
    for (dtype, dim, caps) in [
        (DType::F32, 64, &MATRICES[0]),
        (DType::BF16, 64, &Caps::METAL),
        (DType::F16, 129, &MATRICES[0]),
        (DType::F16, 64, &with_lanes),
        (DType::F16, 64, &COMMON),
    ] {
        let (algorithm, rounding, why) = algorithm(dtype, [1, 4, 1, dim], caps);
        assert_eq!(algorithm, Algorithm::Decode { rows: 4 }, "{dtype} {dim}");
        assert!(rounding == rapt_core::PRounding::Accumulation && !why.contains("matrices"), "{why}");
    }
}

/// Apple's GPUs have matrices of float32 too: bfloat16 is exact in them, and weights of both are not rounded.
#[test]
fn matrices_of_metal_serve_every_dtype() {
    let plan = |dtype, dim, dv| {
        let form = |length, columns| form(dtype, &[1, 1, length, columns]);
        let spec = Spec::builder(form(100, dim), form(50, dim), form(50, dv), &Options::default()).build().unwrap();
        select(&spec, &Caps::METAL).unwrap()
    };
    for (dtype, numbers, rounding) in [
        (DType::F16, DType::F16, rapt_core::PRounding::Storage),
        (DType::F32, DType::F32, rapt_core::PRounding::Accumulation),
        (DType::BF16, DType::F32, rapt_core::PRounding::Accumulation),
    ] {
        for (dim, dv, columns) in [(64, 64, (64, 64)), (65, 1, (128, 64)), (8, 128, (64, 128)), (128, 300, (128, 128))]
        {
            let plan = plan(dtype, dim, dv);
            assert_eq!((plan.key().kernel, plan.why_not_faster().as_str()), (Kernel::Matrices, ""), "{dtype} {dim}");
            assert_eq!(plan.key().p_rounding, rounding);
            let variant = plan.launch_plan::<ShaderLaunch>().unwrap().variant.unwrap();
            let Algorithm::Matrices(tiles) = variant.algorithm else { panic!("{variant}") };
            assert_eq!((tiles.numbers, (tiles.depth, tiles.block_dv)), (numbers, columns), "{variant}");
            // Two tiles of float32 and 128 columns would not fit.
            let is_wide = numbers == DType::F32 && columns != (64, 64);
            assert_eq!((plan.block_m(), plan.block_n()), (64, if is_wide { 16 } else { 32 }));
            assert!(variant.shared_bytes() <= Caps::METAL.max_shared_bytes && matrix_variants().contains(&variant));
        }
        let long = plan(dtype, 129, 64);
        assert_eq!(long.key().kernel, Kernel::Forward);
        assert_eq!(long.why_not_faster(), "matrices hold 128 columns of q, head_dim is 129");
    }
}

#[test]
fn decode_serves_few_rows_and_splits_the_keys_by_their_number_alone() {
    let large = Caps { max_binding_bytes: 1 << 40, ..COMMON };
    let plan = |shape, kv_heads, kv_len| select(&spec(DType::F16, shape, kv_heads, kv_len), &large).unwrap();
    // Rows of a key head: 1, 16, 17.
    for (shape, kv_heads, kernel) in
        [([1, 4, 1, 64], 4, Kernel::Decode), ([1, 8, 2, 64], 1, Kernel::Decode), ([1, 1, 17, 64], 1, Kernel::Forward)]
    {
        let plan = plan(shape, kv_heads, 50);
        assert_eq!(plan.key().kernel, kernel, "{shape:?}");
    }
    // (keys, splits, keys of a split)
    for (kv_len, num_splits, split_keys) in [
        (0, 1, 256),
        (1, 1, 256),
        (256, 1, 256),
        (257, 2, 256),
        (32_768, 128, 256),
        (32_769, 103, 320),
        (1 << 20, 128, 8192),
    ] {
        for (batch, heads, few) in [(1, 8, 1), (64, 32, 4)] {
            let plan = plan([batch, heads, few, 64], heads, kv_len);
            let work = plan.work().unwrap();
            assert_eq!((plan.num_splits(), work.keys_per_item), (num_splits, split_keys), "{kv_len} {batch}");
            assert_eq!(work.rows_per_item, few);
            // A record of 3 + 64 vectors for each four rows and split.
            assert_eq!(plan.workspace_bytes(), batch * heads * num_splits * 67 * 16);
            assert_eq!(plan.items(), batch * heads * num_splits);
        }
    }
    // 8 rows at once where there is memory for them, and 4 where there is not.
    let small = select(&spec(DType::F32, [1, 8, 1, 64], 1, 50), &Caps::WEBGPU).unwrap();
    assert_eq!((small.key().kernel, small.block_m(), plan([1, 8, 1, 64], 1, 50).block_m()), (Kernel::Decode, 4, 8));
    // What is left is bound at once: of fewer tasks, or not at all.
    let spec = spec(DType::F32, [4, 4, 1, 64], 4, 700);
    let caps = |max_binding_bytes| Caps { max_binding_bytes, ..COMMON };
    let windows = |caps: &Caps| select(&spec, caps).unwrap().launch_plan::<ShaderLaunch>().unwrap().windows.len();
    // Of a task 3216 bytes are left; of k of all 2,867,200 bytes are bound.
    assert_eq!((windows(&caps(3 << 20)), windows(&caps(200_000))), (1, 16));
}

#[test]
fn a_kernel_that_is_asked_for_by_name_runs_or_is_refused_with_the_reason() {
    let spec = spec(DType::F32, [1, 1, 100, 64], 1, 50);
    for kernel in [Kernel::Generic, Kernel::Forward] {
        assert_eq!(select_kernel(&spec, &COMMON, kernel).unwrap().key().kernel, kernel);
    }
    let error = select_kernel(&spec, &COMMON, Kernel::Decode).unwrap_err();
    assert!(error.to_string().contains("decode serves up to 16 query rows for a key head, here are 100"), "{error}");
    let error = select_kernel(&spec, &Caps { max_shared_bytes: 4 << 10, ..Caps::WEBGPU }, Kernel::Forward).unwrap_err();
    let Error::Unsupported { what, why, .. } = &error else { panic!("{error}") };
    assert!(what == "kernel forward" && why.contains("workgroup memory"), "{error}");
    assert!(matches!(select_kernel(&spec, &COMMON, Kernel::ForwardInt8), Err(Error::Unsupported { .. })));
}

#[test]
fn every_selected_variant_is_listed() {
    let all = [variants(), matrix_variants(), lane_variants()].concat();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for out in [DType::F32, DType::F16, DType::BF16] {
            for mask in [None, Some(DType::Bool), Some(DType::F32), Some(DType::F16), Some(DType::BF16)] {
                for has_16_bit_stores in [false, true] {
                    let (q, mask) = (form(dtype, &[1, 2, 4, 8]), mask.map(|mask| form(mask, &[4, 4])));
                    let options = Options::default().with_out_dtype(out);
                    let spec = Spec::builder(q, q, q, &options).mask(mask).build().unwrap();
                    for (caps, kernel) in [
                        (COMMON, Kernel::Forward),
                        (PROCESSOR, Kernel::Forward),
                        (MATRICES[0], Kernel::Matrices),
                        (MATRICES[1], Kernel::Matrices),
                        (COMMON, Kernel::Decode),
                        (Caps::WEBGPU, Kernel::Generic),
                    ] {
                        if kernel == Kernel::Matrices && dtype != DType::F16 {
                            continue;
                        }
                        let plan = select_kernel(&spec, &Caps { has_16_bit_stores, ..caps }, kernel).unwrap();
                        let launch = plan.launch_plan::<ShaderLaunch>().unwrap();
                        let kernels: Vec<KernelVariant> = launch.variant.into_iter().chain(launch.combine).collect();
                        assert!(kernels.iter().all(|variant| all.contains(variant)), "{kernels:?}");
                        assert_eq!((kernels[0].storage, kernels[kernels.len() - 1].out), (dtype, out));
                        assert_eq!(kernels.len(), 1 + usize::from(kernel == Kernel::Decode));
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_empty_launches_nothing() {
    let plan = select(&spec(DType::F32, [1, 2, 0, 8], 2, 4), &Caps::WEBGPU).unwrap();
    assert_eq!((plan.items(), plan.work()), (0, None));
    let plan = select(&spec(DType::F32, [1, 2, 3, 8], 2, 0), &Caps::WEBGPU).unwrap();
    assert_eq!(plan.items(), 2, "rows without keys are written: zeros");
}

/// Every element of a tensor that a row of a task needs lies in the reach of the one window that has the row.
fn check(spec: &Spec, caps: &Caps) -> usize {
    let windows = windows(spec, caps);
    let (heads, group, rows) = (spec.num_kv_heads(), spec.group_size(), spec.group_size() * spec.q_len());
    for task in 0..spec.batch() * heads {
        for r in 0..rows {
            let has = |window: &&Window| window.tasks.contains(&task) && window.row_blocks.contains(&(r / 64));
            let [window] = windows.iter().filter(has).collect::<Vec<_>>()[..] else { panic!("one window has a row") };
            let (batch, head, i) = (task / heads, task % heads * group + r / spec.q_len(), r % spec.q_len());
            let inside = |n: usize, strides: [isize; 4], index: [usize; 4], size: usize| {
                let at: i64 = strides.iter().zip(index).map(|(&stride, at)| stride as i64 * at as i64).sum();
                let Range { lo, hi } = window.reach[n].unwrap();
                lo <= at * size as i64 && (at + 1) * size as i64 <= hi
            };
            let size = spec.q.dtype.size_bytes();
            for (n, tensor) in [(0, &spec.q), (6, &spec.out)] {
                let last = tensor.shape[3] - 1;
                assert!([0, last].into_iter().all(|d| inside(n, tensor.strides, [batch, head, i, d], size)));
            }
            for (n, tensor) in [(1, &spec.k), (2, &spec.v)] {
                let (j, d) = (spec.kv_len() - 1, tensor.shape[3] - 1);
                let corners = [[0, 0], [j, 0], [0, d], [j, d]];
                let at = |[j, d]: [usize; 2]| inside(n, tensor.strides, [batch, task % heads, j, d], size);
                assert!(corners.into_iter().all(at));
            }
        }
    }
    for window in &windows {
        for range in window.reach.iter().flatten() {
            assert!(range.len_bytes() + i64::from(caps.offset_alignment) + 4 <= caps.max_binding_bytes as i64);
        }
    }
    windows.len()
}

#[test]
fn a_window_reaches_what_its_rows_need_and_no_more_than_a_binding() {
    let spec = spec(DType::F32, [3, 4, 100, 8], 2, 50);
    let caps = |max_binding_bytes| Caps { max_binding_bytes, offset_alignment: 32, ..Caps::WEBGPU };
    assert_eq!(check(&spec, &caps(1 << 20)), 1);
    // Of k: 3·2·50·8·4 = 9600 bytes; of q 38400; of a task 6400 of q, 3200 of each of its heads.
    assert!(check(&spec, &caps(20_000)) > 1);
    assert_eq!(check(&spec, &caps(6500)), 6, "a task each");
    let by_rows = check(&spec, &caps(4000));
    assert!(by_rows > 6, "{by_rows}: the rows of a task too");
    let error = select(&spec, &caps(1000)).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("bytes of ")), "{error}");
}

#[test]
fn strides_of_any_sign_are_reached() {
    let dims = |strides: [isize; 4]| Dims::new(&strides).unwrap();
    let form = |strides: Strides| TensorForm::new(DType::BF16, Shape::new(&[2, 3, 70, 8]).unwrap(), strides, DEVICE);
    let (reversed, heads_last) = (form(dims([-1680, -560, -8, -1])), form(dims([1680, 8, 24, 1])));
    let spec = Spec::builder(reversed, heads_last, reversed, &Options::default()).build().unwrap();
    let caps = |max_binding_bytes| Caps { max_binding_bytes, offset_alignment: 32, ..Caps::WEBGPU };
    assert_eq!(check(&spec, &caps(1 << 20)), 1);
    assert!(check(&spec, &caps(4000)) >= 2);
}

#[test]
fn launches_of_too_many_workgroups_are_cut() {
    let spec = spec(DType::F32, [4, 4, 200, 8], 4, 5);
    let plan = select(&spec, &Caps { max_items: 10, ..Caps::WEBGPU }).unwrap();
    let launch = plan.launch_plan::<ShaderLaunch>().unwrap();
    assert!(launch.windows.iter().all(|window| launch.items_of(window) <= 10));
}
