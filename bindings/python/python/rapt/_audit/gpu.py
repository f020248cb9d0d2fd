"""What only a GPU's callee is asked: whose stream it works on, whether it can be captured, whether it waits, what lies round its output.

The device is asynchronous, so each judge makes the wrong order visible: the stream is held by a kernel that spins, or the inputs are
NaN until the stream itself has filled them. Deliberately absent: judging of values (judges.py), guard pages (a GPU has none: bands of
NaN lie round the inputs, canaries beside the output; a read that faults is seen by the worker, which dies of it).
"""

import sys
import time

import numpy as np

from .callee import Refused
from .tensors import BYTES

HELD_CYCLES = 100_000_000
"""What the device spins for: about 50 ms at 2 GHz, some hundred times a call of the host."""

WAITS_S = 0.02
"""A call of the host that takes longer than this behind HELD_CYCLES waited for them."""

CANARY = 0xA5
NEIGHBOURS = 4


def api(device):
    """torch.cuda or torch.mps."""
    return getattr(sys.modules["torch"], str(device).partition(":")[0])


class Canaries:
    """Allocations of an output's size on both sides of a free one, in which torch's allocator then puts the output."""

    def __init__(self, torch, size_bytes, device):
        api(device).synchronize()
        api(device).empty_cache()
        size = max(1, size_bytes)
        self._slots = [torch.full((size,), CANARY, dtype=torch.uint8, device=device) for _ in range(2 * NEIGHBOURS + 1)]
        self.at = self._slots[NEIGHBOURS].data_ptr()
        self._slots[NEIGHBOURS] = None

    def changed(self):
        """How many bytes of the neighbours were written."""
        return sum(int((slot != CANARY).sum()) for slot in self._slots if slot is not None)


def outside(room, case):
    """(bytes written outside the tensors, where) after one call with bands round the inputs and canaries round the output."""
    torch = sys.modules["torch"]
    placed = room.place(case)
    shape = (case.batch, case.heads, case.q_len, case.head_dim_v)
    canaries = Canaries(torch, int(np.prod(shape)) * BYTES[case.dtype], room.device)
    answer = room.callee(case, placed)
    api(room.device).synchronize()
    written = {name: each.changed() for name, each in placed.items() if each.changed()}
    if count := canaries.changed():
        written["allocations beside the output"] = count
    del answer
    return written


def fill(placed, with_what):
    """Copy `with_what` ({name: the whole buffer}) into the tensors, in the current stream."""
    for name, each in placed.items():
        each.flat.copy_(with_what[name], non_blocking=True)


def stained(placed):
    """Buffers of NaN (True for a mask of bools) as long as those of `placed`."""
    torch = sys.modules["torch"]
    return {name: torch.full_like(each.flat, 1 if each.dtype == "bool" else 0xFF) for name, each in placed.items()}


def far(a, b):
    """(elements that differ by more than roundings, of the values of two answers) or None."""
    if a.bits == b.bits:
        return None
    x, y = a.values, b.values
    close = np.isclose(x, y, rtol=1e-2, atol=1e-3, equal_nan=True)
    return None if close.all() else (int((~close).sum()), x.size)


def on_a_stream(room, case):
    """The far elements of a call on a stream of its own, whose inputs that stream fills late."""
    torch = sys.modules["torch"]
    plain = room.call(case)
    placed = room.place(case)
    real = {name: each.flat.clone() for name, each in placed.items()}
    fill(placed, stained(placed))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(HELD_CYCLES)
        fill(placed, real)
        answer = room.callee(case, placed)
        # Read in the same stream: what another one writes later is not in it.
        read = type(answer)(answer.tensor.clone())
        torch.cuda.current_stream().synchronize()
    return far(plain, read)


def replayed(room, case):
    """The far elements of a replayed capture on inputs other than those it was captured with."""
    torch = sys.modules["torch"]
    other = case.but(seed=case.seed + 1)
    want = room.call(other)
    placed, later = room.place(case), room.place(other)
    try:
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            room.callee(case, placed)
            room.callee(case, placed)
        torch.cuda.current_stream().wait_stream(warm)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = room.callee(case, placed)
    except Refused:
        raise
    except RuntimeError as error:
        raise Refused(error) from error  # what a capture forbids is said at its end
    if answer.tensor.dtype.is_floating_point:
        answer.tensor.fill_(torch.nan)
    fill(placed, {name: each.flat for name, each in later.items()})
    graph.replay()
    torch.cuda.synchronize()
    return far(want, answer)


def seconds_behind_work(room, case):
    """What a call takes on the host while the device is busy with earlier work, the best of three."""
    torch = sys.modules["torch"]
    placed, took = room.place(case), []
    room.callee(case, placed)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda._sleep(HELD_CYCLES)
        start = time.perf_counter()
        room.callee(case, placed)
        took.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return min(took)
