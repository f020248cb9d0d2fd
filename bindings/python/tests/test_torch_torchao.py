"""`rapt.torch.qscaled_dot_product`, torchao's quantized attention: its codes are those of `rapt.attention` on the same codes, which lies within the
tolerance of the f64 reference, rounded once; and torchao's op, where torchao has no kernel for it."""

import math

import pytest

torch = pytest.importorskip("torch")

import fresh  # noqa: E402
import numpy as np  # noqa: E402
import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from reference import assert_close, flash_rounded, reference  # noqa: E402

U8, E4M3 = torch.uint8, torch.float8_e4m3fn
ZERO_POINTS = {"q_zp": 127, "k_zp": 120, "v_zp": 140}
SCALES = {"q_scale": 0.021, "k_scale": 0.019, "v_scale": 0.023}
SCHEMA = (
    "qscaled_dot_product(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
    "float? scale=None, float q_scale=1.0, int q_zp=0, float k_scale=1.0, int k_zp=0, float v_scale=1.0, int v_zp=0, "
    "float a_scale=1.0, int a_zp=0, float o_scale=1.0, int o_zp=0) -> Tensor"
)


def codes(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == U8:
        return torch.randint(0, 256, shape, generator=generator, dtype=U8)
    return (torch.randn(shape, generator=generator) * 60).to(E4M3)


def qkv(dtype, kv_heads=4, kv_len=33, dim_v=32):
    q = codes(dtype, 2, 9, 4, 32).transpose(1, 2)
    return q, codes(dtype, 2, kv_len, kv_heads, 32, seed=1).transpose(1, 2), codes(dtype, 2, kv_heads, kv_len, dim_v, seed=2)


def numbers(x, scale, zero_point=0):
    return ((x.double() - zero_point) * float(np.float32(scale))).float()


def attended(dtype, q, k, v, options):
    """What `rapt.attention` gives, checked by the reference: the numbers whose codes are asked."""
    scales = {name: options.get(f"{name}_scale", 1.0) for name in "qkv"}
    points = {name: options.get(f"{name}_zp", 0) for name in "qkv"}
    common = {"mask": options.get("attn_mask"), "causal": "top_left" if options.get("is_causal") else None, "scale": options.get("scale")}
    if common["mask"] is not None and common["mask"].dtype == torch.bfloat16:
        common["mask"] = common["mask"].float()
    given = {f"{name}_descale": torch.tensor(scale) for name, scale in scales.items()}
    if dtype == U8:
        given |= {f"{name}_zero_point": torch.tensor(point, dtype=U8) for name, point in points.items()}
    out = rapt.attention(q, k, v, out_dtype=torch.float32, **given, **common)
    exact = [numbers(x, scales[name], points[name]) for name, x in zip("qkv", (q, k, v))]
    assert_close(out, reference(*exact, **common)[0], "float32", [flash_rounded(*exact, **common)])
    return out


def requantized(dtype, out, o_scale, o_zp=0):
    if dtype == U8:
        return (torch.round(out / o_scale) + o_zp).clamp(0, 255).to(U8)
    return (out / o_scale).clamp(-448, 448).to(E4M3)


MASKS = {"none": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "bool": torch.bool}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [U8, E4M3], ids=["uint8", "e4m3fn"])
def test_codes_are_attention_rounded_once(dtype, mask):
    for kv_heads, dim_v in ((4, 32), (2, 16)):
        q, k, v = qkv(dtype, kv_heads, dim_v=dim_v)
        options = {"scale": 0.2, "o_scale": 0.011, **(SCALES if dtype == U8 else {"q_scale": 0.02, "k_scale": 0.03, "v_scale": 0.04})}
        if dtype == U8:
            options |= {**ZERO_POINTS, "o_zp": 131}
        if mask != "none":
            drawn = torch.randn(2, 1, 1, 33, generator=torch.Generator().manual_seed(3))
            options["attn_mask"] = drawn > -1 if mask == "bool" else drawn.to(MASKS[mask])
        else:
            options["is_causal"] = True
        expected = requantized(dtype, attended(dtype, q, k, v, options), options["o_scale"], options.get("o_zp", 0))
        rt.reset_stats()
        got = rt.qscaled_dot_product(q, k, v, a_scale=0.004, a_zp=7 if dtype == U8 else 0, **options)
        assert rt.stats() == {"served": 1, "fallback": {}}
        assert got.dtype == dtype and torch.equal(got.view(U8), expected.view(U8))
        assert len(got.view(U8).unique()) > 60, "codes of all kinds"
        assert got.transpose(1, 2).is_contiguous(), "as torchao's answer lies"


def test_results_beyond_the_codes_are_clamped():
    for dtype, least, most in ((U8, 0, 255), (E4M3, -448, 448)):
        q, k, v = qkv(dtype)
        options = {"q_scale": 0.01, "k_scale": 0.01, "o_scale": 1e-3} | ({**ZERO_POINTS, "o_zp": 100} if dtype == U8 else {})
        out = attended(dtype, q, k, v, options)
        got = rt.qscaled_dot_product(q, k, v, **options)
        beyond = (out / 1e-3 + options.get("o_zp", 0)).double()
        assert (got[beyond > most].float() == most).all() and (got[beyond < least].float() == least).all()
        assert (beyond > most).sum() > 100 and (beyond < least).sum() > 100


def test_torchaos_own_formula_differs_by_its_rounding_of_probabilities():
    """At most a_scale / 2 times the sum of |v|, over o_scale, and one code for the rounding of the result."""
    q, k, v = qkv(U8)
    a_scale, o_scale, o_zp = 1 / 255, 0.02, 128
    options = {**SCALES, **ZERO_POINTS, "o_scale": o_scale, "o_zp": o_zp}
    got = rt.qscaled_dot_product(q, k, v, a_scale=a_scale, **options)
    of_q, of_k, of_v = (numbers(x, SCALES[f"{name}_scale"], ZERO_POINTS[f"{name}_zp"]) for name, x in zip("qkv", (q, k, v)))
    weights = torch.softmax(of_q @ of_k.transpose(-2, -1) / math.sqrt(32), -1)
    weights = torch.round(weights / a_scale).clamp(0, 255) * a_scale
    torchaos = (torch.round(weights @ of_v / o_scale) + o_zp).clamp(0, 255)
    bound = a_scale / 2 * of_v.abs().sum(-2, keepdim=True) / o_scale + 1
    difference = (got.float() - torchaos).abs()
    assert (difference <= bound).all() and difference.max() > 0


@pytest.mark.parametrize("dtype", [U8, E4M3], ids=["uint8", "e4m3fn"])
def test_one_graph_holds_it(dtype):
    given, options = qkv(dtype), {"o_scale": 0.01, "q_scale": 0.02, "o_zp": 0}
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: rt.qscaled_dot_product(q, k, v, **options), fullgraph=True, backend="aot_eager")
    rt.reset_stats()
    got = compiled(*given)
    assert rt.stats() == {"served": 1, "fallback": {}}
    assert torch.equal(got.view(U8), rt.qscaled_dot_product(*given, **options).view(U8))
    torch._dynamo.reset()


REFUSED = [
    (rapt.UnsupportedDtypeError, {"query": torch.zeros(2, 4, 9, 32)}),
    (rapt.UnsupportedDtypeError, {"key": codes(E4M3, 2, 4, 33, 32)}),
    (rapt.UnsupportedDtypeError, {"value": torch.zeros(2, 4, 33, 32, dtype=torch.int8)}),
    (rapt.ShapeError, {"query": codes(U8, 4, 9, 32)}),
    (rapt.ShapeError, {"value": codes(U8, 2, 4, 32, 32)}),
    (rapt.UnsupportedError, {"dropout_p": 0.1}),
    (rapt.OptionError, {"q_zp": 256}),
    (rapt.OptionError, {"o_zp": -1}),
    (rapt.OptionError, {"o_scale": 0.0}),
    (rapt.OptionError, {"k_scale": float("nan")}),
    (rapt.OptionError, {"v_scale": float("inf")}),
]


@pytest.mark.parametrize("error, change", REFUSED, ids=["-".join(change) for _, change in REFUSED])
def test_what_is_refused(error, change):
    q, k, v = qkv(U8)
    given = {"query": q, "key": k, "value": v}
    with pytest.raises(error):
        rt.qscaled_dot_product(**(given | change))
    rt.qscaled_dot_product(**given)


def test_float8_has_no_zero_points():
    q, k, v = qkv(E4M3)
    for name in ("q_zp", "k_zp", "v_zp", "o_zp"):
        with pytest.raises(rapt.OptionError, match=f"{name} = 1; allowed with torch.float8_e4m3fn: 0"):
            rt.qscaled_dot_product(q, k, v, **{name: 1})


PROGRAM = f"""
import torch, rapt, rapt.torch
try:
    rapt.torch.register_torchao()
except rapt.UnsupportedError as error:
    print("import torchao" in str(error))
library = torch.library.Library("torchao", "FRAGMENT")
library.define({SCHEMA!r})
torch.library.register_fake("torchao::qscaled_dot_product", lambda query, *rest, **options: torch.empty_like(query), lib=library)
if OWN:
    library.impl("qscaled_dot_product", lambda query, *rest, **options: query.clone(), "CPU")
print(rapt.torch.register_torchao(), rapt.torch.register_torchao())
q, k, v = (torch.randint(0, 256, (2, 4, n, 32), dtype=torch.uint8) for n in (5, 9, 9))
options = dict(q_scale=0.02, q_zp=127, k_scale=0.02, k_zp=120, v_scale=0.02, v_zp=130, a_scale=0.004, o_scale=0.01, o_zp=128)
op = torch.ops.torchao.qscaled_dot_product
expected = q if OWN else rapt.torch.qscaled_dot_product(q, k, v, **options)
rapt.torch.reset_stats()
print(torch.equal(op(q, k, v, **options), expected), rapt.torch.stats()["served"])
compiled = torch.compile(lambda *given: op(*given, **options), fullgraph=True, backend="aot_eager")
print(torch.equal(compiled(q, k, v), expected))
"""


@pytest.mark.parametrize("own", [False, True])
def test_torchaos_op_is_rapts_where_it_has_no_kernel(own):
    ran = fresh.run(PROGRAM.replace("OWN", str(own)))
    lines = ["True", "False False", "True 0", "True"] if own else ["True", "True True", "True 1", "True"]
    assert ran.stdout.splitlines() == lines, ran.stdout + ran.stderr


def test_torchao_as_it_is_installed():
    """The schema above is that of the real one."""
    pytest.importorskip("torchao.ops")
    schema = str(torch.ops.torchao.qscaled_dot_product.default._schema)
    defaults = SCHEMA.replace("0.0", "0.").replace("1.0", "1.")
    assert schema == f"torchao::{defaults}"
