//! Forward for many queries: vectors run along the queries, keys and values are broadcast from where they lie.
//!
//! ```text
//! for each block of keys (outer), for each tile of queries (inner):
//!     Sᵀ[key][query]  = K · Qᵀ                  matmul: keys × queries over head_dim
//!     x               = modify(S)               only where something is masked or added
//!     Pᵀ, max, sum    = streaming softmax       lane-wise: no horizontal operation anywhere
//!     Oᵀ[dim][query] += Vᵀ · Pᵀ                 matmul: head_dim_v × queries over keys
//! out = (Oᵀ / sum)ᵀ
//! ```
//! (Dao 2022, 2023; Rabe & Staats 2021.) Blocks lie at multiples of `block_n` from key 0 and each row is its own lane, so
//! a row's bits depend neither on its tile nor on the other rows, nor on whether K and V were packed. Scratch memory per
//! thread: [`Scratch`](crate::scratch::Scratch). Deliberately absent: any access past the last key or query, and any second tensor.

use std::marker::PhantomData;

use super::blocks::{Amend, Beside, BlockProducts, Coded, Formed, KeyProduct, Rows, ValueProduct, Values};
use super::codes::read_query;
use super::dropout::{DropTile, DropWeights};
use super::mask::{self, MaskTile, ReadTile, ScanTile};
use super::next_rows::NextRows;
use super::pack::{store_row, transpose_in};
use super::products::{Block, Packing};
use super::simd::{Part, Real, Simd, Storage};
use super::softmax::Finished;
use super::weigh::{AddBiases, MAX_QUERIES, Modify, RowState, Softmax, tile_rows};
use crate::partition::Turn;
use crate::problem::{CodePanel, Problem, Row, Source};

/// Vectors shorter than this have no narrow tile: there is little to save.
const NARROW_LANES: usize = 16;

/// One task, and this thread's memory for it.
struct Task<'a, E> {
    problem: &'a Problem,
    base: *mut E,
    /// Its batch and its first query head.
    origin: (usize, usize),
    /// What is asked for while products are formed.
    next: *mut NextRows,
}

impl<E> Task<'_, E> {
    /// A part of the scratch memory.
    #[inline(always)]
    fn part(&self, at: usize) -> *mut E {
        self.base.wrapping_add(at)
    }

    /// Tile `n` of rows `first..last`.
    #[inline(always)]
    fn tile<S: Simd>(&self, (first, last): (usize, usize), n: usize) -> Tile<E> {
        let (problem, scratch, queries) = (self.problem, &self.problem.scratch, S::Q_VECS * S::LANES);
        let narrow = S::LANES >= NARROW_LANES && problem.partition.narrow;
        let r0 = first + n * queries;
        let r1 = last.min(r0 + queries);
        Tile {
            r0,
            r1,
            narrow: narrow && r1 - r0 <= S::LANES,
            keys: problem.keys_of_rows(r0, r1),
            q_t: self.part(scratch.q + n * scratch.q_lanes * queries),
            acc_o: self.part(scratch.o + n * scratch.head_dim_v_padded * queries),
            state: RowState {
                row_max: self.part(scratch.row_max + n * queries),
                row_sum: self.part(scratch.row_sum + n * queries),
            },
            odd: self.part(scratch.odd_queries + n * queries),
        }
    }
}

/// One tile of queries: rows `r0..r1` of the task, and the keys that they see between them. It is [`Simd::Q_VECS`] vectors
/// wide; a rest that fits one vector may be one wide, of which a row's bits know nothing.
#[derive(Clone, Copy)]
struct Tile<E> {
    r0: usize,
    r1: usize,
    narrow: bool,
    keys: (usize, usize),
    q_t: *mut E,
    acc_o: *mut E,
    state: RowState<E>,
    /// Which queries have scores that are computed again.
    odd: *mut E,
}

/// Computes one run of rows of one task.
pub(crate) unsafe fn item<S: Simd, T: Storage<S>, M: Packing<S, T> + BlockProducts<S>>(
    problem: &Problem,
    turn: Turn,
    memory: *mut u8,
) {
    let mut next_rows = NextRows::new();
    let next = &raw mut next_rows;
    let task = Task { problem, base: memory.cast::<S::Elem>(), origin: problem.task_origin(turn.item.task), next };
    let kv_head = task.origin.1 / problem.group_size;
    let (first_row, last_row) = problem.partition.rows_of(turn.item);
    let tiles = (last_row - first_row).div_ceil(S::Q_VECS * S::LANES);
    let tile = |n: usize| task.tile::<S>((first_row, last_row), n);
    // SAFETY: `memory` is `Scratch::len` long (the plan asked for it) and this thread's own; every index below is inside
    // the part of it that it is used with, and every row and key inside the tensors.
    unsafe {
        if M::OF_CODES
            && problem.scratch.o_factors > 0
            && let Some(source) = &problem.sources.v
        {
            let [batch, head] = [task.origin.0, kv_head];
            let to = task.part(problem.scratch.o_factors).cast();
            source.output_factors([batch, head], problem.head_dim_v, Some(to));
        }
        for n in 0..tiles {
            let tile = tile(n);
            if tile.narrow {
                M::apart(Begin::<S, T, M, 1> { task: &task, tile: &tile, kind: PhantomData });
            } else {
                M::apart(Begin::<S, T, M, 2> { task: &task, tile: &tile, kind: PhantomData });
            }
        }

        let (lo, hi) = problem.keys_of_rows(first_row, last_row);
        let block_n = problem.partition.block_n;
        let mut block = lo / block_n * block_n;
        while block < hi {
            let n = block_n.min(hi - block);
            if S::PREFETCHES {
                *next = rows_after::<S, M>(&task, turn, (block, n), hi);
            }
            let at = Block { first: (task.origin.0, kv_head, block), n };
            let (k, k_codes, has_odd_keys) = keys::<S, T, M>(&task, at);
            let (v, v_codes) = values::<S, T, M>(&task, at);
            let steps = n.next_multiple_of(M::KEYS) / M::STEPS;
            let lanes = M::value_lanes(problem.head_dim_v);
            let mut whole = Values { rows: v, steps, lanes, finite: None };
            let of_block = OfBlock { first: block, has_odd_keys };
            let mut line = Line::<S, M> { scored: None, weighted: None, place: 0 };
            for t in 0..tiles {
                let tile = tile(t);
                // A lane of values, and a tile of them, holds keys from the block's first on.
                let skip = (block.max(tile.keys.0) - block) / M::KEYS * M::KEYS;
                let (j0, j1) = (block + skip, (block + n).min(tile.keys.1));
                if j0 < j1 {
                    let rows = [k.from(skip), v.from(skip / M::STEPS)];
                    let codes = [k_codes.map(|codes| codes.from(skip)), v_codes.map(|codes| codes.from(skip))];
                    let x = task.part(problem.scratch.p + line.place * problem.scratch.p_len);
                    if tile.narrow {
                        if let Some(step) = Step::<S, M, 1>::new(&task, tile, (j0, j1), (rows, codes), (x, of_block)) {
                            step.take(&mut whole);
                        }
                    } else if let Some(step) = Step::<S, M, 2>::new(&task, tile, (j0, j1), (rows, codes), (x, of_block))
                    {
                        if M::OVERLAPS {
                            line.advance(Some(step), &mut whole);
                        } else {
                            step.take(&mut whole);
                        }
                    }
                }
            }
            line.end(&mut whole);
            block += block_n;
        }

        for n in 0..tiles {
            let tile = tile(n);
            if tile.narrow {
                S::apart(End::<S, T, 1> { task: &task, tile: &tile, storage: PhantomData });
            } else {
                S::apart(End::<S, T, 2> { task: &task, tile: &tile, storage: PhantomData });
            }
        }
    }
}

/// What is asked for while `n` keys from `block` on are computed: the next block's, or the rows that the item writes and those of the thread's next one.
fn rows_after<S: Simd, M: BlockProducts<S>>(
    task: &Task<'_, S::Elem>,
    turn: Turn,
    (block, n): (usize, usize),
    last: usize,
) -> NextRows {
    let (problem, mut rows) = (task.problem, NextRows::new());
    let (partition, block_n) = (&problem.partition, problem.partition.block_n);
    let first_key = block + block_n;
    if first_key < last {
        add_keys(&mut rows, problem, task.origin, (first_key, last));
    } else {
        for (row, n) in problem.runs_of(task.origin, partition.rows_of(turn.item)) {
            rows.add_output(&problem.out, [row.batch, row.head, row.i, 0], n, problem.head_dim_v);
        }
        if let Some(next) = turn.next {
            let (origin, of_item) = (problem.task_origin(next.task), partition.rows_of(next));
            if problem.sources.q.is_none() {
                for (row, n) in problem.runs_of(origin, of_item) {
                    rows.add(&problem.q, [row.batch, row.head, row.i, 0], n, problem.head_dim);
                }
            }
            let (lo, hi) = problem.keys_of_rows(of_item.0, of_item.1);
            add_keys(&mut rows, problem, origin, (lo / block_n * block_n, hi));
        }
    }
    let (r0, r1) = partition.rows_of(turn.item);
    rows.spread((r1 - r0).div_ceil(S::Q_VECS * S::LANES) * M::asks(n, problem.head_dim, problem.head_dim_v));
    rows
}

/// Adds the keys of one block of a task, from its first one on, but for codes.
fn add_keys(rows: &mut NextRows, problem: &Problem, (batch, head): (usize, usize), (first, last): (usize, usize)) {
    let (n, at) =
        (problem.partition.block_n.min(last.saturating_sub(first)), [batch, head / problem.group_size, first, 0]);
    if problem.sources.k.is_none() {
        rows.add(&problem.k, at, n, problem.head_dim);
    }
    if problem.sources.v.is_none() {
        rows.add(&problem.v, at, n, problem.head_dim_v);
    }
}

/// K of one block: where it lies, or packed, and then whether some key has scores that are computed again. The cut reads in place only what is rows of whole lanes.
unsafe fn keys<'a, S: Simd, T: Storage<S>, M: Packing<S, T> + BlockProducts<S>>(
    task: &Task<'a, S::Elem>,
    block: Block,
) -> (Rows<S::Elem>, Option<Coded<'a>>, bool) {
    let problem = task.problem;
    let (batch, head, j0) = block.first;
    if problem.partition.k_in_place {
        let ptr = problem.k.at([batch, head, j0, 0]).cast();
        return (Rows { ptr, stride: problem.k.strides[2] / M::STEPS as isize }, None, false);
    }
    let (panel, dim) = (task.part(problem.scratch.k_panel), problem.head_dim);
    let rows = Rows { ptr: panel.cast_const(), stride: M::key_lanes(dim) as isize };
    // SAFETY: scratch memory has a panel where K is not read in place; of f32 where it has a source, whose lanes are single, or pairs
    // where these are packed.
    unsafe {
        match &problem.sources.k {
            Some(source) if M::OF_CODES && source.pack.is_some() => {
                return (rows, coded(task, source, block, false), false);
            }
            Some(source) => source.read_keys([batch, head, j0], block.n, dim, panel.cast()),
            None => {
                let odd = task.part(problem.scratch.odd_keys);
                let has_odd = M::apart(PackKeys { problem, block, panel, odd, kind: PhantomData::<(T, M)> });
                return (rows, None, has_odd);
            }
        }
    }
    (rows, None, false)
}

/// V of one block: where it lies, or packed.
unsafe fn values<'a, S: Simd, T: Storage<S>, M: Packing<S, T> + BlockProducts<S>>(
    task: &Task<'a, S::Elem>,
    block: Block,
) -> (Rows<S::Elem>, Option<Coded<'a>>) {
    let problem = task.problem;
    let (batch, head, j0) = block.first;
    if problem.partition.v_in_place {
        return (Rows { ptr: problem.v.at([batch, head, j0, 0]).cast(), stride: problem.v.strides[2] }, None);
    }
    let (panel, dim) = (task.part(problem.scratch.v_panel), problem.head_dim_v);
    let rows = Rows { ptr: panel.cast_const(), stride: M::value_lanes(dim) as isize };
    // SAFETY: as in `keys`.
    unsafe {
        match &problem.sources.v {
            Some(source) if M::OF_CODES && source.pack.is_some() => return (rows, coded(task, source, block, true)),
            Some(source) => source.read_keys([batch, head, j0], block.n, dim, panel.cast()),
            None => M::apart(PackValues { problem, block, panel, kind: PhantomData::<(T, M)> }),
        }
    }
    (rows, None)
}

/// Codes of one block of K or of V as lanes of pairs, in its panel.
unsafe fn coded<'a, E>(task: &Task<'a, E>, source: &'a Source, block: Block, of_values: bool) -> Option<Coded<'a>> {
    let scratch = &task.problem.scratch;
    let (panel, factors, dim) = if of_values {
        (scratch.v_panel, scratch.v_biases, task.problem.head_dim_v)
    } else {
        (scratch.k_panel, scratch.k_factors, task.problem.head_dim)
    };
    let first = [block.first.0, block.first.1, block.first.2];
    let part = |at: usize| if at == 0 { std::ptr::null_mut() } else { task.part(at).cast::<f32>() };
    let (to, factors, inverses) = (part(panel), part(factors), part(scratch.v_inverses));
    let by_output = of_values && task.problem.scratch.o_factors > 0;
    let per_log2 = (1.0 / task.problem.scores.exponent()) as f32;
    let panel = CodePanel { first, n: block.n, dim, of_values, by_output, per_log2, to, factors, inverses };
    let pack = source.pack?;
    // SAFETY: as in `keys`.
    let by_numbers = unsafe { pack(source, &panel) };
    Some(Coded { source, first, dim, factors, inverses, by_numbers, row: task.part(scratch.rows).cast() })
}

/// K of one block, packed; see [`Packing::find_odd_keys`].
struct PackKeys<'a, E, K> {
    problem: &'a Problem,
    block: Block,
    panel: *mut E,
    odd: *mut E,
    kind: PhantomData<K>,
}

impl<S: Simd, T: Storage<S>, M: Packing<S, T>> Part<S> for PackKeys<'_, S::Elem, (T, M)> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let PackKeys { problem, block, panel, odd, .. } = self;
        // SAFETY: as in `keys`.
        unsafe {
            M::pack_keys(&problem.k, block, problem.head_dim, panel);
            M::find_odd_keys(block.n, problem.head_dim, panel, odd)
        }
    }
}

/// V of one block, packed.
struct PackValues<'a, E, K> {
    problem: &'a Problem,
    block: Block,
    panel: *mut E,
    kind: PhantomData<K>,
}

impl<S: Simd, T: Storage<S>, M: Packing<S, T>> Part<S> for PackValues<'_, S::Elem, (T, M)> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: as in `values`.
        unsafe { M::pack_values(&self.problem.v, self.block, self.problem.head_dim_v, self.panel) }
    }
}

/// Packs `Qᵀ` and clears the state of a tile. Lanes without a query hold zeros.
struct Begin<'a, S: Simd, T, M, const V: usize> {
    task: &'a Task<'a, S::Elem>,
    tile: &'a Tile<S::Elem>,
    kind: PhantomData<(T, M)>,
}

impl<S: Simd, T: Storage<S>, M: Packing<S, T>, const V: usize> Part<S> for Begin<'_, S, T, M, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Begin { task, tile, .. } = self;
        let Task { problem, origin, .. } = *task;
        // Copies: behind a reference they would be read again after every store.
        let (q, dim, negate) = (problem.q, problem.head_dim, problem.scores.negate_q);
        let source = problem.sources.q.as_ref();
        // The rows of Qᵀ that the product reads, and what fills whole vectors.
        let stride = M::query_lanes(dim).next_multiple_of(S::LANES);
        let (queries, rows) = (V * S::LANES, task.part(problem.scratch.rows));
        // SAFETY: `rows` has `queries` rows of `stride`; each row r0..r1 is a query of q.
        unsafe {
            for lane in 0..queries {
                let to = rows.add(lane * stride);
                let mut filled = 0;
                if tile.r0 + lane < tile.r1 {
                    let row = problem.row(origin, tile.r0 + lane);
                    filled = match source {
                        Some(source) => read_query::<S>(source, [row.batch, row.head, row.i], dim, negate, to),
                        None => {
                            let from = q.at([row.batch, row.head, row.i, 0]).cast::<T>();
                            M::load_query(from, q.strides[3], dim, negate, to)
                        }
                    };
                }
                for d in filled..stride {
                    *to.add(d) = S::Elem::ZERO;
                }
            }
            M::find_odd_queries(queries, dim, rows, stride, tile.odd);
            transpose_in::<S>(rows, stride, stride, tile.q_t, queries);
            for v in (0..queries).step_by(S::LANES) {
                S::store(tile.state.row_max.add(v), S::splat(S::Elem::NEG_INFINITY));
                S::store(tile.state.row_sum.add(v), S::splat(S::Elem::ZERO));
            }
            for at in (0..problem.head_dim_v * queries).step_by(S::LANES) {
                S::store(tile.acc_o.add(at), S::splat(S::Elem::ZERO));
            }
        }
    }
}

/// A block of keys: its first one, and whether some key has scores that are computed again.
#[derive(Clone, Copy)]
struct OfBlock {
    first: usize,
    has_odd_keys: bool,
}

/// One tile of queries on its way through one block of keys.
struct Step<'a, S: Simd, M, const V: usize> {
    task: &'a Task<'a, S::Elem>,
    tile: Tile<S::Elem>,
    /// The first key, and how many there are; their rows.
    keys: (usize, usize),
    k: Rows<S::Elem>,
    v: Rows<S::Elem>,
    k_codes: Option<Coded<'a>>,
    v_codes: Option<Coded<'a>>,
    /// Scores, then weights: see [`Step::weights`].
    x: *mut S::Elem,
    of_block: OfBlock,
    sees_all: bool,
    /// What a mask does.
    effect: Option<mask::Effect>,
    is_plain_mask: bool,
    kind: PhantomData<(S, M)>,
}

impl<'a, S: Simd, M: BlockProducts<S>, const V: usize> Step<'a, S, M, V> {
    /// Reads the mask; nothing where no key is attended.
    unsafe fn new(
        task: &'a Task<'a, S::Elem>,
        tile: Tile<S::Elem>,
        (j0, j1): (usize, usize),
        ([k, v], [k_codes, v_codes]): ([Rows<S::Elem>; 2], [Option<Coded<'a>>; 2]),
        (x, of_block): (*mut S::Elem, OfBlock),
    ) -> Option<Self> {
        let problem = task.problem;
        let (sees_all, n) = (problem.sees_all(tile.r0, tile.r1, j0, j1), j1 - j0);
        let keys = (j0, n);
        let (effect, is_plain_mask, kind) = (None, false, PhantomData);
        let mut step =
            Step { task, tile, keys, k, v, k_codes, v_codes, x, of_block, sees_all, effect, is_plain_mask, kind };
        if let Some(mask) = &problem.mask {
            step.is_plain_mask = step.is_plain() && mask::is_plain(mask, n);
            let (rows, bias) = (step.rows(), task.part(problem.scratch.bias));
            let rows = &rows[..tile.r1 - tile.r0];
            // SAFETY: as in `item`.
            step.effect = Some(unsafe {
                if step.is_plain_mask {
                    S::apart(ScanTile { mask, rows, keys })
                } else {
                    S::apart(ReadTile::<S, V> { mask, rows, keys, bias })
                }
            });
        }
        (!step.effect.is_some_and(mask::Effect::is_empty)).then_some(step)
    }

    /// Whether positions and the mask are all that becomes of scores.
    fn is_plain(&self) -> bool {
        let problem = self.task.problem;
        self.sees_all && problem.scores.softcap.is_none() && problem.alibi_slopes.is_none()
    }

    /// The tile's rows.
    fn rows(&self) -> [Row; MAX_QUERIES] {
        tile_rows(self.task.problem, self.task.origin, (self.tile.r0, self.tile.r1))
    }

    /// S = K @ Q.T
    fn keys_product(&self) -> KeyProduct<S::Elem> {
        let dim = self.task.problem.head_dim;
        KeyProduct { keys: self.keys.1, dim, k: self.k, q_t: self.tile.q_t, s: self.x, next: self.task.next }
    }

    /// Weights: over scores, or behind those of a whole block where a step has more lanes than keys.
    fn weights(&self) -> *mut S::Elem {
        let behind = if M::PARTS > M::STEPS { self.task.problem.scratch.p_weights } else { 0 };
        self.x.wrapping_add(behind)
    }

    /// Computes scores again that lanes do not hold.
    unsafe fn amend(&self) {
        let Step { task, tile, keys, x, of_block, .. } = self;
        if M::PARTS == 1 {
            return;
        }
        let (problem, queries) = (task.problem, V * S::LANES);
        // SAFETY: a flag for each query of the tile.
        let has_odd_queries = unsafe { (0..queries).any(|lane| *tile.odd.add(lane) != S::Elem::ZERO) };
        if !of_block.has_odd_keys && !has_odd_queries {
            return;
        }
        let rows = self.rows();
        let amend = Amend {
            problem,
            rows: &rows[..tile.r1 - tile.r0],
            keys: *keys,
            kv_head: task.origin.1 / problem.group_size,
            odd_queries: tile.odd,
            odd_keys: task.part(problem.scratch.odd_keys + keys.0 - of_block.first),
            x: *x,
            room: task.part(problem.scratch.rows),
        };
        // SAFETY: as in `item`; between the first and the last step of an item nothing lies in `rows`.
        unsafe { M::amend::<V>(amend) }
    }

    /// Modifies and masks scores.
    unsafe fn modify(&self) {
        let &Step { keys, x, sees_all, .. } = self;
        let problem = self.task.problem;
        let bias = self.task.part(problem.scratch.bias).cast_const();
        let biased = self.effect.filter(|effect| effect.masks || effect.adds).map(|_| bias);
        if sees_all && biased.is_none() && !problem.scores.natural {
            return;
        }
        let rows = self.rows();
        let rows = &rows[..self.tile.r1 - self.tile.r0];
        // SAFETY: as in `item`.
        unsafe {
            match (biased, &problem.mask) {
                (Some(_), Some(mask)) if self.is_plain_mask => S::apart(MaskTile::<S, V> { mask, rows, keys, x }),
                (Some(bias), _) if self.is_plain() => {
                    S::apart(AddBiases::<S, V> { scores: &problem.scores, n: keys.1, x, bias });
                }
                _ => S::apart(Modify::<S, V> { problem, rows, keys, x, bias: biased, positions: !sees_all }),
            }
        }
    }

    /// Whether some weight may be that of a masked key: keys beside the last one may share its lane or tile of values.
    fn is_masked(&self) -> bool {
        !self.sees_all || self.effect.is_some_and(|effect| effect.masks) || !self.keys.1.is_multiple_of(M::KEYS)
    }

    /// Scores to weights, with products beside; answers what O is to be rescaled with.
    unsafe fn weigh<B: Beside>(&self, beside: &mut B) -> [S::V; V] {
        let factors = self.v_codes.filter(|_| M::OF_CODES && self.task.problem.scratch.v_biases > 0);
        let codes = factors.map(|codes| (codes.factors.cast(), codes.inverses.cast()));
        // SAFETY: as in `item`.
        unsafe {
            let rescale = match (codes.is_some(), self.is_masked()) {
                (true, true) => M::apart(self.softmax::<B, true, true>(codes, beside)),
                (true, false) => M::apart(self.softmax::<B, false, true>(codes, beside)),
                (false, true) => M::apart(self.softmax::<B, true, false>(None, beside)),
                (false, false) => M::apart(self.softmax::<B, false, false>(None, beside)),
            };
            if let Some(dropping) = self.task.problem.dropping {
                let (rows, products) = (self.rows(), PhantomData::<M>);
                let tile = DropTile { dropping, rows: &rows[..self.tile.r1 - self.tile.r0], keys: self.keys };
                S::apart(DropWeights::<S, M, V> { tile, p: self.weights(), products });
            }
            rescale
        }
    }

    fn softmax<'b, B, const MASKED: bool, const FACTORS: bool>(
        &self,
        codes: Option<(*const S::Elem, *const S::Elem)>,
        beside: &'b mut B,
    ) -> Softmax<'b, S, M, B, V, MASKED, FACTORS>
    where
        'a: 'b,
    {
        let (problem, Tile { acc_o, state, .. }) = (self.task.problem, self.tile);
        let (n, x, p, products) = (self.keys.1, self.x, self.weights(), PhantomData);
        Softmax { problem, state, acc_o, n, x, p, codes, beside, products }
    }

    /// O = O · 2^(m − m') + P @ V; `whole` is V of all the block.
    fn values_product<'v>(&self, factors: [S::V; V], whole: &'v mut Values<S::Elem>) -> ValueProduct<'v, S, V> {
        let (&Step { keys: (_, keys), v, .. }, p) = (self, self.weights());
        let masked = (M::CLEANS || self.is_masked()).then_some(whole);
        let (dim, acc_o) = (self.task.problem.head_dim_v, self.tile.acc_o);
        let room = self.task.part(self.task.problem.scratch.o_block);
        ValueProduct { keys, dim, v, p, numbers: self.x, acc_o, room, factors, masked, next: self.task.next }
    }

    /// What [`Step::values_product`] left beside O.
    unsafe fn add_sums(&self) {
        let Task { problem, .. } = self.task;
        // SAFETY: as in `item`.
        unsafe { M::add_sums::<V>(problem.head_dim_v, self.task.part(problem.scratch.o_block), self.tile.acc_o) }
    }

    /// All of it, one after the other.
    unsafe fn take(self, whole: &mut Values<S::Elem>) {
        // SAFETY: as in `item`.
        unsafe {
            if self.k_codes.is_none_or(|codes| !codes.by_numbers) {
                M::multiply::<V>(Some(self.keys_product()), None).finish();
            }
            if M::OF_CODES
                && let Some(codes) = &self.k_codes
            {
                M::scale_scores::<V>(codes, self.keys_product());
            }
            self.amend();
            self.modify();
            let factors = self.weigh(&mut Formed);
            let values = self.values_product(factors, whole);
            match &self.v_codes {
                Some(codes) if M::OF_CODES && codes.by_numbers => M::add_numbers::<V>(codes, values),
                _ => {
                    M::multiply::<V>(None, Some(values)).finish();
                    self.add_sums();
                }
            }
        }
    }
}

/// A tile that has weights, and what its O is to be rescaled with.
type Weighted<'a, S, M> = (Step<'a, S, M, 2>, [<S as Simd>::V; 2]);

/// Tiles of queries on their way through one block of keys, where products are formed beside other work:
///
/// ```text
/// S of the next tile = K · Qᵀ  ‖  softmax of this tile  ‖  O of the last tile += Vᵀ · Pᵀ
/// ```
struct Line<'a, S: Simd, M> {
    scored: Option<Step<'a, S, M, 2>>,
    weighted: Option<Weighted<'a, S, M>>,
    /// Which of the three places of scores is free.
    place: usize,
}

impl<'a, S: Simd, M: BlockProducts<S>> Line<'a, S, M> {
    /// Takes the next tile, or none.
    unsafe fn advance(&mut self, next: Option<Step<'a, S, M, 2>>, whole: &mut Values<S::Elem>) {
        let keys = next.as_ref().map(Step::keys_product);
        let values = self.weighted.as_ref().map(|(step, factors)| step.values_product(*factors, whole));
        // SAFETY: as in `item`; the three tiles have scores, weights and sums of their own.
        unsafe {
            let mut beside = M::multiply::<2>(keys, values);
            let summed = self.weighted.take();
            if let Some(step) = self.scored.take() {
                let factors = step.weigh(&mut beside);
                self.weighted = Some((step, factors));
            }
            beside.finish();
            if let Some((step, _)) = &summed {
                step.add_sums();
            }
            if let Some(step) = &next {
                step.amend();
                step.modify();
            }
        }
        self.scored = next;
        self.place = (self.place + 1) % 3;
    }

    /// Brings all tiles to their ends.
    unsafe fn end(mut self, whole: &mut Values<S::Elem>) {
        while self.scored.is_some() || self.weighted.is_some() {
            // SAFETY: as in `item`.
            unsafe { self.advance(None, whole) };
        }
    }
}

/// `out = (Oᵀ / sum)ᵀ` and lse.
struct End<'a, S: Simd, T, const V: usize> {
    task: &'a Task<'a, S::Elem>,
    tile: &'a Tile<S::Elem>,
    storage: PhantomData<T>,
}

impl<S: Simd, T: Storage<S>, const V: usize> Part<S> for End<'_, S, T, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let End { task, tile, .. } = self;
        let Task { problem, origin, .. } = *task;
        let scratch = &problem.scratch;
        let (queries, stride, rows) = (V * S::LANES, scratch.head_dim_v_padded, task.part(scratch.rows));
        // Copies, as in `begin`.
        let (out, lse, sinks, dim) = (problem.out, problem.lse, problem.sinks, problem.head_dim_v);
        let to_natural = S::Elem::from_f64_clamped(problem.scores.to_natural());
        let kept = S::Elem::from_f64_clamped(problem.dropping.map_or(1.0, |dropping| dropping.scale));
        // SAFETY: as in `begin`; each row r0..r1 is a row of out and lse that this item alone writes.
        unsafe {
            // [dim][queries] back to [queries][dim]: rows past head_dim_v are scratch and are never stored.
            for d in (0..dim).step_by(S::LANES) {
                for v in (0..queries).step_by(S::LANES) {
                    S::transpose(tile.acc_o.add(d * queries + v), queries, rows.add(v * stride + d), stride);
                }
            }
            for r in tile.r0..tile.r1 {
                let lane = r - tile.r0;
                let row = problem.row(origin, r);
                let sink = sinks.map(|sinks| S::Elem::load_as(sinks.dtype, sinks.at([row.head])));
                let done =
                    Finished::new(*tile.state.row_max.add(lane), *tile.state.row_sum.add(lane), to_natural, sink);
                if let Some(lse) = &lse {
                    done.lse().store_as(lse.dtype, lse.at([row.batch, row.head, row.i]));
                }
                let from = rows.add(lane * stride);
                if scratch.o_factors > 0 {
                    let factors = task.part(scratch.o_factors);
                    for d in (0..dim).step_by(S::LANES) {
                        S::store(from.add(d), S::mul(S::load(from.add(d)), S::load(factors.add(d))));
                    }
                }
                store_row::<S, T>(from, done.factor * kept, dim, &out, [row.batch, row.head, row.i, 0]);
            }
        }
    }
}
