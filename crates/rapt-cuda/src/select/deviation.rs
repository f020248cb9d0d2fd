//! deviation.cu: which requests it judges, in which blocks, and what the kernel that is judged rounds weights to.
//!
//! Few queries: 16 rows a block, and keys split by their number; many: 64. The figures of a head follow from its own lengths, dims and
//! options, as the bits of a row do. Deliberately absent: which kernel is judged (rules.rs).

use rapt_core::{DType, Error, Result, Spec};

use super::{Caps, check_lengths, decode, rules, too_many_blocks};
use crate::codes::{Codes, Operand, TileScales};
use crate::deviation::{DeviationParams, FIGURES_BYTES, partial_bytes};
use crate::launch::{DeviationLaunches, DeviationPlan, Step};
use crate::params::{LaunchParams, Params, Widths};
use crate::partition::Partition;
use crate::variant::{Algorithm, KernelVariant};

/// Rows of a block, where queries are few and where they are many.
const BLOCK_M: [u32; 2] = [16, 64];

/// To what `variant` rounds the weights that it multiplies values with, or values that it makes of two numbers: relative to each.
fn weight_rounding(variant: &KernelVariant) -> f64 {
    const FLOAT16: f64 = 1.0 / 2048.0;
    const BFLOAT16: f64 = 1.0 / 256.0;
    const TWO_OF_BFLOAT16: f64 = BFLOAT16 * BFLOAT16;
    let Codes::Tiles { v, .. } = variant.codes else { return 0.0 };
    match (variant.algorithm, v.scales) {
        // Three of them are as good as float32.
        (Algorithm::DecodeCodes, _) if variant.storage == DType::F32 => 0.0,
        (Algorithm::DecodeCodes, TileScales::Block(_, DType::F32)) => TWO_OF_BFLOAT16,
        (Algorithm::DecodeCodes, TileScales::Block(_, DType::F8E8M0FNU)) if variant.storage == DType::F16 => {
            TWO_OF_BFLOAT16
        }
        (Algorithm::DecodeCodes, TileScales::Block(_, DType::F8E8M0FNU)) => BFLOAT16,
        (Algorithm::DecodeCodes, _) => FLOAT16,
        _ if v.fits_float16(Operand::V) => FLOAT16,
        _ => BFLOAT16 + TWO_OF_BFLOAT16,
    }
}

fn variant(spec: &Spec, caps: &Caps, few: bool) -> KernelVariant {
    let mask = spec.mask.map(|mask| mask.dtype);
    KernelVariant {
        algorithm: Algorithm::Deviation,
        block_m: BLOCK_M[usize::from(!few)],
        codes: Codes::Any,
        ..KernelVariant::generic(caps.arch, spec.numerics.storage, mask)
    }
}

/// What [`Backend::plan_deviations`](crate::Backend::plan_deviations) launches, its kernels not loaded.
///
/// # Errors
/// As it says.
pub(crate) fn plan(spec: &Spec, caps: &Caps) -> Result<DeviationPlan> {
    let is_even = spec.pages.is_none() && spec.lengths.is_none() && spec.varlen.is_none();
    if spec.numerics.storage == DType::F64 || spec.codes.q.is_some() || !is_even {
        let why = "errors are measured of k and v in tensors of their own, and rows are computed in float32";
        return Err(Error::unsupported("an estimate for this request", why, "q as float32, float16 or bfloat16"));
    }
    spec.refuse_dropout(spec.device)?;
    check_lengths(spec)?;
    if spec.kv_len() == 0 || spec.out.shape.contains(&0) {
        return Ok(DeviationPlan::new(spec, None));
    }
    let few = decode::is_few(spec);
    let variant = variant(spec, caps, few);
    let item_rows = variant.block_m as usize;
    let task_heads = if few || spec.q_len() < item_rows { spec.group_size() } else { 1 };
    let (tasks, rows) = (spec.batch() * (spec.num_q_heads() / task_heads), task_heads * spec.q_len());
    let (num_splits, chunk) = if few { decode::chunk_rule(&variant).chunks(spec.kv_len()) } else { (1, 0) };
    let row_blocks = rows.div_ceil(item_rows);
    let items = [tasks, row_blocks, num_splits].into_iter().fold(1usize, usize::saturating_mul);
    if items > super::MOST_BLOCKS {
        return Err(too_many_blocks(items));
    }
    let partition = Partition {
        task_heads,
        tasks,
        rows,
        item_rows,
        short_items: 0,
        paired: false,
        row_blocks,
        num_splits,
        chunk,
        dv_blocks: 1,
        items,
        is_combined: num_splits > 1,
    };
    let params = Params::new(spec, &partition, Widths { out_vector: false, mask_pairs: false });
    let judged = rules::variant(spec, caps, rules::Lengths::of(spec)).0;
    let beside = DeviationParams::new(spec, &LaunchParams::new(spec, &params, None, 0), weight_rounding(&judged));
    let heads = spec.batch() * spec.num_q_heads();
    let of_row = if num_splits > 1 { num_splits * partial_bytes(spec.head_dim_v()) } else { FIGURES_BYTES };
    let of_rows = tasks.saturating_mul(rows).saturating_mul(of_row);
    let launches = DeviationLaunches {
        rows: Step::new(variant, items),
        heads: Step::new(variant.deviation_end(), heads),
        params,
        beside,
        workspace_bytes: of_rows.saturating_add(heads * FIGURES_BYTES),
    };
    Ok(DeviationPlan::new(spec, Some(launches)))
}

/// The variants that judge `spec` on a device with `caps`.
///
/// # Errors
/// As [`Backend::plan_deviations`](crate::Backend::plan_deviations).
pub fn deviation_variants(spec: &Spec, caps: &Caps) -> Result<Vec<KernelVariant>> {
    Ok(plan(spec, caps)?.variants())
}
