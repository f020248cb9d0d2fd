"""Parts of prompts over caches on the GPU: many queries a sequence, ragged lengths, pages of any size. Each sequence has the bits of a
call alone; what lies in unused rows, or behind an entry that names no page, reaches no other sequence."""

import pytest
import torch
from gpu_reference import judge
from test_gpu_kvcache import DEVICE, Cache, bits, queries

import rapt

PAGES = [None, 1, 7, 16, 24, 64, 256]
LENGTHS = [1500, 0, 1, 63, 64, 513, 2048, 700, 90]


def judged(cache, q, out, lse, sequences, **options):
    """Some sequences against the reference in float64."""
    for b in sequences:
        k, v = (x[b][None].transpose(1, 2) for x in (cache.k, cache.v))
        judge(out[b : b + 1].transpose(1, 2), lse[b : b + 1], q[b : b + 1].transpose(1, 2), k, v, **options)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_each_sequence_has_the_bits_of_a_call_alone_and_is_right(dtype, page_size):
    cache = Cache(21, LENGTHS, 2, (64, 64), dtype, page_size, room=2100)
    for q_len in (17, 100, 300):
        q = queries(len(LENGTHS), q_len, 8, 64, dtype)
        out, lse = cache.check(q)
        assert (out[1] == 0).all() and (lse[1] == float("-inf")).all(), "a sequence without keys"
        judged(cache, q, out, lse, [3, 5])
        out, lse = cache.check(q, causal=True)
        judged(cache, q, out, lse, [5, 7], causal="bottom_right")


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize(
    "heads, q_len, dims",
    [
        ((16, 2), 9, (128, 128)),
        ((8, 8), 300, (128, 128)),
        ((32, 8), 129, (128, 128)),
        ((6, 2), 64, (33, 40)),
        ((4, 4), 200, (64, 128)),
        ((4, 2), 77, (192, 128)),
        ((4, 2), 130, (256, 256)),
        ((2, 1), 40, (320, 300)),
    ],
    ids=str,
)
def test_shapes(page_size, heads, q_len, dims):
    cache = Cache(22, [1300, 17, 600, 16, 0], heads[1], dims, torch.bfloat16, page_size)
    q = queries(5, q_len, heads[0], dims[0], torch.bfloat16)
    if max(dims) > 256:
        # Alone another kernel takes these, whose bits are others.
        out, lse = cache.attend(q, causal=True)
        return judged(cache, q, out, lse, range(4), causal="bottom_right")
    out, lse = cache.check(q)
    judged(cache, q, out, lse, [0, 3])
    out, lse = cache.check(q, causal=True)
    judged(cache, q, out, lse, [1, 2], causal="bottom_right")


@pytest.mark.parametrize("page_size", [None, 16, 5])
@pytest.mark.parametrize(
    "dim, lengths",
    [
        (80, [2047, 2048, 4000, 0, 5, 2049]),
        (96, [2047, 2048, 4000, 0, 5, 2049]),
        (64, [80, 512, 81, 0, 513, 4000]),
        (64, [80, 512, 81, 0, 5, 64]),
        (48, [65, 80, 3, 0, 64, 79]),
    ],
)
def test_sequences_of_few_keys_have_the_tiles_that_they_have_alone(dim, lengths, page_size):
    cache = Cache(23, lengths, 2, (dim, dim), torch.bfloat16, page_size)
    out, lse = cache.check(queries(6, 150, 4, dim, torch.bfloat16), causal=True)
    assert (out[3] == 0).all() and (lse[3] == float("-inf")).all()


@pytest.mark.parametrize("page_size", [None, 16, 3])
@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)], ids=str)
def test_options(page_size, dtype, dim):
    cache = Cache(24, [1200, 3, 90, 520], 2, (dim, dim), dtype, page_size, room=1500)
    q = queries(4, 120, 4, dim, dtype)
    sinks, slopes = torch.randn(4, device=DEVICE), torch.rand(4, device=DEVICE)
    for options in [
        {"causal": True, "window": (100, 0)},
        {"causal": True, "window": (0, 0)},
        {"softcap": 5.0, "scale": 0.3},
        {"causal": True, "sinks": sinks},
        {"causal": True, "alibi_slopes": slopes, "window": (700, 3), "sinks": sinks, "softcap": 20.0},
    ]:
        out, lse = cache.check(q, **options)
        judged(cache, q, out, lse, [2, 3], **{**options, **({"causal": "bottom_right"} if options.get("causal") else {})})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_pages_of_every_size_give_the_bits_of_one_tensor(dtype, dim):
    lengths = [900, 2500, 31]
    q = queries(3, 140, 4, dim, dtype)
    want = None
    for page_size in [None, 1, 2, 8, 12, 16, 40, 64, 128, 256, 1000]:
        cache = Cache(25, lengths, 2, (dim, dim), dtype, page_size)
        out, lse = cache.attend(q, causal=True)
        want = want or (out, lse)
        assert torch.equal(bits(out), bits(want[0])) and torch.equal(bits(lse), bits(want[1])), page_size
    assert want[0].isfinite().all()


@pytest.mark.parametrize("page_size", [None, 16, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_strides_change_no_bit(page_size, dtype):
    cache = Cache(26, [900, 31, 400], 2, (64, 64), dtype, page_size)
    q = queries(3, 70, 4, 64, dtype)
    out, lse = cache.attend(q, causal=True)
    wide = torch.full((*cache.k_cache.shape[:-1], 131), float("nan"), device=DEVICE, dtype=dtype)
    wide[..., 1:129:2] = cache.k_cache
    cache.k_cache = wide[..., 1:129:2]
    cache.v_cache = cache.v_cache.permute(2, 1, 3, 0).contiguous().permute(3, 1, 0, 2)
    cache.seqlens = torch.stack([cache.seqlens, cache.seqlens * 0 - 7], 1)[:, 0]
    if page_size:
        cache.page_table = cache.page_table.t().contiguous().t()
    again, lse_again = cache.attend(q.transpose(1, 2).contiguous().transpose(1, 2), causal=True)
    assert torch.equal(bits(out), bits(again)) and torch.equal(bits(lse), bits(lse_again))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 5])
def test_a_page_that_does_not_exist_spoils_the_rows_that_attend_to_it(page_size, dtype):
    cache = Cache(27, [800, 300, 64, 700], 2, (64, 64), dtype, page_size)
    q = queries(4, 200, 4, 64, dtype)
    for causal in (False, True):
        want, want_lse = cache.attend(q, causal=causal)
        for wrong in (-1, cache.k_cache.shape[0], 2**31 - 1, -(2**31)):
            for at in (0, 800 // page_size // 2, (800 - 1) // page_size):
                kept = cache.page_table[0, at].clone()
                cache.page_table[0, at] = wrong
                out, lse = cache.attend(q, causal=causal)
                cache.page_table[0, at] = kept
                # Query i of 200 attends to the keys up to 600 + i.
                spoilt = max(0, at * page_size - 600) if causal else 0
                assert out[0, spoilt:].isnan().all() and lse[0, :, spoilt:].isnan().all(), f"entry {at} is {wrong}"
                assert torch.equal(bits(out[0, :spoilt]), bits(want[0, :spoilt]))
                assert torch.equal(bits(lse[0, :, :spoilt]), bits(want_lse[0, :, :spoilt]))
                assert torch.equal(bits(out[1:]), bits(want[1:])) and torch.equal(bits(lse[1:]), bits(want_lse[1:]))


@pytest.mark.parametrize("page_size", [None, 16, 5])
@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 64), (torch.bfloat16, 96), (torch.float32, 64)], ids=str)
def test_a_length_that_the_cache_does_not_hold_spoils_its_sequence_alone(page_size, dtype, dim):
    cache = Cache(28, [80, 30, 64, 70], 2, (dim, dim), dtype, page_size, room=2100 if dim == 96 else None)
    room = cache.room if page_size is None else cache.page_table.shape[1] * page_size
    q = queries(4, 100, 4, dim, dtype)
    want, _ = cache.attend(q, causal=True)
    for wrong in (-1, -(2**31), room + 1, 2**31 - 1):
        cache.seqlens[2] = wrong
        out, lse = cache.attend(q, causal=True)
        assert out[2].isnan().all() and lse[2].isnan().all(), wrong
        assert torch.equal(bits(out[[0, 1, 3]]), bits(want[[0, 1, 3]]))


def test_a_prompt_in_parts_has_the_bits_of_the_whole():
    dtype, heads, dim, page_size = torch.bfloat16, 4, 64, 16
    whole = Cache(30, [500, 500], 2, (dim, dim), dtype, page_size)
    q = queries(2, 500, heads, dim, dtype)
    want, _ = whole.attend(q, causal=True)
    for part in (100, 250):
        for end in range(part, 501, part):
            seqlens = torch.full((2,), end, dtype=torch.int32, device=DEVICE)
            out, _ = whole.attend(q[:, end - part : end], cache_seqlens=seqlens, causal=True)
            assert torch.equal(bits(out), bits(want[:, end - part : end])), f"queries {end - part} to {end}"


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_graph_follows_lengths_that_change(page_size):
    lengths = [300, 90, 512]
    cache = Cache(31, [512] * 3, 2, (64, 64), torch.bfloat16, page_size)
    cache.seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
    q = queries(3, 64, 4, 64, torch.bfloat16)
    out = torch.empty_like(q)
    call = lambda: cache.attend(q, causal=True, out=out)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(4):
        q.copy_(torch.randn_like(q))
        cache.seqlens.copy_(torch.tensor([n - 17 * step for n in lengths], dtype=torch.int32))
        graph.replay()
        again, _ = cache.attend(q, causal=True)
        assert torch.equal(bits(out), bits(again)), f"step {step}"
        for b, n in enumerate(cache.seqlens.tolist()):
            k, v = (x[b, :n][None].transpose(1, 2) for x in (torch.stack(cache.k), torch.stack(cache.v)))
            alone = rapt.attention(q[b : b + 1].transpose(1, 2), k, v, causal="bottom_right")
            assert torch.equal(bits(out[b]), bits(alone[0].transpose(0, 1))), f"step {step}, sequence {b}"
