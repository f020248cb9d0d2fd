//! Slices that are made shorter where they are too long: `renorm`, and `embedding_renorm_` of the rows that are asked for.
//!
//! `x · max / (‖x‖ + 1e-7)` where the norm of order p is above the most, in f64 and rounded once.

use super::index::{in_range, need_index};
use super::reduce::vector_norm;
use super::shape::{cells, dims_of, fresh, misfit, need_float, scalar_float};
use crate::{Args, Cells, Eval, OpError, Out, Scalar, Shapes, Tensor, ValueId};

/// Slices with a greatest length.
#[derive(Clone, Debug, PartialEq)]
pub struct Renorm {
    input: ValueId,
    /// The dimension whose slices they are.
    dim: i64,
    /// The rows that are asked for, which are written where they lie.
    rows: Option<ValueId>,
    p: Scalar,
    most: Scalar,
}

impl Renorm {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Renorm, OpError>> {
        let read = |names: [&str; 2], rows: Option<ValueId>, dim| {
            let [p, most] = [args.scalar(names[0])?, args.scalar(names[1])?];
            Ok(Renorm { input: args.tensor("self")?, dim, rows, p, most })
        };
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "renorm.default" => args.known_int("dim").and_then(|dim| read(["p", "maxnorm"], None, dim)),
            "embedding_renorm_.default" => {
                args.tensor("indices").and_then(|rows| read(["norm_type", "max_norm"], Some(rows), 0))
            }
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        need_float("a norm", meta.dtype)?;
        if meta.rank() < 2 {
            return misfit(format!("slices of a tensor of shape {:?}", meta.shape));
        }
        dims_of(meta, &[self.dim])?;
        match self.rows {
            Some(rows) => need_index(shapes.meta(rows)?).map(|()| vec![Out::Same(self.input)]),
            None => Ok(vec![fresh(meta.dtype, &meta.shape)?]),
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        self.rows.map(|_| self.input)
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let dim = input.meta.dim(self.dim)?;
        let (p, most) = (scalar_float(eval, self.p)?, scalar_float(eval, self.most)?);
        let Cells::Float(mut x) = cells(input) else { return misfit("a norm of integers") };
        let lanes = super::shape::Lanes::of(&input.meta.shape, dim);
        let mut wanted: Vec<usize> = (0..lanes.size).collect();
        if let Some(rows) = self.rows {
            let index = |&i: &i64| in_range(i, 0, input.meta.shape[0]);
            wanted = eval.tensor(rows)?.ints().iter().map(index).collect::<Result<_, _>>()?;
            wanted.sort_unstable();
            wanted.dedup();
        }
        for k in wanted {
            let start = |o: usize| (o * lanes.size + k) * lanes.inner;
            let places: Vec<usize> = (0..lanes.outer).flat_map(|o| start(o)..start(o) + lanes.inner).collect();
            let norm = vector_norm(places.iter().map(|&place| x[place]), p);
            if norm > most {
                let factor = most / (norm + 1e-7);
                places.into_iter().for_each(|place| x[place] *= factor);
            }
        }
        outs[0].write_floats(eval.precision(), x);
        Ok(())
    }
}
