"""Ordinary training calls on the CPU: PyTorch's own node, both passes Rapt's, the bits of the node that Rapt makes for whatever else."""

import gc

import pytest

torch = pytest.importorskip("torch")

import rapt.torch as rt  # noqa: E402
from rapt import _native  # noqa: E402
from rapt.torch import _autograd, _flash  # noqa: E402
from rapt.torch._flash import TAKES_FLASH  # noqa: E402
from test_autograd import bshd, gradients, leaves, seen  # noqa: E402
from test_torch_stats import DTYPES, sdpa, served, tensor  # noqa: E402

pytestmark = pytest.mark.skipif(not TAKES_FLASH, reason="this torch has no way back to its own flash kernel")

THEIRS = "ScaledDotProductFlashAttentionForCpuBackward0"

# Inputs and options that PyTorch's node serves.
RECORDED = {
    "plain": lambda dt: ((tensor(2, 3, 37, 16, dtype=dt), tensor(2, 3, 41, 16, dtype=dt), tensor(2, 3, 41, 16, dtype=dt, seed=1)), {}),
    "strided, causal, scaled": lambda dt: ((bshd(2, 3, 40, 8, dtype=dt), bshd(2, 3, 40, 8, dtype=dt), bshd(2, 3, 40, 8, dtype=dt, seed=1)), {"is_causal": True, "scale": 0.3}),
    "groups": lambda dt: ((tensor(1, 4, 9, 8, dtype=dt), tensor(1, 2, 35, 8, dtype=dt), tensor(1, 2, 35, 8, dtype=dt, seed=1)), {"enable_gqa": True}),
    "other value size": lambda dt: ((tensor(2, 2, 9, 8, dtype=dt), tensor(2, 2, 11, 8, dtype=dt), tensor(2, 2, 11, 5, dtype=dt)), {}),
    "boolean mask, a row of it dead": lambda dt: ((tensor(2, 3, 9, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1)), {"attn_mask": seen(9, 11, dead=4)[None, None]}),
    "additive mask, a row of it dead": lambda dt: ((tensor(2, 3, 9, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1)), {"attn_mask": tensor(2, 1, 9, 11, dtype=dt).masked_fill(~seen(9, 11, dead=2), -torch.inf)}),
    "additive mask": lambda dt: ((tensor(2, 3, 9, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt), tensor(2, 3, 11, 8, dtype=dt, seed=1)), {"attn_mask": tensor(2, 1, 9, 11, dtype=dt)}),
}  # fmt: skip

# What it does not: by Rapt's own node.
OWN = {
    "of q alone": lambda q, k, v: sdpa(q, k.detach(), v.detach()),
    "by the mask": lambda q, k, v: sdpa(q, k, v, tensor(1, 1, 9, 9).requires_grad_()),
    "dropout": lambda q, k, v: sdpa(q, k, v, dropout_p=0.5),
    "rank 3": lambda q, k, v: sdpa(q[0], k[0], v[0]),
    "one batch of keys": lambda q, k, v: sdpa(q, k[:1], v[:1]),
    "a mask of rank 2": lambda q, k, v: sdpa(q, k, v, seen(9, 9)),
}


def by_own_node(d_o, inputs, *, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The gradients of the same request by the node that Rapt makes."""
    run = lambda q, k, v: _autograd.sdpa(q, k, v, attn_mask, is_causal, scale, enable_gqa, "bshd")  # noqa: E731
    return gradients(run, inputs, d_o)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", RECORDED)
def test_both_nodes_give_the_same_bits(case, dtype):
    inputs, options = RECORDED[case](dtype)
    with served(2):
        out = sdpa(*leaves(*inputs), **options)
        assert out.grad_fn.name() == THEIRS
        ways = {"its own": tensor(*out.shape, dtype=dtype, seed=5), "expanded": tensor(1, 1, 1, 1, dtype=dtype).expand(out.shape), "inside out": bshd(*out.shape, dtype=dtype, seed=6)}
        out = sdpa(*(given := leaves(*inputs)), **options)
    for way, d_o in ways.items():
        wanted = by_own_node(d_o, inputs, **options)
        for _ in range(2):  # planned, and found again
            got = torch.autograd.grad(out, given, d_o, retain_graph=True)
            for one, other, of in zip(got, wanted, inputs):
                assert torch.equal(one, other) and (one.dtype, one.stride()) == (of.dtype, torch.empty_like(of).stride()), way


@pytest.mark.parametrize("case", OWN)
def test_what_it_has_no_gradient_of_is_rapts_own_node(case):
    q, k, v = leaves(*(tensor(2, 2, 9, 8, seed=seed) for seed in range(3)))
    with served():
        out = OWN[case](q, k, v)
    assert out.grad_fn.name() == "_NodeBackward"
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_gradients_are_rapts_behind_the_last_registration():
    gc.collect()
    others = _native.torch_nodes()
    inputs = [tensor(1, 2, 9, 8, seed=seed) for seed in range(3)]
    d_o = tensor(1, 2, 9, 8, seed=4)
    options = {"attn_mask": seen(9, 9, dead=3)[None, None]}
    wanted = by_own_node(d_o, inputs, **options)
    with rt.backend():
        out = sdpa(*(given := leaves(*inputs)), **options)
    for _ in range(40):  # idle kernels take themselves out meanwhile, but for those that this node needs
        gradients(sdpa, inputs, d_o)
    assert all(map(torch.equal, torch.autograd.grad(out, given, d_o), wanted))
    assert _native.torch_nodes() == others + 1
    del out
    assert _native.torch_nodes() == others
    for _ in range(40):
        gradients(sdpa, inputs, d_o)
    assert others or not any(op.library for op in _flash._of_cpu)


def test_whoever_packs_a_tensor_for_the_node_may_attend_too():
    inputs = [tensor(1, 2, 9, 8, seed=seed) for seed in range(3)]
    others = leaves(*(tensor(1, 1, 4, 8, seed=seed) for seed in range(3)))
    inner = []

    def pack(kept):
        if not inner:
            inner.append(None)
            with torch.enable_grad():
                inner[0] = sdpa(*others)
        return kept

    with served(2), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = sdpa(*(given := leaves(*inputs)))
    with served(2):
        alone, other = sdpa(*inputs), sdpa(*(t.detach() for t in others))
    assert torch.equal(out, alone) and torch.equal(inner[0], other)
    torch.autograd.backward([out.sum(), inner[0].sum()])
    assert all(t.grad.isfinite().all() for t in (*given, *others))


def test_an_error_while_the_node_is_made_is_the_callers_and_leaves_nothing():
    inputs = leaves(*(tensor(1, 2, 9, 8, seed=seed) for seed in range(3)))

    def pack(_kept):
        raise ValueError("no room")

    with rt.backend():
        with pytest.raises(ValueError, match="no room"), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            sdpa(*inputs)
        again = sdpa(*inputs)
        with torch.no_grad():
            assert torch.equal(again, sdpa(*inputs))


def test_written_inputs_are_noticed():
    q, k, v = leaves(*(tensor(1, 2, 9, 8, seed=seed) for seed in range(3)))
    kept = q * 1
    with rt.backend():
        out = sdpa(kept, k, v)
    kept.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_modes_see_the_backward_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    ops = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ops.append(str(op))
            return op(*args, **(kwargs or {}))

    inputs, d_o = [tensor(1, 2, 9, 8, seed=seed) for seed in range(3)], tensor(1, 2, 9, 8, seed=4)
    with rt.backend():
        out = sdpa(*(given := leaves(*inputs)))
    with Seen():
        got = torch.autograd.grad(out, given, d_o)
    assert "rapt.scaled_dot_product_attention_backward.default" in ops
    assert all(map(torch.equal, got, by_own_node(d_o, inputs)))


def test_a_compiled_backward_has_the_same_bits():
    from torch._dynamo import compiled_autograd

    inputs, d_o = [tensor(1, 2, 9, 8, seed=seed) for seed in range(3)], tensor(1, 2, 9, 8, seed=4)
    with served():
        out = sdpa(*(given := leaves(*inputs)), is_causal=True)
    wanted = by_own_node(d_o, inputs, is_causal=True)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward(d_o)
    assert all(torch.equal(t.grad, one) for t, one in zip(given, wanted))


def test_the_mark_alone_is_an_ordinary_call():
    inputs = [tensor(1, 2, 9, 8, seed=seed) for seed in range(3)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    with served(2):
        out, _lse = flash(*inputs, _native.TORCH_RECORDED)
        assert torch.equal(out, sdpa(*inputs))
