//! What a lane holds along a contraction, and how two lanes are multiplied: the one choice that the forward body leaves open.
//!
//! `Single`: one number of the accumulation dtype; 16-bit K and V are widened into panels. `Paired` (`pairs`): two bf16 that follow
//! one another along the contraction, the earlier one in the low half, summed in f32 by one dot instruction: Q, K and the
//! rows of V stay bf16, and P is rounded to bf16 for the second product (not for the sum that divides).
//!
//! ```text
//!            S = QKᵀ, along head_dim             O += PV, along the keys
//! Single     q[d], k[d]                          p[j], v[j][d]
//! Paired     (q[2t], q[2t+1]), (k[2t], k[2t+1])  (p[2t], p[2t+1]), (v[2t][d], v[2t+1][d])
//! ```
//! A step past the end is 0 in q and k where head_dim is odd; where the number of keys is, its weight is that of a masked key.

use super::pack::{load_row, pack_panel};
use super::simd::{Part, Real, Simd, Storage};
use crate::problem::Input;

/// Where a block of keys begins: batch, head of K and V, first key; and how many keys it has.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) first: (usize, usize, usize),
    pub(crate) n: usize,
}

/// What the inner loop (`matmul`) asks: how lanes lie in memory, and how they are multiplied.
pub(crate) trait Lanes<S: Simd>: Copy + 'static {
    /// Steps of the contraction per lane.
    const STEPS: usize;
    /// A lane of the operand that is read in vectors.
    type Lane: Copy;
    /// The next lanes of that operand.
    unsafe fn load(ptr: *const Self::Lane) -> S::V;
    /// `acc + Σ b·x` over the steps of each lane.
    unsafe fn accumulate(b: S::V, x: S::V, acc: S::V) -> S::V;
    /// As [`Simd::apart`], with what these products need besides.
    unsafe fn apart<P: Part<S>>(part: P) -> P::Output;
}

/// See the module. Lanes are counted in elements of the accumulation dtype.
pub(crate) trait Products<S: Simd>: Lanes<S> {
    /// Lanes that a number is the sum of: rows of weights that follow one another for each step.
    const PARTS: usize = 1;
    /// The polynomial of probabilities.
    const EXP2: &'static [S::Elem] = <S::Elem as Real>::EXP2;
    /// The same over the steps whose weight `x` is not [`Real::MASKED`]: what lies in `b` behind one that is has no say.
    unsafe fn accumulate_selecting(b: S::V, x: S::V, acc: S::V) -> S::V;
    /// Probabilities of `STEPS` keys as a lane; as one for each part, to rows `row` elements apart.
    unsafe fn store_weights(p: [S::V; 2], to: *mut S::Elem, row: usize);
    /// Weights, those whose word is at most `last` a zero of their sign: `words` are of the steps of a lane, or twice of its one.
    unsafe fn drop_weights(p: S::V, words: [S::W; 2], last: u32) -> S::V;
    /// A number that is NaN where a lane of values holds NaN or infinity, and 0 elsewhere, added to `sum`.
    unsafe fn add_non_finite(values: S::V, sum: S::V) -> S::V;
}

/// How rows of a storage dtype become lanes.
pub(crate) trait Packing<S: Simd, T: Storage<S>>: Products<S> {
    /// Lanes of a row of Q.
    fn query_lanes(dim: usize) -> usize {
        dim.div_ceil(Self::STEPS)
    }
    /// One row of Q, negated if asked, to consecutive lanes; answers how many.
    unsafe fn load_query(src: *const T, stride: isize, n: usize, negate: bool, dst: *mut S::Elem) -> usize;
    /// A block of K to rows of `dim.div_ceil(STEPS)` lanes.
    unsafe fn pack_keys(input: &Input<4>, block: Block, dim: usize, panel: *mut S::Elem);
    /// A block of V to one row of `dim` lanes per `STEPS` keys.
    unsafe fn pack_values(input: &Input<4>, block: Block, dim: usize, panel: *mut S::Elem);
    /// Whether scores of some rows of Q and K are to be computed again (`parts`): 1 or 0 for each of `n` packed queries of lanes `row` apart, or keys.
    unsafe fn find_odd_queries(_n: usize, _dim: usize, _rows: *const S::Elem, _row: usize, _flags: *mut S::Elem) {}
    /// The same of keys; answers whether there are any.
    unsafe fn find_odd_keys(_n: usize, _dim: usize, _panel: *const S::Elem, _flags: *mut S::Elem) -> bool {
        false
    }
}

/// One step per lane, in the accumulation dtype.
#[derive(Clone, Copy)]
pub(crate) struct Single;

impl<S: Simd> Lanes<S> for Single {
    const STEPS: usize = 1;
    type Lane = S::Elem;
    #[inline(always)]
    unsafe fn load(ptr: *const S::Elem) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load(ptr) }
    }
    #[inline(always)]
    unsafe fn accumulate(b: S::V, x: S::V, acc: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::fma(b, x, acc) }
    }
    #[inline(always)]
    unsafe fn apart<P: Part<S>>(part: P) -> P::Output {
        // SAFETY: promised by the caller.
        unsafe { S::apart(part) }
    }
}

impl<S: Simd> Products<S> for Single {
    #[inline(always)]
    unsafe fn accumulate_selecting(b: S::V, x: S::V, acc: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe {
            // Of all weights −0 alone has a negative inverse.
            let masked = S::lt(S::div(S::splat(S::Elem::ONE), x), S::splat(S::Elem::ZERO));
            S::select(masked, acc, S::fma(b, x, acc))
        }
    }
    #[inline(always)]
    unsafe fn store_weights(p: [S::V; 2], to: *mut S::Elem, _: usize) {
        // SAFETY: promised by the caller.
        unsafe { S::store(to, p[0]) }
    }
    #[inline(always)]
    unsafe fn drop_weights(p: S::V, words: [S::W; 2], last: u32) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::drop_lanes(p, words[0], last) }
    }
    #[inline(always)]
    unsafe fn add_non_finite(values: S::V, sum: S::V) -> S::V {
        // 0 · x is 0 for finite x and NaN otherwise.
        // SAFETY: promised by the caller.
        unsafe { S::fma(values, S::splat(S::Elem::ZERO), sum) }
    }
}

impl<S: Simd, T: Storage<S>> Packing<S, T> for Single {
    #[inline(always)]
    unsafe fn load_query(src: *const T, stride: isize, n: usize, negate: bool, dst: *mut S::Elem) -> usize {
        // SAFETY: the caller vouches for n elements on both sides.
        unsafe {
            load_row::<S, T>(src, stride, n, dst);
            if negate {
                for d in 0..n {
                    *dst.add(d) = S::Elem::ZERO - *dst.add(d);
                }
            }
        }
        n
    }
    #[inline(always)]
    unsafe fn pack_keys(input: &Input<4>, block: Block, dim: usize, panel: *mut S::Elem) {
        // SAFETY: promised by the caller.
        unsafe { pack_panel::<S, T>(input, block.first, block.n, dim, panel) }
    }
    #[inline(always)]
    unsafe fn pack_values(input: &Input<4>, block: Block, dim: usize, panel: *mut S::Elem) {
        // SAFETY: promised by the caller.
        unsafe { pack_panel::<S, T>(input, block.first, block.n, dim, panel) }
    }
}
