//! Many backward plans side by side: their steps one after the other, the items of all dealt to the threads together.
//!
//! ```text
//! memory    [threads] scratch   [jobs] states of rows   [requests][heads] gradients of sinks   partial sums of dq of one wave
//! ```
//! Each request has the bits of [`run_backward`](crate::run_backward). The gradient of sinks, which belong to all, is the sum of theirs in their
//! order, in the accumulation dtype.

use rapt_core::{BackwardOperands, BackwardPlan, DType, Error, Executor, Result, ViewMut, Workspace};

use crate::backward::{BackwardLaunch, BackwardSteps, fill_zeros};
use crate::backward_problem::BackwardProblem;
use crate::backward_steps::{self, Job, Segment};
use crate::kernels::simd::Real;
use crate::problem::Output;
use crate::run::{Pool, Shared};
use crate::select;

/// Bytes of partial sums for each thread that a wave may have, however many items it has: many short requests are few waves.
const WAVE_BYTES: usize = 1 << 20;

/// Backward plans that run side by side: what they ask of threads and memory together.
#[derive(Debug)]
pub struct BackwardBatch<'a> {
    plans: &'a [BackwardPlan],
    /// Those that attend something, the most work first: no long one is left for the end.
    jobs: Vec<Planned<'a>>,
    waves: Vec<Vec<Segment>>,
    threads: usize,
    /// Of one thread.
    scratch_bytes: usize,
    workspace_bytes: usize,
}

/// A plan that attends something.
#[derive(Debug)]
struct Planned<'a> {
    /// Its place among all.
    request: usize,
    steps: &'a BackwardSteps,
    flops: f64,
}

impl<'a> BackwardBatch<'a> {
    /// `plans` on at most `threads` threads.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for the plan of another backend; [`Error::Unsupported`] for a gradient that is a sum over what is broadcast.
    pub fn new(plans: &'a [BackwardPlan], threads: usize) -> Result<Self> {
        let (mut most, mut ns, mut scratch_bytes, mut kept_bytes) = (1, 0.0, 0, 0usize);
        let mut jobs = Vec::with_capacity(plans.len());
        for (request, plan) in plans.iter().enumerate() {
            let launch: &BackwardLaunch = plan.launch_plan()?;
            let Some(steps) = &launch.steps else { continue };
            if steps.decisions.shared.is_any() {
                plan.spec().refuse_sums("many requests side by side")?;
            }
            most = most.max(launch.threads);
            ns += select::ns_on_one_core(&launch.cost);
            scratch_bytes = scratch_bytes.max(steps.scratch_bytes);
            kept_bytes = kept_bytes.saturating_add(steps.states_bytes.saturating_mul(3));
            jobs.push(Planned { request, steps, flops: launch.cost.flops });
        }
        // Requests that are each over before another thread wakes may not be so together.
        let threads = if most > 1 || ns >= select::PARALLEL_NS { threads.max(1) } else { 1 };
        jobs.sort_by(|a, b| b.flops.total_cmp(&a.flops));
        let (waves, partials_bytes) = waves(plans, &jobs, threads);
        let workspace_bytes = threads
            .saturating_mul(scratch_bytes)
            .saturating_add(kept_bytes)
            .saturating_add(sinks_bytes(plans))
            .saturating_add(partials_bytes);
        Ok(BackwardBatch { plans, jobs, waves, threads, scratch_bytes, workspace_bytes })
    }

    /// Scratch memory that the run needs.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Runs every plan on its operands, with the bits of [`run_backward`](crate::run_backward), and sums the gradients of their sinks into `d_sinks`,
    /// `[num_q_heads]` in the dtype of those. All gradients are written when it returns.
    ///
    /// # Errors
    /// As [`run_backward`](crate::run_backward).
    pub fn run(
        &self,
        operands: &mut [BackwardOperands<'_>],
        d_sinks: Option<ViewMut<'_>>,
        workspace: &mut Workspace,
        executor: &dyn Executor,
    ) -> Result<()> {
        if operands.len() != self.plans.len() {
            return Err(Error::NotAsPlanned { tensor: "operands", what: "their number" });
        }
        if workspace.len_bytes() < self.workspace_bytes {
            return Err(Error::OutOfMemory { bytes: self.workspace_bytes });
        }
        self.plans.iter().zip(&*operands).try_for_each(|(plan, operands)| operands.expect(plan.spec()))?;
        if let Some(d_sinks) = &d_sinks {
            self.expect_sinks(d_sinks)?;
        }
        let entries = self.jobs.iter().map(|job| job.steps.entries()).collect::<Result<Vec<_>>>()?;
        let base = workspace.as_mut_ptr();
        let mut states = base.wrapping_add(self.threads * self.scratch_bytes);
        let mut jobs = Vec::with_capacity(self.jobs.len());
        for (Planned { request, steps, .. }, entries) in self.jobs.iter().zip(entries) {
            let (spec, operands) = (self.plans[*request].spec(), &mut operands[*request]);
            let problem =
                BackwardProblem::new(spec, &steps.decisions, operands, steps.states_at(states), std::ptr::null_mut());
            states = states.wrapping_add(3 * steps.states_bytes);
            jobs.push(Job { problem, entries });
        }
        let sinks = states;
        if d_sinks.is_some() {
            for (job, Planned { request, .. }) in jobs.iter_mut().zip(&self.jobs) {
                job.problem.d_sinks = Some(self.sinks_of(*request, sinks));
            }
        }
        for (plan, operands) in self.plans.iter().zip(&mut *operands) {
            if plan.launch_plan::<BackwardLaunch>()?.steps.is_none() {
                fill_zeros(plan.spec(), operands);
            }
        }
        let (threads, scratch_bytes) = (self.threads, self.scratch_bytes);
        let pool = Pool { executor, threads, scratch_bytes, base: Shared(base) };
        backward_steps::run(&mut jobs, &self.waves, sinks.wrapping_add(sinks_bytes(self.plans)), &pool)?;
        if let Some(mut d_sinks) = d_sinks {
            let ptr = d_sinks.as_mut_ptr();
            let (size, strides) = (d_sinks.dtype().size_bytes() as isize, [d_sinks.strides()[0]]);
            let out = Output { ptr, dtype: d_sinks.dtype(), size, strides };
            let heads = d_sinks.shape()[0];
            // SAFETY: `expect_sinks` has compared dtype and length; the head of every job's own gradient is written.
            unsafe {
                match self.accumulation() {
                    DType::F64 => self.sum_sinks::<f64>(sinks, &out, heads),
                    _ => self.sum_sinks::<f32>(sinks, &out, heads),
                }
            }
        }
        Ok(())
    }

    fn expect_sinks(&self, d_sinks: &ViewMut<'_>) -> Result<()> {
        let refuse = |what| Err(Error::NotAsPlanned { tensor: "d_sinks", what });
        if d_sinks.shape().len() != 1 || !d_sinks.dtype().is_computed() {
            return refuse("dtype or shape");
        }
        for plan in self.plans {
            match &plan.spec().forward().sinks {
                Some(sinks) if sinks.dtype != d_sinks.dtype() || sinks.shape[0] != d_sinks.shape()[0] => {
                    return refuse("dtype or shape");
                }
                Some(_) => {}
                None => return refuse("presence"),
            }
        }
        Ok(())
    }

    /// That of all plans, which have one dtype.
    fn accumulation(&self) -> DType {
        self.plans.first().map_or(DType::F32, |plan| plan.spec().forward().numerics.accumulation)
    }

    /// Where the gradient of the sinks of one request goes before it is summed: `[num_q_heads]` of the accumulation dtype.
    fn sinks_of(&self, request: usize, sinks: *mut u8) -> Output<1> {
        let forward = self.plans[request].spec().forward();
        let dtype = forward.numerics.accumulation;
        let at = request * forward.num_q_heads() * dtype.size_bytes();
        Output { ptr: sinks.wrapping_add(at), dtype, size: dtype.size_bytes() as isize, strides: [1] }
    }

    /// # Safety
    /// `out` is of `heads` elements of a computed dtype not wider than `E`, the accumulation dtype, and every job has written its own.
    unsafe fn sum_sinks<E: Real>(&self, sinks: *mut u8, out: &Output<1>, heads: usize) {
        let mut requests: Vec<usize> = self.jobs.iter().map(|job| job.request).collect();
        requests.sort_unstable();
        for head in 0..heads {
            // SAFETY: as the caller promises.
            unsafe {
                let own = |request: &usize| E::load_as(self.accumulation(), self.sinks_of(*request, sinks).at([head]));
                let sum = requests.iter().map(own).fold(E::ZERO, |sum, own| sum + own);
                sum.store_as(out.dtype, out.at([head]));
            }
        }
    }
}

/// Of the gradients of sinks, each request's own: 0 without sinks.
fn sinks_bytes(plans: &[BackwardPlan]) -> usize {
    let Some(forward) = plans.first().map(|plan| plan.spec().forward()) else { return 0 };
    let of_one = forward.sinks.map_or(0, |_| forward.num_q_heads() * forward.numerics.accumulation.size_bytes());
    plans.len().saturating_mul(of_one).checked_next_multiple_of(64).unwrap_or(usize::MAX)
}

/// The tasks of all jobs in waves, and the bytes of the largest one's partial sums.
fn waves(plans: &[BackwardPlan], jobs: &[Planned<'_>], threads: usize) -> (Vec<Vec<Segment>>, usize) {
    let (mut waves, mut most) = (Vec::new(), 0);
    let (mut wave, mut items, mut bytes): (Vec<Segment>, usize, usize) = (Vec::new(), 0, 0);
    for (job, Planned { request, steps, .. }) in jobs.iter().enumerate() {
        let (spec, partition) = (plans[*request].spec(), &steps.decisions.partition);
        let of_task = match spec.dq() {
            Some(_) => partition.partials_of_task().saturating_mul(spec.forward().numerics.accumulation.size_bytes()),
            None => 0,
        };
        for task in 0..partition.tasks {
            let is_full = items >= 4 * threads && bytes.saturating_add(of_task) > threads.saturating_mul(WAVE_BYTES);
            if is_full {
                waves.push(std::mem::take(&mut wave));
                (items, bytes) = (0, 0);
            }
            match wave.last_mut() {
                Some(segment) if segment.job == job => segment.tasks += 1,
                _ => {
                    bytes = bytes.checked_next_multiple_of(64).unwrap_or(usize::MAX);
                    wave.push(Segment { job, first: task, tasks: 1, partials_at: bytes });
                }
            }
            items = items.saturating_add(partition.chunks);
            bytes = bytes.saturating_add(of_task);
            most = most.max(bytes);
        }
    }
    if !wave.is_empty() {
        waves.push(wave);
    }
    (waves, most)
}
