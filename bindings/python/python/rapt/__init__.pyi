"""Attention with an exact tensor boundary: any strides, no hidden cast, no hidden copy."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, TypedDict

from rapt import flash_attn as flash_attn
from rapt import layout as layout
from rapt import quant as quant
from rapt import torch as torch
from rapt import umfa as umfa
from rapt._audit.diagnose import Diagnosis as _Diagnosis
from rapt._audit.report import Report as _AuditReport
from rapt._doctor import Report as Report
from rapt._doctor import doctor as doctor
from rapt._model import Model as Model
from rapt._model import Session as Session
from rapt._model import load as load
from rapt._native import Context as Context
from rapt._native import DeviceError as DeviceError
from rapt._native import DivisionError as DivisionError
from rapt._native import DtypeBoundaryError as DtypeBoundaryError
from rapt._native import DtypeMismatchError as DtypeMismatchError
from rapt._native import IndexRangeError as IndexRangeError
from rapt._native import KVCache as KVCache
from rapt._native import KindError as KindError
from rapt._native import LayoutError as LayoutError
from rapt._native import NumberError as NumberError
from rapt._native import OptionError as OptionError
from rapt._native import Plan as Plan
from rapt._native import ProgramError as ProgramError
from rapt._native import RaggedPlan as RaggedPlan
from rapt._native import RaptError as RaptError
from rapt._native import ShapeError as ShapeError
from rapt._native import UnsupportedDtypeError as UnsupportedDtypeError
from rapt._native import UnsupportedError as UnsupportedError
from rapt._native import __version__ as __version__
from rapt._native import accumulation as accumulation
from rapt._native import dtypes as dtypes
from rapt._native import explain as explain
from rapt._native import explain_varlen as explain_varlen
from rapt._native import explain_with_kvcache as explain_with_kvcache
from rapt._native import is_available as is_available
from rapt._native import version as version
from rapt.quant import Quantized as Quantized
from rapt.quant import dequantize as dequantize
from rapt.quant import quantize as quantize

Causal: TypeAlias = Literal["top_left", "bottom_right"] | bool | None
Layout: TypeAlias = Literal["bhsd", "bshd"]
Compute: TypeAlias = Literal["exact", "int8", "fp8"]
Window: TypeAlias = tuple[int | None, int | None] | None

class _Read(TypedDict, total=False):
    # table.rs: fields
    mask: Any
    causal: Causal
    window: Window
    softcap: float | None
    scale: float | None
    sinks: Any
    alibi_slopes: Any
    layout: Layout
    q_descale: Any
    k_descale: Any
    v_descale: Any
    q_zero_point: Any
    k_zero_point: Any
    v_zero_point: Any
    compute: Compute
    # end

class _Options(_Read, total=False):
    out: Any
    out_dtype: Any
    return_lse: bool
    tolerance: float | None
    device: str | None

def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    # table.rs: typed parameters
    mask: Any = None,
    causal: Causal = None,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    layout: Layout = "bhsd",
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    q_zero_point: Any = None,
    k_zero_point: Any = None,
    v_zero_point: Any = None,
    compute: Compute = "exact",
    # end
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    tolerance: float | None = None,
    device: str | None = None,
) -> Any:
    """softmax(q·kᵀ · scale)·v, in the kind, device and dtype of `q`; `(out, lse)` with `return_lse=True`."""

class _Gradients(tuple[Any, ...]):
    """`(dq, dk, dv)`, then d_mask and d_sinks where they were asked for."""

    dq: Any
    dk: Any
    dv: Any
    d_mask: Any
    d_sinks: Any

def attention_backward(
    d_o: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    d_lse: Any = None,
    mask_grad: bool = False,
    # table.rs: typed parameters
    mask: Any = None,
    causal: Causal = None,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    layout: Layout = "bhsd",
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    q_zero_point: Any = None,
    k_zero_point: Any = None,
    v_zero_point: Any = None,
    compute: Compute = "exact",
    # end
) -> _Gradients:
    """The gradients of a loss by the inputs of `attention`, from those by its outputs."""

def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    *,
    causal: Causal = None,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    q_zero_point: Any = None,
    k_zero_point: Any = None,
    v_zero_point: Any = None,
    compute: Compute = "exact",
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention of each of many sequences to its own keys, of lengths of their own, without padding."""

def varlen_attention_backward(
    d_o: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    *,
    d_lse: Any = None,
    causal: Causal = None,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    compute: Compute = "exact",
) -> _Gradients:
    """The gradients of a loss by the inputs of `varlen_attention`, from those by its outputs."""

def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Any = None,
    page_table: Any = None,
    causal: Literal["bottom_right"] | bool | None = None,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    k_zero_point: Any = None,
    v_zero_point: Any = None,
    compute: Compute = "exact",
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention to the keys of a cache, after new ones were written behind them."""

def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, for torch, numpy and DLPack alike."""

def audit(
    fn: Callable[..., Any] | str,
    device: str = "cpu",
    dtypes: Iterable[Any] | str = ("float32", "bfloat16", "float16", "float64"),
    hazards: Iterable[str] | str = "all",
    budget_s: float = 60,
    *,
    kind: Literal["auto", "torch", "numpy"] = "auto",
    show_progress: bool | None = None,
) -> _AuditReport:
    """Check any attention for boundary bugs: "torch", "rapt", "MODULE:FUNCTION" or a callable."""

def diagnose(out: Any, expected: Any = None, *, q: Any, k: Any, v: Any, **options: Any) -> _Diagnosis:
    """Name the corruption that an attention's output shows, with a confidence, or "unknown"."""
