"""The reference on the GPU (rapt._reference on torch tensors), and the error that torch's own roundings would make.

`Case` is one problem from a seed; `tensors` lays it out under strides of the zoo; `judge` holds an answer against the reference.
"""

import dataclasses
import math
import random

import numpy as np
import torch
from rapt import _reference

INF = math.inf


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def exact(value):
    """Tensors of numbers in f64; all else as it is."""
    return value.double() if torch.is_tensor(value) and value.dtype != torch.bool else value


def arguments(q, k, v, options):
    return (q.double(), k.double(), v.double()), {name: exact(value) for name, value in options.items()}


def reference(q, k, v, **options):
    """(out, lse) in f64, where the tensors lie. float64 is held against numpy's long double: its own errors would count otherwise."""
    if q.dtype == torch.float64:
        return extended(q, k, v, options)
    tensors, options = arguments(q, k, v, options)
    return _reference.attention(*tensors, **options)


def extended(q, k, v, options):
    def wide(value):
        if not torch.is_tensor(value):
            return value
        return value.cpu().numpy() if value.dtype == torch.bool else value.double().cpu().numpy().astype(np.longdouble)

    out, lse = _reference.attention(*map(wide, (q, k, v)), **{name: wide(value) for name, value in options.items()})
    return tuple(torch.from_numpy(x.astype(np.float64)).to(q.device) for x in (out, lse))


def flash_rounded(q, k, v, **options):
    tensors, options = arguments(q, k, v, options)
    return _reference.flash_rounded(*tensors, name_of(q.dtype), **options)


def numbers(x):
    return x.double().cpu().numpy()


def errors(got, want):
    """(relative L2, worst row) over the elements that are finite in both."""
    got, want = numbers(got), numbers(want)
    both = np.isfinite(got) & np.isfinite(want)
    return _reference.errors(np.where(both, got, 0), np.where(both, want, 0))[:2]


def coarser(one, other):
    """Of two dtypes the one with the wider spacing."""
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def judge(out, lse, q, k, v, **options):
    """Raises where `out` (and `lse`) break the rule of docs/reference/numerics.md; answers the relative error and what was allowed."""
    want, want_lse = reference(q, k, v, **options)
    peer = flash_rounded(q, k, v, **options).to(out.dtype)
    allowed, allowed_row = _reference.limits_of(name_of(coarser(out.dtype, q.dtype)), [errors(peer, want)])
    error, row_error = errors(out, want)
    # An infinite value under a weight that sinks to 0 is an infinity or NaN by how far numbers reach: both are
    # compared with finite numbers only, and a NaN is due where it comes of no infinite value.
    assert torch.equal(out.isfinite(), want.isfinite()), f"finite differs in {(out.isfinite() != want.isfinite()).sum()} places"
    due = want.isnan()
    if bool(due.any()):
        due = reference(q, k, torch.where(v.isinf(), 0, v), **options)[0].isnan()
    assert bool(out.isnan()[due].all()), "a NaN is lost"
    assert error <= allowed, f"relative error {error:.3g}, allowed {allowed:.3g}"
    assert row_error <= allowed_row, f"worst row {row_error:.3g}, allowed {allowed_row:.3g}"
    if lse is not None:
        assert torch.equal(lse == -INF, want_lse == -INF), "-inf of lse differs"
        assert torch.equal(lse.isnan(), want_lse.isnan()), "NaN of lse differs"
        off = _reference.lse_errors(numbers(lse), numbers(want_lse))
        most = off.max() if off.size else 0.0
        assert most <= _reference.LSE_LIMIT[name_of(q.dtype)], f"lse is off by {most:.3g}"
    return error, allowed


# --- strides ----------------------------------------------------------------------------------------------------------------


def _padded(x, front, back, fill):
    """`x` inside a larger buffer of `fill`, moved by `front` elements."""
    big = torch.full((front + x.numel() + back,), fill, dtype=x.dtype, device=x.device)
    big[front : front + x.numel()] = x.reshape(-1)
    return big[front : front + x.numel()].view(x.shape)


def _fill(x):
    return True if x.dtype == torch.bool else math.nan


ZOO = {
    "row-major": lambda x: x.contiguous(),
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sbhd": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "reversed dims": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every other element": lambda x: torch.stack([x, torch.full_like(x, _fill(x))], -1)[..., 0],
    "row of a wider one": lambda x: torch.cat([x, torch.full_like(x, _fill(x))], -1)[..., : x.shape[-1]],
    "off by one": lambda x: _padded(x, 1, 3, _fill(x)),
    "off by eight": lambda x: _padded(x, 8, 8, _fill(x)),
    "odd row": lambda x: torch.cat([x, torch.full_like(x[..., :1], _fill(x))], -1)[..., : x.shape[-1]],
}


@dataclasses.dataclass
class Case:
    seed: int
    dtype: torch.dtype = torch.bfloat16
    q: tuple = (2, 4, 33, 64)
    kv_heads: int = 4
    kv_len: int = 70
    dim_v: int = 64
    causal: str | None = None
    window: tuple | None = None
    softcap: float | None = None
    scale: float | None = None
    mask: str | None = None  # "bool", "lowest" or the name of a dtype
    mask_full: tuple = (True, True, True, True)
    sinks: bool = False
    alibi: bool = False
    poison: bool = False
    spread: float = 1.0

    @staticmethod
    def random(seed):
        r = random.Random(seed)
        dtype = r.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float64])
        kv_heads, group = r.choice([1, 2, 3]), r.choice([1, 1, 2, 4, 7])
        lengths = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 130, 200, 257]
        q_len = r.choice([1, 1, *lengths])
        kv_len = r.choice([*lengths, 511, 512, 513, 1030, 1600]) if r.random() > 0.04 else 0
        dims = [1, 8, 16, 24, 40, 64, 64, 72, 80, 96, 128, 128, 160, 192, 256, r.randint(1, 300), 300]
        dim = r.choice(dims)
        dim_v = r.choice(dims) if r.random() < 0.3 else dim
        floats = ["float64"] if dtype == torch.float64 else []
        mask = r.choice([None, None, "bool", "bool", "float32", "float16", "bfloat16", "lowest", *floats])
        end = lambda: r.choice([None, 0, 1, 5, 40, 300])  # noqa: E731
        return Case(
            seed=seed, dtype=dtype, q=(r.choice([1, 2, 3]), kv_heads * group, q_len, dim), kv_heads=kv_heads, kv_len=kv_len,
            dim_v=dim_v, causal=r.choice([None, None, "top_left", "bottom_right"]),
            window=(end(), end()) if r.random() < 0.25 else None,
            softcap=r.choice([0.5, 2.0, 30.0]) if r.random() < 0.2 else None,
            scale=r.choice([0.0, -0.3, 0.11, 1.0]) if r.random() < 0.25 else None,
            mask=mask, mask_full=tuple(r.random() < 0.7 for _ in range(4)), sinks=r.random() < 0.2, alibi=r.random() < 0.2,
            poison=r.random() < 0.35, spread=r.choice([1.0, 1.0, 4.0]),
        )  # fmt: skip

    def values(self):
        """(q, k, v, options) row-major."""
        g = torch.Generator("cuda").manual_seed(self.seed)
        normal = lambda *shape: torch.randn(*shape, generator=g, device="cuda", dtype=torch.float64)  # noqa: E731
        batch, heads, q_len, dim = self.q
        q = (normal(*self.q) * self.spread).to(self.dtype)
        k = normal(batch, self.kv_heads, self.kv_len, dim).to(self.dtype)
        v = normal(batch, self.kv_heads, self.kv_len, self.dim_v).to(self.dtype)
        options = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "scale": self.scale}
        accumulate = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.mask is not None:
            full = (batch, heads, q_len, self.kv_len)
            shape = [n if keep else 1 for n, keep in zip(full, self.mask_full)]
            attend = normal(*shape) > normal(*shape[:-1], 1) * 1.5
            if self.mask == "bool":
                options["mask"] = attend
            else:
                dtype = self.dtype if self.mask == "lowest" else getattr(torch, self.mask)
                hidden = torch.finfo(dtype).min if self.mask == "lowest" else -INF
                options["mask"] = torch.where(attend, normal(*shape), hidden).to(dtype)
        if self.sinks:
            options["sinks"] = normal(heads).to(accumulate)
        if self.alibi:
            options["alibi_slopes"] = (normal(heads) * 0.1).to(accumulate)
        if self.poison and self.kv_len and q_len:
            shape, places = (*self.q[:3], self.kv_len), {"causal": self.causal, "window": self.window}
            seen, _ = _reference.attended(shape, mask=exact(options.get("mask")), like=q, **places)
            used = seen.any(2).view(batch, self.kv_heads, -1, self.kv_len).any(2)
            bad = torch.tensor([math.nan, INF, -INF], device="cuda", dtype=self.dtype)
            k[~used], v[~used] = bad[0], bad[torch.randint(3, (1,), generator=g, device="cuda")]
            # And values that some rows attend: only those may show it.
            v[0, 0, self.kv_len // 2, 0] = bad[self.seed % 3]
            q[0, 0, q_len // 2, 0] = math.nan
        return q, k, v, options
