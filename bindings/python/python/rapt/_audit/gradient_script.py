"""Programs that show a hazard of gradients or of dropout. Torch alone has them; each differentiates the formula itself, or holds the callee against itself."""

DTYPES = {"float64": 1e-6, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Relative error from which on a gradient is wrong."""


def begin(w, poison=True):
    """Inputs, with what the case lays behind its mask, and those that require grad."""
    case, tensors = w.case, w.tensors()
    lines = [*w.head(), *tensors, *w.mask(), *w.options()[1]]
    if poison and case.poison and case.poison[0] in "kv":
        lines.append(f"{case.poison[0]}[:, :, {case.poison[1]}] = torch.nan  # no query attends this key")
    names = ", ".join(leaves(w))
    return [*lines, f"leaves = [x.requires_grad_() for x in ({names})]"]


def leaves(w):
    return [*"qkv", *(["mask"] if w.case.mask not in (None, "bool") else [])]


def gradients(w, hazard, check):
    if w.case.masked_row is not None:
        return None
    norm = "(x.double() - y.double()).norm() / y.double().norm()"
    return [
        *begin(w), f"{w.call()}; d_o = torch.randn_like(out)", "got = torch.autograd.grad(out, leaves, d_o)", *w.expected(),
        "right = torch.autograd.grad(want, leaves, d_o.double())",
        f"for name, x, y in zip({leaves(w)}, got, right):",
        f"    assert {norm} < {DTYPES[w.case.dtype]:g}, f\"d{{name}}: relative error {{{norm}:.2g}}\"",
    ]  # fmt: skip


def masked(w, hazard, check):
    case = w.case
    keys = f"{case.masked_key}" if case.masked_key is not None else f"{case.q_len}:"
    if case.masked_key is None and case.kv_len <= case.q_len:
        return None
    return [
        *begin(w), f"{w.call()}; d_o = torch.randn_like(out)", "dq, dk, dv, *_ = torch.autograd.grad(out, leaves, d_o)",
        f"stray = int((dk[:, :, {keys}] != 0).sum() + (dv[:, :, {keys}] != 0).sum())",
        'assert not stray, f"{stray} gradients of keys that no query attends"',
    ]  # fmt: skip


def leak(w, hazard, check):
    case, row = w.case, w.case.masked_row
    d_o = "d_o = torch.randn_like(out)" + (f"; d_o[:, :, {case.poison[1]}] = torch.nan" if case.poison and case.poison[0] == "d_o" else "")
    lines = [*begin(w), f"{w.call()}; {d_o}", "made = torch.autograd.grad(out, leaves, d_o)",
             "bad = [int((~x.isfinite()).sum()) for x in made]",
             f'assert not any(bad), f"not finite of d{"".join(leaves(w)[:3])}: {{bad}}"']  # fmt: skip
    if row is not None:
        lines.append(f"assert not made[0][:, :, {row}].any(), made[0][0, 0, {row}]")
    return lines


def untouched(w, hazard, check):
    case, arrangement = w.case, w.case.arrangement("d_o")
    shape = (case.batch, case.heads, case.q_len, case.head_dim_v)
    listed = ", ".join(map(str, shape))
    length, dim = shape[2:]
    drawn = {
        "one": f"torch.randn(1, dtype={w.dtype}).expand({listed})",
        "expanded": f"{w.randn((1, 1, *shape[2:]))}.expand({listed})",
        "overlapping": f"{w.randn((case.batch * case.heads * (length + dim),))}.as_strided(({listed}), ({case.heads * (length + dim)}, {length + dim}, 1, 1))",
    }.get(arrangement, w.randn(shape))
    return [
        *begin(w), f"{w.call()}; d_o = {drawn}", "before = d_o.clone(); was = [x.detach().clone() for x in (*leaves, out)]",
        "got = torch.autograd.grad(out, leaves, d_o, retain_graph=True)",
        'assert torch.equal(d_o, before) and all(map(torch.equal, was, (*leaves, out))), "the backward writes to what it was given"',
        f"for x, y in zip(got, torch.autograd.grad({w.call()[6:]}, leaves, before)):",
        f'    assert (x.double() - y.double()).norm() <= {DTYPES[case.dtype]:g} * y.double().norm(), "other gradients of the same numbers"',
    ]  # fmt: skip


def strides(w, hazard, check):
    case, arrangement = w.case, w.case.arrangement("d_o")
    if arrangement == "contiguous":
        return gradients(w, hazard, check)
    shape = (case.batch, case.heads, case.q_len, case.head_dim_v)
    return [
        *begin(w), f"{w.call()}; d_o = {w.randn(shape)}", "right = torch.autograd.grad(out, leaves, d_o, retain_graph=True)",
        f"got = torch.autograd.grad(out, leaves, {w.laid('d_o', arrangement, shape)})",
        "for x, y in zip(got, right):",
        f'    assert (x.double() - y.double()).norm() <= {DTYPES[case.dtype]:g} * y.double().norm(), "other gradients of the same numbers"',
    ]  # fmt: skip


def repeat(w, hazard, check):
    return [
        *begin(w), f"{w.call()}; d_o = torch.randn_like(out)", "first = torch.autograd.grad(out, leaves, d_o, retain_graph=True)", "for _ in range(20):",
        "    for x, y in zip(torch.autograd.grad(out, leaves, d_o, retain_graph=True), first):",
        "        assert torch.equal(x, y), abs(x - y).max()",
    ]  # fmt: skip


def _ones(w):
    """A call whose output shows the weights."""
    case = w.case
    eye = f"v = torch.eye({case.kv_len}, dtype={w.dtype}).expand({case.batch}, {case.kv_heads}, -1, -1)"
    return [*w.head(), *(w.tensor(name) for name in "qk"), eye]


def dropped_part(w, hazard, check):
    case, p = w.case, w.case.dropout
    lines = [*_ones(w), f"out = torch.stack([fn(q, k, v{w.options()[0]}, dropout_p={p!r}) for _ in range(12)])"]
    if check.get("finite") or p == 1:
        return [*lines, 'assert out.isfinite().all() and ((out == 0).all() or dropout_p < 1), "weights that are not finite, or are left"'.replace("dropout_p", repr(p))]
    if check.get("factor"):
        return [*lines, f"factor = float(out[out != 0].double().mean()) * {case.kv_len}", f'assert abs(factor * {1 - p!r} - 1) < 0.02, f"what is kept is multiplied by {{factor}}"']
    if check.get("alike"):
        return [*lines, f"dropped = (out[0] == 0).reshape(-1, {case.q_len * case.kv_len})",
                'assert len(dropped.unique(dim=0)) == len(dropped), "heads or batch entries drop the same weights"',
                f'assert len(dropped.reshape(-1, {case.kv_len}).unique(dim=0)) > 0.99 * dropped.numel() / {case.kv_len}, "rows drop the same keys"']  # fmt: skip
    return [*lines, "dropped = float((out == 0).double().mean())", f'assert abs(dropped - {p!r}) < {6 * (p * (1 - p)) ** 0.5!r} / out.numel() ** 0.5, f"{{dropped:.5f}} are dropped"']


def dropout_seed(w, hazard, check):
    call = f"fn(q, k, v{w.options()[0]}, dropout_p={w.case.dropout!r}) == 0"
    lines = [*_ones(w), f"torch.manual_seed(7); first, second = {call}, {call}", f"torch.manual_seed(7); again = {call}"]
    return [*lines, 'assert torch.equal(first, again), "one seed drops different weights"', 'assert not torch.equal(first, second), "two calls drop the same weights"']


def dropout_reuse(w, hazard, check):
    scale = w.case.head_dim**-0.5 if w.case.scale is None else w.case.scale
    return [
        *_ones(w), "leaves = [x.clone().requires_grad_() for x in (q, k, v)]",
        f"out = fn(*leaves{w.options()[0]}, dropout_p={w.case.dropout!r}); d_o = torch.randn_like(out)",
        "got = torch.autograd.grad(out, leaves, d_o)",
        f"kept = (out != 0).double() / {1 - w.case.dropout!r}",
        f"p = (leaves[0].double() @ leaves[1].double().mT * {scale!r}).softmax(-1)",
        "right = torch.autograd.grad((p * kept) @ leaves[2].double(), leaves, d_o.double())",
        "for name, x, y in zip('qkv', got, right):",
        f"    assert (x.double() - y.double()).norm() <= {DTYPES[w.case.dtype]:g} * y.double().norm(), f\"d{{name}} is not of the weights that forward dropped\"",
    ]  # fmt: skip


CHECKS = {
    "gradients": strides, "masked-gradients": masked, "gradient-leak": leak, "backward-untouched": untouched, "gradient-repeat": repeat,
    "dropped-part": dropped_part, "dropout-seed": dropout_seed, "dropout-reuse": dropout_reuse,
}  # fmt: skip

UNSHRUNK = frozenset(["dropped-part", "dropout-seed"])
"""Judges of statistics, which fewer weights would not show."""
