"""The gradient kernels that an H200 selects, on small problems, for NVIDIA's checker: seconds under it once they are compiled.

    compute-sanitizer --tool memcheck --error-exitcode 1 python bindings/python/tests_gpu/reduced_set_gradients.py
"""

import itertools
import sys

import torch

import rapt.torch  # noqa: F401 - it registers the ops

OPS = torch.ops.rapt
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"


def normal(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def dense(dtype, dim, lengths, heads, mask=None, **words):
    (q_len, kv_len), (q_heads, kv_heads) = lengths, heads
    q = normal(2, q_heads, q_len, dim, dtype=dtype)
    k, v = (normal(2, kv_heads, kv_len, dim, dtype=dtype) for _ in range(2))
    if mask is not None:
        words["mask"] = mask
    out, lse = OPS.attention_lse(q, k, v, **words)
    wanted = [True, True, True, mask is not None and mask.dtype != torch.bool, False]
    OPS.attention_backward(torch.randn_like(out), None, q, k, v, out, lse, wanted, **words)


def packed(dtype, dims, lengths, heads, **words):
    at = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    (dim, dim_v), (q_heads, kv_heads), rows = dims, heads, sum(lengths)
    q, k, v = normal(rows, q_heads, dim, dtype=dtype), normal(rows, kv_heads, dim, dtype=dtype), normal(rows, kv_heads, dim_v, dtype=dtype)
    out, lse = OPS.varlen_attention_lse(q, k, v, at, at, **words)
    OPS.varlen_attention_backward(torch.randn_like(out), None, q, k, v, out, lse, at, at, [True, True, True, False], **words)


def main():
    torch.manual_seed(0)
    half = torch.bfloat16
    for dim in (64, 96, 128, 256):
        packed(half, (dim, dim), [70, 1, 0, 129, 300], (4, 2), causal="bottom_right")
        packed(half, (dim, dim), [300, 5, 64], (2, 2))
    packed(torch.float16, (128, 128), [3] * 40 + [200], (2, 2), softcap=5.0)
    packed(half, (63, 63), [70, 1, 0, 129], (2, 2))
    packed(half, (200, 256), [70, 1, 129], (2, 1))
    dense(half, 128, (300, 333), (4, 2), causal="top_left")
    dense(half, 64, (300, 333), (4, 4), torch.rand(1, 1, 300, 333, device=DEVICE) > 0.3)
    dense(half, 64, (300, 333), (4, 4), normal(2, 1, 300, 333, dtype=half))
    dense(half, 128, (130, 77), (2, 2), softcap=5.0)
    dense(half, 128, (300, 300), (2, 2), causal="top_left", window_left=100)
    dense(torch.float32, 128, (130, 133), (2, 2))
    dense(half, 128, (130, 133), (2, 2), dropout_p=0.4, dropout_draw=torch.tensor([1, 2]))
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
