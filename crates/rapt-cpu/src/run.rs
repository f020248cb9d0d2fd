//! Runs a plan: deals items out to threads. Allocates nothing, selects nothing, trusts neither the plan's public fields nor
//! the executor with memory safety.

use std::sync::atomic::{AtomicUsize, Ordering};

use rapt_core::{DType, Error, Executor, Kernel, Operands, Plan, Result, Workspace};

use crate::arch::{self, Entry, Step};
use crate::caps::available;
use crate::kernels::simd::Real;
use crate::problem::{Item, Problem};
use crate::select::{cut, partials_bytes, scratch_bytes};
use crate::tiles::Tiles;

/// A pointer that threads share; each uses a part of its own.
struct Shared(*mut u8);
// SAFETY: see the type.
unsafe impl Sync for Shared {}

/// Runs `plan` on `operands`, which were checked against its spec. `out` and `lse` are written when it returns.
///
/// # Errors
/// [`Error::OutOfMemory`] if `workspace` is shorter than the plan asks; [`Error::NotAsPlanned`] for operands of another
/// spec; [`Error::WorkerPanicked`].
pub fn run(plan: &Plan, operands: &mut Operands<'_>, workspace: &mut Workspace, executor: &dyn Executor) -> Result<()> {
    run_tiled(plan, &Tiles::of(&plan.spec, plan.key.arch), operands, workspace, executor)
}

/// As [`run`], with tiles of the caller's choice: for [`tune`](crate::tune).
pub(crate) fn run_tiled(
    plan: &Plan,
    tiles: &Tiles,
    operands: &mut Operands<'_>,
    workspace: &mut Workspace,
    executor: &dyn Executor,
) -> Result<()> {
    operands.expect(&plan.spec)?;
    let (spec, kernel, arch, threads) = (&plan.spec, plan.key.kernel, plan.key.arch, plan.threads.max(1));
    if kernel == Kernel::Empty {
        fill_empty(plan, operands);
        return Ok(());
    }
    let storage = spec.numerics.storage;
    let entry = |step| {
        let missing = || Error::unsupported(arch.name(), "this machine or build lacks it", "plan on this machine");
        if !available().contains(&arch) {
            return Err(missing());
        }
        arch::entry(arch, step, storage).ok_or_else(missing)
    };
    let cut = cut(spec, kernel, arch, threads, tiles);
    let scratch = scratch_bytes(spec, kernel, arch, &cut);
    // Asked of the spec again, not of the plan: a plan's fields are public.
    let bytes = threads.saturating_mul(scratch).saturating_add(partials_bytes(spec, kernel, &cut));
    if workspace.len_bytes() < bytes {
        return Err(Error::OutOfMemory { bytes });
    }
    let base = workspace.as_mut_ptr();
    let partials = base.wrapping_add(threads * scratch);
    let problem = Problem::new(plan, cut, operands, partials);
    let pool = Pool { executor, threads, scratch, base: Shared(base) };
    match kernel {
        Kernel::Decode => {
            let items = cut.tasks * cut.chunks;
            // Where the rows of all heads lie between one key and the next, heads follow one another: the same pages.
            let heads = spec.num_q_heads() / cut.heads.max(1);
            let interleaved = spec.k.strides[2].unsigned_abs() > spec.k.strides[1].unsigned_abs();
            let order = move |n: usize| {
                let (batch, rest) = (n / (heads * cut.chunks), n % (heads * cut.chunks));
                if interleaved {
                    Item { task: batch * heads + rest % heads, chunk: rest / heads }
                } else {
                    in_order(n, cut.chunks)
                }
            };
            // SAFETY: the entry is for an instruction set that this machine has.
            unsafe { pool.deal(entry(Step::Decode)?, &problem, items, order) }?;
            if cut.chunks > 1 {
                // SAFETY: as above; every chunk is written.
                unsafe { pool.deal(entry(Step::Combine)?, &problem, cut.tasks, |task| Item { task, chunk: 0 }) }?;
            }
            Ok(())
        }
        _ => {
            let items = cut.tasks * cut.chunks;
            let heavy_last = spec.causal.is_some();
            // Under a causal mask the last rows see the most keys: they go first, so that the threads end together.
            let order = move |n: usize| {
                if heavy_last {
                    Item { task: n % cut.tasks, chunk: cut.chunks - 1 - n / cut.tasks }
                } else {
                    in_order(n, cut.chunks)
                }
            };
            // SAFETY: the entry is for an instruction set that this machine has.
            unsafe { pool.deal(entry(Step::Forward)?, &problem, items, order) }
        }
    }
}

fn in_order(n: usize, chunks: usize) -> Item {
    Item { task: n / chunks, chunk: n % chunks }
}

/// Threads with scratch memory of their own.
struct Pool<'a> {
    executor: &'a dyn Executor,
    threads: usize,
    scratch: usize,
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
            let scratch = base.0.wrapping_add(slot * self.scratch);
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
fn fill_empty(plan: &Plan, operands: &mut Operands<'_>) {
    let spec = &plan.spec;
    if spec.out.shape.contains(&0) {
        return;
    }
    let cut = cut(spec, Kernel::Empty, plan.key.arch, 1, &Tiles::DEFAULT);
    let problem = Problem::new(plan, cut, operands, std::ptr::null_mut());
    let [batch, heads, q_len, dim] = spec.out.shape;
    for (b, h, i) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..q_len).map(move |i| (b, h, i)))) {
        for d in 0..dim {
            // SAFETY: an element of out; 0 is the same in every dtype.
            unsafe { f64::ZERO.store_as(problem.out.dtype, problem.out.at([b, h, i, d])) };
        }
        if let Some(lse) = &problem.lse {
            debug_assert!(matches!(lse.dtype, DType::F32 | DType::F64));
            // SAFETY: an element of lse.
            unsafe { f64::NEG_INFINITY.store_as(lse.dtype, lse.at([b, h, i])) };
        }
    }
}
