"""A row's tensors, and whether an answer on them is right.

    o = softmax(q·k / sqrt(head_dim), softcapped, masked) · v      in f64 on the GPU, every head of sampled queries

Judged by the rule of docs/reference/numerics.md as rapt._audit.law states it: 1.1 times the error of torch's flash on the same inputs (where it does
not run, of a plain formula with flash's roundings) plus the dtype's floor, no row above 4 times the worst of theirs. torch's math
kernel is left out: it rounds less in 16 bits, so the limit is never wider for it. Beside the sampled rows the whole output must be
finite, and near that of a peer that passed. Deliberately absent: timing.
"""

import dataclasses
import zlib

from . import interleaved

ROWS = 8192
"""Rows of q that are checked, over all heads and batches: enough to see any head, any batch, both ends and some tiles between."""

WRONG = 0.1
"""A peer this far off computed something else."""

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


@dataclasses.dataclass
class Tensors:
    q: object
    kv: list
    """(k, v) pairs of the same values, more than one only for rows that decode."""
    mask: object = None


@dataclasses.dataclass
class Error:
    relative: float
    worst_row: float
    finite: bool


def copies(row, l2_bytes):
    """How many K and V a decode row rotates through: together at least 4x the L2 cache, and never one alone."""
    return max(2, -(-4 * l2_bytes // row.kv_bytes)) if row.kind == "decode" else 1


def make(gpu, row, rotated=1):
    """The row's tensors from its seed. The same values for every layout of it."""
    torch = gpu.torch
    dtype = getattr(torch, DTYPES[row.dtype])
    generator = torch.Generator(gpu.where).manual_seed(zlib.crc32(f"{row.shape} {row.dims} {row.dtype}".encode()))

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=gpu.where, dtype=torch.float32).to(dtype)

    q = normal(row.batch, row.num_q_heads, row.q_len, row.head_dim)
    k = normal(row.batch, row.num_kv_heads, row.kv_len, row.head_dim)
    v = normal(row.batch, row.num_kv_heads, row.kv_len, row.head_dim_v)
    mask = None
    if row.mask == "padding":
        kept = torch.tensor(row.kept_keys, device=gpu.where)[:, None, None, None]
        mask = torch.arange(row.kv_len, device=gpu.where) < kept
    elif row.mask.startswith("bool"):
        mask = torch.rand(row.mask_shape, generator=generator, device=gpu.where) < 0.9
        mask[..., 0] = True  # no row without a key: torch answers those with NaN or zeros, by kernel
    elif row.mask.startswith("additive"):
        mask = normal(*row.mask_shape)

    def lay(x, permuted):
        return x.transpose(1, 2).contiguous().transpose(1, 2) if permuted else x

    q = lay(q, row.layout == "permuted")
    k, v = (lay(x, row.layout in ("permuted", "bshd_cache")) for x in (k, v))
    return Tensors(q, [(k, v), *((k.clone(), v.clone()) for _ in range(rotated - 1))], mask)


def sampled_queries(gpu, row):
    """Both ends and random ones between, sorted; all of them where they are few."""
    torch, count = gpu.torch, max(4, ROWS // (row.batch * row.num_q_heads))
    if row.q_len <= count:
        return torch.arange(row.q_len, device=gpu.where)
    draw = torch.Generator().manual_seed(row.q_len)
    chosen = torch.cat([torch.tensor([0, row.q_len - 1]), torch.randperm(row.q_len, generator=draw)[: count - 2]])
    return chosen.unique().to(gpu.where)


def formula(gpu, row, tensors, queries, wide, p_dtype=None):
    """The row's formula at those queries in dtype `wide`; with `p_dtype`, p is rounded to it before it meets v."""
    torch, (k, v) = gpu.torch, tensors.kv[0]
    group = row.num_q_heads // row.num_kv_heads
    q = tensors.q[:, :, queries].to(wide).unflatten(1, (row.num_kv_heads, group))
    s = (q.flatten(2, 3) @ k.to(wide).transpose(-1, -2)).mul_(row.head_dim**-0.5)
    s = s.unflatten(2, (group, len(queries)))
    if row.softcap:
        s = row.softcap * torch.tanh(s / row.softcap)
    if tensors.mask is not None:
        mask = (tensors.mask if tensors.mask.shape[2] == 1 else tensors.mask[:, :, queries])[:, :, None]
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.to(wide)
    if row.causal != "none":
        i = queries[:, None] + (row.kv_len - row.q_len if row.causal == "bottom_right" else 0)
        j = torch.arange(row.kv_len, device=gpu.where)[None, :]
        hidden = (j > i) | (j <= i - row.window) if row.window else j > i
        s = s.masked_fill(hidden, -torch.inf)
    p = (s - s.amax(-1, keepdim=True)).exp_()
    total = p.sum(-1, keepdim=True)
    p = p if p_dtype is None else p.to(p_dtype).to(wide)
    out = (p.flatten(2, 3) @ v.to(wide)).unflatten(2, (group, len(queries))) / total
    return out.flatten(1, 2)


class Judge:
    """The law on a row's sampled queries, and what is allowed beside it."""

    def __init__(self, gpu, row, tensors):
        from rapt._audit import law

        torch, self.row, self.law = gpu.torch, row, law
        self.queries = sampled_queries(gpu, row)
        self.want = formula(gpu, row, tensors, self.queries, torch.float64).cpu().numpy()
        dtype = getattr(torch, DTYPES[row.dtype])
        rounded = formula(gpu, row, tensors, self.queries, torch.float32, dtype).to(dtype)
        self.stand_in = rounded.double().cpu().numpy()
        self.limit = None

    def sampled(self, out):
        return out[:, :, self.queries].double().cpu().numpy()

    def error(self, out):
        """How far an answer is off. One of another shape or dtype, or not finite, is infinitely so."""
        want = (self.row.batch, self.row.num_q_heads, self.row.q_len, self.row.head_dim_v)
        if tuple(out.shape) != want or str(out.dtype) != f"torch.{DTYPES[self.row.dtype]}" or not bool(out.isfinite().all()):
            return Error(float("inf"), float("inf"), False)
        relative, worst, _ = self.law.errors(self.sampled(out), self.want)
        return Error(relative, worst, True)

    def allow(self, flash=None):
        """The limit, from flash's answer where there is one."""
        peer, source = (self.stand_in, "flash's roundings") if flash is None else (self.sampled(flash), "torch flash in this run")
        self.limit = interleaved.Limit(*self.law.limits(DTYPES[self.row.dtype], [peer], self.want), source)
        return self.limit

    def apart(self, ours, peer):
        """Relative L2 of two whole outputs: every element was written, not only the sampled ones."""
        return float((ours.float() - peer.float()).norm() / peer.float().norm())


def poison(gpu, row):
    """Leaves NaN where the next output of this size is likely to be allocated: what is not written then shows."""
    shape = (row.batch, row.num_q_heads, row.q_len, row.head_dim_v)
    stained = gpu.torch.full(shape, float("nan"), device=gpu.where, dtype=getattr(gpu.torch, DTYPES[row.dtype]))
    del stained
