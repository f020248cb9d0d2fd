"""`tolerance=`: held against numpy in float64, and against plain calls bit by bit."""

import copy
import pickle

import numpy as np
import pytest
import rapt

KAPPA = 5.0


def quantized(x, fmt="int8", granularity="token", **options):
    return rapt.quantize(x, fmt, granularity=granularity, **options)


def normals(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def brute_force(q, k, v, scale):
    """Of each query head: ε, the estimate and both bounds in relative L2, from the originals alone."""
    kq, vq = (x.dequantize().astype(np.float64) for x in (k, v))
    q, k, v = (x.astype(np.float64) for x in (q, k.original, v.original))
    group = q.shape[1] // k.shape[1]
    found = {}
    for b, h in np.ndindex(q.shape[:2]):
        kh, vh, kqh, vqh = (x[b, h // group] for x in (k, v, kq, vq))
        ek, ev = kh - kqh, vh - vqh
        a, bb = np.linalg.norm(ek, axis=1), np.linalg.norm(ev, axis=1)
        center = vh.mean(0).astype(np.float32).astype(np.float64)
        r = np.linalg.norm(vh - center, axis=1)
        share = (ek**2).sum(0) / (ek**2).sum()

        def coherence(e, x):
            of = (e**2).sum(0) / (e**2).sum()
            x = x - x.mean(0)
            multiple = (((e - e.mean(0)) * x).sum(0) ** 2 / (x**2).sum(0)).sum() / (e**2).sum()
            lean = max(0, len(e) * multiple - 1 - 6 * np.sqrt(2 * (of**2).sum()))
            e = e - e.mean(0)
            e = e / np.linalg.norm(e, axis=1, keepdims=True)
            products = e.T @ e
            np.fill_diagonal(products, 0)
            form = np.einsum("jc,cd,jd->j", e, products, e)
            most = (form - 6 * np.sqrt(2 * len(e)) * (e**2 @ of)).max()
            return max(form.mean(), most, 1 - (of**2).sum()) / (1 - (of**2).sum()) + lean / 12

        m_k, m_v, bias = coherence(ek, kh), coherence(ev, vh), np.linalg.norm(ev.mean(0))
        squares = np.zeros(3)
        norm2 = epsilon = 0.0
        for row in q[b, h]:
            s = kqh @ row * scale
            p = np.exp(s - s.max())
            p /= p.sum()
            o = p @ vqh
            e = abs(scale) * np.linalg.norm(row) * a
            away = np.linalg.norm(vqh - o, axis=1)
            estimate = scale**2 * (share * row**2).sum() * m_k * (p**2 * a**2 * away**2).sum() + m_v * (p**2 * bb**2).sum() + bias**2
            before = 2 * np.tanh(e.max() / 2) * r.max() + bb.max()
            big_a, big_b, big_c, phi = p @ e, p @ (e * r), p @ bb, np.expm1(e.max()) / e.max()
            after = np.inf
            if phi * big_a < 1:
                after = big_c + phi * (big_b + big_a * (np.linalg.norm(o - center) + big_c)) / (1 - phi * big_a)
            squares += estimate, before**2, after**2
            norm2 += o @ o
            epsilon = max(epsilon, e.max())
        norm = np.sqrt(norm2)
        estimate = KAPPA * np.sqrt(squares[0] + 1e-12 * norm2 / 3)
        bound = np.sqrt(min(squares[1], squares[2])) + 1e-6 * norm

        def relative(x, norm=norm):
            return x / (norm - x) if x < norm else np.inf

        found[b, h] = epsilon, relative(estimate), relative(bound)
    return found


@pytest.mark.parametrize(("fmt", "granularity"), [("int8", "token"), ("int8", "channel"), ("uint8", "head"), ("e4m3fn", "tensor"), ("mxfp4", None)])
def test_what_explain_says_is_what_numpy_finds(fmt, granularity):
    q, k, v = normals(1, 2, 4, 7, 32), normals(2, 2, 2, 90, 32), normals(3, 2, 2, 90, 24)
    k, v = (quantized(x, fmt, granularity, keep_original=True) for x in (k, v))
    plan = rapt.explain(q, k, v, scale=0.2, tolerance=0.3)
    expected = brute_force(q, k, v, 0.2)
    said = plan.tolerance
    for head in said["heads"]:
        epsilon, estimate, bound = expected[head["batch"], head["head"]]
        assert head["epsilon"] == pytest.approx(epsilon, rel=1e-4)
        assert head["estimate"] == pytest.approx(estimate, rel=1e-2)
        assert head["bound"] == pytest.approx(bound, rel=1e-2)
    assert said["limit"] == 0.3 and said["quantized"] + said["fell_back"] == 8
    assert said["worst_estimate"] == max(head["estimate"] for head in said["heads"])
    assert plan.to_dict()["tolerance"] == said
    assert f"heads on the codes {said['quantized']}" in str(plan) and "rigorous bound" in str(plan)
    assert rapt.explain(q, k, v).tolerance is None


def test_heads_fall_back_to_the_bits_of_the_originals_and_are_counted():
    q, k, v = normals(4, 1, 3, 40, 64), normals(5, 1, 3, 200, 64), normals(6, 1, 3, 200, 64)
    q[0, 1] *= 40
    qk, qv = (quantized(x, keep_original=True) for x in (k, v))
    assert qk.original is k and qk.errors.shape == (3, 200, 64)
    assert qk.errors.nbytes == 4 * 3 * (2 * 200 + 2 * 64 + 2)
    rapt.quant.reset_stats()
    out, lse = rapt.attention(q, qk, qv, tolerance=0.1, causal=True, return_lse=True)
    assert rapt.quant.stats() | {"worst_estimate": 0, "worst_bound": 0} == {
        "calls": 1,
        "refused": 0,
        "quantized": 2,
        "fell_back": 1,
        "worst_estimate": 0,
        "worst_bound": 0,
        "int8_calls": 0,
    }
    on_codes, lse_codes = rapt.attention(q, qk, qv, causal=True, return_lse=True)
    on_originals, lse_originals = rapt.attention(q, k, v, causal=True, return_lse=True)
    for head, expected, expected_lse in [(0, on_codes, lse_codes), (1, on_originals, lse_originals), (2, on_codes, lse_codes)]:
        assert np.array_equal(out[0, head], expected[0, head]) and np.array_equal(lse[0, head], expected_lse[0, head])
    with rapt.Context(threads=1) as context:
        assert np.array_equal(context.attention(q, qk, qv, tolerance=0.1, causal=True), out)
        assert context.explain(q, qk, qv, tolerance=0.1, causal=True).tolerance["fell_back"] == 1
    given = np.full_like(out, np.nan)
    assert rapt.attention(q, qk, qv, tolerance=0.1, causal=True, out=given) is given and np.array_equal(given, out)


def test_one_operand_may_be_numbers():
    q, k, v = normals(7, 2, 9, 16), normals(8, 2, 30, 16), normals(9, 2, 30, 16)
    for operands in [(quantized(k, keep_original=True), v), (k, quantized(v, keep_original=True))]:
        assert np.array_equal(rapt.attention(q, *operands, tolerance=0.5), rapt.attention(q, *operands))
        assert np.array_equal(rapt.attention(q, *operands, tolerance=1e-6), rapt.attention(q, k, v))


def test_without_originals_the_head_is_named_and_nothing_is_written():
    q, k, v = normals(10, 1, 2, 5, 16), normals(11, 1, 2, 30, 16), normals(12, 1, 2, 30, 16)
    q[0, 1] *= 60
    qk, qv = (quantized(x, measure_errors=True) for x in (k, v))
    assert qk.original is None and qk.errors is not None
    out = np.full_like(q, 7)
    rapt.quant.reset_stats()
    with pytest.raises(rapt.NumberError, match="head 1 of batch 0 .* keep_original=True"):
        rapt.attention(q, qk, qv, tolerance=0.2, out=out)
    assert (out == 7).all() and rapt.quant.stats()["refused"] == 1
    said = rapt.explain(q, qk, qv, tolerance=0.2).tolerance
    assert [head["quantized"] for head in said["heads"]] == [True, False]


def test_what_is_refused_by_name():
    q, k, v = normals(13, 1, 2, 5, 16), normals(14, 1, 2, 30, 16), normals(15, 1, 2, 30, 16)
    qk, qv = (quantized(x, keep_original=True) for x in (k, v))
    for wrong in (0, -1.0, float("nan"), float("inf"), "0.1", True):
        with pytest.raises(rapt.OptionError, match="tolerance"):
            rapt.attention(q, qk, qv, tolerance=wrong)
    with pytest.raises(rapt.OptionError, match="neither k nor v is quantized"):
        rapt.attention(q, k, v, tolerance=0.1)
    with pytest.raises(rapt.OptionError, match="k carries no measured errors"):
        rapt.attention(q, quantized(k), qv, tolerance=0.1)
    with pytest.raises(rapt.UnsupportedError, match="quantized q"):
        rapt.attention(quantized(q), qk, qv, tolerance=0.1, out_dtype="float32")
    with pytest.raises(rapt.UnsupportedError, match="bshd"):
        rapt.attention(normals(13, 1, 2, 30, 16), qk, qv, tolerance=0.1, layout="bshd")
    with pytest.raises(rapt.ShapeError):
        rapt.Quantized(qk.codes, qk.scale, format="int8", granularity="token", shape=k.shape, original=k[:, :, 1:])
    with pytest.raises(rapt.KindError):
        rapt.Quantized(qk.codes, qk.scale, format="int8", granularity="token", shape=k.shape, original=k.tolist())


def test_errors_travel_with_the_tensor():
    x = normals(16, 2, 30, 16)
    made = quantized(x, keep_original=True)
    again = rapt.Quantized(made.codes, made.scale, format="int8", granularity="token", shape=x.shape, original=x)
    assert again.errors.matrix(1) == made.errors.matrix(1)
    for other in (pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert other.errors.matrix(0) == made.errors.matrix(0) and np.array_equal(other.original, x)
    of = made.errors.matrix(0)
    error = np.linalg.norm(x[0].astype(np.float64) - made.dequantize()[0], axis=1)
    assert np.allclose(of["error"], error, rtol=1e-6) and (np.array(of["error"]) >= error).all()
    assert sum(of["share"]) == pytest.approx(1, rel=1e-5)
    with pytest.raises(IndexError):
        made.errors.matrix(2)


def test_torch_tensors_are_held_by_reference():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(normals(seed, 1, 2, n, 32)).bfloat16() for seed, n in [(17, 40), (18, 60), (19, 60)])
    qk, qv = (quantized(x.transpose(1, 2).contiguous().transpose(1, 2), keep_original=True) for x in (k, v))
    loose = rapt.attention(q, qk, qv, tolerance=0.5)
    assert torch.equal(loose, rapt.attention(q, qk, qv))
    strict = rapt.attention(q, qk, qv, tolerance=1e-5)
    assert torch.equal(strict, rapt.attention(q, k, v)) and strict.dtype == torch.bfloat16
    assert rapt.explain(q, qk, qv, tolerance=0.5).tolerance["worst_estimate"] > 1 / 256 / 2, "rounding to bfloat16 is counted"
    with pytest.raises(rapt.DtypeMismatchError, match="k has dtype"):
        rapt.attention(q.float(), qk, qv, tolerance=1e-5)
    traced = torch.compile(lambda q: rapt.attention(q, k, v, tolerance=0.1), backend="eager", fullgraph=False)
    with pytest.raises((rapt.UnsupportedError, rapt.OptionError)):
        traced(q)


def test_a_quantized_tensor_is_moved_with_what_stands_behind_it():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(normals(20, 1, 2, 30, 16))
    for fmt in ("uint8", "int4", "nvfp4"):
        made = rapt.quantize(x, fmt, keep_original=True)
        here = made.to("cpu")
        assert here.original is x and here.errors is made.errors and here.codes is made.codes, "torch copies nothing that is there"
        assert all(getattr(here, name) == getattr(made, name) for name in ("format", "shape", "granularity", "block_size", "global_scale"))
    with pytest.raises(rapt.DeviceError, match="meta"):
        made.to("meta")
    with pytest.raises(rapt.KindError, match="torch.from_numpy"):
        quantized(normals(20, 2, 30, 16)).to("cpu")
