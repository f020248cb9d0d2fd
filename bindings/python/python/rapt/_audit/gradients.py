"""Judges of gradients and of dropout: a call whose inputs require grad, its backward, and what a definition of both says.

    got    autograd's gradients of the callee's output by q, k, v (and an additive mask), for a `d_o` that lies as the case says
    want   `rapt._reference.gradients` in f64

What is dropped is read off the output: where v is the identity, element (i, j) of out is the weight of key j in row i, 0 where it is dropped.
Deliberately absent: callees of numpy arrays, which have no autograd (`not offered`), and outputs that require no grad.
"""

import functools
import sys

import numpy as np

from rapt import _reference
from rapt._reference import FLOOR, errors, limits

from .callee import NotOffered, Refused
from .case import draw_d_o, values
from .evidence import GROSS, Evidence, close
from .tensors import Placed, bits_of, to_f64

DROPPED_CALLS = 12
"""Calls whose dropped part is counted: with q_len = 256 and 8 heads 1.6 million weights, so that a p of 8 bits shows."""

SIGMAS = 6.0
"""How far the dropped part may be from p, in standard deviations: one sound run in 500 million is."""


@functools.cache
def _sender():
    """A scalar of an output whose backward is given `d_o`, this very tensor. `torch.autograd.grad(out, leaves, d_o)` would first import sympy: seconds."""
    torch = sys.modules["torch"]

    class Sender(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, d_o):
            ctx.d_o = d_o
            return out.new_zeros(())

        @staticmethod
        def backward(ctx, _one):
            return ctx.d_o, None

    return Sender


class Pass:
    """One forward of the callee on tensors that require grad, and what its backward gave."""

    def __init__(self, room, case, drawn=None):
        if room.kind != "torch":
            raise NotOffered("numpy arrays have no gradients")
        self.room, self.case = room, case
        self.drawn = values(case) if drawn is None else drawn
        self.placed = room.place(case, self.drawn)
        self.names = [*"qkv", *(["mask"] if self.drawn.mask is not None and self.drawn.mask.dtype != np.bool_ else [])]
        self.leaves = [self.placed[name].tensor.requires_grad_() for name in self.names]
        self.out = room.callee.differentiated(case, self.placed)
        self.d_o = None

    def backward(self, d_o=None):
        """{name: gradient in f64}, of `d_o` as the case draws it or as it is given."""
        torch = sys.modules["torch"]
        where = {"around": self.case.around, "kind": "torch", "device": self.room.device}
        numbers = draw_d_o(self.case) if d_o is None else d_o
        self.d_o = Placed(numbers, self.case.dtype, arrangement=self.case.arrangement("d_o"), **where)
        try:
            with torch.enable_grad():
                sent = _sender().apply(self.out, self.d_o.tensor)
            made = torch.autograd.grad(sent, self.leaves, retain_graph=True, allow_unused=True)
        except Exception as error:
            raise Refused(error) from error
        self.made = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(self.leaves, made)]
        return {name: to_f64(each) for name, each in zip(self.names, self.made)}

    def want(self, d_o=None):
        """The same by the definition."""
        q, k, v, mask, options = self.drawn
        d_o = draw_d_o(self.case) if d_o is None else d_o
        made = _reference.gradients(d_o, q, k, v, mask=mask, causal=self.case.causal, scale=self.case.scale, **options)
        return dict(zip([*"qkv", "mask"], made))

    def peers(self, d_o=None):
        """{name: [gradients]} of sound kernels of this dtype: PyTorch's math path, and a flash kernel's roundings."""
        torch, (q, k, v, mask, options), case = sys.modules["torch"], self.drawn, self.case
        numbers = draw_d_o(case) if d_o is None else d_o
        narrow = lambda x: _reference.round_to(x, case.dtype)  # noqa: E731
        roundings = {"rounded": narrow, "weights": narrow if case.dtype in ("float16", "bfloat16") else None}
        rounded = _reference.gradients(numbers, q, k, v, mask=mask, causal=case.causal, scale=case.scale, **roundings, **options)
        found = {name: [_reference.round_to(each, case.dtype)] for name, each in zip([*"qkv", "mask"], rounded) if each is not None}
        if case.causal not in (None, "top_left") or options:
            return found
        given = {"attn_mask": self.placed["mask"].tensor if "mask" in self.placed else None, "is_causal": case.causal is not None}
        given |= {"scale": case.scale} | ({"enable_gqa": True} if case.heads != case.kv_heads else {})
        try:
            with torch.enable_grad():
                out = torch.ops.aten._scaled_dot_product_attention_math(*self.leaves[:3], **given)[0]
                made = torch.autograd.grad(_sender().apply(out, self.d_o.tensor), self.leaves, allow_unused=True)
        except (RuntimeError, AttributeError, TypeError):  # an older torch
            return found
        for name, each in zip(self.names, made):
            found[name] += [] if each is None else [to_f64(each)]
        return found


def judge_gradients(room, case, name):
    """Each gradient against the definition; roundings alone are no finding."""
    once = Pass(room, case)
    return compared(once, once.backward(), once.want(), name)


def compared(once, got, want, name):
    """Evidence if a gradient is farther from the definition than rounding explains."""
    case, peers = once.case, None
    for tensor, each in got.items():
        if each.shape != want[tensor].shape:
            return Evidence(f"d{tensor} is {list(each.shape)}, {tensor} is {list(want[tensor].shape)}", name, {"shape": list(each.shape)})
        if close(each, want[tensor], GROSS * FLOOR[case.dtype]):
            continue
        peers = once.peers() if peers is None else peers
        limit, row_limit = (GROSS * bound for bound in limits(case.dtype, peers[tensor], want[tensor]))
        lost = int((~np.isfinite(each)).sum())
        error, worst, _ = errors(each, want[tensor])
        if lost or error > limit or worst > row_limit:
            of = f"{lost} of {each.size} elements are not finite" if lost else f"relative error {error:.2e} (limit {limit:.1e}), worst row {worst:.2e}"
            numbers = {"relative_error": error, "limit": limit, "worst_row_error": worst, "row_limit": row_limit, "not_finite": lost}
            return Evidence(f"d{tensor}: {of}", name, numbers, check={"limit": limit, "tensor": tensor})
    return None


def judge_masked_gradients(room, case, name):
    """Keys that no query attends get exactly nothing."""
    once = Pass(room, case)
    got = once.backward()
    keys = [case.masked_key] if case.masked_key is not None else list(range(case.q_len, case.kv_len))
    count = {tensor: int((got[tensor][:, :, keys] != 0).sum()) for tensor in "kv"}
    if any(count.values()):
        listed = " and ".join(f"{number} elements of d{tensor}" for tensor, number in count.items() if number)
        text = f"{listed} are not 0 in rows {keys[0]} to {keys[-1]}, which no query attends"
        return Evidence(text, name, {f"nonzero_d{tensor}": number for tensor, number in count.items()}, check={"keys": keys})
    return None


def judge_gradient_leak(room, case, name):
    """Garbage where nothing is attended, and in a row that attends nothing, reaches no gradient."""
    once = Pass(room, case)
    got, want = once.backward(), once.want()
    lost = {tensor: int((np.isfinite(want[tensor]) & ~np.isfinite(each)).sum()) for tensor, each in got.items()}
    tensor, row, what = case.poison or ("mask", case.masked_row, "False in every key")
    if any(lost.values()):
        listed = ", ".join(f"{count} of {got[of].size} elements of d{of}" for of, count in lost.items() if count)
        return Evidence(f"{listed} are not finite where row {row} of {tensor} is {what}", name, {f"not_finite_d{of}": n for of, n in lost.items()})
    if case.masked_row is not None and (stray := int((got["q"][:, :, case.masked_row] != 0).sum())):
        return Evidence(f"{stray} elements of dq are not 0 in row {case.masked_row}, which attends no key", name, {"nonzero_dq": stray})
    return compared(once, got, want, name)


def judge_backward_untouched(room, case, name):
    """A backward writes to nothing that it was given, and gives the same of a `d_o` whose elements share memory."""
    once = Pass(room, case)
    before = bits_of(once.out).tobytes()
    got = once.backward()
    changed = {tensor: each.changed() for tensor, each in {**once.placed, "d_o": once.d_o}.items()}
    changed["out"] = 0 if bits_of(once.out).tobytes() == before else once.out.numel()
    if any(changed.values()):
        listed = ", ".join(f"{count} bytes of {tensor}" for tensor, count in changed.items() if count)
        return Evidence(f"{listed} differ after the backward", name, {f"changed_bytes_{n}": c for n, c in changed.items() if c}, check={"changed": True})
    return compared(once, got, once.want(), name)


def judge_gradient_repeat(room, case, name):
    """The same backward again, and the same call again, give the same bits."""
    once = Pass(room, case)
    first = once.backward()
    for turn in range(4):
        again = once if turn < 2 else Pass(room, case)
        other = again.backward()
        for tensor, each in first.items():
            differ = int(((each != other[tensor]) & ~(np.isnan(each) & np.isnan(other[tensor]))).sum())
            if differ:
                most = float(np.nanmax(np.abs(each - other[tensor])))
                text = f"backward {turn + 2} of the same tensors gives other bits: {differ} of {each.size} elements of d{tensor}, by up to {most:.2g}"
                return Evidence(text, name, {"differing": differ, "elements": each.size, "largest_difference": most})
    return None


# --- dropout -----------------------------------------------------------------------------------------------------------------


def shown(room, case, with_grad=False):
    """(the callee's pass or answer, weights of each key in f64) of a call whose v is the identity."""
    if room.kind != "torch":
        raise NotOffered("dropout is drawn from torch's generator")
    drawn = values(case)
    drawn = drawn._replace(v=np.broadcast_to(np.eye(case.kv_len), drawn.v.shape).copy())
    if with_grad:
        once = Pass(room, case, drawn)
        return once, to_f64(once.out)
    return None, room.call(case, drawn).values


def seeded(number):
    sys.modules["torch"].manual_seed(number)


def judge_dropped_part(room, case, name):
    """The part of weights that is dropped is p, the others are divided by 1 - p, and no head or row drops what another does."""
    seeded(case.seed)
    p, dropped, size = case.dropout, 0, 0
    for _ in range(DROPPED_CALLS if p < 1 else 1):
        weights = shown(room, case)[1]
        if not np.isfinite(weights).all():
            return Evidence(f"{int((~np.isfinite(weights)).sum())} elements are not finite with dropout_p = {p}", name, {}, check={"finite": True})
        dropped, size = dropped + int((weights == 0).sum()), size + weights.size
    part, allowed = dropped / size, SIGMAS * (p * (1 - p) / size) ** 0.5
    numbers = {"dropped": part, "p": p, "limit": allowed, "weights": size}
    if abs(part - p) > allowed:
        return Evidence(f"{part:.5f} of {size} weights are dropped, p is {p} (within {allowed:.1e})", name, numbers)
    if p == 1:
        return None
    # Equal scores: each weight is 1 / kv_len.
    factor = float(weights[weights != 0].mean()) * case.kv_len
    if abs(factor * (1 - p) - 1) > GROSS * FLOOR[case.dtype]:
        return Evidence(f"weights that are kept are multiplied by {factor:.4f}, not by 1 / (1 - p) = {1 / (1 - p):.4f}", name, {"factor": factor}, check={"factor": True})
    heads = (weights == 0).reshape(-1, case.q_len * case.kv_len)
    if len(np.unique(heads, axis=0)) < len(heads) or len(np.unique(heads.reshape(-1, case.kv_len), axis=0)) < 0.99 * heads.size / case.kv_len:
        return Evidence("heads, batch entries or rows drop the same keys", name, {"masks": len(heads)}, check={"alike": True})
    return None


def judge_dropout_seed(room, case, name):
    """One seed gives one mask, and a call takes new numbers of the generator."""
    masks = []
    for again in (False, True):
        seeded(7)
        masks += [shown(room, case)[1] == 0 for _ in range(1 if again else 2)]
    first, second, repeated = masks
    if (first == second).all():
        return Evidence("two calls without a seed between drop the same weights", name, {"weights": first.size}, check={"calls": True})
    if (first != repeated).any():
        count = int((first != repeated).sum())
        return Evidence(f"torch.manual_seed(7) before each, yet {count} of {first.size} weights are dropped in one of two calls only", name, {"differing": count})
    return None


def judge_dropout_reuse(room, case, name):
    """The backward drops what the forward dropped."""
    seeded(case.seed)
    once, weights = shown(room, case, with_grad=True)
    d_o, (q, k, v, _, _) = draw_d_o(case), once.drawn
    got = once.backward(d_o)
    # out = m·p, v = 1: dp = m·d_o, delta = rowsum(d_o · out).
    kept = np.where(weights == 0, 0, 1 / (1 - case.dropout))
    s = _reference.scores(q, k, scale=case.scale)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ds = p * (kept * d_o - (d_o * kept * p).sum(-1, keepdims=True)) * (case.head_dim**-0.5 if case.scale is None else case.scale)
    want = {"q": ds @ k, "k": ds.swapaxes(2, 3) @ q, "v": (kept * p).swapaxes(2, 3) @ d_o}
    for tensor, each in want.items():
        error = errors(got[tensor], each)[0]
        if not np.isfinite(got[tensor]).all() or error > 4 * GROSS * FLOOR[case.dtype]:
            text = f"d{tensor} is not the gradient of what the forward computed: relative error {error:.2g} against the weights that it dropped"
            return Evidence(text, name, {"relative_error": error}, check={"tensor": tensor})
    return None


JUDGES = {
    "gradients": judge_gradients,
    "masked-gradients": judge_masked_gradients,
    "gradient-leak": judge_gradient_leak,
    "backward-untouched": judge_backward_untouched,
    "gradient-repeat": judge_gradient_repeat,
    "dropped-part": judge_dropped_part,
    "dropout-seed": judge_dropout_seed,
    "dropout-reuse": judge_dropout_reuse,
}
