"""Weights of compiled graphs: read where they lie, or held constant on request. Neither way gives a result of weights that were.

`rapt.torch.compiled_graphs()` says which of the two a graph does; the stats say that Rapt ran it.
"""

import gc
import weakref

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")
pytest.importorskip("transformers")

import rapt.torch as rt  # noqa: E402
from pt2_compare import same_bits  # noqa: E402
from test_pt2_compile import block, check, compiled, fresh, served  # noqa: E402, F401

FREEZE = {"options": {"freeze": True}}


def fused_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def other_storage(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def transposed(model):
    model.out.weight.data = model.out.weight.data.t()


def swapped(model):
    torch.utils.swap_tensors(model.out.weight, torch.nn.Parameter(model.out.weight.detach() * 3))


def another_object(model):
    model.out.weight = torch.nn.Parameter(model.out.weight.detach() * 3)


def in_place(model):
    with torch.no_grad():
        model.out.weight.view(-1)[3:9].mul_(5)


def in_inference_mode(model):
    with torch.inference_mode():
        model.norm.weight.mul_(5)


NOTICED = {
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "buffer": lambda model: model.gain.mul_(3),
    "load_state_dict": lambda model: model.load_state_dict({n: x * 2 for n, x in model.state_dict().items()}),
    "assigned": lambda model: model.load_state_dict({n: x * 2 for n, x in model.state_dict().items()}, assign=True),
    "other storage": other_storage,
    "transposed": transposed,
    "another object": another_object,
    "fused step": fused_step,
    "dtype and back": lambda model: model.double().float(),
}
SILENT = {
    "data": lambda model: model.out.weight.data.mul_(3),
    "numpy": lambda model: model.out.weight.detach().numpy().__imul__(3),
    "storage": lambda model: model.out.weight.untyped_storage().copy_(torch.randn(16, 16).untyped_storage()),
}


earlier = 0


def all_graphs():
    """What runs, of graphs that ran, in the order of compilation."""
    gc.collect()
    return [rows for rows in rt.compiled_graphs() if rows["calls"] != "0"]


@pytest.fixture(autouse=True)
def graphs_of_other_files(fresh):  # noqa: F811
    """How many graphs of other tests' functions there are, which this process still holds."""
    global earlier
    earlier = len(all_graphs())


def graphs():
    """The graphs of this test."""
    return all_graphs()[earlier:]


def only_graph():
    (rows,) = graphs()
    return rows


def products(rows):
    return {kind.strip() for kind in rows if kind.strip().startswith("product")}


def test_weights_that_are_read_where_they_lie_are_never_stale():
    model, x = block(), torch.randn(2, 5, 16)
    start, ways = block().state_dict(), NOTICED | SILENT | {"swapped": swapped}
    with served(1 + len(ways)):
        run = compiled(model)
        run(x)
        assert products(only_graph()) == {"product, weights packed in the cache in each run, with what follows"}
        for change in ways.values():
            model.load_state_dict(start)
            change(model)
            check(run(x), model, x)


def test_weights_that_are_held_are_held_anew_when_they_change():
    model, x, start = block(), torch.randn(2, 5, 16), block().state_dict()
    with served(1 + 3 * len(NOTICED)):
        run = compiled(model, **FREEZE)
        before = run(x)
        check(before, model, x)
        rows = only_graph()
        assert products(rows) == {"product, packed weights, with what follows"}
        assert rows["held constant"] == "11 tensors, 1 sets, renewed 0 times"
        for name, change in NOTICED.items():
            model.load_state_dict(start)
            before = run(x)
            change(model)
            after = run(x)
            check(after, model, x)
            assert same_bits(after, before) == (name == "dtype and back"), name
            assert same_bits(after, run(x)), name
        with pytest.raises(RuntimeError, match="weakref"):
            swapped(model)


def test_a_change_is_counted_once():
    model, x = block(), torch.randn(1, 3, 16)
    with served(5):
        run = compiled(model, **FREEZE)
        for _ in range(2):
            run(x)
        in_place(model)
        for _ in range(3):
            run(x)
    assert only_graph()["held constant"].endswith("renewed 1 times")


def test_both_ways_give_the_same_bits():
    model = block()
    x = torch.randn(3, 40, 16)
    with served(1):
        read = compiled(model)(x)
    torch._dynamo.reset()
    with served(1):
        held = compiled(model, **FREEZE)(x)
    assert same_bits(read, held)


def test_one_graph_holds_the_weights_of_each_model_that_it_runs():
    """As where the layers of a model are compiled one by one."""
    layers, x = [block() for _ in range(3)], torch.randn(1, 4, 16)
    for n, layer in enumerate(layers):
        with torch.no_grad():
            layer.out.weight.mul_(n + 1)
    run = compiled(lambda x, layer: layer(x), **FREEZE)
    with served(6):
        got = [[run(x, layer) for layer in layers] for _ in range(2)]
    for layer, first, second in zip(layers, *got):
        assert same_bits(first, second)
        check(first, layer, x)
    rows = graphs()
    held = [row["held constant"].split(", ") for row in rows]
    assert sum(int(sets.split()[0]) for _, sets, _ in held) == 3 and {renewed for *_, renewed in held} == {"renewed 0 times"}


def test_what_is_held_goes_with_the_weights():
    run = compiled(lambda x, layer: layer(x), **FREEZE)
    layer, x = torch.nn.Linear(64, 64), torch.randn(2, 64)
    storage = weakref.ref(layer.weight.untyped_storage())
    with served(1):
        run(x, layer)
    assert only_graph()["held constant"].startswith("2 tensors, 1 sets")
    del layer, storage
    gc.collect()
    assert all(" 0 sets" in rows["held constant"] for rows in graphs())


def test_a_buffer_that_the_graph_writes_is_not_held():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))
            self.head = torch.nn.Linear(4, 4)

        def forward(self, x):
            self.total.add_(x)
            return self.head(self.total)

    model, peer = Counts(), Counts()
    peer.load_state_dict(model.state_dict())
    with served(3):
        run = compiled(model, **FREEZE)
        for n in range(3):
            x = torch.full((4,), float(n))
            torch.testing.assert_close(run(x), peer(x))
    assert only_graph()["held constant"].startswith("2 tensors")
    assert torch.equal(model.total, peer.total)


def test_what_is_written_may_not_be_held():
    layer = torch.nn.Linear(4, 4)
    held = rt._weights._Set.__new__(rt._weights._Set)
    held.storages = {layer.weight.untyped_storage().data_ptr(): "weight"}
    held.check_apart([layer.bias])
    with pytest.raises(rapt.UnsupportedError, match="shares memory with weight"):
        held.check_apart([layer.weight[1:]])


def test_what_depends_on_weights_alone_is_computed_once():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = torch.nn.Parameter(torch.randn(8, 6)), torch.nn.Parameter(torch.rand(8, 1))

        def forward(self, x):
            return x @ (self.weight * self.scale + torch.tensor(2.0)).t().contiguous()

    model = Scaled()
    with served(4):
        run = compiled(model, dynamic=True, **FREEZE)
        for rows in (3, 4, 5, 6):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(run(x), model(x))
    rows = only_graph()
    assert products(rows) == {"product, packed weights"} and rows["steps"] == "1"
    assert int(rows["weights packed"].split()[0]) <= 6 * 64 * 4, "one copy for all sizes"


@pytest.mark.parametrize("options", [{}, {"freeze": True}])
def test_convolutions_and_experts_have_kernels_either_way(options):
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(4, 8, 3, padding=1, groups=2)
            self.experts = torch.nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x, ends):
            rows = self.conv(x).flatten(2).transpose(1, 2).flatten(0, 1).contiguous()
            return torch.ops.aten._grouped_mm(rows, self.experts, offs=ends)

    torch.manual_seed(0)
    model, x, ends = Both().to(torch.bfloat16), torch.randn(2, 4, 4, 4).bfloat16(), torch.tensor([5, 5, 30], dtype=torch.int32)
    with served(2):
        run = compiled(model, options=options)
        run(x, ends)
        with torch.no_grad():
            model.conv.weight.mul_(2)
        torch.testing.assert_close(run(x, ends)[:30], model(x, ends)[:30], rtol=2e-2, atol=2e-2)
    rows = only_graph()
    assert not [kind for kind in rows if "by definition" in kind], rows
    assert [kind for kind in rows if "convolution" in kind] and [kind for kind in rows if "groups" in kind]


def test_the_option_is_read_strictly():
    with torch.no_grad(), pytest.raises(rapt.OptionError, match="'freeze': 1"):
        torch.compile(lambda x: x + 1, backend="rapt", options={"freeze": 1})(torch.ones(3))
