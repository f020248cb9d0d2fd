//! Resizing of lines, images and volumes: nearest (both kinds), linear, cubic, and the two smoothed ones that look at as many
//! elements as one of the result covers.
//!
//! Every position of the result is a weighted sum of the input's along each dimension in turn: `y[o] = Σ_i w[o, i] · x[i]`. Weights and
//! sums are f64, rounded once; the nearest position is found in float32, as PyTorch's kernels find it. A weight of 0 counts: 0 times an
//! infinity is NaN. The smoothed ones leave a dimension that keeps its size alone. The result lies channels-last where the input does.
//!
//! Deliberately absent: `upsample_nearest2d.vec` and `upsample_bilinear2d.vec`, which have kernels and are in `pool.rs`.

use rapt_core::DType;

use super::pool::{linear_weights, nearest, scale_of};
use super::shape::{bounded, count, fresh_in_format, is_channels_last, misfit, need_float, opt_floats, refuse};
use crate::{Args, Cells, Eval, Int, OpError, Out, Shapes, Tensor, ValueId};

/// A resizing.
#[derive(Clone, Debug, PartialEq)]
pub struct Resample {
    /// `[batch, channels, ...]`.
    input: ValueId,
    /// The sizes of the result, or nothing where the factors say them.
    size: Option<Vec<Int>>,
    /// The factor of each dimension, where one is said.
    factors: Vec<Option<f64>>,
    /// What the weights are.
    filter: Filter,
}

/// The weights of a resizing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filter {
    /// The element at `⌊o · scale⌋`.
    Nearest,
    /// The element at `⌊(o + ½) · scale⌋`.
    NearestExact,
    /// Two neighbours; whether corners stay corners.
    Linear(bool),
    /// Four neighbours, by the cubic of A = −0.75.
    Cubic(bool),
    /// A triangle over what a position covers.
    SmoothLinear(bool),
    /// The cubic of A = −0.5 over what a position covers.
    SmoothCubic(bool),
}

/// For each position of the result, positions of the input and their weights.
type Taps = Vec<Vec<(usize, f64)>>;

impl Resample {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Resample, OpError>> {
        let (name, overload) = target.strip_prefix("torch.ops.aten.")?.split_once('.')?;
        let corners = || args.bool_or("align_corners", false);
        let (filter, spatial) = match name {
            "upsample_nearest1d" => (Ok(Filter::Nearest), 1),
            "upsample_nearest2d" => (Ok(Filter::Nearest), 2),
            "upsample_nearest3d" => (Ok(Filter::Nearest), 3),
            "_upsample_nearest_exact1d" => (Ok(Filter::NearestExact), 1),
            "_upsample_nearest_exact2d" => (Ok(Filter::NearestExact), 2),
            "_upsample_nearest_exact3d" => (Ok(Filter::NearestExact), 3),
            "upsample_linear1d" => (corners().map(Filter::Linear), 1),
            "upsample_bilinear2d" => (corners().map(Filter::Linear), 2),
            "upsample_trilinear3d" => (corners().map(Filter::Linear), 3),
            "upsample_bicubic2d" => (corners().map(Filter::Cubic), 2),
            "_upsample_bilinear2d_aa" => (corners().map(Filter::SmoothLinear), 2),
            "_upsample_bicubic2d_aa" => (corners().map(Filter::SmoothCubic), 2),
            _ => return None,
        };
        Some(match overload {
            "vec" => filter.and_then(|filter| by_list(args, filter, spatial)),
            "default" => filter.and_then(|filter| by_name(args, filter, spatial)),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        let nearest = matches!(self.filter, Filter::Nearest | Filter::NearestExact);
        if !(nearest && meta.dtype == DType::U8) {
            need_float("resizing", meta.dtype)?;
        }
        let shape = self.shape(shapes, &meta.shape)?;
        bounded(&shape)?;
        Ok(vec![fresh_in_format(meta.dtype, &shape, is_channels_last(meta))?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let mut shape = input.meta.shape.clone();
        let mut x = input.floats();
        for (d, &factor) in self.factors.iter().enumerate() {
            let (from, to) = (shape[d + 2], outs[0].meta.shape[d + 2]);
            if from == to && matches!(self.filter, Filter::SmoothLinear(_) | Filter::SmoothCubic(_)) {
                continue;
            }
            let inner = shape[d + 3..].iter().map(|&n| count(n)).product();
            x = along(&x, count(from), inner, &self.taps(from, to, factor));
            shape[d + 2] = to;
        }
        outs[0].write(eval.precision(), Cells::Float(x));
        Ok(())
    }

    fn shape(&self, shapes: &dyn Shapes, input: &[i64]) -> Result<Vec<i64>, OpError> {
        let spatial = self.factors.len();
        if input.len() != spatial + 2 || input[2..].iter().any(|&n| n <= 0) {
            return misfit(format!("a resizing of {spatial} dimensions of shape {input:?}"));
        }
        let scaled = |(&n, factor): (&i64, &Option<f64>)| (n as f64 * factor.unwrap_or(1.0)) as i64;
        let size = match &self.size {
            Some(size) => shapes.ints(size)?,
            None => input[2..].iter().zip(&self.factors).map(scaled).collect(),
        };
        if size.len() != spatial || size.iter().any(|&n| n <= 0) {
            return misfit(format!("a resizing of shape {input:?} to {size:?}"));
        }
        Ok([&input[..2], &size[..]].concat())
    }

    fn taps(&self, from: i64, to: i64, factor: Option<f64>) -> Taps {
        let one = |(low, high, weight): (usize, usize, Option<f64>)| match weight {
            None => vec![(low, 1.0)],
            Some(weight) => vec![(low, 1.0 - weight), (high, weight)],
        };
        match self.filter {
            Filter::Nearest => nearest(from, to, factor).into_iter().map(one).collect(),
            Filter::NearestExact => nearest_exact(from, to, factor),
            Filter::Linear(corners) => linear_weights(from, to, factor, corners).into_iter().map(one).collect(),
            Filter::Cubic(corners) => cubic(from, to, scale_of(from, to, factor, corners), corners),
            Filter::SmoothLinear(corners) => {
                smooth(from, to, scale_of(from, to, factor, corners), 1.0, |x| (1.0 - x).max(0.0))
            }
            Filter::SmoothCubic(corners) => {
                smooth(from, to, scale_of(from, to, factor, corners), 2.0, |x| cubic_weight(x, -0.5))
            }
        }
    }
}

/// `y[.., o, ..] = Σ w · x[.., i, ..]` along a dimension of `size`, with `inner` elements from one to the next.
fn along(x: &[f64], size: usize, inner: usize, taps: &Taps) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len() / size.max(1) * taps.len());
    for block in x.chunks(size * inner.max(1)) {
        for taps in taps {
            y.extend((0..inner).map(|i| match taps[..] {
                // An element itself, not even its sign of zero changed.
                [(at, 1.0)] => block[at * inner + i],
                _ => taps.iter().fold(0.0, |sum, &(at, w)| sum + w * block[at * inner + i]),
            }));
        }
    }
    y
}

/// In f32, as PyTorch's kernel has it.
fn nearest_exact(from: i64, to: i64, factor: Option<f64>) -> Taps {
    let scale = match factor {
        Some(factor) if factor > 0.0 => (1.0 / factor) as f32,
        _ => from as f32 / to as f32,
    };
    let at = |o: i64| ((((o as f64 + 0.5) * f64::from(scale)) as f32).floor() as i64).min(from - 1);
    (0..to).map(|o| vec![(count(at(o)), 1.0)]).collect()
}

/// The weight of an element at a distance, by the cubic of Keys (1981) with the parameter `a`.
pub(super) fn cubic_weight(x: f64, a: f64) -> f64 {
    if x <= 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((x - 5.0) * x + 8.0) * x * a - 4.0 * a
    } else {
        0.0
    }
}

/// Four neighbours; those outside are the border's.
fn cubic(from: i64, to: i64, scale: f64, corners: bool) -> Taps {
    let one = |o: i64| {
        let at = if corners { scale * o as f64 } else { scale * (o as f64 + 0.5) - 0.5 };
        let low = at.floor();
        let tap = |k: i64| {
            let i = (low as i64).saturating_add(k);
            (count(i.clamp(0, from - 1)), cubic_weight((at - low - k as f64).abs(), -0.75))
        };
        (-1..=2).map(tap).collect()
    };
    (0..to).map(one).collect()
}

/// All elements that a position of the result covers, by a filter that is `reach` wide on each side; weights add up to 1.
fn smooth(from: i64, to: i64, scale: f64, reach: f64, filter: impl Fn(f64) -> f64) -> Taps {
    let (support, inverse) = (reach * scale.max(1.0), 1.0 / scale.max(1.0));
    let one = |o: i64| {
        let center = scale * (o as f64 + 0.5);
        let first = ((center - support + 0.5) as i64).max(0);
        let end = ((center + support + 0.5) as i64).min(from);
        // In PyTorch's order: a weight at the filter's edge is 0, or almost.
        let from_center = first as f64 - center;
        let weight = |i: i64| filter((((i - first) as f64 + from_center + 0.5) * inverse).abs());
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let sum = if sum == 0.0 { 1.0 } else { sum };
        (first..end).zip(weights).map(|(i, w)| (count(i), w / sum)).collect()
    };
    (0..to).map(one).collect()
}

fn by_list(args: &Args<'_>, filter: Filter, spatial: usize) -> Result<Resample, OpError> {
    let (size, factors) = (args.opt_ints("output_size")?, opt_floats(args, "scale_factors")?);
    let factors = match (&size, factors) {
        (Some(_), None) => vec![None; spatial],
        (None, Some(factors)) if factors.len() == spatial => factors.into_iter().map(Some).collect(),
        (_, factors) => return refuse("scale_factors", format!("{factors:?}"), "either sizes or factors are expected"),
    };
    Ok(Resample { input: args.tensor("input")?, size, factors, filter })
}

fn by_name(args: &Args<'_>, filter: Filter, spatial: usize) -> Result<Resample, OpError> {
    let names: &[&str] = match spatial {
        1 => &["scales"],
        2 => &["scales_h", "scales_w"],
        _ => &["scales_d", "scales_h", "scales_w"],
    };
    let factors = names.iter().map(|name| args.opt_float(name)).collect::<Result<_, _>>()?;
    // Some of them call their input `self`.
    let input = if args.raw("self").is_some() { "self" } else { "input" };
    Ok(Resample { input: args.tensor(input)?, size: Some(args.ints("output_size")?), factors, filter })
}
