"""What each rank does in test_gpu_distributed.py in CUDA graphs and on streams of its own: the bits of a plain call."""

import functools

import distributed_cases as base
import torch
import torch.distributed as dist
from distributed_copies import made

import rapt
import rapt.distributed as rd
from rapt.distributed import _places
from rapt.distributed._attention import METHODS


def problems():
    """This rank's parts of two problems of one form, and the options of both."""
    rank, order = dist.get_rank(), "zigzag"
    places = [_places.places(of, order)[rank] for of in base.LENGTHS["uneven"]]
    tensors, options = base.problem("bottom right", "uneven", torch.bfloat16)
    mine = [base.rows(t, of) for t, of in zip(tensors, (places[0], places[1], places[1]))]
    return mine, [t.flip(-1) for t in mine], options | {"order": order}


def agree(got, expected, what):
    assert all(map(torch.equal, got, expected)), f"{what}: {list(map(torch.equal, got, expected))}"


def about_to_capture():
    """Nothing is under way on any rank."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    return torch.cuda.graph(torch.cuda.CUDAGraph())


@torch.no_grad()
def graphs(method):
    """A call that was captured computes with what lies there when it is replayed."""
    one, other, options = problems()
    call = functools.partial(rd.attention, method=method, return_lse=True, **options)
    expected = [call(*of, transport="backend") for of in (one, other)]
    there = [t.clone() for t in one]
    capture = about_to_capture()
    with capture:
        captured = call(*there)
    for number, what in ((0, "as captured"), (1, "other numbers"), (0, "the first numbers again")):
        for t, now in zip(there, (one, other)[number]):
            t.copy_(now)
        for t in captured:
            t.fill_(torch.nan)
        capture.cuda_graph.replay()
        agree(captured, expected[number], what)
    agree(call(*other), expected[1], "a plain call behind a graph")
    capture.cuda_graph.replay()
    agree(captured, expected[0], "a graph behind a plain call")


def what_no_graph_holds():
    """Is an error on every rank, and the group serves on."""
    one, _, options = problems()
    call = functools.partial(rd.attention, **options)
    expected, leaves = call(*one, transport="backend"), [t.clone().requires_grad_() for t in one]
    with about_to_capture():
        base.raises(rapt.UnsupportedError, lambda: call(*one, transport="copies"), "captures a CUDA graph", 'transport="backend"')
        base.raises(rapt.UnsupportedError, lambda: call(*leaves), "no gradients over ranks", "torch.no_grad()")
    assert torch.equal(call(*one), expected), "a call behind it"


def streams(method, transport):
    """On a stream of its own a call, and its backward, wait for what comes before them there, and what comes behind waits for them."""
    one, other, options = problems()
    call = functools.partial(made, rd.attention, method=method, transport=transport, **options)
    expected, side = [call(of) for of in (one, other)], torch.cuda.Stream()
    for number in (0, 1, 0):
        there = [torch.full_like(t, torch.nan) for t in one]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(40_000_000)  # some 20 ms
            for t, now in zip(there, (one, other)[number]):
                t.copy_(now)
            got = call(there)
            # Whoever reads behind the call reads this, in memory that was the call's too.
            for t in [*there, *(torch.empty_like(t) for t in (*there, *got))]:
                t.fill_(torch.nan)
        torch.cuda.current_stream().wait_stream(side)
        agree(got, expected[number], f"problem {number}")


def cases_on_gpus():
    """{name: what runs}."""
    found = {f"CUDA graphs, {method}": functools.partial(graphs, method) for method in METHODS}
    found |= {f"a stream of its own, {method}, {way}": functools.partial(streams, method, way) for method in METHODS for way in ("backend", "copies")}
    return found | {"what no graph holds": what_no_graph_holds}
