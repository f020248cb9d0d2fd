//! What a GPU is not asked often: every 16-bit number, NaN and infinities in attended data, windows, neighbours, and each way in which it fails.

mod common;

use half::{bf16, f16};
use rapt_core::{DType, Element, Error, Kernel, Operands, Options, Shape, Spec, Strides, Tensors, View, ViewMut};
use rapt_shader::ShaderLaunch;
use rapt_testkit::Rng;
#[cfg(unix)]
use rapt_testkit::Sparse;
use rapt_wgpu::wgpu::{self, BufferUsages};
use rapt_wgpu::{BufferTensor, BufferTensors, Checks, Gpu, GpuError, OpenOptions};

type Widen = fn(u16) -> f32;
type Round = fn(f32) -> u16;

const STORED: BufferUsages = BufferUsages::STORAGE.union(BufferUsages::COPY_DST).union(BufferUsages::COPY_SRC);

fn buffer(gpu: &Gpu, bytes: &[u8], usage: BufferUsages) -> wgpu::Buffer {
    let (device, queue) = gpu.wgpu();
    let size = bytes.len() as u64;
    let buffer = device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false });
    queue.write_buffer(&buffer, 0, bytes);
    buffer
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// `v` by one query and one key, whose weight is 1: what it is loaded and stored as. Elements are given and answered as bytes.
fn through(gpu: &Gpu, storage: DType, out: DType, v: &[u8]) -> Vec<u8> {
    let n = v.len() / storage.size_bytes();
    let one = buffer(gpu, &[0; 4], STORED);
    let one = BufferTensor::contiguous("q", &one, storage, [1, 1, 1, 1].into()).unwrap();
    let (v, o) = (buffer(gpu, v, STORED), buffer(gpu, &vec![0; n * out.size_bytes()], STORED));
    let of = |buffer, dtype| BufferTensor::contiguous("v", buffer, dtype, [1, 1, 1, n].into()).unwrap();
    let tensors = BufferTensors::new(one, one, of(&v, storage), of(&o, out));
    let views = tensors.views(gpu.device()).unwrap();
    let options = Options::default().with_out_dtype(out);
    let spec = Spec::builder(&views.q, &views.k, &views.v, &options).out(&views.out).build().unwrap();
    gpu.run(&gpu.plan(&spec).unwrap(), &tensors).unwrap();
    common::read(gpu, &[&o]).remove(0)
}

#[test]
fn every_16_bit_number_is_loaded_as_itself() {
    let Some(gpu) = common::gpu() else { return };
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let widen: [(DType, Widen); 2] =
        [(DType::F16, |bits| f16::from_bits(bits).to_f32()), (DType::BF16, |bits| bf16::from_bits(bits).to_f32())];
    for (dtype, widen) in widen {
        let loaded = through(gpu, dtype, DType::F32, &all);
        for (bits, got) in (0..=u16::MAX).zip(loaded.chunks_exact(4)) {
            let (got, expected) = (f32::from_le_bytes([got[0], got[1], got[2], got[3]]), widen(bits));
            // Below 2^-126 a device may take a float32 for 0.
            let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
            assert!(
                same || (expected.is_subnormal() && got == 0.0) || (got == 0.0 && expected == 0.0),
                "{dtype} {bits:#06x}: {got}"
            );
        }
        // And stored as itself.
        let stored = through(gpu, dtype, dtype, &all);
        for (bits, got) in (0..=u16::MAX).zip(stored.chunks_exact(2)) {
            let (got, number) = (u16::from_le_bytes([got[0], got[1]]), widen(bits));
            let is_zero = |bits: u16| bits & 0x7fff == 0;
            let exempt =
                number.is_nan() && widen(got).is_nan() || is_zero(got) && (is_zero(bits) || number.is_subnormal());
            assert!(got == bits || exempt, "{dtype} {bits:#06x}: {got:#06x}");
        }
    }
}

#[test]
fn float32_is_rounded_to_16_bits_once_and_to_even() {
    let Some(gpu) = common::gpu() else { return };
    // Every number of 16 bits, the ties between it and the next, and what lies beside these.
    let near = |x: f32| [x.to_bits().wrapping_sub(1), x.to_bits(), x.to_bits().wrapping_add(1)].map(f32::from_bits);
    let of_bf16 = (0..=u16::MAX).flat_map(|bits| {
        let x = u32::from(bits) << 16;
        [x, x + 0x7fff, x + 0x8000, x + 0x8001].map(f32::from_bits)
    });
    let of_f16 = (0..0x7c00).flat_map(|bits| {
        let (x, next) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
        let tie = if next.is_finite() { (x + next) / 2.0 } else { 65520.0 };
        near(x).into_iter().chain(near(tie)).flat_map(|x| [x, -x])
    });
    let numbers: Vec<f32> = of_bf16.chain(of_f16).filter(|x| !x.is_nan() && !x.is_subnormal()).collect();
    let round: [(DType, Round); 2] =
        [(DType::F16, |x| f16::from_f32(x).to_bits()), (DType::BF16, |x| bf16::from_f32(x).to_bits())];
    for (dtype, round) in round {
        let stored = through(gpu, DType::F32, dtype, &bytes_of(&numbers));
        for (x, got) in numbers.iter().zip(stored.chunks_exact(2)) {
            let got = u16::from_le_bytes([got[0], got[1]]);
            // 1·x + 0 is +0 for −0.
            assert!(
                got == round(*x) || *x == 0.0 || (got & 0x7fff == 0 && round(*x) & 0x7fff == 0),
                "{dtype} of {x:e}: {got:#06x}"
            );
        }
    }
}

/// Attention of the host's tensors `[1, heads, len, dim]`, as bits of out and lse.
fn attend(
    gpu: &Gpu,
    shapes: [[usize; 4]; 2],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    options: &Options,
) -> (Vec<u32>, Vec<u32>) {
    attended(gpu, shapes, [q, k, v], options)
}

/// As [`attend`], of numbers that are rounded to this dtype; out is float32.
fn attend_in(
    gpu: &Gpu,
    dtype: DType,
    shapes: [[usize; 4]; 2],
    tensors: [&[f32]; 3],
    options: &Options,
) -> (Vec<u32>, Vec<u32>) {
    let options = options.with_out_dtype(DType::F32);
    if dtype == DType::F32 {
        return attended(gpu, shapes, tensors, &options);
    }
    let [q, k, v] = tensors.map(|x| x.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>());
    attended(gpu, shapes, [&q, &k, &v], &options)
}

fn attended<T: Element>(
    gpu: &Gpu,
    shapes: [[usize; 4]; 2],
    [q, k, v]: [&[T]; 3],
    options: &Options,
) -> (Vec<u32>, Vec<u32>) {
    let [of_q, of_k] = shapes;
    let (mut out, mut lse) = (vec![0f32; q.len()], vec![0f32; q.len() / of_q[3]]);
    fn view<'a, T: Element>(name: &'static str, numbers: &'a [T], shape: [usize; 4]) -> View<'a> {
        View::contiguous(name, numbers, shape.into()).unwrap()
    }
    let tensors = Tensors {
        lse: Some(ViewMut::contiguous("lse", &mut lse, [of_q[0], of_q[1], of_q[2]].into()).unwrap()),
        ..Tensors::new(
            view("q", q, of_q),
            view("k", k, of_k),
            view("v", v, of_k),
            ViewMut::contiguous("out", &mut out, of_q.into()).unwrap(),
        )
    };
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, options)
        .out(&tensors.out)
        .lse(tensors.lse.as_ref().unwrap())
        .build()
        .unwrap();
    let plan = gpu.plan_host(&spec).unwrap();
    let is_many = of_q[2] * of_q[1] / of_k[1] > 16 && of_q[3] <= 128;
    let has_matrices = gpu.caps().matrices.is_some() && T::DTYPE == DType::F16 && is_many;
    assert_eq!(plan.key().kernel == Kernel::Matrices, has_matrices);
    gpu.run_host(&plan, &mut Operands::check(tensors, &spec).unwrap()).unwrap();
    (out.iter().map(|x| x.to_bits()).collect(), lse.iter().map(|x| x.to_bits()).collect())
}

fn normal(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.normal() as f32).collect()
}

const DIM: usize = 20;

/// One head under a causal mask that ends with the last key, with `bad` in row j of one of q, k and v: the bits without and with.
fn with_bad(
    gpu: &Gpu,
    dtype: DType,
    [q_len, kv_len]: [usize; 2],
    tensor: usize,
    j: usize,
    bad: f32,
) -> [(Vec<u32>, Vec<u32>); 2] {
    let mut rng = Rng::new(7);
    let mut all = [q_len, kv_len, kv_len].map(|len| normal(&mut rng, len * DIM));
    let options = Options::default().with_causal(rapt_core::Causal::BottomRight);
    let shapes = [[1, 1, q_len, DIM], [1, 1, kv_len, DIM]];
    let run = |all: &[Vec<f32>; 3]| attend_in(gpu, dtype, shapes, all.each_ref().map(Vec::as_slice), &options);
    let clean = run(&all);
    all[tensor][j * DIM + 3] = bad;
    [clean, run(&all)]
}

#[test]
fn nan_reaches_exactly_the_rows_that_attend_it() {
    let Some(gpu) = common::gpu() else { return };
    // Many queries, and few on two splits of the keys; many of float16, on matrices where there are such.
    nan_reaches(gpu, DType::F32, [70, 70], &[0, 17, 31, 32, 63, 64, 69]);
    nan_reaches(gpu, DType::F32, [5, 300], &[0, 2, 63, 64, 255, 256, 296, 299]);
    nan_reaches(gpu, DType::F16, [70, 140], &[0, 69, 70, 71, 127, 128, 139]);
}

fn nan_reaches(gpu: &Gpu, dtype: DType, lens: [usize; 2], at: &[usize]) {
    let is_nan = |bits: &u32| f32::from_bits(*bits).is_nan();
    let [q_len, kv_len] = lens;
    for &j in at {
        // The first row that attends key j.
        let first = (j + q_len).saturating_sub(kv_len);
        // A query: its own row. A key: every row from that one on, whole, and its lse.
        for (tensor, rows) in [(0, j..j + 1), (1, first..q_len)] {
            if tensor == 0 && j >= q_len {
                continue;
            }
            let [clean, got] = with_bad(gpu, dtype, lens, tensor, j, f32::NAN);
            for row in 0..q_len {
                let (is, was) = (&got.0[row * DIM..][..DIM], &clean.0[row * DIM..][..DIM]);
                let reached = is.iter().all(is_nan) && is_nan(&got.1[row]);
                assert!(
                    if rows.contains(&row) { reached } else { is == was && got.1[row] == clean.1[row] },
                    "{lens:?} {tensor} {j} {row}"
                );
            }
        }
        // A value: its column of every row from that one on; lse is of scores.
        for (bad, expected) in
            [(f32::NAN, f32::NAN), (f32::INFINITY, f32::INFINITY), (f32::NEG_INFINITY, f32::NEG_INFINITY)]
        {
            let [clean, got] = with_bad(gpu, dtype, lens, 2, j, bad);
            assert_eq!(clean.1, got.1);
            for (at, (is, was)) in got.0.iter().zip(&clean.0).enumerate() {
                let (row, column) = (at / DIM, at % DIM);
                let is_reached = row >= first && column == 3;
                let has_it = if expected.is_nan() { is_nan(is) } else { *is == expected.to_bits() };
                assert!(
                    if is_reached { has_it } else { is == was },
                    "{lens:?} value {j} {bad}: row {row}, column {column}"
                );
            }
        }
    }
}

#[test]
fn an_infinite_score_weighs_all_or_nothing() {
    let Some(gpu) = common::gpu() else { return };
    let (shape, ones) = ([1, 1, 2, 1], [1.0f32, 1.0]);
    // q·k = −inf: the weight is 0. +inf: the row is NaN. All −inf: zeros. With a cap both are numbers.
    let run = |k: [f32; 2], options: &Options| attend(gpu, [shape; 2], &ones, &k, &[3.0, 5.0], options).0.map_to_f32();
    assert_eq!(run([f32::NEG_INFINITY, 1.0], &Options::default()), [5.0, 5.0]);
    assert!(run([f32::INFINITY, 1.0], &Options::default()).iter().all(|x| x.is_nan()));
    assert_eq!(run([f32::NEG_INFINITY; 2], &Options::default()), [0.0, 0.0]);
    let negative = Options::default().with_softmax_scale(-1.0);
    assert_eq!(run([f32::INFINITY, 1.0], &negative), [5.0, 5.0], "the scale turns it");
    let capped = run([f32::INFINITY, 0.0], &Options::default().with_softcap(1.0));
    let expected = (3.0 * 1f32.exp() + 5.0) / (1f32.exp() + 1.0);
    assert!(capped.iter().all(|x| (x - expected).abs() < 1e-6), "{capped:?} {expected}");
}

trait MapToF32 {
    fn map_to_f32(self) -> Vec<f32>;
}
impl MapToF32 for Vec<u32> {
    fn map_to_f32(self) -> Vec<f32> {
        self.into_iter().map(f32::from_bits).collect()
    }
}

#[test]
fn a_batch_entry_has_the_bits_that_it_has_alone_and_checks_change_none() {
    let Some(gpu) = common::gpu() else { return };
    let checked = Gpu::open_with(0, OpenOptions { checks: Checks::Compiled, ..OpenOptions::default() }).unwrap();
    // `forward`, `decode` on three splits, and `generic`.
    for (q_len, kv_len, dim) in [(67, 67, 24), (3, 530, 24), (20, 20, 260)] {
        alone(gpu, &checked, DType::F32, [3, 2, q_len, dim], [3, 2, kv_len, dim]);
    }
    alone(gpu, &checked, DType::F16, [3, 2, 67, 24], [3, 2, 67, 24]);
}

fn alone(gpu: &Gpu, checked: &Gpu, dtype: DType, of_q: [usize; 4], of_k: [usize; 4]) {
    let mut rng = Rng::new(3);
    let [q, k, v] = [of_q, of_k, of_k].map(|shape| normal(&mut rng, shape.iter().product()));
    let options = Options::default().with_softcap(5.0);
    let options = if of_q == of_k { options.with_window(Some(40), None) } else { options };
    let (out, lse) = attend_in(gpu, dtype, [of_q, of_k], [&q, &k, &v], &options);
    let [one_q, one_k] = [of_q, of_k].map(|[_, heads, len, dim]| [1, heads, len, dim]);
    for b in 0..of_q[0] {
        let of = |all: &[f32]| {
            let n = all.len() / of_q[0];
            all[b * n..][..n].to_vec()
        };
        let (own, own_lse) = attend_in(gpu, dtype, [one_q, one_k], [&of(&q), &of(&k), &of(&v)], &options);
        let (of_out, of_lse) = (out.len() / of_q[0], lse.len() / of_q[0]);
        let is_same = own == out[b * of_out..][..of_out] && own_lse == lse[b * of_lse..][..of_lse];
        assert!(is_same, "batch entry {b} of {of_q:?}");
    }
    assert_eq!(attend_in(checked, dtype, [of_q, of_k], [&q, &k, &v], &options), (out, lse));
}

/// Scores of float16 that rise from block to block: the weights' reference moves, in the rows whose own scores rise and in no other.
#[test]
fn a_reference_moves_with_the_scores_of_its_own_row() {
    let Some(gpu) = common::gpu() else { return };
    let mut rng = Rng::new(13);
    const LEN: usize = 200;
    let (of_q, of_k) = ([1, 1, 64, DIM], [1, 1, LEN, DIM]);
    let [mut q, mut k, v] = [64, LEN, LEN].map(|len| normal(&mut rng, len * DIM));
    // Of key j the first number is j / 20: with a query of 20 there the scores rise by 0.22 from key to key.
    (0..LEN).for_each(|j| k[j * DIM] = j as f32 / 20.0);
    (0..64).for_each(|row| q[row * DIM] = 0.0);
    let run = |q: &[f32]| attend_in(gpu, DType::F16, [of_q, of_k], [q, &k, &v], &Options::default());
    let still = run(&q);
    for row in [0, 5, 63] {
        q[row * DIM] = 20.0;
    }
    let moved = run(&q);
    for row in 0..64 {
        let of = |bits: &(Vec<u32>, Vec<u32>)| (bits.0[row * DIM..][..DIM].to_vec(), bits.1[row]);
        assert_eq!(of(&moved) == of(&still), ![0, 5, 63].contains(&row), "row {row}");
    }
    // And they are those of the definition: of the numbers that float16 has of these.
    let exact = |x: &[f32]| x.iter().map(|x| f64::from(f16::from_f32(*x))).collect::<Vec<f64>>();
    let (q, k, v) = (exact(&q), exact(&k), exact(&v));
    for row in 0..64 {
        let dot = |j: usize| (0..DIM).map(|d| q[row * DIM + d] * k[j * DIM + d]).sum::<f64>() / (DIM as f64).sqrt();
        let scores: Vec<f64> = (0..LEN).map(dot).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|x| (x - top).exp()).sum();
        let lse = f64::from(f32::from_bits(moved.1[row]));
        assert!((lse - top - sum.ln()).abs() < 1e-5 * (1.0 + lse.abs()), "row {row}: {lse}");
        let (mut difference, mut whole) = (0.0, 0.0);
        for c in 0..DIM {
            let expected: f64 = (0..LEN).map(|j| (scores[j] - top).exp() * v[j * DIM + c]).sum::<f64>() / sum;
            difference += (f64::from(f32::from_bits(moved.0[row * DIM + c])) - expected).powi(2);
            whole += expected.powi(2);
        }
        // A unit roundoff of float16.
        assert!((difference / whole).sqrt() < 2f64.powi(-11), "row {row}: {:.1e}", (difference / whole).sqrt());
    }
}

#[test]
fn tensors_longer_than_a_binding_are_attended_to_window_by_window() {
    let Some(gpu) = common::gpu() else { return };
    let limit = gpu.caps().max_binding_bytes;
    let (shape, numbers) = ([2usize, 2, 40, 16], 2 * 2 * 40 * 16);
    // The batch entries of k lie an eighth more apart than a binding is long.
    let apart = limit / 4 / 8 * 9;
    let size = (apart + 1280) * 4;
    if limit > 1 << 30 || size > gpu.wgpu().0.limits().max_buffer_size {
        println!("a binding of {limit} bytes is not tried");
        return;
    }
    let mut rng = Rng::new(5);
    let [q, k, v] = [0; 3].map(|_| normal(&mut rng, numbers));
    let expected = attend(gpu, [shape; 2], &q, &k, &v, &Options::default()).0;
    let (device, queue) = gpu.wgpu();
    let far =
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage: STORED, mapped_at_creation: false });
    let strides = Strides::from([apart as isize, 640, 16, 1]);
    let half = numbers / 2;
    queue.write_buffer(&far, 0, &bytes_of(&k[..half]));
    queue.write_buffer(&far, apart * 4, &bytes_of(&k[half..]));
    let (of_q, of_v, of_out) = (
        buffer(gpu, &bytes_of(&q), STORED),
        buffer(gpu, &bytes_of(&v), STORED),
        buffer(gpu, &vec![0; numbers * 4], STORED),
    );
    let near = |buffer| BufferTensor::contiguous("q", buffer, DType::F32, shape.into()).unwrap();
    let of_k = BufferTensor { buffer: &far, offset_bytes: 0, dtype: DType::F32, shape: shape.into(), strides };
    let tensors = BufferTensors::new(near(&of_q), of_k, near(&of_v), near(&of_out));
    let views = tensors.views(gpu.device()).unwrap();
    let spec = Spec::builder(&views.q, &views.k, &views.v, &Options::default()).out(&views.out).build().unwrap();
    let plan = gpu.plan(&spec).unwrap();
    assert_eq!(plan.launch_plan::<ShaderLaunch>().unwrap().windows.len(), 2);
    gpu.run(&plan, &tensors).unwrap();
    let bits: Vec<u32> = common::read(gpu, &[&of_out])[0]
        .chunks_exact(4)
        .map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]]))
        .collect();
    assert_eq!(bits, expected);

    // One head whose keys lie farther apart than a binding is long.
    let strides = Strides::from([0, 0, apart as isize / 40, 1]);
    let tensors = BufferTensors { k: BufferTensor { strides, ..of_k }, ..tensors };
    let views = tensors.views(gpu.device()).unwrap();
    let spec = Spec::builder(&views.q, &views.k, &views.v, &Options::default()).out(&views.out).build().unwrap();
    let error = gpu.plan(&spec).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("bytes of k for one head")), "{error}");
}

#[test]
fn what_cannot_be_bound_is_refused_by_its_name() {
    let Some(gpu) = common::gpu() else { return };
    let shape = Shape::from([1, 1, 4, 4]);
    let (one, other) = (buffer(gpu, &[0; 64], STORED), buffer(gpu, &[0; 64], STORED));
    let of = |buffer| BufferTensor::contiguous("x", buffer, DType::F32, shape).unwrap();
    let plan_of = |tensors: &BufferTensors<'_>| {
        let views = tensors.views(gpu.device())?;
        let spec = Spec::builder(&views.q, &views.k, &views.v, &Options::default()).out(&views.out).build()?;
        gpu.plan(&spec)
    };
    let good = BufferTensors::new(of(&one), of(&one), of(&one), of(&other));
    let plan = plan_of(&good).unwrap();
    gpu.run(&plan, &good).unwrap();
    // Inside its buffer.
    let beyond = BufferTensor { offset_bytes: 4, ..of(&one) };
    assert!(matches!(
        BufferTensors { k: beyond, ..good }.views(gpu.device()),
        Err(Error::OutOfExtent { tensor: "k", .. })
    ));
    let odd = BufferTensor { offset_bytes: 2, ..of(&one) };
    assert!(matches!(BufferTensors { v: odd, ..good }.views(gpu.device()), Err(Error::Unaligned { tensor: "v", .. })));
    // Of another plan.
    let transposed = BufferTensor { strides: [16, 16, 1, 4].into(), ..of(&one) };
    let error = gpu.run(&plan, &BufferTensors { q: transposed, ..good }).unwrap_err();
    assert!(matches!(error, Error::NotAsPlanned { tensor: "q", what: "strides" }), "{error}");
    // Over an input, and beside one in its buffer.
    let error = gpu.run(&plan, &BufferTensors { out: of(&one), ..good }).unwrap_err();
    assert!(matches!(error, Error::OutputOverlaps { tensor: "out", other: "q" }), "{error}");
    let wide = buffer(gpu, &[0; 128], STORED);
    let (first, second) = (of(&wide), BufferTensor { offset_bytes: 64, ..of(&wide) });
    let error = gpu.run(&plan, &BufferTensors { q: first, out: second, ..good }).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what == "out in the buffer of q"), "{error}");
    let unbound = buffer(gpu, &[0; 64], BufferUsages::COPY_DST);
    let error = gpu.run(&plan, &BufferTensors { k: of(&unbound), ..good }).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { what, .. } if what.contains("of k without usage STORAGE")),
        "{error}"
    );
    // The host's.
    let numbers = [0f32; 16];
    let view = View::contiguous("q", &numbers, shape).unwrap();
    let on_host = Spec::builder(&view, &view, &view, &Options::default()).build().unwrap();
    assert!(matches!(gpu.plan(&on_host), Err(Error::DeviceUnavailable { .. })));
    gpu.run(&plan, &good).unwrap();
}

#[test]
fn an_adapter_that_is_not_there_is_an_error_with_its_number() {
    assert!(matches!(Gpu::open(4711), Err(GpuError::NoAdapter { index: 4711, .. })));
}

#[test]
fn a_lost_device_is_an_error_and_then_opened_again() {
    if common::gpu().is_none() {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let (shape, numbers) = ([1, 1, 3, 4], [0.5f32; 12]);
    let run = || {
        let mut out = [0f32; 12];
        let view = View::contiguous("q", &numbers, shape.into()).unwrap();
        let tensors = Tensors::new(view, view, view, ViewMut::contiguous("out", &mut out, shape.into()).unwrap());
        let spec = Spec::builder(&view, &view, &view, &Options::default()).out(&tensors.out).build().unwrap();
        let plan = gpu.plan_host(&spec)?;
        gpu.run_host(&plan, &mut Operands::check(tensors, &spec).unwrap())?;
        Ok::<_, Error>(out)
    };
    assert_eq!(run().unwrap(), numbers);
    gpu.wgpu().0.destroy();
    // Whoever is first to meet the loss is told.
    let error = run().unwrap_err();
    assert!(matches!(error, Error::DeviceFailed { .. }), "{error}");
    assert_eq!(run().unwrap(), numbers);
}

/// On Unix: its output is addresses without memory.
#[cfg(unix)]
#[test]
fn memory_that_the_device_does_not_have_is_an_error_and_the_next_call_is_served() {
    let Some(gpu) = common::gpu() else { return };
    let most = gpu.wgpu().0.limits().max_buffer_size;
    // One value for every column, so that out alone is long: heads of 64 MiB, of which none is longer than a binding.
    const COLUMNS: usize = 16 << 20;
    let heads = (most / (COLUMNS as u64 * 4) + 1) as usize;
    if most > 1 << 40 {
        println!("a buffer of {most} bytes is not tried");
        return;
    }
    let one = [1f32];
    let mut out = Sparse::new(DType::F32, [1, heads, 1, COLUMNS], [0, COLUMNS as isize, 0, 1]);
    let expanded = |name, columns| View::strided(name, &one, 0, [1, heads, 1, columns].into(), [0; 4].into()).unwrap();
    let tensors = Tensors::new(expanded("q", 1), expanded("k", 1), expanded("v", COLUMNS), out.view_mut("out", 0));
    let spec =
        Spec::builder(&tensors.q, &tensors.k, &tensors.v, &Options::default()).out(&tensors.out).build().unwrap();
    let plan = gpu.plan_host(&spec).unwrap();
    let error = gpu.run_host(&plan, &mut Operands::check(tensors, &spec).unwrap()).unwrap_err();
    assert_eq!(error, Error::OutOfMemory { bytes: heads * COLUMNS * 4 });
    attend(gpu, [[1, 1, 3, 4]; 2], &[0.5; 12], &[0.5; 12], &[0.5; 12], &Options::default());
}

/// The files of a folder, by name.
/// More bytes than are on their way to the device at once, twice: what is kept between calls is used again.
#[test]
fn bytes_of_any_number_arrive_whole() {
    let Some(gpu) = common::gpu() else { return };
    for size in [0, 1, 5, (4 << 20) - 1, 4 << 20, (27 << 20) + 3, 7] {
        let bytes: Vec<u8> = (0..size).map(|at: usize| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
        let got = gpu.download(&gpu.upload(&bytes).unwrap()).unwrap();
        assert_eq!((got.len(), got[size..].iter().any(|byte| *byte != 0)), (size.max(4).next_multiple_of(4), false));
        assert!(got[..size] == bytes, "{size} bytes");
    }
}

/// k and v longer than a chunk of such copies, as columns that lie apart: each row is the value of the key that its query alone attends.
#[test]
fn long_tensors_of_the_host_arrive_whole() {
    let Some(gpu) = common::gpu() else { return };
    const KEYS: usize = 30_000;
    let data: Vec<f32> = (0..KEYS * 64 * 2).map(|at| (at % 65_521) as f32).collect();
    let view = |step: isize| {
        View::strided("k", &data, 0, [1, 1, KEYS, 64].into(), [0, 0, 128 / step * step, step].into()).unwrap()
    };
    let q = [0f32; 64];
    let q = View::contiguous("q", &q, [1, 1, 1, 64].into()).unwrap();
    for (step, key) in [(1, KEYS - 1), (2, 17_000)] {
        let mut mask = vec![false; KEYS];
        mask[key] = true;
        let mask = View::contiguous("mask", &mask, [1, KEYS].into()).unwrap();
        let (kv, mut out) = (view(step), [0f32; 64]);
        let out_view = ViewMut::contiguous("out", &mut out, [1, 1, 1, 64].into()).unwrap();
        let tensors = Tensors { mask: Some(mask), ..Tensors::new(q, kv, kv, out_view) };
        let options = Options::default();
        let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options).mask(Some(&mask)).build().unwrap();
        let plan = gpu.plan_host(&spec).unwrap();
        gpu.run_host(&plan, &mut Operands::check(tensors, &spec).unwrap()).unwrap();
        let expected: Vec<f32> = (0..64).map(|d| data[key * 128 + d * step as usize]).collect();
        assert_eq!(out.to_vec(), expected, "{step}");
    }
}

fn entries(folder: &std::path::Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let files = std::fs::read_dir(folder).map(|files| files.flatten().map(|file| file.path()).collect::<Vec<_>>());
    let mut files: Vec<_> =
        files.unwrap_or_default().into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect();
    files.sort();
    files
}

#[test]
fn compiled_kernels_are_kept_and_what_is_not_whole_is_compiled_anew() {
    if common::gpu().is_none() {
        return;
    }
    let folder = std::env::temp_dir().join(format!("rapt-kept-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let mut rng = Rng::new(11);
    let (of_q, of_k) = ([1, 2, 3, 16], [1, 2, 70, 16]);
    let [q, k, v] = [of_q, of_k, of_k].map(|shape| normal(&mut rng, shape.iter().product()));
    let run = |cache: Option<std::path::PathBuf>| {
        let gpu = Gpu::open_with(0, OpenOptions { cache, ..OpenOptions::default() }).unwrap();
        let bits = attend(&gpu, [of_q, of_k], &q, &k, &v, &Options::default());
        (bits, gpu.wgpu().0.features().contains(wgpu::Features::PIPELINE_CACHE))
    };
    let (expected, says) = run(None);
    assert_eq!(run(Some(folder.clone())).0, expected);
    let kept = entries(&folder);
    if !says {
        println!("the adapter does not say what it compiled");
        assert!(kept.is_empty());
        return;
    }
    // `decode` and `combine`.
    assert_eq!(kept.len(), 2);
    let data_of = |entry: &[u8]| entry[40..].to_vec();
    assert!(kept.iter().all(|(_, entry)| entry.starts_with(b"raptpip1") && !data_of(entry).is_empty()));
    // Kept again, they serve; broken, cut short, empty, of each other, of nobody, they do not, and are written anew.
    assert_eq!(run(Some(folder.clone())).0, expected);
    let flipped = |entry: &[u8]| {
        let mut entry = entry.to_vec();
        entry[60] ^= 1;
        entry
    };
    let breakages: [&dyn Fn(usize) -> Vec<u8>; 5] = [
        &|at| flipped(&kept[at].1),
        &|at| kept[at].1[..kept[at].1.len() / 2].to_vec(),
        &|_| Vec::new(),
        &|at| kept[1 - at].1.clone(),
        &|_| b"raptpip1 and thirty-two bytes of no digest, then data that no driver has given".to_vec(),
    ];
    for breakage in breakages {
        (0..2).for_each(|at| std::fs::write(&kept[at].0, breakage(at)).unwrap());
        assert_eq!(run(Some(folder.clone())).0, expected);
        let now = entries(&folder);
        assert_eq!(now.len(), 2);
        for ((path, entry), (was_at, _)) in now.iter().zip(&kept) {
            assert_eq!(path, was_at);
            assert!(entry.starts_with(b"raptpip1") && !data_of(entry).is_empty());
        }
        assert!((0..2).all(|at| now[at].1 != breakage(at)), "written anew");
    }
    // A folder that is a file.
    let file = folder.join("file");
    std::fs::write(&file, "in the way").unwrap();
    assert_eq!(run(Some(file)).0, expected);
    std::fs::remove_dir_all(folder).unwrap();
}
