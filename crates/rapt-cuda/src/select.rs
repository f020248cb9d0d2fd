//! From a spec to a plan: pure, total, without a device.
//!
//! The rules, in order: few queries of f16 or bf16 with head dims up to 256 → `decode`, many → `forward`, both on the
//! tensor cores (`forward` of compute capability 9.0 by wgmma: hopper.cu, and there float32 with head dims up to 128:
//! float32.cu); anything else → `generic`. What decides is a request's own lengths, dims, dtype and options, never its
//! batch, its strides or where it lies: the bits of a row depend on none of these. How many rows hopper.cu takes at a time, and
//! who writes its sums, follow these too, and change no bit.
//!
//! Few queries: at most 16 per head and 64 rows per head of K and V. Their keys are split in chunks, whose length follows
//! kv_len. Whether blocks take whole rows or chunks depends on the device too, and changes no bit (common.cu, Fold).

use rapt_core::{
    Arch, Cost, DType, Device, Error, Kernel, KernelKey, Launch, LaunchPlan, MaskClass, PRounding, Plan, Result, Spec,
    Work,
};

use crate::code::{BLOCK_N, Body, COMBINE_COLUMNS, COMBINE_WARPS, Code, DECODE_BLOCK_M, GENERIC_BLOCK_M};
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
/// Most blocks or rows of a request. Blocks that stay on their multiprocessor count on past the last item, by one each.
const MOST_BLOCKS: usize = i32::MAX as usize - (1 << 16);
/// Widest head of the tensor-core kernels.
const MMA_DIM: usize = 256;
/// Widest head of float32.cu.
const FLOAT32_DIM: usize = 128;
/// Shared memory that every architecture served has for a block.
const LEAST_SHARED: u32 = 99 * 1024;
/// Shared memory of decode.cu where one block is alone on its multiprocessor: deeper rings gave nothing.
const ALONE_SHARED: u32 = 176 * 1024;

/// Keys from which on tiles of 112 are taken at head dims 80 and 96, below it tiles of 96: 3 % slower at 1024, 2 to 4 % faster at
/// 4096 (H200, 2026-11; between them not measured).
const MANY_KEYS: usize = 2048;

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
    /// Rows of one item, at most.
    pub(crate) item_rows: usize,
    /// Items at the beginning of a task that have 64 rows less.
    pub(crate) short_items: usize,
    /// Whether hopper.cu works off late items and early ones in pairs.
    pub(crate) paired: bool,
    pub(crate) row_blocks: usize,
    pub(crate) num_splits: usize,
    /// Keys per split; 0 where they are not split.
    pub(crate) chunk: usize,
    /// Parts into which the value columns are cut.
    pub(crate) dv_blocks: usize,
    pub(crate) tasks: usize,
    pub(crate) blocks: usize,
    /// Chunks of all rows; without a split, blocks of rows.
    pub(crate) items: usize,
    pub(crate) workspace_bytes: usize,
}

fn mask_class(spec: &Spec) -> MaskClass {
    match spec.mask {
        None => MaskClass::None,
        Some(mask) if mask.dtype == DType::Bool => MaskClass::Bool,
        Some(_) => MaskClass::Additive,
    }
}

/// Whether scores need their scale before the exponent: something is added to them, or it is no ordinary positive number.
fn is_natural(spec: &Spec, mask: MaskClass) -> bool {
    let plain = spec.softcap.is_none() && spec.alibi_slopes.is_none() && mask != MaskClass::Additive;
    !(plain && (1e-30..1e30).contains(&spec.softmax_scale.get()))
}

/// Why the tensor cores do not serve `spec`, if they do not.
fn why_generic(spec: &Spec, caps: &Caps, few: bool, loads: Loads) -> Option<String> {
    let storage = spec.numerics.storage;
    let most = match storage {
        DType::F16 | DType::BF16 => MMA_DIM,
        DType::F32 if caps.arch == Arch::Sm90a && !few => FLOAT32_DIM,
        DType::F32 if caps.arch == Arch::Sm90a => {
            return Some("the tensor cores are used for more than 16 queries of float32".into());
        }
        _ => return Some(format!("the tensor cores are not used for {storage} on {}", caps.arch.name())),
    };
    if spec.head_dim().max(spec.head_dim_v()) > most {
        return Some(format!(
            "head_dim {} / {}: the tensor-core kernels take up to {most} of {storage}",
            spec.head_dim(),
            spec.head_dim_v()
        ));
    }
    if spec.kv_len() == 0 {
        return Some("there are no keys".into());
    }
    let code = if few { decode_code(spec, caps) } else { forward_code(spec, caps, loads) };
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
        natural: is_natural(spec, mask_class(spec)),
        vector,
        dims: padded_dims(spec),
        block_m,
        depth,
    }
}

/// Queries per block of hopper.cu and the keys that it can have (the first that fits shared memory): three groups of 64
/// queries where the sums of a group are few, else two; keys as many as leave the sums, and biases, in registers, also
/// beside softcap and slopes (`natural`). `many_keys`: the last tile of keys, which may be filled in part, is but one of
/// many. Measured on an H200, 2026-11: docs/internals/hopper.md.
const fn hopper_tiles(dims: (u32, u32), mask: Option<DType>, natural: bool, many_keys: bool) -> (u32, &'static [u32]) {
    match (dims, mask) {
        ((..=64, 33..=48), None) if natural => (128, &[128]),
        ((..=64, ..=64), None) => (192, &[128]),
        ((..=96, ..=96), None) => (192, if many_keys { &[112] } else { &[96] }),
        ((65.., ..=128), Some(DType::Bool)) if natural => (128, &[96, 64]),
        ((_, ..=128), None | Some(DType::Bool)) => (128, &[128, 96, 64]),
        ((_, ..=192), None) => (128, &[112, 80]),
        (_, None) => (128, &[80, 64]),
        (_, Some(DType::Bool)) => (128, &[64]),
        ((..=64, ..=64), Some(DType::F16 | DType::BF16)) => (128, &[128]),
        ((_, ..=128), Some(DType::F16 | DType::BF16)) => (128, &[96, 64]),
        ((_, ..=128), Some(_)) => (128, &[64]),
        (_, Some(_)) => (128, &[48]),
    }
}

/// How the rows of a task are cut into items of hopper.cu.
#[derive(Clone, Copy, Debug)]
struct HopperItems {
    /// Groups of 64 rows of an item.
    groups: usize,
    /// Items of a task.
    count: usize,
    /// Whether a late item and an early one are worked off in turn.
    paired: bool,
    /// Items at the beginning that have a group less.
    short: usize,
}

impl HopperItems {
    /// In pairs where positions bound the keys, so that rows see unlike numbers of them; but where each item has a block they are
    /// alone. Then early items also have a group less rather than the last one one or two groups only, which take two thirds
    /// and five sixths of what three take (causal, H200, 2026-11: 6 % at 1024 rows, 3 % at 4096).
    fn new(bounded: bool, groups: usize, tasks: usize, rows: usize, multiprocessors: usize) -> Self {
        let count = rows.div_ceil(64 * groups);
        let paired = bounded && tasks.saturating_mul(count) > multiprocessors;
        let short = if paired && count > 1 { count * groups - rows.div_ceil(64) } else { 0 };
        HopperItems { groups, count, paired, short }
    }

    /// The first row of an item.
    fn first_row(&self, item: usize) -> usize {
        (item * self.groups - item.min(self.short)) * 64
    }

    /// Items of a task, or pairs of them.
    fn units(&self) -> usize {
        if self.paired { self.count.div_ceil(2) } else { self.count }
    }
}

/// As many rows to an item as a block can have, or such as let a launch end sooner, where those would leave multiprocessors idle.
/// In sixths of what a tile of keys takes with three groups of 64 rows: with two it takes five, with one four, and an item three
/// beside its tiles (H200, 2026-11).
fn hopper_items(spec: &Spec, caps: &Caps, code: &Code, tasks: usize, rows: usize, task_heads: usize) -> HopperItems {
    let range = spec.block_range();
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    let block_n = code.depth as usize;
    let cut = |groups: usize| HopperItems::new(!range.is_unbounded(), groups, tasks, rows, multiprocessors);
    let rounds = |items: &HopperItems| tasks.saturating_mul(items.units()).div_ceil(multiprocessors);
    let time = |groups: usize| {
        let items = cut(groups);
        let tiles = |item: usize| {
            // Rows of several heads: any query may be among them.
            let (i0, i1) = if task_heads == 1 {
                (items.first_row(item), rows.min(items.first_row(item + 1)))
            } else {
                (0, spec.q_len())
            };
            let (lo, hi) = range.keys_of_run(i0, i1);
            hi.div_ceil(block_n).saturating_sub(lo / block_n)
        };
        let (last, middle) = (items.count - 1, items.count / 2);
        let (most, ends) = if items.paired {
            ((tiles(0) + tiles(last)).max(tiles(middle) + tiles(last - middle)), 2)
        } else {
            (tiles(0).max(tiles(middle)).max(tiles(last)), 1)
        };
        rounds(&items).saturating_mul(most * (3 + groups) + 3 * ends)
    };
    let whole = code.block_m as usize / 64;
    // Of many rounds the last one counts for little.
    if rounds(&cut(whole)) > 2 {
        return cut(whole);
    }
    cut((1..=whole).rev().min_by_key(|groups| time(*groups)).unwrap_or(whole))
}

/// Who loads the tiles of hopper.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loads {
    /// The copy engine, where strides let it.
    Copies,
    /// Threads, element by element.
    Elements,
}

/// The code of hopper.cu, where it runs.
fn hopper_code(spec: &Spec, caps: &Caps, loads: Loads) -> Option<Code> {
    if caps.arch != Arch::Sm90a {
        return None;
    }
    // Rows of K and V that are not whole sectors of memory are dear to read in large tiles.
    let whole_sectors = spec.head_dim().is_multiple_of(16) && spec.head_dim_v().is_multiple_of(16);
    let many_keys = whole_sectors && spec.kv_len() >= MANY_KEYS;
    // Biases are added in natural units by themselves.
    let natural = is_natural(spec, MaskClass::None);
    let (block_m, tiles) = hopper_tiles(padded_dims(spec), spec.mask.map(|mask| mask.dtype), natural, many_keys);
    // As far as strides tell.
    let copies = loads == Loads::Copies;
    let vector = copies && [&spec.q, &spec.k, &spec.v].into_iter().all(|tensor| Copied::new(tensor, 0, 1).is_some());
    // Two groups leave those that load element by element the registers for it; the bits are the same.
    let block_m = if vector { block_m } else { 128 };
    let of = |&block_n: &u32| Code { vector, natural, ..mma_code(spec, caps, Body::Hopper, block_m, block_n) };
    tiles.iter().map(of).find(|code| code.shared_bytes() <= caps.shared_bytes)
}

fn forward_code(spec: &Spec, caps: &Caps, loads: Loads) -> Code {
    if spec.numerics.storage == DType::F32 {
        return mma_code(spec, caps, Body::Float32, 128, BLOCK_N);
    }
    if let Some(code) = hopper_code(spec, caps, loads) {
        return code;
    }
    // Two fragments of queries per warp share each load of K and V; their sums fill the registers at 128 columns.
    let wide = mma_code(spec, caps, Body::Forward, 128, BLOCK_N);
    // As many keys as leave a warp's scores and sums in registers; where scores are changed in between, as few as below.
    let is_plain = !wide.natural && wide.mask.is_none();
    let depth = match wide.dims.0.max(wide.dims.1) {
        0..=64 if is_plain => {
            if caps.arch == Arch::Sm90a {
                128
            } else {
                96
            }
        }
        65..=128 if is_plain => 48,
        _ => BLOCK_N,
    };
    let wide = Code { depth, ..wide };
    let fits = wide.dims.1 <= 128 && wide.shared_bytes() <= LEAST_SHARED;
    if fits { wide } else { Code { block_m: 64, depth: BLOCK_N, ..wide } }
}

fn decode_code(spec: &Spec, caps: &Caps) -> Code {
    let of = |stages| mma_code(spec, caps, Body::Decode, DECODE_BLOCK_M, stages);
    let most = if of(1).decode_warps() == 8 { ALONE_SHARED } else { LEAST_SHARED };
    let deep = [4, 3].into_iter().map(of).find(|code| code.shared_bytes() <= most.min(caps.shared_bytes));
    // The widest heads leave room for two tiles on the largest devices only.
    deep.unwrap_or_else(|| if of(2).shared_bytes() <= caps.shared_bytes { of(2) } else { of(1) })
}

/// What puts the splits of `main` together.
fn combine_code(main: Code) -> Code {
    Code { body: Body::Combine, mask: None, natural: true, vector: false, dims: (0, 0), block_m: 0, depth: 0, ..main }
}

/// Blocks of decode.cu for `rows` blocks of rows of `num_splits` chunks each, and whether they take chunks.
fn decode_blocks(caps: &Caps, code: &Code, rows: usize, num_splits: usize) -> (usize, bool) {
    let resident = ((caps.shared_bytes + 1024) / (code.shared_bytes() + 1024)).clamp(1, code.decode_resident());
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

/// How `spec` is cut on a device with `caps`, and why not on the tensor cores if it is not.
///
/// # Errors
/// [`Error::Unsupported`] for lengths and counts beyond 2^29 and 2^31.
pub(crate) fn design(spec: &Spec, caps: &Caps) -> Result<(Design, Option<String>)> {
    design_with(spec, caps, Loads::Copies)
}

/// As [`design`]: the tiles of hopper.cu hang on who loads them, its bits do not.
///
/// # Errors
/// As [`design`].
pub(crate) fn design_with(spec: &Spec, caps: &Caps, loads: Loads) -> Result<(Design, Option<String>)> {
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
    let refused = why_generic(spec, caps, few, loads);
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
        (None, false) => (Kernel::Forward, forward_code(spec, caps, loads)),
    };
    let block_m = main.block_m as usize;
    // Rows of one head fill their tiles, or the heads of a group share them.
    let task_heads = if !few && q_len >= block_m { 1 } else { group };
    let rows = task_heads * q_len;
    let chunk = match kernel {
        Kernel::Decode => CHUNKS.iter().find(|(least, _)| kv_len >= *least).map_or(CHUNK, |(_, chunk)| *chunk),
        _ if kv_len < LONG => CHUNK,
        _ => 2 * CHUNK,
    };
    let (num_splits, chunk) = if few { (kv_len.div_ceil(chunk).max(1), chunk) } else { (1, 0) };
    let dv_blocks = if kernel == Kernel::Generic { spec.head_dim_v().div_ceil(main.depth as usize) } else { 1 };
    let tasks = spec.batch().saturating_mul(spec.num_q_heads() / task_heads.max(1));
    let (item_rows, short_items, paired) = if main.body == Body::Hopper {
        let items = hopper_items(spec, caps, &main, tasks, rows, task_heads);
        (items.groups * 64, items.short, items.paired)
    } else {
        (block_m, 0, false)
    };
    let row_blocks = rows.div_ceil(item_rows);
    let items = [tasks, row_blocks, num_splits].into_iter().fold(1usize, usize::saturating_mul);
    let (blocks, is_cut) = match kernel {
        Kernel::Decode => decode_blocks(caps, &main, tasks.saturating_mul(row_blocks), num_splits),
        _ => (items.saturating_mul(dv_blocks), num_splits > 1),
    };
    let combine = is_cut.then_some(combine_code(main));
    let most = items
        .saturating_mul(dv_blocks)
        .max(tasks.saturating_mul(rows).saturating_mul(spec.head_dim_v().div_ceil(COMBINE_COLUMNS)));
    if most > MOST_BLOCKS {
        let what = format!("a request of {most} blocks");
        return Err(Error::unsupported(what, "a launch has at most 2^31", "cut the problem along its batch"));
    }
    let row_bytes = (spec.head_dim_v() + 2) * spec.numerics.accumulation.size_bytes();
    let workspace_bytes =
        if combine.is_some() { (tasks * rows).saturating_mul(num_splits).saturating_mul(row_bytes) } else { 0 };
    let design = Design {
        kernel,
        main,
        combine,
        task_heads,
        rows,
        item_rows,
        short_items,
        paired,
        row_blocks,
        num_splits,
        chunk,
        dv_blocks,
        tasks,
        blocks,
        items,
        workspace_bytes,
    };
    Ok((design, refused))
}

/// In words: why this kernel, and why not a faster one.
fn words(spec: &Spec, design: &Design, refused: Option<String>) -> (String, String) {
    let why = match design.kernel {
        Kernel::Decode => format!(
            "{} queries share each head of K and V: bound by reading them, {} chunks of keys",
            spec.group_size() * spec.q_len(),
            design.num_splits
        ),
        Kernel::Forward if design.main.body == Body::Hopper => format!(
            "many queries: both products on the tensor cores by wgmma, K and V by {}{}",
            if design.main.vector {
                "the copy engine"
            } else {
                "loads of one element: their strides are not the copy engine's"
            },
            if design.row_blocks > design.rows.div_ceil(design.main.block_m as usize) {
                format!("; pieces of {} queries, since whole ones would leave multiprocessors idle", design.item_rows)
            } else {
                String::new()
            }
        ),
        Kernel::Forward if design.main.body == Body::Float32 => {
            "many queries: both products on the tensor cores, each float32 as \
                two float16 under a power of two (22 bits), three products for one, sums in float32"
                .to_owned()
        }
        Kernel::Forward => "many queries: both products on the tensor cores".to_owned(),
        _ => "it serves every request".to_owned(),
    };
    (why, refused.unwrap_or_default())
}

impl Design {
    /// Blocks of the main launch: one per item, or such as stay on their multiprocessor.
    pub(crate) fn grid_blocks(&self, caps: &Caps) -> usize {
        match self.main.body {
            Body::Hopper => self.blocks.min(caps.multiprocessors.max(1) as usize),
            _ => self.blocks,
        }
    }

    /// Whether rows are put together by combine.cu.
    pub(crate) const fn is_cut(&self) -> bool {
        self.combine.is_some()
    }

    /// Blocks of combine.cu: each of their warps takes 32 columns of a row.
    pub(crate) fn combine_blocks(&self, spec: &Spec) -> usize {
        (self.tasks * self.rows * spec.head_dim_v().div_ceil(COMBINE_COLUMNS)).div_ceil(COMBINE_WARPS)
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
        (_, Arch::Sm90a, DType::F32) => 4096.0 / 3.0,
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

/// What a plan of this backend launches.
#[derive(Debug, PartialEq)]
pub struct CudaLaunch {
    /// `None` where nothing is launched.
    pub(crate) design: Option<Design>,
    pub(crate) launch: Option<Launch>,
    cost: Cost,
    work: Option<Work>,
    why: String,
    why_not_faster: String,
}

impl LaunchPlan for CudaLaunch {
    fn block_m(&self) -> usize {
        self.design.map_or(0, |design| design.main.block_m as usize)
    }
    fn block_n(&self) -> usize {
        self.design.map_or(0, |design| match design.kernel {
            Kernel::Decode => design.main.decode_tile() as usize,
            Kernel::Forward => design.main.depth as usize,
            _ => BLOCK_N as usize,
        })
    }
    fn num_splits(&self) -> usize {
        self.design.map_or(1, |design| design.num_splits)
    }
    fn items(&self) -> usize {
        self.design.map_or(0, |design| design.items)
    }
    fn threads(&self) -> usize {
        1
    }
    fn workspace_bytes(&self) -> usize {
        self.design.map_or(0, |design| design.workspace_bytes)
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        false
    }
    fn work(&self) -> Option<Work> {
        self.work
    }
    fn launch(&self) -> Option<Launch> {
        self.launch.clone()
    }
    fn why(&self, _: &Spec, _: &KernelKey) -> String {
        self.why.clone()
    }
    fn why_not_faster(&self, _: &Spec, _: &KernelKey) -> String {
        self.why_not_faster.clone()
    }
}

/// Chooses what runs for `spec` on a device with `caps`.
///
/// # Errors
/// [`Error::DeviceUnavailable`] for anything but CUDA memory; [`Error::Unsupported`] for lengths beyond 2^29.
pub fn select(spec: &Spec, caps: &Caps) -> Result<Plan> {
    let (key, launch_plan) = decide(spec, caps)?;
    Ok(Plan::new(spec.clone(), key, launch_plan))
}

/// What [`select`] makes a plan of.
pub(crate) fn decide(spec: &Spec, caps: &Caps) -> Result<(KernelKey, CudaLaunch)> {
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
            Kernel::Forward | Kernel::Decode if spec.numerics.storage != DType::F32 => PRounding::Storage,
            _ => PRounding::Accumulation,
        },
        mask: mask_class(spec),
        kv: spec.kv,
        arch: caps.arch,
    };
    if spec.out.shape.contains(&0) {
        let cost = cost(spec, caps, Kernel::Empty);
        let why = "no output: nothing is launched".to_owned();
        let launch_plan =
            CudaLaunch { design: None, launch: None, cost, work: None, why, why_not_faster: String::new() };
        return Ok((key(Kernel::Empty), launch_plan));
    }
    let (design, refused) = design(spec, caps)?;
    let (why, why_not_faster) = words(spec, &design, refused);
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
        rows_per_item: design.item_rows,
        keys_per_item: if design.num_splits > 1 { design.chunk } else { spec.kv_len() },
    };
    // Without keys nothing is attended: there is no cut of them to state.
    let work = (spec.kv_len() > 0).then_some(work);
    let launch_plan = CudaLaunch { design: Some(design), launch: Some(launch), cost, work, why, why_not_faster };
    Ok((key(design.kernel), launch_plan))
}

/// The code that [`select`] would have compiled for `spec`: the kernel, and what puts its splits together where no block sees
/// all of a row (which follows the batch too).
///
/// # Errors
/// As [`select`].
pub fn codes(spec: &Spec, caps: &Caps) -> Result<Vec<Code>> {
    let (design, _) = design(spec, caps)?;
    let combine = (design.num_splits > 1).then(|| combine_code(design.main));
    Ok([Some(design.main), combine].into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_of_a_task_follow_one_another_and_none_is_empty() {
        for groups in 1..=3 {
            for rows in (1..2000).chain([4096, 16_384, 99_999]) {
                for bounded in [false, true] {
                    let items = HopperItems::new(bounded, groups, 132, rows, 132);
                    let starts: Vec<_> = (0..=items.count).map(|item| items.first_row(item)).collect();
                    assert_eq!(starts[0], 0);
                    assert!(starts[items.count] >= rows && starts[items.count - 1] < rows, "{items:?} {rows}");
                    let lengths = || starts.windows(2).map(|pair| pair[1] - pair[0]);
                    assert!(lengths().all(|n| n % 64 == 0 && n > 0 && n <= groups * 64), "{items:?} {rows}");
                    if items.short > 0 {
                        assert!(starts[items.count] - rows < 64, "{items:?} {rows}");
                    }
                }
            }
        }
    }
}
