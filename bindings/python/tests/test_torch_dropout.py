"""Dropout: which weights are dropped is docs/reference/definition.md's to say, of two numbers of PyTorch's generator."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from rapt.torch._dropout import draw  # noqa: E402
from test_torch_stats import DTYPES, sdpa, served, stock, tensor  # noqa: E402

LOW = np.uint64(0xFFFF_FFFF)


def philox(counter, key):
    """Philox 4x32-10 on arrays of words."""
    c = [np.asarray(word, np.uint64) for word in counter]
    key = [np.uint64(word) for word in key]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ key[0], b & LOW, (a >> np.uint64(32)) ^ c[3] ^ key[1], a & LOW]
        key = [(key[0] + np.uint64(0x9E3779B9)) & LOW, (key[1] + np.uint64(0xBB67AE85)) & LOW]
    return c


def kept(p, numbers, batch, heads, rows, columns):
    """bool [batch, heads, rows, columns] by the definition."""
    halves = [part for number in numbers for part in (number & 0xFFFF_FFFF, number >> 32)]
    j = np.arange(columns)
    group, word = 4 * (j // 16) + j % 8 // 2, j % 2 + 2 * (j % 16 // 8)
    mask = np.empty((batch, heads, rows, columns), bool)
    for b in range(batch):
        for h in range(heads):
            a, k, c, d = (int(x) for x in philox((halves[2], halves[3], b, h), halves[:2]))
            i = np.arange(rows)[:, None]
            words = np.stack(philox((c, group[None] + 0 * i, d, i + 0 * group[None]), (a, k)))
            mask[b, h] = np.take_along_axis(words, np.broadcast_to(word, (1, rows, columns)), 0)[0] >= np.ceil(p * 2**32)
    return torch.from_numpy(mask)


def expected(q, k, v, p, numbers, is_causal=False):
    """The formula in float64 on tensors of rank 4."""
    q, k, v = (t.double() for t in (q, k, v))
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return s.softmax(-1) * kept(p, numbers, *s.shape) / (1 - p) @ v


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("p", [0.1, 0.75])
@pytest.mark.parametrize("q_len", [37, 2])
def test_what_is_dropped_is_the_definitions(dtype, p, q_len):
    q, k, v = (tensor(2, 3, n, 16, dtype=dtype, seed=n) for n in (q_len, 70, 70))
    torch.manual_seed(3)
    numbers = draw().tolist()
    for is_causal in (False, True):
        torch.manual_seed(3)
        with served():
            out = sdpa(q, k, v, dropout_p=p, is_causal=is_causal)
        torch.manual_seed(3)
        assert torch.equal(rapt.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=is_causal), out)
        want = expected(q, k, v, p, numbers, is_causal)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        assert (out.double() - want).norm() < tolerance * want.norm()


def test_one_draw_a_call_and_none_without_dropout():
    q, k, v = (tensor(2, 4, 9, 8, seed=i) for i in range(3))
    with served(4), torch.no_grad():
        torch.manual_seed(0)
        before = torch.get_rng_state()
        plain = sdpa(q, k, v)
        assert torch.equal(torch.get_rng_state(), before)
        first, second = sdpa(q, k, v, dropout_p=0.5), sdpa(q, k, v, dropout_p=0.5)
        after = torch.get_rng_state()
        torch.manual_seed(0)
        assert torch.equal(sdpa(q, k, v, dropout_p=0.5), first)
    draw()
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(first, second) and not torch.equal(first, plain)


def test_every_entry_of_more_dimensions_has_weights_of_its_own():
    one = torch.ones(1, 1, 1, 40, 8)
    q, v = one.expand(2, 3, 2, 40, 8), torch.eye(40).expand(2, 3, 2, 40, 40)
    torch.manual_seed(1)
    numbers = draw().tolist()
    torch.manual_seed(1)
    with served():
        out = sdpa(q, q, v, dropout_p=0.3)
    assert torch.equal(out != 0, kept(0.3, numbers, 6, 2, 40, 40).view(2, 3, 2, 40, 40))
    # Keys and values whose groups differ run head by head.
    with served():
        out = sdpa(one[0].expand(1, 4, 40, 8), one[0].expand(1, 2, 40, 8), torch.eye(40)[None, None], dropout_p=0.3, enable_gqa=True)
    masks = [out[0, head] != 0 for head in range(4)]
    assert all(0.6 < mask.double().mean() < 0.8 for mask in masks)
    assert all(not torch.equal(a, b) for n, a in enumerate(masks) for b in masks[:n])


def test_all_dropped_is_zeros_and_the_strides_are_pytorchs():
    q, k, v = (tensor(2, 9, 4, 8, seed=i).transpose(1, 2) for i in range(3))
    own = stock(q, k, v, dropout_p=1.0)
    with served():
        out = sdpa(q, k, v, dropout_p=1.0)
    assert torch.equal(out, torch.zeros_like(own)) and out.stride() == own.stride()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_draws_as_the_calls_that_it_stands_for(backend):
    q, k, v = (tensor(2, 4, 9, 8, seed=i) for i in range(3))

    def twice(q, k, v):
        return sdpa(q, k, v, dropout_p=0.5), rapt.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    with torch.no_grad(), rt.backend():
        torch.manual_seed(2)
        want = twice(q, k, v)
        torch._dynamo.reset()
        compiled = torch.compile(twice, fullgraph=True, backend=backend)
        compiled(q, k, v)
        torch.manual_seed(2)
        rt.reset_stats()
        got = compiled(q, k, v)
    assert rt.stats() == {"served": 2, "fallback": {}}
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and not torch.equal(*want)
    op = torch.ops.rapt.scaled_dot_product_attention
    with torch.no_grad():
        assert torch.equal(op(q, k, v, dropout_p=0.5, dropout_draw=torch.tensor([1, 2])), op(q, k, v, dropout_p=0.5, dropout_draw=torch.tensor([1, 2])))
        for given in (None, torch.tensor([1.5, 2.0]), torch.tensor([1])):
            with pytest.raises(rapt.OptionError, match="dropout_draw"):
                op(q, k, v, dropout_p=0.5, dropout_draw=given)


def test_numpy_has_no_dropout():
    q, k, v = (tensor(2, 4, 9, 8, seed=i) for i in range(3))
    with pytest.raises(rapt.UnsupportedError, match=r"dropout_p=0\.0"):
        rapt.scaled_dot_product_attention(*(t.numpy() for t in (q, k, v)), dropout_p=0.5)


def test_a_module_in_training_is_served():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, dropout=0.2, batch_first=True).train()
    x = tensor(2, 7, 32)
    with torch.no_grad(), served(2):
        first, second = (module(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
