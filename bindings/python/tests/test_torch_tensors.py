"""The native module on torch tensors: what it proves, what it allocates, and gradients. (rapt.torch has its own tests.)"""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import rapt
from reference import assert_close, assert_lse_close, reference, to_f64, torch_peers
from rapt import _native

torch = pytest.importorskip("torch")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_answers_in_kind_device_and_dtype(dtype):
    q, k, v = randn(2, 4, 9, 8, dtype=dtype), randn(2, 2, 11, 8, dtype=dtype), randn(2, 2, 11, 6, dtype=dtype)
    out, lse = _native.attention(q, k, v, causal=True, return_lse=True)
    assert type(out) is torch.Tensor and out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected, expected_lse = reference(q, k, v, causal=True)
    assert_close(out, expected, dtype, torch_peers(q, k, v, causal=True))
    assert_lse_close(lse, expected_lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_run_into_fills_any_strides_and_torch_sdpa_those_it_is_told(dtype):
    q, k = randn(2, 4, 9, 8, dtype=dtype), randn(2, 2, 11, 8, dtype=dtype)
    expected = _native.attention(q, k, k)
    storage = torch.zeros(2, 9, 4, 16, dtype=dtype)
    out = storage[..., ::2].transpose(1, 2)
    lse = torch.zeros(9, 4, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32).permute(2, 1, 0)
    assert _native.run_into(q, k, k, out, lse) is None
    assert torch.equal(out, expected) and not storage[..., 1::2].any()
    assert_lse_close(lse, reference(q, k, k)[1], dtype)
    new = _native.torch_sdpa(q, k, k, None, False, None, True, None)
    assert torch.equal(new, expected)
    transposed = _native.torch_sdpa(q, k, k, None, False, None, True, "bshd")
    assert torch.equal(transposed, expected) and transposed.transpose(1, 2).is_contiguous()


def test_torch_sdpa_broadcasts_what_pytorch_broadcasts():
    stock = torch.nn.functional.scaled_dot_product_attention
    shapes = [
        ((3, 2, 4, 5, 8), (1, 4, 6, 8), (2, 4, 6, 7)),
        ((1, 4, 5, 8), (3, 4, 6, 8), (3, 1, 6, 8)),
        ((4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
        ((5, 8), (6, 8), (6, 8)),
        ((2, 1, 2, 3, 5, 8), (1, 3, 2, 3, 6, 8), (2, 3, 2, 1, 6, 8)),
        ((0, 2, 4, 5, 8), (0, 2, 4, 6, 8), (1, 2, 4, 6, 8)),
    ]
    for shapes_qkv in shapes:
        q, k, v = (randn(*shape, seed=n) for n, shape in enumerate(shapes_qkv))
        for causal in (False, True):
            expected = stock(q, k, v, is_causal=causal)
            out = _native.torch_sdpa(q, k, v, None, causal, None, False, None)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        lead = expected.shape[:-2]
        for mask_shape in [(5, 6), (*lead, 5, 6), (*[1] * len(lead), 1, 6)]:
            mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(1)) < 0.6
            mask[..., 0] = True  # PyTorch's answer to a row without keys is another question
            expected = stock(q, k, v, attn_mask=mask)
            out = _native.torch_sdpa(q, k, v, mask, False, None, False, None)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_extents_are_proven_by_the_storage():
    x = torch.zeros(4 * 16)
    view = x.as_strided((1, 1, 4, 16), (64, 64, 16, 1))
    assert _native.attention(view, view, view).shape == (1, 1, 4, 16)
    # A storage shrunk behind the view's back: PyTorch would read past its end.
    q = torch.zeros(1, 1, 4, 16)
    x.untyped_storage().resize_(4 * 40)
    with pytest.raises(rapt.LayoutError, match=r"its storage holds 0\.\.160"):
        _native.attention(q, view, q)
    storage_view = torch.zeros(100)[36:].view(1, 1, 4, 16)
    assert not _native.attention(storage_view, storage_view, storage_view).any()


def test_unusual_tensors_are_read_or_refused():
    q = randn(1, 2, 5, 8)
    expected = _native.attention(q, q, q)
    with torch.no_grad():
        assert torch.equal(_native.attention(torch.nn.Parameter(q), q, q), expected)
    with torch.inference_mode():
        inside = randn(1, 2, 5, 8)
        assert torch.equal(_native.attention(inside, inside, inside), expected)
    lazy = torch.complex(q, q).conj().imag
    assert lazy.is_neg()
    with pytest.raises(rapt.LayoutError, match="resolve_neg"):
        _native.attention(lazy, q, q)
    with pytest.raises(rapt.UnsupportedDtypeError, match="complex64"):
        _native.attention(*[torch.complex(q, q)] * 3)
    with pytest.raises(rapt.LayoutError):
        _native.attention(q.to_sparse(), q, q)
    with pytest.raises(rapt.DeviceError, match="meta"):
        _native.attention(q.to("meta"), q, q)
    quantized = torch.quantize_per_tensor(q, 0.1, 0, torch.qint8)
    with pytest.raises(rapt.RaptError):
        _native.attention(quantized, quantized, quantized)
    if hasattr(torch, "int4"):
        with pytest.raises(rapt.RaptError, match="int4"):
            x = torch.empty(1, 1, 2, 2, dtype=torch.uint8).view(torch.int4)
            _native.attention(x, x, x)


def test_gradients_are_never_dropped_in_silence():
    q = randn(1, 2, 5, 8)
    learnt = randn(1, 2, 5, 8).requires_grad_()
    for args in [(learnt, q, q), (q, learnt, q), (q, q, learnt)]:
        assert _native.attention(*args).requires_grad
        assert _native.scaled_dot_product_attention(*args).requires_grad
        with pytest.raises(rapt.UnsupportedError, match=r"with torch\.no_grad\(\):"):
            _native.attention_backward(q, *args, q, q[..., 0])
        with torch.no_grad():
            assert not _native.attention(*args).requires_grad
    assert _native.attention(q, q, q, mask=torch.zeros(5, 5, requires_grad=True)).requires_grad
    with pytest.raises(rapt.UnsupportedError):
        _native.attention(q, q, q, out=torch.zeros(1, 2, 5, 8, requires_grad=True))


def test_a_default_device_does_not_reach_in():
    q = randn(1, 2, 5, 8)
    with torch.device("meta"):
        out = _native.attention(q, q, q)
    assert out.device.type == "cpu"


def test_torchs_threads_are_used_and_its_number_obeyed():
    q = randn(1, 8, 256, 32)
    expected = _native.attention(q, q, q)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert _native.explain(q, q, q).threads == threads
            assert torch.equal(_native.attention(q, q, q), expected)
            with rapt.Context(threads=4) as context:
                assert context.explain(q, q, q).threads == 4
                assert torch.equal(context.attention(q, q, q), expected)
    finally:
        torch.set_num_threads(before)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10) and sys.platform == "linux":
        assert _native.shares_torch_pool()


def test_no_tensor_is_kept_alive():
    q = randn(1, 2, 5, 8)
    before = sys.getrefcount(q)
    for _ in range(5):
        out = _native.attention(q, q, q, return_lse=True)
        _native.torch_sdpa(q, q, q, None, False, None, False, None)
        with pytest.raises(rapt.ShapeError):
            _native.attention(q, q[..., :3], q)
    del out
    gc.collect()
    assert sys.getrefcount(q) == before


def test_a_tensor_of_the_reference_in_f64_stays_exact():
    q = randn(1, 1, 3, 4, dtype=torch.float64)
    out = _native.attention(q, q, q)
    np.testing.assert_allclose(to_f64(out), reference(q, q, q)[0], rtol=1e-14)


def test_it_works_where_torch_is_imported_after_rapt():
    code = (
        "import rapt, sys; assert 'torch' not in sys.modules\n"
        "import numpy as np; x = np.ones((1, 1, 2, 2), np.float32); rapt.attention(x, x, x)\n"
        "import torch; t = torch.ones(1, 1, 2, 2); print(rapt.attention(t, t, t).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "4.0"
