"""`rapt.flash_attn`: each argument of flash-attention's functions by its effect, against the formula in float64, or refused by name."""

import ast
import inspect
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
import reference  # noqa: E402
from rapt import _reference, flash_attn  # noqa: E402
from rapt.flash_attn import bert_padding  # noqa: E402

DENSE = flash_attn.flash_attn_func
VARLEN = flash_attn.flash_attn_varlen_func
CACHED = flash_attn.flash_attn_with_kvcache
NAMES = [name for name in flash_attn.__all__ if name.startswith("flash_attn")]
F64, INT = torch.float64, torch.int32


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(batch=2, q_len=9, kv_len=13, heads=4, kv_heads=2, dim=8, dim_v=8, dtype=torch.float32):
    return (
        drawn(batch, q_len, heads, dim, dtype=dtype),
        drawn(batch, kv_len, kv_heads, dim, dtype=dtype, seed=1),
        drawn(batch, kv_len, kv_heads, dim_v, dtype=dtype, seed=2),
    )


def biased(batch, q_len, kv_len, causal=False, window_size=(-1, -1), alibi_slopes=None):
    """flash's masks and slopes as one bias, by its documentation: query i stands at key i + kv_len - q_len."""
    at, j = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    left, right = window_size
    right = 0 if causal else right
    keep = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left >= 0:
        keep &= j >= at - left
    if right >= 0:
        keep &= j <= at + right
    slopes = torch.zeros(1) if alibi_slopes is None else alibi_slopes
    bias = -slopes.double().expand(batch, -1)[..., None, None] * (at - j).abs()
    return bias.masked_fill(~keep, -torch.inf)


def exact(q, k, v, *, softmax_scale=None, softcap=0.0, **places):
    """(out [batch, seqlen, heads, dim], lse [batch, heads, seqlen]) in float64."""
    Q, K, V = (x.detach().double().transpose(1, 2) for x in (q, k, v))
    bias = biased(len(q), q.shape[1], k.shape[1], **places)
    out, lse = _reference.attention(Q, K, V, mask=bias, scale=softmax_scale, softcap=softcap or None)
    return out.transpose(1, 2), lse


def peers(q, k, v, *, softmax_scale=None, softcap=0.0, **places):
    """What a flash kernel's roundings give."""
    Q, K, V = (x.detach().double().transpose(1, 2) for x in (q, k, v))
    bias = biased(len(q), q.shape[1], k.shape[1], **places)
    name = str(q.dtype).removeprefix("torch.")
    return [_reference.flash_rounded(Q, K, V, name, mask=bias, scale=softmax_scale, softcap=softcap or None).transpose(1, 2)]


SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
OWN_SLOPES = torch.stack((SLOPES, SLOPES.flip(0)))
# Options, and how many queries and keys.
CASES = {
    "plain": ({}, (9, 13)),
    "scale": ({"softmax_scale": 0.7}, (9, 13)),
    "causal": ({"causal": True}, (9, 13)),
    "causal, more queries than keys": ({"causal": True}, (13, 9)),
    "window": ({"window_size": (3, 2)}, (9, 13)),
    "window of more queries": ({"window_size": (3, 2)}, (13, 9)),
    "window that ends before many queries": ({"window_size": (-1, 1)}, (33, 9)),
    "window that no query sees whole": ({"window_size": (1, 1)}, (40, 4)),
    "window to the left": ({"window_size": (2, -1)}, (9, 40)),
    "window to the right": ({"window_size": (-1, 2)}, (9, 13)),
    "window of itself": ({"window_size": (0, 0)}, (9, 13)),
    "window of one query": ({"window_size": (4, 3)}, (1, 13)),
    "causal window": ({"causal": True, "window_size": (4, -1)}, (9, 13)),
    "causal outweighs the right end": ({"causal": True, "window_size": (4, 3)}, (9, 13)),
    "no keys in the window": ({"window_size": (2, 2)}, (9, 0)),
    "softcap": ({"softcap": 1.5}, (9, 13)),
    "slopes": ({"alibi_slopes": SLOPES}, (11, 11)),
    "slopes of one query": ({"alibi_slopes": SLOPES}, (1, 13)),
    "slopes, causal": ({"alibi_slopes": SLOPES, "causal": True}, (9, 13)),
    "slopes of each batch": ({"alibi_slopes": OWN_SLOPES, "causal": True, "window_size": (5, 0)}, (9, 13)),
    "all": ({"alibi_slopes": SLOPES, "causal": True, "window_size": (6, 0), "softcap": 2.0, "softmax_scale": 0.4}, (9, 13)),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES)
def test_each_argument_has_the_effect_that_flash_attention_documents(case, dtype):
    options, (q_len, kv_len) = CASES[case]
    q, k, v = qkv(q_len=q_len, kv_len=kv_len, dim_v=5, dtype=dtype)
    before = [x.clone() for x in (q, k, v)]
    out, lse, probabilities = DENSE(q, k, v, **options, return_attn_probs=True)
    wanted, wanted_lse = exact(q, k, v, **options)
    assert out.dtype == dtype and out.is_contiguous() and probabilities.numel() == 0
    reference.assert_close(out, wanted, dtype, peers(q, k, v, **options))
    reference.assert_lse_close(lse, wanted_lse, dtype)
    assert torch.equal(DENSE(q, k, v, **options, deterministic=True), out)
    assert all(map(torch.equal, before, (q, k, v)))


def test_each_case_would_differ_without_its_option():
    for case, (options, (q_len, kv_len)) in CASES.items():
        q, k, v = qkv(q_len=q_len, kv_len=kv_len)
        plain = exact(q, k, v)[0]
        assert not options or kv_len == 0 or not torch.allclose(exact(q, k, v, **options)[0], plain, rtol=1e-3), case


def gradients(run, inputs, d_o):
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(run(*leaves), leaves, d_o)


def exact_gradients(d_o, q, k, v, *, softmax_scale=None, softcap=0.0, **places):
    D, Q, K, V = (x.detach().double().transpose(1, 2) for x in (d_o, q, k, v))
    bias = biased(len(q), q.shape[1], k.shape[1], **places)
    made = _reference.gradients(D, Q, K, V, mask=bias, scale=softmax_scale, softcap=softcap or None)[:3]
    return [x.transpose(1, 2) for x in made]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_formula(case):
    options, (q_len, kv_len) = CASES[case]
    q, k, v = qkv(q_len=q_len, kv_len=kv_len, dim_v=5, dtype=F64)
    d_o = drawn(2, q_len, 4, 5, seed=5, dtype=F64)
    got = gradients(lambda *x: DENSE(*x, **options), (q, k, v), d_o)
    for one, wanted in zip(got, exact_gradients(d_o, q, k, v, **options)):
        torch.testing.assert_close(one, wanted, rtol=1e-11, atol=1e-12)


def test_lse_has_its_gradient_too():
    q, k, v = qkv(dtype=F64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = DENSE(*leaves, causal=True, return_attn_probs=True)
    weight = drawn(*lse.shape, seed=3, dtype=F64)
    got = torch.autograd.grad((lse * weight).sum(), leaves[:2])
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / math.sqrt(8)
    s = s + biased(2, 9, 13, causal=True)
    wanted = torch.autograd.grad((s.logsumexp(-1) * weight).sum(), leaves[:2])
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


# --- dropout -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_dropped_is_drawn_as_by_pytorchs_signature(is_causal):
    q, k, v = qkv(q_len=33, kv_len=33, dim=16, dim_v=16)
    d_o = drawn(2, 33, 4, 16, seed=5)

    def run(fn):
        torch.manual_seed(3)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = fn(*leaves)
        after = torch.get_rng_state()
        return (out, *torch.autograd.grad(out, leaves, d_o)), after

    def by_pytorchs(q, k, v):
        words = {"dropout_p": 0.25, "is_causal": is_causal, "enable_gqa": True}
        return rapt.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **words).transpose(1, 2)

    got, after = run(lambda *x: DENSE(*x, 0.25, causal=is_causal))
    wanted, own = run(by_pytorchs)
    assert all(map(torch.equal, got, wanted)) and torch.equal(after, own)
    assert not torch.equal(DENSE(q, k, v, 0.25), DENSE(q, k, v, 0.25))
    before = torch.get_rng_state()
    assert torch.equal(DENSE(q, k, v, 0.0), DENSE(q, k, v)) and torch.equal(torch.get_rng_state(), before)
    assert not DENSE(q, k, v, 1.0).any()


@pytest.mark.parametrize("case", ["plain", "window of more queries", "window to the left", "causal window", "slopes, causal", "all"])
def test_dropout_stands_beside_every_option_and_both_passes_drop_the_same(case):
    options, (q_len, kv_len) = CASES[case]
    q, k, _ = qkv(q_len=q_len, kv_len=kv_len, dtype=F64)
    # Where v is the identity, out is the weights.
    eye = torch.eye(kv_len, dtype=F64)[None, :, None].expand(2, -1, 2, -1).contiguous()
    torch.manual_seed(1)
    kept = (DENSE(q, k, eye, 0.4, **options) != 0).transpose(1, 2).double() / 0.6
    q, k, v = (x.detach().requires_grad_() for x in (q, k, drawn(2, kv_len, 2, 5, dtype=F64, seed=2)))
    torch.manual_seed(1)
    out = DENSE(q, k, v, 0.4, **options)
    keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, keys) * options.get("softmax_scale", 8**-0.5)
    s = options["softcap"] * (s / options["softcap"]).tanh() if "softcap" in options else s
    places = {name: options[name] for name in ("causal", "window_size", "alibi_slopes") if name in options}
    bias = biased(2, q_len, kv_len, **places)
    alive = (bias > -torch.inf).any(-1)
    p = torch.where(alive[..., None], (s + torch.where(alive[..., None], bias, 0.0)).softmax(-1), 0.0)
    wanted = torch.einsum("bhij,bjhd->bihd", p * kept, values)
    d_o = drawn(2, q_len, 4, 5, seed=5, dtype=F64)
    torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-12)
    for one, other in zip(torch.autograd.grad(out, (q, k, v), d_o), torch.autograd.grad(wanted, (q, k, v), d_o)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


# --- packed ------------------------------------------------------------------------------------------------------------------


def test_packed_tensors_are_read_in_place_and_their_gradients_come_back_packed():
    qkv_, kv = drawn(2, 9, 3, 4, 8), drawn(2, 13, 2, 2, 8)
    q = drawn(2, 9, 4, 8, seed=7)
    asked = {"causal": True, "softcap": 3.0}
    out = flash_attn.flash_attn_qkvpacked_func(qkv_, **asked)
    assert torch.equal(out, DENSE(*qkv_.unbind(2), **asked))
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, **asked), DENSE(q, *kv.unbind(2), **asked))
    d_o = drawn(2, 9, 4, 8, seed=9)
    (packed,) = gradients(lambda x: flash_attn.flash_attn_qkvpacked_func(x, **asked), (qkv_,), d_o)
    apart = gradients(lambda *x: DENSE(*x, **asked), qkv_.unbind(2), d_o)
    assert packed.shape == qkv_.shape and torch.equal(packed, torch.stack(apart, 2))
    dq, packed = gradients(lambda *x: flash_attn.flash_attn_kvpacked_func(*x, **asked), (q, kv), d_o)
    own = gradients(lambda *x: DENSE(*x, **asked), (q, *kv.unbind(2)), d_o)
    assert torch.equal(dq, own[0]) and torch.equal(packed, torch.stack(own[1:], 2))


def test_packed_sequences_are_read_in_place():
    qkv_, kv, q, at = drawn(11, 3, 4, 8), drawn(11, 2, 2, 8), drawn(11, 4, 8), offsets(3, 0, 8)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv_, at, 8, causal=True)
    assert torch.equal(out, VARLEN(*qkv_.unbind(1), at, at, 8, 8, causal=True))
    out = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, at, at, 8, 8, causal=True)
    assert torch.equal(out, VARLEN(q, *kv.unbind(1), at, at, 8, 8, causal=True))


@pytest.mark.parametrize("lay", [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.repeat_interleave(2, 1)[:, ::2], lambda x: x.mT.contiguous().mT])
def test_strides_change_no_bit_and_nothing_is_copied(lay):
    q, k, v = qkv(q_len=33, kv_len=65, heads=4, dim=16, dim_v=16)
    plain = DENSE(q, k, v, causal=True, window_size=(9, 0))
    assert torch.equal(DENSE(lay(q), lay(k), lay(v), causal=True, window_size=(9, 0)), plain)


# --- sequences -----------------------------------------------------------------------------------------------------------------


def offsets(*lengths):
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(INT)


VARLEN_CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "causal window, capped": {"causal": True, "window_size": (3, 0), "softcap": 2.0, "softmax_scale": 0.3},
    "slopes": {"causal": True, "alibi_slopes": SLOPES},
    "slopes of each": {"causal": True, "alibi_slopes": torch.stack((SLOPES, SLOPES * 0, SLOPES * 2, SLOPES.flip(0)))},
}


@pytest.mark.parametrize("case", VARLEN_CASES)
def test_a_sequence_has_the_bits_of_a_call_alone(case):
    options, of_q, of_k = VARLEN_CASES[case], (5, 0, 9, 3), (7, 2, 4, 0)
    q, k, v = drawn(17, 4, 8), drawn(13, 2, 8, seed=1), drawn(13, 2, 6, seed=2)
    out, lse, probabilities = VARLEN(q, k, v, offsets(*of_q), offsets(*of_k), 9, torch.tensor(7), **options, return_attn_probs=True)
    assert out.shape == (17, 4, 6) and lse.shape == (4, 17) and probabilities.numel() == 0
    assert torch.equal(VARLEN(q, k, v, offsets(*of_q), offsets(*of_k), 9, 7, **options), out)
    slopes = options.get("alibi_slopes")
    for b, (rows, keys, values, got, of_lse) in enumerate(zip(*(x.split(n) for x, n in ((q, of_q), (k, of_k), (v, of_k), (out, of_q))), lse.split(of_q, 1))):
        own = options if slopes is None or slopes.dim() == 1 else {**options, "alibi_slopes": slopes[b]}
        alone, alone_lse, _ = DENSE(rows[None], keys[None], values[None], **own, return_attn_probs=True)
        assert torch.equal(alone[0], got) and torch.equal(alone_lse[0], of_lse), b
        reference.assert_close(alone, exact(rows[None], keys[None], values[None], **own)[0], "float32", peers(rows[None], keys[None], values[None], **own))


@pytest.mark.parametrize("case", VARLEN_CASES)
def test_gradients_of_sequences_are_those_of_calls_alone(case):
    options, of_q, of_k = VARLEN_CASES[case], (5, 0, 9, 3), (7, 2, 4, 0)
    at_q, at_k = offsets(*of_q), offsets(*of_k)
    given = drawn(17, 4, 8), drawn(13, 2, 8, seed=1), drawn(13, 2, 6, seed=2)
    d_o, slopes = drawn(17, 4, 6, seed=5), options.get("alibi_slopes")
    got = gradients(lambda *x: VARLEN(*x, at_q, at_k, 9, 7, **options), given, d_o)
    alone = []
    for b, parts in enumerate(zip(*(x.split(n) for x, n in zip((*given, d_o), (of_q, of_k, of_k, of_q))))):
        own = options if slopes is None or slopes.dim() == 1 else {**options, "alibi_slopes": slopes[b]}
        alone.append(gradients(lambda *x: DENSE(*x, **own), [x[None] for x in parts[:3]], parts[3][None]))
    for one, wanted in zip(got, zip(*alone)):
        assert torch.equal(one, torch.cat([x[0] for x in wanted]))


def test_gradients_of_packed_sequences_come_back_packed():
    qkv_, at, d_o = drawn(11, 3, 4, 8), offsets(3, 0, 8), drawn(11, 4, 8, seed=9)
    (packed,) = gradients(lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, at, 8, causal=True), (qkv_,), d_o)
    apart = gradients(lambda *x: VARLEN(*x, at, at, 8, 8, causal=True), qkv_.unbind(1), d_o)
    assert torch.equal(packed, torch.stack(apart, 1))


def test_a_sequence_drops_what_its_batch_entry_drops():
    q, k, v, d_o = *qkv(batch=3, q_len=7, kv_len=7), drawn(3, 7, 4, 8, seed=5)
    at = offsets(7, 7, 7)

    def run(fn, given, d_o):
        torch.manual_seed(5)
        leaves = [x.detach().requires_grad_() for x in given]
        out = fn(*leaves)
        return out, *torch.autograd.grad(out, leaves, d_o)

    dense = run(lambda *x: DENSE(*x, 0.3, causal=True), (q, k, v), d_o)
    packed = run(lambda *x: VARLEN(*x, at, at, 7, 7, 0.3, causal=True), [x.flatten(0, 1) for x in (q, k, v)], d_o.flatten(0, 1))
    assert all(torch.equal(one.flatten(0, 1), other) for one, other in zip(dense, packed))
    assert not torch.equal(dense[0], DENSE(q, k, v, causal=True))


def test_rows_of_no_sequence_are_zeros_and_give_nothing():
    q, k = drawn(9, 4, 8), drawn(8, 2, 8, seed=1)
    at_q, at_k = torch.tensor([1, 4, 7], dtype=INT), torch.tensor([2, 3, 8], dtype=INT)
    for options in ({"causal": True}, {"window_size": (2, 1)}):
        out, lse, _ = VARLEN(q, k, k, at_q, at_k, 3, 5, **options, return_attn_probs=True)
        inner = VARLEN(q[1:7], k[2:], k[2:], at_q - 1, at_k - 2, 3, 5, **options, return_attn_probs=True)
        assert torch.equal(out[1:7], inner[0]) and not out[:1].any() and not out[7:].any()
        assert torch.equal(lse[:, 1:7], inner[1]) and (lse[:, [0, 7, 8]] == -torch.inf).all()
        d_q, d_k, _ = gradients(lambda *x: VARLEN(*x, at_q, at_k, 3, 5, **options), (q, k, k), torch.full_like(q, torch.nan).index_fill(0, torch.arange(1, 7), 1.0))
        assert d_q.isfinite().all() and d_k.isfinite().all() and not d_q[[0, 7, 8]].any() and not d_k[:2].any()


def test_pages_are_read_by_the_table():
    pages_k, pages_v = drawn(7, 4, 2, 8), drawn(7, 4, 2, 8, seed=1)
    table, of_q, of_k = torch.tensor([[3, 0, 6], [5, 1, 2]], dtype=INT), (3, 5), (9, 11)
    q = drawn(8, 4, 8)
    keys = [torch.cat(list(pages[row])).narrow(0, 0, n) for pages in (pages_k, pages_v) for row, n in zip(table, of_k)]
    for options in ({}, {"causal": True, "window_size": (4, 0)}, {"causal": True, "alibi_slopes": OWN_SLOPES}):
        out, lse, _ = VARLEN(q, pages_k, pages_v, offsets(*of_q), offsets(*of_k), 5, 11, block_table=table, **options, return_attn_probs=True)
        whole = VARLEN(q, torch.cat(keys[:2]), torch.cat(keys[2:]), offsets(*of_q), offsets(*of_k), 5, 11, **options, return_attn_probs=True)
        assert torch.equal(out, whole[0]) and torch.equal(lse, whole[1])
    loose = VARLEN(q, pages_k, pages_v, torch.tensor([1, 3, 7], dtype=INT), offsets(*of_k), 5, 11, block_table=table, return_attn_probs=True)
    tight = VARLEN(q[1:7], pages_k, pages_v, offsets(2, 4), offsets(*of_k), 5, 11, block_table=table, return_attn_probs=True)
    assert torch.equal(loose[0][1:7], tight[0]) and torch.equal(loose[1][:, 1:7], tight[1])
    assert not loose[0][[0, 7]].any() and (loose[1][:, [0, 7]] == -torch.inf).all()
    even = VARLEN(q, pages_k, pages_v, offsets(4, 4), offsets(*of_k), 4, 11, block_table=table, causal=True, return_attn_probs=True)
    whole = VARLEN(q, torch.cat(keys[:2]), torch.cat(keys[2:]), offsets(4, 4), offsets(*of_k), 4, 11, causal=True, return_attn_probs=True)
    assert torch.equal(even[0], whole[0]) and torch.equal(even[1], whole[1])


# --- caches ----------------------------------------------------------------------------------------------------------------


def caches(entries=3, seqlen=16):
    return drawn(entries, seqlen, 2, 8, seed=4), drawn(entries, seqlen, 2, 8, seed=5)


def test_new_keys_are_written_in_place_and_attended():
    k_cache, v_cache = caches()
    q, k, v = drawn(3, 2, 4, 8), drawn(3, 2, 2, 8, seed=1), drawn(3, 2, 2, 8, seed=2)
    seqlens = torch.tensor([5, 0, 14], dtype=INT)
    before = k_cache.clone()
    out, lse = CACHED(q, k_cache, v_cache, k, v, cache_seqlens=seqlens, causal=True, window_size=(6, -1), softcap=3.0, softmax_scale=0.3, num_splits=4, return_softmax_lse=True)
    for b, n in enumerate(seqlens.tolist()):
        assert torch.equal(k_cache[b, n : n + 2], k[b]) and torch.equal(v_cache[b, n : n + 2], v[b])
        assert torch.equal(k_cache[b, :n], before[b, :n]) and torch.equal(k_cache[b, n + 2 :], before[b, n + 2 :])
        keys = (x[b : b + 1, : n + 2] for x in (k_cache, v_cache))
        wanted, wanted_lse = exact(q[b : b + 1], *keys, causal=True, window_size=(6, -1), softcap=3.0, softmax_scale=0.3)
        reference.assert_close(out[b : b + 1], wanted, "float32")
        reference.assert_lse_close(lse[b : b + 1], wanted_lse, "float32")
    again = CACHED(q, k_cache, v_cache, cache_seqlens=seqlens + 2, causal=True, window_size=(6, -1), softcap=3.0, softmax_scale=0.3)
    assert torch.equal(again, out)


def test_a_cache_without_lengths_is_whole_and_an_int_is_all_sequences():
    k_cache, v_cache = caches()
    q = drawn(3, 1, 4, 8)
    assert torch.equal(CACHED(q, k_cache, v_cache), DENSE(q, k_cache, v_cache))
    assert torch.equal(CACHED(q, k_cache, v_cache, cache_seqlens=7), DENSE(q, k_cache[:, :7], v_cache[:, :7]))


@pytest.mark.parametrize("options", [{"window_size": (4, 3)}, {"alibi_slopes": SLOPES}, {"alibi_slopes": torch.stack((SLOPES, SLOPES * 2, SLOPES.flip(0)))}])
def test_one_query_of_a_cache_stands_at_its_last_key(options):
    k_cache, v_cache = caches()
    q, seqlens = drawn(3, 1, 4, 8), torch.tensor([5, 9, 16], dtype=INT)
    out = CACHED(q, k_cache, v_cache, cache_seqlens=seqlens, **options)
    slopes = options.get("alibi_slopes")
    for b, n in enumerate(seqlens.tolist()):
        own = options if slopes is None or slopes.dim() == 1 else {"alibi_slopes": slopes[b]}
        reference.assert_close(out[b : b + 1], exact(q[b : b + 1], k_cache[b : b + 1, :n], v_cache[b : b + 1, :n], **own)[0], "float32")


def test_sequences_lie_in_the_entries_and_behind_the_rows_that_are_named():
    k_cache, v_cache = caches(4)
    q, k, v = drawn(2, 1, 4, 8), drawn(2, 1, 2, 8, seed=1), drawn(2, 1, 2, 8, seed=2)
    index, pad, seqlens = torch.tensor([3, 1], dtype=INT), torch.tensor([2, 0], dtype=INT), torch.tensor([9, 6], dtype=INT)
    for options in ({"cache_batch_idx": index}, {"cache_batch_idx": index, "cache_leftpad": pad}, {"cache_batch_idx": index, "block_table": None, "alibi_slopes": OWN_SLOPES}):
        mine = [x.clone() for x in (k_cache, v_cache)]
        out, lse = CACHED(q, *mine, k, v, cache_seqlens=seqlens, causal=True, **options, return_softmax_lse=True)
        for b, (entry, n) in enumerate(zip(index.tolist(), seqlens.tolist())):
            first = int(pad[b]) if "cache_leftpad" in options else 0
            assert torch.equal(mine[0][entry, n], k[b, 0]) and torch.equal(mine[1][entry, n], v[b, 0])
            own = {"alibi_slopes": OWN_SLOPES[b]} if "alibi_slopes" in options else {}
            wanted = exact(q[b : b + 1], *(x[entry : entry + 1, first : n + 1] for x in mine), causal=True, **own)
            reference.assert_close(out[b : b + 1], wanted[0], "float32")
            reference.assert_lse_close(lse[b : b + 1], wanted[1], "float32")
        assert torch.equal(mine[0][0], k_cache[0]) and torch.equal(mine[0][2], k_cache[2])
    alone = CACHED(q, k_cache, v_cache, cache_seqlens=9, cache_leftpad=pad)
    assert torch.equal(alone[0], CACHED(q[:1], k_cache[:1, 2:9], v_cache[:1, 2:9])[0])


def test_a_block_table_names_the_pages():
    pages_k, pages_v = drawn(7, 4, 2, 8), drawn(7, 4, 2, 8, seed=1)
    table, seqlens = torch.tensor([[3, 0, 6], [5, 1, 2]], dtype=INT), torch.tensor([9, 4], dtype=INT)
    q, k, v = drawn(2, 1, 4, 8), drawn(2, 1, 2, 8, seed=1), drawn(2, 1, 2, 8, seed=2)
    out = CACHED(q, pages_k, pages_v, k, v, cache_seqlens=seqlens, block_table=table, causal=True)
    assert torch.equal(pages_k[6, 1], k[0, 0]) and torch.equal(pages_k[1, 0], k[1, 0])
    whole = [torch.stack([torch.cat(list(pages[row])) for row in table]) for pages in (pages_k, pages_v)]
    assert torch.equal(out, CACHED(q, *whole, cache_seqlens=seqlens + 1, causal=True))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "cache_leftpad": torch.tensor([2, 0], dtype=INT)}])
def test_keys_and_queries_are_turned_by_their_positions(options, dtype, interleaved):
    k_cache, v_cache = (x.to(dtype) for x in caches(2))
    q, k, v = (drawn(2, 3, heads, 8, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=F64)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    seqlens = torch.tensor([5, 11], dtype=INT)
    mine = [x.clone() for x in (k_cache, v_cache)]
    out = CACHED(q, *mine, k, v, cos, sin, seqlens, rotary_interleaved=interleaved, **options)

    def turned(x, at):
        """As complex numbers, element by element."""
        x = x.double().clone()
        pairs = [(2 * n, 2 * n + 1) if interleaved else (n, n + 3) for n in range(3)]
        for i, place in enumerate(at):
            for n, (a, b) in enumerate(pairs):
                turn = torch.complex(*(torch.stack([x[i, :, e] for e in (a, b)])[:, None] * 1.0).unbind(0)) * torch.complex(cos[place, n].double(), sin[place, n].double())
                x[i, :, a], x[i, :, b] = turn[0].real, turn[0].imag
        return x.to(dtype)

    for b, n in enumerate(seqlens.tolist()):
        places = range(n, n + 3)
        keys = turned(k[b], places)
        torch.testing.assert_close(mine[0][b, n : n + 3], keys)
        assert torch.equal(mine[1][b, n : n + 3], v[b])
        first = int(options["cache_leftpad"][b]) if "cache_leftpad" in options else 0
        queries = turned(q[b], places if options else [n] * 3)[None]
        wanted = exact(queries, *(x[b : b + 1, first : n + 3] for x in mine), causal=bool(options))[0]
        torch.testing.assert_close(out[b : b + 1].double(), wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


# --- tokens of a padded batch ----------------------------------------------------------------------------------------------


def test_tokens_are_unpadded_and_padded_again():
    x, mask = drawn(3, 5, 2, 4).requires_grad_(), torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    tokens, indices, at, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()]) and at.tolist() == [0, 3, 3, 8] and at.dtype == INT
    assert (longest, used.tolist(), indices.tolist()) == (5, [3, 0, 5], [0, 1, 2, 10, 11, 12, 13, 14])
    back = bert_padding.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    (d_x,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(d_x, mask[..., None, None].expand_as(x).float())
    tokens, _, at, longest, used = bert_padding.unpad_input(x, mask, mask.roll(1, 1) * (1 - mask))
    assert (at.tolist(), longest, used.tolist()) == ([0, 4, 4, 9], 5, [3, 0, 5])
    with pytest.raises(rapt.ShapeError, match="attention_mask has shape"):
        bert_padding.unpad_input(x, mask[:, :4])


def test_a_padded_batch_is_attended_without_its_padding():
    q, mask = drawn(2, 6, 4, 8), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    tokens, indices, at, longest, _ = bert_padding.unpad_input(q, mask)
    out = bert_padding.pad_input(VARLEN(tokens, tokens, tokens, at, at, longest, longest, causal=True), indices, 2, 6)
    assert torch.equal(out[0, :4], DENSE(q[:1, :4], q[:1, :4], q[:1, :4], causal=True)[0]) and not out[0, 4:].any()


# --- what is refused -------------------------------------------------------------------------------------------------------


def refused():
    q, k, v = qkv()
    rows, at, at_k = drawn(9, 4, 8), offsets(4, 5), offsets(3, 6)
    k_cache, v_cache = caches(2)
    new = drawn(2, 1, 2, 8)
    one, cos, grad = q[:, :1], torch.ones(16, 4), lambda x: x.clone().requires_grad_()
    paged = dict(block_table=torch.tensor([[0], [1]], dtype=INT))
    index = dict(cache_batch_idx=torch.tensor([0, 5], dtype=INT))
    return [
        (lambda: DENSE(q.numpy(), k, v), rapt.KindError, r"q is a ndarray.*Mend: `torch.as_tensor\(q\)`"),
        (lambda: DENSE(q[0], k, v), rapt.ShapeError, r"q has 3 dimensions.*Mend: `q\[None\]`"),
        (lambda: DENSE(q, k.double(), v), rapt.DtypeMismatchError, "k has dtype float64"),
        (lambda: DENSE(q, k[:, :, :, :4], v), rapt.ShapeError, "head_dim"),
        (lambda: DENSE(q[:, :, :3], k, v), rapt.ShapeError, "heads"),
        (lambda: DENSE(q, k, v, dropout_p=1.5), rapt.OptionError, "dropout_p = 1.5"),
        (lambda: DENSE(q, k, v, 0.5, return_attn_probs=True), rapt.UnsupportedError, "return_attn_probs with dropout_p"),
        (lambda: DENSE(q, k, v, 0.5, causal=True, alibi_slopes=OWN_SLOPES), rapt.UnsupportedError, r"dropout_p beside alibi_slopes \[batch, nheads\]"),
        (lambda: DENSE(q, k, v, softmax_scale=math.nan), rapt.OptionError, "^softmax_scale = NaN"),
        (lambda: DENSE(q, k, v, window_size=3), rapt.OptionError, "window_size = 3"),
        (lambda: DENSE(q, k, v, softcap=math.nan), rapt.OptionError, "softcap = NaN"),
        (lambda: DENSE(q, k, v, softcap="1"), rapt.OptionError, "softcap = '1'"),
        (lambda: DENSE(q, k, v, alibi_slopes=SLOPES), rapt.UnsupportedError, r"alibi_slopes without causal.*Mend: `causal=True`"),
        (lambda: DENSE(q, k, v, causal=True, alibi_slopes=SLOPES[:3]), rapt.ShapeError, r"alibi_slopes has shape \[3\]"),
        (lambda: DENSE(q, k, v, causal=True, alibi_slopes=[1.0] * 4), rapt.KindError, "alibi_slopes is a list"),
        (lambda: DENSE(q[:0], k[:0], v[:0], causal=True, alibi_slopes=OWN_SLOPES[:0]), rapt.ShapeError, "batch is 0"),
        (lambda: VARLEN(rows, k_cache, v_cache, at[:1], at_k[:1], 5, 6, block_table=paged["block_table"][:0]), rapt.ShapeError, "batch is 0"),
        (lambda: VARLEN(rows, k_cache, v_cache, at, at_k[:2], 5, 6, **paged), rapt.ShapeError, "cu_seqlens_k has 2 offsets, cu_seqlens_q has 3"),
        (lambda: VARLEN(rows, k_cache, v_cache, offsets(2, 3, 4), offsets(1, 1, 1), 5, 6, **paged), rapt.ShapeError, "block_table has 2 rows"),
        (lambda: VARLEN(rows, rows, rows, at, at_k[:2], 5, 6, window_size=(1, 1)), rapt.ShapeError, "cu_seqlens_k has 2 offsets"),
        (lambda: DENSE(grad(q), k, v, causal=True, alibi_slopes=grad(SLOPES)), rapt.UnsupportedError, r"alibi_slopes requires grad.*detach"),
        (lambda: flash_attn.flash_attn_qkvpacked_func(drawn(1, 4, 2, 4, 8)), rapt.ShapeError, "qkv has shape"),
        (lambda: flash_attn.flash_attn_kvpacked_func(q, k), rapt.ShapeError, "kv has 4 dimensions"),
        (lambda: VARLEN(rows, rows, rows, at.long(), at, 5, 5), rapt.UnsupportedDtypeError, "cu_seqlens_q has dtype int64"),
        (lambda: VARLEN(rows, rows, rows, at, at_k.long(), 5, 6), rapt.UnsupportedDtypeError, "cu_seqlens_k has dtype int64"),
        (lambda: VARLEN(rows, rows, rows, at, at, 4, 5), rapt.OptionError, "max_seqlen_q = 4; allowed: 5 or more.*`max_seqlen_q=5`"),
        (lambda: VARLEN(rows, rows, rows, at, at_k, 5, None), rapt.OptionError, "max_seqlen_k = None"),
        (lambda: flash_attn.flash_attn_varlen_qkvpacked_func(drawn(9, 3, 4, 8), at, 2), rapt.OptionError, "max_seqlen = 2"),
        (lambda: VARLEN(rows, rows, rows, offsets(5, -2, 6), offsets(3, 3, 3), 9, 9), rapt.IndexRangeError, r"cu_seqlens_q\[2\]"),
        (lambda: VARLEN(rows, rows, rows, offsets(5, 4), offsets(12, -3), 9, 12, window_size=(1, 1)), rapt.IndexRangeError, "cu_seqlens_k"),
        (lambda: VARLEN(rows, new, new, at, at_k, 5, 6, **paged), rapt.IndexRangeError, "sequence 0 has 3 keys by cu_seqlens_k; allowed: 0 to 1"),
        (lambda: VARLEN(rows, k_cache, v_cache, at, at_k, 5, 6, 0.5, **paged), rapt.UnsupportedError, "dropout_p beside block_table"),
        (lambda: CACHED(q, k_cache, v_cache, window_size=(3, 3)), rapt.UnsupportedError, "9 queries of a cache without causal"),
        (lambda: CACHED(one, k_cache, v_cache, new, new), rapt.OptionError, "cache_seqlens = None"),
        (lambda: CACHED(one, k_cache, v_cache, new, new, cache_seqlens=16), rapt.IndexRangeError, "cache_seqlens"),
        (lambda: CACHED(one, k_cache, v_cache, num_splits=-1), rapt.OptionError, "num_splits = -1"),
        (lambda: CACHED(grad(one), k_cache, v_cache), rapt.UnsupportedError, "q requires grad"),
        (lambda: CACHED(one, k_cache, v_cache, **index), rapt.IndexRangeError, r"cache_batch_idx\[1\]|cache_batch_idx\[0\] is 5|cache_batch_idx"),
        (lambda: CACHED(one, k_cache, v_cache, cache_batch_idx=torch.tensor([0, 1])), rapt.UnsupportedDtypeError, "cache_batch_idx has dtype int64"),
        (lambda: CACHED(one, k_cache, v_cache, cache_leftpad=torch.tensor([0, 9], dtype=INT), cache_seqlens=8), rapt.IndexRangeError, r"cache_leftpad\[1\] is 9"),
        (lambda: CACHED(one, k_cache, v_cache, cache_leftpad=torch.tensor([0], dtype=INT)), rapt.ShapeError, "cache_leftpad has 1 numbers"),
        (lambda: CACHED(one, k_cache, v_cache, cache_seqlens=4, **index, **paged), rapt.UnsupportedError, "cache_batch_idx beside block_table"),
        (lambda: CACHED(one, k_cache, v_cache, cache_seqlens=4, block_table=torch.tensor([[0], [7]], dtype=INT)), rapt.IndexRangeError, "block_table"),
        (lambda: CACHED(one, k_cache, v_cache, rotary_cos=cos, rotary_sin=cos, cache_seqlens=4), rapt.UnsupportedError, "rotary_cos without new keys"),
        (lambda: CACHED(one, k_cache, v_cache, new, new, cos, None, 4), rapt.OptionError, "rotary_cos and rotary_sin"),
        (lambda: CACHED(one, k_cache, v_cache, new, new, cos, cos), rapt.OptionError, "cache_seqlens = None"),
        (lambda: CACHED(one, k_cache, v_cache, new, new, cos[:8], cos[:8], 4), rapt.ShapeError, "rotary_cos has shape"),
        (lambda: CACHED(one, k_cache, v_cache, new, new, cos.double(), cos, 4), rapt.DtypeMismatchError, r"rotary_cos has dtype torch.float64.*Mend: `rotary_cos"),
    ]


def test_what_is_not_served_is_refused_by_its_name_and_writes_nothing():
    for number, (call, error, text) in enumerate(refused()):
        with pytest.raises(error, match=text) as raised:
            call()
        assert type(raised.value) is error, f"{number}: {raised.value}"
        assert "cu_seqlens_kv" not in str(raised.value) and "page_table" not in str(raised.value)


def test_a_refused_sequence_writes_nothing_into_any_cache():
    k_cache, v_cache = caches(2)
    before, new = (k_cache.clone(), v_cache.clone()), drawn(2, 1, 2, 8)
    for options in ({"cache_leftpad": torch.tensor([0, 0], dtype=INT)}, {"alibi_slopes": OWN_SLOPES}):
        with pytest.raises(rapt.IndexRangeError):
            CACHED(drawn(2, 1, 4, 8), k_cache, v_cache, new, new, cache_seqlens=torch.tensor([3, 16], dtype=INT), **options)
        assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


# --- the interface ---------------------------------------------------------------------------------------------------------

# Parameters of flash-attention 2.8.3, in its order.
AFTER = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
OFFSETS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {AFTER}",
    "flash_attn_kvpacked_func": f"q kv {AFTER}",
    "flash_attn_qkvpacked_func": f"qkv {AFTER}",
    "flash_attn_varlen_func": f"q k v {OFFSETS} {AFTER} block_table",
    "flash_attn_varlen_kvpacked_func": f"q kv {OFFSETS} {AFTER}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {AFTER}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}
DEFAULTS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    "block_table": None, "rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip


def test_the_signatures_are_flash_attentions_and_the_stubs_agree():
    folder = Path(flash_attn.__file__).parent
    stubs = {}
    for file in ("flash_attn_interface.pyi", "bert_padding.pyi"):
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        stubs |= {it.name: [arg.arg for arg in it.args.args] for it in tree.body if isinstance(it, ast.FunctionDef)}
    assert sorted(NAMES) == sorted(SIGNATURES)
    for name, words in SIGNATURES.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters
        assert list(parameters) == words.split() == stubs[name], name
        for word, parameter in parameters.items():
            if word in DEFAULTS:
                assert parameter.default == DEFAULTS[word], (name, word)
    for name in ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"):
        assert list(inspect.signature(getattr(bert_padding, name)).parameters) == stubs[name]


def test_code_that_imports_flash_attn_finds_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    for name in ("flash_attn.bert_padding", "flash_attn.flash_attn_interface", "flash_attn._requests"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = {}
    exec("from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache", names)
    exec("from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input", names)
    exec("from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func", names)
    x = drawn(1, 5, 3, 2, 8)
    assert torch.equal(names["flash_attn_qkvpacked_func"](x), names["flash_attn_func"](*x.unbind(2)))
    with pytest.raises(rapt.OptionError):
        names["flash_attn_qkvpacked_func"](x, dropout_p=2.0)
    for name in [name for name in sys.modules if name.startswith("flash_attn.")]:
        monkeypatch.delitem(sys.modules, name)


def test_served_calls_are_counted():
    rapt.torch.reset_stats()
    q, k, v = qkv()
    DENSE(q, k, v)
    CACHED(q, k, v)
    assert rapt.torch.stats() == {"served": 2, "fallback": {}}
