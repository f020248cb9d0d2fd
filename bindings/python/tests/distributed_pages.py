"""What each rank does in test_distributed.py about the way that pages go: through memory of the host, or through the group's backend."""

import functools
from unittest import mock

import distributed_cases as base
import torch
import torch.distributed as dist

import rapt
import rapt.distributed as rd
from rapt.distributed import _group, _host, _pages


def memory_or_the_backend():
    """Through memory where all ranks can; through the backend where one of them can watch no process. Answers and errors are the same."""
    rank, q = dist.get_rank(), base.random(1, 4, 6, 8)
    expected = rd.attention(q, q, q)
    assert type(_group.peers_of(None).pages("attention")) is _pages.Shared
    group = dist.new_group(list(range(base.WORLD)))
    with mock.patch.object(_host, "processes", lambda own=_host.processes: None if rank == 1 else own()):
        assert torch.equal(rd.attention(q, q, q, group=group), expected)
    assert type(_group.peers_of(group).pages("attention")) is _pages.Sent
    base.raises(rapt.OptionError, lambda: rd.attention(q, q, q, group=group, causal=rank == 2), "rank 2 has causal 'top_left'")
    assert torch.equal(rd.attention(q, q, q, group=group), expected)


def cases():
    """{name: what runs}."""
    return {"pages go through memory or the backend": memory_or_the_backend}


def _sent(run):
    """A fault where pages go through the backend."""

    def fault(rank, group):
        with mock.patch.object(_host, "processes", lambda: None):
            run(rank, group)

    return fault


FAULTS = {
    "dies before, pages sent": _sent(functools.partial(base.dies_before, told="The backend says")),
    "hangs, pages sent": _sent(base.hangs),
}
