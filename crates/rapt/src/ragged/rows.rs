//! Which rows of packed tensors are those of each sequence, and the parts of a tensor that follow from it.

use std::ops::Range;

use rapt_core::{Error, Result, ViewMut, split};

/// Which rows of packed tensors are those of each sequence, wherever they lie.
///
/// Queries lie in the order of their sequences and are no two sequences' own. Keys and values may be shared, but for gradients by them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceRows {
    /// Its queries.
    pub q: Vec<Range<usize>>,
    /// Its keys.
    pub k: Vec<Range<usize>>,
    /// Its values, as many as its keys.
    pub v: Vec<Range<usize>>,
}

impl SequenceRows {
    /// How many sequences there are.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.q.len()
    }

    /// That these are rows of tensors that have so many.
    pub(super) fn check(&self, [of_q, of_k, of_v]: [usize; 3]) -> Result<()> {
        let SequenceRows { q, k, v } = self;
        for (tensor, ranges, rows) in [("rows of q", q, of_q), ("rows of k", k, of_k), ("rows of v", v, of_v)] {
            if ranges.len() != q.len() {
                let (got, expected) = (ranges.len(), q.len());
                return Err(Error::SizeMismatch { tensor, size: "sequences", got, other: "rows of q", expected });
            }
            if let Some(range) = ranges.iter().find(|range| range.start > range.end || range.end > rows) {
                let allowed = format!("rows 0 to {rows}, none before the first of its sequence");
                return Err(Error::Option { option: tensor, got: format!("{range:?}"), allowed });
            }
        }
        if let Some((k, v)) = k.iter().zip(v).find(|(k, v)| k.len() != v.len()) {
            let (got, expected) = (v.len(), k.len());
            return Err(Error::SizeMismatch { tensor: "v", size: "rows of a sequence", got, other: "k", expected });
        }
        if is_in_order(q) {
            return Ok(());
        }
        let allowed = "rows of no other sequence, in the order of sequences: their outputs would be one another's";
        Err(Error::Option { option: "rows of q", got: format!("{q:?}"), allowed: allowed.to_owned() })
    }
}

/// Whether no range begins before the one before it has ended.
pub(super) fn is_in_order(ranges: &[Range<usize>]) -> bool {
    ranges.windows(2).all(|pair| pair[0].end <= pair[1].start)
}

/// An output of all sequences: the part of each, and the rows of none.
pub(super) struct Parts<'a> {
    pub(super) own: Vec<ViewMut<'a>>,
    pub(super) gaps: Vec<ViewMut<'a>>,
}

impl<'a> Parts<'a> {
    /// Those of `out`, whose dimension `dim` is rows.
    ///
    /// # Errors
    /// As [`split`]; [`Error::Unsupported`] for ranges out of their order.
    pub(super) fn of(tensor: &'static str, out: ViewMut<'a>, dim: usize, ranges: &[Range<usize>]) -> Result<Self> {
        if !is_in_order(ranges) {
            return Err(Error::unsupported(
                format!("{tensor} of rows that sequences share, or that lie out of their order"),
                "each row is written by one sequence",
                format!("give {tensor} to a call for each sequence, and sum them"),
            ));
        }
        let rows = out.shape()[dim];
        let (mut all, mut is_own, mut at) = (Vec::with_capacity(ranges.len()), Vec::with_capacity(ranges.len()), 0);
        for (range, own) in ranges.iter().map(|range| (range.clone(), true)).chain([(rows..rows, false)]) {
            if at < range.start {
                all.push(at..range.start);
                is_own.push(false);
            }
            at = range.end;
            if own {
                all.push(range);
                is_own.push(true);
            }
        }
        let (own, gaps): (Vec<_>, Vec<_>) =
            split(tensor, out, dim, &all)?.into_iter().zip(is_own).partition(|(_, own)| *own);
        let views = |parts: Vec<(ViewMut<'a>, bool)>| parts.into_iter().map(|(view, _)| view).collect();
        Ok(Parts { own: views(own), gaps: views(gaps) })
    }
}
