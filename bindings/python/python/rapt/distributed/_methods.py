"""The three ways in which queries of one rank meet keys of another. All tensors are views [batch, heads, len, head_dim].

    ring        K and V go round: each rank sends on what it has before it computes with it. The partial results of a rank are merged in the
                order own block, the rank's before it, … A block goes as far as somebody sees it.
    all_gather  every rank gets all K and V, a part of the heads at a time, the next part while this one is computed; each of its places is one
                row of pieces over all keys. Where every row is of one piece, nothing is merged: the kernel writes the answer.
    ulysses     every rank gets all tokens of a part of the heads, and gives back its part of the answer.

Backward: `ring` and `all_gather` recompute from the whole rows' lse and out, which make gradients sums over blocks; dk and dv are added in the order of the
ring, or of ranks, in float32 (float64). What one call of `rapt.attention_backward` gives is in that dtype in host memory, and on a GPU in the dtype of q, whose
tensor cores its products need.

Every rank issues its exchanges in one order, and those that depend on one another are one batch: a backend that knows no tags, and has one exchange at a time
under way (NCCL), pairs them by that order.
"""

import typing

import rapt
import torch
from rapt import UnsupportedError

from . import _blocks, _group, _mapped, _mapped_gather, _mapped_ring
from ._merge import Merged, accumulation
from ._places import local_rows, places

# Parts of the heads of keys that all_gather has under way one after another, at least; as many as ranks, so that two take no more than two ranks' keys.
PARTS = 4
# Beyond this much, rapt.attention_backward finds the sums of a row anew, from the keys that it is given.
LARGE = 1000.0
# Tags of gradients, beside keys that go the same way at the same time: backends that have tags need not keep their order.
_GRADIENTS = 10


class Call(typing.NamedTuple):
    """A request on which all ranks agree, beside its tensors."""

    peers: _group.Peers
    order: str
    q_lengths: tuple
    kv_lengths: tuple
    documents: tuple
    causal: str | None
    window: tuple | None
    softcap: float | None
    scale: float | None
    slopes: torch.Tensor | None
    mapped: _mapped.Mapped | None = None

    @property
    def rank(self):
        return self.peers.rank

    def q_places(self, rank=None):
        return places(self.q_lengths, self.order)[self.rank if rank is None else rank]

    def kv_places(self, rank):
        return places(self.kv_lengths, self.order)[rank]

    def pieces(self, q_places, k_places, mask):
        return _blocks.pieces(
            q_places, k_places, self.documents, self.causal, self.window, self.slopes is not None, mask is not None
        )  # fmt: skip

    def words(self):
        return {"softcap": self.softcap, "scale": self.scale}

    def reach(self, owner, mask):
        """How many ranks behind `owner` its keys go round to: the last that sees some."""
        world = self.peers.world
        seen = (t for t in range(world) if self.sees((owner + t) % world, owner, mask))
        return max(seen, default=0)

    def sees(self, rank, owner, mask):
        """Whether rows of `rank` see keys of `owner`."""
        return bool(self.pieces(self.q_places(rank), self.kv_places(owner), mask))

    def begin(self, what, sends, receives):
        """Tensors of every rank to every rank: [(rank, rows of a tensor)]."""
        if self.mapped is not None:
            return self.mapped.exchange(sends, receives)
        return _group.begin(self.peers, what, sends, receives)


# --- pieces ------------------------------------------------------------------------------------------------------------------


def attend(call, merged, q, k, v, k_places, mask, slopes, q_places=None):
    """Adds what the rows of q see of a block of keys that lie at `k_places`."""
    for piece in call.pieces(call.q_places() if q_places is None else q_places, k_places, mask):
        operands = _blocks.operands(piece, mask, slopes, merged.dtype)
        (r0, r1), (k0, k1) = piece.rows, piece.keys
        out, lse = rapt.attention(
            q[:, :, r0:r1], k[:, :, k0:k1], v[:, :, k0:k1], **operands.options, **call.words(), out=merged.place(piece.rows),
            out_dtype=merged.out_dtype, return_lse=True,
        )  # fmt: skip
        merged.add(piece.rows, out, lse if operands.of_rows is None else lse + operands.of_rows)


class Rows(typing.NamedTuple):
    """Of the local rows what their gradients are computed from. d_o, q and out have the dtype of the products."""

    d_o: torch.Tensor
    d_lse: torch.Tensor | None
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: torch.Tensor | None
    largest: "Largest"

    @property
    def sums(self):
        """The dtype in which gradients are summed."""
        return self.lse.dtype


class Largest(typing.NamedTuple):
    """What tells pieces whose sums of rows must be found from their own keys."""

    lse: float  # finite |lse|
    slope: float  # |slope|

    def is_beyond(self, piece):
        """Whether what lse is for this piece may be beyond LARGE."""
        return self.lse + self.slope * piece.farthest > LARGE


def asks_for_largest(lse, slopes):
    """A function that gives these numbers. On a GPU the host waits there for what was enqueued up to here, not for what was enqueued since."""
    of_lse = lse.abs().masked_fill_(~lse.isfinite(), 0).max() if lse.numel() else lse.new_zeros(())
    found = torch.stack([of_lse, lse.new_zeros(()) if slopes is None else slopes.abs().max().to(lse.dtype)])
    if not lse.is_cuda:
        return lambda: Largest(*found.tolist())
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("a CUDA graph that is captured holds no gradients over ranks: the host reads how large sums are. Mend: `with torch.no_grad():`")
    told = torch.empty_like(found, device="cpu", pin_memory=True)
    told.copy_(found, non_blocking=True)
    event = torch.cuda.current_stream(lse.device).record_event()

    def answer():
        event.synchronize()
        return Largest(*told.tolist())

    return answer


def products_dtype(q):
    """The dtype of q, k, v, out and d_o of `rapt.attention_backward`."""
    return q.dtype if q.is_cuda else accumulation(q.dtype)


def rows_of(d_o, d_lse, q, out, lse, mask, largest):
    dtype = products_dtype(q)
    d_o, q, out = (t.to(dtype) for t in (d_o, q, out))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(lse.dtype)
    return Rows(d_o, d_lse, q, out, lse, mask, largest)


def differentiate(call, rows, k, v, k_places, slopes, dq, dk, dv, d_mask, q_places=None):
    """Adds to dq, dk, dv and d_mask (None: not asked for) what the rows and a block of keys give."""
    k, v = k.to(rows.q.dtype), v.to(rows.q.dtype)
    for piece in call.pieces(call.q_places() if q_places is None else q_places, k_places, rows.mask):
        operands = _blocks.operands(piece, rows.mask, slopes, rows.sums)
        (r0, r1), (k0, k1) = piece.rows, piece.keys
        d_o, q, out, lse = (t[:, :, r0:r1] for t in (rows.d_o, rows.q, rows.out, rows.lse))
        d_lse = None if rows.d_lse is None else rows.d_lse[:, :, r0:r1]
        some_k, some_v = k[:, :, k0:k1], v[:, :, k0:k1]
        if operands.of_rows is not None:
            lse = lse - operands.of_rows
        if rows.largest.is_beyond(piece):
            # Probabilities would be those among these keys alone: what arrives is weighed by the part that these keys have of the row.
            own = rapt.attention(q, some_k, some_v, **operands.options, **call.words(), return_lse=True)[1]
            weight = torch.exp(own - lse).masked_fill_(lse == -torch.inf, 0)
            d_o, lse = (d_o * weight.unsqueeze(-1)).to(d_o.dtype), own
            d_lse = None if d_lse is None else d_lse * weight
        made = rapt.attention_backward(
            d_o, q, some_k, some_v, out, lse, d_lse=d_lse, mask_grad=d_mask is not None, **operands.options, **call.words()
        )  # fmt: skip
        dq[:, :, r0:r1] += made.dq
        dk[:, :, k0:k1] += made.dk
        dv[:, :, k0:k1] += made.dv
        if d_mask is not None:
            _blocks.masked(d_mask, piece).add_(made.d_mask)


# --- ring --------------------------------------------------------------------------------------------------------------------


def _block_like(call, tensor, owner, dtype=None):
    """Memory for the block of `owner` of which `tensor` is the own one."""
    return tensor.new_empty((*tensor.shape[:2], call.kv_lengths[owner], tensor.shape[3]), dtype=dtype)


class _Round:
    """K and V going round. `blocks()` gives (owner, k, v) in order; the next is under way meanwhile."""

    def __init__(self, call, k, v, mask):
        self.call, self.mask = call, mask
        self.own = k.contiguous(), v.contiguous()

    def blocks(self):
        call, rank, world = self.call, self.call.rank, self.call.peers.world
        held = self.own
        for step in range(world):
            owner, coming = (rank - step) % world, (rank - step - 1) % world
            sends, receives, arriving = [], [], None
            if step + 1 < world:
                if step < call.reach(owner, self.mask):
                    sends = [((rank + 1) % world, tensor) for tensor in held]
                if step < call.reach(coming, self.mask):
                    arriving = tuple(_block_like(call, tensor, coming) for tensor in self.own)
                    receives = [((rank - 1) % world, tensor) for tensor in arriving]
            what = f"the keys of rank {coming}, passed on by rank {(rank - 1) % world}"
            wire = _group.begin(call.peers, what, sends, receives)
            yield owner, *(held or (None, None))
            wire.wait()
            held = arriving


def _blocks_of(call, k, v, mask):
    """(owner, k, v) of the own block, that of the rank before, …; without k and v where no row sees one."""
    return (_Round(call, k, v, mask) if call.mapped is None else _mapped_ring.Reader(call, k, v, mask)).blocks()


def ring(call, q, k, v, mask, slopes):
    """Merged results of the local rows."""
    merged = Merged((*q.shape[:3], v.shape[3]), accumulation(q.dtype), q.device)
    for owner, some_k, some_v in _blocks_of(call, k, v, mask):
        if some_k is not None:
            attend(call, merged, q, some_k, some_v, call.kv_places(owner), mask, slopes)
    return merged


def ring_backward(call, rows, k, v, slopes, d_mask):
    """(dq, dk, dv) in the dtype of sums: dk and dv go round behind their block, and home from the last that sees it.

    After step n all ranks have computed with a block, and exchange what they have of its gradients in one batch.
    """
    if call.mapped is not None:
        return _mapped_ring.backward(call, rows, k, v, slopes, d_mask, differentiate)
    rank, world, mask = call.rank, call.peers.world, rows.mask
    dq = torch.zeros(rows.q.shape, dtype=rows.sums, device=rows.q.device)
    home = wire = before = None
    for owner, some_k, some_v in _Round(call, k, v, mask).blocks():
        step = (rank - owner) % world
        made = None
        if some_k is not None:
            made = [torch.zeros(t.shape, dtype=rows.sums, device=t.device) for t in (some_k, some_v)]
            differentiate(call, rows, some_k, some_v, call.kv_places(owner), slopes, dq, *made, d_mask)
        if wire is not None:
            wire.wait()
        if before is not None:
            made = [of_others.add_(own) for of_others, own in zip(before, made)]
        sends, receives, before = [], [], None
        if made is not None and step < call.reach(owner, mask):
            sends = [((rank + 1) % world, t) for t in made]
        elif made is not None and step:
            sends = [(owner, t) for t in made]
        elif made is not None:
            home = made
        coming, left = (owner - 1) % world, (rank - 1) % world
        if step < call.reach(coming, mask) and coming != rank:
            before = [_block_like(call, t, coming, rows.sums) for t in (k, v)]
            receives = [(left, t) for t in before]
        if step and step == call.reach(rank, mask):
            home = [torch.empty(t.shape, dtype=rows.sums, device=t.device) for t in (k, v)]
            receives += [((rank + step) % world, t) for t in home]
        what = f"gradients of the keys of rank {coming}, passed on by rank {left}, or of its own"
        wire = _group.begin(call.peers, what, sends, receives, _GRADIENTS)
    wire.wait()
    return dq, *home


# --- exchange ----------------------------------------------------------------------------------------------------------------


def _packed(call, tensor):
    """[len, batch, heads, head_dim], whose rows can be sent: dense, but where they are copied to memory that is mapped."""
    rows = tensor.permute(2, 0, 1, 3)
    if call.mapped is not None or rows.is_contiguous():
        return rows
    dense = rows.new_empty(rows.shape)
    _mapped.copy(dense, rows)
    return dense


def _viewed(packed):
    return packed.permute(1, 2, 0, 3)


def _gather_begin(call, tensors, lengths):
    """All ranks' rows of local [batch, heads, len, head_dim], under way to their places: ([views of the whole], wire)."""
    return _exchange(call, [([t] * call.peers.world, lengths) for t in tensors])


def _exchange(call, tensors):
    """tensors: of each a list of what goes to each rank, of which the own heads are what arrives, and the rows of each rank. ([views of the whole], wire)."""
    rank, sends, receives, wholes = call.rank, [], [], []
    for to, lengths in tensors:
        own, all_places = to[rank], places(lengths, call.order)
        whole = own.new_empty((sum(lengths), *own.shape[:2], own.shape[3]))
        packed = {}
        for other in range(call.peers.world):
            if other == rank:
                for first, start, stop in local_rows(all_places[rank]):
                    _mapped.copy(whole[start:stop], own[:, :, first : first + stop - start].permute(2, 0, 1, 3))
                continue
            key = (to[other].data_ptr(), to[other].shape)
            rows = packed[key] = packed[key] if key in packed else _packed(call, to[other])
            sends += [(other, rows[first : first + stop - start]) for first, start, stop in local_rows(all_places[rank])]
            receives += [(other, whole[start:stop]) for start, stop in all_places[other]]
        wholes.append(whole)
    wire = call.begin("tensors of every rank", sends, receives)
    return [_viewed(whole) for whole in wholes], wire


def _scatter(call, wholes, lengths):
    """The reverse: of each whole [batch, heads, all rows, head_dim] the own rows of every rank's: for each whole a list by rank."""
    rank, sends, receives, answers = call.rank, [], [], []
    all_places = places(lengths, call.order)
    for whole, shapes in wholes:
        packed = _packed(call, whole)
        answer = [packed.new_empty((lengths[rank], *shape)) for shape in shapes]
        for other in range(call.peers.world):
            if other == rank:
                for first, start, stop in local_rows(all_places[rank]):
                    _mapped.copy(answer[rank][first : first + stop - start], packed[start:stop])
                continue
            sends += [(other, packed[start:stop]) for start, stop in all_places[other]]
            receives += [(other, answer[other][first : first + stop - start]) for first, start, stop in local_rows(all_places[rank])]
        answers.append([_viewed(rows) for rows in answer])
    call.begin("tensors of every rank", sends, receives).wait()
    return answers


# --- all_gather --------------------------------------------------------------------------------------------------------------


def _head_parts(call, q, k):
    """Slices (of the heads of q, of the heads of k), one after another."""
    count, group = min(max(PARTS, call.peers.world), k.shape[1]), q.shape[1] // k.shape[1]
    bounds = [k.shape[1] * n // count for n in range(count + 1)]
    return [(slice(a * group, b * group), slice(a, b)) for a, b in zip(bounds, bounds[1:])]


def _heads_of(tensor, heads):
    return tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, heads]


def _sent(call, k, v, heads):
    """(all keys, all values) of these parts of the heads, one part after another; the next is under way meanwhile."""
    begin = lambda part: _gather_begin(call, [t[:, part] for t in (k, v)], call.kv_lengths)  # noqa: E731
    under_way = begin(heads[0])
    for following in (*heads[1:], None):
        wholes, wire = under_way
        wire.wait()
        under_way = None if following is None else begin(following)
        yield wholes


def all_gather(call, q, k, v, mask, slopes, into=None):
    """Merged results of the local rows, in `into` where nothing is merged."""
    whole = ((0, sum(call.kv_lengths)),)
    rows = [piece.rows for piece in call.pieces(call.q_places(), whole, mask)]
    is_apart = _blocks.are_apart(rows)
    merged = Merged((*q.shape[:3], v.shape[3]), accumulation(q.dtype), q.device)
    merged.start(into if is_apart else None, is_apart and sum(stop - start for start, stop in rows) == q.shape[2])
    parts = _head_parts(call, q, k)
    of_k = [of_k for _, of_k in parts]
    arriving = _sent(call, k, v, of_k) if call.mapped is None else _mapped_gather.read(call, k, v, of_k, mask)
    for (of_q, _), (all_k, all_v) in zip(parts, arriving):
        attend(
            call, merged.heads(of_q), q[:, of_q], all_k, all_v, whole, _heads_of(mask, of_q), None if slopes is None else slopes[of_q]
        )  # fmt: skip
    return merged


def all_gather_backward(call, rows, k, v, slopes, d_mask):
    """(dq, dk, dv) in the dtype of sums."""
    (all_k, all_v), wire = _gather_begin(call, [k, v], call.kv_lengths)
    wire.wait()
    dq, dk, dv = (torch.zeros(t.shape, dtype=rows.sums, device=t.device) for t in (rows.q, all_k, all_v))
    differentiate(call, rows, all_k, all_v, ((0, sum(call.kv_lengths)),), slopes, dq, dk, dv, d_mask)
    shapes = [[(*t.shape[:2], t.shape[3])] * call.peers.world for t in (k, v)]
    dk, dv = (in_order(parts) for parts in _scatter(call, list(zip((dk, dv), shapes)), call.kv_lengths))
    return dq, dk, dv


def in_order(parts):
    """Their sum, by rank."""
    total = parts[0].clone()
    for more in parts[1:]:
        total += more
    return total


# --- ulysses -----------------------------------------------------------------------------------------------------------------


def q_heads(q, rank, world):
    """The heads of q that are computed on `rank`."""
    return slice(q.shape[1] * rank // world, q.shape[1] * (rank + 1) // world)


def kv_heads(k, rank, world):
    """Those of k: a part of them, or one where ranks are more."""
    first = k.shape[1] * rank // world
    return slice(first, max(first + 1, k.shape[1] * (rank + 1) // world))


def to_heads(call, q, k, v):
    """All tokens of this rank's heads."""
    world = call.peers.world
    of_q = [q[:, q_heads(q, rank, world)] for rank in range(world)]
    of_k, of_v = ([t[:, kv_heads(t, rank, world)] for rank in range(world)] for t in (k, v))
    wholes, wire = _exchange(call, [(of_q, call.q_lengths), (of_k, call.kv_lengths), (of_v, call.kv_lengths)])
    wire.wait()
    return wholes


def queries_to_heads(call, tensors):
    """The same of tensors with q's heads and rows."""
    world = call.peers.world
    wholes, wire = _exchange(call, [([t[:, q_heads(t, rank, world)] for rank in range(world)], call.q_lengths) for t in tensors])
    wire.wait()
    return wholes


def to_rows(call, wholes, lengths):
    """The own rows of all heads, of all rows of as many heads of each rank: for each whole a list by rank."""
    return _scatter(call, [(whole, [(*whole.shape[:2], whole.shape[3])] * call.peers.world) for whole in wholes], lengths)


def mapped_bytes(sizes, method, lengths, dtype, is_backward):
    """Bytes that a rank puts into its part of mapped memory in a call, at most: the same on all ranks. lengths: tokens of q and of k of each rank."""
    batch, q_heads, kv_heads, dim, dim_v = (sizes[of] for of in ("batch", "num_q_heads", "num_kv_heads", "head_dim", "head_dim_v"))
    (q_lengths, kv_lengths), world, sums = lengths, len(lengths[0]), accumulation(dtype).itemsize
    q_len, kv_len = max(q_lengths), max(kv_lengths)
    if method == "ring":
        slots = min(_mapped_ring.SLOTS, world - 1) * sums if is_backward else 0
        elements = kv_heads * (dim + dim_v) * kv_len * (dtype.itemsize + slots)
    elif method == "all_gather":
        elements = kv_heads * (dim + dim_v) * (kv_len * dtype.itemsize + (sum(kv_lengths) * sums if is_backward else 0))
    else:
        of_kv = max(kv_heads, world) * (dim + dim_v)
        if is_backward:
            sent = q_heads * q_len * (dim_v * dtype.itemsize + sums)
            elements = sent + q_heads // world * dim * sum(q_lengths) * dtype.itemsize + of_kv // world * sum(kv_lengths) * sums
        else:
            sent = q_heads * dim * q_len + of_kv * kv_len
            elements = sent * dtype.itemsize + q_heads // world * sum(q_lengths) * (dim_v * dtype.itemsize + sums)
    # What lies between tensors: those of q, k, v, out and lse in at most two places of each rank, or two of a block, of each slot, of each part of the heads.
    return batch * elements + 10 * world * _mapped.ALIGN
