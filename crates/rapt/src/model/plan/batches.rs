//! Products of batches whose matrices do not lie as kernels take them: copies in rows, before and after; and products with factors.

use rapt_graph::ops::{Binary, Emitter, Linear};
use rapt_graph::{Meta, Node};

use super::super::ModelError;
use super::build::Builder;
use super::group::Writer;
use super::place::Place;
use super::product::{self, Batch};
use super::strided::{is_float, wide};
use super::{Kernel, Step};

impl Builder<'_> {
    /// A product of batches of any strides.
    pub(super) fn batch_of_copies(&mut self, n: usize, node: &Node, op: &Linear) -> Result<bool, ModelError> {
        let Linear::Product { a, b, .. } = *op else { return Ok(false) };
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let operands = [self.place(a)?, self.place(b)?];
        if out.meta.rank() < 3 || !are_matrices(&operands, &out) {
            return Ok(false);
        }
        self.close_for(&node.inputs)?;
        self.multiply(n, &operands, &out)?;
        Ok(true)
    }

    /// A product with factors, or of batches, to which something is added: one step makes the products, a chain the rest.
    pub(super) fn added_product(&mut self, n: usize, node: &Node, op: &Linear) -> Result<bool, ModelError> {
        let Linear::Add { input, a, b, beta, alpha, .. } = *op else { return Ok(false) };
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let (operands, added) = ([self.place(a)?, self.place(b)?], self.place(input)?);
        let (Some(beta), Some(alpha)) = (self.float_of(beta), self.float_of(alpha)) else { return Ok(false) };
        if !are_matrices(&operands, &out) {
            return Ok(false);
        }
        self.close_for(&node.inputs)?;
        // 16-bit floats are rounded once, behind all.
        let dtype = wide(out.meta.dtype);
        let [a, b] = operands.map(|x| if x.meta.dtype == dtype { Ok(x) } else { self.copied(n, &x, dtype) });
        let sums = self.temporary(dtype, &out.meta.shape);
        self.multiply(n, &[a?, b?], &sums)?;
        let added = added.broadcast(&out.meta.shape);
        self.chain(n, &out, |writer| {
            let scaled = |writer: &mut Writer<'_>, x, factor: f64| {
                let factor = writer.float(dtype, factor);
                writer.binary(Binary::Mul, [x, factor], (dtype, dtype))
            };
            let sum = writer.place(&sums);
            let mut y = if alpha == 1.0 { sum } else { scaled(writer, sum, alpha) };
            // What is multiplied by 0 does not count, not even NaN.
            if beta != 0.0 {
                let x = writer.place(&added);
                let x = if added.meta.dtype == dtype { x } else { writer.convert(x, added.meta.dtype, dtype) };
                let x = if beta == 1.0 { x } else { scaled(writer, x, beta) };
                y = writer.binary(Binary::Add, [x, y], (dtype, dtype));
            }
            Ok(if dtype == out.meta.dtype { y } else { writer.convert(y, dtype, out.meta.dtype) })
        })?;
        Ok(true)
    }

    /// Products of matrices of any strides, to a place of their dtype.
    pub(super) fn multiply(&mut self, n: usize, operands: &[Place; 2], out: &Place) -> Result<(), ModelError> {
        let (dtype, lead) = (out.meta.dtype, out.meta.shape[..out.meta.rank() - 2].to_vec());
        let count: i64 = lead.iter().product();
        // [lead, rows, columns], and the shape with the lead as one.
        let whole = |place: &Place| {
            let last = &place.meta.shape[place.meta.rank() - 2..];
            (place.broadcast(&[&lead[..], last].concat()), [count, last[0], last[1]])
        };
        let mut places = Vec::new();
        for (operand, needs_unit) in operands.iter().zip([true, false]) {
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
        let (result, shape) = whole(out);
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
        Ok(())
    }
}

/// Whether kernels multiply these: floats, of at least two dimensions.
fn are_matrices(operands: &[Place; 2], out: &Place) -> bool {
    let all = || operands.iter().chain([out]).all(|place| place.meta.rank() >= 2);
    is_float(out.meta.dtype) && out.meta.numel() != 0 && all()
}
