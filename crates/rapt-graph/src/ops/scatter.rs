//! Writing by index: `scatter`, `index_put`, `index_copy`, `slice_scatter`, `select_scatter`, of a copy or in place.
//!
//! Elements are written in row-major order of the index, so of several for one place the last stays; with `accumulate` all
//! are added, in f64 and rounded once. Out-of-range indices are errors before anything is written.

use rapt_core::DType;

use super::index::{Indices, gathered, indexed, need_gather_index, need_index, read_indices, slices};
use super::join::{Joining, need_covering, need_slices};
use super::shape::{
    cells, count, expand_places, fresh, like, misfit, need_plain, need_same, pick, places, row_major, scalar_cell,
};
use super::target::Target;
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Precision, Scalar, Shapes, Tensor, ValueId, strides};

/// A writing by index.
#[derive(Clone, Debug, PartialEq)]
pub struct Scatter {
    /// The tensor.
    pub input: ValueId,
    /// Whether it is written itself, or a copy.
    pub target: Target,
    /// What is written, and where.
    pub write: Write,
}

/// What is written, and where.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// `scatter`: each element of `source` goes where `index` says along the dimension.
    Along {
        /// The dimension.
        dim: i64,
        /// The places in that dimension.
        index: ValueId,
        /// What goes there.
        source: Source,
    },
    /// `index_put`: the elements that advanced indexing takes. A mask takes those where it is true.
    Put {
        /// For each dimension its indices, or nothing where all of it is taken.
        indices: Vec<Option<ValueId>>,
        /// What goes there; it broadcasts.
        values: ValueId,
        /// Whether it is added.
        accumulate: bool,
    },
    /// `index_copy`: whole slices of a dimension.
    Copy {
        /// The dimension.
        dim: i64,
        /// The slices' numbers.
        index: ValueId,
        /// The slices.
        source: ValueId,
    },
    /// Elements that meet others.
    Join(Joining),
    /// `slice_scatter`: the slice `start..end` by `step` of a dimension.
    Slice {
        /// What goes there.
        source: ValueId,
        /// The dimension.
        dim: i64,
        /// The first element; `None` is the first of all.
        start: Option<Int>,
        /// The end; `None` is the end of all.
        end: Option<Int>,
        /// The step.
        step: Int,
    },
    /// `select_scatter`: one slice of a dimension.
    Select {
        /// What goes there.
        source: ValueId,
        /// The dimension.
        dim: i64,
        /// The slice's number.
        index: Int,
    },
}

/// What a `scatter` writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// A tensor's elements.
    Tensor(ValueId),
    /// One number.
    Value(Scalar),
    /// A tensor's elements are added.
    Sum(ValueId),
}

impl Scatter {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Scatter, OpError>> {
        let target = target.strip_prefix("torch.ops.aten.")?;
        let (name, overload) = target.split_once('.')?;
        let (name, target) = Target::of(name);
        let write = match (name, overload) {
            ("scatter", "value") => scatter(args, |args| args.scalar("value").map(Source::Value)),
            ("scatter", "src") => scatter(args, |args| args.tensor("src").map(Source::Tensor)),
            ("scatter_add", "default") => scatter(args, |args| args.tensor("src").map(Source::Sum)),
            ("index_put" | "_unsafe_index_put", "default") => put(args),
            ("index_copy", "default") => copy(args),
            ("slice_scatter", "default") if target == Target::Fresh => slice(args),
            ("select_scatter", "default") if target == Target::Fresh => select(args),
            _ => Joining::read(name, overload, args)?.map(Write::Join),
        };
        Some(write.and_then(|write| Ok(Scatter { input: args.tensor("self")?, target, write })))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        need_plain("writing by index", meta.dtype)?;
        let source = |id: ValueId| {
            let source = shapes.meta(id)?;
            need_same(meta.dtype, source.dtype).map(|()| source)
        };
        let own = match &self.write {
            Write::Along { dim, index, source: from } => {
                let index = shapes.meta(*index)?;
                need_gather_index(meta, meta.dim(*dim)?, index)?;
                if let Source::Tensor(id) | Source::Sum(id) = from {
                    need_covering(source(*id)?, index)?;
                }
                fresh(meta.dtype, &meta.shape)?
            }
            Write::Put { indices, values, .. } => {
                source(*values)?;
                for index in indices.iter().flatten() {
                    let index = shapes.meta(*index)?;
                    if index.dtype != DType::Bool {
                        need_index(index)?;
                    }
                }
                Out::Fresh(like(meta, meta.dtype))
            }
            Write::Copy { dim, index, source: from } => {
                let index = shapes.meta(*index)?;
                if index.dtype != DType::I64 {
                    return Err(OpError::Dtype { what: "an index of index_copy", dtype: index.dtype });
                }
                need_slices(meta, meta.dim(*dim)?, index, source(*from)?)?;
                fresh(meta.dtype, &meta.shape)?
            }
            Write::Join(join) => join.infer(shapes, meta)?,
            Write::Slice { source: from, .. } | Write::Select { source: from, .. } => {
                let (shape, _) = self.slice(shapes, meta)?;
                let from = source(*from)?;
                if from.shape != shape {
                    return misfit(format!("a source of shape {:?}, expected {shape:?}", from.shape));
                }
                Out::Fresh(copy_in_place_of(meta))
            }
        };
        let Out::Fresh(form) = own else { return Ok(vec![own]) };
        Ok(vec![self.target.out(self.input, shapes, form)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        self.target.mutates(self.input)
    }

    /// The one number that is written, as an element of the tensor; `None` where a tensor's are.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn element(&self, shapes: &dyn Shapes) -> Result<Option<Cells>, OpError> {
        let Write::Along { source: Source::Value(value), .. } = self.write else { return Ok(None) };
        scalar_cell(shapes, value, shapes.meta(self.input)?.dtype, Precision::Rounded).map(Some)
    }

    /// The slice that `slice_scatter` and `select_scatter` write, as a view of the tensor; `None` of other writes.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn region(&self, shapes: &dyn Shapes, whole: &Meta) -> Result<Option<Meta>, OpError> {
        let (Write::Slice { dim, .. } | Write::Select { dim, .. }) = self.write else { return Ok(None) };
        let dim = whole.dim(dim)?;
        let (shape, first, step) = self.bounds(shapes, whole)?;
        let mut meta = whole.clone();
        meta.offset += first * meta.strides[dim];
        meta.strides[dim] *= step;
        meta.shape = shape;
        if matches!(self.write, Write::Select { .. }) {
            meta.shape.remove(dim);
            meta.strides.remove(dim);
        }
        Ok(Some(meta))
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let mut input = eval.tensor(self.input)?.clone();
        if matches!(self.write, Write::Join(Joining::Masked { .. })) {
            input = input.broadcast(&outs[0].meta.shape);
        }
        let meta = &input.meta;
        let mut x = cells(&input);
        match &self.write {
            Write::Along { dim, index, source } => {
                let index = eval.tensor(*index)?;
                let at = gathered(meta, meta.dim(*dim)?, index)?;
                match *source {
                    Source::Value(value) => {
                        let value = scalar_cell(eval, value, meta.dtype, eval.precision())?;
                        write(&mut x, &at, &pick(&value, at.iter().map(|_| 0)), false);
                    }
                    Source::Tensor(id) | Source::Sum(id) => {
                        let from = eval.tensor(id)?;
                        let read = places(&index.meta.shape, &row_major(&from.meta.shape));
                        write(&mut x, &at, &pick(&cells(from), read), matches!(source, Source::Sum(_)));
                    }
                }
            }
            Write::Put { indices, values, accumulate } => {
                let indices: Vec<Option<Indices>> = read_indices(eval, indices)?;
                need_masks_fit(eval, self, meta)?;
                let (shape, at) = indexed(&meta.shape, &indices)?;
                let values = eval.tensor(*values)?;
                let read = expand_places(&trimmed(&values.meta.shape, shape.len()), &shape)?;
                write(&mut x, &at, &pick(&cells(values), read), *accumulate);
            }
            Write::Copy { dim, index, source } => {
                let at = slices(meta, meta.dim(*dim)?, &eval.tensor(*index)?.ints())?;
                write(&mut x, &at, &cells(eval.tensor(*source)?), false);
            }
            Write::Join(join) => join.write(eval, meta, &mut x)?,
            Write::Slice { source, .. } | Write::Select { source, .. } => {
                let (_, at) = self.slice(eval, meta)?;
                write(&mut x, &at, &cells(eval.tensor(*source)?), false);
            }
        }
        outs[0].write(eval.precision(), x);
        Ok(())
    }

    /// The shape of the slice that is written, and its places in the row-major tensor.
    fn slice(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<(Vec<i64>, Vec<usize>), OpError> {
        let (Write::Slice { dim, .. } | Write::Select { dim, .. }) = self.write else { return misfit("no slice") };
        let dim = meta.dim(dim)?;
        let (mut shape, first, step) = self.bounds(shapes, meta)?;
        let mut strides = row_major(&meta.shape);
        let lead = count(first * strides[dim]);
        strides[dim] *= step;
        let at = places(&shape, &strides).into_iter().map(|p| p + lead).collect();
        if matches!(self.write, Write::Select { .. }) {
            shape.remove(dim);
        }
        Ok((shape, at))
    }

    /// The slice's sizes, with 1 where one of a dimension is selected; its first element in the dimension, and the step.
    fn bounds(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<(Vec<i64>, i64, i64), OpError> {
        let (Write::Slice { dim, .. } | Write::Select { dim, .. }) = self.write else { return misfit("no slice") };
        let dim = meta.dim(dim)?;
        let Some(&size) = meta.shape.get(dim) else { return misfit("a slice of a tensor without dimensions") };
        let mut shape = meta.shape.clone();
        let (first, step) = match self.write {
            Write::Slice { start, end, step, .. } => {
                let bound = |at: Option<Int>, none: i64| -> Result<i64, OpError> {
                    let at = at.map_or(Ok(none), |at| shapes.int(at))?;
                    Ok(if at < 0 { at.saturating_add(size) } else { at }.clamp(0, size))
                };
                let (start, end, step) = (bound(start, 0)?, bound(end, size)?, shapes.int(step)?);
                if step < 1 {
                    return misfit(format!("a slice by steps of {step}"));
                }
                shape[dim] = ((end - start).max(0) + step - 1) / step;
                (start, step)
            }
            Write::Select { index, .. } => {
                let index = shapes.int(index)?;
                if index < -size || index >= size {
                    return Err(OpError::IndexOutOfRange { index, dim, size });
                }
                shape[dim] = 1;
                (index.rem_euclid(size), 1)
            }
            _ => (0, 1),
        };
        Ok((shape, first, step))
    }
}

/// Writes or adds values at places, in order. An addition of booleans is an "or", which storing makes of it.
fn write(x: &mut Cells, at: &[usize], values: &Cells, add: bool) {
    match (x, values) {
        (Cells::Float(x), Cells::Float(values)) => {
            for (&p, &value) in at.iter().zip(values) {
                x[p] = if add { x[p] + value } else { value };
            }
        }
        (Cells::Int(x), Cells::Int(values)) => {
            for (&p, &value) in at.iter().zip(values) {
                x[p] = if add { x[p].wrapping_add(value) } else { value };
            }
        }
        // The dtypes are equal: inference has checked it.
        _ => {}
    }
}

/// The form of a copy that keeps strides, gaps and offset: what `slice_scatter` and `select_scatter` write to.
fn copy_in_place_of(meta: &Meta) -> Meta {
    if strides::overlaps_itself(meta) { like(meta, meta.dtype) } else { meta.clone() }
}

/// That each mask of `index_put` has the sizes of the dimensions that it stands for.
fn need_masks_fit(eval: &dyn Eval, op: &Scatter, meta: &Meta) -> Result<(), OpError> {
    let Write::Put { indices, .. } = &op.write else { return Ok(()) };
    let mut dim = 0;
    for id in indices {
        let Some(id) = id else {
            dim += 1;
            continue;
        };
        let index = &eval.tensor(*id)?.meta;
        if index.dtype != DType::Bool {
            dim += 1;
            continue;
        }
        if meta.shape.get(dim..dim + index.rank()) != Some(&index.shape) {
            return misfit(format!("a mask of shape {:?} for a tensor of shape {:?}", index.shape, meta.shape));
        }
        dim += index.rank();
    }
    Ok(())
}

/// A shape without leading sizes of 1 beyond this rank.
fn trimmed(shape: &[i64], rank: usize) -> Vec<i64> {
    let extra = shape.len().saturating_sub(rank);
    if shape[..extra].iter().all(|&n| n == 1) { shape[extra..].to_vec() } else { shape.to_vec() }
}

fn scatter(args: &Args<'_>, source: impl Fn(&Args<'_>) -> Result<Source, OpError>) -> Result<Write, OpError> {
    Ok(Write::Along { dim: args.known_int("dim")?, index: args.tensor("index")?, source: source(args)? })
}

fn put(args: &Args<'_>) -> Result<Write, OpError> {
    Ok(Write::Put {
        indices: args.opt_tensors("indices")?,
        values: args.tensor("values")?,
        accumulate: args.bool_or("accumulate", false)?,
    })
}

fn copy(args: &Args<'_>) -> Result<Write, OpError> {
    Ok(Write::Copy { dim: args.known_int("dim")?, index: args.tensor("index")?, source: args.tensor("source")? })
}

fn slice(args: &Args<'_>) -> Result<Write, OpError> {
    Ok(Write::Slice {
        source: args.tensor("src")?,
        dim: args.known_int_or("dim", 0)?,
        start: args.opt_int("start")?,
        end: args.opt_int("end")?,
        step: args.int_or("step", 1)?,
    })
}

fn select(args: &Args<'_>) -> Result<Write, OpError> {
    Ok(Write::Select { source: args.tensor("src")?, dim: args.known_int("dim")?, index: args.int("index")? })
}
