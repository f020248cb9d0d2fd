"""Fork after use: the child has its parent's memory and none of its threads."""

import multiprocessing
import os
import signal
import warnings

import numpy as np
import pytest
import rapt
from reference import random

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)


def problem(n=3):
    rng = np.random.default_rng(n)
    return [random(rng, (2, 4, 130, 16)) for _ in range(3)]


def in_child(work, seconds=60):
    """Whether `work()` is true in a forked child that ends in time."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)
        ok = False
        try:
            ok = bool(work())
        finally:
            os._exit(0 if ok else 1)
    _, status = os.waitpid(pid, 0)
    return status == 0


def test_a_child_computes_the_same_after_its_parent_did():
    tensors = problem()
    with rapt.Context(threads=3) as context:
        expected = context.attention(*tensors)
        assert in_child(lambda: np.array_equal(context.attention(*tensors), expected))
        assert in_child(lambda: np.array_equal(rapt.attention(*tensors), expected))
        # A child of a child, and the parent afterwards.
        assert in_child(lambda: in_child(lambda: np.array_equal(context.attention(*tensors), expected)))
        assert np.array_equal(context.attention(*tensors), expected)


def test_a_child_may_use_the_context_and_leave_it():
    tensors = problem()

    def work():
        with context:
            context.attention(*tensors)
        return True

    context = rapt.Context(threads=3)
    context.attention(*tensors)
    assert in_child(work)


def serve(n):
    return rapt.attention(*problem(n)).tobytes()


def test_a_forking_pool_of_workers():
    expected = [serve(n) for n in range(4)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(serve, range(4)).get(timeout=120) == expected


def test_torch_tensors_in_a_child(torch):
    tensors = [torch.from_numpy(x) for x in problem()]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = rapt.attention(*tensors)
        assert in_child(lambda: np.array_equal(rapt.attention(*tensors).numpy(), expected.numpy()))
        assert np.array_equal(rapt.attention(*tensors).numpy(), expected.numpy())
    finally:
        torch.set_num_threads(before)


def test_dataloader_workers(torch):
    from torch.utils.data import DataLoader, Dataset

    class Attended(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, n):
            return rapt.attention(*[torch.from_numpy(x) for x in problem(n)])

    data = Attended()
    expected = [data[n] for n in range(6)]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120)
    for got, wanted in zip(loader, expected):
        assert torch.equal(got, wanted)


