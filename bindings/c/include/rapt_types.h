// The types of rapt.h, which includes this file.

#ifndef RAPT_TYPES_H
#define RAPT_TYPES_H

// Written by cbindgen from bindings/c/src; bindings/c/tests/abi/header.rs compares them.

#include <stddef.h>
#include <stdint.h>

// The version that this header is of: a change of it is a change of the soname.
#define RAPT_VERSION_MAJOR 0

// Before version 1, a change of it is a change of the soname too.
#define RAPT_VERSION_MINOR 1

// Fixes only.
#define RAPT_VERSION_PATCH 0

// The most dimensions that a tensor may have.
#define RAPT_MAX_NDIM 8

// What a call answers. The numbers are part of the ABI.
enum rapt_error
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done.
  RAPT_OK = 0,
  // k or v has another dtype than q, an output another one than was asked for or than the result has, or codes and
  // their parts another one than their format.
  RAPT_ERROR_DTYPE_MISMATCH = 1,
  // A dtype that is not served in its place, a code that is not known, or codes without a part that makes numbers of
  // them.
  RAPT_ERROR_UNSUPPORTED_DTYPE = 2,
  // Sizes that do not fit one another, a number of dimensions that is not served, a negative size.
  RAPT_ERROR_SHAPE = 3,
  // Strides, storage, alignment of the data, data that is NULL, overlap of an output.
  RAPT_ERROR_LAYOUT = 4,
  // An option, a struct's size or a number of threads outside its domain, or a part that a format of codes does not have.
  RAPT_ERROR_OPTION = 5,
  // Tensors on different devices, or on one that is not served.
  RAPT_ERROR_DEVICE = 6,
  // Another number of inputs or results than a program has, or a number where it has a tensor and the reverse.
  RAPT_ERROR_KIND = 7,
  // A valid request that this build does not serve.
  RAPT_ERROR_UNSUPPORTED = 8,
  // An argument, or a pointer in a struct, that is NULL where something is needed, or unaligned for what it leads to.
  RAPT_ERROR_POINTER = 9,
  // Memory that could not be had, or pages that a rapt_kv_cache has not free. Nothing was written.
  RAPT_ERROR_OUT_OF_MEMORY = 10,
  // A defect of Rapt: please report it. Outputs are unspecified, the engine serves on.
  RAPT_ERROR_INTERNAL = 11,
  // An input of a program has another dtype than the program declares. It is never converted.
  RAPT_ERROR_DTYPE_BOUNDARY = 12,
  // A program or its archive that cannot be read, is damaged, or contradicts itself.
  RAPT_ERROR_PROGRAM = 13,
  // An index outside its dimension, in a program's inputs or a page table; a length or an offset that cannot be; a
  // sequence that a cache does not have.
  RAPT_ERROR_INDEX = 14,
  // Values of a program's inputs by which it divides an integer by zero.
  RAPT_ERROR_ZERO_DIVISION = 15,
  // A number among new keys or values that the format of their cache does not hold, or a factor that divides nothing;
  // a singular matrix that a program inverts or solves with.
  RAPT_ERROR_NUMBER = 16,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_error rapt_error;
#else
typedef int32_t rapt_error;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The dtype of a tensor's elements, by the codes of PyTorch's export schema. Attention computes F64, F32, F16 and BF16;
// masks may also be BOOL; I8, U8, F8E4M3FN and F8E5M2 are codes, with a rapt_codes beside them. Programs have those and
// I64, I32, I16, I8 and U8. All others are known by name and refused.
enum rapt_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Not stated. As `out_dtype`: that of q.
  RAPT_DTYPE_UNKNOWN = 0,
  // uint8
  RAPT_DTYPE_U8 = 1,
  // int8
  RAPT_DTYPE_I8 = 2,
  // int16
  RAPT_DTYPE_I16 = 3,
  // int32
  RAPT_DTYPE_I32 = 4,
  // int64
  RAPT_DTYPE_I64 = 5,
  // IEEE binary16
  RAPT_DTYPE_F16 = 6,
  // IEEE binary32, `float`
  RAPT_DTYPE_F32 = 7,
  // IEEE binary64, `double`
  RAPT_DTYPE_F64 = 8,
  // two binary16
  RAPT_DTYPE_C32 = 9,
  // two binary32
  RAPT_DTYPE_C64 = 10,
  // two binary64
  RAPT_DTYPE_C128 = 11,
  // one byte, 0 or 1
  RAPT_DTYPE_BOOL = 12,
  // bfloat16, the upper half of a binary32
  RAPT_DTYPE_BF16 = 13,
  // uint16
  RAPT_DTYPE_U16 = 28,
  // float8_e4m3fn
  RAPT_DTYPE_F8E4M3FN = 29,
  // float8_e5m2
  RAPT_DTYPE_F8E5M2 = 30,
  // float8_e4m3fnuz
  RAPT_DTYPE_F8E4M3FNUZ = 31,
  // float8_e5m2fnuz
  RAPT_DTYPE_F8E5M2FNUZ = 32,
  // float8_e8m0fnu
  RAPT_DTYPE_F8E8M0FNU = 33,
  // uint32
  RAPT_DTYPE_U32 = 34,
  // uint64
  RAPT_DTYPE_U64 = 35,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_dtype rapt_dtype;
#else
typedef int32_t rapt_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Where a tensor lies, by DLPack's codes. 0 is none of them: a device is always stated.
enum rapt_device
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Host memory; the index is 0.
  RAPT_DEVICE_CPU = 1,
  // An NVIDIA GPU: of the functions with cuda in their names; others refuse it by name.
  RAPT_DEVICE_CUDA = 2,
  // An MTLBuffer of an Apple GPU, for rapt_metal_attention() alone; the index is 0.
  RAPT_DEVICE_METAL = 8,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_device rapt_device;
#else
typedef int32_t rapt_device;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Causal masking of query i and key j.
enum rapt_causal
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // None.
  RAPT_CAUSAL_NONE = 0,
  // j <= i: PyTorch's is_causal.
  RAPT_CAUSAL_TOP_LEFT = 1,
  // j <= i + kv_len - q_len: flash-attention's causal.
  RAPT_CAUSAL_BOTTOM_RIGHT = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_causal rapt_causal;
#else
typedef int32_t rapt_causal;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The order of the dimensions of q, k, v and out.
enum rapt_layout
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // [batch, heads, len, head_dim], [heads, len, head_dim] or [len, head_dim]
  RAPT_LAYOUT_BHSD = 0,
  // [batch, len, heads, head_dim], [len, heads, head_dim] or [len, head_dim]
  RAPT_LAYOUT_BSHD = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_layout rapt_layout;
#else
typedef int32_t rapt_layout;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which numbers of rapt_options count; `given` is some of these, or-ed. A number other than 0 whose bit is missing is
// refused: it would be ignored otherwise.
enum rapt_given
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // `softmax_scale` counts. Without it: 1 / sqrt(head_dim).
  RAPT_GIVEN_SOFTMAX_SCALE = 1,
  // `softcap` counts. Without it: none.
  RAPT_GIVEN_SOFTCAP = 2,
  // `window_left` counts. Without it: unbounded.
  RAPT_GIVEN_WINDOW_LEFT = 4,
  // `window_right` counts. Without it: unbounded.
  RAPT_GIVEN_WINDOW_RIGHT = 8,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_given rapt_given;
#else
typedef uint32_t rapt_given;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What the codes of a quantized q, k or v are. 0 is none of them: a format is always stated. D is head_dim.
enum rapt_format
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // I8 [.., D], two's complement; descale F32.
  RAPT_FORMAT_INT8 = 1,
  // U8 [.., D], less a zero point; descale F32.
  RAPT_FORMAT_UINT8 = 2,
  // 4 bits, two's complement: U8 [.., ceil(D / 2)], the lower half of a byte first; descale F32.
  RAPT_FORMAT_INT4 = 3,
  // F8E4M3FN [.., D]; descale F32.
  RAPT_FORMAT_E4M3FN = 4,
  // F8E5M2 [.., D]; descale F32.
  RAPT_FORMAT_E5M2 = 5,
  // F8E4M3FN [.., D]; descale F8E8M0FNU for each 32 elements along D.
  RAPT_FORMAT_MXFP8 = 6,
  // e2m1: U8 [.., ceil(D / 2)], the lower half of a byte first; descale F8E8M0FNU for each 32 elements along D.
  RAPT_FORMAT_MXFP4 = 7,
  // e2m1: U8 [.., ceil(D / 2)], the lower half of a byte first; descale F8E4M3FN for each 16 elements along D, and a
  // global scale.
  RAPT_FORMAT_NVFP4 = 8,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_format rapt_format;
#else
typedef int32_t rapt_format;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which elements share a factor, and so the shape of a descale: for BHSD. In BSHD [B, H] stays, H comes after S in the
// others. H are the heads of the operand itself. q, k and v without B or H have descales without them.
enum rapt_granularity
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Not stated: the shape of the descale tells it.
  RAPT_GRANULARITY_OF_SHAPE = 0,
  // The tensor: [].
  RAPT_GRANULARITY_TENSOR = 1,
  // A head: [B, H].
  RAPT_GRANULARITY_HEAD = 2,
  // A row over head_dim: [B, H, S].
  RAPT_GRANULARITY_TOKEN = 3,
  // A column over S: [B, H, 1, D].
  RAPT_GRANULARITY_CHANNEL = 4,
  // `block_size` elements along head_dim: [B, H, S, ceil(D / block_size)].
  RAPT_GRANULARITY_BLOCK = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_granularity rapt_granularity;
#else
typedef int32_t rapt_granularity;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What products are formed of.
enum rapt_compute
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The numbers that q, k and v hold or stand for.
  RAPT_COMPUTE_EXACT = 0,
  // An approximation: q is rounded to int8 row by row, the probabilities to 8 bits block by block. q is F32, F16 or BF16; k
  // has codes of RAPT_FORMAT_INT8 by tensor, head or token, v by tensor, head or channel. In host memory.
  RAPT_COMPUTE_INT8 = 1,
  // Products of float8. No device has a kernel: refused by name.
  RAPT_COMPUTE_FP8 = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_compute rapt_compute;
#else
typedef int32_t rapt_compute;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How the factors of blocks lie.
enum rapt_scale_layout
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // In rows, as the codes do.
  RAPT_SCALE_LAYOUT_PLAIN = 0,
  // As tensor cores of Blackwell read them (torch's SwizzleType.SWIZZLE_32_4_4): of each head the factors [len, blocks], padded to
  // multiples of 128x4, reordered and flat, so that `descale` is [batch, heads, x] less the dimensions that q lacks. With
  // RAPT_FORMAT_MXFP8, MXFP4 and NVFP4, RAPT_LAYOUT_BHSD, and no cache.
  RAPT_SCALE_LAYOUT_SWIZZLE_32_4_4 = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum rapt_scale_layout rapt_scale_layout;
#else
typedef int32_t rapt_scale_layout;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A model for inputs of given sizes; see rapt_model_bind().
typedef struct rapt_bound rapt_bound;

// Threads, scratch memory and a cache of plans; see rapt_engine_create().
typedef struct rapt_engine rapt_engine;

// Keys and values of many sequences, in pages that it owns; see rapt_kv_cache_create().
typedef struct rapt_kv_cache rapt_kv_cache;

// How far the numbers of codes lie from those that they were made of; see rapt_measured_create().
typedef struct rapt_measured rapt_measured;

// Attention on tensors in buffers of Metal's; see rapt_metal_create().
typedef struct rapt_metal rapt_metal;

// An exported program, ready to run; see rapt_model_open().
typedef struct rapt_model rapt_model;

// Calls of a model that share what it keeps; see rapt_session_create().
typedef struct rapt_session rapt_session;

// What an engine runs on. Strings and arrays live as long as the library.
typedef struct rapt_capabilities {
  // sizeof(rapt_capabilities), set by the caller.
  size_t size;
  // Threads of the engine.
  int32_t threads;
  // The length of `dtypes`.
  int32_t num_dtypes;
  // The dtypes that attention computes.
  const int32_t *dtypes;
  // The instruction set in use: "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon" or "neon_bf16".
  const char *isa;
  // Those of this machine that this build has kernels for, best last, parted by spaces.
  const char *isas;
} rapt_capabilities;

// Where a tensor lies. Nothing is owned and nothing is kept: the struct, both arrays and the memory must live for the
// one call.
typedef struct rapt_tensor {
  // The element with index 0; a multiple of the element's size. May be NULL if the tensor has no element.
  void *data;
  // A rapt_dtype.
  int32_t dtype;
  // A rapt_device.
  int32_t device;
  // Which device of its kind; 0 for host memory.
  int32_t device_index;
  // The number of dimensions.
  int32_t ndim;
  // `ndim` sizes, outermost first.
  const int64_t *shape;
  // `ndim` strides in elements, outermost first, of any sign; 0 repeats an element of an input.
  const int64_t *strides;
  // The length of the allocation that the tensor lies in: then no call leaves it, whatever shape and strides say.
  // 0 or -1: not told, and shape and strides are taken at their word.
  int64_t storage_bytes;
  // The first byte of that allocation; NULL: it begins at `data`. Read only if `storage_bytes` is told.
  const void *storage;
} rapt_tensor;

// What makes numbers of a quantized q, k or v, or of a cache, whose rapt_tensor has the codes:
// (code - zero_point) * descale * global_scale. Nothing is assumed for a part that is missing.
//
// Nothing is owned and nothing is kept, as with a rapt_tensor.
typedef struct rapt_codes {
  // sizeof(rapt_codes), by which later versions know which fields there are.
  size_t size;
  // A rapt_format.
  int32_t format;
  // A rapt_granularity. Where it is stated, the shape of `descale` must be that of it.
  int32_t granularity;
  // Elements that share a factor, with RAPT_GRANULARITY_BLOCK; else 0. Without it a size n of `descale` along
  // head_dim divides head_dim, and a block has head_dim / n.
  int64_t block_size;
  // Elements of a row, where two codes share a byte and the row is odd. 0: as many as the tensor of codes holds.
  int64_t head_dim;
  // The factors, of the dtype that `format` says and a shape of rapt_granularity; of any strides. Never NULL.
  const struct rapt_tensor *descale;
  // What is subtracted from a code: U8, of the shape of `descale`; of any strides. With RAPT_FORMAT_UINT8 and no
  // other; NULL: none.
  const struct rapt_tensor *zero_point;
  // One more factor for the whole tensor. With RAPT_FORMAT_NVFP4 and no other; NULL: none.
  const float *global_scale;
  // A rapt_scale_layout.
  int32_t scale_layout;
} rapt_codes;

// What a rapt_tolerance came to. The worst are those of all heads.
typedef struct rapt_judgement {
  // sizeof(rapt_judgement), set by the caller.
  size_t size;
  // Query heads on the codes.
  size_t quantized;
  // Query heads on the originals; of rapt_explain() also those that would have to be, where these are not at hand.
  size_t fell_back;
  // The largest estimate, in relative L2; infinite where it is no shorter than the output.
  double worst_estimate;
  // The largest rigorous bound, likewise.
  double worst_bound;
  // The most by which a score may be off; a head with 1 or more falls back.
  double worst_epsilon;
} rapt_judgement;

// How far the heads of an output may be from those on what k and v were made of. With rapt_attention() and rapt_explain(), layout
// BHSD and q in numbers; one of k and v has codes at least.
typedef struct rapt_tolerance {
  // sizeof(rapt_tolerance), by which later versions know which fields there are.
  size_t size;
  // The relative L2 of a head: finite and above 0. Heads whose estimated error is larger are computed on the originals.
  double limit;
  // What was measured of k when its codes were made. NULL only if k has numbers.
  const struct rapt_measured *k_measured;
  // What was measured of v, likewise.
  const struct rapt_measured *v_measured;
  // What the codes of k were made of, of its sizes and the dtype of q; of any strides. NULL: not at hand.
  const struct rapt_tensor *k_original;
  // What the codes of v were made of, likewise.
  const struct rapt_tensor *v_original;
  // Is written: what came of it. NULL: not asked.
  struct rapt_judgement *judgement;
} rapt_tolerance;

// What may be asked besides q, k, v and out. `{.size = sizeof(rapt_options)}` is plain attention.
typedef struct rapt_options {
  // sizeof(rapt_options), by which later versions know which fields there are.
  size_t size;
  // Which of the four numbers count: some of rapt_given.
  uint32_t given;
  // A rapt_causal.
  int32_t causal;
  // A rapt_layout.
  int32_t layout;
  // The dtype that `out` has, if it is not that of q, or q has codes; else RAPT_DTYPE_UNKNOWN.
  int32_t out_dtype;
  // The factor of q·k: any finite number.
  double softmax_scale;
  // Scores become c * tanh(score / c): finite and above 0.
  double softcap;
  // Keys before the diagonal that are seen.
  int64_t window_left;
  // Keys after the diagonal that are seen.
  int64_t window_right;
  // BOOL (true = attend) or additive; broadcasts to [batch, num_q_heads, q_len, kv_len]. NULL: none.
  const struct rapt_tensor *mask;
  // [num_q_heads]: one more logit per head in the denominator. NULL: none.
  const struct rapt_tensor *sinks;
  // [num_q_heads]: ALiBi slopes. NULL: none.
  const struct rapt_tensor *alibi_slopes;
  // [batch, num_q_heads, q_len] less the dimensions that q lacks; F32, or F64 for F64: is written. NULL: not asked.
  const struct rapt_tensor *lse;
  // What makes numbers of q, if its tensor has codes; `out_dtype` is then stated. NULL: q has numbers.
  const struct rapt_codes *q_codes;
  // What makes numbers of k, if its tensor has codes. NULL: k has numbers.
  const struct rapt_codes *k_codes;
  // What makes numbers of v, if its tensor has codes. NULL: v has numbers.
  const struct rapt_codes *v_codes;
  // How far heads on codes may be from those on the originals. NULL: any distance.
  const struct rapt_tolerance *tolerance;
  // A rapt_compute.
  int32_t compute;
  // The probability that a weight is dropped, 0 to 1; 0: none is. Those kept are scaled by 1 / (1 - dropout_p).
  double dropout_p;
  // With `dropout_offset`, which weights are dropped: the same two numbers drop the same ones. Without `dropout_p` both are 0.
  uint64_t dropout_seed;
  // See `dropout_seed`.
  uint64_t dropout_offset;
  // Seed and offset, 2 numbers in memory of q's NVIDIA GPU, in place of `dropout_seed` and `dropout_offset`, which are then 0: read when the call runs,
  // so that replays of a CUDA graph drop what they find. They stay there until then. NULL: the two numbers above.
  const uint64_t *dropout_draw;
} rapt_options;

// Gradients: what arrives besides `d_o`, and which are asked for. Nothing is owned and nothing is kept, as with a rapt_tensor.
typedef struct rapt_gradients {
  // sizeof(rapt_gradients), by which later versions know which fields there are.
  size_t size;
  // The gradient by lse, of its sizes and dtype. NULL: 0.
  const struct rapt_tensor *d_lse;
  // By q, of its sizes and dtype: is written. NULL: not asked.
  const struct rapt_tensor *dq;
  // By k, likewise: summed over the query heads of its group.
  const struct rapt_tensor *dk;
  // By v, likewise.
  const struct rapt_tensor *dv;
  // By an additive mask, likewise: summed over what the mask is broadcast to.
  const struct rapt_tensor *d_mask;
  // By the sinks, likewise: [num_q_heads].
  const struct rapt_tensor *d_sinks;
} rapt_gradients;

// Where a call on an NVIDIA GPU is enqueued. Nothing is owned and nothing is kept, as with a rapt_tensor.
typedef struct rapt_cuda_queue {
  // sizeof(rapt_cuda_queue), by which later versions know which fields there are.
  size_t size;
  // A CUstream, which a cudaStream_t is, of the device of the tensors. NULL: its default stream.
  void *stream;
  // Memory of that device for scratch, at a multiple of 16, that no other stream uses meanwhile. NULL where none is needed.
  void *workspace;
  // Its length.
  size_t workspace_bytes;
  // Is written: the bytes of scratch memory that the call needs, and nothing runs. NULL: the call runs.
  size_t *needed_bytes;
} rapt_cuda_queue;

// What a rapt_kv_cache holds; see rapt_kv_cache_create().
typedef struct rapt_kv_cache_form {
  // sizeof(rapt_kv_cache_form), by which later versions know which fields there are.
  size_t size;
  // Pages of all sequences together. num_pages * page_size is at most 2^31 - 1.
  int64_t num_pages;
  // Keys of a page.
  int64_t page_size;
  // Heads of a key.
  int64_t num_kv_heads;
  // Elements of a key's head.
  int64_t head_dim;
  // Elements of a value's head; 0: as many as of a key's.
  int64_t head_dim_v;
  // The rapt_dtype of keys and values that are not codes: F64, F32, F16 or BF16. RAPT_DTYPE_UNKNOWN where both are codes.
  int32_t dtype;
  // Keys become codes: `format`, and where they are of it `granularity` (by token, which is also 0, or by block),
  // `block_size` and `global_scale`. All else is 0 and NULL: factors and zero points are the cache's. NULL: numbers.
  const struct rapt_codes *k_codes;
  // Values become codes, likewise.
  const struct rapt_codes *v_codes;
} rapt_kv_cache_form;

// The memory of a rapt_kv_cache, as rapt_kvcache and rapt_options take it; see rapt_kv_cache_get_pages(). What it leads to
// lives as long as the cache.
typedef struct rapt_kv_cache_pages {
  // sizeof(rapt_kv_cache_pages), set by the caller.
  size_t size;
  // Keys, or their codes: [num_pages, page_size, num_kv_heads, head_dim], row-major; two codes of 4 bits share a byte.
  const struct rapt_tensor *k_cache;
  // Values, or their codes.
  const struct rapt_tensor *v_cache;
  // What makes numbers of the codes of keys; `descale` is [num_pages, page_size, num_kv_heads], by block with the number of
  // blocks behind it. NULL where keys are numbers.
  const struct rapt_codes *k_codes;
  // What makes numbers of the codes of values.
  const struct rapt_codes *v_codes;
} rapt_kv_cache_pages;

// An input or a result of a program. Strings and arrays live as long as the model.
typedef struct rapt_port {
  // sizeof(rapt_port), set by the caller.
  size_t size;
  // How it is reached in the call of the exported model, such as "past[0]" or "output['logits']".
  const char *name;
  // The rapt_dtype of a tensor; RAPT_DTYPE_UNKNOWN for what is no tensor but a number or None.
  int32_t dtype;
  // The number of dimensions; 0 for what is no tensor.
  int32_t ndim;
  // 1 for an input whose content a call changes, else 0.
  int32_t is_written;
  // 1 if a size varies from call to call, else 0.
  int32_t is_dynamic;
  // `ndim` sizes; -1 for one that varies.
  const int64_t *shape;
  // `ndim` sizes in words: numbers, and expressions over the program's symbols, such as "2*s0".
  const char *const *sizes;
} rapt_port;

// A cache of keys and values, and what a call appends to it. Nothing is owned and nothing is kept, as with a rapt_tensor.
// Of codes in it, `k_codes` and `v_codes` of rapt_options say what makes numbers of them.
typedef struct rapt_kvcache {
  // sizeof(rapt_kvcache), by which later versions know which fields there are.
  size_t size;
  // [batch, most keys, num_kv_heads, head_dim], or pages [num_pages, page_size, num_kv_heads, head_dim]. Never NULL.
  const struct rapt_tensor *k_cache;
  // Likewise, with a head_dim of its own. It may lie in the memory of `k_cache` without a `v`, or where each value is the first numbers
  // of its key, here and in `k` and `v`: these are then written once. Never NULL.
  const struct rapt_tensor *v_cache;
  // The keys of each sequence before the new ones: I32 [batch]. NULL: all that a cache without pages has room for.
  const struct rapt_tensor *cache_seqlens;
  // The pages of each sequence in the order of its keys: I32 [batch, entries]. NULL: the cache has no pages.
  const struct rapt_tensor *page_table;
  // New keys, [batch, new, num_kv_heads, head_dim], to be written behind those of each sequence. NULL: none.
  const struct rapt_tensor *k;
  // New values, likewise. NULL: none, or those of the new keys lie in `k_cache`.
  const struct rapt_tensor *v;
} rapt_kvcache;

#endif  /* RAPT_TYPES_H */
