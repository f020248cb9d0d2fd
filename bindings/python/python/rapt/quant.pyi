from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, final

Format: TypeAlias = Literal["int8", "uint8", "int4", "e4m3fn", "e5m2", "mxfp8", "mxfp4", "nvfp4"]
Granularity: TypeAlias = Literal["tensor", "head", "token", "channel", "block"]
ScaleLayout: TypeAlias = Literal["plain", "swizzle_32_4_4"]

FORMATS: tuple[Format, ...]

@final
class Errors:
    """How far the numbers of a `Quantized` lie from those that it was made of."""

    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def nbytes(self) -> int: ...
    def matrix(self, at: int) -> dict[str, Any]: ...

@final
class Quantized:
    """A quantized tensor: codes and what makes numbers of them."""

    def __init__(
        self,
        codes: Any,
        scale: Any,
        *,
        format: Format,
        shape: Iterable[int],
        granularity: Granularity | None = None,
        block_size: int | None = None,
        zero_point: Any = None,
        global_scale: float | None = None,
        scale_layout: ScaleLayout = "plain",
        original: Any = None,
        errors: Errors | None = None,
    ) -> None: ...
    @property
    def codes(self) -> Any: ...
    @property
    def scale(self) -> Any: ...
    @property
    def zero_point(self) -> Any: ...
    @property
    def global_scale(self) -> float | None: ...
    @property
    def format(self) -> Format: ...
    @property
    def granularity(self) -> Granularity: ...
    @property
    def block_size(self) -> int | None: ...
    @property
    def scale_layout(self) -> ScaleLayout: ...
    @property
    def original(self) -> Any: ...
    @property
    def errors(self) -> Errors | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def dequantize(self, dtype: Any = None) -> Any: ...
    def to(self, device: Any) -> Quantized: ...

def quantize(
    x: Any,
    format: Format,
    *,
    granularity: Granularity | None = None,
    block_size: int | None = None,
    scale: Any = None,
    zero_point: Any = None,
    scale_layout: ScaleLayout = "plain",
    keep_original: bool = False,
    measure_errors: bool | None = None,
) -> Quantized:
    """The codes and scales of `x`."""

def dequantize(quantized: Quantized, dtype: Any = None) -> Any:
    """The numbers of a `Quantized`, float32 unless `dtype` says otherwise."""

class Stats(TypedDict):
    """What calls with a tolerance came to, and how many had products of int8."""

    calls: int
    refused: int
    quantized: int
    fell_back: int
    worst_estimate: float
    worst_bound: float
    int8_calls: int

def stats() -> Stats:
    """What calls of `rapt.attention` with a tolerance came to in this process, and how many had `compute="int8"`."""

def reset_stats() -> None:
    """Count from 0 again."""

class Candidate(NamedTuple):
    """One way to quantize a tensor, tried on it."""

    format: Format
    granularity: Granularity
    block_size: int | None
    mse: float
    relative_l2: float
    nbytes: int

class Analysis(NamedTuple):
    """The figures of a tensor and of each way to quantize it."""

    min: float
    max: float
    range: float
    variance: float
    mean_abs: float
    sparsity: float
    quartiles: tuple[float, float]
    outliers: int
    outlier_share: float
    candidates: tuple[Candidate, ...]
    recommended: dict[Format, Candidate]

def analyze(x: Any, *, formats: Iterable[Format] = ..., block_size: int = 32) -> Analysis:
    """The figures of `x`, and the error of each format and granularity measured on it."""
