"""Nested tensors of layout torch.jagged in the registered backend: each sequence has the bits of `rapt.attention` alone and lies within the
tolerance of the f64 reference; what goes to PyTorch, and is counted; what nobody computes."""

import gc
import inspect
import warnings

import pytest

torch = pytest.importorskip("torch")

import fresh  # noqa: E402
import numpy as np  # noqa: E402
import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from reference import assert_close, reference, torch_peers  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HEADS, DIM = 4, 24
Q_LENS, KV_LENS = [3, 1, 40, 0, 2, 7], [9, 300, 40, 5, 0, 65]


@pytest.fixture(autouse=True)
def quiet():
    """torch says of nested tensors that they are a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def offsets_of(lengths, dtype=torch.int64):
    return torch.tensor(np.cumsum([0, *lengths]), dtype=dtype)


def jagged(lengths, heads=HEADS, dim=DIM, dtype=torch.float32, seed=0, offsets=None):
    """[batch, heads, sequence, dim] as models make it: of [rows, heads, dim]."""
    values = random(sum(lengths), heads, dim, dtype=dtype, seed=seed)
    return torch.nested.nested_tensor_from_jagged(values, offsets_of(lengths) if offsets is None else offsets).transpose(1, 2)


def qkv(dtype=torch.float32, kv_heads=HEADS, dim_v=DIM, q_lens=Q_LENS, kv_lens=KV_LENS):
    q = jagged(q_lens, dtype=dtype)
    k = jagged(kv_lens, kv_heads, dtype=dtype, seed=1)
    return q, k, jagged(kv_lens, kv_heads, dim_v, dtype, seed=2, offsets=k.offsets())


def sequences(x):
    """Its parts, [heads, len, dim], read from its values by its own offsets and lengths."""
    values, starts = x.values(), x.offsets().tolist()
    lengths = np.diff(starts) if x.lengths() is None else x.lengths().tolist()
    return [values[:, start : start + length] for start, length in zip(starts, lengths)]


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def answered(q, k, v, **options):
    """The registered backend's answer, which must be Rapt's."""
    rt.reset_stats()
    with rt.backend(), torch.no_grad():
        out = sdpa(q, k, v, **options)
    assert rt.stats() == {"served": 1, "fallback": {}}
    return out


def check(out, q, k, v, is_causal=False, scale=None, **_options):
    assert out.layout is torch.jagged and out.dtype == q.dtype
    assert out.offsets() is q.offsets() and out.lengths() is q.lengths()
    assert out.shape[2] == q.shape[2], "the same nested size, so that it may be added to q"
    assert out.shape[:2] == q.shape[:2] and out.shape[3] == v.shape[3]
    causal = "top_left" if is_causal else None
    peers, expected, got = [[], []], [], []
    for n, (o, *given) in enumerate(zip(*map(sequences, (out, q, k, v)))):
        one = rapt.attention(*(x[None] for x in given), causal=causal, scale=scale)[0]
        assert torch.equal(bits(o), bits(one)), f"sequence {n}"
        if o.numel() == 0 or given[1].numel() == 0:
            assert not o.any()
            continue
        whole = [x[None] for x in given]
        expected.append(reference(*whole, causal=causal, scale=scale)[0].reshape(-1, o.shape[-1]))
        got.append(o.reshape(-1, o.shape[-1]))
        for kept, peer in zip(peers, torch_peers(*whole, causal=causal, scale=scale), strict=True):
            kept.append(np.reshape(peer.double() if isinstance(peer, torch.Tensor) else peer, (-1, o.shape[-1])))
    assert expected
    assert_close(torch.cat(got), np.concatenate(expected), q.dtype, [np.concatenate(peer) for peer in peers])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": -0.2}], ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_sequences_of_one_length_each(dtype, options):
    """Self-attention, an empty sequence among them."""
    lengths = [5, 1, 0, 33, 9]
    q, k, v = qkv(dtype, q_lens=lengths, kv_lens=lengths)
    check(answered(q, k, v, **options), q, k, v, **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_keys_with_offsets_of_their_own(dtype, is_causal):
    q, k, v = qkv(dtype, dim_v=16)
    check(answered(q, k, v, is_causal=is_causal), q, k, v, is_causal)


def test_one_tensor_for_all_three_and_the_stock_answer_is_near():
    x = jagged([5, 3, 8])
    out = answered(x, x, x)
    check(out, x, x, x)
    with torch.no_grad():
        stock = sdpa(x, x, x)
    torch.testing.assert_close(out.values(), stock.values(), rtol=1e-5, atol=1e-5)
    assert out.stride()[1:] == stock.stride()[1:] and out.values().stride() == stock.values().stride()
    assert (out + stock).shape[2] == x.shape[2]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_in_groups(kv_heads):
    q, k, v = qkv(kv_heads=kv_heads)
    options = {"enable_gqa": True} if kv_heads > 1 else {}
    check(answered(q, k, v, **options), q, k, v)


def test_heads_that_broadcast():
    q, k, v = qkv()
    one = jagged(Q_LENS, 1)
    with rt.backend(), torch.no_grad():
        out = sdpa(one, k, v)
    repeated = torch.nested.nested_tensor_from_jagged(one.values().expand(HEADS, -1, -1), one.offsets(), jagged_dim=2)
    check(out, repeated, k, v)
    shared = jagged(KV_LENS, 1, offsets=k.offsets())
    repeated = torch.nested.nested_tensor_from_jagged(shared.values().expand(HEADS, -1, -1), k.offsets(), jagged_dim=2)
    check(answered(q, shared, v), q, repeated, v)


def test_values_in_any_strides_are_read_in_place():
    q, k, v = qkv()
    plain = answered(q, k, v)

    def bhsd(x):
        """The heads before the rows in memory."""
        return torch.nested.nested_tensor_from_jagged(x.values().contiguous(), x.offsets(), jagged_dim=2)

    def sliced(x):
        """A part of every row of a wider tensor, with NaN around it."""
        wide = torch.full((x.values().shape[1], HEADS + 2, 2 * DIM), float("nan"))
        wide[:, 1:-1, ::2] = x.values().transpose(0, 1)
        return torch.nested.nested_tensor_from_jagged(wide[:, 1:-1, ::2], x.offsets()).transpose(1, 2)

    for form in (bhsd, sliced):
        out = answered(form(q), form(k), form(v))
        assert torch.equal(bits(out.values()), bits(plain.values()))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_narrowed_sequences_leave_the_rest_alone(dtype, is_causal):
    """Parts of padded rows: what lies around them is NaN, reaches no output, and is zero in the values of the answer."""
    starts, lengths = torch.tensor([1, 0, 4, 2]), torch.tensor([4, 7, 0, 5])

    def narrowed(heads, dim, seed):
        padded = random(4, 10, heads, dim, dtype=dtype, seed=seed)
        for row, start, length in zip(padded, starts.tolist(), lengths.tolist()):
            row[:start], row[start + length :] = float("nan"), float("nan")
        return torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)

    q, k, v = narrowed(HEADS, DIM, 0), narrowed(HEADS, DIM, 1), narrowed(HEADS, 16, 2)
    assert q.lengths() is not None
    out = answered(q, k, v, is_causal=is_causal)
    check(out, q, k, v, is_causal)
    values = out.values().clone()
    for start, length in zip(out.offsets().tolist(), lengths.tolist()):
        values[:, start : start + length] = 0
    assert not values.any()


def test_keys_and_values_at_rows_of_their_own():
    """k narrowed, v packed: the same lengths at other rows; and offsets that are equal numbers in two tensors."""
    lengths = torch.tensor([4, 7, 1])
    q = jagged([3, 2, 6])
    padded = random(3, 9, HEADS, DIM, seed=1)
    k = torch.nested.narrow(padded, 1, torch.tensor([2, 0, 8]), lengths, layout=torch.jagged).transpose(1, 2)
    v = jagged(lengths.tolist(), seed=2)
    check(answered(q, k, v), q, k, v)
    narrowed = torch.nested.narrow(padded, 1, torch.tensor([0, 1, 3]), torch.tensor([3, 2, 6]), layout=torch.jagged)
    check(answered(narrowed.transpose(1, 2), k, v), narrowed.transpose(1, 2), k, v)
    k = jagged(lengths.tolist(), seed=3)
    check(answered(q, k, v), q, k, v)


def test_no_sequence_and_no_row():
    none = jagged([])
    out = answered(none, none, none)
    assert out.shape[0] == 0 and out.values().shape == (HEADS, 0, DIM)
    empty = jagged([0, 0])
    assert answered(empty, empty, empty).values().shape == (HEADS, 0, DIM)
    q = jagged([2, 1])
    assert not answered(q, empty, empty).values().any()


def test_inference_mode_and_autocast():
    with torch.inference_mode():
        q, k, v = qkv()
        rt.reset_stats()
        with rt.backend():
            out = sdpa(q, k, v)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                lower = sdpa(q, k, v)
        assert rt.stats() == {"served": 2, "fallback": {}}
        check(out, q, k, v)
        assert lower.dtype == torch.bfloat16
        check(lower, *(x.to(torch.bfloat16) for x in (q, k, v)))


def leaves(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


def gradients(q, k, v, d_o, **options):
    """By the registered backend, counted as served once: out and three gradients, jagged as their inputs are."""
    given = leaves(q, k, v)
    rt.reset_stats()
    with rt.backend():
        out = sdpa(*given, **options)
        out.values().backward(d_o)
    assert rt.stats() == {"served": 1, "fallback": {}}
    for x in given:
        assert x.grad.layout is torch.jagged and x.grad.offsets() is x.offsets() and x.grad.lengths() is x.lengths()
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
    return out, [x.grad for x in given]


def check_gradients(out, made, d_o, q, k, v, is_causal=False, scale=None):
    """Each sequence has the bits of `rapt.attention` alone, forward and backward."""
    places = torch.nested.nested_tensor_from_jagged(d_o, q.offsets(), q.lengths(), jagged_dim=2)
    causal = "top_left" if is_causal else None
    for n, (o, arriving, *parts) in enumerate(zip(*map(sequences, (out, places, q, k, v, *made)))):
        given, grads = leaves(*(x[None].clone() for x in parts[:3])), parts[3:]
        one = rapt.attention(*given, causal=causal, scale=scale)
        one.backward(arriving[None].clone())
        assert torch.equal(bits(o), bits(one[0])), f"sequence {n}"
        for name, got, wanted in zip(("dq", "dk", "dv"), grads, given):
            assert torch.equal(bits(got), bits(wanted.grad[0])), f"{name} of sequence {n}"


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.2}], ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_gradients_are_those_of_each_sequence_alone(dtype, options):
    q, k, v = qkv(dtype, dim_v=16)
    d_o = random(HEADS, sum(Q_LENS), 16, dtype=dtype, seed=5)
    out, made = gradients(q, k, v, d_o, **options)
    plain = answered(q, k, v, **options)
    assert torch.equal(bits(out.values()), bits(plain.values())), "the same bits as without gradients"
    check_gradients(out, made, d_o, q, k, v, **options)


def test_gradients_are_near_pytorchs():
    shapes = [jagged([5, 3, 8], seed=seed) for seed in range(3)]
    shapes = [torch.nested.nested_tensor_from_jagged(x.values().transpose(0, 1), shapes[0].offsets()).transpose(1, 2) for x in shapes]
    d_o = random(HEADS, 16, DIM, seed=5)
    stock = leaves(*shapes)
    sdpa(*stock).values().backward(d_o)
    _, made = gradients(*shapes, d_o)
    for a, b in zip(stock, made):
        torch.testing.assert_close(a.grad.values(), b.values())


def test_gradients_of_what_is_made_before():
    """Not of leaves: of a projection, whose weight gets its own."""
    values, weight = random(16, HEADS * DIM), random(HEADS * DIM, HEADS * DIM, seed=9).requires_grad_()
    split = lambda x: x.unflatten(-1, (HEADS, DIM))  # noqa: E731
    x = torch.nested.nested_tensor_from_jagged(split(values @ weight), offsets_of([5, 3, 8])).transpose(1, 2)
    with rt.backend():
        out = sdpa(x, x, x, is_causal=True)
    out.transpose(1, 2).values().sin().sum().backward()
    dense = weight.detach().clone().requires_grad_()
    parts = split(values @ dense).split([5, 3, 8])
    sum(rapt.attention(part, part, part, causal=True, layout="bshd").sin().sum() for part in parts).backward()
    torch.testing.assert_close(weight.grad, dense.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_gradients_of_heads_in_groups_and_of_heads_that_broadcast(dtype):
    for kv_heads, enable_gqa in ((2, True), (1, False)):
        q, k, v = qkv(dtype, kv_heads=kv_heads)
        d_o = random(HEADS, sum(Q_LENS), DIM, dtype=dtype, seed=5)
        out, made = gradients(q, k, v, d_o, enable_gqa=enable_gqa)
        check_gradients(out, made, d_o, q, k, v)
    q, k, v = qkv(dtype)
    one = jagged(Q_LENS, 1, dtype=dtype)
    repeated = torch.nested.nested_tensor_from_jagged(one.values().expand(HEADS, -1, -1), one.offsets(), jagged_dim=2)
    out, (dq, dk, dv) = gradients(one, k, v, d_o)
    same, wanted = gradients(repeated, k, v, d_o)
    assert torch.equal(out.values(), same.values()) and dq.values().shape[0] == 1
    for got, of in ((dk, wanted[1]), (dv, wanted[2])):
        torch.testing.assert_close(got.values(), of.values())
    torch.testing.assert_close(dq.values().float(), wanted[0].values().float().sum(0, keepdim=True), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_narrowed_sequences_are_zeros_around_them(is_causal):
    starts, lengths = torch.tensor([1, 0, 4, 2]), torch.tensor([4, 7, 0, 5])

    def narrowed(heads, dim, seed):
        padded = random(4, 10, heads, dim, seed=seed)
        for row, start, length in zip(padded, starts.tolist(), lengths.tolist()):
            row[:start], row[start + length :] = float("nan"), float("nan")
        return torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)

    q, k, v = narrowed(HEADS, DIM, 0), narrowed(HEADS, DIM, 1), narrowed(HEADS, 16, 2)
    d_o = torch.full((HEADS, 40, 16), float("nan"))
    for start, length in zip(q.offsets().tolist(), lengths.tolist()):
        d_o[:, start : start + length] = random(HEADS, length, 16, seed=start)
    out, made = gradients(q, k, v, d_o, is_causal=is_causal)
    check_gradients(out, made, d_o, q, k, v, is_causal)
    for x in made:
        values = x.values().clone()
        for start, length in zip(x.offsets().tolist(), lengths.tolist()):
            values[:, start : start + length] = 0
        assert not values.any(), "rows of no sequence"
    shared = torch.nested.nested_tensor_from_jagged(random(8, HEADS, DIM), torch.tensor([0, 3, 8]), torch.tensor([5, 3])).transpose(1, 2)
    q = jagged([5, 3])
    (shared,) = leaves(shared)
    with rt.backend():
        out = sdpa(q, shared, shared.detach())
    with pytest.raises(rapt.UnsupportedError, match="dk of rows that sequences share"):
        out.values().sum().backward()


def test_only_what_asks_gets_a_gradient_and_no_second_one():
    q, k, v = qkv(q_lens=[5, 3], kv_lens=[4, 6])
    d_o = random(HEADS, 8, DIM, seed=5)
    _, whole = gradients(q, k, v, d_o)
    for asking in range(1, 8):
        given = [x.detach().requires_grad_(bool(asking >> n & 1)) for n, x in enumerate((q, k, v))]
        with rt.backend():
            sdpa(*given).values().backward(d_o)
        for x, wanted in zip(given, whole):
            assert torch.equal(x.grad.values(), wanted.values()) if x.requires_grad else x.grad is None
    given = leaves(q, k, v)
    with rt.backend():
        (dq,) = torch.autograd.grad(sdpa(*given).values().sin().sum(), given[0], create_graph=True)
    with pytest.raises(rapt.UnsupportedError, match="MATH"):
        dq.values().sum().backward()


def test_dropout_drops_of_a_sequence_what_its_batch_entry_drops():
    lengths = [5, 0, 3, 8]
    q, k, v = (jagged(lengths, seed=seed) for seed in range(3))
    dense = [torch.stack([torch.nn.functional.pad(one, (0, 0, 0, 8 - one.shape[1])) for one in sequences(x)]) for x in (q, k, v)]
    mask = torch.arange(8)[None, :] < torch.tensor(lengths)[:, None]
    torch.manual_seed(3)
    out = answered(q, k, v, dropout_p=0.4)
    torch.manual_seed(3)
    with rt.backend(), torch.no_grad():
        padded = sdpa(*dense, attn_mask=mask[:, None, None, :], dropout_p=0.4)
        again = sdpa(q, k, v, dropout_p=0.4)
    for n, (own, length) in enumerate(zip(sequences(out), lengths)):
        torch.testing.assert_close(own, padded[n, :, :length], rtol=1e-5, atol=1e-6)
    assert not torch.equal(again.values(), out.values()), "each call draws"
    torch.manual_seed(3)
    assert torch.equal(rapt.scaled_dot_product_attention(q, k, v, dropout_p=0.4).values(), out.values())
    assert not answered(q, k, v, dropout_p=1.0).values().any()
    # With gradients: the same bits, and those of padded sequences.
    d_o = random(HEADS, sum(lengths), DIM, seed=5)
    torch.manual_seed(3)
    same, made = gradients(q, k, v, d_o, dropout_p=0.4)
    assert torch.equal(same.values(), out.values())
    dense = leaves(*dense)
    places = torch.nested.nested_tensor_from_jagged(d_o, q.offsets(), jagged_dim=2)
    arriving = torch.stack([torch.nn.functional.pad(one, (0, 0, 0, 8 - one.shape[1])) for one in sequences(places)])
    torch.manual_seed(3)
    with rt.backend():
        sdpa(*dense, attn_mask=mask[:, None, None, :], dropout_p=0.4).backward(arriving)
    for nested, padded in zip(made, dense):
        for n, (own, length) in enumerate(zip(sequences(nested), lengths)):
            torch.testing.assert_close(own, padded.grad[n, :, :length], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_goes_to_pytorch_is_counted_with_its_reason():
    q, k, v = qkv(q_lens=[5, 3], kv_lens=[5, 3])
    dense = random(2, HEADS, 5, DIM)
    flat = torch.nested.nested_tensor_from_jagged(random(8, DIM), offsets_of([5, 3]))
    three = jagged([5, 3, 1])
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cases = [
        ("dropout", ValueError, lambda: sdpa(q, k, v, dropout_p=1.5)),
        ("invalid request", ValueError, lambda: sdpa(q, dense, dense)),
        ("invalid request", ValueError, lambda: sdpa(dense, k, v)),
        ("invalid request", ValueError, lambda: sdpa(q, k, v, attn_mask=torch.ones(1, 1, dtype=torch.bool))),
        ("invalid request", ValueError, lambda: sdpa(q, k.double(), v)),
        ("invalid request", RuntimeError, lambda: sdpa(q, three, three)),
        ("invalid request", RuntimeError, lambda: sdpa(q, jagged([5, 3], 3), jagged([5, 3], 3), enable_gqa=True)),
        ("layout jagged", RuntimeError, lambda: sdpa(flat, flat, flat)),
        ("scale not finite", None, lambda: sdpa(q, k, v, scale=float("inf"))),
    ]
    for reason, error, call in cases:
        rt.reset_stats()
        with rt.backend():
            if error is None or reason == "dropout":
                try:
                    call()
                except RuntimeError:
                    assert reason == "dropout"
            else:
                with pytest.raises(error):
                    call()
        assert rt.stats() == {"served": 0, "fallback": {reason: 1}}, reason
    rt.reset_stats()
    with rt.backend(), sdpa_kernel([SDPBackend.MATH]):
        out = sdpa(q, k, v)
    assert rt.stats() == {"served": 0, "fallback": {"sdpa_kernel([MATH])": 1}}
    with sdpa_kernel([SDPBackend.MATH]):
        assert torch.equal(out.values(), sdpa(q, k, v).values())


@torch.no_grad()
def test_what_no_kernel_takes_is_pytorchs_and_counted(monkeypatch):
    """As on a GPU of whose kernels none reads offsets at these head dims. PyTorch's own asks for a GPU first, which need not be here."""

    def refuse(*_):
        raise rapt.UnsupportedError("no kernel")

    def stock(query, key, value, **options):
        calls.append((query, key, value, options))
        return "PyTorch's"

    calls = []
    monkeypatch.setattr(rt._jagged, "_attend", refuse)
    q, k, v = qkv(q_lens=[5, 3], kv_lens=[5, 3])
    rt.reset_stats()
    with rt.backend(), monkeypatch.context() as inside:
        inside.setattr(rt._jagged, "_stock", stock)
        assert sdpa(q, k, v, is_causal=True) == "PyTorch's" == sdpa(q, k, v, scale=0.5)
    assert rt.stats() == {"served": 0, "fallback": {"layout jagged": 2}}
    first, second = calls
    assert all(given is x for call in calls for given, x in zip(call, (q, k, v)))
    assert first[3]["is_causal"] and first[3]["scale"] is None and second[3]["scale"] == 0.5
    with pytest.raises(rapt.UnsupportedError, match="no kernel"):
        rapt.scaled_dot_product_attention(q, k, v)
    assert rt.stats()["fallback"] == {"layout jagged": 2}


@torch.no_grad()
def test_what_is_ragged_in_heads_is_a_dense_call():
    x = torch.nested.nested_tensor_from_jagged(random(8, 6, DIM), offsets_of([5, 3]))
    x = torch.nested.nested_tensor_from_jagged(random(8, HEADS, 6, DIM), x.offsets())
    out = answered(x, x, x)
    assert torch.equal(out.values(), rapt.attention(*[x.values()] * 3))


def broken(values, offsets, lengths=None):
    lengths = None if lengths is None else torch.tensor(lengths)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), lengths).transpose(1, 2)


@torch.no_grad()
def test_what_nobody_computes():
    values = random(8, HEADS, DIM)
    q = jagged([5, 3])
    with rt.backend():
        for offsets, lengths in (([0, 5, 9], None), ([0, 5, 3], None), ([-1, 5, 8], None), ([0, 5, 8], [5, 4]), ([0, 5, 8], [5, -1]), ([0, 5, 2**62], None)):
            bad = broken(values, offsets, lengths)
            with pytest.raises(rapt.IndexRangeError, match="sequence [01] of key is rows .* key has rows 0 to 8"):
                sdpa(q, bad, q)
            with pytest.raises(rapt.IndexRangeError, match="of query is rows"):
                sdpa(bad, q, q)
        with pytest.raises(rapt.ShapeError, match="got 5 rows of k.* and 4 of v.* in sequence 0"):
            sdpa(q, jagged([5, 3]), jagged([4, 4]))
        with pytest.raises(rapt.LayoutError, match="sequences of q.* share rows"):
            sdpa(broken(values, [0, 3, 8], [5, 3]), q, q)
        # Keys may be shared: they are only read.
        shared = broken(values, [0, 3, 8], [5, 3])
        rt.reset_stats()
        check(sdpa(q, shared, shared), q, shared, shared)
        assert rt.stats()["served"] >= 1


@torch.no_grad()
def test_rapts_own_function_serves_the_same_and_refuses_what_falls_back():
    q, k, v = qkv()
    out = rapt.scaled_dot_product_attention(q, k, v, is_causal=True)
    check(out, q, k, v, True)
    own = rapt.scaled_dot_product_attention
    for error, call in (
        (rapt.KindError, lambda: own(q, torch.zeros(2, 4, 5, DIM), v)),
        (rapt.OptionError, lambda: own(q, k, v, torch.ones(1, 1, dtype=torch.bool))),
        (rapt.DtypeMismatchError, lambda: own(q, k.double(), v)),
        (rapt.ShapeError, lambda: own(q, jagged(KV_LENS[1:]), jagged(KV_LENS[1:]))),
    ):
        with pytest.raises(error):
            call()
    with torch.enable_grad():
        asks = q.detach().requires_grad_()
        own(asks, k, v).values().sum().backward()
    assert asks.grad.offsets() is q.offsets()


def test_registering_and_unregistering_change_one_name():
    import torch.nested._internal.ops as ops

    q = jagged([3, 2])
    before = ops.jagged_scaled_dot_product_attention
    for _ in range(2):
        with rt.backend():
            with rt.backend():
                assert ops.jagged_scaled_dot_product_attention is not before
            assert ops.jagged_scaled_dot_product_attention is not before
        assert ops.jagged_scaled_dot_product_attention is before
    rt.reset_stats()
    with torch.no_grad():
        sdpa(q, q, q)
    assert rt.stats() == {"served": 0, "fallback": {}}
    assert "jagged_scaled_dot_product_attention(" in inspect.getsource(ops.jagged_torch_function), "where PyTorch looks it up"


def test_it_is_registered_before_nested_tensors_are_loaded():
    fresh_program = """
import sys, torch, rapt.torch
rapt.torch.register_backend()
assert "torch.nested._internal.ops" not in sys.modules
x = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 2)], layout=torch.jagged).transpose(1, 2)
out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
print(rapt.torch.stats(), out.layout)
rapt.torch.unregister_backend()
import torch.nested._internal.ops as ops
print(ops.jagged_scaled_dot_product_attention.__module__)
"""
    ran = fresh.run(fresh_program)
    assert ran.stdout.splitlines() == ["{'served': 1, 'fallback': {}} torch.jagged", "torch.nested._internal.sdpa"], ran.stderr


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_graphs_are_served(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    rt.reset_stats()
    counter = CompileCounterWithBackend(backend)
    with rt.backend(), torch.no_grad():
        compiled = torch.compile(lambda q, k, v: sdpa(q * 2.0, k, v, is_causal=True) + 1.0, fullgraph=True, backend=counter)
        for lengths in (([3, 5, 2], [6, 1, 9]), ([4, 1, 7], [2, 2, 20])):
            q, k, v = qkv(q_lens=lengths[0], kv_lens=lengths[1])
            out = compiled(q, k, v)
            assert torch.equal(bits((out - 1.0).values()), bits((sdpa(q * 2.0, k, v, is_causal=True) + 1.0 - 1.0).values()))
    assert rt.stats() == {"served": 4, "fallback": {}} and counter.frame_count == 1
    torch._dynamo.reset()


def test_a_compiled_training_step_is_served(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()

    def step(q, k, v):
        return sdpa(q * 2.0, k, v, is_causal=True).values().sin().sum()

    with rt.backend():
        compiled = torch.compile(step, fullgraph=True)
        for lengths in (([3, 5, 2], [6, 1, 9]), ([4, 1, 7], [2, 2, 20])):
            plain = leaves(*qkv(q_lens=lengths[0], kv_lens=lengths[1]))
            traced = leaves(*plain)
            step(*plain).backward()
            rt.reset_stats()
            compiled(*traced).backward()
            assert rt.stats() == {"served": 1, "fallback": {}}
            for a, b in zip(plain, traced):
                torch.testing.assert_close(a.grad.values(), b.grad.values())
    torch._dynamo.reset()


@torch.no_grad()
def test_the_op_that_graphs_carry():
    values = [random(9, HEADS, DIM, seed=0), *(random(12, 2, DIM, seed=seed) for seed in (1, 2))]
    sequences = [offsets_of([4, 5]), None, *[torch.tensor([1, 6, 12]), torch.tensor([3, 5])] * 2]
    op = torch.ops.rapt.jagged_attention.default
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (*values, *sequences), {"enable_gqa": True}, test_utils=utilities)
    out = op(*values, *sequences, True, scale=0.2, enable_gqa=True)
    for rows, keys in ((slice(0, 4), slice(1, 4)), (slice(4, 9), slice(6, 11))):
        given = values[0][rows], values[1][keys], values[2][keys]
        assert torch.equal(out[rows], rapt.attention(*given, causal=True, scale=0.2, layout="bshd"))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [None if x is None else mode.from_tensor(x) for x in (*values, *sequences)]
    for given in ((*values, *sequences), fakes):
        with pytest.raises(rapt.ShapeError, match="enable_gqa"):
            op(*given)
    with pytest.raises(rapt.ShapeError, match="has 3 offsets and 1 lengths"):
        op(*values, offsets_of([4, 5]), torch.tensor([4]), *sequences[2:], enable_gqa=True)
    with pytest.raises(rapt.UnsupportedDtypeError):
        op(*values, offsets_of([4, 5], torch.float32), None, *sequences[2:], enable_gqa=True)
    small = op(*values, offsets_of([4, 5], torch.int32), *sequences[1:], True, scale=0.2, enable_gqa=True)
    assert torch.equal(small, out)
    asking = [x.clone().requires_grad_() for x in values]
    with torch.enable_grad():
        torch.library.opcheck(op, (*asking, *sequences), {"enable_gqa": True}, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
        op(*asking, *sequences, True, scale=0.2, enable_gqa=True).sum().backward()
    alone = [x[rows].clone().requires_grad_() for x, rows in zip(values, (slice(4, 9), slice(6, 11), slice(6, 11)))]
    with torch.enable_grad():
        rapt.attention(*alone, causal=True, scale=0.2, layout="bshd").sum().backward()
    assert all(torch.equal(x.grad[rows], one.grad) for x, one, rows in zip(asking, alone, (slice(4, 9), slice(6, 11), slice(6, 11))))
    assert not asking[1].grad[0].any() and not asking[1].grad[4:6].any()


@torch.no_grad()
def test_nothing_is_kept_of_a_call():
    import weakref

    q, k, v = qkv()
    out = answered(q, k, v)
    kept = [weakref.ref(x) for x in (q._values, k._values, v._values, out._values)]
    del q, k, v, out
    gc.collect()
    assert not any(ref() is not None for ref in kept)
