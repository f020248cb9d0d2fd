//! Scores to probabilities and to what arrives at the scores.
//!
//! ```text
//! p  = 2^((s − top) · log2(e) − log2_sum)       ds = p · (dp − delta)       dx = ds · (1 − tanh²)
//! ```
//! A pair that is not attended has [`Real::MASKED`] in both. Deliberately absent: softmax_scale, which dq and dk are multiplied with once they are sums.

use super::super::math::{exp2, tanh};
use super::super::simd::{Part, Real, Simd};
use super::queries::Tile;
use crate::backward_problem::BackwardProblem;

/// Where the scores of a tile lie: a pointer and the distance from key to key.
#[derive(Clone, Copy)]
pub(super) struct Places<E> {
    /// Products of q and k, which become probabilities.
    pub(super) p: (*mut E, usize),
    /// Where what arrives at them goes besides.
    pub(super) ds: Option<(*mut E, usize)>,
    /// Products of d_o and v, which become what arrives: `[keys][width]`.
    pub(super) dp: *mut E,
}

/// See the module; `of_scores` leaves out the derivative of softcap.
pub(super) unsafe fn weigh<S: Simd>(
    problem: &BackwardProblem,
    tile: &Tile<S::Elem>,
    n: usize,
    places: Places<S::Elem>,
    of_scores: bool,
) {
    // SAFETY: as of the caller.
    unsafe {
        match (problem.scores.natural, tile.has_masked) {
            (false, false) => S::apart(Weigh::<S, false, false> { problem, tile, n, places, of_scores }),
            (false, true) => S::apart(Weigh::<S, false, true> { problem, tile, n, places, of_scores }),
            (true, false) => S::apart(Weigh::<S, true, false> { problem, tile, n, places, of_scores }),
            (true, true) => S::apart(Weigh::<S, true, true> { problem, tile, n, places, of_scores }),
        }
    }
}

struct Weigh<'a, S: Simd, const NATURAL: bool, const MASKED: bool> {
    problem: &'a BackwardProblem,
    tile: &'a Tile<S::Elem>,
    n: usize,
    places: Places<S::Elem>,
    of_scores: bool,
}

impl<S: Simd, const NATURAL: bool, const MASKED: bool> Part<S> for Weigh<'_, S, NATURAL, MASKED> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Weigh { problem, tile, n, places, of_scores } = self;
        let scores = problem.scores;
        let (has_slopes, bias) = (problem.alibi_slopes.is_some(), tile.bias);
        let width = S::Q_VECS * S::LANES;
        // SAFETY: the arrays have as many elements as a tile has queries, and the caller vouches for n rows of scores.
        unsafe {
            let scale = S::splat(S::Elem::from_f64_clamped(scores.softmax_scale));
            let log2_e = S::splat(S::Elem::from_f64_clamped(std::f64::consts::LOG2_E));
            let (zero, one) = (S::splat(S::Elem::ZERO), S::splat(S::Elem::ONE));
            let (masked, lowest) = (S::splat(S::Elem::MASKED), S::splat(S::Elem::NEG_INFINITY));
            let mut softcap = None;
            if let Some(c) = scores.softcap {
                let inverse = S::Elem::from_f64_clamped(1.0 / c);
                softcap = Some((S::splat(S::Elem::from_f64_clamped(c)), S::splat(inverse)));
            }
            for v in (0..width).step_by(S::LANES) {
                let top = S::load(tile.top.as_ptr().add(v));
                let log2_sum = S::load(tile.log2_sum.as_ptr().add(v));
                let (minus_top, minus_log2_sum) = (S::sub(zero, top), S::sub(zero, log2_sum));
                let delta = S::load(tile.delta.as_ptr().add(v));
                let (lo, hi) = (S::load(tile.lo.as_ptr().add(v)), S::load(tile.hi.as_ptr().add(v)));
                let (diagonal, slope) = (S::load(tile.diagonal.as_ptr().add(v)), S::load(tile.slope.as_ptr().add(v)));
                for j in 0..n {
                    let at = places.p.0.add(j * places.p.1 + v);
                    let of_dp = places.dp.add(j * width + v);
                    let (x, key) = (S::load(at), S::splat(S::Elem::from_i64(j as i64)));
                    let (distance_to_top, mut rises) = if NATURAL {
                        let mut score = S::mul(x, scale);
                        let mut rises = one;
                        if let Some((cap, inverse)) = softcap {
                            let t = tanh::<S>(S::mul(score, inverse));
                            score = S::mul(cap, t);
                            rises = S::fma(S::sub(zero, t), t, one);
                        }
                        if has_slopes {
                            score = S::sub(score, S::mul(slope, S::abs(S::sub(diagonal, key))));
                        }
                        if let Some(bias) = bias {
                            score = S::add(score, S::load(bias.add(j * width + v)));
                        }
                        (S::sub(score, top), rises)
                    } else {
                        (S::fma(x, scale, minus_top), one)
                    };
                    let mut p = exp2::<S>(S::fma(distance_to_top, log2_e, minus_log2_sum));
                    let mut ds = S::mul(p, S::sub(S::load(of_dp), delta));
                    if of_scores {
                        rises = one;
                    }
                    if NATURAL {
                        ds = S::mul(ds, rises);
                    }
                    if MASKED {
                        // −0 stands for no pair at all: what is one adds 0 to it.
                        ds = S::add(ds, zero);
                        p = S::select(S::lt(key, lo), masked, S::select(S::lt(key, hi), p, masked));
                        ds = S::select(S::lt(key, lo), masked, S::select(S::lt(key, hi), ds, masked));
                        if let Some(bias) = bias {
                            let is_masked = S::eq(S::load(bias.add(j * width + v)), lowest);
                            p = S::select(is_masked, masked, p);
                            ds = S::select(is_masked, masked, ds);
                        }
                    }
                    S::store(at, p);
                    S::store(of_dp, ds);
                    if let Some((ds_at, row)) = places.ds {
                        S::store(ds_at.add(j * row + v), ds);
                    }
                }
            }
        }
    }
}

/// No pair at all in a tile.
pub(super) struct FillMasked<S: Simd> {
    pub(super) n: usize,
    pub(super) to: [*mut S::Elem; 2],
    pub(super) row: usize,
}

impl<S: Simd> Part<S> for FillMasked<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let FillMasked { n, to, row } = self;
        // SAFETY: the caller vouches for n rows.
        unsafe {
            for to in to {
                for j in 0..n {
                    for v in (0..S::Q_VECS * S::LANES).step_by(S::LANES) {
                        S::store(to.add(j * row + v), S::splat(S::Elem::MASKED));
                    }
                }
            }
        }
    }
}
