"""Sequences that lie one after another: `rapt.varlen_attention` on torch tensors, its node of autograd, and its ops.

    torch.ops.rapt.varlen_attention            -> out
    torch.ops.rapt.varlen_attention_lse        -> (out, lse)
    torch.ops.rapt.varlen_attention_backward   the gradients of those of q, k, v and sinks that are wanted

Tensors are [total, heads, head_dim], lse is [heads, total]. Dropout, which `rapt.varlen_attention` does not have, is here for whoever calls with
PyTorch's or flash-attention's words: a sequence is its own batch entry. Deliberately absent: a mask, and codes where something traces.
"""

import typing

import torch
from rapt import DtypeMismatchError, Quantized, UnsupportedError, _native

from . import _autograd, _dropout
from ._stats import count_served

_OPTIONS = (
    "str? causal=None, SymInt? window_left=None, SymInt? window_right=None, float? softcap=None, float? scale=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, float dropout_p=0.0, Tensor? dropout_draw=None"
)
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_kv"
SCHEMAS = {
    "varlen_attention": f"({_TENSORS}, *, {_OPTIONS}, ScalarType? out_dtype=None) -> Tensor",
    "varlen_attention_lse": f"({_TENSORS}, *, {_OPTIONS}, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    "varlen_attention_backward": (
        "(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
        f"Tensor cu_seqlens_kv, bool[4] wanted, *, {_OPTIONS}) -> Tensor[]"
    ),
}


def attention(
    q, k, v, cu_seqlens_q, cu_seqlens_kv, *, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None,
    compute="exact", out=None, out_dtype=None, return_lse=False, dropout_p=0.0, dropout_draw=None, **codes,
):  # fmt: skip
    """`rapt.varlen_attention`, with gradients, under whatever traces, and with dropout: `dropout_draw` is seed and offset, int64 `[2]`; None draws
    them from PyTorch's generator. Counted as served."""
    traced = torch.compiler.is_compiling() or _autograd._through_ops(q, k, v)
    if dropout_p and dropout_draw is None:
        dropout_draw = _dropout.draw(q, in_graph=traced)
    wants = _autograd.needs_grad([t for t in (q, k, v, sinks, alibi_slopes) if isinstance(t, torch.Tensor)])
    if not traced and not wants:
        answer = _native.varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_kv, causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks,
            alibi_slopes=alibi_slopes, compute=compute, out=out, out_dtype=out_dtype, return_lse=return_lse,
            dropout=_dropout.native(dropout_p, dropout_draw), **codes,
        )  # fmt: skip
        count_served()
        return answer
    what = "an input requires grad" if wants else "this call is being traced"
    if any(isinstance(given, Quantized) for given in (q, k, v)) or any(given is not None for given in codes.values()):
        raise UnsupportedError(f"codes where {what}. {_autograd.NO_GRAD if wants else 'Mend: call it outside of what is traced'}")
    if compute != "exact":
        raise UnsupportedError(f'an approximation where {what}. Mend: `compute="exact"`')
    if out is not None:
        if wants:
            raise UnsupportedError(f"out with inputs that require grad: such a call keeps no graph. Mend: `out=None`, or {_autograd.NO_GRAD[6:]}")
        asked = q.dtype if out_dtype is None else out_dtype
        if out.dtype != asked:
            raise DtypeMismatchError(f"out has dtype {out.dtype}, asked for is {asked}. Mend: `out=torch.empty_like(out, dtype={asked})`")
    left, right = (None, None) if window is None else window
    options = {
        "causal": {True: "top_left", False: None}.get(causal, causal), "window_left": left, "window_right": right, "softcap": softcap,
        "scale": scale, "sinks": sinks, "alibi_slopes": alibi_slopes, "dropout_p": dropout_p, "dropout_draw": dropout_draw,
        "out_dtype": out_dtype,
    }  # fmt: skip
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_kv
    if not traced:
        return node(*tensors, gives_lse=return_lse, **options)
    ops = torch.ops.rapt
    if out is None:
        return (ops.varlen_attention_lse if return_lse else ops.varlen_attention)(*tensors, **options)
    answer = ops.varlen_attention_lse(*tensors, **options) if return_lse else (ops.varlen_attention(*tensors, **options),)
    out.copy_(answer[0])
    return (out, answer[1]) if return_lse else out


# --- the node ----------------------------------------------------------------------------------------------------------------


class Varlen(typing.NamedTuple):
    """A call; its inputs are q, k, v, sinks and both offsets."""

    gives_lse: bool
    options: dict  # in the words of the op, without sinks, out_dtype and those of dropout
    out_dtype: object
    dropout_p: float
    draw: object

    def forward(self, q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv):
        options = {**self.options, "sinks": sinks, "out_dtype": self.out_dtype, "dropout_p": self.dropout_p, "dropout_draw": self.draw}
        run = run_lse
        if _autograd._through_ops(q, k, v):
            run = torch.ops.rapt.varlen_attention_lse
        with torch._C._AutoDispatchBelowAutograd():
            return run(q, k, v, cu_seqlens_q, cu_seqlens_kv, **options)

    def backward(self, wanted, d_o, d_lse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, out, lse):
        options = {**self.options, "sinks": sinks, "dropout_p": self.dropout_p, "dropout_draw": self.draw}
        run = backward
        if _autograd._through_ops(d_o, q, k):
            run = torch.ops.rapt.varlen_attention_backward
        with torch._C._AutoDispatchBelowAutograd():
            made = run(d_o, d_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, list(wanted[:4]), **options)
        return _autograd._spread(wanted, made)


def node(
    q, k, v, cu_seqlens_q, cu_seqlens_kv, *, gives_lse=False, sinks=None, out_dtype=None, dropout_p=0.0, dropout_draw=None, **options
):  # fmt: skip
    """The node of `torch.ops.rapt.varlen_attention` (and `varlen_attention_lse`), counted where nothing traces."""
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad:
        raise UnsupportedError("alibi_slopes requires grad, and no gradient of it is computed. Mend: `alibi_slopes.detach()`")
    if not (q.is_cpu or q.is_cuda):
        _native.refuse_gradients(*(t for t in (q, k, v, sinks) if t is not None))
    call = Varlen(gives_lse, options, out_dtype, dropout_p, dropout_draw)
    answer = _autograd._Node.apply(call, q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv)
    if not _autograd._through_ops(q, k, v):
        count_served()
    return answer


def node_lse(*tensors, **options):
    return node(*tensors, gives_lse=True, **options)


# --- the ops -----------------------------------------------------------------------------------------------------------------


def _native_words(options):
    """`options` of the ops as the native functions take them."""
    options = _autograd.window_of(dict(options))
    p, draw = options.pop("dropout_p", 0.0), options.pop("dropout_draw", None)
    _dropout.expect_draw(p, draw)
    return {**options, "dropout": _dropout.native(p, draw)}


def run_lse(q, k, v, cu_seqlens_q, cu_seqlens_kv, *, out_dtype=None, **options):
    """(out, lse)."""
    return _native.varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_kv, out_dtype=out_dtype, return_lse=True, **_native_words(options)
    )  # fmt: skip


def _op(*tensors, **options):
    answer = _native.varlen_attention(*tensors, out_dtype=options.pop("out_dtype", None), **_native_words(options))
    count_served()
    return answer


def _op_lse(*tensors, **options):
    answer = run_lse(*tensors, **options)
    count_served()
    return answer


def backward(d_o, d_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, wanted, *, sinks=None, **options):
    """Gradients of those of q, k, v and sinks that are `wanted`: a list."""
    made = _autograd._empty_like(wanted, q, k, v, sinks)
    dq, dk, dv, d_sinks = _autograd._spread(wanted, made)
    _native.varlen_backward_into(
        d_o, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, dq, dk, dv, d_sinks, d_lse=d_lse, sinks=sinks, **_native_words(options)
    )  # fmt: skip
    return made


def traced_backward(d_o, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, *, d_lse=None, window=None, causal=None, sinks=None,
                    compute="exact", **options):  # fmt: skip
    """`rapt.varlen_attention_backward` where something traces."""
    if compute != "exact":
        raise UnsupportedError('an approximation has no gradient. Mend: `compute="exact"`')
    left, right = (None, None) if window is None else window
    options["causal"] = {True: "top_left", False: None}.get(causal, causal)
    wanted = [True, True, True, sinks is not None]
    return torch.ops.rapt.varlen_attention_backward(
        d_o, d_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, wanted, sinks=sinks, **options, window_left=left, window_right=right
    )  # fmt: skip


def _fake(q, k, v, _cu_seqlens_q, _cu_seqlens_kv, *, out_dtype=None, **_options):
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype or q.dtype, device=q.device)


def _fake_lse(q, *tensors, **options):
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _fake(q, *tensors, **options), torch.empty((q.shape[1], q.shape[0]), dtype=lse, device=q.device)


def _fake_backward(_d_o, _d_lse, q, k, v, _out, _lse, _cu_seqlens_q, _cu_seqlens_kv, wanted, *, sinks=None, **_options):
    return _autograd._empty_like(wanted, q, k, v, sinks)


# By name: the kernel, the fake one, and what stands in its place where a gradient is needed.
KERNELS = {
    "varlen_attention": (_op, _fake, node),
    "varlen_attention_lse": (_op_lse, _fake_lse, node_lse),
    "varlen_attention_backward": (backward, _fake_backward, None),
}
