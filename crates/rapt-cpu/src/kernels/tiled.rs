//! Products of bf16 formed tile by tile: lanes of pairs as in `pairs`, in tiles of 16 rows of 16 lanes (`arch::amx`). float32 and float16 are sums of bf16
//! (`parts`), and their products sums of products of these.
//!
//! ```text
//! S  a = K [16 keys][16 lanes of head_dim]    b = Qᵀ [16 lanes][16 queries]          c = Sᵀ [16 keys][16 queries]
//! O  a = Vᵀ [16 dims][16 lanes of keys]       b = Pᵀ [16 lanes][16 queries]          c = Oᵀ [16 dims][16 queries]
//! x·w  a = x [16 rows][16 lanes]              b = a panel of w [16 lanes][16 columns]
//! ```
//! Qᵀ and Pᵀ lie as broadcast rows need them too, part after part in `[lane tile]` of Qᵀ and in each lane of Pᵀ. K and Vᵀ are packed, a tile's 1 KiB in
//! one piece: `K [key tile][lane tile][part]`, `Vᵀ [tile of 32 keys][dim tile][part]`; what no key and no dimension fills is 0. A panel of Vᵀ has room for
//! another one behind it: where V is not finite and some weight is masked, the finite numbers are multiplied, zeros in the others'
//! places, and each of the others is added where its key is attended. So the bits of a row do not depend on what its neighbours mask.
//! Sums go on from one tile to the next: where blocks begin has no say in them.

use std::marker::PhantomData;

use half::bf16;

use super::beside::{Queue, rows_of_tiles};
use super::blocks::{Amend, BlockProducts, KeyProduct, Rows, ValueProduct, Values, is_finite};
use super::gemm::{Blocks, OneRow, SUM_ROW, Weights};
use super::matmul::Broadcast;
use super::pairs::{Bf16Pairs, Paired, weave};
use super::parts::{
    self, AddSums, AmendScores, CleanParts, FindOdd, Numbers, all_have_parts, has_odd, odd_numbers, row_of_tiles,
};
use super::products::{Block, Lanes, Packing, Products};
use super::simd::{Part, Real, Simd};
use crate::arch::amx::{InMemory, Operands, Parts, SIDE, TILE, multiply, unit};
use crate::gemm::product;
use crate::problem::Input;

/// Two steps per lane, sixteen lanes of sixteen rows at a time, of the parts of numbers of a dtype.
#[derive(Clone, Copy)]
pub(crate) struct Tiled<T>(PhantomData<T>);

/// Keys of a tile along them.
pub(crate) const TILE_KEYS: usize = 2 * SIDE;
/// The bytes of a row of a tile, and of a tile.
const ROW_BYTES: usize = SIDE * size_of::<f32>();
const TILE_BYTES: usize = TILE * size_of::<f32>();

/// Lanes of rows of `dim` numbers, in whole tiles.
pub(crate) const fn key_lanes(dim: usize) -> usize {
    dim.div_ceil(2).next_multiple_of(SIDE)
}

impl<S: Bf16Pairs, T: Numbers<S>> Lanes<S> for Tiled<T> {
    const STEPS: usize = 2;
    type Lane = f32;
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load(ptr) }
    }
    #[inline(always)]
    unsafe fn accumulate(b: S::V, x: S::V, acc: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::dot(b, x, acc) }
    }
    #[inline(always)]
    unsafe fn apart<P: Part<S>>(part: P) -> P::Output {
        // SAFETY: promised by the caller.
        unsafe { S::apart_paired(part) }
    }
}

impl<S: Bf16Pairs, T: Numbers<S>> Products<S> for Tiled<T> {
    const PARTS: usize = T::PARTS;
    const EXP2: &'static [f32] = if T::PARTS == 1 { f32::SHORT_EXP2 } else { f32::EXP2 };
    #[inline(always)]
    unsafe fn accumulate_selecting(b: S::V, x: S::V, acc: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { <Paired as Products<S>>::accumulate_selecting(b, x, acc) }
    }
    #[inline(always)]
    unsafe fn store_weights(p: [S::V; 2], to: *mut f32, row: usize) {
        // SAFETY: promised by the caller.
        unsafe { parts::store_weights::<S, T>(p, to, row) }
    }
    #[inline(always)]
    unsafe fn drop_weights(p: S::V, words: [S::W; 2], last: u32) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { <Paired as Products<S>>::drop_weights(p, words, last) }
    }
    #[inline(always)]
    unsafe fn add_non_finite(values: S::V, sum: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { <Paired as Products<S>>::add_non_finite(values, sum) }
    }
}

impl<S: Bf16Pairs, T: Numbers<S>> Packing<S, T> for Tiled<T> {
    fn query_lanes(dim: usize) -> usize {
        T::PARTS * key_lanes(dim)
    }
    #[inline(always)]
    unsafe fn load_query(src: *const T, stride: isize, n: usize, negate: bool, dst: *mut f32) -> usize {
        // SAFETY: promised by the caller.
        unsafe {
            if T::PARTS == 1 {
                return <Paired as Packing<S, bf16>>::load_query(src.cast(), stride, n, negate, dst);
            }
            for tile in 0..key_lanes(n) / SIDE {
                let (d, to) = (tile * TILE_KEYS, dst.add(tile * T::PARTS * SIDE));
                row_of_tiles::<S, T>(Some(src), stride, (d, n), negate, to, SIDE);
            }
        }
        Self::query_lanes(n)
    }
    #[inline(always)]
    unsafe fn pack_keys(input: &Input<4>, block: Block, dim: usize, panel: *mut f32) {
        let (batch, head, j0) = block.first;
        let lanes = key_lanes(dim);
        for j in 0..block.n.next_multiple_of(TILE_KEYS) {
            let tiles = panel.wrapping_add(j / SIDE * SIDE * lanes * T::PARTS + j % SIDE * SIDE);
            let row = (j < block.n).then(|| input.at_key([batch, head, j0 + j, 0]).cast::<T>());
            for tile in 0..lanes / SIDE {
                let (d, to) = (tile * 2 * SIDE, tiles.wrapping_add(tile * T::PARTS * TILE));
                // SAFETY: keys j0..j0 + n are inside the tensor; the panel has a row of lanes for each key of whole tiles.
                unsafe {
                    if T::PARTS == 1 {
                        row_of_tile::<S>(row.map(<*const T>::cast), input.strides[3], d, dim, to);
                    } else {
                        row_of_tiles::<S, T>(row, input.strides[3], (d, dim), false, to, TILE);
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn pack_values(input: &Input<4>, block: Block, dim: usize, panel: *mut f32) {
        // SAFETY: promised by the caller.
        unsafe {
            if T::PARTS == 1 {
                pack_whole_values::<S>(input, block, dim, panel);
            } else {
                parts::pack_values::<S, T>(input, block, dim, panel);
            }
        }
    }
    #[inline(always)]
    unsafe fn find_odd_queries(n: usize, dim: usize, rows: *const f32, row: usize, flags: *mut f32) {
        if T::PARTS > 1 {
            let (lanes, next) = (key_lanes(dim), T::PARTS * SIDE);
            // SAFETY: promised by the caller.
            unsafe {
                <FindOdd as Part<S>>::run(FindOdd {
                    rows: n,
                    lanes,
                    from: rows,
                    row_tile: SIDE * row,
                    row,
                    next,
                    flags,
                })
            };
        }
    }
    #[inline(always)]
    unsafe fn find_odd_keys(n: usize, dim: usize, panel: *const f32, flags: *mut f32) -> bool {
        let (lanes, next) = (key_lanes(dim), T::PARTS * TILE);
        let row_tile = lanes * T::PARTS * SIDE;
        let odd = FindOdd { rows: n, lanes, from: panel, row_tile, row: SIDE, next, flags };
        // SAFETY: promised by the caller.
        T::PARTS > 1 && unsafe { <FindOdd as Part<S>>::run(odd) }
    }
}

/// A block of V of bf16.
#[inline(always)]
unsafe fn pack_whole_values<S: Bf16Pairs>(input: &Input<4>, block: Block, dim: usize, panel: *mut f32) {
    let (batch, head, j0) = block.first;
    let stride = input.strides[3];
    let row = |j: usize| (j < block.n).then(|| input.at_key([batch, head, j0 + j, 0]).cast::<bf16>());
    let dim_tiles = dim.div_ceil(SIDE);
    let mut lanes = [0f32; TILE];
    for key_tile in 0..block.n.div_ceil(TILE_KEYS) {
        for dim_tile in 0..dim_tiles {
            let d = dim_tile * SIDE;
            let dims = (dim - d).min(SIDE);
            for (lane, to) in lanes.chunks_exact_mut(SIDE).enumerate() {
                let j = key_tile * TILE_KEYS + 2 * lane;
                if dims < SIDE || row(j).is_none() {
                    to.fill(0.0);
                }
                if let Some(low) = row(j) {
                    let at = d as isize * stride;
                    let high = row(j + 1).map(|row| row.wrapping_offset(at));
                    // SAFETY: keys j0..j0 + n are inside the tensor, and dimensions d..d + dims.
                    unsafe { weave::<S>(low.wrapping_offset(at), high, stride, dims, to.as_mut_ptr()) };
                }
            }
            let to = panel.wrapping_add((key_tile * dim_tiles + dim_tile) * TILE);
            for (r, c) in squares::<S>() {
                // SAFETY: both tiles have these squares.
                unsafe { S::transpose(lanes.as_ptr().add(r * SIDE + c), SIDE, to.add(c * SIDE + r), SIDE) };
            }
        }
    }
}

/// Where the squares of vectors of a tile begin.
#[inline(always)]
fn squares<S: Simd>() -> impl Iterator<Item = (usize, usize)> {
    (0..SIDE).step_by(S::LANES).flat_map(|r| (0..SIDE).step_by(S::LANES).map(move |c| (r, c)))
}

/// Numbers `d..d + 32` of a row of `dim` as a row of a tile; zeros in place of those past its end, and of a row that is not there.
#[inline(always)]
unsafe fn row_of_tile<S: Bf16Pairs>(row: Option<*const bf16>, stride: isize, d: usize, dim: usize, to: *mut f32) {
    let n = if row.is_some() { dim.saturating_sub(d).min(2 * SIDE) } else { 0 };
    // SAFETY: the caller vouches for n numbers of the row, and for a row of the tile.
    unsafe {
        if n < 2 * SIDE {
            for lane in (0..SIDE).step_by(S::LANES) {
                S::store(to.add(lane), S::splat(0.0));
            }
        }
        if let Some(row) = row {
            let from = row.wrapping_offset(d as isize * stride);
            <Paired as Packing<S, bf16>>::load_query(from, stride, n, false, to);
        }
    }
}

impl<S: Bf16Pairs, T: Numbers<S>> BlockProducts<S> for Tiled<T> {
    const KEYS: usize = TILE_KEYS;
    const CLEANS: bool = T::PARTS > 1;
    const OVERLAPS: bool = true;
    type Beside = Queue<S>;
    fn key_lanes(dim: usize) -> usize {
        T::PARTS * key_lanes(dim)
    }
    fn value_lanes(dim: usize) -> usize {
        T::PARTS * dim.next_multiple_of(SIDE)
    }

    unsafe fn add_sums<const V: usize>(dim: usize, room: *const f32, acc_o: *mut f32) {
        if T::PARTS > 1 {
            // SAFETY: promised by the caller.
            unsafe { S::apart(AddSums { from: room, len: dim * V * S::LANES, to: acc_o }) };
        }
    }

    unsafe fn amend<const V: usize>(amend: Amend<'_, f32>) {
        // SAFETY: promised by the caller.
        unsafe { S::apart(AmendScores::<T, V>(amend, PhantomData)) }
    }

    #[inline(always)]
    unsafe fn rescale<const V: usize>(dim: usize, acc_o: *mut f32, factors: [S::V; V]) {
        // SAFETY: acc_o has `dim` rows of V vectors.
        unsafe {
            let (zero, one) = (S::splat(0.0), S::splat(1.0));
            let mut others = zero;
            for factor in factors {
                others = S::add(others, S::select(S::eq(factor, one), zero, one));
            }
            // A factor of 1 would change nothing.
            if S::reduce_add(others) == 0.0 {
                return;
            }
            for row in 0..dim {
                for (v, &factor) in factors.iter().enumerate() {
                    let at = acc_o.add((row * V + v) * S::LANES);
                    S::store(at, S::mul(S::load(at), factor));
                }
            }
        }
    }

    /// At each step of two rows of tiles.
    fn asks(keys: usize, dim: usize, dim_v: usize) -> usize {
        let of_keys = keys.div_ceil(TILE_KEYS);
        of_keys * (key_lanes(dim) / SIDE + dim_v.div_ceil(SIDE) / 2)
    }

    unsafe fn multiply<const V: usize>(
        keys: Option<KeyProduct<f32>>,
        values: Option<ValueProduct<'_, S, V>>,
    ) -> Queue<S> {
        let next = keys.as_ref().map(|keys| keys.next).or(values.as_ref().map(|values| values.next));
        let mut queue = Queue::new(next.unwrap_or(std::ptr::null_mut()));
        // SAFETY: the item has tiles; the panel of K and Qᵀ have whole tiles, S those of a whole block; of the other tile acc_o has
        // whole tiles of dimensions, p those of a whole block.
        unsafe {
            if let Some(keys) = keys {
                queue.add(V * S::LANES, key_tiles::<S, T, V>(&keys));
            }
            if let Some(values) = values {
                let ValueProduct { keys, dim, v, p, numbers, acc_o, room, masked, .. } = values;
                let (rows, mut operands) = value_tiles::<S, T, V>((keys, dim), v, (p, numbers), acc_o, masked);
                if T::PARTS > 1 {
                    operands = Operands { c: sums(room.cast(), V * S::LANES), from_zero: true, ..operands };
                }
                queue.add(V * S::LANES, (rows, operands));
            }
        }
        queue
    }
}

/// S = K · Qᵀ: rows of tiles, and what is multiplied.
pub(super) fn key_tiles<S: Bf16Pairs, T: Numbers<S>, const V: usize>(product: &KeyProduct<f32>) -> (usize, Operands) {
    let &KeyProduct { keys, dim, k, q_t, s, .. } = product;
    let queries = V * S::LANES;
    let (next, along, part) = (SIDE * k.stride as usize * 4, T::PARTS * TILE_BYTES, TILE_BYTES);
    let operands = Operands {
        a: InMemory { ptr: k.ptr.cast(), next, along, part, row: ROW_BYTES },
        b: of_queries(q_t.cast(), queries, T::PARTS),
        c: sums(s.cast(), queries),
        steps: key_lanes(dim) / SIDE,
        parts: T::OF_SCORES,
        from_zero: true,
    };
    // The panel and S have room for whole tiles of keys: pairs of rows of tiles.
    (keys.div_ceil(TILE_KEYS) * 2, operands)
}

/// O = O + P · V: as above, once what is not finite behind a masked weight is out of the way.
pub(super) unsafe fn value_tiles<S: Bf16Pairs, T: Numbers<S>, const V: usize>(
    (keys, dim): (usize, usize),
    mut v: Rows<f32>,
    (p, numbers): (*mut f32, *const f32),
    acc_o: *mut f32,
    masked: Option<&mut Values<f32>>,
) -> (usize, Operands) {
    let queries = V * S::LANES;
    // SAFETY: as of the caller.
    unsafe {
        S::apart(EndWeights::<S, V> { keys, parts: T::PARTS, p, vectors: PhantomData });
        if let Some(block) = masked {
            let is_first = block.finite.is_none();
            let is_whole = T::PARTS == 1;
            let is_multiplied = if is_whole { is_finite::<S, Tiled<T>>(block) } else { all_have_parts::<S, T>(block) };
            if !is_multiplied {
                let (from, len) = (block.rows.ptr, block.steps * block.lanes);
                let to = from.cast_mut().add(len);
                if is_first && is_whole {
                    S::apart_paired(Clean { from, len, to });
                } else if is_first {
                    S::apart(CleanParts { from, len, parts: T::PARTS, to });
                }
                S::apart_paired(AddOdd::<S, T, V> { keys, dim, v, p, numbers, acc_o, kind: PhantomData });
                v = Rows { ptr: v.ptr.wrapping_add(len), ..v };
            }
        }
    }
    let dim_tiles = dim.div_ceil(SIDE);
    let next = T::PARTS * TILE_BYTES;
    let weights = of_queries(p.cast_const().cast(), queries, 1);
    let row = T::PARTS * weights.row;
    let operands = Operands {
        a: InMemory { ptr: v.ptr.cast(), next, along: dim_tiles * next, part: TILE_BYTES, row: ROW_BYTES },
        b: InMemory { along: SIDE * row, part: weights.row, row, ..weights },
        c: sums(acc_o.cast(), queries),
        steps: keys.div_ceil(TILE_KEYS),
        parts: T::OF_VALUES,
        from_zero: false,
    };
    (dim_tiles, operands)
}

/// Lanes of queries side by side, as tiles of `b`: those of each part of a tile follow one another.
fn of_queries(ptr: *const u8, queries: usize, parts: usize) -> InMemory<*const u8> {
    let row = queries * size_of::<f32>();
    InMemory { ptr, next: ROW_BYTES, along: parts * SIDE * row, part: SIDE * row, row }
}

/// Sums of queries side by side.
fn sums(ptr: *mut u8, queries: usize) -> InMemory<*mut u8> {
    let row = queries * size_of::<f32>();
    InMemory { ptr, next: SIDE * row, along: ROW_BYTES, part: 0, row }
}

/// Masked weights for the keys that a last tile has room for and that are none.
struct EndWeights<S, const V: usize> {
    keys: usize,
    parts: usize,
    p: *mut f32,
    vectors: PhantomData<S>,
}

impl<S: Simd<Elem = f32>, const V: usize> Part<S> for EndWeights<S, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        const BOTH_MASKED: f32 = f32::from_bits(0x8000_8000);
        let lanes = self.keys.div_ceil(2)..self.keys.next_multiple_of(TILE_KEYS) / 2;
        for at in lanes.start * self.parts * V..lanes.end * self.parts * V {
            // SAFETY: p has the lanes of whole tiles of keys.
            unsafe { S::store(self.p.add(at * S::LANES), S::splat(BOTH_MASKED)) };
        }
    }
}

/// A panel with zeros in place of what is not finite.
pub(super) struct Clean {
    pub(super) from: *const f32,
    pub(super) len: usize,
    pub(super) to: *mut f32,
}

impl<S: Bf16Pairs> Part<S> for Clean {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Clean { from, len, to } = self;
        // SAFETY: the caller vouches for whole tiles of lanes on both sides.
        unsafe {
            let zero = S::splat(0.0);
            for at in (0..len).step_by(S::LANES) {
                let [low, high] = S::split(S::load(from.add(at)));
                // 0 · x is 0 for finite x and NaN otherwise.
                let low = S::select(S::eq(S::mul(low, zero), zero), low, zero);
                let high = S::select(S::eq(S::mul(high, zero), zero), high, zero);
                S::store(to.add(at), S::join(low, high));
            }
        }
    }
}

/// 1 in both halves of a lane.
const ONES: f32 = f32::from_bits(0x3F80_3F80);

/// O += p · v for each v that is not multiplied and each query that attends it.
struct AddOdd<S: Simd, T, const V: usize> {
    keys: usize,
    dim: usize,
    v: Rows<f32>,
    p: *const f32,
    numbers: *const f32,
    acc_o: *mut f32,
    kind: PhantomData<(S, T)>,
}

impl<S: Bf16Pairs, T: Numbers<S>, const V: usize> Part<S> for AddOdd<S, T, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let AddOdd { keys, dim, v, .. } = self;
        let (lanes, dim_tiles) = (keys.div_ceil(2), dim.div_ceil(SIDE));
        for first in (0..lanes).step_by(SIDE) {
            for d in 0..dim {
                let tile = (first / SIDE * dim_tiles + d / SIDE) * T::PARTS * TILE;
                // SAFETY: V has these lanes of this dimension.
                unsafe {
                    let row = v.ptr.add(tile + d % SIDE * SIDE);
                    if !has_odd::<S, T>(row) {
                        continue;
                    }
                    for lane in first..lanes.min(first + SIDE) {
                        let odd = odd_numbers(row.add(lane - first), TILE, T::PARTS);
                        for (half, value) in odd.into_iter().enumerate() {
                            if let Some(value) = value {
                                self.add(value, (lane, half), d);
                            }
                        }
                    }
                }
            }
        }
    }
}

impl<S: Bf16Pairs, T: Numbers<S>, const V: usize> AddOdd<S, T, V> {
    /// One of them, of a half of a lane of keys.
    #[inline(always)]
    unsafe fn add(&self, value: f32, (lane, half): (usize, usize), d: usize) {
        let &AddOdd { p, numbers, acc_o, .. } = self;
        // SAFETY: p, `numbers` and acc_o have rows of V vectors for each lane, key and dimension.
        unsafe {
            for at in 0..V {
                let weights = p.add((lane * T::PARTS * V + at) * S::LANES);
                let first = S::load(weights);
                let mut weight = S::split(first)[half];
                if T::PARTS > 2 {
                    let number = S::load(numbers.add(((2 * lane + half) * V + at) * S::LANES));
                    weight = S::select(S::eq(weight, S::splat(0.0)), weight, number);
                }
                if T::PARTS == 2 {
                    weight = S::add(weight, S::split(S::load(weights.add(V * S::LANES)))[half]);
                }
                // As the unit does: a weight below the least normal number is 0.
                let is_small = S::lt(S::abs(weight), S::splat(f32::MIN_POSITIVE));
                let weight = S::select(is_small, S::splat(0.0), weight);
                let to = acc_o.add((d * V + at) * S::LANES);
                let (old, sum) = (S::load(to), S::fma(weight, S::splat(value), S::load(to)));
                let attended = S::split(S::keep_attended(S::splat(ONES), first))[half];
                S::store(to, S::select(S::eq(attended, S::splat(0.0)), old, sum));
            }
        }
    }
}

impl<S: Bf16Pairs> Weights<S> for Tiled<bf16> {
    type Stored = bf16;
    const WIDENED: bool = false;
    const COPIED: bool = true;
    const LANE_RUN: usize = SIDE;
    const ROW_RUN: usize = SIDE;

    unsafe fn rows(x: product::Rows, k: usize, rows: usize, from: usize, n: usize, to: *mut f32) -> Broadcast<f32> {
        let first = x.ptr.cast::<bf16>().wrapping_add(2 * from);
        let steps = (2 * n).min(k - 2 * from);
        let row_bytes = x.row_stride.wrapping_mul(size_of::<bf16>() as isize);
        let is_aligned = first.addr().is_multiple_of(ROW_BYTES) && row_bytes % ROW_BYTES as isize == 0;
        if is_aligned && row_bytes >= 0 && steps == 2 * n && rows.is_multiple_of(SIDE) {
            return Broadcast { ptr: first.cast(), row: x.row_stride / 2, step: 1 };
        }
        // SAFETY: promised by the caller; `to` has whole tiles of rows.
        unsafe { S::apart(CopyRows { from: first, stride: x.row_stride, rows, steps, lanes: n, to }) };
        // One row stands for all of its tile.
        Broadcast { ptr: to, row: if rows == 1 { 0 } else { n as isize }, step: 1 }
    }

    unsafe fn multiply(blocks: Blocks<S, Self>) {
        let Blocks { rows, lanes, b, panels, w, panel_lanes, y, first } = blocks;
        let width = S::Q_VECS * S::LANES;
        for panel in 0..panels {
            let w = w.wrapping_add(panel * panel_lanes);
            let mut t = 0;
            loop {
                let n = (lanes - t).min(RUN);
                let operands = Operands {
                    a: of_rows(b, t),
                    b: of_panel(w.wrapping_add(t * width), width),
                    c: of_sums(y.ptr.wrapping_add(panel * width), y.row),
                    steps: n / SIDE,
                    parts: Parts::Whole,
                    from_zero: first && t == 0,
                };
                // SAFETY: promised by the caller: x, w and y have whole tiles.
                unsafe { rows_of_tiles(rows.div_ceil(SIDE), width, operands) };
                t += n;
                if t >= lanes {
                    break;
                }
            }
        }
    }

    unsafe fn multiply_row(row: OneRow<S, Self>) {
        let OneRow { lanes, b, panels, w, panel_lanes, y } = row;
        let (width, unit) = (S::Q_VECS * S::LANES, unit());
        let x = Broadcast { ptr: b, row: 0, step: 1 };
        for panel in (0..panels).step_by(2) {
            let operands = |panel: usize| Operands {
                a: of_rows(x, 0),
                b: of_panel(w.wrapping_add(panel * panel_lanes), width),
                c: of_sums(y.wrapping_add(panel * width), SUM_ROW),
                steps: lanes / SIDE,
                parts: Parts::Whole,
                from_zero: true,
            };
            // SAFETY: promised by the caller: w and y have whole tiles.
            unsafe {
                multiply::<1, 2>(unit, &operands(panel));
                if panel + 1 < panels {
                    multiply::<1, 2>(unit, &operands(panel + 1));
                }
            }
        }
    }
}

/// Lanes of the contraction for which a panel (24 KiB) and two rows of tiles of x stay in L1.
const RUN: usize = 192;

/// Rows of x from lane `t` on.
pub(super) fn of_rows(b: Broadcast<f32>, t: usize) -> InMemory<*const u8> {
    let row = b.row as usize * size_of::<f32>();
    InMemory { ptr: b.ptr.wrapping_add(t).cast(), next: SIDE * row, along: ROW_BYTES, part: 0, row }
}

/// A panel of `width` columns.
pub(super) fn of_panel(w: *const f32, width: usize) -> InMemory<*const u8> {
    let row = width * size_of::<f32>();
    InMemory { ptr: w.cast(), next: ROW_BYTES, along: SIDE * row, part: 0, row }
}

/// Sums in rows of `row` elements.
pub(super) fn of_sums(y: *mut f32, row: usize) -> InMemory<*mut u8> {
    let row = row * size_of::<f32>();
    InMemory { ptr: y.cast(), next: SIDE * row, along: ROW_BYTES, part: 0, row }
}

/// Rows of `steps` numbers to rows of `lanes` lanes, zeros behind them and in what is left of the last tile of rows; one row stays one.
struct CopyRows {
    from: *const bf16,
    stride: isize,
    rows: usize,
    steps: usize,
    lanes: usize,
    to: *mut f32,
}

impl<S: Bf16Pairs> Part<S> for CopyRows {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let CopyRows { from, stride, rows, steps, lanes, to } = self;
        let all = if rows == 1 { 1 } else { rows.next_multiple_of(SIDE) };
        for r in 0..all {
            let row = (r < rows).then(|| from.wrapping_offset(r as isize * stride));
            for lane in (0..lanes).step_by(SIDE) {
                // SAFETY: the caller vouches for the rows of x, and for whole tiles of rows of lanes.
                unsafe { row_of_tile::<S>(row, 1, 2 * lane, steps, to.add(r * lanes + lane)) };
            }
        }
    }
}
