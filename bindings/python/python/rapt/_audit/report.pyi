from pathlib import Path
from typing import Any

class HazardResult:
    name: str
    severity: str
    title: str
    verdict: str
    by_dtype: dict[str, str]
    note: str
    probes: int
    seconds: float

class Finding:
    hazard: str
    cause: str
    severity: str
    title: str
    evidence: dict[str, Any]
    dtypes: list[str]
    reproducer: dict[str, Any]
    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    def as_dict(self) -> dict[str, Any]: ...

class Report:
    target: str
    device: str
    dtypes: tuple[str, ...]
    hazards: list[HazardResult]
    findings: list[Finding]
    seconds: float
    budget_s: float
    @property
    def ok(self) -> bool: ...
    def at_least(self, severity: str) -> list[Finding]: ...
    def counts(self) -> dict[str, int]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def to_json(self, path: str | Path | None = None) -> str: ...
    def to_junit(self, path: str | Path | None = None, fail_on: str = "low") -> str: ...
    def to_html(self, path: str | Path | None = None) -> str: ...
