//! Both products of int8: quads of bytes that follow one another along the contraction, summed in 32 bits.
//!
//! ```text
//! S[key][query]  = Σ_t kc[key][t] · (qc[t][query] + 128) − 128 · Σ_t kc[key][t]      t along head_dim, four a quad
//! O[dim][query]  = Σ_j vc[j][dim] · pc[j][query]                                     j along the keys, four a quad
//! ```
//! The operand of the queries is unsigned, the broadcast one signed, as `vpdpbusd` wants them: p is never negative, and q is shifted by 128,
//! which the sum of each key's codes takes back. What is past the end of a row, and what is no key, is 0 in the broadcast operand. Every sum
//! is exact, so neither the order nor the tile has a say. Deliberately absent: saturation; partial sums may wrap, whole ones fit.

use crate::kernels::blocks::Rows;
use crate::kernels::simd::{Part, Simd};
use crate::kernels::softmax::max_skipping_nan;

use std::marker::PhantomData;

/// Integers beside the vectors of f32 of an instruction set.
pub(crate) trait Quads<S: Simd<Elem = f32>>: Copy + 'static {
    /// A 32-bit integer per lane, or a quad of bytes.
    type I: Copy;
    /// Broadcast rows of a micro-tile: with two vectors each as many accumulators as leave registers for the rest; at most 8.
    const ROWS: usize;
    unsafe fn splat(x: i32) -> Self::I;
    unsafe fn load(ptr: *const i32) -> Self::I;
    unsafe fn store(ptr: *mut i32, x: Self::I);
    /// `acc + Σ unsigned · signed` over the four bytes of each lane; the sum wraps.
    unsafe fn dot(unsigned: Self::I, signed: Self::I, acc: Self::I) -> Self::I;
    /// To f32, to nearest even.
    unsafe fn to_f32(x: Self::I) -> S::V;
    /// Nearest integers, even at ties, of numbers from −255 to 255; any integer for NaN.
    unsafe fn round(x: S::V) -> Self::I;
    /// Of each lane the low bytes of four integers from 0 to 255, the first lowest.
    unsafe fn join(x: [Self::I; 4]) -> Self::I;
    /// Of each lane 128 more, wrapping.
    unsafe fn add_128(x: Self::I) -> Self::I;
    /// As [`Simd::apart`], with what these need besides.
    unsafe fn apart<P: Part<S>>(part: P) -> P::Output;
}

/// Steps of one turn of the loop, whose elements are reached by displacements.
const UNROLL: usize = 4;

/// The quads of rows `r` and steps `t` at `ptr + r·row + t·step`, of which one of the two distances is 1: `ROW1` says which.
#[derive(Clone, Copy)]
struct Broadcast {
    ptr: *const i32,
    row: usize,
    step: usize,
}

/// ```text
/// acc[r][query] = acc[r] + Σ_t x[t][query] · b[r, t]          t in 0..n
/// ```
#[inline(always)]
unsafe fn dots<S: Simd<Elem = f32>, Q: Quads<S>, const V: usize, const R: usize, const ROW1: bool>(
    n: usize,
    x: *const i32,
    b: Broadcast,
    first: [Q::I; R],
) -> [[Q::I; V]; R] {
    let mut acc = first.map(|first| [first; V]);
    let mut rows = [b.ptr; R];
    for (r, row) in rows.iter_mut().enumerate() {
        let ptr = b.ptr.wrapping_add(r * if ROW1 { 1 } else { b.row });
        // Rows that lie apart have a pointer each; neighbours are displacements of one.
        *row = if ROW1 { ptr } else { S::hide(ptr.cast()).cast() };
    }
    let step = if ROW1 { b.step } else { 1 };
    let (mut x, mut t) = (x, 0);
    // SAFETY: the caller vouches for R rows of n steps of b, and n rows of V vectors of x.
    unsafe {
        while t + UNROLL <= n {
            for at in 0..UNROLL {
                one::<S, Q, V, R, ROW1>(x.add(at * V * S::LANES), rows, at * step, &mut acc);
            }
            x = x.add(UNROLL * V * S::LANES);
            for row in &mut rows {
                *row = row.wrapping_add(UNROLL * step);
            }
            t += UNROLL;
        }
        while t < n {
            one::<S, Q, V, R, ROW1>(x, rows, 0, &mut acc);
            x = x.add(V * S::LANES);
            for row in &mut rows {
                *row = row.wrapping_add(step);
            }
            t += 1;
        }
    }
    acc
}

/// One step: a quad of each of `R` rows times `V` vectors.
#[inline(always)]
unsafe fn one<S: Simd<Elem = f32>, Q: Quads<S>, const V: usize, const R: usize, const ROW1: bool>(
    x: *const i32,
    rows: [*const i32; R],
    at: usize,
    acc: &mut [[Q::I; V]; R],
) {
    // SAFETY: as of the caller.
    unsafe {
        let mut xs = [acc[0][0]; V];
        for (v, xs) in xs.iter_mut().enumerate() {
            *xs = Q::load(x.add(v * S::LANES));
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            let row = if ROW1 { rows[0].add(r) } else { rows[r] };
            let b = Q::splat(*row.add(at));
            for (x, acc) in xs.iter().zip(acc) {
                *acc = Q::dot(*x, b, *acc);
            }
        }
    }
}

/// Calls `$body` with `R` as the rows of the next micro-tile, which begins at row `$r`, until none of `$rows` is left.
macro_rules! by_rows {
    ($rows:expr, $most:expr, |$r:ident, $R:ident| $body:expr) => {{
        let (rows, mut $r) = ($rows, 0);
        while $r < rows {
            match (rows - $r).min($most) {
                8.. => by_rows!(8, $r, $R, $body),
                6.. => by_rows!(6, $r, $R, $body),
                4.. => by_rows!(4, $r, $R, $body),
                2.. => by_rows!(2, $r, $R, $body),
                _ => by_rows!(1, $r, $R, $body),
            }
        }
    }};
    ($n:literal, $r:ident, $R:ident, $body:expr) => {{
        const $R: usize = $n;
        $body;
        $r += $R;
    }};
}

/// The keys of a tile, and its queries.
pub(super) struct KeyProduct<S, Q, const V: usize, const OWN: bool> {
    pub(super) keys: usize,
    /// Quads of a row.
    pub(super) quads: usize,
    /// Rows of quads.
    pub(super) k: Rows<i32>,
    /// Of each key −128 times the sum of its codes.
    pub(super) sums: *const i32,
    /// Of each key its own factor, where `OWN`.
    pub(super) factors: *const f32,
    pub(super) q_t: *const i32,
    pub(super) x: *mut f32,
    pub(super) vectors: PhantomData<(S, Q)>,
}

impl<S: Simd<Elem = f32>, Q: Quads<S>, const V: usize, const OWN: bool> Part<S> for KeyProduct<S, Q, V, OWN> {
    /// Of each query the largest of its products, times factors.
    type Output = [S::V; V];
    #[inline(always)]
    unsafe fn run(self) -> [S::V; V] {
        let KeyProduct { keys, quads, k, sums, factors, q_t, x, .. } = self;
        // SAFETY: the caller vouches for `keys` rows of k, sums, factors and x, and for q_t.
        unsafe {
            let mut max = [S::splat(f32::NEG_INFINITY); V];
            by_rows!(keys, Q::ROWS, |j, R| {
                let mut first = [Q::splat(0); R];
                for (r, first) in first.iter_mut().enumerate() {
                    *first = Q::splat(*sums.add(j + r));
                }
                let b = Broadcast { ptr: k.from(j).ptr, row: k.stride as usize, step: 1 };
                let acc = dots::<S, Q, V, R, false>(quads, q_t, b, first);
                for (r, acc) in acc.iter().enumerate() {
                    for (v, &acc) in acc.iter().enumerate() {
                        let mut product = Q::to_f32(acc);
                        if OWN {
                            product = S::mul(product, S::splat(*factors.add(j + r)));
                        }
                        S::store(x.add(((j + r) * V + v) * S::LANES), product);
                        max[v] = max_skipping_nan::<S>(max[v], product);
                    }
                }
            });
            max
        }
    }
}

/// `O = O · a + (P · V) · w` on a block of keys.
pub(super) struct ValueProduct<S: Simd, Q, const V: usize> {
    /// Quads of keys.
    pub(super) quads: usize,
    pub(super) dim: usize,
    /// Rows of `dim` quads.
    pub(super) v: Rows<i32>,
    pub(super) p: *const i32,
    pub(super) acc_o: *mut f32,
    /// What is made of the sums before, and of those of this block.
    pub(super) factors: [[S::V; V]; 2],
    pub(super) integers: PhantomData<Q>,
}

impl<S: Simd<Elem = f32>, Q: Quads<S>, const V: usize> Part<S> for ValueProduct<S, Q, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let ValueProduct { quads, dim, v, p, acc_o, factors: [old, new], .. } = self;
        // SAFETY: the caller vouches for `quads` rows of v and p, and for `dim` rows of acc_o.
        unsafe {
            by_rows!(dim, Q::ROWS, |d, R| {
                let b = Broadcast { ptr: v.ptr.add(d), row: 1, step: v.stride as usize };
                let acc = dots::<S, Q, V, R, true>(quads, p, b, [Q::splat(0); R]);
                for (r, acc) in acc.iter().enumerate() {
                    for (v, &acc) in acc.iter().enumerate() {
                        let at = acc_o.add(((d + r) * V + v) * S::LANES);
                        S::store(at, S::fma(Q::to_f32(acc), new[v], S::mul(S::load(at), old[v])));
                    }
                }
            });
        }
    }
}
