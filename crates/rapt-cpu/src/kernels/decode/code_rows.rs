//! Rows of codes as the products of decode load them, and those products: one function for each kind of codes.

use std::marker::PhantomData;

use super::codes::{outputs_of, scores_of};
use super::products::{dots, weighted_sum};
use super::rows::Rows;
use crate::kernels::codes::{CodeVectors, E2m1, E4m3fn, E5m2, Element, Int4, Int8, Uint8};
use crate::kernels::simd::Part;
use crate::partition::QK_KEYS;
use crate::problem::{CodeProducts, CodeRows, Fold, In, Out, RowKind, Sizes};

/// What decode multiplies codes of a kind with, in the vectors of `S`; `None` for numbers.
pub(crate) fn code_products<S: CodeVectors>(kind: RowKind, fold: Fold) -> Option<CodeProducts> {
    fn of<S: CodeVectors, C: Element<S> + 'static, A: Adjust<S>>(fold: Fold) -> CodeProducts {
        CodeProducts {
            fold,
            dots: dots_of::<S, C, A>,
            weighted: weighted_of::<S, C, A>,
            numbers: numbers_of::<S, C, A>,
            short: C::SHORT,
            has_nan: (C::SHORT != 1.0).then_some(has_nan_of::<S, C>),
            scores: scores_of::<S>,
            outputs: outputs_of::<S>,
            pairs: None,
            quads: None,
        }
    }
    fn either<S: CodeVectors, C: Element<S> + 'static>(fold: Fold) -> CodeProducts {
        if fold == Fold::Groups { of::<S, C, Grouped>(fold) } else { of::<S, C, Plain>(fold) }
    }
    match (kind, fold) {
        (RowKind::Int8, _) => Some(either::<S, Int8>(fold)),
        (RowKind::Int4, _) => Some(either::<S, Int4>(fold)),
        (RowKind::E4m3fn, _) => Some(either::<S, E4m3fn>(fold)),
        (RowKind::E5m2, _) => Some(either::<S, E5m2>(fold)),
        (RowKind::Uint8, Fold::Groups) => Some(of::<S, Uint8, Grouped>(fold)),
        (RowKind::Uint8, Fold::Channels) => Some(of::<S, Uint8, Points>(fold)),
        (RowKind::E2m1, Fold::Groups) => Some(of::<S, E2m1, Grouped>(fold)),
        (RowKind::Uint8 | RowKind::E2m1 | RowKind::F16 | RowKind::Bf16, _) => None,
    }
}

/// What is done to a code before it is multiplied.
trait Adjust<S: CodeVectors>: Copy + 'static {
    unsafe fn vector<C: Element<S>>(x: S::V, row: CodeRow, d: usize) -> S::V;
    unsafe fn number<C: Element<S>>(x: f32, row: CodeRow, d: usize) -> f32;
}

/// Nothing.
#[derive(Clone, Copy)]
struct Plain;
/// Each group of a row has a zero point and a factor.
#[derive(Clone, Copy)]
struct Grouped;
/// Each channel has a zero point.
#[derive(Clone, Copy)]
struct Points;

impl<S: CodeVectors> Adjust<S> for Plain {
    #[inline(always)]
    unsafe fn vector<C: Element<S>>(x: S::V, _: CodeRow, _: usize) -> S::V {
        x
    }
    #[inline(always)]
    unsafe fn number<C: Element<S>>(x: f32, _: CodeRow, _: usize) -> f32 {
        x
    }
}

impl<S: CodeVectors> Adjust<S> for Grouped {
    #[inline(always)]
    unsafe fn vector<C: Element<S>>(mut x: S::V, row: CodeRow, d: usize) -> S::V {
        // SAFETY: promised by the caller; so below.
        unsafe {
            if C::HAS_ZERO_POINT {
                x = S::sub(x, S::splat(*row.points.add(row.group(d, S::LANES))));
            }
            S::mul(x, S::splat(*row.factors.add(row.group(d, S::LANES))))
        }
    }
    #[inline(always)]
    unsafe fn number<C: Element<S>>(mut x: f32, row: CodeRow, d: usize) -> f32 {
        // SAFETY: as above.
        unsafe {
            if C::HAS_ZERO_POINT {
                x -= *row.points.add(row.group(d, S::LANES));
            }
            x * *row.factors.add(row.group(d, S::LANES))
        }
    }
}

impl<S: CodeVectors> Adjust<S> for Points {
    #[inline(always)]
    unsafe fn vector<C: Element<S>>(x: S::V, row: CodeRow, d: usize) -> S::V {
        // SAFETY: as above.
        unsafe { S::sub(x, S::load(row.points.add(d))) }
    }
    #[inline(always)]
    unsafe fn number<C: Element<S>>(x: f32, row: CodeRow, d: usize) -> f32 {
        // SAFETY: as above.
        unsafe { x - *row.points.add(d) }
    }
}

/// One row of codes.
#[derive(Clone, Copy)]
struct CodeRow {
    codes: *const u8,
    factors: *const f32,
    points: *const f32,
    vectors_log2: u32,
}

impl CodeRow {
    /// The group of element `d`.
    #[inline(always)]
    fn group(&self, d: usize, lanes: usize) -> usize {
        (d / lanes) >> self.vectors_log2
    }
}

/// [`CodeRows`] of codes `C`, adjusted by `A`.
struct Coded<C, A> {
    rows: CodeRows,
    of: PhantomData<(C, A)>,
}

impl<C, A> Clone for Coded<C, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C, A> Copy for Coded<C, A> {}

impl<C, A> Coded<C, A> {
    #[inline(always)]
    fn new(rows: &CodeRows) -> Self {
        Coded { rows: *rows, of: PhantomData }
    }
}

impl<S: CodeVectors, C: Element<S> + 'static, A: Adjust<S>> Rows<S> for Coded<C, A> {
    type Row = CodeRow;
    #[inline(always)]
    fn row(&self, j: usize) -> CodeRow {
        let CodeRows { first, stride, factors, points, per_row, vectors_log2 } = self.rows;
        CodeRow {
            codes: first.wrapping_offset(j as isize * stride),
            factors: factors.wrapping_add(j * per_row),
            points: points.wrapping_add(j * per_row),
            vectors_log2,
        }
    }
    #[inline(always)]
    unsafe fn load(row: CodeRow, d: usize) -> S::V {
        // SAFETY: promised by the caller: vectors begin at a whole byte, as lanes are even.
        unsafe { A::vector::<C>(C::load_short(row.codes.add(d / C::SHARED)), row, d) }
    }
    #[inline(always)]
    unsafe fn number(row: CodeRow, d: usize) -> f32 {
        // SAFETY: promised by the caller.
        unsafe { A::number::<C>(C::number(row.codes.add(d / C::SHARED), d % C::SHARED) / C::SHORT, row, d) }
    }
}

/// A product of codes `C`, adjusted by `A`, as a part of its own.
struct Product<'a, C, A, X, Y> {
    rows: &'a CodeRows,
    sizes: Sizes,
    x: X,
    y: Y,
    of: PhantomData<(C, A)>,
}

unsafe fn dots_of<S: CodeVectors, C: Element<S> + 'static, A: Adjust<S>>(rows: &CodeRows, sizes: Sizes, q: In, s: Out) {
    // SAFETY: promised by the caller; so below.
    unsafe { S::apart(Product { rows, sizes, x: q, y: s, of: PhantomData::<(C, A)> }) }
}

unsafe fn weighted_of<S: CodeVectors, C: Element<S> + 'static, A: Adjust<S>>(
    rows: &CodeRows,
    sizes: Sizes,
    p: In,
    o: Out,
) {
    // SAFETY: as above.
    unsafe { S::apart(Product { rows, sizes, x: Weighted(p), y: o, of: PhantomData::<(C, A)> }) }
}

unsafe fn numbers_of<S: CodeVectors, C: Element<S> + 'static, A: Adjust<S>>(
    rows: &CodeRows,
    sizes: Sizes,
    panel: *mut f32,
) {
    // SAFETY: as above.
    unsafe { S::apart(Product { rows, sizes, x: (), y: panel, of: PhantomData::<(C, A)> }) }
}

unsafe fn has_nan_of<S: CodeVectors, C: Element<S> + 'static>(rows: &CodeRows, sizes: Sizes) -> bool {
    // SAFETY: as above.
    unsafe { S::apart(HasNan { rows, sizes, of: PhantomData::<C> }) }
}

/// Whether a key has a NaN among its codes.
struct HasNan<'a, C> {
    rows: &'a CodeRows,
    sizes: Sizes,
    of: PhantomData<C>,
}

impl<S: CodeVectors, C: Element<S> + 'static> Part<S> for HasNan<'_, C> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let HasNan { rows: &CodeRows { first, stride, .. }, sizes: Sizes { n, dim, .. }, .. } = self;
        let bytes = dim.div_ceil(C::SHARED);
        // Rows that follow one another are one.
        let (rows, len) = if stride == bytes as isize { (1, n * bytes) } else { (n, bytes) };
        let mut found = false;
        for j in 0..rows {
            // SAFETY: as above.
            found |= unsafe { C::has_nan(first.wrapping_offset(j as isize * stride), len) };
        }
        found
    }
}

impl<S: CodeVectors, C: Element<S> + 'static, A: Adjust<S>> Part<S> for Product<'_, C, A, In, Out> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Product { rows, sizes: Sizes { n, dim, rows: queries }, x: q, y: (s, s_stride), .. } = self;
        let keys = Coded::<C, A>::new(rows);
        // SAFETY: promised by the caller of what made the part. The last keys are taken once more where they are no multiple: a
        // score is the same whatever is beside it.
        unsafe {
            for j in (0..n - QK_KEYS).step_by(QK_KEYS).chain([n - QK_KEYS]) {
                dots::<S, _, QK_KEYS>(&keys, j, dim, queries, q, (s.add(j), s_stride));
            }
        }
    }
}

/// The weights of a second product.
struct Weighted(In);

impl<S: CodeVectors, C: Element<S> + 'static, A: Adjust<S>> Part<S> for Product<'_, C, A, Weighted, Out> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Product { rows, sizes: Sizes { n, dim, rows: queries }, x: Weighted(p), y: o, .. } = self;
        // SAFETY: as above.
        unsafe { weighted_sum::<S, _, true>(&Coded::<C, A>::new(rows), n, queries, p, o, dim) }
    }
}

impl<S: CodeVectors, C: Element<S> + 'static, A: Adjust<S>> Part<S> for Product<'_, C, A, (), *mut f32> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Product { rows, sizes: Sizes { n, dim, .. }, y: panel, .. } = self;
        let keys = Coded::<C, A>::new(rows);
        // SAFETY: as above.
        unsafe {
            for j in 0..n {
                let (row, to) = (Rows::<S>::row(&keys, j), panel.add(j * dim));
                let mut d = 0;
                while d + S::LANES <= dim {
                    let x = S::div(C::load(row.codes.add(d / C::SHARED)), S::splat(C::SHORT));
                    S::store(to.add(d), A::vector::<C>(x, row, d));
                    d += S::LANES;
                }
                for d in d..dim {
                    *to.add(d) = <Coded<C, A> as Rows<S>>::number(row, d);
                }
            }
        }
    }
}
