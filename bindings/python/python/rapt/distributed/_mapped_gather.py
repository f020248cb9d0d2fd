"""All keys, a part of the heads at a time, where ranks read one another's memory (`_mapped`): what `_methods.all_gather` is otherwise sent, to its bits.

Each rank puts all of its own, and tells when the first part lies ready and when all do: the others are put while the first is on its way. Each part is read
while the one before it is computed with. Deliberately absent: a choice among the rows of a rank of whose keys some query sees a part; all are read.
"""

import typing

import torch

from ._places import local_rows, places


class _Part(typing.NamedTuple):
    """A part of the heads of K or V, as [len, batch, heads, head_dim]: the rows of one place lie in one piece."""

    rows: torch.Tensor
    shape: tuple  # of all ranks'
    row_bytes: int

    @classmethod
    def of(cls, tensor, heads, total):
        rows = tensor[:, heads].permute(2, 0, 1, 3)
        return cls(rows, (total, *rows.shape[1:]), rows.shape[1:].numel() * rows.itemsize)


def read(call, k, v, heads, mask):
    """(all keys, all values) of these parts of the heads, one part after another. Of ranks whose keys no row sees nothing is read."""
    mapped, total = call.mapped, sum(call.kv_lengths)
    parts_of = lambda part: [_Part.of(tensor, part, total) for tensor in (k, v)]  # noqa: E731
    most_heads = max(part.stop - part.start for part in heads)
    memory = [[mapped.landing(total * t.shape[0] * most_heads * t.shape[3] * t.itemsize) for t in (k, v)] for _ in heads[:2]]
    parts = [parts_of(heads[0])]
    put = [[mapped.put(of.rows) for of in parts[0]]]
    # Behind it the first part lies ready, and whatever used this memory before is done.
    free = mapped.mark()
    told = mapped.telling(put[0], free)
    parts += map(parts_of, heads[1:])
    put += [[mapped.put(of.rows) for of in part] for part in parts[1:]]
    all_put = mapped.mark()
    chunks = [
        (owner, *rows)
        for owner, of in enumerate(places(call.kv_lengths, call.order))
        if call.sees(call.rank, owner, mask)
        for rows in local_rows(of)
    ]

    def begin(at, starts, free):
        """(the whole tensors of a part where they will be, the mark behind them)."""
        wholes, what = [], []
        for n, (of, octets) in enumerate(zip(parts[at], memory[at % 2])):
            what += [(owner, starts[owner][n] + first * of.row_bytes, octets[start * of.row_bytes : stop * of.row_bytes]) for owner, first, start, stop in chunks]
            wholes.append(octets[: total * of.row_bytes].view(k.dtype).view(of.shape).permute(1, 2, 0, 3))
        return wholes, mapped.read(what, free)

    arriving = begin(0, told(), free)
    for at in range(len(heads)):
        wholes, mark = arriving
        mapped.join(mark)
        yield wholes
        if at + 1 == len(heads):
            return
        if at == 0:
            starts = mapped.tell(put[1:], all_put)
        # What the part before this one was computed from makes room for the next.
        room, free = free, mapped.mark()
        arriving = begin(at + 1, [of[at] for of in starts], room)
