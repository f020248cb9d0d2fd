"""Where a probe's tensors lie: values, arrangements, bands and guard pages.

A probe's values are f64 arrays [batch, heads, len, head_dim] that are exact in their dtype. An arrangement says how they
lie in memory (strides in elements over one buffer); around the buffer lies a band of NaN or zeros, or on CPU a page that
no one may touch, flush against the first or the last byte. The callee gets a torch tensor or a numpy array over that very
memory.

Deliberately absent: torch at import (it is taken from sys.modules when the callee brought it), judging.
"""

import ctypes
import itertools
import math
import mmap
import sys
from typing import NamedTuple

import numpy as np

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1}
RAW = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}

ARRANGEMENTS = {
    "contiguous": "[B,H,S,D] in row-major order",
    "permuted": "a [B,S,H,D] buffer seen as [B,H,S,D]",
    "fused": "one third of a fused [B,S,3,H,D] projection seen as [B,H,S,D]",
    "stepped": "every second row of a longer buffer",
    "cache": "the first rows of a longer cache, whose rest is NaN",
    "expanded": "one batch and one head, repeated with stride 0",
    "negative": "rows in reversed order, stride below 0",
    "inner": "every second element of each row: inner stride 2",
    "transposed": "a [B,H,D,S] buffer seen as [B,H,S,D]: inner stride S",
    "one": "one number, repeated with stride 0, as the gradient of a sum",
    "overlapping": "rows that begin one element apart and share the others",
    "offset": "row-major, one element past the start of its storage",
}


def encode(values, dtype):
    """The bits of f64 values in a dtype (nearest even), as unsigned integers."""
    if dtype == "bool":
        return np.asarray(values).astype(np.uint8)
    if dtype == "bfloat16":
        single = np.ascontiguousarray(values, np.float32)
        bits = single.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(np.asarray(values, np.float64).astype(dtype)).view(RAW[BYTES[dtype]])


def decode(bits, dtype):
    """The f64 values of bits in a dtype; bool stays bool."""
    if dtype == "bool":
        return bits != 0
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.ascontiguousarray(bits).view(dtype).astype(np.float64)


def exact(values, dtype):
    """The values that this dtype holds for these numbers, as f64."""
    return decode(encode(values, dtype), dtype)


class Lie(NamedTuple):
    """Strides and offset in elements, and how many elements the storage has."""

    strides: tuple
    offset: int
    extent: int


def packed(shape, order=None):
    """Strides of a buffer that holds `shape` with its dimensions in memory order `order`."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order or range(len(shape))):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def lie(shape, arrangement):
    """How a [B,H,S,D] tensor of this arrangement lies."""
    batch, heads, length, dim = shape
    size = math.prod(shape)
    if arrangement == "permuted":
        return Lie(packed(shape, (0, 2, 1, 3)), 0, size)
    if arrangement == "fused":
        return Lie((length * 3 * heads * dim, dim, 3 * heads * dim, 1), heads * dim, 3 * size)
    if arrangement in ("stepped", "cache"):
        step = 2 if arrangement == "stepped" else 1
        return Lie((heads * 2 * length * dim, 2 * length * dim, step * dim, 1), 0, 2 * size)
    if arrangement == "expanded":
        return Lie((0, 0, dim, 1), 0, length * dim)
    if arrangement == "one":
        return Lie((0, 0, 0, 0), 0, 1)
    if arrangement == "overlapping":
        return Lie((heads * (length + dim), length + dim, 1, 1), 0, batch * heads * (length + dim))
    if arrangement == "negative":
        strides = packed(shape)
        return Lie((*strides[:2], -strides[2], 1), max(0, length - 1) * dim, size)
    if arrangement == "inner":
        return Lie(tuple(2 * stride for stride in packed(shape)), 0, 2 * size)
    if arrangement == "transposed":
        return Lie(packed(shape, (0, 1, 3, 2)), 0, size)
    return Lie(packed(shape), 1 if arrangement == "offset" else 0, size + (arrangement == "offset"))


def addresses(shape, where):
    """The element index of every element, int64 of `shape`."""
    index = np.full(shape, where.offset, np.int64)
    for dim, (size, stride) in enumerate(zip(shape, where.strides, strict=True)):
        index += (np.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return index


class Pages:
    """Memory with a page that may not be touched on each side; the payload is flush against one of them."""

    def __init__(self, size_bytes, side):
        page = mmap.PAGESIZE
        inner = max(page, -(-size_bytes // page) * page)
        self._map = mmap.mmap(-1, inner + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for at in (base, base + page + inner):
            if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        start = page if side == "before" else page + inner - size_bytes
        self.bytes = np.frombuffer(self._map, np.uint8, size_bytes, start)


def supports_pages():
    """Whether pages can be guarded here."""
    return sys.platform in ("linux", "darwin")


class Placed:
    """One tensor of a probe where it lies: `tensor` for the callee, and the bytes around it for the judge."""

    def __init__(self, values, dtype, *, arrangement="contiguous", around="zero", guard=None, kind="torch", device="cpu"):
        self.dtype, self.arrangement, self.shape = dtype, arrangement, values.shape
        where = lie(values.shape, arrangement) if values.ndim == 4 else Lie(packed(values.shape), 0, values.size)
        item = BYTES[dtype]
        # A GPU has no guard pages, and its kernels read by tiles: the band holds one of 128 rows of 256 numbers.
        guard, band = (None, 1 << 16) if device != "cpu" else (guard, 0 if guard else 4096)
        size = max(where.extent, 1) * item
        whole = Pages(size, guard).bytes if guard else np.zeros(size + 2 * band, np.uint8)
        if around == "nan":
            whole[:] = 0xFF
        store = whole[band : band + size].view(RAW[item])
        if arrangement == "cache":
            store[:] = encode(np.full(store.shape, np.nan), dtype) if dtype != "bool" else 1
        elif where.extent != values.size:
            gaps = np.random.default_rng(7).standard_normal(store.size)
            store[:] = encode(gaps > 0 if dtype == "bool" else gaps, dtype)
        if arrangement == "contiguous":
            store[: values.size] = encode(values, dtype).reshape(-1)
        else:
            # Values that share an address (stride 0) are equal.
            store[addresses(values.shape, where).reshape(-1)] = encode(values, dtype).reshape(-1)
        self.whole, self.band, self.where, self.store = whole, band, where, store
        self.flat = None
        """On torch: all bytes, bands too, where the callee's tensor lies in them."""
        self.tensor = self._view(kind, device)
        self._before = whole.tobytes() if whole.size <= 1 << 22 else None

    def _view(self, kind, device):
        if kind == "numpy":
            dtype = numpy_dtype(self.dtype)
            strides = [stride * dtype.itemsize for stride in self.where.strides]
            return np.ndarray(self.shape, dtype, self.store, self.where.offset * dtype.itemsize, strides)
        torch = sys.modules["torch"]
        flat = torch.frombuffer(memoryview(self.whole), dtype=torch.uint8)
        self.flat = flat = flat if device == "cpu" else flat.to(device)
        inside = flat[self.band : self.band + self.store.nbytes].view(getattr(torch, self.dtype))
        offset = inside.storage_offset() + self.where.offset
        return inside.as_strided(self.shape, self.where.strides, offset)

    def changed(self):
        """How many bytes of the storage or the bands round it differ from what was laid there."""
        if self._before is None:
            return 0
        now = self.whole if self.flat is None else self.flat.cpu().numpy()
        return int((np.frombuffer(self._before, np.uint8) != now).sum())


def numpy_dtype(dtype):
    """The numpy dtype of this name; bfloat16 is ml_dtypes'."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def is_torch(x):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_of(x):
    """The dtype's name: "float32", "bfloat16", ..."""
    return str(x.dtype).removeprefix("torch.") if is_torch(x) else np.asarray(x).dtype.name


def bits_of(x):
    """The elements' bits in row-major order, as unsigned integers of the element's size."""
    if is_torch(x):
        torch = sys.modules["torch"]
        x = x.detach().resolve_neg().resolve_conj().cpu().contiguous()
        return x.view(torch.uint8 if x.element_size() == 1 else getattr(torch, f"int{8 * x.element_size()}")).numpy()
    return np.ascontiguousarray(x).view(RAW[np.asarray(x).dtype.itemsize])


def to_f64(x):
    """The exact values of a numpy array (bfloat16 too) or a torch tensor as f64; bool stays bool."""
    if is_torch(x):
        torch = sys.modules["torch"]
        x = x.detach().cpu()
        return x.numpy() if x.dtype == torch.bool else x.double().numpy()
    x = np.asarray(x)
    return x if x.dtype == np.bool_ else x.astype(np.float64)


def runs(flags):
    """The stretches of True in a 1-D bool array as text: "3, 8–15"."""
    spans, at = [], 0
    for value, group in itertools.groupby(flags.tolist()):
        size = len(list(group))
        if value:
            spans.append(f"{at}" if size == 1 else f"{at}–{at + size - 1}")
        at += size
    return ", ".join(spans[:6]) + (", …" if len(spans) > 6 else "")
