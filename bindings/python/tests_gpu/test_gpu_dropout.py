"""Dropout on the GPU: the weights that the CPU drops of the same draw, in both passes, and PyTorch's routes to it."""

import pytest
import torch
import torch.nn.functional as F
from gpu_reference import name_of
from torch.utils.checkpoint import checkpoint

import rapt
import rapt.flash_attn
import rapt.torch
from rapt import _reference

sdpa = F.scaled_dot_product_attention
OPS = torch.ops.rapt
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WANTED = [True, True, True, False, False]
DRAW = torch.tensor([0x0123456789ABCDEF, (5 << 32) + 1])


@pytest.fixture(autouse=True)
def registered():
    rapt.torch.register_backend()
    rapt.torch.reset_stats()
    yield
    rapt.torch.unregister_backend()


def new(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def weights(batch, heads, q_len, kv_len, dtype, device, p, **options):
    """What is left of weights that are all alike: values and gradients that arrive name the keys and queries."""
    q, k = (torch.zeros(batch, heads, n, 64, dtype=dtype, device=device) for n in (q_len, kv_len))
    v, d_o = (torch.eye(n, dtype=dtype, device=device).expand(batch, heads, n, n).contiguous() for n in (kv_len, q_len))
    words = {"dropout_p": p, "dropout_draw": DRAW, **options}
    out = OPS.attention(q, k, v, **words)
    square = d_o if q_len == kv_len else None
    if square is None:
        return out, None
    lse = OPS.attention_lse(q, k, v, **words)[1]
    (dv,) = OPS.attention_backward(square, None, q, k, v, out, lse, [False, False, True, False, False], **words)
    return out, dv


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_both_passes_drop_what_the_cpu_drops(p, dtype):
    # Whole tiles and tails, few queries, heads beyond the tensor cores.
    for q_len, kv_len in ((256, 256), (150, 150), (77, 77), (1, 200), (300, 100), (272, 272)):
        for options in ({}, {"causal": "bottom_right"}, {"window_left": 40, "window_right": 20}):
            got, dv = weights(2, 3, q_len, kv_len, dtype, "cuda", p, **options)
            want, of_cpu = weights(2, 3, q_len, kv_len, dtype, "cpu", p, **options)
            assert torch.equal(got.cpu() != 0, want != 0), (q_len, kv_len, options)
            torch.testing.assert_close(got.cpu(), want, rtol=2e-2, atol=0)
            if dv is not None:
                assert torch.equal(dv.cpu() != 0, of_cpu != 0), (q_len, options)
                torch.testing.assert_close(dv.cpu(), of_cpu, rtol=2e-2, atol=0)


CASES = {
    "plain": {},
    "causal": {"causal": "top_left"},
    "grouped": {"heads": (8, 2)},
    "biases": {"mask": True},
    "sinks": {"sinks": True, "causal": "bottom_right"},
    "softcap": {"softcap": 3.0},
    "96": {"dim": 96},
    "128": {"dim": 128},
    "256": {"dim": 256},
    "300": {"dim": 300},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_cpu(case, dtype):
    options = dict(CASES[case])
    heads, kv_heads = options.pop("heads", (4, 4))
    dim = options.pop("dim", 64)
    inputs = [new(2, heads, 200, dim, dtype=dtype), *(new(2, kv_heads, 230, dim, dtype=dtype, seed=n) for n in (1, 2))]
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    mask = new(2, heads, 200, 230, dtype=accumulate, seed=3) if options.pop("mask", False) else None
    sinks = new(heads, dtype=accumulate, seed=4) if options.pop("sinks", False) else None
    d_o = new(2, heads, 200, dim, dtype=dtype, seed=5)
    wanted = [True, True, True, mask is not None, sinks is not None]

    def run(device, wide=None):
        turn = lambda x: x if x is None else (x if wide is None else x.to(wide)).to(device)  # noqa: E731
        q, k, v = map(turn, inputs)
        words = {"mask": turn(mask), "sinks": turn(sinks), "dropout_p": 0.3, "dropout_draw": DRAW, **options}
        out, lse = OPS.attention_lse(q, k, v, **words)
        return [out, lse, *OPS.attention_backward(turn(d_o), None, q, k, v, out, lse, wanted, **words)]

    first = run("cuda")
    assert all(torch.equal(a, b) for a, b in zip(first, run("cuda"))), "bits are the same every time"
    for n, (got, of_cpu, exactly) in enumerate(zip(first, run("cpu"), run("cpu", torch.float64))):
        # Gradients of sinks are sums over out, which is rounded to the dtype of q.
        floor = _reference.FLOOR[name_of(got.dtype if n < 2 else dtype)] * 4
        size = exactly.norm()
        error = (got.cpu().double() - exactly).norm()
        assert error <= 1.5 * (of_cpu.double() - exactly).norm() + floor * size, f"{error / size:.3g} of {floor:.3g}"


def test_a_batch_entry_drops_the_same_alone():
    q, k, v = (new(3, 4, 150, 64, seed=n) for n in range(3))
    whole = OPS.attention(q, k, v, dropout_p=0.4, dropout_draw=DRAW)
    again = OPS.attention(q, k, v, dropout_p=0.4, dropout_draw=DRAW)
    assert torch.equal(whole, again)
    first = OPS.attention(q[:1], k[:1], v[:1], dropout_p=0.4, dropout_draw=DRAW)
    assert torch.equal(first, whole[:1])


def test_one_draw_a_call_and_none_without_dropout():
    q, k, v = (new(2, 4, 100, 64, seed=n) for n in range(3))
    torch.manual_seed(3)
    before, of_cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    sdpa(q, k, v)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    first, second = sdpa(q, k, v, dropout_p=0.5), sdpa(q, k, v, dropout_p=0.5)
    assert not torch.equal(first, second) and not torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), of_cpu), "the CPU's generator stands still"
    torch.manual_seed(3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for run in (lambda: sdpa(q, k, v, dropout_p=0.5), lambda: rapt.scaled_dot_product_attention(q, k, v, dropout_p=0.5), lambda: sdpa(*leaves, dropout_p=0.5)):
        torch.cuda.manual_seed(3)
        assert torch.equal(run(), first)
    with torch.random.fork_rng(["cuda"]):
        sdpa(q, k, v, dropout_p=0.5)
    assert torch.equal(sdpa(q, k, v, dropout_p=0.5), second)
    assert rapt.torch.stats()["fallback"] == {}
    for seed in (2**64 - 1, -5):
        torch.cuda.manual_seed(seed)
        assert sdpa(q, k, v, dropout_p=0.5).isfinite().all()


def test_autograd_and_checkpoints_drop_the_same_in_both_passes():
    q, k, v = (new(2, 4, 130, 64, dtype=torch.float32, seed=n).requires_grad_() for n in range(3))
    d_o = new(2, 4, 130, 64, dtype=torch.float32, seed=4)

    def made(run):
        torch.manual_seed(9)
        return torch.autograd.grad(run(q, k, v), (q, k, v), d_o)

    plain = made(lambda *of: sdpa(*of, dropout_p=0.4))
    kept = made(lambda *of: checkpoint(lambda *again: sdpa(*again, dropout_p=0.4), *of, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, kept))
    # By differences along one direction.
    step = new(2, 4, 130, 64, dtype=torch.float32, seed=6)

    def at(t):
        torch.manual_seed(9)
        with torch.no_grad():
            return (sdpa(q + t * step, k, v, dropout_p=0.4).double() * d_o).sum()

    slope = (at(1e-3) - at(-1e-3)) / 2e-3
    assert abs(slope - (plain[0].double() * step).sum()) < 1e-2 * slope.abs() + 1e-2


def test_compiled_calls_draw_in_their_graph():
    q, k, v = (new(2, 4, 130, 64, seed=n).requires_grad_() for n in range(3))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *of: sdpa(*of, dropout_p=0.4), fullgraph=True)
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = compiled(q, k, v)
        made.append((out.detach(), *torch.autograd.grad(out.float().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*made[:2])) and not torch.equal(made[0][0], made[2][0])


def captured(step):
    """`step` once on a side stream, as PyTorch asks it, then captured; returns the graph and what the captured step returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made


def test_replays_drop_what_lies_in_the_draws_memory():
    for dtype, dims in [(torch.float16, 64), (torch.bfloat16, 256), (torch.float32, 40), (torch.float64, 12)]:
        q, k, v, d_o = (new(2, 4, 130, dims, dtype=dtype, seed=n) for n in range(4))
        place = torch.tensor([1, 2], device="cuda")

        def step(draw):
            out, lse = OPS.attention_lse(q, k, v, dropout_p=0.4, dropout_draw=draw)
            return out, lse, *OPS.attention_backward(d_o, None, q, k, v, out, lse, WANTED, dropout_p=0.4, dropout_draw=draw)

        graph, made = captured(lambda: step(place))
        firsts = []
        for seed, offset in [(3, 4), (2**62 + 5, 2**40), (-7, 6)]:
            drawn = torch.tensor([seed, offset])
            place.copy_(drawn)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(made, step(drawn))), (dtype, seed)
            assert all(torch.equal(a, b) for a, b in zip(made, step(place))), (dtype, seed)
            firsts.append(made[0].clone())
        assert not torch.equal(firsts[0], firsts[1]) and not torch.equal(firsts[1], firsts[2])


def is_one_mask(v, out, d_o, dv):
    """out is linear in v, so <d_o, out> = <dv, v> where forward and backward dropped the same weights."""
    forward, backward = (d_o.double() * out.double()).sum().item(), (dv.double() * v.double()).sum().item()
    scale = (d_o.double() * out.double()).abs().sum().item()
    return abs(forward - backward) < 1e-3 * scale


def test_a_captured_step_draws_anew_at_each_replay():
    q, k, v = (new(2, 4, 100, 64, seed=n).requires_grad_() for n in range(3))
    d_o = new(2, 4, 100, 64, seed=4)

    def step():
        out = sdpa(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out, (q, k, v), d_o)

    rapt.torch.reset_stats()
    graph, (out, _, _, dv) = captured(step)
    assert rapt.torch.stats() == {"served": 2, "fallback": {}}
    seen = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            assert is_one_mask(v, out, d_o, dv)
            seen.append((out.detach().clone(), dv.clone()))
    assert all(torch.equal(a, b) for n in range(2) for a, b in zip(seen[n], seen[2 + n]))
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[0][0], seen[4][0])
    with torch.no_grad():
        graph, out = captured(lambda: rapt.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
        graph.replay()
        first = out.clone()
        graph.replay()
    assert not torch.equal(first, out)


def test_captured_sequences_draw_anew_at_each_replay():
    at = torch.tensor([0, 150, 151, 221, 285], dtype=torch.int32, device="cuda")
    q, k, v = (new(285, 4, 64, seed=n).requires_grad_() for n in range(3))
    d_o = new(285, 4, 64, seed=4)

    def step():
        out = OPS.varlen_attention(q, k, v, at, at, dropout_p=0.4, dropout_draw=torch.randint(2**62, (2,), device="cuda"))
        return out, *torch.autograd.grad(out, (q, k, v), d_o)

    graph, (out, _, _, dv) = captured(step)
    seen = []
    for _ in range(2):
        graph.replay()
        assert is_one_mask(v, out, d_o, dv)
        seen.append(out.detach().clone())
    assert not torch.equal(*seen)


def of_nested(q, k, v, at):
    q = torch.nested.nested_tensor_from_jagged(q, at.long(), min_seqlen=1, max_seqlen=150).transpose(1, 2)
    k, v = (torch.nested.nested_tensor_from_jagged(x, q.offsets(), min_seqlen=1, max_seqlen=150).transpose(1, 2) for x in (k, v))
    return rapt.scaled_dot_product_attention(q, k, v, dropout_p=0.4).values().transpose(0, 1)


OTHER_ROUTES = {
    "nested tensors": of_nested,
    "rapt.flash_attn, packed": lambda q, k, v, at: rapt.flash_attn.flash_attn_varlen_func(q, k, v, at, at, 150, 150, dropout_p=0.4),
    "rapt.flash_attn": lambda q, k, v, _at: rapt.flash_attn.flash_attn_func(q[None], k[None], v[None], dropout_p=0.4)[0],
}


@pytest.mark.parametrize("route", OTHER_ROUTES)
def test_every_other_route_draws_anew_at_each_replay(route):
    at = torch.tensor([0, 150, 151, 221, 285], dtype=torch.int32, device="cuda")
    q, k, v = (new(285, 4, 64, dtype=torch.bfloat16, seed=n).requires_grad_() for n in range(3))
    d_o = new(285, 4, 64, dtype=torch.bfloat16, seed=4)

    def step():
        out = OTHER_ROUTES[route](q, k, v, at)
        return out, *torch.autograd.grad(out, (q, k, v), d_o)

    graph, (out, _, _, dv) = captured(step)
    seen = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            # bfloat16: out and dv are rounded, each product of them by at most 2^-9.
            assert abs((d_o.double() * out.double()).sum() - (dv.double() * v.double()).sum()) < 4e-3 * (d_o.double() * out.double()).abs().sum()
            seen.append(out.detach().clone())
    assert all(torch.equal(a, b) for a, b in zip(seen[:2], seen[2:4])) and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[4])


def test_compiled_steps_with_dropout_are_cuda_graphs():
    q, k, v = (new(2, 4, 130, 64, seed=n).requires_grad_() for n in range(3))
    d_o = new(2, 4, 130, 64, seed=4)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda *of: sdpa(*of, dropout_p=0.4), fullgraph=True, mode="reduce-overhead")
    made = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(q, k, v)
        dv = torch.autograd.grad(out, v, d_o)[0].clone()
        made.append(out.detach().clone())
        assert is_one_mask(v, made[-1], d_o, dv)
    assert all(not torch.equal(a, b) for a, b in zip(made, made[1:]))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_a_draw_that_is_none_is_refused():
    q, k, v = (new(1, 1, 20, 64, seed=n) for n in range(3))
    whole = torch.tensor([1, 2, 3, 4], device="cuda")
    for draw in (whole, whole[::2], whole[:2].int(), whole[:2, None], whole[:2].double()):
        with pytest.raises(rapt.OptionError, match=r"dropout_draw = another tensor; allowed: int64 of shape \[2\]"):
            OPS.attention_lse(q, k, v, dropout_p=0.4, dropout_draw=draw)
    with pytest.raises(rapt.DeviceError, match="dropout_draw"):
        OPS.attention_lse(q.cpu(), k.cpu(), v.cpu(), dropout_p=0.4, dropout_draw=whole[:2])


def test_sequences_drop_what_batch_entries_do():
    lengths = [150, 1, 70, 0, 64]
    at = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    for dtype in DTYPES:
        q, k, v = (new(sum(lengths), 4, 64, dtype=dtype, seed=n) for n in range(3))
        words = {"causal": "bottom_right", "dropout_p": 0.4, "dropout_draw": DRAW}
        out, lse = OPS.varlen_attention_lse(q, k, v, at, at, **words)
        for n, (first, end) in enumerate(zip(at.tolist(), at.tolist()[1:])):
            # As the last entry of a batch of n + 1.
            one = [x[first:end].transpose(0, 1).expand(n + 1, -1, -1, -1) for x in (q, k, v)]
            want, of_lse = OPS.attention_lse(*one, **words)
            assert torch.equal(out[first:end].transpose(0, 1), want[-1]) and torch.equal(lse[:, first:end], of_lse[-1]), n
    values = [new(sum(lengths), 4, 64, seed=n) for n in range(3)]
    nested = [torch.nested.nested_tensor_from_jagged(x, at.long()).transpose(1, 2) for x in values]
    nested[1:] = [torch.nested.nested_tensor_from_jagged(x, nested[0].offsets()).transpose(1, 2) for x in values[1:]]
    rapt.torch.reset_stats()
    torch.manual_seed(1)
    one = sdpa(*nested, dropout_p=0.4)
    torch.manual_seed(1)
    assert torch.equal(one.values(), sdpa(*nested, dropout_p=0.4).values())
    assert rapt.torch.stats() == {"served": 2, "fallback": {}}
    assert not torch.equal(one.values(), sdpa(*nested).values())
