//! Do two sets of strided addresses meet? An exact bounded search.
//!
//! The addresses of a tensor are `base + Σ i_k · s_k` with `0 ≤ i_k < n_k`. Two questions are asked of them:
//! *injective*: is there a non-zero `d`, `|d_k| < n_k`, with `Σ d_k · s_k = 0`? *disjoint*: do two tensors have byte
//! addresses in common, `Σ i_k · s_k + x − Σ j_l · t_l − y = base_b − base_a`, `x`, `y` running over the bytes of an
//! element? Both are sums over intervals that must hit a target. Terms are visited by falling stride; what the smaller
//! terms can still reach bounds the choice at each, so ordinary layouts need a handful of steps. The search is bounded:
//! undecided is an answer, and the caller treats it as an error. Deliberately absent: any guess.

use crate::{MAX_RANK, Shape, Strides};

/// Steps after which a search gives up.
pub(crate) const STEPS: usize = 100_000;

/// An answer, and what it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Whether it holds; `None`: undecided within [`STEPS`].
    pub(crate) holds: Option<bool>,
    /// Steps of the search; 0 where bounds or nesting strides told at once.
    pub(crate) steps: usize,
}

impl Decision {
    const fn at_once(holds: bool) -> Self {
        Decision { holds: Some(holds), steps: 0 }
    }

    /// What holds is that the search finds nothing.
    fn by_absence(mut search: Search, target: i128, nonzero: bool) -> Self {
        let holds = search.hits(0, target, nonzero).map(|hit| !hit);
        Decision { holds, steps: search.steps.min(STEPS) }
    }
}

/// One term `i · stride` with `lo ≤ i ≤ hi`.
#[derive(Clone, Copy, Debug)]
struct Term {
    stride: i128,
    lo: i128,
    hi: i128,
}

/// The terms of one search, and what the terms from `k` on can reach together.
struct Search {
    terms: Vec<Term>,
    reach: Vec<(i128, i128)>,
    gcds: Vec<i128>,
    steps: usize,
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Search {
    /// `terms` sorted by falling stride, strides positive.
    fn new(terms: Vec<Term>) -> Self {
        let mut reach = vec![(0, 0); terms.len() + 1];
        let mut gcds = vec![0; terms.len() + 1];
        for (k, term) in terms.iter().enumerate().rev() {
            reach[k] = (reach[k + 1].0 + term.stride * term.lo, reach[k + 1].1 + term.stride * term.hi);
            gcds[k] = gcd(term.stride, gcds[k + 1]);
        }
        Search { terms, reach, gcds, steps: 0 }
    }

    /// Can the terms from `k` on sum to `target`? With `nonzero`, not by all zeros. `None`: undecided.
    fn hits(&mut self, k: usize, target: i128, nonzero: bool) -> Option<bool> {
        self.steps += 1;
        if self.steps > STEPS {
            return None;
        }
        let Some(&Term { stride, lo, hi }) = self.terms.get(k) else {
            return Some(target == 0 && !nonzero);
        };
        let (reach_lo, reach_hi) = self.reach[k];
        if target < reach_lo || target > reach_hi || target % self.gcds[k] != 0 {
            return Some(false);
        }
        // stride · i must leave a rest that the later terms can reach.
        let (rest_lo, rest_hi) = self.reach[k + 1];
        let first = lo.max(-((rest_hi - target).div_euclid(stride)));
        let last = hi.min((target - rest_lo).div_euclid(stride));
        for i in first..=last {
            match self.hits(k + 1, target - stride * i, nonzero && i == 0) {
                Some(false) => {}
                found => return found,
            }
        }
        Some(false)
    }
}

fn sort_by_falling_stride(terms: &mut [Term]) {
    terms.sort_by_key(|term| -term.stride);
}

/// Folds terms together where the sum of two is again one interval: equal strides, and a stride that is a multiple of a
/// smaller one whose interval leaves no gap. The set of sums is unchanged.
fn fold(mut terms: Vec<Term>) -> Vec<Term> {
    terms.retain(|term| term.lo != 0 || term.hi != 0);
    sort_by_falling_stride(&mut terms);
    let mut folded: Vec<Term> = Vec::with_capacity(terms.len());
    while let Some(term) = terms.pop() {
        match folded.last_mut() {
            Some(small) if term.stride % small.stride == 0 && small.hi - small.lo + 1 >= term.stride / small.stride => {
                let times = term.stride / small.stride;
                small.lo += times * term.lo;
                small.hi += times * term.hi;
            }
            _ => folded.push(term),
        }
    }
    folded.reverse();
    folded
}

/// Whether each stride steps past all that smaller strides reach: the ordinary case, decided without a search.
fn nests(shape: &Shape, strides: &Strides) -> bool {
    let mut dims = [(0u128, 0u128); MAX_RANK];
    let mut len = 0;
    for (&n, &stride) in shape.iter().zip(strides.iter()).filter(|(n, _)| **n > 1) {
        dims[len] = (stride.unsigned_abs() as u128, n as u128 - 1);
        len += 1;
    }
    dims[..len].sort_unstable();
    let mut span = 0;
    dims[..len].iter().all(|&(stride, last)| {
        let steps_past = stride > span;
        span += stride * last;
        steps_past
    })
}

/// Whether `shape` and `strides` name every address once.
pub(crate) fn is_injective(shape: &Shape, strides: &Strides) -> Decision {
    if shape.contains(&0) || nests(shape, strides) {
        return Decision::at_once(true);
    }
    let mut terms = Vec::with_capacity(shape.len());
    for (&n, &stride) in shape.iter().zip(strides.iter()) {
        if n > 1 {
            if stride == 0 {
                return Decision::at_once(false);
            }
            let last = n as i128 - 1;
            terms.push(Term { stride: (stride as i128).abs(), lo: -last, hi: last });
        }
    }
    sort_by_falling_stride(&mut terms);
    Decision::by_absence(Search::new(terms), 0, true)
}

/// A strided set of elements, for [`are_disjoint`].
pub(crate) struct Footprint<'a> {
    pub(crate) address: usize,
    pub(crate) size_bytes: usize,
    pub(crate) shape: &'a Shape,
    pub(crate) strides: &'a Strides,
}

impl Footprint<'_> {
    /// The least run of bytes that holds this set: `lo..hi`.
    fn bounds(&self) -> (i128, i128) {
        let (mut lo, mut hi) = (self.address as i128, self.address as i128 + self.size_bytes as i128);
        for (&n, &stride) in self.shape.iter().zip(self.strides.iter()) {
            let span = (n as i128 - 1) * stride as i128 * self.size_bytes as i128;
            lo += span.min(0);
            hi += span.max(0);
        }
        (lo, hi)
    }

    /// The byte offsets of this set, each times `sign`.
    fn push_terms(&self, sign: i128, terms: &mut Vec<Term>) {
        let mut push = |stride: i128, n: usize| {
            let last = n as i128 - 1;
            match (stride * sign).signum() {
                1 => terms.push(Term { stride: stride.abs(), lo: 0, hi: last }),
                -1 => terms.push(Term { stride: stride.abs(), lo: -last, hi: 0 }),
                _ => {}
            }
        };
        for (&n, &stride) in self.shape.iter().zip(self.strides.iter()) {
            push(stride as i128 * self.size_bytes as i128, n);
        }
        push(1, self.size_bytes);
    }
}

/// Whether two sets of elements have no byte in common.
pub(crate) fn are_disjoint(a: &Footprint<'_>, b: &Footprint<'_>) -> Decision {
    if a.shape.contains(&0) || b.shape.contains(&0) {
        return Decision::at_once(true);
    }
    let ((a_lo, a_hi), (b_lo, b_hi)) = (a.bounds(), b.bounds());
    if a_hi <= b_lo || b_hi <= a_lo {
        return Decision::at_once(true);
    }
    let mut terms = Vec::new();
    a.push_terms(1, &mut terms);
    b.push_terms(-1, &mut terms);
    Decision::by_absence(Search::new(fold(terms)), b.address as i128 - a.address as i128, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dims;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn addresses(base: usize, size: usize, shape: &[usize], strides: &[isize]) -> Vec<i64> {
        let mut all = vec![base as i64];
        for (&n, &stride) in shape.iter().zip(strides) {
            all = all.iter().flat_map(|a| (0..n as i64).map(move |i| a + i * stride as i64 * size as i64)).collect();
        }
        all
    }

    fn dims<T: Copy + Default>(slice: &[T]) -> Dims<T> {
        Dims::new(slice).unwrap()
    }

    proptest! {
        #[test]
        fn injective_as_by_enumeration(shape in prop::collection::vec(0usize..5, 0..4), seed in prop::collection::vec(-9isize..10, 4)) {
            let strides = &seed[..shape.len()];
            let all = addresses(0, 1, &shape, strides);
            let unique: HashSet<_> = all.iter().collect();
            prop_assert_eq!(is_injective(&dims(&shape), &dims(strides)).holds, Some(unique.len() == all.len()));
        }

        #[test]
        fn disjoint_as_by_enumeration(
            shape_a in prop::collection::vec(1usize..5, 0..4), shape_b in prop::collection::vec(1usize..5, 0..4),
            seed in prop::collection::vec(-9isize..10, 8), base in 400usize..600, sizes in (0usize..3, 0usize..3),
        ) {
            let (size_a, size_b) = (1 << sizes.0, 1 << sizes.1);
            let (strides_a, strides_b) = (&seed[..shape_a.len()], &seed[4..4 + shape_b.len()]);
            let bytes = |base, size, shape: &[usize], strides: &[isize]| -> HashSet<i64> {
                addresses(base, size, shape, strides).iter().flat_map(|a| (0..size as i64).map(move |x| a + x)).collect()
            };
            let a = bytes(500, size_a, &shape_a, strides_a);
            let b = bytes(base, size_b, &shape_b, strides_b);
            let got = are_disjoint(
                &Footprint { address: 500, size_bytes: size_a, shape: &dims(&shape_a), strides: &dims(strides_a) },
                &Footprint { address: base, size_bytes: size_b, shape: &dims(&shape_b), strides: &dims(strides_b) },
            );
            prop_assert_eq!(got.holds, Some(a.is_disjoint(&b)));
        }
    }

    #[test]
    fn interleaved_slices_of_a_large_tensor_are_disjoint_in_few_steps() {
        let shape = dims(&[64usize, 16, 4096, 64]);
        let strides = dims(&[16 * 4096 * 128isize, 4096 * 128, 128, 2]);
        let at = |address| Footprint { address, size_bytes: 4, shape: &shape, strides: &strides };
        let apart = are_disjoint(&at(4096), &at(4100));
        assert!(apart.holds == Some(true) && (1..100).contains(&apart.steps), "{apart:?}");
        assert_eq!(are_disjoint(&at(4096), &at(4104)).holds, Some(false));
        assert_eq!(is_injective(&shape, &strides), Decision::at_once(true));
        let repeated = dims(&[16 * 4096 * 128isize, 4096 * 128, 0, 2]);
        assert_eq!(is_injective(&shape, &repeated), Decision::at_once(false));
    }

    #[test]
    fn an_entangled_search_gives_up() {
        // Strides that are near-equal large primes: the search cannot prune early.
        let shape = dims(&[100_000usize, 100_000, 100_000, 100_000]);
        let strides = dims(&[1_000_003isize, 1_000_033, 1_000_037, 1_000_039]);
        assert_ne!(is_injective(&shape, &strides).holds, Some(true));
    }
}
