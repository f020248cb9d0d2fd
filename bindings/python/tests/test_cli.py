"""The command `rapt` of the package: cargo's program, in Python's process."""

import functools
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rapt
from rapt import _native

HELP = Path(__file__).parents[3] / "crates" / "rapt-cli" / "tests" / "help.txt"
MODULE = [sys.executable, "-m", "rapt"]


def run(*words, program=MODULE, **options):
    return subprocess.run([*program, *words], capture_output=True, text=True, **options)


def pages():
    """{words: help} as cargo's program prints it; a test of rapt-cli holds the file against that program."""
    if not HELP.exists():
        pytest.skip("installed without the repository")
    parts = re.split(r"^\$ rapt (.*)\n", HELP.read_text(encoding="utf-8"), flags=re.M)
    return {words: text[:-1] for words, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_page_of_help_is_byte_for_byte_that_of_cargos_program(capfd):
    recorded = pages()
    assert {"--help", "doctor --help", "explain --help", "run --help", "bench --help", "bench cuda --help", "audit --help",
            "layout --help", "layout show --help"} <= set(recorded)  # fmt: skip
    for words, text in recorded.items():
        assert _native.cli(words.split()) == 0
        out, err = capfd.readouterr()
        assert (out, err) == (text, ""), words
    for words in ("--help", "audit --help"):
        assert run(*words.split()).stdout == recorded[words]


def test_the_package_has_the_command():
    try:
        scripts = importlib.metadata.distribution("rapt-attention").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only imported")
    assert [(script.name, script.value) for script in scripts if script.group == "console_scripts"] == [("rapt", "rapt.__main__:main")]
    program = [str(Path(sys.executable).with_name("rapt"))]
    assert run("--version", program=program).stdout == f"rapt {rapt.__version__}\n"


def test_the_version_and_wrong_words():
    assert run("--version").stdout == f"rapt {rapt.__version__}\n"
    for words in ([], ["no-such-command"], ["explain"], ["audit", "--fail-on", "sometimes"], ["bench", "cpu"]):
        done = run(*words)
        assert done.returncode == 2 and not done.stdout and "--help" in done.stderr, words


def test_files_are_read_and_written(tmp_path):
    np = pytest.importorskip("numpy")
    rng = np.random.default_rng(1)
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((2, 3, 5, 8), np.float32))
    done = run("run", *(str(tmp_path / f"{name}.npy") for name in ("q", "k", "v", "out")), "--causal")
    assert done.returncode == 0, done.stderr
    q, k, v, out = (np.load(tmp_path / f"{name}.npy") for name in ("q", "k", "v", "out"))
    assert out.tobytes() == rapt.attention(q, k, v, causal=True).tobytes()


def test_explain_and_layout_answer_in_this_process(capfd):
    assert _native.cli(["explain", "--shape", "1,8,16,16,64", "--dtype", "bf16", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["kernel"], plan["storage"], plan["bytes_copied"]) == ("forward", "bfloat16", 0)
    assert _native.cli(["layout", "inverse", "(4,8):(8,1)"]) == 0
    assert capfd.readouterr().out == "(8,4):(4,1)\n"
    assert _native.cli(["explain", "--shape", "1,3,4,4,8", "--kv-heads", "2"]) == 1
    assert capfd.readouterr().err.startswith("rapt: ")


def test_doctor_shows_the_same_rows_on_the_command_line_and_in_python():
    # An absolute time or error is no part of it: two runs of one build are equal.
    code = "import rapt; print(rapt.doctor())"
    assert run("doctor").stdout == run("-c", code, program=[sys.executable]).stdout
    facts = json.loads(run("doctor", "--json").stdout)
    assert list(facts) == list(rapt.doctor()) and facts["versions"]["rapt"] == facts["version"] == rapt.__version__


def test_where_nobody_reads_it_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*MODULE, "layout", "atoms"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 0 and done.stderr == ""


SLOW = """
import time

def attention(q, k, v):
    time.sleep(100)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGINT")
@pytest.mark.parametrize(
    "words", [("bench", "--shape", "1,1,4,4,8", "--seconds", "3000"), ("audit", "slow:attention", "--kind", "numpy")], ids=lambda words: words[0]
)
def test_an_interrupt_ends_a_long_run_with_130(words, tmp_path):
    if words[0] == "audit":
        pytest.importorskip("numpy")
    (tmp_path / "slow.py").write_text(SLOW)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # What starts the tests may ignore SIGINT (a shell's background job does), and a child would inherit that.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*MODULE, *words], cwd=tmp_path, start_new_session=True, preexec_fn=heed, **pipes) as child:
        try:
            time.sleep(3)
            assert child.poll() is None, child.communicate()
            os.killpg(child.pid, signal.SIGINT)  # as a terminal sends it, to every process of the group
            _, err = child.communicate(timeout=60)
        finally:
            if child.poll() is None:  # else it would take a core for its 3000 seconds
                os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 130 and "Traceback" not in err, (child.returncode, err)
