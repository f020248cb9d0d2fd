"""Kernels that the wheel ships: no compiler is needed for common requests, and a first call takes no time to speak of.

Skipped where the package ships none (a source tree without `cargo xtask wheel`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rapt

SHIPPED = sorted((Path(rapt.__file__).parent / "cubins").glob("*.cubins"))
pytestmark = pytest.mark.skipif(not SHIPPED, reason="this package ships no kernels")

WITHOUT_COMPILER = {"RAPT_NVRTC": "nowhere", "RAPT_CACHE_DIR": ""}

CODE = """
import json, sys, time
import torch, rapt
torch.zeros(1, device="cuda")
start = time.perf_counter()
import rapt.torch
loaded = time.perf_counter() - start
dtype, mask, q_len, dim = json.loads(sys.argv[1])
dtype = getattr(torch, dtype)
new = lambda n: torch.randn(1, 8, n, dim, device="cuda").to(dtype)
q, k, v = new(q_len), new(4096), new(4096)
options = {}
if mask:
    options["mask"] = torch.ones(q_len, 4096, device="cuda", dtype=torch.bool)
    if mask != "bool":
        options["mask"] = torch.zeros(q_len, 4096, device="cuda", dtype=getattr(torch, mask))
(q @ k.mT).sum().item()
start = time.perf_counter()
out = rapt.attention(q, k, v, **options)
torch.cuda.synchronize()
first = time.perf_counter() - start
print(json.dumps([first, loaded, str(rapt.explain(q, k, v, **options)), bool(out.isfinite().all())]))
"""


def first_call(*request, **environment):
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(request)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "request_",
    [
        ("bfloat16", None, 1024, 128),
        ("float16", "bool", 77, 64),
        ("bfloat16", "bfloat16", 1024, 128),
        ("bfloat16", None, 1, 128),
        ("float32", None, 100, 80),
        ("float64", None, 100, 80),
    ],
    ids=str,
)
def test_common_requests_run_without_a_compiler_at_once(request_):
    seconds, loaded, plan, finite = first_call(*request_, **WITHOUT_COMPILER)
    print(f"first call of {request_}: {seconds * 1e3:.1f} ms, after {loaded * 1e3:.1f} ms to load rapt.torch")
    assert finite and "shipped with the package" in plan
    assert seconds + loaded < 0.05


def test_what_is_not_shipped_names_the_mend():
    with pytest.raises(AssertionError, match="nvidia-cuda-nvrtc"):
        first_call("bfloat16", None, 1024, 40, **WITHOUT_COMPILER)


def test_the_sources_are_told_apart(tmp_path):
    request = ("bfloat16", None, 1024, 40)
    environment = {"RAPT_CACHE_DIR": str(tmp_path)}
    assert "compiled by NVRTC in this process" in first_call(*request, **environment)[2]
    assert "cached on disk" in first_call(*request, **environment)[2]
    assert "kernels shipped" in str(rapt.doctor())
