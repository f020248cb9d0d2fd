"""Quantized tensors: codes of 4 or 8 bits with their scales, made, checked, turned back into numbers and measured.

`quantize`, `dequantize` and `Quantized` stand in `rapt` too. Formats: int8, uint8 with a zero point, int4; e4m3fn and e5m2 (OCP
OFP8); mxfp8 and mxfp4 (OCP Microscaling 1.0); nvfp4. A part that is missing is an error: no scale is ever taken to be 1.
docs/guides/quantization.md is the guide.
"""

import collections as _collections
import sys as _sys

from rapt import _native

__all__ = ["FORMATS", "Analysis", "Candidate", "Errors", "Quantized", "analyze", "dequantize", "quantize", "reset_stats", "stats"]

Errors = _native.Errors

FORMATS = ("int8", "uint8", "int4", "e4m3fn", "e5m2", "mxfp8", "mxfp4", "nvfp4")


def _float4():
    """torch's dtype of two e2m1 numbers in a byte, where torch is loaded and has it."""
    return getattr(_sys.modules.get("torch"), "float4_e2m1fn_x2", None)


def _as_bytes(codes):
    dtype = getattr(codes, "dtype", None)
    return codes.view(_sys.modules["torch"].uint8) if dtype is not None and dtype is _float4() else codes


def _powers_as_bytes(scale):
    """Scales of torch, bytes in place of its dtype of powers of two, which inductor does not know."""
    torch = _sys.modules.get("torch")
    powers = getattr(torch, "float8_e8m0fnu", None)
    return scale.view(torch.uint8) if powers is not None and getattr(scale, "dtype", None) is powers else scale


def _as_tensor(number, codes):
    """A number as a tensor, which graphs of torch take for an input and not for a constant; None where codes are not torch's."""
    torch = _sys.modules.get("torch")
    if number is None or torch is None or not isinstance(codes, torch.Tensor):
        return None
    return torch.tensor(number, dtype=torch.float64)


class Quantized:
    """A quantized tensor: `codes` and what makes numbers of them. It cannot be changed; its tensors are not copied.

    codes: shape of the numbers, int8, uint8, float8_e4m3fn or float8_e5m2. int4: uint8, mxfp4 and nvfp4: uint8 or torch's
        float4_e2m1fn_x2, two codes a byte, the lower half first, last size ceil(D / 2).
    scale: float32 (int8 to e5m2), float8_e8m0fnu (mxfp8, mxfp4), float8_e4m3fn (nvfp4), of the shape that `granularity` names,
        for [..., S, D]: "tensor" [], "head" [...], "token" [..., S], "channel" [..., 1, D], "block" [..., S, ceil(D / block_size)].
    format: one of `FORMATS`. shape: that of the numbers. granularity: None is the format's own blocks, else "tensor".
    zero_point: uint8 of the shape of `scale`; with "uint8" and no other. global_scale: a float that float32 holds; with "nvfp4".
    scale_layout: "plain", or "swizzle_32_4_4" (8-bit scales): each [S, D / block_size] padded to 128x4, reordered, made flat.
    original: what the codes were made of, held by reference and not copied: what `rapt.attention(..., tolerance=)` falls back to.
    errors: a `rapt.quant.Errors`, how far the numbers lie from the original's; measured here if an original is given without it.

    The number of a code is code * scale, (code - zero_point) * scale, or code * scale * global_scale.

    Raises OptionError where a part is missing or too many, DtypeMismatchError, ShapeError, KindError, DeviceError (CUDA).
    """

    __slots__ = (
        "_bytes",
        "_global_scale",
        "_scale",
        "block_size",
        "codes",
        "errors",
        "format",
        "global_scale",
        "granularity",
        "nbytes",
        "original",
        "scale",
        "scale_layout",
        "shape",
        "zero_point",
    )

    def __init__(
        self,
        codes,
        scale,
        *,
        format,
        shape,
        granularity=None,
        block_size=None,
        zero_point=None,
        global_scale=None,
        scale_layout="plain",
        original=None,
        errors=None,
    ):
        shape = tuple(shape)
        given = {
            "codes": codes,
            "scale": scale,
            "zero_point": zero_point,
            "global_scale": global_scale,
            "shape": shape,
            "format": format,
            "granularity": granularity,
            "block_size": block_size,
            "scale_layout": scale_layout,
        }
        nbytes, granularity, block_size = _native.quantized_check(given, {**given, "codes": _as_bytes(codes)})
        if errors is None and original is not None:
            errors = _native.quantized_errors(given, {**given, "codes": _as_bytes(codes)}, original)
        given.update(original=original, errors=errors)
        # As graphs of torch take them.
        given.update(_bytes=_as_bytes(codes), _scale=_powers_as_bytes(scale), _global_scale=_as_tensor(global_scale, codes))
        for name, value in {**given, "granularity": granularity, "block_size": block_size, "nbytes": nbytes}.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name, value):
        raise AttributeError(f"a Quantized cannot be changed: make another one with {name}=")

    def __delattr__(self, name):
        raise AttributeError(f"a Quantized cannot be changed: {name} belongs to it")

    def __repr__(self):
        granularity = f"block {self.block_size}" if self.block_size else self.granularity
        return f"Quantized({self.format}, {granularity}, shape={self.shape}, scale_layout={self.scale_layout!r}, nbytes={self.nbytes})"

    def __reduce__(self):
        return _rebuilt, ({name: getattr(self, name) for name in self.__slots__ if name != "nbytes" and name[0] != "_"},)

    def dequantize(self, dtype=None):
        """`rapt.dequantize(self, dtype)`."""
        return dequantize(self, dtype)

    def to(self, device):
        """The same on another device: codes, scale, zero_point and original by torch's `to`, which copies what lies elsewhere; with its errors.

        Raises KindError where codes are not torch's.
        """
        torch = _sys.modules.get("torch")
        if torch is None or not isinstance(self.codes, torch.Tensor):
            raise _native.KindError(f"codes are a {type(self.codes).__name__}, which lies in host memory. Mend: `rapt.quantize(torch.from_numpy(x), …)`")
        parts = {name: getattr(self, name) for name in self.__slots__ if name != "nbytes" and name[0] != "_"}
        moved = {name: parts[name].to(device) for name in ("codes", "scale", "zero_point", "original") if parts[name] is not None}
        return Quantized(**{**parts, **moved})


def _rebuilt(parts):
    return Quantized(**parts)


def quantize(
    x,
    format,
    *,
    granularity=None,
    block_size=None,
    scale=None,
    zero_point=None,
    scale_layout="plain",
    keep_original=False,
    measure_errors=None,
):
    """The codes and scales of `x` as a `Quantized`: numpy codes for a numpy array, torch codes for a torch tensor.

    x: float64, float32, float16 or bfloat16 in host memory, read in place through its strides.
    format: one of `rapt.quant.FORMATS`.
    granularity: which elements share a scale, for x of shape [..., S, D]: "tensor", "head" (each [S, D]), "token" (over D), "channel"
        (over S), "block" (`block_size` elements along D). None: "tensor"; for mxfp8, mxfp4 (32) and nvfp4 (16) their own blocks.
    scale: float32 > 0 of the shape of the result's `scale`, used in place of a computed one; with uint8 `zero_point` too.
    scale_layout: "plain", or for mxfp8, mxfp4, nvfp4 "swizzle_32_4_4".
    keep_original: the result holds `x` as its `original`, by reference: not copied, and not to be written to.
    measure_errors: the result has `errors`, 8 bytes for each row and each column, which `tolerance=` of `rapt.attention` needs. None:
        if the original is kept.

    Rounding is to nearest even of x / scale, and saturates. Scales: absmax / 127 (int8), / 7 (int4), / 448 (e4m3fn), / 57344 (e5m2);
    (max - min) / 255 with 0 inside (uint8); MX by the OCP rule 2^(floor(log2(absmax)) - largest exponent); nvfp4 a tensor's
    absmax / (6 * 448), then a block's absmax / 6 / that in e4m3. A group of zeros has scale 1. NaN and inf: inf stays in e5m2,
    both are NaN in e4m3fn and mxfp8 (scales are those of finite elements), the other formats refuse them.

    Raises NumberError (NaN or inf without a code, with its place; a scale out of range), OptionError, ShapeError,
    UnsupportedDtypeError, KindError, DeviceError (CUDA), UnsupportedError (x requires grad).
    """
    scheme = {"format": format, "granularity": granularity, "block_size": block_size, "scale_layout": scale_layout}
    codes, scale, zero_point, global_scale, granularity, block_size = _native.quantize(x, scheme, scale, zero_point)
    float4 = _float4()
    if format in ("mxfp4", "nvfp4") and float4 is not None and isinstance(codes, _sys.modules["torch"].Tensor):
        codes = codes.view(float4)
    made = {
        "codes": codes,
        "scale": scale,
        "format": format,
        "shape": tuple(x.shape),
        "granularity": granularity,
        "block_size": block_size,
        "zero_point": zero_point,
        "global_scale": global_scale,
        "scale_layout": scale_layout,
    }
    errors = None
    if keep_original if measure_errors is None else measure_errors:
        errors = _native.quantized_errors(made, {**made, "codes": _as_bytes(codes)}, x)
    return Quantized(**made, original=x if keep_original else None, errors=errors)


def dequantize(quantized, dtype=None):
    """The numbers of a `Quantized`, row-major, of the kind of its codes.

    dtype: float32 (None), float64, float16, bfloat16. Each product is exact and rounded to it once; what is too large becomes inf.

    Raises UnsupportedDtypeError, OptionError, KindError (no Quantized), DeviceError (CUDA).
    """
    if not isinstance(quantized, Quantized):
        raise _native.KindError(f"quantized is a {type(quantized).__name__}: asked is a rapt.Quantized. Mend: `rapt.Quantized(codes, scale, …)`")
    parts = {name: getattr(quantized, name) for name in quantized.__slots__}
    return _native.dequantize(parts, {**parts, "codes": _as_bytes(quantized.codes)}, dtype)


def stats():
    """What calls of `rapt.attention` with a tolerance came to in this process, and how many had `compute="int8"`.

    calls: served. refused: without originals, beyond the tolerance. quantized, fell_back: query heads. worst_estimate, worst_bound: of heads
    that stood on the codes, in relative L2. int8_calls: served with products of int8, an approximation.
    """
    return _native.tolerance_stats()


def reset_stats():
    """Count from 0 again."""
    _native.reset_tolerance_stats()


class Candidate(_collections.namedtuple("Candidate", "format granularity block_size mse relative_l2 nbytes")):
    """One way to quantize a tensor, tried on it.

    mse: the mean of squared errors. relative_l2: the root of the sum of squared errors over that of squared elements.
    nbytes: of codes, scales and zero points together.
    """

    __slots__ = ()


_FIGURES = "min max range variance mean_abs sparsity quartiles outliers outlier_share candidates recommended"


class Analysis(_collections.namedtuple("Analysis", _FIGURES)):
    """What `analyze` found. `str()` is a table.

    range: max - min. variance: of the population. sparsity: share of |x| < 1e-6. quartiles: (q1, q3), linear between neighbours.
    outliers: how many lie more than 1.5 (q3 - q1) outside the quartiles; outlier_share their share (0.007 for a normal distribution).
    candidates: each format with each granularity. recommended: for each format the smallest candidate whose relative_l2 is
        within 1.1 times the format's least.
    """

    __slots__ = ()

    def __str__(self):
        lines = [
            f"range {self.range:.4g} ({self.min:.4g} to {self.max:.4g}), variance {self.variance:.4g}, mean |x| {self.mean_abs:.4g}",
            f"sparsity {self.sparsity:.2%}, outliers {self.outliers} ({self.outlier_share:.2%})",
            f"{'format':8} {'granularity':12} {'relative L2':>11} {'MSE':>10} {'bytes':>12}",
        ]
        for it in self.candidates:
            granularity = f"{it.granularity} {it.block_size}" if it.block_size else it.granularity
            mark = "  recommended" if self.recommended[it.format] is it else ""
            lines.append(f"{it.format:8} {granularity:12} {it.relative_l2:11.3e} {it.mse:10.3e} {it.nbytes:12,}{mark}")
        return "\n".join(lines)


def analyze(x, *, formats=FORMATS, block_size=32):
    """The figures of `x`, and the error of each format and granularity measured on it.

    x: float64, float32, float16 or bfloat16 in host memory, any strides; all elements finite. formats: names out of `FORMATS`.
    block_size: of blocks in formats without their own. Takes 8 bytes for each element beside one quantized copy.

    The metrics are those of Universal Metal Flash Attention's TensorAnalysisMetrics, computed as they are defined; errors are those of
    the codes that `quantize` makes, not estimates.

    Raises NumberError with the place of the first element that is not finite, OptionError, UnsupportedDtypeError, KindError, DeviceError.
    """
    found = _native.quantized_analysis(x, list(formats), block_size)
    candidates, recommended = [], {}
    for (format, granularity, size), mse, relative_l2, nbytes, is_recommended in found.pop("candidates"):
        candidates.append(Candidate(format, granularity, size, mse, relative_l2, nbytes))
        if is_recommended:
            recommended[format] = candidates[-1]
    return Analysis(**found, candidates=tuple(candidates), recommended=recommended)
