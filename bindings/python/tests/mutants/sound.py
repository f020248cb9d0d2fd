"""A sound attention in numpy, in pieces, so that each mutant can break one of them.

Sums in f32 (f64 for f64), the result rounded once. A masked key is never multiplied; a row without any key is zeros.
"""

import numpy as np


def widened(*tensors):
    """In the accumulation dtype."""
    accumulation = np.float64 if tensors[0].dtype == np.float64 else np.float32
    return tuple(x.astype(accumulation) for x in tensors)


def grouped(q, k, v):
    """k and v with each key head repeated for its query heads."""
    group = q.shape[1] // k.shape[1]
    return np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)


def kept(shape, attn_mask=None, is_causal=False):
    """(keep, bias): the keys that each row attends, and what is added."""
    keep, bias = np.ones(shape, bool), 0
    if is_causal:
        keep &= np.tri(*shape[2:], dtype=bool)
    if attn_mask is not None:
        if attn_mask.dtype == bool:
            keep &= attn_mask
        else:
            bias = np.broadcast_to(attn_mask.astype(np.float64), shape)
            keep &= bias != -np.inf
            bias = np.where(keep, bias, 0)
    return keep, bias


def softmax(s, keep):
    """Weights of the kept scores; zeros where none is kept."""
    s = np.where(keep, s, -np.inf)
    row_max = s.max(-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        p = np.where(keep, np.exp(s - np.where(row_max == -np.inf, 0, row_max)), 0)
    row_sum = p.sum(-1, keepdims=True)
    return p / np.where(row_sum == 0, 1, row_sum)


def weigh(p, keep, v):
    """p · v over the kept keys only: what a masked value holds cannot matter."""
    if np.isfinite(v).all():
        return p @ v
    out = p @ np.where(np.isfinite(v), v, 0)
    for b, h, i in np.argwhere((keep & ~np.isfinite(v).all(-1)[:, :, None, :]).any(-1)):
        out[b, h, i] = p[b, h, i, keep[b, h, i]] @ v[b, h, keep[b, h, i]]
    return out


def check(q, k, v):
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k has {k.shape[2]} rows, v has {v.shape[2]}")


def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """scaled_dot_product_attention on numpy arrays."""
    check(q, k, v)
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    k, v = grouped(q, k, v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with np.errstate(invalid="ignore", over="ignore"):
        s = (q @ k.swapaxes(2, 3)) * q.dtype.type(scale)
        keep, bias = kept(s.shape, attn_mask, is_causal)
        p = softmax((s + bias).astype(q.dtype), keep)
        return weigh(p, keep, v).astype(dtype)
