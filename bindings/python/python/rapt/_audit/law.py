"""The law in numpy f64, and the tolerance by which a result is judged against it.

    s = softcap(q·k · scale) + bias − slope·|i + d − j|, then masks, then softmax (with an optional sink logit), then · v

All arrays are [batch, heads, len, head_dim] in f64. A masked key is never multiplied, so what it holds cannot matter; a row
without any key is zeros with lse = −inf. The tolerance is docs/reference/numerics.md's: 1.1 times the error of a peer that rounds as
PyTorch's kernels do, plus a floor. Deliberately absent: torch, strides, storage (tensors.py), and any guess at a cause
(diagnose.py).
"""

import numpy as np

# Relative L2 error that no result is accused of, by storage dtype.
FLOOR = {"float64": 16 * 2.0**-52, "float32": 2 * 2.0**-23, "float16": 2.0**-14, "bfloat16": 2.0**-11}
# Spacing of the accumulation dtype: large logits lose this much of a score.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-23, "bfloat16": 2.0**-23}
LSE_FLOOR = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}
# "Wrong" as against "less exact than it should be": this many times the tolerance. Roundings differ by small factors
# between correct implementations; a wrong element is off by its whole size.
GROSS = 32


def positions(q_len, kv_len, causal=None, window=None):
    """What causal and window leave: bool [q_len, kv_len]."""
    diagonal = kv_len - q_len if causal == "bottom_right" else 0
    i, j = np.arange(q_len)[:, None] + diagonal, np.arange(kv_len)[None, :]
    keep = np.ones((q_len, kv_len), bool)
    if causal in (True, "top_left", "bottom_right"):
        keep &= j <= i
    left, right = window or (None, None)
    if left is not None:
        keep &= j >= i - left
    if right is not None:
        keep &= j <= i + right
    return keep


def attended(shape, *, mask=None, causal=None, window=None):
    """(keep, bias): which keys each query attends, bool [batch, heads, q_len, kv_len], and the additive part or None."""
    keep = np.broadcast_to(positions(*shape[2:], causal, window), shape)
    if mask is None:
        return keep, None
    mask = np.broadcast_to(mask, shape)
    if mask.dtype == np.bool_:
        return keep & mask, None
    return keep & (mask != -np.inf), mask


def scores(q, k, *, scale=None, softcap=None, alibi_slopes=None, causal=None):
    """softcap(q·k · scale) − slope·|i + d − j|, before bias and masks: [batch, num_q_heads, q_len, kv_len]."""
    group = max(1, q.shape[1] // max(1, k.shape[1]))
    scale = 1 / np.sqrt(q.shape[3]) if scale is None else float(scale)
    s = np.matmul(q, np.repeat(k, group, axis=1).swapaxes(2, 3)) * scale
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if alibi_slopes is not None:
        q_len, kv_len = s.shape[2:]
        diagonal = kv_len - q_len if causal == "bottom_right" else 0
        distance = np.abs(np.arange(q_len)[:, None] + diagonal - np.arange(kv_len)[None, :])
        s = s - np.asarray(alibi_slopes, np.float64)[:, None, None] * distance
    return s


def law(q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None):
    """(out, lse) in f64. `mask` is bool (True = attend) or f64, broadcastable to [batch, num_q_heads, q_len, kv_len]."""
    with np.errstate(all="ignore"):
        s = scores(q, k, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, causal=causal)
        keep, bias = attended(s.shape, mask=mask, causal=causal, window=window)
        if bias is not None:
            s = s + np.where(keep, bias, 0)
        out, row_max, row_sum = weigh(s, keep, v, sinks)
        lse = np.where(keep.any(-1), row_max[..., 0] + np.log(row_sum[..., 0]), -np.inf)
    return out, lse


def weigh(s, keep, v, sinks=None):
    """softmax of the kept scores, times v: (out, row_max, row_sum)."""
    group = max(1, s.shape[1] // max(1, v.shape[1]))
    v = np.repeat(v, group, axis=1)
    s = np.where(keep, s, -np.inf)
    row_max = s.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64)[:, None, None]
        row_max = np.maximum(row_max, sinks)
    row_max = np.where(row_max == -np.inf, 0, row_max)
    p = np.where(keep, np.exp(s - row_max), 0)
    row_sum = p.sum(-1, keepdims=True)
    if sinks is not None:
        row_sum = row_sum + np.exp(sinks - row_max)
    out = np.matmul(p, np.where(np.isfinite(v), v, 0)) / np.where(row_sum == 0, 1, row_sum)
    # A key that holds NaN or infinity reaches the rows that attend it, and no other.
    poisoned = ~np.isfinite(v).all(-1)
    for b, h, i in np.argwhere((keep & poisoned[:, :, None, :]).any(-1)):
        keys = keep[b, h, i]
        out[b, h, i] = p[b, h, i, keys] @ v[b, h, keys] / row_sum[b, h, i]
    return np.where(keep.any(-1, keepdims=True), out, 0), row_max, row_sum


def round_to(x, dtype):
    """The nearest number of this dtype, as f64."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        bits = np.where(np.isnan(x), bits, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float64)


def peer(q, k, v, dtype, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None):
    """A plain formula with flash's roundings (sums in f32, p rounded to the storage dtype before · v): the stand-in for
    PyTorch's kernels, by whose error others are judged."""
    accumulation = np.float64 if dtype == "float64" else np.float32
    with np.errstate(all="ignore"):
        s = scores(
            q.astype(accumulation), k.astype(accumulation), scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes, causal=causal,
        ).astype(accumulation)  # fmt: skip
        keep, bias = attended(s.shape, mask=mask, causal=causal, window=window)
        if bias is not None:
            s = (s + np.where(keep, bias, 0)).astype(accumulation)
        s = np.where(keep, s, accumulation(-np.inf))
        row_max = s.max(-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            sinks = np.asarray(sinks, accumulation)[:, None, None]
            row_max = np.maximum(row_max, sinks)
        p = np.where(keep, np.exp(s - np.where(row_max == -np.inf, 0, row_max)), 0).astype(accumulation)
        row_sum = p.sum(-1, keepdims=True, dtype=accumulation)
        if sinks is not None:
            row_sum = row_sum + np.exp(sinks - row_max)
        p = round_to(p, dtype).astype(accumulation)
        group = max(1, s.shape[1] // max(1, v.shape[1]))
        out = np.matmul(p, np.repeat(v, group, axis=1).astype(accumulation)) / np.where(row_sum == 0, 1, row_sum)
    return round_to(out, dtype)


def errors(got, expected):
    """(relative L2, worst row's relative L2, error of each row): a row counts against its own norm, or the mean row's if that
    is larger. Rows that are not finite in either are left out (0)."""
    shape = expected.shape[:-1]
    got, expected = got.reshape(-1, got.shape[-1]), expected.reshape(-1, expected.shape[-1])
    finite = np.isfinite(expected).all(axis=1) & np.isfinite(got).all(axis=1)
    difference = np.zeros(len(got))
    with np.errstate(over="ignore"):
        difference[finite] = np.linalg.norm(got[finite] - expected[finite], axis=1)
    if not finite.any() or not difference.any():
        return 0.0, 0.0, np.zeros(shape)
    norms = np.linalg.norm(expected[finite], axis=1)
    whole, mean = np.linalg.norm(norms), norms.mean()
    rows = np.zeros(len(got))
    with np.errstate(all="ignore"):
        rows[finite] = np.where(difference[finite] == 0, 0, difference[finite] / np.maximum(norms, mean))
        return float(np.linalg.norm(difference) / whole), float(rows.max()), rows.reshape(shape)


def limits(dtype, peers, expected):
    """(limit of the relative L2, limit of any row) by the tolerance rule, from the results of peers on the same inputs."""
    peers = [errors(each, expected) for each in peers]
    whole = 1.1 * max((e[0] for e in peers), default=0.0) + FLOOR[dtype]
    return whole, 4 * max((e[1] for e in peers), default=0.0) + FLOOR[dtype]
