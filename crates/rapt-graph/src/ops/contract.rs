//! Sums of products of two tensors over dimensions that both have: `inner`, `tensordot`, `linalg_vecdot`; powers and chains of
//! matrices; and `addr`.
//!
//! Sums are f64, or int64 with wrap-around, and rounded once; a chain of matrices rounds each product, as PyTorch does.

use rapt_core::DType;

use super::shape::{
    bounded, cells, count, dims_of, fresh, misfit, need_float, need_number, need_same, pick, places, row_major,
    scalar_float,
};
use crate::number::{is_float, round, wrap};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Precision, Scalar, Shapes, Tensor, ValueId, strides};

/// A contraction.
#[derive(Clone, Debug, PartialEq)]
pub enum Contract {
    /// `tensordot`: the named dimensions of both go; `inner` names the last.
    Dot {
        /// The tensors.
        factors: [ValueId; 2],
        /// Of each its dimensions, in the order in which they meet.
        dims: [Vec<i64>; 2],
    },
    /// `linalg_vecdot`: vectors along one dimension of both, which broadcast.
    Vectors {
        /// The tensors.
        factors: [ValueId; 2],
        /// The dimension.
        dim: i64,
    },
    /// `linalg_multi_dot`, `chain_matmul`: a product of matrices, from the left.
    Chain(Vec<ValueId>),
    /// `matrix_power`: a product of a matrix with itself.
    Power {
        /// The matrices.
        input: ValueId,
        /// How many factors.
        times: i64,
    },
    /// `addr`: `beta · input + alpha · a bᵀ`.
    Outer {
        /// The matrix, or what broadcasts to it.
        input: ValueId,
        /// The vectors.
        vectors: [ValueId; 2],
        /// The two factors.
        factors: [Scalar; 2],
    },
}

impl Contract {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Contract, OpError>> {
        let both = |a: &str, b: &str| Ok([args.tensor(a)?, args.tensor(b)?]);
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "inner.default" => {
                both("self", "other").map(|factors| Contract::Dot { factors, dims: [vec![-1], vec![-1]] })
            }
            "tensordot.default" => both("self", "other").and_then(|factors| {
                Ok(Contract::Dot { factors, dims: [known(args, "dims_self")?, known(args, "dims_other")?] })
            }),
            "linalg_vecdot.default" => {
                both("x", "y").and_then(|factors| Ok(Contract::Vectors { factors, dim: args.known_int_or("dim", -1)? }))
            }
            "linalg_multi_dot.default" => args.tensors("tensors").map(Contract::Chain),
            "chain_matmul.default" => args.tensors("matrices").map(Contract::Chain),
            "matrix_power.default" | "linalg_matrix_power.default" => {
                args.known_int("n").and_then(|times| Ok(Contract::Power { input: args.tensor("self")?, times }))
            }
            "addr.default" => both("vec1", "vec2").and_then(|vectors| {
                let one = Scalar::Int(Int::Known(1));
                let factors = [args.opt_scalar("beta")?.unwrap_or(one), args.opt_scalar("alpha")?.unwrap_or(one)];
                Ok(Contract::Outer { input: args.tensor("self")?, vectors, factors })
            }),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Contract::Dot { factors, dims } => {
                let [a, b] = self.both(shapes, *factors)?;
                if a.shape.is_empty() || b.shape.is_empty() {
                    // A number times a tensor lies as the tensor does.
                    let shape = strides::broadcast([&a.shape[..], &b.shape])?;
                    let lie = strides::of_pointwise(&shape, &[a, b]);
                    return Ok(vec![Out::Fresh(Meta { dtype: a.dtype, shape, strides: lie, offset: 0 })]);
                }
                Ok(vec![fresh(a.dtype, &Parts::of([a, b], dims)?.shape())?])
            }
            Contract::Vectors { factors, dim } => {
                let [a, b] = self.both(shapes, *factors)?;
                let whole = strides::broadcast([&a.shape[..], &b.shape])?;
                let gone = dims_of(&Meta::contiguous(a.dtype, &whole), &[*dim])?;
                Ok(vec![fresh(a.dtype, &super::reduce::reduced(&whole, &gone, false))?])
            }
            Contract::Chain(matrices) => {
                let mut metas = Vec::new();
                for &id in matrices {
                    metas.push(shapes.meta(id)?);
                }
                let (Some(first), Some(last)) = (metas.first(), metas.last()) else { return misfit("no matrices") };
                for pair in metas.windows(2) {
                    need_same(pair[0].dtype, pair[1].dtype)?;
                    if pair[0].shape.last() != pair[1].shape.first() {
                        return misfit(format!("matrices of shapes {:?} and {:?}", pair[0].shape, pair[1].shape));
                    }
                }
                let is_matrix = |meta: &&Meta| meta.rank() == 2;
                let ends_fit = metas.len() > 1 && metas[1..metas.len() - 1].iter().all(is_matrix);
                if !ends_fit || ![first, last].iter().all(|meta| matches!(meta.rank(), 1 | 2)) {
                    return misfit("a product of matrices, of which the first and the last may be vectors");
                }
                let mut shape = Vec::new();
                shape.extend((first.rank() == 2).then(|| first.shape[0]));
                shape.extend((last.rank() == 2).then(|| last.shape[1]));
                Ok(vec![fresh(first.dtype, &shape)?])
            }
            Contract::Power { input, times } => {
                let meta = shapes.meta(*input)?;
                need_float("a power of a matrix", meta.dtype)?;
                let [.., rows, columns] = meta.shape[..] else { return misfit("a power of no matrix") };
                if rows != columns {
                    return misfit(format!("a power of matrices of shape {:?}", meta.shape));
                }
                if *times < 0 {
                    return Err(OpError::Refused("a negative power is one of an inverse matrix, which is not served"));
                }
                Ok(vec![fresh(meta.dtype, &meta.shape)?])
            }
            Contract::Outer { input, vectors, .. } => {
                let [a, b] = self.both(shapes, *vectors)?;
                let meta = shapes.meta(*input)?;
                need_same(meta.dtype, a.dtype)?;
                let (&[rows], &[columns]) = (&a.shape[..], &b.shape[..]) else { return misfit("addr takes vectors") };
                strides::broadcasts_to(&meta.shape, &[rows, columns])?;
                bounded(&[rows, columns])?;
                let shape = vec![rows, columns];
                let column = Meta { shape: vec![rows, 1], strides: vec![a.strides[0], 1], ..a.clone() };
                let lie = strides::of_pointwise(&shape, &[meta, &column, b]);
                Ok(vec![Out::Fresh(Meta { dtype: meta.dtype, shape, strides: lie, offset: 0 })])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let result = match self {
            Contract::Dot { factors, dims } => {
                let [a, b] = [eval.tensor(factors[0])?, eval.tensor(factors[1])?];
                let dtype = a.meta.dtype;
                if a.meta.shape.is_empty() || b.meta.shape.is_empty() {
                    let shape = &outs[0].meta.shape;
                    let each = |x: &Tensor| cells(&x.broadcast(shape));
                    products(&each(a), &each(b), (0..count(outs[0].meta.numel())).map(|p| [(p, p)]), dtype)
                } else {
                    let parts = Parts::of([&a.meta, &b.meta], dims)?;
                    let [of_a, of_b] = parts.places([&a.meta, &b.meta]);
                    let (x, y) = (cells(a), cells(b));
                    let all = of_a.0.iter().flat_map(|p| of_b.0.iter().map(move |q| (p, q)));
                    let sums = |(p, q): (&usize, &usize)| {
                        let (p, q) = (*p, *q);
                        of_a.1.iter().zip(&of_b.1).map(move |(i, j)| (p + i, q + j)).collect::<Vec<_>>()
                    };
                    products(&x, &y, all.map(sums), dtype)
                }
            }
            Contract::Vectors { factors, dim } => {
                let [a, b] = [eval.tensor(factors[0])?, eval.tensor(factors[1])?];
                let whole = strides::broadcast([&a.meta.shape[..], &b.meta.shape])?;
                let gone = dims_of(&Meta::contiguous(a.meta.dtype, &whole), &[*dim])?;
                let (starts, steps) = super::reduce::kept_and_reduced(&whole, &gone);
                let (x, y) = (cells(&a.broadcast(&whole)), cells(&b.broadcast(&whole)));
                let sums =
                    |start: usize| steps.iter().map(move |step| (start + step, start + step)).collect::<Vec<_>>();
                products(&x, &y, starts.into_iter().map(sums), a.meta.dtype)
            }
            Contract::Chain(matrices) => {
                let matrices = matrices.iter().map(|&id| eval.tensor(id)).collect::<Result<Vec<_>, _>>()?;
                let size = |n: i64| count(n);
                let first = matrices[0];
                let rows = if first.meta.rank() == 2 { size(first.meta.shape[0]) } else { 1 };
                let mut product = cells(first);
                for next in &matrices[1..] {
                    let inner = size(next.meta.shape[0]);
                    let columns = if next.meta.rank() == 2 { size(next.meta.shape[1]) } else { 1 };
                    product = rounded(
                        matmul(&product, &cells(next), [rows, inner, columns], first.meta.dtype),
                        eval,
                        first.meta.dtype,
                    );
                }
                product
            }
            Contract::Power { input, times } => power(eval, eval.tensor(*input)?, *times)?,
            Contract::Outer { input, vectors, factors } => {
                let [a, b] = [eval.tensor(vectors[0])?, eval.tensor(vectors[1])?];
                let shape = &outs[0].meta.shape;
                let input = eval.tensor(*input)?;
                let [beta, alpha] = [scalar_float(eval, factors[0])?, scalar_float(eval, factors[1])?];
                let columns = count(shape[1]);
                match (cells(a), cells(b), cells(&input.broadcast(shape))) {
                    (Cells::Float(a), Cells::Float(b), Cells::Float(x)) => {
                        let one = |(p, x): (usize, &f64)| {
                            let product = alpha * a[p / columns] * b[p % columns];
                            if beta == 0.0 { product } else { beta * x + product }
                        };
                        Cells::Float(x.iter().enumerate().map(one).collect())
                    }
                    (Cells::Int(a), Cells::Int(b), Cells::Int(x)) => {
                        let [beta, alpha] = [beta as i64, alpha as i64];
                        let one = |(p, x): (usize, &i64)| {
                            let product = alpha.wrapping_mul(a[p / columns]).wrapping_mul(b[p % columns]);
                            wrap(input.meta.dtype, beta.wrapping_mul(*x).wrapping_add(product))
                        };
                        Cells::Int(x.iter().enumerate().map(one).collect())
                    }
                    _ => return misfit("operands of two kinds"),
                }
            }
        };
        outs[0].write(eval.precision(), result);
        Ok(())
    }

    fn both<'a>(&self, shapes: &'a dyn Shapes, factors: [ValueId; 2]) -> Result<[&'a Meta; 2], OpError> {
        let [a, b] = [shapes.meta(factors[0])?, shapes.meta(factors[1])?];
        need_same(a.dtype, b.dtype)?;
        match self {
            Contract::Outer { .. } if a.dtype == DType::Bool => {}
            _ => need_number("a sum of products", a.dtype)?,
        }
        Ok([a, b])
    }
}

/// The dimensions of two tensors: those that stay, and those that meet.
struct Parts {
    free: [Vec<usize>; 2],
    summed: [Vec<usize>; 2],
    sizes: [Vec<i64>; 2],
}

impl Parts {
    fn of(metas: [&Meta; 2], dims: &[Vec<i64>; 2]) -> Result<Parts, OpError> {
        let mut summed = [Vec::new(), Vec::new()];
        for n in 0..2 {
            summed[n] = dims[n].iter().map(|&dim| metas[n].dim(dim)).collect::<Result<Vec<_>, _>>()?;
            let mut sorted = summed[n].clone();
            sorted.sort_unstable();
            sorted.dedup();
            if sorted.len() != summed[n].len() {
                return misfit("a dimension is summed twice");
            }
        }
        let sizes = |n: usize| summed[n].iter().map(|&d| metas[n].shape[d]).collect::<Vec<_>>();
        if sizes(0) != sizes(1) {
            return misfit(format!("shapes {:?} and {:?} do not meet in {dims:?}", metas[0].shape, metas[1].shape));
        }
        let free = [0, 1].map(|n| (0..metas[n].rank()).filter(|d| !summed[n].contains(d)).collect::<Vec<_>>());
        let sizes = [0, 1].map(|n| free[n].iter().map(|&d| metas[n].shape[d]).collect());
        Ok(Parts { free, summed, sizes })
    }

    fn shape(&self) -> Vec<i64> {
        self.sizes.concat()
    }

    /// Of each tensor, stored in rows, where its results begin, and the steps to what is summed.
    fn places(&self, metas: [&Meta; 2]) -> [(Vec<usize>, Vec<usize>); 2] {
        [0, 1].map(|n| {
            let strides = row_major(&metas[n].shape);
            let of = |dims: &[usize]| {
                let (sizes, steps): (Vec<i64>, Vec<i64>) =
                    dims.iter().map(|&d| (metas[n].shape[d], strides[d])).unzip();
                places(&sizes, &steps)
            };
            (of(&self.free[n]), of(&self.summed[n]))
        })
    }
}

/// For each result the sum of the products of elements at these places.
fn products<P: IntoIterator<Item = (usize, usize)>>(
    a: &Cells,
    b: &Cells,
    results: impl Iterator<Item = P>,
    dtype: DType,
) -> Cells {
    match (a, b) {
        (Cells::Float(a), Cells::Float(b)) => {
            Cells::Float(results.map(|pairs| pairs.into_iter().fold(0.0, |sum, (i, j)| sum + a[i] * b[j])).collect())
        }
        (Cells::Int(a), Cells::Int(b)) => {
            let sum = |pairs: P| pairs.into_iter().fold(0i64, |sum, (i, j)| sum.wrapping_add(a[i].wrapping_mul(b[j])));
            Cells::Int(results.map(|pairs| wrap(dtype, sum(pairs))).collect())
        }
        // The dtypes are equal: inference has checked it.
        _ => pick(a, []),
    }
}

/// The product of each matrix with itself: by squares, as PyTorch takes it, each rounded.
fn power(eval: &dyn Eval, input: &Tensor, times: i64) -> Result<Cells, OpError> {
    let dtype = input.meta.dtype;
    let n = count(input.meta.shape.last().copied().unwrap_or(0));
    let Cells::Float(x) = cells(input) else { return misfit("a power of integers") };
    let mut all = Vec::with_capacity(x.len());
    for matrix in x.chunks(n.saturating_mul(n).max(1)) {
        let own = Cells::Float(matrix.to_vec());
        let mut product: Option<Cells> = None;
        let (mut square, mut left) = (own, times);
        while left > 0 {
            if left % 2 == 1 {
                product = Some(match product {
                    Some(product) => rounded(matmul(&product, &square, [n; 3], dtype), eval, dtype),
                    None => square.clone(),
                });
            }
            left /= 2;
            if left > 0 {
                square = rounded(matmul(&square, &square, [n; 3], dtype), eval, dtype);
            }
        }
        match product {
            Some(Cells::Float(product)) => all.extend(product),
            _ => all.extend((0..n * n).map(|p| f64::from(u8::from(p / n == p % n)))),
        }
    }
    Ok(Cells::Float(all))
}

fn matmul(a: &Cells, b: &Cells, [rows, inner, columns]: [usize; 3], dtype: DType) -> Cells {
    let sums = |p: usize| {
        let (row, column) = (p / columns, p % columns);
        (0..inner).map(move |k| (row * inner + k, k * columns + column)).collect::<Vec<_>>()
    };
    products(a, b, (0..rows * columns).map(sums), dtype)
}

fn rounded(x: Cells, eval: &dyn Eval, dtype: DType) -> Cells {
    match x {
        Cells::Float(x) if eval.precision() == Precision::Rounded && is_float(dtype) => {
            Cells::Float(x.into_iter().map(|x| round(dtype, x)).collect())
        }
        x => x,
    }
}

fn known(args: &Args<'_>, name: &str) -> Result<Vec<i64>, OpError> {
    let number = |int| match int {
        Int::Known(n) => Ok(n),
        Int::Value(_) => {
            Err(OpError::ArgumentValue { name: name.into(), value: "symbolic".into(), why: "dimensions are numbers" })
        }
    };
    args.ints(name)?.into_iter().map(number).collect()
}
