"""`rapt.layout`: the algebra, the atlas, the checker and the emulator from Python."""

import subprocess
import sys
from pathlib import Path

import pytest
import rapt
from rapt.layout import Layout, Quantity, atom, atoms, check, check_text, emulate, show

EXAMPLES = Path(__file__).parents[3] / "examples" / "layout"
C = Layout("((128,128),1,1):((65536,1),0,0)")
A = Layout(((128, 16), 1, 4), ((64, 1), 0, 16))


def test_a_layout_is_text_tuples_and_a_function():
    assert (C.size, C.cosize, C.largest) == (16384, 8_323_200, 8_323_199)
    assert C.shape == ((128, 128), 1, 1) and C.stride == ((65536, 1), 0, 0)
    assert (C.rank, C.depth) == (3, 2)
    assert C(((5, 7), 0, 0)) == (5 << 16) + 7 == C(5 + 128 * 7)
    assert Layout((4, 8)) == Layout("(4,8):(1,4)") != Layout("(4,8):(8,1)")
    assert repr(Layout(4, 2)) == "Layout('4:2')".replace("'", '"') and str(A) == "((128,16),1,4):((64,1),0,16)"
    assert len({Layout(4), Layout("4:1")}) == 1
    assert Layout((2, 3), (3, 1)).offsets() == [0, 3, 1, 4, 2, 5]
    assert Layout((3, (2, 3))).coord(16) == (1, (1, 2))
    assert C[0] == Layout("(128,128):(65536,1)")
    swizzled = Layout("Sw<3,4,3> o (8,128):(128,1)")
    assert (swizzled.swizzle, swizzled((3, 20))) == ("Sw<3,4,3>", 420)


def test_the_algebra_is_cutes():
    assert str(C.compose(Layout((128, 64)))) == "(128,64):(65536,1)"
    layout = Layout("(12,(4,8)):(59,(13,1))")
    assert str(layout.compose((3, 8))) == "(3,(4,2)):(59,(13,1))"
    assert layout.compose("<3:4,8:2>") == layout.compose((Layout(3, 4), Layout(8, 2)))
    assert str(Layout(4, 2).complement(24)) == "(2,3):(1,8)"
    tiler = (Layout(3, 3), Layout((2, 4), (1, 8)))
    divided = Layout("(9,(4,8)):(59,(13,1))").divide(tiler, arrangement="zipped")
    assert str(divided) == "((3,(2,4)),(3,(2,2))):((177,(13,2)),(59,(26,1)))"
    assert str(Layout("(8,8,5):(8,1,64)").divide((4, None), "zipped")) == "((4,1),(2,8,5)):((8,0),(32,1,64))"
    assert str(Layout("(2,2):(4,1)").product(6)) == "((2,2),(2,3)):((4,1),(2,8))"
    block = Layout("(2,5):(5,1)")
    assert str(block.blocked_product(Layout((3, 4)))) == "((2,3),(5,4)):((5,10),(1,30))"
    assert str(block.raked_product(Layout((3, 4)))) == "((3,2),(4,5)):((10,5),(30,1))"
    assert str(Layout("(2,(1,6)):(1,(6,2))").coalesce()) == "12:1"
    assert str(Layout("(2,(1,6)):(1,(6,2))").coalesce(by=(1, 1))) == "(2,6):(1,2)"
    assert str(Layout("(4,8):(8,1)").right_inverse()) == "(8,4):(4,1)"
    assert str(Layout("(4,8):(16,1)").left_inverse()) == "(16,4):(4,1)"
    assert Layout("(4,8):(8,1)").slice((None, 3)) == (Layout(4, 8), 3)
    assert str(Layout("(128,64):(65536,1)").recast(32, 16)) == "(128,128):(131072,1)"
    assert str(Layout("((2,3),4)").flatten()) == "(2,3,4):(1,2,6)" and str(Layout("(4,2):(1,0)").filter()) == "4:1"


def test_the_commands_are_functions_too():
    from rapt import layout

    assert str(layout.compose(str(C), (128, 64))) == "(128,64):(65536,1)"
    assert str(layout.compose("(12,(4,8)):(59,(13,1))", "<3,8>")) == "(3,(4,2)):(59,(13,1))"
    assert str(layout.complement("4:2", 24)) == "(2,3):(1,8)"
    assert str(layout.divide("(8,8):(8,1)", (4, 2), "zipped")) == "((4,2),(2,4)):((8,1),(32,2))"
    assert str(layout.product("(2,5):(5,1)", (3, 4), "raked")) == "((3,2),(4,5)):((10,5),(30,1))"
    assert str(layout.product("(2,5):(5,1)", "(3,4)", "blocked")) == "((2,3),(5,4)):((5,10),(1,30))"
    assert str(layout.product("(2,2):(4,1)", 6)) == "((2,2),(2,3)):((4,1),(2,8))"
    assert str(layout.coalesce("(2,(1,6)):(1,(6,2))")) == "12:1"
    assert str(layout.right_inverse("(4,8):(8,1)")) == "(8,4):(4,1)"
    assert str(layout.left_inverse("(4,8):(16,1)")) == "(16,4):(4,1)"
    assert str(layout.recast("(128,64):(65536,1)", 32, 16)) == "(128,128):(131072,1)"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Layout("(4,"), rapt.LayoutError, "character 3"),
        (lambda: Layout((4, 2), 1), rapt.LayoutError, "different profiles"),
        (lambda: Layout(0), rapt.LayoutError, "at least 1"),
        (lambda: Layout(2**70), rapt.LayoutError, "62 bits"),
        (lambda: Layout((2**40, 2**40)), rapt.LayoutError, "overflows"),
        (lambda: Layout(4.0), TypeError, "float"),
        (lambda: Layout("(6,2):(8,2)").compose(Layout(4, 4)), rapt.LayoutError, "neither divides"),
        (lambda: Layout("(4,4):(1,2)").complement(16), rapt.LayoutError, "no multiple"),
        (lambda: Layout(8).divide(2, "sideways"), rapt.OptionError, "logical, zipped"),
        (lambda: Layout((4, 8))((4, 0)), rapt.LayoutError, "does not fit"),
        (lambda: Layout((4, 8))[2], rapt.LayoutError, "3 are asked"),
        (lambda: Layout("(9999,9999)").offsets(), rapt.LayoutError, "at most"),
        (lambda: atom("wgmma.m63"), rapt.OptionError, "wgmma.m64n"),
        (lambda: Quantity(1, "feet"), rapt.OptionError, "tmem-cells"),
        (lambda: check_text("check = 3"), rapt.OptionError, "check"),
        (lambda: check("no-such-file.toml"), FileNotFoundError, "no-such-file"),
    ],
)
def test_mistakes_are_typed(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_deep_nesting_is_refused():
    shape = 1
    for _ in range(10_000):
        shape = (shape,)
    with pytest.raises(rapt.LayoutError, match="nesting"):
        Layout(shape)


def test_two_units_do_not_compare():
    cell, half = Quantity(64, "tmem-cells"), Quantity(64, "tmem-elements:16")
    with pytest.raises(rapt.KindError, match="different units"):
        cell == half  # noqa: B015
    assert cell == Quantity(64, "tmem-cells") and cell != Quantity(65, "tmem-cells")
    assert cell.to("tmem-elements:16") == Quantity(128, "tmem-elements:16")
    with pytest.raises(rapt.KindError):
        cell.to("shared-bytes")
    assert cell != 64


def test_the_naive_formulas_agree_in_row_0_alone():
    rows = {row for row in range(128) for k in range(64) if C(row + 128 * k) == A(row + 128 * k)}
    assert rows == {0}


def test_the_atlas_and_its_pictures():
    names = atoms()
    assert len(names) > 100 and "wgmma.m64n128k16.f16.a" in names
    known = atom("wgmma.m64n128k16.f32.d")
    assert (known["threads"], known["values"]) == (128, 64) and "PTX ISA" in known["source"]
    assert " 0|  T0V0  T0V1  T1V0" in show("mma.m16n8k16.f32.c")
    assert show(C, rows=2, cols=2).endswith("2 rows × 2 columns of 128 × 128\n")
    assert show("mma.m16n8k16.f32.c", svg=True).startswith("<svg ")


def test_the_example_is_settled():
    read, store = check(EXAMPLES / "blackwell_p_store.toml")
    assert not read.proven and read.faults == ["unit_mix_up"]
    assert read["disagreements"] == 127 * 64 and read["map"][0] == "." * 64
    first = read["first"]
    assert (first["row"], first["col"]) == (1, 0)
    assert first["wrote"] == {"lane": 1, "column": 32, "bits": [0, 16]}
    assert first["reads"] == {"lane": 0, "column": 64, "bits": [0, 16]}
    assert store.faults == ["transposed"]
    assert store["repairs"][0]["notation"] == "(128,64):(65536,1) in tmem-cells, offset 32, 2 to one"
    assert "REFUTED" in str(store) and store.svg().startswith("<svg ")
    for name in ["blackwell_p_store_fixed", "blackwell_p_flows", "hopper_p_registers_f16", "ampere_p_registers"]:
        assert all(report.proven for report in check(EXAMPLES / f"{name}.toml")), name


def test_fp8_needs_a_permutation_of_v():
    (report,) = check(str(EXAMPLES / "hopper_p_registers_fp8.toml"))
    feed = report["feed"]
    assert not feed["as_is"] and feed["stays_in_thread"] and feed["shuffle"]["within_quads"]
    assert feed["v_permutation"][:16] == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert sorted(feed["v_permutation"]) == list(range(128))


@pytest.mark.parametrize("softmax", [False, True])
def test_the_emulator_shows_why(softmax):
    broken = emulate(EXAMPLES / "blackwell_p_store.toml", softmax=softmax)
    reads, stores = broken[:3], broken[3:]
    for outcome in reads:
        assert outcome.cosine is None and outcome["poisoned"] > 0
        assert outcome["first_poison"]["place"] == {"lane": 0, "column": 128, "bits": [0, 16]}
        assert "lane 0, column 128" in str(outcome)
    assert [outcome["seed"] for outcome in stores] == [1, 2, 3]
    assert all(abs(outcome.cosine) < 0.1 for outcome in stores)
    for name in ["blackwell_p_store_fixed", "blackwell_p_flows"]:
        for outcome in emulate(EXAMPLES / f"{name}.toml", seeds=[5], softmax=softmax):
            assert outcome.cosine >= 0.99999, outcome


def test_importing_rapt_does_not_import_it():
    code = "import sys, rapt; assert 'rapt.layout' not in sys.modules; rapt.layout.Layout(4); import rapt.layout"
    subprocess.run([sys.executable, "-c", code], check=True)
