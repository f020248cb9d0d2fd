"""`torch.compile(model, backend="rapt")`: the graphs of torch.compile, run by Rapt, against eager PyTorch and a run in float64.

A value alone would be right with PyTorch doing the work: each test asks the stats who did it.
"""

import contextlib
import os

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")
pytest.importorskip("transformers")

import rapt.torch as rt  # noqa: E402
import zoo  # noqa: E402
from fresh import run as run_fresh  # noqa: E402
from pt2_compare import compare, same_bits, within_rule  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from zoo.record import copied, wide_model, widened  # noqa: E402

# Padding masks, a cache of the caller, experts, convolutions.
SOME = ["minilm_pool", "llama_cache_as_input_mutated", "qwen3_moe", "resnet"]
PROGRAMS = list(zoo.cases()) if os.environ.get("RAPT_WHOLE") == "1" else SOME


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled for another test answers here."""
    torch._dynamo.reset()
    counters.clear()
    rt.reset_stats()


@contextlib.contextmanager
def served(number=1, **fallback):
    """Exactly `number` graphs were run by Rapt inside; `fallback` (underscores for blanks) by PyTorch."""
    rt.reset_stats()
    with torch.no_grad():
        yield
    expected = {reason.replace("_", " "): count for reason, count in fallback.items()}
    assert rt.stats() == {"served": number, "fallback": expected}


def compiled(function, **options):
    return torch.compile(function, backend="rapt", fullgraph=True, **options)


class Block(torch.nn.Module):
    """Attention and an MLP between norms; a buffer, a constant."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(h) * self.gain
        return x + self.down(F.gelu(self.up(x))) * torch.tensor([2.0], dtype=x.dtype)


def block(dtype=torch.float32):
    torch.manual_seed(0)
    return Block().eval().to(dtype)


def check(got, model, *args):
    """`got` by the tolerance rule: against the model in float64, beside PyTorch's own."""
    wide = wide_model(model)
    with torch.no_grad():
        peer, exact = model(*args), wide(*(x.double() for x in args))
    assert got.dtype == peer.dtype and got.shape == peer.shape
    kept, text = within_rule(got, exact, peer)
    assert kept, text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_a_module_gives_what_eager_gives(dtype):
    model, x = block(dtype), torch.randn(2, 5, 16, dtype=dtype)
    with served(2):
        run = compiled(model)
        got = [run(x), run(x)]
    assert same_bits(*got)
    check(got[0], model, x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_zoo_gives_what_eager_gives(name):
    case = zoo.cases()[name]
    model, own, exact_model = case.model(), case.model(), wide_model(case.model())
    run = compiled(model, dynamic=None if case.has_state else True)
    sizes_of = (case.exported, *case.others)
    with served(len(sizes_of)):
        for seed, sizes in enumerate(sizes_of):
            args, kwargs = case.sample(sizes, seed)
            ours, theirs, wide = copied((args, kwargs)), copied((args, kwargs)), widened(copied((args, kwargs)))
            got = run(*ours[0], **ours[1])
            expected, exact = own(*theirs[0], **theirs[1]), exact_model(*wide[0], **wide[1])
            compare(got, expected, exact, f"{name} at {sizes}")
            compare(ours, theirs, wide, f"{name} at {sizes}, inputs")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_are_served(mode):
    model, x = block(), torch.randn(1, 4, 16)
    with served(), mode():
        got = compiled(model)(x)
    check(got.clone(), model, x)


def test_weights_are_read_where_they_lie():
    model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    with served(2):
        run = compiled(model)
        run(x)
        model.weight.zero_()
        assert torch.equal(run(x), model.bias.expand(2, 3))


def test_other_sizes_are_not_compiled_anew():
    model = block()
    run = compiled(model, dynamic=True)
    sizes = [(2, 5), (3, 7), (4, 2), (2, 19), (7, 33)]
    with served(len(sizes)):
        given = [torch.randn(*size, 16) for size in sizes]
        got = [run(x) for x in given]
    assert counters["stats"]["unique_graphs"] == 1
    for x, out in zip(given, got):
        check(out, model, x)


def test_sizes_that_vary_by_themselves_are_compiled_twice():
    run = compiled(lambda x, n: x.sum(1) * n)
    with served(4):
        for n in (3, 4, 5, 6):
            x = torch.randn(2, n)
            assert torch.allclose(run(x, n), x.sum(1) * n)
    assert counters["stats"]["unique_graphs"] == 2


def test_sizes_that_only_some_programs_serve():
    """Tracing found that the sizes fit together: a program is verified at sizes that do, too."""
    run = compiled(lambda x, y: x.reshape(x.shape[0] // 4, 4, -1) @ y[:, : x.shape[1]].T, dynamic=True)
    with served(2):
        for rows, width in ((8, 6), (12, 10)):
            x, y = torch.randn(rows, width), torch.randn(3, width)
            torch.testing.assert_close(run(x, y), x.reshape(rows // 4, 4, -1) @ y.T)


def test_inputs_are_read_as_they_lie():
    whole = torch.randn(6, 8)
    with served(4):
        run = compiled(lambda x: x * 2 + 1)
        for x in (whole[:4, ::2], whole.t()[1:5, :3], whole[2:, 3:7], whole[0].expand(3, 8)):
            torch._dynamo.reset()
            assert torch.equal(run(x), x * 2 + 1)


def test_an_input_that_is_written_is_written_where_it_lies():
    def step(cache, x, position):
        cache.index_copy_(1, position, x)
        return cache[:, :2].sum(1)

    whole, plain = torch.zeros(2, 6, 3), torch.zeros(2, 6, 3)
    cache, expected = whole[:, 1:5], plain[:, 1:5]
    with served(3):
        run = compiled(step)
        version = whole._version
        for n in range(3):
            x, position = torch.randn(2, 1, 3), torch.tensor([n])
            assert torch.equal(run(cache, x, position), step(expected, x, position))
    assert torch.equal(whole, plain)
    assert whole._version > version


def test_results_alias_what_they_alias_in_pytorch():
    def views(x, cache):
        cache.add_(1)
        y = x * 2
        return x, x.t(), x[1:], cache, cache[:, ::2], y, y.t(), y[1:, 1:]

    def run(function):
        x, cache = torch.arange(12.0).reshape(3, 4), torch.zeros(2, 4)
        out = function(x, cache)
        for tensor in (x, cache, out[5]):
            tensor.add_(100)
        return out, x, cache

    with served():
        got, x, cache = run(compiled(views))
    expected, *_ = run(views)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert got[0] is x and got[3] is cache and got[7]._base is not None


def test_a_view_of_a_dynamic_size_is_a_view():
    def views(x):
        y = x + 1
        return y, y[:, 1:].t()

    with served(2):
        run = compiled(views, dynamic=True)
        for n in (5, 9):
            y, view = run(torch.randn(4, n))
            y.zero_()
            assert view.shape == (n - 1, 4) and view.stride() == (1, n) and not view.any()


def test_results_that_are_no_tensors():
    with served():
        got = compiled(lambda x: (x.shape[0] * 2, None, x.sum(), 3.5, "text", torch.tensor([1, 2])), dynamic=True)(torch.ones(3, 2))
    assert got[:2] == (6, None) and got[2].item() == 6.0 and got[3:5] == (3.5, "text") and got[5].tolist() == [1, 2]


def test_what_lies_between_graph_breaks():
    def broken(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    with served(2):
        assert torch.equal(torch.compile(broken, backend="rapt")(torch.ones(3)), torch.full((3,), 3.0))


def test_operators_that_pytorch_takes_apart_are_served():
    def function(x):
        return F.hardswish(torch.addcmul(x, x, x)) + F.softplus(x)

    x = torch.randn(64)
    with served():
        got = compiled(function)(x)
    assert within_rule(got, function(x.double()), function(x))[0]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_layer_that_pytorch_fuses_is_taken_apart(activation, norm_first):
    torch.manual_seed(4)
    words = {"activation": activation, "norm_first": norm_first, "batch_first": True}
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, **words).eval()
    model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16)
    with served():
        got = compiled(model)(x)
    check(got, model, x)


def masks(dtype=torch.float32):
    """What `nn.TransformerEncoder` takes of a batch of 3 and 5 positions, by name."""
    padding = torch.arange(5) >= torch.tensor([5, 3, 1])[:, None]
    later = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=dtype)
    # Each query attends to the first key at least.
    some = (torch.arange(25).reshape(5, 5) * 7 % 11) < 4
    some[:, 0] = False
    additive = torch.zeros(3, 5, dtype=dtype).masked_fill(padding, -torch.inf)
    return {
        "padding": {"src_key_padding_mask": padding},
        "additive padding": {"src_key_padding_mask": additive},
        "later": {"mask": later},
        "causal": {"mask": later, "is_causal": True},
        "boolean": {"mask": some},
        "of each head": {"mask": torch.stack([some.roll(n, 0) for n in range(6)])},
        "both": {"mask": some, "src_key_padding_mask": padding},
        "both additive": {"mask": later, "src_key_padding_mask": additive},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kind", masks())
def test_masks_of_an_encoder_are_served(kind, dtype):
    torch.manual_seed(5)
    given = masks(dtype)[kind]
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dtype=dtype).eval()
    model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(3, 5, 16, dtype=dtype)
    with served():
        got = compiled(model)(x, **given)
    with torch.no_grad():
        wide = {name: mask.double() if isinstance(mask, torch.Tensor) and mask.is_floating_point() else mask for name, mask in given.items()}
        kept, text = within_rule(got, wide_model(model)(x.double(), **wide), model(x, **given))
    assert kept and not got.isnan().any(), text


def test_masks_of_an_encoder_mean_what_pytorchs_kernel_takes_them_for():
    """NaN for a query whose keys are all masked; of numbers, each that is not 0 masks."""
    torch.manual_seed(6)
    model = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [True] * 5])
    numbers = torch.zeros(5, 5)
    numbers[0, 1], numbers[2] = 0.5, -3.0
    run = compiled(model)
    with served(2):
        for given in ({"src_key_padding_mask": padding}, {"src_mask": numbers}):
            got, expected = run(x, **given), model(x, **given)
            assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().any() and not got.isnan().all()
            torch.testing.assert_close(got, expected, equal_nan=True)


def test_masks_of_an_encoder_at_other_sizes():
    torch.manual_seed(7)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    run = compiled(model, dynamic=True)
    with served(3):
        for batch, length in ((3, 5), (2, 9), (4, 6)):
            x, padding = torch.randn(batch, length, 16), torch.arange(length) >= torch.arange(1, batch + 1)[:, None]
            later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
            torch.testing.assert_close(run(x, later, padding), model(x, later, padding))
    assert counters["stats"]["unique_graphs"] == 1


def test_attention_is_served_while_rapt_is_registered():
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    mask = torch.randn(6, 6) > 0

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)

    with rt.backend(), served():
        got = compiled(attend)(q, k, v)
    torch.testing.assert_close(got, attend(q, k, v))


# Refusals


def refusal(kind, function, *args, match, **options):
    """Each call is refused, with the error itself and not one around it."""
    run = torch.compile(function, backend="rapt", **options)
    for _ in range(2):
        with pytest.raises(kind, match=match) as error:
            run(*args)
        assert type(error.value) is kind
    assert rt.stats() == {"served": 0, "fallback": {}}


def rare(x):
    return torch.linalg.eigvalsh(x).sum() + torch.linalg.qr(x).R.sum() + torch.linalg.eigvalsh(x * 2).sum() + F.hardswish(x).sum()


@torch.no_grad()
def test_operators_that_are_missing_are_all_listed():
    words = r"2 operators are not served: torch\.ops\.aten\._linalg_eigh\.default \(2.*aten\.linalg_qr\.default \(1, [^,]*$"
    refusal(rapt.UnsupportedError, rare, torch.eye(3), match=words)


def test_training_is_refused():
    model = torch.nn.Linear(3, 2)
    words = r"parameters_weight, .*parameters_bias requires grad.*with torch\.no_grad\(\)"
    refusal(rapt.UnsupportedError, model, torch.ones(1, 3), match=words)
    with served():
        compiled(model)(torch.ones(1, 3))


@torch.no_grad()
def test_dtypes_that_programs_may_not_have_are_refused():
    x = torch.ones(3, dtype=torch.complex64)
    refusal(rapt.UnsupportedDtypeError, lambda x: x + x, x, match="has dtype complex64, which programs may not have")


@torch.no_grad()
def test_another_device_is_refused():
    refusal(rapt.DeviceError, lambda x: x + 1, torch.ones(3, device="meta"), match=r"x is on meta.*`model\.cpu\(\)`")


@torch.no_grad()
@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"options": {"fallback": "inductor"}}, "'fallback': 'inductor'"),
        ({"options": {"threads": 4}}, "'threads': 4"),
        ({"mode": "reduce-overhead"}, "reduce-overhead"),
    ],
)
def test_options_are_read_strictly(words, match):
    refusal(rapt.OptionError, lambda x: x + 1, torch.ones(3), match=match, **words)


@torch.no_grad()
def test_what_only_values_show_is_refused_and_nothing_is_written():
    def step(cache, index):
        cache.add_(1)
        return torch.nn.functional.embedding(index, cache)

    run, cache = compiled(step), torch.zeros(3, 2)
    run(cache, torch.tensor([0, 2]))
    with pytest.raises(rapt.RaptError, match="7"):
        run(cache, torch.tensor([0, 7]))
    assert cache.tolist() == [[1, 1]] * 3
    run(cache, torch.tensor([1, 1]))
    assert rt.stats()["served"] == 2


# Fallback


EAGER = {"options": {"fallback": "eager"}}


def test_fallback_runs_pytorch_and_is_counted():
    x = torch.eye(3)
    with served(0, **{"compiled_graph:_UnsupportedError": 2}):
        run = compiled(rare, **EAGER)
        assert torch.equal(run(x), rare(x)) and torch.equal(run(x), rare(x))
    with served():
        assert torch.equal(compiled(lambda x: x * 2, **EAGER)(x), x * 2)


def test_fallback_trains():
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    compiled(model, **EAGER)(x).sum().backward()
    assert torch.allclose(model.bias.grad, torch.full((2,), 4.0))
    assert rt.stats() == {"served": 0, "fallback": {"requires grad": 1}}


def test_a_call_that_rapt_refuses_falls_back_too():
    table = torch.ones(3, 2)
    with served(1, **{"compiled_graph:_IndexRangeError": 1}):
        run = compiled(lambda index: F.embedding(index, table), **EAGER)
        run(torch.tensor([0, 2]))
        with pytest.raises(IndexError):
            run(torch.tensor([0, 7]))


REGISTERED = """
import sys
import torch
assert "rapt" not in sys.modules
import torch._dynamo
assert "rapt" in torch._dynamo.list_backends()
with torch.no_grad():
    out = torch.compile(lambda x: x * 2, backend="rapt")(torch.ones(3))
import rapt.torch
print(out.tolist(), rapt.torch.stats()["served"])
"""


def test_torch_finds_the_backend_by_itself():
    done = run_fresh(REGISTERED)
    assert done.stdout.split("\n")[0] == "[2.0, 2.0, 2.0] 1", done.stderr
