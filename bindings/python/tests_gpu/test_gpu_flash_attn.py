"""`rapt.flash_attn` on the GPU: the cases of the CPU's tests against the same formula, gradients, and what would have to wait for the device refused by name."""

import pytest
import reference
import torch
from test_flash_attn import CASES, INT, OWN_SLOPES, SLOPES, caches, drawn, exact, exact_gradients, gradients, offsets, peers, qkv

import rapt
from rapt import flash_attn

DENSE, VARLEN, CACHED = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_gpu(given):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES)
def test_each_argument_has_its_effect(case, dtype):
    options, (q_len, kv_len) = CASES[case]
    tensors = qkv(q_len=q_len, kv_len=kv_len, dim=64, dim_v=64, dtype=dtype)
    out, lse, probabilities = DENSE(*(x.cuda() for x in tensors), **on_gpu(options), return_attn_probs=True)
    wanted, wanted_lse = exact(*tensors, **options)
    reference.assert_close(out, wanted, dtype, peers(*tensors, **options))
    reference.assert_lse_close(lse, wanted_lse, dtype)
    assert out.is_cuda and probabilities.is_cuda


@pytest.mark.parametrize("case", ["plain", "causal window", "window of more queries", "softcap", "slopes of each batch"])
def test_gradients_are_those_of_the_formula(case):
    options, (q_len, kv_len) = CASES[case]
    tensors, d_o = qkv(q_len=q_len, kv_len=kv_len, dtype=torch.float64), drawn(2, q_len, 4, 8, seed=5, dtype=torch.float64)
    got = gradients(lambda *x: DENSE(*x, **on_gpu(options)), [x.cuda() for x in tensors], d_o.cuda())
    for one, wanted in zip(got, exact_gradients(d_o, *tensors, **options)):
        torch.testing.assert_close(one.cpu(), wanted, rtol=1e-10, atol=1e-11)


def test_packed_tensors_and_sequences_have_the_bits_of_calls_alone():
    packed = drawn(2, 40, 3, 4, 64, dtype=torch.bfloat16).cuda()
    whole = flash_attn.flash_attn_qkvpacked_func(packed, causal=True)
    assert torch.equal(whole, DENSE(*packed.unbind(2), causal=True))
    rows, at = packed.flatten(0, 1), offsets(40, 0, 25, 15).cuda()
    out = flash_attn.flash_attn_varlen_qkvpacked_func(rows, at, 40, causal=True, window_size=(9, 0), softcap=3.0)
    for begin, end in ((0, 40), (40, 65), (65, 80)):
        assert torch.equal(out[begin:end], DENSE(*rows[None, begin:end].unbind(2), causal=True, window_size=(9, 0), softcap=3.0)[0])


def test_caches_are_written_and_read_by_entry_page_and_position():
    k_cache, v_cache = (x.cuda().bfloat16() for x in caches(4, 32))
    q, k, v = (drawn(2, 1, heads, 8, dtype=torch.bfloat16, seed=heads).cuda() for heads in (4, 2, 2))
    index, seqlens = torch.tensor([3, 1], dtype=INT).cuda(), torch.tensor([9, 20], dtype=INT).cuda()
    angles = torch.arange(32)[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = angles.cos().bfloat16().cuda(), angles.sin().bfloat16().cuda()
    for rotary in ({}, {"rotary_cos": cos, "rotary_sin": sin}):
        mine, plain = [x.clone() for x in (k_cache, v_cache)], [x.cpu().clone() for x in (k_cache, v_cache)]
        out = CACHED(q, *mine, k, v, cache_seqlens=seqlens, cache_batch_idx=index, causal=True, window_size=(7, -1), **rotary)
        wanted = CACHED(q.cpu(), *plain, k.cpu(), v.cpu(), cache_seqlens=seqlens.cpu(), cache_batch_idx=index.cpu(), causal=True, window_size=(7, -1), **{n: x.cpu() for n, x in rotary.items()})
        assert all(torch.equal(one.cpu(), other) for one, other in zip(mine, plain))
        torch.testing.assert_close(out.cpu(), wanted, rtol=2e-2, atol=1e-2)
    table = torch.tensor([[3, 0], [2, 1]], dtype=INT).cuda()
    paged = CACHED(q, k_cache, v_cache, cache_seqlens=seqlens, block_table=table)
    whole = [torch.stack([torch.cat(list(cache[row])) for row in table.tolist()]) for cache in (k_cache, v_cache)]
    torch.testing.assert_close(paged, CACHED(q, *whole, cache_seqlens=seqlens), rtol=2e-2, atol=1e-2)


def test_what_would_wait_for_the_device_is_refused_by_name():
    rows, one = drawn(9, 4, 8).cuda(), drawn(2, 1, 4, 8).cuda()
    at_q, at_k = offsets(4, 5).cuda(), offsets(3, 6).cuda()
    k_cache, v_cache = (x.cuda() for x in caches(2))
    refused = [
        (lambda: VARLEN(rows, rows, rows, at_q, at_k, 5, 6, window_size=(2, 1)), "a window without causal.* on a GPU"),
        (lambda: VARLEN(rows, rows, rows, at_q, at_q, 5, 5, causal=True, alibi_slopes=OWN_SLOPES.cuda()), r"alibi_slopes \[batch, nheads\] on a GPU"),
        (lambda: VARLEN(rows, k_cache, v_cache, at_q, at_k, 5, 6, block_table=torch.zeros(2, 1, dtype=INT).cuda()), "block_table of sequences .*on a GPU"),
        (lambda: CACHED(one, k_cache, v_cache, cache_leftpad=torch.zeros(2, dtype=INT).cuda()), "cache_leftpad on a GPU"),
    ]
    for call, text in refused:
        with pytest.raises(rapt.UnsupportedError, match=text):
            call()
    # The same offsets, whatever they hold, need no waiting.
    assert VARLEN(rows, rows, rows, at_q, at_q, 5, 5, window_size=(2, 1), alibi_slopes=SLOPES.cuda()).isfinite().all()
