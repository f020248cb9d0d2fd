"""The judges: one call or a few on a case, and a verdict with numbers.

A judge returns None (clean) or `Evidence`; it lets `Refused` and `NotOffered` pass. It runs in the child process, beside the
callee. Judges of values hold the callee against the reference; judges of behaviour hold it against itself (other strides, other
neighbours, again), so that they need no tolerance.
Deliberately absent: which probes to use (hazards.py), crashes and time (supervisor.py sees those).
"""

import math
import sys
import threading
import time

import numpy as np

from rapt._reference import FLOOR, LSE_LIMIT, errors, limits, scores

from . import diagnose, gpu, gradients
from .callee import NotOffered, Refused
from .case import expected, place, stand_in, values
from .evidence import GROSS, Evidence, close
from .meter import Meter
from .tensors import supports_pages

# Spacing of the accumulation dtype: large logits lose this much of a score.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-23, "bfloat16": 2.0**-23}
MAP_SIDE = 40
"""Most rows and columns of an error map."""

PROBE_S = 2.0
"""Seconds that a measured call may take: growth shows at the lengths that fit."""


class Room:
    """Where judges work: the callee, its kind of tensors and the device."""

    def __init__(self, callee, device, time_left=60.0):
        self.callee, self.kind, self.device, self.time_left = callee, callee.offer.kind, device, time_left

    def place(self, case, drawn=None):
        if self.kind == "torch" and any(arrangement == "negative" for _, arrangement in case.views):
            raise NotOffered("torch has no negative strides")
        try:
            return place(case, values(case) if drawn is None else drawn, self.kind, self.device)
        except ImportError as error:
            raise NotOffered(f"numpy has no {case.dtype} without ml_dtypes") from error

    def call(self, case, drawn=None):
        return self.callee(case, self.place(case, drawn))


def judge_values(room, case, strict=False, name=None, spare=0.0):
    """The output against the reference; not strict: only what is wrong, not what is inexact."""
    drawn = values(case)
    placed = room.place(case, drawn)
    answer = room.callee(case, placed)
    want, _ = expected(case, drawn)
    if answer.shape != want.shape:
        return Evidence(
            f"the output is {list(answer.shape)}, not {list(want.shape)}", "wrong-shape", {"shape": list(answer.shape)}
        )
    if answer.dtype != case.dtype:
        return Evidence(
            f"the output is {answer.dtype}, q is {case.dtype}", "output-dtype", {"dtype": answer.dtype}, severity="medium"
        )
    if not strict and close(answer.values, want, GROSS * FLOOR[case.dtype]):
        return None
    peers = [stand_in(case, drawn), *(torch_peers(case, placed) if strict else ())]
    limit, row_limit = (bound * (1 if strict else GROSS) + spare for bound in limits(case.dtype, peers, want))
    return against(case, drawn, placed, answer, want, limit, row_limit, name)


def against(case, drawn, placed, answer, want, limit, row_limit, name):
    """Evidence if `answer` lies farther from `want` than allowed."""
    got = answer.values
    stray = ~((np.isnan(got) & np.isnan(want)) | np.isfinite(got) & np.isfinite(want) | (got == want))
    error, worst, rows = errors(got, want)
    if not stray.any() and error <= limit and worst <= row_limit:
        return None
    numbers = {"relative_error": error, "limit": limit, "worst_row_error": worst, "row_limit": row_limit}
    bad_rows = (rows > row_limit) | stray.any(-1)
    numbers |= {"wrong_rows": int(bad_rows.sum()), "rows": bad_rows.size, "not_finite": int(stray.sum()), "elements": got.size}
    if stray.any():
        kinds = (
            "NaN"
            if np.isnan(got[stray]).all()
            else "not finite"
            if not np.isfinite(got[stray]).any()
            else "finite where the reference is not"
        )
        text = f"{int(stray.sum())} of {got.size} elements are {kinds}"
        where = np.argwhere(stray)[0]
    else:
        where = np.unravel_index(int(rows.argmax()), rows.shape) if rows.size else ()
        excess = error / limit if error > limit else worst / row_limit
        text = f"relative error {error:.2e} (limit {limit:.1e}, {excess:.3g}× over), worst row {worst:.2e} at {at(where)}"
    gross = stray.any() or error > GROSS * limit or worst > GROSS * row_limit
    diagnosis = explain(case, placed, answer, want)
    cause = diagnosis["name"] if diagnosis and diagnosis["name"] not in ("unknown", "correct") and diagnosis["confidence"] >= 0.3 else name
    if diagnosis and cause == diagnosis["name"]:
        text += f"; {diagnosis['variant']}" if not diagnosis["pattern"].startswith(diagnosis["variant"]) else ""
        text += f"; {diagnosis['pattern']}"
    elif diagnosis:
        text += f"; {diagnosis['pattern']}"
    # Less exact than the rule asks, but not wrong.
    severity = None if gross or not name == "accuracy" or cause != name else "medium"
    evidence = Evidence(
        text, cause, numbers, severity, diagnosis, error_map(got, want, where), {"limit": limit, "row_limit": row_limit}
    )
    return evidence


def at(where):
    names = ("batch", "head", "row", "column")
    return ", ".join(f"{name} {int(index)}" for name, index in zip(names, where, strict=False))


def explain(case, placed, answer, want):
    options = {"causal": case.causal, "scale": case.scale, **dict(case.options)}
    options |= {name: placed[name].tensor for name in ("mask", "sinks", "alibi_slopes") if name in placed}
    if not want.size:
        return None
    q, k, v = (placed[name].tensor for name in "qkv")
    try:
        return diagnose.diagnose(answer.tensor, want, q=q, k=k, v=v, **options).as_dict()
    except (TypeError, ValueError):
        return None


def error_map(got, want, where):
    """Rows × head_dim of the head in which `where` lies, thinned by taking the largest."""
    if got.ndim != 4 or not got.size or len(where) < 2:
        return None
    got, want = got[where[0], where[1]], want[where[0], where[1]]
    with np.errstate(all="ignore"):
        size = np.sqrt(np.mean(np.where(np.isfinite(want), want, 0) ** 2, axis=1, keepdims=True))
        off = np.abs(got - want) / np.where(size > 0, size, 1)
        off = np.where(np.isnan(got) & np.isnan(want), 0, np.where(np.isfinite(off), np.maximum(off, 1e-18), np.inf))
    for axis in (0, 1):
        step = -(-off.shape[axis] // MAP_SIDE)
        off = np.maximum.reduceat(off, np.arange(0, off.shape[axis], step), axis)
    return [[None if np.isinf(x) else round(float(np.log10(max(x, 1e-18))), 1) for x in row] for row in off]


def torch_peers(case, placed):
    """PyTorch's math and flash results on the same tensors, where torch is loaded and serves the case."""
    torch = sys.modules.get("torch")
    if torch is None or type(placed["q"].tensor).__module__ != "torch" or case.options:
        return
    q, k, v = (placed[name].tensor for name in "qkv")
    mask = placed["mask"].tensor if "mask" in placed else None
    options = {"attn_mask": mask, "is_causal": case.causal is not None, "scale": case.scale}
    on_cpu = q.device.type == "cpu"
    for name in ("_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention_for_cpu" if on_cpu else "flash"):
        options_of = options | ({"enable_gqa": case.heads != case.kv_heads} if not name.endswith("cpu") else {})
        try:
            with torch.no_grad():
                if name == "flash":
                    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
                        yield torch.nn.functional.scaled_dot_product_attention(q, k, v, **options_of).double().cpu().numpy()
                else:
                    yield getattr(torch.ops.aten, name)(q, k, v, **options_of)[0].double().cpu().numpy()
        except (RuntimeError, AttributeError, TypeError):
            continue


def judge_strict(room, case, name):
    return judge_values(room, case, strict=True, name=name)


def judge_tag(room, case, name):
    """Only what a wrong tag explains; the rest is accuracy's."""
    found = judge_values(room, case, name=name)
    tags = ("16-bit-read-as-32-bit", "wrong-16-bit-tag", "output-dtype")
    return found if found is not None and found.cause in tags else None


def judge_logits(room, case, name):
    drawn = values(case)
    top = float(np.abs(scores(drawn.q, drawn.k)).max())
    return judge_values(room, case, name=name, spare=GROSS * EPSILON[case.dtype] * top)


def judge_mixing(room, case, name):
    axis = 0 if name == "batch-mixing" else 1
    drawn = values(case)
    before = room.call(case, drawn).values
    other = values(case.but(seed=case.seed + 100))
    one = (slice(None),) * axis + (1,)
    changed = {}
    for tensor in "qkv":
        changed[tensor] = getattr(drawn, tensor).copy()
        changed[tensor][one] = getattr(other, tensor)[one]
    after = room.call(case, drawn._replace(**changed)).values
    rest = np.arange(before.shape[axis]) != 1
    a, b = before.compress(rest, axis), after.compress(rest, axis)
    with np.errstate(all="ignore"):
        off = np.linalg.norm(np.nan_to_num(b - a)) / max(np.linalg.norm(np.nan_to_num(a)), 1e-30)
    if off <= GROSS * FLOOR[case.dtype] * 4:
        return None
    thing = "batch" if axis == 0 else "head"
    others = int((np.nan_to_num(b - a) != 0).any(tuple(d for d in range(4) if d != axis)).sum())
    text = f"changing {thing} 1's inputs changes {others} other {thing}{'' if others == 1 else 's'} by {off:.2g} (relative L2)"
    return Evidence(text, name, {"relative_change": float(off), f"other_{thing}s_changed": others})


def judge_untouched(room, case, name):
    placed = room.place(case)
    room.callee(case, placed)
    changed = {tensor: each.changed() for tensor, each in placed.items()}
    if not any(changed.values()):
        return None
    listed = ", ".join(f"{count} bytes of {tensor}" for tensor, count in changed.items() if count)
    return Evidence(f"{listed} differ after the call", name, {f"changed_bytes_{n}": c for n, c in changed.items() if c})


def judge_bands(room, case, name):
    """The same call with zeros and with NaN round the tensors."""
    if case.around == "zero":
        found = judge_values(room, case, name=name)
        if found is None or not found.numbers.get("not_finite"):
            return None
        found.cause = name
        return found
    drawn = values(case)
    plain, banded = room.call(case.but(around="zero"), drawn), room.call(case, drawn)
    if plain.bits == banded.bits or plain.bits != room.call(case.but(around="zero"), drawn).bits:
        return None
    a, b = plain.values, banded.values
    lost = int((np.isfinite(a) & ~np.isfinite(b)).sum())
    if not lost and np.allclose(a, b, rtol=1e-2, atol=1e-3, equal_nan=True):
        return None
    differ = int(((a != b) & ~(np.isnan(a) & np.isnan(b))).sum())
    text = f"{differ} of {a.size} elements change when the bytes round the tensors turn from zeros to NaN; {lost} turn NaN"
    return Evidence(text, "over-read", {"changed": differ, "not_finite": lost, "elements": a.size})


def judge_pages(room, case, name):
    if room.device == "cpu":
        if not supports_pages():
            raise NotOffered("pages can be guarded under Linux and macOS only")
        room.call(case)
        return None
    if case.guard == "before":
        return None  # bands lie on both sides at once
    banded = case.but(guard=None, around="nan")
    if written := gpu.outside(room, banded):
        listed = ", ".join(f"{count} bytes round {where}" for where, count in written.items())
        return Evidence(f"{listed} were written", "over-write", {f"bytes_{name}": count for name, count in written.items()})
    return judge_bands(room, banded, name)


def judge_mismatch(room, case, name):
    drawn = values(case)
    try:
        placed = room.place(case, drawn)
        answer = room.callee(case, placed)
    except Refused:
        return None
    numbers = {"kv_len_of_k": case.kv_len, "kv_len_of_v": case.v_len, "not_finite": int((~np.isfinite(answer.values)).sum())}
    took = f"K of {case.kv_len} rows and V of {case.v_len} rows are taken without an error"
    if numbers["not_finite"]:
        text = f"{took}; the bytes behind K (NaN here) reach {numbers['not_finite']} of {answer.values.size} elements: K is read past its end"
        return Evidence(text, name, numbers, check={"read": True})
    short = drawn._replace(v=drawn.v[:, :, : case.kv_len])
    want, _ = expected(case, short)
    if answer.shape == want.shape and errors(answer.values, want)[0] < 1e-2:
        return Evidence(f"{took}; the last {case.v_len - case.kv_len} rows of V are ignored", name, numbers, severity="medium")
    return Evidence(f"{took}; the output is that of neither", name, numbers, severity="high")


def judge_leak(room, case, name):
    """Rows that do not attend the poisoned key must not show it."""
    drawn = values(case)
    got = room.call(case, drawn).values
    want, _ = expected(case, drawn)
    clean = np.isfinite(want)
    lost = clean & ~np.isfinite(got)
    tensor, row, what = case.poison
    how = "causal" if case.causal else f"a {case.mask} mask"
    if lost.any():
        text = f"{int(lost.sum())} of {int(clean.sum())} elements are not finite though no query of theirs attends key {row}, whose {tensor} is {what} ({how})"
        return Evidence(
            text, "masked-nonfinite-leaks", {"not_finite": int(lost.sum()), "elements": int(clean.sum()), "key": row}
        )
    other = room.call(case.but(poison=()), values(case.but(poison=()))).values
    error = errors(np.where(clean, got, 0), np.where(clean, other, 0))[0]
    if error > 10 * GROSS * FLOOR[case.dtype]:
        text = f"the output moves by {error:.2g} (relative L2) where key {row}, which no query attends, holds {what} ({how})"
        return Evidence(text, "masked-nonfinite-leaks", {"relative_change": error, "key": row})
    return None


def judge_swallow(room, case, name):
    drawn = values(case)
    got = room.call(case, drawn).values
    want, _ = expected(case, drawn)
    row = case.poison[1]
    swallowed, spread = int(np.isfinite(got[np.isnan(want)]).sum()), int(np.isnan(got[np.isfinite(want)]).sum())
    if not swallowed and not spread:
        return None
    numbers = {"finite_in_its_row": swallowed, "nan_in_other_rows": spread, "row": row}
    if spread:
        return Evidence(f"NaN in query {row} turns {spread} elements of other rows NaN", "nan-query-spreads", numbers)
    some = got[np.isnan(want) & np.isfinite(got)][:3]
    text = f"query {row} is NaN, yet {swallowed} of {int(np.isnan(want).sum())} elements of its rows are finite ({', '.join(f'{x:.3g}' for x in some)}, …)"
    return Evidence(text, "nan-query-swallowed", numbers)


def judge_lse(room, case, name):
    if not room.callee.offers("return_lse"):
        raise NotOffered("its signature has no return_lse")
    for seed in (1, 2):
        one = case.but(seed=seed)
        drawn = values(one)
        answer = room.callee(one, room.place(one, drawn), return_lse=True)
        if answer.lse is None:
            return Evidence("return_lse=True returns no lse", name, {})
        _, want = expected(one, drawn)
        if answer.lse.shape != want.shape:
            return Evidence(f"lse is {list(answer.lse.shape)}, not {list(want.shape)}", name, {})
        with np.errstate(all="ignore"):
            off = np.where(answer.lse == want, 0, np.abs(answer.lse - want) / (1 + np.abs(want)))
        off = np.where(np.isnan(off), np.inf, off)
        if off.max() > GROSS * LSE_LIMIT[case.dtype]:
            cause, text = (
                name,
                f"{int((off > GROSS * LSE_LIMIT[case.dtype]).sum())} of {off.size} lse are off, by up to {off.max():.3g}·(1+|lse|)",
            )
            if seed == 2:
                cause, text = "stale-lse", f"{text}, though the first call's were right: lse is left over from an earlier call"
            elif stale(one, drawn, answer.lse):
                cause, text = "stale-lse", f"{text}: the sum of exponentials is taken before the last block of keys"
            return Evidence(text, cause, {"worst": float(off.max()), "limit": LSE_LIMIT[case.dtype]}, check={"lse": True})
    return None


def stale(case, drawn, got):
    """Whether lse is that of fewer keys: as if it were not updated to the end."""
    for fewer in {*range(max(1, case.kv_len - 1), 0, -max(1, case.kv_len // 64))}:
        if drawn.mask is None:
            _, lse = expected(case, drawn._replace(k=drawn.k[:, :, :fewer], v=drawn.v[:, :, :fewer]))
            if np.allclose(lse, got, rtol=1e-3, atol=1e-3):
                return True
    return False


def judge_stale(room, case, name):
    short = case.but(q_len=max(1, case.q_len // 2 - 3), kv_len=case.kv_len // 2 + 1, seed=5)
    for one in (case, short, case.but(seed=6)):
        found = judge_values(room, one, name=name)
        if found is not None:
            found.text = f"lengths {one.q_len}, {one.kv_len}, after calls of other lengths: {found.text}"
            found.cause = name
            found.check["lengths"] = (one.q_len, one.kv_len)
            return found
    return None


def differing(a, b):
    """(elements, largest difference) of two answers whose bits differ."""
    x, y = a.values, b.values
    with np.errstate(all="ignore"):
        off = np.abs(x - y)
    return int((x != y).sum()), float(np.nanmax(off, initial=0.0))


def bits_evidence(name, a, b, text):
    count, most = differing(a, b)
    size = a.values.size
    return Evidence(
        f"{text}: {count} of {size} elements differ, by up to {most:.2g}",
        name,
        {"differing": count, "elements": size, "largest_difference": most},
    )


def judge_repeat(room, case, name):
    placed = room.place(case)
    first = room.callee(case, placed)
    for turn in range(5):
        again = room.callee(case, placed)
        if first.bits != again.bits:
            return bits_evidence(name, first, again, f"call {turn + 2} on the very same tensors gives other bits")
    return None


def judge_concurrent(room, case, name):
    cases = [case.but(seed=seed) for seed in (1, 2)]
    placed = [room.place(one) for one in cases]
    alone = [room.callee(one, tensors) for one, tensors in zip(cases, placed, strict=True)]
    wrong, refused = [], []

    def work(index):
        try:
            for _ in range(4):
                answer = room.callee(cases[index], placed[index])
                if answer.bits != alone[index].bits and not np.allclose(
                    answer.values, alone[index].values, rtol=1e-2, atol=1e-3
                ):
                    wrong.append((alone[index], answer))
        except Refused as error:
            refused.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        return bits_evidence(name, *wrong[0], "two threads that call at once get other results than one alone")
    if refused:
        raise refused[0]
    return None


def judge_stream(room, case, name):
    if counts := gpu.on_a_stream(room, case):
        text = f"{counts[0]} of {counts[1]} elements are others on a stream of the caller's, whose inputs that stream writes just before"
        return Evidence(text, name, {"differing": counts[0], "elements": counts[1]})
    return None


def judge_graph(room, case, name):
    if counts := gpu.replayed(room, case):
        text = f"{counts[0]} of {counts[1]} elements of a replayed graph are not those of a call on the same inputs"
        return Evidence(text, name, {"differing": counts[0], "elements": counts[1]})
    return None


def judge_wait(room, case, name):
    seconds = gpu.seconds_behind_work(room, case)
    if seconds <= gpu.WAITS_S:
        return None
    text = f"the call takes {1e3 * seconds:.0f} ms on the host while the device works off what came before"
    return Evidence(text, name, {"milliseconds": round(1e3 * seconds, 1)})


def judge_threads(room, case, name):
    torch = sys.modules.get("torch")
    if torch is None or room.device != "cpu" or room.kind != "torch":
        raise NotOffered("its number of threads cannot be set from here")
    placed, number, answers = room.place(case), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers.append(room.callee(case, placed))
    finally:
        torch.set_num_threads(number)
    for threads, answer in zip((2, 3), answers[1:], strict=True):
        if answer.bits != answers[0].bits:
            return bits_evidence(name, answers[0], answer, f"1 and {threads} threads give other bits")
    return None


def judge_neighbours(room, case, name):
    drawn = values(case)
    together = room.call(case, drawn)
    for b in (0, case.batch - 1):
        alone = room.call(case.but(batch=1), drawn._replace(**{n: getattr(drawn, n)[b : b + 1] for n in "qkv"}))
        if together.values[b : b + 1].tobytes() != alone.values.tobytes():
            alone.tensor, one = alone.values, type(alone)(together.values[b : b + 1])
            return bits_evidence(name, one, alone, f"batch {b} of {case.batch} computed alone gives other bits")
    return None


def judge_strides(room, case, name):
    drawn = values(case)
    plain, viewed = room.call(case.but(views=()), drawn), room.call(case, drawn)
    if plain.bits == viewed.bits:
        return None
    return bits_evidence(name, plain, viewed, f"the same values {case.views[0][1]} and contiguous give other bits")


def judge_memory(room, case, name):
    """Peak extra memory at a length and at half of it: fourfold growth is O(q_len · kv_len)."""
    meter = Meter(room)
    # The first call pays for what is kept from then on, such as the buffers of a matrix library: the second is timed.
    _, seconds = [meter.extra(case.but(q_len=512, kv_len=512)) for _ in range(2)][1]
    length = next((n for n in (4096, 2048, 1024) if seconds * (n / 512) ** 2 < PROBE_S), 512)
    half, _ = meter.extra(case.but(q_len=length // 2, kv_len=length // 2))
    whole, seconds = meter.extra(case.but(q_len=length, kv_len=length))
    if whole < max(1.5 * 2**20, 0.5 * length**2) or whole < 2.8 * half:
        return None
    mib = 2.0**-20
    numbers = {f"extra_mib_at_{length // 2}": round(half * mib, 1), f"extra_mib_at_{length}": round(whole * mib, 1)}
    numbers["bytes_per_score"] = round(whole / length**2, 2)
    text = f"{half * mib:.0f} MiB beside the output at length {length // 2}, {whole * mib:.0f} MiB at {length} ({whole / max(half, 1):.1f}×)"
    long = 16384
    if (
        case.mask
        and len(case.mask_dims) == 2
        and seconds * (long / length) ** 2 < min(PROBE_S, room.time_left / 4)
        # Half, since other processes take memory meanwhile.
        and 40 * long**2 < meter.free() / 2
    ):
        most, _ = meter.extra(case.but(q_len=long, kv_len=long))
        numbers[f"extra_mib_at_{long}"] = round(most * mib, 1)
        text += f", {most * mib:.0f} MiB measured at {long}"
    else:
        text += f"; {whole / length**2 * long**2 * mib:.0f} MiB at {long} by that growth"
    return Evidence(text, name, numbers, check={"length": length})


JUDGES = {
    "values": lambda room, case, name: judge_values(room, case, name=name),
    "strict": judge_strict,
    "tag": judge_tag,
    "logits": judge_logits,
    "mixing": judge_mixing,
    "untouched": judge_untouched,
    "bands": judge_bands,
    "pages": judge_pages,
    "mismatch": judge_mismatch,
    "leak": judge_leak,
    "swallow": judge_swallow,
    "lse": judge_lse,
    "stale": judge_stale,
    "repeat": judge_repeat,
    "concurrent": judge_concurrent,
    "stream": judge_stream,
    "graph": judge_graph,
    "wait": judge_wait,
    "threads": judge_threads,
    "neighbours": judge_neighbours,
    "strides": judge_strides,
    "memory": judge_memory,
    **gradients.JUDGES,
}
