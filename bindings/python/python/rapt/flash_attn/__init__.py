"""flash-attention's interface, with Rapt behind it: code that was written for it runs where Rapt does, on CPUs too.

    import rapt.flash_attn as flash_attn
    from rapt.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    from rapt.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

Every argument is honoured, or refused by a `RaptError` that names it. Tensors are read where they lie, in any strides; float32 and float64 are served beside float16 and bfloat16.
docs/guides/flash-attention.md is the migration page.
"""

from . import bert_padding
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# The release of flash-attention whose signatures these are: code asks it whether an argument exists.
__version__ = "2.8.3"

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
