"""Rapt's own torch ops and the doors that lead to them.

    torch.ops.rapt.attention            -> out
    torch.ops.rapt.attention_lse        -> (out, lse)
    torch.ops.rapt.attention_into       fills `out` (and `lse`)
    torch.ops.rapt.scaled_dot_product_attention   PyTorch's words, broadcast and output strides

Each has a schema and a fake kernel that gives the exact shape, dtype and strides, so compiled graphs carry it as one node.
In eager the doors call the native module at once: a trip through the dispatcher costs more than the rest of a small call.
With grad mode on and an input that requires grad they raise: nothing is ever detached in silence.
"""

import math

import torch
from rapt import (
    DtypeMismatchError,
    KindError,
    OptionError,
    ShapeError,
    UnsupportedError,
    _native,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import _route, _strides
from ._imports import when_imported
from ._stats import count_served

_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor

_OPTIONS = (
    "Tensor? mask=None, str? causal=None, SymInt? window_left=None, SymInt? window_right=None, float? softcap=None, "
    "float? scale=None, Tensor? sinks=None, Tensor? alibi_slopes=None, str layout='bhsd'"
)
_SCHEMAS = {
    "attention": f"(Tensor q, Tensor k, Tensor v, *, {_OPTIONS}, ScalarType? out_dtype=None) -> Tensor",
    "attention_lse": f"(Tensor q, Tensor k, Tensor v, *, {_OPTIONS}, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    "attention_into": f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, *, {_OPTIONS}) -> ()",
    "scaled_dot_product_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, *, "
        "float? scale=None, bool enable_gqa=False) -> Tensor"
    ),
}


def is_traced(*tensors):
    """Whether these belong to a trace (fake or functional tensors): then nothing is computed and nothing counted."""
    return any(isinstance(t, (FakeTensor, FunctionalTensor)) for t in tensors)


# --- output shapes -----------------------------------------------------------------------------------------------------


def _empty_out(q, v, out_dtype):
    dtype = q.dtype if out_dtype is None else out_dtype
    return torch.empty((*q.shape[:-1], *v.shape[-1:]), dtype=dtype, device=q.device)


def _empty_lse(q, layout):
    sizes = tuple(q.shape[:-1])
    if layout == "bshd" and len(sizes) >= 2:
        sizes = (*sizes[:-2], sizes[-1], sizes[-2])
    return torch.empty(sizes, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


# --- what no door computes ---------------------------------------------------------------------------------------------


def _needs_grad(tensors):
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _refuse_grad(tensors):
    if _needs_grad(tensors):
        raise UnsupportedError(
            "gradients are not computed yet: grad mode is on and an input requires grad; "
            "call it inside `with torch.no_grad():`"
        )


def _refuse(names, tensors):
    """Raise the typed error for the first tensor whose memory is not its value."""
    for name, t in zip(names, tensors):
        if t is not None and not isinstance(t, torch.Tensor):
            raise KindError(f"{name} must be a torch.Tensor like q, got {type(t).__name__}; use torch.as_tensor({name})")
        _native.refuse_torch(name, t)


# --- rapt.attention ------------------------------------------------------------------------------------------------------


def attention(
    q,
    k,
    v,
    *,
    mask=None,
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    layout="bhsd",
    out=None,
    out_dtype=None,
    return_lse=False,
):
    """`rapt.attention` on torch tensors. Shapes, units and errors as documented there."""
    if causal is True:
        causal = "top_left"
    elif causal is False:
        causal = None
    # A class of its own is what makes a tensor one of a trace.
    ordinary = type(q) is type(k) is type(v) is _Tensor
    if _is_compiling() or _modes() or (not ordinary and is_traced(q, k, v)):
        return _through_ops(
            q, k, v, mask, causal, window, softcap, scale, sinks, alibi_slopes, layout, out, out_dtype, return_lse
        )
    answer = _native.attention(
        q, k, v, mask=mask, causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks,
        alibi_slopes=alibi_slopes, layout=layout, out=out, out_dtype=out_dtype, return_lse=return_lse,
    )  # fmt: skip
    count_served()
    return answer


def _through_ops(
    q, k, v, mask, causal, window, softcap, scale, sinks, alibi_slopes, layout, out, out_dtype, return_lse
):
    left, right = (None, None) if window is None else window
    options = {
        "mask": mask,
        "causal": causal,
        "window_left": left,
        "window_right": right,
        "softcap": softcap,
        "scale": scale,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "layout": layout,
    }
    if out is not None:
        if out_dtype is not None and out.dtype != out_dtype:
            raise DtypeMismatchError(f"out has dtype {out.dtype}, out_dtype asks {out_dtype}; leave out_dtype away")
        lse = _empty_lse(q, layout) if return_lse else None
        torch.ops.rapt.attention_into(q, k, v, out, lse, **options)
        return (out, lse) if return_lse else out
    if return_lse:
        return torch.ops.rapt.attention_lse(q, k, v, **options, out_dtype=out_dtype)
    return torch.ops.rapt.attention(q, k, v, **options, out_dtype=out_dtype)


def _run(
    q, k, v, out, lse, mask, causal, window_left, window_right, softcap, scale, sinks, alibi_slopes, layout
):  # fmt: skip
    window = None if window_left is None and window_right is None else (window_left, window_right)
    _native.run_into(q, k, v, mask, sinks, alibi_slopes, out, lse, causal, window, softcap, scale, layout)
    count_served()


def _attention(
    q, k, v, *, mask=None, causal=None, window_left=None, window_right=None, softcap=None, scale=None, sinks=None,
    alibi_slopes=None, layout="bhsd", out_dtype=None,
):  # fmt: skip
    out = _empty_out(q, v, out_dtype)
    _run(
        q, k, v, out, None, mask, causal, window_left, window_right, softcap, scale, sinks, alibi_slopes, layout
    )  # fmt: skip
    return out


def _attention_lse(
    q, k, v, *, mask=None, causal=None, window_left=None, window_right=None, softcap=None, scale=None, sinks=None,
    alibi_slopes=None, layout="bhsd", out_dtype=None,
):  # fmt: skip
    out, lse = _empty_out(q, v, out_dtype), _empty_lse(q, layout)
    _run(
        q, k, v, out, lse, mask, causal, window_left, window_right, softcap, scale, sinks, alibi_slopes, layout
    )  # fmt: skip
    return out, lse


def _attention_into(
    q, k, v, out, lse, *, mask=None, causal=None, window_left=None, window_right=None, softcap=None, scale=None,
    sinks=None, alibi_slopes=None, layout="bhsd",
):  # fmt: skip
    _run(
        q, k, v, out, lse, mask, causal, window_left, window_right, softcap, scale, sinks, alibi_slopes, layout
    )  # fmt: skip


def _fake_attention(q, k, v, *, layout="bhsd", out_dtype=None, **_options):
    return _empty_out(q, v, out_dtype)


def _fake_attention_lse(q, k, v, *, layout="bhsd", out_dtype=None, **_options):
    return _empty_out(q, v, out_dtype), _empty_lse(q, layout)


def _fake_attention_into(q, k, v, out, lse, **_options):
    return None


# --- rapt.scaled_dot_product_attention -----------------------------------------------------------------------------------


def serve(query, key, value, attn_mask=None, is_causal=False, *, scale=None, enable_gqa=False, traced=False):
    """Compute a request that `_route` found valid, on plain tensors; `traced`: for a graph. Counted as served."""
    if _strides.is_shortcut(query, key, value):
        count_served()
        return _strides.zeros_shortcut(query, value)
    out = _empty_sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, traced)
    _fill(query, key, value, attn_mask, is_causal, scale, enable_gqa, out)
    count_served()
    return out


def _empty_sdpa(query, key, value, mask, is_causal, scale, enable_gqa, traced):
    if query.device.type == "cuda":
        return _strides.empty_out_cuda(query, key, value, mask, is_causal, scale, enable_gqa, traced)
    return _strides.empty_out(query, key, value, mask, enable_gqa)


def _fill(query, key, value, mask, is_causal, scale, enable_gqa, out):
    """The native module broadcasts and loops over leading dimensions on views; enable_gqa with two group sizes is ours."""
    if not enable_gqa or key.shape[-3] == value.shape[-3]:
        _native.torch_sdpa(query, key, value, mask, is_causal, scale, enable_gqa, out)
        return
    heads, k_heads, v_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    for h in range(heads):
        one_mask = mask if mask is None or mask.dim() < 3 or mask.shape[-3] == 1 else mask.narrow(-3, h, 1)
        _native.torch_sdpa(
            query.narrow(-3, h, 1),
            key.narrow(-3, h * k_heads // heads, 1),
            value.narrow(-3, h * v_heads // heads, 1),
            one_mask,
            is_causal,
            scale,
            False,
            out.narrow(-3, h, 1),
        )


def _sdpa(query, key, value, attn_mask=None, is_causal=False, *, scale=None, enable_gqa=False):
    _route.check_kv_len(key, value)
    _refuse(("query", "key", "value", "attn_mask"), (query, key, value, attn_mask))
    return serve(query, key, value, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa, traced=True)


def _fake_sdpa(query, key, value, attn_mask=None, is_causal=False, *, scale=None, enable_gqa=False):
    if _strides.is_shortcut(query, key, value):
        return _strides.zeros_shortcut(query, value)
    return _empty_sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, True)


def _sdpa_flops(query, key, value, *_args, out_val=None, **_options):
    """2·(q·k) + 2·(p·v), as PyTorch counts its own; masks count nothing."""
    rows = math.prod(_strides.out_shape(query, key, value, _options.get("enable_gqa", False))[:-1])
    return 2 * rows * key[-2] * (query[-1] + value[-1])


def sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # fmt: skip
    """`rapt.scaled_dot_product_attention` on torch tensors: PyTorch's signature, Rapt's errors, never a fallback."""
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p={dropout_p} is not computed yet; use dropout_p=0.0")
    if attn_mask is not None and is_causal:
        raise OptionError(
            "attn_mask together with is_causal=True is not allowed here, as in PyTorch; "
            'use rapt.attention(query, key, value, mask=attn_mask, causal="top_left")'
        )
    if _is_compiling() or _modes() or is_traced(query, key, value):
        return torch.ops.rapt.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    tensors = (query, key, value, attn_mask)
    _refuse_grad(tensors)
    _refuse(("query", "key", "value", "attn_mask"), tensors)
    if min(query.dim(), key.dim(), value.dim()) >= 2 and _route.valid_shapes(query, key, value, attn_mask, enable_gqa):
        return serve(query, key, value, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa)
    _route.check_kv_len(key, value)
    if query.dim() == key.dim() == 4 and key.shape[1] != query.shape[1] and key.shape[1] != 1 and not enable_gqa:
        raise ShapeError(
            f"query has {query.shape[1]} heads, key {key.shape[1]}; use enable_gqa=True where they are groups"
        )
    # The native door names what is wrong.
    out = _empty_out(query, value, None)
    causal = "top_left" if is_causal else None
    _native.run_into(query, key, value, attn_mask, None, None, out, None, causal, None, None, scale, "bhsd")
    return out


# --- registration ----------------------------------------------------------------------------------------------------------


def _autograd(name, run):
    """Above the backend: refuse gradients, then compute at once, or go on below where a mode must see the op."""
    op = getattr(torch.ops.rapt, name).default

    def kernel(*args, **kwargs):
        _refuse_grad([a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)])
        if _modes() or not all(_route.is_plain(a) for a in args if isinstance(a, torch.Tensor)):
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)
        return run(*args, **kwargs)

    return kernel


def _define():
    tags = [t for t in ("needs_exact_strides", "needs_fixed_stride_order") if hasattr(torch.Tag, t)][:1]
    tags = tuple(getattr(torch.Tag, t) for t in tags)
    library = torch.library.Library("rapt", "FRAGMENT")
    kernels = {
        "attention": (_attention, _fake_attention),
        "attention_lse": (_attention_lse, _fake_attention_lse),
        "attention_into": (_attention_into, _fake_attention_into),
        "scaled_dot_product_attention": (_sdpa, _fake_sdpa),
    }
    for name, (run, fake) in kernels.items():
        library.define(name + _SCHEMAS[name], tags=tags)
        library.impl(name, run, "CPU")
        library.impl(name, run, "CUDA")
        library.impl(name, _autograd(name, run), "Autograd")
        torch.library.register_fake(f"rapt::{name}", fake, lib=library)
    return library


library = _define()


def _register_flops(module):
    module.register_flop_formula(torch.ops.rapt.scaled_dot_product_attention)(_sdpa_flops)


# Importing the counter imports triton, which takes longer than a first call.
when_imported("torch.utils.flop_counter", _register_flops)
