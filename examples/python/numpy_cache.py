"""Decoding with a cache, on numpy arrays: each step reads the filled part of the cache in place.

    python examples/python/numpy_cache.py

Needs numpy. The answers of the steps are compared with one call over the whole sequence.
"""

import numpy as np
import rapt

HEADS, KV_HEADS, HEAD_DIM, LENGTH, CAPACITY = 8, 2, 64, 20, 128


def main():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEADS, LENGTH, HEAD_DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, KV_HEADS, LENGTH, HEAD_DIM), dtype=np.float32)

    # NaN where nothing was written yet: what lies behind the used part reaches no answer.
    k_cache = np.full((1, KV_HEADS, CAPACITY, HEAD_DIM), np.nan, dtype=np.float32)
    v_cache = np.full_like(k_cache, np.nan)
    rows = []
    for step in range(LENGTH):
        k_cache[:, :, step], v_cache[:, :, step] = k[:, :, step], v[:, :, step]
        used = slice(0, step + 1)
        rows.append(rapt.attention(q[:, :, step : step + 1], k_cache[:, :, used], v_cache[:, :, used]))
    stepwise = np.concatenate(rows, axis=2)

    whole = rapt.attention(q, k, v, causal=True)
    difference = float(np.abs(stepwise - whole).max())
    plan = rapt.explain(q[:, :, -1:], k_cache[:, :, :LENGTH], v_cache[:, :, :LENGTH])
    print(f"{LENGTH} steps by the {plan.kernel} kernel, {plan.bytes_copied} bytes copied")
    print(f"largest difference from one causal call: {difference:.1e}")
    assert difference < 1e-5, difference


if __name__ == "__main__":
    main()
