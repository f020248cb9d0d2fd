"""A worker: one engine, one row after another, commands as JSON lines on stdin, answers as JSON lines on what was stdout.

    prepare {row}            build the row; says how many threads the engine was told to use
    check   {out, wide}      run it from the beginning; the results go to `out`. wide: torch in float64 instead
    time    {seconds}        microseconds of each call, and how many threads of this process were busy meanwhile
    release {}               forget the row
    archive {layers, width, path}     writes an archive of so many linear layers
    load    {path}           in this process: seconds to read and to load the file, seconds and peak memory of the first call

The controller stops this process (SIGSTOP) after every answer and wakes it before every command.
"""

import gc
import json
import os
import pathlib
import sys
import time

import numpy as np
import torch

from . import PEERS, Row, Shape, build, engines

CHECKED = 6  # successive calls of a decoder whose results are compared
LEAST_CALLS = 3
BUSY = 0.05  # a thread that ran for this part of the time was used


class Worker:
    def __init__(self, name, threads):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.peer, self.threads = PEERS[name], threads
        self.row = self.run = self.calls = None

    def hello(self):
        return {"versions": {"torch": torch.__version__}}

    def prepare(self, row):
        row["shape"] = Shape(**row["shape"])
        row["bars"] = ()
        self.row = Row(**row)
        self.calls = build.calls(self.row)
        self.run, versions, threads = getattr(engines, self.peer.engine)(self.row, self.threads)
        return {"versions": versions, "threads": threads}

    def check(self, out, wide):
        run = self.run
        if wide:
            model, kept = build.model(self.row, "f64"), []
            if self.row.shape.kind != "encoder":
                kept = build.cache(self.row, "f64")

            def run(*inputs):
                return model(*inputs, *kept)

        found = [torch.as_tensor(run(*inputs)).double().numpy() for inputs in self.calls[:CHECKED]]
        np.save(out, np.concatenate(found))
        return {"calls": len(found)}

    def time(self, seconds):
        calls, now = self.calls[build.START :] or self.calls, time.perf_counter
        gc.collect()
        gc.disable()
        samples, at = [], 0
        self.run(*calls[0])
        before, start = seconds_of_threads(), now()
        end = start + seconds
        while len(samples) < LEAST_CALLS or now() < end:
            began = now()
            self.run(*calls[at % len(calls)])
            samples.append((now() - began) * 1e6)
            at += 1
        spent, wall = seconds_of_threads(), now() - start
        gc.enable()
        busy = sum(spent[thread] - before.get(thread, 0.0) > BUSY * wall for thread in spent)
        return {"samples": samples, "busy": busy}

    def release(self):
        self.row = self.run = self.calls = None
        torch._dynamo.reset()
        gc.collect()
        return {}

    def archive(self, layers, width, path):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).eval().requires_grad_(False)
        torch.export.save(torch.export.export(model, (torch.zeros(1, width),)), path)
        return {"bytes": pathlib.Path(path).stat().st_size}

    def load(self, path, width):
        import rapt

        rapt.dtypes()
        before = memory()
        began = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(1 << 22)
            while file.readinto(buffer):
                pass
        read = time.perf_counter() - began
        began = time.perf_counter()
        model = rapt.load(path)
        loaded = time.perf_counter() - began
        began = time.perf_counter()
        model(np.zeros((1, width), np.float32))
        facts = model.explain()
        words = {name: text for name, text in facts.items() if "weights" in name or "arena" in name}
        return {"read_s": read, "load_s": loaded, "first_call_s": time.perf_counter() - began, "before": before, "after": memory(), **words}


def seconds_of_threads():
    """How long each thread of this process ran; nothing where the system does not say."""
    spent = {}
    for thread in pathlib.Path("/proc/self/task").glob("*/schedstat"):
        try:
            spent[thread.parent.name] = int(thread.read_text().split()[0]) * 1e-9
        except OSError:
            continue  # it has ended
    return spent


def memory():
    """Bytes of this process: now, at most so far, and how many of those now are of mapped files."""
    lines = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM", "RssFile")}


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
        except Exception as problem:
            answer({"failed": f"{type(problem).__name__}: {problem}".splitlines()[0][:300]})


if __name__ == "__main__":
    main()
