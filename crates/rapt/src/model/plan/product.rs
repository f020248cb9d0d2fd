//! Products of matrices: which operands are packed, when, and what becomes of the sums.

use std::sync::Arc;

use rapt_core::{DType, Error};
use rapt_cpu::gemm::{Gemm, PackedLayout, PackedMatrix};
use rapt_graph::ops::Linear;
use rapt_graph::{Meta, Number, Shapes, ValueId};

use super::place::Place;

/// Products of numbers that are worth a second thread.
const SHARED_WORK: usize = 64 * 1024;

/// The right operand.
#[derive(Clone, Debug)]
pub(in crate::model) enum Weights {
    /// Packed once for all runs.
    Packed(Arc<PackedMatrix>),
    /// Packed in each run, to this buffer.
    EachRun {
        /// Element (k, n) at `k · strides[0] + n · strides[1]`.
        from: Place,
        /// The packed form.
        layout: PackedLayout,
        /// Where it goes.
        to: usize,
    },
    /// Packed in each run, some columns at a time, each while they are in the cache.
    InCache(Box<InCache>),
}

/// A product cut into parts of some columns each, every one of which is packed into scratch memory and multiplied at once.
#[derive(Clone, Debug)]
pub(in crate::model) struct InCache {
    /// Element (k, n) at `k · strides[0] + n · strides[1]`.
    pub(in crate::model) from: Place,
    /// The columns of a part; the last may have fewer.
    pub(in crate::model) columns: usize,
    /// The product of a part, and of the last.
    pub(in crate::model) gemms: [Gemm; 2],
    /// The packed form of a part, and of the last.
    pub(in crate::model) layouts: [PackedLayout; 2],
}

/// Bytes of packed columns that stay in the second cache beside a block of x.
const IN_CACHE: usize = 1 << 19;
/// Columns of a part: as many as one tile of sums has, down to as few as keep each lane of a vector busy.
const PART_COLUMNS: [usize; 4] = [256, 128, 64, 32];
/// Rows beyond which threads share what is packed rather than pack their own columns: there it takes a fiftieth of the time.
const MANY_ROWS: usize = 512;

impl InCache {
    /// The product `[m, n, k]` in parts for `threads` threads; `None` where it is better packed as a whole.
    pub(super) fn new(
        arch: rapt_core::Arch,
        from: &Place,
        [m, n, k]: [usize; 3],
        threads: usize,
    ) -> Result<Option<InCache>, Error> {
        let dtype = from.meta.dtype;
        if n == 0 || (threads > 1 && m > MANY_ROWS) {
            return Ok(None);
        }
        let fits = |columns: &usize| {
            columns.saturating_mul(k).saturating_mul(dtype.size_bytes()) <= IN_CACHE && n.div_ceil(*columns) >= threads
        };
        let least = PART_COLUMNS[PART_COLUMNS.len() - 1];
        let columns = PART_COLUMNS.into_iter().find(fits).unwrap_or(least).min(n);
        let last = n - (n.div_ceil(columns) - 1) * columns;
        let ((whole, whole_layout), (last, last_layout)) =
            (kernels(arch, dtype, [m, columns, k], 1)?, kernels(arch, dtype, [m, last, k], 1)?);
        let (gemms, layouts) = ([whole, last], [whole_layout, last_layout]);
        Ok(Some(InCache { from: from.clone(), columns, gemms, layouts }))
    }

    /// Where the packed columns begin in a thread's scratch memory.
    pub(in crate::model) fn packed_at(&self) -> usize {
        self.gemms.iter().map(Gemm::scratch_bytes).max().unwrap_or(0).next_multiple_of(64)
    }
}

impl Weights {
    /// What is packed in each run.
    pub(super) fn read_in_each_run(&self) -> Option<&Place> {
        match self {
            Weights::Packed(_) => None,
            Weights::EachRun { from, .. } => Some(from),
            Weights::InCache(parts) => Some(&parts.from),
        }
    }

    /// The buffers that a step with this operand reads and writes.
    pub(super) fn uses(&self) -> Vec<usize> {
        let to = if let Weights::EachRun { to, .. } = self { Some(*to) } else { None };
        self.read_in_each_run().map(|from| from.buffer).into_iter().chain(to).collect()
    }
}

/// A product whose sums become operand 0 of a group.
#[derive(Clone, Debug)]
pub(in crate::model) struct Head {
    /// The sizes, cut into items.
    pub(in crate::model) gemm: Gemm,
    /// `[m, k]`; the elements of a row follow one another.
    pub(in crate::model) x: Place,
    /// `[k, n]`.
    pub(in crate::model) weights: Weights,
}

impl Head {
    pub(super) fn reads(&self, buffer: usize) -> bool {
        self.x.buffer == buffer || self.weights.read_in_each_run().is_some_and(|from| from.buffer == buffer)
    }

    /// The scratch memory of one thread, a multiple of 64.
    pub(in crate::model) fn scratch_bytes(&self) -> usize {
        match &self.weights {
            Weights::InCache(parts) => parts.packed_at() + parts.layouts[0].len_bytes().next_multiple_of(64),
            _ => self.gemm.scratch_bytes().next_multiple_of(64),
        }
    }
}

/// A product of a graph in the form that kernels take.
pub(super) struct Form {
    /// `[m, k]`, the elements of a row next to one another where `is_row_major`.
    pub(super) x: Place,
    /// `[k, n]`.
    pub(super) w: Place,
    /// What is added to each sum.
    pub(super) added: Option<ValueId>,
    /// The sizes.
    pub(super) sizes: [usize; 3],
}

/// The product as one of two matrices: floats, `w` of two dimensions, no factors. `None` otherwise.
pub(super) fn form(op: &Linear, place: &dyn Fn(ValueId) -> Option<Place>, shapes: &dyn Shapes) -> Option<Form> {
    let is_one = |factor| {
        matches!(shapes.number(factor), Ok(Number::Int(1)))
            || matches!(shapes.number(factor), Ok(Number::Float(x)) if x == 1.0)
    };
    let (a, b, added, weight) = match *op {
        Linear::Linear { input, weight, bias } => (input, weight, bias, true),
        Linear::Product { a, b, .. } => (a, b, None, false),
        Linear::Add { input, a, b, beta, alpha, .. } if is_one(beta) && is_one(alpha) => (a, b, Some(input), false),
        Linear::Add { .. } | Linear::AddBatches { .. } => return None,
    };
    let (x, mut w) = (place(a)?, place(b)?);
    if !matches!(x.meta.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) || w.meta.rank() != 2 {
        return None;
    }
    if weight {
        w.meta.shape.swap(0, 1);
        w.meta.strides.swap(0, 1);
    }
    let [k, n] = w.meta.shape[..] else { return None };
    let rows: i64 = x.meta.shape.split_last()?.1.iter().product();
    let sizes = [rows, n, k].map(|n| usize::try_from(n).unwrap_or(0));
    let x = x.reshaped(&[rows, k]).unwrap_or(x);
    Some(Form { x, w, added, sizes })
}

impl Form {
    /// Whether the kernels read `x` where it lies.
    pub(super) fn is_row_major(&self) -> bool {
        self.x.meta.rank() == 2 && (self.x.meta.strides[1] == 1 || self.x.meta.shape[1] <= 1)
    }
}

/// Products of the matrices of a batch: nothing is added, and `w` is packed in each run.
#[derive(Clone, Debug)]
pub(in crate::model) struct Batch {
    /// The product of one pair.
    pub(in crate::model) gemm: Gemm,
    /// The packed form of one `w`.
    pub(in crate::model) layout: PackedLayout,
    /// Where the packed matrices go, one after another.
    pub(in crate::model) packed: usize,
    /// `[batch, m, k]`, `[batch, k, n]` and `[batch, m, n]`.
    pub(in crate::model) places: [Place; 3],
}

/// The operands of a product of batches, `[batch, …]` each; `None` where it is not one, or strides do not reach.
pub(super) fn batch(op: &Linear, place: &dyn Fn(ValueId) -> Option<Place>, out: &Place) -> Option<[Place; 3]> {
    let Linear::Product { a, b, .. } = *op else { return None };
    let (a, b) = (place(a)?, place(b)?);
    let rank = out.meta.rank();
    if !matches!(a.meta.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) || rank < 3 {
        return None;
    }
    if a.meta.rank() < 2 || b.meta.rank() < 2 {
        return None;
    }
    let lead = &out.meta.shape[..rank - 2];
    let flat = |place: &Place| {
        let [.., rows, columns] = place.meta.shape[..] else { return None };
        let whole = place.broadcast(&[lead, &[rows, columns]].concat());
        whole.reshaped(&[lead.iter().product(), rows, columns])
    };
    let places = [flat(&a)?, flat(&b)?, flat(out)?];
    let unit = |meta: &Meta| meta.strides[2] == 1 || meta.shape[2] <= 1;
    (unit(&places[0].meta) && unit(&places[2].meta)).then_some(places)
}

/// A product and the packed form of its `w`.
pub(super) fn kernels(
    arch: rapt_core::Arch,
    dtype: DType,
    [m, n, k]: [usize; 3],
    threads: usize,
) -> Result<(Gemm, PackedLayout), Error> {
    let threads = if m.saturating_mul(n).saturating_mul(k) < SHARED_WORK { 1 } else { threads };
    Ok((Gemm::new(arch, dtype, [m, n, k], threads)?, PackedLayout::new(arch, dtype, k, n)?))
}
