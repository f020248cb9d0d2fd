//! Numbers put in another order or beside each other: `cat`, `stack`, `hstack` and its kin, `repeat`, `roll`, `flip`, `tril`, `triu`.
//!
//! No number changes, but in a `cat` or `stack` of several dtypes, which PyTorch promotes.

use super::shape::{
    Lanes, bounded, cells, count, dims_of, expand_places, fresh, fresh_in_format, is_channels_last, like, misfit,
    need_plain, pick, row_major,
};
use crate::promote::promote;
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// An arrangement.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrange {
    /// `cat`: joined along a dimension.
    Cat {
        /// The tensors. A tensor of shape `[0]` counts not, whatever the others' rank.
        tensors: Vec<ValueId>,
        /// The dimension.
        dim: i64,
    },
    /// `stack`: joined along a new dimension.
    Stack {
        /// The tensors, of one shape.
        tensors: Vec<ValueId>,
        /// The new dimension.
        dim: i64,
    },
    /// `hstack`, `vstack`, `dstack`, `column_stack`: joined along a dimension that each tensor is made to have.
    Side {
        /// The tensors.
        tensors: Vec<ValueId>,
        /// How.
        side: Side,
    },
    /// `repeat`: each dimension so many times over.
    Repeat {
        /// The tensor.
        input: ValueId,
        /// How often, for each dimension of the result; leading ones are new.
        repeats: Vec<Int>,
    },
    /// `roll`: shifted around.
    Roll {
        /// The tensor.
        input: ValueId,
        /// How far, for each dimension.
        shifts: Vec<Int>,
        /// The dimensions; none is the flattened tensor.
        dims: Vec<Int>,
    },
    /// `flip`: dimensions backwards.
    Flip {
        /// The tensor.
        input: ValueId,
        /// The dimensions.
        dims: Vec<Int>,
    },
    /// `tril` and `triu`: zeros on one side of a diagonal.
    Triangle {
        /// The tensor.
        input: ValueId,
        /// The diagonal, 0 is the main one.
        diagonal: Int,
        /// Whether what is above the diagonal stays.
        upper: bool,
    },
}

/// Where tensors are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `hstack`: along the second dimension, of vectors along the first.
    Beside,
    /// `vstack`: along the first dimension of at least two.
    Below,
    /// `dstack`: along the third dimension of at least three.
    Behind,
    /// `column_stack`: vectors are columns, joined along the second dimension.
    Columns,
}

impl Arrange {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Arrange, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "cat.default" | "concat.default" | "concatenate.default" => cat(args),
            "stack.default" => stack(args),
            "hstack.default" => side(args, Side::Beside),
            "vstack.default" | "row_stack.default" => side(args, Side::Below),
            "dstack.default" => side(args, Side::Behind),
            "column_stack.default" => side(args, Side::Columns),
            "repeat.default" => repeat(args),
            "roll.default" => roll(args),
            "flip.default" => flip(args),
            "flipud.default" => flip_of(args, 0),
            "fliplr.default" => flip_of(args, 1),
            "tril.default" => triangle(args, false),
            "triu.default" => triangle(args, true),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Arrange::Cat { tensors, dim } => Ok(vec![cat_form(&metas(shapes, tensors)?, *dim)?]),
            Arrange::Stack { tensors, dim } => Ok(vec![stack_form(&metas(shapes, tensors)?, *dim)?]),
            Arrange::Side { tensors, side } => {
                let metas: Vec<Meta> = metas(shapes, tensors)?.into_iter().map(|meta| side.widened(meta)).collect();
                Ok(vec![cat_form(&metas.iter().collect::<Vec<_>>(), side.along(metas.iter()))?])
            }
            Arrange::Repeat { input, repeats } => {
                let meta = shapes.meta(*input)?;
                need_plain("repeat", meta.dtype)?;
                let (lead, shape) = repeated(&meta.shape, &shapes.ints(repeats)?)?;
                bounded(&lead)?;
                Ok(vec![fresh(meta.dtype, &shape)?])
            }
            Arrange::Roll { input, shifts, dims } => {
                let meta = shapes.meta(*input)?;
                need_plain("roll", meta.dtype)?;
                rolls(shapes, meta, shifts, dims)?;
                Ok(vec![fresh(meta.dtype, &meta.shape)?])
            }
            Arrange::Flip { input, dims } => {
                let meta = shapes.meta(*input)?;
                need_plain("flip", meta.dtype)?;
                dims_of(meta, &shapes.ints(dims)?)?;
                Ok(vec![Out::Fresh(like(meta, meta.dtype))])
            }
            Arrange::Triangle { input, .. } => {
                let meta = shapes.meta(*input)?;
                need_plain("a triangle", meta.dtype)?;
                if meta.rank() < 2 {
                    return misfit(format!("a triangle of a tensor of shape {:?}", meta.shape));
                }
                Ok(vec![fresh(meta.dtype, &meta.shape)?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let out = &outs[0];
        let result = match self {
            Arrange::Cat { tensors, dim } | Arrange::Stack { tensors, dim } => {
                let tensors = tensors.iter().map(|&id| eval.tensor(id)).collect::<Result<Vec<_>, _>>()?;
                let parts: Vec<Cells> = tensors.iter().map(|t| t.cast(out.meta.dtype, eval.precision())).collect();
                // What comes before the dimension is the same in the parts and in the whole.
                let dim = if matches!(self, Arrange::Cat { .. }) || !out.meta.shape.is_empty() {
                    out.meta.dim(*dim)?
                } else {
                    0
                };
                interleave(&parts, Lanes::of(&out.meta.shape, dim).outer)
            }
            Arrange::Side { tensors, side } => {
                let tensors = tensors.iter().map(|&id| eval.tensor(id)).collect::<Result<Vec<_>, _>>()?;
                let parts: Vec<Cells> = tensors.iter().map(|t| t.cast(out.meta.dtype, eval.precision())).collect();
                let metas: Vec<Meta> = tensors.iter().map(|t| side.widened(&t.meta)).collect();
                interleave(&parts, Lanes::of(&out.meta.shape, side.dim(metas.iter(), &out.meta)?).outer)
            }
            Arrange::Repeat { input, repeats } => {
                let input = eval.tensor(*input)?;
                // A dimension repeated is one before it that the tensor broadcasts to.
                let (lead, _) = repeated(&input.meta.shape, &eval.ints(repeats)?)?;
                let from: Vec<i64> = lead.chunks(2).flat_map(|split| [1, split[1]]).collect();
                pick(&cells(input), expand_places(&from, &lead)?)
            }
            Arrange::Roll { input, shifts, dims } => {
                let input = eval.tensor(*input)?;
                rolls(eval, &input.meta, shifts, dims)?
                    .into_iter()
                    .fold(cells(input), |x, (lanes, shift)| along(&x, lanes, |k, size| (k + size - shift) % size))
            }
            Arrange::Flip { input, dims } => {
                let input = eval.tensor(*input)?;
                let dims = dims_of(&input.meta, &eval.ints(dims)?)?;
                dims.into_iter()
                    .fold(cells(input), |x, dim| along(&x, Lanes::of(&input.meta.shape, dim), |k, size| size - 1 - k))
            }
            Arrange::Triangle { input, diagonal, upper } => {
                let input = eval.tensor(*input)?;
                triangle_of(cells(input), &input.meta.shape, eval.int(*diagonal)?, *upper)
            }
        };
        out.write(eval.precision(), result);
        Ok(())
    }
}

impl Side {
    /// The dimension along which tensors of these forms are joined.
    fn along<'a>(self, mut metas: impl Iterator<Item = &'a Meta>) -> i64 {
        match self {
            Side::Below => 0,
            Side::Beside if metas.next().is_some_and(|meta| meta.rank() == 1) => 0,
            Side::Beside | Side::Columns => 1,
            Side::Behind => 2,
        }
    }

    /// The same as a dimension of the result.
    ///
    /// # Errors
    /// [`OpError::DimOutOfRange`].
    pub fn dim<'a>(self, metas: impl Iterator<Item = &'a Meta>, out: &Meta) -> Result<usize, OpError> {
        out.dim(self.along(metas))
    }

    /// A tensor with the dimensions that it must have.
    #[must_use]
    pub fn widened(self, meta: &Meta) -> Meta {
        let (mut meta, rank) = (meta.clone(), meta.rank());
        let mut insert = |at: usize| {
            meta.shape.insert(at, 1);
            meta.strides.insert(at, 1);
        };
        match (self, rank) {
            (Side::Beside, 0) => insert(0),
            (Side::Below | Side::Columns, 0) => [0, 0].into_iter().for_each(insert),
            (Side::Below, 1) => insert(0),
            (Side::Columns, 1) => insert(1),
            (Side::Behind, 0) => [0, 0, 0].into_iter().for_each(insert),
            (Side::Behind, 1) => [0, 2].into_iter().for_each(insert),
            (Side::Behind, 2) => insert(2),
            _ => {}
        }
        meta
    }
}

fn metas<'a>(shapes: &'a dyn Shapes, tensors: &[ValueId]) -> Result<Vec<&'a Meta>, OpError> {
    let metas = tensors.iter().map(|&id| shapes.meta(id)).collect::<Result<Vec<_>, _>>()?;
    for meta in &metas {
        need_plain("cat", meta.dtype)?;
    }
    Ok(metas)
}

fn cat_form(metas: &[&Meta], dim: i64) -> Result<Out, OpError> {
    let Some(dtype) = metas.iter().map(|m| m.dtype).reduce(promote) else { return misfit("cat of no tensors") };
    let Some(first) = metas.iter().find(|m| m.shape != [0]) else { return fresh(dtype, &[0]) };
    if first.shape.is_empty() {
        return misfit("cat of a tensor without dimensions");
    }
    let dim = first.dim(dim)?;
    let mut shape = first.shape.clone();
    shape[dim] = 0;
    for meta in metas.iter().filter(|m| m.shape != [0]) {
        let fits = meta.rank() == shape.len() && (0..shape.len()).all(|d| d == dim || meta.shape[d] == shape[d]);
        if !fits {
            return misfit(format!("cat of shapes {:?} and {:?} along dimension {dim}", first.shape, meta.shape));
        }
        shape[dim] += meta.shape[dim];
    }
    fresh_in_format(dtype, &shape, metas.iter().all(|m| is_channels_last(m)))
}

/// A stack is a cat along the dimension before which the new one stands, seen in another shape.
fn stack_form(metas: &[&Meta], dim: i64) -> Result<Out, OpError> {
    let Some(first) = metas.first() else { return misfit("a stack of no tensors") };
    if let Some(other) = metas.iter().find(|m| m.shape != first.shape) {
        return misfit(format!("a stack of shapes {:?} and {:?}", first.shape, other.shape));
    }
    let number = i64::try_from(metas.len()).unwrap_or(i64::MAX);
    let mut shape = first.shape.clone();
    shape.push(0);
    let dim = Meta::contiguous(first.dtype, &shape).dim(dim)?;
    shape.pop();
    shape.insert(dim, number);
    let dtype = metas.iter().map(|m| m.dtype).reduce(promote).unwrap_or(first.dtype);
    if dim == first.rank() {
        return fresh(dtype, &shape);
    }
    let mut joined = first.shape.clone();
    joined[dim] = joined[dim].saturating_mul(number);
    match fresh_in_format(dtype, &joined, metas.iter().all(|m| is_channels_last(m)))? {
        Out::Fresh(cat) => {
            let strides = strides::of_view(&cat, &shape).unwrap_or_else(|| row_major(&shape));
            Ok(Out::Fresh(Meta { dtype, shape, strides, offset: 0 }))
        }
        other => Ok(other),
    }
}

/// The parts' `outer` blocks in turn.
fn interleave(parts: &[Cells], outer: usize) -> Cells {
    fn blocks<T: Copy>(parts: &[&[T]], outer: usize) -> Vec<T> {
        let block = |part: &[T], o: usize| part[o * (part.len() / outer)..(o + 1) * (part.len() / outer)].to_vec();
        (0..outer).flat_map(|o| parts.iter().flat_map(move |part| block(part, o)).collect::<Vec<T>>()).collect()
    }
    if let Some(Cells::Float(_)) = parts.first() {
        let all: Vec<&[f64]> =
            parts.iter().filter_map(|c| if let Cells::Float(x) = c { Some(&x[..]) } else { None }).collect();
        Cells::Float(blocks(&all, outer))
    } else {
        let all: Vec<&[i64]> =
            parts.iter().filter_map(|c| if let Cells::Int(x) = c { Some(&x[..]) } else { None }).collect();
        Cells::Int(blocks(&all, outer))
    }
}

/// The result's dimensions each split in two, how often and how long, and the result's shape.
fn repeated(shape: &[i64], repeats: &[i64]) -> Result<(Vec<i64>, Vec<i64>), OpError> {
    let Some(new) = repeats.len().checked_sub(shape.len()) else {
        return misfit(format!("{} repeats for a tensor of shape {shape:?}", repeats.len()));
    };
    if let Some(times) = repeats.iter().find(|&&times| times < 0) {
        return misfit(format!("{times} repeats"));
    }
    let size = |d: usize| if d < new { 1 } else { shape[d - new] };
    let split = repeats.iter().enumerate().flat_map(|(d, &times)| [times, size(d)]).collect();
    let whole = repeats.iter().enumerate().map(|(d, &times)| times.saturating_mul(size(d))).collect();
    Ok((split, whole))
}

/// The lanes that are shifted in turn, with how far, less than a lane's length.
fn rolls(shapes: &dyn Shapes, meta: &Meta, shifts: &[Int], dims: &[Int]) -> Result<Vec<(Lanes, usize)>, OpError> {
    let (shifts, dims) = (shapes.ints(shifts)?, shapes.ints(dims)?);
    let flat = Lanes { outer: 1, size: count(meta.numel()), inner: 1 };
    let one = |lanes: Lanes, shift: i64| {
        (lanes, count(shift.rem_euclid(i64::try_from(lanes.size).unwrap_or(i64::MAX).max(1))))
    };
    if dims.is_empty() && shifts.len() == 1 {
        return Ok(vec![one(flat, shifts[0])]);
    }
    if shifts.len() != dims.len() || shifts.is_empty() {
        return misfit(format!("a roll by {shifts:?} along {dims:?}"));
    }
    let lanes = |dim: i64| Ok(Lanes::of(&meta.shape, meta.dim(dim)?));
    shifts.into_iter().zip(dims).map(|(shift, dim)| Ok(one(lanes(dim)?, shift))).collect()
}

/// The numbers with each lane's element `k` taken from `from(k, size)`.
fn along(x: &Cells, lanes: Lanes, from: impl Fn(usize, usize) -> usize) -> Cells {
    let at = (0..lanes.outer).flat_map(|o| (0..lanes.size).map(move |k| (o, k))).flat_map(|(o, k)| {
        let start = (o * lanes.size + from(k, lanes.size)) * lanes.inner;
        start..start + lanes.inner
    });
    pick(x, at.collect::<Vec<_>>())
}

fn triangle_of(mut x: Cells, shape: &[i64], diagonal: i64, upper: bool) -> Cells {
    let (rows, columns) = (count(shape[shape.len() - 2]), count(shape[shape.len() - 1]));
    let stays = |p: usize| {
        let (row, column) = (p / columns % rows, p % columns);
        let reach = i64::try_from(column).unwrap_or(i64::MAX) - i64::try_from(row).unwrap_or(i64::MAX);
        if upper { reach >= diagonal } else { reach <= diagonal }
    };
    match &mut x {
        Cells::Float(x) => x.iter_mut().enumerate().filter(|&(p, _)| !stays(p)).for_each(|(_, x)| *x = 0.0),
        Cells::Int(x) => x.iter_mut().enumerate().filter(|&(p, _)| !stays(p)).for_each(|(_, x)| *x = 0),
    }
    x
}

fn cat(args: &Args<'_>) -> Result<Arrange, OpError> {
    Ok(Arrange::Cat { tensors: args.tensors("tensors")?, dim: args.known_int_or("dim", 0)? })
}

fn side(args: &Args<'_>, side: Side) -> Result<Arrange, OpError> {
    Ok(Arrange::Side { tensors: args.tensors("tensors")?, side })
}

fn stack(args: &Args<'_>) -> Result<Arrange, OpError> {
    Ok(Arrange::Stack { tensors: args.tensors("tensors")?, dim: args.known_int_or("dim", 0)? })
}

fn repeat(args: &Args<'_>) -> Result<Arrange, OpError> {
    Ok(Arrange::Repeat { input: args.tensor("self")?, repeats: args.ints("repeats")? })
}

fn roll(args: &Args<'_>) -> Result<Arrange, OpError> {
    Ok(Arrange::Roll {
        input: args.tensor("self")?,
        shifts: args.ints("shifts")?,
        dims: args.opt_ints("dims")?.unwrap_or_default(),
    })
}

fn flip(args: &Args<'_>) -> Result<Arrange, OpError> {
    Ok(Arrange::Flip { input: args.tensor("self")?, dims: args.ints("dims")? })
}

fn flip_of(args: &Args<'_>, dim: i64) -> Result<Arrange, OpError> {
    Ok(Arrange::Flip { input: args.tensor("self")?, dims: vec![Int::Known(dim)] })
}

fn triangle(args: &Args<'_>, upper: bool) -> Result<Arrange, OpError> {
    Ok(Arrange::Triangle { input: args.tensor("self")?, diagonal: args.int_or("diagonal", 0)?, upper })
}
