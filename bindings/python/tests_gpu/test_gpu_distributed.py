"""`rapt.distributed` on ranks with a GPU each, over NCCL: every option by every method, forward and backward, beside one GPU (distributed_cases.py)."""

import json
from pathlib import Path

import distributed_cases
import distributed_copies
import fresh
import pytest
import torch

WORLD = min(4, torch.cuda.device_count())
PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(distributed_cases.__file__).parent)!r})
import distributed_cases
distributed_cases.main_on_gpus(sys.argv[1], {WORLD})
"""
if WORLD < 2:
    pytest.skip("one GPU is no group", allow_module_level=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found of each case: None, or what was wrong."""
    ran = fresh.run(PROGRAM, str(tmp_path_factory.mktemp("ranks")), timeout=600)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*distributed_cases.cases_on_gpus(), *distributed_copies.FAULTS])
def test_gpus_agree_with_one(found, name):
    assert not found.get(""), found[""]
    assert name in found, "no rank came so far"
    assert found[name] is None, found[name]
