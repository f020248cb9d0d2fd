//! What runs along the last dimension: norms, softmax, sums.

use rapt_cpu::rows::{RowFunction, RowKernel};
use rapt_graph::ops::{Fold, Norm, Op, Reduce, Scan};
use rapt_graph::{Meta, Node, Shapes, ValueId};

use super::super::ModelError;
use super::build::Builder;
use super::place::Place;
use super::{Kernel, Step};

impl Builder<'_> {
    /// Norms, softmax and sums over the last dimensions of rows whose elements follow one another.
    pub(super) fn rows(&mut self, n: usize, node: &Node) -> Result<bool, ModelError> {
        let Some((function, input, params, dims)) = self.row_function(&node.op) else { return Ok(false) };
        // Statistics that nobody reads are not computed.
        let Some((Some(first), others)) = node.outputs.split_first() else { return Ok(false) };
        let Some(out) = self.places.of(*first).filter(|_| others.iter().flatten().all(|id| !self.is_read(*id))) else {
            return Ok(false);
        };
        let place = self.place(input)?;
        let lead = place.meta.rank() - dims;
        let columns: i64 = place.meta.shape[lead..].iter().product();
        let rows: i64 = place.meta.shape[..lead].iter().product();
        let shape = [rows, columns];
        let kept = if function.keeps_rows() { columns } else { 1 };
        let (Some(x), Some(to)) = (place.reshaped(&shape), out.reshaped(&[rows, kept])) else { return Ok(false) };
        let unit = |place: &Place| place.meta.shape[1] <= 1 || place.meta.strides[1] == 1;
        if place.meta.dtype != out.meta.dtype || !unit(&x) || !unit(&to) {
            return Ok(false);
        }
        let mut dtypes = [None; 2];
        let mut places = [Some(x), None, None, Some(to)];
        for (slot, id) in params.into_iter().enumerate() {
            let Some(id) = id else { continue };
            let Some(param) = self.place(id)?.reshaped(&[columns]) else { return Ok(false) };
            if columns > 1 && param.meta.strides[0] != 1 {
                return Ok(false);
            }
            dtypes[slot] = Some(param.meta.dtype);
            places[slot + 1] = Some(param);
        }
        let columns = usize::try_from(columns).unwrap_or(0);
        let Ok(kernel) = RowKernel::new(self.arch, function, out.meta.dtype, columns, dtypes) else { return Ok(false) };
        self.close_for(&node.inputs)?;
        let uses = places.iter().flatten().map(|place| place.buffer).collect();
        let kernel = Kernel::Rows { rows: kernel, places: Box::new(places) };
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: false });
        Ok(true)
    }

    /// The function, its operand and parameters, and over how many of the last dimensions it runs.
    fn row_function(&self, op: &Op) -> Option<(RowFunction, ValueId, [Option<ValueId>; 2], usize)> {
        let none = [None, None];
        match op {
            Op::Norm(Norm::Last { input, shape, weight, bias, eps, rms, .. }) => {
                let eps = eps.unwrap_or(f64::from(f32::EPSILON));
                let exact = self.binding.meta(*input).ok()?.dtype != rapt_core::DType::F64;
                let function = if *rms { RowFunction::RmsNorm { eps } } else { RowFunction::LayerNorm { eps } };
                (exact || !*rms).then_some((function, *input, [*weight, *bias], shape.len()))
            }
            Op::Scan(Scan::Softmax { input, dim, dtype, log }) => {
                let meta = self.binding.meta(*input).ok()?;
                let same = dtype.is_none_or(|dtype| dtype == meta.dtype);
                let last = meta.rank() > 0 && meta.dim(*dim).ok()? + 1 == meta.rank();
                let function = if *log { RowFunction::LogSoftmax } else { RowFunction::Softmax };
                (same && last).then_some((function, *input, none, 1))
            }
            Op::Reduce(Reduce::Fold { fold, input, dims, dtype, .. }) => {
                let meta = self.binding.meta(*input).ok()?;
                let function = match fold {
                    Fold::Sum => RowFunction::Sum,
                    Fold::Mean => RowFunction::Mean,
                    Fold::Max => RowFunction::Max,
                    _ => return None,
                };
                let same = dtype.is_none_or(|dtype| dtype == meta.dtype);
                let count = self.last_dims(meta, dims.as_deref())?;
                same.then_some((function, *input, none, count))
            }
            _ => None,
        }
    }

    /// How many dimensions go, where they are the last ones.
    fn last_dims(&self, meta: &Meta, dims: Option<&[rapt_graph::Int]>) -> Option<usize> {
        let Some(dims) = dims else { return Some(meta.rank()) };
        let mut own: Vec<usize> =
            dims.iter().map(|&dim| meta.dim(self.binding.int(dim).ok()?).ok()).collect::<Option<_>>()?;
        own.sort_unstable();
        own.dedup();
        let all = own.iter().rev().enumerate().all(|(i, &dim)| dim + 1 + i == meta.rank());
        (all && !own.is_empty()).then_some(own.len())
    }
}
