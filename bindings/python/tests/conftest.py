"""Fixtures that the whole suite shares. The reference and the tolerance rule stand in reference.py."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

# What is imported stays: looked through for garbage again and again, it takes seconds of each process.
gc.disable()

sys.path.insert(0, str(Path(__file__).parent))
# Hypothesis keeps what it learnt; beside the tests nothing may be written.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir()) / "rapt-hypothesis"))
# What inductor compiles here is small: workers that each import torch, and trying each instruction set with the compiler, take
# longer than it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Several processes share the cores: torch's threads that wait for one another sleep, rather than keep a core from the rest.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# NumPy's BLAS has its own threads, which spin: the norm of 16384 numbers took 13 ms of two busy cores, and takes 0.05 ms of one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # noqa: E402 - after the variables, which it reads when it is imported


@pytest.fixture
def rng():
    """Random numbers, the same in every run."""
    return np.random.default_rng(20261121)


DTYPES = ["float64", "float32", "float16", "bfloat16"]


@pytest.fixture(params=DTYPES)
def dtype(request):
    """Each dtype that attention computes, by name."""
    return request.param


@pytest.fixture
def torch():
    """torch, or a skip where it is not installed."""
    return pytest.importorskip("torch")


# Files that take longest, which are begun first: one that is begun last is waited for by all other processes.
LONG = (
    "test_audit_sound.py",
    "test_pt2_ops.py",
    "test_torch_verdicts.py",
    "test_docs.py",
    "test_pt2_compile.py",
    "test_audit.py",
    "test_torch_transformers.py",
    "test_torch_compile.py",
)


def pytest_collection_modifyitems(items):
    """Long files first; the order within a file stays."""
    place = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


def pytest_collection_finish():
    """Garbage is looked for among what the tests make, not among a million objects of torch's."""
    gc.freeze()
    gc.enable()
