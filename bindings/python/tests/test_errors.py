"""Bad input: one table, here and in docs/reference/errors.md, checked against each other.

Each row: the request, the exception class, and a fragment of the hint for numpy and for torch ("-": the row does not exist
there). After each refusal the inputs are as before and the engine answers a good request.
"""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import rapt

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "errors.md"
NUMPY_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    **{name: getattr(ml_dtypes, name) for name in dir(ml_dtypes) if name.startswith("float8")},
}


class Numpy:
    name = "numpy"

    def tensor(self, *shape, dtype="float32"):
        rng = np.random.default_rng(0)
        return np.asarray(rng.standard_normal(shape) * 2).astype(NUMPY_DTYPES.get(dtype, dtype))

    def bytes(self, x):
        return np.ascontiguousarray(x).tobytes()


class Torch:
    name = "torch"

    def tensor(self, *shape, dtype="float32"):
        import torch

        generator = torch.Generator().manual_seed(0)
        return (torch.randn(shape, generator=generator) * 2).to(getattr(torch, dtype))

    def bytes(self, x):
        import torch

        if x.device.type != "cpu" or x.layout != torch.strided:
            return b""
        x = x.detach().resolve_neg().resolve_conj().reshape(-1)
        return x.view(torch.uint8).numpy().tobytes() if x.numel() else b""


def attention(q, k, v, **options):
    return rapt.attention, (q, k, v), options


def sdpa(q, k, v, **options):
    return rapt.scaled_dot_product_attention, (q, k, v), options


def qkv(lib, dtype="float32"):
    q, k = lib.tensor(2, 4, 5, 8, dtype=dtype), lib.tensor(2, 2, 7, 8, dtype=dtype)
    return q, k, lib.tensor(2, 2, 7, 8, dtype=dtype)


def with_options(**options):
    return lambda lib: attention(*qkv(lib), **{name: f(lib) if callable(f) else f for name, f in options.items()})


def with_k(make):
    def request(lib):
        q, _, v = qkv(lib)
        return attention(q, make(lib), v)

    return request


def with_codes(dtype="int8", scale=(), **options):
    """k as codes with scales of this shape (None: without), and `options` of these shapes and dtypes."""

    def request(lib):
        q, _, v = qkv(lib)
        given = {name: lib.tensor(*shape, dtype=of) for name, (shape, of) in options.items()}
        if scale is not None:
            given.setdefault("k_descale", lib.tensor(*scale))
        return attention(q, lib.tensor(2, 2, 7, 8, dtype=dtype), v, **given)

    return request


def expanded_out(lib):
    q, k, v = qkv(lib)
    one = lib.tensor(2, 4, 5, 1)
    out = one.expand(2, 4, 5, 8) if lib.name == "torch" else np.lib.stride_tricks.as_strided(one, (2, 4, 5, 8), (80, 20, 4, 0))
    return attention(q, k, v, out=out)


def q_as_out(lib):
    q, k, v = qkv(lib)
    return attention(q, k, v, out=q)


def read_only_out(lib):
    out = lib.tensor(2, 4, 5, 8)
    out.flags.writeable = False
    return attention(*qkv(lib), out=out)


def swapped(lib):
    q, k, v = qkv(lib)
    return attention(q.astype(q.dtype.newbyteorder("S")), k, v)


def odd_strides(lib):
    record = np.zeros((2, 4, 5, 8), np.dtype([("x", "f4"), ("pad", "u1")], align=False))
    return attention(record["x"], *qkv(lib)[1:])


def unaligned(lib):
    storage = np.zeros(2 * 4 * 5 * 8 * 4 + 1, np.uint8)
    return attention(storage[1:].view(np.float32).reshape(2, 4, 5, 8), *qkv(lib)[1:])


def negative(lib):
    import torch

    q, k, v = qkv(lib)
    return attention(torch._neg_view(q), k, v)


def sparse(lib):
    q, k, v = qkv(lib)
    return attention(q.to_sparse(), k, v)


def requires_grad(lib):
    q, k, v = qkv(lib)
    return attention(q.requires_grad_(), k, v, out=q.detach().clone())


def other_kind(lib):
    q, k, v = qkv(lib)
    import torch

    return attention(q, torch.from_numpy(k) if lib.name == "numpy" else k.numpy(), v)


def meta(lib):
    q, k, v = qkv(lib)
    return attention(q, k.to("meta"), v)


def of_rank(rank):
    def request(lib):
        shape = (2, 2, 4, 5, 8)[5 - rank :]
        return attention(*(lib.tensor(*shape) for _ in range(3)))

    return request


CASES = [
    # id, request, class, hint in numpy, hint in torch
    ("k of another dtype than q", with_k(lambda lib: lib.tensor(2, 2, 7, 8, dtype="bfloat16")), "DtypeMismatchError",
     "k.astype(numpy.float32)", "k.to(torch.float32)"),
    ("integers", lambda lib: attention(*qkv(lib, "int64")), "UnsupportedDtypeError",
     "q.astype(numpy.float32)", "q.to(torch.float32)"),
    ("uint16, which is not bfloat16", lambda lib: attention(*qkv(lib, "uint16")), "UnsupportedDtypeError",
     "q.view(ml_dtypes.bfloat16)", "q.view(torch.bfloat16)"),
    ("rank 1", of_rank(1), "ShapeError", "q[None]", "q.unsqueeze(0)"),
    ("rank 5", of_rank(5), "ShapeError", "q.reshape(-1, *q.shape[-3:])", "q.flatten(0, 1)"),
    ("k of another rank than q", with_k(lambda lib: lib.tensor(2, 7, 8)), "ShapeError", "k[None]", "k.unsqueeze(0)"),
    ("num_q_heads no multiple of num_kv_heads",
     lambda lib: attention(qkv(lib)[0], lib.tensor(2, 3, 7, 8), lib.tensor(2, 3, 7, 8)), "ShapeError",
     "k[..., :2, :, :]", "k[..., :2, :, :]"),
    ("k and v of different heads", with_k(lambda lib: lib.tensor(2, 4, 7, 8)), "ShapeError",
     "k[..., :2, :, :]", "k[..., :2, :, :]"),
    ("k and v of different length", with_k(lambda lib: lib.tensor(2, 2, 6, 8)), "ShapeError",
     "v[..., :6, :]", "v[..., :6, :]"),
    ("k and v of different length, PyTorch's signature",
     lambda lib: sdpa(qkv(lib)[0], lib.tensor(2, 4, 6, 8), lib.tensor(2, 4, 7, 8)), "ShapeError",
     "value[..., :6, :]", "value[..., :6, :]"),
    ("another head_dim", with_k(lambda lib: lib.tensor(2, 2, 7, 9)), "ShapeError", "k[..., :8]", "k[..., :8]"),
    ("head_dim 0", lambda lib: attention(*(lib.tensor(2, 2, 3, 0) for _ in range(3))), "ShapeError",
     "q.shape[-1] == 0", "q.shape[-1] == 0"),
    ("a batch to be broadcast",
     lambda lib: attention(qkv(lib)[0], lib.tensor(1, 2, 7, 8), lib.tensor(1, 2, 7, 8)), "ShapeError",
     "numpy.broadcast_to(k, (2, *k.shape[1:]))", "k.expand(2, -1, -1, -1)"),
    ("a padding mask [batch, kv_len]", with_options(mask=lambda lib: lib.tensor(2, 7)), "ShapeError",
     "mask[:, None, None, :]", "mask[:, None, None, :]"),
    ("a mask turned round", with_options(mask=lambda lib: lib.tensor(1, 4, 7, 5)), "ShapeError",
     "mask.swapaxes(-2, -1)", "mask.transpose(-2, -1)"),
    ("a mask too long", with_options(mask=lambda lib: lib.tensor(5, 9)), "ShapeError",
     "mask[..., :5, :7]", "mask[..., :5, :7]"),
    ("a mask of integers", with_options(mask=lambda lib: lib.tensor(5, 7, dtype="int64")), "UnsupportedDtypeError",
     "mask.astype(bool)", "mask.bool()"),
    ("a mask wider than the accumulation", with_options(mask=lambda lib: lib.tensor(5, 7, dtype="float64")),
     "UnsupportedDtypeError", "mask.astype(numpy.float32)", "mask.to(torch.float32)"),
    ("sinks of another length", with_options(sinks=lambda lib: lib.tensor(1)), "ShapeError",
     "numpy.broadcast_to(sinks, (4,))", "sinks.expand(4)"),
    ("sinks of integers", with_options(sinks=lambda lib: lib.tensor(4, dtype="int32")), "UnsupportedDtypeError",
     "sinks.astype(numpy.float32)", "sinks.to(torch.float32)"),
    ("alibi_slopes per batch", with_options(alibi_slopes=lambda lib: lib.tensor(2, 4)), "ShapeError",
     "alibi_slopes.reshape(-1)[:4]", "alibi_slopes.reshape(-1)[:4]"),
    ("out of another dtype", with_options(out=lambda lib: lib.tensor(2, 4, 5, 8, dtype="float16")),
     "DtypeMismatchError", "numpy.empty_like(out, dtype=numpy.float32)", "torch.empty_like(out, dtype=torch.float32)"),
    ("out of another shape", with_options(out=lambda lib: lib.tensor(2, 4, 5, 9)), "ShapeError",
     "numpy.empty((2, 4, 5, 8), dtype=q.dtype)", "torch.empty((2, 4, 5, 8), dtype=q.dtype)"),
    ("out that overlaps an input", q_as_out, "LayoutError", "out.copy()", "out.clone("),
    ("out that overlaps itself", expanded_out, "LayoutError",
     "numpy.empty((2, 4, 5, 8), dtype=q.dtype)", "torch.empty((2, 4, 5, 8), dtype=q.dtype)"),
    ("out that is read-only", read_only_out, "LayoutError", "out.copy()", "-"),
    ("the other byte order", swapped, "LayoutError", "q.astype(q.dtype.newbyteorder('='))", "-"),
    ("strides that are no multiple of the element", odd_strides, "LayoutError", "q.copy()", "-"),
    ("an unaligned pointer", unaligned, "LayoutError", "q.copy()", "-"),
    ("a lazy negation", negative, "LayoutError", "-", "q.resolve_neg()"),
    ("a sparse tensor", sparse, "LayoutError", "-", "q.to_dense()"),
    ("out beside an input that requires grad", requires_grad, "UnsupportedError", "-", "with torch.no_grad():"),
    ("k on another device", meta, "DeviceError", "-", "cpu"),
    ("kinds mixed", other_kind, "KindError", "numpy.from_dlpack(k)", "torch.from_dlpack(k)"),
    ("a list", lambda lib: attention([[1.0]], [[1.0]], [[1.0]]), "KindError", "numpy.asarray(q)", "-"),
    ("scale NaN", with_options(scale=float("nan")), "OptionError", "any finite number", "any finite number"),
    ("scale infinite", with_options(scale=float("inf")), "OptionError", "any finite number", "any finite number"),
    ("scale a string", with_options(scale="0.5"), "OptionError", "any finite number", "any finite number"),
    ("scale a bool", with_options(scale=True), "OptionError", "any finite number", "any finite number"),
    ("softcap 0", with_options(softcap=0.0), "OptionError", "greater than 0", "greater than 0"),
    ("softcap negative", with_options(softcap=-1.0), "OptionError", "greater than 0", "greater than 0"),
    ("softcap infinite", with_options(softcap=float("inf")), "OptionError", "greater than 0", "greater than 0"),
    ("softcap NaN", with_options(softcap=float("nan")), "OptionError", "greater than 0", "greater than 0"),
    ("window negative", with_options(window=(-1, 0)), "OptionError", "from 0 up", "from 0 up"),
    ("window of one end", with_options(window=(4,)), "OptionError", "(left, right)", "(left, right)"),
    ("window a number", with_options(window=4), "OptionError", "(left, right)", "(left, right)"),
    ("window of bools", with_options(window=(True, None)), "OptionError", "from 0 up", "from 0 up"),
    ("window of fractions", with_options(window=(1.5, None)), "OptionError", "from 0 up", "from 0 up"),
    ("causal misspelt", with_options(causal="bottom-right"), "OptionError", "'bottom_right'", "'bottom_right'"),
    ("causal a number", with_options(causal=1), "OptionError", "'top_left'", "'top_left'"),
    ("layout misspelt", with_options(layout="BSHD"), "OptionError", "'bshd'", "'bshd'"),
    ("out_dtype misspelt", with_options(out_dtype="float31"), "OptionError", '"bfloat16"', '"bfloat16"'),
    ("out_dtype not computed", with_options(out_dtype="int8"), "UnsupportedDtypeError", "float32", "float32"),
    ("return_lse no bool", with_options(return_lse="yes"), "OptionError", "True, False", "True, False"),
    ("codes without a descale", with_codes(scale=None), "UnsupportedDtypeError",
     "k_descale=` of `rapt.attention", "k_descale=` of `rapt.attention"),
    ("uint8 codes without a zero point", with_codes("uint8"), "UnsupportedDtypeError",
     "k_zero_point=` of `rapt.attention", "k_zero_point=` of `rapt.attention"),
    ("a zero point with codes that have none", with_codes(k_zero_point=((), "uint8")), "OptionError",
     "k_zero_point=None", "k_zero_point=None"),
    ("a zero point of another shape", with_codes("uint8", k_zero_point=((1,), "uint8")), "ShapeError",
     "k_zero_point.reshape(())", "k_zero_point.reshape(())"),
    ("a descale beside numbers", with_options(k_descale=lambda lib: lib.tensor(2, 2)), "OptionError",
     "k_descale=None", "k_descale=None"),
    ("a descale of a head with sizes of 1", with_codes(scale=(2, 2, 1, 1)), "ShapeError",
     "k_descale[:, :, 0, 0]", "k_descale[:, :, 0, 0]"),
    ("a descale of no granularity", with_codes(scale=(2, 3)), "ShapeError", "[2, 2, 7] (token)", "[2, 2, 7] (token)"),
    ("a descale of another dtype", with_codes(k_descale=((), "float16")), "DtypeMismatchError",
     "k_descale.astype(numpy.float32)", "k_descale.to(torch.float32)"),
    ("a descale that is no tensor", lambda lib: attention(*qkv(lib), k_descale=0.5), "KindError",
     "numpy.asarray(k_descale, numpy.float32)", "torch.as_tensor(k_descale, dtype=torch.float32)"),
    ("q of codes without out_dtype",
     lambda lib: attention(lib.tensor(2, 4, 5, 8, dtype="int8"), *qkv(lib)[1:], q_descale=lib.tensor()), "OptionError",
     "out_dtype = None", "out_dtype = None"),
    ("attn_mask together with is_causal, PyTorch's signature",
     lambda lib: sdpa(*(lib.tensor(2, 4, 5, 8) for _ in range(3)), attn_mask=lib.tensor(5, 5), is_causal=True),
     "OptionError", "is_causal", "is_causal"),
    ("dropout past 1, PyTorch's signature", lambda lib: sdpa(*(lib.tensor(2, 4, 5, 8) for _ in range(3)), dropout_p=1.5),
     "OptionError", "0 to 1", "0 to 1"),
    ("dropout without PyTorch's generator", lambda lib: sdpa(*(lib.tensor(2, 4, 5, 8) for _ in range(3)), dropout_p=0.1),
     "UnsupportedError", "dropout_p=0.0", "-"),
    ("grouped heads without enable_gqa, PyTorch's signature", lambda lib: sdpa(*qkv(lib)), "ShapeError",
     "enable_gqa=True", "enable_gqa=True"),
]  # fmt: skip

LIBRARIES = {"numpy": Numpy(), "torch": Torch()}
ROWS = [
    pytest.param(lib, request_, cls, hint, id=f"{name}-{what}")
    for what, request_, cls, *hints in CASES
    for (name, lib), hint in zip(LIBRARIES.items(), hints)
    if hint != "-"
]


def refuse(lib, request_, cls, fragment):
    function, args, options = request_(lib)
    tensors = [x for x in [*args, *options.values()] if hasattr(x, "shape")]
    before = [(lib if type(x).__module__ == type(args[0]).__module__ else other(lib)).bytes(x) for x in tensors]
    with pytest.raises(rapt.RaptError) as caught:
        function(*args, **options)
    after = [(lib if type(x).__module__ == type(args[0]).__module__ else other(lib)).bytes(x) for x in tensors]
    assert before == after, "a refused call wrote something"
    assert type(caught.value) is getattr(rapt, cls), f"{type(caught.value).__name__}: {caught.value}"
    assert fragment in str(caught.value)
    good = lib.tensor(1, 1, 1, 4)
    assert lib.bytes(rapt.attention(good, good, good)) == lib.bytes(good), "the engine is not usable after a refusal"


def other(lib):
    return LIBRARIES["torch" if lib.name == "numpy" else "numpy"]


@pytest.mark.parametrize("lib, request_, cls, hint", ROWS)
def test_each_bad_input_has_its_error_and_its_hint(lib, request_, cls, hint):
    if lib.name == "torch":
        pytest.importorskip("torch")
    refuse(lib, request_, cls, hint)


def unsupported():
    return [name for name, _, _, _, computed in rapt.dtypes() if not computed and name != "unknown"]


@pytest.mark.parametrize("name", unsupported())
@pytest.mark.parametrize("lib", LIBRARIES.values(), ids=LIBRARIES)
def test_every_other_dtype_is_refused_by_name(lib, name):
    if lib.name == "torch":
        torch = pytest.importorskip("torch")
        if not hasattr(torch, name):
            pytest.skip(f"this torch has no {name}")
        x = torch.zeros(2 * 2 * 3 * 16, dtype=torch.uint8).view(getattr(torch, name))[: 2 * 2 * 3 * 1].reshape(2, 2, 3, 1)
    else:
        if name == "complex32":
            pytest.skip("numpy has no complex32")
        x = np.zeros((2, 2, 3, 4), NUMPY_DTYPES.get(name, name))
    with pytest.raises(rapt.UnsupportedDtypeError, match=rf"\b{name}\b"):
        rapt.attention(x, x, x)
    if lib.name == "torch":
        with pytest.raises(rapt.UnsupportedDtypeError, match=rf"\b{name}\b"):
            rapt.scaled_dot_product_attention(x, x, x)


def test_the_classes_have_the_bases_that_programs_expect():
    bases = {
        "DtypeMismatchError": TypeError,
        "UnsupportedDtypeError": TypeError,
        "ShapeError": ValueError,
        "LayoutError": ValueError,
        "OptionError": ValueError,
        "DeviceError": RuntimeError,
        "KindError": TypeError,
        "UnsupportedError": NotImplementedError,
        "DtypeBoundaryError": TypeError,
        "ProgramError": ValueError,
        "IndexRangeError": IndexError,
        "DivisionError": ZeroDivisionError,
        "NumberError": ValueError,
    }
    for name, built_in in bases.items():
        cls = getattr(rapt, name)
        assert issubclass(cls, rapt.RaptError) and issubclass(cls, built_in)
        assert cls.__module__ == "rapt" and cls.__doc__
    import pickle

    assert type(pickle.loads(pickle.dumps(rapt.ShapeError("x")))) is rapt.ShapeError


def test_messages_speak_pytorchs_words_in_pytorchs_function():
    q, k = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 4, 5, 8), np.float16)
    with pytest.raises(rapt.DtypeMismatchError) as caught:
        rapt.scaled_dot_product_attention(q, k, q)
    assert "key has dtype float16, query has float32" in str(caught.value) and "key.astype(" in str(caught.value)
    with pytest.raises(rapt.UnsupportedDtypeError, match="attn_mask"):
        rapt.scaled_dot_product_attention(q, q, q, attn_mask=np.zeros((5, 5), np.int8))


def test_bad_contexts():
    for threads in [0, -1, True, 1.5, "2", 10**9]:
        with pytest.raises(rapt.OptionError, match="from 1 up"):
            rapt.Context(threads=threads)


def documented():
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| (.+?) \| (.+?) \|$", DOCS.read_text(), re.M)
    return [(what, cls, numpy.strip("`"), torch.strip("`")) for what, cls, numpy, torch in rows]


def test_the_documented_table_is_this_one():
    if not DOCS.exists():
        pytest.skip("installed without the repository")
    assert documented() == [(what, cls, *hints) for what, _, cls, *hints in CASES]
