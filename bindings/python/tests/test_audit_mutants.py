"""The auditor proves itself: each planted mutant is caught, rightly named, and reproduced by a program without Rapt."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import rapt

np = pytest.importorskip("numpy")
from mutants import boundary, sound, values  # noqa: E402
from rapt._audit.hazards import TABLE  # noqa: E402

# What costs most and concerns bits or memory is heard only for the mutants that break it.
COSTLY = {h.name for h in TABLE if h.judge in ("memory", "strides", "neighbours", "threads", "concurrent", "stale", "repeat")}
CHEAP = [hazard.name for hazard in TABLE if hazard.name not in COSTLY]

LEAK = "masked-nonfinite-leaks"
# mutant: (hazard, cause), and the causes of further findings that follow from it.
MUTANTS = {
    values.scale_missing: ("accuracy", "scale-missing"),
    values.scale_squared: ("accuracy", "scale-squared"),
    values.scale_argument_ignored: ("scale", "scale-ignored"),
    values.exp2_without_log2e: ("accuracy", "exp2-for-exp"),
    values.unnormalised: ("accuracy", "unnormalised"),
    values.row_max_not_subtracted: (
        "large-logits", "row-max-not-subtracted", LEAK, "fully-masked-row", "lowest-finite-mask", "zero-length"
    ),
    values.q_and_k_exchanged: ("accuracy", "q-k-transposed"),
    values.softmax_over_queries: ("accuracy", "softmax-over-queries"),
    values.halves_swapped: ("accuracy", "halves-swapped"),
    values.neighbours_swapped: ("accuracy", "halves-swapped"),
    values.heads_transposed: ("accuracy", "heads-transposed", "head-mixing"),
    values.head_0_only: ("accuracy", "only-head-0-computed"),
    values.batch_0_repeated: ("accuracy", "one-batch-repeated"),
    values.gqa_modulo: ("gqa-groups", "wrong-gqa-group"),
    values.heads_leak: ("head-mixing", "head-mixing", "accuracy"),
    values.mask_ignored: ("bool-mask", "mask-ignored"),
    values.mask_inverted: ("bool-mask", "mask-inverted"),
    values.mask_of_head_0: ("bool-mask", "mask-misbroadcast"),
    values.bias_added_twice: ("additive-mask", "bias-misapplied"),
    values.lowest_taken_for_masked: ("lowest-finite-mask", "lowest-taken-for-minus-infinity"),
    values.masked_rows_get_the_mean: ("fully-masked-row", "fully-masked-row", LEAK),
    values.bottom_right_for_top_left: ("causal", "alignment-swapped"),
    values.causal_without_diagonal: ("causal", "causal-off-by-one"),
    values.nan_leaks: ("nan-in-masked-v", LEAK),
    values.narrowed_to_f32: ("accuracy", "hidden-cast"),
    values.halved_precision: ("accuracy", "hidden-cast"),
    values.sloppy_exp: ("accuracy", "accuracy"),
    values.nondeterministic_reduction: ("nondeterminism", "nondeterminism"),
    boundary.contiguous_offsets: (
        "permuted-strides", "contiguous-offsets-on-strided-view", "expanded-strides", "padding"
    ),
    boundary.contiguous_offsets_in_k: (
        "permuted-strides", "contiguous-offsets-on-strided-view", "expanded-strides", "padding"
    ),
    boundary.inner_stride_ignored: ("inner-stride", "inner-stride-ignored"),
    boundary.negative_stride_forward: ("negative-strides", "negative-stride-read-forward"),
    boundary.mask_read_flat: ("mask-broadcast", "mask-misbroadcast"),
    boundary.bf16_as_f32: ("dtype-tag", "16-bit-read-as-32-bit", LEAK),
    boundary.bf16_as_f16: ("dtype-tag", "wrong-16-bit-tag"),
    boundary.tail_over_read: ("over-read", "over-read"),
    boundary.tail_over_read_unseen: ("guard-pages", "over-read"),
    boundary.tail_of_keys_dropped: ("odd-lengths", "tail-dropped", "kv-length-mismatch"),
    boundary.tail_of_head_dim_dropped: ("odd-head-dim", "head-dim-tail-dropped"),
    boundary.stale_tail: ("odd-lengths", "stale-tail"),
    boundary.stale_workspace: ("stale-state", "stale-state"),
    boundary.head_dim_v_reversed: ("head-dim-v", "head-dim-v"),
    boundary.scales_q_in_place: ("inputs-modified", "inputs-modified"),
    boundary.short_keys_accepted: ("kv-length-mismatch", "kv-length-mismatch"),
    boundary.aborts_on_long_keys: ("odd-lengths", "crash"),
    boundary.float32_results: ("dtype-tag", "output-dtype"),
    boundary.stale_lse: ("lse", "stale-lse"),
}  # fmt: skip

DTYPE = {
    values.narrowed_to_f32: "float64",
    boundary.bf16_as_f32: "bfloat16",
    boundary.bf16_as_f16: "bfloat16",
    boundary.float32_results: "bfloat16",
}


def test_every_mutant_is_in_the_table():
    planted = {
        function
        for module in (values, boundary)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert planted == set(MUTANTS) and len(planted) >= 20


def audit(mutant):
    hazard = MUTANTS[mutant][0]
    dtypes = [DTYPE.get(mutant, "float32")]
    return rapt.audit(mutant, dtypes=dtypes, hazards=[*CHEAP, *([hazard] if hazard in COSTLY else [])])


@pytest.fixture(scope="module")
def audits(request):
    """{mutant: the audit on its way}, two at a time: each waits for its child most of the time."""
    asked = {item.callspec.params["mutant"] for item in request.session.items if "mutant" in getattr(item, "fixturenames", ())}
    pool = ThreadPoolExecutor(2)
    yield {mutant: pool.submit(audit, mutant) for mutant in MUTANTS if mutant in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught_and_rightly_named(mutant, audits):
    dtype = DTYPE.get(mutant, "float32")
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    hazard, cause, *others = MUTANTS[mutant]
    report = audits[mutant].result()
    found = {(finding.hazard, finding.cause): finding for finding in report.findings}
    assert (hazard, cause) in found, f"{list(found)}\n{report}"
    strangers = {name for _, name in found} - {cause, *others}
    assert not strangers, f"also accused of {strangers}\n{report}"
    made = found[hazard, cause].reproducer
    assert made["reproduced"] and made["ran_in"] == "a fresh process", made
    assert len(made["source"].splitlines()) <= 15 and "rapt" not in made["source"], made["source"]
    assert found[hazard, cause].dtypes == [dtype]


def test_what_the_mutants_were_broken_from_is_clean():
    report = rapt.audit(
        sound.attention, dtypes=["float32", "float64"], hazards=[*CHEAP, "nondeterminism", "stale-state", "concurrent-calls"]
    )
    assert report.ok, report
    assert {hazard.verdict for hazard in report.hazards} == {"clean", "not offered"}, report


def test_memory_that_holds_every_score_is_told():
    report = rapt.audit(sound.attention, dtypes=["float32"], hazards=["memory-plain", "memory-bool-mask"])
    for finding in report.findings:
        assert finding.reproducer["reproduced"], finding.reproducer
        per_score = finding.evidence["numbers"]["bytes_per_score"]
        assert 4 <= per_score <= 64, finding.evidence
    assert [finding.cause for finding in report.findings] == ["memory-plain", "memory-bool-mask"]
