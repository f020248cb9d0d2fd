//! decode.cu: which requests it takes, into which chunks their keys are split, and who takes them.
//!
//! Few queries: at most 16 per head and 64 rows per head of K and V. The length of a chunk follows kv_len alone. Whether blocks take
//! whole rows or chunks depends on the device too, and changes no bit (the kernels fold chunks in one order).

use rapt_core::{Kernel, Spec};

use super::{Caps, tensor_cores};
use crate::variant::{Algorithm, DECODE_BLOCK_M, KernelVariant};

/// Keys of one chunk: 256 KiB of K and V at head_dim 128, some 8 µs of one multiprocessor's share of an H200's bandwidth.
const CHUNK: usize = 512;
/// Chunks of decode.cu where there are enough keys, longest first: from so many on, so many each. Each chunk handed over costs
/// its block, and each that is left to combine.cu costs that (16,384 keys, 4 × 8 heads: 73 µs by 512, 71 by 1024, H200, 2026-11).
const CHUNKS: [(usize, usize); 2] = [(64 * 1024, 2048), (16 * 1024, 1024)];
/// Keys from which on chunks of generic.cu are twice as long.
const LONG: usize = 32 * 1024;
/// So few splits follow one another in a block: a second launch would cost more.
const FEW_SPLITS: usize = 2;
/// Most queries per head, and rows per head of K and V, that are read as decoding.
const DECODE_QUERIES: usize = 16;
const DECODE_ROWS: usize = 64;
/// Shared memory of decode.cu where one block is alone on its multiprocessor: deeper rings gave nothing.
const ALONE_SHARED: u32 = 176 * 1024;

/// Whether the queries are few.
pub(super) fn is_few(spec: &Spec) -> bool {
    spec.q_len() <= DECODE_QUERIES && spec.group_size() * spec.q_len() <= DECODE_ROWS
}

/// Chunks of the keys of few queries, and keys of each.
pub(super) fn chunks(kernel: Kernel, kv_len: usize) -> (usize, usize) {
    let chunk = match kernel {
        Kernel::Decode => CHUNKS.iter().find(|(least, _)| kv_len >= *least).map_or(CHUNK, |(_, chunk)| *chunk),
        _ if kv_len < LONG => CHUNK,
        _ => 2 * CHUNK,
    };
    (kv_len.div_ceil(chunk).max(1), chunk)
}

/// The variant of decode.cu, with as deep a ring as leaves its place on a multiprocessor.
pub(super) fn variant(spec: &Spec, caps: &Caps) -> KernelVariant {
    let tile = KernelVariant::decode_tile(tensor_cores::padded_dims(spec));
    let of = |warp_stages| KernelVariant {
        warp_stages,
        ..tensor_cores::tensor_core_variant(spec, caps, Algorithm::Decode, [DECODE_BLOCK_M, tile])
    };
    let most = if of(1).decode_warps() == 8 { ALONE_SHARED } else { tensor_cores::LEAST_SHARED };
    let deep = [4, 3].into_iter().map(of).find(|variant| variant.shared_bytes() <= most.min(caps.shared_bytes));
    // The widest heads leave room for two tiles on the largest devices only.
    deep.unwrap_or_else(|| if of(2).shared_bytes() <= caps.shared_bytes { of(2) } else { of(1) })
}

/// Blocks for `rows` blocks of rows of `num_splits` chunks each, and whether they take chunks.
pub(super) fn blocks(caps: &Caps, variant: &KernelVariant, rows: usize, num_splits: usize) -> (usize, bool) {
    let resident = ((caps.shared_bytes + 1024) / (variant.shared_bytes() + 1024)).clamp(1, variant.decode_resident());
    let slots = (caps.multiprocessors * resident).max(1) as usize;
    // One block to a multiprocessor reads nearly as fast as two.
    let places = if rows <= caps.multiprocessors as usize { caps.multiprocessors as usize } else { slots };
    let is_even = rows * 10 >= rows.div_ceil(places.max(1)) * places * 9;
    if num_splits <= FEW_SPLITS || is_even {
        (rows.min(slots), false)
    } else {
        (rows.saturating_mul(num_splits).min(slots), true)
    }
}
