"""The documentation as readers use it: the Python of each page is one program that runs, and so is each example.

Blocks of other languages are run where their compiler is: Rust by the doc tests of rapt-attention, C by `cargo xtask c --check`, commands
of `rapt` by crates/rapt-cli/tests/docs.rs. A block that cannot run says why in its title, is skipped with that reason, and so counted.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fresh
import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "bindings/python/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(path for kind in ("python", "pytorch", "transformers") for path in (ROOT / "examples" / kind).glob("*.py"))
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
# What a block's language is run by; `text` is nobody's program, `js` is run by `cargo xtask web`.
LANGUAGES = {"python", "rust", "c", "sh", "console", "toml", "js", "text"}
NOT_RUN = re.compile(r'^(\w+) title="Not run in the tests(?: as written)?: (.+)"$')
# Blocks run one after another under the page's name, so that a traceback points into it.
RUNNER = """
import json, sys
names = {"__name__": "__main__"}
for path, line, source in json.load(sys.stdin):
    exec(compile("\\n" * line + source, path, "exec"), names)
"""
NEEDED = ("torch", "transformers", "diffusers", "ml_dtypes", "numpy")


def blocks(page):
    """(first line, what stands behind the fence, source) of each block."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield text[: found.start()].count("\n") + 1, found[2].strip(), found[3]


def name(path):
    return path.relative_to(ROOT).as_posix()


def run(program, text, source, tmp_path):
    """What `program` (code, or a path) prints that reads `text`. `source` is what it runs, which may import torch."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    options = {"input": text, "cwd": tmp_path, "env": {**os.environ, "HF_HUB_OFFLINE": "1"}, "timeout": 300}
    if "torch" in imports(source):
        ran = fresh.run(program, **options)
    else:
        command = [sys.executable, *([str(program)] if isinstance(program, Path) else ["-c", program])]
        ran = subprocess.run(command, capture_output=True, text=True, **options)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


def imports(source):
    """The libraries of NEEDED that `source` imports."""
    return set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE)) & set(NEEDED)


def need(source):
    """Skips where a library that `source` imports is missing, as beside an older torch."""
    if missing := [module for module in sorted(imports(source)) if importlib.util.find_spec(module) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


PROGRAMS = [page for page in PAGES if any(fence == "python" for _, fence, _ in blocks(page))]
LEFT_OUT = [(page, line, NOT_RUN.match(fence)) for page in PAGES for line, fence, _ in blocks(page) if NOT_RUN.match(fence)]


def test_every_block_is_run_somewhere_or_says_why_not():
    for page in PAGES:
        for line, fence, source in blocks(page):
            place = f"{name(page)}:{line}"
            assert fence in LANGUAGES or NOT_RUN.match(fence) and NOT_RUN.match(fence)[1] in LANGUAGES, f"{place}: ```{fence}"
            if fence == "sh":
                assert all(text.startswith(("rapt ", "#")) for text in source.splitlines() if text), f"{place}: who runs this?"
            if fence == "c":
                assert "int main(void)" in source, f"{place}: no program"
    assert len(PROGRAMS) > 8 and len(EXAMPLES) >= 3


@pytest.mark.parametrize("page", PROGRAMS, ids=name)
def test_a_page_runs(page, tmp_path):
    program = [(name(page), line, source) for line, fence, source in blocks(page) if fence == "python"]
    source = "".join(source for _, _, source in program)
    need(source)
    run(RUNNER, json.dumps(program), source, tmp_path)


@pytest.mark.parametrize("page, line, why", LEFT_OUT, ids=[f"{name(page)}:{line}" for page, line, _ in LEFT_OUT])
def test_blocks_that_are_not_run(page, line, why):
    pytest.skip(f"{why[1]}: {why[2]}")


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_an_example_runs(path, tmp_path):
    source = path.read_text(encoding="utf-8")
    need(source)
    assert run(path, "", source, tmp_path).strip(), "an example says what it found"


def test_records_are_small_and_what_is_made_of_them_is_theirs():
    records = list((ROOT / "benches/record").iterdir())
    assert sum(path.stat().st_size for path in records) <= 420_000, "history is git's: keep the newest record of each machine"
    for script in ["speed.py", "beside_torch.py"]:
        subprocess.run([sys.executable, str(ROOT / "benches" / script), "--check"], check=True)
