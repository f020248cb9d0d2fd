//! `_weight_norm`: weights that were trained as a direction and a length.
//!
//! `w = v · g / ‖v‖`, each slice of one dimension with its own norm, in f64 and rounded once. Of a trained model all three are
//! constant.

use super::reduce::kept_and_reduced;
use super::shape::{fresh, misfit, need_float, need_same};
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId};

/// A weight of a given length.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightNorm {
    /// The direction.
    pub direction: ValueId,
    /// The length of each slice.
    pub length: ValueId,
    /// The dimension whose slices have lengths of their own; −1 is none: one length for all.
    pub dim: i64,
}

impl WeightNorm {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<WeightNorm, OpError>> {
        let read = || {
            let (direction, length) = (args.tensor("v")?, args.tensor("g")?);
            Ok(WeightNorm { direction, length, dim: args.known_int_or("dim", 0)? })
        };
        (target == "torch.ops.aten._weight_norm.default").then(read)
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (v, g) = (shapes.meta(self.direction)?, shapes.meta(self.length)?);
        need_float("a weight", v.dtype)?;
        need_same(v.dtype, g.dtype)?;
        self.reduced(v, g)?;
        Ok(vec![fresh(v.dtype, &v.shape)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (v, g) = (eval.tensor(self.direction)?, eval.tensor(self.length)?);
        let (starts, steps) = kept_and_reduced(&v.meta.shape, &self.reduced(&v.meta, &g.meta)?);
        let (mut w, lengths) = (v.floats(), g.floats());
        for (&start, length) in starts.iter().zip(lengths) {
            let norm = steps.iter().fold(0.0, |sum, step| sum + w[start + step] * w[start + step]).sqrt();
            steps.iter().for_each(|step| w[start + step] *= length / norm);
        }
        outs[0].write_floats(eval.precision(), w);
        Ok(())
    }

    /// The dimensions that norms are taken over.
    fn reduced(&self, v: &Meta, g: &Meta) -> Result<Vec<usize>, OpError> {
        let own = if self.dim == -1 { None } else { Some(v.dim(self.dim)?) };
        let reduced: Vec<usize> = (0..v.rank()).filter(|d| Some(*d) != own).collect();
        let mut shape = v.shape.clone();
        reduced.iter().for_each(|&d| shape[d] = 1);
        if g.shape != shape && !(own.is_none() && g.shape.is_empty()) {
            return misfit(format!("lengths of shape {:?} for directions of shape {:?}", g.shape, v.shape));
        }
        Ok(reduced)
    }
}
