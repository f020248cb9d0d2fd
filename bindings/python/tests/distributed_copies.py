"""What each rank does in test_distributed.py where tensors are copied out of mapped memory (transport="copies"): the bits of what the backend sends."""

import functools
import os
import time
from unittest import mock

import distributed_cases as base
import torch
import torch.distributed as dist

import rapt
import rapt.distributed as rd
from rapt.distributed import _mapped, _places
from rapt.distributed._attention import METHODS


def made(attend, leaves, **options):
    """(out, lse, gradients) of a call."""
    leaves = [t.clone().requires_grad_() for t in leaves]
    out, lse = attend(*leaves, return_lse=True, **options)
    base.arrive((out, torch.cos(out.detach())), (lse, torch.sin(lse.detach())))
    return [out.detach(), lse.detach(), *(t.grad for t in leaves)]


def the_bits_of_the_backend(method, dtype=torch.float32):
    """Every option, forward and backward, in memory that grows from call to call, while ranks come late."""
    rank, read = dist.get_rank(), _mapped.Mapped.read

    def late(mapped, what, after):
        time.sleep(0.001 * ((rank * 3 + sum(owner for owner, *_ in what)) % 3))
        return read(mapped, what, after)

    for lengths, order in (("few keys", "zigzag"), ("uneven", "zigzag"), ("others", "contiguous")):
        if lengths not in base.LENGTHS:
            continue
        places = [_places.places(of, order)[rank] for of in base.LENGTHS[lengths]]
        for name in ("plain", "causal", "window", "sinks", "slopes", "mask", "large scores"):
            if method == "ulysses" and name == "mask":
                continue
            tensors, options = base.problem(name, lengths, dtype)
            mine = [base.rows(t, of) for t, of in zip(tensors, (places[0], places[1], places[1]))]
            if "mask" in options:
                options["mask"] = base.part_of(options["mask"], places[0])
            call = functools.partial(made, rd.attention, mine, method=method, order=order, **options)
            sent = call(transport="backend")
            # With little between tensors what was reserved is just enough.
            few, nothing = mock.patch.object(_mapped, "ALIGN", 16), mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("sent"))
            with mock.patch.object(_mapped.Mapped, "read", late), few, nothing:
                copied = call(transport="copies")
            assert all(map(torch.equal, sent, copied)), f"{name}, {lengths}: {[torch.equal(*of) for of in zip(sent, copied)]}"


def packed_sequences():
    """And memory that was mapped in inference mode."""
    rank, group = dist.get_rank(), dist.new_group(list(range(base.WORLD)))
    (q, k, v), _ = base.problem("plain", "others", torch.float32)
    places = [_places.places(of, "contiguous")[rank] for of in base.LENGTHS["others"]]
    mine = [base.rows(t[0].transpose(0, 1), of, 0) for t, of in zip((q, k, v), (places[0], places[1], places[1]))]
    offsets = [[at * whole.shape[2] // 19 for at in (0, 4, 4, 13, 19)] for whole in (q, k)]
    for method in METHODS:
        call = functools.partial(rd.varlen_attention, *mine, *offsets, group=group, method=method, causal="bottom_right")
        expected = call(transport="backend")
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert torch.equal(expected, call(transport="copies")), method


def keys_that_no_row_sees_are_not_read():
    """By all_gather: of contiguous tokens under a causal mask a rank reads its own and those of ranks before it."""
    rank, read, owners = dist.get_rank(), _mapped.Mapped.read, set()
    q = base.random(1, 4, 6, 8).float()

    def noted(mapped, what, after):
        owners.update(owner for owner, *_ in what)
        return read(mapped, what, after)

    with mock.patch.object(_mapped.Mapped, "read", noted):
        rd.attention(q, q, q, method="all_gather", causal=True, transport="copies")
    assert owners == set(range(rank + 1)), owners


def what_cannot_be_copied():
    """Is the same error on every rank, or sent where nobody asked for copies."""
    rank = dist.get_rank()
    q = base.random(1, 4, 6, 8).float()
    call = lambda **words: lambda: rd.attention(q, q, q, **words)  # noqa: E731
    base.raises(rapt.OptionError, call(transport="star"), "'backend', 'copies'")
    base.raises(rapt.OptionError, call(transport="backend" if rank == 2 else None), "rank 2", "transport 'backend'")
    for told, fragment in (("elsewhere", "several hosts"), (None, "rank 2 can share no memory")):
        with mock.patch.object(_mapped, "host_of", lambda _device, told=told: told if rank == 2 else "here"):
            base.raises(rapt.UnsupportedError, call(transport="copies"), fragment, "transport=\"backend\"")
    # One rank opens none of the files: nobody copies, then and later.
    group = dist.new_group(list(range(base.WORLD)))
    refuse = mock.patch.object(torch, "from_file", side_effect=RuntimeError("no such file\nand more"))
    with refuse if rank == 1 else mock.MagicMock():
        base.raises(rapt.UnsupportedError, call(group=group, transport="copies"), "rank 1: no such file. ")
    base.raises(rapt.UnsupportedError, call(group=group, transport="copies"), "rank 1: no such file")
    assert torch.equal(call(group=group)(), call()())
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"rapt-{os.getpid()}-")], "a file of memory is left"


def cases():
    """{name: what runs}."""
    found = {f"copies give the bits of the backend, {method}": functools.partial(the_bits_of_the_backend, method) for method in METHODS}
    more = (keys_that_no_row_sees_are_not_read, what_cannot_be_copied)
    return found | {"copies of packed sequences": packed_sequences} | {run.__name__.replace("_", " "): run for run in more}


def cases_on_gpus():
    """The same, from GPU to GPU."""
    ways = [*((method, torch.bfloat16) for method in METHODS), ("ring", torch.float32)]
    return {f"copies give the bits of NCCL, {method}, {dtype}": functools.partial(the_bits_of_the_backend, method, dtype) for method, dtype in ways}


# --- faults ------------------------------------------------------------------------------------------------------------------


def dies_before_it_has_told(rank, group, method="ring"):
    q, lost = base.random(1, 4, 6, 8).float(), base.WORLD // 2
    call = lambda: rd.attention(q, q, q, group=group, transport="copies", method=method)  # noqa: E731
    call()
    if rank == lost:
        with mock.patch.object(_mapped.Mapped, "telling", lambda *_args: os._exit(0)):
            call()
    base._expect_lost(call, f"rank {lost} did not answer", "call 2")


def dies_between_parts_of_the_heads(rank, group):
    """When it has told of the first part alone."""
    q, lost = base.random(1, 4, 6, 8).float(), base.WORLD // 2
    call = lambda: rd.attention(q, q, q, group=group, transport="copies", method="all_gather")  # noqa: E731
    call()
    if rank == lost:
        with mock.patch.object(_mapped.Mapped, "tell", lambda *_args: os._exit(0)):
            call()
    base._expect_lost(call, f"rank {lost} did not answer", "call 2", "tensors lie ready")


def dies_when_it_has_told(rank, group):
    """The others read on: its memory is theirs too."""
    q, lost = base.random(1, 4, 6, 8).float(), base.WORLD // 2
    call = lambda: rd.attention(q, q, q, group=group, transport="copies")  # noqa: E731
    expected = call()
    if rank == lost:
        with mock.patch.object(_mapped.Mapped, "read", lambda *_args: os._exit(0)):
            call()
    assert torch.equal(call(), expected)
    base._expect_lost(call, f"rank {lost} did not answer", "call 3")


FAULTS = {
    "dies before it has told": dies_before_it_has_told,
    "dies before it has told, all_gather": functools.partial(dies_before_it_has_told, method="all_gather"),
    "dies between parts of the heads": dies_between_parts_of_the_heads,
    "dies when it has told": dies_when_it_has_told,
}
