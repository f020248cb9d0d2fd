//! torch tensors, through their own attributes.
//!
//! The extent is proven: a tensor tells how long its storage is and where in it the view begins. Nothing of libtorch is
//! linked; the classes and dtypes are found once, when the first tensor arrives, and compared by address. An ordinary
//! tensor (its dispatch keys say so) is read through libtorch's C ABI ([`torch_abi`]) where that is loaded; any other one
//! through its attributes, and refused where its memory is not its value.

use std::ffi::CStr;

use pyo3::exceptions::{PyRuntimeError, PyUserWarning};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use rapt::{DType, Device, DeviceMemory, Error, ErrorKind, Extent, Shape, Strides};

use super::export::Export;
use super::operand::{Operand, shape};
use super::stream::{DEFAULT_STREAM, Enqueued};
use super::torch_abi::{self, Described, TorchAbi};
use crate::errors::Failure;

struct Api {
    tensor: Py<PyType>,
    parameter: Py<PyAny>,
    cpu: Py<PyAny>,
    uint8: Py<PyAny>,
    empty_strided: Py<PyAny>,
    empty_like: Py<PyAny>,
    current_stream: Option<Py<PyAny>>,
    record_stream: Py<PyAny>,
    /// By device; they never change.
    default_streams: Py<PyDict>,
    /// Whether memory on GPUs is of torch's own allocator, as far as it was asked.
    is_native: PyOnceLock<bool>,
    dispatch_keys: Py<PyAny>,
    plain: [u64; 2],
    abi: Option<&'static TorchAbi>,
    is_grad_enabled: Py<PyAny>,
    get_num_threads: Py<PyAny>,
    dtypes: Vec<(Py<PyAny>, DType)>,
}

static API: PyOnceLock<Api> = PyOnceLock::new();
static PLAIN_CUDA: PyOnceLock<[u64; 2]> = PyOnceLock::new();
static PLAIN_MPS: PyOnceLock<[u64; 2]> = PyOnceLock::new();

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
            plain: plain_keys(&torch, "cpu")?,
            abi: torch_abi::abi(),
            cpu: torch.getattr("device")?.call1(("cpu",))?.unbind(),
            uint8: torch.getattr("uint8")?.unbind(),
            record_stream: tensor.getattr("record_stream")?.unbind(),
            default_streams: PyDict::new(py).unbind(),
            is_native: PyOnceLock::new(),
            tensor: tensor.unbind(),
            parameter: torch.getattr("nn")?.getattr("Parameter")?.unbind(),
            empty_strided: torch.getattr("empty_strided")?.unbind(),
            empty_like: torch.getattr("empty_like")?.unbind(),
            // Not in a torch without CUDA.
            current_stream: torch.getattr("_C")?.getattr("_cuda_getCurrentRawStream").ok().map(Bound::unbind),
            dispatch_keys: torch.getattr("_C")?.getattr("_dispatch_keys")?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            get_num_threads: torch.getattr("get_num_threads")?.unbind(),
            dtypes,
        })
    };
    // A torch that is half imported lacks some of these: nobody can hold a tensor then.
    API.get_or_try_init(py, make).ok()
}

/// The dispatch keys of an ordinary dense tensor on `device`, outside and inside inference mode. Whatever must not be read as
/// plain memory carries another key: subclass, sparse, quantized, nested, functorch wrapper, conj and neg bit, zero tensor.
fn plain_keys(torch: &Bound<'_, PyAny>, device: &str) -> PyResult<[u64; 2]> {
    let locals = PyDict::new(torch.py());
    locals.set_item("torch", torch)?;
    locals.set_item("device", device)?;
    // Whatever mode or default device is in force now is no part of an ordinary tensor.
    let code = c"
from torch.utils._python_dispatch import _disable_current_modes
keys = []
with _disable_current_modes():
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.append(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
";
    torch.py().run(code, Some(&locals), None)?;
    locals.as_any().get_item("keys")?.extract()
}

/// Those two sets of keys on the CPU.
pub(crate) fn plain(py: Python<'_>) -> PyResult<[u64; 2]> {
    let not_loaded = || pyo3::exceptions::PyImportError::new_err("torch is not loaded");
    api(py).map(|api| api.plain).ok_or_else(not_loaded)
}

/// Whether this tensor is an ordinary dense tensor on a device that is served, whose memory is its value.
fn is_plain(api: &Api, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let keys = api.dispatch_keys.bind(py).call1((tensor,))?;
    let keys = keys.call_method0(intern!(py, "raw_repr"))?.extract()?;
    Ok(api.plain.contains(&keys) || is_plain_cuda(api, tensor, keys)? || is_plain_mps(api, tensor, keys)?)
}

/// The same of the GPU alone, where `keys` are the tensor's. What an ordinary one has is asked when the first arrives: before,
/// asking would start CUDA.
fn is_plain_cuda(api: &Api, tensor: &Bound<'_, PyAny>, keys: u64) -> PyResult<bool> {
    let py = tensor.py();
    if let Some(plain) = PLAIN_CUDA.get(py) {
        return Ok(plain.contains(&keys));
    }
    // A fake tensor may say that it is on a GPU where there is none.
    let class = tensor.get_type();
    if !(class.is(&api.tensor) || class.is(&api.parameter)) || !tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        return Ok(false);
    }
    Ok(plain_cuda(py)?.is_some_and(|plain| plain.contains(&keys)))
}

/// Those two sets of keys on a GPU, once CUDA has started.
pub(crate) fn plain_cuda(py: Python<'_>) -> PyResult<Option<[u64; 2]>> {
    if let Some(plain) = PLAIN_CUDA.get(py) {
        return Ok(Some(*plain));
    }
    let torch = py.import(intern!(py, "torch"))?;
    if !torch.getattr("cuda")?.call_method0("is_initialized")?.is_truthy()? {
        return Ok(None);
    }
    PLAIN_CUDA.get_or_try_init(py, || plain_keys(&torch, "cuda")).copied().map(Some)
}

/// The same of an Apple GPU, where this torch has what encodes kernels there.
fn is_plain_mps(api: &Api, tensor: &Bound<'_, PyAny>, keys: u64) -> PyResult<bool> {
    let py = tensor.py();
    if let Some(plain) = PLAIN_MPS.get(py) {
        return Ok(plain.contains(&keys));
    }
    let class = tensor.get_type();
    if !(class.is(&api.tensor) || class.is(&api.parameter)) || !tensor.getattr(intern!(py, "is_mps"))?.is_truthy()? {
        return Ok(false);
    }
    Ok(plain_mps(py)?.is_some_and(|plain| plain.contains(&keys)))
}

/// Those two sets of keys on an Apple GPU, whose tensors are asked for no sooner than one has come.
pub(crate) fn plain_mps(py: Python<'_>) -> PyResult<Option<[u64; 2]>> {
    if let Some(plain) = PLAIN_MPS.get(py) {
        return Ok(Some(*plain));
    }
    if torch_abi::metal().is_err() {
        return Ok(None);
    }
    let torch = py.import(intern!(py, "torch"))?;
    PLAIN_MPS.get_or_try_init(py, || plain_keys(&torch, "mps")).copied().map(Some)
}

/// Looks for torch's encoder for Metal, where torch is loaded. What it lacks is kept, and told by who asks.
pub(crate) fn find_metal(py: Python<'_>) {
    has_metal(py);
}

/// Whether torch is loaded and has an encoder for Metal.
pub(crate) fn has_metal(py: Python<'_>) -> bool {
    api(py).is_some() && torch_abi::metal().is_ok()
}

/// Whether this is an ordinary dense tensor of torch on a device that is served, whose memory is its value.
pub(crate) fn is_ordinary(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    api(tensor.py()).map_or(Ok(false), |api| is_plain(api, tensor))
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

/// The bytes of a torch tensor whose elements have one; anything else is left as it is.
pub(crate) fn as_bytes<'py>(tensor: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let Some(api) = api(py).filter(|_| is_tensor(&tensor).unwrap_or(false)) else { return Ok(tensor) };
    if tensor.getattr(intern!(py, "dtype"))?.is(api.uint8.bind(py)) {
        return Ok(tensor);
    }
    tensor.call_method1(intern!(py, "view"), (api.uint8.bind(py),))
}

/// torch's own number of threads.
pub(crate) fn num_threads(py: Python<'_>) -> PyResult<Option<usize>> {
    api(py).map(|api| api.get_num_threads.bind(py).call0()?.extract()).transpose()
}

/// The integers of a tuple.
fn integers<'py, T: FromPyObjectOwned<'py>>(tuple: &Bound<'py, PyAny>) -> Result<Vec<T>, Failure> {
    let tuple = tuple.cast::<PyTuple>().map_err(PyErr::from)?;
    Ok(tuple.iter().map(|item| item.extract().map_err(Into::into)).collect::<PyResult<_>>()?)
}

/// What `tensor` says of itself; refused where its memory is not its value.
pub(crate) fn read(name: &'static str, tensor: &Bound<'_, PyAny>) -> Result<Operand, Failure> {
    refuse(name, tensor)?;
    read_plain(name, tensor)
}

/// What an ordinary dense tensor says of itself: the caller knows that it is one.
pub(crate) fn read_plain(name: &'static str, tensor: &Bound<'_, PyAny>) -> Result<Operand, Failure> {
    match api(tensor.py()).and_then(|api| api.abi?.describe(tensor)) {
        Some(described) => Ok(operand(name, described)),
        None => read_attributes(name, tensor),
    }
}

fn operand(name: &'static str, it: Described) -> Operand {
    Operand {
        name,
        ptr: it.ptr,
        dtype: it.dtype,
        shape: it.shape,
        strides: it.strides,
        device: it.device,
        extent: Extent::Proven { address: it.storage, len_bytes: it.storage_bytes },
        writable: true,
        _hold: it.placed.map(Export::of_storage),
    }
}

/// Why the memory of a tensor is not its value.
pub(crate) enum Obstacle {
    /// It lies on a device of this type.
    Device(String),
    /// It is not strided: sparse, nested.
    Layout(String),
    /// Its integers stand for other numbers.
    Quantized,
    /// A negation or conjugation is not yet in memory.
    LazyNegation,
    /// A class with its own idea of an op.
    Subclass(String),
    /// vmap, grad and the like of torch.func.
    Functorch,
}

/// Why the memory of `tensor` is not its value; `None` for an ordinary one.
pub(crate) fn obstacle(tensor: &Bound<'_, PyAny>) -> PyResult<Option<Obstacle>> {
    let py = tensor.py();
    let Some(api) = api(py) else { return Ok(None) };
    if is_plain(api, tensor)? {
        return Ok(None);
    }
    let is = |attribute| -> PyResult<bool> { tensor.getattr(attribute)?.is_truthy() };
    let calls = |method| -> PyResult<bool> { tensor.call_method0(method)?.is_truthy() };
    let is_served = is(intern!(py, "is_cpu"))? || is(intern!(py, "is_cuda"))?;
    if !(is_served || is(intern!(py, "is_mps"))? && torch_abi::metal().is_ok()) {
        let device = tensor.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?;
        return Ok(Some(Obstacle::Device(device.extract()?)));
    }
    let layout = tensor.getattr(intern!(py, "layout"))?.str()?.to_string();
    if layout != "torch.strided" {
        return Ok(Some(Obstacle::Layout(layout.replace("torch.", ""))));
    }
    if is(intern!(py, "is_nested"))? {
        return Ok(Some(Obstacle::Layout("nested".to_owned())));
    }
    if is(intern!(py, "is_quantized"))? {
        return Ok(Some(Obstacle::Quantized));
    }
    if calls(intern!(py, "is_neg"))? || calls(intern!(py, "is_conj"))? {
        return Ok(Some(Obstacle::LazyNegation));
    }
    let class = tensor.get_type();
    let is_subclass = !class.is(&api.tensor) && !class.is(&api.parameter);
    Ok(Some(if is_subclass { Obstacle::Subclass(class.name()?.to_string()) } else { Obstacle::Functorch }))
}

/// Refuses a tensor whose memory is not its value.
pub(crate) fn refuse(name: &str, tensor: &Bound<'_, PyAny>) -> Result<(), Failure> {
    let refuse = |kind, message: String, hint: String| Err(Failure::binding(kind, message, hint));
    match obstacle(tensor)? {
        None => Ok(()),
        Some(Obstacle::Device(device)) => {
            let hint = if device == "meta" {
                format!("a {name} with data, such as `torch.empty_like({name}, device=\"cpu\")`")
            } else {
                format!("`{name}.cpu()`")
            };
            let why = match torch_abi::metal() {
                Err(why) if device == "mps" => why.to_string(),
                _ => "Rapt computes torch tensors on cpu, cuda and mps".to_owned(),
            };
            let message = format!("{name} is on {device}, {why}");
            refuse(ErrorKind::Device, message, hint)
        }
        Some(Obstacle::LazyNegation) => {
            let message = format!("{name} carries a lazy negation or conjugation");
            refuse(ErrorKind::Layout, message, format!("`{name}.resolve_neg().resolve_conj()`"))
        }
        Some(Obstacle::Layout(found)) => {
            let hint = if matches!(&*found, "nested" | "jagged") { ".to_padded_tensor(0.0)" } else { ".to_dense()" };
            let message = format!("{name} has layout {found}, Rapt reads torch.strided");
            refuse(ErrorKind::Layout, message, format!("`{name}{hint}`"))
        }
        Some(Obstacle::Quantized) => {
            let message = format!("{name} has dtype {}", tensor.getattr("dtype")?.str()?);
            refuse(ErrorKind::UnsupportedDtype, message, format!("`{name}.dequantize()`"))
        }
        Some(Obstacle::Subclass(_) | Obstacle::Functorch) => {
            let message = format!(
                "{name} is a {} whose memory cannot be read here (a tensor subclass or a functorch transform)",
                tensor.get_type().name()?
            );
            let hint = format!("`{name}.as_subclass(torch.Tensor)`, or call it outside the transform");
            refuse(ErrorKind::Unsupported, message, hint)
        }
    }
}

/// Sparse, nested and wrapper tensors have no strides or no storage of their own.
fn no_storage(name: &'static str) -> Failure {
    Error::Representation { tensor: name, what: "is no strided tensor with storage of its own" }.into()
}

/// Where a tensor lies that [`refuse`] let pass.
fn device(tensor: &Bound<'_, PyAny>) -> PyResult<Device> {
    let py = tensor.py();
    if tensor.getattr(intern!(py, "is_mps"))?.is_truthy()? {
        return Ok(Device::Mps(0));
    }
    if !tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        return Ok(Device::Cpu);
    }
    let index: Option<u32> = tensor.getattr(intern!(py, "device"))?.getattr(intern!(py, "index"))?.extract()?;
    Ok(Device::Cuda(index.unwrap_or(0)))
}

/// As [`read_plain`], attribute by attribute. On an Apple GPU that serves dtypes which nothing computes: there the data pointer names a storage.
fn read_attributes(name: &'static str, tensor: &Bound<'_, PyAny>) -> Result<Operand, Failure> {
    let py = tensor.py();
    let dtype_object = tensor.getattr(intern!(py, "dtype"))?;
    let Some(dtype) = dtype_of(&dtype_object) else {
        return Err(Error::UnknownDtype { tensor: name, got: dtype_object.str()?.to_string() }.into());
    };
    let strides = tensor.call_method0(intern!(py, "stride")).map_err(|_| no_storage(name))?;
    let strides: Vec<isize> = integers(&strides)?;
    let ptr: usize =
        tensor.call_method0(intern!(py, "data_ptr")).and_then(|ptr| ptr.extract()).map_err(|_| no_storage(name))?;
    let sizes: Vec<usize> = integers(&tensor.getattr(intern!(py, "shape"))?)?;
    let shape = shape(name, &sizes)?;
    let Some(strides) = Strides::new(&strides) else { return Err(no_storage(name)) };
    let storage = tensor.call_method0(intern!(py, "untyped_storage")).map_err(|_| no_storage(name))?;
    let len_bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let offset: usize = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
    // An empty tensor has a null pointer and no bytes to prove.
    let address = ptr.wrapping_sub(offset.wrapping_mul(dtype.size_bytes()));
    Ok(Operand {
        name,
        ptr: std::ptr::with_exposed_provenance_mut(ptr),
        dtype,
        shape,
        strides,
        device: device(tensor)?,
        extent: Extent::Proven { address, len_bytes },
        writable: true,
        _hold: None,
    })
}

/// Whether grad mode is on.
pub(crate) fn is_grad_enabled(py: Python<'_>) -> PyResult<bool> {
    match api(py) {
        Some(Api { abi: Some(abi), .. }) => Ok(abi.grad_mode()),
        Some(api) => api.is_grad_enabled.bind(py).call0()?.is_truthy(),
        None => Ok(false),
    }
}

/// Whether this tensor requires grad.
pub(crate) fn requires_grad(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy()
}

/// The first of `tensors` that requires grad, where grad mode is on.
pub(crate) fn asks_gradient<'a, 'py: 'a>(
    py: Python<'py>,
    tensors: impl IntoIterator<Item = (&'static str, &'a Bound<'py, PyAny>)>,
) -> PyResult<Option<&'static str>> {
    if is_grad_enabled(py)? {
        for (name, tensor) in tensors {
            if requires_grad(tensor)? {
                return Ok(Some(name));
            }
        }
    }
    Ok(None)
}

/// Refuses where gradients would be lost: grad mode is on and one of `tensors` requires grad.
pub(crate) fn refuse_gradients<'a, 'py: 'a>(
    py: Python<'py>,
    tensors: impl IntoIterator<Item = (&'static str, &'a Bound<'py, PyAny>)>,
) -> Result<(), Failure> {
    asks_gradient(py, tensors)?.map_or(Ok(()), |name| Err(needs_gradient(name)))
}

/// The refusal of a tensor that asks for a gradient.
pub(crate) fn needs_gradient(name: &str) -> Failure {
    let message = format!(
        "{name} requires grad and grad mode is on: this call has no backward, and gradients are never dropped silently"
    );
    let hint = format!("`with torch.no_grad():`, or `{name}.detach()`");
    Failure::binding(ErrorKind::Unsupported, message, hint)
}

/// A new tensor like this one, its elements not set, and what it says of itself under the name `name`.
pub(crate) fn empty_like<'py>(
    name: &'static str,
    like: &Bound<'py, PyAny>,
) -> Result<(Bound<'py, PyAny>, Operand), Failure> {
    let Some(api) = api(like.py()) else {
        return Err(Failure::binding(ErrorKind::Kind, "torch is not loaded", "`import torch`"));
    };
    let made = api.empty_like.bind(like.py()).call1((like,))?;
    let operand = read_plain(name, &made)?;
    Ok((made, operand))
}

/// A new tensor on the device of `like`, its elements not set, and what it says of itself under the name `name`.
pub(crate) fn empty_strided<'py>(
    like: &Bound<'py, PyAny>,
    name: &'static str,
    dtype: DType,
    shape: &Shape,
    strides: &Strides,
) -> Result<(Bound<'py, PyAny>, Operand), Failure> {
    let py = like.py();
    let Some(api) = api(py) else {
        return Err(Failure::binding(ErrorKind::Kind, "torch is not loaded", "`import torch`"));
    };
    let on_gpu = !like.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
    let as_described = api.abi.and_then(|abi| {
        let like = if on_gpu { Some(abi.describe(like)?) } else { None };
        Some((abi, like))
    });
    if let Some((abi, like_described)) = as_described {
        let device = like_described.as_ref().map_or(Device::Cpu, |like| like.device);
        if let Some((made, described)) = abi.empty_strided(py, device, dtype, shape, strides) {
            return Ok((made, operand(name, described)));
        }
        // Where this torch makes none for us: the cheapest call that makes such a tensor.
        let alike = |it: &Described| it.dtype == dtype && it.shape == *shape && it.strides == *strides;
        if like_described.as_ref().is_some_and(alike) {
            let made = api.empty_like.bind(py).call1((like,))?;
            let operand = read_plain(name, &made)?;
            if operand.shape == *shape && operand.strides == *strides {
                return Ok((made, operand));
            }
        }
    }
    let Some((object, _)) = api.dtypes.iter().find(|(_, known)| *known == dtype) else {
        let message = format!("this torch has no dtype {dtype}");
        return Err(Failure::binding(ErrorKind::UnsupportedDtype, message, "a newer torch"));
    };
    let device = if on_gpu { like.getattr(intern!(py, "device"))? } else { api.cpu.bind(py).clone() };
    let options = PyDict::new(py);
    options.set_item(intern!(py, "dtype"), object)?;
    options.set_item(intern!(py, "device"), device)?;
    let (sizes, steps) = (PyTuple::new(py, shape.iter())?, PyTuple::new(py, strides.iter())?);
    let made = api.empty_strided.bind(py).call((sizes, steps), Some(&options))?;
    let operand = read_plain(name, &made)?;
    Ok((made, operand))
}

/// The stream on which torch enqueues now on this GPU, as the driver's handle.
pub(crate) fn current_stream(py: Python<'_>, device: u32) -> Result<usize, Failure> {
    let Some(current_stream) = api(py).and_then(|api| api.current_stream.as_ref()) else {
        return Err(Failure::binding(ErrorKind::Device, "this torch has no CUDA", "a torch built with CUDA"));
    };
    Ok(current_stream.bind(py).call1((device,))?.extract()?)
}

/// Tells torch's allocator that work on this stream, torch's current one, uses these tensors: memory that was allocated on
/// another stream is then not reused before this work has passed, and the allocator knows whether it was. One of CUDA's own
/// (`backend:cudaMallocAsync`) refuses memory that it does not know, which needs nothing; that it warns of tensors that are at
/// home on the stream is settled by `is_native`, but where a caller asks for every warning.
pub(crate) fn record_stream<'a, 'py: 'a>(
    py: Python<'py>,
    enqueued: Enqueued,
    tensors: impl Iterator<Item = &'a Bound<'py, PyAny>>,
) -> Result<(), Failure> {
    let Some(api) = api(py) else { return Ok(()) };
    let is_native = *api.is_native.get_or_try_init(py, || is_native(py))?;
    let stream = stream_object(py, api, enqueued)?;
    for tensor in tensors {
        match api.record_stream.bind(py).call1((tensor, &stream)) {
            Err(error)
                if is_native
                    || !(error.is_instance_of::<PyRuntimeError>(py) || error.is_instance_of::<PyUserWarning>(py)) =>
            {
                return Err(error.into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether torch's allocator is its own. Another one's warning, which torch gives once, is given here, where nobody hears it.
fn is_native(py: Python<'_>) -> PyResult<bool> {
    const WARN_ONCE: &CStr = c"
import warnings, torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    torch.empty(1, device='cuda').record_stream(torch.cuda.current_stream())
";
    let cuda = py.import(intern!(py, "torch"))?.getattr(intern!(py, "cuda"))?;
    let is_native = cuda.call_method0(intern!(py, "get_allocator_backend"))?.extract::<String>()? == "native";
    if !is_native {
        py.run(WARN_ONCE, None, None)?;
    }
    Ok(is_native)
}

/// torch's object for its current stream.
fn stream_object<'py>(
    py: Python<'py>,
    api: &Api,
    Enqueued { device, stream }: Enqueued,
) -> PyResult<Bound<'py, PyAny>> {
    let is_default = stream == DEFAULT_STREAM;
    let known = api.default_streams.bind(py);
    if is_default && let Some(object) = known.get_item(device)? {
        return Ok(object);
    }
    let cuda = py.import(intern!(py, "torch"))?.getattr(intern!(py, "cuda"))?;
    let object = cuda.call_method1(intern!(py, "current_stream"), (device,))?;
    if is_default {
        known.set_item(device, &object)?;
    }
    Ok(object)
}

/// Memory of torch's own allocator on a GPU: given back when dropped, and reused only by what the same stream runs later.
pub(crate) struct Workspace<'py> {
    _tensor: Option<Bound<'py, PyAny>>,
    pub(crate) memory: DeviceMemory,
}

impl<'py> Workspace<'py> {
    /// Where it lies, and the tensor that has it.
    pub(crate) fn into_parts(self) -> (DeviceMemory, Option<Bound<'py, PyAny>>) {
        (self.memory, self._tensor)
    }
}

/// At least `bytes` bytes on this GPU, of the current stream.
pub(crate) fn workspace(py: Python<'_>, device: u32, bytes: usize) -> Result<Workspace<'_>, Failure> {
    if bytes == 0 {
        return Ok(Workspace { _tensor: None, memory: DeviceMemory::default() });
    }
    let Some(api) = api(py) else {
        return Err(Failure::binding(ErrorKind::Kind, "torch is not loaded", "`import torch`"));
    };
    let options = PyDict::new(py);
    options.set_item(intern!(py, "dtype"), &api.uint8)?;
    options.set_item(intern!(py, "device"), format!("cuda:{device}"))?;
    let tensor = api.empty_strided.bind(py).call(((bytes,), (1,)), Some(&options))?;
    let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok(Workspace { _tensor: Some(tensor), memory: DeviceMemory { address, len_bytes: bytes } })
}
