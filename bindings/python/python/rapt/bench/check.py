"""A row's tensors, and whether an answer on them is right.

The reference (rapt._reference) runs in f64 on the GPU, for every head of sampled queries. The tolerance is that of
docs/reference/numerics.md: 1.1 times the error of torch's flash on the same inputs (where it does not run, of a formula with flash's
roundings) plus the dtype's floor, no row above 4 times the worst of theirs. torch's math kernel is left out: it rounds less in 16
bits, so the limit is never wider for it. Beside the sampled rows the whole output must be finite, and near that of a peer that passed.
Gradients are judged in `gradients`. Deliberately absent: timing.
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
    """(k, v) pairs of the same values, more than one only for rows that decode; `rapt.Quantized` where the row's storage is codes."""
    mask: object = None
    numbers: tuple = ()
    """The (k, v) that the codes stand for, in float32; of other rows nothing."""
    page_table: object = None
    """Of rows in pages: k and v of `kv` are pages [P, page_size, H, D] then."""
    d_o: object = None
    """Of rows of kind backward: what arrives, of the output's sizes."""


@dataclasses.dataclass
class Error:
    relative: float
    worst_row: float
    finite: bool
    of: str = ""
    """Which of several answers, "" where there is one."""


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
    v = k[..., : row.head_dim_v] if row.values_in_keys else normal(row.batch, row.num_kv_heads, row.kv_len, row.head_dim_v)
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

    def rotate(k, v):
        """(k, v) and its copies; values that lie in the keys are views of each."""
        pairs = [(k, v), *((k.clone(), v.clone()) for _ in range(rotated - 1))]
        return [(k, k[..., : row.head_dim_v]) for k, _ in pairs] if row.values_in_keys else pairs

    q = lay(q, row.layout == "permuted")
    if row.formats is not None:
        kv, numbers = zip(*(quantized(x, *format) for x, format in zip((k, v), row.formats)))
        copied = [tuple(each_tensor(x, torch.clone) for x in kv) for _ in range(rotated - 1)]
        return Tensors(q, [kv, *copied], mask, numbers)
    if row.page_size:
        pages = row.batch * -(-row.kv_len // row.page_size)
        order = torch.randperm(pages, generator=generator, device=gpu.where)
        table = order.reshape(row.batch, -1).to(torch.int32)
        kv = rotate(*(paged(x, row.page_size, order) for x in (k, v)))
        return Tensors(q, kv, mask, (k, v), table)
    k, v = (lay(x, row.cache == "contiguous" or row.layout in ("permuted", "bshd_cache")) for x in (k, v))
    d_o = normal(row.batch, row.num_q_heads, row.q_len, row.head_dim_v) if row.kind == "backward" else None
    return Tensors(q, rotate(k, v), mask, d_o=d_o)


def quantized(x, format, granularity):
    """(`x` as codes, the numbers that these stand for), where it lies: made in host memory, as `rapt.quantize` does."""
    import rapt

    codes = rapt.quantize(x.float().cpu(), format, granularity=granularity)
    return each_tensor(codes, lambda part: part.to(x.device)), codes.dequantize().to(x.device)


def each_tensor(codes, change):
    """The same codes, of which every tensor is what `change` makes of it."""
    import rapt

    parts = {name: getattr(codes, name) for name in ("codes", "scale", "zero_point")}
    made = {name: None if part is None else change(part) for name, part in parts.items()}
    return rapt.Quantized(
        **made, format=codes.format, shape=codes.shape, granularity=codes.granularity, block_size=codes.block_size,
        global_scale=codes.global_scale,
    )  # fmt: skip


def paged(x, page_size, order):
    """[B, H, S, D] as pages [P, page_size, H, D], of which the n-th of the tensor is page `order[n]`."""
    batch, heads, length, dim = x.shape
    rows = x.transpose(1, 2).new_zeros(batch, -(-length // page_size) * page_size, heads, dim)
    rows[:, :length] = x.transpose(1, 2)
    pages = rows.new_empty(order.numel(), page_size, heads, dim)
    pages[order] = rows.reshape(order.numel(), page_size, heads, dim)
    return pages


def sampled_queries(gpu, row):
    """Both ends and random ones between, sorted; all of them where they are few."""
    torch, count = gpu.torch, max(4, ROWS // (row.batch * row.num_q_heads))
    if row.q_len <= count:
        return torch.arange(row.q_len, device=gpu.where)
    draw = torch.Generator().manual_seed(row.q_len)
    chosen = torch.cat([torch.tensor([0, row.q_len - 1]), torch.randperm(row.q_len, generator=draw)[: count - 2]])
    return chosen.unique().to(gpu.where)


def reference(gpu, row, tensors, queries):
    """(q, k, v in f64, options) of the row at those queries, for `rapt._reference`."""
    wide, (k, v) = gpu.torch.float64, tensors.numbers or tensors.kv[0]
    mask = tensors.mask
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        mask = mask if mask.dtype == gpu.torch.bool else mask.to(wide)
    options = {
        "mask": mask, "causal": None if row.causal == "none" else row.causal, "window": (row.window - 1, None) if row.window else None,
        "softcap": row.softcap or None, "queries": queries, "q_len": row.q_len,
    }  # fmt: skip
    return tensors.q[:, :, queries].to(wide), k.to(wide), v.to(wide), options


class Judge:
    """The reference on a row's sampled queries, and what is allowed beside it."""

    def __init__(self, gpu, row, tensors):
        from rapt import _reference

        self.row, self.rule = row, _reference
        self.queries = sampled_queries(gpu, row)
        *qkv, options = reference(gpu, row, tensors, self.queries)
        self.want = _reference.attention(*qkv, **options)[0].cpu().numpy()
        self.flash_rounded = _reference.flash_rounded(*qkv, DTYPES[row.dtype], **options).cpu().numpy()
        self.limit = None

    def sampled(self, out):
        return out[:, :, self.queries].double().cpu().numpy()

    def error(self, out):
        """How far an answer is off. One of another shape or dtype, or not finite, is infinitely so."""
        if not is_whole(out, written(self.row)[0], self.row):
            return Error(float("inf"), float("inf"), False)
        relative, worst, _ = self.rule.errors(self.sampled(out), self.want)
        return Error(relative, worst, True)

    def allow(self, flash=None):
        """The limit, from flash's answer where there is one; of products of int8 their own."""
        if self.row.compute == "int8":
            self.limit = interleaved.limit_of_int8()
            return self.limit
        peer, source = (self.flash_rounded, "flash's roundings") if flash is None else (self.sampled(flash), "torch flash in this run")
        self.limit = interleaved.Limit(*self.rule.limits(DTYPES[self.row.dtype], [peer], self.want), source)
        return self.limit

    def limit_of(self, error):
        return self.limit

    def apart(self, ours, peer):
        """Relative L2 of two whole outputs: every element was written, not only the sampled ones."""
        return float((ours.float() - peer.float()).norm() / peer.float().norm())


def is_whole(x, shape, row):
    """Whether something has these sizes, the row's dtype, and nothing that is not finite."""
    return tuple(x.shape) == shape and str(x.dtype) == f"torch.{DTYPES[row.dtype]}" and bool(x.isfinite().all())


def poison(gpu, row):
    """Leaves NaN where the next output or gradients are likely to be allocated: what is not written then shows."""
    dtype = getattr(gpu.torch, DTYPES[row.dtype])
    stained = [gpu.torch.full(shape, float("nan"), device=gpu.where, dtype=dtype) for shape in written(row)]
    del stained


def written(row):
    """The sizes of what a call gives: the output, or dq, dk and dv."""
    queries, keys = (row.batch, row.num_q_heads, row.q_len), (row.batch, row.num_kv_heads, row.kv_len)
    if row.kind == "backward":
        return [(*queries, row.head_dim), (*keys, row.head_dim), (*keys, row.head_dim_v)]
    return [(*queries, row.head_dim_v)]
