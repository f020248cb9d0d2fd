//! Order: `sort`, `argsort`, `topk`.
//!
//! NaN counts as the largest number. Of equal numbers the one that comes first stays first, in ascending and descending
//! order alike. PyTorch promises it where `stable` is asked for; torch 2.15's CPU kernel shows it in every `sort`. Its
//! `topk` selects before it sorts, and among equal numbers names other places than the first: the values are the same, the
//! indices are not. Indices are int64.

use std::cmp::Ordering;

use rapt_core::DType;

use super::shape::{Lanes, cells, count, fresh, ignore, like, misfit, need_number, need_plain, pick};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId};

/// An operation of order.
#[derive(Clone, Debug, PartialEq)]
pub enum Sort {
    /// `sort` and `argsort`.
    Sort {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
        /// Whether the largest comes first.
        descending: bool,
        /// Whether the sorted numbers are a result too.
        values: bool,
    },
    /// `topk`: the `k` largest or smallest, the extreme first, whether `sorted` is asked for or not.
    TopK {
        /// The tensor.
        input: ValueId,
        /// How many.
        k: Int,
        /// The dimension.
        dim: i64,
        /// Whether the largest count.
        largest: bool,
    },
}

impl Sort {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Sort, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "sort.default" | "sort.stable" => sort(args, true),
            "argsort.default" | "argsort.stable" => sort(args, false),
            "topk.default" => topk(args),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Sort::Sort { input, dim, values, .. } => {
                let meta = shapes.meta(*input)?;
                need_plain("sort", meta.dtype)?;
                meta.dim(*dim)?;
                let indices = Out::Fresh(like(meta, DType::I64));
                Ok(if *values { vec![Out::Fresh(like(meta, meta.dtype)), indices] } else { vec![indices] })
            }
            Sort::TopK { input, k, dim, .. } => {
                let meta = shapes.meta(*input)?;
                need_number("topk", meta.dtype)?;
                let shape = top_shape(meta, shapes.int(*k)?, meta.dim(*dim)?)?;
                Ok(vec![fresh(meta.dtype, &shape)?, fresh(DType::I64, &shape)?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (input, dim, descending, k) = match *self {
            Sort::Sort { input, dim, descending, .. } => (input, dim, descending, None),
            Sort::TopK { input, k, dim, largest } => (input, dim, largest, Some(eval.int(k)?)),
        };
        let input = eval.tensor(input)?;
        let lanes = Lanes::of(&input.meta.shape, input.meta.dim(dim)?);
        let keep = k.map_or(lanes.size, count);
        let x = cells(input);
        // The sorted lanes, each with its numbers in the place of the result's.
        let mut at = vec![0; lanes.outer * keep * lanes.inner];
        let mut order = vec![0i64; at.len()];
        for (lane, start) in lanes.starts().enumerate() {
            let mut sorted: Vec<usize> = (0..lanes.size).collect();
            let place = |i: usize| start + i * lanes.inner;
            sorted.sort_by(|&a, &b| {
                let verdict = compare(&x, place(a), place(b));
                if descending { verdict.reverse() } else { verdict }
            });
            let (o, i) = (lane / lanes.inner, lane % lanes.inner);
            for (rank, &from) in sorted.iter().take(keep).enumerate() {
                let to = (o * keep + rank) * lanes.inner + i;
                at[to] = place(from);
                order[to] = i64::try_from(from).unwrap_or(i64::MAX);
            }
        }
        if let [values, indices] = outs {
            values.write(eval.precision(), pick(&x, at));
            indices.write_ints(order);
        } else {
            outs[0].write_ints(order);
        }
        Ok(())
    }
}

/// Ascending, NaN last.
pub(super) fn compare(x: &Cells, a: usize, b: usize) -> Ordering {
    match x {
        Cells::Int(x) => x[a].cmp(&x[b]),
        Cells::Float(x) => x[a].partial_cmp(&x[b]).unwrap_or_else(|| x[a].is_nan().cmp(&x[b].is_nan())),
    }
}

fn top_shape(meta: &Meta, k: i64, dim: usize) -> Result<Vec<i64>, OpError> {
    let size = meta.shape.get(dim).copied().unwrap_or(1);
    if k < 0 || k > size {
        return misfit(format!("the top {k} of {size}"));
    }
    let mut shape = meta.shape.clone();
    if let Some(size) = shape.get_mut(dim) {
        *size = k;
    }
    Ok(shape)
}

fn sort(args: &Args<'_>, values: bool) -> Result<Sort, OpError> {
    ignore(args, &["stable"]);
    Ok(Sort::Sort {
        input: args.tensor("self")?,
        dim: args.known_int_or("dim", -1)?,
        descending: args.bool_or("descending", false)?,
        values,
    })
}

fn topk(args: &Args<'_>) -> Result<Sort, OpError> {
    ignore(args, &["sorted"]);
    Ok(Sort::TopK {
        input: args.tensor("self")?,
        k: args.int("k")?,
        dim: args.known_int_or("dim", -1)?,
        largest: args.bool_or("largest", true)?,
    })
}
