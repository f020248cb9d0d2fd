"""`rapt.load` and what it gives: calls, containers, kinds of tensors, sessions, refusals, the command line."""

import collections
import io
import subprocess
import sys

import numpy as np
import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")

DYNAMIC = torch.export.Dim.DYNAMIC


def saved(module, args=(), kwargs=None, shapes=None):
    """The archive of a module, as bytes."""
    with torch.no_grad():
        program = torch.export.export(module.eval(), args, kwargs, dynamic_shapes=shapes, strict=False)
    held = io.BytesIO()
    torch.export.save(program, held)
    return held.getvalue()


class Scale(torch.nn.Module):
    """Two inputs of one batch; a weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 4.0]), requires_grad=False)

    def forward(self, x, shift):
        return x * self.weight + shift[:, None]


@pytest.fixture(scope="module")
def scale():
    """`Scale`, of a dynamic batch."""
    shapes = {"x": {0: DYNAMIC}, "shift": {0: DYNAMIC}}
    return saved(Scale(), (torch.zeros(4, 3), torch.zeros(4)), shapes=shapes)


class Mixed(torch.nn.Module):
    """Every kind of argument that an export holds fixed."""

    def forward(self, x, n, scale, flag, nothing, text):
        return x * n * scale if flag and nothing is None and text == "tanh" else x


class Counter(torch.nn.Module):
    """A buffer that each call writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x):
        self.total.add_(x)
        return self.total.clone()


def test_arguments_go_by_place_and_by_name(scale):
    model = rapt.load(scale)
    x, shift = torch.randn(5, 3), torch.randn(5)
    expected = Scale()(x, shift)
    for got in (model(x, shift), model(x, shift=shift), model(shift=shift, x=x)):
        assert torch.equal(got, expected)
    assert model.input_dtypes == {"x": "float32", "shift": "float32"} and model.output_dtypes == {"output": "float32"}
    for args, kwargs, words in [
        ((x,), {}, "shift is missing"),
        ((x, shift, x), {}, "got 3 positional"),
        ((x, shift), {"scale": x}, "got scale too"),
        ((x, shift), {"x": x}, "given twice"),
    ]:
        with pytest.raises(rapt.KindError, match=words):
            model(*args, **kwargs)


Pair = collections.namedtuple("Pair", "first second")


def test_containers_are_taken_apart_and_built_again():
    class Nested(torch.nn.Module):
        def forward(self, d, pair):
            return {"sum": d["a"] + pair[0], "parts": [d["b"][0], (pair[1], None, 3)]}, d["a"] * 2

    x = [torch.tensor([float(n)]) for n in range(4)]
    model = rapt.load(saved(Nested(), ({"a": x[0], "b": [x[1]]}, (x[2], x[3]))))
    out, twice = model({"b": [x[1]], "a": x[0]}, (x[2], x[3]))
    assert list(out) == ["sum", "parts"] and out["sum"].item() == 2.0 and twice.item() == 0.0
    assert type(out["parts"]) is list and type(out["parts"][1]) is tuple and out["parts"][1][1:] == (None, 3)
    for wrong in ({"a": x[0]}, {"a": x[0], "b": [x[1], x[1]]}, {"a": x[0], "b": x[1]}, [x[0], x[1]]):
        with pytest.raises(rapt.KindError, match="d"):
            model(wrong, (x[2], x[3]))


def test_results_are_of_the_kind_of_the_first_tensor(scale):
    model = rapt.load(scale)
    x, shift = np.arange(6.0, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
    expected = x * np.array([1, 2, 4], np.float32) + 1
    got = model(x, shift)
    assert type(got) is np.ndarray and np.array_equal(got, expected)
    assert isinstance(model(torch.from_numpy(x), torch.from_numpy(shift)), torch.Tensor)
    with pytest.raises(rapt.KindError, match="shift is a numpy array"):
        model(torch.from_numpy(x), shift)
    with pytest.raises(rapt.KindError, match="x is a list"):
        model([[1.0]], torch.ones(1))


class Wrapped:
    """A tensor of a library that only speaks DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    @classmethod
    def from_dlpack(cls, x):
        return cls(torch.from_dlpack(x))


def test_producers_of_dlpack_get_their_own_kind(scale):
    x, shift = torch.randn(4, 3), torch.randn(4)
    got = rapt.load(scale)(Wrapped(x), Wrapped(shift))
    assert type(got) is Wrapped and torch.equal(got.tensor, Scale()(x, shift))


def test_inputs_are_read_as_they_lie(scale):
    model = rapt.load(scale)
    whole = np.arange(36.0, dtype=np.float32).reshape(6, 6)
    for x in (whole[:4, ::2], whole.T[1:5, :3], whole[::-1][:4, 2:5], np.broadcast_to(whole[0, :3], (4, 3))):
        shift = whole[::-1, 1][:4]
        assert np.array_equal(model(x, shift), x * np.array([1, 2, 4], np.float32) + shift[:, None])


def test_wrong_sizes_are_refused_with_what_is_served_and_the_model_stays_usable(scale):
    model = rapt.load(scale)
    good = torch.randn(4, 3), torch.randn(4)
    for x, shift, words in [
        (torch.zeros(4, 3), torch.zeros(5), "shift has size 5 in dimension 0"),
        (torch.zeros(4, 2), torch.zeros(4), "x has size 2 in dimension 1.*3"),
        (torch.zeros(4, 3, 1), torch.zeros(4), "x has 3 dimensions"),
    ]:
        with pytest.raises(rapt.ShapeError, match=words):
            model(x, shift)
        assert torch.equal(model(*good), Scale()(*good))


def test_sizes_outside_the_range_of_the_export_are_refused():
    rows = torch.export.Dim("rows", min=3, max=8)
    model = rapt.load(saved(Scale(), (torch.zeros(4, 3), torch.zeros(4)), shapes={"x": {0: rows}, "shift": {0: rows}}))
    for count in (2, 9):
        with pytest.raises(rapt.ShapeError, match=f"= {count} is outside the range 3 to 8"):
            model(torch.zeros(count, 3), torch.zeros(count))
    for count in (3, 8):
        assert model(torch.zeros(count, 3), torch.zeros(count)).shape == (count, 3)


def test_an_integer_of_more_than_64_bits_is_refused():
    class First(torch.nn.Module):
        def forward(self, x, n):
            return x[:n]

    model = rapt.load(saved(First(), (torch.ones(8), 5), shapes={"x": {0: DYNAMIC}, "n": DYNAMIC}))
    for n in (2**63, -(2**63) - 1, 2**200):
        with pytest.raises(rapt.ShapeError, match=f"n is {n}: integers have 64 bits"):
            model(torch.ones(8), n)
    assert model(torch.ones(8), 3).shape == (3,)


def test_a_tensor_on_another_device_is_refused_by_name(scale):
    model, x, shift = rapt.load(scale), torch.ones(4, 3), torch.ones(4)
    with pytest.raises(rapt.DeviceError, match="x is on meta"):
        model(x.to("meta"), shift)
    with pytest.raises(rapt.DeviceError, match=r"shift is on meta.*device=\"cpu\""):
        model(x, shift.to("meta"))
    assert torch.equal(model(x, shift), Scale()(x, shift))


def test_a_gradient_is_never_dropped(scale):
    x = torch.zeros(4, 3, requires_grad=True)
    with pytest.raises(rapt.UnsupportedError, match="x requires grad"):
        rapt.load(scale)(x, torch.zeros(4))
    with torch.no_grad():
        assert rapt.load(scale)(x, torch.zeros(4)).shape == (4, 3)


def test_a_session_keeps_what_the_program_writes():
    model = rapt.load(saved(Counter(), (torch.ones(2),)))
    one, two = model.session(), model.session()
    for count in (1.0, 2.0, 3.0):
        assert one(torch.ones(2)).tolist() == [count] * 2
    assert two(torch.ones(2)).tolist() == [1.0, 1.0] and model(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(rapt.ShapeError):
        one(torch.ones(3))
    with pytest.raises(rapt.DtypeBoundaryError):
        one(torch.ones(2, dtype=torch.float64))
    assert one(torch.ones(2)).tolist() == [4.0, 4.0], "a refused call leaves it as it was"
    assert one.held_bytes > 0 and one.model is model
    one.reset()
    assert one(torch.ones(2)).tolist() == [1.0, 1.0]


class Writer(torch.nn.Module):
    """Writes its first input in place."""

    def forward(self, cache, x):
        cache[:, 1:2].copy_(x)
        return cache.sum()


@pytest.mark.parametrize("form", ["default", "functional"])
def test_an_input_that_the_program_writes_is_written_where_it_lies(form):
    with torch.no_grad():
        program = torch.export.export(Writer(), (torch.zeros(2, 3), torch.ones(2, 1)))
        program = program if form == "default" else program.run_decompositions({})
    held = io.BytesIO()
    torch.export.save(program, held)
    model = rapt.load(held.getvalue())
    whole = torch.zeros(2, 6)
    assert model(whole[:, ::2], torch.tensor([[5.0], [6.0]])).item() == 11.0
    assert whole.tolist() == [[0, 0, 5, 0, 0, 0], [0, 0, 6, 0, 0, 0]]
    fixed = np.zeros((2, 3), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(rapt.LayoutError, match="cache is read-only"):
        model(fixed, np.ones((2, 1), np.float32))


class Written(torch.nn.Module):
    """Two inputs, of which the first is written."""

    def forward(self, cache, x):
        cache.add_(x)
        return cache * 2, x + 1


@pytest.mark.parametrize("form", [None, {}], ids=["default", "functional"])
def test_memory_that_is_written_is_seen_by_no_other_input(form):
    """What a program gives of inputs that share memory is not what PyTorch gives of them: it was given without a word."""
    program = torch.export.export(Written(), (torch.zeros(3), torch.zeros(3)))
    held = io.BytesIO()
    torch.export.save(program if form is None else program.run_decompositions(form), held)
    model = rapt.load(held.getvalue())
    whole = torch.arange(8.0)
    for cache, x in ((whole[:3], whole[2:5]), (whole[:3], whole[:3]), (whole[0:6:2], whole[2:5])):
        with pytest.raises(rapt.LayoutError, match=r"cache is written, and shares memory with x.*`cache\.clone\(\)`"):
            model(cache, x)
        with pytest.raises(rapt.LayoutError, match=r"cache is written, and shares memory with x.*`cache\.copy\(\)`"):
            model(cache.numpy(), x.numpy())
    with pytest.raises(rapt.LayoutError, match="cache is written, and several of its elements are one place"):
        model(torch.zeros(1).expand(3), torch.ones(3))
    assert torch.equal(whole, torch.arange(8.0)), "nothing was written"
    # Between each other's elements, and read where nothing is written.
    model(whole[0:6:2], whole[1:6:2])
    assert whole.tolist() == [1.0, 1.0, 5.0, 3.0, 9.0, 5.0, 6.0, 7.0]
    model(torch.zeros(3), torch.ones(1).expand(3))


def test_operators_that_are_missing_are_all_listed():
    class Rare(torch.nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x) + torch.special.airy_ai(x) + torch.special.bessel_j0(x)

    with pytest.raises(rapt.UnsupportedError, match=r"(?s)special_bessel_j0.*special_airy_ai|special_airy_ai.*special_bessel_j0"):
        rapt.load(saved(Rare(), (torch.zeros(2),)))


def test_damaged_archives_are_refused(scale):
    for end in range(0, len(scale), 997):
        with pytest.raises(rapt.RaptError):
            rapt.load(scale[:end])
    x, shift, expected = torch.ones(1, 3), torch.zeros(1), torch.tensor([[1.0, 2.0, 4.0]])
    for at in range(0, len(scale), 211):
        altered = bytearray(scale)
        altered[at] ^= 0x55
        try:
            out = rapt.load(bytes(altered))(x, shift)
        except rapt.RaptError:
            continue
        # Names and padding may change: then it is the same program.
        assert torch.equal(out, expected)
    assert torch.equal(rapt.load(scale)(x, shift), expected)


def test_a_weight_that_was_altered_is_refused_by_its_name(scale, tmp_path):
    """Each byte of each weight and constant: by the file and by its bytes."""
    altered = bytearray(scale)
    at = scale.index(np.array([1.0, 2.0, 4.0], np.float32).tobytes())
    for place in range(at, at + 12):
        altered[place] ^= 1
        with pytest.raises(rapt.ProgramError, match=r"data/weights/weight_0.*is damaged"):
            rapt.load(bytes(altered))
        altered[place] ^= 1
    altered[at] ^= 0x80
    path = tmp_path / "altered.pt2"
    path.write_bytes(altered)
    with pytest.raises(rapt.ProgramError, match=r"data/weights/weight_0.*is damaged"):
        rapt.load(path)


def test_a_missing_file_is_an_error_of_rapt(tmp_path):
    with pytest.raises(rapt.RaptError, match="absent.pt2"):
        rapt.load(tmp_path / "absent.pt2")
    with pytest.raises(rapt.RaptError, match="directory"):
        rapt.load(tmp_path)


def test_an_integer_that_is_divided_by_zero_is_a_zero_division_error():
    model = rapt.load(saved(Divided(), (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))))
    with pytest.raises(rapt.DivisionError, match="node .*: an integer is divided by zero") as error:
        model(torch.ones(2, dtype=torch.int64), torch.tensor([1, 0]))
    assert isinstance(error.value, ZeroDivisionError) and isinstance(error.value, rapt.RaptError)
    assert model(torch.tensor([7, -7]), torch.tensor([2, 2])).tolist() == [3, -4]


class Divided(torch.nn.Module):
    """Integers by integers."""

    def forward(self, x, y):
        return x // y


def test_an_input_of_other_strides_than_exported_passes_guards_on_strides():
    """Guards speak of what the program was exported for; an input that lies otherwise is laid out so before it runs."""

    class Strided(torch.nn.Module):
        def forward(self, x):
            return x * 2 if x.stride(0) == 1 else x * 3

    shapes = {"x": {0: DYNAMIC, 1: DYNAMIC}}
    model = rapt.load(saved(Strided(), (torch.randn(3, 4).t(),), shapes=shapes))
    assert model.explain().get("guard") is None or "stride" in str(model.explain())
    x = torch.randn(7, 5)
    for given in (x, x.t().contiguous().t(), x.repeat(2, 1)[::2].copy_(x)):
        assert torch.equal(model(given), x * 2)
    assert np.array_equal(model(x.numpy()), x.numpy() * 2)


def test_sizes_that_the_program_asserts_against_are_a_shape_error():
    class Even(torch.nn.Module):
        def forward(self, x):
            torch._check(x.shape[0] % 2 == 0)
            return x + 1

    model = rapt.load(saved(Even(), (torch.zeros(4),), shapes={"x": {0: DYNAMIC}}))
    with pytest.raises(rapt.ShapeError):
        model(torch.zeros(5))
    assert model(torch.zeros(6)).tolist() == [1.0] * 6


def test_the_reference_is_the_program_by_its_definition(scale):
    model = rapt.load(scale)
    x, shift = torch.randn(5, 3), torch.randn(5)
    exact = Scale().double()(x.double(), shift.double())
    assert torch.equal(model.reference()(x, shift=shift), Scale()(x, shift))
    wide = model.reference(float64=True)(x, shift)
    assert wide.dtype == torch.float64 and torch.equal(wide, exact)
    array = model.reference(float64=True)(x.numpy()[::-1], shift.numpy()[::-1])
    assert type(array) is np.ndarray and np.array_equal(array, exact.numpy()[::-1])
    for words in [(x.double(), shift), (x, shift[:4]), (x,)]:
        with pytest.raises(rapt.RaptError):
            model.reference()(*words)


def test_the_reference_of_a_session_has_what_it_keeps_and_writes_nothing():
    session = rapt.load(saved(Counter(), (torch.ones(2),))).session()
    assert session.reference()(torch.ones(2)).tolist() == [1, 1]
    session(torch.ones(2))
    for _ in range(2):
        assert session.reference()(torch.ones(2)).tolist() == [2, 2]
        assert session.reference(float64=True)(torch.ones(2)).dtype == torch.float64
    assert session(torch.ones(2)).tolist() == [2, 2]
    model, cache = rapt.load(saved(Writer(), (torch.zeros(2, 3), torch.ones(2, 1)))), torch.zeros(2, 3)
    assert model.reference()(cache, torch.ones(2, 1)).item() == 2 and not cache.any()
    with pytest.raises(rapt.DivisionError):
        rapt.load(saved(Divided(), (torch.ones(1).int(), torch.ones(1).int()))).reference()(torch.ones(1).int(), torch.zeros(1).int())


def test_explain_says_what_runs(scale):
    rows = rapt.load(scale).explain()
    assert rows["weights"].startswith("12 bytes") and "float32" in rows["input x"]
    assert "aten.mul.Tensor" in str(rows) and "executor" in rows
    assert repr(rapt.load(scale)).startswith("rapt.Model(x: float32[")


def command(*words, cwd):
    return subprocess.run([sys.executable, "-m", "rapt", "model", *words], capture_output=True, text=True, cwd=cwd)


def test_the_command_line_checks_shows_and_runs(scale, tmp_path):
    (tmp_path / "m.pt2").write_bytes(scale)
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    np.save(tmp_path / "shift.npy", np.array([0, 10], np.float32))
    checked = command("check", "m.pt2", cwd=tmp_path)
    assert checked.returncode == 0 and "served" in checked.stdout and "float32" in checked.stdout, checked.stderr
    shown = command("show", "m.pt2", cwd=tmp_path)
    assert shown.returncode == 0 and "aten.mul.Tensor" in shown.stdout
    ran = command("run", "m.pt2", "x.npy", "shift.npy", "--out", "out.npy", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert np.load(tmp_path / "out.npy").tolist() == [[1, 2, 4], [11, 12, 14]]
    few = command("run", "m.pt2", "x.npy", "--out", "other.npy", cwd=tmp_path)
    assert few.returncode == 1 and "takes 2 inputs" in few.stderr and not (tmp_path / "other.npy").exists()
    (tmp_path / "n.pt2").write_bytes(saved(Mixed(), (torch.ones(2), -3, 0.5, True, None, "tanh")))
    words = ["n.pt2", "shift.npy", "-3", "0.5", "true", "none", "tanh"]
    mixed = command("run", *words, "--out", "mixed.npy", cwd=tmp_path)
    assert mixed.returncode == 0, mixed.stderr
    assert np.load(tmp_path / "mixed.npy").tolist() == [0, -15]
    timed = command("bench", *words, "--seconds", "0.01", cwd=tmp_path)
    assert timed.returncode == 0 and "median" in timed.stdout, timed.stderr
    for wrong in (["4", "0.5", "true", "none", "tanh"], ["-3", "0.5", "true", "none", "relu"]):
        refused = command("run", "n.pt2", "shift.npy", *wrong, "--out", "other.npy", cwd=tmp_path)
        assert refused.returncode == 1 and not (tmp_path / "other.npy").exists()
    none = command("check", "x.npy", cwd=tmp_path)
    assert none.returncode == 1 and "zip" in none.stderr
