"""rapt.torch.stats(), and what the other PyTorch tests share: `served`, `check`, `stock`.

A value test alone passes with PyTorch doing the work: each test here asks the stats who did it.
"""

import contextlib
import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
import rapt.torch as rt  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@contextlib.contextmanager
def served(number=1, **fallback):
    """Registered inside; then exactly `number` calls were served and `fallback` (underscores for blanks) fell back."""
    rt.reset_stats()
    with rt.backend():
        yield
    expected = {reason.replace("_", " "): count for reason, count in fallback.items()}
    assert rt.stats() == {"served": number, "fallback": expected}


def tensor(*shape, dtype=torch.float32, seed=0):
    """Normal numbers, the same for the same arguments."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def four(query, key, value, mask=None, enable_gqa=False):
    """The request as [batch, heads, len, head_dim] with every broadcast written out, as the reference reads it."""
    rank = max(query.dim(), key.dim(), value.dim(), 4)

    def pad(t):
        return t.reshape((1,) * (rank - t.dim()) + tuple(t.shape))

    q, k, v = pad(query), pad(key), pad(value)
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    if mask is not None:
        mask = pad(mask).expand(*lead, q.shape[-2], k.shape[-2])
        mask = mask.reshape(-1, *mask.shape[-3:])
    return *(t.reshape(-1, *t.shape[-3:]) for t in (q, k, v)), mask


def check(got, query, key, value, mask=None, *, is_causal=False, scale=None, enable_gqa=False):
    """`got` against the reference, by the tolerance rule. Not while registered: the peers are PyTorch's own."""
    assert not rt.is_registered()
    q, k, v, m = four(query, key, value, mask, enable_gqa)
    options = {"mask": m, "causal": "top_left" if is_causal else None, "scale": scale}
    expected = reference.reference(q, k, v, **options)[0]
    peers = reference.torch_peers(q.contiguous(), k.contiguous(), v.contiguous(), **options)
    reference.assert_close(got.reshape(expected.shape), expected, query.dtype, peers)


def stock(*args, **options):
    """PyTorch's own answer, or the error that it raises."""
    assert not rt.is_registered()
    try:
        return sdpa(*args, **options)
    except Exception as error:  # noqa: BLE001
        return error


def strange(rng, t):
    """`t` as a tensor whose memory is not its value, or that asks for a gradient."""
    from torch.testing._internal.two_tensor import TwoTensor

    kind = rng.choice(["grad", "grad", "negated", "sparse", "subclass"])
    if kind == "grad":
        return t.requires_grad_()
    if kind == "negated":
        return torch._neg_view(t)
    if kind == "sparse" and t.dim() > 0:
        return t.to_sparse()
    return TwoTensor(t, t.clone())


def same_views(got, expected):
    """Every view legal on `expected` is legal on `got`: same sizes, and strides wherever a stride matters."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if expected.numel():
        pairs = list(zip(got.shape, got.stride(), expected.stride()))
        assert [s for n, s, _ in pairs if n > 1] == [s for n, _, s in pairs if n > 1]


def test_stats_count_what_ran_and_reset_starts_again():
    q = tensor(2, 3, 5, 8)
    rt.reset_stats()
    assert rt.stats() == {"served": 0, "fallback": {}}
    with rt.backend(), torch.no_grad():
        for _ in range(3):
            sdpa(q, q, q)
        sdpa(q, q, q, scale=float("inf"))
        assert rt.stats() == rt.stats() == {"served": 3, "fallback": {"scale not finite": 1}}
        rt.reset_stats()
        sdpa(q, q, q)
    assert rt.stats() == {"served": 1, "fallback": {}}


def test_each_reason_is_logged_once(caplog, monkeypatch):
    from rapt.torch import _stats

    monkeypatch.setattr(_stats, "_logged", set())
    q = tensor(1, 1, 2, 4)
    with caplog.at_level(logging.DEBUG, logger="rapt"), rt.backend():
        for _ in range(3):
            sdpa(q, q, q, scale=float("inf"))
    assert [record.getMessage() for record in caplog.records].count("PyTorch's own kernel, not Rapt's: scale not finite") == 1


def test_the_reference_that_judges_is_not_the_kernel_judged():
    # A wrong answer must fail `check`.
    q = tensor(1, 2, 4, 8)
    with served():
        out = sdpa(q, q, q)
    check(out, q, q, q)
    with pytest.raises(AssertionError):
        check(out + 1e-3 * out.abs().max(), q, q, q)
    assert np.isfinite(reference.to_f64(out)).all()
