//! What becomes of a tile's scores between the two products of forward: modifications, biases, positions, and softmax.
//!
//! ```text
//! x = modify(S)   m' = max(m, x)   l = l · 2^(m − m') + Σ p   p = 2^(x − m')      answers 2^(m − m'), which O is rescaled with
//! x = modify(S) + log2(f)          l = l · 2^(m − m') + Σ p / f                    where p also carries the factor f of its key of V
//! ```
//! So the greatest of the terms p · f that a row sums is exact when p is rounded, as the greatest p is without factors.
//! Deliberately absent: which of it a step of `forward` needs, and masks read from memory (`mask`).

use std::marker::PhantomData;

use super::blocks::{Beside, BlockProducts};
use super::simd::{Part, Real, Simd};
use super::softmax::{Modifier, max_skipping_nan, probability_by, rescale, subtractable};
use crate::problem::{Problem, Row, Scores};

/// The most lanes of a tile: two vectors of 16.
pub(super) const MAX_QUERIES: usize = 32;

/// Maxima of a row that are found side by side.
const MAX_CHAINS: usize = 4;

/// What is known of the rows of a tile so far.
#[derive(Clone, Copy)]
pub(super) struct RowState<E> {
    pub(super) row_max: *mut E,
    pub(super) row_sum: *mut E,
}

/// What [`Modify`] does where biases are all there is to do, bit for bit.
pub(super) struct AddBiases<'a, S: Simd, const V: usize> {
    pub(super) scores: &'a Scores,
    pub(super) n: usize,
    pub(super) x: *mut S::Elem,
    pub(super) bias: *const S::Elem,
}

impl<S: Simd, const V: usize> Part<S> for AddBiases<'_, S, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let AddBiases { scores, n, x, bias } = self;
        // SAFETY: x and bias have n rows of V vectors.
        unsafe {
            let modifier = Modifier::<S>::new(scores);
            if scores.natural {
                for at in (0..n * V).map(|at| at * S::LANES) {
                    S::store(x.add(at), modifier.scale_and_add(S::load(x.add(at)), S::load(bias.add(at))));
                }
            } else {
                for at in (0..n * V).map(|at| at * S::LANES) {
                    S::store(x.add(at), Modifier::<S>::mask(S::load(x.add(at)), S::load(bias.add(at))));
                }
            }
        }
    }
}

/// The rows `r0..r1` of a task.
pub(super) fn tile_rows(problem: &Problem, origin: (usize, usize), (r0, r1): (usize, usize)) -> [Row; MAX_QUERIES] {
    let mut rows = [Row { batch: 0, head: 0, i: 0 }; MAX_QUERIES];
    for (lane, row) in rows.iter_mut().enumerate().take(r1 - r0) {
        *row = problem.row(origin, r0 + lane);
    }
    rows
}

/// Where the rows of a tile stand among keys `j0..j0 + n`: from which key on and up to which each sees them, where its own position is, and
/// its slope. Relative to j0: exact up to 2^24 in f32, beyond that a distance is rounded like any other number.
pub(super) struct Positions<E> {
    masks: bool,
    has_slopes: bool,
    lo: [E; MAX_QUERIES],
    hi: [E; MAX_QUERIES],
    diagonal: [E; MAX_QUERIES],
    slope: [E; MAX_QUERIES],
}

impl<E: Real> Positions<E> {
    /// `masks` where some row does not see every key.
    #[inline(always)]
    pub(super) fn new(problem: &Problem, rows: &[Row], (j0, n): (usize, usize), masks: bool) -> Self {
        let (zero, has_slopes) = (E::ZERO, problem.alibi_slopes.is_some());
        let (lo, hi) = ([zero; MAX_QUERIES], [E::from_i64(n as i64); MAX_QUERIES]);
        let (diagonal, slope) = ([zero; MAX_QUERIES], [zero; MAX_QUERIES]);
        let mut at = Positions { masks, has_slopes, lo, hi, diagonal, slope };
        for (lane, row) in rows.iter().enumerate() {
            if masks {
                let (first, last) = problem.range.keys_of(row.i);
                at.lo[lane] = E::from_i64(first.clamp(j0, j0 + n) as i64 - j0 as i64);
                at.hi[lane] = E::from_i64(last.clamp(j0, j0 + n) as i64 - j0 as i64);
            }
            if let Some(slopes) = &problem.alibi_slopes {
                at.diagonal[lane] = E::from_i64(row.i as i64 + problem.range.diagonal - j0 as i64);
                // SAFETY: one slope per head of q.
                at.slope[lane] = unsafe { E::load_as(slopes.dtype, slopes.at([row.head])) };
            }
        }
        at
    }

    /// The rows of a vector from lane `v` on.
    #[inline(always)]
    pub(super) unsafe fn lanes<S: Simd<Elem = E>>(&self, v: usize) -> LanePositions<S> {
        let load = |of: &[E; MAX_QUERIES]| of.as_ptr().wrapping_add(v);
        let of = [load(&self.lo), load(&self.hi), load(&self.diagonal), load(&self.slope)];
        // SAFETY: the arrays have at least as many elements as a tile has queries.
        unsafe {
            LanePositions {
                range: if self.masks { Some([S::load(of[0]), S::load(of[1])]) } else { None },
                slope: if self.has_slopes { Some([S::load(of[2]), S::load(of[3])]) } else { None },
            }
        }
    }
}

/// [`Positions`] of one vector of rows.
pub(super) struct LanePositions<S: Simd> {
    range: Option<[S::V; 2]>,
    /// Each row's own position, and its slope.
    slope: Option<[S::V; 2]>,
}

impl<S: Simd> LanePositions<S> {
    /// A product with key `j` to a score: modified, with the bias there, −∞ where the row does not see the key.
    #[inline(always)]
    pub(super) unsafe fn modified(
        &self,
        modifier: &Modifier<S>,
        x: S::V,
        j: usize,
        bias: Option<*const S::Elem>,
    ) -> S::V {
        // SAFETY: the caller vouches for a vector of biases.
        unsafe {
            let key = S::splat(S::Elem::from_i64(j as i64));
            let mut distance = None;
            if let Some([diagonal, slope]) = self.slope {
                distance = Some((slope, S::abs(S::sub(diagonal, key))));
            }
            let mut score = modifier.apply(x, distance);
            if let Some(bias) = bias {
                score = modifier.add_bias(score, S::load(bias));
            }
            if let Some([lo, hi]) = self.range {
                let masked = S::splat(S::Elem::NEG_INFINITY);
                score = S::select(S::lt(key, hi), S::select(S::lt(key, lo), masked, score), masked);
            }
            score
        }
    }
}

/// Score modifications, biases and position masks on a block of raw products.
pub(super) struct Modify<'a, S: Simd, const V: usize> {
    pub(super) problem: &'a Problem,
    pub(super) rows: &'a [Row],
    /// The first key, and how many there are.
    pub(super) keys: (usize, usize),
    pub(super) x: *mut S::Elem,
    pub(super) bias: Option<*const S::Elem>,
    /// Whether some row does not see every key.
    pub(super) positions: bool,
}

impl<S: Simd, const V: usize> Part<S> for Modify<'_, S, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Modify { problem, rows, keys: (j0, n), x, bias, positions } = self;
        let queries = V * S::LANES;
        let at = Positions::<S::Elem>::new(problem, rows, (j0, n), positions);
        // SAFETY: x and bias have n rows of `queries`; the arrays have at least `queries` elements.
        unsafe {
            let modifier = Modifier::<S>::new(&problem.scores);
            for v in (0..queries).step_by(S::LANES) {
                let lanes = at.lanes::<S>(v);
                for j in 0..n {
                    let to = x.add(j * queries + v);
                    let bias = bias.map(|bias| bias.add(j * queries + v));
                    S::store(to, lanes.modified(&modifier, S::load(to), j, bias));
                }
            }
        }
    }
}

/// Instructions that a score costs in the search for the maximum, and as a weight.
const MAX_PART: usize = 1;
const WEIGHT_PART: usize = 18;

/// Raises the maxima, rescales the sums, and turns scores into lanes of probabilities. Answers what O is to be
/// rescaled with: where no maximum rose, 1.
pub(super) struct Softmax<'a, S: Simd, M, B, const V: usize, const MASKED: bool, const FACTORS: bool> {
    pub(super) problem: &'a Problem,
    pub(super) state: RowState<S::Elem>,
    pub(super) acc_o: *mut S::Elem,
    pub(super) n: usize,
    pub(super) x: *mut S::Elem,
    /// Where weights go: over scores, of which as many were read, or elsewhere.
    pub(super) p: *mut S::Elem,
    /// Of keys whose factors go into weights: what is added to their scores, and the inverses of the factors.
    pub(super) codes: Option<(*const S::Elem, *const S::Elem)>,
    pub(super) beside: &'a mut B,
    pub(super) products: PhantomData<M>,
}

impl<S: Simd, M: BlockProducts<S>, B: Beside, const V: usize, const MASKED: bool, const FACTORS: bool> Part<S>
    for Softmax<'_, S, M, B, V, MASKED, FACTORS>
{
    type Output = [S::V; V];
    #[inline(always)]
    unsafe fn run(self) -> [S::V; V] {
        let Softmax { problem, state, acc_o, n, x, p, codes, beside, .. } = self;
        let all = n * (MAX_PART + WEIGHT_PART);
        let queries = V * S::LANES;
        let codes = codes.filter(|_| FACTORS);
        // SAFETY: x has n rows of `queries`, the state `queries` elements.
        unsafe {
            let scale_log2 = S::splat(S::Elem::from_f64_clamped(problem.scores.exponent()));
            let mut old = [scale_log2; V];
            for (v, old) in old.iter_mut().enumerate() {
                *old = S::load(state.row_max.add(v * S::LANES));
            }
            let mut max = old;
            // A maximum waits 4 cycles for the one before it on Intel's cores: chains side by side.
            let mut chains = [old; MAX_CHAINS];
            let whole = n / MAX_CHAINS * MAX_CHAINS;
            for j in (0..whole).step_by(MAX_CHAINS) {
                for (chain, max) in chains.iter_mut().enumerate() {
                    for (v, max) in max.iter_mut().enumerate() {
                        let at = x.add((j + chain) * queries + v * S::LANES);
                        *max = max_skipping_nan::<S>(*max, score::<S>(at, codes, j + chain));
                    }
                }
                beside.go_on(MAX_CHAINS * MAX_PART, all);
            }
            for j in whole..n {
                for (v, max) in max.iter_mut().enumerate() {
                    *max = max_skipping_nan::<S>(*max, score::<S>(x.add(j * queries + v * S::LANES), codes, j));
                }
            }
            let (mut factors, mut subtract) = ([scale_log2; V], [scale_log2; V]);
            for v in 0..V {
                for chain in &chains {
                    max[v] = S::max(chain[v], max[v]);
                }
                factors[v] = rescale::<S>(old[v], max[v], scale_log2);
                subtract[v] = subtractable::<S>(max[v]);
                // Nothing was summed below a maximum of −inf.
                let is_first = S::eq(old[v], S::splat(S::Elem::NEG_INFINITY));
                factors[v] = S::select(is_first, S::splat(S::Elem::ONE), factors[v]);
            }
            M::rescale::<V>(problem.head_dim_v, acc_o, factors);
            let mut sum = [S::splat(S::Elem::ZERO); V];
            let whole = n / M::STEPS;
            for step in 0..whole {
                weights::<S, M, V, MASKED>((x, p), step, M::STEPS, (subtract, scale_log2), codes, &mut sum);
                beside.go_on(M::STEPS * WEIGHT_PART, all);
            }
            // The rest of the last lane of an odd number of keys is no key.
            if n > whole * M::STEPS {
                weights::<S, M, V, MASKED>(
                    (x, p),
                    whole,
                    n - whole * M::STEPS,
                    (subtract, scale_log2),
                    codes,
                    &mut sum,
                );
            }
            for v in 0..V {
                let row_sum = state.row_sum.add(v * S::LANES);
                S::store(row_sum, S::fma(S::load(row_sum), factors[v], sum[v]));
                S::store(state.row_max.add(v * S::LANES), max[v]);
            }
            factors
        }
    }
}

/// A vector of scores of key `j`, with what its factor adds.
#[inline(always)]
unsafe fn score<S: Simd>(at: *const S::Elem, codes: Option<(*const S::Elem, *const S::Elem)>, j: usize) -> S::V {
    // SAFETY: promised by the caller.
    unsafe {
        match codes {
            Some((biases, _)) => S::add(S::load(at), S::splat(*biases.add(j))),
            None => S::load(at),
        }
    }
}

/// The first `keys` scores of a step to a lane of probabilities per query, and onto their sums, without factors.
#[inline(always)]
unsafe fn weights<S: Simd, M: BlockProducts<S>, const V: usize, const MASKED: bool>(
    (x, to): (*mut S::Elem, *mut S::Elem),
    step: usize,
    keys: usize,
    (subtract, scale_log2): ([S::V; V], S::V),
    codes: Option<(*const S::Elem, *const S::Elem)>,
    sum: &mut [S::V; V],
) {
    let queries = V * S::LANES;
    // SAFETY: x has a row of `queries` for each key of the step.
    unsafe {
        for v in 0..V {
            // Where lanes go over scores, they go over those that were read: PARTS ≤ STEPS then. Elsewhere the scores become weights besides.
            let at = x.add(v * S::LANES);
            let mut p = [S::splat(S::Elem::MASKED); 2];
            for (key, p) in p.iter_mut().enumerate().take(keys) {
                let j = step * M::STEPS + key;
                let score = score::<S>(at.add(j * queries), codes, j);
                *p = probability_by::<S, MASKED>(M::EXP2, score, subtract[v], scale_log2);
                if M::PARTS > M::STEPS {
                    S::store(at.add(j * queries), *p);
                }
                sum[v] = match codes {
                    Some((_, inverses)) => S::fma(*p, S::splat(*inverses.add(j)), sum[v]),
                    None => S::add(sum[v], *p),
                };
            }
            M::store_weights(p, to.add(step * M::PARTS * queries + v * S::LANES), queries);
        }
    }
}
