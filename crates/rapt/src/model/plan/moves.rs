//! Elements that are moved by index: reading rows of an embedding, writing a step of a cache.

use rapt_core::DType;
use rapt_graph::ops::{Index, Op, Scatter, Target, Write};
use rapt_graph::{Node, Out, ValueId};

use super::super::ModelError;
use super::build::Builder;
use super::place::Place;
use super::{Kernel, Step};

/// Slices of dimensions, by indices that are known when the program runs. Each index stands for one dimension of the whole.
#[derive(Clone, Debug)]
pub(in crate::model) struct Move {
    /// Whether slices of the whole are written, otherwise read.
    pub(in crate::model) writes: bool,
    /// The tensor that the indices count in.
    pub(in crate::model) whole: Place,
    /// The slices: the indices' dimensions first, as many as they have, then those of the whole that none stands for.
    pub(in crate::model) part: Place,
    /// The dimensions of the whole that indices stand for, and the indices, all of one shape.
    pub(in crate::model) indices: Vec<(usize, Place)>,
    /// Whether negative indices count from the end; otherwise they are out of range.
    pub(in crate::model) from_end: bool,
    /// How many dimensions the indices have.
    pub(in crate::model) rank: usize,
    /// What the whole is a copy of, where its other elements are to be copied first.
    pub(in crate::model) copied: Option<Place>,
    /// Whether what it writes outlasts the run: its slices are put back where the run fails.
    pub(in crate::model) keeps: bool,
}

impl Move {
    /// The shape of a slice, and its strides in the whole, in elements.
    pub(in crate::model) fn slice(&self) -> (Vec<usize>, Vec<isize>) {
        let rest = (0..self.whole.meta.rank()).filter(|d| self.indices.iter().all(|(dim, _)| dim != d));
        (self.part.shape()[self.rank..].to_vec(), rest.map(|d| self.whole.meta.strides[d] as isize).collect())
    }
}

impl Builder<'_> {
    /// Indexing and writing by index, where each index is one of integers.
    pub(super) fn moves(&mut self, n: usize, node: &Node) -> Result<bool, ModelError> {
        let found = match &node.op {
            Op::Index(op) => self.read_by_index(node, op)?,
            Op::Scatter(op) => self.write_by_index(n, node, op)?,
            _ => None,
        };
        let Some(mut moved) = found else { return Ok(false) };
        self.close_for(&node.inputs)?;
        moved.keeps = moved.writes && moved.copied.is_none() && self.places.is_kept(moved.whole.buffer);
        let mut uses = vec![moved.whole.buffer, moved.part.buffer];
        uses.extend(moved.indices.iter().map(|(_, index)| index.buffer));
        uses.extend(moved.copied.iter().map(|place| place.buffer));
        self.push(Step {
            node: n,
            nodes: 1,
            kernel: Kernel::Move(Box::new(moved)),
            uses,
            keeps: Vec::new(),
            may_fail: true,
        });
        Ok(true)
    }

    fn read_by_index(&mut self, node: &Node, op: &Index) -> Result<Option<Move>, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(None) };
        let (input, indices): (ValueId, Vec<(usize, ValueId)>) = match op {
            Index::Embedding { weight, indices } => (*weight, vec![(0, *indices)]),
            Index::Select { input, dim, index } => {
                let dim = self.place(*input)?.meta.dim(*dim).map_err(|cause| self.failed(node, cause))?;
                (*input, vec![(dim, *index)])
            }
            Index::Tensor { input, indices } => {
                let given = indices.iter().enumerate().filter_map(|(dim, id)| id.map(|id| (dim, id)));
                (*input, given.collect())
            }
            Index::Gather { .. } | Index::TakeAlong { .. } | Index::Take { .. } | Index::Repeat { .. } => {
                return Ok(None);
            }
        };
        let whole = self.place(input)?;
        self.by_index(node, false, whole, out, &indices, None)
    }

    fn write_by_index(&mut self, n: usize, node: &Node, op: &Scatter) -> Result<Option<Move>, ModelError> {
        let (source, indices): (ValueId, Vec<(usize, ValueId)>) = match &op.write {
            Write::Copy { dim, index, source } => {
                let dim = self.place(op.input)?.meta.dim(*dim).map_err(|cause| self.failed(node, cause))?;
                (*source, vec![(dim, *index)])
            }
            Write::Put { indices, values, accumulate: false } => {
                let given = indices.iter().enumerate().filter_map(|(dim, id)| id.map(|id| (dim, id)));
                (*values, given.collect())
            }
            _ => return Ok(None),
        };
        let input = self.place(op.input)?;
        let (whole, copied) = match (op.target, self.binding.outs[n].first()) {
            (Target::Input, _) => (input, None),
            (Target::Fresh, Some(Out::Fresh(_))) => {
                let Some((_, out)) = self.result(node) else { return Ok(None) };
                // A cache that is written where it lies needs no copy.
                let copied = (!out.is(&input)).then_some(input);
                (out, copied)
            }
            _ => return Ok(None),
        };
        let part = self.place(source)?;
        self.by_index(node, true, whole, part, &indices, copied)
    }

    /// The move of slices: `part` has the dimensions of PyTorch's result of indexing `whole`.
    fn by_index(
        &mut self,
        node: &Node,
        writes: bool,
        whole: Place,
        part: Place,
        indices: &[(usize, ValueId)],
        copied: Option<Place>,
    ) -> Result<Option<Move>, ModelError> {
        let mut places = Vec::new();
        for &(dim, id) in indices {
            let place = self.place(id)?;
            if !matches!(place.meta.dtype, DType::I64 | DType::I32) || dim >= whole.meta.rank() {
                return Ok(None);
            }
            places.push((dim, place));
        }
        let rank = places.iter().map(|(_, index)| index.meta.rank()).max().unwrap_or(0);
        let mut shape = vec![1; rank];
        for (_, index) in &places {
            for (d, &size) in index.meta.shape.iter().enumerate() {
                let own = &mut shape[rank - index.meta.rank() + d];
                *own = if size == 1 { *own } else { size };
            }
        }
        for (_, index) in &mut places {
            *index = index.broadcast(&shape);
        }
        let rest: Vec<usize> = (0..whole.meta.rank()).filter(|d| places.iter().all(|(dim, _)| dim != d)).collect();
        // Where PyTorch puts the dimensions of the indices: at the place of the first, where they stand together, else in front.
        let dims: Vec<usize> = places.iter().map(|(dim, _)| *dim).collect();
        let (Some(&first), Some(&last)) = (dims.first(), dims.last()) else { return Ok(None) };
        let lead = if last - first + 1 == dims.len() { first } else { 0 };
        let mut full: Vec<i64> = rest.iter().map(|&d| whole.meta.shape[d]).collect();
        full.splice(lead..lead, shape.iter().copied());
        let is_slices = part.meta.rank() <= full.len();
        let part = if writes && is_slices { part.broadcast(&full) } else { part };
        if part.meta.shape != full {
            return Ok(None);
        }
        let mut part = part;
        part.meta.shape[..lead + rank].rotate_left(lead);
        part.meta.strides[..lead + rank].rotate_left(lead);
        let from_end =
            matches!(node.op, Op::Index(Index::Tensor { .. }) | Op::Scatter(Scatter { write: Write::Put { .. }, .. }));
        Ok(Some(Move { writes, whole, part, indices: places, from_end, rank, copied, keeps: false }))
    }
}
