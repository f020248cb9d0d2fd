//! decode.cu: which requests it takes, into which chunks their keys are split, and who takes them.
//!
//! Few queries: at most 16 per head and 64 rows per head of K and V. The length of a chunk follows kv_len alone. Whether blocks take
//! whole rows or chunks depends on the device too, and changes no bit (the kernels fold chunks in one order).

use rapt_core::{CodesSpec, DType, PagesSpec, ScaleLayout, Spec, TensorSpec};

use super::{Caps, tensor_cores};
use crate::access::{as_it_lies, strides};
use crate::codes::{CodeKind, Codes, TileCodes, TileScales};
use crate::params::MOST_LEN;
use crate::partition::ChunkRule;
use crate::variant::{Algorithm, DECODE_BLOCK_M, KernelVariant, Loads, Sequences};

/// Keys of one chunk: 256 KiB of K and V at head_dim 128, some 8 µs of one multiprocessor's share of an H200's bandwidth.
const CHUNK: usize = 512;
/// Chunks of decode.cu: longer where there are enough keys. Each chunk handed over costs its block, and each that is left to
/// combine.cu costs that (16,384 keys, 4 × 8 heads: 73 µs by 512, 71 by 1024, H200, 2026-11).
const CHUNKS: ChunkRule = ChunkRule { keys: [CHUNK, 2 * CHUNK, 4 * CHUNK], long_from: [16 * 1024, 64 * 1024] };
/// Chunks of generic.cu.
const GENERIC_CHUNKS: ChunkRule = ChunkRule { keys: [CHUNK, 2 * CHUNK, 2 * CHUNK], long_from: [32 * 1024, MOST_LEN] };
/// So few splits follow one another in a block: a second launch would cost more.
const FEW_SPLITS: usize = 2;
/// Most queries per head, and rows per head of K and V, that are read as decoding.
pub(super) const DECODE_QUERIES: usize = 16;
pub(super) const DECODE_ROWS: usize = 64;
/// Rows of a block of decode_codes.cu where there are so few.
pub(super) const FEW_ROWS: usize = 8;
/// Shared memory of decode.cu where one block is alone on its multiprocessor: deeper rings gave nothing.
const ALONE_SHARED: u32 = 176 * 1024;

/// Whether the queries are few.
pub(super) fn is_few(spec: &Spec) -> bool {
    spec.q_len() <= DECODE_QUERIES && spec.group_size() * spec.q_len() <= DECODE_ROWS
}

/// Into which chunks the keys of few queries are split.
pub(super) fn chunk_rule(variant: &KernelVariant) -> ChunkRule {
    match variant.algorithm {
        Algorithm::Decode => CHUNKS,
        // Each chunk handed over costs its block, and more where instructions are the limit; but few heads leave multiprocessors idle
        // (16 × 8 heads, 8192 keys of int8: 77 µs by 1024 and 72 by 2048; 32 heads, 4096 keys: 17 and 36; H200, 2026-11).
        Algorithm::DecodeCodes => {
            let keys = CHUNKS.keys.map(|keys| 2 * keys);
            let [long, longer] = CHUNKS.long_from;
            // Two codes in a byte: half as many chunks from 8192 keys on, of as many bytes as otherwise (8192 keys by 1024 and by 2048, µs:
            // int4 49.5 and 41.7 with 16 × 8 heads, 22.4 and 20.1 with 4 × 8, 11.8 and 15.3 with 8; nvfp4 65.3 and 58.9, 26.7 and 25.1,
            // 13.8 and 19.7; H200, 2026-11).
            let is_packed = matches!(variant.codes, Codes::Tiles { k, v } if are_packed(k, v));
            ChunkRule { keys, long_from: [if is_packed { long / 2 } else { long }, longer] }
        }
        _ => GENERIC_CHUNKS,
    }
}

/// Whether a byte holds two codes of K, and two of V.
fn are_packed(k: TileCodes, v: TileCodes) -> bool {
    k.kind.per_byte() == 2 && v.kind.per_byte() == 2
}

/// The variant of decode.cu, with as deep a ring as leaves its place on a multiprocessor.
pub(super) fn variant(spec: &Spec, caps: &Caps) -> KernelVariant {
    let tile = KernelVariant::decode_tile(tensor_cores::padded_dims(spec));
    let of = |stages| KernelVariant {
        stages,
        ..tensor_cores::tensor_core_variant(spec, caps, Algorithm::Decode, [DECODE_BLOCK_M, tile])
    };
    let most = if of(1).decode_warps() == 8 { ALONE_SHARED } else { tensor_cores::LEAST_SHARED };
    let deep = [4, 3].into_iter().map(of).find(|variant| variant.shared_bytes() <= most.min(caps.shared_bytes));
    // The widest heads leave room for two tiles on the largest devices only.
    deep.unwrap_or_else(|| if of(2).shared_bytes() <= caps.shared_bytes { of(2) } else { of(1) })
}

/// K or V in tiles of codes, whatever its strides: with factors of whole blocks of head dims that are not padded, and a zero point
/// that is taken from all codes of a key.
pub(super) fn tile_codes(tensor: &TensorSpec<4>, codes: &CodesSpec, padded_dim: u32) -> Option<TileCodes> {
    let of = TileCodes::of(codes);
    let is_served = match of.scales {
        TileScales::Block(size, _) => {
            of.kind != CodeKind::Uint8 && tensor.shape[3] == padded_dim as usize && padded_dim.is_multiple_of(size)
        }
        TileScales::Channel => of.kind != CodeKind::Uint8,
        TileScales::Uniform | TileScales::Token => true,
    };
    is_served.then_some(of)
}

/// Whether every row of codes can be moved 16 bytes at a time, and factors of 8 bits four at a time.
pub(super) fn is_wide(tensor: &TensorSpec<4>, codes: &CodesSpec, pages: Option<&PagesSpec>) -> bool {
    // Only factors of 8 bits are asked about, which each key has.
    let (step, descale) = (strides(&as_it_lies(tensor, pages)), strides(&as_it_lies(&codes.descale, pages)));
    let bytes = tensor.shape[3] / codes.format.codes_per_byte();
    let in_units = |strides: &[i64], unit: i64| strides.iter().all(|stride| stride % unit == 0);
    // Where they lie swizzled each four of a row stand side by side, and as many rows beside them.
    let steps = if codes.scale_layout == ScaleLayout::Plain { &descale[..3] } else { &descale[..2] };
    let factors = codes.descale.dtype == DType::F32
        || !codes.descale.shape[3].is_multiple_of(4)
        || (descale[3] == 1 && in_units(steps, 4) && codes.descale.alignment.bytes() >= 4);
    factors
        && bytes.is_multiple_of(16)
        && tensor.shape[3].is_multiple_of(16)
        && step[3] == 1
        && in_units(&step[..3], 16)
        && tensor.alignment.bytes() >= 16
}

/// The variant of decode_codes.cu for so many rows of a head of keys, where K and V are codes that it reads.
pub(super) fn over_codes(spec: &Spec, caps: &Caps, rows: usize) -> Option<KernelVariant> {
    let dims = tensor_cores::padded_dims(spec);
    let (of_k, of_v) = (spec.codes.k.as_deref()?, spec.codes.v.as_deref()?);
    let (k, v) = (tile_codes(&spec.k, of_k, dims.0)?, tile_codes(&spec.v, of_v, dims.1)?);
    if k.key_run(dims.0).is_none() || !v.has_blocks_of(16) {
        return None;
    }
    // Rows are columns of the products there: 8 at a time.
    let block_m = if rows <= FEW_ROWS { FEW_ROWS as u32 } else { DECODE_BLOCK_M };
    let pages = spec.pages.as_deref();
    let wide = is_wide(&spec.k, of_k, pages) && is_wide(&spec.v, of_v, pages);
    let of = |(block_n, stages)| KernelVariant {
        stages,
        loads: if wide { Loads::By16Bytes } else { Loads::ByElement },
        codes: Codes::Tiles { k, v },
        ..tensor_cores::tensor_core_variant(spec, caps, Algorithm::DecodeCodes, [block_m, block_n])
    };
    let most = if of((16, 1)).decode_resident() == 1 { caps.shared_bytes } else { tensor_cores::LEAST_SHARED };
    let fits = |variant: &KernelVariant| variant.shared_bytes() <= most.min(caps.shared_bytes);
    // The tile is the bits': it follows from dims, rows and formats alone, but for the largest on the smallest devices. Where two
    // codes are in a byte instructions are the limit, and a larger tile has fewer of them for a key.
    let is_packed = are_packed(k, v) && block_m < DECODE_BLOCK_M;
    let tiles: &[(u32, u32)] = match dims.0 + dims.1 {
        ..=256 if is_packed => &[(64, 4), (64, 3), (64, 2), (32, 3), (32, 2), (32, 1)],
        ..=256 => &[(32, 4), (32, 3), (32, 2), (32, 1)],
        _ => &[(16, 4), (16, 3), (16, 2)],
    };
    tiles.iter().chain(&[(16, 1)]).map(|tile| of(*tile)).find(fits)
}

/// How many blocks the device has room for at once.
pub(super) fn slots(caps: &Caps, variant: &KernelVariant) -> usize {
    let resident = ((caps.shared_bytes + 1024) / (variant.shared_bytes() + 1024)).clamp(1, variant.decode_resident());
    (caps.multiprocessors * resident).max(1) as usize
}

/// Blocks for `rows` blocks of rows of `num_splits` chunks each, and whether they take chunks.
///
/// Sequences with lengths of their own: each that has several chunks leaves them to combine.cu.
pub(super) fn blocks(caps: &Caps, variant: &KernelVariant, rows: usize, num_splits: usize) -> (usize, bool) {
    let slots = slots(caps, variant);
    // One block to a multiprocessor reads nearly as fast as two.
    let places = if rows <= caps.multiprocessors as usize { caps.multiprocessors as usize } else { slots };
    let is_even = rows * 10 >= rows.div_ceil(places.max(1)) * places * 9;
    if variant.sequences != Sequences::Even {
        (rows.saturating_mul(num_splits).min(slots), num_splits > 1)
    } else if num_splits <= FEW_SPLITS || is_even {
        (rows.min(slots), false)
    } else {
        (rows.saturating_mul(num_splits).min(slots), true)
    }
}
