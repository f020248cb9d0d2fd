//! A tolerance: what is estimated, which heads fall back, with which bits, and data made to break it.

use rapt::quant::{Format, Granularity, Measured, Quantized, Scheme, measure, quantize};
use rapt::reference::{self, HeadErrors, Inputs, Mask, Problem, quantization_error};
use rapt::{
    Backing, Causal, Codes, DType, Device, Engine, Error, Errors, Extent, JudgedHead, Judgement, KAPPA, Operands,
    Options, Qkv, ScaleLayout, SerialExecutor, Tensors, Tolerance, View, ViewMut, Window, spec_of,
};
use rapt_testkit::Rng;

/// Sizes: batch, query heads, key heads, q_len, kv_len, head_dim, head_dim_v.
type Sizes = [usize; 7];

/// One request with K and V as numbers and as codes.
struct Case {
    sizes: Sizes,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    codes: [Quantized; 2],
    errors: [Measured; 2],
    mask: Option<(Vec<bool>, Vec<f32>)>,
    sinks: Option<Vec<f32>>,
    slopes: Option<Vec<f32>>,
    options: Options,
}

fn shape(sizes: &[usize]) -> rapt::Shape {
    rapt::Shape::new(sizes).unwrap()
}

fn scheme(format: Format, granularity: Granularity) -> Scheme {
    let granularity = format.own_block_size().map_or(granularity, Granularity::Block);
    Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap()
}

const DEVICE: Device = Device::Cuda(0);

fn halves(x: &[f32], factor: f32) -> Vec<half::f16> {
    x.iter().map(|&x| half::f16::from_f32(x * factor)).collect()
}

fn normals(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.normal() as f32).collect()
}

impl Case {
    fn new(sizes: Sizes, [q, k, v]: [Vec<f32>; 3], of: [Scheme; 2]) -> Self {
        let [b, _, hkv, _, s, d, dv] = sizes;
        let quantized = |x: &[f32], dim, scheme| {
            let view = View::contiguous("x", x, shape(&[b, hkv, s, dim])).unwrap();
            let codes = quantize(&view, scheme, None).unwrap();
            let errors = measure(&view, &codes.view().unwrap()).unwrap();
            (codes, errors)
        };
        let ((k_codes, k_errors), (v_codes, v_errors)) = (quantized(&k, d, of[0]), quantized(&v, dv, of[1]));
        let (codes, errors) = ([k_codes, v_codes], [k_errors, v_errors]);
        Case { sizes, q, k, v, codes, errors, mask: None, sinks: None, slopes: None, options: Options::default() }
    }

    fn normal(rng: &mut Rng, sizes: Sizes, of: [Scheme; 2]) -> Self {
        let [b, hq, hkv, sq, s, d, dv] = sizes;
        let tensors = [b * hq * sq * d, b * hkv * s * d, b * hkv * s * dv].map(|n| normals(rng, n));
        Case::new(sizes, tensors, of)
    }

    fn q_shape(&self) -> rapt::Shape {
        shape(&[self.sizes[0], self.sizes[1], self.sizes[3], self.sizes[5]])
    }

    fn out_shape(&self) -> rapt::Shape {
        shape(&[self.sizes[0], self.sizes[1], self.sizes[3], self.sizes[6]])
    }

    fn originals(&self) -> [View<'_>; 2] {
        let [b, _, hkv, _, s, d, dv] = self.sizes;
        let view = |name, x, dim| View::contiguous(name, x, shape(&[b, hkv, s, dim])).unwrap();
        [view("k", &self.k, d), view("v", &self.v, dv)]
    }

    fn tensors<'a>(&'a self, on_codes: bool, out: &'a mut [f32]) -> Tensors<'a> {
        let q = View::contiguous("q", &self.q, self.q_shape()).unwrap();
        let out = ViewMut::contiguous("out", out, self.out_shape()).unwrap();
        let [k_codes, v_codes] = self.codes.each_ref().map(|codes| codes.view().unwrap());
        let [_, hq, _, sq, s, ..] = self.sizes;
        let per_head =
            |name, of: &'a Option<Vec<f32>>| of.as_ref().map(|x| View::contiguous(name, x, shape(&[hq])).unwrap());
        let base = if on_codes {
            let codes: Qkv<Option<Box<Codes<'_>>>> =
                Qkv { q: None, k: Some(Box::new(k_codes.codes())), v: Some(Box::new(v_codes.codes())) };
            Tensors { codes, ..Tensors::new(q, k_codes.tensor(), v_codes.tensor(), out) }
        } else {
            let [k, v] = self.originals();
            Tensors::new(q, k, v, out)
        };
        let mask = self.mask.as_ref().map(|(_, bias)| View::contiguous("mask", bias, shape(&[1, 1, sq, s])).unwrap());
        let (sinks, alibi_slopes) = (per_head("sinks", &self.sinks), per_head("alibi_slopes", &self.slopes));
        Tensors { mask, sinks, alibi_slopes, ..base }
    }

    fn tolerance(&self, limit: f64, has_originals: bool) -> Tolerance<'_> {
        let originals = self.originals();
        let backing = |at: usize| {
            Some(Backing { errors: (&self.errors[at]).into(), original: has_originals.then_some(originals[at]) })
        };
        Tolerance { limit, k: backing(0), v: backing(1) }
    }

    fn plain(&self, on_codes: bool) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.out_shape().numel().unwrap()];
        engine().attention_into(self.tensors(on_codes, &mut out), &self.options).unwrap();
        out
    }

    fn within(&self, limit: f64, has_originals: bool) -> (Result<Judgement, Error>, Vec<f32>) {
        let mut out = vec![f32::NAN; self.out_shape().numel().unwrap()];
        let done = engine().attention_within(
            self.tensors(true, &mut out),
            &self.options,
            &self.tolerance(limit, has_originals),
        );
        (done, out)
    }

    fn problem(&self) -> Problem {
        let [batch, num_q_heads, num_kv_heads, q_len, kv_len, head_dim, head_dim_v] = self.sizes;
        let softmax_scale = self.options.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt());
        let (softcap, causal, window) = (self.options.softcap, self.options.causal, self.options.window);
        let plain = Problem::plain(batch, num_q_heads, q_len, kv_len, head_dim);
        Problem { num_kv_heads, head_dim_v, softmax_scale, softcap, causal, window, ..plain }
    }

    /// What `then` makes of the reference's inputs, with K and V as they are or as their codes have them.
    fn with_inputs<T>(&self, on_codes: bool, then: impl FnOnce(&Problem, &Inputs<'_>) -> T) -> T {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let of = |at: usize| {
            let numbers = [&self.k, &self.v][at];
            if on_codes { wide(&self.codes[at].view().unwrap().to_f32().unwrap()) } else { wide(numbers) }
        };
        let (q, k, v) = (wide(&self.q), of(0), of(1));
        let [batch, hq, _, sq, s, ..] = self.sizes;
        let bias = self.mask.as_ref().map(|(_, bias)| wide(bias).repeat(batch * hq));
        let per_head = |x: &Option<Vec<f32>>| x.as_deref().map(wide);
        let (sinks, slopes) = (per_head(&self.sinks), per_head(&self.slopes));
        assert!(bias.as_ref().is_none_or(|bias| bias.len() == batch * hq * sq * s));
        let mask = bias.as_deref().map(Mask::Additive);
        let inputs =
            Inputs { mask, sinks: sinks.as_deref(), alibi_slopes: slopes.as_deref(), ..Inputs::plain(&q, &k, &v) };
        then(&self.problem(), &inputs)
    }

    /// The relative error of each head of `out` against the reference on the originals.
    fn true_errors(&self, out: &[f32]) -> Vec<f64> {
        let exact = self.with_inputs(false, reference::naive).out;
        let of_head = self.sizes[3] * self.sizes[6];
        let error = |(exact, out): (&[f64], &[f32])| {
            let apart: f64 = exact.iter().zip(out).map(|(a, b)| (a - f64::from(*b)).powi(2)).sum();
            let size: f64 = exact.iter().map(|x| x * x).sum();
            if apart == 0.0 { 0.0 } else { (apart / size).sqrt() }
        };
        exact.chunks(of_head).zip(out.chunks(of_head)).map(error).collect()
    }

    fn head_errors(&self) -> Vec<HeadErrors<'_>> {
        let [k, v] = &self.errors;
        (0..k.shape()[0]).map(|at| HeadErrors { k: Some(k.matrix(at)), v: Some(v.matrix(at)) }).collect()
    }
}

fn engine() -> &'static Engine {
    rapt::default_engine().unwrap()
}

/// Cases with every option, some of them with rows that attend nothing.
fn random_case(rng: &mut Rng) -> Case {
    let group = [1, 2, 3][rng.below(3)];
    let hkv = 1 + rng.below(2);
    let len = [1, 3, 17, 64, 65, 130, 200][rng.below(7)];
    let q_len = [1, 2, 5, 17, 40][rng.below(5)];
    let dims = [1, 3, 16, 20, 33, 64];
    let sizes = [1 + rng.below(2), group * hkv, hkv, q_len, len, dims[rng.below(6)], dims[rng.below(6)]];
    let granularities =
        [Granularity::Tensor, Granularity::Head, Granularity::Token, Granularity::Channel, Granularity::Block(8)];
    let mut any = || scheme(Format::ALL[rng.below(Format::ALL.len())], granularities[rng.below(5)]);
    let of = [any(), any()];
    let mut case = Case::normal(rng, sizes, of);
    let options = &mut case.options;
    options.causal = [None, Some(Causal::TopLeft), Some(Causal::BottomRight)][rng.below(3)];
    if rng.once_in(3) {
        options.window = Window { left: Some(rng.below(20)), right: [None, Some(3)][rng.below(2)] };
    }
    options.softcap = rng.once_in(3).then_some(1.5);
    options.softmax_scale = [None, Some(0.3), Some(-0.2)][rng.below(3)];
    if rng.once_in(3) {
        let bias = (0..q_len * len).map(|_| [f32::NEG_INFINITY, 0.0, 0.7, -1.5][rng.below(4)]).collect();
        case.mask = Some((Vec::new(), bias));
    }
    case.sinks = rng.once_in(3).then(|| (0..sizes[1]).map(|h| h as f32 - 1.0).collect());
    case.slopes = rng.once_in(3).then(|| (0..sizes[1]).map(|h| 0.1 * h as f32).collect());
    case
}

fn is_near(got: f64, expected: f64, relative: f64) -> bool {
    got == expected || (got - expected).abs() <= relative * expected.abs() + 1e-6
}

#[test]
fn every_instruction_set_finds_what_the_reference_defines() {
    let mut rng = Rng::new(21);
    for at in 0..120 {
        let case = random_case(&mut rng);
        let rows = case.with_inputs(true, |problem, inputs| quantization_error(problem, inputs, &case.head_errors()));
        let of_heads: Vec<_> = rows.chunks(case.sizes[3]).collect();
        for &arch in rapt_cpu::available() {
            let mut out = vec![7.5; case.out_shape().numel().unwrap()];
            let tensors = case.tensors(true, &mut out);
            let caps = rapt::Caps { arch, ..engine().caps().clone() };
            let plan = rapt_cpu::select(&spec_of(&tensors, &case.options).unwrap(), &caps).unwrap();
            let errors =
                case.errors.each_ref().map(|of| (0..of.shape()[0]).map(|at| of.matrix(at)).collect::<Vec<_>>());
            let [k, v] = errors;
            let errors = Qkv { q: None, k: Some(k), v: Some(v) };
            let mut operands = Operands::check(tensors, plan.spec()).unwrap();
            let found = rapt_cpu::deviations(&plan, &mut operands, &errors, &SerialExecutor).unwrap();
            drop(operands);
            assert!(out.iter().all(|&x| x == 7.5), "nothing is written");
            for (head, (found, rows)) in found.iter().zip(&of_heads).enumerate() {
                let length = |of: &dyn Fn(&reference::RowError) -> f64| {
                    rows.iter().map(|row| of(row).powi(2)).sum::<f64>().sqrt()
                };
                let epsilon = rows.iter().fold(0.0, |most: f64, row| most.max(row.epsilon));
                for (name, got, expected, relative) in [
                    ("epsilon", found.epsilon, epsilon, 1e-5),
                    ("norm", found.norm, length(&|row| row.norm), 1e-4),
                    ("before", found.before, length(&|row| row.before), 1e-4),
                    ("after", found.after, length(&|row| row.after), 1e-3),
                    ("estimate", found.estimate, length(&|row| row.estimate), 5e-3),
                ] {
                    // What float32 may have lost of the difference between values and their mean is added to the estimate.
                    let slack = if name == "estimate" { 3e-3 * epsilon * length(&|row| row.norm) } else { 0.0 };
                    // Near its pole the bound is as good as none: a rounding decides.
                    let is_pole = name == "after" && (expected > 1e2 || expected.is_nan());
                    let got_is = is_near(got, expected, relative)
                        || (got > expected && got < expected * 1.005 + slack)
                        || (is_pole && (got > 1e1 || got.is_nan()));
                    assert!(
                        got_is,
                        "case {at} {} head {head}: {name} {got} for {expected}: {:?}",
                        arch.name(),
                        case.sizes
                    );
                }
            }
        }
    }
}

#[test]
fn bounds_hold_on_random_requests() {
    let mut rng = Rng::new(5);
    for at in 0..150 {
        let case = random_case(&mut rng);
        let (exact, near) =
            (case.with_inputs(false, reference::naive).out, case.with_inputs(true, reference::naive).out);
        let rows = case.with_inputs(true, |problem, inputs| quantization_error(problem, inputs, &case.head_errors()));
        let dim_v = case.sizes[6];
        for (row, found) in rows.iter().enumerate() {
            let of = row * dim_v..(row + 1) * dim_v;
            let error = exact[of.clone()].iter().zip(&near[of]).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
            assert!(error <= found.after.min(found.before) + 1e-12, "case {at} row {row}: {error} beyond {found:?}");
        }
    }
}

#[test]
fn heads_have_the_bits_of_plain_calls_and_are_counted() {
    let mut rng = Rng::new(9);
    let int8 = scheme(Format::Int8, Granularity::Token);
    // Few queries, where a group runs together; many, where each head runs alone.
    for (q_len, together) in [(1, 2), (64, 1)] {
        let sizes = [2, 4, 2, q_len, 96, 32, 24];
        let mut case = Case::normal(&mut rng, sizes, [int8, int8]);
        // Head 1 of batch 1 asks for sharp differences.
        let of_head = q_len * 32;
        case.q[5 * of_head..6 * of_head].iter_mut().for_each(|x| *x *= 40.0);
        let (judgement, out) = case.within(0.12, true);
        let judgement = judgement.unwrap();
        let (on_codes, on_originals) = (case.plain(true), case.plain(false));
        let is_quantized: Vec<bool> = judgement.heads.iter().map(|head| head.is_quantized).collect();
        let expected: Vec<bool> = (0..8).map(|head| head / together != 5 / together).collect();
        assert_eq!(is_quantized, expected, "q_len {q_len}: {judgement:?}");
        assert_eq!((judgement.fell_back(), judgement.quantized()), (together, 8 - together));
        for (head, (got, is_quantized)) in out.chunks(q_len * 24).zip(is_quantized).enumerate() {
            let from = if is_quantized { &on_codes } else { &on_originals };
            assert_eq!(got, &from[head * q_len * 24..][..q_len * 24], "head {head}: bits");
        }
        assert!(judgement.heads[5].epsilon >= 1.0 || judgement.heads[5].estimate > 0.12);
        assert_eq!(judgement.worst_epsilon(), judgement.heads[5].epsilon);
        assert!(judgement.worst_bound() >= judgement.worst_estimate() / KAPPA);

        // All stand, or all fall back.
        let (loose, out) = case.within(1e9, true);
        assert_eq!((loose.unwrap().fell_back(), case.errors[0].shape()), (together, [4, 96, 32]), "ε stays a limit");
        assert_eq!(out[..q_len * 24], on_codes[..q_len * 24]);
        let (strict, out) = case.within(1e-7, true);
        assert_eq!((strict.unwrap().quantized(), out), (0, on_originals));
    }
}

#[test]
fn without_originals_the_head_is_named_and_nothing_is_written() {
    let mut rng = Rng::new(3);
    let int8 = scheme(Format::Int8, Granularity::Token);
    let mut case = Case::normal(&mut rng, [1, 3, 3, 20, 50, 16, 16], [int8, int8]);
    case.q[20 * 16..40 * 16].iter_mut().for_each(|x| *x *= 60.0);
    let (refused, out) = case.within(0.15, false);
    let Err(Error::ToleranceExceeded { batch: 0, head: 1, tolerance, epsilon, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(tolerance == 0.15 && epsilon > 1.0 && out.iter().all(|x| x.is_nan()));
    // It is reported all the same.
    let mut out = vec![f32::NAN; out.len()];
    let judged = engine().judge(case.tensors(true, &mut out), &case.options, &case.tolerance(0.15, false)).unwrap();
    assert_eq!(judged.heads.iter().map(|head| head.is_quantized).collect::<Vec<_>>(), [true, false, true]);
    assert!(out.iter().all(|x| x.is_nan()));
    // What stands needs none.
    case.q.iter_mut().for_each(|x| *x *= 0.01);
    let (judged, out) = case.within(0.15, false);
    assert_eq!((judged.unwrap().fell_back(), out), (0, case.plain(true)));
}

#[test]
fn what_cannot_be_judged_is_refused_by_name() {
    let mut rng = Rng::new(4);
    let int8 = scheme(Format::Int8, Granularity::Token);
    let case = Case::normal(&mut rng, [1, 2, 1, 3, 8, 16, 16], [int8, int8]);
    let mut out = vec![f32::NAN; case.out_shape().numel().unwrap()];
    for limit in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let (refused, _) = case.within(limit, true);
        assert!(matches!(refused, Err(Error::Option { option: "tolerance", .. })), "{limit}: {refused:?}");
    }
    let plain = case.tensors(false, &mut out);
    let refused = engine().attention_within(plain, &case.options, &case.tolerance(0.1, true));
    assert!(matches!(&refused, Err(Error::Option { allowed, .. }) if allowed.contains("neither")), "{refused:?}");
    let without = Tolerance { v: None, ..case.tolerance(0.1, true) };
    let refused = engine().attention_within(case.tensors(true, &mut out), &case.options, &without);
    assert!(matches!(&refused, Err(Error::Option { allowed, .. }) if allowed.contains("v carries no")), "{refused:?}");
    let on_codes = case.tensors(true, &mut out);
    let [_, v] = case.originals();
    let half_numbers = Tensors { v, codes: Qkv { v: None, ..on_codes.codes }, ..on_codes };
    let refused = engine().attention_within(half_numbers, &case.options, &case.tolerance(0.1, true));
    assert!(
        matches!(&refused, Err(Error::Option { allowed, .. }) if allowed.contains("errors of v, which")),
        "{refused:?}"
    );
    let other = Case::normal(&mut rng, [1, 2, 1, 3, 9, 16, 16], [int8, int8]);
    let of_others = Tolerance { k: other.tolerance(0.1, true).k, ..case.tolerance(0.1, true) };
    let refused = engine().attention_within(case.tensors(true, &mut out), &case.options, &of_others);
    assert!(matches!(&refused, Err(Error::NotAsPlanned { tensor: "k", .. })), "{refused:?}");
    let halves = vec![half::bf16::ZERO; case.k.len()];
    let original = View::contiguous("k", &halves, shape(&[1, 1, 8, 16])).unwrap();
    let in_bf16 = Backing { errors: (&case.errors[0]).into(), original: Some(original) };
    let refused = engine().attention_within(
        case.tensors(true, &mut out),
        &case.options,
        &Tolerance { k: Some(in_bf16), ..case.tolerance(1e-6, true) },
    );
    assert!(matches!(&refused, Err(Error::DtypeMismatch { tensor: "k", got: DType::BF16, .. })), "{refused:?}");
    // Originals of another length.
    let short = View::contiguous("k", &case.k[..7 * 16], shape(&[1, 1, 7, 16])).unwrap();
    let of_short = Backing { errors: (&case.errors[0]).into(), original: Some(short) };
    let refused = engine().attention_within(
        case.tensors(true, &mut out),
        &case.options,
        &Tolerance { k: Some(of_short), ..case.tolerance(1e-6, true) },
    );
    assert!(matches!(refused, Err(Error::SizeMismatch { .. } | Error::NotAsPlanned { .. })), "{refused:?}");
    assert!(out.iter().all(|x| x.is_nan()), "nothing is written");
}

#[test]
fn an_output_in_the_memory_of_an_original_is_refused_though_every_head_stands() {
    let mut rng = Rng::new(14);
    let int8 = scheme(Format::Int8, Granularity::Token);
    let mut case = Case::normal(&mut rng, [1, 1, 1, 8, 8, 16, 16], [int8, int8]);
    case.q.iter_mut().for_each(|x| *x *= 0.01);
    assert_eq!(case.within(0.5, true).0.unwrap().fell_back(), 0);
    let before = case.v.clone();
    // SAFETY: foreign memory to Rapt, as a binding has it: that of v, which is refused before it is written.
    let out = unsafe {
        let (data, shape) = (case.v.as_ptr().cast_mut().cast(), case.out_shape());
        let strides = shape.contiguous().unwrap();
        ViewMut::from_raw_parts("out", data, DType::F32, shape, strides, Device::Cpu, Extent::Declared).unwrap()
    };
    let mut other = vec![0.0; case.v.len()];
    let tensors = Tensors { out, ..case.tensors(true, &mut other) };
    let refused = engine().attention_within(tensors, &case.options, &case.tolerance(0.5, true));
    assert!(matches!(&refused, Err(Error::OutputOverlaps { .. })), "{refused:?}");
    assert_eq!(case.v, before);
}

#[test]
fn tensors_of_a_gpu_are_refused_by_name_before_they_are_read() {
    let mut rng = Rng::new(15);
    let int8 = scheme(Format::Int8, Granularity::Token);
    let case = Case::normal(&mut rng, [1, 1, 1, 4, 8, 16, 16], [int8, int8]);
    let mut out = vec![f32::NAN; case.v.len()];
    let host = case.tensors(true, &mut out);
    let far = |name, view: &View<'_>| {
        // SAFETY: no address of a GPU is read: the request is refused.
        unsafe {
            let (shape, strides) = (*view.shape(), *view.strides());
            View::from_raw_parts(name, 4096 as *const u8, view.dtype(), shape, strides, DEVICE, Extent::Declared)
        }
        .unwrap()
    };
    let codes = |name, of: &Option<Box<Codes<'_>>>| {
        Some(Box::new(Codes::new(Format::Int8, far(name, &of.as_ref().unwrap().descale))))
    };
    let codes = Qkv { q: None, k: codes("k_descale", &host.codes.k), v: codes("v_descale", &host.codes.v) };
    let out_view = {
        let view = host.out.as_view();
        // SAFETY: as above.
        unsafe {
            let (shape, strides) = (*view.shape(), *view.strides());
            ViewMut::from_raw_parts("out", 8192 as *mut u8, DType::F32, shape, strides, DEVICE, Extent::Declared)
        }
        .unwrap()
    };
    let (q, k, v) = (far("q", &host.q), far("k", &host.k), far("v", &host.v));
    let tensors = Tensors { codes, ..Tensors::new(q, k, v, out_view) };
    let tolerance = case.tolerance(0.1, false);
    let refused = engine().attention_within(tensors, &case.options, &tolerance);
    assert!(
        matches!(&refused, Err(Error::Unsupported { what, .. }) if what.contains("tolerance on a GPU")),
        "{refused:?}"
    );
}

/// Values whose codes are exact, so that the output errs by its own rounding alone; the second ones give subnormal outputs.
#[test]
fn rounding_of_the_output_is_counted() {
    let mut rng = Rng::new(16);
    let [q_len, len, dim] = [40, 60, 32];
    for size in [1.0, 4e-6] {
        let [q, k] = [q_len, len].map(|n| halves(&normals(&mut rng, n * dim), 1.0));
        let v = halves(&normals(&mut rng, len * dim), size);
        let exact = scheme(Format::Int8, Granularity::Block(1));
        let view = |name, x, n| View::contiguous(name, x, shape(&[1, 1, n, dim])).unwrap();
        let originals = [view("k", &k, len), view("v", &v, len)];
        let codes = originals.map(|x| quantize(&x, exact, None).unwrap());
        let [of_k, of_v] = [0, 1].map(|at| measure(&originals[at], &codes[at].view().unwrap()).unwrap());
        let [k_codes, v_codes] = codes.each_ref().map(|codes| codes.view().unwrap());
        let mut out = vec![half::f16::NAN; q_len * dim];
        let to = ViewMut::contiguous("out", &mut out, shape(&[1, 1, q_len, dim])).unwrap();
        let of_codes = Qkv { q: None, k: Some(Box::new(k_codes.codes())), v: Some(Box::new(v_codes.codes())) };
        let tensors =
            Tensors { codes: of_codes, ..Tensors::new(view("q", &q, q_len), k_codes.tensor(), v_codes.tensor(), to) };
        let backing = |errors| Some(Backing { errors: Errors::Host(errors), original: None });
        let tolerance = Tolerance { limit: 1.0, k: backing(&of_k), v: backing(&of_v) };
        let head = engine().attention_within(tensors, &Options::default(), &tolerance).unwrap().heads[0];
        let wide = |x: &[half::f16]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        let (q, k, v, out) = (wide(&q), wide(&k), wide(&v), wide(&out));
        let exact = reference::naive(&Problem::plain(1, 1, q_len, len, dim), &Inputs::plain(&q, &k, &v)).out;
        let length = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = length(&mut exact.iter().zip(&out).map(|(a, b)| a - b)) / length(&mut exact.iter().copied());
        assert!(error > 1e-4, "{size}: it is rounded: {error}");
        assert!(error <= head.estimate && error <= head.bound, "{size}: {error} beyond {head:?}");
        assert!(head.estimate <= 30.0 * error, "{size}: {error} and {head:?}");
    }
}

/// Data made to break the estimate: its name, and q, k and v of one head.
fn attacks(rng: &mut Rng, [q_len, len, dim]: [usize; 3]) -> Vec<(&'static str, [Vec<f32>; 3])> {
    let mut all = Vec::new();
    let mut plain = || [q_len * dim, len * dim, len * dim].map(|n| normals(rng, n));
    let [q, mut k, v] = plain();
    k.chunks_mut(dim).for_each(|row| row[3] *= 50.0);
    all.push(("outlier channel", [q, k, v]));
    let [mut q, mut k, v] = plain();
    q.chunks_mut(dim)
        .for_each(|row| row.iter_mut().enumerate().for_each(|(d, x)| *x *= if d == 3 { 4.0 } else { 0.01 }));
    k.chunks_mut(dim).for_each(|row| row[3] *= 4.0);
    all.push(("queries along the outlier channel", [q, k, v]));
    let [q, k, mut v] = plain();
    v.chunks_mut(dim).for_each(|row| row[5] *= 80.0);
    all.push(("outlier channel of v", [q, k, v]));
    let [mut q, k, v] = plain();
    q.iter_mut().for_each(|x| *x *= 0.0);
    all.push(("uniform rows", [q, k, v]));
    let [mut q, k, _] = plain();
    q.iter_mut().for_each(|x| *x *= 0.05);
    let constant: Vec<f32> = (0..len * dim).map(|at| 0.3 + (at % dim) as f32 * 0.037).collect();
    all.push(("uniform rows of equal values", [q.clone(), k.clone(), constant.clone()]));
    let offset = constant.iter().zip(normals(&mut Rng::new(8), len * dim)).map(|(c, x)| 3.0 + c + 0.01 * x).collect();
    all.push(("uniform rows of nearly equal values", [q, k, offset]));
    let [mut q, k, v] = plain();
    for (i, row) in q.chunks_mut(dim).enumerate() {
        let j = i * 7 % len;
        row.iter_mut().zip(&k[j * dim..]).for_each(|(q, k)| *q = 2.0 * k);
    }
    all.push(("low entropy", [q, k, v]));
    let [q, mut k, mut v] = plain();
    for j in 0..len {
        let token = j * j % 5;
        k.copy_within(token * dim..(token + 1) * dim, j * dim);
        v.copy_within(token * dim..(token + 1) * dim, j * dim);
    }
    all.push(("five tokens over and over", [q, k, v]));
    let [q, mut k, mut v] = plain();
    for j in len / 2..len {
        k.copy_within(0..dim, j * dim);
        v.copy_within(0..dim, j * dim);
    }
    all.push(("one token half of the time", [q, k, v]));
    let [mut q, mut k, mut v] = plain();
    let along = q[..dim].to_vec();
    q.chunks_mut(dim).for_each(|row| row.iter_mut().zip(&along).for_each(|(q, a)| *q = 0.5 * *q + 0.5 * a));
    k[..dim].iter_mut().zip(&along).for_each(|(k, a)| *k = 3.0 * a);
    v[..dim].iter_mut().for_each(|v| *v *= 0.01);
    all.push(("sink", [q, k, v]));
    let [q, mut k, v] = plain();
    k.iter_mut().for_each(|x| *x = x.powi(3));
    all.push(("heavy tails", [q, k, v]));
    let [q, k, mut v] = plain();
    // Values that cancel: an output much shorter than what is added up.
    for pair in v.chunks_mut(2 * dim) {
        let (first, second) = pair.split_at_mut(dim.min(pair.len()));
        second.iter_mut().zip(first).for_each(|(b, a)| *b = 0.02 * *b - *a);
    }
    all.push(("values that cancel", [q, k, v]));
    all
}

#[test]
fn data_made_to_break_it_does_not() {
    let mut rng = Rng::new(77);
    let formats = [
        (Format::Int8, Granularity::Tensor),
        (Format::Int8, Granularity::Token),
        (Format::Int8, Granularity::Channel),
        (Format::Uint8, Granularity::Head),
        (Format::E4m3fn, Granularity::Tensor),
        (Format::E5m2, Granularity::Channel),
        (Format::Int4, Granularity::Block(16)),
        (Format::Nvfp4, Granularity::Tensor),
        (Format::Mxfp8, Granularity::Tensor),
        (Format::Int8, Granularity::Token),
    ];
    let (mut stood, mut fell_back) = (0, 0);
    for [q_len, len, dim] in [[1, 33, 16], [8, 500, 64], [4, 4096, 32], [24, 150, 128]] {
        for (name, tensors) in attacks(&mut rng, [q_len, len, dim]) {
            for (at, (format, granularity)) in formats.into_iter().enumerate() {
                let of = scheme(format, granularity);
                // The last of them with values that err by nothing, so that only keys do.
                let of_v = if at + 1 == formats.len() { scheme(Format::Int8, Granularity::Block(1)) } else { of };
                let case = Case::new([1, 1, 1, q_len, len, dim, dim], tensors.clone(), [of, of_v]);
                for limit in [2e-3, 1e-2, 5e-2, 0.2] {
                    let (judgement, out) = case.within(limit, true);
                    let judgement = judgement.unwrap();
                    let error = case.true_errors(&out)[0];
                    // Where nothing cancels, a run on the originals errs by far less than any limit here.
                    let floor = if judgement.quantized() == 0 { 1e-4 } else { 0.0 };
                    assert!(
                        error <= limit.max(floor),
                        "{name}, {format} {granularity}, {len} keys: {error} beyond {limit}"
                    );
                    let bound = judgement.heads[0].bound;
                    let on_codes = case.true_errors(&case.plain(true))[0];
                    assert!(on_codes <= bound * 1.001 + 1e-5, "{name}, {format}: {on_codes} beyond the bound {bound}");
                    // At its own estimate it would have stood.
                    let JudgedHead { estimate, epsilon, .. } = judgement.heads[0];
                    let holds = epsilon >= 1.0 || on_codes <= estimate;
                    assert!(holds, "{name}, {format} {granularity}, {len} keys: {on_codes} beyond {estimate}");
                    stood += judgement.quantized();
                    fell_back += judgement.fell_back();
                }
            }
        }
    }
    assert!(stood > 200 && fell_back > 200, "both ways are taken: {stood} and {fell_back}");
}

/// Values that follow from the scores, over so many keys that independent errors of keys cancel: those that are a multiple of the keys do not.
#[test]
fn errors_that_lean_on_keys_do_not_hide_in_long_contexts() {
    let mut rng = Rng::new(41);
    let exact = scheme(Format::Int8, Granularity::Block(1));
    let mut stood = 0;
    for [len, dim] in [[8192, 16], [4096, 64]] {
        for format in Format::ALL {
            let q: Vec<f32> = normals(&mut rng, dim).iter().map(|x| 0.3 * x).collect();
            let k = normals(&mut rng, len * dim);
            let score = |k: &[f32]| k.iter().zip(&q).map(|(k, q)| k * q).sum::<f32>();
            let v = k.chunks(dim).flat_map(|k| (0..dim).map(move |d| (1.0 + d as f32) * score(k))).collect();
            let of = scheme(format, Granularity::Head);
            let case = Case::new([1, 1, 1, 1, len, dim, dim], [q.clone(), k, v], [of, exact]);
            let judged = case.within(1e6, true).0.unwrap().heads[0];
            let error = case.true_errors(&case.plain(true))[0];
            assert!(
                judged.epsilon >= 1.0 || error <= judged.estimate,
                "{format}, {len} keys: {error} beyond {judged:?}"
            );
            stood += usize::from(judged.epsilon < 1.0);
        }
    }
    assert!(stood > 10, "{stood}");
}
