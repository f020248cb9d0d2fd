"""One sequence over many processes: each has a part of the tokens, and attends to all.

    python examples/pytorch/context_parallel.py                                                           # one process
    torchrun --nproc-per-node 4 examples/pytorch/context_parallel.py --device cuda --tokens 1048576       # four GPUs

Needs torch. Prints the time of a causal forward, the memory that it takes, and whether the last token's row is the one that `decode` gives for it.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import rapt.distributed


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=None, help="query heads; default 32 on GPUs, else 4")
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as many")
    parser.add_argument("--method", choices=["ring", "all_gather", "ulysses"], default="ring")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def main():
    words = arguments()
    on_gpu = words.device == "cuda"
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    else:
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(words.device, rank % torch.cuda.device_count() if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
    heads = words.heads or (32 if on_gpu else 4)
    mine = len(rapt.distributed.positions(words.tokens))
    generator = torch.Generator(device).manual_seed(rank)
    q, k, v = (
        torch.randn(1, count, mine, 128, generator=generator, device=device, dtype=torch.bfloat16) for count in (heads, *[words.kv_heads or heads] * 2)
    )

    for _ in range(2):  # the first call compiles or loads kernels
        dist.barrier()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        out = rapt.distributed.attention(q, k, v, order="zigzag", method=words.method, causal=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun

    # The last token sees all keys, in whatever order they lie on the ranks; rank 0 has it, as the last of its zigzag parts.
    last = q[:, :, -1:].contiguous()
    dist.broadcast(last, src=0)
    expected = rapt.distributed.decode(last, k, v)
    if rank == 0:
        torch.testing.assert_close(out[:, :, -1:], expected, atol=2e-2, rtol=2e-2)
        took = f", {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB beside q, k and v of {3 * q.nbytes / 2**30:.2f}" if on_gpu else ""
        print(f"{words.tokens} tokens on {world} ranks by {words.method}: {seconds:.3f} s{took}; the last row is right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
