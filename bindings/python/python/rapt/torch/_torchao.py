"""torchao's quantized attention, `torch.ops.torchao.qscaled_dot_product`: codes in, codes out, one scale and zero point for each tensor.

    o = softmax((query − q_zp)·q_scale @ ((key − k_zp)·k_scale)ᵀ · scale + mask) @ (value − v_zp)·v_scale
    uint8            round(o / o_scale) + o_zp, between 0 and 255
    float8_e4m3fn    o / o_scale between ±448, to the nearest

torchao rounds the probabilities too, by a_scale and a_zp, since its product with the values is of codes. Rapt's is not: they are
accepted and change nothing. Importing this changes nothing of torchao's.
"""

import math

import torch
from rapt import OptionError, ShapeError, UnsupportedDtypeError, UnsupportedError

from . import _ops

_NAME = "torchao::qscaled_dot_product"
# Between which codes a result is clamped.
_CODES = {torch.uint8: (0, 255), torch.float8_e4m3fn: (-448, 448)}

_library = None


def qscaled_dot_product(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    q_scale=1.0,
    q_zp=0,
    k_scale=1.0,
    k_zp=0,
    v_scale=1.0,
    v_zp=0,
    a_scale=1.0,
    a_zp=0,
    o_scale=1.0,
    o_zp=0,
):
    """`torch.ops.torchao.qscaled_dot_product`: attention on uint8 or float8_e4m3fn, [batch, heads, len, head_dim], in the same dtype.

    Beyond torchao's it takes `is_causal` (PyTorch's), boolean masks, grouped heads and values of a head_dim of their own. a_scale and
    a_zp are not used: probabilities are not rounded. Zero points are of uint8 alone.
    """
    dtype = query.dtype
    _check(query, key, value, dropout_p)
    parts = {}
    for name, factor, zero_point in (("q", q_scale, q_zp), ("k", k_scale, k_zp), ("v", v_scale, v_zp)):
        _check_scale(name, factor, zero_point, dtype)
        parts[f"{name}_descale"] = torch.tensor(factor, dtype=torch.float32, device=query.device)
        if dtype == torch.uint8:
            parts[f"{name}_zero_point"] = torch.tensor(zero_point, dtype=torch.uint8, device=query.device)
    _check_scale("o", o_scale, o_zp, dtype)
    # [batch, len, heads, head_dim] in memory, as torchao's answer lies.
    batch, heads, q_len, _ = query.shape
    out = torch.empty((batch, q_len, heads, value.shape[3]), dtype=torch.float32, device=query.device).transpose(1, 2)
    causal = "top_left" if is_causal else None
    _ops.attention(query, key, value, mask=attn_mask, causal=causal, scale=scale, out=out, out_dtype=torch.float32, **parts)
    out.div_(o_scale)
    if dtype == torch.uint8:
        out.round_().add_(o_zp)
    return out.clamp_(*_CODES[dtype]).to(dtype)


def _check(query, key, value, dropout_p):
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in _CODES or tensor.dtype != query.dtype:
            raise UnsupportedDtypeError(f"{name} has dtype {tensor.dtype}; allowed: torch.uint8 or torch.float8_e4m3fn, one for all three")
        if tensor.dim() != 4:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; [batch, heads, len, head_dim] is asked. Mend: `{name}[None]`")
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p={dropout_p} is not computed. Mend: `dropout_p=0.0`")


def _check_scale(name, factor, zero_point, dtype):
    if not 0.0 < factor < math.inf:
        raise OptionError(f"{name}_scale = {factor}; allowed: positive finite numbers")
    allowed = 255 if dtype == torch.uint8 else 0
    if not 0 <= zero_point <= allowed:
        raise OptionError(f"{name}_zp = {zero_point}; allowed with {dtype}: " + ("0 to 255" if allowed else "0"))


def register_torchao():
    """Make torchao's op Rapt's on the CPU where torchao was built without a kernel for it, as the wheel of torchao 0.18 is; after `import torchao`.

    Whether it is Rapt's from now on, for as long as the process runs. A kernel of torchao's own stays, and the answer is False.
    """
    global _library
    if not hasattr(torch.ops.torchao, "qscaled_dot_product"):
        raise UnsupportedError(f"nothing defines {_NAME}. Mend: `import torchao.ops`")
    if _library is None and not torch._C._dispatch_has_kernel_for_dispatch_key(_NAME, "CPU"):
        library = torch.library.Library("torchao", "IMPL")
        library.impl("qscaled_dot_product", qscaled_dot_product, "CPU")
        _library = library
    return _library is not None
