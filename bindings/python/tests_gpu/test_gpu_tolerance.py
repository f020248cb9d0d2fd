"""`tolerance=` on the GPU: figures against the host's, bits against plain calls, and data made to break the promise."""

import pytest
import torch
from gpu_reference import reference

import rapt

FORMATS = ["int8", "uint8", "int4", "e4m3fn", "e5m2", "mxfp8", "mxfp4", "nvfp4"]
OWN_BLOCKS = ["mxfp8", "mxfp4", "nvfp4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def normals(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(x, format="int8", granularity="token", **options):
    """`x` of host memory, quantized there with its errors, and moved."""
    granularity = None if format in OWN_BLOCKS else granularity
    return rapt.quantize(x, format, granularity=granularity, keep_original=True, **options)


def distances(got, want):
    """Relative L2 of each head, `[batch, heads]`."""
    apart = (got.double() - want.double()).pow(2).sum((2, 3)).sqrt()
    size = want.double().pow(2).sum((2, 3)).sqrt()
    return torch.where(apart == 0, 0.0, apart / size).cpu()


OPTIONS = {
    "plain": {},
    "causal, grouped": {"causal": "bottom_right", "scale": 0.2},
    "window, sinks, slopes": {"causal": "bottom_right", "window": (20, 3), "sinks": True, "alibi_slopes": True},
    "softcap, mask of biases": {"softcap": 1.5, "mask": torch.float32, "scale": -0.3},
    "mask of booleans": {"mask": torch.bool, "sinks": True},
}


def made(options, heads, q_len, kv_len):
    """Options with their tensors, in host memory."""
    options = dict(options)
    for name in ("sinks", "alibi_slopes"):
        if options.get(name):
            options[name] = normals(5, heads).abs() * (0.02 if name == "alibi_slopes" else 1)
    if dtype := options.get("mask"):
        bias = normals(6, q_len, kv_len)
        seen = bias > -0.7
        seen[0] = False
        options["mask"] = seen if dtype == torch.bool else torch.where(seen, bias, -torch.inf)
    return options


def on_gpu(options):
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in options.items()}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(2, 4, 2, 3, 130, 20, 33), (1, 3, 1, 2, 3000, 64, 64), (1, 4, 2, 100, 300, 33, 140), (1, 2, 2, 64, 77, 128, 256)], ids=str)
def test_figures_are_those_of_the_host(shape, options):
    batch, heads, kv_heads, q_len, kv_len, dim, dim_v = shape
    options = made(OPTIONS[options], heads, q_len, kv_len)
    q = normals(1, batch, heads, q_len, dim) * torch.tensor([0.3, 1.0, 3.0]).repeat(q_len)[:q_len, None]
    k, v = normals(2, batch, kv_heads, kv_len, dim), normals(3, batch, kv_heads, kv_len, dim_v)
    for of_k, of_v in [("int8", "int8"), ("uint8", "e4m3fn"), ("nvfp4", "int4"), (None, "int8"), ("int8", None)]:
        keys, values = (x if of is None else quantized(x, of, "head" if of == "uint8" else "token") for x, of in [(k, of_k), (v, of_v)])
        host = rapt.explain(q, keys, values, tolerance=0.1, **options).tolerance
        keys, values = (x.to("cuda") for x in (keys, values))
        plan = rapt.explain(q.cuda(), keys, values, tolerance=0.1, **on_gpu(options))
        found = plan.tolerance
        for of_host, of_gpu in zip(host["heads"], found["heads"]):
            assert (of_gpu["batch"], of_gpu["head"]) == (of_host["batch"], of_host["head"])
            assert of_gpu["epsilon"] == pytest.approx(of_host["epsilon"], rel=1e-4)
            assert of_gpu["estimate"] == pytest.approx(of_host["estimate"], rel=2e-2), (of_k, of_v)
            # Near its pole the bound is as good as none.
            assert of_gpu["bound"] == pytest.approx(of_host["bound"], rel=2e-2) or min(of_gpu["bound"], of_host["bound"]) > 10, (of_k, of_v)
        assert "rigorous bound" in str(plan) and found["limit"] == 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("q_len", [1, 7, 100])
def test_heads_have_the_bits_of_plain_calls_and_are_counted(dtype, q_len):
    batch, heads, kv_heads, kv_len, dim = 3, 8, 4, 1100, 64
    q, k, v = normals(4, batch, heads, q_len, dim), normals(5, batch, kv_heads, kv_len, dim), normals(6, batch, kv_heads, kv_len, dim)
    # Heads 2 and 3 of batch 0 and 1, head 7 of batch 2: the last takes head 6 along.
    q[:2, 2:4] *= 60
    q[2, 7] *= 60
    falls = torch.zeros(batch, heads, dtype=torch.bool)
    falls[:2, 2:4], falls[2, 6:] = True, True
    q, k, v = (x.to(dtype) for x in (q, k, v))
    slopes, sinks = torch.rand(heads).cuda(), torch.randn(heads).cuda()
    mask = (torch.rand(batch, 1, 1, kv_len) < 0.9).cuda()
    for of_k, of_v in [(("int8", "token"), ("int8", "channel")), (("e4m3fn", "head"), ("uint8", "token")), (("mxfp8", None), ("mxfp8", None))]:
        keys, values = (quantized(x, *of).to("cuda") for x, of in [(k, of_k), (v, of_v)])
        assert keys.original.device.type == "cuda" and keys.errors is not None
        options = {"causal": "bottom_right", "alibi_slopes": slopes, "sinks": sinks, "mask": mask, "return_lse": True}
        rapt.quant.reset_stats()
        # Whatever the estimate, a head of which a score may be off by 1 falls back.
        out, lse = rapt.attention(q.cuda(), keys, values, tolerance=1e9, **options)
        counted = rapt.quant.stats()
        assert (counted["calls"], counted["fell_back"], counted["quantized"]) == (1, 6, 18), counted
        assert 0 < counted["worst_estimate"] and counted["worst_bound"] >= counted["worst_estimate"] / 5
        on_codes = rapt.attention(q.cuda(), keys, values, **options)
        on_originals = rapt.attention(q.cuda(), k.cuda(), v.cuda(), **options)
        for got, codes, originals in zip((out, lse), on_codes, on_originals):
            assert torch.equal(got[~falls], codes[~falls]) and torch.equal(got[falls], originals[falls])
        # All of them, on either.
        strict = rapt.attention(q.cuda(), keys, values, tolerance=1e-7, **options)
        assert all(map(torch.equal, strict, on_originals))
        calm = q.cuda() * 0.01
        loose = rapt.attention(calm, keys, values, tolerance=1e9, **options)
        assert all(map(torch.equal, loose, rapt.attention(calm, keys, values, **options)))
        given = torch.full_like(out, torch.nan).transpose(1, 2).contiguous().transpose(1, 2)
        options.pop("return_lse")
        assert rapt.attention(q.cuda(), keys, values, tolerance=1e9, out=given, **options) is given and torch.equal(given, out)


def attacks(q_len, length, dim):
    """Data made to break the estimate: its names, and q, k and v of one head each."""
    names, all_q, all_k, all_v = [], [], [], []

    def add(name, q, k, v):
        names.append(name), all_q.append(q), all_k.append(k), all_v.append(v)

    def plain():
        seed = 10 * len(names)
        return normals(seed, q_len, dim), normals(seed + 1, length, dim), normals(seed + 2, length, dim)

    q, k, v = plain()
    k[:, 3] *= 50
    add("outlier channel", q, k, v)
    q, k, v = plain()
    q *= 0.01
    q[:, 3] *= 400
    k[:, 3] *= 4
    add("queries along the outlier channel", q, k, v)
    q, k, v = plain()
    v[:, 5] *= 80
    add("outlier channel of v", q, k, v)
    q, k, v = plain()
    add("uniform rows", q * 0, k, v)
    constant = (0.3 + torch.arange(dim) * 0.037).expand(length, dim)
    q, k, v = plain()
    add("uniform rows of equal values", q * 0.05, k, constant.clone())
    q, k, v = plain()
    add("uniform rows of nearly equal values", q * 0.05, k, 3 + constant + 0.01 * v)
    q, k, v = plain()
    add("low entropy", 2 * k[torch.arange(q_len) * 7 % length], k, v)
    q, k, v = plain()
    tokens = torch.arange(length).square() % 5
    add("five tokens over and over", q, k[tokens], v[tokens])
    q, k, v = plain()
    tokens = torch.where(torch.arange(length) < length // 2, torch.arange(length), 0)
    add("one token half of the time", q, k[tokens], v[tokens])
    q, k, v = plain()
    along = q[0].clone()
    k[0], v[0] = 3 * along, 0.01 * v[0]
    add("sink", 0.5 * q + 0.5 * along, k, v)
    q, k, v = plain()
    add("heavy tails", q, k**3, v)
    q, k, v = plain()
    v[1::2] = 0.02 * v[1::2] - v[: length // 2 * 2 : 2]
    add("values that cancel", q, k, v)
    return names, *(torch.stack(x)[None] for x in (all_q, all_k, all_v))


SCHEMES = [
    ("int8", "head"),
    ("int8", "token"),
    ("int8", "channel"),
    ("uint8", "head"),
    ("e4m3fn", "head"),
    ("e5m2", "channel"),
    ("int4", "token"),
    ("nvfp4", None),
    ("mxfp8", None),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 33, 16), (8, 500, 64), (4, 4096, 32), (24, 150, 128), (1, 8192, 128)], ids=str)
def test_data_made_to_break_it_does_not(shape, dtype):
    names, q, k, v = attacks(*shape)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    want = reference(q.cuda(), k.cuda(), v.cuda())[0]
    on_originals = rapt.attention(q.cuda(), k.cuda(), v.cuda())
    stood, fell = 0, 0
    # Measuring takes the host long where there are many keys.
    for scheme in SCHEMES if shape[1] < 5000 else SCHEMES[1::3]:
        keys, values = quantized(k, *scheme).to("cuda"), quantized(v, *scheme).to("cuda")
        on_codes = rapt.attention(q.cuda(), keys, values)
        errors = distances(on_codes, want)[0]
        for limit in (2e-3, 1e-2, 5e-2, 0.2):
            found = rapt.explain(q.cuda(), keys, values, tolerance=limit).tolerance["heads"]
            out = rapt.attention(q.cuda(), keys, values, tolerance=limit)
            for at, (name, head) in enumerate(zip(names, found)):
                error, where = errors[at].item(), f"{name}, {scheme}: {errors[at]:.3g} and {head}"
                assert torch.equal(out[:, at], (on_codes if head["quantized"] else on_originals)[:, at]), where
                assert not head["quantized"] or error <= limit, where
                assert head["epsilon"] >= 1 or error <= head["estimate"], where
                assert error <= head["bound"] * 1.001 + 1e-5, where
                stood, fell = stood + head["quantized"], fell + (not head["quantized"])
    assert stood > 5 and fell > 5, (stood, fell)


@pytest.mark.parametrize("format", FORMATS)
def test_errors_that_lean_on_keys_do_not_hide_in_long_contexts(format):
    for length, dim in [(8192, 16), (4096, 64)]:
        q, k = 0.3 * normals(41, 1, 1, 1, dim), normals(42, 1, 1, length, dim)
        v = (k @ q[0, 0, 0])[..., None] * (1 + torch.arange(dim))
        keys = quantized(k, format, "head").to("cuda")
        head = rapt.explain(q.cuda(), keys, v.cuda(), tolerance=1e6).tolerance["heads"][0]
        error = distances(rapt.attention(q.cuda(), keys, v.cuda()), reference(q.cuda(), k.cuda(), v.cuda())[0])[0, 0].item()
        assert head["epsilon"] >= 1 or error <= head["estimate"], (length, error, head)


def one(seed=7, dtype=torch.bfloat16):
    q, k, v = (normals(seed + n, 1, 2, length, 64).to(dtype) for n, length in enumerate((3, 300, 300)))
    return q.cuda(), quantized(k), quantized(v)


def test_a_graph_is_refused_before_anything_is_captured():
    q, keys, values = one()
    keys, values = keys.to("cuda"), values.to("cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(rapt.UnsupportedError, match="CUDA graph.*tolerance=None"):
        with torch.cuda.graph(graph):
            rapt.attention(q, keys, values, tolerance=0.2)
    out = rapt.attention(q, keys, values, tolerance=0.2)
    assert torch.equal(out, rapt.attention(q, keys, values))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rapt.attention(q, keys, values)
    graph.replay()
    assert torch.equal(captured, out)


def test_what_is_refused_by_name_and_writes_nothing():
    q, k, v = one()
    keys, values = k.to("cuda"), v.to("cuda")
    out = torch.full_like(q, 7)
    here = {name: getattr(keys, name) for name in ("codes", "scale", "format", "shape", "granularity", "errors")}
    codes, scale = here.pop("codes"), here.pop("scale")
    bare = rapt.Quantized(codes, scale, **here)
    # An original in host memory.
    far = rapt.Quantized(codes, scale, **here, original=k.original)
    with pytest.raises(rapt.DeviceError):
        rapt.attention(q, far, values, tolerance=0.2, out=out)
    with pytest.raises(rapt.NumberError, match="head 0 of batch 0"):
        rapt.attention(q, bare, values, tolerance=1e-6, out=out)
    with pytest.raises(rapt.OptionError, match="k carries no measured errors"):
        rapt.attention(q, rapt.Quantized(codes, scale, **(here | {"errors": None})), values, tolerance=0.2, out=out)
    with pytest.raises(rapt.DtypeMismatchError):
        rapt.attention(q.float(), keys, values, tolerance=0.2)
    with pytest.raises(rapt.UnsupportedError, match="int8"):
        rapt.attention(q, keys, values, tolerance=0.2, compute="int8", out=out)
    assert bool((out == 7).all())
    judged = rapt.explain(q, bare, values, tolerance=1e-6).tolerance
    assert judged["fell_back"] == 2
    # What stands needs no original.
    assert torch.equal(rapt.attention(q, bare, values, tolerance=0.2), rapt.attention(q, keys, values))


def test_any_stream_and_any_rank():
    q, k, v = one(dtype=torch.float16)
    keys, values = k.to("cuda"), v.to("cuda")
    q[:, 1] *= 50
    expected = rapt.attention(q, keys, values, tolerance=0.2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            # Work of the stream that figures have to wait for.
            torch.cuda._sleep(1_000_000)
            later = (q * 2) / 2
            out = rapt.attention(later, keys, values, tolerance=0.2)
            del later
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)
    three = [rapt.quantize(x.original[0], "int8", granularity="token", keep_original=True).to("cuda") for x in (k, v)]
    assert torch.equal(rapt.attention(q[0], *three, tolerance=0.2), expected[0])
