"""The rows of `cargo xtask bench cpu`: shapes.toml, expanded as the package's own benchmark expands its rows (rapt/bench/rows.py).

No measurement and no tensor here: every process of a run imports this file.
"""

import importlib.util
import pathlib
import sys

BENCHES = pathlib.Path(__file__).resolve().parent
SOURCE = BENCHES.parent / "bindings/python/python/rapt/bench/rows.py"


def rows_module():
    """That file by its path: it needs nothing of Rapt, and the interpreter of --peer-python may have none."""
    spec = importlib.util.spec_from_file_location("rapt_bench_rows", SOURCE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_rows = rows_module()
ALL_DTYPES, BYTES, Row, baseline, families = _rows.ALL_DTYPES, _rows.BYTES, _rows.Row, _rows.baseline, _rows.families


def load(selected=None, dtypes=None, quick=False, path=BENCHES / "shapes.toml"):
    """The rows; the run ends with what there is where a word selects nothing."""
    try:
        return _rows.load(path, selected, dtypes, quick)
    except ValueError as error:
        raise SystemExit(f"--shapes {error}") from None
