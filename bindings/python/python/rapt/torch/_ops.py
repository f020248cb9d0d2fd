"""Rapt's own torch ops and the functions that call them.

    torch.ops.rapt.attention            -> out
    torch.ops.rapt.attention_lse        -> (out, lse)
    torch.ops.rapt.attention_into       fills `out` (and `lse`)
    torch.ops.rapt.attention_backward   the gradients of those inputs that are wanted
    torch.ops.rapt.scaled_dot_product_attention   PyTorch's words, broadcast and output strides; `…_lse` and `…_backward` for training
    torch.ops.rapt.varlen_attention     sequences that lie one after another (`_varlen`)
    torch.ops.rapt.jagged_attention     the values of nested tensors, their offsets and lengths (`_jagged_ops`)

Each has a schema and a fake kernel that gives the exact shape, dtype and strides, so compiled graphs carry it as one node.
In eager mode the functions call the native module at once: a trip through the dispatcher costs more than the rest of a small call.
With grad mode on and an input that requires grad they become nodes of autograd (`_autograd`), or raise: nothing is ever detached in silence.
"""

import math

import torch
from rapt import DtypeMismatchError, OptionError, Quantized, UnsupportedError, _native

from . import _autograd, _dropout, _jagged_ops, _outputs, _varlen
from ._autograd import empty_lse as _empty_lse
from ._autograd import needs_grad
from ._imports import when_imported
from ._stats import count_served

_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling
_is_traced = _native.torch_is_traced

# What of a `Quantized` is no tensor: its words with spaces in between, the scale of the whole tensor, and the last size where codes share bytes.
_PARTS = "str? {0}_scheme=None, Tensor? {0}_global_scale=None, SymInt? {0}_head_dim=None"
_DROPOUT = "float dropout_p=0.0, Tensor? dropout_draw=None"
_OPTIONS = ", ".join([_native.options_schema(), *map(_PARTS.format, "qkv"), _DROPOUT])
_SCHEMAS = {
    "attention": f"(Tensor q, Tensor k, Tensor v, *, {_OPTIONS}, ScalarType? out_dtype=None) -> Tensor",
    "attention_lse": f"(Tensor q, Tensor k, Tensor v, *, {_OPTIONS}, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    "attention_into": f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, *, {_OPTIONS}) -> ()",
    "attention_backward": (
        "(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool[5] wanted, "
        f"*, {_OPTIONS}) -> Tensor[]"
    ),
    "scaled_dot_product_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, *, "
        f"float? scale=None, bool enable_gqa=False, {_DROPOUT}) -> Tensor"
    ),
    "scaled_dot_product_attention_lse": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, *, "
        f"float? scale=None, bool enable_gqa=False, {_DROPOUT}) -> (Tensor, Tensor)"
    ),
    "scaled_dot_product_attention_backward": (
        "(Tensor d_o, Tensor? d_lse, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor out, Tensor lse, "
        f"bool[4] wanted, bool is_causal=False, *, float? scale=None, bool enable_gqa=False, {_DROPOUT}) -> Tensor[]"
    ),
    **_varlen.SCHEMAS,
    **_jagged_ops.SCHEMAS,
}


# --- output shapes -----------------------------------------------------------------------------------------------------


def _empty_out(q, v, out_dtype, head_dim_v):
    dtype = q.dtype if out_dtype is None else out_dtype
    last = v.shape[-1:] if head_dim_v is None else (head_dim_v,)
    return torch.empty((*q.shape[:-1], *last), dtype=dtype, device=q.device)


# --- rapt.attention ------------------------------------------------------------------------------------------------------


def is_traced_call(q, k, v):
    """Whether `rapt.attention` on these must end in an op of torch, because something traces."""
    return _is_compiling() or _modes() or _is_traced(q, k, v)


def counted(answer):
    """`answer`, counted among what was served of torch's tensors."""
    count_served()
    return answer


def attention(q, k, v, *, causal=None, dropout_p=None, dropout_draw=None, **options):
    """`rapt.attention` on torch tensors, whose arguments it has. Shapes, units and errors as documented there.

    For whoever offers dropout by another name: `dropout_p` above 0 drops weights by `dropout_draw`, int64 `[2]`, or without one by a draw of
    PyTorch's generator. The default is no float, of which torch.compile(dynamic=True) would make an input first, and compile twice.
    """
    if dropout_p:
        if dropout_draw is None:
            dropout_draw = _dropout.draw(q, in_graph=is_traced_call(q, k, v))
        options |= _dropout.words(dropout_p, dropout_draw)
    elif not is_traced_call(q, k, v):
        answer = _native.attention(q, k, v, causal=causal, **options)
        count_served()
        return answer
    if causal is True:
        causal = "top_left"
    elif causal is False:
        causal = None
    return _through_ops(q, k, v, causal=causal, **options)


_SHARED = ("int4", "mxfp4", "nvfp4")


def _opened(name, operand, options):
    """The tensor of q, k or v. The parts of a `Quantized` become options of the op."""
    if not isinstance(operand, Quantized):
        return operand
    for part in (f"{name}_descale", f"{name}_zero_point"):
        if options.get(part) is not None:
            raise OptionError(f"{part} = a tensor; allowed: None: what it belongs to is a rapt.Quantized, which holds its own")
    options[f"{name}_descale"], options[f"{name}_zero_point"] = operand._scale, operand.zero_point
    options[f"{name}_scheme"] = f"{operand.format} {operand.granularity} {operand.block_size or 0} {operand.scale_layout}"
    options[f"{name}_global_scale"] = operand._global_scale
    options[f"{name}_head_dim"] = operand.shape[-1] if operand.format in _SHARED else None
    return operand._bytes  # inductor does not know torch's dtype of two e2m1 in a byte


def _closed(name, tensor, options):
    """What `_opened` took apart."""
    scheme, global_scale, head_dim = (options.pop(f"{name}_{part}", None) for part in ("scheme", "global_scale", "head_dim"))
    if scheme is None:
        return tensor
    format, granularity, block_size, scale_layout = scheme.split(" ")
    scale = options.pop(f"{name}_descale", None)
    return Quantized(
        tensor,
        scale.view(torch.float8_e8m0fnu) if format in ("mxfp8", "mxfp4") else scale,
        format=format,
        shape=tensor.shape if head_dim is None else (*tensor.shape[:-1], head_dim),
        granularity=granularity,
        block_size=int(block_size) or None,
        zero_point=options.pop(f"{name}_zero_point", None),
        global_scale=None if global_scale is None else global_scale.item(),
        scale_layout=scale_layout,
    )


def _through_ops(q, k, v, *, window=None, layout="bhsd", out=None, out_dtype=None, return_lse=False, tolerance=None, device=None, **options):
    if tolerance is not None:
        raise UnsupportedError("tolerance is judged from the numbers of a call, and this one is being traced. Mend: `tolerance=None`")
    if device is not None:
        raise UnsupportedError("an op of torch computes where its tensors lie, and this call is being traced. Mend: `device=None`")
    q, k, v = _opened("q", q, options), _opened("k", k, options), _opened("v", v, options)
    if out_dtype is None and options.get("q_descale") is not None:
        raise OptionError("out_dtype = None; allowed: a floating-point dtype: q is codes, which name no dtype of out")
    left, right = (None, None) if window is None else window
    options = {**options, "window_left": left, "window_right": right, "layout": layout}
    if out is not None:
        asked = q.dtype if out_dtype is None else out_dtype
        if out.dtype != asked:
            raise DtypeMismatchError(f"out has dtype {out.dtype}, asked for is {asked}. Mend: `out=torch.empty_like(out, dtype={asked})`")
        lse = _empty_lse(q, layout) if return_lse else None
        torch.ops.rapt.attention_into(q, k, v, out, lse, **options)
        return (out, lse) if return_lse else out
    if return_lse:
        return torch.ops.rapt.attention_lse(q, k, v, **options, out_dtype=out_dtype)
    return torch.ops.rapt.attention(q, k, v, **options, out_dtype=out_dtype)


def _attention_into(q, k, v, out, lse, *, window_left=None, window_right=None, dropout_p=0.0, dropout_draw=None, **options):
    _dropout.expect_draw(dropout_p, dropout_draw)
    window = None if window_left is None and window_right is None else (window_left, window_right)
    q, k, v = _closed("q", q, options), _closed("k", k, options), _closed("v", v, options)
    _native.run_into(q, k, v, out, lse, window=window, **options, dropout=_dropout.native(dropout_p, dropout_draw))
    count_served()


def _attention(q, k, v, *, out_dtype=None, v_head_dim=None, **options):
    out = _empty_out(q, v, out_dtype, v_head_dim)
    _attention_into(q, k, v, out, None, v_head_dim=v_head_dim, **options)
    return out


def _attention_lse(q, k, v, *, layout="bhsd", out_dtype=None, v_head_dim=None, **options):
    out, lse = _empty_out(q, v, out_dtype, v_head_dim), _empty_lse(q, layout)
    _attention_into(q, k, v, out, lse, layout=layout, v_head_dim=v_head_dim, **options)
    return out, lse


def _fake_attention(q, k, v, *, layout="bhsd", out_dtype=None, v_head_dim=None, **_options):
    return _empty_out(q, v, out_dtype, v_head_dim)


def _fake_attention_lse(q, k, v, *, layout="bhsd", out_dtype=None, v_head_dim=None, **_options):
    return _empty_out(q, v, out_dtype, v_head_dim), _empty_lse(q, layout)


def _fake_attention_into(q, k, v, out, lse, **_options):
    return None


varlen_attention = _varlen.attention
varlen_attention_backward = _varlen.traced_backward


def attention_backward(d_o, q, k, v, out, lse, *, d_lse=None, mask_grad=False, window=None, causal=None, **options):
    """`rapt.attention_backward` where something traces."""
    left, right = (None, None) if window is None else window
    options["causal"] = {True: "top_left", False: None}.get(causal, causal)
    wanted = [True, True, True, mask_grad, options.get("sinks") is not None]
    return torch.ops.rapt.attention_backward(d_o, d_lse, q, k, v, out, lse, wanted, **options, window_left=left, window_right=right)


# --- rapt.scaled_dot_product_attention -----------------------------------------------------------------------------------


def _sdpa(
    query, key, value, attn_mask=None, is_causal=False, *, scale=None, enable_gqa=False, dropout_p=0.0, dropout_draw=None
):  # fmt: skip
    _dropout.expect_draw(dropout_p, dropout_draw)
    return _native.torch_sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, None, dropout_p, dropout_draw)


def _fake_sdpa(
    query, key, value, attn_mask=None, is_causal=False, *, scale=None, enable_gqa=False, dropout_p=0.0, dropout_draw=None
):  # fmt: skip
    _dropout.expect_draw(dropout_p, dropout_draw)
    order = _order(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p)
    return _outputs.new(query, _outputs.shape_of(query.shape, key.shape, value.shape, enable_gqa), order)


def _order(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p=0.0):
    return _native.torch_order(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p)


def _sdpa_lse(query, key, value, attn_mask=None, is_causal=False, *, scale=None, enable_gqa=False, dropout_p=0.0, **draw):
    _dropout.expect_draw(dropout_p, draw.get("dropout_draw"))
    order = _order(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p)
    options = {"scale": scale, "enable_gqa": enable_gqa, "dropout_p": dropout_p, **draw}
    answer = _autograd.sdpa_lse(query, key, value, attn_mask, is_causal, order=order, **options)
    count_served()
    return answer


def _fake_sdpa_lse(query, key, value, attn_mask=None, is_causal=False, **options):
    out = _fake_sdpa(query, key, value, attn_mask, is_causal, **options)
    return out, _empty_lse(out, "bhsd")


def _sdpa_flops(query, key, value, *_args, out_val=None, **_options):
    """2·(q·k) + 2·(p·v), as PyTorch counts its own; masks count nothing."""
    rows = math.prod(_outputs.shape_of(query, key, value, _options.get("enable_gqa", False))[:-1])
    return 2 * rows * key[-2] * (query[-1] + value[-1])


def _sdpa_backward_flops(_d_o, _d_lse, query, key, value, _mask, out, *_args, out_val=None, **_options):
    """s again, dq and dk of head_dim; dp and dv of head_dim_v: as PyTorch counts its own."""
    return 2 * math.prod(out[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # fmt: skip
    """`rapt.scaled_dot_product_attention` on torch tensors: PyTorch's signature, Rapt's errors, never a fallback."""
    if getattr(query, "layout", None) is torch.jagged:  # a `Quantized` has none
        from . import _jagged

        return _jagged.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if is_traced_call(query, key, value):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if dropout_p:
            options |= _dropout.words(dropout_p, _dropout.draw(query, in_graph=True))
        return torch.ops.rapt.scaled_dot_product_attention(query, key, value, attn_mask, is_causal, **options)
    return _native.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )  # fmt: skip


# --- registration ----------------------------------------------------------------------------------------------------------


def _refuse_gradients(*args, **kwargs):
    _native.refuse_gradients(*(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)))


def _attention_node(q, k, v, *, gives_lse=False, **options):
    answer = _autograd.differentiable(q, k, v, gives_lse=gives_lse, **options)
    if not is_traced_call(q, k, v):
        count_served()
    return answer


def _attention_lse_node(q, k, v, **options):
    return _attention_node(q, k, v, gives_lse=True, **options)


def _sdpa_node(
    query, key, value, attn_mask=None, is_causal=False, *, scale=None, enable_gqa=False, dropout_p=0.0, dropout_draw=None, gives_lse=False
):  # fmt: skip
    _dropout.expect_draw(dropout_p, dropout_draw)
    order = _order(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p)
    return _autograd.sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, order, dropout_p, dropout_draw, gives_lse)


def _sdpa_lse_node(*args, **kwargs):
    return _sdpa_node(*args, **kwargs, gives_lse=True)


def _above(op, run, node):
    """Above the backend: `node` where a gradient is needed, else compute at once, or go on below where a mode must see the op."""

    def below(*args, **kwargs):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    def kernel(*args, **kwargs):
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if needs_grad(tensors):
            if not (tensors[0].is_cpu or tensors[0].is_cuda):
                _refuse_gradients(*tensors)
            return _autograd.once(lambda: below(*args, **kwargs), tensors) if node is None else node(*args, **kwargs)
        if _modes() or not all(_native.torch_is_plain(a) for a in args if isinstance(a, torch.Tensor)):
            return below(*args, **kwargs)
        return run(*args, **kwargs)

    return kernel


def _define():
    tags = [t for t in ("needs_exact_strides", "needs_fixed_stride_order") if hasattr(torch.Tag, t)][:1]
    tags = tuple(getattr(torch.Tag, t) for t in tags)
    library = torch.library.Library("rapt", "FRAGMENT")
    # The kernel, the fake one, and what stands in its place where a gradient is needed: None, gradients that are not differentiated again.
    sdpa, attention = "scaled_dot_product_attention", "attention"
    kernels = {
        attention: (_attention, _fake_attention, _attention_node),
        f"{attention}_lse": (_attention_lse, _fake_attention_lse, _attention_lse_node),
        f"{attention}_into": (_attention_into, _fake_attention_into, _refuse_gradients),
        f"{attention}_backward": (_autograd.attention_backward, _autograd.fake_attention_backward, None),
        sdpa: (_sdpa, _fake_sdpa, _sdpa_node),
        f"{sdpa}_lse": (_sdpa_lse, _fake_sdpa_lse, _sdpa_lse_node),
        f"{sdpa}_backward": (_autograd.sdpa_backward, _autograd.fake_sdpa_backward, None),
        **_varlen.KERNELS,
        **_jagged_ops.KERNELS,
    }
    for name, (run, fake, node) in kernels.items():
        library.define(name + _SCHEMAS[name], tags=tags)
        library.impl(name, run, "CPU")
        library.impl(name, run, "CUDA")
        library.impl(name, run, "MPS")
        library.impl(name, _above(getattr(torch.ops.rapt, name).default, run, node), "Autograd")
        torch.library.register_fake(f"rapt::{name}", fake, lib=library)
    return library


library = _define()


def _register_flops(module):
    ops = torch.ops.rapt
    module.register_flop_formula([ops.scaled_dot_product_attention, ops.scaled_dot_product_attention_lse])(_sdpa_flops)
    module.register_flop_formula(ops.scaled_dot_product_attention_backward)(_sdpa_backward_flops)


# Importing the counter imports triton, which takes longer than a first call.
when_imported("torch.utils.flop_counter", _register_flops)
