"""The same small transformer trained by stock PyTorch and with Rapt's attention: are the losses the same, what does a step take?

    cargo xtask demo train             makes the environment, builds the wheel, runs this
    python demo/train.py [--svg FILE]  in an environment that holds rapt and torch

`language_model`'s model learns the characters of demo/text, English prose of the 19th century, one text of which is held out. Three seeds, each
trained twice from the same weights on the same batches, in processes of their own, so that each has its own peak of memory. The stock run and
Rapt's take turns in going first.
Exit code 0: every claim held. 1: one did not; the last lines say which. 2: something is not installed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

try:
    import language_model as llama
    import rapt
    import torch
    from tqdm import tqdm
    from train_chart import draw

    import rapt.torch
except ModuleNotFoundError as missing:
    print(f"demo: {missing.name} is not installed; `cargo xtask demo train` installs what this needs", file=sys.stderr)
    sys.exit(2)

SEEDS = (1, 2, 3)
KINDS = ("stock", "rapt")
# (steps, sequences, length)
STAGE = (200, 4, 512)
HELD_OUT = "two-cities.txt"
# Steps whose mean is the final loss.
LAST = 20


def texts():
    """(training characters, held-out characters)."""
    files = sorted((llama.ROOT / "demo/text").glob("*.txt"))
    training = b"\n".join(file.read_bytes() for file in files if file.name != HELD_OUT)
    return llama.as_tokens(training), llama.as_tokens((llama.ROOT / "demo/text" / HELD_OUT).read_bytes())


def held_out_loss(model, text):
    """Mean cross entropy of each character of `text` after the first, in nats."""
    with torch.no_grad():
        logits = model(text[None, :-1], 0, llama.full_attention)[0]
    return torch.nn.functional.cross_entropy(logits.double(), text[1:]).item()


def one(kind, seed, stage):
    """A run in this process: what it found, as a line of JSON."""
    training, held_out = texts()
    losses, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "rapt":
        rapt.torch.register_backend()
    model, seconds = llama.trained(training, lambda _step, _steps, loss: losses.append(loss), seed=seed, stages=(stage,))
    stats = rapt.torch.stats()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"losses": losses, "held_out": held_out_loss(model, held_out), "seconds": seconds, "peak_kib": peak, "stats": stats}))


def run(kind, seed, stage):
    words = [sys.executable, __file__, "--one", kind, str(seed), "--stage", *map(str, stage)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kind}, seed {seed}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def final(figures):
    return statistics.fmean(figures["losses"][-LAST:])


HEAD = ["seed", "attention", "final loss", "held-out loss", "steps/s", "peak MiB", "served", "fell back"]


def table(runs, stage):
    lines = [HEAD]
    for (kind, seed), figures in runs.items():
        stats = figures["stats"]
        lines.append([
            str(seed), kind, f"{final(figures):.4f}", f"{figures['held_out']:.4f}", f"{stage[0] / figures['seconds']:.2f}",
            f"{figures['peak_kib'] / 1024:.0f}", str(stats["served"]), str(sum(stats["fallback"].values())),
        ])  # fmt: skip
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def noise(runs, value):
    """How far stock PyTorch's own results of the seeds are apart."""
    own = [value(figures) for (kind, _), figures in runs.items() if kind == "stock"]
    return max(own) - min(own)


def check(runs, stage):
    """What was claimed and does not hold."""
    failures = []
    asked = stage[0] * llama.LAYERS
    for (kind, seed), figures in runs.items():
        stats = figures["stats"]
        if kind == "rapt" and (stats["fallback"] or stats["served"] != asked):
            failures.append(f"seed {seed}: {asked} calls of attention were made, and Rapt counted {stats}")
    for what, value in (("final loss", final), ("held-out loss", lambda figures: figures["held_out"])):
        most = noise(runs, value)
        for seed in SEEDS:
            apart = abs(value(runs["rapt", seed]) - value(runs["stock", seed]))
            # Written so that a NaN fails too.
            if not apart <= most:
                failures.append(f"seed {seed}: the {what} is {apart:.4f} from stock's, and seeds alone make {most:.4f}")
    return failures


def main():
    parser = argparse.ArgumentParser(description="A small transformer trained by stock PyTorch and with Rapt's attention.")
    parser.add_argument("--svg", type=Path, default=Path("train.svg"), help="where the plot goes (train.svg)")
    parser.add_argument("--stage", type=int, nargs=3, default=STAGE, metavar=("STEPS", "SEQUENCES", "LENGTH"), help="of each run (%(default)s)")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    stage = tuple(given.stage)
    if given.one:
        return one(given.one[0], int(given.one[1]), stage)
    print(f"rapt {rapt.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    runs = {}
    with tqdm(total=len(SEEDS) * len(KINDS), unit="run") as progress:
        for turn, seed in enumerate(SEEDS):
            for kind in KINDS[:: -1 if turn % 2 else 1]:
                progress.set_description(f"{kind}, seed {seed}")
                runs[kind, seed] = run(kind, seed, stage)
                progress.update()
    runs = dict(sorted(runs.items(), key=lambda item: (item[0][1], KINDS.index(item[0][0]))))
    table(runs, stage)
    speed = {kind: statistics.median(stage[0] / runs[kind, seed]["seconds"] for seed in SEEDS) for kind in KINDS}
    steps, sequences, length = stage
    print(
        f"\n{steps} steps of {sequences} sequences of {length} characters; {llama.LAYERS} layers, {llama.HEADS} query and {llama.KV_HEADS} key heads of "
        f"{llama.HEAD_DIM}. Losses in nats; final: the mean of\nthe last {LAST} steps. Peak: of a process, beyond what importing took. "
        f"Rapt's steps are {speed['rapt'] / speed['stock']:.2f} times as many a second.\n"
        f"Seeds alone make {noise(runs, final):.4f} of difference in the final loss of stock PyTorch."
    )
    given.svg.parent.mkdir(parents=True, exist_ok=True)
    given.svg.write_text(draw({key: figures["losses"] for key, figures in runs.items()}), encoding="utf-8")
    print(f"plot: {given.svg}")
    failures = check(runs, stage)
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("All claims held.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
