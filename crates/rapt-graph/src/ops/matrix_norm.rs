//! Norms of matrices: `linalg_matrix_norm`, and `linalg_norm` where it is a matrix's.
//!
//! | order | norm |
//! |---|---|
//! | 1, −1 | the greatest, the least sum of a column's absolute numbers |
//! | ∞, −∞ | the same of rows |
//! | 2, −2 | the greatest, the least singular value |
//! | `nuc` | the sum of the singular values |
//!
//! In f64, rounded once. Sums of columns and rows carry NaN on; singular values of NaN are refused (`svd.rs`). The norm of a matrix without
//! elements is 0. `linalg_norm` with an order and without dimensions is the norm of a vector or of a matrix by the tensor's rank.
//!
//! Deliberately absent: the Frobenius norm, which is a vector's of two dimensions (`reduce.rs`).

use rapt_core::DType;

use super::reduce::{is_by_rank, is_frobenius, kept_and_reduced, reduced, vector_norm};
use super::shape::{count, fresh, misfit, need_float, refuse, row_major, scalar_float};
use super::svd::{need_values, singular_values};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Scalar, Shapes, Tensor, ValueId};

/// A norm of matrices.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixNorm {
    /// The tensor.
    input: ValueId,
    /// The order, or the nuclear norm.
    order: Option<Scalar>,
    /// The dimensions of columns and of rows; `None` is all of a tensor that has one or two.
    dims: Option<Vec<Int>>,
    /// Whether they stay with size 1.
    keepdim: bool,
    /// The dtype that the numbers are converted to first.
    dtype: Option<DType>,
}

/// What is computed of one tensor.
enum Norm {
    /// A vector's, of this order.
    Vector(f64),
    /// An extremum of sums along one dimension.
    Sums {
        /// Whether each is a row's.
        of_rows: bool,
        largest: bool,
    },
    /// The singular values' extremum.
    Singular { largest: bool },
    /// Their sum.
    Nuclear,
}

impl MatrixNorm {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<MatrixNorm, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "linalg_norm.default" if is_by_rank(args).unwrap_or(false) => by_number(args, None),
            "linalg_matrix_norm.default" => by_number(args, Some(LAST_TWO)),
            "linalg_norm.ord_str" if !is_frobenius(args) => by_name(args, None),
            "linalg_matrix_norm.str_ord" if !is_frobenius(args) => by_name(args, Some(LAST_TWO)),
            "nuclear_norm.default" | "nuclear_norm.dim" => with_order(args, None, Some(LAST_TWO)),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        need_float("a norm", meta.dtype)?;
        let dtype = self.dtype.unwrap_or(meta.dtype);
        need_float("a norm", dtype)?;
        let dims = self.dims(shapes, meta)?;
        match self.norm(shapes, &dims)? {
            // No number is the least or the greatest of none.
            Norm::Vector(ord) if meta.numel() == 0 && (ord < 0.0 || ord == f64::INFINITY) => {
                return misfit(format!("a norm of order {ord} of a tensor of shape {:?}", meta.shape));
            }
            Norm::Singular { .. } | Norm::Nuclear => need_values(dtype)?,
            Norm::Vector(_) | Norm::Sums { .. } => {}
        }
        Ok(vec![fresh(dtype, &reduced(&meta.shape, &dims, self.keepdim))?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let shape = &input.meta.shape;
        let Cells::Float(x) = input.cast(self.dtype.unwrap_or(input.meta.dtype), eval.precision()) else {
            return Err(OpError::Dtype { what: "a norm", dtype: input.meta.dtype });
        };
        let dims = self.dims(eval, &input.meta)?;
        let (starts, steps) = kept_and_reduced(shape, &dims);
        let strides = row_major(shape);
        let norm = self.norm(eval, &dims)?;
        let one = |&start: &usize| {
            if let Norm::Vector(ord) = norm {
                return Ok(vector_norm(steps.iter().map(|step| x[start + step]), ord));
            }
            let [rows, columns] = [0, 1].map(|d| (count(shape[dims[d]]), count(strides[dims[d]])));
            let at = |row: usize, column: usize| x[start + row * rows.1 + column * columns.1];
            norm.of_matrix([rows.0, columns.0], &at)
        };
        outs[0].write_floats(eval.precision(), starts.iter().map(one).collect::<Result<Vec<f64>, _>>()?);
        Ok(())
    }

    /// The dimensions, in the order of the argument: of columns, then of rows.
    fn dims(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<Vec<usize>, OpError> {
        let text = || misfit(format!("a norm of a tensor of shape {:?}: which dimensions are a matrix?", meta.shape));
        match &self.dims {
            Some(dims) => {
                let dims =
                    shapes.ints(dims)?.iter().map(|&dim| meta.dim(dim)).collect::<Result<Vec<usize>, OpError>>()?;
                if dims.len() != 2 || dims[0] == dims[1] || meta.rank() < 2 { text() } else { Ok(dims) }
            }
            None if matches!(meta.rank(), 1 | 2) => Ok((0..meta.rank()).collect()),
            None => text(),
        }
    }

    fn norm(&self, shapes: &dyn Shapes, dims: &[usize]) -> Result<Norm, OpError> {
        let Some(order) = self.order else {
            return if dims.len() == 2 { Ok(Norm::Nuclear) } else { misfit("the nuclear norm of a vector") };
        };
        let ord = scalar_float(shapes, order)?;
        let largest = ord > 0.0;
        match ord.abs() {
            _ if dims.len() == 1 => Ok(Norm::Vector(ord)),
            1.0 => Ok(Norm::Sums { of_rows: false, largest }),
            2.0 => Ok(Norm::Singular { largest }),
            f64::INFINITY => Ok(Norm::Sums { of_rows: true, largest }),
            _ => refuse("ord", ord.to_string(), "a matrix has the orders 1, 2 and infinity, and the same below 0"),
        }
    }
}

impl Norm {
    /// The norm of one matrix of these sizes.
    fn of_matrix(&self, [rows, columns]: [usize; 2], at: &dyn Fn(usize, usize) -> f64) -> Result<f64, OpError> {
        if rows * columns == 0 {
            return Ok(0.0);
        }
        let extremum = |x: Vec<f64>, largest: bool| vector_norm(x.into_iter(), f64::INFINITY * sign(largest));
        let values = || {
            let all = (0..rows).flat_map(|row| (0..columns).map(move |column| at(row, column)));
            singular_values(&all.collect::<Vec<_>>(), rows, columns)
        };
        Ok(match *self {
            Norm::Sums { of_rows: true, largest } => {
                let sum = |row| (0..columns).map(|column| at(row, column).abs()).sum();
                extremum((0..rows).map(sum).collect(), largest)
            }
            Norm::Sums { of_rows: false, largest } => {
                let sum = |column| (0..rows).map(|row| at(row, column).abs()).sum();
                extremum((0..columns).map(sum).collect(), largest)
            }
            Norm::Singular { largest } => extremum(values()?, largest),
            Norm::Nuclear => values()?.iter().sum(),
            Norm::Vector(ord) => vector_norm((0..rows).map(|row| at(row, 0)), ord),
        })
    }
}

fn sign(positive: bool) -> f64 {
    if positive { 1.0 } else { -1.0 }
}

const LAST_TWO: [Int; 2] = [Int::Known(-2), Int::Known(-1)];

fn with_order(args: &Args<'_>, order: Option<Scalar>, default: Option<[Int; 2]>) -> Result<MatrixNorm, OpError> {
    Ok(MatrixNorm {
        input: args.tensor("self")?,
        order,
        dims: args.opt_ints("dim")?.or_else(|| default.map(Vec::from)),
        keepdim: args.bool_or("keepdim", false)?,
        dtype: args.opt_dtype("dtype")?,
    })
}

fn by_number(args: &Args<'_>, default: Option<[Int; 2]>) -> Result<MatrixNorm, OpError> {
    with_order(args, Some(args.scalar("ord")?), default)
}

fn by_name(args: &Args<'_>, default: Option<[Int; 2]>) -> Result<MatrixNorm, OpError> {
    match args.opt_str("ord")? {
        Some("nuc") => with_order(args, None, default),
        other => refuse("ord", format!("{other:?}"), "it is fro or nuc"),
    }
}
