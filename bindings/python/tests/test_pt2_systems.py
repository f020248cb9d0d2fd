"""Systems of linear equations in exported programs: in every form that torch.export leaves, and with matrices that have no inverse.

Core ATen has torch's error as a node of its own, which a token orders; the values are torch's samples in test_pt2_ops.py.
"""

import io
import math

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")

from one_node import OneNode  # noqa: E402
from pt2_compare import compare  # noqa: E402
from reference import to_torch  # noqa: E402
from torch import linalg  # noqa: E402

aten = torch.ops.aten
DTYPES = [torch.float64, torch.float32]
FORMS = {"default": None, "functional": {}, "core": "core"}
SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]])


class Of(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *operands):
        return self.function(*operands)


FUNCTIONS = {
    "inv": (linalg.inv, ()),
    "inverse": (torch.inverse, ()),
    "inv_ex": (linalg.inv_ex, ()),
    "det": (linalg.det, ()),
    "slogdet": (linalg.slogdet, ()),
    "logdet": (torch.logdet, ()),
    "solve": (linalg.solve, ((3, 2),)),
    "solve of vectors": (linalg.solve, ((2, 3),)),
    "solve from the right": (lambda a, b: linalg.solve(a, b, left=False), ((4, 3),)),
    "solve_ex": (linalg.solve_ex, ((3, 2),)),
    "solve_triangular": (lambda a, b: linalg.solve_triangular(a, b, upper=True), ((3, 2),)),
    "cholesky": (lambda a: linalg.cholesky(a @ a.mT), ()),
    "cholesky of the upper triangle": (lambda a: linalg.cholesky(a @ a.mT, upper=True), ()),
    "cholesky_ex": (lambda a: linalg.cholesky_ex(a @ a.mT), ()),
    "a product with an inverse, twice": (lambda a: linalg.inv(a) @ linalg.inv(a.mT), ()),
}


def matrices(dtype, batch=2):
    """Matrices that are far from singular."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(batch, 3, 3, generator=generator).to(dtype) + 3 * torch.eye(3, dtype=dtype)


def exported(function, operands, form, dynamic=None):
    program = torch.export.export(Of(function), tuple(operands), dynamic_shapes=dynamic)
    if form != "default":
        program = program.run_decompositions() if form == "core" else program.run_decompositions({})
    held = io.BytesIO()
    torch.export.save(program, held)
    return program, rapt.load(held.getvalue())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_form_gives_what_torch_gives(name, form, dtype):
    function, shapes = FUNCTIONS[name]
    operands = [matrices(dtype), *(torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype) for shape in shapes)]
    program, model = exported(function, operands, form)
    if form == "core" and name in ("inv", "solve", "cholesky"):
        assert "with_effects" in str(program.graph), "torch orders its error by a token"
    wide = [x.double() for x in operands]
    exact = [x.double() if x.is_floating_point() else x for x in torch.utils._pytree.tree_leaves(function(*wide))]
    lying = [operands[0].mT.contiguous().mT, *(torch.cat([x, x], -1)[..., : x.shape[-1]] for x in operands[1:])]
    for given in (operands, lying):
        for call in (model, model.reference()):
            compare(torch.utils._pytree.tree_leaves(call(*given)), torch.utils._pytree.tree_leaves(function(*given)), exact, name)


REFUSED = {
    "inv": (linalg.inv, SINGULAR, "linalg.inv: matrix 1 is singular: its pivot 2 is zero"),
    "solve": (lambda a: linalg.solve(a, a), SINGULAR, "linalg.solve: matrix 1 is singular: its pivot 2 is zero"),
    "inv_ex that checks": (lambda a: linalg.inv_ex(a, check_errors=True).inverse, SINGULAR, "linalg.inv: matrix 1 is singular"),
    "cholesky": (linalg.cholesky, -torch.eye(2), "linalg.cholesky: matrix 1 is not positive definite: its leading part of order 1"),
    "cholesky_inverse": (torch.cholesky_inverse, torch.zeros(2, 2), "cholesky_inverse: matrix 1 is singular: its pivot 1 is zero"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_matrix_without_an_inverse_ends_the_run_as_in_torch(name, form):
    function, bad, words = REFUSED[name]
    good = torch.eye(2) * 2
    _, model = exported(function, [torch.stack([good, good])], form, dynamic=[({0: torch.export.Dim.DYNAMIC},)])
    for call in (model, model.reference()):
        with pytest.raises(rapt.NumberError, match=f"node .*: {words}") as error:
            call(torch.stack([good, bad, good]))
        assert isinstance(error.value, ValueError)
        with pytest.raises(RuntimeError, match="singular|not positive-definite|is zero"):
            function(torch.stack([good, bad, good]))
        torch.testing.assert_close(call(torch.stack([good, good])), function(torch.stack([good, good])))


def test_a_refused_run_leaves_what_it_has_written_as_it_was():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, a):
            self.count.add_(1)
            return linalg.inv(a) * self.count

    for form in FORMS:
        program = torch.export.export(Counts(), (torch.eye(2),))
        if form != "default":
            program = program.run_decompositions() if form == "core" else program.run_decompositions({})
        held = io.BytesIO()
        torch.export.save(program, held)
        session = rapt.load(held.getvalue()).session()
        with pytest.raises(rapt.NumberError, match="singular"):
            session(SINGULAR)
        assert torch.equal(session(torch.eye(2)), torch.eye(2)), form


def run(overload, *args, **kwargs):
    one = OneNode(overload, args, kwargs)
    program = rapt._native.Program.from_json(one.json)
    return one.run(), [to_torch(out) for out in program.run(one.inputs)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_info_says_which_matrix_failed_and_where(dtype):
    good, zero = torch.eye(2, dtype=dtype), torch.zeros(2, 2, dtype=dtype)
    stack = torch.stack([good, SINGULAR.to(dtype), zero, good * 3])
    for overload, args in ((aten.linalg_inv_ex.default, (stack,)), (aten.linalg_solve_ex.default, (stack, stack))):
        expected, (result, info) = run(overload, *args)
        assert torch.equal(info, expected[1]) and info.tolist() == [0, 2, 1, 0]
        torch.testing.assert_close(result[[0, 3]], expected[0][[0, 3]])
        assert not result[1].isfinite().all() and not result[2].isfinite().all()
    for upper in (False, True):
        expected, (factor, info) = run(aten.linalg_cholesky_ex.default, torch.stack([good, -good, SINGULAR.to(dtype)]), upper=upper)
        assert torch.equal(info, expected[1]) and info.tolist() == [0, 1, 2]
        assert torch.equal(factor[0], good) and factor[1:].isnan().all()


@pytest.mark.parametrize("place", [(0, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_with_a_number_that_is_none_gives_nan_and_no_error(place, value):
    """torch's LAPACK calls some of them singular, by where they lie in memory."""
    a = torch.eye(3)
    a[place] = value
    for given in (a, a.mT.contiguous().mT):
        for overload, args in ((aten.linalg_inv.default, ()), (aten.linalg_det.default, ()), (aten.linalg_solve.default, (torch.ones(3),))):
            assert run_alone(overload, given, *args)[0].isnan().all(), overload
        sign, log = run_alone(aten.linalg_slogdet.default, given)
        assert sign == 0 and log.isnan()
        assert run_alone(aten.logdet.default, given)[0].isnan()


def run_alone(overload, *args):
    one = OneNode(overload, args)
    return [to_torch(out) for out in rapt._native.Program.from_json(one.json).run(one.inputs)]


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3)])
def test_matrices_without_elements_are_what_torch_makes_of_them(shape):
    a = torch.zeros(shape)
    for name in ("linalg_inv", "linalg_inv_ex", "linalg_det", "linalg_slogdet", "logdet", "linalg_cholesky", "cholesky_inverse"):
        expected, got = run(getattr(aten, name).default, a)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.shape == theirs.shape and torch.equal(ours, theirs), name
    b = torch.zeros(*shape[:-1], 2)
    for name in ("linalg_solve", "triangular_solve", "cholesky_solve"):
        args = (b, a) if name != "linalg_solve" else (a, b)
        expected, got = run(getattr(aten, name).default, *args)
        assert got[0].shape == expected[0].shape, name


def test_factors_that_a_program_reads_are_refused_by_name():
    a = matrices(torch.float32)
    with pytest.raises(rapt.RaptError, match="the factors that the program reads are not"):
        rapt._native.Program.from_json(OneNode(aten._linalg_det.default, (a,)).json)
    with pytest.raises(rapt.RaptError, match="linalg_lu_factor"):
        exported(lambda a: linalg.lu_factor(a)[0], [a], "default")


@torch.no_grad()
def test_compiled_graphs_check_their_matrices():
    """AOTAutograd orders the checks by a token, an argument and a result of the graph: the graph was refused."""
    import rapt.torch as rt

    def solved(a, b):
        return linalg.solve(linalg.inv(a), b), linalg.cholesky(a @ a.mT)

    torch._dynamo.reset()
    compiled = torch.compile(solved, backend="rapt")
    a, b = matrices(torch.float64), torch.randn(2, 3, 2, dtype=torch.float64)
    for scale in (1, 2):
        for got, expected in zip(compiled(a * scale, b), solved(a * scale, b), strict=True):
            torch.testing.assert_close(got, expected)
    with pytest.raises(rapt.NumberError, match="linalg.inv: matrix 1 is singular"):
        compiled(torch.stack([a[0], torch.zeros(3, 3, dtype=torch.float64)]), b)
    assert "aten._linalg_check_errors.default" in str(rt.compiled_graphs()[-1])


@torch.no_grad()
def test_a_graph_with_another_effect_is_refused():
    def shown(x):
        torch.ops.aten._print("x")
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(rapt.UnsupportedError, match="has an effect that programs do not have: aten._print.default"):
        torch.compile(shown, backend="rapt")(torch.ones(2))
