//! The types of rapt.h, as C sees them. Numbers that C may set to anything are plain integers here: the enums name their
//! values and are never read from memory that C wrote.
//!
//! Zero is "absent" in every field of an options struct, so that a struct from before a field was there, whose `size` says
//! so, means the same as one that leaves it zero. Fields are added at the end and never moved or removed within one soname.

#![allow(non_camel_case_types, reason = "the names of rapt.h")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::OnceLock;

use engine::quant::Measured;
use engine::{Arch, COMPUTED, DType};

/// The version that this header is of: a change of it is a change of the soname.
pub const RAPT_VERSION_MAJOR: i32 = 0;
/// Before version 1, a change of it is a change of the soname too.
pub const RAPT_VERSION_MINOR: i32 = 1;
/// Fixes only.
pub const RAPT_VERSION_PATCH: i32 = 0;

/// The most dimensions that a tensor may have.
pub const RAPT_MAX_NDIM: i32 = 8;

/// What a call answers. The numbers are part of the ABI.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_error {
    /// Done.
    RAPT_OK = 0,
    /// k or v has another dtype than q, an output another one than was asked for or than the result has, or codes and
    /// their parts another one than their format.
    RAPT_ERROR_DTYPE_MISMATCH = 1,
    /// A dtype that is not served in its place, a code that is not known, or codes without a part that makes numbers of
    /// them.
    RAPT_ERROR_UNSUPPORTED_DTYPE = 2,
    /// Sizes that do not fit one another, a number of dimensions that is not served, a negative size.
    RAPT_ERROR_SHAPE = 3,
    /// Strides, storage, alignment of the data, data that is NULL, overlap of an output.
    RAPT_ERROR_LAYOUT = 4,
    /// An option, a struct's size or a number of threads outside its domain, or a part that a format of codes does not have.
    RAPT_ERROR_OPTION = 5,
    /// Tensors on different devices, or on one that is not served.
    RAPT_ERROR_DEVICE = 6,
    /// Another number of inputs or results than a program has, or a number where it has a tensor and the reverse.
    RAPT_ERROR_KIND = 7,
    /// A valid request that this build does not serve.
    RAPT_ERROR_UNSUPPORTED = 8,
    /// An argument, or a pointer in a struct, that is NULL where something is needed, or unaligned for what it leads to.
    RAPT_ERROR_POINTER = 9,
    /// Memory that could not be had, or pages that a rapt_kv_cache has not free. Nothing was written.
    RAPT_ERROR_OUT_OF_MEMORY = 10,
    /// A defect of Rapt: please report it. Outputs are unspecified, the engine serves on.
    RAPT_ERROR_INTERNAL = 11,
    /// An input of a program has another dtype than the program declares. It is never converted.
    RAPT_ERROR_DTYPE_BOUNDARY = 12,
    /// A program or its archive that cannot be read, is damaged, or contradicts itself.
    RAPT_ERROR_PROGRAM = 13,
    /// An index outside its dimension, in a program's inputs or a page table; a length or an offset that cannot be; a
    /// sequence that a cache does not have.
    RAPT_ERROR_INDEX = 14,
    /// Values of a program's inputs by which it divides an integer by zero.
    RAPT_ERROR_ZERO_DIVISION = 15,
    /// A number among new keys or values that the format of their cache does not hold, or a factor that divides nothing;
    /// a singular matrix that a program inverts or solves with.
    RAPT_ERROR_NUMBER = 16,
}

/// The dtype of a tensor's elements, by the codes of PyTorch's export schema. Attention computes F64, F32, F16 and BF16;
/// masks may also be BOOL; I8, U8, F8E4M3FN and F8E5M2 are codes, with a rapt_codes beside them. Programs have those and
/// I64, I32, I16, I8 and U8. All others are known by name and refused.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_dtype {
    /// Not stated. As `out_dtype`: that of q.
    RAPT_DTYPE_UNKNOWN = 0,
    /// uint8
    RAPT_DTYPE_U8 = 1,
    /// int8
    RAPT_DTYPE_I8 = 2,
    /// int16
    RAPT_DTYPE_I16 = 3,
    /// int32
    RAPT_DTYPE_I32 = 4,
    /// int64
    RAPT_DTYPE_I64 = 5,
    /// IEEE binary16
    RAPT_DTYPE_F16 = 6,
    /// IEEE binary32, `float`
    RAPT_DTYPE_F32 = 7,
    /// IEEE binary64, `double`
    RAPT_DTYPE_F64 = 8,
    /// two binary16
    RAPT_DTYPE_C32 = 9,
    /// two binary32
    RAPT_DTYPE_C64 = 10,
    /// two binary64
    RAPT_DTYPE_C128 = 11,
    /// one byte, 0 or 1
    RAPT_DTYPE_BOOL = 12,
    /// bfloat16, the upper half of a binary32
    RAPT_DTYPE_BF16 = 13,
    /// uint16
    RAPT_DTYPE_U16 = 28,
    /// float8_e4m3fn
    RAPT_DTYPE_F8E4M3FN = 29,
    /// float8_e5m2
    RAPT_DTYPE_F8E5M2 = 30,
    /// float8_e4m3fnuz
    RAPT_DTYPE_F8E4M3FNUZ = 31,
    /// float8_e5m2fnuz
    RAPT_DTYPE_F8E5M2FNUZ = 32,
    /// float8_e8m0fnu
    RAPT_DTYPE_F8E8M0FNU = 33,
    /// uint32
    RAPT_DTYPE_U32 = 34,
    /// uint64
    RAPT_DTYPE_U64 = 35,
}

/// Where a tensor lies, by DLPack's codes. 0 is none of them: a device is always stated.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_device {
    /// Host memory; the index is 0.
    RAPT_DEVICE_CPU = 1,
    /// An NVIDIA GPU: of the functions with cuda in their names; others refuse it by name.
    RAPT_DEVICE_CUDA = 2,
    /// An MTLBuffer of an Apple GPU, for rapt_metal_attention() alone; the index is 0.
    RAPT_DEVICE_METAL = 8,
}

/// Causal masking of query i and key j.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_causal {
    /// None.
    RAPT_CAUSAL_NONE = 0,
    /// j <= i: PyTorch's is_causal.
    RAPT_CAUSAL_TOP_LEFT = 1,
    /// j <= i + kv_len - q_len: flash-attention's causal.
    RAPT_CAUSAL_BOTTOM_RIGHT = 2,
}

/// The order of the dimensions of q, k, v and out.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_layout {
    /// [batch, heads, len, head_dim], [heads, len, head_dim] or [len, head_dim]
    RAPT_LAYOUT_BHSD = 0,
    /// [batch, len, heads, head_dim], [len, heads, head_dim] or [len, head_dim]
    RAPT_LAYOUT_BSHD = 1,
}

/// What products are formed of.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_compute {
    /// The numbers that q, k and v hold or stand for.
    RAPT_COMPUTE_EXACT = 0,
    /// An approximation: q is rounded to int8 row by row, the probabilities to 8 bits block by block. q is F32, F16 or BF16; k
    /// has codes of RAPT_FORMAT_INT8 by tensor, head or token, v by tensor, head or channel. In host memory.
    RAPT_COMPUTE_INT8 = 1,
    /// Products of float8. No device has a kernel: refused by name.
    RAPT_COMPUTE_FP8 = 2,
}

/// How the factors of blocks lie.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_scale_layout {
    /// In rows, as the codes do.
    RAPT_SCALE_LAYOUT_PLAIN = 0,
    /// As tensor cores of Blackwell read them (torch's SwizzleType.SWIZZLE_32_4_4): of each head the factors [len, blocks], padded to
    /// multiples of 128x4, reordered and flat, so that `descale` is [batch, heads, x] less the dimensions that q lacks. With
    /// RAPT_FORMAT_MXFP8, MXFP4 and NVFP4, RAPT_LAYOUT_BHSD, and no cache.
    RAPT_SCALE_LAYOUT_SWIZZLE_32_4_4 = 1,
}

/// What the codes of a quantized q, k or v are. 0 is none of them: a format is always stated. D is head_dim.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_format {
    /// I8 [.., D], two's complement; descale F32.
    RAPT_FORMAT_INT8 = 1,
    /// U8 [.., D], less a zero point; descale F32.
    RAPT_FORMAT_UINT8 = 2,
    /// 4 bits, two's complement: U8 [.., ceil(D / 2)], the lower half of a byte first; descale F32.
    RAPT_FORMAT_INT4 = 3,
    /// F8E4M3FN [.., D]; descale F32.
    RAPT_FORMAT_E4M3FN = 4,
    /// F8E5M2 [.., D]; descale F32.
    RAPT_FORMAT_E5M2 = 5,
    /// F8E4M3FN [.., D]; descale F8E8M0FNU for each 32 elements along D.
    RAPT_FORMAT_MXFP8 = 6,
    /// e2m1: U8 [.., ceil(D / 2)], the lower half of a byte first; descale F8E8M0FNU for each 32 elements along D.
    RAPT_FORMAT_MXFP4 = 7,
    /// e2m1: U8 [.., ceil(D / 2)], the lower half of a byte first; descale F8E4M3FN for each 16 elements along D, and a
    /// global scale.
    RAPT_FORMAT_NVFP4 = 8,
}

/// Which elements share a factor, and so the shape of a descale: for BHSD. In BSHD [B, H] stays, H comes after S in the
/// others. H are the heads of the operand itself. q, k and v without B or H have descales without them.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_granularity {
    /// Not stated: the shape of the descale tells it.
    RAPT_GRANULARITY_OF_SHAPE = 0,
    /// The tensor: [].
    RAPT_GRANULARITY_TENSOR = 1,
    /// A head: [B, H].
    RAPT_GRANULARITY_HEAD = 2,
    /// A row over head_dim: [B, H, S].
    RAPT_GRANULARITY_TOKEN = 3,
    /// A column over S: [B, H, 1, D].
    RAPT_GRANULARITY_CHANNEL = 4,
    /// `block_size` elements along head_dim: [B, H, S, ceil(D / block_size)].
    RAPT_GRANULARITY_BLOCK = 5,
}

/// Which numbers of rapt_options count; `given` is some of these, or-ed. A number other than 0 whose bit is missing is
/// refused: it would be ignored otherwise.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum rapt_given {
    /// `softmax_scale` counts. Without it: 1 / sqrt(head_dim).
    RAPT_GIVEN_SOFTMAX_SCALE = 1,
    /// `softcap` counts. Without it: none.
    RAPT_GIVEN_SOFTCAP = 2,
    /// `window_left` counts. Without it: unbounded.
    RAPT_GIVEN_WINDOW_LEFT = 4,
    /// `window_right` counts. Without it: unbounded.
    RAPT_GIVEN_WINDOW_RIGHT = 8,
}

/// Where a tensor lies. Nothing is owned and nothing is kept: the struct, both arrays and the memory must live for the
/// one call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_tensor {
    /// The element with index 0; a multiple of the element's size. May be NULL if the tensor has no element.
    pub data: *mut c_void,
    /// A rapt_dtype.
    pub dtype: i32,
    /// A rapt_device.
    pub device: i32,
    /// Which device of its kind; 0 for host memory.
    pub device_index: i32,
    /// The number of dimensions.
    pub ndim: i32,
    /// `ndim` sizes, outermost first.
    pub shape: *const i64,
    /// `ndim` strides in elements, outermost first, of any sign; 0 repeats an element of an input.
    pub strides: *const i64,
    /// The length of the allocation that the tensor lies in: then no call leaves it, whatever shape and strides say.
    /// 0 or -1: not told, and shape and strides are taken at their word.
    pub storage_bytes: i64,
    /// The first byte of that allocation; NULL: it begins at `data`. Read only if `storage_bytes` is told.
    pub storage: *const c_void,
}

/// What makes numbers of a quantized q, k or v, or of a cache, whose rapt_tensor has the codes:
/// (code - zero_point) * descale * global_scale. Nothing is assumed for a part that is missing.
///
/// Nothing is owned and nothing is kept, as with a rapt_tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_codes {
    /// sizeof(rapt_codes), by which later versions know which fields there are.
    pub size: usize,
    /// A rapt_format.
    pub format: i32,
    /// A rapt_granularity. Where it is stated, the shape of `descale` must be that of it.
    pub granularity: i32,
    /// Elements that share a factor, with RAPT_GRANULARITY_BLOCK; else 0. Without it a size n of `descale` along
    /// head_dim divides head_dim, and a block has head_dim / n.
    pub block_size: i64,
    /// Elements of a row, where two codes share a byte and the row is odd. 0: as many as the tensor of codes holds.
    pub head_dim: i64,
    /// The factors, of the dtype that `format` says and a shape of rapt_granularity; of any strides. Never NULL.
    pub descale: *const rapt_tensor,
    /// What is subtracted from a code: U8, of the shape of `descale`; of any strides. With RAPT_FORMAT_UINT8 and no
    /// other; NULL: none.
    pub zero_point: *const rapt_tensor,
    /// One more factor for the whole tensor. With RAPT_FORMAT_NVFP4 and no other; NULL: none.
    pub global_scale: *const f32,
    /// A rapt_scale_layout.
    pub scale_layout: i32,
}

/// What may be asked besides q, k, v and out. `{.size = sizeof(rapt_options)}` is plain attention.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_options {
    /// sizeof(rapt_options), by which later versions know which fields there are.
    pub size: usize,
    /// Which of the four numbers count: some of rapt_given.
    pub given: u32,
    /// A rapt_causal.
    pub causal: i32,
    /// A rapt_layout.
    pub layout: i32,
    /// The dtype that `out` has, if it is not that of q, or q has codes; else RAPT_DTYPE_UNKNOWN.
    pub out_dtype: i32,
    /// The factor of q·k: any finite number.
    pub softmax_scale: f64,
    /// Scores become c * tanh(score / c): finite and above 0.
    pub softcap: f64,
    /// Keys before the diagonal that are seen.
    pub window_left: i64,
    /// Keys after the diagonal that are seen.
    pub window_right: i64,
    /// BOOL (true = attend) or additive; broadcasts to [batch, num_q_heads, q_len, kv_len]. NULL: none.
    pub mask: *const rapt_tensor,
    /// [num_q_heads]: one more logit per head in the denominator. NULL: none.
    pub sinks: *const rapt_tensor,
    /// [num_q_heads]: ALiBi slopes. NULL: none.
    pub alibi_slopes: *const rapt_tensor,
    /// [batch, num_q_heads, q_len] less the dimensions that q lacks; F32, or F64 for F64: is written. NULL: not asked.
    pub lse: *const rapt_tensor,
    /// What makes numbers of q, if its tensor has codes; `out_dtype` is then stated. NULL: q has numbers.
    pub q_codes: *const rapt_codes,
    /// What makes numbers of k, if its tensor has codes. NULL: k has numbers.
    pub k_codes: *const rapt_codes,
    /// What makes numbers of v, if its tensor has codes. NULL: v has numbers.
    pub v_codes: *const rapt_codes,
    /// How far heads on codes may be from those on the originals. NULL: any distance.
    pub tolerance: *const rapt_tolerance,
    /// A rapt_compute.
    pub compute: i32,
    /// The probability that a weight is dropped, 0 to 1; 0: none is. Those kept are scaled by 1 / (1 - dropout_p).
    pub dropout_p: f64,
    /// With `dropout_offset`, which weights are dropped: the same two numbers drop the same ones. Without `dropout_p` both are 0.
    pub dropout_seed: u64,
    /// See `dropout_seed`.
    pub dropout_offset: u64,
    /// Seed and offset, 2 numbers in memory of q's NVIDIA GPU, in place of `dropout_seed` and `dropout_offset`, which are then 0: read when the call runs,
    /// so that replays of a CUDA graph drop what they find. They stay there until then. NULL: the two numbers above.
    pub dropout_draw: *const u64,
}

/// Attention on tensors in buffers of Metal's; see rapt_metal_create().
pub struct rapt_metal {
    #[cfg(all(target_os = "macos", feature = "metal"))]
    pub(crate) buffers: engine::metal::Buffers<engine::metal::MetalQueue>,
    /// There is none.
    #[cfg(not(all(target_os = "macos", feature = "metal")))]
    pub(crate) none: std::convert::Infallible,
}

/// How far the numbers of codes lie from those that they were made of; see rapt_measured_create().
pub struct rapt_measured {
    pub(crate) measured: Measured,
}

/// How far the heads of an output may be from those on what k and v were made of. With rapt_attention() and rapt_explain(), layout
/// BHSD and q in numbers; one of k and v has codes at least.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_tolerance {
    /// sizeof(rapt_tolerance), by which later versions know which fields there are.
    pub size: usize,
    /// The relative L2 of a head: finite and above 0. Heads whose estimated error is larger are computed on the originals.
    pub limit: f64,
    /// What was measured of k when its codes were made. NULL only if k has numbers.
    pub k_measured: *const rapt_measured,
    /// What was measured of v, likewise.
    pub v_measured: *const rapt_measured,
    /// What the codes of k were made of, of its sizes and the dtype of q; of any strides. NULL: not at hand.
    pub k_original: *const rapt_tensor,
    /// What the codes of v were made of, likewise.
    pub v_original: *const rapt_tensor,
    /// Is written: what came of it. NULL: not asked.
    pub judgement: *mut rapt_judgement,
}

/// What a rapt_tolerance came to. The worst are those of all heads.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_judgement {
    /// sizeof(rapt_judgement), set by the caller.
    pub size: usize,
    /// Query heads on the codes.
    pub quantized: usize,
    /// Query heads on the originals; of rapt_explain() also those that would have to be, where these are not at hand.
    pub fell_back: usize,
    /// The largest estimate, in relative L2; infinite where it is no shorter than the output.
    pub worst_estimate: f64,
    /// The largest rigorous bound, likewise.
    pub worst_bound: f64,
    /// The most by which a score may be off; a head with 1 or more falls back.
    pub worst_epsilon: f64,
}

/// Gradients: what arrives besides `d_o`, and which are asked for. Nothing is owned and nothing is kept, as with a rapt_tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_gradients {
    /// sizeof(rapt_gradients), by which later versions know which fields there are.
    pub size: usize,
    /// The gradient by lse, of its sizes and dtype. NULL: 0.
    pub d_lse: *const rapt_tensor,
    /// By q, of its sizes and dtype: is written. NULL: not asked.
    pub dq: *const rapt_tensor,
    /// By k, likewise: summed over the query heads of its group.
    pub dk: *const rapt_tensor,
    /// By v, likewise.
    pub dv: *const rapt_tensor,
    /// By an additive mask, likewise: summed over what the mask is broadcast to.
    pub d_mask: *const rapt_tensor,
    /// By the sinks, likewise: [num_q_heads].
    pub d_sinks: *const rapt_tensor,
}

/// Where a call on an NVIDIA GPU is enqueued. Nothing is owned and nothing is kept, as with a rapt_tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_cuda_queue {
    /// sizeof(rapt_cuda_queue), by which later versions know which fields there are.
    pub size: usize,
    /// A CUstream, which a cudaStream_t is, of the device of the tensors. NULL: its default stream.
    pub stream: *mut c_void,
    /// Memory of that device for scratch, at a multiple of 16, that no other stream uses meanwhile. NULL where none is needed.
    pub workspace: *mut c_void,
    /// Its length.
    pub workspace_bytes: usize,
    /// Is written: the bytes of scratch memory that the call needs, and nothing runs. NULL: the call runs.
    pub needed_bytes: *mut usize,
}

/// A cache of keys and values, and what a call appends to it. Nothing is owned and nothing is kept, as with a rapt_tensor.
/// Of codes in it, `k_codes` and `v_codes` of rapt_options say what makes numbers of them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_kvcache {
    /// sizeof(rapt_kvcache), by which later versions know which fields there are.
    pub size: usize,
    /// [batch, most keys, num_kv_heads, head_dim], or pages [num_pages, page_size, num_kv_heads, head_dim]. Never NULL.
    pub k_cache: *const rapt_tensor,
    /// Likewise, with a head_dim of its own. It may lie in the memory of `k_cache` without a `v`, or where each value is the first numbers
    /// of its key, here and in `k` and `v`: these are then written once. Never NULL.
    pub v_cache: *const rapt_tensor,
    /// The keys of each sequence before the new ones: I32 [batch]. NULL: all that a cache without pages has room for.
    pub cache_seqlens: *const rapt_tensor,
    /// The pages of each sequence in the order of its keys: I32 [batch, entries]. NULL: the cache has no pages.
    pub page_table: *const rapt_tensor,
    /// New keys, [batch, new, num_kv_heads, head_dim], to be written behind those of each sequence. NULL: none.
    pub k: *const rapt_tensor,
    /// New values, likewise. NULL: none, or those of the new keys lie in `k_cache`.
    pub v: *const rapt_tensor,
}

/// What a rapt_kv_cache holds; see rapt_kv_cache_create().
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_kv_cache_form {
    /// sizeof(rapt_kv_cache_form), by which later versions know which fields there are.
    pub size: usize,
    /// Pages of all sequences together. num_pages * page_size is at most 2^31 - 1.
    pub num_pages: i64,
    /// Keys of a page.
    pub page_size: i64,
    /// Heads of a key.
    pub num_kv_heads: i64,
    /// Elements of a key's head.
    pub head_dim: i64,
    /// Elements of a value's head; 0: as many as of a key's.
    pub head_dim_v: i64,
    /// The rapt_dtype of keys and values that are not codes: F64, F32, F16 or BF16. RAPT_DTYPE_UNKNOWN where both are codes.
    pub dtype: i32,
    /// Keys become codes: `format`, and where they are of it `granularity` (by token, which is also 0, or by block),
    /// `block_size` and `global_scale`. All else is 0 and NULL: factors and zero points are the cache's. NULL: numbers.
    pub k_codes: *const rapt_codes,
    /// Values become codes, likewise.
    pub v_codes: *const rapt_codes,
}

/// The memory of a rapt_kv_cache, as rapt_kvcache and rapt_options take it; see rapt_kv_cache_get_pages(). What it leads to
/// lives as long as the cache.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_kv_cache_pages {
    /// sizeof(rapt_kv_cache_pages), set by the caller.
    pub size: usize,
    /// Keys, or their codes: [num_pages, page_size, num_kv_heads, head_dim], row-major; two codes of 4 bits share a byte.
    pub k_cache: *const rapt_tensor,
    /// Values, or their codes.
    pub v_cache: *const rapt_tensor,
    /// What makes numbers of the codes of keys; `descale` is [num_pages, page_size, num_kv_heads], by block with the number of
    /// blocks behind it. NULL where keys are numbers.
    pub k_codes: *const rapt_codes,
    /// What makes numbers of the codes of values.
    pub v_codes: *const rapt_codes,
}

/// What an engine runs on. Strings and arrays live as long as the library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_capabilities {
    /// sizeof(rapt_capabilities), set by the caller.
    pub size: usize,
    /// Threads of the engine.
    pub threads: i32,
    /// The length of `dtypes`.
    pub num_dtypes: i32,
    /// The dtypes that attention computes.
    pub dtypes: *const i32,
    /// The instruction set in use: "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon" or "neon_bf16".
    pub isa: *const c_char,
    /// Those of this machine that this build has kernels for, best last, parted by spaces.
    pub isas: *const c_char,
}

/// An input or a result of a program. Strings and arrays live as long as the model.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rapt_port {
    /// sizeof(rapt_port), set by the caller.
    pub size: usize,
    /// How it is reached in the call of the exported model, such as "past[0]" or "output['logits']".
    pub name: *const c_char,
    /// The rapt_dtype of a tensor; RAPT_DTYPE_UNKNOWN for what is no tensor but a number or None.
    pub dtype: i32,
    /// The number of dimensions; 0 for what is no tensor.
    pub ndim: i32,
    /// 1 for an input whose content a call changes, else 0.
    pub is_written: i32,
    /// 1 if a size varies from call to call, else 0.
    pub is_dynamic: i32,
    /// `ndim` sizes; -1 for one that varies.
    pub shape: *const i64,
    /// `ndim` sizes in words: numbers, and expressions over the program's symbols, such as "2*s0".
    pub sizes: *const *const c_char,
}

/// The dtypes that attention computes, by code.
pub(crate) static DTYPES: [i32; COMPUTED.len()] = {
    let mut codes = [0; COMPUTED.len()];
    let mut n = 0;
    while n < codes.len() {
        codes[n] = COMPUTED[n].code() as i32;
        n += 1;
    }
    codes
};

fn text(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

/// The name of a dtype, by code.
pub(crate) fn dtype_name(code: i32) -> Option<&'static CStr> {
    static NAMES: OnceLock<Vec<(i32, CString)>> = OnceLock::new();
    let names =
        NAMES.get_or_init(|| DType::ALL.iter().map(|dtype| (dtype.code().into(), text(dtype.name()))).collect());
    names.iter().find(|(of, _)| *of == code).map(|(_, name)| name.as_c_str())
}

/// The name of an instruction set.
pub(crate) fn isa_name(isa: Arch) -> &'static CStr {
    static NAMES: OnceLock<Vec<(Arch, CString)>> = OnceLock::new();
    let names = NAMES.get_or_init(|| engine::available_isas().iter().map(|isa| (*isa, text(isa.name()))).collect());
    names.iter().find(|(of, _)| *of == isa).map_or(c"unknown", |(_, name)| name.as_c_str())
}

/// The names of the instruction sets of this machine.
pub(crate) fn isa_names() -> &'static CStr {
    static NAMES: OnceLock<CString> = OnceLock::new();
    NAMES.get_or_init(|| text(&engine::available_isas().iter().map(|isa| isa.name()).collect::<Vec<_>>().join(" ")))
}
