"""Memory is O(N): a fresh process, one warm-up call, then the peak of a long one."""

import subprocess
import sys

import fresh
import pytest

CHILD = """
import re, sys
import numpy as np
import rapt

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))

length, masked, library = 16384, sys.argv[1] == "mask", sys.argv[2]
x = np.random.default_rng(0).standard_normal((1, 1, length, 64), np.float32)
mask = np.ones((length, length), np.bool_) if masked else None
if masked:
    mask[:, ::7] = False
if library == "torch":
    import torch
    x = torch.from_numpy(x)
    mask = None if mask is None else torch.from_numpy(mask)
warm = x[:, :, :256]
rapt.attention(warm, warm, warm, mask=None if mask is None else mask[:256, :256])
# The peak so far counts from here: what was resident once is not counted twice.
open("/proc/self/clear_refs", "w").write("5")
before = peak_kib()
out = rapt.attention(x, x, x, mask=mask)
print(peak_kib() - before - length * 64 * 4 // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("mask", ["plain", "mask"])
def test_a_long_call_needs_at_most_8_mib_beyond_its_output(mask, library):
    if library == "torch":
        pytest.importorskip("torch")
    start = [sys.executable, "-c", CHILD, mask, library]
    done = fresh.run(*start[2:], timeout=900) if library == "torch" else subprocess.run(start, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    extra_kib = int(done.stdout)
    assert extra_kib <= 8 * 1024, f"{extra_kib} KiB beyond the output"


PROGRAM = """
import re, sys
import numpy as np
import rapt

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))

small, large = sys.argv[1:]
rapt.load(small)(np.ones((2, 4), np.float32))
open("/proc/self/clear_refs", "w").write("5")
before = peak_bytes()
model, x = rapt.load(large), np.ones((64, 1500), np.float32)
model(x)
print(peak_bytes() - before, int(model.explain()["memory"].split()[0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_a_program_needs_no_more_memory_than_it_states(tmp_path):
    torch = pytest.importorskip("torch", minversion="2.9")
    paths = []
    for wide, inner, rows in ((4, 8, 2), (1500, 2000, 64)):
        model = torch.nn.Sequential(torch.nn.Linear(wide, inner), torch.nn.ReLU(), torch.nn.Linear(inner, wide)).eval()
        paths.append(str(tmp_path / f"{wide}.pt2"))
        torch.export.save(torch.export.export(model, (torch.ones(rows, wide),)), paths[-1])
    done = subprocess.run([sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peak, stated = map(int, done.stdout.split())
    # Two matrices of 12 MB, and as much again packed.
    assert 48e6 < stated < 56e6, stated
    # Besides: inputs and results (0.8 MB), and what the interpreter, the allocator and the graph take.
    assert peak <= stated + 6e6, f"{peak} bytes, stated are {stated}"
