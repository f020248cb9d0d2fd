//! Numbers in another order or beside each other, and tensors of one number: all of them chains that copy.

use rapt_core::DType;
use rapt_graph::ops::{Arrange, Copy, Create, Emitter};
use rapt_graph::{Cells, Node, Shapes, ValueId};

use super::super::ModelError;
use super::along::constant;
use super::build::Builder;
use super::group::{Group, Made, Writer};
use super::place::Place;

impl Builder<'_> {
    /// `stack`, `hstack` and its kin, `repeat`, `roll`, `flip`, `tril` and `triu`.
    pub(super) fn arrange(&mut self, n: usize, node: &Node, op: &Arrange) -> Result<bool, ModelError> {
        let Some((root, out)) = self.result(node) else { return Ok(false) };
        match op {
            Arrange::Cat { .. } => Ok(false),
            Arrange::Stack { tensors, dim } => {
                let Ok(dim) = out.meta.dim(*dim) else { return Ok(false) };
                self.close_for(&node.inputs)?;
                for (at, &id) in (0..).zip(tensors) {
                    let mut to = out.narrowed(dim, at, 1);
                    to.meta.shape.remove(dim);
                    to.meta.strides.remove(dim);
                    let from = self.place(id)?;
                    self.copy_to(n, &from, &to)?;
                }
                Ok(true)
            }
            Arrange::Side { tensors, side } => {
                let mut parts = tensors.iter().map(|&id| self.place(id)).collect::<Result<Vec<_>, _>>()?;
                parts.iter_mut().for_each(|part| part.meta = side.widened(&part.meta));
                let Ok(dim) = side.dim(parts.iter().map(|part| &part.meta), &out.meta) else { return Ok(false) };
                if parts.iter().any(|part| part.meta.rank() != out.meta.rank()) {
                    return Ok(false);
                }
                self.close_for(&node.inputs)?;
                let mut at = 0;
                for part in parts {
                    let size = part.meta.shape[dim];
                    self.copy_to(n, &part, &out.narrowed(dim, at, size))?;
                    at += size;
                }
                Ok(true)
            }
            Arrange::Repeat { input, repeats } => {
                let (Ok(repeats), x) = (self.binding.ints(repeats), self.place(*input)?) else { return Ok(false) };
                let new = repeats.len() - x.meta.rank();
                let size = |d: usize| if d < new { 1 } else { x.meta.shape[d - new] };
                let split: Vec<i64> = repeats.iter().enumerate().flat_map(|(d, &times)| [times, size(d)]).collect();
                let mut from = x.clone();
                from.meta.shape.clone_from(&split);
                let stride = |d: usize| if d < new { 0 } else { x.meta.strides[d - new] };
                from.meta.strides = (0..repeats.len()).flat_map(|d| [0, stride(d)]).collect();
                let Some(to) = out.reshaped(&split) else { return Ok(false) };
                self.close_for(&node.inputs)?;
                self.copy_to(n, &from, &to)?;
                Ok(true)
            }
            Arrange::Flip { input, dims } => {
                let (Ok(dims), mut x) = (self.binding.ints(dims), self.place(*input)?) else { return Ok(false) };
                for dim in dims {
                    let Ok(dim) = x.meta.dim(dim) else { return Ok(false) };
                    if dim < x.meta.rank() && x.meta.shape[dim] > 0 {
                        x.meta.offset += (x.meta.shape[dim] - 1) * x.meta.strides[dim];
                        x.meta.strides[dim] = -x.meta.strides[dim];
                    }
                }
                self.close_for(&node.inputs)?;
                self.copy_to(n, &x, &out)?;
                Ok(true)
            }
            Arrange::Roll { input, shifts, dims } => {
                let x = self.place(*input)?;
                let (Ok(shifts), Ok(dims)) = (self.binding.ints(shifts), self.binding.ints(dims)) else {
                    return Ok(false);
                };
                self.close_for(&node.inputs)?;
                self.roll(n, &x, &out, (shifts, dims))
            }
            Arrange::Triangle { input, diagonal, upper } => {
                let (Ok(diagonal), x) = (self.binding.int(*diagonal), self.place(*input)?) else { return Ok(false) };
                self.triangle(n, node, (root, out), &x, (diagonal, *upper))
            }
        }
    }

    /// Blocks of a tensor, each copied to where it is shifted.
    fn roll(
        &mut self,
        n: usize,
        x: &Place,
        out: &Place,
        (shifts, dims): (Vec<i64>, Vec<i64>),
    ) -> Result<bool, ModelError> {
        let (mut x, mut out, mut dims) = (x.clone(), out.clone(), dims);
        if dims.is_empty() && shifts.len() == 1 {
            let flat = [x.meta.numel()];
            let (Some(from), Some(to)) = (x.reshaped(&flat), out.reshaped(&flat)) else { return Ok(false) };
            (x, out, dims) = (from, to, vec![0]);
        }
        // The same dimension may be shifted more than once.
        let mut shift = vec![0i64; x.meta.rank()];
        for (by, dim) in shifts.into_iter().zip(dims) {
            let Ok(dim) = x.meta.dim(dim) else { return Ok(false) };
            let Some(own) = shift.get_mut(dim) else { return Ok(false) };
            *own = own.saturating_add(by).rem_euclid(x.meta.shape[dim].max(1));
        }
        let mut blocks = vec![(x.clone(), out)];
        for (dim, &by) in shift.iter().enumerate().filter(|(_, by)| **by != 0) {
            let size = x.meta.shape[dim];
            let two = |(from, to): (Place, Place)| {
                let first = (from.narrowed(dim, 0, size - by), to.narrowed(dim, by, size - by));
                [first, (from.narrowed(dim, size - by, by), to.narrowed(dim, 0, by))]
            };
            blocks = blocks.into_iter().flat_map(two).collect();
        }
        for (from, to) in blocks {
            self.copy_to(n, &from, &to)?;
        }
        Ok(true)
    }

    /// Zeros on one side of a diagonal, by a constant mask.
    fn triangle(
        &mut self,
        n: usize,
        node: &Node,
        (root, out): (ValueId, Place),
        x: &Place,
        (diagonal, upper): (i64, bool),
    ) -> Result<bool, ModelError> {
        let [.., rows, columns] = x.meta.shape[..] else { return Ok(false) };
        let Some(mask) = self.triangle_mask(rows, columns, diagonal, upper)? else { return Ok(false) };
        let (dtype, x) = (out.meta.dtype, x.clone());
        let zero = if super::strided::is_float(dtype) { Cells::Float(vec![0.0]) } else { Cells::Int(vec![0]) };
        let emit = |writer: &mut Writer<'_>| {
            let (mask, x) = (writer.place(&mask), writer.place(&x));
            let zero = constant(writer, &zero, dtype);
            Ok(writer.select(mask, [x, zero], dtype))
        };
        self.grouped(n, node, (root, &out), &out.meta.shape.clone(), emit)
    }

    /// Which elements of a matrix stay, as a constant.
    fn triangle_mask(
        &mut self,
        rows: i64,
        columns: i64,
        diagonal: i64,
        upper: bool,
    ) -> Result<Option<Place>, ModelError> {
        let Some(count) = rows.checked_mul(columns).filter(|&n| n <= super::build::MOST_FOLDED) else {
            return Ok(None);
        };
        let mut memory = rapt_core::Workspace::new();
        memory.ensure(usize::try_from(count).unwrap_or(0).max(1))?;
        for row in 0..rows {
            for column in 0..columns {
                let reach = column - row;
                let stays = if upper { reach >= diagonal } else { reach <= diagonal };
                let at = usize::try_from(row * columns + column).unwrap_or(0);
                // SAFETY: the memory has a byte for each element.
                unsafe { memory.as_mut_ptr().add(at).write(u8::from(stays)) };
            }
        }
        let buffer = self.places.constant_memory(memory);
        Ok(Some(Place { buffer, meta: rapt_graph::Meta::contiguous(DType::Bool, &[rows, columns]) }))
    }

    /// A tensor with one number everywhere.
    pub(super) fn create(&mut self, n: usize, node: &Node, op: &Create) -> Result<bool, ModelError> {
        let Some((root, out)) = self.result(node) else { return Ok(false) };
        let Ok(Some(element)) = op.element(self.binding, out.meta.dtype) else { return Ok(false) };
        Ok(self.everywhere(n, (root, out), &element))
    }

    /// `fill` with a number.
    pub(super) fn fill(&mut self, n: usize, node: &Node, op: &Copy) -> Result<bool, ModelError> {
        if let Some(target) = node.op.mutates() {
            let out = self.place(target)?;
            let dtype = out.meta.dtype;
            let Ok(Some(element)) = op.element(self.binding, dtype) else { return Ok(false) };
            return self.write_in_place(n, node, &out, |writer| Ok(constant(writer, &element, dtype)));
        }
        let Some((root, out)) = self.result(node) else { return Ok(false) };
        let Ok(Some(element)) = op.element(self.binding, out.meta.dtype) else { return Ok(false) };
        Ok(self.everywhere(n, (root, out), &element))
    }

    /// A group of its own that reads nothing.
    fn everywhere(&mut self, n: usize, (root, place): (ValueId, Place), element: &Cells) -> bool {
        let (shape, dtype) = (place.meta.shape.clone(), place.meta.dtype);
        let mut group = Group::new(shape.clone());
        let register = group.extend(&self.places, &shape, |writer| Ok(constant(writer, element, dtype)));
        let Some(register) = register else { return false };
        group.made.push(Made { root, place, register });
        group.nodes.push(n);
        self.open(group);
        true
    }
}
