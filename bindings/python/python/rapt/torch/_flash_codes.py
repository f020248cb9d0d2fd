"""PyTorch's flash op of codes, `aten::_scaled_dot_product_flash_attention.quantized`, answered by Rapt on CPU and on NVIDIA GPUs.

    torch.nn.attention.experimental._scaled_dot_product_attention_quantized(q, k, v, q_descale=, k_descale=, v_descale=)

PyTorch has the op for FlashAttention-3, q, k and v of float8_e4m3fn and a bfloat16 answer. Rapt computes exactly what codes and factors say. All
three factors are float32 [batch, num_kv_heads], that of q too. A factor that is missing is an error, where FlashAttention-3 takes 1.
`register_backend` and the flash implementation "RAPT" take the op (`_flash`).
What Rapt does not serve is PyTorch's own kernel's where this process has one, and counted with its reason.
"""

import torch
from rapt import OptionError, ShapeError, UnsupportedError

from . import _ops, _outputs
from ._dispatcher import Held
from ._stats import count_fallback

_NAME = "_scaled_dot_product_flash_attention"
_OVERLOAD = getattr(getattr(torch.ops.aten, _NAME), "quantized", None)
_FULL_NAME = f"aten::{_NAME}.quantized"
_DEVICES = ("CPU", "CUDA")

# (torch 2.11)
TAKES_CODES = _OVERLOAD is not None and hasattr(torch.library, "get_kernel")


def _attention(
    keyset, query, key, value, q_descale, k_descale, v_descale, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):  # fmt: skip
    """(out, lse, and what a backward kernel would need), as the op of numbers answers."""

    def own(reason):
        if reason:
            count_fallback(reason)
        stock = _codes.stock.get(query.device.type.upper())
        if stock is None:
            why = reason or "nobody has registered Rapt"
            raise NotImplementedError(f"{_FULL_NAME} is PyTorch's own for this call ({why}), and PyTorch has none on {query.device.type}")
        return stock.call_boxed(
            keyset, query, key, value, q_descale, k_descale, v_descale, dropout_p, is_causal, return_debug_mask, scale=scale
        )  # fmt: skip

    if _codes.is_idle():
        return own(None)
    strange = next((x.dtype for x in (query, key, value) if x.dtype != torch.float8_e4m3fn), None)
    if strange is not None:
        return own(f"dtype {strange}")
    if dropout_p != 0.0:
        return own("dropout")
    if return_debug_mask:
        return own("debug mask")
    _check(query, key, value, is_causal, {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale})
    out = _outputs.new(query, (*query.shape[:-1], value.shape[-1]), "query", torch.bfloat16)
    factors = {"k_descale": k_descale, "v_descale": v_descale}
    if query.is_cuda:
        # The kernels for prompts over codes take q as numbers. Each code is a bfloat16, and a key head's factors multiply the same scores.
        query, factors["k_descale"] = query.to(torch.bfloat16), q_descale * k_descale
    else:
        factors["q_descale"] = q_descale.repeat_interleave(query.shape[1] // key.shape[1], 1)
    options = {"causal": "top_left" if is_causal else None, "scale": scale, "out": out, "out_dtype": out.dtype, "return_lse": True}
    _, lse = _ops.attention(query, key, value, **options, **factors)
    seed, offset = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def _check(query, key, value, is_causal, factors):
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ShapeError(f"{name} has shape {tuple(x.shape)}; [batch, heads, len, head_dim] is asked. Mend: `{name}[None]`")
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(f"query has {heads} heads and key {kv_heads}; allowed: a multiple of those of key")
    asked = (key.shape[0], kv_heads)
    for name, factor in factors.items():
        if factor is None:
            raise OptionError(f"{name} = None; allowed: a float32 tensor [batch, num_kv_heads]: codes alone are no numbers. Mend: `torch.ones({asked})`")
        if factor.dtype != torch.float32 or tuple(factor.shape) != asked:
            given = f"{factor.dtype} {list(factor.shape)}"
            raise ShapeError(f"{name} is {given}; allowed: torch.float32 {list(asked)}, [batch, num_kv_heads]")
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            f"is_causal with {query.shape[2]} queries and {key.shape[2]} keys: PyTorch aligns the first ones and FlashAttention-3 the last. "
            'Mend: `rapt.attention(..., causal="top_left")` or `causal="bottom_right"`'
        )


class _Codes(Held):
    """The op at both devices; `stock` has PyTorch's own kernels."""

    def __init__(self):
        super().__init__(_OVERLOAD)
        self.stock = {}

    def put(self, library):
        for device in _DEVICES:
            if torch._C._dispatch_has_kernel_for_dispatch_key(_FULL_NAME, device):
                self.stock[device] = torch.library.get_kernel(_FULL_NAME, device)
            library.impl(f"{_NAME}.quantized", _attention, device, with_keyset=True, allow_override=True)


_codes = _Codes()


def take():
    """Make the op Rapt's, where this torch has it."""
    if TAKES_CODES:
        _codes.take()


def leave():
    """Take back one `take()`: the kernels stay, idle."""
    if TAKES_CODES:
        _codes.leave()


def retire():
    """Take the idle kernels out."""
    if TAKES_CODES:
        _codes.retire()
