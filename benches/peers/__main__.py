"""A worker: one engine, one row after another, commands as JSON lines on stdin, answers as JSON lines on what was stdout.

    prepare {key, row, copies}        make the inputs and build the row
    check   {key, queries, out}       run it once; the sampled query rows go to `out` as an .npy file
    check_gradients {key, head, out}  run a training row; out, dq, dk, dv of that (batch entry, key head) go to `out`, an .npz file
    time    {key, seconds}            microseconds per call, one sample per call (short calls in groups)
    first   {key}                     microseconds of one call, which nothing went before where the row's kind is first
    release {key}                     forget the row

The controller stops this process (SIGSTOP) after every answer and wakes it before every command.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import time
import timeit

import numpy as np

import shapes
from peers import PEERS, Unsupported

GROUP_US = 200  # shorter calls are timed in groups of at least this long: the clock itself costs 0.1 us
WARM_SECONDS = 2e-3  # after waking: refill caches, wake the pool


class Worker:
    def __init__(self, name, threads):
        peer = PEERS[name]
        self.engine = importlib.import_module(f"peers.{peer.module}").Engine(threads, peer.arguments)
        self.rows = {}

    def hello(self):
        return {"versions": self.engine.versions()}

    def prepare(self, key, row, copies):
        row = shapes.Row(**{**row, "groups": tuple(row["groups"])})
        prepared = self.engine.prepare(row, copies)
        self.rows[key] = prepared, None
        return {"note": prepared.note}

    def check(self, key, queries, out):
        prepared, _ = self.rows[key]
        with prepared.context():
            whole = prepared.output()
            np.save(out, whole[:, :, queries])
            answer = {"finite": bool(np.isfinite(whole).all())}
            if prepared.second_opinion is not None:
                np.save(out + ".math.npy", prepared.second_opinion(queries))
                answer["math"] = out + ".math.npy"
        return answer

    def check_gradients(self, key, head, out):
        prepared, _ = self.rows[key]
        with prepared.context():
            prepared.calls[0]()  # what is allocated once is no step's
            gc.collect()
            give_back()
            before = peak_bytes(reset=True)
            held, judged = prepared.gradients()
            peak = peak_bytes()  # now: looking at gradients of 16 bits makes float32 copies
            finite, arrays = judged(*head)
            answer = {"finite": finite}
            if before is not None:
                answer["peak_bytes"] = max(0, peak - before - held)
            np.savez(out, *arrays)
            if prepared.second_opinion is not None:
                np.savez(out + ".math.npz", *prepared.second_opinion(*head))
                answer["math"] = out + ".math.npz"
        return answer

    def time(self, key, seconds):
        prepared, estimate = self.rows[key]
        if prepared.rewind:
            prepared.rewind()
        gc.collect()
        gc.disable()
        try:
            with prepared.context():
                if estimate is None:
                    for call in prepared.calls[1:]:  # `check` made the first one
                        call()
                    estimate = elapsed_us(prepared.calls[0])
                samples = tight(prepared, seconds) if prepared.tight else timed(prepared.calls, seconds, estimate, prepared.most_calls)
        finally:
            gc.enable()
        self.rows[key] = prepared, float(np.median(samples))
        return {"samples": samples}

    def first(self, key):
        prepared, _ = self.rows[key]
        gc.collect()
        with prepared.context():
            return {"samples": [elapsed_us(prepared.calls[0])]}

    def release(self, key):
        self.rows.pop(key, None)
        gc.collect()
        return {}


def give_back():
    """To the system, what the C library keeps of freed memory: a step that takes it again would seem to take none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_bytes(reset=False):
    """The most memory that this process has held since it was last reset, by which it is what is held now; None where Linux does not tell."""
    try:
        if reset:
            with open("/proc/self/clear_refs", "w") as clear:
                clear.write("5")
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        return None


def elapsed_us(call):
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def timed(calls, seconds, estimate, most=None):
    """Microseconds per call. Rotates through `calls`, so that no call finds its K and V in a cache that the last one filled."""
    now = time.perf_counter
    at = 0
    if estimate < 50_000:  # a longer call warms itself
        end = now() + WARM_SECONDS
        while True:
            calls[at % len(calls)]()
            at += 1
            if now() >= end:
                break
    group = max(1, round(GROUP_US / max(estimate, 0.1)))
    samples = []
    end = now() + seconds
    while True:
        began = now()
        for i in range(at, at + group):
            calls[i % len(calls)]()
        ended = now()
        at += group
        samples.append((ended - began) * 1e6 / group)
        if ended >= end or (most and at >= most):
            return samples


def tight(prepared, seconds):
    """Microseconds per execution of the bare statement: no rotation, no closure."""
    statement, names = prepared.tight
    timer = timeit.Timer(statement, globals=names)
    timer.timeit(20)
    count = min(1000, max(10, int(2e-3 / (timer.timeit(20) / 20))))
    samples = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        samples.append(timer.timeit(count) * 1e6 / count)
    return samples



def main():
    # Libraries print to stdout as they please: keep the answers' channel apart from it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content):
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        worker = Worker(sys.argv[1], int(sys.argv[2]))
        answer(worker.hello())
    except Exception as problem:
        answer({"unavailable": f"{type(problem).__name__}: {problem}".splitlines()[0]})
        return
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(getattr(worker, command.pop("do"))(**command))
        except Unsupported as reason:
            answer({"unsupported": str(reason)})
        except Exception as problem:
            answer({"failed": f"{type(problem).__name__}: {problem}".splitlines()[0][:300]})


if __name__ == "__main__":
    main()
