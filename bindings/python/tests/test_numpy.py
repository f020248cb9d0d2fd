"""rapt.attention on numpy arrays: every dtype and option against the reference."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
import rapt
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close, assert_lse_close, random
from reference import reference


def loose(dtype):
    """The tolerance without PyTorch at hand: a few roundings of the storage dtype."""
    return {"float64": 1e-13, "float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2}[dtype]


def check(q, k, v, dtype, **options):
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = reference(q, k, v, **options)
    assert out.dtype == q.dtype and type(out) is np.ndarray
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert_lse_close(lse, expected_lse, dtype)
    # Without peers at hand the limit is absolute; test_scenarios.py applies the whole rule.
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=loose(dtype), rtol=0)
    return out


OPTIONS = [
    {},
    {"causal": True},
    {"causal": "bottom_right"},
    {"window": (3, 2)},
    {"window": (None, 0)},
    {"causal": "bottom_right", "window": (4, None)},
    {"softcap": 2.0},
    {"scale": 0.25},
    {"scale": -1.0},
    {"scale": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 9, 17, 16, 16), (1, 3, 1, 33, 7, 5, 13)], ids=str)
def test_every_option_against_reference(rng, dtype, sizes, options):
    batch, heads, kv_heads, q_len, kv_len, head_dim, head_dim_v = sizes
    q = random(rng, (batch, heads, q_len, head_dim), dtype)
    k = random(rng, (batch, kv_heads, kv_len, head_dim), dtype)
    v = random(rng, (batch, kv_heads, kv_len, head_dim_v), dtype)
    before = [x.tobytes() for x in (q, k, v)]
    check(q, k, v, dtype, **options)
    assert [x.tobytes() for x in (q, k, v)] == before


def test_masks_sinks_and_alibi_against_reference(rng, dtype):
    q, k, v = random(rng, (2, 4, 6, 8), dtype), random(rng, (2, 2, 9, 8), dtype), random(rng, (2, 2, 9, 8), dtype)
    for shape in [(6, 9), (9,), (1, 1), (2, 1, 1, 9), (4, 6, 1), (2, 4, 6, 9)]:
        keep = rng.random(shape) < 0.7
        check(q, k, v, dtype, mask=keep)
        check(q, k, v, dtype, mask=random(rng, shape, dtype), causal="bottom_right")
    sinks, slopes = random(rng, 4, dtype), np.abs(random(rng, 4, dtype))
    check(q, k, v, dtype, sinks=sinks)
    check(q, k, v, dtype, alibi_slopes=slopes, causal=True)
    check(q, k, v, dtype, sinks=sinks, alibi_slopes=slopes, mask=rng.random((6, 9)) < 0.5, softcap=3.0)


def test_ranks_two_three_and_the_bshd_layout(rng, dtype):
    q, k, v = (random(rng, (2, 7, 3, 8), dtype) for _ in range(3))
    whole = rapt.attention(q, k, v)
    np.testing.assert_array_equal(rapt.attention(q[0], k[0], v[0]), whole[0])
    np.testing.assert_array_equal(rapt.attention(q[0, 1], k[0, 1], v[0, 1]), whole[0, 1])
    turned = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    out, lse = rapt.attention(*turned, layout="bshd", return_lse=True)
    assert out.shape == (2, 3, 7, 8) and out.flags.c_contiguous and lse.shape == (2, 7, 3)
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3), whole)


def test_out_is_filled_in_place_with_any_strides(rng, dtype):
    q, k, v = (random(rng, (2, 3, 5, 8), dtype) for _ in range(3))
    expected = rapt.attention(q, k, v)
    storage = np.zeros((5, 8, 2, 6), q.dtype)
    out = storage.transpose(2, 3, 0, 1)[:, ::-2]
    assert rapt.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    untouched = storage.transpose(2, 3, 0, 1)[:, ::2]
    assert not untouched.any()


def test_out_dtype(rng):
    q, k, v = (random(rng, (1, 2, 5, 8), "bfloat16") for _ in range(3))
    expected, _ = reference(q, k, v)
    for asked in ["float32", np.float32, np.dtype("float32")]:
        out = rapt.attention(q, k, v, out_dtype=asked)
        assert out.dtype == np.float32
        assert_close(out, expected, "float32", [out])
        np.testing.assert_allclose(out, expected, atol=1e-5)
    wide = random(rng, (1, 2, 5, 8), "float32")
    assert rapt.attention(wide, wide, wide, out_dtype="bfloat16").dtype == ml_dtypes.bfloat16


def test_empty_sizes(dtype, rng):
    q, none = random(rng, (2, 3, 5, 8), dtype), random(rng, (2, 3, 0, 8), dtype)
    out, lse = rapt.attention(q, none, none, return_lse=True)
    assert not out.any() and (lse == -np.inf).all()
    assert rapt.attention(none, q, q).shape == (2, 3, 0, 8)
    assert rapt.attention(q[:0], q[:0], q[:0]).shape == (0, 3, 5, 8)
    assert rapt.attention(q[:, :0], q[:, :0], q[:, :0]).shape == (2, 0, 5, 8)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 5), (3, 700), (40, 90)])
def test_scores_that_are_all_minus_infinity_weigh_nothing(rng, dtype, q_len, kv_len):
    q, k = random(rng, (1, 2, q_len, 4), dtype), np.ones((1, 2, kv_len, 4), dtype)
    v = random(rng, (1, 2, kv_len, 4), dtype)
    q[:, :, ::2] = -np.inf
    for options in ({}, {"sinks": np.ones(2, np.float32)}, {"mask": np.arange(kv_len) % 3 > 0}, {"causal": True}):
        out = check(q, k, v, dtype, **options)
        assert not out[:, :, ::2].any()


def test_scaled_dot_product_attention_broadcasts_the_batch(rng):
    q, k = random(rng, (3, 1, 4, 5, 8)), random(rng, (2, 4, 6, 8))
    out = rapt.scaled_dot_product_attention(q, k, k)
    assert out.shape == (3, 2, 4, 5, 8)
    for a, b in itertools.product(range(3), range(2)):
        np.testing.assert_array_equal(out[a, b], rapt.attention(q[a, 0], k[b], k[b]))
    mask = rng.random((3, 1, 1, 5, 6)) < 0.6
    masked = rapt.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    for a, b in itertools.product(range(3), range(2)):
        np.testing.assert_array_equal(masked[a, b], rapt.attention(q[a, 0], k[b], k[b], mask=mask[a, 0]))


def test_grouped_heads_need_enable_gqa_in_pytorchs_words(rng):
    q, k = random(rng, (2, 4, 5, 8)), random(rng, (2, 2, 6, 8))
    with pytest.raises(rapt.ShapeError, match="enable_gqa=True"):
        rapt.scaled_dot_product_attention(q, k, k)
    out = rapt.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    np.testing.assert_array_equal(out, rapt.attention(q, k, k))


def test_explain_and_plan(rng):
    q, k = random(rng, (1, 4, 32, 16)), random(rng, (1, 2, 64, 16))
    plan = rapt.explain(q, k, k, causal="bottom_right")
    assert plan.flops == 2 * 2 * 16 * 4 * sum(33 + i for i in range(32))
    assert plan.bytes_copied == 0 and plan.causal_alignment == "bottom_right" and plan.accumulation == "float32"
    facts = plan.to_dict()
    names = [name for name in dir(plan) if not name.startswith("_") and name != "to_dict"]
    assert sorted(facts) == sorted(names)
    for name in names:
        assert facts[name] == getattr(plan, name)
    for word in ["kernel", "why", "flops", "bytes_copied", "diagonal at j = i + 32", plan.isa]:
        assert word in str(plan)


def test_context_owns_its_threads(rng):
    q = random(rng, (1, 2, 40, 8))
    expected = rapt.attention(q, q, q)
    for threads in (1, 2, 3):
        with rapt.Context(threads=threads) as context:
            assert context.threads == threads
            np.testing.assert_array_equal(context.attention(q, q, q), expected)
            assert context.explain(q, q, q).threads <= threads
        np.testing.assert_array_equal(context.attention(q, q, q), expected)
    assert rapt.Context().threads >= 1


def test_numpy_dtypes_that_look_alike_are_not_taken(rng):
    q = random(rng, (1, 1, 2, 4))
    for wrong in ["uint16", "int64", "complex64", "longdouble", "S4", "datetime64[s]"]:
        x = np.zeros((1, 1, 2, 4), wrong)
        with pytest.raises(rapt.UnsupportedDtypeError):
            rapt.attention(x, x, x)
    structured = np.zeros((1, 1, 2, 4), [("a", "f4")])
    with pytest.raises(rapt.UnsupportedDtypeError):
        rapt.attention(structured, structured, structured)
    masked = np.ma.masked_array(q, mask=q > 0)
    with pytest.raises(rapt.KindError, match="mask="):
        rapt.attention(masked, q, q)


def test_importing_rapt_imports_neither_numpy_nor_torch():
    import subprocess

    code = "import rapt, sys; rapt.doctor(); print([m for m in ('numpy', 'torch', 'rapt.torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_versions():
    assert rapt.__version__ == ".".join(map(str, rapt.version()))
    assert rapt.is_available("cpu") and not rapt.is_available("cuda") and not rapt.is_available("gpu")


dimensions = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(dimensions, dimensions, dimensions, dimensions, st.integers(1, 3), st.integers(1, 3), st.data())
def test_any_strides_give_the_bits_of_a_contiguous_copy(q_len, kv_len, head_dim, head_dim_v, kv_heads, group, data):
    rng = np.random.default_rng(q_len * 100 + kv_len)

    def strided(shape):
        order = data.draw(st.permutations(range(4)))
        steps = data.draw(st.tuples(*[st.sampled_from([1, 2, -1, -3])] * 4))
        storage = rng.standard_normal([shape[d] * abs(steps[d]) for d in order]).astype(np.float32)
        view = storage.transpose(np.argsort(order))[tuple(slice(None, None, s) for s in steps)]
        assert view.shape == tuple(shape)
        return view

    q = strided((2, kv_heads * group, q_len, head_dim))
    k, v = strided((2, kv_heads, kv_len, head_dim)), strided((2, kv_heads, kv_len, head_dim_v))
    copies = [np.ascontiguousarray(x) for x in (q, k, v)]
    np.testing.assert_array_equal(rapt.attention(q, k, v), rapt.attention(*copies))
