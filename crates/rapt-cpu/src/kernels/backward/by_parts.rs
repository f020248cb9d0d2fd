//! Gradients of numbers that are sums of bf16 (`super::super::parts`): task by task, of which each is computed so or by lanes of one number.
//!
//! A number that has no parts is not looked for in each product, as forward does: one in q, k, v or d_o of a task lets all of it be computed by lanes of one
//! number, in the same blocks and chunks. So do the gradient of a mask and the states of rows whose lse is large, which have steps of their own.

use super::super::pairs::Bf16Pairs;
use super::super::parts::{Numbers, RowHasParts};
use super::super::products::Single;
use super::super::tiled::Tiled;
use super::{Entries, item, mask, rows};
use crate::backward_problem::BackwardProblem;

impl Entries {
    /// Those of `S` and `T` in parts.
    pub(crate) fn of_parts<S: Bf16Pairs, T: Numbers<S>>() -> Self {
        Entries { large: large::<S, T>, main: main::<S, T>, mask: of_mask::<S, T>, ..Entries::of::<S, Tiled<T>, T>() }
    }
}

unsafe fn main<S: Bf16Pairs, T: Numbers<S>>(problem: &BackwardProblem, n: usize, memory: *mut u8) {
    let task = problem.first_task + n / problem.partition.chunks;
    // SAFETY: as of the caller: scratch memory is long enough for both.
    unsafe {
        // Threads that ask at the same time find the same.
        let has_parts = problem.tasks_in_parts[task].get_or_init(|| task_has_parts::<S, T>(problem, task));
        if *has_parts {
            item::<S, Tiled<T>, T>(problem, n, memory);
        } else {
            item::<S, Single, T>(&problem.plain(), n, memory);
        }
    }
}

unsafe fn large<S: Bf16Pairs, T: Numbers<S>>(problem: &BackwardProblem, n: usize, memory: *mut u8) {
    // SAFETY: as above.
    unsafe { rows::large::<S, Single, T>(&problem.plain(), n, memory) }
}

unsafe fn of_mask<S: Bf16Pairs, T: Numbers<S>>(problem: &BackwardProblem, n: usize, memory: *mut u8) {
    // SAFETY: as above.
    unsafe { mask::item::<S, Single, T>(&problem.plain(), n, memory) }
}

/// Whether all numbers of a task have parts, but those of rows that attend nothing.
unsafe fn task_has_parts<S: Bf16Pairs, T: Numbers<S>>(problem: &BackwardProblem, task: usize) -> bool {
    let ([batch, kv_head, head], rows) = (problem.origin(task), problem.partition.rows);
    let tops = problem.states.top.cast::<f32>().wrapping_add(task * rows);
    let has_parts = |row: *const u8, stride: isize, dim: usize| {
        // SAFETY: a row of a tensor.
        unsafe { S::apart(RowHasParts::<T> { row: row.cast(), stride, dim }) }
    };
    let of_keys = [(&problem.k, problem.head_dim), (&problem.v, problem.head_dim_v)];
    let of_queries = [(&problem.q, problem.head_dim), (&problem.d_o, problem.head_dim_v)];
    of_keys.iter().all(|(input, dim)| {
        (0..problem.kv_len).all(|j| has_parts(input.at([batch, kv_head, j, 0]), input.strides[3], *dim))
    }) && (0..rows).all(|r| {
        let row = problem.rows.row((batch, head), r);
        // SAFETY: each row of a task has a state.
        let is_dead = unsafe { *tops.add(r) } == f32::NEG_INFINITY;
        is_dead
            || of_queries
                .iter()
                .all(|(input, dim)| has_parts(input.at([row.batch, row.head, row.i, 0]), input.strides[3], *dim))
    })
}
