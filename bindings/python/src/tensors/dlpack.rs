//! DLPack, both capsules: `dltensor` and `dltensor_versioned`.
//!
//! A consumed capsule is renamed and its deleter is called exactly once, when the call is over. The legacy capsule cannot
//! say whether its memory may be written, so it is an input only. Extents are declared. An export of GPU memory is asked for
//! with the stream that will use it, so that the producer orders its own work before; ours is ordered before the stream that
//! a taker names.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{ffi, intern};
use rapt::cuda::{Backend, Memory};
use rapt::{DType, Device, Error, ErrorKind, Extent, MAX_RANK, Shape, Strides};

use super::cuda_interface;
use super::dlpack_abi::{CPU, CUDA, Described, DlDevice, DlTensor, describe, device_of, dtype_to};
use super::export::Export;
use super::operand::{Operand, too_many_dimensions};
use super::stream::DEFAULT_STREAM;
use super::stream_context::{self, StreamContext};
use crate::errors::Failure;

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct Managed {
    dl_tensor: DlTensor,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: Version,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    dl_tensor: DlTensor,
}

const LEGACY: &CStr = c"dltensor";
const LEGACY_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// # Safety
/// `managed` is a [`Managed`] that this call gives up.
unsafe fn end_legacy(managed: NonNull<c_void>) {
    let managed = managed.cast::<Managed>().as_ptr();
    // SAFETY: as the caller promises.
    unsafe {
        if let Some(deleter) = (*managed).deleter {
            deleter(managed);
        }
    }
}

/// # Safety
/// `managed` is a [`ManagedVersioned`] that this call gives up.
unsafe fn end_versioned(managed: NonNull<c_void>) {
    let managed = managed.cast::<ManagedVersioned>().as_ptr();
    // SAFETY: as the caller promises.
    unsafe {
        if let Some(deleter) = (*managed).deleter {
            deleter(managed);
        }
    }
}

fn operand(name: &'static str, seen: &Described, writable: bool, hold: Option<Export>) -> Operand {
    let Described { ptr, dtype, shape, strides, device } = *seen;
    Operand { name, ptr, dtype, shape, strides, device, extent: Extent::Declared, writable, _hold: hold }
}

/// Whether `object` exports itself through DLPack.
pub(crate) fn is_producer(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let class = object.get_type();
    Ok(class.hasattr(intern!(object.py(), "__dlpack__"))?
        && class.hasattr(intern!(object.py(), "__dlpack_device__"))?)
}

/// Asks for a capsule without a copy, in the newest way that the producer understands; of GPU memory with the `stream` that
/// will use it, which every producer of such memory knows of.
fn export<'py>(object: &Bound<'py, PyAny>, stream: Option<usize>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let export = object.getattr(intern!(py, "__dlpack__"))?;
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        // 0 would be ambiguous: 1 is the legacy default stream.
        options.set_item("stream", stream.max(1))?;
    }
    options.set_item("max_version", (1, 3))?;
    options.set_item("copy", false)?;
    for without in [None, Some("copy"), Some("max_version")] {
        if let Some(option) = without {
            options.del_item(option)?;
        }
        match export.call((), Some(&options)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) && !options.is_empty() => {}
            done => return done,
        }
    }
    export.call((), Some(&options))
}

/// What `object` exports. It is of host memory or of an NVIDIA GPU, or refused before anything is exported.
pub(crate) fn read(
    name: &'static str,
    object: &Bound<'_, PyAny>,
    context: &StreamContext<'_>,
) -> Result<Operand, Failure> {
    let py = object.py();
    let place = object.call_method0(intern!(py, "__dlpack_device__"))?;
    let (code, index): (i32, i32) =
        (place.get_item(0)?.call_method0("__index__")?.extract()?, place.get_item(1)?.extract()?);
    let stream = match (code, u32::try_from(index)) {
        (CPU, _) => None,
        (CUDA, Ok(device)) => Some(context.stream(py, device)?),
        _ => {
            let why = "served are host memory and that of NVIDIA GPUs".to_owned();
            return Err(Error::DeviceUnavailable { device: device_of(code, index), why }.into());
        }
    };
    let capsule = export(object, stream).map_err(|error| {
        if !error.is_instance_of::<PyBufferError>(py) {
            return Failure::Python(error);
        }
        let message = format!("{name} does not export itself without a copy ({})", error.value(py));
        Failure::binding(ErrorKind::Layout, message, format!("`{name}.copy()`"))
    })?;
    let capsule = capsule.as_ptr();
    // SAFETY: each call is valid on any object; the pointers are read under the name that defines their type, and
    // taken over by renaming the capsule before anything else can fail.
    let (hold, tensor, flags, known_flags) = unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr());
            let Some(owned) = NonNull::new(managed) else { return Err(PyErr::fetch(py).into()) };
            if ffi::PyCapsule_SetName(capsule, VERSIONED_USED.as_ptr()) != 0 {
                return Err(PyErr::fetch(py).into());
            }
            let hold = Export::new(owned, end_versioned);
            let managed = owned.cast::<ManagedVersioned>().as_ptr();
            let major = (*managed).version.major;
            if major != 1 {
                let message = format!("{name} exports DLPack {major}, 1 is read");
                return Err(Failure::binding(ErrorKind::Unsupported, message, "an exporter of DLPack 1"));
            }
            (hold, &raw const (*managed).dl_tensor, (*managed).flags, true)
        } else if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr());
            let Some(owned) = NonNull::new(managed) else { return Err(PyErr::fetch(py).into()) };
            if ffi::PyCapsule_SetName(capsule, LEGACY_USED.as_ptr()) != 0 {
                return Err(PyErr::fetch(py).into());
            }
            let managed = owned.cast::<Managed>().as_ptr();
            (Export::new(owned, end_legacy), &raw const (*managed).dl_tensor, 0, false)
        } else {
            let message = format!("__dlpack__ of {name} gave no fresh DLPack capsule");
            return Err(Failure::binding(ErrorKind::Kind, message, "a producer whose capsule is not consumed yet"));
        }
    };
    // SAFETY: the export is alive as long as `_hold` of the operand.
    let tensor = unsafe { &*tensor };
    if let Some(rank) = usize::try_from(tensor.ndim).ok().filter(|rank| *rank > MAX_RANK) {
        return Err(too_many_dimensions(name, rank));
    }
    if (tensor.device.device_type, tensor.device.device_id) != (code, index) {
        let what = "exports memory of another device than it names";
        return Err(Error::Representation { tensor: name, what }.into());
    }
    // SAFETY: DLPack: shape has ndim entries, and so has strides where it is not null.
    let mut seen = unsafe { describe(name, tensor) }?;
    if code == CUDA && cuda_interface::is_needed(&seen) {
        // Without an interface they stay, and are refused as the overflow that they are.
        seen.strides = cuda_interface::strides(name, object, &seen)??.unwrap_or(seen.strides);
    }
    let writable = known_flags && flags & (READ_ONLY | IS_COPIED) == 0;
    Ok(operand(name, &seen, writable, Some(hold)))
}

/// The import function of the library that `q` comes from.
pub(crate) fn from_dlpack_of<'py>(q: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>, Failure> {
    let py = q.py();
    let name = intern!(py, "from_dlpack");
    let namespace = q.call_method0(intern!(py, "__array_namespace__"));
    if let Ok(found) = namespace.and_then(|namespace| namespace.getattr(name)) {
        return Ok(found);
    }
    let class = q.get_type();
    let modules = py.import("sys")?.getattr("modules")?;
    let path: String = class.getattr("__module__")?.extract()?;
    let mut at = Some(path.as_str());
    while let Some(module) = at {
        if let Ok(found) = modules.get_item(module).and_then(|module| module.getattr(name)) {
            return Ok(found);
        }
        at = module.rsplit_once('.').map(|(parent, _)| parent);
    }
    if let Ok(found) = class.getattr(name) {
        return Ok(found);
    }
    let message = format!("a result of the kind of q: module {path} has no from_dlpack");
    Err(Failure::binding(ErrorKind::Unsupported, message, "`numpy.from_dlpack(q)`, and so k and v"))
}

/// Where a [`Buffer`] lies.
#[derive(Clone)]
enum Place {
    Host(Arc<rapt::Tensor>),
    Gpu(Arc<Memory>),
}

/// Memory that is handed to another library through DLPack.
#[pyclass(frozen, module = "rapt._native", name = "Exported")]
pub(crate) struct Buffer {
    place: Place,
    dtype: DType,
    shape: Shape,
    strides: Strides,
}

/// Row-major host memory, and the operand that writes it. The operand must be gone before the buffer is exported.
pub(crate) fn allocate(name: &'static str, dtype: DType, shape: Shape) -> Result<(Buffer, Operand), Failure> {
    let mut tensor = rapt::Tensor::zeros(dtype, shape)?;
    let (ptr, strides) = {
        let mut view = tensor.view_mut()?;
        (view.as_mut_ptr(), *view.strides())
    };
    let buffer = Buffer { place: Place::Host(Arc::new(tensor)), dtype, shape, strides };
    let operand = buffer.operand(name, ptr, Device::Cpu);
    Ok((buffer, operand))
}

/// The same of a GPU, in the driver's memory, as its default stream uses it.
pub(crate) fn lend(name: &'static str, device: u32, dtype: DType, shape: Shape) -> Result<(Buffer, Operand), Failure> {
    let overflow = || Error::Overflow { tensor: name, shape, strides: Strides::from([]) };
    let strides = shape.contiguous().ok_or_else(overflow)?;
    let elements = shape.iter().try_fold(dtype.size_bytes(), |bytes, n| bytes.checked_mul(*n)).ok_or_else(overflow)?;
    let memory = stream_context::lend(device, elements, DEFAULT_STREAM)?;
    let ptr = std::ptr::without_provenance_mut(memory.get().address);
    let buffer = Buffer { place: Place::Gpu(Arc::new(memory)), dtype, shape, strides };
    let operand = buffer.operand(name, ptr, Device::Cuda(device));
    Ok((buffer, operand))
}

/// What an export of a [`Buffer`] owns; `managed` is what the consumer sees.
struct Owned<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _place: Place,
}

unsafe extern "C" fn delete_legacy(managed: *mut Managed) {
    // SAFETY: manager_ctx is the Box made in `__dlpack__`; DLPack calls this once.
    drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<Owned<Managed>>()) });
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: as above.
    drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<Owned<ManagedVersioned>>()) });
}

unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with the capsule; one that was consumed has another name and owns nothing any more.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()).cast::<Managed>();
            delete_legacy(managed);
        } else if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast::<ManagedVersioned>();
            delete_versioned(managed);
        }
    }
}

impl Buffer {
    fn operand(&self, name: &'static str, ptr: *mut u8, device: Device) -> Operand {
        let Buffer { dtype, shape, strides, .. } = *self;
        // As long as the elements of a row-major buffer, as it was allocated.
        let len_bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        let extent = Extent::Proven { address: ptr.addr(), len_bytes };
        Operand { name, ptr, dtype, shape, strides, device, extent, writable: true, _hold: None }
    }

    fn device(&self) -> (i32, i32) {
        match &self.place {
            Place::Host(_) => (CPU, 0),
            Place::Gpu(memory) => (CUDA, memory.device().cast_signed()),
        }
    }

    fn describe(&self, shape: &mut [i64], strides: &mut [i64]) -> PyResult<DlTensor> {
        let (device_type, device_id) = self.device();
        let data = match &self.place {
            Place::Host(tensor) => {
                let view = tensor.view().map_err(|error| PyBufferError::new_err(error.to_string()))?;
                view.as_ptr().cast_mut().cast()
            }
            Place::Gpu(memory) => std::ptr::without_provenance_mut(memory.get().address),
        };
        Ok(DlTensor {
            data,
            device: DlDevice { device_type, device_id },
            ndim: shape.len() as i32,
            dtype: dtype_to(self.dtype),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        })
    }

    /// Lets `stream` wait for what fills this buffer. As DLPack has it: None and 1 are the legacy default stream, on which it
    /// is filled; -1 asks for no order.
    fn order_before(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let refuse = |what: &str| Err(PyBufferError::new_err(what.to_owned()));
        let stream: Option<isize> = stream.map(PyAnyMethods::extract).transpose()?;
        let memory = match (&self.place, stream) {
            (Place::Host(_), None) => return Ok(()),
            (Place::Host(_), Some(_)) => return refuse("this buffer lies in host memory: it has no stream"),
            (Place::Gpu(_), None | Some(-1 | 1)) => return Ok(()),
            (Place::Gpu(memory), Some(stream)) if stream >= 2 => (memory, stream.cast_unsigned()),
            _ => return refuse("stream: 1, 2, a handle of the driver, or -1"),
        };
        let (memory, stream) = memory;
        let device = memory.device();
        let order = || -> rapt::Result<()> {
            let backend = Backend::get().map_err(|error| error.on(Device::Cuda(device)))?;
            // SAFETY: our own stream is the default one; the taker vouches for the stream that it names.
            unsafe { backend.mark(device, memory.stream())?.hold(stream) }
        };
        py.detach(order).map_err(|error| PyBufferError::new_err(error.to_string()))
    }
}

#[pymethods]
impl Buffer {
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if dl_device.is_some_and(|device| device != self.device()) || copy == Some(true) {
            return Err(PyBufferError::new_err("this buffer is exported in place, where it lies"));
        }
        self.order_before(py, stream)?;
        let mut shape: Vec<i64> = self.shape.iter().map(|&n| n as i64).collect();
        let mut strides: Vec<i64> = self.strides.iter().map(|&n| n as i64).collect();
        let dl_tensor = self.describe(&mut shape, &mut strides)?;
        let place = self.place.clone();
        let (pointer, name): (*mut c_void, &CStr) = if max_version.is_some_and(|(major, _)| major >= 1) {
            let managed = ManagedVersioned {
                version: Version { major: 1, minor: 0 },
                manager_ctx: std::ptr::null_mut(),
                deleter: Some(delete_versioned),
                flags: 0,
                dl_tensor,
            };
            let owned = Box::into_raw(Box::new(Owned { managed, shape, strides, _place: place }));
            // SAFETY: just made; nobody else has it.
            unsafe {
                (*owned).managed.manager_ctx = owned.cast();
                (*owned).managed.dl_tensor.shape = (*owned).shape.as_mut_ptr();
                (*owned).managed.dl_tensor.strides = (*owned).strides.as_mut_ptr();
                ((&raw mut (*owned).managed).cast(), VERSIONED)
            }
        } else {
            let managed = Managed { dl_tensor, manager_ctx: std::ptr::null_mut(), deleter: Some(delete_legacy) };
            let owned = Box::into_raw(Box::new(Owned { managed, shape, strides, _place: place }));
            // SAFETY: just made; nobody else has it.
            unsafe {
                (*owned).managed.manager_ctx = owned.cast();
                (*owned).managed.dl_tensor.shape = (*owned).shape.as_mut_ptr();
                (*owned).managed.dl_tensor.strides = (*owned).strides.as_mut_ptr();
                ((&raw mut (*owned).managed).cast(), LEGACY)
            }
        };
        // SAFETY: a valid pointer and a name that lives for ever; the result is a new reference or null.
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(pointer, name.as_ptr(), Some(drop_capsule))) }
    }

    fn __dlpack_device__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let (device, index) = self.device();
        PyTuple::new(py, [device, index])
    }
}
