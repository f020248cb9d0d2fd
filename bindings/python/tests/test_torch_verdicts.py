"""One request, one verdict, on every route: numpy, Rapt's own function on torch tensors, its op, its fake kernel, and the registered
backend, eager, traced and exported. A verdict is "served", or the class of the error, which a reason of the fallback stands for.

Requests are drawn by chance: ranks 0 to 5 and 9, batches and heads that broadcast or do not, GQA, masks of all ranks and dtypes,
`is_causal` beside a mask, K and V of different length, empty tensors, other dtypes, gradients, dropout, scales, strange tensors.
"""

import random

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from rapt import _native  # noqa: E402
from rapt.torch import _stock  # noqa: E402
from test_torch_stats import sdpa, strange  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

own = rapt.scaled_dot_product_attention
COMPUTED = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# What Rapt's own functions raise where the registered backend hands a request to PyTorch for this reason. PyTorch does not take
# an "invalid request", and says so in its own words; of what Rapt's own functions say then any of these may be right.
CLASSES = {
    "dropout": rapt.OptionError,
    "lazy negation": rapt.LayoutError,
    "scale not finite": rapt.OptionError,
    "head_dim 0": rapt.ShapeError,
    "empty input": rapt.ShapeError,
    "more than 8 dimensions": rapt.ShapeError,
    "invalid request": (rapt.ShapeError, rapt.DtypeMismatchError, rapt.UnsupportedDtypeError, rapt.OptionError),
}


def expected_class(reason):
    if reason.startswith("dtype "):
        return rapt.UnsupportedDtypeError
    if reason.startswith("layout "):
        return rapt.LayoutError
    if reason.startswith("tensor subclass "):
        return rapt.UnsupportedError
    return CLASSES[reason]


def draw(rng):
    """(q, k, v, mask), options: a request, valid in about half of the cases."""
    rank = rng.choice([1, 2, 3, 3, 4, 4, 4, 4, 5, 9 if rng.random() < 0.2 else 4])
    batch = [rng.choice([1, 2, 3]) for _ in range(max(rank - 3, 0))]
    heads = [rng.choice([1, 2, 4])] if rank > 2 else []
    q_len, kv_len, dim = rng.choice([1, 2, 5, 5, 0]), rng.choice([1, 3, 6, 6, 0]), rng.choice([1, 4, 8, 8, 8, 0])
    dim_v = rng.choice([dim, dim, dim, 3])
    gqa = rng.random() < 0.4

    def some(sizes):
        sizes = [1 if rng.random() < 0.1 else size for size in sizes]
        if sizes and rng.random() < 0.06:
            sizes[rng.randrange(len(sizes))] = rng.choice([0, 2, 3])
        return sizes[rng.randrange(len(sizes) + 1) :] if rng.random() < 0.05 else sizes

    q_heads = [heads[0] * rng.choice([1, 1, 2, 3])] if heads and rng.random() < 0.5 else heads
    v_heads = heads if rng.random() < 0.9 else [rng.choice([1, 2, 4])] * len(heads)
    q_shape = [*some(batch), *q_heads, q_len, dim]
    k_shape = [*some(batch), *heads, kv_len, dim if rng.random() < 0.95 else dim + 1]
    v_shape = [*some(batch), *v_heads, kv_len if rng.random() < 0.95 else kv_len + 1, dim_v]
    q_shape, k_shape, v_shape = (shape[-rank:] for shape in (q_shape, k_shape, v_shape))
    dtype = rng.choice(COMPUTED) if rng.random() < 0.93 else rng.choice([torch.int32, torch.int8, torch.complex64, torch.bool])

    def tensor(shape, dtype):
        full = torch.randn(shape, dtype=torch.float64)
        if len(shape) > 1 and rng.random() < 0.3:
            full = full.transpose(-1, -2).contiguous().transpose(-1, -2)
        return full.to(dtype)

    dtypes = [dtype if rng.random() < 0.96 else rng.choice(COMPUTED) for _ in range(3)]
    q, k, v = (tensor(shape, of) for shape, of in zip((q_shape, k_shape, v_shape), dtypes))
    mask = None
    if rng.random() < 0.5:
        full = [*batch, *q_heads, q_len, kv_len]
        sizes = [1 if rng.random() < 0.3 else size for size in full][-rng.choice([0, 1, 2, 2, 3, 4, 5]) or len(full) :]
        if sizes and rng.random() < 0.1:
            sizes = [*sizes[:-1], sizes[-1] + 1]
        kind = rng.choice([torch.bool, torch.bool, dtype, torch.float32, torch.float64, torch.float16, torch.int64])
        mask = torch.randn(sizes) > -0.5 if kind is torch.bool else torch.randn(sizes).to(kind)
    options = {"is_causal": rng.random() < (0.3 if mask is None else 0.08), "enable_gqa": gqa}
    if rng.random() < 0.2:
        options["scale"] = rng.choice([0.3, -1.0, 0.0, float("inf"), float("nan")])
    if rng.random() < 0.05:
        options["dropout_p"] = rng.choice([0.1, 0.5, 1.0, 1.5])
    given = [q, k, v, mask]
    if rng.random() < 0.06:
        at = rng.randrange(4)
        if given[at] is not None and given[at].is_floating_point():
            given[at] = strange(rng, given[at])
    return given, options


def is_strided(t):
    return type(t) is torch.Tensor and t.layout is torch.strided and not t.is_neg()


def outcome(call):
    """What a call answers, or the error that it raises; of one seed, for calls that draw."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        try:
            return call()
        except Exception as error:  # noqa: BLE001
            return error


def by_numpy(given, options):
    """The same on numpy arrays; None where there is no such array. Their rules are those of the newest PyTorch."""
    if not all(_stock.ask()) or "dropout_p" in options:
        return None
    if any(t is not None and (not is_strided(t) or t.requires_grad or t.dtype == torch.bfloat16) for t in given):
        return None
    return outcome(lambda: own(*(None if t is None else t.numpy() for t in given), **options))


def registered(given, options):
    """What the backend answers, and the reason that it counted."""
    rt.reset_stats()
    with rt.backend():
        answer = outcome(lambda: sdpa(*given, **options))
    stats = rt.stats()
    reasons = list(stats["fallback"])
    assert len(reasons) + stats["served"] <= 1, stats
    return answer, reasons[0] if reasons else None, stats["served"] == 1


def same(a, b, dtype):
    tolerance = {2: 4e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def examine(given, options, seen):
    q = given[0]
    direct = outcome(lambda: own(*given, **options))
    answer, reason, served = registered(given, options)
    if served:
        assert isinstance(direct, torch.Tensor), f"registered served it, Rapt's own function: {direct!r}"
        assert torch.equal(direct, answer) and direct.stride() == answer.stride()
    elif reason is None:
        # Nobody computes it: one typed error on both.
        assert isinstance(answer, rapt.RaptError) and type(direct) is type(answer), (direct, answer)
    else:
        assert isinstance(direct, expected_class(reason)), f"{reason}: {direct!r}"
    verdict = "served" if served else reason or type(answer).__name__
    seen[verdict] = seen.get(verdict, 0) + 1

    array = by_numpy(given, options)
    if array is not None:
        if isinstance(direct, Exception):
            assert type(array) is type(direct), (array, direct)
        else:
            same(torch.from_numpy(array), direct, q.dtype)

    # The dispatcher has no kernel of Rapt's op for sparse tensors and subclasses, and writes a lazy negation out before it.
    if "dropout_p" in options or not all(t is None or is_strided(t) for t in given):
        return
    op = outcome(lambda: torch.ops.rapt.scaled_dot_product_attention(*given, **options))
    if isinstance(direct, Exception):
        assert type(op) is type(direct), (op, direct)
    else:
        assert torch.equal(op, direct)
    with FakeTensorMode() as mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in given]
        fake = outcome(lambda: own(*fakes, **options))
        with rt.backend():
            through = outcome(lambda: sdpa(*fakes, **options))
        pytorchs = outcome(lambda: sdpa(*fakes, **options)) if reason is not None else answer
    if isinstance(direct, Exception):
        assert type(fake) is type(direct), (fake, direct)
        # What is handed on is PyTorch's own trace, whose fake kernels check less than those that compute.
        assert type(through) is type(pytorchs), (through, pytorchs)
        return
    assert (fake.shape, fake.dtype, fake.stride()) == (direct.shape, direct.dtype, direct.stride())
    assert (through.shape, through.stride()) == (direct.shape, direct.stride())


@pytest.mark.parametrize("seed", range(4))
def test_one_verdict_on_every_route(seed):
    """500 requests a seed."""
    rng, seen = random.Random(seed), {}
    torch.manual_seed(seed)
    for number in range(500):
        given, options = draw(rng)
        about = [None if t is None else (type(t).__name__, tuple(t.shape), str(t.dtype), t.requires_grad) for t in given]
        try:
            examine(given, options, seen)
        except Exception as error:
            raise AssertionError(f"seed {seed}, request {number}: {about}, {options}") from error
    assert seen["served"] > 60 and seen["invalid request"] > 60, seen
    assert {"dropout", "scale not finite", "ShapeError"} <= set(seen), seen


def test_heads_are_groups_only_where_that_is_asked():
    q, k = torch.randn(4, 5, 8), torch.randn(2, 5, 8)
    for given in ((q, k, k), (q.numpy(), k.numpy(), k.numpy()), (q[None], k[None], k[None])):
        with pytest.raises(rapt.ShapeError, match="enable_gqa=True"):
            own(*given)
    torch.testing.assert_close(own(q, k, k, enable_gqa=True), rapt.attention(q, k, k))
    np.testing.assert_allclose(own(q.numpy(), k.numpy(), k.numpy(), enable_gqa=True), own(q, k, k, enable_gqa=True), rtol=1e-5)


def test_two_group_sizes_are_one_answer_on_numpy_and_torch():
    q, k, v = torch.randn(2, 8, 5, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    repeated = own(q, k.repeat_interleave(2, 1), v.repeat_interleave(4, 1))
    for answer in (own(q, k, v, enable_gqa=True), torch.from_numpy(own(q.numpy(), k.numpy(), v.numpy(), enable_gqa=True))):
        torch.testing.assert_close(answer, repeated)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs_serve_and_refuse_alike(backend):
    rng, outcomes = random.Random(20), {True: 0, False: 0}
    for _ in range(40):
        given, options = draw(rng)
        options.pop("dropout_p", None)
        if not all(t is None or (is_strided(t) and not t.requires_grad) for t in given):
            continue  # torch.compile itself takes no sparse tensors
        torch._dynamo.reset()
        direct = outcome(lambda: own(*given, **options))
        compiled = outcome(lambda: torch.compile(lambda *t: own(*t, **options), fullgraph=True, backend=backend)(*given))
        outcomes[isinstance(direct, Exception)] += 1
        if isinstance(direct, Exception):
            chain, error = [], compiled
            while error is not None:
                chain.append(type(error))
                error = error.__cause__ or error.__context__
            assert type(direct) in chain or type(direct).__name__ in str(compiled) or str(direct.args[0])[:20] in str(compiled), (
                direct, compiled,
            )  # fmt: skip
        else:
            assert torch.equal(direct, compiled) and direct.stride() == compiled.stride()
    assert min(outcomes.values()) > 10, outcomes


def test_exported_programs_answer_as_the_registered_backend():
    class Attention(torch.nn.Module):
        def __init__(self, options):
            super().__init__()
            self.options = options

        def forward(self, q, k, v, mask):
            return sdpa(q, k, v, attn_mask=mask, **self.options)

    rng, checked = random.Random(30), 0
    while checked < 12:
        given, options = draw(rng)
        if not all(t is None or (type(t) is torch.Tensor and not t.requires_grad) for t in given):
            continue
        answer, _, served = registered(given, options)
        if not served or 0 in (n for t in given if t is not None for n in t.shape):
            continue
        with rt.backend(), torch.no_grad():
            program = torch.export.export(Attention(options), tuple(given), strict=False)
            rt.reset_stats()
            out = program.module()(*given)
            assert rt.stats() == {"served": 1, "fallback": {}}
        assert torch.equal(out, answer)
        checked += 1


def test_the_documented_reasons_are_the_ones_counted():
    import re
    from pathlib import Path

    from rapt.torch import _backend, _transformers

    page = Path(__file__).parents[3] / "docs" / "reference" / "pytorch.md"
    if not page.exists():
        pytest.skip("installed without the repository")
    table = page.read_text().split("| reason in `stats()")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    documented = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(documented) == sorted([*_native.fallback_reasons(), *_transformers.REASONS, _backend.REASON])
