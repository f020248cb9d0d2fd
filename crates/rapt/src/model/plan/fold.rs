//! What depends on constants alone: computed when a plan is made, by the reference; what depends on weights alone, not on sizes,
//! once for all plans.

use std::sync::{Arc, PoisonError};

use rapt_core::Workspace;
use rapt_graph::{Node, Out, Precision};

use super::super::{ModelError, memory};
use super::build::{Builder, read_by};
use super::place::{Buffer, Place};

impl Builder<'_> {
    /// Computes a node and keeps its results as constants.
    pub(super) fn fold(&mut self, n: usize, node: &Node) -> Result<(), ModelError> {
        let folded = || self.inner.folded.lock().unwrap_or_else(PoisonError::into_inner);
        let fixed = node.outputs.iter().flatten().all(|id| self.fixed[id.0 as usize]);
        if fixed && let Some(known) = folded().get(&n).cloned() {
            for (id, memory) in known {
                self.places.constant(id, memory);
            }
            return Ok(());
        }
        let mut reads = Vec::new();
        for &id in read_by(node) {
            if let Some(place) = self.places.of(id) {
                let base = self.constant_base(&place)?;
                // SAFETY: the place lies in a constant that is alive.
                reads.push((id, unsafe { memory::tensor(base, &place) }));
            }
        }
        let outs = self.binding.evaluate(n, &node.op, reads, Precision::Rounded);
        let outs = outs.map_err(|cause| self.failed(node, cause))?;
        let mut made = Vec::new();
        for ((out, id), tensor) in self.binding.outs[n].iter().zip(&node.outputs).zip(outs) {
            let (Out::Fresh(meta), Some(id), Some(tensor)) = (out, id, tensor) else { continue };
            let elements = meta.extent().and_then(|extent| usize::try_from(extent).ok()).unwrap_or(0);
            let mut bytes = Workspace::new();
            bytes.ensure((elements * meta.dtype.size_bytes()).max(1))?;
            let place = Place { buffer: 0, meta: meta.clone() };
            // SAFETY: the memory holds every element of the form.
            unsafe { memory::put(&tensor, bytes.as_mut_ptr(), &place) };
            made.push((*id, Arc::new(bytes)));
        }
        if fixed {
            // Whoever was first stays: matrices that were packed of its memory are known by its address.
            made = folded().entry(n).or_insert(made).clone();
        } else {
            self.own_bytes += made.iter().map(|(_, memory)| memory.len_bytes()).sum::<usize>();
        }
        for (id, memory) in made {
            self.places.constant(id, memory);
        }
        Ok(())
    }

    /// The address of a constant's buffer.
    fn constant_base(&self, place: &Place) -> Result<*const u8, ModelError> {
        match &self.places.buffers[place.buffer] {
            Buffer::Constant(memory) => Ok(memory.as_ptr()),
            Buffer::Archive(id) => Ok(self.inner.storage(*id).as_ptr()),
            _ => Err(ModelError::Plan { why: "a constant that is none".into() }),
        }
    }
}
