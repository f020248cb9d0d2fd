"""The functions of `flash_attn.bert_padding`: tokens of a padded batch one after another, and back."""

import torch
from rapt._native import ShapeError


def index_first_axis(input, indices):
    """The rows `indices` of `input` `[rows, ...]`."""
    return input.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """`[first_axis_dim, ...]` of zeros, with `values` in the rows `indices`."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_put((indices,), values)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """The tokens of `hidden_states` `[batch, seqlen, ...]` where `attention_mask` `[batch, seqlen]` is not 0, one after another.

    unused_mask: further tokens that are kept, and not counted as used. Returns (tokens `[total, ...]`, indices `[total]` into batch · seqlen,
    cu_seqlens int32 `[batch + 1]`, the longest as an int, the used ones of each int32 `[batch]`).
    """
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ShapeError(f"attention_mask has shape {list(attention_mask.shape)}: asked is [batch, seqlen], here {list(hidden_states.shape[:2])}")
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states, indices, batch, seqlen):
    """What `unpad_input` took apart: `[batch, seqlen, ...]`, zeros where no token was."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
