"""Which weights a call drops: two numbers of PyTorch's generator, seed and offset of Rapt's.

One draw a call, so `torch.manual_seed`, `torch.random.fork_rng` and activation checkpointing hold of Rapt's dropout as of PyTorch's own; a call without
dropout draws nothing. In a trace the draw is a node of the graph, and the op gets what it gives.
"""

import torch
from rapt import OptionError

_MOST = 2**63 - 1


def draw():
    """int64 `[2]`, from the default generator of the CPU."""
    return torch.randint(0, _MOST, (2,), dtype=torch.int64, device="cpu")


def words(p, draw):
    """Probability and draw as the ops of `torch.ops.rapt` take them; nothing where nothing is dropped."""
    return {"dropout_p": p, "dropout_draw": draw} if p else {}


def native(p, draw, first_batch=0):
    """The same as the native module takes them; `first_batch`: the batch entries before the first."""
    return (p, draw, first_batch) if p else None


def expect_draw(p, draw):
    """An op of a graph takes no number of a generator: two equal nodes are one to whoever compiles them."""
    if p and draw is None:
        raise OptionError("dropout_draw = None beside dropout_p; allowed: seed and offset, int64 of shape [2]")
