"""A case: everything that determines one probe, small enough to print, to shrink and to turn into a reproducer.

Sizes are those of q [batch, heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, v_len,
head_dim_v]. `values(case)` draws the numbers from the case's seed; `place` lays them in memory.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from rapt import _reference

from .tensors import Placed, addresses, exact, lie


@dataclass(frozen=True)
class Case:
    """One probe. Every field is a number, a string, None or a tuple of these."""

    dtype: str = "float32"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    q_len: int = 32
    kv_len: int = 64
    head_dim: int = 32
    head_dim_v: int = 32
    v_len: int | None = None
    """Rows of v where they differ from k's."""
    views: tuple = ()
    """((name of the tensor, arrangement), …); the rest is contiguous."""
    mask: str | None = None
    """bool, additive, -inf (0 or −inf), lowest (0 or the lowest finite number)."""
    mask_dims: str = "bhqk"
    """The mask's dimensions, 1 where it broadcasts: "bhqk", "b11k", "qk", "hqk"."""
    masked_row: int | None = None
    """A query whose every key is masked."""
    masked_key: int | None = None
    """A key that no query attends (counted from 0)."""
    causal: str | None = None
    scale: float | None = None
    options: tuple = ()
    """Further options of rapt.attention: (("window", (3, 2)), …)."""
    poison: tuple = ()
    """(tensor, row, "nan" | "inf"): the row of q, k or v that holds it."""
    logits: float = 1.0
    """Factor on q and k each."""
    size_of_v: float = 1.0
    """Factor on v."""
    dropout: float = 0.0
    """The probability that is asked for, of weights that are dropped."""
    around: str = "zero"
    """What lies round the tensors: "zero" or "nan"."""
    guard: str | None = None
    """A page that may not be touched, "before" or "after" each tensor."""
    seed: int = 0

    def but(self, **changes):
        return replace(self, **changes)

    def arrangement(self, name):
        return dict(self.views).get(name, "contiguous")

    def as_dict(self):
        """What differs from the defaults, plus dtype and sizes."""
        sizes = {"dtype", "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "head_dim_v"}
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if name in sizes or value != defaults[name]}

    def __str__(self):
        shown = self.as_dict()
        q = f"q[{self.batch},{self.heads},{self.q_len},{self.head_dim}]"
        kv = f"k[{self.batch},{self.kv_heads},{self.kv_len},{self.head_dim}]"
        v = f"v[{self.batch},{self.kv_heads},{self.v_len or self.kv_len},{self.head_dim_v}]"
        rest = [f"{name}={shown[name]}" for name in shown if name not in Case.__sizes__]
        return " ".join([self.dtype, q, kv, v, *rest])


Case.__sizes__ = {"dtype", "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "head_dim_v", "v_len"}


def mask_shape(case):
    sizes = {"b": case.batch, "h": case.heads, "q": case.q_len, "k": case.kv_len, "1": 1}
    return tuple(sizes[dim] for dim in case.mask_dims)


class Values(NamedTuple):
    """The numbers of a case, in f64 and exact in its dtype; mask is bool, f64 or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None
    options: dict


def values(case):
    """Normal numbers from the case's seed, poison and mask laid in."""
    rng = np.random.default_rng([case.seed, 20261121])
    shapes = {
        "q": (case.batch, case.heads, case.q_len, case.head_dim),
        "k": (case.batch, case.kv_heads, case.kv_len, case.head_dim),
        "v": (case.batch, case.kv_heads, case.kv_len if case.v_len is None else case.v_len, case.head_dim_v),
    }
    tensors = {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape)
        if case.arrangement(name) == "expanded":
            drawn = np.broadcast_to(drawn[:1, :1], shape).copy()
        tensors[name] = drawn * (case.size_of_v if name == "v" else case.logits)
    if case.poison and case.poison[0] in tensors:
        name, row, what = case.poison
        tensors[name][:, :, row] = np.nan if what == "nan" else np.inf
    mask = None
    if case.mask is not None:
        shape = mask_shape(case)
        if case.kv_len < 1024:
            keep = rng.random(shape) < 0.6
        else:
            # A pattern, where random numbers would take gigabytes.
            keep = np.ones(shape, bool)
            keep[..., ::7] = False
        keep[..., 0] = True
        if case.masked_key is not None:
            keep[..., case.masked_key] = False
        if case.masked_row is not None:
            keep[..., case.masked_row, :] = False
        lowest = {"float16": -65504.0, "bfloat16": -(2.0**128 - 2.0**120)}.get(case.dtype)
        lowest = float(np.finfo(case.dtype).min) if lowest is None else lowest
        mask = {
            "bool": lambda: keep,
            "additive": lambda: np.where(keep | (rng.random(shape) < 0.5), rng.standard_normal(shape), -np.inf),
            "-inf": lambda: np.where(keep, 0.0, -np.inf),
            "lowest": lambda: np.where(keep, 0.0, lowest),
        }[case.mask]()
        mask = mask if mask.dtype == np.bool_ else exact(mask, case.dtype)
    options = {name: value for name, value in case.options}
    for name in ("sinks", "alibi_slopes"):
        if name in options:
            options[name] = exact(rng.random(case.heads) * options[name], "float32")
    q, k, v = (exact(tensors[name], case.dtype) for name in "qkv")
    return Values(q, k, v, mask, options)


def draw_d_o(case):
    """The gradient by out of a case, in f64 and exact in its dtype. What shares an address in its arrangement is equal."""
    shape = (case.batch, case.heads, case.q_len, case.head_dim_v)
    rng = np.random.default_rng([case.seed, 20261126])
    where = lie(shape, case.arrangement("d_o"))
    d_o = rng.standard_normal(where.extent)[addresses(shape, where)]
    if case.poison and case.poison[0] == "d_o":
        d_o[:, :, case.poison[1]] = np.nan
    return exact(d_o, case.dtype)


def expected(case, drawn):
    """(out, lse) by the definition."""
    return _reference.attention(drawn.q, drawn.k, drawn.v, mask=drawn.mask, causal=case.causal, scale=case.scale, **drawn.options)


def stand_in(case, drawn):
    """What a sound kernel of this dtype would answer, rounded."""
    return _reference.flash_rounded(
        drawn.q, drawn.k, drawn.v, case.dtype, mask=drawn.mask, causal=case.causal, scale=case.scale, **drawn.options
    )


def place(case, drawn, kind, device):
    """{name: Placed} of q, k, v, mask and the options that are tensors."""
    where = {"around": case.around, "guard": case.guard, "kind": kind, "device": device}
    placed = {name: Placed(getattr(drawn, name), case.dtype, arrangement=case.arrangement(name), **where) for name in "qkv"}
    if drawn.mask is not None:
        dtype = "bool" if drawn.mask.dtype == np.bool_ else case.dtype
        placed["mask"] = Placed(drawn.mask, dtype, arrangement=case.arrangement("mask"), **where)
    for name in ("sinks", "alibi_slopes"):
        if name in drawn.options:
            placed[name] = Placed(drawn.options[name], "float32", **where)
    return placed


def smaller(case):
    """Cases one step smaller, the most telling first: fewer batches and heads, shorter, narrower, fewer options."""
    for name in ("batch", "heads", "kv_heads", "kv_len", "q_len", "head_dim", "head_dim_v", "v_len"):
        size = getattr(case, name)
        if size is None or size <= 1:
            continue
        for less in dict.fromkeys((1, 2, size // 4, size // 2, size - 1)):
            if 1 <= less < size and (changed := fitted(case, name, less)) is not None:
                yield changed
    for view in case.views:
        yield case.but(views=tuple(other for other in case.views if other != view))
    if case.mask is not None and case.mask_dims != "qk" and "mask" not in dict(case.views):
        yield case.but(mask_dims="qk")
    if case.scale is not None:
        yield case.but(scale=None)
    if case.causal is not None and not case.poison:
        yield case.but(causal=None)
    for option in case.options:
        yield case.but(options=tuple(other for other in case.options if other != option))


def fitted(case, name, size):
    """The case with this size, the sizes bound to it following; None where it does not fit."""
    if name == "heads":
        group = case.heads // case.kv_heads
        if case.heads == case.kv_heads:
            return case.but(heads=size, kv_heads=size)
        return None if size % case.kv_heads or size == case.kv_heads or group == 1 else case.but(heads=size)
    if name == "kv_heads":
        group = case.heads // case.kv_heads
        return None if group == 1 else case.but(kv_heads=size, heads=size * group)
    if name == "head_dim" and case.head_dim == case.head_dim_v:
        return case.but(head_dim=size, head_dim_v=size)
    if name == "kv_len":
        if case.v_len is not None and not size < case.v_len:
            return None
        if case.poison and case.poison[0] in "kv":
            # The poisoned, unattended key stays the last one.
            if size < 2 or case.causal and size <= 1:
                return None
            key = size - 1
            return case.but(kv_len=size, poison=(case.poison[0], key, case.poison[2]), masked_key=case.masked_key and key)
        return case.but(kv_len=size) if not (case.masked_key or 0) >= size else None
    if name == "v_len" and size <= case.kv_len:
        return None
    if name == "q_len":
        row = case.poison[1] if case.poison and case.poison[0] == "q" else case.masked_row
        if row is not None and row >= size:
            if case.masked_row is not None:
                return case.but(q_len=size, masked_row=size - 1)
            return case.but(q_len=size, poison=("q", size - 1, case.poison[2]))
    return case.but(**{name: size})
