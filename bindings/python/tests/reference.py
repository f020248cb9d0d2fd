"""Tests' use of the reference (rapt._reference): on numpy arrays and torch tensors of any dtype, beside PyTorch's own results."""

import warnings

import numpy as np
from rapt import _reference
from rapt._reference import LSE_LIMIT, lse_errors


def to_f64(x):
    """The exact values of a numpy array (ml_dtypes bfloat16 too) or a torch tensor as a numpy f64 array."""
    if type(x).__module__.startswith("torch"):
        x = x.detach().cpu()
        return x.numpy() if x.dtype.is_floating_point is False else x.double().numpy()
    x = np.asarray(x)
    return x if x.dtype == np.bool_ else x.astype(np.float64)


def _exact(value):
    return value if value is None or isinstance(value, (str, bool, int, float, tuple)) else to_f64(value)


def reference(q, k, v, **options):
    """(out, lse) in f64. Arguments as rapt.attention's, on [batch, heads, len, head_dim]."""
    return _reference.attention(to_f64(q), to_f64(k), to_f64(v), **{name: _exact(value) for name, value in options.items()})


def flash_rounded(q, k, v, **options):
    """The same with a flash kernel's roundings, in f64: the peer where PyTorch has no kernel for an option."""
    dtype = str(q.dtype).removeprefix("torch.")
    options = {name: _exact(value) for name, value in options.items()}
    return _reference.flash_rounded(to_f64(q), to_f64(k), to_f64(v), dtype, **options)


def errors(got, expected):
    """(relative L2, worst row's relative L2)."""
    return _reference.errors(to_f64(got), to_f64(expected))[:2]


def assert_same_pattern(got, expected):
    """NaN, +inf and -inf stand in the same places."""
    got, expected = to_f64(got), to_f64(expected)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), err_msg="NaN in other places")
    np.testing.assert_array_equal(got == np.inf, expected == np.inf, err_msg="+inf in other places")
    np.testing.assert_array_equal(got == -np.inf, expected == -np.inf, err_msg="-inf in other places")


def assert_close(got, expected, dtype_name, peers=(), *, same_pattern=True):
    """`got` against the reference's `expected` by the tolerance rule of docs/reference/numerics.md. `peers` are PyTorch's results on the same
    inputs (math, flash); without any only the floor counts."""
    dtype_name = str(dtype_name).removeprefix("torch.")
    expected, got = to_f64(expected), to_f64(got)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    if same_pattern:
        assert_same_pattern(got, expected)
    limit, row_limit = _reference.limits(dtype_name, [to_f64(peer) for peer in peers], expected)
    error, row_error = errors(got, expected)
    assert error <= limit, f"relative L2 {error:.3g}, allowed {limit:.3g} ({dtype_name}, {len(peers)} peers)"
    assert row_error <= row_limit, f"worst row {row_error:.3g}, allowed {row_limit:.3g} ({dtype_name})"


def assert_lse_close(got, expected, dtype_name):
    """lse against the reference's: −inf and NaN in the same places, near it elsewhere."""
    got, expected = to_f64(got), to_f64(expected)
    assert_same_pattern(got, expected)
    off = lse_errors(got, expected)
    limit = LSE_LIMIT[str(dtype_name).removeprefix("torch.")]
    assert off.size == 0 or off.max() <= limit, f"lse off by {off.max():.3g}, allowed {limit:.3g}"


def to_torch(x, dtype=None):
    """A torch tensor with the exact values of `x` (any numpy array here, ml_dtypes bfloat16 too), or `x` itself."""
    import torch

    if isinstance(x, torch.Tensor) or x is None:
        return x
    x = np.asarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(x).view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x))


def torch_peers(q, k, v, *, mask=None, causal=None, scale=None, **options):
    """PyTorch's own results on the same inputs: math and flash where they serve the request, else `flash_rounded`.

    Run it while Rapt is not registered. Rows that PyTorch answers with NaN (fully masked) are left out by `errors`.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v, mask = to_torch(q), to_torch(k), to_torch(v), to_torch(mask)
    stock = causal in (None, False, True, "top_left") and not any(value is not None for value in options.values())
    stock = stock and (mask is None or not causal) and k.shape[2] > 0
    peers = []
    if stock:
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            try:
                with torch.no_grad(), sdpa_kernel([backend]), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # flash says why it does not serve a request
                    peers.append(
                        sdpa(
                            q, k, v, attn_mask=mask, is_causal=bool(causal), scale=scale,
                            enable_gqa=q.shape[1] != k.shape[1],
                        )  # fmt: skip
                    )
            except RuntimeError:
                pass  # this kernel does not serve the request
    if len(peers) < 2:
        peers.append(flash_rounded(q, k, v, mask=mask, causal=causal, scale=scale, **options))
    return peers


def random(rng, shape, dtype="float32", scale=1.0):
    """A numpy array of normal numbers in this dtype (name)."""
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    return (rng.standard_normal(shape) * scale).astype(dtype)
