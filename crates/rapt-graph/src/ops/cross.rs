//! Products of vectors and of matrices element by element: `cross`, `kron`.

use super::shape::{
    Lanes, cells, count, expand_places, fresh, misfit, need_number, need_plain, need_same, pick, places,
};
use crate::number::wrap;
use crate::{Args, Cells, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A product of two tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Cross {
    /// The factors; of `cross` both broadcast.
    factors: [ValueId; 2],
    /// What is computed.
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// `cross`: `a × b` of vectors of three numbers along a dimension; the first such dimension if none is named.
    Vectors(Option<i64>),
    /// `kron`: each element of the first times all of the second.
    Blocks,
}

impl Cross {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Cross, OpError>> {
        let dim = || args.opt_int("dim").and_then(|dim| dim.map(|_| args.known_int("dim")).transpose());
        let kind = match target.strip_prefix("torch.ops.aten.")? {
            "linalg_cross.default" => dim().map(|dim| Kind::Vectors(Some(dim.unwrap_or(-1)))),
            "cross.default" => dim().map(Kind::Vectors),
            "kron.default" => Ok(Kind::Blocks),
            _ => return None,
        };
        Some(kind.and_then(|kind| Ok(Cross { factors: [args.tensor("self")?, args.tensor("other")?], kind })))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let [a, b] = [shapes.meta(self.factors[0])?, shapes.meta(self.factors[1])?];
        need_same(a.dtype, b.dtype)?;
        match self.kind {
            Kind::Vectors(dim) => {
                need_number("a cross product", a.dtype)?;
                let (shape, _) = vectors(a, b, dim)?;
                Ok(vec![fresh(a.dtype, &shape)?])
            }
            Kind::Blocks => {
                need_plain("a product of matrices", a.dtype)?;
                let [of_a, of_b] = blocks([a, b]);
                let pairs: Vec<i64> = of_a.shape.iter().zip(&of_b.shape).map(|(n, m)| *n.max(m)).collect();
                let shape: Vec<i64> = pairs.chunks(2).map(|pair| pair[0].saturating_mul(pair[1])).collect();
                fresh(a.dtype, &shape)?;
                // PyTorch multiplies views of two dimensions for each one and reshapes the product.
                let lie = strides::of_pointwise(&pairs, &[&of_a, &of_b]);
                let product = Meta { dtype: a.dtype, shape: pairs, strides: lie, offset: 0 };
                Ok(vec![product.reshaped(&shape).map_or(fresh(a.dtype, &shape)?, Out::Fresh)])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let [a, b] = [eval.tensor(self.factors[0])?, eval.tensor(self.factors[1])?];
        let dtype = a.meta.dtype;
        match self.kind {
            Kind::Vectors(dim) => {
                let (shape, dim) = vectors(&a.meta, &b.meta, dim)?;
                let seen = |x: &Tensor| -> Result<Cells, OpError> {
                    Ok(pick(&cells(x), expand_places(&x.meta.shape, &shape)?))
                };
                let lanes = Lanes::of(&shape, dim);
                // Of element k of a vector: the places of its two partners.
                let partners = |p: usize| {
                    let k = p / lanes.inner % 3;
                    let at = |n: usize| p - k * lanes.inner + n * lanes.inner;
                    (at((k + 1) % 3), at((k + 2) % 3))
                };
                let one = |p: usize| {
                    let (i, j) = partners(p);
                    [(i, j), (j, i)]
                };
                let numel = shape.iter().map(|&n| count(n)).product::<usize>();
                let product = match (seen(a)?, seen(b)?) {
                    (Cells::Float(a), Cells::Float(b)) => {
                        let both = |p: usize| one(p).map(|(i, j)| a[i] * b[j]);
                        Cells::Float((0..numel).map(both).map(|[more, less]| more - less).collect())
                    }
                    (Cells::Int(a), Cells::Int(b)) => {
                        let both = |p: usize| one(p).map(|(i, j)| a[i].wrapping_mul(b[j]));
                        Cells::Int(
                            (0..numel).map(both).map(|[more, less]| wrap(dtype, more.wrapping_sub(less))).collect(),
                        )
                    }
                    // The dtypes are equal: inference has checked it.
                    _ => return misfit("operands of two kinds"),
                };
                outs[0].write(eval.precision(), product);
            }
            Kind::Blocks => {
                let [of_a, of_b] = blocks([&a.meta, &b.meta]);
                let pairs: Vec<i64> = of_a.shape.iter().zip(&of_b.shape).map(|(n, m)| *n.max(m)).collect();
                let read = |x: &Tensor, form: &Meta| -> Result<Cells, OpError> {
                    let own = super::shape::row_major(&x.meta.shape);
                    let lead = form.rank() / 2 - own.len();
                    let of_dim = |d: usize| d.checked_sub(lead).map_or(0, |d| own[d]);
                    let steps: Vec<i64> =
                        (0..form.rank()).map(|d| if form.shape[d] == 1 { 0 } else { of_dim(d / 2) }).collect();
                    Ok(pick(&cells(x), places(&pairs, &steps)))
                };
                let product = match (read(a, &of_a)?, read(b, &of_b)?) {
                    (Cells::Float(a), Cells::Float(b)) => Cells::Float(a.iter().zip(&b).map(|(a, b)| a * b).collect()),
                    (Cells::Int(a), Cells::Int(b)) => {
                        Cells::Int(a.iter().zip(&b).map(|(a, b)| wrap(dtype, a.wrapping_mul(*b))).collect())
                    }
                    _ => return misfit("operands of two kinds"),
                };
                outs[0].write(eval.precision(), product);
            }
        }
        Ok(())
    }
}

/// The shape that both broadcast to, and the dimension of their vectors.
fn vectors(a: &Meta, b: &Meta, dim: Option<i64>) -> Result<(Vec<i64>, usize), OpError> {
    let shape = strides::broadcast([&a.shape[..], &b.shape])?;
    let dim = match dim {
        Some(dim) => a.dim(dim)?,
        None => a.shape.iter().position(|&n| n == 3).unwrap_or(usize::MAX),
    };
    let is_three = |meta: &Meta| meta.shape.get(dim) == Some(&3);
    if a.rank() == b.rank() && is_three(a) && is_three(b) {
        return Ok((shape, dim));
    }
    misfit(format!("a cross product of vectors of shapes {:?} and {:?}", a.shape, b.shape))
}

/// Both with two dimensions for each one: the first has size 1 in the second of them, the second in the first.
fn blocks(factors: [&Meta; 2]) -> [Meta; 2] {
    let rank = factors[0].rank().max(factors[1].rank());
    let mut seen = factors.map(|meta| {
        let mut wide = Meta { shape: vec![1; rank], strides: vec![0; rank], ..meta.clone() };
        wide.shape[rank - meta.rank()..].copy_from_slice(&meta.shape);
        wide.strides[rank - meta.rank()..].copy_from_slice(&meta.strides);
        wide
    });
    for (second, meta) in seen.iter_mut().enumerate() {
        let doubled = |own: &[i64], other: i64| -> Vec<i64> {
            own.iter().flat_map(|&n| if second == 0 { [n, other] } else { [other, n] }).collect()
        };
        (meta.shape, meta.strides) = (doubled(&meta.shape, 1), doubled(&meta.strides, 0));
    }
    seen
}
