"""The GPU against the reference: random problems, the stride zoo, tails, poison, bits, guard bands."""

import math
import random

import pytest
import torch
from gpu_reference import ZOO, Case, errors, judge, reference

import rapt

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def run(q, k, v, options, **more):
    before = [t.clone() for t in (q, k, v)]
    out, lse = rapt.attention(q, k, v, return_lse=True, **options, **more)
    for t, copy in zip((q, k, v), before):
        assert torch.equal(bits(t), bits(copy)), "an input was written"
    return out, lse


def bits(t):
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(kind)


def run_and_judge(q, k, v, options, name):
    out, lse = run(q, k, v, options)
    try:
        judge(out, lse, q, k, v, **options)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{name}") from error


def check(case, seed):
    q, k, v, options = case.values()
    out, lse = run(q, k, v, options)
    error = judge(out, lse, q, k, v, **options)
    # The same values elsewhere.
    r = random.Random(seed)
    place = lambda t: ZOO[r.choice(list(ZOO))](t)  # noqa: E731
    moved = dict(options)
    if "mask" in moved:
        moved["mask"] = place(moved["mask"])
    other, other_lse = run(place(q), place(k), place(v), moved)
    assert torch.equal(bits(out), bits(other)), f"{(bits(out) != bits(other)).sum()} elements have other bits under other strides"
    assert torch.equal(bits(lse), bits(other_lse))
    if case.q[0] > 1:
        mask = options.get("mask")
        alone = dict(options)
        if mask is not None:
            alone["mask"] = mask[-1:]
        one, one_lse = run(q[-1:], k[-1:], v[-1:], alone)
        assert torch.equal(bits(one), bits(out[-1:])) and torch.equal(bits(one_lse), bits(lse[-1:])), "other bits alone"
    return error


@pytest.mark.parametrize("block", range(60))
def test_random_problems(block):
    for seed in range(block * 4, block * 4 + 4):
        case = Case.random(seed)
        try:
            check(case, seed)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{case}\n{rapt_plan(case)}") from error


def rapt_plan(case):
    q, k, v, options = case.values()
    return rapt.explain(q, k, v, **options)


@pytest.mark.parametrize("dim", [64, 48, 30])
@pytest.mark.parametrize("q_len, kv_len", [(197, 197), (256, 256), (300, 81), (512, 512), (513, 500)])
def test_the_batch_changes_how_many_queries_a_block_has_and_no_bit(q_len, kv_len, dim):
    for options in ({}, {"causal": "bottom_right"}, {"window": (60, 30)}):
        torch.manual_seed(q_len)
        of = lambda heads, n: torch.randn(24, heads, n, dim, device="cuda").bfloat16()  # noqa: E731
        q, k, v = of(12, q_len), of(4, kv_len), of(4, kv_len)
        v[3, 1, 40] = math.nan
        out, lse = run(q, k, v, options)
        judge(out[2:5], lse[2:5], q[2:5], k[2:5], v[2:5], **options)
        for b in (0, 3, 23):
            one, one_lse = run(q[b : b + 1], k[b : b + 1], v[b : b + 1], options)
            assert torch.equal(bits(one[0]), bits(out[b])) and torch.equal(bits(one_lse[0]), bits(lse[b])), (b, options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [3, 150])
@pytest.mark.parametrize("dim", [64, 40, 33, 512])
def test_every_placement_of_every_tensor(dtype, q_len, dim):
    case = Case(seed=5, dtype=dtype, q=(2, 4, q_len, dim), kv_heads=2, kv_len=131, dim_v=dim, mask="bool", causal="bottom_right")
    q, k, v, options = case.values()
    out, lse = run(q, k, v, options)
    judge(out, lse, q, k, v, **options)
    for name, place in ZOO.items():
        for which in range(4):
            tensors = [q, k, v, options["mask"]]
            tensors[which] = place(tensors[which])
            other, _ = run(*tensors[:3], {**options, "mask": tensors[3]})
            assert torch.equal(bits(out), bits(other)), (name, which, dim)
    # Stride 0, and outputs of other strides between guard bands.
    wide = run(q[:1].expand(2, -1, -1, -1), k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), {})[0]
    assert torch.equal(bits(wide[0]), bits(wide[1]))
    band = torch.full((2, q_len + 2, 4 + 2, dim + 3), 7.0, dtype=dtype, device="cuda")
    into = band[:, 1:-1, 1:-1, 1:-2].transpose(1, 2)
    rapt.attention(q, k, v, out=into, **options)
    assert torch.equal(bits(into), bits(out))
    into.fill_(7.0)
    assert bool((band == 7.0).all())


# Heads beyond 256, many queries: keys of short problems are split over blocks.
WIDE = {
    "plain": {"q": (1, 2, 200, 512), "kv_heads": 2, "kv_len": 333, "causal": "bottom_right"},
    "split": {"q": (2, 4, 130, 512), "kv_heads": 2, "kv_len": 1030, "mask": "bool"},
    "split, some chunks unseen": {"q": (1, 1, 700, 512), "kv_heads": 1, "kv_len": 1500, "causal": "top_left", "window": (300, None)},
    "one chunk, rows of several heads": {"q": (1, 8, 20, 512), "kv_heads": 2, "kv_len": 100, "causal": "bottom_right"},
    "natural": {"q": (1, 4, 100, 512), "kv_heads": 4, "kv_len": 700, "softcap": 3.0, "sinks": True, "alibi": True, "window": (90, 40)},
    "biases": {"q": (1, 2, 257, 512), "kv_heads": 1, "kv_len": 257, "mask": "dtype", "causal": "top_left", "mask_full": (True, False, True, True)},
    "loaded in part": {"q": (1, 2, 129, 320), "kv_heads": 1, "kv_len": 259, "dim_v": 500, "causal": "bottom_right"},
    "wide values": {"q": (1, 2, 129, 64), "kv_heads": 1, "kv_len": 1100},
}  # fmt: skip


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_heads(dtype, kind):
    options = dict(WIDE[kind])
    if options.get("mask") == "dtype":
        options["mask"] = str(dtype).removeprefix("torch.")
    for seed, poison in enumerate((False, True, True, True)):
        case = Case(seed=seed, dtype=dtype, poison=poison, **{"dim_v": 512, **options})
        plan = rapt_plan(case)
        assert plan.kernel == "forward", plan
        check(case, seed)


TAILS = {
    "causal": lambda n, dtype: Case(n, dtype, (1, 2, n, 32), 2, 140 - n, 32, causal="top_left"),
    "decode": lambda n, dtype: Case(n, dtype, (1, 4, 1, 16), 1, 8 * n, 16),
    "head_dim": lambda n, dtype: Case(n, dtype, (1, 1, 20, n), 1, n, n),
}


@pytest.mark.parametrize("kind", TAILS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tails_of_every_length(dtype, kind):
    for n in range(1, 140, 1 if dtype == torch.bfloat16 else 9):
        case = TAILS[kind](n, dtype)
        q, k, v, options = case.values()
        run_and_judge(q, k, v, options, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_of_zero_and_rows_without_keys(dtype):
    new = lambda *shape: torch.randn(*shape, device="cuda").to(dtype)  # noqa: E731
    out, lse = rapt.attention(new(2, 2, 5, 8), new(2, 2, 0, 8), new(2, 2, 0, 8), return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all()) and out.shape == (2, 2, 5, 8)
    assert rapt.attention(new(2, 2, 0, 8), new(2, 2, 5, 8), new(2, 2, 5, 8)).shape == (2, 2, 0, 8)
    for q_len in (4, 100):
        q, k, v = new(1, 2, q_len, 64), new(1, 2, 70, 64), new(1, 2, 70, 64)
        q[0, 0, 0, 0] = math.nan
        k[:], v[:] = math.nan, math.nan
        none = torch.zeros(1, 1, 1, 70, dtype=torch.bool, device="cuda")
        out, lse = rapt.attention(q, k, v, mask=none, sinks=torch.zeros(2, device="cuda"), return_lse=True)
        assert bool((out == 0).all()) and bool((lse == -math.inf).all())


# By how much in natural units the scores of keys from 300 on lie above those before.
RISES = [-200, 3, 9, 20, 70, 90, 300, 4000, 20000]


def _tiles_hidden():
    """Which rows see which keys: some see their first key late, some none, and whole tiles are hidden."""
    seen = torch.rand(1, 1, 200, 700, device="cuda") > 0.2
    seen[..., 50:90, :260], seen[..., 90:120, :390], seen[..., 120, :] = False, False, False
    seen[..., 400:530] = False
    return seen


def _biases(low):
    return torch.where(torch.arange(700, device="cuda") < 310, low, 0.5).to(torch.bfloat16).expand(1, 1, 200, 700)


OPTIONS = {
    "plain": lambda: {},
    "causal": lambda: {"causal": "bottom_right"},
    "window": lambda: {"window": (150, 40)},
    "softcap": lambda: {"softcap": 50.0},
    "sinks": lambda: {"sinks": torch.tensor([0.0, 5.0, -3.0, 30.0], device="cuda")},
    "alibi": lambda: {"alibi_slopes": torch.tensor([0.9, 0.5, 0.1, 0.01], device="cuda"), "causal": "bottom_right"},
    "bool": lambda: {"mask": _tiles_hidden()},
    "additive": lambda: {"mask": torch.where(_tiles_hidden(), 0.5, -math.inf).to(torch.bfloat16)},
    "padding by -10000": lambda: {"mask": _biases(-10000.0)},
    "padding by the lowest number": lambda: {"mask": _biases(torch.finfo(torch.bfloat16).min)},
}


def rising(dtype, dim, rise):
    """(q, k, v) where a part of q.k is 0 before key 300; from there it is `rise` for some heads, and climbs to it for others."""
    torch.manual_seed(rise % 97)
    new = lambda *shape: torch.randn(*shape, device="cuda").to(dtype)  # noqa: E731
    q, k, v = new(1, 4, 200, dim), new(1, 2, 700, dim), new(1, 2, 700, dim)
    step = rise * math.sqrt(dim) / 8
    q[..., 0], k[..., 0] = 8, 0
    k[:, 0, 300:, 0] = step
    k[:, 1, 300:, 0] = torch.linspace(0, step, 400, device="cuda").to(dtype)
    return q, k, v


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_that_rise_or_fall_from_tile_to_tile(dtype, dim, name):
    for rise in RISES:
        q, k, v = rising(dtype, dim, rise)
        run_and_judge(q, k, v, OPTIONS[name](), f"rise {rise}")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_a_row_has_its_bits_whatever_its_neighbours_scores_are(dim, name):
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = rising(dtype, dim, 20)
        q[..., 0] = 1
        options = OPTIONS[name]()
        want, want_lse = run(q, k, v, options)
        others = torch.arange(200, device="cuda") != 70
        for value in (0.5, 3, 40, 700, 30000, math.nan, math.inf):
            q = q.clone()
            q[:, :, 70, 0] = value
            out, lse = run(q, k, v, options)
            assert torch.equal(bits(out[:, :, others]), bits(want[:, :, others])), value
            assert torch.equal(bits(lse[:, :, others]), bits(want_lse[:, :, others])), value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("q_len", [2, 130])
def test_scores_far_out(dtype, q_len):
    q, k, v, _ = Case(seed=3, dtype=dtype, q=(1, 2, q_len, 64), kv_heads=2, kv_len=600).values()
    out, lse = run(q * 10, k * 10, v, {})
    judge(out, lse, q * 10, k * 10, v)
    # Scores that float32 holds to a tenth: the greatest still takes nearly all.
    out, _ = run(q * 100, k * 100, v, {})
    assert errors(out, reference(q * 100, k * 100, v)[0])[0] < 5e-3
    # Every key alike, and a bias at the lowest finite number: the mean of v.
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    lowest = torch.full((1, 1, 1, 600), torch.finfo(wide).min, dtype=wide, device="cuda")
    out = rapt.attention(q, k, v, mask=lowest)
    mean = v.double().mean(2, keepdim=True).expand_as(out)
    assert (out.double() - mean).abs().max().item() < 5e-2 * (1 if dtype != torch.float32 else 1e-3)


def test_long_keys_split_the_same_on_every_run():
    for dtype in DTYPES:
        case = Case(seed=9, dtype=dtype, q=(2, 8, 1, 128), kv_heads=2, kv_len=20_000, dim_v=128)
        q, k, v, options = case.values()
        first = run(q, k, v, options)
        judge(*first, q, k, v, **options)
        for _ in range(3):
            again = run(q, k, v, options)
            assert torch.equal(bits(first[0]), bits(again[0])) and torch.equal(bits(first[1]), bits(again[1]))


def test_a_decoded_row_has_the_same_bits_alone_and_in_a_full_batch():
    # A batch that fills the device is computed row by row, a single row chunk by chunk.
    for dim, group in ((64, 4), (128, 1), (40, 12)):
        for kv_len in (1100, 3000):
            q, k, v, _ = Case(seed=6, q=(64, 2 * group, 1, dim), kv_heads=2, kv_len=kv_len).values()
            v[3, 0, kv_len - 7, 5], v[5, 1, 0] = math.inf, math.nan
            out, lse = rapt.attention(q, k, v, return_lse=True)
            for b in (0, 3, 5, 63):
                one, one_lse = rapt.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], return_lse=True)
                assert torch.equal(one[0].nan_to_num(7.0), out[b].nan_to_num(7.0)) and torch.equal(one_lse[0], lse[b]), (dim, kv_len, b)
            assert out[3, :group, :, 5].isposinf().all() and out[5, group:].isnan().all()
            assert out[3].isfinite().sum() == out[3].numel() - group and out[4].isfinite().all()
            judge(out[:2], lse[:2], q[:2], k[:2], v[:2])


def test_streams_graphs_and_threads():
    q, k, v, _ = Case(seed=2, q=(1, 4, 200, 64), kv_heads=4, kv_len=700).values()
    want = rapt.attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = rapt.attention(q, k, v)
    stream.synchronize()
    assert torch.equal(bits(got), bits(want))
    one = q[:, :, :1].contiguous()
    for query in (q, one):
        static = torch.zeros_like(query)
        rapt.attention(query, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = rapt.attention(static, k, v)
        static.copy_(query)
        graph.replay()
        assert torch.equal(bits(out), bits(rapt.attention(query, k, v)))


def test_nothing_is_kept_and_memory_does_not_grow_with_the_square():
    q = torch.randn(1, 1, 16384, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, 16384, device="cuda", dtype=torch.bool)
    rapt.attention(q, q, q, mask=mask)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = rapt.attention(q, q, q, mask=mask)
    assert torch.cuda.max_memory_allocated() - before <= 2 * out.numel() * out.element_size()
