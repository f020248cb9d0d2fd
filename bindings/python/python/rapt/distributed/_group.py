"""What ranks of a process group say to one another: requests before a call, tensors in it.

Before each call every rank sends every other one page that says what it asks for (`agree`), so a rank that asks for something else, that cannot serve its
part or that is not there is an error on every rank before a tensor travels. The pages of processes of one host go through memory that they share, others
through the group's backend for host memory (`_pages`); a group that has none (NCCL alone) gets one of gloo beside it when it is first used.

Tensors travel as bytes, by `batch_isend_irecv` (`Wire`): any backend, any dtype, any lengths.

Deliberately absent: waiting without end (each wait ends with the group's timeout), and going on after a peer was lost.
"""

import datetime
import json
import typing
import weakref

import rapt
import torch
import torch.distributed as dist
from rapt import DtypeMismatchError, OptionError, RaptError, ShapeError

from ._pages import PAGE, Sent, Shared, first_line

# Letters of an error in a page.
_MOST = 900
_RESTART = "Mend: end every rank and start them again, as `torchrun --max-restarts=N` does"
# What tells one call from another, and which error a difference is.
_KINDS = {"dtype": DtypeMismatchError, "sizes": ShapeError}


class PeerError(RaptError, RuntimeError):
    """Another rank is gone, hangs, is in another call, or could not serve its part. The group cannot be used further if a rank is gone."""


class Peers:
    """A process group, as this package uses it."""

    def __init__(self, group):
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = [dist.get_global_rank(group, rank) for rank in range(self.world)]
        self.calls = 0
        self.connected = set()
        # Memory of each rank that all have mapped, by device (`_mapped`).
        self.mapped = {}
        self.timeout = _timeout(group)
        self._on_host = self._pages = None

    def on_host(self):
        """The group whose backend takes tensors of host memory."""
        if self._on_host is None:
            if _has_host_backend(self.group):
                self._on_host = self.group
            else:
                self._on_host = dist.new_group(self.ranks, timeout=self.timeout, backend="gloo", use_local_synchronization=True)
        return self._on_host

    def pages(self, call):
        """What pages go through. All ranks ask for it first in the same `call`."""
        if self._pages is None:
            sent = Sent(self.rank, self.ranks, self.on_host(), self.timeout)
            exchange = lambda own: _told(self, call, sent.begin(json.dumps(own).encode()))  # noqa: E731
            self._pages = Shared.of(self.rank, self.world, self.timeout, exchange) or sent
        return self._pages


_known = weakref.WeakKeyDictionary()


def peers_of(group):
    """The `Peers` of a process group, of a `DeviceMesh` of one dimension, or of all ranks."""
    if not dist.is_initialized():
        raise OptionError('no process group; allowed: one that exists. Mend: `torch.distributed.init_process_group("gloo")`, in a program that torchrun starts')
    if group is None:
        group = dist.group.WORLD
    elif hasattr(group, "get_group"):
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise OptionError(f"group = {group!r}; allowed: None, or a process group that this rank is in")
    if group not in _known:
        _known[group] = Peers(group)
    return _known[group]


def _has_host_backend(group):
    try:
        return group._get_backend(torch.device("cpu")) is not None
    except RuntimeError:
        return False


def _timeout(group):
    for device in ("cuda", "cpu"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return datetime.timedelta(minutes=30)


def connect(peers, device):
    """Has all ranks take part in one collective of a GPU's backend, once: NCCL connects in the first, and a rank may have nothing to send in a later one."""
    if device.type == "cuda" and device not in peers.connected and peers.world > 1 and not torch.cuda.is_current_stream_capturing():
        dist.all_reduce(torch.zeros(1, device=device), group=peers.group)
        peers.connected.add(device)


def numbers(window, softcap, scale):
    """These options as a page has them."""
    window = None if window is None else [None if side is None else int(side) for side in window]
    return {"window": window} | {name: None if of is None else float(of) for name, of in (("softcap", softcap), ("scale", scale))}


# --- pages -------------------------------------------------------------------------------------------------------------------


def agree(peers, request, refused=None):
    """The requests of all ranks, where they fit together; else the same error on every rank.

    `request` is a dict of what must be equal, but for what stands under "own"; `refused` is the error that this rank has found in its part.
    """
    for mapped in peers.mapped.values():
        mapped.settle()
    peers.calls += 1
    return compare(peers, request, refused)


def compare(peers, request, refused=None):
    """The same within a call."""
    return comparing(peers, request, refused)()


def comparing(peers, request, refused=None):
    """The same in two steps: sends the page, and gives a function that waits for the others'."""
    page = {"number": peers.calls, **request}
    if refused is not None:
        page = {"number": peers.calls, "call": request["call"], "refused": [type(refused).__name__, str(refused)[:_MOST]]}
    text = json.dumps(page, ensure_ascii=False).encode()
    if len(text) > PAGE:
        raise OptionError(f"the request has {len(text)} bytes of options; allowed: {PAGE}")
    if peers.world == 1:
        begun = lambda: ([text], {})  # noqa: E731
    else:
        begun = peers.pages(page["call"]).begin(text)
    return lambda: _compared(peers, _told(peers, page["call"], begun), refused)


def _compared(peers, pages, refused):
    for rank, other in enumerate(pages):
        if "refused" in other:
            if refused is not None and rank == peers.rank:
                raise refused
            kind, message = other["refused"]
            kind = getattr(rapt, kind, PeerError)
            raise (kind if isinstance(kind, type) and issubclass(kind, RaptError) else PeerError)(f"rank {rank}: {message}")
    first = pages[0]
    for rank, other in enumerate(pages):
        for name in [*first, *(name for name in other if name not in first)]:
            if name != "own" and first.get(name) != other.get(name):
                raise _difference(name, rank, first, other)
    return pages


def _difference(name, rank, first, other):
    if name in ("number", "call"):
        return PeerError(
            f"rank {rank} is in call {other['number']} of this group ({other['call']}), rank 0 in call {first['number']} ({first['call']}). "
            "Mend: the same calls in the same order on every rank"
        )
    mine, theirs = _word(name, first.get(name)), _word(name, other.get(name))
    kind = _KINDS.get(name, OptionError)
    if name == "dtype":
        hint = f"`q, k, v = (t.to({first['dtype']}) for t in (q, k, v))` on rank {rank}"
    elif name == "needs grad":
        hint = "`with torch.no_grad():` on every rank, or inputs that require grad on every rank"
    else:
        hint = f"the same {name} on every rank"
    return kind(f"rank {rank} has {name} {theirs}, rank 0 has {mine}. Mend: {hint}")


def _word(name, value):
    if name == "sizes" and isinstance(value, dict):
        return ", ".join(f"{what}={size}" for what, size in value.items())
    return repr(value)


def _told(peers, call, begun):
    """What the pages of all ranks say."""
    pages, lost = begun()
    if lost:
        names = " and ".join(f"rank {rank}" for rank in sorted(lost))
        raise PeerError(
            f"{names} did not answer in call {peers.calls} of this group ({call}): {lost[min(lost)]}. {_RESTART}"
        )
    return [json.loads(page) for page in pages]


# --- tensors -----------------------------------------------------------------------------------------------------------------


class Wire(typing.NamedTuple):
    """Tensors under way. `what` says which, for the error."""

    peers: Peers
    what: str
    works: list
    kept: list

    def wait(self):
        """On the host until they are there; on a GPU the current stream waits."""
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise lost(self.peers, self.what, error) from error
        self.kept.clear()


def lost(peers, what, error):
    """The error of a tensor that did not arrive."""
    return PeerError(
        f"rank {peers.rank} waited for {what} in call {peers.calls} of this group, within {peers.timeout.total_seconds():g} s: that rank, or one that "
        f"it waits for, is gone or hangs. The backend says: {first_line(error)}. {_RESTART}"
    )


def begin(peers, what, sends, receives, first_tag=0, group=None):
    """Begins to send and receive `[(rank, contiguous tensor)]`; messages of one pair arrive in order. Tensors without elements do not travel."""
    tags, ops, kept = {}, [], []
    for direction, op, messages in (("to", dist.isend, sends), ("from", dist.irecv, receives)):
        for rank, tensor in messages:
            if tensor.numel() == 0:
                continue
            tag = tags[direction, rank] = tags.get((direction, rank), first_tag - 1) + 1
            octets = tensor.reshape(-1).view(torch.uint8)
            kept.append(tensor)
            ops.append(dist.P2POp(op, octets, peers.ranks[rank], group=group or peers.group, tag=tag))
    try:
        works = dist.batch_isend_irecv(ops) if ops else []
    except RuntimeError as error:
        raise lost(peers, what, error) from error
    return Wire(peers, what, works, kept)


def share(peers, what, tensors, skip=(), on_host=False):
    """Every rank's tensor to all: `tensors` has this rank's, and memory for the others'. Of the ranks `skip` nothing travels."""
    others = [rank for rank in range(peers.world) if rank != peers.rank]
    sends = [(rank, tensors[peers.rank].contiguous()) for rank in others if peers.rank not in skip]
    receives = [(rank, tensors[rank]) for rank in others if rank not in skip]
    begin(peers, what, sends, receives, _HOST_TAG if on_host else 0, peers.on_host() if on_host else None).wait()


_HOST_TAG = 910
