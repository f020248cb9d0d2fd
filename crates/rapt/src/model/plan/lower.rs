//! Which kernel computes a node.

use rapt_core::DType;
use rapt_cpu::gemm::PackedLayout;
use rapt_cpu::pointwise::{Binary, Instruction, Register};
use rapt_graph::ops::{Arrange, Copy, Emitter, Linear, Op, Operand, Pointwise, Target};
use rapt_graph::{Meta, Node, OpError, Out, Shapes, ValueId};

use super::super::ModelError;
use super::build::Builder;
use super::group::{Group, Made, Writer};
use super::place::{Buffer, Place};
use super::product::{self, Batch, Head, InCache, Weights};
use super::{Kernel, Step};

impl Builder<'_> {
    /// Computes a node by the first kernel that takes it; by its definition where none does.
    pub(super) fn lower(&mut self, n: usize, node: &Node) -> Result<(), ModelError> {
        let done = match &node.op {
            Op::Pointwise(op) => self.pointwise(n, node, op)?,
            Op::Copy(op) => self.copy(n, node, op)?,
            Op::Linear(op) => {
                self.product(n, node, op)?
                    || self.batch(n, node, op)?
                    || self.batch_of_copies(n, node, op)?
                    || self.added_product(n, node, op)?
            }
            Op::Arrange(Arrange::Cat { tensors, dim }) => self.cat(n, node, tensors, *dim)?,
            Op::Attention(op) => self.attention(n, node, op)?,
            Op::Einsum(op) => self.einsum(n, node, op)?,
            Op::Conv(op) if op.is_by_channel(self.binding) => {
                self.other_conv(n, node, op)? || self.conv(n, node, op)?
            }
            Op::Conv(op) => self.conv(n, node, op)? || self.other_conv(n, node, op)?,
            Op::GroupedMm(op) => self.experts(n, node, op)?,
            Op::Norm(_) => self.rows(n, node)? || self.norms(n, node)?,
            Op::Reduce(op) => self.rows(n, node)? || self.reduce(n, node, op)? || self.moments(n, node, op)?,
            Op::Scan(op) => self.rows(n, node)? || self.norms(n, node)? || self.scan(n, node, op)?,
            Op::Index(_) | Op::Scatter(_) => self.moves(n, node)? || self.along(n, node)?,
            Op::Arrange(op) => self.arrange(n, node, op)?,
            Op::Create(op) => self.create(n, node, op)?,
            Op::Pool(op) => self.pool(n, node, op)?,
            Op::Pad(op) => self.pad(n, node, op)?,
            Op::Rearrange(op) => self.rearrange(n, node, op)?,
            Op::Sort(op) => self.sort(n, node, op)?,
            _ => false,
        };
        if done { Ok(()) } else { self.by_definition(n, node) }
    }

    /// The result of a node with one result, and where it lies.
    pub(super) fn result(&self, node: &Node) -> Option<(ValueId, Place)> {
        let [Some(id)] = node.outputs[..] else { return None };
        Some((self.root(id)?, self.places.of(id)?))
    }

    /// The first result of a node whose other results nobody wants, and where it lies.
    fn first_result(&self, node: &Node) -> Option<(ValueId, Place)> {
        let (first, others) = node.outputs.split_first()?;
        let id = (*first)?;
        if others.iter().flatten().any(|id| self.is_wanted_value(*id)) {
            return None;
        }
        Some((self.root(id)?, self.places.of(id)?))
    }

    fn pointwise(&mut self, n: usize, node: &Node, op: &Pointwise) -> Result<bool, ModelError> {
        if let Some(target) = node.op.mutates() {
            // The operand itself is the result, named or not.
            let out = self.place(target)?;
            let binding = self.binding;
            return self.write_in_place(n, node, &out.clone(), |writer| op.emit(binding, out.meta.dtype, writer));
        }
        let Some((root, out)) = self.first_result(node) else { return Ok(false) };
        let binding = self.binding;
        let emit = |writer: &mut Writer<'_>| op.emit(binding, out.meta.dtype, writer);
        self.grouped(n, node, (root, &out), &out.meta.shape.clone(), emit)
    }

    /// Adds a node to the groups that make what it reads, or begins one. `out` lies in the group's order.
    pub(super) fn grouped(
        &mut self,
        n: usize,
        node: &Node,
        (root, out): (ValueId, &Place),
        shape: &[i64],
        emit: impl Fn(&mut Writer<'_>) -> Result<Register, OpError>,
    ) -> Result<bool, ModelError> {
        let mut group: Option<Group> = None;
        for maker in self.take_makers(&node.inputs) {
            match &mut group {
                // The one with a product goes on; what cannot be joined is closed.
                Some(group) if group.shape == maker.shape => {
                    let mut joined = group.clone();
                    if joined.absorb(maker.clone()) {
                        *group = joined;
                    } else {
                        let (first, second) =
                            if maker.head.is_some() { (group.clone(), maker) } else { (maker, group.clone()) };
                        self.close(first)?;
                        *group = second;
                    }
                }
                Some(_) => self.close(maker)?,
                None => group = Some(maker),
            }
        }
        if let Some(mut group) = group.take() {
            let placed = out.reshaped(&group.shape);
            let register = placed.as_ref().and_then(|_| group.extend(&self.places, shape, &emit));
            if let (Some(place), Some(register)) = (placed, register) {
                group.made.push(Made { root, place, register });
                group.nodes.push(n);
                self.open(group);
                return Ok(true);
            }
            self.close(group)?;
        }
        let mut group = Group::new(shape.to_vec());
        let Some(register) = group.extend(&self.places, shape, &emit) else { return Ok(false) };
        let Some(place) = out.reshaped(shape) else { return Ok(false) };
        group.made.push(Made { root, place, register });
        group.nodes.push(n);
        self.open(group);
        Ok(true)
    }

    /// A loop that writes a tensor in place, at once.
    pub(super) fn write_in_place(
        &mut self,
        n: usize,
        node: &Node,
        out: &Place,
        emit: impl Fn(&mut Writer<'_>) -> Result<Register, OpError>,
    ) -> Result<bool, ModelError> {
        self.close_for(&node.inputs)?;
        let mut group = Group::new(out.meta.shape.clone());
        let Some(register) = group.extend(&self.places, &out.meta.shape, emit) else { return Ok(false) };
        // What is read elsewhere in the same tensor would be read after it was written.
        let overlaps = |place: &Place| place.buffer == out.buffer && !place.is(out);
        if group.reads.iter().any(|(place, _)| overlaps(place)) {
            return Ok(false);
        }
        self.store(n, &group, register, out)?;
        Ok(true)
    }

    /// A step that stores one register.
    pub(super) fn store(&mut self, n: usize, group: &Group, register: Register, out: &Place) -> Result<(), ModelError> {
        let mut code = group.code.clone();
        code.push(Instruction::Store(group.operands(), register));
        let mut operands: Vec<Place> = group.reads.iter().map(|(place, _)| place.clone()).collect();
        operands.push(out.clone());
        let uses = operands.iter().map(|place| place.buffer).collect();
        let each = self.each(&operands, None, &group.shape, code)?;
        let keeps = self.kept(out);
        let kernel = Kernel::Chain { each: Box::new(each), operands };
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps, may_fail: group.divides });
        Ok(())
    }

    /// What must be put back where the run fails.
    pub(super) fn kept(&self, out: &Place) -> Vec<Place> {
        if self.places.is_kept(out.buffer) { vec![out.clone()] } else { Vec::new() }
    }

    fn copy(&mut self, n: usize, node: &Node, op: &Copy) -> Result<bool, ModelError> {
        let (source, target) = match op {
            Copy::Reshape { input, .. }
            | Copy::ReshapeAs { input, .. }
            | Copy::Flatten { input, .. }
            | Copy::To { input, .. }
            | Copy::Promote { input, .. }
            | Copy::Clone { input, .. }
            | Copy::Contiguous { input, .. } => (Operand::Tensor(*input), Target::Fresh),
            Copy::Onto { source, target, .. } => (Operand::Tensor(*source), *target),
            Copy::Fill { value: value @ Operand::Tensor(_), target, .. } => (*value, *target),
            Copy::Fill { .. } => return self.fill(n, node, op),
            Copy::Bits { input, .. } => return self.bits(n, node, *input),
        };
        let Operand::Tensor(source) = source else { return Ok(false) };
        let from = self.binding.meta(source).map_err(|cause| self.failed(node, cause))?.dtype;
        let write = |to: DType| {
            move |writer: &mut Writer<'_>| {
                let x = writer.tensor(source);
                Ok(if from == to { x } else { writer.convert(x, from, to) })
            }
        };
        if target == Target::Input {
            let Some(id) = node.op.mutates() else { return Ok(false) };
            let out = self.place(id)?;
            return self.write_in_place(n, node, &out.clone(), write(out.meta.dtype));
        }
        let Some((root, out)) = self.result(node) else { return Ok(false) };
        let shape = match op {
            // The elements keep their order: the loop has the shape of what is read.
            Copy::Reshape { .. } | Copy::ReshapeAs { .. } | Copy::Flatten { .. } => self.place(source)?.meta.shape,
            _ => out.meta.shape.clone(),
        };
        let Some(out) = out.reshaped(&shape) else { return Ok(false) };
        self.grouped(n, node, (root, &out), &shape, write(out.meta.dtype))
    }

    /// The bits of a tensor, copied as integers of the smaller of the two sizes.
    fn bits(&mut self, n: usize, node: &Node, input: ValueId) -> Result<bool, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let x = self.place(input)?;
        let word = match x.meta.dtype.size_bytes().min(out.meta.dtype.size_bytes()) {
            1 => DType::I8,
            2 => DType::I16,
            4 => DType::I32,
            _ => DType::I64,
        };
        let (Some(from), Some(to)) = (x.in_words(word), out.in_words(word)) else { return Ok(false) };
        self.close_for(&node.inputs)?;
        self.copy_to(n, &from, &to)?;
        Ok(true)
    }

    /// A node's error.
    pub(super) fn failed(&self, node: &Node, cause: OpError) -> ModelError {
        let (node, target) = (node.name.clone(), node.target.clone());
        ModelError::Graph(rapt_graph::Error::Node { node, target, cause })
    }

    /// A product with a matrix of two dimensions: the head of a group.
    fn product(&mut self, n: usize, node: &Node, op: &Linear) -> Result<bool, ModelError> {
        let Some((root, out)) = self.result(node) else { return Ok(false) };
        let places = &self.places;
        let Some(form) = product::form(op, &|id| places.of(id), self.binding) else { return Ok(false) };
        let [m, columns, _] = form.sizes;
        let (dtype, signed) = (form.x.meta.dtype, |n: usize| i64::try_from(n).unwrap_or(0));
        let shape = [signed(m), signed(columns)];
        let Some(placed) = out.reshaped(&shape) else { return Ok(false) };
        self.close_for(&node.inputs)?;
        let x = if form.is_row_major() { form.x.clone() } else { self.rows_of(n, &form.x)? };
        let (gemm, layout) = product::kernels(self.arch, dtype, form.sizes, self.threads)?;
        let parts = InCache::new(self.arch, &form.w, form.sizes, self.threads)?;
        let weights = match parts.filter(|_| !self.places.is_constant(form.w.buffer)) {
            Some(parts) => Weights::InCache(Box::new(parts)),
            None => self.weights(layout, vec![form.w.clone()])?.remove(0),
        };
        let mut group = Group::new(shape.to_vec());
        group.head = Some(Head { gemm, x, weights });
        group.code.push(Instruction::Load(0));
        let added = form.added.map(|id| self.place(id)).transpose()?;
        let added = added.map(|added| added.broadcast(&out.meta.shape));
        let register = group.extend(&self.places, &shape, |writer| {
            let mut sums = Register(0);
            if let Some(added) = &added {
                let Some(added) = added.reshaped(&shape) else { return Err(OpError::Refused("strides")) };
                let added = writer.place(&added);
                sums = writer.both(Binary::Add, sums, added);
            }
            Ok(writer.in_dtype(sums, dtype))
        });
        let Some(register) = register else { return Ok(false) };
        group.made.push(Made { root, place: placed, register });
        group.nodes.push(n);
        self.open(group);
        Ok(true)
    }

    /// Rows whose elements follow one another: a copy of what lies otherwise.
    fn rows_of(&mut self, n: usize, x: &Place) -> Result<Place, ModelError> {
        let columns = x.meta.shape.last().copied().unwrap_or(1);
        let rows: i64 = x.meta.shape[..x.meta.rank().saturating_sub(1)].iter().product();
        let meta = Meta::contiguous(x.meta.dtype, &x.meta.shape);
        let copy = Place { buffer: self.places.scratch(&meta), meta };
        let mut group = Group::new(x.meta.shape.clone());
        let register = group.extend(&self.places, &x.meta.shape, |writer| Ok(writer.place(x)));
        if let Some(register) = register {
            self.store(n, &group, register, &copy)?;
        }
        Ok(Place { buffer: copy.buffer, meta: Meta::contiguous(x.meta.dtype, &[rows, columns]) })
    }

    /// Matrices of one layout as right operands: packed once where they are constant, else in each run, one where the other was.
    pub(super) fn weights(&mut self, layout: PackedLayout, matrices: Vec<Place>) -> Result<Vec<Weights>, ModelError> {
        let mut memory = None;
        let mut weights = Vec::with_capacity(matrices.len());
        for from in matrices {
            weights.push(if self.places.is_constant(from.buffer) {
                Weights::Packed(self.packed(layout, &from)?)
            } else {
                let to = *memory.get_or_insert_with(|| self.packed_memory(layout.len_bytes()));
                Weights::EachRun { from, layout, to }
            });
        }
        Ok(weights)
    }

    /// Memory for packed matrices.
    pub(super) fn packed_memory(&mut self, bytes: usize) -> usize {
        self.places.buffers.push(Buffer::Arena { at: 0, len: bytes });
        self.places.buffers.len() - 1
    }

    /// Products of batches of matrices.
    fn batch(&mut self, n: usize, node: &Node, op: &Linear) -> Result<bool, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let known = &self.places;
        let Some(places) = product::batch(op, &|id| known.of(id), &out) else { return Ok(false) };
        self.close_for(&node.inputs)?;
        let ([batch, rows, columns], depth) = (dims(&places[2].meta), dims(&places[0].meta)[2]);
        let (gemm, layout): (_, PackedLayout) =
            product::kernels(self.arch, out.meta.dtype, [rows, columns, depth], self.threads)?;
        let packed = self.packed_memory(layout.len_bytes() * batch);
        let mut uses: Vec<usize> = places.iter().map(|place| place.buffer).collect();
        uses.push(packed);
        let kernel = Kernel::Batch(Box::new(Batch { gemm, layout, packed, places }));
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: false });
        Ok(true)
    }

    /// Tensors side by side: each is copied to its part, or stored there by the group that makes it.
    fn cat(&mut self, n: usize, node: &Node, tensors: &[ValueId], dim: i64) -> Result<bool, ModelError> {
        let Some((root, out)) = self.result(node) else { return Ok(false) };
        let dim = out.meta.dim(dim).map_err(|cause| self.failed(node, cause))?;
        let mut start = 0;
        let mut parts = Vec::new();
        for &id in tensors {
            let place = self.place(id)?;
            if place.meta.shape == [0] && out.meta.rank() != 1 {
                continue;
            }
            let size = place.meta.shape[dim];
            parts.push((place, out.narrowed(dim, start, size)));
            start += size;
        }
        if parts.iter().any(|(from, _)| from.meta.dtype != out.meta.dtype) {
            return Ok(false);
        }
        // What no group stores in its part is read from memory. Its makers are closed before a group takes this node for its own:
        // a group does not store what its own nodes alone read.
        let buffers: Vec<usize> = parts.iter().map(|(from, _)| from.buffer).collect();
        let once = |from: &Place| buffers.iter().filter(|&&buffer| buffer == from.buffer).count() == 1;
        for (from, to) in &parts {
            let is_stored =
                once(from) && self.maker_of(from).is_some_and(|(group, _)| to.reshaped(&group.shape).is_some());
            if !is_stored {
                self.close_where(|group| group.makes(from.buffer))?;
            }
        }
        for (from, to) in parts {
            if let Some((group, register)) = self.maker_of(&from)
                && let Some(place) = to.reshaped(&group.shape)
            {
                group.made.push(Made { root, place, register });
                group.nodes.push(n);
                continue;
            }
            let mut group = Group::new(from.meta.shape.clone());
            let register = group.extend(&self.places, &from.meta.shape, |writer| Ok(writer.place(&from)));
            let Some(register) = register else { return Ok(false) };
            group.made.push(Made { root, place: to, register });
            group.nodes.push(n);
            self.open(group);
        }
        Ok(true)
    }

    /// A node without a kernel.
    fn by_definition(&mut self, n: usize, node: &Node) -> Result<(), ModelError> {
        self.close_for(&node.inputs)?;
        let mut reads = Vec::new();
        for &id in &node.inputs {
            if let Some(place) = self.places.of(id) {
                reads.push((id, place));
            }
        }
        let mutated = node.op.mutates().map(|id| self.place(id)).transpose()?;
        let mut writes = Vec::new();
        for (out, id) in self.binding.outs[n].iter().zip(&node.outputs) {
            writes.push(match (out, id) {
                (Out::Fresh(_), Some(id)) => Some(self.place(*id)?),
                (Out::Same(_), _) => mutated.clone(),
                _ => None,
            });
        }
        let uses = reads.iter().map(|(_, place)| place.buffer).chain(writes.iter().flatten().map(|place| place.buffer));
        let uses = uses.collect();
        let mut keeps: Vec<Place> = writes.iter().flatten().flat_map(|place| self.kept(place)).collect();
        keeps.dedup();
        let kernel = Kernel::Node { reads, writes };
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps, may_fail: true });
        Ok(())
    }
}

/// The sizes of three dimensions.
fn dims(meta: &Meta) -> [usize; 3] {
    [0, 1, 2].map(|d| usize::try_from(meta.shape[d]).unwrap_or(0))
}
