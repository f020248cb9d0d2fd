//! From a binding to a plan: node by node, groups kept open as long as nothing needs them.

use std::sync::Arc;

use rapt_core::{Arch, DType};
use rapt_cpu::gemm::{PackedLayout, PackedMatrix, SUM_ROW_STRIDE};
use rapt_cpu::pointwise::{Instruction, Loop, Program, Register};
use rapt_graph::ops::{Attention, Op, Sym, Target};
use rapt_graph::{Binding, Fact, Node, Out, Output, ValueId};

use super::super::host::Host;
use super::super::{Inner, ModelError};
use super::group::{Group, Made};
use super::place::{Buffer, Place, Places};
use super::{Kernel, Plan, Step, arena, fixed};

/// Results of constants with more elements are computed in each run: a plan is not to hold copies of weights.
pub(super) const MOST_FOLDED: i64 = 1 << 22;

/// A plan in the making.
pub(super) struct Builder<'a> {
    pub(super) inner: &'a Inner,
    pub(super) binding: &'a Binding,
    pub(super) places: Places<'a>,
    pub(super) host: Host<'a>,
    pub(super) arch: Arch,
    pub(super) threads: usize,
    pub(super) steps: Vec<Step>,
    open: Vec<Group>,
    /// Of each value that a storage came with: the nodes that read it, each once.
    readers: Vec<Vec<usize>>,
    /// Values whose storage outlives the nodes.
    given: Vec<bool>,
    /// Values that a node writes in place, by the value their storage came with.
    mutated: Vec<bool>,
    /// Of each value, whether it is wanted.
    wanted: Vec<bool>,
    /// Of each value, whether it is the same in all plans.
    pub(super) fixed: Vec<bool>,
    /// The bytes of the constants that are this plan's own.
    pub(super) own_bytes: usize,
    /// Of these, packed matrices.
    own_packed_bytes: usize,
}

pub(super) fn plan(
    inner: &Inner,
    binding: &Arc<Binding>,
    written: &[ValueId],
    host: Host<'_>,
) -> Result<Plan, ModelError> {
    let mut builder = Builder::new(inner, binding, written, host)?;
    let into = builder.caches_in_place();
    for (n, node) in inner.graph.nodes.iter().enumerate() {
        if builder.is_wanted(n) {
            builder.node(n, node, into[n])?;
        }
    }
    builder.close_where(|_| true)?;
    builder.finish(Arc::clone(binding), written)
}

impl<'a> Builder<'a> {
    fn new(inner: &'a Inner, binding: &'a Binding, written: &[ValueId], host: Host<'a>) -> Result<Self, ModelError> {
        let places = Places::new(inner, binding, written)?;
        let values = inner.graph.values.len();
        let mut builder = Builder {
            inner,
            binding,
            places,
            host,
            arch: host.engine.caps().arch,
            threads: host.threads(),
            steps: Vec::new(),
            open: Vec::new(),
            readers: vec![Vec::new(); values],
            given: vec![false; values],
            mutated: vec![false; values],
            wanted: vec![false; values],
            fixed: fixed::fixed(&inner.graph),
            own_bytes: 0,
            own_packed_bytes: 0,
        };
        builder.find_wanted();
        builder.keep_parts_of_masks();
        Ok(builder)
    }

    /// The results of a value's storage; the storage itself for a value that is none's view.
    pub(super) fn root(&self, id: ValueId) -> Option<ValueId> {
        self.binding.storage(id)
    }

    /// Whether a node computes anything: views and numbers cost nothing.
    fn computes(&self, n: usize) -> bool {
        let node = &self.inner.graph.nodes[n];
        let fresh = self.binding.outs[n].iter().any(|out| matches!(out, Out::Fresh(_)));
        fresh || node.op.mutates().is_some() || asserts(&node.op)
    }

    fn is_tensor(&self, id: ValueId) -> bool {
        matches!(self.binding.fact(id), Fact::Tensor(_))
    }

    /// From the results backwards: what must be computed.
    fn find_wanted(&mut self) {
        let graph = &self.inner.graph;
        for output in &graph.outputs {
            if let Output::Value(id)
            | Output::BufferMutation { value: id, .. }
            | Output::InputMutation { value: id, .. } = output
            {
                self.wanted[id.0 as usize] = true;
                if let Some(root) = self.binding.storage(*id) {
                    self.given[root.0 as usize] = true;
                }
            }
        }
        for (n, node) in graph.nodes.iter().enumerate().rev() {
            if let Some(root) = node.op.mutates().and_then(|id| self.binding.storage(id)) {
                self.mutated[root.0 as usize] = true;
            }
            if self.is_wanted(n) {
                for id in read_by(node) {
                    self.wanted[id.0 as usize] = true;
                }
                if self.computes(n) {
                    for root in read_by(node).iter().filter_map(|id| self.binding.storage(*id)) {
                        let readers = &mut self.readers[root.0 as usize];
                        if readers.last() != Some(&n) {
                            readers.push(n);
                        }
                    }
                }
            }
        }
    }

    /// What a mask is made of may be read in its place: it is to be there.
    fn keep_parts_of_masks(&mut self) {
        for (n, node) in self.inner.graph.nodes.iter().enumerate() {
            let Op::Attention(Attention { attn_mask: Some(mask), .. }) = &node.op else { continue };
            if !self.is_wanted(n) {
                continue;
            }
            let condition = self.condition(*mask);
            let joined = self.conjunction(condition.map_or(*mask, |condition| condition.seen));
            let parts = condition.map(|condition| condition.seen).into_iter();
            let parts = parts.chain(joined.into_iter().flat_map(|(_, _, operands)| operands));
            for root in parts.filter_map(|id| self.binding.storage(id)).collect::<Vec<_>>() {
                let readers = &mut self.readers[root.0 as usize];
                if !readers.contains(&n) {
                    readers.push(n);
                }
            }
        }
    }

    /// Whether somebody wants a value.
    pub(super) fn is_read(&self, id: ValueId) -> bool {
        self.wanted[id.0 as usize]
    }

    /// Whether a node writes to this value's storage in place.
    pub(super) fn is_mutated(&self, root: ValueId) -> bool {
        self.mutated[root.0 as usize]
    }

    /// Whether a node is needed: for a result, for what it writes, or because it may refuse the run.
    fn is_wanted(&self, n: usize) -> bool {
        let node = &self.inner.graph.nodes[n];
        asserts(&node.op)
            || node.op.mutates().is_some()
            || node.outputs.iter().flatten().any(|id| self.wanted[id.0 as usize])
    }

    /// Of each node, the buffer of the program that its result is the new content of, where it can be written there: it
    /// scatters into that very tensor, which nobody reads afterwards.
    fn caches_in_place(&self) -> Vec<Option<ValueId>> {
        let graph = &self.inner.graph;
        let mut into = vec![None; graph.nodes.len()];
        for output in &graph.outputs {
            let (value, target) = match output {
                Output::BufferMutation { value, name } => {
                    let input = graph.inputs.iter().find(|input| input.source.state() == Some(name));
                    (*value, input.and_then(|input| input.value))
                }
                Output::InputMutation { value, input } => (*value, Some(*input)),
                _ => continue,
            };
            let Some(target) = target else { continue };
            let Some(n) = graph.nodes.iter().position(|node| node.outputs.contains(&Some(value))) else { continue };
            let Op::Scatter(scatter) = &graph.nodes[n].op else { continue };
            let places = (self.places.of(scatter.input), self.places.of(target));
            let (Fact::Tensor(own), (Some(input), Some(place))) = (self.binding.fact(value), places) else { continue };
            let last_reader = |id: ValueId| self.readers[id.0 as usize].first().copied().unwrap_or(0);
            let same_buffer =
                |input: &&rapt_graph::Input| input.value.is_some_and(|id| self.places.buffer(id) == Some(place.buffer));
            let aliases: Vec<ValueId> =
                graph.inputs.iter().filter(same_buffer).filter_map(|input| input.value).collect();
            let free = aliases.iter().all(|id| last_reader(*id) <= n && !self.given[id.0 as usize]);
            let lies = own.shape == place.meta.shape && own.strides == place.meta.strides && own.offset == 0;
            // What is written must not be read from where it goes.
            let mut others = graph.nodes[n].inputs.iter().filter(|id| **id != scatter.input);
            let free = free && others.all(|id| self.places.buffer(*id) != Some(place.buffer));
            if scatter.target == Target::Fresh && input.is(&place) && lies && place.meta.offset == 0 && free {
                into[n] = Some(target);
            }
        }
        into
    }

    fn node(&mut self, n: usize, node: &Node, into: Option<ValueId>) -> Result<(), ModelError> {
        if !self.computes(n) {
            return Ok(());
        }
        if self.is_constant(n, node) {
            return self.fold(n, node);
        }
        if let (Some(target), Some(Some(value))) = (into, node.outputs.first()) {
            self.places.alias(*value, target);
            let buffer = self.places.buffer(target);
            self.close_where(|group| buffer.is_some_and(|buffer| group.touches(buffer)))?;
            return self.lower(n, node);
        }
        for (out, id) in self.binding.outs[n].iter().zip(&node.outputs) {
            if let (Out::Fresh(_), Some(id)) = (out, id) {
                self.places.fresh(*id);
            }
        }
        if let Some(buffer) = node.op.mutates().and_then(|id| self.places.buffer(id)) {
            self.close_where(|group| group.touches(buffer))?;
        }
        self.lower(n, node)
    }

    /// Whether a node depends on constants alone, and nothing writes to what it makes.
    fn is_constant(&self, n: usize, node: &Node) -> bool {
        let constant = |id: &ValueId| {
            !self.is_tensor(*id) || self.places.buffer(*id).is_some_and(|buffer| self.places.is_constant(buffer))
        };
        let outs = self.binding.outs[n].iter().zip(&node.outputs);
        let kept = outs.clone().filter_map(|(_, id)| *id).all(|id| !self.mutated[id.0 as usize]);
        let small = outs.clone().all(|(out, _)| match out {
            Out::Fresh(meta) => meta.numel() <= MOST_FOLDED,
            _ => true,
        });
        node.op.mutates().is_none() && kept && small && read_by(node).iter().all(constant)
    }

    /// Whether somebody needs a value.
    pub(super) fn is_wanted_value(&self, id: ValueId) -> bool {
        self.wanted[id.0 as usize]
    }

    /// A node that reads something else in place of this value.
    pub(super) fn forget_reader(&mut self, id: ValueId, n: usize) {
        if let Some(root) = self.binding.storage(id) {
            self.readers[root.0 as usize].retain(|reader| *reader != n);
        }
    }

    /// A constant matrix `[k, n]`, packed once.
    pub(super) fn packed(&mut self, layout: PackedLayout, w: &Place) -> Result<Arc<PackedMatrix>, ModelError> {
        let (matrix, is_shared) = self.inner.packed(layout, w, &self.places.buffers[w.buffer], self.host.executor)?;
        if !is_shared {
            self.own_bytes += matrix.len_bytes();
            self.own_packed_bytes += matrix.len_bytes();
        }
        Ok(matrix)
    }

    /// The place of a value that the program reads.
    pub(super) fn place(&self, id: ValueId) -> Result<Place, ModelError> {
        self.places.of(id).ok_or_else(|| self.lost(id))
    }

    fn lost(&self, id: ValueId) -> ModelError {
        let name = self.inner.graph.value(id).name.clone();
        ModelError::Graph(rapt_graph::Error::Kind { name, got: "no tensor".into() })
    }

    /// Closes the groups that make what a node reads.
    pub(super) fn close_for(&mut self, ids: &[ValueId]) -> Result<(), ModelError> {
        let buffers: Vec<usize> = ids.iter().filter_map(|id| self.places.buffer(*id)).collect();
        self.close_where(|group| buffers.iter().any(|&buffer| group.makes(buffer)))
    }

    /// Turns groups into steps.
    pub(super) fn close_where(&mut self, closes: impl Fn(&Group) -> bool) -> Result<(), ModelError> {
        let (closing, open): (Vec<Group>, Vec<Group>) = self.open.drain(..).partition(|group| closes(group));
        self.open = open;
        for group in closing {
            self.close(group)?;
        }
        Ok(())
    }

    /// Opens a group, or takes it into those that make what it reads.
    pub(super) fn open(&mut self, group: Group) {
        self.open.push(group);
    }

    /// The open groups that make one of these buffers, taken out.
    pub(super) fn take_makers(&mut self, ids: &[ValueId]) -> Vec<Group> {
        let buffers: Vec<usize> = ids.iter().filter_map(|id| self.places.buffer(*id)).collect();
        let makes = |group: &Group| buffers.iter().any(|&buffer| group.makes(buffer));
        let (taken, open) = self.open.drain(..).partition(makes);
        self.open = open;
        taken
    }

    /// The open group that makes this place as it lies, to store it elsewhere too.
    pub(super) fn maker_of(&mut self, place: &Place) -> Option<(&mut Group, Register)> {
        self.open.iter_mut().find_map(|group| {
            let place = place.reshaped(&group.shape)?;
            let register = group.made.iter().find(|made| made.place.is(&place))?.register;
            Some((group, register))
        })
    }

    /// Whether somebody beside these nodes wants what lies in a value's storage.
    fn is_read_beside(&self, root: ValueId, nodes: &[usize]) -> bool {
        self.given[root.0 as usize] || self.readers[root.0 as usize].iter().any(|n| !nodes.contains(n))
    }

    /// A group as a step.
    pub(super) fn close(&mut self, group: Group) -> Result<(), ModelError> {
        let stored: Vec<Made> =
            group.made.iter().filter(|made| self.is_read_beside(made.root, &group.nodes)).cloned().collect();
        if stored.is_empty() && !group.divides {
            return Ok(());
        }
        let first = group.operands();
        let mut code = group.code.clone();
        code.extend(stored.iter().enumerate().map(|(i, made)| Instruction::Store(first + i, made.register)));
        let mut operands: Vec<Place> = group.reads.iter().map(|(place, _)| place.clone()).collect();
        operands.extend(stored.iter().map(|made| made.place.clone()));
        let mut uses: Vec<usize> = operands.iter().map(|place| place.buffer).collect();
        let (node, nodes) = (group.nodes.iter().copied().min().unwrap_or(0), group.nodes.len());
        let may_fail = group.divides;
        let Some(head) = group.head else {
            let each = self.each(&operands, None, &group.shape, code)?;
            let kernel = Kernel::Chain { each: Box::new(each), operands };
            self.push(Step { node, nodes, kernel, uses, keeps: Vec::new(), may_fail });
            return Ok(());
        };
        uses.push(head.x.buffer);
        uses.extend(head.weights.uses());
        // Sums that are only rounded and stored as rows need no loop.
        let plain = code.len() == 3 && stored.len() == 1 && matches!(code[1], Instruction::Convert(Register(0), _));
        let rows = stored.first().filter(|made| plain && made.place.meta.strides.last() == Some(&1));
        let kernel = match rows {
            Some(made) => Kernel::Product { head: Box::new(head), out: Some(made.place.clone()), after: None },
            None => {
                let sums = if head.x.meta.dtype == DType::F64 { DType::F64 } else { DType::F32 };
                let each = self.each(&operands, Some(sums), &group.shape, code)?;
                Kernel::Product { head: Box::new(head), out: None, after: Some((Box::new(each), operands)) }
            }
        };
        self.push(Step { node, nodes, kernel, uses, keeps: Vec::new(), may_fail });
        Ok(())
    }

    /// The loop of code over operands; `sums` is the dtype of the product's sums before them.
    pub(super) fn each(
        &self,
        operands: &[Place],
        sums: Option<DType>,
        shape: &[i64],
        code: Vec<Instruction>,
    ) -> Result<Loop, ModelError> {
        let shape: Vec<usize> = shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
        let mut dtypes: Vec<DType> = sums.into_iter().collect();
        // The rows of sums lie apart as the product says when it runs.
        let mut strides: Vec<Vec<isize>> = sums.iter().map(|_| vec![SUM_ROW_STRIDE.cast_signed(), 1]).collect();
        dtypes.extend(operands.iter().map(|place| place.meta.dtype));
        strides.extend(operands.iter().map(Place::strides));
        let failed = |error: rapt_cpu::pointwise::ProgramError| ModelError::Plan { why: error.to_string() };
        let program = Arc::new(Program::new(dtypes, code).map_err(failed)?);
        let each = match shape[..] {
            [rows, columns] if sums.is_some() => Loop::rectangle(self.arch, program, rows, columns, &strides),
            _ => Loop::new(self.arch, program, &shape, &strides),
        };
        each.map_err(failed)
    }

    /// A step, with what it writes that outlasts the run.
    pub(super) fn push(&mut self, mut step: Step) {
        step.uses.sort_unstable();
        step.uses.dedup();
        self.steps.push(step);
    }

    fn finish(mut self, binding: Arc<Binding>, written: &[ValueId]) -> Result<Plan, ModelError> {
        let graph = &self.inner.graph;
        let (mut results, mut mutations) = (Vec::new(), Vec::new());
        for output in &graph.outputs {
            match output {
                Output::Value(id) if self.is_tensor(*id) => results.push(Some(self.place(*id)?)),
                Output::Value(_) | Output::Fixed(_) => results.push(None),
                Output::BufferMutation { value, name } => {
                    let input = graph.inputs.iter().find(|input| input.source.state() == Some(name));
                    let Some(target) = input.and_then(|input| input.value) else { continue };
                    mutations.push((self.place(*value)?, self.place(target)?));
                }
                Output::InputMutation { value, input } => mutations.push((self.place(*value)?, self.place(*input)?)),
            }
        }
        mutations.retain(|(from, to)| !from.is(to));
        let kept = results.iter().flatten().chain(mutations.iter().map(|(from, _)| from)).map(|place| place.buffer);
        let kept: Vec<usize> = kept.collect();
        let direct = self.made_in_place(&results);
        let arena_bytes = arena::assign(&mut self.places.buffers, &self.steps, &kept);
        let users = graph.user_inputs().enumerate();
        let written_inputs = users.filter(|(_, input)| input.value.is_some_and(|id| written.contains(&id)));
        Ok(Plan {
            binding,
            scratch_bytes: self.steps.iter().map(Step::scratch_bytes).max().unwrap_or(0),
            is_shared: self.steps.iter().any(|step| step.is_shared(self.threads)),
            written_inputs: written_inputs.map(|(place, _)| place).collect(),
            own_bytes: self.own_bytes,
            own_packed_bytes: self.own_packed_bytes,
            steps: self.steps,
            buffers: self.places.buffers,
            arena_bytes,
            threads: self.threads,
            arch: self.arch,
            results,
            direct,
            mutations,
        })
    }

    /// Of each result, whether steps may write it where the caller wants it: it is all that lies in a part of the arena, and no step
    /// fails once one has written there.
    fn made_in_place(&self, results: &[Option<Place>]) -> Vec<bool> {
        let last_failing = self.steps.iter().rposition(|step| step.may_fail);
        let alone = |n: usize, place: &Place| {
            let Buffer::Arena { len, .. } = &self.places.buffers[place.buffer] else { return false };
            let elements = place.shape().iter().product::<usize>();
            let is_whole = place.meta.offset == 0 && elements > 0 && elements * place.size() == *len;
            let first = self.steps.iter().position(|step| step.uses.contains(&place.buffer));
            let after_failures = last_failing.is_none_or(|last| first.is_some_and(|first| first > last));
            let is_first = results[..n].iter().flatten().all(|other| other.buffer != place.buffer);
            is_whole && is_first && after_failures && place.meta.extent() == Some(place.meta.numel())
        };
        results.iter().enumerate().map(|(n, place)| place.as_ref().is_some_and(|place| alone(n, place))).collect()
    }
}

/// The values that a node reads. Of a tensor whose form another has, only the form.
pub(super) fn read_by(node: &Node) -> &[ValueId] {
    if matches!(node.op, Op::Create(_)) { &[] } else { &node.inputs }
}

/// Whether an operator asserts something of a tensor's elements.
fn asserts(op: &Op) -> bool {
    match op {
        Op::Sym(op) => matches!(op, Sym::AssertTensor(..)),
        Op::System(op) => op.asserts(),
        _ => false,
    }
}

impl Step {
    /// Whether it has work for several threads.
    fn is_shared(&self, threads: usize) -> bool {
        let items = match &self.kernel {
            Kernel::Chain { each, .. } => each.items(threads),
            Kernel::Product { head, .. } => head.gemm.items(),
            Kernel::Batch(batch) => batch.places[0].shape()[0] * batch.gemm.items(),
            Kernel::Attention { plan, .. } => plan.threads().min(plan.items()),
            Kernel::Rows { rows, places } => places[0].as_ref().map_or(0, |x| rows.items(x.shape()[0], threads)),
            Kernel::Conv(conv) => conv.sizes.output[0].max(conv.gemm.items()),
            Kernel::Experts(_) => threads,
            Kernel::Strided { kernel, .. } => kernel.items(threads),
            Kernel::Move(_) | Kernel::Node { .. } => 1,
        };
        threads > 1 && items > 1
    }

    /// The scratch memory that one thread needs.
    fn scratch_bytes(&self) -> usize {
        match &self.kernel {
            Kernel::Chain { each, .. } => each.scratch_bytes(),
            Kernel::Product { head, after, .. } => {
                head.scratch_bytes() + after.as_ref().map_or(0, |(each, _)| each.scratch_bytes())
            }
            Kernel::Batch(batch) => batch.gemm.scratch_bytes(),
            Kernel::Conv(conv) => conv.scratch_bytes(),
            Kernel::Experts(experts) => experts.scratch_bytes,
            Kernel::Rows { rows, .. } => rows.scratch_bytes(),
            Kernel::Strided { kernel, .. } => kernel.scratch_bytes(),
            Kernel::Attention { .. } | Kernel::Move(_) | Kernel::Node { .. } => 0,
        }
    }
}
