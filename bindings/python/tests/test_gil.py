"""The GIL is released while attention runs, and any number of threads may call at once."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh
import numpy as np
import pytest
import rapt
from reference import random


def test_sixteen_threads_get_the_bits_of_one():
    rng = np.random.default_rng(5)
    problems = [[random(rng, (1, 3, 20 + n, 8), ["float32", "bfloat16"][n % 2]) for _ in range(3)] for n in range(16)]
    expected = [rapt.attention(*p, causal=True).tobytes() for p in problems]
    context = rapt.Context(threads=2)

    def work(n):
        call = [rapt.attention, context.attention][n % 2]
        return all(call(*problems[n], causal=True).tobytes() == expected[n] for _ in range(25))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_sixteen_threads_on_torch_tensors(torch):
    generator = torch.Generator().manual_seed(1)
    problems = [[torch.randn(1, 3, 20 + n, 8, generator=generator) for _ in range(3)] for n in range(16)]
    expected = [rapt.attention(*p) for p in problems]
    with ThreadPoolExecutor(16) as pool:
        work = lambda n: all(torch.equal(rapt.attention(*problems[n]), expected[n]) for _ in range(25))  # noqa: E731
        assert all(pool.map(work, range(16)))


SHARED = """
import faulthandler, sys, threading
faulthandler.dump_traceback_later(150, exit=True)  # a deadlock is a failure with every stack, not a hang
import numpy as np
import rapt
from reference import random

library = sys.argv[1]
rng = np.random.default_rng(7)
q, k, v = (random(rng, (2, 4, 70, 16)) for _ in range(3))
mask, sinks = rng.random((70, 70)) < 0.8, random(rng, 4)
given = dict(mask=mask, sinks=sinks)
if library == "torch":
    import torch
    q, k, v, mask, sinks = map(torch.from_numpy, (q, k, v, mask, sinks))
    given = dict(mask=mask, sinks=sinks)
plain, whole = rapt.attention(q, k, v), rapt.attention(q, k, v, **given)
context, lock, wrong = rapt.Context(threads=2), threading.Barrier(16), []
same = lambda a, b: bool((a == b).all())

def work(n):
    lock.wait()
    for turn in range(12):
        kind = (n + turn) % 6
        if kind == 0:
            ok = same(rapt.attention(q, k, v, **given), whole)
        elif kind == 1:
            ok = same(context.attention(q, k, v, **given), whole)
        elif kind == 2:
            ok = same(rapt.scaled_dot_product_attention(q, k, v), plain)
        elif kind == 3:
            out = q * 0
            ok = rapt.attention(q, k, v, out=out) is out and same(out, plain)
        elif kind == 4:
            ok = rapt.explain(q, k, v, **given).certificate["coverage"]["rows"] == 2 * 4 * 70
        else:
            try:
                rapt.attention(q, k[:, :, :5], v)
                ok = False
            except rapt.ShapeError:
                ok = True
            with rapt.Context(threads=2) as own:
                ok = ok and same(own.attention(q, k, v), plain)
        if not ok:
            wrong.append((n, turn, kind))

threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("wrong:", wrong)
"""


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_sixteen_threads_on_the_same_inputs_do_not_deadlock(library):
    if library == "torch":
        pytest.importorskip("torch")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    start = [sys.executable, "-c", SHARED, library]
    options = {"env": environment, "timeout": 300}
    done = fresh.run(*start[2:], **options) if library == "torch" else subprocess.run(start, capture_output=True, text=True, **options)
    assert done.returncode == 0 and done.stdout.strip() == "wrong: []", done.stdout + done.stderr


def numpy_call(context, x):
    return lambda: context.attention(x, x, x)


def out_call(context, x):
    out = np.empty_like(x)
    return lambda: context.attention(x, x, x, out=out)


def dlpack_call(context, x):
    from test_dlpack import Tensor

    return lambda: context.attention(Tensor(x), Tensor(x), Tensor(x))


def sdpa_call(_, x):
    return lambda: rapt.scaled_dot_product_attention(x, x, x)


def torch_call(context, x):
    x = pytest.importorskip("torch").from_numpy(x)
    return lambda: context.attention(x, x, x)


def torch_op_call(_, x):
    x = pytest.importorskip("torch").from_numpy(x)
    return lambda: rapt.attention(x, x, x)


@pytest.mark.parametrize("interface", [numpy_call, out_call, dlpack_call, sdpa_call, torch_call, torch_op_call])
def test_a_python_thread_makes_progress_while_attention_runs(interface):
    x = random(np.random.default_rng(6), (1, 8, 1024, 64))
    with rapt.Context(threads=1) as context:
        call = interface(context, x)
        call()
        ticks, running = [], threading.Event()

        def tick():
            running.set()
            while running.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0.0005)

        thread = threading.Thread(target=tick)
        thread.start()
        running.wait()
        # As many runs as it takes to be sure that one was long enough to be watched.
        start = time.perf_counter()
        spans = []
        while time.perf_counter() - start < 0.3 or len(spans) < 2:
            begin = time.perf_counter()
            call()
            spans.append((begin, time.perf_counter()))
        running.clear()
        thread.join()
    begin, end = max(spans, key=lambda span: span[1] - span[0])
    # Without the GIL released, nothing ticks between the first and the last moment of a call.
    inside = [t for t in ticks if begin < t < end]
    assert len(inside) >= 2, f"{len(inside)} ticks in {end - begin:.4f} s"
