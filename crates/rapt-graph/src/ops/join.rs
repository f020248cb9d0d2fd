//! Writing by index where elements meet: `index_add`, `index_fill`, `index_reduce`, `scatter_reduce`, `masked_scatter`, `put`.
//!
//! Sums, products and means are computed in f64 or in int64 with wrap-around, and rounded once; a mean of integers is rounded
//! down. A NaN is the greatest and the least number.

use rapt_core::DType;

use super::index::{flat_places, gathered, need_gather_index, need_long, slices};
use super::shape::{Lanes, cells, fresh, like, misfit, need_same, pick, places, refuse, row_major, scalar_cell};
use super::{Operand, fill};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Scalar, Shapes, ValueId};

/// A writing by index where elements meet.
#[derive(Clone, Debug, PartialEq)]
pub enum Joining {
    /// `index_add`: whole slices of a dimension are added.
    Add {
        /// The dimension.
        dim: i64,
        /// The slices' numbers.
        index: ValueId,
        /// The slices.
        source: ValueId,
        /// What they are multiplied with.
        alpha: Scalar,
    },
    /// `index_fill`: one number in whole slices of a dimension.
    Fill {
        /// The dimension.
        dim: i64,
        /// The slices' numbers.
        index: ValueId,
        /// The number, or a tensor of one.
        value: Operand,
    },
    /// `scatter_reduce`, and `scatter` with a reduction: each element of the source is joined with what is there.
    Reduce {
        /// The dimension.
        dim: i64,
        /// The places in that dimension.
        index: ValueId,
        /// What goes there.
        source: Operand,
        /// How it is joined.
        how: Join,
        /// Whether the tensor's own element takes part.
        include_self: bool,
    },
    /// `index_reduce`: whole slices of a dimension are joined with what is there.
    Slices {
        /// The dimension.
        dim: i64,
        /// The slices' numbers.
        index: ValueId,
        /// The slices.
        source: ValueId,
        /// How they are joined.
        how: Join,
        /// Whether the tensor's own elements take part.
        include_self: bool,
    },
    /// `put`: elements by their number in the flattened tensor, written or added.
    Flat {
        /// The numbers.
        index: ValueId,
        /// As many elements.
        source: ValueId,
        /// Whether they are added.
        accumulate: bool,
    },
    /// `masked_scatter`: the source's elements one after another where the mask is true. Tensor and mask broadcast.
    Masked {
        /// Booleans.
        mask: ValueId,
        /// The elements.
        source: ValueId,
    },
}

/// How elements for one place are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "ATen's names, which ATen documents")]
pub enum Join {
    Sum,
    Product,
    Mean,
    Max,
    Min,
}

impl Joining {
    pub(super) fn read(name: &str, overload: &str, args: &Args<'_>) -> Option<Result<Joining, OpError>> {
        Some(match (name, overload) {
            ("scatter_reduce", "two") => reduced(args),
            ("scatter", "reduce" | "value_reduce") => scattered(args),
            ("index_add", "default") => added(args),
            ("index_fill", "int_Scalar" | "int_Tensor") => filled(args),
            ("masked_scatter", "default") => masked(args),
            ("index_reduce", "default") => slices_joined(args),
            ("put", "default") => flat(args),
            _ => return None,
        })
    }

    /// The result, where it is a tensor of its own.
    pub(super) fn infer(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<Out, OpError> {
        infer(self, shapes, meta)
    }

    /// Writes into a copy of the tensor's numbers.
    pub(super) fn write(&self, eval: &dyn Eval, meta: &Meta, x: &mut Cells) -> Result<(), OpError> {
        write(self, eval, meta, x)
    }
}

fn infer(write: &Joining, shapes: &dyn Shapes, meta: &Meta) -> Result<Out, OpError> {
    match write {
        Joining::Add { dim, index, source, .. } => {
            let (index, source) = (shapes.meta(*index)?, shapes.meta(*source)?);
            need_same(meta.dtype, source.dtype)?;
            need_indices(index)?;
            need_slices(meta, meta.dim(*dim)?, index, source)?;
            fresh(meta.dtype, &meta.shape)
        }
        Joining::Fill { dim, index, value } => {
            let index = shapes.meta(*index)?;
            if index.dtype != DType::I64 || index.rank() > 1 {
                return misfit("index_fill takes a vector of int64");
            }
            meta.dim(*dim)?;
            match value {
                Operand::Number(number) => drop(fill::element(meta.dtype, shapes.number(*number)?)?),
                Operand::Tensor(id) if shapes.meta(*id)?.rank() > 0 => {
                    return misfit("index_fill takes a number or a tensor without dimensions");
                }
                Operand::Tensor(_) => {}
            }
            Ok(Out::Fresh(like(meta, meta.dtype)))
        }
        Joining::Reduce { dim, index, source, .. } => {
            let index = shapes.meta(*index)?;
            need_gather_index(meta, meta.dim(*dim)?, index)?;
            if let Operand::Tensor(id) = source {
                let source = shapes.meta(*id)?;
                need_same(meta.dtype, source.dtype)?;
                need_covering(source, index)?;
            }
            fresh(meta.dtype, &meta.shape)
        }
        Joining::Slices { dim, index, source, .. } => {
            let (index, source) = (shapes.meta(*index)?, shapes.meta(*source)?);
            need_same(meta.dtype, source.dtype)?;
            need_indices(index)?;
            need_slices(meta, meta.dim(*dim)?, index, source)?;
            fresh(meta.dtype, &meta.shape)
        }
        Joining::Flat { index, source, .. } => {
            let (index, source) = (shapes.meta(*index)?, shapes.meta(*source)?);
            need_same(meta.dtype, source.dtype)?;
            need_long(index)?;
            if index.numel() != source.numel() {
                return misfit(format!("{} elements for {} places", source.numel(), index.numel()));
            }
            Ok(Out::Fresh(like(meta, meta.dtype)))
        }
        Joining::Masked { mask, source } => {
            let (mask, source) = (shapes.meta(*mask)?, shapes.meta(*source)?);
            need_same(meta.dtype, source.dtype)?;
            if mask.dtype != DType::Bool {
                return Err(OpError::Dtype { what: "a mask", dtype: mask.dtype });
            }
            fresh(meta.dtype, &crate::strides::broadcast([&meta.shape[..], &mask.shape])?)
        }
    }
}

fn need_indices(index: &Meta) -> Result<(), OpError> {
    if matches!(index.dtype, DType::I64 | DType::I32) {
        Ok(())
    } else {
        Err(OpError::Dtype { what: "an index of index_add", dtype: index.dtype })
    }
}

fn write(write: &Joining, eval: &dyn Eval, meta: &Meta, x: &mut Cells) -> Result<(), OpError> {
    match write {
        Joining::Add { dim, index, source, alpha } => {
            let at = slices(meta, meta.dim(*dim)?, &eval.tensor(*index)?.ints())?;
            let alpha = scalar_cell(eval, *alpha, meta.dtype, eval.precision())?;
            match (x, cells(eval.tensor(*source)?), alpha) {
                (Cells::Float(x), Cells::Float(source), Cells::Float(alpha)) => {
                    at.iter().zip(source).for_each(|(&p, value)| x[p] += alpha[0] * value);
                }
                (Cells::Int(x), Cells::Int(source), Cells::Int(alpha)) => {
                    let more = |value: i64| alpha[0].wrapping_mul(value);
                    at.iter().zip(source).for_each(|(&p, value)| x[p] = x[p].wrapping_add(more(value)));
                }
                // The dtypes are equal: inference has checked it.
                _ => {}
            }
        }
        Joining::Fill { dim, index, value } => {
            let size = meta.shape.get(meta.dim(*dim)?).copied().unwrap_or(1);
            // Negative numbers count from the end.
            let from_end = |i: i64| if i < 0 { i.saturating_add(size) } else { i };
            let index: Vec<i64> = eval.tensor(*index)?.ints().into_iter().map(from_end).collect();
            let at = slices(meta, meta.dim(*dim)?, &index)?;
            let value = match value {
                Operand::Number(number) => fill::element(meta.dtype, eval.number(*number)?)?,
                Operand::Tensor(id) => eval.tensor(*id)?.cast(meta.dtype, eval.precision()),
            };
            put(x, at, &pick(&value, std::iter::repeat_n(0, count_of(x))));
        }
        Joining::Reduce { dim, index, source, how, include_self } => {
            let index = eval.tensor(*index)?;
            let at = gathered(meta, meta.dim(*dim)?, index)?;
            let values = match source {
                Operand::Tensor(id) => {
                    let source = eval.tensor(*id)?;
                    pick(&cells(source), places(&index.meta.shape, &row_major(&source.meta.shape)))
                }
                Operand::Number(number) => {
                    let one = scalar_cell(eval, *number, meta.dtype, eval.precision())?;
                    pick(&one, at.iter().map(|_| 0))
                }
            };
            join(x, &at, &values, *how, *include_self);
        }
        Joining::Slices { dim, index, source, how, include_self } => {
            let at = slices(meta, meta.dim(*dim)?, &eval.tensor(*index)?.ints())?;
            join(x, &at, &cells(eval.tensor(*source)?), *how, *include_self);
        }
        Joining::Flat { index, source, accumulate } => {
            let at = flat_places(&eval.tensor(*index)?.ints(), meta.numel())?;
            let values = cells(eval.tensor(*source)?);
            if *accumulate {
                join(x, &at, &values, Join::Sum, true);
            } else {
                put(x, at, &values);
            }
        }
        Joining::Masked { mask, source } => {
            let mask = eval.tensor(*mask)?.broadcast(&meta.shape).ints();
            let at: Vec<usize> = (0..mask.len()).filter(|&p| mask[p] != 0).collect();
            let source = cells(eval.tensor(*source)?);
            if count_of(&source) < at.len() {
                return misfit(format!("{} elements for {} places", count_of(&source), at.len()));
            }
            put(x, at, &source);
        }
    }
    Ok(())
}

fn count_of(cells: &Cells) -> usize {
    match cells {
        Cells::Float(x) => x.len(),
        Cells::Int(x) => x.len(),
    }
}

fn put(x: &mut Cells, at: Vec<usize>, values: &Cells) {
    match (x, values) {
        (Cells::Float(x), Cells::Float(values)) => at.into_iter().zip(values).for_each(|(p, &value)| x[p] = value),
        (Cells::Int(x), Cells::Int(values)) => at.into_iter().zip(values).for_each(|(p, &value)| x[p] = value),
        // The dtypes are equal: inference has checked it.
        _ => {}
    }
}

/// Joins values with what stands at their places.
fn join(x: &mut Cells, at: &[usize], values: &Cells, how: Join, include_self: bool) {
    fn all<T: Copy>(x: &mut [T], at: &[usize], values: &[T], own: bool, one: impl Fn(T, T) -> T) -> Vec<u32> {
        let mut counts = vec![u32::from(own); x.len()];
        for (&p, &value) in at.iter().zip(values) {
            x[p] = if counts[p] == 0 { value } else { one(x[p], value) };
            counts[p] = counts[p].saturating_add(1);
        }
        counts
    }
    match (x, values) {
        (Cells::Float(x), Cells::Float(values)) => {
            let counts = all(x, at, values, include_self, |a, b| match how {
                Join::Sum | Join::Mean => a + b,
                Join::Product => a * b,
                Join::Max if a > b || a.is_nan() => a,
                Join::Min if a < b || a.is_nan() => a,
                Join::Max | Join::Min => b,
            });
            if how == Join::Mean {
                x.iter_mut().zip(counts).for_each(|(x, n)| *x /= f64::from(n.max(1)));
            }
        }
        (Cells::Int(x), Cells::Int(values)) => {
            let counts = all(x, at, values, include_self, |a, b| match how {
                Join::Sum | Join::Mean => a.wrapping_add(b),
                Join::Product => a.wrapping_mul(b),
                Join::Max => a.max(b),
                Join::Min => a.min(b),
            });
            if how == Join::Mean {
                x.iter_mut().zip(counts).for_each(|(x, n)| *x = x.div_euclid(i64::from(n.max(1))));
            }
        }
        // The dtypes are equal: inference has checked it.
        _ => {}
    }
}

fn reduced(args: &Args<'_>) -> Result<Joining, OpError> {
    let how = match args.opt_str("reduce")?.unwrap_or_default() {
        "sum" => Join::Sum,
        "prod" => Join::Product,
        "mean" => Join::Mean,
        "amax" => Join::Max,
        "amin" => Join::Min,
        other => return refuse("reduce", other, "it is sum, prod, mean, amax or amin"),
    };
    Ok(Joining::Reduce {
        dim: args.known_int("dim")?,
        index: args.tensor("index")?,
        source: Operand::read(args, "src")?,
        how,
        include_self: args.bool_or("include_self", true)?,
    })
}

fn slices_joined(args: &Args<'_>) -> Result<Joining, OpError> {
    let how = match args.opt_str("reduce")?.unwrap_or_default() {
        "prod" => Join::Product,
        "mean" => Join::Mean,
        "amax" => Join::Max,
        "amin" => Join::Min,
        other => return refuse("reduce", other, "it is prod, mean, amax or amin"),
    };
    Ok(Joining::Slices {
        dim: args.known_int("dim")?,
        index: args.tensor("index")?,
        source: args.tensor("source")?,
        how,
        include_self: args.bool_or("include_self", true)?,
    })
}

fn flat(args: &Args<'_>) -> Result<Joining, OpError> {
    let accumulate = args.bool_or("accumulate", false)?;
    Ok(Joining::Flat { index: args.tensor("index")?, source: args.tensor("source")?, accumulate })
}

fn scattered(args: &Args<'_>) -> Result<Joining, OpError> {
    let how = match args.opt_str("reduce")?.unwrap_or_default() {
        "add" => Join::Sum,
        "multiply" => Join::Product,
        other => return refuse("reduce", other, "it is add or multiply"),
    };
    let source = if args.raw("src").is_some() { "src" } else { "value" };
    Ok(Joining::Reduce {
        dim: args.known_int("dim")?,
        index: args.tensor("index")?,
        source: Operand::read(args, source)?,
        how,
        include_self: true,
    })
}

fn added(args: &Args<'_>) -> Result<Joining, OpError> {
    Ok(Joining::Add {
        dim: args.known_int("dim")?,
        index: args.tensor("index")?,
        source: args.tensor("source")?,
        alpha: args.opt_scalar("alpha")?.unwrap_or(Scalar::Int(Int::Known(1))),
    })
}

fn filled(args: &Args<'_>) -> Result<Joining, OpError> {
    Ok(Joining::Fill {
        dim: args.known_int("dim")?,
        index: args.tensor("index")?,
        value: Operand::read(args, "value")?,
    })
}

fn masked(args: &Args<'_>) -> Result<Joining, OpError> {
    Ok(Joining::Masked { mask: args.tensor("mask")?, source: args.tensor("source")? })
}

/// That a source has an element for each of the index.
pub(super) fn need_covering(source: &Meta, index: &Meta) -> Result<(), OpError> {
    let covers = index.numel() == 0
        || (source.rank().max(1) == index.rank().max(1) && index.shape.iter().zip(&source.shape).all(|(n, m)| n <= m));
    if covers {
        Ok(())
    } else {
        misfit(format!("an index of shape {:?} and a source of {:?}", index.shape, source.shape))
    }
}

/// That a source has one slice for each index, of the tensor's shape.
pub(super) fn need_slices(meta: &Meta, dim: usize, index: &Meta, source: &Meta) -> Result<(), OpError> {
    let lanes = |meta: &Meta| Lanes::of(&meta.shape, dim);
    let (whole, part) =
        (lanes(meta), if source.rank() > dim || source.rank() == 0 { lanes(source) } else { lanes(meta) });
    let same_rank = source.rank() == meta.rank() || (source.rank().max(1) == 1 && meta.rank().max(1) == 1);
    let others = source.shape.iter().zip(&meta.shape).enumerate().all(|(d, (a, b))| d == dim || a == b);
    let number = i64::try_from(part.size).unwrap_or(i64::MAX) == index.numel();
    if index.rank() <= 1 && same_rank && others && number && whole.inner == part.inner {
        return Ok(());
    }
    misfit(format!("{:?} slices of shape {:?} for a tensor of shape {:?}", index.shape, source.shape, meta.shape))
}
