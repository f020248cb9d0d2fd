"""Which weights a call drops: two numbers of PyTorch's generator, seed and offset of Rapt's.

One draw a call, so `torch.manual_seed`, `torch.random.fork_rng` and activation checkpointing hold of Rapt's dropout as of PyTorch's own; a call without
dropout draws nothing. On an NVIDIA GPU the two are the seed and the offset of its generator, which are numbers of the host: nothing is waited for.
In a trace the draw is a node of the graph, and while a CUDA graph is captured one of its kernels: two random numbers on the device of the tensors, which
Rapt's kernels read there when they run, so that each replay has its own.
"""

import torch
from rapt import OptionError

_MOST = 2**63 - 1
# By how much a draw moves the offset of a GPU's generator: its numbers come in blocks of four.
_BLOCK = 4


def draw(like=None, in_graph=False):
    """int64 `[2]` from the default generator of the device of `like`, without one of the CPU: in host memory, but for a GPU's in a graph (`in_graph`: a
    trace; a capture is seen)."""
    if like is None or not like.is_cuda:
        return torch.randint(0, _MOST, (2,), dtype=torch.int64, device="cpu")
    if in_graph or torch.cuda.is_current_stream_capturing():
        return torch.randint(0, _MOST, (2,), dtype=torch.int64, device=like.device)
    generator = torch.cuda.default_generators[like.device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + _BLOCK)
    seed = generator.initial_seed()
    return torch.tensor([seed - 2**64 if seed > _MOST else seed, offset], dtype=torch.int64, device="cpu")


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
