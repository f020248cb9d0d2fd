"""What each of two ranks does in test_gpu_training.py: a small transformer, trained by DistributedDataParallel and by fully_shard (FSDP2)
with Rapt registered, beside one process on the whole batch by PyTorch's math path.

    python data_parallel.py cuda    both ranks on GPUs of their own, by NCCL
    python data_parallel.py cpu     the same in host memory, by gloo

The last line of stdout is JSON: {case: what was wrong on a rank, or null}.
"""

import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import rapt.torch

WORLD, STEPS = 2, 3
LAYERS, HEADS, HEAD_DIM = 2, 4, 64
WIDTH = HEADS * HEAD_DIM


class Block(torch.nn.Module):
    """A layer whose queries, keys and values are views of one product."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.project = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Model(torch.nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.blocks, self.checkpointed = torch.nn.ModuleList(Block() for _ in range(LAYERS)), checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def new(where, **options):
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Model(**options).to(where)


def batches(where, steps=STEPS):
    """[(x, target)] of both ranks; 131 tokens are no multiple of a tile."""
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2 * WORLD, 131, WIDTH, generator=draw).to(where) for _ in range(2)) for _ in range(steps)]


def trained(model, steps):
    """The losses; the model has its last gradients."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for x, target in steps:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def state(model):
    """Weights and their gradients, whole on every rank, one after another."""
    whole = lambda x: x.full_tensor() if isinstance(x, DTensor) else x  # noqa: E731
    return [whole(x).detach().clone() for p in model.parameters() for x in (p, p.grad)]


def apart(got, want):
    """The largest relative L2 of any of them."""
    return max(((one - other).norm() / other.norm()).item() for one, other in zip(got, want))


@contextlib.contextmanager
def served(calls):
    with rapt.torch.backend():
        rapt.torch.reset_stats()
        yield
        assert rapt.torch.stats() == {"served": calls, "fallback": {}}, rapt.torch.stats()


def one_process(where):
    model = new(where)
    with sdpa_kernel(SDPBackend.MATH):
        trained(model, batches(where))
    return state(model)


def of_rank(where, rank):
    return [tuple(x[2 * rank : 2 * rank + 2] for x in step) for step in batches(where)]


def agree(got, want, most):
    assert apart(got, want) <= most, f"relative error {apart(got, want):.2e}, allowed {most:.0e}"
    for one in got:
        others = [torch.empty_like(one) for _ in range(WORLD)]
        dist.all_gather(others, one.contiguous())
        assert all(torch.equal(one, other) for other in others), "ranks differ"


def distributed_data_parallel(where, rank):
    model = torch.nn.parallel.DistributedDataParallel(new(where), device_ids=[where] if where.type == "cuda" else None)
    with served(STEPS * LAYERS):
        trained(model, of_rank(where, rank))
    agree(state(model), one_process(where), 1e-4)


def sharded(model, where, **options):
    mesh = init_device_mesh(where.type, (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fully_sharded(where, rank):
    model = sharded(new(where), where)
    with served(STEPS * LAYERS):
        trained(model, of_rank(where, rank))
    agree(state(model), one_process(where), 1e-4)


def fully_sharded_in_bfloat16_with_checkpoints(where, rank):
    """As near to float32 as stock PyTorch in the same precision; of the error most is the other layers', a draw each time."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [sharded(new(where, checkpointed=True), where, mp_policy=policy) for _ in range(2)]
    trained(models[0], of_rank(where, rank))
    with served(2 * STEPS * LAYERS):  # a backward computes the forward again
        trained(models[1], of_rank(where, rank))
    exact = one_process(where)
    agree(state(models[1]), exact, 1.5 * apart(state(models[0]), exact))


def compiled(where, rank):
    """DistributedDataParallel, compiled: its buckets cut the graph."""
    torch._dynamo.reset()
    model = torch.nn.parallel.DistributedDataParallel(new(where), device_ids=[where] if where.type == "cuda" else None)
    with rapt.torch.backend():
        rapt.torch.reset_stats()
        trained(torch.compile(model, backend="aot_eager"), of_rank(where, rank))
        stats = rapt.torch.stats()
    assert stats == {"served": STEPS * LAYERS, "fallback": {}}, stats
    agree(state(model), one_process(where), 1e-4)


CASES = {
    case.__name__: case
    for case in (distributed_data_parallel, fully_sharded, fully_sharded_in_bfloat16_with_checkpoints, compiled)
}  # fmt: skip


def of_one(device, rank, store):
    """One rank: a line of JSON."""
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60)
    )  # fmt: skip
    found = {}
    for name, case in CASES.items():
        try:
            case(where, rank)
            found[name] = None
        except Exception:  # noqa: BLE001 - told with its case
            found[name] = traceback.format_exc()
    dist.destroy_process_group()
    print(json.dumps(found))


def main(device):
    """{case: None, or what was wrong}, by two processes."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(rapt.__file__).parents[1])}
    with tempfile.TemporaryDirectory(prefix="rapt-ranks-") as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, device, str(rank), str(Path(folder) / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env=environment,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        said = [rank.communicate(timeout=300) for rank in ranks]
    failed = [error[-4000:] for rank, (_, error) in zip(ranks, said) if rank.returncode]
    if failed:
        return dict.fromkeys(CASES, "\n".join(failed))
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    return {name: found[0][name] or found[1][name] for name in CASES}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        of_one(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        print(json.dumps(main(sys.argv[1]), indent=1))
