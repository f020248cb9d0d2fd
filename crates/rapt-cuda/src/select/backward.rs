//! From a spec of gradients to what is launched for it.
//!
//! float16 and bfloat16 with head dims up to 256 on compute capability 9.0, of which dq, dk and dv are asked, with or without a mask of booleans or of 16 bits,
//! or of sequences that lie one after another, and with softcap beside none or booleans → backward_hopper.cu, or beyond 128 backward_hopper_wide.cu; float16 and bfloat16 with head dims up to 256, and float32 up to 128 → backward_mma.cu, which on compute capability 9.0 leaves
//! float32 to backward_halves.cu; anything else → backward.cu. Tiles follow dtype and
//! head dims alone, and what fits a block: the bits of a gradient depend neither on the batch nor on strides.

use rapt_core::{
    Arch, BackwardPlan, BackwardSpec, Cost, DType, Device, Direction, Error, Finite, Kernel, KernelKey, MaskClass,
    PRounding, Result, Spec, TensorSpec,
};

use super::tensor_cores::{has_ordinary_scale, is_natural, mask_class, padded_dims, sequences};
use super::{Caps, MOST_BLOCKS, check_lengths, cost, too_many_blocks, widths};
use crate::access::{copied_at_a_time, moves_by};
use crate::backward::{BackwardParams, HOPPER_TALL_ROWS, HopperItems, NotingWorkspace, state_bytes, tiles_of};
use crate::launch::Step;
use crate::launch::backward::{BackwardLaunch, HopperPass, MaskParts, PassStep, WhyNoTensorCores};
use crate::params::Params;
use crate::partition::Partition;
use crate::tensor_map::TmaTensor;
use crate::variant::{Algorithm, KernelVariant, Loads, Pass, Sequences, generic_columns};

/// Widest head of backward_mma.cu.
const MMA_DIM: usize = 256;
/// The same of float32, whose tiles are twice as large.
const MMA_F32_DIM: usize = 128;
/// Widest head of backward_hopper_wide.cu.
const HOPPER_WIDE_DIM: usize = 256;
/// Own rows of a block of backward_halves.cu, and streamed rows of a tile.
const HALVES_TILE: (u32, u32) = (128, 64);
/// Rows of a block of backward_rows.cu.
const ROWS_OF_BLOCK: usize = 64;
/// Blocks that are to sum the gradient of a mask, where its tiles are at most half as many: some four to each of a large device's multiprocessors.
const MASK_BLOCKS: usize = 512;
/// Blocks to a multiprocessor that look for heads to be computed again.
const AGAIN_BLOCKS: usize = 2;

/// Whether the tensor cores serve a request, and if not why.
fn on_tensor_cores(spec: &BackwardSpec) -> std::result::Result<(), WhyNoTensorCores> {
    let forward = spec.forward();
    let dim = forward.head_dim().max(forward.head_dim_v());
    let most = match forward.numerics.storage {
        DType::F16 | DType::BF16 => MMA_DIM,
        DType::F32 => MMA_F32_DIM,
        _ => return Err(WhyNoTensorCores::Storage),
    };
    if spec.d_o().dtype != forward.numerics.storage {
        return Err(WhyNoTensorCores::Arriving);
    }
    if dim > most { Err(WhyNoTensorCores::HeadDim { most }) } else { Ok(()) }
}

/// The variant of a pass on the tensor cores: own rows of a block, and streamed rows of a tile. With more of either registers are spilled
/// (NVRTC 13.2).
fn mma(spec: &BackwardSpec, caps: &Caps, pass: Pass) -> KernelVariant {
    let forward = spec.forward();
    let dims = padded_dims(forward);
    let wide = [&forward.q, &forward.k, &forward.v, spec.d_o()].iter().all(|tensor| moves_by(tensor, 16));
    let natural = is_natural(forward, mask_class(forward));
    let [block_m, block_n] = match (dims.0.max(dims.1), pass) {
        _ if forward.numerics.storage == DType::F32 => [64, 32],
        (0..=128, Pass::Mask) => [64, 64],
        (0..=64, Pass::Keys) if natural || forward.mask.is_some() || forward.dropout.is_some() => [64, 32],
        (0..=64, _) => [128, 32],
        (65..=128, Pass::Queries) => [64, 64],
        _ => [64, 32],
    };
    let variant = KernelVariant {
        algorithm: Algorithm::BackwardMma(pass),
        natural,
        dropout: forward.dropout.is_some(),
        sequences: sequences(forward),
        loads: if wide { Loads::By16Bytes } else { Loads::ByElement },
        dims,
        block_m,
        block_n,
        stages: if pass == Pass::Mask { 1 } else { 2 },
        ..KernelVariant::backward(caps.arch, forward.numerics.storage, forward.mask.map(|mask| mask.dtype), pass)
    };
    let least = KernelVariant { block_n: 16, ..variant };
    if variant.shared_bytes() <= caps.shared_bytes { variant } else { least }
}

/// The variant of a pass of backward_halves.cu, where it serves the request.
fn halves(spec: &BackwardSpec, caps: &Caps, pass: Pass) -> Option<KernelVariant> {
    let forward = spec.forward();
    let is_none = |n: usize| n == 0;
    if caps.arch != Arch::Sm90a
        || forward.numerics.storage != DType::F32
        || on_tensor_cores(spec).is_err()
        || [forward.q_len(), forward.kv_len(), forward.head_dim(), forward.head_dim_v()].into_iter().any(is_none)
    {
        return None;
    }
    let variant = KernelVariant {
        algorithm: Algorithm::BackwardHalves(pass),
        block_m: HALVES_TILE.0,
        block_n: HALVES_TILE.1,
        stages: 0,
        ..mma(spec, caps, pass)
    };
    (variant.shared_bytes() <= caps.shared_bytes).then_some(variant)
}

/// The variant of backward_hopper.cu or backward_hopper_wide.cu, where one serves the request. Tensors that TMA does not load come element by element into the same tiles: bits
/// do not depend on strides.
fn hopper(spec: &BackwardSpec, caps: &Caps) -> Option<KernelVariant> {
    let forward = spec.forward();
    let storage = forward.numerics.storage;
    let dim = forward.head_dim().max(forward.head_dim_v());
    let mask = forward.mask.map(|mask| mask.dtype);
    // What a score rises by is found of its weight again: to the base 2, beside its lse.
    let softcap = forward.softcap.map(Finite::get);
    let is_known = softcap.is_none_or(|cap| (1.0..1e6).contains(&cap) && mask_class(forward) != MaskClass::Additive);
    let serves = caps.arch == Arch::Sm90a
        && matches!(storage, DType::F16 | DType::BF16)
        && spec.d_o().dtype == storage
        && matches!(mask, None | Some(DType::Bool | DType::F16 | DType::BF16))
        && forward.dropout.is_none()
        && is_known
        && forward.alibi_slopes.is_none()
        && has_ordinary_scale(forward)
        && dim <= HOPPER_WIDE_DIM
        && [spec.dq(), spec.dk(), spec.dv()].iter().all(Option::is_some)
        && [forward.q_len(), forward.kv_len(), forward.head_dim(), forward.head_dim_v()].iter().all(|n| *n > 0)
        && tiles_of(forward, forward.q_len(), HOPPER_TALL_ROWS).saturating_mul(HOPPER_TALL_ROWS) <= MOST_BLOCKS;
    if !serves {
        return None;
    }
    let of_dims = KernelVariant {
        algorithm: Algorithm::BackwardHopper,
        natural: softcap.is_some(),
        sequences: sequences(forward),
        dims: padded_dims(forward),
        ..KernelVariant::backward(caps.arch, storage, mask, Pass::Together)
    };
    let rows = of_dims.backward_block_m();
    let keys = of_dims.backward_block_n();
    let [tensors @ .., of_mask] = loaded(spec, [rows, keys]);
    let loads = match tensors.iter().all(Option::is_some) {
        true if mask.is_none() || of_mask.is_some() => Loads::Tma,
        true => Loads::TmaButMask,
        false => Loads::ByElement,
    };
    let variant = KernelVariant { loads, block_m: rows as u32, block_n: keys as u32, ..of_dims };
    (variant.shared_bytes() <= caps.shared_bytes).then_some(variant)
}

/// q, k, v, d_o and the mask in tiles of backward_hopper.cu with so many queries and keys, as TMA loads them.
fn loaded(spec: &BackwardSpec, [rows, keys]: [usize; 2]) -> [Option<TmaTensor>; 5] {
    let forward = spec.forward();
    let of = |tensor, rows: usize| TmaTensor::new(tensor, rows as u32);
    let mask = forward.mask.as_ref().and_then(|mask| TmaTensor::mask_of_keys(mask, rows as u32));
    [of(&forward.q, rows), of(&forward.k, keys), of(&forward.v, keys), of(spec.d_o(), rows), mask]
}

/// Adds a launch, unless it has no block.
fn push(steps: &mut Vec<PassStep>, variant: KernelVariant, units: usize, blocks: usize, again: usize) -> Result<()> {
    if blocks.max(again) > MOST_BLOCKS {
        return Err(too_many_blocks(blocks.max(again)));
    }
    if blocks > 0 {
        steps.push(PassStep { step: Step::new(variant, blocks), units, again });
    }
    Ok(())
}

fn product(factors: &[usize]) -> usize {
    factors.iter().copied().fold(1, usize::saturating_mul)
}

/// What backward_hopper.cu takes besides.
fn hopper_pass(spec: &BackwardSpec, variant: &KernelVariant, items: HopperItems) -> HopperPass {
    let loaded = if variant.loads == Loads::ByElement { [None; 5] } else { loaded(spec, tile_of(variant)) };
    let by_warp = spec.forward().mask.as_ref().filter(|_| variant.loads == Loads::TmaButMask);
    HopperPass { items, loaded, mask_unit: by_warp.map_or(0, copied_at_a_time) }
}

/// Rows of queries and keys of a tile.
fn tile_of(variant: &KernelVariant) -> [usize; 2] {
    [variant.block_m as usize, variant.block_n as usize]
}

/// Everything that is launched for `spec` on a device with `caps`.
///
/// # Errors
/// As [`select_backward`].
pub(crate) fn launch_plan(spec: &BackwardSpec, caps: &Caps) -> Result<BackwardLaunch> {
    let forward = spec.forward();
    if !matches!(forward.device, Device::Cuda(_)) {
        let why = "this backend serves the memory of NVIDIA GPUs".into();
        return Err(Error::DeviceUnavailable { device: forward.device, why });
    }
    spec.refuse_sums(forward.device)?;
    check_lengths(forward)?;
    let (storage, mask) = (forward.numerics.storage, forward.mask.map(|mask| mask.dtype));
    let generic = |pass: Pass| KernelVariant {
        dropout: forward.dropout.is_some() && !matches!(pass, Pass::Rows | Pass::Sinks),
        // Rows of all sequences together are those of one.
        sequences: if pass == Pass::Sinks { Sequences::Even } else { sequences(forward) },
        ..KernelVariant::backward(caps.arch, storage, mask, pass)
    };
    let why = on_tensor_cores(spec).err();
    let rows = product(&[forward.batch(), forward.num_q_heads(), forward.q_len()]);
    let chunks =
        |of: Option<&TensorSpec<4>>| of.map_or(0, |of| of.shape[3].div_ceil(generic_columns(storage) as usize));
    let mut steps = Vec::new();
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    let together = hopper(spec, caps);
    let matrices = forward.batch().saturating_mul(forward.num_q_heads());
    let row_blocks = row_blocks(forward, together);
    push(&mut steps, of_rows(generic(Pass::Rows), together), row_blocks, matrices.saturating_mul(row_blocks), 0)?;
    let items = together.map(|variant| HopperItems::new(spec, variant.block_n as usize, multiprocessors));
    if let Some((variant, items)) = together.zip(items) {
        push(&mut steps, variant, 0, items.count().min(multiprocessors), 0)?;
        let parts = of_parts(generic(Pass::Parts), &variant);
        push(
            &mut steps,
            parts,
            0,
            matrices.saturating_mul(padded_rows(forward, &variant) / parts.block_m as usize),
            0,
        )?;
    }
    let passes = [
        (Pass::Keys, Pass::KeysAgain, chunks(spec.dk()) + chunks(spec.dv()), forward.kv_len(), forward.num_kv_heads()),
        (Pass::Queries, Pass::QueriesAgain, chunks(spec.dq()), forward.q_len(), forward.num_q_heads()),
    ];
    for (pass, again, chunks, len, heads) in passes {
        if chunks == 0 {
            continue;
        }
        let variant = if why.is_none() { mma(spec, caps, pass) } else { generic(pass) };
        let blocks_of = |variant: &KernelVariant| {
            let targets = if why.is_some() { chunks } else { 1 + usize::from(variant.is_split()) };
            let units = tiles_of(forward, len, variant.block_m as usize);
            (units, product(&[forward.batch(), heads, units, targets]))
        };
        let (units, blocks) = blocks_of(&variant);
        let by_halves = halves(spec, caps, pass);
        if let Some(variant) = by_halves {
            let (units, blocks) = blocks_of(&variant);
            push(&mut steps, variant, units, blocks, 0)?;
        }
        if together.is_some() || by_halves.is_some() {
            let variant = KernelVariant { algorithm: Algorithm::BackwardMma(again), ..variant };
            push(&mut steps, variant, units, blocks.min(AGAIN_BLOCKS * multiprocessors), blocks)?;
        } else {
            push(&mut steps, variant, units, blocks, 0)?;
        }
    }
    let mask_tiles = spec.d_mask().map(|of| {
        let variant = if why.is_none() { mma(spec, caps, Pass::Mask) } else { generic(Pass::Mask) };
        (variant, MaskTiles::new(spec, of, &variant))
    });
    if let Some((variant, tiles)) = mask_tiles {
        tiles
            .launches(variant, generic(Pass::MaskParts))
            .try_for_each(|(variant, blocks)| push(&mut steps, variant, 0, blocks, 0))?;
    }
    if spec.d_sinks().is_some() {
        push(&mut steps, generic(Pass::Sinks), 0, forward.num_q_heads(), 0)?;
    }
    // Only the pass of rows: nothing reads what it leaves.
    if steps.len() == 1 && steps[0].step.variant.algorithm.pass() == Some(Pass::Rows) {
        steps.clear();
    }
    let all = Params::new(forward, &whole(spec), widths(forward, &generic(Pass::Rows)));
    let states = rows.saturating_mul(state_bytes(forward.numerics.accumulation.size_bytes()));
    let hopper = together.zip(items).filter(|_| !steps.is_empty());
    let hopper = hopper.map(|(variant, items)| Box::new(hopper_pass(spec, &variant, items)));
    let noting = noting(spec, &steps, together, states);
    let noted = noting.as_ref().map_or(states, |noting| noting.bytes);
    let (mask_parts, workspace_bytes) = MaskTiles::behind(mask_tiles.map(|(_, tiles)| tiles), spec, noted);
    Ok(BackwardLaunch {
        workspace_bytes: if steps.is_empty() { 0 } else { workspace_bytes },
        cost: cost_of(spec, caps, why.is_none(), scores_of(&steps)),
        steps,
        params: BackwardParams::new(spec, all),
        hopper,
        noting,
        mask_parts,
        multiprocessors: caps.multiprocessors,
        why,
    })
}

/// Tiles of the gradient of a mask, one along a size of 1; in how many parts each is summed, and how many numbers it has.
#[derive(Clone, Copy)]
struct MaskTiles {
    count: usize,
    parts: usize,
    numbers: usize,
}

impl MaskTiles {
    /// Where there are few tiles, as many parts of each as give each block something to sum. They follow from the problem alone, and not from the device:
    /// the bits of the gradient follow from them.
    fn new(spec: &BackwardSpec, of: &TensorSpec<4>, variant: &KernelVariant) -> Self {
        let forward = spec.forward();
        let [rows, keys] = tile_of(variant);
        let [batch, heads, queries, columns] = of.shape;
        let tiles = |n: usize, tile: usize| if n == 1 { 1 } else { n.div_ceil(tile) };
        let count = product(&[batch, heads, tiles(queries, rows), tiles(columns, keys)]);
        let summed = |size: usize, n: usize| if size == 1 { n } else { 1 };
        let query_tiles = forward.q_len().div_ceil(rows);
        let entries = summed(batch, forward.batch());
        let summands = product(&[entries, summed(heads, forward.num_q_heads()), summed(queries, query_tiles)]);
        let parts = (MASK_BLOCKS / count.max(1)).min(summands).max(1);
        MaskTiles { count, parts, numbers: rows * keys }
    }

    /// Kernels and their blocks: a tile's parts, and with several of these their sums.
    fn launches(self, parts: KernelVariant, sums: KernelVariant) -> impl Iterator<Item = (KernelVariant, usize)> {
        let sums = KernelVariant { block_m: parts.block_m, block_n: parts.block_n, ..sums };
        let blocks = self.count.saturating_mul(self.numbers) / sums.threads() as usize;
        let of_sums = (self.parts > 1).then_some((sums, blocks));
        std::iter::once((parts, self.count.saturating_mul(self.parts))).chain(of_sums)
    }

    /// Where the sums of parts lie behind `noted` bytes of a workspace, and how long that is with them.
    fn behind(tiles: Option<Self>, spec: &BackwardSpec, noted: usize) -> (MaskParts, usize) {
        let at = noted.next_multiple_of(16);
        match tiles {
            Some(MaskTiles { count, parts, numbers }) if parts > 1 => {
                let size = spec.forward().numerics.accumulation.size_bytes();
                (MaskParts { parts, at }, at.saturating_add(count * parts * numbers * size))
            }
            _ => (MaskParts { parts: 1, at }, noted),
        }
    }
}

/// The variant of the pass over rows: those of sequences lie in tiles of `together`, which reads them.
fn of_rows(rows: KernelVariant, together: Option<KernelVariant>) -> KernelVariant {
    match together {
        Some(KernelVariant { block_m, block_n, sequences: Sequences::Varlen, .. }) => {
            KernelVariant { block_m, block_n, ..rows }
        }
        _ => rows,
    }
}

/// The variant of the pass that makes rows of the sums of dq that `together` leaves.
fn of_parts(parts: KernelVariant, together: &KernelVariant) -> KernelVariant {
    let KernelVariant { dims, natural, .. } = *together;
    KernelVariant { dims, natural, block_m: rows_of_parts(together), ..parts }
}

/// Blocks of the pass over the rows of a head, those that a tile of queries of `together` has beyond the last among them.
fn row_blocks(forward: &Spec, together: Option<KernelVariant>) -> usize {
    together.map_or(forward.q_len(), |variant| padded_rows(forward, &variant)).div_ceil(ROWS_OF_BLOCK)
}

/// Rows of a head in whole tiles of queries of `together`.
fn padded_rows(forward: &Spec, together: &KernelVariant) -> usize {
    let rows = together.block_m as usize;
    tiles_of(forward, forward.q_len(), rows).saturating_mul(rows)
}

/// Rows of a block that makes rows of dq: they lie in one tile of queries of `together`.
const fn rows_of_parts(together: &KernelVariant) -> u32 {
    if together.turns_dq() { together.block_m } else { ROWS_OF_BLOCK as u32 }
}

/// Where kernels note heads, if some of `steps` computes these again.
fn noting(
    spec: &BackwardSpec,
    steps: &[PassStep],
    together: Option<KernelVariant>,
    states: usize,
) -> Option<NotingWorkspace> {
    let is_any = steps.iter().any(|of| of.again > 0);
    is_any.then(|| match together {
        Some(variant) => NotingWorkspace::with_sums(spec, states, tile_of(&variant), variant.dq_row() as usize),
        None => NotingWorkspace::new(spec, states),
    })
}

/// A head a task, in one piece.
fn whole(spec: &BackwardSpec) -> Partition {
    let forward = spec.forward();
    Partition {
        task_heads: 1,
        tasks: forward.batch().saturating_mul(forward.num_q_heads()),
        rows: forward.q_len(),
        item_rows: forward.q_len(),
        short_items: 0,
        paired: false,
        row_blocks: 1,
        num_splits: 1,
        chunk: 0,
        dv_blocks: 1,
        items: 0,
        is_combined: false,
    }
}

/// How often scores are formed: once for all gradients, or for those of keys and for dq; where dk and dv have blocks of their own, for each.
fn scores_of(steps: &[PassStep]) -> Scores {
    let variants = || steps.iter().filter(|of| of.again == 0).map(|of| &of.step.variant);
    if variants().any(|variant| variant.algorithm == Algorithm::BackwardHopper) {
        Scores::Once
    } else if variants().any(KernelVariant::is_split) {
        Scores::ForEach
    } else {
        Scores::ForKeysAndQueries
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scores {
    Once,
    ForKeysAndQueries,
    ForEach,
}

/// The products of the passes, and what is read and written once.
fn cost_of(spec: &BackwardSpec, caps: &Caps, on_tensor_cores: bool, scores: Scores) -> Cost {
    let forward = spec.forward();
    let kernel = if on_tensor_cores { Kernel::Forward } else { Kernel::Generic };
    let once = cost::cost(forward, caps, kernel);
    let (pairs, dim, dim_v) = (forward.pairs() as f64, forward.head_dim() as f64, forward.head_dim_v() as f64);
    let if_asked = |is_asked: bool, products: f64| if is_asked { products } else { 0.0 };
    let (of_dk, of_dv) = (spec.dk().is_some(), spec.dv().is_some());
    let products = if_asked(of_dk || of_dv, dim)
        + if_asked(of_dk, dim_v + dim)
        + if_asked(of_dv, dim_v)
        + if_asked(of_dk && of_dv && scores == Scores::ForEach, dim)
        + if_asked(spec.dq().is_some(), if scores == Scores::Once { dim } else { 2.0 * dim + dim_v })
        + if_asked(spec.d_mask().is_some(), dim + dim_v);
    let flops = 2.0 * pairs * products;
    let bytes = |of: Option<&TensorSpec<4>>| {
        of.map_or(0.0, |of| of.shape.iter().map(|&n| n as f64).product::<f64>() * of.dtype.size_bytes() as f64)
    };
    let written = [spec.dq(), spec.dk(), spec.dv(), spec.d_mask()].map(bytes).iter().sum::<f64>();
    let ratio = if once.flops > 0.0 { flops / once.flops } else { 0.0 };
    Cost {
        flops,
        exponentials: once.exponentials
            * match scores {
                Scores::Once => 1.0,
                Scores::ForKeysAndQueries => 2.0,
                Scores::ForEach => 3.0,
            },
        bytes_read: once.bytes_read + once.bytes_written + bytes(Some(spec.d_o())),
        bytes_written: written,
        floor_cycles: once.floor_cycles * ratio,
        floor_seconds: once.floor_seconds.map(|seconds| seconds * ratio),
        ..once
    }
}

/// The plan of `spec` that launches `launch_plan`.
pub(crate) fn plan_of(spec: &BackwardSpec, caps: &Caps, launch_plan: BackwardLaunch) -> BackwardPlan {
    let numerics = &spec.forward().numerics;
    let key = KernelKey {
        direction: Direction::Backward,
        kernel: if launch_plan.steps.is_empty() { Kernel::Empty } else { Kernel::Backward },
        storage: numerics.storage,
        accumulation: numerics.accumulation,
        p_rounding: if launch_plan.why.is_none() && numerics.storage != DType::F32 {
            PRounding::Storage
        } else {
            PRounding::Accumulation
        },
        mask: mask_class(spec.forward()),
        kv: spec.forward().kv,
        arch: caps.arch,
    };
    BackwardPlan::new(spec.clone(), key, launch_plan)
}

/// Chooses what runs for the gradients of `spec` on a device with `caps`. The plan can be explained; to be run it is made by
/// [`Backend::plan_backward`](crate::Backend::plan_backward), which loads its kernels.
///
/// # Errors
/// [`Error::DeviceUnavailable`] for anything but CUDA memory; [`Error::Unsupported`] for lengths beyond 2^29 and gradients that are
/// sums over what is broadcast.
pub fn select_backward(spec: &BackwardSpec, caps: &Caps) -> Result<BackwardPlan> {
    Ok(plan_of(spec, caps, launch_plan(spec, caps)?))
}

/// The variants that [`select_backward`] would have compiled for `spec`.
///
/// # Errors
/// As [`select_backward`].
pub fn backward_variants(spec: &BackwardSpec, caps: &Caps) -> Result<Vec<KernelVariant>> {
    Ok(launch_plan(spec, caps)?.variants().copied().collect())
}
