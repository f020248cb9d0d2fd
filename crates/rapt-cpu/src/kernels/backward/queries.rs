//! A tile of queries with one block of keys: what is known of its rows, and its rows of Q and dO as the products read them.
//!
//! Lanes without a query, and rows that attend nothing, are rows of zeros that see no key: what lies in q and d_o there is not read.

use std::marker::PhantomData;

use super::super::mask::{Effect, ReadTile};
use super::super::simd::{Real, Simd, Storage};
use super::lanes::{GradientRows, Pack, PackTile};
use crate::backward_problem::BackwardProblem;
use crate::task_rows::Row;

/// The most lanes of a tile: two vectors of 16.
pub(super) const MAX_QUERIES: usize = 32;

/// The most tiles of a run.
pub(super) const MAX_TILES: usize = 4;

/// See the module.
pub(super) struct Tile<E> {
    pub(super) rows: [Row; MAX_QUERIES],
    /// The first of its keys.
    pub(super) first_key: usize,
    /// Queries that there are.
    pub(super) count: usize,
    /// Of each lane: whether it is a row that attends something.
    pub(super) lives: [bool; MAX_QUERIES],
    /// No row attends any key.
    pub(super) is_empty: bool,
    /// Some live row does not attend some key.
    pub(super) masks: bool,
    /// The same of any lane.
    pub(super) has_masked: bool,
    /// Biases `[keys][width]`, where the mask does something.
    pub(super) bias: Option<*const E>,
    /// Which keys each lane sees by its position, where it is, and its slope: relative to the first key.
    pub(super) lo: [E; MAX_QUERIES],
    pub(super) hi: [E; MAX_QUERIES],
    pub(super) diagonal: [E; MAX_QUERIES],
    pub(super) slope: [E; MAX_QUERIES],
    /// See [`RowStates`](crate::backward_problem::RowStates).
    pub(super) top: [E; MAX_QUERIES],
    pub(super) log2_sum: [E; MAX_QUERIES],
    pub(super) delta: [E; MAX_QUERIES],
}

impl<E: Real> Tile<E> {
    /// Rows `r0..r1` of a task with keys `j0..j0 + n`; `bias` has a row of lanes for each.
    pub(super) unsafe fn new<S: Simd<Elem = E>>(
        problem: &BackwardProblem,
        task: usize,
        (r0, r1): (usize, usize),
        (j0, n): (usize, usize),
        bias: *mut E,
    ) -> Self {
        let [batch, _, head] = problem.origin(task);
        let zeros = [E::ZERO; MAX_QUERIES];
        let mut tile = Tile {
            rows: [Row { batch, head, i: 0 }; MAX_QUERIES],
            first_key: j0,
            count: r1 - r0,
            lives: [false; MAX_QUERIES],
            is_empty: true,
            masks: !problem.rows.sees_all(r0, r1, j0, j0 + n),
            has_masked: r1 - r0 < S::Q_VECS * S::LANES,
            bias: None,
            lo: zeros,
            hi: zeros,
            diagonal: zeros,
            slope: zeros,
            top: zeros,
            log2_sum: zeros,
            delta: zeros,
        };
        let states = [problem.states.top, problem.states.log2_sum, problem.states.delta].map(<*mut u8>::cast::<E>);
        for lane in 0..tile.count {
            let (row, at) = (problem.rows.row((batch, head), r0 + lane), task * problem.partition.rows + r0 + lane);
            tile.rows[lane] = row;
            // SAFETY: a state for each row of each task.
            let [top, log2_sum, delta] = unsafe { states.map(|of| *of.add(at)) };
            if top == E::NEG_INFINITY {
                tile.has_masked = true;
                continue;
            }
            tile.lives[lane] = true;
            tile.is_empty = false;
            (tile.top[lane], tile.log2_sum[lane], tile.delta[lane]) = (top, log2_sum, delta);
            let (first, last) = problem.rows.range.keys_of(row.i);
            tile.lo[lane] = E::from_i64(first.clamp(j0, j0 + n) as i64 - j0 as i64);
            tile.hi[lane] = E::from_i64(last.clamp(j0, j0 + n) as i64 - j0 as i64);
            if let Some(slopes) = &problem.alibi_slopes {
                tile.diagonal[lane] = E::from_i64(row.i as i64 + problem.rows.range.diagonal - j0 as i64);
                // SAFETY: one slope per head of q.
                tile.slope[lane] = unsafe { E::load_as(slopes.dtype, slopes.at([row.head])) };
            }
        }
        if let (Some(mask), false) = (&problem.mask, tile.is_empty) {
            let rows = &tile.rows[..tile.count];
            // SAFETY: the keys are inside the mask; the caller vouches for `bias`.
            let effect: Effect = unsafe { S::apart(ReadTile::<S, 2> { mask, rows, keys: (j0, n), bias }) };
            tile.is_empty = effect.is_empty();
            tile.masks |= effect.masks;
            tile.bias = (effect.masks || effect.adds).then_some(bias.cast_const());
        }
        tile.masks |= tile.is_empty;
        tile.has_masked |= tile.masks;
        tile
    }
}

/// The rows of Q and dO of a run: in panels of columns, and transposed tile by tile.
pub(super) unsafe fn pack<S: Simd, M: GradientRows<S, T>, T: Storage<S>>(
    problem: &BackwardProblem,
    base: *mut S::Elem,
    tiles: &[Option<Tile<S::Elem>>],
) {
    let (scratch, m) = (&problem.scratch, problem.partition.run_rows());
    let part = |at: usize| base.wrapping_add(at);
    let of = [
        (&problem.q, problem.head_dim, scratch.q, scratch.q_t),
        (&problem.d_o, problem.head_dim_v, scratch.d_o, scratch.d_o_t),
    ];
    for (input, dim, columns, turned) in of {
        for (t, tile) in tiles.iter().flatten().enumerate() {
            let (first, columns, rows) = (t * problem.partition.queries, part(columns), part(scratch.rows));
            let turned = part(turned + first * M::turned_lanes(dim));
            let (of, lives) = (&tile.rows[..], &tile.lives[..]);
            let pack = PackTile { input, of, lives, dim, first, m, columns, turned, rows };
            // SAFETY: scratch memory has room for the rows of a run.
            unsafe { M::apart(Pack::<_, M, T>(pack, PhantomData)) };
        }
    }
}
