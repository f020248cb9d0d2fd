"""The dtype table against PyTorch's export schema: name by name, value by value."""

import pytest
import rapt


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
