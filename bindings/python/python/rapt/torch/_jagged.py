"""Nested tensors of layout `torch.jagged` in `scaled_dot_product_attention`: `[batch, heads, sequence, head_dim]`.

`NestedTensor.__torch_function__` takes PyTorch's call before any dispatcher sees it, and hands it to one Python function, by its
name in the module `torch.nested._internal.ops`. While Rapt is registered that name is `_sdpa` here; afterwards it is PyTorch's
function again. A module that is not loaded yet is waited for. Who answers is decided in the native module.

What is ragged elsewhere than in its sequences is PyTorch's: of `[batch, ragged, len, head_dim]` it makes a dense call, which
comes to Rapt as any other.
"""

import torch
from rapt import _native

from . import _autograd, _dropout, _jagged_ops
from ._imports import when_imported
from ._stats import count_fallback

_MODULE = "torch.nested._internal.ops"
_NAME = "jagged_scaled_dot_product_attention"

_modes = torch._C._len_torch_dispatch_stack

# The module, once it is loaded, and PyTorch's own function.
_module = None
_stock = None
_is_taken = False
_is_waiting = False


def take():
    """Answer from now on."""
    global _is_taken, _is_waiting
    _is_taken = True
    if _module is not None:
        _put()
    elif not _is_waiting:
        _is_waiting = True
        when_imported(_MODULE, _loaded)


def leave():
    """PyTorch answers again."""
    global _is_taken
    _is_taken = False
    # Whoever replaced it after us keeps it; `_sdpa` is PyTorch's then.
    if _module is not None and getattr(_module, _NAME, None) is _sdpa:
        setattr(_module, _NAME, _stock)


def _loaded(module):
    global _module
    _module = module
    if _is_taken:
        _put()


def _put():
    global _stock
    found = getattr(_module, _NAME, None)
    if found is not None and found is not _sdpa:
        _stock = found
        setattr(_module, _NAME, _sdpa)


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if enable_gqa:  # torch 2.4 has no such word
        options["enable_gqa"] = True
    if not _is_taken or _is_ragged_in_heads(query, key, value):
        return _stock(query, key, value, **options)
    # Above any choice of a kernel, as PyTorch's own does it.
    autocast = _stock.__globals__.get("_autocast")
    if autocast is not None:
        query, key, value, options["attn_mask"] = autocast(query, key, value, attn_mask)
    reason, traced = _native.torch_decide_jagged(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False
    )  # fmt: skip
    if reason is None and key.is_cuda and not _jagged_ops.share_offsets(key, value, traced):
        reason = "layout jagged"
    if reason is None:
        try:
            return _attend(query, key, value, dropout_p, is_causal, scale, enable_gqa, traced)
        except _native.UnsupportedError:
            # Head dims whose kernel reads no offsets: nothing was launched.
            if traced:
                raise
            reason = "layout jagged"
    if not traced:
        count_fallback(reason)
    return _stock(query, key, value, **options)


def _is_ragged_in_heads(*tensors):
    """Whether PyTorch makes one dense call of this."""
    return all(getattr(tensor, "_ragged_idx", None) == 1 and tensor.dim() > 3 for tensor in tensors)


def sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """`rapt.scaled_dot_product_attention` where one of q, k and v is nested: Rapt's errors, never a fallback."""
    _, traced = _native.torch_decide_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, True)
    return _attend(query, key, value, dropout_p, is_causal, scale, enable_gqa, traced)


def _attend(query, key, value, dropout_p, is_causal, scale, enable_gqa, traced):
    run, values = _jagged_ops.jagged, _inner
    if _autograd.needs_grad((query, key, value)):
        run, values = _jagged_ops.node, _differentiable
    if traced or _modes():
        run = torch.ops.rapt.jagged_attention
    arguments = [values(tensor).transpose(0, 1) for tensor in (query, key, value)]
    sequences = [part for tensor in (query, key, value) for part in (tensor._offsets, tensor._lengths)]
    draw = _dropout.draw(arguments[0], in_graph=traced or bool(_modes())) if dropout_p else None
    options = {"scale": scale, "enable_gqa": enable_gqa, **_dropout.words(dropout_p, draw)}
    out = run(*arguments, *sequences, is_causal, **options)
    # Not `torch.nested.nested_tensor_from_jagged`, which refuses to be traced. What is known of the lengths of q holds for the answer.
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths as nested

    known = {name: getattr(query, f"_maybe_{name}", None) for name in ("min_seqlen", "max_seqlen")}
    return nested(out, query._offsets, query._lengths, **known).transpose(1, 2)


def _inner(tensor):
    return tensor._values


def _differentiable(tensor):
    """Its values, whose gradient is its own."""
    return tensor.values()
