"""`cargo xtask bench cpu`: attention on this machine's CPU, Rapt and its peers in one interleaved run. docs/reference/benchmarks.md explains it.

    python benches/run.py cpu [--backward] [--shapes NAME,..] [--dtypes f32,bf16,f16] [--peers NAME,..] [--quick] [--check no-slower-than-stock]
"""

import argparse
import json
import os
import pathlib
import shlex
import sys
import tempfile

# The controller's numpy only computes references; on more threads it would leave spinning ones beside the peers.
for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import chart  # noqa: E402
import machine  # noqa: E402
import report  # noqa: E402
import shapes  # noqa: E402
from ceilings import Ceilings  # noqa: E402
from measure import Run  # noqa: E402
from peers import PEERS  # noqa: E402
from workers import BENCHES, UNLOCK_MKL, Died, Worker, compile_c  # noqa: E402

from rapt.bench import interleaved, table  # noqa: E402

BUSY = 0.5  # runnable processes before the run starts, above which figures are doubted aloud


def arguments():
    parser = argparse.ArgumentParser(prog="cargo xtask bench", description=__doc__.splitlines()[0])
    parser.add_argument("device", choices=["cpu"])
    parser.add_argument("--shapes", type=comma, help="shapes, groups or globs over row names (default: all; see benches/shapes.toml)")
    parser.add_argument("--dtypes", type=comma, help=f"of {','.join(shapes.ALL_DTYPES)}")
    parser.add_argument("--peers", type=comma, help=f"of {','.join(PEERS)} (default: all but rapt-avx2)")
    parser.add_argument("--backward", action="store_true", help="the rows of forward and backward, which a run leaves out else (unless --shapes names them)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds: tries the harness, its figures mean nothing")
    parser.add_argument("--rounds", type=int, help="timed rounds per row (default 7)")
    parser.add_argument("--seconds", type=float, help="length of one timed batch (default 0.06)")
    parser.add_argument("--threads", type=int, help="threads of every peer (default: physical cores)")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the record (default benches/record; with --quick a temporary one)")
    parser.add_argument("--peer-python", help="interpreter for openvino and onnxruntime (default: this one)")
    parser.add_argument("--check", choices=["no-slower-than-stock"], help="exit 1 if any row of group anchors is slower than stock torch")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    chosen = parser.parse_args()
    for given, known, what in ((chosen.dtypes, shapes.ALL_DTYPES, "--dtypes"), (chosen.peers, PEERS, "--peers")):
        if unknown := set(given or ()) - set(known):
            parser.error(f"{what}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    if os.name != "posix":
        parser.error("needs a POSIX system: idle peers are held with SIGSTOP")
    return chosen


def comma(text):
    return [word.strip() for word in text.split(",") if word.strip()]


def line_of(figure):
    """A finished row in a line."""
    times = "  ".join(f"{name} {report.microseconds(figure, name)}" for name in figure["us"])
    beats = f"  {figure['vs_stock']:.2f}x stock" if figure["vs_stock"] else ""
    return f"{figure['row']} {figure['dtype']}: {times}{beats}"


def starter(threads, folder, peer_python):
    """A function that starts a peer's worker by name, or raises Died with why it cannot."""

    def start(name):
        peer = PEERS[name]
        preload = None
        if peer.preload_unlock:
            preload = pathlib.Path(folder) / "unlock_mkl.so"
            why_not = None if machine.is_amd() else "MKL holds back on AMD alone: here unlocked torch is stock torch"
            why_not = why_not or (None if preload.exists() else compile_c(UNLOCK_MKL, preload, "-shared", "-fPIC"))
            if why_not:
                raise Died(why_not)
        python = peer_python if peer_python and name in ("openvino", "onnxruntime") else sys.executable
        return Worker(peer, threads, python, folder, preload)

    return start


def main():
    chosen = arguments()
    rows = shapes.load(chosen.shapes, chosen.dtypes, chosen.quick)
    if chosen.backward or not chosen.shapes:
        rows = [row for row in rows if (row.kind == "train") == chosen.backward]
    if chosen.list:
        for row in rows:
            print(f"{row.key:48} {row.dims:20} {' '.join(row.groups)}")
        return 0
    rounds = chosen.rounds or (2 if chosen.quick else 7)
    seconds = chosen.seconds or (0.002 if chosen.quick else 0.06)
    cpus = machine.cores()
    threads = chosen.threads or len(cpus)
    facts = machine.facts(threads)
    command = shlex.join(["cargo", "xtask", "bench", *sys.argv[1:]])
    if facts["load_before"] > BUSY and not chosen.quick:
        print(f"warning: the machine is busy (load {facts['load_before']}): these figures are noise", file=sys.stderr)

    names = chosen.peers or [name for name, peer in PEERS.items() if peer.default]
    with tempfile.TemporaryDirectory(prefix="rapt-bench-") as folder:
        start = starter(threads, folder, chosen.peer_python)
        workers, lost = {}, {}
        for name in names:
            try:
                workers[name] = start(name)
            except Died as reason:
                lost[name] = str(reason)
        cache_bytes = 1 << 20 if chosen.quick else facts["last_level_cache_bytes"]
        ceiling_program = Ceilings(folder, cpus[:threads], cache_bytes)
        peers = {name: worker.versions for name, worker in workers.items()}
        for line in report.heading(facts, peers):
            print(line)
        for name, reason in lost.items():
            print(f"{name} is left out: {reason}")
        if ceiling_program.why_not:
            print(f"no ceilings: {ceiling_program.why_not}")
        print(flush=True)
        progress = interleaved.Progress(len(rows))
        run = Run(workers, start, ceiling_program, rounds, seconds, folder, cache_bytes, machine.available_bytes(), progress)
        everything, interrupted = [], False
        try:
            for family in shapes.families(rows):
                measured = run.family(family)
                everything += measured
                progress.add([line_of(figure) for figure in report.derive(measured)])
        except KeyboardInterrupt:
            interrupted = True  # what was measured is still reported, and marked
        finally:
            for worker in workers.values():
                worker.end()
            ceiling_program.end()

    facts |= {"load_after": round(machine.load(), 2), "interrupted": interrupted, "quick": chosen.quick}
    figures = report.derive(everything)
    made = report.tables(everything, figures)
    said = report.notes(everything, lost)
    print("\n" + table.text(made))
    if said:
        print("\nnotes\n" + "\n".join(f"  {line}" for line in said))

    out = chosen.out or (pathlib.Path(tempfile.mkdtemp(prefix="rapt-record-")) if chosen.quick else BENCHES / "record")
    out.mkdir(parents=True, exist_ok=True)
    stem = out / machine.record_name(facts)
    method = {"rounds": rounds, "seconds_per_batch": seconds, "threads": threads, "statistic": "median over rounds of the batch's median"}
    content = report.record(everything, figures, facts, peers, said, command, method)
    stem.with_name(stem.name + ".json").write_text(json.dumps(content, indent=1) + "\n")
    stem.with_name(stem.name + ".md").write_text(report.markdown(made, facts, peers, said, command))
    if picture := chart.chart(figures, f"{facts['cpu']}, {threads} threads, {facts['date'][:10]}"):
        stem.with_name(stem.name + ".svg").write_text(picture)
    print(f"\nrecord: {stem}.json, .md, .svg")

    failures = report.broken(everything)
    if not everything or not any(name in peers for name in ("rapt", "rapt-sdpa", "rapt-avx2")):
        failures.insert(0, "rapt was not measured: " + lost.get("rapt", "no row, or not among --peers"))
    if chosen.check:
        failures += [f"slower than stock: {line}" for line in report.slower_than_stock(everything)]
        if not failures:
            print(f"check {chosen.check}: every row of group anchors is at least as fast as stock torch")
    for line in failures:
        print(f"FAILED {line}")
    return 130 if interrupted else 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
