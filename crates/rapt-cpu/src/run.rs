//! Runs a plan: deals its items out to threads. Derives nothing and chooses nothing: all of that is the plan's [`CpuLaunch`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rapt_core::{DType, Error, Executor, Operands, Plan, Result, Spec, Workspace};

use crate::arch::{Entry, row_reader};
use crate::caps::available;
use crate::kernels::simd::Real;
use crate::launch::{CpuLaunch, Steps};
use crate::partition::{Item, Turn};
use crate::problem::{Output, Problem};
use crate::select;

/// A pointer that threads share; each uses a part of its own.
pub(crate) struct Shared(pub(crate) *mut u8);
// SAFETY: see the type.
unsafe impl Sync for Shared {}

/// Runs `plan` on `operands`, which were checked against its spec. `out` and `lse` are written when it returns.
///
/// # Errors
/// [`Error::OutOfMemory`] if `workspace` is shorter than the plan needs; [`Error::NotAsPlanned`] for operands of another
/// spec or the plan of another backend; [`Error::Unsupported`] for a plan of an instruction set that is not here;
/// [`Error::WorkerPanicked`], [`Error::WorkLeftUndone`].
pub fn run(plan: &Plan, operands: &mut Operands<'_>, workspace: &mut Workspace, executor: &dyn Executor) -> Result<()> {
    run_heads(plan, operands, workspace, executor, |_, _| true)
}

/// Heads that a run computes together: 1, or the query heads of one key head.
///
/// # Errors
/// [`Error::NotAsPlanned`] for the plan of another backend.
pub fn heads_together(plan: &Plan) -> Result<usize> {
    let launch: &CpuLaunch = plan.launch_plan()?;
    Ok(launch.steps.as_ref().map_or(1, |steps| steps.decisions.partition.heads))
}

/// As [`run`], of the query heads alone for which `is_chosen(batch, head)`; the others are left as they are. It is asked for the first of
/// those that run together ([`heads_together`]). The bits of a head are those of the whole run.
///
/// # Errors
/// As [`run`].
pub fn run_heads(
    plan: &Plan,
    operands: &mut Operands<'_>,
    workspace: &mut Workspace,
    executor: &dyn Executor,
    is_chosen: impl Fn(usize, usize) -> bool + Sync,
) -> Result<()> {
    let launch: &CpuLaunch = plan.launch_plan()?;
    operands.expect(plan.spec())?;
    let Some(Steps { main, combine, decisions, scratch_bytes, .. }) = &launch.steps else {
        fill_empty(plan.spec(), operands);
        return Ok(());
    };
    let (arch, main) = (main.arch, main.entry(available())?);
    let combine = combine.as_ref().map(|variant| variant.entry(available())).transpose()?;
    if workspace.len_bytes() < launch.workspace_bytes {
        return Err(Error::OutOfMemory { bytes: launch.workspace_bytes });
    }
    let base = workspace.as_mut_ptr();
    let partials = base.wrapping_add(launch.threads * scratch_bytes);
    let problem = Problem::new(plan.spec(), decisions, operands, partials, |reading| row_reader(arch, reading));
    let pool = Pool { executor, threads: launch.threads, scratch_bytes: *scratch_bytes, base: Shared(base) };
    let partition = &problem.partition;
    let is_asked = |task: usize| {
        let (batch, head) = problem.task_origin(task);
        is_chosen(batch, head)
    };
    pool.deal(partition.items(), |n, scratch| {
        let turn = partition.turn(n, launch.threads);
        if is_asked(turn.item.task) {
            // SAFETY: the entry is of an instruction set that this machine has; each item has rows, or partial rows, of its own.
            unsafe { main(&problem, turn, scratch) }
        }
    })?;
    if let Some(combine) = combine {
        pool.deal(partition.tasks, |task, scratch| {
            if is_asked(task) {
                // SAFETY: as above; every chunk is written.
                unsafe { combine(&problem, Turn { item: Item { task, chunk: 0 }, next: None }, scratch) }
            }
        })?;
    }
    Ok(())
}

/// Plans that run side by side: what they ask of threads and memory together.
#[derive(Debug)]
pub struct Batch<'a> {
    plans: &'a [Arc<Plan>],
    threads: usize,
    /// Of one thread.
    scratch_bytes: usize,
    workspace_bytes: usize,
}

/// One request of a batch, and the first of its items among those of all.
struct Job<'p> {
    problem: Problem,
    main: Entry,
    combine: Option<Entry>,
    steps: &'p Steps,
    items_before: usize,
    tasks_before: usize,
}

impl<'a> Batch<'a> {
    /// `plans` on at most `threads` threads.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for the plan of another backend.
    pub fn new(plans: &'a [Arc<Plan>], threads: usize) -> Result<Self> {
        let (mut most, mut ns, mut scratch_bytes, mut partials_bytes) = (1, 0.0, 0, 0usize);
        for plan in plans {
            let launch: &CpuLaunch = plan.launch_plan()?;
            let Some(steps) = &launch.steps else { continue };
            most = most.max(launch.threads);
            ns += select::ns_on_one_core(&launch.cost);
            scratch_bytes = scratch_bytes.max(steps.scratch_bytes);
            partials_bytes = partials_bytes.saturating_add(steps.partials_bytes.next_multiple_of(64));
        }
        // Requests that are each over before another thread wakes may not be so together.
        let threads = if most > 1 || ns >= select::PARALLEL_NS { threads.max(1) } else { 1 };
        let workspace_bytes = threads.saturating_mul(scratch_bytes).saturating_add(partials_bytes);
        Ok(Batch { plans, threads, scratch_bytes, workspace_bytes })
    }

    /// Scratch memory that the run needs.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Runs every plan on its operands, with the bits of [`run`]. All outputs are written when it returns.
    ///
    /// # Errors
    /// As [`run`].
    pub fn run(&self, operands: &mut [Operands<'_>], workspace: &mut Workspace, executor: &dyn Executor) -> Result<()> {
        if operands.len() != self.plans.len() {
            return Err(Error::NotAsPlanned { tensor: "operands", what: "their number" });
        }
        if workspace.len_bytes() < self.workspace_bytes {
            return Err(Error::OutOfMemory { bytes: self.workspace_bytes });
        }
        let base = workspace.as_mut_ptr();
        let mut partials = base.wrapping_add(self.threads * self.scratch_bytes);
        let (mut jobs, mut items, mut tasks) = (Vec::with_capacity(operands.len()), 0, 0);
        for (plan, operands) in self.plans.iter().zip(&mut *operands) {
            operands.expect(plan.spec())?;
            let launch: &CpuLaunch = plan.launch_plan()?;
            let Some(steps) = &launch.steps else {
                fill_empty(plan.spec(), operands);
                continue;
            };
            let main = steps.main.entry(available())?;
            let combine = steps.combine.as_ref().map(|variant| variant.entry(available())).transpose()?;
            let reader = |reading| row_reader(steps.main.arch, reading);
            let problem = Problem::new(plan.spec(), &steps.decisions, operands, partials, reader);
            partials = partials.wrapping_add(steps.partials_bytes.next_multiple_of(64));
            jobs.push(Job { problem, main, combine, steps, items_before: items, tasks_before: tasks });
            let partition = &steps.decisions.partition;
            items += partition.items();
            tasks += if combine.is_some() { partition.tasks } else { 0 };
        }
        let (threads, scratch_bytes) = (self.threads, self.scratch_bytes);
        let pool = Pool { executor, threads, scratch_bytes, base: Shared(base) };
        let of = |n: usize, before: fn(&Job<'_>) -> usize| {
            // The last that begins at or before n: one without items begins where the next does.
            let job = &jobs[jobs.partition_point(|job| before(job) <= n) - 1];
            (job, n - before(job))
        };
        pool.deal(items, |n, scratch| {
            let (job, n) = of(n, |job| job.items_before);
            let turn = job.steps.decisions.partition.turn(n, threads);
            // SAFETY: as in `run`; each job has partial rows of its own.
            unsafe { (job.main)(&job.problem, turn, scratch) }
        })?;
        pool.deal(tasks, |n, scratch| {
            let (job, task) = of(n, |job| job.tasks_before);
            if let Some(combine) = job.combine {
                // SAFETY: as above; every chunk is written.
                unsafe { combine(&job.problem, Turn { item: Item { task, chunk: 0 }, next: None }, scratch) }
            }
        })
    }
}

/// Threads with scratch memory of their own.
pub(crate) struct Pool<'a> {
    pub(crate) executor: &'a dyn Executor,
    pub(crate) threads: usize,
    pub(crate) scratch_bytes: usize,
    pub(crate) base: Shared,
}

impl Pool<'_> {
    /// Runs `work` on items `0..items`, each once, the next free thread taking the next one. It gets scratch memory that is its
    /// thread's own meanwhile.
    pub(crate) fn deal(&self, items: usize, work: impl Fn(usize, *mut u8) + Sync) -> Result<()> {
        if items == 0 {
            return Ok(());
        }
        let (next, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let base = &self.base;
        self.executor.parallel_for(self.threads.min(items), &|_| {
            // The executor's own numbering is not relied on: a slot belongs to whoever takes it first.
            let slot = taken.fetch_add(1, Ordering::Relaxed);
            if slot >= self.threads {
                return;
            }
            // Slot < threads and taken once: it lies inside the workspace and is this thread's.
            let scratch = base.0.wrapping_add(slot * self.scratch_bytes);
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= items {
                    break;
                }
                work(n, scratch);
            }
        })?;
        // An executor that ran nothing and says that it is done: rows were left out, and that is no answer.
        if next.load(Ordering::Relaxed) < items {
            return Err(Error::WorkLeftUndone { done: next.load(Ordering::Relaxed), items });
        }
        Ok(())
    }
}

/// Zeros in `out`, −inf in `lse`.
fn fill_empty(spec: &Spec, operands: &mut Operands<'_>) {
    if spec.out.shape.contains(&0) {
        return;
    }
    let out = Output::new(operands.out_ptr(), &spec.out);
    let lse = spec.lse.as_ref().zip(operands.lse_ptr()).map(|(lse, ptr)| Output::new(ptr, lse));
    let [batch, heads, q_len, dim] = spec.out.shape;
    for (b, h, i) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..q_len).map(move |i| (b, h, i)))) {
        for d in 0..dim {
            // SAFETY: an element of out; 0 is the same in every dtype.
            unsafe { f64::ZERO.store_as(out.dtype, out.at([b, h, i, d])) };
        }
        if let Some(lse) = &lse {
            debug_assert!(matches!(lse.dtype, DType::F32 | DType::F64));
            // SAFETY: an element of lse.
            unsafe { f64::NEG_INFINITY.store_as(lse.dtype, lse.at([b, h, i])) };
        }
    }
}
