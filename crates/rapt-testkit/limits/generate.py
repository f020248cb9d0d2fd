"""Measures how far torch's attention lies from the reference, and writes limits.tsv: the table that Rust tests judge by.

    python crates/rapt-testkit/limits/generate.py        (about a minute, one thread)

For each dtype, class of options, head_dim and kv_len: 4 heads of 128 queries on N(0, 1) data rounded to the dtype, three
seeds, against the formula on the same rounded inputs in f64 (for f64 itself in 80-bit long double, x86). Of torch's math and flash kernels the worse counts. Where
torch has no such option (softcap, sinks) a plain torch formula with flash's roundings stands in: products of storage
values summed in the accumulation dtype, p rounded to storage, out rounded to storage. The formula is measured in every
class (columns formula_*), so that its Rust twin (src/torch_emulation.rs) can be compared with it.

Columns: relative = |got - reference| / |reference| over the whole output; worst_row = the greatest error of one row against its own
norm, or the mean row's norm if that is larger; lse is not measured (its limit is fixed).

Classes: plain; large (scores 8 times as wide); bias (additive N(0, 1) of the storage dtype); softcap (c = 2); sinks (N(0, 1)).
"""

import datetime
import math
import pathlib
import platform

import numpy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(1)
torch.set_grad_enabled(False)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
CLASSES = ["plain", "large", "bias", "softcap", "sinks"]
HEAD_DIMS = [1, 8, 16, 32, 64, 128, 256]
KV_LENS = [1, 16, 128, 1024]
HEADS, Q_LEN, SEEDS, SOFTCAP = 4, 128, 3, 2.0


def formula(q, k, v, scale, bias, softcap, sinks, storage):
    """Attention in the dtype of q, with p rounded to storage before the second product, as flash does."""
    s = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    row_max = s.amax(-1, keepdim=True)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks.view(1, -1, 1, 1))
    p = torch.exp(s - row_max)
    row_sum = p.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sinks.view(1, -1, 1, 1) - row_max)
    return (p.to(storage).to(q.dtype) @ v) / row_sum


def exact(q, k, v, scale, bias, softcap, sinks):
    """The formula in long double, for inputs in f64."""
    long = lambda t: t.numpy().astype(numpy.longdouble)
    q, k, v = long(q), long(k), long(v)
    s = (q @ k.swapaxes(-1, -2)) * numpy.longdouble(scale)
    if softcap is not None:
        s = softcap * numpy.tanh(s / softcap)
    if bias is not None:
        s = s + long(bias)
    row_max = s.max(-1, keepdims=True)
    if sinks is not None:
        row_max = numpy.maximum(row_max, long(sinks).reshape(1, -1, 1, 1))
    p = numpy.exp(s - row_max)
    row_sum = p.sum(-1, keepdims=True)
    if sinks is not None:
        row_sum = row_sum + numpy.exp(long(sinks).reshape(1, -1, 1, 1) - row_max)
    return (p @ v) / row_sum


def errors(got, reference):
    """reference is f64, or long double where f64 itself is judged."""
    difference = got.double().numpy().astype(reference.dtype) - reference
    norms = lambda x: numpy.sqrt((x * x).sum(-1)).reshape(-1)
    rows = norms(reference)
    relative = numpy.sqrt((difference * difference).sum() / (reference * reference).sum())
    worst_row = (norms(difference) / numpy.maximum(rows, rows.mean())).max()
    return float(relative), float(worst_row)


def measure(dtype, kind, head_dim, kv_len, seed):
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * head_dim + kv_len)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = normal(1, HEADS, Q_LEN, head_dim), normal(1, HEADS, kv_len, head_dim), normal(1, HEADS, kv_len, head_dim)
    scale = (8.0 if kind == "large" else 1.0) / math.sqrt(head_dim)
    bias = normal(1, HEADS, Q_LEN, kv_len) if kind == "bias" else None
    sinks = normal(HEADS) if kind == "sinks" else None
    softcap = SOFTCAP if kind == "softcap" else None
    up = lambda t, to: None if t is None else t.to(to)
    as_ = lambda to: (q.to(to), k.to(to), v.to(to), scale, up(bias, to), softcap, up(sinks, to))
    if dtype == torch.float64:
        reference = exact(*as_(torch.float64))
    else:
        reference = formula(*as_(torch.float64), torch.float64).numpy()
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    by_formula = errors(formula(*as_(accumulation), dtype).to(dtype), reference)
    peers = []
    if softcap is None and sinks is None:
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel([backend]):
                got = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            peers.append(errors(got, reference))
    return peers or [by_formula], by_formula


def main():
    lines = [
        "# Generated by limits/generate.py; never edited by hand.",
        f"# torch {torch.__version__}, {platform.machine()}, {datetime.date.today()}, {SEEDS} seeds, one thread.",
        "dtype\tclass\thead_dim\tkv_len\trelative\tworst_row\tformula_relative\tformula_worst_row",
    ]
    for dtype in DTYPES:
        for kind in CLASSES:
            for head_dim in HEAD_DIMS:
                for kv_len in KV_LENS:
                    peers, formulas = [], []
                    for seed in range(SEEDS):
                        measured, by_formula = measure(dtype, kind, head_dim, kv_len, seed)
                        peers += measured
                        formulas.append(by_formula)
                    figures = [max(e[n] for e in some) for some in (peers, formulas) for n in (0, 1)]
                    name = str(dtype).removeprefix("torch.")
                    lines.append("\t".join([name, kind, str(head_dim), str(kv_len)] + [f"{x:.3e}" for x in figures]))
    path = pathlib.Path(__file__).with_name("limits.tsv")
    path.write_text("\n".join(lines) + "\n")


main()
