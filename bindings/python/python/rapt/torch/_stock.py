"""What the installed torch does, where versions differ: asked of it once, before anything of it is replaced."""

import functools
import typing

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Stock(typing.NamedTuple):
    """PyTorch's kernels on the CPU."""

    follows_query: bool  # the flash output has the strides of q
    rank3: bool  # rank 3 goes to flash too
    shortcut: bool  # an empty input is answered before all else
    gqa: bool  # flash takes unexpanded groups with enable_gqa
    one_head: bool  # and one K/V head for all without it


@functools.cache
def ask():
    """Calls PyTorch's own kernels on a few numbers."""
    with _disable_current_modes(), torch.no_grad():
        sdpa = torch.ops.aten.scaled_dot_product_attention.default
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        q = torch.zeros(1, 2, 3, 2, device="cpu")
        follows_query = flash(q, q, q)[0].stride() == q.stride()
        transposed = torch.zeros(3, 2, 2, device="cpu").transpose(0, 1)
        rank3 = sdpa(transposed, transposed, transposed).stride() == transposed.stride()
        none = torch.zeros(2, 2, 0, 2, device="cpu")
        shortcut = sdpa(q, none, none).shape[0] == 1
        bshd, one_head = torch.zeros(1, 3, 2, 2, device="cpu").transpose(1, 2), torch.zeros(1, 1, 3, 2, device="cpu")
        flash_strides = flash(bshd, bshd, bshd)[0].stride()
        gqa = sdpa(bshd, one_head, one_head, enable_gqa=True).stride() == flash_strides
        one = sdpa(bshd, one_head, one_head).stride() == flash_strides
    return Stock(follows_query, rank3, shortcut, gqa, one)
