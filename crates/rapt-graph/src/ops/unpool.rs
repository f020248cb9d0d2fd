//! What pooling and sampling need beside them: `max_unpool2d` and `max_unpool3d`, which put maxima back to their places with zeros
//! between, and `affine_grid_generator`, the places at which a turned or moved image is read.

use super::shape::{
    bounded, cells, count, fresh, fresh_in_format, is_channels_last, misfit, need_float, need_plain, pick,
};
use crate::{Args, Cells, Eval, Int, OpError, Out, Shapes, Tensor, ValueId};

/// A companion of pooling or sampling.
#[derive(Clone, Debug, PartialEq)]
pub enum Unpool {
    /// `max_unpool2d`, `max_unpool3d`.
    Maxima {
        /// The maxima, `[batch, channels, ...]` or without a batch.
        input: ValueId,
        /// Of each its place in its channel of the result.
        indices: ValueId,
        /// The result's sizes behind the channels.
        size: Vec<Int>,
    },
    /// `affine_grid_generator`: for each position of the image `theta · (x, y, 1)`, coordinates in −1 .. 1.
    Grid {
        /// `[batch, 2, 3]` or `[batch, 3, 4]`.
        theta: ValueId,
        /// The image's sizes: batch, channels, ….
        size: Vec<Int>,
        /// Whether the ends are the middles of the corner elements.
        corners: bool,
    },
}

impl Unpool {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Unpool, OpError>> {
        let name = target.strip_prefix("torch.ops.aten.")?;
        let maxima = || {
            // Steps and padding are in the size already.
            super::shape::ignore(args, &["stride", "padding"]);
            let size = args.ints("output_size")?;
            Ok(Unpool::Maxima { input: args.tensor("self")?, indices: args.tensor("indices")?, size })
        };
        Some(match name {
            "max_unpool2d.default" | "max_unpool3d.default" => maxima(),
            "affine_grid_generator.default" => args.ints("size").and_then(|size| {
                Ok(Unpool::Grid { theta: args.tensor("theta")?, size, corners: args.bool_or("align_corners", false)? })
            }),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Unpool::Maxima { input, indices, size } => {
                let (meta, indices) = (shapes.meta(*input)?, shapes.meta(*indices)?);
                need_plain("unpooling", meta.dtype)?;
                super::index::need_long(indices)?;
                let lead = meta.rank().checked_sub(size.len()).filter(|lead| matches!(lead, 1 | 2));
                let (Some(lead), true) = (lead, meta.shape == indices.shape) else {
                    return misfit(format!("maxima of shape {:?} at places of shape {:?}", meta.shape, indices.shape));
                };
                let shape = [&meta.shape[..lead], &shapes.ints(size)?].concat();
                Ok(vec![fresh_in_format(meta.dtype, &shape, size.len() == 2 && is_channels_last(meta))?])
            }
            Unpool::Grid { theta, size, .. } => {
                let (meta, size) = (shapes.meta(*theta)?, shapes.ints(size)?);
                need_float("a grid", meta.dtype)?;
                let spatial = size.len().saturating_sub(2);
                let n = i64::try_from(spatial).unwrap_or(0);
                if !matches!(spatial, 2 | 3) || meta.shape[..] != [size[0], n, n + 1] {
                    return misfit(format!("a grid of {size:?} by matrices of shape {:?}", meta.shape));
                }
                let shape = [&size[..1], &size[2..], &[n]].concat();
                bounded(&shape)?;
                Ok(vec![fresh(meta.dtype, &shape)?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let out = &outs[0];
        match self {
            Unpool::Maxima { input, indices, size } => {
                let (input, indices) = (eval.tensor(*input)?, eval.tensor(*indices)?.ints());
                let area = eval.ints(size)?.iter().product::<i64>();
                let own = count(input.meta.shape[input.meta.rank() - size.len()..].iter().product()).max(1);
                let mut places = Vec::with_capacity(indices.len());
                for (n, &index) in indices.iter().enumerate() {
                    places.push(n / own * count(area) + super::index::in_range(index, 0, area)?);
                }
                // The place of each element of the result, one behind the last for those of none.
                let mut from = vec![places.len(); count(out.meta.numel())];
                places.into_iter().enumerate().for_each(|(n, place)| from[place] = n);
                let mut x = cells(input);
                match &mut x {
                    Cells::Float(x) => x.push(0.0),
                    Cells::Int(x) => x.push(0),
                }
                out.write(eval.precision(), pick(&x, from));
            }
            Unpool::Grid { theta, size, corners } => {
                let (theta, size) = (eval.tensor(*theta)?.floats(), eval.ints(size)?);
                let spatial = size.len() - 2;
                let at = |k: usize, n: i64| {
                    let middle = (2 * k + 1) as f64 / n as f64 - 1.0;
                    match (corners, n) {
                        (_, 1) => 0.0,
                        (true, n) => 2.0 * k as f64 / (n - 1) as f64 - 1.0,
                        (false, _) => middle,
                    }
                };
                let points = count(size[2..].iter().product());
                let mut all = Vec::with_capacity(count(out.meta.numel()));
                for n in 0..count(size[0]) {
                    let rows = &theta[n * spatial * (spatial + 1)..][..spatial * (spatial + 1)];
                    for point in 0..points {
                        // The last dimension is the first coordinate.
                        let (mut rest, mut place) = (point, Vec::with_capacity(spatial + 1));
                        for &n in size[2..].iter().rev() {
                            place.push(at(rest % count(n), n));
                            rest /= count(n);
                        }
                        place.push(1.0);
                        let one = |row: &[f64]| row.iter().zip(&place).fold(0.0, |sum, (a, b)| sum + a * b);
                        all.extend(rows.chunks(spatial + 1).map(one));
                    }
                }
                out.write_floats(eval.precision(), all);
            }
        }
        Ok(())
    }
}
