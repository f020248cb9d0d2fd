//! The two products of forward on a block of keys: which inner loop forms them, and how K and V lie for it.
//!
//! ```text
//! Sᵀ[key][query]  = K · Qᵀ                     Oᵀ[dim][query] = Oᵀ · f[query] + Vᵀ · Pᵀ
//! ```
//! Here for broadcast rows (`matmul`), whose lanes are numbers; `coded` has them for pairs, `tiled` for tiles. Deliberately absent: what stands between the two.

use std::marker::PhantomData;

use super::matmul::{Broadcast, Factors, Matmul, MatmulSelecting, Onto};
use super::next_rows::NextRows;
use super::products::{Products, Single};
use super::simd::{Part, Real, Simd};
use crate::problem::{Problem, Row, Source};

/// Lanes of head_dim that QK sums at a time; the sums of the runs are then added. A lane is [`Lanes::STEPS`](super::products::Lanes::STEPS)
/// products. One sum over 256 lanes costs a third of the accuracy in f32 (6.6e-7 against 4.0e-7, Zen 5, 2026-11).
pub(super) const QK_RUN: usize = 128;

/// A block of keys or values as rows of lanes.
#[derive(Clone, Copy)]
pub(crate) struct Rows<E> {
    pub(crate) ptr: *const E,
    pub(crate) stride: isize,
}

impl<E> Rows<E> {
    /// The rows from row `n` on.
    #[inline(always)]
    pub(crate) fn from(self, n: usize) -> Rows<E> {
        Rows { ptr: self.ptr.wrapping_offset(n as isize * self.stride), ..self }
    }
}

/// Codes of a block of K or V that were made lanes.
#[derive(Clone, Copy)]
pub(crate) struct Coded<'a> {
    pub(crate) source: &'a Source,
    /// Batch, head and first key.
    pub(crate) first: [usize; 3],
    pub(crate) dim: usize,
    /// Of each key of K, beside its lanes; of V, what its factor adds to scores, and the inverse of the factor. Where lanes do not do, as of
    /// a factor of 1.
    pub(crate) factors: *const f32,
    pub(crate) inverses: *const f32,
    pub(crate) by_numbers: bool,
    /// Room for the numbers of one key.
    pub(crate) row: *mut f32,
}

impl Coded<'_> {
    /// The codes from key `n` of the block on.
    #[inline(always)]
    pub(crate) fn from(self, n: usize) -> Self {
        let [batch, head, j0] = self.first;
        Coded {
            first: [batch, head, j0 + n],
            factors: self.factors.wrapping_add(n),
            inverses: self.inverses.wrapping_add(n),
            ..self
        }
    }

    /// The numbers of key `j`.
    #[inline(always)]
    pub(crate) unsafe fn numbers(&self, j: usize) -> *const f32 {
        let [batch, head, j0] = self.first;
        // SAFETY: a key of the block; the row has room for it.
        unsafe { self.source.read_keys([batch, head, j0 + j], 1, self.dim, self.row) };
        self.row
    }
}

/// V of one block of keys.
pub(crate) struct Values<E> {
    pub(crate) rows: Rows<E>,
    /// How many rows of lanes.
    pub(crate) steps: usize,
    /// Lanes of a row.
    pub(crate) lanes: usize,
    /// Whether all of it is finite, once a tile asked.
    pub(crate) finite: Option<bool>,
}

/// The keys of a tile, and its queries.
#[derive(Clone, Copy)]
pub(crate) struct KeyProduct<E> {
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    pub(crate) k: Rows<E>,
    pub(crate) q_t: *const E,
    pub(crate) s: *mut E,
    /// What is asked for meanwhile.
    pub(crate) next: *mut NextRows,
}

/// The values of a tile's keys, and their weights.
pub(crate) struct ValueProduct<'a, S: Simd, const V: usize> {
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    pub(crate) v: Rows<S::Elem>,
    /// Lanes of weights, and room for those of a whole block.
    pub(crate) p: *mut S::Elem,
    /// Where weights lie as numbers, before some were dropped, if their lanes have more parts than steps.
    pub(crate) numbers: *const S::Elem,
    pub(crate) acc_o: *mut S::Elem,
    /// Room for as many sums, of numbers in parts.
    pub(crate) room: *mut S::Elem,
    pub(crate) factors: [S::V; V],
    /// The block that `v` is a part of, where a key may have a weight of [`Real::MASKED`].
    pub(crate) masked: Option<&'a mut Values<S::Elem>>,
    /// What is asked for meanwhile.
    pub(crate) next: *mut NextRows,
}

/// Scores of a tile that are computed again, since a row of q or of k has a number that its lanes do not hold (`parts`).
pub(crate) struct Amend<'a, E> {
    pub(crate) problem: &'a Problem,
    pub(crate) rows: &'a [Row],
    /// The first key, and how many there are.
    pub(crate) keys: (usize, usize),
    pub(crate) kv_head: usize,
    /// 1 for each query of the tile, and each key, that has such a number.
    pub(crate) odd_queries: *const E,
    pub(crate) odd_keys: *const E,
    /// Scores.
    pub(crate) x: *mut E,
    /// Room for Qᵀ of numbers.
    pub(crate) room: *mut E,
}

/// Products that are formed while other work goes on.
pub(crate) trait Beside {
    /// `parts` of `all` of the other work are done: as large a part of the products is due.
    unsafe fn go_on(&mut self, parts: usize, all: usize);
    /// Forms what is left.
    unsafe fn finish(self);
}

/// Nothing is left.
pub(crate) struct Formed;

impl Beside for Formed {
    #[inline(always)]
    unsafe fn go_on(&mut self, _: usize, _: usize) {}
    #[inline(always)]
    unsafe fn finish(self) {}
}

/// See the module. A tile may begin at every [`KEYS`](Self::KEYS)th key of a block; lanes of values are whole for as many.
pub(crate) trait BlockProducts<S: Simd>: Products<S> {
    const KEYS: usize = Self::STEPS;
    /// Whether products are formed beside other work, so that several tiles of queries are on their way at a time.
    const OVERLAPS: bool = false;
    /// What forms them.
    type Beside: Beside;
    /// How often [`NextRows::ask`] is called while the two products of a tile of queries are formed.
    fn asks(keys: usize, dim: usize, dim_v: usize) -> usize {
        keys.div_ceil(S::ROWS) * dim.div_ceil(Self::STEPS * QK_RUN) + dim_v.div_ceil(S::ROWS)
    }
    /// From one key to the next in a panel of K, in lanes.
    fn key_lanes(dim: usize) -> usize {
        dim.div_ceil(Self::STEPS)
    }
    /// Lanes of a row of a panel of V.
    fn value_lanes(dim: usize) -> usize {
        dim
    }
    /// Where sums go on from O, not from its product with the factors: O = O · f.
    #[inline(always)]
    unsafe fn rescale<const V: usize>(_dim: usize, _acc_o: *mut S::Elem, _factors: [S::V; V]) {}
    /// Whether V is always asked for numbers that are not multiplied, not only where some weight is masked.
    const CLEANS: bool = false;
    /// Adds what products of one block of keys left in `room`.
    unsafe fn add_sums<const V: usize>(_dim: usize, _room: *const S::Elem, _acc_o: *mut S::Elem) {}
    /// Scores that are to be computed again.
    unsafe fn amend<const V: usize>(_amend: Amend<'_, S::Elem>) {}
    /// Whether K and V that are codes may become lanes.
    const OF_CODES: bool = false;
    /// Scores of lanes of codes to scores of what they stand for.
    unsafe fn scale_scores<const V: usize>(_coded: &Coded<'_>, _product: KeyProduct<S::Elem>) {}
    /// O = O · f + P · V where lanes of codes do not do.
    unsafe fn add_numbers<const V: usize>(_coded: &Coded<'_>, _product: ValueProduct<'_, S, V>) {}
    /// S = K · Qᵀ of one tile, and O = O · f + P · V of another, of which what lies behind a masked weight has no part.
    unsafe fn multiply<const V: usize>(
        keys: Option<KeyProduct<S::Elem>>,
        values: Option<ValueProduct<'_, S, V>>,
    ) -> Self::Beside;
}

/// [`BlockProducts::multiply`] by broadcast rows.
pub(super) unsafe fn by_rows<S: Simd, M: Products<S>, const V: usize>(
    keys: Option<KeyProduct<S::Elem>>,
    values: Option<ValueProduct<'_, S, V>>,
) -> Formed {
    // SAFETY: promised by the caller.
    unsafe {
        if let Some(keys) = keys {
            keys_by_rows::<S, M, V>(keys);
        }
        if let Some(values) = values {
            values_by_rows::<S, M, V>(values);
        }
    }
    Formed
}

unsafe fn keys_by_rows<S: Simd, M: Products<S>, const V: usize>(product: KeyProduct<S::Elem>) {
    let KeyProduct { keys, dim, k, q_t, s, next } = product;
    let lanes = dim.div_ceil(M::STEPS);
    for d in (0..lanes).step_by(QK_RUN) {
        let run = QK_RUN.min(lanes - d);
        let b = Broadcast { ptr: k.ptr.wrapping_add(d), row: k.stride, step: 1 };
        let x = q_t.wrapping_add(d * V * S::LANES);
        let onto = if d == 0 { Onto::Nothing } else { Onto::Sum };
        // SAFETY: promised by the caller.
        unsafe {
            M::apart(Matmul::<S, M, V, false>(Factors { rows: keys, n: run, x, b, y: s, onto, next }, PhantomData));
        }
    }
}

unsafe fn values_by_rows<S: Simd, M: Products<S>, const V: usize>(product: ValueProduct<'_, S, V>) {
    let ValueProduct { keys, dim, v, p, acc_o, factors, masked, next, .. } = product;
    let b = Broadcast { ptr: v.ptr, row: 1, step: v.stride };
    let onto = Onto::Rescaled(factors);
    let product = Factors { rows: dim, n: keys.div_ceil(M::STEPS), x: p.cast_const(), b, y: acc_o, onto, next };
    // SAFETY: promised by the caller.
    unsafe {
        if masked.is_none_or(|block| is_finite::<S, M>(block)) {
            M::apart(Matmul::<S, M, V, true>(product, PhantomData));
        } else {
            M::apart(MatmulSelecting::<S, M, V>(product, PhantomData));
        }
    }
}

/// Whether a block is finite: found once, for the first tile that asks.
pub(crate) unsafe fn is_finite<S: Simd, M: Products<S>>(block: &mut Values<S::Elem>) -> bool {
    let Values { rows, steps, lanes, .. } = *block;
    // SAFETY: promised by the caller.
    *block
        .finite
        .get_or_insert_with(|| unsafe { M::apart(IsFinite { rows, n: steps, lanes, products: PhantomData::<M> }) })
}

/// Whether `n` rows of values of `lanes` lanes are finite.
struct IsFinite<E, M> {
    rows: Rows<E>,
    n: usize,
    lanes: usize,
    products: PhantomData<M>,
}

/// The most lanes of a vector.
const MOST_LANES: usize = 16;

impl<S: Simd, M: Products<S>> Part<S> for IsFinite<S::Elem, M> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let IsFinite { rows, n, lanes, .. } = self;
        // SAFETY: the caller vouches for the rows; the rest of one is copied to a whole vector of zeros.
        unsafe {
            // Sums side by side: one alone waits 4 cycles for each addition.
            let mut sums = [S::splat(S::Elem::ZERO); 4];
            for row in 0..n {
                let row = rows.from(row).ptr;
                let whole = lanes / S::LANES * S::LANES;
                let quads = whole / (4 * S::LANES) * 4 * S::LANES;
                for d in (0..quads).step_by(4 * S::LANES) {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = M::add_non_finite(S::load(row.add(d + v * S::LANES)), *sum);
                    }
                }
                for d in (quads..whole).step_by(S::LANES) {
                    sums[0] = M::add_non_finite(S::load(row.add(d)), sums[0]);
                }
                if whole < lanes {
                    let mut rest = [S::Elem::ZERO; MOST_LANES];
                    // As bytes: pairs of bf16 lie at multiples of 2.
                    let (from, bytes) = (row.add(whole).cast::<u8>(), (lanes - whole) * size_of::<S::Elem>());
                    std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr().cast(), bytes);
                    sums[1] = M::add_non_finite(S::load(rest.as_ptr()), sums[1]);
                }
            }
            let sum = S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
            !S::reduce_add(sum).is_nan()
        }
    }
}

impl<S: Simd> BlockProducts<S> for Single {
    type Beside = Formed;
    unsafe fn multiply<const V: usize>(
        keys: Option<KeyProduct<S::Elem>>,
        values: Option<ValueProduct<'_, S, V>>,
    ) -> Formed {
        // SAFETY: promised by the caller.
        unsafe { by_rows::<S, Single, V>(keys, values) }
    }
}
