"""Masks that hide whole tiles of keys, or change nothing in them: such tiles are passed over, or read without the mask.

Values are held against the reference (gpu_reference); bits, against the same problem with the mask placed otherwise, and with finite numbers where
nobody attends.
"""

import math

import pytest
import torch
from gpu_reference import judge

import rapt

Q_LEN, KV_LEN = 400, 1500


def some(*shape):
    """Three of ten masked."""
    return torch.rand(*shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda") > 0.3


def blocks(batch, q_len, kv_len):
    """Hidden in between, at an end for early queries, all keys for some; unchanged at the start for late ones."""
    seen = some(batch, 1, q_len, kv_len)
    seen[..., 200:1100] = False
    seen[:, :, :130, 1400:] = False
    seen[:, :, 130:, :200] = True
    seen[1, :, :300] = False
    return seen


def padding(batch, q_len, kv_len):
    """One row for all queries: keys to a position that cuts a tile, and from one."""
    del q_len
    keys = torch.arange(kv_len, device="cuda")
    return torch.stack([keys < 901, keys >= 700])[:batch, None, None]


def triangle(batch, q_len, kv_len):
    """A causal mask as a tensor."""
    return torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda").tril(kv_len - q_len).expand(batch, 1, q_len, kv_len)


def nothing(batch, q_len, kv_len):
    """No key for the first of the batch, every one for the second."""
    seen = torch.ones(batch, 1, q_len, kv_len, dtype=torch.bool, device="cuda")
    seen[0] = False
    return seen


def strip(batch, q_len, kv_len):
    """One key in all, in the last tile."""
    seen = torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool, device="cuda")
    seen[..., kv_len - 1] = True
    return seen


def placements(mask):
    """The same mask where 16 bytes can be read at a time, where they cannot, and with neighbours in other rows."""
    yield "contiguous", mask.contiguous()
    wider = torch.zeros(*mask.shape[:3], mask.shape[3] + 3, dtype=mask.dtype, device="cuda")
    wider[..., 1:-2] = mask
    yield "between others", wider[..., 1:-2]
    aligned = torch.zeros(*mask.shape[:3], -(-mask.shape[3] // 16) * 16, dtype=mask.dtype, device="cuda")
    aligned[..., : mask.shape[3]] = mask
    yield "rows of 16 bytes", aligned[..., : mask.shape[3]]
    yield "keys side by side", mask.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("pattern", [blocks, padding, triangle, nothing, strip], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["bool", "zeros", "numbers"])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"),
    [
        (torch.bfloat16, (2, 2), 64),
        (torch.float16, (4, 2), 128),
        (torch.bfloat16, (2, 1), 256),
        (torch.bfloat16, (2, 2), 80),
        (torch.float32, (2, 2), 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("q_len", [Q_LEN, 30])
def test_tiles_that_a_mask_hides_are_passed_over(pattern, kind, dtype, heads, dim, q_len):
    generator = torch.Generator("cuda").manual_seed(11)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").to(dtype)  # noqa: E731
    q, k, v = normal(2, heads[0], q_len, dim), normal(2, heads[1], KV_LEN, dim), normal(2, heads[1], KV_LEN, dim)
    seen = pattern(2, q_len, KV_LEN).clone()
    seen[..., 5] = False
    mask = seen
    if kind != "bool":
        bias = normal(*seen.shape) if kind == "numbers" else torch.zeros(seen.shape, dtype=dtype, device="cuda")
        mask = torch.where(seen, bias, -math.inf)
    want, want_lse = rapt.attention(q, k, v, mask=mask, return_lse=True)
    judge(want, want_lse, q, k, v, mask=mask)
    poisoned = k.clone(), v.clone()
    # Nobody attends key 5, nor what is hidden of every query of a batch.
    hidden = ~seen.expand(2, 1, q_len, KV_LEN).any(2)[:, :, :, None]
    poisoned[0].masked_fill_(hidden, math.nan)
    poisoned[1].masked_fill_(hidden, math.inf)
    for name, placed in placements(mask):
        for keys, values in ((k, v), poisoned):
            got, lse = rapt.attention(q, keys, values, mask=placed, return_lse=True)
            assert torch.equal(got, want), name
            assert torch.equal(lse, want_lse), name


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{"scale": -0.3}, {"scale": 0.0}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_masks_of_every_dtype_beside_scales_and_softcap(mask_dtype, options, dims):
    generator = torch.Generator("cuda").manual_seed(5)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)  # noqa: E731
    q, k, v = normal(2, 2, 200, dims[0]), normal(2, 2, 320, dims[0]), normal(2, 2, 320, dims[1])
    seen = blocks(2, 200, 320)
    mask = seen if mask_dtype == torch.bool else torch.where(seen, normal(*seen.shape), -math.inf).to(mask_dtype)
    out, lse = rapt.attention(q, k, v, mask=mask, return_lse=True, **options)
    judge(out, lse, q, k, v, mask=mask, **options)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_many_items_to_a_block_of_which_tiles_are_hidden(mask_dtype, dim):
    # Groups of warps must be of one mind about every tile, however far ahead they look: else they wait for one another for good.
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (torch.randn(2, 16, 2048, dim, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(3))
    seen = triangle(1, 2048, 2048).clone()
    seen[..., 300:700] = False
    mask = seen if mask_dtype == torch.bool else torch.zeros(seen.shape, dtype=mask_dtype, device="cuda").masked_fill(~seen, -math.inf)
    want, lse = rapt.attention(q, k, v, mask=mask, return_lse=True)
    judge(want[:, :2], lse[:, :2], q[:, :2], k[:, :2], v[:, :2], mask=mask)
    for _ in range(20):
        assert torch.equal(rapt.attention(q, k, v, mask=mask), want)


@pytest.mark.parametrize("kind", [None, torch.bool, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (64, 256), (96, 64), (128, 64), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
def test_many_items_of_one_tile_of_keys_and_of_several(kind, dims):
    # Groups of warps lend each other shared memory from item to item; here some have no rows, and items have one tile, two, three.
    generator = torch.Generator("cuda").manual_seed(11)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)  # noqa: E731
    # As long as head dims of 96 have their other tiles from, and q as long as decides who packs rows.
    long = [(150, 2100, 1, None), (150, 2100, 3, None)] if kind is None else []
    lengths = [*long, (64, 40, 1, None), (130, 90, 1, None), (200, 40, 1, None), (330, 270, 1, "top_left"), (300, 170, 1, None), (40, 200, 4, None)]
    for q_len, kv_len, group, causal in lengths:
        q, k, v = normal(1, 2 * group, q_len, dims[0]), normal(1, 2, kv_len, dims[0]), normal(1, 2, kv_len, dims[1])
        seen = some(1, 1, q_len, kv_len)
        seen[..., 48:129] = False
        mask = None if kind is None else seen if kind == torch.bool else torch.where(seen, normal(*seen.shape), -math.inf).to(kind)
        want, lse = rapt.attention(q, k, v, mask=mask, causal=causal, return_lse=True)
        judge(want, lse, q, k, v, mask=mask, causal=causal)
        for _ in range(5):
            got = rapt.attention(*(x.expand(400 if kv_len < 2000 else 30, -1, -1, -1) for x in (q, k, v)), mask=mask, causal=causal)
            assert torch.equal(got, want.expand_as(got)), (q_len, kv_len)


def test_more_items_to_a_block_than_it_can_note():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 64, device="cuda").to(torch.bfloat16) for _ in range(3))
    k[..., 5, :], v[..., 5, :] = math.nan, math.inf
    mask = torch.ones(1100, 1, 1, 64, dtype=torch.bool, device="cuda")
    mask[..., 5], mask[1::2] = False, False
    out = rapt.attention(*(x.expand(1100, 128, -1, -1) for x in (q, k, v)), mask=mask)
    want = rapt.attention(q, k, v, mask=mask[:1])
    assert torch.equal(out[::2], want.expand(550, 128, -1, -1)) and not out[1::2].any()
    assert bool(want.isfinite().all()) and bool(want.any())
