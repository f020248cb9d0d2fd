//! Diagonals: `diag_embed`, `diag`, `diagflat`, `tril_indices`, `triu_indices`.

use rapt_core::DType;

use super::shape::{bounded, cells, count, fresh, misfit, need_plain, places, row_major};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId};

/// An operation of diagonals.
#[derive(Clone, Debug, PartialEq)]
pub enum Diagonal {
    /// `diag_embed`: the last dimension as a diagonal of two, and zeros beside it.
    Embed {
        /// The tensor.
        input: ValueId,
        /// How far above the main diagonal.
        offset: i64,
        /// The two dimensions, of the result.
        dims: [i64; 2],
    },
    /// `diag` of a matrix: its diagonal, copied. Of a vector it is `diag_embed`.
    Diag {
        /// The tensor.
        input: ValueId,
        /// How far above the main diagonal.
        offset: i64,
    },
    /// `diagflat`: all numbers as the diagonal of a matrix.
    Flat {
        /// The tensor.
        input: ValueId,
        /// How far above the main diagonal.
        offset: i64,
    },
    /// `tril_indices`, `triu_indices`: rows and columns of a triangle.
    Indices {
        /// The rows and columns of the matrix.
        size: [Int; 2],
        /// How far above the main diagonal the triangle ends.
        offset: i64,
        /// Whether it is the upper triangle.
        upper: bool,
        /// int64 or int32.
        dtype: DType,
    },
}

impl Diagonal {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Diagonal, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "diag_embed.default" => embed(args),
            "diag.default" => diag(args),
            "diagflat.default" => args
                .known_int_or("offset", 0)
                .and_then(|offset| Ok(Diagonal::Flat { input: args.tensor("self")?, offset })),
            "tril_indices.default" => indices(args, false),
            "triu_indices.default" => indices(args, true),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Diagonal::Embed { input, offset, dims } => {
                let meta = shapes.meta(*input)?;
                need_plain("a diagonal", meta.dtype)?;
                Ok(vec![fresh(meta.dtype, &embedded(meta, *offset, *dims)?.0)?])
            }
            Diagonal::Diag { input, offset } => {
                let meta = shapes.meta(*input)?;
                need_plain("a diagonal", meta.dtype)?;
                match meta.shape[..] {
                    [_] => Ok(vec![fresh(meta.dtype, &embedded(meta, *offset, [0, 1])?.0)?]),
                    [rows, columns] => Ok(vec![fresh(meta.dtype, &[on_diagonal(rows, columns, *offset)])?]),
                    _ => misfit(format!("diag of a tensor of shape {:?}", meta.shape)),
                }
            }
            Diagonal::Flat { input, offset } => {
                let meta = shapes.meta(*input)?;
                need_plain("a diagonal", meta.dtype)?;
                let flat = Meta::contiguous(meta.dtype, &[meta.numel()]);
                Ok(vec![fresh(meta.dtype, &embedded(&flat, *offset, [0, 1])?.0)?])
            }
            Diagonal::Indices { size, offset, upper, dtype } => {
                let [rows, columns] = [shapes.int(size[0])?, shapes.int(size[1])?];
                bounded(&[rows, columns])?;
                let number = if *upper {
                    rows * columns - below(rows, columns, offset.saturating_sub(1))
                } else {
                    below(rows, columns, *offset)
                };
                Ok(vec![fresh(*dtype, &[2, number])?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let out = &outs[0];
        match self {
            Diagonal::Embed { input, offset, dims } => put(eval.tensor(*input)?, *offset, *dims, eval, out),
            Diagonal::Diag { input, offset } => {
                let input = eval.tensor(*input)?;
                if input.meta.rank() == 1 {
                    return put(input, *offset, [0, 1], eval, out);
                }
                let columns = count(input.meta.shape[1]);
                let (row, column) = (count((-offset).max(0)), count((*offset).max(0)));
                let at = (0..count(out.meta.numel())).map(|n| (row + n) * columns + column + n);
                out.write(eval.precision(), super::shape::pick(&cells(input), at));
                Ok(())
            }
            Diagonal::Flat { input, offset } => {
                let input = eval.tensor(*input)?;
                let flat = Tensor::new(Meta::contiguous(input.meta.dtype, &[input.meta.numel()]), cells(input));
                put(&flat, *offset, [0, 1], eval, out)
            }
            Diagonal::Indices { size, offset, upper, .. } => {
                let [rows, columns] = [eval.int(size[0])?, eval.int(size[1])?];
                let (rows, columns): (Vec<i64>, Vec<i64>) = triangle(rows, columns, *offset, *upper).unzip();
                out.write_ints([rows, columns].concat());
                Ok(())
            }
        }
    }
}

/// How many elements a diagonal has.
fn on_diagonal(rows: i64, columns: i64, offset: i64) -> i64 {
    rows.saturating_sub((offset.saturating_neg()).max(0)).min(columns.saturating_sub(offset.max(0))).max(0)
}

/// How many elements lie on or below a diagonal of a matrix whose number of elements is bounded.
fn below(rows: i64, columns: i64, offset: i64) -> i64 {
    let border = offset.saturating_add(1);
    // Rows before the first have no element, those from `whole` on all.
    let first = border.saturating_neg().clamp(0, rows);
    let whole = columns.saturating_sub(border).clamp(first, rows);
    let some = whole - first;
    let triangle = if some > 0 { some * (first + border) + some * (some - 1) / 2 } else { 0 };
    triangle + (rows - whole) * columns
}

/// The elements of a triangle, row by row.
fn triangle(rows: i64, columns: i64, offset: i64, upper: bool) -> impl Iterator<Item = (i64, i64)> {
    (0..rows).flat_map(move |row| {
        let border = row.saturating_add(offset);
        let (first, last) =
            if upper { (border.clamp(0, columns), columns) } else { (0, border.saturating_add(1).clamp(0, columns)) };
        (first..last).map(move |column| (row, column))
    })
}

/// The shape of a tensor with its last dimension as a diagonal, and the two dimensions.
fn embedded(meta: &Meta, offset: i64, dims: [i64; 2]) -> Result<(Vec<i64>, [usize; 2]), OpError> {
    let Some((&last, lead)) = meta.shape.split_last() else {
        return misfit("a diagonal of a tensor without dimensions");
    };
    let rank = i64::try_from(meta.rank() + 1).unwrap_or(i64::MAX);
    let mut at = [0; 2];
    for (at, dim) in at.iter_mut().zip(dims) {
        if dim < -rank || dim >= rank {
            return Err(OpError::DimOutOfRange { dim, rank: meta.rank() + 1 });
        }
        *at = count(if dim < 0 { dim + rank } else { dim });
    }
    if at[0] == at[1] {
        return misfit(format!("a diagonal of dimension {} and itself", at[0]));
    }
    let size = offset.checked_abs().and_then(|more| last.checked_add(more)).unwrap_or(i64::MAX);
    let mut shape = lead.to_vec();
    for dim in [at[0].min(at[1]), at[0].max(at[1])] {
        shape.insert(dim, size);
    }
    Ok((shape, at))
}

fn put(input: &Tensor, offset: i64, dims: [i64; 2], eval: &dyn Eval, out: &Tensor) -> Result<(), OpError> {
    let (shape, [a, b]) = embedded(&input.meta, offset, dims)?;
    let mut strides = row_major(&shape);
    let start = count((-offset).max(0) * strides[a] + offset.max(0) * strides[b]);
    let along = strides[a] + strides[b];
    for dim in [a.max(b), a.min(b)] {
        strides.remove(dim);
    }
    strides.push(along);
    let at = places(&input.meta.shape, &strides).into_iter().map(|p| p + start);
    let whole = count(out.meta.numel());
    let filled = match cells(input) {
        Cells::Float(x) => {
            let mut all = vec![0.0; whole];
            at.zip(x).for_each(|(p, x)| all[p] = x);
            Cells::Float(all)
        }
        Cells::Int(x) => {
            let mut all = vec![0; whole];
            at.zip(x).for_each(|(p, x)| all[p] = x);
            Cells::Int(all)
        }
    };
    out.write(eval.precision(), filled);
    Ok(())
}

fn embed(args: &Args<'_>) -> Result<Diagonal, OpError> {
    let dims = [args.known_int_or("dim1", -2)?, args.known_int_or("dim2", -1)?];
    Ok(Diagonal::Embed { input: args.tensor("self")?, offset: args.known_int_or("offset", 0)?, dims })
}

fn diag(args: &Args<'_>) -> Result<Diagonal, OpError> {
    Ok(Diagonal::Diag { input: args.tensor("self")?, offset: args.known_int_or("diagonal", 0)? })
}

fn indices(args: &Args<'_>, upper: bool) -> Result<Diagonal, OpError> {
    args.place()?;
    let dtype = args.opt_dtype("dtype")?.unwrap_or(DType::I64);
    if !matches!(dtype, DType::I64 | DType::I32) {
        return Err(OpError::Dtype { what: "the places of a triangle", dtype });
    }
    let size = [args.int("row")?, args.int("col")?];
    Ok(Diagonal::Indices { size, offset: args.known_int_or("offset", 0)?, upper, dtype })
}
