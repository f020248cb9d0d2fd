//! The five products tile by tile, as forward's (`super::super::tiled`): lanes lie as in `pairs`, and are rows or columns of tiles there.
//!
//! ```text
//! S, dP   a = K, V    [16 keys][16 lanes of head_dim]   b = Qᵀ, dOᵀ  [16 lanes][16 queries]    c = Sᵀ, dPᵀ  [16 keys][16 queries]
//! dQ      a = Kᵀ      [16 dims][16 lanes of keys]       b = dSᵀ      [16 lanes][16 queries]    c = dQᵀ      [16 dims][16 queries]
//! dV, dK  a = Pᵀ, dSᵀ [16 keys][16 lanes of queries]    b = dO, Q    [16 lanes][16 dims]       c = dV, dK   [16 keys][16 dims]
//! ```
//! K, V and Kᵀ are packed, a tile's 1 KiB in one piece; the others lie so that a row of a tile is a cache line. Where NaN or an infinity waits behind a
//! masked weight, the finite numbers are multiplied and each of the others is added where it is attended, as forward has it.

use std::marker::PhantomData;

use half::bf16;

use super::super::beside::rows_of_tiles;
use super::super::blocks::{KeyProduct, Rows, Values};
use super::super::matmul::Broadcast;
use super::super::pack::transpose_in;
use super::super::pairs::{Bf16Pairs, Paired};
use super::super::parts::{AddSums, CleanParts, Numbers, lay_pair, row_of_tiles, weave_parts};
use super::super::products::{Block, Lanes, Packing};
use super::super::simd::{Part, Real};
use super::super::tiled::{Clean, TILE_KEYS, Tiled, key_tiles, of_panel, of_rows, of_sums, value_tiles};
use super::lanes::{Contract, GradientLanes, GradientRows, Laid, PackTile, Places, QueryProduct, panels};
use super::pairs::PackAlongKeys;
use super::products::{IsFinite, clear};
use crate::arch::amx::{InMemory, Operands, SIDE, Tiles};
use crate::backward_problem::{BackwardProblem, Form, TaskNumbers};
use crate::problem::{Input, Row};

/// As many keys as a block has: of numbers in parts, products of all of them while Qᵀ stays near (docs/lab/cpu.md).
const ALL_KEYS: usize = 512;

impl<S: Bf16Pairs, T: Numbers<S>> GradientLanes<S> for Tiled<T> {
    const UNATTENDED: f32 = <Paired as GradientLanes<S>>::UNATTENDED;
    const FORM: Form = Form {
        key_run: TILE_KEYS,
        keys_at_a_time: if T::PARTS == 1 { TILE_KEYS } else { ALL_KEYS },
        dim_run: SIDE,
        tiles: 4,
        in_place: false,
    };
    fn turned_lanes(dim: usize) -> usize {
        <Self as Packing<S, T>>::query_lanes(dim)
    }
    type Unit = Tiles;
    unsafe fn unit() -> Tiles {
        // SAFETY: promised by the caller.
        unsafe { Tiles::new() }
    }

    /// Of the five products the two of this form alone ask, before they are formed.
    unsafe fn key_product(product: KeyProduct<f32>, _: usize) {
        for _ in 0..product.keys.div_ceil(S::ROWS) {
            // SAFETY: the list lives in the item's frame, and nobody else uses it now.
            unsafe { (*product.next).ask::<S>() };
        }
        let (rows, operands) = key_tiles::<S, T, 2>(&product);
        // SAFETY: promised by the caller: all of it lies in whole tiles.
        unsafe { rows_of_tiles(rows, 2 * S::LANES, operands) }
    }

    unsafe fn query_product(product: QueryProduct<'_, f32>) {
        let QueryProduct { keys, skip, dim, k, ds, y, begins, has_masked, room, .. } = product;
        let (rows, numbers) = (k.rows.from(skip / 2), std::ptr::null());
        let masked = has_masked.then_some(k);
        // SAFETY: as above.
        unsafe {
            if let Some(len) = begins {
                S::apart(clear::<S>(y, len));
            }
            let width = 2 * S::LANES;
            if T::PARTS == 1 {
                let (rows, operands) = value_tiles::<S, T, 2>((keys, dim), rows, (ds, numbers), y, masked);
                rows_of_tiles(rows, width, operands);
            } else {
                let (rows, operands) = value_tiles::<S, T, 2>((keys, dim), rows, (ds, numbers), room, None);
                rows_of_tiles(rows, width, Operands { from_zero: true, ..operands });
                S::apart(AddSums { from: room.cast_const(), len: rows * SIDE * width, to: y });
            }
        }
    }

    unsafe fn contract(product: Contract<f32>) {
        let Contract { keys, rows, row, dim, b, x, y, skip, block_n, selects, room, .. } = product;
        let lanes = |rows: usize| rows / 2 * T::PARTS;
        for panel in panels::<S>(dim) {
            let (mut x, len) = (x.wrapping_add(panel.first * lanes(row)), lanes(rows) * panel.width);
            let y = y.wrapping_add(panel.first * block_n + skip * panel.width);
            // SAFETY: as above; `room` is a panel's.
            unsafe {
                let is_finite = IsFinite { ptr: x, len, lanes: PhantomData::<Self> };
                if selects && T::PARTS == 1 && !<Self as Lanes<S>>::apart(is_finite) {
                    <Self as Lanes<S>>::apart(Clean { from: x, len, to: room });
                    add_odd(keys, (b, row / 2), (x, len), (y, panel.width));
                    x = room.cast_const();
                }
                let (a, of_x) =
                    (of_rows(Broadcast { ptr: b, row: lanes(row) as isize, step: 1 }, 0), of_panel(x, panel.width));
                let sums = if T::PARTS == 1 { y } else { room };
                let operands = Operands {
                    a: InMemory { along: T::PARTS * a.along, part: a.along, ..a },
                    b: InMemory { along: T::PARTS * of_x.along, part: of_x.along, ..of_x },
                    c: of_sums(sums, panel.width),
                    steps: rows / 2 / SIDE,
                    parts: T::OF_VALUES,
                    from_zero: T::PARTS > 1,
                };
                rows_of_tiles(keys.div_ceil(SIDE), panel.width, operands);
                if T::PARTS > 1 {
                    S::apart(AddSums { from: room.cast_const(), len: keys * panel.width, to: y });
                }
            }
        }
    }

    fn places(problem: &BackwardProblem, base: *mut f32, t: usize, at: usize) -> Places<f32> {
        let (scratch, width) = (&problem.scratch, problem.partition.queries);
        let lanes = |queries: usize| queries / 2 * T::PARTS;
        let (tile, row) = (t * lanes(width), lanes(problem.partition.run_rows()));
        let to = [scratch.p, scratch.ds].map(|of| base.wrapping_add(of + tile + at * row));
        let [scores, dp] = [scratch.scores, scratch.dp].map(|of| base.wrapping_add(of));
        Places { p: (scores, width), dp, to, along_keys: base.wrapping_add(scratch.ds_along_keys + lanes(at) * width) }
    }
    unsafe fn lay(weights: Laid<f32>) {
        // SAFETY: promised by the caller.
        unsafe {
            if T::PARTS == 1 {
                <Paired as GradientLanes<S>>::lay(weights);
            } else {
                S::apart_paired(LayParts::<T>(weights, PhantomData));
            }
        }
    }
}

impl<S: Bf16Pairs, T: Numbers<S>> GradientRows<S, T> for Tiled<T> {
    unsafe fn along_keys(input: &Input<4>, block: Block, dim: usize, _: Rows<f32>, panel: *mut f32) -> Values<f32> {
        let lanes = PhantomData::<(Self, T)>;
        // SAFETY: promised by the caller: the panel has whole tiles, twice.
        unsafe { <Self as Lanes<S>>::apart(PackAlongKeys { input, block, dim, panel, lanes }) };
        let width = T::PARTS * dim.next_multiple_of(SIDE);
        let rows = Rows { ptr: panel.cast_const(), stride: width as isize };
        Values { rows, steps: block.n.next_multiple_of(TILE_KEYS) / 2, lanes: width, finite: None }
    }
    unsafe fn clean_keys(problem: &BackwardProblem, task: usize, panel: *mut f32, len: usize) {
        let numbers = problem.numbers_of_tasks.get(task).and_then(|numbers| numbers.get());
        if T::PARTS > 1 && numbers == Some(&TaskNumbers::InPartsWhereAttended) {
            // SAFETY: promised by the caller.
            unsafe { S::apart(CleanParts { from: panel, len, parts: T::PARTS, to: panel }) };
        }
    }
    #[inline(always)]
    unsafe fn pack_tile(tile: &PackTile<'_, f32>) {
        // SAFETY: promised by the caller.
        unsafe {
            if T::PARTS == 1 {
                <Paired as GradientRows<S, bf16>>::pack_tile(tile);
            } else {
                pack_parts::<S, T>(tile);
            }
        }
    }
}

/// Weights of a tile as lanes of parts: a tile's 16 lanes of each part follow one another.
struct LayParts<T>(Laid<f32>, PhantomData<T>);

impl<S: Bf16Pairs, T: Numbers<S>> Part<S> for LayParts<T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Laid { n, from, to, row, along_keys } = self.0;
        let width = 2 * S::LANES;
        // SAFETY: the caller vouches for n rows of each, and for whole lanes of keys.
        unsafe {
            let [p, ds] = from.map(|from| move |j: usize, v: usize| from.add(j * width + v * S::LANES));
            for j in (0..n).step_by(2) {
                let has_two = j + 1 < n;
                let row = |of: *mut f32| [Some(of.add(j * row)), has_two.then(|| of.add((j + 1) * row))];
                let (mut of_p, mut of_ds) = ([[S::splat(f32::MASKED); 2]; 2], [[S::splat(f32::MASKED); 2]; 2]);
                for key in 0..1 + usize::from(has_two) {
                    of_p[key] = [S::load(p(j + key, 0)), S::load(p(j + key, 1))];
                    of_ds[key] = [S::load(ds(j + key, 0)), S::load(ds(j + key, 1))];
                }
                lay_pair::<S, T>(of_p, row(to[0]), None);
                lay_pair::<S, T>(of_ds, row(to[1]), Some(along_keys.add(j / 2 * T::PARTS * width)));
            }
        }
    }
}

/// [`GradientRows::pack_tile`] in parts.
#[inline(always)]
unsafe fn pack_parts<S: Bf16Pairs, T: Numbers<S>>(tile: &PackTile<'_, f32>) {
    let PackTile { input, of, lives, dim, first, m, columns, turned, rows } = *tile;
    // A copy: behind a reference it would be read again after every store.
    let (input, width) = (*input, 2 * S::LANES);
    let row = |lane: usize| {
        let Row { batch, head, i } = of[lane];
        lives[lane].then(|| input.at([batch, head, i, 0]).cast::<T>())
    };
    let lanes = <Tiled<T> as GradientLanes<S>>::turned_lanes(dim);
    // SAFETY: scratch memory has a tile of rows, and the panels have m / 2 rows of lanes of each part; each live lane is a row of the tensor.
    unsafe {
        for lane in 0..width {
            for d in (0..dim).step_by(TILE_KEYS) {
                let to = rows.add(lane * lanes + d / 2 * T::PARTS);
                row_of_tiles::<S, T>(row(lane), input.strides[3], (d, dim), false, to, SIDE);
            }
        }
        transpose_in::<S>(rows, lanes, lanes, turned, width);
        for panel in panels::<S>(dim) {
            let to = columns.add((panel.first * m / 2 + first / 2 * panel.width) * T::PARTS);
            for pair in 0..width / 2 {
                let pair_of_rows = [0, 1].map(|n| rows.add((2 * pair + n) * lanes).cast_const());
                for d in (0..panel.width).step_by(S::LANES) {
                    let to = to.add(pair * panel.width + d);
                    weave_parts::<S, T>(pair_of_rows, panel.first + d, to, SIDE * panel.width);
                }
            }
        }
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
