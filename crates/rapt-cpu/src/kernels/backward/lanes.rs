//! What a lane of the five products holds along a contraction, how rows and weights become lanes, and what forms the products: one number and the
//! inner loop of `matmul` in `single`, two of bf16 in `pairs`, the same in tiles in `tiled`.
//!
//! ```text
//!            S, dP along head_dim       dQ along the keys            dV, dK along the queries
//! Single     q[d], k[d]                 k[j], ds[j]                  p[i], d_o[i]
//! Paired     (q[2t], q[2t+1]), …        (k[2t], k[2t+1]), …          (p[2t], p[2t+1]), …
//! ```
//! A matrix of rows of head_dim lies in panels of two vectors of columns, the last one of one vector if that will do: a panel of a matrix of
//! `rows` rows of lanes begins at `first column · rows`, and its rows follow one another.

use super::super::blocks::{KeyProduct, Rows, Values};
use super::super::next_rows::NextRows;
use super::super::products::{Block, Packing, Products};
use super::super::simd::{Part, Simd, Storage};
use crate::backward_problem::{BackwardProblem, Form};
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
    /// Lanes of a row of Q or dO along head_dim, in whole vectors.
    fn turned_lanes(dim: usize) -> usize {
        dim.div_ceil(Self::STEPS).next_multiple_of(S::LANES)
    }
    /// A lane of steps that are not attended.
    const UNATTENDED: S::Elem;
    /// How K and V lie, and how work is cut.
    const FORM: Form = Form { key_run: Self::STEPS, keys_at_a_time: 64, dim_run: 1, tiles: 2, in_place: true };
    /// What a thread has while it forms products.
    type Unit;
    /// Has it.
    unsafe fn unit() -> Self::Unit;
    /// `Sᵀ = K · Qᵀ` of a tile, to rows `row` elements apart.
    unsafe fn key_product(product: KeyProduct<S::Elem>, row: usize);
    /// `dQᵀ += Kᵀ · dSᵀ` of a tile.
    unsafe fn query_product(product: QueryProduct<'_, S::Elem>);
    /// Sums over the queries of a run.
    unsafe fn contract(product: Contract<S::Elem>);
    /// Where products and weights of tile `t` of a run lie for its keys from `at` on, a multiple of [`Form::keys_at_a_time`].
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
    ) -> Values<S::Elem>;
    /// Lets nothing lie in `len` lanes of a packed block of a task's keys that would not be multiplied: what no row attends.
    unsafe fn clean_keys(_problem: &BackwardProblem, _task: usize, _panel: *mut S::Elem, _len: usize) {}
    /// One tile of Q or dO.
    unsafe fn pack_tile(tile: &PackTile<'_, S::Elem>);
}

/// `dQᵀ[dim][query] += Kᵀ · dSᵀ` of a tile.
pub(crate) struct QueryProduct<'a, E> {
    /// Keys from key `skip` of a block on.
    pub(super) keys: usize,
    pub(super) skip: usize,
    pub(super) dim: usize,
    /// Of the block, as lanes along the keys.
    pub(super) k: &'a mut Values<E>,
    /// Likewise, with room for whole runs of keys.
    pub(super) ds: *mut E,
    pub(super) y: *mut E,
    /// How many numbers are summed at `y`, where these are the first that are: what lies there is nothing yet.
    pub(super) begins: Option<usize>,
    /// Whether some of `ds` may be [`Real::MASKED`](super::super::simd::Real::MASKED).
    pub(super) has_masked: bool,
    /// Room for as many sums.
    pub(super) room: *mut E,
    /// What is asked for meanwhile.
    pub(super) next: *mut NextRows,
}

/// Sums over the queries of a run: `keys` rows of `dim` columns onto those from row `skip` on of a block's.
#[derive(Clone, Copy)]
pub(crate) struct Contract<E> {
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
    /// Whether some weight may be [`Real::MASKED`](super::super::simd::Real::MASKED) of a row that lies in x as it is.
    pub(super) selects: bool,
    /// Room for a panel of x, or of y.
    pub(super) room: *mut E,
    /// What is asked for meanwhile.
    pub(super) next: *mut NextRows,
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
