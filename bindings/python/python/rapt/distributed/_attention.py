"""`attention` over ranks: the request, on which all agree first, and its node of autograd."""

import typing

import rapt
import torch
from rapt import KindError, OptionError, RaptError, ShapeError, UnsupportedError
from rapt.torch import _ops

from . import _group, _mapped, _methods
from ._merge import Merged, accumulation
from ._places import expect_order

METHODS = ("ring", "all_gather", "ulysses")
TRANSPORTS = (None, "backend", "copies")


def attention(
    q,
    k,
    v,
    *,
    group=None,
    method="ring",
    order="contiguous",
    mask=None,
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    layout="bhsd",
    return_lse=False,
    transport=None,
):
    """Attention of a sequence whose tokens lie on the ranks of a process group: every rank gives its rows of q, k and v and gets its rows of the answer.

    q, k, v: of `rapt.attention`, with 3 or 4 dimensions and any length on each rank. order: which tokens of the sequence those are:
    "contiguous" (rank 0 has the first, rank 1 the next, …) or "zigzag" (what `shard` deals: a part from the front and one from the back).
    group: a process group of torch.distributed, or a DeviceMesh of one dimension. Every rank makes the same call.
    method: "ring", "all_gather" or "ulysses" (heads are exchanged in place of keys). The bits of an answer follow from it and from the lengths.
    mask: bool or additive, of this rank's rows and the keys of the whole sequence in their order: broadcastable to [batch, num_q_heads, q_len of this rank,
    kv_len of all]. causal, window, scale, softcap, sinks and alibi_slopes mean what they mean for the whole sequence on one device.
    Gradients are those of this rank's inputs; of mask and sinks what this rank's rows give.
    transport: "backend" (tensors are sent by the group's backend), "copies" (ranks of one host copy them out of memory that all have mapped)
    or None: copies between GPUs of one host where K and V of a rank are 32 MiB and more, else the backend. No bit of an answer depends on it.

    A request that differs between ranks, that one of them cannot serve, or that one of them does not make, is an error on every rank.
    """
    refused, request = None, {"call": "attention"}
    peers = _group.peers_of(group)
    try:
        request = _request(
            q, k, v, method=method, order=order, mask=mask, causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks,
            alibi_slopes=alibi_slopes, layout=layout, transport=transport, world=peers.world,
        )  # fmt: skip
    except (RaptError, TypeError) as error:
        refused = error
    pages = _group.agree(peers, request, refused)
    documents = None
    return _run(peers, pages, documents, (q, k, v, mask, sinks), method, order, causal, window, softcap, scale, alibi_slopes, layout, return_lse)


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_kv,
    *,
    group=None,
    method="ring",
    order="contiguous",
    causal=None,
    window=None,
    softcap=None,
    scale=None,
    sinks=None,
    alibi_slopes=None,
    return_lse=False,
    transport=None,
):
    """`rapt.varlen_attention` over ranks: sequences one after another, whose tokens, all together, lie on the ranks in `order`.

    q is [tokens of this rank, num_q_heads, head_dim], k and v likewise. cu_seqlens_q, cu_seqlens_kv: where each sequence begins among the tokens of all ranks, on every
    rank the same: int32 or int64 in host memory, or ints. lse is [num_q_heads, tokens of this rank]. Tokens of no sequence get zeros.
    """
    refused, request = None, {"call": "varlen_attention"}
    peers = _group.peers_of(group)
    try:
        offsets = [_offsets(name, given) for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv))]
        if len(offsets[0]) != len(offsets[1]):
            raise ShapeError(f"cu_seqlens_q has {len(offsets[0])} offsets, cu_seqlens_kv {len(offsets[1])}; both have one more than there are sequences")
        request = _request(
            q, k, v, method=method, order=order, mask=None, causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks,
            alibi_slopes=alibi_slopes, layout="bshd", transport=transport, world=peers.world,
        )  # fmt: skip
        request |= {"call": "varlen_attention", "cu_seqlens": _checksum(offsets)}
        request["own"]["ends"] = [offsets[0][-1], offsets[1][-1]]
    except (RaptError, TypeError) as error:
        refused = error
    pages = _group.agree(peers, request, refused)
    for at, name in enumerate(("q", "kv")):
        total = sum(page["own"][f"{name}_len"] for page in pages)
        if offsets[at][-1] > total:
            raise ShapeError(f"cu_seqlens_{name} ends at {offsets[at][-1]}, and the ranks have {total} tokens. Mend: offsets among the tokens of all ranks")
    documents = tuple((*of_q, *of_kv) for of_q, of_kv in zip(zip(offsets[0], offsets[0][1:]), zip(offsets[1], offsets[1][1:])))
    answer = _run(
        peers, pages, documents, (q, k, v, None, sinks), method, order, causal, window, softcap, scale, alibi_slopes, "bshd", return_lse
    )  # fmt: skip
    return answer


def _offsets(name, given):
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu":
            raise UnsupportedError(f"{name} lies on {given.device}: which tokens meet is decided on the host. Mend: `{name}.cpu()`, once")
        given = given.tolist()
    offsets = [int(offset) for offset in given]
    if not offsets or offsets[0] < 0 or any(a > b for a, b in zip(offsets, offsets[1:])):
        raise OptionError(f"{name} = {offsets[:8]}; allowed: offsets that do not decrease, one more than there are sequences")
    return offsets


def _checksum(offsets):
    import zlib

    return zlib.crc32(repr(offsets).encode())


# --- the request -------------------------------------------------------------------------------------------------------------


def _request(q, k, v, *, method, order, mask, causal, window, softcap, scale, sinks, alibi_slopes, layout, transport, world):
    """What the ranks must have alike, from this rank's part, which `rapt` has found right."""
    if method not in METHODS:
        raise OptionError(f"method = {method!r}; allowed: {', '.join(map(repr, METHODS))}")
    expect_order(order)
    if transport not in TRANSPORTS:
        raise OptionError(f"transport = {transport!r}; allowed: {', '.join(map(repr, TRANSPORTS))}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise KindError(f"{name} is a {type(tensor).__name__}: over ranks q, k and v are torch tensors. Mend: `torch.from_dlpack({name})`")
        if tensor.dim() not in (3, 4):
            raise ShapeError(f"{name} has {tensor.dim()} dimensions; allowed: 3 or 4. Mend: `{name}.unsqueeze(0)`")
    # Types, sizes and options as one device reads them; a mask is of other keys, and judged below.
    _expect_right(
        (q, k, v, sinks, alibi_slopes), causal=causal, window=window, softcap=softcap, scale=scale, layout=layout,
        out_dtype=accumulation(q.dtype),
    )  # fmt: skip
    of_q, of_k, of_v = (_four(t, layout) for t in (q, k, v))
    _expect_served(of_q, of_k, method, mask, alibi_slopes, world)
    needs_grad = _ops.needs_grad((q, k, v, mask, sinks))
    if needs_grad and not (q.is_cpu or q.is_cuda):
        raise UnsupportedError(f"gradients over ranks are computed in host memory and on NVIDIA GPUs, and q lies on {q.device}. Mend: `with torch.no_grad():`")
    if alibi_slopes is not None and _ops.needs_grad((alibi_slopes,)):
        raise UnsupportedError("alibi_slopes requires grad, and no gradient of it is computed. Mend: `alibi_slopes.detach()`")
    return {
        "call": "attention",
        "dtype": str(q.dtype),
        "device": q.device.type,
        "sizes": _sizes(of_q, of_k, of_v),
        "method": method,
        "order": order,
        "transport": transport,
        "causal": {True: "top_left", False: None}.get(causal, causal),
        **_group.numbers(window, softcap, scale),
        "sinks": None if sinks is None else str(sinks.dtype),
        "alibi_slopes": alibi_slopes is not None,
        "mask": mask is not None,
        "needs grad": needs_grad,
        "own": {
            "q_len": of_q.shape[2],
            "kv_len": of_k.shape[2],
            "mask": None if mask is None else list(mask.shape),
            "host": None if transport == "backend" else _mapped.host_of(q.device),
        },
    }


# Forms of requests that were found right.
_right = set()


def _expect_right(tensors, **options):
    """Raises what one device refuses of a request. What it says of a form is asked once."""
    form = None
    if all(t is None or type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        try:
            # By what options look like: True is 1 to Python, and not to a request.
            form = (*map(_form, tensors), repr(options))
        except RuntimeError:
            pass  # a tensor that has no memory of its own, such as a nested one: its error is that of one device
    if form in _right:
        return
    q, k, v, sinks, slopes = tensors
    rapt.explain(q, k, v, sinks=sinks, alibi_slopes=slopes, **options)
    if form is not None:
        if len(_right) >= 1024:
            _right.clear()
        _right.add(form)


def _form(tensor):
    """What of a tensor a request depends on."""
    if tensor is None:
        return None
    of_memory = tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.data_ptr() % 64
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg(), tensor.is_conj(), of_memory


def _expect_served(q, k, method, mask, slopes, world):
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise KindError(f"mask is a {type(mask).__name__}: over ranks it is a torch tensor. Mend: `torch.from_dlpack(mask)`")
    if mask is not None and (mask.device != q.device or mask.dim() > 4):
        raise ShapeError(f"mask has {mask.dim()} dimensions on {mask.device}; allowed: at most 4, on {q.device}")
    if mask is not None and slopes is not None:
        raise UnsupportedError("mask together with alibi_slopes is not computed over ranks. Mend: `mask=mask - slopes * distance`, `alibi_slopes=None`")
    if method != "ulysses":
        return
    if mask is not None:
        raise UnsupportedError('a rank has its rows of the mask, and method="ulysses" computes all rows. Mend: `method="ring"`')
    if q.shape[1] % world or k.shape[1] % world and world % k.shape[1]:
        raise UnsupportedError(
            f'method="ulysses" deals heads to {world} ranks: num_q_heads = {q.shape[1]}; allowed: multiples of {world}; num_kv_heads = {k.shape[1]}; '
            f'allowed: multiples or divisors of {world}. Mend: `method="ring"`'
        )


def _sizes(q, k, v):
    """Of tensors with four dimensions."""
    return {"batch": q.shape[0], "num_q_heads": q.shape[1], "num_kv_heads": k.shape[1], "head_dim": q.shape[3], "head_dim_v": v.shape[3]}


def _four(tensor, layout):
    """A view [batch, heads, len, head_dim]."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    return tensor.transpose(1, 2) if layout == "bshd" else tensor


def _check_masks(pages, q_heads, batch):
    """The masks of all ranks, by their sizes: the same error everywhere."""
    kv_len = sum(page["own"]["kv_len"] for page in pages)
    for rank, page in enumerate(pages):
        if page["own"]["mask"] is None:
            continue
        given = page["own"]["mask"]
        full = [batch, q_heads, page["own"]["q_len"], kv_len]
        if any(size not in (1, of) for size, of in zip(reversed(given), reversed(full))):
            raise ShapeError(
                f"rank {rank}: mask has sizes {given}; allowed: what broadcasts to {full}: the rows of this rank and the keys of all ranks, in their order"
            )


# --- the run -----------------------------------------------------------------------------------------------------------------


class _Request(typing.NamedTuple):
    call: _methods.Call
    method: str
    layout: str
    is_single: bool  # q had three dimensions


def _run(peers, pages, documents, tensors, method, order, causal, window, softcap, scale, slopes, layout, return_lse):
    q, k, v, mask, sinks = tensors
    sizes = pages[0]["sizes"]
    _check_masks(pages, sizes["num_q_heads"], sizes["batch"])
    _group.connect(peers, q.device)
    q_lengths, kv_lengths = (tuple(page["own"][name] for page in pages) for name in ("q_len", "kv_len"))
    if documents is None:
        documents = ((0, sum(q_lengths), 0, sum(kv_lengths)),)
    causal = {True: "top_left", False: None}.get(causal, causal)
    window = None if window is None else tuple(window)
    count = _methods.mapped_bytes(sizes, method, (q_lengths, kv_lengths), q.dtype, False)
    kv_bytes = max(kv_lengths) * sizes["batch"] * sizes["num_kv_heads"] * (sizes["head_dim"] + sizes["head_dim_v"]) * q.dtype.itemsize
    mapped = _mapped.of_call(peers, pages, q.device, count, kv_bytes)
    call = _methods.Call(peers, order, q_lengths, kv_lengths, documents, causal, window, softcap, scale, slopes, mapped)
    request = _Request(call, method, layout, q.dim() == 3)
    if pages[0]["needs grad"]:
        out, lse = _Node.apply(request, q, k, v, mask, sinks)
    else:
        with torch.no_grad():
            out, lse = _forward(request, q, k, v, mask, sinks)[:2]
    return (out, lse) if return_lse else out


def _mask(mask):
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


def _forward(request, q, k, v, mask, sinks):
    """(out, lse, what backward needs beside the inputs)."""
    call, layout = request.call, request.layout
    q4, k4, v4 = (_four(t, layout) for t in (q, k, v))
    new = lambda: torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)  # noqa: E731
    answer, into, kept = None, None, ()
    if request.method == "ulysses":
        out, lse, kept = _ulysses(call, q4, k4, v4, sinks)
    elif request.method == "ring":
        out, lse = _methods.ring(call, q4, k4, v4, _mask(mask), call.slopes).finish(sinks)
    else:
        if sinks is None:  # which scale what is not rounded yet
            answer = new()
            into = _four(answer, layout)
        out, lse = _methods.all_gather(call, q4, k4, v4, _mask(mask), call.slopes, into).finish(sinks)
    if out is not into:
        answer = new() if answer is None else answer
        _four(answer, layout).copy_(out)
    return answer, lse[0] if request.is_single else lse, kept


def _whole(call):
    return ((0, sum(call.q_lengths)),), ((0, sum(call.kv_lengths)),)


def _own_heads(call, q, of_heads):
    return None if of_heads is None else of_heads[_methods.q_heads(q, call.rank, call.peers.world)]


def _ulysses(call, q, k, v, sinks):
    q_whole, kv_whole = _whole(call)
    all_q, all_k, all_v = _methods.to_heads(call, q, k, v)
    slopes, sinks = (_own_heads(call, q, each) for each in (call.slopes, sinks))
    merged = Merged((*all_q.shape[:3], v.shape[3]), accumulation(q.dtype), q.device)
    _methods.attend(call, merged, all_q, all_k, all_v, kv_whole, None, slopes, q_places=q_whole)
    all_out, all_lse = merged.finish(sinks)
    all_out = all_out.to(q.dtype)
    out, lse = (torch.cat(parts, 1) for parts in _methods.to_rows(call, [all_out, all_lse.unsqueeze(-1)], call.q_lengths))
    return out, lse.squeeze(-1).contiguous(), (all_q, all_k, all_v, all_out, all_lse)


def _ulysses_backward(call, d_o, d_lse, q, k, largest, saved):
    q_whole, kv_whole = _whole(call)
    all_q, all_k, all_v, all_out, all_lse = saved
    all_d_o, *of_lse = _methods.queries_to_heads(call, [d_o] if d_lse is None else [d_o, d_lse.unsqueeze(-1)])
    all_d_lse = of_lse[0].squeeze(-1) if of_lse else None
    rows = _methods.rows_of(all_d_o, all_d_lse, all_q, all_out, all_lse, None, largest)
    dq, dk, dv = (torch.zeros(t.shape, dtype=rows.sums, device=t.device) for t in (all_q, all_k, all_v))
    slopes = _own_heads(call, q, call.slopes)
    _methods.differentiate(call, rows, all_k, all_v, kv_whole, slopes, dq, dk, dv, None, q_places=q_whole)
    world = call.peers.world
    (of_q,) = _methods.to_rows(call, [dq.to(q.dtype)], call.q_lengths)
    dq, made = torch.cat(of_q, 1), []
    for parts in _methods.to_rows(call, [dk, dv], call.kv_lengths):
        shared = max(1, world // k.shape[1])
        parts = [_methods.in_order(parts[at : at + shared]) for at in range(0, world, shared)]
        made.append(torch.cat(parts, 1))
    return dq, *made


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, request, q, k, v, mask, sinks):
        out, lse, kept = _forward(request, q, k, v, mask, sinks)
        ctx.request = request
        ctx.largest = _methods.asks_for_largest(kept[-1] if kept else lse, request.call.slopes)
        ctx.save_for_backward(q, k, v, mask, sinks, out, lse, *kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, d_lse):
        request, call = ctx.request, ctx.request.call
        q, k, v, mask, sinks, out, lse, *kept = ctx.saved_tensors
        wanted = {"call": "backward", "of": [call.q_lengths, request.method], "own": {}}
        _group.agree(call.peers, wanted)
        if call.mapped is not None:
            sizes, lengths = _sizes(*(_four(t, request.layout) for t in (q, k, v))), (call.q_lengths, call.kv_lengths)
            if call.mapped.reserve(_methods.mapped_bytes(sizes, request.method, lengths, q.dtype, True)) is not None:
                request = request._replace(call=call._replace(mapped=None))
        if d_o is None:
            d_o = torch.zeros_like(out)
        return None, *_backward(request, ctx.needs_input_grad[1:], d_o, d_lse, ctx.largest(), (q, k, v, mask, sinks, out, lse), kept)


def _backward(request, wanted, d_o, d_lse, largest, saved, kept):
    call = request.call
    q, k, v, mask, sinks, out, lse = saved
    four = [_four(t, request.layout) for t in (d_o, q, k, v, out)]
    if request.is_single:
        lse, d_lse = lse[None], None if d_lse is None else d_lse[None]
    d_o4, q4, k4, v4, out4 = four
    d_mask = None
    if wanted[3]:
        d_mask = torch.zeros(_mask(mask).shape, dtype=accumulation(q.dtype), device=q.device)
    if request.method == "ulysses":
        dq, dk, dv = _ulysses_backward(call, d_o4, d_lse, q4, k4, largest, kept)
    else:
        rows = _methods.rows_of(d_o4, d_lse, q4, out4, lse, _mask(mask), largest)
        run = _methods.ring_backward if request.method == "ring" else _methods.all_gather_backward
        dq, dk, dv = run(call, rows, k4, v4, call.slopes, d_mask)
    d_sinks = _of_sinks(d_o4, d_lse, out4, lse, sinks).to(sinks.dtype) if wanted[4] else None
    made = []
    for is_wanted, gradient, of in zip(wanted, (dq, dk, dv), (q, k, v)):
        if not is_wanted:
            made.append(None)
            continue
        made.append(torch.empty(of.shape, dtype=of.dtype, device=of.device))
        _four(made[-1], request.layout).copy_(gradient)
    if d_mask is not None:
        d_mask = d_mask.reshape(mask.shape).to(mask.dtype)
    return *made, d_mask, d_sinks


def _of_sinks(d_o, d_lse, out, lse, sinks):
    """A sink's weight in a row times what arrives there: its value is 0."""
    dtype = lse.dtype
    arriving = -(d_o.to(dtype) * out.to(dtype)).sum(-1)
    if d_lse is not None:
        arriving += d_lse
    weight = torch.exp(sinks.to(dtype)[None, :, None] - lse)
    is_dead = lse == -torch.inf
    return (weight.masked_fill(is_dead, 0) * arriving.masked_fill(is_dead, 0)).sum((0, 2))
