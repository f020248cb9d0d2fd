"""`cargo xtask bench model`: exported programs on this machine's CPU, Rapt and its peers in one interleaved run.

    python benches/model.py [--rows GLOB,..] [--dtypes f32,bf16] [--peers NAME,..] [--threads 1,2] [--quick]

Each peer runs in a process of its own, stopped while another is timed, on as many CPUs as the row has threads. A peer that says that it
uses another number of threads, or whose process keeps more of them busy, has no time. A row is prepared in all peers, checked against
torch in float64, then timed in rounds: one batch of calls of each peer, starting with another one each time. A round's figure is the
median of its batch, a row's the median over rounds. The bars are printed with pass, miss or out of reach; a miss is a figure, not a
failure of the run.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import pathlib
import shlex
import statistics
import sys
import tempfile

# The controller's numpy only compares results; on more threads it would leave spinning ones beside the peers.
for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

import machine  # noqa: E402
import ceilings  # noqa: E402
from models import PEERS, rows  # noqa: E402
from workers import BENCHES, UNLOCK_MKL, Died, Worker, compile_c  # noqa: E402

from rapt import _reference  # noqa: E402
from rapt.bench import interleaved, table  # noqa: E402

WRONG = 0.1  # a peer this far from the reference computed something else: its time is void
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
# The archive whose loading is measured: linear layers of 4096 × 4096, 64 MiB each.
ARCHIVE = {"layers": 16, "width": 4096}
QUICK_ARCHIVE = {"layers": 2, "width": 64}
LOAD_BAR = 2.0


def comma(text):
    return [word.strip() for word in text.split(",") if word.strip()]


def arguments():
    parser = argparse.ArgumentParser(prog="cargo xtask bench model", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=comma, default=["*"], help="globs over row names, and `load` (default: all)")
    parser.add_argument("--dtypes", type=comma, default=list(DTYPES), help=f"of {','.join(DTYPES)}")
    parser.add_argument("--peers", type=comma, default=list(PEERS), help=f"of {','.join(PEERS)}")
    parser.add_argument("--threads", type=comma, help="numbers of threads (default: 1 and the number of cores)")
    parser.add_argument("--rounds", type=int, help="timed rounds per row (default 5)")
    parser.add_argument("--seconds", type=float, help="length of one timed batch (default 0.5)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds: tries the harness, its figures mean nothing")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the record (default benches/record; with --quick a temporary one)")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    chosen = parser.parse_args()
    for given, known, what in ((chosen.dtypes, DTYPES, "--dtypes"), (chosen.peers, PEERS, "--peers")):
        if unknown := set(given) - set(known):
            parser.error(f"{what}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    return chosen


@dataclasses.dataclass
class Measured:
    row: object
    threads: int
    samples: dict = dataclasses.field(default_factory=dict)  # peer -> [[microseconds of each call]] by round
    errors: dict = dataclasses.field(default_factory=dict)  # peer -> relative L2 against float64
    void: dict = dataclasses.field(default_factory=dict)  # peer -> why there is no time
    versions: dict = dataclasses.field(default_factory=dict)
    limit: float | None = None
    ceilings: dict = dataclasses.field(default_factory=dict)  # medians of what this many threads could do between the rounds
    cache_bytes: int = 0

    def us(self, name):
        rounds = self.samples.get(name)
        return statistics.median(map(statistics.median, rounds)) if rounds and name not in self.void else None

    def spread(self, name):
        rounds = self.samples.get(name, [])
        return interleaved.spread([statistics.median(samples) for samples in rounds]) if len(rounds) > 1 else None

    def ratio(self, name):
        """How many times the peer's speed Rapt has; where MKL holds nothing back, unlocked torch is stock torch."""
        if self.us(name) is None and not machine.is_amd():
            name = {"unlocked": "stock", "inductor-unlocked": "inductor"}.get(name, name)
        theirs, ours = self.us(name), self.us("rapt")
        return theirs / ours if theirs and ours else None

    @property
    def rate(self):
        """(Rapt's rate, its ceiling, the ceiling's name): GB/s of weights read for decoding, else GFLOP/s."""
        us = self.us("rapt")
        if self.row.shape.kind == "decode":
            return us and self.row.read_bytes / us / 1e3, self.ceilings.get("dram_read_gbs"), "DRAM read"
        return us and self.row.flops / us / 1e3, *ceilings.ceiling(self.ceilings, self.row.dtype)

    @property
    def share(self):
        """Rapt's part of the ceiling."""
        rate, ceiling, _ = self.rate
        return rate / ceiling if rate and ceiling else None

    def floor(self):
        """(milliseconds, why) that no engine is below on this machine: arithmetic at the measured rate, and weights that the caches
        cannot hold at the measured read rate; None where neither was measured."""
        gflops, unit = ceilings.ceiling(self.ceilings, self.row.dtype)
        gbs, beyond = self.ceilings.get("dram_read_gbs"), max(0, self.row.read_bytes - self.cache_bytes)
        found = []
        if gflops:
            found.append((self.row.flops / gflops / 1e6, f"{self.row.flops / 1e9:.3g} GFLOP at {gflops:.0f} GFLOP/s, {unit}"))
        if gbs and beyond:
            found.append((beyond / gbs / 1e6, f"{beyond / 1e6:.0f} MB beyond the caches at {gbs:.1f} GB/s"))
        return max(found, default=None)

    def bars(self):
        """[(what, wanted, got, verdict)] of the bars."""
        found = []
        for name, wanted in self.row.bars:
            got, theirs, floor = self.ratio(name), self.us(name), self.floor()
            said = verdict(wanted, got)
            if said == "miss" and theirs and floor and floor[0] > (bar := theirs / wanted / 1e3):
                said = f"out of reach: floor {floor[0]:.3g} ms ({floor[1]}), bar {bar:.3g} ms"
            found.append((f"times {PEERS[name].title}", wanted, got, said))
        if self.row.dram_share:
            found.append(("of the DRAM read rate", self.row.dram_share, self.share, verdict(self.row.dram_share, self.share)))
        return found


class Run:
    def __init__(self, workers, program, threads, rounds, seconds, folder, cache_bytes):
        self.workers, self.program, self.threads = workers, program, threads
        self.rounds, self.seconds, self.folder, self.cache_bytes = rounds, seconds, pathlib.Path(folder), cache_bytes

    def ask(self, name, do, measured, **words):
        """A worker's answer; None, with the reason in `void`, where it has none."""
        if name in measured.void:
            return None
        try:
            answer = self.workers[name].ask(do, **words)
        except Died as reason:
            self.workers.pop(name).end()
            answer = {"failed": str(reason)}
        if "failed" in answer:
            measured.void[name] = answer["failed"]
            return None
        return answer

    def row(self, row):
        measured = Measured(row, self.threads, cache_bytes=self.cache_bytes)
        names = [name for name in self.workers if row.dtype in PEERS[name].dtypes]
        for name in names:
            if answer := self.ask(name, "prepare", measured, row=dataclasses.asdict(row)):
                measured.versions[name] = answer["versions"]
                if answer["threads"] != self.threads:
                    measured.void[name] = f"runs on {answer['threads']} threads, the row is of {self.threads}"
        self.check(measured, names)
        asked = ["compute", "memory"] if row.shape.kind == "decode" else ["compute"]
        able = []
        for number in range(self.rounds):
            able += map(self.program.ask, asked)
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if answer := self.ask(name, "time", measured, seconds=self.seconds):
                    measured.samples.setdefault(name, []).append(answer["samples"])
                    if answer["busy"] > self.threads:
                        measured.void[name] = f"kept {answer['busy']} threads busy, the row is of {self.threads}"
        measured.ceilings = ceilings.combined(able)
        for name in names:
            if name in self.workers:
                self.ask(name, "release", Measured(row, self.threads))
        return measured

    def check(self, measured, names):
        """Every peer against torch in float64; Rapt by the tolerance rule, with eager torch's error as the measure."""
        wide = None
        for name in ("stock", "unlocked", *names):
            out = str(self.folder / "wide.npy")
            if name in names and wide is None and self.ask(name, "check", measured, out=out, wide=True):
                wide = np.load(out)
        results = {}
        if wide is None:
            # Without a reference no time is worth anything.
            measured.void |= {name: measured.void.get(name, "no result in float64 to check against") for name in names}
        for name in names:
            out = str(self.folder / f"{name}.npy")
            if self.ask(name, "check", measured, out=out, wide=False):
                results[name] = np.load(out)
                error, _ = _reference.errors(results[name], wide)[:2]
                measured.errors[name] = float(error)
                if not error < WRONG:
                    measured.void[name] = f"wrong result (relative error {error:.1e})"
        torchs = [results[name] for name in ("stock", "unlocked") if name in results]
        if torchs:
            measured.limit = float(_reference.limits(DTYPES[measured.row.dtype], torchs, wide)[0])
            if "rapt" in results and measured.errors["rapt"] > measured.limit:
                measured.void.setdefault("rapt", f"error {measured.errors['rapt']:.1e}, the limit is {measured.limit:.1e}")


def start(names, threads, folder, cpus):
    """({name: Worker}, {name: why there is none}); each worker on these CPUs alone."""
    workers, lost = {}, {}
    preload = pathlib.Path(folder) / "unlock_mkl.so"
    for name in names:
        try:
            if PEERS[name].preload_unlock:
                why_not = None if machine.is_amd() else "MKL holds back on AMD alone: here unlocked torch is stock torch"
                why_not = why_not or (None if preload.exists() else compile_c(UNLOCK_MKL, preload, "-shared", "-fPIC"))
                if why_not:
                    raise Died(why_not)
            unlock = preload if PEERS[name].preload_unlock else None
            workers[name] = Worker(PEERS[name], threads, sys.executable, folder, unlock, package="models", cpus=cpus)
        except Died as reason:
            lost[name] = str(reason)
    return workers, lost


def loading(folder, threads, quick):
    """Reading and loading a large archive, each in a fresh process whose memory is its own; facts, or why there are none."""
    sizes = QUICK_ARCHIVE if quick else ARCHIVE
    path, answers = str(pathlib.Path(folder) / "large.pt2"), []
    try:
        writer = Worker(PEERS["rapt"], threads, sys.executable, folder, package="models")
        written = writer.ask("archive", **sizes, path=path)
        writer.end()
        for _ in range(3):
            loader = Worker(PEERS["rapt"], threads, sys.executable, folder, package="models")
            answers.append(loader.ask("load", path=path, width=sizes["width"]))
            loader.end()
    except Died as reason:
        return {"failed": str(reason)}
    for answer in [written, *answers]:
        if "failed" in answer:
            return answer
    median = {name: statistics.median(a[name] for a in answers) for name in ("read_s", "load_s", "first_call_s")}
    peak = max(a["after"]["VmHWM"] - a["before"]["VmRSS"] for a in answers)
    words = {name: text for name, text in answers[0].items() if isinstance(text, str)}
    return {"bytes": written["bytes"], **median, "peak_bytes": peak, **words}


def verdict(wanted, got, most=False):
    if got is None:
        return "not measured"
    return "pass" if (got <= wanted if most else got >= wanted) else "miss"


def tables(everything, load):
    """[(title, header, rows, notes)]"""
    made = []
    for threads in dict.fromkeys(measured.threads for measured in everything):
        chosen = [measured for measured in everything if measured.threads == threads]
        names = [name for name in PEERS if any(measured.us(name) for measured in chosen)]
        lines = []
        for measured in chosen:
            times = []
            for name in names:
                us, spread = measured.us(name), measured.spread(name)
                times.append("–" if us is None else f"{us / 1e3:.3g}" + ("" if spread is None else f" ±{100 * spread:.0f}%"))
            error = measured.errors.get("rapt")
            ratios = [table.number(measured.ratio(name)) for name in names if name != "rapt"]
            share = "–" if measured.share is None else f"{100 * measured.share:.0f} % {measured.rate[2]}"
            rate = [table.number(measured.rate[0], "{:.1f}"), share]
            lines.append([measured.row.name, measured.row.dtype, *times, *ratios, *rate, "–" if error is None else f"{error:.1e}"])
        header = ["row", "dtype", *(f"{name} ms" for name in names), *(f"vs {name}" for name in names if name != "rapt")]
        title = "1 thread" if threads == 1 else f"{threads} threads"
        said = [f"decode: GB/s of weights read; else GFLOP/s of products. Per cent of what {title} reached between the rounds"]
        made.append((title, [*header, "GB/s or GFLOP/s", "% of", "error"], lines, said))
    lines = []
    for measured in everything:
        for what, wanted, got, said in measured.bars():
            lines.append([measured.row.key, str(measured.threads), what, f"{wanted:.2f}", table.number(got), said])
    if load and "failed" not in load:
        got = load["load_s"] / load["read_s"]
        lines.append(["load", "–", "times reading the file, at most", f"{LOAD_BAR:.2f}", f"{got:.2f}", verdict(LOAD_BAR, got, most=True)])
    made.append(("Bars", ["row", "threads", "what", "wanted", "got", "verdict"], lines, []))
    if load and "failed" not in load:
        figures = [
            ["archive", f"{load['bytes'] / 1e9:.3f} GB"], ["read", f"{load['read_s']:.3f} s"], ["load", f"{load['load_s']:.3f} s"],
            ["first call", f"{load['first_call_s']:.3f} s"], ["peak memory beyond the process's own", f"{load['peak_bytes'] / 1e9:.3f} GB"],
        ]  # fmt: skip
        figures += [[name, text] for name, text in load.items() if isinstance(text, str)]
        made.append(("A large archive: loading, and memory after one call", ["what", "figure"], figures, []))
    return made


def record(everything, facts, load, said, command, method):
    rows_ = []
    for measured in everything:
        timings = {
            name: {
                "ms": measured.us(name) and measured.us(name) / 1e3,
                "rounds": [{"median_us": round(statistics.median(s), 3), "min_us": round(min(s), 3), "timings": len(s)} for s in rounds],
            }
            for name, rounds in measured.samples.items()
        }  # fmt: skip
        rows_.append({
            "row": measured.row.name, "dtype": measured.row.dtype, "threads": measured.threads, "shape": dataclasses.asdict(measured.row.shape),
            "timings": timings, "errors": measured.errors, "limit": measured.limit, "void": measured.void, "versions": measured.versions,
            "ratios": {name: measured.ratio(name) for name in measured.samples if name != "rapt"}, "rate": measured.rate,
            "ceilings": measured.ceilings, "floor": measured.floor(), "bars": measured.bars(),
        })  # fmt: skip
    return {"machine": facts, "command": command, "method": method, "load": load, "notes": said, "rows": rows_}


def main():
    chosen = arguments()
    wanted = [r for r in rows(chosen.quick) if r.dtype in chosen.dtypes and any(fnmatch.fnmatch(r.name, glob) for glob in chosen.rows)]
    if chosen.list:
        for row in wanted:
            print(row.key, row.shape)
        return 0
    rounds, seconds = chosen.rounds or (2 if chosen.quick else 5), chosen.seconds or (0.005 if chosen.quick else 0.5)
    cpus = machine.cores()
    numbers = list(dict.fromkeys(map(int, chosen.threads or [1, len(cpus)])))
    if not all(1 <= threads <= len(cpus) for threads in numbers):
        sys.exit(f"--threads: this process may use {len(cpus)} cores")
    everything, lost, load = [], {}, None
    facts = machine.facts(len(cpus))
    with tempfile.TemporaryDirectory(prefix="rapt-bench-") as folder:
        for threads in numbers:
            if not wanted:
                break
            workers, lost = start(chosen.peers, threads, folder, cpus[:threads])
            program = ceilings.Ceilings(folder, cpus[:threads], facts["last_level_cache_bytes"])
            run = Run(workers, program, threads, rounds, seconds, folder, facts["last_level_cache_bytes"])
            try:
                for row in wanted:
                    everything.append(measured := run.row(row))
                    times = ", ".join(f"{name} {us / 1e3:.3g} ms" for name in measured.samples if (us := measured.us(name)))
                    print(f"{row.key} on {threads}: {times or measured.void}", file=sys.stderr, flush=True)
            finally:
                for worker in workers.values():
                    worker.end()
                program.end()
        if any(fnmatch.fnmatch("load", glob) for glob in chosen.rows):
            load = loading(folder, len(cpus), chosen.quick)
    facts |= {"load_after": round(machine.load(), 2), "quick": chosen.quick}
    said = [f"{name} is left out: {reason}" for name, reason in lost.items()]
    said += [f"{name} has no time on {m.row.key}, {m.threads} threads: {reason}" for m in everything for name, reason in m.void.items()]
    if load and "failed" in load:
        said.append(f"loading was not measured: {load['failed']}")
    made = tables(everything, load)
    print("\n" + table.text(made))
    print("\n" + "\n".join(said))
    out = chosen.out or (pathlib.Path(tempfile.mkdtemp(prefix="rapt-record-")) if chosen.quick else BENCHES / "record")
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{machine.record_name(facts)}-model"
    command = shlex.join(["cargo", "xtask", "bench", "model", *sys.argv[1:]])
    method = {"rounds": rounds, "seconds_per_batch": seconds, "statistic": "median over rounds of the batch's median"}
    stem.with_name(stem.name + ".json").write_text(json.dumps(record(everything, facts, load, said, command, method), indent=1) + "\n")
    heading = [f"{facts['date']}, {facts['cpu']}, {facts['isa']}, load {facts['load_before']} before", f"commit {facts['commit'][:12]}", f"`{command}`"]
    stem.with_name(stem.name + ".md").write_text(table.markdown(facts["cpu"] + ": exported programs", heading, made, said))
    print(f"\nrecord: {stem}.json, .md")
    broken = [m.row.key for m in everything if "rapt" in m.void or ("rapt" in chosen.peers and "rapt" not in m.samples)]
    for key in broken:
        print(f"FAILED {key}: Rapt has no time")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
