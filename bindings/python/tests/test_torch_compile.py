"""torch.compile and torch.export: the compiled graph carries Rapt's op, the exported one PyTorch's."""

import os

import pytest

torch = pytest.importorskip("torch")

import fresh  # noqa: E402
import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from rapt.flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402
from test_torch_stats import DTYPES, check, same_views, sdpa, served, tensor  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing compiled elsewhere answers here."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask=None):
        return sdpa(q, k, v, attn_mask=mask)


def qkv(dtype=torch.float32, q_len=6):
    return [tensor(2, 4, n, 8, dtype=dtype, seed=i) for i, n in enumerate((q_len, 5, 5))]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend, mode):
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: sdpa(q * 2.0, k, v) + 1.0, fullgraph=True, backend=backend)
    with served(3), mode():
        outs = [compiled(q, k, v) for _ in range(3)]
    for out in outs:
        check(out.clone() - 1.0, q * 2.0, k, v)


@torch.no_grad()
def test_one_graph_serves_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v), fullgraph=True, dynamic=True, backend=counter)
    given = [qkv(q_len=q_len) for q_len in (6, 7, 9, 40)]
    with served(4):
        outs = [compiled(*one) for one in given]
    for out, one in zip(outs, given):
        check(out, *one)
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_graph_is_not_guarded_by_what_is_imported():
    q = qkv()[0]
    rapt.scaled_dot_product_attention(q, q, q)
    names = [guard.name for guard in torch._dynamo.explain(lambda q: rapt.scaled_dot_product_attention(q, q, q))(q).out_guards]
    assert any("rapt" in name for name in names) and not any("modules" in name for name in names), names


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_compile_every_dtype(dtype):
    q, k, v = qkv(dtype)
    mask = tensor(2, 1, 6, 5) > -0.5
    compiled = torch.compile(Attention(), fullgraph=True)
    with served(2), torch.no_grad():
        plain, masked = compiled(q, k, v), compiled(q, k, v, mask)
    check(plain, q, k, v)
    check(masked, q, k, v, mask)


ROUTES = {
    "bshd": lambda: [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv()],
    "inner stride": lambda: [t.transpose(2, 3).contiguous().transpose(2, 3) for t in qkv()],
    "Dv != D": lambda: [*qkv()[:2], qkv()[2][..., :3]],
    "5-D": lambda: [t.expand(3, *t.shape) for t in qkv()],
    "3-D": lambda: [t[0] for t in qkv()],
    "2-D": lambda: [t[0, 0] for t in qkv()],
    "batch broadcast": lambda: [qkv()[0], qkv()[1][:1], qkv()[2][:1]],
    "3-D mask": lambda: [*qkv(), tensor(4, 6, 5) > -0.5],
}


@pytest.mark.parametrize("name", ROUTES)
def test_compile_every_route_with_pytorchs_strides(name):
    arguments = ROUTES[name]()
    own = sdpa(*arguments)
    compiled = torch.compile(Attention(), fullgraph=True)
    with served(1), torch.no_grad():
        out = compiled(*arguments)
    check(out, *arguments)
    same_views(out, own)


def test_a_view_after_attention_compiles():
    q, k, v = (tensor(2, 6, 4, 8, seed=i).transpose(1, 2) for i in range(3))

    def run(q, k, v):
        return sdpa(q, k, v).transpose(1, 2).reshape(2, 6, 32) @ torch.eye(32)

    with served(), torch.no_grad():
        out = torch.compile(run, fullgraph=True)(q, k, v)
    check(out.view(2, 6, 4, 8).transpose(1, 2), q, k, v)


@torch.no_grad()
def test_flash_attentions_interface_is_one_graph():
    def run(q, k, v, rows, at):
        dense = flash_attn_func(q, k, v, causal=True, window_size=(4, -1), softcap=2.0), flash_attn_func(q, k, v, window_size=(2, 3))
        return *dense, flash_attn_varlen_func(rows, rows, rows, at, at, 5, 5, causal=True)

    given = torch.randn(2, 9, 4, 8), *torch.randn(2, 2, 13, 2, 8), torch.randn(9, 4, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    for one, wanted in zip(torch.compile(run, fullgraph=True, backend="eager")(*given), run(*given)):
        assert torch.equal(one, wanted)


def test_dynamic_shapes():
    compiled = torch.compile(Attention(), fullgraph=True, dynamic=True)
    cases = [qkv(q_len=n) for n in (6, 7, 9, 30)]
    with served(4), torch.no_grad():
        outs = [compiled(*case) for case in cases]
    for case, out in zip(cases, outs):
        check(out, *case)


def test_what_was_compiled_before_is_compiled_anew():
    # Dv != D: the older graph holds PyTorch's math, where no kernel of ours could step in.
    q, k, v = ROUTES["Dv != D"]()
    compiled = torch.compile(Attention(), fullgraph=True)
    with torch.no_grad():
        compiled(q, k, v)
        with served():
            out = compiled(q, k, v)
        rt.reset_stats()
        compiled(q, k, v)
    assert rt.stats() == {"served": 0, "fallback": {}}
    check(out, q, k, v)


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch < 2.9 keeps its flash kernel")
def test_a_compiled_training_step_is_served():
    q, k, v = qkv()
    q.requires_grad_()
    sdpa(q, k, v).square().sum().backward()
    own, q.grad = q.grad, None
    compiled = torch.compile(Attention(), fullgraph=True)
    with served():
        compiled(q, k, v).square().sum().backward()
    torch.testing.assert_close(q.grad, own)


CACHED = """
import multiprocessing, os, threading
import torch
# Once for all: a process forked here has compiled nothing.
import torch._inductor.compile_fx
import rapt.torch as rt
from torch.nn.functional import scaled_dot_product_attention as sdpa
def work():
    q = torch.arange(64.0).reshape(1, 2, 4, 8).sin()
    compiled = torch.compile(lambda q: sdpa(q * 1.5, q, q[..., :3]), fullgraph=True)
    with torch.no_grad():
        out = compiled(q)
        assert torch.allclose(out, sdpa(q * 1.5, q, q[..., :3]), atol=1e-5)
        rt.reset_stats()
        compiled(q)
    print(rt.stats()["served"], flush=True)
def run(register, in_thread):
    if register:
        rt.register_backend()
    if in_thread:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
fork = multiprocessing.get_context("fork")
for how in RUNS:
    process = fork.Process(target=run, args=how)
    process.start()
    process.join()
    assert process.exitcode == 0, how
"""


def test_a_warm_disk_cache_of_another_process(tmp_path):
    # PyTorch's artifact is there when another thread than the one that registered compiles; from then on both are.
    runs = [(False, False), (True, True), (False, False), (True, False)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "shared")}
    code = CACHED.replace("RUNS", repr(runs))
    done = fresh.run(code, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == [0, 1, 0, 1]


EXPORTS = [(mode, strict) for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad) for strict in (True, False)]


def test_export_keeps_the_aten_node(tmp_path):
    paths = []
    for mode, strict in EXPORTS:
        q, k, v = qkv()
        with served(1):
            with mode():
                program = torch.export.export(Attention(), (q, k, v), strict=strict)
            nodes = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
            assert nodes == ["aten.scaled_dot_product_attention.default"], (mode, strict)
            with torch.no_grad():
                out = program.module()(q, k, v)
        check(out, q, k, v)
        paths.append(str(tmp_path / f"{mode.__name__}-{strict}.pt2"))
        torch.export.save(program, paths[-1])
    # Elsewhere they run without Rapt.
    code = (
        f"import sys, torch\nfor path in {paths!r}:\n"
        "    out = torch.export.load(path).module()(torch.ones(2, 4, 6, 8), torch.ones(2, 4, 5, 8), torch.ones(2, 4, 5, 8))\n"
        "    assert torch.allclose(out, torch.ones(2, 4, 6, 8)) and 'rapt' not in sys.modules, path"
    )
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr


def test_the_first_call_of_a_process_may_be_a_whole_graph():
    code = """
import torch
import rapt
q = torch.randn(1, 2, 6, 8)
out = torch.compile(lambda q: rapt.attention(q * 2, q, q), fullgraph=True, backend="eager")(q)
assert torch.equal(out, rapt.attention(q * 2, q, q))
"""
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
