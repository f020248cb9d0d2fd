//! Numbers as sums of bf16, of which products are formed tile by tile (`tiled`): three for each float32, two for each float16, itself for bf16.
//!
//! ```text
//! x = x₀ + x₁ + x₂      x₀ the first 8 bits of x, x₁ those of x − x₀, x₂ the last                       exact
//! x·y ≈ x₂y₀ + x₁y₀ + x₁y₁ + x₀y₁ + x₀y₂ + x₀y₀                   left out: at most 2⁻²¹ of the product, 2⁻²⁴·⁷ on average
//! ```
//! (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations".) Of float16,
//! scores have all four products, which are exact; values three, of weights of 16 bits.
//!
//! **Numbers without parts.** Infinities and NaN have none; the parts of a number below 2⁻¹⁰⁰ may be no normal numbers, which the unit reads as 0; and one
//! from 2⁴⁰ on would make much of what is left of a tiny weight. In forward a score of a row of Q or K with such a number is computed again ([`Amend`]); in V each
//! of them is added by itself, and is 0 in the panel that is multiplied. So what a row becomes follows from it and from what it attends. Of gradients,
//! `backward/by_parts` says.

use std::marker::PhantomData;

use half::{bf16, f16};

use super::blocks::{Amend, Values};
use super::pairs::Bf16Pairs;
use super::products::Block;
use super::simd::{Part, Storage};
use crate::arch::amx::{Parts, SIDE, TILE};
use crate::problem::Input;

/// See the module.
pub(crate) trait Numbers<S: Bf16Pairs>: Storage<S> {
    /// How many bf16 a number is.
    const PARTS: usize;
    /// Which of them are multiplied for scores, and for values.
    const OF_SCORES: Parts;
    const OF_VALUES: Parts;
}

impl<S: Bf16Pairs> Numbers<S> for bf16 {
    const PARTS: usize = 1;
    const OF_SCORES: Parts = Parts::Whole;
    const OF_VALUES: Parts = Parts::Whole;
}

impl<S: Bf16Pairs> Numbers<S> for f16 {
    const PARTS: usize = 2;
    const OF_SCORES: Parts = Parts::Four;
    const OF_VALUES: Parts = Parts::Three;
}

impl<S: Bf16Pairs> Numbers<S> for f32 {
    const PARTS: usize = 3;
    const OF_SCORES: Parts = Parts::Six;
    const OF_VALUES: Parts = Parts::Six;
}

/// The most parts of a number.
const MOST_PARTS: usize = 3;

/// Numbers of a row of a tile.
const ROW: usize = 2 * SIDE;

/// The first part of numbers.
#[inline(always)]
unsafe fn first_part<S: Bf16Pairs>(x: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { S::split(x)[1] }
}

/// What is left of numbers of a tensor behind their first part: nothing where that is not finite.
#[inline(always)]
unsafe fn behind<S: Bf16Pairs>(x: S::V, first: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let is_finite = S::lt(S::abs(first), S::splat(f32::INFINITY));
        S::select(is_finite, S::sub(x, first), S::splat(0.0))
    }
}

/// NaN whose first part is one too.
#[inline(always)]
unsafe fn quiet<S: Bf16Pairs>(x: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { S::select(S::eq(x, x), x, S::splat(f32::NAN)) }
}

/// `PARTS` vectors of pairs of two vectors of numbers of a tensor: of a row, whose numbers follow one another, or of two rows, woven.
#[inline(always)]
unsafe fn split_numbers<S: Bf16Pairs, T: Numbers<S>>(mut x: [S::V; 2], is_row: bool, to: *mut f32, part: usize) {
    // SAFETY: the caller vouches for a vector for each part.
    unsafe {
        x = [quiet::<S>(x[0]), quiet::<S>(x[1])];
        for n in 0..T::PARTS {
            let first = [first_part::<S>(x[0]), first_part::<S>(x[1])];
            let pairs = if is_row { S::narrow(first[0], first[1]) } else { S::join(first[0], first[1]) };
            S::store(to.add(n * part), pairs);
            x = [behind::<S>(x[0], first[0]), behind::<S>(x[1], first[1])];
        }
    }
}

/// Weights of two keys as lanes of `PARTS` rows, `row` elements apart; the last part is rounded.
#[inline(always)]
pub(crate) unsafe fn store_weights<S: Bf16Pairs, T: Numbers<S>>(p: [S::V; 2], to: *mut f32, row: usize) {
    let mut x = p;
    // SAFETY: the caller vouches for the rows.
    unsafe {
        for n in 0..T::PARTS - 1 {
            let first = [first_part::<S>(x[0]), first_part::<S>(x[1])];
            S::store(to.add(n * row), S::join(first[0], first[1]));
            x = [S::sub(x[0], first[0]), S::sub(x[1], first[1])];
        }
        S::store(to.add((T::PARTS - 1) * row), S::pair(x[0], x[1]));
    }
}

/// A vector of `n` numbers, `stride` apart, at most as many as a vector has; zeros behind them.
#[inline(always)]
unsafe fn read<S: Bf16Pairs, T: Numbers<S>>(from: *const T, stride: isize, n: usize) -> S::V {
    const { assert!(S::LANES == SIDE, "a row of a tile is a vector") };
    // SAFETY: the caller vouches for n numbers.
    unsafe {
        if stride == 1 && n >= S::LANES {
            return T::load(from);
        }
        let mut numbers = [0f32; SIDE];
        for (d, number) in numbers.iter_mut().enumerate().take(n) {
            *number = T::widen(*from.wrapping_offset(d as isize * stride));
        }
        S::load(numbers.as_ptr())
    }
}

/// Numbers `d..d + 32` of a row of `dim` as rows of the tiles of their parts, `part` elements apart; zeros in place of those past its end, and of
/// a row that is not there.
#[inline(always)]
pub(crate) unsafe fn row_of_tiles<S: Bf16Pairs, T: Numbers<S>>(
    row: Option<*const T>,
    stride: isize,
    (d, dim): (usize, usize),
    negate: bool,
    to: *mut f32,
    part: usize,
) {
    // SAFETY: the caller vouches for the row, and for a row of each tile.
    unsafe {
        let mut numbers = [S::splat(0.0); 2];
        if let Some(row) = row {
            for (n, numbers) in numbers.iter_mut().enumerate() {
                let d = d + n * SIDE;
                *numbers = read::<S, T>(row.wrapping_offset(d as isize * stride), stride, dim.saturating_sub(d));
                if negate {
                    *numbers = S::mul(*numbers, S::splat(-1.0));
                }
            }
        }
        split_numbers::<S, T>(numbers, true, to, part);
    }
}

/// What arrives at the weights of two keys, two vectors of queries each, in both orders that products read it in: of each key a row of 16 lanes of pairs of
/// queries, the first vector in the first of them, `SIDE` elements from part to part; and pairs of the keys, a tile's width from part to part. The last
/// part is rounded.
#[inline(always)]
pub(crate) unsafe fn lay_pair<S: Bf16Pairs, T: Numbers<S>>(
    keys: [[S::V; 2]; 2],
    rows: [Option<*mut f32>; 2],
    along_keys: Option<*mut f32>,
) {
    let mut x = keys;
    // SAFETY: the caller vouches for the rows.
    unsafe {
        for n in 0..T::PARTS {
            let is_last = n + 1 == T::PARTS;
            let mut first = x;
            if !is_last {
                for (first, x) in first.iter_mut().zip(&mut x) {
                    for (first, x) in first.iter_mut().zip(x) {
                        *first = first_part::<S>(*x);
                        *x = S::sub(*x, *first);
                    }
                }
            }
            for (row, first) in rows.into_iter().zip(first) {
                if let Some(row) = row {
                    S::store(row.add(n * SIDE), S::narrow(first[0], first[1]));
                }
            }
            if let Some(to) = along_keys {
                let [low, high] = first;
                for (v, (low, high)) in low.into_iter().zip(high).enumerate() {
                    let pairs = if is_last { S::pair(low, high) } else { S::join(low, high) };
                    S::store(to.add((2 * n + v) * S::LANES), pairs);
                }
            }
        }
    }
}

/// Numbers `d..d + LANES` of two rows of lanes as `row_of_tiles` leaves them, as lanes of pairs of their parts, `part` elements apart.
#[inline(always)]
pub(crate) unsafe fn weave_parts<S: Bf16Pairs, T: Numbers<S>>(
    rows: [*const f32; 2],
    d: usize,
    to: *mut f32,
    part: usize,
) {
    for n in 0..T::PARTS {
        let at = (d / ROW * T::PARTS + n) * ROW + d % ROW;
        // SAFETY: the caller vouches for the rows, and for a vector for each part.
        unsafe {
            let [low, high] = rows.map(|row| row.cast::<bf16>().add(at));
            S::store(to.add(n * part), S::join(S::load_bf16(low), S::load_bf16(high)));
        }
    }
}

/// A block of V as tiles of 16 dimensions by 32 keys: `[tile of keys][tile of dimensions][part]`.
#[inline(always)]
pub(crate) unsafe fn pack_values<S: Bf16Pairs, T: Numbers<S>>(
    input: &Input<4>,
    block: Block,
    dim: usize,
    panel: *mut f32,
) {
    let (batch, head, j0) = block.first;
    let stride = input.strides[3];
    let dim_tiles = dim.div_ceil(SIDE);
    let mut lanes = [0f32; MOST_PARTS * TILE];
    for key_tile in 0..block.n.div_ceil(ROW) {
        for dim_tile in 0..dim_tiles {
            let d = dim_tile * SIDE;
            let dims = (dim - d).min(SIDE);
            for lane in 0..SIDE {
                let to = lanes[lane * SIDE..].as_mut_ptr();
                // SAFETY: keys j0..j0 + n are inside the tensor, and dimensions d..d + dims; `lanes` has a tile for each part.
                unsafe {
                    let mut numbers = [S::splat(0.0); 2];
                    for (row, numbers) in numbers.iter_mut().enumerate() {
                        let j = key_tile * ROW + 2 * lane + row;
                        if j < block.n {
                            let from = input.at_key([batch, head, j0 + j, 0]).cast::<T>();
                            *numbers = read::<S, T>(from.wrapping_offset(d as isize * stride), stride, dims);
                        }
                    }
                    split_numbers::<S, T>(numbers, false, to, TILE);
                }
            }
            for part in 0..T::PARTS {
                let to = panel.wrapping_add(((key_tile * dim_tiles + dim_tile) * T::PARTS + part) * TILE);
                // SAFETY: both are whole tiles.
                unsafe { S::transpose(lanes.as_ptr().add(part * TILE), SIDE, to, SIDE) };
            }
        }
    }
}

/// What has parts: 0, and numbers between these two.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);
const LARGE: f32 = f32::from_bits((127 + 40) << 23);
/// The first of them where products of three numbers are split again.
const LEAST_OF_GRADIENTS: f32 = f32::from_bits((127 - 60) << 23);

/// Whether a number has parts, by its first one.
fn has_parts(first: f32) -> bool {
    first == 0.0 || (first.abs() >= LEAST && first.abs() < LARGE)
}

/// 1 where a number of either half has no parts, in place of `odd`.
#[inline(always)]
unsafe fn mark_odd<S: Bf16Pairs>(pairs: S::V, mut odd: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let (zero, one) = (S::splat(0.0), S::splat(1.0));
        for first in S::split(pairs) {
            let size = S::abs(first);
            let is_normal = S::select(S::lt(size, S::splat(LEAST)), S::select(S::eq(size, zero), one, zero), one);
            let has_parts = S::select(S::lt(size, S::splat(LARGE)), is_normal, zero);
            odd = S::select(S::eq(has_parts, zero), one, odd);
        }
        odd
    }
}

/// Whether rows of tiles have a number without parts: 1 or 0 to `flags`, for `rows` rows of `lanes` lanes, tile after tile `next` elements apart.
pub(crate) struct FindOdd {
    pub(crate) rows: usize,
    pub(crate) lanes: usize,
    /// The first parts: of row `r` at `r / 16 · row_tile + r % 16 · row`, a tile's lanes further `next` further.
    pub(crate) from: *const f32,
    pub(crate) row_tile: usize,
    pub(crate) row: usize,
    pub(crate) next: usize,
    pub(crate) flags: *mut f32,
}

impl<S: Bf16Pairs> Part<S> for FindOdd {
    /// Whether some row has.
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let mut any = false;
        for r in 0..self.rows {
            let row = self.from.wrapping_add(r / SIDE * self.row_tile + r % SIDE * self.row);
            // SAFETY: the caller vouches for the lanes and a flag for each row.
            unsafe {
                let mut odd = S::splat(0.0);
                for tile in 0..self.lanes / SIDE {
                    odd = mark_odd::<S>(S::load(row.add(tile * self.next)), odd);
                }
                let is_odd = S::reduce_add(odd) != 0.0;
                *self.flags.add(r) = if is_odd { 1.0 } else { 0.0 };
                any |= is_odd;
            }
        }
        any
    }
}

/// Whether all numbers of a panel of V have parts: found once, for the first tile of queries that asks.
pub(crate) unsafe fn all_have_parts<S: Bf16Pairs, T: Numbers<S>>(block: &mut Values<f32>) -> bool {
    let panel = HaveParts { from: block.rows.ptr, tiles: block.steps * block.lanes / TILE, parts: T::PARTS };
    // SAFETY: promised by the caller.
    *block.finite.get_or_insert_with(|| unsafe { S::apart_paired(panel) })
}

/// Tiles of first parts, each followed by those of its other parts.
struct HaveParts {
    from: *const f32,
    /// Of all parts.
    tiles: usize,
    parts: usize,
}

impl<S: Bf16Pairs> Part<S> for HaveParts {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let HaveParts { from, tiles, parts } = self;
        // SAFETY: the caller vouches for the panel.
        unsafe {
            let mut odd = S::splat(0.0);
            for tile in (0..tiles).step_by(parts) {
                for row in 0..SIDE {
                    odd = mark_odd::<S>(S::load(from.add(tile * TILE + row * SIDE)), odd);
                }
            }
            S::reduce_add(odd) == 0.0
        }
    }
}

/// Whether a row of a tile of first parts has a number that is not multiplied: one without parts, or one that is not finite if it is its only part.
#[inline(always)]
pub(crate) unsafe fn has_odd<S: Bf16Pairs, T: Numbers<S>>(row: *const f32) -> bool {
    // SAFETY: the caller vouches for the row.
    unsafe {
        let (pairs, zero) = (S::load(row), S::splat(0.0));
        if T::PARTS > 1 {
            return S::reduce_add(mark_odd::<S>(pairs, zero)) != 0.0;
        }
        let [low, high] = S::split(pairs);
        // 0 · x is 0 for finite x and NaN otherwise.
        S::reduce_add(S::fma(high, zero, S::mul(low, zero))).is_nan()
    }
}

/// A panel with zeros in place of what has no parts; it may be the same panel.
pub(crate) struct CleanParts {
    pub(crate) from: *const f32,
    pub(crate) len: usize,
    pub(crate) parts: usize,
    pub(crate) to: *mut f32,
}

impl<S: Bf16Pairs> Part<S> for CleanParts {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let CleanParts { from, len, parts, to } = self;
        for tile in (0..len).step_by(parts * TILE) {
            for lane in tile..tile + TILE {
                // SAFETY: the caller vouches for whole tiles of each part on both sides.
                unsafe {
                    let keep = halves((*from.add(lane)).to_bits()).map(has_parts);
                    let mask = (u32::from(keep[0]) * 0xFFFF) | (u32::from(keep[1]) * 0xFFFF_0000);
                    for at in (0..parts).map(|part| lane + part * TILE) {
                        *to.add(at) = f32::from_bits((*from.add(at)).to_bits() & mask);
                    }
                }
            }
        }
    }
}

/// The bf16 of a lane.
fn halves(pair: u32) -> [f32; 2] {
    [pair << 16, pair & 0xFFFF_0000].map(f32::from_bits)
}

/// Both numbers of a lane of which `from` is the first part, the others `part` elements further each; `None` for one that has parts, or is finite if
/// there is but one.
pub(crate) unsafe fn odd_numbers(from: *const f32, part: usize, parts: usize) -> [Option<f32>; 2] {
    // SAFETY: the caller vouches for a lane of each part.
    unsafe {
        let first = halves((*from).to_bits());
        let mut numbers = first.map(|_| 0.0);
        for n in (0..parts).rev() {
            let of_part = halves((*from.add(n * part)).to_bits());
            numbers = [numbers[0] + of_part[0], numbers[1] + of_part[1]];
        }
        let is_multiplied = |first: f32| if parts == 1 { first.is_finite() } else { has_parts(first) };
        let odd = |half: usize| (!is_multiplied(first[half])).then_some(numbers[half]);
        [odd(0), odd(1)]
    }
}

/// [`Amend`] for numbers of `T` and tiles of `V` vectors.
pub(crate) struct AmendScores<'a, T, const V: usize>(pub(crate) Amend<'a, f32>, pub(crate) PhantomData<T>);

impl<S: Bf16Pairs, T: Numbers<S>, const V: usize> Part<S> for AmendScores<'_, T, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Amend { problem, rows, keys: (j0, n), kv_head, odd_queries, odd_keys, x, room } = self.0;
        let (queries, dim, negate) = (V * S::LANES, problem.head_dim, problem.scores.negate_q);
        let Some(batch) = rows.first().map(|row| row.batch) else { return };
        // SAFETY: the caller vouches for the tile's scores and flags, and for a row of lanes for each number of a query.
        unsafe {
            let is_odd = |flags: *const f32, n: usize| *flags.add(n) != 0.0;
            let any_query = (0..rows.len()).any(|lane| is_odd(odd_queries, lane));
            for (lane, d) in (0..queries).flat_map(|lane| (0..dim).map(move |d| (lane, d))) {
                let q = rows
                    .get(lane)
                    .map_or(0.0, |row| T::widen(*problem.q.at([row.batch, row.head, row.i, d]).cast::<T>()));
                *room.add(d * queries + lane) = if negate { -q } else { q };
            }
            for j in 0..n {
                let is_odd_key = is_odd(odd_keys, j);
                if !is_odd_key && !any_query {
                    continue;
                }
                let k = problem.k.at_key([batch, kv_head, j0 + j, 0]).cast::<T>();
                let mut sums = [S::splat(0.0); V];
                for d in 0..dim {
                    let k = S::splat(T::widen(*k.wrapping_offset(d as isize * problem.k.strides[3])));
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = S::fma(k, S::load(room.add(d * queries + v * S::LANES)), *sum);
                    }
                }
                for (v, sum) in sums.into_iter().enumerate() {
                    let to = x.add(j * queries + v * S::LANES);
                    let keep = S::eq(S::load(odd_queries.add(v * S::LANES)), S::splat(0.0));
                    S::store(to, if is_odd_key { sum } else { S::select(keep, S::load(to), sum) });
                }
            }
        }
    }
}

/// Whether all numbers of a row of `dim` have parts, of which products are split again.
pub(crate) struct RowHasParts<T> {
    pub(crate) row: *const T,
    pub(crate) stride: isize,
    pub(crate) dim: usize,
}

impl<S: Bf16Pairs, T: Numbers<S>> Part<S> for RowHasParts<T> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let RowHasParts { row, stride, dim } = self;
        // SAFETY: the caller vouches for the row.
        unsafe {
            let (zero, one, least) = (S::splat(0.0), S::splat(1.0), S::splat(LEAST_OF_GRADIENTS));
            let (mut odd, mut at) = ([zero; 2], 0);
            while at < dim {
                for odd in &mut odd {
                    let x =
                        S::abs(read::<S, T>(row.wrapping_offset(at as isize * stride), stride, dim.saturating_sub(at)));
                    let is_odd = S::select(S::lt(x, least), S::select(S::eq(x, zero), *odd, one), *odd);
                    *odd = S::select(S::lt(x, S::splat(LARGE)), is_odd, one);
                    at += S::LANES;
                }
            }
            S::reduce_add(S::add(odd[0], odd[1])) == 0.0
        }
    }
}

/// `to += from`, `len` elements in whole vectors: sums of a block of keys, or of a run of queries. One sum over all of them would be rounded at its size for each
/// of the products of parts.
pub(crate) struct AddSums {
    pub(crate) from: *const f32,
    pub(crate) len: usize,
    pub(crate) to: *mut f32,
}

impl<S: Bf16Pairs> Part<S> for AddSums {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let AddSums { from, len, to } = self;
        // SAFETY: the caller vouches for the elements.
        unsafe {
            for at in (0..len).step_by(S::LANES) {
                S::store(to.add(at), S::add(S::load(to.add(at)), S::load(from.add(at))));
            }
        }
    }
}
