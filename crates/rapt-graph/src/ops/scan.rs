//! What runs along a dimension and keeps it: `cumsum`, `softmax`, `log_softmax`, `diff`; and `histc`.
//!
//! `softmax(x)_i = exp(x_i − max x) / Σ_j exp(x_j − max x)`, in f64, rounded once: a lane of −∞ alone is NaN. Results lie
//! row-major, but those of `diff`, which lie as the difference of two views does.

use rapt_core::DType;

use super::shape::{
    Lanes, bounded, cells, fresh, like, misfit, need_float, need_plain, need_same, refuse, row_major, scalar_float,
};
use crate::number::{is_float, round};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Precision, Scalar, Shapes, Tensor, ValueId, strides};

/// An operation along a dimension.
#[derive(Clone, Debug, PartialEq)]
pub enum Scan {
    /// `cumsum`: each number plus all before it. Integers and booleans add up in int64.
    Cumsum {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
        /// The dtype that the numbers are converted to first.
        dtype: Option<DType>,
    },
    /// `softmax` and `log_softmax`.
    Softmax {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
        /// The dtype that the numbers are converted to first.
        dtype: Option<DType>,
        /// Whether the result is the logarithm.
        log: bool,
    },
    /// `diff`: each number less the one before it, `n` times; of booleans whether they differ.
    Diff {
        /// The tensor.
        input: ValueId,
        /// How often.
        n: Int,
        /// The dimension.
        dim: i64,
        /// What stands before the first number.
        prepend: Option<ValueId>,
        /// What stands after the last number.
        append: Option<ValueId>,
    },
    /// `histc`: how many numbers lie in each of `bins` equal parts of `[min, max]`; the last part has its end. Without a
    /// range the numbers' own counts.
    Histc {
        /// The tensor.
        input: ValueId,
        /// The number of parts.
        bins: Int,
        /// The least number that counts.
        min: Scalar,
        /// The greatest number that counts.
        max: Scalar,
    },
}

impl Scan {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Scan, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "cumsum.default" => cumsum(args),
            "softmax.int" => softmax(args, false),
            "log_softmax.int" => softmax(args, true),
            "_softmax.default" => softmax_core(args, false),
            "_log_softmax.default" => softmax_core(args, true),
            "diff.default" => diff(args),
            "histc.default" => histc(args),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Scan::Cumsum { input, dim, dtype } => {
                let meta = shapes.meta(*input)?;
                meta.dim(*dim)?;
                need_plain("a sum", meta.dtype)?;
                let dtype = cumsum_dtype(meta.dtype, *dtype);
                need_plain("a sum", dtype)?;
                Ok(vec![fresh(dtype, &meta.shape)?])
            }
            Scan::Softmax { input, dim, dtype, .. } => {
                let meta = shapes.meta(*input)?;
                meta.dim(*dim)?;
                need_plain("softmax", meta.dtype)?;
                let dtype = dtype.unwrap_or(meta.dtype);
                need_float("softmax", dtype)?;
                Ok(vec![fresh(dtype, &meta.shape)?])
            }
            Scan::Diff { .. } => Ok(vec![Out::Fresh(self.diff_meta(shapes)?)]),
            Scan::Histc { input, bins, .. } => {
                let meta = shapes.meta(*input)?;
                need_float("a histogram", meta.dtype)?;
                let bins = shapes.int(*bins)?;
                if bins <= 0 {
                    return refuse("bins", bins.to_string(), "it must be greater than 0");
                }
                Ok(vec![fresh(meta.dtype, &[bins])?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (precision, out) = (eval.precision(), &outs[0]);
        match self {
            Scan::Cumsum { input, dim, .. } => {
                let input = eval.tensor(*input)?;
                let lanes = Lanes::of(&input.meta.shape, input.meta.dim(*dim)?);
                let x = input.cast(out.meta.dtype, precision);
                out.write(precision, running_sums(x, lanes));
            }
            Scan::Softmax { input, dim, log, .. } => {
                let input = eval.tensor(*input)?;
                let lanes = Lanes::of(&input.meta.shape, input.meta.dim(*dim)?);
                let mut x = match input.cast(out.meta.dtype, precision) {
                    Cells::Float(x) => x,
                    Cells::Int(_) => return Err(OpError::Dtype { what: "softmax", dtype: out.meta.dtype }),
                };
                for start in lanes.starts() {
                    softmax_lane(&mut x, start, lanes, *log);
                }
                out.write_floats(precision, x);
            }
            Scan::Diff { .. } => self.diff_eval(eval, out)?,
            Scan::Histc { input, min, max, .. } => {
                let input = eval.tensor(*input)?;
                let range = (scalar_float(eval, *min)?, scalar_float(eval, *max)?);
                let bins = usize::try_from(out.meta.shape[0]).unwrap_or(0);
                let counts = histogram(&input.floats(), bins, range, input.meta.dtype, precision)?;
                out.write_floats(precision, counts);
            }
        }
        Ok(())
    }

    /// The operands of `diff` in the order that they are joined.
    fn parts(&self) -> Vec<ValueId> {
        match *self {
            Scan::Diff { input, prepend, append, .. } => [prepend, Some(input), append].into_iter().flatten().collect(),
            _ => Vec::new(),
        }
    }

    /// The form of a difference: that of two narrowed views subtracted, so often as asked.
    fn diff_meta(&self, shapes: &dyn Shapes) -> Result<Meta, OpError> {
        let Scan::Diff { input, n, dim, .. } = *self else { return misfit("no difference") };
        let mut meta = shapes.meta(input)?.clone();
        need_plain("a difference", meta.dtype)?;
        let (n, dim) = (shapes.int(n)?, meta.dim(dim)?);
        if meta.shape.is_empty() || n < 0 {
            return misfit(format!("a difference of order {n} of a tensor of {} dimensions", meta.rank()));
        }
        let parts = self.parts();
        if parts.len() > 1 && n > 0 {
            let mut shape = meta.shape.clone();
            shape[dim] = 0;
            for part in parts {
                let part = shapes.meta(part)?;
                need_same(meta.dtype, part.dtype)?;
                let fits =
                    part.rank() == shape.len() && (0..shape.len()).all(|d| d == dim || part.shape[d] == shape[d]);
                if !fits {
                    return misfit(format!("{:?} does not join {:?} along dimension {dim}", part.shape, meta.shape));
                }
                shape[dim] += part.shape[dim];
            }
            bounded(&shape)?;
            meta = Meta::contiguous(meta.dtype, &shape);
        }
        if n == 0 {
            return Ok(like(&meta, meta.dtype));
        }
        // PyTorch takes no more differences than there are numbers.
        for _ in 0..n.min(meta.shape[dim]) {
            let mut shape = meta.shape.clone();
            shape[dim] = (shape[dim] - 1).max(0);
            let part = Meta { shape, offset: 0, ..meta };
            meta = Meta { strides: strides::of_pointwise(&part.shape, &[&part, &part]), ..part };
        }
        if meta.shape[dim] == 0 {
            meta.strides = row_major(&meta.shape);
        }
        Ok(meta)
    }

    fn diff_eval(&self, eval: &dyn Eval, out: &Tensor) -> Result<(), OpError> {
        let Scan::Diff { input, n, dim, .. } = *self else { return Ok(()) };
        let input = eval.tensor(input)?;
        let (n, dim) = (eval.int(n)?, input.meta.dim(dim)?);
        let parts = if n == 0 {
            vec![input]
        } else {
            self.parts().into_iter().map(|id| eval.tensor(id)).collect::<Result<_, _>>()?
        };
        let lanes: Vec<Lanes> = parts.iter().map(|t| Lanes::of(&t.meta.shape, dim)).collect();
        let data: Vec<Cells> = parts.iter().map(|t| cells(t)).collect();
        let (outer, inner) = (lanes[0].outer, lanes[0].inner);
        let mut result = Cells::Float(Vec::new());
        if !is_float(out.meta.dtype) {
            result = Cells::Int(Vec::new());
        }
        // One lane at a time, written lane by lane: the place of its k-th number is that of row k.
        let size = usize::try_from(out.meta.shape[dim]).unwrap_or(0);
        match &mut result {
            Cells::Float(all) => all.resize(outer * size * inner, 0.0),
            Cells::Int(all) => all.resize(outer * size * inner, 0),
        }
        for o in 0..outer {
            for i in 0..inner {
                let at = |k: usize| (o * size + k) * inner + i;
                match &mut result {
                    Cells::Float(all) => {
                        let mut lane = joined(&data, &lanes, o, i, |c| if let Cells::Float(x) = c { x } else { &[] });
                        for _ in 0..n {
                            lane = lane.windows(2).map(|w| w[1] - w[0]).collect();
                        }
                        lane.into_iter().enumerate().for_each(|(k, x)| all[at(k)] = x);
                    }
                    Cells::Int(all) => {
                        let mut lane = joined(&data, &lanes, o, i, |c| if let Cells::Int(x) = c { x } else { &[] });
                        for _ in 0..n {
                            lane = lane.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
                            if out.meta.dtype == DType::Bool {
                                lane.iter_mut().for_each(|x| *x &= 1);
                            }
                        }
                        lane.into_iter().enumerate().for_each(|(k, x)| all[at(k)] = x);
                    }
                }
            }
        }
        out.write(eval.precision(), result);
        Ok(())
    }
}

/// A step of a computation in a dtype.
fn step(precision: Precision, dtype: DType, x: f64) -> f64 {
    if precision == Precision::Wide { x } else { round(dtype, x) }
}

/// The lane `(o, i)` of operands joined along it.
fn joined<T: Copy>(data: &[Cells], lanes: &[Lanes], o: usize, i: usize, of: impl Fn(&Cells) -> &[T]) -> Vec<T> {
    let one = |(cells, lanes): (&Cells, &Lanes)| {
        let x = of(cells);
        (0..lanes.size).map(|k| x[(o * lanes.size + k) * lanes.inner + i]).collect::<Vec<T>>()
    };
    data.iter().zip(lanes).flat_map(one).collect()
}

fn cumsum_dtype(input: DType, dtype: Option<DType>) -> DType {
    dtype.unwrap_or(if is_float(input) { input } else { DType::I64 })
}

fn running_sums(x: Cells, lanes: Lanes) -> Cells {
    match x {
        Cells::Float(mut x) => {
            for start in lanes.starts() {
                let mut sum = 0.0;
                for k in 0..lanes.size {
                    sum += x[start + k * lanes.inner];
                    x[start + k * lanes.inner] = sum;
                }
            }
            Cells::Float(x)
        }
        Cells::Int(mut x) => {
            for start in lanes.starts() {
                let mut sum = 0i64;
                for k in 0..lanes.size {
                    sum = sum.wrapping_add(x[start + k * lanes.inner]);
                    x[start + k * lanes.inner] = sum;
                }
            }
            Cells::Int(x)
        }
    }
}

fn softmax_lane(x: &mut [f64], start: usize, lanes: Lanes, log: bool) {
    let at = |k: usize| start + k * lanes.inner;
    // A NaN makes the whole lane NaN by way of the sum, so the maximum may skip it.
    let max = (0..lanes.size).map(|k| x[at(k)]).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = (0..lanes.size).map(|k| (x[at(k)] - max).exp()).sum();
    for k in 0..lanes.size {
        let shifted = x[at(k)] - max;
        x[at(k)] = if log { shifted - sum.ln() } else { shifted.exp() / sum };
    }
}

/// The counts. A number's part is computed in its dtype, as PyTorch's kernel does: the borders depend on its rounding.
fn histogram(
    x: &[f64],
    bins: usize,
    range: (f64, f64),
    dtype: DType,
    precision: Precision,
) -> Result<Vec<f64>, OpError> {
    let (mut min, mut max) = (step(precision, dtype, range.0), step(precision, dtype, range.1));
    if min == max && !x.is_empty() {
        min = x.iter().copied().fold(f64::INFINITY, |a, b| if b.is_nan() || b < a { b } else { a });
        max = x.iter().copied().fold(f64::NEG_INFINITY, |a, b| if b.is_nan() || b > a { b } else { a });
    }
    if min == max {
        (min, max) = (step(precision, dtype, min - 1.0), step(precision, dtype, max + 1.0));
    }
    if !min.is_finite() || !max.is_finite() || min > max {
        return misfit(format!("a histogram of the range [{min}, {max}]"));
    }
    let in_dtype = |x: f64| step(precision, dtype, x);
    let mut counts = vec![0.0; bins];
    for &x in x.iter().filter(|&&x| x >= min && x <= max) {
        let scaled = in_dtype(in_dtype(x - min) * bins as f64);
        let part = in_dtype(scaled / in_dtype(max - min)) as usize;
        counts[part.min(bins - 1)] += 1.0;
    }
    Ok(counts)
}

fn cumsum(args: &Args<'_>) -> Result<Scan, OpError> {
    Ok(Scan::Cumsum { input: args.tensor("self")?, dim: args.known_int("dim")?, dtype: args.opt_dtype("dtype")? })
}

fn softmax(args: &Args<'_>, log: bool) -> Result<Scan, OpError> {
    Ok(Scan::Softmax { input: args.tensor("self")?, dim: args.known_int("dim")?, dtype: args.opt_dtype("dtype")?, log })
}

fn softmax_core(args: &Args<'_>, log: bool) -> Result<Scan, OpError> {
    if args.bool_or("half_to_float", false)? {
        return refuse("half_to_float", "true", "PyTorch's CPU has no such kernel");
    }
    Ok(Scan::Softmax { input: args.tensor("self")?, dim: args.known_int("dim")?, dtype: None, log })
}

fn diff(args: &Args<'_>) -> Result<Scan, OpError> {
    Ok(Scan::Diff {
        input: args.tensor("self")?,
        n: args.int_or("n", 1)?,
        dim: args.known_int_or("dim", -1)?,
        prepend: args.opt_tensor("prepend")?,
        append: args.opt_tensor("append")?,
    })
}

fn histc(args: &Args<'_>) -> Result<Scan, OpError> {
    let zero = Scalar::Int(Int::Known(0));
    Ok(Scan::Histc {
        input: args.tensor("self")?,
        bins: args.int_or("bins", 100)?,
        min: args.opt_scalar("min")?.unwrap_or(zero),
        max: args.opt_scalar("max")?.unwrap_or(zero),
    })
}
