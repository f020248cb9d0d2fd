"""How programs run: what is fused, packed and recognised, and that none of it changes a result or outlasts a refusal."""

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")

from pt2_compare import same_bits, within_rule  # noqa: E402
from torch.nn import functional  # noqa: E402


def loaded(module, args, tmp_path, functional_form=False, dynamic=None):
    program = torch.export.export(module.eval(), args, dynamic_shapes=dynamic)
    if functional_form:
        program = program.run_decompositions({})
    path = tmp_path / "program.pt2"
    torch.export.save(program, path)
    return rapt.load(path)


def steps(model):
    """The steps of the plan at the sizes of the export: name and how often."""
    rows = [line.rstrip() for line in str(model.explain()).splitlines()]
    start = next(i for i, row in enumerate(rows) if row.startswith("steps"))
    found = {}
    for row in rows[start + 1 :]:
        if not row.startswith("  "):
            break
        name, count = row.strip().rsplit(maxsplit=1)
        found[name.strip()] = int(count)
    return found


def by_definition(model):
    return {name: count for name, count in steps(model).items() if name.startswith("by definition")}


class Mlp(torch.nn.Module):
    """A feed-forward block with a residual: everything after each product is elementwise."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(48, 130), torch.nn.Linear(130, 48)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_follows_a_product_runs_on_its_tiles(dtype, tmp_path):
    torch.manual_seed(1)
    module = Mlp().to(dtype)
    x = torch.randn(3, 7, 48, dtype=dtype)
    model = loaded(module, (x,), tmp_path)
    assert steps(model) == {"product, packed weights, with what follows": 2}
    with torch.no_grad():
        exact = Mlp().double()
        exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
        kept, text = within_rule(model(x), exact(x.double()), module(x))
    assert kept, text


def test_gates_of_two_products_are_fused_into_the_second(tmp_path):
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = torch.nn.Linear(32, 300, bias=False), torch.nn.Linear(32, 300, bias=False)

        def forward(self, x):
            return functional.silu(self.gate(x)) * self.up(x)

    torch.manual_seed(2)
    module, x = Gated(), torch.randn(5, 32)
    model = loaded(module, (x,), tmp_path)
    assert steps(model) == {"product, packed weights, with what follows": 2}
    with torch.no_grad():
        kept, text = within_rule(model(x), module.double()(x.double()), module.float()(x))
    assert kept, text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_node_of_a_chain_is_rounded_to_its_dtype(dtype, tmp_path):
    class Chain(torch.nn.Module):
        def forward(self, x, y):
            return ((x * y + x) / (y.abs() + 1.5) - 0.1).clamp(-3, 3)

    torch.manual_seed(3)
    x, y = torch.randn(4, 333).to(dtype), torch.randn(4, 333).to(dtype)
    model = loaded(Chain(), (x, y), tmp_path)
    assert steps(model) == {"pointwise, fused": 1}
    assert same_bits(model(x, y), Chain()(x, y))


class Attend(torch.nn.Module):
    """Grouped heads as transformers repeats them, under a mask made of positions."""

    def forward(self, q, k, v):
        def repeated(x):
            batch, heads, length, dim = x.shape
            return x[:, :, None].expand(batch, heads, 3, length, dim).reshape(batch, heads * 3, length, dim)

        rows = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
        mask = (torch.arange(k.shape[2])[None, :] <= rows)[None, None]
        return functional.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)


@pytest.mark.parametrize(("q_len", "kv_len", "causal"), [(9, 9, "top_left"), (5, 12, "bottom_right")])
def test_repeated_heads_and_causal_masks_are_recognised(q_len, kv_len, causal, tmp_path):
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 6, q_len, 16), torch.randn(2, 2, kv_len, 16), torch.randn(2, 2, kv_len, 16)
    model = loaded(Attend(), (q, k, v), tmp_path)
    names = list(steps(model))
    assert len(names) == 1 and names[0].startswith("attention") and f"causal {causal}, grouped" in names[0], names
    kept, text = within_rule(model(q, k, v), Attend()(q.double(), k.double(), v.double()), Attend()(q, k, v))
    assert kept, text


def test_a_mask_of_the_caller_stays_dense(tmp_path):
    class Masked(torch.nn.Module):
        def forward(self, q, mask):
            return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])

    torch.manual_seed(5)
    q, mask = torch.randn(2, 3, 6, 8), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0]]).bool()
    model = loaded(Masked(), (q, mask), tmp_path)
    assert any("dense mask" in name for name in steps(model))
    kept, text = within_rule(model(q, mask), Masked()(q.double(), mask), Masked()(q, mask))
    assert kept, text


class Caches(torch.nn.Module):
    """Two caches written at one index each, the second by another index: it may be out of range when the first is written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(4, 3))
        self.register_buffer("second", torch.zeros(4, 3))

    def forward(self, x, at, later):
        self.first.index_copy_(0, at, x)
        self.second.index_copy_(0, later, x * 2)
        return self.first + self.second


@pytest.mark.parametrize("functional_form", [False, True])
def test_a_run_that_fails_midway_leaves_every_cache_as_it_was(functional_form, tmp_path):
    x, one = torch.randn(1, 3), torch.tensor([1])
    model = loaded(Caches(), (x, one, one + 1), tmp_path, functional_form)
    session, peer = model.session(), Caches()
    assert torch.equal(session(x, one, torch.tensor([2])), peer(x, one, torch.tensor([2])))
    with pytest.raises(rapt.RaptError, match="index"):
        session(torch.randn(1, 3), torch.tensor([3]), torch.tensor([4]))
    assert torch.equal(session(x * 5, one, torch.tensor([0])), peer(x * 5, one, torch.tensor([0])))


def test_a_cache_that_comes_back_as_a_buffer_is_written_in_place(tmp_path):
    x, one = torch.randn(1, 3), torch.tensor([1])
    model = loaded(Caches(), (x, one, one + 1), tmp_path, functional_form=True)
    assert steps(model) == {"moved by index": 2, "pointwise or copy": 2}


def test_writes_are_seen_in_the_order_of_the_program(tmp_path):
    class Overlapping(torch.nn.Module):
        def forward(self, x, y):
            z = x * 2
            before = z + 1
            z[1:].copy_(z[:-1].clone())
            z.mul_(y)
            z[:, 0].add_(1)
            return before, z, z.t().contiguous() + before.t()

    torch.manual_seed(6)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    model = loaded(Overlapping(), (x, y), tmp_path)
    for ours, theirs in zip(model(x, y), Overlapping()(x, y), strict=True):
        assert same_bits(ours, theirs)


def test_pieces_are_stored_side_by_side(tmp_path):
    class Rotated(torch.nn.Module):
        def forward(self, x, cos, sin):
            half = x.shape[-1] // 2
            return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    torch.manual_seed(7)
    x, angle = torch.randn(2, 3, 5, 16), torch.randn(5, 16)
    model = loaded(Rotated(), (x, angle.cos(), angle.sin()), tmp_path)
    assert not by_definition(model)
    assert same_bits(model(x, angle.cos(), angle.sin()), Rotated()(x, angle.cos(), angle.sin()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("groups", "stride", "padding", "dilation"), [(1, 1, 1, 1), (2, 2, 0, 1), (1, 3, 2, 2), (4, 1, 1, 1)])
def test_convolutions_are_products(dtype, groups, stride, padding, dilation, tmp_path):
    torch.manual_seed(8)
    module = torch.nn.Conv2d(4, 8, 3, stride, padding, dilation, groups).to(dtype)
    for x in (torch.randn(2, 4, 11, 9), torch.randn(2, 4, 11, 9).to(memory_format=torch.channels_last)):
        x = x.to(dtype)
        model = loaded(module, (x,), tmp_path)
        # As many groups as channels are no products.
        assert list(steps(model)) == ["convolution by channel" if groups == 4 else "convolution, packed weights"]
        exact = torch.nn.Conv2d(4, 8, 3, stride, padding, dilation, groups).double()
        exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
        with torch.no_grad():
            kept, text = within_rule(model(x), exact(x.double()), module(x))
        assert kept, text


def test_inputs_of_other_strides_are_read_as_they_lie(tmp_path):
    torch.manual_seed(9)
    module, x = Mlp(), torch.randn(3, 7, 48)
    model = loaded(module, (x,), tmp_path)
    expected = model(x)
    wide = torch.randn(3, 7, 96)
    wide[..., ::2] = x
    for view in (x.transpose(0, 1).contiguous().transpose(0, 1), wide[..., ::2]):
        assert torch.equal(model(view), expected)


def test_an_input_that_is_written_shares_no_memory_with_one_that_is_read(tmp_path):
    """PyTorch would read what it has just written there, which the program that was exported does not say."""

    class Written(torch.nn.Module):
        def forward(self, x, y):
            x.add_(1)
            return y * 2

    x = torch.arange(6.0)
    model = loaded(Written(), (x.clone(), x.clone()), tmp_path)
    y = x.clone()
    with pytest.raises(rapt.LayoutError, match="x is written, and shares memory with y"):
        model(x, x)
    assert torch.equal(x, y), "a refused call has written nothing"
    assert torch.equal(model(x, y), y * 2)
    assert torch.equal(x, y + 1)


def check(module, args, tmp_path, **options):
    """The module's results bit for bit, from its exported program."""
    expected = module(*[x.clone() for x in args])
    got = loaded(module, args, tmp_path, **options)(*args)
    for ours, theirs in zip([got] if torch.is_tensor(got) else got, [expected] if torch.is_tensor(expected) else expected, strict=True):
        assert same_bits(ours, theirs)


def test_a_tensor_beside_a_part_of_itself(tmp_path):
    class Beside(torch.nn.Module):
        def forward(self, x):
            y = x * 2 + 1
            return torch.cat((y, y[..., :1], y), dim=-1)

    check(Beside(), (torch.randn(3, 5),), tmp_path)


def test_a_division_by_zero_after_a_product_is_refused(tmp_path):
    class Divided(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 6)

        def forward(self, x, y):
            return self.linear(x).to(torch.int64) // y

    x, y = torch.randn(3, 4) * 10, torch.ones(3, 6, dtype=torch.int64)
    model = loaded(Divided(), (x, y), tmp_path)
    assert model(x, y).shape == (3, 6)
    with pytest.raises(rapt.RaptError, match="zero"):
        model(x, y * 0)


@pytest.mark.parametrize("mask", [[[True, False, False, False]], [[False], [False], [True]]])
def test_a_mask_that_is_broadcast_is_no_triangle(mask, tmp_path):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor(mask)[None, None])

        def forward(self, q, k):
            return functional.scaled_dot_product_attention(q, k, k, attn_mask=self.mask & True)

    torch.manual_seed(10)
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 4, 8)
    model = loaded(Masked(), (q, k), tmp_path)
    assert any("dense mask" in name for name in steps(model)), steps(model)
    kept, text = within_rule(model(q, k), Masked()(q.double(), k.double()), Masked()(q, k))
    assert kept, text


def test_repeated_heads_are_those_before_a_later_write(tmp_path):
    class Later(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.randn(1, 2, 5, 8))

        def forward(self, q):
            batch, heads, length, dim = self.cache.shape
            k = self.cache[:, :, None].expand(batch, heads, 3, length, dim).reshape(batch, heads * 3, length, dim)
            self.cache.mul_(2)
            return functional.scaled_dot_product_attention(q, k, k)

    torch.manual_seed(11)
    module, q = Later(), torch.randn(1, 6, 4, 8)
    model = loaded(module, (q,), tmp_path)
    expected = functional.scaled_dot_product_attention(*[x.double() for x in (q, *[module.cache.repeat_interleave(3, 1)] * 2)])
    got = model.session()(q)
    assert torch.allclose(got.double(), expected, atol=1e-6)


class Rows(torch.nn.Module):
    """Reads and writes rows by index, by each operator that has a kernel."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.arange(8.0).reshape(4, 2))

    def forward(self, index):
        return self.function(self.table, index)


@pytest.mark.parametrize(
    "function",
    [
        lambda table, index: functional.embedding(index, table),
        lambda table, index: table.index_select(0, index),
        lambda table, index: table.index_copy(0, index, torch.ones(2, 2)),
        lambda table, index: table.gather(0, index[:, None]),
    ],
    ids=["embedding", "index_select", "index_copy", "gather"],
)
def test_an_index_below_zero_counts_from_the_end_only_where_torch_says_so(function, tmp_path):
    module, good = Rows(function), torch.tensor([3, 0])
    model = loaded(module, (good,), tmp_path)
    for bad in (4, -1, -4, 2**62, -(2**63)):
        with pytest.raises(rapt.IndexRangeError, match=f"node .*: index {bad} is out of bounds for dimension 0 of size 4") as error:
            model(torch.tensor([1, bad]))
        assert isinstance(error.value, IndexError)
    assert torch.equal(model(good), module(good))
    model = loaded(Rows(lambda table, index: table[index]), (good,), tmp_path)
    assert model(torch.tensor([-1, -4])).tolist() == [[6, 7], [0, 1]]
    with pytest.raises(rapt.IndexRangeError, match="index -5"):
        model(torch.tensor([0, -5]))


@pytest.mark.parametrize("functional_form", [False, True])
def test_a_cache_that_is_written_from_itself(functional_form, tmp_path):
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.arange(10.0).reshape(5, 2))

        def forward(self, index):
            # A copy first where the operator is in place: torch leaves open what a write from itself reads.
            rows = self.cache[:4] if functional_form else self.cache[:4].clone()
            self.cache.index_copy_(0, index, rows)
            return self.cache.sum(0)

    index = torch.arange(1, 5)
    session = loaded(Shifted(), (index,), tmp_path, functional_form).session()
    rows = Shifted().cache
    for _ in range(3):
        rows = torch.cat((rows[:1], rows[:4]))
        assert torch.equal(session(index), rows.sum(0))


@pytest.mark.parametrize(
    "joined",
    [
        lambda y, z: torch.cat((y, z, z)),
        lambda y, z: torch.cat((y, z.t())),
        lambda y, z: torch.cat((z.t(), y, z[:1])),
        lambda y, z: torch.cat((y, z[1:], z[:1])),
    ],
)
def test_what_is_made_together_is_stored_though_only_one_of_both_goes_to_its_part(joined, tmp_path):
    class Joined(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            return joined(y, y + 1)

    check(Joined(), (torch.randn(4, 4),), tmp_path)


@pytest.mark.parametrize("write", ["index_copy_", "index_put_", "index_put_ of two"])
def test_rows_that_were_written_are_put_back_where_a_later_index_is_out_of_range(write, tmp_path):
    class Caches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", torch.arange(24.0).reshape(2, 6, 2))
            self.register_buffer("values", torch.arange(24.0, 48.0).reshape(2, 6, 2))

        def forward(self, rows, first, second):
            for cache, index in ((self.keys, first), (self.values, second)):
                if write == "index_copy_":
                    cache.index_copy_(1, index, rows)
                elif write == "index_put_":
                    cache[:, index] = rows
                else:
                    cache[index % 2, index] = rows[0]
            return self.keys.sum() + self.values.sum(), self.keys.clone(), self.values.clone()

    module, rows = Caches(), -torch.ones(2, 3, 2)
    first = torch.tensor([4, 0, 2])
    session = loaded(module, (rows, first, first + 1), tmp_path).session()
    # Once with a row that is written twice.
    for good, bad in ((first, torch.tensor([1, 6, 2])), (torch.tensor([3, 3, 5]), torch.tensor([0, 1, 2**40]))):
        with pytest.raises(rapt.IndexRangeError):
            session(rows * 7, good, bad)
        with pytest.raises(rapt.IndexRangeError):
            session(rows * 7, bad, good)
    # Only row 1 is written, so that every row above is looked at.
    one = torch.ones(3, dtype=torch.int64)
    expected, got = module(rows, one, one), session(rows, one, one)
    assert all(torch.equal(x, y) for x, y in zip(expected, got))
