//! The five products tile by tile, as forward's (`super::super::tiled`): lanes lie as in `pairs`, and are rows or columns of tiles there.
//!
//! ```text
//! S, dP   a = K, V    [16 keys][16 lanes of head_dim]   b = Qᵀ, dOᵀ  [16 lanes][16 queries]    c = Sᵀ, dPᵀ  [16 keys][16 queries]
//! dQ      a = Kᵀ      [16 dims][16 lanes of keys]       b = dSᵀ      [16 lanes][16 queries]    c = dQᵀ      [16 dims][16 queries]
//! dV, dK  a = Pᵀ, dSᵀ [16 keys][16 lanes of queries]    b = dO, Q    [16 lanes][16 dims]       c = dV, dK   [16 keys][16 dims]
//! ```
//! K, V and Kᵀ are packed, a tile's 1 KiB in one piece; the others lie so that a row of a tile is a cache line. Where NaN or an infinity waits behind a
//! masked weight, the finite numbers are multiplied and each of the others is added where it is attended, as forward has it.

use half::bf16;

use super::super::beside::rows_of_tiles;
use super::super::blocks::{KeyProduct, Rows, Values};
use super::super::matmul::Broadcast;
use super::super::pairs::{Bf16Pairs, Paired};
use super::super::products::{Block, Lanes};
use super::super::simd::Real;
use super::super::tiled::{Clean, TILE_KEYS, Tiled, key_tiles, of_panel, of_rows, of_sums, value_tiles};
use super::lanes::{Contract, GradientLanes, GradientRows, Laid, PackTile, Places, QueryProduct, panels};
use super::pairs::PackAlongKeys;
use super::products::IsFinite;
use crate::arch::amx::{Operands, SIDE, Tiles};
use crate::backward_problem::{BackwardProblem, Form};
use crate::problem::Input;

impl<S: Bf16Pairs> GradientLanes<S> for Tiled {
    const UNATTENDED: f32 = <Paired as GradientLanes<S>>::UNATTENDED;
    const FORM: Form = Form { key_run: TILE_KEYS, keys_at_a_time: TILE_KEYS, dim_run: SIDE, tiles: 4, in_place: false };
    type Unit = Tiles;
    unsafe fn unit() -> Tiles {
        // SAFETY: promised by the caller.
        unsafe { Tiles::new() }
    }

    unsafe fn key_product(keys: usize, dim: usize, k: Rows<f32>, q_t: *const f32, (s, _): (*mut f32, usize)) {
        let (rows, operands) = key_tiles::<S, 2>(&KeyProduct { keys, dim, k, q_t, s });
        // SAFETY: promised by the caller: all of it lies in whole tiles.
        unsafe { rows_of_tiles(rows, 2 * S::LANES, operands) }
    }

    unsafe fn query_product(product: QueryProduct<'_, f32>) {
        let QueryProduct { keys, skip, dim, k, ds, y, has_masked } = product;
        let rows = k.rows.from(skip / 2);
        // SAFETY: as above.
        unsafe {
            let (rows, operands) = value_tiles::<S, 2>((keys, dim), rows, ds, y, has_masked.then_some(k));
            rows_of_tiles(rows, 2 * S::LANES, operands);
        }
    }

    unsafe fn contract(product: Contract<f32>) {
        let Contract { keys, rows, row, dim, b, x, y, skip, block_n, selects, room } = product;
        for panel in panels::<S>(dim) {
            let (mut x, len) = (x.wrapping_add(panel.first * row / 2), rows / 2 * panel.width);
            let y = y.wrapping_add(panel.first * block_n + skip * panel.width);
            // SAFETY: as above; `room` is a panel's.
            unsafe {
                let is_finite = IsFinite { ptr: x, len, lanes: std::marker::PhantomData::<Tiled> };
                if selects && !<Tiled as Lanes<S>>::apart(is_finite) {
                    <Tiled as Lanes<S>>::apart(Clean { from: x, len, to: room });
                    add_odd(keys, (b, row / 2), (x, len), (y, panel.width));
                    x = room.cast_const();
                }
                let operands = Operands {
                    a: of_rows(Broadcast { ptr: b, row: (row / 2) as isize, step: 1 }, 0),
                    b: of_panel(x, panel.width),
                    c: of_sums(y, panel.width),
                    steps: rows / 2 / SIDE,
                    from_zero: false,
                };
                rows_of_tiles(keys.div_ceil(SIDE), panel.width, operands);
            }
        }
    }

    fn places(problem: &BackwardProblem, base: *mut f32, t: usize, at: usize) -> Places<f32> {
        <Paired as GradientLanes<S>>::places(problem, base, t, at)
    }
    unsafe fn lay(weights: Laid<f32>) {
        // SAFETY: promised by the caller.
        unsafe { <Paired as GradientLanes<S>>::lay(weights) }
    }
}

impl<S: Bf16Pairs> GradientRows<S, bf16> for Tiled {
    unsafe fn along_keys(input: &Input<4>, block: Block, dim: usize, _: Rows<f32>, panel: *mut f32) -> Values<f32> {
        let lanes = std::marker::PhantomData::<Tiled>;
        // SAFETY: promised by the caller: the panel has whole tiles, twice.
        unsafe { <Tiled as Lanes<S>>::apart(PackAlongKeys { input, block, dim, panel, lanes }) };
        let width = dim.next_multiple_of(SIDE);
        let rows = Rows { ptr: panel.cast_const(), stride: width as isize };
        Values { rows, steps: block.n.next_multiple_of(TILE_KEYS) / 2, lanes: width, finite: None }
    }
    #[inline(always)]
    unsafe fn pack_tile(tile: &PackTile<'_, f32>) {
        // SAFETY: promised by the caller.
        unsafe { <Paired as GradientRows<S, bf16>>::pack_tile(tile) }
    }
}

/// `y[key][column] += weight · x` for each x that is not finite and each key that its row attends; weights of keys are `row` lanes apart.
unsafe fn add_odd(
    keys: usize,
    (weights, row): (*const f32, usize),
    (x, len): (*const f32, usize),
    (y, width): (*mut f32, usize),
) {
    let halves = |pair: u32| [pair << 16, pair & 0xFFFF_0000].map(f32::from_bits);
    for at in 0..len {
        // SAFETY: the caller vouches for `len` lanes of x, and for weights and sums of each key.
        unsafe {
            let pair = halves((*x.add(at)).to_bits());
            for (half, value) in pair.into_iter().enumerate().filter(|(_, value)| !value.is_finite()) {
                for j in 0..keys {
                    let weight = halves((*weights.add(j * row + at / width)).to_bits())[half];
                    if !weight.is_masked() {
                        // As the unit does: a weight below the least normal number is 0.
                        let weight = if weight.is_subnormal() { 0.0 } else { weight };
                        *y.add(j * width + at % width) += weight * value;
                    }
                }
            }
        }
    }
}
