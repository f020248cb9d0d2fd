"""The same small transformer trained by stock PyTorch and with Rapt's attention: are the losses the same, what does a step take?

    cargo xtask demo train             makes the environment, builds the wheel, runs this
    python demo/train.py [--svg FILE]  in an environment that holds rapt and torch
    python demo/train.py --device cuda on an NVIDIA GPU: 103 million weights, bfloat16 by autocast, 2048 positions

`language_model`'s model learns the characters of demo/text, English prose of the 19th century, one text of which is held out (on a GPU
those of docs too). Three seeds, each trained twice from the same weights on the same batches, in processes of their own, so that each
has its own peak of memory. The stock run and Rapt's take turns in going first.
Exit code 0: every claim held. 1: one did not; the last lines say which. 2: something is not installed.
"""

import argparse
import collections
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

try:
    import language_model as llama
    import rapt
    import torch
    from train_chart import draw

    import rapt.torch
except ModuleNotFoundError as missing:
    print(f"demo: {missing.name} is not installed; `cargo xtask demo train` installs what this needs", file=sys.stderr)
    sys.exit(2)

SEEDS = (1, 2, 3)
KINDS = ("stock", "rapt")
SIZES = {"cpu": llama.SMALL, "cuda": llama.LARGE}
# (steps, sequences, length)
STAGES = {"cpu": (200, 4, 512), "cuda": (300, 4, 2048)}
HELD_OUT = "two-cities.txt"
# Steps whose mean is the final loss.
LAST = 20
# The part of the steps before those that are timed: first calls load kernels and choose among them.
BEFORE = 0.1
# Losses this much apart, as a part of them, are the same in bfloat16 whatever seeds make: its roundings lead runs apart as another seed does.
LEAST = {"cpu": 0.0, "cuda": 0.01}
NODE = "Rapt"  # its nodes in PyTorch's autograd: those that it makes itself, and PyTorch's own where that made one for Rapt


def texts(device):
    """(training characters, held-out characters)."""
    held_out = llama.ROOT / "demo/text" / HELD_OUT
    files = sorted((llama.ROOT / "demo/text").glob("*.txt")) + (sorted((llama.ROOT / "docs").rglob("*.md")) if device == "cuda" else [])
    training = b"\n".join(file.read_bytes() for file in files if file != held_out)
    return llama.as_tokens(training).to(device), llama.as_tokens(held_out.read_bytes()).to(device)


def held_out_loss(model, text):
    """Mean cross entropy of each character of `text` after the first, in nats."""
    with torch.no_grad(), llama.computing(text.device.type):
        logits = model(text[None, :-1], 0, llama.full_attention)[0]
    return torch.nn.functional.cross_entropy(logits.double(), text[1:]).item()


def attention_nodes(loss):
    """{name: how many} of the nodes of attention that the backward of `loss` goes through."""
    found, seen, left = collections.Counter(), set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        if node.name() == "_NodeBackward" or "rapt" in node.metadata:
            found[NODE] += 1
        elif "ScaledDotProduct" in node.name():
            found[node.name()] += 1
    return dict(found)


class Watch:
    """What is kept of each step, and the time of those that count."""

    def __init__(self, device):
        self.device, self.losses, self.nodes, self.begun = device, [], {}, None

    def now(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, step, steps, loss):
        if step == 1:
            self.nodes = attention_nodes(loss)
        self.losses.append(loss.detach())  # a number would wait for the GPU
        if step == max(1, int(BEFORE * steps)):
            self.begun, self.counted = self.now(), steps - step

    def steps_per_second(self):
        return self.counted / (self.now() - self.begun)


def one(kind, seed, device, stage):
    """A run in this process: what it found, as a line of JSON."""
    training, held_out = texts(device)
    watch, before = Watch(device), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "rapt":
        rapt.torch.register_backend()
    model, _ = llama.trained(training, watch, seed=seed, stages=(stage,), size=SIZES[device])
    speed, stats = watch.steps_per_second(), rapt.torch.stats()
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() // 1024
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({
        "losses": torch.stack(watch.losses).tolist(), "held_out": held_out_loss(model, held_out), "speed": speed, "peak_kib": peak,
        "stats": stats, "nodes": watch.nodes,
    }))  # fmt: skip


def run(kind, seed, device, stage):
    words = [sys.executable, __file__, "--one", kind, str(seed), "--device", device, "--stage", *map(str, stage)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kind}, seed {seed}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def final(figures):
    return statistics.fmean(figures["losses"][-LAST:])


HEAD = ["seed", "attention", "final loss", "held-out loss", "steps/s", "peak MiB", "served", "fell back"]


def table(runs):
    lines = [HEAD]
    for (kind, seed), figures in runs.items():
        stats = figures["stats"]
        lines.append([
            str(seed), kind, f"{final(figures):.4f}", f"{figures['held_out']:.4f}", f"{figures['speed']:.2f}",
            f"{figures['peak_kib'] / 1024:.0f}", str(stats["served"]), str(sum(stats["fallback"].values())),
        ])  # fmt: skip
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def noise(runs, value):
    """How far stock PyTorch's own results of the seeds are apart."""
    own = [value(figures) for (kind, _), figures in runs.items() if kind == "stock"]
    return max(own) - min(own)


def check(runs, device, stage):
    """What was claimed and does not hold."""
    failures, layers = [], SIZES[device].layers
    asked = stage[0] * layers
    for (kind, seed), figures in runs.items():
        stats = figures["stats"]
        if kind == "rapt" and (stats["fallback"] or stats["served"] != asked):
            failures.append(f"seed {seed}: {asked} calls of attention were made, and Rapt counted {stats}")
        if kind == "rapt" and figures["nodes"] != {NODE: layers}:
            failures.append(f"seed {seed}: a step has {layers} calls of attention, and its backward goes through {figures['nodes']}")
    for what, value in (("final loss", final), ("held-out loss", lambda figures: figures["held_out"])):
        for seed in SEEDS:
            most = max(noise(runs, value), LEAST[device] * value(runs["stock", seed]))
            apart = abs(value(runs["rapt", seed]) - value(runs["stock", seed]))
            # Written so that a NaN fails too.
            if not apart <= most:
                failures.append(f"seed {seed}: the {what} is {apart:.4f} from stock's, allowed are {most:.4f}")
    return failures


def main():
    parser = argparse.ArgumentParser(description="A small transformer trained by stock PyTorch and with Rapt's attention.")
    parser.add_argument("--svg", type=Path, default=Path("train.svg"), help="where the plot goes (train.svg)")
    parser.add_argument("--device", choices=STAGES, default="cpu", help="where (%(default)s)")
    parser.add_argument("--stage", type=int, nargs=3, metavar=("STEPS", "SEQUENCES", "LENGTH"), help=f"of each run ({STAGES})")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    device, stage = given.device, tuple(given.stage or STAGES[given.device])
    if given.one:
        return one(given.one[0], int(given.one[1]), device, stage)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"rapt {rapt.__version__}, torch {torch.__version__}, {where}")
    runs = {}
    for turn, seed in enumerate(SEEDS):
        for kind in KINDS[:: -1 if turn % 2 else 1]:
            runs[kind, seed] = run(kind, seed, device, stage)
            print(f"[{len(runs)}/{len(SEEDS) * len(KINDS)}] {kind}, seed {seed}: {final(runs[kind, seed]):.4f}", file=sys.stderr, flush=True)
    runs = dict(sorted(runs.items(), key=lambda item: (item[0][1], KINDS.index(item[0][0]))))
    table(runs)
    speed = {kind: statistics.median(runs[kind, seed]["speed"] for seed in SEEDS) for kind in KINDS}
    (steps, sequences, length), size = stage, SIZES[device]
    peak = "what torch allocated on the GPU" if device == "cuda" else "of a process, beyond what importing took"
    print(
        f"\n{steps} steps of {sequences} sequences of {length} characters; {size.layers} layers, {size.heads} query and {size.kv_heads} key heads of "
        f"{size.head_dim}. Losses in nats; final: the mean of\nthe last {LAST} steps. Steps/s: after the first {BEFORE:.0%}. Peak: {peak}. "
        f"Rapt's steps are {speed['rapt'] / speed['stock']:.2f} times as many a second.\n"
        f"Attention in the backward of a step: stock {runs['stock', SEEDS[0]]['nodes']}, Rapt {runs['rapt', SEEDS[0]]['nodes']}.\n"
        f"Seeds alone make {noise(runs, final):.4f} of difference in the final loss of stock PyTorch."
    )
    given.svg.parent.mkdir(parents=True, exist_ok=True)
    given.svg.write_text(draw({key: figures["losses"] for key, figures in runs.items()}), encoding="utf-8")
    print(f"plot: {given.svg}")
    failures = check(runs, device, stage)
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("All claims held.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
