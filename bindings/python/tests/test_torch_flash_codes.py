"""PyTorch's flash op of codes: its answer is that of `rapt.attention` on the same codes and factors, which lies within the tolerance of the
f64 reference; what is missing or not served is an error."""

import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from rapt.torch import _flash_codes  # noqa: E402
from reference import assert_close, flash_rounded, reference  # noqa: E402

pytestmark = pytest.mark.skipif(not _flash_codes.TAKES_CODES, reason="this torch has no flash op of codes")

E4M3 = torch.float8_e4m3fn


def op(*arguments, **options):
    return torch.ops.aten._scaled_dot_product_flash_attention.quantized(*arguments, **options)


def codes(*shape, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 40).to(E4M3)


def given(heads=4, kv_heads=2, q_len=9, kv_len=33, dim=32, dim_v=16, batch=2):
    """q, k, v of unlike strides, and a factor for each key head of each."""
    q = codes(batch, q_len, heads, dim).transpose(1, 2)
    k = codes(batch, kv_heads, kv_len, 2 * dim, seed=1)[..., ::2]
    v = codes(batch, kv_heads, kv_len, dim_v, seed=2).flip(1)
    generator = torch.Generator().manual_seed(3)
    return (q, k, v), [torch.rand(batch, kv_heads, generator=generator) * 0.02 + 0.01 for _ in range(3)]


def numbers(x, factor, heads):
    return x.float() * factor.repeat_interleave(heads // factor.shape[1], 1)[:, :, None, None]


def served(call):
    rt.reset_stats()
    return call(), rt.stats()


@pytest.fixture
def registered():
    with rt.backend():
        yield


def strides(x):
    """Those of dimensions along which there is more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride()) if size > 1] if x.numel() else []


def test_codes_are_attention_on_their_numbers(registered):
    for sizes, options in (
        ({}, {}),
        ({}, {"scale": 0.3}),
        ({"q_len": 33, "dim_v": 32, "heads": 2}, {"is_causal": True}),
        ({"q_len": 1, "kv_len": 300}, {}),
        ({"q_len": 0}, {}),
        ({"kv_len": 0}, {}),
    ):
        (q, k, v), factors = given(**sizes)
        (out, lse, *others), stats = served(lambda: op(q, k, v, *factors, 0.0, options.get("is_causal", False), scale=options.get("scale")))  # noqa: B023
        assert stats == {"served": 1, "fallback": {}}
        exact = [numbers(x, factor, x.shape[1]) for x, factor in zip((q, k, v), factors)]
        common = {"causal": "top_left" if options.get("is_causal") else None, "scale": options.get("scale")}
        right, right_lse = reference(*exact, **common)
        once = torch.as_tensor(flash_rounded(*exact, **common)).to(torch.bfloat16)
        assert_close(out, right, "bfloat16", [once])
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        fake = op(*(x.to("meta") for x in (q, k, v, *factors)), scale=options.get("scale"))
        assert (out.shape, strides(out), lse.shape) == (fake[0].shape, strides(fake[0]), fake[1].shape)
        assert torch.allclose(lse.double(), torch.as_tensor(right_lse).double(), rtol=1e-5, atol=1e-5)
        assert others[2:4] == [q.shape[2], k.shape[2]]


def test_the_bits_are_those_of_attention_and_nothing_is_written(registered):
    (q, k, v), factors = given()
    before = [x.clone().view(torch.uint8) for x in (q, k, v)]
    out = op(q, k, v, *factors)[0]
    of_heads = factors[0].repeat_interleave(2, 1)
    rapts = rapt.attention(q, k, v, q_descale=of_heads, k_descale=factors[1], v_descale=factors[2], out_dtype=torch.bfloat16)
    assert torch.equal(out, rapts)
    assert all(torch.equal(x.view(torch.uint8), was) for x, was in zip((q, k, v), before))


def test_a_missing_or_unfit_factor_is_an_error_that_names_it(registered):
    (q, k, v), factors = given()
    for at, name in enumerate(("q_descale", "k_descale", "v_descale")):
        missing = [None if at == n else factor for n, factor in enumerate(factors)]
        with pytest.raises(rapt.OptionError, match=rf"{name} = None; .* Mend: `torch.ones\(\(2, 2\)\)`"):
            op(q, k, v, *missing)
        for unfit in (factors[at][:1], factors[at].double(), factors[at].repeat(1, 2)):
            with pytest.raises(rapt.ShapeError, match=rf"{name} is .*; allowed: torch.float32 \[2, 2\]"):
                op(q, k, v, *(unfit if at == n else factor for n, factor in enumerate(factors)))
    with pytest.raises(rapt.UnsupportedError, match='causal="bottom_right"'):
        op(q, k, v, *factors, 0.0, True)
    with pytest.raises(rapt.ShapeError, match="query has 3 heads and key 2"):
        op(q[:, :3], k, v, *factors)
    assert op(q, k, v, *factors)[0].isfinite().all()


def test_what_is_not_served_is_counted_and_pytorchs_where_it_has_a_kernel(registered):
    (q, k, v), factors = given()
    for arguments, reason in (
        (((q, k, v.to(torch.float8_e5m2)), factors, 0.0), "dtype torch.float8_e5m2"),
        (((q.float(), k.float(), v.float()), [None] * 3, 0.0), "dtype torch.float32"),
        (((q, k, v), factors, 0.5), "dropout"),
        (((q, k, v), factors, 0.0, False, True), "debug mask"),
    ):
        tensors, given_factors, *rest = arguments
        rt.reset_stats()
        with pytest.raises(NotImplementedError, match=reason):
            op(*tensors, *given_factors, *rest)
        assert rt.stats() == {"served": 0, "fallback": {reason: 1}}


def test_unregistered_it_is_pytorchs():
    (q, k, v), factors = given()
    with rt.backend():
        op(q, k, v, *factors)
    for _ in range(20):
        with pytest.raises(NotImplementedError):
            op(q, k, v, *factors)
    with rt.backend():
        assert served(lambda: op(q, k, v, *factors))[1]["served"] == 1


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch < 2.11")
def test_the_flash_implementation_takes_it_too():
    (q, k, v), factors = given()
    torch.nn.attention.activate_flash_attention_impl("RAPT")
    try:
        with rt.backend():
            out = op(q, k, v, *factors)[0]
        assert torch.equal(served(lambda: op(q, k, v, *factors)[0])[0], out)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError):
        op(q, k, v, *factors)


def test_a_compiled_graph_carries_it(registered):
    (q, k, v), factors = given()
    compiled = torch.compile(lambda *x: op(*x)[0] + 1, fullgraph=True, backend="aot_eager")
    out, stats = served(lambda: compiled(q, k, v, *factors))
    assert torch.equal(out, op(q, k, v, *factors)[0] + 1) and stats == {"served": 1, "fallback": {}}
