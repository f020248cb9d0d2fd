"""rapt.attention and rapt.scaled_dot_product_attention on torch tensors: eager, compiled, exported, typed errors."""

import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from test_torch_stats import DTYPES, check, tensor  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


def qkv(dtype=torch.float32):
    return [tensor(2, h, n, 8, dtype=dtype, seed=i) for i, (h, n) in enumerate([(4, 6), (2, 9), (2, 9)])]


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "bottom right": {"causal": "bottom_right"},
    "window": {"causal": "top_left", "window": (2, None)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.2},
    "mask": {"mask": tensor(6, 9, seed=7) > -0.5},
    "sinks": {"sinks": tensor(4, seed=8)},
    "alibi": {"alibi_slopes": tensor(4, seed=9).abs()},
}


def judge(got, q, k, v, options):
    expected, lse = reference.reference(q, k, v, **options)
    reference.assert_close(got[0], expected, q.dtype, reference.torch_peers(q, k, v, **options))
    reference.assert_lse_close(got[1], lse, q.dtype)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_options_eager_and_compiled(name, backend):
    options = OPTIONS[name]
    q, k, v = qkv()

    def run(q, k, v):
        return rapt.attention(q, k, v, return_lse=True, **options)

    if backend is not None:
        run = torch.compile(run, fullgraph=True, backend=backend)
    rt.reset_stats()
    with torch.no_grad():
        judge(run(q, k, v), q, k, v, options)
    assert rt.stats() == {"served": 1, "fallback": {}}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_dtypes(dtype):
    q, k, v = qkv(dtype)
    out, lse = rapt.attention(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    judge((out, lse), q, k, v, {})


def test_the_graph_carries_the_op():
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(lambda q, k, v: rapt.attention(q, k, v), fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    q, k, v = qkv()
    with torch.no_grad():
        out = compiled(q, k, v)
    assert "rapt.attention.default" in [str(node.target) for node in graphs[0].graph.nodes]
    reference.assert_close(out, reference.reference(q, k, v)[0], "float32", reference.torch_peers(q, k, v))


def test_the_ops_by_name():
    q, k, v = qkv()
    expected, lse = reference.reference(q, k, v)
    peers = reference.torch_peers(q, k, v)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            reference.assert_close(torch.ops.rapt.attention(q, k, v), expected, "float32", peers)
            got = torch.ops.rapt.attention_lse(q.clone(), k.clone(), v.clone())
            reference.assert_close(got[0], expected, "float32", peers)
            reference.assert_lse_close(got[1], lse, "float32")
            out = torch.full_like(q, torch.nan)
            assert torch.ops.rapt.attention_into(q, k, v, out, None) is None
            reference.assert_close(out, expected, "float32", peers)


def test_opcheck():
    q, k, v = qkv()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.rapt.attention.default, (q, k, v), test_utils=utilities)
    torch.library.opcheck(torch.ops.rapt.attention_lse.default, (q, k, v), {"causal": "top_left"}, test_utils=utilities)
    torch.library.opcheck(torch.ops.rapt.attention_into.default, (q, k, v, out, lse), test_utils=utilities[:2])
    torch.library.opcheck(torch.ops.rapt.scaled_dot_product_attention.default, (q, k[:, :1], v[:, :1]), test_utils=utilities)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_fake_tensors_have_the_exact_shape_dtype_and_strides(layout):
    q, k, v = qkv() if layout == "bhsd" else [t.transpose(1, 2) for t in qkv()]
    for options in ({}, {"return_lse": True}, {"out_dtype": torch.float64}):
        if options.get("out_dtype") is not None:
            real = None
        else:
            real = rapt.attention(q, k, v, layout=layout, **options)
        with FakeTensorMode() as mode:
            fake = rapt.attention(*(mode.from_tensor(t) for t in (q, k, v)), layout=layout, **options)
        if real is None:
            assert fake.dtype == torch.float64
            continue
        for a, b in zip(fake if isinstance(fake, tuple) else (fake,), real if isinstance(real, tuple) else (real,)):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_out(backend):
    q, k, v = qkv()
    expected, lse = reference.reference(q, k, v)

    def run(q, k, v, out):
        return rapt.attention(q, k, v, out=out, return_lse=True)

    if backend is not None:
        run = torch.compile(run, fullgraph=True, backend=backend)
    guard = torch.full((2, 4, 6, 16), 7.0)
    out = guard[..., 4:12]
    rt.reset_stats()
    with torch.no_grad():
        got = run(q, k, v, out)
    assert rt.stats() == {"served": 1, "fallback": {}}
    reference.assert_close(out, expected, "float32", reference.torch_peers(q, k, v))
    reference.assert_close(got[0], expected, "float32", reference.torch_peers(q, k, v))
    reference.assert_lse_close(got[1], lse, "float32")
    assert (guard[..., :4] == 7).all() and (guard[..., 12:] == 7).all()


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return rapt.attention(q, k, v, causal="bottom_right")

    q, k, v = qkv()
    with torch.no_grad():
        program = torch.export.export(Attention(), (q, k, v))
        assert "rapt.attention.default" in [str(node.target) for node in program.graph.nodes]
        out = program.module()(q, k, v)
    reference.assert_close(out, reference.reference(q, k, v, causal="bottom_right")[0], "float32", reference.torch_peers(q, k, v, causal="bottom_right"))


FUNCTIONS = {
    "rapt.attention": lambda q, k, v: rapt.attention(q, k, v),
    "rapt.scaled_dot_product_attention": lambda q, k, v: rapt.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "torch.ops.rapt.attention": lambda q, k, v: torch.ops.rapt.attention(q, k, v),
    "torch.ops.rapt.attention_lse": lambda q, k, v: torch.ops.rapt.attention_lse(q, k, v),
    "torch.ops.rapt.scaled_dot_product_attention": lambda q, k, v: torch.ops.rapt.scaled_dot_product_attention(
        q, k, v, enable_gqa=True
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gradient_is_never_dropped_in_silence(function):
    q, k, v = qkv()
    q.requires_grad_()
    answer = FUNCTIONS[function](q, k, v)
    assert all(t.requires_grad for t in (answer if isinstance(answer, tuple) else (answer,)))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = FUNCTIONS[function](q, k, v)
        out = out[0] if isinstance(out, tuple) else out
        assert not out.requires_grad
        reference.assert_close(out.clone(), reference.reference(q, k, v)[0], "float32", reference.torch_peers(q.detach(), k, v))


def test_sdpa_broadcasts_as_pytorch_and_raises_rapts_errors():
    q, k, v = tensor(3, 4, 6, 8), tensor(1, 4, 5, 8), tensor(1, 4, 5, 8, seed=1)
    check(rapt.scaled_dot_product_attention(q, k, v), q, k, v)
    check(rapt.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), q, k, v, is_causal=True, scale=0.3)
    mask = torch.ones(6, 5, dtype=torch.bool)
    for error, arguments in [
        (rapt.OptionError, (q, k, v, None, 1.5)),
        (rapt.OptionError, (q, k, v, mask, 0.0, True)),
        (rapt.ShapeError, (q, k, v[:, :, :3])),
        (rapt.ShapeError, (q, k[..., :7], v)),
        (rapt.ShapeError, (q, k[:, :2], v[:, :2])),
        (rapt.ShapeError, (q, k, v, mask[:3])),
        (rapt.DtypeMismatchError, (q, k.double(), v.double())),
        (rapt.UnsupportedDtypeError, (q.int(), k.int(), v.int())),
        (rapt.DeviceError, (q.to("meta"), k.to("meta"), v.to("meta"))),
    ]:
        with pytest.raises(error):
            rapt.scaled_dot_product_attention(*arguments)
        check(rapt.scaled_dot_product_attention(q, k, v), q, k, v)


def test_tensors_whose_memory_is_not_their_value_are_refused():
    q, k, v = qkv()
    sparse, quantized = q.to_sparse(), torch.quantize_per_tensor(q, 0.1, 0, torch.qint8)
    for error, bad in [(rapt.LayoutError, torch._neg_view(q)), (rapt.LayoutError, sparse), (rapt.UnsupportedDtypeError, quantized)]:
        with pytest.raises(error):
            rapt.attention(bad, k, v)
    with pytest.raises(rapt.UnsupportedError):
        torch.func.vmap(lambda q, k, v: rapt.attention(q, k, v))(q, k, v)
    reference.assert_close(rapt.attention(q, k, v), reference.reference(q, k, v)[0], "float32", reference.torch_peers(q, k, v))
