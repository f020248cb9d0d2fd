"""`rapt.diagnose`: which corruption an output shows.

Each hypothesis of hypotheses.py is played on the inputs and laid beside the output. One is named if it leaves at most a
fifth of the error that the reference leaves, over the elements that it foretells. Where no simulation can exist (garbage), the
pattern of right and wrong elements speaks. Confidence is 1 − (error left / error against the reference), times the fourth root of the
share of elements foretold, and divided among names that explain the output equally well.
Deliberately absent: a guess where nothing fits ("unknown", with the pattern of what is wrong).
"""

from dataclasses import dataclass, field

import numpy as np

from rapt._reference import scores

from .causes import listed
from .hypotheses import ALL
from .sight import Sight
from .tensors import runs

# Relative error below which an output is called right, and ten times which a simulation may be off.
NEAR = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
EXPLAINED = 0.2
"""A hypothesis is named if it leaves at most this share of the error."""


@dataclass(frozen=True)
class Diagnosis:
    """What an output shows. `name` is "correct", "unknown" or a corruption; docs/reference/audit.md lists them."""

    name: str
    confidence: float
    """0 to 1."""
    variant: str
    """Which form of the corruption."""
    pattern: str
    """The elements that show it."""
    error: float
    """Relative L2 of the output against the reference or `expected`; NaN if the output is not finite where that is."""
    candidates: tuple = field(default=())
    """Further names that would explain the output, (name, confidence, variant), likeliest first."""

    def as_dict(self):
        return {
            "name": self.name,
            "confidence": round(self.confidence, 3),
            "variant": self.variant,
            "pattern": self.pattern,
            "error": self.error,
            "candidates": [{"name": n, "confidence": round(c, 3), "variant": t} for n, c, t in self.candidates],
        }

    def __str__(self):
        text = f"{self.name} ({self.confidence:.0%})"
        text += f": {self.variant}" if self.variant else ""
        text += f"\n  {self.pattern}\n  relative error against the reference {self.error:.3g}"
        for name, confidence, variant in self.candidates:
            text += f"\n  or {name} ({confidence:.0%}): {variant}"
        return text


def diagnose(out, expected=None, *, q, k, v, **options):
    """Name the corruption that `out` shows; see `rapt.diagnose`."""
    it = Sight(out, expected, q, k, v, options)
    if it.out.shape != it.want.shape:
        pattern = f"out is {list(it.out.shape)}, not {list(it.want.shape)}"
        return Diagnosis("wrong-shape", 1.0, "", pattern, float("nan"))
    near = NEAR[it.dtype]
    error = distance(it.out, it.want, np.ones(it.out.shape, bool))
    if error <= near / 30 or (it.dtype in ("float16", "bfloat16") and error <= near / 5):
        return Diagnosis("correct", 1.0, "", f"all {it.out.size} elements are where the reference has them", error)
    found = sorted([*simulated(it, near), *seen(it, near)], key=lambda each: -each[0])
    for _, name, *_ in found:
        listed(name)
    if not found:
        return Diagnosis("unknown", 0.0, "", where(it, near), error)
    # The order of ALL breaks ties: sorted is stable.
    best, names = found[0], {}
    for score, name, variant, pattern in found:
        names.setdefault(name, (score, variant, pattern))
    rivals = [name for name, (score, *_) in names.items() if score > best[0] - 0.02]
    share = 1 / len(rivals)
    others = [(n, s * (share if n in rivals else 1 - share), t) for n, (s, t, _) in names.items() if n != best[1]]
    return Diagnosis(best[1], best[0] * share, best[2], best[3], error, tuple(others[:3]))


def distance(out, other, where_known):
    """Relative L2 over the known elements; NaN if the output is not finite where the other is."""
    a, b = out[where_known], other[where_known]
    if not a.size:
        return float("nan")
    differs = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not differs.any():
        return 0.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    with np.errstate(over="ignore"):
        whole = np.linalg.norm(b)
        return float(np.linalg.norm(a - b) / (whole if whole else 1.0))


def simulated(it, near):
    """(confidence, name, variant, pattern) of every hypothesis that fits."""
    for family in ALL:
        for guess in family(it):
            listed(guess.name)
            if guess.out.shape != it.out.shape:
                continue
            foretold = np.isfinite(guess.out)
            count = int(foretold.sum())
            if count < max(2, it.out.size // 64):
                continue
            left, off = distance(it.out, guess.out, foretold), distance(it.out, it.want, foretold)
            if np.isnan(left) or left > 10 * near:
                continue
            if np.isnan(off):
                off = 1.0
            if off <= near / 30 or left > EXPLAINED * off:
                continue
            yield (1 - left / off) * (count / it.out.size) ** 0.25, guess.name, guess.variant, guess.pattern


def wrong_elements(it, near):
    """Where the output is off, bool of its shape: by more than the row's size allows, or not finite where the reference is."""
    with np.errstate(all="ignore"):
        size = np.sqrt(np.mean(np.where(np.isfinite(it.want), it.want, 0) ** 2, axis=-1, keepdims=True))
        size = np.maximum(size, np.mean(size) * 1e-3)
        off = np.abs(it.out - it.want) > 4 * near * size
    return np.where(
        np.isfinite(it.out) & np.isfinite(it.want), off, ~((it.out == it.want) | np.isnan(it.out) & np.isnan(it.want))
    )


def seen(it, near):
    """(confidence, name, variant, pattern) of corruptions that show by where the output is right and where wrong."""
    wrong = wrong_elements(it, near)
    batch, heads, q_len, head_dim_v = wrong.shape
    inputs_finite = all(np.isfinite(x).all() for x in (it.q, it.k, it.v))
    if not np.isfinite(it.out).all() and np.isfinite(it.want).all():
        if not inputs_finite:
            count = int((~np.isfinite(it.out)).sum())
            yield (
                0.95,
                "masked-nonfinite-leaks",
                "0 · NaN",
                f"{count} of {it.out.size} elements are not finite though no row attends one that is not",
            )
        s = scores(it.q, it.k, **{n: it.options[n] for n in ("scale", "softcap") if n in it.options})
        top = s.max(-1)
        most = {"float64": 700.0, "float16": 88.0}.get(it.dtype, 88.0)
        bad = ~np.isfinite(it.out).all(-1)
        if inputs_finite and (top[bad] > most).all() and (top > most).any():
            yield (
                0.9,
                "row-max-not-subtracted",
                "exp overflows",
                f"the {int(bad.sum())} rows that are not finite are those with a score above {most:g}",
            )
    by_head = wrong.mean((0, 2, 3))
    if heads > 1 and by_head[0] == 0 and by_head[1:].min() > 0.5:
        rest = it.out[:, 1:]
        zero = not np.nan_to_num(rest, nan=1.0).any()
        copied = distance(rest, np.broadcast_to(it.out[:, :1], rest.shape), np.ones(rest.shape, bool)) < near
        variant = "the others are zero" if zero else "the others repeat it" if copied else "the others are garbage"
        yield (
            (0.98 if zero or copied else 0.8),
            "only-head-0-computed",
            variant,
            f"head 0 is right, heads 1–{heads - 1} are not",
        )
    by_batch = wrong.mean((1, 2, 3))
    if batch > 1 and by_batch[0] == 0 and by_batch[1:].min() > 0.5:
        yield 0.75, "only-batch-0-computed", "the others are garbage", f"batch 0 is right, batches 1–{batch - 1} are not"
    by_row = wrong.any((0, 1, 3))
    first = int(by_row.argmax())
    if by_row.any() and 0 < first and by_row[first:].all() and wrong.mean((3,))[:, :, first:].min() > 0.5:
        tail = it.out[:, :, first:]
        form = (
            "zeros"
            if not np.nan_to_num(tail, nan=1.0).any()
            else "not finite"
            if not np.isfinite(tail).all()
            else "other numbers"
        )
        whole = first % 4 == 0 and (q_len - first) <= first
        late = 0.93 if whole and "causal" not in it.options else 0.7
        yield late, "stale-tail", f"the tail holds {form}", f"rows 0–{first - 1} are right, {first}–{q_len - 1} are not"
    by_column = wrong.any((0, 1, 2))
    if head_dim_v % 2 == 0 and it.dtype in ("float16", "bfloat16"):
        odd, even = wrong[..., 1::2].mean(), wrong[..., 0::2].mean()
        if odd < 0.1 and even > 0.5:
            yield (
                0.9,
                "16-bit-read-as-32-bit",
                "seen by parity",
                f"{odd:.0%} of the odd elements are wrong, {even:.0%} of the even ones",
            )
    first = int(by_column.argmax())
    if by_column.any() and 0 < first and by_column[first:].all():
        yield (
            0.9,
            "head-dim-tail-dropped",
            f"columns {first} and beyond of the output",
            f"columns 0–{first - 1} are right, {first}–{head_dim_v - 1} are not",
        )
    narrower = {"float64": np.float32}.get(it.dtype)
    if narrower is not None and np.isfinite(it.out).all():
        with np.errstate(over="ignore"):
            same = float(np.mean(it.out.astype(narrower) == it.out))
        error = distance(it.out, it.want, np.ones(wrong.shape, bool))
        if same > 0.99 and error < 1e-4:
            yield (
                0.97,
                "hidden-cast",
                "computed in float32",
                f"{same:.0%} of the elements are float32 numbers; error {error:.2g}",
            )
        elif 2e-8 < error < 1e-5:
            yield 0.7, "hidden-cast", "computed in float32", f"error {error:.2g} is that of float32, float64's is near 1e-15"


def where(it, near):
    """What is wrong, in words, for an output that nothing explains."""
    wrong = wrong_elements(it, near)
    lost = int((~np.isfinite(it.out) & np.isfinite(it.want)).sum())
    parts = [f"{int(wrong.sum())} of {wrong.size} elements are off by more than {4 * near:g} of their row"]
    if lost:
        parts.append(f"{lost} are not finite")
    for axis, name in ((0, "batches"), (1, "heads"), (2, "rows"), (3, "columns")):
        flags = wrong.any(tuple(other for other in range(4) if other != axis))
        if flags.any() and not flags.all():
            parts.append(f"{name} {runs(flags)}")
    return "; ".join(parts)
