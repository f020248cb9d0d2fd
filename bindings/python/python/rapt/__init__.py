"""Attention with an exact tensor boundary: any strides, no hidden cast, no hidden copy.

`attention` takes numpy arrays, torch tensors on CPU or NVIDIA GPU, and anything with `__dlpack__`, and answers in the kind, device and dtype
of `q`. `load` runs programs that `torch.export` saved, without PyTorch. What Rapt cannot serve exactly it refuses with a typed error that
names the expression that corrects it. Importing this module imports neither numpy nor torch; `rapt.torch` is loaded when it is first named or a torch tensor first arrives.
"""

import importlib as _importlib
import sys as _sys
from collections import namedtuple as _namedtuple

from rapt import _native
from rapt._doctor import Report, doctor
from rapt._model import Model, Session, load
from rapt._native import (
    Context,
    DeviceError,
    DivisionError,
    DtypeBoundaryError,
    DtypeMismatchError,
    IndexRangeError,
    KindError,
    KVCache,
    LayoutError,
    NumberError,
    OptionError,
    Plan,
    ProgramError,
    RaggedPlan,
    RaptError,
    ShapeError,
    UnsupportedDtypeError,
    UnsupportedError,
    __version__,
    accumulation,
    dtypes,
    explain,
    explain_varlen,
    explain_with_kvcache,
    is_available,
    version,
)
from rapt.quant import Quantized, dequantize, quantize

__all__ = [
    "Context",
    "DeviceError",
    "DivisionError",
    "DtypeBoundaryError",
    "DtypeMismatchError",
    "IndexRangeError",
    "KVCache",
    "KindError",
    "LayoutError",
    "Model",
    "NumberError",
    "OptionError",
    "Plan",
    "ProgramError",
    "Quantized",
    "RaggedPlan",
    "RaptError",
    "Report",
    "Session",
    "ShapeError",
    "UnsupportedDtypeError",
    "UnsupportedError",
    "__version__",
    "accumulation",
    "attention",
    "attention_backward",
    "attention_with_kvcache",
    "audit",
    "dequantize",
    "diagnose",
    "doctor",
    "dtypes",
    "explain",
    "explain_varlen",
    "explain_with_kvcache",
    "is_available",
    "load",
    "quantize",
    "scaled_dot_product_attention",
    "varlen_attention",
    "varlen_attention_backward",
    "version",
]


def _torch_ops(tensor):
    """`rapt.torch._ops` if `tensor`, or what it is codes of, is torch's, else None."""
    # Once they are loaded they know the class: torch.compile would trace and guard every name in sys.modules, 0.2 s a graph.
    if _ops is None:
        torch = _sys.modules.get("torch")
        if torch is None:
            return None
        tensor_class = getattr(torch, "Tensor", ())
    else:
        tensor_class = _ops.torch.Tensor
    if not isinstance(tensor, tensor_class):
        return _torch_ops(tensor.codes) if isinstance(tensor, Quantized) else None
    return _ops if _ops is not None else _load_ops()


_ops = None


def _load_ops():
    # A statement, which torch.compile follows; it refuses `importlib`.
    from .torch import _ops as loaded

    global _ops
    _ops = loaded
    return _ops


def attention(
    q,
    k,
    v,
    *,
    # table.rs: parameters
    mask=None,
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    layout="bhsd",
    q_descale=None,
    k_descale=None,
    v_descale=None,
    q_zero_point=None,
    k_zero_point=None,
    v_zero_point=None,
    compute="exact",
    # end
    out=None,
    out_dtype=None,
    return_lse=False,
    tolerance=None,
    device=None,
):
    """softmax(q·kᵀ · scale)·v.

    `q` is [batch, num_q_heads, q_len, head_dim], `k` and `v` [batch, num_kv_heads, kv_len, head_dim(_v)], or less their
    leading dimensions; with `layout="bshd"` [batch, len, heads, head_dim]. Every tensor is read through its strides.
    mask: bool (True = attend) or additive, broadcastable to [batch, num_q_heads, q_len, kv_len].
    causal: None, False, True or "top_left" (j ≤ i, PyTorch's), "bottom_right" (j ≤ i + kv_len - q_len, flash-attention's).
    window: (left, right), ends included, None = unbounded. softcap: c in c·tanh(s/c). scale: default 1/sqrt(head_dim).
    sinks, alibi_slopes: [num_q_heads]. out: the tensor to write. out_dtype: default that of q; codes need one.
    q_descale, k_descale, v_descale: float32, the factors of codes (int8, uint8, float8_e4m3fn, float8_e5m2): [], [batch, heads], [batch, heads,
    len], [batch, heads, 1, head_dim] or [batch, heads, len, n]. q_zero_point, …: uint8 of that shape, with uint8 codes. A `Quantized` needs none.
    compute: "exact", or "int8" on int8 codes of k and v in host memory and on NVIDIA GPUs: an approximation (docs: "Products of int8").
    tolerance: with a `Quantized` k or v that has `errors`: the relative L2 by which a head may differ from that on the originals, else
    it is computed on those (a GPU is waited for once). return_lse: also lse. A refused request raises a `RaptError` and writes nothing.
    device: None, or of tensors in host memory "cpu" or "vulkan:N": they are copied to that GPU (`rapt.vulkan`) and the result back.
    """
    ops = _torch_ops(q)
    if ops is not None and ops.is_traced_call(q, k, v):
        return ops.attention(
            q,
            k,
            v,
            # table.rs: arguments
            mask=mask,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            layout=layout,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            q_zero_point=q_zero_point,
            k_zero_point=k_zero_point,
            v_zero_point=v_zero_point,
            compute=compute,
            # end
            out=out,
            out_dtype=out_dtype,
            return_lse=return_lse,
            tolerance=tolerance,
            device=device,
        )
    answer = _native.attention(
        q,
        k,
        v,
        # table.rs: positions
        mask,
        causal,
        window,
        softcap,
        scale,
        sinks,
        alibi_slopes,
        layout,
        q_descale,
        k_descale,
        v_descale,
        q_zero_point,
        k_zero_point,
        v_zero_point,
        compute,
        # end
        out,
        out_dtype,
        return_lse,
        tolerance,
        device,
    )
    return answer if ops is None else ops.counted(answer)


_GRADIENTS = {
    (mask, sinks): _namedtuple("Gradients", ["dq", "dk", "dv"] + ["d_mask"] * mask + ["d_sinks"] * sinks)
    for mask in (False, True)
    for sinks in (False, True)
}


def attention_backward(
    d_o,
    q,
    k,
    v,
    out,
    lse,
    *,
    d_lse=None,
    mask_grad=False,
    # table.rs: parameters
    mask=None,
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    layout="bhsd",
    q_descale=None,
    k_descale=None,
    v_descale=None,
    q_zero_point=None,
    k_zero_point=None,
    v_zero_point=None,
    compute="exact",
    # end
):
    """The gradients of a loss by the inputs of `attention`, from those by its outputs: a named tuple `(dq, dk, dv)`.

    `out` and `lse` are what `attention(q, k, v, return_lse=True)` gave with the same options; `d_o` is the gradient by out, of its sizes and
    dtype and of any strides, `d_lse` that by lse (None is 0). Probabilities are recomputed from lse, so no memory grows with the product of
    the lengths. mask_grad: also `d_mask`, of the sizes and dtype of an additive mask, summed over what was broadcast. With sinks
    also `d_sinks`. Each is of its input's dtype and sizes; heads of a group sum into their key head. Codes have no gradient.

    torch's autograd needs none of this: `attention` on tensors that require grad is a node of it. A refused request raises a `RaptError`.
    """
    ops = _torch_ops(q)
    run = _native.attention_backward
    if ops is not None and ops.is_traced_call(q, k, v):
        run = ops.attention_backward
    made = run(
        d_o,
        q,
        k,
        v,
        out,
        lse,
        d_lse=d_lse,
        mask_grad=mask_grad,
        # table.rs: arguments
        mask=mask,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        layout=layout,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        q_zero_point=q_zero_point,
        k_zero_point=k_zero_point,
        v_zero_point=v_zero_point,
        compute=compute,
        # end
    )
    return _GRADIENTS[bool(mask_grad), sinks is not None](*made)


def _counted(q, answer):
    """`answer`, counted among what was served of torch's tensors."""
    ops = _torch_ops(q)
    if ops is not None:
        ops.count_served()
    return answer


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_kv,
    *,
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    q_zero_point=None,
    k_zero_point=None,
    v_zero_point=None,
    compute="exact",
    out=None,
    out_dtype=None,
    return_lse=False,
):
    """Attention of each of many sequences to its own keys, of lengths of their own, without padding.

    `q` is [total_q, num_q_heads, head_dim], `k` and `v` [total_kv, num_kv_heads, head_dim(_v)], one sequence after another.
    cu_seqlens_q, cu_seqlens_kv: int32 [sequences + 1], where each begins and the last ends, within 0 to total_q, and to total_kv. Rows before
    the first and behind the last are of no sequence: they become zeros (−inf in lse).
    The other arguments are those of `attention`, whose bits each sequence gets as in a call alone. A sequence without keys gets
    zeros. return_lse: also the log of the sum of exponentials, [num_q_heads, total_q].
    q_descale, k_descale, v_descale, q_zero_point, …: of codes. A factor for each row lies as rows do: [total, heads], with one more size for
    blocks along head_dim; [], [heads] and [1, heads, head_dim] are of all sequences. A `Quantized` stands in place of q, k or v without
    them. compute: as in `attention`.

    A refused request raises a subclass of `RaptError` and writes nothing. On a GPU offsets lie there too, and are read when it runs: a
    sequence whose keys do not lie in k gets NaN. Torch tensors that require grad have gradients by q, k, v and sinks, and by lse.
    """
    ops = _torch_ops(q)
    run = _native.varlen_attention if ops is None else ops.varlen_attention
    return run(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_kv,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        q_zero_point=q_zero_point,
        k_zero_point=k_zero_point,
        v_zero_point=v_zero_point,
        compute=compute,
        out=out,
        out_dtype=out_dtype,
        return_lse=return_lse,
    )


def varlen_attention_backward(
    d_o,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_kv,
    *,
    d_lse=None,
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    compute="exact",
):
    """The gradients of a loss by the inputs of `varlen_attention`, from those by its outputs: a named tuple `(dq, dk, dv)`.

    `out` and `lse` are what `varlen_attention(..., return_lse=True)` gave with the same options; `d_o` is the gradient by out, of its sizes and
    dtype and of any strides, `d_lse` that by lse (None is 0). Each sequence has the bits of `attention_backward` of it alone; rows of no sequence
    get zeros. With sinks also `d_sinks`, the sum over the sequences in their order. No memory grows with the product of the lengths.

    torch's autograd needs none of this: `varlen_attention` on tensors that require grad is a node of it. A refused request raises a `RaptError`.
    """
    ops = _torch_ops(q)
    run = _native.varlen_attention_backward
    if ops is not None and ops.is_traced_call(q, k, v):
        run = ops.varlen_attention_backward
    made = run(
        d_o,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_kv,
        d_lse=d_lse,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        compute=compute,
    )
    return _GRADIENTS[False, sinks is not None](*made)


def attention_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    *,
    cache_seqlens=None,
    page_table=None,
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    k_descale=None,
    v_descale=None,
    k_zero_point=None,
    v_zero_point=None,
    compute="exact",
    out=None,
    out_dtype=None,
    return_lse=False,
):
    """Attention to the keys of a cache, after new ones were written behind them: flash-attention's `flash_attn_with_kvcache`.

    `q` is [batch, q_len, num_q_heads, head_dim]; `k_cache` and `v_cache` are [batch, most keys, num_kv_heads, head_dim(_v)], or with a
    page table [num_pages, page_size, num_kv_heads, head_dim(_v)].
    k, v: [batch, new, num_kv_heads, head_dim(_v)], written into the caches in place, in their dtype, before the attention. Where values lie
    in the keys (latent attention: `v_cache` is `k_cache[..., :n]`), `v` is `k[..., :n]` or None, and a row is written once.
    cache_seqlens: int32 [batch], or one int: the keys of each sequence before the new ones. None is all of a cache without pages.
    page_table: int32 [batch, entries]; key j of sequence b is row j % page_size of page page_table[b, j // page_size]. What lies behind
    the pages of a sequence is not read.
    causal: None, False, True or "bottom_right": the last query is at the last key. window, softcap, scale, sinks, alibi_slopes, out,
    out_dtype as in `attention`.
    k_descale, v_descale, k_zero_point, v_zero_point: of caches that are codes. One factor for each key lies where the key does:
    [batch, most keys, num_kv_heads] or [num_pages, page_size, num_kv_heads], with one more size for blocks along head_dim; [] is one for
    all. New keys are quantized with factors of their own, which are written too; with one for all, with that. A `Quantized` stands in
    place of a cache without them.
    compute: "exact", or "int8" on int8 codes in host memory and on NVIDIA GPUs, as in `attention`: of keys by token, of values by head, channel or tensor.
    return_lse: also the log of the sum of exponentials, [batch, num_q_heads, q_len].

    On a GPU `cache_seqlens` and `page_table` lie there too (or `cache_seqlens` is one number), and the device reads them: a length or a
    page that the cache does not have makes the rows of its sequence NaN, and so does a new number without a code in a cache of codes,
    of the rows that attend to it. Pages that take new keys are the caller's to keep apart.

    A refused request raises a subclass of `RaptError`, and neither `out` nor a cache is written.
    """
    answer = _native.attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_descale=k_descale,
        v_descale=v_descale,
        k_zero_point=k_zero_point,
        v_zero_point=v_zero_point,
        compute=compute,
        out=out,
        out_dtype=out_dtype,
        return_lse=return_lse,
    )
    return _counted(q, answer)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """`torch.nn.functional.scaled_dot_product_attention`, for torch, numpy and DLPack alike.

    Leading dimensions broadcast as PyTorch's do. `dropout_p` above 0 draws from PyTorch's generator and is served of torch tensors on CPUs and NVIDIA GPUs; `attn_mask` together with `is_causal` is refused, as
    PyTorch refuses it (`rapt.attention` takes both).
    """
    ops = _torch_ops(query)
    run = _native.scaled_dot_product_attention if ops is None else ops.sdpa
    return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def audit(
    fn,
    device="cpu",
    dtypes=("float32", "bfloat16", "float16", "float64"),
    hazards="all",
    budget_s=60,
    *,
    kind="auto",
    show_progress=None,
):
    """Check `fn`, any attention with the signature of `scaled_dot_product_attention` or of `attention`, for boundary bugs.

    fn: a callable, or "torch", "rapt", "MODULE:FUNCTION". It runs in a child process, so that a fault of it is a finding.
    hazards: "all" or names (`rapt audit --list`). budget_s: seconds to spend, reproducers included.
    kind: the tensors that `fn` takes, "torch", "numpy" or "auto". show_progress: a bar on stderr; None is where a terminal is.

    The result is a report: `findings` (hazard, cause, severity, evidence, reproducer), `hazards`, `ok`, `str()`,
    `to_json`, `to_junit`, `to_html`. ValueError for a wrong argument, or a callee that refuses a plain call. Needs numpy.
    """
    checks = _importlib.import_module("rapt._audit.checks")
    return checks.audit(fn, device, dtypes, hazards, budget_s, kind=kind, show_progress=show_progress)


def diagnose(out, expected=None, *, q, k, v, **options):
    """Name the corruption that `out`, an attention's result on `q`, `k`, `v`, shows; "correct", or "unknown" honestly.

    expected: the right result if the caller has one, else the reference's, in f64. options: the call's own, by the names of
    `attention` (mask, causal, scale, …, layout) or of `scaled_dot_product_attention` (attn_mask, is_causal).

    The result has `name`, `confidence` (0 to 1), `variant`, `pattern` (the elements that show it), `error`, `candidates`.
    Pass the tensors as they were passed to the call: their strides and storage are evidence. Needs numpy.
    """
    module = _importlib.import_module("rapt._audit.diagnose")
    return module.diagnose(out, expected, q=q, k=k, v=v, **options)


def __getattr__(name):
    if name in ("flash_attn", "layout", "mlx", "torch", "umfa", "vulkan"):
        return _importlib.import_module(f"rapt.{name}")
    raise AttributeError(f"module 'rapt' has no attribute {name!r}")


def __dir__():
    return [*__all__, "flash_attn", "layout", "mlx", "quant", "torch", "umfa", "vulkan"]
