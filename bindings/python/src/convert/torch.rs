//! torch tensors, through their own attributes.
//!
//! The extent is proven: a tensor tells how long its storage is and where in it the view begins. Nothing of libtorch is
//! linked; the classes and dtypes are found once, when the first tensor arrives, and compared by address. Where torch
//! offers DLPack's C exchange table (2.10 and newer), shape, strides and dtype come through it in one call: 0.35 µs a
//! tensor against 1.1 µs through attributes (2026-11-21, EPYC, torch 2.15).

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};
use rapt::{DType, Device, DeviceMemory, Error, ErrorKind, Extent, Shape, Strides};

use super::{Operand, dlpack, shape};
use crate::errors::Failure;

struct Api {
    tensor: Py<PyType>,
    parameter: Py<PyAny>,
    empty: Py<PyAny>,
    uint8: Py<PyAny>,
    exchange: Option<dlpack::ReadNoSync>,
    is_grad_enabled: Py<PyAny>,
    get_num_threads: Py<PyAny>,
    dtypes: Vec<(Py<PyAny>, DType)>,
}

static API: PyOnceLock<Api> = PyOnceLock::new();

/// torch as far as it is loaded; it is never imported from here.
fn api(py: Python<'_>) -> Option<&Api> {
    if let Some(api) = API.get(py) {
        return Some(api);
    }
    let modules = py.import(intern!(py, "sys")).ok()?.getattr(intern!(py, "modules")).ok()?;
    let torch = modules.get_item(intern!(py, "torch")).ok()?;
    let make = || -> PyResult<Api> {
        // The computed dtypes stand first: they are what is looked up.
        let mut order = rapt::COMPUTED.to_vec();
        order.extend(DType::ALL.iter().filter(|dtype| !dtype.is_computed() && **dtype != DType::Unknown));
        let dtypes =
            order.into_iter().filter_map(|dtype| Some((torch.getattr(dtype.name()).ok()?.unbind(), dtype))).collect();
        let tensor = torch.getattr("Tensor")?.cast_into::<PyType>()?;
        Ok(Api {
            exchange: dlpack::exchange_table(&tensor),
            uint8: torch.getattr("uint8")?.unbind(),
            tensor: tensor.unbind(),
            parameter: torch.getattr("nn")?.getattr("Parameter")?.unbind(),
            empty: torch.getattr("empty")?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            get_num_threads: torch.getattr("get_num_threads")?.unbind(),
            dtypes,
        })
    };
    // A torch that is half imported lacks some of these: nobody can hold a tensor then.
    API.get_or_try_init(py, make).ok()
}

/// Whether this is of the class `torch.Tensor` itself.
pub(crate) fn is_exactly_tensor(object: &Bound<'_, PyAny>) -> bool {
    API.get(object.py()).is_some_and(|api| object.get_type().is(&api.tensor))
}

/// Whether this is a tensor.
pub(crate) fn is_tensor(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    if is_exactly_tensor(object) {
        return Ok(true);
    }
    match api(object.py()) {
        Some(api) => {
            let py = object.py();
            Ok(object.get_type().is(&api.parameter) || object.is_instance(api.tensor.bind(py))?)
        }
        None => Ok(false),
    }
}

/// The dtype of the `torch.dtype` object `dtype`, if it is one and rapt has a name for it.
pub(crate) fn dtype_of(dtype: &Bound<'_, PyAny>) -> Option<DType> {
    api(dtype.py())?.dtypes.iter().find(|(object, _)| object.is(dtype)).map(|(_, known)| *known)
}

/// torch's own number of threads.
pub(crate) fn num_threads(py: Python<'_>) -> PyResult<Option<usize>> {
    api(py).map(|api| api.get_num_threads.bind(py).call0()?.extract()).transpose()
}

fn device(name: &'static str, tensor: &Bound<'_, PyAny>) -> Result<Device, Failure> {
    let py = tensor.py();
    if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        return Ok(Device::Cpu);
    }
    let device = tensor.getattr(intern!(py, "device"))?;
    let kind: String = device.getattr(intern!(py, "type"))?.extract()?;
    if kind == "cuda" {
        return Ok(Device::Cuda(device.getattr(intern!(py, "index"))?.extract().unwrap_or(0)));
    }
    let message = format!("{name} is on {}, which is not served: allowed are cpu and cuda", device.str()?);
    let mend = if kind == "meta" {
        format!("a {name} with data, such as `torch.empty_like({name}, device=\"cpu\")`")
    } else {
        format!("`{name}.cpu()`")
    };
    Err(Failure::door(ErrorKind::Device, message, mend))
}

/// The integers of a tuple.
fn integers<'py, T: FromPyObjectOwned<'py>>(tuple: &Bound<'py, PyAny>) -> Result<Vec<T>, Failure> {
    let tuple = tuple.cast::<PyTuple>().map_err(PyErr::from)?;
    Ok(tuple.iter().map(|item| item.extract().map_err(Into::into)).collect::<PyResult<_>>()?)
}

/// What `tensor` says of itself.
pub(crate) fn read(name: &'static str, tensor: &Bound<'_, PyAny>) -> Result<Operand, Failure> {
    let py = tensor.py();
    let operand = match api(py).and_then(|api| api.exchange).and_then(|read| dlpack::read_no_sync(name, tensor, read)) {
        Some(operand) => operand,
        None => read_attributes(name, tensor)?,
    };
    if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        return Err(Error::Representation { tensor: name, what: "has its negative bit set" }.into());
    }
    let storage = tensor.call_method0(intern!(py, "untyped_storage")).map_err(|_| no_storage(name))?;
    let len_bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let offset: usize = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
    // An empty tensor has a null pointer and no bytes to prove.
    let address = operand.ptr.addr().wrapping_sub(offset.wrapping_mul(operand.dtype.size_bytes()));
    Ok(Operand { extent: Extent::Proven { address, len_bytes }, ..operand })
}

/// Sparse, nested and wrapper tensors have no strides or no storage of their own.
fn no_storage(name: &'static str) -> Failure {
    Error::Representation { tensor: name, what: "is no strided tensor with storage of its own" }.into()
}

/// All but the extent, attribute by attribute.
fn read_attributes(name: &'static str, tensor: &Bound<'_, PyAny>) -> Result<Operand, Failure> {
    let py = tensor.py();
    let device = device(name, tensor)?;
    let dtype_object = tensor.getattr(intern!(py, "dtype"))?;
    let Some(dtype) = dtype_of(&dtype_object) else {
        return Err(Error::UnknownDtype { tensor: name, got: dtype_object.str()?.to_string() }.into());
    };
    if matches!(dtype, DType::C32 | DType::C64 | DType::C128)
        && tensor.call_method0(intern!(py, "is_conj"))?.is_truthy()?
    {
        return Err(Error::Representation { tensor: name, what: "has its conjugate bit set" }.into());
    }
    let strides = tensor.call_method0(intern!(py, "stride")).map_err(|_| no_storage(name))?;
    let strides: Vec<isize> = integers(&strides)?;
    let ptr =
        tensor.call_method0(intern!(py, "data_ptr")).and_then(|ptr| ptr.extract()).map_err(|_| no_storage(name))?;
    let sizes: Vec<usize> = integers(&tensor.getattr(intern!(py, "shape"))?)?;
    let shape = shape(name, &sizes)?;
    let Some(strides) = Strides::new(&strides) else { return Err(no_storage(name)) };
    Ok(Operand {
        name,
        ptr: std::ptr::with_exposed_provenance_mut(ptr),
        dtype,
        shape,
        strides,
        device,
        extent: Extent::Declared,
        writable: true,
        _hold: None,
    })
}

/// Whether gradients would be lost: grad mode is on and one of `tensors` requires grad.
pub(crate) fn refuse_gradients(tensors: &[(&'static str, Option<&Bound<'_, PyAny>>)]) -> Result<(), Failure> {
    for (name, tensor) in tensors {
        let Some(tensor) = tensor else { continue };
        let py = tensor.py();
        if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
            let Some(api) = api(py) else { return Ok(()) };
            if !api.is_grad_enabled.bind(py).call0()?.is_truthy()? {
                return Ok(());
            }
            let message = format!(
                "{name} requires grad and grad mode is on: training is not served, and gradients are never dropped silently"
            );
            let mend = format!("`with torch.no_grad():`, or `{name}.detach()`");
            return Err(Failure::door(ErrorKind::Unsupported, message, mend));
        }
    }
    Ok(())
}

/// A new row-major tensor on the device of `like`.
pub(crate) fn empty<'py>(like: &Bound<'py, PyAny>, dtype: DType, shape: &Shape) -> Result<Bound<'py, PyAny>, Failure> {
    let py = like.py();
    let Some(api) = api(py) else {
        return Err(Failure::door(ErrorKind::Kind, "torch is not loaded", "`import torch`"));
    };
    let Some((object, _)) = api.dtypes.iter().find(|(_, known)| *known == dtype) else {
        let message = format!("this torch has no dtype {dtype}");
        return Err(Failure::door(ErrorKind::UnsupportedDtype, message, "a newer torch"));
    };
    let sizes = PyTuple::new(py, shape.iter())?;
    if is_exactly_tensor(like) && like.getattr(intern!(py, "dtype"))?.is(object) {
        return Ok(like.call_method1(intern!(py, "new_empty"), (sizes,))?);
    }
    let options = pyo3::types::PyDict::new(py);
    options.set_item(intern!(py, "dtype"), object)?;
    options.set_item(intern!(py, "device"), like.getattr(intern!(py, "device"))?)?;
    Ok(api.empty.bind(py).call((sizes,), Some(&options))?)
}

/// The stream on which torch enqueues now on this GPU, as the driver's handle.
pub(crate) fn current_stream(py: Python<'_>, device: u32) -> Result<usize, Failure> {
    let native = py.import(intern!(py, "torch"))?.getattr(intern!(py, "_C"))?;
    Ok(native.call_method1(intern!(py, "_cuda_getCurrentRawStream"), (device,))?.extract()?)
}

/// Memory of torch's own allocator on a GPU: given back when dropped, and reused only by what the same stream runs later.
pub(crate) struct Workspace<'py> {
    _tensor: Option<Bound<'py, PyAny>>,
    pub(crate) memory: DeviceMemory,
}

/// At least `bytes` bytes on this GPU, of the current stream.
pub(crate) fn workspace(py: Python<'_>, device: u32, bytes: usize) -> Result<Workspace<'_>, Failure> {
    if bytes == 0 {
        return Ok(Workspace { _tensor: None, memory: DeviceMemory::default() });
    }
    let Some(api) = api(py) else {
        return Err(Failure::door(ErrorKind::Kind, "torch is not loaded", "`import torch`"));
    };
    let options = pyo3::types::PyDict::new(py);
    options.set_item(intern!(py, "dtype"), &api.uint8)?;
    options.set_item(intern!(py, "device"), format!("cuda:{device}"))?;
    let tensor = api.empty.bind(py).call(((bytes,),), Some(&options))?;
    let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok(Workspace { _tensor: Some(tensor), memory: DeviceMemory { address, len_bytes: bytes } })
}
