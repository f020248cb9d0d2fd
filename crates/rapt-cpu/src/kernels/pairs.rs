//! Products of bf16 formed two at a time: `Paired` of the table in `products`, for instruction sets with a dot of pairs.
//!
//! K, V and P lie as pairs of 32 bits, the earlier step in the low half: K and Q along head_dim, where K is read in place if
//! its rows are whole pairs; V as two rows woven into one. Deliberately absent: decode, which loads numbers one by one; `code_pairs` has what it makes of codes.

use half::bf16;

use super::products::{Block, Lanes, Packing, Products};
use super::simd::{Part, Real, Simd};
use crate::problem::Input;

/// Vectors whose 32-bit lanes can hold two bf16, the earlier one in the low half, bit for bit in a lane of f32.
pub(crate) trait Bf16Pairs: Simd<Elem = f32> {
    /// `acc + low(a)·low(b) + high(a)·high(b)` per lane, summed in f32.
    unsafe fn dot(a: Self::V, b: Self::V, acc: Self::V) -> Self::V;
    /// Two vectors rounded to bf16, to nearest even: `low` to the low halves.
    unsafe fn pair(low: Self::V, high: Self::V) -> Self::V;
    /// Two vectors to consecutive bf16, to nearest even.
    unsafe fn narrow(first: Self::V, second: Self::V) -> Self::V;
    /// The halves of `a` where those of `x` are not [`Real::MASKED`](super::simd::Real::MASKED); 0 elsewhere.
    unsafe fn keep_attended(a: Self::V, x: Self::V) -> Self::V;
    /// The bf16 of two vectors of f32 that hold nothing else: exact.
    unsafe fn join(low: Self::V, high: Self::V) -> Self::V;
    /// The low and the high halves as f32.
    unsafe fn split(pairs: Self::V) -> [Self::V; 2];
    /// `p`, halves of it a zero of their sign: the low one where the first word is at most `last`, the high one where the second is.
    unsafe fn drop_halves(p: Self::V, words: [Self::W; 2], last: u32) -> Self::V;
    /// As [`Simd::apart`], with the dot of pairs.
    unsafe fn apart_paired<P: Part<Self>>(part: P) -> P::Output;
}

/// Two bf16 steps per lane.
#[derive(Clone, Copy)]
pub(crate) struct Paired;

const SIGN: u16 = 0x8000;

impl<S: Bf16Pairs> Lanes<S> for Paired {
    const STEPS: usize = 2;
    type Lane = f32;
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load(ptr) }
    }
    #[inline(always)]
    unsafe fn accumulate(b: S::V, x: S::V, acc: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::dot(b, x, acc) }
    }
    #[inline(always)]
    unsafe fn apart<P: Part<S>>(part: P) -> P::Output {
        // SAFETY: promised by the caller.
        unsafe { S::apart_paired(part) }
    }
}

impl<S: Bf16Pairs> Products<S> for Paired {
    const EXP2: &'static [f32] = f32::SHORT_EXP2;
    #[inline(always)]
    unsafe fn accumulate_selecting(b: S::V, x: S::V, acc: S::V) -> S::V {
        // A product of zeros adds nothing, so both ways give the same bits.
        // SAFETY: promised by the caller.
        unsafe { S::dot(S::keep_attended(b, x), x, acc) }
    }
    #[inline(always)]
    unsafe fn store_weights(p: [S::V; 2], to: *mut f32, _: usize) {
        // SAFETY: promised by the caller.
        unsafe { S::store(to, S::pair(p[0], p[1])) }
    }
    #[inline(always)]
    unsafe fn drop_weights(p: S::V, words: [S::W; 2], last: u32) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::drop_halves(p, words, last) }
    }
    #[inline(always)]
    unsafe fn add_non_finite(values: S::V, sum: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe {
            let [low, high] = S::split(values);
            let zero = S::splat(0.0);
            S::fma(high, zero, S::fma(low, zero, sum))
        }
    }
}

impl<S: Bf16Pairs> Packing<S, bf16> for Paired {
    #[inline(always)]
    unsafe fn load_query(src: *const bf16, stride: isize, n: usize, negate: bool, dst: *mut f32) -> usize {
        let to = dst.cast::<u16>();
        // SAFETY: the caller vouches for n elements of src and n rounded up to whole lanes of dst.
        unsafe {
            let mut whole = 0;
            if stride == 1 {
                while whole + 2 * S::LANES <= n {
                    S::store(dst.add(whole / 2), S::load(src.add(whole).cast::<f32>()));
                    whole += 2 * S::LANES;
                }
            }
            for d in whole..n {
                *to.add(d) = (*src.wrapping_offset(d as isize * stride)).to_bits();
            }
            if negate {
                for d in 0..n {
                    *to.add(d) ^= SIGN;
                }
            }
            if n % 2 == 1 {
                *to.add(n) = 0;
            }
        }
        n.div_ceil(2)
    }
    #[inline(always)]
    unsafe fn pack_keys(input: &Input<4>, block: Block, dim: usize, panel: *mut f32) {
        let (batch, head, j0) = block.first;
        for j in 0..block.n {
            let row = input.at_key([batch, head, j0 + j, 0]).cast::<bf16>();
            // SAFETY: keys j0..j0 + n are inside the tensor; the panel has n rows of whole lanes.
            unsafe {
                <Paired as Packing<S, bf16>>::load_query(
                    row,
                    input.strides[3],
                    dim,
                    false,
                    panel.add(j * dim.div_ceil(2)),
                )
            };
        }
    }
    #[inline(always)]
    unsafe fn pack_values(input: &Input<4>, block: Block, dim: usize, panel: *mut f32) {
        let (batch, head, j0) = block.first;
        let row = |j: usize| input.at_key([batch, head, j0 + j, 0]).cast::<bf16>();
        // SAFETY: keys j0..j0 + n are inside the tensor; the panel has n.div_ceil(2) rows of dim lanes.
        unsafe {
            for (at, j) in (0..block.n).step_by(2).enumerate() {
                let high = (j + 1 < block.n).then(|| row(j + 1));
                weave::<S>(row(j), high, input.strides[3], dim, panel.add(at * dim));
            }
        }
    }
}

/// Two rows of `dim` numbers, `stride` apart, to one of lanes; zeros in place of a second one that is not there.
#[inline(always)]
pub(super) unsafe fn weave<S: Bf16Pairs>(
    low: *const bf16,
    high: Option<*const bf16>,
    stride: isize,
    dim: usize,
    to: *mut f32,
) {
    // SAFETY: the caller vouches for dim elements of each.
    unsafe {
        let mut d = 0;
        if stride == 1 {
            let zero = S::splat(0.0);
            while d + S::LANES <= dim {
                let high = if let Some(high) = high { S::load_bf16(high.add(d)) } else { zero };
                S::store(to.add(d), S::join(S::load_bf16(low.add(d)), high));
                d += S::LANES;
            }
        }
        while d < dim {
            let at = d as isize * stride;
            let bits = |row: *const bf16| u32::from((*row.wrapping_offset(at)).to_bits());
            to.add(d).cast::<u32>().write(bits(low) | high.map_or(0, bits) << 16);
            d += 1;
        }
    }
}
