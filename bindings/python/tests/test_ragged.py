"""`rapt.varlen_attention` and `rapt.attention_with_kvcache`: bit for bit what `rapt.attention` gives for each sequence alone, against the f64
reference, in numpy and torch; and what they refuse, with nothing written."""

import gc

import numpy as np
import pytest
import rapt
from reference import assert_close, flash_rounded, reference

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 24, 16


class Numpy:
    bf16 = False

    def of(self, x):
        return np.array(x)

    def filled(self, shape, value):
        return np.full(shape, value, np.float32)

    def equal(self, a, b):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()

    def permuted(self, x):
        """The same elements with the heads before the rows in memory."""
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    cat = staticmethod(np.concatenate)


class Torch:
    def __init__(self, dtype="float32"):
        import torch

        self.torch, self.dtype = torch, getattr(torch, dtype)

    def of(self, x):
        x = self.torch.tensor(np.array(x))
        return x.to(self.dtype) if x.is_floating_point() else x

    def filled(self, shape, value):
        return self.torch.full(shape, value, dtype=self.dtype)

    def equal(self, a, b):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        bits = {2: self.torch.int16, 4: self.torch.int32, 8: self.torch.int64}[a.element_size()]
        return self.torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))

    def permuted(self, x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def cat(self, parts):
        return self.torch.cat(list(parts))


@pytest.fixture(params=["numpy", "torch", "bfloat16", "float64"])
def lib(request):
    if request.param == "numpy":
        return Numpy()
    pytest.importorskip("torch")
    return Torch("float32" if request.param == "torch" else request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def offsets(lengths):
    return np.cumsum([0, *lengths], dtype=np.int32)


def packed(lib, rng, q_lens, kv_lens):
    def normal(n, heads, dim):
        return lib.of(rng.standard_normal((n, heads, dim), dtype=np.float32))

    q = normal(sum(q_lens), HEADS, DIM)
    return q, normal(sum(kv_lens), KV_HEADS, DIM), normal(sum(kv_lens), KV_HEADS, DIM_V)


Q_LENS, KV_LENS = [3, 1, 0, 40, 2, 7], [9, 300, 5, 40, 0, 600]
OPTIONS = [
    {},
    {"causal": True},
    {"causal": "bottom_right"},
    {"window": (5, 2)},
    {"causal": "bottom_right", "window": (16, None), "softcap": 2.0, "scale": -0.3},
    {"sinks": True},
    {"alibi_slopes": True, "causal": "bottom_right"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_each_sequence_has_the_bits_of_a_call_alone(lib, rng, options):
    q, k, v = packed(lib, rng, Q_LENS, KV_LENS)
    of_q, of_kv = offsets(Q_LENS), offsets(KV_LENS)
    vectors = {name: lib.of(rng.standard_normal(HEADS, dtype=np.float32)) for name in ("sinks", "alibi_slopes") if name in options}
    options = options | vectors
    out, lse = rapt.varlen_attention(q, k, v, lib.of(of_q), lib.of(of_kv), return_lse=True, **options)
    assert tuple(out.shape) == (sum(Q_LENS), HEADS, DIM_V) and tuple(lse.shape) == (HEADS, sum(Q_LENS))
    for n in range(len(Q_LENS)):
        rows, keys = slice(of_q[n], of_q[n + 1]), slice(of_kv[n], of_kv[n + 1])
        one, one_lse = rapt.attention(q[rows], k[keys], v[keys], layout="bshd", return_lse=True, **options)
        assert lib.equal(out[rows], one), f"sequence {n}"
        assert lib.equal(lse[:, rows], one_lse), f"sequence {n}"


def test_a_ragged_batch_lies_within_the_tolerance_of_the_reference(rng):
    q, k, v = packed(Numpy(), rng, Q_LENS, KV_LENS)
    of_q, of_kv = offsets(Q_LENS), offsets(KV_LENS)
    out = rapt.varlen_attention(q, k, v, of_q, of_kv, causal="bottom_right")
    for n in range(len(Q_LENS)):
        rows, keys = slice(of_q[n], of_q[n + 1]), slice(of_kv[n], of_kv[n + 1])
        if rows.start == rows.stop or keys.start == keys.stop:
            assert not out[rows].any()
            continue
        one = [x.transpose(1, 0, 2)[None] for x in (q[rows], k[keys], v[keys])]
        expected, _ = reference(*one, causal="bottom_right")
        peer = flash_rounded(*one, causal="bottom_right")
        assert_close(out[rows].transpose(1, 0, 2)[None], expected, "float32", [peer])


def test_what_would_run_is_said_of_each_sequence(lib, rng):
    q, k, v = packed(lib, rng, Q_LENS, KV_LENS)
    of_q, of_kv = offsets(Q_LENS), offsets(KV_LENS)
    plan = rapt.explain_varlen(q, k, v, lib.of(of_q), lib.of(of_kv), causal="bottom_right")
    served = {n: part.kernel for sequences, part in plan.parts for n in sequences}
    assert plan.sequences == len(served) == len(Q_LENS) and sorted(plan.kernels) == sorted(set(served.values()))
    for n in range(len(Q_LENS)):
        rows, keys = slice(of_q[n], of_q[n + 1]), slice(of_kv[n], of_kv[n + 1])
        alone = rapt.explain(q[rows], k[keys], v[keys], layout="bshd", causal="bottom_right")
        assert served[n] == alone.kernel, f"sequence {n}"
    assert str(plan).startswith(f"sequences        {len(Q_LENS)}\n") and all(part.parts == [] for _, part in plan.parts)
    assert repr(plan) == f"<rapt.RaggedPlan of {len(Q_LENS)} sequences by {', '.join(plan.kernels)}>"
    of_q[1] = -1
    with pytest.raises(rapt.RaptError, match="cu_seqlens_q"):
        rapt.explain_varlen(q, k, v, lib.of(of_q), lib.of(of_kv))


def test_what_would_run_over_a_cache_is_said_and_nothing_is_written(lib, rng):
    cache = Cache(lib, rng, [5, 50, 0], 16)
    q, (k, v) = cache.normal((3, 1, HEADS, DIM)), (cache.normal((3, 2, KV_HEADS, dim)) for dim in (DIM, DIM_V))
    paged = {"cache_seqlens": lib.of(cache.lengths), "page_table": lib.of(cache.table)}
    before = lib.cat([cache.k]), lib.cat([cache.v])
    plan = rapt.explain_with_kvcache(q, cache.k, cache.v, k, v, **paged)
    assert (plan.sequences, plan.kernels) == (3, ["decode"])
    assert sorted(n for sequences, _ in plan.parts for n in sequences) == [0, 1, 2]
    assert lib.equal(cache.k, before[0]) and lib.equal(cache.v, before[1])
    with pytest.raises(rapt.RaptError, match="top_left"):
        rapt.explain_with_kvcache(q, cache.k, cache.v, causal="top_left", **paged)


def test_an_output_of_any_strides_is_written_and_nothing_beside_it(rng):
    q, k, v = packed(Numpy(), rng, [2, 3], [4, 5])
    wide = np.full((5, HEADS, 2 * DIM_V + 1), 7, np.float32)
    out = wide[:, :, 1::2]
    assert rapt.varlen_attention(q, k, v, offsets([2, 3]), offsets([4, 5]), out=out) is out
    assert (wide[:, :, ::2] == 7).all()
    assert (out == rapt.varlen_attention(q, k, v, offsets([2, 3]), offsets([4, 5]))).all()


def test_rows_of_no_sequence_are_zeros(lib, rng):
    """Before the first offset and behind the last: NaN there reaches nothing."""
    q, k, v = (lib.cat([lib.filled((2, *x.shape[1:]), np.nan), x, lib.filled((3, *x.shape[1:]), np.nan)]) for x in packed(lib, rng, [2, 3], [4, 5]))
    of_q, of_kv = offsets([2, 3]) + np.int32(2), offsets([4, 5]) + np.int32(2)
    out, lse = rapt.varlen_attention(q, k, v, lib.of(of_q), lib.of(of_kv), return_lse=True)
    inner, inner_lse = rapt.varlen_attention(q[2:7], k[2:11], v[2:11], lib.of(of_q - np.int32(2)), lib.of(of_kv - np.int32(2)), return_lse=True)
    assert lib.equal(out[2:7], inner) and lib.equal(lse[:, 2:7], inner_lse)
    assert not out[:2].any() and not out[7:].any() and (lse[:, :2] == -np.inf).all() and (lse[:, 7:] == -np.inf).all()
    assert rapt.explain_varlen(q, k, v, lib.of(of_q), lib.of(of_kv)).sequences == 2


def test_no_sequence_is_a_batch_too():
    none = np.zeros((0, HEADS, DIM), np.float32)
    out, lse = rapt.varlen_attention(none, none, none, np.zeros(1, np.int32), np.zeros(1, np.int32), return_lse=True)
    assert out.shape == (0, HEADS, DIM) and lse.shape == (HEADS, 0)


VARLEN_REFUSED = [
    ({"cu_seqlens_q": np.array([-1, 2, 5], np.int32)}, rapt.IndexRangeError, r"cu_seqlens_q\[0\] is -1.*numpy.cumsum"),
    ({"cu_seqlens_q": np.array([0, 6, 5], np.int32)}, rapt.IndexRangeError, r"cu_seqlens_q\[2\] is 5"),
    ({"cu_seqlens_q": np.array([0, 2, 6], np.int32)}, rapt.IndexRangeError, r"cu_seqlens_q\[2\] is 6; allowed: 5 at most"),
    ({"cu_seqlens_kv": np.array([0, -1, 9], np.int32)}, rapt.IndexRangeError, r"cu_seqlens_kv\[1\] is -1"),
    ({"cu_seqlens_kv": np.array([0, 9], np.int32)}, rapt.ShapeError, "cu_seqlens_kv with 3 offsets"),
    ({"cu_seqlens_kv": np.array([0, 4, 9])}, rapt.UnsupportedDtypeError, r"cu_seqlens_kv\.astype\(numpy\.int32\)"),
    ({"cu_seqlens_q": np.array([[0, 2, 5]], np.int32)}, rapt.ShapeError, "cu_seqlens_q has 2 dimensions"),
    ({"cu_seqlens_q": [0, 2, 5]}, rapt.KindError, "cu_seqlens_q is a"),
    ({"v": np.zeros((8, KV_HEADS, DIM_V), np.float32)}, rapt.ShapeError, "v has total_kv 8, k has 9"),
    ({"q": np.zeros((1, 5, HEADS, DIM), np.float32)}, rapt.ShapeError, "q has 4 dimensions"),
    ({"k": np.zeros((9, 3, DIM), np.float32), "v": np.zeros((9, 3, DIM_V), np.float32)}, rapt.ShapeError, "num_q_heads must be a multiple"),
    ({"k": np.zeros((9, KV_HEADS, DIM), np.float64)}, rapt.DtypeMismatchError, "k has dtype float64"),
    ({"causal": "left"}, rapt.OptionError, "causal"),
    ({"out": np.zeros((5, HEADS, DIM), np.float32)}, rapt.ShapeError, "out has shape"),
]


@pytest.mark.parametrize(("bad", "error", "says"), VARLEN_REFUSED, ids=lambda case: "+".join(case) if isinstance(case, dict) else "")
def test_a_bad_ragged_batch_is_refused_and_nothing_is_written(rng, bad, error, says):
    q, k, v = packed(Numpy(), rng, [2, 3], [4, 5])
    out = np.full((5, HEADS, DIM_V), 7, np.float32)
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets([2, 3]), "cu_seqlens_kv": offsets([4, 5]), "out": out}
    with pytest.raises(error, match=says):
        rapt.varlen_attention(**(call | bad))
    assert (out == 7).all()
    rapt.varlen_attention(**call)
    assert not (out == 7).any()


class Cache:
    """Keys and values of a batch in one tensor or in pages, in memory that holds NaN where no key lies."""

    def __init__(self, lib, rng, lengths, page_size=None, room=64, permuted=False):
        self.lib, self.rng, self.page_size = lib, rng, page_size
        self.lengths = np.array(lengths, np.int32)
        batch = len(lengths)
        blocks, rows = (batch, room) if page_size is None else (batch * room // page_size + 3, page_size)
        self.k, self.v = (lib.filled((blocks, rows, KV_HEADS, dim), np.nan) for dim in (DIM, DIM_V))
        if permuted:
            self.k, self.v = lib.permuted(self.k), lib.permuted(self.v)
        self.table = None
        if page_size is not None:
            self.table = rng.permutation(blocks)[: batch * room // page_size].reshape(batch, -1).astype(np.int32)
        self.keys = [([], []) for _ in lengths]
        for b, length in enumerate(lengths):
            for j in range(length):
                k, v = self.normal((KV_HEADS, DIM)), self.normal((KV_HEADS, DIM_V))
                block, row = (b, j) if self.table is None else (self.table[b, j // page_size], j % page_size)
                self.k[int(block), int(row)], self.v[int(block), int(row)] = k, v
                self.keep(b, k[None], v[None])

    def normal(self, shape):
        return self.lib.of(self.rng.standard_normal(shape, dtype=np.float32))

    def keep(self, b, k, v):
        self.keys[b][0].append(k)
        self.keys[b][1].append(v)

    def call(self, q, k=None, v=None, **options):
        table = {} if self.table is None else {"page_table": self.lib.of(self.table)}
        options = {"cache_seqlens": self.lib.of(self.lengths)} | table | options
        return rapt.attention_with_kvcache(q, self.k, self.v, k, v, **options)

    def alone(self, q, b, **options):
        k, v = (self.lib.cat(parts) for parts in self.keys[b])
        return rapt.attention(q[b], k, v, layout="bshd", return_lse=True, **options)


@pytest.mark.parametrize("permuted", [False, True], ids=["", "permuted"])
@pytest.mark.parametrize("page_size", [None, 1, 4, 16, 64])
@pytest.mark.parametrize("q_len", [1, 3, 16])
def test_steps_have_the_bits_of_whole_tensors(lib, rng, page_size, q_len, permuted):
    cache = Cache(lib, rng, [0, 5, 17], page_size, permuted=permuted)
    for _ in range(2 if q_len > 1 else 12):
        q, k, v = (cache.normal((3, q_len, heads, dim)) for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V)))
        out, lse = cache.call(q, k, v, causal=True, return_lse=True)
        cache.lengths += q_len
        for b in range(3):
            cache.keep(b, k[b], v[b])
            one, one_lse = cache.alone(q, b, causal="bottom_right")
            assert lib.equal(out[b], one) and lib.equal(lse[b], one_lse), f"sequence {b}, {cache.lengths[b]} keys"
    again = cache.call(q, causal="bottom_right")
    assert lib.equal(again, out), "the new keys lie in the cache"


@pytest.mark.parametrize("options", OPTIONS[3:], ids=lambda options: "-".join(options))
def test_options_count_from_the_last_key(rng, options):
    cache = Cache(Numpy(), rng, [3, 30, 50], 16)
    vectors = {name: rng.standard_normal(HEADS, dtype=np.float32) for name in ("sinks", "alibi_slopes") if name in options}
    options = options | vectors
    q = cache.normal((3, 1, HEADS, DIM))
    out = cache.call(q, **options)
    for b in range(3):
        one, _ = cache.alone(q, b, **(options | {"causal": "bottom_right"}))
        assert Numpy().equal(out[b], one)


def test_one_int_is_the_length_of_all_and_none_is_all_that_a_cache_holds(rng):
    cache = Cache(Numpy(), rng, [20, 20])
    q = cache.normal((2, 1, HEADS, DIM))
    whole = cache.call(q)
    assert (cache.call(q, cache_seqlens=20) == whole).all()
    full = rapt.attention_with_kvcache(q, cache.k[:, :20], cache.v[:, :20])
    assert (full == whole).all()


def test_keys_of_one_latent_vector_serve_as_values_too(rng):
    """Multi-head latent attention: 512 of 576 numbers of a key are its value, and many query heads share it."""
    heads, dim, dim_v, page = 16, 576, 512, 16
    latent = np.full((5, page, 1, dim), np.nan, np.float32)
    table = np.array([[3, 0, 4]], np.int32)
    keys = rng.standard_normal((33, 1, dim), dtype=np.float32)
    q = rng.standard_normal((1, 1, heads, dim), dtype=np.float32)
    for n, key in enumerate(keys):
        out = rapt.attention_with_kvcache(
            q, latent, latent[..., :dim_v], key[None, None], cache_seqlens=n, page_table=table, scale=0.1
        )
    one = rapt.attention(q, keys[None], keys[None, :, :, :dim_v], layout="bshd", scale=0.1)
    assert out.tobytes() == one.tobytes()


@pytest.mark.parametrize(("format", "granularity", "block_size"), [
    ("int8", "token", None), ("uint8", "token", None), ("e4m3fn", "token", None), ("e5m2", "block", 8), ("int8", "block", 4),
    ("int4", "token", None), ("int4", "block", 8), ("mxfp8", None, None), ("mxfp4", None, None), ("int8", "tensor", None),
])  # fmt: skip
def test_a_quantized_cache_in_pages_has_the_bits_of_its_keys_in_one_tensor(rng, format, granularity, block_size):
    page, lengths = 8, [5, 21]
    table = np.array([[4, 1, 6], [0, 5, 2]], np.int32)
    scheme = {"granularity": granularity} | ({"block_size": block_size} if block_size else {})
    pages = [rng.standard_normal((7, page, KV_HEADS, dim), dtype=np.float32) for dim in (DIM, DIM_V)]
    k, v = (rapt.quantize(x, format, **scheme) for x in pages)
    q = rng.standard_normal((2, 1, HEADS, DIM), dtype=np.float32)
    out = rapt.attention_with_kvcache(q, k, v, cache_seqlens=np.array(lengths, np.int32), page_table=table)
    for b, length in enumerate(lengths):
        rows = [(table[b, j // page], j % page) for j in range(length)]
        blocks, rows = (np.array(x) for x in zip(*rows, strict=True))
        one = [
            rapt.Quantized(
                x.codes[blocks, rows][None],
                x.scale if granularity == "tensor" else x.scale[blocks, rows][None],
                format=x.format,
                granularity=x.granularity,
                block_size=x.block_size,
                zero_point=None if x.zero_point is None else x.zero_point[blocks, rows][None],
                shape=(1, length, KV_HEADS, dim),
            )
            for x, dim in ((k, DIM), (v, DIM_V))
        ]
        assert out[b].tobytes() == rapt.attention(q[b][None], *one, layout="bshd").tobytes()


@pytest.mark.parametrize("format", ["int8", "e4m3fn", "uint8"])
def test_new_keys_become_codes_and_old_codes_stay(rng, format):
    library = pytest.importorskip("torch")
    page, table = 4, library.tensor([[2, 0, 1]], dtype=library.int32)
    keys = library.tensor(rng.standard_normal((11, KV_HEADS, DIM), dtype=np.float32))
    at_once = rapt.quantize(keys, format, granularity="token")
    codes = library.full((3, page, KV_HEADS, DIM), 1, dtype=library.float32).to(at_once.codes.dtype)
    scales = library.full((3, page, KV_HEADS), 99.0)
    points = library.full((3, page, KV_HEADS), 9, dtype=library.uint8) if format == "uint8" else None
    halves = library.full((3, page, KV_HEADS, DIM), 0.5)
    q = library.randn(1, 1, HEADS, DIM)
    for n in range(11):
        out = rapt.attention_with_kvcache(
            q, codes, halves, keys[n][None, None], cache_seqlens=n, page_table=table, k_descale=scales, k_zero_point=points
        )
        assert (out - 0.5).abs().max() < 1e-6
    where = [(int(table[0, j // page]), j % page) for j in range(11)]
    assert all(library.equal(codes[at].view(library.uint8), at_once.codes[j].view(library.uint8)) for j, at in enumerate(where))
    assert all(library.equal(scales[at], at_once.scale[j]) for j, at in enumerate(where))
    assert points is None or all(library.equal(points[at], at_once.zero_point[j]) for j, at in enumerate(where))
    assert (scales[1, 3] == 99).all(), "what lies behind the last key"


def int32(*numbers):
    return np.array(numbers, np.int32)


CACHE_REFUSED = [
    ({"cache_seqlens": int32(5, 64)}, rapt.IndexRangeError, r"cache_seqlens\[1\] is 64; allowed: 0 to 63"),
    ({"cache_seqlens": int32(-1, 9)}, rapt.IndexRangeError, r"cache_seqlens\[0\] is -1"),
    ({"cache_seqlens": int32(5)}, rapt.ShapeError, "cache_seqlens has sequences 1, q has 2"),
    ({"cache_seqlens": np.array([5, 9])}, rapt.UnsupportedDtypeError, r"cache_seqlens\.astype\(numpy\.int32\)"),
    ({"cache_seqlens": None}, rapt.OptionError, "cache_seqlens = None"),
    ({"cache_seqlens": True}, rapt.KindError, "cache_seqlens is a"),
    ({"page_table": np.full((2, 4), 11, np.int32)}, rapt.IndexRangeError, r"page_table\[0\] is 11, the cache has 11 pages"),
    ({"page_table": np.full((2, 4), -1, np.int32)}, rapt.IndexRangeError, r"page_table\[0\] is -1"),
    ({"page_table": np.full((2, 4), 3, np.int32)}, rapt.LayoutError, r"page 3 takes new keys of sequence 0.*KVCache"),
    ({"page_table": np.arange(8).reshape(2, 4)}, rapt.UnsupportedDtypeError, r"page_table\.astype\(numpy\.int32\)"),
    ({"page_table": int32(0, 1, 2, 3)}, rapt.ShapeError, "page_table has 1 dimension"),
    ({"page_table": np.zeros((3, 4), np.int32)}, rapt.ShapeError, "page_table has batch 3"),
    ({"k": np.zeros((2, 1, KV_HEADS, DIM), np.float64)}, rapt.DtypeMismatchError, "k has dtype float64"),
    ({"k": np.zeros((2, 1, 1, DIM), np.float32)}, rapt.ShapeError, "k has num_kv_heads 1"),
    ({"k": np.zeros((2, 2, KV_HEADS, DIM), np.float32)}, rapt.ShapeError, "v has new keys 1, k has 2"),
    ({"k": np.zeros((2, 65, KV_HEADS, DIM), np.float32), "v": np.zeros((2, 65, KV_HEADS, DIM_V), np.float32)}, rapt.ShapeError, "k has new keys"),
    ({"k": None}, rapt.OptionError, "k = None"),
    ({"causal": "top_left"}, rapt.OptionError, "the last query is at the last key"),
    ({"q": np.zeros((2, 2, HEADS, DIM), np.float32), "window": (3, None), "out": None}, rapt.UnsupportedError, "bottom_right"),
    ({"q": np.zeros((2, HEADS, DIM), np.float32)}, rapt.ShapeError, "q has 3 dimensions"),
    ({"k_descale": np.ones(1, np.float32)}, rapt.OptionError, "k_descale was given"),
    ({"out": np.zeros((2, 1, HEADS, DIM), np.float32)}, rapt.ShapeError, "out has shape"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "error", "says"), CACHE_REFUSED, ids=lambda case: "+".join(case) if isinstance(case, dict) else "")
def test_a_bad_call_is_refused_and_neither_cache_nor_output_is_written(rng, bad, error, says):
    cache = Cache(Numpy(), rng, [5, 9], 16)
    before = cache.k.tobytes(), cache.v.tobytes()
    out = np.full((2, 1, HEADS, DIM_V), 7, np.float32)
    call = {
        "q": cache.normal((2, 1, HEADS, DIM)),
        "k_cache": cache.k,
        "v_cache": cache.v,
        "k": cache.normal((2, 1, KV_HEADS, DIM)),
        "v": cache.normal((2, 1, KV_HEADS, DIM_V)),
        "cache_seqlens": cache.lengths,
        "page_table": cache.table,
        "out": out,
    }
    with pytest.raises(error, match=says):
        rapt.attention_with_kvcache(**(call | bad))
    assert (out == 7).all() and (cache.k.tobytes(), cache.v.tobytes()) == before
    rapt.attention_with_kvcache(**call)
    assert not (out == 7).any()


def test_a_cache_that_may_not_be_written_is_read(rng):
    cache = Cache(Numpy(), rng, [5, 9])
    q, k, v = (cache.normal((2, 1, heads, dim)) for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V)))
    expected = cache.call(q)
    cache.k.flags.writeable = cache.v.flags.writeable = False
    assert (cache.call(q) == expected).all()
    with pytest.raises(rapt.LayoutError, match="k_cache is read-only"):
        cache.call(q, k, v)


def test_outputs_and_caches_share_no_memory(rng):
    cache = Cache(Numpy(), rng, [5, 9])
    q, k = cache.normal((2, 1, HEADS, DIM)), cache.normal((2, 1, KV_HEADS, DIM))
    with pytest.raises(rapt.LayoutError, match="out shares memory with k_cache"):
        cache.call(q, out=cache.k.reshape(2, -1)[:, : HEADS * DIM_V].reshape(2, 1, HEADS, DIM_V))
    with pytest.raises(rapt.LayoutError, match="k_cache shares memory with k"):
        cache.call(q, cache.k[:, 20:21], cache.normal((2, 1, KV_HEADS, DIM_V)))
    with pytest.raises(rapt.LayoutError, match="k_cache shares memory with v_cache"):
        rapt.attention_with_kvcache(q, cache.k, cache.k, k, k, cache_seqlens=cache.lengths)


def test_torch_calls_are_counted_and_gradients_refused(rng):
    torch = pytest.importorskip("torch")
    cache = Cache(Torch(), rng, [5, 9], 16)
    q = cache.normal((2, 1, HEADS, DIM))
    served = rapt.torch.stats()["served"]
    cache.call(q)
    packed_q, k, v = packed(Torch(), rng, [2, 3], [4, 5])
    rapt.varlen_attention(packed_q, k, v, torch.tensor(offsets([2, 3])), torch.tensor(offsets([4, 5])))
    assert rapt.torch.stats()["served"] == served + 2
    with pytest.raises(rapt.UnsupportedError, match="requires_grad|gradient"):
        cache.call(q.requires_grad_())


def test_a_context_gives_the_same_bits_on_its_threads(rng):
    cache = Cache(Numpy(), rng, [5, 9], 16)
    q = cache.normal((2, 1, HEADS, DIM))
    ragged = packed(Numpy(), rng, [2, 3], [400, 5])
    with rapt.Context(threads=3) as context:
        cached = context.attention_with_kvcache(q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.table)
        assert cached.tobytes() == cache.call(q).tobytes()
        ends = offsets([2, 3]), offsets([400, 5])
        assert context.varlen_attention(*ragged, *ends).tobytes() == rapt.varlen_attention(*ragged, *ends).tobytes()
        assert context.explain_varlen(*ragged, *ends).kernels == rapt.explain_varlen(*ragged, *ends).kernels
        paged = {"cache_seqlens": cache.lengths, "page_table": cache.table}
        assert context.explain_with_kvcache(q, cache.k, cache.v, **paged).sequences == 2


def test_nothing_is_kept_of_a_call(rng):
    cache = Cache(Numpy(), rng, [5, 9], 16)
    q = cache.normal((2, 1, HEADS, DIM))
    cache.call(q)
    import sys

    before = sys.getrefcount(cache.k), sys.getrefcount(cache.v)
    for _ in range(10):
        cache.call(q)
    gc.collect()
    assert (sys.getrefcount(cache.k), sys.getrefcount(cache.v)) == before
