"""Products of int8 on the GPU: the definition, its bits on any strides and beside any rows, caches, sequences, and what is refused."""

import functools
import math

import pytest
import torch
from gpu_reference import ZOO
from test_gpu_quantized import elsewhere, on_gpu, tensors
from test_gpu_varlen import offsets

import rapt

BLOCK = 128
TYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMES = [str(dtype).removeprefix("torch.") for dtype in TYPES]
FLOOR = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def attended(q_len, kv_len, causal=None, window=None):
    at = torch.arange(q_len, device="cuda")[:, None] + (kv_len - q_len if causal == "bottom_right" else 0)
    key = torch.arange(kv_len, device="cuda")
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    if causal:
        seen &= key <= at
    if window:
        left, right = window
        seen &= (key >= at - left) if left is not None else True
        seen &= (key <= at + right) if right is not None else True
    return seen


def definition(q, keys, values, *, causal=None, window=None, mask=None, softcap=None, scale=None, sinks=None, alibi_slopes=None):
    """docs/reference/numerics.md, Products of int8, in float64: out, lse, and of each number of out what hangs on codes of p next to a tie."""
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = keys.codes.shape[1:3]
    group = heads // kv_heads

    def factor(codes):
        by = codes.scale.double().reshape(*codes.scale.shape, *[1] * (4 - codes.scale.dim()))
        return by.expand(batch, kv_heads, *by.shape[2:]).repeat_interleave(group, 1)

    kc, vc = (x.codes.double().repeat_interleave(group, 1) for x in (keys, values))
    kf, vf = factor(keys), factor(values)
    kf = torch.where(kf.isfinite(), kf, math.nan)
    # Quotients as float32 rounds them: torch multiplies by the reciprocal of a number on the GPU.
    row = (q.double().abs().amax(-1, keepdim=True) / 127).float().clamp(min=torch.finfo(torch.float32).tiny)
    qc = torch.round((q.double() / row.double()).float()).double()
    odd = ~q.float().isfinite().all(-1, keepdim=True)
    qc = torch.where(odd, torch.zeros_like(qc), qc)
    row = torch.where(odd, torch.full_like(row, math.nan), row).double()
    x = qc @ kc.mT
    if keys.granularity == "token":
        x = (x.float() * kf.float().mT).double()
        kf = torch.ones((), dtype=torch.float64, device="cuda")
    x = x * row * (1 / math.sqrt(dim) if scale is None else scale) * kf
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    at = torch.arange(q_len, device="cuda")[:, None] + (kv_len - q_len if causal == "bottom_right" else 0)
    if alibi_slopes is not None:
        x = x - alibi_slopes.double()[:, None, None] * (at - torch.arange(kv_len, device="cuda")).abs()
    seen = attended(q_len, kv_len, causal, window).expand_as(x)
    if mask is not None:
        mask = mask.expand_as(x)
        seen = seen & (mask if mask.dtype == torch.bool else mask > -math.inf)
        x = x if mask.dtype == torch.bool else x + torch.where(mask > -math.inf, mask.double(), 0)
    s = torch.where(seen, x, -math.inf)
    top = s.amax(-1, keepdim=True) if kv_len else s.new_full((*s.shape[:-1], 1), -math.inf)
    if sinks is not None:
        top = top.maximum(sinks.double()[:, None, None])
    above = lambda x: torch.where(x == -math.inf, 0, x)  # noqa: E731
    total = torch.zeros_like(top) if sinks is None else torch.exp(sinks.double()[:, None, None] - top)
    out = near = torch.zeros(1, dtype=torch.float64, device="cuda")
    for n in range(0, kv_len, BLOCK):
        part, of_v = s[..., n : n + BLOCK], vc[:, :, n : n + BLOCK]
        block_top = part.amax(-1, keepdim=True)
        p, weight = torch.exp(part - above(block_top)), torch.exp(block_top - above(top))
        out = out + weight * (torch.round(255 * p) @ of_v)
        total = total + weight * p.sum(-1, keepdim=True)
        scores = part.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
        is_near = ((255 * p) % 1 - 0.5).abs() <= 255 * p * (1 + scores) * 2**-19
        near = near + weight * (is_near.double() @ of_v.abs())
    dead = ~seen.any(-1, keepdim=True)
    divisor = torch.where(dead, 1, 255 * total)
    zero = torch.zeros((), dtype=torch.float64, device="cuda")
    lse = torch.where(dead, -math.inf, top + total.log())[..., 0]
    return torch.where(dead, zero, out / divisor * vf), lse, torch.where(dead, zero, (near / divisor * vf).abs())


def quantized(k, v, of_k="token", of_v="channel"):
    return on_gpu(k, "int8", of_k)[0], on_gpu(v, "int8", of_v)[0]


def run(q, keys, values, **options):
    return rapt.attention(q, keys, values, compute="int8", return_lse=True, **options)


def check(q, keys, values, **options):
    plan = rapt.explain(q, keys, values, compute="int8", **options)
    assert (plan.kernel, plan.compute, plan.p_rounding, plan.block_n) == ("forward_int8", "int8", "block", BLOCK)
    out, lse = run(q, keys, values, **options)
    want, want_lse, near = definition(q, keys, values, **options)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    off = (out.double() - want).abs()
    allowed = near + FLOOR[q.dtype] * (want.abs() + want.nan_to_num(0).square().mean().sqrt())
    assert torch.equal(out.isnan(), want.isnan())
    assert (off <= allowed).logical_or(want.isnan()).all(), f"{off.nan_to_num(0).max()} {options}"
    same = (lse == want_lse) | (lse.isnan() & want_lse.isnan())
    assert (same | ((lse.double() - want_lse).abs() <= 1e-5 * (1 + want_lse.abs()))).all(), options
    return out, lse


# (q, key heads, kv_len, dim_v): whole blocks and tails, grouped, few queries, wide, narrow and odd head dims.
SHAPES = [
    ((2, 8, 200, 128), 2, 700, 128),
    ((1, 4, 130, 64), 4, 97, 128),
    ((1, 2, 17, 128), 2, 1, 64),
    ((2, 2, 65, 192), 1, 333, 128),
    ((1, 2, 150, 256), 2, 400, 256),
    ((1, 3, 129, 96), 3, 530, 80),
    ((1, 2, 70, 33), 1, 257, 50),
    ((2, 8, 1, 128), 2, 1500, 128),
    ((1, 6, 5, 64), 2, 640, 64),
]


@pytest.mark.parametrize("dtype", TYPES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    q, k, v = tensors(60, dtype, *shape)
    keys, values = quantized(k, v)
    check(q, keys, values)
    check(q, keys, values, causal="bottom_right")


@pytest.mark.parametrize("of_v", ["tensor", "head", "channel"])
@pytest.mark.parametrize("of_k", ["tensor", "head", "token"])
def test_every_granularity(of_k, of_v):
    q, k, v = tensors(61, torch.bfloat16, *SHAPES[0])
    keys, values = quantized(k, v, of_k, of_v)
    check(q, keys, values)
    check(q, keys, values, causal="top_left", softcap=8.0)


def test_every_option():
    q, k, v = tensors(62, torch.float16, (2, 4, 150, 64), 2, 400, 64)
    keys, values = quantized(k, v)
    torch.manual_seed(62)
    keep = torch.rand(2, 1, 150, 400, device="cuda") < 0.4
    keep[0, 0, 3] = False
    bias = torch.randn(1, 4, 150, 400, device="cuda")
    bias[0, 1, 5] = -math.inf
    sinks, slopes = torch.randn(4, device="cuda"), torch.rand(4, device="cuda") * 0.1
    for options in [
        {"mask": keep},
        {"mask": keep[:1, :, :1]},
        {"mask": bias},
        {"mask": bias.bfloat16(), "causal": "bottom_right"},
        {"window": (40, 0), "causal": "bottom_right"},
        {"window": (30, 20)},
        {"softcap": 3.0, "scale": 0.4},
        {"scale": -0.2},
        {"sinks": sinks},
        {"alibi_slopes": slopes, "causal": "bottom_right"},
        {"mask": keep, "sinks": sinks, "alibi_slopes": slopes, "softcap": 5.0, "causal": "top_left"},
    ]:
        check(q, keys, values, **options)


def test_what_is_not_finite_reaches_the_rows_that_attend_it():
    q, k, v = tensors(63, torch.bfloat16, (1, 4, 140, 64), 2, 300, 64)
    q[0, 1, 7, 3], q[0, 2, 130, 0] = math.nan, math.inf
    keys, values = quantized(k, v)
    keys.scale[0, 1, 200], keys.scale[0, 0, 140] = math.nan, -math.inf
    check(q, keys, values, causal="bottom_right")
    values.scale[0, 1, 0, 5] = math.nan
    check(q, keys, values, causal="top_left")
    rows = torch.zeros(1, 4, 140, 300, dtype=torch.bool, device="cuda")
    rows[..., 50:60, :7] = True
    check(q, keys, values, mask=rows)


def test_no_keys_and_no_queries():
    q, k, v = tensors(64, torch.bfloat16, (1, 2, 9, 64), 2, 0, 64)
    keys, values = (rapt.Quantized(x.to(torch.int8), torch.ones((), device="cuda"), format="int8", granularity="tensor", shape=x.shape) for x in (k, v))
    out, lse = run(q, keys, values)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert run(q[:, :, :0], keys, values)[0].shape == (1, 2, 0, 64)


@pytest.mark.parametrize("how", sorted(ZOO))
def test_strides_change_no_bit(how):
    for shape in (SHAPES[0], SHAPES[5], SHAPES[7]):
        q, k, v = tensors(65, torch.bfloat16, *shape)
        keys, values = quantized(k, v)
        want = run(q, keys, values, causal="bottom_right")
        given = run(ZOO[how](q), elsewhere(keys, how), elsewhere(values, how), causal="bottom_right")
        assert all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(given, want)), how
        turned = keys.codes.transpose(2, 3).contiguous().transpose(2, 3)
        given = run(q, turned, values, k_descale=keys.scale, causal="bottom_right")
        assert all(torch.equal(a, b) for a, b in zip(given, want))


def test_neighbours_and_the_length_of_the_prompt_change_no_bit():
    q, k, v = tensors(66, torch.bfloat16, (3, 8, 200, 128), 2, 700, 128)
    keys, values = quantized(k, v)
    out, lse = run(q, keys, values)
    part = lambda x, b, h: rapt.Quantized(  # noqa: E731
        x.codes[b : b + 1, h : h + 1], x.scale[b : b + 1, h : h + 1], format="int8", granularity=x.granularity, shape=(1, 1, *x.shape[2:])
    )
    for b, h in ((0, 1), (2, 0)):
        mine, mine_lse = run(q[b : b + 1, 4 * h + 1 : 4 * h + 2, 37:41], part(keys, b, h), part(values, b, h))
        assert torch.equal(mine[0, 0], out[b, 4 * h + 1, 37:41]) and torch.equal(mine_lse[0, 0], lse[b, 4 * h + 1, 37:41])
    # Keys that a row does not see have no say in it, whole blocks of them or a part of one.
    again, _ = run(q, keys, values, causal="top_left")
    less = functools.partial(lambda x, n, d: x[:, :, :n] if d else x, n=300)
    cut = rapt.Quantized(keys.codes[:, :, :300], keys.scale[:, :, :300], format="int8", granularity="token", shape=(3, 2, 300, 128))
    cut_values = rapt.Quantized(less(values.codes, d=True), values.scale, format="int8", granularity="channel", shape=(3, 2, 300, 128))
    few, _ = run(q, cut, cut_values, causal="top_left")
    assert torch.equal(few, again)


def test_out_of_another_dtype_and_run_into():
    q, k, v = tensors(67, torch.bfloat16, *SHAPES[0])
    keys, values = quantized(k, v)
    wide, _ = run(q, keys, values, out_dtype=torch.float32)
    assert torch.equal(wide.bfloat16(), run(q, keys, values)[0])
    into = torch.zeros(2, 200, 8, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    rapt.attention(q, keys, values, compute="int8", out=into)
    assert torch.equal(into, wide.bfloat16())


def test_a_captured_graph_replays_it():
    q, k, v = tensors(68, torch.bfloat16, *SHAPES[0])
    keys, values = quantized(k, v)
    want, _ = run(q, keys, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = run(q, keys, values)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_compiled_by_torch():
    q, k, v = tensors(69, torch.bfloat16, *SHAPES[0])
    keys, values = quantized(k, v)
    call = lambda q, k, v, kd, vd: rapt.attention(q, k, v, k_descale=kd, v_descale=vd, compute="int8")  # noqa: E731
    parts = (q, keys.codes, values.codes, keys.scale, values.scale)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(*parts), call(*parts))


def test_it_is_counted_and_explained():
    q, k, v = tensors(70, torch.bfloat16, *SHAPES[0])
    keys, values = quantized(k, v)
    rapt.quant.reset_stats()
    run(q, keys, values)
    assert rapt.quant.stats()["int8_calls"] == 1
    assert "int8, an approximation" in str(rapt.explain(q, keys, values, compute="int8"))


def test_refusals_say_what_to_write_instead():
    q, k, v = tensors(71, torch.bfloat16, (1, 2, 40, 272), 2, 100, 64)
    with pytest.raises(rapt.UnsupportedError, match="head dim 272.*(?s:.)*exact"):
        run(q, *quantized(k, v))
    q, k, v = tensors(71, torch.bfloat16, *SHAPES[1])
    with pytest.raises(rapt.UnsupportedError, match="with v of int8 codes by token"):
        run(q, *quantized(k, v, "token", "token"))


def test_sequences_one_after_another_have_the_bits_of_each_alone():
    torch.manual_seed(72)
    q_lens, kv_lens = [1, 200, 17, 0, 64, 3], [700, 200, 129, 50, 0, 300]
    q = torch.randn(sum(q_lens), 8, 64, device="cuda").bfloat16()
    codes = [torch.randint(-127, 128, (sum(kv_lens), 2, 64), dtype=torch.int8, device="cuda") for _ in range(2)]
    k_descale, v_descale = torch.rand(sum(kv_lens), 2, device="cuda") / 100, torch.rand(1, 2, 64, device="cuda")
    for options in ({}, {"causal": "bottom_right"}, {"softcap": 4.0}):
        out, lse = rapt.varlen_attention(
            q, *codes, offsets(q_lens), offsets(kv_lens), k_descale=k_descale, v_descale=v_descale, compute="int8", return_lse=True, **options
        )
        q0 = k0 = 0
        for q_len, kv_len in zip(q_lens, kv_lens):
            rows, keys = slice(q0, q0 + q_len), slice(k0, k0 + kv_len)
            want, want_lse = rapt.attention(
                q[None, rows], *(x[None, keys] for x in codes), k_descale=k_descale[None, keys], v_descale=v_descale[None], layout="bshd",
                compute="int8", return_lse=True, **options,
            )
            assert torch.equal(out[rows], want[0]) and torch.equal(lse[:, rows], want_lse[0]), (q_len, kv_len, options)
            q0, k0 = q0 + q_len, k0 + kv_len


@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 7])
def test_caches_have_the_bits_of_each_sequence_alone(page_size):
    torch.manual_seed(73)
    batch, heads, kv_heads, dim, most, lengths = 4, 8, 2, 128, 600, [37, 0, 600, 257]
    for q_len in (1, 40):
        q = torch.randn(batch, q_len, heads, dim, device="cuda").bfloat16()
        entries = -(-most // page_size) if page_size else 0
        blocks, rows = (batch * entries + 3, page_size) if page_size else (batch, most)
        codes = [torch.randint(-127, 128, (blocks, rows, kv_heads, dim), dtype=torch.int8, device="cuda") for _ in range(2)]
        k_descale, v_descale = torch.rand(blocks, rows, kv_heads, device="cuda") / 100, torch.rand(batch, 1, kv_heads, dim, device="cuda")
        table = torch.randperm(blocks, device="cuda")[: batch * entries].view(batch, entries).int() if page_size else None
        given = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device="cuda"), "page_table": table, "causal": True}
        out = rapt.attention_with_kvcache(q, *codes, k_descale=k_descale, v_descale=v_descale, compute="int8", **given)
        for b, length in enumerate(lengths):
            own = lambda x: (x[table[b].long()].flatten(0, 1) if page_size else x[b])[None, :length]  # noqa: B023, E731
            want = rapt.attention(
                q[b : b + 1], *map(own, codes), k_descale=own(k_descale), v_descale=v_descale[b : b + 1], layout="bshd", causal="bottom_right", compute="int8"
            )
            assert torch.equal(out[b], want[0]), (q_len, b, length)
        if page_size:
            # An entry that names no page makes the rows that attend its keys NaN, and no other.
            bad = table.clone()
            bad[2, 0] = blocks + 5
            poisoned = rapt.attention_with_kvcache(q, *codes, k_descale=k_descale, v_descale=v_descale, compute="int8", **{**given, "page_table": bad})
            assert poisoned[2].isnan().all() and torch.equal(poisoned[[0, 1, 3]], out[[0, 1, 3]])
