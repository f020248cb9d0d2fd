"""Attentions with one planted fault that only a GPU shows, for test_gpu_audit. The formula is torch's math, right but for the fault."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

_side = []
_kept = {}


def sound(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    with sdpa_kernel([SDPBackend.MATH]):
        return sdpa(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def on_another_stream(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Works on a stream of its own, which does not wait for the caller's."""
    if not _side:
        _side.append(torch.cuda.Stream())
    with torch.cuda.stream(_side[0]):
        out = sound(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    torch.cuda.current_stream().wait_stream(_side[0])
    return out


def waiting(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Waits for the device before it answers."""
    out = sound(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()
    return out


def remembered(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """While it is captured, copies what an earlier call on the same buffers answered."""
    where = (query.data_ptr(), query.shape, query.dtype)
    if torch.cuda.is_current_stream_capturing() and where in _kept:
        return _kept[where].clone()
    out = sound(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _kept[where] = out
    return out


def reaching(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Reads one key too many where the storage has one."""
    length = key.shape[2]
    longer = (*key.shape[:2], length + 1, key.shape[3])
    end = key.storage_offset() + sum((n - 1) * s for n, s in zip(longer, key.stride())) + 1
    if key.is_contiguous() and attn_mask is None and end * key.element_size() <= key.untyped_storage().nbytes():
        key = key.as_strided(longer, key.stride(), key.storage_offset())[:, :, :length] + 0 * key.as_strided(
            longer, key.stride(), key.storage_offset()
        )[:, :, 1:]
    return sound(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def scribbling(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Writes behind the end of q."""
    end = query.storage_offset() + sum((n - 1) * s for n, s in zip(query.shape, query.stride()))
    if query.numel() and (end + 2) * query.element_size() <= query.untyped_storage().nbytes():
        query.as_strided((1,), (1,), end + 1).fill_(3.0)
    return sound(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def faulting(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Faults on the device where the keys are an odd number: an index far outside."""
    out = sound(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if key.shape[2] % 2:
        torch.arange(4, device=query.device)[torch.full((4,), 1 << 40, device=query.device)]
    return out
