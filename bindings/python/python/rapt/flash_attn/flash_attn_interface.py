"""The functions of `flash_attn.flash_attn_interface`, by their names, arguments and results."""

import torch
from rapt._native import IndexRangeError, OptionError, RaptError, ShapeError, UnsupportedError

from . import _requests
from ._requests import Cache, Sequences, check_tensor, in_flash_words, request


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """softmax(q·kᵀ · softmax_scale)·v on `[batch, seqlen, nheads, headdim]`.

    k and v may have fewer heads, which groups of q's share, and v another headdim. causal: query i attends keys up to i + kv_len - q_len.
    window_size: (left, right) of a query's own key, both included, -1 unbounded; causal is right = 0. softcap: c of c·tanh(s / c), 0 none. alibi_slopes:
    `[nheads]` or `[batch, nheads]`; -slope·|i + kv_len - q_len - j| is added. deterministic: every call is, with the same bits.
    return_attn_probs: also lse `[batch, nheads, seqlen]`, and S_dmask, which is empty: probabilities are never formed.
    """
    try:
        asked = request(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
        _expect_no_probabilities(return_attn_probs, asked)
        return _answer(q, return_attn_probs, _requests.dense(q, k, v, asked, return_attn_probs))
    except RaptError as error:
        raise in_flash_words(error) from None


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` on k and v in one tensor `[batch, seqlen, 2, nheads, headdim]`, read in place; its gradient is one tensor too."""
    k, v = _apart("kv", kv, 2, ("batch", "seqlen"))
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` on q, k and v in one tensor `[batch, seqlen, 3, nheads, headdim]`, read in place; its gradient is one tensor too."""
    q, k, v = _apart("qkv", qkv, 3, ("batch", "seqlen"))
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )  # fmt: skip


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """`flash_attn_func` for each of many sequences that lie one after another: q `[total_q, nheads, headdim]`, k and v `[total_k, nheads_k, headdim]`.

    cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`, where each begins. max_seqlen_q, max_seqlen_k: at least the longest; no result depends on them.
    block_table: int32 `[batch, blocks]`; k and v are then `[num_blocks, page_block_size, nheads_k, headdim]`. return_attn_probs: also lse `[nheads, total_q]`, and S_dmask, which is empty.
    """
    try:
        asked = request(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
        _expect_no_probabilities(return_attn_probs, asked)
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if block_table is None:
            answer = _requests.packed(q, k, v, sequences, asked, return_attn_probs)
        else:
            answer = _paged(q, k, v, sequences, block_table, asked)
        return _answer(q, return_attn_probs, answer)
    except RaptError as error:
        raise in_flash_words(error) from None


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` on k and v in one tensor `[total_k, 2, nheads, headdim]`, read in place; its gradient is one tensor too."""
    k, v = _apart("kv", kv, 2, ("total",))
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` on q, k and v in one tensor `[total, 3, nheads, headdim]`, read in place; its gradient is one tensor too."""
    q, k, v = _apart("qkv", qkv, 3, ("total",))
    try:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
            alibi_slopes, deterministic, return_attn_probs,
        )  # fmt: skip
    except RaptError as error:
        words = {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "max_seqlen_q": "max_seqlen", "max_seqlen_k": "max_seqlen"}
        raise in_flash_words(error, **words) from None


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Attention of q `[batch, seqlen, nheads, headdim]` to a cache, after k and v `[batch, seqlen_new, nheads_k, headdim]` were written behind its keys.

    k_cache, v_cache: `[batch_cache, seqlen_cache, nheads_k, headdim]`, or with block_table (int32 `[batch, blocks]`) `[num_blocks, page_block_size, nheads_k, headdim]`; written in place.
    cache_seqlens: int, or int32 `[batch]`: the keys before the new ones. cache_batch_idx: int32 `[batch]`, which entry of the cache is each sequence's.
    cache_leftpad: int32 `[batch]`, the row of a sequence's first key; cache_seqlens counts the rows before it too.
    rotary_cos, rotary_sin: `[positions, rotary_dim / 2]` in q's dtype: k is turned by the angles of the positions at which it is written, q by those from
    cache_seqlens on (all by that one, unless causal or within a window). num_splits: no result depends on it.
    return_softmax_lse: also lse `[batch, nheads, seqlen]`. It has no gradient.
    """
    try:
        asked = request(softmax_scale, causal, window_size, softcap, alibi_slopes)
        if not isinstance(num_splits, int) or num_splits < 0:
            raise OptionError(f"num_splits = {num_splits!r}; allowed: an int from 0 up")
        check_tensor("q", q, _requests.DENSE)
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_tensor(name, x, _requests.DENSE if block_table is None else _requests.PAGED)
        cache = Cache(k_cache, v_cache, k, v, cache_seqlens, block_table)
        cache = _laid(cache, cache_batch_idx, cache_leftpad)
        if rotary_cos is not None or rotary_sin is not None:
            q, cache = _turned(q, cache, (rotary_cos, rotary_sin, rotary_interleaved), asked)
        if cache_leftpad is None:
            out, lse = _requests.cached(q, cache, asked)
        else:
            out, lse = _padded(q, cache, cache_batch_idx, cache_leftpad, asked)
        return (out, lse) if return_softmax_lse else out
    except RaptError as error:
        raise in_flash_words(error, page_table="block_table" if cache_batch_idx is None else "cache_batch_idx") from None


# --- what they have in common ------------------------------------------------------------------------------------------------


def _answer(q, gives_lse, answer):
    out, lse = answer
    return (out, lse, q.new_empty(0)) if gives_lse else out


def _expect_no_probabilities(return_attn_probs, asked):
    if return_attn_probs and asked.dropout_p:
        raise UnsupportedError(
            f"return_attn_probs with dropout_p = {asked.dropout_p}: S_dmask would be probabilities, which are never formed. Mend: `return_attn_probs=False`"
        )


def _apart(name, x, count, leading):
    """The `count` tensors that lie in one, as views; autograd makes one tensor of their gradients."""
    check_tensor(name, x, (*leading, str(count), "nheads", "headdim"))
    if x.shape[-3] != count:
        raise ShapeError(f"{name} has shape {list(x.shape)}: asked are [{', '.join(leading)}, {count}, nheads, headdim]")
    return x.unbind(-3)


def _paged(q, k, v, sequences, block_table, asked):
    """Sequences of queries one after another, whose keys lie in pages."""
    if asked.dropout_p:
        raise UnsupportedError("dropout_p beside block_table: keys in pages have neither dropout nor gradients. Mend: `dropout_p=0.0`")
    check_tensor("q", q, _requests.PACKED)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, _requests.PAGED)
    check_tensor("block_table", block_table, ("batch", "blocks"))
    cu_seqlens_q, cu_seqlens_k, *_ = sequences
    sequences.check(False)
    if not (q.is_cpu and cu_seqlens_q.is_cpu):
        raise UnsupportedError(
            "block_table of sequences one after another on a GPU: their lengths would have to be waited for. "
            "Mend: `flash_attn_with_kvcache(q.unflatten(0, (batch, -1)), k, v, cache_seqlens=cu_seqlens_k.diff(), block_table=block_table)` where they are equal"
        )
    batch = len(cu_seqlens_q) - 1
    if len(block_table) != batch:
        raise ShapeError(f"block_table has {len(block_table)} rows, cu_seqlens_q {batch} sequences")
    cache = Cache(k, v, None, None, cu_seqlens_k.diff(), block_table)
    for b, length in enumerate(cache.seqlens.tolist()):
        if not 0 <= length <= cache.capacity:
            raise IndexRangeError(f"sequence {b} has {length} keys by cu_seqlens_k; allowed: 0 to {cache.capacity}, as many as its row of block_table has")
    own = _requests.slopes_of_each(asked.slopes, batch, q.shape[1]) or [asked.slopes] * batch
    return _requests.by_sequence(q, cu_seqlens_q, lambda b, rows: _requests.cached(rows, cache.of(b), asked._replace(slopes=own[b])))


def _laid(cache, cache_batch_idx, cache_leftpad):
    """The cache where its sequences are named by `cache_batch_idx`: each entry is one page, as long as the cache."""
    for name, each in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if each is None:
            continue
        _requests.check_int32(name, each, "batch")
        if cache.table is not None:
            raise UnsupportedError(f"{name} beside block_table, which says where keys lie. Mend: `{name}=None`")
    if cache_batch_idx is None or cache_leftpad is not None:
        return cache
    seqlens = cache.k.shape[1] if cache.seqlens is None else cache.seqlens
    return cache._replace(seqlens=seqlens, table=cache_batch_idx[:, None])


def _padded(q, cache, cache_batch_idx, cache_leftpad, asked):
    """Sequences whose keys begin at `cache_leftpad`: a view of each."""
    if not (q.is_cpu and cache_leftpad.is_cpu):
        raise UnsupportedError(
            "cache_leftpad on a GPU: the numbers would have to be waited for. Mend: one call for each sequence, on `k_cache[b : b + 1, leftpad:]`"
        )
    if len(cache_leftpad) != len(q):
        raise ShapeError(f"cache_leftpad has {len(cache_leftpad)} numbers, q has {len(q)} sequences")
    entries = range(len(q)) if cache_batch_idx is None else cache_batch_idx.tolist()
    caches = []
    for b, (entry, first) in enumerate(zip(entries, cache_leftpad.tolist())):
        seqlens = cache.k.shape[1] if cache.seqlens is None else cache.seqlens
        seqlens = seqlens if isinstance(seqlens, int) else int(seqlens[b])
        if not 0 <= entry < len(cache.k):
            raise IndexRangeError(f"cache_batch_idx[{b}] is {entry}; allowed: 0 to {len(cache.k) - 1}, the entries of the cache")
        if not 0 <= first <= seqlens:
            raise IndexRangeError(f"cache_leftpad[{b}] is {first}; allowed: 0 to {seqlens}, the keys of that sequence")
        caches.append(cache.of(b, entry, first, seqlens - first))
    return _requests.one_by_one(q, caches, asked)


def _turned(q, cache, rotary, asked):
    """q and the new keys turned by their positions, which count from the first row of the cache."""
    cos, sin, interleaved = rotary
    if cos is None or sin is None:
        raise OptionError("rotary_cos and rotary_sin stand together, and one is None. Mend: the other one too")
    if cache.new_k is None:
        raise UnsupportedError("rotary_cos without new keys: k is turned, and q beside it. Mend: `k=…, v=…`, or a q that is turned already")
    if cache.seqlens is None:
        raise OptionError("cache_seqlens = None; allowed: an int or int32 [batch]: rotary_cos is read from there on")
    check_tensor("k", cache.new_k, _requests.DENSE)
    _requests.check_rotary(q, cos, sin, cache.capacity)
    begins = torch.as_tensor(cache.seqlens, device=q.device).expand(len(q))
    steps = torch.arange(max(q.shape[1], cache.new_k.shape[1]), device=q.device)
    # Lengths that the cache does not have are refused, or on a GPU make NaN: here they must only not fault.
    positions = (begins[:, None] + steps).clamp(0, len(cos) - 1)
    new = _requests.rotated(cache.new_k, positions[:, : cache.new_k.shape[1]], cos, sin, interleaved)
    of_q = positions[:, : q.shape[1]] if asked.left is not None or asked.right is not None else positions[:, :1].expand(-1, q.shape[1])
    return _requests.rotated(q, of_q, cos, sin, interleaved), cache._replace(new_k=new)
