"""Codes in `rapt.varlen_attention`, and `compute="int8"` there and in `rapt.attention_with_kvcache`: against the f64 reference on the numbers
of the codes, and bit for bit what `rapt.attention` gives for each sequence alone; what is counted, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
import rapt
from reference import assert_close, assert_lse_close, flash_rounded, reference, to_f64

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 24, 16
Q_LENS, KV_LENS = [3, 1, 0, 40, 2, 7], [9, 300, 5, 40, 0, 600]
FORMATS = [
    ("int8", "token", None), ("int8", "tensor", None), ("int8", "block", 8), ("uint8", "token", None), ("int4", "block", 5),
    ("e4m3fn", "token", None), ("e5m2", "block", 4), ("mxfp8", None, None), ("mxfp4", None, None), ("nvfp4", None, None),
]  # fmt: skip


class Numpy:
    contiguous = staticmethod(np.ascontiguousarray)

    def of(self, x):
        return x

    def bytes(self, x):
        return np.ascontiguousarray(x).tobytes()


class Torch:
    def contiguous(self, x):
        return x.contiguous()

    def of(self, x):
        import torch

        x = np.array(x)
        return torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).view(getattr(torch, x.dtype.name)).reshape(x.shape)

    def bytes(self, x):
        import torch

        return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(params=["numpy", "torch"])
def lib(request):
    if request.param == "torch":
        pytest.importorskip("torch")
    return {"numpy": Numpy, "torch": Torch}[request.param]()


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def offsets(lengths):
    return np.cumsum([0, *lengths], dtype=np.int32)


def sequences():
    """The rows and the keys of each sequence."""
    of_q, of_kv = offsets(Q_LENS), offsets(KV_LENS)
    return [(slice(of_q[n], of_q[n + 1]), slice(of_kv[n], of_kv[n + 1])) for n in range(len(Q_LENS))]


def packed(rng):
    q = rng.standard_normal((sum(Q_LENS), HEADS, DIM), dtype=np.float32)
    k, v = (rng.standard_normal((sum(KV_LENS), KV_HEADS, dim), dtype=np.float32) for dim in (DIM, DIM_V))
    return q, k, v


def cut(it, rows):
    """Rows of a `Quantized`."""
    by_row = it.granularity in ("token", "block")
    return rapt.Quantized(
        it.codes[rows],
        it.scale[rows] if by_row else it.scale,
        format=it.format,
        granularity=it.granularity,
        block_size=it.block_size,
        zero_point=it.zero_point[rows] if by_row and it.zero_point is not None else it.zero_point,
        global_scale=it.global_scale,
        shape=(it.codes[rows].shape[0], *it.shape[1:]),
    )


@pytest.mark.parametrize(("format", "granularity", "block_size"), FORMATS)
def test_codes_of_each_sequence_have_the_bits_of_a_call_alone_within_the_tolerance(rng, lib, format, granularity, block_size):
    q, *both = packed(rng)
    k, v = (rapt.quantize(lib.of(x), format, granularity=granularity, block_size=block_size) for x in both)
    of_q, of_kv = lib.of(offsets(Q_LENS)), lib.of(offsets(KV_LENS))
    options = {"causal": "bottom_right", "return_lse": True}
    out, lse = rapt.varlen_attention(lib.of(q), k, v, of_q, of_kv, **options)
    numbers = [to_f64(x.dequantize()).astype(np.float32) for x in (k, v)]
    for rows, keys in sequences():
        one, one_lse = rapt.attention(lib.of(q[rows]), cut(k, keys), cut(v, keys), layout="bshd", **options)
        assert lib.bytes(out[rows]) == lib.bytes(one) and lib.bytes(lse[:, rows]) == lib.bytes(one_lse)
        if rows.start == rows.stop or keys.start == keys.stop:
            assert not to_f64(out[rows]).any()
            continue
        of = [x.transpose(1, 0, 2)[None] for x in (q[rows], numbers[0][keys], numbers[1][keys])]
        expected, expected_lse = reference(*of, causal="bottom_right")
        got = to_f64(out[rows]).transpose(1, 0, 2)[None]
        assert_close(got, expected, "float32", [flash_rounded(*of, causal="bottom_right")])
        assert_lse_close(to_f64(lse[:, rows])[None], expected_lse, "float32")


def test_raw_codes_are_a_quantized_and_their_strides_do_not_matter(rng, lib):
    q, *both = packed(rng)
    k, v = (rapt.quantize(lib.of(x), "uint8", granularity="token") for x in both)
    ends = lib.of(offsets(Q_LENS)), lib.of(offsets(KV_LENS))
    out = rapt.varlen_attention(lib.of(q), k, v, *ends)
    of = {
        f"{name}_{part}": getattr(it, at)
        for name, it in (("k", k), ("v", v))
        for part, at in (("descale", "scale"), ("zero_point", "zero_point"))
    }
    assert lib.bytes(rapt.varlen_attention(lib.of(q), k.codes, v.codes, *ends, **of)) == lib.bytes(out)
    turned = {name: lib.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1) for name, x in of.items()}
    codes = [lib.contiguous(x.codes.swapaxes(0, 2)).swapaxes(0, 2) for x in (k, v)]
    assert lib.bytes(rapt.varlen_attention(lib.of(q), *codes, *ends, **turned)) == lib.bytes(out)
    with rapt.Context(threads=1) as context:
        assert lib.bytes(context.varlen_attention(lib.of(q), k, v, *ends)) == lib.bytes(out)
    queries = rapt.quantize(lib.of(q), "int8", granularity="token")
    out = rapt.varlen_attention(queries, k, v, *ends, out_dtype="float16")
    raw = rapt.varlen_attention(queries.codes, k, v, *ends, q_descale=queries.scale, out_dtype="float16")
    assert str(out.dtype).endswith("float16") and lib.bytes(out) == lib.bytes(raw)
    for rows, keys in sequences():
        one = rapt.attention(cut(queries, rows), cut(k, keys), cut(v, keys), layout="bshd", out_dtype="float16")
        assert lib.bytes(out[rows]) == lib.bytes(one)


def int8_operands(rng, lib, shape_k, shape_v, of_v):
    """k by token and v with factors of shape `of_v`; codes and factors."""
    k = rapt.quantize(lib.of(rng.standard_normal(shape_k, dtype=np.float32)), "int8", granularity="token")
    v = rapt.quantize(lib.of(rng.standard_normal(shape_v, dtype=np.float32)), "int8")
    factors = (0.02 + 0.01 * rng.random(of_v)).astype(np.float32)
    return k, v.codes, lib.of(np.asarray(factors))


@pytest.mark.parametrize("of_v", [(), (KV_HEADS,), (1, KV_HEADS, DIM_V)], ids=["tensor", "head", "channel"])
def test_products_of_int8_of_each_sequence_are_those_of_a_call_alone(rng, lib, of_v):
    q = rng.standard_normal((sum(Q_LENS), HEADS, DIM), dtype=np.float32)
    k, v, v_descale = int8_operands(rng, lib, (sum(KV_LENS), KV_HEADS, DIM), (sum(KV_LENS), KV_HEADS, DIM_V), of_v)
    ends = lib.of(offsets(Q_LENS)), lib.of(offsets(KV_LENS))
    options = {"causal": "bottom_right", "softcap": 3.0, "v_descale": v_descale, "return_lse": True}
    exact, _ = rapt.varlen_attention(lib.of(q), k, v, *ends, **options)
    rapt.quant.reset_stats()
    assert lib.bytes(rapt.varlen_attention(lib.of(q), k, v, *ends, compute="exact", **options)[0]) == lib.bytes(exact)
    assert rapt.quant.stats()["int8_calls"] == 0
    out, lse = rapt.varlen_attention(lib.of(q), k, v, *ends, compute="int8", **options)
    assert rapt.quant.stats()["int8_calls"] == 1
    exact, got = to_f64(exact), to_f64(out)
    assert 1e-3 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 2e-2
    for rows, keys in sequences():
        one, one_lse = rapt.attention(lib.of(q[rows]), cut(k, keys), v[keys], layout="bshd", compute="int8", **options)
        assert lib.bytes(out[rows]) == lib.bytes(one) and lib.bytes(lse[:, rows]) == lib.bytes(one_lse)
    plan = rapt.explain(lib.of(q[-7:]), cut(k, slice(-600, None)), v[-600:], layout="bshd", compute="int8", **options)
    assert (plan.kernel, plan.compute) == ("forward_int8", "int8") and "int8, an approximation" in str(plan)


@pytest.mark.parametrize("of_v", [(), (3, KV_HEADS), (3, 1, KV_HEADS, DIM_V)], ids=["tensor", "head", "channel"])
@pytest.mark.parametrize("page_size", [None, 1, 4, 64])
@pytest.mark.parametrize("q_len", [1, 5, 16])
def test_products_of_int8_in_a_cache_are_those_of_a_call_alone(rng, lib, page_size, q_len, of_v):
    lengths, room = [0, 33, 192], 192
    blocks, rows = (3, room) if page_size is None else (3 * room // page_size, page_size)
    table = None if page_size is None else rng.permutation(blocks).reshape(3, -1).astype(np.int32)
    k, v, v_descale = int8_operands(rng, lib, (blocks, rows, KV_HEADS, DIM), (blocks, rows, KV_HEADS, DIM_V), of_v)
    q = lib.of(rng.standard_normal((3, q_len, HEADS, DIM), dtype=np.float32))
    call = {"cache_seqlens": lib.of(np.array(lengths, np.int32)), "v_descale": v_descale, "causal": True}
    call |= {} if table is None else {"page_table": lib.of(table)}
    rapt.quant.reset_stats()
    exact = rapt.attention_with_kvcache(q, k, v, **call)
    assert rapt.quant.stats()["int8_calls"] == 0
    out, lse = rapt.attention_with_kvcache(q, k, v, compute="int8", return_lse=True, **call)
    assert rapt.quant.stats()["int8_calls"] == 1
    with rapt.Context(threads=1) as context:
        assert lib.bytes(context.attention_with_kvcache(q, k, v, compute="int8", **call)) == lib.bytes(out)
    exact, got = to_f64(exact), to_f64(out)
    assert 1e-3 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 2e-2
    for b, length in enumerate(lengths):
        where = [(b, j) if table is None else (table[b, j // page_size], j % page_size) for j in range(length)]
        at = tuple(np.array(where, np.int64).reshape(-1, 2).T)
        factors = v_descale if not of_v else v_descale[b]
        one, one_lse = rapt.attention(
            q[b], k.codes[at], v[at], k_descale=k.scale[at], v_descale=factors,
            layout="bshd", causal="bottom_right", compute="int8", return_lse=True,
        )  # fmt: skip
        assert lib.bytes(out[b]) == lib.bytes(one) and lib.bytes(lse[b]) == lib.bytes(one_lse), b


def test_new_keys_join_a_cache_that_is_attended_with_products_of_int8(rng):
    """Keys by token and values by the factor of the tensor become codes, and then these are attended."""
    k_cache, v_cache = np.zeros((2, 8, KV_HEADS, DIM), np.int8), np.zeros((2, 8, KV_HEADS, DIM_V), np.int8)
    k_descale, v_descale = np.zeros((2, 8, KV_HEADS), np.float32), np.full((), 0.03, np.float32)
    k, v = (rng.standard_normal((2, 5, KV_HEADS, dim), dtype=np.float32) for dim in (DIM, DIM_V))
    q = rng.standard_normal((2, 5, HEADS, DIM), dtype=np.float32)
    of = {"k_descale": k_descale, "v_descale": v_descale, "causal": True, "compute": "int8"}
    out = rapt.attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, **of)
    keys, values = rapt.quantize(k, "int8", granularity="token"), rapt.quantize(v, "int8", scale=v_descale)
    assert np.array_equal(k_cache[:, :5], keys.codes) and np.array_equal(v_cache[:, :5], values.codes)
    assert np.array_equal(out, rapt.attention(q, keys, values, layout="bshd", causal="bottom_right", compute="int8"))


def refusals(rng):
    q, k, v = packed(rng)
    token, tensor = rapt.quantize(k, "int8", granularity="token"), rapt.quantize(v, "int8")
    by_token = rapt.quantize(v, "int8", granularity="token")
    rows = sum(KV_LENS)
    scale = token.scale
    return [
        ((q, k, v), {"compute": "int8"}, rapt.UnsupportedError, "with k that is no codes.*quantize k to int8"),
        ((q, token, by_token), {"compute": "int8"}, rapt.UnsupportedError, "with v of int8 codes by token.*by tensor, head or channel"),
        ((q, token, tensor), {"compute": "fp8"}, rapt.UnsupportedError, 'compute="fp8" on cpu'),
        ((q, token, tensor), {"compute": "INT8"}, rapt.OptionError, "'exact', 'int8'"),
        ((q, token.codes, tensor), {}, rapt.UnsupportedDtypeError, "k is int8 codes, which are no numbers without k_descale"),
        ((q, token.codes, tensor), {"k_descale": scale[1:]}, rapt.ShapeError, rf"k_descale has shape \[{rows - 1}, 2\]"),
        ((q, token.codes, tensor), {"k_descale": scale[: len(Q_LENS)]}, rapt.ShapeError, r"k_descale has shape \[6, 2\]"),
        ((q, token, tensor), {"k_descale": scale}, rapt.OptionError, "k_descale = a .*None: what it belongs to"),
        ((q, k, v), {"k_descale": scale}, rapt.OptionError, "k_descale was given, and k has dtype float32"),
        ((q, token.codes, tensor), {"k_descale": scale.astype(np.float64)}, rapt.DtypeMismatchError, "k_descale has dtype float64"),
        ((q, rapt.quantize(k, "int8", granularity="head"), tensor), {}, rapt.OptionError, "granularity = head"),
        ((rapt.quantize(q, "int8"), token, tensor), {}, rapt.OptionError, "out_dtype"),
    ]


def test_what_is_refused_has_written_nothing_and_is_not_counted(rng):
    ends = offsets(Q_LENS), offsets(KV_LENS)
    for (q, k, v), options, error, says in refusals(rng):
        out = np.full((sum(Q_LENS), HEADS, DIM_V), 7, np.float32)
        rapt.quant.reset_stats()
        given = {} if says == "out_dtype" else {"out": out}
        with pytest.raises(error, match=says):
            rapt.varlen_attention(q, k, v, *ends, **given, **options)
        assert (out == 7).all() and rapt.quant.stats()["int8_calls"] == 0, says
    cache = rng.standard_normal((2, 8, KV_HEADS, DIM), dtype=np.float32)
    q = rng.standard_normal((2, 1, HEADS, DIM), dtype=np.float32)
    codes = rapt.quantize(cache, "int8", granularity="token")
    for caches, compute, error, says in [
        ((cache, cache), "int8", rapt.UnsupportedError, "with k that is no codes"),
        ((codes, codes), "int8", rapt.UnsupportedError, "with v of int8 codes by token"),
        ((codes, codes), "fp8", rapt.UnsupportedError, 'compute="fp8" on cpu'),
        ((codes, codes), 8, rapt.OptionError, "'exact', 'int8'"),
    ]:
        with pytest.raises(error, match=says):
            rapt.attention_with_kvcache(q, *caches, compute=compute)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_16_bits(rng, dtype):
    q, k, v = packed(rng)
    q = q.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    k, v = rapt.quantize(k, "int8", granularity="token"), rapt.quantize(v, "int8")
    ends = offsets(Q_LENS), offsets(KV_LENS)
    for compute in ("exact", "int8"):
        out = rapt.varlen_attention(q, k, v, *ends, compute=compute)
        assert out.dtype == q.dtype
        for rows, keys in sequences():
            one = rapt.attention(q[rows], cut(k, keys), cut(v, keys), layout="bshd", compute=compute)
            assert out[rows].tobytes() == one.tobytes()
