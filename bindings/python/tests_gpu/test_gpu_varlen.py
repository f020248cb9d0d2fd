"""Sequences that lie one after another on the GPU: the bits of a call for each, and offsets that only the device reads."""

import pytest
import torch
from gpu_reference import judge

import rapt

DEVICE = "cuda"
NAN = float("nan")


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


class Sequences:
    """q, k and v of sequences of these lengths, `[total, heads, head_dim]`."""

    def __init__(self, lengths, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, seed=0):
        torch.manual_seed(seed)
        (self.q_lens, self.kv_lens), (q_heads, kv_heads), (dim, dim_v) = lengths, heads, dims
        new = lambda n, *shape: torch.randn(n, *shape, device=DEVICE).to(dtype)  # noqa: E731
        self.q = new(sum(self.q_lens), q_heads, dim)
        self.k, self.v = (new(sum(self.kv_lens), kv_heads, d) for d in (dim, dim_v))
        self.cu_q, self.cu_kv = offsets(self.q_lens), offsets(self.kv_lens)

    def attend(self, **options):
        return rapt.varlen_attention(self.q, self.k, self.v, self.cu_q, self.cu_kv, return_lse=True, **options)

    def each(self):
        q0 = kv0 = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens):
            yield slice(q0, q0 + q_len), slice(kv0, kv0 + kv_len)
            q0, kv0 = q0 + q_len, kv0 + kv_len

    def alone(self, rows, keys, **options):
        """One sequence by itself, as [1, heads, len, dim]."""
        q, k, v = (x[of][None].transpose(1, 2) for x, of in ((self.q, rows), (self.k, keys), (self.v, keys)))
        return q, k, v, rapt.attention(q, k, v, return_lse=True, **options)

    def check(self, judged=False, **options):
        out, lse = self.attend(**options)
        for n, (rows, keys) in enumerate(self.each()):
            q, k, v, (want, want_lse) = self.alone(rows, keys, **options)
            assert torch.equal(bits(out[rows].transpose(0, 1)), bits(want[0])), f"sequence {n}: {rows} {keys}"
            assert torch.equal(bits(lse[:, rows]), bits(want_lse[0])), f"lse of sequence {n}: {rows} {keys}"
            if judged and rows.stop > rows.start and keys.stop > keys.start:
                judge(want, want_lse, q, k, v, **options)
        return out, lse


# Few and many queries, few and many keys, none of either, whole tiles and one row more.
MIXED = (
    [1, 300, 16, 17, 0, 128, 5, 700, 129, 64, 65, 1, 33],
    [900, 300, 77, 17, 40, 128, 0, 700, 2300, 1, 65, 2100, 511],
)
OPTIONS = [
    {},
    {"causal": "top_left"},
    {"causal": "bottom_right"},
    {"causal": "bottom_right", "window": (40, 0)},
    {"window": (70, 20), "softcap": 20.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128], ids=str)
def test_each_sequence_has_the_bits_of_a_call_alone(dim, options):
    Sequences(MIXED, dims=(dim, dim)).check(**options)


@pytest.mark.parametrize("dtype, dims", [(torch.bfloat16, (300, 64)), (torch.float16, (64, 257))], ids=str)
def test_heads_whose_kernel_reads_no_offsets_are_refused(dtype, dims):
    with pytest.raises(rapt.UnsupportedError, match=f"head dim {max(dims)}.*rapt.attention"):
        Sequences(MIXED, dims=dims, dtype=dtype).check()


@pytest.mark.parametrize(
    "dtype, dims",
    [
        (torch.float16, (64, 64)),
        (torch.bfloat16, (256, 256)),
        (torch.bfloat16, (192, 128)),
        (torch.bfloat16, (72, 40)),
        (torch.bfloat16, (33, 17)),
        (torch.float32, (64, 64)),
        (torch.float32, (128, 96)),
        (torch.float64, (64, 70)),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}], ids=str)
def test_dtypes_and_head_dims(dtype, dims, options):
    Sequences(MIXED, dims=dims, dtype=dtype).check(judged=dtype in (torch.float16, torch.float32) and dims[0] <= 128, **options)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (16, 2), (5, 5), (128, 2)], ids=str)
def test_heads(heads):
    Sequences(([40, 1, 200, 9], [40, 1000, 200, 600]), heads=heads).check(causal="bottom_right")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sinks_slopes_scale_and_out(dtype):
    of = Sequences(MIXED, dtype=dtype)
    sinks, slopes = torch.randn(4, device=DEVICE), torch.rand(4, device=DEVICE)
    for options in ({"sinks": sinks}, {"alibi_slopes": slopes, "causal": "bottom_right"}, {"alibi_slopes": slopes}):
        of.check(scale=0.2, **options)
    out = torch.empty(len(of.q), 4, 64, dtype=torch.float32, device=DEVICE)
    got = rapt.varlen_attention(of.q, of.k, of.v, of.cu_q, of.cu_kv, out=out, out_dtype=torch.float32)
    assert got is out
    for rows, keys in of.each():
        q, k, v, _ = of.alone(rows, keys)
        assert torch.equal(bits(out[rows].transpose(0, 1)), bits(rapt.attention(q, k, v, out_dtype=torch.float32)[0]))


@pytest.mark.parametrize("kind", ["wide", "misaligned", "transposed", "inner"])
def test_strides(kind):
    """Tensors that TMA takes with strides of their own, and such as it does not take."""
    of = Sequences(MIXED)
    want, want_lse = of.attend(causal="top_left")

    def moved(x):
        total, heads, dim = x.shape
        if kind == "wide":
            return torch.full((total, heads + 1, dim + 8), NAN, device=DEVICE, dtype=x.dtype)[:, 1:, :dim].copy_(x)
        if kind == "misaligned":
            return torch.full((x.numel() + 1,), NAN, device=DEVICE, dtype=x.dtype)[1:].view(x.shape).copy_(x)
        if kind == "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        return torch.full((total, heads, 2 * dim), NAN, device=DEVICE, dtype=x.dtype)[..., ::2].copy_(x)

    of.q, of.k, of.v = moved(of.q), moved(of.k), moved(of.v)
    out, lse = of.attend(causal="top_left", out=moved(torch.zeros_like(want)))
    assert torch.equal(bits(out), bits(want)) and torch.equal(bits(lse), bits(want_lse))
    got, _ = of.attend(causal="top_left")
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_of_one_sequence_reaches_no_other(dtype):
    lengths = [100, 3, 170, 64, 1, 90]
    of = Sequences((lengths, lengths), dtype=dtype)
    want, want_lse = of.check(causal="top_left")
    for n, (rows, keys) in enumerate(of.each()):
        q, k, v = of.q.clone(), of.k.clone(), of.v.clone()
        for x in (of.q, of.k, of.v):
            x[rows] = NAN if n % 2 else float("inf")
        out, lse = of.attend(causal="top_left")
        others = torch.ones(len(of.q), dtype=torch.bool, device=DEVICE)
        others[rows] = False
        assert torch.equal(bits(out[others]), bits(want[others])), f"sequence {n}"
        assert torch.equal(bits(lse[:, others]), bits(want_lse[:, others])), f"sequence {n}"
        assert out[rows].isnan().all()
        of.q, of.k, of.v = q, k, v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_offsets_that_are_wrong(dtype):
    """No offset leads outside the tensors, whatever it is; rows of no sequence are zeros, and bad keys make NaN."""
    lengths = [50, 20, 3, 100, 30]
    of = Sequences((lengths, lengths), dtype=dtype)
    want, want_lse = of.attend()
    room = 7
    whole = torch.full((len(of.q) + 2 * room, 4, 64), NAN, dtype=dtype, device=DEVICE)
    good = of.cu_q.tolist()

    def run(cu_q, cu_kv):
        whole.fill_(NAN)
        out = whole[room:-room].fill_(7)
        new = lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)  # noqa: E731
        lse = rapt.varlen_attention(of.q, of.k, of.v, new(cu_q), new(cu_kv), out=out, return_lse=True)[1]
        torch.cuda.synchronize()
        assert whole[:room].isnan().all() and whole[-room:].isnan().all(), "written outside"
        return out, lse

    def is_zero(out, lse, rows):
        return (out[rows] == 0).all() and (lse[:, rows] == -float("inf")).all()

    huge, least = 2**31 - 1, -(2**31)
    out, lse = run(good, good)
    assert torch.equal(bits(out), bits(want)) and torch.equal(bits(lse), bits(want_lse))
    # Rows before the first and behind the last.
    out, lse = run(good[1:-1], good[1:-1])
    assert is_zero(out, lse, slice(0, 50)) and is_zero(out, lse, slice(173, None))
    assert torch.equal(bits(out[50:173]), bits(want[50:173]))
    # Queries that leave q, fall, or begin before others have ended.
    for bad in ([0, 50, 70, 73, 173, 204], [0, 50, 70, 73, 173, huge], [0, 50, 70, 73, 300, 203], [0, 50, 70, huge, 73, 203]):
        out, lse = run(bad, good)
        rows = 173 if bad[4] == 173 else 73 if bad[4] == 300 else 70
        assert torch.equal(bits(out[:rows]), bits(want[:rows])), bad
        assert is_zero(out, lse, slice(rows, None)), bad
    out, lse = run([0, 50, 20, 73, 173, 203], good)
    assert torch.equal(bits(out[:50]), bits(want[:50])) and is_zero(out, lse, slice(50, 73))
    assert torch.equal(bits(out[73:]), bits(want[73:]))
    for bad in ([least, 50, 70, 73, 173, 203], [-1, 50, 70, 73, 173, 203]):
        out, lse = run(bad, good)
        assert is_zero(out, lse, slice(0, 50)) and torch.equal(bits(out[50:]), bits(want[50:]))
    assert all(is_zero(*run(bad, good), slice(0, None)) for bad in ([huge] * 6, [least] * 6, [203, 173, 73, 70, 50, 0]))
    # Keys that leave k, or fall.
    for bad in ([0, 50, 70, 73, 173, 204], [0, 50, 70, 73, 173, huge], [0, 50, 70, 73, 173, 10], [0, 50, 70, 73, 173, least]):
        out, lse = run(good, bad)
        assert torch.equal(bits(out[:173]), bits(want[:173])), bad
        assert out[173:].isnan().all() and lse[:, 173:].isnan().all(), bad
    # All at once, and keys that sequences share.
    out, _ = run(good, [0, 203, 0, 203, 0, 203])
    assert out[:50].isfinite().all() and out[50:70].isnan().all() and out[70:73].isfinite().all()


def test_no_sequences_and_no_rows():
    of = Sequences(([5, 20], [5, 20]))
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out, lse = rapt.varlen_attention(of.q, of.k, of.v, none, none, return_lse=True)
    assert (out == 0).all() and (lse == -float("inf")).all()
    out = rapt.varlen_attention(of.q[:0], of.k, of.v, none, none)
    assert out.shape == (0, 4, 64)
    out = rapt.varlen_attention(of.q, of.k[:0], of.v[:0], of.cu_q, torch.zeros(3, dtype=torch.int32, device=DEVICE))
    assert (out == 0).all()


def test_many_sequences():
    torch.manual_seed(3)
    lengths = torch.randint(0, 200, (2500,)).tolist()
    of = Sequences((lengths, lengths), heads=(2, 1))
    out, lse = of.attend(causal="top_left")
    for n in range(0, 2500, 61):
        rows = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
        _, _, _, (want, want_lse) = of.alone(rows, rows, causal="top_left")
        assert torch.equal(bits(out[rows].transpose(0, 1)), bits(want[0])), f"sequence {n} of {lengths[n]}"
        assert torch.equal(bits(lse[:, rows]), bits(want_lse[0]))


def test_a_graph_follows_offsets_that_change():
    of = Sequences(([300, 100, 1, 99], [300, 100, 1, 99]))
    of.attend(causal="top_left")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = of.attend(causal="top_left")
    for lengths in ([300, 100, 1, 99], [17, 16, 450, 17], [0, 0, 500, 0], [125] * 4):
        new = offsets(lengths)
        of.q_lens = of.kv_lens = lengths
        of.cu_q.copy_(new), of.cu_kv.copy_(new)
        graph.replay()
        got, got_lse = out.clone(), lse.clone()
        for rows, keys in of.each():
            _, _, _, (want, want_lse) = of.alone(rows, keys, causal="top_left")
            assert torch.equal(bits(got[rows].transpose(0, 1)), bits(want[0])), lengths
            assert torch.equal(bits(got_lse[:, rows]), bits(want_lse[0])), lengths


def test_what_is_refused():
    of = Sequences(([5, 20], [5, 20]))
    with pytest.raises(rapt.DeviceError, match="cu_seqlens_q"):
        rapt.varlen_attention(of.q, of.k, of.v, of.cu_q.cpu(), of.cu_kv)
    with pytest.raises(rapt.UnsupportedDtypeError, match="cu_seqlens_kv"):
        rapt.varlen_attention(of.q, of.k, of.v, of.cu_q, of.cu_kv.long())
    with pytest.raises(rapt.ShapeError, match="sequences"):
        rapt.varlen_attention(of.q, of.k, of.v, of.cu_q, of.cu_kv[:-1])
