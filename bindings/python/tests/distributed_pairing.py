"""How a backend without tags, which has one batch of a rank under way at a time, pairs what ranks send and receive: by order alone, as NCCL does."""

import collections

import torch.distributed as dist


class Recorded:
    """`batch_isend_irecv`, which keeps what each batch has: [(is it sent, other rank, bytes)]."""

    def __init__(self):
        self.batches, self._run = [], dist.batch_isend_irecv

    def __call__(self, ops):
        self.batches.append([(op.op is dist.isend, op.peer, op.tensor.numel()) for op in ops])
        return self._run(ops)


def left_over(batches):
    """Of each rank the batches that never end, where `batches` are those of each rank in their order: a batch ends when each of its messages has met the other
    rank's, which must be as long and first among those of that pair in that rank's batch."""
    waiting = [collections.deque(of) for of in batches]
    current = [None] * len(batches)
    moved = True
    while moved:
        moved = False
        for rank, of in enumerate(waiting):
            if not current[rank] and of:
                current[rank], moved = list(of.popleft()), True
        for rank, ops in enumerate(current):
            for op in list(ops or ()):
                is_sent, other, size = op
                if not is_sent or op != next(o for o in ops if o[:2] == op[:2]):
                    continue
                there = next((o for o in current[other] or () if o[:2] == (False, rank)), None)
                if there is not None:
                    assert there[2] == size, f"rank {rank} sends {size} bytes where rank {other} awaits {there[2]}"
                    ops.remove(op)
                    current[other].remove(there)
                    moved = True
    return [([ops] if ops else []) + list(of) for ops, of in zip(current, waiting)]
