"""What a Mac's audit hands to whoever keeps Rapt: the block that the issue template `metal.yml` asks for.

Rapt's kernels for Metal were written and proven without an Apple machine, so each report tells what nobody knew. The block holds no path and no name
of the machine. Deliberately absent: the audit itself (checks.py).
"""

import contextlib
import platform
import subprocess

from rapt import __version__, _native

from .report import plain, versions

ISSUE = "https://github.com/rapt-attention/rapt/issues/new?template=metal.yml"


def block(report):
    """The text to paste, with the words that say so."""
    lines = [f"paste this as a report ({ISSUE}):", "", "```text", *facts(), *results(report), "```"]
    return "\n".join(lines)


def facts():
    """The machine, a line each."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 - what it has for Metal is asked of it
    installed = ", ".join(f"{name} {version}" for name, version in versions().items() if version is not None)
    mac, _, arch = platform.mac_ver()
    rows = [("rapt", __version__), ("system", f"macOS {mac} {arch}" if mac else platform.platform()), ("chip", chip()), ("versions", installed)]
    rows += _native.metal_report()
    return [f"{name}: {text}" for name, text in rows]


def chip():
    """The processor as the system calls it."""
    try:
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return platform.processor() or platform.machine()
    return done.stdout.strip()


def results(report):
    """What became of each hazard, and the evidence of findings; a line each."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts().items())
    yield f"audit: {report.target} on {report.device}, {', '.join(report.dtypes)}, {report.seconds:.1f} s: {counts}"
    for hazard in report.hazards:
        by_dtype = " ".join(f"{dtype}={verdict}" for dtype, verdict in hazard.by_dtype.items())
        note = f" ({hazard.note.splitlines()[-1][:160]})" if hazard.note and hazard.verdict not in ("clean", "found") else ""
        yield f"{hazard.name}: {hazard.verdict}{note} {by_dtype}".rstrip()
    for finding in report.findings:
        yield f"finding {finding.hazard} -> {finding.cause} [{finding.severity}] {', '.join(finding.dtypes)}: {finding.text}"
        yield f"  case {plain(finding.case.as_dict())}"
