//! What puts the chunks of decode together: per row, in the order of chunks,
//!
//! ```text
//! m = max m_c,  o = Σ o_c · 2^((m_c − m) · scale_log2),  sum likewise,  out = o / sum
//! ```

use std::marker::PhantomData;

use super::pack::store_row;
use super::simd::{Part, Real, Simd, Storage};
use super::softmax::{Finished, rescale};
use crate::partition::Turn;
use crate::problem::Problem;
use crate::scratch::partial_len;

/// Combines the chunks of one task in order, and writes its rows of out and lse.
pub(crate) unsafe fn combine<S: Simd, T: Storage<S>>(problem: &Problem, Turn { item, .. }: Turn, memory: *mut u8) {
    // SAFETY: as of the caller.
    unsafe { S::apart(Combine { problem, task: item.task, memory, storage: PhantomData::<T> }) }
}

/// What [`combine`] does.
struct Combine<'a, T> {
    problem: &'a Problem,
    task: usize,
    memory: *mut u8,
    storage: PhantomData<T>,
}

impl<S: Simd, T: Storage<S>> Part<S> for Combine<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Combine { problem, task, memory, .. } = self;
        let (rows, chunks, dim_v) = (problem.partition.rows, problem.partition.chunks, problem.head_dim_v);
        let partial = partial_len(dim_v);
        let origin = problem.task_origin(task);
        // SAFETY: every chunk of this task has been written; memory holds at least one padded row, and the rows of out and
        // lse are this task's alone.
        unsafe {
            let chunk_0 = problem.partials.cast::<S::Elem>().add(task * chunks * rows * partial);
            let o = memory.cast::<S::Elem>();
            let scale_log2 = S::splat(S::Elem::from_f64_clamped(problem.scores.exponent()));
            let to_natural = S::Elem::from_f64_clamped(problem.scores.to_natural());
            let kept = S::Elem::from_f64_clamped(problem.dropping.map_or(1.0, |dropping| dropping.scale));
            for r in 0..rows {
                let at = |chunk: usize| chunk_0.add((chunk * rows + r) * partial);
                let max = (0..chunks).map(|chunk| *at(chunk).add(dim_v));
                let max = max.fold(S::Elem::NEG_INFINITY, |a, b| if b > a { b } else { a });
                for d in 0..dim_v {
                    *o.add(d) = S::Elem::ZERO;
                }
                let mut sum = S::Elem::ZERO;
                for chunk in (0..chunks).map(at) {
                    let (chunk_max, chunk_sum) = (*chunk.add(dim_v), *chunk.add(dim_v + 1));
                    if chunk_sum == S::Elem::ZERO {
                        continue;
                    }
                    let weight = rescale::<S>(S::splat(chunk_max), S::splat(max), scale_log2);
                    let mut lanes = [S::Elem::ZERO; 16];
                    S::store(lanes.as_mut_ptr(), weight);
                    let weight = lanes[0];
                    sum = sum + chunk_sum * weight;
                    axpy::<S>(dim_v, weight, chunk, o);
                }
                let row = problem.row(origin, r);
                let sink = problem.sinks.map(|sinks| S::Elem::load_as(sinks.dtype, sinks.at([row.head])));
                let done = Finished::new(max, sum, to_natural, sink);
                store_row::<S, T>(o, done.factor * kept, dim_v, &problem.out, [row.batch, row.head, row.i, 0]);
                if let Some(out) = &problem.lse {
                    done.lse().store_as(out.dtype, out.at([row.batch, row.head, row.i]));
                }
            }
        }
    }
}

/// `y += a · x`.
#[inline(always)]
unsafe fn axpy<S: Simd>(n: usize, a: S::Elem, x: *const S::Elem, y: *mut S::Elem) {
    let mut d = 0;
    // SAFETY: the caller vouches for n elements on both sides.
    unsafe {
        while d + S::LANES <= n {
            S::store(y.add(d), S::fma(S::splat(a), S::load(x.add(d)), S::load(y.add(d))));
            d += S::LANES;
        }
        for d in d..n {
            *y.add(d) = *y.add(d) + a * *x.add(d);
        }
    }
}
