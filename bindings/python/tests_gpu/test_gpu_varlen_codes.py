"""Sequences over codes that lie one after another on the GPU: the bits of a call for each, in formats and granularities of every kernel."""

import math

import pytest
import torch
from gpu_reference import judge
from test_gpu_varlen import DEVICE, MIXED, OPTIONS, bits, offsets

import rapt

RAW = ("int8", "uint8", "e4m3fn", "e5m2")


class Coded:
    """Rows of all sequences, `[total, heads, dim]`, as codes; or as they are, of format None."""

    def __init__(self, x, format, granularity=None, block_size=None):
        self.by_row = granularity in ("token", "block") or format in ("mxfp8", "mxfp4", "nvfp4")
        self.scale = self.zero_point = self.of = None
        if format is None:
            self.codes = self.numbers = x
            return
        options = {"granularity": granularity, "block_size": block_size}
        if format in RAW:
            # Of each head, as granularities speak of the last two dimensions.
            host = rapt.quantize(x.transpose(0, 1).float().cpu().contiguous(), format, **options)
            self.codes, self.numbers = (part.cuda().transpose(0, 1) for part in (host.codes, host.dequantize()))
            self.scale, self.zero_point = (self.placed(part) for part in (host.scale, host.zero_point))
            return
        host = rapt.quantize(x.float().cpu(), format, **options)
        self.of = {"format": format, "granularity": host.granularity, "block_size": host.block_size, "global_scale": host.global_scale}
        self.codes, self.scale, self.numbers = host.codes.cuda(), host.scale.cuda(), host.dequantize().cuda()

    def placed(self, part):
        """A factor of each head's rows, of rows that lie one after another."""
        return part if part is None else part.cuda().transpose(0, 1) if part.dim() > 1 else part.cuda()

    def arguments(self, name, rows=slice(None)):
        """What stands for `rows` of them in a call, where the operand is called so."""
        part = lambda x: x[rows] if x is not None and self.by_row else x  # noqa: E731
        codes = self.codes[rows]
        if self.of is not None:
            return {name: rapt.Quantized(codes, part(self.scale), shape=self.numbers[rows].shape, **self.of)}
        given = {name: codes, f"{name}_descale": part(self.scale), f"{name}_zero_point": part(self.zero_point)}
        return {key: value for key, value in given.items() if value is not None}


class Sequences:
    def __init__(self, lengths, k, v, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, seed=0, q=(None,)):
        torch.manual_seed(seed)
        (self.q_lens, self.kv_lens), (q_heads, kv_heads), (dim, dim_v) = lengths, heads, dims
        new = lambda n, *shape: torch.randn(n, *shape, device=DEVICE).to(dtype)  # noqa: E731
        self.q = Coded(new(sum(self.q_lens), q_heads, dim), *q)
        self.k = Coded(new(sum(self.kv_lens), kv_heads, dim), *k)
        self.v = Coded(new(sum(self.kv_lens), kv_heads, dim_v), *v)
        self.cu_q, self.cu_kv = offsets(self.q_lens), offsets(self.kv_lens)

    def attend(self, **options):
        given = self.q.arguments("q") | self.k.arguments("k") | self.v.arguments("v")
        return rapt.varlen_attention(**given, cu_seqlens_q=self.cu_q, cu_seqlens_kv=self.cu_kv, return_lse=True, **options)

    def each(self):
        q0 = kv0 = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens):
            yield slice(q0, q0 + q_len), slice(kv0, kv0 + kv_len)
            q0, kv0 = q0 + q_len, kv0 + kv_len

    def alone(self, rows, keys, **options):
        given = self.q.arguments("q", rows) | self.k.arguments("k", keys) | self.v.arguments("v", keys)
        return rapt.attention(**given, layout="bshd", return_lse=True, **options)

    def check(self, judged=(), **options):
        out, lse = self.attend(**options)
        for n, (rows, keys) in enumerate(self.each()):
            want, want_lse = self.alone(rows, keys, **options)
            assert torch.equal(bits(out[rows]), bits(want)), f"sequence {n}: {rows} {keys}"
            assert torch.equal(bits(lse[:, rows]), bits(want_lse)), f"lse of sequence {n}: {rows} {keys}"
            if n in judged:
                head_first = lambda x: x[None].transpose(1, 2)  # noqa: E731
                numbers = (self.q.numbers[rows], self.k.numbers[keys], self.v.numbers[keys])
                plain = {name: value for name, value in options.items() if name != "out_dtype"}
                judge(head_first(want), want_lse[None], *map(head_first, numbers), **plain)
        return out, lse


# k, v, dtype of q, dims. Few queries of 8 rows and of more, and many, by: decode_codes and mma; decode_codes and generic; generic and mma;
# generic alone.
KINDS = [
    (("int8", "token"), ("int8", "token"), torch.bfloat16, (64, 64)),
    (("int8", "head"), ("int8", "channel"), torch.bfloat16, (128, 64)),
    (("uint8", "token"), ("uint8", "head"), torch.float16, (64, 64)),
    (("uint8", "tensor"), ("uint8", "tensor"), torch.bfloat16, (72, 40)),
    (("e4m3fn", "channel"), ("e4m3fn", "token"), torch.bfloat16, (64, 96)),
    (("e5m2", "block", 32), ("e5m2", "token"), torch.bfloat16, (64, 64)),
    (("int4", "token"), ("int4", "token"), torch.bfloat16, (128, 128)),
    (("int4", "block", 32), ("int4", "block", 32), torch.bfloat16, (64, 64)),
    (("mxfp8",), ("mxfp4",), torch.bfloat16, (64, 64)),
    (("mxfp4",), ("mxfp8",), torch.float16, (64, 64)),
    (("nvfp4",), ("nvfp4",), torch.bfloat16, (64, 64)),
    (("e4m3fn", "head"), ("e4m3fn", "token"), torch.float32, (64, 64)),
    (("uint8", "channel"), ("uint8", "block", 16), torch.bfloat16, (64, 64)),
    (("int8", "block", 8), ("int8", "token"), torch.bfloat16, (64, 64)),
    (("int8", "token"), ("int8", "token"), torch.bfloat16, (300, 64)),
    ((None,), ("int8", "token"), torch.float32, (64, 64)),
]


def words(kinds):
    """For the ids of tests."""
    return "-".join(str(part) for part in kinds) if isinstance(kinds, tuple) else str(kinds).removeprefix("torch.")


@pytest.mark.parametrize("k, v, dtype, dims", KINDS, ids=words)
def test_each_sequence_has_the_bits_of_a_call_alone(k, v, dtype, dims):
    of = Sequences(MIXED, k, v, dims=dims, dtype=dtype)
    of.check(judged=(0, 1, 3, 11))
    of.check(causal="bottom_right", judged=(1, 2))


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_options(options):
    of = Sequences(MIXED, ("int8", "token"), ("int8", "token"))
    of.check(judged=(1, 11), **options)
    sinks, slopes = torch.randn(4, device=DEVICE), torch.rand(4, device=DEVICE)
    of.check(sinks=sinks, alibi_slopes=slopes, scale=0.2, **options)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (16, 1), (12, 4), (64, 2)], ids=str)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_heads(format, heads):
    """Groups up to 8 have few queries of few rows, larger ones have none."""
    lengths = [40, 1, 200, 9, 2, 16, 3], [40, 1000, 200, 600, 70, 1300, 0]
    Sequences(lengths, (format, "token"), (format, "token"), heads=heads, dims=(64, 64)).check(causal="bottom_right")


def test_few_rows_together_and_long_keys():
    for lengths in ([1, 1, 1, 1], [5000, 70, 20_000, 9000]), ([1], [40_000]), ([2, 8, 6], [3000, 17_000, 1]):
        for k in (("int8", "token"), ("int4", "token"), ("uint8", "channel")):
            Sequences(lengths, k, k, heads=(4, 4)).check(judged=(0,))


def test_q_that_is_codes():
    by_token = ("int8", "token")
    of = Sequences(MIXED, by_token, ("nvfp4",), q=by_token)
    of.check(out_dtype=torch.float32, causal="top_left")


@pytest.mark.parametrize("kind", ["int8", "nvfp4"])
def test_strides(kind):
    codes = ("int8", "token") if kind == "int8" else ("nvfp4",)
    of = Sequences(MIXED, codes, codes)
    want, want_lse = of.attend(causal="top_left")

    def moved(x):
        b = x.view(torch.uint8) if x.element_size() == 1 else x
        total, heads, *rest = b.shape
        wide = torch.full((total, heads + 1, *(n + 3 for n in rest)), 0x7F, device=DEVICE).to(b.dtype)
        place = wide[:, 1:]
        for n, size in enumerate(rest):
            place = place.narrow(2 + n, 1, size)
        return place.copy_(b).view(x.dtype)

    for operand in (of.k, of.v):
        operand.codes, operand.scale = moved(operand.codes), moved(operand.scale)
    out, lse = of.attend(causal="top_left", out=moved(torch.zeros_like(want)))
    assert torch.equal(bits(out), bits(want)) and torch.equal(bits(lse), bits(want_lse))


@pytest.mark.parametrize(
    "k, v, dtype",
    [(("int8", "token"), ("int8", "token"), torch.bfloat16), (("e4m3fn", "head"), ("e5m2", "token"), torch.bfloat16),
     (("mxfp8",), ("mxfp8",), torch.float32), (("int8", "block", 8), ("int8", "block", 8), torch.bfloat16)],
    ids=words,
)  # fmt: skip
def test_what_is_not_finite_in_one_sequence_reaches_no_other(k, v, dtype):
    lengths = [100, 3, 170, 16, 1, 90]
    of = Sequences((lengths, lengths), k, v, dtype=dtype)
    want, want_lse = of.check(causal="top_left")
    for n, (rows, keys) in enumerate(of.each()):
        kept = [operand.codes.clone() for operand in (of.k, of.v)], [operand.scale.clone() for operand in (of.k, of.v)]
        for operand in (of.k, of.v):
            if operand.scale.dtype == torch.float32 and operand.by_row:
                operand.scale[keys] = math.nan
            elif operand.by_row:
                operand.scale.view(torch.uint8)[keys] = 0xFF
            else:
                operand.codes.view(torch.uint8)[keys] = 0x7F
        out, lse = of.attend(causal="top_left")
        others = torch.ones(len(want), dtype=torch.bool, device=DEVICE)
        others[rows] = False
        assert torch.equal(bits(out[others]), bits(want[others])), f"sequence {n}"
        assert torch.equal(bits(lse[:, others]), bits(want_lse[:, others])), f"sequence {n}"
        assert out[rows].isnan().all()
        for operand, codes, scale in zip((of.k, of.v), *kept):
            operand.codes, operand.scale = codes, scale


@pytest.mark.parametrize("k", [("int8", "token"), ("uint8", "token"), ("nvfp4",), ("uint8", "channel")], ids=words)
def test_offsets_that_are_wrong(k):
    """No offset leads outside the tensors, whatever it is; rows of no sequence are zeros, and bad keys make NaN."""
    lengths = [50, 20, 3, 100, 30]
    of = Sequences((lengths, lengths), k, k)
    want, want_lse = of.attend()
    good = of.cu_q.tolist()
    huge, least = 2**31 - 1, -(2**31)

    def run(cu_q, cu_kv):
        of.cu_q, of.cu_kv = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (cu_q, cu_kv))
        out, lse = of.attend()
        torch.cuda.synchronize()
        return out, lse

    for bad in ([0, 50, 70, 73, 173, 204], [0, 50, 70, 73, 173, huge]):
        out, lse = run(bad, good)
        assert torch.equal(bits(out[:173]), bits(want[:173])), bad
        assert (out[173:] == 0).all() and (lse[:, 173:] == -math.inf).all(), bad
    for bad in ([0, 50, 70, 73, 173, 204], [0, 50, 70, 73, 173, huge], [0, 50, 70, 73, 173, 10], [0, 50, 70, 73, 173, least]):
        out, lse = run(good, bad)
        assert torch.equal(bits(out[:173]), bits(want[:173])), bad
        assert out[173:].isnan().all() and lse[:, 173:].isnan().all(), bad
    out, _ = run(good, [0, 203, 0, 203, 0, 203])
    assert out[:50].isfinite().all() and out[50:70].isnan().all() and out[70:73].isfinite().all()


def test_no_sequences_and_no_rows():
    by_token = ("int8", "token")
    of = Sequences(([5, 20], [5, 20]), by_token, by_token)
    of.cu_q = of.cu_kv = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out, lse = of.attend()
    assert (out == 0).all() and (lse == -math.inf).all()
    for lengths in ([5, 20], [0, 0]), ([0, 0], [5, 20]):
        out, lse = Sequences(lengths, by_token, by_token).attend()
        assert (out == 0).all() and (lse == -math.inf).all()


def test_many_sequences():
    torch.manual_seed(3)
    lengths = torch.randint(0, 60, (1500,)).tolist()
    of = Sequences((lengths, lengths), ("int8", "token"), ("int8", "token"), heads=(2, 1))
    out, lse = of.attend(causal="top_left")
    for n, (rows, keys) in enumerate(of.each()):
        if n % 61 == 0:
            want, want_lse = of.alone(rows, keys, causal="top_left")
            assert torch.equal(bits(out[rows]), bits(want)), f"sequence {n} of {lengths[n]}"
            assert torch.equal(bits(lse[:, rows]), bits(want_lse))


def test_a_graph_follows_offsets_that_change():
    of = Sequences(([300, 100, 1, 99], [300, 100, 1, 99]), ("int8", "token"), ("int8", "token"))
    of.attend(causal="top_left")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = of.attend(causal="top_left")
    for lengths in ([300, 100, 1, 99], [17, 16, 450, 17], [0, 0, 500, 0], [125] * 4, [3, 5, 490, 2]):
        new = offsets(lengths)
        of.q_lens = of.kv_lens = lengths
        of.cu_q.copy_(new), of.cu_kv.copy_(new)
        graph.replay()
        got, got_lse = out.clone(), lse.clone()
        for rows, keys in of.each():
            want, want_lse = of.alone(rows, keys, causal="top_left")
            assert torch.equal(bits(got[rows]), bits(want)), lengths
            assert torch.equal(bits(got_lse[:, rows]), bits(want_lse)), lengths


def test_the_plan_says_what_each_launch_is_for():
    of = Sequences(MIXED, ("int8", "token"), ("int8", "token"))
    given = of.q.arguments("q") | of.k.arguments("k") | of.v.arguments("v")
    plan = rapt.explain_varlen(**given, cu_seqlens_q=of.cu_q, cu_seqlens_kv=of.cu_kv)
    [(sequences, of_all)] = plan.parts
    assert sequences == list(range(len(MIXED[0]))) and plan.kernels == ["decode", "forward"]
    serves = [part["serves"] for part in of_all.parts]
    assert [part["kernel"] for part in of_all.parts] == [None, "decode", "decode", "forward"]
    assert " 8 rows" in serves[1] and "9 to 64 rows" in serves[2] and "more queries" in serves[3]
    assert all(text in str(plan) for text in serves)


def test_what_is_refused():
    by_token = ("int8", "token")
    of = Sequences(([5, 20], [5, 20]), by_token, by_token)
    with pytest.raises(rapt.UnsupportedError, match="int8"):
        of.attend(compute="int8")
    with pytest.raises(rapt.DeviceError, match="k_descale"):
        rapt.varlen_attention(of.q.codes, of.k.codes, of.v.codes, of.cu_q, of.cu_kv, k_descale=of.k.scale.cpu(), v_descale=of.v.scale)
    with pytest.raises(rapt.UnsupportedDtypeError, match="k_descale"):
        rapt.varlen_attention(of.q.codes, of.k.codes, of.v.codes, of.cu_q, of.cu_kv)
