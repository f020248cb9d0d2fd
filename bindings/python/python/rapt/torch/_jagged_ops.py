"""The ops behind attention of nested tensors, and their node of autograd: values `[rows, heads, head_dim]`, offsets and lengths.

    torch.ops.rapt.jagged_attention            -> out, the values of the answer
    torch.ops.rapt.jagged_attention_lse        -> (out, lse), lse [heads, rows of q]
    torch.ops.rapt.jagged_attention_backward   the gradients of those values that are wanted

Rows that no sequence has are zeros in whatever is written. Heads that broadcast are views with a stride of 0, whose gradient is the sum.
"""

import typing

import torch
from rapt import ShapeError, UnsupportedError, _native

from . import _autograd, _dropout, _outputs

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor q_offsets, Tensor? q_lengths, Tensor k_offsets, Tensor? k_lengths, "
    "Tensor v_offsets, Tensor? v_lengths"
)
_OPTIONS = (
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, float dropout_p=0.0, Tensor? dropout_draw=None"
)
SCHEMAS = {
    "jagged_attention": f"({_TENSORS}, {_OPTIONS}) -> Tensor",
    "jagged_attention_lse": f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    "jagged_attention_backward": f"(Tensor d_o, Tensor? d_lse, Tensor out, Tensor lse, bool[3] wanted, {_TENSORS}, {_OPTIONS}) -> Tensor[]",
}


def jagged(*tensors, scale=None, enable_gqa=False, dropout_p=0.0, dropout_draw=None, return_lse=False):
    """Values are [rows, heads, head_dim]; so is the answer, with the rows of q, and zeros in those that no sequence has. Counted as served."""
    query, key, value, *sequences = tensors[:9]
    is_causal = tensors[9] if len(tensors) > 9 else False
    sequences = tuple(zip(sequences[::2], sequences[1::2]))
    _dropout.expect_draw(dropout_p, dropout_draw)
    if query.is_cuda:
        if dropout_p and any(lengths is not None for _, lengths in sequences):
            raise UnsupportedError("dropout of narrowed nested tensors on a GPU, whose sequences have other numbers there. Mend: `dropout_p=0.0`")
        sequences = _on_device(*sequences)
    return _native.torch_jagged(
        query, key, value, *sequences, is_causal, scale, enable_gqa, _dropout.native(dropout_p, dropout_draw), return_lse
    )  # fmt: skip


def _jagged_lse(*tensors, **options):
    return jagged(*tensors, **options, return_lse=True)


def _on_device(of_q, of_k, of_v):
    """Offsets that a GPU reads: one more than sequences, in int32. Nothing waits for it, so whether the offsets of k and v are equal is
    asked of their memory."""
    if not all(map(_is_same, of_k, of_v)):
        raise UnsupportedError(
            "on a GPU keys and values of nested tensors share one tensor of offsets. Mend: "
            "`torch.nested.nested_tensor_from_jagged(values, k.offsets())`"
        )
    if of_q[1] is None and of_k[1] is None:
        cu_q, cu_kv = (offsets.to(torch.int32) for offsets, _ in (of_q, of_k))
    else:
        # Between two sequences: first queries of none, then keys of none.
        (q0, q1), (k0, k1) = (
            (offsets[:-1], offsets[1:] if lengths is None else offsets[:-1] + lengths) for offsets, lengths in (of_q, of_k)
        )
        before = torch.nn.functional.pad(k1[:-1], (1, 0)) if len(k1) else k1
        both = torch.stack((q0, q0, q1), 1), torch.stack((before, k0, k1), 1)
        cu_q, cu_kv = (torch.nn.functional.pad(each.flatten(), (1, 0)).to(torch.int32) for each in both)
    return (cu_q, None), (cu_kv, None), (cu_kv, None)


def _is_same(one, other):
    """Whether they are one tensor, or None both."""
    if one is None or other is None:
        return one is other
    place = lambda of: (of.data_ptr(), of.shape, of.stride(), of.dtype)  # noqa: E731
    return one is other or place(one) == place(other)


def share_offsets(key, value, traced):
    """Whether the sequences of two nested tensors lie at the same rows, as far as can be told without waiting for a GPU."""
    pairs = (key._offsets, value._offsets), (key._lengths, value._lengths)
    return all(one is other if traced else _is_same(one, other) for one, other in pairs)


def _fake_jagged(query, key, value, *_sequences, enable_gqa=False, **_options):
    heads = query.shape[1:2] if enable_gqa else _outputs.broadcast(query.shape[1:2], key.shape[1:2], value.shape[1:2])
    if heads is None:
        raise ShapeError("without enable_gqa the heads of q, k and v must be equal or 1. Mend: `enable_gqa=True`")
    return query.new_empty((query.shape[0], heads[0], value.shape[2]))


def _fake_jagged_lse(query, *tensors, **options):
    out = _fake_jagged(query, *tensors, **options)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty((out.shape[1], out.shape[0]), dtype=dtype)


# --- gradients ---------------------------------------------------------------------------------------------------------------


class Jagged(typing.NamedTuple):
    """A call; its inputs are the nine tensors of the op."""

    gives_lse: bool
    is_causal: bool
    options: dict  # scale and enable_gqa
    dropout_p: float
    draw: object

    def forward(self, *tensors):
        run = _jagged_lse
        if _autograd._through_ops(*tensors[:3]):
            run = torch.ops.rapt.jagged_attention_lse
        with torch._C._AutoDispatchBelowAutograd():
            return run(*tensors, self.is_causal, **self.options, dropout_p=self.dropout_p, dropout_draw=self.draw)

    def backward(self, wanted, d_o, d_lse, *saved):
        *tensors, out, lse = saved
        run = backward
        if _autograd._through_ops(d_o, *tensors[:2]):
            run = torch.ops.rapt.jagged_attention_backward
        options = {**self.options, "dropout_p": self.dropout_p, "dropout_draw": self.draw}
        with torch._C._AutoDispatchBelowAutograd():
            made = run(d_o, d_lse, out, lse, list(wanted[:3]), *tensors, self.is_causal, **options)
        return _autograd._spread(wanted, made)


def node(*tensors, scale=None, enable_gqa=False, dropout_p=0.0, dropout_draw=None, gives_lse=False):
    """The node of `torch.ops.rapt.jagged_attention` (and `jagged_attention_lse`)."""
    if not (tensors[0].is_cpu or tensors[0].is_cuda):
        _native.refuse_gradients(*tensors[:3])
    is_causal = tensors[9] if len(tensors) > 9 else False
    call = Jagged(gives_lse, is_causal, {"scale": scale, "enable_gqa": enable_gqa}, dropout_p, dropout_draw)
    return _autograd._Node.apply(call, *tensors[:9])


def node_lse(*tensors, **options):
    return node(*tensors, gives_lse=True, **options)


def backward(
    d_o, d_lse, out, lse, wanted, query, key, value, q_offsets, q_lengths, k_offsets, k_lengths, v_offsets, v_lengths,
    is_causal=False, *, scale=None, enable_gqa=False, dropout_p=0.0, dropout_draw=None,
):  # fmt: skip
    """Gradients of those of the three values that are `wanted`: a list."""
    _dropout.expect_draw(dropout_p, dropout_draw)
    given = query, key, value
    if not enable_gqa:
        heads = out.shape[1]
        # One head of keys and values for all is one group, whose sums are the kernel's.
        shared = key.shape[1] == value.shape[1] == 1
        wholes = [heads, 1 if shared else heads, 1 if shared else heads]
        query, key, value = (of.expand(-1, whole, -1) for of, whole in zip(given, wholes))
    asked = [(of, whole.shape) for is_wanted, of, whole in zip(wanted, given, (query, key, value)) if is_wanted]
    # Of heads that were broadcast each has a gradient in the accumulation dtype: their sum is rounded once.
    made = [
        torch.empty_like(of) if of.shape == whole else of.new_empty(whole, dtype=_autograd.accumulation(of)) for of, whole in asked
    ]  # fmt: skip
    dq, dk, dv = _autograd._spread(wanted, made)
    sequences = (q_offsets, q_lengths), (k_offsets, k_lengths), (v_offsets, v_lengths)
    if query.is_cuda:
        sequences = _on_device(*sequences)
    _native.torch_jagged_backward(
        d_o, d_lse, query, key, value, out, lse, *sequences, dq, dk, dv, is_causal, scale, _dropout.native(dropout_p, dropout_draw)
    )  # fmt: skip
    return [_sum_of_heads(gradient, of) for gradient, (of, _) in zip(made, asked)]


def _sum_of_heads(gradient, of):
    """`gradient`, or the sum of its heads in their order where `of` has one."""
    if gradient.shape == of.shape:
        return gradient
    first, *others = gradient.split(1, dim=1)
    for head in others:
        first += head
    return torch.empty_like(of).copy_(first)


def _fake_backward(_d_o, _d_lse, _out, _lse, wanted, query, key, value, *_sequences, **_options):
    return _autograd._empty_like(wanted, query, key, value)


# By name: the kernel, the fake one, and what stands in its place where a gradient is needed.
KERNELS = {
    "jagged_attention": (jagged, _fake_jagged, node),
    "jagged_attention_lse": (_jagged_lse, _fake_jagged_lse, node_lse),
    "jagged_attention_backward": (backward, _fake_backward, None),
}
