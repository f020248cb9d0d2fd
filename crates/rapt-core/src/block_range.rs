//! Which keys a run of queries may see: the one place where causal and window arithmetic is done.
//!
//! With `d = kv_len − q_len` if causal is bottom-right, else 0, query `i` sees the keys
//! `max(0, i + d − left) ≤ j ≤ min(kv_len − 1, i + d [causal], i + d + right)`.

use crate::{Causal, Window};

/// The position rule of one problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    kv_len: i64,
    /// `d`: what is added to a query's index to reach the diagonal.
    pub diagonal: i64,
    /// Least `j − (i + d)` that is seen; `i64::MIN` if unbounded.
    first: i64,
    /// Greatest `j − (i + d)` that is seen; `i64::MAX` if unbounded.
    last: i64,
}

/// How a rectangle of queries and keys is covered by the position rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// No query sees any key.
    Empty,
    /// Every query sees every key.
    Full,
    /// Anything else.
    Mixed,
}

impl BlockRange {
    /// The rule for these lengths. Lengths are below 2^62 (checked by [`Spec`](crate::Spec)).
    #[inline]
    #[must_use]
    pub fn new(q_len: usize, kv_len: usize, causal: Option<Causal>, window: Window) -> Self {
        let clamp = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let (q_len, kv_len) = (clamp(q_len), clamp(kv_len));
        let diagonal = if causal == Some(Causal::BottomRight) { kv_len - q_len } else { 0 };
        let right = window.right.map_or(i64::MAX, clamp);
        BlockRange {
            kv_len,
            diagonal,
            first: window.left.map_or(i64::MIN, |left| -clamp(left)),
            last: if causal.is_some() { right.min(0) } else { right },
        }
    }

    /// What is added to a query's index, and the result clamped to `0..=kv_len`, to reach the first key that it sees and
    /// the one past the last. Both lie within ±2^62, so that the sum with an index does not overflow.
    #[must_use]
    pub fn shifts(&self) -> (i64, i64) {
        let bound = |shift: i64| shift.clamp(-(1 << 62), 1 << 62);
        let past = self.last.saturating_add(1);
        (bound(self.diagonal.saturating_add(self.first)), bound(self.diagonal.saturating_add(past)))
    }

    /// Whether every query sees every key, whatever the lengths.
    #[must_use]
    pub fn is_unbounded(&self) -> bool {
        self.first == i64::MIN && self.last == i64::MAX
    }

    /// The keys `lo..hi` that query `i` sees; `lo == hi` if none.
    #[inline]
    #[must_use]
    pub fn keys_of(&self, i: usize) -> (usize, usize) {
        self.keys_of_run(i, i + 1)
    }

    /// The smallest `lo..hi` that holds every key seen by any of the queries `i0..i1`; `lo == hi` if none.
    #[inline]
    #[must_use]
    pub fn keys_of_run(&self, i0: usize, i1: usize) -> (usize, usize) {
        debug_assert!(i0 < i1);
        let lo = (i0 as i64 + self.diagonal).saturating_add(self.first).clamp(0, self.kv_len);
        let hi = (i1 as i64 + self.diagonal).saturating_add(self.last).clamp(0, self.kv_len);
        // lo and hi lie in 0..=kv_len, which came from a usize.
        if lo < hi { (lo as usize, hi as usize) } else { (lo as usize, lo as usize) }
    }

    /// How queries `i0..i1` and keys `j0..j1` meet the rule. Keys at or past `kv_len` are never seen.
    #[must_use]
    pub fn tile(&self, i0: usize, i1: usize, j0: usize, j1: usize) -> Tile {
        let (lo, hi) = self.keys_of_run(i0, i1);
        if lo.max(j0) >= hi.min(j1) {
            return Tile::Empty;
        }
        // Both bounds rise with i: the last query bounds from below, the first from above.
        let (first_lo, first_hi) = self.keys_of(i0);
        let (last_lo, last_hi) = self.keys_of(i1 - 1);
        if first_lo.max(last_lo) <= j0 && j1 <= first_hi.min(last_hi) { Tile::Full } else { Tile::Mixed }
    }

    /// The number of (query, key) pairs seen by queries `0..q_len`, at most `u64::MAX`.
    #[must_use]
    pub fn pairs(&self, q_len: usize) -> u64 {
        // first ≤ 0 ≤ last, or −left ≤ 0: each query's hi is no less than its lo, and the sums can be told apart.
        let (n, len, d) = (q_len as i128, i128::from(self.kv_len), i128::from(self.diagonal));
        let hi = if self.last == i64::MAX { n * len } else { sum_clamped(d + i128::from(self.last) + 1, len, n) };
        let lo = if self.first == i64::MIN { 0 } else { sum_clamped(d + i128::from(self.first), len, n) };
        u64::try_from(hi - lo).unwrap_or(u64::MAX)
    }
}

/// `Σ clamp(i + c, 0, len)` over `i` in `0..n`.
fn sum_clamped(c: i128, len: i128, n: i128) -> i128 {
    let rises = (-c).clamp(0, n);
    let tops = (len - c).clamp(rises, n);
    let count = tops - rises;
    // The terms rises + c .. tops + c, an arithmetic series, then the constant len.
    count * (rises + tops - 1 + 2 * c) / 2 + (n - tops) * len
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sees(q_len: usize, kv_len: usize, causal: Option<Causal>, window: Window, i: usize, j: usize) -> bool {
        let d = if causal == Some(Causal::BottomRight) { kv_len as i64 - q_len as i64 } else { 0 };
        let distance = i128::from(j as i64 - (i as i64 + d));
        (causal.is_none() || distance <= 0)
            && window.left.is_none_or(|left| -distance <= left as i128)
            && window.right.is_none_or(|right| distance <= right as i128)
    }

    #[test]
    fn every_small_problem_agrees_with_the_rule_read_pair_by_pair() {
        let ends = [None, Some(0), Some(1), Some(3), Some(usize::MAX)];
        for (q_len, kv_len) in [(1, 1), (1, 7), (7, 1), (4, 4), (3, 6), (6, 3), (5, 0)] {
            for causal in [None, Some(Causal::TopLeft), Some(Causal::BottomRight)] {
                for (left, right) in ends.iter().flat_map(|l| ends.iter().map(move |r| (*l, *r))) {
                    let window = Window { left, right };
                    let range = BlockRange::new(q_len, kv_len, causal, window);
                    let sees = |i, j| sees(q_len, kv_len, causal, window, i, j);
                    let (lo_shift, hi_shift) = range.shifts();
                    for i0 in 0..q_len {
                        let at = |shift: i64| (i0 as i64 + shift).clamp(0, kv_len as i64) as usize;
                        let (lo, hi) = (at(lo_shift), at(hi_shift));
                        let row: Vec<usize> = (0..kv_len).filter(|&j| sees(i0, j)).collect();
                        assert_eq!(row, (lo..hi).collect::<Vec<_>>(), "{range:?} row {i0} by shifts");
                        let (lo, hi) = range.keys_of(i0);
                        assert_eq!(row, (lo..hi).collect::<Vec<_>>(), "{range:?} row {i0}");
                        for i1 in i0 + 1..=q_len {
                            for (j0, j1) in (0..kv_len).flat_map(|j0| (j0 + 1..=kv_len).map(move |j1| (j0, j1))) {
                                let pairs = (i0..i1).flat_map(|i| (j0..j1).map(move |j| (i, j)));
                                let seen = pairs.clone().filter(|&(i, j)| sees(i, j)).count();
                                let expect = match seen {
                                    0 => Tile::Empty,
                                    n if n == pairs.count() => Tile::Full,
                                    _ => Tile::Mixed,
                                };
                                // A run whose rows see disjoint keys may call a hole Mixed: harmless, never the reverse.
                                let got = range.tile(i0, i1, j0, j1);
                                assert!(got == expect || (got == Tile::Mixed && expect == Tile::Empty), "{range:?}");
                            }
                        }
                    }
                    let count = (0..q_len).map(|i| (0..kv_len).filter(|&j| sees(i, j)).count() as u64).sum::<u64>();
                    assert_eq!(range.pairs(q_len), count);
                }
            }
        }
    }
}
