//! Attention on codes against the definition on the numbers that they stand for, each format with each granularity; by
//! `rapt_reference::Descale`, which knows no format.

use half::{bf16, f16};
use rapt_core::{
    Arch, Caps, Codes, CodesForm, DType, Element, Error, Format, Operands, Options, Qkv, SerialExecutor, Spec, Tensors,
    View, ViewMut, Workspace,
};
use rapt_reference::{Descale, Inputs, Problem, naive};

const HEADS: usize = 2;
/// More than a chunk, and no multiple of a block.
const KV_LEN: usize = 549;
const DIM: usize = 48;

/// Bytes without a period: of two keys that are alike rounding would choose where one decides all.
fn bytes(n: usize, seed: usize) -> Vec<u8> {
    let byte = |at: usize| {
        let x = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (seed as u64) << 32;
        ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 56) as u8
    };
    (0..n).map(byte).collect()
}

fn finite(format: Format, byte: u8) -> u8 {
    if (0..2).any(|half| !format.decode(byte >> (4 * half)).is_finite() || !format.decode(byte).is_finite()) {
        byte & 0x7b & !4
    } else {
        byte
    }
}

/// The shapes of a descale of `[1, HEADS, KV_LEN, DIM]` codes.
fn shapes(format: Format) -> Vec<Vec<usize>> {
    match format.own_block_size() {
        Some(size) => vec![vec![1, HEADS, KV_LEN, DIM.div_ceil(size)]],
        None => vec![
            vec![],
            vec![1, HEADS],
            vec![1, HEADS, KV_LEN],
            vec![1, HEADS, 1, DIM],
            vec![1, HEADS, KV_LEN, 3],
            vec![1, HEADS, KV_LEN, 1],
        ],
    }
}

/// One operand: codes as bytes and scales as numbers and as bytes.
struct Operand {
    format: Format,
    codes: Vec<u8>,
    shape: Vec<usize>,
    f32s: Vec<f32>,
    bytes: Vec<u8>,
    zero_points: Option<Vec<u8>>,
}

impl Operand {
    fn new(format: Format, shape: &[usize], seed: usize) -> Self {
        let groups = shape.iter().product::<usize>();
        let size = 1.0 / (format.largest() as f32);
        let codes = bytes(HEADS * KV_LEN * DIM / format.codes_per_byte(), seed);
        Operand {
            format,
            codes: codes.into_iter().map(|byte| finite(format, byte)).collect(),
            shape: shape.to_vec(),
            f32s: (0..groups).map(|n| size * (1.0 + (n % 5) as f32 / 8.0)).collect(),
            // 2^-2 .. 2^0 as e8m0; 0.5 .. 1 as e4m3.
            bytes: (0..groups)
                .map(|n| if format == Format::Nvfp4 { 0x30 + (n % 9) as u8 } else { 125 + (n % 3) as u8 })
                .collect(),
            zero_points: format.has_zero_point().then(|| (0..groups).map(|n| 110 + (n % 30) as u8).collect()),
        }
    }

    fn view(&self) -> View<'_> {
        let shape = [1, HEADS, KV_LEN, DIM / self.format.codes_per_byte()];
        View::contiguous("k", &self.codes, shape.into()).unwrap().reinterpreted("k", self.format.code_dtype()).unwrap()
    }

    fn codes(&self) -> Codes<'_> {
        let shape = rapt_core::Shape::new(&self.shape).unwrap();
        let descale = match self.format.scale_dtype() {
            DType::F32 => View::contiguous("descale", &self.f32s, shape).unwrap(),
            dtype => View::contiguous("descale", &self.bytes, shape).unwrap().reinterpreted("descale", dtype).unwrap(),
        };
        let zero_point = self.zero_points.as_ref().map(|points| View::contiguous("zero_point", points, shape).unwrap());
        let global_scale = self.format.has_global_scale().then_some(0.7);
        Codes { zero_point, global_scale, ..Codes::new(self.format, descale) }
    }

    /// The numbers, by the definition of a descale.
    fn numbers(&self) -> Vec<f64> {
        let code = |at: usize| match self.format.codes_per_byte() {
            2 => self.codes[at / 2] >> (4 * (at % 2)) & 0xf,
            _ => self.codes[at],
        };
        let codes: Vec<f64> = (0..HEADS * KV_LEN * DIM).map(|at| f64::from(self.format.decode(code(at)))).collect();
        let factor: Vec<f64> = match self.format.scale_dtype() {
            DType::F32 => self.f32s.iter().copied().map(f64::from).collect(),
            DType::F8E8M0FNU => self.bytes.iter().map(|&byte| rapt_core::codes::from_e8m0(byte)).collect(),
            _ => {
                let value = |&byte: &u8| f64::from(rapt_core::codes::E4M3FN_VALUES[usize::from(byte)]);
                self.bytes.iter().map(|byte| value(byte) * f64::from(0.7f32)).collect()
            }
        };
        let points: Option<Vec<f64>> =
            self.zero_points.as_ref().map(|points| points.iter().map(|&p| f64::from(p)).collect());
        // Blocks of 32 do not divide 48: every element its own factor then.
        let (factor, shape) = match self.shape[..] {
            [_, _, _, 2] => {
                let wide = (0..HEADS * KV_LEN * DIM).map(|at| factor[at / DIM * 2 + at % DIM / 32]).collect();
                (wide, vec![1, HEADS, KV_LEN, DIM])
            }
            _ => (factor, self.shape.clone()),
        };
        let descale = Descale { factor: &factor, zero_point: points.as_deref(), shape: &shape };
        descale.numbers(&codes, [1, HEADS, KV_LEN, DIM])
    }
}

fn attend(arch: Arch, q: &[f32], q_len: usize, k: &Operand, v: &Operand) -> Vec<f32> {
    attend_as(arch, q, q_len, k, v).0
}

/// Attention to f32 for queries of any dtype, and lse.
fn attend_as<T: Element>(arch: Arch, q: &[T], q_len: usize, k: &Operand, v: &Operand) -> (Vec<f32>, Vec<f32>) {
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; q.len() / DIM]);
    let shape = [1, 2 * HEADS, q_len, DIM];
    let codes = Qkv { q: None, k: Some(Box::new(k.codes())), v: Some(Box::new(v.codes())) };
    let q = View::contiguous("q", q, shape.into()).unwrap();
    let out_view = ViewMut::contiguous("out", &mut out, shape.into()).unwrap();
    let lse_view = ViewMut::contiguous("lse", &mut lse, [1, 2 * HEADS, q_len].into()).unwrap();
    let tensors = Tensors { codes, lse: Some(lse_view), ..Tensors::new(q, k.view(), v.view(), out_view) };
    let options = Options::default().with_out_dtype(DType::F32);
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options)
        .codes(tensors.codes.as_deref())
        .out(&tensors.out)
        .lse(tensors.lse.as_ref().unwrap())
        .build()
        .unwrap();
    let plan = rapt_cpu::select(&spec, &Caps { arch, threads: 1, clock_hz: None }).unwrap();
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = Operands::check(tensors, &spec).unwrap();
    let certificate = plan.certificate(&operands).unwrap();
    assert_eq!(certificate.quantized.len(), 2);
    rapt_cpu::run(&plan, &mut operands, &mut workspace, &SerialExecutor).unwrap();
    (out, lse)
}

fn queries(q_len: usize, factor: f32) -> Vec<f32> {
    (0..2 * HEADS * q_len * DIM).map(|n| factor * ((n * 31 % 17) as f32 - 8.0) / 16.0).collect()
}

/// Two rows share a key head, and fourteen: decode and forward.
const Q_LENS: [usize; 2] = [1, 7];

/// Holds every instruction set against the definition on the numbers of the codes; with queries of bf16 too, which the dot of pairs
/// multiplies: there scores are those of f32, and weights are rounded to bf16. Quads of bytes are as near as f32 (tests/quads.rs).
fn check(what: &str, q: &[f32], k: &Operand, v: &Operand) {
    let q_len = q.len() / (2 * HEADS * DIM);
    let wide: Vec<f64> = q.iter().copied().map(f64::from).collect();
    let halves: Vec<bf16> = q.iter().copied().map(bf16::from_f32).collect();
    assert!(halves.iter().zip(q).all(|(half, &q)| half.to_f32() == q), "queries are numbers of bf16");
    let problem = Problem {
        batch: 1,
        num_q_heads: 2 * HEADS,
        num_kv_heads: HEADS,
        q_len,
        kv_len: KV_LEN,
        head_dim: DIM,
        head_dim_v: DIM,
        softmax_scale: 1.0 / (DIM as f64).sqrt(),
        softcap: None,
        causal: None,
        window: rapt_core::Window::default(),
        dropout: None,
    };
    let numbers = (k.numbers(), v.numbers());
    let inputs = Inputs { q: &wide, k: &numbers.0, v: &numbers.1, mask: None, sinks: None, alibi_slopes: None };
    let expected = naive(&problem, &inputs);
    let (expected, expected_lse) = (expected.out, expected.lse);
    let largest = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
    for &arch in rapt_cpu::available() {
        let got = attend(arch, q, q_len, k, v);
        let worst = got.iter().zip(&expected).map(|(got, x)| (f64::from(*got) - x).abs()).fold(0.0, f64::max);
        let fine = worst <= 2e-6 * largest && largest > 0.0;
        assert!(fine, "{what} q_len {q_len} on {}: {worst:e} of {largest:e}", arch.name());
        let (got, lse) = attend_as(arch, &halves, q_len, k, v);
        let worst = got.iter().zip(&expected).map(|(got, x)| (f64::from(*got) - x).abs()).fold(0.0, f64::max);
        // Forward rounds weights to bf16 as well, decode only what comes out.
        let most = match q_len {
            1 if arch != Arch::Avx512Bf16 => 2e-6,
            1 => 1.01 * 2f64.powi(-9),
            _ => 2f64.powi(-8),
        };
        assert!(worst <= most * largest, "{what} q_len {q_len} of bf16 on {}: {worst:e} of {largest:e}", arch.name());
        for (lse, expected) in lse.iter().zip(&expected_lse) {
            let fine = (f64::from(*lse) - expected).abs() <= 1e-5 * (1.0 + expected.abs());
            assert!(fine, "{what} q_len {q_len} of bf16 on {}: lse {lse} for {expected}", arch.name());
        }
    }
}

#[test]
fn every_format_with_every_granularity_gives_the_definition_on_its_numbers() {
    for (format, shape) in
        Format::ALL.into_iter().flat_map(|format| shapes(format).into_iter().map(move |shape| (format, shape)))
    {
        let (k, v) = (Operand::new(format, &shape, 1), Operand::new(format, &shape, 2));
        for q_len in Q_LENS {
            check(&format!("{format} {shape:?}"), &queries(q_len, 1.0), &k, &v);
        }
    }
}

/// Where the product of a code with a query, or of a factor with a weight, leaves the range of f32, though that of all three does not.
#[test]
fn factors_near_the_ends_of_f32_give_the_definition_too() {
    for format in Format::ALL.into_iter().filter(|format| format.own_block_size().is_none()) {
        for (shape, power) in shapes(format).into_iter().flat_map(|shape| [(shape.clone(), 100), (shape, -100)]) {
            let (mut k, mut v) = (Operand::new(format, &shape, 1), Operand::new(format, &shape, 2));
            let factor = 2f32.powi(power);
            k.f32s.iter_mut().step_by(3).for_each(|of| *of *= factor);
            // Negative ones too: a factor is a number like any other.
            v.f32s.iter_mut().step_by(3).for_each(|of| *of *= -factor);
            for q_len in Q_LENS {
                // Where the factor is tiny the queries are as large as makes scores of its keys; the others' are 0 or decide all.
                let of_q = if power > 0 { factor.recip() } else { 2f32.powi(90) };
                check(&format!("{format} {shape:?} 2^{power}"), &queries(q_len, of_q), &k, &v);
            }
        }
    }
}

#[test]
fn a_code_that_is_nan_is_seen_by_those_who_attend_it() {
    // Among others, and the last of all, which may be behind whole vectors.
    let places = [([5, 7], [33, 40]), ([KV_LEN - 1, DIM - 1], [KV_LEN - 1, DIM - 1])];
    for (format, (nan_k, nan_v)) in
        [Format::E4m3fn, Format::E5m2, Format::Mxfp8].into_iter().flat_map(|of| places.map(|place| (of, place)))
    {
        for shape in shapes(format) {
            let clean = [1, 2].map(|seed| Operand::new(format, &shape, seed));
            let [mut k, mut v] = [1, 2].map(|seed| Operand::new(format, &shape, seed));
            k.codes[nan_k[0] * DIM + nan_k[1]] = 0xff;
            v.codes[nan_v[0] * DIM + nan_v[1]] = 0x7f;
            // A negative factor, and weights that underflow: a weight of 0 is no mask.
            v.f32s.iter_mut().for_each(|of| *of *= -1.0);
            let cases = Q_LENS.into_iter().flat_map(|q_len| [(q_len, 1.0), (q_len, 1e4)]);
            for (&arch, (q_len, size)) in
                rapt_cpu::available().iter().flat_map(|arch| cases.clone().map(move |case| (arch, case)))
            {
                let q = queries(q_len, size);
                let halves: Vec<bf16> = q.iter().copied().map(bf16::from_f32).collect();
                for of_halves in [false, true] {
                    let of = |k, v| {
                        if of_halves { attend_as(arch, &halves, q_len, k, v).0 } else { attend(arch, &q, q_len, k, v) }
                    };
                    let is_nan = |out: Vec<f32>| out.into_iter().map(f32::is_nan).collect::<Vec<_>>();
                    // Two heads of queries read the first head of K and V.
                    let at = |n: usize| (n / (q_len * DIM) < 2, n % DIM);
                    let (of_k, of_v) = (is_nan(of(&k, &clean[1])), is_nan(of(&clean[0], &v)));
                    let what = format!("{format} {shape:?} q_len {q_len} on {}", arch.name());
                    assert!(of_k.iter().enumerate().all(|(n, nan)| *nan == at(n).0), "{what}: k");
                    assert!(of_v.iter().enumerate().all(|(n, nan)| *nan == (at(n) == (true, nan_v[1]))), "{what}: v");
                }
            }
        }
    }
}

#[test]
fn an_infinite_code_with_an_extreme_factor_is_infinite() {
    let shape = [1, HEADS, KV_LEN];
    let (k, mut v) = (Operand::new(Format::Int8, &shape, 1), Operand::new(Format::E5m2, &shape, 2));
    v.codes[33 * DIM + 40] = 0x7c;
    v.f32s[33] = 2f32.powi(-100);
    for (&arch, q_len) in rapt_cpu::available().iter().flat_map(|arch| Q_LENS.map(|q_len| (arch, q_len))) {
        let halves: Vec<bf16> = queries(q_len, 1.0).into_iter().map(bf16::from_f32).collect();
        let of_halves = attend_as(arch, &halves, q_len, &k, &v).0.into_iter().enumerate();
        for (n, out) in attend(arch, &queries(q_len, 1.0), q_len, &k, &v).into_iter().enumerate().chain(of_halves) {
            let is_infinite = n / (q_len * DIM) < 2 && n % DIM == 40;
            assert_eq!(out == f32::INFINITY, is_infinite, "{} q_len {q_len}: {out}", arch.name());
            assert!(out.is_finite() || is_infinite);
        }
    }
}

/// The instruction set that a request of `q_len` queries is planned for on a machine with another, with one operand for K and V.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn planned<T: Element + Default>(arch: Arch, operand: &Operand, q_len: usize) -> Arch {
    let q = vec![T::default(); 2 * HEADS * q_len * DIM];
    let q = View::contiguous("q", &q, [1, 2 * HEADS, q_len, DIM].into()).unwrap();
    let (codes, view) = (operand.codes(), operand.view());
    let form = Some(CodesForm::from(&codes));
    let codes = Qkv { q: None, k: form, v: form };
    let spec = Spec::builder(&q, &view, &view, &Options::default()).codes(codes).build().unwrap();
    rapt_cpu::select(&spec, &Caps { arch, threads: 1, clock_hz: None }).unwrap().key().arch
}

#[test]
#[cfg(target_arch = "x86_64")]
fn codes_beside_queries_of_bf16_are_pairs_where_bf16_holds_them() {
    for (format, shape) in
        Format::ALL.into_iter().flat_map(|format| shapes(format).into_iter().map(move |shape| (format, shape)))
    {
        let operand = Operand::new(format, &shape, 1);
        let is = |pairs: bool| if pairs { Arch::Avx512Bf16 } else { Arch::Avx512 };
        assert_eq!(planned::<bf16>(Arch::Avx512Bf16, &operand, 1), is(true), "decode: {format} {shape:?}");
        let holds =
            format.own_block_size().is_some() || !matches!(shape[..], [1, HEADS, 1, DIM] | [1, HEADS, KV_LEN, 3]);
        let of_key = holds && !format.has_zero_point();
        assert_eq!(planned::<bf16>(Arch::Avx512Bf16, &operand, 7), is(of_key), "forward: {format} {shape:?}");
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn codes_that_are_small_integers_are_quads_beside_few_queries_of_16_bits() {
    for (format, shape) in
        Format::ALL.into_iter().flat_map(|format| shapes(format).into_iter().map(move |shape| (format, shape)))
    {
        let operand = Operand::new(format, &shape, 1);
        let is = |quads: bool| if quads { Arch::Avx512Vnni } else { Arch::Avx512 };
        let are_integers = match format {
            Format::Int8 | Format::Int4 | Format::Mxfp4 | Format::Nvfp4 => true,
            Format::Uint8 => shape != [1, HEADS, KV_LEN, 3],
            _ => false,
        };
        // Blocks of 32 do not divide 48.
        let what = format!("{format} {shape:?}");
        for arch in [Arch::Avx512Vnni, Arch::Amx] {
            assert_eq!(planned::<bf16>(arch, &operand, 1), is(are_integers), "{what}");
            assert_eq!(planned::<f16>(arch, &operand, 1), is(are_integers), "{what}");
            assert_eq!(planned::<f32>(arch, &operand, 1), is(false), "float32: {what}");
            assert_eq!(planned::<bf16>(arch, &operand, 7), is(false), "forward: {what}");
        }
        // Beside queries of bf16 pairs come first.
        assert_eq!(planned::<f16>(Arch::Avx512Bf16, &operand, 1), is(are_integers), "{what}");
    }
}

#[test]
#[cfg(target_arch = "aarch64")]
fn codes_are_numbers_of_float32_on_arm() {
    for format in Format::ALL {
        for shape in shapes(format) {
            let operand = Operand::new(format, &shape, 1);
            for q_len in [1, 7] {
                assert_eq!(planned::<bf16>(Arch::NeonBf16, &operand, q_len), Arch::Neon, "{format} {shape:?}");
                assert_eq!(planned::<f16>(Arch::NeonBf16, &operand, q_len), Arch::Neon, "{format} {shape:?}");
            }
        }
    }
}

#[test]
fn other_scales_than_planned_are_refused() {
    let (k, v) = (Operand::new(Format::Int8, &[1, HEADS], 1), Operand::new(Format::Int8, &[1, HEADS, KV_LEN], 2));
    let q = [0f32; 2 * HEADS * DIM];
    let mut out = [0f32; 2 * HEADS * DIM];
    let shape = [1, 2 * HEADS, 1, DIM];
    let q = View::contiguous("q", &q, shape.into()).unwrap();
    let spec = |codes: &Codes<'_>| {
        let codes = CodesForm::from(codes);
        Spec::builder(&q, &k.view(), &k.view(), &Options::default())
            .codes(Qkv { q: None, k: Some(codes), v: Some(codes) })
            .build()
            .unwrap()
    };
    let planned = spec(&k.codes());
    let mut refused = |of_k: Option<Codes<'_>>| {
        let codes = Qkv { q: None, k: of_k.map(Box::new), v: Some(Box::new(k.codes())) };
        let out = ViewMut::contiguous("out", &mut out, shape.into()).unwrap();
        let (mask, sinks, alibi_slopes, lse) = (None, None, None, None);
        let tensors = Tensors {
            page_table: None,
            lengths: None,
            offsets: None,
            dropout: None,
            q,
            k: k.view(),
            v: k.view(),
            codes,
            mask,
            sinks,
            alibi_slopes,
            out,
            lse,
        };
        Operands::check(tensors, &planned).map(drop)
    };
    assert_eq!(refused(Some(k.codes())), Ok(()));
    let other = |what| Err(Error::NotAsPlanned { tensor: "k_descale", what });
    assert_eq!(refused(None), other("presence"));
    assert_eq!(refused(Some(v.codes())), other("format or granularity"));
    let mut strided = k.codes();
    strided.descale = View::strided("descale", &v.f32s, 0, [1, HEADS].into(), [2, 2].into()).unwrap();
    assert_eq!(refused(Some(strided)), other("strides"));
}
