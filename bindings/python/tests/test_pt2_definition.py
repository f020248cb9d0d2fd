"""Operators without kernels, in programs: volumes, sequences, places, tables and norms, at sizes of their own."""

import io

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")

from one_node import OneNode  # noqa: E402
from pt2_compare import compare, difference  # noqa: E402
from rapt import _native  # noqa: E402
from reference import to_torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

DYNAMIC = torch.export.Dim.DYNAMIC


class Volumes(nn.Module):
    """Convolutions and pooling of videos, images resized and read at places, patches and their distances."""

    def __init__(self):
        super().__init__()
        self.stem, self.up = nn.Conv3d(3, 4, (2, 3, 3), padding=(0, 1, 1)), nn.ConvTranspose3d(4, 2, 2, 2, groups=2)

    def forward(self, video):
        x = functional.max_pool3d(functional.relu(self.stem(video)), 2)
        means = torch.hstack((functional.adaptive_avg_pool3d(x, 1).flatten(1), functional.avg_pool3d(x, 2).flatten(1)))
        larger = functional.interpolate(self.up(x), scale_factor=(1.0, 2.0, 1.5), mode="trilinear")
        image = functional.interpolate(video[:, :, 0], (7, 9), mode="bicubic", antialias=True)
        grid = torch.tanh(video[:, :2, 0].permute(0, 2, 3, 1))
        patches = functional.unfold(functional.grid_sample(image, grid, align_corners=False), 2, stride=2)
        return means, larger, torch.cdist(patches, patches), patches.median(-1).values


class Sequences(nn.Module):
    """Recurrent layers one after another."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)
        self.gru, self.rnn = nn.GRU(6, 3, batch_first=True), nn.RNN(3, 2)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        z, last = self.gru(y)
        return self.rnn(z.transpose(0, 1))[0], h, c, last


class Tables(nn.Module):
    """Bags of a table's rows, products of three tensors, and norms of matrices."""

    def __init__(self):
        super().__init__()
        self.sums = nn.EmbeddingBag(11, 6, mode="sum", padding_idx=0, include_last_offset=True)
        self.means, self.maxima = nn.EmbeddingBag(11, 6), nn.EmbeddingBag(11, 6, mode="max")
        self.pair = nn.Bilinear(6, 6, 4)

    def forward(self, tokens):
        flat = tokens.flatten()
        offsets = torch.arange(0, flat.shape[0] + 1, tokens.shape[1])
        weights = torch.linspace(0.5, 1.5, 5).repeat(tokens.shape[0])
        sums = self.sums(flat, offsets, weights)
        means = self.means(tokens)
        joined = self.pair(sums, means)
        orders = [torch.linalg.norm(joined, ord=order) for order in (1, -1, 2, -2, float("inf"), -float("inf"), "fro", "nuc")]
        return joined, self.maxima(tokens), torch.stack(orders), torch.linalg.svdvals(joined), torch.linalg.svd(means)[1]


def as_core(program):
    return program.run_decompositions()


def as_traced(program):
    return program


@pytest.mark.parametrize("form", [as_traced, lambda program: program.run_decompositions({}), as_core], ids=["default", "functional", "core"])
@pytest.mark.parametrize("gradients", [False, True], ids=["frozen", "trainable"])
def test_tables_give_what_torch_gives_in_every_form(form, gradients):
    torch.manual_seed(0)
    model, exact = Tables().eval().requires_grad_(gradients), Tables().eval().double().requires_grad_(False)
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 11, (3, 5))
    with torch.no_grad():
        program = form(torch.export.export(model, (tokens,)))
    held = io.BytesIO()
    torch.export.save(program, held)
    loaded = rapt.load(held.getvalue())
    for _ in range(3):
        tokens = torch.randint(0, 11, (3, 5))
        with torch.no_grad():
            compare(loaded(tokens), model(tokens), wide(exact, tokens), "bags")


def wide(exact, tokens):
    """The model in float64: what it makes in float32, its weights of a sum, are wide too."""
    torch.set_default_dtype(torch.float64)
    try:
        return exact(tokens)
    finally:
        torch.set_default_dtype(torch.float32)


def program_of(overload, *args, **kwargs):
    one = OneNode(overload, args, kwargs)
    return _native.Program.from_json(one.json), one.inputs


def test_vectors_of_singular_values_are_refused_when_they_are_read():
    with pytest.raises(rapt.ProgramError, match="_linalg_svd.*the vectors that the program reads are not"):
        program_of(torch.ops.aten._linalg_svd.default, torch.randn(3, 4))


@pytest.mark.parametrize("overload", ["linalg_svdvals.default", "linalg_norm.default", "nuclear_norm.default"])
def test_singular_values_of_what_is_not_finite(overload):
    """PyTorch raises where there is a NaN, and gives NaN where there is an infinity."""
    name, overload = overload.split(".")
    order = (2,) if name == "linalg_norm" else ()
    program, (x,) = program_of(getattr(getattr(torch.ops.aten, name), overload), torch.randn(2, 3), *order)
    x[1, 2] = float("inf")
    assert to_torch(program.run([x])[0]).isnan().all()
    x[0, 1] = float("nan")
    with pytest.raises(rapt.RaptError, match="NaN has no singular values"):
        program.run([x])


def test_bags_that_torch_refuses_are_refused():
    table, indices, offsets = torch.randn(4, 2), torch.tensor([1, 2, 3, 0]), torch.tensor([0, 1, 3])
    program, _ = program_of(torch.ops.aten.embedding_bag.default, table, indices, offsets)
    for bad in ([1, 2, 3], [0, 3, 2], [0, 3, 5], [-1, 0, 2]):
        with pytest.raises(rapt.RaptError, match="they ascend from 0"):
            program.run([table, indices, torch.tensor(bad)])
    for bad in (4, -1):
        with pytest.raises(rapt.IndexRangeError, match=f"index {bad} "):
            program.run([table, torch.tensor([1, bad, 3, 0]), offsets])
    # Of an end that is not the number of indices, torch's kernels give different results.
    ended, _ = program_of(torch.ops.aten.embedding_bag.default, table, indices, offsets, include_last_offset=True)
    with pytest.raises(rapt.RaptError, match="they ascend from 0"):
        ended.run([table, indices, offsets])


MODELS = {
    Volumes: ((2, 3, 5, 8, 8), (3, 3, 5, 8, 8), ({0: DYNAMIC},), {"max_pool3d", "upsample_trilinear3d", "grid_sampler", "cdist"}),
    # Exports of recurrent layers serve the sizes of the export alone.
    Sequences: ((2, 5, 4), (2, 5, 4), None, {"lstm", "gru", "rnn_tanh"}),
}


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_a_program_without_kernels_gives_what_torch_gives(build, tmp_path):
    exported, other, dynamic, held = MODELS[build]
    torch.manual_seed(0)
    model, path = build().eval().requires_grad_(False), tmp_path / "model.pt2"
    exact = build().eval().double().requires_grad_(False)
    exact.load_state_dict(model.state_dict())
    program = torch.export.export(model, (torch.randn(exported),), dynamic_shapes=dynamic)
    names = {str(node.target).split(".")[1] for node in program.graph.nodes if str(node.target).startswith("aten.")}
    assert held <= names
    torch.export.save(program, path)
    x = torch.randn(other)
    compare(rapt.load(path)(x), model(x), exact(x.double()), build.__name__)


def test_volumes_lie_where_torch_lays_them():
    """Channels-last volumes: strides of results are those that torch's tracer states, or loading fails."""
    x = torch.randn(2, 4, 4, 6, 6).contiguous(memory_format=torch.channels_last_3d)
    weight = torch.randn(4)
    stats = (weight, weight, weight, weight.abs() + 0.5)
    aten = torch.ops.aten
    for overload, args in [
        (aten.cat.default, ([x, x], 1)),
        (aten.group_norm.default, (x, 2, weight, weight)),
        (aten.instance_norm.default, (x, weight, weight, None, None, True, 0.1, 1e-5, False)),
        (aten.batch_norm.default, (x, *stats, False, 0.1, 1e-5, False)),
        (aten.constant_pad_nd.default, (x, [1, 1], 0.0)),
        (aten.reflection_pad3d.default, (x, [1] * 6)),
        (aten.replication_pad3d.default, (x, [1] * 6)),
        (aten.conv3d.default, (x.double(), torch.randn(3, 4, 2, 2, 2, dtype=torch.float64))),
        (aten.max_pool3d.default, (x, [2])),
        (aten.avg_pool3d.default, (x, [2])),
        (aten.upsample_trilinear3d.vec, (x, [3, 3, 3], False, None)),
    ]:
        one = OneNode(overload, args)
        (got,) = _native.Program.from_json(one.json).run(one.inputs)
        wrong = difference(to_torch(got).reshape(got.shape), one.run()[0], one.widened()[0], "ulp")
        assert wrong is None, f"{overload}: {wrong}"
