//! Bags of rows of a table: `embedding_bag`, `_embedding_bag`, `_embedding_bag_forward_only`.
//!
//! Bag `b` has the indices from `offsets[b]` on, up to the next bag's; the last one has the rest. Its row is the sum (each row times its
//! own weight, where there are weights), the mean or the maximum of the table's rows at these indices; 0 of none. `padding_idx` is
//! passed over and not counted. Sums are f64, rounded once. A maximum begins with the first row, and only a greater number takes its place,
//! as in PyTorch: a NaN that comes first stays, one that comes later does not count.
//!
//! The other results are what PyTorch's backward asks for: each index's bag, the bags' sizes (0 for sums), and whose number the maximum
//! is. Their forms are those of the tracer; those of a bag without indices are 0.
//!
//! With `include_last_offset` the last offset must be the number of indices: of others PyTorch's kernels give different results.

use rapt_core::DType;

use super::index::{in_range, need_index};
use super::shape::{count, fresh, ignore, misfit, need_float, need_same, refuse};
use crate::{Args, Eval, OpError, Out, Shapes, Tensor, ValueId};

/// Rows of a table in bags.
#[derive(Clone, Debug, PartialEq)]
pub struct Bag {
    /// The table, `[rows, width]`.
    table: ValueId,
    /// The rows' numbers, one bag after another.
    indices: ValueId,
    /// Where each bag starts.
    pub(crate) offsets: ValueId,
    /// What is made of a bag's rows.
    mode: Mode,
    /// A factor of each index's row.
    weights: Option<ValueId>,
    /// Whether the last offset is the end of the last bag and not a bag's start.
    ends: bool,
    /// The row that does not count.
    padding: Option<Padding>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Sum,
    Mean,
    Max,
}

/// A row that does not count, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Padding {
    /// Numbers below 0 count from the end.
    FromEnd(i64),
    /// As it is.
    Plain(i64),
}

impl Bag {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Bag, OpError>> {
        let padding = |from_end: bool| -> Result<Option<Padding>, OpError> {
            let Some(_) = args.opt_int("padding_idx")? else { return Ok(None) };
            let row = args.known_int("padding_idx")?;
            Ok(if from_end { Some(Padding::FromEnd(row)) } else { (row >= 0).then_some(Padding::Plain(row)) })
        };
        let padding = match target.strip_prefix("torch.ops.aten.")? {
            "embedding_bag.default" => Ok(None),
            "embedding_bag.padding_idx" => padding(true),
            "_embedding_bag.default" | "_embedding_bag_forward_only.default" => padding(false),
            _ => return None,
        };
        Some(padding.and_then(|padding| bag(args, padding)))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (table, indices, offsets) =
            (shapes.meta(self.table)?, shapes.meta(self.indices)?, shapes.meta(self.offsets)?);
        need_float("an embedding bag", table.dtype)?;
        need_index(indices)?;
        need_index(offsets)?;
        let ([_, width], [all], [starts]) = (&table.shape[..], &indices.shape[..], &offsets.shape[..]) else {
            return misfit(format!(
                "bags of a table of shape {:?}, indices of shape {:?} and offsets of shape {:?}",
                table.shape, indices.shape, offsets.shape
            ));
        };
        let mut consecutive = true;
        if let Some(weights) = self.weights {
            let weights = shapes.meta(weights)?;
            need_same(table.dtype, weights.dtype)?;
            if self.mode != Mode::Sum || weights.shape != indices.shape {
                return misfit(format!("weights of shape {:?} for {all} indices, of a sum", weights.shape));
            }
            consecutive = weights.strides[0] == 1;
        }
        let bags = starts - i64::from(self.ends);
        if bags < 0 {
            return misfit("no offset, where the last one is an end");
        }
        let wide = if (indices.dtype, offsets.dtype) == (DType::I32, DType::I32) { DType::I32 } else { DType::I64 };
        // PyTorch's kernel for these keeps no list of whose bag an index is in.
        let listed = self.mode != Mode::Sum
            || !(matches!(table.dtype, DType::F32 | DType::F16)
                && table.strides[1] == 1
                && self.padding.is_none()
                && consecutive);
        let extrema: &[i64] = if self.mode == Mode::Max { &[bags, *width] } else { &[bags] };
        Ok(vec![
            fresh(table.dtype, &[bags, *width])?,
            fresh(wide, &[if listed { *all } else { 0 }])?,
            fresh(wide, &[bags])?,
            fresh(wide, extrema)?,
        ])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let table = eval.tensor(self.table)?;
        let (rows, width) = (table.meta.shape[0], count(table.meta.shape[1]));
        let x = table.floats();
        let indices = eval.tensor(self.indices)?.ints();
        let starts = self.starts(&eval.tensor(self.offsets)?.ints(), indices.len())?;
        let weights = self.weights.map(|id| eval.tensor(id)).transpose()?.map(Tensor::floats);
        let at: Vec<usize> = indices.iter().map(|&i| in_range(i, 0, rows)).collect::<Result<_, _>>()?;
        let padding = self.padding.map(|padding| match padding {
            Padding::FromEnd(row) if row < 0 => row.saturating_add(rows),
            Padding::FromEnd(row) | Padding::Plain(row) => row,
        });
        let bags = starts.len() - 1;
        let mut sums = vec![0.0; bags * width];
        let mut whose = vec![0; bags * width];
        let mut sizes = vec![0; bags];
        let mut bag_of = vec![0; indices.len()];
        for b in 0..bags {
            let (own, first) = (&mut sums[b * width..][..width], &mut whose[b * width..][..width]);
            for k in starts[b]..starts[b + 1] {
                bag_of[k] = b;
                if padding == Some(indices[k]) {
                    continue;
                }
                let row = &x[at[k] * width..][..width];
                let weight = weights.as_ref().map_or(1.0, |weights| weights[k]);
                for ((sum, whose), &x) in own.iter_mut().zip(first.iter_mut()).zip(row) {
                    match self.mode {
                        Mode::Max if sizes[b] == 0 || x > *sum => (*sum, *whose) = (x, indices[k]),
                        Mode::Max => {}
                        Mode::Sum | Mode::Mean => *sum += weight * x,
                    }
                }
                sizes[b] += 1;
            }
            if self.mode == Mode::Mean && sizes[b] > 0 {
                own.iter_mut().for_each(|sum| *sum /= f64::from(sizes[b]));
            }
        }
        outs[0].write_floats(eval.precision(), sums);
        let to_i64 = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        outs[1].write_ints(bag_of.into_iter().map(to_i64));
        let sizes: Vec<i64> =
            sizes.into_iter().map(|n| if self.mode == Mode::Sum { 0 } else { i64::from(n) }).collect();
        outs[3].write_ints(if self.mode == Mode::Max { whose } else { sizes.clone() });
        outs[2].write_ints(sizes);
        Ok(())
    }

    /// Where each bag starts and the last one ends.
    fn starts(&self, offsets: &[i64], all: usize) -> Result<Vec<usize>, OpError> {
        let mut starts: Vec<i64> = offsets.to_vec();
        let end = i64::try_from(all).unwrap_or(i64::MAX);
        if !self.ends {
            starts.push(end);
        }
        let ascending = starts.windows(2).all(|pair| pair[0] <= pair[1]);
        // No bag has no start.
        let begins = starts.len() == 1 || starts.first() == Some(&0);
        if !ascending || !begins || starts.last() != Some(&end) {
            return misfit(format!(
                "offsets {offsets:?} of {all} indices: they ascend from 0, and an end is that number"
            ));
        }
        Ok(starts.into_iter().map(count).collect())
    }
}

fn bag(args: &Args<'_>, padding: Option<Padding>) -> Result<Bag, OpError> {
    ignore(args, &["scale_grad_by_freq", "sparse"]);
    let mode = match args.known_int_or("mode", 0)? {
        0 => Mode::Sum,
        1 => Mode::Mean,
        2 => Mode::Max,
        other => return refuse("mode", other.to_string(), "it is 0, 1 or 2"),
    };
    Ok(Bag {
        table: args.tensor("weight")?,
        indices: args.tensor("indices")?,
        offsets: args.tensor("offsets")?,
        mode,
        weights: args.opt_tensor("per_sample_weights")?,
        ends: args.bool_or("include_last_offset", false)?,
        padding,
    })
}
