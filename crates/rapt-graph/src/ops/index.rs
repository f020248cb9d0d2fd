//! Reading by index: `embedding`, `index.Tensor`, `gather`, `index_select`.
//!
//! Indices are int64 or int32. `index.Tensor` counts negative ones from the end, once; the others refuse them, as PyTorch
//! does. An index out of range is an error.

use rapt_core::DType;

use super::shape::{
    bounded, cells, count, expand_places, fresh, ignore, is_int, misfit, need_plain, pick, places, refuse, row_major,
};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A reading by index.
#[derive(Clone, Debug, PartialEq)]
pub enum Index {
    /// `embedding`: rows of a matrix.
    Embedding {
        /// The matrix.
        weight: ValueId,
        /// The rows' numbers, of any shape.
        indices: ValueId,
    },
    /// `index.Tensor`: PyTorch's advanced indexing.
    Tensor {
        /// The tensor.
        input: ValueId,
        /// For each dimension its indices, which broadcast to each other, or nothing where all of it is taken.
        indices: Vec<Option<ValueId>>,
    },
    /// `gather`: for each element of `index` the one of `input` that has its place, but for the dimension.
    Gather {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
        /// The places in that dimension.
        index: ValueId,
    },
    /// `take_along_dim`: a `gather` whose operands broadcast in the other dimensions; of the flattened tensor if none is named.
    TakeAlong {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: Option<i64>,
        /// The places in that dimension.
        index: ValueId,
    },
    /// `take`: elements by their number in the flattened tensor, negative ones from the end.
    Take {
        /// The tensor.
        input: ValueId,
        /// The numbers, of any shape.
        index: ValueId,
    },
    /// `repeat_interleave` with a number for each slice: the slice so many times in a row. Of how many slices the result is, the
    /// program says.
    Repeat {
        /// The tensor; the slices' numbers if there is none.
        input: Option<ValueId>,
        /// How often.
        repeats: ValueId,
        /// The dimension, or the flattened tensor.
        dim: Option<i64>,
        /// The size of the result's dimension.
        size: Int,
    },
    /// `index_select`: some slices of a dimension.
    Select {
        /// The tensor.
        input: ValueId,
        /// The dimension.
        dim: i64,
        /// The slices' numbers.
        index: ValueId,
    },
}

impl Index {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Index, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "embedding.default" => embedding(args),
            "index.Tensor" | "_unsafe_index.Tensor" => index(args),
            "gather.default" => gather(args),
            "take_along_dim.default" => take_along(args),
            "index_select.default" => select(args),
            "take.default" => take(args),
            "repeat_interleave.self_Tensor" => repeat(args, true),
            "repeat_interleave.Tensor" => repeat(args, false),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Index::Embedding { weight, indices } => {
                let (weight, indices) = (shapes.meta(*weight)?, shapes.meta(*indices)?);
                need_plain("an embedding", weight.dtype)?;
                need_index(indices)?;
                let [_, width] = weight.shape[..] else {
                    return misfit(format!("an embedding's weight of shape {:?}", weight.shape));
                };
                let mut shape = indices.shape.clone();
                shape.push(width);
                Ok(vec![fresh(weight.dtype, &shape)?])
            }
            Index::Tensor { input, indices } => {
                let meta = shapes.meta(*input)?;
                need_plain("indexing", meta.dtype)?;
                let indices: Vec<Option<&Meta>> =
                    indices.iter().map(|id| id.map(|id| shapes.meta(id)).transpose()).collect::<Result<_, _>>()?;
                if indices.iter().flatten().any(|index| matches!(index.dtype, DType::Bool | DType::U8)) {
                    return refuse("indices", "a mask", "how many elements it takes depends on its values");
                }
                for index in indices.iter().flatten() {
                    need_index(index)?;
                }
                let shapes: Vec<Option<&[i64]>> = indices.iter().map(|m| m.map(|m| m.shape.as_slice())).collect();
                Ok(vec![Out::Fresh(Region::of(&meta.shape, &shapes)?.layout(meta)?)])
            }
            Index::Gather { input, dim, index } => {
                let (meta, index) = (shapes.meta(*input)?, shapes.meta(*index)?);
                need_plain("gather", meta.dtype)?;
                need_gather_index(meta, meta.dim(*dim)?, index)?;
                Ok(vec![fresh(meta.dtype, &index.shape)?])
            }
            Index::TakeAlong { input, dim, index } => {
                let (meta, index) = (shapes.meta(*input)?, shapes.meta(*index)?);
                need_plain("take_along_dim", meta.dtype)?;
                need_index(index)?;
                Ok(vec![fresh(meta.dtype, &along(meta, index, *dim)?.1)?])
            }
            Index::Repeat { input, repeats, dim, size } => {
                let (repeats, size) = (shapes.meta(*repeats)?, shapes.int(*size)?);
                need_index(repeats)?;
                let Some(input) = input else { return Ok(vec![fresh(repeats.dtype, &[size])?]) };
                let meta = shapes.meta(*input)?;
                need_plain("repeat_interleave", meta.dtype)?;
                let mut shape = vec![meta.numel()];
                let mut d = 0;
                if let Some(dim) = dim {
                    (shape, d) = (meta.shape.clone(), meta.dim(*dim)?);
                }
                if repeats.rank() > 1 || shape.is_empty() || (repeats.numel() != 1 && repeats.numel() != shape[d]) {
                    return misfit(format!("{:?} repeats of slices of shape {:?}", repeats.shape, meta.shape));
                }
                shape[d] = size;
                Ok(vec![fresh(meta.dtype, &shape)?])
            }
            Index::Take { input, index } => {
                let (meta, index) = (shapes.meta(*input)?, shapes.meta(*index)?);
                need_plain("take", meta.dtype)?;
                need_long(index)?;
                Ok(vec![fresh(meta.dtype, &index.shape)?])
            }
            Index::Select { input, dim, index } => {
                let (meta, index) = (shapes.meta(*input)?, shapes.meta(*index)?);
                need_plain("index_select", meta.dtype)?;
                need_index(index)?;
                let dim = meta.dim(*dim)?;
                if index.rank() > 1 || (meta.shape.is_empty() && index.numel() != 1) {
                    return misfit(format!("slices {:?} of a tensor of shape {:?}", index.shape, meta.shape));
                }
                let mut shape = meta.shape.clone();
                if let Some(size) = shape.get_mut(dim) {
                    *size = index.numel();
                }
                Ok(vec![fresh(meta.dtype, &shape)?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (source, at) = match self {
            Index::TakeAlong { input, dim, index } => {
                let (input, index) = (eval.tensor(*input)?, eval.tensor(*index)?);
                let (whole, shape) = along(&input.meta, &index.meta, *dim)?;
                let of_dim = whole.dim(dim.unwrap_or(0))?;
                let (mut own, mut places) = (cells(input), index.ints());
                if dim.is_some() {
                    own = pick(&own, expand_places(&input.meta.shape, &whole.shape)?);
                    places = index.broadcast(&shape).ints();
                }
                // Negative numbers count from the end.
                let size = whole.shape[of_dim];
                places.iter_mut().filter(|at| **at < 0).for_each(|at| *at = at.saturating_add(size));
                let index = Tensor::new(Meta::contiguous(DType::I64, &shape), Cells::Int(places));
                let at = gathered(&whole, of_dim, &index)?;
                outs[0].write(eval.precision(), pick(&own, at));
                return Ok(());
            }
            Index::Embedding { weight, indices } => {
                let weight = eval.tensor(*weight)?;
                (weight, slices(&weight.meta, 0, &eval.tensor(*indices)?.ints())?)
            }
            Index::Repeat { input, repeats, dim, size } => {
                let (repeats, size) = (eval.tensor(*repeats)?.ints(), eval.int(*size)?);
                let input = input.map(|id| eval.tensor(id)).transpose()?;
                let slices_of = |input: &Tensor| {
                    dim.map_or(Ok(input.meta.numel()), |dim| Ok(input.meta.shape[input.meta.dim(dim)?]))
                };
                let number = input.map_or(Ok(i64::try_from(repeats.len()).unwrap_or(0)), slices_of)?;
                let times = |k: i64| repeats[count(k).min(repeats.len() - 1)];
                let more = |sum: i64, n: i64| if n < 0 { None } else { sum.checked_add(n) };
                if (0..number).map(times).try_fold(0, more) != Some(size) {
                    return misfit(format!("repeats that do not make the {size} slices that the program says"));
                }
                let index: Vec<i64> = (0..number).flat_map(|k| std::iter::repeat_n(k, count(times(k)))).collect();
                let Some(input) = input else {
                    outs[0].write_ints(index);
                    return Ok(());
                };
                let flat = Meta::contiguous(input.meta.dtype, &[input.meta.numel()]);
                let (meta, dim) = match dim {
                    Some(dim) => (&input.meta, input.meta.dim(*dim)?),
                    None => (&flat, 0),
                };
                (input, slices(meta, dim, &index)?)
            }
            Index::Take { input, index } => {
                let input = eval.tensor(*input)?;
                (input, flat_places(&eval.tensor(*index)?.ints(), input.meta.numel())?)
            }
            Index::Select { input, dim, index } => {
                let input = eval.tensor(*input)?;
                (input, slices(&input.meta, input.meta.dim(*dim)?, &eval.tensor(*index)?.ints())?)
            }
            Index::Gather { input, dim, index } => {
                let (input, index) = (eval.tensor(*input)?, eval.tensor(*index)?);
                (input, gathered(&input.meta, input.meta.dim(*dim)?, index)?)
            }
            Index::Tensor { input, indices } => {
                let input = eval.tensor(*input)?;
                let indices = read_indices(eval, indices)?;
                (input, indexed(&input.meta.shape, &indices)?.1)
            }
        };
        outs[0].write(eval.precision(), pick(&cells(source), at));
        Ok(())
    }
}

/// One dimension's indices: their shape and values.
pub(super) type Indices = (Vec<i64>, Vec<i64>);

/// The values of indices. A mask stands for the places of its true elements, dimension by dimension.
pub(super) fn read_indices(eval: &dyn Eval, ids: &[Option<ValueId>]) -> Result<Vec<Option<Indices>>, OpError> {
    let mut out = Vec::new();
    for id in ids {
        let Some(id) = *id else {
            out.push(None);
            continue;
        };
        let tensor = eval.tensor(id)?;
        let (shape, values) = (&tensor.meta.shape, tensor.ints());
        if tensor.meta.dtype != DType::Bool {
            out.push(Some((shape.clone(), values)));
            continue;
        }
        let strides = row_major(shape);
        let set: Vec<usize> = (0..values.len()).filter(|&p| values[p] != 0).collect();
        let found = i64::try_from(set.len()).unwrap_or(i64::MAX);
        for (&n, &stride) in shape.iter().zip(&strides) {
            let one = |&p: &usize| i64::try_from(p).unwrap_or(i64::MAX) / stride % n;
            out.push(Some((vec![found], set.iter().map(one).collect())));
        }
    }
    Ok(out)
}

/// What advanced indexing takes of a tensor: its shape, and where its dimensions come from.
pub(super) struct Region {
    /// The result's shape.
    pub(super) shape: Vec<i64>,
    /// The shape that the indices broadcast to.
    index_shape: Vec<i64>,
    /// The dimensions taken whole, before and after those of the indices in the result.
    before: Vec<usize>,
    after: Vec<usize>,
}

impl Region {
    /// The region that indices of these shapes take of a tensor of this shape.
    pub(super) fn of(shape: &[i64], indices: &[Option<&[i64]>]) -> Result<Region, OpError> {
        if indices.len() > shape.len() {
            return misfit(format!("{} indices for a tensor of shape {shape:?}", indices.len()));
        }
        let taken: Vec<usize> = (0..indices.len()).filter(|&d| indices[d].is_some()).collect();
        let (Some(&first), Some(&last)) = (taken.first(), taken.last()) else {
            return misfit("indexing without an index");
        };
        let mut index_shape = Vec::new();
        for index in indices.iter().flatten() {
            index_shape = strides::broadcast([&index_shape[..], index])?;
        }
        // Indices with whole dimensions between them put theirs in front.
        let adjacent = last - first + 1 == taken.len();
        let whole = (0..shape.len()).filter(|d| !taken.contains(d));
        let (before, after): (Vec<usize>, Vec<usize>) = whole.partition(|&d| adjacent && d < first);
        let sizes = |dims: &[usize]| dims.iter().map(|&d| shape[d]).collect::<Vec<_>>();
        let out = [sizes(&before), index_shape.clone(), sizes(&after)].concat();
        bounded(&out)?;
        Ok(Region { shape: out, index_shape, before, after })
    }

    /// The result's layout: its whole dimensions lie as they do in the tensor.
    fn layout(&self, meta: &Meta) -> Result<Meta, OpError> {
        let mut out = Meta::contiguous(meta.dtype, &self.shape);
        if meta.numel() == 0 {
            return Ok(out);
        }
        let strides = |dims: &[usize]| dims.iter().map(|&d| meta.strides[d]).collect::<Vec<_>>();
        let restrided = [strides(&self.before), vec![0; self.index_shape.len()], strides(&self.after)].concat();
        let restrided = Meta { strides: restrided, ..out.clone() };
        out.strides = strides::of_pointwise(&self.shape, &[&restrided]);
        Ok(out)
    }
}

/// The region's shape, and the places of its elements in a row-major tensor of this shape.
pub(super) fn indexed(shape: &[i64], indices: &[Option<Indices>]) -> Result<(Vec<i64>, Vec<usize>), OpError> {
    let shapes: Vec<Option<&[i64]>> = indices.iter().map(|i| i.as_ref().map(|(shape, _)| shape.as_slice())).collect();
    let region = Region::of(shape, &shapes)?;
    let strides = row_major(shape);
    let whole = |dims: &[usize]| {
        let (sizes, strides): (Vec<i64>, Vec<i64>) = dims.iter().map(|&d| (shape[d], strides[d])).unzip();
        places(&sizes, &strides)
    };
    let mut at = vec![0usize; region.index_shape.iter().map(|&n| count(n)).product()];
    for (dim, index) in indices.iter().enumerate() {
        let Some((index_shape, values)) = index else { continue };
        let reads = expand_places(index_shape, &region.index_shape)?;
        for (at, read) in at.iter_mut().zip(reads) {
            let index = values[read];
            let from_start = if index < 0 { index.saturating_add(shape[dim]) } else { index };
            *at += in_range(from_start, dim, shape[dim]).map_err(|_| out_of_range(index, dim, shape[dim]))?
                * count(strides[dim]);
        }
    }
    let (before, after) = (whole(&region.before), whole(&region.after));
    let mut all = Vec::with_capacity(before.len() * at.len() * after.len());
    for b in &before {
        for i in &at {
            all.extend(after.iter().map(|a| a + b + i));
        }
    }
    Ok((region.shape, all))
}

fn out_of_range(index: i64, dim: usize, size: i64) -> OpError {
    OpError::IndexOutOfRange { index, dim, size }
}

/// An index as a place, if the dimension has it.
pub(super) fn in_range(index: i64, dim: usize, size: i64) -> Result<usize, OpError> {
    if (0..size).contains(&index) { Ok(count(index)) } else { Err(out_of_range(index, dim, size)) }
}

/// That a tensor holds indices.
pub(super) fn need_index(index: &Meta) -> Result<(), OpError> {
    match index.dtype {
        DType::I64 | DType::I32 => Ok(()),
        // PyTorch does not look at the dtype of no indices.
        dtype if is_int(dtype) && index.numel() == 0 => Ok(()),
        dtype => Err(OpError::Dtype { what: "an index", dtype }),
    }
}

/// That an index fits a tensor for `gather` and `scatter`: no larger than it but in the dimension.
pub(super) fn need_gather_index(meta: &Meta, dim: usize, index: &Meta) -> Result<(), OpError> {
    need_index(index)?;
    if index.numel() == 0 {
        return Ok(());
    }
    let fits = index.rank().max(1) == meta.rank().max(1)
        && (index.shape.iter().zip(&meta.shape)).enumerate().all(|(d, (n, size))| d == dim || n <= size);
    if fits {
        Ok(())
    } else {
        misfit(format!("an index of shape {:?} into a tensor of shape {:?}", index.shape, meta.shape))
    }
}

/// For each element of an index its place in a row-major tensor, along a dimension.
pub(super) fn gathered(meta: &Meta, dim: usize, index: &Tensor) -> Result<Vec<usize>, OpError> {
    let values = index.ints();
    if values.is_empty() {
        return Ok(Vec::new());
    }
    let mut strides = row_major(&meta.shape);
    let size = meta.shape.get(dim).copied().unwrap_or(1);
    let step = strides.get(dim).map_or(1, |&s| count(s));
    if let Some(stride) = strides.get_mut(dim) {
        *stride = 0;
    }
    // A tensor without dimensions meets an index of one, and the other way round.
    let shape = if meta.shape.is_empty() { &[][..] } else { &index.meta.shape };
    let bases = places(shape, &strides);
    let base = |i: usize| bases.get(i).copied().unwrap_or(0);
    values.iter().enumerate().map(|(i, &v)| Ok(base(i) + in_range(v, dim, size)? * step)).collect()
}

/// The places of whole slices of a dimension, in the order of the result.
pub(super) fn slices(meta: &Meta, dim: usize, index: &[i64]) -> Result<Vec<usize>, OpError> {
    let lanes = super::shape::Lanes::of(&meta.shape, dim);
    let size = meta.shape.get(dim).copied().unwrap_or(1);
    let index = index.iter().map(|&i| in_range(i, dim, size)).collect::<Result<Vec<_>, _>>()?;
    let of = |o: usize| {
        let row = |&i: &usize| (o * lanes.size + i) * lanes.inner..(o * lanes.size + i + 1) * lanes.inner;
        index.iter().flat_map(row).collect::<Vec<_>>()
    };
    Ok((0..lanes.outer).flat_map(of).collect())
}

/// That a tensor holds indices in int64.
pub(super) fn need_long(index: &Meta) -> Result<(), OpError> {
    if index.dtype == DType::I64 { Ok(()) } else { Err(OpError::Dtype { what: "an index", dtype: index.dtype }) }
}

/// The places of elements by their number in the flattened tensor.
pub(super) fn flat_places(index: &[i64], numel: i64) -> Result<Vec<usize>, OpError> {
    let one = |&i: &i64| {
        let from_start = if i < 0 { i.saturating_add(numel) } else { i };
        in_range(from_start, 0, numel).map_err(|_| out_of_range(i, 0, numel))
    };
    index.iter().map(one).collect()
}

fn repeat(args: &Args<'_>, of_tensor: bool) -> Result<Index, OpError> {
    let size = args.opt_int("output_size")?;
    let Some(size) = size else {
        return refuse("output_size", "none", "the size of the result is said: give output_size to repeat_interleave");
    };
    let input = if of_tensor { Some(args.tensor("self")?) } else { None };
    let dim = args.opt_int("dim")?.map(|_| args.known_int("dim")).transpose()?;
    Ok(Index::Repeat { input, repeats: args.tensor("repeats")?, dim, size })
}

fn take(args: &Args<'_>) -> Result<Index, OpError> {
    Ok(Index::Take { input: args.tensor("self")?, index: args.tensor("index")? })
}

fn embedding(args: &Args<'_>) -> Result<Index, OpError> {
    ignore(args, &["padding_idx", "scale_grad_by_freq", "sparse"]);
    Ok(Index::Embedding { weight: args.tensor("weight")?, indices: args.tensor("indices")? })
}

fn index(args: &Args<'_>) -> Result<Index, OpError> {
    Ok(Index::Tensor { input: args.tensor("self")?, indices: args.opt_tensors("indices")? })
}

fn gather(args: &Args<'_>) -> Result<Index, OpError> {
    ignore(args, &["sparse_grad"]);
    Ok(Index::Gather { input: args.tensor("self")?, dim: args.known_int("dim")?, index: args.tensor("index")? })
}

fn take_along(args: &Args<'_>) -> Result<Index, OpError> {
    let dim = args.opt_int("dim")?.map(|_| args.known_int("dim")).transpose()?;
    Ok(Index::TakeAlong { input: args.tensor("self")?, dim, index: args.tensor("indices")? })
}

/// The form that the tensor is seen in, row-major, and the shape of the result.
fn along(meta: &Meta, index: &Meta, dim: Option<i64>) -> Result<(Meta, Vec<i64>), OpError> {
    let Some(dim) = dim else {
        return Ok((Meta::contiguous(meta.dtype, &[meta.numel()]), vec![index.numel()]));
    };
    if meta.rank() != index.rank() || meta.rank() == 0 {
        return misfit(format!("an index of shape {:?} along a tensor of shape {:?}", index.shape, meta.shape));
    }
    let dim = meta.dim(dim)?;
    let but = |shape: &[i64], size: i64| {
        let mut shape = shape.to_vec();
        shape[dim] = size;
        shape
    };
    let all = strides::broadcast([&but(&meta.shape, 1)[..], &but(&index.shape, 1)])?;
    Ok((Meta::contiguous(meta.dtype, &but(&all, meta.shape[dim])), but(&all, index.shape[dim])))
}

fn select(args: &Args<'_>) -> Result<Index, OpError> {
    Ok(Index::Select { input: args.tensor("self")?, dim: args.known_int("dim")?, index: args.tensor("index")? })
}
