//! `compute="int8"`: forward with products of integers, as `rapt_reference::int8` defines it. Vectors run along the queries.
//!
//! ```text
//! qc, f           = q rounded row by row, and what makes scores of products        once for each tile of queries
//! for each block of INT8_BLOCK keys (outer), for each tile of queries (inner):
//!     Sᵀ[key][query]  = Kc · Qcᵀ                    quads: keys × queries over head_dim
//!     x               = modify(S)                   only where something is masked or added
//!     Pcᵀ, m_b, Σp    = softmax of the block        rounded to 8 bits against the block's own maximum
//!     Oᵀ[dim][query]  = Oᵀ · a + (Vcᵀ · Pcᵀ) · w    quads: head_dim_v × queries over keys; a = 2^(m − m'), w = 2^(m_b − m')
//! out = (Oᵀ / 255 / sum)ᵀ ∘ factors of v
//! ```
//! Blocks lie at multiples of INT8_BLOCK from key 0, sums of integers are exact, and each row is its own lane: a row's bits depend on
//! nothing but itself and the keys that it attends. K and V are packed, block by block, in memory of the thread. Deliberately absent: numbers
//! of K and V in any float dtype, and another way for few queries.

mod pack;
mod quads;
mod scores;

use std::marker::PhantomData;

use pack::{PackKeys, PackValues, shared_factor};
pub(crate) use quads::Quads;
use quads::{KeyProduct, ValueProduct};
use scores::{Modify, State, Weigh, read_mask};

use super::blocks::Rows;
use super::pack::{load_row, store_row, transpose_in};
use super::products::Block;
use super::simd::{Part, Real, Simd, Storage};
use super::softmax::Finished;
use super::weigh::tile_rows;
use crate::partition::Turn;
use crate::problem::Problem;

/// One task, and this thread's memory for it.
struct Task<'a> {
    problem: &'a Problem,
    base: *mut f32,
    /// Its batch and its first query head.
    origin: (usize, usize),
    kv_head: usize,
}

impl Task<'_> {
    /// A part of the scratch memory.
    #[inline(always)]
    fn part(&self, at: usize) -> *mut f32 {
        self.base.wrapping_add(at)
    }
}

/// One tile of queries: rows `r0..r1` of the task, and the keys that they see between them; one vector wide, or two.
#[derive(Clone, Copy)]
struct Tile {
    r0: usize,
    r1: usize,
    narrow: bool,
    keys: (usize, usize),
    q_t: *mut i32,
    acc_o: *mut f32,
    state: State,
}

/// Computes one run of rows of one task.
pub(crate) unsafe fn item<S: Simd<Elem = f32>, T: Storage<S>, Q: Quads<S>>(
    problem: &Problem,
    Turn { item, .. }: Turn,
    memory: *mut u8,
) {
    let queries = S::Q_VECS * S::LANES;
    let origin = problem.task_origin(item.task);
    let kv_head = origin.1 / problem.group_size;
    let task = Task { problem, base: memory.cast(), origin, kv_head };
    let first_row = item.chunk * problem.partition.chunk_rows;
    let last_row = problem.partition.rows.min(first_row + problem.partition.chunk_rows);
    let tiles = (last_row - first_row).div_ceil(queries);
    let tile = |n: usize| {
        let scratch = &problem.scratch;
        let r0 = first_row + n * queries;
        let r1 = last_row.min(r0 + queries);
        Tile {
            r0,
            r1,
            narrow: r1 - r0 <= S::LANES,
            keys: problem.keys_of_rows(r0, r1),
            q_t: task.part(scratch.q + n * scratch.int8.q_len * queries).cast(),
            acc_o: task.part(scratch.o + n * scratch.head_dim_v_padded * queries),
            state: State {
                row_max: task.part(scratch.row_max + n * queries),
                row_sum: task.part(scratch.row_sum + n * queries),
                factors: task.part(scratch.int8.row_factors + n * queries),
            },
        }
    };
    // SAFETY: `memory` is `Scratch::len` long (the plan asked for it) and this thread's own; every index below is inside
    // the part of it that it is used with, and every row and key inside the tensors.
    unsafe {
        for n in 0..tiles {
            let tile = tile(n);
            if tile.narrow {
                Q::apart(Begin::<S, T, Q, 1> { task: &task, tile: &tile, kind: PhantomData });
            } else {
                Q::apart(Begin::<S, T, Q, 2> { task: &task, tile: &tile, kind: PhantomData });
            }
        }

        let (lo, hi) = problem.keys_of_rows(first_row, last_row);
        let block_n = problem.partition.block_n;
        let mut block = lo / block_n * block_n;
        while block < hi {
            let n = block_n.min(hi - block);
            let panels = pack::<S>(&task, Block { first: (origin.0, kv_head, block), n });
            for t in 0..tiles {
                let tile = tile(t);
                // A quad of values holds keys from the block's first on.
                let skip = (block.max(tile.keys.0) - block) / 4 * 4;
                let (j0, j1) = (block + skip, (block + n).min(tile.keys.1));
                if j0 < j1 {
                    let step = Step { task: &task, tile, keys: (j0, j1 - j0), panels: panels.from(skip) };
                    if tile.narrow {
                        step.take::<S, Q, 1>();
                    } else {
                        step.take::<S, Q, 2>();
                    }
                }
            }
            block += block_n;
        }

        for n in 0..tiles {
            let tile = tile(n);
            if tile.narrow {
                S::apart(End::<S, T, 1> { task: &task, tile: &tile, kind: PhantomData });
            } else {
                S::apart(End::<S, T, 2> { task: &task, tile: &tile, kind: PhantomData });
            }
        }
    }
}

/// K and V of one block as quads.
#[derive(Clone, Copy)]
struct Panels {
    k: Rows<i32>,
    sums: *const i32,
    factors: *const f32,
    v: Rows<i32>,
}

impl Panels {
    /// From key `n` on, a multiple of 4.
    fn from(self, n: usize) -> Self {
        let (sums, factors) = (self.sums.wrapping_add(n), self.factors.wrapping_add(n));
        Panels { k: self.k.from(n), sums, factors, v: self.v.from(n / 4) }
    }
}

/// Packs one block.
unsafe fn pack<S: Simd<Elem = f32>>(task: &Task<'_>, block: Block) -> Panels {
    let problem = task.problem;
    let scratch = &problem.scratch;
    let (panel, v_panel) = (task.part(scratch.k_panel).cast::<i32>(), task.part(scratch.v_panel).cast::<i32>());
    let (sums, factors) = (task.part(scratch.int8.key_sums).cast::<i32>(), task.part(scratch.int8.key_factors));
    let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
    // SAFETY: the panels have room for a block.
    unsafe {
        // Both are codes: a spec of int8 has no others.
        if let (Some(k), Some(v)) = (&problem.sources.k, &problem.sources.v) {
            let own = problem.scores.key_factors.then_some(factors);
            S::apart(PackKeys { source: k, block, dim, panel, sums, factors: own });
            S::apart(PackValues { source: v, block, dim: dim_v, panel: v_panel });
        }
    }
    Panels {
        k: Rows { ptr: panel, stride: dim.div_ceil(4) as isize },
        sums,
        factors,
        v: Rows { ptr: v_panel, stride: dim_v as isize },
    }
}

/// Rounds Q to quads, and clears the state of a tile. Lanes without a query hold zeros.
struct Begin<'a, S, T, Q, const V: usize> {
    task: &'a Task<'a>,
    tile: &'a Tile,
    kind: PhantomData<(S, T, Q)>,
}

impl<S: Simd<Elem = f32>, T: Storage<S>, Q: Quads<S>, const V: usize> Part<S> for Begin<'_, S, T, Q, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Begin { task, tile, .. } = self;
        let Task { problem, origin, kv_head, .. } = *task;
        let scratch = &problem.scratch;
        // Copies: behind a reference they would be read again after every store.
        let (q, dim) = (problem.q, problem.head_dim);
        let (queries, stride) = (V * S::LANES, scratch.head_dim_padded);
        let (rows, numbers) = (task.part(scratch.rows), task.part(scratch.int8.numbers));
        // SAFETY: `rows` has `queries` rows of `stride`, `numbers` the same turned; each row r0..r1 is a query of q.
        unsafe {
            for lane in 0..queries {
                let to = rows.add(lane * stride);
                let mut filled = 0;
                if tile.r0 + lane < tile.r1 {
                    let row = problem.row(origin, tile.r0 + lane);
                    let from = q.at([row.batch, row.head, row.i, 0]).cast::<T>();
                    load_row::<S, T>(from, q.strides[3], dim, to);
                    filled = dim;
                }
                for d in filled..stride {
                    *to.add(d) = 0.0;
                }
            }
            transpose_in::<S>(rows, stride, stride, numbers, queries);

            let of_all = match &problem.sources.k {
                Some(k) if !problem.scores.key_factors => shared_factor(k, origin.0, kv_head),
                _ => 1.0,
            };
            let sign = if problem.scores.negate_q != (of_all < 0.0) { -1.0 } else { 1.0 };
            for v in (0..queries).step_by(S::LANES) {
                let (mut most, mut non_finite) = (S::splat(0.0), S::splat(0.0));
                for d in 0..dim {
                    let x = S::load(numbers.add(d * queries + v));
                    most = S::max(S::abs(x), most);
                    // 0 · x is 0 for finite x and NaN otherwise.
                    non_finite = S::fma(x, S::splat(0.0), non_finite);
                }
                let scale = S::max(S::div(most, S::splat(127.0)), S::splat(f32::MIN_POSITIVE));
                let signed = S::mul(scale, S::splat(sign));
                for d in (0..dim.next_multiple_of(4)).step_by(4) {
                    let mut codes = [Q::splat(0); 4];
                    for (at, code) in codes.iter_mut().enumerate() {
                        let x = S::load(numbers.add((d + at) * queries + v));
                        *code = Q::add_128(Q::round(S::div(x, signed)));
                    }
                    Q::store(tile.q_t.add(d / 4 * queries + v), Q::join(codes));
                }
                // NaN where the row is not finite.
                let factors = tile.state.factors.add(v);
                S::store(factors, S::add(scale, non_finite));
                for lane in 0..S::LANES {
                    let factor = f64::from(*factors.add(lane)) * problem.scores.scale * f64::from(of_all.abs());
                    *factors.add(lane) = f32::from_f64_clamped(factor);
                }
                S::store(tile.state.row_max.add(v), S::splat(f32::NEG_INFINITY));
                S::store(tile.state.row_sum.add(v), S::splat(0.0));
            }
            for at in (0..problem.head_dim_v * queries).step_by(S::LANES) {
                S::store(tile.acc_o.add(at), S::splat(0.0));
            }
        }
    }
}

/// One tile of queries on one block of keys.
struct Step<'a> {
    task: &'a Task<'a>,
    tile: Tile,
    /// The first key, and how many there are.
    keys: (usize, usize),
    panels: Panels,
}

impl Step<'_> {
    unsafe fn take<S: Simd<Elem = f32>, Q: Quads<S>, const V: usize>(self) {
        let Step { task, tile, keys: (j0, n), panels } = self;
        let Task { problem, origin, .. } = *task;
        let Panels { k, sums, factors, v } = panels;
        let x = task.part(problem.scratch.p);
        let rows = tile_rows(problem, origin, (tile.r0, tile.r1));
        let rows = &rows[..tile.r1 - tile.r0];
        let bias = task.part(problem.scratch.bias);
        let (quads, q_t, vectors) = (problem.head_dim.div_ceil(4), tile.q_t.cast_const(), PhantomData);
        // SAFETY: as in `item`.
        unsafe {
            let Some(effect) = read_mask::<S, V>(problem, rows, (j0, n), bias) else { return };
            let mut max = if problem.scores.key_factors {
                Q::apart(KeyProduct::<S, Q, V, true> { keys: n, quads, k, sums, factors, q_t, x, vectors })
            } else {
                Q::apart(KeyProduct::<S, Q, V, false> { keys: n, quads, k, sums, factors, q_t, x, vectors })
            };
            let positions = !problem.sees_all(tile.r0, tile.r1, j0, j0 + n);
            let bias = (effect.masks || effect.adds).then_some(bias.cast_const());
            if positions || bias.is_some() || problem.scores.natural {
                let factors = tile.state.factors.cast_const();
                let keys = (j0, n);
                max =
                    S::apart(Modify::<S, V> { problem, rows, keys, x, bias, factors, positions, vectors: PhantomData });
            }
            let (natural, state, integers) = (problem.scores.natural, tile.state, PhantomData);
            let factors = if positions || effect.masks {
                Q::apart(Weigh::<S, Q, V, true> { natural, state, n, x, max, integers })
            } else {
                Q::apart(Weigh::<S, Q, V, false> { natural, state, n, x, max, integers })
            };
            let (quads, p) = (n.div_ceil(4), x.cast_const().cast());
            let (dim, acc_o) = (problem.head_dim_v, tile.acc_o);
            Q::apart(ValueProduct::<S, Q, V> { quads, dim, v, p, acc_o, factors, integers });
        }
    }
}

/// `out = (Oᵀ / 255 / sum)ᵀ ∘ factors of v`, and lse.
struct End<'a, S, T, const V: usize> {
    task: &'a Task<'a>,
    tile: &'a Tile,
    kind: PhantomData<(S, T)>,
}

impl<S: Simd<Elem = f32>, T: Storage<S>, const V: usize> Part<S> for End<'_, S, T, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let End { task, tile, .. } = self;
        let Task { problem, origin, kv_head, .. } = *task;
        let scratch = &problem.scratch;
        let (queries, stride, rows) = (V * S::LANES, scratch.head_dim_v_padded, task.part(scratch.rows));
        let of_values = task.part(scratch.int8.value_factors);
        // Copies, as in `begin`.
        let (out, lse, sinks, dim) = (problem.out, problem.lse, problem.sinks, problem.head_dim_v);
        // SAFETY: as in `begin`; each row r0..r1 is a row of out and lse that this item alone writes.
        unsafe {
            if let Some(scales) = problem.sources.v.and_then(|v| v.scales) {
                for d in 0..dim {
                    *of_values.add(d) = scales.of([origin.0, kv_head, 0], d / scales.chunk.max(1)).factor;
                }
            }
            // [dim][queries] back to [queries][dim]: rows past head_dim_v are scratch and are never stored.
            for d in (0..dim).step_by(S::LANES) {
                for v in (0..queries).step_by(S::LANES) {
                    S::transpose(tile.acc_o.add(d * queries + v), queries, rows.add(v * stride + d), stride);
                }
            }
            for r in tile.r0..tile.r1 {
                let lane = r - tile.r0;
                let row = problem.row(origin, r);
                let State { row_max, row_sum, factors } = tile.state;
                let to_natural = if problem.scores.natural { 1.0 } else { *factors.add(lane) };
                let sink = sinks.map(|sinks| f32::load_as(sinks.dtype, sinks.at([row.head])));
                let sum = *row_sum.add(lane);
                let done = Finished::new(*row_max.add(lane), sum, to_natural, sink);
                if let Some(lse) = &lse {
                    done.lse().store_as(lse.dtype, lse.at([row.batch, row.head, row.i]));
                }
                let from = rows.add(lane * stride);
                // A row without keys is zeros, whatever the factors are.
                if sum != 0.0 {
                    let factor = S::splat(done.factor / 255.0);
                    for d in (0..dim).step_by(S::LANES) {
                        let x = S::mul(S::load(from.add(d)), factor);
                        S::store(from.add(d), S::mul(x, S::load(of_values.add(d))));
                    }
                }
                store_row::<S, T>(from, 1.0, dim, &out, [row.batch, row.head, row.i, 0]);
            }
        }
    }
}
