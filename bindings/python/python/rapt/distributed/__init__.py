"""Attention over many devices, on torch.distributed (docs/guides/distributed.md).

    attention, varlen_attention     every rank has some tokens of q, k and v, and gets its part of the answer
    decode                          every rank has some keys of a cache, and all get the whole answer
    shard, unshard, positions       tokens dealt to ranks, brought together, and which they are
    PeerError                       another rank is gone, hangs, or is in another call

Every rank of the group makes the same call. Importing this imports torch.
"""

import torch

from . import _group, _places
from ._attention import attention, varlen_attention
from ._decode import decode
from ._group import PeerError

__all__ = ["PeerError", "attention", "decode", "positions", "shard", "unshard", "varlen_attention"]


def shard(tensor, dim, *, group=None, order="zigzag"):
    """This rank's tokens of a `tensor` that every rank has whole, along `dim`; a view where they lie side by side."""
    _places.expect_order(order)
    peers = _group.peers_of(group)
    return _places.part(tensor, dim, peers.rank, peers.world, order)


def positions(length, *, group=None, order="zigzag", device=None):
    """Which of `length` tokens `shard` gives this rank: int64, for position embeddings and the like."""
    _places.expect_order(order)
    peers = _group.peers_of(group)
    return _places.positions(length, peers.rank, peers.world, order, device)


def unshard(tensor, dim, *, group=None, order="zigzag"):
    """All tokens in order, on every rank, from each rank's `tensor`, which may have any length along `dim`. Has no gradient."""
    _places.expect_order(order)
    peers = _group.peers_of(group)
    dim %= tensor.dim()
    rest = [size for at, size in enumerate(tensor.shape) if at != dim]
    pages = _group.agree(peers, {"call": "unshard", "dtype": str(tensor.dtype), "sizes": {"dim": dim, "others": rest}, "order": order, "own": tensor.shape[dim]})
    lengths = tuple(page["own"] for page in pages)
    parts = [tensor.new_empty((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])) for length in lengths]
    with torch.no_grad():
        parts[peers.rank] = tensor.detach().contiguous()
        _group.share(peers, "the tokens of every rank", parts)
        found = []
        for part, places in zip(parts, _places.places(lengths, order)):
            found += [(start, part.narrow(dim, first, stop - start)) for first, start, stop in _places.local_rows(places)]
        found.sort(key=lambda of: of[0])
        return torch.cat([part for _, part in found], dim) if found else parts[peers.rank]
