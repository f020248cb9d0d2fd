//! From a spec to a plan: pure, total, without a device.
//!
//! The rules, in order: few queries of f16 or bf16 with head dims up to 256 → `decode`, many → `forward`, both on the
//! tensor cores (`forward` of compute capability 9.0 by wgmma: hopper.cu); anything else → `generic`. What decides is a request's own lengths, dims, dtype and options, never its
//! batch, its strides or where it lies: the bits of a row depend on none of these.
//!
//! Few queries: at most 16 per head and 64 rows per head of K and V. Their keys are split in chunks of 512.

use rapt_core::{
    Arch, Cost, DType, Device, Error, Kernel, KernelKey, Launch, MaskClass, PRounding, Plan, Result, Spec, Work,
};

use crate::code::{BLOCK_N, Body, Code, DECODE_BLOCK_M, GENERIC_BLOCK_M};
use crate::params::{MOST_LEN, moves_by};
use crate::tensor_map::Copied;

/// What a device has, as far as a selection depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Caps {
    /// The architecture that kernels are compiled for.
    pub arch: Arch,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory that a block may ask for.
    pub shared_bytes: u32,
    /// The clock, where the driver tells it: only for the floor in time.
    pub clock_hz: Option<f64>,
    /// Bytes a second of device memory, where the driver tells it: only for the floor in time.
    pub bandwidth: Option<f64>,
}

/// Keys of one chunk: 256 KiB of K and V at head_dim 128, some 8 µs of one multiprocessor's share of an H200's bandwidth.
const CHUNK: usize = 512;
/// Most queries per head, and rows per head of K and V, that are read as decoding.
const DECODE_QUERIES: usize = 16;
const DECODE_ROWS: usize = 64;
/// Most blocks or rows of a request. Blocks that stay on their multiprocessor count on past the last item, by one each.
const MOST_BLOCKS: usize = i32::MAX as usize - (1 << 16);
/// Widest head of the tensor-core kernels.
const MMA_DIM: usize = 256;
/// Shared memory at which three blocks of decode.cu fit a multiprocessor of 228 KiB.
const THIRD_SHARED: u32 = 75 * 1024;
/// Shared memory that every architecture served has for a block.
const LEAST_SHARED: u32 = 99 * 1024;

/// How a request is cut, and by which code it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Design {
    pub(crate) kernel: Kernel,
    pub(crate) main: Code,
    pub(crate) combine: Option<Code>,
    /// Heads per task.
    pub(crate) task_heads: usize,
    /// Rows of one task.
    pub(crate) rows: usize,
    pub(crate) row_blocks: usize,
    pub(crate) num_splits: usize,
    /// Keys per split; 0 where they are not split.
    pub(crate) chunk: usize,
    /// Parts into which the value columns are cut.
    pub(crate) dv_blocks: usize,
    pub(crate) tasks: usize,
    pub(crate) blocks: usize,
    pub(crate) workspace_bytes: usize,
}

fn mask_class(spec: &Spec) -> MaskClass {
    match spec.mask {
        None => MaskClass::None,
        Some(mask) if mask.dtype == DType::Bool => MaskClass::Bool,
        Some(_) => MaskClass::Additive,
    }
}

/// Whether the scale may go into the exponent: nothing is added to the scores, and it is an ordinary positive number.
fn is_natural(spec: &Spec) -> bool {
    let plain = spec.softcap.is_none() && spec.alibi_slopes.is_none() && mask_class(spec) != MaskClass::Additive;
    !(plain && (1e-30..1e30).contains(&spec.softmax_scale.get()))
}

/// Why the tensor cores do not serve `spec`, if they do not.
fn why_generic(spec: &Spec, caps: &Caps, few: bool) -> Option<String> {
    let storage = spec.numerics.storage;
    if !matches!(storage, DType::F16 | DType::BF16) {
        return Some(format!("the tensor cores are not used for {storage}"));
    }
    if spec.head_dim().max(spec.head_dim_v()) > MMA_DIM {
        return Some(format!(
            "head_dim {} / {}: the tensor-core kernels take up to {MMA_DIM}",
            spec.head_dim(),
            spec.head_dim_v()
        ));
    }
    if spec.kv_len() == 0 {
        return Some("there are no keys".into());
    }
    let code = if few { decode_code(spec, caps) } else { forward_code(spec, caps) };
    (code.shared_bytes() > caps.shared_bytes).then(|| {
        format!("its tiles need {} bytes of shared memory, a block has {}", code.shared_bytes(), caps.shared_bytes)
    })
}

fn padded_dims(spec: &Spec) -> (u32, u32) {
    let padded = |dim: usize| (dim.next_multiple_of(16)) as u32;
    (padded(spec.head_dim()), padded(spec.head_dim_v()))
}

fn mma_code(spec: &Spec, caps: &Caps, body: Body, block_m: u32, depth: u32) -> Code {
    // As far as strides tell; `with_addresses` asks the pointers too.
    let vector = [&spec.q, &spec.k, &spec.v].into_iter().all(|tensor| moves_by(tensor, 0, 16));
    Code {
        body,
        arch: caps.arch,
        storage: spec.numerics.storage,
        mask: spec.mask.map(|mask| mask.dtype),
        natural: is_natural(spec),
        vector,
        dims: padded_dims(spec),
        block_m,
        depth,
    }
}

/// Queries per block of hopper.cu and the keys that it can have: three groups of 64 queries where the sums of a group are
/// few, else two; keys as many as leave the sums in registers (the first that fits shared memory). What a mask tensor
/// says needs registers too. Measured on an H200, 2026-11: docs/hopper.md.
const fn hopper_tiles(dims: (u32, u32), mask: MaskClass) -> (u32, &'static [u32]) {
    match (dims, mask) {
        ((..=64, ..=64), MaskClass::None) => (192, &[128]),
        ((..=96, ..=96), MaskClass::None) => (192, &[96]),
        ((_, ..=128), MaskClass::None | MaskClass::Bool) => (128, &[128, 96, 64]),
        ((_, ..=192), MaskClass::None) => (128, &[112, 80]),
        (_, MaskClass::None) => (128, &[80, 64]),
        ((_, ..=128), _) => (128, &[96, 64]),
        _ => (128, &[64]),
    }
}

/// The code of hopper.cu, where it runs.
fn hopper_code(spec: &Spec, caps: &Caps) -> Option<Code> {
    if caps.arch != Arch::Sm90a {
        return None;
    }
    let (block_m, tiles) = hopper_tiles(padded_dims(spec), mask_class(spec));
    // As far as strides tell.
    let vector = [&spec.q, &spec.k, &spec.v].into_iter().all(|tensor| Copied::new(tensor, 0, 1).is_some());
    let of = |&block_n: &u32| Code { vector, ..mma_code(spec, caps, Body::Hopper, block_m, block_n) };
    tiles.iter().map(of).find(|code| code.shared_bytes() <= caps.shared_bytes)
}

fn forward_code(spec: &Spec, caps: &Caps) -> Code {
    if let Some(code) = hopper_code(spec, caps) {
        return code;
    }
    // Two fragments of queries per warp share each load of K and V; their sums fill the registers at 128 columns.
    let wide = mma_code(spec, caps, Body::Forward, 128, BLOCK_N);
    let fits = wide.dims.1 <= 128 && wide.shared_bytes() <= LEAST_SHARED;
    if fits { wide } else { Code { block_m: 64, ..wide } }
}

fn decode_code(spec: &Spec, caps: &Caps) -> Code {
    let of = |stages| mma_code(spec, caps, Body::Decode, DECODE_BLOCK_M, stages);
    let most = THIRD_SHARED.min(caps.shared_bytes);
    [4, 3].into_iter().map(of).find(|code| code.shared_bytes() <= most).unwrap_or_else(|| of(2))
}

/// How `spec` is cut on a device with `caps`.
///
/// # Errors
/// [`Error::Unsupported`] for lengths and counts beyond 2^29 and 2^31.
pub(crate) fn design(spec: &Spec, caps: &Caps) -> Result<(Design, String, String)> {
    let (q_len, kv_len, group) = (spec.q_len(), spec.kv_len(), spec.group_size());
    for (what, n) in [
        ("q_len", q_len),
        ("kv_len", kv_len),
        ("num_q_heads", spec.num_q_heads()),
        ("head_dim", spec.head_dim()),
        ("head_dim_v", spec.head_dim_v()),
        ("rows of a group", group.saturating_mul(q_len)),
    ] {
        if n >= MOST_LEN {
            let why = format!("the CUDA kernels count up to {MOST_LEN}");
            return Err(Error::unsupported(format!("{what} {n}"), why, "cut the problem along it"));
        }
    }
    let few = q_len <= DECODE_QUERIES && group * q_len <= DECODE_ROWS;
    let refused = why_generic(spec, caps, few);
    let (kernel, main) = match (&refused, few) {
        (Some(_), _) => {
            let storage = spec.numerics.storage;
            let depth = Code::generic_columns(storage);
            let code = Code {
                body: Body::Generic,
                arch: caps.arch,
                storage,
                mask: spec.mask.map(|mask| mask.dtype),
                natural: true,
                vector: false,
                dims: (0, 0),
                block_m: GENERIC_BLOCK_M,
                depth,
            };
            (Kernel::Generic, code)
        }
        (None, true) => (Kernel::Decode, decode_code(spec, caps)),
        (None, false) => (Kernel::Forward, forward_code(spec, caps)),
    };
    let block_m = main.block_m as usize;
    // Rows of one head fill their tiles, or the heads of a group share them.
    let task_heads = if !few && q_len >= block_m { 1 } else { group };
    let rows = task_heads * q_len;
    let (num_splits, chunk) = if few { (kv_len.div_ceil(CHUNK).max(1), CHUNK) } else { (1, 0) };
    let dv_blocks = if kernel == Kernel::Generic { spec.head_dim_v().div_ceil(main.depth as usize) } else { 1 };
    let tasks = spec.batch().saturating_mul(spec.num_q_heads() / task_heads.max(1));
    let row_blocks = rows.div_ceil(block_m);
    let combine = (num_splits > 1).then_some(Code {
        body: Body::Combine,
        mask: None,
        natural: true,
        vector: false,
        dims: (0, 0),
        block_m: 0,
        depth: 0,
        ..main
    });
    let blocks = [tasks, row_blocks, num_splits, dv_blocks].into_iter().fold(1usize, usize::saturating_mul);
    if blocks.max(tasks.saturating_mul(rows)) > MOST_BLOCKS {
        let what = format!("a request of {blocks} blocks");
        return Err(Error::unsupported(what, "a launch has at most 2^31", "cut the problem along its batch"));
    }
    let row_bytes = (spec.head_dim_v() + 2) * spec.numerics.accumulation.size_bytes();
    let workspace_bytes =
        if combine.is_some() { (tasks * rows).saturating_mul(num_splits).saturating_mul(row_bytes) } else { 0 };
    let why = match kernel {
        Kernel::Decode => format!(
            "{} queries share each head of K and V: bound by reading them, {num_splits} chunks of keys",
            group * q_len
        ),
        Kernel::Forward if main.body == Body::Hopper => format!(
            "many queries: both products on the tensor cores by wgmma, K and V by {}",
            if main.vector {
                "the copy engine"
            } else {
                "loads of one element: their strides are not the copy engine's"
            }
        ),
        Kernel::Forward => "many queries: both products on the tensor cores".to_owned(),
        _ => "it serves every request".to_owned(),
    };
    let why_not_faster = refused.unwrap_or_default();
    let design = Design {
        kernel,
        main,
        combine,
        task_heads,
        rows,
        row_blocks,
        num_splits,
        chunk,
        dv_blocks,
        tasks,
        blocks,
        workspace_bytes,
    };
    Ok((design, why, why_not_faster))
}

impl Design {
    /// Blocks of the main launch: one per item, or such as stay on their multiprocessor.
    pub(crate) fn grid_blocks(&self, caps: &Caps) -> usize {
        match self.main.body {
            Body::Hopper => self.blocks.min(caps.multiprocessors.max(1) as usize),
            _ => self.blocks,
        }
    }

    /// This design where q, k and v lie at these addresses.
    pub(crate) fn with_addresses(self, spec: &Spec, addresses: [usize; 3]) -> Self {
        let tensors = [&spec.q, &spec.k, &spec.v];
        let aligned = tensors.into_iter().zip(addresses).all(|(tensor, address)| moves_by(tensor, address, 16));
        let vector = self.main.vector && aligned;
        Design { main: Code { vector, ..self.main }, ..self }
    }
}

/// Multiplications and additions per cycle of one multiprocessor.
fn flops_per_cycle(arch: Arch, kernel: Kernel, storage: DType) -> f64 {
    let data_centre = matches!(arch, Arch::Sm80 | Arch::Sm90a | Arch::Sm100 | Arch::Sm103);
    match (kernel, arch, storage) {
        (Kernel::Generic, _, DType::F64) => {
            if data_centre {
                128.0
            } else {
                4.0
            }
        }
        (Kernel::Generic, Arch::Sm80, _) => 128.0,
        (Kernel::Generic, ..) => 256.0,
        (_, Arch::Sm90a, _) => 4096.0,
        (_, Arch::Sm100 | Arch::Sm103, _) => 8192.0,
        (_, Arch::Sm80, _) => 2048.0,
        _ => 1024.0,
    }
}

fn cost(spec: &Spec, caps: &Caps, kernel: Kernel) -> Cost {
    let pairs = spec.pairs() as f64;
    let flops = pairs * 2.0 * (spec.head_dim() + spec.head_dim_v()) as f64;
    let bytes = |shape: &[usize], strides: &[isize], dtype: DType| {
        let distinct = |(&n, &stride): (&usize, &isize)| if stride == 0 { 1.0 } else { n as f64 };
        shape.iter().zip(strides).map(distinct).product::<f64>() * dtype.size_bytes() as f64
    };
    let of = |tensor: &rapt_core::TensorSpec<4>| bytes(&tensor.shape, &tensor.strides, tensor.dtype);
    let bytes_read = of(&spec.q) + of(&spec.k) + of(&spec.v) + spec.mask.as_ref().map_or(0.0, of);
    let bytes_written = of(&spec.out) + spec.lse.map_or(0.0, |lse| bytes(&lse.shape, &lse.strides, lse.dtype));
    // 16 exponentials per cycle and multiprocessor, beside the products.
    let cycles = (flops / flops_per_cycle(caps.arch, kernel, spec.numerics.storage)).max(pairs / 16.0);
    let seconds = |hz: f64| {
        let work = cycles / (hz * f64::from(caps.multiprocessors.max(1)));
        work.max(caps.bandwidth.map_or(0.0, |bandwidth| (bytes_read + bytes_written) / bandwidth))
    };
    Cost {
        flops,
        exponentials: pairs,
        bytes_read,
        bytes_written,
        floor_cycles: cycles,
        floor_seconds: caps.clock_hz.map(seconds),
        bytes_copied: 0,
        bytes_packed: 0,
    }
}

/// Chooses what runs for `spec` on a device with `caps`.
///
/// # Errors
/// [`Error::DeviceUnavailable`] for anything but CUDA memory; [`Error::Unsupported`] for lengths beyond 2^29.
pub fn select(spec: &Spec, caps: &Caps) -> Result<Plan> {
    if !matches!(spec.device, Device::Cuda(_)) {
        let why = "this backend serves the memory of NVIDIA GPUs".into();
        return Err(Error::DeviceUnavailable { device: spec.device, why });
    }
    let key = |kernel| KernelKey {
        direction: spec.direction,
        kernel,
        storage: spec.numerics.storage,
        accumulation: spec.numerics.accumulation,
        p_rounding: match kernel {
            Kernel::Forward | Kernel::Decode => PRounding::Storage,
            _ => PRounding::Accumulation,
        },
        mask: mask_class(spec),
        kv: spec.kv,
        arch: caps.arch,
    };
    if spec.out.shape.contains(&0) {
        let cost = cost(spec, caps, Kernel::Empty);
        let why = "no output: nothing is launched".to_owned();
        return Ok(Plan::new(spec.clone(), key(Kernel::Empty), (0, 0, 1, 0), 1, 0, cost, false, why, String::new()));
    }
    let (design, why, why_not_faster) = design(spec, caps)?;
    let block_n = match design.main.body {
        Body::Decode => 16,
        Body::Hopper => design.main.depth as usize,
        _ => BLOCK_N as usize,
    };
    // The blocks that share the value columns of one item's rows are one item.
    let items = design.blocks / design.dv_blocks.max(1);
    let tiles = (design.main.block_m as usize, block_n, design.num_splits, items);
    let launch = Launch {
        blocks: design.grid_blocks(caps),
        block_threads: design.main.threads() as usize,
        shared_bytes: design.main.shared_bytes() as usize,
        multiprocessors: caps.multiprocessors as usize,
        compiled: None,
    };
    let cost = cost(spec, caps, design.kernel);
    let work = Work {
        tasks: design.tasks,
        rows: design.rows,
        rows_per_item: design.main.block_m as usize,
        keys_per_item: if design.num_splits > 1 { design.chunk } else { spec.kv_len() },
    };
    let plan =
        Plan::new(spec.clone(), key(design.kernel), tiles, 1, design.workspace_bytes, cost, false, why, why_not_faster);
    let plan = plan.on_gpu(launch);
    // Without keys nothing is attended: there is no cut of them to state.
    Ok(if spec.kv_len() == 0 { plan } else { plan.with_work(work) })
}

/// The code that [`select`] would have compiled for `spec`: the kernel, and what puts its splits together.
///
/// # Errors
/// As [`select`].
pub fn codes(spec: &Spec, caps: &Caps) -> Result<Vec<Code>> {
    let (design, ..) = design(spec, caps)?;
    Ok([Some(design.main), design.combine].into_iter().flatten().collect())
}
