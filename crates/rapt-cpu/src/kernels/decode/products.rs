//! The two products of decode: vectors run along head_dim, and a row of K or V is loaded once for several queries.

use super::rows::Rows;
use crate::kernels::simd::{Real, Simd};

/// `s[r][k] = q_r · k_{at + k}` for `K` keys and all rows; q and s with the distance of their rows.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, R: Rows<S>, const K: usize>(
    keys: &R,
    at: usize,
    dim: usize,
    rows: usize,
    (q, q_stride): (*const S::Elem, usize),
    (s, s_stride): (*mut S::Elem, usize),
) {
    let mut r = 0;
    // SAFETY: as in `item`.
    unsafe {
        while r < rows {
            let (q, s) = ((q.add(r * q_stride), q_stride), (s.add(r * s_stride), s_stride));
            if rows - r >= 2 {
                dots_micro::<S, R, K, 2>(keys, at, dim, q, s);
                r += 2;
            } else {
                dots_micro::<S, R, K, 1>(keys, at, dim, q, s);
                r += 1;
            }
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "a column of the accumulators")]
pub(super) unsafe fn dots_micro<S: Simd, R: Rows<S>, const K: usize, const Q: usize>(
    keys: &R,
    at: usize,
    dim: usize,
    (q, q_stride): (*const S::Elem, usize),
    (s, s_stride): (*mut S::Elem, usize),
) {
    // SAFETY: as in `item`: K keys of dim elements, Q rows of q and s.
    unsafe {
        let k: [R::Row; K] = std::array::from_fn(|n| keys.row(at + n));
        let mut acc = [[S::splat(S::Elem::ZERO); Q]; K];
        let mut d = 0;
        while d + S::LANES <= dim {
            let mut qs = [S::splat(S::Elem::ZERO); Q];
            for (r, qs) in qs.iter_mut().enumerate() {
                *qs = S::load(q.add(r * q_stride + d));
            }
            for (k, acc) in k.iter().zip(&mut acc) {
                let k = R::load(*k, d);
                for (q, acc) in qs.iter().zip(acc) {
                    *acc = S::fma(k, *q, *acc);
                }
            }
            d += S::LANES;
        }
        for r in 0..Q {
            let mut column = [acc[0][r]; 4];
            for (n, sum) in column.iter_mut().enumerate() {
                *sum = acc[n % K][r];
            }
            let sums = S::reduce_add_4(column);
            for (n, &sum) in sums.iter().enumerate().take(K) {
                let mut sum = sum;
                for d in d..dim {
                    sum = sum + R::number(k[n], d) * *q.add(r * q_stride + d);
                }
                *s.add(r * s_stride + n) = sum;
            }
        }
    }
}

/// Whether the first `n` values, of `dim` elements, are all finite.
#[inline(always)]
pub(super) unsafe fn all_finite<S: Simd, R: Rows<S>>(values: &R, n: usize, dim: usize) -> bool {
    // 0 · x is 0 for finite x and NaN otherwise; a sum of those is 0 or NaN.
    // SAFETY: as in `item`.
    unsafe {
        let mut sum = S::splat(S::Elem::ZERO);
        let mut tail = S::Elem::ZERO;
        for j in 0..n {
            let row = values.row(j);
            let mut d = 0;
            while d + S::LANES <= dim {
                sum = S::fma(R::load(row, d), S::splat(S::Elem::ZERO), sum);
                d += S::LANES;
            }
            for d in d..dim {
                tail = tail + R::number(row, d) * S::Elem::ZERO;
            }
        }
        !(S::reduce_add(sum) + tail).is_nan()
    }
}

/// `o[r] += Σ_j p[r][j] · v_j` for `rows` rows; p and o with the distance of their rows. `COMPACT` is less code, for the same bits: vectors
/// that are no whole block go a row at a time.
#[inline(always)]
pub(super) unsafe fn weighted_sum<S: Simd, R: Rows<S>, const COMPACT: bool>(
    keys: &R,
    n: usize,
    rows: usize,
    (p, p_stride): (*const S::Elem, usize),
    (o, o_stride): (*mut S::Elem, usize),
    dim: usize,
) {
    let mut r = 0;
    // SAFETY: as in `item`.
    unsafe {
        while r < rows {
            let (p, o) = ((p.add(r * p_stride), p_stride), (o.add(r * o_stride), o_stride));
            match rows - r {
                4.. => {
                    weighted_rows::<S, R, 4, 2, COMPACT>(keys, n, p, o, dim);
                    r += 4;
                }
                2..4 => {
                    weighted_rows::<S, R, 2, 4, COMPACT>(keys, n, p, o, dim);
                    r += 2;
                }
                _ => {
                    weighted_rows::<S, R, 1, 8, COMPACT>(keys, n, p, o, dim);
                    r += 1;
                }
            }
        }
    }
}

/// `Q` rows, `V` vectors of head_dim_v at a time; then single vectors; then single elements.
#[inline(always)]
pub(super) unsafe fn weighted_rows<S: Simd, R: Rows<S>, const Q: usize, const V: usize, const COMPACT: bool>(
    keys: &R,
    n: usize,
    p: (*const S::Elem, usize),
    o: (*mut S::Elem, usize),
    dim: usize,
) {
    // SAFETY: as in `item`: n keys of dim elements, Q rows of p and o.
    unsafe {
        let mut d = 0;
        while d + V * S::LANES <= dim {
            weighted_slice::<S, R, Q, V>(keys, n, p, o, d);
            d += V * S::LANES;
        }
        while d + S::LANES <= dim {
            if COMPACT {
                for r in 0..Q {
                    weighted_slice::<S, R, 1, 1>(keys, n, (p.0.add(r * p.1), p.1), (o.0.add(r * o.1), o.1), d);
                }
            } else {
                weighted_slice::<S, R, Q, 1>(keys, n, p, o, d);
            }
            d += S::LANES;
        }
        for r in 0..Q {
            weighted_rest::<S, R>(keys, n, p.0.add(r * p.1), o.0.add(r * o.1), (d, dim));
        }
    }
}

/// Elements `d..dim` of one row, which are no whole vector.
#[inline(always)]
unsafe fn weighted_rest<S: Simd, R: Rows<S>>(
    keys: &R,
    n: usize,
    p: *const S::Elem,
    o: *mut S::Elem,
    (d, dim): (usize, usize),
) {
    for d in d..dim {
        // SAFETY: as in `item`.
        unsafe {
            let mut sum = S::Elem::ZERO;
            for j in 0..n {
                sum = sum + *p.add(j) * R::number(keys.row(j), d);
            }
            *o.add(d) = *o.add(d) + sum;
        }
    }
}

#[inline(always)]
unsafe fn weighted_slice<S: Simd, R: Rows<S>, const Q: usize, const V: usize>(
    keys: &R,
    n: usize,
    (p, p_stride): (*const S::Elem, usize),
    (o, o_stride): (*mut S::Elem, usize),
    d: usize,
) {
    // SAFETY: as in `item`.
    unsafe {
        let mut acc = [[S::splat(S::Elem::ZERO); V]; Q];
        for j in 0..n {
            let row = keys.row(j);
            let mut vs = [S::splat(S::Elem::ZERO); V];
            for (n, vs) in vs.iter_mut().enumerate() {
                *vs = R::load(row, d + n * S::LANES);
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let p = S::splat(*p.add(r * p_stride + j));
                for (v, acc) in vs.iter().zip(acc) {
                    *acc = S::fma(p, *v, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, &sum) in acc.iter().enumerate() {
                let at = o.add(r * o_stride + d + n * S::LANES);
                S::store(at, S::add(S::load(at), sum));
            }
        }
    }
}

/// As [`weighted_sum`] with the same bits, never touching a masked value: it may be NaN or infinite.
#[inline(always)]
pub(super) unsafe fn weighted_sum_selecting<S: Simd, R: Rows<S>>(
    keys: &R,
    n: usize,
    rows: usize,
    (p, p_stride): (*const S::Elem, usize),
    (o, o_stride): (*mut S::Elem, usize),
    dim: usize,
) {
    // SAFETY: as in `item`.
    unsafe {
        for r in 0..rows {
            let p = p.add(r * p_stride);
            let mut d = 0;
            while d < dim {
                let whole = d + S::LANES <= dim;
                let mut acc = S::splat(S::Elem::ZERO);
                let mut tail = S::Elem::ZERO;
                for j in (0..n).filter(|&j| !(*p.add(j)).is_masked()) {
                    let v = keys.row(j);
                    if whole {
                        acc = S::fma(S::splat(*p.add(j)), R::load(v, d), acc);
                    } else {
                        tail = tail + *p.add(j) * R::number(v, d);
                    }
                }
                let at = o.add(r * o_stride + d);
                if whole {
                    S::store(at, S::add(S::load(at), acc));
                    d += S::LANES;
                } else {
                    *at = *at + tail;
                    d += 1;
                }
            }
        }
    }
}
