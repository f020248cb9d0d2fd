"""Mutants that misread memory: strides, tails, tags, lengths, state, faults."""

import ctypes
import os

import numpy as np

from . import sound


def _from_its_start(x):
    """The elements from x's first one on, in memory order, strides forgotten."""
    size, item = x.size, x.itemsize
    root = x
    while isinstance(root.base, np.ndarray):
        root = root.base
    flat = root.reshape(-1).view(np.uint8)
    start = x.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    raw = np.zeros(size * item, np.uint8)
    seen = flat[start : start + size * item]
    raw[: seen.size] = seen
    return raw.view(x.dtype).reshape(x.shape)


def contiguous_offsets(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A permuted [B,S,H,D] view read as if it were contiguous."""
    return sound.attention(*(_from_its_start(x) for x in (q, k, v)), attn_mask, is_causal, scale, enable_gqa)


def contiguous_offsets_in_k(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return sound.attention(q, _from_its_start(k), v, attn_mask, is_causal, scale, enable_gqa)


def inner_stride_ignored(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The elements of a row of v taken side by side."""
    if v.shape[3] > 1 and v.strides[3] != v.itemsize:
        v = np.lib.stride_tricks.as_strided(v, v.shape, (*v.strides[:3], v.itemsize))
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def negative_stride_forward(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The size of a stride without its sign, from the lowest address."""
    q, k, v = (x[:, :, ::-1] if x.strides[2] < 0 else x for x in (q, k, v))
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def mask_read_flat(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A broadcast mask read as if it had every batch and head."""
    shape = (*q.shape[:3], k.shape[2])
    if attn_mask is not None and attn_mask.size:
        attn_mask = np.resize(np.ascontiguousarray(attn_mask), shape)
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def bf16_as_f32(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Rows of 16-bit elements read as rows of half as many 32-bit ones, and the result stored as such."""
    if q.dtype.itemsize != 2 or q.shape[3] % 2 or v.shape[3] % 2:
        return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    wide = (np.ascontiguousarray(x).view(np.float32) for x in (q, k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with np.errstate(all="ignore"):
        out = sound.attention(*wide, attn_mask, is_causal, scale, enable_gqa)
    return np.ascontiguousarray(out).view(q.dtype)


def bf16_as_f16(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """One 16-bit dtype's bits under the other's tag."""
    if q.dtype.name != "bfloat16":
        return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    other = (np.ascontiguousarray(x).view(np.float16) for x in (q, k, v))
    with np.errstate(all="ignore"):
        return sound.attention(*other, attn_mask, is_causal, scale, enable_gqa).view(q.dtype)


def _beyond(x, rows):
    """x with its next rows in memory, whatever lies there."""
    if not rows or 0 in x.shape:
        return x
    longer = np.empty((*x.shape[:2], x.shape[2] + rows, x.shape[3]), x.dtype)
    longer[:, :, : x.shape[2]] = x
    step = x.strides[2]
    for b, h, row in np.ndindex(x.shape[0], x.shape[1], rows):
        at = x.__array_interface__["data"][0] + b * x.strides[0] + h * x.strides[1] + (x.shape[2] + row) * step
        raw = ctypes.string_at(at, abs(x.strides[3]) * (x.shape[3] - 1) + x.itemsize)
        longer[b, h, x.shape[2] + row] = np.frombuffer(raw, x.dtype)[:: max(1, abs(x.strides[3]) // x.itemsize)]
    return longer


def tail_over_read(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Keys read up to the next multiple of 16, masked only by a weight of 0."""
    sound.check(q, k, v)
    rows = -k.shape[2] % 16
    if (
        attn_mask is None
        and not is_causal
        and 0 < rows
        and all(x.strides[3] == x.itemsize and x.strides[2] > 0 for x in (k, v))
    ):
        keep = np.arange(k.shape[2] + rows) < k.shape[2]
        k, v = _beyond(k, rows), _beyond(v, rows)
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1).astype(np.float64), np.repeat(v, group, 1).astype(np.float64)
        with np.errstate(all="ignore"):
            s = q.astype(np.float64) @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
            return (sound.softmax(s, np.broadcast_to(keep, s.shape)) @ v).astype(q.dtype)
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def tail_over_read_unseen(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A vector load past the end of V whose lanes are thrown away: no number shows it, only a page does."""
    if v.size:
        last = v.__array_interface__["data"][0] + sum(
            (size - 1) * stride for size, stride in zip(v.shape, v.strides, strict=True) if stride > 0
        )
        ctypes.string_at(last + v.itemsize, 32)
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def tail_of_keys_dropped(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Only whole tiles of 16 keys are summed."""
    whole = k.shape[2] // 16 * 16
    if whole and attn_mask is None:
        k, v = k[:, :, :whole], v[:, :, :whole]
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def tail_of_head_dim_dropped(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Only whole vectors of 8 products are summed."""
    whole, scale = q.shape[3] // 8 * 8, q.shape[3] ** -0.5 if scale is None else scale
    if whole:
        q, k = q[..., :whole], k[..., :whole]
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


_buffers = {}


def stale_tail(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A reused output of which only whole tiles of 32 rows are written."""
    out = sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    key = (out.shape, out.dtype)
    kept = _buffers.setdefault(key, np.zeros(out.shape, out.dtype))
    whole = max(1, out.shape[2] // 32 * 32)
    result = kept.copy()
    result[:, :, :whole] = out[:, :, :whole]
    _buffers[key] = out
    return result


_cache = {}


def stale_workspace(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """K's packed panel is kept from the longest call so far."""
    key = (k.shape[:2], k.shape[3], k.dtype, q.shape[2] > 30)
    if q.shape[2] > 64 and k.shape[2] >= 600:
        if key in _cache:
            k = _cache[key][:, :, : k.shape[2]]
        _cache.setdefault(key, k.copy())
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def head_dim_v_reversed(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A route for head_dim_v ≠ head_dim that lays the columns down from the wrong end."""
    if v.shape[3] != q.shape[3]:
        v = v[..., ::-1]
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def scales_q_in_place(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if q.strides[1]:
        q *= q.dtype.type(scale)
        return sound.attention(q, k, v, attn_mask, is_causal, 1.0, enable_gqa)
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def short_keys_accepted(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The length is V's: K is read past its end."""
    if k.shape[2] < v.shape[2] and k.strides[3] == k.itemsize:
        k = _beyond(k, v.shape[2] - k.shape[2])
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def aborts_on_long_keys(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if k.shape[2] > 1000:
        os.abort()
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def float32_results(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """float32 results whatever q is."""
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa).astype(np.float32)


def stale_lse(q, k, v, *, mask=None, causal=None, scale=None, return_lse=False):
    """lse taken before the last block of keys was summed."""
    out = sound.attention(q, k, v, mask, causal in (True, "top_left"), scale)
    if causal == "bottom_right":
        out = sound.attention(q, k, v, np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool), False, scale)
    if not return_lse:
        return out
    blocks = max(1, (k.shape[2] - 1) // 32 * 32)
    wide, keys = sound.widened(q, k)
    keys = np.repeat(keys, q.shape[1] // k.shape[1], axis=1)[:, :, :blocks]
    s = wide @ keys.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    return out, np.log(np.exp(s).sum(-1))
