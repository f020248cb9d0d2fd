"""The dtype table against PyTorch's export schema: name by name, value by value."""

from pathlib import Path

import pytest
import rapt
from test_dlpack import Counting


def test_parity_with_the_installed_torch(torch):
    schema = pytest.importorskip("torch._export.serde.schema")
    theirs = {member.name: member.value for member in schema.ScalarType}
    ours = {schema_name: code for _, schema_name, code, _, _ in rapt.dtypes()}
    for name, value in theirs.items():
        if name in ours:
            assert ours[name] == value, f"{name} is {value} in torch, {ours[name]} in rapt"
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        assert ours == theirs and len(ours) == 22
    else:
        # An older torch knows fewer; what it knows has the same number.
        assert set(theirs) <= set(ours)


def test_names_and_sizes_are_torchs_own(torch):
    seen = 0
    for name, _, _, bits, _ in rapt.dtypes():
        if hasattr(torch, name):
            assert getattr(torch, name).itemsize * 8 == bits, name
            seen += 1
    assert seen >= 20


def test_a_wrong_number_would_be_seen(torch):
    schema = pytest.importorskip("torch._export.serde.schema")
    theirs = {member.name: member.value for member in schema.ScalarType}
    for name, schema_name, code, _, _ in rapt.dtypes():
        if schema_name in theirs:
            assert theirs[schema_name] != code + 1, name


def test_names_and_codes_are_unique():
    names, schema_names, codes, _, _ = zip(*rapt.dtypes())
    assert len(set(names)) == len(set(schema_names)) == len(set(codes)) == 22
    assert [name for name, _, _, _, computed in rapt.dtypes() if computed] == ["float16", "float32", "float64", "bfloat16"]


def test_accumulation_is_f32_or_f64_for_f64():
    import ml_dtypes
    import numpy as np

    assert [rapt.accumulation(d) for d in ["float64", "float32", "float16", "bfloat16"]] == ["float64"] + ["float32"] * 3
    assert rapt.accumulation(np.dtype(np.float64)) == "float64"
    assert rapt.accumulation(ml_dtypes.bfloat16) == "float32"
    with pytest.raises(rapt.UnsupportedDtypeError, match="int64"):
        rapt.accumulation("int64")
    with pytest.raises(rapt.OptionError, match="float31"):
        rapt.accumulation("float31")


def test_accumulation_of_torch_dtypes(torch):
    assert rapt.accumulation(torch.bfloat16) == "float32"
    assert rapt.accumulation(torch.float64) == "float64"


DOCS = Path(__file__).parents[3] / "docs" / "reference" / "dtypes.md"
DLPACK = {
    "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64),
    "uint8": (1, 8), "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64),
    "float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16),
    "complex32": (5, 32), "complex64": (5, 64), "complex128": (5, 128), "bool": (6, 8),
    "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8), "float8_e5m2": (12, 8), "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}  # fmt: skip


def table():
    """The table of docs/reference/dtypes.md: a dict per row."""
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    at = next(n for n, row in enumerate(cells) if row[0] == "dtype")
    return [dict(zip(cells[at], row)) for row in cells[at + 1 : at + 23]]


def outcome(name, tensor):
    """What the bindings do with `tensor(name, shape)`: as q, k and v; as a mask of float64 tensors. None: no such tensor."""
    said = []
    for place in ["q", "mask"]:
        try:
            x = tensor(name, (1, 1, 4, 4))
        except (TypeError, AttributeError, KeyError):
            return "-"
        q = x if place == "q" else tensor("float64", (1, 1, 4, 4))
        try:
            rapt.explain(q, q, q, mask=x if place == "mask" else None)
            said.append(place)
        except rapt.UnsupportedDtypeError as error:
            assert name in str(error), f"{name} is not named: {error}"
    return ", ".join(said) or "refused"


def of_numpy(name, shape):
    import ml_dtypes
    import numpy as np

    known = hasattr(ml_dtypes, name)
    return np.zeros(shape, getattr(ml_dtypes, name) if known else np.dtype(name))


class Tagged(Counting):
    """A producer of any tag, over memory that is large enough for it."""

    def __init__(self, tag, shape):
        import numpy as np

        super().__init__(np.zeros(shape, np.complex128))
        self.tag = (*tag, 1)


def of_dlpack(name, shape):
    return Tagged(DLPACK[name], shape)


def test_the_table_of_the_docs_is_what_the_bindings_do(torch):
    rows = {row["dtype"]: row for row in table()}
    assert list(rows) == [name for name, *_ in rapt.dtypes()]
    for name, schema_name, code, bits, computed in rapt.dtypes():
        row = rows[name]
        assert (row["schema"], int(row["code"]), int(row["bits"])) == (schema_name, code, bits), name
        assert row["DLPack code"] == ("{}, {}".format(*DLPACK[name]) if name in DLPACK else "-"), name
        outcomes = {
            "numpy": outcome(name, of_numpy),
            "torch": outcome(name, lambda name, shape: torch.empty(shape, dtype=getattr(torch, name))),
            "DLPack": outcome(name, of_dlpack),
        }
        assert {kind: row[kind] for kind in outcomes} == outcomes, name
        assert ("q" in row["Rust"]) == computed
