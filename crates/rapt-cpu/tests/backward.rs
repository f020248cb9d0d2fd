//! The backward pass of every instruction set of this machine against the definition's gradients, and against itself on other threads, beside other
//! batch entries and under other strides.

use half::bf16;
use rapt_core::{
    Arch, BackwardOperands, BackwardSpec, BackwardTensors, COMPUTED, Caps, Causal, DType, Device, Dropout, DropoutSeed,
    Element, Executor, GradientForms, Options, PRounding, Result, SerialExecutor, Shape, Spec, Strides, TensorForm,
    View, ViewMut, Window, Workspace,
};
use rapt_testkit::{BackwardEngine, Case, GradientCase, MaskCase, Places, Rng, judge_gradients};

/// Spawning by `std::thread`, so that this crate needs no pool.
struct Spawning(usize);

impl Executor for Spawning {
    fn threads(&self) -> usize {
        self.0
    }
    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        std::thread::scope(|scope| {
            for chunk in 0..chunks {
                scope.spawn(move || work(chunk));
            }
        });
        Ok(())
    }
}

/// The instruction sets whose kernels differ: the backward pass has no products of int8.
fn arches() -> Vec<Arch> {
    rapt_cpu::tile_every_request();
    rapt_cpu::available().iter().copied().filter(|&arch| arch != Arch::Avx512Vnni).collect()
}

fn engine(arch: Arch, executor: &dyn Executor) -> Box<BackwardEngine<'_>> {
    let mut workspace = Workspace::new();
    Box::new(move |spec: &BackwardSpec, tensors: BackwardTensors<'_>| -> Result<()> {
        let plan = rapt_cpu::select_backward(spec, &Caps { arch, threads: executor.threads(), clock_hz: None })?;
        workspace.ensure(plan.workspace_bytes())?;
        rapt_cpu::run_backward(&plan, &mut BackwardOperands::check(tensors, spec)?, &mut workspace, executor)
    })
}

fn contiguous(dtype: DType, shape: [usize; 4]) -> TensorForm {
    TensorForm::new(dtype, shape.into(), Shape::from(shape).contiguous().unwrap(), Device::Cpu)
}

#[test]
fn every_instruction_set_gives_the_gradients_of_the_definition() {
    let mut engines: Vec<_> = arches().into_iter().map(|arch| engine(arch, &SerialExecutor)).collect();
    let (mut seeds, mut dropping) = (Rng::new(0x6ad), 0);
    for n in 0..250 {
        let case = GradientCase::random(seeds.bits(), &COMPUTED, 60_000);
        dropping += usize::from(case.case.dropout.0 > 0.0);
        judge_gradients(&mut engines, &case).unwrap_or_else(|what| panic!("problem {n}: {what}"));
    }
    assert!((60..110).contains(&dropping), "{dropping} problems with dropout");
}

/// Several blocks and chunks of keys, several runs of queries, lengths of zero, rows that attend nothing with NaN arriving there, masks that are broadcast
/// in each dimension.
#[test]
fn gradients_of_many_blocks_and_of_none() {
    let mut engines: Vec<_> = arches().into_iter().map(|arch| engine(arch, &SerialExecutor)).collect();
    let mut cases = Vec::new();
    for (n, dtype) in COMPUTED.into_iter().enumerate() {
        let seed = n as u64;
        let plain = |q, kv_len| Case { seed, ..Case::plain(dtype, q, kv_len) };
        for (q_len, kv_len) in [(0, 5), (5, 0), (0, 0)] {
            cases.push(Case { sinks: Some(dtype), ..plain([2, 2, q_len, 8], kv_len) });
        }
        cases.push(Case { num_kv_heads: 1, head_dim_v: 9, ..plain([1, 3, 70, 33], 530) });
        let dropout = (0.3, DropoutSeed { first_batch: 5, ..DropoutSeed::new(seed, 1 << 40) });
        cases.push(Case { num_kv_heads: 1, head_dim_v: 9, dropout, ..plain([2, 3, 70, 33], 530) });
        cases.push(Case { causal: Some(Causal::BottomRight), dropout, poison: true, ..plain([1, 2, 90, 16], 60) });
        // Several blocks to a chunk: of wide rows, and of a long K.
        cases.push(plain([1, 1, 9, 256], 1100));
        cases.push(Case { causal: Some(Causal::BottomRight), ..plain([1, 1, 40, 8], 2100) });
        // The first 340 rows attend nothing.
        let causal = Some(Causal::BottomRight);
        cases.push(Case { causal, poison: true, ..plain([1, 2, 400, 16], 60) });
        let window = Window { left: Some(40), right: Some(3) };
        cases.push(Case { causal: Some(Causal::TopLeft), window, poison: true, ..plain([1, 1, 300, 20], 300) });
        let mask = |dtype, full| Some(MaskCase { dtype, full, rank: 4, lowest: false });
        cases.push(Case { mask: mask(DType::Bool, [true; 4]), poison: true, ..plain([2, 2, 70, 16], 280) });
        for full in
            [[true; 4], [false, true, true, true], [false, false, false, true], [true, false, true, false], [false; 4]]
        {
            let softcap = full[1].then_some(2.0);
            cases.push(Case {
                mask: mask(dtype, full),
                softcap,
                poison: true,
                num_kv_heads: 1,
                dropout: if full[0] { dropout } else { Default::default() },
                ..plain([2, 2, 70, 12], 150)
            });
        }
    }
    for case in cases {
        judge_gradients(&mut engines, &GradientCase::all(&case)).unwrap_or_else(|what| panic!("{what}"));
    }
}

/// Weights are rounded where products are pairs: of bfloat16, of which `d_o` is too, on instruction sets that have them; and of float16 in tiles, to two
/// bfloat16.
#[test]
fn products_are_pairs_of_bfloat16_and_of_parts_in_tiles() {
    rapt_cpu::tile_every_request();
    let planned = |arch, dtype, of_d_o| {
        let x = contiguous(dtype, [1, 2, 40, 16]);
        let options = Options::default().with_out_dtype(of_d_o);
        let mut builder = Spec::builder(x, x, x, &options);
        let forward = builder.return_lse(true).build().unwrap();
        let forms = GradientForms {
            dq: Some(x),
            dk: Some(x),
            dv: Some(x),
            ..GradientForms::new(contiguous(of_d_o, [1, 2, 40, 16]))
        };
        let spec = BackwardSpec::new(forward, &forms).unwrap();
        let plan = rapt_cpu::select_backward(&spec, &Caps { arch, threads: 1, clock_hz: None }).unwrap();
        (plan.plan().key().arch, plan.plan().key().p_rounding)
    };
    let of_pairs = if cfg!(target_arch = "aarch64") { Arch::NeonBf16 } else { Arch::Avx512Bf16 };
    if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        assert_eq!(planned(of_pairs, DType::BF16, DType::BF16), (of_pairs, PRounding::Storage));
    }
    if cfg!(target_arch = "x86_64") {
        assert_eq!(planned(Arch::Amx, DType::BF16, DType::BF16), (Arch::Amx, PRounding::Storage));
        assert_eq!(planned(Arch::Amx, DType::F16, DType::F16), (Arch::Amx, PRounding::TwoBf16));
        assert_eq!(planned(Arch::Amx, DType::F32, DType::F32), (Arch::Amx, PRounding::Accumulation));
    }
    for (arch, dtype, of_d_o) in [
        (Arch::Amx, DType::BF16, DType::F32),
        (Arch::Amx, DType::F16, DType::F32),
        (of_pairs, DType::BF16, DType::F32),
        (of_pairs, DType::F32, DType::F32),
        (of_pairs, DType::F16, DType::F16),
        (Arch::Scalar, DType::BF16, DType::BF16),
    ] {
        let (arch_of, rounding) = planned(arch, dtype, of_d_o);
        let has_pairs = [Arch::Avx512Bf16, Arch::Amx, Arch::NeonBf16];
        assert!(!has_pairs.contains(&arch_of), "{} of {dtype}", arch_of.name());
        assert_eq!(rounding, PRounding::Accumulation);
    }
}

/// What is broadcast over batch entries or heads has one gradient, the sum, rounded once: also where gradients are of the accumulation dtype.
#[test]
fn gradients_of_what_is_broadcast_are_sums() {
    let mut engines: Vec<_> =
        arches().into_iter().flat_map(|arch| [engine(arch, &SerialExecutor), engine(arch, &Spawning(3))]).collect();
    let [none, batch, heads, all] = [0, 18, 19, 22];
    let names = [none, batch, heads, all].map(|at| rapt_testkit::zoo([1; 4])[at].name);
    assert_eq!(names, ["contiguous", "batch expanded", "heads expanded", "all expanded"]);
    for (n, dtype) in COMPUTED.into_iter().enumerate() {
        for (m, [q, k, v]) in [
            [none, batch, batch],
            [batch, heads, none],
            [heads, none, heads],
            [all, batch, heads],
            [none, heads, batch],
            [heads, all, all],
        ]
        .into_iter()
        .enumerate()
        {
            let seed = (10 * n + m) as u64;
            let places = Places { q, k, v, ..Places::default() };
            let dropout = (if m == 1 { 0.3 } else { 0.0 }, DropoutSeed::new(seed, 1));
            let of_group = m == 0 || m == 4;
            let case = Case {
                places,
                dropout,
                causal: (m % 2 == 1).then_some(Causal::BottomRight),
                num_kv_heads: if of_group { 2 } else { 4 },
                head_dim_v: 9,
                ..Case::plain(dtype, [5, 4, 33, 20], if m == 2 { 530 } else { 140 })
            };
            let of = GradientCase::all(&Case { seed, ..case }).summing(m % 3 == 2);
            judge_gradients(&mut engines, &of).unwrap_or_else(|what| panic!("{what}"));
        }
    }
}

const SHAPE: [usize; 4] = [3, 4, 200, 24];
const KEYS: [usize; 4] = [3, 2, 700, 24];

/// Numbers of a storage dtype.
struct Numbers<T> {
    from: fn(f64) -> T,
    bits: fn(T) -> u32,
}

/// Gradients of entries `first..first + batch` of one problem, with dropout of probability `p`.
fn gradients<T: Element>(
    numbers: &Numbers<T>,
    (first, batch): (usize, usize),
    p: f64,
    arch: Arch,
    executor: &dyn Executor,
) -> Vec<Vec<u32>> {
    let mut rng = Rng::new(7);
    let mut normal = |[entries, heads, len, dim]: [usize; 4]| -> Vec<T> {
        let row: Vec<T> = (0..entries * heads * len * dim).map(|_| (numbers.from)(rng.normal())).collect();
        row[first * heads * len * dim..][..batch * heads * len * dim].to_vec()
    };
    let (q, k, v, d_o, out) = (normal(SHAPE), normal(KEYS), normal(KEYS), normal(SHAPE), normal(SHAPE));
    let lse: Vec<f32> = (0..batch * 4 * 200).map(|n| 6.0 + (n % 200) as f32 / 400.0).collect();
    let sinks = [0.5f32, -0.5, 1.0, 0.0];
    let (queries, keys) = ([batch, SHAPE[1], SHAPE[2], SHAPE[3]], [batch, KEYS[1], KEYS[2], KEYS[3]]);
    let (mut dq, mut dk, mut dv, mut d_sinks) = (q.clone(), k.clone(), v.clone(), sinks);
    let view = |name, data, shape: [usize; 4]| View::contiguous::<T>(name, data, Shape::from(shape)).unwrap();
    let lse = View::contiguous("lse", &lse, [batch, 4, 200].into()).unwrap();
    let inputs = [view("q", &q, queries), view("k", &k, keys), view("v", &v, keys)];
    let seed = DropoutSeed { first_batch: first as u32, ..DropoutSeed::new(3, 4) };
    let tensors = BackwardTensors {
        dropout: (p > 0.0).then_some(seed),
        sinks: Some(View::contiguous("sinks", &sinks, [4].into()).unwrap()),
        dq: Some(ViewMut::contiguous("dq", &mut dq, queries.into()).unwrap()),
        dk: Some(ViewMut::contiguous("dk", &mut dk, keys.into()).unwrap()),
        dv: Some(ViewMut::contiguous("dv", &mut dv, keys.into()).unwrap()),
        d_sinks: (batch == 3).then(|| ViewMut::contiguous("d_sinks", &mut d_sinks, [4].into()).unwrap()),
        ..BackwardTensors::new(inputs, view("out", &out, queries), lse, view("d_o", &d_o, queries))
    };
    let options = Options::default().with_causal(Causal::BottomRight).with_dropout_p(p);
    let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options);
    let forward = builder.sinks(tensors.sinks.as_ref()).out(&tensors.out).lse(&tensors.lse).build().unwrap();
    let form = |view: &Option<ViewMut<'_>>| view.as_ref().map(Into::into);
    let (dq_form, dk_form, dv_form) = (form(&tensors.dq), form(&tensors.dk), form(&tensors.dv));
    let forms = GradientForms {
        dq: dq_form,
        dk: dk_form,
        dv: dv_form,
        d_sinks: form(&tensors.d_sinks),
        ..GradientForms::new(&tensors.d_o)
    };
    let spec = BackwardSpec::new(forward, &forms).unwrap();
    let plan = rapt_cpu::select_backward(&spec, &Caps { arch, threads: executor.threads(), clock_hz: None }).unwrap();
    assert_eq!(
        (plan.plan().threads(), plan.plan().num_splits()),
        (executor.threads(), 4),
        "several chunks on all threads"
    );
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = BackwardOperands::check(tensors, &spec).unwrap();
    rapt_cpu::run_backward(&plan, &mut operands, &mut workspace, executor).unwrap();
    let mut all = [&dq, &dk, &dv].map(|of| of.iter().map(|&x| (numbers.bits)(x)).collect::<Vec<_>>()).to_vec();
    all.push(d_sinks.map(f32::to_bits).to_vec());
    all
}

#[test]
fn threads_and_batch_neighbours_touch_no_bit() {
    touch_no_bit(&Numbers { from: |x| x as f32, bits: f32::to_bits });
    // As the upper half of a float32.
    touch_no_bit(&Numbers { from: bf16::from_f64, bits: |x| u32::from(x.to_bits()) << 16 });
}

fn touch_no_bit<T: Element>(numbers: &Numbers<T>) {
    for (arch, p) in arches().into_iter().flat_map(|arch| [0.0, 0.2].map(|p| (arch, p))) {
        let all = gradients(numbers, (0, 3), p, arch, &SerialExecutor);
        assert!(all.iter().flatten().all(|&bits| f32::from_bits(bits).is_finite()));
        for threads in [2, 3, 7] {
            let same = gradients(numbers, (0, 3), p, arch, &Spawning(threads));
            assert!(same == all, "{threads} threads on {}", arch.name());
        }
        for entry in 0..3 {
            let alone = gradients(numbers, (entry, 1), p, arch, &Spawning(2));
            for (n, (alone, all)) in alone.iter().zip(&all).take(3).enumerate() {
                let len = alone.len();
                assert!(alone[..] == all[entry * len..][..len], "gradient {n} of entry {entry} on {}", arch.name());
            }
        }
    }
}

/// Gradients of `batch` entries of queries that share k and v, broadcast by a stride of 0, and the scratch memory of their plan.
fn gradients_of_one_batch_of_keys(batch: usize, arch: Arch, executor: &dyn Executor) -> (Vec<Vec<u32>>, usize) {
    let (queries, keys) = ([batch, 2, 200, 24], [1, 2, 700, 24]);
    let mut rng = Rng::new(9);
    let mut normal =
        |shape: [usize; 4]| -> Vec<f32> { (0..shape.iter().product()).map(|_| rng.normal() as f32).collect() };
    let (k, v, q, d_o, out) = (normal(keys), normal(keys), normal(queries), normal(queries), normal(queries));
    let lse = vec![6.5f32; batch * 2 * 200];
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let view = |name, data| View::contiguous::<f32>(name, data, queries.into()).unwrap();
    let shared = |name, data| {
        let (shape, strides) = (Shape::from([batch, 2, 700, 24]), Strides::from([0, 700 * 24, 24, 1]));
        View::strided::<f32>(name, data, 0, shape, strides).unwrap()
    };
    let lse = View::contiguous("lse", &lse, [batch, 2, 200].into()).unwrap();
    let tensors = BackwardTensors {
        dq: Some(ViewMut::contiguous("dq", &mut dq, queries.into()).unwrap()),
        dk: Some(ViewMut::contiguous("dk", &mut dk, keys.into()).unwrap()),
        dv: Some(ViewMut::contiguous("dv", &mut dv, keys.into()).unwrap()),
        ..BackwardTensors::new(
            [view("q", &q), shared("k", &k), shared("v", &v)],
            view("out", &out),
            lse,
            view("d_o", &d_o),
        )
    };
    let case = Case { lse: true, ..Case::plain(DType::F32, queries, 700) };
    let spec = rapt_testkit::backward_spec_of(&tensors, &case).unwrap();
    let plan = rapt_cpu::select_backward(&spec, &Caps { arch, threads: executor.threads(), clock_hz: None }).unwrap();
    assert_eq!(plan.plan().threads(), executor.threads());
    assert!(plan.explain().to_string().contains("what is broadcast has the sum over that"), "{}", plan.explain());
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = BackwardOperands::check(tensors, &spec).unwrap();
    rapt_cpu::run_backward(&plan, &mut operands, &mut workspace, executor).unwrap();
    let bits = [&dq[..], &dk, &dv].map(|of| of.iter().map(|x| x.to_bits()).collect()).to_vec();
    (bits, plan.workspace_bytes())
}

#[test]
fn threads_touch_no_bit_of_a_sum_and_its_memory_does_not_grow_with_the_batch() {
    for arch in arches() {
        let (all, bytes) = gradients_of_one_batch_of_keys(5, arch, &SerialExecutor);
        assert!(all.iter().flatten().all(|&bits| f32::from_bits(bits).is_finite()));
        for threads in [2, 3, 7] {
            let (same, _) = gradients_of_one_batch_of_keys(5, arch, &Spawning(threads));
            assert!(same == all, "{threads} threads on {}", arch.name());
        }
        let (_, of_more) = gradients_of_one_batch_of_keys(20, arch, &SerialExecutor);
        // What is known of each row: three numbers.
        assert!(of_more - bytes <= 15 * 2 * 200 * 3 * 4 + 3 * 64, "{bytes} and {of_more} bytes on {}", arch.name());
    }
}

/// Keys that all score the same and a row of the identity arriving at each query: dv has what each weight was multiplied with.
#[test]
fn backward_drops_what_forward_drops() {
    // Several blocks of keys, a tail in every instruction set, two heads to a task.
    let ([batch, heads, q_len, dim], kv_len) = ([2, 2, 70, 4], 150);
    for (arch, p) in arches().into_iter().flat_map(|arch| [0.4, 1.0].map(|p| (arch, p))) {
        let (seed, dropout) = (DropoutSeed::new(1 << 50, 9), Dropout::new(p).unwrap().unwrap());
        for head in 0..heads {
            let of = |shape: [usize; 4], value: f32| vec![value; shape.iter().product()];
            let (queries, keys) = ([batch, heads, q_len, dim], [batch, 1, kv_len, dim]);
            let (rows, values) = ([batch, heads, q_len, q_len], [batch, 1, kv_len, q_len]);
            let (q, k, v, out) = (of(queries, 1.0), of(keys, 0.0), of(values, 0.5), of(rows, 0.0));
            let mut d_o = of(rows, 0.0);
            for (at, x) in d_o.iter_mut().enumerate() {
                let (row, column) = (at / q_len, at % q_len);
                *x = f32::from(row / q_len % heads == head && row % q_len == column);
            }
            let lse = vec![(kv_len as f32).ln(); batch * heads * q_len];
            let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
            let view = |name, data, shape: [usize; 4]| View::contiguous::<f32>(name, data, Shape::from(shape)).unwrap();
            let lse = View::contiguous("lse", &lse, [batch, heads, q_len].into()).unwrap();
            let inputs = [view("q", &q, queries), view("k", &k, keys), view("v", &v, values)];
            let tensors = BackwardTensors {
                dropout: Some(seed),
                dq: Some(ViewMut::contiguous("dq", &mut dq, queries.into()).unwrap()),
                dk: Some(ViewMut::contiguous("dk", &mut dk, keys.into()).unwrap()),
                dv: Some(ViewMut::contiguous("dv", &mut dv, values.into()).unwrap()),
                ..BackwardTensors::new(inputs, view("out", &out, rows), lse, view("d_o", &d_o, rows))
            };
            let options = Options::default().with_dropout_p(p);
            let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options);
            let forward = builder.out(&tensors.out).lse(&tensors.lse).build().unwrap();
            let form = |view: &Option<ViewMut<'_>>| view.as_ref().map(Into::into);
            let (dq_form, dk_form, dv_form) = (form(&tensors.dq), form(&tensors.dk), form(&tensors.dv));
            let forms = GradientForms { dq: dq_form, dk: dk_form, dv: dv_form, ..GradientForms::new(&tensors.d_o) };
            let spec = BackwardSpec::new(forward, &forms).unwrap();
            let plan = rapt_cpu::select_backward(&spec, &Caps { arch, threads: 1, clock_hz: None }).unwrap();
            assert!(plan.explain().to_string().contains("Philox 4x32-10"), "{}", plan.explain());
            let mut workspace = Workspace::new();
            workspace.ensure(plan.workspace_bytes()).unwrap();
            let mut operands = BackwardOperands::check(tensors, &spec).unwrap();
            rapt_cpu::run_backward(&plan, &mut operands, &mut workspace, &SerialExecutor).unwrap();
            for (at, &weight) in dv.iter().enumerate() {
                let (b, j, i) = (at / q_len / kv_len, at / q_len % kv_len, at % q_len);
                let kept = !seed.of_head(b, head).is_dropped(dropout, i, j);
                let expect = if kept { dropout.scale() as f32 / kv_len as f32 } else { 0.0 };
                let what = format!("{} p = {p}: batch {b}, head {head}, row {i}, key {j}", arch.name());
                assert!((weight - expect).abs() <= 1e-4 * expect, "{what}: {weight} is not {expect}");
            }
            assert!(p < 1.0 || dq.iter().chain(&dk).all(|&x| x == 0.0), "all dropped, and something arrives");
        }
    }
}

/// The bar: 24 MiB beyond gradients and output at 1×1×16384²×64 in float32.
#[test]
fn memory_does_not_grow_with_the_product_of_the_lengths() {
    let bytes = |len: usize| {
        let x = contiguous(DType::F32, [1, 1, len, 64]);
        let mut builder = Spec::builder(x, x, x, &Options::default());
        let forward = builder.return_lse(true).build().unwrap();
        let forms = GradientForms { dq: Some(x), dk: Some(x), dv: Some(x), ..GradientForms::new(x) };
        let spec = BackwardSpec::new(forward, &forms).unwrap();
        let caps = Caps { arch: *rapt_cpu::available().last().unwrap(), threads: 2, clock_hz: None };
        rapt_cpu::select_backward(&spec, &caps).unwrap().workspace_bytes()
    };
    let (short, long) = (bytes(8192), bytes(16384));
    assert!(long <= 20 << 20, "{long} bytes");
    assert!(long < 2 * short, "{short} and {long} bytes");
}
