//! Products of decode with rows of codes, straight from the codes: what multiplies them goes into the other operand, or into the result.
//!
//! ```text
//! c = code − zero_point                       exact
//! factor f of a row       s = (q · c) · f                o = Σ (p · f) · c
//! factors f of channels   s = (q ∘ f) · c                o = f ∘ Σ p · c
//! factors f of groups     s = (q · (c ∘ f)) · global     o = global · Σ p · (c ∘ f)
//! ```
//! So each product is rounded as often as with the numbers of a panel, in other places. Where a factor or a score leaves the range in
//! which these are the same within rounding, the key, or all of them, go through numbers ([`Source::read`]); which key does depends on
//! itself and on the queries alone. The bits do not depend on strides: codes that lie apart are gathered as codes.

use rapt_core::DType;

use super::ahead::Ahead;
use super::products::{all_finite, dots, weighted_sum, weighted_sum_selecting};
use super::rows::Keys;
use crate::kernels::codes::{CodeVectors, E4m3fn, E8m0, Element, MOST, Uint8, is_moderate};
use crate::kernels::simd::{Part, Real};
use crate::partition::QK_KEYS;
use crate::problem::{CodeRows, CodesChunk, CodesScratch, Fold, Input, Out, Scales, Sizes, Source, Weights};

/// What the products of codes ask of a chunk.
impl CodesChunk<'_> {
    fn sizes(&self, n: usize) -> Sizes {
        Sizes { n, dim: self.dim, rows: self.problem.partition.rows }
    }

    /// Codes of keys `j..j + n` of the chunk, where they lie or gathered.
    #[inline(always)]
    pub(super) unsafe fn codes(&self, j: usize, n: usize, lanes: usize) -> CodeRows {
        let Source { rows, shared, .. } = self.source;
        let (bytes, (batch, head, j0)) = (self.dim.div_ceil(*shared), self.first);
        let (at, scratch) = ((batch, head, j0 + j), &self.scratch);
        // SAFETY: keys of the chunk; the panel has room for as many as are taken at a time.
        let keys = unsafe { Keys::<u8>::near(rows, at, n, bytes, scratch.gathered) };
        self.with_factors(CodeRows { first: keys.first, stride: keys.stride, ..CodeRows::NONE }, lanes)
    }

    /// Codes with the factors that are kept of them.
    #[inline(always)]
    pub(super) fn with_factors(&self, codes: CodeRows, lanes: usize) -> CodeRows {
        let (factors, points) = (self.scratch.factors.cast_const(), self.scratch.points.cast_const());
        let codes = CodeRows { factors, points, ..codes };
        match (&self.source.scales, self.products.fold) {
            (Some(scales), Fold::Groups) => {
                let vectors_log2 = (scales.chunk / lanes).checked_ilog2().unwrap_or(0);
                let per_row = self.dim.div_ceil(scales.chunk);
                // One group is as many vectors as it likes.
                let vectors_log2 = if per_row == 1 { usize::BITS - 1 } else { vectors_log2 };
                CodeRows { per_row, vectors_log2, ..codes }
            }
            _ => codes,
        }
    }

    /// NaN for the scores of keys among whose codes is one that the product did not know.
    unsafe fn tell_nan(&self, codes: &CodeRows, n: usize, (s, s_stride): Out) {
        let Some(has_nan) = self.products.has_nan else { return };
        // SAFETY: as of the caller, for each key alone too.
        unsafe {
            if !has_nan(codes, self.sizes(n)) {
                return;
            }
            for j in 0..n {
                let key = CodeRows { first: codes.first.wrapping_offset(j as isize * codes.stride), ..*codes };
                if has_nan(&key, self.sizes(1)) {
                    (0..self.problem.partition.rows).for_each(|r| *s.add(r * s_stride + j) = f32::NAN);
                }
            }
        }
    }

    /// The factors of the first `n` keys, one each.
    pub(super) unsafe fn row_factors(&self, scales: &Scales, n: usize) {
        let ((batch, head, j0), descale, short) = (self.first, &scales.descale, self.products.short);
        let step = descale.strides[2];
        for (at, len) in descale.runs(j0, n) {
            let first = descale.at_key([batch, head, j0 + at, 0]).cast::<f32>();
            let to = self.scratch.factors.wrapping_add(at);
            // SAFETY: keys of the chunk, each with a factor of f32; the scratch memory has as many.
            unsafe {
                // Loops of their own: these become vectors.
                match step {
                    0 => (0..len).for_each(|j| *to.add(j) = *first * short),
                    1 => (0..len).for_each(|j| *to.add(j) = *first.add(j) * short),
                    _ => (0..len).for_each(|j| *to.add(j) = *first.wrapping_offset(j as isize * step) * short),
                }
            }
        }
    }

    /// The factors and zero points of all channels.
    pub(super) unsafe fn channel_factors(&self, scales: &Scales) {
        let (batch, head, j0) = self.first;
        for d in 0..self.dim {
            // SAFETY: channels of the head; the scratch memory has as many.
            unsafe {
                let of = scales.of([batch, head, j0], d);
                *self.scratch.factors.add(d) = of.factor * self.products.short;
                *self.scratch.points.add(d) = of.zero_point;
            }
        }
    }

    /// The factors and zero points of the groups of keys `j..j + n`.
    #[inline(always)]
    pub(super) unsafe fn group_factors<S: CodeVectors>(&self, scales: &Scales, (j, n): (usize, usize)) {
        let (batch, head, j0) = self.first;
        let groups = self.dim.div_ceil(scales.chunk);
        let CodesScratch { factors, points, .. } = self.scratch;
        if scales.swizzled.is_some() {
            for (at, to) in (0..n * groups).map(|at| (at, factors.wrapping_add(at))) {
                // SAFETY: keys of the chunk, and their groups; the scratch memory has a place for each, and there are no zero points.
                unsafe { *to = scales.of([batch, head, j0 + j + at / groups], at % groups).factor };
            }
            return;
        }
        let of = &scales.descale;
        for (at, len) in of.runs(j0 + j, n) {
            let (first, sizes) = ([batch, head, j0 + j + at, 0], (len, groups));
            let to = factors.wrapping_add(at * groups);
            // SAFETY: keys of the chunk, and their groups; the scratch memory has a place for each.
            unsafe {
                match of.dtype {
                    DType::F8E4M3FN => widen::<S, E4m3fn>(of, first, sizes, to),
                    DType::F8E8M0FNU => widen::<S, E8m0>(of, first, sizes, to),
                    _ => widen::<S, f32>(of, first, sizes, to),
                }
                if let Some(of) = &scales.zero_point {
                    widen::<S, Uint8>(of, first, sizes, points.wrapping_add(at * groups));
                }
            }
        }
    }
}

/// `n` rows of `count` elements from `first` on, to consecutive numbers.
#[inline(always)]
unsafe fn widen<S: CodeVectors, C: Element<S>>(
    of: &Input<4>,
    first: [usize; 4],
    (n, count): (usize, usize),
    to: *mut f32,
) {
    let [_, _, along_rows, step] = of.strides;
    let first = of.at_key(first);
    let follow = step == 1 || count == 1;
    let step = if follow { 1 } else { step };
    // Rows that follow one another are one.
    let (rows, len) = if follow && along_rows == count as isize { (1, n * count) } else { (n, count) };
    for row in 0..rows {
        let (from, to) = (first.wrapping_offset(row as isize * along_rows * of.size), to.wrapping_add(row * len));
        let mut at = 0;
        // SAFETY: promised by the caller.
        unsafe {
            while follow && at + S::LANES <= len {
                S::store(to.add(at), C::load(from.add(at * C::BYTES)));
                at += S::LANES;
            }
            for at in at..len {
                *to.add(at) = C::number(from.wrapping_offset(at as isize * step * of.size), 0);
            }
        }
    }
}

pub(super) unsafe fn scores_of<S: CodeVectors>(chunk: &CodesChunk<'_>, s: Out) -> bool {
    // SAFETY: promised by the caller; so below.
    unsafe { S::apart(Scores { chunk, s }) }
}

pub(super) unsafe fn outputs_of<S: CodeVectors>(chunk: &CodesChunk<'_>, weights: &Weights) -> bool {
    // SAFETY: as above.
    unsafe { S::apart(Outputs { chunk, weights }) }
}

/// Scores of a chunk.
struct Scores<'a> {
    chunk: &'a CodesChunk<'a>,
    s: Out,
}

impl<S: CodeVectors> Part<S> for Scores<'_> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let Scores { chunk, s: (s, s_stride) } = self;
        let CodesChunk { problem, products, n, dim, scratch, .. } = *chunk;
        let (rows, at_a_time, fold) = (problem.partition.rows, problem.partition.panel_keys(), products.fold);
        let Some(scales) = &chunk.source.scales else { return false };
        let (mut q, global) = (chunk.q, scales.global * products.short);
        let ahead = Ahead::new(problem, chunk.first, n);
        // SAFETY: as in `item`.
        unsafe {
            match fold {
                Fold::Rows => chunk.row_factors(scales, n),
                Fold::Channels => {
                    chunk.channel_factors(scales);
                    let factors = std::slice::from_raw_parts(scratch.factors, dim);
                    // A small factor makes a small number smaller; that is a score of 0 as far as an exponential knows.
                    if !factors.iter().all(|factor| factor.abs() <= MOST) {
                        return false;
                    }
                    for r in 0..rows {
                        for (d, factor) in factors.iter().enumerate() {
                            *scratch.q.add(r * q.1 + d) = *q.0.add(r * q.1 + d) * factor;
                        }
                    }
                    q.0 = scratch.q;
                }
                Fold::Groups if !is_moderate(global) => return false,
                Fold::Groups => {}
            }
            for j in (0..n).step_by(at_a_time) {
                let taken = at_a_time.min(n - j);
                ahead.of_keys::<S>(j, taken);
                if fold == Fold::Groups {
                    chunk.group_factors::<S>(scales, (j, taken));
                }
                let codes = chunk.codes(j, taken, S::LANES);
                let sizes = chunk.sizes(taken);
                if taken < QK_KEYS {
                    (products.numbers)(&codes, sizes, scratch.panel);
                    let keys = Keys { first: scratch.panel.cast_const(), stride: dim as isize };
                    for at in 0..taken {
                        dots::<S, _, 1>(&keys, at, dim, rows, q, (s.add(j + at), s_stride));
                    }
                    continue;
                }
                (products.dots)(&codes, sizes, q, (s.add(j), s_stride));
                chunk.tell_nan(&codes, taken, (s.add(j), s_stride));
            }
            let by_key = fold == Fold::Rows;
            let mut is_exact = !by_key || (0..n).all(|j| is_moderate(*scratch.factors.add(j)));
            for r in 0..rows {
                let s = s.add(r * s_stride);
                let mut wrong = S::splat(0.0);
                let mut j = 0;
                while j + S::LANES <= n {
                    let mut x = S::load(s.add(j));
                    if by_key {
                        x = S::mul(x, S::load(scratch.factors.add(j)));
                    } else if fold == Fold::Groups {
                        x = S::mul(x, S::splat(global));
                    }
                    // 0 · x is 0 for finite x and NaN otherwise.
                    wrong = S::fma(x, S::splat(0.0), wrong);
                    S::store(s.add(j), x);
                    j += S::LANES;
                }
                for j in j..n {
                    if by_key {
                        *s.add(j) *= *scratch.factors.add(j);
                    } else if fold == Fold::Groups {
                        *s.add(j) *= global;
                    }
                    is_exact &= (*s.add(j)).is_finite();
                }
                is_exact &= !S::reduce_add(wrong).is_nan();
            }
            if !is_exact {
                recompute::<S>(chunk, by_key, (s, s_stride));
            }
        }
        true
    }
}

/// Key `j` of a chunk as numbers, in its panel.
#[inline(always)]
unsafe fn number_of(chunk: &CodesChunk<'_>, j: usize) -> Keys<f32> {
    let (batch, head, j0) = chunk.first;
    // SAFETY: a key of the chunk.
    unsafe { Keys::read(chunk.source, (batch, head, j0 + j), 1, chunk.dim, chunk.scratch.panel) }
}

/// Computes again, by way of numbers, the scores that are not finite, and those of keys whose factors are extreme.
#[inline(always)]
pub(super) unsafe fn recompute<S: CodeVectors>(chunk: &CodesChunk<'_>, by_key: bool, (s, s_stride): Out) {
    let (q, q_stride) = chunk.q;
    // SAFETY: as in `item`.
    unsafe {
        for j in 0..chunk.n {
            let extreme = by_key && !is_moderate(*chunk.scratch.factors.add(j));
            let is_wrong = |r: usize| extreme || !(*s.add(r * s_stride + j)).is_finite();
            let rows = chunk.problem.partition.rows;
            if (0..rows).any(is_wrong) {
                let keys = number_of(chunk, j);
                for r in (0..rows).filter(|&r| is_wrong(r)) {
                    let (q, s) = ((q.add(r * q_stride), q_stride), (s.add(r * s_stride + j), s_stride));
                    dots::<S, _, 1>(&keys, 0, chunk.dim, 1, q, s);
                }
            }
        }
    }
}

/// What the values of a chunk add to the rows of `o`.
struct Outputs<'a> {
    chunk: &'a CodesChunk<'a>,
    weights: &'a Weights,
}

impl<S: CodeVectors> Part<S> for Outputs<'_> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let Outputs { chunk, weights: &Weights { masked, p: (p, p_stride), o: (o, o_stride) } } = self;
        let CodesChunk { problem, products, n, dim, scratch, .. } = *chunk;
        let (rows, pv_keys, fold) = (problem.partition.rows, problem.partition.pv_keys, products.fold);
        let Some(scales) = &chunk.source.scales else { return false };
        let (global, ahead) = (scales.global * products.short, Ahead::new(problem, chunk.first, n));
        let mut masked = masked;
        // SAFETY: as in `item`.
        unsafe {
            match fold {
                Fold::Rows => {
                    chunk.row_factors(scales, n);
                    masked |= weigh::<S>(chunk, (p, p_stride), (o, o_stride));
                }
                Fold::Channels => {
                    chunk.channel_factors(scales);
                    if !(0..dim).all(|d| (*scratch.factors.add(d)).is_finite()) {
                        return false;
                    }
                }
                Fold::Groups if !is_moderate(global) => return false,
                Fold::Groups => {}
            }
            for j in (0..n).step_by(pv_keys) {
                let taken = pv_keys.min(n - j);
                ahead.of_values::<S>(j, taken);
                if fold == Fold::Groups {
                    chunk.group_factors::<S>(scales, (j, taken));
                }
                let (codes, sizes) = (chunk.codes(j, taken, S::LANES), chunk.sizes(taken));
                let (p, o) = ((p.cast_const().add(j), p_stride), (o, o_stride));
                if !masked && !products.has_nan.is_some_and(|has_nan| has_nan(&codes, sizes)) {
                    (products.weighted)(&codes, sizes, p, o);
                    continue;
                }
                (products.numbers)(&codes, sizes, scratch.panel);
                let keys = Keys { first: scratch.panel.cast_const(), stride: dim as isize };
                if all_finite::<S, _>(&keys, taken, dim) {
                    weighted_sum::<S, _, false>(&keys, taken, rows, p, o, dim);
                } else {
                    weighted_sum_selecting::<S, _>(&keys, taken, rows, p, o, dim);
                }
            }
            for r in 0..rows {
                for d in 0..dim {
                    let o = o.add(r * o_stride + d);
                    match fold {
                        Fold::Rows => {}
                        Fold::Channels => *o *= *scratch.factors.add(d),
                        Fold::Groups => *o *= global,
                    }
                }
            }
        }
        true
    }
}

/// Multiplies weights with the factors of their keys; a key whose factor is extreme is added by way of its numbers, and masked. Answers
/// whether there was one.
#[inline(always)]
unsafe fn weigh<S: CodeVectors>(chunk: &CodesChunk<'_>, (p, p_stride): Out, o: Out) -> bool {
    let mut extreme = false;
    let (factors, n, rows) = (chunk.scratch.factors, chunk.n, chunk.problem.partition.rows);
    // SAFETY: as in `item`: rows of p are whole vectors; what lies behind the last key is masked.
    unsafe {
        for j in (0..n).filter(|&j| !is_moderate(*factors.add(j))) {
            let mut keys = None;
            for r in 0..rows {
                let p = p.add(r * p_stride + j);
                if !(*p).is_masked() {
                    let keys = *keys.get_or_insert_with(|| number_of(chunk, j));
                    weighted_sum::<S, _, false>(
                        &keys,
                        1,
                        1,
                        (p.cast_const(), p_stride),
                        (o.0.add(r * o.1), o.1),
                        chunk.dim,
                    );
                    *p = f32::MASKED;
                    extreme = true;
                }
            }
        }
        for r in 0..rows {
            for j in (0..n).step_by(S::LANES) {
                let at = p.add(r * p_stride + j);
                let x = S::load(at);
                // Of all weights −0 alone has a negative inverse.
                let masked = S::lt(S::div(S::splat(1.0), x), S::splat(0.0));
                // A weight of 0 times a negative factor would be a masked one: added to 0 it is 0.
                let weight = S::add(S::mul(x, S::load(factors.add(j))), S::splat(0.0));
                S::store(at, S::select(masked, x, weight));
            }
        }
    }
    extreme
}
