//! mma.cu over codes: which K and V it takes, and its tiles.
//!
//! Many queries of f16 or bf16. A code becomes a number of 16 bits in shared memory, exact with the factors of its block; other factors are
//! multiplied into scores, weights and sums (kernels/mma/coded_tiles.cuh). The tiles follow from dims and formats alone.
//! Deliberately absent: few queries (decode.rs).

use rapt_core::{DType, Spec};

use super::Caps;
use super::decode::{is_wide, tile_codes};
use super::tensor_cores::{self, LEAST_SHARED};
use crate::codes::{Codes, Operand};
use crate::variant::{Algorithm, KernelVariant, Loads};

/// The variant, where mma.cu takes K and V.
pub(super) fn variant(spec: &Spec, caps: &Caps) -> Option<KernelVariant> {
    let dims = tensor_cores::padded_dims(spec);
    let (of_k, of_v) = (spec.codes.k.as_deref()?, spec.codes.v.as_deref()?);
    let (k, v) = (tile_codes(&spec.k, of_k, dims.0)?, tile_codes(&spec.v, of_v, dims.1)?);
    // Eight codes at a time have one factor.
    if !(k.has_blocks_of(8) && v.has_blocks_of(8)) {
        return None;
    }
    // Beside numbers that float16 does not hold q and weights are bfloat16.
    let fits = k.fits_float16(Operand::K) && v.fits_float16(Operand::V);
    if spec.numerics.storage == DType::F16 && !fits {
        return None;
    }
    let pages = spec.pages.as_deref();
    let rows = is_wide(&spec.k, of_k, pages) && is_wide(&spec.v, of_v, pages);
    let of = |tile: [u32; 2]| {
        let plain = tensor_cores::tensor_core_variant(spec, caps, Algorithm::Mma, tile);
        // Of K and V their strides are those of bytes.
        let loads = if rows && tensor_cores::moves_queries(spec) { Loads::By16Bytes } else { Loads::ByElement };
        KernelVariant { loads, codes: Codes::Tiles { k, v }, ..plain }
    };
    // As many keys as leave a warp's scores and sums in registers beside two fragments of queries.
    let first = of([128, 64]);
    let is_plain = !first.natural && first.mask.is_none();
    let keys = match dims.0.max(dims.1) {
        0..=64 if is_plain => 96,
        65..=128 if is_plain => 48,
        _ => 64,
    };
    let tiles = [[128, keys], [64, 64], [64, 48], [64, 32], [64, 16]];
    let fits = |variant: &KernelVariant| variant.shared_bytes() <= LEAST_SHARED;
    tiles.into_iter().filter(|[block_m, _]| *block_m == 64 || dims.1 <= 128).map(of).find(fits)
}
