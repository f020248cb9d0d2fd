"""GPUs that Vulkan reaches: `rapt.attention(q, k, v, device="vulkan:0")` on tensors in host memory."""

from typing import TypedDict

class Stats(TypedDict):
    served: int
    bytes_copied: int

def adapters() -> dict[str, str]: ...
def stats() -> Stats: ...
def reset_stats() -> None: ...
