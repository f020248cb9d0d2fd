//! The backward pass: from a spec to a plan, and its run.
//!
//! ```text
//! rows   state of each row                 runs of rows               one after the other, each dealt to all threads
//! large  the same where lse is large       tiles of queries
//! main   dk, dv, partial sums of dq        chunks of keys of a task   ┐
//! keys   dk and dv that tasks share        blocks of keys             │ wave by wave of tasks
//! dq     the chunks of dq put together     tiles of queries           ┘
//! mask   the gradient of the mask          pieces of it
//! sinks  the gradient of the sinks         heads
//! ```
//! How sums are grouped follows lengths, head dims, dtype and instruction set; only how many tasks are a wave depends on threads, and that touches no
//! bit. Every request that core accepts is served, in host memory. [`BackwardBatch`](crate::BackwardBatch) runs many plans side by side.

use rapt_core::{
    Arch, BackwardOperands, BackwardPlan, BackwardSpec, Caps, Cost, DType, Device, Direction, Error, Executor, Kernel,
    KernelKey, Launch, LaunchPlan, MaskClass, PRounding, Result, Spec, TensorSpec, Work, Workspace,
};

use crate::arch::{self, Vectors};
use crate::backward_problem::{
    BackwardDecisions, BackwardPartition, BackwardProblem, BackwardScratch, RowStates, ScoreRule, SharedSums,
};
use crate::backward_steps::{self, Job, Segment};
use crate::caps::available;
use crate::kernels::backward::Entries;
use crate::kernels::products::Single;
use crate::kernels::simd::{Real, Simd, Storage};
use crate::problem::Output;
use crate::run::{Pool, Shared};
use crate::select;

/// Keys of a block: the queries are packed once for each. Of 128, 256 and 512, the last is 3 to 8 % faster at 2048 keys in float32 and in pairs of bf16
/// (Zen 4, 2026-11), but a short K is cut in chunks first.
const BLOCK_N: std::ops::RangeInclusive<usize> = 128..=512;
/// The most keys of a block of numbers in parts, of which weights take as much memory as K and V: 512 are slower by up to 16 % (docs/lab/cpu.md).
const MOST_KEYS_OF_PARTS: usize = 320;
/// Most bytes of a block of K and V, and as many of their gradients.
const BLOCK_BYTES: usize = 1 << 19;
/// Chunks of keys at most: each has partial sums of dq, a tensor of q's size in the accumulation dtype.
const CHUNKS: usize = 4;

/// A wave has four items for each thread, and as few as two where four have more bytes of partial sums than this for each (docs/lab/cpu.md). Those of
/// many requests, which may be short, are cut by `backward_batch`.
const FOUR_ITEMS_BYTES: usize = 4 << 20;

/// The [`LaunchPlan`] of the backward pass: made by [`select_backward`], launched by [`run_backward`].
#[derive(Debug, PartialEq)]
pub struct BackwardLaunch {
    /// `None` where nothing is attended: zeros are written.
    pub(crate) steps: Option<BackwardSteps>,
    pub(crate) threads: usize,
    workspace_bytes: usize,
    pub(crate) cost: Cost,
}

/// How the work is dealt.
#[derive(Debug, PartialEq)]
pub(crate) struct BackwardSteps {
    arch: Arch,
    storage: DType,
    pub(crate) decisions: BackwardDecisions,
    /// Of one thread, a multiple of 64.
    pub(crate) scratch_bytes: usize,
    /// Of one array of row states, a multiple of 64.
    pub(crate) states_bytes: usize,
    /// Of the sums of gradients that tasks share, a multiple of 64.
    shared_bytes: usize,
}

impl BackwardSteps {
    /// The kernels, if this machine has them.
    pub(crate) fn entries(&self) -> Result<Entries> {
        let entries = entries_of(self.arch, self.storage).filter(|_| available().contains(&self.arch));
        let missing = || Error::unsupported(self.arch.name(), "this machine or build lacks it", "plan on this machine");
        entries.ok_or_else(missing)
    }

    /// Where the three arrays of states begin at `base`.
    pub(crate) fn states_at(&self, base: *mut u8) -> RowStates {
        let [top, log2_sum, delta] = [0, 1, 2].map(|n| base.wrapping_add(n * self.states_bytes));
        RowStates { top, log2_sum, delta }
    }
}

impl LaunchPlan for BackwardLaunch {
    fn block_m(&self) -> usize {
        self.steps.as_ref().map_or(0, |steps| steps.decisions.partition.queries)
    }
    fn block_n(&self) -> usize {
        self.steps.as_ref().map_or(0, |steps| steps.decisions.partition.block_n)
    }
    fn num_splits(&self) -> usize {
        self.steps.as_ref().map_or(1, |steps| steps.decisions.partition.chunks)
    }
    fn items(&self) -> usize {
        self.steps.as_ref().map_or(0, |BackwardSteps { decisions: BackwardDecisions { partition, .. }, .. }| {
            partition.tasks.saturating_mul(partition.chunks)
        })
    }
    fn threads(&self) -> usize {
        self.threads
    }
    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        self.steps.as_ref().is_none_or(|steps| {
            let partition = &steps.decisions.partition;
            partition.k_in_place && partition.v_in_place
        })
    }
    fn work(&self) -> Option<Work> {
        self.steps.as_ref().map(|BackwardSteps { decisions: BackwardDecisions { partition, .. }, .. }| Work {
            tasks: partition.tasks,
            rows: partition.rows,
            rows_per_item: partition.rows,
            keys_per_item: partition.chunk_keys,
        })
    }
    fn launch(&self) -> Option<Launch> {
        None
    }
    fn why(&self, _: &Spec, key: &KernelKey) -> String {
        if key.kernel == Kernel::Empty {
            return "no keys, or no output: every gradient is 0".to_owned();
        }
        let is_shared = self.steps.as_ref().is_some_and(|steps| steps.decisions.shared.is_any());
        let of_broadcast =
            if is_shared { "; what is broadcast has the sum over that, task by task in scratch memory" } else { "" };
        format!(
            "probabilities are recomputed from lse; dk and dv are summed over queries, dq over keys in chunks{of_broadcast}"
        )
    }
    fn why_not_faster(&self, _: &Spec, key: &KernelKey) -> String {
        let has_pairs = arch::is_paired(key.arch, key.storage);
        if key.kernel != Kernel::Empty && !has_pairs && matches!((key.storage, key.arch), (DType::BF16, Arch::Avx512)) {
            "products are formed in float32: there are none of bf16 on this machine, or d_o is not bf16".to_owned()
        } else {
            String::new()
        }
    }
}

/// The kernels of a dtype, if this build has them: of bf16 with products of pairs on the instruction sets that `arch_of` leaves as they are, and of
/// all that are sums of bf16 with AMX.
fn entries_of(arch: Arch, storage: DType) -> Option<Entries> {
    arch::gradients_of_pairs(arch, storage).or_else(|| arch::with_vectors(arch, EntriesOf(storage)))
}

/// Whether an instruction set has kernels of a dtype, and which.
struct EntriesOf(DType);

impl Vectors for EntriesOf {
    type Output = Option<Entries>;
    fn visit<F: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Option<Entries> {
        fn of<S: Simd, T: Storage<S>>() -> Option<Entries> {
            Some(Entries::of::<S, Single, T>())
        }
        match self.0 {
            DType::F32 => of::<F, f32>(),
            DType::F16 => of::<F, half::f16>(),
            DType::BF16 => of::<F, half::bf16>(),
            DType::F64 => of::<D, f64>(),
            _ => None,
        }
    }
}

/// The instruction set of the kernels: one with products of pairs, or of parts in tiles, where they are formed, of q, k, v and d_o alone.
fn arch_of(spec: &BackwardSpec, arch: Arch) -> Arch {
    let are_pairs = spec.forward().numerics.storage == DType::BF16 && spec.d_o().dtype == DType::BF16;
    match arch {
        Arch::Avx512Bf16 | Arch::Amx | Arch::NeonBf16 if are_pairs => arch,
        Arch::Amx
            if select::is_tiled(spec.forward(), Direction::Backward)
                && spec.d_o().dtype == spec.forward().numerics.storage =>
        {
            arch
        }
        Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => Arch::Avx512,
        Arch::NeonBf16 => Arch::Neon,
        arch => arch,
    }
}

/// Chooses what runs for the gradients of `spec` on a machine with `caps`.
///
/// # Errors
/// [`Error::DeviceUnavailable`] for anything but host memory; [`Error::Unsupported`] for an instruction set that this build lacks.
pub fn select_backward(spec: &BackwardSpec, caps: &Caps) -> Result<BackwardPlan> {
    let forward = spec.forward();
    if forward.device != Device::Cpu {
        let why = "the backward pass is served in host memory".into();
        return Err(Error::DeviceUnavailable { device: forward.device, why });
    }
    if forward.varlen.is_some() {
        let what = "a spec of sequences with lengths of their own in host memory";
        return Err(Error::unsupported(what, "there each sequence has a plan", "plan each sequence by itself"));
    }
    let (storage, accumulation) = (forward.numerics.storage, forward.numerics.accumulation);
    let arch = arch_of(spec, caps.arch);
    let lacks = || {
        Error::unsupported(
            format!("the backward pass of {storage} on {}", arch.name()),
            "this build has no such kernel",
            "set RAPT_ISA to one that `rapt doctor` lists, or leave it unset",
        )
    };
    let entries = entries_of(arch, storage).ok_or_else(lacks)?;
    let is_empty = forward.kv_len() == 0 || forward.out.shape.contains(&0);
    let key = KernelKey {
        direction: Direction::Backward,
        kernel: if is_empty { Kernel::Empty } else { Kernel::Backward },
        storage,
        accumulation,
        p_rounding: match (entries.steps, entries.parts) {
            (2, 1) => PRounding::Storage,
            (2, 2) => PRounding::TwoBf16,
            _ => PRounding::Accumulation,
        },
        mask: match forward.mask {
            None => MaskClass::None,
            Some(mask) if mask.dtype == DType::Bool => MaskClass::Bool,
            Some(_) => MaskClass::Additive,
        },
        kv: forward.kv,
        arch,
    };
    let cost = |threads| cost(spec, &key, threads, caps.clock_hz);
    if is_empty {
        let launch = BackwardLaunch { steps: None, threads: 1, workspace_bytes: 0, cost: cost(1) };
        return Ok(BackwardPlan::new(spec.clone(), key, launch));
    }
    let is_short = select::ns_on_one_core(&cost(1)) < select::PARALLEL_NS;
    let threads = if is_short { 1 } else { caps.threads.max(1) };
    let partition = partition(spec, &entries, threads);
    let scratch = BackwardScratch::new(spec, &partition, entries.lanes);
    let mut plain_scratch = scratch;
    if entries.parts > 1 {
        plain_scratch = BackwardScratch::new(spec, &partition.plain(), entries.lanes);
    }
    let size = accumulation.size_bytes();
    let bytes = |elements: usize| elements.saturating_mul(size).checked_next_multiple_of(64).unwrap_or(usize::MAX);
    let (scratch_bytes, states_bytes) =
        (bytes(scratch.len.max(plain_scratch.len)), bytes(partition.tasks * partition.rows));
    let partials = partition.partials_of_task().saturating_mul(partition.wave);
    let partials_bytes = if spec.dq().is_some() { bytes(partials) } else { 0 };
    let shared = SharedSums::new(spec, &partition, entries.lanes);
    let shared_bytes = bytes(shared.len);
    let workspace_bytes = threads
        .saturating_mul(scratch_bytes)
        .saturating_add(states_bytes.saturating_mul(3))
        .saturating_add(shared_bytes)
        .saturating_add(partials_bytes);
    let packed = |in_place: bool, dim: usize| {
        if in_place { 0 } else { partition.block_n * partition.lanes(dim) * size }
    };
    let of_kv = packed(partition.k_in_place, forward.head_dim()) + packed(partition.v_in_place, forward.head_dim_v());
    let of_q =
        2 * partition.run_rows() * (forward.head_dim() + forward.head_dim_v()) * size / entries.steps * entries.parts;
    let cost = Cost { bytes_packed: threads.saturating_mul(of_kv + of_q), ..cost(threads) };
    let decisions = BackwardDecisions { partition, scratch, plain_scratch, scores: ScoreRule::new(spec), shared };
    let steps = Some(BackwardSteps { arch, storage, decisions, scratch_bytes, states_bytes, shared_bytes });
    Ok(BackwardPlan::new(spec.clone(), key, BackwardLaunch { steps, threads, workspace_bytes, cost }))
}

/// How a request is cut.
fn partition(spec: &BackwardSpec, entries: &Entries, threads: usize) -> BackwardPartition {
    let forward = spec.forward();
    let (kv_len, size) = (forward.kv_len(), forward.numerics.accumulation.size_bytes());
    let row_bytes = (forward.head_dim() + forward.head_dim_v()) * size / entries.steps * entries.parts;
    let most_keys = if entries.parts > 1 { MOST_KEYS_OF_PARTS } else { *BLOCK_N.end() };
    let of_chunk = kv_len.div_ceil(CHUNKS).clamp(*BLOCK_N.start(), most_keys);
    let run = entries.form.key_run.max(16);
    let block_n = of_chunk.min(kv_len).next_multiple_of(run).min((BLOCK_BYTES / row_bytes / run * run).max(run));
    let blocks = kv_len.div_ceil(block_n);
    let chunk_keys = blocks.div_ceil(CHUNKS) * block_n;
    let chunks = kv_len.div_ceil(chunk_keys);
    let tasks = forward.batch() * forward.num_kv_heads();
    let in_place = |tensor: &TensorSpec<4>| {
        let [.., dim] = tensor.shape;
        let is_of_lanes = entries.form.in_place
            && tensor.dtype.size_bytes() * entries.steps == size
            && dim.is_multiple_of(entries.steps);
        is_of_lanes && tensor.strides[2..] == [dim as isize, 1]
    };
    let rows = forward.group_size() * forward.q_len();
    let tile_of_dq = forward.head_dim().next_multiple_of(entries.form.dim_run).saturating_mul(entries.queries);
    let item_bytes = rows.div_ceil(entries.queries).saturating_mul(tile_of_dq).saturating_mul(size);
    let items = (threads.saturating_mul(FOUR_ITEMS_BYTES) / item_bytes.max(1)).clamp(2 * threads, 4 * threads);
    BackwardPartition {
        tasks,
        rows,
        queries: entries.queries,
        form: entries.form,
        block_n,
        steps: entries.steps,
        parts: entries.parts,
        tile_of_dq,
        chunk_keys,
        chunks,
        wave: tasks.min(items.div_ceil(chunks)),
        k_in_place: in_place(&forward.k),
        v_in_place: in_place(&forward.v),
    }
}

/// What the gradients of `spec` cost: the forward pass's products, and 2.5 times as many where all are asked for.
fn cost(spec: &BackwardSpec, key: &KernelKey, threads: usize, clock_hz: Option<f64>) -> Cost {
    let forward = spec.forward();
    let once = select::forward_cost(forward, key, threads, clock_hz);
    let (pairs, dim, dim_v) = (forward.pairs() as f64, forward.head_dim() as f64, forward.head_dim_v() as f64);
    let (of_dq, of_dk, of_dv) = (spec.dq().is_some(), spec.dk().is_some(), spec.dv().is_some());
    let if_asked = |is_asked: bool, product: f64| if is_asked { product } else { 0.0 };
    let products = if_asked(of_dq || of_dk || of_dv, dim)
        + if_asked(of_dq || of_dk, dim_v)
        + if_asked(of_dv, dim_v)
        + if_asked(of_dq, dim)
        + if_asked(of_dk, dim)
        + if_asked(spec.d_mask().is_some(), dim + dim_v);
    let flops = 2.0 * pairs * products;
    let bytes = |of: Option<&TensorSpec<4>>| {
        of.map_or(0.0, |of| of.shape.iter().map(|&n| n as f64).product::<f64>() * of.dtype.size_bytes() as f64)
    };
    let written = [spec.dq(), spec.dk(), spec.dv(), spec.d_mask()].map(bytes).iter().sum::<f64>();
    let ratio = if once.flops > 0.0 { flops / once.flops } else { 0.0 };
    Cost {
        flops,
        bytes_read: once.bytes_read + once.bytes_written + bytes(Some(spec.d_o())),
        bytes_written: written,
        floor_cycles: once.floor_cycles * ratio,
        floor_seconds: once.floor_seconds.map(|seconds| seconds * ratio),
        ..once
    }
}

/// Runs `plan` on `operands`, which were checked against its spec. Every gradient that is asked for is written when it returns.
///
/// # Errors
/// As [`run`](crate::run()).
pub fn run_backward(
    plan: &BackwardPlan,
    operands: &mut BackwardOperands<'_>,
    workspace: &mut Workspace,
    executor: &dyn Executor,
) -> Result<()> {
    let launch: &BackwardLaunch = plan.launch_plan()?;
    let spec = plan.spec();
    operands.expect(spec)?;
    let Some(steps) = &launch.steps else {
        fill_zeros(spec, operands);
        return Ok(());
    };
    let entries = steps.entries()?;
    if workspace.len_bytes() < launch.workspace_bytes {
        return Err(Error::OutOfMemory { bytes: launch.workspace_bytes });
    }
    let base = workspace.as_mut_ptr();
    let states = base.wrapping_add(launch.threads * steps.scratch_bytes);
    let shared = states.wrapping_add(3 * steps.states_bytes);
    let partials = shared.wrapping_add(steps.shared_bytes);
    let problem = BackwardProblem::new(spec, &steps.decisions, operands, steps.states_at(states), shared);
    let pool = Pool { executor, threads: launch.threads, scratch_bytes: steps.scratch_bytes, base: Shared(base) };
    let BackwardPartition { tasks, wave, .. } = steps.decisions.partition;
    let segment = |first| vec![Segment { job: 0, first, tasks: wave.min(tasks - first), partials_at: 0 }];
    let waves: Vec<_> = (0..tasks).step_by(wave).map(segment).collect();
    backward_steps::run(&mut [Job { problem, entries }], &waves, partials, &pool)
}

/// Zeros in every gradient.
pub(crate) fn fill_zeros(spec: &BackwardSpec, operands: &mut BackwardOperands<'_>) {
    let [dq, dk, dv, d_mask, d_sinks] = operands.gradient_ptrs();
    for (of, ptr) in [(spec.dq(), dq), (spec.dk(), dk), (spec.dv(), dv), (spec.d_mask(), d_mask)] {
        let Some((of, ptr)) = of.zip(ptr) else { continue };
        let (out, [batch, heads, len, dim]) = (Output::new(ptr, of), of.shape);
        for (b, h, i) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..len).map(move |i| (b, h, i)))) {
            for d in 0..dim {
                // SAFETY: an element of the gradient; 0 is the same in every dtype.
                unsafe { f64::ZERO.store_as(out.dtype, out.at([b, h, i, d])) };
            }
        }
    }
    if let Some((of, ptr)) = spec.d_sinks().zip(d_sinks) {
        let out = Output::new(ptr, of);
        for head in 0..of.shape[0] {
            // SAFETY: as above.
            unsafe { f64::ZERO.store_as(out.dtype, out.at([head])) };
        }
    }
}
