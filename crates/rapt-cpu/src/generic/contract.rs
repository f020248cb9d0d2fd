//! The one inner loop of both products: a block of broadcast rows times a run of vectors.
//!
//! ```text
//! for r in 0..rows: for q in 0..Q_VECS · LANES:
//!     y[r][q] (+)= Σ_t b[r, t] · x[t][q]          t in 0..n, b[r, t] at b + r·row + t·step
//! ```
//! For S = QKᵀ (transposed: keys × queries) `r` runs over keys, `t` over head_dim; for O += P·V (transposed: head_dim ×
//! queries) `r` runs over head_dim, `t` over keys. Sums start at zero for each call and are added to `y` at the end, so a
//! long contraction is summed in blocks. A step is a lane: what it holds and how it is multiplied, `products` says. Deliberately absent: tails in `n`; every address read is one of the operands'.

use super::products::Products;
use super::simd::{Real, Simd, Storage};

/// Steps of one turn of the loop over rows that lie apart: the elements of a row are then reached by displacements, and
/// the row pointers move once per turn. With a step per turn their arithmetic
/// takes issue slots of the two vector ports of Intel's cores (one core of a Xeon, family 6 model 207, reaches 84 % of the
/// FMA rate with this in f32 at D 128, 2026-11); Zen 4 has ports of its own for it.
const UNROLL: usize = 4;

/// The broadcast operand: element `(r, t)` lies at `ptr + r·row + t·step`, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Broadcast<E> {
    pub(crate) ptr: *const E,
    pub(crate) row: isize,
    pub(crate) step: isize,
}

/// `R` rows. `ROW1`: the row stride is 1; otherwise the step is 1.
#[inline(always)]
unsafe fn micro<S: Simd, T: Storage<S>, M: Products<S, T>, const R: usize, const ROW1: bool, const ADD: bool>(
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: *mut S::Elem,
) {
    // SAFETY: the caller vouches for R rows and n steps of b, n rows of x and R rows of y.
    unsafe {
        let width = 2 * S::LANES;
        let mut acc = [[S::splat(S::Elem::ZERO); 2]; R];
        let mut xt = x;
        if ROW1 {
            let mut bt = b.ptr;
            for _ in 0..n {
                let xs = [S::load(xt), S::load(xt.add(S::LANES))];
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = products::<S, T, M>(bt.add(r), xs, *acc);
                }
                xt = xt.add(width);
                bt = bt.wrapping_offset(b.step);
            }
        } else {
            let mut rows = [b.ptr; R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = S::hide(b.ptr.wrapping_offset(r as isize * b.row));
            }
            // Only the full tile is worth the code.
            let turns = if R == S::ROWS { n / UNROLL } else { 0 };
            for _ in 0..turns {
                turn::<S, T, M, R, UNROLL>(&mut rows, &mut xt, &mut acc);
            }
            for _ in turns * UNROLL..n {
                turn::<S, T, M, R, 1>(&mut rows, &mut xt, &mut acc);
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (v, &sum) in acc.iter().enumerate() {
                let at = y.add(r * width + v * S::LANES);
                S::store(at, if ADD { S::add(S::load(at), sum) } else { sum });
            }
        }
    }
}

/// `STEPS` steps of `R` rows.
#[inline(always)]
unsafe fn turn<S: Simd, T: Storage<S>, M: Products<S, T>, const R: usize, const STEPS: usize>(
    rows: &mut [*const S::Elem; R],
    x: &mut *const S::Elem,
    acc: &mut [[S::V; 2]; R],
) {
    // SAFETY: the caller vouches for STEPS elements of every row and STEPS rows of x.
    unsafe {
        for step in 0..STEPS {
            let xs = [S::load(*x), S::load(x.add(S::LANES))];
            for (row, acc) in rows.iter().zip(acc.iter_mut()) {
                *acc = products::<S, T, M>(row.add(step), xs, *acc);
            }
            *x = x.add(2 * S::LANES);
        }
        for row in rows {
            *row = row.add(STEPS);
        }
    }
}

/// One broadcast lane times two vectors.
#[inline(always)]
unsafe fn products<S: Simd, T: Storage<S>, M: Products<S, T>>(
    b: *const S::Elem,
    x: [S::V; 2],
    acc: [S::V; 2],
) -> [S::V; 2] {
    // SAFETY: the caller vouches for `b`.
    unsafe {
        // Pairs of bf16 lie at multiples of 2 bytes.
        let b = S::splat(b.read_unaligned());
        [M::accumulate(b, x[0], acc[0]), M::accumulate(b, x[1], acc[1])]
    }
}

/// One micro-tile of `rows ≤ 8` rows.
#[inline(always)]
unsafe fn tile<S: Simd, T: Storage<S>, M: Products<S, T>, const ROW1: bool, const ADD: bool>(
    rows: usize,
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: *mut S::Elem,
) {
    // SAFETY: as of the caller.
    unsafe {
        match rows {
            1 => micro::<S, T, M, 1, ROW1, ADD>(n, x, b, y),
            2 => micro::<S, T, M, 2, ROW1, ADD>(n, x, b, y),
            3 => micro::<S, T, M, 3, ROW1, ADD>(n, x, b, y),
            4 => micro::<S, T, M, 4, ROW1, ADD>(n, x, b, y),
            5 if S::ROWS >= 5 => micro::<S, T, M, 5, ROW1, ADD>(n, x, b, y),
            6 if S::ROWS >= 6 => micro::<S, T, M, 6, ROW1, ADD>(n, x, b, y),
            7 if S::ROWS >= 7 => micro::<S, T, M, 7, ROW1, ADD>(n, x, b, y),
            8 if S::ROWS >= 8 => micro::<S, T, M, 8, ROW1, ADD>(n, x, b, y),
            _ => unreachable!("a micro-tile has at most ROWS rows"),
        }
    }
}

/// All `rows`, in micro-tiles of `S::ROWS`. A short rest would leave the units waiting for one another: it shares the
/// rows of the last full tile instead, half and half.
#[inline(always)]
pub(crate) unsafe fn contract<S: Simd, T: Storage<S>, M: Products<S, T>, const ROW1: bool, const ADD: bool>(
    rows: usize,
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: *mut S::Elem,
) {
    let width = 2 * S::LANES;
    let row = if ROW1 { 1 } else { b.row };
    let rest = rows % S::ROWS;
    let full = if rest > 0 && 2 * rest <= S::ROWS && rows > S::ROWS { rows / S::ROWS - 1 } else { rows / S::ROWS };
    let at = |r: usize| Broadcast { ptr: b.ptr.wrapping_offset(r as isize * row), ..b };
    // SAFETY: every call covers rows below `rows`.
    unsafe {
        for r in (0..full).map(|tile| tile * S::ROWS) {
            tile::<S, T, M, ROW1, ADD>(S::ROWS, n, x, at(r), y.add(r * width));
        }
        let mut r = full * S::ROWS;
        while r < rows {
            let left = rows - r;
            let take = if left > S::ROWS { left.div_ceil(2) } else { left };
            tile::<S, T, M, ROW1, ADD>(take, n, x, at(r), y.add(r * width));
            r += take;
        }
    }
}

/// `y[r] += Σ_t b[r, t] · x[t]` over the steps with `x ≠ 0` alone (row stride 1): what lies in `b` behind a zero is never
/// multiplied, so that NaN and infinities there stay where they are.
#[inline(always)]
pub(crate) unsafe fn contract_selecting<S: Simd, T: Storage<S>, M: Products<S, T>>(
    rows: usize,
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: *mut S::Elem,
) {
    // SAFETY: as for `contract`.
    unsafe {
        for r in 0..rows {
            let mut acc = [S::splat(S::Elem::ZERO); 2];
            for t in 0..n {
                let element = S::splat(b.ptr.wrapping_offset(r as isize + t as isize * b.step).read_unaligned());
                for (v, acc) in acc.iter_mut().enumerate() {
                    let p = S::load(x.add((2 * t + v) * S::LANES));
                    *acc = M::accumulate_selecting(element, p, *acc);
                }
            }
            for (v, &sum) in acc.iter().enumerate() {
                let at = y.add((2 * r + v) * S::LANES);
                S::store(at, S::add(S::load(at), sum));
            }
        }
    }
}
