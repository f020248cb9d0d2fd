"""`rapt.attention(..., compute="int8")`: against its definition in numpy, against attention on the codes, and what is refused."""

import numpy as np
import pytest
import rapt

BLOCK = 128


def codes(x, granularity):
    found = rapt.quantize(x, "int8", granularity=granularity)
    return found.codes.astype(np.int64), found.scale.reshape(*found.scale.shape, *[1] * (x.ndim - found.scale.ndim)), found


def definition(q, k, v, allowed):
    """docs/reference/numerics.md, Products of int8: k by token, v by channel; and what hangs on codes of p next to a tie."""
    (kc, kf, _), (vc, vf, _) = codes(k, "token"), codes(v, "channel")
    scale = np.maximum(np.abs(q).max(-1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
    qc = np.rint(q / scale).astype(np.int64)
    group = q.shape[1] // k.shape[1]
    kc, kf, vc, vf = (np.repeat(x, group, 1) for x in (kc, kf, vc, vf))
    x = (qc @ kc.swapaxes(-1, -2)).astype(np.float32) * kf.swapaxes(-1, -2)
    s = np.where(allowed, x.astype(np.float64) * scale / np.sqrt(q.shape[-1]), -np.inf)
    m = s.max(-1, keepdims=True)
    out, total, near = 0.0, 0.0, 0.0
    for at in range(0, k.shape[2], BLOCK):
        part = s[..., at : at + BLOCK]
        top = part.max(-1, keepdims=True)
        p = np.exp(part - np.where(np.isinf(top), 0, top))
        weight = np.exp(top - m)
        out = out + weight * (np.rint(255 * p) @ vc[:, :, at : at + BLOCK])
        total = total + weight * p.sum(-1, keepdims=True)
        is_near = np.abs(255 * p % 1 - 0.5) < 1e-3
        near = near + weight * (is_near @ np.abs(vc[:, :, at : at + BLOCK]))
    return out / 255 / total * vf, near / 255 / total * vf


@pytest.fixture
def tensors(rng):
    q = rng.standard_normal((2, 4, 45, 40), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 2, 300, 40), dtype=np.float32)
    return q, k, v


@pytest.mark.parametrize("lib", ["numpy", "torch"])
def test_it_is_the_definition(tensors, lib):
    q, k, v = tensors
    allowed = np.arange(300) <= np.arange(45)[:, None] + 255
    expected, near = definition(q, k, v, allowed)
    qk, qv = rapt.quantize(k, "int8", granularity="token"), rapt.quantize(v, "int8", granularity="channel")
    of = {"causal": "bottom_right", "compute": "int8"}
    if lib == "numpy":
        out, lse = rapt.attention(q, qk, qv, return_lse=True, **of)
    else:
        torch = pytest.importorskip("torch")
        parts = [torch.from_numpy(np.asarray(x)) for x in (q, qk.codes, qv.codes, qk.scale, qv.scale)]
        out, lse = (
            x.numpy()
            for x in rapt.attention(*parts[:3], k_descale=parts[3], v_descale=parts[4], return_lse=True, **of)
        )
        compiled = torch.compile(
            lambda q, k, v, kd, vd: rapt.attention(q, k, v, k_descale=kd, v_descale=vd, **of), fullgraph=True, backend="eager"
        )
        assert np.array_equal(compiled(*parts).numpy(), out)
    assert (np.abs(out - expected) <= near + 1e-5).all()
    exact, exact_lse = rapt.attention(q, qk, qv, causal="bottom_right", return_lse=True)
    off = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    assert 1e-3 < off < 2e-2
    assert np.abs(lse - exact_lse).max() < 2e-2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_16_bits_and_any_strides(tensors, dtype):
    import ml_dtypes

    q, k, v = tensors
    q = q.astype(getattr(ml_dtypes, dtype, None) or dtype)
    qk, qv = rapt.quantize(k, "int8", granularity="head"), rapt.quantize(v, "int8")
    out = rapt.attention(q, qk, qv, compute="int8")
    assert out.dtype == q.dtype
    wide = rapt.attention(q.astype(np.float32), qk, qv, compute="int8")
    assert np.array_equal(out, wide.astype(q.dtype))
    turned = np.ascontiguousarray(q.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0)
    moved = np.ascontiguousarray(qk.codes.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    with rapt.Context(threads=1) as context:
        again = context.attention(turned, moved, qv, k_descale=qk.scale, compute="int8")
    assert np.array_equal(out, again)


def test_it_is_used_when_asked_for_and_counted_and_explained(tensors):
    q, k, v = tensors
    qk, qv = rapt.quantize(k, "int8", granularity="token"), rapt.quantize(v, "int8", granularity="channel")
    rapt.quant.reset_stats()
    plain = rapt.attention(q, qk, qv)
    assert np.array_equal(plain, rapt.attention(q, qk, qv, compute="exact"))
    assert rapt.quant.stats()["int8_calls"] == 0
    assert not np.array_equal(plain, rapt.attention(q, qk, qv, compute="int8"))
    assert rapt.quant.stats()["int8_calls"] == 1
    plan = rapt.explain(q, qk, qv, compute="int8")
    assert (plan.kernel, plan.compute, plan.p_rounding, plan.block_n) == ("forward_int8", "int8", "block", BLOCK)
    assert plan.to_dict()["compute"] == "int8"
    assert "int8, an approximation" in str(plan)
    exact = rapt.explain(q, qk, qv)
    assert exact.compute == "exact" and "approximation" not in str(exact)


def test_refusals_name_what_to_write_instead(tensors):
    q, k, v = tensors
    token, channel = (rapt.quantize(x, "int8", granularity=g) for x, g in ((k, "token"), (v, "channel")))
    rows = [
        ((q, k, channel), "int8", "quantize k to int8 by tensor, head or token"),
        ((q, token, v), "int8", "quantize v to int8 by tensor, head or channel"),
        ((q, token, token), "int8", "with v of int8 codes by token"),
        ((q, channel, channel), "int8", "with k of int8 codes by channel"),
        ((q, rapt.quantize(k, "e4m3fn"), channel), "int8", "with k of e4m3fn codes"),
        ((q.astype(np.float64), token, channel), "int8", "give q in float32"),
        ((q, token, channel), "fp8", 'compute="fp8" on cpu'),
    ]
    for operands, compute, words in rows:
        for call in (rapt.attention, rapt.explain):
            with pytest.raises(rapt.UnsupportedError, match="compute=|float64") as caught:
                call(*operands, compute=compute)
            assert words in str(caught.value)
    kept = [rapt.quantize(x, "int8", granularity=g, keep_original=True) for x, g in ((k, "token"), (v, "channel"))]
    with pytest.raises(rapt.UnsupportedError, match='tolerance with compute="int8"'):
        rapt.attention(q, *kept, compute="int8", tolerance=0.1)
    for wrong in ("INT8", 8, True, "bf16"):
        with pytest.raises(rapt.OptionError, match="'exact', 'int8'"):
            rapt.attention(q, token, channel, compute=wrong)
