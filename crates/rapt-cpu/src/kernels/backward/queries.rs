//! A tile of queries with one block of keys: what is known of its rows, and its rows of Q and dO as the products read them.
//!
//! Lanes without a query, and rows that attend nothing, are rows of zeros that see no key: what lies in q and d_o there is not read.

use std::marker::PhantomData;

use rapt_core::DType;

use super::super::mask::{Effect, ReadTile};
use super::super::pack::{load_row, transpose_in};
use super::super::simd::{Part, Real, Simd, Storage};
use super::products::panels;
use crate::backward_problem::BackwardProblem;
use crate::problem::Input;
use crate::task_rows::Row;

/// The most lanes of a tile: two vectors of 16.
pub(super) const MAX_QUERIES: usize = 32;

/// The most tiles of a run.
pub(super) const MAX_TILES: usize = 4;

/// See the module.
pub(super) struct Tile<E> {
    pub(super) rows: [Row; MAX_QUERIES],
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
pub(super) unsafe fn pack<S: Simd, T: Storage<S>>(
    problem: &BackwardProblem,
    base: *mut S::Elem,
    tiles: &[Option<Tile<S::Elem>>],
) {
    let (scratch, m) = (&problem.scratch, problem.partition.run_rows());
    let of = [
        (&problem.q, problem.head_dim, scratch.q, scratch.q_t),
        (&problem.d_o, problem.head_dim_v, scratch.d_o, scratch.d_o_t),
    ];
    for (input, dim, columns, turned) in of {
        for (t, tile) in tiles.iter().flatten().enumerate() {
            let width = S::Q_VECS * S::LANES;
            let turned = base.wrapping_add(turned + t * width * dim.next_multiple_of(S::LANES));
            let columns = base.wrapping_add(columns);
            let pack = PackTile { input, tile, dim, first: t * width, m, columns, turned, storage: PhantomData::<T> };
            // SAFETY: scratch memory has room for the rows of a run.
            unsafe { S::apart(pack) };
        }
    }
}

/// One tile of Q or dO.
struct PackTile<'a, E, T> {
    input: &'a Input<4>,
    tile: &'a Tile<E>,
    dim: usize,
    /// The first of its rows in the panels of the run, which have `m`.
    first: usize,
    m: usize,
    columns: *mut E,
    turned: *mut E,
    storage: PhantomData<T>,
}

impl<S: Simd, T: Storage<S>> Part<S> for PackTile<'_, S::Elem, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let PackTile { input, tile, dim, first, m, columns, turned, .. } = self;
        let (input, width) = (*input, S::Q_VECS * S::LANES);
        for panel in panels::<S>(dim) {
            let to = columns.wrapping_add(panel.first * m + first * panel.width);
            // SAFETY: the panel has m rows; each live lane is a row of the tensor.
            unsafe {
                for lane in 0..width {
                    let to = to.add(lane * panel.width);
                    let mut filled = 0;
                    if tile.lives[lane] {
                        let row = &tile.rows[lane];
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

/// `n` elements of any dtype, `stride` apart, to consecutive ones: in vectors where it is `T`.
#[inline(always)]
pub(super) unsafe fn load_row_of<S: Simd, T: Storage<S>>(
    from: *const u8,
    dtype: DType,
    stride: isize,
    n: usize,
    to: *mut S::Elem,
) {
    // SAFETY: the caller vouches for n elements on both sides.
    unsafe {
        if dtype == T::DTYPE {
            return load_row::<S, T>(from.cast(), stride, n, to);
        }
        let step = stride * dtype.size_bytes() as isize;
        for d in 0..n {
            *to.add(d) = S::Elem::load_as(dtype, from.wrapping_offset(d as isize * step));
        }
    }
}
