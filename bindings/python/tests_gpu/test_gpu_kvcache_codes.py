"""New keys into caches of codes on the GPU: the codes and the factors that the same call leaves in host memory, and no other byte touched."""

import pytest
import torch

import rapt

DEVICE = "cuda"
BATCH, HEADS, KV_HEADS = 4, 4, 2
LENGTHS = [37, 0, 5, 64]

FORMATS = [
    *[(format, "token", None) for format in ("int8", "uint8", "int4", "e4m3fn", "e5m2")],
    *[(format, "block", size) for format in ("int8", "uint8", "int4", "e4m3fn") for size in (8, 32)],
    ("int4", "block", 5),
    ("mxfp8", None, None),
    ("mxfp4", None, None),
    ("nvfp4", None, None),
]


def raw(x):
    return x.contiguous().view(torch.uint8)


def new_numbers(new, dim, dtype):
    """Of every size, with ties, zeros of both signs, a key of zeros, and subnormal numbers."""
    x = torch.randn(BATCH, new, KV_HEADS, dim) * torch.logspace(-3, 3, KV_HEADS * dim).view(KV_HEADS, dim)
    x[..., ::7] = x[..., ::7].round() * 0.5
    x[:, 0, 0, : dim // 2] = 0
    x[0, -1] = 0
    x[1, -1, :, ::2] = -0.0
    if dtype in (torch.float32, torch.float64):
        x[2, -1] *= 1e-42
        x[3, -1] *= 1e30
    return x.to(dtype)


class Coded:
    """A cache of codes whose every byte is random, in host memory; its parts as they lie."""

    def __init__(self, format, granularity, block_size, dim, page_size, most):
        self.format, self.page_size = format, page_size
        entries = -(-most // page_size) if page_size else 0
        blocks, rows = (BATCH * entries + 2, page_size) if page_size else (BATCH, most)
        self.shape = (blocks, rows, KV_HEADS, dim)
        # What quantize makes of as many numbers says the shapes and dtypes of the parts.
        like = rapt.quantize(torch.randn(self.shape), format, granularity=granularity, block_size=block_size) if granularity else rapt.quantize(
            torch.randn(self.shape), format
        )
        self.kept = {"granularity": like.granularity, "block_size": like.block_size, "global_scale": like.global_scale}
        if like.global_scale is not None:
            self.kept["global_scale"] = 0.375
        self.parts = [like.codes.clone(), like.scale.clone(), None if like.zero_point is None else like.zero_point.clone()]
        raw(self.parts[0])  # contiguous
        self.parts[0].view(torch.uint8).random_(0, 256)
        if format in ("e4m3fn", "e5m2", "mxfp8"):
            self.parts[0].view(torch.uint8).bitwise_and_(0x3F)  # finite
        self.table = torch.randperm(blocks)[: BATCH * entries].view(BATCH, entries).to(torch.int32) if page_size else None

    def on(self, device):
        """A copy there."""
        move = lambda x: None if x is None else raw_moved(x, device)  # noqa: E731
        codes, scale, zero_point = map(move, self.parts)
        of = rapt.Quantized(codes, scale, format=self.format, shape=self.shape, zero_point=zero_point, **self.kept)
        return of, [x for x in (codes, scale, zero_point) if x is not None]


def raw_moved(x, device):
    return x.clone().view(torch.uint8).to(device).view(x.dtype)


def call(device, k_cache, v_cache, k, v, q, lengths, page_table, **options):
    on = lambda x: None if x is None else x.to(device)  # noqa: E731
    return rapt.attention_with_kvcache(
        on(q), k_cache, v_cache, on(k), on(v), cache_seqlens=on(lengths), page_table=on(page_table), causal=True, **options
    )


@pytest.mark.parametrize("page_size", [None, 1, 16, 6])
@pytest.mark.parametrize("format, granularity, block_size", FORMATS)
def test_codes_and_factors_are_those_of_the_host(format, granularity, block_size, page_size):
    torch.manual_seed(40)
    for dim, new, dtype in [(64, 1, torch.bfloat16), (64, 40, torch.float16), (32, 3, torch.float32), (64, 5, torch.float64)]:
        most = max(LENGTHS) + new
        caches = [Coded(format, granularity, block_size, dim, page_size, most) for _ in range(2)]
        caches[1].table = caches[0].table
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        q = torch.randn(BATCH, new, HEADS, dim).to(torch.bfloat16)
        k, v = (new_numbers(new, dim, dtype) for _ in range(2))
        if format == "nvfp4":
            k, v = k.clamp(-900, 900), v.clamp(-900, 900)
        after = {}
        for device in ("cpu", DEVICE):
            (of_k, k_parts), (of_v, v_parts) = (cache.on(device) for cache in caches)
            call(device, of_k, of_v, k, v, q, lengths, caches[0].table)
            after[device] = [raw(x).cpu() for x in (*k_parts, *v_parts)]
        before = [raw(x) for cache in caches for x in cache.parts if x is not None]
        for part, (host, gpu, old) in enumerate(zip(after["cpu"], after[DEVICE], before)):
            assert torch.equal(host, gpu), f"{format} {dtype} part {part}: {(host != gpu).sum()} of {host.numel()} bytes"
            assert not torch.equal(host, old)
        # And what was written is what is attended to.
        (of_k, _), (of_v, _) = (cache.on(DEVICE) for cache in caches)
        out = call(DEVICE, of_k, of_v, k, v, q, lengths, caches[0].table)
        again = call(DEVICE, of_k, of_v, None, None, q, lengths + new, caches[0].table)
        assert torch.equal(raw(out), raw(again))


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
def test_one_factor_for_all_stays_and_is_divided_by(format):
    torch.manual_seed(41)
    code = torch.float8_e4m3fn if format == "e4m3fn" else torch.float8_e5m2
    cache = [torch.zeros(BATCH, 80, KV_HEADS, 64, dtype=torch.uint8).view(code) for _ in range(2)]
    k, v = (torch.randn(BATCH, 2, KV_HEADS, 64) for _ in range(2))
    q, lengths = torch.randn(BATCH, 2, HEADS, 64).to(torch.bfloat16), torch.tensor(LENGTHS, dtype=torch.int32)
    after = {}
    for device in ("cpu", DEVICE):
        parts = [raw_moved(x, device) for x in cache]
        scale = torch.tensor(0.031, device=device)
        call(device, *parts, k, v, q, lengths, None, k_descale=scale, v_descale=scale)
        after[device] = [raw(x).cpu() for x in parts]
        assert scale.item() == torch.tensor(0.031).item()
    assert all(torch.equal(host, gpu) for host, gpu in zip(after["cpu"], after[DEVICE]))


@pytest.mark.parametrize("format", ["int8", "uint8", "int4", "mxfp4", "nvfp4", "e4m3fn", "e5m2", "mxfp8"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_number_without_a_code_spoils_the_rows_that_attend_to_it(format, odd):
    torch.manual_seed(42)
    granularity = None if format.startswith(("mx", "nv")) else "token"
    caches = [Coded(format, granularity, None, 64, 16, 80) for _ in range(2)]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    q = torch.randn(BATCH, 2, HEADS, 64).to(torch.bfloat16)
    k, v = (torch.randn(BATCH, 2, KV_HEADS, 64) for _ in range(2))
    outs = []
    for is_odd in (False, True):
        (of_k, _), (of_v, _) = (cache.on(DEVICE) for cache in caches)
        if is_odd:
            k[2, 1, :, 9] = odd
        outs.append(call(DEVICE, of_k, of_v, k, v, q, lengths, caches[0].table))
    good, bad = outs
    others = [0, 1, 3]
    assert torch.equal(raw(bad[others]), raw(good[others])) and torch.equal(raw(bad[2, 0]), raw(good[2, 0]))
    assert bad[2, 1].isnan().all() or (format == "e5m2" and odd == odd), "the last query sees the key"


def test_what_could_not_be_told_is_refused_and_nothing_is_written():
    cache = [torch.zeros(BATCH, 80, KV_HEADS, 64, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    k = torch.randn(BATCH, 1, KV_HEADS, 64, device=DEVICE)
    q, lengths = torch.randn(BATCH, 1, HEADS, 64, device=DEVICE).to(torch.bfloat16), torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    one = torch.tensor(0.1, device=DEVICE)
    of_head = torch.ones(BATCH, KV_HEADS, device=DEVICE)
    for scale, word in ((one, "one factor"), (of_head, "factors by head")):
        with pytest.raises(rapt.UnsupportedError, match=word):
            rapt.attention_with_kvcache(q, *cache, k, k, cache_seqlens=lengths, k_descale=scale, v_descale=scale)
    assert all((x == 0).all() for x in cache)


def test_a_page_that_does_not_exist_takes_no_codes():
    torch.manual_seed(43)
    caches = [Coded("int4", "token", None, 64, 16, 80) for _ in range(2)]
    table = caches[0].table.clone()
    table[0, LENGTHS[0] // 16] = 10**6
    (of_k, k_parts), (of_v, v_parts) = (cache.on(DEVICE) for cache in caches)
    lengths = torch.tensor([LENGTHS[0], -5, 10**6, LENGTHS[3]], dtype=torch.int32)
    k = torch.randn(BATCH, 1, KV_HEADS, 64)
    out = call(DEVICE, of_k, of_v, k, k, torch.randn(BATCH, 1, HEADS, 64).to(torch.bfloat16), lengths, table)
    assert out[:3].isnan().all() and out[3].isfinite().all()
    page, row = int(table[3, LENGTHS[3] // 16]), LENGTHS[3] % 16
    for cache, parts in zip(caches, (k_parts, v_parts)):
        for was, part in zip((x for x in cache.parts if x is not None), parts):
            was, part = raw(was), raw(part).cpu()
            was[page, row], part[page, row] = 0, 0
            assert torch.equal(was, part), "a byte beside the one new key was touched"
