"""`rapt.doctor()` and `python -m rapt doctor`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import rapt
from rapt import _doctor

ROOT = Path(__file__).parents[3]


def run(*arguments, **environment):
    command = [sys.executable, "-m", "rapt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_report_is_a_dict_and_a_table():
    report = rapt.doctor()
    assert isinstance(report, dict) and report.ok
    assert report["isa"] in report["isa_available"] and "scalar" in report["isa_available"]
    assert report["threads"] >= 1
    dtypes = ["float64", "float32", "float16", "bfloat16"]
    cases = [(case["kernel"], case["dtype"]) for case in report["self_test"]]
    assert cases == [(kernel, dtype) for kernel in ["forward", "decode"] for dtype in dtypes]
    assert all(0 <= case["error"] <= case["limit"] for case in report["self_test"])
    for word in ["cpu", "isa", "threads", "RAPT_NUM_THREADS", "RAPT_ISA", "RAPT_LOG", rapt.__version__, "self-test bfloat16 decode"]:
        assert word in str(report)


def test_what_was_measured_beside_torch_is_told_of_this_kind_of_processor():
    report = rapt.doctor()
    assert report["beside_torch"] in str(report)
    assert report["beside_torch"] == _doctor.beside_torch(report["isa"])
    of = "processor\t: {}\ncpu family\t: {}\nmodel\t\t: {}\n\nprocessor\t: 9\ncpu family\t: 0\n".format
    told = _doctor.beside_torch("amx", of(0, 6, 167))
    assert re.fullmatch(r"\d+ requests on 2 threads \(\S+, torch \S+\), the slowest at \d\.\d\d of its speed \(\S+, \w+\)", told), told
    for isa, cpuinfo in [("avx2", of(0, 6, 167)), ("amx", of(0, 6, 168)), ("amx", of(0, 25, 167)), ("amx", "")]:
        assert _doctor.beside_torch(isa, cpuinfo) == f"not measured on this kind of processor with {isa}"


def test_the_gpu_is_spoken_of_and_its_absence_is_no_failure():
    cuda = rapt.doctor()["cuda"]
    assert rapt.is_available("cpu") and not rapt.is_available("abacus")
    if rapt.is_available("cuda"):
        assert "cuda:0" in cuda and "cuda compiler" in cuda
    else:
        assert "not available" in cuda["cuda"] or "0 devices" in cuda["cuda"] or "cuda:0" in cuda
    assert "cuda" in str(rapt.doctor())


def test_the_command_and_its_json():
    done = run("doctor")
    assert done.returncode == 0 and "self-test float32" in done.stdout
    facts = json.loads(run("doctor", "--json").stdout)
    assert facts["versions"]["rapt"] == rapt.__version__
    assert run("no-such-command").returncode == 2


def test_variables_are_obeyed_and_shown():
    facts = json.loads(run("doctor", "--json", RAPT_NUM_THREADS="3", RAPT_ISA="scalar").stdout)
    assert facts["threads"] == 3 and facts["threads_from"] == "RAPT_NUM_THREADS"
    assert facts["isa"] == "scalar"
    assert facts["environment"]["RAPT_NUM_THREADS"] == "3" and facts["environment"]["RAPT_ISA"] == "scalar"
    assert all(case["passed"] for case in facts["self_test"])


@pytest.mark.parametrize("variable, value", [("RAPT_NUM_THREADS", "many"), ("RAPT_NUM_THREADS", "0"), ("RAPT_ISA", "avx1024")])
def test_nonsense_in_a_variable_is_refused_with_what_is_allowed(variable, value):
    done = run("doctor", **{variable: value})
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("rapt: ") and variable in done.stderr and "allowed" in done.stderr


def test_the_log_is_silent_by_default_and_one_line_per_plan():
    code = "import numpy as np, rapt; x = np.ones((1, 1, 2, 2), np.float32); rapt.attention(x, x, x); rapt.attention(x, x, x)"
    for level, lines in [(None, 0), ("off", 0), ("debug", 1)]:
        environment = {name: value for name, value in os.environ.items() if name != "RAPT_LOG"}
        environment |= {} if level is None else {"RAPT_LOG": level}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert len(done.stderr.splitlines()) == lines, done.stderr
    assert "plan" in done.stderr and "forward" in done.stderr or "decode" in done.stderr
    wrong = subprocess.run([sys.executable, "-c", "import rapt"], capture_output=True, text=True, env={**os.environ, "RAPT_LOG": "loud"})
    assert wrong.returncode != 0 and "OptionError" in wrong.stderr and "debug" in wrong.stderr


def test_every_variable_stands_in_the_table():
    table = ROOT / "docs" / "reference" / "environment.md"
    if not table.exists():
        pytest.skip("installed without the repository")
    documented = re.findall(r"^\| `(RAPT_\w+)` \|", table.read_text(), re.M)
    shown = list(rapt.doctor()["environment"])
    assert documented == shown[: len(documented)]
    assert set(shown[len(documented) :]) <= set(os.environ)
