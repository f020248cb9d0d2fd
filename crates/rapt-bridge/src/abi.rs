//! What crosses: plain integers, floats and addresses. Every bit pattern of each struct is one of its values.
//!
//! A change of anything here is a new [`VERSION`]: the two libraries are installed apart.

use std::ffi::{CStr, c_void};

/// The version of everything in this file. Libraries of two versions do not talk.
pub const VERSION: u32 = 1;

/// What an [`Interface`] is called where its address is handed on by name.
pub const NAME: &CStr = c"rapt_bridge";

/// What a function answers: 0, or one of `refusal`'s.
pub(crate) type Status = u32;

/// A tensor without its address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tensor {
    /// Dimensions, of which the rest of `shape` and `strides` is 0; `ABSENT` where there is no such tensor.
    pub(crate) rank: u32,
    /// PyTorch's export code.
    pub(crate) dtype: u32,
    pub(crate) shape: [u64; 4],
    /// In elements.
    pub(crate) strides: [i64; 4],
}

/// The rank of a tensor that is not there.
pub(crate) const ABSENT: u32 = u32::MAX;

/// A spec of dense numbers in host memory: tensors in the caller's order of dimensions, and the options.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Request {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) out: Tensor,
    pub(crate) lse: Tensor,
    pub(crate) mask: Tensor,
    pub(crate) sinks: Tensor,
    pub(crate) alibi_slopes: Tensor,
    pub(crate) softmax_scale: f64,
    /// NaN where scores are not capped.
    pub(crate) softcap: f64,
    /// 0 where that side is unbounded: any other number of keys may be meant.
    pub(crate) window: [u64; 2],
    /// Whether the sides are bounded.
    pub(crate) is_bounded: [u32; 2],
    /// 0 none, 1 top left, 2 bottom right.
    pub(crate) causal: u32,
    /// 0 bhsd, 1 bshd.
    pub(crate) layout: u32,
}

/// Where the tensors of a run lie; null where there is none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    pub(crate) q: *const u8,
    pub(crate) k: *const u8,
    pub(crate) v: *const u8,
    pub(crate) mask: *const u8,
    pub(crate) sinks: *const u8,
    pub(crate) alibi_slopes: *const u8,
    pub(crate) out: *mut u8,
    pub(crate) lse: *mut u8,
}

/// What a plan says of itself in numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Facts {
    /// A place in `Kernel::ALL`: two libraries of one version of Rapt have one list.
    pub(crate) kernel: u32,
    /// A place in `PRounding::ALL`.
    pub(crate) p_rounding: u32,
    pub(crate) kv_in_place: u32,
    /// Whether `work` is said.
    pub(crate) has_work: u32,
    pub(crate) block_m: u64,
    pub(crate) block_n: u64,
    pub(crate) num_splits: u64,
    pub(crate) items: u64,
    pub(crate) threads: u64,
    pub(crate) workspace_bytes: u64,
    pub(crate) bytes_copied: u64,
    pub(crate) bytes_packed: u64,
    /// Tasks, rows, rows of an item, keys of an item.
    pub(crate) work: [u64; 4],
    /// Blocks, their threads, their shared memory, multiprocessors; no blocks where nothing is launched.
    pub(crate) launch: [u64; 4],
    pub(crate) flops: f64,
    pub(crate) exponentials: f64,
    pub(crate) bytes_read: f64,
    pub(crate) bytes_written: f64,
    pub(crate) floor_cycles: f64,
    /// NaN where it is not known.
    pub(crate) floor_seconds: f64,
}

/// Takes texts, each of one kind: `take(context, kind, text, bytes)`. The text is UTF-8 and the taker's for the length of the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Texts {
    pub(crate) context: *mut c_void,
    pub(crate) take: unsafe extern "C" fn(*mut c_void, u32, *const u8, usize),
}

/// Kinds of texts.
pub(crate) mod text {
    /// Why a plan is as it is; of a refusal, why.
    pub(crate) const WHY: u32 = 0;
    /// Why not a faster kernel.
    pub(crate) const WHY_NOT_FASTER: u32 = 1;
    /// What is refused, or which tensor.
    pub(crate) const WHAT: u32 = 2;
    /// What to do instead.
    pub(crate) const INSTEAD: u32 = 3;
    /// An adapter's name in a report, of which its row follows as `ROW`.
    pub(crate) const NAME: u32 = 4;
    /// A row of a report.
    pub(crate) const ROW: u32 = 5;
}

/// The functions of a library that has devices. All may be called from several threads at once; none unwinds.
#[repr(C)]
pub struct Interface {
    /// [`VERSION`] of the library that has it; nothing else is looked at where it is another.
    pub(crate) version: u32,
    /// What there is, a `NAME` and a `ROW` each.
    pub(crate) report: unsafe extern "C" fn(Texts),
    /// Opens an adapter into `*device`.
    pub(crate) open: unsafe extern "C" fn(adapter: u32, device: *mut *mut c_void, texts: Texts) -> Status,
    /// Gives a device back.
    pub(crate) close: unsafe extern "C" fn(device: *mut c_void),
    /// Plans into `*plan` and says of it what `*facts` and `texts` take.
    pub(crate) plan: unsafe extern "C" fn(
        device: *const c_void,
        request: *const Request,
        plan: *mut *mut c_void,
        facts: *mut Facts,
        texts: Texts,
    ) -> Status,
    /// Gives a plan back; its device may be given back before.
    pub(crate) forget: unsafe extern "C" fn(plan: *mut c_void),
    /// Runs a plan of that device. What is refused has written nothing.
    pub(crate) run: unsafe extern "C" fn(
        device: *const c_void,
        plan: *const c_void,
        addresses: *const Addresses,
        texts: Texts,
    ) -> Status,
}
