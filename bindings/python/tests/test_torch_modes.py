"""Grad mode, inference mode, dropout, sdpa_kernel, autocast, transforms, modules, threads: who computes, and is it right."""

import threading

import pytest

torch = pytest.importorskip("torch")

import rapt.torch as rt  # noqa: E402
from test_torch_stats import DTYPES, check, same_views, sdpa, served, stock, tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402


def qkv(dtype=torch.float32):
    return tensor(2, 4, 6, 8, dtype=dtype), tensor(2, 4, 5, 8, dtype=dtype), tensor(2, 4, 5, 8, dtype=dtype, seed=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes(mode, dtype):
    q, k, v = qkv(dtype)
    with served(3), mode():
        out = sdpa(q, k, v)
        inside = sdpa(*(t.clone() for t in (q, k, v)))  # inference tensors in inference mode
        math_path = sdpa(q.clone(), k.clone(), v[..., :3].clone())
        assert inside.is_inference() == (mode is torch.inference_mode)
        assert not out.requires_grad
    check(out.clone(), q, k, v)
    assert torch.equal(out, inside)
    check(math_path.clone(), q, k, v[..., :3])


@pytest.mark.parametrize("which", ["query", "key", "value", "mask"])
def test_where_a_gradient_is_needed_it_is_given(which):
    q, k, v = qkv()
    mask = tensor(6, 5)
    leaf = {"query": q, "key": k, "value": v, "mask": mask}[which].requires_grad_()
    sdpa(q, k, v, mask).square().sum().backward()
    expected, leaf.grad = leaf.grad, None
    with served():
        out = sdpa(q, k, v, mask)
        assert out.requires_grad
        out.square().sum().backward()
    torch.testing.assert_close(leaf.grad, expected)
    with served(2):
        with torch.no_grad():
            out = sdpa(q, k, v, mask)
        with torch.inference_mode():
            sdpa(q, k, v, mask)
    check(out, q, k, v, mask.detach())


def test_a_parameter_under_no_grad_is_served():
    q, k, v = qkv()
    with served(), torch.no_grad():
        out = sdpa(torch.nn.Parameter(q), k, v)
    check(out, q, k, v)


def test_a_dropout_that_is_no_probability_is_pytorchs_matter():
    q, k, v = qkv()
    own = stock(q, k, v, dropout_p=1.5)
    with served(0, dropout=1), pytest.raises(type(own)) as got:
        sdpa(q, k, v, dropout_p=1.5)
    assert str(got.value) == str(own)


def test_sdpa_kernel_is_obeyed():
    q, k, v = qkv()
    with sdpa_kernel([SDPBackend.MATH]):
        own = stock(q, k, v)
        rt.reset_stats()
        with rt.backend():
            out = sdpa(q, k, v)
        assert rt.stats() == {"served": 0, "fallback": {"sdpa_kernel([MATH])": 1}}
    assert torch.equal(out, own)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), served():
        out = sdpa(q, k, v)
    check(out, q, k, v)


def test_sdpa_kernel_flash_alone_refuses_what_flash_refuses():
    q, k, v = qkv()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        own = stock(q, k, v[..., :3])
        with served(0, kernel_not_allowed=1), pytest.raises(type(own)) as got:
            sdpa(q, k, v[..., :3])
    assert str(got.value) == str(own)


def test_a_scale_that_is_not_finite_is_pytorchs_matter():
    q, k, v = qkv()
    own = stock(q, k, v, scale=float("nan"))
    with served(0, scale_not_finite=1):
        out = sdpa(q, k, v, scale=float("nan"))
    torch.testing.assert_close(out, own, rtol=0, atol=0, equal_nan=True)


def test_autocast_gives_its_dtype():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        own = stock(q, k, v)
        with served():
            out = sdpa(q, k, v)
    assert out.dtype == own.dtype == torch.bfloat16
    check(out, *(t.bfloat16() for t in (q, k, v)))


def test_a_lazy_negation_is_not_read_past():
    q, k, v = qkv()
    own = stock(torch._neg_view(q), k, v)
    with served(0, lazy_negation=1):
        out = sdpa(torch._neg_view(q), k, v)
    assert torch.equal(out, own)


def test_vmap():
    q, k, v = qkv()
    q, k, v = q.expand(3, *q.shape), k.expand(3, *k.shape), v.expand(3, *v.shape)
    own = torch.func.vmap(sdpa)(q, k, v)
    rt.reset_stats()
    with rt.backend():
        out = torch.func.vmap(sdpa)(q, k, v)
    # vmap decomposes the op above every kernel of ours and ends at flash, once per sample; torch < 2.9 keeps its own there.
    assert rt.stats() == {"served": 3 if hasattr(torch.library, "get_kernel") else 0, "fallback": {}}
    torch.testing.assert_close(out, own)


def test_func_grad_is_pytorchs_own():
    q, k, v = qkv()

    def loss(q):
        return sdpa(q, k, v).square().sum()

    own = torch.func.grad(loss)(q)
    with served(0, functorch_transform=1):
        out = torch.func.grad(loss)(q)
    assert torch.equal(out, own)


def test_forward_mode_is_never_dropped():
    q, k, v = qkv()
    tangent = tensor(2, 4, 6, 8, seed=5)
    with sdpa_kernel([SDPBackend.MATH]), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        own = torch.autograd.forward_ad.unpack_dual(sdpa(dual, k, v)).tangent
        rt.reset_stats()
        with rt.backend():
            got = torch.autograd.forward_ad.unpack_dual(sdpa(dual, k, v)).tangent
    assert rt.stats() == {"served": 0, "fallback": {"forward-mode AD": 1}}
    assert torch.equal(got, own)


def test_a_subclass_with_its_own_dispatch_is_pytorchs_matter():
    from torch.testing._internal.two_tensor import TwoTensor

    q, k, v = qkv()
    rt.reset_stats()
    with rt.backend(), torch.no_grad():
        out = sdpa(TwoTensor(q, q.clone()), TwoTensor(k, k.clone()), TwoTensor(v, v.clone()))
    assert rt.stats()["fallback"] == {"tensor subclass TwoTensor": 1}
    assert type(out) is TwoTensor
    check(out.a, q, k, v)


def test_a_subclass_without_is_served():
    class Named(torch.Tensor):
        pass

    q, k, v = qkv()
    with served():
        out = sdpa(q.as_subclass(Named), k, v)
    assert type(out) is Named
    check(out.as_subclass(torch.Tensor), q, k, v)


def test_fake_tensors_are_not_counted():
    from torch._subclasses import FakeTensorMode

    q, k, v = qkv()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with served(0), mode(), FakeTensorMode() as fake:
            out = sdpa(fake.from_tensor(q), fake.from_tensor(k), fake.from_tensor(v))
        same_views(out, stock(q, k, v))
    with served(0):
        assert sdpa(*(t.to("meta") for t in (q, k, v))).device.type == "meta"


def test_flop_counter():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = qkv()
    with FlopCounterMode(display=False) as own:
        sdpa(q, k, v)
    with served(), FlopCounterMode(display=False) as counter:
        out = sdpa(q, k, v)
    assert counter.get_total_flops() == 2 * (2 * 4 * 6 * 5) * (8 + 8)
    assert own.get_total_flops() in (0, counter.get_total_flops())  # torch 2.6 knows no CPU flash
    check(out, q, k, v)


def test_jit_trace():
    q, k, v = qkv()
    traced = torch.jit.trace(lambda q, k, v: sdpa(q, k, v), (q, k, v), check_trace=False)
    with served():
        out = traced(q, k, v)
    check(out, q, k, v)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_multihead_attention(mode):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = tensor(2, 7, 32)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    with mode():
        own = module(x, x, x, need_weights=False)[0], module(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        with served(2):
            got = module(x, x, x, need_weights=False)[0], module(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    for a, b in zip(got, own):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_transformer_encoder(mode):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = tensor(2, 7, 32)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    with mode():
        own = encoder(x), encoder(x, src_key_padding_mask=padding)
        with served(6):
            got = encoder(x), encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[0], own[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1][~padding], own[1][~padding], rtol=1e-5, atol=1e-5)


def test_a_training_step_of_an_encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    x = tensor(2, 7, 32)
    layer(x).square().sum().backward()
    own = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    with served():
        layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, own[name], rtol=1e-4, atol=1e-4, msg=name)


def test_eight_threads_at_once():
    cases = [[tensor(2, 4, 30 + i, 16, seed=10 * i + j) for j in range(3)] for i in range(8)]
    rounds, errors = 40, []
    results = [None] * 8
    barrier = threading.Barrier(8)

    def work(i):
        try:
            barrier.wait()
            with torch.no_grad():
                first = sdpa(*cases[i])
                for _ in range(rounds - 1):
                    if not torch.equal(sdpa(*cases[i]), first):
                        errors.append(f"thread {i}: other bits")
            results[i] = first
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    with served(8 * rounds):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert not errors
    for case, out in zip(cases, results):
        check(out, *case)
