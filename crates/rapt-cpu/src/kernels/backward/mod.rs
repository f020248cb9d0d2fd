//! Gradients: probabilities recomputed from lse, queries along the lanes.
//!
//! ```text
//! for each block of keys (outer), for each run of tiles of queries, of all heads of the group (inner):
//!     for each tile: Sᵀ[key][query] = K · Qᵀ          dPᵀ = V · dOᵀ
//!                    Pᵀ = exp(S − lse)                 dSᵀ = P ∘ (dP − delta)
//!                    dQᵀ[dim][query] += Kᵀ · dSᵀ       in partial sums of the item's chunk of keys
//!     dV[key][dim] += Pᵀ · dO                          dK[key][dim] += dSᵀ · Q
//! ```
//! With dropout dPᵀ is multiplied by what each weight was multiplied with, and so is Pᵀ before it meets dO; out was formed so, and delta holds.
//! (Dao 2022, 2023.) Five products by the one inner loop (`matmul`): broadcast rows times vectors, the vectors being queries in the first three and
//! head_dim in the last two; what a lane of them holds, `lanes` says. Before, `rows` finds delta of each row; after, `sums` adds the chunks of dQ, and what tasks share, in their order. Blocks and runs lie at
//! multiples of their sizes, chunks follow the length of K: a gradient's bits depend neither on threads nor on other tasks. Deliberately absent: memory
//! that grows with the product of the lengths; the gradient of a mask has a pass of its own (`mask`).

#[cfg(target_arch = "x86_64")]
mod by_parts;
mod lanes;
mod mask;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod pairs;
mod products;
mod queries;
mod rows;
mod single;
mod sums;
#[cfg(target_arch = "x86_64")]
mod tiled;
mod weigh;

use std::marker::PhantomData;

use super::blocks::{KeyProduct, Rows, Values};
use super::next_rows::NextRows;
use super::pack::store_row;
use super::products::{Block, Packing};
use super::simd::{Part, Real, Simd, Storage};
use crate::backward_problem::{BackwardPartition, BackwardProblem, Form, SharedSum};
use crate::problem::{Input, Output};
use lanes::{Contract, GradientLanes, GradientRows, Laid, Places, QueryProduct, panels};
use products::clear;
use queries::{MAX_TILES, Tile};

/// Computes item `n` in scratch memory of the plan's size per thread.
pub(crate) type Entry = unsafe fn(&BackwardProblem, usize, *mut u8);

/// The steps of a run, for one instruction set, form of products and storage dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entries {
    /// The state of [`ROWS_PER_ITEM`] rows.
    pub(crate) rows: Entry,
    /// A tile of queries: maxima and sums of rows whose lse is large.
    pub(crate) large: Entry,
    /// A chunk of keys of a task of the wave.
    pub(crate) main: Entry,
    /// A block of keys of dk or dv, where tasks share it.
    pub(crate) keys: Entry,
    /// A tile of dq of a task of the wave, or of what tasks share.
    pub(crate) dq: Entry,
    /// A piece of the gradient of the mask.
    pub(crate) mask: Entry,
    /// The gradient of one sink.
    pub(crate) sinks: Entry,
    /// Lanes of a vector.
    pub(crate) lanes: usize,
    /// Queries of a tile.
    pub(crate) queries: usize,
    /// Numbers of a lane of products, and lanes that a number is the sum of.
    pub(crate) steps: usize,
    pub(crate) parts: usize,
    pub(crate) form: Form,
}

impl Entries {
    /// Those of `S`, `M` and `T`.
    pub(crate) fn of<S: Simd, M: GradientRows<S, T>, T: Storage<S>>() -> Self {
        Entries {
            rows: rows::item::<S, T>,
            large: rows::large::<S, M, T>,
            main: item::<S, M, T>,
            keys: sums::keys::<S, T>,
            dq: sums::dq::<S, T>,
            mask: mask::item::<S, M, T>,
            sinks: sums::sink::<S>,
            lanes: S::LANES,
            queries: S::Q_VECS * S::LANES,
            steps: M::STEPS,
            parts: M::PARTS,
            form: M::FORM,
        }
    }
}

pub(crate) use mask::pieces as mask_pieces;
pub(crate) use rows::ROWS_PER_ITEM;
pub(crate) use sums::{shared_blocks, tiles_of_dq};

/// Computes dk and dv of one chunk of keys of a task, and its part of dq.
unsafe fn item<S: Simd, M: GradientRows<S, T>, T: Storage<S>>(problem: &BackwardProblem, n: usize, memory: *mut u8) {
    let (partition, item) = (&problem.partition, n);
    let (task, chunk) = (problem.first_task + n / partition.chunks, n % partition.chunks);
    let base = memory.cast::<S::Elem>();
    let first = chunk * partition.chunk_keys;
    let last = problem.kv_len.min(first + partition.chunk_keys);
    let of_task = partition.task_tiles() * partition.tile_of_dq;
    let partial = problem.dq.map(|_| problem.partials.cast::<S::Elem>().wrapping_add(n * of_task));
    // SAFETY: `memory` is `BackwardScratch::len` long (the plan asked for it) and this thread's own, `partial` is this item's; every row and key is
    // inside the tensors, and rows of dk and dv are written by the item of their keys.
    unsafe {
        let _unit = M::unit();
        let mut next = NextRows::new();
        for block in (first..last).step_by(partition.block_n) {
            let n = partition.block_n.min(last - block);
            let mut keys = Keys::new::<S, M, T>(problem, base, task, (block, n), &raw mut next);
            keys.is_first = block == first;
            keys.sum_apart::<S>(problem);
            keys.clear::<S>(problem);
            for r0 in (0..partition.rows).step_by(partition.run_rows()) {
                if S::PREFETCHES {
                    *keys.next = rows_after::<S, M>(problem, &keys, (item, last), r0);
                }
                run_of_queries::<S, M, T>(problem, base, &mut keys, r0, partial);
            }
            keys.store::<S, T>(problem);
        }
    }
}

/// A block of keys of a task.
struct Keys<E> {
    task: usize,
    first: usize,
    n: usize,
    k: Rows<E>,
    v: Rows<E>,
    /// K as lanes along the keys, where dq is asked for.
    k_along_keys: Option<Values<E>>,
    /// Sums over the queries, in panels of columns.
    dk: *mut E,
    dv: *mut E,
    /// Whether nothing lies in the partial sums of the chunk yet.
    is_first: bool,
    /// What is asked for while products are formed.
    next: *mut NextRows,
}

impl<E: Real> Keys<E> {
    /// Finds keys `first..first + n`, and packs those that are not read where they lie.
    unsafe fn new<S: Simd<Elem = E>, M: GradientRows<S, T>, T: Storage<S>>(
        problem: &BackwardProblem,
        base: *mut E,
        task: usize,
        (first, n): (usize, usize),
        next: *mut NextRows,
    ) -> Self {
        let [batch, head, _] = problem.origin(task);
        let (scratch, partition) = (&problem.scratch, &problem.partition);
        let block = Block { first: (batch, head, first), n };
        let rows = |input: &Input<4>, dim: usize, in_place: bool, panel: usize| {
            if in_place {
                let stride = input.strides[2] / M::STEPS as isize;
                return Rows { ptr: input.at([batch, head, first, 0]).cast(), stride };
            }
            let panel = base.wrapping_add(panel);
            let pack = PackKeys { input, block, dim, panel, rows: PhantomData::<(M, T)> };
            let stride = partition.lanes(dim);
            // SAFETY: scratch memory has a panel where rows are not read in place.
            unsafe {
                M::apart(pack);
                M::clean_keys(problem, task, panel, n.next_multiple_of(partition.form.key_run) * stride);
            }
            Rows { ptr: panel.cast_const(), stride: stride as isize }
        };
        let k = rows(&problem.k, problem.head_dim, partition.k_in_place, scratch.k_panel);
        let v = rows(&problem.v, problem.head_dim_v, partition.v_in_place, scratch.v_panel);
        let mut k_along_keys = None;
        if problem.dq.is_some() {
            let panel = base.wrapping_add(scratch.k_along_keys);
            // SAFETY: scratch memory has a panel for it, where it is not `k`.
            unsafe {
                let values = M::along_keys(&problem.k, block, problem.head_dim, k, panel);
                M::clean_keys(problem, task, panel, values.steps * values.lanes);
                k_along_keys = Some(values);
            }
        }
        let (dk, dv) = (base.wrapping_add(scratch.dk), base.wrapping_add(scratch.dv));
        Keys { task, first, n, k, v, k_along_keys, dk, dv, is_first: false, next }
    }

    /// Lets the block be summed where it stays: what the task adds to gradients that tasks share.
    fn sum_apart<S: Simd<Elem = E>>(&mut self, problem: &BackwardProblem) {
        let in_wave = self.task - problem.first_task;
        let part = |shared: SharedSum, dim: usize| {
            let at = shared.parts + in_wave * shared.len + self.first * dim.next_multiple_of(S::LANES);
            problem.shared_at.cast::<E>().wrapping_add(at)
        };
        if let Some(shared) = problem.shared.dk {
            self.dk = part(shared, problem.head_dim);
        }
        if let Some(shared) = problem.shared.dv {
            self.dv = part(shared, problem.head_dim_v);
        }
    }

    /// Sums of nothing.
    unsafe fn clear<S: Simd<Elem = E>>(&self, problem: &BackwardProblem) {
        let columns = |dim: usize| dim.next_multiple_of(S::LANES) * problem.partition.block_n;
        // SAFETY: as in `item`.
        unsafe {
            S::apart(clear::<S>(self.dk, columns(problem.head_dim)));
            S::apart(clear::<S>(self.dv, columns(problem.head_dim_v)));
        }
    }

    /// dk and dv of the block, but for what tasks share.
    unsafe fn store<S: Simd<Elem = E>, T: Storage<S>>(&self, problem: &BackwardProblem) {
        let [batch, head, _] = problem.origin(self.task);
        let scale = E::from_f64_clamped(problem.scores.softmax_scale);
        let (first, n, block_n) = ((batch, head, self.first), self.n, problem.partition.block_n);
        let BackwardProblem { shared, head_dim, head_dim_v, .. } = problem;
        let of = [
            (problem.dk.filter(|_| shared.dk.is_none()), self.dk, *head_dim, scale),
            (problem.dv.filter(|_| shared.dv.is_none()), self.dv, *head_dim_v, E::ONE),
        ];
        for (out, sums, dim, factor) in of {
            if let Some(out) = &out {
                let sums = sums.cast_const();
                // SAFETY: as in `item`.
                unsafe { S::apart(StoreKeys { out, first, n, dim, sums, block_n, factor, storage: PhantomData::<T> }) };
            }
        }
    }
}

/// Rows of K or of V, packed.
struct PackKeys<'a, E, R> {
    input: &'a Input<4>,
    block: Block,
    dim: usize,
    panel: *mut E,
    rows: PhantomData<R>,
}

impl<S: Simd, T: Storage<S>, M: Packing<S, T>> Part<S> for PackKeys<'_, S::Elem, (M, T)> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: the panel has a row of lanes for each key; the keys are inside the tensor.
        unsafe { M::pack_keys(self.input, self.block, self.dim, self.panel) }
    }
}

/// Sums of a block in panels of columns, times a factor, to the rows of a gradient.
struct StoreKeys<'a, E, T> {
    out: &'a Output<4>,
    first: (usize, usize, usize),
    n: usize,
    dim: usize,
    sums: *const E,
    block_n: usize,
    factor: E,
    storage: PhantomData<T>,
}

impl<S: Simd, T: Storage<S>> Part<S> for StoreKeys<'_, S::Elem, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let StoreKeys { out, first: (batch, head, first), n, dim, sums, block_n, factor, .. } = self;
        for j in 0..n {
            for panel in panels::<S>(dim) {
                let from = sums.wrapping_add(panel.first * block_n + j * panel.width);
                // SAFETY: the panels have block_n rows; the row is this item's alone.
                unsafe { store_row::<S, T>(from, factor, panel.len, out, [batch, head, first + j, panel.first]) };
            }
        }
    }
}

/// The task and the first key of the item that a thread takes after item `n` of the wave, if all take turns.
fn next_item(problem: &BackwardProblem, n: usize) -> Option<(usize, usize)> {
    let BackwardPartition { chunks, chunk_keys, tasks, .. } = problem.partition;
    let next = problem.first_task * chunks + n + problem.threads;
    (next / chunks < tasks).then_some((next / chunks, next % chunks * chunk_keys))
}

/// What is asked for while the run of queries from row `r0` on is multiplied with a block of keys: the rows of the next run, and this run's share of the rows that
/// are read and written before the first run of the next block: of the item, whose keys end at `last`, or of the thread's next one.
fn rows_after<S: Simd, M: GradientLanes<S>>(
    problem: &BackwardProblem,
    keys: &Keys<S::Elem>,
    (item, last): (usize, usize),
    r0: usize,
) -> NextRows {
    let BackwardPartition { rows, block_n, chunk_keys, .. } = problem.partition;
    let block = keys.first + keys.n;
    let following = if block < last { Some((keys.task, block)) } else { next_item(problem, item) };
    let mut next = NextRows::new();
    let r1 = rows.min(r0 + problem.partition.run_rows());
    let queries = |next: &mut NextRows, task: usize, first: usize| {
        let [batch, _, head] = problem.origin(task);
        let last = rows.min(first + problem.partition.run_rows());
        for (row, n) in problem.rows.runs_of((batch, head), (first, last)) {
            let at = [row.batch, row.head, row.i, 0];
            next.add(&problem.q, at, n, problem.head_dim);
            next.add(&problem.d_o, at, n, problem.head_dim_v);
        }
    };
    if r1 < rows {
        queries(&mut next, keys.task, r1);
    } else if let Some((task, _)) = following {
        queries(&mut next, task, 0);
    }
    let share = |n: usize| (n * r0 / rows, n * r1 / rows);
    if let Some((task, first)) = following {
        let ([batch, head, _], n) = (problem.origin(task), block_n.min(chunk_keys).min(problem.kv_len - first));
        let (from, to) = share(n);
        next.add(&problem.k, [batch, head, first + from, 0], to - from, problem.head_dim);
        next.add(&problem.v, [batch, head, first + from, 0], to - from, problem.head_dim_v);
    }
    let ([batch, head, _], (from, to)) = (problem.origin(keys.task), share(keys.n));
    let outs = [
        (problem.dk.filter(|_| problem.shared.dk.is_none()), problem.head_dim),
        (problem.dv.filter(|_| problem.shared.dv.is_none()), problem.head_dim_v),
    ];
    for (out, dim) in outs {
        if let Some(out) = &out {
            next.add_output(out, [batch, head, keys.first + from, 0], to - from, dim);
        }
    }
    let of = |n: usize| n.div_ceil(S::ROWS);
    let tiles = (r1 - r0).div_ceil(problem.partition.queries);
    let panels = panels::<S>(problem.head_dim).count() + panels::<S>(problem.head_dim_v).count();
    next.spread(tiles * (2 * of(keys.n) + of(problem.head_dim)) + panels * of(keys.n));
    next
}

/// One run of queries, from row `r0` on, with one block of keys.
unsafe fn run_of_queries<S: Simd, M: GradientRows<S, T>, T: Storage<S>>(
    problem: &BackwardProblem,
    base: *mut S::Elem,
    keys: &mut Keys<S::Elem>,
    r0: usize,
    partial: Option<*mut S::Elem>,
) {
    let (scratch, partition) = (&problem.scratch, &problem.partition);
    let r1 = partition.rows.min(r0 + partition.run_rows());
    let (lo, hi) = problem.rows.keys_of_rows(r0, r1);
    let (j0, j1) = (keys.first.max(lo), hi.min(keys.first + keys.n));
    let count = (r1 - r0).div_ceil(partition.queries);
    // The tiles of the run in the partial sums of dq.
    let partial = partial.map(|partial| partial.wrapping_add(r0 / partition.queries * partition.tile_of_dq));
    let begin_all = |keys: &Keys<S::Elem>| {
        if let (Some(partial), true) = (partial, keys.is_first) {
            // SAFETY: as in `item`.
            unsafe { S::apart(clear::<S>(partial, count * partition.tile_of_dq)) };
        }
    };
    if j0 >= j1 {
        return begin_all(keys);
    }
    // Lanes along the keys are whole.
    let key_run = partition.form.key_run;
    let skip = (j0 - keys.first) / key_run * key_run;
    let n = (j1 - keys.first).next_multiple_of(key_run).min(keys.n) - skip;
    let j0 = keys.first + skip;
    let (m, width, block_n) = (partition.run_rows(), partition.queries, partition.block_n);
    let part = |at: usize| base.wrapping_add(at);
    // SAFETY: as in `item`.
    unsafe {
        let mut tiles = [const { None }; MAX_TILES];
        let (mut attends, mut masks) = (false, false);
        for (t, tile) in tiles.iter_mut().enumerate().take(count) {
            let rows = (r0 + t * width, r1.min(r0 + (t + 1) * width));
            let new = Tile::new::<S>(problem, keys.task, rows, (j0, n), part(scratch.bias + t * block_n * width));
            attends |= !new.is_empty;
            masks |= new.masks;
            *tile = Some(new);
        }
        let begins = keys.is_first && tiles.iter().flatten().all(|tile| !tile.is_empty);
        if !begins {
            begin_all(keys);
        }
        if !attends {
            return;
        }
        queries::pack::<S, M, T>(problem, base, &tiles[..count]);
        for (t, tile) in tiles.iter().flatten().enumerate() {
            let partial = partial.map(|partial| partial.add(t * partition.tile_of_dq));
            tile_of_queries::<S, M, T>(problem, base, keys, (t, tile), (skip, n), (partial, begins));
        }
        let rows = count * width;
        let sums = [
            (problem.dv.is_some(), scratch.p, scratch.d_o, keys.dv, problem.head_dim_v),
            (problem.dk.is_some(), scratch.ds, scratch.q, keys.dk, problem.head_dim),
        ];
        for (is_asked, weights, columns, y, dim) in sums {
            if is_asked {
                let (b, x) = (part(weights).cast_const(), part(columns).cast_const());
                let room = part(scratch.clean);
                M::contract(Contract {
                    keys: n,
                    rows,
                    row: m,
                    dim,
                    b,
                    x,
                    y,
                    skip,
                    block_n,
                    selects: masks,
                    room,
                    next: keys.next,
                });
            }
        }
    }
}

/// Tile `t` of a run with `n` keys of a block from key `skip` on: its weights, and its part of dq.
unsafe fn tile_of_queries<S: Simd, M: GradientRows<S, T>, T: Storage<S>>(
    problem: &BackwardProblem,
    base: *mut S::Elem,
    keys: &mut Keys<S::Elem>,
    (t, tile): (usize, &Tile<S::Elem>),
    (skip, n): (usize, usize),
    (partial, begins): (Option<*mut S::Elem>, bool),
) {
    let (scratch, width) = (&problem.scratch, problem.partition.queries);
    let part = |at: usize| base.wrapping_add(at);
    let (first, of_lane) = (t * width, |queries: usize| queries / M::STEPS * M::PARTS);
    let (lanes, row) = (of_lane(width), of_lane(problem.partition.run_rows()));
    let to = [scratch.p, scratch.ds].map(|at| part(at + t * lanes));
    // SAFETY: as in `item`.
    unsafe {
        if tile.is_empty {
            return S::apart(weigh::FillMasked::<S> { n, to, row, lanes, fill: M::UNATTENDED });
        }
        let q_t = part(scratch.q_t + first * M::turned_lanes(problem.head_dim));
        let d_o_t = part(scratch.d_o_t + first * M::turned_lanes(problem.head_dim_v));
        for at in (0..n).step_by(M::FORM.keys_at_a_time) {
            let keys_n = M::FORM.keys_at_a_time.min(n - at);
            let Places { p, dp, to, along_keys } = M::places(problem, base, t, at);
            let (k, next) = (keys.k.from(skip + at), keys.next);
            let product = KeyProduct { keys: keys_n, dim: problem.head_dim, k, q_t, s: p.0, next };
            M::key_product(product, p.1);
            if problem.needs_ds() {
                let (k, dim) = (keys.v.from(skip + at), problem.head_dim_v);
                M::key_product(KeyProduct { dim, k, q_t: d_o_t, s: dp, ..product }, width);
            }
            let ds = (M::STEPS == 1).then_some((to[1], row));
            let operands = weigh::Operands { p, ds, dp, kept: part(scratch.kept) };
            weigh::weigh::<S>(problem, tile, (at, keys_n), operands, false);
            M::lay(Laid { n: keys_n, from: [p.0.cast_const(), dp], to, row, along_keys });
        }
        if let (Some(y), Some(k)) = (partial, &mut keys.k_along_keys) {
            let (dim, ds) = (problem.head_dim, M::places(problem, base, t, 0).along_keys);
            let (has_masked, room) = (tile.has_masked, part(scratch.clean));
            let begins = begins.then_some(problem.partition.tile_of_dq);
            M::query_product(QueryProduct { keys: n, skip, dim, k, ds, y, begins, has_masked, room, next: keys.next });
        }
    }
}
