"""The types of UMFA's configuration, each field checked when it is written.

What no check lets through: a value of another type, a precision that has no such name, a block of size 0, a field that does not exist.
Deliberately absent: fallbacks. UMFA makes INT8 of a precision that it does not know; here that is an OptionError.
"""

import copy
import enum
import math
import numbers
import operator

from rapt._native import KindError, OptionError, RaptError


class _Member(enum.Enum):
    """Members turn into UMFA's numbers by `int()` and are equal to nothing of another type."""

    def __int__(self):
        return self.value


class QuantizationPrecision(_Member):
    """How q, k or v is stored: as numbers of a dtype, or as codes."""

    FP16 = 0
    BF16 = 1
    FP32 = 2
    INT8 = 3
    INT4 = 4


class QuantizationGranularity(_Member):
    """Which elements share a scale: all, a row of head_dim, a block of `BlockSizeConfig`, or what the analysis chooses."""

    TENSOR_WISE = 0
    ROW_WISE = 1
    BLOCK_WISE = 2
    HYBRID = 3


class OutputPrecision(_Member):
    """The dtype of the result."""

    FP32 = 0
    FP16 = 1
    BF16 = 2


class HybridStrategy(_Member):
    """How much more error than the least a smaller candidate may have: 4 times, none, 1.5 times."""

    PERFORMANCE_FIRST = 0
    ACCURACY_FIRST = 1
    BALANCED = 2


_P, _G, _O = QuantizationPrecision, QuantizationGranularity, OutputPrecision

# Every spelling that UMFA's PyTorch extension and its numpy package take.
PRECISIONS = {
    "fp16": _P.FP16,
    "float16": _P.FP16,
    "half": _P.FP16,
    "bf16": _P.BF16,
    "bfloat16": _P.BF16,
    "fp32": _P.FP32,
    "float32": _P.FP32,
    "float": _P.FP32,
    "int8": _P.INT8,
    "int4": _P.INT4,
}
DTYPES = {_P.FP16: "float16", _P.BF16: "bfloat16", _P.FP32: "float32"}
OUT_DTYPES = {_O.FP16: "float16", _O.BF16: "bfloat16", _O.FP32: "float32"}
FORMATS = {_P.INT8: "int8", _P.INT4: "int4"}
GRANULARITIES = {
    "tensor_wise": _G.TENSOR_WISE,
    "tensor": _G.TENSOR_WISE,
    "row_wise": _G.ROW_WISE,
    "row": _G.ROW_WISE,
    "block_wise": _G.BLOCK_WISE,
    "block": _G.BLOCK_WISE,
    "hybrid": _G.HYBRID,
}


def precision_named(name, value):
    """The `QuantizationPrecision` of a spelling; argument `name` is blamed for one that is unknown."""
    if isinstance(value, str) and value.lower() in PRECISIONS:
        return PRECISIONS[value.lower()]
    raise OptionError(f"{name} = {value!r}; allowed: {', '.join(map(repr, PRECISIONS))}")


def kind_checked(name, value, kind):
    """`value`, which is a `kind`."""
    if isinstance(value, kind):
        return value
    raise KindError(f"{name} is a {type(value).__name__}: asked is a {kind.__name__}. Mend: `{kind.__name__}()`")


def spelled(member):
    """The first spelling of a precision or granularity: "int8", "row_wise"."""
    table = PRECISIONS if isinstance(member, _P) else GRANULARITIES
    return next(text for text, it in table.items() if it is member)


# Fields: a check takes the field's name and the value that is written, and gives the value that is kept.


def _member(kind):
    def check(name, value):
        if isinstance(value, kind):
            return value
        meant = value.upper() if isinstance(value, str) else ""
        hint = f". Mend: `{kind.__name__}.{meant}`" if meant in kind.__members__ else ""
        allowed = ", ".join(f"{kind.__name__}.{it}" for it in kind.__members__)
        raise OptionError(f"{name} = {value!r}; allowed: {allowed}{hint}")

    return check


def _flag(name, value):
    if isinstance(value, bool):
        return value
    raise OptionError(f"{name} = {value!r}; allowed: True, False")


def _size(name, value):
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size > 0:
        return size
    raise OptionError(f"{name} = {value!r}; allowed: an int from 1 up")


def _size_or_none(name, value):
    return None if value is None else _size(name, value)


def _number(name, value):
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise OptionError(f"{name} = {value!r}; allowed: any finite number")


def _number_or_none(name, value):
    return None if value is None else _number(name, value)


def _text(name, value):
    if isinstance(value, str):
        return value
    raise OptionError(f"{name} = {value!r}; allowed: a str")


def _record(kind):
    # A copy: UMFA's records are values too.
    return lambda name, value: copy.copy(kind_checked(name, value, kind))


class _Record:
    """`_fields`: name -> (check, default). What is no field can be neither written nor deleted."""

    _fields = {}

    def __init__(self):
        for name, (_, default) in self._fields.items():
            setattr(self, name, default)

    def __setattr__(self, name, value):
        kind = type(self)
        if name in self._fields:
            object.__setattr__(self, name, self._fields[name][0](f"{kind.__name__}.{name}", value))
        elif isinstance(getattr(kind, name, None), property):
            object.__setattr__(self, name, value)
        else:
            raise OptionError(f"{kind.__name__} has no field {name!r}; allowed: {', '.join(self._fields)}")

    def __delattr__(self, name):
        raise OptionError(f"{type(self).__name__}.{name} cannot be deleted")

    def _values(self):
        return tuple(getattr(self, name) for name in self._fields)

    def __copy__(self):
        made = type(self)()
        for name, value in zip(self._fields, self._values()):
            setattr(made, name, value)
        return made

    def __eq__(self, other):
        return self._values() == other._values() if type(self) is type(other) else NotImplemented

    __hash__ = None

    def __repr__(self):
        values = (f"{name}={value!s}" for name, value in zip(self._fields, self._values()))
        return f"{type(self).__name__}({', '.join(values)})"


class BlockSizeConfig(_Record):
    """The elements that share a scale: so many tokens of q, k and v, of so many heads, of `dim_block_size` elements along head_dim.

    dim_block_size is Rapt's own; None is all of head_dim, as UMFA has it.
    """

    _fields = {
        "query_block_size": (_size, 128),
        "key_block_size": (_size, 64),
        "value_block_size": (_size, 64),
        "head_block_size": (_size, 1),
        "dim_block_size": (_size_or_none, None),
    }

    def __init__(self, q_blk=128, k_blk=64, v_blk=64, h_blk=1, d_blk=None):
        for name, value in zip(self._fields, (q_blk, k_blk, v_blk, h_blk, d_blk)):
            setattr(self, name, value)


class TensorAnalysisMetrics(_Record):
    """What `analyze_tensor_characteristics` measures.

    dynamic_range: max - min. variance: of the population. sparsity_ratio: share of |x| < 1e-6. memory_footprint: bytes.
    has_outliers: more than 1 % lie beyond 1.5 interquartile ranges. quantization_error_estimate: the mean squared error, measured.
    """

    _fields = {
        "dynamic_range": (_number, 0.0),
        "variance": (_number, 0.0),
        "mean_abs_value": (_number, 0.0),
        "tensor_size": (_number, 0),
        "memory_footprint": (_number, 0),
        "sparsity_ratio": (_number, 0.0),
        "has_outliers": (_flag, False),
        "quantization_error_estimate": (_number, 0.0),
    }


class HybridGranularityConfig(_Record):
    """What HYBRID chose for each operand, its blocks where it is BLOCK_WISE, and the figures that decided."""

    _fields = {
        "query_granularity": (_member(_G), _G.TENSOR_WISE),
        "key_granularity": (_member(_G), _G.TENSOR_WISE),
        "value_granularity": (_member(_G), _G.TENSOR_WISE),
        "query_blocks": (_record(BlockSizeConfig), BlockSizeConfig()),
        "key_blocks": (_record(BlockSizeConfig), BlockSizeConfig()),
        "value_blocks": (_record(BlockSizeConfig), BlockSizeConfig()),
        "selection_reasoning": (_text, ""),
    }


class QuantizationConfig(_Record):
    """What quantized attention does. docs/guides/umfa.md says what each field means here.

    precision: writes key_precision and value_precision; reads "mixed" where they differ.
    hybrid_selection: the `HybridGranularityConfig` of the last call with granularity HYBRID, or None.
    """

    _fields = {
        "query_precision": (_member(_P), _P.FP16),
        "key_precision": (_member(_P), _P.INT8),
        "value_precision": (_member(_P), _P.INT8),
        "granularity": (_member(_G), _G.TENSOR_WISE),
        "block_sizes": (_record(BlockSizeConfig), BlockSizeConfig()),
        "output_precision": (_member(_O), _O.FP32),
        "is_causal": (_flag, False),
        "scale": (_number_or_none, None),
        "enable_mixed_precision": (_flag, True),
        "force_symmetric_quantization": (_flag, False),
        "hybrid_strategy": (_member(HybridStrategy), HybridStrategy.BALANCED),
        "enable_per_tensor_granularity": (_flag, False),
        "enable_adaptive_block_sizes": (_flag, True),
    }

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "_hybrid_selection", None)

    @property
    def precision(self):
        return spelled(self.key_precision) if self.key_precision is self.value_precision else "mixed"

    @precision.setter
    def precision(self, value):
        self.key_precision = self.value_precision = precision_named("QuantizationConfig.precision", value)

    @property
    def hybrid_selection(self):
        return self._hybrid_selection

    def _keep(self, selection):
        object.__setattr__(self, "_hybrid_selection", selection)

    def _precisions(self):
        """The precision of each operand; all are one where they may not be mixed."""
        found = {"query": self.query_precision, "key": self.key_precision, "value": self.value_precision}
        if not self.enable_mixed_precision and len(set(found.values())) > 1:
            stands = ", ".join(f"{name}_precision {it.name}" for name, it in found.items())
            raise OptionError(
                f"enable_mixed_precision = False with {stands}: the three are then one. "
                f"Mend: `config.query_precision = config.value_precision = config.key_precision`"
            )
        return found

    def validate_config(self):
        """Whether a call with this takes it; the call's error says why not."""
        try:
            self._precisions()
        except RaptError:
            return False
        return True

    def get_recommended_output_precision(self):
        """`output_precision` unless it is FP32; else FP16 with codes, and the precision of q without."""
        precisions = (self.query_precision, self.key_precision, self.value_precision)
        if self.output_precision is not _O.FP32:
            return self.output_precision
        return _O.FP16 if any(it in FORMATS for it in precisions) else _O[self.query_precision.name]

    @staticmethod
    def string_to_quantization_precision(text):
        return precision_named("precision", text)

    @staticmethod
    def string_to_precision(text):
        found = precision_named("precision", text)
        if found in FORMATS:
            raise OptionError(f"precision = {text!r}; allowed: 'fp32', 'fp16', 'bf16': an output is no codes")
        return _O[found.name]

    @staticmethod
    def precision_to_string(member):
        return _member(_O)("precision", member).name.lower()

    @staticmethod
    def quantization_precision_to_string(member):
        return spelled(_member(_P)("precision", member))

    @staticmethod
    def string_to_granularity(text):
        if isinstance(text, str) and text in GRANULARITIES:
            return GRANULARITIES[text]
        raise OptionError(f"granularity = {text!r}; allowed: {', '.join(map(repr, GRANULARITIES))}")

    @staticmethod
    def granularity_to_string(member):
        return spelled(_member(_G)("granularity", member))
