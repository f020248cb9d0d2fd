"""Dropout with gradients: those of the formula with the mask of the definition, on every route, however often and by whomever it is computed again."""

import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
import reference  # noqa: E402
from rapt.torch import _ops  # noqa: E402
from rapt.torch._dropout import draw  # noqa: E402
from test_autograd import FRAMES, bshd, gradients, leaves  # noqa: E402
from test_torch_dropout import kept  # noqa: E402
from test_torch_stats import DTYPES, same_views, sdpa, served, stock, tensor  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

F64 = torch.float64


def seeded(seed, run):
    """`run` with the generator as `seed` leaves it."""

    def again(*args, **options):
        torch.manual_seed(seed)
        return run(*args, **options)

    return again


def drawn(seed):
    torch.manual_seed(seed)
    return draw().tolist()


def formula(q, k, v, mask=None, *, weights, is_causal=False, scale=None, enable_gqa=False):
    """PyTorch's math path with `weights` for its dropout, in the dtype of its inputs."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    p = s.softmax(-1)
    dead = None if mask is None or mask.dtype != torch.bool else ~mask.any(-1, keepdim=True)
    p = p if dead is None else p.masked_fill(dead, 0)
    return p * weights.to(p.dtype) @ v


def seen():
    mask = tensor(9, 70, seed=7) > -0.5
    mask[3] = False
    return mask


CASES = {
    "plain": lambda dt: ((tensor(2, 3, 37, 16, dtype=dt), tensor(2, 3, 70, 16, dtype=dt), tensor(2, 3, 70, 16, dtype=dt, seed=1)), {}),
    "strided, causal, scaled": lambda dt: ((bshd(2, 3, 40, 8, dtype=dt), bshd(2, 3, 40, 8, dtype=dt), bshd(2, 3, 40, 8, dtype=dt, seed=1)), {"is_causal": True, "scale": 0.3}),
    "groups, other value size": lambda dt: ((tensor(1, 4, 9, 8, dtype=dt), tensor(1, 2, 35, 8, dtype=dt), tensor(1, 2, 35, 5, dtype=dt)), {"enable_gqa": True}),
    "mask by heads": lambda dt: ((tensor(2, 3, 9, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1), tensor(3, 9, 11, dtype=dt)), {}),
    "boolean mask, a row of none": lambda dt: ((tensor(1, 2, 9, 8, dtype=dt), tensor(1, 2, 70, 8, dtype=dt), tensor(1, 2, 70, 8, dtype=dt, seed=1), seen()), {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_formula_with_the_definitions_mask(case, dtype):
    inputs, options = CASES[case](dtype)
    p, q, k = 0.3, *inputs[:2]
    run = seeded(5, lambda *t: sdpa(*t, **options, dropout_p=p))
    weights = kept(p, drawn(5), q.shape[0], q.shape[1], q.shape[2], k.shape[2]).double() / (1 - p)
    with served(2):
        with torch.no_grad():
            plain = run(*inputs)
        out = run(*leaves(*inputs))
    assert torch.equal(out, plain) and out.requires_grad
    same_views(out, stock(*leaves(*inputs), **options, dropout_p=p))
    d_o = tensor(*out.shape, dtype=dtype, seed=5)
    with served():
        got = gradients(run, inputs, d_o)
    by_formula = lambda *t: formula(*t, **options, weights=weights)  # noqa: E731
    wide = [t if t.dtype == torch.bool else t.double() for t in inputs]
    expected = gradients(by_formula, wide, d_o.double())
    # In float64 it is the order of the sums that PyTorch's own errs by.
    turned = lambda q, k, *rest: by_formula(q.flip(-1), k.flip(-1), *rest)  # noqa: E731
    peers = zip(*(gradients(run, inputs, d_o) for run in (by_formula, turned)))
    for one, wanted, of_peers, given in zip(got, expected, peers, inputs):
        assert (one.dtype, one.shape) == (given.dtype, given.shape)
        reference.assert_close(one, wanted, dtype, of_peers)


@pytest.mark.parametrize("frame", FRAMES)
def test_every_rank_and_broadcast_drops_the_same_in_both_passes(frame):
    *shapes, mask, enable_gqa = FRAMES[frame]
    q, k, v, *masks = [tensor(*shape, dtype=F64, seed=seed) for seed, shape in enumerate(shapes)] + ([] if mask is None else [tensor(*mask, dtype=F64)])
    run = seeded(1, lambda *t: sdpa(*t, enable_gqa=enable_gqa, dropout_p=0.4))
    keys = k.shape[-2]
    with served(), torch.no_grad():
        seen = run(q, k, torch.eye(keys, dtype=F64).expand(*v.shape[:-2], keys, keys) if keys else v, *masks)
    assert keys == 0 or 0.3 < (seen != 0).double().mean() < 0.9
    d_o = tensor(*seen.shape[:-1], v.shape[-1], dtype=F64, seed=5)
    with served():
        got = gradients(run, (q, k, v, *masks), d_o)
    weights = (seen != 0).double() / 0.6 if keys else seen[..., :0]
    wanted = gradients(lambda *t: formula(*t, weights=weights, enable_gqa=enable_gqa), (q, k, v, *masks), d_o)
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    q, k, v, mask = leaves(*(tensor(*s, dtype=F64) for s in ((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 3), (2, 1, 5))))
    with rt.backend():
        assert gradcheck(seeded(2, lambda *t: sdpa(*t, enable_gqa=True, dropout_p=0.5)), (q, k, v, mask))
        assert gradcheck(seeded(3, lambda *t: sdpa(*t, is_causal=True, enable_gqa=True, dropout_p=0.2)), (q, k, v), check_batched_grad=True)


def test_the_generator_moves_as_without_gradients_and_stands_without_dropout():
    inputs = [tensor(2, 4, 9, 8, seed=seed) for seed in range(3)]
    states = []
    with served(4):
        for given in (inputs, leaves(*inputs)):
            torch.manual_seed(0)
            out = sdpa(*given, dropout_p=0.5)
            states.append(torch.get_rng_state())
            sdpa(*given)
            assert torch.equal(torch.get_rng_state(), states[-1])
        out.sum().backward()
    assert all(torch.equal(torch.get_rng_state(), state) for state in states)
    zero, none = (gradients(lambda *t: sdpa(*t, **options), inputs, torch.ones(2, 4, 9, 8)) for options in ({"dropout_p": 0.0}, {}))
    assert all(map(torch.equal, zero, none))


@pytest.mark.parametrize("is_traced", [False, True])
def test_all_dropped_gives_zeros(is_traced):
    inputs = [tensor(2, 2, 9, 8, seed=seed) for seed in range(3)]
    run = lambda *t: sdpa(*t, dropout_p=1.0)  # noqa: E731
    torch._dynamo.reset()
    with served():
        got = gradients(torch.compile(run, fullgraph=True, backend="aot_eager") if is_traced else run, inputs, torch.ones(2, 2, 9, 8))
    assert all(torch.equal(one, torch.zeros_like(t)) for one, t in zip(got, inputs))


def test_the_weights_kept_make_up_for_those_dropped():
    q, k = tensor(1, 8, 200, 16), tensor(1, 8, 200, 16, seed=1)
    plain = torch.ones(1, 8, 200, 1)
    v = torch.ones(1, 8, 200, 1, requires_grad=True)
    for p in (0.1, 0.1 + 1 / 512):
        with served():
            out = seeded(4, sdpa)(q, k, v, dropout_p=p)
        # dv are sums of 200 weights: their mean is 1, whatever is dropped; that of the rows, too.
        (dv,) = torch.autograd.grad(out.sum(), v)
        for sums in (out, dv):
            assert abs(sums.detach().mean() - plain.mean()) < 0.01


ROUTES = {
    "backend": lambda q, k, v: sdpa_registered(q, k, v, is_causal=True, dropout_p=0.3),
    "rapt.scaled_dot_product_attention": lambda q, k, v: rapt.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3),
    "ops.scaled_dot_product_attention": lambda q, k, v: torch.ops.rapt.scaled_dot_product_attention(q, k, v, None, True, dropout_p=0.3, dropout_draw=draw()),
    "ops.attention": lambda q, k, v: torch.ops.rapt.attention(q, k, v, causal="top_left", dropout_p=0.3, dropout_draw=draw()),
    "attention": lambda q, k, v: _ops.attention(q, k, v, causal=True, dropout_p=0.3),
}  # fmt: skip


def sdpa_registered(*args, **options):
    with rt.backend():
        return sdpa(*args, **options)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_drops_the_same_and_counts_one_call(route):
    inputs, d_o = [tensor(2, 2, 9, 8, seed=seed) for seed in range(3)], tensor(2, 2, 9, 8, seed=3)
    wanted = gradients(seeded(1, ROUTES["backend"]), inputs, d_o)
    rt.reset_stats()
    got = gradients(seeded(1, ROUTES[route]), inputs, d_o)
    assert rt.stats() == {"served": 1, "fallback": {}}
    assert all(map(torch.equal, got, wanted))


def test_every_option_of_attention_has_dropout():
    """What flash-attention's interface asks for, against the definition's mask; the gradients by lse, mask and sinks too."""
    q, k, v, mask, sinks = (tensor(*s, dtype=F64, seed=1) for s in ((2, 30, 4, 8), (2, 40, 2, 8), (2, 40, 2, 5), (4, 30, 40), (4,)))
    slopes, p, d_o, d_lse = tensor(4, dtype=F64).abs(), 0.25, tensor(2, 30, 4, 5, dtype=F64), tensor(2, 4, 30, dtype=F64)
    options = {"causal": "bottom_right", "window": (25, None), "softcap": 3.0, "alibi_slopes": slopes, "layout": "bshd", "return_lse": True}
    weights = kept(p, drawn(6), 2, 4, 30, 40).double() / (1 - p)

    def by_formula(q, k, v, mask, sinks):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(2, 1), v.transpose(1, 2).repeat_interleave(2, 1)
        i, j = torch.arange(30)[:, None] + 10, torch.arange(40)
        s = 3.0 * torch.tanh(q @ k.transpose(-1, -2) * 8**-0.5 / 3.0) - slopes[:, None, None] * (i - j).abs() + mask
        s = s.masked_fill((j > i) | (j < i - 25), -torch.inf)
        lse = torch.cat([s, sinks[:, None, None].expand(2, 4, 30, 1)], -1).logsumexp(-1)
        return ((s - lse[..., None]).exp() * weights @ v).transpose(1, 2), lse

    def loss(run):
        return lambda *t: sum((one * d).sum() for one, d in zip(run(*t), (d_o, d_lse)))

    inputs = q, k, v, mask, sinks
    run = lambda q, k, v, mask, sinks: _ops.attention(q, k, v, mask=mask, sinks=sinks, dropout_p=p, **options)  # noqa: E731
    rt.reset_stats()
    got, wanted = gradients(seeded(6, loss(run)), inputs, None), gradients(loss(by_formula), inputs, None)
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        out, lse = seeded(6, run)(*inputs)
        for one, other in zip((out, lse), by_formula(*inputs)):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        again = _ops.attention(q, k, v, mask=mask, sinks=sinks, dropout_p=p, dropout_draw=torch.tensor(drawn(6)), **options)
        assert torch.equal(again[0], out)
    assert rt.stats() == {"served": 3, "fallback": {}}
    torch._dynamo.reset()
    compiled = gradients(seeded(6, torch.compile(loss(run), fullgraph=True, backend="aot_eager")), inputs, None)
    for one, other in zip(compiled, got):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_drops_the_same_again(use_reentrant):
    inputs = [tensor(1, 2, 9, 8, seed=seed) for seed in range(3)]
    run = lambda *t: sdpa(*t, dropout_p=0.5)  # noqa: E731
    with rt.backend():
        wanted = gradients(seeded(3, run), inputs, torch.ones(1, 2, 9, 8))
    given = leaves(*inputs)
    with served(2):  # the backward computes the forward again
        out = seeded(3, torch.utils.checkpoint.checkpoint)(run, *given, use_reentrant=use_reentrant)
        state = torch.get_rng_state()
        torch.rand(3)  # what comes in between has no say
        out.sum().backward()
    assert not torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t.grad, one) for t, one in zip(given, wanted))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_training_step_carries_both_passes_and_the_draw(dynamic):
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    inputs = [tensor(2, 4, 9, 8), tensor(2, 2, 9, 8), tensor(2, 2, 9, 8, seed=1)]
    step = lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True, dropout_p=0.3).square()  # noqa: E731
    with rt.backend():
        wanted = gradients(seeded(2, step), inputs, torch.ones(2, 4, 9, 8))
    torch._dynamo.reset()
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    with served(2):
        gradients(compiled, inputs, torch.ones(2, 4, 9, 8))
        got = gradients(seeded(2, compiled), inputs, torch.ones(2, 4, 9, 8))
    assert all(map(torch.equal, got, wanted))
    nodes = [[str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function" and ("rapt" in str(n.target) or "randint" in str(n.target))] for graphs in (backend.fw_graphs, backend.bw_graphs)]
    ops = [f"rapt.scaled_dot_product_attention_{name}.default" for name in ("lse", "backward")]
    assert nodes == [["aten.randint.low", ops[0]], [ops[1]]]


def test_threads_touch_no_bit():
    inputs, d_o = [tensor(2, 4, 300, 32, seed=seed) for seed in range(3)], tensor(2, 4, 300, 32, seed=3)
    run = seeded(1, lambda *t: sdpa_registered(*t, is_causal=True, dropout_p=0.2))
    threads = torch.get_num_threads()
    try:
        made = []
        for number in (1, 2):
            torch.set_num_threads(number)
            made.append(gradients(run, inputs, d_o))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *made))


def test_a_second_differentiation_is_refused():
    q, k, v = leaves(*(tensor(1, 2, 5, 8, seed=seed) for seed in range(3)))
    (dq,) = torch.autograd.grad(sdpa_registered(q, k, v, dropout_p=0.3).square().sum(), q, create_graph=True)
    with pytest.raises(rapt.UnsupportedError, match=r"SDPBackend\.MATH"):
        dq.sum().backward()


@pytest.mark.parametrize("name", ["attention", "scaled_dot_product_attention"])
def test_backward_ops_with_dropout_fit_their_fake_kernels(name):
    q, k, v = bshd(2, 4, 9, 8), tensor(2, 2, 9, 8), tensor(2, 2, 9, 8)
    dropout = {"dropout_p": 0.4, "dropout_draw": torch.tensor([1, 2])}
    if name == "attention":
        out, lse = torch.ops.rapt.attention_lse(q, k, v, **dropout)
        arguments, options = (out, lse, q, k, v, out, lse, [True, False, True, False, False]), {}
    else:
        out, lse = torch.ops.rapt.scaled_dot_product_attention_lse(q, k, v, enable_gqa=True, **dropout)
        arguments, options = (out, None, q, k, v, None, out, lse, [True, False, True, False], False), {"enable_gqa": True}
    op = getattr(torch.ops.rapt, f"{name}_backward").default
    torch.library.opcheck(op, arguments, options | dropout, test_utils=("test_schema", "test_faketensor"))
    dq, dv = op(*arguments, **options, **dropout)
    assert not torch.equal(dv, op(*arguments, **options)[1])
    for refused in (op, getattr(torch.ops.rapt, f"{name}_lse").default, getattr(torch.ops.rapt, name).default):
        given = arguments if refused is op else (q, k, v)
        with pytest.raises(rapt.OptionError, match="dropout_draw"):
            refused(*given, **options, dropout_p=0.5)


def test_modules_in_training_are_served():
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(32, 4, dropout=0.2, batch_first=True).train()
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.2).train()
    x = tensor(2, 7, 32)
    with served(4):
        for run in (lambda: attention(x, x, x, need_weights=False)[0], lambda: layer(x)):
            first, again = (seeded(1, run)() for _ in range(2))
            assert torch.equal(first, again) and first.requires_grad
            first.square().mean().backward()
    assert all(p.grad.isfinite().all() for module in (attention, layer) for p in module.parameters())
