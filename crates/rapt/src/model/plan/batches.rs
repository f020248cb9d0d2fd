//! Products of batches whose matrices do not lie as kernels take them: copies in rows, before and after.

use rapt_graph::ops::Linear;
use rapt_graph::{Meta, Node};

use super::super::ModelError;
use super::build::Builder;
use super::place::Place;
use super::product::{self, Batch};
use super::strided::is_float;
use super::{Kernel, Step};

impl Builder<'_> {
    /// A product of batches of any strides.
    pub(super) fn batch_of_copies(&mut self, n: usize, node: &Node, op: &Linear) -> Result<bool, ModelError> {
        let Linear::Product { a, b, .. } = *op else { return Ok(false) };
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let (a, b, rank) = (self.place(a)?, self.place(b)?, out.meta.rank());
        if !is_float(out.meta.dtype) || rank < 3 || a.meta.rank() < 2 || b.meta.rank() < 2 || out.meta.numel() == 0 {
            return Ok(false);
        }
        let (lead, dtype) = (out.meta.shape[..rank - 2].to_vec(), out.meta.dtype);
        let count: i64 = lead.iter().product();
        // [lead, rows, columns], and the shape with the lead as one.
        let whole = |place: &Place| {
            let last = &place.meta.shape[place.meta.rank() - 2..];
            (place.broadcast(&[&lead[..], last].concat()), [count, last[0], last[1]])
        };
        self.close_for(&node.inputs)?;
        let mut places = Vec::new();
        for (operand, needs_unit) in [(&a, true), (&b, false)] {
            let (place, shape) = whole(operand);
            let unit = |place: &Place| !needs_unit || shape[2] <= 1 || place.meta.strides[2] == 1;
            places.push(match place.reshaped(&shape).filter(unit) {
                Some(place) => place,
                None => {
                    let copy = self.copied(n, &place, dtype)?;
                    Place { meta: Meta::contiguous(dtype, &shape), ..copy }
                }
            });
        }
        let (result, shape) = whole(&out);
        let unit = |place: &Place| shape[2] <= 1 || place.meta.strides[2] == 1;
        let direct = result.reshaped(&shape).filter(unit);
        let to = direct.clone().unwrap_or_else(|| self.temporary(dtype, &shape));
        let sizes = [shape[1], shape[2], places[0].meta.shape[2]].map(|n| usize::try_from(n).unwrap_or(0));
        let (gemm, layout) = product::kernels(self.arch, dtype, sizes, self.threads)?;
        let packed = self.packed_memory(layout.len_bytes() * usize::try_from(count).unwrap_or(0));
        let [a, b] = [places[0].clone(), places[1].clone()];
        let uses = vec![a.buffer, b.buffer, to.buffer, packed];
        let kernel = Kernel::Batch(Box::new(Batch { gemm, layout, packed, places: [a, b, to.clone()] }));
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: false });
        if direct.is_none() {
            let copy = Place { meta: Meta::contiguous(dtype, &result.meta.shape), ..to };
            self.copy_to(n, &copy, &result)?;
        }
        Ok(true)
    }
}
