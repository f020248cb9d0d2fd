"""Operators that PyTorch fuses in inference and takes apart nowhere: their parts, as PyTorch defines them.

`nn.TransformerEncoderLayer` in evaluation without gradients is one operator. Its kernel reads a mask of numbers as booleans: whatever
is not 0 is masked, and a query all of whose keys are masked gives NaN.
"""

import torch
from torch.nn import functional


def encoder_layer(
    src,
    embed_dim,
    num_heads,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    use_gelu,
    norm_first,
    eps,
    norm_weight_1,
    norm_bias_1,
    norm_weight_2,
    norm_bias_2,
    ffn_weight_1,
    ffn_bias_1,
    ffn_weight_2,
    ffn_bias_2,
    mask=None,
    mask_type=None,
):
    """`aten._transformer_encoder_layer_fwd`."""
    blocked = None
    if mask is not None:
        blocked = blocked_keys(mask, mask_type, src, num_heads)
        if blocked is None:
            return NotImplemented

    def attend(x):
        heads = functional.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, embed_dim // num_heads))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=None if blocked is None else ~blocked)
        if blocked is not None:
            out = out.masked_fill(blocked.all(-1, keepdim=True), float("nan"))
        out = out.transpose(1, 2).flatten(2)
        return functional.linear(out, proj_weight, proj_bias)

    def feed(x):
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    def first(x):
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x):
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))


def blocked_keys(mask, mask_type, src, num_heads):
    """Which keys each query does not attend to, broadcastable to `[batch, heads, queries, keys]`; None where the kind of mask is
    another than `nn.MultiheadAttention.merge_masks` makes."""
    batch, length = src.shape[:2]
    blocked = mask.to(torch.bool)
    if mask_type == 0 and mask.shape == (length, length):
        return blocked
    if mask_type == 1 and mask.shape == (batch, length):
        return blocked[:, None, None, :]
    if mask_type in (None, 2) and mask.shape == (batch, num_heads, length, length):
        return blocked
    return None


def parts():
    """The operators, each with the function that is its parts."""
    return {torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer}
