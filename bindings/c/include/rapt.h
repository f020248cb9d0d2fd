// Rapt: attention with an exact tensor boundary. The reference is docs/reference/c.md.
//
// Pointers: none is kept after a call, and each may be NULL; where something is needed, NULL answers
// RAPT_ERROR_POINTER. Threads: every function may be called from any thread at any time, an engine may be shared.
// A call that answers an error has written nothing.

#ifndef RAPT_H
#define RAPT_H

// Written by cbindgen from bindings/c/src; bindings/c/tests/abi/header.rs compares them.

#include "rapt_types.h"

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library that is loaded, such as "0.1.0". The string lives as long as the library.
const char *rapt_version(void);

// The name of an error code, such as "RAPT_ERROR_SHAPE"; "unknown" for a number that is none. The string lives as long
// as the library.
const char *rapt_error_name(int32_t error);

// What the last failed call on this thread said: what was asked, what was got, what is allowed. "" if none failed.
// A call that succeeds leaves it as it is. The string lives until the next call fails on this thread, or the thread ends.
const char *rapt_last_error(void);

// The code of the last failed call on this thread; RAPT_OK if none failed.
rapt_error rapt_last_error_code(void);

// The name of a dtype, such as "bfloat16"; NULL for a code that is not known. The string lives as long as the library.
const char *rapt_dtype_name(int32_t dtype);

// The size of an element of a dtype in bits; 0 for RAPT_DTYPE_UNKNOWN and for a code that is not known.
size_t rapt_dtype_bits(int32_t dtype);

// Writes the strides, in elements, of a row-major tensor of this shape: `strides[ndim - 1]` is 1.
//
// # Safety
// `shape` and `strides` each lead to `ndim` numbers, or are NULL.
rapt_error rapt_contiguous_strides(int32_t ndim, const int64_t *shape, int64_t *strides);

// An engine: threads, scratch memory and a cache of plans. `threads` is their number, or 0 for RAPT_NUM_THREADS and,
// without it, what the system offers. No thread is started before a call needs one.
//
// NULL if that is no number of threads, or an environment variable holds nonsense: rapt_last_error() says what. One
// engine serves any number of threads at once. It is given back by rapt_engine_destroy().
struct rapt_engine *rapt_engine_create(int32_t threads);

// An engine that attends on a GPU which Vulkan reaches: the tensors of a call are host memory, copied there and back. `adapter` is its
// number, from 0.
//
// NULL if there is no such adapter, or the library was built without the cargo feature `vulkan`: rapt_last_error() says what. It is
// given back by rapt_engine_destroy().
struct rapt_engine *rapt_engine_gpu(int32_t adapter);

// Ends the engine's threads and gives back its memory. No call may be using it, and none may use it after. Where models were
// opened with it, both happen when the last of them, their bindings and sessions is given back. NULL is ignored.
//
// # Safety
// `engine` came from rapt_engine_create() or rapt_engine_gpu(), was not destroyed before, and is used by no other thread.
void rapt_engine_destroy(struct rapt_engine *engine);

// What this engine runs on. The caller sets `capabilities->size` to sizeof(rapt_capabilities); all else is written.
//
// # Safety
// `engine` is alive, or NULL; `capabilities` leads to `capabilities->size` bytes, or is NULL.
rapt_error rapt_engine_capabilities(const struct rapt_engine *engine, struct rapt_capabilities *capabilities);

// softmax(q·kᵀ · scale)·v into `out`, and the log of the sum of exponentials into `options->lse` where that is given.
//
// Shapes are those of docs/reference/definition.md, in the order of `options->layout`; `options` may be NULL, which is plain attention.
// Everything is proven before anything is written: on an error `out` and `lse` are as before, and the engine serves on.
// (RAPT_ERROR_INTERNAL alone leaves them unspecified: it is a defect of Rapt.)
//
// # Safety
// `engine` is alive. Each descriptor, and each tensor behind one, is what it says: readable memory that nobody writes
// during the call, and for `out` and `lse` writable memory that nobody else uses. NULL is safe everywhere.
rapt_error rapt_attention(const struct rapt_engine *engine,
                          const struct rapt_tensor *q,
                          const struct rapt_tensor *k,
                          const struct rapt_tensor *v,
                          const struct rapt_tensor *out,
                          const struct rapt_options *options);

// What rapt_attention() would run for the same arguments, in words, as a table of lines: into `*text`, which the caller
// gives back by rapt_string_free(). Nothing is computed, but with a tolerance every head is judged, and the table says what would come
// of it. On an error `*text` is as before.
//
// # Safety
// As rapt_attention(); `text` leads to a pointer that may be written, or is NULL.
rapt_error rapt_explain(const struct rapt_engine *engine,
                        const struct rapt_tensor *q,
                        const struct rapt_tensor *k,
                        const struct rapt_tensor *v,
                        const struct rapt_tensor *out,
                        const struct rapt_options *options,
                        char **text);

// Gives back a string of rapt_explain() or rapt_model_explain(). NULL is ignored.
//
// # Safety
// `text` came from one of them and was not given back before.
void rapt_string_free(char *text);

// Gradients of the call rapt_attention(engine, q, k, v, out, options), whose `out` and `options->lse` are read here: into those
// tensors of `gradients` that are not NULL, from `d_o`, the gradient by out.
//
// Each gradient has the dtype and the sizes of its input, any strides that name every element once, and shares no memory with
// another tensor. `options->lse` is never NULL. With dropout the options are those of the forward call, seed and offset too. q, k
// and v have numbers: codes, a tolerance and another compute are refused. A pair that is not attended gives exactly 0. On an error nothing was written, and the engine serves on.
// (RAPT_ERROR_INTERNAL alone leaves gradients unspecified: it is a defect of Rapt.)
//
// # Safety
// `engine` is alive. Each descriptor, and each tensor behind one, is what it says: readable memory that nobody writes during the
// call, and for gradients writable memory that nobody else uses. NULL is safe everywhere.
rapt_error rapt_attention_backward(const struct rapt_engine *engine,
                                   const struct rapt_tensor *q,
                                   const struct rapt_tensor *k,
                                   const struct rapt_tensor *v,
                                   const struct rapt_tensor *out,
                                   const struct rapt_tensor *d_o,
                                   const struct rapt_gradients *gradients,
                                   const struct rapt_options *options);

// Gradients of the call rapt_varlen_attention(engine, q, k, v, cu_seqlens_q, cu_seqlens_kv, out, options): of each sequence the bits
// of rapt_attention_backward() for it alone, and of sinks the sum over the sequences.
//
// Tensors are as in rapt_varlen_attention(), `options->lse` and `gradients->d_lse` [num_q_heads, total_q]. Rows of no sequence get
// zeros. A mask, and what rapt_attention_backward() refuses, is refused. On an error nothing was written, and the engine serves on.
//
// # Safety
// As rapt_attention_backward().
rapt_error rapt_varlen_attention_backward(const struct rapt_engine *engine,
                                          const struct rapt_tensor *q,
                                          const struct rapt_tensor *k,
                                          const struct rapt_tensor *v,
                                          const struct rapt_tensor *cu_seqlens_q,
                                          const struct rapt_tensor *cu_seqlens_kv,
                                          const struct rapt_tensor *out,
                                          const struct rapt_tensor *d_o,
                                          const struct rapt_gradients *gradients,
                                          const struct rapt_options *options);

// rapt_attention() of tensors on an NVIDIA GPU: enqueued on the stream of `queue`, and returned from at once. Every option but a tolerance.
//
// Where `queue->needed_bytes` is given, it gets the bytes of scratch memory that the call needs, and nothing runs. The first call of its kind
// loads its kernel, or compiles it in seconds; later ones may be captured into a CUDA graph.
//
// # Safety
// As rapt_attention(), and what is read and written, the scratch memory too, is memory of the device of the tensors that stays as it is until
// the stream has passed this call. The stream is one of that device.
rapt_error rapt_cuda_attention(const struct rapt_engine *engine,
                               const struct rapt_tensor *q,
                               const struct rapt_tensor *k,
                               const struct rapt_tensor *v,
                               const struct rapt_tensor *out,
                               const struct rapt_options *options,
                               const struct rapt_cuda_queue *queue);

// rapt_attention_backward() of tensors on an NVIDIA GPU, enqueued as rapt_cuda_attention() is.
//
// # Safety
// As rapt_cuda_attention() and rapt_attention_backward().
rapt_error rapt_cuda_attention_backward(const struct rapt_engine *engine,
                                        const struct rapt_tensor *q,
                                        const struct rapt_tensor *k,
                                        const struct rapt_tensor *v,
                                        const struct rapt_tensor *out,
                                        const struct rapt_tensor *d_o,
                                        const struct rapt_gradients *gradients,
                                        const struct rapt_options *options,
                                        const struct rapt_cuda_queue *queue);

// rapt_varlen_attention() of tensors on an NVIDIA GPU, offsets too, enqueued as rapt_cuda_attention() is. The device reads the offsets: rows of
// sequences that begin before others have ended count for the first, and keys that do not lie in k make NaN.
//
// # Safety
// As rapt_cuda_attention().
rapt_error rapt_cuda_varlen_attention(const struct rapt_engine *engine,
                                      const struct rapt_tensor *q,
                                      const struct rapt_tensor *k,
                                      const struct rapt_tensor *v,
                                      const struct rapt_tensor *cu_seqlens_q,
                                      const struct rapt_tensor *cu_seqlens_kv,
                                      const struct rapt_tensor *out,
                                      const struct rapt_options *options,
                                      const struct rapt_cuda_queue *queue);

// rapt_varlen_attention_backward() of tensors on an NVIDIA GPU, offsets too, enqueued as rapt_cuda_attention() is. Offsets that decrease or
// leave their tensor leave gradients unspecified; no other memory is read or written for them.
//
// # Safety
// As rapt_cuda_attention() and rapt_attention_backward().
rapt_error rapt_cuda_varlen_attention_backward(const struct rapt_engine *engine,
                                               const struct rapt_tensor *q,
                                               const struct rapt_tensor *k,
                                               const struct rapt_tensor *v,
                                               const struct rapt_tensor *cu_seqlens_q,
                                               const struct rapt_tensor *cu_seqlens_kv,
                                               const struct rapt_tensor *out,
                                               const struct rapt_tensor *d_o,
                                               const struct rapt_gradients *gradients,
                                               const struct rapt_options *options,
                                               const struct rapt_cuda_queue *queue);

// A cache of free pages, into `*cache`: it is given back by rapt_kv_cache_destroy(). On an error `*cache` is as before.
//
// The memory of all pages is had here. Any number of threads may use a cache at once: calls that change it (new_sequence, fork,
// truncate, free, append) wait for all others, the rest run beside one another.
//
// # Safety
// `form` leads to `form->size` bytes, and its pointers to what they say; `cache` leads to a pointer that may be written. Each may be
// NULL.
rapt_error rapt_kv_cache_create(const struct rapt_kv_cache_form *form,
                                struct rapt_kv_cache **cache);

// Gives a cache back, with its sequences and pages. NULL is ignored.
//
// # Safety
// `cache` came from rapt_kv_cache_create(), was not destroyed before, and is used by no other thread.
void rapt_kv_cache_destroy(struct rapt_kv_cache *cache);

// A sequence without keys, by the number that names it, into `*id`. No other sequence of this process has it, also after it is freed.
//
// # Safety
// `cache` is alive, or NULL; `id` leads to a number that may be written, or is NULL.
rapt_error rapt_kv_cache_new_sequence(struct rapt_kv_cache *cache,
                                      uint64_t *id);

// Another sequence with the keys of `id`, into `*fork`. Their pages are shared; a last page that has room is copied when one of the
// two writes into it. On an error `*fork` is as before.
//
// # Safety
// `cache` is alive, or NULL; `fork` leads to a number that may be written, or is NULL.
rapt_error rapt_kv_cache_fork(struct rapt_kv_cache *cache,
                              uint64_t id,
                              uint64_t *fork);

// Keeps the first `length` keys of a sequence. Pages that no sequence has any more are free.
//
// # Safety
// `cache` is alive, or NULL.
rapt_error rapt_kv_cache_truncate(struct rapt_kv_cache *cache, uint64_t id, size_t length);

// Ends a sequence. Pages that no other sequence has are free; its number is refused from here on.
//
// # Safety
// `cache` is alive, or NULL.
rapt_error rapt_kv_cache_free(struct rapt_kv_cache *cache, uint64_t id);

// The keys of a sequence, into `*length`.
//
// # Safety
// `cache` is alive, or NULL; `length` leads to a number that may be written, or is NULL.
rapt_error rapt_kv_cache_length(const struct rapt_kv_cache *cache, uint64_t id, size_t *length);

// Pages that no sequence has; 0 for NULL.
//
// # Safety
// `cache` is alive, or NULL.
size_t rapt_kv_cache_free_pages(const struct rapt_kv_cache *cache);

// Sequences that were not freed; 0 for NULL.
//
// # Safety
// `cache` is alive, or NULL.
size_t rapt_kv_cache_num_sequences(const struct rapt_kv_cache *cache);

// Appends `k` [new, num_kv_heads, head_dim] and `v` [new, num_kv_heads, head_dim_v] to a sequence, of any strides. They are of the
// cache's dtype; those that become codes are of F64, F32, F16 or BF16. On an error everything is as before.
//
// # Safety
// `cache` is alive, or NULL; `k` and `v` are what they say: readable memory that nobody writes during the call.
rapt_error rapt_kv_cache_append(struct rapt_kv_cache *cache,
                                uint64_t id,
                                const struct rapt_tensor *k,
                                const struct rapt_tensor *v);

// Appends `k` [num_ids, new, num_kv_heads, head_dim] and `v`, likewise, to `num_ids` sequences, of which none is given twice: to all of
// them or, on an error, to none.
//
// # Safety
// As rapt_kv_cache_append(); `ids` leads to `num_ids` numbers, or is NULL.
rapt_error rapt_kv_cache_append_batch(struct rapt_kv_cache *cache,
                                      const uint64_t *ids,
                                      size_t num_ids,
                                      const struct rapt_tensor *k,
                                      const struct rapt_tensor *v);

// The pages of each sequence in the order of its keys, into `page_table`: I32 [num_ids, entries], of as many entries as the longest
// sequence has pages or more; those behind the last page of a sequence become -1.
//
// # Safety
// `cache` is alive; `ids` leads to `num_ids` numbers; `page_table` is what it says: writable memory that nobody else uses. Each may be
// NULL.
rapt_error rapt_kv_cache_page_table(const struct rapt_kv_cache *cache,
                                    const uint64_t *ids,
                                    size_t num_ids,
                                    const struct rapt_tensor *page_table);

// The keys of each sequence, into `cache_seqlens`: I32 [num_ids].
//
// # Safety
// As rapt_kv_cache_page_table().
rapt_error rapt_kv_cache_seqlens(const struct rapt_kv_cache *cache,
                                 const uint64_t *ids,
                                 size_t num_ids,
                                 const struct rapt_tensor *cache_seqlens);

// The memory of a cache, as rapt_attention_with_kvcache() reads it beside rapt_kv_cache_page_table() and rapt_kv_cache_seqlens(). The
// caller sets `pages->size` to sizeof(rapt_kv_cache_pages); all else is written. Rows that hold no key hold anything.
//
// It is to be read, and only while no call appends: what is written there is not what the cache says of it.
//
// # Safety
// `cache` is alive, or NULL; `pages` leads to `pages->size` bytes, or is NULL.
rapt_error rapt_kv_cache_get_pages(const struct rapt_kv_cache *cache,
                                   struct rapt_kv_cache_pages *pages);

// Attention of q [num_ids, q_len, num_q_heads, head_dim] to all keys of each sequence of `ids`, into `out`: the bits of
// rapt_attention() on the same keys in one tensor. One sequence may stand in `ids` more than once.
//
// `options->lse` is [num_ids, num_q_heads, q_len]; `options->layout` is not read. The last query is at the last key, for causal masking
// (RAPT_CAUSAL_BOTTOM_RIGHT), windows and slopes. `options` may be NULL; a mask, a tolerance and codes are
// refused: the cache knows its own.
//
// # Safety
// `cache` is alive, or NULL; `ids` leads to `num_ids` numbers, or is NULL; all else as rapt_attention().
rapt_error rapt_kv_cache_attention(const struct rapt_engine *engine,
                                   const struct rapt_kv_cache *cache,
                                   const struct rapt_tensor *q,
                                   const uint64_t *ids,
                                   size_t num_ids,
                                   const struct rapt_tensor *out,
                                   const struct rapt_options *options);

// Attention on tensors in buffers of Metal's, by this queue (an id<MTLCommandQueue>, which it retains): into `*metal`, which
// rapt_metal_destroy() gives back.
//
// RAPT_ERROR_DEVICE in a library that was not built for macOS with the cargo feature `metal`. It was never run on Apple hardware.
//
// # Safety
// `queue` is an id<MTLCommandQueue>, or NULL; `metal` leads to a pointer that may be written, or is NULL.
rapt_error rapt_metal_create(void *queue,
                             struct rapt_metal **metal);

// As rapt_attention(), on tensors of RAPT_DEVICE_METAL: `storage` is the id<MTLBuffer>, `data` the byte in it where the element with index 0 lies, as
// (void *)offset, and `storage_bytes` 0. What a call asks is submitted behind all that the queue has, and nothing is waited for: `out` and `lse` are
// written when that has run, and buffers are retained until then. Everything is proven before anything is submitted. Codes and tolerances are refused.
//
// # Safety
// `metal` is alive, or NULL. Each descriptor is what it says; the memory that a tensor reaches in its buffer is written by nobody else until the queue has run
// what was submitted, nor, of `out` and `lse`, used. NULL is safe everywhere.
rapt_error rapt_metal_attention(const struct rapt_metal *metal,
                                const struct rapt_tensor *q,
                                const struct rapt_tensor *k,
                                const struct rapt_tensor *v,
                                const struct rapt_tensor *out,
                                const struct rapt_options *options);

// What is submitted goes on. NULL is ignored.
//
// # Safety
// `metal` came from rapt_metal_create(), was not destroyed before, and is used by no other thread.
void rapt_metal_destroy(struct rapt_metal *metal);

// Loads the program that torch.export.save() wrote to the file `path`, into `*model`: it is given back by
// rapt_model_destroy(). On an error `*model` is as before. The engine's threads run the calls of the model's sessions; it may be
// destroyed before the model, which then holds what it needs of it.
//
// The file is mapped: nothing may change it until the model and its sessions are destroyed. Everything that needs no input is
// checked here: the archive, that every operator is served (the error lists all that are not), and that what each node gives is
// what the program says of it. A model may be used from any number of threads at once.
//
// # Safety
// `engine` is alive; `path` is a string that ends with NUL, in UTF-8 where the system wants it; `model` leads to a pointer that may be
// written. Each may be NULL.
rapt_error rapt_model_open(const struct rapt_engine *engine,
                           const char *path,
                           struct rapt_model **model);

// The same from the `len` bytes of such a file in memory. They are copied.
//
// # Safety
// `bytes` leads to `len` bytes, or is NULL; `engine` and `model` as for rapt_model_open().
rapt_error rapt_model_from_bytes(const struct rapt_engine *engine,
                                 const void *bytes,
                                 size_t len,
                                 struct rapt_model **model);

// Gives a model back. Its sessions and bindings live on; names and sizes that rapt_model_input() told do not. NULL is ignored.
//
// # Safety
// `model` came from rapt_model_open() or rapt_model_from_bytes(), was not destroyed before, and is used by no other thread.
void rapt_model_destroy(struct rapt_model *model);

// How many inputs a call takes; 0 for NULL.
//
// # Safety
// `model` is alive, or NULL.
size_t rapt_model_num_inputs(const struct rapt_model *model);

// How many results a call gives; 0 for NULL.
//
// # Safety
// `model` is alive, or NULL.
size_t rapt_model_num_outputs(const struct rapt_model *model);

// What input `place` is, counted from 0, in the order in which rapt_session_run() takes them. The caller sets `port->size` to
// sizeof(rapt_port); all else is written.
//
// # Safety
// `model` is alive, or NULL; `port` leads to `port->size` bytes, or is NULL.
rapt_error rapt_model_input(const struct rapt_model *model,
                            size_t place,
                            struct rapt_port *port);

// What result `place` is, counted from 0, in the order in which rapt_session_run() writes them. The caller sets `port->size` to
// sizeof(rapt_port); all else is written.
//
// # Safety
// `model` is alive, or NULL; `port` leads to `port->size` bytes, or is NULL.
rapt_error rapt_model_output(const struct rapt_model *model,
                             size_t place,
                             struct rapt_port *port);

// What runs for a model, in words, as a table of lines: into `*text`, which the caller gives back by rapt_string_free(). On an
// error `*text` is as before.
//
// # Safety
// `model` is alive, or NULL; `text` leads to a pointer that may be written, or is NULL.
rapt_error rapt_model_explain(const struct rapt_model *model,
                              char **text);

// What the results of these inputs will be, into `*bound`, which is given back by rapt_bound_destroy(). On an error `*bound` is
// as before.
//
// Dtypes, numbers of dimensions and sizes of the inputs are read, and the values of those that are numbers, not tensors;
// strides must be there, and `data` of tensors may be NULL. Every guard of the program is checked. Nothing is computed.
//
// # Safety
// `model` is alive, or NULL; `inputs` leads to `num_inputs` tensors that are what they say, or is NULL; `bound` leads to a pointer that
// may be written, or is NULL.
rapt_error rapt_model_bind(const struct rapt_model *model,
                           const struct rapt_tensor *inputs,
                           size_t num_inputs,
                           struct rapt_bound **bound);

// Gives a binding back. NULL is ignored.
//
// # Safety
// `bound` came from rapt_model_bind(), was not destroyed before, and is used by no other thread.
void rapt_bound_destroy(struct rapt_bound *bound);

// What result `place` will be, into `*output`: a row-major tensor in host memory whose `data` is NULL and whose `storage_bytes` is
// what it takes. With `data` set to that many bytes it is a place for rapt_session_run(). `shape` and `strides` live as long as
// the binding. A number is a tensor without dimensions, None has the dtype RAPT_DTYPE_UNKNOWN and takes no bytes.
//
// # Safety
// `bound` is alive, or NULL; `output` leads to a tensor that may be written, or is NULL.
rapt_error rapt_bound_output(const struct rapt_bound *bound,
                             size_t place,
                             struct rapt_tensor *output);

// A session of a model into `*session`, which is given back by rapt_session_destroy(): calls that share what the program keeps,
// such as a cache that it writes in place. It starts as the archive has it. On an error `*session` is as before.
//
// # Safety
// `model` is alive, or NULL; `session` leads to a pointer that may be written, or is NULL.
rapt_error rapt_session_create(const struct rapt_model *model,
                               struct rapt_session **session);

// Gives a session back, with what it keeps. NULL is ignored.
//
// # Safety
// `session` came from rapt_session_create(), was not destroyed before, and is used by no other thread.
void rapt_session_destroy(struct rapt_session *session);

// Runs the program on `inputs`, and writes its results where `outputs` say: each of the result's dtype and sizes, as
// rapt_model_bind() tells them, with strides of its own. Nothing is converted.
//
// A number is a tensor without dimensions: I64, F64 or BOOL. An input that is None is a rapt_tensor of zeros; the place of a result
// that is None is not read. An input that the program writes (`is_written` of its rapt_port) is written where it lies. Outputs and
// written inputs share no byte with another operand and contain every address once.
//
// On an error nothing was written, the session keeps what it had, and serves the next call. (After RAPT_ERROR_INTERNAL, a defect of
// Rapt, outputs and what the session keeps are unspecified.) Calls of one session at once wait for one another.
//
// # Safety
// `session` is alive, or NULL. `inputs` and `outputs` lead to as many tensors as told, or are NULL; each is what it says: readable
// memory that nobody writes during the call, and for outputs and written inputs writable memory that nobody else uses.
rapt_error rapt_session_run(struct rapt_session *session,
                            const struct rapt_tensor *inputs,
                            size_t num_inputs,
                            const struct rapt_tensor *outputs,
                            size_t num_outputs);

// Forgets what the calls so far have left: the session is as it began.
//
// # Safety
// `session` is alive, or NULL.
rapt_error rapt_session_reset(struct rapt_session *session);

// The number of bytes that a session holds beside the archive; 0 for NULL.
//
// # Safety
// `session` is alive, or NULL.
size_t rapt_session_held_bytes(const struct rapt_session *session);

// Attention of sequences that lie one after another, each to its own keys: the bits of rapt_attention() for each alone.
//
// q is [total_q, num_q_heads, head_dim], k and v are [total_kv, num_kv_heads, head_dim], `options->lse` is
// [num_q_heads, total_q]; `options->layout` is not read. `cu_seqlens_q` and `cu_seqlens_kv` are I32 [sequences + 1]: where
// the rows of each begin and the last ends; rows of no sequence become zeros. `options` may be NULL; a mask and a tolerance are
// refused. With dropout, sequence n is batch entry n. The factors of codes are those of layout BSHD without its batch: one row for each
// of theirs (token, block), or those of all sequences.
//
// # Safety
// As rapt_attention().
rapt_error rapt_varlen_attention(const struct rapt_engine *engine,
                                 const struct rapt_tensor *q,
                                 const struct rapt_tensor *k,
                                 const struct rapt_tensor *v,
                                 const struct rapt_tensor *cu_seqlens_q,
                                 const struct rapt_tensor *cu_seqlens_kv,
                                 const struct rapt_tensor *out,
                                 const struct rapt_options *options);

// Appends `cache->k` and `cache->v` to a cache, and attends to all its keys: the bits of rapt_attention() on one tensor.
//
// q is [batch, q_len, num_q_heads, head_dim], `options->lse` is [batch, num_q_heads, q_len]; `options->layout` is not read.
// The last query is at the last key, for causal masking (RAPT_CAUSAL_BOTTOM_RIGHT), windows and slopes. `options` may be NULL;
// a mask, codes of q and a tolerance are refused. Everything is proven before anything is written, the cache and its factors too.
//
// # Safety
// As rapt_attention(). Where there are new keys, the cache and its factors are memory that nobody else uses.
rapt_error rapt_attention_with_kvcache(const struct rapt_engine *engine,
                                       const struct rapt_tensor *q,
                                       const struct rapt_kvcache *cache,
                                       const struct rapt_tensor *out,
                                       const struct rapt_options *options);

// Measures how far the numbers of codes lie from `x`, which they were made of, into `*measured`: it is given back by
// rapt_measured_destroy(), and a rapt_tolerance takes it. On an error `*measured` is as before.
//
// `x` is F64, F32, F16 or BF16, [.., len, head_dim], and `tensor` with `codes` is k or v of a call in layout BHSD. A
// rapt_measured has 8 bytes for each row, each column and each matrix, and holds none of the tensors.
//
// # Safety
// Each descriptor, and each tensor behind one, is what it says: readable memory that nobody writes during the call; `measured` leads to a
// pointer that may be written. Each may be NULL.
rapt_error rapt_measured_create(const struct rapt_tensor *x,
                                const struct rapt_tensor *tensor,
                                const struct rapt_codes *codes,
                                struct rapt_measured **measured);

// Gives a rapt_measured back. NULL is ignored.
//
// # Safety
// `measured` came from rapt_measured_create(), was not destroyed before, and is used by no other thread.
void rapt_measured_destroy(struct rapt_measured *measured);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RAPT_H */
