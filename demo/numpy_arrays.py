"""Attention on numpy arrays where they lie: every dtype, contiguous and permuted, against the formula in f64."""

import statistics
import time

import ml_dtypes
import numpy as np
import rapt
from rapt._reference import attention as reference

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 8, 256, 64
PASSES = 7

# Largest relative L2 error. The result is rounded once to its dtype, at most half a unit in the last place; above that
# stands what sums over 256 keys and 64 channels in the accumulation dtype (f32; f64 for f64) may lose.
LIMITS = {np.float64: 1e-14, np.float32: 1e-6, np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8}


def formula(q, k, v, mask):
    """The definition in numpy, f64."""
    return reference(*(x.astype(np.float64) for x in (q, k, v)), mask=mask)[0]


def median_ms(run):
    run()
    times = []
    for _ in range(PASSES):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def run():
    """Prints the table; gives what failed."""
    rng = np.random.default_rng(7)
    # The last quarter of the second row's keys is padding.
    mask = np.ones((BATCH, 1, 1, LENGTH), bool)
    mask[1, ..., 3 * LENGTH // 4 :] = False
    print(f"numpy {np.__version__}, rapt {rapt.__version__}: batch {BATCH}, {HEADS} heads, length {LENGTH}, head_dim {HEAD_DIM}\n")
    row = "{:10} {:>12} {:>12} {:>16} {:>14} {:>14}"
    print(row.format("dtype", "rel L2", "limit", "permuted = copy", "rapt ms", "bytes copied"))
    failures = []
    for dtype, limit in LIMITS.items():
        name = np.dtype(dtype).name
        # [B,S,H,D] seen as [B,H,S,D]: what a transformer hands to attention, with nothing moved.
        stored = [rng.standard_normal((BATCH, LENGTH, HEADS, HEAD_DIM)).astype(dtype) for _ in range(3)]
        before = [x.tobytes() for x in stored]
        views = [x.transpose(0, 2, 1, 3) for x in stored]
        out = rapt.attention(*views, mask=mask)
        same = out.tobytes() == rapt.attention(*map(np.ascontiguousarray, views), mask=mask).tobytes()
        truth = formula(*views, mask)
        error = np.linalg.norm(out.astype(np.float64) - truth) / np.linalg.norm(truth)
        plan = rapt.explain(*views, mask=mask)
        ms = median_ms(lambda: rapt.attention(*views, mask=mask))  # noqa: B023
        print(row.format(name, f"{error:.2e}", f"{limit:.2e}", "same bits" if same else "DIFFER", f"{ms:.2f}", plan.bytes_copied))
        if not error <= limit:
            failures.append(f"{name}: relative error {error:.2e} is above {limit:.2e}")
        if not same:
            failures.append(f"{name}: the permuted view and its contiguous copy give different bits")
        if out.dtype != np.dtype(dtype):
            failures.append(f"{name}: the result is {out.dtype}")
        if [x.tobytes() for x in stored] != before:
            failures.append(f"{name}: an input was written")
        if plan.bytes_copied:
            failures.append(f"{name}: {plan.bytes_copied} bytes were copied")
    stored = [rng.standard_normal((BATCH, HEADS, LENGTH, HEAD_DIM)) for _ in range(3)]
    print(f"\nthe formula in numpy, f64: {median_ms(lambda: formula(*stored, mask)):.2f} ms")
    return failures
