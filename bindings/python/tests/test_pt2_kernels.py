"""Operators that run by kernels of their own: no step of such programs is evaluated by definition."""

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")

from pt2_compare import difference, same_bits  # noqa: E402
from test_pt2_plan import by_definition, loaded, steps  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402


class Stages(nn.Module):
    """A ResNet's: strided convolutions with batch norm, the largest of windows, and the mean of all positions."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.head = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 5)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        x = functional.relu(self.norm(self.stem(x)))
        x = functional.max_pool2d(x, 3, 2, 1)
        x = x + self.depthwise(x)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1)), x.mean((2, 3)), functional.adaptive_avg_pool2d(x, 3)


class Levels(nn.Module):
    """A UNet's: norms of groups, means of windows, and back up by a transposed convolution and by interpolation."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 6, 3, 2, 1, 1)

    def forward(self, x):
        y = functional.avg_pool2d(functional.silu(self.norm(x)), 2)
        nearest = functional.interpolate(y, scale_factor=2.0)
        return self.up(y), torch.cat((nearest, functional.interpolate(y, x.shape[2:], mode="bilinear")), 1)


class Decoder(nn.Module):
    """Whisper's and T5's: positions and segments of a mask, softmax in float32, a place by its token, rows that lie apart."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)

    def forward(self, x, mask, ids):
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        segments = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        scores = functional.softmax(x.transpose(1, 2), dim=1, dtype=torch.float64).to(x.dtype)
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        last = x[torch.arange(x.shape[0]), ids.argmax(-1)]
        return segments, self.norm(x.transpose(1, 2)), scores, functional.normalize(pooled, dim=-1), last, mask.all(), x.amax((0, 1))


class Experts(nn.Module):
    """The routing of a mixture: the best of all experts, rows by expert, and how many each has."""

    def forward(self, x, logits):
        weights, experts = torch.topk(functional.softmax(logits, -1), 2)
        flat, order = torch.sort(experts.flatten(), stable=True)
        counts = torch.histc(flat.float(), bins=logits.shape[-1], min=0, max=logits.shape[-1] - 1)
        kept = torch.zeros_like(logits).scatter_(1, experts, 1.0)
        taken = logits.gather(1, experts) * kept.sum(-1, keepdim=True)
        mixed = torch.zeros_like(x).scatter_add(0, (order // 2)[:, None].expand(-1, x.shape[1]), x[order // 2])
        return weights, flat, order, counts.cumsum(0), taken, mixed


class Arranged(nn.Module):
    """What moves elements alone."""

    def forward(self, x, mask):
        y = x.clone()
        y[mask] = 0
        parts = torch.stack((x, y), 1), x.roll((1, -2), (0, 1)), x.flip(1), x.tril(1), x.repeat(2, 3)
        return *parts, torch.full_like(x, 2.5) + x, x.slice_scatter(y[:, 1:3], 1, 0, 4, 2), x.select_scatter(y[0], 0, 1)


class Activations(nn.Module):
    """Formulas of pointwise functions, each one loop: in float32, and in bfloat16 rounded once."""

    def __init__(self):
        super().__init__()
        self.prelu = nn.PReLU(4)

    def forward(self, x, w):
        y = functional.hardswish(x) + functional.hardsigmoid(x) * functional.relu6(x, inplace=False)
        z = functional.elu(x) + functional.selu(x) + functional.celu(x, 1.3) + functional.leaky_relu(x, 0.2)
        soft = functional.softplus(x, 2.0) + functional.mish(x) + functional.logsigmoid(x) + functional.softshrink(x)
        mixed = torch.lerp(x, w, 0.3) + torch.addcmul(x, w, w, value=0.5) + torch.addcdiv(x, w, w.abs() + 1)
        angles = torch.atan2(x, w) + torch.asinh(x) + torch.erfc(w)
        half = functional.hardswish(x.to(torch.bfloat16)), functional.glu(w.to(torch.float16), 1)
        return y, z, soft, mixed, angles, *half, self.prelu(x), functional.glu(x, -1), torch.logaddexp(x, w), torch.frac(x)


class Edges(nn.Module):
    """Padding, and copies of views."""

    def forward(self, x, y):
        pads = [functional.pad(x, (1, 2, 2, 1), mode) for mode in ("constant", "reflect", "replicate")]
        cut = functional.pad(x, (-1, 1), value=3.0), functional.pad(y, (2, 1), "reflect"), functional.pad(y, (2, 1), "circular")
        shuffled = functional.pixel_shuffle(x, 2), functional.pixel_unshuffle(x, 2), functional.channel_shuffle(x, 2)
        lines = functional.max_pool1d(y, 3, 2, 1), functional.avg_pool1d(y, 2), functional.adaptive_avg_pool1d(y, 3)
        more = x.repeat_interleave(2, 1), x.tile(2, 1), x.rot90(1, (2, 3)), functional.instance_norm(x)
        return *pads, *cut, *shuffled, *lines, *more


class Added(nn.Module):
    """Products with factors, and of batches, to which something is added: biases of positions, masks."""

    def forward(self, x, a, b):
        factors = torch.baddbmm(x, a, b, beta=0.5, alpha=0.25), torch.addmm(x[0], a[0], b[0], beta=2, alpha=-3)
        turned = torch.baddbmm(x[:, :1], b.transpose(1, 2), a.transpose(1, 2)[:, :, :5])
        half = [torch.baddbmm(*(y.to(dtype) for y in (x, a, b)), alpha=0.3) for dtype in (torch.bfloat16, torch.float16)]
        return *factors, turned, torch.baddbmm(x / 0, a, b, beta=0), torch.baddbmm(x, a[:, :, :0], b[:, :0]), *half


class Contracted(nn.Module):
    """Sums of products by name: SAM's relative positions, attention by hand, an outer product, a diagonal, a size of 1."""

    def forward(self, q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores, v)
        rows = torch.einsum("bhwc,hkc->bhwk", q, k[0, :, :3].transpose(0, 1)[:, :, :].repeat(2, 1, 1)[:5])
        outer = torch.einsum("i,j->ij", q[0, 0, 0], v[0, 0, 0]), torch.einsum("...i,ij->j...", q, v[0, 0, :, :3][:3].T.repeat(2, 1)[:4])
        half = torch.einsum("bqhd,bkhd->qkbh", q.to(torch.bfloat16), k.to(torch.bfloat16))
        return scores, mixed, rows, *outer, torch.einsum("iij,jk->ik", scores[0, :, :3], v[0, :, 0, :]), half


def arguments(module, seed=20):
    """The module, and arguments that it takes."""
    torch.manual_seed(seed)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    return {
        Stages: lambda: (torch.randn(2, 3, 23, 30),),
        Levels: lambda: (torch.randn(2, 4, 6, 10),),
        Decoder: lambda: (torch.randn(2, 5, 6), mask, torch.randint(9, (2, 5))),
        Experts: lambda: (torch.randn(7, 4), torch.randn(7, 5)),
        Activations: lambda: (torch.randn(2, 4, 6) * 3, torch.randn(2, 4, 6)),
        Added: lambda: (torch.randn(3, 5, 5), torch.randn(3, 5, 7), torch.randn(3, 7, 5)),
        Contracted: lambda: (torch.randn(2, 5, 3, 4), torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 4)),
        Edges: lambda: (torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9)),
        Arranged: lambda: (torch.randn(4, 5), torch.tensor([True, False, True, False])),
    }[module]()


def wide(x):
    return x.double() if x.dtype.is_floating_point else x


@pytest.mark.parametrize("functional_form", [False, True])
@pytest.mark.parametrize("shape", [Stages, Levels, Decoder, Experts, Arranged, Activations, Edges, Added, Contracted])
def test_no_step_is_evaluated_by_definition(shape, functional_form, tmp_path):
    args = arguments(shape)
    module = shape().eval()
    model = loaded(module, args, tmp_path, functional_form)
    assert not by_definition(model), steps(model)
    with torch.no_grad():
        expected, got = module(*args), model(*args)
        exact = module.double()(*map(wide, args))
    for ours, theirs, ideal in zip(got, expected, exact, strict=True):
        wrong = difference(ours, theirs, ideal if theirs.dtype.is_floating_point else None, "ulp")
        assert not wrong, wrong


def test_images_that_lie_channels_last(tmp_path):
    for shape in (Stages, Levels):
        module, (x,) = shape().eval(), arguments(shape)
        x = x.to(memory_format=torch.channels_last)
        model = loaded(module, (x,), tmp_path)
        assert not by_definition(model), steps(model)
        with torch.no_grad():
            for ours, theirs, ideal in zip(model(x), module(x), module.double()(x.double()), strict=True):
                wrong = difference(ours, theirs, ideal, "ulp")
                assert not wrong, wrong


def test_an_index_out_of_range_names_itself_and_writes_nothing(tmp_path):
    class Written(nn.Module):
        def forward(self, x, index):
            return x.scatter_(1, index, 0.0)

    x = torch.arange(6.0).reshape(2, 3)
    model = loaded(Written(), (x.clone(), torch.tensor([[0], [2]])), tmp_path)
    with pytest.raises(rapt.RaptError, match=r"scatter_.*index 3 is out of bounds for dimension 1 of size 3"):
        model(x, torch.tensor([[0], [3]]))
    assert torch.equal(x, torch.arange(6.0).reshape(2, 3))
    assert same_bits(model(x, torch.tensor([[0], [2]])), torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]))
