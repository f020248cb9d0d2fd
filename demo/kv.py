"""A small language model writes 4096 tokens from each of several key-value caches of Rapt: what do codes cost, what do they save?

    cargo xtask demo kv              makes the environment, builds the wheel, runs this
    python demo/kv.py [--svg FILE]   in an environment that holds rapt and torch

The model is trained first, on the text of this repository (`language_model`). Then each cache serves the same weights and prompt:

    written   each cache's own greedy tokens, one step at a time; the caches take turns, so that noise of the machine meets all alike
    forced    the tokens that the bfloat16 run wrote, given to all: only here do logits of one place compare
    held out  bits per byte of a page that the model was not trained on

The forced and the held-out tokens go through the cache in chunks; each query reads the keys as the cache holds them, its own too.
Exit code 0: every claim held. 1: one did not; the last lines say which. 2: something is not installed.
"""

import argparse
import sys
import time
from pathlib import Path

try:
    import language_model as llama
    import rapt
    import torch
    from kv_chart import draw
    from tqdm import tqdm

    import rapt.torch
except ModuleNotFoundError as missing:
    print(f"demo: {missing.name} is not installed; `cargo xtask demo kv` installs what this needs", file=sys.stderr)
    sys.exit(2)

PROMPT, NEW, PAGE, CHUNK, TURN = 256, 4096, 16, 256, 64
MOST = PROMPT + NEW
BLOCKS_OF_32 = {"granularity": "block", "block_size": 32}
CACHES = {
    "bf16": {},
    "int8 token": {"format": "int8", "granularity": "token"},
    "e4m3fn token": {"format": "e4m3fn", "granularity": "token"},
    "mxfp8": {"format": "mxfp8"},
    "int4 block 32": {"format": "int4", **BLOCKS_OF_32},
    "nvfp4": {"format": "nvfp4"},
}
# Keys and values after the prompt may be larger than those of the prompt: nvfp4's scales reach this many times as far.
HEADROOM = 2.0
# Largest relative L2 error of the forced logits: far above what this model shows, so that only a broken cache exceeds it.
LIMITS = {"int8 token": 0.05, "e4m3fn token": 0.15, "mxfp8": 0.15, "int4 block 32": 0.5, "nvfp4": 0.5}


class Cache:
    """One sequence's keys and values of all layers, each layer in a `rapt.KVCache`, and the time that attention took."""

    def __init__(self, options, prompt_keys):
        self.layers = [new_cache(options, *pair) for pair in prompt_keys]
        self.ids = [layer.new_sequence() for layer in self.layers]
        self.length, self.seconds, self.calls = 0, 0.0, 0

    def attend(self, number, q, k, v):
        start = time.perf_counter()
        cache, id = self.layers[number], self.ids[number]
        q, k, v = (x.bfloat16() for x in (q, k, v))
        cache.append(id, k[0], v[0])
        out = cache.attention(q, [id], causal=True)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return out.float()

    def logits(self, model, tokens):
        """The logits [len, 256] of tokens that follow those which the cache has."""
        out = model(tokens[None], self.length, self.attend)[0]
        self.length += len(tokens)
        return out


def new_cache(options, k, v):
    """An empty cache; nvfp4's is calibrated on a prompt's k and v."""
    if options.get("format") == "nvfp4":
        options = {**options, "global_scale": tuple(HEADROOM * rapt.quantize(x, "nvfp4").global_scale for x in (k, v))}
    return rapt.KVCache(-(-MOST // PAGE), PAGE, llama.SMALL.kv_heads, llama.SMALL.head_dim, dtype="bfloat16", **options)


def bytes_per_token(options, prompt_keys):
    """Codes, scales and numbers of one token in all layers."""
    if not options:
        return 2 * 2 * llama.SMALL.layers * llama.SMALL.kv_heads * llama.SMALL.head_dim
    tensors = [rapt.quantize(x, **options) for pair in prompt_keys for x in pair]
    shared = 4 if options["format"] == "nvfp4" else 0  # one global scale for a whole tensor
    return sum(x.nbytes - shared for x in tensors) // PROMPT


def keys_of(model, prompt):
    """[(k, v)] of each layer, [len, heads, head_dim] in bfloat16, of attention without a cache."""
    seen = []

    def attend(number, q, k, v):
        seen.append((k[0].bfloat16(), v[0].bfloat16()))
        return llama.full_attention(number, q, k, v)

    model(prompt[None], 0, attend)
    return seen


class Writer:
    """A greedy run: the prompt, then one token after another, each the likeliest."""

    def __init__(self, model, cache, prompt):
        self.model, self.cache = model, cache
        self.tokens = [cache.logits(model, prompt)[-1].argmax()]
        self.seconds, self.prompt_calls = 0.0, cache.calls
        cache.seconds = 0.0

    def write(self, count):
        start = time.perf_counter()
        for _ in range(count):
            self.tokens.append(self.cache.logits(self.model, self.tokens[-1][None])[-1].argmax())
        self.seconds += time.perf_counter() - start


def written(model, prompt, prompt_keys, progress):
    """{cache: its Writer after NEW tokens}, in turns of TURN tokens; who leads a round changes."""
    writers = {name: Writer(model, Cache(options, prompt_keys), prompt) for name, options in CACHES.items()}
    order = list(writers)
    for _ in range(NEW // TURN):
        for name in order:
            writers[name].write(min(TURN, NEW - len(writers[name].tokens)))
            progress.update()
        order.append(order.pop(0))
    return writers


def forced(model, tokens, options, prompt_keys):
    """The logits [len, 256] where these tokens are given, in chunks."""
    cache = Cache(options, prompt_keys)
    return torch.cat([cache.logits(model, chunk) for chunk in tokens.split(CHUNK)])


def equal_before(one, other):
    """How many leading tokens two runs share."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def relative_l2(x, truth):
    return ((x - truth).double().norm() / truth.double().norm()).item()


def bits_per_byte(logits, tokens):
    """The mean of −log2 of the probability of each token after the first."""
    losses = torch.nn.functional.cross_entropy(logits[:-1].double(), tokens[1:])
    return (losses / torch.log(torch.tensor(2.0, dtype=torch.float64))).item()


def measure(model, text, progress):
    """{cache: its figures}, and what was served or fell back."""
    held_out = text[:MOST]
    prompt = held_out[:PROMPT]
    prompt_keys = keys_of(model, prompt)
    rapt.torch.reset_stats()
    writers = written(model, prompt, prompt_keys, progress)
    stats = rapt.torch.stats()
    base = torch.stack(writers["bf16"].tokens)
    story, truth, rows = torch.cat([prompt, base]), None, {}
    for name, options in CACHES.items():
        writer = writers[name]
        logits = forced(model, story, options, prompt_keys)[PROMPT - 1 : -1]
        truth = logits if truth is None else truth
        steps = len(writer.tokens) - 1
        rows[name] = {
            "bytes": bytes_per_token(options, prompt_keys),
            "same first": equal_before([int(t) for t in writer.tokens], base.tolist()),
            "same argmax": (logits.argmax(-1) == truth.argmax(-1)).double().mean().item(),
            "error": relative_l2(logits, truth),
            "bits": bits_per_byte(forced(model, held_out, options, prompt_keys), held_out),
            "attention": steps / writer.cache.seconds,
            "step": steps / writer.seconds,
            "calls": writer.cache.calls,
        }
        progress.update(NEW // TURN // 4)
    return rows, stats, bytes(base.tolist())


HEAD = ["cache", "bytes/token", "same until", "same argmax", "logits rel L2", "bits/byte", "perplexity", "attention tok/s", "whole tok/s",
        "Rapt calls"]  # fmt: skip


def cells(name, row):
    return [
        name,
        str(row["bytes"]),
        str(row["same first"]),
        f"{100 * row['same argmax']:.2f}%",
        f"{row['error']:.2e}",
        f"{row['bits']:.4f}",
        f"{2 ** row['bits']:.3f}",
        f"{row['attention']:.0f}",
        f"{row['step']:.0f}",
        str(row["calls"]),
    ]


def table(rows):
    lines = [HEAD, *(cells(name, row) for name, row in rows.items())]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    for number, line in enumerate(lines):
        print("  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(zip(line, widths))))
        if number == 0:
            print("  ".join("─" * width for width in widths))


def check(rows, stats):
    """What was claimed and does not hold."""
    failures = []
    calls = sum(row["calls"] for row in rows.values())
    if stats["fallback"] or stats["served"] != calls:
        failures.append(f"{calls} calls of attention were made, and Rapt counted {stats}")
    # Written so that a NaN fails too.
    for name, most in LIMITS.items():
        if not rows[name]["error"] <= most:
            failures.append(f"{name}: relative error {rows[name]['error']:.2e} of the logits is above {most:.2e}")
    return failures


def train(text):
    """The model, with a line about it."""
    with tqdm(total=sum(stage[0] for stage in llama.STAGES), unit="step", mininterval=0.5 if sys.stderr.isatty() else 20) as bar:
        bar.set_description("train")

        def progress(_step, _steps, loss):
            bar.set_postfix_str(f"loss {loss:.2f}", refresh=False)
            bar.update()

        model, seconds = llama.trained(text, progress)
    seen = sum(steps * sequences * length for steps, sequences, length in llama.STAGES)
    print(
        f"The model: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million weights of Llama's shape, {llama.SMALL.layers} layers, "
        f"{llama.SMALL.heads} query and {llama.SMALL.kv_heads} key heads of {llama.SMALL.head_dim}, bytes as tokens.\nIt was trained just now, in {seconds:.0f} s, on "
        f"{seen} bytes out of the {len(text)} of this repository's docs: it spells words and makes no sense.\n"
    )
    return model


def main():
    parser = argparse.ArgumentParser(description="A small language model writes from key-value caches of several formats.")
    parser.add_argument("--svg", type=Path, default=Path("kv.svg"), help="where the plot goes (kv.svg)")
    given = parser.parse_args()
    training, held_out = llama.texts()
    print(f"rapt {rapt.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    model = train(training)
    parts = len(CACHES) * (NEW // TURN + NEW // TURN // 4)
    with torch.inference_mode(), tqdm(total=parts, unit="turn", mininterval=0.5 if sys.stderr.isatty() else 20) as progress:
        progress.set_description("write")
        rows, stats, text = measure(model, held_out, progress)
    print(f"It wrote: {text[:200].decode(errors='replace')!r} …\n")
    table(rows)
    print(
        f"\n{NEW} tokens after a prompt of {PROMPT}. same until: tokens before the first that differs from the bf16 run's. same argmax, logits rel L2: "
        f"with the bf16\nrun's tokens given. bits/byte: of {MOST} bytes of a page that was held out. attention tok/s: appending and attending in "
        f"{llama.SMALL.layers} layers alone.\nSpeeds are of one run; other work on the machine changes them.\n"
        f"Rapt served {stats['served']} calls, PyTorch {sum(stats['fallback'].values())}."
    )
    given.svg.parent.mkdir(parents=True, exist_ok=True)
    given.svg.write_text(draw(rows), encoding="utf-8")
    print(f"plot: {given.svg}")
    failures = check(rows, stats)
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("All claims held.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
