//! From a spec to a plan: pure, total, without a device; and the cut of the work that a plan implies.
//!
//! The rules, in order: nothing to attend → `empty`; few rows per kv head → `decode`; anything else → `forward`. Every
//! option of the law is served by each. How large pieces are, `tiles` says. What depends on threads is only how rows are
//! dealt out; the cut of the keys (`block_n`) follows the instruction set, the dtype and head_dim, so the bits of a row do not
//! depend on the machine's load or on its neighbours.

use rapt_core::{
    Arch, Caps, Cost, DType, Device, Error, Kernel, KernelKey, MaskClass, PRounding, Plan, Result, Spec, Work,
};

use crate::arch;
use crate::kernels::{decode, forward};
use crate::problem::Cut;
use crate::tiles::Tiles;

/// Most bytes of packed K and V tiles per thread.
const PANEL_BYTES: usize = 1 << 20;
/// Most bytes of packed Q and accumulated O per thread.
const TILES_BYTES: usize = 1 << 20;
/// Tiles that must share a block before packing rows that lie apart pays.
const SHARING_TILES: usize = 4;
/// Below this many nanoseconds on one core, waking another costs more than it saves (about 10 µs, Zen 4, 2026-11).
const PARALLEL_NS: f64 = 20_000.0;

/// What one core does per cycle.
struct Rates {
    /// Multiplications and additions.
    flops: f64,
    /// Exponentials.
    exponentials: f64,
}

fn rates(arch: Arch, kernel: Kernel, storage: DType) -> Rates {
    let (flops, exponentials) = match arch {
        Arch::Avx512Bf16 if kernel == Kernel::Forward && arch::is_paired(arch, storage) => (128.0, 3.4),
        Arch::Avx512 | Arch::Avx512Bf16 => (64.0, 3.4),
        Arch::Avx2 => (32.0, 1.7),
        Arch::Neon => (16.0, 0.9),
        _ => (8.0, 0.5),
    };
    let width = if storage == DType::F64 { 2.0 } else { 1.0 };
    Rates { flops: flops / width, exponentials: exponentials / (2.0 * width - 1.0) }
}

/// Keys per block of the forward kernel: the multiple of the micro-tile's rows below `block_n`, fewer where a block of K and
/// V would outgrow the cap.
fn forward_block(spec: &Spec, rows: usize, block_n: usize) -> usize {
    let row_bytes = (spec.head_dim() + spec.head_dim_v()) * spec.numerics.accumulation.size_bytes();
    let most = (PANEL_BYTES / row_bytes).clamp(1, block_n);
    if most > rows { most / rows * rows } else { most }
}

/// How `spec` is cut for `kernel`; a function of the spec, the instruction set, the number of threads and the tiles.
pub(crate) fn cut(spec: &Spec, kernel: Kernel, arch: Arch, threads: usize, tiles: &Tiles) -> Cut {
    let shape = arch::tile_shape(arch, spec.numerics.storage);
    let in_elem = spec.numerics.storage == spec.numerics.accumulation;
    let inner_is_one = |strides: [isize; 4], dim: usize| strides[3] == 1 || dim == 1;
    let in_place = |strides, dim| inner_is_one(strides, dim) && (in_elem || kernel == Kernel::Decode);
    let k_in_place = in_place(spec.k.strides, spec.head_dim());
    let v_in_place = in_place(spec.v.strides, spec.head_dim_v());
    // Pairs of K along head_dim are read where they lie if every row is whole lanes, in steps of whole lanes.
    let paired = kernel == Kernel::Forward && arch::is_paired(arch, spec.numerics.storage);
    let whole_lanes = spec.head_dim().is_multiple_of(2) && spec.k.strides[2] % 2 == 0 && spec.k.strides[3] == 1;
    let k_in_place = k_in_place || (paired && whole_lanes);
    let (batch, q_len, group) = (spec.batch(), spec.q_len(), spec.group_size());
    let whole_group = kernel == Kernel::Decode || q_len < 2 * shape.queries;
    let heads = if whole_group { group } else { 1 };
    let tasks = batch * (spec.num_q_heads() / heads.max(1));
    let rows = heads * q_len;
    let apart = |strides: [isize; 4], dim: usize| strides[2].unsigned_abs() != dim;
    let apart = [apart(spec.k.strides, spec.head_dim()), apart(spec.v.strides, spec.head_dim_v())];
    let decode = &tiles.decode;
    let whole = Cut {
        heads,
        rows,
        chunk_rows: rows,
        block_n: decode.block_n,
        narrow: tiles.forward.narrow,
        pv_keys: decode.pv_keys,
        ahead_bytes: if apart[0] || apart[1] { decode.ahead_bytes_apart } else { decode.ahead_bytes },
        tasks,
        chunks: spec.kv_len().div_ceil(decode.block_n),
        k_in_place,
        v_in_place,
    };
    if kernel != Kernel::Forward {
        return whole;
    }
    let tile_bytes = shape.queries * (spec.head_dim() + spec.head_dim_v()) * spec.numerics.accumulation.size_bytes();
    let most_tiles = (TILES_BYTES / tile_bytes).max(1);
    let mut count = (tiles.forward.rows / shape.queries).clamp(1, most_tiles);
    // Enough items that the threads end together, as long as an item still shares each block of keys among tiles.
    while count > 2 && tasks * rows.div_ceil(count * shape.queries) < threads.saturating_mul(4) {
        count /= 2;
    }
    let chunk_rows = (count * shape.queries).min(rows.next_multiple_of(shape.queries));
    // Rows that lie apart share few cache sets and touch a page each: packed once, a block is read by many tiles. In a
    // [B,S,H,D] view of 24 heads of 128 (rows 12 KiB apart) f32 in place lost 30 % (Zen 4, 2026-11).
    let shared = chunk_rows.div_ceil(shape.queries) >= SHARING_TILES;
    Cut {
        chunk_rows,
        block_n: forward_block(spec, shape.rows, tiles.forward.block_n),
        chunks: rows.div_ceil(chunk_rows),
        k_in_place: k_in_place && !(shared && apart[0]),
        v_in_place: v_in_place && !(shared && apart[1]),
        ..whole
    }
}

/// Bytes of scratch memory per thread, a multiple of 64.
pub(crate) fn scratch_bytes(spec: &Spec, kernel: Kernel, arch: Arch, cut: &Cut) -> usize {
    let elements = match kernel {
        Kernel::Forward => {
            let queries = arch::tile_shape(arch, spec.numerics.storage).queries;
            forward::Scratch::new(&forward::Sizes {
                head_dim: spec.head_dim(),
                head_dim_v: spec.head_dim_v(),
                tiles: cut.chunk_rows.div_ceil(queries),
                queries,
                block_n: cut.block_n,
                has_mask: spec.mask.is_some(),
                pack_k: !cut.k_in_place,
                pack_v: !cut.v_in_place,
            })
            .len
        }
        Kernel::Decode => {
            decode::Scratch::new(cut.rows, spec.head_dim(), spec.head_dim_v(), cut.block_n, cut.pv_keys).len
        }
        _ => 0,
    };
    (elements * spec.numerics.accumulation.size_bytes()).next_multiple_of(64)
}

/// Bytes of partial results of the decode kernel.
pub(crate) fn partials_bytes(spec: &Spec, kernel: Kernel, cut: &Cut) -> usize {
    if kernel != Kernel::Decode {
        return 0;
    }
    // Saturating: what cannot be counted cannot be allocated, and that is the error then.
    let row_bytes = decode::partial_len(spec.head_dim_v()) * spec.numerics.accumulation.size_bytes();
    (cut.tasks * cut.rows).saturating_mul(cut.chunks).saturating_mul(row_bytes)
}

/// Most bytes that lie packed at one time: a block of K and V per thread in forward; in decode the few keys that are
/// gathered, in the storage dtype, where their elements lie apart.
fn bytes_packed(spec: &Spec, kernel: Kernel, arch: Arch, cut: &Cut, threads: usize) -> usize {
    let k = if cut.k_in_place { 0 } else { spec.head_dim() };
    let v = if cut.v_in_place { 0 } else { spec.head_dim_v() };
    let per_thread = if kernel == Kernel::Decode {
        cut.pv_keys * k.max(v) * spec.numerics.storage.size_bytes()
    } else {
        let dtype = match p_rounding(kernel, arch, spec) {
            PRounding::Storage => spec.numerics.storage,
            _ => spec.numerics.accumulation,
        };
        cut.block_n * (k + v) * dtype.size_bytes()
    };
    per_thread.saturating_mul(threads)
}

fn p_rounding(kernel: Kernel, arch: Arch, spec: &Spec) -> PRounding {
    if kernel == Kernel::Forward && arch::is_paired(arch, spec.numerics.storage) {
        PRounding::Storage
    } else {
        PRounding::Accumulation
    }
}

fn cost(spec: &Spec, kernel: Kernel, arch: Arch, threads: usize, clock_hz: Option<f64>, packed: usize) -> Cost {
    let pairs = spec.pairs() as f64;
    let flops = pairs * 2.0 * (spec.head_dim() + spec.head_dim_v()) as f64;
    let bytes =
        |shape: &[usize], dtype: DType| shape.iter().map(|&n| n as f64).product::<f64>() * dtype.size_bytes() as f64;
    let mask = spec.mask.map_or(0.0, |mask| {
        let distinct = |(&n, &stride): (&usize, &isize)| if stride == 0 { 1.0 } else { n as f64 };
        mask.shape.iter().zip(&mask.strides).map(distinct).product::<f64>() * mask.dtype.size_bytes() as f64
    });
    let read = [&spec.q, &spec.k, &spec.v].map(|t| bytes(&t.shape, t.dtype)).iter().sum::<f64>() + mask;
    let written = bytes(&spec.out.shape, spec.out.dtype) + spec.lse.map_or(0.0, |lse| bytes(&lse.shape, lse.dtype));
    let rates = rates(arch, kernel, spec.numerics.storage);
    let floor_cycles = flops / rates.flops + pairs / rates.exponentials;
    Cost {
        flops,
        exponentials: pairs,
        bytes_read: read,
        bytes_written: written,
        floor_cycles,
        // A system that tells a clock of 0 tells none.
        floor_seconds: clock_hz.filter(|&hz| hz > 0.0).map(|hz| floor_cycles / (hz * threads as f64)),
        bytes_copied: 0,
        bytes_packed: packed,
    }
}

/// Chooses what runs for `spec` on a machine with `caps`.
///
/// # Errors
/// [`Error::DeviceUnavailable`] for anything but host memory; [`Error::Unsupported`] for an instruction set that this
/// build lacks.
pub fn select(spec: &Spec, caps: &Caps) -> Result<Plan> {
    select_tiled(spec, caps, &Tiles::of(spec, caps.arch))
}

/// As [`select`], with tiles of the caller's choice: for [`tune`](crate::tune).
pub(crate) fn select_tiled(spec: &Spec, caps: &Caps, tiles: &Tiles) -> Result<Plan> {
    if spec.device != Device::Cpu {
        let why = "this backend serves host memory".into();
        return Err(Error::DeviceUnavailable { device: spec.device, why });
    }
    let arch = caps.arch;
    let storage = spec.numerics.storage;
    if arch::entry(arch, arch::Step::Forward, storage).is_none() {
        return Err(Error::unsupported(
            format!("{storage} on {}", arch.name()),
            "this build has no such kernel",
            "set RAPT_ISA to one that `rapt doctor` lists, or leave it unset",
        ));
    }
    let group_rows = spec.group_size().saturating_mul(spec.q_len());
    let out_is_empty = spec.out.shape.contains(&0);
    let (kernel, why) = if spec.kv_len() == 0 || out_is_empty {
        (Kernel::Empty, "no keys, or no output: nothing is attended".to_owned())
    } else if group_rows <= decode::MAX_ROWS {
        let why = format!("{group_rows} queries share each kv head: K and V are read once, head_dim along the lanes");
        (Kernel::Decode, why)
    } else {
        (Kernel::Forward, "many queries: they fill the lanes, K and V are broadcast".to_owned())
    };
    let why_not_faster = if kernel == Kernel::Empty {
        String::new()
    } else if arch == Arch::Avx512 && storage == DType::BF16 {
        "products are formed in float32: the bf16 dot instruction is missing or slower here, or RAPT_ISA holds to these"
            .to_owned()
    } else if !matches!(arch, Arch::Avx512 | Arch::Avx512Bf16) && cfg!(target_arch = "x86_64") {
        format!("{} it is: no wider vectors are on this machine, or RAPT_ISA holds to these", arch.name())
    } else {
        String::new()
    };
    let mask = match spec.mask {
        None => MaskClass::None,
        Some(mask) if mask.dtype == DType::Bool => MaskClass::Bool,
        Some(_) => MaskClass::Additive,
    };
    let key = KernelKey {
        direction: spec.direction,
        kernel,
        storage,
        accumulation: spec.numerics.accumulation,
        p_rounding: p_rounding(kernel, arch, spec),
        mask,
        kv: spec.kv,
        arch,
    };
    if kernel == Kernel::Empty {
        let cost = cost(spec, kernel, arch, 1, caps.clock_hz, 0);
        return Ok(Plan::new(spec.clone(), key, (0, 0, 1, 0), 1, 0, cost, true, why, why_not_faster));
    }
    let one_core = cost(spec, kernel, arch, 1, Some(3.0e9), 0);
    let ns = one_core.floor_seconds.unwrap_or(0.0) * 1e9 + (one_core.bytes_read + one_core.bytes_written) / 20.0;
    let threads = if ns < PARALLEL_NS { 1 } else { caps.threads.max(1) };
    let cut = cut(spec, kernel, arch, threads, tiles);
    let items = cut.tasks.saturating_mul(cut.chunks);
    let scratch = threads.saturating_mul(scratch_bytes(spec, kernel, arch, &cut));
    let workspace_bytes = scratch.saturating_add(partials_bytes(spec, kernel, &cut));
    let packed = bytes_packed(spec, kernel, arch, &cut, threads);
    let cost = cost(spec, kernel, arch, threads, caps.clock_hz, packed);
    let num_splits = if kernel == Kernel::Decode { cut.chunks } else { 1 };
    let block_m = if kernel == Kernel::Decode { cut.rows } else { arch::tile_shape(arch, storage).queries };
    let keys_per_item = if kernel == Kernel::Decode { cut.block_n } else { spec.kv_len() };
    let work = Work { tasks: cut.tasks, rows: cut.rows, rows_per_item: cut.chunk_rows, keys_per_item };
    let plan = Plan::new(
        spec.clone(),
        key,
        (block_m, cut.block_n, num_splits, items),
        threads,
        workspace_bytes,
        cost,
        cut.k_in_place && cut.v_in_place,
        why,
        why_not_faster,
    );
    Ok(plan.with_work(work))
}
