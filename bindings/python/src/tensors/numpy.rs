//! numpy arrays, through their `__array_struct__` (the array interface in C).
//!
//! An array does not tell where its storage ends: extents are declared. bfloat16 is ml_dtypes' own dtype; a uint16 array
//! is numbers and stays so.

use std::ffi::{c_char, c_int, c_void};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use pyo3::{ffi, intern};
use rapt::{DType, Device, Error, ErrorKind, Extent, MAX_RANK, Shape, Strides};

use super::operand::{Operand, shape, too_many_dimensions};
use crate::errors::Failure;

/// `PyArrayInterface` of numpy's array interface, version 3.
#[repr(C)]
struct ArrayInterface {
    two: c_int,
    nd: c_int,
    typekind: c_char,
    itemsize: c_int,
    flags: c_int,
    shape: *const isize,
    strides: *const isize,
    data: *mut c_void,
    descr: *mut ffi::PyObject,
}

const NOTSWAPPED: c_int = 0x200;
const WRITEABLE: c_int = 0x400;

struct Api {
    ndarray: Py<PyType>,
    empty: Py<PyAny>,
    dtype: Py<PyAny>,
    /// The dtype objects met so far, compared by address; kept alive here.
    common: Vec<(Py<PyAny>, DType)>,
}

static API: PyOnceLock<Api> = PyOnceLock::new();

/// numpy as far as it is loaded; it is never imported from here.
fn api(py: Python<'_>) -> Option<&Api> {
    if let Some(api) = API.get(py) {
        return Some(api);
    }
    let modules = py.import(intern!(py, "sys")).ok()?.getattr(intern!(py, "modules")).ok()?;
    let numpy = modules.get_item(intern!(py, "numpy")).ok()?;
    let make = || -> PyResult<Api> {
        let dtype = numpy.getattr("dtype")?;
        let common = [DType::F32, DType::F64, DType::F16, DType::Bool]
            .into_iter()
            .map(|known| Ok((dtype.call1((known.name(),))?.unbind(), known)))
            .collect::<PyResult<_>>()?;
        Ok(Api {
            ndarray: numpy.getattr("ndarray")?.cast_into::<PyType>()?.unbind(),
            empty: numpy.getattr("empty")?.unbind(),
            dtype: dtype.unbind(),
            common,
        })
    };
    // A numpy that is half imported has no ndarray yet: nobody can hold an array then.
    API.get_or_try_init(py, make).ok()
}

/// Whether this is an array of the class `numpy.ndarray` itself.
pub(crate) fn is_exactly_array(object: &Bound<'_, PyAny>) -> bool {
    API.get(object.py()).is_some_and(|api| object.get_type().is(&api.ndarray))
}

/// Whether this is an array.
pub(crate) fn is_array(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    match api(object.py()) {
        Some(api) => object.is_instance(api.ndarray.bind(object.py())),
        None => Ok(false),
    }
}

/// The dtype of numpy's dtype object `dtype`; `None` if rapt has no name for it.
fn known(dtype: &Bound<'_, PyAny>) -> PyResult<Option<DType>> {
    let py = dtype.py();
    if let Some((_, known)) = api(py).and_then(|api| api.common.iter().find(|(object, _)| object.is(dtype))) {
        return Ok(Some(*known));
    }
    let name: String = dtype.getattr(intern!(py, "name"))?.extract()?;
    let size: usize = dtype.getattr(intern!(py, "itemsize"))?.extract()?;
    Ok(DType::from_name(&name).filter(|known| *known != DType::Unknown && known.size_bytes() == size))
}

/// The dtype that numpy makes of `given` (a dtype or a scalar class), if numpy is loaded and rapt has a name for it.
pub(crate) fn dtype_like(given: &Bound<'_, PyAny>) -> Option<DType> {
    let py = given.py();
    let api = api(py)?;
    // numpy.dtype makes float64 of int-like and of float itself; only dtypes and scalar classes are meant.
    let is_class = given.is_instance_of::<PyType>() && given.hasattr("dtype").unwrap_or(false);
    if !is_class && !given.is_instance(api.dtype.bind(py)).unwrap_or(false) {
        return None;
    }
    known(&api.dtype.bind(py).call1((given,)).ok()?).ok()?
}

/// What `array` says of itself.
pub(crate) fn read(name: &'static str, array: &Bound<'_, PyAny>) -> Result<Operand, Failure> {
    let py = array.py();
    if !is_exactly_array(array) && array.hasattr(intern!(py, "_mask"))? && array.hasattr(intern!(py, "filled"))? {
        let message = format!("{name} is a masked array, whose mask attention would ignore");
        return Err(Failure::binding(ErrorKind::Kind, message, format!("`{name}.data`, with the mask as `mask=`")));
    }
    let dtype_object = array.getattr(intern!(py, "dtype"))?;
    let Some(dtype) = known(&dtype_object)? else {
        return Err(Error::UnknownDtype { tensor: name, got: format!("numpy.{}", dtype_object.str()?) }.into());
    };
    let capsule = array.getattr(intern!(py, "__array_struct__"))?;
    // SAFETY: asked by the name that numpy gives it (none); a foreign object yields null and an exception.
    let interface = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), std::ptr::null()) }.cast::<ArrayInterface>();
    if interface.is_null() {
        return Err(PyErr::fetch(py).into());
    }
    // SAFETY: numpy's capsule holds a PyArrayInterface, alive as long as `capsule`.
    let interface = unsafe { &*interface };
    if interface.flags & NOTSWAPPED == 0 {
        let what = "has the other byte order than this machine";
        return Err(Error::Representation { tensor: name, what }.into());
    }
    let rank = usize::try_from(interface.nd).unwrap_or(0);
    let (sizes, strides_bytes): (&[isize], &[isize]) = if rank == 0 {
        (&[], &[])
    } else {
        // SAFETY: both arrays have `nd` entries.
        unsafe {
            (std::slice::from_raw_parts(interface.shape, rank), std::slice::from_raw_parts(interface.strides, rank))
        }
    };
    let mut unsigned = [0usize; MAX_RANK];
    let Some(places) = unsigned.get_mut(..rank) else { return Err(too_many_dimensions(name, rank)) };
    for (place, size) in places.iter_mut().zip(sizes) {
        *place = size.unsigned_abs();
    }
    let (sizes, shape) = (&*places, shape(name, places)?);
    let itemsize = dtype.size_bytes().cast_signed();
    let mut strides = [0isize; MAX_RANK];
    let empty = sizes.contains(&0);
    for (d, &bytes) in strides_bytes.iter().enumerate() {
        // The stride of a dimension that is never stepped along is free.
        if bytes % itemsize == 0 {
            strides[d] = bytes / itemsize;
        } else if sizes[d] > 1 && !empty {
            let what = "has strides that are no multiple of its element size";
            return Err(Error::Representation { tensor: name, what }.into());
        }
    }
    Ok(Operand {
        name,
        ptr: interface.data.cast(),
        dtype,
        shape,
        strides: Strides::new(&strides[..rank]).unwrap_or(Strides::from([])),
        device: Device::Cpu,
        extent: Extent::Declared,
        writable: interface.flags & WRITEABLE != 0,
        _hold: None,
    })
}

/// A new row-major array, of the dtype object of `like` where the dtype is the same.
pub(crate) fn empty<'py>(like: &Bound<'py, PyAny>, dtype: DType, shape: &Shape) -> Result<Bound<'py, PyAny>, Failure> {
    let py = like.py();
    let Some(api) = api(py) else {
        return Err(Failure::binding(ErrorKind::Kind, "numpy is not loaded", "`import numpy`"));
    };
    let sizes = pyo3::types::PyTuple::new(py, shape.iter())?;
    Ok(api.empty.bind(py).call1((sizes, dtype_object(like, dtype)?))?)
}

/// numpy's dtype object for `dtype`: that of `like` where it is the same.
pub(crate) fn dtype_object<'py>(like: &Bound<'py, PyAny>, dtype: DType) -> Result<Bound<'py, PyAny>, Failure> {
    let py = like.py();
    let Some(api) = api(py) else {
        return Err(Failure::binding(ErrorKind::Kind, "numpy is not loaded", "`import numpy`"));
    };
    let own = like.getattr(intern!(py, "dtype"))?;
    if known(&own)? == Some(dtype) {
        return Ok(own);
    }
    if !matches!(dtype, DType::BF16 | DType::F8E4M3FN | DType::F8E5M2 | DType::F8E8M0FNU) {
        return Ok(api.dtype.bind(py).call1((dtype.name(),))?);
    }
    let Ok(ml_dtypes) = py.import("ml_dtypes") else {
        let message = format!("numpy has no {dtype} of its own, and ml_dtypes is not installed");
        return Err(Failure::binding(ErrorKind::Unsupported, message, "`pip install ml_dtypes`"));
    };
    Ok(api.dtype.bind(py).call1((ml_dtypes.getattr(dtype.name())?,))?)
}
