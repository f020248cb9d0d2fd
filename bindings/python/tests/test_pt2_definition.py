"""Operators without kernels, in programs: volumes, sequences and places, at sizes of their own."""

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
