"""rapt._reference: against PyTorch in f64, numpy against torch, and the edges that no PyTorch kernel has."""

import math

import numpy as np
import pytest
from rapt import _reference
from rapt._reference import attention, flash_rounded, round_to

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (3, 1)},
    "scale": {"scale": -0.3},
    "softcap, slopes, sinks": {"softcap": 1.5, "alibi_slopes": np.array([0.5, 0.1, 1.0, 0.0]), "sinks": np.array([1.0, -2.0, 0.0, 30.0])},
}


def problem(rng, mask=None):
    """q, k, v of grouped heads, and a mask of some kind."""
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 4, 5, 6), (2, 2, 9, 6), (2, 2, 9, 3)))
    keep = rng.random((2, 1, 5, 9)) < 0.6
    return q, k, v, {None: None, "bool": keep, "additive": np.where(keep, rng.standard_normal(keep.shape), -np.inf)}[mask]


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
@pytest.mark.parametrize("causal", [None, True])
def test_it_is_pytorchs_math_in_f64(torch, rng, mask, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v, mask = problem(rng, mask)
    keep = np.tri(5, 9, dtype=bool) if causal else np.ones((5, 9), bool)
    both = keep if mask is None else keep & mask if mask.dtype == bool else np.where(keep, mask, -np.inf)
    with sdpa_kernel([SDPBackend.MATH]):
        want = sdpa(*map(torch.from_numpy, (q, k, v)), attn_mask=torch.from_numpy(both), enable_gqa=True).numpy()
    rows = (both if both.dtype == bool else both != -np.inf).any(-1, keepdims=True)
    got, _ = attention(q, k, v, mask=mask, causal=causal)
    np.testing.assert_allclose(got, np.where(rows, want, 0), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_tensors_and_numpy_arrays_give_the_same(torch, rng, name, mask):
    q, k, v, mask = problem(rng, mask)
    v[0, 1, 4, 1], v[1, 0, 2, 0], q[0, 0, 3, 0] = math.inf, math.nan, math.nan
    options = {"mask": mask, **OPTIONS[name]}
    of_torch = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    for got, want in zip(attention(*tensors, **of_torch), attention(q, k, v, **options)):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-13)
    narrow = [round_to(x, "bfloat16") for x in (q, k, v)]
    got = flash_rounded(*map(torch.from_numpy, narrow), "bfloat16", **of_torch)
    np.testing.assert_allclose(got.numpy(), flash_rounded(*narrow, "bfloat16", **options), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", OPTIONS)
def test_some_rows_are_those_rows_of_all(rng, name):
    q, k, v, mask = problem(rng, "bool")
    rows = np.array([0, 2, 4])
    whole, whole_lse = attention(q, k, v, mask=mask, **OPTIONS[name])
    some, lse = attention(q[:, :, rows], k, v, mask=mask[:, :, rows], queries=rows, q_len=5, **OPTIONS[name])
    np.testing.assert_allclose(some, whole[:, :, rows], rtol=1e-12)
    np.testing.assert_allclose(lse, whole_lse[:, :, rows], rtol=1e-12)


def test_its_edges():
    one = np.ones((1, 1, 1, 1))
    # q = 100, k = ±100, v = (1, 3e38): the second weighs 0.
    out, lse = attention(100 * one, np.array([100.0, -100.0]).reshape(1, 1, 2, 1), np.array([1.0, 3e38]).reshape(1, 1, 2, 1))
    assert out.item() == 1.0 and lse.item() == 1e4
    # A masked key holds what it likes, an attended one that weighs 0 does not.
    poison = np.array([2.0, math.inf]).reshape(1, 1, 2, 1)
    assert attention(one, np.ones((1, 1, 2, 1)), poison, mask=np.array([True, False]))[0].item() == 2.0
    assert math.isnan(attention(100 * one, np.array([100.0, -100.0]).reshape(1, 1, 2, 1), poison)[0].item())
    # No key: zeros and −inf, with a sink too; no key at all likewise.
    for options in ({"mask": np.array([False])}, {"mask": np.array([False]), "sinks": np.zeros(1)}):
        out, lse = attention(math.nan * one, one, math.nan * one, **options)
        assert out.item() == 0 and lse.item() == -math.inf
    out, lse = attention(one, one[:, :, :0], one[:, :, :0])
    assert out.item() == 0 and lse.item() == -math.inf
    # Scores that are all −inf, by an infinite query, likewise.
    for options in ({}, {"sinks": np.zeros(1)}):
        out, lse = attention(-math.inf * one, one, one, **options)
        assert out.item() == 0 and lse.item() == -math.inf
    # The lowest finite bias is a number: the mean of v.
    lowest = np.full((1, 1, 1, 2), np.finfo(np.float32).min)
    assert attention(one, np.ones((1, 1, 2, 1)), np.array([1.0, 3.0]).reshape(1, 1, 2, 1), mask=lowest)[0].item() == 2.0


def test_the_rule_by_hand():
    want = np.array([[3.0, 4.0], [0.0, 1.0]])
    got = want + [[0.0, 0.5], [0.0, 0.3]]
    whole, worst, rows = _reference.errors(got, want)
    assert whole == pytest.approx(math.hypot(0.5, 0.3) / math.sqrt(26))
    # The second row's norm is 1, the mean row's 3.
    assert rows == pytest.approx([0.1, 0.1]) and worst == pytest.approx(0.1)
    assert _reference.limits("float16", [got], want) == pytest.approx((1.1 * whole + 2**-14, 4 * worst + 2**-14))
    assert _reference.limits("bfloat16", [], want) == (2**-11, 2**-11)
