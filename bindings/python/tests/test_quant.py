"""Quantized tensors: every code against ml_dtypes and torch, every 16-bit number against their casts, scales against their formulas.

Where Rapt's rule differs from a cast it is stated at the test: finite numbers beyond the largest saturate, where ml_dtypes gives NaN (e4m3fn)
or inf (e5m2), and torch 2.15 448 (e4m3fn) or inf (e5m2).
"""

import ast
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import rapt

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
BYTES = np.arange(256, dtype=np.uint8)
ONE = np.ones((), np.float32)
FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LARGEST = {"int8": 127, "uint8": 255, "int4": 7, "e4m3fn": 448, "e5m2": 57344, "mxfp8": 448, "mxfp4": 6, "nvfp4": 6}


def of_e2m1(nibbles):
    return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def halves(codes):
    """The 4-bit codes of packed bytes, in order."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


def every_16_bit_number(dtype):
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)


# Codes


@pytest.mark.parametrize("format, dtype", [("e4m3fn", E4M3), ("e5m2", E5M2), ("int8", np.int8)])
def test_every_code_of_8_bits_is_the_number_that_ml_dtypes_and_torch_say(format, dtype, torch):
    codes = BYTES.view(dtype)
    numbers = rapt.Quantized(codes, ONE, format=format, shape=(256,)).dequantize("float64")
    np.testing.assert_array_equal(numbers, codes.astype(np.float64))
    named = torch.from_numpy(BYTES).view(getattr(torch, np.dtype(dtype).name))
    numbers = rapt.Quantized(named, torch.ones(()), format=format, shape=(256,)).dequantize()
    torch.testing.assert_close(numbers, named.to(torch.float32), rtol=0, atol=0, equal_nan=True)


def test_every_code_of_uint8_with_every_zero_point():
    codes = np.broadcast_to(BYTES, (256, 256))
    quantized = rapt.Quantized(
        codes, np.full(256, 0.25, np.float32), zero_point=BYTES, format="uint8", granularity="token", shape=codes.shape
    )
    np.testing.assert_array_equal(quantized.dequantize(), (BYTES[None] - BYTES[:, None].astype(np.float32)) * 0.25)


def test_every_pair_of_4_bit_codes(torch):
    int4 = rapt.Quantized(BYTES, ONE, format="int4", shape=(512,)).dequantize()
    np.testing.assert_array_equal(int4, halves(BYTES).view(ml_dtypes.int4).astype(np.float32))
    scale = np.full(16, 127, np.uint8).view(E8M0)
    mxfp4 = rapt.Quantized(BYTES, scale, format="mxfp4", shape=(512,)).dequantize()
    np.testing.assert_array_equal(mxfp4, of_e2m1(halves(BYTES)))
    assert np.signbit(mxfp4[16]), "-0 keeps its sign"
    named = torch.from_numpy(BYTES).view(torch.float4_e2m1fn_x2)
    scale = torch.full((16,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert rapt.Quantized(named, scale, format="mxfp4", shape=(512,)).dequantize().tolist() == mxfp4.tolist()
    odd = rapt.Quantized(BYTES[:2], ONE, format="int4", shape=(3,)).dequantize()
    assert odd.tolist() == [0.0, 0.0, 1.0]


def test_every_scale_of_8_bits(torch):
    ones = np.ones((256, 1), E4M3)
    powers = BYTES.view(E8M0)[:, None]
    numbers = rapt.Quantized(ones, powers, format="mxfp8", shape=(256, 1)).dequantize("float64")
    np.testing.assert_array_equal(numbers, powers.astype(np.float64))
    as_torch = torch.from_numpy(BYTES).view(torch.float8_e8m0fnu).to(torch.float64)
    np.testing.assert_array_equal(numbers[:, 0], as_torch.numpy())
    codes, scales = np.full((256, 1), 0x2, np.uint8), BYTES.view(E4M3)[:, None]
    numbers = rapt.Quantized(codes, scales, format="nvfp4", global_scale=0.75, shape=(256, 1)).dequantize("float64")
    np.testing.assert_array_equal(numbers, scales.astype(np.float64) * 0.75)


# Rounding: every 16-bit number


def encoded(x, format):
    """The codes of finite `x` at scale 1."""
    return rapt.quantize(x, format, scale=ONE).codes


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("format, dtype, largest", [("e4m3fn", E4M3, 0x7E), ("e5m2", E5M2, 0x7B)])
def test_every_16_bit_number_is_rounded_to_8_bits_as_casts_do_and_saturates(source, format, dtype, largest, torch):
    x = every_16_bit_number(FLOATS[source])
    codes = encoded(x, format).view(np.uint8)
    with np.errstate(all="ignore"):
        cast = x.astype(dtype)
    of_torch = torch.from_numpy(x.view(np.uint16)).view(getattr(torch, source)).to(getattr(torch, np.dtype(dtype).name))
    number = x.astype(np.float32)
    is_finite = np.isfinite(number)
    assert (is_finite & ~np.isfinite(cast.astype(np.float32))).sum() > 100
    for cast in (cast, of_torch.view(torch.uint8).numpy().view(dtype)):
        beyond = is_finite & ~np.isfinite(cast.astype(np.float32))
        expected = np.where(beyond, largest | x.view(np.uint16) >> 8 & 0x80, cast.view(np.uint8))
        np.testing.assert_array_equal(codes[is_finite], expected[is_finite])
    back = codes.view(dtype).astype(np.float32)
    assert np.isnan(back[np.isnan(number)]).all()
    # torch 2.15 makes 448 of inf, ml_dtypes NaN.
    infinite = np.isinf(number)
    np.testing.assert_array_equal(back[infinite], number[infinite] if format == "e5m2" else np.nan)


@pytest.mark.parametrize("source", FLOATS)
def test_every_16_bit_number_is_rounded_to_integers(source):
    x = every_16_bit_number(FLOATS[source])
    x = x[np.isfinite(x.astype(np.float32))]
    rounded = np.rint(x.astype(np.float64))
    np.testing.assert_array_equal(encoded(x, "int8"), rounded.clip(-127, 127))
    np.testing.assert_array_equal(halves(encoded(x, "int4")).view(ml_dtypes.int4).astype(float), rounded.clip(-7, 7))
    quantized = rapt.quantize(x, "uint8", scale=ONE, zero_point=np.full((), 100, np.uint8))
    np.testing.assert_array_equal(quantized.codes, (rounded + 100).clip(0, 255))


@pytest.mark.parametrize("source", FLOATS)
def test_every_16_bit_number_is_rounded_in_blocks(source):
    x = every_16_bit_number(FLOATS[source])
    # A neighbour sees to scale 1: from 4 and 256 up to the next power of two, beyond the largest number too.
    for format, neighbour, limit in [("mxfp4", 4, 8), ("mxfp8", 256, 512)]:
        some = x[np.abs(x.astype(np.float32)) < limit]
        pairs = np.stack([some, np.full_like(some, neighbour)], -1)
        quantized = rapt.quantize(pairs, format)
        assert (quantized.scale.view(np.uint8) == 127).all()
        largest = LARGEST[format]
        clipped = some.astype(np.float32).clip(-largest, largest)
        if format == "mxfp4":
            expected, codes = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15, quantized.codes[:, 0] & 15
        else:
            expected, codes = clipped.astype(E4M3).view(np.uint8), quantized.codes[:, 0].view(np.uint8)
        np.testing.assert_array_equal(codes, expected)


# Scales


def blocks_of(x, size):
    pad = -x.shape[-1] % size
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    return padded.reshape(*x.shape[:-1], -1, size)


def grouped(x, granularity):
    """x with the elements of a group along the last dimension, and what the result's scale shape must be."""
    batch, heads, length, dim = x.shape
    return {
        "tensor": (x.reshape(-1), ()),
        "head": (x.reshape(batch, heads, -1), (batch, heads)),
        "token": (x, (batch, heads, length)),
        "channel": (x.swapaxes(-1, -2).reshape(batch, heads, 1, dim, length), (batch, heads, 1, dim)),
        "block": (blocks_of(x, 12), (batch, heads, length, -(-dim // 12))),
    }[granularity]


@pytest.mark.parametrize("format", ["int8", "uint8", "int4", "e4m3fn", "e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "token", "channel", "block"])
def test_scales_are_their_formula(format, granularity, rng):
    x = rng.standard_normal((2, 3, 7, 29)).astype(np.float32) * 3 + 0.5
    quantized = rapt.quantize(x, format, granularity=granularity, block_size=12 if granularity == "block" else None)
    groups, shape = grouped(x.astype(np.float64), granularity)
    reach = groups.max(-1, initial=0) - groups.min(-1, initial=0) if format == "uint8" else np.abs(groups).max(-1)
    assert quantized.scale.dtype == np.float32 and quantized.scale.shape == shape
    np.testing.assert_array_equal(quantized.scale, (reach / LARGEST[format]).astype(np.float32).reshape(shape))
    error = np.abs(quantized.dequantize("float64") - x)
    step = {"e4m3fn": 32, "e5m2": 8192}.get(format, 1)
    scale = quantized.scale.repeat(12, -1)[..., :29] if granularity == "block" else quantized.scale
    scale = scale.reshape(*scale.shape, *[1] * (x.ndim - scale.ndim))
    assert (error <= scale * step / 2 * 1.0001).all()
    assert quantized.nbytes == sum(
        it.nbytes for it in (quantized.codes, quantized.scale, quantized.zero_point) if it is not None
    )


def test_scales_of_blocks_are_their_formula(rng):
    x = (rng.standard_normal((5, 3, 72)) * np.exp2(rng.integers(-20, 20, (5, 3, 1)))).astype(np.float32)
    for format, largest_exponent in [("mxfp8", 8), ("mxfp4", 2)]:
        quantized = rapt.quantize(x, format)
        blocks = blocks_of(x.astype(np.float64), 32)
        exponent = np.floor(np.log2(np.abs(blocks).max(-1))) - largest_exponent
        np.testing.assert_array_equal(quantized.scale.view(np.uint8), exponent + 127)
        exact = (blocks / np.exp2(exponent)[..., None]).clip(-LARGEST[format], LARGEST[format])
        exact = exact.reshape(5, 3, -1)[..., :72]
        if format == "mxfp8":
            np.testing.assert_array_equal(quantized.codes.view(np.uint8), exact.astype(E4M3).view(np.uint8))
        else:
            expected = exact.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
            np.testing.assert_array_equal(halves(quantized.codes), expected)

    x = rng.standard_normal((5, 3, 72)).astype(np.float32)
    quantized = rapt.quantize(x, "nvfp4")
    overall = np.float32(np.abs(x).max().astype(np.float64) / (6 * 448))
    assert quantized.global_scale == overall
    blocks = blocks_of(x.astype(np.float64), 16)
    scale = (np.abs(blocks).max(-1) / (6 * np.float64(overall))).astype(E4M3)
    np.testing.assert_array_equal(quantized.scale.view(np.uint8), scale.view(np.uint8))
    exact = blocks / (scale.astype(np.float64) * np.float64(overall))[..., None]
    expected = exact.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(halves(quantized.codes), expected.reshape(5, 3, -1)[..., :72])


def test_swizzled_scales_lie_as_torch_lays_them(torch, rng):
    """Against `to_blocked` of torch's own tests, read from its source: importing it needs packages that are not installed."""
    path = Path(torch.__file__).parent / "testing/_internal/common_quantized.py"
    if not path.exists():
        pytest.skip("this torch has no to_blocked")
    wanted = {"ceil_div", "to_blocked"}
    functions = [it for it in ast.parse(path.read_text()).body if isinstance(it, ast.FunctionDef) and it.name in wanted]
    names = {"torch": torch}
    exec(compile(ast.Module(functions, []), str(path), "exec"), names)
    x = torch.from_numpy(rng.standard_normal((2, 130, 170)).astype(np.float32))
    for format in ("mxfp8", "mxfp4", "nvfp4"):
        plain = rapt.quantize(x, format)
        swizzled = rapt.quantize(x, format, scale_layout="swizzle_32_4_4")
        expected = torch.stack([names["to_blocked"](it.view(torch.uint8)) for it in plain.scale])
        assert torch.equal(swizzled.scale.view(torch.uint8), expected)
        assert torch.equal(plain.dequantize(), swizzled.dequantize())


# Tensors


@pytest.mark.parametrize("format", rapt.quant.FORMATS)
def test_torch_and_numpy_give_the_same_parts(format, torch, rng):
    x = rng.standard_normal((2, 5, 48)).astype(np.float32)
    ours, theirs = rapt.quantize(x, format), rapt.quantize(torch.from_numpy(x), format)
    dtypes = {
        "int8": ("int8", "float32"),
        "uint8": ("uint8", "float32"),
        "int4": ("uint8", "float32"),
        "e4m3fn": ("float8_e4m3fn", "float32"),
        "e5m2": ("float8_e5m2", "float32"),
        "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu"),
        "mxfp4": ("float4_e2m1fn_x2", "float8_e8m0fnu"),
        "nvfp4": ("float4_e2m1fn_x2", "float8_e4m3fn"),
    }
    code, scale = dtypes[format]
    assert (theirs.codes.dtype, theirs.scale.dtype) == (getattr(torch, code), getattr(torch, scale))
    assert (ours.codes.dtype.name, ours.scale.dtype.name) == ("uint8" if "x2" in code else code, scale)
    assert theirs.codes.view(torch.uint8).numpy().tobytes() == ours.codes.tobytes()
    assert theirs.scale.reshape(-1).view(torch.uint8).numpy().tobytes() == ours.scale.tobytes()
    assert (theirs.shape, theirs.nbytes, theirs.global_scale) == (ours.shape, ours.nbytes, ours.global_scale)
    back = theirs.dequantize(torch.bfloat16)
    assert back.dtype == torch.bfloat16 and back.shape == x.shape
    np.testing.assert_array_equal(back.float().numpy(), ours.dequantize(ml_dtypes.bfloat16).astype(np.float32))
    copy = pickle.loads(pickle.dumps(ours))
    assert repr(copy) == repr(ours) and copy.codes.tobytes() == ours.codes.tobytes()


@pytest.mark.parametrize("format", rapt.quant.FORMATS)
def test_any_strides_and_empty_tensors(format, rng):
    x = rng.standard_normal((3, 4, 34)).astype(np.float32)
    expected = rapt.quantize(x, format)
    for view in (x.copy(order="F"), np.repeat(x, 2, -1)[..., ::2], x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]):
        before = view.tobytes()
        quantized = rapt.quantize(view, format)
        assert quantized.codes.tobytes() == expected.codes.tobytes() and quantized.scale.tobytes() == expected.scale.tobytes()
        assert view.tobytes() == before
    # Parts of any strides are read where they lie, too.
    turned = {"codes": expected.codes[..., ::-1].copy()[..., ::-1], "scale": expected.scale.copy(order="F")}
    same = {name: getattr(expected, name) for name in ("zero_point", "global_scale", "granularity", "block_size")}
    again = rapt.Quantized(**turned, **same, format=format, shape=x.shape)
    np.testing.assert_array_equal(again.dequantize(), expected.dequantize())
    for shape in [(0, 3, 8), (2, 0, 8), (2, 3, 0)]:
        empty = rapt.quantize(np.zeros(shape, np.float32), format)
        assert empty.dequantize().shape == shape and empty.codes.size == 0


def test_a_quantized_cannot_be_changed():
    quantized = rapt.quantize(np.ones(4, np.float32), "int8")
    with pytest.raises(AttributeError, match="make another one with scale="):
        quantized.scale = ONE
    with pytest.raises(AttributeError):
        del quantized.scale
    assert repr(quantized) == "Quantized(int8, tensor, shape=(4,), scale_layout='plain', nbytes=8)"


# Refusals

X = np.ones((2, 3, 8), np.float32)


def bad(value, dtype=np.float32):
    x = X.astype(dtype)
    x[1, 0, 5] = value
    return x


@pytest.mark.parametrize(
    "x, arguments, error, said",
    [
        (bad(np.nan), ("int8",), rapt.NumberError, r"x\[1, 0, 5\] is NaN, for which int8 has no code. Mend: `numpy.nan_to_num"),
        (bad(-np.inf), ("nvfp4",), rapt.NumberError, r"x\[1, 0, 5\] is -inf, for which nvfp4"),
        (bad(1e300, np.float64), ("int8",), rapt.NumberError, "1e300, whose scale in int8 is beyond the largest float32"),
        (X.astype(np.int32), ("int8",), rapt.UnsupportedDtypeError, r"x.astype\(numpy.float32\)"),
        (X, ("int3",), rapt.OptionError, "format = 'int3'; allowed: 'int8'"),
        (X, ("int8", "row"), rapt.OptionError, "granularity = 'row'; allowed: None, 'tensor'"),
        (X, ("int8", "block"), rapt.OptionError, "block_size = None"),
        (X, ("int8", "block", 0), rapt.OptionError, "block_size = 0"),
        (X, ("int8", "block", True), rapt.OptionError, "block_size = True"),
        (X, ("int8", "block", -1), rapt.OptionError, "block_size = -1"),
        (X, ("int8", "token", 8), rapt.OptionError, "block_size = 8"),
        (X, ("mxfp8", "tensor"), rapt.OptionError, "granularity = tensor; allowed: None, or block 32"),
        (X, ("nvfp4", "block", 32), rapt.OptionError, "allowed: None, or block 16"),
        (X, ("int8", None, None, "swizzle_32_4_4"), rapt.OptionError, "the scales of int8 are float32"),
        (X, ("mxfp8", None, None, "tiled"), rapt.OptionError, "scale_layout = 'tiled'"),
        (np.ones(3, np.float32), ("int8", "channel"), rapt.ShapeError, "at least 2"),
        ([1.0], ("int8",), rapt.KindError, "x is a list"),
    ],
)
def test_what_quantize_refuses(x, arguments, error, said):
    names = ("format", "granularity", "block_size", "scale_layout")
    with pytest.raises(error, match=said):
        rapt.quantize(x, **dict(zip(names, arguments)))


def test_given_scales_are_checked(torch):
    scale, zero = np.ones(2, np.float32), np.zeros(2, np.uint8)
    x = X[0, :2]
    for options, error, said in [
        ({"scale": scale * 0}, rapt.NumberError, r"scale\[0\] is 0: a scale to quantize by is finite and greater than 0"),
        ({"scale": scale.astype(np.float64)}, rapt.DtypeMismatchError, "scale has dtype float64, asked for is float32"),
        ({"scale": scale[:1]}, rapt.ShapeError, r"scale has shape \[1\], expected \[2\]"),
        ({"scale": torch.ones(2)}, rapt.KindError, "scale is a torch tensor, x is a numpy array"),
        ({"scale": scale, "zero_point": zero}, rapt.OptionError, "int8 has no zero_point"),
        ({"zero_point": zero}, rapt.OptionError, "int8 has no zero_point"),
        ({"format": "uint8", "scale": scale}, rapt.OptionError, "uint8 needs zero_point"),
        ({"format": "uint8", "zero_point": zero}, rapt.OptionError, "uint8 needs scale"),
        ({"format": "mxfp8", "granularity": None, "scale": scale}, rapt.OptionError, "mxfp8 computes its own"),
    ]:
        with pytest.raises(error, match=said):
            rapt.quantize(x, **{"format": "int8", "granularity": "token", **options})


def test_parts_are_checked_and_no_scale_is_assumed():
    codes, scale = np.zeros((3, 8), np.int8), np.ones(3, np.float32)
    good = {"codes": codes, "scale": scale, "format": "int8", "granularity": "token", "shape": (3, 8)}
    assert rapt.Quantized(**good).nbytes == 24 + 12
    fp4 = {**good, "codes": codes[:, :4].view(np.uint8), "format": "nvfp4", "granularity": None, "scale": np.ones((3, 1), E4M3)}
    for change, error, said in [
        ({"scale": None}, rapt.OptionError, "int8 needs scale, and none was given: nothing is assumed in its place"),
        ({"scale": scale[:2]}, rapt.ShapeError, r"scale has shape \[2\], expected \[3\]"),
        ({"scale": scale.astype(np.float16)}, rapt.DtypeMismatchError, "scale has dtype float16"),
        ({"codes": codes.view(np.uint8)}, rapt.DtypeMismatchError, "codes has dtype uint8, asked for is int8"),
        ({"shape": (3, 9)}, rapt.ShapeError, r"codes has shape \[3, 8\], expected \[3, 9\]"),
        ({"shape": (3, -8)}, rapt.OptionError, "shape = "),
        ({"format": "uint8", "codes": codes.view(np.uint8)}, rapt.OptionError, "uint8 needs zero_point"),
        ({"zero_point": np.zeros(3, np.uint8)}, rapt.OptionError, "int8 has no zero_point"),
        ({"global_scale": 1.0}, rapt.OptionError, "int8 has no global_scale"),
        ({**fp4}, rapt.OptionError, "nvfp4 needs global_scale"),
        ({**fp4, "global_scale": 0.1}, rapt.OptionError, "a float that float32 holds exactly"),
    ]:
        with pytest.raises(error, match=said):
            rapt.Quantized(**{**good, **change})
    with pytest.raises(rapt.UnsupportedDtypeError):
        rapt.Quantized(**good).dequantize("int32")
    with pytest.raises(rapt.KindError, match="quantized is a ndarray"):
        rapt.dequantize(codes)


def test_torch_tensors_that_are_refused(torch):
    with pytest.raises(rapt.UnsupportedError, match="x requires grad"):
        rapt.quantize(torch.ones(4, requires_grad=True), "int8")
    with pytest.raises(rapt.DeviceError, match="x is on meta"):
        rapt.quantize(torch.ones(4, device="meta"), "int8")


# Analysis


def test_figures_are_numpys_and_errors_are_those_of_the_codes(rng):
    x = rng.standard_normal((4, 32, 16)).astype(np.float32)
    x[..., 3] *= 50
    x.reshape(-1)[:100] = 0
    found = rapt.quant.analyze(x, block_size=8)
    wide = x.astype(np.float64)
    q1, q3 = np.quantile(wide, [0.25, 0.75])
    outliers = (wide < q1 - 1.5 * (q3 - q1)) | (wide > q3 + 1.5 * (q3 - q1))
    assert (found.min, found.max, found.range) == (wide.min(), wide.max(), wide.max() - wide.min())
    np.testing.assert_allclose(found.quartiles, (q1, q3), rtol=1e-12)
    assert (found.outliers, found.outlier_share) == (outliers.sum(), outliers.mean())
    np.testing.assert_allclose((found.variance, found.mean_abs), (wide.var(), np.abs(wide).mean()), rtol=1e-12)
    assert found.sparsity == (np.abs(wide) < 1e-6).mean()
    assert len(found.candidates) == 28 and list(found.recommended) == list(rapt.quant.FORMATS)
    for it in found.candidates:
        quantized = rapt.quantize(x, it.format, granularity=it.granularity, block_size=it.block_size)
        error = quantized.dequantize("float64") - wide
        np.testing.assert_allclose((it.mse, it.relative_l2), ((error**2).mean(), np.linalg.norm(error) / np.linalg.norm(wide)))
        assert it.nbytes == quantized.nbytes
    assert found.recommended["int8"].granularity == "channel"
    assert "recommended" in str(found) and "int8     channel" in str(found)
    with pytest.raises(rapt.NumberError, match=r"x\[1, 0, 5\] is NaN: the figures"):
        rapt.quant.analyze(bad(np.nan))
    with pytest.raises(rapt.OptionError, match="at least 1 element"):
        rapt.quant.analyze(x[:0])
