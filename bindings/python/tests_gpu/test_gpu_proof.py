"""The boundary on the GPU: every placement of the CPU's stride zoo as input and as output, misaligned bases, what lies round the tensors,
masks of every shape, rows and lengths without keys, poison, streams, graphs and plans that take turns.

Bits are compared with those of contiguous copies, values with the reference (gpu_reference). torch has no negative strides: those come from cupy.
"""

import itertools
import math
import threading

import pytest
import torch
from gpu_reference import Case, judge

import rapt

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BF16_F32 = [torch.bfloat16, torch.float32]
# Rows per head of the two routes: split keys (decode), and tiles of queries.
Q_LENS = [3, 70]


def bits(t):
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(kind)


def same(a, b):
    return torch.equal(bits(a), bits(b))


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


# crates/rapt-testkit/src/zoo.rs, but for negative strides: (strides of [b, h, s, d], elements of slack before and after).
INJECTIVE = {
    "contiguous": lambda b, h, s, d: (h * s * d, s * d, d, 1),
    "permuted from [b, s, h, d]": lambda b, h, s, d: (s * h * d, d, h * d, 1),
    "permuted from [s, b, h, d]": lambda b, h, s, d: (h * d, d, b * h * d, 1),
    "len and dim transposed": lambda b, h, s, d: (h * s * d, s * d, 1, s),
    "permute(0, 3, 2, 1)": lambda b, h, s, d: (d * s * h, 1, h, s * h),
    "batch innermost": lambda b, h, s, d: (1, b, b * h, b * h * s),
    "rows sliced from wider rows": lambda b, h, s, d: (h * s * (d + 3), s * (d + 3), d + 3, 1),
    "rows sliced, 16 bytes apart": lambda b, h, s, d: (h * s * (d + 8), s * (d + 8), d + 8, 1),
    "len narrowed": lambda b, h, s, d: (h * (s + 5) * d, (s + 5) * d, d, 1),
    "heads narrowed": lambda b, h, s, d: ((h + 1) * s * d, s * d, d, 1),
    "step 2 in dim": lambda b, h, s, d: (2 * h * s * d, 2 * s * d, 2 * d, 2),
    "step 2 in len": lambda b, h, s, d: (2 * h * s * d, 2 * s * d, 2 * d, 1),
    "packed qkv [b, s, 3, h, d]": lambda b, h, s, d: (3 * s * h * d, d, 3 * h * d, 1),
    "interleaved qkv [b, s, h, 3, d]": lambda b, h, s, d: (3 * s * h * d, 3 * d, 3 * h * d, 1),
}
SHARED = {
    "batch expanded": lambda b, h, s, d: (0, s * d, d, 1),
    "heads expanded": lambda b, h, s, d: (s * d, 0, d, 1),
    "len expanded": lambda b, h, s, d: (h * d, d, 0, 1),
    "dim expanded": lambda b, h, s, d: (h * s, s, 1, 0),
    "all expanded": lambda b, h, s, d: (0, 0, 0, 0),
    "sliding windows (unfold)": lambda b, h, s, d: (h * (s + d), s + d, 1, 1),
}


def around(shape, strides, before, after):
    """(a storage of flags, True where `shape` under `strides` reaches; where it starts)."""
    last = sum((n - 1) * stride for n, stride in zip(shape, strides))
    flags = torch.zeros(before + last + 1 + after, dtype=torch.bool, device="cuda")
    flags.as_strided(shape, strides, before).fill_(True)
    return flags, before


def placed(shape, strides, dtype, seed, before=37, after=41):
    """A random tensor under these strides; everything else of its storage is NaN (True in a mask: attended if it were read)."""
    flags, start = around(shape, strides, before, after)
    storage = torch.randn(len(flags), generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    if dtype == torch.bool:
        storage = (storage > -0.6) | ~flags
    else:
        storage = torch.where(flags, storage, math.nan).to(dtype)
    return storage.as_strided(shape, strides, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("name", [*INJECTIVE, *SHARED])
def test_every_view_equals_its_contiguous_copy_between_nan(dtype, q_len, name):
    strides = (INJECTIVE | SHARED)[name]
    shapes = {"q": (2, 4, q_len, 40), "k": (2, 2, 67, 40), "v": (2, 2, 67, 40)}
    view = {n: placed(shape, strides(*shape), dtype, seed) for seed, (n, shape) in enumerate(shapes.items())}
    copy = {n: x.clone(memory_format=torch.contiguous_format) for n, x in view.items()}
    want = rapt.attention(**copy, causal="bottom_right")
    assert bool(want.isfinite().all())
    judge(want, None, *copy.values(), causal="bottom_right")
    for names in ("qkv", "q", "k", "v"):
        got = rapt.attention(**{n: (view if n in names else copy)[n] for n in "qkv"}, causal="bottom_right")
        assert same(got, want), (name, names)


@pytest.mark.parametrize("dtype", BF16_F32)
# The last three: rows of one head fill a block, and TMA writes what it can.
@pytest.mark.parametrize(("q_len", "kv_heads", "dim"), [*((n, 2, 40) for n in Q_LENS), (200, 4, 40), (200, 4, 72), (333, 4, 128)])
@pytest.mark.parametrize("name", INJECTIVE)
def test_an_output_of_any_strides_is_written_and_nothing_beside_it(dtype, q_len, kv_heads, dim, name):
    q, k, v = (normal(2, heads, n, dim, dtype=dtype, seed=i) for i, (heads, n) in enumerate(((4, q_len), (kv_heads, 67), (kv_heads, 67))))
    want = rapt.attention(q, k, v)
    judge(want, None, q, k, v)
    strides = INJECTIVE[name](*want.shape)
    flags, start = around(want.shape, strides, 64, 64)
    storage = torch.full((len(flags),), 7.0, dtype=dtype, device="cuda")
    into = storage.as_strided(want.shape, strides, start)
    rapt.attention(q, k, v, out=into)
    assert same(into, want)
    assert bool((storage[~flags] == 7.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", Q_LENS)
def test_a_base_at_any_element(dtype, q_len):
    shapes = ((1, 2, q_len, 64), (1, 2, 130, 64), (1, 2, 130, 64))
    plain = [normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    want = rapt.attention(*plain)
    for front in range(1, 9):
        for which in range(3):
            tensors = list(plain)
            storage = torch.full((front + plain[which].numel() + 1,), math.nan, dtype=dtype, device="cuda")
            tensors[which] = storage[front:-1].view(shapes[which]).copy_(plain[which])
            assert same(rapt.attention(*tensors), want), (front, which)


# Every reader of masks; that a mask's width is no matter of strides is left to bfloat16.
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, "bool"), (torch.bfloat16, "bfloat16"), (torch.float32, "bool"), (torch.float32, "float32")],
    ids=str,
)
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("name", [*INJECTIVE, *SHARED])
def test_a_mask_is_read_through_any_strides(dtype, kind, q_len, name):
    shapes = ((2, 4, q_len, 64), (2, 2, 67, 64), (2, 2, 67, 64))
    q, k, v = (normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    shape = (2, 4, q_len, 67)
    mask = placed(shape, (INJECTIVE | SHARED)[name](*shape), getattr(torch, kind), 9)
    copy = mask.clone(memory_format=torch.contiguous_format)
    want, lse = rapt.attention(q, k, v, mask=copy, return_lse=True)
    judge(want, lse, q, k, v, mask=copy)
    assert same(rapt.attention(q, k, v, mask=mask), want)


@pytest.mark.parametrize("kind", ["bool", "bfloat16"])
@pytest.mark.parametrize("q_len", Q_LENS)
def test_a_mask_of_any_broadcast_shape(kind, q_len):
    q, k, v = normal(2, 4, q_len, 64), normal(2, 2, 67, 64, seed=1), normal(2, 2, 67, 64, seed=2)
    full = (2, 4, q_len, 67)
    for keep in itertools.product((False, True), repeat=4):
        shape = [n if kept else 1 for n, kept in zip(full, keep)]
        mask = placed(shape, torch.empty(shape).stride(), getattr(torch, kind), 3, 5, 5)
        want = rapt.attention(q, k, v, mask=mask.expand(full).contiguous())
        assert same(rapt.attention(q, k, v, mask=mask), want), shape
        if not keep[0]:
            assert same(rapt.attention(q, k, v, mask=mask[0]), want), shape[1:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("hide", ["bool", "-inf", "causal", "window"])
def test_poison_that_no_row_attends_reaches_nothing(dtype, q_len, hide):
    kv_len = q_len + 60
    q, k, v = (normal(1, 2, n, 64, dtype=dtype, seed=seed) for seed, n in enumerate((q_len, kv_len, kv_len)))
    hidden = torch.arange(kv_len, device="cuda") >= q_len  # what causal (top left) leaves to nobody
    if hide == "window":
        hidden = torch.arange(kv_len, device="cuda") >= q_len + 5
    options = {
        "bool": {"mask": ~hidden},
        "-inf": {"mask": torch.where(hidden, -math.inf, 0.25).to(torch.float32 if dtype == torch.float64 else dtype)},
        "causal": {"causal": "top_left"},
        "window": {"window": (None, 5)},
    }[hide]
    if "mask" in options:
        options["mask"] = options["mask"][None, None, None, :]
    clean, clean_lse = rapt.attention(q, k, v, return_lse=True, **options)
    for value in (math.nan, math.inf, -math.inf):
        for tensors in ((k,), (v,), (k, v)):
            bad = {id(x): torch.where(hidden[:, None], torch.tensor(value, dtype=dtype, device="cuda"), x) for x in tensors}
            out, lse = rapt.attention(q, bad.get(id(k), k), bad.get(id(v), v), return_lse=True, **options)
            assert same(out, clean) and same(lse, clean_lse), (value, len(tensors))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [3, 70])
def test_poison_reaches_the_rows_that_attend_it_and_no_other(dtype, q_len):
    q, k, v = (normal(2, 4, n, 64, dtype=dtype, seed=seed) for seed, n in enumerate((q_len, 90, 90)))
    clean = rapt.attention(q, k, v, causal="bottom_right")
    key = 90 - q_len + 1  # row 1 and those after it attend this key
    for bad in (k, v):
        poisoned = bad.clone()
        poisoned[1, 2, key, 5] = math.nan
        out = rapt.attention(q, poisoned if bad is k else k, poisoned if bad is v else v, causal="bottom_right")
        touched = torch.zeros_like(out, dtype=torch.bool)
        touched[1, 2, 1:, slice(None) if bad is k else slice(5, 6)] = True
        assert bool(out[touched].isnan().all()) and same(torch.where(touched, 0, out), torch.where(touched, 0, clean))
    nan_row = q.clone()
    nan_row[0, 1, 1] = math.nan
    out = rapt.attention(nan_row, k, v, causal="bottom_right")
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[0, 1, 1] = True
    assert bool(out[touched].isnan().all()) and same(torch.where(touched, 0, out), torch.where(touched, 0, clean))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["bool", "-inf", "bottom right", "window"])
def test_rows_without_a_key_among_rows_with_some(dtype, how):
    q, k, v = (normal(2, 4, n, 32, dtype=dtype, seed=seed) for seed, n in enumerate((50, 30, 30)))
    rows = torch.zeros(50, dtype=torch.bool, device="cuda")
    rows[::7] = True
    options = {
        "bool": {"mask": (~rows)[None, None, :, None]},
        "-inf": {"mask": torch.where(rows, -math.inf, 0.0)[None, None, :, None].to(dtype)},
        "bottom right": {"causal": "bottom_right"},
        "window": {"window": (2, 2), "causal": "top_left"},
    }[how]
    if how == "bottom right":
        rows = torch.arange(50, device="cuda") < 20
    if how == "window":
        rows = torch.arange(50, device="cuda") > 31  # with top left, keys from i - 2; the last key is 29
    q[:, :, rows] = math.nan
    out, lse = rapt.attention(q, k, v, sinks=torch.ones(4, device="cuda"), return_lse=True, **options)
    assert bool((out[:, :, rows] == 0).all()) and bool((lse[:, :, rows] == -math.inf).all())
    assert bool(out[:, :, ~rows].isfinite().all()) and bool(lse[:, :, ~rows].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (2, 2, 0, 0), (0, 2, 0, 0)])
def test_lengths_of_zero(dtype, sizes):
    batch, heads, q_len, kv_len = sizes
    q, k = torch.ones(batch, heads, q_len, 8, dtype=dtype, device="cuda"), torch.ones(batch, heads, kv_len, 8, dtype=dtype, device="cuda")
    out, lse = rapt.attention(q, k, k, causal="bottom_right", return_lse=True)
    assert out.shape == q.shape and out.dtype == dtype and lse.shape == q.shape[:3]
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [6, 300])
def test_rows_far_from_zero_leave_the_bits_of_others_alone(dtype, q_len):
    q, k, v = (normal(1, 2, n, 64, dtype=dtype, seed=seed) for seed, n in enumerate((q_len, 500, 500)))
    k, far = k * 256, q.clone()
    far[:, :, ::2] *= 8192  # scores beyond 2^22
    want, lse = rapt.attention(q, k, v, return_lse=True)
    got, far_lse = rapt.attention(far, k, v, return_lse=True)
    assert same(got[:, :, 1::2], want[:, :, 1::2]) and same(far_lse[:, :, 1::2], lse[:, :, 1::2])
    assert bool(got.isfinite().all()) and bool(far_lse.isfinite().all())
    if dtype != torch.float64:  # the reference itself rounds scores of this size as float64 does
        judge(want, lse, q, k, v)


@pytest.mark.parametrize("dtype", DTYPES[:3])  # the reference itself rounds scores of this size as float64 does
@pytest.mark.parametrize("q_len", [6, 300])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (100, 20)}])
@pytest.mark.parametrize("by", [1.5, 6, 60, 2000, "ramp"])
def test_scores_that_rise_and_fall_from_tile_to_tile(dtype, q_len, options, by):
    """Of rows side by side, some: sums so far are rescaled, or are too small or too great beside what comes."""
    q, k, v = (normal(1, 2, n, 64, dtype=dtype, seed=seed) for seed, n in enumerate((q_len, 700, 700)))
    if by == "ramp":
        k *= torch.linspace(0.1, 40, 700, device="cuda")[:, None].to(dtype)
    else:
        k[:, :, 130:400] *= by
    q[:, :, 1::2] *= 1e-2
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    judge(out, lse, q, k, v, **options)
    if not options:
        for rows in (slice(0, None, 2), slice(1, None, 2)):  # of unlike size: each by itself
            judge(out[:, :, rows], lse[:, :, rows], q[:, :, rows], k, v)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (150, 40)}, {"mask": None}])
@pytest.mark.parametrize("lengths", [(77, 77), (200, 333), (513, 700)])
def test_rows_of_a_launch_too_small_for_the_device_have_the_bits_of_a_large_one(head_dim, options, lengths):
    """The fewer rows there are, the fewer a block takes."""
    q_len, kv_len = lengths
    q, k, v = (normal(1, 4, n, head_dim, dtype=torch.bfloat16, seed=seed) for seed, n in enumerate((q_len, kv_len, kv_len)))
    if "mask" in options:
        options = {"mask": torch.rand(1, 1, q_len, kv_len, device="cuda") > 0.3}
    v[0, 1, 60] = math.nan
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    judge(out, lse, q, k, v, **options)
    for heads in (1, 2):
        few, few_lse = rapt.attention(q[:, :heads], k[:, :heads], v[:, :heads], return_lse=True, **options)
        assert same(few, out[:, :heads]) and same(few_lse, lse[:, :heads])
    many = [x.repeat(50, 4, 1, 1) for x in (q, k, v)]
    got, got_lse = rapt.attention(*many, return_lse=True, **options)
    assert same(got, out.repeat(50, 4, 1, 1)) and same(got_lse, lse.repeat(50, 4, 1))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("options", [{}, {"causal": "top_left"}, {"window": (150, 40)}])
@pytest.mark.parametrize("kind", ["plain", "poison", "by element", "packed"])
def test_blocks_that_work_off_many_items(dtype, options, kind):
    """More runs of rows than multiprocessors, the last of them short: each row as if its head were alone."""
    batch, heads, kv_heads, q_len = (12, 64, 8, 40) if kind == "packed" else (3, 64, 64, 300)
    q = normal(batch, heads, q_len, 64, dtype=dtype, seed=1)
    k, v = (normal(batch, kv_heads, 300, 64, dtype=dtype, seed=seed) for seed in (2, 3))
    if kind == "poison":
        v[0, ::5, 290] = math.nan
        v[1, ::7, 3, ::2] = math.inf
    if kind == "by element":
        k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v))
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    group = heads // kv_heads
    for b in range(batch):
        for kv_head in range(b % 3, kv_heads, 3):
            of = slice(kv_head * group, (kv_head + 1) * group)
            alone, alone_lse = rapt.attention(
                q[b : b + 1, of], k[b : b + 1, kv_head : kv_head + 1], v[b : b + 1, kv_head : kv_head + 1], return_lse=True, **options
            )
            assert same(out[b, of], alone[0]) and same(lse[b, of], alone_lse[0]), (b, kv_head)
    if kind != "poison":
        judge(out, lse, q, k, v, **options)


@pytest.mark.parametrize("dtype", BF16_F32)
@pytest.mark.parametrize("q_len", [1, 5, 70])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_grouped_heads(dtype, q_len, kv_heads):
    case = Case(seed=kv_heads, dtype=dtype, q=(2, 8, q_len, 64), kv_heads=kv_heads, kv_len=150, causal="bottom_right")
    q, k, v, options = case.values()
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    judge(out, lse, q, k, v, **options)


@pytest.mark.parametrize("dtype", BF16_F32)
def test_fewer_dimensions_and_the_other_layout(dtype):
    q, k, v = (normal(2, 4, n, 64, dtype=dtype, seed=seed) for seed, n in enumerate((40, 50, 50)))
    want = rapt.attention(q, k, v)
    assert same(rapt.attention(q[0], k[0], v[0]), want[0]) and same(rapt.attention(q[0, 0], k[0, 0], v[0, 0]), want[0, 0])
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert same(rapt.attention(*turned, layout="bshd").transpose(1, 2), want)


def test_negative_strides_from_cupy():
    cupy = pytest.importorskip("cupy")
    tensors = [normal(1, 2, n, 64, dtype=torch.float32, seed=seed) for seed, n in enumerate((40, 50, 50))]
    plain = [cupy.from_dlpack(x) for x in tensors]
    try:
        rapt.attention(*plain)
    except rapt.RaptError as error:
        pytest.skip(f"this build takes no cupy arrays: {error}")
    want = rapt.attention(*tensors)
    for axes in ((2,), (3,), (1, 2, 3)):
        turn = tuple(slice(None, None, -1) if axis in axes else slice(None) for axis in range(4))
        views = [cupy.ascontiguousarray(x[turn])[turn] for x in plain]
        assert min(views[0].strides) < 0
        assert same(torch.from_dlpack(rapt.attention(*views)), want), axes


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="float32 is on the tensor cores of compute capability 9.0 alone")
@pytest.mark.parametrize("dim", [(64, 64), (80, 80), (128, 40), (33, 128)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": "bottom_right"},
        {"window": (30, 9)},
        {"window": (64, None), "causal": "top_left", "softcap": 20.0},
        {"mask": "bool"},
        {"mask": "float32", "causal": "bottom_right"},
        {"alibi_slopes": True},
        {"scale": -0.2},
    ],
    ids=str,
)
def test_every_option_in_float32_on_the_tensor_cores(options, dim):
    q, k, v = (normal(2, h, n, d, dtype=torch.float32, seed=h + n) for h, n, d in ((6, 200, dim[0]), (2, 333, dim[0]), (2, 333, dim[1])))
    options = {**options, "sinks": normal(6, dtype=torch.float32, seed=5)}
    kind = options.get("mask")
    if kind:
        mask = normal(2, 6, 200, 333, dtype=torch.float32, seed=8)
        options["mask"] = mask > -0.5 if kind == "bool" else mask
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, 6, device="cuda")
    assert rapt.explain(q, k, v, **options).kernel == "forward"
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    judge(out, lse, q, k, v, **options)


# ---- streams, graphs, threads, plans that take turns


def problems():
    """Requests of every route, each of another size: (tensors, options, answer)."""
    made = []
    for seed, (dtype, q_len, kv_len, options) in enumerate(
        [
            (torch.bfloat16, 200, 700, {"causal": "bottom_right"}),
            (torch.bfloat16, 1, 5000, {}),
            (torch.float16, 2, 1300, {"window": (900, None), "causal": "bottom_right"}),
            (torch.float32, 90, 130, {"softcap": 3.0}),
            (torch.float64, 1, 2100, {}),
        ]
    ):
        tensors = [normal(2, 4, n, 64, dtype=dtype, seed=10 * seed + i) for i, n in enumerate((q_len, kv_len, kv_len))]
        made.append((tensors, options, rapt.attention(*tensors, **options)))
    torch.cuda.synchronize()
    return made


def test_plans_that_take_turns_disturb_nothing():
    every = problems()
    for _ in range(5):
        answers = [rapt.attention(*tensors, **options) for tensors, options, _ in every]
        for got, (_, _, want) in zip(answers, every):
            assert same(got, want)


def test_several_streams_at_once_each_with_inputs_that_come_late():
    every = problems()
    answers = []
    for tensors, options, _ in every:
        late = [torch.full_like(x, math.nan) for x in tensors]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for x, value in zip(late, tensors):
                x.copy_(value)
            answers.append((stream, late, rapt.attention(*late, **options)))
    for (stream, _, got), (_, _, want) in zip(answers, every):
        stream.synchronize()
        assert same(got, want)


def test_a_call_does_not_wait_for_the_device():
    import time

    (tensors, options, _), *_ = problems()
    took = []
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # about 50 ms
        start = time.perf_counter()
        rapt.attention(*tensors, **options)
        took.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    assert min(took) < 0.02, took


def test_one_graph_of_every_route_replayed_on_other_values():
    every = problems()
    static = [[torch.zeros_like(x) for x in tensors] for tensors, _, _ in every]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers = [rapt.attention(*late, **options) for late, (_, options, _) in zip(static, every)]
    for turn in range(3):
        for late, (tensors, _, _) in zip(static, every):
            for x, value in zip(late, tensors):
                x.copy_(value if turn != 1 else value.flip(2))
        graph.replay()
        for late, got, (_, options, want) in zip(static, answers, every):
            assert same(got, want if turn != 1 else rapt.attention(*late, **options)), turn


def test_threads_with_streams_and_plans_of_their_own():
    every, wrong = problems(), []

    def work(index):
        tensors, options, want = every[index]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = rapt.attention(*tensors, **options)
            torch.cuda.current_stream().synchronize()
            if not same(got, want):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(every))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")


def late_on(device, current, tensors, options):
    """Attention on a stream of `device`, of inputs that come late, while another device is the current one."""
    values = [x.to(device) for x in tensors]
    late = [torch.full_like(x, math.nan) for x in values]
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(20_000_000)
        for x, value in zip(late, values):
            x.copy_(value, non_blocking=True)
        with torch.cuda.device(current):
            # What is yet to be copied must live.
            return (late, values), rapt.attention(*late, **options)


@two_devices
@pytest.mark.parametrize("current", [0, 1])
def test_devices_at_once_each_with_inputs_that_come_late(current):
    every = problems()
    answers = [(device, *late_on(device, current, *case[:2])) for case in every for device in ("cuda:0", "cuda:1")]
    for device in ("cuda:0", "cuda:1"):
        torch.cuda.synchronize(device)
    for (device, _, got), (tensors, options, _) in zip(answers, (case for case in every for _ in range(2))):
        assert got.device == torch.device(device)
        with torch.cuda.device(device):
            assert same(got, rapt.attention(*(x.to(device) for x in tensors), **options))


@two_devices
def test_tensors_of_two_devices_are_refused():
    q, k, v = (normal(1, 2, 40, 64) for _ in range(3))
    with pytest.raises(rapt.DeviceError):
        rapt.attention(q, k.to("cuda:1"), v)
    assert bool(rapt.attention(q, k, v).isfinite().all())
