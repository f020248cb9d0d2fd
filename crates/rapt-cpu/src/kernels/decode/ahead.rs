//! What decode asks for ahead of reading it.

use crate::kernels::simd::Simd;
use crate::problem::{Input, Problem, Source};

/// What is asked for ahead of being read: the rows of K of a chunk, then those of V.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    /// Where keys lie in pages: what says where, and the first key of the chunk.
    pages: Option<(&'a Problem, (usize, usize, usize))>,
    k: *const u8,
    v: *const u8,
    /// Bytes from row to row, and of a row.
    k_step: isize,
    v_step: isize,
    k_bytes: usize,
    v_bytes: usize,
    /// Keys of the chunk, and how many of them lie between a row that is read and the row that is asked for; 0: none is.
    n: usize,
    keys: usize,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    pub(super) fn new(problem: &'a Problem, (batch, head, j0): (usize, usize, usize), n: usize) -> Self {
        let row_bytes = |input: &Input<4>, dim: usize, source: &Option<Source>| {
            let elements = dim.div_ceil(source.as_ref().map_or(1, |source| source.shared));
            if input.strides[3] == 1 { elements * input.size as usize } else { 0 }
        };
        let k_bytes = row_bytes(&problem.k, problem.head_dim, &problem.sources.k);
        let v_bytes = row_bytes(&problem.v, problem.head_dim_v, &problem.sources.v);
        Ahead {
            pages: problem.k.pages.is_some().then_some((problem, (batch, head, j0))),
            k: problem.k.at([batch, head, j0, 0]),
            v: problem.v.at([batch, head, j0, 0]),
            k_step: problem.k.strides[2] * problem.k.size,
            v_step: problem.v.strides[2] * problem.v.size,
            k_bytes,
            v_bytes,
            n,
            keys: problem.partition.ahead_bytes.div_ceil(k_bytes.max(v_bytes).max(1)),
        }
    }

    /// Asks for what follows keys `j..j + taken` of K, which are about to be read.
    #[inline(always)]
    pub(super) unsafe fn of_keys<S: Simd>(&self, j: usize, taken: usize) {
        if self.keys > 0 {
            let (from, to) = (j + self.keys, j + self.keys + taken);
            self.rows_of::<S>(false, (from, to.min(self.n)));
            // Behind the last key of the chunk come its first values.
            self.rows_of::<S>(true, (from.saturating_sub(self.n), to.saturating_sub(self.n).min(self.n)));
        }
    }

    /// As above for V.
    #[inline(always)]
    pub(super) unsafe fn of_values<S: Simd>(&self, j: usize, taken: usize) {
        if self.keys > 0 {
            let (from, to) = (j + self.keys, j + self.keys + taken);
            self.rows_of::<S>(true, (from, to.min(self.n)));
        }
    }

    /// Asks for rows `from..to` of the chunk, of K or of V.
    #[inline(always)]
    fn rows_of<S: Simd>(&self, of_v: bool, (from, to): (usize, usize)) {
        let (first, step, bytes) =
            if of_v { (self.v, self.v_step, self.v_bytes) } else { (self.k, self.k_step, self.k_bytes) };
        let Some((problem, (batch, head, j0))) = self.pages else {
            return rows::<S>(first, step, bytes, (from, to));
        };
        let input = if of_v { &problem.v } else { &problem.k };
        for (at, len) in input.runs(j0 + from, to.saturating_sub(from)) {
            rows::<S>(input.at_key([batch, head, j0 + from + at, 0]), step, bytes, (0, len));
        }
    }
}

/// Asks for rows `from..to`, of `bytes` each, `step` bytes from one to the next.
#[inline(always)]
fn rows<S: Simd>(first: *const u8, step: isize, bytes: usize, (from, to): (usize, usize)) {
    if step == bytes as isize {
        let (at, end) = (from * bytes, to * bytes);
        fetch::<S>(first.wrapping_add(at), end.saturating_sub(at));
        return;
    }
    for j in from..to {
        fetch::<S>(first.wrapping_offset(j as isize * step), bytes);
    }
}

/// Asks for `bytes` from `row` on.
#[inline(always)]
fn fetch<S: Simd>(row: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(64) {
        // SAFETY: of an entry point's instruction set; nothing is read.
        unsafe { S::prefetch(row.wrapping_add(at)) };
    }
}
