"""No false accusation: Rapt is clean on every hazard, and what is said of other correct attentions is true."""

import importlib.util

import pytest
import rapt

pytest.importorskip("numpy")
import implementations  # noqa: E402
from reproducers import assert_stands_alone  # noqa: E402

# True of a plain formula, and reproduced each time: 0 · NaN is NaN, a row without keys is 0/0, every score is held in memory,
# BLAS picks its loops by shape, strides and threads. onnxruntime answers a row at the lowest finite bias with zeros.
FACTS = {
    "lowest-taken-for-minus-infinity",
    "masked-nonfinite-leaks", "fully-masked-row", "zero-length", "memory-plain", "memory-bool-mask", "memory-mask-3d",
    "memory-head-dim-v", "memory-inner-stride", "thread-count-bits", "batch-neighbour-bits", "stride-bits",
}  # fmt: skip
PLAIN = [
    "memory-head-dim-v",
    "memory-inner-stride",
    "memory-mask-3d",
    "thread-count-bits",
    "batch-neighbour-bits",
    "stride-bits",
]


def heard(*left_out):
    """Hazards of a CPU but these and those of gradients, which audit_gradients.py hears."""
    from rapt._audit.gradients import JUDGES
    from rapt._audit.hazards import TABLE

    return [hazard.name for hazard in TABLE if hazard.concerns("cpu") and hazard.name not in left_out and hazard.judge not in JUDGES]


def assert_true(report):
    """Nothing graver than a fact, and every fact reproduced without Rapt."""
    assert not report.at_least("high"), report
    assert {finding.cause for finding in report.findings} <= FACTS, report
    for finding in report.findings:
        made = finding.reproducer
        assert_stands_alone(made)
        if finding.severity != "low":
            assert made["reproduced"], f"{finding.hazard}: {made}"
    accuracy = next(hazard for hazard in report.hazards if hazard.name == "accuracy")
    assert accuracy.verdict == "clean", report


@pytest.mark.parametrize(
    "name, dtypes", [
        ("einsum_numpy", ["float64", "float32"]),
        ("einsum_torch", ["float32"]),
        ("math_path", ["float32"]),
        ("onnxruntime_attention", ["float32"]),
        ("compiled_formula", ["float32"]),
    ],
)  # fmt: skip
def test_a_correct_implementation_is_not_accused(name, dtypes):
    needs = {"einsum_torch": "torch", "math_path": "torch", "compiled_formula": "torch", "onnxruntime_attention": "onnxruntime"}
    if (
        importlib.util.find_spec(needs.get(name, "numpy")) is None
        or name.startswith("onnx")
        and importlib.util.find_spec("onnx") is None
    ):
        pytest.skip(f"{needs[name]} is not installed")
    # Each new shape or stride costs a compilation: the compiled formula hears what needs few of them.
    few = ["accuracy", "head-mixing", "bool-mask", "causal"]
    hazards = few if name == "compiled_formula" else heard(*PLAIN)
    report = rapt.audit(getattr(implementations, name), dtypes=dtypes, hazards=hazards, budget_s=300)
    assert_true(report)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("function", ["scaled_dot_product_attention", "attention"])
def test_rapt_is_clean_on_every_hazard(function, kind):
    if kind == "torch":
        pytest.importorskip("torch")
    else:
        pytest.importorskip("ml_dtypes")
    dtypes = (
        ["float32", "bfloat16", "float16", "float64"] if (function, kind) == ("attention", "torch") else ["float32", "bfloat16"]
    )
    report = rapt.audit(getattr(rapt, function), dtypes=dtypes, hazards=heard(), kind=kind, budget_s=300)
    assert report.ok, report
    assert report.offer.kind == kind
    left = {hazard.name: hazard.verdict for hazard in report.hazards if hazard.verdict != "clean"}
    expressible = {"negative-strides"} if kind == "torch" else {"thread-count-bits"}
    if function == "scaled_dot_product_attention":
        expressible |= {"window", "softcap", "sinks", "alibi", "lse"}
    assert left == dict.fromkeys(expressible, "not offered"), report


def registered(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch's own function while Rapt is registered."""
    from torch.nn.functional import scaled_dot_product_attention

    with rapt.torch.backend():
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def test_pytorch_with_rapt_registered_is_clean():
    pytest.importorskip("torch")
    report = rapt.audit(registered, dtypes=["float32", "bfloat16"], hazards=heard("concurrent-calls"), budget_s=300)
    assert report.ok, report
    assert {hazard.verdict for hazard in report.hazards} == {"clean", "not offered"}, report
