"""`attn_implementation="rapt"` in transformers: scaling, softcap, sliding window, sinks and GQA computed in place.

The name stays entered after `unregister_backend()`: models that were built with it go on working.
"""

import torch
from rapt import UnsupportedError

from . import _ops, _override
from ._imports import when_imported
from ._stats import count_fallback


# Why it hands on to transformers' own, beside the reasons of every call.
REASONS = ("paged cache", "position_bias", "device")


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    cache=None,
    **kwargs,
):
    """transformers' attention function: q [B,H,S,D], k and v [B,num_kv_heads,S,D] -> (out [B,S,H,Dv] contiguous, None)."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # torch.compile traces this function, so it asks the native module nothing.
    needs_grad = query.device.type not in ("cpu", "cuda") and _ops.needs_grad((query, key, value, attention_mask, s_aux, position_bias))
    drops_elsewhere = dropout != 0.0 and query.device.type not in ("cpu", "cuda")
    plain = not drops_elsewhere and not needs_grad and position_bias is None and cache is None
    if not plain or query.device.type not in ("cpu", "cuda"):
        reason = "requires grad" if needs_grad else "dropout" if drops_elsewhere else None
        if reason is None:
            reason = "paged cache" if cache is not None else "position_bias" if position_bias is not None else "device"
        return _stock(
            reason, module, query, key, value, attention_mask, dropout, scaling, is_causal, softcap, s_aux,
            position_bias=position_bias, cache=cache, **kwargs,
        )  # fmt: skip
    q_len, kv_len = query.shape[2], key.shape[2]
    # As in transformers' own sdpa function: no mask means plain causal, or a decoding step that sees every key.
    causal, window = None, None
    if attention_mask is None and is_causal:
        causal = "top_left" if q_len > 1 else None
        if sliding_window is not None and sliding_window < kv_len:
            causal = causal or "bottom_right"
            window = (sliding_window - 1, 0)
    query, key, value, attention_mask = _autocast(query, key, value, attention_mask)
    out = _ops.attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask=_mask(attention_mask, kv_len),
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scaling,
        sinks=s_aux,
        layout="bshd",
        dropout_p=dropout,
    )
    return out, None


def _autocast(*tensors):
    """What PyTorch's own function gets under autocast, whose casts stand before it."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def _mask(mask, kv_len):
    return mask if mask is None or mask.shape[-1] == kv_len else mask[..., :kv_len]


def _stock(reason, module, query, key, value, mask, dropout, scaling, is_causal, softcap, s_aux, **kwargs):
    if softcap is not None or s_aux is not None:
        raise UnsupportedError(
            f"{reason} together with softcap or sinks is not computed; call the model inside `with torch.no_grad():` "
            'and model.eval(), or use attn_implementation="eager"'
        )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Registered, the call below comes back to Rapt's kernel, which serves it or counts the reason itself.
    if not _override.is_registered() and not torch.compiler.is_compiling():
        count_fallback(reason)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )  # fmt: skip


def register_transformers():
    """Enter "rapt" into transformers' AttentionInterface and AttentionMaskInterface (imports transformers)."""
    from transformers import AttentionInterface

    _enter(AttentionInterface)


def _enter(interface):
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    interface.register("rapt", attention_forward)
    AttentionMaskInterface.register("rapt", sdpa_mask)


def register_when_imported():
    """Enter "rapt" now where transformers is loaded, else when its `modeling_utils` is."""
    when_imported("transformers.modeling_utils", lambda module: _enter(module.AttentionInterface))
