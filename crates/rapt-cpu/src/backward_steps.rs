//! The steps of the backward pass: of one request, or of many side by side, whose items are dealt to the threads together.
//!
//! A wave is what has partial sums of dq in memory at a time: tasks of one request or of several. Which tasks make one touches no bit.

use crate::backward_problem::BackwardProblem;
use crate::kernels::backward::{Entries, Entry, ROWS_PER_ITEM, mask_pieces, shared_blocks, tiles_of_dq};
use crate::run::{Pool, Shared};

/// A request, and the kernels that compute it.
pub(crate) struct Job {
    pub(crate) problem: BackwardProblem,
    pub(crate) entries: Entries,
}

/// Tasks of one job in a wave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Segment {
    pub(crate) job: usize,
    pub(crate) first: usize,
    pub(crate) tasks: usize,
    /// Where its partial sums begin among those of the wave, in bytes.
    pub(crate) partials_at: usize,
}

/// Runs every step of `jobs`, whose gradients are written then. `waves` have each task once, and each job once in a wave; `partials` is memory for
/// the partial sums of the largest of them, each segment's from `partials_at` on.
pub(crate) fn run(
    jobs: &mut [Job],
    waves: &[Vec<Segment>],
    partials: *mut u8,
    pool: &Pool<'_>,
) -> rapt_core::Result<()> {
    // Shared, so that no closure keeps a bare pointer.
    let partials = Shared(partials);
    let all = |items: fn(&BackwardProblem) -> usize, jobs: &[Job]| -> Vec<usize> {
        jobs.iter().map(|job| items(&job.problem)).collect()
    };
    let is_shared = jobs.iter().any(|job| job.problem.shared.is_any());
    let rows = all(|problem| (problem.partition.tasks * problem.partition.rows).div_ceil(ROWS_PER_ITEM), jobs);
    deal(pool, jobs, rows, |entries| entries.rows)?;
    let tiles = all(|problem| problem.partition.tasks * problem.partition.task_tiles(), jobs);
    deal(pool, jobs, tiles, |entries| entries.large)?;
    for wave in waves {
        for segment in wave {
            let problem = &mut jobs[segment.job].problem;
            (problem.first_task, problem.wave_tasks) = (segment.first, segment.tasks);
            problem.threads = pool.threads;
            problem.partials = partials.0.wrapping_add(segment.partials_at);
        }
        let items = |of: fn(&BackwardProblem) -> usize| -> Vec<usize> {
            let mut items = vec![0; jobs.len()];
            wave.iter().for_each(|segment| items[segment.job] = of(&jobs[segment.job].problem));
            items
        };
        let is_asked = |problem: &BackwardProblem| problem.needs_ds() || problem.dv.is_some();
        if jobs.iter().any(|job| is_asked(&job.problem)) {
            deal(pool, jobs, items(|problem| problem.wave_tasks * problem.partition.chunks), |entries| entries.main)?;
        }
        if is_shared {
            deal(pool, jobs, items(shared_blocks), |entries| entries.keys)?;
        }
        if jobs.iter().any(|job| job.problem.dq.is_some()) {
            deal(pool, jobs, items(tiles_of_dq), |entries| entries.dq)?;
        }
    }
    let pieces = |problem: &BackwardProblem| match problem.d_mask {
        Some(_) => mask_pieces(problem.d_mask_shape, &problem.partition).iter().product(),
        None => 0,
    };
    deal(pool, jobs, all(pieces, jobs), |entries| entries.mask)?;
    let sinks = all(|problem| problem.d_sinks.map_or(0, |_| problem.num_q_heads), jobs);
    deal(pool, jobs, sinks, |entries| entries.sinks)
}

/// Deals one step of all jobs, of which job `n` has `items[n]` items.
fn deal(pool: &Pool<'_>, jobs: &[Job], items: Vec<usize>, entry: fn(&Entries) -> Entry) -> rapt_core::Result<()> {
    let mut all = 0;
    // Of jobs with items alone: the first item of each among those of all.
    let mut begins = Vec::with_capacity(jobs.len());
    for (job, items) in jobs.iter().zip(items).filter(|(_, items)| *items > 0) {
        begins.push((all, job));
        all += items;
    }
    pool.deal(all, |n, scratch| {
        let (first, job) = begins[begins.partition_point(|(first, _)| *first <= n) - 1];
        // SAFETY: the entries are of an instruction set that this machine has; items write parts of their own, and what they read of earlier steps
        // is written.
        unsafe { entry(&job.entries)(&job.problem, n - first, scratch) }
    })
}
