//! Scores to probabilities and to what arrives at the scores.
//!
//! ```text
//! p  = 2^((s − top) · log2(e) − log2_sum)       ds = p · (dp − delta)       dx = ds · (1 − tanh²)
//! ```
//! With dropout dp is `kept · dp` before, and p becomes `kept · p` after: passes of their own, so that without it nothing is asked of a pair.
//! A pair that is not attended has [`Real::MASKED`] in both. Deliberately absent: softmax_scale, which dq and dk are multiplied with once they are sums.

use super::super::dropout::{DropArriving, DropTile};
use super::super::math::{exp2, tanh};
use super::super::simd::{Part, Real, Simd};
use super::super::softmax::{max_skipping_nan, probability, rescale, subtractable};
use super::queries::{MAX_QUERIES, Tile};
use crate::backward_problem::BackwardProblem;

/// Where the scores of a tile lie: a pointer and the distance from key to key.
#[derive(Clone, Copy)]
pub(super) struct Operands<E> {
    /// Products of q and k, which become probabilities.
    pub(super) p: (*mut E, usize),
    /// Where what arrives at them goes besides.
    pub(super) ds: Option<(*mut E, usize)>,
    /// Products of d_o and v, which become what arrives: `[keys][width]`.
    pub(super) dp: *mut E,
    /// With dropout: what each pair is multiplied with, likewise.
    pub(super) kept: *mut E,
}

/// See the module, for `n` keys, of those of the tile from `skip` on; `of_scores` leaves out the derivative of softcap.
pub(super) unsafe fn weigh<S: Simd>(
    problem: &BackwardProblem,
    tile: &Tile<S::Elem>,
    (skip, n): (usize, usize),
    operands: Operands<S::Elem>,
    of_scores: bool,
) {
    // SAFETY: as of the caller.
    unsafe {
        if let Some(dropping) = problem.dropping {
            let keys = (tile.first_key + skip, n);
            let tile = DropTile { dropping, rows: &tile.rows[..tile.count], keys };
            S::apart(DropArriving::<S> { tile, dp: operands.dp, kept: operands.kept });
        }
        match (problem.scores.natural, tile.has_masked) {
            (false, false) => S::apart(Weigh::<S, false, false> { problem, tile, skip, n, operands, of_scores }),
            (false, true) => S::apart(Weigh::<S, false, true> { problem, tile, skip, n, operands, of_scores }),
            (true, false) => S::apart(Weigh::<S, true, false> { problem, tile, skip, n, operands, of_scores }),
            (true, true) => S::apart(Weigh::<S, true, true> { problem, tile, skip, n, operands, of_scores }),
        }
        if problem.dropping.is_some() {
            S::apart(KeepWeights::<S> { n, kept: operands.kept, p: operands.p });
        }
    }
}

/// `p = kept · p`: [`Real::MASKED`] stays.
struct KeepWeights<S: Simd> {
    n: usize,
    kept: *const S::Elem,
    p: (*mut S::Elem, usize),
}

impl<S: Simd> Part<S> for KeepWeights<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let KeepWeights { n, kept, p: (p, row) } = self;
        let width = S::Q_VECS * S::LANES;
        // SAFETY: both have n rows of a tile's width.
        unsafe {
            for j in 0..n {
                for v in (0..width).step_by(S::LANES) {
                    let at = p.add(j * row + v);
                    S::store(at, S::mul(S::load(at), S::load(kept.add(j * width + v))));
                }
            }
        }
    }
}

struct Weigh<'a, S: Simd, const NATURAL: bool, const MASKED: bool> {
    problem: &'a BackwardProblem,
    tile: &'a Tile<S::Elem>,
    skip: usize,
    n: usize,
    operands: Operands<S::Elem>,
    of_scores: bool,
}

/// What makes scores of products: constants of a problem.
struct Scorer<S: Simd> {
    scale: S::V,
    softcap: Option<(S::V, S::V)>,
    has_slopes: bool,
}

/// The same of the lanes of a vector.
struct LaneScorer<S: Simd> {
    lo: S::V,
    hi: S::V,
    diagonal: S::V,
    slope: S::V,
}

impl<S: Simd> Scorer<S> {
    #[inline(always)]
    unsafe fn new(problem: &BackwardProblem) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let mut softcap = None;
            if let Some(c) = problem.scores.softcap {
                let inverse = S::Elem::from_f64_clamped(1.0 / c);
                softcap = Some((S::splat(S::Elem::from_f64_clamped(c)), S::splat(inverse)));
            }
            let scale = S::splat(S::Elem::from_f64_clamped(problem.scores.softmax_scale));
            Scorer { scale, softcap, has_slopes: problem.alibi_slopes.is_some() }
        }
    }

    #[inline(always)]
    unsafe fn lanes(tile: &Tile<S::Elem>, v: usize) -> LaneScorer<S> {
        // SAFETY: the arrays have as many elements as a tile has queries.
        unsafe {
            LaneScorer {
                lo: S::load(tile.lo.as_ptr().add(v)),
                hi: S::load(tile.hi.as_ptr().add(v)),
                diagonal: S::load(tile.diagonal.as_ptr().add(v)),
                slope: S::load(tile.slope.as_ptr().add(v)),
            }
        }
    }

    /// The score of a product in natural units, and the derivative of softcap there.
    #[inline(always)]
    unsafe fn score(&self, lanes: &LaneScorer<S>, x: S::V, key: S::V, bias: Option<*const S::Elem>) -> (S::V, S::V) {
        // SAFETY: the caller vouches for a vector of biases.
        unsafe {
            let one = S::splat(S::Elem::ONE);
            let (mut score, mut rises) = (S::mul(x, self.scale), one);
            if let Some((cap, inverse)) = self.softcap {
                let t = tanh::<S>(S::mul(score, inverse));
                score = S::mul(cap, t);
                rises = S::fma(S::sub(S::splat(S::Elem::ZERO), t), t, one);
            }
            if self.has_slopes {
                score = S::sub(score, S::mul(lanes.slope, S::abs(S::sub(lanes.diagonal, key))));
            }
            if let Some(bias) = bias {
                score = S::add(score, S::load(bias));
            }
            (score, rises)
        }
    }
}

impl<S: Simd> LaneScorer<S> {
    /// `x`, or `masked` where the pair is not attended.
    #[inline(always)]
    unsafe fn select(&self, x: S::V, key: S::V, bias: Option<*const S::Elem>, masked: S::V) -> S::V {
        // SAFETY: the caller vouches for a vector of biases.
        unsafe {
            let mut x = S::select(S::lt(key, self.lo), masked, S::select(S::lt(key, self.hi), x, masked));
            if let Some(bias) = bias {
                x = S::select(S::eq(S::load(bias), S::splat(S::Elem::NEG_INFINITY)), masked, x);
            }
            x
        }
    }
}

impl<S: Simd, const NATURAL: bool, const MASKED: bool> Part<S> for Weigh<'_, S, NATURAL, MASKED> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Weigh { problem, tile, skip, n, operands, of_scores } = self;
        let width = S::Q_VECS * S::LANES;
        // SAFETY: the arrays have as many elements as a tile has queries, and the caller vouches for n rows of scores.
        unsafe {
            let scorer = Scorer::<S>::new(problem);
            let log2_e = S::splat(S::Elem::from_f64_clamped(std::f64::consts::LOG2_E));
            let (zero, masked) = (S::splat(S::Elem::ZERO), S::splat(S::Elem::MASKED));
            for v in (0..width).step_by(S::LANES) {
                let lanes = Scorer::<S>::lanes(tile, v);
                let top = S::load(tile.top.as_ptr().add(v));
                let minus_top = S::sub(zero, top);
                let minus_log2_sum = S::sub(zero, S::load(tile.log2_sum.as_ptr().add(v)));
                let delta = S::load(tile.delta.as_ptr().add(v));
                for j in 0..n {
                    let at = operands.p.0.add(j * operands.p.1 + v);
                    let of_dp = operands.dp.add(j * width + v);
                    let (x, key) = (S::load(at), S::splat(S::Elem::from_i64((skip + j) as i64)));
                    let bias = tile.bias.map(|bias| bias.wrapping_add((skip + j) * width + v));
                    let (below_top, rises) = if NATURAL {
                        let (score, rises) = scorer.score(&lanes, x, key, bias);
                        (S::sub(score, top), rises)
                    } else {
                        (S::fma(x, scorer.scale, minus_top), zero)
                    };
                    let mut p = exp2::<S>(S::fma(below_top, log2_e, minus_log2_sum));
                    let mut ds = S::mul(p, S::sub(S::load(of_dp), delta));
                    if NATURAL && !of_scores {
                        ds = S::mul(ds, rises);
                    }
                    if MASKED {
                        p = lanes.select(p, key, bias, masked);
                        // −0 stands for no pair at all: what is one adds 0 to it.
                        ds = lanes.select(S::add(ds, zero), key, bias, masked);
                    }
                    S::store(at, p);
                    S::store(of_dp, ds);
                    if let Some((ds_at, row)) = operands.ds {
                        S::store(ds_at.add(j * row + v), ds);
                    }
                }
            }
        }
    }
}

/// Raises the maxima of a tile's rows by `n` keys, and adds their exponentials to the sums; `x` are products, `row` apart.
pub(super) struct Accumulate<'a, S: Simd> {
    pub(super) problem: &'a BackwardProblem,
    pub(super) tile: &'a Tile<S::Elem>,
    pub(super) n: usize,
    pub(super) x: *mut S::Elem,
    pub(super) row: usize,
    pub(super) row_max: &'a mut [S::Elem; MAX_QUERIES],
    pub(super) row_sum: &'a mut [S::Elem; MAX_QUERIES],
}

impl<S: Simd> Part<S> for Accumulate<'_, S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Accumulate { problem, tile, n, x, row, row_max, row_sum } = self;
        let width = S::Q_VECS * S::LANES;
        // SAFETY: as of `Weigh`.
        unsafe {
            let scorer = Scorer::<S>::new(problem);
            let (lowest, log2_e) =
                (S::splat(S::Elem::NEG_INFINITY), S::splat(S::Elem::from_f64_clamped(std::f64::consts::LOG2_E)));
            for v in (0..width).step_by(S::LANES) {
                let lanes = Scorer::<S>::lanes(tile, v);
                let old = S::load(row_max.as_ptr().add(v));
                let mut max = old;
                for j in 0..n {
                    let (at, key) = (x.add(j * row + v), S::splat(S::Elem::from_i64(j as i64)));
                    let bias = tile.bias.map(|bias| bias.wrapping_add(j * width + v));
                    let (score, _) = scorer.score(&lanes, S::load(at), key, bias);
                    let score = lanes.select(score, key, bias, lowest);
                    S::store(at, score);
                    max = max_skipping_nan::<S>(max, score);
                }
                let subtract = subtractable::<S>(max);
                let factor = S::select(S::eq(old, lowest), S::splat(S::Elem::ZERO), rescale::<S>(old, max, log2_e));
                let mut sum = S::mul(S::load(row_sum.as_ptr().add(v)), factor);
                for j in 0..n {
                    let score = S::load(x.add(j * row + v));
                    sum = S::add(sum, probability::<S, true>(score, subtract, log2_e));
                }
                S::store(row_max.as_mut_ptr().add(v), max);
                S::store(row_sum.as_mut_ptr().add(v), sum);
            }
        }
    }
}

/// No pair at all in a tile.
pub(super) struct FillMasked<S: Simd> {
    pub(super) n: usize,
    pub(super) to: [*mut S::Elem; 2],
    pub(super) row: usize,
    /// Lanes of a row, and what is in them.
    pub(super) lanes: usize,
    pub(super) fill: S::Elem,
}

impl<S: Simd> Part<S> for FillMasked<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let FillMasked { n, to, row, lanes, fill } = self;
        // SAFETY: the caller vouches for n rows.
        unsafe {
            for to in to {
                for j in 0..n {
                    for v in (0..lanes).step_by(S::LANES) {
                        S::store(to.add(j * row + v), S::splat(fill));
                    }
                }
            }
        }
    }
}
