"""The scenarios that broke others, as tests: 16-bit values, strides and masks. numpy and torch, against the reference."""

import ml_dtypes
import numpy as np
import pytest
import rapt
from reference import assert_close, assert_lse_close, random, reference, to_f64, to_torch, torch_peers

torch = pytest.importorskip("torch")

SIXTEEN = ["float32", "float16", "bfloat16"]
LIBRARIES = ["numpy", "torch"]


def tensor_of(library, x):
    """A numpy array, or the torch tensor of the same memory layout and values."""
    if library == "numpy" or x is None:
        return x
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def bits(x):
    """The bytes of the elements, row by row."""
    if isinstance(x, torch.Tensor):
        x = x.contiguous()
        return x.view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(x).tobytes()


def name_of(x):
    return str(x.dtype).removeprefix("torch.")


# --- 16-bit values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_dtype_and_value_are_kept(rng, library, dtype):
    q, k, v = (random(rng, (2, 2, 4, 4), dtype) for _ in range(3))
    out = rapt.attention(*(tensor_of(library, x) for x in (q, k, v)))
    assert name_of(out) == dtype
    assert_close(out, reference(q, k, v)[0], dtype, torch_peers(q, k, v))


@pytest.mark.parametrize("library", LIBRARIES)
def test_bfloat16_contiguous_and_permuted(rng, library):
    q, k, v = (random(rng, (2, 4, 8, 16), "bfloat16") for _ in range(3))
    expected = reference(q, k, v)[0]
    contiguous = rapt.attention(*(tensor_of(library, x) for x in (q, k, v)))
    permuted = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    assert permuted[0].strides != q.strides
    out = rapt.attention(*(tensor_of(library, x) for x in permuted))
    assert bits(out) == bits(contiguous) and name_of(out) == "bfloat16"
    assert_close(out, expected, "bfloat16", torch_peers(q, k, v))


@pytest.mark.parametrize("library", LIBRARIES)
def test_exact_values_stay_finite_bounded_and_bfloat16(rng, library):
    values = np.array([1, 0.5, 0.25, 1.5, -1, 0], ml_dtypes.bfloat16)
    q, k, v = (rng.choice(values, (2, 4, 8, 16)) for _ in range(3))
    out = rapt.attention(*(tensor_of(library, x) for x in (q, k, v)))
    assert name_of(out) == "bfloat16"
    got = to_f64(out)
    assert np.isfinite(got).all() and got.min() >= -1 and got.max() <= 1.5
    assert_close(out, reference(q, k, v)[0], "bfloat16", torch_peers(q, k, v))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [*SIXTEEN, "float64"])
def test_one_key_gives_its_value_exactly(library, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q, k, v = (np.array(x, kind).reshape(1, 1, 1, 2) for x in ([1, 0.5], [0.5, 1], [0.25, 0.75]))
    out = rapt.attention(*(tensor_of(library, x) for x in (q, k, v)))
    assert to_f64(out).tolist() == [[[[0.25, 0.75]]]]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_weights_that_are_not_one(library, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q = np.array([[1, 0.5]], kind).reshape(1, 1, 1, 2)
    k = np.array([[0.5, 1], [1, 0.25], [-1, 1.5]], kind).reshape(1, 1, 3, 2)
    v = np.array([[0.25, 0.75], [1, 0], [0.5, -1]], kind).reshape(1, 1, 3, 2)
    s = np.array([1.0, 1.125, -0.25]) / np.sqrt(2)
    p = np.exp(s) / np.exp(s).sum()
    assert p.max() < 0.5
    expected = p @ v.astype(float).reshape(3, 2)
    np.testing.assert_allclose(reference(q, k, v)[0].ravel(), expected, rtol=1e-14)
    out = rapt.attention(*(tensor_of(library, x) for x in (q, k, v)))
    assert_close(out, expected.reshape(1, 1, 1, 2), dtype, torch_peers(q, k, v))


@pytest.mark.parametrize("dtype", ["float64", *SIXTEEN])
def test_bytes_round_trip_through_both_libraries(rng, dtype):
    """Attention to the one key of each row is the identity on v: its bytes come back, every pattern of them."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    words = rng.integers(0, 256, (64, 1, 1, 16 * kind.itemsize), np.uint8)
    v = words.view(kind)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the patterns
        finite = np.isfinite(v.astype(np.float64))
    v = np.where(finite, v, np.ones((), kind))
    zeros = np.zeros_like(v)
    out = rapt.attention(zeros, zeros, v)
    # -0 becomes 0: a sum starts at 0. Every other pattern is as it was.
    assert bits(np.where(out == 0, zeros, out)) == bits(np.where(v == 0, zeros, v))
    assert bits(rapt.attention(*(tensor_of("torch", x) for x in (zeros, zeros, v)))) == bits(out)
    if dtype == "bfloat16":
        with pytest.raises(rapt.UnsupportedDtypeError, match="uint16"):
            rapt.attention(*(x.view(np.uint16) for x in (zeros, zeros, v)))
        assert bits(to_torch(v)) == bits(v)


# --- strides -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_permuted_77_is_read_in_place(rng, library, dtype):
    bhsd = [tensor_of(library, random(rng, (1, 77, 12, 64), dtype)) for _ in range(3)]
    turn = (lambda x: x.permute(0, 2, 1, 3)) if library == "torch" else (lambda x: x.transpose(0, 2, 1, 3))
    permuted = [turn(x) for x in bhsd]
    steps = permuted[0].stride() if library == "torch" else tuple(s // permuted[0].itemsize for s in permuted[0].strides)
    assert steps == (59136, 64, 768, 1)
    copies = [x.contiguous() if library == "torch" else np.ascontiguousarray(x) for x in permuted]
    before = [bits(x) for x in permuted]
    out = rapt.attention(*permuted, causal=True)
    assert bits(out) == bits(rapt.attention(*copies, causal=True))
    assert [bits(x) for x in permuted] == before
    expected = reference(*map(to_f64, permuted), causal=True)[0]
    assert_close(out, expected, dtype, torch_peers(*copies, causal=True))
    # The other way round: [1,77,12,64] seen through a permuted [1,12,77,64], read as bshd.
    seen = [turn(x) for x in copies]
    out_bshd = rapt.attention(*seen, causal=True, layout="bshd")
    assert tuple(out_bshd.shape) == (1, 77, 12, 64)
    assert bits(turn(out_bshd)) == bits(out)


def views(rng, dtype):
    """(name, q, k, v) as torch views of every kind that breaks naive offsets."""

    def tensor(*shape):
        return to_torch(random(rng, shape, dtype))

    b, h, s, d = 2, 3, 21, 16
    yield "transpose(1, 2)", *(tensor(b, s, h, d).transpose(1, 2) for _ in range(3))
    yield "view after permute", *(tensor(h, b, s, d).permute(1, 0, 2, 3).view(b, h, s, 2, d // 2)[..., 1, :] for _ in range(3))
    yield "half slice", *(tensor(b, h, s, 2 * d)[..., d:] for _ in range(3))
    yield "step 2", *(tensor(b, h, 2 * s, 2 * d)[:, :, ::2, ::2] for _ in range(3))
    yield "narrow", *(tensor(b, h, s + 9, d).narrow(2, 5, s) for _ in range(3))
    yield "permute(0, 3, 2, 1)", *(tensor(b, d, s, h).permute(0, 3, 2, 1) for _ in range(3))
    yield "packed qkv", *tensor(b, s, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)
    yield "chunks of one projection", *(x.unflatten(-1, (h, d)).transpose(1, 2) for x in tensor(b, s, 3 * h * d).chunk(3, -1))
    yield "expand", tensor(b, h, s, d), *(tensor(b, 1, s, d).expand(b, h, s, d) for _ in range(2))
    yield "expanded keys", tensor(b, h, s, d), *(tensor(b, h, 1, d).expand(b, h, s, d) for _ in range(2))
    storage = tensor(b * h * s * d + 4 * d)
    yield "overlapping", *(storage[i * d :].as_strided((b, h, s, d), (7, 5, 3, 1)) for i in range(3))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_every_view_equals_its_contiguous_copy_bit_for_bit(rng, dtype):
    for name, q, k, v in views(rng, dtype):
        before = [bits(x) for x in (q, k, v)]
        for options in [{}, {"causal": True}]:
            out, lse = rapt.attention(q, k, v, return_lse=True, **options)
            copies = [x.contiguous() for x in (q, k, v)]
            same, same_lse = rapt.attention(*copies, return_lse=True, **options)
            assert bits(out) == bits(same) and bits(lse) == bits(same_lse), name
            expected, expected_lse = reference(*map(to_f64, (q, k, v)), **options)
            assert_close(out, expected, dtype, torch_peers(*copies, **options))
            assert_lse_close(lse, expected_lse, dtype)
        assert [bits(x) for x in (q, k, v)] == before, name


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_negative_strides_from_numpy(rng, dtype):
    whole = [random(rng, (2, 3, 21, 16), dtype) for _ in range(3)]
    for turn in [np.s_[:, :, ::-1], np.s_[..., ::-1], np.s_[::-1, ::-1, ::-2, ::-2], np.s_[:, ::-1, 3:, :]]:
        q, k, v = (x[turn] for x in whole)
        out = rapt.attention(q, k, v, causal="bottom_right")
        copies = [np.ascontiguousarray(x) for x in (q, k, v)]
        assert bits(out) == bits(rapt.attention(*copies, causal="bottom_right"))
        peers = torch_peers(*copies, causal=True)  # square: both alignments are one
        assert_close(out, reference(q, k, v, causal="bottom_right")[0], dtype, peers)


@pytest.mark.parametrize("library", LIBRARIES)
def test_fifty_random_rounds_leave_inputs_alone(rng, library):
    dtypes = SIXTEEN
    for turn in range(50):
        seq, heads = int(rng.integers(64, 96)), int(rng.integers(8, 16))
        dtype = dtypes[turn % 3]
        arrays = [random(rng, (1, seq, heads, 8), dtype) for _ in range(3)]
        permuted = [x.transpose(0, 2, 1, 3) for x in arrays]
        before = [bits(x) for x in arrays]
        out = rapt.attention(*(tensor_of(library, x) for x in permuted))
        assert [bits(x) for x in arrays] == before
        copies = [np.ascontiguousarray(x) for x in permuted]
        assert bits(out) == bits(rapt.attention(*copies))
        assert_close(out, reference(*permuted)[0], dtype, torch_peers(*copies))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_guard_bands_stay_intact(rng, library, dtype):
    band, shape = 256, (1, 3, 29, 24)
    n = int(np.prod(shape))
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def banded(fill):
        storage = np.full(n + 2 * band, np.nan, kind)
        inner = storage[band : band + n].reshape(shape)
        inner[...] = fill
        return storage, inner

    inputs = [banded(random(rng, shape, dtype)) for _ in range(3)]
    out_storage, out = banded(np.full(shape, np.nan, kind))
    before = [storage.tobytes() for storage, _ in inputs]
    rapt.attention(*(tensor_of(library, x) for _, x in inputs), out=tensor_of(library, out), causal=True)
    assert [storage.tobytes() for storage, _ in inputs] == before
    assert np.isnan(out_storage[:band].astype(float)).all() and np.isnan(out_storage[-band:].astype(float)).all()
    arrays = [x for _, x in inputs]
    assert_close(out, reference(*arrays, causal=True)[0], dtype, torch_peers(*arrays, causal=True))


def test_ten_live_problems_at_once(rng):
    problems = [[random(rng, (1, 2, 16 + n, 8), SIXTEEN[n % 3]) for _ in range(3)] for n in range(10)]
    results = [rapt.attention(*(tensor_of(LIBRARIES[n % 2], x) for x in p)) for n, p in enumerate(problems)]
    for p, out in zip(problems, results):
        assert_close(out, reference(*p)[0], p[0].dtype.name, torch_peers(*p))


# --- masks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float64", *SIXTEEN])
def test_a_row_at_the_lowest_finite_value_gives_the_mean(rng, library, dtype):
    q, k, v = (random(rng, (1, 2, 5, 8), dtype) for _ in range(3))
    kind = q.dtype
    lowest = (np.finfo if dtype != "bfloat16" else ml_dtypes.finfo)(kind).min
    mask = np.zeros((5, 5), kind)
    mask[2] = lowest
    out, lse = rapt.attention(*(tensor_of(library, x) for x in (q, k, v)), mask=tensor_of(library, mask), return_lse=True)
    # s + lowest is lowest again in every dtype whose lowest swallows s; in f64 the reference says so too.
    mean = v.astype(np.float64).mean(axis=2)
    bound = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    if dtype != "float16":
        np.testing.assert_allclose(to_f64(out)[:, :, 2], mean, atol=bound)
    expected, expected_lse = reference(q, k, v, mask=mask)
    if dtype in ("float64", "float16"):
        assert_close(out, expected, dtype, torch_peers(q, k, v, mask=mask))
    rows = [0, 1, 3, 4]
    assert_close(to_f64(out)[:, :, rows], expected[:, :, rows], dtype, [x[:, :, rows] for x in torch_peers(q, k, v, mask=mask)])
    assert_lse_close(to_f64(lse)[:, :, rows], expected_lse[:, :, rows], dtype)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float64", *SIXTEEN])
def test_a_masked_row_gives_zeros_and_garbage_never_leaks(rng, library, dtype):
    q, k, v = random(rng, (1, 2, 6, 8), dtype), random(rng, (1, 2, 9, 8), dtype), random(rng, (1, 2, 9, 8), dtype)
    keep = rng.random((6, 9)) < 0.6
    keep[3] = False
    keep[:, [1, 7]] = False
    clean = rapt.attention(*(tensor_of(library, x) for x in (q, k, v)), mask=tensor_of(library, keep))
    assert not to_f64(clean)[:, :, 3].any()
    assert_close(clean, reference(q, k, v, mask=keep)[0], dtype, torch_peers(q, k, v, mask=keep))
    for garbage in (np.nan, np.inf, -np.inf):
        k2, v2 = k.copy(), v.copy()
        k2[:, :, [1, 7]] = garbage
        v2[:, :, [1, 7]] = garbage
        out = rapt.attention(*(tensor_of(library, x) for x in (q, k2, v2)), mask=tensor_of(library, keep))
        assert bits(out) == bits(clean)
    q2 = q.copy()
    q2[:, :, 3] = np.nan
    out, lse = rapt.attention(*(tensor_of(library, x) for x in (q2, k, v)), mask=tensor_of(library, keep), return_lse=True)
    assert bits(out) == bits(clean) and (to_f64(lse)[:, :, 3] == -np.inf).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_nan_reaches_the_rows_that_attend_it_and_no_other(rng, library):
    q, k, v = (random(rng, (1, 2, 40, 8)) for _ in range(3))
    v[0, 0, 17, 3] = np.nan
    k[0, 1, 30, 0] = np.nan
    out = to_f64(rapt.attention(*(tensor_of(library, x) for x in (q, k, v)), causal=True))
    expected, _ = reference(q, k, v, causal=True)
    np.testing.assert_array_equal(np.isnan(out).any(-1), np.isnan(expected).any(-1))
    assert not np.isnan(out[0, 0, :17]).any() and np.isnan(out[0, 1, 30:]).all()


# --- same inputs, same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", *SIXTEEN])
def test_same_bits_for_any_threads_and_any_neighbours(rng, dtype):
    q, k, v = (random(rng, (3, 4, 150, 32), dtype) for _ in range(3))
    whole = rapt.attention(q, k, v, causal=True)
    for threads in (1, 2, 5):
        with rapt.Context(threads=threads) as context:
            assert bits(context.attention(q, k, v, causal=True)) == bits(whole)
    for b in range(3):
        assert bits(rapt.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True)) == bits(whole[b : b + 1])
    assert bits(rapt.attention(*(tensor_of("torch", x) for x in (q, k, v)), causal=True)) == bits(whole)
