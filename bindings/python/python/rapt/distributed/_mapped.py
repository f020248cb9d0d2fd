"""Tensors that ranks of one host copy out of one another's memory, where otherwise they are sent.

    put     a rank copies what others will read into its part of memory that all ranks have mapped
    tell    it tells in a page where that lies; on a GPU once it lies there: the host waits for the event behind the copies
    read    the others copy it to where they need it: a DMA engine of the GPU does, on a stream beside, and takes nothing from attention

Waiting for another rank is waiting for its page, on the host and within the group's timeout; no device ever waits for a rank. What was told stays readable
though its rank be gone: whoever has mapped memory holds it. A rank's page of the next call (`_group.agree`) says too that it has read all of this one
(`settle`), so memory is used again from call to call.

On GPUs the memory is PyTorch's symmetric memory (torch.distributed._symmetric_memory, backend "CUDA"), in host memory a file of /dev/shm without a name.
Deliberately absent: signals between devices, multicast, and memory of several hosts.
"""

import os
import typing

import torch
from rapt import UnsupportedError

from . import _group, _host

# Bytes to which what is put is aligned: TMA needs 16, a line of L2 is 128.
ALIGN = 256
# Bytes of K and V of a rank from which GPUs copy unasked: with fewer, computing hides less than the host waits.
LEAST = 1 << 25


def aligned(count):
    """`count` bytes, and what lies between them and the next tensor."""
    return -(-count // ALIGN) * ALIGN


def host_of(device):
    """What names the host whose memory a rank on this device can share: None where it can share none."""
    boot = _host.boot()
    if device.type == "cpu":
        return boot if _host.has_memory() else None
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.is_current_stream_capturing():
        return None
    try:
        from torch.distributed._symmetric_memory import _SymmetricMemory

        return boot if _SymmetricMemory.get_backend(device) == "CUDA" else None
    except (ImportError, AttributeError, RuntimeError):
        return None


def of_call(peers, pages, device, count, kv_bytes):
    """The memory through which the tensors of a call go, `count` bytes of each rank; None where the backend takes them. The same on all ranks.

    kv_bytes: of K and V of a rank. A call with transport="copies" that cannot is `UnsupportedError`.
    """
    page = pages[0]
    asked, hosts = page["transport"], [page["own"]["host"] for page in pages]
    if asked == "backend" or peers.world == 1 or asked is None and (device.type != "cuda" or kv_bytes < LEAST):
        return None
    if None in hosts:
        why = f"rank {hosts.index(None)} can share no memory, or captures a CUDA graph"
    elif len(set(hosts)) > 1:
        why = "the ranks are of several hosts"
    else:
        mapped = peers.mapped.setdefault(device, Mapped(peers, device))
        why = mapped.reserve(count)
        if why is None:
            return mapped
    if asked is None:
        return None
    raise UnsupportedError(f'transport="copies": {why}. Mend: `transport="backend"`')


class Mapped:
    """The memory of one group on one device of this rank."""

    def __init__(self, peers, device):
        self.peers, self.device = peers, device
        # capacity: bytes of each part; limit: those that were reserved last.
        self.parts, self.capacity, self.limit, self.used = None, 0, 0, 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last = self._refused = self._handle = None

    def reserve(self, count):
        """Room for `count` bytes of each rank, the same number on all: None, or why one of them has none. All ranks call it."""
        count = aligned(count)
        if self._refused is None and count > self.capacity:
            self.parts, self._handle, self.capacity = None, None, 0
            with torch.inference_mode(False):  # calls of any mode write there
                self._refused = self._map_on_gpus(count) if self.stream else self._map_on_host(count)
            self.capacity = 0 if self._refused else count
        self.limit = count
        return self._refused

    def _map_on_gpus(self, count):
        error = None
        try:
            from torch.distributed import _symmetric_memory

            own = _symmetric_memory._SymmetricMemory.empty_strided_p2p((count,), (1,), torch.uint8, self.device)
            self._handle = _symmetric_memory.rendezvous(own, self.peers.group)
            self.parts = [own if rank == self.peers.rank else self._handle.get_buffer(rank, (count,), torch.uint8) for rank in range(self.peers.world)]
        except (RuntimeError, AttributeError) as caught:
            error = caught
        return self._failed("memory that all GPUs map", error)[0]

    def _map_on_host(self, count):
        path = error = None
        try:
            path = _host.new_file(count)
        except OSError as caught:
            error = caught
        try:
            failed, pages = self._failed("files of memory", error, path=path)
            if not failed:
                try:
                    self.parts = [torch.from_file(page["own"]["path"], shared=True, size=count, dtype=torch.uint8) for page in pages]
                except RuntimeError as caught:
                    error = caught
                failed, _ = self._failed("files of memory that all have opened", error)
            return failed
        finally:
            if path is not None:
                os.unlink(path)

    def _failed(self, what, error, **own):
        """(of which rank something failed and why, or None; the pages of all)."""
        own["error"] = None if error is None else _group.first_line(error)[:400]
        pages = _group.compare(self.peers, {"call": what, "own": own})
        return next((f"rank {rank}: {page['own']['error']}" for rank, page in enumerate(pages) if page["own"]["error"]), None), pages

    # --- what a call does -----------------------------------------------------------------------------------------------------

    def room(self, shape, dtype):
        """(where it begins, memory of this rank's part) for a tensor that others may read."""
        start, count = self.used, torch.Size(shape).numel() * dtype.itemsize
        self.used += aligned(count)
        if self.used > self.limit:
            raise RuntimeError(f"{self.used} bytes are needed and {self.limit} reserved")
        return start, self.parts[self.peers.rank][start : start + count].view(dtype).view(shape)

    def put(self, tensor):
        """Where a copy of it begins, dense in the order of its dimensions."""
        start, memory = self.room(tensor.shape, tensor.dtype)
        copy(memory, tensor)
        return start

    def mark(self):
        """The end of what is enqueued so far on the current stream."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def tell(self, starts, after):
        """Of all ranks where theirs begin, each once what its `after` marks has passed."""
        return self.telling(starts, after)()

    def telling(self, starts, after):
        """The same in two steps: tells where this rank's begin, and gives a function that waits for the others."""
        reached(after)
        pages = _group.comparing(self.peers, {"call": "tensors lie ready", "own": {"starts": starts}})
        return lambda: [page["own"]["starts"] for page in pages()]

    def landing(self, count):
        """Memory of `count` bytes for what `read` writes."""
        memory = torch.empty(count, dtype=torch.uint8, device=self.device)
        self._used_beside(memory)
        return memory

    def _used_beside(self, memory):
        if self.stream is not None:
            memory.record_stream(self.stream)

    def read(self, what, after):
        """Begins to copy [(rank, start, bytes)], what each rank has there into these, once `after` has passed: the mark behind them."""
        copies = [(into, self.parts[rank][start : start + len(into)]) for rank, start, into in what]
        if self.stream is None:
            for into, source in copies:
                into.copy_(source)
            return None
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(after)
            for into, source in copies:
                into.copy_(source, non_blocking=True)
            self._last = self.stream.record_event()
        return self._last

    def join(self, mark):
        """What is enqueued from here on comes after `mark`."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def settle(self):
        """Waits on the host until all has been read, and begins anew with the memory of this rank."""
        if self.stream is None or not torch.cuda.is_current_stream_capturing():
            reached(self._last)
            self._last, self.used = None, 0

    def exchange(self, sends, receives):
        """Begins what `_group.begin` begins; what is sent may have any strides. (What `wait` needs lies in this rank's part and is told there.)"""
        starts, placed = [], {}
        for to in range(self.peers.world):
            tensors = [tensor for rank, tensor in sends if rank == to and tensor.numel()]
            # What several ranks get lies there once.
            key = tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)
            if key not in placed:
                placed[key] = self.used
                for tensor in tensors:
                    self.put(tensor)
            starts.append(placed[key])
        receives = [(rank, tensor) for rank, tensor in receives if tensor.numel()]
        for _, tensor in receives:
            self._used_beside(tensor)
        return Exchange(self, starts, receives, self.mark())


def copy(into, tensor):
    """`into.copy_(tensor)` of one dtype. On a GPU by the widest numbers that the rows of both are made of: PyTorch copies rows in another order one number after
    another: 64 MiB in 97 µs by 2 bytes and in 34 by 16 (H200, 2026-11)."""
    if tensor.is_cuda:
        wide = next((of for of in (torch.complex128, torch.int64) if all(_is_made_of(each, of.itemsize) for each in (into, tensor))), tensor.dtype)
        into, tensor = into.view(wide), tensor.view(wide)
    into.copy_(tensor)


def _is_made_of(tensor, count):
    """Whether rows of a tensor are numbers of `count` bytes, each where such a number can lie."""
    numbers = (*tensor.shape[-1:], *tensor.stride()[:-1], tensor.storage_offset())
    return tensor.dim() > 0 and tensor.stride(-1) == 1 and tensor.data_ptr() % count == 0 and all(n * tensor.itemsize % count == 0 for n in numbers)


def octets(tensor):
    """The bytes of a dense tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def reached(mark):
    """Waits on the host for what is marked."""
    if mark is not None:
        mark.synchronize()


class Exchange(typing.NamedTuple):
    """Tensors of every rank under way to every rank, in place of a `_group.Wire`. starts: where those for each rank begin in this one's part."""

    mapped: Mapped
    starts: list
    receives: list
    after: torch.cuda.Event | None

    def wait(self):
        """On the host until all have told; on a GPU the current stream waits for the copies."""
        mapped, what = self.mapped, []
        at = [starts[mapped.peers.rank] for starts in mapped.tell(self.starts, self.after)]
        for rank, tensor in self.receives:
            what.append((rank, at[rank], octets(tensor)))
            at[rank] += aligned(tensor.nbytes)
        mapped.join(mapped.read(what, self.after))
