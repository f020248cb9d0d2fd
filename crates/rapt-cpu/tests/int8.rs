//! `compute="int8"` alone: every instruction set against its definition, and what a row's bits do not depend on.

use rapt_core::{
    Arch, Caps, Causal, Codes, Compute, DType, Executor, Format, Operands, Options, Qkv, SerialExecutor, Shape, Spec,
    Tensors, View, ViewMut, Workspace,
};
use rapt_testkit::{Config, Engine, check_between, conformance, gather, int8_reference};

fn engine<'e>(arch: Arch, executor: &'e dyn Executor) -> Box<Engine<'e>> {
    let mut workspace = Workspace::new();
    Box::new(move |spec, tensors| {
        let plan = rapt_cpu::select(spec, &Caps { arch, threads: executor.threads(), clock_hz: None })?;
        workspace.ensure(plan.workspace_bytes())?;
        rapt_cpu::run(&plan, &mut Operands::check(tensors, spec)?, &mut workspace, executor)
    })
}

#[test]
fn every_instruction_set_gives_the_definition_of_int8() {
    let available = rapt_cpu::available();
    let mut engines: Vec<_> = available.iter().map(|&arch| engine(arch, &SerialExecutor)).collect();
    let dtypes = vec![DType::F32, DType::F16, DType::BF16];
    let config = Config { problems: 0, int8: 3000, fixed: false, dtypes, ..Config::default() };
    let report = conformance(&mut engines, &config)
        .unwrap_or_else(|failure| panic!("{}: {failure}", available[failure.engine].name()));
    assert_eq!((report.count("int8"), report.count("unsupported")), (3000 * available.len(), 0));
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const KV_LEN: usize = 517;
const DIM: usize = 72;

/// Numbers and codes that depend on the seed and the position alone.
fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|at| ((at * 7919 + seed * 104_729) % 1021) as f32 / 255.0 - 2.0).collect()
}

fn bytes(n: usize, seed: usize) -> Vec<u8> {
    (0..n).map(|at| ((at * 7919 + seed * 104_729) % 251) as u8).collect()
}

/// The bits of `batch` entries from entry `first` on, where a plan is made for so many threads.
fn bits(arch: Arch, threads: usize, q_len: usize, first: usize, batch: usize) -> Vec<u32> {
    let (of_q, of_kv) = (HEADS * q_len * DIM, KV_HEADS * KV_LEN * DIM);
    let (q, k, v) = (numbers(2 * of_q, 1), bytes(2 * of_kv, 2), bytes(2 * of_kv, 3));
    let (k_factors, v_factors) = (numbers(2 * KV_HEADS * KV_LEN, 4), numbers(2 * KV_HEADS * DIM, 5));
    let part = |n: usize| first * n..(first + batch) * n;
    let mut out = vec![f32::NAN; batch * of_q];
    let q_shape = [batch, HEADS, q_len, DIM].into();
    let k = View::contiguous("k", &k[part(of_kv)], [batch, KV_HEADS, KV_LEN, DIM].into()).unwrap();
    let v = View::contiguous("v", &v[part(of_kv)], [batch, KV_HEADS, KV_LEN, DIM].into()).unwrap();
    let k_shape = [batch, KV_HEADS, KV_LEN].into();
    let k_factors = View::contiguous("k_descale", &k_factors[part(KV_HEADS * KV_LEN)], k_shape).unwrap();
    let v_shape = [batch, KV_HEADS, 1, DIM].into();
    let v_factors = View::contiguous("v_descale", &v_factors[part(KV_HEADS * DIM)], v_shape).unwrap();
    let of = |descale| Some(Box::new(Codes::new(Format::Int8, descale)));
    let tensors = Tensors {
        codes: Qkv { q: None, k: of(k_factors), v: of(v_factors) },
        ..Tensors::new(
            View::contiguous("q", &q[part(of_q)], q_shape).unwrap(),
            k.reinterpreted("k", DType::I8).unwrap(),
            v.reinterpreted("v", DType::I8).unwrap(),
            ViewMut::contiguous("out", &mut out, q_shape).unwrap(),
        )
    };
    let options = Options::default().with_compute(Compute::Int8).with_causal(Causal::BottomRight);
    let spec =
        Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options).codes(tensors.codes.as_deref()).build().unwrap();
    let plan = rapt_cpu::select(&spec, &Caps { arch, threads, clock_hz: None }).unwrap();
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    rapt_cpu::run(&plan, &mut Operands::check(tensors, &spec).unwrap(), &mut workspace, &SerialExecutor).unwrap();
    assert!(out.iter().all(|x| x.is_finite()), "every element is written");
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn threads_and_neighbours_do_not_change_a_bit() {
    for &arch in rapt_cpu::available() {
        for q_len in [1, 37, 301] {
            let whole = bits(arch, 1, q_len, 0, 2);
            for threads in [2, 7, 64] {
                assert!(bits(arch, threads, q_len, 0, 2) == whole, "{threads} threads on {}", arch.name());
            }
            let each = whole.len() / 2;
            for entry in 0..2 {
                let alone = bits(arch, 3, q_len, entry, 1);
                assert!(alone == whole[entry * each..][..each], "entry {entry} alone on {}", arch.name());
            }
        }
    }
}

/// Factors of k and v, with the shapes of their descales.
type Factors<'a> = (&'a [f32], &'a [usize]);

/// Holds one batch entry of 33 queries under a causal mask against the definition.
fn check(what: &str, (k_factors, k_shape): Factors<'_>, (v_factors, v_shape): Factors<'_>) -> Vec<f64> {
    const Q_LEN: usize = 33;
    let (q, k, v) =
        (numbers(HEADS * Q_LEN * DIM, 1), bytes(KV_HEADS * KV_LEN * DIM, 2), bytes(KV_HEADS * KV_LEN * DIM, 3));
    let shape = [1, HEADS, Q_LEN, DIM].into();
    let kv = |name, codes| {
        View::contiguous(name, codes, [1, KV_HEADS, KV_LEN, DIM].into())
            .unwrap()
            .reinterpreted(name, DType::I8)
            .unwrap()
    };
    let factors = |name, factors, shape| View::contiguous(name, factors, Shape::new(shape).unwrap()).unwrap();
    let of = |descale| Some(Box::new(Codes::new(Format::Int8, descale)));
    let mut last = Vec::new();
    for &arch in rapt_cpu::available() {
        let mut out = vec![f32::NAN; HEADS * Q_LEN * DIM];
        let tensors = Tensors {
            codes: Qkv {
                q: None,
                k: of(factors("k_descale", k_factors, k_shape)),
                v: of(factors("v_descale", v_factors, v_shape)),
            },
            ..Tensors::new(
                View::contiguous("q", &q, shape).unwrap(),
                kv("k", &k),
                kv("v", &v),
                ViewMut::contiguous("out", &mut out, shape).unwrap(),
            )
        };
        let options = Options::default().with_compute(Compute::Int8).with_causal(Causal::TopLeft);
        let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options)
            .codes(tensors.codes.as_deref())
            .build()
            .unwrap();
        let expected = int8_reference(&spec, &tensors);
        engine(arch, &SerialExecutor)(&spec, tensors).unwrap();
        last = gather(&View::contiguous("out", &out, shape).unwrap());
        check_between("out", &last, &expected.outputs.out, &expected.out_error, DType::F32)
            .unwrap_or_else(|error| panic!("{what} on {}: {error}", arch.name()));
    }
    last
}

#[test]
fn factors_of_any_sign_and_size_give_the_definition() {
    let tokens = numbers(KV_HEADS * KV_LEN, 4);
    let (of_tokens, of_channels) = ([1, KV_HEADS, KV_LEN], [1, KV_HEADS, 1, DIM]);
    let channels = numbers(KV_HEADS * DIM, 5);
    check("by token and channel", (&tokens, &of_tokens), (&channels, &of_channels));
    for factor in [-0.01f32, 0.0, -0.0, 1e-30, -1e30, f32::MIN_POSITIVE] {
        check(&format!("{factor:e} for all"), (&[factor], &[]), (&[-factor], &[]));
        check(&format!("{factor:e} for a head"), (&[factor, 0.02], &[1, KV_HEADS]), (&[-0.3, factor], &[1, KV_HEADS]));
    }
}

#[test]
fn factors_that_are_no_numbers_reach_those_who_attend_them_and_no_others() {
    let per_head = HEADS / KV_HEADS * 33 * DIM;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        // Key 20 of the second head: rows from 20 on.
        let mut tokens = numbers(KV_HEADS * KV_LEN, 4);
        tokens[KV_LEN + 20] = bad;
        let out = check("a token", (&tokens, &[1, KV_HEADS, KV_LEN]), (&[0.5], &[]));
        for (n, x) in out.iter().enumerate() {
            assert_eq!(x.is_nan(), n >= per_head && n / DIM % 33 >= 20, "{bad}: {n} is {x}");
        }
        let out = check("a head", (&[bad, 0.02], &[1, KV_HEADS]), (&[0.5], &[]));
        assert!(out.iter().enumerate().all(|(n, x)| x.is_nan() == (n < per_head)), "{bad}");
    }
    let mut channels = numbers(KV_HEADS * DIM, 5);
    channels[7] = f32::NAN;
    let out = check("a channel", (&[0.02], &[]), (&channels, &[1, KV_HEADS, 1, DIM]));
    assert!(out.iter().enumerate().all(|(n, x)| x.is_nan() == (n < per_head && n % DIM == 7)));
}
