"""Attention on arrays of MLX, where they lie."""

from typing import Any

def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: Any = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    layout: str = "bhsd",
    out: None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    stream: Any = None,
) -> Any: ...
