"""Codes of quantized formats on the GPU: against the f64 reference on the numbers that they stand for."""

import math

import pytest
import torch
from gpu_reference import ZOO, judge

import rapt

RAW = ["int8", "uint8", "e4m3fn", "e5m2"]
OWN_BLOCKS = ["mxfp8", "mxfp4", "nvfp4"]
FORMATS = [*RAW, "int4", *OWN_BLOCKS]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def granularities(format):
    if format in OWN_BLOCKS:
        return [(None, None)]
    plain = [(name, None) for name in ("tensor", "head", "token", "channel")]
    return [*plain, ("block", 16), ("block", 32)]


def on_gpu(x, format, granularity=None, block_size=None):
    """`x` quantized in host memory, its codes and scales on the GPU; and its numbers there."""
    host = rapt.quantize(x.float().cpu(), format, granularity=granularity, block_size=block_size)
    zero_point = None if host.zero_point is None else host.zero_point.cuda()
    codes = rapt.Quantized(
        host.codes.cuda(),
        host.scale.cuda(),
        format=format,
        shape=host.shape,
        granularity=host.granularity,
        block_size=host.block_size,
        zero_point=zero_point,
        global_scale=host.global_scale,
    )
    return codes, host.dequantize().cuda()


def elsewhere(codes, how):
    """The same codes and scales under other strides."""
    place = ZOO[how]

    def move(x):
        if x is None or x.dim() < 4:
            return x
        if x.element_size() == 1:
            return place(x.view(torch.uint8)).view(x.dtype) if how == "row-major" else moved_bytes(x)
        return place(x)

    def moved_bytes(x):
        b = x.view(torch.uint8)
        wide = torch.full((*b.shape[:-1], 2 * b.shape[-1] + 1), 0x7F, dtype=torch.uint8, device=b.device)
        wide[..., 1::2] = b
        return wide.view(x.dtype)[..., 1::2]

    return rapt.Quantized(
        move(codes.codes),
        move(codes.scale),
        format=codes.format,
        shape=codes.shape,
        granularity=codes.granularity,
        block_size=codes.block_size,
        zero_point=move(codes.zero_point),
        global_scale=codes.global_scale,
    )


def tensors(seed, dtype, q, kv_heads, kv_len, dim_v):
    torch.manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float32)  # noqa: E731
    batch, _, _, dim = q
    return make(*q).to(dtype), make(batch, kv_heads, kv_len, dim), make(batch, kv_heads, kv_len, dim_v)


def run(q, k, v, **options):
    before = [x.codes.clone() for x in (k, v) if isinstance(x, rapt.Quantized)]
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    after = [x.codes for x in (k, v) if isinstance(x, rapt.Quantized)]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(after, before)), "codes were written"
    return out, lse


def kernel(q, k, v, **options):
    return str(rapt.explain(q, k, v, **options))


def check(q, k, v, numbers, **options):
    out, lse = run(q, k, v, **options)
    judge(out, lse, q, *numbers, **options)
    return out


# (q, key heads, kv_len, dim_v): decoding with few and many keys, speculative, grouped, wide and odd head dims.
DECODING = [
    ((2, 8, 1, 128), 2, 1500, 128),
    ((1, 4, 5, 64), 4, 700, 64),
    ((1, 2, 1, 64), 2, 40, 128),
    ((1, 8, 2, 256), 2, 1100, 256),
    ((2, 3, 3, 96), 3, 530, 80),
]


def check_decoding(dtype, format, shape, granularity, block_size, **options):
    q, k, v = tensors(1, dtype, *shape)
    (keys, k), (values, v) = on_gpu(k, format, granularity, block_size), on_gpu(v, format, granularity, block_size)
    try:
        check(q, keys, values, (k, v), **options)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{shape} {granularity} {block_size} {options}") from error


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_over_codes_of_every_granularity(format):
    for granularity, block_size in granularities(format):
        check_decoding(torch.bfloat16, format, DECODING[0], granularity, block_size)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("format", FORMATS)
def test_decoding_of_other_dtypes(format, dtype):
    for granularity, block_size in granularities(format):
        check_decoding(dtype, format, DECODING[1], granularity, block_size)


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_of_other_shapes(format):
    for shape in DECODING[1:]:
        for granularity, block_size in granularities(format)[-1::-3]:
            check_decoding(torch.bfloat16, format, shape, granularity, block_size)
    options = {"causal": "bottom_right", "scale": 0.3, "softcap": 5.0}
    check_decoding(torch.bfloat16, format, DECODING[1], *granularities(format)[0], **options)


def test_tensor_cores_serve_decoding_and_the_rest_says_why():
    q, k, v = tensors(0, torch.bfloat16, (1, 8, 1, 128), 8, 600, 128)
    for format in FORMATS:
        keys, values = on_gpu(k, format)[0], on_gpu(v, format)[0]
        assert "decode" in kernel(q, keys, values) and "generic" not in kernel(q, keys, values), format
    long = q.expand(1, 8, 40, 128)
    assert "codes become numbers" in kernel(long, keys, values)
    assert "at most 16 queries of float32" in kernel(long.float(), keys, values)


@pytest.mark.parametrize("format", FORMATS)
def test_prefill_over_codes(format):
    for seed, dtype in enumerate(DTYPES):
        for granularity, block_size in granularities(format):
            q, k, v = tensors(seed, dtype, (2, 4, 70, 64), 2, 90, 32)
            (keys, k), (values, v) = on_gpu(k, format, granularity, block_size), on_gpu(v, format, granularity, block_size)
            check(q, keys, values, (k, v), causal="top_left")


def test_codes_of_one_operand_and_of_all():
    q, k, v = tensors(3, torch.float32, (1, 4, 3, 64), 2, 200, 64)
    (queries, q_numbers), (keys, k_numbers), (values, v_numbers) = (on_gpu(x, "int8", "token") for x in (q, k, v))
    check(q, keys, v, (k_numbers, v))
    check(q, k, values, (k, v_numbers))
    out = rapt.attention(queries, keys, values, out_dtype=torch.float32)
    judge(out, None, q_numbers, k_numbers, v_numbers)


@pytest.mark.parametrize("format", FORMATS)
def test_strides_and_neighbours_change_no_bit(format):
    for granularity, block_size in granularities(format):
        q, k, v = tensors(5, torch.bfloat16, (3, 4, 2, 64), 2, 1300, 64)
        keys, values = on_gpu(k, format, granularity, block_size)[0], on_gpu(v, format, granularity, block_size)[0]
        out, _ = run(q, keys, values)
        for how in ("every other element", "row of a wider one"):
            other, _ = run(ZOO["sbhd"](q), elsewhere(keys, how), elsewhere(values, how))
            assert torch.equal(out.view(torch.int16), other.contiguous().view(torch.int16)), (granularity, block_size, how)
        if granularity in ("tensor", None):
            continue
        parts = {"k_descale": keys.scale[2:], "v_descale": values.scale[2:]}
        if format == "uint8":
            parts |= {"k_zero_point": keys.zero_point[2:], "v_zero_point": values.zero_point[2:]}
        if format in RAW:
            alone = rapt.attention(q[2:], keys.codes[2:], values.codes[2:], **parts)
            assert torch.equal(alone, out[2:]), (granularity, block_size)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_masks_windows_sinks_and_slopes(mask_dtype):
    q, k, v = tensors(7, torch.bfloat16, (2, 8, 4, 128), 2, 900, 128)
    (keys, k), (values, v) = on_gpu(k, "nvfp4"), on_gpu(v, "int4", "token")
    mask = torch.rand(2, 1, 4, 900, device="cuda") < 0.6
    if mask_dtype != torch.bool:
        mask = torch.where(mask, torch.randn(mask.shape, device="cuda"), -math.inf).to(mask_dtype)
    check(q, keys, values, (k, v), mask=mask)
    mask[1, :, 2] = False if mask_dtype == torch.bool else -math.inf
    check(q, keys, values, (k, v), mask=mask)
    check(q, keys, values, (k, v), causal="bottom_right", window=(300, 0))
    sinks = torch.randn(8, device="cuda", dtype=torch.float32)
    slopes = torch.rand(8, device="cuda", dtype=torch.float32)
    check(q, keys, values, (k, v), sinks=sinks, alibi_slopes=slopes)


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_codes_that_are_not_finite(format, dtype):
    """NaN and infinities behind a mask reach nothing, those that are attended reach their rows, and other rows keep their bits."""
    q, k, v = tensors(9, dtype, (2, 4, 3, 64), 2, 700, 64)
    for granularity, block_size in [("token", None), ("channel", None), ("block", 32)]:
        keys, values = on_gpu(k, format, granularity, block_size)[0], on_gpu(v, format, granularity, block_size)[0]
        mask = torch.ones(2, 1, 3, 700, dtype=torch.bool, device="cuda")
        mask[:, :, :2, 650:] = False
        plain, _ = run(q, keys, values, mask=mask)
        odd = [0x7F, 0xFF] if format == "e4m3fn" else [0x7F, 0x7C, 0xFC]
        for at, code in enumerate(odd):
            values.codes.view(torch.uint8)[:, :, 660 + at, 5 + at] = code
            keys.codes.view(torch.uint8)[1, :, 690 + at, 3 + at] = code
        numbers = [x.cuda() for x in (rapt.Quantized(
            c.codes.cpu(), c.scale.cpu(), format=format, shape=c.shape, granularity=c.granularity, block_size=c.block_size
        ).dequantize() for c in (keys, values))]
        out = check(q, keys, values, numbers, mask=mask)
        assert torch.equal(out[:, :, :2], plain[:, :, :2]), "masked codes changed a row"
        assert not out[:, :, 2].isfinite().all()


def test_factors_of_tokens_that_lie_far_apart():
    for heads, format, dtype in [(8, "int4", torch.bfloat16), (16, "int8", torch.float16), (4, "e4m3fn", torch.bfloat16)]:
        q, k, v = tensors(10, dtype, (2, heads, 1, 64), 1, 1500, 64)
        keys, values = on_gpu(k, format, "token")[0], on_gpu(v, format, "token")[0]
        values.scale.mul_(2.0 ** torch.randint(-40, 20, values.scale.shape, device="cuda"))
        values.scale[:, :, ::7] *= -1
        values.scale[1, :, ::5] = 0
        numbers = [rapt.Quantized(
            c.codes.cpu(), c.scale.cpu(), format=format, shape=c.shape, granularity="token"
        ).dequantize().cuda() for c in (keys, values)]
        check(q, keys, values, numbers)


def test_a_factor_that_is_not_finite():
    q, k, v = tensors(11, torch.bfloat16, (1, 4, 2, 64), 2, 600, 64)
    for format in ("int8", "mxfp8"):
        granularity = "token" if format == "int8" else None
        keys, values = on_gpu(k, format, granularity)[0], on_gpu(v, format, granularity)[0]
        mask = torch.ones(1, 1, 2, 600, dtype=torch.bool, device="cuda")
        mask[..., 0, 500:] = False
        plain, _ = run(q, keys, values, mask=mask)
        for x in (keys, values):
            if format == "int8":
                x.scale[:, :, 510] = math.nan
            else:
                x.scale.view(torch.uint8)[:, :, 510] = 255
        out, _ = run(q, keys, values, mask=mask)
        assert torch.equal(out[:, :, :1], plain[:, :, :1]) and out[:, :, 1].isnan().all()


def test_refusals_leave_all_as_it_was():
    q, k, v = tensors(13, torch.bfloat16, (1, 2, 1, 64), 2, 64, 64)
    keys, values = on_gpu(k, "int8", "token")[0], on_gpu(v, "int8", "token")[0]
    with pytest.raises(rapt.UnsupportedDtypeError, match="k_descale"):
        rapt.attention(q, keys.codes, values.codes, v_descale=values.scale)
    with pytest.raises(rapt.RaptError):
        rapt.attention(q, keys.codes, values.codes, k_descale=keys.scale.cpu(), v_descale=values.scale)
    with pytest.raises(rapt.RaptError):
        rapt.attention(q.double(), keys, values)
    check(q, keys, values, tuple(rapt.Quantized(
        c.codes.cpu(), c.scale.cpu(), format="int8", shape=c.shape, granularity="token"
    ).dequantize().cuda() for c in (keys, values)))
