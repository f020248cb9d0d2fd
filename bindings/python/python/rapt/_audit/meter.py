"""Peak memory of a call: what it needs beyond what was there before it and its output.

On a GPU torch's allocator tells it; on Linux the peak of resident memory does, which is set back before the call.
Deliberately absent: how much is too much (judges.py).
"""

import ctypes
import functools
import gc
import math
import re
import sys
import time

from .callee import NotOffered
from .tensors import BYTES


@functools.cache
def set_aside():
    """What was imported is no garbage: a collection that walks all of torch takes 0.1 s, and each measurement makes one."""
    gc.collect()
    gc.freeze()


class Meter:
    """Peak memory of one call beyond what was there before it and its output."""

    def __init__(self, room):
        self.room, self.cuda = room, room.device != "cpu"
        if str(room.device).startswith("mps"):
            raise NotOffered("torch.mps does not tell the peak of its memory")
        set_aside()
        if not self.cuda:
            if sys.platform != "linux":
                raise NotOffered("the peak of resident memory is read from /proc")
            self.libc = ctypes.CDLL(None)
            if hasattr(self.libc, "mallopt"):
                # Every buffer from 64 KiB up is mapped and unmapped, none is kept for reuse: reuse would hide it.
                self.libc.mallopt(-3, 65536)

    def extra(self, case):
        """(bytes, seconds)."""
        placed = self.room.place(case)
        gc.collect()
        if self.cuda:
            torch = sys.modules["torch"]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.max_memory_allocated()
        else:
            if hasattr(self.libc, "malloc_trim"):
                self.libc.malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            before = peak_bytes()
        start = time.perf_counter()
        answer = self.room.callee(case, placed)
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if self.cuda else peak_bytes()
        return max(0, peak - before - math.prod(answer.shape) * BYTES[case.dtype]), seconds

    def free(self):
        if self.cuda:
            return sys.modules["torch"].cuda.mem_get_info()[0]
        found = re.search(r"MemAvailable:\s+(\d+) kB", open("/proc/meminfo").read())
        return int(found.group(1)) * 1024 if found else 0


def peak_bytes():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read()).group(1)) * 1024
