//! What is put together after the main step: dq of its chunks, gradients that tasks share, and those of sinks.
//!
//! ```text
//! for each task of the wave that adds to the target, in their order:     sums  =  its own, or  sums + its own
//! with the last of all tasks:                                            gradient = factor · sums
//! ```
//! Sums stay in memory from wave to wave: which tasks are one touches no bit.

use std::marker::PhantomData;

use super::super::pack::store_row;
use super::super::simd::{Part, Real, Simd, Storage};
use super::StoreKeys;
use super::rows::ROWS_PER_ITEM;
use crate::backward_problem::BackwardProblem;

/// Items of [`keys`] in a wave.
pub(crate) fn shared_blocks(problem: &BackwardProblem) -> usize {
    let targets = [problem.shared.dk, problem.shared.dv].into_iter().flatten().map(|shared| shared.count());
    targets.sum::<usize>() * problem.partition.blocks(problem.kv_len)
}

/// Items of [`dq`] in a wave.
pub(crate) fn tiles_of_dq(problem: &BackwardProblem) -> usize {
    problem.shared.dq.map_or(problem.wave_tasks, |shared| shared.count()) * problem.partition.task_tiles()
}

/// Adds what the tasks of the wave have summed of a block of keys: block `n` of the targets of dk, then of those of dv.
pub(super) unsafe fn keys<S: Simd, T: Storage<S>>(problem: &BackwardProblem, n: usize, _: *mut u8) {
    let blocks = problem.partition.blocks(problem.kv_len);
    let scale = S::Elem::from_f64_clamped(problem.scores.softmax_scale);
    let of = [
        (problem.shared.dk, &problem.dk, problem.head_dim, scale),
        (problem.shared.dv, &problem.dv, problem.head_dim_v, S::Elem::ONE),
    ];
    let (mut n, block_n) = (n, problem.partition.block_n);
    for (shared, out, dim, factor) in of {
        let (Some(shared), Some(out)) = (shared, out) else { continue };
        if n >= shared.count() * blocks {
            n -= shared.count() * blocks;
            continue;
        }
        let (target, block) = (n / blocks, n % blocks);
        let len = block_n * dim.next_multiple_of(S::LANES);
        let memory = problem.shared_at.cast::<S::Elem>().wrapping_add(block * len);
        let sums = memory.wrapping_add(shared.sums + target * shared.len);
        for (in_wave, at) in problem.adding(shared, target) {
            let from = memory.wrapping_add(shared.parts + in_wave * shared.len);
            let [is_first, is_last] = shared.ends(at);
            // SAFETY: every chunk of the task has been written, and the target's block is this item's alone.
            unsafe { S::apart(Add::<S> { from, many: 1, apart: 0, len, to: sums, is_first }) };
            if is_last {
                let ([batch, head], first) = (shared.target(at), block * block_n);
                let n = block_n.min(problem.kv_len - first);
                let (first, sums) = ((batch, head, first), sums.cast_const());
                // SAFETY: the rows of the gradient are this item's alone.
                unsafe { S::apart(StoreKeys { out, first, n, dim, sums, block_n, factor, storage: PhantomData::<T> }) };
            }
        }
        return;
    }
}

/// Adds the chunks of tile `n` of the wave in their order, and writes its rows of dq once all tasks that share it are in it.
pub(super) unsafe fn dq<S: Simd, T: Storage<S>>(problem: &BackwardProblem, n: usize, memory: *mut u8) {
    let (partition, tiles) = (&problem.partition, problem.partition.task_tiles());
    let (of, tile) = (n / tiles, n % tiles);
    let len = partition.tile_of_dq;
    let add = |in_wave: usize, to: *mut S::Elem, is_first: bool| {
        let from = problem.partials.cast::<S::Elem>().wrapping_add((in_wave * partition.chunks * tiles + tile) * len);
        // SAFETY: every chunk of this task has been written; what is added to is this item's alone.
        unsafe { S::apart(Add::<S> { from, many: partition.chunks, apart: tiles * len, len, to, is_first }) };
    };
    let store = |sums: *mut S::Elem, origin: [usize; 2]| {
        // SAFETY: the rows of dq are this item's alone.
        unsafe { S::apart(StoreTile { problem, tile, sums, origin, memory, storage: PhantomData::<T> }) };
    };
    let Some(shared) = problem.shared.dq else {
        // The columns of all rows: a part of the scratch memory that no other step needs now.
        let sums = memory.cast::<S::Elem>().wrapping_add(problem.scratch.q_t);
        let [batch, _, head] = problem.origin(problem.first_task + of);
        add(of, sums, true);
        return store(sums, [batch, head]);
    };
    let at = shared.sums + of * shared.len + tile * partition.queries * problem.head_dim.next_multiple_of(S::LANES);
    let sums = problem.shared_at.cast::<S::Elem>().wrapping_add(at);
    for (in_wave, at) in problem.adding(shared, of) {
        let [is_first, is_last] = shared.ends(at);
        add(in_wave, sums, is_first);
        if is_last {
            let [batch, head] = shared.target(at);
            store(sums, [batch, head * problem.group_size]);
        }
    }
}

/// The sum of `many` runs of `len` elements, each `apart` from the one before: to `to`, or onto it.
struct Add<S: Simd> {
    from: *const S::Elem,
    many: usize,
    apart: usize,
    len: usize,
    to: *mut S::Elem,
    is_first: bool,
}

impl<S: Simd> Part<S> for Add<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Add { from, many, apart, len, to, is_first } = self;
        // SAFETY: the caller vouches for whole vectors.
        unsafe {
            for at in (0..len).step_by(S::LANES) {
                let mut sum = S::load(from.add(at));
                for chunk in 1..many {
                    sum = S::add(sum, S::load(from.add(chunk * apart + at)));
                }
                S::store(to.add(at), if is_first { sum } else { S::add(S::load(to.add(at)), sum) });
            }
        }
    }
}

/// The sums of a tile, `[head_dim][queries]`, times softmax_scale to its rows of dq.
struct StoreTile<'a, S: Simd, T> {
    problem: &'a BackwardProblem,
    tile: usize,
    sums: *mut S::Elem,
    /// The batch entry and the first head of its task.
    origin: [usize; 2],
    memory: *mut u8,
    storage: PhantomData<T>,
}

impl<S: Simd, T: Storage<S>> Part<S> for StoreTile<'_, S, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let StoreTile { problem, tile, sums, origin: [batch, head], memory, .. } = self;
        let Some(out) = problem.dq else { return };
        let (partition, dim) = (&problem.partition, problem.head_dim);
        let (width, stride) = (partition.queries, dim.next_multiple_of(S::LANES));
        let rows = memory.cast::<S::Elem>().wrapping_add(problem.scratch.rows);
        let scale = S::Elem::from_f64_clamped(problem.scores.softmax_scale);
        // SAFETY: sums are a padded tile, and scratch memory holds one twice.
        unsafe {
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
