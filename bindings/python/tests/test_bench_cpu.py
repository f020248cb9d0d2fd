"""`cargo xtask bench cpu` (benches/run.py): its rows of codes, and a whole run of some of them with tiny sizes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rapt.bench import rows

np = pytest.importorskip("numpy")

BENCHES = Path(__file__).parents[3] / "benches"


@pytest.fixture(scope="module")
def table():
    return rows.load(BENCHES / "shapes.toml")


def named(table, name, dtype="bf16"):
    return next(row for row in table if row.name == name and row.dtype == dtype)


def python(code):
    """What a program beside the files of benches/ prints."""
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=BENCHES, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rows_of_codes_are_held_against_the_same_numbers(table):
    keys = [row.key for row in table]
    assert len(keys) == len(set(keys))
    shapes = {"codes-gqa-8192": "1,32/8,1x8192,128", "codes-mha-4096": "1,32,1x4096,128", "codes-prefill-1024": "1,8,1024,128"}
    for shape, dims in shapes.items():
        family = [row for row in table if row.shape == shape and row.dtype == "bf16"]
        assert {row.dims for row in family} == {dims}
        assert len(rows.families(family)) == 1
        numbers = named(table, shape)
        for row in family:
            assert rows.baseline(row, table) == (None if row == numbers else numbers), row.name
    products = named(table, "codes-prefill-1024/int8-token+int8-channel/int8-products")
    assert products.formats == (("int8", "token"), ("int8", "channel")) and products.compute == "int8"
    assert named(table, "codes-prefill-1024/nvfp4").formats == (("nvfp4", None),) * 2 and named(table, "clip-77").formats is None


def test_bytes_of_codes_of_two_kinds(table):
    row = named(table, "codes-gqa-8192/int8-token")
    tokens = 8 * 8192
    assert row.kv_bytes == tokens * (256 + 8)
    assert dataclasses.replace(row, storage="int8:token+int8:channel").kv_bytes == tokens * (256 + 4)
    assert dataclasses.replace(row, storage="int8:head+int4:token").kv_bytes == tokens * (128 + 64 + 4)
    assert dataclasses.replace(row, storage="int8:head+nvfp4", head_dim_v=64).kv_bytes == tokens * (128 + 36)


def test_rows_of_training(table):
    plain, causal, ragged = (named(table, name) for name in ("train-2048", "train-2048/causal", "train-varlen-512/jagged"))
    assert plain.flops == 7 * 2 * 128 * 2 * 8 * 2048**2 and causal.flops * 2 == plain.flops
    assert ragged.scores == 12 * sum(kept**2 for kept in ragged.kept_keys) and max(ragged.kept_keys) < 512
    assert rows.baseline(named(table, "train-2048/causal/dropout0.1"), table) == causal
    listed = {flag: python(f"import sys, run; sys.argv = ['bench', 'cpu', '--list'{flag}]; run.main()") for flag in ("", ", '--backward'")}
    assert "train-" not in listed[""] and all(line.startswith("train-") for line in listed[", '--backward'"].splitlines())


@pytest.mark.skipif(os.name != "posix", reason="the program needs a POSIX system")
def test_a_quick_run_of_training(torch, tmp_path):
    words = ["cpu", "--quick", "--shapes", "train-gqa-1024,train-masks-1024/additive", "--out", str(tmp_path), "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-B", str(BENCHES / "run.py"), *words, "--dtypes", "bf16", "--peers", "rapt-sdpa,stock"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [row["row"] for row in record["rows"]] == ["train-masks-1024/additive", "train-gqa-1024", "train-gqa-1024/causal"]
    for row in record["rows"]:
        mine = row["timings"]["rapt-sdpa"]
        assert row["us"]["rapt-sdpa"] > 0 and row["us"]["stock"] > 0 and mine["verdict"] == "" and 0 < mine["error"]["relative"] <= row["limit"]["relative"]


def test_wrong_gradients_are_seen():
    said = python(
        "import gradients, inputs, shapes\n"
        "row = shapes.load(['train-gqa-1024/causal'], ['f32'], quick=True)[0]\n"
        "want = gradients.of_row(row, inputs.make(row))\n"
        "gradients.BLOCK = 7\n"
        "print(max(error.relative for error in gradients.errors(gradients.of_row(row, inputs.make(row)), want)) < 1e-14)\n"
        "want[2][0, 5] *= 1.01\n"
        "print([error.relative > 1e-4 for error in gradients.errors(gradients.of_row(row, inputs.make(row)), want)])\n"
    )
    assert said.splitlines() == ["True", "[False, False, True, False]"]


def test_peers_take_codes_that_they_can_make():
    said = python(
        "import shapes; from peers import PEERS\n"
        "for row in shapes.load(['codes']): print(row.key, '|', *(name for name, peer in PEERS.items() if peer.takes(row)))"
    )
    takers = {line.partition(" | ")[0]: set(line.partition(" | ")[2].split()) - {"rapt-avx2"} for line in said.splitlines()}
    assert takers["codes-mha-4096 bf16"] == {"rapt", "stock", "unlocked", "openvino"}
    assert takers["codes-mha-4096 f32"] == {"rapt", "stock", "unlocked", "openvino", "onnxruntime"}
    for name in ("int8-token", "int8-head", "int4-token"):
        assert takers[f"codes-gqa-8192/{name} bf16"] == {"rapt", "openvino"}
        assert takers[f"codes-gqa-8192/{name} f32"] == {"rapt", "onnxruntime"}
    for name in ("codes-gqa-8192/nvfp4 bf16", "codes-mha-4096/e4m3fn-head f32", "codes-prefill-1024/int8-token bf16"):
        assert takers[name] == {"rapt"}


def test_a_peer_is_void_without_codes_and_with_wrong_ones():
    said = python(
        "import shapes; from measure import wrong; from reference import Error\n"
        "named = {row.name: row for row in shapes.load(['codes'], ['bf16'])}\n"
        "for name, error, of_codes in (('int8-token', 8e-3, 9e-3), ('int8-token', 1e-3, 9e-3), ('int8-token', 0.2, 9e-3),\n"
        "                              ('int4-token', 0.2, 0.16), ('int4-token', 0.6, 0.16), ('int4-token', float('inf'), 0.16)):\n"
        "    print(wrong(named['codes-gqa-8192/' + name], error, Error(of_codes, of_codes, True)) or 'timed')\n"
        "print(wrong(named['codes-gqa-8192'], 2e-3, None) or 'timed', wrong(named['codes-gqa-8192'], 0.2, None), sep='\\n')"
    ).splitlines()
    assert said == [
        "timed", "its cache is not of codes (relative error 1.0e-03, that of int8:token 9.0e-03)", "wrong result (relative error 2.0e-01)",
        "timed", "wrong result (relative error 6.0e-01)", "wrong result (relative error inf)",
        "timed", "wrong result (relative error 2.0e-01)",
    ]  # fmt: skip


def test_a_first_call_has_a_process_for_each_round():
    said = python(
        "import shapes; from measure import Run, Timing; from rapt.bench.interleaved import Measured; from workers import Died; import report\n"
        "asked = []\n"
        "class Worker:\n"
        "    def __init__(self, name): self.name, self.calls = name, 0\n"
        "    def ask(self, do, **words):\n"
        "        asked.append((self.name, do)); self.calls += do in ('first', 'time')\n"
        "        return {'samples': [100.0 * self.calls * (2 if self.name == 'stock' else 1)]}\n"
        "    def end(self): asked.append((self.name, 'end'))\n"
        "class Ceilings:\n"
        "    def ask(self, what): return {}\n"
        "def start(name):\n"
        "    if name == 'rapt': raise Died('gone')\n"
        "    return Worker(name)\n"
        "row, _ = shapes.load(['first-16'])\n"
        "names = ('rapt-sdpa', 'stock', 'rapt')\n"
        "run = Run({name: Worker(name) for name in names}, start, Ceilings(), 3, 0.01, '.', 1, 1 << 40, lambda row, doing: None)\n"
        "measured = Measured(row, {name: Timing() for name in names})\n"
        "import measure; measure.ceilings.combined = lambda samples: {}\n"
        "run.time([measured])\n"
        "figure, = report.derive([measured])\n"
        "print(asked.count(('stock', 'first')), asked.count(('stock', 'end')), ('stock', 'time') in asked)\n"
        "print(figure['us'], figure['vs_stock'], measured.timings['rapt'].void)\n"
        "print(*(title for title, *_ in report.tables([measured], [figure])))"
    ).splitlines()
    assert said == ["3 3 False", "{'rapt-sdpa': 100.0, 'stock': 200.0, 'rapt': None} 2.0 gone", "The first call of a process"]


def test_bfloat16_is_held_against_the_faster_unit():
    said = python(
        "from ceilings import ceiling, flop_per_cycle\n"
        "fma = {'ymm': 170.0, 'zmm': 340.0}\n"
        "for dot in ({'ymm': 85.0, 'zmm': 170.0}, {'ymm': 340.0, 'zmm': 680.0}, {}, None):\n"
        "    found = {'ghz': 2.65, 'threads': 2, 'fma_f32': fma, 'bf16_dot': dot}\n"
        "    print(*ceiling(found, 'bf16'), flop_per_cycle(found, 'bf16'), *ceiling(found, 'bf16', 'ymm'), *ceiling(found, 'f32'))\n"
        "print(*ceiling({}, 'bf16'))"
    ).splitlines()
    by_fma = "340.0 f32 FMA zmm 64 170.0 f32 FMA ymm 340.0 f32 FMA zmm"
    assert said == [by_fma, "680.0 bf16-dot zmm 128 340.0 bf16-dot ymm 340.0 f32 FMA zmm", by_fma, by_fma, "None"]


@pytest.mark.skipif(os.name != "posix", reason="the program needs a POSIX system")
def test_a_quick_run_of_codes(torch, tmp_path):
    pytest.importorskip("onnxruntime")
    words = ["cpu", "--quick", "--shapes", "codes-mha-4096,codes-prefill-1024", "--out", str(tmp_path), "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-B", str(BENCHES / "run.py"), *words, "--peers", "rapt,onnxruntime"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(next(tmp_path.glob("*.json")).read_text())
    figures = {f"{row['row']} {row['dtype']}": row for row in record["rows"]}
    assert len(figures) == 17
    for key, row in figures.items():
        mine = row["timings"]["rapt"]
        assert row["us"]["rapt"] > 0 and mine["verdict"] == "" and mine["error"]["relative"] <= row["limit"]["relative"], key
        if row["storage"] == "numbers":
            assert row["codes_error"] is None and row["own_codes_error"] == {} and row["base"] is None
        else:
            base = figures[f"{row['shape']} {row['dtype']}"]
            assert row["base"] == row["shape"] and row["vs_base"] == pytest.approx(row["us"]["rapt"] / base["us"]["rapt"])
    # 8 bits cost about 1 %, 4 bits some 15 %, whoever makes the codes; onnxruntime has them with its forms' names.
    for name, bits, low, high in (("int8-token", 8, 3e-3, 3e-2), ("int8-head", 8, 3e-3, 3e-2), ("int4-token", 4, 5e-2, 0.5)):
        row = figures[f"codes-mha-4096/{name} f32"]
        own = row["timings"]["onnxruntime"]
        assert own["note"].startswith(f"GroupQueryAttention, {bits} bits PER_"), own
        assert own["error"]["relative"] == row["own_codes_error"]["onnxruntime"] and row["us"]["onnxruntime"] > 0
        assert low < row["own_codes_error"]["onnxruntime"] < high and low < row["codes_error"] < high
        assert f"error {row['own_codes_error']['onnxruntime']:.1e}" in done.stdout
    products = figures["codes-prefill-1024/int8-token+int8-channel/int8-products bf16"]
    assert "forward_int8" in products["timings"]["rapt"]["note"] and 3e-3 < products["timings"]["rapt"]["error"]["relative"] < 3e-2
    assert "percent_of_ceiling" not in products
    assert figures["codes-prefill-1024/nvfp4 bf16"]["timings"]["rapt"]["error"]["relative"] < 4e-3
