"""The corruptions that diagnosis has names for, each played on the given inputs.

A hypothesis yields `Guess`es: what the output would be if that had happened. NaN in a simulation stands for an element that
the hypothesis does not foretell (memory outside the storage). The order of `ALL` is the order of preference where two
simulations agree with the output equally well: the simpler cause first.
Deliberately absent: the verdict (diagnose.py).
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from rapt._reference import attended, positions, round_to, scores, weigh

from .tensors import decode, encode, packed


class Guess(NamedTuple):
    """A corruption's name, which form of it, the output it foretells, and the pattern that shows it."""

    name: str
    variant: str
    out: np.ndarray
    pattern: str


TILES = (2, 4, 8, 16, 32, 64, 128, 256)


def scale(it):
    """The factor on q·k: missing, applied twice, default in place of the given one, exp2 in place of exp."""
    given = it.options.get("scale")
    usual = 1 / math.sqrt(it.q.shape[3])
    if given is not None:
        yield Guess(
            "scale-ignored",
            "the default was used",
            it.out_if(scale=None),
            f"every row as if scale were {usual:.4g}, not {given:.4g}",
        )
    yield Guess("scale-missing", "q·k unscaled", it.out_if(scale=1.0), f"every row as if scale were 1, not {it.scale:.4g}")
    yield Guess(
        "scale-squared",
        "applied twice",
        it.out_if(scale=it.scale**2),
        f"every row as if scale were {it.scale**2:.4g}, not {it.scale:.4g}",
    )
    for factor, text in ((math.log(2), "2^s for e^s"), (1 / math.log(2), "log2(e) applied twice")):
        yield Guess(
            "exp2-for-exp", text, it.out_if(scale=it.scale * factor), f"every row as if scores were multiplied by {factor:.4g}"
        )
    if it.v.shape[3] != it.q.shape[3]:
        yield Guess(
            "scale-of-head-dim-v",
            "1/sqrt(head_dim_v)",
            it.out_if(scale=it.v.shape[3] ** -0.5),
            "every row, by a factor on the scores",
        )


def normalisation(it):
    """The division by the row's sum."""
    s = scores(it.q, it.k, **{n: it.options[n] for n in ("scale", "softcap", "alibi_slopes", "causal") if n in it.options})
    keep, bias = attended(s.shape, mask=it.mask, **{n: it.options[n] for n in ("causal", "window") if n in it.options})
    s = s if bias is None else s + np.where(keep, bias, 0)
    out, row_max, row_sum = weigh(s, keep, it.v, it.options.get("sinks"))
    yield Guess(
        "unnormalised", "Σ exp(s − max)·v", out * row_sum, "each row is the right one times its own sum of exponentials"
    )
    with np.errstate(all="ignore"):
        yield Guess("unnormalised", "Σ exp(s)·v", out * row_sum * np.exp(row_max), "each row is the right one times exp(lse)")
    yield Guess(
        "unnormalised",
        "divided twice",
        out / np.where(row_sum == 0, 1, row_sum),
        "each row is the right one over its sum of exponentials",
    )
    yield Guess(
        "unnormalised",
        "divided by kv_len",
        out * row_sum / max(1, s.shape[3]),
        "each row is the right one times row_sum / kv_len",
    )
    uniform = weigh(np.zeros_like(s), keep, it.v)[0]
    yield Guess("scores-lost", "all weights equal", uniform, "each row is the mean of the attended values")
    columns = np.where(keep, np.exp(s - np.where(keep, s, -np.inf).max(initial=-np.inf)), 0)
    total = columns.sum(-2, keepdims=True)
    values = np.repeat(it.v, it.shape[1] // it.v.shape[1], axis=1)
    over_queries = np.matmul(columns / np.where(total == 0, 1, total), np.where(np.isfinite(values), values, 0))
    yield Guess("softmax-over-queries", "normalised along q_len", over_queries, "weights of a key, not of a query, sum to 1")


def masks(it):
    """The mask tensor: ignored, inverted, misbroadcast, misread."""
    if it.mask is None:
        return
    mask, shape = it.mask, it.shape
    boolean = mask.dtype == np.bool_
    yield Guess(
        "mask-ignored", "every key attended", it.out_if(mask=None), "rows with masked keys are off, rows without are right"
    )
    inverted = ~mask if boolean else np.where(mask == -np.inf, 0.0, -np.inf)
    yield Guess(
        "mask-inverted",
        "True read as masked" if boolean else "−inf attended",
        it.out_if(mask=inverted),
        "each row weighs exactly the keys it should not",
    )
    full = np.broadcast_to(mask, shape)
    for index, text in (((slice(0, 1),), "batch 0's mask for every batch"), ((slice(None), slice(0, 1)), "head 0's mask for every head"),
                        ((slice(None), slice(None), slice(0, 1)), "row 0's mask for every row"),
                        ((slice(None), slice(None), slice(None), slice(0, 1)), "key 0's mask for every key")):  # fmt: skip
        if not (boolean and full[index].all()):
            yield Guess("mask-misbroadcast", text, it.out_if(mask=full[index]), text)
    if mask.size:
        yield Guess(
            "mask-misbroadcast",
            "read with contiguous offsets",
            it.out_if(mask=np.resize(mask, shape)),
            "the mask's elements in row-major order, wherever they belong",
        )
    if mask.shape[0] == mask.shape[1] or 1 in mask.shape[:2]:
        swapped = mask.swapaxes(0, 1)
        if all(size in (1, full_size) for size, full_size in zip(swapped.shape, shape, strict=True)):
            yield Guess(
                "mask-misbroadcast", "batch and head exchanged", it.out_if(mask=swapped), "the mask of (b, h) applied to (h, b)"
            )
    if shape[2] == shape[3]:
        yield Guess(
            "mask-transposed",
            "queries and keys exchanged",
            it.out_if(mask=full.swapaxes(2, 3)),
            "the mask of (i, j) applied to (j, i)",
        )
    if boolean:
        yield Guess(
            "mask-as-bias", "True added as 1.0", it.out_if(mask=full.astype(np.float64)), "masked keys still weigh, by 1/e less"
        )
        return
    finite = np.where(np.isfinite(mask), mask, 0)
    hidden = np.where(mask == -np.inf, -np.inf, 0)
    for factor, text in (
        (2.0, "added twice"),
        (it.scale, "multiplied by the scale"),
        (-1.0, "subtracted"),
        (0.0, "only −inf obeyed"),
    ):
        yield Guess("bias-misapplied", text, it.out_if(mask=factor * finite + hidden), f"scores off by {text}")
    lowest = np.where(finite <= -6e4, -np.inf, mask)
    if (lowest != mask).any():
        yield Guess(
            "lowest-taken-for-minus-infinity",
            "finite bias hides the key",
            it.out_if(mask=lowest),
            "rows wholly at the lowest number are zeros, not the mean of v",
        )
    yield Guess("bias-read-as-bool", "nonzero attends", it.out_if(mask=mask != 0), "the bias decides about keys but adds nothing")


def causality(it):
    """Causal alignment, window and the other options of position."""
    causal, q_len, kv_len = it.options.get("causal"), it.shape[2], it.shape[3]
    for name in ("window", "softcap", "sinks", "alibi_slopes"):
        if name in it.options:
            yield Guess(
                f"{name.replace('_', '-')}-ignored", "as if not given", it.out_if(**{name: None}), f"every row as without {name}"
            )
    if "window" in it.options:
        left, right = it.options["window"]
        for a, b in itertools.product((-1, 0, 1), repeat=2):
            if (a, b) != (0, 0):
                ends = (None if left is None else left + a, None if right is None else right + b)
                yield Guess(
                    "window-off-by-one",
                    f"{ends} for {(left, right)}",
                    it.out_if(window=ends),
                    "one key too many or too few at the ends",
                )
    if causal is None:
        return
    if q_len != kv_len:
        other = "bottom_right" if causal == "top_left" else "top_left"
        yield Guess(
            "alignment-swapped",
            f"{other} for {causal}",
            it.out_if(causal=other),
            f"row i attends j ≤ i {'+' if other == 'bottom_right' else '−'} (kv_len − q_len) = {abs(kv_len - q_len)} keys {'more' if (kv_len > q_len) == (other == 'bottom_right') else 'fewer'}",
        )
    yield Guess("causal-ignored", "every key attended", it.out_if(causal=None), "the last rows are right, the first ones off")
    for shift, text in ((-1, "j < i: the row's own key is missing"), (1, "j ≤ i + 1: one key of the future is seen")):
        keep = positions(q_len, kv_len, causal)
        rolled = np.zeros_like(keep)
        rolled[:, max(0, shift) : kv_len + min(0, shift)] = keep[:, max(0, -shift) : kv_len - max(0, shift)]
        if shift > 0:
            rolled[:, 0] = keep[:, 0] | (np.arange(q_len) >= 0)
        both = rolled if it.mask is None else None
        if both is not None:
            yield Guess("causal-off-by-one", text, it.out_if(causal=None, mask=both), text)
    if it.mask is None:
        flipped = ~positions(q_len, kv_len, causal) | np.eye(q_len, kv_len, dtype=bool)
        yield Guess("causal-inverted", "j ≥ i", it.out_if(causal=None, mask=flipped), "rows see the future, not the past")


def roles(it):
    """Tensors and axes taken for each other."""
    q, k, v = it.q, it.k, it.v
    batch, heads, q_len, kv_len = it.shape
    if q.shape == k.shape:
        yield Guess("q-k-transposed", "q and k exchanged", it.out_if(q=k, k=q), "row i weighs by column i of the scores")
        yield Guess(
            "k-v-exchanged",
            "k and v exchanged",
            it.out_if(k=v, v=k) if k.shape == v.shape else np.full_like(it.want, np.nan),
            "rows are means of k",
        )
        yield Guess(
            "q-v-exchanged",
            "q and v exchanged",
            it.out_if(q=v, v=q) if q.shape == v.shape else np.full_like(it.want, np.nan),
            "rows are means of q",
        )
    yield Guess("q-k-transposed", "k read as [head_dim, kv_len]", it.out_if(k=crossed(k)), "keys are columns of the buffer")
    yield Guess("v-transposed", "v read as [head_dim_v, kv_len]", it.out_if(v=crossed(v)), "values are columns of the buffer")
    if it.out.shape[2] > 1 and it.out.shape[3] > 1:
        yield Guess(
            "output-transposed",
            "[head_dim_v, q_len] written as [q_len, head_dim_v]",
            it.want.swapaxes(2, 3).reshape(it.want.shape),
            "rows of the output are columns of the right one",
        )
    if heads > 1 and q_len > 1:
        written = it.want.transpose(0, 2, 1, 3).reshape(it.want.shape)
        yield Guess(
            "heads-transposed",
            "output written as [B,S,H,D]",
            written,
            "row (h, i) of the output is row (i, h) of the right one, counted through",
        )
        yield Guess(
            "heads-transposed",
            "output taken from [B,S,H,D]",
            it.want.reshape(batch, q_len, heads, -1).transpose(0, 2, 1, 3),
            "row (i, h) of the right one, counted through, is row (h, i) of the output",
        )
        read = {name: tagged(x) for name, x in (("q", q), ("k", k), ("v", v))}
        out = it.out_if(**read)
        yield Guess("heads-transposed", "inputs read as [B,S,H,D]", out, "heads and rows of the inputs exchanged")
        back = out.transpose(0, 2, 1, 3).reshape(out.shape)
        yield Guess("heads-transposed", "inputs and output as [B,S,H,D]", back, "heads and rows exchanged on both sides")
        for name in "qkv":
            yield Guess(
                "heads-transposed",
                f"{name} read as [B,S,H,D]",
                it.out_if(**{name: read[name]}),
                f"heads and rows of {name} exchanged",
            )
    if heads > 1:
        yield Guess(
            "heads-transposed", "heads in reversed order", it.want[:, ::-1], "output head h is the right one's head H−1−h"
        )
        for step in range(1, heads):
            yield Guess(
                "heads-transposed",
                f"heads rotated by {step}",
                np.roll(it.want, step, axis=1),
                f"output head h is the right one's head h − {step}",
            )
    if batch > 1 and batch == heads:
        yield Guess(
            "heads-transposed", "batch and heads exchanged", it.want.swapaxes(0, 1), "output (b, h) is the right one's (h, b)"
        )
    if batch > 1:
        yield Guess(
            "one-batch-repeated",
            "batch 0 in every batch",
            np.broadcast_to(it.want[:1], it.want.shape),
            "every batch holds batch 0's output",
        )
        for b in range(1, min(batch, 4)):
            yield Guess(
                "one-batch-repeated",
                f"batch {b} in every batch",
                np.broadcast_to(it.want[b : b + 1], it.want.shape),
                f"every batch holds batch {b}'s output",
            )
        for name in "qkv":
            one = {name: np.broadcast_to(getattr(it, name)[:1], getattr(it, name).shape)}
            yield Guess(
                "one-batch-repeated", f"batch 0 of {name} for every batch", it.out_if(**one), f"batches use batch 0's {name}"
            )
        one = {name: np.broadcast_to(getattr(it, name)[:1], getattr(it, name).shape) for name in "kv"}
        yield Guess("one-batch-repeated", "batch 0 of k and v for every batch", it.out_if(**one), "batches use batch 0's k and v")
        yield Guess(
            "batches-mixed", "batches in reversed order", it.want[::-1], "output batch b is the right one's batch B−1−b"
        )


def groups(it):
    """Which key head a query head uses."""
    heads, kv_heads = it.shape[1], it.k.shape[1]
    if heads == kv_heads:
        if heads > 1:
            zero = {name: np.broadcast_to(getattr(it, name)[:, :1], getattr(it, name).shape) for name in "kv"}
            yield Guess("wrong-gqa-group", "key head 0 for every head", it.out_if(**zero), "every query head uses key head 0")
        return
    for text, index in (
        ("h mod num_kv_heads", np.arange(heads) % kv_heads),
        ("key head 0 for every head", np.zeros(heads, int)),
    ):
        yield Guess("wrong-gqa-group", text, it.out_if(k=it.k[:, index], v=it.v[:, index]), f"query head h uses key head {text}")
    index = np.arange(heads) % kv_heads
    right = np.arange(heads) // (heads // kv_heads)
    yield Guess(
        "wrong-gqa-group", "h mod num_kv_heads in v only", it.out_if(k=it.k[:, right], v=it.v[:, index]), "values of another group"
    )
    yield Guess(
        "wrong-gqa-group", "h mod num_kv_heads in k only", it.out_if(k=it.k[:, index], v=it.v[:, right]), "keys of another group"
    )


def strides(it):
    """Strided views read as if their memory were ordered otherwise."""
    views = [name for name in "qkv" if not it.stored[name].contiguous]
    for count in range(len(views), 0, -1):
        for some in itertools.combinations(views, count):
            read = {name: it.stored[name].read(packed(it.stored[name].shape)) for name in some}
            which = " and ".join(some)
            out = it.out_if(**read)
            pattern = f"{which} read in memory order from the first element on, strides {', '.join(str(it.stored[n].strides) for n in some)} ignored"
            yield Guess("contiguous-offsets-on-strided-view", which, known(out, it, read), pattern)
            if it.shape[1] > 1:
                back = known(out, it, read)
                back = back.transpose(0, 2, 1, 3).reshape(back.shape)
                yield Guess(
                    "contiguous-offsets-on-strided-view", f"{which}, and the output written as [B,S,H,D]", back, pattern
                )
    for name in views:
        stored = it.stored[name]
        if stored.strides[3] != 1 and stored.shape[3] > 1:
            read = {name: stored.read((*stored.strides[:3], 1))}
            yield Guess(
                "inner-stride-ignored", name, known(it.out_if(**read), it, read), f"elements of a row of {name} taken side by side"
            )
    backward = [name for name in views if any(stride < 0 for stride in it.stored[name].strides)]
    for count in range(len(backward), 0, -1):
        for some in itertools.combinations(backward, count):
            for text, place in ((", from its lowest address", lowest), ("", lambda stored: stored.offset)):
                read = {}
                for name in some:
                    stored = it.stored[name]
                    read[name] = stored.read(tuple(abs(stride) for stride in stored.strides), place(stored))
                which = " and ".join(some)
                pattern = f"rows of {which} in the opposite order" if text else f"{which} read forward past its first element"
                yield Guess("negative-stride-read-forward", which + text, known(it.out_if(**read), it, read), pattern)


def lowest(stored):
    """The offset of the lowest element that negative strides reach."""
    return stored.offset + sum((size - 1) * min(0, stride) for size, stride in zip(stored.shape, stored.strides, strict=True))


def tails(it):
    """The last keys, rows and elements, which fill no whole tile."""
    kv_len, head_dim = it.shape[3], it.q.shape[3]
    for tile in TILES:
        cut = kv_len // tile * tile
        if 0 < cut < kv_len:
            mask = None if it.mask is None else np.broadcast_to(it.mask, it.shape)[..., :cut]
            out = (
                it.out_if(k=it.k[:, :, :cut], v=it.v[:, :, :cut], mask=mask)
                if it.options.get("causal") != "bottom_right"
                else it.want
            )
            yield Guess(
                "tail-dropped", f"keys {cut} and beyond (tile of {tile})", out, f"the last {kv_len - cut} keys weigh nothing"
            )
        pad = -kv_len % tile
        if pad and it.mask is None and "causal" not in it.options:
            more = [(0, 0), (0, 0), (0, pad), (0, 0)]
            yield Guess(
                "tail-padded",
                f"{pad} keys of zeros beyond the end (tile of {tile})",
                it.out_if(k=np.pad(it.k, more), v=np.pad(it.v, more)),
                "rows shrink: keys beyond the end take weight",
            )
        cut = head_dim // tile * tile
        if 0 < cut < head_dim:
            yield Guess(
                "head-dim-tail-dropped",
                f"elements {cut} and beyond of q and k (tile of {tile})",
                it.out_if(q=it.q[..., :cut], k=it.k[..., :cut], scale=it.scale),
                f"scores lack the last {head_dim - cut} products",
            )


def halves(it):
    """Two halves exchanged: neighbouring 16-bit elements, halves of head_dim, halves of the rows."""

    def swap(x, axis, how):
        if x.shape[axis] % 2:
            return None
        if how == "halves":
            return np.roll(x, x.shape[axis] // 2, axis)
        index = np.arange(x.shape[axis]) ^ 1
        return np.take(x, index, axis)

    for how, text in (("halves", "the two halves of head_dim"), ("pairs", "each pair of neighbouring elements")):
        out = swap(it.want, 3, how)
        if out is not None:
            yield Guess(
                "halves-swapped",
                f"{text} of the output",
                out,
                "odd elements stand at even places" if how == "pairs" else "element d stands at d ± head_dim_v/2",
            )
        for name in "qk":
            changed = swap(getattr(it, name), 3, how)
            if changed is not None:
                yield Guess(
                    "halves-swapped",
                    f"{text} of {name}",
                    it.out_if(**{name: changed}),
                    f"scores pair element d of {name} with another",
                )
    for name, x, text in (
        ("out", it.want, "the two halves of the rows of the output"),
        ("v", it.v, "the two halves of the rows of v"),
    ):
        changed = swap(x, 2, "halves")
        if changed is not None and x.shape[2] > 1:
            yield Guess("halves-swapped", text, changed if name == "out" else it.out_if(v=changed), "row i stands at i ± len/2")


def sixteen(it):
    """16-bit buffers under a 32-bit tag, and the other way round."""
    if it.dtype not in ("float16", "bfloat16"):
        return

    def wide(x, rows):
        """x's buffer as f32: by rows (half the elements) or through all of it (the second half lies outside)."""
        bits = encode(x, it.dtype)
        if rows:
            return bits.view(np.uint32).view(np.float32).astype(np.float64) if x.shape[3] % 2 == 0 else None
        flat = np.full(x.size, np.nan)
        flat[: x.size // 2] = bits.reshape(-1)[: x.size // 2 * 2].view(np.uint32).view(np.float32)
        return flat.reshape(x.shape)

    def narrow(out):
        """f32 results laid into the 16-bit output's buffer; even (low) halves are rounding noise, so not foretold."""
        bits = np.zeros(it.want.size, np.uint16)
        single = np.ascontiguousarray(out, np.float32).reshape(-1).view(np.uint16)
        count = min(bits.size, single.size)
        bits[:count] = single[:count]
        values = decode(bits, it.dtype)
        values[0:count:2] = np.nan
        values[count:] = np.nan
        return values.reshape(it.want.shape)

    odd = "odd elements nearly right, even ones the low halves of 32-bit numbers"
    with np.errstate(all="ignore"):
        yield Guess(
            "16-bit-read-as-32-bit",
            "32-bit results in a 16-bit output",
            narrow(it.want),
            "the first half holds every result, truncated, at odd places",
        )
        if it.v.shape[3] % 2 == 0:
            yield Guess("16-bit-read-as-32-bit", "v and the output as 32-bit rows", narrow(it.out_if(v=wide(it.v, True))), odd)
        if it.q.shape[3] % 2 == 0 and it.v.shape[3] % 2 == 0:
            rows = {name: wide(getattr(it, name), True) for name in "qkv"}
            for factor, text in ((it.scale, "scale of head_dim"), (it.scale * math.sqrt(2), "scale of head_dim/2")):
                out = it.out_if(**rows, scale=factor)
                yield Guess("16-bit-read-as-32-bit", f"q, k, v and the output as 32-bit rows, {text}", narrow(out), odd)
        for some in ("qkv", "kv", "q", "k", "v"):
            read = {name: wide(getattr(it, name), False) for name in some}
            out = known(it.out_if(**{name: np.nan_to_num(x, posinf=np.inf, neginf=-np.inf) for name, x in read.items()}), it, read)
            yield Guess(
                "16-bit-read-as-32-bit",
                f"{', '.join(some)} read at 32-bit offsets",
                out,
                "batches and heads of the first half are computed from odd elements, the rest from memory beyond",
            )
            wrapped = {}
            for name in some:
                bits = encode(getattr(it, name), it.dtype).reshape(-1)
                wrapped[name] = (
                    np.resize(bits, 2 * bits.size)
                    .view(np.uint32)
                    .view(np.float32)
                    .astype(np.float64)
                    .reshape(getattr(it, name).shape)
                )
            yield Guess(
                "16-bit-read-as-32-bit",
                f"{', '.join(some)} read as 32-bit, wrapped round",
                it.out_if(**wrapped),
                "each 32-bit number is an odd element with its even neighbour as noise",
            )
    other = "float16" if it.dtype == "bfloat16" else "bfloat16"
    for some in ("qkv", "v", "qk"):
        read = {name: decode(encode(getattr(it, name), it.dtype), other) for name in some}
        out = it.out_if(**read)
        yield Guess(
            "wrong-16-bit-tag",
            f"{', '.join(some)} read as {other}",
            decode(encode(out, other), it.dtype) if some == "qkv" else out,
            f"bits of {it.dtype} taken for {other}",
        )
        yield Guess(
            "wrong-16-bit-tag",
            f"{', '.join(some)} read as {other}, the result converted",
            out,
            f"bits of {it.dtype} taken for {other}",
        )


def casts(it):
    """Inputs narrowed on the way."""
    for narrower in {
        "float64": ("float32", "bfloat16", "float16"),
        "float32": ("bfloat16", "float16"),
        "float16": ("bfloat16",),
    }.get(it.dtype, ()):
        with np.errstate(all="ignore"):
            rounded = {name: round_to(getattr(it, name), narrower) for name in "qkv"}
            out = it.out_if(**rounded)
            yield Guess("hidden-cast", f"inputs as {narrower}", out, f"every element off by roundings of {narrower}")
            yield Guess(
                "hidden-cast", f"inputs and output as {narrower}", round_to(out, narrower), f"every element is a {narrower}"
            )
            yield Guess("hidden-cast", f"output as {narrower}", round_to(it.want, narrower), f"every element is a {narrower}")


def known(out, it, read):
    """The simulation, NaN where it rests on memory that was not seen."""
    out = np.array(out)
    group = it.shape[1] // it.k.shape[1]
    for name, x in read.items():
        unseen = np.isnan(x)
        if name == "q":
            out[unseen.any(-1)] = np.nan
        elif name == "k":
            out[np.repeat(unseen.any((2, 3)), group, 1)] = np.nan
        else:
            out[np.broadcast_to(np.repeat(unseen.any(2), group, 1)[:, :, None], out.shape)] = np.nan
    return out


def crossed(x):
    """The buffer of [.., len, dim] read as [.., dim, len] and turned round."""
    return x.reshape(*x.shape[:2], x.shape[3], x.shape[2]).swapaxes(2, 3)


def tagged(x):
    """The buffer of [B,H,S,D] read as [B,S,H,D] and turned round."""
    batch, heads, length, dim = x.shape
    return x.reshape(batch, length, heads, dim).transpose(0, 2, 1, 3)


ALL = (masks, causality, scale, normalisation, groups, strides, roles, halves, sixteen, tails, casts)
