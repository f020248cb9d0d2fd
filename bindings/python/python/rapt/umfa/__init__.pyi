"""The public names of Universal Metal Flash Attention, with Rapt behind them."""

import enum
from types import TracebackType
from typing import Any, Literal, TypeAlias

from rapt import Context

Precision: TypeAlias = (
    Literal["fp16", "float16", "half", "bf16", "bfloat16", "fp32", "float32", "float", "int8", "int4"]
)

class QuantizationPrecision(enum.Enum):
    """How q, k or v is stored: as numbers of a dtype, or as codes."""

    FP16 = 0
    BF16 = 1
    FP32 = 2
    INT8 = 3
    INT4 = 4
    def __int__(self) -> int: ...

class QuantizationGranularity(enum.Enum):
    """Which elements share a scale."""

    TENSOR_WISE = 0
    ROW_WISE = 1
    BLOCK_WISE = 2
    HYBRID = 3
    def __int__(self) -> int: ...

class OutputPrecision(enum.Enum):
    """The dtype of the result."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    def __int__(self) -> int: ...

class HybridStrategy(enum.Enum):
    """How much more error than the least a smaller candidate may have."""

    PERFORMANCE_FIRST = 0
    ACCURACY_FIRST = 1
    BALANCED = 2
    def __int__(self) -> int: ...

class BlockSizeConfig:
    """The elements that share a scale: tokens of q, k and v, heads, and elements along head_dim (None: all)."""

    query_block_size: int
    key_block_size: int
    value_block_size: int
    head_block_size: int
    dim_block_size: int | None
    def __init__(
        self, q_blk: int = 128, k_blk: int = 64, v_blk: int = 64, h_blk: int = 1, d_blk: int | None = None
    ) -> None: ...

class TensorAnalysisMetrics:
    """What `analyze_tensor_characteristics` measures."""

    dynamic_range: float
    variance: float
    mean_abs_value: float
    tensor_size: int
    memory_footprint: int
    sparsity_ratio: float
    has_outliers: bool
    quantization_error_estimate: float
    def __init__(self) -> None: ...

class HybridGranularityConfig:
    """What HYBRID chose for each operand, and why."""

    query_granularity: QuantizationGranularity
    key_granularity: QuantizationGranularity
    value_granularity: QuantizationGranularity
    query_blocks: BlockSizeConfig
    key_blocks: BlockSizeConfig
    value_blocks: BlockSizeConfig
    selection_reasoning: str
    def __init__(self) -> None: ...

class QuantizationConfig:
    """What quantized attention does."""

    query_precision: QuantizationPrecision
    key_precision: QuantizationPrecision
    value_precision: QuantizationPrecision
    granularity: QuantizationGranularity
    block_sizes: BlockSizeConfig
    output_precision: OutputPrecision
    is_causal: bool
    scale: float | None
    enable_mixed_precision: bool
    force_symmetric_quantization: bool
    hybrid_strategy: HybridStrategy
    enable_per_tensor_granularity: bool
    enable_adaptive_block_sizes: bool
    def __init__(self) -> None: ...
    @property
    def precision(self) -> str: ...
    @precision.setter
    def precision(self, value: Precision) -> None: ...
    @property
    def hybrid_selection(self) -> HybridGranularityConfig | None: ...
    def validate_config(self) -> bool: ...
    def get_recommended_output_precision(self) -> OutputPrecision: ...
    @staticmethod
    def string_to_quantization_precision(text: str) -> QuantizationPrecision: ...
    @staticmethod
    def string_to_precision(text: str) -> OutputPrecision: ...
    @staticmethod
    def precision_to_string(member: OutputPrecision) -> str: ...
    @staticmethod
    def quantization_precision_to_string(member: QuantizationPrecision) -> str: ...
    @staticmethod
    def string_to_granularity(text: str) -> QuantizationGranularity: ...
    @staticmethod
    def granularity_to_string(member: QuantizationGranularity) -> str: ...

class MetalSDPABackend:
    """`register_backend` and `unregister_backend`."""

    @staticmethod
    def register_backend() -> None: ...
    @staticmethod
    def unregister_backend() -> None: ...

class MFAContext:
    """A `rapt.Context`, as `handle` until it is closed."""

    def __init__(self) -> None: ...
    @property
    def handle(self) -> Context | None: ...
    def close(self) -> None: ...
    def __bool__(self) -> bool: ...
    def __enter__(self) -> MFAContext: ...
    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

def get_version() -> tuple[int, int, int]: ...
def is_metal_available() -> bool: ...
def register_backend() -> None: ...
def unregister_backend() -> None: ...
def analyze_tensor_characteristics(tensor: Any, precision: QuantizationPrecision) -> TensorAnalysisMetrics: ...
def select_hybrid_granularities(query: Any, key: Any, value: Any, config: QuantizationConfig) -> HybridGranularityConfig: ...
def metal_scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any: ...
def quantized_scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    precision: Precision = "int8",
    is_causal: bool = False,
    scale: float | None = None,
) -> Any: ...
def quantized_scaled_dot_product_attention_unified(query: Any, key: Any, value: Any, config: QuantizationConfig) -> Any: ...
def quantized_scaled_dot_product_attention_enhanced(query: Any, key: Any, value: Any, config: QuantizationConfig) -> Any: ...
def quantized_scaled_dot_product_attention_with_config(
    query: Any, key: Any, value: Any, config: QuantizationConfig
) -> Any: ...
def flash_attention_forward(
    context: MFAContext,
    q: Any,
    k: Any,
    v: Any,
    *,
    attn_mask: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    input_precision: Precision | QuantizationPrecision | int = "fp16",
    intermediate_precision: Precision | QuantizationPrecision | int = "fp16",
    output_precision: Precision | QuantizationPrecision | int = "fp16",
) -> Any: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    context: MFAContext | None = None,
    *,
    attn_mask: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    input_precision: Precision | QuantizationPrecision | int = "fp16",
    intermediate_precision: Precision | QuantizationPrecision | int = "fp16",
    output_precision: Precision | QuantizationPrecision | int = "fp16",
) -> Any: ...
