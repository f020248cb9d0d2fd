"""Few queries over keys that lie on many ranks: every rank attends its own, and all ranks merge all parts in the order of ranks, to the same bits."""

import rapt
import torch
from rapt import KindError, OptionError, RaptError, ShapeError, UnsupportedError
from rapt.torch import _ops

from . import _blocks, _group
from ._attention import _four
from ._merge import Merged, accumulation


def decode(
    q,
    k_shard,
    v_shard,
    *,
    group=None,
    lengths=None,
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    layout="bhsd",
    return_lse=False,
):
    """Attention of the same few queries on every rank to a cache of which each rank holds a part of every sequence; every rank gets the answer.

    q: [batch, num_q_heads, q_len, head_dim], the same on all ranks. k_shard, v_shard: this rank's keys, [batch, num_kv_heads, most keys, head_dim(_v)];
    those of rank 0 are the first of each sequence, those of rank 1 follow, and the last query is at the last key of all.
    lengths: how many keys of each sequence this rank has: ints, or int32 or int64 [batch]; None is all of k_shard. Sequences may have none on a rank.
    causal: None, False, True or "bottom_right". causal of several queries, window and alibi_slopes need lengths on the host (ints, or a tensor in host memory).
    """
    refused, request = None, {"call": "decode"}
    peers = _group.peers_of(group)
    try:
        if causal is True:
            causal = "bottom_right"
        if causal not in (None, False, "bottom_right"):
            raise OptionError(f"causal = {causal!r}; allowed: None, False, True, 'bottom_right': the last query is at the last key")
        causal = causal or None
        request, counts = _request(q, k_shard, v_shard, lengths, causal, window, softcap, scale, sinks, alibi_slopes, layout)
    except (RaptError, TypeError) as error:
        refused = error
    pages = _group.agree(peers, request, refused)
    _group.connect(peers, q.device)
    options = {"softcap": softcap, "scale": scale}
    with torch.no_grad():
        q4, k4, v4 = (_four(t, layout) for t in (q, k_shard, v_shard))
        if request["placed"]:
            every = _counts_of_all(peers, counts)
            out, lse = _by_sequence(peers, q4, k4, v4, every, causal, window, alibi_slopes, options)
        else:
            out, lse = _at_once(q4, k4, v4, lengths, options)
        out, lse = _merged(peers, out, lse, sinks, [page["own"]["keys"] for page in pages])
        answer = torch.empty((*q.shape[:-1], v_shard.shape[-1]), dtype=q.dtype, device=q.device)
        _four(answer, layout).copy_(out)
    lse = lse[0] if q.dim() == 3 else lse
    return (answer, lse) if return_lse else answer


def _request(q, k, v, lengths, causal, window, softcap, scale, sinks, slopes, layout):
    """(what ranks must have alike, the keys of each sequence where the host knows them)."""
    for name, tensor in (("q", q), ("k_shard", k), ("v_shard", v)):
        if not isinstance(tensor, torch.Tensor):
            raise KindError(f"{name} is a {type(tensor).__name__}: over ranks q, k and v are torch tensors. Mend: `torch.from_dlpack({name})`")
        if tensor.dim() not in (3, 4):
            raise ShapeError(f"{name} has {tensor.dim()} dimensions; allowed: 3 or 4. Mend: `{name}.unsqueeze(0)`")
    rapt.explain(
        q, k, v, causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks, alibi_slopes=slopes, layout=layout,
        out_dtype=accumulation(q.dtype),
    )  # fmt: skip
    if _ops.needs_grad((q, k, v, sinks)):
        raise UnsupportedError("decode has no gradient, and an input requires grad. Mend: `with torch.no_grad():`")
    of_q, of_k, of_v = (_four(t, layout) for t in (q, k, v))
    placed = bool(causal and of_q.shape[2] > 1) or window is not None or slopes is not None
    batch, most = of_k.shape[0], of_k.shape[2]
    counts = [most] * batch
    if isinstance(lengths, torch.Tensor):
        if lengths.shape != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
            raise ShapeError(f"lengths is {lengths.dtype} of sizes {tuple(lengths.shape)}; allowed: int32 or int64 of ({batch},), or {batch} ints")
        if lengths.device.type != "cpu" and placed:
            raise UnsupportedError(
                f"lengths lie on {lengths.device}; with causal of several queries, a window or slopes the host must know which keys are seen. Mend: `lengths.tolist()`"
            )
        counts = lengths.tolist() if lengths.device.type == "cpu" else None
    elif lengths is not None:
        counts = [int(n) for n in lengths]
        if len(counts) != batch:
            raise ShapeError(f"lengths has {len(counts)} numbers; allowed: {batch}, one for each sequence")
    if counts is not None and any(not 0 <= n <= most for n in counts):
        raise OptionError(f"lengths = {counts[:8]}; allowed: 0 to {most}, the keys that k_shard has room for")
    request = {
        "call": "decode",
        "dtype": str(q.dtype),
        "device": q.device.type,
        "sizes": {
            "batch": of_q.shape[0], "num_q_heads": of_q.shape[1], "num_kv_heads": of_k.shape[1], "q_len": of_q.shape[2], "head_dim": of_q.shape[3],
            "head_dim_v": of_v.shape[3],
        },
        "causal": causal,
        **_group.numbers(window, softcap, scale),
        "sinks": None if sinks is None else str(sinks.dtype),
        "alibi_slopes": slopes is not None,
        "placed": placed,
        "own": {"keys": None if counts is None else sum(counts)},
    }  # fmt: skip
    return request, counts


def _counts_of_all(peers, counts):
    """The keys of each sequence on each rank."""
    every = [torch.empty(len(counts), dtype=torch.int64) for _ in range(peers.world)]
    every[peers.rank] = torch.tensor(counts, dtype=torch.int64)
    if peers.world > 1:
        _group.share(peers, "the lengths of every rank", every, on_host=True)
    return [one.tolist() for one in every]


def _at_once(q, k, v, lengths, options):
    """The part of this rank, where each of its keys is seen by each query."""
    dtype = accumulation(q.dtype)
    if lengths is None:
        return rapt.attention(q, k, v, **options, out_dtype=dtype, return_lse=True)
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.tensor([int(n) for n in lengths], dtype=torch.int32, device=q.device)
    out, lse = rapt.attention_with_kvcache(
        *(t.transpose(1, 2) for t in (q, k, v)), cache_seqlens=lengths.to(torch.int32), **options, out_dtype=dtype, return_lse=True
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _by_sequence(peers, q, k, v, every, causal, window, slopes, options):
    """The same where what is seen follows from where a key lies in its sequence."""
    dtype = accumulation(q.dtype)
    outs, lses = [], []
    q_len = q.shape[2]
    for sequence in range(q.shape[0]):
        counts = [of[sequence] for of in every]
        start = sum(counts[: peers.rank])
        place = ((start, start + counts[peers.rank]),) if counts[peers.rank] else ()
        # The queries are the last tokens of the sequence: windows and distances count from there.
        kv_len = sum(counts)
        merged = Merged((1, *q.shape[1:3], v.shape[3]), dtype, q.device)
        one_q, one_k, one_v = (t[sequence : sequence + 1] for t in (q, k, v))
        for piece in _blocks.pieces(((0, q_len),), place, ((0, q_len, 0, kv_len),), causal or _blocks.AT_THE_END, window, slopes is not None):
            operands = _blocks.operands(piece, None, slopes, dtype)
            (r0, r1), (k0, k1) = piece.rows, piece.keys
            out, lse = rapt.attention(
                one_q[:, :, r0:r1], one_k[:, :, k0:k1], one_v[:, :, k0:k1], **operands.options, **options, out_dtype=dtype, return_lse=True
            )  # fmt: skip
            merged.add(piece.rows, out, lse if operands.of_rows is None else lse + operands.of_rows)
        out, lse = merged.finish()
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _merged(peers, out, lse, sinks, keys):
    """The parts of all ranks, in the order of ranks; a rank without keys sends none."""
    merged = Merged(tuple(out.shape), out.dtype, out.device)
    parts = [None] * peers.world
    for rank in range(peers.world):
        if rank == peers.rank:
            parts[rank] = torch.cat([out, lse.unsqueeze(-1)], -1)
        else:
            parts[rank] = torch.empty((*out.shape[:-1], out.shape[-1] + 1), dtype=out.dtype, device=out.device)
    if peers.world > 1:
        _group.share(peers, "the parts of every rank", parts, skip=[rank for rank, count in enumerate(keys) if count == 0])
    for rank, part in enumerate(parts):
        if keys[rank] != 0:
            merged.add((0, out.shape[2]), part[..., :-1].contiguous(), part[..., -1].contiguous())
    return merged.finish(sinks)
