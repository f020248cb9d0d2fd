"""The measured ceilings: ceilings.c as a sleeping process, asked between the rounds of every row."""

import json
import pathlib
import statistics
import subprocess

from workers import BENCHES, compile_c, die_with_parent

# Doubling steps that vector units come in; the measured rate is rounded to the nearest one below for the floor's formula.
FLOP_PER_CYCLE = (8, 16, 32, 64, 128, 256)


class Ceilings:
    """None of its figures exist where no C compiler does: `why_not` says so, and the columns stay empty."""

    def __init__(self, folder, cpus, last_level_cache_bytes):
        program = pathlib.Path(folder) / "ceilings"
        self.why_not = compile_c(BENCHES / "ceilings.c", program, "-pthread")
        self.process = None
        if self.why_not is None:
            read_bytes = max(4 * last_level_cache_bytes, 256 << 20)
            self.process = subprocess.Popen(
                [program, str(read_bytes), *map(str, cpus)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def ask(self, what):
        """`compute` or `memory`; {} where there is no program."""
        if self.process is None:
            return {}
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.process, self.why_not = None, "ceilings.c stopped"
            return {}
        return json.loads(line)

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def combined(samples):
    """The samples of one family as one: medians; `samples` are the answers of `compute` and `memory` in any order."""
    compute = [sample for sample in samples if "ghz" in sample]
    memory = [sample["dram_read_gbs"] for sample in samples if "dram_read_gbs" in sample]
    found = {}
    if compute:
        found["threads"] = compute[0]["threads"]
        found["ghz"] = statistics.median(sample["ghz"] for sample in compute)
        for unit in ("fma_f32", "bf16_dot"):
            widths = compute[0][unit]
            found[unit] = {width: statistics.median(sample[unit][width] for sample in compute) for width in widths}
    if memory:
        found["dram_read_gbs"] = statistics.median(memory)
    return found


def ceiling(found, dtype, width=None):
    """(GFLOP/s, what it is) that work of `dtype` is held against: f32 FMA, and for bf16 its dot unit where that is faster, which it is not on every
    processor that has one."""
    units = {"f32 FMA": found.get("fma_f32"), "bf16-dot": found.get("bf16_dot") if dtype == "bf16" else None}
    rates = [(rate, f"{unit} {of}") for unit, widths in units.items() for of, rate in (widths or {}).items() if width in (None, of)]
    return max(rates, default=(None, ""))


def flop_per_cycle(found, dtype, width=None):
    """Flop per cycle and core that the ceiling comes to, as the hardware's round number (Zen 4 runs zmm at 32, Zen 5 at 64)."""
    gflops, _ = ceiling(found, dtype, width)
    if gflops is None:
        return None
    measured = gflops / (found["ghz"] * found["threads"])
    return min(FLOP_PER_CYCLE, key=lambda known: abs(measured / known - 1))
