//! Copies of one view of a tensor in another shape: `pixel_shuffle`, `pixel_unshuffle`, `channel_shuffle`, `tile`,
//! `repeat_interleave`, `rot90`.
//!
//! The view takes dimensions apart and puts them in the order of the result; what is repeated has a stride of 0.

use super::shape::{bounded, fresh, fresh_in_format, is_channels_last, misfit, need_plain};
use crate::{Args, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A copy of a view.
#[derive(Clone, Debug, PartialEq)]
pub struct Rearrange {
    /// The tensor.
    pub input: ValueId,
    /// How it is seen.
    pub order: Rearrangement,
}

/// How a tensor is seen before it is copied.
#[derive(Clone, Debug, PartialEq)]
pub enum Rearrangement {
    /// `pixel_shuffle`: channels become squares of this many pixels on a side.
    PixelShuffle(i64),
    /// `pixel_unshuffle`: the way back.
    PixelUnshuffle(i64),
    /// `channel_shuffle`: the channels of this many groups in turn.
    ChannelShuffle(Int),
    /// `tile`: each dimension so many times over; missing ones in front count 1.
    Tile(Vec<Int>),
    /// `repeat_interleave` with a number: each element so many times in a row, of a dimension or of the flattened tensor.
    Interleave(Int, Option<i64>),
    /// `rot90`: a quarter turn, so many times, from the first dimension towards the second.
    Turn(i64, [i64; 2]),
}

impl Rearrange {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Rearrange, OpError>> {
        let order = match target.strip_prefix("torch.ops.aten.")? {
            "pixel_shuffle.default" => args.known_int("upscale_factor").map(Rearrangement::PixelShuffle),
            "pixel_unshuffle.default" => args.known_int("downscale_factor").map(Rearrangement::PixelUnshuffle),
            "channel_shuffle.default" | "native_channel_shuffle.default" => {
                args.int("groups").map(Rearrangement::ChannelShuffle)
            }
            "tile.default" => args.ints("dims").map(Rearrangement::Tile),
            "repeat_interleave.self_int" => interleave(args),
            "rot90.default" => turn(args),
            _ => return None,
        };
        Some(order.and_then(|order| Ok(Rearrange { input: args.tensor("self")?, order })))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        need_plain("a rearrangement", meta.dtype)?;
        let (view, shape) = self.seen(shapes, meta)?;
        bounded(&view.shape)?;
        if let Rearrangement::Turn(times, [a, b]) = self.order {
            // PyTorch turns a copy that lies as the tensor does, and exchanges its dimensions.
            let mut strides = strides::preserved(meta);
            match times.rem_euclid(4) {
                0 => return Ok(vec![fresh(meta.dtype, &shape)?]),
                2 => {}
                _ => strides.swap(meta.dim(a)?, meta.dim(b)?),
            }
            return Ok(vec![Out::Fresh(Meta { dtype: meta.dtype, shape, strides, offset: 0 })]);
        }
        let images = matches!(self.order, Rearrangement::PixelShuffle(_) | Rearrangement::PixelUnshuffle(_));
        if images {
            return Ok(vec![fresh_in_format(meta.dtype, &shape, is_channels_last(meta))?]);
        }
        Ok(vec![fresh(meta.dtype, &shape)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let (view, _) = self.seen(eval, &input.meta)?;
        outs[0].write(eval.precision(), input.view(view).cast(input.meta.dtype, eval.precision()));
        Ok(())
    }

    /// The view whose elements, in row-major order, are those of the result, and the result's shape.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn seen(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<(Meta, Vec<i64>), OpError> {
        match &self.order {
            Rearrangement::PixelShuffle(r) => pixel_shuffle(meta, *r),
            Rearrangement::PixelUnshuffle(r) => pixel_unshuffle(meta, *r),
            Rearrangement::ChannelShuffle(groups) => channel_shuffle(meta, shapes.int(*groups)?),
            Rearrangement::Tile(dims) => tile(meta, &shapes.ints(dims)?),
            Rearrangement::Turn(times, dims) => turned(meta, *times, *dims),
            Rearrangement::Interleave(times, dim) => interleaved(meta, shapes.int(*times)?, *dim),
        }
    }
}

/// Dimensions by size and stride.
fn view(meta: &Meta, dims: &[(i64, i64)]) -> Meta {
    let (shape, strides) = dims.iter().copied().unzip();
    Meta { shape, strides, ..meta.clone() }
}

fn dims_of(meta: &Meta) -> Vec<(i64, i64)> {
    meta.shape.iter().copied().zip(meta.strides.iter().copied()).collect()
}

fn pixel_shuffle(meta: &Meta, r: i64) -> Result<(Meta, Vec<i64>), OpError> {
    let dims = dims_of(meta);
    let (&[ref lead @ .., (c, of_c), (h, of_h), (w, of_w)], true) = (&dims[..], r > 0) else {
        return misfit(format!("pixel_shuffle by {r} of shape {:?}", meta.shape));
    };
    let Some(square) = r.checked_mul(r).filter(|square| c % square == 0) else {
        return misfit(format!("pixel_shuffle by {r} of {c} channels"));
    };
    let step = |by: i64| of_c.saturating_mul(by);
    let parts = [(c / square, step(square)), (h, of_h), (r, step(r)), (w, of_w), (r, of_c)];
    let shape = [&meta.shape[..lead.len()], &[c / square, h.saturating_mul(r), w.saturating_mul(r)]].concat();
    Ok((view(meta, &[lead, &parts[..]].concat()), shape))
}

fn pixel_unshuffle(meta: &Meta, r: i64) -> Result<(Meta, Vec<i64>), OpError> {
    let dims = dims_of(meta);
    let &[ref lead @ .., (c, of_c), (h, of_h), (w, of_w)] = &dims[..] else {
        return misfit(format!("pixel_unshuffle of shape {:?}", meta.shape));
    };
    if r < 1 || h % r != 0 || w % r != 0 {
        return misfit(format!("pixel_unshuffle by {r} of {h} times {w} pixels"));
    }
    let parts = [(c, of_c), (r, of_h), (r, of_w), (h / r, of_h.saturating_mul(r)), (w / r, of_w.saturating_mul(r))];
    let shape = [&meta.shape[..lead.len()], &[c.saturating_mul(r).saturating_mul(r), h / r, w / r]].concat();
    Ok((view(meta, &[lead, &parts[..]].concat()), shape))
}

fn channel_shuffle(meta: &Meta, groups: i64) -> Result<(Meta, Vec<i64>), OpError> {
    let dims = dims_of(meta);
    let (&[first, (c, of_c), ref rest @ ..], true) = (&dims[..], groups > 0) else {
        return misfit(format!("channel_shuffle of shape {:?} in {groups} groups", meta.shape));
    };
    if rest.is_empty() || c % groups != 0 {
        return misfit(format!("channel_shuffle of shape {:?} in {groups} groups", meta.shape));
    }
    let each = c / groups;
    let parts = [first, (each, of_c), (groups, of_c.saturating_mul(each))];
    Ok((view(meta, &[&parts[..], rest].concat()), meta.shape.clone()))
}

fn tile(meta: &Meta, times: &[i64]) -> Result<(Meta, Vec<i64>), OpError> {
    if let Some(times) = times.iter().find(|&&times| times < 0) {
        return misfit(format!("{times} repeats"));
    }
    let rank = meta.rank().max(times.len());
    let (of_dims, of_times) = (rank - meta.rank(), rank - times.len());
    let mut parts = Vec::with_capacity(2 * rank);
    let mut shape = Vec::with_capacity(rank);
    for d in 0..rank {
        let (size, stride) = if d < of_dims { (1, 0) } else { (meta.shape[d - of_dims], meta.strides[d - of_dims]) };
        let times = if d < of_times { 1 } else { times[d - of_times] };
        parts.extend([(times, 0), (size, stride)]);
        shape.push(times.saturating_mul(size));
    }
    Ok((view(meta, &parts), shape))
}

fn interleaved(meta: &Meta, times: i64, dim: Option<i64>) -> Result<(Meta, Vec<i64>), OpError> {
    if times < 0 {
        return misfit(format!("{times} repeats"));
    }
    let mut dims = dims_of(meta);
    let Some(dim) = dim else {
        dims.push((times, 0));
        return Ok((view(meta, &dims), vec![meta.numel().saturating_mul(times)]));
    };
    let d = meta.dim(dim)?;
    let mut shape = meta.shape.clone();
    match shape.get_mut(d) {
        Some(size) => *size = size.saturating_mul(times),
        None => shape.push(times),
    }
    dims.insert((d + 1).min(dims.len()), (times, 0));
    Ok((view(meta, &dims), shape))
}

fn turned(meta: &Meta, times: i64, [a, b]: [i64; 2]) -> Result<(Meta, Vec<i64>), OpError> {
    let (a, b) = (meta.dim(a)?, meta.dim(b)?);
    if a == b || meta.rank() < 2 {
        return misfit(format!("a turn of shape {:?} between dimensions {a} and {b}", meta.shape));
    }
    let mut view = meta.clone();
    let mut back = |d: usize| {
        view.offset += (view.shape[d] - 1).max(0) * view.strides[d];
        view.strides[d] = -view.strides[d];
    };
    let quarter = times.rem_euclid(4);
    // A turn by one is the second dimension backwards, then both exchanged; by three the first.
    if matches!(quarter, 1 | 2) {
        back(b);
    }
    if matches!(quarter, 2 | 3) {
        back(a);
    }
    if quarter % 2 == 1 {
        view.shape.swap(a, b);
        view.strides.swap(a, b);
    }
    let shape = view.shape.clone();
    Ok((view, shape))
}

fn turn(args: &Args<'_>) -> Result<Rearrangement, OpError> {
    let dims = args.opt_ints("dims")?.unwrap_or_else(|| vec![Int::Known(0), Int::Known(1)]);
    let [Int::Known(a), Int::Known(b)] = dims[..] else {
        return misfit("a turn takes two dimensions");
    };
    Ok(Rearrangement::Turn(args.known_int_or("k", 1)?, [a, b]))
}

fn interleave(args: &Args<'_>) -> Result<Rearrangement, OpError> {
    // The size of the result follows from the others.
    args.opt_int("output_size")?;
    let dim = args.opt_int("dim")?.map(|_| args.known_int("dim")).transpose()?;
    Ok(Rearrangement::Interleave(args.int("repeats")?, dim))
}
