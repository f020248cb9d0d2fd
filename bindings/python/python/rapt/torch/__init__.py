"""Rapt inside PyTorch.

    rapt.torch.register_backend()         torch.nn.functional.scaled_dot_product_attention is Rapt's (CPU, CUDA)
    with rapt.torch.backend(): ...        the same for one block
    rapt.torch.stats()                    {"served": int, "fallback": {reason: int}}
    rapt.torch.compiled_graphs()          what runs for each graph of torch.compile(model, backend="rapt")
    attn_implementation="rapt"            in transformers, once registered
    rapt.torch.qscaled_dot_product(...)   torchao's quantized attention, and `register_torchao()` its op
    torch.nn.attention.activate_flash_attention_impl("RAPT")      only PyTorch's flash kernel is Rapt's (torch >= 2.11)

Importing this registers Rapt's own ops (`torch.ops.rapt`) and the name "RAPT", and changes no answer of PyTorch.
"""

from . import _flash
from ._override import backend, is_registered, register_backend, unregister_backend
from ._stats import compiled_graphs, reset_stats, stats
from ._torchao import qscaled_dot_product, register_torchao
from ._transformers import register_transformers

__all__ = [
    "backend",
    "compiled_graphs",
    "is_registered",
    "qscaled_dot_product",
    "register_backend",
    "register_torchao",
    "register_transformers",
    "reset_stats",
    "stats",
    "unregister_backend",
]

_flash.register()
