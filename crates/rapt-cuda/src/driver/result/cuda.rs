//! The CUDA driver: devices, modules, launches, memory ordered by a stream, events.
//!
//! The context is the device's primary one, which is what every framework in the process uses; it is current only for the
//! length of a call. Deliberately absent: streams of its own.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use rapt_core::DType;
use rustc_hash::FxHashMap;

use crate::driver::sys::cuda::{
    self, CUcontext, CUdevice_attribute as Attribute, CUevent, CUevent_flags, CUfunction,
    CUfunction_attribute as FunctionAttribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, CUmodule, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, CUtensorMap,
    CUtensorMapDataType, CUtensorMapSwizzle,
};
use crate::driver::sys::is_driver_present;
use crate::error::{CudaError, Result};
use crate::tensor_map::{TensorMap, TmaTensor};

/// What a device says of itself.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) capability: (u32, u32),
    pub(crate) multiprocessors: u32,
    /// Most shared memory that a block may ask for.
    pub(crate) shared_bytes: u32,
    /// 0 where the driver does not tell.
    pub(crate) clock_hz: f64,
    /// Bytes a second by clock and bus width; 0 where the driver does not tell.
    pub(crate) bandwidth: f64,
}

/// A kernel on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) device: u32,
    /// `CUfunction`, valid as long as the process: modules are not unloaded.
    pub(crate) handle: usize,
    pub(crate) registers: usize,
    pub(crate) local_bytes: usize,
}

/// Size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    /// Blocks may take their places while the stream's launch before this one runs: the kernel waits for it of itself, or for what it reads of it.
    pub(crate) overlaps: bool,
}

/// What the rest of the crate asks of a driver.
pub(crate) trait Driver: Send + Sync + std::fmt::Debug {
    fn count(&self) -> Result<u32>;
    fn facts(&self, device: u32) -> Result<Facts>;
    /// Loads `cubin` and finds `entry`, which may then be launched with `shared_bytes` of dynamic shared memory.
    fn load(&self, device: u32, cubin: &[u8], entry: &CStr, shared_bytes: u32) -> Result<Function>;
    /// Enqueues a kernel whose one parameter is `params`.
    ///
    /// # Safety
    /// What `params` points to stays valid until the stream has passed this launch, and is what the kernel takes it for.
    unsafe fn launch(&self, function: &Function, grid: Grid, stream: usize, params: &[u8]) -> Result<()>;
    /// Encodes the tensor map of this tensor at `address`.
    fn encode(&self, tensor: &TmaTensor, address: usize) -> Result<TensorMap>;
    /// At least `bytes` bytes, to be used by what `stream` runs from here on.
    fn allocate(&self, device: u32, bytes: usize, stream: usize) -> Result<usize>;
    /// Gives back what [`Driver::allocate`] gave, when `stream` has come so far.
    fn free(&self, device: u32, address: usize, stream: usize) -> Result<()>;
    /// A new event at the end of what `stream` has to do now.
    fn record(&self, device: u32, stream: usize) -> Result<usize>;
    /// Whether an event of [`Driver::record`] has been passed.
    fn has_passed(&self, device: u32, event: usize) -> Result<bool>;
    /// Lets what `stream` is given from here on wait for an event of [`Driver::record`].
    fn wait(&self, device: u32, stream: usize, event: usize) -> Result<()>;
    /// Ends an event of [`Driver::record`]; who waits for it waits on.
    fn end_event(&self, device: u32, event: usize) -> Result<()>;
    /// Whether what `stream` is given becomes part of a graph and does not run.
    fn is_capturing(&self, device: u32, stream: usize) -> Result<bool>;
    /// The bytes at `address` once `stream` has come so far, for which it waits.
    ///
    /// # Safety
    /// There are as many bytes in memory of the device.
    unsafe fn read(&self, device: u32, address: usize, to: &mut [u8], stream: usize) -> Result<()>;
}

/// The driver of this machine.
#[derive(Debug)]
pub(crate) struct Cuda {
    pid: u32,
    /// Primary contexts by device, as addresses.
    contexts: Mutex<FxHashMap<u32, usize>>,
}

fn text_of(code: CUresult, get: unsafe fn(CUresult, *mut *const c_char) -> CUresult) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: a static string is written, or nothing for an unknown code.
    unsafe {
        if get(code, &raw mut text) != CUresult::CUDA_SUCCESS || text.is_null() {
            return "unknown".into();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

fn check(call: &'static str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let (name, text) = (text_of(code, cuda::cuGetErrorName), text_of(code, cuda::cuGetErrorString));
    Err(CudaError::Driver { call, code: code as u32, name, text })
}

/// Makes a context current, and the one before it again when dropped; where it is current already, nothing.
struct Current(Option<CUcontext>);

impl Current {
    fn new(context: usize) -> Result<Self> {
        let context = context as CUcontext;
        let mut before: CUcontext = std::ptr::null_mut();
        // SAFETY: one pointer is written.
        check("cuCtxGetCurrent", unsafe { cuda::cuCtxGetCurrent(&raw mut before) })?;
        if before == context {
            return Ok(Current(None));
        }
        // SAFETY: an address of `Cuda::context`: a primary context that is never released.
        check("cuCtxSetCurrent", unsafe { cuda::cuCtxSetCurrent(context) })?;
        Ok(Current(Some(before)))
    }
}

impl Cuda {
    /// A context that is current, whichever: a thread that has none, as PyTorch's that run a backward pass, gets one that was used before.
    fn some_context(&self) -> Result<Current> {
        let mut current: CUcontext = std::ptr::null_mut();
        // SAFETY: one pointer is written.
        check("cuCtxGetCurrent", unsafe { cuda::cuCtxGetCurrent(&raw mut current) })?;
        let used = self.contexts.lock().unwrap_or_else(PoisonError::into_inner).values().next().copied();
        match used {
            Some(context) if current.is_null() => Current::new(context),
            _ => Ok(Current(None)),
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            // SAFETY: what `new` found, which is this thread's to use, or none.
            let _ = unsafe { cuda::cuCtxSetCurrent(before) };
        }
    }
}

/// Lets this thread load modules while a stream of the process is captured into a graph.
struct Relaxed(CUstreamCaptureMode);

impl Relaxed {
    fn new() -> Result<Self> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps the mode of this thread.
        check("cuThreadExchangeStreamCaptureMode", unsafe { cuda::cuThreadExchangeStreamCaptureMode(&raw mut mode) })?;
        Ok(Relaxed(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: puts back what `new` found.
        let _ = unsafe { cuda::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

impl Cuda {
    /// Starts the driver.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::Driver`].
    pub(crate) fn start() -> Result<Self> {
        if !is_driver_present() {
            return Err(CudaError::NoDriver);
        }
        // SAFETY: `is_driver_present` opened the library; the call may be repeated.
        check("cuInit", unsafe { cuda::cuInit(0) })?;
        Ok(Cuda { pid: std::process::id(), contexts: Mutex::default() })
    }

    fn alive(&self) -> Result<()> {
        if self.pid == std::process::id() { Ok(()) } else { Err(CudaError::Forked) }
    }

    fn context(&self, device: u32) -> Result<usize> {
        self.alive()?;
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&device) {
            return Ok(*context);
        }
        let handle = self.device(device)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: `Cuda::device` found the device; its context is kept for the life of the process.
        check("cuDevicePrimaryCtxRetain", unsafe { cuda::cuDevicePrimaryCtxRetain(&raw mut context, handle) })?;
        contexts.insert(device, context as usize);
        Ok(context as usize)
    }

    fn device(&self, index: u32) -> Result<cuda::CUdevice> {
        let count = self.count()?;
        if index >= count {
            return Err(CudaError::NoDevice { index, count });
        }
        let mut device = 0;
        // SAFETY: the index was compared with the count; one handle is written.
        check("cuDeviceGet", unsafe { cuda::cuDeviceGet(&raw mut device, index as i32) })?;
        Ok(device)
    }
}

impl Driver for Cuda {
    fn count(&self) -> Result<u32> {
        self.alive()?;
        let mut count = 0;
        // SAFETY: one integer is written.
        check("cuDeviceGetCount", unsafe { cuda::cuDeviceGetCount(&raw mut count) })?;
        Ok(count.max(0) as u32)
    }

    fn facts(&self, index: u32) -> Result<Facts> {
        let device = self.device(index)?;
        let attribute = |attribute: Attribute| {
            let mut value = 0;
            // SAFETY: one integer is written.
            check("cuDeviceGetAttribute", unsafe { cuda::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
            Ok(value.max(0) as u32)
        };
        let mut name = [0 as c_char; 128];
        // SAFETY: the buffer's length is given.
        check("cuDeviceGetName", unsafe { cuda::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device) })?;
        // SAFETY: the driver ends the name with NUL.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        // Clocks are kHz; memory moves twice a cycle.
        let khz = |which| attribute(which).map_or(0.0, |khz| f64::from(khz) * 1e3);
        let memory_hz = khz(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
        let bus_bits = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
        Ok(Facts {
            name,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            clock_hz: khz(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
            bandwidth: memory_hz * 2.0 * f64::from(bus_bits) / 8.0,
        })
    }

    fn load(&self, device: u32, cubin: &[u8], entry: &CStr, shared_bytes: u32) -> Result<Function> {
        let _current = Current::new(self.context(device)?)?;
        let _relaxed = Relaxed::new()?;
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: an ELF image whose length is in its header; `bundled::get` and `Cache::get` compared its digest, so that it is
        // whole, or NVRTC made it just now.
        check("cuModuleLoadData", unsafe { cuda::cuModuleLoadData(&raw mut module, cubin.as_ptr().cast()) })?;
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: `check` passed the module as loaded; a `CStr` ends in NUL.
        let code = unsafe { cuda::cuModuleGetFunction(&raw mut function, module, entry.as_ptr()) };
        check("cuModuleGetFunction", code)?;
        let attribute = |which: FunctionAttribute| {
            let mut value = 0;
            // SAFETY: one integer is written.
            check("cuFuncGetAttribute", unsafe { cuda::cuFuncGetAttribute(&raw mut value, which, function) })?;
            Ok(value.max(0) as usize)
        };
        let most = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: `check` passed the function as found in a loaded module.
        check("cuFuncSetAttribute", unsafe { cuda::cuFuncSetAttribute(function, most, shared_bytes as i32) })?;
        Ok(Function {
            device,
            handle: function as usize,
            registers: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        })
    }

    unsafe fn launch(&self, function: &Function, grid: Grid, stream: usize, params: &[u8]) -> Result<()> {
        let _current = Current::new(self.context(function.device)?)?;
        let mut parameters = [params.as_ptr().cast_mut().cast::<c_void>()];
        if grid.overlaps {
            let mut overlap = CUlaunchAttribute {
                id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                pad: [0; 4],
                value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            };
            let config = CUlaunchConfig {
                gridDimX: grid.blocks,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: grid.threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: grid.shared_bytes,
                hStream: stream as CUstream,
                attrs: &raw mut overlap,
                numAttrs: 1,
            };
            let function = function.handle as CUfunction;
            // SAFETY: as of `cuLaunchKernel` below; `numAttrs` counts the one attribute, which outlives the call.
            return check("cuLaunchKernelEx", unsafe {
                cuda::cuLaunchKernelEx(&raw const config, function, parameters.as_mut_ptr(), std::ptr::null_mut())
            });
        }
        // SAFETY: `Function` is made by `load` alone, of a module that stays loaded; the driver copies the parameter before it returns,
        // and the caller vouches, as this function's contract says, for what it points to.
        check("cuLaunchKernel", unsafe {
            cuda::cuLaunchKernel(
                function.handle as CUfunction,
                grid.blocks,
                1,
                1,
                grid.threads,
                1,
                1,
                grid.shared_bytes,
                stream as CUstream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }

    fn encode(&self, tensor: &TmaTensor, address: usize) -> Result<TensorMap> {
        let mut map = CUtensorMap { opaque: [0; 16] };
        let dtype = match tensor.dtype {
            DType::Bool => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            DType::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let swizzle = match tensor.swizzled_bytes {
            0 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            32 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let _current = self.some_context()?;
        // SAFETY: sizes and boxes have the 4 elements that the rank says and strides 3, as their types prove; the map is aligned as
        // its type says; nothing is read at the address.
        let code = unsafe {
            cuda::cuTensorMapEncodeTiled(
                &raw mut map,
                dtype,
                4,
                address as *mut c_void,
                tensor.sizes.as_ptr(),
                tensor.strides_bytes.as_ptr(),
                [tensor.box_columns, tensor.box_rows, 1, 1].as_ptr(),
                [1; 4].as_ptr(),
                cuda::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                cuda::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                cuda::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", code)?;
        Ok(TensorMap(map.opaque))
    }

    fn allocate(&self, device: u32, bytes: usize, stream: usize) -> Result<usize> {
        let _current = Current::new(self.context(device)?)?;
        let mut address = 0;
        // SAFETY: one address is written.
        let code = unsafe { cuda::cuMemAllocAsync(&raw mut address, bytes.max(1), stream as CUstream) };
        check("cuMemAllocAsync", code)?;
        Ok(address as usize)
    }

    fn free(&self, device: u32, address: usize, stream: usize) -> Result<()> {
        let _current = Current::new(self.context(device)?)?;
        // SAFETY: memory of `allocate`, given back once.
        check("cuMemFreeAsync", unsafe { cuda::cuMemFreeAsync(address as u64, stream as CUstream) })
    }

    fn record(&self, device: u32, stream: usize) -> Result<usize> {
        let _current = Current::new(self.context(device)?)?;
        let mut event: CUevent = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: one handle is written.
        check("cuEventCreate", unsafe { cuda::cuEventCreate(&raw mut event, flags) })?;
        // SAFETY: `check` passed the event as made; the stream is the caller's, of this device.
        let recorded = check("cuEventRecord", unsafe { cuda::cuEventRecord(event, stream as CUstream) });
        if recorded.is_err() {
            // SAFETY: made above, ended once.
            let _ = unsafe { cuda::cuEventDestroy_v2(event) };
        }
        recorded.map(|()| event as usize)
    }

    fn has_passed(&self, device: u32, event: usize) -> Result<bool> {
        let _current = Current::new(self.context(device)?)?;
        // SAFETY: an event of `record` that was not ended.
        match unsafe { cuda::cuEventQuery(event as CUevent) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    fn wait(&self, device: u32, stream: usize, event: usize) -> Result<()> {
        let _current = Current::new(self.context(device)?)?;
        // SAFETY: an event of `record` that was not ended; the stream is the caller's, of this device.
        check("cuStreamWaitEvent", unsafe { cuda::cuStreamWaitEvent(stream as CUstream, event as CUevent, 0) })
    }

    fn end_event(&self, device: u32, event: usize) -> Result<()> {
        let _current = Current::new(self.context(device)?)?;
        // SAFETY: an event of `record`, ended once; the driver keeps what waits for it.
        check("cuEventDestroy", unsafe { cuda::cuEventDestroy_v2(event as CUevent) })
    }

    fn is_capturing(&self, device: u32, stream: usize) -> Result<bool> {
        let _current = Current::new(self.context(device)?)?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: one number is written; the stream is the caller's, of this device.
        let code = unsafe { cuda::cuStreamIsCapturing(stream as CUstream, &raw mut status) };
        // The legacy stream while another one is captured that waits for it.
        if code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            return Ok(true);
        }
        check("cuStreamIsCapturing", code)?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    unsafe fn read(&self, device: u32, address: usize, to: &mut [u8], stream: usize) -> Result<()> {
        let _current = Current::new(self.context(device)?)?;
        let _relaxed = Relaxed::new()?;
        // SAFETY: the slice is as long as is read, which the caller vouches for, and outlives the wait below.
        let code =
            unsafe { cuda::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), address as u64, to.len(), stream as CUstream) };
        check("cuMemcpyDtoHAsync", code)?;
        // SAFETY: the stream is the caller's, of this device.
        check("cuStreamSynchronize", unsafe { cuda::cuStreamSynchronize(stream as CUstream) })
    }
}
