//! Dropout: of weights that were summed some become 0. What those kept are scaled with goes into the end of a row; backward multiplies with it at each pair.
//!
//! ```text
//! p = 0 where word(seed, offset, batch, head, row, key) ≤ last       a block of Philox has the words of four keys of one row
//! ```
//! (`rapt_core::DropoutSeed` is the definition.) Lanes are rows in forward and in backward, groups of keys in decode. What a lane makes of the first three of ten rounds
//! without its group is found once ([`Start`]): a block then takes 16 products of 32 by 32 bits, not 20. A dropped weight is a zero of its own sign,
//! so that one of a masked key stays [`Real::MASKED`]. Deliberately absent: a mask in memory.

use std::marker::PhantomData;

use rapt_core::{DropoutHead, PHILOX_INCREMENTS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS, column_of_group, group_of_column};

use super::products::Products;
use super::simd::{Part, Real, Simd};
use crate::dropping::Dropping;
use crate::problem::Row;

/// The most lanes of a vector.
const MOST_LANES: usize = 16;

/// Rounds that a block goes through whole.
const WHOLE_ROUNDS: usize = PHILOX_ROUNDS - 3;

/// What the lanes of a vector of blocks are without their groups.
///
/// ```text
/// counter (c, group, d, row), keys (k₁, l₁), (k₂, l₂), …; M₀, M₁ the multipliers
/// round 1   A ^ group              low(M₁·d)     high(M₀·c) ^ row ^ l₁                low(M₀·c)
/// round 2   of the others alone    likewise      y = high(M₀·(A ^ group)) ^ B         low(M₀·(A ^ group))
/// round 3   high(M₁·y) ^ C         low(M₁·y)     low(M₀·(A ^ group)) ^ D              E
/// ```
#[derive(Clone, Copy)]
struct Start<S: Simd> {
    a: S::W,
    b: S::W,
    c: S::W,
    d: S::W,
    e: S::W,
    keys: [[S::W; 2]; WHOLE_ROUNDS],
}

/// What each lane of a vector is of.
#[derive(Clone, Copy)]
struct Places {
    key: [[u32; MOST_LANES]; 2],
    words: [[u32; MOST_LANES]; 2],
    row: [u32; MOST_LANES],
}

impl Places {
    const NONE: Places = Places { key: [[0; MOST_LANES]; 2], words: [[0; MOST_LANES]; 2], row: [0; MOST_LANES] };

    fn set(&mut self, lane: usize, head: DropoutHead, row: usize) {
        for n in 0..2 {
            (self.key[n][lane], self.words[n][lane]) = (head.key[n], head.words[n]);
        }
        self.row[lane] = row as u32;
    }
}

impl<S: Simd> Start<S> {
    #[inline(always)]
    unsafe fn new(places: &Places) -> Self {
        let [m0, m1] = PHILOX_MULTIPLIERS;
        // SAFETY: the arrays have the words of the longest vector; the caller vouches for the instruction set.
        unsafe {
            let grow = [S::same_word(PHILOX_INCREMENTS[0]), S::same_word(PHILOX_INCREMENTS[1])];
            let first = [S::words(places.key[0].as_ptr()), S::words(places.key[1].as_ptr())];
            let mut all = [first; PHILOX_ROUNDS];
            for round in 1..PHILOX_ROUNDS {
                let [k, l] = all[round - 1];
                all[round] = [S::add_words(k, grow[0]), S::add_words(l, grow[1])];
            }
            let [high_c, low_c] = S::multiply_words(S::words(places.words[0].as_ptr()), m0);
            let [high_d, low_d] = S::multiply_words(S::words(places.words[1].as_ptr()), m1);
            let row = S::words(places.row.as_ptr());
            let [high, low] = S::multiply_words(S::xor_words(S::xor_words(high_c, row), all[0][1]), m1);
            let c = S::xor_words(low, all[2][0]);
            let [high, low] = S::multiply_words(S::xor_words(S::xor_words(high, low_d), all[1][0]), m0);
            let mut keys = [first; WHOLE_ROUNDS];
            keys.copy_from_slice(&all[PHILOX_ROUNDS - WHOLE_ROUNDS..]);
            let (a, b) = (S::xor_words(high_d, all[0][0]), S::xor_words(low_c, all[1][1]));
            Start { a, b, c, d: S::xor_words(high, all[2][1]), e: low, keys }
        }
    }

    /// The blocks of the lanes at their groups.
    #[inline(always)]
    unsafe fn blocks(&self, group: S::W) -> [S::W; 4] {
        let [m0, m1] = PHILOX_MULTIPLIERS;
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let [high, low] = S::multiply_words(S::xor_words(self.a, group), m0);
            let [high_y, low_y] = S::multiply_words(S::xor_words(high, self.b), m1);
            let mut x = [S::xor_words(high_y, self.c), low_y, S::xor_words(low, self.d), self.e];
            for &[k, l] in &self.keys {
                let ([high_0, low_0], [high_1, low_1]) = (S::multiply_words(x[0], m0), S::multiply_words(x[2], m1));
                let first = S::xor_words(S::xor_words(high_1, x[1]), k);
                x = [first, low_1, S::xor_words(S::xor_words(high_0, x[3]), l), low_0];
            }
            x
        }
    }
}

/// A tile: rows along `V` vectors of lanes, by keys.
pub(super) struct DropTile<'a> {
    /// A copy: behind a reference it would be read again after every store.
    pub(super) dropping: Dropping,
    pub(super) rows: &'a [Row],
    /// The first key, and how many there are.
    pub(super) keys: (usize, usize),
}

/// What is done with the words of a tile.
trait Meet<S: Simd> {
    /// Keys beside one another that one lane holds.
    const STEPS: usize;
    /// The words of vector `v` at the keys that begin at `j` of the tile, and at the key behind it.
    unsafe fn meet(&self, j: usize, v: usize, words: [S::W; 2]);
}

impl DropTile<'_> {
    /// Shows `with` the words of every key and row.
    #[inline(always)]
    unsafe fn words<S: Simd, W: Meet<S>, const V: usize>(&self, with: &W) {
        let DropTile { dropping: Dropping { seed, .. }, rows, keys: (j0, n) } = *self;
        debug_assert!(j0.is_multiple_of(W::STEPS) && W::STEPS <= 2, "a pair of neighbours is of one group");
        let mut places = [Places::NONE; V];
        // Rows follow one another head by head.
        let mut last_head = None;
        for (at, row) in rows.iter().enumerate() {
            let head = match last_head {
                Some((name, head)) if name == (row.batch, row.head) => head,
                _ => seed.of_head(row.batch, row.head),
            };
            last_head = Some(((row.batch, row.head), head));
            places[at / S::LANES].set(at % S::LANES, head, row.i);
        }
        // SAFETY: the caller vouches for the instruction set, and that `with` takes every key and vector of the tile.
        unsafe {
            let mut starts = [Start::<S>::new(&places[0]); V];
            for v in 1..V {
                starts[v] = Start::new(&places[v]);
            }
            for group in j0 / 16 * 4..(j0 + n).div_ceil(16) * 4 {
                let of_group = S::same_word(group as u32);
                for (v, start) in starts.iter().enumerate() {
                    let words = start.blocks(of_group);
                    for first in [0, 2] {
                        for word in (first..first + 2).step_by(W::STEPS) {
                            let j = column_of_group(group, word);
                            if j >= j0 && j < j0 + n {
                                with.meet(j - j0, v, [words[word], words[first + 1]]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Drops lanes of weights of a tile of forward, in place: a lane begins at every `STEPS`th key.
pub(super) struct DropWeights<'a, S: Simd, M, const V: usize> {
    pub(super) tile: DropTile<'a>,
    pub(super) p: *mut S::Elem,
    pub(super) products: PhantomData<M>,
}

impl<S: Simd, M: Products<S>, const V: usize> Meet<S> for DropWeights<'_, S, M, V> {
    const STEPS: usize = M::STEPS;
    #[inline(always)]
    unsafe fn meet(&self, j: usize, v: usize, words: [S::W; 2]) {
        // SAFETY: p has rows of V vectors for each lane of keys.
        unsafe {
            for part in 0..M::PARTS {
                let at = self.p.add(((j / M::STEPS * M::PARTS + part) * V + v) * S::LANES);
                S::store(at, M::drop_weights(S::load(at), words, self.tile.dropping.last));
            }
        }
    }
}

impl<S: Simd, M: Products<S>, const V: usize> Part<S> for DropWeights<'_, S, M, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: as of the caller.
        unsafe { self.tile.words::<S, Self, V>(&self) }
    }
}

/// Multiplies what arrives at the weights of a tile of backward with what they were multiplied with, in place, and keeps the factors.
pub(super) struct DropArriving<'a, S: Simd> {
    pub(super) tile: DropTile<'a>,
    /// `[keys][lanes of two vectors]`, as are the factors.
    pub(super) dp: *mut S::Elem,
    pub(super) kept: *mut S::Elem,
}

impl<S: Simd> Meet<S> for DropArriving<'_, S> {
    const STEPS: usize = 1;
    #[inline(always)]
    unsafe fn meet(&self, j: usize, v: usize, words: [S::W; 2]) {
        let (at, Dropping { scale, last, .. }) = ((2 * j + v) * S::LANES, self.tile.dropping);
        // SAFETY: both have two vectors for each key.
        unsafe {
            // Not chosen but multiplied: a dropped key is attended, and its NaN not hidden.
            let kept = S::drop_lanes(S::splat(S::Elem::from_f64_clamped(scale)), words[0], last);
            S::store(self.kept.add(at), kept);
            S::store(self.dp.add(at), S::mul(S::load(self.dp.add(at)), kept));
        }
    }
}

impl<S: Simd> Part<S> for DropArriving<'_, S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: as of the caller.
        unsafe { self.tile.words::<S, Self, 2>(&self) }
    }
}

/// Drops weights of some keys of one row of decode, in place.
pub(super) struct DropRow<'a, E> {
    pub(super) dropping: &'a Dropping,
    pub(super) row: Row,
    /// The first key, and how many there are.
    pub(super) keys: (usize, usize),
    pub(super) p: *mut E,
}

impl<S: Simd> Part<S> for DropRow<'_, S::Elem> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let DropRow { dropping: &Dropping { seed, last, .. }, row, keys: (j0, n), p } = self;
        let (head, mut places) = (seed.of_head(row.batch, row.head), Places::NONE);
        (0..MOST_LANES).for_each(|lane| places.set(lane, head, row.i));
        let end = group_of_column((j0 + n).next_multiple_of(16)).0;
        // SAFETY: p has n weights; the arrays have the lanes of the longest vector.
        unsafe {
            let start = Start::<S>::new(&places);
            for first in (group_of_column(j0 / 16 * 16).0..end).step_by(S::LANES) {
                let mut groups = [0u32; MOST_LANES];
                for (lane, group) in groups.iter_mut().enumerate() {
                    *group = (first + lane) as u32;
                }
                let words = start.blocks(S::words(groups.as_ptr()));
                for (word, &words) in words.iter().enumerate() {
                    let mut kept = [S::Elem::ZERO; MOST_LANES];
                    S::store(kept.as_mut_ptr(), S::drop_lanes(S::splat(S::Elem::ONE), words, last));
                    for (lane, &kept) in kept.iter().enumerate().take(S::LANES) {
                        let j = column_of_group(first + lane, word);
                        if j >= j0 && j < j0 + n {
                            *p.add(j - j0) = *p.add(j - j0) * kept;
                        }
                    }
                }
            }
        }
    }
}
