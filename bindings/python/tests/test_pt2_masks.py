"""Masks of attention: what is proven to be a rule of position is one, what the caller gives is read as it is, and no value of it is
taken for granted."""

import pytest

torch = pytest.importorskip("torch", minversion="2.9")

from pt2_compare import within_rule  # noqa: E402
from test_pt2_plan import loaded, steps  # noqa: E402
from torch.nn import functional  # noqa: E402

BATCH, HEADS, LENGTH, DIM = 3, 2, 7, 8


class Attends(torch.nn.Module):
    """transformers' masks: a rule of positions and the padding of the caller, twice for two layers."""

    def __init__(self, rule, layers=2):
        super().__init__()
        self.rule, self.layers = rule, layers

    def forward(self, x, padding):
        length = x.shape[2]
        rows, columns = torch.arange(length)[None, None, :, None], torch.arange(length)[None, None, None, :]
        mask = rows.new_ones((), dtype=torch.bool) & self.rule(rows, columns)
        mask = mask & padding.to(torch.bool)[torch.arange(x.shape[0])[:, None, None, None], columns]
        mask = mask.expand(x.shape[0], -1, length, length)
        for _ in range(self.layers):
            x = x + functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x


RULES = {
    "": lambda i, j: i >= 0,
    "causal top_left, ": lambda i, j: j <= i,
    "causal top_left, 2 to the left, ": lambda i, j: (j <= i) & (j > i - 3),
    "2 to the left, 1 to the right, ": lambda i, j: (j >= i - 2) & (j <= i + 1),
}
# What is no such rule stays dense.
ODD = {
    "one key of all": lambda i, j: (i != 3) | (j != 2),
    "strided": lambda i, j: (i - j) % 2 == 0,
    "causal but for a key of the last query": lambda i, j: (j <= i) & ((i != LENGTH - 1) | (j != 2)),
    "causal but for a key of the first query": lambda i, j: (j <= i) | ((i == 0) & (j == 3)),
}


def paddings():
    """Padding on either side, none, and masks that are no padding at all."""
    right, left = torch.ones(BATCH, LENGTH, dtype=torch.int64), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    right[1, 4:], left[2, :3] = 0, 0
    return [right, left, torch.ones_like(right), torch.tensor([1, 0, 1, 1, 0, 1, 0]) * torch.tensor([[1], [1], [0]]), left * 7]


def expected(module, x, padding):
    # A query that sees nothing gives 0; PyTorch's kernels give 0 or NaN.
    return torch.nan_to_num(module(x, padding)), torch.nan_to_num(module(x.double(), padding))


def check(model, module, x):
    for padding in paddings():
        peer, exact = expected(module, x, padding)
        kept, text = within_rule(model(x, padding), exact, peer)
        assert kept, f"{padding}: {text}"


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(BATCH, HEADS, LENGTH, DIM)


@pytest.mark.parametrize("name", RULES)
def test_positions_and_padding_are_told_apart(name, x, tmp_path):
    module = Attends(RULES[name])
    model = loaded(module, (x, paddings()[0]), tmp_path, functional_form=True)
    kinds = steps(model)
    (attention,) = (kind for kind in kinds if kind.startswith("attention"))
    assert attention.endswith(f", {name}dense mask") and kinds[attention] == 2
    # The padding is made a boolean and moved to its places; no [batch, 1, q_len, kv_len] is.
    assert "pointwise, fused" not in kinds, kinds
    check(model, module, x)


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_rule_stays_dense(name, x, tmp_path):
    module = Attends(ODD[name])
    model = loaded(module, (x, paddings()[0]), tmp_path)
    (attention,) = (kind for kind in steps(model) if kind.startswith("attention"))
    assert "causal" not in attention and "left" not in attention
    check(model, module, x)


def test_other_sizes_are_proven_anew(x, tmp_path):
    module, any_size = Attends(RULES["causal top_left, "], layers=1), torch.export.Dim.DYNAMIC
    dynamic = {"x": {0: any_size, 2: any_size}, "padding": {0: any_size, 1: any_size}}
    model = loaded(module, (x, paddings()[0]), tmp_path, dynamic=dynamic)
    for batch, length in ((1, 2), (2, 5), (1, 33)):
        wide, padding = torch.randn(batch, HEADS, length, DIM), torch.randint(0, 2, (batch, length))
        peer, exact = expected(module, wide, padding)
        kept, text = within_rule(model(wide, padding), exact, peer)
        assert kept, text


class Reads(torch.nn.Module):
    """The mask, its parts and what they are made of are results too, or are written after they were joined."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes

    def forward(self, x, padding):
        length = x.shape[2]
        seen = (padding * 2 > 1)[:, None, None, :]
        mask = torch.ones(length, length, dtype=torch.bool).tril() & seen
        if self.writes:
            padding.zero_()
            seen.fill_(False)
        out = functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return out, mask, seen


@pytest.mark.parametrize("writes", [False, True])
def test_parts_of_a_mask_that_others_read_or_write(writes, x, tmp_path):
    module = Reads(writes)
    model = loaded(module, (x, paddings()[0]), tmp_path)
    for padding in paddings():
        out, mask, seen = model(x, padding.clone())
        peer, exact = module(x, padding.clone()), module(x.double(), padding.clone())
        kept, text = within_rule(out, torch.nan_to_num(exact[0]), torch.nan_to_num(peer[0]))
        assert kept, text
        assert torch.equal(mask, peer[1]) and torch.equal(seen, peer[2])


class Added(torch.nn.Module):
    """A mask that is added, as PyTorch's decomposition of attention makes it of a boolean."""

    def __init__(self, unseen):
        super().__init__()
        self.unseen = unseen

    def forward(self, x, padding):
        length = x.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool).tril() & padding.bool()[:, None, None, :]
        mask = torch.where(mask, 0.0, self.unseen)
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("unseen", [float("-inf"), -1e9, 0.5])
def test_a_mask_that_is_added_is_a_rule_where_it_adds_nothing_or_infinity(unseen, x, tmp_path):
    module = Added(unseen)
    model = loaded(module, (x, paddings()[0]), tmp_path)
    (attention,) = (kind for kind in steps(model) if kind.startswith("attention"))
    assert ("causal top_left, dense mask" in attention) == (unseen == float("-inf")), attention
    for padding in paddings()[: 3 if unseen == -1e9 else 5]:
        peer, exact = expected(module, x, padding)
        kept, text = within_rule(model(x, padding), exact, peer)
        assert kept, f"{padding}: {text}"


def test_compiled_graphs_have_the_same_masks(x):
    """PyTorch takes attention apart for its own kernel, with a mask that is added."""
    rt = pytest.importorskip("rapt.torch")
    torch._dynamo.reset()
    module = Attends(RULES["causal top_left, "], layers=1)
    with torch.no_grad():
        run = torch.compile(module, backend="rapt", fullgraph=True)
        check(run, module, x)
    kinds = rt.compiled_graphs()[-1]
    assert [kind for kind in kinds if kind.strip().endswith("causal top_left, dense mask")], dict(kinds)
