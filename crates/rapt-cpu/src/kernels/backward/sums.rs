//! What is put together after the main step: dq of its chunks, and the gradients of sinks.

use std::marker::PhantomData;

use super::super::pack::store_row;
use super::super::simd::{Part, Real, Simd, Storage};
use super::rows::ROWS_PER_ITEM;
use crate::backward_problem::BackwardProblem;

/// Adds the chunks of tile `n` of the wave in their order, and writes its rows of dq.
pub(super) unsafe fn dq<S: Simd, T: Storage<S>>(problem: &BackwardProblem, n: usize, memory: *mut u8) {
    // SAFETY: as of the caller.
    unsafe { S::apart(SumChunks { problem, n, memory, storage: PhantomData::<T> }) }
}

struct SumChunks<'a, T> {
    problem: &'a BackwardProblem,
    n: usize,
    memory: *mut u8,
    storage: PhantomData<T>,
}

impl<S: Simd, T: Storage<S>> Part<S> for SumChunks<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let SumChunks { problem, n, memory, .. } = self;
        let Some(out) = problem.dq else { return };
        let (partition, dim) = (&problem.partition, problem.head_dim);
        let (width, tiles) = (partition.queries, partition.task_tiles());
        let (in_wave, tile) = (n / tiles, n % tiles);
        let [batch, _, head] = problem.origin(problem.first_task + in_wave);
        let len = dim * width;
        let first = problem.partials.cast::<S::Elem>().wrapping_add((in_wave * partition.chunks * tiles + tile) * len);
        let stride = dim.next_multiple_of(S::LANES);
        let rows = memory.cast::<S::Elem>().wrapping_add(problem.scratch.rows);
        // The columns of all rows: a part of the scratch memory that no other step needs now.
        let sums = memory.cast::<S::Elem>().wrapping_add(problem.scratch.q_t);
        let scale = S::Elem::from_f64_clamped(problem.scores.softmax_scale);
        // SAFETY: every chunk of this task has been written; the rows of dq are this item's alone, and scratch memory holds a padded tile twice.
        unsafe {
            for at in (0..len).step_by(S::LANES) {
                let mut sum = S::load(first.add(at));
                for chunk in 1..partition.chunks {
                    sum = S::add(sum, S::load(first.add(chunk * tiles * len + at)));
                }
                S::store(sums.add(at), sum);
            }
            for d in (0..dim).step_by(S::LANES) {
                for v in (0..width).step_by(S::LANES) {
                    S::transpose(sums.add(d * width + v), width, rows.add(v * stride + d), stride);
                }
            }
            for r in tile * width..partition.rows.min((tile + 1) * width) {
                let row = problem.rows.row((batch, head), r);
                let from = rows.add((r - tile * width) * stride);
                store_row::<S, T>(from, scale, dim, &out, [row.batch, row.head, row.i, 0]);
            }
        }
    }
}

/// The gradient of the sink of head `n`: `−Σ exp(sink − lse) · delta`, summed in runs of rows.
pub(super) unsafe fn sink<S: Simd>(problem: &BackwardProblem, head: usize, _: *mut u8) {
    let (Some(out), Some(sinks)) = (problem.d_sinks, problem.sinks) else { return };
    let q_len = problem.rows.q_len;
    // SAFETY: a sink of each head, and a state of each row; each head has an item.
    unsafe {
        let sink = S::Elem::load_as(sinks.dtype, sinks.at([head]));
        let at = |of: *mut u8, row: usize| *of.cast::<S::Elem>().add(row);
        let ln_2 = S::Elem::from_f64_clamped(std::f64::consts::LN_2);
        let mut total = S::Elem::ZERO;
        for batch in 0..problem.batch {
            let first = (batch * problem.num_q_heads + head) * q_len;
            for run in (0..q_len).step_by(ROWS_PER_ITEM) {
                let mut sum = S::Elem::ZERO;
                for row in first + run..first + q_len.min(run + ROWS_PER_ITEM) {
                    let (top, log2_sum) = (at(problem.states.top, row), at(problem.states.log2_sum, row));
                    if top != S::Elem::NEG_INFINITY {
                        let weight = (sink - top - log2_sum * ln_2).exp();
                        sum = sum - weight * at(problem.states.delta, row);
                    }
                }
                total = total + sum;
            }
        }
        total.store_as(out.dtype, out.at([head]));
    }
}
