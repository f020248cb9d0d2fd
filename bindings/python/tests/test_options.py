"""One table of options: what rapt.attention shows is what every other signature has."""

import inspect

import numpy as np
import pytest
import rapt

PUBLIC = (
    "(q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None, "
    "layout='bhsd', q_descale=None, k_descale=None, v_descale=None, q_zero_point=None, k_zero_point=None, v_zero_point=None, compute='exact', out=None, out_dtype=None, return_lse=False, "
    "tolerance=None, device=None)"
)


def test_every_signature_is_that_of_attention():
    assert str(inspect.signature(rapt.attention)) == PUBLIC
    assert str(inspect.signature(rapt.explain)) == PUBLIC
    for method in (rapt.Context.attention, rapt.Context.explain):
        assert str(inspect.signature(method)) == PUBLIC.replace("(q", "(self, q").replace("(self, q", "(self, /, q", 1)
    assert str(inspect.signature(rapt.scaled_dot_product_attention)) == (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)"
    )


def test_every_option_is_taken_by_name_and_an_unknown_one_refused():
    x = np.ones((1, 2, 3, 4), np.float32)
    given = {name: p.default for name, p in inspect.signature(rapt.attention).parameters.items() if name not in "qkv"}
    with rapt.Context() as context:
        for function in (rapt.attention, rapt.explain, context.attention, context.explain):
            function(x, x, x, **given)
            with pytest.raises(TypeError, match="unheard"):
                function(x, x, x, unheard=1)


def test_the_ops_have_the_same_options():
    torch = pytest.importorskip("torch")
    import rapt.torch  # noqa: F401

    own = set(inspect.signature(rapt.attention).parameters) - {"window", "out", "return_lse", "tolerance", "device"}
    own |= {"window_left", "window_right"}
    # What of a `Quantized` is no tensor.
    own |= {f"{name}_{part}" for name in "qkv" for part in ("scheme", "global_scale", "head_dim")}
    # What rapt.flash_attn asks of them, and `rapt.attention` has not.
    own |= {"dropout_p", "dropout_draw"}
    for name in ("attention", "attention_lse"):
        schema = getattr(torch.ops.rapt, name).default._schema
        assert {argument.name for argument in schema.arguments} == own, name
    into = {argument.name for argument in torch.ops.rapt.attention_into.default._schema.arguments}
    assert into == (own - {"out_dtype"}) | {"out", "lse"}


def test_an_output_of_another_dtype_is_a_mismatch_on_every_route():
    torch = pytest.importorskip("torch")
    from torch._subclasses import FakeTensorMode

    x = np.ones((1, 2, 3, 4), np.float32)
    says = "out has dtype .*float16, asked for is .*float32"
    with pytest.raises(rapt.DtypeMismatchError, match=says):
        rapt.attention(x, x, x, out=x.astype(np.float16))
    with pytest.raises(rapt.DtypeMismatchError, match=says):
        rapt.explain(x, x, x, out=x.astype(np.float16))
    t = torch.ones(1, 2, 3, 4)
    with pytest.raises(rapt.DtypeMismatchError, match=says):
        rapt.attention(t, t, t, out=t.half())
    half = t.half()
    with FakeTensorMode() as mode:
        f, given = mode.from_tensor(t), mode.from_tensor(half)
        for options in ({}, {"out_dtype": torch.float32}):
            with pytest.raises(rapt.DtypeMismatchError, match=says):
                rapt.attention(f, f, f, out=given, **options)
        assert rapt.attention(f, f, f, out=given, out_dtype=torch.float16) is given
    with pytest.raises(rapt.UnsupportedDtypeError):
        rapt.attention(t, t, t, out_dtype=torch.int32)
    out = rapt.attention(t, t, t, out=t.half(), out_dtype=torch.float16)
    assert out.dtype == torch.float16
