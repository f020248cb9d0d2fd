//! The functions of rapt.h for tensors in the caller's MTLBuffers.
//!
//! ```text
//! rapt_metal_create(queue) ─► rapt_metal ─ rapt_metal_attention(q, k, v, out, options) ─► BufferTensors ─► engine::metal::Buffers
//! ```
//! One header serves every library: without macOS and the cargo feature `metal` no rapt_metal is made. Never run on Apple hardware.
//! Deliberately absent: a device, a queue and memory, which are the caller's; codes and tolerances, which no kernel in Metal reads.

use std::ffi::c_void;

use engine::metal::{Buffer, BufferTensor, BufferTensors, Buffers, Metal};
use engine::{Device, Error, Options};

use crate::abi::{rapt_device, rapt_error, rapt_metal, rapt_options, rapt_tensor};
use crate::handle;
use crate::read::{self, Call, Parts, to_read};
use crate::refusal::{Pointer, Refusal, guard};

/// Metal's device, by DLPack's code.
const METAL: Device = Device::Other { dlpack_code: rapt_device::RAPT_DEVICE_METAL as i32, index: 0 };

/// A tensor as its descriptor says it lies in a buffer; `buffer` makes one of what stands in `storage`.
///
/// # Safety
/// `given` leads to a tensor whose arrays have `ndim` numbers, or is NULL; `buffer` may be asked for what its `storage` is.
unsafe fn tensor<B: Buffer>(
    name: &'static str,
    given: *const rapt_tensor,
    buffer: &impl Fn(*const c_void) -> Option<B>,
) -> Result<BufferTensor<B>, Refusal> {
    // SAFETY: the caller's word.
    let parts = unsafe { Parts::read(name, given) }?;
    if parts.device() != METAL {
        let why = format!("{name} is no tensor of RAPT_DEVICE_METAL with index 0, which rapt_metal_attention() takes");
        return Err(Error::DeviceUnavailable { device: parts.device(), why }.into());
    }
    // SAFETY: `read` found it neither NULL nor unaligned.
    let rapt_tensor { data, storage_bytes, storage, .. } = unsafe { given.read() };
    let null = Refusal::Null(Pointer { argument: name, field: Some("storage") });
    let buffer = if storage.is_null() { None } else { buffer(storage) }.ok_or(null)?;
    let is_told = !matches!(storage_bytes, 0 | -1);
    if is_told && usize::try_from(storage_bytes) != Ok(buffer.len_bytes()) {
        return Err(Refusal::Storage { tensor: name, got: storage_bytes });
    }
    let (shape, strides) = (parts.shape, parts.strides);
    Ok(BufferTensor { buffer, offset_bytes: data.addr(), dtype: parts.dtype, shape, strides })
}

/// # Safety
/// As [`tensor`], for each descriptor of the call.
unsafe fn tensors<B: Buffer>(
    call: &Call,
    buffer: &impl Fn(*const c_void) -> Option<B>,
) -> Result<(BufferTensors<B>, Options), Refusal> {
    let Call { q, k, v, out, options } = *call;
    // SAFETY: the caller's word.
    let of = |name, given: *const rapt_tensor| unsafe { tensor(name, given, buffer) };
    let tensors = BufferTensors::new(of("q", q)?, of("k", k)?, of("v", v)?, of("out", out)?);
    if options.is_null() {
        return Ok((tensors, Options::default()));
    }
    // SAFETY: as above.
    let given: rapt_options = unsafe { read::options(options) }?;
    let options = read::parse(&given)?;
    let has_codes = [given.q_codes, given.k_codes, given.v_codes].iter().any(|codes| !codes.is_null());
    for (is, what, instead) in [
        (has_codes, "q, k or v that are codes", "give their numbers"),
        (!given.tolerance.is_null(), "a tolerance", "options->tolerance = NULL"),
    ] {
        if is {
            return Err(Error::unsupported(what, "no kernel in Metal reads codes", instead).into());
        }
    }
    let optional = |name, given: *const rapt_tensor| if given.is_null() { Ok(None) } else { of(name, given).map(Some) };
    let (mask, sinks) = (optional("mask", given.mask)?, optional("sinks", given.sinks)?);
    let alibi_slopes = optional("alibi_slopes", given.alibi_slopes)?;
    Ok((BufferTensors { mask, sinks, alibi_slopes, lse: optional("lse", given.lse)?, ..tensors }, options))
}

/// Submits what the call asks to the queue of `buffers`.
///
/// # Safety
/// As [`tensors`].
#[cfg_attr(
    not(any(test, all(target_os = "macos", feature = "metal"))),
    expect(dead_code, reason = "Metal is not here")
)]
unsafe fn attend<M: Metal>(
    buffers: &Buffers<M>,
    call: &Call,
    buffer: &impl Fn(*const c_void) -> Option<M::Buffer>,
) -> Result<(), Refusal> {
    // SAFETY: the caller's word.
    let (tensors, options) = unsafe { tensors(call, buffer) }?;
    let spec = engine::spec_of(&tensors.views(buffers.device())?, &options)?;
    Ok(buffers.run(&buffers.plan(&spec)?, &tensors)?)
}

/// Attention on tensors in buffers of Metal's, by this queue (an id<MTLCommandQueue>, which it retains): into `*metal`, which
/// rapt_metal_destroy() gives back.
///
/// RAPT_ERROR_DEVICE in a library that was not built for macOS with the cargo feature `metal`. It was never run on Apple hardware.
///
/// # Safety
/// `queue` is an id<MTLCommandQueue>, or NULL; `metal` leads to a pointer that may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_metal_create(queue: *mut c_void, metal: *mut *mut rapt_metal) -> rapt_error {
    handle::create(metal, "metal", || {
        to_read(queue.cast::<u8>().cast_const(), "queue")?;
        // SAFETY: the caller's word.
        unsafe { made(queue) }
    })
}

/// As rapt_attention(), on tensors of RAPT_DEVICE_METAL: `storage` is the id<MTLBuffer>, `data` the byte in it where the element with index 0 lies, as
/// (void *)offset, and `storage_bytes` 0. What a call asks is submitted behind all that the queue has, and nothing is waited for: `out` and `lse` are
/// written when that has run, and buffers are retained until then. Everything is proven before anything is submitted. Codes and tolerances are refused.
///
/// # Safety
/// `metal` is alive, or NULL. Each descriptor is what it says; the memory that a tensor reaches in its buffer is written by nobody else until the queue has run
/// what was submitted, nor, of `out` and `lse`, used. NULL is safe everywhere.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_metal_attention(
    metal: *const rapt_metal,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    out: *const rapt_tensor,
    options: *const rapt_options,
) -> rapt_error {
    guard(|| {
        let metal = to_read(metal, "metal")?;
        // SAFETY: neither NULL nor unaligned; that one lies there, and the rest, is the caller's word.
        unsafe { run(&*metal, &Call { q, k, v, out, options }) }
    })
}

/// What is submitted goes on. NULL is ignored.
///
/// # Safety
/// `metal` came from rapt_metal_create(), was not destroyed before, and is used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_metal_destroy(metal: *mut rapt_metal) {
    // SAFETY: the caller's word.
    unsafe { handle::destroy(metal) };
}

/// # Safety
/// `queue` is an id<MTLCommandQueue>.
#[cfg(all(target_os = "macos", feature = "metal"))]
unsafe fn made(queue: *mut c_void) -> Result<rapt_metal, Refusal> {
    // SAFETY: the caller's word.
    let queue = unsafe { engine::metal::MetalQueue::from_raw(queue) }.ok_or(Refusal::Null("queue".into()))?;
    Ok(rapt_metal { buffers: Buffers::new(queue) })
}

/// # Safety
/// As rapt_metal_attention().
#[cfg(all(target_os = "macos", feature = "metal"))]
unsafe fn run(metal: &rapt_metal, call: &Call) -> Result<(), Refusal> {
    // SAFETY: the caller's word: a `storage` that is not NULL is an id<MTLBuffer>.
    let buffer = |storage: *const c_void| unsafe { engine::metal::MetalQueue::buffer_from_raw(storage.cast_mut()) };
    // SAFETY: the caller's word.
    unsafe { attend(&metal.buffers, call, &buffer) }
}

#[cfg(not(all(target_os = "macos", feature = "metal")))]
unsafe fn made(_queue: *mut c_void) -> Result<rapt_metal, Refusal> {
    let why = "this library was not built for macOS with the cargo feature `metal`".to_owned();
    Err(Error::DeviceUnavailable { device: METAL, why }.into())
}

#[cfg(not(all(target_os = "macos", feature = "metal")))]
unsafe fn run(metal: &rapt_metal, _call: &Call) -> Result<(), Refusal> {
    match metal.none {}
}

#[cfg(test)]
mod tests;
