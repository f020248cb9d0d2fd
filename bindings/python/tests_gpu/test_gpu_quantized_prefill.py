"""Many queries over codes on the GPU: each code becomes a number of 16 bits, and factors that it does not hold are multiplied elsewhere."""

import math

import pytest
import torch
from gpu_reference import ZOO, judge
from test_gpu_quantized import FORMATS, OWN_BLOCKS, check, elsewhere, granularities, on_gpu, run, tensors

import rapt

TYPES = [torch.bfloat16, torch.float16]
NAMES = [str(dtype).removeprefix("torch.") for dtype in TYPES]


def is_on_tensor_cores(dtype, format, granularity):
    """What docs/internals/cuda.md says."""
    if format == "uint8" and granularity in ("channel", "block"):
        return False
    if dtype == torch.float16:
        return format == "nvfp4" or (format not in OWN_BLOCKS and granularity not in ("channel", "block"))
    return dtype == torch.bfloat16


def kernel(q, k, v, **options):
    return rapt.explain(q, k, v, **options).kernel


def check_on_tensor_cores(q, k, v, numbers, **options):
    assert kernel(q, k, v, **options) == "forward"
    return check(q, k, v, numbers, **options)


def quantized(x, format):
    """On the GPU, with factors of tokens or its own, and its numbers."""
    return on_gpu(x, format, None if format in OWN_BLOCKS else "token")


# (q, key heads, kv_len, dim_v): whole tiles and tails, grouped, narrow and wide values, odd and wide head dims.
SHAPES = [
    ((2, 8, 200, 128), 2, 700, 128),
    ((1, 4, 130, 64), 4, 97, 128),
    ((1, 2, 17, 128), 2, 1, 64),
    ((2, 2, 65, 192), 1, 333, 128),
    ((1, 2, 150, 256), 2, 400, 256),
    ((1, 3, 129, 96), 3, 530, 80),
]


@pytest.mark.parametrize("dtype", TYPES, ids=NAMES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_granularity(format, dtype):
    for n, (granularity, block_size) in enumerate(granularities(format)):
        q, k, v = tensors(20 + n, dtype, *SHAPES[0])
        (keys, k), (values, v) = on_gpu(k, format, granularity, block_size), on_gpu(v, format, granularity, block_size)
        served = kernel(q, keys, values)
        assert served == ("forward" if is_on_tensor_cores(dtype, format, granularity) else "generic"), (granularity, block_size)
        for options in ({}, {"causal": "bottom_right"}):
            try:
                check(q, keys, values, (k, v), **options)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{granularity} {block_size} {options}") from error


@pytest.mark.parametrize("format", FORMATS)
def test_shapes(format):
    for seed, shape in enumerate(SHAPES[1:]):
        if shape[-1] % 32 and format in ("mxfp8", "mxfp4"):
            continue
        q, k, v = tensors(30 + seed, torch.bfloat16, *shape)
        (keys, k), (values, v) = quantized(k, format), quantized(v, format)
        check_on_tensor_cores(q, keys, values, (k, v))
        check_on_tensor_cores(q, keys, values, (k, v), causal="top_left")


def test_odd_head_dims():
    for format in ("int8", "int4", "e4m3fn", "e5m2", "uint8"):
        q, k, v = tensors(36, torch.bfloat16, (1, 4, 70, 34), 2, 150, 50)
        (keys, k), (values, v) = quantized(k, format), quantized(v, format)
        check_on_tensor_cores(q, keys, values, (k, v))


def test_formats_of_k_and_v_that_differ():
    q, k, v = tensors(37, torch.bfloat16, *SHAPES[0])
    for of_k, of_v in [("int8", "nvfp4"), ("mxfp8", "int4"), ("int4", "mxfp4"), ("nvfp4", "e5m2"), ("uint8", "e4m3fn")]:
        (keys, k_numbers), (values, v_numbers) = quantized(k, of_k), quantized(v, of_v)
        check_on_tensor_cores(q, keys, values, (k_numbers, v_numbers), causal="bottom_right")
    # As KIVI has them.
    (keys, k_numbers), (values, v_numbers) = on_gpu(k, "int4", "channel"), on_gpu(v, "int4", "token")
    check_on_tensor_cores(q, keys, values, (k_numbers, v_numbers))


@pytest.mark.parametrize("dtype", TYPES, ids=NAMES)
def test_few_keys_and_small_values(dtype):
    """A row of one key is its value, which weights with factors in them must not round: tokens of few and of many columns."""
    for seed, (kv_len, dim_v) in enumerate([(1, 16), (1, 128), (2, 16), (3, 64), (40, 16)]):
        for format in ("int8", "int4", "e4m3fn"):
            q, k, v = tensors(40 + seed, dtype, (1, 2, 20, 64), 2, kv_len, dim_v)
            (keys, k), (values, v) = quantized(k, format), quantized(v * 1e-3, format)
            check_on_tensor_cores(q, keys, values, (k, v))
            check_on_tensor_cores(q, keys, values, (k, v), causal="top_left")


@pytest.mark.parametrize("dtype", TYPES, ids=NAMES)
def test_large_scores(dtype):
    for format, granularity in [("int8", "token"), ("int8", "head"), ("e4m3fn", "token"), ("nvfp4", None)]:
        q, k, v = tensors(46, dtype, (1, 4, 150, 128), 2, 900, 128)
        (keys, k), (values, v) = on_gpu(k, format, granularity), on_gpu(v, format, granularity)
        for scale in (0.5, 3.0):
            check_on_tensor_cores(q, keys, values, (k, v), scale=scale)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pair", [("nvfp4", "int4"), ("int8", "int8"), ("e4m3fn", "mxfp8")], ids=str)
def test_masks_windows_sinks_and_slopes(mask_dtype, pair):
    q, k, v = tensors(47, torch.bfloat16, (2, 8, 100, 128), 2, 300, 128)
    (keys, k), (values, v) = (quantized(x, format) for x, format in zip((k, v), pair))
    mask = torch.rand(2, 1, 100, 300, device="cuda") < 0.6
    if mask_dtype != torch.bool:
        mask = torch.where(mask, torch.randn(mask.shape, device="cuda"), -math.inf).to(mask_dtype)
    check_on_tensor_cores(q, keys, values, (k, v), mask=mask)
    mask[1, :, 2] = False if mask_dtype == torch.bool else -math.inf
    check_on_tensor_cores(q, keys, values, (k, v), mask=mask)
    check_on_tensor_cores(q, keys, values, (k, v), causal="bottom_right", window=(100, 0))
    sinks = torch.randn(8, device="cuda", dtype=torch.float32)
    slopes = torch.rand(8, device="cuda", dtype=torch.float32)
    check_on_tensor_cores(q, keys, values, (k, v), sinks=sinks, alibi_slopes=slopes, softcap=20.0)
    check_on_tensor_cores(q, keys, values, (k, v), sinks=sinks, scale=-0.3)


@pytest.mark.parametrize("format", FORMATS)
def test_strides_and_neighbours_change_no_bit(format):
    for granularity, block_size in granularities(format):
        q, k, v = tensors(48, torch.bfloat16, (3, 4, 70, 64), 2, 200, 64)
        keys, values = on_gpu(k, format, granularity, block_size)[0], on_gpu(v, format, granularity, block_size)[0]
        out, _ = run(q, keys, values)
        for how in ("every other element", "row of a wider one"):
            other, _ = run(ZOO["sbhd"](q), elsewhere(keys, how), elsewhere(values, how))
            assert torch.equal(out.view(torch.int16), other.contiguous().view(torch.int16)), (granularity, block_size, how)
        other, _ = run(ZOO["off by one"](q), keys, values)
        assert torch.equal(out.view(torch.int16), other.contiguous().view(torch.int16)), (granularity, block_size)


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2", "mxfp8"])
@pytest.mark.parametrize("dtype", TYPES, ids=NAMES)
def test_codes_that_are_not_finite(format, dtype):
    """NaN and infinities behind a mask reach nothing, those that are attended reach their rows, and other rows keep their bits."""
    q, k, v = tensors(49, dtype, (2, 4, 40, 64), 2, 300, 64)
    for granularity in ("token", "channel", "head") if format != "mxfp8" else (None,):
        keys, values = on_gpu(k, format, granularity)[0], on_gpu(v, format, granularity)[0]
        mask = torch.ones(2, 1, 40, 300, dtype=torch.bool, device="cuda")
        mask[:, :, :30, 250:] = False
        plain, _ = run(q, keys, values, mask=mask)
        odd = [0x7F, 0x7C, 0xFC] if format == "e5m2" else [0x7F, 0xFF]
        for at, code in enumerate(odd):
            values.codes.view(torch.uint8)[:, :, 260 + at, 5 + at] = code
            keys.codes.view(torch.uint8)[1, :, 290 + at, 3 + at] = code
        numbers = [x.cuda() for x in (rapt.Quantized(
            c.codes.cpu(), c.scale.cpu(), format=format, shape=c.shape, granularity=c.granularity, block_size=c.block_size
        ).dequantize() for c in (keys, values))]
        out = check(q, keys, values, numbers, mask=mask)
        assert torch.equal(out[:, :, :30], plain[:, :, :30]), "masked codes changed a row"
        assert not out[:, :, 30:].isfinite().all()


def test_factors_of_tokens_that_lie_far_apart():
    for heads, format, dtype in [(8, "int4", torch.bfloat16), (16, "int8", torch.float16), (4, "e4m3fn", torch.bfloat16)]:
        q, k, v = tensors(50, dtype, (2, heads, 50, 64), 1, 500, 64)
        keys, values = on_gpu(k, format, "token")[0], on_gpu(v, format, "token")[0]
        # As large as results of float16 may be.
        values.scale.mul_(2.0 ** torch.randint(-40, 20 if dtype == torch.bfloat16 else 10, values.scale.shape, device="cuda"))
        values.scale[:, :, ::7] *= -1
        values.scale[1, :, ::5] = 0
        keys.scale[:, :, ::3] *= -1
        numbers = [rapt.Quantized(
            c.codes.cpu(), c.scale.cpu(), format=format, shape=c.shape, granularity="token"
        ).dequantize().cuda() for c in (keys, values)]
        check_on_tensor_cores(q, keys, values, numbers)


def test_values_whose_factors_are_all_zero_or_tiny():
    q, k, v = tensors(51, torch.bfloat16, (1, 4, 50, 64), 2, 200, 64)
    for by in (0.0, 2.0**-100, 2.0**80):
        keys, values = on_gpu(k, "int8", "token")[0], on_gpu(v, "int8", "token")[0]
        values.scale.mul_(by)
        out, lse = run(q, keys, values)
        numbers = rapt.Quantized(keys.codes.cpu(), keys.scale.cpu(), format="int8", shape=keys.shape, granularity="token").dequantize().cuda()
        of_values = rapt.Quantized(values.codes.cpu(), values.scale.cpu(), format="int8", shape=values.shape, granularity="token").dequantize().cuda()
        if by == 0:
            assert (out == 0).all()
            judge(torch.zeros_like(out), lse, q, numbers, of_values)
        else:
            judge(out, lse, q, numbers, of_values)


@pytest.mark.parametrize("format, granularity", [("int8", "token"), ("int8", "head"), ("int4", "channel"), ("e5m2", "tensor"), ("mxfp8", None), ("nvfp4", None)])
def test_a_factor_that_is_not_finite(format, granularity):
    """Of keys, it spoils whom it reaches; of values too, and infinities have the signs of their numbers."""
    q, k, v = tensors(52, torch.bfloat16, (1, 4, 40, 64), 2, 200, 64)
    for bad in (math.nan, math.inf, -math.inf):
        for of in ("k", "v"):
            keys, values = on_gpu(k, format, granularity)[0], on_gpu(v, format, granularity)[0]
            mask = torch.ones(1, 1, 40, 200, dtype=torch.bool, device="cuda")
            mask[..., :30, 150:] = False
            plain, _ = run(q, keys, values, mask=mask)
            x = keys if of == "k" else values
            if granularity == "token":
                x.scale[:, :, 160] = bad
            elif granularity == "head":
                x.scale[:, 1] = bad
            elif granularity == "channel":
                x.scale[:, :, :, 3] = bad
            elif granularity == "tensor":
                x.scale.fill_(bad)
            else:
                x.scale.view(torch.uint8)[:, :, 160] = 255 if format == "mxfp8" else 0x7F
            out, lse = run(q, keys, values, mask=mask)
            if granularity in ("token", None):
                assert torch.equal(out[:, :, :30], plain[:, :, :30]), "a masked key changed a row"
                assert not out[:, :, 30:].isfinite().any(-1).all()
            if granularity == "head":
                assert torch.equal(out[:, :2], plain[:, :2])
            numbers = [rapt.Quantized(
                c.codes.cpu(), c.scale.cpu(), format=format, shape=c.shape, granularity=c.granularity, block_size=c.block_size, global_scale=c.global_scale
            ).dequantize().cuda() for c in (keys, values)]
            if of == "v":
                judge(out, lse, q, *numbers, mask=mask)


# --- caches -----------------------------------------------------------------------------------------------------------------


class CodedCache:
    """A cache of codes of ragged sequences, in pages or not, and each sequence by itself."""

    def __init__(self, seed, lengths, kv_heads, dim, format, granularity, block_size, page_size):
        torch.manual_seed(seed)
        self.lengths, self.page_size, room = lengths, page_size, max(lengths)
        numbers = torch.randn(2, len(lengths), room, kv_heads, dim)
        # One call for all sequences: they share what is the tensor's.
        self.whole = [rapt.quantize(x, format, granularity=granularity, block_size=block_size) for x in numbers]
        self.seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.page_table = None
        if page_size:
            entries = -(-room // page_size)
            table = torch.randperm(len(lengths) * entries + 2)[: len(lengths) * entries].view(len(lengths), entries)
            self.table, self.page_table = table, table.to(torch.int32).cuda()
        self.caches = [self.on_gpu(x, self.paged) for x in self.whole]

    def paged(self, part):
        if not self.page_size:
            return part
        rows = part.contiguous()
        pages = torch.randint(0, 256, (self.table.numel() + 2, self.page_size, *rows[0, 0].shape), dtype=torch.uint8).to(rows.dtype)
        for b, n in enumerate(self.lengths):
            for j in range(0, n, self.page_size):
                of_page = rows[b, j : min(n, j + self.page_size)]
                pages[self.table[b, j // self.page_size], : len(of_page)] = of_page
        return pages

    @staticmethod
    def on_gpu(x, move):
        def part(codes):
            if codes is None or codes.dim() < 3:
                return None if codes is None else codes.cuda()
            if codes.element_size() > 1:
                return move(codes).cuda()
            return move(codes.view(torch.uint8)).cuda().view(codes.dtype)

        codes = part(x.codes)
        shape = (*codes.shape[:-1], codes.shape[-1] * (x.shape[-1] // x.codes.shape[-1]))
        kept = {"format": x.format, "granularity": x.granularity, "block_size": x.block_size, "global_scale": x.global_scale}
        return rapt.Quantized(codes, part(x.scale), shape=shape, zero_point=part(x.zero_point), **kept)

    def attend(self, q, **options):
        return rapt.attention_with_kvcache(
            q, *self.caches, cache_seqlens=self.seqlens, page_table=self.page_table, return_lse=True, **options
        )

    def check(self, q, judged, **options):
        out, lse = self.attend(q, **options)
        alone_options = {**options, "causal": "bottom_right"} if options.pop("causal", None) else options
        for b, n in enumerate(self.lengths):
            if n == 0:
                assert (out[b] == 0).all() and (lse[b] == -math.inf).all()
                continue
            part = lambda x, b=b, n=n: x[b : b + 1, :n].transpose(1, 2)  # noqa: E731
            keys, values = (self.on_gpu(x, part) for x in self.whole)
            of_q = q[b : b + 1].transpose(1, 2)
            alone, alone_lse = rapt.attention(of_q, keys, values, return_lse=True, **alone_options)
            assert torch.equal(out[b].view(torch.int16), alone[0].transpose(0, 1).contiguous().view(torch.int16)), f"sequence {b}"
            assert torch.equal(lse[b], alone_lse[0]), f"lse of sequence {b}"
            if b in judged:
                numbers = [x.dequantize()[b : b + 1, :n].transpose(1, 2).cuda() for x in self.whole]
                judge(alone, alone_lse, of_q, *numbers, **alone_options)
        return out, lse


@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 64])
@pytest.mark.parametrize(
    "format, granularity, block_size",
    [("int8", "token", None), ("uint8", "token", None), ("int4", "token", None), ("e4m3fn", "block", 32), ("mxfp4", None, None), ("nvfp4", None, None)],
)
def test_each_sequence_of_a_cache_has_the_bits_of_a_call_alone(format, granularity, block_size, page_size):
    cache = CodedCache(60, [700, 0, 1, 63, 513, 90], 2, 64, format, granularity, block_size, page_size)
    for q_len in (17, 150):
        q = torch.randn(6, q_len, 8, 64, device="cuda").to(torch.bfloat16)
        plan = rapt.explain(q.transpose(1, 2), *(cache.on_gpu(x, lambda x: x.transpose(1, 2)) for x in cache.whole))
        assert plan.kernel == "forward"
        cache.check(q, [3])
        cache.check(q, [4], causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
def test_options_over_a_cache(page_size):
    cache = CodedCache(61, [500, 3, 90], 2, 128, "int8", "token", None, page_size)
    q = torch.randn(3, 100, 4, 128, device="cuda").to(torch.bfloat16)
    sinks, slopes = torch.randn(4, device="cuda"), torch.rand(4, device="cuda")
    for options in [
        {"causal": True, "window": (100, 0)},
        {"softcap": 5.0, "scale": 0.3},
        {"causal": True, "alibi_slopes": slopes, "sinks": sinks},
    ]:
        cache.check(q, [2], **options)


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
@pytest.mark.parametrize("page_size", [16, 5])
def test_a_page_that_does_not_exist_spoils_the_rows_that_attend_to_it(page_size, format):
    granularity = "token" if format == "int8" else None
    cache = CodedCache(62, [800, 300, 64], 2, 64, format, granularity, None, page_size)
    q = torch.randn(3, 200, 4, 64, device="cuda").to(torch.bfloat16)
    for causal in (False, True):
        want, want_lse = cache.attend(q, causal=causal)
        for wrong in (-1, 10**6, 2**31 - 1):
            for at in (0, 800 // page_size // 2, (800 - 1) // page_size):
                kept = cache.page_table[0, at].clone()
                cache.page_table[0, at] = wrong
                out, lse = cache.attend(q, causal=causal)
                cache.page_table[0, at] = kept
                spoilt = max(0, at * page_size - 600) if causal else 0
                assert out[0, spoilt:].isnan().all() and lse[0, :, spoilt:].isnan().all(), f"entry {at} is {wrong}"
                assert torch.equal(out[0, :spoilt], want[0, :spoilt]) and torch.equal(lse[0, :, :spoilt], want_lse[0, :, :spoilt])
                assert torch.equal(out[1:], want[1:]) and torch.equal(lse[1:], want_lse[1:])


def test_a_length_that_the_cache_does_not_hold_spoils_its_sequence_alone():
    cache = CodedCache(63, [80, 30, 64], 2, 64, "e4m3fn", "token", None, 16)
    q = torch.randn(3, 100, 4, 64, device="cuda").to(torch.bfloat16)
    want, _ = cache.attend(q, causal=True)
    for wrong in (-1, 81, 2**31 - 1):
        cache.seqlens[1] = wrong
        out, lse = cache.attend(q, causal=True)
        assert out[1].isnan().all() and torch.equal(out[[0, 2]], want[[0, 2]]), wrong


def test_new_keys_become_codes_before_many_queries_attend_to_them():
    cache = CodedCache(64, [80, 0, 64], 2, 64, "int8", "token", None, None)
    cache.seqlens -= 40
    cache.seqlens.clamp_(min=0)
    q, k, v = torch.randn(3, 40, 4, 64, device="cuda").to(torch.bfloat16), *torch.randn(2, 3, 40, 2, 64, device="cuda")
    out = rapt.attention_with_kvcache(q, *cache.caches, k, v, cache_seqlens=cache.seqlens, causal=True)
    again = rapt.attention_with_kvcache(q, *cache.caches, cache_seqlens=cache.seqlens + 40, causal=True)
    assert torch.equal(out, again) and out.isfinite().all()
