"""HYBRID: a granularity for each operand, out of what each candidate was measured to cost on it.

Candidates: TENSOR_WISE, ROW_WISE and BLOCK_WISE. Blocks are 16, 32 or 64 elements along head_dim if sizes are adaptive, else those of the
configuration. An INT8 candidate becomes uint8 with a zero point where that has at most 0.75 times the error, as with numbers of one
sign, unless symmetry is forced. Chosen is the smallest in bytes of those within the strategy's factor of the least error.

Deliberately absent: an estimate. UMFA weighs formulas of variance and range; here candidates are quantized and compared.
"""

import collections

import rapt
from rapt._native import NumberError, OptionError

from ._config import FORMATS, BlockSizeConfig, HybridGranularityConfig, HybridStrategy, QuantizationConfig
from ._config import QuantizationGranularity as Granularity
from ._config import QuantizationPrecision as Precision
from ._config import TensorAnalysisMetrics, kind_checked, spelled
from ._operands import as_float64, dtype_name, quantized, rounded, torch_of

WITHIN = {HybridStrategy.PERFORMANCE_FIRST: 4.0, HybridStrategy.BALANCED: 1.5, HybridStrategy.ACCURACY_FIRST: 1.0}
ZERO_POINT_GAIN = 0.75
ADAPTIVE_SIZES = (16, 32, 64)
OUTLIER_SHARE = 0.01
ANALYZED = {Granularity.TENSOR_WISE: "tensor", Granularity.ROW_WISE: "token", Granularity.BLOCK_WISE: "block"}

# How an operand is quantized: `block` is (tokens, heads, dims) of BLOCK_WISE, else None.
Choice = collections.namedtuple("Choice", "granularity format block relative_l2 nbytes")


def analyze_tensor_characteristics(tensor, precision):
    """The `TensorAnalysisMetrics` of an array or tensor, by `rapt.quant.analyze`.

    The error is that of the codes of `precision` with one scale, or of rounding to its dtype.
    """
    kind_checked("precision", precision, Precision)
    dtype_name("tensor", tensor)
    is_codes = precision in FORMATS
    found = rapt.quant.analyze(tensor, formats=[FORMATS[precision]] if is_codes else [])
    if is_codes:
        error = next(it.mse for it in found.candidates if it.granularity == "tensor")
    else:
        off = as_float64(rounded("tensor", tensor, precision, "QuantizationPrecision.FP32")) - as_float64(tensor)
        error = float((off * off).mean())
    is_torch = torch_of(tensor) is not None
    metrics = TensorAnalysisMetrics()
    metrics.dynamic_range, metrics.variance, metrics.mean_abs_value = found.range, found.variance, found.mean_abs
    metrics.tensor_size = tensor.numel() if is_torch else tensor.size
    metrics.memory_footprint = metrics.tensor_size * (tensor.element_size() if is_torch else tensor.itemsize)
    metrics.sparsity_ratio, metrics.has_outliers = found.sparsity, found.outlier_share > OUTLIER_SHARE
    metrics.quantization_error_estimate = error
    return metrics


def select_hybrid_granularities(query, key, value, config):
    """What HYBRID takes for these tensors: a `HybridGranularityConfig` with its reason."""
    kind_checked("config", config, QuantizationConfig)
    return choose({"query": query, "key": key, "value": value}, config)[1]


def choose(tensors, config):
    """({operand: Choice} of those that become codes, HybridGranularityConfig)."""
    precisions = config._precisions()
    for name, x in tensors.items():
        dtype_name(name, x)
    dim = min(x.shape[-1] for x in tensors.values())
    coded = [name for name in tensors if precisions[name] in FORMATS]
    candidates = {name: _candidates(name, tensors[name], precisions[name], config, dim) for name in coded}
    if config.enable_per_tensor_granularity:
        picks = {name: _pick(found, config) for name, found in candidates.items()}
        reasons = [f"{name}: {reason}" for name, (_, reason) in picks.items()]
    elif coded:
        key, reason = _pick(_together(candidates.values()), config)
        picks, reasons = dict.fromkeys(coded, (key, reason)), [f"{', '.join(coded)}: {reason}"]
    else:
        picks, reasons = {}, []
    choices = {name: candidates[name][key] for name, (key, _) in picks.items()}
    reasons += [f"{name}: uint8 with a zero point, for its lower error" for name in coded if choices[name].format == "uint8"]
    reasons += [f"{name}: {precisions[name].name}, no codes" for name in tensors if name not in coded]
    return choices, _selection(choices, config, "; ".join(reasons))


def _selection(choices, config, reason):
    made = HybridGranularityConfig()
    for name in ("query", "key", "value"):
        setattr(made, f"{name}_blocks", config.block_sizes)
        if name in choices:
            setattr(made, f"{name}_granularity", choices[name].granularity)
            if choices[name].block is not None and config.enable_adaptive_block_sizes:
                setattr(made, f"{name}_blocks", BlockSizeConfig(1, 1, 1, 1, choices[name].block[2]))
    made.selection_reasoning = reason
    return made


def block_of(name, config):
    """(tokens, heads, dims) of an operand's blocks."""
    sizes = config.block_sizes
    return getattr(sizes, f"{name}_block_size"), sizes.head_block_size, sizes.dim_block_size


def _candidates(name, x, precision, config, dim):
    """{(granularity, elements of a block along head_dim): Choice}. `dim` is the least head_dim."""
    format = FORMATS[precision]
    formats = [format] if precision is Precision.INT4 or config.force_symmetric_quantization else [format, "uint8"]
    sizes = [size for size in ADAPTIVE_SIZES if size < dim] or [dim]
    blocks = [(1, 1, size) for size in sizes] if config.enable_adaptive_block_sizes else [block_of(name, config)]
    try:
        analysis = rapt.quant.analyze(x, formats=formats, block_size=max(sizes[0], 1))
    except (NumberError, OptionError) as error:
        raise type(error)(f"{name}: {error}") from None
    known = {(it.format, it.granularity, it.block_size): it for it in analysis.candidates}
    numbers = as_float64(x)

    def measured(format, granularity, block):
        size = None if block is None else block[2]
        found = known.get((format, ANALYZED[granularity], size)) if block is None or block[:2] == (1, 1) else None
        if found is not None:
            return Choice(granularity, format, block, found.relative_l2, found.nbytes)
        codes = quantized(name, x, format, granularity, block)
        return Choice(granularity, format, block, _relative_l2(codes, numbers), codes.nbytes)

    best = {}
    for granularity, block in [(Granularity.TENSOR_WISE, None), (Granularity.ROW_WISE, None), *((Granularity.BLOCK_WISE, it) for it in blocks)]:
        choice = measured(format, granularity, block)
        # Zero points of a block of several tokens are not computed.
        if "uint8" in formats and (block is None or block[:2] == (1, 1)):
            other = measured("uint8", granularity, block)
            choice = other if other.relative_l2 <= ZERO_POINT_GAIN * choice.relative_l2 else choice
        best[granularity, None if block is None else block[2]] = choice
    return best


def _relative_l2(codes, numbers):
    off = as_float64(codes.dequantize("float64")) - numbers
    of = (numbers * numbers).sum()
    return float(((off * off).sum() / of) ** 0.5) if of > 0 else 0.0


def _together(candidates):
    """One candidate for all operands: the root of the mean square of errors, the sum of bytes."""
    candidates = list(candidates)
    joined = {}
    for key, first in candidates[0].items():
        each = [found[key] for found in candidates]
        error = (sum(it.relative_l2**2 for it in each) / len(each)) ** 0.5
        joined[key] = first._replace(relative_l2=error, nbytes=sum(it.nbytes for it in each))
    return joined


def _pick(candidates, config):
    """(key of the chosen candidate, why)."""
    within = WITHIN[config.hybrid_strategy]
    best = min(candidates, key=lambda key: candidates[key].relative_l2)
    least = candidates[best].relative_l2
    allowed = [key for key, it in candidates.items() if it.relative_l2 <= within * least]
    key = min(allowed, key=lambda key: (candidates[key].nbytes, candidates[key].relative_l2))
    chosen = candidates[key]
    rule = "the least error" if within == 1 else f"the smallest within {within:g} times the least error, {least:.2e} of {_named(best)}"
    return key, f"{_named(key)}, relative L2 {chosen.relative_l2:.2e} in {chosen.nbytes:,} bytes: {rule}"


def _named(key):
    granularity, size = key
    return spelled(granularity) if size is None else f"{spelled(granularity)} {size}"
