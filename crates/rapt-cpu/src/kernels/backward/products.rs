//! The products of the backward pass by the inner loop of `matmul`, two of which read and sum in panels of columns (`lanes`).

use std::marker::PhantomData;

use super::super::blocks::{QK_RUN, Rows};
use super::super::matmul::{Broadcast, Factors, Onto, Place, next_rows, tile};
use super::super::products::Products;
use super::super::simd::{Part, Real, Simd};
use super::lanes::{GradientLanes, Panel, panels};

/// `rows` rows of `b` over `n` lanes with the vectors at `x`, onto those at `y`.
struct Product<S: Simd, M, const V: usize> {
    rows: usize,
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: Place<S::Elem>,
    onto: Onto<S, V>,
    lanes: PhantomData<M>,
}

impl<S: Simd, M: Products<S>, const V: usize> Part<S> for Product<S, M, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Product { rows, n, x, b, y, onto, .. } = self;
        let mut r = 0;
        while r < rows {
            let take = next_rows::<S, V>(rows - r);
            let b = Broadcast { ptr: b.ptr.wrapping_offset(r as isize * b.row), ..b };
            let y = Place { ptr: y.ptr.wrapping_add(r * y.row), ..y };
            // SAFETY: rows r..r + take are below `rows`.
            r += unsafe { tile::<S, M, V, false>(take, n, x.cast(), b, y, onto) };
        }
    }
}

/// The same over the steps whose element of `b` is not [`Real::MASKED`], onto sums: NaN and infinities behind it stay where they are.
struct ProductSelecting<S: Simd, M, const V: usize>(Product<S, M, V>);

impl<S: Simd, M: GradientLanes<S>, const V: usize> Part<S> for ProductSelecting<S, M, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Product { rows, n, x, b, y, .. } = self.0;
        // SAFETY: as for `Product`.
        unsafe {
            for r in 0..rows {
                let mut acc = [S::splat(S::Elem::ZERO); V];
                for t in 0..n {
                    let at = r as isize * b.row + t as isize * b.step;
                    let weight = S::splat(*b.ptr.wrapping_offset(at));
                    for (v, acc) in acc.iter_mut().enumerate() {
                        *acc = M::add_attended(S::load(x.add((t * V + v) * S::LANES)), weight, *acc);
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
pub(super) struct QueriesSelecting<S: Simd, M>(pub(super) Factors<S, 2>, pub(super) PhantomData<M>);

impl<S: Simd, M: GradientLanes<S>> Part<S> for QueriesSelecting<S, M> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Factors { rows, n, x, b, y, .. } = self.0;
        // SAFETY: as for `Matmul`.
        unsafe {
            for d in 0..rows {
                let mut acc = [S::splat(S::Elem::ZERO); 2];
                for j in 0..n {
                    let key = S::splat(b.ptr.wrapping_offset(d as isize + j as isize * b.step).read_unaligned());
                    for (v, acc) in acc.iter_mut().enumerate() {
                        *acc = M::add_attended(key, S::load(x.add((2 * j + v) * S::LANES)), *acc);
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

/// `Sᵀ = K · Qᵀ` of a tile: `keys` keys by its queries, to rows `row` apart.
pub(super) unsafe fn key_product<S: Simd, M: Products<S>>(
    keys: usize,
    dim: usize,
    k: Rows<S::Elem>,
    q_t: *const S::Elem,
    (to, row): (*mut S::Elem, usize),
) {
    let lanes = dim.div_ceil(M::STEPS);
    for d in (0..lanes).step_by(QK_RUN) {
        let b = Broadcast { ptr: k.ptr.wrapping_add(d), row: k.stride, step: 1 };
        let x = q_t.wrapping_add(d * 2 * S::LANES);
        let onto = if d == 0 { Onto::<S, 2>::Nothing } else { Onto::Sum };
        let (n, y, lanes) = (QK_RUN.min(lanes - d), Place { ptr: to, row }, PhantomData::<M>);
        // SAFETY: promised by the caller.
        unsafe { M::apart(Product { rows: keys, n, x, b, y, onto, lanes }) };
    }
}

/// Sums over the queries of a run: `keys` rows of `dim` columns onto those from row `skip` on of a block's.
pub(super) struct Contract<E> {
    pub(super) keys: usize,
    /// Queries.
    pub(super) rows: usize,
    /// Rows that a run has: lanes of them from key to key in `b`, and rows that panels of `x` have.
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
    pub(super) unsafe fn run<S: Simd<Elem = E>, M: GradientLanes<S>>(&self) {
        // SAFETY: promised by the caller.
        unsafe {
            for panel in panels::<S>(self.dim) {
                let ptr = self.x.wrapping_add(panel.first * self.row / M::STEPS);
                let len = self.rows / M::STEPS * panel.width;
                let is_finite = !self.selects || M::apart(IsFinite { ptr, len, lanes: PhantomData::<M> });
                if panel.width == S::LANES {
                    self.panel::<S, M, 1>(panel, is_finite);
                } else {
                    self.panel::<S, M, 2>(panel, is_finite);
                }
            }
        }
    }

    unsafe fn panel<S: Simd<Elem = E>, M: GradientLanes<S>, const V: usize>(&self, panel: Panel, is_finite: bool) {
        let Contract { keys, rows, row, b, x, y, skip, block_n, .. } = *self;
        let y = y.wrapping_add(panel.first * block_n + skip * panel.width);
        let product = Product::<S, M, V> {
            rows: keys,
            n: rows / M::STEPS,
            x: x.wrapping_add(panel.first * row / M::STEPS),
            b: Broadcast { ptr: b, row: (row / M::STEPS) as isize, step: 1 },
            y: Place { ptr: y, row: panel.width },
            onto: Onto::Sum,
            lanes: PhantomData,
        };
        // SAFETY: promised by the caller.
        unsafe {
            if is_finite {
                M::apart(product);
            } else {
                M::apart(ProductSelecting(product));
            }
        }
    }
}

/// Whether whole vectors are finite.
struct IsFinite<E, M> {
    ptr: *const E,
    len: usize,
    lanes: PhantomData<M>,
}

impl<S: Simd, M: Products<S>> Part<S> for IsFinite<S::Elem, M> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        // SAFETY: the caller vouches for the elements, a multiple of four vectors: rows of a run are.
        unsafe {
            let mut sums = [S::splat(S::Elem::ZERO); 4];
            for at in (0..self.len).step_by(4 * S::LANES) {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = M::add_non_finite(S::load(self.ptr.add(at + v * S::LANES)), *sum);
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
