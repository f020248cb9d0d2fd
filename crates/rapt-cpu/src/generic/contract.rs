//! The one inner loop of both products: a block of broadcast rows times a run of vectors.
//!
//! ```text
//! for r in 0..rows: for q in 0..Q_VECS · LANES:
//!     y[r][q] (+)= Σ_t b[r, t] · x[t][q]          t in 0..n, b[r, t] at b + r·row + t·step
//! ```
//! For S = QKᵀ (transposed: keys × queries) `r` runs over keys, `t` over head_dim; for O += P·V (transposed: head_dim ×
//! queries) `r` runs over head_dim, `t` over keys. Sums start at zero for each call and are added to `y` at the end, so a
//! long contraction is summed in blocks. Deliberately absent: tails in `n`; every address read is one of the operands'.

use super::simd::Simd;

/// The broadcast operand: element `(r, t)` lies at `ptr + r·row + t·step`, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Broadcast<E> {
    pub(crate) ptr: *const E,
    pub(crate) row: isize,
    pub(crate) step: isize,
}

/// `R` rows. `ROW1`: the row stride is 1; otherwise the step is 1.
#[inline(always)]
unsafe fn micro<S: Simd, const R: usize, const ROW1: bool, const ADD: bool>(
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: *mut S::Elem,
) {
    // SAFETY: the caller vouches for R rows and n steps of b, n rows of x and R rows of y.
    unsafe {
        let width = 2 * S::LANES;
        let mut acc = [[S::splat(b_zero::<S>()); 2]; R];
        let (row, step) = if ROW1 { (1, b.step) } else { (b.row, 1) };
        let mut bt = b.ptr;
        let mut xt = x;
        for _ in 0..n {
            let x0 = S::load(xt);
            let x1 = S::load(xt.add(S::LANES));
            for (r, acc) in acc.iter_mut().enumerate() {
                let element = S::splat(*bt.offset(r as isize * row));
                acc[0] = S::fma(element, x0, acc[0]);
                acc[1] = S::fma(element, x1, acc[1]);
            }
            xt = xt.add(width);
            bt = bt.wrapping_offset(step);
        }
        for (r, acc) in acc.iter().enumerate() {
            for (v, &sum) in acc.iter().enumerate() {
                let at = y.add(r * width + v * S::LANES);
                S::store(at, if ADD { S::add(S::load(at), sum) } else { sum });
            }
        }
    }
}

#[inline(always)]
fn b_zero<S: Simd>() -> S::Elem {
    <S::Elem as super::simd::Real>::ZERO
}

/// One micro-tile of `rows ≤ 8` rows.
#[inline(always)]
unsafe fn tile<S: Simd, const ROW1: bool, const ADD: bool>(
    rows: usize,
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: *mut S::Elem,
) {
    // SAFETY: as of the caller.
    unsafe {
        match rows {
            1 => micro::<S, 1, ROW1, ADD>(n, x, b, y),
            2 => micro::<S, 2, ROW1, ADD>(n, x, b, y),
            3 => micro::<S, 3, ROW1, ADD>(n, x, b, y),
            4 => micro::<S, 4, ROW1, ADD>(n, x, b, y),
            5 if S::ROWS >= 5 => micro::<S, 5, ROW1, ADD>(n, x, b, y),
            6 if S::ROWS >= 6 => micro::<S, 6, ROW1, ADD>(n, x, b, y),
            7 if S::ROWS >= 7 => micro::<S, 7, ROW1, ADD>(n, x, b, y),
            8 if S::ROWS >= 8 => micro::<S, 8, ROW1, ADD>(n, x, b, y),
            _ => unreachable!("a micro-tile has at most ROWS rows"),
        }
    }
}

/// All `rows`, in micro-tiles of `S::ROWS`. A short rest would leave the units waiting for one another: it shares the
/// rows of the last full tile instead, half and half.
#[inline(always)]
pub(crate) unsafe fn contract<S: Simd, const ROW1: bool, const ADD: bool>(
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
            tile::<S, ROW1, ADD>(S::ROWS, n, x, at(r), y.add(r * width));
        }
        let mut r = full * S::ROWS;
        while r < rows {
            let left = rows - r;
            let take = if left > S::ROWS { left.div_ceil(2) } else { left };
            tile::<S, ROW1, ADD>(take, n, x, at(r), y.add(r * width));
            r += take;
        }
    }
}

/// `y[r] += Σ_t b[r, t] · x[t]` over the steps and lanes with `x ≠ 0` alone (row stride 1): what lies in `b` behind a zero is never
/// multiplied, so that NaN and infinities there stay where they are.
#[inline(always)]
pub(crate) unsafe fn contract_selecting<S: Simd>(
    rows: usize,
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: *mut S::Elem,
) {
    // SAFETY: as for `contract`.
    unsafe {
        let zero = S::splat(b_zero::<S>());
        for r in 0..rows {
            let mut acc = [zero; 2];
            for t in 0..n {
                let element = S::splat(*b.ptr.wrapping_offset(r as isize + t as isize * b.step));
                for (v, acc) in acc.iter_mut().enumerate() {
                    let p = S::load(x.add((2 * t + v) * S::LANES));
                    *acc = S::select(S::eq(p, zero), *acc, S::fma(element, p, *acc));
                }
            }
            for (v, &sum) in acc.iter().enumerate() {
                let at = y.add((2 * r + v) * S::LANES);
                S::store(at, S::add(S::load(at), sum));
            }
        }
    }
}
