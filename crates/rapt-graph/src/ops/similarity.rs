//! `cosine_similarity`.
//!
//! `cos(a, b) = Σ a·b / (max(‖a‖, eps) · max(‖b‖, eps))` along a dimension, in f64 and rounded once.

use super::reduce::{kept_and_reduced, reduced};
use super::shape::{fresh, need_float, need_same};
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// The cosine of the angle between vectors along a dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct Similarity {
    /// The vectors; both broadcast.
    pub vectors: [ValueId; 2],
    /// The dimension.
    pub dim: i64,
    /// The least length that is divided by.
    pub eps: f64,
}

impl Similarity {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Similarity, OpError>> {
        let read = || {
            let vectors = [args.tensor("x1")?, args.tensor("x2")?];
            let eps = args.opt_float("eps")?.unwrap_or(1e-8);
            Ok(Similarity { vectors, dim: args.known_int_or("dim", 1)?, eps })
        };
        (target == "torch.ops.aten.cosine_similarity.default").then(read)
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let [a, b] = self.vectors;
        let (a, b) = (shapes.meta(a)?, shapes.meta(b)?);
        need_float("a cosine", a.dtype)?;
        need_same(a.dtype, b.dtype)?;
        let (whole, dims) = self.whole(a, b)?;
        Ok(vec![fresh(a.dtype, &reduced(&whole, &dims, false))?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let [a, b] = self.vectors;
        let (a, b) = (eval.tensor(a)?, eval.tensor(b)?);
        let (whole, dims) = self.whole(&a.meta, &b.meta)?;
        let (starts, steps) = kept_and_reduced(&whole, &dims);
        let (a, b) = (a.broadcast(&whole).floats(), b.broadcast(&whole).floats());
        let product = |x: &[f64], y: &[f64], start: usize| {
            steps.iter().fold(0.0, |sum, step| sum + x[start + step] * y[start + step])
        };
        let length = |x: &[f64], start: usize| product(x, x, start).sqrt().max(self.eps);
        let one = |&start: &usize| product(&a, &b, start) / (length(&a, start) * length(&b, start));
        outs[0].write_floats(eval.precision(), starts.iter().map(one).collect::<Vec<_>>());
        Ok(())
    }

    /// The shape that both broadcast to, and the dimension that goes.
    fn whole(&self, a: &Meta, b: &Meta) -> Result<(Vec<i64>, Vec<usize>), OpError> {
        let shape = strides::broadcast([a.shape.as_slice(), &b.shape])?;
        let dim = Meta::contiguous(a.dtype, &shape).dim(self.dim)?;
        let dims = if shape.is_empty() { Vec::new() } else { vec![dim] };
        Ok((shape, dims))
    }
}
