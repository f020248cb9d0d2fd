//! Scores and outputs of a chunk of keys that are codes as pairs of bf16: what is done once for it around the products of `code_pairs`.
//!
//! ```text
//! scores    q to pairs → dots of blocks of keys → shifts, factors → numbers where a score is not what f32 gives
//! outputs   p to pairs, of two vectors of keys at a time → sums of codes, or of numbers where pairs do not do → shifts, factors onto o
//! ```
//! The formulas are in `code_pairs`. Deliberately absent: what a code is (`kernels/code_pairs`).

use half::bf16;
use rapt_core::DType;

use super::ahead::Ahead;
use super::code_pairs::{RUN, TWO_VECTORS, dots_of, has_non_finite_of, weighted_of};
use super::codes::recompute;
use super::products::{all_finite, weighted_sum, weighted_sum_selecting};
use super::rows::Keys;
use crate::kernels::code_pairs::{
    CodePairs, E2m1Pairs, E4m3fnPairs, E5m2Pairs, Int4Pairs, Int8Pairs, PairCode, Uint8Pairs,
};
use crate::kernels::codes::{CodeVectors, MOST, all_are_moderate, is_moderate};
use crate::kernels::simd::Part;
use crate::problem::{
    CodeProducts, CodeRows, CodesChunk, Fold, In, Out, PairDots, PairProducts, PairQueries, PairSums, PairWeights,
    RowKind, Scales, Weights,
};

/// Bytes between a row that is read and one that is asked for: 2048 took 0.80 to 0.95 of the time of none on two threads, 8192 0.9 to 1.05
/// (Zen 4, 2026-11).
const AHEAD_BYTES: usize = 2048;

/// What decode multiplies codes of a kind with by the dot of pairs, beside what it multiplies them with otherwise.
pub(crate) fn pair_products<S: CodePairs>(products: CodeProducts, kind: RowKind, fold: Fold) -> CodeProducts {
    fn of<S: CodePairs, C: PairCode<S>>(fold: Fold) -> PairProducts {
        let (dots, weighted): (PairDots, PairSums) = match fold {
            Fold::Rows => (dots_of::<S, C, 1, false>, weighted_of::<S, C, false>),
            Fold::Channels => (dots_of::<S, C, 2, false>, weighted_of::<S, C, false>),
            Fold::Groups => (dots_of::<S, C, 1, true>, weighted_of::<S, C, true>),
        };
        PairProducts {
            fold,
            dots,
            weighted,
            has_non_finite: has_non_finite_of::<S, C>,
            has_infinite: C::HAS_INFINITE,
            span: C::SPAN,
            shift: C::SHIFT,
        }
    }
    let pairs = match kind {
        RowKind::Int8 => of::<S, Int8Pairs>(fold),
        RowKind::Uint8 => of::<S, Uint8Pairs>(fold),
        RowKind::Int4 => of::<S, Int4Pairs>(fold),
        RowKind::E4m3fn => of::<S, E4m3fnPairs>(fold),
        RowKind::E5m2 => of::<S, E5m2Pairs>(fold),
        RowKind::E2m1 => of::<S, E2m1Pairs>(fold),
        RowKind::F16 | RowKind::Bf16 => return products,
    };
    CodeProducts { scores: scores_of::<S>, outputs: outputs_of::<S>, pairs: Some(pairs), short: 1.0, ..products }
}

/// Codes of keys `j..j + n` of a chunk as spans: where they lie if rows are whole spans that follow a stride, else gathered beside zeros.
#[inline(always)]
pub(super) unsafe fn spans_of<S: CodeVectors>(
    chunk: &CodesChunk<'_>,
    j: usize,
    n: usize,
    row_bytes: usize,
) -> CodeRows {
    // SAFETY: keys of the chunk; the panel has room for as many as are taken at a time.
    unsafe {
        if row_bytes.is_multiple_of(64) {
            return chunk.codes(j, n, S::LANES);
        }
        let ((batch, head, j0), rows, stride) = (chunk.first, &chunk.source.rows, row_bytes.next_multiple_of(64));
        for key in 0..n {
            let from = rows.at_key([batch, head, j0 + j + key, 0]);
            let to = chunk.scratch.gathered.add(key * stride);
            if rows.strides[3] == 1 {
                std::ptr::copy_nonoverlapping(from, to, row_bytes);
            } else {
                (0..row_bytes).for_each(|at| *to.add(at) = *from.wrapping_offset(at as isize * rows.strides[3]));
            }
            to.add(row_bytes).write_bytes(0, stride - row_bytes);
        }
        let codes = CodeRows { first: chunk.scratch.gathered, stride: stride as isize, ..CodeRows::NONE };
        chunk.with_factors(codes, S::LANES)
    }
}

/// Whether the codes of a chunk of `n` keys follow one stride.
pub(super) fn is_in_place(chunk: &CodesChunk<'_>, n: usize, row_bytes: usize) -> bool {
    Keys::<u8>::in_place(&chunk.source.rows, chunk.first, n, row_bytes).is_some()
}

/// Keys between one that is read and one that is asked for.
pub(super) fn keys_ahead(row_bytes: usize) -> isize {
    (AHEAD_BYTES / row_bytes).max(1) as isize
}

unsafe fn scores_of<S: CodePairs>(chunk: &CodesChunk<'_>, s: Out) -> bool {
    // SAFETY: promised by the caller; so below.
    unsafe { S::apart_codes(Scores { chunk, s }) }
}

unsafe fn outputs_of<S: CodePairs>(chunk: &CodesChunk<'_>, weights: &Weights) -> bool {
    // SAFETY: as above.
    unsafe { S::apart_codes(Outputs { chunk, weights }) }
}

/// Scores of a chunk.
struct Scores<'a> {
    chunk: &'a CodesChunk<'a>,
    s: Out,
}

impl<S: CodePairs> Part<S> for Scores<'_> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let Scores { chunk, s: (s, s_stride) } = self;
        let CodesChunk { problem, products, n, dim, scratch, .. } = *chunk;
        let (rows, at_a_time) = (problem.partition.rows, problem.partition.panel_keys());
        let (Some(scales), Some(pairs)) = (&chunk.source.scales, &products.pairs) else { return false };
        let fold = pairs.fold;
        let ahead = Ahead::new(problem, chunk.first, n);
        // SAFETY: as in `item`.
        unsafe {
            if !read_factors(chunk, scales, (fold, pairs.shift), |factor| factor.abs() <= MOST) {
                return false;
            }
            let factors = (fold == Fold::Channels).then(|| std::slice::from_raw_parts(scratch.factors, dim));
            let (shift, planes) = (pairs.shift, 1 + usize::from(factors.is_some()));
            let q_stride = planes * dim.next_multiple_of(pairs.span) / 2;
            let sums_stride = dim.div_ceil(pairs.span) * S::LANES;
            for r in 0..rows {
                let q = chunk.q.0.add(r * chunk.q.1);
                let (to, natural) = (scratch.q.add(r * q_stride), scratch.natural);
                pair_query::<S>(q, factors, (dim, pairs.span), to, natural);
                if fold == Fold::Groups && shift != 0.0 {
                    sum_lanes::<S>(to, q_stride, pairs.span / 32, scratch.q_sums.add(r * sums_stride));
                }
            }
            let row_bytes = dim.div_ceil(chunk.source.shared);
            let q = (scratch.q.cast_const(), q_stride);
            let sums = (scratch.q_sums.cast_const(), sums_stride);
            // Rows that are read where they lie are asked for one by one, others a block at a time.
            let in_place = row_bytes.is_multiple_of(64) && is_in_place(chunk, n, row_bytes);
            let at_a_time = if in_place && fold != Fold::Groups { n } else { at_a_time };
            for j in (0..n).step_by(at_a_time) {
                let taken = at_a_time.min(n - j);
                if !in_place {
                    ahead.of_keys::<S>(j, taken);
                }
                let codes = spans_of::<S>(chunk, j, taken, row_bytes);
                if fold == Fold::Groups {
                    chunk.group_factors::<S>(scales, (j, taken));
                }
                let ahead = if in_place { keys_ahead(row_bytes) * codes.stride } else { 0 };
                let with = PairQueries { n: taken, rows, row_bytes, chunk: scales.chunk, dim, ahead, q, sums };
                (pairs.dots)(&codes, &with, (s.add(j), s_stride));
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
                if shift != 0.0 && fold != Fold::Groups {
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

/// Sums of a row to scores: what the elements of all keys are less than their codes, or of each key as much as its shift says, and the
/// factor. Whether all of them are finite.
#[inline(always)]
pub(super) unsafe fn finish_scores<S: CodeVectors>(
    chunk: &CodesChunk<'_>,
    s: *mut f32,
    by_key: bool,
    (constant, factor): (f32, f32),
) -> bool {
    let (n, scratch) = (chunk.n, chunk.scratch);
    // SAFETY: as in `item`: s has a place for each key of the chunk.
    unsafe {
        let (constant_of_all, factor_of_all) = (S::splat(constant), S::splat(factor));
        let mut wrong = S::splat(0.0);
        let mut is_exact = true;
        let mut j = 0;
        while j + S::LANES <= n {
            let (of_keys, mut factor) = (S::load(s.add(j)), factor_of_all);
            let mut x = S::add(of_keys, constant_of_all);
            if by_key {
                x = S::fma(constant_of_all, S::load(scratch.points.add(j)), of_keys);
                factor = S::load(scratch.factors.add(j));
            }
            let x = S::mul(x, factor);
            // 0 · x is 0 for finite x and NaN otherwise.
            wrong = S::fma(x, S::splat(0.0), wrong);
            S::store(s.add(j), x);
            j += S::LANES;
        }
        for j in j..n {
            let (shift, factor) =
                if by_key { (constant * *scratch.points.add(j), *scratch.factors.add(j)) } else { (constant, factor) };
            *s.add(j) = (*s.add(j) + shift) * factor;
            is_exact &= (*s.add(j)).is_finite();
        }
        is_exact && !S::reduce_add(wrong).is_nan()
    }
}

/// One query of `dim` numbers, with the factors of its channels, as pairs in the order of key vectors: one plane, or two whose sum it is
/// but for 16 bits.
#[inline(always)]
unsafe fn pair_query<S: CodePairs>(
    q: *const f32,
    factors: Option<&[f32]>,
    (dim, span): (usize, usize),
    to: *mut f32,
    natural: *mut f32,
) {
    let (vectors, planes) = (span / 32, 1 + usize::from(factors.is_some()));
    // SAFETY: as in `item`: a row of q, and places for whole spans of pairs; `natural` is two planes of a span.
    unsafe {
        for (of_span, first) in (0..dim).step_by(span).enumerate() {
            for v in 0..vectors {
                let d = first + v * TWO_VECTORS;
                let [a, b] = with_factors::<S>(q, factors.map(<[f32]>::as_ptr), (d, dim));
                let words = natural.add(v * S::LANES);
                if planes == 2 {
                    two::<S>([a, b], words, natural.add((4 + v) * S::LANES));
                } else {
                    S::store(words, S::narrow(a, b));
                }
            }
            for plane in 0..planes {
                let at = |v: usize| natural.cast_const().add((4 * plane + v) * S::LANES);
                let mut ordered = [S::splat(0.0); 4];
                if vectors == 2 {
                    [ordered[0], ordered[1]] = S::order_of_bytes([S::load(at(0)), S::load(at(1))]);
                } else {
                    ordered = S::order_of_halves([S::load(at(0)), S::load(at(1)), S::load(at(2)), S::load(at(3))]);
                }
                for (v, &lanes) in ordered.iter().enumerate().take(vectors) {
                    S::store(to.add(((of_span * vectors + v) * planes + plane) * S::LANES), lanes);
                }
            }
        }
    }
}

/// Numbers `at..at + 32` of `len`, each with its factor; 0 past the last.
#[inline(always)]
pub(super) unsafe fn with_factors<S: CodeVectors>(
    x: *const f32,
    factors: Option<*const f32>,
    (at, len): (usize, usize),
) -> [S::V; 2] {
    // SAFETY: the caller vouches for len numbers and factors.
    unsafe {
        if at + TWO_VECTORS <= len {
            let mut both = [S::load(x.add(at)), S::load(x.add(at + S::LANES))];
            if let Some(factors) = factors {
                let of = factors.add(at);
                both = [S::mul(both[0], S::load(of)), S::mul(both[1], S::load(of.add(S::LANES)))];
            }
            return both;
        }
        let mut rest = [0f32; TWO_VECTORS];
        for d in at..len {
            rest[d - at] = *x.add(d) * factors.map_or(1.0, |factors| *factors.add(d));
        }
        [S::load(rest.as_ptr()), S::load(rest.as_ptr().add(S::LANES))]
    }
}

/// `Σ q`, or `Σ q∘f · (shift − z)` with factors and zero points of channels.
#[inline(always)]
pub(super) unsafe fn sum_of_query<S: CodeVectors>(
    q: *const f32,
    dim: usize,
    channels: Option<(*const f32, *const f32)>,
    shift: f32,
) -> f32 {
    let whole = dim / S::LANES * S::LANES;
    // SAFETY: as in `item`.
    unsafe {
        let mut sum = S::splat(0.0);
        for d in (0..whole).step_by(S::LANES) {
            let mut x = S::load(q.add(d));
            if let Some((factors, points)) = channels {
                let of = S::mul(S::load(factors.add(d)), S::sub(S::splat(shift), S::load(points.add(d))));
                x = S::mul(x, of);
            }
            sum = S::add(sum, x);
        }
        let mut sum = S::reduce_add(sum);
        for d in whole..dim {
            sum += *q.add(d) * channels.map_or(1.0, |(factors, points)| *factors.add(d) * (shift - *points.add(d)));
        }
        sum
    }
}

/// For each span of a query in pairs the sums of its numbers lane by lane.
#[inline(always)]
unsafe fn sum_lanes<S: CodePairs>(q: *const f32, len: usize, vectors: usize, to: *mut f32) {
    for (span, at) in (0..len).step_by(vectors * S::LANES).enumerate() {
        // SAFETY: as of the caller.
        unsafe {
            let mut sum = S::splat(0.0);
            for v in 0..vectors {
                let [low, high] = S::split(S::load(q.add(at + v * S::LANES)));
                sum = S::add(sum, S::add(low, high));
            }
            S::store(to.add(span * S::LANES), sum);
        }
    }
}

/// What the values of a chunk add to the rows of `o`.
struct Outputs<'a> {
    chunk: &'a CodesChunk<'a>,
    weights: &'a Weights,
}

impl<S: CodePairs> Part<S> for Outputs<'_> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let Outputs { chunk, weights: &Weights { masked, p: (p, p_stride), o: (o, o_stride) } } = self;
        let CodesChunk { problem, products, n, dim, scratch, .. } = *chunk;
        let rows = problem.partition.rows;
        let (Some(scales), Some(pairs)) = (&chunk.source.scales, &products.pairs) else { return false };
        let fold = pairs.fold;
        let ahead = Ahead::new(problem, chunk.first, n);
        let (groups, row_bytes) = (dim.div_ceil(scales.chunk), dim.div_ceil(chunk.source.shared));
        // SAFETY: as in `item`.
        unsafe {
            if !read_factors(chunk, scales, (fold, pairs.shift), f32::is_finite) {
                return false;
            }
            let (sums, sums_stride) = (scratch.sums, dim.next_multiple_of(pairs.span));
            for at in (0..rows * sums_stride).step_by(S::LANES) {
                S::store(sums.add(at), S::splat(0.0));
            }
            for r in 0..rows {
                S::store(scratch.p_sums.add(r * S::LANES), S::splat(0.0));
            }
            let in_place = row_bytes.is_multiple_of(64) && is_in_place(chunk, n, row_bytes);
            for j in (0..n).step_by(TWO_VECTORS) {
                let taken = TWO_VECTORS.min(n - j);
                if !in_place {
                    ahead.of_values::<S>(j, taken);
                }
                let codes = spans_of::<S>(chunk, j, taken, row_bytes);
                let mut through_numbers = masked && (pairs.has_non_finite)(&codes, taken, row_bytes);
                match fold {
                    Fold::Rows => through_numbers |= !all_are_moderate::<S>(scratch.factors.add(j), taken),
                    Fold::Channels => {}
                    Fold::Groups => {
                        chunk.group_factors::<S>(scales, (j, taken));
                        // Those of e4m3 are moderate but for NaN, which is seen by who does not mask it.
                        if masked || scales.descale.dtype != DType::F8E4M3FN {
                            through_numbers |= !all_are_moderate::<S>(scratch.factors, taken * groups);
                        }
                    }
                }
                if pairs.has_infinite {
                    through_numbers |= (pairs.has_non_finite)(&codes, taken, row_bytes);
                }
                let p = p.cast_const().add(j);
                if through_numbers {
                    let (batch, head, j0) = chunk.first;
                    let keys = Keys::read(chunk.source, (batch, head, j0 + j), taken, dim, scratch.panel);
                    if !masked || all_finite::<S, _>(&keys, taken, dim) {
                        weighted_sum::<S, _, true>(&keys, taken, rows, (p, p_stride), (o, o_stride), dim);
                    } else {
                        weighted_sum_selecting::<S, _>(&keys, taken, rows, (p, p_stride), (o, o_stride), dim);
                    }
                    continue;
                }
                let p = (p, p_stride);
                let (stride, rest) = match fold {
                    Fold::Groups => pair_weights_of_groups::<S>(chunk, p, (taken, groups)),
                    Fold::Rows => pair_weights::<S>(chunk, p, Some(j), taken),
                    Fold::Channels => pair_weights::<S>(chunk, p, None, taken),
                };
                let p = (scratch.weights.cast_const(), stride);
                let ahead = if in_place { keys_ahead(row_bytes) * codes.stride } else { 0 };
                let with = PairWeights { n: taken, rows, row_bytes, chunk: scales.chunk, dim, ahead, p, rest };
                (pairs.weighted)(&codes, &with, (sums, sums_stride));
            }
            for r in 0..rows {
                add_sums::<S>(chunk, r, o.add(r * o_stride));
            }
        }
        true
    }
}

/// Weights of `taken` keys of a chunk, from key `j` on where each is multiplied with the factor of its key, as pairs, and their sums times
/// the shifts of the keys. Answers the stride from row to row, and from a weight to what is left of it.
#[inline(always)]
unsafe fn pair_weights<S: CodePairs>(
    chunk: &CodesChunk<'_>,
    (p, p_stride): In,
    j: Option<usize>,
    taken: usize,
) -> (usize, usize) {
    let (scratch, rows) = (chunk.scratch, chunk.problem.partition.rows);
    let (stride, rest) = (TWO_VECTORS / 2, rows * TWO_VECTORS / 2);
    // SAFETY: as in `item`.
    unsafe {
        let factors = j.map(|j| scratch.factors.cast_const().add(j));
        for r in 0..rows {
            let exact = with_factors::<S>(p.add(r * p_stride), factors, (0, taken));
            let (to, sum) = (scratch.weights.add(r * stride), scratch.p_sums.add(r * S::LANES));
            let [high, low] = two::<S>(exact, to, to.add(rest));
            let mut of_shift = S::load(sum);
            for half in 0..2 {
                let weights = S::add(high[half], low[half]);
                let mut shift = S::splat(1.0);
                if let Some(j) = j {
                    shift = S::load(scratch.points.add(j + half * S::LANES));
                }
                of_shift = S::fma(weights, shift, of_shift);
            }
            S::store(sum, of_shift);
        }
    }
    (stride, rest)
}

/// Two vectors of numbers as bf16 at `high`, and what these leave of them as bf16 at `low`; both again as numbers.
#[inline(always)]
unsafe fn two<S: CodePairs>(exact: [S::V; 2], high: *mut f32, low: *mut f32) -> [[S::V; 2]; 2] {
    // SAFETY: the caller vouches for a vector of words at each.
    unsafe {
        S::store(high, S::narrow(exact[0], exact[1]));
        let numbers = |words: *mut f32| {
            let words = words.cast::<bf16>().cast_const();
            [words, words.wrapping_add(S::LANES)]
        };
        let [a, b] = numbers(high);
        let of_high = [S::load_bf16(a), S::load_bf16(b)];
        S::store(low, S::narrow(S::sub(exact[0], of_high[0]), S::sub(exact[1], of_high[1])));
        let [a, b] = numbers(low);
        [of_high, [S::load_bf16(a), S::load_bf16(b)]]
    }
}

/// What row `r` of the sums adds to its row of `o`.
#[inline(always)]
unsafe fn add_sums<S: CodePairs>(chunk: &CodesChunk<'_>, r: usize, o: *mut f32) {
    let CodesChunk { products, dim, scratch, .. } = *chunk;
    let (Some(scales), Some(pairs)) = (&chunk.source.scales, &products.pairs) else { return };
    // SAFETY: as in `item`.
    unsafe {
        let (natural, sums_stride) = (scratch.natural_sums, dim.next_multiple_of(pairs.span));
        in_order::<S>(scratch.sums.add(r * sums_stride), (sums_stride, pairs.span), natural);
        let of_shift = S::reduce_add(S::load(scratch.p_sums.add(r * S::LANES)));
        for d in 0..dim {
            let (x, o) = (*natural.add(d), o.add(d));
            *o += match pairs.fold {
                Fold::Rows => x + of_shift,
                Fold::Channels => (x + (pairs.shift - *scratch.points.add(d)) * of_shift) * *scratch.factors.add(d),
                Fold::Groups => x * scales.global,
            };
        }
    }
}

/// The factors of a chunk, but those of groups, to where the products want them; whether pairs do with them: those of channels `fit`.
pub(super) unsafe fn read_factors(
    chunk: &CodesChunk<'_>,
    scales: &Scales,
    (fold, shift): (Fold, f32),
    fit: impl Fn(f32) -> bool,
) -> bool {
    // SAFETY: as in `item`.
    unsafe {
        match fold {
            Fold::Rows => {
                chunk.row_factors(scales, chunk.n);
                row_shifts(chunk, scales, shift, chunk.n);
                true
            }
            Fold::Channels => {
                chunk.channel_factors(scales);
                (0..chunk.dim).all(|d| fit(*chunk.scratch.factors.add(d)))
            }
            Fold::Groups => is_moderate(scales.global),
        }
    }
}

/// What the elements of each key are less than the code, less its zero point; 0 up to a whole block of keys.
unsafe fn row_shifts(chunk: &CodesChunk<'_>, scales: &Scales, shift: f32, n: usize) {
    let ((batch, head, j0), to) = (chunk.first, chunk.scratch.points);
    // SAFETY: keys of the chunk; the scratch memory has a place for each of a chunk.
    unsafe {
        match scales.zero_point {
            None => (0..n).for_each(|j| *to.add(j) = shift),
            Some(of) => (0..n).for_each(|j| *to.add(j) = shift - f32::from(*of.at_key([batch, head, j0 + j, 0]))),
        }
        (n..n.next_multiple_of(TWO_VECTORS)).for_each(|j| *to.add(j) = 0.0);
    }
}

/// Weights of pairs of keys with the factors of their groups: for each pair and row a lane to each group. Answers as [`pair_weights`].
#[inline(always)]
unsafe fn pair_weights_of_groups<S: CodePairs>(
    chunk: &CodesChunk<'_>,
    (p, p_stride): In,
    (n, groups): (usize, usize),
) -> (usize, usize) {
    let stride = groups.next_multiple_of(S::LANES);
    let rest = n.div_ceil(2) * chunk.problem.partition.rows * stride;
    let (rows, factors, to) = (chunk.problem.partition.rows, chunk.scratch.factors, chunk.scratch.weights);
    // SAFETY: as in `item`; lanes past the last group are asked for by nobody.
    unsafe {
        for j in (0..n).step_by(2) {
            let has_second = j + 1 < n;
            let of_key = factors.add(j * groups);
            let of_next = if has_second { of_key.add(groups) } else { of_key };
            for r in 0..rows {
                let p = p.add(r * p_stride + j);
                let (a, b) = (S::splat(*p), S::splat(if has_second { *p.add(1) } else { 0.0 }));
                let to = to.add((j / 2 * rows + r) * stride);
                for g in (0..groups).step_by(S::LANES) {
                    let (a, b) = (S::mul(a, S::load(of_key.add(g))), S::mul(b, S::load(of_next.add(g))));
                    let high = S::pair(a, b);
                    let [of_a, of_b] = S::split(high);
                    S::store(to.add(g), high);
                    S::store(to.add(rest + g), S::pair(S::sub(a, of_a), S::sub(b, of_b)));
                }
            }
        }
    }
    (stride, rest)
}

/// Sums in the order of value vectors to that of elements.
#[inline(always)]
unsafe fn in_order<S: CodePairs>(sums: *const f32, (len, span): (usize, usize), to: *mut f32) {
    // SAFETY: both are whole spans.
    unsafe {
        for at in (0..len).step_by(64) {
            let mut vectors = [S::splat(0.0); 4];
            for (m, vector) in vectors.iter_mut().enumerate() {
                *vector = S::load(sums.add(at + m * S::LANES));
            }
            let (mut from, mut step) = (at, RUN);
            if span == 128 {
                vectors = S::transpose_quads(vectors);
                (from, step) = (at / 128 * 128 + at % 128 / 64 * RUN, 2 * RUN);
            }
            for (m, &vector) in vectors.iter().enumerate() {
                let mut lanes = [0f32; 16];
                S::store(lanes.as_mut_ptr(), vector);
                for (quad, lanes) in lanes.chunks_exact(4).enumerate() {
                    std::ptr::copy_nonoverlapping(lanes.as_ptr(), to.add(from + quad * step + 4 * m), 4);
                }
            }
        }
    }
}
