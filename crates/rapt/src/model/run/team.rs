//! A team: threads that stay together while the steps of one run follow one another.
//!
//! ```text
//! leader:  lead(team):  parallel_for(chunks)  …  parallel_for(chunks)  …  over
//! others:  while not over: take a chunk where there is one, else wait
//! ```
//! A pool wakes its threads for each call, and a thread that sleeps takes 50 to 100 µs to come (a virtual machine on Zen 4, 2026-11): as
//! long as a step of a small model. A team is called together once for a run, and waits awake between its steps.
//!
//! Whoever comes first leads, and nobody waits for one who has not come: an executor that runs its chunks one after another lets
//! the first do all, and the others find that it is over. Deliberately absent: any order between the chunks of one call.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rapt_core::{Error, Executor, Result, SerialExecutor};

/// What is dealt: chunks, and what each runs.
#[derive(Clone, Copy)]
struct Work {
    chunks: usize,
    run: *const (dyn Fn(usize) + Sync),
}

/// On a cache line of its own: who waits reads it all the time.
#[repr(align(128))]
struct Alone<T>(T);

/// Threads that share the work of one run's steps, as an executor.
pub(super) struct Team {
    size: usize,
    /// Chunks of `work` that nobody has taken.
    left: Alone<AtomicUsize>,
    /// Chunks of `work` that are not done.
    pending: Alone<AtomicUsize>,
    /// Written by the leader while `pending` is 0; read by who has taken a chunk, before it is done.
    work: UnsafeCell<Work>,
    is_busy: AtomicBool,
    is_over: Alone<AtomicBool>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` is written and read as its comment says, which `parallel_for` and `take` see to; what it points to is `Sync`.
unsafe impl Sync for Team {}

/// Ends a team's run, also where the leader panics.
struct Over<'a>(&'a Team);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.0.store(true, Ordering::Release);
    }
}

/// Leads a team of at most `size` threads of `executor`.
///
/// # Errors
/// [`Error::WorkerPanicked`], [`Error::WorkLeftUndone`] of an executor that ran nothing.
pub(super) fn together<R: Send>(
    executor: &dyn Executor,
    size: usize,
    lead: impl FnOnce(&Team) -> R + Send,
) -> Result<R> {
    let team = Team::new(size);
    if size <= 1 {
        return Ok(lead(&team));
    }
    let (came, lead, led) = (AtomicUsize::new(0), Mutex::new(Some(lead)), Mutex::new(None));
    executor.parallel_for(size, &|_| match came.fetch_add(1, Ordering::Relaxed) {
        0 => {
            let _over = Over(&team);
            let lead = lead.lock().unwrap_or_else(PoisonError::into_inner).take();
            let done = lead.map(|lead| lead(&team));
            *led.lock().unwrap_or_else(PoisonError::into_inner) = done;
        }
        _ => team.help(),
    })?;
    led.into_inner().unwrap_or_else(PoisonError::into_inner).ok_or(Error::WorkLeftUndone { done: 0, items: size })
}

impl Team {
    fn new(size: usize) -> Team {
        fn nothing(_: usize) {}
        Team {
            size,
            left: Alone(AtomicUsize::new(0)),
            pending: Alone(AtomicUsize::new(0)),
            work: UnsafeCell::new(Work { chunks: 0, run: &nothing }),
            is_busy: AtomicBool::new(false),
            is_over: Alone(AtomicBool::new(false)),
            panic: Mutex::new(None),
        }
    }

    /// Takes a chunk and runs it, if there is one.
    fn take(&self) -> bool {
        let one_less = |left: usize| left.checked_sub(1);
        let Ok(left) = self.left.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_less) else { return false };
        // SAFETY: a chunk was taken and is not done, so `work` is not written, and what it points to is still there.
        let (chunk, run) = unsafe {
            let work = self.work.get().read();
            (work.chunks - left, &*work.run)
        };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| run(chunk))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
        self.pending.0.fetch_sub(1, Ordering::Release);
        true
    }

    fn help(&self) {
        let mut idle = Idle::default();
        while !self.is_over.0.load(Ordering::Acquire) {
            if self.left.0.load(Ordering::Relaxed) > 0 && self.take() {
                idle = Idle::default();
            } else {
                idle.wait();
            }
        }
    }
}

impl Executor for Team {
    fn threads(&self) -> usize {
        self.size
    }

    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        if self.size <= 1 || chunks <= 1 || self.is_busy.swap(true, Ordering::Acquire) {
            // Also a call from within a chunk.
            return SerialExecutor.parallel_for(chunks, work);
        }
        // SAFETY: the same type but for the lifetime: nobody reads it once all chunks are done, which is waited for below.
        let run = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(work) };
        // SAFETY: nobody has a chunk: the last call waited for all of its own, and `is_busy` keeps other calls out.
        unsafe { self.work.get().write(Work { chunks, run }) };
        self.pending.0.store(chunks, Ordering::Relaxed);
        self.left.0.store(chunks, Ordering::Release);
        while self.take() {}
        let mut idle = Idle::default();
        while self.pending.0.load(Ordering::Acquire) > 0 {
            idle.wait();
        }
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.is_busy.store(false, Ordering::Release);
        panic.map_or(Ok(()), |payload| Err(Error::worker_panicked(payload.as_ref())))
    }
}

/// How a thread waits: awake as long as a step may take, then giving way to others, then asleep.
#[derive(Default)]
struct Idle(u32);

impl Idle {
    /// Of some 50 cycles each.
    const AWAKE: u32 = 1 << 12;
    const GIVING_WAY: u32 = Self::AWAKE + (1 << 9);
    const ASLEEP: Duration = Duration::from_micros(50);

    fn wait(&mut self) {
        match self.0 {
            0..Self::AWAKE => std::hint::spin_loop(),
            Self::AWAKE..Self::GIVING_WAY => std::thread::yield_now(),
            _ => std::thread::sleep(Self::ASLEEP),
        }
        self.0 = self.0.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;
    use rapt_core::SerialExecutor;

    /// Steps of several sizes, one after another: each chunk runs once, and before any of the next step.
    fn steps(executor: &dyn Executor, size: usize) {
        let done = AtomicUsize::new(0);
        let sum = together(executor, size, |team| {
            let mut before = 0;
            for step in 0..200 {
                let chunks = step % 7;
                let hits: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                let check = |chunk: usize| {
                    assert!(done.fetch_add(1, Ordering::Relaxed) >= before);
                    hits[chunk].fetch_add(1, Ordering::Relaxed);
                };
                team.parallel_for(chunks, &check).unwrap();
                before += chunks;
                assert_eq!(done.load(Ordering::Relaxed), before);
                assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
            }
            before
        });
        assert_eq!(sum, Ok(done.into_inner()));
    }

    #[test]
    fn chunks_of_a_step_run_once_and_before_the_next_step() {
        steps(&SerialExecutor, 1);
        steps(&SerialExecutor, 4);
        let pool = Pool::new(3);
        (0..20).for_each(|_| steps(&pool, 3));
        steps(&pool, 9);
    }

    #[test]
    fn a_call_from_within_a_chunk_runs_on_its_thread() {
        let (pool, hits) = (Pool::new(2), AtomicUsize::new(0));
        let count = |_: usize| {
            hits.fetch_add(1, Ordering::Relaxed);
        };
        together(&pool, 2, |team| team.parallel_for(4, &|_| team.parallel_for(3, &count).unwrap())).unwrap().unwrap();
        assert_eq!(hits.into_inner(), 12);
    }

    #[test]
    fn a_panic_of_a_chunk_or_of_the_leader_is_an_error_and_ends_the_run() {
        let pool = Pool::new(2);
        for broken in 0..5 {
            let done = together(&pool, 2, |team| {
                let error = team.parallel_for(5, &|chunk| assert!(chunk != broken, "broken")).unwrap_err();
                assert!(matches!(error, Error::WorkerPanicked { .. }));
                team.parallel_for(5, &|_| ())
            });
            assert_eq!(done, Ok(Ok(())));
            let done: Result<()> = together(&pool, 2, |_| panic!("broken"));
            assert_eq!(done, Err(Error::WorkerPanicked { message: "broken".into() }));
        }
    }
}
