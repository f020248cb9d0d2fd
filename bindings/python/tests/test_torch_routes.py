"""Every route that PyTorch takes on the CPU is served: values by the reference, strides as PyTorch's own, invalid ones its error."""

import random

import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from test_torch_stats import DTYPES, check, same_views, sdpa, served, stock, tensor  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

SHAPES = {
    "flash": ((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8), {}),
    "one head": ((2, 1, 6, 8), (2, 1, 5, 8), (2, 1, 5, 8), {}),
    "decode": ((2, 4, 1, 8), (2, 4, 37, 8), (2, 4, 37, 8), {}),
    "head_dim 1": ((2, 4, 3, 1), (2, 4, 5, 1), (2, 4, 5, 1), {}),
    "head_dim 65": ((1, 2, 9, 65), (1, 2, 33, 65), (1, 2, 33, 65), {}),
    "Dv != D": ((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 3), {}),
    "2-D": ((6, 8), (5, 8), (5, 8), {}),
    "3-D": ((4, 6, 8), (4, 5, 8), (4, 5, 8), {}),
    "5-D": ((2, 3, 4, 6, 8), (2, 3, 4, 5, 8), (2, 3, 4, 5, 8), {}),
    "6-D": ((2, 1, 3, 2, 4, 8), (2, 2, 3, 2, 5, 8), (2, 2, 3, 2, 5, 8), {}),
    "ranks differ": ((2, 4, 6, 8), (4, 5, 8), (5, 8), {}),
    "batch broadcast k and v": ((3, 4, 6, 8), (1, 4, 5, 8), (1, 4, 5, 8), {}),
    "batch broadcast q": ((1, 4, 6, 8), (3, 4, 5, 8), (3, 4, 5, 8), {}),
    "batch broadcast v alone": ((1, 4, 6, 8), (1, 4, 5, 8), (3, 4, 5, 8), {}),
    "head broadcast k and v": ((2, 4, 6, 8), (2, 1, 5, 8), (2, 1, 5, 8), {}),
    "head broadcast q": ((2, 1, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8), {}),
    "head broadcast v": ((2, 4, 6, 8), (2, 4, 5, 8), (2, 1, 5, 8), {}),
    "gqa": ((2, 8, 6, 8), (2, 2, 5, 8), (2, 2, 5, 8), {"enable_gqa": True}),
    "gqa, Dv != D": ((2, 8, 6, 8), (2, 2, 5, 8), (2, 2, 5, 3), {"enable_gqa": True}),
    "gqa, batch broadcast": ((2, 8, 6, 8), (1, 2, 5, 8), (1, 2, 5, 8), {"enable_gqa": True}),
    "gqa, two group sizes": ((2, 8, 6, 8), (2, 4, 5, 8), (2, 2, 5, 8), {"enable_gqa": True}),
    "gqa, 5-D": ((2, 3, 4, 6, 8), (2, 3, 2, 5, 8), (2, 3, 2, 5, 8), {"enable_gqa": True}),
    "gqa, 3-D": ((4, 6, 8), (2, 5, 8), (2, 5, 8), {"enable_gqa": True}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, dtype):
    *shapes, options = SHAPES[name]
    q, k, v = (tensor(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    for is_causal in (False, True):
        for scale in (None, 0.3):
            arguments = {"is_causal": is_causal, "scale": scale, **options}
            before = [t.clone() for t in (q, k, v)]
            own = stock(q, k, v, **arguments)
            with served():
                out = sdpa(q, k, v, **arguments)
            check(out, q, k, v, **arguments)
            same_views(out, own)
            assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v)))


MASKS = [(6, 5), (1, 5), (6, 1), (1, 1), (4, 6, 5), (1, 6, 5), (2, 4, 6, 5), (2, 1, 6, 5), (1, 4, 6, 5), (2, 1, 1, 5), (2, 4, 6, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(shape, dtype):
    q, k, v = tensor(2, 4, 6, 8, dtype=dtype), tensor(2, 4, 5, 8, dtype=dtype), tensor(2, 4, 5, 8, dtype=dtype, seed=1)
    additive = tensor(*shape, seed=2)
    boolean = additive > -0.5
    for mask in (boolean, additive.to(dtype), additive, boolean.new_ones(*shape[:-1], 2 * shape[-1])[..., ::2]):
        own = stock(q, k, v, mask)
        with served():
            out = sdpa(q, k, v, mask)
        check(out, q, k, v, mask)
        same_views(out, own)


@pytest.mark.parametrize("shapes", [((6, 8), (5,)), ((3, 6, 8), (5,)), ((3, 6, 8), (3, 6, 5)), ((2, 3, 4, 6, 8), (3, 1, 6, 5))])
def test_masks_of_other_ranks(shapes):
    query, mask = shapes
    q, k, m = tensor(*query), tensor(*query[:-2], 5, 8), tensor(*mask) > -0.5
    own = stock(q, k, k, m)
    with served():
        out = sdpa(q, k, k, m)
    check(out, q, k, k, m)
    same_views(out, own)


def test_a_masked_row_is_zeros_and_garbage_never_leaks():
    q, k, v = tensor(1, 2, 4, 8), tensor(1, 2, 5, 8), tensor(1, 2, 5, 8, seed=1)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    mask[:, 4] = False
    k[:, :, 4], v[:, :, 4] = torch.nan, torch.inf
    with served():
        out = sdpa(q, k, v, mask)
    check(out, q, k, v, mask)
    assert (out[:, :, 2] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_a_row_at_the_lowest_finite_bias_is_the_mean_of_v(dtype):
    q, k, v = tensor(1, 2, 3, 8, dtype=dtype), tensor(1, 2, 5, 8, dtype=dtype), tensor(1, 2, 5, 8, dtype=dtype, seed=1)
    mask = torch.full((3, 5), torch.finfo(dtype).min, dtype=dtype)
    with served():
        out = sdpa(q, k, v, mask)
    check(out, q, k, v, mask)
    if dtype is not torch.float16:  # -65504 is small enough that the scores still show
        mean = v.double().mean(2, keepdim=True).expand(1, 2, 3, 8)
        torch.testing.assert_close(out.double(), mean, rtol=0, atol={2: 2e-2, 4: 1e-6, 8: 1e-14}[dtype.itemsize])


def layouts(batch, heads, length, head_dim, dtype, seed=0):
    """One shape, many strides."""

    def base(*shape):
        return tensor(*shape, dtype=dtype, seed=seed)

    b, h, s, d = batch, heads, length, head_dim
    return {
        "contiguous": base(b, h, s, d),
        "bshd": base(b, s, h, d).transpose(1, 2),
        "sbhd": base(s, b, h, d).permute(1, 2, 0, 3),
        "inner stride": base(b, h, d, s).transpose(2, 3),
        "reversed": base(d, s, h, b).permute(3, 2, 1, 0),
        "step 2": base(b, h, 2 * s, d)[:, :, ::2],
        "inner step 2": base(b, h, s, 2 * d)[..., ::2],
        "narrow": base(b, h, s, d + 3)[..., 1 : d + 1],
        "qkv slice": base(b, s, 3, h, d)[:, :, 1].transpose(1, 2),
        "expanded heads": base(b, 1, s, d).expand(b, h, s, d),
        "expanded batch": base(1, h, s, d).expand(b, h, s, d),
        "overlapping": base(b * h * s * d).as_strided((b, h, s, d), (h * d, d, 1, 2)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("q_layout", layouts(1, 1, 1, 1, torch.float32))
def test_strides(q_layout, dtype):
    q = layouts(2, 3, 7, 8, dtype)[q_layout]
    for name, k in layouts(2, 3, 5, 8, dtype, seed=1).items():
        v = layouts(2, 3, 5, 8, dtype, seed=2)[name]
        own = stock(q, k, v)
        with served(2):
            out = sdpa(q, k, v)
            same = sdpa(q.contiguous(), k.contiguous(), v.contiguous())
        same_views(out, own)
        assert torch.equal(out, same), f"{name}: other strides of the same values, other bits"
    check(out, q, k, v)


def test_heads_by_permute():
    # [1,12,77,64] permuted from [1,77,12,64]: strides (59136, 64, 768, 1) against (59136, 4928, 64, 1).
    q, k, v = (tensor(1, 77, 12, 64, seed=i).permute(0, 2, 1, 3) for i in range(3))
    assert q.stride() == (59136, 64, 768, 1)
    with served(2):
        out, same = sdpa(q, k, v), sdpa(*(t.contiguous() for t in (q, k, v)))
    assert torch.equal(out, same)
    check(out, q, k, v)


def test_empty():
    for shapes in [((2, 4, 0, 8), (2, 4, 5, 8)), ((2, 4, 6, 8), (2, 4, 0, 8)), ((0, 4, 6, 8), (0, 4, 5, 8)), ((2, 0, 6, 8), (2, 0, 5, 8))]:
        q, k = (torch.randn(s) for s in shapes)
        own = stock(q, k, k)
        with served():
            out = sdpa(q, k, k)
        same_views(out, own)
        assert torch.equal(out, torch.zeros_like(own))


def test_k_and_v_of_different_length_raise_shape_error():
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 3, 8)
    for run in (lambda: sdpa(q, k, v), lambda: sdpa(q, v, k), lambda: sdpa(q.requires_grad_(), k, v)):
        with served(0), pytest.raises(rapt.ShapeError, match=r"key\[\.\.\., :3, :\]"):
            run()


INVALID = {
    "1-D": lambda q, k: (q[0, 0, 0], k, k),
    "head_dim differs": lambda q, k: (q, k[..., :7], k),
    "heads differ": lambda q, k: (q, k[:, :3], k[:, :3]),
    "batch differs": lambda q, k: (q, k.repeat(3, 1, 1, 1), k.repeat(3, 1, 1, 1)),
    "dtypes differ": lambda q, k: (q, k.double(), k.double()),
    "mask not broadcastable": lambda q, k: (q, k, k, torch.ones(3, 5, dtype=torch.bool)),
    "mask of rank 1": lambda q, k: (q, k, k, torch.ones(5, dtype=torch.bool)),
    "mask of rank 5": lambda q, k: (q, k, k, torch.ones(1, 1, 1, 6, 5, dtype=torch.bool)),
    "mask int": lambda q, k: (q, k, k, torch.ones(6, 5, dtype=torch.int32)),
    "mask wider": lambda q, k: (q, k, k, torch.ones(6, 5, dtype=torch.float64)),
    "mask and is_causal": lambda q, k: (q, k, k, torch.ones(6, 5, dtype=torch.bool), 0.0, True),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_request_invalid_for_pytorch_raises_its_own_error(name):
    arguments = INVALID[name](torch.randn(2, 4, 6, 8), torch.randn(2, 4, 5, 8))
    own = stock(*arguments)
    if name == "mask and is_causal" and not isinstance(own, Exception):
        pytest.skip("torch 2.6's flash takes both")
    assert isinstance(own, Exception), "PyTorch takes it"
    with served(0, invalid_request=1), pytest.raises(type(own)) as got:
        sdpa(*arguments)
    assert str(got.value) == str(own)
    q = torch.randn(2, 4, 6, 8)
    with served():
        sdpa(q, q, q)


def test_gqa_that_does_not_divide_raises_pytorchs_error():
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 3, 5, 8)
    own = stock(q, k, k, enable_gqa=True)
    with served(0, invalid_request=1), pytest.raises(type(own)) as got:
        sdpa(q, k, k, enable_gqa=True)
    assert str(got.value) == str(own)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn], ids=lambda d: str(d)[6:])
def test_dtypes_that_rapt_does_not_compute_go_to_pytorch(dtype):
    q = torch.randn(1, 2, 4, 8).to(dtype)
    own = stock(q, q, q)
    rt.reset_stats()
    with rt.backend():
        try:
            got = sdpa(q, q, q)
        except Exception as error:  # noqa: BLE001
            got = error
    assert rt.stats() == {"served": 0, "fallback": {f"dtype {str(dtype)[6:]}": 1}}
    assert type(got) is type(own) and (not isinstance(own, Exception) or str(got) == str(own))


def strided(rng, shape, dtype):
    """These sizes in strides drawn by chance."""
    kind, n = rng.random(), len(shape)
    if kind < 0.4:
        return tensor(*shape, dtype=dtype)
    if kind < 0.7:
        order = rng.sample(range(n), n)
        return tensor(*(shape[i] for i in order), dtype=dtype).permute([order.index(i) for i in range(n)])
    d = rng.randrange(n)
    if kind < 0.85:
        doubled = [2 * s if i == d else s for i, s in enumerate(shape)]
        return tensor(*doubled, dtype=dtype)[tuple(slice(None, None, 2 if i == d else None) for i in range(n))]
    if shape[d] == 0:
        return tensor(*shape, dtype=dtype)
    return tensor(*(1 if i == d else s for i, s in enumerate(shape)), dtype=dtype).expand(shape)


def request_by_chance(rng):
    """A request, mostly valid: rank, broadcasting, GQA, mask, dtype, options, strides."""
    lead = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 2, 3, 4]))]
    q_len, kv_len, head_dim = rng.choice([0, 1, 4, 5, 5]), rng.choice([0, 2, 3, 5, 5]), rng.choice([1, 3, 8])
    head_dim_v, gqa = rng.choice([head_dim, head_dim, 2]), rng.random() < 0.3

    def some(sizes, p):
        sizes = [1 if rng.random() < p else s for s in sizes]
        if rng.random() < 0.06:
            sizes = sizes[rng.randrange(len(sizes) + 1) :]
        if rng.random() < 0.05 and sizes:
            sizes[rng.randrange(len(sizes))] = rng.choice([1, 2, 3])
        return sizes

    q_lead, k_lead = some(lead, 0.05), some(lead, 0.12)
    v_lead = k_lead if rng.random() < 0.8 else some(lead, 0.12)
    if gqa and q_lead:
        q_lead = [*q_lead[:-1], (k_lead or [1])[-1] * rng.choice([1, 2, 4])]
    dtype = rng.choice([*DTYPES, torch.float32])
    mask = None
    if rng.random() < 0.5:
        shape = [1 if rng.random() < 0.25 else s for s in lead] + [rng.choice([q_len, q_len, 1]), rng.choice([kv_len, 1])]
        shape = shape[rng.randrange(len(shape)) :] if rng.random() < 0.5 else shape
        mask = tensor(*shape, dtype=rng.choice([dtype, torch.float32])) if rng.random() < 0.5 else tensor(*shape) > -0.5
    options = {"is_causal": rng.random() < 0.3 and (mask is None or rng.random() < 0.1), "enable_gqa": gqa}
    if rng.random() < 0.2:
        options["scale"] = rng.choice([0.3, 1.0])
    sizes = [(*q_lead, q_len, head_dim), (*k_lead, kv_len, head_dim), (*v_lead, kv_len, head_dim_v)]
    return [*(strided(rng, s, dtype) for s in sizes), mask], options


def fits(q, k, v, mask, options):
    """Whether an empty request would be valid with elements in it, in q's own leading sizes."""
    try:
        with torch.no_grad():
            answer = rapt.scaled_dot_product_attention(q, k, v, mask, **options)
    except rapt.ShapeError:
        return False
    return answer.shape[:-2] == q.shape[:-2]


@pytest.mark.parametrize("seed", range(4))
def test_like_stock_by_chance(seed):
    """Same validity, same error, same strides in eager and fake, values near PyTorch's in f64: 250 requests a seed."""
    rng = random.Random(seed)
    outcomes = {True: 0, False: 0}
    for _ in range(250):
        (q, k, v, mask), options = request_by_chance(rng)
        own = stock(q, k, v, mask, **options)
        wide = stock(q.double(), k.double(), v.double(), mask if mask is None or mask.dtype == torch.bool else mask.double(), **options)
        valid = not isinstance(own, Exception)
        if valid and mask is not None and options["is_causal"]:
            continue  # torch 2.6's flash takes both
        outcomes[valid] += 1
        if not valid:
            with served(0, invalid_request=1), pytest.raises(type(own)) as got:
                sdpa(q, k, v, mask, **options)
            assert str(got.value) == str(own)
            continue
        if 0 in (q.numel(), k.numel(), v.numel()) and (q.shape[:-2] != own.shape[:-2] or not fits(q, k, v, mask, options)):
            with served(0, empty_input=1):
                assert torch.equal(sdpa(q, k, v, mask, **options), own)
            continue
        with served():
            out = sdpa(q, k, v, mask, **options)
            with FakeTensorMode() as mode:
                fake = [None if t is None else mode.from_tensor(t) for t in (q, k, v, mask)]
                traced = sdpa(*fake, **options)
        same_views(out, own)
        same_views(traced, own)
        rtol = {2: 4e-2, 4: 1e-5, 8: 1e-12}[q.dtype.itemsize]
        torch.testing.assert_close(out.double(), wide.nan_to_num(0.0), rtol=rtol, atol=rtol)
    assert min(outcomes.values()) > 10, outcomes
