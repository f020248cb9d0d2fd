//! Memory and order for bindings whose caller's library lends neither: the driver's own pool, and events.
//!
//! A run needs none of this; its workspace and stream are the caller's. An array library that lends no memory (jax) is
//! handed memory from here, and what it may not touch before a run is over is held until a [`Mark`] is passed. Nothing
//! here waits on the host.

use rapt_core::{Device, DeviceMemory, Error, Result as CoreResult};

use crate::backend::Backend;
use crate::error::CudaError;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// Memory of a device, given back to the driver when the stream that it was asked for has come to where it is dropped.
#[derive(Debug)]
pub struct Memory {
    backend: &'static Backend,
    device: u32,
    stream: usize,
    memory: DeviceMemory,
}

impl Memory {
    /// Where it lies.
    #[must_use]
    pub const fn get(&self) -> DeviceMemory {
        self.memory
    }

    /// The device's index.
    #[must_use]
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// The stream that it was asked for.
    #[must_use]
    pub const fn stream(&self) -> usize {
        self.stream
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A failure is that of a process that ends, or was forked: there is nothing to give back to.
        let _ = self.backend.driver().free(self.device, self.memory.address, self.stream);
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Mark {
    backend: &'static Backend,
    device: u32,
    event: usize,
}

impl Mark {
    /// Whether the stream has passed it.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`]: also for what the stream ran before.
    pub fn has_passed(&self) -> CoreResult<bool> {
        self.backend.driver().has_passed(self.device, self.event).map_err(on(self.device))
    }

    /// Lets what `stream` is given from here on wait for it.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`].
    ///
    /// # Safety
    /// `stream` is a live stream of the mark's device.
    pub unsafe fn hold(&self, stream: usize) -> CoreResult<()> {
        self.backend.driver().wait(self.device, stream, self.event).map_err(on(self.device))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let _ = self.backend.driver().end_event(self.device, self.event);
    }
}

fn on(device: u32) -> impl Fn(CudaError) -> Error {
    move |error| error.on(Device::Cuda(device))
}

impl Backend {
    /// At least `bytes` bytes of `device`, to be used by what `stream` runs from here on.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::DeviceUnavailable`] and [`Error::DeviceFailed`].
    ///
    /// # Safety
    /// `stream` is a stream of `device` that outlives the memory; the default stream (0) always does.
    pub unsafe fn lend(&'static self, device: u32, bytes: usize, stream: usize) -> CoreResult<Memory> {
        let address = self.driver().allocate(device, bytes, stream).map_err(|error| match error {
            CudaError::Driver { code: OUT_OF_MEMORY, .. } => Error::OutOfMemory { bytes },
            other => other.on(Device::Cuda(device)),
        })?;
        Ok(Memory { backend: self, device, stream, memory: DeviceMemory { address, len_bytes: bytes } })
    }

    /// The end of what `stream` has to do now.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] and [`Error::DeviceFailed`].
    ///
    /// # Safety
    /// `stream` is a live stream of `device`.
    pub unsafe fn mark(&'static self, device: u32, stream: usize) -> CoreResult<Mark> {
        let event = self.driver().record(device, stream).map_err(on(device))?;
        Ok(Mark { backend: self, device, event })
    }
}
