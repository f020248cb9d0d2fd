//! Products of groups of rows, each with a matrix of its own: the experts of a mixture.
//!
//! Rows `offs[e − 1]..offs[e]` of the input are multiplied by matrix `e`; rows after the last offset are 0. Floats are
//! summed in f64 and rounded once. Offsets that go backwards or past the last row are an error.

use rapt_core::DType;

use super::linear::{Arithmetic, dot};
use super::shape::{count, fresh, misfit, need_float, need_number, need_same, refuse};
use crate::number::is_float;
use crate::{Args, Eval, OpError, Out, Shapes, Tensor, ValueId};

/// A product of groups.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedMm {
    /// The rows, `[rows, depth]`, sorted by group.
    pub input: ValueId,
    /// The matrices, `[groups, depth, columns]`.
    pub weight: ValueId,
    /// The end of each group's rows, `[groups]`.
    pub offs: ValueId,
    /// Whether it is ATen's own operator, whose offsets are int32 and whose operands are floats of at most 32 bits.
    pub aten: bool,
}

impl GroupedMm {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<GroupedMm, OpError>> {
        Some(match target {
            "torch.ops.transformers.grouped_mm_fallback.default" => fallback(args),
            "torch.ops.aten._grouped_mm.default" => aten(args),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (input, weight, offs) = (shapes.meta(self.input)?, shapes.meta(self.weight)?, shapes.meta(self.offs)?);
        need_same(input.dtype, weight.dtype)?;
        let index = offs.dtype == DType::I32 || (offs.dtype == DType::I64 && !self.aten);
        if self.aten {
            need_float("a grouped product", input.dtype)?;
        } else {
            need_number("a grouped product", input.dtype)?;
        }
        if self.aten && input.dtype == DType::F64 || !index {
            return Err(OpError::Dtype {
                what: "a grouped product",
                dtype: if index { input.dtype } else { offs.dtype },
            });
        }
        match (&input.shape[..], &weight.shape[..], &offs.shape[..]) {
            (&[rows, depth], &[groups, w_depth, columns], &[ends]) if depth == w_depth && groups == ends => {
                Ok(vec![fresh(input.dtype, &[rows, columns])?])
            }
            (input, weight, offs) => misfit(format!("a grouped product of {input:?}, {weight:?} and offsets {offs:?}")),
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (input, weight, offs) = (eval.tensor(self.input)?, eval.tensor(self.weight)?, eval.tensor(self.offs)?);
        let ([_, depth], [.., columns]) = (&input.meta.shape[..], &weight.meta.shape[..]) else { return Ok(()) };
        let groups = groups(&offs.ints(), input.meta.shape[0])?;
        let (rows, depth, columns) = (count(input.meta.shape[0]), count(*depth), count(*columns));
        let sizes = [rows, depth, columns];
        if is_float(input.meta.dtype) {
            outs[0].write_floats(eval.precision(), multiply(&input.floats(), &weight.floats(), &groups, sizes));
        } else {
            outs[0].write_ints(multiply(&input.ints(), &weight.ints(), &groups, sizes));
        }
        Ok(())
    }
}

/// Each group's rows.
fn groups(ends: &[i64], rows: i64) -> Result<Vec<std::ops::Range<usize>>, OpError> {
    let mut start = 0;
    let mut all = Vec::new();
    for &end in ends {
        if end < start || end > rows {
            return Err(OpError::IndexOutOfRange { index: end, dim: 0, size: rows });
        }
        all.push(count(start)..count(end));
        start = end;
    }
    Ok(all)
}

fn multiply<T: Arithmetic>(
    a: &[T],
    b: &[T],
    groups: &[std::ops::Range<usize>],
    [rows, depth, columns]: [usize; 3],
) -> Vec<T> {
    let mut c = vec![T::ZERO; rows * columns];
    for (e, group) in groups.iter().enumerate() {
        for column in 0..columns {
            let w: Vec<T> = (0..depth).map(|k| b[(e * depth + k) * columns + column]).collect();
            for row in group.clone() {
                c[row * columns + column] = dot(&a[row * depth..][..depth], &w);
            }
        }
    }
    c
}

fn fallback(args: &Args<'_>) -> Result<GroupedMm, OpError> {
    Ok(GroupedMm {
        input: args.tensor("input")?,
        weight: args.tensor("weight")?,
        offs: args.tensor("offs")?,
        aten: false,
    })
}

fn aten(args: &Args<'_>) -> Result<GroupedMm, OpError> {
    if args.opt_tensor("bias")?.is_some() {
        return refuse("bias", "a tensor", "PyTorch's kernel takes none");
    }
    if let Some(dtype) = args.opt_dtype("out_dtype")? {
        return refuse("out_dtype", dtype.name(), "the result has the operands' dtype");
    }
    Ok(GroupedMm { input: args.tensor("self")?, weight: args.tensor("mat2")?, offs: args.tensor("offs")?, aten: true })
}
