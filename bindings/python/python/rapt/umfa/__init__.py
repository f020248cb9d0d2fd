"""The public names of Universal Metal Flash Attention, with Rapt behind them: code that was written for it runs where Rapt does.

    from rapt.umfa import QuantizationConfig, quantized_scaled_dot_product_attention_unified    its PyTorch extension
    from rapt.umfa import MFAContext, attention                                                  its numpy package

Each field and argument is honoured, or refused by a `RaptError` that says what to write. Nothing is printed, nothing is registered on
import, and neither torch nor numpy is imported before it is needed. docs/guides/umfa.md is the migration page.
"""

import importlib as _importlib
import threading as _threading

import rapt
from rapt._native import DtypeMismatchError, OptionError, ShapeError, UnsupportedDtypeError

from ._choice import analyze_tensor_characteristics, block_of, choose, select_hybrid_granularities
from ._config import (
    DTYPES,
    FORMATS,
    OUT_DTYPES,
    BlockSizeConfig,
    HybridGranularityConfig,
    HybridStrategy,
    OutputPrecision,
    QuantizationConfig,
    QuantizationGranularity,
    QuantizationPrecision,
    TensorAnalysisMetrics,
    kind_checked,
    precision_named,
)
from ._operands import cast, dtype_name, kind_of_array, quantized, rounded

__all__ = [
    "BlockSizeConfig",
    "HybridGranularityConfig",
    "HybridStrategy",
    "MFAContext",
    "MetalSDPABackend",
    "OutputPrecision",
    "QuantizationConfig",
    "QuantizationGranularity",
    "QuantizationPrecision",
    "TensorAnalysisMetrics",
    "analyze_tensor_characteristics",
    "attention",
    "flash_attention_forward",
    "get_version",
    "is_metal_available",
    "metal_scaled_dot_product_attention",
    "quantized_scaled_dot_product_attention",
    "quantized_scaled_dot_product_attention_enhanced",
    "quantized_scaled_dot_product_attention_unified",
    "quantized_scaled_dot_product_attention_with_config",
    "register_backend",
    "select_hybrid_granularities",
    "unregister_backend",
]


def get_version():
    """(major, minor, patch) of Rapt."""
    return rapt.version()


def is_metal_available():
    """Whether Metal serves Rapt here. False is no error: the CPU, or an NVIDIA GPU, does."""
    return rapt.is_available("metal")


# The PyTorch extension


_registration = _threading.Lock()
_is_registered = False


def _register(yes):
    global _is_registered
    with _registration:
        if _is_registered != yes:
            override = _importlib.import_module("rapt.torch")
            (override.register_backend if yes else override.unregister_backend)()
            _is_registered = yes


def register_backend():
    """Make PyTorch's `scaled_dot_product_attention` Rapt's. As in UMFA a second call does nothing; `rapt.torch` counts."""
    _register(True)


def unregister_backend():
    """Take `register_backend()` back, however often it was called; what others registered through `rapt.torch` stays."""
    _register(False)


class MetalSDPABackend:
    """`register_backend` and `unregister_backend`."""

    register_backend = staticmethod(register_backend)
    unregister_backend = staticmethod(unregister_backend)


def metal_scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """`rapt.scaled_dot_product_attention`: masks attend where they are True, heads are grouped, and dropout drops or is refused."""
    return rapt.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def quantized_scaled_dot_product_attention(query, key, value, precision="int8", is_causal=False, scale=None):
    """Attention on key and value of a precision, one scale each; query stays as it is. The result is float32.

    query, key, value: [batch, heads, len, head_dim]. precision: "int8", "int4", "fp16", "bf16" or "fp32", and no other.
    """
    config = QuantizationConfig()
    config.key_precision = config.value_precision = precision_named("precision", precision)
    config.is_causal, config.scale = is_causal, scale
    return _attend(query, key, value, config, {"key": config.key_precision, "value": config.value_precision}, "precision='fp32'")


def quantized_scaled_dot_product_attention_unified(query, key, value, config):
    """Attention on query, key and value as a `QuantizationConfig` says.

    query, key, value: [batch, heads, len, head_dim], numpy or torch, any strides. The result has `config.output_precision`.
    """
    kind_checked("config", config, QuantizationConfig)
    return _attend(query, key, value, config, config._precisions())


quantized_scaled_dot_product_attention_enhanced = quantized_scaled_dot_product_attention_unified
quantized_scaled_dot_product_attention_with_config = quantized_scaled_dot_product_attention_unified


def _attend(query, key, value, config, precisions, hint="config.{}_precision = QuantizationPrecision.FP32"):
    """Attention on operands of these precisions; one without a precision stays as it is. `hint` is for numbers that become inf."""
    tensors = {"query": query, "key": key, "value": value}
    choices = {}
    if config.granularity is QuantizationGranularity.HYBRID:
        choices, selection = choose(tensors, config)
        config._keep(selection)
    operands = {}
    for name, x in tensors.items():
        precision = precisions.get(name)
        if name in choices:
            choice = choices[name]
            operands[name] = quantized(name, x, choice.format, choice.granularity, choice.block)
        elif precision in FORMATS:
            operands[name] = quantized(name, x, FORMATS[precision], config.granularity, block_of(name, config))
        else:
            operands[name] = x if precision is None else rounded(name, x, precision, hint.format(name))
    q, k, v = _of_one_dtype(operands).values()
    return rapt.attention(q, k, v, causal=config.is_causal, scale=config.scale, out_dtype=OUT_DTYPES[config.output_precision])


def _of_one_dtype(operands):
    """Numbers of different precisions widened to float32, which holds all of them."""
    dtypes = {name: dtype_name(name, x) for name, x in operands.items() if not isinstance(x, rapt.Quantized)}
    if len(set(dtypes.values())) > 1 and "float64" not in dtypes.values():
        return {name: cast(x, "float32") if name in dtypes else x for name, x in operands.items()}
    return operands


# The numpy package


class MFAContext:
    """A `rapt.Context`, as `handle` until it is closed. Rapt needs none; one serves any number of calls and threads."""

    def __init__(self):
        self._handle = rapt.Context()

    @property
    def handle(self):
        return self._handle

    def close(self):
        """End it. A second time does nothing."""
        self._handle = None

    def __bool__(self):
        return self._handle is not None

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.close()


def flash_attention_forward(
    context,
    q,
    k,
    v,
    *,
    attn_mask=None,
    causal=False,
    softmax_scale=None,
    input_precision="fp16",
    intermediate_precision="fp16",
    output_precision="fp16",
):
    """Attention on arrays [batch, len, heads, head_dim] or [len, head_dim].

    attn_mask: broadcasts to [batch, q_len, heads, kv_len] or [q_len, kv_len]. Boolean, or 8- and 16-bit integers: True is masked
        out, which is the opposite of PyTorch's; float: added to the scores.
    input_precision: the dtype that q, k and v have; others are refused. intermediate_precision: at least so precise are scores and
        probabilities. output_precision: the dtype of the result. Each "fp16", "bf16", "fp32", their long forms, or UMFA's number.
    """
    kind_checked("context", context, MFAContext)
    if not context:
        raise OptionError("context is closed. Mend: `MFAContext()`")
    input_dtype = _dtype("input_precision", input_precision)
    finer = _dtype("intermediate_precision", intermediate_precision)
    out_dtype = _dtype("output_precision", output_precision)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_array(name, x, input_precision, input_dtype)
    options = {"causal": causal, "scale": softmax_scale, "out_dtype": out_dtype, "layout": "bshd" if q.ndim == 4 else "bhsd"}
    if attn_mask is not None:
        options["mask"] = _mask(attn_mask, q.ndim)
    # Probabilities of bfloat16 operands may be rounded to bfloat16; of all others they are float32.
    if input_dtype == "bfloat16" != finer:
        q, k, v = (cast(x, "float32") for x in (q, k, v))
    return context.handle.attention(q, k, v, **options)


# `rapt.attention` itself: a context of its own would start threads in each call.
_process = MFAContext.__new__(MFAContext)
_process._handle = rapt


def attention(q, k, v, context=None, **options):
    """`flash_attention_forward`, on the threads of `rapt.attention` where no context is given."""
    return flash_attention_forward(_process if context is None else context, q, k, v, **options)


def _dtype(name, precision):
    """The dtype of a precision: a spelling, a member, or UMFA's number."""
    if isinstance(precision, int) and not isinstance(precision, bool) and 0 <= precision <= 4:
        found = QuantizationPrecision(precision)
    else:
        found = precision if isinstance(precision, QuantizationPrecision) else precision_named(name, precision)
    if found in DTYPES:
        return DTYPES[found]
    raise OptionError(
        f"{name} = {precision!r}: codes are no numbers without their factors. Mend: `rapt.attention(q, k, v, k_descale=…, v_descale=…)`"
    )


def _check_array(name, x, precision, dtype):
    own = dtype_name(name, x)
    if own == "float64":
        raise UnsupportedDtypeError(f"{name} has dtype float64, for which UMFA has no precision. Mend: `rapt.attention`, which computes it")
    if own != dtype:
        meant = next(it.name.lower() for it, each in DTYPES.items() if each == own)
        raise DtypeMismatchError(f"{name} has dtype {own}, input_precision is {precision!r}. Mend: `input_precision={meant!r}`")
    if x.ndim not in (2, 4):
        hint = f". Mend: `{name}[:, :, None]` if they are [batch, len, head_dim]" if x.ndim == 3 else ""
        raise ShapeError(f"{name} has {x.ndim} dimensions: asked are [batch, len, heads, head_dim] or [len, head_dim]{hint}")


def _mask(mask, rank):
    """UMFA's mask as Rapt's: True attends, and [batch, heads, q_len, kv_len]."""
    kind_of_array("attn_mask", mask)
    dtype = str(mask.dtype).removeprefix("torch.")
    if dtype in ("bool", "int8", "uint8", "int16", "uint16"):
        mask = mask == 0
    if rank == 4:
        if mask.ndim > 4:
            raise ShapeError(f"attn_mask has {mask.ndim} dimensions: asked are at most [batch, q_len, heads, kv_len]")
        mask = mask[(None,) * (4 - mask.ndim)].swapaxes(1, 2)
    return mask
