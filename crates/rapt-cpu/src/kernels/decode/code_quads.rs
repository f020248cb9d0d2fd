//! Products of decode with rows of codes as quads of bytes, by the dot of those: sums of integers are exact, whatever their order.
//!
//! ```text
//! b = the byte of a code (`kernels/code_quads`), B: what it is more than t times the code, z: a zero point, f: a factor
//! q̂ = Σ_i 256^i · q_i · unit          of each row: its q, with the factors of channels, in three digits
//! ŵ = Σ_i 256^i · w_i · unit          of each row and block of keys: its weights, with the factors of keys, in three digits
//! factor of a row       s = Σ q̂ · (b − B) · f + Σ q · (B − z) · f          o = Σ ŵ · (b − z)
//! factors of channels   s = Σ q̂ · (b − B) + Σ q∘f · (B − z)                o = f ∘ (Σ ŵ · (b − B) + (B − z) · Σ ŵ)
//! factors of groups     s = Σ_groups f · Σ q̂ · (b − B) / t · global
//! ```
//! Where there is no zero point, `B` is `z`. A sum of one digit's products is an integer of 32 bits: of K over `head_dim / 4` products a lane,
//! of V over [`BLOCK`] keys, each at most 128 · 255. They become f32 together: `(Σ_2 · 256 + Σ_1) · 256 + Σ_0`. Lanes and what they hold stand in
//! `kernels/code_quads`. Deliberately absent: zero points of groups within a
//! row, and values whose groups have factors.

use std::marker::PhantomData;

use crate::kernels::code_quads::{CodeQuads, QuadCode};
use crate::kernels::simd::Part;
use crate::problem::{CodeRows, Out, QuadQueries, QuadWeights};
use crate::scratch::{BLOCK, DIGITS, SETS};

/// Elements of a vector's 128 bits in one plane: groups are multiples of it.
const RUN: usize = 16;

/// Keys that the first product takes together.
const SIXTEEN: usize = 16;

/// A part with what its product needs, for codes `C`.
struct Product<'a, C, X, const GROUPS: bool> {
    rows: &'a CodeRows,
    with: &'a X,
    to: Out,
    of: PhantomData<C>,
}

pub(super) unsafe fn dots_of<S: CodeQuads, C: QuadCode<S>, const GROUPS: bool>(
    rows: &CodeRows,
    with: &QuadQueries,
    to: Out,
) {
    // SAFETY: promised by the caller; so below.
    unsafe { S::apart_quads(Product::<C, _, GROUPS> { rows, with, to, of: PhantomData }) }
}

pub(super) unsafe fn weighted_of<S: CodeQuads, C: QuadCode<S>>(rows: &CodeRows, with: &QuadWeights, to: Out) {
    // SAFETY: as above.
    unsafe { S::apart_quads(Product::<C, _, false> { rows, with, to, of: PhantomData }) }
}

/// A digit's sums as numbers, of three digits.
#[inline(always)]
unsafe fn number_of<S: CodeQuads>(sums: [S::I; DIGITS]) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let radix = S::splat(256.0);
        let high = S::fma(S::to_f32(sums[2]), radix, S::to_f32(sums[1]));
        S::fma(high, radix, S::to_f32(sums[0]))
    }
}

/// Which factors of a row are those of a span's lanes.
#[derive(Clone, Copy)]
struct Groups {
    /// Elements of a group, as a power of two; more than a row has where it is one group.
    chunk_log2: u32,
    planes: usize,
    /// The last group of a row.
    last: usize,
}

impl Groups {
    fn new(chunk: usize, dim: usize, planes: usize) -> Self {
        let chunk_log2 = if chunk >= dim { usize::BITS - 1 } else { chunk.ilog2() };
        Groups { chunk_log2, planes, last: (dim.max(1) - 1) >> chunk_log2 }
    }

    /// The first group of a span.
    #[inline(always)]
    fn first(&self, span: usize) -> usize {
        (span * 64 * self.planes) >> self.chunk_log2
    }

    /// Of quarter `quarter` of the vectors of `span`, and one of the two sets, how many groups behind the span's first its own is. In one plane
    /// both sets are of one group. What lies behind a row is nothing times its last factor: those of another key have no say.
    #[inline(always)]
    fn of(&self, span: usize, quarter: usize, set: usize) -> i32 {
        let run = if self.planes == 2 { 2 * quarter + set } else { quarter };
        ((RUN * run) >> self.chunk_log2).min(self.last - self.first(span)) as i32
    }
}

impl<S: CodeQuads, C: QuadCode<S>, const GROUPS: bool> Part<S> for Product<'_, C, QuadQueries, GROUPS> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let &QuadQueries { n, rows, row_bytes, dim, chunk, .. } = self.with;
        let groups = Groups::new(chunk, dim, C::PLANES);
        // SAFETY: promised by the caller of what made the part.
        unsafe {
            let mut picks = [[S::splat_i32(0); SETS]; 2];
            if GROUPS {
                let last = row_bytes.div_ceil(64).saturating_sub(1);
                // A span before the last one has all its groups, as the first has then.
                picks = [picks_of_four::<S>(groups, 0), picks_of_four::<S>(groups, last)];
            }
            for j in (0..n).step_by(SIXTEEN) {
                let mut r = 0;
                while r < rows {
                    r += match rows - r {
                        4.. => self.sixteen::<S, 4>(j, r, groups, &picks),
                        2.. => self.sixteen::<S, 2>(j, r, groups, &picks),
                        _ => self.sixteen::<S, 1>(j, r, groups, &picks),
                    }
                }
            }
        }
    }
}

impl<C, const GROUPS: bool> Product<'_, C, QuadQueries, GROUPS> {
    /// Scores of `Q` queries from `r` on with keys `j..j + 16`; those behind the last key are any. Answers how many queries.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "a column of the sums")]
    unsafe fn sixteen<S: CodeQuads, const Q: usize>(
        &self,
        j: usize,
        r: usize,
        groups: Groups,
        picks: &[[S::I; SETS]; 2],
    ) -> usize
    where
        C: QuadCode<S>,
    {
        let &Product { rows, with: &QuadQueries { n, units, .. }, to: (s, s_stride), .. } = self;
        let last = n - 1 - j;
        // SAFETY: as above: rows of s are whole vectors.
        unsafe {
            let mut sums = [[S::splat(0.0); 4]; Q];
            let mut row = rows.first.wrapping_offset(j as isize * rows.stride);
            for eight in 0..2 {
                if 8 * eight > last {
                    break;
                }
                // Past the last key the last one is taken again: a score is the same whatever is beside it.
                let mut codes = [[row; 4]; 2];
                for (k, codes) in codes.iter_mut().flatten().enumerate() {
                    *codes = row;
                    row = row.wrapping_offset(if 8 * eight + k < last { rows.stride } else { 0 });
                }
                let of_eight = self.eight::<S, Q>(codes, j + 8 * eight, r, groups, picks);
                for q in 0..Q {
                    [sums[q][2 * eight], sums[q][2 * eight + 1]] = of_eight[q];
                }
            }
            for q in 0..Q {
                let scores = S::mul(S::sum_of_quarters(sums[q]), S::splat(*units.add(r + q)));
                S::store(s.add((r + q) * s_stride + j), scores);
            }
        }
        Q
    }

    /// Sums of twice four keys from `key` on with `Q` queries: lane `4L + k` has what quarter `L` of the row of key `k` of four gives. Of four
    /// keys alone as many digits would be loaded as products are formed (four queries, int8: 65 instead of 63 cycles a key; Xeon, 2026-11).
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "digits of several arrays")]
    unsafe fn eight<S: CodeQuads, const Q: usize>(
        &self,
        codes: [[*const u8; 4]; 2],
        key: usize,
        r: usize,
        groups: Groups,
        picks: &[[S::I; SETS]; 2],
    ) -> [[S::V; 2]; Q]
    where
        C: QuadCode<S>,
    {
        let &Product { rows, with, .. } = self;
        let &QuadQueries { row_bytes, ahead, q: (q, q_stride), start: (start, start_stride), .. } = with;
        let (q, start) = (q.wrapping_add(r * q_stride), start.wrapping_add(r * start_stride));
        // SAFETY: as above: rows are whole spans of 64 bytes.
        unsafe {
            let mut of_rows = [[S::splat(0.0); 2]; Q];
            let mut acc = [[[S::splat_i32(0); DIGITS]; 2]; Q];
            if !GROUPS {
                for query in 0..Q {
                    for d in 0..DIGITS {
                        let start = S::load_bytes(start.add(query * start_stride + 64 * d));
                        (acc[query][0][d], acc[query][1][d]) = (start, start);
                    }
                }
            }
            let sets = if GROUPS && C::PLANES == 2 { SETS } else { 1 };
            for (span, at) in (0..row_bytes).step_by(64).enumerate() {
                let mut vectors = [[S::splat_i32(0); 4]; 2];
                let mut factors = [[S::splat(0.0); SETS]; 2];
                for four in 0..2 {
                    for (vector, codes) in vectors[four].iter_mut().zip(codes[four]) {
                        S::prefetch(codes.wrapping_offset(at as isize + ahead));
                        *vector = S::load_bytes(codes.add(at));
                    }
                    vectors[four] = S::transpose_words(vectors[four]);
                    if GROUPS {
                        let picks = &picks[usize::from(at + 64 >= row_bytes)];
                        factors[four] = group_factors::<S>(rows, key + 4 * four, groups.first(span), picks);
                    }
                }
                for set in 0..sets {
                    if GROUPS {
                        for query in 0..Q {
                            let start = start.add(query * start_stride + (span * SETS + set) * 64 * DIGITS);
                            for d in 0..DIGITS {
                                let start = S::load_bytes(start.add(64 * d));
                                (acc[query][0][d], acc[query][1][d]) = (start, start);
                            }
                        }
                    }
                    for i in 4 / sets * set..4 / sets * (set + 1) {
                        let planes = [C::planes(vectors[0][i]), C::planes(vectors[1][i])];
                        for plane in 0..C::PLANES {
                            for query in 0..Q {
                                let of_q = ((span * 4 + i) * C::PLANES + plane) * 64 * DIGITS;
                                let of_q = q.add(query * q_stride + of_q);
                                for d in 0..DIGITS {
                                    let digits = S::load_bytes(of_q.add(64 * d));
                                    for four in 0..2 {
                                        let acc = &mut acc[query][four][d];
                                        *acc = S::dot_quads(planes[four][plane], digits, *acc);
                                    }
                                }
                            }
                        }
                    }
                    if GROUPS {
                        for query in 0..Q {
                            for four in 0..2 {
                                let of_row = &mut of_rows[query][four];
                                *of_row = S::fma(number_of::<S>(acc[query][four]), factors[four][set], *of_row);
                            }
                        }
                    }
                }
            }
            if !GROUPS {
                for query in 0..Q {
                    for four in 0..2 {
                        of_rows[query][four] = number_of::<S>(acc[query][four]);
                    }
                }
            }
            of_rows
        }
    }
}

/// Of lane `4L + k` of a span, for each set, where among eight factors of each of four keys its own is.
#[inline(always)]
unsafe fn picks_of_four<S: CodeQuads>(groups: Groups, span: usize) -> [S::I; SETS] {
    let mut at = [[0i32; 16]; SETS];
    for (set, at) in at.iter_mut().enumerate() {
        for (lane, at) in at.iter_mut().enumerate() {
            *at = 8 * (lane as i32 % 4) + groups.of(span, lane / 4, set);
        }
    }
    // SAFETY: 16 lanes each.
    unsafe { [S::load_bytes(at[0].as_ptr().cast()), S::load_bytes(at[1].as_ptr().cast())] }
}

/// The factors of four keys from `key` on for the lanes of a span's sums, of both sets.
#[inline(always)]
unsafe fn group_factors<S: CodeQuads>(rows: &CodeRows, key: usize, first: usize, picks: &[S::I; SETS]) -> [S::V; SETS] {
    let of = rows.factors.wrapping_add(key * rows.per_row + first);
    // SAFETY: as above; behind the factors of the last key there is other scratch memory, which makes scores that nobody reads.
    unsafe {
        let a = S::load_halves(of, of.add(rows.per_row));
        let b = S::load_halves(of.add(2 * rows.per_row), of.add(3 * rows.per_row));
        [S::pick_of_two(a, b, picks[0]), S::pick_of_two(a, b, picks[1])]
    }
}

impl<S: CodeQuads, C: QuadCode<S>> Part<S> for Product<'_, C, QuadWeights, false> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let rows = self.with.rows;
        // SAFETY: as above.
        unsafe {
            let mut r = 0;
            while r < rows {
                // As many vectors of values at a time as leave registers for them beside their sums, of three digits each in one plane or two.
                r += match (rows - r, C::PLANES) {
                    (4.., 1) => self.passes::<S, 4, 2>(r),
                    (4.., _) => self.passes::<S, 4, 1>(r),
                    (2.., 1) => self.passes::<S, 2, 4>(r),
                    (2.., _) => self.passes::<S, 2, 2>(r),
                    (_, 1) => self.passes::<S, 1, 4>(r),
                    _ => self.passes::<S, 1, 2>(r),
                }
            }
        }
    }
}

impl<C> Product<'_, C, QuadWeights, false> {
    /// What the keys add to `Q` rows from `r` on, `M` of the four vectors of values of a span at a time; answers how many rows.
    #[inline(always)]
    unsafe fn passes<S: CodeQuads, const Q: usize, const M: usize>(&self, r: usize) -> usize
    where
        C: QuadCode<S>,
    {
        // SAFETY: as above.
        unsafe {
            for at in (0..self.with.row_bytes).step_by(64) {
                self.pass::<S, Q, M, 0>(at, r);
                if M == 1 {
                    self.pass::<S, Q, M, 1>(at, r);
                }
                if M < 4 {
                    self.pass::<S, Q, M, 2>(at, r);
                }
                if M == 1 {
                    self.pass::<S, Q, M, 3>(at, r);
                }
            }
        }
        Q
    }

    /// What the keys add to vectors `M0..M0 + M` of the span at byte `at` of each row.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "digits of several arrays")]
    unsafe fn pass<S: CodeQuads, const Q: usize, const M: usize, const M0: usize>(&self, at: usize, r: usize)
    where
        C: QuadCode<S>,
    {
        let &Product { rows, with, to: (sums, sums_stride), .. } = self;
        let &QuadWeights { n, ahead, weights: (weights, stride), start, units, .. } = with;
        let (span, weights) = (at / 64, weights.wrapping_add(r * stride));
        // SAFETY: as above.
        unsafe {
            let mut acc = [[[[S::splat_i32(0); DIGITS]; 2]; M]; Q];
            for query in 0..Q {
                for d in 0..DIGITS {
                    let start = S::splat_i32(*start.add((r + query) * DIGITS + d));
                    acc[query] = with_start::<S, M>(acc[query], d, start);
                }
            }
            let mut row = rows.first.wrapping_add(at);
            for j in (0..n).step_by(4) {
                // Keys past the last one weigh nothing.
                let mut vectors = [S::splat_i32(0); 4];
                for (k, vector) in vectors.iter_mut().enumerate() {
                    // Each pass asks for its own part of the next block.
                    if k / M == M0 / M {
                        S::prefetch(row.wrapping_offset(ahead));
                    }
                    *vector = S::load_bytes(row);
                    row = row.wrapping_offset(if j + k + 1 < n { rows.stride } else { 0 });
                }
                let woven = S::weave(vectors);
                let mut planes = [[S::splat_i32(0); 2]; M];
                for m in 0..M {
                    planes[m] = C::planes(woven[(M0 + m) % 4]);
                }
                // Digits innermost but for what they are multiplied with: kept for later they would take the registers of sums.
                for query in 0..Q {
                    for d in 0..DIGITS {
                        let digits = S::splat_quad(weights.add(query * stride + d * BLOCK + j));
                        for m in 0..M {
                            for plane in 0..C::PLANES {
                                let acc = &mut acc[query][m][plane][d];
                                *acc = S::dot_quads(planes[m][plane], digits, *acc);
                            }
                        }
                    }
                }
            }
            for query in 0..Q {
                let unit = S::splat(*units.add(r + query));
                for m in 0..M {
                    for plane in 0..C::PLANES {
                        let vector = (span * C::PLANES + plane) * 4 + (M0 + m) % 4;
                        let to = sums.add((r + query) * sums_stride + vector * S::LANES);
                        let sum = number_of::<S>(acc[query][m][plane]);
                        S::store(to, S::fma(sum, unit, S::load(to)));
                    }
                }
            }
        }
    }
}

/// The sums of one digit begin with these.
#[inline(always)]
unsafe fn with_start<S: CodeQuads, const M: usize>(
    mut acc: [[[S::I; DIGITS]; 2]; M],
    d: usize,
    start: S::I,
) -> [[[S::I; DIGITS]; 2]; M] {
    for of_vector in &mut acc {
        of_vector[0][d] = start;
        of_vector[1][d] = start;
    }
    acc
}
