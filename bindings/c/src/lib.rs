//! The C interface: from `rapt_tensor` and `rapt_options` to [`engine::View`] and back. No arithmetic, no policy.
//!
//! ```text
//! abi      the types of rapt.h, field by field; nothing else may be changed without a new soname
//! read     what a caller's structs say ─► View, Options ─► Tensors
//! served   calls that were served before run without being proven again
//! tolerance the functions of rapt.h for what is measured of codes, and calls that judge heads by it
//! refusal  errors as codes and messages; nothing unwinds past `guard`
//! model    the functions of rapt.h for exported programs: a model, its bindings, its sessions
//! backward the functions of rapt.h for gradients
//! cuda     the functions of rapt.h for tensors on NVIDIA GPUs
//! ragged   the functions of rapt.h for sequences of different lengths: one after another, or in a cache
//! kv_cache the functions of rapt.h for a cache that Rapt owns: its pages, its sequences
//! metal    the functions of rapt.h for tensors in MTLBuffers
//! handle   how what Rapt owns is given to C and taken back
//! run      one run of a program: what its inputs and places say, proven, then run
//! lib      all other functions of rapt.h, and the engine that they are given
//! ```
//! Every pointer is checked for NULL and alignment before it is read, every number against its domain. The caller is
//! responsible for what C cannot tell: that a pointer which is neither NULL nor unaligned points to its type.
//! Deliberately absent: allocation of tensors, a default engine, and any state but what handles hold and the last error of each
//! thread.

mod abi;
mod backward;
mod cuda;
mod handle;
mod kv_cache;
mod metal;
mod model;
mod ragged;
mod read;
mod refusal;
mod run;
mod served;
mod tolerance;

use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;

use engine::{Device, Engine, Error, Operands, Tolerance};

pub use abi::{
    RAPT_MAX_NDIM, RAPT_VERSION_MAJOR, RAPT_VERSION_MINOR, RAPT_VERSION_PATCH, rapt_capabilities, rapt_causal,
    rapt_codes, rapt_compute, rapt_cuda_queue, rapt_device, rapt_dtype, rapt_error, rapt_format, rapt_given,
    rapt_gradients, rapt_granularity, rapt_judgement, rapt_kv_cache_form, rapt_kv_cache_pages, rapt_kvcache,
    rapt_layout, rapt_measured, rapt_metal, rapt_options, rapt_port, rapt_scale_layout, rapt_tensor, rapt_tolerance,
};
pub use backward::{rapt_attention_backward, rapt_varlen_attention_backward};
pub use cuda::{
    rapt_cuda_attention, rapt_cuda_attention_backward, rapt_cuda_varlen_attention, rapt_cuda_varlen_attention_backward,
};
pub use kv_cache::{
    rapt_kv_cache, rapt_kv_cache_append, rapt_kv_cache_append_batch, rapt_kv_cache_attention, rapt_kv_cache_create,
    rapt_kv_cache_destroy, rapt_kv_cache_fork, rapt_kv_cache_free, rapt_kv_cache_free_pages, rapt_kv_cache_get_pages,
    rapt_kv_cache_length, rapt_kv_cache_new_sequence, rapt_kv_cache_num_sequences, rapt_kv_cache_page_table,
    rapt_kv_cache_seqlens, rapt_kv_cache_truncate,
};
pub use metal::{rapt_metal_attention, rapt_metal_create, rapt_metal_destroy};
pub use model::{
    rapt_bound, rapt_bound_destroy, rapt_bound_output, rapt_model, rapt_model_bind, rapt_model_destroy,
    rapt_model_explain, rapt_model_from_bytes, rapt_model_input, rapt_model_num_inputs, rapt_model_num_outputs,
    rapt_model_open, rapt_model_output, rapt_session, rapt_session_create, rapt_session_destroy,
    rapt_session_held_bytes, rapt_session_reset, rapt_session_run,
};
pub use ragged::{rapt_attention_with_kvcache, rapt_varlen_attention};
use read::{Call, dtype_of, to_read, to_write};
use refusal::{Refusal, guard};
use served::Calls;
use tolerance::Asked;
pub use tolerance::{rapt_measured_create, rapt_measured_destroy};

/// Threads, scratch memory and a cache of plans; see rapt_engine_create().
#[allow(non_camel_case_types, reason = "a name of rapt.h")]
pub struct rapt_engine {
    engine: Arc<Engine>,
    calls: Calls,
}

/// The version of the library that is loaded, such as "0.1.0". The string lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_version() -> *const c_char {
    const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a version holds no NUL"),
    };
    VERSION.as_ptr()
}

/// The name of an error code, such as "RAPT_ERROR_SHAPE"; "unknown" for a number that is none. The string lives as long
/// as the library.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_error_name(error: i32) -> *const c_char {
    refusal::name(error).as_ptr()
}

/// What the last failed call on this thread said: what was asked, what was got, what is allowed. "" if none failed.
/// A call that succeeds leaves it as it is. The string lives until the next call fails on this thread, or the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_last_error() -> *const c_char {
    refusal::last_message()
}

/// The code of the last failed call on this thread; RAPT_OK if none failed.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_last_error_code() -> rapt_error {
    refusal::last_code()
}

/// The name of a dtype, such as "bfloat16"; NULL for a code that is not known. The string lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_dtype_name(dtype: i32) -> *const c_char {
    abi::dtype_name(dtype).map_or(std::ptr::null(), CStr::as_ptr)
}

/// The size of an element of a dtype in bits; 0 for RAPT_DTYPE_UNKNOWN and for a code that is not known.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_dtype_bits(dtype: i32) -> usize {
    dtype_of("dtype", dtype).map_or(0, engine::DType::bits)
}

/// Writes the strides, in elements, of a row-major tensor of this shape: `strides[ndim - 1]` is 1.
///
/// # Safety
/// `shape` and `strides` each lead to `ndim` numbers, or are NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_contiguous_strides(ndim: i32, shape: *const i64, strides: *mut i64) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let sizes = unsafe { read::shape("tensor", ndim, shape) }?;
        let overflow = || Error::Overflow { tensor: "tensor", shape: sizes, strides: [].into() };
        let found = sizes.contiguous().ok_or_else(overflow)?;
        let strides = to_write(strides, "strides")?;
        for (d, stride) in found.iter().enumerate() {
            // SAFETY: below `ndim`, which is the length that the caller told.
            unsafe { strides.add(d).write(*stride as i64) };
        }
        Ok(())
    })
}

/// An engine: threads, scratch memory and a cache of plans. `threads` is their number, or 0 for RAPT_NUM_THREADS and,
/// without it, what the system offers. No thread is started before a call needs one.
///
/// NULL if that is no number of threads, or an environment variable holds nonsense: rapt_last_error() says what. One
/// engine serves any number of threads at once. It is given back by rapt_engine_destroy().
#[unsafe(no_mangle)]
pub extern "C" fn rapt_engine_create(threads: i32) -> *mut rapt_engine {
    let mut made = std::ptr::null_mut();
    guard(|| {
        let threads = match usize::try_from(threads) {
            Ok(0) => None,
            Ok(threads) => Some(threads),
            Err(_) => {
                let allowed = "0 (RAPT_NUM_THREADS, else what the system offers), or a number from 1 up".into();
                return Err(Error::Option { option: "threads", got: threads.to_string(), allowed }.into());
            }
        };
        made = Box::into_raw(Box::new(rapt_engine { engine: Arc::new(Engine::new(threads)?), calls: Calls::new() }));
        Ok(())
    });
    made
}

/// An engine that attends on a GPU which Vulkan reaches: the tensors of a call are host memory, copied there and back. `adapter` is its
/// number, from 0.
///
/// NULL if there is no such adapter, or the library was built without the cargo feature `vulkan`: rapt_last_error() says what. It is
/// given back by rapt_engine_destroy().
#[unsafe(no_mangle)]
pub extern "C" fn rapt_engine_gpu(adapter: i32) -> *mut rapt_engine {
    let mut made = std::ptr::null_mut();
    guard(|| {
        let allowed = "the number of an adapter, from 0".to_owned();
        let refused = |_| Error::Option { option: "adapter", got: adapter.to_string(), allowed };
        let adapter = u32::try_from(adapter).map_err(refused)?;
        let engine = Arc::new(Engine::on(Device::Vulkan(adapter), None)?);
        made = Box::into_raw(Box::new(rapt_engine { engine, calls: Calls::new() }));
        Ok(())
    });
    made
}

/// Ends the engine's threads and gives back its memory. No call may be using it, and none may use it after. Where models were
/// opened with it, both happen when the last of them, their bindings and sessions is given back. NULL is ignored.
///
/// # Safety
/// `engine` came from rapt_engine_create() or rapt_engine_gpu(), was not destroyed before, and is used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_engine_destroy(engine: *mut rapt_engine) {
    if !engine.is_null() {
        guard(|| {
            // SAFETY: made by `Box::into_raw` in one of the two; the rest is the caller's word.
            drop(unsafe { Box::from_raw(engine) });
            Ok(())
        });
    }
}

/// What this engine runs on. The caller sets `capabilities->size` to sizeof(rapt_capabilities); all else is written.
///
/// # Safety
/// `engine` is alive, or NULL; `capabilities` leads to `capabilities->size` bytes, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_engine_capabilities(
    engine: *const rapt_engine,
    capabilities: *mut rapt_capabilities,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        let capabilities = to_write(capabilities, "capabilities")?;
        // SAFETY: neither NULL nor unaligned; that an engine and a number lie there is the caller's word.
        let (engine, size) = unsafe { (&(*engine).engine, (*capabilities).size) };
        read::struct_size("capabilities.size", size, &[size_of::<rapt_capabilities>()])?;
        let found = rapt_capabilities {
            size,
            threads: i32::try_from(engine.threads().get()).unwrap_or(i32::MAX),
            num_dtypes: abi::DTYPES.len() as i32,
            dtypes: abi::DTYPES.as_ptr(),
            isa: abi::isa_name(engine.caps().arch).as_ptr(),
            isas: abi::isa_names().as_ptr(),
        };
        // SAFETY: as long as its size says, which was found to be that of this struct.
        unsafe { capabilities.write(found) };
        Ok(())
    })
}

/// softmax(q·kᵀ · scale)·v into `out`, and the log of the sum of exponentials into `options->lse` where that is given.
///
/// Shapes are those of docs/reference/definition.md, in the order of `options->layout`; `options` may be NULL, which is plain attention.
/// Everything is proven before anything is written: on an error `out` and `lse` are as before, and the engine serves on.
/// (RAPT_ERROR_INTERNAL alone leaves them unspecified: it is a defect of Rapt.)
///
/// # Safety
/// `engine` is alive. Each descriptor, and each tensor behind one, is what it says: readable memory that nobody writes
/// during the call, and for `out` and `lse` writable memory that nobody else uses. NULL is safe everywhere.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_attention(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    out: *const rapt_tensor,
    options: *const rapt_options,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let rapt_engine { engine, calls } = unsafe { &*engine };
        // SAFETY: the caller's word is the same.
        unsafe { calls.run(engine, &Call { q, k, v, out, options }) }
    })
}

/// What rapt_attention() would run for the same arguments, in words, as a table of lines: into `*text`, which the caller
/// gives back by rapt_string_free(). Nothing is computed, but with a tolerance every head is judged, and the table says what would come
/// of it. On an error `*text` is as before.
///
/// # Safety
/// As rapt_attention(); `text` leads to a pointer that may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_explain(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    out: *const rapt_tensor,
    options: *const rapt_options,
    text: *mut *mut c_char,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        let text = to_write(text, "text")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word is the same.
        // Tensors first, as rapt_attention() reads them, so that both refuse the same.
        let ((tensors, options), asked) = unsafe {
            let call = Call { q, k, v, out, options };
            (call.read()?, Asked::of(&call)?)
        };
        let spec = engine::spec_of(&tensors, &options)?;
        // Before a kernel is planned for a device where nothing is judged.
        asked.as_ref().map_or(Ok(()), |_| Tolerance::serves_host(spec.device))?;
        let plan = engine.plan(&spec)?;
        // What rapt_attention() refuses is refused here.
        let operands = Operands::check(tensors, plan.spec())?;
        let mut table = plan.explain().to_string();
        if let Some(asked) = asked {
            // SAFETY: the caller's word.
            table += &unsafe { asked.judge(engine, operands.into_tensors(), &options) }?.to_string();
        }
        let table = CString::new(table).map_err(|_| Refusal::Nul)?;
        // SAFETY: neither NULL nor unaligned.
        unsafe { text.write(table.into_raw()) };
        Ok(())
    })
}

/// Gives back a string of rapt_explain() or rapt_model_explain(). NULL is ignored.
///
/// # Safety
/// `text` came from one of them and was not given back before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: made by `CString::into_raw` in the one or the other.
        drop(unsafe { CString::from_raw(text) });
    }
}
