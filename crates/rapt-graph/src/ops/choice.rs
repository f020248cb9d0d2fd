//! One number of those along a dimension by its rank: `median`, `nanmedian`, `kthvalue`, and `mode`.
//!
//! NaN counts as the largest number. A median is the lower one of two, NaN where one number is; `nanmedian` passes NaN over. Of equal
//! numbers the first one's place counts; PyTorch selects before it sorts and may name the place of another equal number. A mode is the
//! most frequent number, the first of several in the order of C++'s `std::sort`: the least one, unless NaN, which equals nothing and
//! is neither less nor greater, stands between. Results lie row-major.

use rapt_core::DType;

use super::reduce::{kept_and_reduced, reduced};
use super::shape::{cells, count, fresh, misfit, need_number, pick};
use super::sort::compare;
use super::std_sort::std_sort;
use crate::number::is_float;
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId};

/// A choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The tensor.
    input: ValueId,
    /// The dimension, or the flattened tensor; then the place is no result.
    dim: Option<i64>,
    /// Whether it stays with size 1.
    keepdim: bool,
    /// What is chosen.
    which: Which,
}

/// What is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Which {
    Median,
    NanMedian,
    /// The k-th, counted from 1.
    Kth(Int),
    Mode,
}

impl Choice {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Choice, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "median.default" => all(args, Which::Median),
            "nanmedian.default" => all(args, Which::NanMedian),
            "median.dim" => along(args, Which::Median),
            "nanmedian.dim" => along(args, Which::NanMedian),
            "mode.default" => along(args, Which::Mode),
            "kthvalue.default" => args.int("k").and_then(|k| along(args, Which::Kth(k))),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        if !(self.which == Which::Mode && meta.dtype == DType::Bool) {
            need_number("a choice", meta.dtype)?;
        }
        let dims = self.dims(meta)?;
        let size = dims.iter().map(|&d| meta.shape[d]).product::<i64>();
        if let Which::Kth(k) = self.which {
            let k = shapes.int(k)?;
            if k < 1 || k > size {
                return misfit(format!("number {k} of {size}"));
            }
        }
        // The median of no numbers at all is a NaN, and of integers PyTorch's least one; no dimension of none has any.
        if size == 0 && (self.dim.is_some() || !is_float(meta.dtype)) {
            return misfit(format!("one of no elements of a tensor of shape {:?}", meta.shape));
        }
        let shape = reduced(&meta.shape, &dims, self.keepdim);
        let mut outs = vec![fresh(meta.dtype, &shape)?];
        if self.dim.is_some() {
            outs.push(fresh(DType::I64, &shape)?);
        }
        Ok(outs)
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let (starts, steps) = kept_and_reduced(&input.meta.shape, &self.dims(&input.meta)?);
        if steps.is_empty() {
            outs[0].write(eval.precision(), Cells::Float(vec![f64::NAN; starts.len()]));
            return Ok(());
        }
        let x = cells(input);
        let kth = if let Which::Kth(k) = self.which { count(eval.int(k)? - 1) } else { 0 };
        let at: Vec<usize> = starts.iter().map(|&start| self.one(&x, start, &steps, kth)).collect();
        outs[0].write(eval.precision(), pick(&x, at.iter().zip(&starts).map(|(&i, start)| start + steps[i])));
        if let Some(out) = outs.get(1) {
            out.write_ints(at.into_iter().map(|i| i64::try_from(i).unwrap_or(i64::MAX)));
        }
        Ok(())
    }

    /// Which step leads to the number.
    fn one(&self, x: &Cells, start: usize, steps: &[usize], kth: usize) -> usize {
        if self.which == Which::Mode {
            return mode(x, |i| start + steps[i], steps.len());
        }
        let is_nan = |i: usize| matches!(x, Cells::Float(x) if x[start + steps[i]].is_nan());
        let mut order: Vec<usize> = (0..steps.len()).collect();
        order.sort_by(|&a, &b| compare(x, start + steps[a], start + steps[b]));
        let numbers = order.iter().take_while(|&&i| !is_nan(i)).count();
        match self.which {
            Which::Kth(_) => order[kth],
            // The first NaN.
            Which::Median if numbers < steps.len() => order[numbers],
            _ => order[numbers.saturating_sub(1) / 2],
        }
    }

    fn dims(&self, meta: &Meta) -> Result<Vec<usize>, OpError> {
        match self.dim {
            None => Ok((0..meta.rank()).collect()),
            Some(dim) => Ok(Vec::from_iter(Some(meta.dim(dim)?).filter(|&d| d < meta.rank()))),
        }
    }
}

/// Which of `n` numbers is the most frequent.
fn mode(x: &Cells, place: impl Fn(usize) -> usize, n: usize) -> usize {
    let mut order: Vec<usize> = (0..n).collect();
    std_sort(&mut order, &|a, b| match x {
        Cells::Float(x) => x[place(a)] < x[place(b)],
        Cells::Int(x) => x[place(a)] < x[place(b)],
    });
    let same = |&a: &usize, &b: &usize| match x {
        Cells::Float(x) => x[place(a)] == x[place(b)],
        Cells::Int(x) => x[place(a)] == x[place(b)],
    };
    let mut best: &[usize] = &[];
    for run in order.chunk_by(same) {
        best = if run.len() > best.len() { run } else { best };
    }
    best.last().copied().unwrap_or(0)
}

fn all(args: &Args<'_>, which: Which) -> Result<Choice, OpError> {
    Ok(Choice { input: args.tensor("self")?, dim: None, keepdim: false, which })
}

fn along(args: &Args<'_>, which: Which) -> Result<Choice, OpError> {
    Ok(Choice {
        input: args.tensor("self")?,
        dim: Some(args.known_int_or("dim", -1)?),
        keepdim: args.bool_or("keepdim", false)?,
        which,
    })
}
