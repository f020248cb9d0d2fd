//! Which kernel serves a request, and in which variant.
//!
//! The rules, in order: few queries of f16 or bf16 with head dims up to 256 → `decode`, many → `forward`, both on the
//! tensor cores (`forward` of compute capability 9.0 by wgmma: hopper.cu, and there float32 with head dims up to 128:
//! hopper_f32.cu); many queries with wider heads up to 512 → `forward` by wide.cu, float32 on compute capability 9.0; few queries of f16 or
//! bf16 with heads of 513 to 576 and values up to 512 → `decode` by latent.cu; few queries over K and V that are codes → `decode_codes`,
//! many of f16 or bf16 → `forward` by mma.cu; with dropout f16 and bf16 with head dims up to 256 → `forward` by mma.cu; anything else → `generic`. Where products of int8 are asked for, and nowhere else, → `forward_int8`
//! by int8.cu.

use rapt_core::{Arch, DType, Spec};

use super::tensor_cores::{LEAST_SHARED, generic_variant, sequences, tensor_core_variant};
use super::{Caps, coded, decode, hopper, int8, latent, wide};
use crate::codes::Codes;
use crate::launch::WhyGeneric;
use crate::variant::{Algorithm, KernelVariant, Sequences};

/// Widest head of the tensor-core kernels.
const MMA_DIM: usize = 256;
/// Widest head of hopper_f32.cu.
const HOPPER_F32_DIM: usize = 128;
/// Widest head of wide.cu.
const WIDE_DIM: usize = 512;
/// Keys per tile of most of mma.cu.
const BLOCK_N: u32 = 64;

/// The lengths that a variant is chosen by: those of a spec, or of some of its sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    /// Whether the queries are few.
    pub(super) few: bool,
    /// Of few queries: rows that share a head of keys.
    pub(super) rows: usize,
    pub(super) kv_len: usize,
}

impl Lengths {
    pub(super) fn of(spec: &Spec) -> Self {
        Lengths { few: decode::is_few(spec), rows: spec.group_size() * spec.q_len(), kv_len: spec.kv_len() }
    }
}

/// The variant that serves `spec` where lengths are these, and why it is not one of the tensor cores if it is not.
pub(super) fn variant(spec: &Spec, caps: &Caps, lengths: Lengths) -> (KernelVariant, Option<WhyGeneric>) {
    if int8::is_for(spec) {
        return (int8::variant(spec, caps), None);
    }
    match on_tensor_cores(spec, caps, lengths) {
        Ok(variant) => (variant, None),
        Err(why) => {
            let codes = if spec.is_quantized() { Codes::Any } else { Codes::None };
            (KernelVariant { codes, ..generic_variant(spec, caps) }, Some(why))
        }
    }
}

fn on_tensor_cores(spec: &Spec, caps: &Caps, lengths: Lengths) -> Result<KernelVariant, WhyGeneric> {
    let Lengths { few, kv_len, .. } = lengths;
    if spec.dropout.is_some() {
        return dropping(spec, caps, kv_len);
    }
    if spec.is_quantized() {
        return over_codes(spec, caps, lengths);
    }
    if latent::is_for(spec) {
        return if_it_fits(latent::variant(spec, caps), caps);
    }
    match spec.numerics.storage {
        DType::F16 | DType::BF16 => {}
        DType::F32 if caps.arch == Arch::Sm90a && few => return Err(WhyGeneric::FewQueriesOfF32),
        DType::F32 if caps.arch == Arch::Sm90a => {}
        _ => return Err(WhyGeneric::Storage),
    }
    let narrow = if spec.numerics.storage == DType::F32 { HOPPER_F32_DIM } else { MMA_DIM };
    // wide.cu takes many queries, and reads neither lengths nor page tables.
    let most = if few || sequences(spec) != Sequences::Even { narrow } else { WIDE_DIM };
    let dim = spec.head_dim().max(spec.head_dim_v());
    if dim > most {
        return Err(WhyGeneric::HeadDim { most });
    }
    if kv_len == 0 {
        return Err(WhyGeneric::NoKeys);
    }
    let variant = match few {
        true => decode::variant(spec, caps),
        false if dim > narrow => wide::variant(spec, caps),
        false => many_queries(spec, caps, kv_len),
    };
    if_it_fits(variant, caps)
}

fn if_it_fits(variant: KernelVariant, caps: &Caps) -> Result<KernelVariant, WhyGeneric> {
    let (needed, has) = (variant.shared_bytes(), caps.shared_bytes);
    if needed <= has { Ok(variant) } else { Err(WhyGeneric::SharedMemory { needed, has }) }
}

/// The variant that drops weights, whatever the number of queries.
fn dropping(spec: &Spec, caps: &Caps, kv_len: usize) -> Result<KernelVariant, WhyGeneric> {
    match spec.numerics.storage {
        DType::F64 => Err(WhyGeneric::Storage),
        _ if kv_len == 0 => Err(WhyGeneric::NoKeys),
        DType::F16 | DType::BF16 if spec.head_dim().max(spec.head_dim_v()) <= MMA_DIM => {
            if_it_fits(mma_variant(spec, caps), caps)
        }
        _ => Err(WhyGeneric::Dropout),
    }
}

/// The variant that loads codes as they lie.
fn over_codes(spec: &Spec, caps: &Caps, Lengths { few, rows, .. }: Lengths) -> Result<KernelVariant, WhyGeneric> {
    if spec.codes.q.is_some() {
        return Err(WhyGeneric::QueriesAreCodes);
    }
    if !few && spec.numerics.storage == DType::F32 {
        return Err(WhyGeneric::ManyQueriesOfF32);
    }
    if spec.head_dim().max(spec.head_dim_v()) > MMA_DIM {
        return Err(WhyGeneric::HeadDim { most: MMA_DIM });
    }
    if spec.kv_len() == 0 {
        return Err(WhyGeneric::NoKeys);
    }
    let variant = match few {
        true => decode::over_codes(spec, caps, rows).ok_or(WhyGeneric::CodesInPlace)?,
        false => coded::variant(spec, caps).ok_or(WhyGeneric::CodesAsNumbers)?,
    };
    if_it_fits(variant, caps)
}

fn many_queries(spec: &Spec, caps: &Caps, kv_len: usize) -> KernelVariant {
    if spec.numerics.storage == DType::F32 {
        return tensor_core_variant(spec, caps, Algorithm::HopperF32, [128, BLOCK_N]);
    }
    hopper::variant(spec, caps, kv_len).unwrap_or_else(|| mma_variant(spec, caps))
}

fn mma_variant(spec: &Spec, caps: &Caps) -> KernelVariant {
    // Two fragments of queries per warp share each load of K and V; their sums fill the registers at 128 columns.
    let wide = tensor_core_variant(spec, caps, Algorithm::Mma, [128, BLOCK_N]);
    // As many keys as leave a warp's scores and sums in registers; where scores are changed in between, as few as below.
    let is_plain = !wide.natural && wide.mask.is_none();
    let block_n = match wide.dims.0.max(wide.dims.1) {
        // What is dropped is found in registers too.
        65..=128 if wide.dropout => 32,
        _ if wide.dropout => BLOCK_N,
        0..=64 if is_plain && caps.arch == Arch::Sm90a => 128,
        0..=64 if is_plain => 96,
        65..=128 if is_plain => 48,
        _ => BLOCK_N,
    };
    let wide = KernelVariant { block_n, ..wide };
    let fits = wide.dims.1 <= 128 && wide.shared_bytes() <= LEAST_SHARED;
    if fits { wide } else { KernelVariant { block_m: 64, block_n: BLOCK_N, ..wide } }
}
