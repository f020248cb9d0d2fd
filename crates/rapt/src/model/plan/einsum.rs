//! `einsum` of two tensors of floats: a product of batches, or of elements where nothing is summed.
//!
//! ```text
//! bhqk, bkhd -> bqhd      batch: b h,  left: q,  summed: k,  right: d
//!                         [b·h, q, k] @ [b·h, k, d]  ─►  the result, seen as [b, h, q, d]
//! ```

use rapt_graph::ops::{Binary, Einsum, Emitter};
use rapt_graph::{Meta, Node};

use super::super::ModelError;
use super::build::Builder;
use super::place::Place;
use super::strided::is_float;

impl Builder<'_> {
    /// An `einsum` of two tensors, each of whose dimensions is the result's or the other one's too.
    pub(super) fn einsum(&mut self, n: usize, node: &Node, op: &Einsum) -> Result<bool, ModelError> {
        let [a, b] = op.operands[..] else { return Ok(false) };
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let dtype = out.meta.dtype;
        let [mut a, mut b] = [self.place(a)?, self.place(b)?];
        let Ok(Some([of_a, of_b])) = op.pair([&a.meta, &b.meta]) else { return Ok(false) };
        if !is_float(dtype) || out.meta.numel() == 0 || a.meta.numel() == 0 || b.meta.numel() == 0 {
            return Ok(false);
        }
        (a.meta, b.meta) = (of_a, of_b);
        let kept = out.meta.rank();
        let dims = |kind: &dyn Fn(i64, i64) -> bool, of: std::ops::Range<usize>| -> Vec<usize> {
            of.filter(|&d| kind(a.meta.shape[d], b.meta.shape[d])).collect()
        };
        let all = a.meta.rank();
        let left = dims(&|a, b| a != 1 && b == 1, 0..kept);
        let right = dims(&|a, b| a == 1 && b != 1, 0..kept);
        let batch = dims(&|a, b| a == b, 0..kept);
        let summed = dims(&|a, b| a == b && a != 1, kept..all);
        if !dims(&|a, b| a != b, kept..all).is_empty() {
            return Ok(false);
        }
        self.close_for(&node.inputs)?;
        if summed.is_empty() {
            let first = |place: &Place| seen(place, &[&(0..kept).collect::<Vec<_>>()]).broadcast(&out.meta.shape);
            let (a, b) = (first(&a), first(&b));
            self.chain(n, &out, |writer| {
                let factors = [writer.place(&a), writer.place(&b)];
                Ok(writer.binary(Binary::Mul, factors, (dtype, dtype)))
            })?;
            return Ok(true);
        }
        let a = self.matrices(n, &seen(&a, &[&batch, &left, &summed]), batch.len(), left.len())?;
        let b = self.matrices(n, &seen(&b, &[&batch, &summed, &right]), batch.len(), summed.len())?;
        let result = seen(&out, &[&batch, &left, &right]);
        let shape = as_matrices(&result.meta, batch.len(), left.len());
        let direct = result.reshaped(&shape);
        let to = direct.clone().unwrap_or_else(|| self.temporary(dtype, &shape));
        self.multiply(n, &[a, b], &to)?;
        if direct.is_none() {
            let copy = Place { meta: Meta::contiguous(dtype, &result.meta.shape), ..to };
            self.copy_to(n, &copy, &result)?;
        }
        Ok(true)
    }

    /// The last dimensions as two, of which the first is as many as these; a copy where strides do not reach.
    fn matrices(&mut self, n: usize, place: &Place, batch: usize, rows: usize) -> Result<Place, ModelError> {
        let shape = as_matrices(&place.meta, batch, rows);
        if let Some(place) = place.reshaped(&shape) {
            return Ok(place);
        }
        let copy = self.copied(n, place, place.meta.dtype)?;
        Ok(Place { meta: Meta::contiguous(place.meta.dtype, &shape), ..copy })
    }
}

/// A tensor's dimensions in this order.
fn seen(place: &Place, order: &[&Vec<usize>]) -> Place {
    let pick = |from: &[i64]| order.iter().copied().flatten().map(|&d| from[d]).collect();
    let meta = Meta { shape: pick(&place.meta.shape), strides: pick(&place.meta.strides), ..place.meta.clone() };
    Place { meta, ..place.clone() }
}

fn as_matrices(meta: &Meta, batch: usize, rows: usize) -> Vec<i64> {
    let (lead, last) = meta.shape.split_at(batch);
    let (rows, columns) = last.split_at(rows);
    [lead, &[rows.iter().product(), columns.iter().product()]].concat()
}
