"""The command `python -m rapt.bench cuda` (also `python -m rapt bench cuda`).

Exit codes: 0; 1 a row of Rapt failed or left the tolerance, `--check` is not met, or there is no GPU (DeviceError); 2 wrong usage; 130
interrupted.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import time

import rapt

from . import interleaved, rows, table

ROWS = pathlib.Path(__file__).with_name("cuda.toml")
PEERS = ("flash", "cudnn", "efficient", "flex", "fa4")
ENGINES = ("rapt", "rapt-sdpa", *PEERS, "sdpa", "add")
CHECKS = ("bars", "no-slower-than-default")


def comma(text):
    return [word.strip() for word in text.split(",") if word.strip()]


def add_arguments(parser):
    """Declare the command's words on `parser`."""
    parser.add_argument("device", choices=["cuda"], help="the CPU has `rapt bench` and `cargo xtask bench cpu`")
    parser.add_argument(
        "--rows", "--filter", dest="rows", type=comma, metavar="NAME,..", help="shapes, groups or globs over row names (default all)"
    )
    parser.add_argument("--dtypes", type=comma, metavar="NAME,..", help=f"of {','.join(rows.ALL_DTYPES)}")
    parser.add_argument("--peers", type=comma, metavar="NAME,..", help=f"of {','.join(PEERS)} (default all that are here)")
    parser.add_argument("--rounds", type=int, help="timed rounds per row (default 7)")
    parser.add_argument("--seconds", type=float, help="length of one timed batch (default 0.004)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds: tries the harness, its figures mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write the record; - is stdout, in place of the table")
    parser.add_argument("--svg", metavar="PATH", help="write the plot")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="write a dated record there: .json, .md and .svg")
    parser.add_argument("--check", choices=CHECKS, help="exit 1 where a bar of the rows is missed, or torch's default is faster")
    parser.add_argument("--list", action="store_true", help="print the rows and end; needs no GPU")
    parser.set_defaults(run=lambda options: run(options, parser))


def main(arguments=None):
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m rapt.bench", description=__doc__.splitlines()[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    return options.run(options)


def told(measured):
    """A finished row in a line."""
    times = (f"{name} {timing.median:.1f}" if timing.median else f"{name} –" for name, timing in measured.timings.items())
    return f"{measured.row.key}: {'  '.join(times)}"


def run(options, parser):
    """The exit code."""
    for given, known, what in ((options.dtypes, rows.ALL_DTYPES, "--dtypes"), (options.peers, PEERS, "--peers")):
        if unknown := set(given or ()) - set(known):
            parser.error(f"{what}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    for value, what in ((options.rounds, "--rounds"), (options.seconds, "--seconds")):
        if value is not None and not value > 0:
            parser.error(f"{what} is {value}: it must be greater than 0")
    try:
        chosen = rows.load(ROWS, options.rows, options.dtypes, options.quick)
    except ValueError as error:
        parser.error(f"--rows {error}")
    if not chosen:
        parser.error(f"no row of these has dtype {', '.join(options.dtypes)}")
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
    present, lost = engines([name for name in names if name != "flex" or name in wanted])
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
            progress.add([told(one) for one in measured])
    except KeyboardInterrupt:
        machine["interrupted"] = True  # what was measured is still reported, and marked

    machine["seconds"] = round(time.monotonic() - progress.began, 1)
    overall = combined(ceilings.samples)
    figures = report.derive(everything, present, machine)
    made = report.tables(everything, figures)
    if any(figure["bars"] for figure in figures):
        made.append(report.bars_table(figures))
    said = report.notes(everything, lost, overall if ceilings.samples else {})
    command = "python -m rapt.bench " + " ".join(words(options))
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
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"{machine['date'][:10]}-{re.sub(r'[^a-z0-9]+', '-', machine['gpu'].lower()).strip('-')}"
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
    yield options.device
    for name in ("rows", "dtypes", "peers"):
        if value := getattr(options, name):
            yield f"--{name} {','.join(value)}"
    for name in ("rounds", "seconds", "check"):
        if (value := getattr(options, name)) is not None:
            yield f"--{name} {value}"
    if options.quick:
        yield "--quick"


def commit():
    """The commit of the checkout of Rapt that this runs in, "" anywhere else."""
    if not pathlib.Path("crates/rapt-cuda").is_dir():
        return ""
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
