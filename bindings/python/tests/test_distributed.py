"""`rapt.distributed`: four processes on gloo against one, every option, uneven lengths, gradients, and what is lost or differs.

The processes are forked once, from one that has imported torch, and run every case of distributed_cases.py; RAPT_WHOLE=1 has more lengths and dtypes.
"""

import json
import os
import sys
import time
from pathlib import Path

import fresh
import pytest

pytest.importorskip("torch")
if sys.platform != "linux":
    pytest.skip("ranks are forked, and talk through the loopback device `lo`", allow_module_level=True)

import distributed_cases  # noqa: E402

NAMES = list(distributed_cases.cases(bool(os.environ.get("RAPT_WHOLE"))))
WRONG = [*distributed_cases.FAULTS, *(name for name in NAMES if name.startswith("differences"))]
PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import distributed_cases
distributed_cases.main(sys.argv[1])
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found of each case: None, or what was wrong."""
    begun = time.monotonic()
    ran = fresh.run(PROGRAM, str(tmp_path_factory.mktemp("ranks")), timeout=600)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    print(f"{time.monotonic() - begun:.1f} s")
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WRONG])
def test_ranks_agree_with_one_process(found, name):
    check(found, name)


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_or_is_lost_is_an_error_on_every_rank(found, name):
    check(found, name)


def check(found, name):
    assert not found.get(""), found[""]
    assert name in found, "no rank came so far"
    assert found[name] is None, found[name]
