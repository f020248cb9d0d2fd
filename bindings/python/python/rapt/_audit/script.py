"""Reproducers: a case as a program of at most 15 lines that needs torch or numpy and the callee, and nothing else.

The program draws its own numbers, computes what it expects by itself, and fails an assertion (or dies by a signal) where the
hazard is real. The shrinker runs it in the child to see whether a smaller case still fails; the supervisor runs it once more
in a fresh process. Deliberately absent: Rapt, unless it is the callee.
"""

import math

from . import gradient_script

LINES = 15

LAID = {
    "torch": {
        "permuted": "{x}.transpose(1, 2).contiguous().transpose(1, 2)",
        "fused": "torch.stack([{x}.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2)",
        "stepped": "{x}.repeat_interleave(2, 2)[:, :, ::2]",
        "inner": "{x}.repeat_interleave(2, 3)[..., ::2]",
        "transposed": "{x}.transpose(2, 3).contiguous().transpose(2, 3)",
        "expanded": "{x}[:1, :1].contiguous().expand({shape})",
        "offset": "torch.cat([{x}.flatten()[:1], {x}.flatten()])[1:].view({shape})",
        "cache": "torch.cat([{x}, {x}], 2)[:, :, :{length}]",
        "contiguous": "{x}.contiguous()",
    },
    "numpy": {
        "permuted": "{x}.swapaxes(1, 2).copy().swapaxes(1, 2)",
        "fused": "np.stack([{x}.swapaxes(1, 2)] * 3, 2)[:, :, 1].swapaxes(1, 2)",
        "stepped": "{x}.repeat(2, 2)[:, :, ::2]",
        "inner": "{x}.repeat(2, 3)[..., ::2]",
        "transposed": "{x}.swapaxes(2, 3).copy().swapaxes(2, 3)",
        "expanded": "np.broadcast_to({x}[:1, :1].copy(), ({shape}))",
        "negative": "{x}[:, :, ::-1].copy()[:, :, ::-1]",
        "offset": "np.append({x}.flat[:1], {x}.ravel())[1:].reshape({shape})",
        "cache": "np.concatenate([{x}, {x}], 2)[:, :, :{length}]",
        "contiguous": "{x}.copy()",
    },
}

# How numbers are drawn straight into an arrangement: the buffer's shape, and the view of it.
DRAWN = {
    "permuted": (lambda b, h, s, d: (b, s, h, d), {"torch": ".transpose(1, 2)", "numpy": ".swapaxes(1, 2)"}),
    "fused": (lambda b, h, s, d: (b, s, 3, h, d), {"torch": "[:, :, 1].transpose(1, 2)", "numpy": "[:, :, 1].swapaxes(1, 2)"}),
    "stepped": (lambda b, h, s, d: (b, h, 2 * s, d), {"torch": "[:, :, ::2]", "numpy": "[:, :, ::2]"}),
    "inner": (lambda b, h, s, d: (b, h, s, 2 * d), {"torch": "[..., ::2]", "numpy": "[..., ::2]"}),
    "transposed": (lambda b, h, s, d: (b, h, d, s), {"torch": ".transpose(2, 3)", "numpy": ".swapaxes(2, 3)"}),
    "negative": (lambda b, h, s, d: (b, h, s, d), {"numpy": "[:, :, ::-1]"}),
}


class Writer:
    """Lines in torch's or numpy's words."""

    def __init__(self, case, target, kind, style, device="cpu"):
        self.case, self.target, self.kind, self.style, self.device = case, target, kind, style, device
        self.torch = kind == "torch"
        self.lib = "torch" if self.torch else "np"
        self.dtype = (
            f"torch.{case.dtype}" if self.torch else "ml_dtypes.bfloat16" if case.dtype == "bfloat16" else f"np.{case.dtype}"
        )
        self.nan = f"{self.lib}.nan"

    def head(self, *modules):
        if not self.torch and self.case.dtype == "bfloat16":
            modules = (*modules, "ml_dtypes")
        lines = []
        if self.target.module is None:
            lines.append("# fn is the audited callable")
        elif self.target.folder is not None:
            modules = (*modules, "sys")
        lines += [f"import {', '.join(sorted(modules))}"] if modules else []
        if self.target.folder is not None and self.target.module is not None:
            lines[-1] += f"; sys.path.insert(0, {self.target.folder!r})"
        lines.append("import torch" if self.torch else "import numpy as np")
        if self.target.module is not None:
            top, _, attribute = self.target.name.rpartition(".")
            if top:
                lines.append(f"from {self.target.module} import {top.partition('.')[0]}; fn = {self.target.name}")
            else:
                lines.append(f"from {self.target.module} import {attribute} as fn")
        lines.append("torch.manual_seed(0)" if self.torch else "rng = np.random.default_rng(0)")
        if self.device != "cpu":
            lines[-1] += f"; torch.set_default_device({self.device!r})"
        return lines

    def shape(self, name):
        c = self.case
        return {
            "q": (c.batch, c.heads, c.q_len, c.head_dim),
            "k": (c.batch, c.kv_heads, c.kv_len, c.head_dim),
            "v": (c.batch, c.kv_heads, c.kv_len if c.v_len is None else c.v_len, c.head_dim_v),
        }[name]

    def randn(self, shape, factor=1.0):
        listed = ", ".join(map(str, shape))
        times = "" if factor == 1.0 else f" * {factor!r}"
        if self.torch:
            text = f"torch.randn({listed}, dtype={self.dtype})"
            return f"({text}{times})" if times else text
        text = f"rng.standard_normal(({listed}{',' if len(shape) == 1 else ''}))"
        return f"({text}{times}).astype({self.dtype})" if times else f"{text}.astype({self.dtype})"

    def laid(self, x, arrangement, shape):
        form = LAID[self.kind][arrangement]
        return form.format(x=x, shape=", ".join(map(str, shape)), length=shape[2] if len(shape) > 2 else 0)

    def tensor(self, name, plain=False):
        """`q = …` in the case's arrangement."""
        shape, arrangement = self.shape(name), "contiguous" if plain else self.case.arrangement(name)
        factor = self.case.size_of_v if name == "v" else self.case.logits
        if arrangement == "contiguous":
            return f"{name} = {self.randn(shape, factor)}"
        if arrangement in DRAWN and self.kind in DRAWN[arrangement][1]:
            buffer, view = DRAWN[arrangement]
            return f"{name} = {self.randn(buffer(*shape), factor)}{view[self.kind]}"
        if arrangement == "expanded":
            drawn, listed = self.randn((1, 1, *shape[2:]), factor), ", ".join(map(str, shape))
            return f"{name} = {drawn}.expand({listed})" if self.torch else f"{name} = np.broadcast_to({drawn}, ({listed}))"
        if arrangement == "offset":
            view = "view" if self.torch else "reshape"
            return f"{name} = {self.randn((math.prod(shape) + 1,), factor)}[1:].{view}({', '.join(map(str, shape))})"
        batch, heads, length, dim = shape
        whole = self.randn((batch, heads, 2 * length, dim), factor)
        return f"{name} = {whole}; {name}[:, :, {length}:] = {self.nan}; {name} = {name}[:, :, :{length}]"

    def tensors(self):
        return [self.tensor(name) for name in "qkv"]

    def mask(self):
        c = self.case
        if c.mask is None:
            return []
        sizes = {"b": c.batch, "h": c.heads, "q": c.q_len, "k": c.kv_len, "1": 1}
        shape = tuple(sizes[dim] for dim in c.mask_dims)
        listed = ", ".join(map(str, shape))
        name = "mask" if c.mask == "bool" else "keep"
        drawn = f"torch.rand({listed})" if self.torch else f"rng.random(({listed}))"
        lines = [f"{name} = ({drawn} < 0.6) | ({self.lib}.arange({c.kv_len}) == 0)"]
        if c.mask_dims.endswith("1"):
            # One element for all keys: True, or its rows would have none.
            lines = [f"{name} = torch.ones(({listed}), dtype=torch.bool)" if self.torch else f"{name} = np.ones(({listed}), bool)"]
        if c.masked_key is not None:
            lines[0] = (
                f"{name} = ({drawn} < 0.6) & ({self.lib}.arange({c.kv_len}) != {c.masked_key}) | ({self.lib}.arange({c.kv_len}) == 0)"
            )
        if c.masked_row is not None:
            lines.append(f"{name}[..., {c.masked_row}, :] = False")
        if c.mask != "bool":
            info = (
                f"torch.finfo({self.dtype}).min"
                if self.torch
                else f"float({self.dtype.partition('.')[0]}.finfo({self.dtype}).min)"
            )
            low = info if c.mask == "lowest" else f"-{self.lib}.inf"
            high = (
                ("torch.randn(keep.shape)" if self.torch else "rng.standard_normal(keep.shape)")
                if c.mask == "additive"
                else "0.0"
            )
            cast = f".to({self.dtype})" if self.torch else f".astype({self.dtype})"
            lines.append(f"mask = {self.lib}.where(keep, {high}, {low}){cast}")
        arrangement = c.arrangement("mask")
        if arrangement != "contiguous":
            lines.append(f"mask = {self.laid('mask', arrangement, shape)}")
        return lines

    def options(self):
        """The call's options as text, and the lines that make their tensors."""
        c, sdpa, given, lines = self.case, self.style == "sdpa", [], []
        if c.mask is not None:
            given.append("attn_mask=mask" if sdpa else "mask=mask")
        if c.causal is not None:
            given.append("is_causal=True" if sdpa else f"causal={c.causal!r}")
        if c.scale is not None:
            given.append(f"scale={c.scale!r}")
        if c.heads != c.kv_heads and sdpa:
            given.append("enable_gqa=True")
        for name, value in c.options:
            if name in ("sinks", "alibi_slopes"):
                drawn = f"torch.rand({c.heads})" if self.torch else f"rng.random({c.heads}).astype(np.float32)"
                lines.append(f"{name} = {drawn} * {value!r}")
                given.append(f"{name}={name}")
            else:
                given.append(f"{name}={value!r}")
        return "".join(f", {each}" for each in given), lines

    def call(self, name="out", q="q", k="k", v="v", extra=""):
        return f"{name} = fn({q}, {k}, {v}{self.options()[0]}{extra})"

    def wide(self, x):
        return f"{x}.double()" if self.torch else f"{x}.astype(float)"

    def expected(self, keep_lse=False):
        """Lines that compute `want` in f64."""
        c, group = self.case, self.case.heads // self.case.kv_heads
        repeat = "" if group == 1 else f".repeat_interleave({group}, 1)" if self.torch else f".repeat({group}, 1)"
        scale = c.head_dim**-0.5 if c.scale is None else c.scale
        turn = ".transpose(-2, -1)" if self.torch else ".swapaxes(-2, -1)"
        lines = (
            [f"s = {self.wide('q')} @ ({self.wide('k')}{repeat}){turn} * {scale!r}"]
            if repeat
            else [f"s = {self.wide('q')} @ {self.wide('k')}{turn} * {scale!r}"]
        )
        options, d = dict(c.options), c.kv_len - c.q_len if c.causal == "bottom_right" else 0
        if "softcap" in options:
            lines.append(f"s = {options['softcap']!r} * {self.lib}.tanh(s / {options['softcap']!r})")
        if "window" in options or "alibi_slopes" in options:
            lines.append(f"i, j = {self.lib}.arange({c.q_len})[:, None] + {d}, {self.lib}.arange({c.kv_len})")
        if "alibi_slopes" in options:
            lines.append("s = s - alibi_slopes[:, None, None] * abs(i - j)")
        hidden = []
        if "window" in options:
            left, right = options["window"]
            hidden += [f"(j < i - {left})"] if left is not None else []
            hidden += [f"(j > i + {right})"] if right is not None else []
        if c.causal is not None:
            ones = f"torch.ones({c.q_len}, {c.kv_len}).tril({d})" if self.torch else f"np.tri({c.q_len}, {c.kv_len}, {d})"
            hidden.append(f"({ones} == 0)")
        if c.mask == "bool":
            hidden.append("~mask")
        elif c.mask is not None:
            lines.append(f"s = s + {self.wide('mask')}")
        if hidden:
            where = " | ".join(hidden)
            lines.append(f"s = s.masked_fill({where}, -torch.inf)" if self.torch else f"s = np.where({where}, -np.inf, s)")
        if "sinks" in options:
            sink = "sinks[:, None, None]"
            lines.append(
                f"p = s.exp() / (s.exp().sum(-1, keepdim=True) + {sink}.double().exp())"
                if self.torch
                else f"p = np.exp(s) / (np.exp(s).sum(-1, keepdims=True) + np.exp({sink}))"
            )
        elif self.torch:
            lines.append("p = s.softmax(-1)" + (".nan_to_num(0.0)" if c.masked_row is not None else ""))
        else:
            ending = "; p = np.nan_to_num(p)" if c.masked_row is not None else ""
            lines.append(f"p = np.exp(s - s.max(-1, keepdims=True)); p /= p.sum(-1, keepdims=True){ending}")
        lines.append(f"want = p @ {self.wide('v')}{repeat}")
        return lines

    def finite(self, x):
        return f"{x}.isfinite()" if self.torch else f"np.isfinite({x}.astype(float))"

    def same(self, a, b):
        return f"torch.equal({a}, {b})" if self.torch else f"{a}.tobytes() == {b}.tobytes()"

    def count(self, x):
        return f"{{int(({x}).sum())}} of {{out.{'numel()' if self.torch else 'size'}}}"


def write(hazard, judge, case, target, offer, check, device="cpu"):
    """The program's text, or None where this judge has none."""
    w = Writer(case, target, offer.kind, offer.style, device)
    lines = CHECKS[judge](w, hazard, check or {})
    return None if lines is None else "\n".join(fit(lines)) + "\n"


def fit(lines):
    """At most 15 lines: imports and drawing share lines where there are more."""
    lines = list(lines)
    simple = (
        "import ",
        "from ",
        "torch.manual_seed",
        "rng = ",
        "q = ",
        "k = ",
        "v = ",
        "keep",
        "mask",
        "s = ",
        "p = ",
        "sinks",
        "alibi",
        "leaves = ",
        "out = ",
        "got = ",
        "want = ",
        "right = ",
        "i, j = ",
    )
    while len(lines) > LINES:
        pairs = [i for i in range(len(lines) - 1) if lines[i].startswith(simple) and lines[i + 1].startswith(simple)]
        if not pairs:
            break
        i = min(pairs, key=lambda at: len(lines[at]) + len(lines[at + 1]))
        lines[i : i + 2] = [f"{lines[i]}; {lines[i + 1]}"]
    return lines


def start(w, *modules):
    return [*w.head(*modules), *w.tensors(), *w.mask(), *w.options()[1]]


def by_values(w, hazard, check):
    limit = max(check.get("limit", 1e-3), 1e-14)
    text = f'assert error <= {limit:.2g}, f"relative error {{error:.2g}}"'
    norm = "(out.double() - want).norm() / want.norm()" if w.torch else "np.linalg.norm(out - want) / np.linalg.norm(want)"
    if w.case.masked_row is not None or w.case.kv_len * w.case.q_len * w.case.batch == 0:
        where = "" if w.case.masked_row is None else f"[..., {w.case.masked_row}, :]"
        off = f"(out.double() - want){where}.abs()" if w.torch else f"np.abs(out - want){where}"
        text = f'assert ({off} < 1e-2).all(), f"{{out{where}}} for {{want{where}}}"'
        expected = w.expected()
        if w.case.kv_len == 0:
            expected = [
                "want = 0 * q.double().sum(-1, keepdim=True) + torch.zeros(v.shape[-1])"
                if w.torch
                else "want = 0 * q.sum(-1, keepdims=True) + np.zeros(v.shape[-1])"
            ]
        return [*start(w), w.call(), *expected, f"assert out.shape == want.shape, out.shape\n{text}".replace("\n", "; ")]
    lines = [*start(w), w.call(), *w.expected()]
    shape = "assert out.shape == want.shape and out.dtype == q.dtype, (out.shape, out.dtype)"
    return [*lines, shape, f"error = {norm}" if w.torch else f"error = {norm.replace('out', 'out.astype(float)')}", text]


def mixing(w, hazard, check):
    count = w.case.batch if hazard == "batch-mixing" else w.case.heads
    others = [index for index in range(count) if index != 1]
    if not others or count < 2:
        return None
    one, rest = ("[1]", f"[{others}]") if hazard == "batch-mixing" else ("[:, 1]", f"[:, {others}]")
    again = "torch.randn_like({t}{one})" if w.torch else "rng.standard_normal({t}{one}.shape)"
    change = "; ".join(f"{t}{one} = {again.format(t=t, one=one)}" for t in "qkv")
    off = f"(out{rest} - before{rest}).abs().max()" if w.torch else f"np.abs(out{rest} - before{rest}).max()"
    before = w.call("before")
    return [*start(w), before + (".clone()" if w.torch else ".copy()"), f"{change}  # {hazard[:-7]} 1 gets other inputs", w.call(),
            f'assert {off} < 1e-3, "another {hazard[:-7]} changed with {hazard[:-7]} 1"']  # fmt: skip


def untouched(w, hazard, check):
    names = [*"qkv", *(["mask"] if w.case.mask else [])]
    copy = "clone()" if w.torch else "copy()"
    listed = ", ".join(names)
    return [*start(w), f"before = [x.{copy} for x in ({listed})]", w.call(),
            f"for x, was in zip(({listed}), before):",
            f"    assert {w.same('x', 'was')}, \"the callee wrote to an input\""]  # fmt: skip


def in_nan(w):
    """A function that draws a tensor with NaN on both sides."""
    if w.torch:
        return ["def within_nan(*shape):", f"    flat = torch.full((math.prod(shape) + 512,), torch.nan, dtype={w.dtype})",
                "    flat[256:-256] = torch.randn(math.prod(shape))", "    return flat[256:-256].view(shape)"]  # fmt: skip
    return ["def within_nan(*shape):", f"    flat = np.full(math.prod(shape) + 512, np.nan, {w.dtype})",
            "    flat[256:-256] = rng.standard_normal(math.prod(shape))", "    return flat[256:-256].reshape(shape)"]  # fmt: skip


def bands(w, hazard, check):
    if hazard == "padding":
        return [*start(w), w.call(), f'assert {w.finite("out")}.all(), "NaN from the unused part of the cache"']
    drawn = [f"{name} = within_nan({', '.join(map(str, w.shape(name)))})" for name in "qkv"]
    return [*w.head("math"), *in_nan(w), *drawn, w.call(), f'assert {w.finite("out")}.all(), "NaN from outside the tensors"']


def pages(w, hazard, check):
    c, item = w.case, {"float64": 8, "float32": 4}.get(w.case.dtype, 2)
    if w.device != "cpu":
        return bands(w, "over-read", check)
    if c.mask is not None or c.views:
        return None
    most = max(math.prod(w.shape(name)) * item for name in "qkv")
    room = f"{most} // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE"
    begin = "mmap.PAGESIZE" if c.guard == "before" else f"mmap.PAGESIZE + room - math.prod(shape) * {item}"
    get = "torch.frombuffer" if w.torch else "np.frombuffer"
    view = "view" if w.torch else "reshape"
    lines = [*w.head("ctypes", "math", "mmap"), "def at_page_end(*shape):" if c.guard != "before" else "def at_page_start(*shape):",
             f"    room = {room}; memory = mmap.mmap(-1, room + 2 * mmap.PAGESIZE)",
             "    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))",
             "    for guard in (base, base + mmap.PAGESIZE + room):",
             "        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0, 'mprotect'",
             f"    return {get}(memory, dtype={w.dtype}, count=math.prod(shape), offset={begin}).{view}(shape)"]  # fmt: skip
    maker = "at_page_end" if c.guard != "before" else "at_page_start"
    lines = [line for line in lines if "manual_seed" not in line and "default_rng" not in line]
    return [
        *lines,
        *(f"{name} = {maker}({', '.join(map(str, w.shape(name)))})" for name in "qkv"),
        f"fn(q, k, v{w.options()[0]})  # dies where it touches the page",
    ]


def mismatch(w, hazard, check):
    drawn = [
        f"q = {w.randn(w.shape('q'))}",
        f"k = within_nan({', '.join(map(str, w.shape('k')))})",
        f"v = {w.randn(w.shape('v'))}",
    ]
    c = w.case
    if check.get("read"):
        return [*w.head("math"), *in_nan(w), *drawn, "try:", f"    {w.call()}", "except Exception: raise SystemExit  # it is refused",
                f"assert {w.finite('out')}.all(), \"NaN from behind K, whose {c.kv_len} rows are fewer than V's {c.v_len}\""]  # fmt: skip
    return [*w.head("math"), *in_nan(w), *drawn, "try:", f"    {w.call()}", "except Exception: raise SystemExit  # it is refused",
            f"raise AssertionError(f\"K of {c.kv_len} rows beside V of {c.v_len} is accepted: {{out.reshape(-1)[:3]}}\")"]  # fmt: skip


def leak(w, hazard, check):
    tensor, row, what = w.case.poison
    rows = f"out[:, :, :{row}]" if w.case.causal else "out"
    return [*start(w), f"{tensor}[:, :, {row}] = {w.lib}.{what}  # no query {'before it ' if w.case.causal else ''}attends this key", w.call(),
            f"bad = ~{w.finite(rows)}",
            "assert not bad.any(), f\"{int(bad.sum())} elements are not finite\""]  # fmt: skip


def swallow(w, hazard, check):
    row = w.case.poison[1]
    isnan = f"out[:, :, {row}].isnan().all()" if w.torch else f"np.isnan(out[:, :, {row}].astype(float)).all()"
    lines = [
        *start(w),
        f"q[:, :, {row}] = {w.nan}",
        w.call(),
        f'assert {isnan}, f"query {row} is NaN, its output is {{out[0, 0, {row}]}}"',
    ]
    if w.case.q_len > 1:
        other = 0 if row else 1
        lines.append(f'assert {w.finite(f"out[:, :, {other}]")}.all(), "NaN in query {row} reached row {other}"')
    return lines


def lse(w, hazard, check):
    total = "want_lse = s.logsumexp(-1)" if w.torch else "want_lse = np.log(np.exp(s).sum(-1))"
    expected = [line for line in w.expected() if not line.startswith(("p =", "want ="))]
    off = "(lse.double() - want_lse).abs().max()" if w.torch else "np.abs(lse - want_lse).max()"
    again = "; ".join(w.tensor(name) for name in "qkv")
    first = w.call("out, lse", extra=", return_lse=True")
    return [
        *start(w),
        first,
        again,
        first,
        *expected,
        total,
        f'assert {off} < 1e-2, f"lse is {{lse.reshape(-1)[:2]}}, not {{want_lse.reshape(-1)[:2]}}"',
    ]


def stale(w, hazard, check):
    q_len, kv_len = check.get("lengths", (w.case.q_len, w.case.kv_len))
    later = Writer(
        w.case.but(q_len=min(q_len, w.case.q_len), kv_len=min(kv_len, w.case.kv_len)), w.target, w.kind, w.style, w.device
    )
    norm = "(out.double() - want).norm() / want.norm()" if w.torch else "np.linalg.norm(out - want) / np.linalg.norm(want)"
    return [*w.head(), "; ".join(w.tensors()), f"fn(q, k, v{w.options()[0]})  # and now others", *later.tensors(), later.call(), *later.expected(),
            f"error = {norm}", 'assert error < 1e-2, f"relative error {error:.2g} in the second call"']  # fmt: skip


def repeat(w, hazard, check):
    return [
        *start(w),
        w.call(),
        "for _ in range(20):",
        f"    {w.call('again')}",
        f"    assert {w.same('again', 'out')}, abs(again - out).max()",
    ]


def concurrent(w, hazard, check):
    close = "torch.allclose(got, out, 1e-2, 1e-3)" if w.torch else "np.allclose(got, out, 1e-2, 1e-3)"
    options = w.options()[0]
    return [*w.head("concurrent.futures"), *w.tensors(), w.call(),
            "with concurrent.futures.ThreadPoolExecutor(2) as pool:",
            f"    jobs = [pool.submit(fn, q * (1 + i % 2), k, v{options}) for i in range(60)]",
            "for got in [job.result() for job in jobs[::2]]:",
            f"    assert {close}, abs(got - out).max()"]  # fmt: skip


def stream(w, hazard, check):
    return [*start(w), w.call("want"), "late = [torch.full_like(x, torch.nan) for x in (q, k, v)]; torch.cuda.synchronize()",
            "with torch.cuda.stream(torch.cuda.Stream()):", "    torch.cuda._sleep(100_000_000)  # the inputs come late, in this stream",
            "    for x, value in zip(late, (q, k, v)):", "        x.copy_(value)",
            f"    out = fn(*late{w.options()[0]}).clone(); torch.cuda.current_stream().synchronize()",
            'assert torch.allclose(out, want, 1e-2, 1e-3), abs(out - want).max()']  # fmt: skip


def graph(w, hazard, check):
    options = w.options()[0]
    return [*start(w), w.call("want"), "late = [torch.randn_like(x) for x in (q, k, v)]; graph = torch.cuda.CUDAGraph()",
            f"fn(*late{options}); torch.cuda.synchronize()", "with torch.cuda.graph(graph):", f"    out = fn(*late{options})",
            "for x, value in zip(late, (q, k, v)):", "    x.copy_(value)", "graph.replay()",
            'assert torch.allclose(out, want, 1e-2, 1e-3), abs(out - want).max()']  # fmt: skip


def wait(w, hazard, check):
    return [*w.head("time"), *w.tensors(), w.call(), "torch.cuda.synchronize(); torch.cuda._sleep(100_000_000)  # about 50 ms",
            "start = time.perf_counter()", w.call(), "took = time.perf_counter() - start",
            'assert took < 0.02, f"the call takes {1e3 * took:.0f} ms behind earlier work"']  # fmt: skip


def threads(w, hazard, check):
    return [*start(w), "torch.set_num_threads(1)", w.call(), "for number in (2, 3):", "    torch.set_num_threads(number)", f"    {w.call('again')}",
            f"    assert {w.same('again', 'out')}, f\"{{number}} threads: {{abs(again - out).max()}}\""]  # fmt: skip


def neighbours(w, hazard, check):
    last = w.case.batch - 1
    copies = ", ".join(f"{t}[{last}:].{'clone' if w.torch else 'copy'}()" for t in "qkv")
    alone = f"alone = fn({copies}{w.options()[0]})"
    return [*start(w), w.call(), alone, f"assert {w.same('alone', f'out[{last}:]')}, abs(alone - out[{last}:]).max()"]


def strides(w, hazard, check):
    if not w.case.views:
        return None
    arrangement = w.case.views[0][1]
    lines = [*w.head(), *(w.tensor(name, plain=True) for name in "qkv"), w.call("plain")]
    lines += [f"{name} = {w.laid(name, arrangement, w.shape(name))}" for name in "qkv"]
    return [*lines, w.call(), f"assert {w.same('out', 'plain')}, abs(out - plain).max()"]


def memory(w, hazard, check):
    c, n = w.case, check.get("length", 4096)
    form = {"torch": "torch.zeros({shape})", "numpy": "np.zeros(({shape}), np.float32)"}[w.kind]
    inner = "[..., ::2]" if c.views else ""
    q = form.format(shape=f"1, 1, n, {c.head_dim * (2 if c.views else 1)}") + inner
    v = form.format(shape=f"1, 1, n, {c.head_dim_v * (2 if c.views else 1)}") + inner
    mask = ""
    if c.mask:
        lead = "1, " if len(c.mask_dims) == 3 else ""
        mask = f"; mask = {'torch' if w.torch else 'np'}.ones(({lead}n, n), dtype={'torch.bool' if w.torch else 'bool'})"
    lines = [line for line in w.head("re") if "manual_seed" not in line and "default_rng" not in line]
    if w.device != "cpu":
        lines = [line for line in w.head() if "manual_seed" not in line]
        return [*lines, f"torch.set_default_device({w.device!r})", "def extra_mib(n):", f"    q, v = {q}, {v}{mask}",
                "    torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()",
                f"    fn(q, q, v{w.options()[0]})", "    return torch.cuda.max_memory_allocated() - before >> 20",
                f"extra_mib(128); most = extra_mib({n})",
                f'assert most < {max(1, n * n // 2 // 2**20)}, f"{{most}} MiB of extra memory for {n} queries and keys"']  # fmt: skip
    return [*lines, 'peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024',
            "def extra_mib(n):",
            f"    q, v = {q}, {v}{mask}",
            '    open("/proc/self/clear_refs", "w").write("5"); before = peak()',
            f"    fn(q, q, v{w.options()[0]})",
            "    return peak() - before",
            f"extra_mib(128); most = extra_mib({n})",
            f'assert most < {max(1, n * n // 2 // 2**20)}, f"{{most}} MiB of extra memory for {n} queries and keys"']  # fmt: skip


CHECKS = {
    "values": by_values, "strict": by_values, "tag": by_values, "logits": by_values, "mixing": mixing, "untouched": untouched, "bands": bands,
    "pages": pages, "mismatch": mismatch, "leak": leak, "swallow": swallow, "lse": lse, "stale": stale, "repeat": repeat,
    "concurrent": concurrent, "stream": stream, "graph": graph, "wait": wait, "threads": threads, "neighbours": neighbours, "strides": strides, "memory": memory,
    **gradient_script.CHECKS,
}  # fmt: skip
