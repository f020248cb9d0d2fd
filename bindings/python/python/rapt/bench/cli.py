"""`rapt bench cuda` (also `python -m rapt.bench cuda`); its words are declared in crates/rapt-cli/src/python.rs."""

import json
import pathlib
import re
import subprocess
import sys
import time

import rapt
from rapt._commands import UsageError

from . import interleaved, rows, table

ROWS = pathlib.Path(__file__).with_name("cuda.toml")
PEERS = ("flash", "cudnn", "cudnn-fp8", "efficient", "flex", "fa4")
ENGINES = ("rapt", "rapt-sdpa", *PEERS, "sdpa", "add")


def main(words=None):
    """`rapt bench WORDS`; the exit code."""
    from rapt.__main__ import main

    return main(["bench", *(sys.argv[1:] if words is None else words)])


def line_of(measured):
    """A finished row in a line."""
    times = (f"{name} {timing.median:.1f}" if timing.median else f"{name} –" for name, timing in measured.timings.items())
    return f"{measured.row.key}: {'  '.join(times)}"


def run(options):
    """The exit code."""
    for given, known, what in ((options.dtypes, rows.ALL_DTYPES, "--dtypes"), (options.peers, PEERS, "--peers")):
        if unknown := set(given or ()) - set(known):
            raise UsageError(f"{what}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    for value, what in ((options.rounds, "--rounds"), (options.seconds, "--seconds")):
        if value is not None and not value > 0:
            raise UsageError(f"{what} is {value}: it must be greater than 0")
    try:
        chosen = rows.load(ROWS, options.rows, options.dtypes, options.quick)
    except ValueError as error:
        raise UsageError(f"--rows {error}") from None
    if options.backward or not options.rows:
        chosen = [row for row in chosen if (row.kind == "backward") == options.backward]
    if not chosen:
        raise UsageError("--backward: none of these rows is of the backward alone" if options.backward else f"no row of these has dtype {', '.join(options.dtypes)}")
    if options.list:
        for row in chosen:
            print(f"{row.key:44} {row.dims:22} {' '.join(row.groups)}")
        return 0
    try:
        from .device import Gpu, need_torch

        gpu = Gpu(need_torch())
    except rapt.DeviceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return measure(options, chosen, gpu)


def measure(options, chosen, gpu):
    """Run, report, write; the exit code."""
    from . import report
    from .device import Ceilings, combined
    from .engines import engines
    from .measure import Run

    peers = options.peers or PEERS
    names = [name for name in ENGINES if name not in PEERS or name in peers]
    wanted = {name for row in chosen for name in row.peers}
    present, lost = engines([name for name in names if name not in ("flex", "cudnn-fp8") or name in wanted])
    machine = gpu.facts() | {"commit": commit(), "quick": options.quick, "interrupted": False}
    rounds, seconds = options.rounds or (2 if options.quick else 7), options.seconds or (5e-4 if options.quick else 4e-3)
    say = (lambda *_: None) if options.json == "-" else print
    say("\n".join(report.heading(machine)))

    ceilings = Ceilings(gpu)
    progress, everything = interleaved.Progress(len(chosen)), []
    work = Run(gpu, present, ceilings, rounds, seconds, machine, progress)
    try:
        for family in rows.families(chosen):
            measured = work.family(family)
            everything += measured
            progress.add([line_of(one) for one in measured])
    except KeyboardInterrupt:
        machine["interrupted"] = True  # what was measured is still reported, and marked

    machine["seconds"] = round(time.monotonic() - progress.began, 1)
    overall = combined(ceilings.samples)
    figures = report.derive(everything, present, machine)
    made = report.tables(everything, figures)
    if any(figure["bars"] for figure in figures):
        made.append(report.bars_table(figures))
    said = report.notes(everything, lost, overall if ceilings.samples else {})
    command = "rapt bench cuda " + " ".join(words(options))
    method = {
        "rounds": rounds, "seconds_per_batch": seconds, "statistic": "median over rounds of the batch's mean", **ceilings.method
    }  # fmt: skip
    content = report.record(everything, figures, present, machine, overall, said, command, method)
    title = f"{machine['gpu']}, {machine['date'][:10]}"
    drawn = report.picture(figures, present, title)
    say("\n" + table.text(made))
    say("\nnotes\n" + "\n".join(f"  {line}" for line in said))
    say(f"\n{report.summary(figures)}  ({machine['seconds']:.0f} s)")
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    if options.json == "-":
        print(text, end="")
    elif options.json:
        pathlib.Path(options.json).write_text(text, encoding="utf-8")
    if options.svg and drawn:
        pathlib.Path(options.svg).write_text(drawn, encoding="utf-8")
    if options.out:
        folder = pathlib.Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{machine['date'][:10]}-{re.sub(r'[^a-z0-9]+', '-', machine['gpu'].lower()).strip('-')}"
        written = {".json": text, ".md": report.page(made, machine, said, command), ".svg": drawn}
        for suffix, body in written.items():
            if body:
                stem.with_name(stem.name + suffix).write_text(body, encoding="utf-8")
        say(f"record: {stem}.json, .md, .svg")

    failures = report.broken(everything)
    if not everything:
        failures.insert(0, "nothing was measured")
    if options.check == "bars":
        failures += [f"below its bar: {line}" for line in report.below(figures)]
    if options.check == "no-slower-than-default":
        failures += [f"slower than torch's default: {line}" for line in report.slower_than_default(figures)]
    for line in failures:
        print(f"FAILED {line}", file=sys.stderr)
    return 130 if machine["interrupted"] else 1 if failures else 0


def words(options):
    """The command's words again, for the record; paths left out."""
    for name in ("rows", "dtypes", "peers"):
        if value := getattr(options, name):
            yield f"--{name} {','.join(value)}"
    for name in ("rounds", "seconds", "check"):
        if (value := getattr(options, name)) is not None:
            yield f"--{name} {value}"
    for name in ("backward", "quick"):
        if getattr(options, name):
            yield f"--{name}"


def commit():
    """The commit of the checkout of Rapt that this runs in, "" anywhere else."""
    if not pathlib.Path("crates/rapt-cuda").is_dir():
        return ""
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
