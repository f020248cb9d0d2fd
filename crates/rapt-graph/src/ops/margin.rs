//! Losses with a margin: `margin_ranking_loss`, `hinge_embedding_loss`, `cosine_embedding_loss`, `triplet_margin_loss`.
//!
//! ```text
//! ranking   max(0, −t (a − b) + margin)
//! hinge     x where t = 1, max(0, margin − x) where t = −1
//! cosine    1 − cos(a, b) where t = 1, max(0, cos(a, b) − margin) where t = −1
//! triplet   max(0, d(anchor, positive) − d(anchor, negative) + margin), d of order p with eps added to each difference
//! ```
//! All in f64, rounded once.

use super::loss::{Reduction, reduction};
use super::reduce::{kept_and_reduced, reduced, vector_norm};
use super::shape::{expand_places, fresh, misfit, need_float, need_same};
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A loss with a margin.
#[derive(Clone, Debug, PartialEq)]
pub struct Margin {
    /// Its tensors; the target is the last but of a triplet.
    operands: Vec<ValueId>,
    kind: Kind,
    margin: f64,
    reduction: Reduction,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Ranking,
    Hinge,
    Cosine,
    Triplet {
        p: f64,
        eps: f64,
        /// Whether the positive's distance from the negative counts where it is less than the anchor's.
        swap: bool,
    },
}

impl Margin {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Margin, OpError>> {
        let (kind, names, margin): (_, &[&str], _) = match target.strip_prefix("torch.ops.aten.")? {
            "margin_ranking_loss.default" => (Ok(Kind::Ranking), &["input1", "input2", "target"], 0.0),
            "hinge_embedding_loss.default" => (Ok(Kind::Hinge), &["self", "target"], 1.0),
            "cosine_embedding_loss.default" => (Ok(Kind::Cosine), &["input1", "input2", "target"], 0.0),
            "triplet_margin_loss.default" => (triplet(args), &["anchor", "positive", "negative"], 1.0),
            _ => return None,
        };
        Some(kind.and_then(|kind| {
            let operands = names.iter().map(|name| args.tensor(name)).collect::<Result<_, _>>()?;
            let margin = args.opt_float("margin")?.unwrap_or(margin);
            Ok(Margin { operands, kind, margin, reduction: reduction(args)? })
        }))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let metas = self.operands.iter().map(|&id| shapes.meta(id)).collect::<Result<Vec<_>, _>>()?;
        let dtype = metas[0].dtype;
        need_float("a loss", dtype)?;
        for meta in &metas {
            need_same(dtype, meta.dtype)?;
        }
        let shape = self.shape(&metas)?;
        if self.reduction != Reduction::None {
            return Ok(vec![fresh(dtype, &[])?]);
        }
        let lie = match self.kind {
            Kind::Ranking | Kind::Hinge => strides::of_pointwise(&shape, &metas),
            _ => Meta::contiguous(dtype, &shape).strides,
        };
        Ok(vec![Out::Fresh(Meta { dtype, shape, strides: lie, offset: 0 })])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let tensors = self.operands.iter().map(|&id| eval.tensor(id)).collect::<Result<Vec<_>, _>>()?;
        let metas: Vec<&Meta> = tensors.iter().map(|tensor| &tensor.meta).collect();
        let shape = self.shape(&metas)?;
        let whole = self.whole(&metas)?;
        let numbers = |n: usize| -> Result<Vec<f64>, OpError> {
            let x = tensors[n].floats();
            let to = if matches!(self.kind, Kind::Cosine) && n == 2 { &shape } else { &whole };
            Ok(expand_places(&metas[n].shape, to)?.into_iter().map(|p| x[p]).collect())
        };
        let x = (0..tensors.len()).map(numbers).collect::<Result<Vec<_>, _>>()?;
        let gone: Vec<usize> = match self.kind {
            Kind::Ranking | Kind::Hinge => Vec::new(),
            _ => whole.len().checked_sub(1).into_iter().collect(),
        };
        let (starts, steps) = kept_and_reduced(&whole, &gone);
        let product = |a: &[f64], b: &[f64], start: usize| {
            steps.iter().fold(0.0, |sum, step| sum + a[start + step] * b[start + step])
        };
        let one = |(n, &start): (usize, &usize)| match self.kind {
            Kind::Ranking => (-x[2][n] * (x[0][n] - x[1][n]) + self.margin).max(0.0),
            Kind::Hinge if x[1][n] == 1.0 => x[0][n],
            Kind::Hinge if x[1][n] == -1.0 => (self.margin - x[0][n]).max(0.0),
            // PyTorch sums both cases, each 0 where the other holds.
            Kind::Hinge => (self.margin - x[0][n]).max(0.0) + x[0][n],
            Kind::Cosine => {
                // The squares have a small number added.
                let square = |a: &[f64]| product(a, a, start) + 1e-12;
                let cos = product(&x[0], &x[1], start) / (square(&x[0]) * square(&x[1])).sqrt();
                match x[2][n] {
                    1.0 => 1.0 - cos,
                    -1.0 => (cos - self.margin).max(0.0),
                    _ => 0.0,
                }
            }
            Kind::Triplet { p, eps, swap } => {
                let apart = |a: usize, b: usize| {
                    vector_norm(steps.iter().map(|step| x[a][start + step] - x[b][start + step] + eps), p)
                };
                let (near, mut far) = (apart(0, 1), apart(0, 2));
                if swap {
                    far = far.min(apart(1, 2));
                }
                (near - far + self.margin).max(0.0)
            }
        };
        let losses: Vec<f64> = starts.iter().enumerate().map(one).collect();
        outs[0].write_floats(eval.precision(), self.reduction.of(losses));
        Ok(())
    }

    fn whole(&self, metas: &[&Meta]) -> Result<Vec<i64>, OpError> {
        let own = if matches!(self.kind, Kind::Cosine) { &metas[..2] } else { metas };
        strides::broadcast(own.iter().map(|meta| meta.shape.as_slice()))
    }

    /// The shape of the losses.
    fn shape(&self, metas: &[&Meta]) -> Result<Vec<i64>, OpError> {
        let whole = self.whole(metas)?;
        let shape = match self.kind {
            Kind::Ranking | Kind::Hinge => return Ok(whole),
            _ => {
                let Some(last) = whole.len().checked_sub(1) else {
                    return misfit("a loss of vectors without dimensions");
                };
                reduced(&whole, &[last], false)
            }
        };
        if matches!(self.kind, Kind::Cosine) && metas[2].shape != shape {
            return misfit(format!("targets of shape {:?}, expected {shape:?}", metas[2].shape));
        }
        Ok(shape)
    }
}

fn triplet(args: &Args<'_>) -> Result<Kind, OpError> {
    let (p, eps) = (args.opt_float("p")?.unwrap_or(2.0), args.opt_float("eps")?.unwrap_or(1e-6));
    Ok(Kind::Triplet { p, eps, swap: args.bool_or("swap", false)? })
}
