"""The f64 reference on sampled query rows, and the tolerance rule that a result is judged by.

    o = softmax(q·k / sqrt(head_dim) + mask) · v           in f64, over every head of every sampled query

Rule (design.md): relative L2 <= 1.1 x PyTorch's (the worse of math and flash) + floor, and no row above 4 x PyTorch's worst + floor.
Where PyTorch did not take flash, `flash_rounded` stands in for it. Numpy on one thread: nothing here runs while a peer is timed.
"""

import dataclasses

import numpy as np

import inputs

from rapt.bench import interleaved

FLOOR = {"f64": 16 * 2.0**-52, "f32": 2 * 2.0**-23, "f16": 2.0**-14, "bf16": 2.0**-11}

# PyTorch's own error as measured for anchors.md, for a run without the stock peer; the worst row about twice the whole.
ANCHOR_ERROR = {"f32": 4.7e-7, "bf16": 2.26e-3, "f16": 2.84e-4}


@dataclasses.dataclass
class Error:
    relative: float  # ||got - want|| / ||want||
    worst_row: float  # the largest ||row error|| / max(||row||, mean row norm)
    finite: bool


def scores(row, made, queries, wide):
    group_size = row.num_q_heads // row.num_kv_heads
    q = inputs.to_float(made.q[:, :, queries], row.dtype, wide)
    k = np.repeat(inputs.to_float(made.k, row.dtype, wide), group_size, axis=1)
    s = q @ k.swapaxes(-1, -2) * wide(row.head_dim**-0.5)
    if made.mask is not None:
        mask = made.mask if made.mask.shape[2] == 1 else made.mask[:, :, queries]
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + inputs.to_float(mask, row.dtype, wide)
    allowed = inputs.positional(row, queries)
    return s if allowed is None else np.where(allowed, s, -np.inf)


def attention(row, made, queries):
    """[batch, num_q_heads, len(queries), head_dim_v] in f64."""
    p = scores(row, made, queries, np.float64)
    p = np.exp(p - p.max(-1, keepdims=True))
    v = np.repeat(inputs.to_float(made.v, row.dtype, np.float64), row.num_q_heads // row.num_kv_heads, axis=1)
    return (p @ v) / p.sum(-1, keepdims=True)


def flash_rounded(row, made, queries):
    """The plain formula with a flash kernel's roundings: f32 inside, P and the output rounded to the row's dtype."""
    p = scores(row, made, queries, np.float32)
    p = np.exp(p - p.max(-1, keepdims=True))
    row_sum = p.sum(-1, keepdims=True)
    p = inputs.to_float(inputs.to_dtype(p, row.dtype), row.dtype)
    v = np.repeat(inputs.to_float(made.v, row.dtype), row.num_q_heads // row.num_kv_heads, axis=1)
    return inputs.to_float(inputs.to_dtype((p @ v) / row_sum, row.dtype), row.dtype)


def error(got, want):
    if not np.isfinite(got).all():
        return Error(float("inf"), float("inf"), False)
    difference = np.linalg.norm(got - want, axis=-1)
    norms = np.linalg.norm(want, axis=-1)
    relative = np.sqrt((difference**2).sum() / (norms**2).sum())
    return Error(float(relative), float((difference / np.maximum(norms, norms.mean())).max()), True)


def limit(dtype, of_torch):
    """The rule's limit from PyTorch's own errors on the same rows (a list, empty where stock did not run)."""
    floor = FLOOR[dtype]
    if not of_torch:
        return interleaved.Limit(1.1 * ANCHOR_ERROR[dtype] + floor, 8 * ANCHOR_ERROR[dtype] + floor, "anchors.md")
    return interleaved.Limit(
        1.1 * max(e.relative for e in of_torch) + floor, 4 * max(e.worst_row for e in of_torch) + floor, "torch in this run"
    )
