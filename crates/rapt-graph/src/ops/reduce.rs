//! Reductions: one number of all those along some dimensions.
//!
//! Sums, means and norms accumulate in f64 and round once; integers and booleans sum to int64 with wrap-around. A NaN among
//! the numbers is the result of sums, extrema and norms, and the place of the first NaN is that of an extremum. Of equal
//! numbers the first one's place counts. Results lie row-major.

use rapt_core::{DType, float64};

use super::shape::{
    cells, dims_of, fresh, misfit, need_float, need_number, need_plain, pick, places, row_major, scalar_float,
};
use crate::number::is_float;
use crate::promote::DEFAULT_FLOAT;
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Scalar, Shapes, Tensor, ValueId};

/// A reduction.
#[derive(Clone, Debug, PartialEq)]
pub enum Reduce {
    /// One result per element of the dimensions that stay.
    Fold {
        /// What is made of the numbers.
        fold: Fold,
        /// The tensor.
        input: ValueId,
        /// The dimensions that go; `None` is all of them.
        dims: Option<Vec<Int>>,
        /// Whether they stay with size 1.
        keepdim: bool,
        /// The dtype that the numbers are converted to first.
        dtype: Option<DType>,
    },
    /// `max.dim` and `min.dim`: the extremum and its place along one dimension.
    Extremum {
        /// Whether the largest counts.
        largest: bool,
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
        /// Whether it stays with size 1.
        keepdim: bool,
    },
    /// `var_mean` and `std_mean`.
    Moments {
        /// The correction of the variance.
        correction: Scalar,
        /// Whether the first result is the standard deviation.
        root: bool,
        /// The tensor.
        input: ValueId,
        /// The dimensions that go; `None` is all of them.
        dims: Option<Vec<Int>>,
        /// Whether they stay with size 1.
        keepdim: bool,
    },
    /// `aminmax`: the smallest and the largest.
    Extremes {
        /// The tensor.
        input: ValueId,
        /// The dimension, or all of them.
        dim: Option<i64>,
        /// Whether the dimensions stay with size 1.
        keepdim: bool,
    },
    /// `argmax` and `argmin`.
    Place {
        /// Whether the largest counts.
        largest: bool,
        /// The tensor.
        input: ValueId,
        /// The dimension, or the flattened tensor.
        dim: Option<i64>,
        /// Whether the dimensions stay with size 1.
        keepdim: bool,
    },
}

/// What a reduction makes of the numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fold {
    /// The sum; 0 of none.
    Sum,
    /// The product; 1 of none.
    Product,
    /// The mean; NaN of none.
    Mean,
    /// The sum of what is not NaN.
    NanSum,
    /// The mean of what is not NaN.
    NanMean,
    /// Whether one is other than 0.
    Any,
    /// Whether all are other than 0.
    All,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// The vector norm of this order.
    Norm(Scalar),
    /// The variance: squares of distances from the mean, divided by their number less a correction.
    Variance {
        /// The correction.
        correction: Scalar,
        /// Whether the result is its root, the standard deviation.
        root: bool,
    },
    /// The logarithm of the sum of exponentials; −∞ of none.
    LogSumExp,
    /// How many are other than 0.
    Count,
}

impl Reduce {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Reduce, OpError>> {
        use Fold::{All, Any, Max, Mean, Min, NanMean, NanSum, Product, Sum};
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "sum.dim_IntList" | "sum.default" => fold(args, Sum),
            "mean.dim" | "mean.default" => fold(args, Mean),
            "nansum.default" => fold(args, NanSum),
            "nanmean.default" => fold(args, NanMean),
            "prod.dim_int" | "prod.default" => fold(args, Product),
            "any.dim" | "any.dims" | "any.default" => fold(args, Any),
            "all.dim" | "all.dims" | "all.default" => fold(args, All),
            "amax.default" | "max.default" => fold(args, Max),
            "amin.default" | "min.default" => fold(args, Min),
            "linalg_vector_norm.default" => norm(args, "ord"),
            "norm.Scalar" | "norm.ScalarOpt_dim" | "norm.ScalarOpt_dim_dtype" | "norm.ScalarOpt_dtype" => {
                norm(args, "p")
            }
            "linalg_norm.default" if !is_by_rank(args).unwrap_or(false) => norm(args, "ord"),
            "linalg_norm.ord_str" | "linalg_matrix_norm.str_ord" if is_frobenius(args) => frobenius_norm(args),
            "frobenius_norm.dim" => fold(args, Fold::Norm(TWO)),
            "var.default" | "var.dim" | "var.correction" => {
                correction(args).and_then(|correction| fold(args, Fold::Variance { correction, root: false }))
            }
            "std.default" | "std.dim" | "std.correction" => {
                correction(args).and_then(|correction| fold(args, Fold::Variance { correction, root: true }))
            }
            "var_mean.default" | "var_mean.dim" | "var_mean.correction" => moments(args, false),
            "std_mean.default" | "std_mean.dim" | "std_mean.correction" => moments(args, true),
            "logsumexp.default" => fold(args, Fold::LogSumExp),
            "count_nonzero.dim_IntList" | "count_nonzero.default" => fold(args, Fold::Count),
            "max.dim" => extremum(args, true),
            "min.dim" => extremum(args, false),
            "aminmax.default" => extremes(args),
            "argmax.default" => place(args, true),
            "argmin.default" => place(args, false),
            _ => return None,
        })
        .map(|op| op.and_then(|op| keep_all_of_no_dims(target, op)))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Reduce::Fold { fold, input, keepdim, dtype, .. } => {
                let meta = shapes.meta(*input)?;
                let dims = self.dims(shapes, meta)?;
                let dtype = fold.result(meta.dtype, *dtype)?;
                let none = dims.iter().any(|&d| meta.shape[d] == 0);
                if none && !fold.has_neutral(shapes)? {
                    return misfit(format!("{fold:?} over no elements of a tensor of shape {:?}", meta.shape));
                }
                Ok(vec![fresh(dtype, &reduced(&meta.shape, &dims, *keepdim))?])
            }
            Reduce::Moments { input, keepdim, .. } => {
                let meta = shapes.meta(*input)?;
                need_float("a variance", meta.dtype)?;
                let shape = reduced(&meta.shape, &self.dims(shapes, meta)?, *keepdim);
                Ok(vec![fresh(meta.dtype, &shape)?, fresh(meta.dtype, &shape)?])
            }
            Reduce::Extremum { input, keepdim, .. } => {
                let meta = shapes.meta(*input)?;
                need_plain("an extremum", meta.dtype)?;
                let dims = self.dims(shapes, meta)?;
                let shape = reduced(&meta.shape, &dims, *keepdim);
                need_elements(meta, &dims)?;
                Ok(vec![fresh(meta.dtype, &shape)?, fresh(DType::I64, &shape)?])
            }
            Reduce::Extremes { input, keepdim, .. } => {
                let meta = shapes.meta(*input)?;
                need_plain("an extremum", meta.dtype)?;
                let dims = self.dims(shapes, meta)?;
                need_elements(meta, &dims)?;
                let shape = reduced(&meta.shape, &dims, *keepdim);
                Ok(vec![fresh(meta.dtype, &shape)?, fresh(meta.dtype, &shape)?])
            }
            Reduce::Place { input, keepdim, .. } => {
                let meta = shapes.meta(*input)?;
                need_number("an extremum's place", meta.dtype)?;
                let dims = self.dims(shapes, meta)?;
                need_elements(meta, &dims)?;
                Ok(vec![fresh(DType::I64, &reduced(&meta.shape, &dims, *keepdim))?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (Reduce::Fold { input, .. }
        | Reduce::Moments { input, .. }
        | Reduce::Extremum { input, .. }
        | Reduce::Extremes { input, .. }
        | Reduce::Place { input, .. }) = self;
        let input = eval.tensor(*input)?;
        let dims = self.dims(eval, &input.meta)?;
        let (starts, steps) = kept_and_reduced(&input.meta.shape, &dims);
        let x = cells(input);
        match self {
            Reduce::Fold { fold, dtype, .. } => {
                let to = fold.operand(input.meta.dtype, *dtype);
                let x = input.cast(to, eval.precision());
                outs[0].write(eval.precision(), fold.all(eval, &x, &starts, &steps)?);
            }
            Reduce::Moments { correction, root, .. } => {
                let first = Fold::Variance { correction: *correction, root: *root };
                outs[0].write(eval.precision(), first.all(eval, &x, &starts, &steps)?);
                if let Cells::Float(x) = &x {
                    let along = |start: &usize| steps.iter().map(|step| x[start + step]).collect::<Vec<f64>>();
                    let means = starts.iter().map(|start| running_mean(&along(start)));
                    outs[1].write_floats(eval.precision(), means.collect::<Vec<_>>());
                }
            }
            Reduce::Extremum { largest, .. } => {
                let at = extrema(&x, &starts, &steps, *largest);
                outs[0].write(eval.precision(), pick(&x, at.iter().zip(&starts).map(|(&i, start)| start + steps[i])));
                outs[1].write_ints(at.into_iter().map(to_i64));
            }
            Reduce::Extremes { .. } => {
                for (out, largest) in outs.iter().zip([false, true]) {
                    let at = extrema(&x, &starts, &steps, largest);
                    out.write(eval.precision(), pick(&x, at.iter().zip(&starts).map(|(&i, start)| start + steps[i])));
                }
            }
            Reduce::Place { largest, .. } => {
                outs[0].write_ints(extrema(&x, &starts, &steps, *largest).into_iter().map(to_i64));
            }
        }
        Ok(())
    }

    /// The dimensions that go, in ascending order.
    fn dims(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<Vec<usize>, OpError> {
        match self {
            Reduce::Fold { dims: Some(dims), .. } | Reduce::Moments { dims: Some(dims), .. } => {
                dims_of(meta, &shapes.ints(dims)?)
            }
            Reduce::Extremum { dim, .. }
            | Reduce::Extremes { dim: Some(dim), .. }
            | Reduce::Place { dim: Some(dim), .. } => dims_of(meta, &[*dim]),
            Reduce::Fold { dims: None, .. }
            | Reduce::Moments { dims: None, .. }
            | Reduce::Extremes { dim: None, .. }
            | Reduce::Place { dim: None, .. } => Ok((0..meta.rank()).collect()),
        }
    }
}

impl Fold {
    /// The dtype that the numbers are converted to before anything else.
    fn operand(self, input: DType, dtype: Option<DType>) -> DType {
        match (self, dtype) {
            (_, Some(dtype)) => dtype,
            (Fold::Sum | Fold::NanSum | Fold::Product, None) if !is_float(input) => DType::I64,
            // ATen makes floats of integers here.
            (Fold::LogSumExp, None) if !is_float(input) => DEFAULT_FLOAT,
            _ => input,
        }
    }

    fn result(self, input: DType, dtype: Option<DType>) -> Result<DType, OpError> {
        need_plain("a reduction", input)?;
        let operand = self.operand(input, dtype);
        need_plain("a reduction", operand)?;
        match self {
            // A boolean sum is asked for by dtype alone, and PyTorch's is whether one is other than 0.
            Fold::Sum | Fold::NanSum | Fold::Product | Fold::Max | Fold::Min => Ok(operand),
            Fold::Mean | Fold::NanMean => need_float("a mean", operand).map(|()| operand),
            Fold::Variance { .. } => need_float("a variance", operand).map(|()| operand),
            Fold::LogSumExp => Ok(operand),
            Fold::Count => Ok(DType::I64),
            Fold::Norm(_) => {
                need_float("a norm", input)?;
                need_float("a norm", operand).map(|()| operand)
            }
            // Of uint8, and of it alone, PyTorch gives uint8.
            Fold::Any | Fold::All => Ok(if input == DType::U8 { DType::U8 } else { DType::Bool }),
        }
    }

    fn has_neutral(self, shapes: &dyn Shapes) -> Result<bool, OpError> {
        Ok(match self {
            Fold::Max | Fold::Min => false,
            Fold::Norm(ord) => {
                let ord = scalar_float(shapes, ord)?;
                ord >= 0.0 && ord != f64::INFINITY
            }
            _ => true,
        })
    }

    /// The results for the elements at `start + step`.
    fn all(self, eval: &dyn Eval, x: &Cells, starts: &[usize], steps: &[usize]) -> Result<Cells, OpError> {
        let ord = match self {
            Fold::Norm(number) | Fold::Variance { correction: number, .. } => scalar_float(eval, number)?,
            _ => 0.0,
        };
        Ok(match (self, x) {
            (Fold::Max | Fold::Min, x) => {
                let at = extrema(x, starts, steps, self == Fold::Max);
                pick(x, at.into_iter().zip(starts).map(|(i, start)| start + steps[i]))
            }
            (Fold::Any | Fold::All, x) => {
                let set = |p: usize| match x {
                    Cells::Float(x) => x[p] != 0.0,
                    Cells::Int(x) => x[p] != 0,
                };
                let any = |start: usize| steps.iter().any(|step| set(start + step));
                let all = |start: usize| steps.iter().all(|step| set(start + step));
                let one = |&start| i64::from(if self == Fold::Any { any(start) } else { all(start) });
                Cells::Int(starts.iter().map(one).collect())
            }
            (Fold::Count, x) => {
                let set = |p: usize| match x {
                    Cells::Float(x) => x[p] != 0.0,
                    Cells::Int(x) => x[p] != 0,
                };
                Cells::Int(starts.iter().map(|&s| to_i64(steps.iter().filter(|&step| set(s + step)).count())).collect())
            }
            (_, Cells::Int(x)) => {
                let along = |start: usize| steps.iter().map(move |step| x[start + step]);
                let one = |&start: &usize| match self {
                    Fold::Product => along(start).fold(1, i64::wrapping_mul),
                    _ => along(start).fold(0, i64::wrapping_add),
                };
                Cells::Int(starts.iter().map(one).collect())
            }
            (_, Cells::Float(x)) => {
                let along = |start: usize| steps.iter().map(move |step| x[start + step]);
                let one = |&start: &usize| match self {
                    Fold::Product => along(start).product(),
                    Fold::Mean => along(start).sum::<f64>() / steps.len() as f64,
                    Fold::NanSum => along(start).filter(|x| !x.is_nan()).fold(0.0, |sum, x| sum + x),
                    Fold::NanMean => {
                        let numbers = || along(start).filter(|x| !x.is_nan());
                        numbers().sum::<f64>() / numbers().count() as f64
                    }
                    Fold::Norm(_) => vector_norm(along(start), ord),
                    Fold::Variance { root, .. } => {
                        let variance = variance(along(start), steps.len() as f64, ord);
                        if root { variance.sqrt() } else { variance }
                    }
                    Fold::LogSumExp => log_sum_exp(along(start)),
                    // Not `sum`, whose neutral element is −0.
                    _ => along(start).fold(0.0, |sum, x| sum + x),
                };
                Cells::Float(starts.iter().map(one).collect())
            }
        })
    }
}

/// The mean, by way of what the first sum lost.
fn mean(x: impl Iterator<Item = f64> + Clone, n: f64) -> f64 {
    let first = x.clone().sum::<f64>() / n;
    let rest = x.fold(0.0, |sum, x| sum + (x - first)) / n;
    // The distances from an infinite mean say nothing.
    if rest.is_finite() { first + rest } else { first }
}

/// The mean as `var_mean` gives it: PyTorch moves it by each number's distance from it, so that what follows a number that is not
/// finite makes it NaN.
fn running_mean(x: &[f64]) -> f64 {
    match x.split_last() {
        Some((_, before)) if before.iter().any(|x| !x.is_finite()) => f64::NAN,
        _ => mean(x.iter().copied(), x.len() as f64),
    }
}

/// `Σ (x − mean)² / (n − correction)`; a divisor below 0 counts as 0.
fn variance(x: impl Iterator<Item = f64> + Clone, n: f64, correction: f64) -> f64 {
    let mean = mean(x.clone(), n);
    let squares = x.fold(0.0, |sum, x| sum + (x - mean) * (x - mean));
    squares / (n - correction).max(0.0)
}

/// By way of the greatest number, which is taken out of the sum unless it is infinite.
fn log_sum_exp(x: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = x.clone().fold(f64::NEG_INFINITY, f64::max);
    let max = if max.is_infinite() { 0.0 } else { max };
    x.map(|x| (x - max).exp()).fold(0.0, |sum, x| sum + x).ln() + max
}

/// `(Σ |x|^ord)^(1/ord)`, at 0 the number of those other than 0, at ±∞ the extremum.
pub(super) fn vector_norm(x: impl Iterator<Item = f64>, ord: f64) -> f64 {
    let x = x.map(f64::abs);
    let worst = |a: f64, b: f64, better: bool| if a.is_nan() || (!b.is_nan() && !better) { a } else { b };
    if ord == f64::INFINITY {
        x.fold(0.0, |a, b| worst(a, b, b > a))
    } else if ord == f64::NEG_INFINITY {
        x.fold(f64::INFINITY, |a, b| worst(a, b, b < a))
    } else if ord == 0.0 {
        x.map(|x| f64::from(u8::from(x != 0.0))).sum()
    } else if ord == 1.0 {
        x.fold(0.0, |sum, x| sum + x)
    } else if ord == 2.0 {
        x.fold(0.0, |sum, x| sum + x * x).sqrt()
    } else {
        float64::pow(x.fold(0.0, |sum, x| sum + float64::pow(x, ord)), 1.0 / ord)
    }
}

/// The step at which each lane has its extremum: the first NaN, else the first of the extremes.
fn extrema(x: &Cells, starts: &[usize], steps: &[usize], largest: bool) -> Vec<usize> {
    let better = |p: usize, than: usize| match x {
        Cells::Float(x) if x[than].is_nan() => false,
        Cells::Float(x) => x[p].is_nan() || if largest { x[p] > x[than] } else { x[p] < x[than] },
        Cells::Int(x) if largest => x[p] > x[than],
        Cells::Int(x) => x[p] < x[than],
    };
    let one = |&start: &usize| {
        (1..steps.len()).fold(0, |best, i| if better(start + steps[i], start + steps[best]) { i } else { best })
    };
    starts.iter().map(one).collect()
}

/// The shape without these dimensions, or with 1 in their place.
pub(super) fn reduced(shape: &[i64], dims: &[usize], keepdim: bool) -> Vec<i64> {
    let one = |(d, &n): (usize, &i64)| match dims.contains(&d) {
        true if keepdim => Some(1),
        true => None,
        false => Some(n),
    };
    shape.iter().enumerate().filter_map(one).collect()
}

/// The places of the elements of a row-major tensor: those of the dimensions that stay, plus those of the ones that go.
pub(super) fn kept_and_reduced(shape: &[i64], dims: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let strides = row_major(shape);
    let part = |go: bool| {
        let of = (0..shape.len()).filter(|d| dims.contains(d) == go);
        let (sizes, strides): (Vec<i64>, Vec<i64>) = of.map(|d| (shape[d], strides[d])).unzip();
        places(&sizes, &strides)
    };
    (part(false), part(true))
}

fn to_i64(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn need_elements(meta: &Meta, dims: &[usize]) -> Result<(), OpError> {
    if dims.iter().any(|&d| meta.shape[d] == 0) {
        return misfit(format!("an extremum over no elements of a tensor of shape {:?}", meta.shape));
    }
    Ok(())
}

/// An empty list of dimensions is all of them, but none for `any.dims` and `all.dims`.
fn keep_all_of_no_dims(target: &str, mut op: Reduce) -> Result<Reduce, OpError> {
    if let Reduce::Fold { dims, .. } = &mut op
        && dims.as_ref().is_some_and(Vec::is_empty)
        && !target.ends_with(".dims")
    {
        *dims = None;
    }
    Ok(op)
}

fn fold(args: &Args<'_>, fold: Fold) -> Result<Reduce, OpError> {
    Ok(Reduce::Fold {
        fold,
        input: args.tensor("self")?,
        dims: args.opt_ints("dim")?,
        keepdim: args.bool_or("keepdim", false)?,
        dtype: args.opt_dtype("dtype")?,
    })
}

const TWO: Scalar = Scalar::Int(Int::Known(2));

fn norm(args: &Args<'_>, order: &str) -> Result<Reduce, OpError> {
    fold(args, Fold::Norm(args.opt_scalar(order)?.unwrap_or(TWO)))
}

/// Whether `linalg_norm` is a matrix's, or one by the tensor's rank: an order, and not one dimension.
pub(super) fn is_by_rank(args: &Args<'_>) -> Result<bool, OpError> {
    Ok(args.opt_scalar("ord")?.is_some() && args.opt_ints("dim")?.is_none_or(|dims| dims.len() != 1))
}

/// Whether the order is the Frobenius norm's name, or none.
pub(super) fn is_frobenius(args: &Args<'_>) -> bool {
    matches!(args.opt_str("ord"), Ok(None | Some("fro")))
}

/// The Frobenius norm of matrices, which lie along the last two dimensions unless `dim` says others.
fn frobenius_norm(args: &Args<'_>) -> Result<Reduce, OpError> {
    let mut op = fold(args, Fold::Norm(TWO))?;
    if let Reduce::Fold { dims, .. } = &mut op {
        dims.get_or_insert_with(|| vec![Int::Known(-2), Int::Known(-1)]);
    }
    Ok(op)
}

/// The correction of a variance: a number, or one whether it is unbiased; 1 where neither is said.
fn correction(args: &Args<'_>) -> Result<Scalar, OpError> {
    let number = Scalar::Int(Int::Known(i64::from(args.bool_or("unbiased", true)?)));
    Ok(args.opt_scalar("correction")?.unwrap_or(number))
}

fn moments(args: &Args<'_>, root: bool) -> Result<Reduce, OpError> {
    Ok(Reduce::Moments {
        correction: correction(args)?,
        root,
        input: args.tensor("self")?,
        dims: args.opt_ints("dim")?.filter(|dims| !dims.is_empty()),
        keepdim: args.bool_or("keepdim", false)?,
    })
}

fn extremum(args: &Args<'_>, largest: bool) -> Result<Reduce, OpError> {
    Ok(Reduce::Extremum {
        largest,
        input: args.tensor("self")?,
        dim: args.known_int("dim")?,
        keepdim: args.bool_or("keepdim", false)?,
    })
}

fn extremes(args: &Args<'_>) -> Result<Reduce, OpError> {
    let dim = args.opt_int("dim")?.map(|_| args.known_int("dim")).transpose()?;
    Ok(Reduce::Extremes { input: args.tensor("self")?, dim, keepdim: args.bool_or("keepdim", false)? })
}

fn place(args: &Args<'_>, largest: bool) -> Result<Reduce, OpError> {
    Ok(Reduce::Place {
        largest,
        input: args.tensor("self")?,
        dim: args.opt_int("dim")?.map(|_| args.known_int("dim")).transpose()?,
        keepdim: args.bool_or("keepdim", false)?,
    })
}
