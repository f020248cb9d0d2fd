//! GPUs that Vulkan reaches: their backend is a package of its own, `rapt_vulkan`, which is imported where a call asks for one.
//!
//! ```text
//! device="vulkan:0" ──► home ──► rapt_vulkan.interface ──► rapt::bridge::Bridge::open ──► an Engine, kept
//! ```
//! An adapter is opened once in a process, and again in a forked child, which has none of its parent's threads: what the parent opened is not
//! touched there, nor given back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyModuleNotFoundError;
use pyo3::types::PyDict;
use pyo3::{ffi, prelude::*};
use rapt::bridge::{self, Bridge};
use rapt::{DType, Device, Engine, Error, ErrorKind, Offload, Plan, Spec};

use super::Home;
use crate::errors::{Failure, hints};
use crate::kind::Kind;

/// The package that has the backend.
const PACKAGE: &str = "rapt_vulkan";
/// How it is installed.
const INSTALL: &str = "`pip install \"rapt-attention[vulkan]\"`";

/// The devices of the package.
fn bridge(py: Python<'_>) -> Result<Bridge, Failure> {
    let module = match py.import(PACKAGE) {
        Ok(module) => module,
        Err(error) if error.is_instance_of::<PyModuleNotFoundError>(py) => {
            let message = "GPUs that Vulkan reaches are served by a package of their own, which is not installed";
            return Err(Failure::binding(ErrorKind::Device, message, INSTALL));
        }
        Err(error) => return Err(error.into()),
    };
    let capsule = module.getattr("interface")?;
    // SAFETY: asked by its name; a foreign object yields null and an exception.
    let interface = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), bridge::NAME.as_ptr()) };
    if interface.is_null() {
        return Err(PyErr::fetch(py).into());
    }
    // SAFETY: what stands under this name is the interface of a library of Rapt's, a static of a module, which Python never unloads.
    let bridge = unsafe { Bridge::new(interface.cast_const().cast()) };
    bridge.map_err(|error| {
        let message = format!("{PACKAGE} is of another version of Rapt: {error}");
        Failure::binding(ErrorKind::Device, message, "`pip install --upgrade \"rapt-attention[vulkan]\"`")
    })
}

/// The device that tensors of the host are copied to.
pub(crate) fn offload(py: Python<'_>, device: Device) -> Result<Arc<dyn Offload>, Failure> {
    let Device::Vulkan(adapter) = device else { return Ok(rapt::offload(device)?) };
    let bridge = bridge(py)?;
    Ok(Arc::new(py.detach(|| bridge.open(adapter))?))
}

/// An engine that stays open, of the process and the device.
struct Kept {
    of: (u32, Device),
    engine: Arc<Engine>,
}

/// The engines of this process and of those that it was forked from.
static ENGINES: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// The engine on this device.
pub(crate) fn home(py: Python<'_>, device: Device) -> Result<Home, Failure> {
    let of = (std::process::id(), device);
    let kept = || {
        let engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        engines.iter().find(|kept| kept.of == of).map(|kept| Home::Own(Arc::clone(&kept.engine)))
    };
    if let Some(home) = kept() {
        return Ok(home);
    }
    // Without the lock: opening gives the GIL to others, who may ask for the lock.
    let engine = Arc::new(Engine::with_offload(offload(py, device)?, None)?);
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    // Whoever was here first has it.
    let at = engines.iter().position(|kept| kept.of == of).unwrap_or_else(|| {
        engines.push(Kept { of, engine });
        engines.len() - 1
    });
    Ok(Home::Own(Arc::clone(&engines[at].engine)))
}

/// A refusal of a GPU, with its hint.
pub(crate) fn refused(error: Error, spec: &Spec, kind: Kind) -> Failure {
    let Error::Unsupported { .. } = error else { return error.into() };
    let is_double = [spec.numerics.storage, spec.out.dtype].contains(&DType::F64);
    let hint = match is_double {
        true => format!("{}, and k and v likewise, or `device=None`", hints::cast("q", DType::F32, kind)),
        false => "`device=None`".to_owned(),
    };
    Failure::binding(error.kind(), error.to_string(), hint)
}

/// The adapters, a row each, or why there are none.
pub(crate) fn report(py: Python<'_>) -> Vec<(String, String)> {
    let why = match bridge(py) {
        Ok(bridge) => return py.detach(|| bridge.report()),
        Err(Failure::Binding { message, hint, .. }) => format!("{message}: {}", hint.trim_matches('`')),
        Err(Failure::Rapt(error)) => error.to_string(),
        Err(Failure::Python(error)) => error.to_string(),
    };
    vec![("vulkan".to_owned(), why)]
}

/// Calls that were served on a GPU, and the bytes that were copied there and back for them.
static SERVED: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts a run of `plan` on a GPU.
pub(crate) fn count(plan: &Plan) {
    SERVED.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(plan.cost().bytes_copied as u64, Ordering::Relaxed);
}

/// See `rapt.vulkan.adapters`.
#[pyfunction]
pub(crate) fn vulkan_adapters(py: Python<'_>) -> Vec<(String, String)> {
    report(py)
}

/// See `rapt.vulkan.stats`.
#[pyfunction]
pub(crate) fn vulkan_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("served", SERVED.load(Ordering::Relaxed))?;
    all.set_item("bytes_copied", BYTES.load(Ordering::Relaxed))?;
    Ok(all)
}

/// Counts from 0 again.
#[pyfunction]
pub(crate) fn reset_vulkan_stats() {
    SERVED.store(0, Ordering::Relaxed);
    BYTES.store(0, Ordering::Relaxed);
}
