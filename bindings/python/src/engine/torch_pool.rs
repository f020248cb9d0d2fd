//! torch's own threads as an [`Executor`], through `torch_parallel_for` of its C ABI (torch 2.10 and newer).
//!
//! Two pools of threads that fight for the same cores are slower than either. No unwinding crosses the C frames, and a
//! forked child never enters torch's pool (GNU OpenMP waits for ever there): it gets a private one.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rapt::{Error, Executor, Pool, Result};

use crate::tensors::torch_abi::function;

type Range = unsafe extern "C" fn(i64, i64, *mut c_void);
type ParallelFor = unsafe extern "C" fn(i64, i64, i64, Range, *mut c_void) -> i32;
type GetNumThreads = unsafe extern "C" fn(*mut u32) -> i32;

#[derive(Clone, Copy)]
struct Symbols {
    parallel_for: ParallelFor,
    get_num_threads: GetNumThreads,
    /// The process they were found in.
    pid: u32,
}

/// The two functions of a libtorch that this process has loaded; nothing is loaded for them.
fn symbols() -> Option<Symbols> {
    static SYMBOLS: OnceLock<Option<Symbols>> = OnceLock::new();
    *SYMBOLS.get_or_init(find)
}

fn find() -> Option<Symbols> {
    Some(Symbols {
        parallel_for: function!(c"torch_parallel_for" as ParallelFor)?,
        get_num_threads: function!(c"torch_get_num_threads" as GetNumThreads)?,
        pid: std::process::id(),
    })
}

/// The number of threads of torch's pool, if its C ABI is there.
pub(crate) fn num_threads() -> Option<usize> {
    let symbols = symbols()?;
    let mut threads = 0;
    // SAFETY: writes one u32.
    let status = unsafe { (symbols.get_num_threads)(&raw mut threads) };
    (status == 0 && threads > 0).then_some(threads as usize)
}

/// Whether torch's own pool is used in this process.
pub(crate) fn is_shared() -> bool {
    symbols().is_some_and(|symbols| symbols.pid == std::process::id())
}

/// A private pool of this size, kept for the life of the process.
fn private(threads: usize) -> Arc<Pool> {
    static POOLS: Mutex<Option<HashMap<usize, Arc<Pool>>>> = Mutex::new(None);
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(pools.get_or_insert_default().entry(threads).or_insert_with(|| Arc::new(Pool::new(threads))))
}

/// torch's threads: its own pool where it can be had, else as many of our own.
pub(crate) struct TorchPool {
    pub(crate) threads: usize,
}

/// What the workers of one call share: each takes the next chunk until none is left.
struct Shared<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    chunks: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Shared<'_> {
    fn drain(&self) {
        loop {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                return;
            }
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.work)(chunk))) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            }
        }
    }
}

unsafe extern "C" fn drain(_begin: i64, _end: i64, shared: *mut c_void) {
    // SAFETY: `parallel_for` below passes a Shared that outlives every worker. `drain` catches every panic.
    unsafe { &*shared.cast::<Shared<'_>>() }.drain();
}

impl Executor for TorchPool {
    fn threads(&self) -> usize {
        self.threads
    }

    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let workers = self.threads.min(chunks);
        let shared = Shared { work, chunks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        if workers <= 1 {
            shared.drain();
        } else {
            match symbols().filter(|symbols| symbols.pid == std::process::id()) {
                None => return private(self.threads).parallel_for(chunks, work),
                Some(symbols) => {
                    let context = (&raw const shared).cast_mut().cast();
                    // SAFETY: as the header says; it returns when all workers are done.
                    let status = unsafe { (symbols.parallel_for)(0, workers as i64, 1, drain, context) };
                    if status != 0 {
                        // torch started no worker: the chunks are done here.
                        shared.drain();
                    }
                }
            }
        }
        match shared.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(payload) => Err(Error::worker_panicked(payload.as_ref())),
            None => Ok(()),
        }
    }
}
