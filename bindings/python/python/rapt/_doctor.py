"""`rapt.doctor()`: what this machine and build are, and whether they compute the law."""

import importlib.metadata as _metadata
import platform as _platform
import sys as _sys

from rapt import _native


class Report(dict):
    """The facts as a dict; `str()` is a table, `ok` whether the self-test passed."""

    @property
    def ok(self):
        """Whether every case of the self-test stayed within its limit."""
        return all(case["passed"] for case in self["self_test"])

    def __str__(self):
        rows = [
            ("rapt", self["versions"]["rapt"]),
            ("cpu", f"{self['cpu']} ({self['platform']})"),
            ("isa", f"{self['isa']} (available: {', '.join(self['isa_available'])})"),
            ("threads", f"{self['threads']} (from {self['threads_from']})"),
            ("threads in torch", self["torch_threads"]),
        ]
        rows += self["cuda"].items()
        rows += [(name, version or "not installed") for name, version in self["versions"].items() if name != "rapt"]
        rows += [(name, "not set" if value is None else repr(value)) for name, value in self["environment"].items()]
        for case in self["self_test"]:
            error = case["error"] if isinstance(case["error"], str) else f"relative error {case['error']:.2g}"
            verdict = "ok" if case["passed"] else "FAILED"
            rows.append((f"self-test {case['dtype']} {case['kernel']}", f"{verdict}, {error}, limit {case['limit']:.0e}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _version(distribution):
    try:
        return _metadata.version(distribution)
    except _metadata.PackageNotFoundError:
        return None


def _torch_threads():
    torch = _sys.modules.get("torch")
    if torch is None:
        return "torch's own number (torch is not loaded)"
    pool = "torch's own pool" if _native.shares_torch_pool() else "a private pool of that size"
    return f"{torch.get_num_threads()} (from torch.get_num_threads(), {pool})"


def doctor():
    """CPU, instruction set, threads and where they come from, versions, every RAPT_ variable, a self-test against the law.

    Nothing heavy is imported: versions are read from the installed metadata.
    """
    facts = Report(_native.doctor())
    facts["cuda"] = dict(facts["cuda"])
    facts["torch_threads"] = _torch_threads()
    facts["versions"] = {
        "rapt": _native.__version__,
        "python": _platform.python_version(),
        "numpy": _version("numpy"),
        "ml_dtypes": _version("ml_dtypes"),
        "torch": _version("torch"),
    }
    return facts
