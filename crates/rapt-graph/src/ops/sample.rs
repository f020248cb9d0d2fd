//! Images and volumes read at computed places: `grid_sampler`, `grid_sampler_2d`, `grid_sampler_3d`.
//!
//! The grid has a place for each position of the result, `(x, y)` or `(x, y, z)` in −1 .. 1 over the image: with aligned corners −1 is the
//! middle of the first element, else its edge. The result is a weighted sum of the elements around, in f64 and rounded once; the result
//! lies row-major.
//!
//! Places that are not finite follow PyTorch's kernels. In images NaN is clipped to the first element, and makes the result NaN where it
//! is not clipped but weighs; in volumes it is clipped to the last element, and outside where it is not clipped.

use rapt_core::DType;

use super::resample::cubic_weight;
use super::shape::{bounded, count, fresh, misfit, need_float, need_same, refuse};
use crate::number::round;
use crate::{Args, Eval, OpError, Out, Precision, Shapes, Tensor, ValueId};

/// A sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// `[batch, channels, ...]`.
    input: ValueId,
    /// `[batch, ..., dimensions]`.
    grid: ValueId,
    /// Which elements count.
    filter: Filter,
    /// What is outside.
    border: Border,
    /// Whether the ends are the middles of the corner elements.
    corners: bool,
    /// The number of dimensions that the operator's name says.
    spatial: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filter {
    Linear,
    Nearest,
    Cubic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Border {
    Zeros,
    Nearest,
    Mirror,
}

impl Sample {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Sample, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "grid_sampler.default" => sample(args, None),
            "grid_sampler_2d.default" => sample(args, Some(2)),
            "grid_sampler_3d.default" => sample(args, Some(3)),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (input, grid) = (shapes.meta(self.input)?, shapes.meta(self.grid)?);
        need_float("sampling", input.dtype)?;
        need_same(input.dtype, grid.dtype)?;
        let text = || format!("a tensor of shape {:?} at a grid of shape {:?}", input.shape, grid.shape);
        let spatial = input.rank().saturating_sub(2);
        let named = self.spatial.is_none_or(|n| n == spatial) && matches!(spatial, 2 | 3);
        if !named || grid.rank() != input.rank() || input.shape[0] != grid.shape[0] || input.shape[2..].contains(&0) {
            return misfit(text());
        }
        if grid.shape.last().map(|&n| count(n)) != Some(spatial) {
            return misfit(text());
        }
        if self.filter == Filter::Cubic && spatial == 3 {
            return refuse("interpolation_mode", "2", "volumes have no bicubic sampling");
        }
        let shape = [&input.shape[..2], &grid.shape[1..=spatial]].concat();
        bounded(&shape)?;
        Ok(vec![fresh(input.dtype, &shape)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (input, grid) = (eval.tensor(self.input)?, eval.tensor(self.grid)?);
        let (x, places) = (input.floats(), grid.floats());
        let sizes = &input.meta.shape[2..];
        let spatial = sizes.len();
        let volume: usize = sizes.iter().map(|&n| count(n)).product();
        let [batch, channels] = [0, 1].map(|d| count(input.meta.shape[d]));
        let points = count(outs[0].meta.shape[2..].iter().product());
        // Which element is nearest depends on the arithmetic: PyTorch rounds each of its operations to the dtype.
        let dtype = match (self.filter, eval.precision()) {
            (Filter::Nearest, Precision::Rounded) => input.meta.dtype,
            _ => DType::F64,
        };
        let round = |x: f64| round(dtype, x);
        let mut y = vec![0.0; batch * channels * points];
        for n in 0..batch {
            for point in 0..points {
                let place = &places[(n * points + point) * spatial..][..spatial];
                let taps = self.taps(sizes, place, &round);
                for c in 0..channels {
                    let own = &x[(n * channels + c) * volume..][..volume];
                    let sum = taps.iter().fold(0.0, |sum, &(at, weight)| sum + weight * own[at]);
                    y[(n * channels + c) * points + point] = sum;
                }
            }
        }
        outs[0].write_floats(eval.precision(), y);
        Ok(())
    }

    /// The elements around a place, and their weights. The grid names the last dimension first.
    fn taps(&self, sizes: &[i64], place: &[f64], round: &dyn Fn(f64) -> f64) -> Vec<(usize, f64)> {
        let weighs = self.filter == Filter::Cubic || (self.filter == Filter::Linear && self.border == Border::Zeros);
        if weighs && sizes.len() == 2 && !place.iter().all(|at| at.is_finite()) {
            return vec![(0, f64::NAN)];
        }
        let mut taps = vec![(0, 1.0)];
        for (&size, &at) in sizes.iter().zip(place.iter().rev()) {
            let own = self.along(size, at, sizes.len() == 3, round);
            let join = |&(before, w): &(i64, f64)| {
                own.iter().map(move |&(i, v)| (before * size + i, w * v)).collect::<Vec<_>>()
            };
            taps = taps.iter().flat_map(join).collect();
        }
        taps.into_iter().map(|(at, weight)| (count(at), weight)).collect()
    }

    /// The elements of one dimension, and their weights; those outside are left out where they count 0. Volumes and images are
    /// computed by formulas of their own, as in PyTorch.
    fn along(&self, size: i64, at: f64, of_volume: bool, round: &dyn Fn(f64) -> f64) -> Vec<(i64, f64)> {
        let (n, moved) = (size as f64, round(at + 1.0));
        let at = match (self.corners, of_volume) {
            (true, false) => round(moved * round(round(n - 1.0) / 2.0)),
            (false, false) => round(round(moved * round(n / 2.0)) - 0.5),
            (true, true) => round(round(moved / 2.0) * (n - 1.0)),
            (false, true) => round(round(round(moved * n) - 1.0) / 2.0),
        };
        let placed = |at: f64| self.placed(size, at, of_volume, round);
        let inside = |(i, weight): (f64, f64)| (i >= 0.0 && i < size as f64).then_some((i as i64, weight));
        match self.filter {
            Filter::Nearest => inside((placed(at).round_ties_even(), 1.0)).into_iter().collect(),
            Filter::Linear => {
                let at = placed(at);
                let (low, over) = (at.floor(), at - at.floor());
                [(low, 1.0 - over), (low + 1.0, over)].into_iter().filter_map(inside).collect()
            }
            Filter::Cubic => {
                // Here each element is placed, and not the place itself.
                let low = at.floor();
                let tap = |k: i32| {
                    let i = low + f64::from(k);
                    inside((placed(i), cubic_weight((at - low - f64::from(k)).abs(), -0.75)))
                };
                (-1..=2).filter_map(tap).collect()
            }
        }
    }

    /// Where a place outside is meant to be.
    fn placed(&self, size: i64, at: f64, of_volume: bool, round: &dyn Fn(f64) -> f64) -> f64 {
        let last = (size - 1) as f64;
        let clipped = |at: f64| if of_volume && at.is_nan() { last } else { at.max(0.0).min(last) };
        match self.border {
            Border::Zeros => at,
            Border::Nearest => clipped(at),
            Border::Mirror => {
                let (first, span) = if self.corners { (0.0, (size - 1) as f64) } else { (-0.5, size as f64) };
                if span == 0.0 {
                    return 0.0;
                }
                let from = round(at - first).abs();
                if of_volume {
                    let (turns, rest) = (round(from / span).floor(), from % span);
                    let rest = if turns % 2.0 == 0.0 { rest } else { round(span - rest) };
                    return clipped(round(rest + first));
                }
                // There and back again.
                let turns = round(from / (2.0 * span)).trunc();
                let rest = round(from - round(turns * (2.0 * span)));
                let back = round(2.0 * span - rest);
                clipped(round(if rest < back || rest.is_nan() { rest } else { back } + first))
            }
        }
    }
}

fn sample(args: &Args<'_>, spatial: Option<usize>) -> Result<Sample, OpError> {
    let filter = match args.known_int("interpolation_mode")? {
        0 => Filter::Linear,
        1 => Filter::Nearest,
        2 => Filter::Cubic,
        other => return refuse("interpolation_mode", other.to_string(), "it is 0, 1 or 2"),
    };
    let border = match args.known_int("padding_mode")? {
        0 => Border::Zeros,
        1 => Border::Nearest,
        2 => Border::Mirror,
        other => return refuse("padding_mode", other.to_string(), "it is 0, 1 or 2"),
    };
    let corners = args.bool_or("align_corners", false)?;
    Ok(Sample { input: args.tensor("input")?, grid: args.tensor("grid")?, filter, border, corners, spatial })
}
