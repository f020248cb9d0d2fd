//! A private pool of threads, started at the first call that needs more than the caller's thread.
//!
//! A forked child inherits the pool's memory but none of its threads: the pool remembers the process it was built in and
//! is rebuilt in another (DataLoader workers, forking servers).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rapt_core::{Error, Executor, Result};

/// An [`Executor`] over a private rayon pool.
#[derive(Debug)]
pub struct Pool {
    threads: usize,
    built: Mutex<Option<Built>>,
}

/// A rayon pool and, dropped after it, its threads.
#[derive(Debug)]
struct Built {
    pool: Arc<rayon::ThreadPool>,
    /// Threads that somebody's work has, or waits for.
    taken: Arc<AtomicUsize>,
    threads: Workers,
}

/// The threads of a pool. They have ended when this is dropped: whoever unloads this library, or counts what a process
/// leaves behind, finds none.
#[derive(Debug)]
struct Workers {
    /// The process that they belong to.
    pid: u32,
    handles: Vec<JoinHandle<()>>,
}

impl Workers {
    fn are_of_this_process(&self) -> bool {
        self.pid == std::process::id()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        // In a forked child they do not exist: joining them would wait for ever.
        if self.are_of_this_process() {
            for thread in self.handles.drain(..) {
                // A worker's panic was told when it happened.
                let _ = thread.join();
            }
        }
    }
}

impl Built {
    fn new(threads: usize) -> Result<Self> {
        let mut handles = Vec::with_capacity(threads);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .spawn_handler(|thread| {
                let named = std::thread::Builder::new().name(format!("rapt-{}", thread.index()));
                handles.push(named.spawn(|| thread.run())?);
                Ok(())
            })
            .build()
            .map_err(|error| Error::unsupported("a pool of threads", error.to_string(), "ask for fewer threads"))?;
        Ok(Built { pool: Arc::new(pool), taken: Arc::default(), threads: Workers { pid: std::process::id(), handles } })
    }
}

impl Pool {
    /// A pool of `threads` threads (at least 1); no thread is started yet.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Pool { threads: threads.max(1), built: Mutex::new(None) }
    }

    /// The pool, and how many of its threads are taken.
    fn get(&self) -> Result<(Arc<rayon::ThreadPool>, Arc<AtomicUsize>)> {
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match built.take() {
            Some(found) if found.threads.are_of_this_process() => found,
            stale => {
                // A pool tells its threads to end when it is dropped; those of another process cannot hear it.
                std::mem::forget(stale);
                Built::new(self.threads)?
            }
        };
        let found = built.insert(found);
        Ok((Arc::clone(&found.pool), Arc::clone(&found.taken)))
    }
}

impl Executor for Pool {
    fn threads(&self) -> usize {
        self.threads
    }

    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let panicked = Mutex::new(None);
        let run = |chunk: usize| {
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(chunk))) {
                panicked.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            }
        };
        let pool = if self.threads == 1 || chunks <= 1 { None } else { Some(self.get()?) };
        match pool.filter(|(pool, _)| pool.current_thread_index().is_none()) {
            // A nested call, and work that fits one thread, stays on the caller's thread.
            None => (0..chunks).for_each(run),
            Some((pool, taken)) => {
                // Whoever is free takes the next chunk. No more are asked than are free: a scope ends when all that were asked have
                // come, and one at the work of another caller comes late.
                let next = AtomicUsize::new(0);
                let take = || {
                    while let Some(chunk) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < chunks) {
                        run(chunk);
                    }
                };
                let mut asked = 0;
                let _ = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
                    asked = (chunks - 1).min(self.threads.saturating_sub(taken));
                    Some(taken + asked)
                });
                pool.in_place_scope(|scope| {
                    for _ in 0..asked {
                        scope.spawn(|_| {
                            take();
                            taken.fetch_sub(1, Ordering::Relaxed);
                        });
                    }
                    take();
                });
            }
        }
        match panicked.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(payload) => Err(Error::worker_panicked(payload.as_ref())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_once_nested_calls_too() {
        let pool = Pool::new(3);
        let hits: Vec<AtomicUsize> = (0..12).map(|_| AtomicUsize::new(0)).collect();
        pool.parallel_for(3, &|outer| {
            pool.parallel_for(4, &|inner| {
                hits[outer * 4 + inner].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        })
        .unwrap();
        assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn a_short_call_does_not_wait_for_the_work_of_another_caller() {
        let (pool, release, started) = (Pool::new(2), AtomicUsize::new(0), AtomicUsize::new(0));
        let long = |_: usize| {
            started.fetch_add(1, Ordering::SeqCst);
            while release.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            // Two callers, each with a thread of the pool: none is left.
            (0..2).for_each(|_| drop(scope.spawn(|| pool.parallel_for(2, &long).unwrap())));
            while started.load(Ordering::SeqCst) < 4 {
                std::thread::yield_now();
            }
            let hits = AtomicUsize::new(0);
            let hit = |_: usize| {
                hits.fetch_add(1, Ordering::SeqCst);
            };
            pool.parallel_for(2, &hit).unwrap();
            assert_eq!(hits.into_inner(), 2);
            release.store(1, Ordering::SeqCst);
        });
    }

    #[test]
    fn a_dropped_pool_leaves_no_thread() {
        static ENDED: AtomicUsize = AtomicUsize::new(0);
        struct Thread;
        impl Drop for Thread {
            fn drop(&mut self) {
                // Long enough that whoever did not wait for it would have looked already.
                std::thread::sleep(std::time::Duration::from_millis(50));
                ENDED.fetch_add(1, Ordering::SeqCst);
            }
        }
        thread_local!(static THREAD: Thread = const { Thread });
        let pool = Pool::new(2);
        let caller = std::thread::current().id();
        let workers = Mutex::new(std::collections::HashSet::new());
        while workers.lock().unwrap().is_empty() {
            pool.parallel_for(8, &|_| {
                if std::thread::current().id() != caller {
                    THREAD.with(|_| workers.lock().unwrap().insert(std::thread::current().id()));
                }
            })
            .unwrap();
        }
        drop(pool);
        assert_eq!(ENDED.load(Ordering::SeqCst), workers.into_inner().unwrap().len());
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        for chunks in [1, 2, 5] {
            let error = pool.parallel_for(chunks, &|chunk| assert!(chunk + 1 < chunks, "last chunk")).unwrap_err();
            assert!(matches!(error, Error::WorkerPanicked { .. }));
            pool.parallel_for(chunks, &|_| ()).unwrap();
        }
    }

    #[test]
    fn a_poisoned_pool_still_serves() {
        let pool = Pool::new(2);
        std::thread::scope(|scope| {
            let poison = scope.spawn(|| {
                let _built = pool.built.lock().unwrap();
                panic!("while it is held");
            });
            assert!(poison.join().is_err());
        });
        assert!(pool.built.is_poisoned());
        let ran = AtomicUsize::new(0);
        let count = |_| {
            ran.fetch_add(1, Ordering::Relaxed);
        };
        pool.parallel_for(5, &count).unwrap();
        assert_eq!(ran.load(Ordering::Relaxed), 5);
    }
}
