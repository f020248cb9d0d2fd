"""Strides of the output: those that PyTorch's own kernel would give, so that every `.view` legal after stock stays legal
(dimensions of size 1, and tensors without elements, are viewed the same whatever their strides).

Its flash kernel returns `empty_like(query)` or, in some versions, a transposed `[batch, q_len, num_q_heads, head_dim]`; its
math path returns a contiguous tensor; torch 2.15 answers an empty q, k or v by zeros of q's own leading sizes before it asks
anything else. Who takes a request is decided here as in `sdp_utils_cpp.cpp`, and what the installed torch does is asked of it
once, when that is first needed and before anything of it is replaced; a test compares with stock over a grid. Works on fake tensors: only sizes and strides are read.
"""

import functools
import typing

import torch
from torch.utils._python_dispatch import _disable_current_modes


def empty_flash(query, follows_query=None):
    """The uninitialised output of PyTorch's flash kernel."""
    if query.dim() == 3:
        return empty_flash(query.unsqueeze(0), follows_query).squeeze(0)
    if stock().follows_query if follows_query is None else follows_query:
        return torch.empty_like(query)
    batch, heads, q_len, head_dim = query.shape
    return query.new_empty((batch, q_len, heads, head_dim)).transpose(1, 2)


class Stock(typing.NamedTuple):
    """What the installed torch does."""

    follows_query: bool  # the flash output has the strides of q
    rank3: bool  # rank 3 goes to flash too
    shortcut: bool  # an empty input is answered before all else
    gqa: bool  # flash takes unexpanded groups with enable_gqa
    one_head: bool  # and one K/V head for all without it


@functools.cache
def stock():
    """What the installed torch does, asked of it; for the first time before its kernels are replaced."""
    with _disable_current_modes(), torch.no_grad():
        sdpa = torch.ops.aten.scaled_dot_product_attention.default
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        q = torch.zeros(1, 2, 3, 2, device="cpu")
        follows_query = flash(q, q, q)[0].stride() == q.stride()
        transposed = torch.zeros(3, 2, 2, device="cpu").transpose(0, 1)
        rank3 = sdpa(transposed, transposed, transposed).stride() == transposed.stride()
        none = torch.zeros(2, 2, 0, 2, device="cpu")
        shortcut = sdpa(q, none, none).shape[0] == 1
        bshd, one_head = torch.zeros(1, 3, 2, 2, device="cpu").transpose(1, 2), torch.zeros(1, 1, 3, 2, device="cpu")
        flash_strides = empty_flash(bshd, follows_query).stride()
        gqa = sdpa(bshd, one_head, one_head, enable_gqa=True).stride() == flash_strides
        one = sdpa(bshd, one_head, one_head).stride() == flash_strides
    return Stock(follows_query, rank3, shortcut, gqa, one)


def broadcast(*shapes):
    """The common shape, or None. (`torch.broadcast_shapes` takes 15 µs.)"""
    rank = max(map(len, shapes))
    out = [1] * rank
    for shape in shapes:
        for d, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if out[d] != 1 and out[d] != size:
                    return None
                out[d] = size
    return out


def _heads_fit(q, k, v, enable_gqa):
    if len(q) != 4 or not (q[0] == k[0] == v[0] and k[1] == v[1]):
        return False
    return q[1] == k[1] or (enable_gqa and stock().gqa) or (k[1] == 1 and stock().one_head)


def asks_mask_rank(query, key, value, enable_gqa):
    """Whether PyTorch, looking if flash could serve, comes to ask the mask for its second-last dimension."""
    return query.dim() == key.dim() == value.dim() == 4 and _heads_fit(query.shape, key.shape, value.shape, enable_gqa)


def is_flash(query, key, value, mask, enable_gqa):
    """Whether PyTorch's CPU flash kernel would take this valid request (else its math path does)."""
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v):
        return False
    if len(q) == 3 and stock().rank3:
        q, k, v = (1, *q), (1, *k), (1, *v)
        masks = (1, 2, 3)
    else:
        masks = (2, 4)
    if not _heads_fit(q, k, v, enable_gqa):
        return False
    if not (q[3] == k[3] == v[3]) or q[2] == 0 or k[2] == 0:
        return False
    if mask is not None and mask.dim() not in masks:
        return False
    return query.stride(-1) == 1 and key.stride(-1) == 1 and value.stride(-1) == 1


def is_shortcut(query, key, value):
    """Whether PyTorch answers by zeros without a look at the rest of the request."""
    return (query.numel() == 0 or key.numel() == 0 or value.numel() == 0) and stock().shortcut


def zeros_shortcut(query, value):
    """That answer."""
    return query.new_zeros((*query.shape[:-1], value.shape[-1]))


def out_shape(q, k, v, enable_gqa):
    """Shape of the answer to a valid request of these shapes: leading dimensions broadcast, heads by group with GQA."""
    leading = [q[:-2], k[:-2], v[:-2]]
    if enable_gqa:
        leading = [s[:-1] for s in leading]
    leading = broadcast(*leading)
    if enable_gqa:
        leading = (*leading, q[-3])
    return (*leading, q[-2], v[-1])


# What `torch._fused_sdp_choice` answers.
_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3


def cuda_choice(query, key, value, mask, is_causal, scale, enable_gqa):
    """The kernel that PyTorch would take on the GPU; negative if none is allowed."""
    options = {"scale": scale}
    if enable_gqa:
        options["enable_gqa"] = True
    return torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, **options)


def traced_choice(query, key, value, mask, is_causal, enable_gqa):
    """The same from sizes, strides and dtypes alone, as PyTorch's rules have it on a GPU of sm_80 or later with every kernel
    allowed: a fake tensor, which `_fused_sdp_choice` does not know, and the run of the graph that holds it must agree."""
    q, k, v = query.shape, key.shape, value.shape
    plain = len(q) == len(k) == len(v) == 4 and all(t.stride(-1) == 1 for t in (query, key, value))
    if not plain or q[0] != k[0] or q[2] == 0 or k[2] == 0 or query.dtype == torch.float64:
        return _MATH
    half = query.dtype in (torch.float16, torch.bfloat16)
    same_heads = q[1] == k[1] == v[1]
    square = not is_causal or q[2] == k[2]
    if half and mask is None and q[3] == v[3] and q[3] <= 256 and square and (same_heads or enable_gqa):
        return _FLASH
    unit = 8 if half else 4
    return _EFFICIENT if same_heads and q[3] % unit == 0 and v[3] % unit == 0 else _MATH


def follow_query(query, shape):
    """An uninitialised tensor of this shape, its dimensions in memory in the order of q's."""
    if tuple(shape) == tuple(query.shape):
        return torch.empty_like(query)
    order = sorted(range(4), key=lambda d: -query.stride(d))
    back = [order.index(d) for d in range(4)]
    return query.new_empty([shape[d] for d in order]).permute(back)


def empty_out_cuda(query, key, value, mask, is_causal, scale, enable_gqa, traced=False):
    """The uninitialised output with the shape and the strides of PyTorch's own on the GPU: flash and cuDNN follow the order
    of q's dimensions, the memory-efficient kernel writes [batch, q_len, num_q_heads, head_dim_v], math a contiguous tensor."""
    shape = out_shape(query.shape, key.shape, value.shape, enable_gqa)
    if query.dim() != 4:
        return query.new_empty(shape)
    if traced:
        choice = traced_choice(query, key, value, mask, is_causal, enable_gqa)
    else:
        choice = cuda_choice(query, key, value, mask, is_causal, scale, enable_gqa)
    if choice in (_FLASH, _CUDNN):
        return follow_query(query, shape)
    if choice == _EFFICIENT:
        batch, heads, q_len, head_dim_v = shape
        return query.new_empty((batch, q_len, heads, head_dim_v)).transpose(1, 2)
    return query.new_empty(shape)


def empty_out(query, key, value, mask, enable_gqa):
    """The uninitialised output with the shape and the strides of PyTorch's own on the CPU."""
    if is_flash(query, key, value, mask, enable_gqa):
        return empty_flash(query)
    return query.new_empty(out_shape(query.shape, key.shape, value.shape, enable_gqa))
