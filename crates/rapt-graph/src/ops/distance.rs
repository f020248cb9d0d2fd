//! Distances between vectors: `cdist` of every pair, `pdist` of every pair of one matrix, `pairwise_distance` of those at one place,
//! `dist` of tensors as wholes.
//!
//! `(Σ |a_i − b_i|^p)^(1/p)`, in f64 and rounded once; at p = 0 the number of differences, at p = ∞ the greatest.
//!
//! What is not finite follows PyTorch's kernels. `cdist` at p = 0 is NaN where a difference is, at p = ∞ it passes NaN over. At p = 2, of more than
//! 25 vectors or where it is asked for, PyTorch expands `|a|² + |b|² − 2 a·b`, which is NaN for many infinite vectors; finite distances are those of
//! the formula above.

use super::reduce::vector_norm;
use super::shape::{count, expand_places, fresh, is_int, misfit, need_float, need_same, refuse};
use crate::number::wrap;
use crate::promote::DEFAULT_FLOAT;
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A distance.
#[derive(Clone, Debug, PartialEq)]
pub struct Distance {
    /// The vectors, along the last dimension.
    a: ValueId,
    /// The others.
    b: ValueId,
    /// The norm.
    p: f64,
    /// What is said of pairs at one place.
    pairs: Option<Pairs>,
    /// Whether squares are expanded at p = 2; `None` is where there are many vectors.
    expands: Option<bool>,
    /// Which distances there are.
    which: Which,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// Of each vector from each other one, or of those at one place.
    All,
    /// `pdist`: of the rows of one matrix, each pair once.
    Among,
    /// `dist`: of the tensors as wholes.
    Whole,
}

/// The most vectors whose squares PyTorch does not expand by itself.
const FEW: i64 = 25;

/// What `pairwise_distance` says more.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pairs {
    /// What is added to each difference.
    eps: f64,
    /// Whether the dimension stays with size 1.
    keepdim: bool,
}

impl Distance {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Distance, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "cdist.default" | "_cdist_forward.default" => cdist(args),
            "pairwise_distance.default" => pairwise(args),
            "pdist.default" | "_pdist_forward.default" => among(args),
            "dist.default" => whole(args),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (a, b) = (shapes.meta(self.a)?, shapes.meta(self.b)?);
        need_same(a.dtype, b.dtype)?;
        let dtype = match self.pairs {
            // What is added to a difference of integers makes a float of it.
            Some(_) if is_int(a.dtype) => DEFAULT_FLOAT,
            _ => a.dtype,
        };
        need_float("a distance", dtype)?;
        Ok(vec![fresh(dtype, &self.shape(a, b)?)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (a, b) = (eval.tensor(self.a)?, eval.tensor(self.b)?);
        let (x, y) = (a.floats(), b.floats());
        let size = count(a.meta.shape.last().copied().unwrap_or(0));
        let distances: Vec<f64> = if self.which == Which::Whole {
            let shape = strides::broadcast([&a.meta.shape[..], &b.meta.shape[..]])?;
            let (of_a, of_b) = (expand_places(&a.meta.shape, &shape)?, expand_places(&b.meta.shape, &shape)?);
            vec![vector_norm(of_a.iter().zip(&of_b).map(|(&p, &q)| x[p] - y[q]), self.p)]
        } else if self.which == Which::Among {
            let rows = count(a.meta.shape[0]);
            let row = |n: usize| &x[n * size..][..size];
            let pair = |i: usize, j: usize| vector_norm(row(i).iter().zip(row(j)).map(|(a, b)| a - b), self.p);
            (0..rows).flat_map(|i| (i + 1..rows).map(move |j| (i, j))).map(|(i, j)| pair(i, j)).collect()
        } else if let Some(Pairs { eps, .. }) = self.pairs {
            let shape = strides::broadcast([&a.meta.shape[..], &b.meta.shape[..]])?;
            let size = count(shape.last().copied().unwrap_or(0));
            let (of_a, of_b) = (expand_places(&a.meta.shape, &shape)?, expand_places(&b.meta.shape, &shape)?);
            let dtype = a.meta.dtype;
            let wrapped = |x: f64| if is_int(dtype) { wrap(dtype, x as i64) as f64 } else { x };
            let one = |n: usize| {
                let own = n * size..(n + 1) * size;
                vector_norm(own.map(|k| wrapped(x[of_a[k]] - y[of_b[k]]) + eps), self.p)
            };
            (0..count(outs[0].meta.numel())).map(one).collect()
        } else {
            // Of each pair, the first vector's number and the second's.
            let to = &outs[0].meta.shape;
            let (of_a, of_b) = (expand_places(&column(&a.meta), to)?, expand_places(&row(&b.meta), to)?);
            let many = to[to.len() - 2..].iter().any(|&n| n > FEW);
            let expands = self.p == 2.0 && self.expands.unwrap_or(many);
            let one = |(&p, &q): (&usize, &usize)| {
                let (a, b) = (&x[p * size..][..size], &y[q * size..][..size]);
                let expanded = if expands { expanded(a, b) } else { 0.0 };
                let differences = a.iter().zip(b).map(|(a, b)| a - b);
                match self.p {
                    _ if !expanded.is_finite() => expanded,
                    0.0 if differences.clone().any(f64::is_nan) => f64::NAN,
                    f64::INFINITY => differences.fold(0.0, |greatest: f64, x| greatest.max(x.abs())),
                    p => vector_norm(differences, p),
                }
            };
            of_a.iter().zip(&of_b).map(one).collect()
        };
        outs[0].write_floats(eval.precision(), distances);
        Ok(())
    }

    fn shape(&self, a: &Meta, b: &Meta) -> Result<Vec<i64>, OpError> {
        match (self.which, &a.shape[..]) {
            (Which::All, _) => {}
            (Which::Among, &[rows, _]) => return Ok(vec![rows * (rows - 1).max(0) / 2]),
            (Which::Among, shape) => return misfit(format!("pdist of a tensor of shape {shape:?}")),
            (Which::Whole, _) => return strides::broadcast([&a.shape[..], &b.shape]).map(|_| Vec::new()),
        }
        if let Some(pairs) = self.pairs {
            let mut shape = strides::broadcast([&a.shape[..], &b.shape[..]])?;
            if shape.is_empty() {
                return misfit("a distance of tensors without dimensions");
            }
            shape.pop();
            shape.extend(pairs.keepdim.then_some(1));
            return Ok(shape);
        }
        match (&a.shape[..], &b.shape[..]) {
            ([of_a @ .., rows, n], [of_b @ .., columns, m]) if n == m => {
                Ok([&strides::broadcast([of_a, of_b])?[..], &[*rows, *columns]].concat())
            }
            (a, b) => misfit(format!("distances of vectors of shapes {a:?} and {b:?}")),
        }
    }
}

/// `|a|² + |b|² − 2 a·b`, at least 0.
fn expanded(a: &[f64], b: &[f64]) -> f64 {
    let square = |x: &[f64]| x.iter().fold(0.0, |sum, x| sum + x * x);
    let sum = a.iter().zip(b).fold(0.0, |sum, (a, b)| sum - 2.0 * a * b) + square(a) + square(b);
    if sum < 0.0 { 0.0 } else { sum }
}

/// The shape of the vectors' numbers, one below the other.
fn column(meta: &Meta) -> Vec<i64> {
    let mut shape = meta.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    shape
}

/// The same, side by side.
fn row(meta: &Meta) -> Vec<i64> {
    let mut shape = column(meta);
    let last = shape.len().saturating_sub(2);
    shape[last..].reverse();
    shape
}

fn among(args: &Args<'_>) -> Result<Distance, OpError> {
    let p = args.opt_float("p")?.unwrap_or(2.0);
    let a = args.tensor("self")?;
    Ok(Distance { a, b: a, p, pairs: None, expands: None, which: Which::Among })
}

fn whole(args: &Args<'_>) -> Result<Distance, OpError> {
    let p = match args.opt_scalar("p")? {
        None => 2.0,
        Some(crate::Scalar::Float(p)) => p,
        Some(crate::Scalar::Int(crate::Int::Known(p))) => p as f64,
        Some(_) => return refuse("p", "symbolic", "a number is needed here"),
    };
    let (a, b) = (args.tensor("self")?, args.tensor("other")?);
    Ok(Distance { a, b, p, pairs: None, expands: None, which: Which::Whole })
}

fn cdist(args: &Args<'_>) -> Result<Distance, OpError> {
    let expands = match args.opt_int("compute_mode")?.map(|_| args.known_int("compute_mode")).transpose()? {
        None | Some(0) => None,
        Some(1) => Some(true),
        Some(2) => Some(false),
        Some(other) => return refuse("compute_mode", other.to_string(), "it is 0, 1 or 2"),
    };
    let p = args.opt_float("p")?.unwrap_or(2.0);
    if p < 0.0 {
        return refuse("p", p.to_string(), "it must not be negative");
    }
    Ok(Distance { a: args.tensor("x1")?, b: args.tensor("x2")?, p, pairs: None, expands, which: Which::All })
}

fn pairwise(args: &Args<'_>) -> Result<Distance, OpError> {
    let pairs = Pairs { eps: args.opt_float("eps")?.unwrap_or(1e-6), keepdim: args.bool_or("keepdim", false)? };
    let p = args.opt_float("p")?.unwrap_or(2.0);
    Ok(Distance {
        a: args.tensor("x1")?,
        b: args.tensor("x2")?,
        p,
        pairs: Some(pairs),
        expands: None,
        which: Which::All,
    })
}
