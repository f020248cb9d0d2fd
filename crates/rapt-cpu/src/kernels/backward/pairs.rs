//! The five products with two numbers of bf16 in a lane, for instruction sets with a dot of pairs.
//!
//! Probabilities and what arrives at the scores are rounded to bf16 where they become weights, as PyTorch rounds them; every sum stays float32.
//! K and V are read where they lie if their rows are whole pairs; for dQ the rows of K are woven two by two, as are those of Q and dO for dK and dV.

use std::marker::PhantomData;

use half::bf16;

use super::super::blocks::{KeyProduct, Rows, Values};
use super::super::pack::transpose_in;
use super::super::pairs::{Bf16Pairs, Paired, weave};
use super::super::products::{Block, Lanes, Packing};
use super::super::simd::{Part, Real, Storage};
use super::lanes::{Contract, GradientLanes, GradientRows, Laid, PackTile, Places, QueryProduct, panels};
use super::products::{self, AddAttended};
use crate::backward_problem::BackwardProblem;
use crate::problem::Input;

impl<S: Bf16Pairs> AddAttended<S> for Paired {
    #[inline(always)]
    unsafe fn add_attended(value: S::V, weight: S::V, acc: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::dot(S::keep_attended(value, weight), weight, acc) }
    }
}

impl<S: Bf16Pairs> GradientLanes<S> for Paired {
    const UNATTENDED: f32 = f32::from_bits(0x8000_8000);
    type Unit = ();
    unsafe fn unit() {}
    unsafe fn key_product(product: KeyProduct<f32>, row: usize) {
        // SAFETY: promised by the caller.
        unsafe { products::key_product::<S, Self>(product, row) }
    }
    unsafe fn query_product(product: QueryProduct<'_, f32>) {
        // SAFETY: promised by the caller.
        unsafe { products::query_product::<S, Self>(product) }
    }
    unsafe fn contract(product: Contract<f32>) {
        // SAFETY: promised by the caller.
        unsafe { products::contract::<S, Self>(&product) }
    }
    fn places(problem: &BackwardProblem, base: *mut f32, t: usize, at: usize) -> Places<f32> {
        let (scratch, width, row) = (&problem.scratch, problem.partition.queries, problem.partition.run_rows() / 2);
        let to = [scratch.p, scratch.ds].map(|of| base.wrapping_add(of + t * width / 2 + at * row));
        let [scores, dp] = [scratch.scores, scratch.dp].map(|of| base.wrapping_add(of));
        Places { p: (scores, width), dp, to, along_keys: base.wrapping_add(scratch.ds_along_keys + at / 2 * width) }
    }
    unsafe fn lay(weights: Laid<f32>) {
        // SAFETY: promised by the caller.
        unsafe { <Paired as Lanes<S>>::apart(weights) }
    }
}

impl<S: Bf16Pairs> Part<S> for Laid<f32> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Laid { n, from, to, row, along_keys } = self;
        let width = 2 * S::LANES;
        // SAFETY: the caller vouches for n rows of each, and for whole lanes of keys.
        unsafe {
            let [p, ds] = from.map(|from| move |j: usize, v: usize| from.add(j * width + v * S::LANES));
            for j in 0..n {
                S::store(to[0].add(j * row), S::narrow(S::load(p(j, 0)), S::load(p(j, 1))));
            }
            for j in (0..n).step_by(2) {
                let low = [S::load(ds(j, 0)), S::load(ds(j, 1))];
                let mut high = [S::splat(f32::MASKED); 2];
                S::store(to[1].add(j * row), S::narrow(low[0], low[1]));
                if j + 1 < n {
                    high = [S::load(ds(j + 1, 0)), S::load(ds(j + 1, 1))];
                    S::store(to[1].add((j + 1) * row), S::narrow(high[0], high[1]));
                }
                for v in 0..2 {
                    S::store(along_keys.add(j / 2 * width + v * S::LANES), S::pair(low[v], high[v]));
                }
            }
        }
    }
}

impl<S: Bf16Pairs> GradientRows<S, bf16> for Paired {
    unsafe fn along_keys(input: &Input<4>, block: Block, dim: usize, _: Rows<f32>, panel: *mut f32) -> Values<f32> {
        let lanes = PhantomData::<(Paired, bf16)>;
        // SAFETY: promised by the caller.
        unsafe { <Paired as Lanes<S>>::apart(PackAlongKeys { input, block, dim, panel, lanes }) };
        let rows = Rows { ptr: panel.cast_const(), stride: dim as isize };
        Values { rows, steps: block.n.div_ceil(2), lanes: dim, finite: None }
    }
    #[inline(always)]
    unsafe fn pack_tile(tile: &PackTile<'_, f32>) {
        let PackTile { input, of, lives, dim, first, m, columns, turned, rows } = *tile;
        // A copy: behind a reference it would be read again after every store.
        let (input, width) = (*input, 2 * S::LANES);
        let lanes = <Paired as GradientLanes<S>>::turned_lanes(dim);
        // SAFETY: scratch memory has a tile of rows, and the panels have m / 2 rows of lanes; each live lane is a row of the tensor.
        unsafe {
            for lane in 0..width {
                let (to, mut filled) = (rows.add(lane * lanes), 0);
                if lives[lane] {
                    let row = &of[lane];
                    let from = input.at([row.batch, row.head, row.i, 0]).cast::<bf16>();
                    filled = <Paired as Packing<S, bf16>>::load_query(from, input.strides[3], dim, false, to);
                }
                for at in filled..lanes {
                    *to.add(at) = 0.0;
                }
            }
            transpose_in::<S>(rows, lanes, lanes, turned, width);
            for panel in panels::<S>(dim) {
                let to = columns.add(panel.first * m / 2 + first / 2 * panel.width);
                for pair in 0..width / 2 {
                    let [low, high] = [0, 1].map(|n| rows.add((2 * pair + n) * lanes).cast::<bf16>().add(panel.first));
                    weave::<S>(low, Some(high), 1, panel.width, to.add(pair * panel.width));
                }
            }
        }
    }
}

/// A block of K as forward has V: two keys in a lane.
pub(super) struct PackAlongKeys<'a, M> {
    pub(super) input: &'a Input<4>,
    pub(super) block: Block,
    pub(super) dim: usize,
    pub(super) panel: *mut f32,
    pub(super) lanes: PhantomData<M>,
}

impl<S: Bf16Pairs, T: Storage<S>, M: Packing<S, T>> Part<S> for PackAlongKeys<'_, (M, T)> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let PackAlongKeys { input, block, dim, panel, .. } = self;
        // SAFETY: promised by the caller.
        unsafe { M::pack_values(input, block, dim, panel) }
    }
}
