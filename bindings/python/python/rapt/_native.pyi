"""The native half of `rapt`. Tensors are `Any`: numpy arrays, torch tensors or objects with `__dlpack__`."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, final

from rapt import Causal, Layout, Window

__version__: str

class RaptError(Exception): ...
class DtypeMismatchError(RaptError, TypeError): ...
class UnsupportedDtypeError(RaptError, TypeError): ...
class ShapeError(RaptError, ValueError): ...
class LayoutError(RaptError, ValueError): ...
class OptionError(RaptError, ValueError): ...
class DeviceError(RaptError, RuntimeError): ...
class KindError(RaptError, TypeError): ...
class UnsupportedError(RaptError, NotImplementedError): ...

@final
class Plan:
    """What will run for a request. `str()` is a table."""

    @property
    def kernel(self) -> str: ...
    @property
    def isa(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def accumulation(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def why_not_faster(self) -> str: ...
    @property
    def flops(self) -> float: ...
    @property
    def bytes_read(self) -> float: ...
    @property
    def bytes_written(self) -> float: ...
    @property
    def floor_seconds(self) -> float | None: ...
    @property
    def bytes_copied(self) -> int: ...
    @property
    def bytes_packed(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def num_splits(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def causal_alignment(self) -> Literal["top_left", "bottom_right"] | None: ...
    @property
    def p_rounding(self) -> str: ...
    @property
    def kv_in_place(self) -> bool: ...
    @property
    def certificate(self) -> dict[str, dict[str, Any]] | None: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class Context:
    """Owns threads and caches; the module functions use a default one."""

    def __new__(cls, threads: int | None = None) -> Context: ...
    def __enter__(self) -> Context: ...
    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool: ...
    @property
    def threads(self) -> int: ...
    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        mask: Any = None,
        causal: Causal = None,
        window: Window = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: Any = None,
        alibi_slopes: Any = None,
        layout: Layout = "bhsd",
        out: Any = None,
        out_dtype: Any = None,
        return_lse: bool = False,
    ) -> Any: ...
    def explain(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        mask: Any = None,
        causal: Causal = None,
        window: Window = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: Any = None,
        alibi_slopes: Any = None,
        layout: Layout = "bhsd",
        out: Any = None,
        out_dtype: Any = None,
        return_lse: bool = False,
    ) -> Plan: ...

def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: Causal = None,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    layout: Layout = "bhsd",
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
) -> Any: ...
def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: Causal = None,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    layout: Layout = "bhsd",
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
) -> Plan: ...
def run_into(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    sinks: Any,
    alibi_slopes: Any,
    out: Any,
    lse: Any,
    causal: Causal = None,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    /,
) -> None:
    """Fills `out` (and `lse`) of any strides. The caller has seen to gradients."""

def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any: ...
def torch_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    out: Any = None,
    /,
) -> Any:
    """PyTorch's signature on torch tensors into `out` of any strides, or a new tensor. The caller has seen to gradients."""

def refuse_torch(name: str, tensor: Any, /) -> None:
    """Raises for a torch tensor whose memory is not its value."""

def torch_plain_keys() -> list[int]: ...
def count_served() -> None: ...
def served() -> int: ...
@final
class TorchKernel:
    """`aten::scaled_dot_product_attention` under one dispatch key; `cold` answers what it does not."""

    def __new__(
        cls,
        cold: Callable[..., Any],
        empty_out: Callable[..., Any],
        allowed: list[Callable[[], bool]],
        forward_ad: Any,
        with_keyset: bool,
    ) -> TorchKernel: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def is_available(name: str) -> bool: ...
def version() -> tuple[int, int, int]: ...
def dtypes() -> list[tuple[str, str, int, int, bool]]: ...
def accumulation(dtype: Any) -> str: ...
def log_fallback(reason: str) -> None: ...
def shares_torch_pool() -> bool: ...
def doctor() -> dict[str, Any]: ...
