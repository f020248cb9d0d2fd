//! Whose stream and whose memory serve a call on a GPU.
//!
//! torch and cupy have a current stream and an allocator that follows it: work goes there, results and workspace come from
//! there, and nothing waits. Any other producer of DLPack (jax among them) tells neither. Its arrays are asked for on the
//! legacy default stream, which its own work is then ordered before; results lie in the driver's memory and are handed over
//! with the stream on which the taker says that it will read them; and what was read is held until the run has passed.

use std::sync::{Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rapt::cuda::{Backend, Mark, Memory};
use rapt::{DType, Device, DeviceMemory, Shape};

use super::export::Export;
use super::stream::{DEFAULT_STREAM, Enqueued};
use super::{numpy, torch};
use crate::errors::Failure;
use crate::kind::Kind;

/// Who lends.
pub(crate) enum StreamContext<'py> {
    /// torch.
    Torch,
    /// cupy, as a module.
    Cupy(Bound<'py, PyAny>),
    /// The driver.
    Driver,
}

impl<'py> StreamContext<'py> {
    /// Who lends for a call whose q is `q`.
    pub(crate) fn of(kind: Kind, q: &Bound<'py, PyAny>) -> PyResult<Self> {
        if kind != Kind::DlPack {
            return Ok(StreamContext::Torch);
        }
        let py = q.py();
        let class: String = q.get_type().getattr(intern!(py, "__module__"))?.extract()?;
        Ok(match class.split('.').next() {
            Some("cupy") => StreamContext::Cupy(py.import(intern!(py, "cupy"))?.into_any()),
            _ => StreamContext::Driver,
        })
    }

    /// The stream on which a call enqueues now on this GPU, as the driver's handle.
    pub(crate) fn stream(&self, py: Python<'py>, device: u32) -> Result<usize, Failure> {
        match self {
            StreamContext::Torch => torch::current_stream(py, device),
            StreamContext::Cupy(cupy) => {
                let current = cupy.getattr(intern!(py, "cuda"))?.getattr(intern!(py, "get_current_stream"))?;
                // Each device has its own; older releases know that of the current device alone.
                let stream = current.call1((device,)).or_else(|_| on(cupy, device, || current.call0()))?;
                Ok(stream.getattr(intern!(py, "ptr"))?.extract()?)
            }
            StreamContext::Driver => Ok(DEFAULT_STREAM),
        }
    }

    /// At least `bytes` bytes on this GPU, for what `stream` runs.
    pub(crate) fn workspace(
        &self,
        py: Python<'py>,
        device: u32,
        bytes: usize,
        stream: usize,
    ) -> Result<Workspace<'py>, Failure> {
        if bytes == 0 {
            return Ok(Workspace { _owner: Owner::Nobody, memory: DeviceMemory::default() });
        }
        match self {
            StreamContext::Torch => {
                let lent = torch::workspace(py, device, bytes)?;
                let memory = lent.memory;
                Ok(Workspace { _owner: Owner::Torch { _lent: lent }, memory })
            }
            StreamContext::Cupy(cupy) => {
                let array = on(cupy, device, || cupy.call_method1(intern!(py, "empty"), (bytes, "uint8")))?;
                let address = array.getattr(intern!(py, "data"))?.getattr(intern!(py, "ptr"))?.extract()?;
                let memory = DeviceMemory { address, len_bytes: bytes };
                Ok(Workspace { _owner: Owner::Cupy { _array: array }, memory })
            }
            StreamContext::Driver => {
                let lent = lend(device, bytes, stream)?;
                let memory = lent.get();
                Ok(Workspace { _owner: Owner::Driver { _lent: lent }, memory })
            }
        }
    }

    /// Sees to it that the memory of a run's tensors is not reused before it has passed. What is neither torch's nor cupy's is
    /// held, and the next such call lets go of it. torch is told which stream uses them. For cupy its own rule holds, as for
    /// every kernel: memory is reused by what the stream that allocated it runs later, and who brings it to another keeps it.
    pub(crate) fn hold<'a>(
        &self,
        py: Python<'py>,
        enqueued: Option<Enqueued>,
        tensors: impl Iterator<Item = &'a Bound<'py, PyAny>>,
        exports: impl Iterator<Item = Export>,
    ) -> Result<(), Failure>
    where
        'py: 'a,
    {
        let Some(enqueued) = enqueued else { return Ok(()) };
        match self {
            StreamContext::Torch => torch::record_stream(py, enqueued, tensors)?,
            StreamContext::Cupy(_) => {}
            StreamContext::Driver => {
                release(py);
                let Enqueued { device, stream } = enqueued;
                // SAFETY: the stream is the default one (`StreamContext::stream`), which lives as long as the process.
                let mark = unsafe { backend(device)?.mark(device, stream) }?;
                let used = exports.collect();
                HELD.lock().unwrap_or_else(PoisonError::into_inner).push(Held { mark, used });
            }
        }
        Ok(())
    }
}

fn backend(device: u32) -> Result<&'static Backend, Failure> {
    Ok(Backend::get().map_err(|error| error.on(Device::Cuda(device)))?)
}

/// Memory of the driver, as the default stream uses it.
pub(crate) fn lend(device: u32, bytes: usize, stream: usize) -> Result<Memory, Failure> {
    // SAFETY: the default stream lives as long as the process.
    Ok(unsafe { backend(device)?.lend(device, bytes, stream) }?)
}

/// A new row-major array of cupy, of the dtype object of `like` where the dtype is the same.
pub(crate) fn empty_cupy<'py>(
    cupy: &Bound<'py, PyAny>,
    like: &Bound<'py, PyAny>,
    device: u32,
    dtype: DType,
    shape: &Shape,
) -> Result<Bound<'py, PyAny>, Failure> {
    let py = cupy.py();
    let (sizes, object) = (PyTuple::new(py, shape.iter())?, numpy::dtype_object(like, dtype)?);
    Ok(on(cupy, device, || cupy.call_method1(intern!(py, "empty"), (sizes, object)))?)
}

/// Runs `what` with this device as cupy's current one.
fn on<'py, T>(cupy: &Bound<'py, PyAny>, device: u32, what: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    let py = cupy.py();
    let chosen = cupy.getattr(intern!(py, "cuda"))?.getattr(intern!(py, "Device"))?.call1((device,))?;
    chosen.call_method0(intern!(py, "__enter__"))?;
    let done = what();
    chosen.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()))?;
    done
}

/// Memory lent for a run.
pub(crate) struct Workspace<'py> {
    _owner: Owner<'py>,
    pub(crate) memory: DeviceMemory,
}

enum Owner<'py> {
    Nobody,
    Torch { _lent: torch::Workspace<'py> },
    Cupy { _array: Bound<'py, PyAny> },
    Driver { _lent: Memory },
}

/// Exports that a run uses, and where it ends.
struct Held {
    mark: Mark,
    used: Vec<Export>,
}

// SAFETY: an export is ended with the GIL, and nowhere but in `release`, which holds it; a static is never dropped.
unsafe impl Send for Held {}

static HELD: Mutex<Vec<Held>> = Mutex::new(Vec::new());

/// Ends the exports of every run that is over.
fn release(_py: Python<'_>) {
    let over: Vec<Held> = {
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        // A failed device is told by the next launch; what it reads no more may go.
        held.extract_if(.., |one| one.mark.has_passed().unwrap_or(true)).collect()
    };
    // Ended without the lock: an exporter may call us.
    for Held { mark, used } in over {
        drop((mark, used));
    }
}
