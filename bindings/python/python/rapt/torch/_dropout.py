"""Which weights a call drops: two numbers of PyTorch's generator, seed and offset of Rapt's.

One draw a call, so `torch.manual_seed`, `torch.random.fork_rng` and activation checkpointing hold of Rapt's dropout as of PyTorch's own; a call without
dropout draws nothing. In a trace the draw is a node of the graph, and the op gets what it gives.
"""

import torch

_MOST = 2**63 - 1


def draw():
    """int64 `[2]`, from the default generator of the CPU."""
    return torch.randint(0, _MOST, (2,), dtype=torch.int64, device="cpu")
