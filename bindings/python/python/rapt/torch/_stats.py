"""The account: how many calls on torch tensors Rapt served, and how many went to PyTorch's own kernel and why.

Only calls that ran are counted, tracing is not. `count_served` is `itertools.count.__next__`: one atomic step in CPython
(30 ns), where a lock would cost as much as the rest of the account.
"""

import itertools
import logging
import threading

log = logging.getLogger("rapt")

_lock = threading.Lock()
_fallback = {}
_logged = set()
_served = itertools.count()
_reads = 0  # each look at a count takes one step of it
_base = 0
count_served = _served.__next__


def _steps():
    global _reads
    steps = next(_served) - _reads
    _reads += 1
    return steps


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
        return {"served": _steps() - _base, "fallback": dict(_fallback)}


def reset_stats():
    """Start the account again at zero."""
    global _base
    with _lock:
        _base = _steps()
        _fallback.clear()
