"""`rapt.audit` and `python -m rapt audit`: what they take, what they give, and what they say of stock torch."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import rapt

np = pytest.importorskip("numpy")
from mutants import boundary, sound, values  # noqa: E402
from reproducers import assert_stands_alone  # noqa: E402

HERE = Path(__file__).parent
FEW = ["accuracy", "permuted-strides", "bool-mask", "causal"]


def command(*arguments, cwd=HERE):
    return subprocess.run([sys.executable, "-m", "rapt", "audit", *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def permuted():
    """The report on contiguous offsets, and what the command wrote of the same."""
    return rapt.audit(boundary.contiguous_offsets, dtypes=["float32"], hazards=FEW)


def test_importing_rapt_brings_neither_numpy_nor_torch_nor_the_auditor():
    code = (
        "import sys, rapt; assert callable(rapt.audit) and callable(rapt.diagnose); "
        "print(sorted({'numpy', 'torch', 'rapt._audit'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_auditing_a_numpy_callee_imports_no_torch():
    code = (
        "import sys, rapt; r = rapt.audit('mutants.sound:attention', dtypes='float32', hazards='accuracy,causal', kind='numpy'); "
        "print(r.ok, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_the_report_tells_evidence_with_numbers(permuted):
    finding = permuted.findings[0]
    assert not permuted.ok and [f.hazard for f in permuted.findings] == ["permuted-strides"]
    assert (finding.cause, finding.severity, finding.dtypes) == ("contiguous-offsets-on-strided-view", "critical", ["float32"])
    numbers = finding.evidence["numbers"]
    assert numbers["relative_error"] > 0.5 > numbers["limit"] and numbers["wrong_rows"] > 200
    assert finding.shrunk.batch == 1 and math.prod((finding.shrunk.kv_len, finding.shrunk.heads)) < 64 * 4
    assert permuted.at_least("critical") == permuted.findings
    assert "✗ permuted-strides" in str(permuted) and "✓ accuracy" in str(permuted) and finding.text[:40] in str(permuted)


def test_json_follows_the_documented_schema(permuted, tmp_path):
    report = json.loads(permuted.to_json(tmp_path / "report.json"))
    assert report == json.loads((tmp_path / "report.json").read_text())
    documented = re.findall(r"^\| `([a-z_.\[\]]+)` \|", (HERE.parents[2] / "docs/reference/audit.md").read_text(), re.M)

    def keys(x, path=""):
        for name, value in x.items():
            here = f"{path}{name}"
            yield here
            if here in ("findings", "hazards"):
                for each in value:
                    yield from keys(each, f"{here}[].")
            elif here in ("findings[].evidence", "findings[].reproducer", "findings[].diagnosis"):
                yield from keys(value, f"{here}.")

    assert set(keys(report)) == {name for name in documented if name.partition("[")[0].partition(".")[0] in report}
    assert report["schema"] == 1 and report["target"] == "mutants.boundary:contiguous_offsets"
    assert report["counts"] == {"found": 1, "clean": 3} and report["severities"]["critical"] == 1
    finding = report["findings"][0]
    assert finding["reproducer"]["reproduced"] is True and finding["reproducer"]["lines"] <= 15
    assert finding["diagnosis"]["name"] == finding["cause"] and finding["diagnosis"]["confidence"] > 0.8
    side = finding["evidence"]["error_map"]
    assert 0 < len(side) <= 40 and {len(row) for row in side} == {len(side[0])}


def test_junit_is_well_formed(permuted):
    suite = ElementTree.fromstring(permuted.to_junit())
    assert suite.attrib["tests"] == "4" and suite.attrib["failures"] == "1"
    assert [case.attrib["name"] for case in suite if case.find("failure") is not None] == ["permuted-strides"]
    assert "contiguous-offsets" in suite.find(".//failure").attrib["type"]
    # What --fail-on does not reach is reported and does not fail.
    lenient = ElementTree.fromstring(permuted.to_junit(fail_on="never"))
    assert lenient.attrib["failures"] == "0" and lenient.find(".//system-out") is not None


class Page(HTMLParser):
    """Counts elements; notes what would be fetched; checks that what opens is closed."""

    VOID = {"meta", "br", "rect", "img", "link"}

    def __init__(self, text):
        super().__init__()
        self.count, self.fetched, self.open = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.fetched += [
            value for name, value in attrs if name in ("src", "href", "xlink:href") and not (value or "").startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_holds_its_pictures_and_fetches_nothing(permuted, tmp_path):
    text = permuted.to_html(tmp_path / "report.html")
    page = Page(text)
    assert not page.open and not page.fetched and "script" not in page.count and "url(" not in text
    # The error map has a cell per row and column; the stride diagram comes beside it.
    cells = permuted.findings[0].evidence["error_map"]
    assert page.count["svg"] == 2 and page.count["rect"] > len(cells) * len(cells[0])
    assert "contiguous would be (24, 12, 4, 1)" in text


def test_the_page_renders_in_a_browser(permuted, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    permuted.to_html(tmp_path / "report.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [browser, *flags, "--dump-dom", f"file://{tmp_path / 'report.html'}"], capture_output=True, text=True, timeout=120
    )
    dom = done.stdout
    assert done.returncode == 0, done.stderr[-500:]
    assert "Audit of <code>mutants.boundary:contiguous_offsets</code>" in dom and dom.count("<svg") == 2
    assert f'href="#f1">{permuted.findings[0].hazard}</a>' in dom


def test_exit_codes_and_files(tmp_path):
    paths = [f"--{kind}={tmp_path / f'report.{kind}'}" for kind in ("json", "junit", "html")]
    done = command("mutants.values:nan_leaks", "--dtypes=float32", "--hazards=accuracy,bool-mask,nan-in-masked-v", *paths)
    # The leak is of medium severity: below --fail-on's default.
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗ nan-in-masked-v" in done.stdout and "reproduced in a fresh process" in done.stdout
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".junit", ".html"}
    assert 'failures="0"' in (tmp_path / "report.junit").read_text()
    done = command(
        "mutants.values:nan_leaks", "--dtypes=float32", "--hazards=bool-mask,nan-in-masked-v", "--fail-on=medium", "--json=-"
    )
    assert done.returncode == 1 and json.loads(done.stdout)["findings"][0]["cause"] == "masked-nonfinite-leaks"
    assert command("mutants.sound:attention", "--dtypes=float32", "--hazards=accuracy", "--fail-on=low").returncode == 0


@pytest.mark.parametrize(
    "arguments, code, said", [
        (["no.such.module:attention"], 3, "cannot be imported"),
        (["mutants.sound:nothing"], 3, "no attribute"),
        (["torchvision"], 3, "MODULE:FUNCTION"),
        (["mutants.sound:check"], 3, "refuses a plain call"),
        ([], 2, "target is needed"),
        (["rapt", "--dtypes=int8"], 2, "float32"),
        (["rapt", "--hazards=goblins"], 2, "nan-in-masked-v"),
        (["rapt", "--fail-on=sometimes"], 2, "never"),
        (["rapt", "--budget=0"], 2, "greater than 0"),
        (["rapt", "--device=tpu"], 2, "cuda"),
    ],
)  # fmt: skip
def test_wrong_use_is_told(arguments, code, said):
    done = command(*arguments, "--hazards=accuracy") if code == 3 else command(*arguments)
    assert done.returncode == code and said in done.stderr, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr


def test_hazards_of_another_device_are_not_asked_for_and_never_judged():
    from rapt._audit.checks import check_options

    of = {device: {hazard.name for hazard in check_options(device, "float32", "all", 60, "auto")[1]} for device in ("cpu", "cuda:0")}
    assert of["cuda:0"] - of["cpu"] == {"stream-order", "graph-capture", "device-wait"} and of["cpu"] < of["cuda:0"]
    report = rapt.audit(sound.attention, dtypes=["float32"], hazards=["accuracy", "stream-order"])
    assert [(hazard.verdict, hazard.probes) for hazard in report.hazards] == [("clean", 3), ("not offered", 0)]
    assert "device" in report.hazards[1].note


def test_a_device_that_is_not_there_is_told(torch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = command("torch", "--device=cuda", "--hazards=accuracy")
    assert done.returncode == 3 and "device='cuda' needs a GPU" in done.stderr and "Traceback" not in done.stderr


def test_reproducers_for_the_gpu_are_programs_of_fifteen_lines():
    from rapt._audit.callee import SDPA, Offer, find
    from rapt._audit.case import Case
    from rapt._audit.hazards import BY_NAME
    from rapt._audit.script import write

    target, _ = find("torch")
    for name in ("stream-order", "graph-capture", "device-wait", "memory-bool-mask", "memory-inner-stride", "guard-pages", "permuted-strides"):
        hazard = BY_NAME[name]
        case = next(iter(hazard.cases("bfloat16")))
        text = write(name, hazard.judge, case, target, Offer("sdpa", SDPA, "torch"), {"length": 2048}, "cuda")
        compile(text, name, "exec")
        assert len(text.splitlines()) <= 15 and "set_default_device('cuda')" in text, text


def test_what_a_program_says_in_several_lines_is_told_by_the_first():
    from rapt._audit.supervisor import Nursery

    nursery = Nursery("numpy")
    try:
        assert nursery.run('assert False, "two\\nlines"', 30) == (True, "AssertionError: two")
        report = nursery.run('raise RuntimeError("CUDA error: misaligned address\\nCompile with ...")', 30)
        assert report == (False, "RuntimeError: CUDA error: misaligned address")
    finally:
        nursery.close()


def test_a_mask_with_one_column_for_all_keys_is_drawn_as_one():
    from rapt._audit.callee import SDPA, Offer, find
    from rapt._audit.case import Case
    from rapt._audit.script import write

    text = write("mask-broadcast", "values", Case("float32", mask="bool", mask_dims="bhq1"), find("torch")[0], Offer("sdpa", SDPA, "torch"), {})
    assert "mask = torch.ones((2, 4, 32, 1), dtype=torch.bool)" in text


def test_the_list_of_hazards_is_the_documented_one():
    listed = [line.split()[:2] for line in command("--list").stdout.splitlines()]
    table = (HERE.parents[2] / "docs/reference/audit.md").read_text().partition("## The hazards")[2].partition("\n## ")[0]
    assert [list(row) for row in re.findall(r"^\| `([a-z0-9-]+)` \| (\w+) \|", table, re.M)] == listed


def test_every_cause_is_documented(permuted):
    from rapt._audit.causes import CAUSES, listed

    table = (HERE.parents[2] / "docs/reference/audit.md").read_text().partition("## The causes")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {cause for row in rows for cause in re.findall(r"`([a-z0-9-]+)`", row)} == CAUSES
    # What diagnosis finds is looked up there.
    assert listed(permuted.findings[0].cause) in CAUSES
    with pytest.raises(LookupError, match="goblins"):
        listed("goblins")


def test_callables_that_no_import_finds_run_in_a_fork():
    factor = np.float32(1.0)

    def closure(q, k, v, attn_mask=None, is_causal=False):
        return values.mask_inverted(q * factor, k, v, attn_mask, is_causal)

    report = rapt.audit(closure, dtypes=["float32"], hazards=[*FEW, "scale"])
    assert [(f.hazard, f.cause) for f in report.findings] == [("bool-mask", "mask-inverted")], report
    made = report.findings[0].reproducer
    assert made["reproduced"] and made["ran_in"] == "a fork, with fn given" and len(made["source"].splitlines()) <= 15
    assert {h.name: h.verdict for h in report.hazards}["scale"] == "not offered"


def aborting(q, k, v):
    os.abort()


def test_a_callee_that_dies_at_once_is_a_finding():
    # In the thread that calls: a signal to the process may go to another one, while this one answers.
    for callee in (aborting, lambda q, k, v: signal.raise_signal(signal.SIGSEGV)):
        report = rapt.audit(callee, kind="numpy", dtypes=["float32"], hazards=FEW)
        assert [(f.cause, f.severity) for f in report.findings] == [("crash", "critical")]
        assert re.search("SIG(ABRT|SEGV)", report.findings[0].text)
        assert {h.verdict for h in report.hazards} == {"found", "blocked"}


def sleeping(q, k, v, is_causal=False):
    while is_causal:
        time.sleep(1)
    return sound.attention(q, k, v)


def test_a_callee_that_does_not_answer_is_a_finding():
    report = rapt.audit(sleeping, kind="numpy", dtypes=["float32"], hazards=["accuracy", "causal"], budget_s=24)
    assert [(f.hazard, f.cause) for f in report.findings] == [("causal", "hang")], report
    assert report.findings[0].reproducer["outcome"] == "did not end in time" and report.findings[0].reproducer["reproduced"]


def test_the_budget_is_kept():
    report = rapt.audit(sound.attention, dtypes=["float32"], budget_s=0.01)
    verdicts = {hazard.name: hazard.verdict for hazard in report.hazards}
    # dtype-tag is of 16-bit dtypes only.
    assert verdicts.pop("dtype-tag") == "not offered" and set(verdicts.values()) == {"not run"} and report.seconds < 30
    assert "budget" in report.hazards[1].note


@pytest.mark.parametrize(
    "wrong", [{"dtypes": ["int8"]}, {"hazards": ["goblins"]}, {"budget_s": -1}, {"device": "tpu"}, {"kind": "jax"}]
)
def test_a_wrong_argument_lists_what_is_allowed(wrong):
    with pytest.raises(ValueError, match="allowed|greater"):
        rapt.audit(sound.attention, **wrong)


@pytest.fixture(scope="module")
def torch_report():
    pytest.importorskip("torch")
    return rapt.audit("torch")


def test_stock_torch_is_told_its_gaps(torch_report):
    found = {finding.hazard: finding for finding in torch_report.findings}
    expected = {"nan-in-masked-v", "nan-in-masked-k", "nan-beyond-causal", "nan-query-row", "kv-length-mismatch"}
    expected |= {"nan-in-masked-gradients", "dead-row-gradients"}
    assert expected <= set(found), torch_report
    assert "read past its end" in found["kv-length-mismatch"].text
    assert not torch_report.at_least("high")[1:], torch_report
    judged = {hazard.name: hazard.verdict for hazard in torch_report.hazards}
    for name in ("memory-bool-mask", "memory-mask-3d", "memory-head-dim-v", "memory-inner-stride", "stride-bits"):
        # A loaded machine may not come so far within the budget; it may never say "clean".
        assert judged[name] in ("found", "not run"), (name, torch_report)
    if judged["memory-bool-mask"] == "found":
        assert found["memory-bool-mask"].evidence["numbers"]["bytes_per_score"] == pytest.approx(4, abs=0.5)
    for finding in torch_report.findings:
        made = finding.reproducer
        assert made["reproduced"], made
        assert_stands_alone(made)
    assert torch_report.seconds < 75, "the budget is 60 s"
