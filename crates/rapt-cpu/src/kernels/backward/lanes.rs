//! What a lane of the five products holds along a contraction, and how rows and weights become lanes: one number here, two of bf16 in `pairs`.
//!
//! ```text
//!            S, dP along head_dim       dQ along the keys            dV, dK along the queries
//! Single     q[d], k[d]                 k[j], ds[j]                  p[i], d_o[i]
//! Paired     (q[2t], q[2t+1]), …        (k[2t], k[2t+1]), …          (p[2t], p[2t+1]), …
//! ```
//! A matrix of rows of head_dim lies in panels of two vectors of columns, the last one of one vector if that will do: a panel of a matrix of
//! `rows` rows of lanes begins at `first column · rows`, and its rows follow one another.

use super::super::blocks::Rows;
use super::super::pack::{load_row_of, transpose_in};
use super::super::products::{Block, Packing, Products, Single};
use super::super::simd::{Part, Real, Simd, Storage};
use crate::backward_problem::BackwardProblem;
use crate::problem::Input;
use crate::task_rows::Row;

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

/// Weights of a tile as `weigh` left them, and where they go: see [`GradientLanes::lay`].
pub(crate) struct Laid<E> {
    /// Keys.
    pub(super) n: usize,
    /// Probabilities and what arrives at the scores: `[keys][width]` each.
    pub(super) from: [*const E; 2],
    /// Both as rows of lanes along the queries, `row` lanes apart.
    pub(super) to: [*mut E; 2],
    pub(super) row: usize,
    /// The second as lanes along the keys, `[keys / STEPS][width]`.
    pub(super) along_keys: *mut E,
}

/// Places of a tile's weights.
pub(crate) struct Places<E> {
    /// Scores, and from key to key.
    pub(super) p: (*mut E, usize),
    /// What the product of v and d_o goes to, `[keys][width]`.
    pub(super) dp: *mut E,
    /// See [`Laid`].
    pub(super) to: [*mut E; 2],
    pub(super) along_keys: *mut E,
}

/// See the module.
pub(crate) trait GradientLanes<S: Simd>: Products<S> {
    /// A lane of steps that are not attended.
    const UNATTENDED: S::Elem;
    /// `acc + Σ value · weight` over the steps whose weight, of any sign, is not [`Real::MASKED`].
    unsafe fn add_attended(value: S::V, weight: S::V, acc: S::V) -> S::V;
    /// Where products and weights of tile `t` of a run lie for its keys from `at` on, a multiple of [`KEYS_AT_A_TIME`](super::KEYS_AT_A_TIME).
    fn places(problem: &BackwardProblem, base: *mut S::Elem, t: usize, at: usize) -> Places<S::Elem>;
    /// Weights of a tile as lanes; nothing where `weigh` wrote them so.
    unsafe fn lay(weights: Laid<S::Elem>);
}

/// The same of a storage dtype.
pub(crate) trait GradientRows<S: Simd, T: Storage<S>>: GradientLanes<S> + Packing<S, T> {
    /// A block of K as lanes along the keys: `k` itself where that will do, or packed.
    unsafe fn along_keys(
        input: &Input<4>,
        block: Block,
        dim: usize,
        k: Rows<S::Elem>,
        panel: *mut S::Elem,
    ) -> Rows<S::Elem>;
    /// One tile of Q or dO.
    unsafe fn pack_tile(tile: &PackTile<'_, S::Elem>);
}

/// Lanes of a row along head_dim, padded to whole vectors.
pub(super) fn padded_lanes<S: Simd, M: Products<S>>(dim: usize) -> usize {
    dim.div_ceil(M::STEPS).next_multiple_of(S::LANES)
}

/// One tile of Q or dO, which are packed in panels of columns along the queries, and transposed along head_dim.
pub(crate) struct PackTile<'a, E> {
    pub(super) input: &'a Input<4>,
    /// What its lanes are, and whether each is a row that attends something: the others are zeros.
    pub(super) of: &'a [Row],
    pub(super) lives: &'a [bool],
    pub(super) dim: usize,
    /// The first of its rows in the panels of the run, which have `m`.
    pub(super) first: usize,
    pub(super) m: usize,
    pub(super) columns: *mut E,
    pub(super) turned: *mut E,
    /// Room for the rows of a tile.
    pub(super) rows: *mut E,
}

impl<S: Simd> GradientLanes<S> for Single {
    const UNATTENDED: S::Elem = S::Elem::MASKED;
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
    fn places(problem: &BackwardProblem, base: *mut S::Elem, t: usize, at: usize) -> Places<S::Elem> {
        let (scratch, width, row) = (&problem.scratch, problem.partition.queries, problem.partition.run_rows());
        let to = [scratch.p, scratch.ds].map(|of| base.wrapping_add(of + t * width + at * row));
        let dp = base.wrapping_add(scratch.dp + at * width);
        Places { p: (to[0], row), dp, to, along_keys: dp }
    }
    unsafe fn lay(_: Laid<S::Elem>) {}
}

impl<S: Simd, T: Storage<S>> GradientRows<S, T> for Single {
    unsafe fn along_keys(_: &Input<4>, _: Block, _: usize, k: Rows<S::Elem>, _: *mut S::Elem) -> Rows<S::Elem> {
        k
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

/// [`GradientRows::pack_tile`] as a part.
pub(super) struct Pack<'a, E, M, T>(pub(super) PackTile<'a, E>, pub(super) std::marker::PhantomData<(M, T)>);

impl<S: Simd, T: Storage<S>, M: GradientRows<S, T>> Part<S> for Pack<'_, S::Elem, M, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: promised by the caller.
        unsafe { M::pack_tile(&self.0) }
    }
}
