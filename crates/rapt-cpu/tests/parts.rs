//! float32 and float16 as sums of bfloat16 in tiles: numbers that have no such parts, and what they leave alone.
//!
//! Deliberately absent: what every instruction set is asked (conformance.rs, proof.rs, underflow.rs), which includes these kernels.
#![cfg(all(unix, target_arch = "x86_64"))]

use rapt_core::{
    Arch, BackwardOperands, BackwardSpec, BackwardTensors, Caps, DType, GradientForms, Operands, Options,
    SerialExecutor, Spec, Tensors, View, ViewMut, Workspace,
};
use rapt_testkit::{Case, Rng, Sparse, Values, reference};

const QUERIES: usize = 80;
const KEYS: usize = 300;
const DIM: usize = 40;

fn run(dtype: DType, values: &Values) -> [Vec<f64>; 2] {
    let case = Case::plain(dtype, [1, 1, QUERIES, DIM], KEYS);
    let strides = |len: usize| [(len * DIM) as isize, (len * DIM) as isize, DIM as isize, 1];
    let filled = |shape: [usize; 4], values: &[f64]| Sparse::filled(dtype, shape, strides(shape[2]), values);
    let (q, k, v) = (filled(case.q, &values.q), filled(case.k(), &values.k), filled(case.v(), &values.v));
    let mut out = Sparse::new(dtype, case.out(), strides(QUERIES));
    let tensors = Tensors::new(q.view("q"), k.view("k"), v.view("v"), out.view_mut("out", 0));
    let options = Options::default();
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options).out(&tensors.out).build().unwrap();
    let expected = reference(&spec, &tensors).out;
    let plan = rapt_cpu::select(&spec, &Caps { arch: Arch::Amx, threads: 1, clock_hz: None }).unwrap();
    assert_eq!(plan.key().arch, Arch::Amx);
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = Operands::check(tensors, &spec).unwrap();
    rapt_cpu::run(&plan, &mut operands, &mut workspace, &SerialExecutor).unwrap();
    [out.values(), expected]
}

/// N(0, 1) numbers of the dtype.
fn values(dtype: DType) -> Values {
    let mut rng = Rng::new(7);
    let mut of = |n: usize| -> Vec<f64> { (0..n).map(|_| rapt_testkit::round(dtype, rng.normal())).collect() };
    let (q, k, v) = (of(QUERIES * DIM), of(KEYS * DIM), of(KEYS * DIM));
    Values { q, k, v, scales: rapt_core::Qkv::default(), mask: None, sinks: None, alibi_slopes: None }
}

/// Whether this machine has tiles, or what their model needs around it.
fn has_tiles() -> bool {
    rapt_cpu::tile_every_request();
    // Asked for first, the model is found where there is no unit.
    if rapt_cpu::model_tiles(true) {
        rapt_cpu::model_tiles(false);
    }
    let has = rapt_cpu::available().contains(&Arch::Amx);
    if !has {
        println!("skipped: the model needs AVX-512 with bf16 around it");
    }
    has
}

/// Rows of `out` other than `row` that differ from `plain`.
fn others_that_differ(plain: &[f64], out: &[f64], row: usize) -> usize {
    let is_other = |at: &usize| at / DIM != row;
    (0..out.len()).filter(is_other).filter(|&at| plain[at].to_bits() != out[at].to_bits()).count()
}

#[test]
fn a_query_without_parts_changes_no_other_row() {
    if !has_tiles() {
        return;
    }
    for dtype in [DType::F32, DType::F16] {
        let plain = run(dtype, &values(dtype))[0].clone();
        let odd: &[f64] = match dtype {
            DType::F32 => &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e30, -2e12, 1e-31, 1e-40],
            _ => &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY],
        };
        for (n, &number) in odd.iter().enumerate() {
            let (row, mut with) = (11 * n % QUERIES, values(dtype));
            with.q[row * DIM + 13] = number;
            let [out, expected] = run(dtype, &with);
            assert_eq!(others_that_differ(&plain, &out, row), 0, "{dtype}: {number:e}");
            for at in row * DIM..(row + 1) * DIM {
                let (got, want) = (out[at], expected[at]);
                let is_near = (got - want).abs() <= 1e-2 * want.abs().max(0.1);
                assert!(is_near || (got.is_nan() && want.is_nan()), "{dtype}, {number:e}: {got:e}, not {want:e}");
            }
        }
    }
}

/// Parts of an infinity times those of a number that has fewer would be NaN.
#[test]
fn an_infinite_key_weighs_nothing_where_its_score_is_minus_infinity() {
    if !has_tiles() {
        return;
    }
    for dtype in [DType::F32, DType::F16] {
        let mut with = values(dtype);
        with.q.iter_mut().skip(7).step_by(DIM).for_each(|q| *q = -1.0);
        with.k[100 * DIM + 7] = f64::INFINITY;
        let [out, expected] = run(dtype, &with);
        for (got, want) in out.iter().zip(&expected) {
            assert!((got - want).abs() <= 1e-3 * want.abs().max(0.1), "{dtype}: {got:e}, not {want:e}");
        }
    }
}

/// Numbers of a row, or values, of which parts would lie below the least normal number.
#[test]
fn tiny_queries_and_tiny_values_keep_their_digits() {
    if !has_tiles() {
        return;
    }
    let mut with = values(DType::F32);
    for at in 0..DIM {
        with.q[5 * DIM + at] = rapt_testkit::round(DType::F32, with.q[5 * DIM + at] * 1e-34);
    }
    with.k.iter_mut().for_each(|k| *k = rapt_testkit::round(DType::F32, *k * 1e34));
    let [out, expected] = run(DType::F32, &with);
    let off = |row: usize| {
        let at = row * DIM..(row + 1) * DIM;
        out[at.clone()].iter().zip(&expected[at]).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max)
    };
    assert!(off(5) < 1e-6, "{:e}", off(5));
    let mut with = values(DType::F32);
    with.v.iter_mut().for_each(|v| *v = rapt_testkit::round(DType::F32, *v * 1e-33));
    let [out, expected] = run(DType::F32, &with);
    for (got, want) in out.iter().zip(&expected) {
        // Between tiles a sum below the least normal number is 0.
        let allowed = 1e-5 * want.abs() + f64::from(f32::MIN_POSITIVE);
        assert!((got - want).abs() <= allowed, "{got:e}, not {want:e}");
    }
}

#[test]
fn values_without_parts_reach_every_row_exactly() {
    if !has_tiles() {
        return;
    }
    for number in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e38, -5e20, 1e-35] {
        let (mut with, number) = (values(DType::F32), rapt_testkit::round(DType::F32, number));
        with.v[77 * DIM + 3] = number;
        let [out, expected] = run(DType::F32, &with);
        for (at, (got, want)) in out.iter().zip(&expected).enumerate() {
            let is_near = (got - want).abs() <= 3e-6 * want.abs().max(0.1);
            assert!(
                is_near || got == want || (got.is_nan() && want.is_nan()),
                "{number:e}, {at}: {got:e}, not {want:e}"
            );
        }
    }
}

/// dq, dk and dv of one head of [`LONG`] queries and keys, the last [`PADDING`] of which a mask hides; forward by numbers.
fn gradients(arch: Arch, [q, k, v, d_o]: [&[f32]; 4]) -> [Vec<f32>; 3] {
    let (shape, rows) = ([1, 1, LONG, DIM], [1, 1, LONG]);
    let view = |name, data| View::contiguous::<f32>(name, data, shape.into()).unwrap();
    let attended: Vec<bool> = (0..LONG).map(|j| j < LONG - PADDING).collect();
    let mask = View::contiguous::<bool>("attn_mask", &attended, [LONG].into()).unwrap();
    let (mut out, mut lse) = (vec![0f32; LONG * DIM], vec![0f32; LONG]);
    let (options, caps) = (Options::default(), |arch| Caps { arch, threads: 1, clock_hz: None });
    let mut workspace = Workspace::new();
    let tensors = Tensors {
        mask: Some(mask),
        lse: Some(ViewMut::contiguous("lse", &mut lse, rows.into()).unwrap()),
        ..Tensors::new(
            view("q", q),
            view("k", k),
            view("v", v),
            ViewMut::contiguous("out", &mut out, shape.into()).unwrap(),
        )
    };
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options)
        .mask(tensors.mask.as_ref())
        .out(&tensors.out)
        .lse(tensors.lse.as_ref().unwrap())
        .build()
        .unwrap();
    let plan = rapt_cpu::select(&spec, &caps(Arch::Avx512)).unwrap();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = Operands::check(tensors, &spec).unwrap();
    rapt_cpu::run(&plan, &mut operands, &mut workspace, &SerialExecutor).unwrap();

    let mut all = [(); 3].map(|()| vec![0f32; LONG * DIM]);
    let [dq, dk, dv] = &mut all;
    let tensors = BackwardTensors {
        mask: Some(mask),
        dq: Some(ViewMut::contiguous("dq", dq, shape.into()).unwrap()),
        dk: Some(ViewMut::contiguous("dk", dk, shape.into()).unwrap()),
        dv: Some(ViewMut::contiguous("dv", dv, shape.into()).unwrap()),
        ..BackwardTensors::new(
            [view("q", q), view("k", k), view("v", v)],
            view("out", &out),
            View::contiguous("lse", &lse, rows.into()).unwrap(),
            view("d_o", d_o),
        )
    };
    let form = |of: &Option<ViewMut<'_>>| of.as_ref().map(Into::into);
    let forms = GradientForms {
        dq: form(&tensors.dq),
        dk: form(&tensors.dk),
        dv: form(&tensors.dv),
        ..GradientForms::new(&tensors.d_o)
    };
    let spec = BackwardSpec::new(spec, &forms).unwrap();
    let plan = rapt_cpu::select_backward(&spec, &caps(arch)).unwrap();
    assert_eq!(plan.plan().key().arch, arch);
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = BackwardOperands::check(tensors, &spec).unwrap();
    rapt_cpu::run_backward(&plan, &mut operands, &mut workspace, &SerialExecutor).unwrap();
    all
}

const LONG: usize = 260;
const PADDING: usize = 50;

fn numbers(seed: u64, scale: f32) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..LONG * DIM).map(|_| rng.normal() as f32 * scale).collect()
}

#[test]
fn what_lies_in_padding_touches_no_bit_of_a_gradient() {
    if !has_tiles() {
        return;
    }
    let [q, mut k, mut v, d_o] = [1, 2, 3, 4].map(|seed| numbers(seed, 1.0));
    let padding = (LONG - PADDING) * DIM..;
    k[padding.clone()].fill(0.0);
    v[padding.clone()].fill(0.0);
    let clean = gradients(Arch::Amx, [&q, &k, &v, &d_o]);
    for garbage in [f32::NAN, f32::INFINITY, 3e38, 1e-42] {
        k[padding.clone()].fill(garbage);
        v[padding.clone()].fill(-garbage);
        let bits = |of: &[Vec<f32>; 3]| of.each_ref().map(|of| of.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        assert!(bits(&gradients(Arch::Amx, [&q, &k, &v, &d_o])) == bits(&clean), "{garbage:e}");
    }
}

/// There the states of rows are found from products by numbers, which round large scores in another way than parts do.
#[test]
fn gradients_of_large_scores_are_those_of_numbers() {
    if !has_tiles() {
        return;
    }
    let (q, v, d_o) = (numbers(1, 1000.0), numbers(2, 1.0), numbers(3, 1.0));
    let tensors = [&q[..], &q, &v, &d_o];
    let [expected, got] = [Arch::Avx512, Arch::Amx].map(|arch| gradients(arch, tensors));
    for (got, expected) in got.iter().zip(&expected) {
        let most = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
        let off = got.iter().zip(expected).map(|(got, expected)| (got - expected).abs());
        assert!(most > 0.0 && off.fold(0f32, f32::max) <= 1e-5 * most);
    }
}
