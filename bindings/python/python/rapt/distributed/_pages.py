"""How pages go from rank to rank. Both ways have `begin`, which sends this rank's page and gives what waits for those of the others.

    Sent     by the group's backend for host memory: some hundred microseconds
    Shared   in memory that the processes of one host have mapped: some microseconds. Two places for each rank, used in turn: whoever writes its page n + 2 has
             read n + 1 of all ranks, which they wrote when they had read n. A page is there when its number, length and checksum are right, in whatever order
             its bytes arrive. Who waits looks on, and after a while sleeps in between and asks the kernel whether the processes live.

What a rank wrote to memory that others map before it sent a page is there for whoever has that page. Nobody waits longer than the group's timeout; which ranks
were lost, and why, is an answer. Deliberately absent: pages in pieces, and a group that goes on without a rank.
"""

import datetime
import mmap
import os
import select
import struct
import time
import zlib

import torch
import torch.distributed as dist
from rapt import _native

from . import _host

# Bytes of a page, at most.
PAGE = 4096
_TAG = 900
# Seconds of looking on without a pause, as long as ranks that call together are apart (100 to 200 µs on two H200s, 2026-11); then a pause is an eighth of what has been
# waited, so that it makes a wait no more than that longer, up to what is nothing beside a rank that is late.
_LOOKS, _PART, _LONGEST = 2e-4, 8, 1e-3


class Sent:
    """Through `group`, whose ranks `ranks` are."""

    def __init__(self, rank, ranks, group, timeout):
        self.rank, self.ranks, self.group, self.timeout = rank, ranks, group, timeout.total_seconds()

    def begin(self, text):
        """A function that gives (the pages of all, {rank that is lost: why})."""
        world = len(self.ranks)
        others = [rank for rank in range(world) if rank != self.rank]
        memory = [bytearray(PAGE) for _ in range(world)]
        memory[self.rank][: len(text)] = text
        every = [torch.frombuffer(of, dtype=torch.uint8) for of in memory]
        lost, works = {}, []
        for begin, tensors in ((dist.irecv, every), (dist.isend, [every[self.rank]] * world)):
            for rank in others:
                try:
                    works.append((rank, begin(tensors[rank], self.ranks[rank], group=self.group, tag=_TAG)))
                except RuntimeError as error:
                    lost.setdefault(rank, self._why(error))

        def finish():
            end = time.monotonic() + self.timeout
            for rank, work in works:
                if rank not in lost:
                    try:
                        work.wait(datetime.timedelta(seconds=max(0.05, end - time.monotonic())))
                    except RuntimeError as error:
                        lost[rank] = self._why(error)
            return [bytes(of).rstrip(b"\0") for of in memory], lost

        return finish

    def _why(self, error):
        return f"gone, or in no call within {self.timeout:g} s. The backend says: {first_line(error)}"


class Shared:
    """Through a file that all have mapped."""

    _HEAD = struct.Struct("<QII")  # number of the exchange, bytes of the page, `_checksum`
    _PLACE = 4096 + 64

    @classmethod
    def of(cls, rank, world, timeout, exchange):
        """One where all ranks can, else None on all. `exchange` gives what every rank gives it."""
        own, path = {"host": _host.processes(), "pid": os.getpid(), "path": None}, None
        if rank == 0 and own["host"] is not None:
            try:
                own["path"] = path = _host.new_file(2 * world * cls._PLACE)
            except OSError:
                own["host"] = None
        try:
            pages = exchange(own)
            hosts = {page["host"] for page in pages}
            if len(hosts) > 1 or None in hosts:
                return None
            made = None
            try:
                made = cls(rank, [page["pid"] for page in pages], pages[0]["path"], timeout)
            except OSError:
                pass
            return made if all(exchange(made is not None)) else None
        finally:
            if path is not None:
                os.unlink(path)

    def __init__(self, rank, pids, path, timeout):
        self.rank, self.world, self.timeout, self.number = rank, len(pids), timeout.total_seconds(), 0
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 2 * self.world * self._PLACE)
        self.processes = {of: _watched(pid) for of, pid in enumerate(pids) if of != rank}

    def begin(self, text):
        """A function that gives (the pages of all, {rank that is lost: why})."""
        _native.memory_fence()
        self.number += 1
        at = self._place(self.rank)
        self.memory[at + self._HEAD.size : at + self._HEAD.size + len(text)] = text
        self._HEAD.pack_into(self.memory, at, self.number, len(text), self._checksum(text))
        pages = [None] * self.world
        pages[self.rank] = text

        def finish():
            lost = self._wait(pages)
            _native.memory_fence()
            return pages, lost

        return finish

    def _place(self, rank):
        return (2 * rank + self.number % 2) * self._PLACE

    def _look(self, rank):
        """The page of a rank, if it is there."""
        at = self._place(rank)
        number, length, checksum = self._HEAD.unpack_from(self.memory, at)
        if number != self.number or length > PAGE:
            return None
        text = self.memory[at + self._HEAD.size : at + self._HEAD.size + length]
        return text if self._checksum(text) == checksum else None

    def _checksum(self, text):
        # From the number on: what the place had before has another, though it be the same text or none.
        return zlib.crc32(text, self.number & 0xFFFFFFFF)

    def _wait(self, pages):
        begun = time.monotonic()
        lost = {}
        while True:
            # Asked before its page is looked for: what a process has written before it ended is read.
            waited = time.monotonic() - begun
            ended = self._lost() if waited > _LOOKS else ()
            for rank in range(self.world):
                if pages[rank] is None and rank not in lost:
                    pages[rank] = self._look(rank)
                    if pages[rank] is None and rank in ended:
                        lost[rank] = "its process has ended"
            missing = [rank for rank in range(self.world) if pages[rank] is None and rank not in lost]
            if not missing:
                return lost
            if waited > self.timeout:
                return lost | dict.fromkeys(missing, f"gone, or in no call within {self.timeout:g} s")
            if waited < _LOOKS:
                os.sched_yield()
            else:
                time.sleep(min(waited / _PART, _LONGEST))

    def _lost(self):
        """Ranks whose processes are no more."""
        ended = _ended(self.processes.values())
        return {rank for rank, descriptor in self.processes.items() if descriptor in ended}


# By process, for all groups: a descriptor for each process that is watched. One that has ended keeps its own, which groups of that time may ask.
_descriptors = {}


def _watched(pid):
    """A descriptor that tells when this process, which lives, has ended."""
    if pid not in _descriptors or _ended([_descriptors[pid]]):
        _descriptors[pid] = os.pidfd_open(pid)
    return _descriptors[pid]


def _ended(descriptors):
    """Those whose processes have ended."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(0)}


def first_line(error):
    """What an error says, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
