"""Tracing GPU tensors on a machine without a GPU: fake tensors say that they lie on `cuda`, and nothing is computed."""

import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
import rapt.torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
HALF = torch.bfloat16


@pytest.fixture
def fake():
    """Makes fake tensors on the GPU of one mode, which is on."""
    with FakeTensorMode() as mode:
        assert mode.allow_non_fake_inputs is False
        yield lambda *shape, dtype=HALF: torch.empty(shape, dtype=dtype, device="cuda")


def about(t):
    return tuple(t.shape), t.stride(), t.dtype, t.device.type


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_form_of_attention_says_what_it_gives(fake, mode):
    rapt.torch.reset_stats()
    with mode():
        q, k, v = fake(2, 4, 5, 64), fake(2, 2, 7, 64), fake(2, 2, 7, 32)
        assert about(rapt.attention(q, k, v)) == ((2, 4, 5, 32), (640, 160, 32, 1), HALF, "cuda")
        out, lse = rapt.attention(q, k, v, causal="bottom_right", window=(3, 0), return_lse=True)
        assert about(out)[0] == (2, 4, 5, 32) and about(lse) == ((2, 4, 5), (20, 5, 1), torch.float32, "cuda")
        assert rapt.attention(q, k, v, out_dtype=torch.float32).dtype == torch.float32
        bshd = [t.transpose(1, 2) for t in (q, k, v)]
        out, lse = rapt.attention(*bshd, layout="bshd", return_lse=True)
        assert out.shape == (2, 5, 4, 32) and out.is_contiguous() and lse.shape == (2, 4, 5)
        given = fake(2, 4, 5, 32)
        assert rapt.attention(q, k, v, out=given) is given
        f64 = [t.double() for t in (q, k, v)]
        assert rapt.attention(*f64, return_lse=True)[1].dtype == torch.float64
        assert about(rapt.scaled_dot_product_attention(q, k, v, enable_gqa=True))[0] == (2, 4, 5, 32)
    assert rapt.torch.stats() == {"served": 0, "fallback": {}}, "tracing was counted"


def targets(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_a_trace_of_the_backend_carries_rapts_op_with_pytorchs_strides(fake):
    q, k, v = fake(2, 4, 6, 64), fake(2, 4, 6, 64), fake(2, 4, 6, 64)
    bshd = [fake(2, 6, 4, 64).transpose(1, 2) for _ in range(3)]
    mask = fake(2, 1, 6, 6, dtype=torch.bool)
    wide = fake(2, 4, 6, 128)
    rapt.torch.reset_stats()
    with rapt.torch.backend(), torch.no_grad():
        for arguments, strides in (
            # Flash follows the order of q; the memory-efficient kernel writes [batch, len, heads, dim]; math is row-major.
            ((q, k, v), (1536, 384, 64, 1)),
            (bshd, (1536, 64, 256, 1)),
            ((q, k, v, mask), (1536, 64, 256, 1)),
            ((q, k, wide), (3072, 128, 512, 1)),
        ):
            graph = make_fx(lambda *given: sdpa(*given), tracing_mode="fake")(*arguments)
            assert targets(graph) == ["rapt.scaled_dot_product_attention.default"]
            (node,) = [node for node in graph.graph.nodes if node.op == "call_function"]
            assert node.meta["val"].stride() == strides and node.meta["val"].device.type == "cuda"
    assert rapt.torch.stats() == {"served": 0, "fallback": {}}


def test_a_trace_of_attention_carries_its_op(fake):
    q, k, v = fake(2, 4, 6, 64), fake(2, 4, 6, 64), fake(2, 4, 6, 64)
    run = lambda q, k, v: rapt.attention(q, k, v, causal=True, scale=0.5) * 2  # noqa: E731
    with torch.no_grad():
        graph = make_fx(run, tracing_mode="fake")(q, k, v)
    assert targets(graph) == ["rapt.attention.default", "aten.mul.Tensor"]
    assert graph.graph.find_nodes(op="call_function", target=torch.ops.rapt.attention.default)[0].kwargs == {
        "causal": "top_left",
        "scale": 0.5,
    }


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return rapt.attention(q, k, v, causal=True), sdpa(q, k, v)


def test_export_of_gpu_tensors(fake):
    q, k, v = fake(2, 4, 6, 64), fake(2, 4, 6, 64), fake(2, 4, 6, 64)
    with torch.no_grad():
        program = torch.export.export(Model(), (q, k, v))
        with rapt.torch.backend():
            inside = torch.export.export(Model(), (q, k, v))
    # PyTorch's own node stays: the archive loads without Rapt registered.
    for exported in (program, inside):
        assert {"rapt.attention.default", "aten.scaled_dot_product_attention.default"} == set(targets(exported))


def test_a_trace_that_trains_carries_rapts_backward(fake):
    q, k, v = fake(2, 4, 6, 64).requires_grad_(), fake(2, 2, 6, 64).requires_grad_(), fake(2, 2, 6, 64)
    backward = type(rapt.attention(*(torch.empty(1, 1, 2, 8, requires_grad=True, device="cpu") for _ in range(3))).grad_fn)
    with rapt.torch.backend():
        made = rapt.attention(q, k, v), sdpa(q, k, v, enable_gqa=True), torch.ops.rapt.attention(q, k, v)
    for out in made:
        # The engine runs no backward of a device that is not there.
        assert about(out)[0] == (2, 4, 6, 64) and type(out.grad_fn) is backward
