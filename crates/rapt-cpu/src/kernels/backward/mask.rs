//! The gradient of an additive mask: what arrives at the scores, summed where the mask is broadcast.
//!
//! ```text
//! a piece        a tile of queries and a block of keys of one batch entry and head of the mask; all of them where its size is 1
//! for each batch entry, head, tile and block that it stands for:  dS, from products of its own;  sums[key][query] += dS
//! ```
//! A pass of its own, so that sums in the accumulation dtype take no memory of the mask's size and their order is fixed. Every element of the
//! gradient is written by its piece, zeros where nothing is attended.

use std::ops::Range;

use super::super::blocks::KeyProduct;
use super::super::next_rows::NextRows;
use super::super::simd::{Part, Real, Simd, Storage};
use super::Keys;
use super::lanes::{GradientRows, Places};
use super::products::clear;
use super::queries::{self, Tile};
use super::weigh::{Operands, weigh};
use crate::backward_problem::{BackwardPartition, BackwardProblem};
use crate::problem::Output;

/// How many pieces the gradient of a mask of these sizes has: batch entries, heads, tiles, blocks.
pub(crate) fn pieces([batch, heads, q_len, kv_len]: [usize; 4], partition: &BackwardPartition) -> [usize; 4] {
    [batch, heads, q_len.div_ceil(partition.queries), kv_len.div_ceil(partition.block_n)]
}

/// Computes piece `n`.
pub(super) unsafe fn item<S: Simd, M: GradientRows<S, T>, T: Storage<S>>(
    problem: &BackwardProblem,
    n: usize,
    memory: *mut u8,
) {
    let Some(out) = &problem.d_mask else { return };
    let (shape, partition) = (problem.d_mask_shape, &problem.partition);
    let counts = pieces(shape, partition);
    let piece = [n / (counts[3] * counts[2] * counts[1]), n / (counts[3] * counts[2]), n / counts[3], n];
    let piece: [usize; 4] = std::array::from_fn(|d| piece[d] % counts[d]);
    let all = [problem.batch, problem.num_q_heads, problem.rows.q_len, problem.kv_len];
    let step = [1, 1, partition.queries, partition.block_n];
    // What it stands for: of a dimension of 1 all indices.
    let range = |d: usize| -> Range<usize> {
        if shape[d] == 1 { 0..all[d] } else { piece[d] * step[d]..all[d].min((piece[d] + 1) * step[d]) }
    };
    let base = memory.cast::<S::Elem>();
    let sums = base.wrapping_add(problem.scratch.d_mask);
    let is_sum = [shape[2] == 1, shape[3] == 1];
    // SAFETY: as of the main step; a piece's elements are its own.
    unsafe {
        let _unit = M::unit();
        let mut none = NextRows::new();
        let next = &raw mut none;
        S::apart(clear::<S>(sums, partition.block_n * partition.queries));
        for block in range(3).step_by(partition.block_n) {
            let keys_n = partition.block_n.min(range(3).end - block);
            for (batch, head) in range(0).flat_map(|batch| range(1).map(move |head| (batch, head))) {
                let task = batch * problem.num_kv_heads + head / problem.group_size;
                let mut keys = None;
                for i0 in range(2).step_by(partition.queries) {
                    let i1 = range(2).end.min(i0 + partition.queries);
                    let first = head % problem.group_size * problem.rows.q_len;
                    let keys =
                        &*keys.get_or_insert_with(|| Keys::new::<S, M, T>(problem, base, task, (block, keys_n), next));
                    add::<S, M, T>(problem, base, keys, (first + i0, first + i1), is_sum[1]);
                }
            }
        }
        let (keys, queries) = (range(3), range(2));
        let first = [range(0).start, range(1).start, queries.start, keys.start];
        let sizes = [if is_sum[0] { 1 } else { queries.len() }, if is_sum[1] { 1 } else { keys.len() }];
        S::apart(Store { out, first, sizes, sums, is_sum: is_sum[0] });
    }
}

/// Adds what arrives at the scores of one tile with one block.
unsafe fn add<S: Simd, M: GradientRows<S, T>, T: Storage<S>>(
    problem: &BackwardProblem,
    base: *mut S::Elem,
    keys: &Keys<S::Elem>,
    rows: (usize, usize),
    sums_keys: bool,
) {
    let scratch = &problem.scratch;
    let part = |at: usize| base.wrapping_add(at);
    let width = problem.partition.queries;
    // SAFETY: as in `item`.
    unsafe {
        let tile = Tile::new::<S>(problem, keys.task, rows, (keys.first, keys.n), part(scratch.bias));
        if tile.is_empty {
            return;
        }
        let tiles = [Some(tile)];
        queries::pack::<S, M, T>(problem, base, &tiles);
        let [Some(tile)] = &tiles else { return };
        let Places { p, dp, .. } = M::places(problem, base, 0, 0);
        let product = KeyProduct {
            keys: keys.n,
            dim: problem.head_dim,
            k: keys.k,
            q_t: part(scratch.q_t),
            s: p.0,
            next: keys.next,
        };
        M::key_product(product, p.1);
        let of_values = KeyProduct { dim: problem.head_dim_v, k: keys.v, q_t: part(scratch.d_o_t), s: dp, ..product };
        M::key_product(of_values, width);
        let operands = Operands { p, ds: None, dp, kept: part(scratch.kept) };
        weigh::<S>(problem, tile, (0, keys.n), operands, true);
        S::apart(AddScores::<S> { n: keys.n, from: dp, sums: part(scratch.d_mask), sums_keys });
    }
}

/// `sums[key][query] += dS`, or onto the first key's.
struct AddScores<S: Simd> {
    n: usize,
    from: *const S::Elem,
    sums: *mut S::Elem,
    sums_keys: bool,
}

impl<S: Simd> Part<S> for AddScores<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let AddScores { n, from, sums, sums_keys } = self;
        let width = S::Q_VECS * S::LANES;
        // SAFETY: both have n rows of a tile's width.
        unsafe {
            for v in (0..width).step_by(S::LANES) {
                let mut of_keys = S::splat(S::Elem::ZERO);
                for j in 0..n {
                    let ds = S::load(from.add(j * width + v));
                    if sums_keys {
                        of_keys = S::add(of_keys, ds);
                    } else {
                        let to = sums.add(j * width + v);
                        S::store(to, S::add(S::load(to), ds));
                    }
                }
                if sums_keys {
                    S::store(sums.add(v), S::add(S::load(sums.add(v)), of_keys));
                }
            }
        }
    }
}

/// The sums of a piece to its elements.
struct Store<'a, S: Simd> {
    out: &'a Output<4>,
    first: [usize; 4],
    /// Queries and keys.
    sizes: [usize; 2],
    sums: *const S::Elem,
    /// Whether lanes are summed.
    is_sum: bool,
}

impl<S: Simd> Part<S> for Store<'_, S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Store { out, first: [batch, head, i, j], sizes: [queries, keys], sums, is_sum } = self;
        let width = S::Q_VECS * S::LANES;
        // SAFETY: the piece's elements of the gradient.
        unsafe {
            for key in 0..keys {
                let row = sums.add(key * width);
                if is_sum {
                    let mut sum = S::load(row);
                    for v in (S::LANES..width).step_by(S::LANES) {
                        sum = S::add(sum, S::load(row.add(v)));
                    }
                    S::reduce_add(sum).store_as(out.dtype, out.at([batch, head, 0, j + key]));
                } else {
                    for lane in 0..queries {
                        (*row.add(lane)).store_as(out.dtype, out.at([batch, head, i + lane, j + key]));
                    }
                }
            }
        }
    }
}
