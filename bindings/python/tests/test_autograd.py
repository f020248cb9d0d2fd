"""Gradients through PyTorch on the CPU: served, near the float64 reference, on every route; what has none is refused or handed on by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
import reference  # noqa: E402
from rapt import _reference  # noqa: E402
from test_torch_stats import DTYPES, four, same_views, sdpa, served, stock, tensor  # noqa: E402
from torch.autograd import forward_ad, gradcheck  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

F64 = torch.float64


def leaves(*tensors):
    return [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in tensors]


def exact(d_o, q, k, v, mask=None, *, is_causal=False, scale=None, enable_gqa=False, **roundings):
    """The reference's gradients by q, k, v and an additive mask, each of its input's shape."""
    rank, shapes = max(q.dim(), k.dim(), v.dim(), 4), [t.shape for t in (q, k, v)]
    Q, K, V, M = four(*(t if t is None else t.detach() for t in (q, k, v, mask)), enable_gqa)
    options = {"mask": None if M is None else M if M.dtype == torch.bool else M.double(), "causal": is_causal or None, "scale": scale, **roundings}
    D = d_o.detach().double().reshape(-1, *d_o.shape[-3:]) if d_o.dim() > 2 else d_o.detach().double()[None, None]
    *made, d_mask, _ = _reference.gradients(D, Q.double(), K.double(), V.double(), **options)
    lead = torch.broadcast_shapes(*(s[:-2] if not enable_gqa else (*s[:-3], 1) for s in shapes))
    lead = (1,) * (rank - 2 - len(lead)) + tuple(lead)
    lead = (*lead[:-1], q.shape[-3]) if enable_gqa else lead
    back = []
    for gradient, shape in zip(made, shapes):
        gradient = gradient.reshape(*lead, *gradient.shape[-2:])
        if enable_gqa and shape[-3] != gradient.shape[-3]:
            gradient = gradient.unflatten(-3, (shape[-3], -1)).sum(-3)
        back.append(gradient.sum_to_size(shape))
    if d_mask is not None:
        back.append(d_mask.reshape(*lead, *d_mask.shape[-2:]).sum_to_size(mask.shape))
    return back


def gradients(run, inputs, d_o):
    inputs = leaves(*inputs)
    asking = [t for t in inputs if t is not None and t.requires_grad]
    return torch.autograd.grad(run(*inputs), asking, d_o)


def stocks(inputs, d_o, **options):
    """PyTorch's own gradients, by math and by flash; what flash's roundings give where that does not serve the request."""
    assert not rt.is_registered()
    peers = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel([backend]):
                peers.append(gradients(lambda *t: sdpa(*t, **options), inputs, d_o))
        except RuntimeError:
            dtype, narrow = d_o.dtype, lambda x: x.to(d_o.dtype).double()
            roundings = {"rounded": narrow, "weights": narrow if dtype.itemsize == 2 else None}
            peers.append([one.to(dtype) for one in exact(d_o, *inputs, **options, **roundings)])
    return peers


def bshd(*shape, **options):
    batch, heads, length, head_dim = shape
    return tensor(batch, length, heads, head_dim, **options).transpose(1, 2)


def seen(q_len, kv_len, dead=None):
    mask = tensor(q_len, kv_len, seed=7) > -0.5
    mask[:, 0] = True
    if dead is not None:
        mask[dead] = False
    return mask


CASES = {
    "plain": lambda dt: ((tensor(2, 3, 37, 16, dtype=dt), tensor(2, 3, 41, 16, dtype=dt), tensor(2, 3, 41, 16, dtype=dt, seed=1)), {}),
    "strided, causal, scaled": lambda dt: ((bshd(2, 3, 40, 8, dtype=dt), bshd(2, 3, 40, 8, dtype=dt), bshd(2, 3, 40, 8, dtype=dt, seed=1)), {"is_causal": True, "scale": 0.3}),
    "groups": lambda dt: ((tensor(1, 4, 9, 8, dtype=dt), tensor(1, 2, 35, 8, dtype=dt), tensor(1, 2, 35, 8, dtype=dt, seed=1)), {"enable_gqa": True}),
    "other value size": lambda dt: ((tensor(2, 2, 9, 8, dtype=dt), tensor(2, 2, 11, 8, dtype=dt), tensor(2, 2, 11, 5, dtype=dt)), {}),
    "mask by heads": lambda dt: ((tensor(2, 3, 9, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1), tensor(3, 9, 11, dtype=dt)), {}),
    "mask of keys": lambda dt: ((tensor(2, 3, 9, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1), tensor(2, 1, 1, 11, dtype=dt)), {}),
    "boolean mask": lambda dt: ((tensor(2, 3, 9, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1), seen(9, 11)), {}),
    "one batch of keys": lambda dt: ((tensor(3, 2, 9, 8, dtype=dt), tensor(1, 2, 11, 8, dtype=dt), tensor(2, 11, 8, dtype=dt)), {}),
    "one head of keys": lambda dt: ((tensor(2, 4, 9, 8, dtype=dt), tensor(2, 1, 11, 8, dtype=dt), tensor(2, 1, 11, 8, dtype=dt, seed=1)), {}),
    "one query head": lambda dt: ((tensor(2, 1, 9, 8, dtype=dt), tensor(1, 3, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1)), {}),
    "rank 5": lambda dt: ((tensor(2, 1, 3, 9, 8, dtype=dt), tensor(1, 2, 1, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1), tensor(2, 1, 9, 11, dtype=dt)), {}),
    "groups of k and of v": lambda dt: ((tensor(2, 4, 9, 8, dtype=dt), tensor(2, 2, 11, 8, dtype=dt), tensor(1, 4, 11, 8, dtype=dt, seed=1)), {"enable_gqa": True}),
    "rank 2": lambda dt: ((tensor(9, 8, dtype=dt), tensor(11, 8, dtype=dt), tensor(11, 8, dtype=dt, seed=1), tensor(1, 11, dtype=dt)), {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_near_to_the_reference_as_pytorchs(case, dtype):
    inputs, options = CASES[case](dtype)
    with served(2):
        with torch.no_grad():
            plain = sdpa(*inputs, **options)
        out = sdpa(*leaves(*inputs), **options)
    assert torch.equal(out, plain) and out.requires_grad
    same_views(out, stock(*leaves(*inputs), **options))
    d_o = tensor(*out.shape, dtype=dtype, seed=5)
    with served():
        got = gradients(lambda *t: sdpa(*t, **options), inputs, d_o)
    expected, peers = exact(d_o, *inputs, **options), stocks(inputs, d_o, **options)
    assert len(got) == len(expected)
    for name, one, wanted, *of_peers, given in zip(("dq", "dk", "dv", "d_mask"), got, expected, *peers, inputs):
        assert (one.dtype, one.shape) == (given.dtype, given.shape), name
        reference.assert_close(one, wanted, dtype, of_peers)


# Ranks and groups of which a piece is one call of the kernels, against PyTorch's own in float64.
FRAMES = {
    "rank 3": ((3, 9, 8), (1, 11, 8), (3, 11, 8), (9, 11), False),
    "rank 6": ((2, 3, 2, 2, 5, 8), (1, 3, 2, 2, 6, 8), (2, 1, 1, 1, 6, 8), (3, 1, 2, 5, 6), False),
    "groups of k and of v": ((2, 4, 5, 8), (2, 2, 6, 8), (1, 4, 6, 8), (4, 5, 6), True),
    "one head of k": ((2, 4, 5, 8), (2, 1, 6, 8), (2, 2, 6, 8), (5, 6), True),
    "one query head": ((1, 1, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), (5, 6), False),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8), None, False),
}


@pytest.mark.parametrize("frame", FRAMES)
def test_every_rank_and_broadcast_has_its_gradients(frame):
    *shapes, mask, enable_gqa = FRAMES[frame]
    inputs = [tensor(*shape, dtype=F64, seed=seed) for seed, shape in enumerate(shapes)] + ([] if mask is None else [tensor(*mask, dtype=F64)])
    run = lambda *t: sdpa(*t, enable_gqa=enable_gqa)  # noqa: E731
    d_o = tensor(*run(*inputs).shape, dtype=F64, seed=5)
    with sdpa_kernel([SDPBackend.MATH]):
        own = gradients(run, inputs, d_o)
    with served():
        got = gradients(run, inputs, d_o)
    for one, wanted in zip(got, own):
        torch.testing.assert_close(one, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 4, 300, 32), (300, 32)], ids=["one batch entry", "of a lower rank"])
def test_what_is_broadcast_in_half_precision_is_summed_without_copies_and_on_any_number_of_threads(shape):
    q, k, v = leaves(tensor(6, 4, 200, 32, dtype=torch.bfloat16), *(tensor(*shape, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)))
    d_o, threads, seen = tensor(6, 4, 200, 32, dtype=torch.bfloat16, seed=3), torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            with rt.backend(), torch.autograd.profiler.profile(use_kineto=False) as profile:
                seen.append(torch.autograd.grad(sdpa(q, k, v), (q, k, v), d_o))
            assert not {event.name for event in profile.function_events} & {"aten::_to_copy", "aten::copy_", "aten::clone"}
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0], other))


def test_only_what_asks_gets_a_gradient():
    inputs = [tensor(2, 2, 9, 8), tensor(2, 2, 11, 8), tensor(2, 2, 11, 8, seed=1), tensor(9, 11)]
    whole = gradients(sdpa_registered, inputs, torch.ones(2, 2, 9, 8))
    for asking in range(1, 16):
        given = [t.clone().requires_grad_(bool(asking >> n & 1)) for n, t in enumerate(inputs)]
        with served():
            sdpa(*given).sum().backward()
        for t, wanted in zip(given, whole):
            assert torch.equal(t.grad, wanted) if t.requires_grad else t.grad is None


def sdpa_registered(*args, **options):
    with rt.backend():
        return sdpa(*args, **options)


def test_the_forward_keeps_out_and_lse_and_no_more():
    q, k, v = leaves(tensor(2, 2, 9, 8), tensor(2, 2, 11, 8), tensor(2, 2, 11, 8))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = sdpa_registered(q, k, v)
    assert sorted(tuple(t.shape) for t in kept) == [(2, 2, 9), (2, 2, 9, 8), (2, 2, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8)]
    assert {t.data_ptr() for t in (q, k, v, out)} < {t.data_ptr() for t in kept}
    out = sdpa_registered(q, k, v)
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_is_masked_gets_nothing_and_gives_nothing():
    inputs = [tensor(1, 2, 5, 8), tensor(1, 2, 7, 8), tensor(1, 2, 7, 8, seed=1)]
    mask, d_o = seen(5, 7, dead=3), tensor(1, 2, 5, 8, seed=2)
    mask[:, 4] = False
    clean = gradients(lambda *t: sdpa_registered(*t, mask), inputs, d_o)
    for t in inputs[1:]:
        t[:, :, 4] = float("nan")
    inputs[0][:, :, 3] = d_o[:, :, 3] = float("nan")
    dq, dk, dv = gradients(lambda *t: sdpa_registered(*t, mask), inputs, d_o)
    for one, wanted in zip((dq, dk, dv), clean):
        assert torch.equal(one, wanted)
    assert not dq[:, :, 3].any() and not dk[:, :, 4].any() and not dv[:, :, 4].any()


# --- gradcheck -------------------------------------------------------------------------------------------------------------


def test_gradcheck_of_scaled_dot_product_attention():
    q, k, v, mask = leaves(*(tensor(*s, dtype=F64) for s in ((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 3), (2, 1, 5))))
    with rt.backend():
        assert gradcheck(lambda *t: sdpa(*t, enable_gqa=True, scale=0.7), (q, k, v, mask))
        assert gradcheck(lambda *t: sdpa(*t, is_causal=True, enable_gqa=True), (q, k, v), check_batched_grad=True)


def test_gradcheck_of_rapt_attention_with_its_lse():
    q, k, v, mask, sinks = leaves(*(tensor(*s, dtype=F64) for s in ((1, 2, 4, 4), (1, 1, 5, 4), (1, 1, 5, 3), (2, 4, 5), (2,))))
    options = {"causal": "bottom_right", "softcap": 2.0, "window": (2, None), "return_lse": True}
    run = lambda q, k, v, mask, sinks: rapt.attention(q, k, v, mask=mask, sinks=sinks, **options)  # noqa: E731
    assert gradcheck(run, (q, k, v, mask, sinks))
    slopes = tensor(2, dtype=F64).abs()
    other = lambda q, k, v: rapt.attention(q, k, v, layout="bshd", alibi_slopes=slopes, scale=0.3, causal=True)  # noqa: E731
    assert gradcheck(other, leaves(*(t.transpose(1, 2) for t in (q, k, v))))


# --- routes ----------------------------------------------------------------------------------------------------------------


def _transformers(q, k, v):
    from rapt.torch._transformers import attention_forward

    return attention_forward(torch.nn.Identity(), q, k, v, None, is_causal=True)[0].transpose(1, 2)


ROUTES = {
    "backend": lambda q, k, v: sdpa_registered(q, k, v, is_causal=True),
    "rapt.scaled_dot_product_attention": lambda q, k, v: rapt.scaled_dot_product_attention(q, k, v, is_causal=True),
    "rapt.attention": lambda q, k, v: rapt.attention(q, k, v, causal=True),
    "rapt.attention, lse": lambda q, k, v: rapt.attention(q, k, v, causal=True, return_lse=True)[0],
    "torch.ops.rapt.scaled_dot_product_attention": lambda q, k, v: torch.ops.rapt.scaled_dot_product_attention(q, k, v, None, True),
    "torch.ops.rapt.attention": lambda q, k, v: torch.ops.rapt.attention(q, k, v, causal="top_left"),
    "torch.ops.rapt.attention_lse": lambda q, k, v: torch.ops.rapt.attention_lse(q, k, v, causal="top_left")[0],
    "transformers": _transformers,
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_has_the_same_gradients_and_counts_one_call(route):
    inputs, d_o = [tensor(2, 2, 9, 8, seed=seed) for seed in range(3)], tensor(2, 2, 9, 8, seed=3)
    wanted = gradients(ROUTES["backend"], inputs, d_o)
    rt.reset_stats()
    got = gradients(ROUTES[route], inputs, d_o)
    assert rt.stats() == {"served": 1, "fallback": {}}
    assert all(map(torch.equal, got, wanted))


def test_softcap_sinks_and_windows_of_transformers_have_gradients():
    from rapt.torch._transformers import attention_forward

    q, k, v, sinks = leaves(tensor(1, 4, 9, 8), tensor(1, 2, 9, 8), tensor(1, 2, 9, 8, seed=1), tensor(4))
    rt.reset_stats()
    out, _ = attention_forward(torch.nn.Identity(), q, k, v, None, is_causal=True, sliding_window=4, softcap=3.0, s_aux=sinks)
    d_o = tensor(*out.shape, seed=5)
    got = torch.autograd.grad(out, (q, k, v, sinks), d_o)
    assert rt.stats() == {"served": 1, "fallback": {}}
    options = {"causal": "top_left", "window": (3, 0), "softcap": 3.0, "sinks": sinks.detach().double()}
    *expected, _, d_sinks = _reference.gradients(d_o.double().transpose(1, 2), *(t.detach().double() for t in (q, k, v)), **options)
    for one, wanted in zip(got, (*expected, d_sinks)):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-5)


def test_numpy_and_torch_have_attention_backward():
    q, k, v, mask, sinks = (tensor(*s, dtype=F64) for s in ((1, 4, 5, 8), (1, 2, 6, 8), (1, 2, 6, 3), (4, 1, 6), (4,)))
    d_o, d_lse = tensor(1, 4, 5, 3, dtype=F64), tensor(1, 4, 5, dtype=F64)
    options = {"mask": mask, "sinks": sinks, "softcap": 2.0}
    expected = _reference.gradients(d_o, q, k, v, d_lse=d_lse, **options)
    for of in (lambda t: t, lambda t: t.numpy()):
        given = {name: of(value) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        out, lse = rapt.attention(of(q), of(k), of(v), **given, return_lse=True)
        made = rapt.attention_backward(of(d_o), of(q), of(k), of(v), out, lse, d_lse=of(d_lse), mask_grad=True, **given)
        assert made._fields == ("dq", "dk", "dv", "d_mask", "d_sinks")
        for one, wanted in zip(made, expected):
            assert type(one) is type(out)
            torch.testing.assert_close(torch.as_tensor(one), wanted, rtol=1e-12, atol=1e-12)
    written = rapt.attention(q, k, v, return_lse=True)
    assert rapt.attention_backward(d_o, q, k, v, *written)._fields == ("dq", "dk", "dv")
    with pytest.raises(rapt.OptionError, match="mask_grad"):
        rapt.attention_backward(d_o, q, k, v, *written, mask_grad=True)


# --- what has no gradient ----------------------------------------------------------------------------------------------------


def test_a_second_differentiation_is_refused_and_names_the_math_path():
    q, k, v = leaves(*(tensor(1, 2, 5, 8, seed=seed) for seed in range(3)))
    for route in ("backend", "rapt.attention", "torch.ops.rapt.scaled_dot_product_attention"):
        (dq,) = torch.autograd.grad(ROUTES[route](q, k, v).square().sum(), q, create_graph=True)
        assert dq.requires_grad
        with pytest.raises(rapt.UnsupportedError, match=r"sdpa_kernel\(torch\.nn\.attention\.SDPBackend\.MATH\)"):
            dq.sum().backward()
    rt.reset_stats()
    with rt.backend(), sdpa_kernel(SDPBackend.MATH):
        (dq,) = torch.autograd.grad(sdpa(q, k, v).square().sum(), q, create_graph=True)
        dq.sum().backward()
    assert rt.stats() == {"served": 0, "fallback": {"sdpa_kernel([MATH])": 1}} and k.grad.isfinite().all()


def test_what_keeps_no_graph_is_refused_by_name():
    q, k, v = leaves(tensor(1, 2, 5, 8)) + [tensor(1, 2, 6, 8), tensor(1, 2, 6, 8)]
    out, lse = torch.empty(1, 2, 5, 8), torch.empty(1, 2, 5)
    refused = {
        "out": lambda: rapt.attention(q, k, v, out=out),
        "alibi_slopes": lambda: rapt.attention(q, k, v, alibi_slopes=torch.ones(2, requires_grad=True)),
        "tolerance": lambda: rapt.attention(q, k, v, tolerance=0.1),
        "device": lambda: rapt.attention(q, k, v, device="cpu"),
        "codes": lambda: rapt.attention(q, rapt.quantize(k, "int8"), v),
        "no backward": lambda: rapt.Context(1).attention(q, k, v),
        "an input": lambda: torch.ops.rapt.attention_into(q, k, v, out, lse),
        "q requires grad": lambda: rapt.attention_backward(out, q, k, v, out, lse),
    }
    for name, call in refused.items():
        with pytest.raises(rapt.UnsupportedError, match=name):
            call()
        with torch.no_grad():
            if name not in ("codes", "tolerance"):
                call()


# --- transforms --------------------------------------------------------------------------------------------------------------


def test_transforms_of_functions_are_right_whoever_computes():
    q, k, v = (tensor(2, 2, 5, 8, seed=seed) for seed in range(3))
    loss = lambda q: sdpa(q, k, v).square().sum()  # noqa: E731
    own = torch.func.grad(loss)(q)
    with served(0, functorch_transform=1):
        torch.testing.assert_close(torch.func.grad(loss)(q), own)
    each = torch.stack([sdpa(*(t[n] for t in (q, k, v))) for n in range(2)])
    with rt.backend():
        torch.testing.assert_close(torch.vmap(lambda *t: sdpa(*t))(q, k, v), each)
        leaf = q.clone().requires_grad_()
        torch.vmap(lambda *t: sdpa(*t).square().sum())(leaf, k, v).sum().backward()
    torch.testing.assert_close(leaf.grad, own)


def test_many_gradients_at_once():
    q, k, v = leaves(*(tensor(1, 2, 5, 8, seed=seed) for seed in range(3)))
    with served():
        out = sdpa(q, k, v)
    many = torch.stack([tensor(1, 2, 5, 8, seed=seed) for seed in range(3)])
    wanted = torch.stack([torch.autograd.grad(out, q, one, retain_graph=True)[0] for one in many])
    assert torch.equal(torch.autograd.grad(out, q, many, retain_graph=True, is_grads_batched=True)[0], wanted)
    assert torch.equal(torch.vmap(lambda one: torch.autograd.grad(out, q, one, retain_graph=True)[0])(many), wanted)


def test_forward_mode_falls_back():
    q, k, v = (tensor(1, 2, 5, 8, seed=seed) for seed in range(3))
    with served(0, **{"forward-mode AD": 1}), forward_ad.dual_level(), sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        dual = forward_ad.make_dual(q.requires_grad_(), torch.ones_like(q))
        # v of another head_dim: PyTorch's math path, which has tangents.
        assert forward_ad.unpack_dual(sdpa(dual, k, v[..., :3])).tangent is not None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    inputs = [tensor(1, 2, 9, 8, seed=seed) for seed in range(3)]
    wanted = gradients(ROUTES["backend"], inputs, torch.ones(1, 2, 9, 8))
    given = leaves(*inputs)
    with served(2):  # the backward computes the forward again
        run = lambda *t: sdpa(*t, is_causal=True)  # noqa: E731
        torch.utils.checkpoint.checkpoint(run, *given, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(t.grad, one) for t, one in zip(given, wanted))


@pytest.mark.parametrize("route", ["backend", "transformers"])
def test_autocast_casts_as_pytorch_does(route):
    inputs, d_o = [tensor(2, 2, 9, 8, seed=seed) for seed in range(3)], tensor(2, 2, 9, 8, seed=3)
    low = [t.bfloat16() for t in inputs]
    wanted = gradients(ROUTES["backend"], low, d_o.bfloat16())
    rt.reset_stats()
    given = leaves(inputs[0], low[1], inputs[2])
    with torch.autocast("cpu", torch.bfloat16):
        out = ROUTES[route](*given)
    assert out.dtype == torch.bfloat16 and rt.stats() == {"served": 1, "fallback": {}}
    got = torch.autograd.grad(out, given, d_o.bfloat16())
    assert [one.dtype for one in got] == [t.dtype for t in given]
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(got, wanted))


# --- compiled ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_training_step_carries_both_passes(dynamic):
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    inputs = [tensor(2, 4, 9, 8), tensor(2, 2, 9, 8), tensor(2, 2, 9, 8, seed=1)]
    step = lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True).square()  # noqa: E731
    with rt.backend():
        wanted = gradients(step, inputs, torch.ones(2, 4, 9, 8))
    torch._dynamo.reset()
    backend = AotEagerAndRecordGraphs()
    with served():
        got = gradients(torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend), inputs, torch.ones(2, 4, 9, 8))
    assert all(map(torch.equal, got, wanted))
    nodes = [[str(n.target) for n in graphs[0].graph.nodes if "rapt" in str(n.target)] for graphs in (backend.fw_graphs, backend.bw_graphs)]
    assert nodes == [[f"rapt.scaled_dot_product_attention_{name}.default"] for name in ("lse", "backward")]


def test_a_compiled_step_of_rapt_attention():
    q, k, v, mask, sinks = inputs = [tensor(*s) for s in ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), (9, 9), (4,))]

    def step(q, k, v, mask, sinks):
        out, lse = rapt.attention(q, k, v, mask=mask, sinks=sinks, causal=True, softcap=3.0, window=(5, None), return_lse=True)
        return out.square().sum() + lse.sum()

    wanted = gradients(step, inputs, None)
    torch._dynamo.reset()
    rt.reset_stats()
    got = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), inputs, None)
    assert rt.stats() == {"served": 1, "fallback": {}}
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["attention", "scaled_dot_product_attention"])
def test_backward_ops_fit_their_fake_kernels(name):
    q, k, v = bshd(2, 4, 9, 8), tensor(2, 2, 9, 8), tensor(1, 2, 9, 8)
    if name == "attention":
        v = tensor(2, 2, 9, 8)
        out, lse = torch.ops.rapt.attention_lse(q, k, v)
        arguments, options = (out, lse, q, k, v, out, lse, [True, False, True, False, False]), {"causal": "top_left"}
    else:
        out, lse = torch.ops.rapt.scaled_dot_product_attention_lse(q, k, v, enable_gqa=True)
        arguments, options = (out, None, q, k, v, None, out, lse, [True, False, True, False], False), {"enable_gqa": True}
    op = getattr(torch.ops.rapt, f"{name}_backward").default
    torch.library.opcheck(op, arguments, options, test_utils=("test_schema", "test_faketensor"))
    assert len(op(*arguments, **options)) == 2


# --- two processes -----------------------------------------------------------------------------------------------------------

DDP = """
import sys, torch, rapt.torch
import torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.manual_seed(0)
layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
x = torch.randn(4, 7, 16)
def loss(module, x):
    return module(x, x, x, need_weights=False)[0].square().mean()
with rapt.torch.backend():
    loss(layer, x).backward()
    alone = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    rapt.torch.reset_stats()
    model = torch.nn.parallel.DistributedDataParallel(layer)
    loss(model, x[2 * rank : 2 * rank + 2]).backward()
assert rapt.torch.stats() == {"served": 1, "fallback": {}}, rapt.torch.stats()
for p, one in zip(layer.parameters(), alone):
    torch.testing.assert_close(p.grad, one)
dist.destroy_process_group()
print("same")
"""


def test_two_processes_have_the_gradients_of_one(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(rapt.__file__).parents[1])}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", DDP, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    for run in runs:
        out, error = run.communicate(timeout=120)
        assert run.returncode == 0 and out.split()[-1:] == ["same"], error
