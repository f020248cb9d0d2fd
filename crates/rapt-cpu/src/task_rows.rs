//! The rows of a task: the queries of its heads, one head after another, and which keys they see.

use rapt_core::{BlockRange, Tile};

/// A query of a task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) i: usize,
}

/// Row `r` is query `r % q_len` of the task's head `r / q_len`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TaskRows {
    pub(crate) q_len: usize,
    pub(crate) range: BlockRange,
}

impl TaskRows {
    /// The query behind row `r` of a task that begins with this batch and head.
    #[inline(always)]
    pub(crate) fn row(&self, (batch, head): (usize, usize), r: usize) -> Row {
        if r < self.q_len {
            Row { batch, head, i: r }
        } else {
            Row { batch, head: head + r / self.q_len, i: r % self.q_len }
        }
    }

    /// The runs of consecutive queries of one head among rows `r0..r1`: first row, and queries `i0..i1`.
    fn runs(&self, r0: usize, r1: usize) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let (mut r, q_len) = (r0, self.q_len);
        std::iter::from_fn(move || {
            if r >= r1 {
                return None;
            }
            let i0 = r % q_len;
            let i1 = q_len.min(i0 + (r1 - r));
            let run = (r, i0, i1);
            r += i1 - i0;
            Some(run)
        })
    }

    /// The first query of each of these runs in a task that begins with this batch and head, and how many queries it has.
    pub(crate) fn runs_of(
        self,
        origin: (usize, usize),
        (r0, r1): (usize, usize),
    ) -> impl Iterator<Item = (Row, usize)> {
        self.runs(r0, r1).map(move |(r, i0, i1)| (self.row(origin, r), i1 - i0))
    }

    /// The smallest run of keys that holds every key seen by rows `r0..r1`.
    pub(crate) fn keys_of_rows(&self, r0: usize, r1: usize) -> (usize, usize) {
        let ranges = self.runs(r0, r1).map(|(_, i0, i1)| self.range.keys_of_run(i0, i1));
        let seen = ranges.filter(|(lo, hi)| lo < hi);
        seen.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0))
    }

    /// Whether rows `r0..r1` see every key of `j0..j1` as far as positions go.
    pub(crate) fn sees_all(&self, r0: usize, r1: usize, j0: usize, j1: usize) -> bool {
        self.range.is_unbounded() || self.runs(r0, r1).all(|(_, i0, i1)| self.range.tile(i0, i1, j0, j1) == Tile::Full)
    }
}
