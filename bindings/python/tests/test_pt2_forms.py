"""Programs as people export them: with gradients on, and run at sizes of 1, where tracing and running lay tensors out in two ways."""

import io

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")

from pt2_compare import same_bits, within_rule  # noqa: E402
from torch.nn import functional  # noqa: E402

DYNAMIC = torch.export.Dim.DYNAMIC


def loaded(program):
    held = io.BytesIO()
    torch.export.save(program, held)
    return rapt.load(held.getvalue())


class Rotary(torch.nn.Module):
    """As transformers has it: angles in float32, without gradients. Its results are an operand, one tensor twice, and a size."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 6, 2) / 6))

    @torch.no_grad()
    def forward(self, x, ids):
        with torch.autocast(device_type="cpu", enabled=False):
            angles = (self.inv_freq[:, None] @ ids[:, None, :].to(self.inv_freq.dtype)).transpose(1, 2)
            cos = torch.cat((angles, angles), -1).cos()
        return cos.to(x.dtype), cos, x, cos


class Rotated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.head = Rotary(), torch.nn.Linear(6, 6)

    def forward(self, x):
        cos, again, same, twice = self.rotary(x, torch.arange(x.shape[1])[None])
        with torch.no_grad():
            x.add_(1)
        return self.head(same * cos) + again + twice, same


def test_regions_without_gradients_and_without_autocasting_are_run():
    torch.manual_seed(1)
    module = Rotated().eval()
    program = torch.export.export(module, (torch.randn(2, 5, 6),), dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"wrap_with_set_grad_enabled"} <= targets, "the program has no region"
    model = loaded(program)
    assert "wrap_with" not in str(model.explain())
    for size in ((2, 5), (3, 8), (1, 1)):
        x = torch.randn(*size, 6)
        ours, theirs, wide = x.clone(), x.clone(), x.double()
        with torch.no_grad():
            got, expected = model(ours), module(theirs)
            exact = Rotated().double().eval()
            exact.load_state_dict(module.state_dict())
            kept, text = within_rule(got[0], exact(wide)[0], expected[0])
        assert kept, text
        assert same_bits(got[1], expected[1]) and same_bits(ours, theirs) and same_bits(got[1], x + 1)


def test_a_region_that_autocasts_is_listed_as_missing():
    class Cast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(3, 3)

        def forward(self, x):
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                return self.head(x)

    program = torch.export.export(Cast().eval(), (torch.ones(2, 3),))
    with pytest.raises(rapt.UnsupportedError, match="wrap_with_autocast"):
        loaded(program)


def test_a_decoder_of_transformers_that_was_exported_with_gradients_on():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
    torch.manual_seed(2)
    config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=32, use_cache=False, **sizes)
    module = transformers.LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(50, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    words = {"input_ids": ids, "attention_mask": mask}
    shapes = dict.fromkeys(words, {0: DYNAMIC, 1: DYNAMIC})
    with torch.enable_grad():
        program = torch.export.export(module, (), words, dynamic_shapes=shapes, strict=False)
    assert any("wrap_with_set_grad_enabled" in str(node.target) for node in program.graph.nodes)
    model = loaded(program)
    for batch, length in ((2, 7), (3, 11), (1, 1)):
        ids = torch.randint(50, (batch, length))
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[-1, : length // 2] = 0
        with torch.no_grad():
            got, expected = model(input_ids=ids, attention_mask=mask), module.float()(input_ids=ids, attention_mask=mask)
            exact = module.double()(input_ids=ids, attention_mask=mask)
        kept, text = within_rule(got["logits"], exact.logits, expected.logits)
        assert kept, text


class Merged(torch.nn.Module):
    """A reshape that copies, and is a view where the batch is 1."""

    def forward(self, x):
        batch, length, width = x.shape
        heads = x.view(batch, length, 2, width // 2).transpose(1, 2)
        return heads.reshape(batch * 2, length, width // 2) * 2, heads.reshape_as(x) + 1, heads.flatten(0, 1)


class Tokens(torch.nn.Module):
    """Tokens as an image, which is channels-last, but row-major too where the batch is 1."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(8, 8, 2, 2), torch.nn.GroupNorm(2, 8)

    def forward(self, x):
        image = x.transpose(1, 2).reshape(x.shape[0], 8, 4, 4)
        pooled = functional.max_pool2d(image, 2), functional.avg_pool2d(image, 2), functional.interpolate(image, scale_factor=2.0)
        return self.conv(image), self.norm(image), *pooled, functional.interpolate(image, (3, 3), mode="bicubic")


@pytest.mark.parametrize("form", ["default", "functional", "core"])
@pytest.mark.parametrize(("module", "shape"), [(Merged(), (5, 6)), (Tokens(), (16, 8))])
def test_sizes_of_one_are_laid_out_as_the_program_says(module, shape, form):
    program = torch.export.export(module.eval(), (torch.randn(2, *shape),), dynamic_shapes=({0: DYNAMIC},))
    program = {"functional": lambda p: p.run_decompositions({}), "core": lambda p: p.run_decompositions()}.get(form, lambda p: p)(program)
    model = loaded(program)
    for batch in (2, 1, 3):
        x = torch.randn(batch, *shape)
        with torch.no_grad():
            expected = module.float()(x)
            exact = module.double()(x.double())
            module.float()
        for ours, theirs, wide in zip(model(x), expected, exact, strict=True):
            assert ours.shape == theirs.shape
            kept, text = within_rule(ours, wide, theirs)
            assert kept, text


def test_attention_whose_mask_needs_a_gradient():
    class Windowed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(2, 5, 5))

        def forward(self, x):
            q = x.view(x.shape[0], 5, 2, 4).transpose(1, 2)
            out = functional.scaled_dot_product_attention(q, q, q, attn_mask=self.bias[None])
            return out.transpose(1, 2).reshape(x.shape[0], 5, 8)

    torch.manual_seed(3)
    module, x = Windowed().eval(), torch.randn(3, 5, 8)
    model = loaded(torch.export.export(module, (x,), dynamic_shapes=({0: DYNAMIC},)))
    with torch.no_grad():
        kept, text = within_rule(model(x), Windowed.forward(module.double(), x.double()), module.float()(x))
    assert kept, text


class Written(torch.nn.Module):
    """Writes through views that begin inside of what they show: as functions, these are copies of views."""

    def forward(self, x):
        y = x * 1
        inner = y[:, 1:]
        inner[0] = 5
        inner[:, ::2].mul_(2)
        inner.t()[1:].add_(1)
        y[1:].diagonal(1).zero_()
        y[2:].select(1, 1).fill_(7)
        return y, inner, y[1:, 2]


@pytest.mark.parametrize("form", ["default", "functional", "core"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_writes_through_views_are_functions_of_the_whole(form, dtype):
    x = torch.arange(20).reshape(4, 5).to(dtype)
    program = torch.export.export(Written(), (x,), dynamic_shapes=({0: DYNAMIC},))
    program = {"functional": lambda p: p.run_decompositions({}), "core": lambda p: p.run_decompositions()}.get(form, lambda p: p)(program)
    model = loaded(program)
    for rows in (4, 9):
        x = torch.arange(rows * 5).reshape(rows, 5).to(dtype)
        for ours, theirs in zip(model(x), Written()(x), strict=True):
            assert same_bits(ours, theirs)


class Attending(torch.nn.Module):
    """Its q, k and v are views of one tensor, which start one behind the other."""

    def __init__(self):
        super().__init__()
        self.attend = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("form", [lambda program: program, lambda program: program.run_decompositions({})], ids=["default", "functional"])
def test_views_of_no_elements_start_anywhere(form):
    module = Attending().eval().requires_grad_(False)
    program = form(torch.export.export(module, (torch.randn(2, 5, 8),), dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},)))
    model = loaded(program)
    for size in ((0, 5), (3, 0), (1, 1), (3, 4)):
        x = torch.randn(*size, 8)
        torch.testing.assert_close(model(x), module(x))


def test_a_result_that_is_no_tensor_and_no_number_is_refused():
    """A text: it was None."""

    class Named(torch.nn.Module):
        def forward(self, x):
            return x + 1, 3, None, 2.5, True, "name"

    with pytest.raises(rapt.RaptError, match='an output is String."name".*which graphs do not have'):
        loaded(torch.export.export(Named(), (torch.zeros(2),)))


@pytest.mark.parametrize("dynamic", [None, {0: DYNAMIC}], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("form", [lambda program: program, lambda program: program.run_decompositions({})], ids=["default", "functional"])
def test_rows_that_were_one_row_at_export(form, dynamic):
    """The example was expanded, as position ids often are: other rows were overwritten by the last one."""

    class Expanded(torch.nn.Module):
        def forward(self, x, ids):
            return x * 2, x.sum(0), x.reshape(-1), x.t(), torch.zeros(3).index_add(0, ids[0], x[1]), ids + 1, x.flip(0)

    examples = torch.arange(3.0).expand(4, 3), torch.arange(3).expand(4, 3)
    module = Expanded().eval()
    program = form(torch.export.export(module, examples, dynamic_shapes=None if dynamic is None else (dynamic, dynamic)))
    model = loaded(program)
    assert [node.meta["val"].stride(0) for node in program.graph.nodes if node.op == "placeholder"] == [0, 0]
    x, ids = torch.arange(12.0).reshape(4, 3), torch.arange(12).reshape(4, 3) % 3
    for given in ((x, ids), (x.t().contiguous().t(), ids), examples, (x, examples[1])):
        for got in (model(*given), model.reference()(*given)):
            for ours, theirs in zip(got, module(*given), strict=True):
                assert torch.equal(ours, theirs)


def test_rows_far_apart_at_export_take_no_memory():
    wide = torch.zeros(3, 1 << 24)[:, :2]
    program = torch.export.export(torch.nn.ReLU(), (wide,))
    model = loaded(program)
    x = torch.tensor([[1.0, -1.0], [2.0, 3.0], [-4.0, 5.0]])
    assert torch.equal(model(x), x.relu()) and torch.equal(model(wide), wide)


# The strides of [rows, 6].
GAPS = {"columns": lambda rows: (12, 2), "a part": lambda rows: (9, 1), "a transposed part": lambda rows: (1, rows + 3)}


def gapped(gaps, rows, dtype):
    return torch.empty_strided((rows, 6), GAPS[gaps](rows), dtype=dtype).copy_(torch.randn(rows, 6) * 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("form", [lambda program: program, lambda program: program.run_decompositions({})], ids=["default", "functional"])
def test_gaps_at_export_are_symbols_that_no_size_has(form, gaps, dtype):
    """The tracer gives the steps of an input with a dynamic size symbols of their own: every call was refused."""

    class Seen(torch.nn.Module):
        def forward(self, x):
            return x.sum(0), x * 2, x.t(), x.reshape(-1), x[1:, ::2] + 1, x.contiguous().view(-1, 2, 3), x.clone(), x.flip(0)

    module = Seen().eval()
    program = form(torch.export.export(module, (gapped(gaps, 4, dtype),), dynamic_shapes={"x": {0: DYNAMIC}}))
    model = loaded(program)
    for x in (*(gapped(other, rows, dtype) for other in GAPS for rows in (4, 7)), torch.ones(3, 6, dtype=dtype)):
        for got in (model(x), model.reference()(x)):
            for ours, theirs in zip(got, module(x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if ours.dim() == 2 else 0.1)


def test_a_size_that_is_no_multiple_is_refused_by_its_place():
    model = loaded(torch.export.export(torch.nn.ReLU(), (torch.zeros(3, 8),), dynamic_shapes=({1: 2 * torch.export.Dim("half", max=40)},)))
    with pytest.raises(rapt.ShapeError, match=r"size 7 in dimension 1, and the program takes 2\*\w+ with a whole number"):
        model(torch.zeros(3, 7))
    assert torch.equal(model(torch.ones(3, 10)), torch.ones(3, 10))


def test_a_text_is_the_one_of_the_export():
    class Gelu(torch.nn.Module):
        def forward(self, x, approximate, *, more=None):
            return functional.gelu(x, approximate=approximate)

    model = loaded(torch.export.export(Gelu(), (torch.ones(3), "tanh"), {"more": "x"}))
    x = torch.randn(3)
    for got in (model(x, "tanh", more="x"), model(x, more="x", approximate="tanh"), model.reference()(x, "tanh", more="x")):
        torch.testing.assert_close(got, functional.gelu(x, approximate="tanh"))
    for wrong in ("none", None, 3, x):
        with pytest.raises(rapt.KindError, match='approximate is .*, the program takes "tanh"'):
            model(x, wrong, more="x")


def test_results_with_names_keep_them():
    class Extremes(torch.nn.Module):
        def forward(self, x):
            return {"max": x.max(1), "sorted": torch.sort(x)}

    model = loaded(torch.export.export(Extremes(), (torch.ones(3, 4),)))
    x = torch.randn(3, 4)
    got = model(x)
    assert type(got["max"]) is torch.return_types.max and type(got["sorted"]) is torch.return_types.sort
    assert torch.equal(got["max"].values, x.max(1).values) and torch.equal(got["sorted"].indices, x.sort().indices)
    assert type(model(x.numpy())["max"]) is torch.return_types.max
