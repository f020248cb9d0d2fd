"""The law in f64 on the GPU, plain torch, and the error that torch's own roundings would make: the yardstick.

`Case` is one problem from a seed; `tensors` lays it out under strides of the zoo; `judge` holds an answer against the law.
"""

import dataclasses
import math
import random

import torch

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# docs/reference/numerics.md: what is allowed beside 1.1 times the yardstick.
FLOOR = {torch.float64: 16 * 2.0**-52, torch.float32: 2 * 2.0**-23, torch.float16: 2.0**-14, torch.bfloat16: 2.0**-11}
INF = math.inf


def attended(q_len, kv_len, causal, window, mask, shape):
    i = torch.arange(q_len, device="cuda")[:, None]
    j = torch.arange(kv_len, device="cuda")[None, :]
    d = kv_len - q_len if causal == "bottom_right" else 0
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    if causal is not None:
        seen &= j <= i + d
    if window is not None:
        left, right = window
        if left is not None:
            seen &= j >= i + d - left
        if right is not None:
            seen &= j <= i + d + right
    seen = seen.expand(shape)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask.double() != -INF)
    return seen, (i + d - j).abs().double()


def law(q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None, like=None):
    """(out, lse) in f64; with `like`, p is rounded to that dtype before it is multiplied with v, and sums are f32."""
    exact = torch.float64 if like is None or like == torch.float64 else torch.float32
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    seen, distance = attended(q_len, kv_len, causal, window, mask, (batch, heads, q_len, kv_len))
    s = q @ k.transpose(-1, -2) * (1 / math.sqrt(dim) if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.to(exact)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(exact)[:, None, None] * distance.to(exact)
    s = torch.where(seen, s, -INF)
    m = s.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).amax(-1, keepdim=True) if kv_len else s.new_full(s.shape[:-1] + (1,), -INF)
    if sinks is not None:
        sink = sinks.to(exact)[:, None, None]
        m = torch.maximum(m, sink.expand_as(m))
    p = torch.where(seen & (s != -INF), torch.exp(s - m), 0.0)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - m)
    if like is not None:
        p = p.to(like).to(exact)
    finite = torch.where(v.isfinite(), v, 0.0)
    out = p @ finite
    for kind, value in ((v.isnan(), math.nan), (v == INF, INF), (v == -INF, -INF)):
        if bool(kind.any()):
            out = torch.where((seen.to(exact) @ kind.to(exact)) > 0, out + value, out)
    out, lse = out / total, m + total.log()
    nobody = ~seen.any(-1, keepdim=True) if kv_len else torch.ones_like(total, dtype=torch.bool)
    return torch.where(nobody, 0.0, out), torch.where(nobody, -INF, lse).squeeze(-1)


def relative(got, want):
    got, want = got.double(), want.double()
    both = got.isfinite() & want.isfinite()
    got, want = torch.where(both, got, 0.0), torch.where(both, want, 0.0)
    norm = want.norm().item()
    return (got - want).norm().item() / norm if norm else (got - want).norm().item()


def judge(out, lse, q, k, v, **options):
    """Raises where `out` (and `lse`) break the rule; answers the relative error and what was allowed."""
    want, want_lse = law(q, k, v, **options)
    like = q.dtype
    stand_in, _ = law(q, k, v, like=like, **options)
    stand_in = stand_in.to(out.dtype)
    allowed = 1.1 * relative(stand_in, want) + FLOOR[out.dtype if EPS[out.dtype] > EPS[like] else like]
    error = relative(out, want)
    # An infinite value under a weight that sinks to 0 is an infinity or NaN by how far numbers reach: both are told apart
    # from a finite one only.
    assert torch.equal(out.isfinite(), want.isfinite()), f"finite differs in {(out.isfinite() != want.isfinite()).sum()} places"
    assert bool(out.isnan()[want.isnan()].all()), "a NaN is lost"
    assert error <= allowed, f"relative error {error:.3g}, allowed {allowed:.3g}"
    if lse is not None:
        assert torch.equal(lse == -INF, want_lse == -INF), "-inf of lse differs"
        assert torch.equal(lse.isnan(), want_lse.isnan()), "NaN of lse differs"
        fine = want_lse.isfinite()
        off = ((lse.double() - want_lse).abs() / (1 + want_lse.abs()))[fine]
        most = off.max().item() if off.numel() else 0.0
        assert most <= (1e-12 if like == torch.float64 else 1e-5), f"lse is off by {most:.3g}"
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
            seen, _ = attended(q_len, self.kv_len, self.causal, self.window, options.get("mask"), (*self.q[:3], self.kv_len))
            used = seen.any(2).view(batch, self.kv_heads, -1, self.kv_len).any(2)
            bad = torch.tensor([math.nan, INF, -INF], device="cuda", dtype=self.dtype)
            k[~used], v[~used] = bad[0], bad[torch.randint(3, (1,), generator=g, device="cuda")]
            # And values that some rows attend: only those may show it.
            v[0, 0, self.kv_len // 2, 0] = bad[self.seed % 3]
            q[0, 0, q_len // 2, 0] = math.nan
        return q, k, v, options
