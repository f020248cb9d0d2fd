"""One run: every family of rows prepared for every engine, checked against the reference, then timed in rounds.

    for each round: the ceilings, then for each row of the family: one timed batch of each engine, starting with another one each time

A batch is some milliseconds of calls between two CUDA events. In a `queued` row the stream is held first until the host has enqueued the
whole batch, so that the events see the device alone; an `eager` row sees whichever is slower. Rows of kind `call` and `add` time the
host: the wall time of enqueueing, without waiting for the device. A round's figure is its batch's mean, a row's the median over rounds.
"""

import dataclasses
import statistics
import time
import warnings

from . import check, gradients, interleaved
from .device import combined
from .engines import Unsupported

HOST_CALLS = 200
"""Calls of a host batch: fewer than the stream's queue holds, or the host would wait for the device."""

HOLD_HZ = 2e9
"""Cycles per second of `torch.cuda._sleep`: the highest clock of current GPUs, rounded up."""

LONGEST_HOLD = 10e-3


@dataclasses.dataclass
class Timing:
    """One engine on one row."""

    note: str = ""
    void: str = ""  # why there is no time
    error: check.Error | None = None
    rounds: list = dataclasses.field(default_factory=list)  # microseconds per call, by round
    calls: int = 0  # in one batch
    verdict: str = ""  # ours only: "" within tolerance, else what broke

    @property
    def median(self):
        return statistics.median(self.rounds) if self.rounds and not self.void and not self.verdict else None

    @property
    def spread(self):
        """Interquartile range over rounds, as a fraction of the median."""
        if len(self.rounds) < 2 or not self.median:
            return None
        return interleaved.spread(self.rounds)


class Batch:
    """The calls of one engine on one row, and how many of them make a batch."""

    def __init__(self, gpu, engine, row, calls, seconds):
        self.gpu, self.engine, self.row, self.calls, self.seconds = gpu, engine, row, calls, seconds
        self.on_host = row.kind in ("call", "add")
        self.at, self.count, self.hold = 0, HOST_CALLS, 0

    def mode(self):
        torch = self.gpu.torch
        # A backward runs over what autograd kept, which inference mode does not take.
        inference = self.row.grad_mode == "inference" and self.row.kind != "backward"
        return torch.inference_mode() if inference else torch.no_grad()

    def once(self):
        with self.mode(), self.engine.context():
            return self.calls[0]()

    def several(self, count):
        for _ in range(count):
            self.at += 1
            self.calls[self.at % len(self.calls)]()

    def prepare(self):
        """Every copy once, so that nothing is compiled or loaded later; then how long a call takes on each side."""
        with self.mode(), self.engine.context():
            self.several(len(self.calls))
            self.gpu.synchronize()
            if self.on_host:
                return
            host = self.enqueueing(3) / 3
            device = self.gpu.milliseconds(lambda: self.several(3)) / 3e3
        self.count = max(1, min(100, round(self.seconds / max(device, 1e-6))))
        if self.row.launch == "queued":
            self.hold = int(HOLD_HZ * min(LONGEST_HOLD, 1.5 * host * self.count + 20e-6))

    def enqueueing(self, count):
        """Seconds of the host for so many calls."""
        self.gpu.synchronize()
        began = time.perf_counter()
        self.several(count)
        took = time.perf_counter() - began
        self.gpu.synchronize()
        return took

    def time(self):
        """Microseconds per call."""
        with self.mode(), self.engine.context():
            self.several(1)  # whoever ran before left its own code and data in the caches
            if self.on_host:
                return self.enqueueing(self.count) * 1e6 / self.count
            return self.gpu.milliseconds(lambda: self.several(self.count), self.hold) * 1e3 / self.count


def why_no_kernel(warned):
    """The warning that gives a reason: not the headings, and not that the other kernels are switched off."""
    given = [line for line in warned if "runtime disabled" not in line and "not used because" not in line]
    return max(given, key=len)[:160] if given else ""


def in_short(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


class Run:
    def __init__(self, gpu, engines, ceilings, rounds, seconds, facts, progress):
        self.gpu, self.engines, self.ceilings, self.rounds, self.seconds = gpu, engines, ceilings, rounds, seconds
        self.facts, self.progress = facts, progress

    def held_bytes(self, row):
        """What `row` holds on the device, its check included by the factor."""
        copies = check.copies(row, self.facts["l2_bytes"])
        return 2 * (row.q_bytes + row.out_bytes + row.mask_bytes) + row.kv_bytes * (copies + 8)

    def family(self, rows):
        """Measures rows that belong together; too large for memory all at once, they go one by one."""
        if len(rows) > 1 and sum(map(self.held_bytes, rows)) > 0.5 * self.facts["memory_bytes"]:
            return [measured for row in rows for measured in self.family([row])]
        everything, batches = [], {}
        for row in rows:
            measured = interleaved.Measured(row, {})
            everything.append(measured)
            batches[row.key] = self.prepare(measured)
        self.time(everything, batches)
        return everything

    def prepare(self, measured):
        """{engine's name: Batch} of those that answer rightly."""
        row, gpu = measured.row, self.gpu
        ready, outputs = {}, {}
        tensors = check.make(gpu, row, check.copies(row, self.facts["l2_bytes"]))
        judges = {"add": lambda *_: None, "backward": gradients.Judge}
        judge = judges.get(row.kind, check.Judge)(gpu, row, tensors)
        for name, engine in self.engines.items():
            if not engine.takes(row):
                continue
            self.progress(row, f"prepare {name}")
            timing = measured.timings[name] = Timing()
            # What torch will not run it explains in warnings, and raises "no available kernel".
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                self.ready(engine, measured, tensors, judge, ready, outputs, said)
        if judge is not None:
            self.judge(measured, judge, outputs)
        return {name: batch for name, batch in ready.items() if not (measured.timings[name].void or measured.timings[name].verdict)}

    def ready(self, engine, measured, tensors, judge, ready, outputs, said):
        """One engine's batch and its checked answer, or why there are none."""
        row, gpu, name, timing = measured.row, self.gpu, engine.name, measured.timings[engine.name]
        try:
            batch = Batch(gpu, engine, row, engine.prepare(row, tensors), self.seconds)
            timing.note = engine.note(row, tensors)
            if judge is not None:
                check.poison(gpu, row)
                served = served_by_rapt(engine)
                outputs[name] = engine.answer(batch.once())
                timing.error = judge.error(outputs[name])
                if served():
                    raise Unsupported(served())
            batch.prepare()
            timing.calls = batch.count
            ready[name] = batch
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is reported, and the run goes on
            reason = str(error) if isinstance(error, Unsupported) else in_short(error)
            if "No available kernel" in reason and said:
                reason = why_no_kernel([str(warning.message).partition(" (Triggered")[0] for warning in said]) or reason
            self.refuse(timing, engine, reason)
            ready.pop(name, None)
            outputs.pop(name, None)

    def refuse(self, timing, engine, reason):
        timing.void = reason
        if engine.ours:
            timing.verdict = reason  # Rapt has every row

    def judge(self, measured, judge, outputs):
        """Verdicts, and the peers that computed something else."""
        flash = measured.timings.get("flash")
        sound = flash is not None and not flash.void and flash.error is not None and flash.error.relative < check.WRONG
        measured.limit = judge.allow(outputs["flash"] if sound else None)
        for name, timing in measured.timings.items():
            if timing.error is not None and not self.engines[name].ours and not timing.error.relative < check.WRONG:
                timing.void = timing.void or f"wrong result (relative error {timing.error.relative:.1e})"
        compared = [n for n in outputs if not (measured.timings[n].void or self.engines[n].ours or self.engines[n].is_rounded)]
        peer = next(iter(compared), None)
        for name, timing in measured.timings.items():
            if timing.error is None or not self.engines[name].ours or timing.verdict:
                continue
            error, limit = timing.error, judge.limit_of(timing.error)
            measured.limit = limit
            of = f"{error.of}: " if error.of else ""
            if not limit.allows(error):
                timing.verdict = (
                    f"{of}error {error.relative:.2e} (limit {limit.relative:.2e}), worst row "
                    f"{error.worst_row:.2e} (limit {limit.worst_row:.2e}), by {limit.source}"
                )
            elif peer and (apart := judge.apart(outputs[name], outputs[peer])) > 10 * limit.relative:
                timing.verdict = f"the whole answer is {apart:.1e} from {peer}'s, though its sampled rows are right"

    def time(self, everything, batches):
        samples = []
        for number in range(self.rounds):
            samples.append(self.ceilings.ask())
            for measured in everything:
                ready = batches[measured.row.key]
                names = list(ready)
                shift = number % max(1, len(names))
                for name in names[shift:] + names[:shift]:
                    self.progress(measured.row, f"round {number + 1}/{self.rounds} {name}")
                    timing = measured.timings[name]
                    try:
                        timing.rounds.append(ready[name].time())
                    except Exception as error:  # noqa: BLE001
                        self.refuse(timing, self.engines[name], in_short(error))
                        del ready[name]
        for measured in everything:
            measured.ceilings = combined(samples)


def served_by_rapt(engine):
    """A function that says why a call through SDPA was not Rapt's, "" where it was; for other engines always ""."""
    if engine.name != "rapt-sdpa":
        return lambda: ""
    import rapt

    rapt.torch.reset_stats()

    def reason():
        stats = rapt.torch.stats()
        return "" if stats["served"] else f"not served by Rapt: {stats['fallback']}"

    return reason
