"""`rapt bench cuda` where there is no GPU: rows, floors, refusals, and a whole run with the CPU in the GPU's place."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import fresh
import pytest
import rapt
from rapt.bench import cli, report, rows

np = pytest.importorskip("numpy")


def command(*arguments, module=("rapt.bench",), **environment):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run([sys.executable, "-m", *module, *arguments], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def table():
    return rows.load(cli.ROWS)


def named(table, name, dtype="bf16"):
    return next(row for row in table if row.name == name and row.dtype == dtype)


def test_every_row_that_the_speed_table_asks_for_is_declared(table):
    keys = [row.key for row in table]
    assert len(keys) == len(set(keys))
    dense = {(row.batch, row.num_q_heads, row.q_len, row.head_dim, row.causal) for row in table if "dense" in row.groups}
    for head_dim, tokens_heads in ((64, 32), (128, 16), (256, 8)):
        for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
            for causal in ("none", "top_left"):
                assert (batch, tokens_heads, length, head_dim, causal) in dense
    assert {row.head_dim for row in table} >= {64, 72, 80, 96, 128, 192, 256}
    assert any((row.head_dim, row.head_dim_v) == (192, 128) for row in table)
    assert {"bool", "additive", "bool-shared", "additive-shared", "padding"} <= {row.mask for row in table}
    decode = [row for row in table if row.kind == "decode"]
    assert {row.dtype for row in decode} == {"bf16", "f16"} and {8192, 65536} <= {row.kv_len for row in decode}
    assert any(row.num_q_heads == row.num_kv_heads for row in decode) and any(row.num_kv_heads == 8 for row in decode)
    assert named(table, "window-16384/causal/window1024").peers == ("flex",)
    assert named(table, "f32-d128-4096", "f32").bars == (("efficient", 2.0),)
    assert {row.kind for row in table} == {"prefill", "backward", "decode", "call", "add"}
    assert {row.launch for row in table if row.shape == "clip-77"} == {"queued", "eager"}


def test_the_rows_of_the_backward_are_declared_with_their_flops(table):
    found = [row for row in table if row.kind == "backward"]
    assert all(row.groups[0] == "backward" for row in found)
    shapes = {(row.dims, row.dtype, row.causal != "none") for row in found if row.mask == "none" and not row.window and not row.softcap}
    assert shapes == {
        ("4,16,4096,128", "bf16", False), ("4,16,4096,128", "bf16", True), ("1,16,16384,128", "bf16", True), ("16,16,1024,128", "bf16", True),
        ("16,32,1024,64", "bf16", True), ("4,32,4096,64", "bf16", False), ("4,32,4096,64", "bf16", True), ("4,8,4096,256", "bf16", True),
        ("4,16,4096,96", "bf16", False), ("4,32/8,4096,128", "bf16", True), ("64,12,512,64", "f16", False), ("2,16,4096,128", "f32", False),
        ("2,16,4096,128", "f32", True), ("2,16,4096,64", "f32", False),
    }  # fmt: skip
    by_flex = {(row.mask, row.window, row.softcap) for row in found if row.peers == ("flex",)}
    assert by_flex == {("bool", 0, 0), ("additive", 0, 0), ("none", 1024, 0), ("none", 0, 30)}
    assert rows.baseline(named(table, "backward-d256-4096/causal/softcap30"), table) == named(table, "backward-d256-4096/causal")
    whole = named(table, "backward-d128-4096")
    assert whole.flops == 10 * 4 * 16 * 4096**2 * 128 and named(table, "backward-d128-4096/causal").flops == whole.flops // 2
    # Of five products of two sizes three have head_dim, two head_dim_v.
    assert dataclasses.replace(whole, head_dim_v=64).flops == 2 * (3 * 128 + 2 * 64) * whole.scores
    # A window of 1024: the first 1023 rows see fewer.
    seen = 4 * 16 * (4096 * 1024 - 1024 * 1023 // 2)
    assert named(table, "backward-d128-4096/causal/window1024").flops == 10 * 128 * seen
    # q, k, v, out, d_o, dq, dk and dv of 67,108,864 bytes, and lse of 1,048,576
    assert whole.read_bytes == 8 * 67_108_864 + 1_048_576
    assert rows.baseline(named(table, "backward-d128-4096/bool"), table) == whole


def test_a_bar_may_be_meant_for_some_variants(table):
    assert named(table, "d128-4096").bars == (("best-dense", 0.92), ("flash", 1.7))
    assert named(table, "d128-4096/causal/permuted").bars[-1] == ("base", 0.98)
    assert named(table, "masks-4096/bool").bars == (("best", 1.5),) and named(table, "masks-4096/bool-shared").bars == ()


def test_bytes_of_codes_are_counted(table):
    whole = named(table, "codes-gqa-8k").kv_bytes
    assert whole == 16 * 8 * 8192 * 256 * 2
    rows_of_k = 16 * 8 * 8192
    for name, bytes_of_row in (("int8-head", 256), ("int8-token", 256 + 8), ("int4-token", 128 + 8), ("nvfp4", 144), ("mxfp8", 264)):
        assert named(table, f"codes-gqa-8k/{name}").kv_bytes == rows_of_k * bytes_of_row, name
    paged = named(table, "cache-gqa-8k/pages16")
    assert (paged.page_size, paged.kv_bytes) == (16, whole) and named(table, "cache-gqa-8k/cache").page_size is None


def test_a_key_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"unknown key \['cuasal'\]"):
        list(rows.expand({"name": "x", "dims": {"B": 1, "Hq": 1, "Sq": 1, "D": 8}, "cuasal": "none", "groups": []}))


def test_floors_computed_by_hand(table):
    exponentials = 132 * 16 * 1.98e9  # per second on an H200: 4.18176e12
    floors = named(table, "d128-4096").floors_us(792, 4160, exponentials)
    # 4 * 16 heads * 4096^2 scores = 1,073,741,824; * 512 flop = 549,755,813,888; four tensors of 67,108,864 bytes
    assert floors["products"] == pytest.approx(549_755_813_888 / 792e12 * 1e6) == pytest.approx(694.136, abs=1e-3)
    assert floors["exponentials"] == pytest.approx(1_073_741_824 / 4.18176e12 * 1e6) == pytest.approx(256.768, abs=1e-3)
    assert floors["bytes"] == pytest.approx(268_435_456 / 4160e9 * 1e6) == pytest.approx(64.528, abs=1e-3)
    # 8 heads * 65536 keys * 256 numbers * 2 bytes = 268,435,456, and q and the output, 8,192 bytes each
    floors = named(table, "decode-gqa-64k").floors_us(792, 4160, exponentials)
    assert floors["bytes"] == pytest.approx((268_435_456 + 16_384) / 4160e9 * 1e6) and max(floors, key=floors.get) == "bytes"
    # float32 counts six products of the 16-bit rate; causal counts half
    whole = named(table, "f32-d128-4096", "f32").floors_us(792)["products"]
    assert whole == pytest.approx(3 * 694.136, abs=0.01)
    assert named(table, "f32-d128-4096/causal", "f32").floors_us(792)["products"] == pytest.approx(whole / 2)
    # a window of 1024 at 16384: the first 1023 rows see fewer
    row = named(table, "window-16384/causal/window1024")
    assert row.scores == 16 * (16384 * 1024 - 1024 * 1023 // 2)
    # a mask is read once: bool [2,1,4096,4096] is 33,554,432 bytes
    assert named(table, "masks-4096/bool").mask_bytes == 33_554_432 and named(table, "masks-4096/bool-shared").mask_bytes == 16_777_216
    assert named(table, "masks-4096/padding").mask_bytes == 8192 and named(table, "d128-4096").floors_us() == {}


def test_listing_needs_no_gpu_and_no_torch():
    listed = command("cuda", "--list", "--rows", "decode,*/causal", "--dtypes", "f16")
    assert listed.returncode == 0 and "decode-gqa-64k f16" in listed.stdout and "bf16" not in listed.stdout
    code = "import sys; from rapt.bench import cli; cli.main(['cuda', '--list']); print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip().endswith("set()")


def test_rows_of_the_backward_run_by_their_word_or_their_names(capsys):
    def kinds(*words):
        assert cli.main(["cuda", "--list", *words]) == 0
        return {line.startswith("backward-") for line in capsys.readouterr().out.splitlines()}

    assert (kinds(), kinds("--backward"), kinds("--rows", "backward-gqa-4096,clip-77")) == ({False}, {True}, {False, True})


@pytest.mark.parametrize("module", [("rapt.bench",), ("rapt", "bench")])
def test_without_a_gpu_it_is_a_device_error(torch, module):
    code = f"import runpy; runpy.run_module({module[0]!r}, run_name='__main__', alter_sys=True)"
    done = fresh.run(code, *module[1:], "cuda", "--rows", "clip-77", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("DeviceError: the CUDA benchmark needs an NVIDIA GPU") and "Traceback" not in done.stderr
    assert "nvidia-smi" in done.stderr and "cargo xtask bench cpu" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cuda", "--rows", "nothing"], "nothing: no such row"),
        (["cuda", "--peers", "flash,fa9"], "fa9 is not one of flash, cudnn"),
        (["cuda", "--dtypes", "int8"], "int8 is not one of"),
        (["cuda", "--rounds", "0"], "greater than 0"),
        (["cuda", "--rows", "f32", "--dtypes", "f16"], "no row of these has dtype f16"),
        (["cuda", "--backward", "--rows", "clip-77"], "none of these rows is of the backward alone"),
        (["cpu"], "'cpu'"),
        (["cuda", "--check", "all"], "no-slower-than-default"),
    ],
)
def test_wrong_words_are_usage_errors(words, said):
    done = command(*words)
    assert done.returncode == 2 and said in done.stderr


# ---- a whole run, the CPU in the GPU's place


class Stand:
    """The CPU with the manners of `device.Gpu`."""

    where, copy_bytes, gemm_size = "cpu", 1 << 20, 128

    def __init__(self, torch):
        self.torch = torch

    def facts(self):
        return {
            "date": "2026-11-21T00:00:00+00:00", "gpu": "Stand-in 1", "capability": "sm_00", "multiprocessors": 2, "clock_hz": 1e9,
            "l2_bytes": 1 << 20, "memory_bytes": 1 << 32, "exponentials_per_s": 3.2e10, "driver": None, "cuda": None, "torch": "0",
            "cudnn": None, "rapt": rapt.__version__, "python": "3", "system": "none",
        }  # fmt: skip

    def synchronize(self):
        pass

    def free_bytes(self):
        return 1 << 30

    def milliseconds(self, body, hold_cycles=0):
        began = time.perf_counter()
        body()
        return max(1e3 * (time.perf_counter() - began), 1e-4)


def run(torch, chosen, capsys, *words):
    read = []
    with mock.patch.object(cli, "run", lambda options: read.append(options) or 0):
        assert cli.main(["cuda", "--quick", "--json", "-", *words]) == 0
    code = cli.measure(read[0], chosen, Stand(torch))
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


@pytest.fixture
def few():
    wanted = ("d64-1024/causal bf16", "masks-4096 bf16", "masks-4096/bool bf16", "decode-gqa-8k/bshd_cache f16", "call-16/no_grad bf16",
              "add-4/inference bf16", "window-16384/causal/window1024 bf16", "softcap-4096/causal/softcap30 bf16", "d192-128-4096 bf16", "codes-gqa-8k bf16",
              "codes-gqa-8k/int4-token bf16", "codes-gqa-8k/nvfp4 bf16",
              "codes-prompt-2048/int8-token+int8-channel/int8-products bf16", "cache-gqa-8k bf16", "cache-gqa-8k/cache bf16",
              "cache-gqa-8k/pages16 bf16", "cache-prefill-512/bottom_right/pages64 bf16", "latent-8k/latent bf16",
              "latent-8k/latent/pages64 bf16", "backward-d128-4096/additive bf16", "backward-gqa-4096/causal bf16",
              "backward-d128-4096/causal/window1024 bf16")  # fmt: skip
    return [rows.shrink(row) for row in rows.load(cli.ROWS) if row.key in wanted]


def test_a_run_checks_times_and_records(torch, few, capsys, tmp_path):
    svg = tmp_path / "plot.svg"
    code, record, _ = run(torch, few, capsys, "--peers", "flash,cudnn", "--svg", str(svg), "--out", str(tmp_path / "record"))
    assert code == 0
    assert (record["schema"], record["benchmark"]) == (1, "cuda") and record["machine"]["quick"] is True
    assert record["ceilings"]["copy_gbs"] > 0 and record["method"]["rounds"] == 2 and "--peers flash,cudnn" in record["command"]
    by_row = {row["row"]: row for row in record["rows"]}
    assert len(by_row) == len(few)
    for row in record["rows"]:
        assert row["lead"] == (None if row["kind"] == "add" else "rapt-sdpa" if row["kind"] == "call" else "rapt")
        for timing in row["timings"].values():
            assert timing["void"] or len(timing["rounds_us"]) == 2 and all(us > 0 for us in timing["rounds_us"])
        if row["kind"] in ("prefill", "backward", "decode"):
            assert row["limit"]["relative"] >= row["timings"]["rapt"]["error"]["relative"] > 0
            assert row["floor_us"] == max(row["floors_us"].values()) == row["floors_us"][row["bound"]]
            own = row["us"]["rapt"]
            assert row["percent_of_floor"]["rapt"] == pytest.approx(100 * row["floor_us"] / own)
            assert row["ceilings"]["samples"] == 2
    assert by_row["masks-4096/bool"]["base"] == "masks-4096" and by_row["masks-4096/bool"]["vs_base"] > 0
    assert "no window" in by_row["window-16384/causal/window16"]["timings"]["flash"]["void"]
    assert by_row["codes-gqa-8k/nvfp4"]["base"] == "codes-gqa-8k" and by_row["cache-gqa-8k/pages16"]["base"] == "cache-gqa-8k/cache"
    assert "codes" in by_row["codes-gqa-8k/int4-token"]["timings"]["cudnn"]["void"]
    int8 = by_row["codes-prompt-2048/int8-token+int8-channel/int8-products"]
    assert int8["limit"]["relative"] == 3e-2 and 1e-3 < int8["timings"]["rapt"]["error"]["relative"] < 3e-2
    assert "pages" in by_row["cache-gqa-8k/pages16"]["timings"]["flash"]["void"]
    assert by_row["call-16/no_grad"]["vs_best"] > 0 and by_row["add-4/inference"]["us"]["add"] > 0
    gqa = by_row["backward-gqa-4096/causal"]
    assert gqa["timings"]["flash"]["error"]["of"] in ("dq", "dk", "dv") and gqa["vs_best"] > 0 and "flash on the slice" in gqa["limit"]["source"]
    assert by_row["backward-d128-4096/additive"]["us"]["flash"] > 0 and by_row["backward-d128-4096/causal/window16"]["us"]["flash"] is None
    picture = ElementTree.parse(svg).getroot()
    assert picture.tag.endswith("svg") and len(list(picture)) > 10
    names = sorted(path.name for path in (tmp_path / "record").iterdir())
    assert names == [f"2026-11-21-stand-in-1.{suffix}" for suffix in ("json", "md", "svg")]
    page = (tmp_path / "record" / names[1]).read_text()
    assert page.startswith("# Stand-in 1") and "| d64-1024/causal |" in page and "| asked |" in page
    assert json.loads((tmp_path / "record" / names[0]).read_text()) == record


def test_the_record_has_the_documented_keys(torch, few, capsys):
    _, record, _ = run(torch, few[:1], capsys, "--peers", "flash")
    text = (Path(__file__).parents[3] / "docs/reference/benchmarks.md").read_text()
    section = text.partition("### The record")[2].partition("\n## ")[0]
    documented = {name for line in section.splitlines() if line.startswith("| `") for name in line.split("|")[1].split("`")[1::2]}
    assert {"schema", "machine", "ceilings", "rows[].timings", "rows[].floors_us", "rows[].bars"} <= documented
    for path in documented:
        if path.startswith("rows[]."):
            assert path.removeprefix("rows[].") in record["rows"][0], path
        else:
            assert path in record, path
    assert documented >= set(record) - {"rows"}


def test_a_wrong_result_of_ours_is_not_timed_and_fails(torch, few, capsys, monkeypatch):
    right = rapt.attention
    monkeypatch.setattr(rapt, "attention", lambda *args, **options: right(*args, **options) * 1.02)
    code, record, said = run(torch, few[:1], capsys, "--peers", "flash")
    row = record["rows"][0]
    assert code == 1 and row["us"]["rapt"] is None and row["timings"]["rapt"]["rounds_us"] == [] and row["lead"] is None
    assert "FAILED d64-1024/causal bf16: rapt: error 2.0" in said and row["us"]["flash"] > 0
    # One element that nothing wrote, beside the sampled rows or in them.
    def holed(*args, **options):
        out = right(*args, **options)
        out[0, 0, 0, 0] = math.nan
        return out

    monkeypatch.setattr(rapt, "attention", holed)
    code, record, said = run(torch, few[:1], capsys, "--peers", "flash")
    assert code == 1 and record["rows"][0]["timings"]["rapt"]["error"] == {"relative": None, "worst_row": None, "finite": False, "of": ""}


@pytest.mark.parametrize(("at", "name"), [(0, "dq"), (1, "dk"), (2, "dv")])
def test_a_wrong_gradient_of_ours_is_not_timed_and_fails(torch, few, capsys, monkeypatch, at, name):
    right, row = rapt.attention_backward, next(row for row in few if row.shape == "backward-gqa-4096")

    def wrong(*args, **options):
        made = list(right(*args, **options))
        made[at] = made[at] * 1.02
        return made

    monkeypatch.setattr(rapt, "attention_backward", wrong)
    code, record, said = run(torch, [row], capsys, "--peers", "flash")
    assert code == 1 and record["rows"][0]["us"]["rapt"] is None and f"rapt: {name}: error 2.0" in said and record["rows"][0]["us"]["flash"] > 0

    def holed(*args, **options):
        made = right(*args, **options)
        made[at][0, 0, 0, 0] = math.nan  # outside of the slice that is compared
        return made

    monkeypatch.setattr(rapt, "attention_backward", holed)
    code, record, said = run(torch, [row], capsys, "--peers", "flash")
    assert code == 1 and record["rows"][0]["timings"]["rapt"]["error"]["finite"] is False


def test_a_peer_that_computes_something_else_has_no_time(torch, few, capsys, monkeypatch):
    import torch.nn.functional as F

    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **options: q + v.mean())
    code, record, _ = run(torch, few[:1], capsys, "--peers", "flash")
    row = record["rows"][0]
    assert code == 0 and row["us"]["flash"] is row["us"]["sdpa"] is None and "wrong result" in row["timings"]["flash"]["void"]
    assert row["limit"]["source"] == "flash's roundings" and row["us"]["rapt"] > 0
    assert any(note.startswith("flash has no time on d64-1024/causal bf16: wrong result") for note in record["notes"])


def test_bars_are_asked_of_the_figures(table):
    figure = {
        "lead": "rapt", "us": {"rapt": 100.0, "cudnn": 95.0, "flash": 180.0}, "vs_best": 0.95, "vs_best_dense": 0.95, "vs_default": 1.8,
        "vs_base": 1.01, "floors_us": {"bytes": 90.0},
    }  # fmt: skip
    asked = [("best", 1.0), ("best-dense", 0.92), ("default", 1.7), ("base", 0.98), ("copy", 0.88), ("flash", 2.0), ("flex", 1.5)]
    said = [report.bar_of(figure, over, least) for over, least in asked]
    assert [bar["met"] for bar in said] == [False, True, True, True, True, False, None]
    assert said[3]["reached"] == pytest.approx(1 / 1.01) and said[5]["reached"] == pytest.approx(1.8)
    figures = [{"row": "x", "dtype": "bf16", "dims": "1", "bars": said}]
    assert report.summary(figures) == "bars: 4 of 7 met, 1 not measured"
    assert report.below(figures) == ["x bf16: 0.95 of best, asked 1", "x bf16: 1.80 of flash, asked 2"]
    assert [line[-1] for line in report.bars_table(figures)[2]] == ["below", "below", "not measured", "met", "met", "met", "met"]


def test_rotated_copies_fill_four_caches(torch, table):
    from rapt.bench import check

    row = named(table, "decode-gqa-d64-8k")
    assert check.copies(row, 60 << 20) == 2  # 268 MB a copy: two are more than 240 MB, and never one alone
    assert check.copies(dataclasses.replace(row, batch=1), 60 << 20) == 15  # 16.8 MB a copy
    tensors = check.make(Stand(torch), rows.shrink(row), 3)
    (k, v), (k2, v2) = tensors.kv[0], tensors.kv[2]
    assert torch.equal(k, k2) and k.data_ptr() != k2.data_ptr() and v.data_ptr() != v2.data_ptr()
    small = dataclasses.replace(rows.shrink(row), num_kv_heads=2)
    plain, cache = (check.make(Stand(torch), dataclasses.replace(small, layout=layout)).kv[0][0] for layout in ("contiguous", "bshd_cache"))
    pages = dataclasses.replace(small, cache="pages7")
    tensors = check.make(Stand(torch), pages, 2)
    gathered = tensors.kv[1][0][tensors.page_table.long()].reshape(small.batch, -1, 2, 64)[:, : small.kv_len].transpose(1, 2)
    assert torch.equal(gathered, plain) and torch.equal(tensors.numbers[0], plain) and tensors.kv[0][0].shape[1:] == (7, 2, 64)
    codes = check.make(Stand(torch), dataclasses.replace(small, storage="int8:token"), 2)
    assert codes.kv[0][0].codes.data_ptr() != codes.kv[1][0].codes.data_ptr() and codes.kv[1][1].granularity == "token"
    assert torch.equal(codes.numbers[0], codes.kv[1][0].dequantize())
    latent = dataclasses.replace(small, storage="latent", num_kv_heads=1, head_dim=96)
    assert latent.kv_bytes == 2 * latent.batch * latent.kv_len * 96
    for lies in ("none", "contiguous", "pages7"):
        for k, v in check.make(Stand(torch), dataclasses.replace(latent, cache=lies), 2).kv:
            assert k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and torch.equal(k[..., :64], v)
    assert torch.equal(plain, cache) and plain.stride()[1:3] == (96 * 64, 64) and cache.stride()[1:3] == (64, 128)
