"""`rapt.audit` on the GPU: planted faults are named, Rapt is clean, and torch's function is judged without a false alarm."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from mutants import gpu
from mutants.table import on_a_gpu
from reproducers import assert_stands_alone

import rapt
from rapt._audit.gradients import JUDGES
from rapt._audit.hazards import TABLE

HAZARDS = ["accuracy", "inputs-modified", "over-read", "guard-pages", "nondeterminism", "stream-order", "graph-capture", "device-wait"]
PLANTED = on_a_gpu()
CLEAN = {"rapt": ["float32", "bfloat16"], "torch": ["bfloat16"]}


def audit(target):
    dtypes = CLEAN.get(target, ["float32"])
    hazards = HAZARDS if target not in CLEAN else [*HAZARDS, "permuted-strides", "inner-stride", "stride-bits", "memory-plain"]
    return rapt.audit(target, device="cuda", dtypes=dtypes, hazards=hazards, budget_s=120)


@pytest.fixture(scope="module")
def audits():
    """All at once: each waits for its child most of the time."""
    pool = ThreadPoolExecutor(8)
    yield {target: pool.submit(audit, target) for target in [*(mutant.function for mutant in PLANTED), *CLEAN, gpu.sound]}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda mutant: mutant.function.__name__)
def test_a_planted_fault_is_found_named_and_reproduced(mutant, audits):
    report = audits[mutant.function].result()
    found = {(finding.hazard, finding.cause): finding for finding in report.findings}
    assert (mutant.hazard, mutant.cause) in found, report
    made = found[mutant.hazard, mutant.cause].reproducer
    assert_stands_alone(made)
    assert made["reproduced"] or not mutant.reproduces, made
    assert "accuracy" not in {finding.hazard for finding in report.findings}, report


def test_a_fault_of_the_device_does_not_pass_for_a_refusal(audits):
    report = audits[gpu.faulting].result()
    finding = next(finding for finding in report.findings if finding.hazard == "over-read")
    assert finding.severity == "critical" and "exit code 86" in finding.text and "CUDA error" in finding.text
    assert {hazard.name: hazard.verdict for hazard in report.hazards}["nondeterminism"] == "clean"


def test_the_formula_is_not_accused(audits):
    report = audits[gpu.sound].result()
    assert not report.at_least("high"), report
    verdicts = {hazard.name: hazard.verdict for hazard in report.hazards}
    assert verdicts["stream-order"] == verdicts["graph-capture"] == verdicts["device-wait"] == "clean", report


def test_rapt_is_clean(audits):
    report = audits["rapt"].result()
    assert report.ok, report
    assert {hazard.verdict for hazard in report.hazards} == {"clean"}, report


def test_torchs_function_is_judged_without_a_false_alarm(audits):
    assert not audits["torch"].result().at_least("high"), audits["torch"].result()


@pytest.fixture(scope="module")
def audits_of_gradients():
    hazards = [hazard.name for hazard in TABLE if hazard.judge in JUDGES]
    pool = ThreadPoolExecutor(2)
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    yield {target: pool.submit(rapt.audit, target, "cuda", dtypes, hazards, 120) for target in ("rapt", "torch")}
    pool.shutdown(cancel_futures=True)


def test_rapts_gradients_are_clean(audits_of_gradients):
    report = audits_of_gradients["rapt"].result()
    left = {hazard.name: hazard.verdict for hazard in report.hazards if hazard.verdict != "clean"}
    assert report.ok and left == {}, report


def test_torchs_gradients_are_judged_without_a_false_alarm(audits_of_gradients):
    report = audits_of_gradients["torch"].result()
    assert all(finding.reproducer["reproduced"] for finding in report.findings), report
    assert {hazard.name: hazard.verdict for hazard in report.hazards}["gradients"] == "clean", report
