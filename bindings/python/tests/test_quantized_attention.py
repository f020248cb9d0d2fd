"""`rapt.attention` on codes of q, k and v: against the f64 reference on the numbers that they stand for, numpy and torch."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import rapt
from reference import assert_close, assert_lse_close, flash_rounded, reference, to_f64

RAW = {"int8": np.int8, "uint8": np.uint8, "e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
GRANULARITIES = ("tensor", "head", "token", "channel", "block")
PACKED = ("int4", "mxfp8", "mxfp4", "nvfp4")


class Numpy:
    def of(self, x):
        return x

    def strided(self, x, how):
        """The same elements, permuted, sliced or backwards in memory."""
        if how == "permuted" and x.ndim == 4:
            return np.ascontiguousarray(x.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0)
        if how == "sliced" and x.ndim:
            wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 1, x.dtype)
            wide[..., 1::2] = x
            return wide[..., 1::2]
        if how == "negative" and x.ndim:
            return np.flip(np.flip(x, -1).copy(), -1)
        return x

    def bytes(self, x):
        return np.ascontiguousarray(x).tobytes()


class Torch:
    def of(self, x):
        import torch

        return torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).view(torch_dtype(x)).reshape(x.shape)

    def strided(self, x, how):
        if how == "permuted" and x.ndim == 4:
            return x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
        if how != "permuted" and x.ndim:
            wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1] + 1))
            wide[..., 1::2].copy_(x)
            return wide[..., 1::2]
        return x

    def bytes(self, x):
        import torch

        return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def torch_dtype(x):
    import torch

    return getattr(torch, x.dtype.name)


@pytest.fixture(params=["numpy", "torch"])
def lib(request):
    """numpy or torch, by what makes its tensors."""
    if request.param == "torch":
        pytest.importorskip("torch")
    return {"numpy": Numpy, "torch": Torch}[request.param]()


def tensors(rng, dtype=np.float32, batch=2, len=9):
    """q, k and v: two query heads on each key head, and values of their own size."""
    q = rng.standard_normal((batch, 4, 5, 32)).astype(dtype)
    k, v = (rng.standard_normal((batch, 2, len, dim)).astype(np.float32) for dim in (32, 16))
    return q, k, v


def quantized(x, format, granularity=None):
    return rapt.quantize(x, format, granularity=granularity, block_size=8 if granularity == "block" else None)


class Numbers:
    """What q, k and v, codes among them, must give: by the definition on the float32 numbers of the codes, in f64."""

    def __init__(self, *operands, dtype="float32", **options):
        q, k, v = (to_f64(it.dequantize() if isinstance(it, rapt.Quantized) else it).astype(np.float32) for it in operands)
        self.added, self.dtype = 4 - q.ndim, dtype
        q, k, v = (x.reshape(*[1] * self.added, *x.shape) for x in (q, k, v))
        self.out, self.lse = reference(q, k, v, **options)
        self.peer = flash_rounded(q.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), k, v, **options)

    def check(self, out):
        got = to_f64(out)
        assert_close(got.reshape(*[1] * self.added, *got.shape), self.out, self.dtype, [self.peer])


def parts(name, it, lib, how="", swap=False):
    """The codes of a `Quantized`, and its scales as arguments: with other strides, in layout bshd if `swap`."""
    codes, given = it.codes, {f"{name}_descale": it.scale, f"{name}_zero_point": it.zero_point}
    if swap:
        codes = codes.swapaxes(1, 2)
        given = {part: x.swapaxes(1, 2) if x is not None and x.ndim > 2 else x for part, x in given.items()}
    given = {part: lib.strided(lib.of(x), how) for part, x in given.items() if x is not None}
    return lib.strided(lib.of(codes), how), given


@pytest.mark.parametrize("format", RAW)
def test_raw_codes_of_every_granularity_and_any_strides(rng, lib, format):
    q, k, v = tensors(rng)
    for granularity in GRANULARITIES:
        keys, values = quantized(k, format, granularity), quantized(v, format, granularity)
        expected = Numbers(q, keys, values)
        for how in ("", "permuted", "sliced", "negative"):
            (k_codes, of_k), (v_codes, of_v) = parts("k", keys, lib, how), parts("v", values, lib, how)
            given = [k_codes, v_codes, *of_k.values(), *of_v.values()]
            before = [lib.bytes(x) for x in given]
            got = rapt.attention(lib.of(q), k_codes, v_codes, **of_k, **of_v)
            assert type(got) is type(k_codes), (granularity, how)
            expected.check(got)
            assert [lib.bytes(x) for x in given] == before, "inputs are read"
        (k_codes, of_k), (v_codes, of_v) = parts("k", keys, lib, swap=True), parts("v", values, lib, swap=True)
        got = rapt.attention(lib.of(q.swapaxes(1, 2)), k_codes, v_codes, **of_k, **of_v, layout="bshd")
        expected.check(to_f64(got).swapaxes(1, 2))


@pytest.mark.parametrize("format", [*RAW, *PACKED])
def test_quantized_in_place_of_each_operand(rng, lib, format):
    q, k, v = tensors(rng)
    mask = rng.random((2, 1, 5, 9)) < 0.7
    options = {"causal": "bottom_right", "scale": 0.3, "softcap": 4.0}
    granularity = "token" if format in (*RAW, "int4") else None
    of = {name: quantized(lib.of(x), format, granularity) for name, x in (("q", q), ("k", k), ("v", v))}
    plain = {"q": q, "k": k, "v": v}
    for codes in ("k", "v", "kv", "qkv"):
        given = {name: of[name] if name in codes else lib.of(x) for name, x in plain.items()}
        expected = Numbers(*(of[name] if name in codes else x for name, x in plain.items()), mask=mask, **options)
        dtype = "float32" if "q" in codes else None
        got, got_lse = rapt.attention(**given, mask=lib.of(mask), out_dtype=dtype, return_lse=True, **options)
        assert type(got) is type(of["q"].codes)
        expected.check(got)
        assert_lse_close(got_lse, expected.lse, "float32")


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_swizzled_scales_give_the_bits_of_scales_in_rows(rng, lib, format):
    for q_len, len, dim, dim_v in ((1, 300, 64, 80), (5, 129, 160, 16), (20, 40, 48, 48)):
        q = rng.standard_normal((2, 4, q_len, dim), dtype=np.float32)
        k, v = (rng.standard_normal((2, 2, len, d), dtype=np.float32) for d in (dim, dim_v))
        plain = [rapt.quantize(lib.of(x), format) for x in (q, k, v)]
        swizzled = [rapt.quantize(lib.of(x), format, scale_layout="swizzle_32_4_4") for x in (q, k, v)]
        options = {"causal": "bottom_right", "return_lse": True, "out_dtype": "float32"}
        for at in itertools.product((False, True), repeat=2):
            keys, values = (swizzled[1 + n] if is_swizzled else plain[1 + n] for n, is_swizzled in enumerate(at))
            expected = Numbers(q, keys, values, causal="bottom_right")
            out, lse = rapt.attention(lib.of(q), keys, values, **options)
            expected.check(out)
            assert_lse_close(lse, expected.lse, "float32")
            in_rows = rapt.attention(lib.of(q), *plain[1:], **options)
            assert [lib.bytes(x) for x in (out, lse)] == [lib.bytes(x) for x in in_rows], at
        both = [rapt.attention(*operands, **options) for operands in (plain, swizzled)]
        assert [lib.bytes(x) for x in both[0]] == [lib.bytes(x) for x in both[1]]
    plan = rapt.explain(lib.of(q), *swizzled[1:])
    assert "swizzled; " in str(plan) and plan.bytes_copied == 0
    assert plan.codes["k"]["scale_bytes"] == 2 * 2 * 512 + (4 if format == "nvfp4" else 0)
    assert plan.workspace_bytes == rapt.explain(lib.of(q), *plain[1:]).workspace_bytes


def test_a_tolerance_is_judged_on_swizzled_scales_too(rng):
    q, k, v = tensors(rng)
    made = [
        [rapt.quantize(x, "mxfp8", keep_original=True, scale_layout=layout) for x in (k, v)] for layout in ("plain", "swizzle_32_4_4")
    ]
    judged = [rapt.explain(q, *kv, tolerance=0.05).tolerance for kv in made]
    assert judged[0] == judged[1] and judged[0]["quantized"] + judged[0]["fell_back"] == 8
    outs = [rapt.attention(q, *kv, tolerance=0.05) for kv in made]
    assert np.array_equal(*outs)


def test_a_quantized_is_its_parts_bit_for_bit(rng, lib):
    q, k, v = (lib.of(x) for x in tensors(rng))
    keys, values = quantized(k, "uint8", "token"), quantized(v, "e5m2", "head")
    raw = {"k_descale": keys.scale, "k_zero_point": keys.zero_point, "v_descale": values.scale}
    got = rapt.attention(q, keys, values)
    assert lib.bytes(rapt.attention(q, keys.codes, values.codes, **raw)) == lib.bytes(got)
    with rapt.Context(threads=1) as context:
        assert lib.bytes(context.attention(q, keys, values)) == lib.bytes(got)
    out = got * 0
    assert rapt.attention(q, keys, values, out=out) is out and lib.bytes(out) == lib.bytes(got)
    queries = quantized(q, "uint8", "tensor")
    of_q = {"q_descale": queries.scale, "q_zero_point": queries.zero_point, "out_dtype": "float16"}
    got = rapt.attention(queries, keys, values, out_dtype="float16")
    assert lib.bytes(rapt.attention(queries.codes, keys, values, **of_q)) == lib.bytes(got)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_16_bits(rng, lib, dtype):
    q, k, v = tensors(rng, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for format in ("int8", "e4m3fn", "mxfp4"):
        keys, values = quantized(lib.of(k), format), quantized(lib.of(v), format)
        got = rapt.attention(lib.of(q), keys, values)
        assert str(got.dtype).removeprefix("torch.") == dtype
        Numbers(q, keys, values, dtype=dtype).check(got)


@pytest.mark.parametrize("format", [*RAW, *PACKED])
def test_few_numbers_of_bfloat16_queries_keep_the_tolerance(rng, format):
    """Outputs so small that no errors average out: weights that a kernel rounds with their factors show here. One query over many keys,
    and more queries than decode takes."""
    shapes = [(1, 700, 1), (1, 700, 64), *((int(rng.integers(9, 14)), int(rng.integers(9, 121)), dim_v) for dim_v in (1, 2, 8, 64))]
    for granularity in ("tensor", "head", "token", "channel") if format in RAW else (None,):
        for (q_len, kv_len, dim_v), _ in itertools.product(shapes, range(12)):
            q = rng.standard_normal((1, 1, q_len, 64)).astype(ml_dtypes.bfloat16)
            k, v = (rng.standard_normal((1, 1, kv_len, dim)).astype(np.float32) for dim in (64, dim_v))
            keys = quantized(k, format, granularity)
            values = quantized(v, format if dim_v % 2 == 0 or format not in ("int4", "mxfp4", "nvfp4") else "e4m3fn", granularity)
            Numbers(q, keys, values, dtype="bfloat16").check(rapt.attention(q, keys, values))


def test_ranks_an_odd_head_dim_one_key_and_no_key(rng, lib):
    q, k, v = (x[0] for x in tensors(rng))
    keys, values = quantized(k, "int8", "channel"), quantized(v, "int8", "head")
    (k_codes, of_k), (v_codes, of_v) = parts("k", keys, lib), parts("v", values, lib)
    Numbers(q, keys, values).check(rapt.attention(lib.of(q), k_codes, v_codes, **of_k, **of_v))
    # An odd head_dim, whose last byte has one code and whose last block is shorter.
    odd, one, value = q[0, :, :31], quantized(lib.of(k[0, :1, :31]), "int4", "block"), quantized(lib.of(v[0, :1]), "int8", "token")
    Numbers(odd, one, value).check(rapt.attention(lib.of(odd), one, value))
    nothing, scale = lib.of(np.zeros((4, 0, 32), np.int8)), lib.of(np.ones((), np.float32))
    got = rapt.attention(lib.of(q), nothing, nothing, k_descale=scale, v_descale=scale)
    assert (to_f64(got) == 0).all()


def test_explain_names_format_granularity_and_bytes(rng, lib):
    q, k, v = (lib.of(x) for x in tensors(rng))
    keys = quantized(k, "int4", "block")
    plan = rapt.explain(q, keys, v)
    sizes = {"code_bytes": 2 * 2 * 9 * 16, "scale_bytes": 2 * 2 * 9 * 4 * 4}
    assert plan.codes == plan.to_dict()["codes"] == {"k": {"format": "int4", "granularity": "block", "block_size": 8, **sizes}}
    assert "int4 codes, a scale for each block of 8; 576 bytes of codes, 576 of scales" in str(plan)
    assert rapt.explain(q, k, v).codes == {}


def test_calls_are_counted_and_traced(rng, torch):
    import rapt.torch
    from torch._subclasses import FakeTensorMode

    lib = Torch()
    q, k, v = (lib.of(x) for x in tensors(rng))
    keys, queries = quantized(k, "int8", "token"), quantized(q, "int8")
    rapt.torch.reset_stats()
    out = rapt.attention(q, keys, v)
    rapt.attention(queries, keys, v, out_dtype=torch.float32)
    assert rapt.torch.stats()["served"] == 2
    raw = {"k_descale": keys.scale}
    assert torch.equal(torch.ops.rapt.attention(q, keys.codes, v, **raw), out)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        assert rapt.attention(fake, keys.codes, v, **raw).shape == out.shape
        assert rapt.attention(fake, keys, v).shape == out.shape
        with pytest.raises(rapt.OptionError, match="out_dtype = None"):
            rapt.attention(mode.from_tensor(queries.codes), keys.codes, v, **raw, q_descale=queries.scale)


@pytest.mark.parametrize("route", ["eager", "compiled"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_codes_that_torch_made_by_itself(rng, torch, name, route):
    """Cast by torch, not by `rapt.quantize`; with one factor for all, a tensor without dimensions."""
    dtype = getattr(torch, name)

    def cast(x, scale, zero_point):
        x = torch.from_numpy(x) / scale
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            x = (x.round() + zero_point).clamp(limits.min, limits.max)
        codes = x.to(dtype)
        return codes, (codes.double() - zero_point) * float(np.float32(scale))

    q, k, v = tensors(rng)
    point = 128 if name == "uint8" else 0
    (k_codes, of_k), (v_codes, of_v) = cast(k, 0.03, point), cast(v, 0.025, point)
    given = {"k_descale": torch.tensor(0.03), "v_descale": torch.tensor(0.025)}
    if point:
        given |= {f"{part}_zero_point": torch.tensor(point, dtype=torch.uint8) for part in "kv"}

    def attend(q, k, v):
        return rapt.attention(q, k, v, causal="bottom_right", **given)

    if route == "compiled":
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    rapt.torch.reset_stats()
    out = attend(torch.from_numpy(q), k_codes, v_codes)
    assert rapt.torch.stats() == {"served": 1, "fallback": {}}
    Numbers(q, of_k.float(), of_v.float(), causal="bottom_right").check(out)


def test_refusals_that_are_about_quantized(rng, lib):
    q, k, v = (lib.of(x) for x in tensors(rng))
    keys = quantized(k, "int8", "token")
    swizzled_rows = rapt.quantize(k.swapaxes(1, 2), "mxfp8", scale_layout="swizzle_32_4_4")
    refusals = [
        (rapt.OptionError, "out_dtype = None", lambda: rapt.attention(quantized(q, "int8"), keys, v)),
        (rapt.OptionError, "k_descale = a .*None: what it belongs to", lambda: rapt.attention(q, keys, v, k_descale=keys.scale)),
        (rapt.OptionError, "'plain', or layout 'bhsd'", lambda: rapt.attention(q.swapaxes(1, 2), swizzled_rows, v.swapaxes(1, 2), layout="bshd")),
        (rapt.OptionError, "'plain': in a cache", lambda: rapt.attention_with_kvcache(q.swapaxes(1, 2), swizzled_rows, v.swapaxes(1, 2))),
        (rapt.KindError, r"mask\.dequantize\(\)", lambda: rapt.attention(q, k, v, mask=keys)),
        (rapt.KindError, r"key\.dequantize\(\)", lambda: rapt.scaled_dot_product_attention(q, keys, v, enable_gqa=True)),
        (rapt.KindError, r"query\.dequantize\(\)", lambda: rapt.scaled_dot_product_attention(keys, k, v)),
        (rapt.UnsupportedError, "float64 with k of int8 codes", lambda: rapt.attention(lib.of(to_f64(q)), keys, lib.of(to_f64(v)))),
        (rapt.DtypeMismatchError, "key has dtype int8", lambda: rapt.scaled_dot_product_attention(q, keys.codes, v, enable_gqa=True)),
    ]
    for error, message, call in refusals:
        with pytest.raises(error, match=message):
            call()
    Numbers(q, keys, v).check(rapt.attention(q, keys, v))
