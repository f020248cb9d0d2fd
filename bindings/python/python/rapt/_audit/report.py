"""What an audit found: as an object, a table, JSON and JUnit XML. The HTML page is page.py's.

The JSON's keys are documented in docs/reference/audit.md; `SCHEMA` counts their changes.
"""

import json
import math
import platform
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from .case import Case
from .hazards import SEVERITIES

SCHEMA = 1

VERDICTS = ("found", "clean", "refused", "not offered", "blocked", "undecided", "not run")


@dataclass
class HazardResult:
    """What became of one hazard."""

    name: str
    severity: str
    title: str
    verdict: str
    """One of VERDICTS."""
    by_dtype: dict = field(default_factory=dict)
    note: str = ""
    probes: int = 0
    seconds: float = 0.0

    def as_dict(self):
        return {
            "name": self.name, "severity": self.severity, "title": self.title, "verdict": self.verdict,
            "by_dtype": self.by_dtype, "note": self.note, "probes": self.probes, "seconds": round(self.seconds, 3),
        }  # fmt: skip


@dataclass
class Finding:
    """A hazard that the callee has."""

    hazard: str
    cause: str
    """What diagnosis names, or the hazard's own name."""
    severity: str
    title: str
    evidence: dict
    case: Case
    dtypes: list
    reproducer: dict = field(default_factory=lambda: {"source": None, "reproduced": False, "outcome": "not run"})
    shrunk: Case | None = None

    @property
    def name(self):
        return self.cause

    @property
    def text(self):
        """The evidence in a sentence, with its numbers."""
        return self.evidence["text"]

    def as_dict(self):
        source = self.reproducer.get("source")
        return {
            "hazard": self.hazard,
            "cause": self.cause,
            "severity": self.severity,
            "title": self.title,
            "dtypes": self.dtypes,
            "evidence": {
                "text": self.text,
                "numbers": plain(self.evidence["numbers"]),
                "error_map": self.evidence["error_map"],
            },
            "diagnosis": plain(self.evidence["diagnosis"]),
            "case": plain(self.case.as_dict()),
            "reproducer": {
                "source": source,
                "lines": len(source.splitlines()) if source else 0,
                "reproduced": self.reproducer["reproduced"],
                "outcome": self.reproducer["outcome"],
                "ran_in": self.reproducer.get("ran_in"),
                "shrunk_to": None if self.shrunk is None else plain(self.shrunk.as_dict()),
            },
        }


@dataclass
class Report:
    """The result of `rapt.audit`; `str()` is a table."""

    target: str
    offer: object
    device: str
    dtypes: tuple
    hazards: list
    findings: list
    """Gravest first."""
    seconds: float
    budget_s: float

    @property
    def ok(self):
        """Whether nothing was found."""
        return not self.findings

    def at_least(self, severity):
        """The findings of this severity or a graver one."""
        least = SEVERITIES.index(severity)
        return [finding for finding in self.findings if SEVERITIES.index(finding.severity) >= least]

    def counts(self):
        """How many hazards have each verdict."""
        counted = Counter(hazard.verdict for hazard in self.hazards)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    def to_dict(self):
        """The report as JSON types; docs/reference/audit.md describes the keys."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "style": getattr(self.offer, "style", None),
            "kind": getattr(self.offer, "kind", None),
            "options": list(getattr(self.offer, "options", ())),
            "device": self.device,
            "dtypes": list(self.dtypes),
            "seconds": round(self.seconds, 2),
            "budget_s": self.budget_s,
            "versions": versions(),
            "counts": self.counts(),
            "severities": {s: sum(f.severity == s for f in self.findings) for s in reversed(SEVERITIES)},
            "findings": [finding.as_dict() for finding in self.findings],
            "hazards": [hazard.as_dict() for hazard in self.hazards],
        }

    def to_json(self, path=None):
        """The JSON text; also written to `path` if given."""
        return written(json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False), path)

    def to_junit(self, path=None, fail_on="low"):
        """JUnit XML: one test case per hazard; findings of `fail_on` or graver are failures, lesser ones stand in system-out,
        and what was not judged is skipped."""
        graver = {id(finding) for finding in self.at_least(fail_on)} if fail_on != "never" else set()
        suite = ElementTree.Element("testsuite", name=f"rapt audit {self.target}", time=f"{self.seconds:.2f}")
        failures = skipped = 0
        for hazard in self.hazards:
            case = ElementTree.SubElement(suite, "testcase", classname=f"rapt.audit.{self.target}", name=hazard.name)
            mine = [finding for finding in self.findings if finding.hazard == hazard.name]
            failing = [finding for finding in mine if id(finding) in graver]
            if failing:
                failures += 1
                element = ElementTree.SubElement(
                    case, "failure", type=failing[0].cause, message=f"[{failing[0].severity}] {legal(failing[0].text)}"
                )
                element.text = legal("\n\n".join(f"{each.text}\n\n{each.reproducer['source'] or ''}" for each in failing))
            elif mine:
                ElementTree.SubElement(case, "system-out").text = legal(
                    "\n".join(f"[{each.severity}] {each.text}" for each in mine)
                )
            elif hazard.verdict not in ("clean", "found"):
                skipped += 1
                ElementTree.SubElement(case, "skipped", message=legal(f"{hazard.verdict}: {hazard.note}"))
        suite.attrib |= {"tests": str(len(self.hazards)), "failures": str(failures), "errors": "0", "skipped": str(skipped)}
        ElementTree.indent(suite)
        return written(
            '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n", path
        )

    def to_html(self, path=None):
        """One self-contained page."""
        from .page import page

        return written(page(self), path)

    def __str__(self):
        return table(self)


def written(text, path):
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def legal(text):
    """Without the characters that XML forbids."""
    return "".join(c for c in text if c in "\n\t" or ord(c) >= 32)


def plain(x):
    """JSON types: tuples as lists, numbers of numpy as Python's, what is not finite as a string."""
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if hasattr(x, "item"):
        x = x.item()
    if isinstance(x, float) and not math.isfinite(x):
        return repr(x)
    return x


def versions():
    """Versions of what took part, from the installed metadata."""
    found = {"python": platform.python_version()}
    for name, distribution in (("rapt", "rapt-attention"), ("torch", "torch"), ("numpy", "numpy")):
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    from rapt import __version__

    found["rapt"] = __version__
    return found


def table(report):
    """The report for a terminal: findings with evidence and reproducer, then every hazard's verdict."""
    kind = f"{report.offer.kind}, {report.offer.style} signature" if report.offer else "no offer"
    lines = [f"rapt audit of {report.target} ({kind}, {report.device}, {', '.join(report.dtypes)}; {report.seconds:.1f} s)", ""]
    for number, finding in enumerate(report.findings, 1):
        cause = "" if finding.cause == finding.hazard else f" → {finding.cause}"
        lines.append(f"{number}. [{finding.severity}] {finding.hazard}{cause} ({', '.join(finding.dtypes)}): {finding.title}")
        lines += textwrap.wrap(finding.text, 110, initial_indent="   ", subsequent_indent="   ")
        source = finding.reproducer["source"]
        if source is not None:
            verdict = "reproduced" if finding.reproducer["reproduced"] else "not reproduced"
            ran = f" in {finding.reproducer['ran_in']}" if "ran_in" in finding.reproducer else ""
            lines.append(f"   reproducer, {verdict}{ran} ({finding.reproducer['outcome'][:90]}):")
            lines += [f"   │ {line}" for line in source.splitlines()]
        lines.append("")
    width = max(len(hazard.name) for hazard in report.hazards)
    for hazard in report.hazards:
        mark = {"found": "✗", "clean": "✓"}.get(hazard.verdict, "·")
        note = f"  {hazard.note.splitlines()[-1][:80]}" if hazard.note and hazard.verdict not in ("found", "clean") else ""
        causes = sorted({f"[{f.severity}] {f.cause}" for f in report.findings if f.hazard == hazard.name})
        lines.append(
            f"{mark} {hazard.name:{width}}  {hazard.verdict:11}{'  ' + ', '.join(causes) if causes else note}".rstrip()
        )
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts().items())
    lines += ["", f"{len(report.findings)} findings; hazards: {counts}"]
    return "\n".join(lines)
