//! DLPack, both capsules: `dltensor` and `dltensor_versioned`.
//!
//! A consumed capsule is renamed and its deleter is called exactly once, when the call is over. The legacy capsule cannot
//! say whether its memory may be written, so it is an input only. Extents are declared.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use pyo3::{ffi, intern};
use rapt::{DType, Device, Error, ErrorKind, Extent, MAX_RANK, Shape, Strides};

use super::{Operand, shape};
use crate::errors::Failure;

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct DlDevice {
    device_type: c_int,
    device_id: i32,
}

#[repr(C)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
pub(crate) struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
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
const CPU: i32 = 1;

/// A consumed export: ends it when dropped. Held and dropped with the GIL.
pub(crate) struct Export {
    managed: NonNull<c_void>,
    /// Calls the deleter.
    end: unsafe fn(NonNull<c_void>),
}

impl Drop for Export {
    fn drop(&mut self) {
        // SAFETY: the pointer came out of a capsule that was renamed, so this is the one owner and the one call; `end`
        // is the function of its type.
        unsafe { (self.end)(self.managed) };
    }
}

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

/// `dltensor_from_py_object_no_sync` of DLPack's exchange table: describes a tensor without owning it.
pub(crate) type ReadNoSync = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// `DLPackExchangeAPI` of DLPack 1.
#[repr(C)]
struct ExchangeTable {
    version: Version,
    prev: *const c_void,
    allocate: Option<unsafe extern "C" fn()>,
    from_object: Option<unsafe extern "C" fn()>,
    to_object: Option<unsafe extern "C" fn()>,
    read_no_sync: Option<ReadNoSync>,
}

/// The reader that `class` offers through `__dlpack_c_exchange_api__`, if it does.
pub(crate) fn exchange_table(class: &Bound<'_, PyType>) -> Option<ReadNoSync> {
    let capsule = class.getattr(intern!(class.py(), "__dlpack_c_exchange_api__")).ok()?;
    let name = c"dlpack_exchange_api".as_ptr();
    // SAFETY: valid on any object; under this name lies an ExchangeTable that is never freed, whose first fields are
    // those above for every version 1.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), name) != 1 {
            return None;
        }
        let table = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name).cast::<ExchangeTable>();
        if table.is_null() || (*table).version.major != 1 { None } else { (*table).read_no_sync }
    }
}

/// What `object` says of itself through `read`, all but its extent; `None` for anything but a computed dtype or bool in
/// the memory of host or GPU (some dtypes share a DLPack code), and for anything out of the ordinary.
pub(crate) fn read_no_sync(name: &'static str, object: &Bound<'_, PyAny>, read: ReadNoSync) -> Option<Operand> {
    let mut tensor = DlTensor {
        data: std::ptr::null_mut(),
        device: DlDevice { device_type: 0, device_id: 0 },
        ndim: 0,
        dtype: DlDataType { code: 0, bits: 0, lanes: 0 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    // SAFETY: `read` belongs to the class of `object` or of its base; it fills the struct, whose arrays the object owns.
    if unsafe { read(object.as_ptr().cast(), &raw mut tensor) } != 0 {
        drop(PyErr::take(object.py()));
        return None;
    }
    let rank = usize::try_from(tensor.ndim).ok().filter(|rank| *rank <= MAX_RANK)?;
    let dtype = dtype_of(name, &tensor.dtype).ok().filter(|dtype| dtype.is_computed() || *dtype == DType::Bool)?;
    let device = device_of(tensor.device.device_type, tensor.device.device_id);
    if matches!(device, Device::Other { .. }) || tensor.byte_offset != 0 || (rank > 0 && tensor.strides.is_null()) {
        return None;
    }
    let (mut shape, mut strides) = ([0usize; MAX_RANK], [0isize; MAX_RANK]);
    for d in 0..rank {
        // SAFETY: both arrays have `rank` entries, and the object, which owns them, is borrowed.
        let (size, stride) = unsafe { (*tensor.shape.add(d), *tensor.strides.add(d)) };
        (shape[d], strides[d]) = (usize::try_from(size).ok()?, isize::try_from(stride).ok()?);
    }
    Some(Operand {
        name,
        ptr: tensor.data.cast(),
        dtype,
        shape: Shape::new(&shape[..rank])?,
        strides: Strides::new(&strides[..rank])?,
        device,
        extent: Extent::Declared,
        writable: true,
        _hold: None,
    })
}

/// Whether `object` exports itself through DLPack.
pub(crate) fn is_producer(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let class = object.get_type();
    Ok(class.hasattr(intern!(object.py(), "__dlpack__"))?
        && class.hasattr(intern!(object.py(), "__dlpack_device__"))?)
}

/// DLPack's name for a device type.
fn device_of(code: i32, index: i32) -> Device {
    match code {
        CPU => Device::Cpu,
        2 => Device::Cuda(u32::try_from(index).unwrap_or(0)),
        _ => Device::Other { dlpack_code: code, index },
    }
}

fn dtype_of(name: &'static str, dtype: &DlDataType) -> Result<DType, Failure> {
    let known = match (dtype.code, dtype.bits, dtype.lanes) {
        (0, 8, 1) => DType::I8,
        (0, 16, 1) => DType::I16,
        (0, 32, 1) => DType::I32,
        (0, 64, 1) => DType::I64,
        (1, 8, 1) => DType::U8,
        (1, 16, 1) => DType::U16,
        (1, 32, 1) => DType::U32,
        (1, 64, 1) => DType::U64,
        (2, 16, 1) => DType::F16,
        (2, 32, 1) => DType::F32,
        (2, 64, 1) => DType::F64,
        (4, 16, 1) => DType::BF16,
        (5, 32, 1) => DType::C32,
        (5, 64, 1) => DType::C64,
        (5, 128, 1) => DType::C128,
        (6, 8, 1) => DType::Bool,
        (10, 8, 1) => DType::F8E4M3FN,
        (11, 8, 1) => DType::F8E4M3FNUZ,
        (12, 8, 1) => DType::F8E5M2,
        (13, 8, 1) => DType::F8E5M2FNUZ,
        (14, 8, 1) => DType::F8E8M0FNU,
        (code, bits, lanes) => {
            let got = format!("DLPack code {code}, {bits} bits, {lanes} lanes");
            return Err(Error::UnknownDtype { tensor: name, got }.into());
        }
    };
    Ok(known)
}

const fn dtype_to(dtype: DType) -> DlDataType {
    let code = match dtype {
        DType::BF16 => 4,
        DType::Bool => 6,
        _ => 2,
    };
    DlDataType { code, bits: dtype.bits() as u8, lanes: 1 }
}

/// Asks for a capsule without a copy, in the newest way that the producer understands.
fn export<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let export = object.getattr(intern!(py, "__dlpack__"))?;
    let options = PyDict::new(py);
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
    export.call0()
}

/// What `object` exports. It is of host memory, or refused before anything is exported.
pub(crate) fn read(name: &'static str, object: &Bound<'_, PyAny>) -> Result<Operand, Failure> {
    let py = object.py();
    let place = object.call_method0(intern!(py, "__dlpack_device__"))?;
    let (code, index): (i32, i32) =
        (place.get_item(0)?.call_method0("__index__")?.extract()?, place.get_item(1)?.extract()?);
    if code != CPU {
        let why = "this build serves host memory".to_owned();
        return Err(Error::DeviceUnavailable { device: device_of(code, index), why }.into());
    }
    let capsule = export(object).map_err(|error| {
        if !error.is_instance_of::<PyBufferError>(py) {
            return Failure::Python(error);
        }
        let message = format!("{name} does not export itself without a copy ({})", error.value(py));
        Failure::door(ErrorKind::Layout, message, format!("`{name}.copy()`"))
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
            let hold = Export { managed: owned, end: end_versioned };
            let managed = owned.cast::<ManagedVersioned>().as_ptr();
            let major = (*managed).version.major;
            if major != 1 {
                let message = format!("{name} exports DLPack {major}, 1 is read");
                return Err(Failure::door(ErrorKind::Unsupported, message, "an exporter of DLPack 1"));
            }
            (hold, &raw const (*managed).dl_tensor, (*managed).flags, true)
        } else if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr());
            let Some(owned) = NonNull::new(managed) else { return Err(PyErr::fetch(py).into()) };
            if ffi::PyCapsule_SetName(capsule, LEGACY_USED.as_ptr()) != 0 {
                return Err(PyErr::fetch(py).into());
            }
            let managed = owned.cast::<Managed>().as_ptr();
            (Export { managed: owned, end: end_legacy }, &raw const (*managed).dl_tensor, 0, false)
        } else {
            let message = format!("__dlpack__ of {name} gave no fresh DLPack capsule");
            return Err(Failure::door(ErrorKind::Kind, message, "a producer whose capsule is not consumed yet"));
        }
    };
    // SAFETY: the export is alive as long as `_hold` of the operand.
    let tensor = unsafe { &*tensor };
    let rank = usize::try_from(tensor.ndim).unwrap_or(0);
    // SAFETY: DLPack: shape has ndim entries, and so has strides where it is not null.
    let (sizes, steps): (&[i64], Option<&[i64]>) = unsafe {
        if rank == 0 {
            (&[], None)
        } else {
            let steps = (!tensor.strides.is_null()).then(|| std::slice::from_raw_parts(tensor.strides, rank));
            (std::slice::from_raw_parts(tensor.shape, rank), steps)
        }
    };
    let bad = |what| Failure::from(Error::Representation { tensor: name, what });
    let sizes: Vec<usize> = sizes
        .iter()
        .map(|&n| usize::try_from(n).map_err(|_| bad("exports a negative size")))
        .collect::<Result<_, _>>()?;
    let shape = shape(name, &sizes)?;
    let dtype = dtype_of(name, &tensor.dtype)?;
    if (tensor.device.device_type, tensor.device.device_id) != (code, index) {
        return Err(bad("exports memory of another device than it names"));
    }
    let strides = match steps {
        Some(steps) => {
            let mut at = [0isize; MAX_RANK];
            for (slot, &step) in at.iter_mut().zip(steps) {
                *slot = isize::try_from(step).map_err(|_| bad("exports a stride beyond the address space"))?;
            }
            Strides::new(&at[..rank]).ok_or_else(|| bad("has too many dimensions"))?
        }
        None => shape.contiguous().ok_or(Error::Overflow { tensor: name, shape, strides: Strides::from([]) })?,
    };
    let offset = usize::try_from(tensor.byte_offset).map_err(|_| bad("exports an offset beyond the address space"))?;
    Ok(Operand {
        name,
        ptr: tensor.data.cast::<u8>().wrapping_add(offset),
        dtype,
        shape,
        strides,
        device: Device::Cpu,
        extent: Extent::Declared,
        writable: known_flags && flags & (READ_ONLY | IS_COPIED) == 0,
        _hold: Some(hold),
    })
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
    Err(Failure::door(ErrorKind::Unsupported, message, "`numpy.from_dlpack(q)`, and so k and v"))
}

/// Host memory that is handed to another library through DLPack.
#[pyclass(frozen, module = "rapt._native", name = "Exported")]
pub(crate) struct Buffer {
    tensor: Arc<rapt::Tensor>,
}

/// Row-major memory, and the operand that writes it. The operand must be gone before the buffer is exported.
pub(crate) fn allocate(name: &'static str, dtype: DType, shape: Shape) -> Result<(Buffer, Operand), Failure> {
    let mut tensor = rapt::Tensor::zeros(dtype, shape)?;
    let (ptr, strides) = {
        let mut view = tensor.view_mut()?;
        (view.as_mut_ptr(), *view.strides())
    };
    let operand = Operand {
        name,
        ptr,
        dtype,
        shape,
        strides,
        device: Device::Cpu,
        extent: Extent::Declared,
        writable: true,
        _hold: None,
    };
    Ok((Buffer { tensor: Arc::new(tensor) }, operand))
}

/// What an export of a [`Buffer`] owns; `managed` is what the consumer sees.
struct Owned<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _tensor: Arc<rapt::Tensor>,
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
    fn describe(&self, shape: &mut [i64], strides: &mut [i64]) -> PyResult<DlTensor> {
        let view = self.tensor.view().map_err(|error| PyBufferError::new_err(error.to_string()))?;
        Ok(DlTensor {
            data: view.as_ptr().cast_mut().cast(),
            device: DlDevice { device_type: CPU, device_id: 0 },
            ndim: shape.len() as i32,
            dtype: dtype_to(self.tensor.dtype()),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        })
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
        if stream.is_some() || dl_device.is_some_and(|device| device != (CPU, 0)) || copy == Some(true) {
            return Err(PyBufferError::new_err("this buffer lies in host memory and is exported in place"));
        }
        let integers = |n: &[usize]| n.iter().map(|&n| n as i64).collect::<Vec<_>>();
        let view = self.tensor.view().map_err(|error| PyBufferError::new_err(error.to_string()))?;
        let mut shape = integers(view.shape());
        let mut strides: Vec<i64> = view.strides().iter().map(|&n| n as i64).collect();
        let dl_tensor = self.describe(&mut shape, &mut strides)?;
        let tensor = Arc::clone(&self.tensor);
        let (pointer, name): (*mut c_void, &CStr) = if max_version.is_some_and(|(major, _)| major >= 1) {
            let managed = ManagedVersioned {
                version: Version { major: 1, minor: 0 },
                manager_ctx: std::ptr::null_mut(),
                deleter: Some(delete_versioned),
                flags: 0,
                dl_tensor,
            };
            let owned = Box::into_raw(Box::new(Owned { managed, shape, strides, _tensor: tensor }));
            // SAFETY: just made; nobody else has it.
            unsafe {
                (*owned).managed.manager_ctx = owned.cast();
                (*owned).managed.dl_tensor.shape = (*owned).shape.as_mut_ptr();
                (*owned).managed.dl_tensor.strides = (*owned).strides.as_mut_ptr();
                ((&raw mut (*owned).managed).cast(), VERSIONED)
            }
        } else {
            let managed = Managed { dl_tensor, manager_ctx: std::ptr::null_mut(), deleter: Some(delete_legacy) };
            let owned = Box::into_raw(Box::new(Owned { managed, shape, strides, _tensor: tensor }));
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
        PyTuple::new(py, [CPU, 0])
    }
}
