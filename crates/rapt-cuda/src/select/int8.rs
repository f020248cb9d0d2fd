//! int8.cu: products of int8, which a request asks for by its `compute`.
//!
//! One kernel for few queries and many, whatever the device: what the codes of a row are follows from its keys, block by block of the
//! definition. Deliberately absent: which operands are served, which a spec has checked.

use rapt_core::{Compute, Error, INT8_BLOCK, Result, Spec};

use super::Caps;
use super::decode::is_wide;
use super::tensor_cores::{self, LEAST_SHARED};
use crate::codes::{Codes, TileCodes};
use crate::variant::{Algorithm, KernelVariant, Loads};

/// Widest head: sums of so many products stay below 2^22, as the kernel counts.
const MOST_DIM: usize = 256;
/// Queries per block.
const BLOCK_M: u32 = 64;

/// Whether a request asks for it.
pub(super) fn is_for(spec: &Spec) -> bool {
    spec.compute == Compute::Int8
}

/// That there is a kernel, where it is asked for.
///
/// # Errors
/// [`Error::Unsupported`] for wider heads.
pub(super) fn check(spec: &Spec) -> Result<()> {
    let dim = spec.head_dim().max(spec.head_dim_v());
    if !is_for(spec) || dim <= MOST_DIM {
        return Ok(());
    }
    Err(Error::unsupported(
        format!("compute=\"int8\" with head dim {dim} on {}", spec.device),
        format!("its kernel for NVIDIA GPUs holds heads of up to {MOST_DIM}"),
        "leave compute at \"exact\": the codes of k and v stay as they are; or compute in host memory",
    ))
}

/// The variant that serves `spec`.
pub(super) fn variant(spec: &Spec, caps: &Caps) -> KernelVariant {
    let plain = tensor_cores::tensor_core_variant(spec, caps, Algorithm::Int8, [BLOCK_M, INT8_BLOCK as u32]);
    let padded = |dim: usize| dim.max(1).next_multiple_of(32) as u32;
    let (k, v) = (spec.codes.k.as_deref(), spec.codes.v.as_deref());
    let pages = spec.pages.as_deref();
    let rows = k.is_some_and(|k| is_wide(&spec.k, k, pages)) && v.is_some_and(|v| is_wide(&spec.v, v, pages));
    let codes = k.zip(v).map_or(Codes::None, |(k, v)| Codes::Tiles { k: TileCodes::of(k), v: TileCodes::of(v) });
    let variant = KernelVariant {
        loads: if rows && tensor_cores::moves_queries(spec) { Loads::By16Bytes } else { Loads::ByElement },
        dims: (padded(spec.head_dim()), padded(spec.head_dim_v())),
        codes,
        ..plain
    };
    debug_assert!(variant.shared_bytes() <= LEAST_SHARED, "{variant} fits every device");
    variant
}
