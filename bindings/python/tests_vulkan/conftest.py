"""These tests need the package `rapt_vulkan` and a Vulkan driver: `cargo xtask vulkan` builds the one and unpacks Mesa's lavapipe as the other.

Without them they are skipped, unless RAPT_REQUIRE names `vulkan`. A driver that computes on the processor compiles each kernel for a second or
more: few kernels, many shapes of each.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import rapt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


@pytest.fixture
def rng():
    """Random numbers, the same in every run."""
    return np.random.default_rng(20261126)


def pytest_collection_modifyitems(items):
    if rapt.is_available("vulkan"):
        return
    why = f"no GPU by Vulkan: {rapt.vulkan.adapters()}"
    if "vulkan" in os.environ.get("RAPT_REQUIRE", "").split(","):
        pytest.exit(f"RAPT_REQUIRE=vulkan, and there is {why}", returncode=1)
    for item in items:
        item.add_marker(pytest.mark.skip(reason=why))
