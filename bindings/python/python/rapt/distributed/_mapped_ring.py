"""The ring where ranks read one another's memory (`_mapped`): the blocks, the merges and the sums of `_methods.ring`, in its order, to its bits.

    K and V     each rank puts its own, and reads those of the rank before it, of the one before that, …, while it computes with what it has read
    dk and dv   each rank puts what it has of a block's, and the block's owner reads them and adds: its own, those of the rank behind it, …

The host waits once for its own K and V to lie ready, behind which the own block is enqueued, and for each gradient one step behind what is enqueued.
"""

import torch

from ._mapped import octets, reached

# Gradients of blocks that lie in a rank's part at a time: one is being computed, one told, one may still be read.
SLOTS = 3


def _count(like, length):
    """Elements of a block of this length."""
    return like.shape[0] * like.shape[1] * length * like.shape[3]


class Reader:
    """Blocks of K and V, read out of their owners' memory."""

    def __init__(self, call, k, v, mask):
        self.call, self.own, self.mask = call, (k, v), mask

    def _begin(self, owner, starts, memory, after):
        """(k and v of a block where they will be, the mark behind them)."""
        found, blocks = [], []
        for at, of in zip(self.own, memory):
            shape = (*at.shape[:2], self.call.kv_lengths[owner], at.shape[3])
            found.append(of[: torch.Size(shape).numel() * at.dtype.itemsize])
            blocks.append(found[-1].view(at.dtype).view(shape))
        return blocks, self.call.mapped.read([(owner, *each) for each in zip(starts[owner], found)], after)

    def blocks(self):
        call, rank, world, mapped = self.call, self.call.rank, self.call.peers.world, self.call.mapped
        put = [mapped.put(t) for t in self.own]
        others = [(rank - step) % world for step in range(1, world)]
        seen = [owner for owner in others if call.sees(rank, owner, self.mask)]
        most = max((call.kv_lengths[owner] for owner in seen), default=0)
        memory = [[mapped.landing(_count(t, most) * t.dtype.itemsize) for t in self.own] for _ in seen[:2]]
        # Both are free as soon as K and V are put: before the own block is computed.
        after = mapped.mark()
        free = [after, after]
        yield rank, *self.own
        starts = mapped.tell(put, after)
        arriving = self._begin(seen[0], starts, memory[0], free[0]) if seen else None
        count = 0
        for owner in others:
            if owner not in seen:
                yield owner, None, None
                continue
            block, mark = arriving
            count += 1
            if count < len(seen):
                arriving = self._begin(seen[count], starts, memory[count % 2], free[count % 2])
            mapped.join(mark)
            yield owner, *block
            free[(count - 1) % 2] = mapped.mark()


class _Gradients:
    """dk and dv of the blocks of all ranks: those of other blocks in slots of this rank's part, and those of its own, to which it adds what it reads."""

    def __init__(self, call, k, v, dtype, mask):
        self.call, self.mask, self.dtype, self.like = call, mask, dtype, (k, v)
        self.home = [torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (k, v)]
        most, mapped = max(call.kv_lengths), call.mapped
        self.slots = [[mapped.room((_count(t, most),), dtype) for t in (k, v)] for _ in range(min(SLOTS, call.peers.world - 1))]
        self.memory = [mapped.landing(of.nbytes) for of in self.home]
        self.free = mapped.mark()
        self.read = None

    def of(self, step, owner):
        """Zeros, to which those of a block are added."""
        found = []
        for (_, memory), like in zip(self.slots[(step - 1) % len(self.slots)], self.like):
            shape = (*like.shape[:2], self.call.kv_lengths[owner], like.shape[3])
            found.append(memory[: torch.Size(shape).numel()].view(shape).zero_())
        return found

    def tell(self, step, mark):
        """Once what was computed in a step is there, says so, and adds what another rank has of the own block."""
        call, mapped = self.call, self.call.mapped
        other = (call.rank + step) % call.peers.world
        # A page says too that what its rank began to read before has been read: the slot of that is free.
        reached(self.read)
        starts = mapped.tell([start for start, _ in self.slots[(step - 1) % len(self.slots)]], mark)[other]
        if call.sees(other, call.rank, self.mask):
            parts = [memory.view(self.dtype).view(of.shape) for memory, of in zip(self.memory, self.home)]
            self.read = mapped.read([(other, start, octets(part)) for start, part in zip(starts, parts)], self.free)
            mapped.join(self.read)
            for of, part in zip(self.home, parts):
                of.add_(part)
            self.free = mapped.mark()


def backward(call, rows, k, v, slopes, d_mask, differentiate):
    """(dq, dk, dv) in the dtype of sums."""
    dq = torch.zeros(rows.q.shape, dtype=rows.sums, device=rows.q.device)
    gradients, waiting = _Gradients(call, k, v, rows.sums, rows.mask), None
    for owner, some_k, some_v in Reader(call, k, v, rows.mask).blocks():
        step = (call.rank - owner) % call.peers.world
        if some_k is not None:
            made = gradients.home if step == 0 else gradients.of(step, owner)
            differentiate(call, rows, some_k, some_v, call.kv_places(owner), slopes, dq, *made, d_mask)
        if waiting is not None:
            gradients.tell(*waiting)
        waiting = (step, call.mapped.mark()) if step else None
    if waiting is not None:
        gradients.tell(*waiting)
    return dq, *gradients.home
