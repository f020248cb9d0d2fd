//! PyTorch's C functions for Metal, as they are: found by name, each call checked.
//!
//! Their types stand in torch/csrc/inductor/aoti_torch/c/shim.h, shim_mps.h and torch/csrc/stable/c/shim.h. Each answers 0, or another number
//! where PyTorch threw. Deliberately absent: what they are called for.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::error::{MetalError, Result};

/// PyTorch's `AtenTensorHandle`: a pointer to an `at::Tensor`.
pub type TensorHandle = *mut c_void;
type LibraryHandle = *mut c_void;
pub(crate) type FunctionHandle = *mut c_void;

/// The version of PyTorch that has all of these.
const SINCE: &str = "2.14";

/// Declares [`Functions`] and how each is found by its name.
macro_rules! functions {
    ($($name:ident: $symbol:literal as $ty:ty;)*) => {
        /// PyTorch's functions for Metal.
        #[derive(Clone, Copy)]
        pub struct Functions {
            $($name: $ty,)*
            /// What PyTorch threw last on this thread, in words, where it has this function.
            what: Option<unsafe extern "C" fn() -> *const c_char>,
        }

        impl Functions {
            /// Those that `symbol` finds by name.
            ///
            /// # Errors
            /// [`MetalError::Missing`].
            ///
            /// # Safety
            /// What `symbol` answers is null or the address of PyTorch's function of that name, which stays loaded.
            pub unsafe fn find(symbol: impl Fn(&CStr) -> *mut c_void) -> std::result::Result<Self, MetalError> {
                let what = symbol(c"torch_exception_get_what_without_backtrace");
                Ok(Functions {
                    $($name: {
                        let (function, found) = ($symbol, symbol(
                            const { match CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes()) {
                                Ok(name) => name,
                                Err(_) => panic!("a name without NUL"),
                            } }
                        ));
                        if found.is_null() {
                            return Err(MetalError::Missing { function, since: SINCE });
                        }
                        // SAFETY: the function of this name has this type in PyTorch's headers, and the C ABI keeps it.
                        unsafe { std::mem::transmute::<*mut c_void, $ty>(found) }
                    },)*
                    // SAFETY: as above.
                    what: (!what.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(what) }),
                })
            }
        }
    };
}

functions! {
    create_library: "aoti_torch_mps_create_shader_library" as unsafe extern "C" fn(*const c_char, *mut LibraryHandle) -> c_int;
    get_function: "aoti_torch_mps_get_kernel_function" as unsafe extern "C" fn(LibraryHandle, *const c_char, *mut FunctionHandle) -> c_int;
    run_command_block: "aoti_torch_mps_run_command_block" as unsafe extern "C" fn(FunctionHandle, unsafe extern "C" fn(FunctionHandle, *mut c_void), *mut c_void) -> c_int;
    start_encoding: "aoti_torch_mps_start_encoding" as unsafe extern "C" fn(FunctionHandle) -> c_int;
    set_arg_tensor: "aoti_torch_mps_set_arg_tensor" as unsafe extern "C" fn(FunctionHandle, c_uint, TensorHandle) -> c_int;
    dispatch: "aoti_torch_mps_dispatch_array_with_group_size" as unsafe extern "C" fn(FunctionHandle, *const u64, usize, *const u64, usize) -> c_int;
    set_arg_bytes: "torch_mps_set_arg_bytes" as unsafe extern "C" fn(FunctionHandle, c_uint, *const c_void, u64) -> c_int;
    device_type: "aoti_torch_device_type_mps" as unsafe extern "C" fn() -> i32;
    dtype_bytes: "aoti_torch_dtype_uint8" as unsafe extern "C" fn() -> i32;
    empty_strided: "aoti_torch_empty_strided" as unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut TensorHandle) -> c_int;
    reinterpret: "aoti_torch__reinterpret_tensor" as unsafe extern "C" fn(TensorHandle, i64, *const i64, *const i64, i64, *mut TensorHandle) -> c_int;
    delete: "aoti_torch_delete_tensor_object" as unsafe extern "C" fn(TensorHandle) -> c_int;
}

/// A tensor of PyTorch's that is kept.
#[derive(Clone)]
pub(crate) struct Tensor(Arc<Owned>);

struct Owned {
    handle: TensorHandle,
    delete: unsafe extern "C" fn(TensorHandle) -> c_int,
}

// SAFETY: a handle names an at::Tensor, which is counted atomically; nothing is done with it here but to bind it and to give it back.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: a handle that PyTorch gave out, given back once.
        unsafe { (self.delete)(self.handle) };
    }
}

/// A compiled kernel, which PyTorch keeps as long as the process lives.
#[derive(Clone, Copy)]
pub(crate) struct Kernel(FunctionHandle);

// SAFETY: PyTorch calls a kernel from any thread; its calls are in turn, on the queue of its stream.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// One dispatch: what is bound to which slot, and how many threads.
pub(crate) struct Dispatch<'a> {
    pub(crate) params: &'a [u8],
    pub(crate) tensors: &'a [(u32, Tensor)],
    pub(crate) threads: [u64; 3],
    pub(crate) group: [u64; 3],
}

/// What the callback of one command block is given.
struct Block<'a> {
    functions: &'a Functions,
    dispatch: &'a Dispatch<'a>,
    answer: Result<()>,
}

/// The slot of the parameters.
const PARAMS: c_uint = 0;

impl Functions {
    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: no arguments; what it answers is null or a string of this thread's, which the next exception replaces.
        let what = self.what.map_or(std::ptr::null(), |what| unsafe { what() });
        let why = match what.is_null() {
            true => format!("PyTorch answered {status}; what it threw is in its log"),
            // SAFETY: not null, and a string as above.
            false => unsafe { CStr::from_ptr(what) }.to_string_lossy().into_owned(),
        };
        Err(MetalError::Failed { call, why })
    }

    /// Takes over a tensor.
    ///
    /// # Safety
    /// PyTorch gave `handle` out, and nobody else gives it back.
    pub(crate) unsafe fn own(&self, handle: TensorHandle) -> Tensor {
        Tensor(Arc::new(Owned { handle, delete: self.delete }))
    }

    /// The kernel `name` of `text`.
    pub(crate) fn compile(&self, text: &str, name: &'static str) -> Result<Kernel> {
        let of = |text: &str| {
            CString::new(text).map_err(|_| MetalError::Failed {
                call: "aoti_torch_mps_create_shader_library",
                why: "a NUL in the text".to_owned(),
            })
        };
        let (text, name) = (of(text)?, of(name)?);
        let (mut library, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: both strings end in NUL and outlive the calls; each handle has room where it is written. The library is never
        // deleted, so that the function stays.
        unsafe {
            let status = (self.create_library)(text.as_ptr(), &raw mut library);
            self.check("aoti_torch_mps_create_shader_library", status)?;
            let status = (self.get_function)(library, name.as_ptr(), &raw mut function);
            self.check("aoti_torch_mps_get_kernel_function", status)?;
        }
        Ok(Kernel(function))
    }

    /// A new tensor of `bytes` bytes on this GPU.
    pub(crate) fn bytes(&self, index: u32, bytes: usize) -> Result<Tensor> {
        let (size, stride) = (bytes as i64, 1i64);
        let mut handle = std::ptr::null_mut();
        // SAFETY: one size and one stride; the handle written is owned by what is answered.
        unsafe {
            let (dtype, device) = ((self.dtype_bytes)(), (self.device_type)());
            let status = (self.empty_strided)(
                1,
                &raw const size,
                &raw const stride,
                dtype,
                device,
                index as i32,
                &raw mut handle,
            );
            self.check("aoti_torch_empty_strided", status)?;
            Ok(self.own(handle))
        }
    }

    /// The one element that lies `step` elements behind the first of `tensor`, in its storage, as a tensor.
    pub(crate) fn element(&self, tensor: &Tensor, step: i64) -> Result<Tensor> {
        let one = 1i64;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a tensor that is kept; one size and one stride; the handle written is owned by what is answered.
        unsafe {
            let status = (self.reinterpret)(tensor.0.handle, 1, &raw const one, &raw const one, step, &raw mut handle);
            self.check("aoti_torch__reinterpret_tensor", status)?;
            Ok(self.own(handle))
        }
    }

    /// Encodes one dispatch of `kernel` behind all that was encoded before. Waits for nothing.
    pub(crate) fn encode(&self, kernel: Kernel, dispatch: &Dispatch<'_>) -> Result<()> {
        let mut block = Block { functions: self, dispatch, answer: Ok(()) };
        // SAFETY: the callback is called before this returns, with this block.
        let status = unsafe { (self.run_command_block)(kernel.0, encode_block, (&raw mut block).cast()) };
        block.answer.and(self.check("aoti_torch_mps_run_command_block", status))
    }

    /// # Safety
    /// `kernel` is one whose command block is open.
    unsafe fn encode_in_block(&self, kernel: FunctionHandle, dispatch: &Dispatch<'_>) -> Result<()> {
        let Dispatch { params, tensors, threads, group } = dispatch;
        // SAFETY: inside a command block; PyTorch copies the bytes, and keeps the buffers of the tensors until the GPU has passed them.
        unsafe {
            self.check("aoti_torch_mps_start_encoding", (self.start_encoding)(kernel))?;
            let status = (self.set_arg_bytes)(kernel, PARAMS, params.as_ptr().cast(), params.len() as u64);
            self.check("torch_mps_set_arg_bytes", status)?;
            for (slot, tensor) in *tensors {
                self.check("aoti_torch_mps_set_arg_tensor", (self.set_arg_tensor)(kernel, *slot, tensor.0.handle))?;
            }
            let status = (self.dispatch)(kernel, threads.as_ptr(), threads.len(), group.as_ptr(), group.len());
            self.check("aoti_torch_mps_dispatch_array_with_group_size", status)
        }
    }
}

/// Called by PyTorch inside a command block. It does not panic: what fails is an answer.
unsafe extern "C" fn encode_block(kernel: FunctionHandle, block: *mut c_void) {
    // SAFETY: the block of `encode`, which waits for this.
    let block = unsafe { &mut *block.cast::<Block<'_>>() };
    // SAFETY: PyTorch has opened the block.
    block.answer = unsafe { block.functions.encode_in_block(kernel, block.dispatch) };
}
