"""Where tokens lie: which positions of the whole sequence the rows of each rank have, and tensors dealt to ranks and brought together.

    contiguous   rank 0 has the first tokens, rank 1 those behind them, …
    zigzag       two parts of each rank: part r from the front and part r from the back, so that under a causal mask every rank has as
                 many pairs of queries and keys; of n tokens of a rank the front part has n - n // 2

A rank's places are ranges (start, stop), in the order of its rows, none of them empty.
"""

import functools
import itertools

import torch
from rapt import OptionError

ORDERS = ("contiguous", "zigzag")


def expect_order(order):
    """Raises where `order` is none."""
    if order not in ORDERS:
        raise OptionError(f"order = {order!r}; allowed: {', '.join(map(repr, ORDERS))}")


@functools.lru_cache(256)
def places(lengths, order):
    """Of each rank its places, from the tokens that each has."""
    if order == "contiguous":
        parts = [[n] for n in lengths]
        sequence = [(rank, 0) for rank in range(len(lengths))]
    else:
        parts = [[n - n // 2, n // 2] for n in lengths]
        sequence = [(rank, 0) for rank in range(len(lengths))] + [(rank, 1) for rank in reversed(range(len(lengths)))]
    found, start = [[None] * len(of) for of in parts], 0
    for rank, part in sequence:
        stop = start + parts[rank][part]
        found[rank][part] = (start, stop)
        start = stop
    return tuple(tuple(place for place in of if place[0] < place[1]) for of in found)


def dealt(length, world, order):
    """How many of `length` tokens each rank has where `shard` deals them: parts that differ by one at most, the longer ones first."""
    count = world * (2 if order == "zigzag" else 1)
    parts = [length // count + (part < length % count) for part in range(count)]
    if order == "contiguous":
        return tuple(parts)
    return tuple(parts[rank] + parts[count - 1 - rank] for rank in range(world))


def local_rows(of):
    """(first local row, start, stop) of each of a rank's places."""
    sizes = [stop - start for start, stop in of]
    return [(first, *place) for first, place in zip(itertools.accumulate(sizes, initial=0), of)]


def positions(length, rank, world, order, device=None):
    """The positions, int64, of the tokens that `shard` gives to `rank`."""
    of = places(dealt(length, world, order), order)[rank]
    made = [torch.arange(start, stop, device=device) for start, stop in of]
    return torch.cat(made) if made else torch.arange(0, device=device)


def part(tensor, dim, rank, world, order):
    """The tokens of `rank`."""
    of = places(dealt(tensor.shape[dim], world, order), order)[rank]
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in of]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)
