//! Elements by index along a dimension, slices that are written, masks that are: what `moves` does not take.

use rapt_core::DType;
use rapt_cpu::strided::{Along, Write as How};
use rapt_graph::ops::{Emitter, Index, Op, Scatter, Source, Target, Write};
use rapt_graph::{Cells, Node, Out, ValueId};

use super::super::ModelError;
use super::build::Builder;
use super::group::{Group, Writer};
use super::place::Place;
use super::strided::{form, is_float};

impl Builder<'_> {
    /// `gather`, `scatter`, `slice_scatter`, and `index_put` of one number by a mask.
    pub(super) fn along(&mut self, n: usize, node: &Node) -> Result<bool, ModelError> {
        match &node.op {
            Op::Index(Index::Gather { input, dim, index }) => self.gather(n, node, *input, *dim, *index),
            Op::Scatter(op) => match &op.write {
                Write::Along { dim, index, source } => self.scatter(n, node, op, (*dim, *index, *source)),
                Write::View { source, .. } => self.write_view(n, node, op, *source),
                Write::Put { indices, values, accumulate: false } => self.put_by_mask(n, node, op, indices, *values),
                _ => Ok(false),
            },
            _ => Ok(false),
        }
    }

    fn gather(&mut self, n: usize, node: &Node, input: ValueId, dim: i64, index: ValueId) -> Result<bool, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let (whole, index) = (self.place(input)?, self.place(index)?);
        let Ok(dim) = whole.meta.dim(dim) else { return Ok(false) };
        let [whole, index, part] = [whole, index, out].map(lifted);
        if index.meta.numel() == 0 {
            return Ok(true);
        }
        let kernel = Along::new(How::None, dim, &form(&whole), &form(&index), &form(&part));
        let Some(kernel) = kernel else { return Ok(false) };
        self.close_for(&node.inputs)?;
        self.strided(n, kernel, vec![whole, index, part], true, Vec::new());
        Ok(true)
    }

    /// Where a write goes: the tensor itself, or a result that is a copy of it. The copy is made here.
    fn written(&mut self, n: usize, node: &Node, op: &Scatter) -> Result<Option<Place>, ModelError> {
        let input = self.place(op.input)?;
        self.close_for(&node.inputs)?;
        match (op.target, self.binding.outs[n].first()) {
            (Target::Input, _) => Ok(Some(input)),
            (Target::Fresh, Some(Out::Fresh(_))) => {
                let Some((_, out)) = self.result(node) else { return Ok(None) };
                if !out.is(&input) {
                    self.copy_to(n, &input, &out)?;
                }
                Ok(Some(out))
            }
            _ => Ok(None),
        }
    }

    fn scatter(
        &mut self,
        n: usize,
        node: &Node,
        op: &Scatter,
        (dim, index, source): (i64, ValueId, Source),
    ) -> Result<bool, ModelError> {
        let input = self.place(op.input)?;
        let (index, dtype) = (lifted(self.place(index)?), input.meta.dtype);
        let Ok(dim) = input.meta.dim(dim) else { return Ok(false) };
        let from = match source {
            Source::Tensor(id) | Source::Sum(id) => Some(lifted(self.place(id)?)),
            Source::Value(_) => None,
        };
        let overlaps = |place: &Place| place.buffer == input.buffer;
        if op.target == Target::Input && (overlaps(&index) || from.as_ref().is_some_and(overlaps)) {
            return Ok(false);
        }
        let is_sum = matches!(source, Source::Sum(_));
        let Some(whole) = self.written(n, node, op)? else { return Ok(false) };
        if index.meta.numel() == 0 {
            return Ok(true);
        }
        let mut part = match from {
            Some(from) => from,
            None => {
                let Ok(Some(element)) = op.element(self.binding) else { return Ok(false) };
                self.filled(n, &element, dtype)?
            }
        };
        if part.meta.rank() == 0 {
            part = part.broadcast(&index.meta.shape);
        }
        part.meta.shape.clone_from(&index.meta.shape);
        // Sums of floats are kept in float64.
        let kept = is_sum && is_float(dtype) && dtype != DType::F64;
        let to = if kept { self.copied(n, &whole, DType::F64)? } else { whole.clone() };
        let keeps = if kept { Vec::new() } else { self.kept(&whole) };
        let how = if is_sum { How::Add } else { How::Set };
        let lifted_to = lifted(to.clone());
        let kernel = Along::new(how, dim, &form(&lifted_to), &form(&index), &form(&part));
        let Some(kernel) = kernel else { return Ok(false) };
        self.strided(n, kernel, vec![lifted_to, index, part], true, keeps);
        if kept {
            self.copy_to(n, &to, &whole)?;
        }
        Ok(true)
    }

    /// One element in the arena.
    fn filled(&mut self, n: usize, element: &Cells, dtype: DType) -> Result<Place, ModelError> {
        let one = self.temporary(dtype, &[]);
        let mut group = Group::new(Vec::new());
        let register = group.extend(&self.places, &[], |writer| Ok(constant(writer, element, dtype)));
        let Some(register) = register else {
            return Err(ModelError::Plan { why: format!("a number in {dtype}") });
        };
        self.store(n, &group, register, &one)?;
        Ok(one)
    }

    fn write_view(&mut self, n: usize, node: &Node, op: &Scatter, source: ValueId) -> Result<bool, ModelError> {
        let (input, from) = (self.place(op.input)?, self.place(source)?);
        if op.target == Target::Input {
            return Ok(false);
        }
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let Ok(Some(region)) = op.region(self.binding, &out.meta) else { return Ok(false) };
        self.close_for(&node.inputs)?;
        if !out.is(&input) {
            self.copy_to(n, &input, &out)?;
        }
        if from.buffer == out.buffer {
            return Ok(false);
        }
        self.copy_to(n, &from, &Place { buffer: out.buffer, meta: region })?;
        Ok(true)
    }

    /// One number for all elements that a mask of the first dimensions takes.
    fn put_by_mask(
        &mut self,
        n: usize,
        node: &Node,
        op: &Scatter,
        indices: &[Option<ValueId>],
        values: ValueId,
    ) -> Result<bool, ModelError> {
        let [Some(mask)] = indices[..] else { return Ok(false) };
        let (input, mut mask, value) = (self.place(op.input)?, self.place(mask)?, self.place(values)?);
        let fits = input.meta.shape.get(..mask.meta.rank()) == Some(&mask.meta.shape);
        if mask.meta.dtype != DType::Bool || value.meta.numel() != 1 || !fits {
            return Ok(false);
        }
        let dtype = input.meta.dtype;
        mask.meta.shape.resize(input.meta.rank(), 1);
        mask.meta.strides.resize(input.meta.rank(), 0);
        let Some(value) = value.reshaped(&[]) else { return Ok(false) };
        let emit = |writer: &mut Writer<'_>| {
            let (mask, value, own) = (writer.place(&mask), writer.place(&value), writer.place(&input));
            Ok(writer.select(mask, [value, own], dtype))
        };
        if op.target == Target::Input {
            return self.write_in_place(n, node, &input.clone(), emit);
        }
        let Some((root, out)) = self.result(node) else { return Ok(false) };
        if out.buffer == input.buffer {
            return self.write_in_place(n, node, &out.clone(), emit);
        }
        self.grouped(n, node, (root, &out), &out.meta.shape.clone(), emit)
    }
}

/// One element of a dtype.
pub(super) fn constant(writer: &mut Writer<'_>, element: &Cells, dtype: DType) -> rapt_cpu::pointwise::Register {
    match element {
        Cells::Float(x) => writer.float(dtype, x.first().copied().unwrap_or(0.0)),
        Cells::Int(x) => writer.int(dtype, x.first().copied().unwrap_or(0)),
    }
}

/// A tensor without dimensions as one of one element.
fn lifted(mut place: Place) -> Place {
    if place.meta.rank() == 0 {
        place.meta.shape.push(1);
        place.meta.strides.push(1);
    }
    place
}
