//! One row: a problem, its check against the reference on a smaller one of its kind, and its time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rapt::quant::{QuantError, Quantized, Result, Scheme, quantize};
use rapt::reference::{Inputs, Mask, Problem, naive};
use rapt::{
    Causal, Codes, Compute, DType, Element, Engine, Kernel, Operands, Options, Plan, Qkv, Shape, Spec, Tensor, Tensors,
    View,
};

use super::ceilings::{Ceilings, Meter};
use crate::explain::MaskName;

/// Rounds of ceilings and calls.
const ROUNDS: usize = 5;
/// Most bytes of copies of k and v that a decoding row goes through.
const COPIES_BYTES: usize = 1 << 30;

/// To an element and back.
type Casts<T> = (fn(f64) -> T, fn(T) -> f64);

/// A problem.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) dtype: DType,
    pub(crate) mask: MaskName,
    /// Those of q, k and v that are codes.
    pub(crate) codes: Qkv<Option<Scheme>>,
    pub(crate) options: Options,
    pub(crate) is_bshd: bool,
}

/// What was found of a row.
pub(crate) struct Timing {
    pub(crate) plan: Arc<Plan>,
    /// Relative L2 of the smaller problem against the reference, and what is allowed.
    pub(crate) error: f64,
    pub(crate) limit: f64,
    /// Seconds of a call: the median of each round. None if the row is wrong.
    pub(crate) seconds: Vec<f64>,
    pub(crate) calls: usize,
    /// The best of the ceilings measured between the rounds.
    pub(crate) ceilings: Ceilings,
}

impl Timing {
    /// Whether the row computes the reference; NaN does not.
    pub(crate) fn is_right(&self) -> bool {
        self.error <= self.limit
    }
}

/// q, k or v of a row.
#[derive(Clone)]
enum Operand<T> {
    Numbers(Vec<T>),
    Codes(Box<Quantized>),
}

impl<T: Element> Operand<T> {
    fn new(numbers: Vec<T>, shape: Shape, scheme: Option<Scheme>) -> Result<Self> {
        let Some(scheme) = scheme else { return Ok(Operand::Numbers(numbers)) };
        Ok(Operand::Codes(Box::new(quantize(&View::contiguous("x", &numbers, shape)?, scheme, None)?)))
    }

    fn view(&self, tensor: &'static str, shape: Shape) -> Result<(View<'_>, Option<Box<Codes<'_>>>)> {
        Ok(match self {
            Operand::Numbers(numbers) => (View::contiguous(tensor, numbers, shape)?, None),
            Operand::Codes(quantized) => {
                let view = quantized.view()?;
                (view.tensor(), Some(Box::new(view.codes())))
            }
        })
    }

    /// Its numbers, those of codes as dequantizing gives them.
    fn numbers(&self, widen: fn(T) -> f64) -> Result<Vec<f64>> {
        Ok(match self {
            Operand::Numbers(numbers) => numbers.iter().copied().map(widen).collect(),
            Operand::Codes(quantized) => quantized.view()?.to_f32()?.into_iter().map(f64::from).collect(),
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Operand::Numbers(numbers) => size_of_val(numbers.as_slice()),
            Operand::Codes(quantized) => quantized.form().nbytes(),
        }
    }
}

/// The tensors of a row.
struct Memory<T> {
    q: Operand<T>,
    /// Copies of k and v, gone through in turn.
    kv: Vec<(Operand<T>, Operand<T>)>,
    bools: Vec<bool>,
    /// As doubles and as what an additive mask of this row holds.
    bias: Vec<f64>,
    bias_f32: Vec<f32>,
}

/// Sixteenths in −1..1, which every dtype holds exactly.
fn sample(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|n| (((n * 7 + seed * 13) * 37 % 33) as f64 - 16.0) / 16.0).collect()
}

/// The relative L2 distance of `got` from `expected`.
fn relative_error(got: &[f64], expected: &[f64]) -> f64 {
    let off: f64 = got.iter().zip(expected).map(|(got, expected)| (got - expected).powi(2)).sum();
    let whole: f64 = expected.iter().map(|expected| expected.powi(2)).sum();
    if whole == 0.0 { off.sqrt() } else { (off / whole).sqrt() }
}

/// The element of a repeating sample, wherever it begins.
fn repeat<T: Element>(seed: usize, len: usize, narrow: fn(f64) -> T) -> Vec<T> {
    let piece: Vec<T> = sample(seed, 4093.min(len)).into_iter().map(narrow).collect();
    piece.iter().copied().cycle().take(len).collect()
}

impl Row {
    /// What a person calls it.
    pub(crate) fn name(&self) -> String {
        let Row { batch, heads, kv_heads, q_len, kv_len, head_dim, head_dim_v, .. } = self;
        let groups = if kv_heads == heads { String::new() } else { format!("/{kv_heads}") };
        let value = if head_dim_v == head_dim { String::new() } else { format!("/{head_dim_v}") };
        let mut name = format!("{batch},{heads}{groups},{q_len},{kv_len},{head_dim}{value}");
        if let Some(causal) = self.options.causal {
            name += if causal == Causal::TopLeft { " causal" } else { " bottom_right" };
        }
        if self.options.window != rapt::Window::default() {
            name += " window";
        }
        name += match self.mask {
            MaskName::None => "",
            MaskName::Bool => " bool mask",
            MaskName::Additive => " additive mask",
        };
        for (tensor, scheme) in self.codes.named() {
            if let Some(scheme) = scheme {
                name += &format!(" {tensor} {} by {}", scheme.format(), scheme.granularity());
            }
        }
        if self.options.compute != Compute::Exact {
            name += &format!(" computed in {}", self.options.compute.name());
        }
        if self.is_bshd { name + " bshd" } else { name }
    }

    pub(super) fn shape_of(&self, heads: usize, len: usize, dim: usize) -> Shape {
        if self.is_bshd { [self.batch, len, heads, dim].into() } else { [self.batch, heads, len, dim].into() }
    }

    fn memory<T: Element>(&self, narrow: fn(f64) -> T, copies: usize) -> Result<Memory<T>> {
        let Row { batch, heads, kv_heads, q_len, kv_len, head_dim, head_dim_v, codes, .. } = *self;
        let operand = |seed, heads, len, dim, scheme| {
            let numbers = repeat(seed, batch * heads * len * dim, narrow);
            Operand::new(numbers, self.shape_of(heads, len, dim), scheme)
        };
        let mut kv: Vec<(Operand<T>, Operand<T>)> = Vec::with_capacity(copies);
        for copy in 0..copies {
            // Quantizing takes longer than attending: one copy of codes is as good as another.
            kv.push(match kv.first() {
                Some(first) if codes.k.is_some() && codes.v.is_some() => first.clone(),
                _ => (
                    operand(2 + copy, kv_heads, kv_len, head_dim, codes.k)?,
                    operand(3 + copy, kv_heads, kv_len, head_dim_v, codes.v)?,
                ),
            });
        }
        let pairs = if self.mask == MaskName::None { 0 } else { batch * q_len * kv_len };
        let bias: Vec<f64> = if self.mask == MaskName::Additive { sample(5, pairs) } else { Vec::new() };
        Ok(Memory {
            q: operand(1, heads, q_len, head_dim, codes.q)?,
            kv,
            bools: (0..pairs).map(|n| n * 5 % 8 != 3).collect(),
            bias_f32: bias.iter().map(|&x| x as f32).collect(),
            bias,
        })
    }

    /// The tensors with copy `copy` of k and v.
    fn tensors<'a, T: Element>(&self, memory: &'a Memory<T>, copy: usize, out: &'a mut Tensor) -> Result<Tensors<'a>> {
        let Row { batch, heads, kv_heads, q_len, kv_len, head_dim, head_dim_v, .. } = *self;
        let (k, v) = &memory.kv[copy];
        let pairs = Shape::from([batch, 1, q_len, kv_len]);
        let mask = match self.mask {
            MaskName::None => None,
            MaskName::Bool => Some(View::contiguous("mask", &memory.bools, pairs)?),
            // In the accumulation dtype, as `explain` has it.
            MaskName::Additive if self.dtype == DType::F64 => Some(View::contiguous("mask", &memory.bias, pairs)?),
            MaskName::Additive => Some(View::contiguous("mask", &memory.bias_f32, pairs)?),
        };
        let (q, q_codes) = memory.q.view("q", self.shape_of(heads, q_len, head_dim))?;
        let (k, k_codes) = k.view("k", self.shape_of(kv_heads, kv_len, head_dim))?;
        let (v, v_codes) = v.view("v", self.shape_of(kv_heads, kv_len, head_dim_v))?;
        let codes = Qkv { q: q_codes, k: k_codes, v: v_codes };
        Ok(Tensors { codes, mask, ..Tensors::new(q, k, v, out.view_mut()?) })
    }

    fn new_out(&self) -> Result<Tensor> {
        Ok(Tensor::zeros(self.dtype, self.shape_of(self.heads, self.q_len, self.head_dim_v))?)
    }

    /// What runs for this row.
    fn plan<T: Element>(&self, engine: &Engine, memory: &Memory<T>) -> Result<Arc<Plan>> {
        let mut out = self.new_out()?;
        let tensors = self.tensors(memory, 0, &mut out)?;
        let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &self.options);
        Ok(engine.plan(&builder.codes(tensors.codes.as_deref()).mask(tensors.mask.as_ref()).build()?)?)
    }

    /// A problem of this kind that the reference can follow: one batch, few heads, a tile of queries, two blocks of keys.
    pub(super) fn smaller(&self) -> Row {
        let kv_heads = self.kv_heads.min(2);
        let heads = self.heads / self.kv_heads.max(1) * kv_heads;
        Row { batch: 1, heads, kv_heads, q_len: self.q_len.min(70), kv_len: self.kv_len.min(600), ..*self }
    }

    /// The relative L2 error of this row (one batch) against the reference.
    fn error<T: Element>(&self, engine: &Engine, narrow: fn(f64) -> T, widen: fn(T) -> f64) -> Result<f64> {
        let Row { heads, q_len, head_dim_v, .. } = *self;
        let memory = self.memory(narrow, 1)?;
        let plan = self.plan(engine, &memory)?;
        let mut out = self.new_out()?;
        engine.run(&plan, &mut Operands::check(self.tensors(&memory, 0, &mut out)?, plan.spec())?)?;
        let got = self.by_head(&out.to_vec()?.into_iter().map(widen).collect::<Vec<f64>>(), heads, q_len, head_dim_v);
        Ok(relative_error(&got, &self.expected(&memory, widen)?))
    }

    /// The reference of this row (one batch), `[heads, q_len, head_dim_v]`.
    fn expected<T: Element>(&self, memory: &Memory<T>, widen: fn(T) -> f64) -> Result<Vec<f64>> {
        let Row { heads, kv_heads, q_len, kv_len, head_dim, head_dim_v, options, .. } = *self;
        let wide =
            |x: &Operand<T>, heads, len, dim| Ok::<_, QuantError>(self.by_head(&x.numbers(widen)?, heads, len, dim));
        // `[q_len, kv_len]` for every head.
        let bools = memory.bools.repeat(heads);
        let bias = memory.bias.repeat(heads);
        let mask = match self.mask {
            MaskName::None => None,
            MaskName::Bool => Some(Mask::Bool(&bools)),
            MaskName::Additive => Some(Mask::Additive(&bias)),
        };
        let problem = Problem {
            num_kv_heads: kv_heads,
            head_dim_v,
            softmax_scale: options.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt()),
            softcap: options.softcap,
            causal: options.causal,
            window: options.window,
            ..Problem::plain(1, heads, q_len, kv_len, head_dim)
        };
        let (k, v) = &memory.kv[0];
        let (q, k) = (wide(&memory.q, heads, q_len, head_dim)?, wide(k, kv_heads, kv_len, head_dim)?);
        let v = wide(v, kv_heads, kv_len, head_dim_v)?;
        let inputs = Inputs { q: &q, k: &k, v: &v, mask, sinks: None, alibi_slopes: None };
        Ok(naive(&problem, &inputs).out)
    }

    /// q, k and v of this row, and of one batch the error of what an engine makes of them.
    #[cfg(feature = "vulkan")]
    pub(super) fn numbers<T: Element>(&self, narrow: fn(f64) -> T) -> Result<[Vec<T>; 3]> {
        let memory = self.memory(narrow, 1)?;
        let of = |operand: Operand<T>| match operand {
            Operand::Numbers(numbers) => numbers,
            Operand::Codes(_) => Vec::new(),
        };
        let [(k, v)] = <[_; 1]>::try_from(memory.kv)
            .unwrap_or_else(|_| [(Operand::Numbers(Vec::new()), Operand::Numbers(Vec::new()))]);
        Ok([memory.q, k, v].map(of))
    }

    /// The relative L2 error of `got`, an out of this row as it lies (one batch), against the reference.
    #[cfg(feature = "vulkan")]
    pub(super) fn error_of<T: Element>(&self, got: &[f64], (narrow, widen): Casts<T>) -> Result<f64> {
        let expected = self.expected(&self.memory(narrow, 1)?, widen)?;
        Ok(relative_error(&self.by_head(got, self.heads, self.q_len, self.head_dim_v), &expected))
    }

    /// `values` of one batch as `[heads, len, dim]`.
    fn by_head(&self, values: &[f64], heads: usize, len: usize, dim: usize) -> Vec<f64> {
        if !self.is_bshd {
            return values.to_vec();
        }
        let rows = (0..heads).flat_map(|head| (0..len).map(move |i| (i * heads + head) * dim));
        rows.flat_map(|at| values[at..][..dim].iter().copied()).collect()
    }

    /// Checks, then times in rounds.
    pub(crate) fn measure<T: Element>(
        &self,
        engine: &Engine,
        meter: &Meter,
        budget: f64,
        (narrow, widen): Casts<T>,
    ) -> Result<Timing> {
        let one = self.memory(narrow, 1)?;
        let plan = self.plan(engine, &one)?;
        let error = self.smaller().error(engine, narrow, widen)?;
        let limit = self.limit();
        let mut timing = Timing { plan, error, limit, seconds: Vec::new(), calls: 0, ceilings: Ceilings::default() };
        if !timing.is_right() {
            return Ok(timing);
        }
        let bytes = one.kv.first().map_or(0, |(k, v)| k.bytes() + v.bytes());
        let memory = match self.copies(bytes, meter, timing.plan.key().kernel) {
            1 => one,
            copies => self.memory(narrow, copies)?,
        };
        let mut out = self.new_out()?;
        let plan = Arc::clone(&timing.plan);
        let mut call = |n: usize| {
            let tensors = self.tensors(&memory, n % memory.kv.len(), &mut out)?;
            engine.run(&plan, &mut Operands::check(tensors, plan.spec())?)?;
            Ok::<_, QuantError>(())
        };
        // Two calls: threads start in the first.
        call(0)?;
        let start = Instant::now();
        call(1)?;
        // A look at the clock costs tens of nanoseconds: short calls are timed in groups of 0.2 ms.
        let group = (2e-4 / start.elapsed().as_secs_f64()).ceil().clamp(1.0, 1e5) as usize;
        for _ in 0..ROUNDS {
            timing.ceilings = timing.ceilings.max(meter.read());
            let (round, mut samples) = (Instant::now(), Vec::new());
            while samples.is_empty() || round.elapsed() < Duration::from_secs_f64(budget / ROUNDS as f64) {
                let start = Instant::now();
                for _ in 0..group {
                    timing.calls += 1;
                    call(timing.calls)?;
                }
                samples.push(start.elapsed().as_secs_f64() / group as f64);
            }
            timing.seconds.push(median(&mut samples));
        }
        Ok(timing)
    }

    /// What rounding may do: two roundings of the result's precision, and of sums of this size; of int8, what it rounds besides.
    pub(super) fn limit(&self) -> f64 {
        match self.dtype {
            _ if self.options.compute == Compute::Int8 => 3e-2,
            DType::F64 => 1e-13,
            DType::F32 => 3e-6,
            DType::F16 => 1e-3,
            _ => 8e-3,
        }
    }

    /// How many copies of k and v of so many bytes a row goes through: a token that is decoded finds its cache in memory, not in the
    /// processor's.
    fn copies(&self, bytes: usize, meter: &Meter, kernel: Kernel) -> usize {
        if kernel != Kernel::Decode || bytes == 0 {
            return 1;
        }
        meter.bytes().div_ceil(bytes).clamp(1, (COPIES_BYTES / bytes).clamp(1, 1024))
    }
}

/// The middle of some numbers; NaN of none.
pub(crate) fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use rapt::{Format, Granularity, ScaleLayout, TensorLayout};

    use super::*;

    #[test]
    fn the_check_takes_every_option_and_layout() {
        let engine = Engine::new(Some(2)).unwrap();
        let options = Options::default();
        let scheme = |format, granularity| Some(Scheme::new(format, granularity, ScaleLayout::Plain).unwrap());
        let int8 = scheme(Format::Int8, Some(Granularity::Token));
        let out_of_codes = Options { out_dtype: Some(DType::F32), ..options };
        for (mask, options, is_bshd, codes) in [
            (MaskName::None, options, false, Qkv::default()),
            (MaskName::Bool, options.with_causal(Causal::BottomRight), true, Qkv::default()),
            (MaskName::Additive, options.with_window(Some(40), None).with_softcap(2.0), true, Qkv::default()),
            (MaskName::None, options, true, Qkv { q: None, k: int8, v: scheme(Format::Nvfp4, None) }),
            (MaskName::Bool, out_of_codes, false, Qkv { q: int8, k: int8, v: None }),
            (
                MaskName::Bool,
                options.with_compute(Compute::Int8),
                true,
                Qkv { q: None, k: int8, v: scheme(Format::Int8, Some(Granularity::Tensor)) },
            ),
        ] {
            let is_plain = codes == Qkv::default();
            let options = options.with_layout(if is_bshd { TensorLayout::Bshd } else { TensorLayout::Bhsd });
            let row = Row {
                batch: 3,
                heads: 8,
                kv_heads: 4,
                q_len: 90,
                kv_len: 700,
                head_dim: 24,
                head_dim_v: 17,
                dtype: if is_plain { DType::F64 } else { DType::F32 },
                mask,
                codes,
                options,
                is_bshd,
            };
            let error = |row: &Row| match row.dtype {
                DType::F64 => row.smaller().error::<f64>(&engine, |x| x, |x| x).unwrap(),
                _ => row.smaller().error::<f32>(&engine, |x| x as f32, f64::from).unwrap(),
            };
            for row in [row, Row { q_len: 1, ..row }] {
                assert!(error(&row) < row.limit(), "{}: {:e}", row.name(), error(&row));
            }
        }
    }

    #[test]
    fn the_error_is_relative() {
        assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert!((relative_error(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-15);
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert!(median(&mut []).is_nan());
    }
}
