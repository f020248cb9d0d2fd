//! Gradients as kernels see them: byte for byte `BackwardParams` of kernels/backward/request.cuh.
//!
//! Made without addresses when a request is planned; a run fills these in. Deliberately absent: any choice.

use rapt_core::{BackwardOperands, BackwardSpec, Causal, Spec, TensorSpec, VarlenSpec, View};

use crate::access::{is_in_pairs, moves_by, strides};
use crate::params::{DroppedParams, DroppingParams, Params, int, shift};
use crate::tensor_map::TensorMap;

/// The one parameter of every kernel of a backward pass. Pointers are device addresses; 0 where there is no such tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardParams {
    all: DroppedParams,
    d_o: usize,
    d_lse: usize,
    dq: usize,
    dk: usize,
    dv: usize,
    d_mask: usize,
    d_sinks: usize,
    states: usize,
    log2_lse: usize,
    dq_sums: usize,
    zeroed: usize,
    key_tiles: usize,
    mask_sums: usize,
    d_o_stride: [i64; 4],
    dq_stride: [i64; 4],
    dk_stride: [i64; 4],
    dv_stride: [i64; 4],
    d_mask_stride: [i64; 4],
    d_lse_stride: [i64; 3],
    d_sinks_stride: i64,
    d_mask_size: [i32; 4],
    /// Where sequences begin that lie one after another: of queries, and of keys.
    offsets: [usize; 2],
    offsets_step: [i64; 2],
    mask_parts: i64,
    sequences: i32,
    bottom_right: i32,
    batch: i32,
    kv_heads: i32,
    /// Blocks of own rows of a head.
    units: i32,
    dq_pairs: i32,
    dk_pairs: i32,
    dv_pairs: i32,
    dq_wide: i32,
    dk_wide: i32,
    dv_wide: i32,
    rows_wide: i32,
    padded_rows: i32,
    sum_rows: i32,
    zeroed_words: i32,
    key_units: i32,
    key_set: i32,
    key_step: i32,
    long_queries: i32,
    again: i32,
}

/// Rows of a tile of queries of backward_hopper.cu and backward_hopper_wide.cu, of the former's heads of up to 64 columns, and of those beyond whose dq it
/// computes transposed.
pub(crate) const HOPPER_ROWS: usize = 64;
pub(crate) const HOPPER_TALL_ROWS: usize = 128;
pub(crate) const HOPPER_TURNED_ROWS: usize = 80;
/// Keys of an item of backward_hopper.cu, and of backward_hopper_wide.cu.
pub(crate) const HOPPER_KEYS: usize = 128;
pub(crate) const HOPPER_WIDE_KEYS: usize = 64;
/// Rows of dq that a warp of backward_hopper.cu sums.
const WARP_ROWS: usize = 16;
/// Words of kernels/backward/request.cuh that are zeros.
const ZERO_WORDS: usize = 128 * 128 / 4;
/// Bytes of `KeyTile` of kernels/backward/key_tile.cuh.
const KEY_TILE_BYTES: usize = 48;
/// What heads that are taken together may have in all of q, d_o and sums of dq, so that these stay in L2 between items: a third of an H100's.
const TOGETHER_BYTES: usize = 16 << 20;
/// From how many queries on items whose queries are bound from one side are taken long ones first (docs/lab/cuda.md).
const LONG_QUERIES: usize = 8192;

/// What backward_hopper.cu takes, byte for byte `BackwardHopperParams` of kernels/backward/hopper_load.cuh.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardHopperParams {
    maps: [TensorMap; 5],
    of: BackwardParams,
    items: HopperItems,
    mask_unit: i32,
    padding: [i32; padding(size_of::<BackwardParams>() + size_of::<HopperItems>() + size_of::<i32>())],
}

/// Numbers of 32 bits from so many bytes up to the alignment of maps.
const fn padding(bytes: usize) -> usize {
    (bytes.next_multiple_of(64) - bytes) / 4
}

/// The items of backward_hopper.cu, and the order in which they are taken: byte for byte `Items` of kernels/backward/hopper_items.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HopperItems {
    count: i32,
    key_tiles: i32,
    heads: i32,
    step: i32,
    matrices: i32,
    kv_heads: i32,
    q_len: i32,
    kv_len: i32,
    lo_shift: i32,
    hi_shift: i32,
    /// Of how many sequences tiles are taken together, and from how many queries on a sequence's own `step` is the other one: read by the pass over
    /// rows, as `key_set` and `long_queries`.
    sequences: i32,
    long_queries: i32,
}

impl HopperItems {
    /// The order of keys follows from one head alone, as dq is summed in it; how many heads are taken together changes no bit.
    ///
    /// Where positions bound the queries of a key from above or below, items are taken short ones first: of two that follow one another each begins with
    /// queries that the other does not see, and neither waits. Where items are long, or a head is few of them (groups), long ones first: they would be
    /// the last to end, while other blocks have nothing left. Where every query sees every key, items of a head follow one another a tile apart, whichever
    /// is first. Heads taken together make these distances: too few, and blocks wait for one another; too many, and L2 does not hold what they share
    /// (docs/lab/cuda.md).
    pub(crate) fn new(spec: &BackwardSpec, keys: usize, blocks: usize) -> Self {
        let forward = spec.forward();
        let (q_len, kv_len) = (forward.q_len(), forward.kv_len());
        let key_tiles = tiles_of(forward, kv_len, keys);
        let heads_of_one = forward.num_kv_heads();
        let entries = forward.varlen.as_deref().map_or(forward.batch(), VarlenSpec::sequences);
        let matrices = entries.saturating_mul(heads_of_one);
        let group = forward.num_q_heads() / forward.num_kv_heads().max(1);
        let range = forward.block_range();
        // At most: sums of narrow heads have fewer columns.
        let row_bytes = 2 * (forward.head_dim() + forward.head_dim_v()) + 4 * forward.head_dim().next_multiple_of(64);
        let rows = forward.varlen.as_deref().map_or(q_len, |of| q_len / of.sequences().max(1));
        let in_l2 = |times: usize| times * TOGETHER_BYTES / group.saturating_mul(rows).saturating_mul(row_bytes).max(1);
        // A quarter of the blocks: four of a head at a time.
        let quarter = blocks.div_ceil(4);
        let (lo_shift, hi_shift) = range.shifts();
        let sees_all_later = forward.causal.is_none() && forward.window.right.is_none();
        // Bound from both sides all items are as long.
        let is_one_sided = sees_all_later || forward.window.left.is_none();
        let short_first = if sees_all_later { -1 } else { 1 };
        let (step, heads) = match (range.is_unbounded(), group > 1) {
            (true, _) => (-1, in_l2(2).clamp(8.min(quarter), quarter)),
            (false, true) => (-short_first, quarter),
            (false, false) if is_one_sided && rows >= LONG_QUERIES => {
                (-short_first, in_l2(8).clamp(4.min(quarter), quarter))
            }
            (false, false) => (short_first, in_l2(1).min(matrices / 16)),
        };
        // A sequence's order is that of a call of its own.
        let is_by_length = forward.varlen.is_some() && is_one_sided && !range.is_unbounded() && group == 1;
        let (step, long_queries) = if is_by_length { (short_first, int(LONG_QUERIES)) } else { (step, i32::MAX) };
        // So many heads, and of sequences, if that is fewer, several of these.
        let matrices = forward.batch().saturating_mul(heads_of_one);
        let heads_together = heads.clamp(1, matrices.max(1));
        let sequences = if forward.varlen.is_some() { heads.div_ceil(heads_together).max(1) } else { 1 };
        HopperItems {
            count: int(matrices.saturating_mul(key_tiles)),
            key_tiles: int(key_tiles),
            heads: int(heads_together),
            step,
            matrices: int(matrices),
            kv_heads: int(forward.num_kv_heads()),
            q_len: int(q_len),
            kv_len: int(kv_len),
            lo_shift: shift(lo_shift),
            hi_shift: shift(hi_shift),
            sequences: int(sequences),
            long_queries,
        }
    }

    /// How many there are.
    pub(crate) const fn count(&self) -> usize {
        self.count as usize
    }

    /// These, with tiles of so many sequences taken together.
    #[cfg(test)]
    pub(crate) fn of_sequences(self, sequences: usize) -> Self {
        HopperItems { sequences: int(sequences), ..self }
    }

    /// The bytes that a launch passes.
    #[cfg(test)]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of integers, borrowed with self: it has no padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<HopperItems>()) }
    }
}

impl BackwardHopperParams {
    /// `of` has addresses; `maps` are of q, k, v, d_o and the mask as they lie there, or of `mask_unit` bytes of a mask's row at a time.
    pub(crate) fn new(of: BackwardParams, items: HopperItems, mask_unit: usize, maps: [TensorMap; 5]) -> Self {
        BackwardHopperParams { maps, of, items, mask_unit: int(mask_unit), padding: Default::default() }
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of maps, `BackwardParams` and integers, borrowed with self; what follows its last number up to the
        // alignment is a field, and the assertion on its size below proves that there is no other padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<BackwardHopperParams>()) }
    }
}

/// Tiles of so many rows of a head's `len`. Of each sequence one may have fewer rows; so may one before the first, and one behind the last
/// (kernels/backward/sequences.cuh).
pub(crate) fn tiles_of(forward: &Spec, len: usize, rows: usize) -> usize {
    forward.varlen.as_deref().map_or_else(|| len.div_ceil(rows), |of| len / rows + of.sequences() + 2)
}

/// Where the parts of the workspace lie behind the states of rows, of a plan whose kernels note heads to be computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotingWorkspace {
    /// log2_lse, dq_sums and key_tiles, with backward_hopper.cu.
    sums: Option<[usize; 3]>,
    zeroed: usize,
    zeroed_words: usize,
    padded_rows: usize,
    sum_rows: usize,
    key_units: usize,
    pub(crate) bytes: usize,
}

impl NotingWorkspace {
    /// Behind `states` bytes, for notes alone.
    pub(crate) fn new(spec: &BackwardSpec, states: usize) -> Self {
        let forward = spec.forward();
        let zeroed_words = NotingWorkspace::notes(forward);
        let zeroed = states.next_multiple_of(16);
        let bytes = zeroed.saturating_add(zeroed_words.saturating_mul(4));
        NotingWorkspace { sums: None, zeroed, zeroed_words, padded_rows: 0, sum_rows: 0, key_units: 0, bytes }
    }

    /// Words of what is noted: how many items are taken, whether any head is odd, and whether each is, of batch entries or sequences.
    fn notes(forward: &Spec) -> usize {
        let entries = forward.varlen.as_deref().map_or(forward.batch(), VarlenSpec::sequences);
        entries.saturating_mul(forward.num_kv_heads()).saturating_add(2)
    }

    /// Where log2_lse, dq_sums and key_tiles lie; how many rows of a head the first two have, and how many tiles the last.
    #[cfg(test)]
    pub(crate) fn parts(&self) -> ([usize; 3], [usize; 3]) {
        (self.sums.expect("sums of backward_hopper.cu"), [self.padded_rows, self.sum_rows, self.key_units])
    }

    /// Where turns lie, behind notes of so many heads.
    #[cfg(test)]
    pub(crate) fn turns(&self, heads: usize) -> usize {
        self.zeroed + 4 * (2 + heads)
    }

    /// The same with sums of backward_hopper.cu; so many rows of a tile of queries and of keys, and columns of dq.
    pub(crate) fn with_sums(spec: &BackwardSpec, states: usize, [rows, keys]: [usize; 2], columns: usize) -> Self {
        let forward = spec.forward();
        let matrices = forward.batch().saturating_mul(forward.num_q_heads());
        let tiles = tiles_of(forward, forward.q_len(), rows);
        let padded_rows = tiles.saturating_mul(rows);
        let is_varlen = forward.varlen.is_some();
        let sum_rows = if is_varlen { tiles_of(forward, forward.q_len(), WARP_ROWS) * WARP_ROWS } else { padded_rows };
        let key_units = if is_varlen { tiles_of(forward, forward.kv_len(), keys) } else { 0 };
        let noted = matrices.saturating_mul(2 * tiles).saturating_add(NotingWorkspace::notes(forward));
        // Zeros begin at a multiple of 16 bytes, and are the last.
        let zeroed_words = if is_varlen { noted.next_multiple_of(4).saturating_add(ZERO_WORDS) } else { noted };
        let log2_lse = states.next_multiple_of(16);
        let dq_sums = log2_lse.saturating_add(matrices.saturating_mul(padded_rows).saturating_mul(2 * 4));
        let key_tiles = dq_sums.saturating_add(matrices.saturating_mul(sum_rows).saturating_mul(4 * columns));
        let zeroed = key_tiles.saturating_add(key_units.saturating_mul(KEY_TILE_BYTES));
        let bytes = zeroed.saturating_add(zeroed_words.saturating_mul(4));
        let sums = Some([log2_lse, dq_sums, key_tiles]);
        NotingWorkspace { sums, zeroed, zeroed_words, padded_rows, sum_rows, key_units, bytes }
    }
}

/// Bytes of the state of a row: `RowState` of kernels/backward/request.cuh.
pub(crate) const fn state_bytes(accumulation_bytes: usize) -> usize {
    4 * accumulation_bytes
}

impl BackwardParams {
    /// The parameters of `spec`, every address 0; `all` are those of its forward pass.
    pub(crate) fn new(spec: &BackwardSpec, all: Params) -> Self {
        let forward = spec.forward();
        let of = |tensor: Option<&TensorSpec<4>>| tensor.map_or([0; 4], strides);
        let pairs = |tensor: Option<&TensorSpec<4>>| {
            i32::from(tensor.is_some_and(|tensor| is_in_pairs(tensor) && tensor.shape[3].is_multiple_of(2)))
        };
        let wide = |tensor: Option<&TensorSpec<4>>| {
            i32::from(tensor.is_some_and(|tensor| tensor.dtype.size_bytes() == 2 && moves_by(tensor, 16)))
        };
        let by_16 = |tensor: &TensorSpec<4>| tensor.dtype == forward.numerics.storage && moves_by(tensor, 16);
        let rows_wide = forward.numerics.storage.size_bytes() == 2 && by_16(spec.d_o()) && by_16(&forward.out);
        let [d_o, d_lse, dq, dk, dv, d_mask, d_sinks, states] = [0; 8];
        BackwardParams {
            all: DroppedParams { params: all, dropping: DroppingParams::new(forward.dropout) },
            d_o,
            d_lse,
            dq,
            dk,
            dv,
            d_mask,
            d_sinks,
            states,
            log2_lse: 0,
            dq_sums: 0,
            zeroed: 0,
            key_tiles: 0,
            mask_sums: 0,
            d_o_stride: strides(spec.d_o()),
            dq_stride: of(spec.dq()),
            dk_stride: of(spec.dk()),
            dv_stride: of(spec.dv()),
            d_mask_stride: of(spec.d_mask()),
            d_lse_stride: spec.d_lse().map_or([0; 3], strides),
            d_sinks_stride: spec.d_sinks().map_or(0, |sinks| strides(sinks)[0]),
            d_mask_size: spec.d_mask().map_or([0; 4], |of| of.shape.map(int)),
            offsets: [0; 2],
            offsets_step: forward
                .varlen
                .as_deref()
                .map_or([0; 2], |of| [&of.cu_seqlens_q, &of.cu_seqlens_kv].map(|offsets| strides(offsets)[0])),
            mask_parts: 1,
            sequences: forward.varlen.as_deref().map_or(0, |of| int(of.sequences())),
            bottom_right: i32::from(forward.causal == Some(Causal::BottomRight)),
            batch: int(forward.batch()),
            kv_heads: int(forward.num_kv_heads()),
            units: 0,
            dq_pairs: pairs(spec.dq()),
            dk_pairs: pairs(spec.dk()),
            dv_pairs: pairs(spec.dv()),
            dq_wide: wide(spec.dq()),
            dk_wide: wide(spec.dk()),
            dv_wide: wide(spec.dv()),
            rows_wide: i32::from(rows_wide),
            padded_rows: 0,
            sum_rows: 0,
            zeroed_words: 0,
            key_units: 0,
            key_set: 1,
            key_step: 1,
            long_queries: i32::MAX,
            again: 0,
        }
    }

    /// These parameters of a launch with so many blocks of own rows of a head.
    pub(crate) fn with_units(self, units: usize) -> Self {
        BackwardParams { units: int(units), ..self }
    }

    /// These parameters of a launch that computes noted heads again, of so many blocks of a launch of all.
    pub(crate) fn with_again(self, blocks: usize) -> Self {
        BackwardParams { again: int(blocks), ..self }
    }

    /// These parameters of a mask's gradient in so many parts, with their sums at `sums`.
    pub(crate) fn with_mask_parts(self, parts: usize, sums: usize) -> Self {
        BackwardParams { mask_parts: parts as i64, mask_sums: sums, ..self }
    }

    /// These parameters of items in the order of `items`.
    pub(crate) fn with_items(self, items: &HopperItems) -> Self {
        let HopperItems { sequences, step, long_queries, .. } = *items;
        BackwardParams { key_set: sequences, key_step: step, long_queries, ..self }
    }

    /// These parameters with a workspace at `workspace` in which heads are noted.
    pub(crate) fn with_notes(self, of: &NotingWorkspace, workspace: usize) -> Self {
        let [log2_lse, dq_sums, key_tiles] = of.sums.map_or([0; 3], |sums| sums.map(|at| workspace + at));
        BackwardParams {
            log2_lse,
            dq_sums,
            key_tiles,
            zeroed: workspace + of.zeroed,
            padded_rows: int(of.padded_rows),
            sum_rows: int(of.sum_rows),
            zeroed_words: int(of.zeroed_words),
            key_units: int(of.key_units),
            ..self
        }
    }

    /// Addresses of what TMA may load: q, k, v, d_o and the mask.
    pub(crate) fn loaded(&self) -> [usize; 5] {
        let [q, k, v, _, mask] = self.all.params.mapped();
        [q, k, v, self.d_o, mask]
    }

    /// These parameters of tensors that lie where `operands` say, with states of rows at `states`.
    pub(crate) fn at(self, operands: &mut BackwardOperands<'_>, states: usize) -> Self {
        let [dq, dk, dv, d_mask, d_sinks] = operands.gradient_ptrs().map(|ptr| ptr.map_or(0, |ptr| ptr as usize));
        let tensors = operands.tensors();
        let d_lse = tensors.d_lse.as_ref().map_or(0, View::address);
        let offsets = tensors.offsets.as_ref().map_or([0; 2], |offsets| offsets.each_ref().map(View::address));
        let DroppedParams { params, dropping } = self.all;
        let all = DroppedParams { params: params.of_gradients(tensors), dropping: dropping.of(tensors.dropout) };
        BackwardParams { all, d_o: tensors.d_o.address(), d_lse, dq, dk, dv, d_mask, d_sinks, states, offsets, ..self }
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats, borrowed with self; the assertion on its size below proves that there
        // is no padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<BackwardParams>()) }
    }
}

const _: () = assert!(
    size_of::<BackwardParams>() == size_of::<DroppedParams>() + 13 * 8 + (5 * 4 + 3 + 1) * 8 + 4 * 4 + 5 * 8 + 20 * 4,
    "BackwardParams has padding"
);
const _: () = assert!(
    size_of::<BackwardHopperParams>()
        == 5 * 128
            + size_of::<BackwardParams>()
            + size_of::<HopperItems>()
            + 4
            + 4 * padding(size_of::<BackwardParams>() + size_of::<HopperItems>() + 4),
    "BackwardHopperParams has padding"
);
