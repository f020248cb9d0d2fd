//! Where work runs: threads that share it, or a GPU's stream, and the scratch memory that it uses.
//!
//! What an executor's threads and a stream are, core does not say: a private pool and torch's are executors (the façade, the Python
//! package), and a stream is the handle of a driver that core never calls. Deliberately absent: threads of its own.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::{Error, Result};

/// Threads that share the work of one call.
pub trait Executor: Sync {
    /// How many chunks may run at once; at least 1.
    fn threads(&self) -> usize;

    /// Runs `work(0)` to `work(chunks − 1)`, each once, and returns when all are done. Chunks may run one after another
    /// on the caller's thread; a nested call does.
    ///
    /// # Errors
    /// [`Error::WorkerPanicked`] if a chunk panicked; all others have ended by then.
    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()>;
}

/// The caller's thread alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct SerialExecutor;

impl Executor for SerialExecutor {
    fn threads(&self) -> usize {
        1
    }

    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let run = std::panic::AssertUnwindSafe(|| (0..chunks).for_each(work));
        std::panic::catch_unwind(run).map_err(|payload| Error::worker_panicked(payload.as_ref()))
    }
}

impl Error {
    /// The error for a panic's payload.
    #[must_use]
    pub fn worker_panicked(payload: &(dyn std::any::Any + Send)) -> Self {
        let message = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".into());
        Error::WorkerPanicked { message }
    }
}

/// Where a run is enqueued.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Queue<'a> {
    /// Host threads; the run has ended when `run` returns.
    Host(&'a dyn Executor),
    /// A stream of an NVIDIA GPU; the run has ended when the stream passes the point at which it was enqueued.
    Cuda {
        /// The device's index.
        device: u32,
        /// The driver's handle (`CUstream`); 0 is the default stream.
        stream: usize,
    },
    /// PyTorch's stream on an Apple GPU, of which it has one; the run has ended when that passes the point at which it was encoded.
    Mps {
        /// The device's index.
        device: u32,
    },
}

/// Scratch memory of one run on a device: whoever owns it keeps it until the stream has passed the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DeviceMemory {
    /// The address of the first byte, aligned to 16.
    pub address: usize,
    /// The length.
    pub len_bytes: usize,
}

/// Scratch memory of one run: aligned to 64 bytes, grown by whoever owns it and never by a kernel.
#[derive(Debug)]
pub struct Workspace {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a Workspace owns plain bytes.
unsafe impl Send for Workspace {}
// SAFETY: shared access gives no bytes.
unsafe impl Sync for Workspace {}

impl Workspace {
    const ALIGN: usize = 64;

    /// An empty workspace.
    #[must_use]
    pub const fn new() -> Self {
        Workspace { ptr: NonNull::dangling(), len: 0 }
    }

    /// At least `bytes` long, every byte initialised; the contents are lost.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; the workspace is as before.
    #[inline]
    pub fn ensure(&mut self, bytes: usize) -> Result<()> {
        if bytes <= self.len {
            return Ok(());
        }
        let layout = Layout::from_size_align(bytes, Self::ALIGN).map_err(|_| Error::OutOfMemory { bytes })?;
        // SAFETY: the size is not zero: it is greater than `self.len`.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Error::OutOfMemory { bytes })?;
        self.free();
        (self.ptr, self.len) = (ptr, bytes);
        Ok(())
    }

    /// The length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len
    }

    /// The first byte, aligned to 64.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// The first byte, aligned to 64.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    fn free(&mut self) {
        if self.len > 0 {
            let layout = Layout::from_size_align(self.len, Self::ALIGN).expect("the layout it was allocated with");
            // SAFETY: allocated in `ensure` with this layout.
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
            self.len = 0;
        }
    }
}

impl Default for Workspace {
    fn default() -> Self {
        Workspace::new()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        self.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_grows_is_aligned_and_refuses_the_impossible() {
        let mut workspace = Workspace::new();
        workspace.ensure(100).unwrap();
        assert_eq!(workspace.as_mut_ptr() as usize % 64, 0);
        assert_eq!(workspace.ensure(usize::MAX), Err(Error::OutOfMemory { bytes: usize::MAX }));
        assert_eq!(workspace.len_bytes(), 100);
        workspace.ensure(50).unwrap();
        assert_eq!(workspace.len_bytes(), 100);
    }

    #[test]
    fn a_panic_of_a_chunk_is_an_error() {
        let error = SerialExecutor.parallel_for(1, &|_| panic!("broken")).unwrap_err();
        assert_eq!(error, Error::WorkerPanicked { message: "broken".into() });
    }
}
