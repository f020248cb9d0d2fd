"""The GIL is released while attention runs, and any number of threads may call at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import rapt
from law import random


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


def test_a_python_thread_makes_progress_while_attention_runs():
    x = random(np.random.default_rng(6), (1, 8, 1024, 64))
    with rapt.Context(threads=1) as context:
        context.attention(x, x, x)
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
            context.attention(x, x, x)
            spans.append((begin, time.perf_counter()))
        running.clear()
        thread.join()
    begin, end = max(spans, key=lambda span: span[1] - span[0])
    # Without the GIL released, nothing ticks between the first and the last moment of a call.
    inside = [t for t in ticks if begin < t < end]
    assert len(inside) >= 2, f"{len(inside)} ticks in {end - begin:.4f} s"
