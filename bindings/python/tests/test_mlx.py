"""`rapt.mlx` on a fake of MLX: what it hands over, and what comes of it, against the reference in f64."""

import sys
from pathlib import Path

import numpy as np
import pytest
import rapt
from rapt._reference import attention as reference

sys.path.insert(0, str(Path(__file__).parents[1] / "tests_mps"))

import fake_mlx  # noqa: E402 - after the path
import metal_host  # noqa: E402


@pytest.fixture
def mx(monkeypatch):
    if not metal_host.has_compiler():
        pytest.skip("no compiler of C++: no text in Metal's language is run")
    monkeypatch.setitem(sys.modules, "mlx", None)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    fake_mlx.calls.clear()
    core = fake_mlx.install()
    core.of = lambda values, name="float32": fake_mlx.Array(np.asarray(values), fake_mlx.DTYPES[name])
    return core


def error(out, want):
    return np.linalg.norm(np.asarray(out.data, np.float64) - want) / np.linalg.norm(want)


def test_views_are_read_where_they_lie(mx, rng):
    import rapt.mlx

    fused = rng.standard_normal((2, 37, 3, 4, 16)).astype(np.float32)
    q, k, v = (fused[:, :, part].transpose(0, 2, 1, 3) for part in range(3))
    mask = np.broadcast_to(rng.random((37, 37)) > 0.3, (37, 37)).T
    out, lse = rapt.mlx.attention(
        mx.of(q), mx.of(k), mx.of(v), mask=mx.of(mask, "bool_"), causal="top_left", window=(20, None), return_lse=True
    )  # fmt: skip
    want, want_lse = reference(*(each.astype(np.float64) for each in (q, k, v)), mask=mask, causal="top_left", window=(20, None))
    assert error(out, np.where(np.isnan(want), 0, want)) < 1e-6 and out.shape == q.shape
    assert np.allclose(lse.data, want_lse, rtol=1e-5)
    [(kernel, call)] = fake_mlx.calls
    assert kernel["input_names"] == ["params", "q", "k", "v", "mask"] and kernel["output_names"] == ["out", "lse"]
    assert (call["grid"], call["threadgroup"]) == ((8 * 256, 1, 1), (256, 1, 1))
    assert call["inputs"][1].data is q


def test_few_queries_are_two_kernels_and_small_vectors_lie_in_constant_memory(mx, rng):
    import rapt.mlx

    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 4, 1, 16), (1, 2, 300, 16), (1, 2, 300, 8)))
    sinks = rng.standard_normal(4).astype(np.float32)
    out = rapt.mlx.attention(mx.of(q), mx.of(k), mx.of(v), sinks=mx.of(sinks), softcap=3.0, scale=0.4)
    want, _ = reference(*(each.astype(np.float64) for each in (q, k, v)), sinks=sinks.astype(np.float64), softcap=3.0, scale=0.4)
    assert error(out, want) < 1e-6
    (first, _), (second, _) = fake_mlx.calls
    assert first["output_names"] == ["partials"] and second["input_names"] == ["params", "sinks", "partials"]
    assert "const constant ushort* sinks;" in second["header"] and first["name"] != second["name"]
    # Another length is the same kernel.
    rapt.mlx.attention(mx.of(q), mx.of(k[:, :, :99]), mx.of(v[:, :, :99]), sinks=mx.of(sinks), softcap=3.0, scale=0.4)
    assert fake_mlx.calls[2][0] is first


def test_what_mlx_cannot_is_refused(mx, rng):
    import rapt.mlx

    q = mx.of(rng.standard_normal((1, 2, 4, 8)).astype(np.float32))
    for given, kind, said in [
        ({"out": q}, rapt.OptionError, "new arrays"),
        ({"causal": "lower"}, rapt.OptionError, "top_left"),
        ({"mask": np.ones((4, 4), bool)}, rapt.KindError, "mlx array"),
    ]:
        with pytest.raises(kind, match=said):
            rapt.mlx.attention(q, q, q, **given)
    with pytest.raises(rapt.UnsupportedError, match="no 64-bit floats"):
        double = mx.of(np.zeros((1, 2, 4, 8)), "float64")
        rapt.mlx.attention(double, double, double)
    with pytest.raises(rapt.ShapeError, match="head_dim"):
        rapt.mlx.attention(q, mx.of(np.zeros((1, 2, 4, 9), np.float32)), q)
    assert not fake_mlx.calls


def test_elements_too_far_apart_give_nan_and_not_anothers_numbers(mx, rng):
    import rapt.mlx

    q = rng.standard_normal((1, 2, 4, 8)).astype(np.float32)
    far = np.lib.stride_tricks.as_strided(q, q.shape, (0, 0, 4 << 31, 4))
    out = rapt.mlx.attention(mx.of(q), mx.of(far), mx.of(q))
    assert np.isnan(out.data).all()
    near = np.lib.stride_tricks.as_strided(q, q.shape, (0, 0, 0, 4))
    assert np.isfinite(rapt.mlx.attention(mx.of(q), mx.of(near), mx.of(q)).data).all()
