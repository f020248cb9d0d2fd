//! From a spec to a plan: pure, total, without a device.
//!
//! The rules, in order: nothing to attend → `empty`; int8 asked for → `forward_int8`; few rows per kv head → `decode`; anything else →
//! `forward`. Every option of the definition is served by each. How large pieces are, `tiles` says; how the work is cut, `partition`; what it costs,
//! `cost`. What depends on threads is only how rows are dealt out; the cut of the keys (`block_n`) follows the instruction set, the
//! dtype and head_dim, so the bits of a row do not depend on the machine's load or on its neighbours.

mod cost;
mod partition;
pub mod tiles;

use rapt_core::{
    Arch, Caps, CodesSpec, Compute, DType, Device, Direction, Error, Format, Granularity, Kernel, KernelKey, MaskClass,
    PRounding, Plan, Qkv, Result, Spec, TensorSpec,
};

use crate::arch::{self, KernelVariant, Step};
use crate::kernels::decode;
use crate::launch::{CpuLaunch, Steps};
use crate::problem::{Decisions, Fold, Reading, RowKind, Scores};

pub(crate) use cost::cost as forward_cost;
use tiles::Tiles;

/// Below this many nanoseconds on one core, waking another costs more than it saves (about 10 µs, Zen 4, 2026-11).
pub(crate) const PARALLEL_NS: f64 = 20_000.0;

/// Chooses what runs for `spec` on a machine with `caps`.
///
/// # Errors
/// [`Error::DeviceUnavailable`] for anything but host memory; [`Error::Unsupported`] for an instruction set that this
/// build lacks.
pub fn select(spec: &Spec, caps: &Caps) -> Result<Plan> {
    select_tiled(spec, caps, &Tiles::of(spec, arch_for(spec, caps)))
}

/// As [`select`], with tiles of the caller's choice: for [`tune`](crate::tune).
pub(crate) fn select_tiled(spec: &Spec, caps: &Caps, tiles: &Tiles) -> Result<Plan> {
    if spec.device != Device::Cpu {
        let why = "this backend serves host memory".into();
        return Err(Error::DeviceUnavailable { device: spec.device, why });
    }
    if spec.lengths.is_some() || spec.varlen.is_some() {
        let what = "a spec of sequences with lengths of their own in host memory";
        return Err(Error::unsupported(what, "there each sequence has a plan", "plan each sequence by itself"));
    }
    let arch = arch_for(spec, caps);
    let key = key(spec, arch);
    let (read_as, readings) = readings(spec, &key);
    let variant = |step| KernelVariant { arch, step, storage: read_as };
    if !variant(if spec.compute == Compute::Int8 { Step::ForwardInt8 } else { Step::Forward }).is_built() {
        return Err(Error::unsupported(
            format!("{read_as} on {}", arch.name()),
            "this build has no such kernel",
            "set RAPT_ISA to one that `rapt doctor` lists, or leave it unset",
        ));
    }
    if key.kernel == Kernel::Empty {
        let cost = cost::cost(spec, &key, 1, caps.clock_hz);
        let launch = CpuLaunch { steps: None, threads: 1, workspace_bytes: 0, cost };
        return Ok(Plan::new(spec.clone(), key, launch));
    }
    let threads = threads(spec, &key, caps);
    let partition = partition::partition(spec, &key, &readings, threads, tiles);
    let scratch = partition::scratch(spec, &key, &readings, &partition);
    let scratch_bytes = (scratch.len * key.accumulation.size_bytes()).next_multiple_of(64);
    let partials_bytes = partition::partials_bytes(spec, &key, &partition);
    let is_decode = key.kernel == Kernel::Decode;
    let main = match key.kernel {
        Kernel::Decode => Step::Decode,
        Kernel::ForwardInt8 => Step::ForwardInt8,
        _ => Step::Forward,
    };
    let steps = Steps {
        main: variant(main),
        combine: (is_decode && partition.chunks > 1).then_some(variant(Step::Combine)),
        block_m: if is_decode { partition.rows } else { arch::tile_shape(arch, read_as).queries },
        num_splits: if is_decode { partition.chunks } else { 1 },
        keys_per_item: if is_decode { partition.block_n } else { spec.kv_len() },
        decisions: Decisions { partition, scratch, scores: Scores::new(spec, key.mask), readings },
        scratch_bytes,
        partials_bytes,
    };
    let bytes_packed = cost::bytes_packed(spec, &key, &partition, read_as, threads);
    let cost = rapt_core::Cost { bytes_packed, ..cost::cost(spec, &key, threads, caps.clock_hz) };
    let workspace_bytes = threads.saturating_mul(scratch_bytes).saturating_add(partials_bytes);
    Ok(Plan::new(spec.clone(), key, CpuLaunch { steps: Some(steps), threads, workspace_bytes, cost }))
}

/// The instruction set of a request's kernels: pairs are formed of codes, or quads of bytes, but numbers of codes are not rounded to bf16. int8
/// does without numbers, and wherever bf16 has a dot instruction, bytes have one too. Where both would do, pairs: they take as many operations
/// or fewer but for int8 and one row (docs/lab/cpu.md).
fn arch_for(spec: &Spec, caps: &Caps) -> Arch {
    match caps.arch {
        arch if spec.compute == Compute::Int8 => arch,
        Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx if spec.is_quantized() => {
            if caps.arch == Arch::Avx512Bf16 && code_pairs(spec).iter().any(Option::is_some) {
                Arch::Avx512Bf16
            } else if code_quads(spec).iter().any(Option::is_some) {
                Arch::Avx512Vnni
            } else {
                Arch::Avx512
            }
        }
        Arch::Amx if !is_tiled(spec, Direction::Forward) => Arch::Avx512,
        // Codes become numbers there.
        Arch::NeonBf16 if spec.is_quantized() => Arch::Neon,
        // Numbers have no products of bytes.
        Arch::Avx512Vnni => Arch::Avx512,
        arch => arch,
    }
}

/// Queries that a key meets on average from which on products of tiles of so many parts save more than packing K and V for them costs: in forward, and
/// in the backward pass (a Xeon with AMX, 2026-11: docs/lab/cpu.md).
const LEAST_QUERIES: [[usize; 2]; 3] = [[0, 0], [64, 32], [256, 512]];

/// The widest heads of numbers in parts, whose panels and queries a second cache holds.
const MOST_OF_PARTS: usize = 512;

/// Whether products are formed tile by tile where there is AMX: tiles are packed of q, k and v of one dtype.
pub(crate) fn is_tiled(spec: &Spec, direction: Direction) -> bool {
    let storage = spec.numerics.storage;
    let is_of_one_dtype = [&spec.q, &spec.k, &spec.v].iter().all(|tensor| tensor.dtype == storage);
    let is_narrow = |parts: usize| parts == 1 || spec.head_dim().max(spec.head_dim_v()) <= MOST_OF_PARTS;
    let is_long = |parts: usize| {
        let least = LEAST_QUERIES[parts - 1][usize::from(direction == Direction::Backward)];
        let keys = [spec.batch(), spec.num_q_heads(), spec.kv_len()].map(|n| n as f64).iter().product::<f64>();
        spec.pairs() as f64 >= least as f64 * keys || arch::every_request_is_tiled()
    };
    arch::tiled(Arch::Amx, storage).is_some_and(|parts| is_of_one_dtype && is_narrow(parts) && is_long(parts))
}

/// Whether few rows share each kv head.
fn is_decode(spec: &Spec) -> bool {
    spec.group_size().saturating_mul(spec.q_len()) <= decode::MAX_ROWS
}

/// Numbers of a value from which on forward rounds weights together with factors of keys. Of 300 small outputs
/// of 1 to 8 numbers a row five or six left the tolerance, which is that of weights rounded without factors; of 400 of 64 numbers none did (Xeon, 2026-11).
const LEAST_WEIGHTED: usize = 48;

/// Where the factors of K's and of V's codes go if these are multiplied as pairs, with queries of bf16. Forward forms pairs of both or of
/// neither.
fn code_pairs(spec: &Spec) -> [Option<Fold>; 2] {
    let is_decode = is_decode(spec);
    let of = |codes: &Option<Box<CodesSpec>>, dim: usize, is_v: bool| {
        let codes = codes.as_deref()?;
        let fold = fold(codes, dim, arch::code_lanes(Arch::Avx512Bf16)?)?;
        if is_decode {
            // A zero point of a row goes where its factor goes.
            return Some(if fold == Fold::Groups && codes.chunk >= dim && codes.format.own_block_size().is_none() {
                Fold::Rows
            } else {
                fold
            });
        }
        // Codes are exact in bf16, and so are those of blocks that have scales of 8 bits; channels are left to the output.
        let exact = !codes.format.has_zero_point()
            && match fold {
                Fold::Rows => !is_v || !partition::is_by_key(codes) || dim >= LEAST_WEIGHTED,
                Fold::Channels => is_v && codes.format != Format::E5m2,
                Fold::Groups => codes.format.own_block_size().is_some(),
            };
        exact.then_some(fold)
    };
    if spec.codes.q.is_some() || spec.q.dtype != DType::BF16 || spec.compute == Compute::Int8 {
        return [None; 2];
    }
    let folds = [of(&spec.codes.k, spec.head_dim(), false), of(&spec.codes.v, spec.head_dim_v(), true)];
    let are_pairs = |fold: Option<Fold>, codes: &Option<Box<CodesSpec>>, tensor: &TensorSpec<4>| {
        fold.is_some() || codes.is_none() && tensor.dtype == DType::BF16
    };
    let all = are_pairs(folds[0], &spec.codes.k, &spec.k) && are_pairs(folds[1], &spec.codes.v, &spec.v);
    if is_decode || all { folds } else { [None; 2] }
}

/// Where the factors of K's and of V's codes go if decode multiplies these as quads of bytes, with queries of 16 bits: codes that are small
/// integers, or twice so.
fn code_quads(spec: &Spec) -> [Option<Fold>; 2] {
    let of = |codes: &Option<Box<CodesSpec>>, dim: usize| {
        let codes = codes.as_deref()?;
        let fold = fold(codes, dim, arch::code_lanes(Arch::Avx512Vnni)?)?;
        match codes.format {
            Format::Int8 | Format::Int4 | Format::Mxfp4 | Format::Nvfp4 => Some(fold),
            // A zero point of a row goes where its factor goes; those of groups within a row go nowhere.
            Format::Uint8 if codes.chunk >= dim => Some(Fold::Rows),
            Format::Uint8 => (fold == Fold::Channels).then_some(fold),
            _ => None,
        }
    };
    let are_served = is_decode(spec)
        && spec.codes.q.is_none()
        && matches!(spec.q.dtype, DType::F16 | DType::BF16)
        && spec.compute == Compute::Exact;
    if !are_served {
        return [None; 2];
    }
    // A weight would be one for each group of a value.
    let v = of(&spec.codes.v, spec.head_dim_v()).filter(|&fold| fold != Fold::Groups);
    [of(&spec.codes.k, spec.head_dim()), v]
}

/// The dtype in which a kernel reads rows, and how it reads those of q, k and v that are not of it.
fn readings(spec: &Spec, key: &KernelKey) -> (DType, Qkv<Option<Reading>>) {
    let Spec { q, k, v, codes, numerics, .. } = spec;
    // Decode loads K and V in one dtype, from a panel or where they lie; forward has a panel for each.
    let is_decode = key.kernel == Kernel::Decode;
    let has_codes = is_decode && (codes.k.is_some() || codes.v.is_some());
    let read_as = if has_codes { DType::F32 } else { numerics.storage };
    let kind = |tensor: &TensorSpec<4>, codes: &Option<Box<CodesSpec>>| match codes {
        Some(codes) => Some(RowKind::of_format(codes.format)),
        None if tensor.dtype == read_as => None,
        None => RowKind::of_dtype(tensor.dtype),
    };
    let reading = |tensor, of: &Option<Box<CodesSpec>>, dim: Option<usize>, [pairs, quads]: [Option<Fold>; 2]| {
        let fold = of.as_deref().zip(dim).and_then(|(codes, dim)| fold(codes, dim, arch::code_lanes(key.arch)?));
        kind(tensor, of).map(|kind| Reading { kind, fold, pairs, quads })
    };
    let dims = [spec.head_dim(), spec.head_dim_v()].map(|dim| is_decode.then_some(dim));
    let pairs = if key.arch == Arch::Avx512Bf16 { code_pairs(spec) } else { [None; 2] };
    let quads = if key.arch == Arch::Avx512Vnni { code_quads(spec) } else { [None; 2] };
    let readings = Qkv {
        q: reading(q, &codes.q, None, [None; 2]),
        k: reading(k, &codes.k, dims[0], [pairs[0], quads[0]]),
        v: reading(v, &codes.v, dims[1], [pairs[1], quads[1]]),
    };
    (read_as, readings)
}

/// Where decode applies the factors of rows of `dim` codes, in vectors of `lanes`; `None` where each becomes a number first.
fn fold(codes: &CodesSpec, dim: usize, lanes: usize) -> Option<Fold> {
    let vectors = codes.chunk / lanes;
    let shared_by_vectors = codes.chunk >= dim || (codes.chunk.is_multiple_of(lanes) && vectors.is_power_of_two());
    let is_plain = !codes.format.has_zero_point() && codes.format.own_block_size().is_none();
    if is_plain && codes.chunk >= dim {
        Some(Fold::Rows)
    } else if codes.granularity == Granularity::Channel {
        Some(Fold::Channels)
    } else {
        shared_by_vectors.then_some(Fold::Groups)
    }
}

/// The rules.
fn key(spec: &Spec, arch: Arch) -> KernelKey {
    let storage = spec.numerics.storage;
    let kernel = if spec.kv_len() == 0 || spec.out.shape.contains(&0) {
        Kernel::Empty
    } else if spec.compute == Compute::Int8 {
        Kernel::ForwardInt8
    } else if is_decode(spec) {
        Kernel::Decode
    } else {
        Kernel::Forward
    };
    KernelKey {
        direction: spec.direction,
        kernel,
        storage,
        accumulation: spec.numerics.accumulation,
        p_rounding: match kernel {
            Kernel::Forward if arch::is_paired(arch, storage) => PRounding::Storage,
            Kernel::Forward if arch::tiled(arch, storage) == Some(2) => PRounding::TwoBf16,
            Kernel::ForwardInt8 => PRounding::Block,
            Kernel::Decode if arch == Arch::Avx512Bf16 && code_pairs(spec)[1].is_some() => PRounding::TwoBf16,
            Kernel::Decode if arch == Arch::Avx512Vnni && code_quads(spec)[1].is_some() => PRounding::Fixed,
            _ => PRounding::Accumulation,
        },
        mask: match spec.mask {
            None => MaskClass::None,
            Some(mask) if mask.dtype == DType::Bool => MaskClass::Bool,
            Some(_) => MaskClass::Additive,
        },
        kv: spec.kv,
        arch,
    }
}

/// One for what is over before another wakes, else all.
fn threads(spec: &Spec, key: &KernelKey, caps: &Caps) -> usize {
    if ns_on_one_core(&cost::cost(spec, key, 1, None)) < PARALLEL_NS { 1 } else { caps.threads.max(1) }
}

/// About how long a request takes on one core: 3 GHz, 20 bytes a nanosecond.
pub(crate) fn ns_on_one_core(cost: &rapt_core::Cost) -> f64 {
    cost.floor_cycles / 3.0 + (cost.bytes_read + cost.bytes_written) / 20.0
}
