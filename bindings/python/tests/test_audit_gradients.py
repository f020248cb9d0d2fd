"""The tests of audit_gradients.py, in an interpreter of their own: callees are audited in forks, and once autograd has threads, which other
tests start, a fork has no autograd.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")


def test_the_auditor_hears_gradients():
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "audit_gradients.py"]
    ran = subprocess.run([sys.executable, *words], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
