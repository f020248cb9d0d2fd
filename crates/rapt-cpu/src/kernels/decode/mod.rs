//! Forward for few queries: vectors run along head_dim, and each key and value is read once for all rows of its group.
//!
//! ```text
//! item = block_n keys of one kv head:
//!     s[row][key]   = q · k                      4 keys × 2 rows at a time, summed across lanes at the end
//!     p, max, sum   = softmax over the chunk     vectors along the keys
//!     o[row][dim]   = Σ_key p · v                blocks of pv_keys keys, so that a slice of V is still in L1
//! then, per row, in the order of chunks:  m = max m_c,  o = Σ o_c · 2^((m_c − m) · scale_log2),  sum likewise
//! ```
//! (Flash-Decoding, Dao 2023.) The cut into chunks follows the length of K alone, so the bits do not depend on threads.
//! Rows of K, then of V, are asked for some bytes before they are read: the processor's own prefetchers end at a page.
//! Rows of K and V that are codes are multiplied as they are (`codes`; `code_pairs` by the dot of bf16, `code_quads` by that of bytes), or become numbers in a panel that stays in L1, as do those that are
//! not of the kernel's dtype beside such.
//! Deliberately absent: packing where the inner stride is 1; rows beyond [`MAX_ROWS`].

mod ahead;
#[cfg(target_arch = "x86_64")]
mod code_pairs;
#[cfg(target_arch = "x86_64")]
mod code_quads;
mod code_rows;
mod codes;
pub(crate) mod deviation;
#[cfg(target_arch = "x86_64")]
mod pair_chunks;
mod products;
#[cfg(target_arch = "x86_64")]
mod quad_chunks;
mod rows;
mod softmax;

use super::codes::read_query;
use super::combine::combine;
use super::dropout::DropRow;
use super::products::{Packing, Single};
use super::simd::{Part, Real, Simd, Storage};
use crate::partition::{QK_KEYS, Turn};
use crate::problem::{CodeProducts, CodesChunk, CodesScratch, Problem, Source, Weights};
use crate::scratch::partial_len;

use ahead::Ahead;
pub(crate) use code_rows::code_products;
#[cfg(target_arch = "x86_64")]
pub(crate) use pair_chunks::pair_products;
use products::{all_finite, dots, weighted_sum, weighted_sum_selecting};
#[cfg(target_arch = "x86_64")]
pub(crate) use quad_chunks::quad_products;
use rows::Keys;
use softmax::SoftmaxRow;

/// The most rows of a task: beyond, the lanes of the forward tile are used well enough.
pub(crate) const MAX_ROWS: usize = 8;

/// One chunk of keys, and what both products read.
struct Chunk<'a, T> {
    problem: &'a Problem,
    /// Batch, head of K and V, first key.
    first: (usize, usize, usize),
    /// Keys.
    n: usize,
    /// Where keys or values are gathered whose elements lie apart.
    panel: *mut T,
    ahead: Ahead<'a>,
    memory: *mut u8,
}

impl<T> Chunk<'_, T> {
    /// The chunk as the products of codes take it, of K or of V; only in kernels whose numbers are f32.
    #[inline(always)]
    fn of_codes<'a>(&'a self, source: &'a Source, products: &'a CodeProducts, dim: usize) -> CodesChunk<'a> {
        debug_assert_eq!(size_of::<T>(), size_of::<f32>());
        let Chunk { problem, first, n, panel, memory, .. } = *self;
        let (scratch, at) = (&problem.scratch, |part| memory.cast::<f32>().wrapping_add(part));
        let (panel, q) = (panel.cast(), (at(scratch.q).cast_const(), scratch.head_dim_padded));
        let (factors, points, gathered) = (at(scratch.factors), at(scratch.points), at(scratch.codes).cast());
        let scratch = CodesScratch {
            q: at(scratch.code_q),
            factors,
            points,
            gathered,
            panel,
            q_sums: at(scratch.q_sums),
            natural: at(scratch.natural),
            weights: at(scratch.weights),
            p_sums: at(scratch.p_sums),
            sums: at(scratch.sums),
            natural_sums: at(scratch.natural_sums),
            starts: at(scratch.starts),
            units: at(scratch.units),
        };
        CodesChunk { problem, source, products, first, n, dim, q, scratch }
    }
}

/// Computes the partial result of one chunk of keys for all rows of one task.
pub(crate) unsafe fn item<S: Simd, T: Storage<S>>(problem: &Problem, Turn { item, .. }: Turn, memory: *mut u8) {
    let (rows, block_n, dim_v) = (problem.partition.rows, problem.partition.block_n, problem.head_dim_v);
    let scratch = &problem.scratch;
    let base = memory.cast::<S::Elem>();
    let origin = problem.task_origin(item.task);
    let kv_head = origin.1 / problem.group_size;
    let partial = partial_len(dim_v);
    let chunk_end = problem.kv_len.min((item.chunk + 1) * block_n);
    let (lo, hi) = problem.keys_of_rows(0, rows);
    let (j0, j1) = (lo.max(item.chunk * block_n), hi.min(chunk_end));
    // SAFETY: memory and partials are as long as the plan asked for; keys j0..j1 are inside K, V and mask.
    unsafe {
        let partials = problem
            .partials
            .cast::<S::Elem>()
            .add((item.task * problem.partition.chunks + item.chunk) * rows * partial);
        for at in 0..rows * partial {
            *partials.add(at) = S::Elem::ZERO;
        }
        for row in 0..rows {
            *partials.add(row * partial + dim_v) = S::Elem::NEG_INFINITY;
        }
        if j0 >= j1 {
            return;
        }
        let n = j1 - j0;
        let (q, s, panel) = (base.add(scratch.q), base.add(scratch.p), base.add(scratch.k_panel).cast::<T>());
        let first = (origin.0, kv_head, j0);
        let chunk = &Chunk { problem, first, n, panel, ahead: Ahead::new(problem, first, n), memory };

        // s = q @ k.T
        S::apart(FirstProduct { chunk, origin, q, s });

        let mut masked = false;
        for r in 0..rows {
            let state = partials.add(r * partial + dim_v);
            let (s, bias) = (s.add(r * block_n), base.add(scratch.bias));
            let row = problem.row(origin, r);
            masked |= S::apart(SoftmaxRow::<S> { problem, row, keys: (j0, n), s, bias, state });
            if let Some(dropping) = &problem.dropping {
                S::apart(DropRow { dropping, row, keys: (j0, n), p: s });
            }
        }

        // o = p @ v
        S::apart(SecondProduct { chunk, masked, p: s, o: partials });
        if problem.partition.chunks == 1 {
            combine::<S, T>(problem, Turn { item, next: None }, memory);
        }
    }
}

/// Scores of all rows of a task; `q` is where its queries are kept meanwhile.
struct FirstProduct<'a, E, T> {
    chunk: &'a Chunk<'a, T>,
    origin: (usize, usize),
    q: *mut E,
    s: *mut E,
}

impl<S: Simd, T: Storage<S>> Part<S> for FirstProduct<'_, S::Elem, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let FirstProduct { chunk, origin, q, s } = self;
        let Chunk { problem, first: (batch, kv_head, j0), n, panel, ahead, .. } = *chunk;
        // Copies: behind a reference they would be read again after every store.
        let (k, dim, rows) = (problem.k, problem.head_dim, problem.partition.rows);
        let (q_stride, s_stride) = (problem.scratch.head_dim_padded, problem.partition.block_n);
        // SAFETY: as in `item`.
        unsafe {
            for r in 0..rows {
                let row = problem.row(origin, r);
                let (to, negate) = (q.add(r * q_stride), problem.scores.negate_q);
                if let Some(source) = &problem.sources.q {
                    read_query::<S>(source, [row.batch, row.head, row.i], dim, negate, to);
                } else {
                    let from = problem.q.at([row.batch, row.head, row.i, 0]).cast::<T>();
                    <Single as Packing<S, T>>::load_query(from, problem.q.strides[3], dim, negate, to);
                }
            }
            let source = problem.sources.k.as_ref();
            if let Some((source, products)) = source.and_then(|source| Some((source, source.products.as_ref()?)))
                && (products.scores)(&chunk.of_codes(source, products, dim), (s.cast(), s_stride))
            {
                return;
            }
            let in_place = Keys::in_place(&k, (batch, kv_head, j0), n, dim);
            let at_a_time = if source.is_some() { problem.partition.panel_keys() } else { QK_KEYS };
            let mut j = 0;
            while j < n {
                let taken = match in_place {
                    // As much of a page as there is, and the panel holds; a score is the same whatever is beside it.
                    None if k.pages.is_some() && source.is_none() => match k.run(j0 + j, n - j) {
                        run @ QK_KEYS.. => run.min(problem.partition.panel_keys()) / QK_KEYS * QK_KEYS,
                        _ => QK_KEYS.min(n - j),
                    },
                    _ => at_a_time.min(n - j),
                };
                ahead.of_keys::<S>(j, taken);
                let keys = match (source, in_place) {
                    (Some(source), _) => Keys::read(source, (batch, kv_head, j0 + j), taken, dim, panel),
                    (None, Some(keys)) => keys.from(j),
                    (None, None) => Keys::near(&k, (batch, kv_head, j0 + j), taken, dim, panel),
                };
                for first in (0..taken).step_by(QK_KEYS) {
                    let s = s.add(j + first);
                    if first + QK_KEYS <= taken {
                        dots::<S, _, QK_KEYS>(&keys, first, dim, rows, (q, q_stride), (s, s_stride));
                    } else {
                        for at in 0..taken - first {
                            dots::<S, _, 1>(&keys, first + at, dim, rows, (q, q_stride), (s.add(at), s_stride));
                        }
                    }
                }
                j += taken;
            }
        }
    }
}

/// What the values of a chunk add to the rows of `o`.
struct SecondProduct<'a, E, T> {
    chunk: &'a Chunk<'a, T>,
    /// Whether some key is masked for some row.
    masked: bool,
    p: *mut E,
    o: *mut E,
}

impl<S: Simd, T: Storage<S>> Part<S> for SecondProduct<'_, S::Elem, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let SecondProduct { chunk, masked, p, o } = self;
        let Chunk { problem, first: (batch, kv_head, j0), n, panel, ahead, .. } = *chunk;
        // Copies, as in the first product.
        let (v, dim_v, rows) = (problem.v, problem.head_dim_v, problem.partition.rows);
        let (p_stride, o_stride, pv_keys) = (problem.partition.block_n, partial_len(dim_v), problem.partition.pv_keys);
        // SAFETY: as in `item`.
        unsafe {
            let source = problem.sources.v.as_ref();
            if let Some((source, products)) = source.and_then(|source| Some((source, source.products.as_ref()?))) {
                let weights = Weights { masked, p: (p.cast(), p_stride), o: (o.cast(), o_stride) };
                if (products.outputs)(&chunk.of_codes(source, products, dim_v), &weights) {
                    return;
                }
            }
            let in_place = Keys::in_place(&v, (batch, kv_head, j0), n, dim_v);
            let mut j = 0;
            while j < n {
                let take = pv_keys.min(n - j);
                ahead.of_values::<S>(j, take);
                let keys = match (source, in_place) {
                    (Some(source), _) => Keys::read(source, (batch, kv_head, j0 + j), take, dim_v, panel),
                    (None, Some(keys)) => keys.from(j),
                    (None, None) => Keys::near(&v, (batch, kv_head, j0 + j), take, dim_v, panel),
                };
                let clean = !masked || all_finite::<S, _>(&keys, take, dim_v);
                let (p, o) = ((p.cast_const().add(j), p_stride), (o, o_stride));
                if clean {
                    weighted_sum::<S, _, false>(&keys, take, rows, p, o, dim_v);
                } else {
                    weighted_sum_selecting::<S, _>(&keys, take, rows, p, o, dim_v);
                }
                j += take;
            }
        }
    }
}
