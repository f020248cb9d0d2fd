"""`rapt.doctor()`: what this machine and build are, and whether they compute the reference."""

import importlib.metadata as _metadata
import importlib.resources as _resources
import json as _json
import platform as _platform
import sys as _sys

from rapt import _native


class Report(dict):
    """The facts as a dict; `str()` is the table of `rapt doctor`, `ok` whether the self-test passed."""

    def __init__(self, facts, table):
        super().__init__(facts)
        self._table = table

    @property
    def ok(self):
        """Whether every case of the self-test stayed within its limit."""
        return self["ok"]

    def __str__(self):
        return self._table


def versions():
    """(name, version or None) of Rapt, Python and the libraries whose tensors Rapt reads.

    Nothing heavy is imported: versions are read from the installed metadata.
    """
    libraries = ((name, _version(name)) for name in ("numpy", "ml_dtypes", "torch"))
    return [("rapt", _native.__version__), ("python", _platform.python_version()), *libraries]


def _version(distribution):
    try:
        return _metadata.version(distribution)
    except _metadata.PackageNotFoundError:
        return None


def torch_threads():
    """How many threads attention on torch tensors has, and whose they are."""
    torch = _sys.modules.get("torch")
    if torch is None:
        return "torch's own number (torch is not loaded)"
    pool = "torch's own pool" if _native.shares_torch_pool() else "a private pool of that size"
    return f"{torch.get_num_threads()} (from torch.get_num_threads(), {pool})"


def beside_torch(isa, cpuinfo=None):
    """What was measured on this kind of processor beside stock PyTorch. `isa`: the instruction set of the kernels; `cpuinfo`: another
    processor's /proc/cpuinfo.

    The table is made of the project's records (benches/beside_torch.py), so that a processor where `register_backend()` is slower shows.
    """
    if cpuinfo is None:
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                cpuinfo = file.read()
        except OSError:
            cpuinfo = ""
    fields = dict(line.split(":", 1) for line in cpuinfo.split("\n\n", 1)[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    kind = (fields.get("cpu family"), fields.get("model"), isa)
    table = _json.loads(_resources.files("rapt").joinpath("_beside_torch.json").read_text(encoding="utf-8"))
    found = [entry for entry in table if (str(entry["family"]), str(entry["model"]), entry["isa"]) == kind]
    if not found:
        return f"not measured on this kind of processor with {isa}"
    return "; ".join(
        "{requests} requests on {threads} threads ({date}, torch {torch}), the slowest at {slowest[speed]:.2f} of its speed "
        "({slowest[row]}, {slowest[dtype]})".format(**entry)
        for entry in found
    )


def doctor():
    """CPU, instruction set, threads and where they come from, versions, every RAPT_ variable, a self-test against the
    reference. The command `rapt doctor` shows the same.
    """
    facts, table = _native.doctor()
    return Report(_json.loads(facts), table)
