"""What diagnosis looks at: one attention call's inputs, output and options, brought to f64 and four dimensions.

Options go by PyTorch's names (attn_mask, is_causal, enable_gqa) or rapt.attention's. The storage behind a strided tensor is
kept, so that a wrong read of it can be played again. Deliberately absent: any hypothesis (hypotheses.py).
"""

import math

import numpy as np

from rapt import _reference

from .tensors import BYTES, RAW, decode, dtype_of, is_torch, packed, to_f64

MOST_SCORES = 1 << 26
"""Scores (batch · heads · q_len · kv_len) beyond which diagnosis refuses: it computes the reference some hundred times."""

NAMES = {"attn_mask": "mask", "is_causal": "causal"}
OPTIONS = {"mask", "causal", "window", "softcap", "scale", "sinks", "alibi_slopes"}
WITHOUT_EFFECT = {"enable_gqa", "dropout_p", "out", "out_dtype", "return_lse"}


class Strided:
    """A tensor's elements where they lie: the storage's bits, the strides and the offset in elements."""

    def __init__(self, x, order):
        self.dtype = dtype_of(x)
        item = BYTES[self.dtype]
        if is_torch(x):
            x = x.detach().cpu()
            raw = np.frombuffer(bytes(x.untyped_storage()), np.uint8) if x.untyped_storage().nbytes() else b""
            start, strides = x.storage_offset() * item, [stride * item for stride in x.stride()]
        else:
            root = owner(x)
            # An array that owns its memory has no gaps: in memory order its elements are that memory.
            raw = np.ascontiguousarray(root.ravel(order="K")).view(np.uint8)
            start = x.__array_interface__["data"][0] - root.__array_interface__["data"][0]
            strides = list(x.strides)
        lead = 4 - len(x.shape)
        shape, strides = [1] * lead + list(x.shape), [0] * lead + strides
        self.shape = tuple(shape[dim] for dim in order)
        self.strides = tuple(strides[dim] // item for dim in order)
        first, self.offset = start % item, start // item
        raw = raw[first : first + (len(raw) - first) // item * item]
        self.bits = raw.view(RAW[item]) if len(raw) else np.zeros(0, RAW[item])

    @property
    def contiguous(self):
        live = [size != 1 for size in self.shape]
        mine, plain = np.array(self.strides), np.array(packed(self.shape))
        return bool((mine == plain)[live].all()) or 0 in self.shape

    def read(self, strides, offset=None):
        """The values at other strides; NaN where that leaves the storage."""
        index = np.full(self.shape, self.offset if offset is None else offset, np.int64)
        for dim, (size, stride) in enumerate(zip(self.shape, strides, strict=True)):
            index += (np.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(4)])
        inside = (index >= 0) & (index < len(self.bits))
        values = decode(self.bits[np.where(inside, index, 0)], self.dtype) if len(self.bits) else np.zeros(self.shape)
        return np.where(inside, values, np.nan)


def owner(x):
    """The array at the end of x's chain of bases (as_strided puts an object between that is no array)."""
    while True:
        base = x.base if isinstance(x.base, np.ndarray) else getattr(x.base, "base", None)
        if not isinstance(base, np.ndarray):
            return x
        x = base


class Sight:
    """q, k, v, mask, out as f64 [batch, heads, len, dim], and `want`, what the reference (or the caller) expects."""

    def __init__(self, out, expected, q, k, v, options):
        options = {NAMES.get(name, name): value for name, value in options.items()}
        layout = options.pop("layout", "bhsd")
        unknown = set(options) - OPTIONS - WITHOUT_EFFECT
        if unknown or layout not in ("bhsd", "bshd"):
            raise TypeError(f"unknown option {', '.join(sorted(unknown)) or layout!r}; known: {', '.join(sorted(OPTIONS))}")
        order = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
        if isinstance(out, tuple):
            out = out[0]
        self.dtype, self.out_dtype = dtype_of(q), dtype_of(out)
        self.stored = {
            name: Strided(np.asarray(x) if not is_torch(x) else x, order) for name, x in zip("qkv", (q, k, v), strict=True)
        }
        self.q, self.k, self.v = (four(x, order) for x in (q, k, v))
        self.out = four(out, order)
        self.options = {name: options[name] for name in OPTIONS - {"mask"} if options.get(name) is not None}
        if self.options.get("causal") in (True, "top_left"):
            self.options["causal"] = "top_left"
        elif self.options.get("causal") is False:
            del self.options["causal"]
        for name in ("sinks", "alibi_slopes"):
            if name in self.options:
                self.options[name] = to_f64(self.options[name])
        mask = options.get("mask")
        self.mask = None if mask is None else four(mask, (0, 1, 2, 3), broadcast=True)
        self.shape = (self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2])
        if math.prod(self.shape) > MOST_SCORES:
            raise ValueError(
                f"{math.prod(self.shape):.3g} scores are too many to play through (at most {MOST_SCORES:.3g}): "
                "diagnose a part, such as q[:1, :2, :256], k[:1, :2], v[:1, :2], out[:1, :2, :256]"
            )
        self.want = self.out_if() if expected is None else four(expected, order)

    def out_if(self, **changes):
        """The reference's output with some of q, k, v, mask and the options changed; None takes an option away."""
        arguments = {"q": self.q, "k": self.k, "v": self.v, "mask": self.mask, **self.options, **changes}
        return _reference.attention(**arguments)[0]

    @property
    def scale(self):
        return self.options.get("scale", 1 / math.sqrt(self.q.shape[3]))


def four(x, order, broadcast=False):
    """f64 (bool stays bool) with leading dimensions of 1 up to four, in the order [batch, heads, len, dim]."""
    x = to_f64(x)
    if x.ndim > 4 or (x.ndim < 2 and not broadcast):
        raise ValueError(f"a tensor of {x.ndim} dimensions; 2 to 4 are known")
    return x.reshape((1,) * (4 - x.ndim) + x.shape).transpose(order)
