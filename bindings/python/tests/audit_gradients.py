"""The auditor on gradients and dropout: each planted fault is caught by its hazard, named, and reproduced; what is sound is not accused.

test_audit_gradients.py runs it.
"""

import functools

import pytest
import rapt

pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import implementations  # noqa: E402
from mutants import gradients  # noqa: E402
from mutants.table import with_gradients  # noqa: E402
from rapt._audit.gradients import JUDGES  # noqa: E402
from rapt._audit.hazards import BY_NAME, TABLE  # noqa: E402
from reproducers import assert_stands_alone  # noqa: E402

OF_GRADIENTS = [hazard.name for hazard in TABLE if hazard.judge in JUDGES]
MUTANTS = with_gradients()


# What costs most is heard of the mutants that break it.
COSTLY = {"gradient-nondeterminism", "dropped-part"}


@pytest.fixture(scope="module", autouse=True)
def what_a_backward_imports():
    """Here once, rather than in each fork: a second or two of sympy."""
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(x * 1, x, torch.ones(1))


def audit(fn, hazards=OF_GRADIENTS, dtypes=("float32",)):
    # A callee that no import finds is audited in a fork, where torch is loaded already.
    return rapt.audit(functools.wraps(fn)(lambda *tensors, **options: fn(*tensors, **options)), dtypes=dtypes, hazards=hazards, kind="torch", budget_s=100)


def test_every_hazard_has_a_mutant_and_every_mutant_a_hazard():
    assert {mutant.hazard for mutant in MUTANTS} == set(OF_GRADIENTS)
    assert {mutant.function.__name__ for mutant in MUTANTS} == set(gradients.FAULTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.function.__name__)
def test_a_mutant_is_caught_and_rightly_named(mutant):
    report = audit(mutant.function, [hazard for hazard in OF_GRADIENTS if hazard not in COSTLY - {mutant.hazard, *mutant.follows}])
    found = {finding.cause: finding for finding in report.findings}
    assert mutant.cause in found, report
    assert not set(found) - {mutant.cause, *mutant.follows}, report
    finding = found[mutant.cause]
    assert finding.severity == BY_NAME[mutant.hazard].severity and finding.hazard == mutant.hazard
    assert_stands_alone(finding.reproducer)
    assert finding.reproducer["reproduced"], finding.reproducer


def test_what_the_mutants_were_broken_from_is_clean():
    report = audit(gradients.sound)
    assert report.ok and {hazard.verdict for hazard in report.hazards} == {"clean"}, report


def registered(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch's own function while Rapt is registered."""
    with rapt.torch.backend():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


@pytest.mark.parametrize("function", [rapt.scaled_dot_product_attention, rapt.attention, registered], ids=lambda function: function.__name__)
def test_rapts_gradients_are_clean(function):
    dtypes = ["float32", "bfloat16", "float16", "float64"] if function is rapt.attention else ["float32", "bfloat16"]
    report = audit(function, dtypes=dtypes)
    left = {hazard.name: hazard.verdict for hazard in report.hazards if hazard.verdict != "clean"}
    without = ("dropped-part", "dropout-seed", "dropout-reuse") if function is rapt.attention else ()
    assert report.ok and left == dict.fromkeys(without, "not offered"), report


def test_correct_implementations_are_not_accused():
    for function in (implementations.einsum_torch, implementations.math_path):
        report = audit(function)
        assert {finding.hazard for finding in report.findings} <= {"nan-in-masked-gradients", "dead-row-gradients"}, report
        assert all(finding.reproducer["reproduced"] for finding in report.findings), report


def test_what_has_no_gradients_is_not_accused():
    report = audit(lambda q, k, v, attn_mask=None, is_causal=False: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal).detach())
    assert {hazard.verdict for hazard in report.hazards} == {"not offered"}, report
