//! libtorch's C ABI: what a tensor is, a new tensor, torch's threads, Metal's encoder; found in the libtorch that the process has loaded.
//!
//! Nothing is linked and nothing loaded. A handle of the ABI is a pointer to an `at::Tensor`, which is one pointer to the
//! tensor's body. torch 2.14 and newer hand one out for a Python object; for older ones, which are frozen, it is the
//! address of a word that holds `tensor._cdata`. One tensor is read so in 0.15 µs (attributes of Python take 1.1 µs;
//! 2026-11-21, Zen 4 class EPYC). Deliberately absent: the registration of kernels, which the ABI offers too: a kernel
//! registered there is told neither the dispatch keys nor whether a tensor requires grad, and can raise no Python exception.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use pyo3::intern;
use pyo3::prelude::*;
use rapt::metal::{Backend, Functions, MetalError, Placed};
use rapt::{DType, Device, MAX_RANK, Shape, Strides};

type TensorHandle = *mut c_void;
type Read<T> = unsafe extern "C" fn(TensorHandle, *mut T) -> c_int;
type DtypeCode = unsafe extern "C" fn() -> i32;
type EmptyStrided = unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut TensorHandle) -> c_int;
type FromPython = unsafe extern "C" fn(*mut c_void, *mut TensorHandle) -> c_int;
type ToPython = unsafe extern "C" fn(TensorHandle, *mut c_void, *mut *mut c_void) -> c_int;

/// `torch_tensor_{from,to}_pyobject`, of torch 2.14 and newer.
#[derive(Clone, Copy)]
struct Interop {
    from_python: FromPython,
    to_python: ToPython,
}

/// The functions used; their types stand in torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h.
pub(crate) struct TorchAbi {
    data_ptr: Read<*mut c_void>,
    dim: Read<i64>,
    sizes: Read<*mut i64>,
    strides: Read<*mut i64>,
    dtype: Read<i32>,
    device_type: Read<i32>,
    device_index: Read<i32>,
    storage_size: Read<i64>,
    storage_offset: Read<i64>,
    delete: unsafe extern "C" fn(TensorHandle) -> c_int,
    empty_strided: EmptyStrided,
    grad_mode: unsafe extern "C" fn() -> bool,
    interop: Option<Interop>,
    cpu: i32,
    cuda: i32,
    mps: i32,
    /// torch's own codes of the dtypes that a tensor of a request may have.
    codes: Vec<(i32, DType)>,
}

/// What a strided tensor in the memory of the host or of a GPU says of itself.
pub(crate) struct Described {
    pub(crate) device: Device,
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) strides: Strides,
    /// The first byte of its storage.
    pub(crate) storage: usize,
    /// The length of its storage.
    pub(crate) storage_bytes: usize,
    /// What gives a storage on an Apple GPU its address.
    pub(crate) placed: Option<Placed>,
}

/// The address of a function of the loaded libtorch.
#[cfg(unix)]
pub(crate) fn symbol(name: &CStr) -> Option<*mut c_void> {
    let library = if cfg!(target_os = "macos") { c"libtorch_cpu.dylib" } else { c"libtorch_cpu.so" };
    // SAFETY: RTLD_NOLOAD runs no initialisers: it finds a library that is loaded, or nothing; it is never unloaded.
    let found = unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if handle.is_null() { handle } else { libc::dlsym(handle, name.as_ptr()) }
    };
    (!found.is_null()).then_some(found)
}

#[cfg(windows)]
pub(crate) fn symbol(name: &CStr) -> Option<*mut c_void> {
    // One that the process has already: nothing is loaded, and torch never unloads it.
    let library = libloading::os::windows::Library::open_already_loaded("torch_cpu.dll").ok()?;
    // SAFETY: the address alone is taken, of whatever type the function is.
    let found = unsafe { library.get::<unsafe extern "C" fn()>(name.to_bytes_with_nul()) }.ok()?.as_raw_ptr();
    (!found.is_null()).then_some(found)
}

/// torch's encoder for Metal, or what of it this torch lacks. The first call must come after torch is imported. Its functions are looked for in
/// libtorch, and then in what the process has loaded for all.
pub(crate) fn metal() -> Result<&'static Backend, MetalError> {
    let find = |name: &CStr| symbol(name).or_else(|| symbol_of_all(name)).unwrap_or(std::ptr::null_mut());
    // SAFETY: functions of torch's names are torch's, and are never unloaded.
    Backend::provide(|| unsafe { Functions::find(find) })
}

#[cfg(unix)]
fn symbol_of_all(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends in NUL.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

#[cfg(not(unix))]
fn symbol_of_all(_name: &CStr) -> Option<*mut c_void> {
    None
}

/// The function `$name` of the loaded libtorch, as a `$type`.
macro_rules! function {
    ($name:literal as $type:ty) => {
        $crate::tensors::torch_abi::symbol($name).map(|found| {
            // SAFETY: the symbol has this type in torch's headers, and the C ABI keeps it.
            unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
        })
    };
}
pub(crate) use function;

/// The ABI of the loaded libtorch, if it has all of it. The first call must come after torch is imported.
pub(crate) fn abi() -> Option<&'static TorchAbi> {
    static ABI: OnceLock<Option<TorchAbi>> = OnceLock::new();
    ABI.get_or_init(find).as_ref()
}

fn find() -> Option<TorchAbi> {
    let code = |name: &CStr| -> Option<i32> {
        let found = symbol(name)?;
        // SAFETY: every function named here takes nothing and returns an int32_t.
        Some(unsafe { std::mem::transmute::<*mut c_void, DtypeCode>(found)() })
    };
    let codes = [
        (c"aoti_torch_dtype_float32", DType::F32),
        (c"aoti_torch_dtype_bfloat16", DType::BF16),
        (c"aoti_torch_dtype_float16", DType::F16),
        (c"aoti_torch_dtype_float64", DType::F64),
        (c"aoti_torch_dtype_bool", DType::Bool),
    ];
    let codes = codes.into_iter().map(|(name, dtype)| Some((code(name)?, dtype))).collect::<Option<Vec<_>>>()?;
    let interop = function!(c"torch_tensor_from_pyobject" as FromPython)
        .zip(function!(c"torch_tensor_to_pyobject" as ToPython))
        .map(|(from_python, to_python)| Interop { from_python, to_python });
    Some(TorchAbi {
        data_ptr: function!(c"aoti_torch_get_data_ptr" as Read<*mut c_void>)?,
        dim: function!(c"aoti_torch_get_dim" as Read<i64>)?,
        sizes: function!(c"aoti_torch_get_sizes" as Read<*mut i64>)?,
        strides: function!(c"aoti_torch_get_strides" as Read<*mut i64>)?,
        dtype: function!(c"aoti_torch_get_dtype" as Read<i32>)?,
        device_type: function!(c"aoti_torch_get_device_type" as Read<i32>)?,
        device_index: function!(c"aoti_torch_get_device_index" as Read<i32>)?,
        storage_size: function!(c"aoti_torch_get_storage_size" as Read<i64>)?,
        storage_offset: function!(c"aoti_torch_get_storage_offset" as Read<i64>)?,
        delete: function!(c"aoti_torch_delete_tensor_object" as unsafe extern "C" fn(TensorHandle) -> c_int)?,
        empty_strided: function!(c"aoti_torch_empty_strided" as EmptyStrided)?,
        grad_mode: function!(c"aoti_torch_grad_mode_is_enabled" as unsafe extern "C" fn() -> bool)?,
        interop,
        cpu: code(c"aoti_torch_device_type_cpu")?,
        cuda: code(c"aoti_torch_device_type_cuda")?,
        mps: code(c"aoti_torch_device_type_mps")?,
        codes,
    })
}

/// A tensor as the ABI names it, for as long as its Python object is borrowed.
struct Handle<'a> {
    abi: &'a TorchAbi,
    /// Given by torch, to be given back; null where `body` serves.
    owned: TensorHandle,
    /// The tensor's body: what an `at::Tensor` holds.
    body: *mut c_void,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if !self.owned.is_null() {
            // SAFETY: a handle that torch gave out, given back once.
            unsafe { (self.abi.delete)(self.owned) };
        }
    }
}

impl Handle<'_> {
    /// One property; `None` if torch has none to tell.
    fn read<T: Copy>(&self, read: Read<T>, zero: T) -> Option<T> {
        let mut value = zero;
        let tensor = if self.owned.is_null() { (&raw const self.body).cast_mut().cast() } else { self.owned };
        // SAFETY: `tensor` points to an at::Tensor that lives as long as `self`; `value` has the type that is written.
        let status = unsafe { read(tensor, &raw mut value) };
        (status == 0).then_some(value)
    }
}

impl TorchAbi {
    /// Whether grad mode is on.
    pub(crate) fn grad_mode(&self) -> bool {
        // SAFETY: reads a thread-local flag.
        unsafe { (self.grad_mode)() }
    }

    fn handle(&self, tensor: &Bound<'_, PyAny>) -> Option<Handle<'_>> {
        let mut handle = Handle { abi: self, owned: std::ptr::null_mut(), body: std::ptr::null_mut() };
        if let Some(interop) = self.interop {
            // SAFETY: a tensor (the caller's duty) with the GIL held; a new handle is written.
            let status = unsafe { (interop.from_python)(tensor.as_ptr().cast(), &raw mut handle.owned) };
            (status == 0 && !handle.owned.is_null()).then_some(handle)
        } else {
            let body: usize = tensor.getattr(intern!(tensor.py(), "_cdata")).ok()?.extract().ok()?;
            handle.body = std::ptr::with_exposed_provenance_mut(body);
            (!handle.body.is_null()).then_some(handle)
        }
    }

    /// What `tensor` (a `torch.Tensor` whose dispatch keys are those of an ordinary one, which is strided) says of itself.
    /// `None` for anything but memory of the host or of a GPU that is served, a computed dtype or bool, and at most [`MAX_RANK`] dimensions.
    pub(crate) fn describe(&self, tensor: &Bound<'_, PyAny>) -> Option<Described> {
        self.describe_handle(&mut self.handle(tensor)?)
    }

    fn describe_handle(&self, handle: &mut Handle<'_>) -> Option<Described> {
        let device = match handle.read(self.device_type, 0)? {
            cpu if cpu == self.cpu => Device::Cpu,
            cuda if cuda == self.cuda => Device::Cuda(u32::try_from(handle.read(self.device_index, 0)?).ok()?),
            // A tensor of the one GPU may say −1.
            mps if mps == self.mps => Device::Mps(u32::try_from(handle.read(self.device_index, 0)?).unwrap_or(0)),
            _ => return None,
        };
        let code = handle.read(self.dtype, 0)?;
        let (_, dtype) = *self.codes.iter().find(|(known, _)| *known == code)?;
        let rank = usize::try_from(handle.read(self.dim, 0)?).ok().filter(|rank| *rank <= MAX_RANK)?;
        let (sizes, steps) =
            (handle.read(self.sizes, std::ptr::null_mut())?, handle.read(self.strides, std::ptr::null_mut())?);
        let (mut shape, mut strides) = ([0usize; MAX_RANK], [0isize; MAX_RANK]);
        for d in 0..rank {
            // SAFETY: both arrays have `rank` entries and belong to the tensor, which the handle keeps.
            let (size, step) = unsafe { (*sizes.add(d), *steps.add(d)) };
            (shape[d], strides[d]) = (usize::try_from(size).ok()?, isize::try_from(step).ok()?);
        }
        let ptr = handle.read(self.data_ptr, std::ptr::null_mut())?.cast::<u8>();
        let storage_bytes = usize::try_from(handle.read(self.storage_size, 0)?).ok()?;
        let offset = usize::try_from(handle.read(self.storage_offset, 0)?).ok()?;
        let begin = offset.wrapping_mul(dtype.size_bytes());
        let described = Described {
            device,
            ptr,
            dtype,
            shape: Shape::new(&shape[..rank])?,
            strides: Strides::new(&strides[..rank])?,
            // An empty tensor has a null pointer and no bytes to prove.
            storage: ptr.addr().wrapping_sub(begin),
            storage_bytes,
            placed: None,
        };
        match device {
            Device::Mps(_) => place(described, begin, handle),
            _ => Some(described),
        }
    }

    /// A new tensor on `device`, its elements not set, and what it says of itself. `None` where this torch hands out no Python object for one.
    pub(crate) fn empty_strided<'py>(
        &self,
        py: Python<'py>,
        device: Device,
        dtype: DType,
        shape: &Shape,
        strides: &Strides,
    ) -> Option<(Bound<'py, PyAny>, Described)> {
        let interop = self.interop?;
        let (code, _) = *self.codes.iter().find(|(_, known)| *known == dtype)?;
        let (mut sizes, mut steps) = ([0i64; MAX_RANK], [0i64; MAX_RANK]);
        for (d, (&size, &step)) in shape.iter().zip(strides.iter()).enumerate() {
            (sizes[d], steps[d]) = (i64::try_from(size).ok()?, i64::try_from(step).ok()?);
        }
        let rank = i64::try_from(shape.len()).ok()?;
        let (kind, index) = match device {
            Device::Cpu => (self.cpu, 0),
            Device::Cuda(index) => (self.cuda, i32::try_from(index).ok()?),
            Device::Mps(index) => (self.mps, i32::try_from(index).ok()?),
            _ => return None,
        };
        let mut handle = Handle { abi: self, owned: std::ptr::null_mut(), body: std::ptr::null_mut() };
        let mut object = std::ptr::null_mut();
        // SAFETY: both arrays have `rank` entries; the handle written is owned by `handle`; the object written is a new
        // reference, and the GIL is held.
        unsafe {
            let status =
                (self.empty_strided)(rank, sizes.as_ptr(), steps.as_ptr(), code, kind, index, &raw mut handle.owned);
            if status != 0 || handle.owned.is_null() {
                return None;
            }
            let status = (interop.to_python)(handle.owned, std::ptr::null_mut(), &raw mut object);
            if status != 0 {
                return None;
            }
            let object = Bound::from_owned_ptr_or_opt(py, object.cast())?;
            Some((object, self.describe_handle(&mut handle)?))
        }
    }
}

/// `described`, a tensor on an Apple GPU, with an address of its storage in place of what torch calls its data pointer: that names a storage.
fn place(mut described: Described, begin: usize, handle: &mut Handle<'_>) -> Option<Described> {
    let metal = metal().ok()?;
    let owned = std::mem::replace(&mut handle.owned, std::ptr::null_mut());
    if owned.is_null() {
        return None;
    }
    // SAFETY: torch gave this handle out, and `handle` gives it back no more; the other facts were read from it.
    let placed =
        unsafe { metal.place(owned, described.storage, described.storage_bytes, begin, described.dtype) }.ok()?;
    described.ptr = std::ptr::without_provenance_mut(placed.address());
    described.storage = placed.storage_address();
    described.placed = Some(placed);
    Some(described)
}
