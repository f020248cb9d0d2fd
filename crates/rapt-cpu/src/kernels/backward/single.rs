//! The five products with one number in a lane, of the accumulation dtype.

use super::super::blocks::{KeyProduct, Rows, Values};
use super::super::pack::{load_row_of, transpose_in};
use super::super::products::{Block, Single};
use super::super::simd::{Real, Simd, Storage};
use super::lanes::{Contract, GradientLanes, GradientRows, Laid, PackTile, Places, QueryProduct, panels};
use super::products::{self, AddAttended};
use crate::backward_problem::BackwardProblem;
use crate::problem::Input;

impl<S: Simd> AddAttended<S> for Single {
    #[inline(always)]
    unsafe fn add_attended(value: S::V, weight: S::V, acc: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe {
            let (zero, sum) = (S::splat(S::Elem::ZERO), S::fma(value, weight, acc));
            // −0 is the one zero with a negative inverse.
            let of_zero = S::select(S::lt(S::div(S::splat(S::Elem::ONE), weight), zero), acc, sum);
            S::select(S::eq(weight, zero), of_zero, sum)
        }
    }
}

impl<S: Simd> GradientLanes<S> for Single {
    const UNATTENDED: S::Elem = S::Elem::MASKED;
    type Unit = ();
    unsafe fn unit() {}
    unsafe fn key_product(product: KeyProduct<S::Elem>, row: usize) {
        // SAFETY: promised by the caller.
        unsafe { products::key_product::<S, Self>(product, row) }
    }
    unsafe fn query_product(product: QueryProduct<'_, S::Elem>) {
        // SAFETY: promised by the caller.
        unsafe { products::query_product::<S, Self>(product) }
    }
    unsafe fn contract(product: Contract<S::Elem>) {
        // SAFETY: promised by the caller.
        unsafe { products::contract::<S, Self>(&product) }
    }
    fn places(problem: &BackwardProblem, base: *mut S::Elem, t: usize, at: usize) -> Places<S::Elem> {
        let (scratch, width, row) = (&problem.scratch, problem.partition.queries, problem.partition.run_rows());
        let to = [scratch.p, scratch.ds].map(|of| base.wrapping_add(of + t * width + at * row));
        let dp = base.wrapping_add(scratch.dp + at * width);
        Places { p: (to[0], row), dp, to, along_keys: dp }
    }
    unsafe fn lay(_: Laid<S::Elem>) {}
}

impl<S: Simd, T: Storage<S>> GradientRows<S, T> for Single {
    unsafe fn along_keys(_: &Input<4>, block: Block, dim: usize, k: Rows<S::Elem>, _: *mut S::Elem) -> Values<S::Elem> {
        Values { rows: k, steps: block.n, lanes: dim, finite: None }
    }
    #[inline(always)]
    unsafe fn pack_tile(tile: &PackTile<'_, S::Elem>) {
        let PackTile { input, of, lives, dim, first, m, columns, turned, .. } = *tile;
        // A copy: behind a reference it would be read again after every store.
        let (input, width) = (*input, S::Q_VECS * S::LANES);
        for panel in panels::<S>(dim) {
            let to = columns.wrapping_add(panel.first * m + first * panel.width);
            // SAFETY: the panel has m rows; each live lane is a row of the tensor.
            unsafe {
                for lane in 0..width {
                    let to = to.add(lane * panel.width);
                    let mut filled = 0;
                    if lives[lane] {
                        let row = &of[lane];
                        let from = input.at([row.batch, row.head, row.i, panel.first]);
                        load_row_of::<S, T>(from, input.dtype, input.strides[3], panel.len, to);
                        filled = panel.len;
                    }
                    for d in filled..panel.width {
                        *to.add(d) = S::Elem::ZERO;
                    }
                }
                let turned = turned.add(panel.first * width);
                transpose_in::<S>(to, panel.width, panel.width, turned, width);
            }
        }
    }
}
