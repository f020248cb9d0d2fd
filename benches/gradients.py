"""What a training row's gradients are held against: the definition's (`rapt._reference.gradients`) of the query heads of one key head of
one batch entry, in blocks of queries, so that long rows fit in memory.
"""

import numpy as np

import inputs
import reference

from rapt import _reference

NAMES = ("out", "dq", "dk", "dv")
BLOCK = 1024  # queries


def sampled(row):
    """(batch entry, key head): the last ones, which a mistake in an offset reaches first."""
    return row.batch - 1, row.num_kv_heads - 1


def of_row(row, made):
    """[out, dq, dk, dv], each [heads, len, head_dim] in f64."""
    batch, kv_head = sampled(row)
    group = row.num_q_heads // row.num_kv_heads
    length = row.kept_keys[batch] if row.is_ragged else row.kv_len
    rows = row.kept_keys[batch] if row.is_ragged else row.q_len

    def wide(x, heads, count):
        return inputs.to_float(x[batch : batch + 1, heads, :count], row.dtype, np.float64)

    queries, keys = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    q, d_o, k, v = wide(made.q, queries, rows), wide(made.d_o, queries, rows), wide(made.k, keys, length), wide(made.v, keys, length)
    parts, dk, dv = [], np.zeros_like(k), np.zeros_like(v)
    for first in range(0, rows, BLOCK):
        block = np.arange(first, min(first + BLOCK, rows))
        mask = None if made.mask is None else made.mask[batch : batch + 1]
        if mask is not None:
            mask = mask if mask.shape[2] == 1 else mask[:, :, block]
            mask = mask if mask.dtype == bool else inputs.to_float(mask, row.dtype, np.float64)
        seen = inputs.positional(row, block)
        if seen is not None:
            mask = seen[None, None] if mask is None else mask & seen[None, None]
        out, _ = _reference.attention(q[:, :, block], k, v, mask=mask)
        dq, more_dk, more_dv, *_ = _reference.gradients(d_o[:, :, block], q[:, :, block], k, v, mask=mask)
        parts.append((out, dq))
        dk, dv = dk + more_dk, dv + more_dv
    out, dq = (np.concatenate(part, 2) for part in zip(*parts))
    return [x[0] for x in (out, dq, dk, dv)]


def errors(got, want):
    """Errors of each of the four."""
    return [reference.error(one, other) for one, other in zip(got, want)]
