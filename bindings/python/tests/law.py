"""The law in numpy f64, and the tolerance by which every result is judged against it.

    s = softcap(q·k · scale) + bias, then masks, then softmax (with an optional sink logit per head), then · v

All arrays are [batch, heads, len, head_dim]. One row at a time decides about keys: a masked key is never multiplied.
"""

import itertools
import warnings

import numpy as np

# Beside 1.1 times PyTorch's own error, a result may be this far off (relative L2), by storage dtype.
FLOOR = {"float64": 16 * 2.0**-52, "float32": 2 * 2.0**-23, "float16": 2.0**-14, "bfloat16": 2.0**-11}
# lse may be this far off, times (1 + |lse|).
LSE_FLOOR = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}


def to_f64(x):
    """The exact values of a numpy array (ml_dtypes bfloat16 too) or a torch tensor as a numpy f64 array."""
    if type(x).__module__.startswith("torch"):
        x = x.detach().cpu()
        return x.numpy() if x.dtype.is_floating_point is False else x.double().numpy()
    x = np.asarray(x)
    return x if x.dtype == np.bool_ else x.astype(np.float64)


def positions(q_len, kv_len, causal=None, window=None):
    """What causal and window leave: a bool array [q_len, kv_len]."""
    diagonal = kv_len - q_len if causal == "bottom_right" else 0
    i, j = np.arange(q_len)[:, None] + diagonal, np.arange(kv_len)[None, :]
    keep = np.ones((q_len, kv_len), bool)
    if causal in (True, "top_left", "bottom_right"):
        keep &= j <= i
    left, right = window or (None, None)
    if left is not None:
        keep &= j >= i - left
    if right is not None:
        keep &= j <= i + right
    return keep


def law(q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None):
    """(out, lse) in f64. Arguments as rapt.attention's, on [batch, heads, len, head_dim]."""
    q, k, v = to_f64(q), to_f64(k), to_f64(v)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group = max(1, heads // max(1, kv_heads))
    scale = 1 / np.sqrt(head_dim) if scale is None else float(scale)
    keep = positions(q_len, kv_len, causal, window)
    bias = None
    if mask is not None:
        mask = np.broadcast_to(to_f64(mask), (batch, heads, q_len, kv_len))
        if mask.dtype != np.bool_:
            bias, mask = mask, mask != -np.inf
    out, lse = np.zeros((batch, heads, q_len, head_dim_v)), np.full((batch, heads, q_len), -np.inf)
    diagonal = kv_len - q_len if causal == "bottom_right" else 0
    distance = np.abs(np.arange(q_len)[:, None] + diagonal - np.arange(kv_len)[None, :])
    v_is_finite = np.isfinite(v).all()
    with np.errstate(all="ignore"):
        for b, h in itertools.product(range(batch), range(heads)):
            allowed = keep if mask is None else keep & mask[b, h]
            s = q[b, h] @ k[b, h // group].T * scale
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            if bias is not None:
                s = s + np.where(allowed, bias[b, h], 0)
            if alibi_slopes is not None:
                s = s - to_f64(alibi_slopes)[h] * distance
            s = np.where(allowed, s, -np.inf)
            live = allowed.any(axis=1)
            if not live.any():
                continue
            row_max = s[live].max(axis=1, keepdims=True)
            if sinks is not None:
                row_max = np.maximum(row_max, to_f64(sinks)[h])
            p = np.exp(s[live] - row_max)
            row_sum = p.sum(axis=1, keepdims=True)
            if sinks is not None:
                row_sum = row_sum + np.exp(to_f64(sinks)[h] - row_max)
            values = v[b, h // group]
            if v_is_finite:
                out[b, h, live] = (p @ values) / row_sum
            else:
                for row, i in enumerate(np.flatnonzero(live)):
                    out[b, h, i] = (p[row, allowed[i]] @ values[allowed[i]]) / row_sum[row]
            lse[b, h, live] = (row_max + np.log(row_sum))[:, 0]
    return out, lse


def errors(got, expected):
    """(relative L2, worst row's relative L2): a row counts against its own norm or the mean row's if that is larger."""
    got, expected = to_f64(got), to_f64(expected)
    got, expected = got.reshape(-1, got.shape[-1]), expected.reshape(-1, expected.shape[-1])
    finite = np.isfinite(expected).all(axis=1) & np.isfinite(got).all(axis=1)
    got, expected = got[finite], expected[finite]
    if expected.size == 0:
        return 0.0, 0.0
    rows, norms = np.linalg.norm(got - expected, axis=1), np.linalg.norm(expected, axis=1)
    whole = np.linalg.norm(norms)
    row_norms = np.maximum(norms, norms.mean())
    with np.errstate(all="ignore"):
        relative = np.where(rows == 0, 0, rows / row_norms)
        return (0.0 if not rows.any() else float(np.linalg.norm(rows) / whole)), float(relative.max())


def assert_same_pattern(got, expected):
    """NaN, +inf and -inf stand in the same places."""
    got, expected = to_f64(got), to_f64(expected)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), err_msg="NaN in other places")
    np.testing.assert_array_equal(got == np.inf, expected == np.inf, err_msg="+inf in other places")
    np.testing.assert_array_equal(got == -np.inf, expected == -np.inf, err_msg="-inf in other places")


def assert_close(got, expected, dtype_name, peers=(), *, same_pattern=True):
    """`got` against the law's `expected`: relative L2 ≤ 1.1 × the worst peer's + floor, no row above 4 × the peers' worst row
    + floor. `peers` are PyTorch's results on the same inputs (math, flash); without any only the floor counts."""
    dtype_name = str(dtype_name).removeprefix("torch.")
    expected, got = to_f64(expected), to_f64(got)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    if same_pattern:
        assert_same_pattern(got, expected)
    peer_errors = [errors(peer, expected) for peer in peers]
    limit = 1.1 * max((e[0] for e in peer_errors), default=0.0) + FLOOR[dtype_name]
    row_limit = 4 * max((e[1] for e in peer_errors), default=0.0) + FLOOR[dtype_name]
    error, row_error = errors(got, expected)
    assert error <= limit, f"relative L2 {error:.3g}, allowed {limit:.3g} ({dtype_name}, {len(peer_errors)} peers)"
    assert row_error <= row_limit, f"worst row {row_error:.3g}, allowed {row_limit:.3g} ({dtype_name})"


def assert_lse_close(got, expected, dtype_name):
    """lse against the law's: within LSE_FLOOR·(1 + |lse|), −inf and NaN in the same places."""
    got, expected = to_f64(got), to_f64(expected)
    assert_same_pattern(got, expected)
    finite = np.isfinite(expected)
    off = np.abs(got[finite] - expected[finite]) / (1 + np.abs(expected[finite]))
    limit = LSE_FLOOR[str(dtype_name).removeprefix("torch.")]
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


def formula(
    q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None,
    round_p=True,
):  # fmt: skip
    """A plain torch formula with flash's roundings (sums in f32, or f64 for f64; p rounded to the storage dtype before · v):
    the peer where PyTorch has no kernel for an option."""
    import torch

    q, k, v, mask = to_torch(q), to_torch(k), to_torch(v), to_torch(mask)
    storage = q.dtype
    acc = torch.float64 if storage == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    qf, kf, vf = q.to(acc), k.to(acc).repeat_interleave(group, 1), v.to(acc).repeat_interleave(group, 1)
    s = qf @ kf.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    keep = torch.from_numpy(positions(q.shape[2], k.shape[2], causal, window))
    if mask is not None:
        if mask.dtype == torch.bool:
            keep = keep & mask
        else:
            s = s + mask.to(acc)
    if alibi_slopes is not None:
        diagonal = k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
        i, j = torch.arange(q.shape[2])[:, None] + diagonal, torch.arange(k.shape[2])[None]
        s = s - to_torch(alibi_slopes).to(acc)[:, None, None] * (i - j).abs()
    s = s.masked_fill(~keep, -torch.inf)
    if sinks is not None:
        column = to_torch(sinks).to(acc)[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, column], -1)
    row_max = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0) if s.shape[-1] else s.sum(-1, keepdim=True)
    p = torch.exp(s - row_max)
    row_sum = p.sum(-1, keepdim=True)
    p = p[..., : k.shape[2]].to(storage).to(acc) if round_p else p[..., : k.shape[2]]
    out = torch.where(row_sum == 0, 0.0, (p @ vf) / row_sum)
    return torch.where(keep.expand(s.shape[:2] + keep.shape[-2:]).any(-1, keepdim=True), out, 0.0).to(storage)


def torch_peers(q, k, v, *, mask=None, causal=None, scale=None, **options):
    """PyTorch's own results on the same inputs: math and flash where they serve the request, else `formula`.

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
        peers.append(formula(q, k, v, mask=mask, causal=causal, scale=scale, **options))
    return peers


def random(rng, shape, dtype="float32", scale=1.0):
    """A numpy array of normal numbers in this dtype (name)."""
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    return (rng.standard_normal(shape) * scale).astype(dtype)
