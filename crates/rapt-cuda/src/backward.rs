//! Gradients as kernels see them: byte for byte `BackwardParams` of kernels/backward/request.cuh.
//!
//! Made without addresses when a request is planned; a run fills these in. Deliberately absent: any choice.

use rapt_core::{BackwardOperands, BackwardSpec, Causal, TensorSpec, View};

use crate::access::{is_in_pairs, strides};
use crate::params::{DroppedParams, DroppingParams, Params, int};

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
        }
    }

    /// These parameters of a launch with so many blocks of own rows of a head.
    pub(crate) fn with_units(self, units: usize) -> Self {
        BackwardParams { units: int(units), ..self }
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
    size_of::<BackwardParams>() == size_of::<DroppedParams>() + 8 * 8 + (5 * 4 + 3 + 1) * 8 + 4 * 4 + 4 * 8 + 8 * 4,
    "BackwardParams has padding"
);
