from typing import Any

class Diagnosis:
    name: str
    confidence: float
    variant: str
    pattern: str
    error: float
    candidates: tuple[tuple[str, float, str], ...]
    def as_dict(self) -> dict[str, Any]: ...

def diagnose(out: Any, expected: Any = None, *, q: Any, k: Any, v: Any, **options: Any) -> Diagnosis: ...
