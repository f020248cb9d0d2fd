//! Matrix products: `mm`, `bmm`, `addmm`, `baddbmm`, `addbmm`, `mv`, `dot`, `addmv`, `matmul` of any ranks, and `linear`.
//!
//! `C[b, i, j] = Σ_k A[b, i, k] · B[b, k, j]`. Floats are summed in f64 and rounded once, integers wrap. Results lie
//! row-major whatever the operands' layout. Booleans are not multiplied, as PyTorch's kernels do not.

use rapt_core::DType;

use super::shape::{
    count, expand_places, expand_strides, fresh, misfit, need_number, need_same, places, row_major, scalar_cell,
    scalar_float,
};
use crate::number::is_float;
use crate::{Args, Eval, OpError, Out, Scalar, Shapes, Tensor, ValueId, strides};

/// A product of matrices.
#[derive(Clone, Debug, PartialEq)]
pub enum Linear {
    /// `linear`: the input's last dimension times the weight's rows, plus the bias.
    Linear {
        /// The input, of any rank but 0.
        input: ValueId,
        /// The weight, `[out_features, in_features]` or `[in_features]`.
        weight: ValueId,
        /// The bias.
        bias: Option<ValueId>,
    },
    /// `mm` (rank 2), `bmm` (rank 3), `matmul` (rank 0: any), `mv` (21) and `dot` (11).
    Product {
        /// The left operand.
        a: ValueId,
        /// The right operand.
        b: ValueId,
        /// The rank that both must have, or 0 for PyTorch's rules of `matmul`; 21 is a matrix and a vector, 11 are vectors.
        rank: usize,
    },
    /// `addmm` (rank 2), `baddbmm` (rank 3) and `addmv` (21): `beta · input + alpha · (a @ b)`. Of integers the factors are cut to
    /// integers, as in PyTorch.
    Add {
        /// What is added; it broadcasts to the product. Where `beta` is 0 its values do not count, not even NaN.
        input: ValueId,
        /// The left operand.
        a: ValueId,
        /// The right operand.
        b: ValueId,
        /// The rank of the operands.
        rank: usize,
        /// The factor of `input`.
        beta: Scalar,
        /// The factor of the product.
        alpha: Scalar,
    },
    /// `addbmm`: `beta · input + alpha · Σ (a @ b)` over the batches.
    AddBatches {
        /// What is added, as in [`Linear::Add`].
        input: ValueId,
        /// The left operands.
        a: ValueId,
        /// The right operands.
        b: ValueId,
        /// The factor of `input`.
        beta: Scalar,
        /// The factor of the sum.
        alpha: Scalar,
    },
}

/// The operands of `dot`, in place of a rank.
const VECTORS: usize = 11;

/// The operands of `mv`, in place of a rank.
const MATRIX_AND_VECTOR: usize = 21;

/// A product in numbers: where each batch starts in the operands, and the sizes.
struct Sizes {
    /// The result's batch dimensions.
    batch: Vec<i64>,
    rows: i64,
    depth: i64,
    columns: i64,
    /// The result's shape, without the dimension that a vector lacks.
    shape: Vec<i64>,
}

impl Linear {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Linear, OpError>> {
        Some(match target {
            "torch.ops.aten.linear.default" => linear(args),
            "torch.ops.aten.mm.default" => product(args, "mat2", 2),
            "torch.ops.aten.bmm.default" => product(args, "mat2", 3),
            "torch.ops.aten.matmul.default" => product(args, "other", 0),
            "torch.ops.aten.mv.default" => product(args, "vec", MATRIX_AND_VECTOR),
            "torch.ops.aten.dot.default" => product(args, "tensor", VECTORS),
            "torch.ops.aten.vdot.default" => product(args, "other", VECTORS),
            "torch.ops.aten.addmv.default" => add(args, ["mat", "vec"], MATRIX_AND_VECTOR),
            "torch.ops.aten.addmm.default" => add(args, ["mat1", "mat2"], 2),
            "torch.ops.aten.baddbmm.default" => add(args, ["batch1", "batch2"], 3),
            "torch.ops.aten.addbmm.default" => add(args, ["batch1", "batch2"], 3).map(over_batches),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (_, a, b) = self.operands();
        let (a, b) = (shapes.meta(a)?, shapes.meta(b)?);
        need_number("a product", a.dtype)?;
        need_same(a.dtype, b.dtype)?;
        let sizes = self.sizes(&a.shape, &b.shape)?;
        if let Some(added) = self.added() {
            let added = shapes.meta(added)?;
            need_same(a.dtype, added.dtype)?;
            expand_strides(&added.shape, &added.strides, &sizes.shape)?;
        }
        Ok(vec![fresh(a.dtype, &sizes.shape)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (_, a, b) = self.operands();
        let (a, b) = (eval.tensor(a)?, eval.tensor(b)?);
        let sizes = self.sizes(&a.meta.shape, &b.meta.shape)?;
        let read_a = operand_places(&a.meta.shape, &sizes.batch)?;
        let weight = matches!(self, Linear::Linear { .. });
        let b_shape = if weight { transposed(&b.meta.shape) } else { b.meta.shape.clone() };
        let read_b = operand_places(&b_shape, &sizes.batch)?;
        let added = self.added().map(|id| eval.tensor(id)).transpose()?;
        let added_places = added.map(|t| expand_places(&t.meta.shape, &sizes.shape)).transpose()?;
        let out = &outs[0];
        if is_float(a.meta.dtype) {
            let b = if weight { b.floats() } else { transpose_batches(&b.floats(), &b_shape) };
            let mut c = self.summed(multiply(&a.floats(), &b, &read_a, &read_b, &sizes), &sizes);
            if let (Some(added), Some(at)) = (added, added_places) {
                let (beta, alpha) = self.factors(eval)?;
                let x = added.floats();
                for (c, p) in c.iter_mut().zip(at) {
                    *c = alpha * *c + if beta == 0.0 { 0.0 } else { beta * x[p] };
                }
            }
            out.write_floats(eval.precision(), c);
        } else {
            let b = if weight { b.ints() } else { transpose_batches(&b.ints(), &b_shape) };
            let mut c = self.summed(multiply(&a.ints(), &b, &read_a, &read_b, &sizes), &sizes);
            if let (Some(added), Some(at)) = (added, added_places) {
                let (beta, alpha) = self.int_factors(eval, a.meta.dtype)?;
                let x = added.ints();
                for (c, p) in c.iter_mut().zip(at) {
                    *c = c.wrapping_mul(alpha).wrapping_add(x[p].wrapping_mul(beta));
                }
            }
            out.write_ints(c);
        }
        Ok(())
    }

    fn operands(&self) -> (usize, ValueId, ValueId) {
        match *self {
            Linear::Linear { input, weight, .. } => (0, input, weight),
            Linear::Product { a, b, rank } | Linear::Add { a, b, rank, .. } => (rank, a, b),
            Linear::AddBatches { a, b, .. } => (3, a, b),
        }
    }

    fn added(&self) -> Option<ValueId> {
        match *self {
            Linear::Linear { bias, .. } => bias,
            Linear::Add { input, .. } | Linear::AddBatches { input, .. } => Some(input),
            Linear::Product { .. } => None,
        }
    }

    fn factors(&self, eval: &dyn Eval) -> Result<(f64, f64), OpError> {
        match *self {
            Linear::Add { beta, alpha, .. } | Linear::AddBatches { beta, alpha, .. } => {
                Ok((scalar_float(eval, beta)?, scalar_float(eval, alpha)?))
            }
            _ => Ok((1.0, 1.0)),
        }
    }

    fn int_factors(&self, eval: &dyn Eval, dtype: DType) -> Result<(i64, i64), OpError> {
        let (Linear::Add { beta, alpha, .. } | Linear::AddBatches { beta, alpha, .. }) = *self else {
            return Ok((1, 1));
        };
        let int = |factor| match scalar_cell(eval, factor, dtype, eval.precision())? {
            crate::Cells::Int(x) => Ok(x[0]),
            crate::Cells::Float(_) => Ok(0),
        };
        Ok((int(beta)?, int(alpha)?))
    }

    /// The sum over the batches, where it is asked for.
    fn summed<T: Arithmetic>(&self, c: Vec<T>, sizes: &Sizes) -> Vec<T> {
        if !matches!(self, Linear::AddBatches { .. }) {
            return c;
        }
        let each = count(sizes.rows) * count(sizes.columns);
        let mut sum = vec![T::ZERO; each];
        for (n, x) in c.into_iter().enumerate() {
            sum[n % each] = sum[n % each].mul_add(x, T::ONE);
        }
        sum
    }

    /// The sizes of the product of operands of these shapes.
    fn sizes(&self, a: &[i64], b: &[i64]) -> Result<Sizes, OpError> {
        let (rank, ..) = self.operands();
        let ranks_fit = match rank {
            0 => true,
            VECTORS => (a.len(), b.len()) == (1, 1),
            MATRIX_AND_VECTOR => (a.len(), b.len()) == (2, 1),
            rank => (a.len(), b.len()) == (rank, rank),
        };
        if !ranks_fit {
            return misfit(format!("operands of shapes {a:?} and {b:?}: not of the ranks of a product"));
        }
        let b = match self {
            Linear::Linear { .. } if b.len() > 2 => return misfit(format!("a weight of shape {b:?}")),
            Linear::Linear { .. } => transposed(b),
            _ => b.to_vec(),
        };
        if a.is_empty() || b.is_empty() {
            return misfit("a product of a tensor without dimensions");
        }
        let (rows, depth) = if a.len() == 1 { (1, a[0]) } else { (a[a.len() - 2], a[a.len() - 1]) };
        let (b_depth, columns) = if b.len() == 1 { (b[0], 1) } else { (b[b.len() - 2], b[b.len() - 1]) };
        if depth != b_depth {
            return misfit(format!("{a:?} times {b:?}: {depth} columns meet {b_depth} rows"));
        }
        let (a_batch, b_batch) = (&a[..a.len().saturating_sub(2)], &b[..b.len().saturating_sub(2)]);
        if rank == 3 && a_batch != b_batch {
            return misfit(format!("batches of {a_batch:?} and {b_batch:?}"));
        }
        let batch = strides::broadcast([a_batch, b_batch])?;
        let mut shape = if matches!(self, Linear::AddBatches { .. }) { Vec::new() } else { batch.clone() };
        if a.len() > 1 {
            shape.push(rows);
        }
        if b.len() > 1 {
            shape.push(columns);
        }
        Ok(Sizes { batch, rows, depth, columns, shape })
    }
}

fn transposed(shape: &[i64]) -> Vec<i64> {
    let mut shape = shape.to_vec();
    if shape.len() > 1 {
        let last = shape.len() - 1;
        shape.swap(last - 1, last);
    }
    shape
}

/// Where the matrix of each batch starts in a row-major operand.
fn operand_places(shape: &[i64], batch: &[i64]) -> Result<Vec<usize>, OpError> {
    let lead = shape.len().saturating_sub(2);
    let strides = row_major(shape);
    Ok(places(batch, &expand_strides(&shape[..lead], &strides[..lead], batch)?))
}

/// Each matrix of a row-major operand transposed, so that a column of it lies together. A vector stays as it is.
fn transpose_batches<T: Copy>(x: &[T], shape: &[i64]) -> Vec<T> {
    let [.., rows, columns] = *shape else { return x.to_vec() };
    let (rows, columns) = (count(rows), count(columns));
    if rows * columns == 0 {
        return Vec::new();
    }
    x.chunks(rows * columns)
        .flat_map(|m| (0..columns).flat_map(move |c| (0..rows).map(move |r| m[r * columns + c])))
        .collect()
}

/// What sums of products need of a number.
pub(super) trait Arithmetic: Copy {
    const ZERO: Self;
    const ONE: Self;
    fn mul_add(self, a: Self, b: Self) -> Self;
}

impl Arithmetic for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    fn mul_add(self, a: f64, b: f64) -> f64 {
        self + a * b
    }
}

impl Arithmetic for i64 {
    const ZERO: i64 = 0;
    const ONE: i64 = 1;
    fn mul_add(self, a: i64, b: i64) -> i64 {
        self.wrapping_add(a.wrapping_mul(b))
    }
}

/// `Σ a[i] · b[i]`.
pub(super) fn dot<T: Arithmetic>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::ZERO, |sum, (&a, &b)| sum.mul_add(a, b))
}

/// The product in row-major order; the matrices of `b` lie transposed.
fn multiply<T: Arithmetic>(a: &[T], b: &[T], read_a: &[usize], read_b: &[usize], sizes: &Sizes) -> Vec<T> {
    let (rows, depth, columns) = (count(sizes.rows), count(sizes.depth), count(sizes.columns));
    if depth == 0 {
        return vec![T::ZERO; read_a.len() * rows * columns];
    }
    let mut c = Vec::with_capacity(read_a.len() * rows * columns);
    for (&at_a, &at_b) in read_a.iter().zip(read_b) {
        for i in 0..rows {
            let row = &a[at_a + i * depth..][..depth];
            c.extend((0..columns).map(|j| dot(row, &b[at_b + j * depth..][..depth])));
        }
    }
    c
}

fn linear(args: &Args<'_>) -> Result<Linear, OpError> {
    Ok(Linear::Linear { input: args.tensor("input")?, weight: args.tensor("weight")?, bias: args.opt_tensor("bias")? })
}

fn product(args: &Args<'_>, other: &str, rank: usize) -> Result<Linear, OpError> {
    Ok(Linear::Product { a: args.tensor("self")?, b: args.tensor(other)?, rank })
}

fn over_batches(op: Linear) -> Linear {
    match op {
        Linear::Add { input, a, b, beta, alpha, .. } => Linear::AddBatches { input, a, b, beta, alpha },
        other => other,
    }
}

fn add(args: &Args<'_>, [a, b]: [&str; 2], rank: usize) -> Result<Linear, OpError> {
    let one = Scalar::Int(crate::Int::Known(1));
    Ok(Linear::Add {
        input: args.tensor("self")?,
        a: args.tensor(a)?,
        b: args.tensor(b)?,
        rank,
        beta: args.opt_scalar("beta")?.unwrap_or(one),
        alpha: args.opt_scalar("alpha")?.unwrap_or(one),
    })
}
