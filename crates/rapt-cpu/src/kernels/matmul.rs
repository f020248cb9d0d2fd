//! The one inner loop of both products: a block of broadcast rows times a run of vectors.
//!
//! ```text
//! for r in 0..rows: for q in 0..V · LANES:
//!     y[r][q] = y[r][q]·f[q] + Σ_t b[r, t] · x[t][q]          t in 0..n, b[r, t] at b + r·row + t·step
//! ```
//! For S = QKᵀ (transposed: keys × queries) `r` runs over keys, `t` over head_dim; for O += P·V (transposed: head_dim ×
//! queries) `r` runs over head_dim, `t` over keys. Sums start at zero for each call and are added to `y` at the end, so a
//! long contraction is summed in blocks; what `y` is multiplied with then, [`Onto`] says. A step is a lane: what it holds and
//! how it is multiplied, `products` says. A row and a query are summed in the order of `t` whatever the shape of the tile.
//! Deliberately absent: tails in `n`; every address read is one of the operands'.

use std::marker::PhantomData;

use super::next_rows::NextRows;
use super::products::{Lanes, Products};
use super::simd::{Part, Real, Simd};

/// Steps of one turn of the loops: the elements of a row are then reached by displacements, and pointers move once per
/// turn. With a step per turn their arithmetic takes issue slots of the two vector ports of Intel's cores (one core of a
/// Xeon, family 6 model 207, reaches 84 % of the FMA rate with this in f32 at D 128, 2026-11); Zen 4 has ports of its own
/// for it.
const UNROLL: usize = 4;

/// The broadcast operand: element `(r, t)` lies at `ptr + r·row + t·step`, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Broadcast<E> {
    pub(crate) ptr: *const E,
    pub(crate) row: isize,
    pub(crate) step: isize,
}

/// Rows of sums, `row` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Place<E> {
    pub(crate) ptr: *mut E,
    pub(crate) row: usize,
}

/// What becomes of `y`: `f` of the module's equation.
#[derive(Clone, Copy)]
pub(crate) enum Onto<S: Simd, const V: usize> {
    /// 0: `y` need not be set.
    Nothing,
    /// 1.
    Sum,
    /// One factor per query: what was summed under a lower maximum is rescaled where it is read anyway.
    Rescaled([S::V; V]),
}

/// `R` rows. `ROW1`: the row stride is 1; otherwise the step is 1.
#[inline(always)]
unsafe fn micro<S: Simd, M: Lanes<S>, const V: usize, const R: usize, const ROW1: bool>(
    n: usize,
    x: *const M::Lane,
    b: Broadcast<S::Elem>,
    y: Place<S::Elem>,
    onto: Onto<S, V>,
) {
    // SAFETY: the caller vouches for R rows and n steps of b, n rows of x and R rows of y.
    unsafe {
        let mut acc = [[S::splat(S::Elem::ZERO); V]; R];
        let mut x = x;
        // Only the full tile is worth the code. In 16 registers a turn along the keys spills an accumulator: 0.6 of the speed
        // (AVX2, Zen 4, 2026-11).
        let unrolled = R * V == S::ROWS * S::Q_VECS && (!ROW1 || S::ROWS >= 8);
        let turns = if unrolled { n / UNROLL } else { 0 };
        if ROW1 {
            let mut bt = b.ptr;
            for _ in 0..turns {
                for step in 0..UNROLL {
                    let bt = bt.wrapping_offset(step as isize * b.step);
                    lane::<S, M, V, R>(
                        std::array::from_fn(|r| bt.wrapping_add(r)),
                        x.add(step * V * S::LANES),
                        &mut acc,
                    );
                }
                x = x.add(UNROLL * V * S::LANES);
                bt = bt.wrapping_offset(UNROLL as isize * b.step);
            }
            for _ in turns * UNROLL..n {
                lane::<S, M, V, R>(std::array::from_fn(|r| bt.wrapping_add(r)), x, &mut acc);
                x = x.add(V * S::LANES);
                bt = bt.wrapping_offset(b.step);
            }
        } else {
            let mut rows = [b.ptr; R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = S::hide(b.ptr.wrapping_offset(r as isize * b.row));
            }
            for _ in 0..turns {
                for step in 0..UNROLL {
                    lane::<S, M, V, R>(rows.map(|row| row.add(step)), x.add(step * V * S::LANES), &mut acc);
                }
                x = x.add(UNROLL * V * S::LANES);
                rows = rows.map(|row| row.add(UNROLL));
            }
            for _ in turns * UNROLL..n {
                lane::<S, M, V, R>(rows, x, &mut acc);
                x = x.add(V * S::LANES);
                rows = rows.map(|row| row.add(1));
            }
        }
        put(acc, y, onto);
    }
}

/// `R` rows of sums onto those at `y`: what becomes of `y` is asked once, not for each vector.
#[inline(always)]
unsafe fn put<S: Simd, const V: usize, const R: usize>(mut sums: [[S::V; V]; R], y: Place<S::Elem>, onto: Onto<S, V>) {
    let Place { ptr: y, row } = y;
    // SAFETY: the caller vouches for R rows of y.
    unsafe {
        match onto {
            Onto::Nothing => {}
            Onto::Sum => {
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = S::add(S::load(y.add(r * row + v * S::LANES)), *sum);
                    }
                }
            }
            Onto::Rescaled(factors) => {
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = S::fma(S::load(y.add(r * row + v * S::LANES)), factors[v], *sum);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                S::store(y.add(r * row + v * S::LANES), sum);
            }
        }
    }
}

/// One step: a lane of each of `R` rows times `V` vectors.
#[inline(always)]
unsafe fn lane<S: Simd, M: Lanes<S>, const V: usize, const R: usize>(
    b: [*const S::Elem; R],
    x: *const M::Lane,
    acc: &mut [[S::V; V]; R],
) {
    // SAFETY: the caller vouches for one element of every row and V vectors of x.
    unsafe {
        let mut xs = [S::splat(S::Elem::ZERO); V];
        for (v, xs) in xs.iter_mut().enumerate() {
            *xs = M::load(x.add(v * S::LANES));
        }
        for (b, acc) in b.iter().zip(acc) {
            // Pairs of bf16 lie at multiples of 2 bytes.
            let b = S::splat(b.read_unaligned());
            for (x, acc) in xs.iter().zip(acc) {
                *acc = M::accumulate(b, *x, *acc);
            }
        }
    }
}

/// One micro-tile of at most [`Simd::ROWS`] rows of two vectors, or twice as many of one; answers how many it took.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, M: Lanes<S>, const V: usize, const ROW1: bool>(
    rows: usize,
    n: usize,
    x: *const M::Lane,
    b: Broadcast<S::Elem>,
    y: Place<S::Elem>,
    onto: Onto<S, V>,
) -> usize {
    // SAFETY: as of the caller.
    unsafe {
        if V == 1 {
            // Halves will do: a tile of one vector is the rest of a run of rows.
            return match rows {
                16.. if S::ROWS >= 8 => (micro::<S, M, V, 16, ROW1>(n, x, b, y, onto), 16).1,
                12.. if S::ROWS == 6 => (micro::<S, M, V, 12, ROW1>(n, x, b, y, onto), 12).1,
                8.. => (micro::<S, M, V, 8, ROW1>(n, x, b, y, onto), 8).1,
                4.. => (micro::<S, M, V, 4, ROW1>(n, x, b, y, onto), 4).1,
                2.. => (micro::<S, M, V, 2, ROW1>(n, x, b, y, onto), 2).1,
                _ => (micro::<S, M, V, 1, ROW1>(n, x, b, y, onto), 1).1,
            };
        }
        match rows {
            1 => micro::<S, M, V, 1, ROW1>(n, x, b, y, onto),
            2 => micro::<S, M, V, 2, ROW1>(n, x, b, y, onto),
            3 => micro::<S, M, V, 3, ROW1>(n, x, b, y, onto),
            4 => micro::<S, M, V, 4, ROW1>(n, x, b, y, onto),
            5 if S::ROWS >= 5 => micro::<S, M, V, 5, ROW1>(n, x, b, y, onto),
            6 if S::ROWS >= 6 => micro::<S, M, V, 6, ROW1>(n, x, b, y, onto),
            7 if S::ROWS >= 7 => micro::<S, M, V, 7, ROW1>(n, x, b, y, onto),
            8 if S::ROWS >= 8 => micro::<S, M, V, 8, ROW1>(n, x, b, y, onto),
            _ => unreachable!("a micro-tile has at most ROWS rows"),
        }
        rows
    }
}

/// What is multiplied: `rows` rows of `b` over `n` steps with the vectors at `x`, onto those at `y`.
pub(crate) struct Factors<S: Simd, const V: usize> {
    pub(crate) rows: usize,
    pub(crate) n: usize,
    pub(crate) x: *const S::Elem,
    pub(crate) b: Broadcast<S::Elem>,
    pub(crate) y: *mut S::Elem,
    pub(crate) onto: Onto<S, V>,
    /// What is asked for between micro-tiles.
    pub(crate) next: *mut NextRows,
}

/// The rows of the next micro-tile, where `left` are left and `most` fill the registers. A short rest would leave the units
/// waiting for one another: in tiles of two vectors it shares the rows of the last full tile instead, half and half.
#[inline(always)]
pub(crate) fn micro_rows<S: Simd, const V: usize>(left: usize) -> usize {
    let most = S::ROWS * S::Q_VECS / V;
    let halves = V == S::Q_VECS && left > most && 2 * (left - most) <= most;
    if halves { left.div_ceil(2) } else { left.min(most) }
}

/// All rows, in micro-tiles that fill the registers.
pub(crate) struct Matmul<S: Simd, M, const V: usize, const ROW1: bool>(
    pub(crate) Factors<S, V>,
    pub(crate) PhantomData<M>,
);

impl<S: Simd, M: Products<S>, const V: usize, const ROW1: bool> Part<S> for Matmul<S, M, V, ROW1> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Factors { rows, n, x, b, y, onto, next } = self.0;
        let row = if ROW1 { 1 } else { b.row };
        let mut r = 0;
        while r < rows {
            let take = micro_rows::<S, V>(rows - r);
            let b = Broadcast { ptr: b.ptr.wrapping_offset(r as isize * row), ..b };
            // SAFETY: rows r..r + take are below `rows`.
            r += unsafe {
                let y = Place { ptr: y.add(r * V * S::LANES), row: V * S::LANES };
                (*next).ask::<S>();
                tile::<S, M, V, ROW1>(take, n, x.cast(), b, y, onto)
            };
        }
    }
}

/// As [`Matmul`] (row stride 1) over the steps whose weight in `x` is not [`Real::MASKED`]: NaN and infinities behind masked
/// keys stay where they are.
pub(crate) struct MatmulSelecting<S: Simd, M, const V: usize>(pub(crate) Factors<S, V>, pub(crate) PhantomData<M>);

impl<S: Simd, M: Products<S>, const V: usize> Part<S> for MatmulSelecting<S, M, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Factors { rows, n, x, b, y, onto, .. } = self.0;
        // SAFETY: as for `Matmul`.
        unsafe {
            for r in 0..rows {
                let mut acc = [S::splat(S::Elem::ZERO); V];
                for t in 0..n {
                    let element = S::splat(b.ptr.wrapping_offset(r as isize + t as isize * b.step).read_unaligned());
                    for (v, acc) in acc.iter_mut().enumerate() {
                        let p = S::load(x.add((V * t + v) * S::LANES));
                        *acc = M::accumulate_selecting(element, p, *acc);
                    }
                }
                put([acc], Place { ptr: y.add(V * r * S::LANES), row: V * S::LANES }, onto);
            }
        }
    }
}
