"""`rapt.KVCache`: a random life of many sequences against a plain list of their keys, attention bit for bit that of whole tensors; and what it
refuses, with nothing changed."""

import threading

import numpy as np
import pytest
import rapt

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 8


class Numpy:
    name = "float32"

    def of(self, x):
        return x

    def equal(self, a, b):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()

    cat = staticmethod(np.concatenate)


class Torch:
    def __init__(self, name):
        import torch

        self.torch, self.name = torch, name

    def of(self, x):
        return self.torch.tensor(x).to(getattr(self.torch, self.name))

    def equal(self, a, b):
        return a.dtype == b.dtype and self.torch.equal(a, b)

    def cat(self, parts):
        return self.torch.cat(list(parts))


@pytest.fixture(params=["numpy", "float32", "bfloat16"])
def lib(request):
    if request.param == "numpy":
        return Numpy()
    pytest.importorskip("torch")
    return Torch(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(4)


def normal(lib, rng, *shape):
    return lib.of(rng.standard_normal(shape, dtype=np.float32))


class Model:
    """What a cache is held against: the keys and values of each sequence, one after another."""

    def __init__(self, lib, rng, page_size, **form):
        self.lib, self.rng = lib, rng
        self.cache = rapt.KVCache(24, page_size, KV_HEADS, DIM, head_dim_v=DIM_V, dtype=lib.name, **form)
        self.keys = {}

    def pick(self):
        return self.rng.choice(list(self.keys)).item()

    def step(self):
        action = self.rng.integers(10)
        if not self.keys or action == 0:
            self.keys[self.cache.new_sequence()] = []
        elif action < 6:
            self.append(self.pick(), int(self.rng.integers(1, 9)))
        elif action == 6:
            source = self.pick()
            self.keys[self.cache.fork(source)] = list(self.keys[source])
        elif action == 7:
            sequence = self.pick()
            length = int(self.rng.integers(self.cache.length(sequence) + 1))
            self.cache.truncate(sequence, length)
            self.keys[sequence] = self.first(sequence, length)
        elif action == 8 and len(self.keys) > 2:
            sequence = self.pick()
            self.cache.free(sequence)
            del self.keys[sequence]
        else:
            self.check()

    def first(self, sequence, length):
        if not length:
            return []
        k, v = self.whole(sequence)
        return [(k[:length], v[:length])]

    def whole(self, sequence):
        return [self.lib.cat(parts) for parts in zip(*self.keys[sequence], strict=True)]

    def append(self, sequence, new):
        k, v = normal(self.lib, self.rng, new, KV_HEADS, DIM), normal(self.lib, self.rng, new, KV_HEADS, DIM_V)
        before = self.cache.length(sequence), self.cache.free_pages
        try:
            self.cache.append(sequence, k, v)
        except rapt.DeviceError as error:
            assert "pages" in str(error) and (self.cache.length(sequence), self.cache.free_pages) == before
            return
        self.keys[sequence].append((k, v))

    def check(self):
        ids = list(self.keys)
        q_len = int(self.rng.integers(1, 4))
        q = normal(self.lib, self.rng, len(ids), q_len, HEADS, DIM)
        out, lse = self.cache.attention(q, ids, causal=True, return_lse=True)
        for n, sequence in enumerate(ids):
            assert self.cache.length(sequence) == sum(len(k) for k, _ in self.keys[sequence])
            if not self.keys[sequence]:
                assert not out[n].any()
                continue
            one, one_lse = rapt.attention(q[n], *self.whole(sequence), layout="bshd", causal="bottom_right", return_lse=True)
            assert self.lib.equal(out[n], one) and self.lib.equal(lse[n], one_lse)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_random_life_of_sequences_has_the_bits_of_whole_tensors(lib, rng, page_size):
    model = Model(lib, rng, page_size)
    for _ in range(300):
        model.step()
    for sequence in model.keys:
        model.cache.free(sequence)
    assert model.cache.free_pages == model.cache.num_pages == 24


@pytest.mark.parametrize(("format", "how"), [("int8", {}), ("mxfp8", {}), ("int4", {"granularity": "block", "block_size": 8}), (("e4m3fn", None), {})])
def test_codes_have_the_error_of_quantizing_once(rng, format, how):
    cache = rapt.KVCache(8, 4, KV_HEADS, DIM, format=format, **how)
    sequence = cache.new_sequence()
    keys, values = normal(Numpy(), rng, 19, KV_HEADS, DIM), normal(Numpy(), rng, 19, KV_HEADS, DIM)
    for n in range(19):
        cache.append(sequence, keys[n : n + 1], values[n : n + 1])
    q = normal(Numpy(), rng, 1, 1, HEADS, DIM)
    formats = format if isinstance(format, tuple) else (format, format)
    scheme = how or ({} if format == "mxfp8" else {"granularity": "token"})
    whole = [x[None] if name is None else rapt.quantize(x[None], name, **scheme) for x, name in zip((keys, values), formats, strict=True)]
    assert cache.attention(q, [sequence]).tobytes() == rapt.attention(q, *whole, layout="bshd").tobytes()


def test_nvfp4_has_the_codes_of_its_global_scale(rng):
    keys = normal(Numpy(), rng, 19, KV_HEADS, 32)
    at_once = rapt.quantize(keys[None], "nvfp4")
    cache = rapt.KVCache(8, 4, KV_HEADS, 32, format="nvfp4", global_scale=at_once.global_scale)
    sequence = cache.new_sequence()
    for n in range(19):
        cache.append(sequence, keys[n : n + 1], keys[n : n + 1])
    q = normal(Numpy(), rng, 1, 1, HEADS, 32)
    assert cache.attention(q, [sequence]).tobytes() == rapt.attention(q, at_once, at_once, layout="bshd").tobytes()
    with pytest.raises(rapt.NumberError, match="beyond the largest"):
        cache.append(sequence, 2 * keys[:8], keys[:8])
    assert cache.length(sequence) == 19


def test_several_sequences_are_appended_to_at_once_or_none_is(rng):
    cache = rapt.KVCache(3, 4, KV_HEADS, DIM)
    ids = [cache.new_sequence() for _ in range(3)]
    k, v = (normal(Numpy(), rng, 3, 4, KV_HEADS, DIM) for _ in range(2))
    cache.append(ids, k, v)
    assert [cache.length(id) for id in ids] == [4, 4, 4] and cache.free_pages == 0
    with pytest.raises(rapt.DeviceError, match="pages.*Mend: `free`"):
        cache.append(ids, k, v)
    assert [cache.length(id) for id in ids] == [4, 4, 4]
    assert sorted(sum(cache.page_table(ids), [])) == [0, 1, 2]


def test_refusals_change_nothing(rng):
    cache = rapt.KVCache(4, 4, KV_HEADS, DIM, format="int8")
    sequence, other = cache.new_sequence(), cache.new_sequence()
    k = v = normal(Numpy(), rng, 3, KV_HEADS, DIM)
    cache.append(sequence, k, v)
    cache.free(other)
    q = normal(Numpy(), rng, 1, 1, HEADS, DIM)
    expected = cache.attention(q, [sequence])
    assert cache.attention(q, [sequence], compute="exact").tobytes() == expected.tobytes()
    plan = cache.explain(q, [sequence])
    assert (plan.sequences, plan.kernels) == (1, ["decode"]) and "k codes" in str(plan)
    nan = k.copy()
    nan[1, 0, 3] = np.nan
    for call, error, says in [
        (lambda: cache.append(other, k, v), rapt.IndexRangeError, "Mend: an id"),
        (lambda: cache.append(sequence, k[:, :1], v), rapt.ShapeError, "k has num_kv_heads 1"),
        (lambda: cache.append(sequence, k, v[:2]), rapt.ShapeError, "v has new keys 2"),
        (lambda: cache.append(sequence, nan, v), rapt.NumberError, "NaN"),
        (lambda: cache.append(sequence, k.astype(np.int32), v), rapt.UnsupportedDtypeError, "int32"),
        (lambda: cache.append([sequence, sequence], np.stack([k, k]), np.stack([v, v])), rapt.OptionError, "ids"),
        (lambda: cache.truncate(sequence, 4), rapt.OptionError, "length"),
        (lambda: cache.attention(q, [sequence, sequence]), rapt.ShapeError, "ids has sequences 2"),
        (lambda: cache.attention(q, sequence), rapt.OptionError, "ids"),
        (lambda: cache.attention(q, [sequence], causal="top_left"), rapt.OptionError, "last key"),
        (lambda: cache.attention(q, [sequence], compute="int8"), rapt.UnsupportedError, "a cache that grows.*attention_with_kvcache"),
        (lambda: cache.attention(q, [sequence], compute="fp8"), rapt.UnsupportedError, "fp8"),
        (lambda: cache.attention(q, [sequence], compute="int4"), rapt.OptionError, "compute"),
        (lambda: cache.fork(True), rapt.OptionError, "id"),
        (lambda: rapt.KVCache(0, 4, KV_HEADS, DIM), rapt.OptionError, "num_pages"),
        (lambda: rapt.KVCache(4, 4, KV_HEADS, DIM, dtype="int8"), rapt.UnsupportedDtypeError, "int8"),
        (lambda: rapt.KVCache(4, 4, KV_HEADS, DIM, format="nvfp4"), rapt.UnsupportedDtypeError, "k_global_scale"),
        (lambda: rapt.KVCache(4, 4, KV_HEADS, DIM, format="int8", global_scale=1.0), rapt.OptionError, "k_global_scale"),
        (lambda: rapt.KVCache(4, 4, KV_HEADS, DIM, format="nvfp4", global_scale=(1.0, 0.0)), rapt.NumberError, "scale"),
        (lambda: rapt.KVCache(4, 4, KV_HEADS, DIM, device="cuda"), rapt.OptionError, "host memory"),
    ]:
        with pytest.raises(error, match=says):
            call()
    assert cache.length(sequence) == 3 and cache.attention(q, [sequence]).tobytes() == expected.tobytes()


def test_threads_append_to_their_own_sequences_while_others_attend(rng):
    cache = rapt.KVCache(64, 4, KV_HEADS, DIM)
    k = normal(Numpy(), rng, 1, KV_HEADS, DIM)
    q = normal(Numpy(), rng, 1, 1, HEADS, DIM)
    failures = []

    def live():
        try:
            sequence = cache.new_sequence()
            for n in range(50):
                cache.append(sequence, k, k)
                out = cache.attention(q, [sequence])
                np.testing.assert_allclose(out[0, 0], np.repeat(k[0], HEADS // KV_HEADS, 0), rtol=1e-6)
                assert cache.length(sequence) == n + 1
            cache.free(sequence)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=live) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures and cache.free_pages == 64


def test_it_says_what_it_is():
    assert repr(rapt.KVCache(4, 16, 2, 8, head_dim_v=4, format=("int8", None))) == (
        "rapt.KVCache of 4 pages of 16 keys, 4 free: k int8 [2, 8], v float32 [2, 4]"
    )
