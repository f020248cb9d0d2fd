//! Decode's scores to probabilities, a row at a time.

use crate::kernels::mask;
use crate::kernels::simd::{Part, Real, Simd};
use crate::kernels::softmax::{Modifier, max_skipping_nan, probability, subtractable};
use crate::problem::{Problem, Row};

/// Scores of one row to probabilities in place; the maximum and the sum go to `state`. Answers whether a key was masked.
pub(super) struct SoftmaxRow<'a, S: Simd> {
    pub(super) problem: &'a Problem,
    pub(super) row: Row,
    /// The first key, and how many there are.
    pub(super) keys: (usize, usize),
    pub(super) s: *mut S::Elem,
    pub(super) bias: *mut S::Elem,
    pub(super) state: *mut S::Elem,
}

impl<S: Simd> Part<S> for SoftmaxRow<'_, S> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let SoftmaxRow { problem, row, keys: (j0, n), s, bias, state } = self;
        let (first, last) = problem.range.keys_of(row.i);
        let (first, last) = (first.clamp(j0, j0 + n) - j0, last.clamp(j0, j0 + n) - j0);
        let padded = n.next_multiple_of(S::LANES);
        // SAFETY: s and bias have block_n elements, a multiple of every vector's length.
        unsafe {
            let effect = problem.mask.as_ref().map(|mask| mask::read_row(mask, row, (j0, n), bias, 1));
            let biased = effect.is_some_and(|effect| effect.masks || effect.adds);
            let positions = first > 0 || last < n;
            let mut slope = None;
            if let Some(slopes) = &problem.alibi_slopes {
                slope = Some(S::splat(S::Elem::load_as(slopes.dtype, slopes.at([row.head]))));
            }
            let masked = S::Elem::NEG_INFINITY;
            for j in n..padded {
                *s.add(j) = masked;
                *bias.add(j) = masked;
            }
            if problem.scores.natural || biased {
                let modifier = Modifier::<S>::new(&problem.scores);
                let diagonal = row.i as i64 + problem.range.diagonal - j0 as i64;
                for j in (0..padded).step_by(S::LANES) {
                    let mut distance = None;
                    if let Some(slope) = slope {
                        let mut at = [S::Elem::ZERO; 16];
                        for (lane, at) in at.iter_mut().enumerate().take(S::LANES) {
                            *at = S::Elem::from_i64((diagonal - (j + lane) as i64).abs());
                        }
                        distance = Some((slope, S::load(at.as_ptr())));
                    }
                    let mut x = modifier.apply(S::load(s.add(j)), distance);
                    if biased {
                        x = modifier.add_bias(x, S::load(bias.add(j)));
                    }
                    S::store(s.add(j), x);
                }
            }
            for j in (0..first).chain(last..padded) {
                *s.add(j) = masked;
            }

            let mut max = S::splat(masked);
            for j in (0..padded).step_by(S::LANES) {
                max = max_skipping_nan::<S>(max, S::load(s.add(j)));
            }
            let mut lanes = [masked; 16];
            S::store(lanes.as_mut_ptr(), max);
            let max = lanes.into_iter().fold(masked, |a, b| if b > a { b } else { a });
            let scale_log2 = S::splat(S::Elem::from_f64_clamped(problem.scores.exponent()));
            let subtract = subtractable::<S>(S::splat(max));
            let mut sum = S::splat(S::Elem::ZERO);
            for j in (0..padded).step_by(S::LANES) {
                let p = probability::<S, true>(S::load(s.add(j)), subtract, scale_log2);
                sum = S::add(sum, p);
                S::store(s.add(j), p);
            }
            *state = max;
            *state.add(1) = S::reduce_add(sum);
            positions || effect.is_some_and(|effect| effect.masks)
        }
    }
}
