"""Scales that lie swizzled on the GPU: the bits of the same scales in rows, whatever stands in the padding and however they are strided."""

import pytest
import torch
from gpu_reference import judge
from test_gpu_quantized import run, tensors

import rapt

FORMATS = ["mxfp8", "mxfp4", "nvfp4"]
NAN = 0xFF


def swizzled(scale):
    """Scales `[..., rows, columns]` as each head's flat matrix, with NaN in its padding."""
    *lead, rows, columns = scale.shape
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tiles = -(-columns // 4)
    places = (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    flat = torch.full((*lead, -(-rows // 128) * tiles * 512), NAN, dtype=torch.uint8, device=scale.device)
    flat[..., places.flatten().to(scale.device)] = scale.view(torch.uint8).flatten(-2)
    return flat.view(scale.dtype)


class Both:
    """An operand as codes, whose scales lie in rows and swizzled."""

    def __init__(self, x, format):
        host = rapt.quantize(x.float().cpu(), format)
        other = rapt.quantize(x.float().cpu(), format, scale_layout="swizzle_32_4_4")
        self.format, self.shape, self.global_scale = format, host.shape, host.global_scale
        self.codes, self.scale, self.numbers = host.codes.cuda(), host.scale.cuda(), host.dequantize().cuda()
        # As rapt.quantize has them, but for the padding.
        given, own = other.scale.view(torch.uint8), swizzled(host.scale).view(torch.uint8)
        assert given.shape == own.shape and torch.equal(given[own != NAN], own[own != NAN])

    def plain(self):
        return self.quantized(self.scale, "plain")

    def swizzled(self, move=lambda scale: scale):
        return self.quantized(move(swizzled(self.scale)), "swizzle_32_4_4")

    def quantized(self, scale, scale_layout):
        return rapt.Quantized(
            self.codes, scale, format=self.format, shape=self.shape, global_scale=self.global_scale, scale_layout=scale_layout
        )


def every_second(scale):
    x = scale.view(torch.uint8)
    wide = torch.full((*x.shape, 2), NAN, dtype=torch.uint8, device=x.device)
    wide[..., 0] = x
    return wide.view(scale.dtype)[..., 0]


def misaligned(scale):
    x = scale.view(torch.uint8)
    whole = torch.full((x.numel() + 7,), NAN, dtype=torch.uint8, device=x.device)
    whole[3 : 3 + x.numel()] = x.flatten()
    return whole[3 : 3 + x.numel()].view(x.shape).view(scale.dtype)


def same(a, b):
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b))


def check(q, k, v, kernel=None, **options):
    """That all ways to lay scales out have one result, which is right."""
    want = run(q, k.plain(), v.plain(), **options)
    judge(*want, q, k.numbers, v.numbers, **options)
    for move in (lambda scale: scale, every_second, misaligned):
        got = run(q, k.swizzled(move), v.swizzled(move), **options)
        assert same(got, want), move.__name__
    assert same(run(q, k.swizzled(), v.plain(), **options), want) and same(run(q, k.plain(), v.swizzled(), **options), want)
    if kernel is not None:
        plans = [rapt.explain(q, *codes, **options) for codes in ((k.plain(), v.plain()), (k.swizzled(), v.swizzled()))]
        assert [plan.kernel for plan in plans] == [kernel] * 2, str(plans[1])
    return want


# (q, key heads, kv_len, dim_v), dtype of q, kernel: few queries and many, grouped, with tails, few and odd numbers of blocks, and what no
# tensor core serves.
CASES = [
    (((2, 8, 1, 128), 2, 1500, 128), torch.bfloat16, "decode"),
    (((1, 4, 5, 64), 4, 129, 64), torch.float32, "decode"),
    (((1, 8, 2, 96), 2, 700, 32), torch.float16, "decode"),
    (((2, 8, 200, 128), 2, 700, 128), torch.bfloat16, "forward"),
    (((1, 3, 129, 96), 3, 333, 64), torch.bfloat16, "forward"),
    (((1, 2, 17, 64), 2, 1, 256), torch.bfloat16, "forward"),
    (((1, 4, 60, 64), 2, 150, 64), torch.float32, "generic"),
    (((1, 2, 3, 320), 1, 260, 64), torch.bfloat16, "generic"),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape, dtype, kernel", CASES, ids=lambda x: str(x).removeprefix("torch.").replace(" ", ""))
def test_swizzled_scales_have_the_bits_of_rows(format, shape, dtype, kernel):
    q, k, v = tensors(70, dtype, *shape)
    k, v = Both(k, format), Both(v, format)
    check(q, k, v, kernel)
    check(q, k, v, kernel, causal="bottom_right", window=(300, 0))


def test_q_that_is_codes():
    q, k, v = (Both(x, format) for x, format in zip(tensors(71, torch.float32, (2, 4, 40, 64), 2, 300, 64), FORMATS))
    options = {"out_dtype": torch.float32, "causal": "top_left"}
    want = run(q.plain(), k.plain(), v.plain(), **options)
    judge(*want, q.numbers, k.numbers, v.numbers, causal="top_left")
    assert same(run(q.swizzled(), k.swizzled(), v.swizzled(), **options), want)
    assert same(run(q.swizzled(every_second), k.plain(), v.swizzled(misaligned), **options), want)


@pytest.mark.parametrize("q_len", [2, 40])
@pytest.mark.parametrize("format", FORMATS)
def test_a_factor_that_is_not_finite_is_read_in_its_place(format, q_len):
    """Of these rows careful runs look up keys and values one by one."""
    q, k, v = tensors(72, torch.bfloat16, (1, 4, q_len, 64), 2, 600, 64)
    k, v = Both(k, format), Both(v, format)
    mask = torch.ones(1, 1, q_len, 600, dtype=torch.bool, device="cuda")
    mask[..., 0, 500:] = False
    before = run(q, k.plain(), v.plain(), mask=mask)
    for operand in (k, v):
        operand.scale.view(torch.uint8)[:, :, 510, 1] = 0x7F if format == "nvfp4" else NAN
        want = run(q, k.plain(), v.plain(), mask=mask)
        got = run(q, k.swizzled(), v.swizzled(), mask=mask)
        assert torch.equal(got[0].isnan(), want[0].isnan()) and torch.equal(got[0].nan_to_num(), want[0].nan_to_num())
        assert torch.equal(got[0][:, :, :1], before[0][:, :, :1]) and got[0][:, :, 1].isnan().any()


def test_sequences_of_lengths_of_their_own_refuse_them():
    q, k = torch.randn(3, 2, 64, device="cuda").to(torch.bfloat16), Both(torch.randn(128, 2, 64), "nvfp4").swizzled()
    with pytest.raises(rapt.OptionError, match="scale_layout"):
        rapt.attention_with_kvcache(q[None], k, k)
    ends = torch.tensor([0, 3], dtype=torch.int32, device="cuda"), torch.tensor([0, 128], dtype=torch.int32, device="cuda")
    with pytest.raises(rapt.OptionError, match="scale_layout"):
        rapt.varlen_attention(q, k, k, *ends)
