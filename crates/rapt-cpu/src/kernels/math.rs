//! Exponential and hyperbolic tangent on vectors.
//!
//! `2^t = 2^n · 2^f` with `n = round(t)`, `f = t − n`: the rounding comes from adding
//! `1.5 · 2^(mantissa bits) + bias`, whose sum holds `n + bias` in its low bits: shifted up they are the number `2^n`. `tanh` is an odd polynomial (f64: a
//! rational function) near 0 and `1 − 2 / (e^2y + 1)` beyond; coefficients as in Cephes.

use super::simd::{Real, Simd};

/// `2^t` for `t ≤ 1000` (f32: `≤ 126`); 0 below half a power of 2 under the smallest normal number. NaN stays NaN.
#[inline(always)]
pub(crate) unsafe fn exp2<S: Simd>(t: S::V) -> S::V {
    // SAFETY: promised by the caller.
    unsafe { exp2_by::<S>(S::Elem::EXP2, t) }
}

/// The same by one of the polynomials for `2^f`.
#[inline(always)]
pub(crate) unsafe fn exp2_by<S: Simd>(coefficients: &[S::Elem], t: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        // max answers its second operand where one is NaN. At the bound the biased exponent is 0, and so is 2^n.
        let t = S::max(S::splat(S::Elem::UNDERFLOW), t);
        let round = S::splat(S::Elem::ROUND);
        let shifted = S::add(t, round);
        let f = S::sub(t, S::sub(shifted, round));
        // A product, not an integer sum: NaN times anything stays NaN, whatever its payload.
        S::mul(polynomial::<S>(coefficients, f), S::pow2(shifted))
    }
}

/// Horner's scheme, highest power first.
#[inline(always)]
unsafe fn polynomial<S: Simd>(coefficients: &[S::Elem], x: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let mut sum = S::splat(coefficients[0]);
        for &c in &coefficients[1..] {
            sum = S::fma(sum, x, S::splat(c));
        }
        sum
    }
}

/// `tanh(y)`; NaN stays NaN.
#[inline(always)]
pub(crate) unsafe fn tanh<S: Simd>(y: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let size = S::abs(y);
        let square = S::mul(y, y);
        let (numerator, denominator) = S::Elem::TANH;
        let rest = S::div(polynomial::<S>(numerator, square), polynomial::<S>(denominator, square));
        let near = S::fma(S::mul(y, square), rest, y);
        // Beyond 20, tanh is 1 in either precision: keep exp2 in range.
        let limit = S::splat(S::Elem::from_i64(20));
        let bounded = S::select(S::lt(limit, size), limit, size);
        let two_log2e = S::splat(S::Elem::from_f64_clamped(2.0 * std::f64::consts::LOG2_E));
        let one = S::splat(S::Elem::ONE);
        let e = exp2::<S>(S::mul(bounded, two_log2e));
        let far = S::sub(one, S::div(S::add(one, one), S::add(e, one)));
        let far = S::select(S::lt(y, S::splat(S::Elem::ZERO)), S::sub(S::splat(S::Elem::ZERO), far), far);
        S::select(S::lt(size, S::splat(S::Elem::from_f64_clamped(0.625))), near, far)
    }
}
