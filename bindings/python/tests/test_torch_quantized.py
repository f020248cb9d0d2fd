"""`rapt.Quantized` in compiled graphs: one op of Rapt's each, with the bits of the eager call; what recompiles, and what breaks a graph."""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from reference import assert_close, flash_rounded, reference, to_f64  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

FORMATS = [
    ("int8", "token"), ("int8", "tensor"), ("int8", "head"), ("int8", "channel"), ("int8", "block"), ("uint8", "token"), ("int4", "block"),
    ("e4m3fn", "token"), ("e5m2", "channel"), ("mxfp8", None), ("mxfp4", None), ("nvfp4", None),
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing compiled elsewhere answers here."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


def tensors(rng, len=9, dims=(32, 16), q_len=5):
    q = rng.standard_normal((2, 4, q_len, dims[0]), dtype=np.float32)
    k, v = (rng.standard_normal((2, 2, len, dim), dtype=np.float32) for dim in dims)
    return [torch.from_numpy(x) for x in (q, k, v)]


def quantized(x, format, granularity=None, **options):
    return rapt.quantize(x, format, granularity=granularity, block_size=5 if granularity == "block" else None, **options)


@contextlib.contextmanager
def served(number):
    """Exactly `number` calls are served inside."""
    rt.reset_stats()
    yield
    assert rt.stats() == {"served": number, "fallback": {}}


def equal(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(("format", "granularity"), FORMATS)
def test_a_quantized_goes_into_one_graph(rng, backend, format, granularity):
    if backend == "inductor" and (format, granularity) not in [("int8", "token"), ("int4", "block"), ("mxfp8", None), ("nvfp4", None)]:
        pytest.skip("inductor takes seconds for each")
    q, k, v = tensors(rng)
    rapt.attention(q, k, v)  # the first call of a process loads what later graphs are guarded on
    keys, values = quantized(k, format, granularity), quantized(v, format, granularity)
    counter = CompileCounterWithBackend(backend)

    def attend(q, k, v):
        return rapt.attention(q * 2.0, k, v, causal="bottom_right") + 1.0

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    with served(2):
        outs = [compiled(q, keys, values) for _ in range(2)]
    eager = attend(q, keys, values)
    assert all(equal(out, eager) for out in outs)
    numbers = [to_f64(x.dequantize()).astype(np.float32) for x in (keys, values)]
    twice = to_f64(q * 2.0).astype(np.float32)
    expected, _ = reference(twice, *numbers, causal="bottom_right")
    assert_close(to_f64(rapt.attention(q * 2.0, keys, values, causal="bottom_right")), expected, "float32", [flash_rounded(twice, *numbers, causal="bottom_right")])
    frames = counter.frame_count
    # Other codes of the same form, whose numbers are others, do not compile anew.
    other = quantized(-3 * v, format, granularity)
    with served(1):
        again = compiled(q, keys, other)
    assert equal(again, attend(q, keys, other)) and not equal(again, eager)
    assert counter.frame_count == frames, "one graph"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_every_operand_and_every_output(rng, backend):
    q, k, v = tensors(rng)
    queries, keys, values = quantized(q, "int8", "token"), quantized(k, "mxfp4"), quantized(v, "uint8", "token")
    calls = [
        lambda q, k, v: rapt.attention(q, k, v),
        lambda q, k, v: rapt.attention(q, k, v, return_lse=True, window=(2, 1), scale=0.3, softcap=2.0),
        lambda q, k, v: rapt.attention(q, k, v, out=torch.empty(2, 4, 5, 16), return_lse=True),
        lambda q, k, v: rapt.attention(q, k, v, out_dtype=torch.float16),
    ]
    for operands in [(q, keys, v), (q, k, values), (q, keys, values)]:
        for call in calls:
            with served(2):
                got, expected = torch.compile(call, fullgraph=True, backend=backend)(*operands), call(*operands)
            got, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, expected))
            assert all(map(equal, got, expected)) and len(got) == len(expected)
    for q in (queries, quantized(tensors(rng)[0], "nvfp4")):
        call = lambda q, k, v: rapt.attention(q, k, v, out_dtype=torch.float16, return_lse=True)  # noqa: E731
        got, expected = torch.compile(call, fullgraph=True, backend=backend)(q, keys, values), call(q, keys, values)
        assert all(map(equal, got, expected)) and got[0].dtype == torch.float16


def test_other_forms_and_other_lengths_give_what_eager_gives(rng):
    counter = CompileCounterWithBackend("aot_eager")
    attend = lambda q, k, v: rapt.attention(q, k, v)  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for len in (9, 30, 17):
        q, k, v = tensors(rng, len=len, q_len=len)
        keys, values = quantized(k, "int4", "block"), quantized(v, "int8", "token")
        assert equal(compiled(q, keys, values), attend(q, keys, values)), len
    assert counter.frame_count == 1, "one graph for all lengths"
    for keys, values in [
        (quantized(k, "int8", "token"), values),
        (quantized(k, "int8", "tensor"), values),
        (keys, quantized(v, "nvfp4")),
        (keys, v),
        (quantized(k[..., :31], "int4", "block"), values),
    ]:
        head_dim = keys.shape[-1]
        assert equal(compiled(q[..., :head_dim], keys, values), attend(q[..., :head_dim], keys, values))


def test_the_global_scale_is_that_of_each_call(rng):
    q, k, v = tensors(rng)
    rapt.attention(q, k, v)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: rapt.attention(q, k, v), fullgraph=True, backend=counter)
    for factor in (1, 5, 0.25, 7, 31, 0.01, 2, 3, 1000, 77):
        values = quantized(factor * v, "nvfp4")
        with served(2):
            assert equal(compiled(q, k, values), rapt.attention(q, k, values))
    assert counter.frame_count <= 2, "a number that changes becomes an input once"


def test_products_of_int8_and_swizzled_scales(rng):
    q, k, v = tensors(rng, len=140, dims=(64, 48))
    keys, values = quantized(k, "int8", "token"), quantized(v, "int8", "channel")
    call = lambda q, k, v: rapt.attention(q, k, v, compute="int8")  # noqa: E731
    rapt.quant.reset_stats()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, keys, values)
    assert rapt.quant.stats()["int8_calls"] == 1
    assert equal(got, call(q, keys, values)) and not equal(got, rapt.attention(q, keys, values))
    swizzled = [quantized(x, "nvfp4", scale_layout="swizzle_32_4_4") for x in (k, v)]
    got = torch.compile(lambda q, k, v: rapt.attention(q, k, v), fullgraph=True, backend="aot_eager")(q, *swizzled)
    assert equal(got, rapt.attention(q, quantized(k, "nvfp4"), quantized(v, "nvfp4")))


class Layer(torch.nn.Module):
    def __init__(self, keys, values):
        super().__init__()
        self.keys, self.values = keys, values

    def forward(self, q):
        return rapt.attention(q, self.keys, self.values)


def test_a_module_may_hold_it(rng):
    q, k, v = tensors(rng)
    layer = Layer(quantized(k, "mxfp4"), quantized(v, "int8", "token"))
    with served(2), torch.no_grad():
        assert equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(q), layer(q))


def test_traces_carry_one_op_with_the_sizes_of_numbers(rng):
    q, k, v = tensors(rng, dims=(32, 17))
    keys, values = quantized(k, "mxfp4"), quantized(v, "int4", "block")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out, lse = rapt.attention(mode.from_tensor(q), keys, values, return_lse=True)
    assert out.shape == (2, 4, 5, 17) and lse.shape == (2, 4, 5)
    rt.reset_stats()
    graph = make_fx(lambda q: rapt.attention(q, keys, values), tracing_mode="fake", _allow_non_fake_inputs=True)(q)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    nodes = [node for node in nodes if str(node.target).startswith("rapt.")]  # bytes of two codes are viewed as such
    assert [str(node.target) for node in nodes] == ["rapt.attention.default"] and rt.stats()["served"] == 0
    assert nodes[0].kwargs["v_scheme"] == "int4 block 5 plain" and nodes[0].kwargs["v_head_dim"] == 17
    with served(2):
        assert equal(graph(q), rapt.attention(q, keys, values))


def test_refusals_are_those_of_the_eager_call(rng):
    q, k, v = tensors(rng)
    keys = quantized(k, "int8", "token")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        for call in (lambda q: rapt.attention(q, keys, v, k_descale=keys.scale),):
            with pytest.raises(rapt.OptionError, match="k_descale = a .*None: what it belongs to"):
                call(fake)
        with pytest.raises(rapt.UnsupportedError, match="tolerance"):
            rapt.attention(fake, keys, v, tolerance=0.1)
    compiled = torch.compile(lambda q: rapt.attention(q, keys, v, compute="int8"), fullgraph=True, backend="eager")
    with pytest.raises(rapt.UnsupportedError, match="with v that is no codes"):
        compiled(q)
    with pytest.raises(rapt.UnsupportedError, match="no_grad"):
        rapt.attention(q.requires_grad_(), keys, v)


def test_quantizing_breaks_the_graph_and_the_result_is_right(rng):
    q, k, v = tensors(rng)

    def attend(q, k, v):
        keys = rapt.quantize(k * 2.0, "int8", granularity="token")
        return rapt.attention(q * 2.0, keys, v) + 1.0

    with torch.no_grad():
        found = torch._dynamo.explain(attend)(q, k, v)
        assert found.graph_break_count >= 1
        torch._dynamo.reset()
        with served(1):
            out = torch.compile(attend, backend="aot_eager")(q, k, v)
        assert equal(out, attend(q, k, v))
