"""Training on GPUs as it is done: two ranks by NCCL (DistributedDataParallel, FSDP2), compiled steps, checkpoints, autocast, whole steps in CUDA
graphs, side streams. What a gradient is worth by itself is tested in test_gpu_backward.py.

    pytest bindings/python/tests_gpu/test_gpu_training.py        on two GPUs; on one the ranks are skipped
"""

import json
import subprocess
import sys
from pathlib import Path

import data_parallel
import pytest
import torch
import torch.nn.functional as F
from data_parallel import LAYERS, apart, batches, new, served, state, trained
from torch.nn.attention import SDPBackend, sdpa_kernel

import rapt.torch

GPU = torch.device("cuda")


# --- two ranks ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    """What the ranks found of each case: None, or what was wrong."""
    if torch.cuda.device_count() < data_parallel.WORLD:
        pytest.skip(f"{data_parallel.WORLD} ranks need as many GPUs")
    ran = subprocess.run([sys.executable, Path(data_parallel.__file__), "cuda"], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", data_parallel.CASES)
def test_two_ranks_train_as_one_process_does(found, name):
    assert found[name] is None, found[name]


# --- one GPU -----------------------------------------------------------------------------------------------------------------


def stepped(model, given, dtype=None):
    """The loss of a step and the gradients, of `given` (x, target); `dtype`: that of autocast."""
    model.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        loss = F.mse_loss(model(given[0]).float(), given[1])
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_compiled_step_carries_both_passes(dtype):
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    (given,), model, recorded = batches(GPU, 1), new(GPU), AotEagerAndRecordGraphs()
    with rapt.torch.backend():
        loss, wanted = stepped(model, given, dtype)
        torch._dynamo.reset()
        rapt.torch.reset_stats()
        got_loss, got = stepped(torch.compile(model, fullgraph=True, backend=recorded), given, dtype)
        assert rapt.torch.stats() == {"served": LAYERS, "fallback": {}}
    assert apart([got_loss, *got], [loss, *wanted]) <= (1e-5 if dtype is None else 2e-2)
    for graphs, name in ((recorded.fw_graphs, "lse"), (recorded.bw_graphs, "backward")):
        nodes = [str(node.target) for node in graphs[0].graph.nodes if "attention" in str(node.target)]
        assert nodes == [f"rapt.scaled_dot_product_attention_{name}.default"] * LAYERS


def test_inductor_trains_as_eager_does():
    eager, model = new(GPU), new(GPU)
    with served(2 * 3 * LAYERS):
        losses = trained(eager, batches(GPU))
        torch._dynamo.reset()
        got = trained(torch.compile(model, fullgraph=True), batches(GPU))
    assert apart(got, losses) <= 1e-4 and apart(state(model), state(eager)) <= 1e-3


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_checkpoints_change_no_bit(dtype):
    (given,) = batches(GPU, 1)
    with served(3 * LAYERS):
        loss, wanted = stepped(new(GPU), given, dtype)
        again, got = stepped(new(GPU, checkpointed=True), given, dtype)
    assert torch.equal(loss, again) and all(map(torch.equal, got, wanted))


def test_autocast_is_as_near_to_float32_as_stock():
    (given,) = batches(GPU, 1)
    with sdpa_kernel(SDPBackend.MATH):
        _, exact = stepped(new(GPU), given)
    _, stock = stepped(new(GPU), given, torch.bfloat16)
    with served(LAYERS):
        _, got = stepped(new(GPU), given, torch.bfloat16)
    assert 0 < apart(got, exact) <= 1.5 * apart(stock, exact)


# --- CUDA graphs -------------------------------------------------------------------------------------------------------------


class Step:
    """A training step on tensors that stay where they are."""

    def __init__(self, model, dtype):
        self.model, self.dtype = model, dtype
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.x, self.target = (torch.zeros_like(x) for x in batches(GPU, 1)[0])

    def __call__(self):
        self.optimizer.zero_grad(set_to_none=True)
        # Inside a capture nothing may be kept of weights in another dtype, or a replay would not read them anew.
        with torch.autocast("cuda", self.dtype, enabled=self.dtype is not None, cache_enabled=False):
            loss = F.mse_loss(self.model(self.x).float(), self.target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def give(self, x, target):
        self.x.copy_(x)
        self.target.copy_(target)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_whole_step_is_captured_and_replayed(dtype):
    first, *following = batches(GPU, 6)
    eager, captured = (Step(new(GPU), dtype) for _ in range(2))
    with served(LAYERS * (3 + 5 + 3 + 1)):  # a replay calls nothing
        eager.give(*first)
        for _ in range(3):
            eager()
        losses = []
        for given in following:
            eager.give(*given)
            losses.append(eager())
        captured.give(*first)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                captured()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        captured.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = captured()
    replayed = []
    for given in following:
        captured.give(*given)
        graph.replay()
        replayed.append(loss.clone())
    # The order of sums in cuBLAS may be another in a capture.
    most = 1e-4 if dtype is None else 2e-2
    assert apart(replayed, losses) <= most and apart(state(captured.model), state(eager.model)) <= most


def test_graphed_callables_have_the_gradients_of_eager_calls():
    (given,) = batches(GPU, 1)
    with rapt.torch.backend():
        loss, wanted = stepped(new(GPU), given)
        model = new(GPU)
        rapt.torch.reset_stats()
        graphed = torch.cuda.make_graphed_callables(model, (given[0].clone(),))
        stats = rapt.torch.stats()
    assert stats["served"] >= LAYERS and not stats["fallback"], stats
    for _ in range(2):
        model.zero_grad()
        again = F.mse_loss(graphed(given[0]), given[1])
        again.backward()
        got = [p.grad.clone() for p in model.parameters()]
        assert apart([again.detach(), *got], [loss, *wanted]) <= 1e-4


# --- streams -----------------------------------------------------------------------------------------------------------------


def operands(dtype=torch.bfloat16):
    draw = torch.Generator(GPU).manual_seed(3)
    return [torch.randn(2, 4, 777, 64, generator=draw, device=GPU).to(dtype) for _ in range(4)]


def gradients(q, k, v, d_o):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True), leaves, d_o)


def test_a_step_on_a_side_stream_keeps_what_it_reads_and_its_scratch_memory():
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with served(2):
        wanted = gradients(*operands())
        torch.cuda.synchronize()
        given = operands()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)  # what follows on the main stream is long done by then
            got = gradients(*given)
        for x in given:
            x.record_stream(side)
        shape, dtype = given[0].shape, given[0].dtype
        del given, x
        # What may lie where the operands, out, lse and the scratch memory of both passes lay, if any was given back too early.
        stains = [torch.full(shape, float("nan"), device=GPU, dtype=dtype) for _ in range(16)]
        stains += [torch.full((2, 4, 777), float("nan"), device=GPU) for _ in range(64)]
        main.wait_stream(side)
    assert all(map(torch.equal, got, wanted))
    del stains


def test_a_backward_that_another_stream_asks_for_runs_behind_its_forward():
    side, given = torch.cuda.Stream(), operands()
    with served(2):
        wanted = gradients(*given)
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        got = torch.autograd.grad(out, leaves, given[3])
        torch.cuda.current_stream().wait_stream(side)
    assert all(map(torch.equal, got, wanted))
