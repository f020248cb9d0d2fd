"""Attention by its definition, its gradients, and the tolerance for results: docs/reference/definition.md and docs/reference/numerics.md in Python.

    s = softcap(q·k · scale) + bias − slope·|i + d − j|, then masks, then softmax (with an optional sink logit), then · v

The only formula in Python: the auditor, the benchmarks and the tests judge by it. It computes in f64 on numpy arrays, and on torch
tensors of any device where rows are too many for numpy. All tensors are [batch, heads, len, head_dim]. A masked key is never
multiplied, so what it holds cannot matter; a row without any key is zeros with lse = −inf. Deliberately absent: the native module
(what says what is right must not be what is judged), an import of torch, strides and storage, any speed.
"""

import sys

import numpy as np

# Relative L2 error that is allowed beside a peer's, by storage dtype.
FLOOR = {"float64": 16 * 2.0**-52, "float32": 2 * 2.0**-23, "float16": 2.0**-14, "bfloat16": 2.0**-11}
# What is allowed of PyTorch's own error: for the whole output, and for each row of PyTorch's worst row.
OF_PEERS, OF_PEERS_ROW = 1.1, 4
# lse may be this far off, times (1 + |lse|).
LSE_LIMIT = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}



def _library(x):
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def _like(values, x):
    """`values` as an array of x's kind, dtype and device."""
    if isinstance(x, np.ndarray):
        return np.asarray(values).astype(x.dtype)
    return sys.modules["torch"].as_tensor(values, dtype=x.dtype, device=x.device)


def _indices(count, like):
    if like is None or isinstance(like, np.ndarray):
        return np.arange(count)
    return sys.modules["torch"].arange(count, device=like.device)


def _rows_and_keys(q_len, kv_len, causal, queries, like):
    """(i + d of each row, as a column; j of each key, as a row)."""
    diagonal = kv_len - q_len if causal == "bottom_right" else 0
    rows = _indices(q_len, like) if queries is None else queries
    return rows[:, None] + diagonal, _indices(kv_len, like)[None, :]


def positions(q_len, kv_len, causal=None, window=None, *, queries=None, like=None):
    """What causal and window leave: bool [rows, kv_len], for all rows or for those of index `queries`."""
    i, j = _rows_and_keys(q_len, kv_len, causal, queries, like)
    keep = (i == i) & (j == j)  # every pair
    if causal in (True, "top_left", "bottom_right"):
        keep = keep & (j <= i)
    left, right = window or (None, None)
    if left is not None:
        keep = keep & (j >= i - left)
    if right is not None:
        keep = keep & (j <= i + right)
    return keep


def attended(shape, *, mask=None, causal=None, window=None, queries=None, q_len=None, like=None):
    """(keep, bias): which keys each query attends, bool [batch, heads, rows, kv_len], and the additive part or None."""
    keep = positions(shape[2] if q_len is None else q_len, shape[3], causal, window, queries=queries, like=like)
    library = _library(keep)
    keep = library.broadcast_to(keep, shape)
    if mask is None:
        return keep, None
    mask = library.broadcast_to(mask, shape)
    if str(mask.dtype).endswith("bool"):
        return keep & mask, None
    return keep & (mask != -np.inf), mask


def by_groups(a, b):
    """a[b, h] · b[b, h // group_size]: the query heads of a key head in one product."""
    batch, heads, rows, inner = a.shape
    kv_heads = max(1, b.shape[1])
    joined = a.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return (joined @ b).reshape(batch, heads, rows, b.shape[3])


def scores(q, k, *, scale=None, softcap=None, alibi_slopes=None, causal=None, queries=None, q_len=None):
    """softcap(q·k · scale) − slope·|i + d − j|, before bias and masks: [batch, num_q_heads, rows, kv_len]."""
    s = by_groups(q, k.swapaxes(2, 3)) * (q.shape[3] ** -0.5 if scale is None else float(scale))
    if softcap is not None:
        s = softcap * _library(s).tanh(s / softcap)
    if alibi_slopes is not None:
        i, j = _rows_and_keys(s.shape[2] if q_len is None else q_len, s.shape[3], causal, queries, s)
        s = s - _like(alibi_slopes, s)[:, None, None] * _like(abs(i - j), s)
    return s


def weigh(s, keep, v, sinks=None, rounded=None):
    """softmax of the kept scores, times v: (out, row_max, row_sum). `rounded` is what p goes through before · v."""
    library = _library(s)
    with np.errstate(all="ignore"):
        s = library.where(keep, s, -np.inf)
        row_max = library.amax(s, -1)[..., None] if s.shape[-1] else s.sum(-1)[..., None] - np.inf
        if sinks is not None:
            sinks = _like(sinks, s)[:, None, None]
            row_max = library.maximum(row_max, sinks)
        row_max = library.where(row_max == -np.inf, 0, row_max)
        p = library.where(keep, library.exp(s - row_max), 0)
        row_sum = p.sum(-1)[..., None]
        if sinks is not None:
            row_sum = row_sum + library.exp(sinks - row_max)
        if rounded is not None:
            p = rounded(p)
        finite = library.isfinite(v)
        out = by_groups(p, library.where(finite, v, 0))
        if not bool(finite.all()):
            out = out + _of_infinities(p, keep, v)
        return library.where(_weighs(s, keep)[..., None], out / row_sum, out), row_max, row_sum


def _weighs(s, keep):
    """Rows with a key of some weight: without keys, and where every score is −inf, the sums are the result."""
    return (keep & (s != -np.inf)).any(-1)


def _of_infinities(p, keep, v):
    """What NaN and infinities of v add to the rows that attend them, as products of p would: 0 · inf is NaN."""
    library = _library(p)

    def any_of(weights, kind):
        return by_groups(_like(weights, p), _like(kind, p)) > 0

    infinite = (v == np.inf) | (v == -np.inf)
    lost = any_of(keep, v != v) | any_of(keep & ~(p > 0), infinite)
    above = library.where(any_of(p > 0, v == np.inf), np.inf, 0.0)
    below = library.where(any_of(p > 0, v == -np.inf), -np.inf, 0.0)
    return _like(library.where(lost, np.nan, above + below), p)


def attention(
    q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None,
    queries=None, q_len=None, rounded=None,
):  # fmt: skip
    """(out, lse) in the dtype of q, k and v, which is f64 for the definition.

    mask: bool (True = attend) or additive, broadcastable to [batch, num_q_heads, rows, kv_len]. causal: None, True or "top_left",
    "bottom_right". queries: where q and mask hold only some rows of q_len, their indices.
    """
    places = {"causal": causal, "queries": queries, "q_len": q_len}
    library = _library(q)
    with np.errstate(all="ignore"):
        s = scores(q, k, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, **places)
        keep, bias = attended(tuple(s.shape), mask=mask, window=window, like=q, **places)
        if bias is not None:
            s = s + library.where(keep, _like(bias, s), 0)
        out, row_max, row_sum = weigh(s, keep, v, sinks, rounded)
        lse = library.where(_weighs(s, keep), (row_max + library.log(row_sum))[..., 0], -np.inf)
    return out, lse


def gradients(
    d_o, q, k, v, *, d_lse=None, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None,
    rounded=None, weights=None,
):  # fmt: skip
    """(dq, dk, dv, d_mask, d_sinks) of a loss whose gradients by out and lse are `d_o` and `d_lse`, by the chain rule of `attention`.

    d_mask has the mask's shape, summed over what was broadcast; it and d_sinks are None where there is no additive mask, no sinks. A
    key that is not attended gives and gets nothing, as does a row without any weight. Of what is attended numbers are finite.
    `rounded` is what out went through: a flash kernel's backward reads the stored one. `weights` is what p, and what arrives at the products
    of q and k before it is scaled, go through where they are multiplied: such a kernel rounds them.
    """
    library, factor = _library(q), q.shape[3] ** -0.5 if scale is None else float(scale)
    finite = lambda x: library.where(library.isfinite(x), x, 0)  # noqa: E731
    with np.errstate(all="ignore"):
        s = scores(q, k, scale=scale, softcap=softcap, causal=causal)
        rises = 1 if softcap is None else 1 - (s / softcap) ** 2
        if alibi_slopes is not None:
            s = scores(q, k, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, causal=causal)
        keep, bias = attended(tuple(s.shape), mask=mask, causal=causal, window=window, like=q)
        if bias is not None:
            s = s + library.where(keep, _like(bias, s), 0)
        weighs = _weighs(s, keep)[..., None]
        out, row_max, row_sum = weigh(s, keep, finite(v), sinks)
        out = out if rounded is None else rounded(out)
        p = library.where(keep & weighs, library.exp(s - row_max), 0) / library.where(weighs, row_sum, 1)
        d_o = library.where(weighs, d_o, 0)
        dp = library.where(keep, by_groups(d_o, v.swapaxes(2, 3)), 0)
        delta = (d_o * out).sum(-1)[..., None] - (0 if d_lse is None else library.where(weighs, d_lse[..., None], 0))
        ds = library.where(keep, p * (dp - delta), 0)
        dx, of_p = ds * rises, p
        if weights is not None:
            dx, of_p = weights(dx), weights(p)
        dx = library.where(keep, dx * factor, 0)
        dk, dv = _of_groups(dx, finite(q), k.shape[1]), _of_groups(of_p, d_o, k.shape[1])
        d_sinks = None
        if sinks is not None:
            weight = library.where(weighs, library.exp(_like(sinks, s)[:, None, None] - row_max) / row_sum, 0)
            d_sinks = -(weight * delta).sum(-1).sum(-1).sum(0)
        return by_groups(dx, finite(k)), dk, dv, None if bias is None else _to_shape(ds, mask.shape), d_sinks


def _of_groups(weights, rows, kv_heads):
    """weightsᵀ · rows, summed over the query heads of a key head."""
    joined = [x.reshape(x.shape[0], kv_heads, x.shape[1] // max(1, kv_heads) * x.shape[2], x.shape[3]) for x in (weights, rows)]
    return joined[0].swapaxes(2, 3) @ joined[1]


def _to_shape(x, shape):
    """`x` summed over the dimensions that `shape` lacks or has as 1."""
    for _ in range(len(x.shape) - len(shape)):
        x = x.sum(0)
    for d, size in enumerate(shape):
        if size == 1 != x.shape[d]:
            x = x.sum(d)[(slice(None),) * d + (None,)]
    return x


def round_to(x, dtype):
    """The nearest number of a dtype (by its name), in the dtype of `x`."""
    if not isinstance(x, np.ndarray):
        return x.to(getattr(sys.modules["torch"], dtype)).to(x.dtype)
    with np.errstate(all="ignore"):
        if dtype != "bfloat16":
            return x.astype(dtype).astype(x.dtype)
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        bits = np.where(np.isnan(x), bits, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32).astype(x.dtype)


def flash_rounded(q, k, v, dtype, **options):
    """What a flash kernel's roundings give: sums in f32 (f64 for f64), p and the result rounded to the storage dtype, by its name.

    Stands in for PyTorch's flash where that serves no such request. q, k, v and the result are f64 as in `attention`.
    """
    accumulation = "float64" if dtype == "float64" else "float32"

    def narrow(x):
        return x.astype(accumulation) if isinstance(x, np.ndarray) else x.to(getattr(sys.modules["torch"], accumulation))

    with np.errstate(all="ignore"):
        out, _ = attention(narrow(q), narrow(k), narrow(v), rounded=lambda p: round_to(p, dtype), **options)
    return _like(round_to(out, dtype), q)


def errors(got, expected):
    """(relative L2, worst row's relative L2, error of each row) of numpy arrays: a row counts against its own norm, or the mean
    row's if that is larger. Rows that are not finite in either are left out (0)."""
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
    """(limit of the relative L2, limit of any row) by the tolerance rule, from PyTorch's results on the same inputs."""
    return limits_of(dtype, [errors(each, expected)[:2] for each in peers])


def limits_of(dtype, peers):
    """The same from PyTorch's errors: (relative L2, worst row) of each result."""
    whole = max((whole for whole, _ in peers), default=0.0)
    row = max((row for _, row in peers), default=0.0)
    return OF_PEERS * whole + FLOOR[dtype], OF_PEERS_ROW * row + FLOOR[dtype]


def lse_errors(got, expected):
    """|lse − expected| / (1 + |expected|) where that is finite."""
    finite = np.isfinite(expected)
    return np.abs(got[finite] - expected[finite]) / (1 + np.abs(expected[finite]))
