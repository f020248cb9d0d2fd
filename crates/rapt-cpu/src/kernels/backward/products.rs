//! The products of the backward pass by the inner loop of `matmul`, and the panels of columns that two of them read and sum in.
//!
//! A matrix of rows of head_dim lies in panels of two vectors of columns, the last one of one vector if that will do: panel `c` of a matrix of
//! `rows` rows begins at `first column · rows`, and its rows follow one another.

use std::marker::PhantomData;

use super::super::blocks::{QK_RUN, Rows};
use super::super::matmul::{Broadcast, Factors, Onto, Place, next_rows, tile};
use super::super::products::Single;
use super::super::simd::{Part, Real, Simd};

/// A panel of columns.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    /// Its first column.
    pub(super) first: usize,
    /// One vector, or two.
    pub(super) width: usize,
    /// How many of its columns are there; the others are 0 where they are read.
    pub(super) len: usize,
}

/// The panels of `dim` columns.
#[inline(always)]
pub(super) fn panels<S: Simd>(dim: usize) -> impl Iterator<Item = Panel> {
    (0..dim).step_by(2 * S::LANES).map(move |first| {
        let len = (dim - first).min(2 * S::LANES);
        Panel { first, width: if len > S::LANES { 2 * S::LANES } else { S::LANES }, len }
    })
}

/// `rows` rows of `b` over `n` steps with the vectors at `x`, onto those at `y`.
struct Product<S: Simd, const V: usize> {
    rows: usize,
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: Place<S::Elem>,
    onto: Onto<S, V>,
}

impl<S: Simd, const V: usize> Part<S> for Product<S, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Product { rows, n, x, b, y, onto } = self;
        let mut r = 0;
        while r < rows {
            let take = next_rows::<S, V>(rows - r);
            let b = Broadcast { ptr: b.ptr.wrapping_offset(r as isize * b.row), ..b };
            let y = Place { ptr: y.ptr.wrapping_add(r * y.row), ..y };
            // SAFETY: rows r..r + take are below `rows`.
            r += unsafe { tile::<S, Single, V, false>(take, n, x, b, y, onto) };
        }
    }
}

/// The same over the steps whose element of `b` is not [`Real::MASKED`], onto sums: NaN and infinities behind it stay where they are.
struct ProductSelecting<S: Simd, const V: usize>(Product<S, V>);

impl<S: Simd, const V: usize> Part<S> for ProductSelecting<S, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Product { rows, n, x, b, y, .. } = self.0;
        // SAFETY: as for `Product`.
        unsafe {
            for r in 0..rows {
                let mut acc = [S::splat(S::Elem::ZERO); V];
                for t in 0..n {
                    let weight = *b.ptr.wrapping_offset(r as isize * b.row + t as isize * b.step);
                    if !weight.is_masked() {
                        for (v, acc) in acc.iter_mut().enumerate() {
                            *acc = S::fma(S::splat(weight), S::load(x.add((t * V + v) * S::LANES)), *acc);
                        }
                    }
                }
                for (v, acc) in acc.into_iter().enumerate() {
                    let y = y.ptr.add(r * y.row + v * S::LANES);
                    S::store(y, S::add(S::load(y), acc));
                }
            }
        }
    }
}

/// `dQᵀ += Kᵀ · dSᵀ` of a tile over the pairs that are not [`Real::MASKED`]: NaN and infinities in keys that a row does not attend stay there.
pub(super) struct QueriesSelecting<S: Simd>(pub(super) Factors<S, 2>);

impl<S: Simd> Part<S> for QueriesSelecting<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Factors { rows, n, x, b, y, .. } = self.0;
        // SAFETY: as for `Matmul`.
        unsafe {
            let (zero, one) = (S::splat(S::Elem::ZERO), S::splat(S::Elem::ONE));
            for d in 0..rows {
                let mut acc = [zero; 2];
                for j in 0..n {
                    let key = S::splat(*b.ptr.wrapping_offset(d as isize + j as isize * b.step));
                    for (v, acc) in acc.iter_mut().enumerate() {
                        let ds = S::load(x.add((2 * j + v) * S::LANES));
                        // −0 is the one zero with a negative inverse.
                        let sum = S::fma(key, ds, *acc);
                        let of_zero = S::select(S::lt(S::div(one, ds), zero), *acc, sum);
                        *acc = S::select(S::eq(ds, zero), of_zero, sum);
                    }
                }
                for (v, acc) in acc.into_iter().enumerate() {
                    let y = y.add((2 * d + v) * S::LANES);
                    S::store(y, S::add(S::load(y), acc));
                }
            }
        }
    }
}

/// `Sᵀ = K · Qᵀ` of a tile: `n` keys by its queries, to rows `row` apart.
pub(super) unsafe fn key_product<S: Simd>(
    n: usize,
    dim: usize,
    k: Rows<S::Elem>,
    q_t: *const S::Elem,
    (to, row): (*mut S::Elem, usize),
) {
    for d in (0..dim).step_by(QK_RUN) {
        let b = Broadcast { ptr: k.ptr.wrapping_add(d), row: k.stride, step: 1 };
        let x = q_t.wrapping_add(d * 2 * S::LANES);
        let onto = if d == 0 { Onto::<S, 2>::Nothing } else { Onto::Sum };
        // SAFETY: promised by the caller.
        unsafe { S::apart(Product { rows: n, n: QK_RUN.min(dim - d), x, b, y: Place { ptr: to, row }, onto }) };
    }
}

/// Sums over the queries of a run: `keys` rows of `dim` columns onto those from row `skip` on of a block's.
pub(super) struct Contract<E> {
    pub(super) keys: usize,
    /// Queries.
    pub(super) rows: usize,
    /// From key to key in `b`, and the rows that panels of `x` have.
    pub(super) row: usize,
    pub(super) dim: usize,
    /// `[keys][row]`.
    pub(super) b: *const E,
    pub(super) x: *const E,
    pub(super) y: *mut E,
    pub(super) skip: usize,
    pub(super) block_n: usize,
    /// Whether some weight may be [`Real::MASKED`] of a row that lies in x as it is.
    pub(super) selects: bool,
}

impl<E: Real> Contract<E> {
    pub(super) unsafe fn run<S: Simd<Elem = E>>(&self) {
        // SAFETY: promised by the caller.
        unsafe {
            for panel in panels::<S>(self.dim) {
                let ptr = self.x.wrapping_add(panel.first * self.row);
                let is_finite = !self.selects || S::apart(IsFinite::<S> { ptr, len: self.rows * panel.width });
                if panel.width == S::LANES {
                    self.panel::<S, 1>(panel, is_finite);
                } else {
                    self.panel::<S, 2>(panel, is_finite);
                }
            }
        }
    }

    unsafe fn panel<S: Simd<Elem = E>, const V: usize>(&self, panel: Panel, is_finite: bool) {
        let Contract { keys, rows, row, b, x, y, skip, block_n, .. } = *self;
        let y = y.wrapping_add(panel.first * block_n + skip * panel.width);
        let product = Product::<S, V> {
            rows: keys,
            n: rows,
            x: x.wrapping_add(panel.first * row),
            b: Broadcast { ptr: b, row: row as isize, step: 1 },
            y: Place { ptr: y, row: panel.width },
            onto: Onto::Sum,
        };
        // SAFETY: promised by the caller.
        unsafe {
            if is_finite {
                S::apart(product);
            } else {
                S::apart(ProductSelecting(product));
            }
        }
    }
}

/// Whether whole vectors are finite.
struct IsFinite<S: Simd> {
    ptr: *const S::Elem,
    len: usize,
}

impl<S: Simd> Part<S> for IsFinite<S> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        // SAFETY: the caller vouches for the elements, a multiple of four vectors: rows of a run are.
        unsafe {
            let zero = S::splat(S::Elem::ZERO);
            let mut sums = [zero; 4];
            for at in (0..self.len).step_by(4 * S::LANES) {
                for (v, sum) in sums.iter_mut().enumerate() {
                    // 0 · x is 0 for finite x and NaN otherwise.
                    *sum = S::fma(S::load(self.ptr.add(at + v * S::LANES)), zero, *sum);
                }
            }
            !S::reduce_add(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]))).is_nan()
        }
    }
}

/// Zeros.
pub(super) struct Clear<S: Simd> {
    ptr: *mut S::Elem,
    len: usize,
    vectors: PhantomData<S>,
}

/// `len` zeros at `ptr`, in whole vectors.
pub(super) fn clear<S: Simd>(ptr: *mut S::Elem, len: usize) -> Clear<S> {
    Clear { ptr, len, vectors: PhantomData }
}

impl<S: Simd> Part<S> for Clear<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: the caller vouches for the elements.
        unsafe {
            for at in (0..self.len).step_by(S::LANES) {
                S::store(self.ptr.add(at), S::splat(S::Elem::ZERO));
            }
        }
    }
}
