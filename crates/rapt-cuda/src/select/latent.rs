//! latent.cu: which requests it takes, its tiles, and into which chunks their keys are split.
//!
//! Few queries of heads just beyond 512 with values of 512 at most: what multi-head latent attention asks for. Whether values lie in the
//! keys, the kernel sees by itself: it changes neither its machine code nor a bit.

use rapt_core::{DType, Spec};

use super::{Caps, decode, tensor_cores};
use crate::partition::ChunkRule;
use crate::variant::{Algorithm, KernelVariant, Sequences};

/// Rows per block.
const BLOCK_M: u32 = 64;
/// Keys per tile, the first that fits.
const TILES: [u32; 2] = [64, 32];
/// Head dims of keys beyond the first and up to the second, and the widest values.
const DIMS: (usize, usize) = (512, 576);
const DIM_V: usize = 512;
/// Most rows per head of K and V: 128 heads and 4 queries each.
const ROWS: usize = 512;
/// Rows up to which chunks are as decode.cu's.
const FEW_ROWS: usize = 32;

/// Whether it would take `spec`, or a sequence of it alone, on a device with shared memory for it.
pub(super) fn has_dims(spec: &Spec) -> bool {
    let is_served = matches!(spec.numerics.storage, DType::F16 | DType::BF16) && !spec.is_quantized();
    is_served && spec.head_dim() > DIMS.0 && spec.head_dim() <= DIMS.1 && spec.head_dim_v() <= DIM_V
}

/// Whether it takes `spec` on a device with shared memory for it.
pub(super) fn is_for(spec: &Spec) -> bool {
    let few = spec.q_len() <= decode::DECODE_QUERIES && spec.group_size() * spec.q_len() <= ROWS;
    has_dims(spec) && few && spec.kv_len() > 0 && tensor_cores::sequences(spec) != Sequences::Varlen
}

/// The variant with the largest tile that fits, if one does.
pub(super) fn variant(spec: &Spec, caps: &Caps) -> KernelVariant {
    let dims = (spec.head_dim().next_multiple_of(64) as u32, spec.head_dim_v().next_multiple_of(128) as u32);
    let of = |block_n| KernelVariant {
        dims,
        ..tensor_cores::tensor_core_variant(spec, caps, Algorithm::Latent, [BLOCK_M, block_n])
    };
    let fits = |variant: &KernelVariant| variant.shared_bytes() <= caps.shared_bytes;
    TILES.into_iter().map(of).find(fits).unwrap_or_else(|| of(TILES[TILES.len() - 1]))
}

/// Into which chunks keys are split. Each leaves 2 KiB a row to combine.cu, beside the 1152 bytes of a key: the more rows, the sooner they
/// are long.
pub(super) fn chunk_rule(spec: &Spec) -> ChunkRule {
    let is_light = spec.group_size() * spec.q_len() <= FEW_ROWS;
    let long_from = if is_light { [16 * 1024, 64 * 1024] } else { [4 * 1024, 32 * 1024] };
    ChunkRule { keys: [512, 1024, 2048], long_from }
}
