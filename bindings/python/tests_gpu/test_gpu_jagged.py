"""Nested tensors of layout torch.jagged on the GPU: the bits of `rapt.attention` for each sequence, without waiting for the device."""

import warnings

import pytest
import torch

import rapt
import rapt.torch as rt

DEVICE = "cuda"
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def quiet():
    """torch says of nested tensors that they are a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int64, device=DEVICE)


def jagged(lengths, heads, dim, dtype, offsets=None):
    values = torch.randn(sum(lengths), heads, dim, device=DEVICE).to(dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets_of(lengths) if offsets is None else offsets).transpose(1, 2)


def sequences(x):
    values, starts = x.values(), x.offsets().tolist()
    lengths = [b - a for a, b in zip(starts, starts[1:])] if x.lengths() is None else x.lengths().tolist()
    return [values[:, start : start + length] for start, length in zip(starts, lengths)]


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def answered(q, k, v, **options):
    with rt.backend():
        rt.reset_stats()
        out = sdpa(q, k, v, **options)
        assert rt.stats() == {"served": 1, "fallback": {}}
    return out


def check(out, q, k, v, is_causal=False, scale=None, **_options):
    assert out.layout is torch.jagged and out.offsets() is q.offsets()
    for n, parts in enumerate(zip(*map(sequences, (out, q, k, v)), strict=True)):
        got, q1, k1, v1 = (part[None] for part in parts)
        want = rapt.attention(q1, k1, v1, causal=is_causal, scale=scale)
        assert torch.equal(bits(got), bits(want)), f"sequence {n}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.2}], ids=str)
def test_each_sequence_has_the_bits_of_a_call_alone(dtype, options):
    lengths = [300, 1, 17, 0, 64, 129]
    offsets = offsets_of(lengths)
    q, k, v = (jagged(lengths, 4, 64, dtype, offsets) for _ in range(3))
    check(answered(q, k, v, **options), q, k, v, **options)


def test_keys_with_offsets_of_their_own_and_heads_in_groups():
    q = jagged([30, 1, 100], 4, 64, torch.bfloat16)
    k = jagged([9, 300, 77], 2, 64, torch.bfloat16)
    v = jagged([9, 300, 77], 2, 32, torch.bfloat16, k.offsets())
    check(answered(q, k, v, enable_gqa=True), q, k, v)


def test_narrowed_sequences_leave_the_rest_alone():
    torch.manual_seed(1)
    padded = [torch.randn(5, 128, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    starts, lengths = torch.tensor([2, 0, 9, 100, 5], device=DEVICE), torch.tensor([30, 128, 1, 20, 0], device=DEVICE)
    q = torch.nested.narrow(padded[0], 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    k, v = (
        torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), q.offsets(), q.lengths()).transpose(1, 2) for x in padded[1:]
    )
    out = answered(q, k, v)
    check(out, q, k, v)


def test_a_graph_and_no_wait():
    lengths = [100, 3, 64]
    offsets = offsets_of(lengths)
    q, k, v = (jagged(lengths, 4, 64, torch.bfloat16, offsets) for _ in range(3))
    want = answered(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with rt.backend(), torch.cuda.graph(graph):
        out = sdpa(q, k, v)
    graph.replay()
    assert torch.equal(bits(out.values()), bits(want.values()))


def test_offsets_of_keys_and_values_that_differ_go_to_pytorch_or_are_refused():
    lengths = [10, 20]
    offsets = offsets_of(lengths)
    q, k = (jagged(lengths, 4, 64, torch.bfloat16, offsets) for _ in range(2))
    v = torch.nested.nested_tensor_from_jagged(k.values().transpose(0, 1).clone(), offsets.clone()).transpose(1, 2)
    with rt.backend():
        rt.reset_stats()
        try:
            sdpa(q, k, v)
        except Exception:  # noqa: BLE001, S110 - PyTorch's own word on it
            pass
        assert rt.stats()["served"] == 0
    with pytest.raises(rapt.UnsupportedError, match="one tensor of offsets"):
        rapt.scaled_dot_product_attention(q, k, v)
