//! What is known of each row before any product: what its probabilities are recomputed from, and `delta = Σ d_o · out − d_lse`.
//!
//! A row whose lse is −∞ attends nothing: what arrives there is not read. In a lse beyond [`LARGE`] the logarithm of the sum drowns: of a row whose
//! biases are all the lowest finite number it is that number, however many keys there are. Such rows get their maximum and sum anew, from their own
//! keys, whatever lies in other rows of their tile.

use std::marker::PhantomData;

use super::super::blocks::KeyProduct;
use super::super::next_rows::NextRows;
use super::super::pack::load_row_of;
use super::super::simd::{Part, Real, Simd, Storage};
use super::Keys;
use super::lanes::GradientRows;
use super::queries::{self, MAX_QUERIES, Tile};
use super::weigh::Accumulate;
use crate::backward_problem::BackwardProblem;

/// Rows of an item.
pub(crate) const ROWS_PER_ITEM: usize = 256;

/// Finds the state of the rows of item `n`.
pub(super) unsafe fn item<S: Simd, T: Storage<S>>(problem: &BackwardProblem, n: usize, memory: *mut u8) {
    // SAFETY: as of the caller.
    unsafe { S::apart(FindStates { problem, first: n * ROWS_PER_ITEM, memory, storage: PhantomData::<T> }) }
}

struct FindStates<'a, T> {
    problem: &'a BackwardProblem,
    first: usize,
    memory: *mut u8,
    storage: PhantomData<T>,
}

impl<S: Simd, T: Storage<S>> Part<S> for FindStates<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let FindStates { problem, first, memory, .. } = self;
        let (dim, rows) = (problem.head_dim_v, problem.partition.rows);
        let last = (problem.partition.tasks * rows).min(first + ROWS_PER_ITEM);
        let padded = dim.next_multiple_of(S::LANES);
        let d_o = memory.cast::<S::Elem>().wrapping_add(problem.scratch.rows);
        let out = d_o.wrapping_add(padded);
        let (top, log2_sum, delta) = (problem.states.top, problem.states.log2_sum, problem.states.delta);
        let (top, log2_sum, delta) = (top.cast::<S::Elem>(), log2_sum.cast::<S::Elem>(), delta.cast::<S::Elem>());
        // Copies: behind a reference they would be read again after every store.
        let (of_d_o, of_out, of_lse, of_d_lse) = (problem.d_o, problem.out, problem.lse, problem.d_lse);
        // SAFETY: scratch memory has two padded rows; each row is inside the tensors and has a state.
        unsafe {
            for d in dim..padded {
                (*d_o.add(d), *out.add(d)) = (S::Elem::ZERO, S::Elem::ZERO);
            }
            for at in first..last {
                let [batch, _, head] = problem.origin(at / rows);
                let row = problem.rows.row((batch, head), at % rows);
                let lse = S::Elem::load_as(of_lse.dtype, of_lse.at([row.batch, row.head, row.i]));
                *top.add(at) = lse;
                *log2_sum.add(at) = S::Elem::ZERO;
                *delta.add(at) = S::Elem::ZERO;
                if lse == S::Elem::NEG_INFINITY {
                    continue;
                }
                let index = [row.batch, row.head, row.i, 0];
                load_row_of::<S, T>(of_d_o.at(index), of_d_o.dtype, of_d_o.strides[3], dim, d_o);
                load_row_of::<S, T>(of_out.at(index), of_out.dtype, of_out.strides[3], dim, out);
                let mut sum = S::splat(S::Elem::ZERO);
                for d in (0..padded).step_by(S::LANES) {
                    sum = S::fma(S::load(d_o.add(d)), S::load(out.add(d)), sum);
                }
                let mut sum = S::reduce_add(sum);
                if let Some(d_lse) = &of_d_lse {
                    sum = sum - S::Elem::load_as(d_lse.dtype, d_lse.at([row.batch, row.head, row.i]));
                }
                *delta.add(at) = sum;
            }
        }
    }
}

/// Beyond this much a lse is not relied on: its rounding is 2^−14 of a probability in float32.
pub(super) const LARGE: i64 = 1 << 10;

/// Finds maxima and sums of the rows of tile `n` of all tasks whose lse is large.
pub(super) unsafe fn large<S: Simd, M: GradientRows<S, T>, T: Storage<S>>(
    problem: &BackwardProblem,
    n: usize,
    memory: *mut u8,
) {
    let (partition, base) = (&problem.partition, memory.cast::<S::Elem>());
    let (task, tile) = (n / partition.task_tiles(), n % partition.task_tiles());
    let r0 = tile * partition.queries;
    let r1 = partition.rows.min(r0 + partition.queries);
    let (bound, lowest) = (S::Elem::from_i64(LARGE), S::Elem::NEG_INFINITY);
    let is_large = |top: S::Elem| top > bound || top < S::Elem::from_i64(-LARGE) && top != lowest;
    let states = [problem.states.top, problem.states.log2_sum];
    let [tops, sums] = states.map(|of| of.cast::<S::Elem>().wrapping_add(task * partition.rows));
    // SAFETY: a state of each row, which this item alone writes now; the rest as of the main step.
    unsafe {
        if !(r0..r1).any(|r| is_large(*tops.add(r))) {
            return;
        }
        let _unit = M::unit();
        let mut next = NextRows::new();
        let (mut row_max, mut row_sum) = ([lowest; MAX_QUERIES], [S::Elem::ZERO; MAX_QUERIES]);
        let (lo, hi) = problem.rows.keys_of_rows(r0, r1);
        for block in (0..problem.kv_len).step_by(partition.block_n) {
            let n = partition.block_n.min(problem.kv_len - block);
            if block + n <= lo || hi <= block {
                continue;
            }
            let keys = Keys::new::<S, M, T>(problem, base, task, (block, n), &raw mut next);
            let bias = base.wrapping_add(problem.scratch.bias);
            let tile = Tile::new::<S>(problem, task, (r0, r1), (block, n), bias);
            if tile.is_empty {
                continue;
            }
            let tiles = [Some(tile)];
            queries::pack::<S, M, T>(problem, base, &tiles);
            let [Some(tile)] = &tiles else { return };
            let (x, row) = M::places(problem, base, 0, 0).p;
            let q_t = base.wrapping_add(problem.scratch.q_t).cast_const();
            M::key_product(KeyProduct { keys: n, dim: problem.head_dim, k: keys.k, q_t, s: x, next: keys.next }, row);
            let (row_max, row_sum) = (&mut row_max, &mut row_sum);
            S::apart(Accumulate::<S> { problem, tile, n, x, row, row_max, row_sum });
        }
        let [batch, _, head] = problem.origin(task);
        for r in r0..r1 {
            let (mut top, mut sum) = (row_max[r - r0], row_sum[r - r0]);
            // NaN, and what has no sum that could be relied on, stay as lse has them.
            let has_sum = sum > S::Elem::ZERO && top != lowest;
            if !is_large(*tops.add(r)) || !has_sum {
                continue;
            }
            if let Some(sinks) = &problem.sinks {
                let sink = S::Elem::load_as(sinks.dtype, sinks.at([problem.rows.row((batch, head), r).head]));
                let max = if sink > top { sink } else { top };
                sum = sum * (top - max).exp() + (sink - max).exp();
                top = max;
            }
            *tops.add(r) = top;
            *sums.add(r) = sum.ln() / S::Elem::from_f64_clamped(std::f64::consts::LN_2);
        }
    }
}
