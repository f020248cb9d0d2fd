//! Writing by index, or what a view shows: `scatter`, `index_put`, `index_copy`, `slice_scatter`, of a copy or in place.
//!
//! Elements are written in row-major order of the index, so of several for one place the last stays; with `accumulate` all
//! are added, in f64 and rounded once. Out-of-range indices are errors before anything is written.

use rapt_core::DType;

use super::index::{Indices, gathered, indexed, need_gather_index, need_index, read_indices, slices};
use super::join::{Joining, need_covering, need_slices};
use super::shape::{
    cells, copy_in_place_of, expand_places, fresh, like, misfit, need_plain, need_same, pick, places, row_major,
    scalar_cell,
};
use super::target::Target;
use super::view::{Form, form};
use crate::{Args, Cells, Eval, Meta, OpError, Out, Precision, Scalar, Shapes, Tensor, ValueId};

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
    /// `slice_scatter`, `select_scatter`, `diagonal_scatter`, `as_strided_scatter`: what a view of the tensor shows.
    View {
        /// What goes there.
        source: ValueId,
        /// The view.
        form: Form,
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
            ("slice_scatter", "default") if target == Target::Fresh => view(args, "slice.Tensor"),
            ("select_scatter", "default") if target == Target::Fresh => view(args, "select.int"),
            ("diagonal_scatter", "default") if target == Target::Fresh => view(args, "diagonal.default"),
            ("as_strided_scatter", "default") if target == Target::Fresh => view(args, "as_strided.default"),
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
            Write::View { source: from, form } => {
                let (view, from) = (form.one(meta, shapes)?, source(*from)?);
                if from.shape != view.shape {
                    return misfit(format!("a source of shape {:?}, expected {:?}", from.shape, view.shape));
                }
                let copy = copy_in_place_of(meta);
                if matches!(form, Form::Strided { .. }) {
                    // Places are those of the storage: the copy lies in its own as the tensor does.
                    if crate::strides::overlaps_itself(&view) || copy.strides != meta.strides {
                        return misfit("as_strided_scatter where elements share a place");
                    }
                    if view.numel() > 0 && view.extent().is_none_or(|end| meta.extent().is_none_or(|own| end > own)) {
                        return misfit("as_strided_scatter beyond the tensor's last element");
                    }
                    Out::Fresh(Meta { offset: meta.offset, ..copy })
                } else {
                    Out::Fresh(copy)
                }
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

    /// What is written of a tensor as a view of it; `None` of writes by index.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn region(&self, shapes: &dyn Shapes, whole: &Meta) -> Result<Option<Meta>, OpError> {
        let Write::View { form, .. } = &self.write else { return Ok(None) };
        form.one(whole, shapes).map(Some)
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
            Write::View { source, form } => {
                let out = &outs[0];
                out.write(eval.precision(), x);
                out.view(form.one(&out.meta, eval)?).write(eval.precision(), cells(eval.tensor(*source)?));
                return Ok(());
            }
        }
        outs[0].write(eval.precision(), x);
        Ok(())
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

fn view(args: &Args<'_>, name: &str) -> Result<Write, OpError> {
    match form(name, args) {
        Some(form) => Ok(Write::View { source: args.tensor("src")?, form: form? }),
        None => misfit(format!("{name} is no view")),
    }
}
