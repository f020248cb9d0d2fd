"""Multi-head latent attention: a key has 576 numbers, its value is the first 512 of them in the same memory, and many query heads share one
head of keys. Against the f64 reference, and the bits of keys and values that lie apart."""

import numpy as np
import pytest
import rapt
from reference import assert_close, assert_lse_close, flash_rounded, random, reference, to_f64

DIM, DIM_V, SCALE = 576, 512, 192**-0.5


def bhsd(x):
    return np.ascontiguousarray(np.swapaxes(x, 1, 2))


@pytest.fixture
def rng():
    return np.random.default_rng(21)


class Latent:
    """A latent cache of sequences of these lengths, in one tensor or in pages, with NaN where no key lies."""

    def __init__(self, rng, lengths, dtype, page_size=None, room=400):
        self.rng, self.dtype, self.page_size = rng, dtype, page_size
        self.lengths = np.array(lengths, np.int32)
        batch = len(lengths)
        blocks, rows, self.table = batch, room, None
        if page_size is not None:
            entries = -(-room // page_size)
            blocks, rows = batch * entries + 2, page_size
            self.table = rng.permutation(blocks)[: batch * entries].reshape(batch, entries).astype(np.int32)
        self.cache = np.full((blocks, rows, 1, DIM), np.nan, np.float32).astype(random(rng, (1,), dtype).dtype)
        self.keys = [random(rng, (n, 1, DIM), dtype) for n in lengths]
        for b, keys in enumerate(self.keys):
            for j, key in enumerate(keys):
                self.cache[self.place(b, j)] = key

    def place(self, b, j):
        return (b, j) if self.table is None else (self.table[b, j // self.page_size], j % self.page_size)

    def call(self, q, k=None, v=None, **options):
        v_cache = options.pop("v_cache", self.cache[..., :DIM_V])
        return rapt.attention_with_kvcache(
            q, self.cache, v_cache, k, v, cache_seqlens=self.lengths, page_table=self.table, scale=SCALE, return_lse=True, **options
        )

    def check(self, q, out, lse, causal=None):
        for b, keys in enumerate(self.keys):
            one = bhsd(q[b][None]), bhsd(keys[None]), bhsd(keys[None, ..., :DIM_V])
            expected, expected_lse = reference(*one, scale=SCALE, causal=causal)
            peer = flash_rounded(*one, scale=SCALE, causal=causal)
            assert_close(bhsd(out[b][None]), expected, self.dtype, [peer.astype(q.dtype)])
            assert_lse_close(lse[b][None], expected_lse, self.dtype)


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads, q_len", [(16, 1), (128, 1), (16, 4), (4, 2), (64, 3)])
def test_a_latent_cache_lies_within_the_tolerance(rng, heads, q_len, dtype, page_size):
    cache = Latent(rng, [300, 37, q_len], dtype, page_size)
    q = random(rng, (3, q_len, heads, DIM), dtype)
    out, lse = cache.call(q, causal="bottom_right")
    assert out.shape == (3, q_len, heads, DIM_V)
    cache.check(q, out, lse, "bottom_right")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 8, 16, 128])
def test_values_in_the_keys_have_the_bits_of_values_of_their_own(rng, heads, dtype):
    k = random(rng, (2, 1500, 1, DIM), dtype)
    q = random(rng, (2, 1, heads, DIM), dtype)
    options = {"layout": "bshd", "scale": SCALE, "return_lse": True}
    within, apart = (rapt.attention(q, k, v, **options) for v in (k[..., :DIM_V], k[..., :DIM_V].copy()))
    assert [x.tobytes() for x in within] == [x.tobytes() for x in apart]
    one = bhsd(q), bhsd(k), bhsd(k[..., :DIM_V])
    expected, expected_lse = reference(*one, scale=SCALE)
    assert_close(bhsd(within[0]), expected, dtype, [flash_rounded(*one, scale=SCALE).astype(q.dtype)])
    assert_lse_close(within[1], expected_lse, dtype)


@pytest.mark.parametrize("heads", [8, 16])
def test_chunks_of_wide_keys_are_short_enough_to_be_read_twice_from_a_cache(rng, heads):
    k = random(rng, (1, 4096, 1, DIM), "float32")
    plan = rapt.explain(random(rng, (1, 1, heads, DIM), "float32"), k, k[..., :DIM_V], layout="bshd")
    assert plan.kernel == ("decode" if heads == 8 else "forward")
    assert plan.block_n * DIM * 4 <= 1 << 20


@pytest.mark.parametrize("page_size", [None, 4, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_latent_row_is_written_once_whether_values_are_given_or_not(rng, dtype, page_size):
    caches = [Latent(np.random.default_rng(3), [21, 0, 64], dtype, page_size) for _ in range(2)]
    for new in (7, 1, 1):
        k = random(rng, (3, new, 1, DIM), dtype)
        q = random(rng, (3, new, 16, DIM), dtype)
        results = [cache.call(q, k, v, causal=True) for cache, v in zip(caches, (k[..., :DIM_V], None), strict=True)]
        for cache in caches:
            cache.lengths += new
            cache.keys = [np.concatenate(parts) for parts in zip(cache.keys, k, strict=True)]
        assert [x.tobytes() for x in results[0]] == [x.tobytes() for x in results[1]]
        assert caches[0].cache.tobytes() == caches[1].cache.tobytes()
        for b, keys in enumerate(caches[0].keys):
            assert all(caches[0].cache[caches[0].place(b, j)].tobytes() == key.tobytes() for j, key in enumerate(keys))
        caches[0].check(q, *results[0], "bottom_right")


def test_torch_caches_take_new_latent_rows(rng):
    torch = pytest.importorskip("torch")
    cache = torch.full((5, 16, 1, DIM), float("nan"), dtype=torch.bfloat16)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    keys = torch.from_numpy(rng.standard_normal((1, 20, 1, DIM), dtype=np.float32)).bfloat16()
    q = torch.from_numpy(rng.standard_normal((1, 20, 16, DIM), dtype=np.float32)).bfloat16()
    for at in range(20):
        k = keys[:, at : at + 1]
        out = rapt.attention_with_kvcache(
            q[:, at : at + 1], cache, cache[..., :DIM_V], k, k[..., :DIM_V], cache_seqlens=at, page_table=table, scale=SCALE
        )
    assert torch.equal(torch.cat([cache[3], cache[1, :4]]), keys[0])
    one = rapt.attention(q[:, -1:], keys, keys[..., :DIM_V], layout="bshd", scale=SCALE)
    assert torch.equal(out, one)


@pytest.mark.parametrize("granularity, block_size", [("token", None), ("block", 64)])
@pytest.mark.parametrize("format", ["int8", "e4m3fn", "int4"])
def test_a_latent_cache_of_codes_takes_new_rows(rng, format, granularity, block_size):
    scheme = {"granularity": granularity} | ({"block_size": block_size} if block_size else {})
    first, k = (rng.standard_normal((2, n, 1, DIM), dtype=np.float32) for n in (40, 1))
    cache = rapt.quantize(np.concatenate([first, np.zeros((2, 8, 1, DIM), np.float32)], axis=1), format, **scheme)
    each = DIM // cache.codes.shape[-1]
    scale = cache.scale if granularity == "token" else cache.scale[..., : DIM_V // block_size]
    values = rapt.Quantized(
        cache.codes[..., : DIM_V // each], scale, format=format, granularity=granularity, block_size=block_size, shape=(2, 48, 1, DIM_V)
    )
    q = rng.standard_normal((2, 1, 16, DIM), dtype=np.float32)
    out = rapt.attention_with_kvcache(q, cache, values, k, k[..., :DIM_V], cache_seqlens=40, scale=SCALE)
    whole = rapt.quantize(np.concatenate([first, k], axis=1), format, **scheme)
    assert cache.codes[:, :41].tobytes() == whole.codes.tobytes() and cache.scale[:, :41].tobytes() == whole.scale.tobytes()
    keys = rapt.dequantize(whole)
    one = bhsd(q), bhsd(keys), bhsd(keys[..., :DIM_V])
    expected, _ = reference(*one, scale=SCALE)
    assert_close(bhsd(out), expected, "float32", [flash_rounded(*one, scale=SCALE).astype(np.float32)])


def test_values_that_the_new_keys_do_not_hold_are_refused_and_nothing_is_written(rng):
    cache = Latent(rng, [3], "float32")
    q, k = random(rng, (1, 1, 16, DIM)), random(rng, (1, 1, 1, DIM))
    before = cache.cache.tobytes()
    shifted = {"v_cache": cache.cache[..., DIM - DIM_V :]}
    for v, options in ((k[..., :DIM_V].copy(), {}), (k[..., DIM - DIM_V :], {}), (k[..., :DIM_V], shifted)):
        with pytest.raises(rapt.LayoutError, match="k_cache shares memory with v_cache"):
            cache.call(q, k, v, **options)
    with pytest.raises(rapt.ShapeError, match="head_dim"):
        cache.call(q, k, k[..., : DIM_V - 1])
    assert cache.cache.tobytes() == before
    cache.call(q, k, k[..., :DIM_V])
    assert cache.cache.tobytes() != before
    assert np.isfinite(to_f64(cache.cache[0, :4])).all()
