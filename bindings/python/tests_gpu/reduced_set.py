"""Every kernel that the device selects, on small problems, for NVIDIA's checker: a minute or two under it.

    compute-sanitizer --tool racecheck --error-exitcode 1 python bindings/python/tests_gpu/reduced_set.py
    compute-sanitizer --tool memcheck --error-exitcode 1 python bindings/python/tests_gpu/reduced_set.py
"""

import math
from collections import Counter

import torch

import rapt

KERNELS = Counter()


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def attend(q, k, v, **options):
    KERNELS[rapt.explain(q, k, v, **options).kernel] += 1
    return rapt.attention(q, k, v, **options)


def prefill(dtype, dim, dim_v):
    q, k, v = normal(1, 4, 200, dim, dtype=dtype), normal(1, 2, 300, dim, dtype=dtype), normal(1, 2, 300, dim_v, dtype=dtype)
    seen = torch.rand(1, 1, 200, 300, device="cuda") > 0.5
    seen[..., 128:256] = False
    attend(q, k, v)
    attend(q, k, v, causal="bottom_right", return_lse=True)
    attend(q[:, :, :20], k, v, window=(50, 3), causal="bottom_right")
    attend(q, k, v, mask=seen)
    attend(q, k, v, mask=normal(1, 4, 200, 300, dtype=dtype))
    attend(q, k, v, softcap=20.0, sinks=torch.randn(4, device="cuda").to(dtype))
    v = v.clone()
    v[:, :, 7] = math.nan
    seen[..., 7] = False
    assert bool(attend(q, k, v, mask=seen).isfinite().all())


def decode(dtype, dim, q_len, kv_len, causal):
    q, k, v = normal(2, 8, q_len, dim, dtype=dtype), normal(2, 2, kv_len, dim, dtype=dtype), normal(2, 2, kv_len, dim, dtype=dtype)
    attend(q, k, v, causal=causal)
    seen = torch.rand(2, 1, q_len, kv_len, device="cuda") > 0.3
    v[:, :, kv_len - 1] = math.nan
    seen[..., kv_len - 1] = False
    assert bool(attend(q, k, v, causal=causal, mask=seen).isfinite().all())


def main():
    torch.manual_seed(0)
    for dtype, dim, dim_v in [
        (torch.bfloat16, 64, 64),
        (torch.bfloat16, 128, 128),
        (torch.float16, 256, 256),
        (torch.bfloat16, 192, 128),
        (torch.float16, 72, 72),
        (torch.float32, 128, 128),
        (torch.float32, 64, 64),
        (torch.bfloat16, 512, 512),
        (torch.float16, 320, 264),
        (torch.float32, 512, 300),
        (torch.float64, 40, 40),
    ]:
        prefill(dtype, dim, dim_v)
    # Rows that are no 16 bytes apart, and the last dimension in steps of two.
    odd, stepped = normal(1, 4, 300, 67)[..., 1:65], normal(1, 4, 300, 128)[..., ::2]
    attend(odd, odd, odd, causal=True)
    attend(stepped, stepped, stepped)
    # Blocks that work off many items.
    many = normal(4, 40, 200, 64)
    attend(many, many, many, causal=True)
    for dim in (64, 128, 256):
        decode(torch.bfloat16, dim, 1, 300, None)
        decode(torch.float16, dim, 1, 9000, None)
        decode(torch.bfloat16, dim, 4, 5000, "bottom_right")
    decode(torch.float32, 64, 1, 3000, None)
    torch.cuda.synchronize()
    assert set(KERNELS) == {"forward", "decode", "generic"}, KERNELS
    print(f"reduced set: {sum(KERNELS.values())} calls, {dict(KERNELS)}")


if __name__ == "__main__":
    main()
