//! A private pool of threads, started at the first call that needs more than the caller's thread.
//!
//! A forked child inherits the pool's memory but none of its threads: the pool remembers the process it was built in and
//! is rebuilt in another (DataLoader workers, forking servers).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use rapt_core::{Error, Executor, Result};

/// An [`Executor`] over a private rayon pool.
#[derive(Debug)]
pub struct Pool {
    threads: usize,
    built: Mutex<Option<(u32, Arc<rayon::ThreadPool>)>>,
}

impl Pool {
    /// A pool of `threads` threads (at least 1); no thread is started yet.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Pool { threads: threads.max(1), built: Mutex::new(None) }
    }

    fn get(&self) -> Result<Arc<rayon::ThreadPool>> {
        let pid = std::process::id();
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = built.as_ref().filter(|(of, _)| *of == pid) {
            return Ok(Arc::clone(pool));
        }
        if let Some((_, stale)) = built.take() {
            // Its threads do not exist in this process: joining them would wait for ever.
            std::mem::forget(stale);
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.threads)
            .thread_name(|n| format!("rapt-{n}"))
            .build()
            .map_err(|error| Error::unsupported("a pool of threads", error.to_string(), "ask for fewer threads"))?;
        let pool = Arc::new(pool);
        *built = Some((pid, Arc::clone(&pool)));
        Ok(pool)
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
        match pool.filter(|pool| pool.current_thread_index().is_none()) {
            // A nested call, and work that fits one thread, stays on the caller's thread.
            None => (0..chunks).for_each(run),
            Some(pool) => pool.in_place_scope(|scope| {
                for chunk in 1..chunks {
                    let run = &run;
                    scope.spawn(move |_| run(chunk));
                }
                run(0);
            }),
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
    use std::sync::atomic::{AtomicUsize, Ordering};

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
