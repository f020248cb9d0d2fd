"""torch tensors on Apple's GPUs: what is said where there is none; and on a fake of torch's encoder, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rapt

FAKED = Path(__file__).parents[1] / "tests_mps"


def test_without_an_encoder_the_doctor_says_why(torch):
    text = rapt.doctor()["metal"]["metal"]
    assert text.startswith("not served: ") and text.endswith("; never run on Apple hardware"), text
    assert not rapt.is_available("mps")


def test_an_audit_on_a_machine_without_an_apple_gpu_is_told(torch):
    if torch.backends.mps.is_available():
        pytest.skip("there is an Apple GPU")
    words = [sys.executable, "-m", "rapt", "audit", "rapt", "--device=mps", "--hazards=accuracy"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = f"rapt: device='mps' needs an Apple GPU, and torch {torch.__version__} sees none\n"
    assert (done.returncode, done.stderr, done.stdout) == (3, said, "")


def test_a_report_ends_with_the_block_that_the_issue_template_asks_for():
    from mutants import sound
    from rapt._audit import apple

    report = rapt.audit(sound.attention, dtypes=["float32"], hazards=["accuracy"])
    text = apple.block(report)
    template = (Path(__file__).parents[3] / ".github/ISSUE_TEMPLATE/metal.yml").read_text()
    assert "issues/new?template=metal.yml" in text and "rapt audit rapt --device mps" in template
    lines = text.splitlines()
    assert lines[2] == "```text" and lines[-1] == "```", text
    assert f"rapt: {rapt.__version__}" in lines and any(line.startswith("metal: ") for line in lines)
    assert "accuracy: clean float32=clean" in lines, text
    assert os.path.expanduser("~") not in text and os.uname().nodename not in text


def test_mps_asks_for_no_float64():
    from rapt._audit.checks import check_options

    dtypes, hazards = check_options("mps", "float64,float32", "all", 60, "auto")
    assert dtypes == ("float32",)
    assert not {"stream-order", "graph-capture", "device-wait"} & {hazard.name for hazard in hazards}
    with pytest.raises(ValueError, match="float64"):
        check_options("mps", "float64", "all", 60, "auto")


def test_the_road_from_torch_to_the_encoder(torch):
    sys.path.insert(0, str(FAKED))
    import metal_host

    if not hasattr(torch._C, "_len_torch_dispatch_stack") or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        pytest.skip("torch hands out no tensors of its own")
    if not metal_host.has_compiler():
        pytest.skip("no compiler of C++: no text in Metal's language is run")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FAKED)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout and "skipped" not in done.stdout
