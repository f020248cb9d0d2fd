//! K and V of forward that are codes, as the lanes of pairs that bf16 has: codes are exact in bf16, and so is a code of 4 or 8 bits with
//! the scale of an MX or NV block. What else multiplies them goes elsewhere:
//!
//! ```text
//! factor f of a key        s = (q · c) · f                     o = Σ bf16(w) · (±c) / Σ (w / |f|)   w = p · |f| = 2^(x + log2|f|)
//! factors of the output    only of V: of channels, or of all   o = f ∘ Σ bf16(p) · c / Σ p
//! ```
//! The sign of f goes into c. A block of keys whose factors leave the range in which that is the same, or whose codes are infinite, goes through numbers of f32
//! ([`Source::read`]), and so does a score that is not finite. Deliberately absent: zero points, channels of K, other groups: their numbers
//! take more bits than bf16 has.

use std::marker::PhantomData;

use half::bf16;
use rapt_core::swizzle::along_row;
use rapt_core::{DType, codes};

use super::blocks::{BlockProducts, Coded, Formed, KeyProduct, ValueProduct, by_rows};
use super::code_pairs::CodePairs;
use super::codes::{E2m1, E4m3fn, E5m2, Element, Int4, Int8, all_are_moderate, is_moderate};
use super::pairs::{Bf16Pairs, Paired};
use super::simd::{Part, Simd};
use crate::problem::{CodePanel, PackCodes, RowKind, Source};

/// What makes lanes of codes of a kind; `None` where bf16 does not hold them.
pub(crate) fn packer<S: CodePairs>(kind: RowKind) -> Option<PackCodes> {
    match kind {
        RowKind::Int8 => Some(pack::<S, Int8>),
        RowKind::Int4 => Some(pack::<S, Int4>),
        RowKind::E4m3fn => Some(pack::<S, E4m3fn>),
        RowKind::E5m2 => Some(pack::<S, E5m2>),
        RowKind::E2m1 => Some(pack::<S, E2m1>),
        RowKind::Uint8 | RowKind::F16 | RowKind::Bf16 => None,
    }
}

/// See [`PackCodes`].
unsafe fn pack<S: CodePairs, C: Element<S>>(source: &Source, panel: &CodePanel) -> bool {
    // SAFETY: promised by the caller.
    unsafe { S::apart_codes(Pack { source, panel, code: PhantomData::<C> }) }
}

struct Pack<'a, C> {
    source: &'a Source,
    panel: &'a CodePanel,
    code: PhantomData<C>,
}

impl<S: CodePairs, C: Element<S>> Part<S> for Pack<'_, C> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let Pack { source: source @ &Source { rows, scales, .. }, panel, .. } = self;
        let CodePanel { first: [batch, head, j0], n, dim, of_values, by_output, per_log2, to, factors, inverses } =
            *panel;
        let Some(scales) = scales else { return true };
        let has_blocks = scales.descale.dtype != DType::F32;
        let row = |j: usize| {
            let at = [batch, head, j0 + j, 0];
            CodesOfKey::<C> {
                from: rows.at_key(at),
                step: rows.strides[3] * rows.size,
                scale: has_blocks.then(|| scales.at(at)),
                scale_step: scales.descale.strides[3] * scales.descale.size,
                is_swizzled: scales.swizzled.is_some(),
                is_power: scales.descale.dtype == DType::F8E8M0FNU,
                chunk: scales.chunk,
                code: PhantomData,
            }
        };
        // SAFETY: promised by the caller: keys of the tensor, and a panel that holds them.
        unsafe {
            let mut by_numbers = by_output && !source.output_factors([batch, head], dim, None);
            if !factors.is_null() {
                for j in 0..n {
                    let factor = scales.descale.at_key([batch, head, j0 + j, 0]);
                    *factors.add(j) = if has_blocks { scales.global } else { factor.cast::<f32>().read() };
                }
                by_numbers |= !all_are_moderate::<S>(factors, n);
                by_numbers |= of_values && (per_log2 == 0.0 || !is_moderate(per_log2));
            }
            if !of_values {
                let stride = dim.div_ceil(2);
                for j in 0..n {
                    by_numbers |= row(j).to_words::<S>(dim, to.add(j * stride));
                }
                return by_numbers;
            }
            // A factor of 0 goes into the code too: a weight times it would sum to nothing.
            let sign = |j: usize| match factors.is_null() {
                true => 1.0,
                false if *factors.add(j) == 0.0 => 0.0,
                false => 1f32.copysign(*factors.add(j)),
            };
            for (at, j) in (0..n).step_by(2).enumerate() {
                let second = (j + 1 < n).then(|| (row(j + 1), sign(j + 1)));
                by_numbers |= weave::<S, C>((row(j), sign(j)), second.as_ref(), dim, to.add(at * dim));
            }
            if !factors.is_null() {
                for j in 0..n {
                    let factor = (*factors.add(j)).abs();
                    let factor = if by_numbers || factor == 0.0 { 1.0 } else { factor };
                    *factors.add(j) = factor.log2() * per_log2;
                    *inverses.add(j) = 1.0 / factor;
                }
            }
            by_numbers
        }
    }
}

/// The codes of one key, and the scales of its blocks.
struct CodesOfKey<C> {
    from: *const u8,
    /// Bytes from element to element, or from pair to pair.
    step: isize,
    scale: Option<*const u8>,
    scale_step: isize,
    is_swizzled: bool,
    /// Whether scales are powers of two; else they are e4m3.
    is_power: bool,
    /// Elements of a block.
    chunk: usize,
    code: PhantomData<C>,
}

impl<C> CodesOfKey<C> {
    /// What multiplies element `d` before it is one of bf16; and whether that is more or less than bf16 may hold.
    #[inline(always)]
    unsafe fn scale_of(&self, d: usize, is_extreme: &mut bool) -> f32 {
        let Some(scale) = self.scale else { return 1.0 };
        let block = d / self.chunk;
        let place = if self.is_swizzled { along_row(block) } else { block };
        // SAFETY: a scale of the key.
        let byte = unsafe { *scale.wrapping_offset(place as isize * self.scale_step) };
        if !self.is_power {
            return codes::E4M3FN_VALUES[usize::from(byte)];
        }
        let factor = codes::from_e8m0(byte) as f32;
        *is_extreme |= !factor.is_nan() && !is_moderate(factor);
        factor
    }

    /// Numbers `d..d + LANES`, which share a scale and follow one another.
    #[inline(always)]
    unsafe fn vector<S: CodePairs>(&self, d: usize, is_extreme: &mut bool) -> S::V
    where
        C: Element<S>,
    {
        // SAFETY: promised by the caller.
        unsafe {
            let codes = C::load(self.from.wrapping_add(d / C::SHARED));
            if self.scale.is_none() { codes } else { S::mul(codes, S::splat(self.scale_of(d, is_extreme))) }
        }
    }

    #[inline(always)]
    unsafe fn number<S: CodePairs>(&self, d: usize, is_extreme: &mut bool) -> f32
    where
        C: Element<S>,
    {
        let ptr = self.from.wrapping_offset((d / C::SHARED) as isize * self.step);
        // SAFETY: an element of the key.
        unsafe { C::number(ptr, d % C::SHARED) * self.scale_of(d, is_extreme) }
    }

    /// Elements that vectors may load, of `dim`.
    #[inline(always)]
    fn whole(&self, dim: usize, vector: usize) -> usize {
        if self.step == 1 { dim / vector * vector } else { 0 }
    }

    /// `dim` numbers to consecutive bf16, and a 0 beside an odd one.
    #[inline(always)]
    unsafe fn to_words<S: CodePairs>(&self, dim: usize, to: *mut f32) -> bool
    where
        C: Element<S>,
    {
        let (whole, mut is_extreme) = (self.whole(dim, 2 * S::LANES), false);
        // SAFETY: promised by the caller.
        unsafe {
            for d in (0..whole).step_by(2 * S::LANES) {
                let both = [self.vector::<S>(d, &mut is_extreme), self.vector::<S>(d + S::LANES, &mut is_extreme)];
                S::store(to.add(d / 2), S::narrow(both[0], both[1]));
            }
            let words = to.cast::<u16>();
            for d in whole..dim {
                *words.add(d) = bf16::from_f32(self.number::<S>(d, &mut is_extreme)).to_bits();
            }
            if dim % 2 == 1 {
                *words.add(dim) = 0;
            }
        }
        is_extreme
    }
}

/// Two keys of `dim` numbers, each with a sign, to one row of lanes; zeros in place of a second one that is not there.
#[inline(always)]
unsafe fn weave<S: CodePairs, C: Element<S>>(
    (low, of_low): (CodesOfKey<C>, f32),
    high: Option<&(CodesOfKey<C>, f32)>,
    dim: usize,
    to: *mut f32,
) -> bool {
    let (whole, mut is_extreme) = (low.whole(dim, S::LANES), false);
    // SAFETY: promised by the caller.
    unsafe {
        let mut seen = S::splat(0.0);
        for d in (0..whole).step_by(S::LANES) {
            let a = S::mul(low.vector::<S>(d, &mut is_extreme), S::splat(of_low));
            let mut b = S::splat(0.0);
            if let Some((high, of_high)) = high {
                b = S::mul(high.vector::<S>(d, &mut is_extreme), S::splat(*of_high));
            }
            if C::HAS_INFINITE {
                // 0 · x is 0 for finite x and NaN otherwise.
                seen = S::fma(S::add(S::abs(a), S::abs(b)), S::splat(0.0), seen);
            }
            S::store(to.add(d), S::pair(a, b));
        }
        for d in whole..dim {
            let a = low.number::<S>(d, &mut is_extreme) * of_low;
            let mut b = 0.0;
            if let Some((high, of_high)) = high {
                b = high.number::<S>(d, &mut is_extreme) * of_high;
            }
            is_extreme |= C::HAS_INFINITE && !(a.is_finite() && b.is_finite());
            let [a, b] = [a, b].map(|x| u32::from(bf16::from_f32(x).to_bits()));
            to.add(d).cast::<u32>().write(a | b << 16);
        }
        is_extreme || C::HAS_INFINITE && S::reduce_add(seen).is_nan()
    }
}

/// Scores of lanes to scores: with the factors of their keys, and by way of numbers where that is not what f32 gives.
struct ScaleScores<'a, const V: usize> {
    coded: &'a Coded<'a>,
    product: KeyProduct<f32>,
}

impl<S: Bf16Pairs, const V: usize> Part<S> for ScaleScores<'_, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let ScaleScores { coded, product: KeyProduct { keys, dim, q_t, s, .. } } = self;
        // SAFETY: s has a row of V vectors for each key, q_t one for each pair of elements.
        unsafe {
            let zero = S::splat(0.0);
            if !coded.by_numbers {
                let mut wrong = [zero; V];
                for j in 0..keys {
                    let factor = S::splat(*coded.factors.add(j));
                    for (v, wrong) in wrong.iter_mut().enumerate() {
                        let at = s.add((j * V + v) * S::LANES);
                        let x = S::mul(S::load(at), factor);
                        // 0 · x is 0 for finite x and NaN otherwise.
                        *wrong = S::fma(x, zero, *wrong);
                        S::store(at, x);
                    }
                }
                let mut all = wrong[0];
                for &wrong in &wrong[1..] {
                    all = S::add(all, wrong);
                }
                if !S::reduce_add(all).is_nan() {
                    return;
                }
            }
            for j in 0..keys {
                let k = coded.numbers(j);
                for v in 0..V {
                    let mut x = zero;
                    for t in 0..dim.div_ceil(2) {
                        let [low, high] = S::split(S::load(q_t.add((t * V + v) * S::LANES)));
                        x = S::fma(low, S::splat(*k.add(2 * t)), x);
                        if 2 * t + 1 < dim {
                            x = S::fma(high, S::splat(*k.add(2 * t + 1)), x);
                        }
                    }
                    let at = s.add((j * V + v) * S::LANES);
                    if !coded.by_numbers {
                        let old = S::load(at);
                        x = S::select(S::eq(S::mul(old, zero), zero), old, x);
                    }
                    S::store(at, x);
                }
            }
        }
    }
}

/// `O = O · f + P · V` by way of the numbers of V.
struct AddNumbers<'a, S: Simd, const V: usize> {
    coded: &'a Coded<'a>,
    product: ValueProduct<'a, S, V>,
}

impl<S: Bf16Pairs, const V: usize> Part<S> for AddNumbers<'_, S, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let AddNumbers { coded, product: ValueProduct { keys, dim, p, acc_o, factors, .. } } = self;
        // SAFETY: p has a row of V vectors for each pair of keys, acc_o one for each element.
        unsafe {
            let zero = S::splat(0.0);
            for d in 0..dim {
                for (v, &factor) in factors.iter().enumerate() {
                    let o = acc_o.add((d * V + v) * S::LANES);
                    S::store(o, S::mul(S::load(o), factor));
                }
            }
            for j in 0..keys {
                let numbers = coded.numbers(j);
                for v in 0..V {
                    let p = S::split(S::load(p.add((j / 2 * V + v) * S::LANES)))[j % 2];
                    // Of all weights −0 alone has a negative inverse.
                    let masked = S::lt(S::div(S::splat(1.0), p), zero);
                    for d in 0..dim {
                        let o = acc_o.add((d * V + v) * S::LANES);
                        let old = S::load(o);
                        S::store(o, S::select(masked, old, S::fma(p, S::splat(*numbers.add(d)), old)));
                    }
                }
            }
        }
    }
}

impl<S: Bf16Pairs> BlockProducts<S> for Paired {
    type Beside = Formed;
    const OF_CODES: bool = true;
    unsafe fn scale_scores<const V: usize>(coded: &Coded<'_>, product: KeyProduct<f32>) {
        // SAFETY: promised by the caller; so below.
        unsafe { S::apart(ScaleScores::<V> { coded, product }) }
    }
    unsafe fn add_numbers<const V: usize>(coded: &Coded<'_>, product: ValueProduct<'_, S, V>) {
        // SAFETY: as above.
        unsafe { S::apart(AddNumbers { coded, product }) }
    }
    unsafe fn multiply<const V: usize>(
        keys: Option<KeyProduct<S::Elem>>,
        values: Option<ValueProduct<'_, S, V>>,
    ) -> Formed {
        // SAFETY: promised by the caller.
        unsafe { by_rows::<S, Paired, V>(keys, values) }
    }
}
