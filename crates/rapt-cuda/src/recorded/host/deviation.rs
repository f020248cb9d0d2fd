//! deviation.cu and deviation_end.cu on this machine's processor, held against `rapt_reference::quantization_error`.

use rapt_core::{Causal, Granularity, HeadDeviation, ScaleLayout};
use rapt_quant::{Measured, Quantized, Scheme, measure, quantize};
use rapt_reference::{HeadErrors, Inputs, Mask, Problem, RowError, quantization_error};
use rapt_testkit::Rng;

use super::*;

/// What a case is made of; numbers follow from the seed.
#[derive(Clone)]
struct Recipe {
    /// Batch, query heads, key heads, q_len, kv_len, head_dim, head_dim_v.
    sizes: [usize; 7],
    storage: DType,
    /// `None`: numbers.
    k: Option<Scheme>,
    v: Option<Scheme>,
    options: Options,
    mask: Option<DType>,
    has_sinks: bool,
    has_slopes: bool,
}

fn scheme(format: Format, granularity: Granularity) -> Scheme {
    let granularity = format.own_block_size().map_or(granularity, Granularity::Block);
    Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap()
}

/// Numbers that `dtype` holds, and their bytes.
fn numbers(rng: &mut Rng, n: usize, dtype: DType, factor: f64) -> (Vec<f32>, Vec<u8>) {
    let exact = |x: f32| if dtype == DType::BF16 { f32::from_bits(x.to_bits() & 0xffff_0000) } else { x };
    let x: Vec<f32> = (0..n).map(|_| exact((rng.normal() * factor) as f32)).collect();
    let of = |x: &f32| if dtype == DType::BF16 { x.to_le_bytes()[2..].to_vec() } else { x.to_le_bytes().to_vec() };
    let bytes = x.iter().flat_map(of).collect();
    (x, bytes)
}

/// K or V: its numbers as kernels see them, the originals quantized where it is codes.
struct Side {
    numbers: Vec<f32>,
    bytes: Vec<u8>,
    codes: Option<(Quantized, Measured)>,
}

impl Side {
    fn new(rng: &mut Rng, shape: [usize; 4], dtype: DType, scheme: Option<Scheme>) -> Self {
        let (x, bytes) = numbers(rng, shape.iter().product(), dtype, 1.0);
        let Some(scheme) = scheme else { return Side { numbers: x, bytes, codes: None } };
        let view = View::contiguous("x", &x, shape.into()).unwrap();
        let codes = quantize(&view, scheme, None).unwrap();
        let measured = measure(&view, &codes.view().unwrap()).unwrap();
        let numbers = codes.view().unwrap().to_f32().unwrap();
        Side { numbers, bytes, codes: Some((codes, measured)) }
    }

    fn view<'a>(&'a self, name: &'static str, shape: [usize; 4], dtype: DType) -> View<'a> {
        match &self.codes {
            Some((codes, _)) => moved(name, &codes.view().unwrap().tensor()),
            None => raw(name, &self.bytes, &shape, dtype),
        }
    }

    fn codes<'a>(&'a self, name: &'static str) -> Option<Box<Codes<'a>>> {
        let of = self.codes.as_ref()?.0.view().unwrap().codes();
        let zero_point = of.zero_point.as_ref().map(|points| moved("zero_point", points));
        Some(Box::new(Codes { descale: moved(name, &of.descale), zero_point, ..of }))
    }

    fn errors<'a>(&'a self, name: &'static str) -> Option<View<'a>> {
        let of = self.codes.as_ref()?.1.numbers();
        Some(moved(name, &View::contiguous(name, of, [of.len()].into()).unwrap()))
    }
}

fn raw<'a>(name: &'static str, bytes: &'a [u8], shape: &[usize], dtype: DType) -> View<'a> {
    let shape = Shape::new(shape).unwrap();
    let (strides, extent) = (shape.contiguous().unwrap(), Extent::Declared);
    assert_eq!(shape.numel().unwrap() * dtype.size_bytes(), bytes.len());
    // SAFETY: as many bytes as the assertion counts, of numbers.
    unsafe { View::from_raw_parts(name, bytes.as_ptr(), dtype, shape, strides, GPU, extent) }.unwrap()
}

/// One request with everything that it reads.
struct Made {
    of: Recipe,
    q: (Vec<f32>, Vec<u8>),
    k: Side,
    v: Side,
    mask: Option<(Vec<f64>, Vec<u8>)>,
    sinks: Option<(Vec<f32>, Vec<u8>)>,
    slopes: Option<(Vec<f32>, Vec<u8>)>,
}

impl Made {
    fn new(seed: u64, of: &Recipe) -> Self {
        let mut rng = Rng::new(seed);
        let [b, hq, hkv, sq, s, d, dv] = of.sizes;
        // Row by row another size, so that ε is small and large.
        let (mut q, _) = numbers(&mut rng, b * hq * sq * d, of.storage, 1.0);
        for row in q.chunks_mut(d) {
            let factor = [0.25, 1.0, 4.0][rng.below(3)];
            row.iter_mut().for_each(|x| *x *= factor);
        }
        let bytes_of =
            |x: &f32| if of.storage == DType::BF16 { x.to_le_bytes()[2..].to_vec() } else { x.to_le_bytes().into() };
        let q_bytes = q.iter().flat_map(bytes_of).collect();
        let k = Side::new(&mut rng, [b, hkv, s, d], of.storage, of.k);
        let v = Side::new(&mut rng, [b, hkv, s, dv], of.storage, of.v);
        let mask = of.mask.map(|dtype| {
            // A row that attends nothing, and keys that nobody attends.
            let masked = |n: usize, rng: &mut Rng| n / s == 1 || n % s % 7 == 3 || rng.once_in(4);
            let bias: Vec<f32> = (0..sq * s)
                .map(|n| if masked(n, &mut rng) { f32::NEG_INFINITY } else { [0.0, 0.75, -1.5][n % 3] })
                .collect();
            match dtype {
                DType::Bool => {
                    let is = |x: &f32| *x > f32::NEG_INFINITY;
                    let seen = bias.iter().map(|x| if is(x) { 0.0 } else { f64::NEG_INFINITY }).collect();
                    (seen, bias.iter().map(|x| u8::from(is(x))).collect())
                }
                _ => {
                    (bias.iter().map(|&x| f64::from(x)).collect(), bias.iter().flat_map(|x| x.to_le_bytes()).collect())
                }
            }
        });
        let per_head = |rng: &mut Rng| numbers(rng, hq, DType::F32, 0.5);
        let sinks = of.has_sinks.then(|| per_head(&mut rng));
        let slopes = of.has_slopes.then(|| per_head(&mut rng)).map(|(x, _)| {
            let x: Vec<f32> = x.iter().map(|x| 0.02 * x.abs()).collect();
            let bytes = x.iter().flat_map(|x| x.to_le_bytes()).collect();
            (x, bytes)
        });
        Made { of: of.clone(), q: (q, q_bytes), k, v, mask, sinks, slopes }
    }

    /// What the kernels find; and the request's plan.
    fn found(&self, backend: &Backend) -> Vec<HeadDeviation> {
        let Recipe { sizes: [b, hq, hkv, sq, s, d, dv], storage, options, .. } = &self.of;
        let mut out = vec![0x5au8; b * hq * sq * dv * 4];
        let shape = Shape::from([*b, *hq, *sq, *dv]);
        let strides = shape.contiguous().unwrap();
        let extent = Extent::Declared;
        let ptr = out.as_mut_ptr();
        // SAFETY: as many bytes; nobody else uses them meanwhile.
        let out_view = unsafe { ViewMut::from_raw_parts("out", ptr, DType::F32, shape, strides, GPU, extent) }.unwrap();
        let options = Options { out_dtype: Some(DType::F32), ..*options };
        let per_head = |name, of: &Option<(Vec<f32>, Vec<u8>)>| {
            of.as_ref().map(|(_, bytes)| -> View<'static> {
                // SAFETY: the bytes live as long as the request, which outlives its run.
                let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
                raw(name, bytes, &[*hq], DType::F32)
            })
        };
        let tensors = Tensors {
            codes: Qkv { q: None, k: self.k.codes("k_descale"), v: self.v.codes("v_descale") },
            mask: self.mask.as_ref().map(|(_, bytes)| raw("mask", bytes, &[1, 1, *sq, *s], self.of.mask.unwrap())),
            sinks: per_head("sinks", &self.sinks),
            alibi_slopes: per_head("alibi_slopes", &self.slopes),
            ..Tensors::new(
                raw("q", &self.q.1, &[*b, *hq, *sq, *d], *storage),
                self.k.view("k", [*b, *hkv, *s, *d], *storage),
                self.v.view("v", [*b, *hkv, *s, *dv], *storage),
                out_view,
            )
        };
        let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options);
        let spec = builder
            .codes(tensors.codes.as_deref())
            .mask(tensors.mask.as_ref())
            .sinks(tensors.sinks.as_ref())
            .alibi_slopes(tensors.alibi_slopes.as_ref())
            .out(&tensors.out)
            .build()
            .unwrap();
        let plan = backend.plan_deviations(&spec).unwrap();
        let errors = Qkv { q: None, k: self.k.errors("k_errors"), v: self.v.errors("v_errors") };
        let mut workspace = vec![f64::NAN; plan.workspace_bytes() / 8 + 2];
        let address = workspace.as_mut_ptr().addr().next_multiple_of(16);
        let memory = DeviceMemory { address, len_bytes: plan.workspace_bytes() };
        let mut operands = Operands::check(tensors, &spec).unwrap();
        // SAFETY: the driver runs on this thread, and has ended when it answers.
        let found = unsafe { backend.deviations(&plan, &mut operands, &errors, memory, 0) }.unwrap();
        drop(operands);
        assert!(out.iter().all(|byte| *byte == 0x5a), "nothing is written");
        found
    }

    fn problem(&self) -> Problem {
        let Recipe { sizes: [b, hq, num_kv_heads, sq, s, d, head_dim_v], options, .. } = self.of;
        let softmax_scale = options.softmax_scale.unwrap_or(1.0 / (d as f64).sqrt());
        let (softcap, causal, window) = (options.softcap, options.causal, options.window);
        Problem { num_kv_heads, head_dim_v, softmax_scale, softcap, causal, window, ..Problem::plain(b, hq, sq, s, d) }
    }

    /// What the reference says of each row.
    fn expected(&self) -> Vec<RowError> {
        let [b, hq, hkv, ..] = self.of.sizes;
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (q, k, v) = (wide(&self.q.0), wide(&self.k.numbers), wide(&self.v.numbers));
        let bias = self.mask.as_ref().map(|(bias, _)| bias.repeat(b * hq));
        let [sinks, slopes] = [&self.sinks, &self.slopes].map(|of| of.as_ref().map(|(x, _)| wide(x)));
        let inputs = Inputs {
            mask: bias.as_deref().map(Mask::Additive),
            sinks: sinks.as_deref(),
            alibi_slopes: slopes.as_deref(),
            ..Inputs::plain(&q, &k, &v)
        };
        let of = |at| HeadErrors { k: of_side(&self.k, at), v: of_side(&self.v, at) };
        let errors: Vec<_> = (0..b * hkv).map(of).collect();
        quantization_error(&self.problem(), &inputs, &errors)
    }
}

fn of_side(side: &Side, at: usize) -> Option<rapt_core::MatrixErrors<'_>> {
    side.codes.as_ref().map(|(_, measured)| measured.matrix(at))
}

fn is_near(got: f64, expected: f64, relative: f64) -> bool {
    got == expected || (got - expected).abs() <= relative * expected.abs() + 1e-6
}

/// Holds what was found of each head against what its rows come to, within what float32 may be off: `weights` are what the rounding of weights
/// adds to the estimate's square and to the bounds of each row.
fn check(name: &str, found: &[HeadDeviation], rows: &[RowError], q_len: usize, weights: &dyn Fn(usize) -> [f64; 2]) {
    for (head, (found, of_head)) in found.iter().zip(rows.chunks(q_len)).enumerate() {
        let length = |of: &dyn Fn(&RowError, [f64; 2]) -> f64| {
            let row = |(i, row)| of(row, weights(head * q_len + i)).powi(2);
            of_head.iter().enumerate().map(row).sum::<f64>().sqrt()
        };
        let epsilon = of_head.iter().fold(0.0, |most: f64, row| most.max(row.epsilon));
        let norm = length(&|row, _| row.norm);
        for (what, got, expected, relative) in [
            ("epsilon", found.epsilon, epsilon, 1e-5),
            ("norm", found.norm, norm, 1e-4),
            ("before", found.before, length(&|row, [_, bound]| row.before + bound), 1e-4),
            ("after", found.after, length(&|row, [_, bound]| row.after + bound), 1e-3),
            ("estimate", found.estimate, length(&|row, [square, _]| (row.estimate.powi(2) + square).sqrt()), 5e-3),
        ] {
            // What float32 may have lost of the difference between values and their mean is added to the estimate.
            let slack = if what == "estimate" { 3e-3 * epsilon * norm } else { 0.0 };
            // Near its pole the bound is as good as none: a rounding decides.
            let is_pole = what == "after" && (expected > 1e2 || expected.is_nan());
            let is_it = is_near(got, expected, relative)
                || (got > expected && got < expected * 1.005 + slack)
                || (is_pole && (got > 1e1 || got.is_nan()));
            assert!(is_it, "{name}, head {head}: {what} {got} for {expected}");
        }
    }
}

fn plain(sizes: [usize; 7], of: [Option<Scheme>; 2]) -> Recipe {
    let (storage, options, [k, v]) = (DType::F32, Options::default(), of);
    Recipe { sizes, storage, k, v, options, mask: None, has_sinks: false, has_slopes: false }
}

/// Every option, formats of every kind, splits of the keys, values wider than a block has columns, k or v as numbers.
fn shapes() -> Vec<(&'static str, Recipe)> {
    let int8 = Some(scheme(Format::Int8, Granularity::Token));
    let uint8 = Some(scheme(Format::Uint8, Granularity::Head));
    let int4 = Some(scheme(Format::Int4, Granularity::Block(8)));
    let e4m3fn = Some(scheme(Format::E4m3fn, Granularity::Channel));
    let nvfp4 = Some(scheme(Format::Nvfp4, Granularity::Tensor));
    let (causal, capped) = (Options::default().with_causal(Causal::BottomRight), Options::default().with_softcap(1.5));
    let window = Window { left: Some(20), right: Some(3) };
    vec![
        ("few queries", Recipe { options: causal, ..plain([2, 4, 2, 3, 130, 20, 33], [int8, uint8]) }),
        (
            "keys in chunks",
            Recipe {
                has_sinks: true,
                options: Options { window, ..causal },
                ..plain([1, 3, 1, 2, 1100, 16, 24], [int4, int8])
            },
        ),
        ("chunks of all keys", plain([1, 2, 2, 1, 600, 32, 16], [e4m3fn, nvfp4])),
        (
            "many queries",
            Recipe {
                mask: Some(DType::F32),
                has_slopes: true,
                has_sinks: true,
                options: Options { softmax_scale: Some(-0.3), ..capped },
                ..plain([1, 2, 1, 70, 90, 33, 20], [nvfp4, e4m3fn])
            },
        ),
        ("wide values", plain([1, 1, 1, 2, 70, 8, 150], [int8, None])),
        ("codes of v alone", plain([1, 2, 1, 5, 100, 24, 140], [None, int8])),
        ("no keys", plain([1, 2, 1, 5, 0, 16, 16], [int8, int8])),
    ]
}

#[test]
fn figures_of_heads_are_those_of_the_reference() {
    let backend = backend();
    for (name, of) in shapes() {
        let request = Made::new(3, &of);
        let found = request.found(backend);
        check(name, &found, &request.expected(), of.sizes[3], &|_| [0.0; 2]);
    }
}

#[test]
fn values_that_nobody_attends_have_no_say() {
    let backend = backend();
    let int8 = Some(scheme(Format::Int8, Granularity::Token));
    let of = Recipe { mask: Some(DType::Bool), ..plain([1, 2, 1, 4, 80, 16, 40], [int8, None]) };
    let mut request = Made::new(8, &of);
    // Every seventh key is masked for every query.
    for (n, x) in request.v.numbers.iter_mut().enumerate().filter(|(n, _)| n / 40 % 7 == 3) {
        *x = f32::NAN;
        request.v.bytes[4 * n..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    let found = request.found(backend);
    assert!(found.iter().all(|head| head.norm.is_finite() && head.norm > 0.0), "{found:?}");
    check("masked values", &found, &request.expected(), 4, &|_| [0.0; 2]);
    // One that is attended makes the heads that attend it no number.
    request.v.bytes[4 * 40 * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    assert!(request.found(backend).iter().all(|head| head.estimate.is_nan() && head.norm.is_nan()));
}

#[test]
fn what_the_judged_kernel_rounds_weights_to_is_in_the_figures() {
    let backend = backend();
    let token = Some(scheme(Format::Int8, Granularity::Token));
    let mx = Some(scheme(Format::Mxfp8, Granularity::Tensor));
    for (name, of, unit) in [("float16", [token, token], 1.0 / 2048.0), ("bfloat16", [token, mx], 1.0 / 256.0)] {
        let sizes @ [_, hq, _, sq, s, d, dv] = [1, 2, 1, 3, 90, 32, 32];
        let of = Recipe { storage: DType::BF16, ..plain(sizes, of) };
        let request = Made::new(17, &of);
        let (q, k, v) = (&request.q.0, &request.k.numbers, &request.v.numbers);
        let weights = |row: usize| {
            let dot = |j: usize| (0..d).map(|c| f64::from(q[row * d + c]) * f64::from(k[j * d + c])).sum::<f64>();
            let scores: Vec<f64> = (0..s).map(|j| dot(j) / (d as f64).sqrt()).collect();
            let top = scores.iter().copied().fold(f64::MIN, f64::max);
            let p: Vec<f64> = scores.iter().map(|x| (x - top).exp()).collect();
            let sum: f64 = p.iter().sum();
            let size = |j: usize| v[j * dv..][..dv].iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let terms: Vec<f64> = p.iter().enumerate().map(|(j, p)| unit * p / sum * size(j)).collect();
            [terms.iter().map(|x| x * x).sum::<f64>() / 3.0, terms.iter().sum()]
        };
        assert!(weights(0)[1] > 0.0 && hq * sq == 6);
        check(name, &request.found(backend), &request.expected(), sq, &weights);
    }
}
