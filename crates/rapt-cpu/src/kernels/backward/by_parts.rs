//! Gradients of numbers that are sums of bf16 (`super::super::parts`): task by task, of which each is computed so or by lanes of one number.
//!
//! A number that has no parts is not looked for in each product, as forward does: one in q, k, v or d_o of a task, where a row attends it or is one that
//! attends something, lets all of the task be computed by lanes of one number, in the same blocks and chunks; in keys that no row attends it is 0. So do rows whose lse is
//! large: their states are found from products by lanes of one number, as the gradient of a mask is.

use super::super::mask::attends;
use super::super::pairs::Bf16Pairs;
use super::super::parts::{Numbers, RowHasParts};
use super::super::products::Single;
use super::super::tiled::Tiled;
use super::{Entries, item, mask, rows};
use crate::backward_problem::{BackwardProblem, TaskNumbers};
use crate::problem::Input;
use crate::task_rows::Row;

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
        match problem.numbers_of_tasks[task].get_or_init(|| numbers_of_task::<S, T>(problem, task)) {
            TaskNumbers::Others => item::<S, Single, T>(&problem.plain(), n, memory),
            _ => item::<S, Tiled<T>, T>(problem, n, memory),
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

/// What the numbers of a task are, but those of rows that attend nothing.
unsafe fn numbers_of_task<S: Bf16Pairs, T: Numbers<S>>(problem: &BackwardProblem, task: usize) -> TaskNumbers {
    let ([batch, kv_head, head], rows) = (problem.origin(task), problem.partition.rows);
    let tops = problem.states.top.cast::<f32>().wrapping_add(task * rows);
    let has_parts = |input: &Input<4>, index: [usize; 3], dim: usize| {
        let [batch, head, row] = index;
        let (row, stride) = (input.at([batch, head, row, 0]).cast(), input.strides[3]);
        // SAFETY: a row of a tensor.
        unsafe { S::apart(RowHasParts::<T> { row, stride, dim }) }
    };
    // SAFETY: each row of a task has a state.
    let top = |r: usize| unsafe { *tops.add(r) };
    let live = || (0..rows).filter(|&r| top(r) != f32::NEG_INFINITY).map(|r| (r, problem.rows.row((batch, head), r)));
    let of_queries = [(&problem.q, problem.head_dim), (&problem.d_o, problem.head_dim_v)];
    let are_others = |(r, row): (usize, Row)| {
        let index = [row.batch, row.head, row.i];
        top(r).abs() > rows::LARGE as f32 || of_queries.iter().any(|(input, dim)| !has_parts(input, index, *dim))
    };
    if live().any(are_others) {
        return TaskNumbers::Others;
    }
    let is_attended = |j: usize| {
        live().any(|(_, row)| {
            let (first, last) = problem.rows.range.keys_of(row.i);
            // SAFETY: a row and a key of the mask.
            (first..last).contains(&j) && problem.mask.is_none_or(|mask| unsafe { attends::<f32>(&mask, row, j) })
        })
    };
    let of_keys = [(&problem.k, problem.head_dim), (&problem.v, problem.head_dim_v)];
    let mut numbers = TaskNumbers::InParts;
    for j in 0..problem.kv_len {
        if of_keys.iter().any(|(input, dim)| !has_parts(input, [batch, kv_head, j], *dim)) {
            if is_attended(j) {
                return TaskNumbers::Others;
            }
            numbers = TaskNumbers::InPartsWhereAttended;
        }
    }
    numbers
}
