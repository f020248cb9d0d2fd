//! From a spec to a plan: pure, total, without a device.
//!
//! What decides a request's kernel, tiles and splits is its own lengths, dims, dtype and options, never its batch or where it lies:
//! the bits of a row depend on none of these. Strides and alignment decide who loads the same tiles and writes the same sums; how
//! many rows hopper.cu takes at a time follows the device too, and changes no bit either.

pub(crate) mod backward;
mod coded;
mod cost;
mod decode;
pub(crate) mod deviation;
mod hopper;
mod int8;
mod latent;
mod rules;
mod tensor_cores;
mod varlen;
mod wide;

use std::ops::Range;

pub use backward::{backward_variants, select_backward};
pub use deviation::deviation_variants;

use rapt_core::{Arch, DType, Device, Error, Kernel, KernelKey, PRounding, Plan, Result, ScaleLayout, Spec};

use crate::access::{is_in_pairs, moves_by};
use crate::append;
use crate::codes::Codes;
use crate::launch::{Append, Attend, CudaLaunch, Launches, Step};
use crate::params::{DroppingParams, LaunchParams, MOST_LEN, Params, Widths};
use crate::partition::{ChunkRule, Partition};
use crate::variant::{Algorithm, COMBINE_COLUMNS, COMBINE_WARPS, KernelVariant, Sequences, generic_columns};

/// What a device has, as far as a selection depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Caps {
    /// The architecture that kernels are compiled for.
    pub arch: Arch,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory that a block may ask for.
    pub shared_bytes: u32,
    /// The clock, where the driver says it: only for the floor in time.
    pub clock_hz: Option<f64>,
    /// Bytes a second of device memory, where the driver says it: only for the floor in time.
    pub bandwidth: Option<f64>,
}

/// Most blocks or rows of a request. Blocks that stay on their multiprocessor count on past the last item, by one each.
const MOST_BLOCKS: usize = i32::MAX as usize - (1 << 16);

fn too_many_blocks(most: usize) -> Error {
    let what = format!("a request of {most} blocks");
    Error::unsupported(what, "a launch has at most 2^31", "cut the problem along its batch")
}

fn check_lengths(spec: &Spec) -> Result<()> {
    for (what, n) in [
        ("q_len", spec.q_len()),
        ("kv_len", spec.kv_len()),
        ("num_q_heads", spec.num_q_heads()),
        ("head_dim", spec.head_dim()),
        ("head_dim_v", spec.head_dim_v()),
        ("rows of a group", spec.group_size().saturating_mul(spec.q_len())),
    ] {
        if n >= MOST_LEN {
            let why = format!("the CUDA kernels count up to {MOST_LEN}");
            return Err(Error::unsupported(format!("{what} {n}"), why, "cut the problem along it"));
        }
    }
    Ok(())
}

/// Into which chunks the keys of `spec` are split, where that follows from their number alone.
fn chunk_rule(spec: &Spec, variant: &KernelVariant) -> Option<ChunkRule> {
    match variant.algorithm {
        // Rows of one head after another, and whole: what drops weights puts nothing together.
        _ if variant.dropout => None,
        Algorithm::Latent => Some(latent::chunk_rule(spec)),
        // Its blocks are the definition's, and follow one another.
        Algorithm::Int8 => None,
        _ => decode::is_few(spec).then(|| decode::chunk_rule(variant)),
    }
}

/// Tasks, items and splits of `spec`, and blocks of the main launch.
///
/// # Errors
/// [`Error::Unsupported`] for counts beyond 2^31.
fn partition(spec: &Spec, caps: &Caps, variant: &KernelVariant) -> Result<(Partition, usize)> {
    let (kernel, few) = (variant.algorithm.kernel(), decode::is_few(spec));
    let block_m = variant.block_m as usize;
    // Rows of one head fill their tiles, or the heads of a group share them.
    let task_heads = if variant.dropout || (!few && spec.q_len() >= block_m) { 1 } else { spec.group_size() };
    let rows = task_heads * spec.q_len();
    let (num_splits, chunk) = match (chunk_rule(spec, variant), variant.sequences) {
        (None, _) if variant.algorithm == Algorithm::Wide => wide::chunks(spec),
        (None, _) => (1, 0),
        (Some(rule), Sequences::Even) => rule.chunks(spec.kv_len()),
        (Some(rule), _) => (rule.most_chunks(spec.kv_len()), rule.chunks(spec.kv_len()).1),
    };
    let columns = generic_columns(spec.numerics.storage) as usize;
    let dv_blocks = if kernel == Kernel::Generic { spec.head_dim_v().div_ceil(columns) } else { 1 };
    let tasks = spec.batch().saturating_mul(spec.num_q_heads() / task_heads.max(1));
    let (item_rows, short_items, paired) = if variant.algorithm == Algorithm::Hopper {
        let items = hopper::items(spec, caps, variant, tasks, task_heads);
        (items.groups * 64, items.short, items.paired)
    } else {
        (block_m, 0, false)
    };
    let row_blocks = rows.div_ceil(item_rows);
    let items = [tasks, row_blocks, num_splits].into_iter().fold(1usize, usize::saturating_mul);
    let (blocks, is_combined) = match variant.algorithm {
        Algorithm::Decode | Algorithm::DecodeCodes => {
            decode::blocks(caps, variant, tasks.saturating_mul(row_blocks), num_splits)
        }
        // Blocks stay on their multiprocessor and take one item after another.
        Algorithm::Hopper => (items.min(caps.multiprocessors.max(1) as usize), false),
        Algorithm::Latent => (items.min(caps.multiprocessors.max(1) as usize), num_splits > 1),
        _ => (items.saturating_mul(dv_blocks), num_splits > 1),
    };
    let most = items
        .saturating_mul(dv_blocks)
        .max(tasks.saturating_mul(rows).saturating_mul(spec.head_dim_v().div_ceil(COMBINE_COLUMNS)));
    if most > MOST_BLOCKS {
        return Err(too_many_blocks(most));
    }
    let partition = Partition {
        task_heads,
        tasks,
        rows,
        item_rows,
        short_items,
        paired,
        row_blocks,
        num_splits,
        chunk,
        dv_blocks,
        items,
        is_combined,
    };
    Ok((partition, blocks))
}

/// What strides and alignment allow of rows that are not loaded as tiles.
fn widths(spec: &Spec, variant: &KernelVariant) -> Widths {
    Widths {
        // decode_codes.cu packs bfloat16 alone.
        out_vector: spec.out.dtype == spec.numerics.storage
            && moves_by(&spec.out, 16)
            && (variant.algorithm != Algorithm::DecodeCodes || spec.out.dtype == DType::BF16),
        mask_pairs: spec.mask.is_some_and(|mask| is_in_pairs(&mask)),
    }
}

/// What attends to sequences with so many keys by `variant`, and how it is divided.
///
/// # Errors
/// As [`partition`].
fn attend(spec: &Spec, caps: &Caps, variant: KernelVariant, keys: Range<usize>) -> Result<(Attend, Partition)> {
    let (partition, blocks) = partition(spec, caps, &variant)?;
    let params = Params::new(spec, &partition, widths(spec, &variant));
    let hopper = (variant.algorithm == Algorithm::Hopper)
        .then(|| Box::new(hopper::launch(spec, &variant, &partition, &params, blocks, keys)));
    let beside = (variant.codes != Codes::None || variant.sequences != Sequences::Even).then(|| {
        let dealt = matches!(variant.algorithm, Algorithm::Decode | Algorithm::DecodeCodes);
        Box::new(LaunchParams::new(spec, &params, chunk_rule(spec, &variant), if dealt { blocks } else { 0 }))
    });
    let dropping = variant.dropout.then(|| DroppingParams::new(spec.dropout));
    Ok((Attend { step: Step::new(variant, blocks), params, hopper, beside, dropping }, partition))
}

/// What attends to those shorter sequences of a cache that have other tiles than its longest one, and which numbers of keys those have that
/// are left to `main`.
///
/// # Errors
/// As [`partition`].
fn attend_short(spec: &Spec, caps: &Caps, main: &KernelVariant) -> Result<(Option<Box<Attend>>, Range<usize>)> {
    let all = Ok((None, 0..MOST_LEN));
    let (few, most) = (hopper::few_keys(spec), spec.kv_len());
    let is_alike = most < few.start || (few.start == 0 && most < few.end);
    if is_alike || spec.lengths.as_deref().is_none_or(|of| of.lengths.is_none()) {
        return all;
    }
    let others = few.end..if few.start > 0 { few.start } else { MOST_LEN };
    let (own, left) = if few.contains(&most) { (others, few) } else { (few, others) };
    let lengths = rules::Lengths { kv_len: own.start.max(1), ..rules::Lengths::of(spec) };
    let (variant, _) = rules::variant(spec, caps, lengths);
    if variant == *main {
        return all;
    }
    let (attend, _) = attend(spec, caps, variant, own)?;
    Ok((Some(Box::new(attend)), left))
}

/// The launches of a request that has an output.
///
/// # Errors
/// [`Error::Unsupported`] for lengths and counts beyond 2^29 and 2^31.
fn launches(spec: &Spec, caps: &Caps) -> Result<Launches> {
    check_lengths(spec)?;
    if spec.varlen.is_some() {
        return varlen::launches(spec, caps);
    }
    let (variant, why_generic) = rules::variant(spec, caps, rules::Lengths::of(spec));
    let (short, keys) = attend_short(spec, caps, &variant)?;
    let (main, partition) = attend(spec, caps, variant, keys)?;
    let blocks = main.step.blocks;
    let rows = partition.tasks * partition.rows;
    let row_bytes = (spec.head_dim_v() + 2) * spec.numerics.accumulation.size_bytes();
    let partial_bytes = rows.saturating_mul(partition.num_splits).saturating_mul(row_bytes);
    // Where sequences have lengths of their own, a block cuts a row at most.
    let combined_rows = match (variant.sequences, variant.algorithm) {
        (Sequences::Ragged | Sequences::Paged, Algorithm::Decode | Algorithm::DecodeCodes) => {
            partition.rows.min(partition.item_rows) * (blocks - 1)
        }
        _ => rows,
    };
    let combine = variant.combine();
    let combine_columns = COMBINE_COLUMNS * combine.block_n as usize;
    let combine_blocks = (combined_rows * spec.head_dim_v().div_ceil(combine_columns)).div_ceil(COMBINE_WARPS);
    let added = spec.lengths.as_deref().map_or(0, |of| of.added);
    Ok(Launches {
        main,
        short,
        append: (added > 0).then(|| Append {
            step: Step::new(variant.append(), spec.batch().saturating_mul(added)),
            writes_factors: append::writes_factors(spec),
        }),
        combine: (partition.is_combined && combine_blocks > 0).then(|| Step::new(combine, combine_blocks)),
        partition,
        varlen: None,
        workspace_bytes: if partition.is_combined { partial_bytes } else { 0 },
        why_generic,
    })
}

fn key(spec: &Spec, arch: Arch, kernel: Kernel) -> KernelKey {
    KernelKey {
        direction: spec.direction,
        kernel,
        storage: spec.numerics.storage,
        accumulation: spec.numerics.accumulation,
        p_rounding: match kernel {
            Kernel::Forward | Kernel::Decode if spec.numerics.storage != DType::F32 => PRounding::Storage,
            Kernel::ForwardInt8 => PRounding::Block,
            _ => PRounding::Accumulation,
        },
        mask: tensor_cores::mask_class(spec),
        kv: spec.kv,
        arch,
    }
}

/// What reads caches drops no weights.
fn refuse_dropout_over_caches(spec: &Spec) -> Result<()> {
    let (Some(dropout), true) = (spec.dropout, spec.lengths.is_some() || spec.pages.is_some()) else { return Ok(()) };
    let what = format!("dropout_p={} over a cache on {}", dropout.p(), spec.device);
    Err(Error::unsupported(what, "the kernels that read lengths and page tables drop no weights", "dropout_p=0.0"))
}

/// Scales that lie swizzled are those of whole tensors: no part of them begins where a sequence does.
fn refuse_swizzled(spec: &Spec) -> Result<()> {
    let swizzled = spec.quantized().find(|(.., codes)| codes.scale_layout != ScaleLayout::Plain);
    let (Some((tensor, _, codes)), false) = (swizzled, spec.lengths.is_none() && spec.varlen.is_none()) else {
        return Ok(());
    };
    Err(Error::unsupported(
        format!("{tensor} with scale_layout=\"{}\" in sequences of lengths of their own", codes.scale_layout.name()),
        "there the scales of a key lie where the key does",
        format!("quantize {tensor} with scale_layout=\"plain\""),
    ))
}

/// What a run launches for `spec` on a device with `caps`.
///
/// # Errors
/// As [`select`].
pub(crate) fn launch_plan(spec: &Spec, caps: &Caps) -> Result<CudaLaunch> {
    if !matches!(spec.device, Device::Cuda(_)) {
        let why = "this backend serves the memory of NVIDIA GPUs".into();
        return Err(Error::DeviceUnavailable { device: spec.device, why });
    }
    refuse_dropout_over_caches(spec)?;
    int8::check(spec)?;
    refuse_swizzled(spec)?;
    let launches = if spec.out.shape.contains(&0) { None } else { Some(launches(spec, caps)?) };
    let kernel = launches.as_ref().map_or(Kernel::Empty, |launches| launches.main.step.variant.algorithm.kernel());
    Ok(CudaLaunch::new(spec, launches, cost::cost(spec, caps, kernel), caps.multiprocessors))
}

/// The plan of `spec` that launches `launch_plan`.
pub(crate) fn plan_of(spec: &Spec, caps: &Caps, launch_plan: CudaLaunch) -> Plan {
    Plan::new(spec.clone(), key(spec, caps.arch, launch_plan.kernel()), launch_plan)
}

/// Chooses what runs for `spec` on a device with `caps`. The plan can be explained; to be run it is made by
/// [`Backend::plan`](crate::Backend::plan), which loads its kernels.
///
/// # Errors
/// [`Error::DeviceUnavailable`] for anything but CUDA memory; [`Error::Unsupported`] for lengths beyond 2^29, for products of int8
/// ([`Compute::Int8`](rapt_core::Compute::Int8)) of heads above 256, for dropout over caches, and, in sequences of lengths of their own, for
/// any [`ScaleLayout`] but the plain one.
pub fn select(spec: &Spec, caps: &Caps) -> Result<Plan> {
    Ok(plan_of(spec, caps, launch_plan(spec, caps)?))
}

/// The variants that [`select`] would have compiled for `spec`: the kernel, and what puts its splits together where no block sees
/// all of a row (which follows the batch too).
///
/// # Errors
/// As [`select`].
pub fn variants(spec: &Spec, caps: &Caps) -> Result<Vec<KernelVariant>> {
    refuse_dropout_over_caches(spec)?;
    int8::check(spec)?;
    refuse_swizzled(spec)?;
    let Launches { main, short, partition, append, varlen, .. } = launches(spec, caps)?;
    let main = main.step.variant;
    let combine = (partition.num_splits > 1).then(|| main.combine());
    let (short, append) = (short.map(|short| short.step.variant), append.map(|append| append.step.variant));
    let of_sequences = varlen.iter().flat_map(|varlen| varlen.steps()).map(|step| step.variant);
    Ok([Some(main), short, combine, append].into_iter().flatten().chain(of_sequences).collect())
}
