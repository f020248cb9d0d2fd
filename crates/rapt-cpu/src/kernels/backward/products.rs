//! The products of the backward pass, and how the inner loop of `matmul` forms them: two read and sum in panels of columns (`lanes`).

use std::marker::PhantomData;

use super::super::blocks::{KeyProduct, QK_RUN, Rows, is_finite};
use super::super::matmul::{Broadcast, Factors, Matmul, Onto, Place, micro_rows, tile};
use super::super::next_rows::NextRows;
use super::super::products::Products;
use super::super::simd::{Part, Real, Simd};
use super::lanes::{Contract, Panel, QueryProduct, panels};

/// Products that leave out steps by their weights.
pub(crate) trait AddAttended<S: Simd>: Products<S> {
    /// `acc + Σ value · weight` over the steps whose weight, of any sign, is not [`Real::MASKED`].
    unsafe fn add_attended(value: S::V, weight: S::V, acc: S::V) -> S::V;
}

/// `rows` rows of `b` over `n` lanes with the vectors at `x`, onto those at `y`.
struct Product<S: Simd, M, const V: usize> {
    rows: usize,
    n: usize,
    x: *const S::Elem,
    b: Broadcast<S::Elem>,
    y: Place<S::Elem>,
    onto: Onto<S, V>,
    next: *mut NextRows,
    lanes: PhantomData<M>,
}

impl<S: Simd, M: Products<S>, const V: usize> Part<S> for Product<S, M, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Product { rows, n, x, b, y, onto, next, .. } = self;
        let mut r = 0;
        while r < rows {
            let take = micro_rows::<S, V>(rows - r);
            let b = Broadcast { ptr: b.ptr.wrapping_offset(r as isize * b.row), ..b };
            let y = Place { ptr: y.ptr.wrapping_add(r * y.row), ..y };
            // SAFETY: rows r..r + take are below `rows`.
            r += unsafe {
                (*next).ask::<S>();
                tile::<S, M, V, false>(take, n, x.cast(), b, y, onto)
            };
        }
    }
}

/// The same over the steps whose element of `b` is not [`Real::MASKED`], onto sums: NaN and infinities behind it stay where they are.
struct ProductSelecting<S: Simd, M, const V: usize>(Product<S, M, V>);

impl<S: Simd, M: AddAttended<S>, const V: usize> Part<S> for ProductSelecting<S, M, V> {
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
struct QueriesSelecting<S: Simd, M>(Factors<S, 2>, PhantomData<M>);

impl<S: Simd, M: AddAttended<S>> Part<S> for QueriesSelecting<S, M> {
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

/// [`GradientLanes::query_product`](super::lanes::GradientLanes::query_product).
pub(super) unsafe fn query_product<S: Simd, M: AddAttended<S>>(product: QueryProduct<'_, S::Elem>) {
    let QueryProduct { keys, skip, dim, k, ds, y, begins, has_masked, next, .. } = product;
    let Rows { ptr, stride } = k.rows.from(skip / M::STEPS);
    let (b, n) = (Broadcast { ptr, row: 1, step: stride }, keys.div_ceil(M::STEPS));
    let product = Factors::<S, 2> {
        rows: dim,
        n,
        x: ds.cast_const(),
        b,
        y,
        onto: if begins.is_some() { Onto::Nothing } else { Onto::Sum },
        next,
    };
    // SAFETY: promised by the caller.
    unsafe {
        if !has_masked || is_finite::<S, M>(k) {
            M::apart(Matmul::<S, M, 2, true>(product, PhantomData));
        } else {
            if let Some(len) = begins {
                S::apart(clear::<S>(y, len));
            }
            M::apart(QueriesSelecting::<S, M>(product, PhantomData));
        }
    }
}

/// `Sᵀ = K · Qᵀ` of a tile: `keys` keys by its queries, to rows `row` apart.
pub(super) unsafe fn key_product<S: Simd, M: Products<S>>(product: KeyProduct<S::Elem>, row: usize) {
    let KeyProduct { keys, dim, k, q_t, s: to, next } = product;
    let lanes = dim.div_ceil(M::STEPS);
    for d in (0..lanes).step_by(QK_RUN) {
        let b = Broadcast { ptr: k.ptr.wrapping_add(d), row: k.stride, step: 1 };
        let x = q_t.wrapping_add(d * 2 * S::LANES);
        let onto = if d == 0 { Onto::<S, 2>::Nothing } else { Onto::Sum };
        let (n, y, lanes) = (QK_RUN.min(lanes - d), Place { ptr: to, row }, PhantomData::<M>);
        // SAFETY: promised by the caller.
        unsafe { M::apart(Product { rows: keys, n, x, b, y, onto, next, lanes }) };
    }
}

/// [`GradientLanes::contract`](super::lanes::GradientLanes::contract).
pub(super) unsafe fn contract<S: Simd, M: AddAttended<S>>(product: &Contract<S::Elem>) {
    let Contract { rows, row, dim, x, selects, .. } = *product;
    // SAFETY: promised by the caller.
    unsafe {
        for panel in panels::<S>(dim) {
            let ptr = x.wrapping_add(panel.first * row / M::STEPS);
            let len = rows / M::STEPS * panel.width;
            let is_finite = !selects || M::apart(IsFinite { ptr, len, lanes: PhantomData::<M> });
            if panel.width == S::LANES {
                contract_panel::<S, M, 1>(product, panel, is_finite);
            } else {
                contract_panel::<S, M, 2>(product, panel, is_finite);
            }
        }
    }
}

unsafe fn contract_panel<S: Simd, M: AddAttended<S>, const V: usize>(
    product: &Contract<S::Elem>,
    panel: Panel,
    is_finite: bool,
) {
    let Contract { keys, rows, row, b, x, y, skip, block_n, next, .. } = *product;
    let y = y.wrapping_add(panel.first * block_n + skip * panel.width);
    let product = Product::<S, M, V> {
        rows: keys,
        n: rows / M::STEPS,
        x: x.wrapping_add(panel.first * row / M::STEPS),
        b: Broadcast { ptr: b, row: (row / M::STEPS) as isize, step: 1 },
        y: Place { ptr: y, row: panel.width },
        onto: Onto::Sum,
        next,
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

/// Whether whole vectors are finite.
pub(super) struct IsFinite<E, M> {
    pub(super) ptr: *const E,
    pub(super) len: usize,
    pub(super) lanes: PhantomData<M>,
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
