"""GPUs that Vulkan reaches: `rapt.attention(q, k, v, device="vulkan:0")` on tensors in host memory, which are copied there and back.

    pip install "rapt-attention[vulkan]"

The backend is the package `rapt_vulkan`, which is imported when a call first asks for a GPU. `rapt.explain(..., device="vulkan:0")` says what
would run and how many bytes are copied.
"""

from rapt import _native

__all__ = ["adapters", "reset_stats", "stats"]


def adapters():
    """{"vulkan:0": what it is and what it lacks, …}, as `rapt doctor` lists them; {"vulkan": why} where there is none."""
    return dict(_native.vulkan_adapters())


def stats():
    """What this process had computed on GPUs of Vulkan: `served` calls, for which `bytes_copied` went there and back."""
    return _native.vulkan_stats()


def reset_stats():
    """Count from 0 again."""
    _native.reset_vulkan_stats()
