""" "RAPT" among PyTorch's flash implementations: entered by import, active only when asked, restored without a trace."""

import pytest

torch = pytest.importorskip("torch")
attention = torch.nn.attention
if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("this torch has no list of flash implementations (2.11 has)", allow_module_level=True)

import fresh  # noqa: E402
import rapt  # noqa: E402
import rapt.torch  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention


def tensors(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


@pytest.fixture
def active():
    attention.activate_flash_attention_impl("RAPT")
    rapt.torch.reset_stats()
    yield
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def served(call):
    rapt.torch.reset_stats()
    out = call()
    return out, rapt.torch.stats()


def test_import_enters_the_name_and_activates_nothing():
    code = (
        "import torch, rapt.torch\n"
        "a = torch.nn.attention\n"
        "assert 'RAPT' in a.list_flash_attention_impls() and a.current_flash_attention_impl() is None\n"
        "q = torch.randn(1, 2, 5, 8)\n"
        "torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "assert rapt.torch.stats() == {'served': 0, 'fallback': {}}\n"
    )
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    assert {"FA4", "RAPT"} <= set(attention.list_flash_attention_impls())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_flash_is_rapts_while_active_and_pytorchs_again_after(dtype, mode):
    q, k, v = tensors(2, 4, 17, 16, dtype=dtype)
    mask = torch.rand(17, 17, generator=torch.Generator().manual_seed(1)) > 0.3
    calls = [lambda: sdpa(q, k, v), lambda: sdpa(q, k, v, is_causal=True), lambda: sdpa(q, k, v, attn_mask=mask)]
    # As a projection gives it: [batch, len, heads, dim] seen as [batch, heads, len, dim].
    wide = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    calls.append(lambda: sdpa(*wide, scale=0.3))
    expected = [lambda: rapt.attention(q, k, v), lambda: rapt.attention(q, k, v, causal=True)]
    expected += [lambda: rapt.attention(q, k, v, mask=mask), lambda: rapt.attention(q, k, v, scale=0.3)]
    with mode():
        stock = [call() for call in calls]
        attention.activate_flash_attention_impl("RAPT")
        try:
            assert attention.current_flash_attention_impl() == "RAPT"
            for call, rapts, was in zip(calls, expected, stock):
                out, stats = served(call)
                assert stats == {"served": 1, "fallback": {}}
                assert torch.equal(out, rapts()) and out.stride() == was.stride()
        finally:
            attention.restore_flash_attention_impl()
        assert attention.current_flash_attention_impl() is None
        for call, was in zip(calls, stock):
            out, stats = served(call)
            assert torch.equal(out, was) and stats == {"served": 0, "fallback": {}}


def test_gradients_are_rapts_and_dropout_and_the_math_path_stay_pytorchs(active):
    q, k, v = tensors(1, 2, 9, 8)
    q.requires_grad_()
    out, stats = served(lambda: sdpa(q, k, v))
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    assert torch.equal(dq, torch.autograd.grad(rapt.attention(q, k, v).square().sum(), q)[0])
    assert stats == {"served": 1, "fallback": {}}
    q = q.detach()
    # Dropout and sdpa_kernel([MATH]) never come to flash.
    for call in (
        lambda: sdpa(q, k, v, dropout_p=0.5),
        lambda: attention.sdpa_kernel(attention.SDPBackend.MATH)(sdpa)(q, k, v),
        lambda: sdpa(q, k, v[..., :4]),
    ):
        _, stats = served(call)
        assert stats == {"served": 0, "fallback": {}}
    only_flash = attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION)(sdpa)
    _, stats = served(lambda: only_flash(q, k, v))
    assert stats == {"served": 1, "fallback": {}}


def test_a_row_without_keys_is_zero_and_its_lse_as_pytorchs(active):
    q, k, v = tensors(1, 2, 3, 8)
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
    attention.restore_flash_attention_impl()
    mask = torch.zeros(3, 3).masked_fill(~mask, -torch.inf)
    _, stock = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
    assert (out[:, :, 1] == 0).all() and torch.allclose(lse, stock, atol=1e-5) and lse.stride() == stock.stride()


def test_compiled_graphs_follow_what_is_active():
    q, k, v = tensors(1, 2, 33, 16)
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v) + 1, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        stock = compiled(q, k, v)
        attention.activate_flash_attention_impl("RAPT")
        try:
            out, stats = served(lambda: compiled(q, k, v))
            assert stats == {"served": 1, "fallback": {}}
            assert torch.equal(out, rapt.attention(q, k, v) + 1)
        finally:
            attention.restore_flash_attention_impl()
        out, stats = served(lambda: compiled(q, k, v))
        assert torch.equal(out, stock) and stats["served"] == 0


def test_it_and_the_backend_share_the_op_in_any_order():
    q, k, v = tensors(1, 2, 9, 8)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    stock = op(q, k, v)[0]
    rapts = rapt.attention(q, k, v)

    def check(flash, backend):
        out, stats = served(lambda: op(q, k, v)[0])
        assert stats["served"] == flash and torch.equal(out, rapts if flash else stock)
        out, stats = served(lambda: sdpa(q, k, v))
        assert stats == {"served": backend, "fallback": {}}

    for first in ("registry", "backend"):
        with rapt.torch.backend():
            check(1, 1)
            attention.activate_flash_attention_impl("RAPT")
            check(1, 1)
            if first == "registry":
                attention.restore_flash_attention_impl()
                check(1, 1)
            # Refused by the backend: counted once, though PyTorch's own ends in the op that Rapt holds.
            leaf = q.clone().requires_grad_()
            _, stats = served(lambda: torch.func.grad(lambda q: sdpa(q, k, v).sum())(leaf))
            assert stats == {"served": 0, "fallback": {"functorch transform": 1}}
        if first == "backend":
            check(1, 1)
            attention.restore_flash_attention_impl()
        check(0, 0)


def test_activating_twice_or_another_leaves_one(active):
    q, k, v = tensors(1, 2, 9, 8)
    attention.activate_flash_attention_impl("RAPT")
    _, stats = served(lambda: sdpa(q, k, v))
    assert stats["served"] == 1
    with pytest.raises(Exception):
        attention.activate_flash_attention_impl("no such implementation")
    # PyTorch restores before it looks the name up.
    _, stats = served(lambda: sdpa(q, k, v))
    assert attention.current_flash_attention_impl() is None and stats["served"] == 0


def test_a_first_call_loads_little():
    code = (
        "import sys, torch, rapt\n"
        "q = torch.randn(1, 2, 5, 8)\n"
        "before = set(sys.modules)\n"
        "rapt.attention(q, q, q)\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= {'rapt'} | set(sys.stdlib_module_names) | {'torch'}, new\n"
        "assert 'triton' not in sys.modules and 'torch.utils.flop_counter' not in sys.modules\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    torch.ops.rapt.scaled_dot_product_attention(q, q, q)\n"
        "assert counter.get_total_flops() == 2 * 2 * 5 * 5 * 16, counter.get_total_flops()\n"
    )
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
