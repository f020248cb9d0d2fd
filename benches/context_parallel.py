"""Causal attention of one sequence on several GPUs: `rapt.distributed` beside PyTorch's `context_parallel` in one interleaved run.

    torchrun --nproc-per-node 4 benches/context_parallel.py [--tokens 65536 262144] [--backward 65536] [--rounds 9] [--timeline] [--out FOLDER]

bfloat16, 32 heads of 128, zigzag; PyTorch with cuDNN, by both of its ways to move keys; Rapt by each method and transport (docs/guides/distributed.md).
--backward: tokens of which forward and backward are measured, too. Each is the slowest rank's time by its device's clock; medians of rounds, in which every
engine runs once, each from an idle device. One device's time is rank 0's alone. Before times are taken, Rapt's answers and gradients are compared with one
device's. Prints a table, and writes times and, with --timeline, a picture of what one call does on rank 0 (what computes, and what moves keys) to FOLDER.
`--device cpu` runs the program itself, on gloo, without PyTorch's.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

import rapt.distributed

HEADS, HEAD_DIM = 32, 128
# Rapt's engines: (method, transport).
WAYS = tuple((method, by) for method in ("ring", "all_gather", "ulysses") for by in ("backend", "copies"))


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--backward", type=int, nargs="*", default=[65536])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args()


class Clock:
    """Milliseconds of a call on this rank's device."""

    def __init__(self, on_gpu):
        self.on_gpu = on_gpu

    def of(self, run):
        if not self.on_gpu:
            begun = time.perf_counter()
            run()
            return (time.perf_counter() - begun) * 1e3
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


def alone(clock, engines, rounds):
    """Medians on this rank alone."""
    times = {name: [clock.of(run) for _ in range(rounds + 1)][1:] for name, run in engines.items()}
    return {name: statistics.median(of) for name, of in times.items()}


def together(clock, engines, rounds, device):
    """Of every engine the slowest rank's times, one round after another."""
    times = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, run in engines.items():
            dist.barrier()
            slowest = torch.tensor([clock.of(run)], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn:
                times[name].append(float(slowest))
    return times


def step(attend, leaves, d_o):
    """A forward and a backward pass of `attend`; without `d_o` a forward pass."""
    if d_o is None:
        with torch.no_grad():
            return [attend(*leaves)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_o)]


def check(got, expected, name):
    """Rapt's answer and gradients on this rank beside one device's."""
    for of, (part, whole) in zip(("out", "dq", "dk", "dv"), zip(got, expected)):
        theirs = rapt.distributed.shard(whole, 2)
        off = float((part.float() - theirs.float()).norm() / theirs.float().norm())
        if not off < 0.01:
            raise SystemExit(f"rank {dist.get_rank()}: {of} of {name} is off by {off:.2g}")


def measure(words, tokens, device, clock, with_backward):
    """{engine: times} on all ranks and medians on one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(7)
    draw = lambda: torch.randn(1, words.heads, tokens, HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16)  # noqa: E731
    whole, d_o = [draw() for _ in range(3)], draw() if with_backward else None
    leaves = [rapt.distributed.shard(t, 2).contiguous().requires_grad_(with_backward) for t in whole]
    part = None if d_o is None else rapt.distributed.shard(d_o, 2).contiguous()
    one = {}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    causal, stock = (lambda *t: rapt.attention(*t, causal=True)), (lambda *t: sdpa(*t, is_causal=True))
    backend = sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if clock.on_gpu else contextlib.nullcontext()
    rounds = max(1, words.rounds // 3)

    def over_ranks(method, transport):
        attend = lambda *t: rapt.distributed.attention(*t, method=method, transport=transport, order="zigzag", causal=True)  # noqa: E731
        return lambda: step(attend, leaves, part)

    with backend:
        if rank == 0:
            alone_on = [t.requires_grad_(with_backward) for t in whole]
            one = alone(clock, {"rapt": lambda: step(causal, alone_on, d_o), "torch": lambda: step(stock, alone_on, d_o)}, rounds)
        expected = step(causal, [t.requires_grad_(with_backward) for t in whole], d_o)
        dist.barrier()
        engines = {f"rapt, {method}, {by}": over_ranks(method, by) for method, by in WAYS if method != "ulysses" or words.heads % world == 0}
        for name, run in engines.items():
            check(run(), expected, name)
        del expected
        if not clock.on_gpu:
            return one, together(clock, engines, words.rounds, device)
        mesh = init_device_mesh("cuda", (world,))
        whole = [t.detach() for t in whole]
        with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(whole)):
            theirs = [t.requires_grad_(with_backward) for t in whole]
            for method in ("allgather", "alltoall"):

                def run(method=method):
                    set_rotate_method(method)
                    # The function as context_parallel has replaced it.
                    return step(lambda *t: torch.nn.functional.scaled_dot_product_attention(*t, is_causal=True), theirs, part)

                try:
                    run()
                    engines[f"torch, {method}"] = run
                except (RuntimeError, NotImplementedError) as error:
                    if rank == 0:
                        print(f"torch, {method}: {error}")
            return one, together(clock, engines, words.rounds, device)


def report(tokens, one, times, what):
    """A table of medians."""
    world = dist.get_world_size()
    medians = {name: statistics.median(of) for name, of in times.items()}
    theirs = min((ms for name, ms in medians.items() if name.startswith("torch")), default=None)
    print(f"{tokens} tokens on {world}, {what}; on one: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in one.items()))
    for name, ms in medians.items():
        beside = "" if theirs is None else f"  {theirs / ms:5.2f}x torch's best"
        print(f"  {name:25} {ms:10.3f} ms  {one['rapt'] / (world * ms):6.3f} of linear{beside}  {min(times[name]):.3f} to {max(times[name]):.3f}")


# --- the timeline ------------------------------------------------------------------------------------------------------------


def timeline(words, tokens, device, method, transport):
    """What one call does on this rank's GPU: [(name, begin in µs, duration, stream)]."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    mine = len(rapt.distributed.positions(tokens))
    q, k, v = (torch.randn(1, words.heads, mine, HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3))
    call = lambda: rapt.distributed.attention(q, k, v, method=method, transport=transport, order="zigzag", causal=True)  # noqa: E731
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
        torch.cuda.synchronize()
    path = words.out / f"trace-{dist.get_rank()}.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    kernels = [of for of in events if of.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted((of["ts"], of["dur"], of["name"], of["args"].get("stream", 0)) for of in kernels)


def apart(events):
    """(what moves keys: NCCL's kernels, and copies beside the stream that computes; all else)."""
    computing = max(events, key=lambda of: of[1] * ("nccl" not in of[2].lower() and "memcpy" not in of[2].lower()))[3]
    moving = [of for of in events if "nccl" in of[2].lower() or "memcpy" in of[2].lower() and of[3] != computing]
    return moving, [of for of in events if of not in moving]


def picture(events, title):
    """An SVG: above what computes, below what moves keys."""
    first, last = events[0][0], max(begin + took for begin, took, *_ in events)
    scale, width = 900 / (last - first), 960
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="150" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="150" fill="white"/><text x="30" y="20">{title}: {(last - first) / 1e3:.2f} ms</text>',
    ]
    moving = {of[:3] for of in apart(events)[0]}
    for begin, took, name, _ in events:
        is_network = (begin, took, name) in moving
        is_attention = name == "attention"  # what Rapt's kernels of it are called
        y, color = (90, "#d95f02") if is_network else (40, "#1b6ca8" if is_attention else "#7fb3d5")
        lines.append(f'<rect x="{30 + (begin - first) * scale:.2f}" y="{y}" width="{max(0.3, took * scale):.2f}" height="35" fill="{color}"/>')
    lines.append('<text x="30" y="145">above: attention (dark) and merges; below: keys on their way</text></svg>')
    return "\n".join(lines) + "\n"


def hidden(events):
    """(ms of moving keys, of those beside a kernel that computes)."""
    moving, busy = apart(events)
    beside = sum(max(0.0, min(a + d, b + e) - max(a, b)) for a, d, *_ in moving for b, e, *_ in busy)
    return sum(of[1] for of in moving) / 1e3, beside / 1e3


def main():
    words = arguments()
    on_gpu = words.device == "cuda"
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    words.out.mkdir(parents=True, exist_ok=True)
    clock, world = Clock(on_gpu), dist.get_world_size()
    for tokens, with_backward in [(of, False) for of in words.tokens] + [(of, True) for of in words.backward]:
        one, times = measure(words, tokens, device, clock, with_backward)
        if on_gpu:
            torch.cuda.empty_cache()
        if rank == 0:
            what = "forward and backward" if with_backward else "forward"
            report(tokens, one, times, what)
            machine = torch.cuda.get_device_name() if on_gpu else "CPU"
            found = {"machine": machine, "torch": torch.__version__, "rapt": rapt.__version__, "ranks": world, "tokens": tokens, "what": what, "one": one, "times": times}
            (words.out / f"context-parallel-{world}-{tokens}-{what.replace(' ', '-')}.json").write_text(json.dumps(found))
    if words.timeline and on_gpu:
        for method, transport in WAYS:
            events = timeline(words, words.tokens[0], device, method, transport)
            if rank == 0:
                moving, beside = hidden(events)
                name = f"{method}, {transport}"
                print(f"timeline of {name}: keys move for {moving:.2f} ms, {beside:.2f} of them beside what computes")
                (words.out / f"timeline-{world}-{method}-{transport}.svg").write_text(picture(events, f"{name}, {words.tokens[0]} tokens on {world} GPUs, rank 0"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
