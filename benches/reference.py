"""A row's reference on sampled query rows, and the tolerance that an answer is judged by: `rapt._reference` on the arrays of `inputs`.

Where PyTorch did not take flash, a formula with flash's roundings stands in for it. Numpy on one thread: nothing here runs while a
peer is timed.
"""

import dataclasses

import numpy as np

import inputs

import rapt
from rapt import _reference
from rapt.bench import interleaved

DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclasses.dataclass
class Error:
    relative: float  # ||got - want|| / ||want||
    worst_row: float  # the largest ||row error|| / max(||row||, mean row norm)
    finite: bool


def arguments(row, made, queries):
    """(q, k, v in f64, options) of those rows."""
    def wide(x):
        return inputs.to_float(x, row.dtype, np.float64)

    mask = made.mask
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        mask = mask if mask.dtype == bool else wide(mask)
    options = {
        "mask": mask, "causal": None if row.causal == "none" else row.causal, "window": (row.window - 1, None) if row.window else None,
        "queries": np.asarray(queries), "q_len": row.q_len,
    }  # fmt: skip
    return wide(made.q[:, :, queries]), wide(made.k), wide(made.v), options


def of_codes(row, made):
    """`made` with the numbers that the row's codes stand for in place of k and v; as it is where the row has numbers."""
    if row.formats is None:
        return made
    kv = (
        rapt.quantize(inputs.to_float(x, row.dtype), format, granularity=granularity)
        for x, (format, granularity) in zip((made.k, made.v), row.formats)
    )
    return inputs.Inputs(made.q, *(codes.dequantize() for codes in kv), made.mask)


def attention(row, made, queries):
    """[batch, num_q_heads, len(queries), head_dim_v] in f64."""
    *qkv, options = arguments(row, made, queries)
    return _reference.attention(*qkv, **options)[0]


def flash_rounded(row, made, queries):
    """The same with a flash kernel's roundings."""
    *qkv, options = arguments(row, made, queries)
    return _reference.flash_rounded(*qkv, DTYPES[row.dtype], **options)


def error(got, want):
    """One that is not finite is infinitely far off."""
    if not np.isfinite(got).all():
        return Error(float("inf"), float("inf"), False)
    relative, worst_row, _ = _reference.errors(got.astype(np.float64), want)
    return Error(relative, worst_row, True)


def limit(dtype, of_torch, source):
    """The rule's limit from errors of PyTorch on the same rows."""
    return interleaved.Limit(*_reference.limits_of(DTYPES[dtype], [(e.relative, e.worst_row) for e in of_torch]), source)
