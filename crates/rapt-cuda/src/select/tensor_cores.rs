//! What the variants of the tensor-core kernels have in common: padded head dims, natural scores, loads of 16 bytes.
//!
//! Deliberately absent: which of them serves a request (rules.rs), and their tiles.

use rapt_core::{DType, MaskClass, Spec};

use super::Caps;
use crate::access::{as_it_lies, moves_by};
use crate::variant::{Algorithm, KernelVariant, Loads, Sequences};

/// Shared memory that every architecture served has for a block.
pub(super) const LEAST_SHARED: u32 = 99 * 1024;

pub(super) fn mask_class(spec: &Spec) -> MaskClass {
    match spec.mask {
        None => MaskClass::None,
        Some(mask) if mask.dtype == DType::Bool => MaskClass::Bool,
        Some(_) => MaskClass::Additive,
    }
}

/// Whether scores need their scale before the exponent: something is added to them, or it is no ordinary positive number.
pub(super) fn is_natural(spec: &Spec, mask: MaskClass) -> bool {
    let plain = spec.softcap.is_none() && spec.alibi_slopes.is_none() && mask != MaskClass::Additive;
    !(plain && has_ordinary_scale(spec))
}

/// Whether the scale may go into the exponent.
pub(super) fn has_ordinary_scale(spec: &Spec) -> bool {
    (1e-30..1e30).contains(&spec.softmax_scale.get())
}

/// head_dim and head_dim_v, rounded up to 16.
pub(super) fn padded_dims(spec: &Spec) -> (u32, u32) {
    let padded = |dim: usize| (dim.next_multiple_of(16)) as u32;
    (padded(spec.head_dim()), padded(spec.head_dim_v()))
}

/// How keys are told apart by batch entry.
pub(super) const fn sequences(spec: &Spec) -> Sequences {
    match (&spec.pages, &spec.lengths, &spec.varlen) {
        (Some(_), ..) => Sequences::Paged,
        (None, Some(_), _) => Sequences::Ragged,
        (None, None, Some(_)) => Sequences::Varlen,
        (None, None, None) => Sequences::Even,
    }
}

/// Whether every row of q can be moved 16 bytes at a time.
pub(super) fn moves_queries(spec: &Spec) -> bool {
    moves_by(&spec.q, 16)
}

/// The variant of generic.cu for numbers.
pub(super) fn generic_variant(spec: &Spec, caps: &Caps) -> KernelVariant {
    let mask = spec.mask.map(|mask| mask.dtype);
    KernelVariant {
        sequences: sequences(spec),
        dropout: spec.dropout.is_some(),
        ..KernelVariant::generic(caps.arch, spec.numerics.storage, mask)
    }
}

/// A variant with tiles of so many queries and keys, loaded 16 bytes at a time where strides and alignment of q, k and v allow it.
pub(super) fn tensor_core_variant(
    spec: &Spec,
    caps: &Caps,
    algorithm: Algorithm,
    [block_m, block_n]: [u32; 2],
) -> KernelVariant {
    let pages = spec.pages.as_deref();
    let tensors = [spec.q, as_it_lies(&spec.k, pages), as_it_lies(&spec.v, pages)];
    let wide = tensors.iter().all(|tensor| moves_by(tensor, 16));
    KernelVariant {
        algorithm,
        natural: is_natural(spec, mask_class(spec)),
        loads: if wide { Loads::By16Bytes } else { Loads::ByElement },
        dims: padded_dims(spec),
        block_m,
        block_n,
        ..generic_variant(spec, caps)
    }
}
