"""Registration: counted, process-wide, undone without a trace, never active on import."""

import os
import subprocess
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import fresh  # noqa: E402
import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from test_torch_stats import check, sdpa, served, tensor  # noqa: E402


def run(code):
    """`code` in a fresh process; what it prints."""
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_registers_are_counted():
    q = tensor(1, 2, 5, 8)
    assert not rt.is_registered()
    rt.reset_stats()
    rt.register_backend()
    rt.register_backend()
    with rt.backend():
        sdpa(q, q, q)
    rt.unregister_backend()
    assert rt.is_registered()
    out = sdpa(q, q, q)
    rt.unregister_backend()
    assert not rt.is_registered()
    sdpa(q, q, q)
    rt.unregister_backend()  # one more does nothing
    assert not rt.is_registered()
    assert rt.stats() == {"served": 2, "fallback": {}}
    check(out, q, q, q)
    with served():
        sdpa(q, q, q)


def test_backend_unregisters_after_an_error():
    with pytest.raises(ZeroDivisionError), rt.backend():
        1 / 0
    assert not rt.is_registered()


def drain(q, k, v):
    """Calls until idle kernels have taken themselves out."""
    for _ in range(16):
        sdpa(q, k, v)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)


def entered_kernels(monkeypatch):
    """How many kernels a hundred pairs of entering and leaving put into the dispatcher, once they are in it."""
    entered = []
    impl = torch.library.Library.impl
    with rt.backend():
        pass
    with monkeypatch.context() as patch:
        patch.setattr(torch.library.Library, "impl", lambda *a, **options: (entered.append(a[1]), impl(*a, **options)))
        for _ in range(100):
            with rt.backend():
                pass
    return entered


def test_entering_and_leaving_leaves_the_dispatcher_alone(monkeypatch):
    # That took 0.2 ms a pair; docs/reference/pytorch.md has what one takes, measured alone on a machine.
    assert entered_kernels(monkeypatch) == []
    q = tensor(1, 2, 5, 8)
    compiled = torch.compile(lambda q: sdpa(q, q, q) + 1.0, backend="eager")
    with torch.no_grad():
        compiled(q)
        with served():
            compiled(q)
    assert entered_kernels(monkeypatch) == []


HAS_TAG = hasattr(getattr(torch.compiler, "config", None), "cache_key_tag")
TAGS = """
import threading
import torch
import rapt.torch as rt

def tags():
    seen = [torch.compiler.config.cache_key_tag]
    thread = threading.Thread(target=lambda: seen.append(torch.compiler.config.cache_key_tag))
    thread.start()
    thread.join()
    return seen

before = tags()
with rt.backend():
    inside = tags()
print(before, inside, tags())
"""


@pytest.mark.skipif(not HAS_TAG, reason="torch < 2.7 has no tag for its compile caches")
@pytest.mark.parametrize("own", ["", "mine"])
def test_the_tag_of_compile_caches_reaches_every_thread(own):
    inside = f"{own}+rapt-{rapt.__version__}".lstrip("+")
    # torch reads the variable when it is imported.
    environment = {**os.environ, **({"TORCH_COMPILE_CACHE_KEY_TAG": own} if own else {})}
    start = [sys.executable, "-c", TAGS]
    done = subprocess.run(start, capture_output=True, text=True, env=environment, timeout=300) if own else fresh.run(TAGS)
    assert done.stdout.strip() == f"{[own] * 2} {[inside] * 2} {[own] * 2}", done.stderr


@pytest.mark.skipif(not HAS_TAG, reason="torch < 2.7 has no tag for its compile caches")
def test_a_tag_that_the_user_writes_stays():
    config = torch.compiler.config
    part = f"rapt-{rapt.__version__}"
    with config.patch(cache_key_tag="mine"):
        with rt.backend():
            assert config.cache_key_tag == f"mine+{part}"
        assert config.cache_key_tag == "mine"
    with rt.backend():
        with config.patch(cache_key_tag=f"{config.cache_key_tag}+mine"):
            with rt.backend():
                assert config.cache_key_tag == f"{part}+mine"
            rt.unregister_backend()
            assert config.cache_key_tag == "mine"
            rt.register_backend()
            assert config.cache_key_tag == f"mine+{part}"
        assert config.cache_key_tag == part
    assert config.cache_key_tag == ""


def test_a_warning_of_pytorchs_is_not_the_users(monkeypatch, recwarn):
    # torch 2.11 warns in `Library.impl` of every kernel that stands in another's place.
    impl = torch.library.Library.impl

    def warns(*args, **kwargs):
        warnings.warn("Warning only once for all operators, other operators may also be overridden.", stacklevel=2)
        return impl(*args, **kwargs)

    monkeypatch.setattr(torch.library.Library, "impl", warns)
    q = tensor(1, 2, 5, 8)
    drain(q, q, q)
    with served():
        sdpa(q, q, q)
    assert not recwarn.list


def test_idle_kernels_hand_on_and_take_themselves_out():
    q = tensor(1, 2, 5, 8)
    own = sdpa(q, q, q)
    has = lambda: torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")  # noqa: E731
    with served():
        sdpa(q, q, q)
    rt.reset_stats()
    for _ in range(20):
        assert torch.equal(sdpa(q, q, q), own)
    assert not has() and rt.stats() == {"served": 0, "fallback": {}}
    with served():
        sdpa(q, q, q)
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda q: sdpa(q, q, q), tracing_mode="fake")(q)
    assert not has() and "rapt" not in str(traced.graph)


def test_gradients_through_idle_kernels_are_pytorchs():
    q = tensor(1, 2, 5, 8).requires_grad_()
    sdpa(q, q, q).square().sum().backward()
    own, q.grad = q.grad, None
    with rt.backend():
        pass
    sdpa(q, q, q).square().sum().backward()
    assert torch.equal(q.grad, own)


def test_backend_decorates_a_function():
    q = tensor(1, 2, 5, 8)
    rt.reset_stats()
    rt.backend()(lambda: sdpa(q, q, q))()
    assert rt.stats()["served"] == 1 and not rt.is_registered()


def test_threads_may_register_at_once():
    errors = []

    def work():
        try:
            for _ in range(3):
                with rt.backend():
                    assert rt.is_registered()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors
    assert not rt.is_registered()


def test_afterwards_pytorch_is_bitwise_as_before():
    q, k, v = (tensor(2, 4, 33, 16, seed=i) for i in range(3))
    mask = tensor(33, 33) > -1
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def answers():
        with torch.no_grad():
            yield sdpa(q, k, v)
            yield sdpa(q, k, v, mask)
            yield sdpa(q, k, v[..., :5], is_causal=True)
            yield from flash(q, k, v)
            yield layer(tensor(2, 7, 32))
        leaf = q.clone().requires_grad_()
        sdpa(leaf, k, v).sum().backward()
        yield leaf.grad

    drain(q, k, v)
    keys = [
        (op, key, torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
        for op in ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu")
        for key in ("CPU", "AutogradCPU", "CompositeImplicitAutograd")
    ]
    tag = getattr(getattr(torch.compiler, "config", None), "cache_key_tag", None)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    before = list(answers())
    with served(5):
        assert not torch.backends.mha.get_fastpath_enabled()
        with torch.no_grad():
            sdpa(q, k, v)
            sdpa(q, k, v, mask)
            sdpa(q, k, v[..., :5], is_causal=True)
            layer(tensor(2, 7, 32))
        sdpa(q.clone().requires_grad_(), k, v)
    after = list(answers())
    drain(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert [a.stride() for a in before] == [a.stride() for a in after]
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert getattr(getattr(torch.compiler, "config", None), "cache_key_tag", None) == tag
    for op, key, had in keys:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op, key) == had, (op, key)


def test_a_fast_path_that_was_off_stays_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with rt.backend():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch < 2.9 keeps its flash kernel")
def test_the_flash_op_of_older_graphs():
    q, k, v = (tensor(2, 4, 33, 16, seed=i) for i in range(3))
    mask = torch.zeros(33, 33)
    mask[4] = -torch.inf
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3}):
        own, own_lse = flash(q, k, v, **options)
        with served():
            out, lse = flash(q, k, v, **options)
        assert (out.stride(), lse.stride(), lse.dtype) == (own.stride(), own_lse.stride(), own_lse.dtype)
        torch.testing.assert_close(lse, own_lse, rtol=1e-5, atol=1e-5)
        check(out, q, k, v, options.get("attn_mask"), is_causal="is_causal" in options, scale=options.get("scale"))
    q.requires_grad_()
    (own,) = torch.autograd.grad(flash(q, k, v)[0].square().sum(), q)
    with served():
        (dq,) = torch.autograd.grad(flash(q, k, v)[0].square().sum(), q)
    assert dq.stride() == own.stride()
    torch.testing.assert_close(dq, own, rtol=1e-4, atol=1e-5)


def test_nothing_is_active_on_import():
    assert run(
        "import torch\n"
        "q = torch.randn(1, 2, 5, 8)\n"
        "before = torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "import rapt, rapt.torch\n"
        "assert torch.equal(before, torch.nn.functional.scaled_dot_product_attention(q, q, q))\n"
        "assert torch.backends.mha.get_fastpath_enabled()\n"
        "print(rapt.torch.is_registered(), rapt.torch.stats())"
    ) == "False {'served': 0, 'fallback': {}}"


def test_registering_imports_neither_dynamo_nor_transformers():
    assert run(
        "import sys, torch, rapt.torch\n"
        "had = 'torch._dynamo' in sys.modules\n"
        "rapt.torch.register_backend()\n"
        "print(had == ('torch._dynamo' in sys.modules), 'transformers' in sys.modules)"
    ) == "True False"
