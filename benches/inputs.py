"""The tensors of a row, from its seed alone: every process makes the same ones, bit for bit, with numpy only.

Values are N(0, 1) rounded to the row's dtype; bf16 is carried as uint16. Arrays are logical [batch, heads, len, head_dim];
the layout decides how they lie in memory.
"""

import dataclasses
import zlib

import numpy as np


@dataclasses.dataclass
class Inputs:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None  # bool, or the row's dtype; broadcastable to [batch, num_q_heads, q_len, kv_len]
    d_o: np.ndarray | None = None  # of training rows: what arrives at the output


def to_dtype(values, dtype):
    """f32 values in `dtype`'s own numbers (bf16: uint16 bits, rounded to nearest even)."""
    if dtype == "bf16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype({"f32": np.float32, "f16": np.float16, "f64": np.float64}[dtype])


def to_float(array, dtype, wide=np.float32):
    """The numbers that `array` means."""
    if dtype == "bf16" and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(wide, copy=False)
    return array.astype(wide, copy=False)


def aligned_copy(array, order=None):
    """A copy whose memory runs in `order` of the axes, on a 64-byte line as torch's allocator gives it."""
    order = range(array.ndim) if order is None else order
    moved = array.transpose(order)
    raw = np.empty(moved.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    stored = raw[start : start + moved.nbytes].view(array.dtype).reshape(moved.shape)
    stored[...] = moved
    return stored.transpose(np.argsort(order))


def make(row):
    """The inputs of `row`. The same values for every layout of it."""
    seed = zlib.crc32(f"{row.shape} {row.dims} {row.dtype}".encode())
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return to_dtype(draw.standard_normal(shape, np.float32), row.dtype)

    q = normal(row.batch, row.num_q_heads, row.q_len, row.head_dim)
    k = normal(row.batch, row.num_kv_heads, row.kv_len, row.head_dim)
    v = normal(row.batch, row.num_kv_heads, row.kv_len, row.head_dim_v)
    mask = None
    if row.mask == "bool":
        mask = draw.random((row.batch, 1, row.q_len, row.kv_len), np.float32) < 0.9
        mask[..., 0] = True  # no row without a key: PyTorch answers those with NaN or zeros, by version
    elif row.mask == "additive":
        mask = normal(row.batch, 1, row.q_len, row.kv_len)
    elif row.mask == "padding":
        mask = np.arange(row.kv_len) < np.array(row.kept_keys)[:, None, None, None]
    d_o = normal(row.batch, row.num_q_heads, row.q_len, row.head_dim_v) if row.kind == "train" else None
    bshd = (0, 2, 1, 3)
    plain = (0, 1, 2, 3)
    q_order = bshd if row.layout.startswith(("permuted", "jagged")) else plain
    kv_order = bshd if row.layout.startswith(("permuted", "jagged", "bshd_cache")) else plain
    return Inputs(aligned_copy(q, q_order), aligned_copy(k, kv_order), aligned_copy(v, kv_order), mask, d_o)


def positional(row, queries):
    """bool [len(queries), kv_len]: which keys causal and window let these queries see. None where they see all. Not rapt._reference's
    `positions`: a peer's environment need not have Rapt."""
    if row.causal == "none" and not row.window:
        return None
    offset = row.kv_len - row.q_len if row.causal == "bottom_right" else 0
    i = np.asarray(queries)[:, None] + offset
    j = np.arange(row.kv_len)[None, :]
    allowed = np.ones((len(queries), row.kv_len), bool)
    if row.causal != "none":
        allowed &= j <= i
    if row.window:
        allowed &= j > i - row.window
    return allowed


def combined_mask(row, mask):
    """One mask that says all, for an engine whose own causal flag cannot: bool, or additive in the row's numbers."""
    allowed = positional(row, range(row.q_len))
    if allowed is None:
        return mask
    if mask is None:
        return allowed[None, None]
    if mask.dtype == bool:
        return mask & allowed
    raise NotImplementedError("an additive mask together with causal")


def plain_causal(row):
    """Whether a bare "causal" flag (top-left where q_len = kv_len) says all of the row's positions."""
    return row.causal != "none" and not row.window and (row.causal == "top_left" or row.q_len == row.kv_len)


def sampled_queries(row, budget_flops=3e9):
    """Query rows to check: all of them while the f64 reference stays under `budget_flops`, else evenly spaced with both ends."""
    per_query = 4 * row.batch * row.num_q_heads * row.kv_len * max(row.head_dim, row.head_dim_v)
    count = max(2, min(row.q_len, int(budget_flops / per_query)))
    return sorted({round(i) for i in np.linspace(0, row.q_len - 1, min(count, row.q_len))})
