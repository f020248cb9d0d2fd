"""Stats: how many calls on torch tensors Rapt served, and how many went to PyTorch's own kernel and why.

Only calls that ran are counted, tracing is not. What was served is one atomic counter of the native module.
"""

import logging
import sys
import threading

from rapt._native import count_served, served

__all__ = ["compiled_graphs", "count_fallback", "count_served", "reset_stats", "stats"]

log = logging.getLogger("rapt")

_lock = threading.Lock()
_fallback = {}
_logged = set()
_base = 0


def count_fallback(reason):
    """One call went to PyTorch's own kernel. The first of each reason is logged (logger "rapt", level DEBUG)."""
    with _lock:
        _fallback[reason] = _fallback.get(reason, 0) + 1
        first = reason not in _logged
        _logged.add(reason)
    if first:
        log.debug("PyTorch's own kernel, not Rapt's: %s", reason)


def stats():
    """`{"served": int, "fallback": {reason: int}}` since import or the last `reset_stats()`."""
    with _lock:
        return {"served": served() - _base, "fallback": dict(_fallback)}


def reset_stats():
    """Start again at zero."""
    global _base
    with _lock:
        _base = served()
        _fallback.clear()


def compiled_graphs():
    """What runs for each graph of `torch.compile(model, backend="rapt")` that is there, in the order of compilation: rows as of
    `Model.explain()`, with the number of calls and of the tensors that are held constant."""
    backend = sys.modules.get("rapt.torch._backend")
    return [] if backend is None else backend.compiled_graphs()
