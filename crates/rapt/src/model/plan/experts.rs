//! Mixtures of experts: rows sorted by expert, each run of them multiplied by its expert's matrix.

use rapt_core::DType;
use rapt_cpu::gemm::Gemm;
use rapt_graph::Node;
use rapt_graph::ops::GroupedMm;

use super::super::ModelError;
use super::build::Builder;
use super::place::Place;
use super::product::{self, Weights};
use super::{Kernel, Step};

/// The products of the groups.
#[derive(Debug)]
pub(in crate::model) struct Experts {
    /// `[rows, depth]`.
    pub(in crate::model) x: Place,
    /// The end of each group's rows.
    pub(in crate::model) ends: Place,
    /// `[rows, columns]`.
    pub(in crate::model) out: Place,
    /// Of each group, its matrix.
    pub(in crate::model) weights: Vec<Weights>,
    /// The products of 1, 2, … rows, up to all of them.
    pub(in crate::model) gemms: Vec<Gemm>,
    /// The most scratch memory that one of them needs.
    pub(in crate::model) scratch_bytes: usize,
}

/// The most rows for which a product of each number of them is kept.
const MOST_ROWS: usize = 4096;

impl Builder<'_> {
    /// Products of groups of rows.
    pub(super) fn experts(&mut self, n: usize, node: &Node, op: &GroupedMm) -> Result<bool, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let (x, weight, ends) = (self.place(op.input)?, self.place(op.weight)?, self.place(op.offs)?);
        let is_float = matches!(x.meta.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
        let rows = x.shape()[0];
        let unit = |place: &Place| place.meta.strides[1] == 1 || place.meta.shape[1] <= 1;
        if !is_float || !unit(&x) || !unit(&out) || rows > MOST_ROWS {
            return Ok(false);
        }
        let [groups, depth, columns] = [0, 1, 2].map(|d| weight.shape()[d]);
        let (_, layout) = product::kernels(self.arch, x.meta.dtype, [rows, columns, depth], self.threads)?;
        let mut matrices = Vec::new();
        for group in 0..groups {
            let mut matrix = weight.clone();
            matrix.meta.offset += weight.meta.strides[0] * i64::try_from(group).unwrap_or(0);
            matrix.meta.shape.remove(0);
            matrix.meta.strides.remove(0);
            matrices.push(matrix);
        }
        let weights = self.weights(layout, matrices)?;
        let of = |rows: usize| Gemm::new(self.arch, x.meta.dtype, [rows, columns, depth], self.threads);
        let gemms = (1..=rows).map(of).collect::<Result<Vec<Gemm>, _>>()?;
        self.close_for(&node.inputs)?;
        let scratch_bytes = gemms.iter().map(Gemm::scratch_bytes).max().unwrap_or(0);
        let mut uses = vec![x.buffer, ends.buffer, out.buffer];
        uses.extend(weights.iter().flat_map(Weights::uses));
        let kernel = Kernel::Experts(Box::new(Experts { x, ends, out, weights, gemms, scratch_bytes }));
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: true });
        Ok(true)
    }
}
