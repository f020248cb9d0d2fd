"""Who answers a call of `scaled_dot_product_attention`: Rapt, or PyTorch's own kernel, and then why. Pure: nothing runs here.

Deliberately absent: the arithmetic of any dimension check that Rapt's own door makes too. This file asks what PyTorch takes,
since a request that is invalid for PyTorch must raise PyTorch's own error.
"""

import math

import torch
from rapt import ShapeError, _native

from . import _strides

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_keys = torch._C._dispatch_keys


# The dispatch keys of an ordinary dense CPU tensor, outside and inside inference mode. Everything that must not be read as
# plain memory carries another key: subclass, sparse, quantized, nested, functorch wrapper, conj and neg bit, zero tensor.
PLAIN = frozenset(_native.torch_plain_keys())


def is_plain(tensor):
    """Whether this is a dense tensor on CPU or GPU whose memory is its value."""
    keys = _keys(tensor).raw_repr()
    return keys in PLAIN or _native.torch_is_plain_cuda(tensor, keys)


def forward_mode():
    """Whether a forward-mode AD level is open, where a dual tensor would lose its tangent."""
    return torch.autograd.forward_ad._current_level >= 0


# The overrideable backend is another device's: torch 2.6 leaves it on whatever `sdpa_kernel` says.
FUSED = [
    getattr(torch._C, name)
    for name in (
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_cudnn_sdp_enabled",
    )
    if hasattr(torch._C, name)
]


def only_math_allowed():
    """Whether `sdpa_kernel([MATH])` (or its flags) left no fused kernel."""
    return not any(enabled() for enabled in FUSED)


def check_kv_len(key, value):
    """K and V of one length. PyTorch's CPU flash takes others and reads past the end of the shorter one."""
    if key.dim() >= 2 and value.dim() >= 2 and key.shape[-2] != value.shape[-2]:
        shorter = min(int(key.shape[-2]), int(value.shape[-2]))
        raise ShapeError(
            f"key and value must have one kv_len, got key {tuple(key.shape)} and value {tuple(value.shape)}; "
            f"use key[..., :{shorter}, :] and value[..., :{shorter}, :]"
        )


def valid_shapes(query, key, value, mask, enable_gqa):
    q, k, v = query.shape, key.shape, value.shape
    if q[-1] != k[-1] or k[-2] != v[-2]:
        return False
    if enable_gqa:
        if min(len(q), len(k), len(v)) < 3 or k[-3] == 0 or v[-3] == 0 or q[-3] % k[-3] != 0 or q[-3] % v[-3] != 0:
            return False
        batch = _strides.broadcast(q[:-3], k[:-3])
        scores = None if batch is None else (*batch, q[-3])
        whole = _strides.broadcast(q[:-3], k[:-3], v[:-3])
    else:
        scores = _strides.broadcast(q[:-2], k[:-2])
        whole = _strides.broadcast(q[:-2], k[:-2], v[:-2])
    if scores is None or whole is None:
        return False
    if mask is None:
        return True
    # PyTorch adds the mask to the scores in place: it may be broadcast, the scores may not. And where flash might take the
    # request it asks the mask for its second-last dimension.
    scores = (*scores, q[-2], k[-2])
    m = mask.shape
    if len(m) > len(scores) or (len(m) < 2 and _strides.asks_mask_rank(query, key, value, enable_gqa)):
        return False
    return all(a == 1 or a == b for a, b in zip(reversed(m), reversed(scores)))


def fallback_reason(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
    """Why PyTorch's own kernel must answer, in a few words, or None where Rapt serves.

    Raises ShapeError for K and V of different length. Whether the tensors are plain memory is the caller's question."""
    check_kv_len(key, value)
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (mask is not None and mask.requires_grad)
    ):
        return "requires grad"
    if dropout_p != 0.0:
        return "dropout"
    if forward_mode():
        return "forward-mode AD"
    if only_math_allowed():
        return "sdpa_kernel([MATH])"
    dtype = query.dtype
    if not (dtype == key.dtype == value.dtype):
        return "invalid request"
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if mask is not None and (is_causal or mask.dtype not in (torch.bool, dtype, torch.float32)):
        return "invalid request"
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return "invalid request"
    on_gpu = query.device.type == "cuda"
    if on_gpu and not (query.device == key.device == value.device and (mask is None or mask.device == query.device)):
        return "invalid request"
    if _strides.is_shortcut(query, key, value):
        return None
    if query.shape[-1] == 0:
        return "head_dim 0"
    if not valid_shapes(query, key, value, mask, enable_gqa):
        return "invalid request"
    if not torch._C._get_math_sdp_enabled():
        if on_gpu:
            allowed = _strides.cuda_choice(query, key, value, mask, is_causal, scale, enable_gqa) > 0
        else:
            allowed = _strides.is_flash(query, key, value, mask, enable_gqa)
        if not allowed:
            return "kernel not allowed"
    if scale is not None and type(scale) in (float, int) and not math.isfinite(scale):
        return "scale not finite"
    return None
