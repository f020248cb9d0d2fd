"""What every interleaved measurement is made of, on the CPU (benches/) and on a GPU: a limit, a measured row, how far rounds
spread, and what is printed on the way."""

import dataclasses
import statistics
import sys
import time


@dataclasses.dataclass
class Limit:
    """How far an answer may lie from the reference: the whole of it, and its worst row."""

    relative: float
    worst_row: float
    source: str

    def allows(self, error):
        return error.finite and error.relative <= self.relative and error.worst_row <= self.worst_row


def limit_of_int8():
    """What is allowed products of int8, which are an approximation (docs/reference/numerics.md): no rule of PyTorch's."""
    return Limit(3e-2, 4 * 3e-2, 'what compute="int8" rounds')


@dataclasses.dataclass
class Measured:
    """One row with every engine's timing, the limit it was judged by and the ceilings of its rounds."""

    row: object
    timings: dict
    limit: Limit | None = None
    codes_error: object = None
    """Of rows of codes: how far attention on the numbers that they stand for is from that on the originals, where it was asked for."""
    ceilings: dict = dataclasses.field(default_factory=dict)


def spread(rounds):
    """Interquartile range over rounds, as a fraction of the median; of two rounds or more."""
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return (high - low) / middle


class Progress:
    """One line that changes on a terminal; on anything else only what is finished. Always on stderr."""

    def __init__(self, total):
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.live = sys.stderr.isatty()

    def __call__(self, row, doing):
        if self.live:
            print("\r\033[K" + f"[{self.done}/{self.total}] {row.key}: {doing}"[:150], end="", file=sys.stderr, flush=True)

    def add(self, lines):
        """So many more rows are finished, a line each."""
        self.done += len(lines)
        start, elapsed = "\r\033[K" if self.live else "", time.monotonic() - self.began
        for line in lines:
            print(f"{start}[{self.done}/{self.total} {elapsed:4.0f} s] {line}", file=sys.stderr, flush=True)
