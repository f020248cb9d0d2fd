"""`rapt.umfa`: each name of UMFA, each field by its effect on numbers or by its refusal, numpy and torch.

Values are compared with the f64 reference on the numbers that the codes stand for. What a scale must be is computed here in numpy.
"""

import ast
import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import rapt
from rapt import umfa
from rapt.umfa import (
    BlockSizeConfig,
    HybridGranularityConfig,
    HybridStrategy,
    MFAContext,
    OutputPrecision,
    QuantizationConfig,
    TensorAnalysisMetrics,
)
from rapt.umfa import QuantizationGranularity as Granularity
from rapt.umfa import QuantizationPrecision as Precision
from rapt.umfa import quantized_scaled_dot_product_attention as by_name
from rapt.umfa import quantized_scaled_dot_product_attention_unified as unified
from reference import assert_close, flash_rounded, reference, to_f64, to_torch

BF16 = ml_dtypes.bfloat16
NUMPY = {Precision.FP16: np.float16, Precision.BF16: BF16, Precision.FP32: np.float32}
FORMATS = {Precision.INT8: "int8", Precision.INT4: "int4"}
NAMES = """
    MetalSDPABackend register_backend unregister_backend get_version is_metal_available metal_scaled_dot_product_attention
    quantized_scaled_dot_product_attention quantized_scaled_dot_product_attention_enhanced
    quantized_scaled_dot_product_attention_unified quantized_scaled_dot_product_attention_with_config QuantizationConfig
    QuantizationGranularity QuantizationPrecision OutputPrecision BlockSizeConfig HybridGranularityConfig HybridStrategy
    TensorAnalysisMetrics MFAContext flash_attention_forward attention analyze_tensor_characteristics select_hybrid_granularities
""".split()


@pytest.fixture(params=["numpy", "torch"])
def of(request):
    """What makes an array of numpy or a tensor of torch."""
    if request.param == "torch":
        pytest.importorskip("torch")
        return to_torch
    return lambda x: x


def tensors(rng, kv_heads=4, dtype=np.float32):
    """q, k and v; k has a channel, v a token, of large numbers, so that granularities differ."""
    q = rng.standard_normal((2, 4, 7, 32)).astype(dtype)
    k, v = (rng.standard_normal((2, kv_heads, 21, dim)).astype(dtype) for dim in (32, 16))
    k[..., 3] *= 20
    v[:, :, 5] *= 20
    return q, k, v


def configured(**fields):
    config = QuantizationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def numbers(x, precision, granularity="tensor", block_size=None):
    """The numbers of `x` in a precision, as an f64 array."""
    if precision in NUMPY:
        return to_f64(x.astype(NUMPY[precision]))
    return to_f64(rapt.quantize(x, FORMATS[precision], granularity=granularity, block_size=block_size).dequantize())


def check(got, q, k, v, dtype="float32", storage=None, **options):
    """`got` against the definition on the numbers q, k and v, a matrix each or more; the peer sums in float32 and rounds once. `storage`: the
    query's dtype, where its rounding of weights is more than that of what is written (docs/reference/numerics.md#pairs-of-codes)."""
    assert str(got.dtype).removeprefix("torch.") == dtype
    q, k, v, got = (to_f64(x)[(None,) * (4 - x.ndim)] for x in (q, k, v, got))
    expected, _ = reference(q, k, v, **options)
    peer = flash_rounded(*(x.astype(np.float32) for x in (q, k, v)), **options)
    assert_close(got, expected, storage or dtype, [peer.astype(BF16 if dtype == "bfloat16" else dtype)])


def storage_of(precision):
    """The storage dtype of queries in bfloat16, of which weights may be rounded; `None` of others."""
    return "bfloat16" if precision == Precision.BF16 else None


# Names


def test_every_name_is_there_and_the_stub_agrees():
    assert sorted(umfa.__all__) == sorted(NAMES) and all(hasattr(umfa, name) for name in NAMES)
    tree = ast.parse((Path(umfa.__file__).parent / "__init__.pyi").read_text(encoding="utf-8"))
    stubs = {it.name: it for it in tree.body if isinstance(it, (ast.FunctionDef, ast.ClassDef))}
    assert sorted(stubs) == sorted(NAMES)
    for name, stub in stubs.items():
        if isinstance(stub, ast.FunctionDef):
            own = inspect.signature(getattr(umfa, name))
            if name != "attention":  # which hands its keywords on
                assert [it.arg for it in stub.args.args + stub.args.kwonlyargs] == list(own.parameters), name
        elif issubclass(getattr(umfa, name), umfa._config._Record):
            fields = [it.target.id for it in stub.body if isinstance(it, ast.AnnAssign)]
            assert fields == list(getattr(umfa, name)._fields), name
        members = [it.targets[0].id for it in stub.body if isinstance(it, ast.Assign)]
        assert members == list(getattr(getattr(umfa, name), "__members__", {})), name


def test_enumerations_have_umfas_numbers_and_configurations_its_defaults():
    assert [int(it) for it in Precision] == [0, 1, 2, 3, 4] and Precision(3) is Precision.INT8
    assert [it.name for it in OutputPrecision] == ["FP32", "FP16", "BF16"] and OutputPrecision.FP32 != Precision.FP16
    assert [it.name for it in Granularity] == ["TENSOR_WISE", "ROW_WISE", "BLOCK_WISE", "HYBRID"]
    assert [it.name for it in HybridStrategy] == ["PERFORMANCE_FIRST", "ACCURACY_FIRST", "BALANCED"]
    sizes = BlockSizeConfig()
    assert (sizes.query_block_size, sizes.key_block_size, sizes.value_block_size, sizes.head_block_size) == (128, 64, 64, 1)
    assert BlockSizeConfig(q_blk=1, k_blk=2, v_blk=3, h_blk=4) == BlockSizeConfig(1, 2, 3, 4) != sizes
    config = QuantizationConfig()
    assert (config.precision, config.query_precision, config.key_precision) == ("int8", Precision.FP16, Precision.INT8)
    assert (config.granularity, config.output_precision) == (Granularity.TENSOR_WISE, OutputPrecision.FP32)
    flags = (config.is_causal, config.enable_mixed_precision, config.force_symmetric_quantization)
    assert flags == (False, True, False) and config.scale is None
    assert not config.enable_per_tensor_granularity and config.enable_adaptive_block_sizes
    assert config.hybrid_strategy is HybridStrategy.BALANCED and config.hybrid_selection is None
    assert config.validate_config() and "granularity=QuantizationGranularity.TENSOR_WISE" in repr(config)
    assert HybridGranularityConfig().selection_reasoning == "" and TensorAnalysisMetrics().has_outliers is False


def test_configurations_are_values():
    config, sizes = configured(precision="int4"), BlockSizeConfig(8, 8, 8)
    config.block_sizes = sizes
    config.block_sizes.key_block_size = 16
    assert (sizes.key_block_size, config.block_sizes.key_block_size, QuantizationConfig().block_sizes.key_block_size) == (8, 16, 64)
    for made in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert made == config and made.key_precision is Precision.INT4
        made.block_sizes.key_block_size = 4
        assert made != config


def test_nothing_is_imported_before_it_is_needed():
    program = (
        "import sys, rapt\n"
        "assert 'rapt.umfa' not in sys.modules\n"
        "rapt.umfa.QuantizationConfig(), rapt.umfa.get_version(), rapt.umfa.is_metal_available()\n"
        "print([name for name in ('torch', 'numpy', 'rapt.torch') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_version_and_metal():
    assert umfa.get_version() == rapt.version()
    assert umfa.is_metal_available() is rapt.is_available("metal")
    if sys.platform == "linux":
        assert umfa.is_metal_available() is False


def test_registering_is_pytorchs_and_not_counted(rng, torch):
    import rapt.torch

    q, k, v = (to_torch(x) for x in tensors(rng))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert not rapt.torch.is_registered()
    umfa.register_backend()
    umfa.MetalSDPABackend.register_backend()
    try:
        rapt.torch.reset_stats()
        out = sdpa(q, k, v)
        assert rapt.torch.stats()["served"] == 1 and torch.equal(out, rapt.scaled_dot_product_attention(q, k, v))
        with rapt.torch.backend():
            umfa.MetalSDPABackend.unregister_backend()
            umfa.unregister_backend()
            assert rapt.torch.is_registered(), "another's registration stays"
    finally:
        umfa.unregister_backend()
    assert not rapt.torch.is_registered()


def test_metal_scaled_dot_product_attention(rng, of):
    q, k, v = tensors(rng, kv_heads=2)
    mask = rng.random((2, 1, 7, 21)) < 0.7
    got = umfa.metal_scaled_dot_product_attention(of(q), of(k), of(v), attn_mask=of(mask), scale=0.3, enable_gqa=True)
    check(got, q, k, v, mask=mask, scale=0.3)
    got = umfa.metal_scaled_dot_product_attention(of(q), of(k), of(v), None, 0.0, True, enable_gqa=True)
    check(got, q, k, v, causal=True)
    with pytest.raises(rapt.OptionError, match=r"dropout_p = 1\.5"):
        umfa.metal_scaled_dot_product_attention(of(q), of(k), of(v), dropout_p=1.5, enable_gqa=True)


# Quantized attention


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16", "bfloat16", "float32"])
def test_a_precision_by_its_name(rng, of, precision):
    q, k, v = tensors(rng)
    member = QuantizationConfig.string_to_quantization_precision(precision)
    before = [x.tobytes() for x in (q, k, v)]
    check(by_name(of(q), of(k), of(v), precision), q, numbers(k, member), numbers(v, member))
    got = by_name(of(q), of(k), of(v), precision, is_causal=True, scale=0.2)
    check(got, q, numbers(k, member), numbers(v, member), causal=True, scale=0.2)
    assert [x.tobytes() for x in (q, k, v)] == before, "inputs are read"
    if precision == "int8":
        np.testing.assert_array_equal(to_f64(by_name(of(q), of(k), of(v))), to_f64(by_name(of(q), of(k), of(v), "int8")))


@pytest.mark.parametrize("query", Precision)
def test_precisions_of_each_operand(rng, of, query):
    q, k, v = tensors(rng)
    for key, value in [(Precision.INT8, Precision.INT4), (Precision.INT4, Precision.FP32), (Precision.BF16, Precision.FP16)]:
        config = configured(query_precision=query, key_precision=key, value_precision=value)
        got = unified(of(q), of(k), of(v), config)
        check(got, numbers(q, query), numbers(k, key), numbers(v, value), storage=storage_of(query))


def test_half_precision_operands_and_the_string_of_a_configuration(rng, of):
    q, k, v = tensors(rng, dtype=BF16)
    config = configured(precision="int4", query_precision=Precision.BF16)
    assert (config.key_precision, config.value_precision, config.precision) == (Precision.INT4, Precision.INT4, "int4")
    storage = storage_of(Precision.BF16)
    check(unified(of(q), of(k), of(v), config), to_f64(q), *(numbers(x, Precision.INT4) for x in (k, v)), storage=storage)
    config.value_precision = Precision.INT8
    assert config.precision == "mixed"
    of_v = numbers(v, Precision.INT8)
    check(unified(of(q), of(k), of(v), config), to_f64(q), numbers(k, Precision.INT4), of_v, storage=storage)


def test_all_forms_take_a_configuration(rng):
    q, k, v = tensors(rng)
    config = configured(granularity=Granularity.ROW_WISE, is_causal=True, scale=0.4)
    out = unified(q, k, v, config)
    for form in ("enhanced", "with_config"):
        np.testing.assert_array_equal(getattr(umfa, f"quantized_scaled_dot_product_attention_{form}")(q, k, v, config), out)
    check(out, numbers(q, Precision.FP16), *(numbers(x, Precision.INT8, "token") for x in (k, v)), causal=True, scale=0.4)


@pytest.mark.parametrize("precision", FORMATS)
def test_granularities(rng, of, precision):
    q, k, v = tensors(rng)
    errors = {}
    exact, _ = reference(q, k, v)
    for granularity, named in [(Granularity.TENSOR_WISE, "tensor"), (Granularity.ROW_WISE, "token")]:
        config = configured(key_precision=precision, value_precision=precision, granularity=granularity)
        got = unified(of(q), of(k), of(v), config)
        check(got, numbers(q, Precision.FP16), numbers(k, precision, named), numbers(v, precision, named))
        errors[named] = np.linalg.norm(to_f64(got) - exact)
    assert errors["token"] < errors["tensor"]


def in_blocks(x, tokens, heads, dims, largest=127):
    """The numbers of `x` [batch, heads, len, dim] whose blocks share absmax / largest, in f64: UMFA's blocks by their definition."""
    made = np.empty(x.shape)
    for b in range(x.shape[0]):
        for h in range(0, x.shape[1], heads):
            for s in range(0, x.shape[2], tokens):
                for d in range(0, x.shape[3], dims):
                    at = (b, slice(h, h + heads), slice(s, s + tokens), slice(d, d + dims))
                    scale = np.float32(np.abs(x[at]).max() / largest)
                    made[at] = np.rint(x[at] / np.float64(scale)).clip(-largest, largest) * scale
    return made


SIZES = [(3, 4, 5, 1, None), (100, 100, 100, 3, None), (2, 8, 6, 2, 12), (1, 1, 1, 1, 8), (1, 1, 1, 1, None), (1, 1, 1, 9, 5)]


@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_of_tokens_heads_and_head_dim(rng, of, sizes):
    q, k, v = tensors(rng)
    config = configured(query_precision=Precision.INT8, granularity=Granularity.BLOCK_WISE, block_sizes=BlockSizeConfig(*sizes))
    *tokens, heads, dims = sizes
    blocks = [in_blocks(x, size, heads, dims or x.shape[-1]) for x, size in zip((q, k, v), tokens)]
    check(unified(of(q), of(k), of(v), config), *blocks)
    config.key_precision = Precision.INT4
    blocks[1] = in_blocks(k, tokens[1], heads, dims or 32, 7)
    check(unified(of(q), of(k), of(v), config), *blocks)


def test_each_block_size_is_that_of_its_operand(rng):
    q, k, v = tensors(rng)
    config = configured(query_precision=Precision.INT8, granularity=Granularity.BLOCK_WISE, block_sizes=BlockSizeConfig(7, 21, 21))
    outs = [unified(q, k, v, config)]
    for name, value in [("query_block_size", 2), ("key_block_size", 2), ("value_block_size", 2), ("head_block_size", 2), ("dim_block_size", 8)]:
        changed = copy.deepcopy(config)
        setattr(changed.block_sizes, name, value)
        outs.append(unified(q, k, v, changed))
    assert len({out.tobytes() for out in outs}) == len(outs)
    matrix = unified(q[0, 0], k[0, 0], v[0, 0], config)
    np.testing.assert_allclose(matrix, outs[0][0, 0], rtol=1e-6, atol=1e-6)
    assert unified(q[:, :, :0], k, v, config).shape == (2, 4, 0, 16)


@pytest.mark.parametrize("precision, dtype", [("FP32", "float32"), ("FP16", "float16"), ("BF16", "bfloat16")])
def test_output_precision(rng, of, precision, dtype):
    q, k, v = tensors(rng)
    for query in (Precision.FP32, Precision.INT8):
        config = configured(output_precision=OutputPrecision[precision], query_precision=query)
        got = unified(of(q), of(k), of(v), config)
        check(got, numbers(q, query), numbers(k, Precision.INT8), numbers(v, Precision.INT8), dtype)


def test_mixed_precision(rng):
    q, k, v = tensors(rng)
    config = configured(enable_mixed_precision=False)
    assert not config.validate_config()
    for call in (lambda: unified(q, k, v, config), lambda: umfa.select_hybrid_granularities(q, k, v, config)):
        with pytest.raises(rapt.OptionError, match=r"query_precision FP16, .*`config\.query_precision = .* config\.key_precision`"):
            call()
    config.query_precision = config.value_precision = config.key_precision
    assert config.validate_config()
    check(unified(q, k, v, config), *(numbers(x, Precision.INT8) for x in (q, k, v)))


def test_any_strides_and_grouped_heads(rng, of):
    q, k, v = tensors(rng, kv_heads=2)
    config = configured(granularity=Granularity.BLOCK_WISE, block_sizes=BlockSizeConfig(1, 4, 4))
    turned = [of(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in (q, k, v)]
    np.testing.assert_array_equal(to_f64(unified(*turned, config)), to_f64(unified(of(q), of(k), of(v), config)))
    check(unified(*turned, config), numbers(q, Precision.FP16), in_blocks(k, 4, 1, 32), in_blocks(v, 4, 1, 16))


# HYBRID


def hybrid(**fields):
    return configured(granularity=Granularity.HYBRID, **fields)


def test_a_strategy_trades_error_for_bytes(rng, of):
    x = rng.standard_normal((2, 4, 64, 128)).astype(np.float32)
    chosen, errors = {}, []
    exact, _ = reference(x, x, x)
    for strategy in (HybridStrategy.PERFORMANCE_FIRST, HybridStrategy.BALANCED, HybridStrategy.ACCURACY_FIRST):
        config = hybrid(hybrid_strategy=strategy, force_symmetric_quantization=True, query_precision=Precision.FP32)
        got = unified(of(x), of(x), of(x), config)
        chosen[strategy.name] = config.hybrid_selection.key_granularity.name
        errors.append(np.linalg.norm(to_f64(got) - exact))
    assert chosen == {"PERFORMANCE_FIRST": "TENSOR_WISE", "BALANCED": "ROW_WISE", "ACCURACY_FIRST": "BLOCK_WISE"}
    assert errors == sorted(errors, reverse=True)
    assert config.hybrid_selection.key_blocks == BlockSizeConfig(1, 1, 1, 1, 16)
    codes = numbers(x, Precision.INT8, "block", 16)
    check(got, x, codes, codes)
    assert "key, value: block_wise 16, relative L2" in config.hybrid_selection.selection_reasoning
    assert "query: FP32, no codes" in config.hybrid_selection.selection_reasoning


def test_operands_choose_for_themselves_or_together(rng):
    q, k, v = (rng.standard_normal((1, 2, 40, 32)).astype(np.float32) for _ in range(3))
    k *= np.exp(rng.standard_normal((1, 2, 40, 1)) * 2).astype(np.float32)  # rows of different sizes
    v = np.sign(v).astype(np.float32)  # one scale loses nothing
    config = hybrid(enable_per_tensor_granularity=True, force_symmetric_quantization=True)
    out = unified(q, k, v, config)
    found = config.hybrid_selection
    assert (found.key_granularity, found.value_granularity) == (Granularity.ROW_WISE, Granularity.TENSOR_WISE)
    assert "key: row_wise" in found.selection_reasoning and "value: tensor_wise" in found.selection_reasoning
    check(out, numbers(q, Precision.FP16), numbers(k, Precision.INT8, "token"), v)
    config.enable_per_tensor_granularity = False
    together = umfa.select_hybrid_granularities(q, k, v, config)
    assert together.key_granularity is together.value_granularity is Granularity.ROW_WISE
    assert together.selection_reasoning.startswith("key, value: row_wise") and config.hybrid_selection is found


def test_adaptive_or_given_block_sizes(rng):
    q, k, v = (rng.standard_normal((1, 4, 32, 32)).astype(np.float32) for _ in range(3))
    k *= np.repeat(np.exp2(rng.integers(-2, 2, (1, 4, 8, 1))), 4, 2).astype(np.float32)  # four tokens of one size
    config = hybrid(enable_per_tensor_granularity=True, force_symmetric_quantization=True, hybrid_strategy=HybridStrategy.ACCURACY_FIRST)
    config.block_sizes = BlockSizeConfig(4, 2, 4, 1, 8)
    assert umfa.select_hybrid_granularities(q, k, v, config).key_blocks == BlockSizeConfig(1, 1, 1, 1, 16)
    config.enable_adaptive_block_sizes = False
    out = unified(q, k, v, config)
    found = config.hybrid_selection
    assert found.key_granularity is Granularity.BLOCK_WISE and found.key_blocks == config.block_sizes
    assert found.value_granularity is Granularity.ROW_WISE
    check(out, numbers(q, Precision.FP16), in_blocks(k, 2, 1, 8), numbers(v, Precision.INT8, "token"))


def test_symmetry_is_forced_or_a_zero_point_taken(rng, of):
    q, k = (rng.standard_normal((1, 4, 32, 32)).astype(np.float32) for _ in range(2))
    v = np.abs(rng.standard_normal((1, 4, 32, 32))).astype(np.float32) + 3
    config = hybrid(query_precision=Precision.FP32, hybrid_strategy=HybridStrategy.PERFORMANCE_FIRST)
    free = unified(of(q), of(k), of(v), config)
    assert "value: uint8 with a zero point" in config.hybrid_selection.selection_reasoning
    assert "key: uint8" not in config.hybrid_selection.selection_reasoning
    config.force_symmetric_quantization = True
    forced = unified(of(q), of(k), of(v), config)
    assert "uint8" not in config.hybrid_selection.selection_reasoning
    codes = numbers(k, Precision.INT8)
    check(free, q, codes, to_f64(rapt.quantize(v, "uint8").dequantize()))
    check(forced, q, codes, numbers(v, Precision.INT8))
    config.force_symmetric_quantization, config.value_precision = False, Precision.INT4
    check(unified(of(q), of(k), of(v), config), q, codes, numbers(v, Precision.INT4))


def test_hybrid_without_codes(rng):
    q, k, v = tensors(rng)
    config = hybrid(precision="fp32", query_precision=Precision.FP32)
    check(unified(q, k, v, config), q, k, v)
    assert config.hybrid_selection.selection_reasoning == "query: FP32, no codes; key: FP32, no codes; value: FP32, no codes"


def test_metrics_are_what_they_are_called(rng, of):
    x = rng.standard_normal((2, 3, 250, 40)).astype(np.float32)
    x[0, 0, :25] = 0
    found = umfa.analyze_tensor_characteristics(of(x), Precision.INT8)
    exact = x.astype(np.float64)
    assert found.dynamic_range == pytest.approx(np.ptp(exact)) and found.variance == pytest.approx(exact.var())
    assert found.mean_abs_value == pytest.approx(np.abs(exact).mean()) and found.sparsity_ratio == pytest.approx(1 / 60)
    assert (found.tensor_size, found.memory_footprint, found.has_outliers) == (x.size, x.nbytes, False)
    for precision in Precision:
        error = ((numbers(x, precision) - exact) ** 2).mean()
        estimate = umfa.analyze_tensor_characteristics(of(x), precision).quantization_error_estimate
        assert estimate == pytest.approx(error, rel=1e-6), precision
    x[:, :, ::10, ::4] *= 50
    assert umfa.analyze_tensor_characteristics(of(x), Precision.INT4).has_outliers


# Refusals


@pytest.mark.parametrize(
    "record, field, value, message",
    [
        (QuantizationConfig, "precision", "int3", "QuantizationConfig.precision = 'int3'; allowed: 'fp16'"),
        (QuantizationConfig, "precision", Precision.INT8, "allowed: 'fp16'"),
        (QuantizationConfig, "key_precision", "int4", "Mend: `QuantizationPrecision.INT4`"),
        (QuantizationConfig, "value_precision", 3, "allowed: QuantizationPrecision.FP16"),
        (QuantizationConfig, "query_precision", OutputPrecision.FP16, "allowed: QuantizationPrecision.FP16"),
        (QuantizationConfig, "output_precision", Precision.FP16, "allowed: OutputPrecision.FP32"),
        (QuantizationConfig, "granularity", "row_wise", "Mend: `QuantizationGranularity.ROW_WISE`"),
        (QuantizationConfig, "hybrid_strategy", None, "allowed: HybridStrategy.PERFORMANCE_FIRST"),
        (QuantizationConfig, "is_causal", 1, "allowed: True, False"),
        (QuantizationConfig, "enable_mixed_precision", None, "allowed: True, False"),
        (QuantizationConfig, "scale", float("nan"), "any finite number"),
        (QuantizationConfig, "scale", "1", "any finite number"),
        (QuantizationConfig, "q_block_size", 128, "has no field 'q_block_size'"),
        (BlockSizeConfig, "key_block_size", 0, "BlockSizeConfig.key_block_size = 0; allowed: an int from 1 up"),
        (BlockSizeConfig, "head_block_size", True, "an int from 1 up"),
        (BlockSizeConfig, "dim_block_size", 1.5, "an int from 1 up"),
        (TensorAnalysisMetrics, "variance", "1", "any finite number"),
        (HybridGranularityConfig, "selection_reasoning", 1, "a str"),
    ],
)
def test_fields_refuse_what_they_do_not_mean(record, field, value, message):
    made = record()
    with pytest.raises(rapt.OptionError) as refusal:
        setattr(made, field, value)
    assert message in str(refusal.value) and made == record()


def test_refusals_of_calls(rng, of):
    q, k, v = (of(x) for x in tensors(rng))
    config = QuantizationConfig()
    large, no_number = to_f64(q).astype(np.float32), to_f64(k).astype(np.float32)
    large[0, 0, 0, 0], no_number[1, 2, 3, 4] = 1e5, np.nan
    wide = large.astype(np.float64) * 1e40
    refusals = [
        (rapt.OptionError, "precision = 'int2'; allowed: 'fp16'", lambda: by_name(q, k, v, "int2")),
        (rapt.OptionError, "QuantizationConfig.is_causal = 'yes'", lambda: by_name(q, k, v, is_causal="yes")),
        (rapt.KindError, r"config is a dict.*`QuantizationConfig\(\)`", lambda: unified(q, k, v, {})),
        (rapt.KindError, "block_sizes is a int: asked is a BlockSizeConfig", lambda: configured(block_sizes=64)),
        (rapt.UnsupportedDtypeError, "value has dtype int8", lambda: unified(q, k, of(np.ones((2, 4, 21, 16), np.int8)), config)),
        (rapt.NumberError, r"query has .* float16. Mend: `config.query_precision = .*FP32`", lambda: unified(of(large), k, v, config)),
        (rapt.NumberError, r"key has .* float16. Mend: `precision='fp32'`", lambda: by_name(of(large), of(large), of(large), "fp16")),
        (rapt.NumberError, "Mend: `rapt.attention`", lambda: unified(of(wide), k, v, configured(query_precision=Precision.FP32))),
        (rapt.NumberError, "Mend: `QuantizationPrecision.FP32`", lambda: umfa.analyze_tensor_characteristics(of(large), Precision.FP16)),
        (rapt.ShapeError, "v has num_kv_heads 4, k has 3", lambda: unified(q, k[:, :3], v, config)),
        (rapt.OptionError, "key: x = a tensor without elements", lambda: unified(q, k[:, :, :0], v[:, :, :0], hybrid())),
        (rapt.KindError, "precision is a str", lambda: umfa.analyze_tensor_characteristics(q, "int8")),
        (rapt.OptionError, "an output is no codes", lambda: QuantizationConfig.string_to_precision("int8")),
        (rapt.OptionError, "precision = 'fp8'", lambda: QuantizationConfig.string_to_quantization_precision("fp8")),
        (rapt.OptionError, "granularity = 'column'", lambda: QuantizationConfig.string_to_granularity("column")),
        (rapt.OptionError, "cannot be deleted", lambda: delattr(config, "scale")),
    ]
    for granularity in Granularity:
        taking = configured(granularity=granularity)
        refusals += [
            (rapt.NumberError, r"key: x\[1, 2, 3, 4\] is NaN", lambda taking=taking: unified(q, of(no_number), v, taking)),
            (rapt.KindError, "key is a list", lambda taking=taking: unified(q, [1.0], v, taking)),
            (rapt.ShapeError, "value has 1 dimensions", lambda taking=taking: unified(q, k, v[0, 0, 0], taking)),
        ]
    for error, message, call in refusals:
        with pytest.raises(error, match=message):
            call()


def test_names_of_members():
    for precision in Precision:
        text = QuantizationConfig.quantization_precision_to_string(precision)
        assert text == precision.name.lower() and QuantizationConfig.string_to_quantization_precision(text) is precision
    for precision in OutputPrecision:
        assert QuantizationConfig.string_to_precision(QuantizationConfig.precision_to_string(precision)) is precision
    for granularity in Granularity:
        text = QuantizationConfig.granularity_to_string(granularity)
        assert text == granularity.name.lower() and QuantizationConfig.string_to_granularity(text) is granularity
    assert QuantizationConfig.string_to_granularity("row") is Granularity.ROW_WISE
    recommended = {
        OutputPrecision.BF16: configured(output_precision=OutputPrecision.BF16),
        OutputPrecision.FP16: configured(),
        OutputPrecision.FP32: configured(precision="fp32", query_precision=Precision.FP32),
    }
    assert all(config.get_recommended_output_precision() is it for it, config in recommended.items())


# The numpy package


def arrays(rng, dtype):
    """q, k and v [batch, len, heads, head_dim]."""
    return tuple((rng.standard_normal((2, length, 3, 32)) * 0.5).astype(dtype) for length in (9, 20, 20))


def turned(x):
    return to_f64(x).swapaxes(1, 2)


SPELLINGS = [("fp16", np.float16), ("half", np.float16), ("bf16", BF16), (1, BF16), ("Float32", np.float32), (2, np.float32)]


@pytest.mark.parametrize("precision, dtype", SPELLINGS)
def test_flash_attention_forward_in_each_precision(rng, precision, dtype):
    q, k, v = arrays(rng, dtype)
    with MFAContext() as context:
        for output, name in [("fp16", "float16"), ("bfloat16", "bfloat16"), (Precision.FP32, "float32")]:
            got = umfa.flash_attention_forward(context, q, k, v, input_precision=precision, output_precision=output)
            check(got.swapaxes(1, 2), *map(turned, (q, k, v)), name)
        got = umfa.flash_attention_forward(
            context, q[0, :, 0], k[0, :, 0], v[0, :, 0], causal=True, softmax_scale=0.3, input_precision=precision, output_precision="fp32"
        )
    check(got, *(to_f64(x[0, :, 0]) for x in (q, k, v)), causal=True, scale=0.3)


def test_intermediate_precision_is_the_least_that_is_taken(rng):
    q, k, v = (rng.standard_normal((1, 256, 4, 64)).astype(BF16) for _ in range(3))
    exact, _ = reference(*map(turned, (q, k, v)))
    errors = {}
    for precision in ("bf16", "fp16", "fp32"):
        got = umfa.attention(q, k, v, input_precision="bf16", intermediate_precision=precision, output_precision="fp32")
        errors[precision] = np.linalg.norm(turned(got) - exact) / np.linalg.norm(exact)
    assert errors["fp16"] == errors["fp32"] < 1e-5
    plan = rapt.explain(q, k, v, layout="bshd", out_dtype="float32")
    assert errors["bf16"] < (5e-3 if plan.p_rounding == "storage" else 1e-5)
    if plan.p_rounding == "storage":
        assert errors["bf16"] > 10 * errors["fp32"]


def test_masks_are_umfas(rng, of):
    q, k, v = arrays(rng, np.float16)
    lib = [of(x) for x in (q, k, v)]
    hidden = rng.random((2, 9, 3, 20)) < 0.3
    keep = ~hidden.swapaxes(1, 2)
    for mask in (hidden, hidden.astype(np.uint8), hidden.astype(np.int16)):
        got = umfa.attention(*lib, attn_mask=of(mask), output_precision="fp32")
        check(got.swapaxes(1, 2), *map(turned, (q, k, v)), mask=keep)
    bias = rng.standard_normal((9, 1, 20)).astype(np.float32)
    got = umfa.attention(*lib, attn_mask=of(bias), output_precision="fp32")
    check(got.swapaxes(1, 2), *map(turned, (q, k, v)), mask=bias[None].swapaxes(1, 2))
    got = umfa.attention(*(x[0, :, 0] for x in lib), attn_mask=of(hidden[0, :, 0]), output_precision="fp32")
    check(got, *(to_f64(x[0, :, 0]) for x in (q, k, v)), mask=~hidden[0, :, 0])


def test_contexts(rng):
    q, k, v = arrays(rng, np.float16)
    context = MFAContext()
    assert context and isinstance(context.handle, rapt.Context)
    out = umfa.attention(q, k, v, context)
    np.testing.assert_array_equal(out, umfa.attention(q, k, v))
    np.testing.assert_array_equal(out, rapt.attention(q, k, v, layout="bshd"))
    context.close()
    context.close()
    assert not context and context.handle is None
    with pytest.raises(rapt.OptionError, match=r"context is closed. Mend: `MFAContext\(\)`"):
        umfa.flash_attention_forward(context, q, k, v)


def test_refusals_of_the_numpy_package(rng):
    q, k, v = arrays(rng, np.float32)
    refusals = [
        (rapt.DtypeMismatchError, "q has dtype float32, input_precision is 'fp16'. Mend: `input_precision='fp32'`", {}),
        (rapt.OptionError, "input_precision = 'fp8'", {"input_precision": "fp8"}),
        (rapt.OptionError, "input_precision = 5", {"input_precision": 5}),
        (rapt.OptionError, "input_precision = 'int8': codes .*k_descale", {"input_precision": "int8"}),
        (rapt.OptionError, "intermediate_precision = 4: codes", {"input_precision": "fp32", "intermediate_precision": 4}),
        (rapt.OptionError, "output_precision = 'int4': codes", {"input_precision": "fp32", "output_precision": "int4"}),
        (rapt.OptionError, "output_precision = True", {"input_precision": "fp32", "output_precision": True}),
        (rapt.KindError, "attn_mask is a list", {"input_precision": "fp32", "attn_mask": [True]}),
        (rapt.ShapeError, "attn_mask has 5 dim", {"input_precision": "fp32", "attn_mask": np.ones((1, 1, 1, 1, 20), bool)}),
        (rapt.UnsupportedDtypeError, "mask has dtype int64", {"input_precision": "fp32", "attn_mask": np.ones(20, np.int64)}),
        (TypeError, "dropout_p", {"dropout_p": 0.0}),
    ]
    for error, message, options in refusals:
        with pytest.raises(error, match=message):
            umfa.attention(q, k, v, **options)
    with pytest.raises(rapt.ShapeError, match=r"q has 3 dimensions.*`q\[:, :, None\]`"):
        umfa.attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], input_precision="fp32")
    with pytest.raises(rapt.UnsupportedDtypeError, match="q has dtype float64"):
        umfa.attention(*(x.astype(np.float64) for x in (q, k, v)), input_precision="fp32")
    with pytest.raises(rapt.KindError, match="context is a NoneType: asked is a MFAContext"):
        umfa.flash_attention_forward(None, q, k, v)
