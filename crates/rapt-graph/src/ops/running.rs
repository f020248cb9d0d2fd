//! Running products, extrema and logarithms of sums along a dimension: `cumprod`, `cummax`, `cummin`, `logcumsumexp`.
//!
//! Products are computed in f64 and rounded once, integers and booleans multiply in int64 with wrap-around. Of equal extrema
//! the last one's place counts, and a NaN stays the extremum from its place on. Results lie row-major.

use rapt_core::DType;

use super::shape::{Lanes, cells, fresh, need_float, need_plain, pick};
use crate::number::is_float;
use crate::{Args, Cells, Eval, OpError, Out, Shapes, Tensor, ValueId};

/// A running product, extremum or logarithm.
#[derive(Clone, Debug, PartialEq)]
pub enum Running {
    /// `cumprod`.
    Product {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
        /// The dtype that the numbers are converted to first.
        dtype: Option<DType>,
    },
    /// `logcumsumexp`: the logarithm of the sum of the exponentials so far.
    LogSumExp {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
    },
    /// `cummax` and `cummin`: the extremum so far and its place.
    Extremum {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
        /// Whether the largest counts.
        largest: bool,
    },
}

impl Running {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Running, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "cumprod.default" => product(args),
            "logcumsumexp.default" => {
                args.tensor("self").and_then(|input| Ok(Running::LogSumExp { input, dim: args.known_int("dim")? }))
            }
            "cummax.default" => extremum(args, true),
            "cummin.default" => extremum(args, false),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (Running::Product { input, dim, .. }
        | Running::Extremum { input, dim, .. }
        | Running::LogSumExp { input, dim }) = self;
        let meta = shapes.meta(*input)?;
        meta.dim(*dim)?;
        need_plain("what runs along a dimension", meta.dtype)?;
        match self {
            Running::Product { dtype, .. } => {
                let own = if is_float(meta.dtype) { meta.dtype } else { DType::I64 };
                let dtype = dtype.unwrap_or(own);
                need_plain("a product", dtype)?;
                Ok(vec![fresh(dtype, &meta.shape)?])
            }
            Running::LogSumExp { .. } => {
                need_float("a logarithm", meta.dtype)?;
                Ok(vec![fresh(meta.dtype, &meta.shape)?])
            }
            Running::Extremum { .. } => Ok(vec![fresh(meta.dtype, &meta.shape)?, fresh(DType::I64, &meta.shape)?]),
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (Running::Product { input, dim, .. }
        | Running::Extremum { input, dim, .. }
        | Running::LogSumExp { input, dim }) = self;
        let input = eval.tensor(*input)?;
        let lanes = Lanes::of(&input.meta.shape, input.meta.dim(*dim)?);
        match self {
            Running::Product { .. } => {
                let x = input.cast(outs[0].meta.dtype, eval.precision());
                outs[0].write(eval.precision(), products(x, lanes));
            }
            Running::LogSumExp { .. } => {
                let mut x = input.floats();
                for start in lanes.starts() {
                    let mut sum = f64::NEG_INFINITY;
                    for k in 0..lanes.size {
                        let at = start + k * lanes.inner;
                        sum = log_add_exp(sum, x[at]);
                        x[at] = sum;
                    }
                }
                outs[0].write_floats(eval.precision(), x);
            }
            Running::Extremum { largest, .. } => {
                let x = cells(input);
                let (at, places) = extrema(&x, lanes, *largest);
                outs[0].write(eval.precision(), pick(&x, at));
                outs[1].write_ints(places);
            }
        }
        Ok(())
    }
}

/// `log(exp(a) + exp(b))`, by way of the greater one.
fn log_add_exp(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        return f64::NAN;
    }
    let (low, high) = (a.min(b), a.max(b));
    // Of two equal infinities no difference can be taken.
    if low == high && low.is_infinite() { high } else { high + (low - high).exp().ln_1p() }
}

fn products(x: Cells, lanes: Lanes) -> Cells {
    fn along<T: Copy>(x: &mut [T], lanes: Lanes, one: T, times: impl Fn(T, T) -> T) {
        for start in lanes.starts() {
            let mut product = one;
            for k in 0..lanes.size {
                let at = start + k * lanes.inner;
                product = times(product, x[at]);
                x[at] = product;
            }
        }
    }
    match x {
        Cells::Float(mut x) => {
            along(&mut x, lanes, 1.0, |a, b| a * b);
            Cells::Float(x)
        }
        Cells::Int(mut x) => {
            along(&mut x, lanes, 1, i64::wrapping_mul);
            Cells::Int(x)
        }
    }
}

/// Of each element the place of the extremum so far, in the tensor and in its lane.
fn extrema(x: &Cells, lanes: Lanes, largest: bool) -> (Vec<usize>, Vec<i64>) {
    let reaches = |p: usize, best: usize| match x {
        Cells::Float(x) if x[p].is_nan() => true,
        Cells::Float(x) if x[best].is_nan() => false,
        Cells::Float(x) if largest => x[p] >= x[best],
        Cells::Float(x) => x[p] <= x[best],
        Cells::Int(x) if largest => x[p] >= x[best],
        Cells::Int(x) => x[p] <= x[best],
    };
    let len = lanes.outer * lanes.size * lanes.inner;
    let (mut at, mut places) = (vec![0; len], vec![0; len]);
    for start in lanes.starts() {
        let mut best = 0;
        for k in 0..lanes.size {
            let place = |k: usize| start + k * lanes.inner;
            if reaches(place(k), place(best)) {
                best = k;
            }
            at[place(k)] = place(best);
            places[place(k)] = i64::try_from(best).unwrap_or(i64::MAX);
        }
    }
    (at, places)
}

fn product(args: &Args<'_>) -> Result<Running, OpError> {
    Ok(Running::Product { input: args.tensor("self")?, dim: args.known_int("dim")?, dtype: args.opt_dtype("dtype")? })
}

fn extremum(args: &Args<'_>, largest: bool) -> Result<Running, OpError> {
    Ok(Running::Extremum { input: args.tensor("self")?, dim: args.known_int("dim")?, largest })
}
