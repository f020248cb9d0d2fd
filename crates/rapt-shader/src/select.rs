//! From a spec to a plan: pure, total, without a device.
//!
//! `decode` for few rows of a key head, else `matrices` of float16 (of every dtype where a device has those of float32), else `forward`, where their tiles fit the device and the request; else `generic`. What a kernel sums, and in which order, depends on neither batch,
//! strides, alignment nor windows: the bits of a row are its own.

use rapt_core::{
    Compute, Cost, DType, Error, Kernel, KernelKey, MaskClass, PRounding, Plan, Result, Spec, TensorSpec, Work,
};

use crate::caps::Caps;
use crate::launch::ShaderLaunch;
use crate::matrices::MatrixTiles;
use crate::params::MOST_LEN;
use crate::partition::Partition;
use crate::variant::{Algorithm, KernelVariant, LANES_COLUMNS, MOST_FEW_ROWS, Stores, Tiles};
use crate::window::windows;

fn refuse_what_is_not_served(spec: &Spec, caps: &Caps) -> Result<()> {
    let language = caps.language();
    spec.refuse_dropout(format_args!("this device, in {language}"))?;
    let storage = spec.numerics.storage;
    if storage == DType::F64 || spec.out.dtype == DType::F64 {
        let instead = "give q, k and v in float32, or leave them in host memory and compute on the CPU";
        return Err(Error::unsupported("float64 on this device", format!("{language} has no 64-bit floats"), instead));
    }
    let others = [
        (spec.compute != Compute::Exact, "products of int8 (compute)"),
        (spec.is_quantized(), "q, k or v that are codes"),
        (spec.pages.is_some(), "keys in pages"),
        (spec.lengths.is_some(), "sequences with lengths of their own"),
        (spec.varlen.is_some(), "sequences that lie one after another"),
    ];
    if let Some((_, what)) = others.into_iter().find(|(is, _)| *is) {
        let instead = "call `attention` for each sequence, on numbers";
        return Err(Error::unsupported(what, format!("no kernel in {language} reads them"), instead));
    }
    let rows = spec.group_size().saturating_mul(spec.q_len());
    let lengths = [
        ("kv_len", spec.kv_len()),
        ("rows of a group", rows),
        ("num_q_heads", spec.num_q_heads()),
        ("batch · num_kv_heads", spec.batch().saturating_mul(spec.num_kv_heads())),
        ("head_dim", spec.head_dim()),
        ("head_dim_v", spec.head_dim_v()),
    ];
    match lengths.into_iter().find(|(_, n)| *n >= MOST_LEN) {
        Some((what, n)) => {
            let (what, why) =
                (format!("{what} = {n}"), format!("kernels in {language} count in 32 bits: lengths are below 2^29"));
            Err(Error::unsupported(what, why, "cut the problem along that dimension"))
        }
        None => Ok(()),
    }
}

fn cost(spec: &Spec) -> Cost {
    let pairs = spec.pairs() as f64;
    let bytes = |shape: &[usize], strides: &[isize], dtype: DType| {
        let distinct = |(&n, &stride): (&usize, &isize)| if stride == 0 { 1.0 } else { n as f64 };
        shape.iter().zip(strides).map(distinct).product::<f64>() * dtype.size_bytes() as f64
    };
    let of = |tensor: &TensorSpec<4>| bytes(&tensor.shape, &tensor.strides, tensor.dtype);
    let flops = pairs * 2.0 * (spec.head_dim() + spec.head_dim_v()) as f64;
    Cost {
        flops,
        exponentials: pairs,
        bytes_read: of(&spec.q) + of(&spec.k) + of(&spec.v) + spec.mask.as_ref().map_or(0.0, of),
        bytes_written: of(&spec.out) + spec.lse.map_or(0.0, |lse| bytes(&lse.shape, &lse.strides, lse.dtype)),
        // 128 multiply-adds a cycle; neither clock nor number of cores is told.
        floor_cycles: flops / 256.0,
        floor_seconds: None,
        bytes_copied: 0,
        bytes_packed: 0,
    }
}

/// Products that `forward` and the lanes of `decode` sum in one go, and columns of q that `decode` has room for.
const MOST_HEAD_DIM: usize = 256;

/// An algorithm for a spec, or why it does not serve it.
type Answer = core::result::Result<Algorithm, String>;

fn is_short(spec: &Spec, name: &str) -> core::result::Result<(), String> {
    match spec.head_dim() {
        ..=MOST_HEAD_DIM => Ok(()),
        d => Err(format!("{name} sums up to {MOST_HEAD_DIM} products in one go, head_dim is {d}")),
    }
}

fn forward(spec: &Spec, caps: &Caps) -> Answer {
    is_short(spec, "forward")?;
    // On a processor a text of its own, where rows of q fit its registers.
    if caps.has_lanes && spec.head_dim() <= LANES_COLUMNS {
        return fits(Algorithm::Lanes, caps);
    }
    let column_groups = spec.head_dim_v().div_ceil(64).clamp(1, 2);
    let of_task = (spec.group_size() * spec.q_len()).div_ceil(64) * spec.head_dim_v().div_ceil(64 * column_groups);
    let blocks = spec.batch().saturating_mul(spec.num_kv_heads()).saturating_mul(of_task);
    let row_groups = if blocks <= caps.few_blocks { 1 } else { 2 };
    fits(Algorithm::Forward { column_groups, row_groups }, caps)
}

fn matrices(spec: &Spec, caps: &Caps) -> Answer {
    let storage = spec.numerics.storage;
    let has_floats = caps.matrices.is_some_and(|units| units.has_floats);
    if storage != DType::F16 && !has_floats {
        return Err(format!("matrices are of float16 in {}, q is {storage}", caps.language()));
    }
    let Some(units) = caps.matrices else {
        return Err(
            "the device has no cooperative matrices of float16 that sum in float32, or its subgroups vary".into()
        );
    };
    match MatrixTiles::fitting(units, storage, spec.head_dim(), spec.head_dim_v(), caps.max_shared_bytes) {
        Some(tiles) => fits(Algorithm::Matrices(tiles), caps),
        None if spec.head_dim() > 128 => {
            Err(format!("matrices hold 128 columns of q, head_dim is {}", spec.head_dim()))
        }
        None => Err(format!("no tiles of matrices fit the device: {units:?}, {} bytes", caps.max_shared_bytes)),
    }
}

fn few_rows(spec: &Spec) -> bool {
    spec.group_size().saturating_mul(spec.q_len()) <= MOST_FEW_ROWS
}

/// On matrices of float16, where the device has them: such products cost less than widening each element. A processor has no units for them.
fn decode_on_matrices(spec: &Spec, caps: &Caps) -> Option<Algorithm> {
    let units = caps.matrices.filter(|_| spec.numerics.storage == DType::F16 && !caps.has_lanes)?;
    let shared_bytes = caps.max_shared_bytes;
    MatrixTiles::fitting_few_rows(units, spec.head_dim(), spec.head_dim_v(), shared_bytes).map(Algorithm::Matrices)
}

fn decode(spec: &Spec, caps: &Caps) -> Answer {
    if !few_rows(spec) {
        let rows = spec.group_size().saturating_mul(spec.q_len());
        return Err(format!("decode serves up to {MOST_FEW_ROWS} query rows for a key head, here are {rows}"));
    }
    is_short(spec, "decode")?;
    let [one, four, eight] = [1, 4, 8].map(|rows| Algorithm::Decode { rows });
    let on_matrices = || decode_on_matrices(spec, caps).and_then(|algorithm| fits(algorithm, caps).ok());
    let algorithm = match spec.group_size() * spec.q_len() {
        _ if let Some(algorithm) = on_matrices() => Ok(algorithm),
        0 | 1 => fits(one, caps),
        2..=4 => fits(four, caps),
        _ => fits(eight, caps).or_else(|_| fits(four, caps)),
    }?;
    match Partition::new(spec, algorithm).partial_bytes {
        bytes if bytes as u64 > caps.max_binding_bytes => {
            Err(format!("decode leaves {bytes} bytes of a key head, the device binds {}", caps.max_binding_bytes))
        }
        _ => Ok(algorithm),
    }
}

/// `algorithm`, or what of it the device does not have.
fn fits(algorithm: Algorithm, caps: &Caps) -> Answer {
    let (name, Tiles { threads, shared_bytes, .. }) = (algorithm.kernel().name(), algorithm.tiles());
    if shared_bytes > caps.max_shared_bytes {
        let has = caps.max_shared_bytes;
        return Err(format!("{name} takes {shared_bytes} bytes of workgroup memory, the device has {has}"));
    }
    if threads > caps.max_threads {
        return Err(format!("{name} takes {threads} threads a workgroup, the device has {}", caps.max_threads));
    }
    Ok(algorithm)
}

/// Chooses what runs for `spec` on a device with `caps`. Where tensors lie is not asked: whoever binds them does.
///
/// # Errors
/// [`Error::Unsupported`] for float64, codes, pages, sequences with lengths of their own, lengths beyond 2^29, and a head of which one tensor
/// is longer than a binding may be.
pub fn select(spec: &Spec, caps: &Caps) -> Result<Plan> {
    let has_floats = caps.matrices.is_some_and(|units| units.has_floats);
    let is_without = spec.numerics.storage == DType::F32 && !has_floats;
    let rules: &[fn(&Spec, &Caps) -> Answer] = match (few_rows(spec), is_without) {
        (true, true) => &[decode, forward],
        (true, false) => &[decode, matrices, forward],
        (false, true) => &[forward],
        (false, false) => &[matrices, forward],
    };
    let mut why_not = Vec::new();
    let mut chosen = None;
    for rule in rules {
        match rule(spec, caps) {
            Ok(algorithm) => {
                chosen = Some(algorithm);
                break;
            }
            Err(why) => why_not.push(why),
        }
    }
    plan(spec, caps, chosen.unwrap_or(Algorithm::Generic), why_not.join("; "))
}

/// As [`select`], but with this kernel, be it the fastest or not.
///
/// # Errors
/// As [`select`], and [`Error::Unsupported`] for a kernel that does not serve `spec` on this device.
pub fn select_kernel(spec: &Spec, caps: &Caps, kernel: Kernel) -> Result<Plan> {
    let algorithm = match kernel {
        Kernel::Generic => Ok(Algorithm::Generic),
        Kernel::Forward => forward(spec, caps),
        Kernel::Matrices => matrices(spec, caps),
        Kernel::Decode => decode(spec, caps),
        _ => Err(format!("there is no such kernel in {}", caps.language())),
    };
    let unserved = |why| Error::unsupported(format!("kernel {}", kernel.name()), why, "leave the choice to `select`");
    plan(spec, caps, algorithm.map_err(unserved)?, String::new())
}

fn plan(spec: &Spec, caps: &Caps, algorithm: Algorithm, why_not_faster: String) -> Result<Plan> {
    refuse_what_is_not_served(spec, caps)?;
    let is_empty = spec.out.shape.contains(&0);
    let partition = Partition::new(spec, algorithm);
    let windows = if is_empty { Vec::new() } else { windows(spec, caps, &partition)? };
    let work = (!is_empty).then(|| Work {
        tasks: spec.batch() * spec.num_kv_heads(),
        rows: spec.group_size() * spec.q_len(),
        rows_per_item: algorithm.tiles().block_m,
        keys_per_item: partition.split_keys,
    });
    let (variant, combine) = match is_empty {
        true => (None, None),
        false => {
            let (variant, combine) = KernelVariant::all_of(algorithm, spec, caps.has_16_bit_stores);
            (Some(variant), combine)
        }
    };
    let key = KernelKey {
        direction: spec.direction,
        kernel: if is_empty { Kernel::Empty } else { algorithm.kernel() },
        storage: spec.numerics.storage,
        accumulation: spec.numerics.accumulation,
        p_rounding: match algorithm {
            Algorithm::Matrices(tiles) if tiles.numbers == DType::F16 => PRounding::Storage,
            _ => PRounding::Accumulation,
        },
        mask: match spec.mask.map(|mask| mask.dtype) {
            None => MaskClass::None,
            Some(DType::Bool) => MaskClass::Bool,
            Some(_) => MaskClass::Additive,
        },
        kv: spec.kv,
        arch: caps.arch,
    };
    let launch = ShaderLaunch { variant, combine, windows, partition, cost: cost(spec), work, why_not_faster };
    Ok(Plan::new(spec.clone(), key, launch))
}

/// As [`select`], but with this algorithm, whose tiles may be others than `select` has: to measure them.
///
/// # Errors
/// As [`select`].
pub fn select_algorithm(spec: &Spec, caps: &Caps, algorithm: Algorithm) -> Result<Plan> {
    plan(spec, caps, algorithm, String::new())
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const MASKS: [Option<DType>; 5] = [None, Some(DType::Bool), Some(DType::F32), Some(DType::F16), Some(DType::BF16)];

/// Every dtype of out, with every way to store it.
fn outs() -> impl Iterator<Item = (DType, Stores)> {
    let stores = |out: DType| match out {
        DType::F32 => vec![Stores::Words],
        _ => vec![Stores::Halves, Stores::HalvesOfWords],
    };
    FLOATS.into_iter().flat_map(move |out| stores(out).into_iter().map(move |stores| (out, stores)))
}

fn of_every_mask_and_out(algorithm: Algorithm, storage: DType) -> impl Iterator<Item = KernelVariant> {
    outs().flat_map(move |(out, stores)| MASKS.map(|mask| KernelVariant { algorithm, storage, mask, out, stores }))
}

/// Of what leaves its sums to `combine`.
fn of_every_mask(algorithm: Algorithm, storage: DType) -> [KernelVariant; 5] {
    let (out, stores) = (DType::F32, Stores::Words);
    MASKS.map(|mask| KernelVariant { algorithm, storage, mask, out, stores })
}

/// Every variant on subgroups of a processor that a plan may launch.
#[must_use]
pub fn lane_variants() -> Vec<KernelVariant> {
    FLOATS.into_iter().flat_map(|storage| of_every_mask_and_out(Algorithm::Lanes, storage)).collect()
}

/// Every variant on cooperative matrices that a plan may launch on any device.
#[must_use]
pub fn matrix_variants() -> Vec<KernelVariant> {
    let storages = |numbers| if numbers == DType::F16 { vec![numbers] } else { vec![DType::F32, DType::BF16] };
    let mut all = Vec::new();
    for tiles in MatrixTiles::all() {
        let algorithm = Algorithm::Matrices(tiles);
        for storage in storages(tiles.numbers) {
            match tiles.is_split() {
                true => all.extend(of_every_mask(algorithm, storage)),
                false => all.extend(of_every_mask_and_out(algorithm, storage)),
            }
        }
    }
    all
}

/// Every variant that a plan may launch on any device, but for [`matrix_variants`] and [`lane_variants`].
#[must_use]
pub fn variants() -> Vec<KernelVariant> {
    let forward = [(1, 1), (1, 2), (2, 1), (2, 2)]
        .map(|(column_groups, row_groups)| Algorithm::Forward { column_groups, row_groups });
    let mut all = Vec::new();
    for algorithm in std::iter::once(Algorithm::Generic).chain(forward) {
        all.extend(FLOATS.into_iter().flat_map(|storage| of_every_mask_and_out(algorithm, storage)));
    }
    for rows in [1, 4, 8] {
        for storage in FLOATS {
            all.extend(of_every_mask(Algorithm::Decode { rows }, storage));
        }
    }
    let (algorithm, storage, mask) = (Algorithm::Combine, DType::F32, None);
    all.extend(outs().map(|(out, stores)| KernelVariant { algorithm, storage, mask, out, stores }));
    all
}
