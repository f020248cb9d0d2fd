"""Mutants that compute something else: scale, softmax, heads, batches, masks, causal alignment, precision."""

import threading

import numpy as np

from . import sound


def scale_missing(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return sound.attention(q, k, v, attn_mask, is_causal, 1.0 if scale is None else scale, enable_gqa)


def scale_squared(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return sound.attention(q, k, v, attn_mask, is_causal, scale * scale, enable_gqa)


def scale_argument_ignored(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return sound.attention(q, k, v, attn_mask, is_causal, None, enable_gqa)


def exp2_without_log2e(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return sound.attention(q, k, v, attn_mask, is_causal, scale * np.log(2), enable_gqa)


def unnormalised(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    q, k, v = sound.widened(q, k, v)
    k, v = sound.grouped(q, k, v)
    s = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    keep, bias = sound.kept(s.shape, attn_mask, is_causal)
    s = np.where(keep, s + bias, -np.inf)
    return (np.exp(s - s.max(-1, keepdims=True)) @ v).astype(q.dtype)


def row_max_not_subtracted(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    dtype = q.dtype
    q, k, v = sound.widened(q, k, v)
    k, v = sound.grouped(q, k, v)
    s = q @ k.swapaxes(2, 3) * q.dtype.type(q.shape[3] ** -0.5 if scale is None else scale)
    keep, bias = sound.kept(s.shape, attn_mask, is_causal)
    with np.errstate(all="ignore"):
        p = np.where(keep, np.exp((s + bias).astype(q.dtype)), 0)
        return (p @ v / p.sum(-1, keepdims=True)).astype(dtype)


def q_and_k_exchanged(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if q.shape == k.shape:
        q, k = k, q
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def softmax_over_queries(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    k, v = sound.grouped(q, k, v)
    s = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    p = np.exp(s - s.max(-2, keepdims=True))
    return (p / p.sum(-2, keepdims=True) @ v).astype(q.dtype)


def halves_swapped(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The rotation of a rotary embedding, left in q."""
    return sound.attention(np.roll(q, q.shape[3] // 2, axis=3), k, v, attn_mask, is_causal, scale, enable_gqa)


def neighbours_swapped(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The two 16-bit halves of each 32-bit word exchanged on the way out."""
    out = sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return out[..., np.arange(out.shape[3]) ^ 1] if out.shape[3] % 2 == 0 else out


def heads_transposed(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The output written as [B,S,H,D] under the tag [B,H,S,D]."""
    out = sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return np.ascontiguousarray(out.swapaxes(1, 2)).reshape(out.shape)


def head_0_only(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    out = sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    out[:, 1:] = 0
    return out


def batch_0_repeated(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    out = sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return np.broadcast_to(out[:1], out.shape).copy() if len(out) else out


def gqa_modulo(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Key head h mod num_kv_heads in place of h / group_size."""
    index = np.arange(q.shape[1]) % k.shape[1]
    return sound.attention(q, k[:, index], v[:, index], attn_mask, is_causal, scale)


def heads_leak(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A shared buffer: each head keeps a little of the one before it."""
    out = sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return (out + 0.02 * np.roll(out, 1, axis=1)).astype(q.dtype)


def mask_ignored(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return sound.attention(q, k, v, None, is_causal, scale, enable_gqa)


def mask_inverted(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """True taken for "masked", as in nn.MultiheadAttention's key_padding_mask."""
    if attn_mask is not None and attn_mask.dtype == bool:
        attn_mask = ~attn_mask
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def mask_of_head_0(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.ndim == 4:
        attn_mask = attn_mask[:, :1]
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def bias_added_twice(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.dtype != bool:
        attn_mask = attn_mask + attn_mask
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def lowest_taken_for_masked(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.dtype != bool:
        attn_mask = np.where(attn_mask.astype(np.float64) < -6e4, -np.inf, attn_mask)
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def masked_rows_get_the_mean(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Masked scores replaced by a large negative number: a row without any key becomes the mean of v."""
    if attn_mask is not None and attn_mask.dtype == bool:
        attn_mask = np.where(attn_mask, 0, -1e9).astype(np.float64)
    return sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def bottom_right_for_top_left(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if is_causal:
        attn_mask = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
    return sound.attention(q, k, v, attn_mask, False, scale, enable_gqa)


def causal_without_diagonal(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if is_causal:
        attn_mask = np.tri(q.shape[2], k.shape[2], -1, dtype=bool)
    return sound.attention(q, k, v, attn_mask, False, scale, enable_gqa)


def nan_leaks(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A masked weight of 0 times NaN."""
    sound.check(q, k, v)
    dtype = q.dtype
    q, k, v = sound.widened(q, k, v)
    k, v = sound.grouped(q, k, v)
    with np.errstate(invalid="ignore"):
        s = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
        keep, bias = sound.kept(s.shape, attn_mask, is_causal)
        return (sound.softmax((s + bias).astype(q.dtype), keep) @ v).astype(dtype)


def narrowed_to_f32(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """float64 computed in float32 behind its tag."""
    single = (x.astype(np.float32) for x in (q, k, v))
    return sound.attention(*single, attn_mask, is_causal, scale, enable_gqa).astype(q.dtype)


def halved_precision(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """float32 computed from float16."""
    half = (x.astype(np.float16) for x in (q, k, v))
    return sound.attention(*half, attn_mask, is_causal, scale, enable_gqa).astype(q.dtype)


def sloppy_exp(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """An exponential that is right to four digits."""
    sound.check(q, k, v)
    out = sound.attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return (out * (1 + 1e-5 * np.sin(100 * out.astype(np.float64)))).astype(q.dtype)


_turn = threading.local()


def nondeterministic_reduction(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The keys summed in another order at each call."""
    _turn.count = getattr(_turn, "count", 0) + 1
    order = np.random.default_rng(_turn.count).permutation(k.shape[2])
    if attn_mask is not None and attn_mask.shape[-1] == k.shape[2]:
        attn_mask = attn_mask[..., order]
    if is_causal:
        attn_mask = np.tri(q.shape[2], k.shape[2], dtype=bool)[:, order]
    if v.shape[2] != k.shape[2]:
        raise ValueError("k and v differ in length")
    return sound.attention(q, k[:, :, order], v[:, :, order], attn_mask, False, scale, enable_gqa)
