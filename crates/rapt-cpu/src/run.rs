//! Runs a plan: deals its items out to threads. Derives nothing and chooses nothing: all of that is the plan's [`CpuLaunch`].

use std::sync::atomic::{AtomicUsize, Ordering};

use rapt_core::{DType, Error, Executor, Operands, Plan, Result, Spec, Workspace};

use crate::arch::{Entry, row_reader};
use crate::caps::available;
use crate::kernels::simd::Real;
use crate::launch::{CpuLaunch, Steps};
use crate::partition::Item;
use crate::problem::{Output, Problem};

/// A pointer that threads share; each uses a part of its own.
struct Shared(*mut u8);
// SAFETY: see the type.
unsafe impl Sync for Shared {}

/// Runs `plan` on `operands`, which were checked against its spec. `out` and `lse` are written when it returns.
///
/// # Errors
/// [`Error::OutOfMemory`] if `workspace` is shorter than the plan needs; [`Error::NotAsPlanned`] for operands of another
/// spec or the plan of another backend; [`Error::Unsupported`] for a plan of an instruction set that is not here;
/// [`Error::WorkerPanicked`], [`Error::WorkLeftUndone`].
pub fn run(plan: &Plan, operands: &mut Operands<'_>, workspace: &mut Workspace, executor: &dyn Executor) -> Result<()> {
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
    // SAFETY: the entry is of an instruction set that this machine has; each item has rows, or partial rows, of its own.
    unsafe { pool.deal(main, &problem, partition.items(), |n| partition.item(n)) }?;
    if let Some(combine) = combine {
        // SAFETY: as above; every chunk is written.
        unsafe { pool.deal(combine, &problem, partition.tasks, |task| Item { task, chunk: 0 }) }?;
    }
    Ok(())
}

/// Threads with scratch memory of their own.
struct Pool<'a> {
    executor: &'a dyn Executor,
    threads: usize,
    scratch_bytes: usize,
    base: Shared,
}

impl Pool<'_> {
    /// Runs `entry` on items `0..items`, each once, the next free thread taking the next one.
    ///
    /// # Safety
    /// `entry` is compiled for an instruction set that this machine has, and writes disjoint memory for each item.
    unsafe fn deal(
        &self,
        entry: Entry,
        problem: &Problem,
        items: usize,
        order: impl Fn(usize) -> Item + Sync,
    ) -> Result<()> {
        let (next, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let base = &self.base;
        self.executor.parallel_for(self.threads.min(items), &|_| {
            // The executor's own numbering is not relied on: a slot belongs to whoever takes it first.
            let slot = taken.fetch_add(1, Ordering::Relaxed);
            if slot >= self.threads {
                return;
            }
            let scratch = base.0.wrapping_add(slot * self.scratch_bytes);
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= items {
                    break;
                }
                // SAFETY: slot < threads and taken once, so its scratch lies inside the workspace and is this thread's; the rest is the caller's promise.
                unsafe { entry(problem, order(n), scratch) };
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
