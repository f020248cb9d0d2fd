"""Ordinary training calls on the GPU: PyTorch's own node, both passes Rapt's, the bits of the node that Rapt makes for whatever else."""

import gc

import pytest
import torch
import torch.nn.functional as F
from gpu_reference import name_of

import rapt
import rapt.torch as rt
from rapt import _native
from rapt.torch import _autograd
from rapt.torch._flash import TAKES_FLASH

pytestmark = pytest.mark.skipif(not TAKES_FLASH, reason="this torch has no way back to its own flash kernel")

sdpa = F.scaled_dot_product_attention
THEIRS = "ScaledDotProductFlashAttentionForCpuBackward0"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def new(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def leaves(*shapes, dtype):
    return [new(*shape, dtype=dtype, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def dead_row(q_len, kv_len):
    mask = new(1, 1, q_len, kv_len, seed=7) > -0.5
    mask[..., 3, :] = False
    return mask


RECORDED = {
    "plain": (((2, 3, 70, 64), (2, 3, 130, 64), (2, 3, 130, 64)), lambda dt: {}),
    "causal, scaled": (((2, 3, 130, 128),) * 3, lambda dt: {"is_causal": True, "scale": 0.3}),
    "groups": (((1, 4, 70, 64), (1, 2, 130, 64), (1, 2, 130, 64)), lambda dt: {"enable_gqa": True}),
    "booleans, a row of them dead": (((2, 3, 70, 64), (2, 3, 130, 64), (2, 3, 130, 64)), lambda dt: {"attn_mask": dead_row(70, 130)}),
    "biases": (((2, 3, 70, 64), (2, 3, 130, 64), (2, 3, 130, 64)), lambda dt: {"attn_mask": new(2, 1, 70, 130, dtype=dt, seed=8)}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", RECORDED)
def test_both_nodes_give_the_same_bits(case, dtype):
    shapes, options = RECORDED[case]
    given, options = leaves(*shapes, dtype=dtype), options(dtype)
    rt.reset_stats()
    with rt.backend():
        out = sdpa(*given, **options)
        assert out.grad_fn.name() == THEIRS and "rapt" in out.grad_fn.metadata
        with torch.no_grad():
            assert torch.equal(out, sdpa(*given, **options))
    assert rt.stats() == {"served": 2, "fallback": {}}
    words = {"attn_mask": None, "is_causal": False, "scale": None, "enable_gqa": False} | options
    own = _autograd.sdpa(*given, words["attn_mask"], words["is_causal"], words["scale"], words["enable_gqa"], "bshd")
    assert torch.equal(own, out)
    side = torch.cuda.Stream()
    for d_o in (new(*out.shape, dtype=dtype, seed=5), new(1, 1, 1, 1, dtype=dtype).expand(out.shape)):
        wanted = torch.autograd.grad(own, given, d_o, retain_graph=True)
        got = torch.autograd.grad(out, given, d_o, retain_graph=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            aside = torch.autograd.grad(out, given, d_o, retain_graph=True)
        torch.cuda.current_stream().wait_stream(side)
        for one, other, another in zip(got, wanted, aside):
            assert torch.equal(one, other) and torch.equal(another, other) and one.stride() == other.stride()


def test_what_it_has_no_gradient_of_is_rapts_own_node():
    q, k, v = leaves(*((2, 2, 70, 64),) * 3, dtype=torch.bfloat16)
    calls = {
        "of q alone": lambda: sdpa(q, k.detach(), v.detach()),
        "by the mask": lambda: sdpa(q, k, v, new(1, 1, 70, 70).requires_grad_()),
        "dropout": lambda: sdpa(q, k, v, dropout_p=0.5),
        "one batch of keys": lambda: sdpa(q, k[:1], v[:1]),
    }
    for name, call in calls.items():
        with rt.backend():
            out = call()
        assert out.grad_fn.name() == "_NodeBackward", name
        out.sum().backward()
    assert q.grad.isfinite().all()


def test_a_second_differentiation_names_the_math_path_and_many_gradients_are_one_by_one():
    given = leaves(*((1, 2, 70, 64),) * 3, dtype=torch.bfloat16)
    with rt.backend():
        out = sdpa(*given)
    (dq,) = torch.autograd.grad(out.square().sum(), given[0], create_graph=True)
    with pytest.raises(rapt.UnsupportedError, match="SDPBackend.MATH"):
        dq.sum().backward()
    with rt.backend():
        out = sdpa(*given)
    many = torch.stack([new(1, 2, 70, 64, seed=seed) for seed in range(3)])
    wanted = torch.stack([torch.autograd.grad(out, given[0], one, retain_graph=True)[0] for one in many])
    assert torch.equal(torch.autograd.grad(out, given[0], many, is_grads_batched=True)[0], wanted)


def test_gradients_are_rapts_behind_the_last_registration():
    gc.collect()
    others = _native.torch_nodes()
    given, d_o = leaves(*((1, 2, 70, 64),) * 3, dtype=torch.bfloat16), new(1, 2, 70, 64, seed=4)
    with rt.backend():
        out = sdpa(*given)
        wanted = torch.autograd.grad(out, given, d_o, retain_graph=True)
    for _ in range(40):
        torch.autograd.grad(sdpa(*given), given, d_o)
    assert all(map(torch.equal, torch.autograd.grad(out, given, d_o), wanted))
    del out
    assert _native.torch_nodes() == others


def test_the_op_of_the_cpu_is_no_way_to_compute_here():
    q, k, v = (new(1, 2, 70, 64) for _ in range(3))
    with rt.backend(), pytest.raises(NotImplementedError, match="no kernel for a GPU"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
