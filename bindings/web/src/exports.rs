//! What the module exports: functions that take a text and answer one, and memory for tensors.
//!
//! ```text
//! rapt_<function>(address, length of a text) ──► address · 2^32 + length of {"done": …} or {"refused": …}, which the caller frees
//! ```

use std::alloc::{Layout, alloc, dealloc};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use crate::refusal::Refusal;
use crate::request::Request;
use crate::{plan, run};

const ALIGN: usize = 64;

#[derive(Serialize)]
enum Reply<T> {
    #[serde(rename = "done")]
    Done(T),
    #[serde(rename = "refused")]
    Refused(Refusal),
}

/// `len` bytes at a multiple of 64, or 0 where there is no room for them.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_alloc(len: usize) -> usize {
    let Ok(layout) = Layout::from_size_align(len.max(1), ALIGN) else { return 0 };
    // SAFETY: the size is not 0.
    unsafe { alloc(layout) }.expose_provenance()
}

/// Gives back what [`rapt_alloc`] gave.
///
/// # Safety
/// `address` is of a call of `rapt_alloc` with this `len`, and is given back once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_free(address: usize, len: usize) {
    if let Ok(layout) = Layout::from_size_align(len.max(1), ALIGN) {
        // SAFETY: promised by the caller.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(address), layout) }
    }
}

/// `text` in memory of [`rapt_alloc`]; 0 where there is no room.
fn give(text: &[u8]) -> u64 {
    let address = rapt_alloc(text.len());
    if address == 0 {
        return 0;
    }
    // SAFETY: so many bytes were just allocated there.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), std::ptr::with_exposed_provenance_mut(address), text.len());
    }
    (address as u64) << 32 | text.len() as u64
}

fn reply<T: Serialize>(result: Result<T, Refusal>) -> u64 {
    let reply = result.map_or_else(Reply::Refused, Reply::Done);
    give(&serde_json::to_vec(&reply).unwrap_or_default())
}

/// # Safety
/// A text of so many bytes lies at `address`.
unsafe fn text<'a>(address: usize, len: usize) -> &'a [u8] {
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len) }
}

/// # Safety
/// As of [`text`].
unsafe fn request(address: usize, len: usize) -> Result<Request, Refusal> {
    // SAFETY: promised by the caller.
    serde_json::from_slice(unsafe { text(address, len) }).map_err(|error| Refusal::of_protocol(&error))
}

/// Plans a request.
///
/// # Safety
/// A text of so many bytes lies at `address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_plan(address: usize, len: usize) -> u64 {
    // SAFETY: promised by the caller.
    reply(unsafe { request(address, len) }.and_then(|request| plan::plan(&request)))
}

/// The text of a kernel by its name.
///
/// # Safety
/// As of [`rapt_plan`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_source(address: usize, len: usize) -> u64 {
    // SAFETY: promised by the caller.
    reply(plan::source(&String::from_utf8_lossy(unsafe { text(address, len) })))
}

/// The names of all kernels for GPUs.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_kernels() -> u64 {
    let names = rapt_shader::variants().iter().map(ToString::to_string).collect::<Vec<_>>();
    reply(Ok(names))
}

/// Runs a request whose tensors were copied here.
///
/// # Safety
/// As of [`rapt_plan`], and every array of the request is memory that [`rapt_alloc`] gave.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_run(address: usize, len: usize) -> u64 {
    // SAFETY: promised by the caller.
    reply(unsafe { request(address, len).and_then(|request| run::run(&request)) })
}

/// Computes a request whose tensors were copied here by the definition; out and lse lie in float64 at `into`, which holds `count` numbers.
///
/// # Safety
/// As of [`rapt_run`], and of `into`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_reference(address: usize, len: usize, into: usize, count: usize) -> u64 {
    // SAFETY: promised by the caller.
    let numbers = unsafe { request(address, len).and_then(|request| run::reference(&request)) };
    reply(numbers.and_then(|numbers| {
        if numbers.len() != count {
            return Err(Refusal::of_protocol(&format!("room for {count} numbers of {}", numbers.len())));
        }
        // SAFETY: so many numbers have room there.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), std::ptr::with_exposed_provenance_mut(into), count) };
        Ok(())
    }))
}

/// What the last panic said. Its module is not used again.
static PANIC: Mutex<String> = Mutex::new(String::new());

/// Keeps what a panic says. Called once, first.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_begin() {
    std::panic::set_hook(Box::new(|panic| {
        *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = panic.to_string();
    }));
}

/// What the last panic said.
#[unsafe(no_mangle)]
pub extern "C" fn rapt_last_panic() -> u64 {
    give(PANIC.lock().unwrap_or_else(PoisonError::into_inner).as_bytes())
}
