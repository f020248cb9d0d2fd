//! Products of decode with rows of codes as pairs of bf16, by the dot of pairs: for queries of bf16, where the machine has it.
//!
//! ```text
//! e = code − shift              exact in bf16 (`kernels/code_pairs`); z: the zero point, f: the factor
//! factor of a row       s = (q · e + Σ q · (shift − z)) · f                    o = Σ p̂ · (e + shift − z)             p̂ = two(p · f)
//! factors of channels   s = Σ q̂ · e + Σ q∘f · (shift − z)     q̂ = two(q∘f)     o = f ∘ Σ p̂ · (e + shift − z)         p̂ = two(p)
//! factors of groups     s = Σ_groups f · (q · e + Σ q · (shift − z)) · global  o = global · Σ p̂ · (e + shift − z)    p̂ = two(p · f)
//! ```
//! Products are exact and summed in f32. Of what would lose bits in one bf16 two are made, whose sum has 16 bits (`two`): of queries with factors
//! of channels, and of weights, because one query has too few numbers for roundings of 8 bits to cancel. Lanes are those of
//! `kernels/code_pairs`: a lane's elements share a factor, and sums of pairs are multiplied with factors lane by lane.
//!
//! What the dot does not do as f32 would goes through numbers ([`Source::read`](crate::problem::Source)), key by key in the first product
//! and a block of keys at a time in the second: factors in which a sum may overflow or vanish (numbers below 2⁻¹²⁶ are 0 to the dot), and
//! codes that are NaN or infinite behind a mask or a weight that vanishes. Deliberately absent: queries of other dtypes, and groups that
//! are no multiple of 16.

use std::marker::PhantomData;

use crate::kernels::code_pairs::{CodePairs, PairCode};
use crate::kernels::simd::Part;
use crate::problem::{CodeRows, Out, PairQueries, PairWeights};

/// Numbers of a lane of pairs' run: groups are multiples of it.
pub(super) const RUN: usize = 16;

/// Numbers of two vectors, of which one of bf16 is made; and the keys that the second product takes together.
pub(super) const TWO_VECTORS: usize = 32;

/// Which factors of a row are those of a span's lanes. A group is all of a row, or a power of two of runs of 16.
#[derive(Clone, Copy)]
struct Lanes<V> {
    /// Elements of a group, as a power of two.
    chunk_log2: u32,
    /// Of each lane of a span, how many factors behind the span's first is its own.
    at: V,
}

impl<V: Copy> Lanes<V> {
    /// Lanes of keys, or of value vectors of a unit.
    #[inline(always)]
    unsafe fn new<S: CodePairs<V = V>>(chunk: usize, dim: usize, span: usize, unit: Option<usize>) -> Self {
        let chunk_log2 = if chunk >= dim { usize::BITS - 1 } else { chunk.ilog2() };
        let mut at = [0u32; 16];
        for (lane, at) in at.iter_mut().enumerate() {
            let run = match (span, unit) {
                (64, _) => lane / 4,
                (_, Some(unit)) => lane / 4 * 2 + unit,
                (_, None) => lane / 2,
            };
            *at = ((RUN * run) >> chunk_log2) as u32;
        }
        // SAFETY: 16 lanes of 32 bits.
        Lanes { chunk_log2, at: unsafe { S::load(at.as_ptr().cast()) } }
    }

    /// The first factor of a span.
    #[inline(always)]
    fn first(&self, span_at: usize) -> usize {
        span_at >> self.chunk_log2
    }
}

/// A part with what its product needs, for codes `C`.
struct Product<'a, C, X, const PLANES: usize, const GROUPS: bool> {
    rows: &'a CodeRows,
    with: &'a X,
    to: Out,
    of: PhantomData<C>,
}

pub(super) unsafe fn dots_of<S: CodePairs, C: PairCode<S>, const PLANES: usize, const GROUPS: bool>(
    rows: &CodeRows,
    with: &PairQueries,
    to: Out,
) {
    // SAFETY: promised by the caller; so below.
    unsafe { S::apart_codes(Product::<C, _, PLANES, GROUPS> { rows, with, to, of: PhantomData }) }
}

pub(super) unsafe fn weighted_of<S: CodePairs, C: PairCode<S>, const GROUPS: bool>(
    rows: &CodeRows,
    with: &PairWeights,
    to: Out,
) {
    // SAFETY: as above.
    unsafe { S::apart_codes(Product::<C, _, 1, GROUPS> { rows, with, to, of: PhantomData }) }
}

pub(super) unsafe fn has_non_finite_of<S: CodePairs, C: PairCode<S>>(
    rows: &CodeRows,
    n: usize,
    row_bytes: usize,
) -> bool {
    // SAFETY: as above.
    unsafe { S::apart_codes(HasNonFinite::<C> { rows, n, row_bytes, of: PhantomData }) }
}

/// Whether one of the codes of `n` keys is NaN or infinite.
struct HasNonFinite<'a, C> {
    rows: &'a CodeRows,
    n: usize,
    row_bytes: usize,
    of: PhantomData<C>,
}

impl<S: CodePairs, C: PairCode<S>> Part<S> for HasNonFinite<'_, C> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let HasNonFinite { rows: &CodeRows { first, stride, .. }, n, row_bytes, .. } = self;
        let mut found = false;
        for j in 0..n {
            // SAFETY: as above: rows of so many bytes.
            found |= unsafe { C::has_non_finite(first.wrapping_offset(j as isize * stride), row_bytes) };
        }
        found
    }
}

impl<S: CodePairs, C: PairCode<S>, const PLANES: usize, const GROUPS: bool> Part<S>
    for Product<'_, C, PairQueries, PLANES, GROUPS>
{
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let mut r = 0;
        // SAFETY: promised by the caller of what made the part.
        unsafe {
            while r < self.with.rows {
                r += match self.with.rows - r {
                    4.. => self.dots::<S, 4, 4>(r),
                    2.. => self.dots::<S, 4, 2>(r),
                    _ => self.dots::<S, 8, 1>(r),
                }
            }
        }
    }
}

impl<C, const PLANES: usize, const GROUPS: bool> Product<'_, C, PairQueries, PLANES, GROUPS> {
    /// Scores of `Q` queries from `r` on, `K` keys at a time; answers how many.
    #[inline(always)]
    unsafe fn dots<S: CodePairs, const K: usize, const Q: usize>(&self, r: usize) -> usize
    where
        C: PairCode<S>,
    {
        let &Product { rows, with: &PairQueries { n, .. }, to: (s, s_stride), .. } = self;
        let s = s.wrapping_add(r * s_stride);
        // SAFETY: as above. Past the last key the last one is taken again: a score is the same whatever is beside it.
        unsafe {
            let table = C::table();
            let lanes = Lanes::new::<S>(self.with.chunk, self.with.dim, C::SPAN, None);
            for j in (0..n).step_by(K) {
                let mut sums = [[S::splat(0.0); Q]; K];
                for (two, sums) in sums.chunks_exact_mut(2).enumerate() {
                    let keys = [j + 2 * two, j + 2 * two + 1].map(|key| key.min(n - 1));
                    let row = |key: usize| rows.first.wrapping_offset(key as isize * rows.stride);
                    let [first, second] = self.of_two::<S, Q>((keys.map(row), keys), r, &table, &lanes);
                    (sums[0], sums[1]) = (first, second);
                }
                for (four, sums) in sums.chunks_exact(4).enumerate() {
                    let j = j + 4 * four;
                    for q in 0..Q {
                        let sums = S::reduce_add_4([sums[0][q], sums[1][q], sums[2][q], sums[3][q]]);
                        let s = s.add(q * s_stride + j);
                        if j + 4 <= n {
                            s.cast::<[f32; 4]>().write_unaligned(sums);
                        } else {
                            (j..n).for_each(|key| *s.add(key - j) = sums[key - j]);
                        }
                    }
                }
            }
        }
        Q
    }

    /// Sums of two keys with `Q` queries, lane by lane.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "columns of the accumulators")]
    unsafe fn of_two<S: CodePairs, const Q: usize>(
        &self,
        (codes, keys): ([*const u8; 2], [usize; 2]),
        r: usize,
        table: &[S::V; 4],
        lanes: &Lanes<S::V>,
    ) -> [[S::V; Q]; 2]
    where
        C: PairCode<S>,
    {
        let &Product { rows, with, .. } = self;
        let &PairQueries { row_bytes, ahead, q: (q, q_stride), sums: (q_sums, sums_stride), .. } = with;
        // SAFETY: as above.
        unsafe {
            let zero = S::splat(0.0);
            let mut acc = [[zero; Q]; 2];
            for (span, at) in (0..row_bytes).step_by(64).enumerate() {
                if r == 0 {
                    S::prefetch(codes[0].wrapping_offset(at as isize + ahead));
                    S::prefetch(codes[1].wrapping_offset(at as isize + ahead));
                }
                let pairs = [
                    C::keys(S::load(codes[0].add(at).cast()), table),
                    C::keys(S::load(codes[1].add(at).cast()), table),
                ];
                let mut sums = if GROUPS { [[zero; Q]; 2] } else { acc };
                for v in 0..C::VECTORS {
                    for plane in 0..PLANES {
                        let vector = q.add(((span * C::VECTORS + v) * PLANES + plane) * S::LANES);
                        for query in 0..Q {
                            let x = S::load(vector.add((r + query) * q_stride));
                            sums[0][query] = S::dot(pairs[0][v], x, sums[0][query]);
                            sums[1][query] = S::dot(pairs[1][v], x, sums[1][query]);
                        }
                    }
                }
                if !GROUPS {
                    acc = sums;
                    continue;
                }
                let first = lanes.first(span * C::SPAN);
                for (key, (acc, sums)) in keys.iter().zip(acc.iter_mut().zip(sums)) {
                    let at = key * rows.per_row + first;
                    let factor = S::pick(S::load(rows.factors.add(at)), lanes.at);
                    let mut shift = S::splat(C::SHIFT);
                    if C::HAS_ZERO_POINT {
                        shift = S::sub(shift, S::pick(S::load(rows.points.add(at)), lanes.at));
                    }
                    for (query, (acc, mut sum)) in acc.iter_mut().zip(sums).enumerate() {
                        if C::SHIFT != 0.0 {
                            let of_q = S::load(q_sums.add((r + query) * sums_stride + span * S::LANES));
                            sum = S::fma(of_q, shift, sum);
                        }
                        *acc = S::fma(sum, factor, *acc);
                    }
                }
            }
            acc
        }
    }
}

/// A code of each span that is 0.
#[repr(align(64))]
struct Zeros([u8; 64]);
static ZEROS: Zeros = Zeros([0; 64]);

impl<S: CodePairs, C: PairCode<S>, const GROUPS: bool> Part<S> for Product<'_, C, PairWeights, 1, GROUPS> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: as above.
        unsafe {
            self.unit::<S, 0>();
            if C::UNITS == 2 {
                self.unit::<S, 1>();
            }
        }
    }
}

impl<C, const GROUPS: bool> Product<'_, C, PairWeights, 1, GROUPS> {
    /// What the keys add to one unit of each span.
    #[inline(always)]
    unsafe fn unit<S: CodePairs, const UNIT: usize>(&self)
    where
        C: PairCode<S>,
    {
        let &PairWeights { rows, row_bytes, chunk, dim, .. } = self.with;
        // SAFETY: as above.
        unsafe {
            let table = C::table();
            let lanes = Lanes::new::<S>(chunk, dim, C::SPAN, Some(UNIT));
            for at in (0..row_bytes).step_by(64) {
                let mut r = 0;
                while r < rows {
                    r += match rows - r {
                        4.. => self.weighted::<S, UNIT, 4, 1>(at, r, &table, &lanes),
                        2.. => self.weighted::<S, UNIT, 2, 1>(at, r, &table, &lanes),
                        // Sums of every other pair of keys: one sum waits 6 cycles for the one before it (Zen 4).
                        _ => self.weighted::<S, UNIT, 1, 2>(at, r, &table, &lanes),
                    }
                }
            }
        }
    }

    /// What the keys add to 64 elements of `Q` rows from `r` on; answers how many.
    #[inline(always)]
    unsafe fn weighted<S: CodePairs, const UNIT: usize, const Q: usize, const CHAINS: usize>(
        &self,
        at: usize,
        r: usize,
        table: &[S::V; 4],
        lanes: &Lanes<S::V>,
    ) -> usize
    where
        C: PairCode<S>,
    {
        let &Product { with: &PairWeights { n, .. }, to: (o, o_stride), .. } = self;
        let span = at / 64;
        // SAFETY: as above.
        unsafe {
            let zero = S::splat(0.0);
            let mut acc = [[[zero; 4]; Q]; CHAINS];
            let mut shifts = [zero; Q];
            let whole = n / (2 * CHAINS) * 2 * CHAINS;
            for j in (0..whole).step_by(2 * CHAINS) {
                for (chain, acc) in acc.iter_mut().enumerate() {
                    self.of_pair::<S, UNIT, Q>((at, j + 2 * chain), r, (table, lanes), (acc, &mut shifts));
                }
            }
            for j in (whole..n).step_by(2) {
                self.of_pair::<S, UNIT, Q>((at, j), r, (table, lanes), (&mut acc[0], &mut shifts));
            }
            for query in 0..Q {
                let o = o.add((r + query) * o_stride + span * C::SPAN + UNIT * 64);
                for m in 0..4 {
                    let mut sum = shifts[query];
                    for acc in &acc {
                        sum = S::add(sum, acc[query][m]);
                    }
                    let o = o.add(m * S::LANES);
                    S::store(o, S::add(S::load(o), sum));
                }
            }
        }
        Q
    }

    /// What keys `j` and `j + 1` add, if there is a second one.
    #[inline(always)]
    unsafe fn of_pair<S: CodePairs, const UNIT: usize, const Q: usize>(
        &self,
        (at, j): (usize, usize),
        r: usize,
        (table, lanes): (&[S::V; 4], &Lanes<S::V>),
        (acc, shifts): (&mut [[S::V; 4]; Q], &mut [S::V; Q]),
    ) where
        C: PairCode<S>,
    {
        let &Product { rows, with, .. } = self;
        let &PairWeights { n, ahead, p: (p, p_stride), rest, .. } = with;
        let first = lanes.first(at / 64 * C::SPAN);
        // SAFETY: as above.
        unsafe {
            let (row, has_second) = (rows.first.wrapping_offset(j as isize * rows.stride), j + 1 < n);
            let next = if has_second { row.wrapping_offset(rows.stride).wrapping_add(at) } else { ZEROS.0.as_ptr() };
            let row = row.add(at);
            if UNIT == 0 && r == 0 {
                S::prefetch(row.wrapping_offset(ahead));
                S::prefetch(next.wrapping_offset(ahead));
            }
            let values = C::values(S::load(row.cast()), S::load(next.cast()), UNIT, table);
            let mut shift = S::splat(C::SHIFT);
            if GROUPS && C::SHIFT != 0.0 {
                let mut of_two = [shift; 2];
                if C::HAS_ZERO_POINT {
                    let points = rows.points.add(j * rows.per_row + first);
                    let next = if has_second { rows.per_row } else { 0 };
                    of_two = [S::sub(shift, S::load(points)), S::sub(shift, S::load(points.add(next)))];
                }
                shift = S::pick(S::pair(of_two[0], of_two[1]), lanes.at);
            }
            for query in 0..Q {
                // What bf16 leaves of a weight follows it: a weight has 16 bits.
                for p in [p, p.wrapping_add(rest)] {
                    let p = if GROUPS {
                        S::pick(S::load(p.add((j / 2 * with.rows + r + query) * p_stride + first)), lanes.at)
                    } else {
                        S::splat(*p.add((r + query) * p_stride + j / 2))
                    };
                    for (acc, value) in acc[query].iter_mut().zip(values) {
                        *acc = S::dot(value, p, *acc);
                    }
                    if GROUPS && C::SHIFT != 0.0 {
                        shifts[query] = S::dot(shift, p, shifts[query]);
                    }
                }
            }
        }
    }
}
