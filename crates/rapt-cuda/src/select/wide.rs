//! wide.cu: its tiles, and into which chunks keys are split.

use rapt_core::Spec;

use super::{Caps, tensor_cores};
use crate::variant::{Algorithm, KernelVariant, WIDE_PIECE_BYTES};

/// Queries per block.
const BLOCK_M: u32 = 64;
/// Keys per tile and pieces in flight, the first that fits: few large tiles need fewer barriers.
const TILES: [(u32, u32); 6] = [(64, 6), (64, 5), (64, 4), (32, 6), (32, 4), (32, 2)];
/// About as many blocks as keep the largest devices busy with one head; the fewest keys of a chunk.
const BLOCKS: usize = 128;
const LEAST_CHUNK: usize = 256;

/// The variant of wide.cu with the largest tile that fits, if one does.
pub(super) fn variant(spec: &Spec, caps: &Caps) -> KernelVariant {
    let piece = WIDE_PIECE_BYTES / spec.numerics.storage.size_bytes() as u32;
    let padded = |dim: usize| (dim as u32).next_multiple_of(piece);
    let of = |(block_n, stages)| KernelVariant {
        stages,
        dims: (padded(spec.head_dim()), padded(spec.head_dim_v())),
        ..tensor_cores::tensor_core_variant(spec, caps, Algorithm::Wide, [BLOCK_M, block_n])
    };
    let fits = |variant: &KernelVariant| variant.shared_bytes() <= caps.shared_bytes;
    TILES.into_iter().map(of).find(fits).unwrap_or_else(|| of(TILES[TILES.len() - 1]))
}

/// Chunks of the keys, and keys of each (0 for one chunk): by the lengths of one head alone, whatever else there is.
pub(super) fn chunks(spec: &Spec) -> (usize, usize) {
    let wanted = BLOCKS / spec.q_len().div_ceil(BLOCK_M as usize).max(1);
    let num_splits = wanted.min(spec.kv_len() / LEAST_CHUNK);
    if num_splits < 2 {
        return (1, 0);
    }
    let chunk = spec.kv_len().div_ceil(num_splits).next_multiple_of(TILES[0].0 as usize);
    (spec.kv_len().div_ceil(chunk), chunk)
}
