"""Gradients of sequences that lie one after another, and of nested tensors, on the GPU: the bits of a call for each, without waiting for the device."""

import pytest
import torch
import torch.nn.functional as F
from gpu_reference import name_of
from test_gpu_varlen import MIXED, Sequences, bits, offsets

import rapt
import rapt.torch as rt
from rapt import _native

sdpa = F.scaled_dot_product_attention
OPS = torch.ops.rapt
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SMALL = ([70, 0, 1, 5, 129, 64], [90, 10, 300, 0, 65, 128])
OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "causal from the start": {"causal": "top_left"},
    "window": {"window": (33, 10)},
    "softcap": {"softcap": 3.0, "causal": "bottom_right"},
}


class Gradients(Sequences):
    def backward(self, **options):
        """(dq, dk, dv), and those of each sequence alone."""
        self.out, self.lse = self.attend(**options)
        torch.manual_seed(5)
        self.d_o, self.d_lse = torch.randn_like(self.out), torch.randn_like(self.lse)
        given = self.d_o, self.q, self.k, self.v, self.out, self.lse
        return rapt.varlen_attention_backward(*given, self.cu_q, self.cu_kv, d_lse=self.d_lse, **options)

    def alone_backward(self, rows, keys, **options):
        given = (x[of][None] for x, of in ((self.d_o, rows), (self.q, rows), (self.k, keys), (self.v, keys), (self.out, rows)))
        lse, d_lse = self.lse[None, :, rows], self.d_lse[None, :, rows]
        return rapt.attention_backward(*given, lse, d_lse=d_lse, layout="bshd", **options)

    def check_backward(self, **options):
        made = self.backward(**options)
        again = self.backward(**options)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(made, again))
        sums = 0
        for n, (rows, keys) in enumerate(self.each()):
            alone = self.alone_backward(rows, keys, **options)
            for name, got, want, of in zip(("dq", "dk", "dv"), made, alone, (rows, keys, keys)):
                assert torch.equal(bits(got[of]), bits(want[0])), f"{name} of sequence {n}: {rows} {keys}"
            if len(alone) > 3:
                sums = sums + alone[3].double()
        if len(made) > 3:
            assert (made[3].double() - sums).norm() <= 1e-5 * sums.norm()
        return made


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("option", OPTIONS)
def test_each_sequence_has_the_gradients_of_a_call_alone(option, dtype):
    Gradients(SMALL, dtype=dtype).check_backward(**OPTIONS[option])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 40), (100, 128), (256, 256), (300, 300)], ids=str)
def test_each_head_dim_and_many_lengths(dims):
    # No kernel of 16-bit numbers serves wider heads than 256 of sequences one after another where wide.cu serves them alone.
    dtype = torch.float64 if dims[0] > 256 else torch.bfloat16
    Gradients(MIXED, dims=dims, dtype=dtype).check_backward(causal="bottom_right")
    # A query head for each key head: other tiles of keys come first.
    Gradients(MIXED, heads=(4, 4), dims=dims, dtype=dtype).check_backward(causal="bottom_right")


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_long_sequences_beside_short_ones(dims):
    # From 8192 queries on a sequence's first keys are taken first, as a call alone takes them.
    lengths = [8300, 300, 8192, 8191]
    for options in {"causal": "bottom_right"}, {"window": (0, None)}:
        Gradients((lengths, lengths), heads=(2, 2), dims=dims, dtype=torch.bfloat16).check_backward(**options)


def test_sinks_slopes_and_many_sequences():
    sinks, slopes = torch.randn(4, device="cuda"), torch.rand(4, device="cuda")
    Gradients(SMALL).check_backward(sinks=sinks)
    Gradients(SMALL, dtype=torch.float32).check_backward(alibi_slopes=slopes, causal="bottom_right")
    # More sequences than a warp looks at together, twice.
    lengths = [n % 7 for n in range(2500)]
    Gradients((lengths, lengths[::-1]), heads=(2, 1)).check_backward()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (200, 256), (63, 63)], ids=str)
def test_what_another_sequence_has_changes_no_bit(dims, softcap):
    # Tiles end within the next sequence, whose rows are loaded beside.
    of = Gradients(([70, 129, 64, 5, 17], [90, 65, 128, 10, 3]), dims=dims)
    options = {"causal": "bottom_right", "softcap": softcap}
    clean = of.backward(**options)
    for n, (rows, keys) in enumerate(of.each()):
        given = [x.clone() for x in (of.d_o, of.q, of.k, of.v)]
        for x, poisoned in zip(given, (rows, rows, keys, keys)):
            x[poisoned] = float("nan") if n % 2 else float("inf")
        made = rapt.varlen_attention_backward(*given, of.out, of.lse, of.cu_q, of.cu_kv, d_lse=of.d_lse, **options)
        for name, got, want, mine in zip(("dq", "dk", "dv"), made, clean, (rows, keys, keys)):
            got, want = got.clone(), want.clone()
            got[mine] = want[mine] = 0
            assert torch.equal(bits(got), bits(want)), f"{name} beside sequence {n}"


def test_rows_of_no_sequence_are_zeros_and_nothing_waits():
    of = Gradients(SMALL)
    q, k, v = (torch.cat([x.new_full((2, *x.shape[1:]), float("nan")), x, x.new_full((3, *x.shape[1:]), float("nan"))]) for x in (of.q, of.k, of.v))
    want = of.backward(causal="bottom_right")
    at = [x + 2 for x in (of.cu_q, of.cu_kv)]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    d_o = torch.cat([of.d_o.new_full((2, *of.d_o.shape[1:]), float("nan")), of.d_o, of.d_o.new_full((3, *of.d_o.shape[1:]), float("nan"))])
    d_lse = torch.full((4, len(q)), float("nan"), device="cuda")
    d_lse[:, 2:-3] = of.d_lse
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = rapt.varlen_attention(q, k, v, *at, causal="bottom_right", return_lse=True)
        made = torch.autograd.grad([out, lse], [q, k, v], [d_o, d_lse])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, wanted in zip(made, want):
        assert torch.equal(got[2:-3], wanted) and not got[:2].any() and not got[-3:].any()


def test_a_graph_and_dropout():
    of = Gradients(SMALL)
    draw = torch.tensor([77, 1 << 40])
    words = {"causal": "bottom_right", "dropout_p": 0.4, "dropout_draw": draw}
    out, lse = OPS.varlen_attention_lse(of.q, of.k, of.v, of.cu_q, of.cu_kv, **words)
    d_o = torch.randn_like(out)
    given = d_o, None, of.q, of.k, of.v, out, lse, of.cu_q, of.cu_kv, [True, True, True, False]
    want = OPS.varlen_attention_backward(*given, **words)
    for n, (rows, keys) in enumerate(of.each()):
        # As the last entry of a batch of n + 1.
        one = [x[r].transpose(0, 1).expand(n + 1, -1, -1, -1) for x, r in ((d_o, rows), (of.q, rows), (of.k, keys), (of.v, keys), (out, rows))]
        alone = OPS.attention_backward(one[0], None, *one[1:], lse[None, :, rows].expand(n + 1, -1, -1), [True, True, True, False, False], **words)
        for got, wanted, r in zip(want, alone, (rows, keys, keys)):
            assert torch.equal(got[r].transpose(0, 1), wanted[-1]), n
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = OPS.varlen_attention_backward(*given, **words)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(made, want))


def test_offsets_that_lead_elsewhere_write_nowhere_else():
    of = Gradients(SMALL)
    of.backward()
    memory = torch.full((3 * of.q.numel(),), 7, dtype=of.q.dtype, device="cuda")
    inside = memory[of.q.numel() : 2 * of.q.numel()].view(of.q.shape)
    for bad in ([0, 70, 60, 80, 10, 206, 270], [-5, 72, 72, 72, 77, 206, 1 << 30], [5000, 4000, 3000, 2000, 1000, 500, -1]):
        at = torch.tensor(bad, dtype=torch.int32, device="cuda")
        for cu_q, cu_kv in ((at, of.cu_kv), (of.cu_q, at), (at, at)):
            given = of.d_o, of.q, of.k, of.v, of.out, of.lse, cu_q, cu_kv
            _native.varlen_backward_into(*given, inside, torch.empty_like(of.k), torch.empty_like(of.v))
    torch.cuda.synchronize()
    assert (memory[: of.q.numel()] == 7).all() and (memory[2 * of.q.numel() :] == 7).all()


# --- nested tensors ----------------------------------------------------------------------------------------------------------


def nested(values, at, like=None):
    return torch.nested.nested_tensor_from_jagged(values, at if like is None else like.offsets()).transpose(1, 2)


def alone_of(tensors, d_o):
    """Gradients of a causal call for one sequence."""
    one = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(rapt.attention(*(x[None] for x in one), causal=True, layout="bshd"), one, d_o[None])


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_nested_tensors_are_trained(dtype):
    lengths = [70, 1, 0, 129, 64]
    at = offsets(lengths).long()
    leaves = [torch.randn(sum(lengths), 4, 64, device="cuda").to(dtype).requires_grad_() for _ in range(3)]
    q = nested(leaves[0], at)
    k, v = (nested(x, at, q) for x in leaves[1:])
    d_o = torch.randn(sum(lengths), 4, 64, device="cuda").to(dtype)
    with rt.backend():
        rt.reset_stats()
        out = sdpa(q, k, v, is_causal=True)
        made = torch.autograd.grad(out.values().transpose(0, 1), leaves, d_o)
        assert rt.stats() == {"served": 1, "fallback": {}}
        torch.manual_seed(1)
        dropped = sdpa(q, k, v, dropout_p=0.3).values().transpose(0, 1)
        of_dropped = torch.autograd.grad(dropped, leaves, d_o)
        assert rt.stats() == {"served": 2, "fallback": {}} and all(x.isfinite().all() for x in of_dropped)
    start = 0
    for length in lengths:
        alone = alone_of([x[start : start + length] for x in leaves], d_o[start : start + length])
        for got, want in zip(made, alone):
            assert torch.equal(bits(got[start : start + length]), bits(want))
        start += length


def test_narrowed_nested_tensors_have_zeros_between_sequences():
    padded = [torch.randn(3, 80, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    lengths = torch.tensor([80, 3, 41], device="cuda")
    q = torch.nested.narrow(padded[0], 1, torch.zeros_like(lengths), lengths, layout=torch.jagged).transpose(1, 2)
    k, v = (torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), q.offsets(), q.lengths()).transpose(1, 2) for x in padded[1:])
    d_o = torch.randn(240, 4, 64, device="cuda", dtype=torch.bfloat16)
    with rt.backend():
        rt.reset_stats()
        out = sdpa(q, k, v, is_causal=True)
        made = torch.autograd.grad(out.values().transpose(0, 1), padded, d_o)
        assert rt.stats() == {"served": 1, "fallback": {}}
    for b, length in enumerate(lengths.tolist()):
        alone = alone_of([x[b, :length] for x in padded], d_o[80 * b : 80 * b + length])
        for got, want in zip(made, alone):
            assert torch.equal(got[b, :length], want) and not got[b, length:].any()
