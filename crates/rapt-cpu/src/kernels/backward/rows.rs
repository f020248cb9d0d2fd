//! What is known of each row before any product: what its probabilities are recomputed from, and `delta = Σ d_o · out − d_lse`.
//!
//! A row whose lse is −∞ attends nothing: what arrives there is not read.

use std::marker::PhantomData;

use super::super::simd::{Part, Real, Simd, Storage};
use super::queries::load_row_of;
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
