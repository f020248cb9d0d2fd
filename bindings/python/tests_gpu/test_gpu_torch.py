"""PyTorch's interfaces on the GPU: register_backend in every mode, its strides, its stats; explain, doctor, errors."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from gpu_reference import INF, Case, judge
from torch.nn.attention import SDPBackend, sdpa_kernel

import rapt

sdpa = F.scaled_dot_product_attention


def new(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def judged(query, key, value, mask=None, causal=False, **options):
    out = rapt.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, **options)
    judge(out, None, query, key, value, mask=mask, causal="top_left" if causal else None)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_served_and_counted_in_every_mode(dtype):
    q, k, v = new(2, 4, 40, 64, dtype=dtype), new(2, 4, 70, 64, dtype=dtype), new(2, 4, 70, 64, dtype=dtype)
    mask = torch.rand(2, 1, 40, 70, device="cuda") > 0.3
    want, masked, causal = judged(q, k, v), judged(q, k, v, mask), judged(q, k, v, causal=True)
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v) * 2, fullgraph=True)
    with rapt.torch.backend():
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            rapt.torch.reset_stats()
            with mode():
                assert torch.equal(sdpa(q, k, v), want)
                assert torch.equal(sdpa(q, k, v, attn_mask=mask), masked)
                assert torch.equal(sdpa(q, k, v, is_causal=True), causal)
                out = sdpa(q[:, :, :1], k[:, :1], v[:, :1], enable_gqa=True)
            assert out.shape == (2, 4, 1, 64)
            assert rapt.torch.stats() == {"served": 4, "fallback": {}}, mode
        with torch.no_grad():
            rapt.torch.reset_stats()
            assert torch.equal(compiled(q, k, v), want * 2)
            assert rapt.torch.stats()["served"] == 1
    stock = sdpa(q, k, v)
    rapt.torch.reset_stats()
    assert torch.equal(sdpa(q, k, v), stock) and rapt.torch.stats()["served"] == 0


def test_refusals_go_to_pytorch():
    q, k, v = new(1, 2, 8, 64).requires_grad_(), new(1, 2, 8, 64), new(1, 2, 8, 64)
    with rapt.torch.backend():
        rapt.torch.reset_stats()
        sdpa(q, k, v).sum().backward()
        assert q.grad is not None and bool(q.grad.isfinite().all())
        with sdpa_kernel([SDPBackend.MATH]):
            sdpa(q.detach(), k, v)
        stats = rapt.torch.stats()
    assert stats == {"served": 1, "fallback": {"sdpa_kernel([MATH])": 1}}, stats
    with pytest.raises(rapt.UnsupportedError, match="no_grad"):
        rapt.attention(q, k, v, out=torch.empty_like(v))


def test_the_output_has_the_strides_of_pytorchs_own():
    bhsd, bshd = new(2, 4, 33, 64), new(2, 33, 4, 64).transpose(1, 2)
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        for q in (bhsd, bshd):
            q = q.to(dtype)
            cases += [(q, q, q, None), (q, q, q, torch.ones(33, 33, dtype=torch.bool, device="cuda"))]
            wide = torch.cat([q, q], -1).to(dtype)
            cases.append((q, q, wide, None))
    for q, k, v, mask in cases:
        stock = sdpa(q, k, v, attn_mask=mask)
        with rapt.torch.backend():
            got = sdpa(q, k, v, attn_mask=mask)
        assert got.shape == stock.shape and got.stride() == stock.stride(), (q.dtype, q.stride(), v.shape, mask is None)
        assert (got - stock).abs().max().item() < 0.1


def test_explain_doctor_and_errors_speak_of_the_gpu():
    q = new(1, 2, 300, 64)
    text = str(rapt.explain(q, q, q))
    assert "sm_" in text and "registers" in text and "multiprocessors" in text and "cubin" in text
    assert rapt.is_available("cuda")
    assert "cuda:0" in str(rapt.doctor())
    with pytest.raises(rapt.DeviceError, match="q is on cuda"):
        rapt.attention(q, q.cpu(), q)
    with pytest.raises(rapt.DtypeMismatchError):
        rapt.attention(q, q.float(), q)
    with pytest.raises(rapt.LayoutError):
        rapt.attention(q, q, q, out=q)


def test_many_threads_and_a_spec_after_another():
    import threading

    q, k, v, _ = Case(seed=4, q=(1, 4, 130, 64), kv_heads=4, kv_len=600).values()
    want = rapt.attention(q, k, v)
    wrong = []

    def work():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(50):
                if not torch.equal(rapt.attention(q, k, v), want):
                    wrong.append(1)
        stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and want.abs().max().item() != INF


def backend(q, k, v, **options):
    with rapt.torch.backend():
        rapt.torch.reset_stats()
        out = sdpa(q, k, v, **options)
        assert rapt.torch.stats() == {"served": 1, "fallback": {}}
    return out


def into(q, k, v, mask=None):
    out = torch.empty_like(q)
    rapt.attention(q, k, v, mask=mask, out=out)
    return out


INTERFACES = {
    "attention": lambda q, k, v, mask: rapt.attention(q, k, v, mask=mask),
    "into": into,
    "scaled_dot_product_attention": rapt.scaled_dot_product_attention,
    "five dimensions": lambda *given: rapt.scaled_dot_product_attention(*(x[:, None] for x in given))[:, 0],
    "backend": lambda q, k, v, mask: backend(q, k, v, attn_mask=mask),
}


# torch 2.11 knows the second name, older ones the first.
CUDAS_OWN = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}


@pytest.mark.parametrize("home", ["default", "side"])
@pytest.mark.parametrize("interface", INTERFACES)
def test_what_another_stream_allocated_is_not_reused_while_a_run_reads_it(interface, home):
    owner, runner = torch.cuda.current_stream(), torch.cuda.Stream()
    if home == "side":
        owner, runner = runner, owner
    with torch.cuda.stream(owner), torch.no_grad():
        given = [*(new(1, 8, 1024, 128) for _ in range(3)), new(1, 1, 1024, 1024)]
        want = INTERFACES[interface](*given)
        # Room, since the device is waited for where memory is asked of the driver. What was given lies before it.
        spare = [torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda") for _ in range(12)]
        del spare
    torch.cuda.synchronize()
    addresses = {x.data_ptr() for x in given}
    with torch.cuda.stream(runner), torch.no_grad():
        INTERFACES[interface](*given)
        torch.cuda._sleep(1_000_000_000)
        out = INTERFACES[interface](*given)
    given.clear()
    # What the allocator hands out now is written at once; the run has not begun.
    with torch.cuda.stream(owner):
        new_ones = [torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    owner.synchronize()
    assert not runner.query(), "the run was over too soon to tell"
    reused = addresses & {x.data_ptr() for x in new_ones}
    runner.synchronize()
    assert not reused and torch.equal(out, want)


def test_cudas_own_allocator_is_told_too_and_its_warnings_are_kept_from_the_caller():
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:xdist", "-k", "another_stream_allocated", __file__],
        env=os.environ | CUDAS_OWN,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0 and "10 passed" in told.stdout, told.stdout[-2000:] + told.stderr[-2000:]
    # torch warns of tensors that are at home on the stream, which these are.
    for call, warns in (("q.record_stream(torch.cuda.current_stream())", True), ("rapt.attention(q, q, q)", False)):
        script = (
            "import warnings, torch, rapt\n"
            "assert torch.cuda.get_allocator_backend() == 'cudaMallocAsync'\n"
            "q = torch.ones(1, 2, 64, 64, device='cuda')\n"
            "with warnings.catch_warnings(record=True) as heard:\n"
            "    warnings.simplefilter('always')\n"
            f"    {call}\n"
            "print(len(heard))\n"
        )
        heard = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | CUDAS_OWN, capture_output=True, text=True, timeout=300, check=False
        )
        assert heard.stdout == f"{int(warns)}\n", heard.stderr[-2000:]


def test_a_stream_gets_back_at_once_what_it_allocated_itself():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        # A size that nothing else here has, so that the freed block is the one that fits.
        given = [torch.zeros(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        addresses = {x.data_ptr() for x in given}
        rapt.attention(*given)
        torch.cuda._sleep(500_000_000)
        out = rapt.attention(*given)
        given.clear()
        again = [torch.zeros(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        assert not side.query() and {x.data_ptr() for x in again} == addresses
    side.synchronize()
    assert not out.any()


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return rapt.attention(q, k, v, causal=True) + sdpa(q, k, v)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_run_attention_and_the_backend(mode, backend):
    q, k, v = new(2, 4, 40, 64), new(2, 4, 40, 64), new(2, 4, 40, 64)
    torch._dynamo.reset()
    with rapt.torch.backend(), mode():
        want = Model()(q, k, v)
        compiled = torch.compile(Model(), fullgraph=True, backend=backend)
        rapt.torch.reset_stats()
        assert torch.equal(compiled(q, k, v), want)
        assert rapt.torch.stats() == {"served": 2, "fallback": {}}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_exported_programs_run(mode, tmp_path):
    q, k, v = new(2, 4, 40, 64), new(2, 4, 40, 64), new(2, 4, 40, 64)
    with mode():
        want = Model()(q, k, v)
        program = torch.export.export(Model(), (q, k, v))
    path = tmp_path / "model.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    with torch.no_grad():
        assert (loaded(q, k, v) - want).abs().max().item() < 0.02
        with rapt.torch.backend():
            rapt.torch.reset_stats()
            served = loaded(q, k, v)
            assert rapt.torch.stats() == {"served": 2, "fallback": {}}
            assert torch.equal(served, Model()(q, k, v))


def test_autocast_rounds_before_the_backend_and_never_inside_attention():
    q, k, v = (new(2, 4, 40, 64, dtype=torch.float32) for _ in range(3))
    half = [t.to(torch.bfloat16) for t in (q, k, v)]
    with rapt.torch.backend(), torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        rapt.torch.reset_stats()
        out = sdpa(q, k, v)
        assert out.dtype == torch.bfloat16 and torch.equal(out, rapt.scaled_dot_product_attention(*half))
        exact = rapt.attention(q, k, v)
        assert exact.dtype == torch.float32
        assert rapt.torch.stats() == {"served": 3, "fallback": {}}
    assert torch.equal(exact, rapt.attention(q, k, v))


def test_inference_tensors_are_served():
    with torch.inference_mode():
        q = new(2, 4, 40, 64)
        want = rapt.attention(q, q, q)
        with rapt.torch.backend():
            rapt.torch.reset_stats()
            assert torch.equal(sdpa(q, q, q), want) and rapt.torch.stats() == {"served": 1, "fallback": {}}
    assert want.is_inference() and torch.equal(rapt.attention(q, q, q), want)


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch < 2.11")
def test_the_flash_registry():
    attention = torch.nn.attention
    q, k, v = new(2, 4, 40, 64), new(2, 4, 40, 64), new(2, 4, 40, 64)
    wide = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    flash = lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)  # noqa: E731
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True), fullgraph=True)

    def run():
        with torch.no_grad(), flash():
            return [sdpa(q, k, v), sdpa(*wide, scale=0.3), sdpa(q, k, v, is_causal=True), compiled(q, k, v)]

    stock = run()
    torch._dynamo.reset()
    attention.activate_flash_attention_impl("RAPT")
    try:
        rapt.torch.reset_stats()
        outs = run()
        assert rapt.torch.stats() == {"served": 4, "fallback": {}}
        assert torch.equal(outs[0], rapt.attention(q, k, v)) and torch.equal(outs[2], rapt.attention(q, k, v, causal=True))
        assert torch.equal(outs[1], rapt.attention(q, k, v, scale=0.3)) and torch.equal(outs[2], outs[3])
        for out, was in zip(outs, stock):
            assert out.stride() == was.stride() and (out - was).abs().max().item() < 0.02
        # Here gradients are PyTorch's own, whose backward op reads what its forward wrote; the backend serves them.
        rapt.torch.reset_stats()
        leaf = q.clone().requires_grad_()
        with flash():
            sdpa(leaf, k, v).sum().backward()
            assert leaf.grad.isfinite().all() and rapt.torch.stats() == {"served": 0, "fallback": {"requires grad": 1}}
            with rapt.torch.backend():
                rapt.torch.reset_stats()
                sdpa(leaf, k, v)
                assert rapt.torch.stats() == {"served": 1, "fallback": {}}
    finally:
        attention.restore_flash_attention_impl()
    rapt.torch.reset_stats()
    for out, was in zip(run(), stock):
        assert torch.equal(out, was)
    assert rapt.torch.stats() == {"served": 0, "fallback": {}}


@pytest.mark.skipif(
    "quantized" not in torch.ops.aten._scaled_dot_product_flash_attention.overloads(), reason="this torch has no flash op of codes"
)
@pytest.mark.parametrize("through", ["backend", "flash implementation"])
def test_the_flash_op_of_codes(through):
    q, k, v = (new(2, heads, 150, 64) for heads in (4, 2, 2))
    codes = [(x * 40).to(torch.float8_e4m3fn) for x in (q, k, v)]
    factors = [torch.rand(2, 2, device="cuda") * 0.02 + 0.01 for _ in range(3)]
    # The numbers of q are those of its codes times its factors, which multiply the same scores as those of k.
    tensors = (codes[0].to(torch.bfloat16), *codes[1:])
    given = {"k_descale": factors[0] * factors[1], "v_descale": factors[2]}

    numbers = [x.double() * f.double().repeat_interleave(x.shape[1] // 2, 1)[:, :, None, None] for x, f in zip(codes, factors)]
    exact = sdpa(*numbers, enable_gqa=True)

    def call(is_causal=False):
        return torch.ops.aten._scaled_dot_product_flash_attention.quantized(*codes, *factors, 0.0, is_causal)

    compiled = torch.compile(lambda *x: torch.ops.aten._scaled_dot_product_flash_attention.quantized(*x)[0], fullgraph=True, backend="aot_eager")
    if through == "backend":
        rapt.torch.register_backend()
    else:
        torch.nn.attention.activate_flash_attention_impl("RAPT")
    try:
        rapt.torch.reset_stats()
        for is_causal in (False, True):
            out, lse, *_ = call(is_causal)
            want, want_lse = rapt.attention(*tensors, causal="top_left" if is_causal else None, return_lse=True, **given)
            assert out.dtype == torch.bfloat16 and torch.equal(out, want) and torch.equal(lse, want_lse)
        assert (call()[0].double() - exact).norm() <= 2.0**-8 * exact.norm()
        assert torch.equal(compiled(*codes, *factors), call()[0])
        assert rapt.torch.stats()["fallback"] == {}
    finally:
        if through == "backend":
            rapt.torch.unregister_backend()
        else:
            torch.nn.attention.restore_flash_attention_impl()
