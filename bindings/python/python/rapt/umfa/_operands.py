"""An operand as its precision says: numbers of a dtype, or codes with a scale for each tensor, row or block.

A block of UMFA's is T tokens of H heads, and N elements along head_dim. Rapt has scales for each token and for N elements of one token;
equal scales for T tokens of H heads make a block of them, whatever T and H. The scale of a block follows `rapt.quantize`: it is what a
row gets whose largest element is the block's.
"""

import sys

import rapt
from rapt._native import KindError, NumberError, ShapeError, UnsupportedDtypeError, UnsupportedError

from ._config import DTYPES, QuantizationGranularity, QuantizationPrecision

FLOATS = ("float64", "float32", "float16", "bfloat16")


def torch_of(x):
    """The module torch if `x` is its tensor, else None, without an import."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def kind_of_array(name, x):
    """Refuses what is neither an array of numpy nor a tensor of torch."""
    numpy = sys.modules.get("numpy")
    if torch_of(x) is None and (numpy is None or not isinstance(x, numpy.ndarray)):
        raise KindError(f"{name} is a {type(x).__name__}: allowed are numpy arrays and torch tensors. Mend: `numpy.asarray({name})`")


def dtype_name(name, x):
    """The dtype of an array or a tensor by its name, "float16"; what has fewer than two dimensions is refused."""
    kind_of_array(name, x)
    if x.ndim < 2:
        raise ShapeError(f"{name} has {x.ndim} dimensions: asked are at least [len, head_dim]. Mend: `{name}[None]`")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in FLOATS:
        raise UnsupportedDtypeError(f"{name} has dtype {dtype}: allowed are {', '.join(FLOATS)}. Mend: `rapt.attention`, which takes codes")
    return dtype


def cast(x, dtype):
    """`x` rounded to the nearest number of a dtype."""
    torch = torch_of(x)
    if torch is not None:
        return x.to(getattr(torch, dtype))
    import numpy

    if dtype == "bfloat16":
        try:
            from ml_dtypes import bfloat16 as dtype
        except ImportError:
            raise UnsupportedError("numpy has no bfloat16 of its own. Mend: `pip install ml_dtypes`") from None
    with numpy.errstate(over="ignore"):
        return x.astype(dtype)


def rounded(name, x, precision, hint):
    """`x` in the dtype of a precision; what becomes inf is refused, and `hint` is what takes it."""
    dtype = DTYPES[precision]
    if dtype_name(name, x) == dtype:
        return x
    made = cast(x, dtype)
    library = torch_of(x) or sys.modules["numpy"]
    if bool((library.isinf(made) & library.isfinite(x)).any()):
        hint = "rapt.attention" if precision is QuantizationPrecision.FP32 else hint
        raise NumberError(f"{name} has numbers beyond those of {dtype}. Mend: `{hint}`")
    return made


def as_float64(x):
    """The numbers of an array or a tensor as a numpy array of float64."""
    import numpy

    torch = torch_of(x)
    return x.detach().to("cpu", torch.float64).numpy() if torch is not None else x.astype(numpy.float64)


def quantized(name, x, format, granularity, block=None):
    """`x` as a `rapt.Quantized`; `block` is (tokens, heads, dims) of BLOCK_WISE."""
    dtype_name(name, x)
    try:
        if granularity is QuantizationGranularity.TENSOR_WISE:
            return rapt.quantize(x, format, granularity="tensor")
        if granularity is QuantizationGranularity.ROW_WISE:
            return rapt.quantize(x, format, granularity="token")
        return _in_blocks(x, format, *block)
    except NumberError as error:
        raise NumberError(f"{name}: {error}") from None


def _in_blocks(x, format, tokens, heads, dims):
    dim = x.shape[-1]
    dims = dim if dims is None else min(dims, dim)
    parts = {"granularity": "token"} if dims >= dim else {"granularity": "block", "block_size": dims}
    if (tokens == 1 and heads == 1) or 0 in x.shape:
        return rapt.quantize(x, format, **parts)
    scale = _block_scales(x, format, tokens, heads, dims)
    if dims >= dim:
        scale = scale[..., 0]
    torch = torch_of(x)
    return rapt.quantize(x, format, **parts, scale=scale if torch is None else torch.from_numpy(scale))


def _block_scales(x, format, tokens, heads, dims):
    """float32 [..., heads, tokens, ceil(head_dim / dims)]: those of one block are equal."""
    import numpy

    steps = {-1: dims, -2: tokens, -3: heads}
    steps = {axis: step for axis, step in steps.items() if x.ndim >= -axis}
    largest = numpy.abs(as_float64(x))
    for axis, step in steps.items():
        largest = numpy.maximum.reduceat(largest, range(0, x.shape[axis], step), axis)
    # NaN and inf have no code: `rapt.quantize` refuses them, and names the element of x.
    largest = numpy.where(numpy.isfinite(largest), largest, 1.0)
    scale = rapt.quantize(largest.reshape(-1, 1), format, granularity="token").scale.reshape(largest.shape)
    for axis in set(steps) - {-1}:
        scale = scale.take(numpy.arange(x.shape[axis]) // steps[axis], axis)
    return scale
