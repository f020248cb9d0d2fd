//! From raw products to probabilities: score modifications and the streaming softmax.
//!
//! ```text
//! x = q·k                                                 raw: compared as it is, or
//! x = softcap(q·k · scale) − slope·|i + d − j| + bias     natural: where something is added
//! x = −inf                                                where masked
//! m' = max(m, max_j x)     p = 2^((x − m')·c)     sum' = sum·2^((m − m')·c) + Σ p      c = scale_log2 = log2(e) · (scale | 1)
//! ```
//! (Milakov & Gimelshein 2018.) `x − m` is taken before it is scaled: no product with log2(e) can overflow, and a score at
//! the lowest finite number stays a number. NaN never enters the maximum and always enters the sum.

use super::math::{exp2, exp2_by, tanh};
use super::simd::{Real, Simd};
use crate::problem::Scores;

/// Constants of the score modification, one vector each.
#[derive(Clone, Copy)]
pub(crate) struct Modifier<S: Simd> {
    scale: S::V,
    softcap: Option<(S::V, S::V)>,
    natural: bool,
}

impl<S: Simd> Modifier<S> {
    #[inline(always)]
    pub(crate) unsafe fn new(scores: &Scores) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let mut softcap = None;
            if let Some(c) = scores.softcap {
                let inverse = S::Elem::from_f64_clamped(1.0 / c);
                softcap = Some((S::splat(S::Elem::from_f64_clamped(c)), S::splat(inverse)));
            }
            let scale = S::splat(S::Elem::from_f64_clamped(scores.scale));
            Modifier { scale, softcap, natural: scores.natural }
        }
    }

    /// As this one, with a factor of its own for each lane.
    #[inline(always)]
    pub(crate) fn scaled(self, scale: S::V) -> Self {
        Modifier { scale, ..self }
    }

    /// A raw product in the units in which it is compared; `distance` is `(slope, |i + d − j|)`.
    #[inline(always)]
    pub(crate) unsafe fn apply(&self, x: S::V, distance: Option<(S::V, S::V)>) -> S::V {
        if !self.natural {
            return x;
        }
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let mut x = S::mul(x, self.scale);
            if let Some((cap, inverse)) = self.softcap {
                x = S::mul(cap, tanh::<S>(S::mul(x, inverse)));
            }
            if let Some((slope, distance)) = distance {
                x = S::sub(x, S::mul(slope, distance));
            }
            x
        }
    }

    /// `x + bias`, −inf where the bias is −inf, whatever x is.
    #[inline(always)]
    pub(crate) unsafe fn add_bias(&self, x: S::V, bias: S::V) -> S::V {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { Self::mask(if self.natural { S::add(x, bias) } else { x }, bias) }
    }

    /// As [`Modifier::apply`] and [`Modifier::add_bias`] one after the other, where biases are all that is added.
    #[inline(always)]
    pub(crate) unsafe fn scale_and_add(&self, x: S::V, bias: S::V) -> S::V {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { Self::mask(S::add(S::mul(x, self.scale), bias), bias) }
    }

    /// `x`, −inf where the bias is −inf.
    #[inline(always)]
    pub(crate) unsafe fn mask(x: S::V, bias: S::V) -> S::V {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let masked = S::splat(S::Elem::NEG_INFINITY);
            S::select(S::eq(bias, masked), masked, x)
        }
    }
}

/// `max` that keeps its first operand where the second is NaN.
#[inline(always)]
pub(crate) unsafe fn max_skipping_nan<S: Simd>(m: S::V, x: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { S::max(x, m) }
}

/// `p = 2^((x − m) · scale_log2)`; [`Real::MASKED`] where `MASKED` and x is −inf.
#[inline(always)]
pub(crate) unsafe fn probability<S: Simd, const MASKED: bool>(x: S::V, m: S::V, scale_log2: S::V) -> S::V {
    // SAFETY: promised by the caller.
    unsafe { probability_by::<S, MASKED>(S::Elem::EXP2, x, m, scale_log2) }
}

/// The same by one of the polynomials for `2^f`.
#[inline(always)]
pub(crate) unsafe fn probability_by<S: Simd, const MASKED: bool>(
    coefficients: &[S::Elem],
    x: S::V,
    m: S::V,
    scale_log2: S::V,
) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let p = exp2_by::<S>(coefficients, S::mul(S::sub(x, m), scale_log2));
        if MASKED { S::select(S::eq(x, S::splat(S::Elem::NEG_INFINITY)), S::splat(S::Elem::MASKED), p) } else { p }
    }
}

/// What a sum over keys up to now is multiplied with when the maximum rises from `m` to `risen`; 1 where it stays.
#[inline(always)]
pub(crate) unsafe fn rescale<S: Simd>(m: S::V, risen: S::V, scale_log2: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        // A maximum of −inf stands for an empty sum: its difference is kept finite, for scale_log2 may be 0.
        let fall = S::max(S::splat(S::Elem::LOWEST), S::sub(m, risen));
        S::select(S::eq(m, risen), S::splat(S::Elem::ONE), exp2::<S>(S::mul(fall, scale_log2)))
    }
}

/// A maximum that can be subtracted: 0 in place of −inf.
#[inline(always)]
pub(crate) unsafe fn subtractable<S: Simd>(m: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { S::select(S::eq(m, S::splat(S::Elem::NEG_INFINITY)), S::splat(S::Elem::ZERO), m) }
}

/// The end of a row.
#[derive(Clone, Copy)]
pub(crate) struct Finished<E> {
    /// What its accumulated values are multiplied with.
    pub(crate) factor: E,
    /// Its lse is `top + ln(total)`.
    top: E,
    total: E,
}

impl<E: Real> Finished<E> {
    /// `max` is in the units of [`Modifier::apply`], of which `to_natural` makes natural ones; `sink` is a natural logit.
    #[inline(always)]
    pub(crate) fn new(max: E, sum: E, to_natural: E, sink: Option<E>) -> Self {
        // The key of the maximum weighs 1 and NaN leaves NaN: a sum of 0 is a row without keys.
        if sum == E::ZERO {
            return Finished { factor: E::ZERO, top: E::NEG_INFINITY, total: E::ONE };
        }
        let max = max * to_natural;
        let Some(sink) = sink else {
            return Finished { factor: E::ONE / sum, top: max, total: sum };
        };
        let top = if sink > max { sink } else { max };
        let weight = (max - top).exp();
        let total = sum * weight + (sink - top).exp();
        Finished { factor: weight / total, top, total }
    }

    /// Asked for where it is an output: the logarithm is a call for each row.
    #[inline(always)]
    pub(crate) fn lse(self) -> E {
        self.top + self.total.ln()
    }
}
