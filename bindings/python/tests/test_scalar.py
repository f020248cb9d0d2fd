"""Plain Rust, without any vector instruction: RAPT_ISA=scalar in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import numpy as np
import rapt
from reference import assert_lse_close, random, reference

assert rapt.doctor()["isa"] == "scalar"
rng = np.random.default_rng(8)
bounds = {"float64": 1e-13, "float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2}
for dtype, bound in bounds.items():
    for sizes in [(1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 33, 70, 24, 17), (1, 2, 1, 1, 130, 64, 64)]:
        batch, heads, kv_heads, q_len, kv_len, head_dim, head_dim_v = sizes
        q = random(rng, (batch, heads, q_len, head_dim), dtype)
        k, v = random(rng, (batch, kv_heads, kv_len, head_dim), dtype), random(rng, (batch, kv_heads, kv_len, head_dim_v), dtype)
        for options in [{}, {"causal": "bottom_right"}, {"window": (5, 1), "softcap": 3.0}, {"mask": rng.random((q_len, kv_len)) < 0.7}]:
            assert rapt.explain(q, k, v, **options).isa == "scalar"
            out, lse = rapt.attention(q, k, v, return_lse=True, **options)
            expected, expected_lse = reference(q, k, v, **options)
            np.testing.assert_allclose(out.astype(np.float64), expected, atol=bound, rtol=0)
            assert_lse_close(lse, expected_lse, dtype)
            again = rapt.attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), layout="bshd", **options)
            assert (again.transpose(0, 2, 1, 3) == out).all()
print("ok")
"""


@pytest.mark.parametrize("isa", ["scalar"])
def test_forced_scalar_computes_reference(isa):
    environment = {**os.environ, "RAPT_ISA": isa, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr
