"""The auditor proves itself: each planted mutant is caught, rightly named, and reproduced by a program without Rapt."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import rapt

np = pytest.importorskip("numpy")
from mutants import boundary, sound, values  # noqa: E402
from mutants.table import ON_ANY_DEVICE  # noqa: E402
from rapt._audit import gradients  # noqa: E402
from rapt._audit.hazards import TABLE  # noqa: E402
from reproducers import assert_stands_alone  # noqa: E402

# What costs most and concerns bits or memory is checked only for the mutants that break it.
COSTLY = {h.name for h in TABLE if h.judge in ("memory", "strides", "neighbours", "threads", "concurrent", "stale", "repeat")}
# Gradients are those of torch tensors: audit_gradients.py.
CHEAP = [hazard.name for hazard in TABLE if hazard.name not in COSTLY and hazard.judge not in gradients.JUDGES]


def test_every_mutant_is_in_the_table():
    planted = {
        function
        for module in (values, boundary)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert planted == {mutant.function for mutant in ON_ANY_DEVICE} and len(planted) == len(ON_ANY_DEVICE) >= 20


def audit(mutant):
    return rapt.audit(mutant.function, dtypes=[mutant.dtype], hazards=[*CHEAP, *([mutant.hazard] if mutant.hazard in COSTLY else [])])


@pytest.fixture(scope="module")
def audits(request):
    """{mutant: the audit on its way}, two at a time: each waits for its child most of the time."""
    asked = {item.callspec.params["mutant"] for item in request.session.items if "mutant" in getattr(item, "fixturenames", ())}
    pool = ThreadPoolExecutor(2)
    yield {mutant: pool.submit(audit, mutant) for mutant in ON_ANY_DEVICE if mutant in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", ON_ANY_DEVICE, ids=lambda mutant: mutant.function.__name__)
def test_a_mutant_is_caught_and_rightly_named(mutant, audits):
    if mutant.dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    report = audits[mutant].result()
    found = {(finding.hazard, finding.cause): finding for finding in report.findings}
    assert (mutant.hazard, mutant.cause) in found, f"{list(found)}\n{report}"
    strangers = {name for _, name in found} - {mutant.cause, *mutant.follows}
    assert not strangers, f"also accused of {strangers}\n{report}"
    made = found[mutant.hazard, mutant.cause].reproducer
    assert made["reproduced"] and made["ran_in"] == "a fresh process", made
    assert_stands_alone(made)
    assert found[mutant.hazard, mutant.cause].dtypes == [mutant.dtype]


def test_what_the_mutants_were_broken_from_is_clean():
    report = rapt.audit(
        sound.attention, dtypes=["float32", "float64"], hazards=[*CHEAP, "nondeterminism", "stale-state", "concurrent-calls"]
    )
    assert report.ok, report
    assert {hazard.verdict for hazard in report.hazards} == {"clean", "not offered"}, report


def test_memory_that_holds_every_score_is_told():
    # A budget that a loaded machine does not use up either.
    report = rapt.audit(sound.attention, dtypes=["float32"], hazards=["memory-plain", "memory-bool-mask"], budget_s=300)
    for finding in report.findings:
        assert finding.reproducer["reproduced"], finding.reproducer
        per_score = finding.evidence["numbers"]["bytes_per_score"]
        assert 4 <= per_score <= 64, finding.evidence
    assert [finding.cause for finding in report.findings] == ["memory-plain", "memory-bool-mask"], report
