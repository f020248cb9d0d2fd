//! Gradients as kernels see them: byte for byte `BackwardParams` of kernels/backward/request.cuh.
//!
//! Made without addresses when a request is planned; a run fills these in. Deliberately absent: any choice.

use rapt_core::{BackwardOperands, BackwardSpec, Causal, TensorSpec, View};

use crate::access::{is_in_pairs, moves_by, strides};
use crate::params::{DroppedParams, DroppingParams, Params, int};
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
    zeroed_words: i32,
    again: i32,
    padding: i32,
}

/// Rows of a tile of queries of backward_hopper.cu, and keys of an item.
pub(crate) const HOPPER_ROWS: usize = 64;
pub(crate) const HOPPER_KEYS: usize = 128;
/// Key tiles of a head that are taken one after another where every query sees every key, before the next heads' are: all begin at the first
/// queries, and each waits for the dq of the one before it (docs/lab/cuda.md).
const RUN: usize = 4;

/// What backward_hopper.cu takes, byte for byte `BackwardHopperParams` of kernels/backward/hopper_load.cuh.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardHopperParams {
    maps: [TensorMap; 4],
    of: BackwardParams,
    items: HopperItems,
    padding: [i32; padding(size_of::<BackwardParams>() + size_of::<HopperItems>())],
}

/// Numbers of 32 bits from so many bytes up to the alignment of maps.
const fn padding(bytes: usize) -> usize {
    (bytes.next_multiple_of(64) - bytes) / 4
}

/// The items of backward_hopper.cu, and the order in which they are taken.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HopperItems {
    items: i32,
    key_tiles: i32,
    run: i32,
    run_heads: i32,
}

impl HopperItems {
    /// Where positions bound the keys, each item begins with the first queries that see it, and a head is one run. Else as many heads take a run each in
    /// turn as give `blocks` items. dq is summed in the order of the keys either way.
    pub(crate) fn new(spec: &BackwardSpec, blocks: usize) -> Self {
        let forward = spec.forward();
        let key_tiles = forward.kv_len().div_ceil(HOPPER_KEYS);
        let matrices = forward.batch().saturating_mul(forward.num_kv_heads());
        let (run, run_heads) = if forward.block_range().is_unbounded() {
            let run = RUN.min(key_tiles).max(1);
            (run, (blocks / run).max(1))
        } else {
            (key_tiles.max(1), 1)
        };
        HopperItems {
            items: int(matrices.saturating_mul(key_tiles)),
            key_tiles: int(key_tiles),
            run: int(run),
            run_heads: int(run_heads),
        }
    }

    /// How many there are.
    pub(crate) const fn count(&self) -> usize {
        self.items as usize
    }
}

impl BackwardHopperParams {
    /// `of` has addresses; `maps` are of q, k, v and d_o as they lie there.
    pub(crate) fn new(of: BackwardParams, items: HopperItems, maps: [TensorMap; 4]) -> Self {
        BackwardHopperParams { maps, of, items, padding: Default::default() }
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of maps, `BackwardParams` and integers, borrowed with self; what follows its last number up to the
        // alignment is a field, and the assertion on its size below proves that there is no other padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<BackwardHopperParams>()) }
    }
}

/// Where the parts of the workspace lie behind the states of rows, of a plan with backward_hopper.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HopperWorkspace {
    log2_lse: usize,
    dq_sums: usize,
    zeroed: usize,
    zeroed_words: usize,
    padded_rows: usize,
    pub(crate) bytes: usize,
}

impl HopperWorkspace {
    /// Behind `states` bytes; `columns` of dq in two halves.
    pub(crate) fn new(spec: &BackwardSpec, states: usize, columns: usize) -> Self {
        let forward = spec.forward();
        let matrices = forward.batch().saturating_mul(forward.num_q_heads());
        let tiles = forward.q_len().div_ceil(HOPPER_ROWS);
        let padded_rows = tiles * HOPPER_ROWS;
        let rows = matrices.saturating_mul(padded_rows);
        let zeroed_words = matrices
            .saturating_mul(2 * tiles)
            .saturating_add(forward.batch().saturating_mul(forward.num_kv_heads()))
            .saturating_add(2);
        let log2_lse = states.next_multiple_of(16);
        let dq_sums = log2_lse.saturating_add(rows.saturating_mul(2 * 4));
        let zeroed = dq_sums.saturating_add(rows.saturating_mul(4 * columns));
        let bytes = zeroed.saturating_add(zeroed_words.saturating_mul(4));
        HopperWorkspace { log2_lse, dq_sums, zeroed, zeroed_words, padded_rows, bytes }
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
        let by_8 = |tensor: &TensorSpec<4>| tensor.dtype == forward.numerics.storage && moves_by(tensor, 8);
        let rows_wide = forward.numerics.storage.size_bytes() == 2 && by_8(spec.d_o()) && by_8(&forward.out);
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
            zeroed_words: 0,
            again: 0,
            padding: 0,
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

    /// These parameters with a workspace at `workspace` that backward_hopper.cu has parts of.
    pub(crate) fn with_hopper(self, of: &HopperWorkspace, workspace: usize) -> Self {
        BackwardParams {
            log2_lse: workspace + of.log2_lse,
            dq_sums: workspace + of.dq_sums,
            zeroed: workspace + of.zeroed,
            padded_rows: int(of.padded_rows),
            zeroed_words: int(of.zeroed_words),
            ..self
        }
    }

    /// Addresses of what TMA may load: q, k, v and d_o.
    pub(crate) fn loaded(&self) -> [usize; 4] {
        let [q, k, v, ..] = self.all.params.mapped();
        [q, k, v, self.d_o]
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
    size_of::<BackwardParams>() == size_of::<DroppedParams>() + 11 * 8 + (5 * 4 + 3 + 1) * 8 + 4 * 4 + 4 * 8 + 16 * 4,
    "BackwardParams has padding"
);
const _: () = assert!(
    size_of::<BackwardHopperParams>()
        == 4 * 128
            + size_of::<BackwardParams>()
            + size_of::<HopperItems>()
            + 4 * padding(size_of::<BackwardParams>() + size_of::<HopperItems>()),
    "BackwardHopperParams has padding"
);
