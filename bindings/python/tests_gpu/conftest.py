"""These tests need an NVIDIA GPU and a torch that sees it. Without one they are skipped, unless RAPT_REQUIRE names `cuda`.

    PYTHONPATH=bindings/python/python pytest bindings/python/tests_gpu
"""

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
# The planted faults and what reproducers must be are those of the suite that needs no GPU.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    if "cuda" in os.environ.get("RAPT_REQUIRE", "").split(","):
        pytest.exit("RAPT_REQUIRE=cuda, and torch sees no GPU", returncode=1)
    for item in items:
        item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
