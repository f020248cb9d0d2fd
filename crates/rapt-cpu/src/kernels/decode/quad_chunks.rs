//! Scores and outputs of a chunk of keys that are codes as quads of bytes: what is done once for it around the products of `code_quads`.
//!
//! ```text
//! scores    q to digits → dots of blocks of keys → shifts, factors → numbers where a score is not what f32 gives
//! outputs   weights to digits, a block of keys at a time → sums of codes, or of numbers where digits do not do → shifts, factors onto o
//! ```
//! A query becomes fixed point against its largest number, and so do the weights of a row in a block of keys: each is off by at most 2⁻²³ of that
//! one, as sums of f32 are. A query of which many numbers are small beside the largest ([`is_even`]), or which is not finite, goes through
//! numbers of f32 instead; that depends on the query alone. Deliberately absent: what a code is (`kernels/code_quads`); values whose groups have
//! factors, which are multiplied in f32 (`codes`): of each weight there would be one for each group.

use std::mem::MaybeUninit;

use rapt_core::DType;

use super::ahead::Ahead;
use super::code_quads::{dots_of, weighted_of};
use super::codes::recompute;
use super::pair_chunks::{finish_scores, is_in_place, keys_ahead, read_factors, spans_of, sum_of_query};
use super::products::{all_finite, weighted_sum, weighted_sum_selecting};
use super::rows::Keys;
use crate::kernels::code_quads::{CodeQuads, E2m1Quads, Int4Quads, Int8Quads, MOST_FIXED, QuadCode, Uint8Quads};
use crate::kernels::codes::{CodeVectors, MOST, all_are_moderate, is_moderate};
use crate::kernels::simd::Part;
use crate::problem::{
    CodeProducts, CodesChunk, Fold, In, Out, QuadDots, QuadProducts, QuadQueries, QuadWeights, RowKind, Weights,
};
use crate::scratch::{BLOCK, DIGITS, SETS};

/// What part of a query's largest number is small, and one number in how many may be so: fixed point leaves less of small ones than f32 does,
/// which shows where keys are 0 where the query is large.
const SMALL: f32 = 1.0 / 1024.0;
const FEW: usize = 8;

/// Numbers whose largest is less are none for fixed point: units would leave f32.
const LEAST_QUERY: f32 = 8.673_617_4e-19;
const LEAST_WEIGHT: f32 = 8.271_806e-25;

/// What decode multiplies codes of a kind with by the dot of quads, beside what it multiplies them with otherwise.
pub(crate) fn quad_products<S: CodeQuads>(products: CodeProducts, kind: RowKind, fold: Fold) -> CodeProducts {
    fn of<S: CodeQuads, C: QuadCode<S>>(fold: Fold) -> QuadProducts {
        let dots: QuadDots = if fold == Fold::Groups { dots_of::<S, C, true> } else { dots_of::<S, C, false> };
        QuadProducts {
            dots,
            weighted: weighted_of::<S, C>,
            fold,
            planes: C::PLANES,
            bias: C::BIAS,
            times: C::TIMES,
            shift: C::SHIFT,
        }
    }
    let quads = match kind {
        RowKind::Int8 => of::<S, Int8Quads>(fold),
        RowKind::Uint8 => of::<S, Uint8Quads>(fold),
        RowKind::Int4 => of::<S, Int4Quads>(fold),
        RowKind::E2m1 => of::<S, E2m1Quads>(fold),
        RowKind::E4m3fn | RowKind::E5m2 | RowKind::F16 | RowKind::Bf16 => return products,
    };
    CodeProducts { scores: scores_of::<S>, outputs: outputs_of::<S>, quads: Some(quads), short: 1.0, ..products }
}

unsafe fn scores_of<S: CodeQuads>(chunk: &CodesChunk<'_>, s: Out) -> bool {
    // SAFETY: promised by the caller; so below.
    unsafe { S::apart_quads(Scores { chunk, s }) }
}

unsafe fn outputs_of<S: CodeQuads>(chunk: &CodesChunk<'_>, weights: &Weights) -> bool {
    // SAFETY: as above.
    unsafe { S::apart_quads(Outputs { chunk, weights }) }
}

/// Scores of a chunk.
struct Scores<'a> {
    chunk: &'a CodesChunk<'a>,
    s: Out,
}

impl<S: CodeQuads> Part<S> for Scores<'_> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let Scores { chunk, s: (s, s_stride) } = self;
        let CodesChunk { problem, products, n, dim, scratch, .. } = *chunk;
        let (rows, panel_keys) = (problem.partition.rows, problem.partition.panel_keys());
        let (Some(scales), Some(quads)) = (&chunk.source.scales, &products.quads) else { return false };
        let (fold, shift) = (quads.fold, quads.shift);
        let ahead = Ahead::new(problem, chunk.first, n);
        // SAFETY: as in `item`.
        unsafe {
            if !read_factors(chunk, scales, (fold, shift), |factor| factor.abs() <= MOST) {
                return false;
            }
            let factors = (fold == Fold::Channels).then(|| std::slice::from_raw_parts(scratch.factors, dim));
            let row_bytes = dim.div_ceil(chunk.source.shared);
            let spans = row_bytes.div_ceil(64);
            let sets = if fold == Fold::Groups { spans * SETS } else { 1 };
            let (q_stride, start_stride) = (spans * 4 * quads.planes * DIGITS * 64, sets * DIGITS * 64);
            for r in 0..rows {
                let q = chunk.q.0.add(r * chunk.q.1);
                let to = scratch.q.cast::<u8>().add(r * q_stride);
                let start = scratch.starts.cast::<u8>().add(r * start_stride);
                *scratch.units.add(r) = split_query::<S>(chunk, quads, (q, factors), (to, start));
            }
            // Rows that are read where they lie are asked for one by one, others a block at a time.
            let in_place = row_bytes.is_multiple_of(64) && is_in_place(chunk, n, row_bytes);
            let at_a_time = if in_place && fold != Fold::Groups { n } else { panel_keys };
            for j in (0..n).step_by(at_a_time) {
                let taken = at_a_time.min(n - j);
                if !in_place {
                    ahead.of_keys::<S>(j, taken);
                }
                let codes = spans_of::<S>(chunk, j, taken, row_bytes);
                if fold == Fold::Groups {
                    chunk.group_factors::<S>(scales, (j, taken));
                }
                let with = QuadQueries {
                    n: taken,
                    rows,
                    row_bytes,
                    dim,
                    chunk: scales.chunk,
                    ahead: if in_place { keys_ahead(row_bytes) * codes.stride } else { 0 },
                    q: (scratch.q.cast(), q_stride),
                    start: (scratch.starts.cast(), start_stride),
                    units: scratch.units,
                };
                (quads.dots)(&codes, &with, (s.add(j), s_stride));
                // Those of e4m3 are moderate but for NaN, which the score shows.
                let may_be_extreme = fold == Fold::Groups && scales.descale.dtype != DType::F8E4M3FN;
                if may_be_extreme && !all_are_moderate::<S>(codes.factors, taken * codes.per_row) {
                    for key in 0..taken {
                        let of_key = std::slice::from_raw_parts(codes.factors.add(key * codes.per_row), codes.per_row);
                        if !of_key.iter().all(|&factor| is_moderate(factor)) {
                            (0..rows).for_each(|r| *s.add(r * s_stride + j + key) = f32::NAN);
                        }
                    }
                }
            }
            let by_key = fold == Fold::Rows;
            let mut is_exact = !by_key || all_are_moderate::<S>(scratch.factors, n);
            for r in 0..rows {
                let (q, s) = (chunk.q.0.add(r * chunk.q.1), s.add(r * s_stride));
                let mut constant = 0.0;
                if shift != 0.0 {
                    let with = factors.map(|factors| (factors.as_ptr(), scratch.points.cast_const()));
                    constant = sum_of_query::<S>(q, dim, with, shift);
                }
                let factor = if fold == Fold::Groups { scales.global } else { 1.0 };
                is_exact &= finish_scores::<S>(chunk, s, by_key, (constant, factor));
            }
            if !is_exact {
                recompute::<S>(chunk, by_key, (s, s_stride));
            }
        }
        true
    }
}

/// One query, with the factors of its channels, to digits in the order of key vectors, and what sums of bytes begin with. Answers the unit of
/// its scores; NaN where it is not for fixed point.
#[inline(always)]
unsafe fn split_query<S: CodeQuads>(
    chunk: &CodesChunk<'_>,
    quads: &QuadProducts,
    (q, factors): (*const f32, Option<&[f32]>),
    (to, start): (*mut u8, *mut u8),
) -> f32 {
    let (dim, natural, planes) = (chunk.dim, chunk.scratch.natural, quads.planes);
    let spans = dim.div_ceil(64 * planes);
    let len = spans * 64 * planes;
    // SAFETY: as in `item`: a row of q; `natural` is a row of whole spans, and so is what is written.
    unsafe {
        match factors {
            None => std::ptr::copy_nonoverlapping(q, natural, dim),
            Some(factors) => (0..dim).for_each(|d| *natural.add(d) = *q.add(d) * factors[d]),
        }
        (dim..len).for_each(|d| *natural.add(d) = 0.0);
        let (mut most, mut wrong) = (S::splat(0.0), S::splat(0.0));
        for d in (0..len).step_by(S::LANES) {
            let x = S::load(natural.add(d));
            // 0 · x is 0 for finite x and NaN otherwise.
            (most, wrong) = (S::max(S::abs(x), most), S::fma(x, S::splat(0.0), wrong));
        }
        let (most, wrong) = (S::largest(most), S::reduce_add(wrong));
        let fits = !wrong.is_nan() && (most == 0.0 || most >= LEAST_QUERY) && is_even::<S>(natural, (len, dim), most);
        // The power of two below the largest is 2²¹ units: numbers of few bits are exact, and none is more than 2²².
        let power = if most == 0.0 { 0 } else { (most.to_bits() >> 23) as i32 - 127 };
        let scale = S::splat(if fits { 2f32.powi(21 - power) } else { 0.0 });
        let bias = S::splat_byte(quads.bias);
        let (groups, sets) = (quads.fold == Fold::Groups, if quads.planes == 2 { SETS } else { 1 });
        let mut of_bias = [S::splat_i32(0); DIGITS];
        for span in 0..spans {
            let mut bytes = [[0u8; 128]; DIGITS];
            for v in 0..4 * planes {
                let x = S::load(natural.add((span * 4 * planes + v) * S::LANES));
                let digits = S::digits(S::round(S::mul(x, scale)));
                for (d, bytes) in bytes.iter_mut().enumerate() {
                    S::store_byte_of_lanes(bytes.as_mut_ptr().add(v * S::LANES), digits, d);
                }
            }
            for set in 0..sets {
                if groups {
                    of_bias = [S::splat_i32(0); DIGITS];
                }
                for (d, bytes) in bytes.iter().enumerate() {
                    let mut of_planes = [S::load_bytes(bytes.as_ptr()); 2];
                    if planes == 2 {
                        of_planes = S::even_and_odd(of_planes[0], S::load_bytes(bytes.as_ptr().add(64)));
                    }
                    for i in 4 / sets * set..4 / sets * (set + 1) {
                        for (plane, &of_plane) in of_planes.iter().enumerate().take(planes) {
                            let word = S::splat_word(of_plane, i);
                            S::store_bytes(to.add((((span * 4 + i) * planes + plane) * DIGITS + d) * 64), word);
                            of_bias[d] = S::dot_quads(bias, word, of_bias[d]);
                        }
                    }
                }
                if groups {
                    store_starts::<S>(of_bias, start.add((span * SETS + set) * DIGITS * 64));
                }
            }
        }
        if !groups {
            store_starts::<S>(of_bias, start);
        }
        if fits { 2f32.powi(power - 21) / quads.times } else { f32::NAN }
    }
}

/// Whether no more than few of a query's numbers are small beside the largest; those that are 0 are exact.
#[inline(always)]
unsafe fn is_even<S: CodeVectors>(x: *const f32, (len, dim): (usize, usize), most: f32) -> bool {
    // SAFETY: the caller vouches for len numbers, a multiple of lanes.
    unsafe {
        let (zero, one, bound) = (S::splat(0.0), S::splat(1.0), S::splat(most * SMALL));
        let mut small = zero;
        for d in (0..len).step_by(S::LANES) {
            let x = S::abs(S::load(x.add(d)));
            let of_nonzero = S::select(S::eq(x, zero), zero, one);
            small = S::add(small, S::select(S::lt(x, bound), of_nonzero, zero));
        }
        S::reduce_add(small) * FEW as f32 <= dim as f32
    }
}

/// What sums begin with that are too large by `of_bias`.
#[inline(always)]
unsafe fn store_starts<S: CodeQuads>(of_bias: [S::I; DIGITS], to: *mut u8) {
    for (d, of_bias) in of_bias.into_iter().enumerate() {
        // SAFETY: the caller vouches for as many vectors.
        unsafe { S::store_bytes(to.add(64 * d), S::negate(of_bias)) };
    }
}

/// What the values of a chunk add to the rows of `o`.
struct Outputs<'a> {
    chunk: &'a CodesChunk<'a>,
    weights: &'a Weights,
}

impl<S: CodeQuads> Part<S> for Outputs<'_> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let Outputs { chunk, weights: &Weights { masked, p: (p, p_stride), o: (o, o_stride) } } = self;
        let CodesChunk { problem, products, n, dim, scratch, .. } = *chunk;
        let (rows, panel_keys) = (problem.partition.rows, problem.partition.panel_keys());
        let (Some(scales), Some(quads)) = (&chunk.source.scales, &products.quads) else { return false };
        let fold = quads.fold;
        let ahead = Ahead::new(problem, chunk.first, n);
        let row_bytes = dim.div_ceil(chunk.source.shared);
        let sums_stride = row_bytes.div_ceil(64) * 64 * quads.planes;
        // SAFETY: as in `item`.
        unsafe {
            if !read_factors(chunk, scales, (fold, quads.shift), f32::is_finite) {
                return false;
            }
            if fold == Fold::Rows {
                // Weights are taken a vector at a time.
                (n..n.next_multiple_of(S::LANES)).for_each(|j| *scratch.factors.add(j) = 0.0);
            }
            let sums = scratch.sums;
            for at in (0..rows * sums_stride).step_by(S::LANES) {
                S::store(sums.add(at), S::splat(0.0));
            }
            for r in 0..rows {
                S::store(scratch.p_sums.add(r * S::LANES), S::splat(0.0));
            }
            let in_place = row_bytes.is_multiple_of(64) && is_in_place(chunk, n, row_bytes);
            for j in (0..n).step_by(BLOCK) {
                let taken = BLOCK.min(n - j);
                if !in_place {
                    ahead.of_values::<S>(j, taken);
                }
                let through_numbers = fold == Fold::Rows && !all_are_moderate::<S>(scratch.factors.add(j), taken);
                if through_numbers {
                    for at in (j..j + taken).step_by(panel_keys) {
                        let of_panel = (at, panel_keys.min(j + taken - at));
                        numbers::<S>(chunk, masked, of_panel, (p.cast_const().add(at), p_stride), (o, o_stride));
                    }
                    continue;
                }
                let codes = spans_of::<S>(chunk, j, taken, row_bytes);
                let p = (p.cast_const().add(j), p_stride);
                let stride = split_weights::<S>(chunk, quads, p, (j, taken));
                let with = QuadWeights {
                    n: taken,
                    rows,
                    row_bytes,
                    ahead: if in_place { BLOCK as isize * codes.stride } else { 0 },
                    weights: (scratch.weights.cast(), stride),
                    start: scratch.starts.cast(),
                    units: scratch.units,
                };
                (quads.weighted)(&codes, &with, (sums, sums_stride));
            }
            for r in 0..rows {
                add_sums::<S>(chunk, r, o.add(r * o_stride));
            }
        }
        true
    }
}

/// What keys `j..j + taken` add to `o` as numbers of f32.
#[inline(always)]
unsafe fn numbers<S: CodeVectors>(chunk: &CodesChunk<'_>, masked: bool, (j, taken): (usize, usize), p: In, o: Out) {
    let ((batch, head, j0), dim, rows) = (chunk.first, chunk.dim, chunk.problem.partition.rows);
    // SAFETY: as in `item`: keys of the chunk, no more than the panel holds.
    unsafe {
        let keys = Keys::read(chunk.source, (batch, head, j0 + j), taken, dim, chunk.scratch.panel);
        if !masked || all_finite::<S, _>(&keys, taken, dim) {
            weighted_sum::<S, _, true>(&keys, taken, rows, p, o, dim);
        } else {
            weighted_sum_selecting::<S, _>(&keys, taken, rows, p, o, dim);
        }
    }
}

/// The unit of numbers of which none is more than `most`, and how many units 1 is. NaN for the unit where `wrong` is.
#[inline(always)]
fn units_of(most: f32, wrong: f32) -> (f32, f32) {
    let most = most.max(LEAST_WEIGHT);
    (most / MOST_FIXED + wrong, MOST_FIXED / most)
}

/// Numbers of a block's weights, before they become digits.
#[repr(align(64))]
struct Numbers<const N: usize>([MaybeUninit<f32>; N]);

/// Weights of keys `j..j + taken`, with the factors of keys where those have some, as digits, and what sums begin with. Answers the bytes of
/// a row.
#[inline(always)]
unsafe fn split_weights<S: CodeQuads>(
    chunk: &CodesChunk<'_>,
    quads: &QuadProducts,
    (p, p_stride): In,
    (j, taken): (usize, usize),
) -> usize {
    let (scratch, rows, by_key) = (chunk.scratch, chunk.problem.partition.rows, quads.fold == Fold::Rows);
    let (padded, stride) = (taken.next_multiple_of(S::LANES), DIGITS * BLOCK);
    let has_points = by_key && quads.shift != 0.0;
    // SAFETY: as in `item`: rows of p are whole vectors, and numbers are written before they are read.
    unsafe {
        let mut points = Numbers::<BLOCK>([MaybeUninit::uninit(); BLOCK]);
        let points = points.0.as_mut_ptr().cast::<[u8; 4]>();
        if has_points {
            for at in 0..padded {
                *points.add(at) = [(quads.shift - *scratch.points.add(j + at)) as u8; 4];
            }
        }
        let mut weights = Numbers::<BLOCK>([MaybeUninit::uninit(); BLOCK]);
        let weights = weights.0.as_mut_ptr().cast::<f32>();
        for r in 0..rows {
            let p = p.add(r * p_stride);
            let (mut most, mut wrong) = (S::splat(0.0), S::splat(0.0));
            for at in (0..padded).step_by(S::LANES) {
                let mut x = S::load(p.add(at));
                if by_key {
                    x = S::mul(x, S::load(scratch.factors.add(j + at)));
                }
                // 0 · x is 0 for finite x and NaN otherwise.
                (most, wrong) = (S::max(S::abs(x), most), S::fma(x, S::splat(0.0), wrong));
                S::store(weights.add(at), x);
            }
            let (unit, scale) = units_of(S::largest(most), S::reduce_add(wrong));
            let to = scratch.weights.cast::<u8>().add(r * stride);
            let (mut sum, scale) = (S::load(scratch.p_sums.add(r * S::LANES)), S::splat(scale));
            let mut of_points = [S::splat_i32(0); DIGITS];
            for at in (0..padded).step_by(S::LANES) {
                let x = S::round(S::mul(S::load(weights.add(at)), scale));
                if !by_key {
                    sum = S::fma(S::to_f32(x), S::splat(unit), sum);
                }
                let digits = S::digits(x);
                let mut point = S::splat_byte(quads.bias);
                if has_points {
                    point = S::load_bytes(points.add(at).cast());
                }
                for (d, of_points) in of_points.iter_mut().enumerate() {
                    *of_points = S::dot_quads(point, S::keep_byte(digits, d), *of_points);
                    S::store_byte_of_lanes(to.add(d * BLOCK + at), digits, d);
                }
            }
            S::store(scratch.p_sums.add(r * S::LANES), sum);
            for (d, of_points) in of_points.into_iter().enumerate() {
                *scratch.starts.cast::<i32>().add(r * DIGITS + d) = S::sum_i32(of_points).wrapping_neg();
            }
            *scratch.units.add(r) = unit / quads.times;
        }
    }
    stride
}

/// What row `r` of the sums adds to its row of `o`.
#[inline(always)]
unsafe fn add_sums<S: CodeQuads>(chunk: &CodesChunk<'_>, r: usize, o: *mut f32) {
    let CodesChunk { products, dim, scratch, .. } = *chunk;
    let Some(quads) = &products.quads else { return };
    let spans = dim.div_ceil(64 * quads.planes);
    let sums_stride = spans * 64 * quads.planes;
    // SAFETY: as in `item`.
    unsafe {
        let (sums, natural) = (scratch.sums.add(r * sums_stride), scratch.natural_sums);
        for vector in 0..spans * quads.planes * 4 {
            let (span, plane, m) = (vector / 4 / quads.planes, vector / 4 % quads.planes, vector % 4);
            let to = natural.add((span * 64 + 4 * m) * quads.planes + plane);
            for lane in 0..16 {
                *to.add((lane / 4 * 16 + lane % 4) * quads.planes) = *sums.add(vector * 16 + lane);
            }
        }
        let of_shift = S::reduce_add(S::load(scratch.p_sums.add(r * S::LANES)));
        for d in 0..dim {
            let (x, o) = (*natural.add(d), o.add(d));
            *o += match quads.fold {
                Fold::Channels => {
                    let shift = if quads.shift == 0.0 { 0.0 } else { quads.shift - *scratch.points.add(d) };
                    (x + shift * of_shift) * *scratch.factors.add(d)
                }
                Fold::Rows | Fold::Groups => x,
            };
        }
    }
}
