"""Tests of torch's tensors on Apple's GPUs, on a fake of what torch has there (fake_torch.py). They run in a process of their own, which tests/test_mps.py
begins: what torch has for Metal is looked for once in a process."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fake_torch  # noqa: E402 - after the paths

FAKE = fake_torch.install()


@pytest.fixture
def fake():
    """The fake, nothing recorded, and nothing wrong with it."""
    FAKE.calls.clear()
    FAKE.mistake = None
    return FAKE
