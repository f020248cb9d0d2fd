"""The README's Python, run as it stands."""

import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parents[3] / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_there_is_a_tour():
    assert len(SNIPPETS) == 2


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["numpy", "pytorch"])
def test_the_tour_runs(snippet, tmp_path):
    """In a process of its own: the account that it prints starts at zero."""
    ran = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    if "stats()" in snippet:
        assert "{'served': 1, 'fallback': {}}" in ran.stdout
