"""What each rank does in test_distributed.py: every case makes its calls over ranks and holds its part against one process.

`cases` run one after another in one world of four processes, on gloo; `FAULTS` each in a world of its own, of which a rank is lost. `cases_on_gpus` are
those of ranks with a GPU each, on NCCL (tests_gpu/test_gpu_distributed.py).
"""

import datetime
import functools
import itertools
import json
import os
import sys
import time
import traceback
from unittest import mock

import distributed_pairing
import reference
import torch
import torch.distributed as dist
from distributed_world import World
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import rapt
import rapt.distributed as rd
import rapt.torch as rt
from rapt import _reference
from rapt.distributed import _methods, _places

# Where PyTorch keeps what its users set of context_parallel.
context_parallel_module = sys.modules["torch.distributed.tensor.experimental._context_parallel._attention"]

WORLD = 4
DEVICE = torch.device("cpu")
# What most cases compute in, and how far they may be off: 1e-11 of float64, 1e-5 of float32.
WIDE = torch.float64
HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_V = 8, 4, 16, 12
# Tokens of each rank: of q and of k and v.
LENGTHS = {
    "uneven": ((5, 0, 12, 7), (5, 0, 12, 7)),
    "others": ((3, 8, 2, 6), (10, 1, 17, 5)),
    "even": ((8, 8, 8, 8), (8, 8, 8, 8)),
    "few keys": ((9, 4, 6, 7), (2, 0, 3, 1)),
}
LENGTHS_ON_GPUS = {
    "uneven": ((300, 77, 0, 130),) * 2,
    "others": ((100, 190, 33, 70), (310, 150, 0, 90)),
    "even": ((96, 96, 96, 96),) * 2,
}
METHODS = ("ring", "all_gather", "ulysses")
ORDERS = ("contiguous", "zigzag")


def random(*sizes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(hash((sizes, seed)) % 2**31)
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def limit_of(dtype):
    return 1e-11 if dtype == torch.float64 else 1e-5


def seen(q_len, kv_len):
    """A boolean mask with a row that sees nothing."""
    mask = random(1, 1, q_len, kv_len, seed=9) > -0.3
    mask[..., 1, :] = False
    return mask


# Options, from the whole lengths; the tensors among them are of the whole sequence.
OPTIONS = {
    "plain": lambda q, k: {},
    "causal": lambda q, k: {"causal": True},
    "bottom right": lambda q, k: {"causal": "bottom_right"},
    "window": lambda q, k: {"window": (4, 3)},
    "window of the end": lambda q, k: {"causal": "bottom_right", "window": (5, None)},
    "softcap and scale": lambda q, k: {"causal": True, "softcap": 2.0, "scale": 0.4},
    "sinks": lambda q, k: {"causal": "bottom_right", "sinks": random(HEADS, seed=3)},
    "sinks of dead rows, mask": lambda q, k: {"sinks": random(HEADS, seed=3), "mask": seen(q, k)},
    "mask": lambda q, k: {"mask": random(1, HEADS, q, k, seed=4), "causal": "bottom_right"},
    "mask of keys": lambda q, k: {"mask": random(2, 1, 1, k, seed=5)},
    "boolean mask": lambda q, k: {"mask": seen(q, k), "window": (9, None)},
    "slopes": lambda q, k: {"alibi_slopes": random(HEADS, seed=6).abs().float()},
    "slopes and window": lambda q, k: {"alibi_slopes": random(HEADS, seed=6).abs().float(), "causal": "bottom_right", "window": (9, None)},
    "large scores": lambda q, k: {"causal": True, "scale": 4000.0},
}


def rows(tensor, places, dim=2):
    """What a rank has of a tensor of all tokens."""
    return torch.cat([tensor.narrow(dim, a, b - a) for a, b in places] or [tensor.narrow(dim, 0, 0)], dim)


def part_of(tensor, places):
    """The rows of a mask."""
    return rows(tensor, places) if tensor.shape[2] > 1 else tensor


def near(got, expected, limit, what):
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert torch.equal(got.isneginf(), expected.isneginf()), f"{what}: -inf in other places"
    assert torch.equal(got.isnan(), expected.isnan()), f"{what}: NaN in other places"
    known = expected.isfinite()
    off = (got - expected)[known].abs()
    bound = limit * (1 + expected[known].abs())
    assert bool((off <= bound).all()), f"{what}: off by {float((off / bound).max() * limit):.3g}, allowed {limit:.3g}"


def problem(name, lengths, dtype):
    q_lengths, kv_lengths = LENGTHS[lengths]
    q_len, kv_len = sum(q_lengths), sum(kv_lengths)
    tensors = random(2, HEADS, q_len, HEAD_DIM), random(2, KV_HEADS, kv_len, HEAD_DIM, seed=1), random(2, KV_HEADS, kv_len, HEAD_DIM_V, seed=2)
    options = OPTIONS[name](q_len, kv_len)
    cast = lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype == torch.float64 else t  # noqa: E731
    return [cast(t) for t in tensors], {name: cast(option) for name, option in options.items()}


@functools.cache
def whole(name, lengths, dtype):
    """One process's answer, lse and gradients by q, k, v, mask and sinks, beside what arrived."""
    tensors, options = problem(name, lengths, dtype)
    leaves = [t.clone().requires_grad_() for t in tensors]
    options = {name: leaf(option) if name in ("mask", "sinks") else option for name, option in options.items()}
    out, lse = rapt.attention(*leaves, return_lse=True, **options)
    d_o, d_lse = random(*out.shape, seed=7).to(dtype), random(*lse.shape, seed=8).to(lse.dtype)
    asked = leaves + [options[name] for name in ("mask", "sinks") if name in options and options[name].requires_grad]
    arrive((out, d_o), (lse, d_lse))
    return out.detach(), lse.detach(), [t.grad for t in asked], d_o, d_lse


def arrive(*pairs):
    """Backward of (answer, what arrives there): a sum, since a gradient given to `backward` imports sympy, which takes seconds. Rows of lse = -inf get none."""
    sum((answer.masked_fill(answer.isneginf(), 0) * given).sum() for answer, given in pairs).backward()


def leaf(tensor):
    tensor = tensor.clone()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def option(name, lengths, method, order, dtype=torch.float64, layout="bhsd"):
    """Forward and backward of one option."""
    rank = dist.get_rank()
    q_places, kv_places = (_places.places(of, order)[rank] for of in LENGTHS[lengths])
    tensors, options = problem(name, lengths, dtype)
    out, lse, gradients, d_o, d_lse = whole(name, lengths, dtype)
    turned = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    leaves = [turned(rows(t, of)).clone().requires_grad_() for t, of in zip(tensors, (q_places, kv_places, kv_places))]
    if "mask" in options:
        options["mask"] = part_of(options["mask"], q_places)
    options = {name: leaf(option) if name in ("mask", "sinks") else option for name, option in options.items()}
    got, got_lse = rd.attention(*leaves, method=method, order=order, layout=layout, return_lse=True, **options)
    limit = limit_of(dtype)
    if name == "large scores":
        limit *= 100
    near(turned(got.detach()), rows(out, q_places), limit, "out")
    near(got_lse.detach(), rows(lse, q_places), limit, "lse")
    arrive((got, turned(rows(d_o, q_places))), (got_lse, rows(d_lse, q_places)))
    limit *= 100 if name == "large scores" else 10
    for letter, of, gradient, places in zip("qkv", leaves, gradients, (q_places, kv_places, kv_places)):
        near(turned(of.grad), rows(gradient, places), limit, f"d{letter}")
    more = [options[name] for name in ("mask", "sinks") if name in options and options[name].requires_grad]
    for of, gradient in zip(more, gradients[3:]):
        given = of.grad
        if of.dim() == 1 or of.shape[2] == 1:
            dist.all_reduce(given)
        else:
            gradient = rows(gradient, q_places)
        near(given, gradient, limit, "gradient of a mask or of sinks")


def rounded(dtype, method, order, as_on_gpus=False):
    """16-bit and float32 forward and backward against the reference, by the tolerance rule, beside PyTorch's own on one process."""
    if as_on_gpus:
        with mock.patch.object(_methods, "products_dtype", lambda q: q.dtype):
            rounded(dtype, method, order)
        return
    rank = dist.get_rank()
    dtype = getattr(torch, dtype)
    lengths = (70, 3, 41, 64)[:WORLD]
    q, k, v = (random(1, HEADS, sum(lengths), HEAD_DIM, seed=seed).to(dtype) for seed in (0, 1, 2))
    d_o = random(*q.shape, seed=7).to(dtype)
    places = _places.places(lengths, order)[rank]
    leaves = [rows(t, places).requires_grad_() for t in (q, k, v)]
    out = rd.attention(*leaves, method=method, order=order, causal=True)
    arrive((out, rows(d_o, places)))
    got, *gradients = (rd.unshard(t, 2, order=order) for t in (out, *(t.grad for t in leaves)))
    exact_out, _ = reference.reference(q, k, v, causal=True)
    reference.assert_close(got, exact_out, dtype, reference.torch_peers(q, k, v, causal=True))
    exact = _reference.gradients(*(t.double().cpu() for t in (d_o, q, k, v)), causal=True)
    peers = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        stock = [t.clone().requires_grad_() for t in (q, k, v)]
        with sdpa_kernel([backend]):
            arrive((scaled_dot_product_attention(*stock, is_causal=True), d_o))
        peers.append([t.grad for t in stock])
    for gradient, truth, *of in zip(gradients, exact, *peers):
        reference.assert_close(gradient, truth, dtype, of)


def delay(seconds):
    """Of what is computed next, on a GPU of what is enqueued next."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(int(seconds * 1e9))
    else:
        time.sleep(seconds)


def same_bits():
    """Whatever the timing: ranks begin late, and in other orders."""
    rank = dist.get_rank()
    places = _places.places(LENGTHS["uneven"][0], "zigzag")[rank]
    (q, k, v), options = problem("causal", "uneven", torch.float32)
    attend, differentiate = _methods.attend, _methods.differentiate
    for method in METHODS:
        bits = []
        for turn in range(3):

            def late(run, turn=turn):
                def call(*args, **words):
                    delay(0.004 * ((rank * 3 + turn * 5) % 4))
                    return run(*args, **words)

                return call

            _methods.attend, _methods.differentiate = late(attend), late(differentiate)
            leaves = [rows(t, places).requires_grad_() for t in (q, k, v)]
            out = rd.attention(*leaves, method=method, order="zigzag", **options)
            out.square().sum().backward()
            bits.append([out.detach(), *(t.grad for t in leaves)])
        _methods.attend, _methods.differentiate = attend, differentiate
        for other in bits[1:]:
            assert all(map(torch.equal, bits[0], other)), f"{method}: other bits"


def batches_pair_by_order_alone():
    """NCCL knows no tags: what ranks send and receive, forward and backward, also where keys do not go all the way round."""
    places = _places.places(LENGTHS["uneven"][0], "contiguous")[dist.get_rank()]
    for method, name in itertools.product(METHODS, ("plain", "causal", "window")):
        (q, k, v), options = problem(name, "uneven", torch.float32)
        recorded, everyone = distributed_pairing.Recorded(), [None] * WORLD
        leaves = [rows(t, places).requires_grad_() for t in (q, k, v)]
        with mock.patch.object(dist, "batch_isend_irecv", recorded):
            rd.attention(*leaves, method=method, **options).square().sum().backward()
        dist.all_gather_object(everyone, recorded.batches)
        assert any(everyone) and not any(distributed_pairing.left_over(everyone)), f"{method}, {name}: {distributed_pairing.left_over(everyone)}"


def dead_rows_and_nan():
    """NaN in keys that nobody sees, and in d_o of rows that see nothing, reaches nothing."""
    rank = dist.get_rank()
    (q, k, v), _ = problem("plain", "even", torch.float64)
    mask = seen(32, 32)
    mask[..., 5] = False
    k[:, :, 5], v[:, :, 5] = torch.nan, torch.inf
    for method, order in itertools.product(("ring", "all_gather"), ORDERS):
        places = _places.places(LENGTHS["even"][0], order)[rank]
        leaves = [rows(t, places).clone().requires_grad_() for t in (q, k, v)]
        out, lse = rd.attention(*leaves, mask=rows(mask, places), method=method, order=order, return_lse=True)
        dead = rows(torch.arange(32)[None, None, :, None] == 1, places)[0, 0, :, 0]
        assert bool(out.isfinite().all()) and bool((out[:, :, dead] == 0).all()) and bool(lse[:, :, dead].isneginf().all())
        arrive((out, torch.ones_like(out).masked_fill(dead[:, None], torch.nan)))
        assert all(bool(t.grad.isfinite().all()) for t in leaves), "NaN in a gradient"


def values_that_are_infinite():
    """+inf in a value that is attended is +inf in the answer, after any merge."""
    rank = dist.get_rank()
    (q, k, v), _ = problem("plain", "even", torch.float32)
    v[:, :, 3, 0] = torch.inf
    places = _places.places(LENGTHS["even"][0], "contiguous")[rank]
    expected = rapt.attention(q, k, v)
    for method in METHODS:
        out = rd.attention(*(rows(t, places) for t in (q, k, v)), method=method)
        near(out.nan_to_num(posinf=-7.0), rows(expected, places).nan_to_num(posinf=-7.0), 1e-5, method)


def lengths_of_one_layout():
    """Three dimensions, [len, heads, head_dim] too."""
    rank = dist.get_rank()
    (q, k, v), options = problem("causal", "uneven", torch.float64)
    places = _places.places(LENGTHS["uneven"][0], "contiguous")[rank]
    expected, lse = rapt.attention(q[0], k[0], v[0], return_lse=True, **options)
    one = [rows(t, places)[0] for t in (q, k, v)]
    for method in METHODS:
        out, got = rd.attention(*one, method=method, return_lse=True, **options)
        near(out, rows(expected, places, 1), 1e-11, method)
        near(got, rows(lse, places, 1), 1e-11, method)
        out = rd.attention(*(t.transpose(0, 1) for t in one), method=method, layout="bshd", **options)
        near(out.transpose(0, 1), rows(expected, places, 1), 1e-11, f"{method}, bshd")


def varlen():
    """Sequences one after another, cut by ranks anywhere."""
    rank = dist.get_rank()
    (q, k, v), _ = problem("plain", "others", WIDE)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
    of_q, of_kv = ([at * len(whole) // parts[-1] for at in parts] for parts, whole in (([0, 4, 4, 13, 19], q), ([0, 9, 12, 30, 33], k)))
    offsets = [torch.tensor(of, dtype=torch.int32) for of in (of_q, of_kv)]
    for options in ({"causal": "bottom_right"}, {"window": (3, 2)}, {"sinks": random(HEADS, seed=3).to(WIDE), "causal": True}):
        expected, lse = rapt.varlen_attention(q, k, v, *(of.to(DEVICE) for of in offsets), return_lse=True, **options)
        for method, order in itertools.product(METHODS, ORDERS):
            q_places, kv_places = (_places.places(of, order)[rank] for of in LENGTHS["others"])
            leaves = [rows(t, of, 0).requires_grad_() for t, of in zip((q, k, v), (q_places, kv_places, kv_places))]
            out, got = rd.varlen_attention(*leaves, *offsets, method=method, order=order, return_lse=True, **options)
            near(out.detach(), rows(expected, q_places, 0), limit_of(WIDE), f"{method}, {order}")
            near(got.detach(), rows(lse, q_places, 1), limit_of(WIDE), f"{method}, {order}")
            out.square().sum().backward()
            leaf_q, leaf_k, leaf_v = (t.clone().requires_grad_() for t in (q, k, v))
            total = 0
            for (q0, q1), (k0, k1) in zip(itertools.pairwise(of_q), itertools.pairwise(of_kv)):
                one = [t[a:b].transpose(0, 1) for t, a, b in ((leaf_q, q0, q1), (leaf_k, k0, k1), (leaf_v, k0, k1))]
                total = total + rapt.attention(*one, **options).square().sum()
            total.backward()
            near(leaves[0].grad, rows(leaf_q.grad, q_places, 0), 10 * limit_of(WIDE), "dq")
            near(leaves[1].grad, rows(leaf_k.grad, kv_places, 0), 10 * limit_of(WIDE), "dk")
            near(leaves[2].grad, rows(leaf_v.grad, kv_places, 0), 10 * limit_of(WIDE), "dv")


def decode(q_len, options, with_lengths):
    """Every rank has a part of each sequence's keys, some none; all get the answer of one cache, to the same bits."""
    rank, most = dist.get_rank(), 12
    lengths = [[4, 7, 0], [0, 9, 0], [5, 5, 5], [11, 0, 2]] if with_lengths else [[most] * 3] * WORLD
    q = random(3, HEADS, q_len, HEAD_DIM).float()
    k, v = ([random(3, KV_HEADS, most, dim, seed=seed + rank).float() for rank in range(WORLD)] for dim, seed in ((HEAD_DIM, 10), (HEAD_DIM_V, 20)))
    given = [None] if not with_lengths else [lengths[rank], torch.tensor(lengths[rank])]
    for of_rank in given:
        out, lse = rd.decode(q, k[rank], v[rank], lengths=of_rank, return_lse=True, **options)
        for sequence in range(3):
            keys, values = (
                torch.cat([t[r][sequence : sequence + 1, :, : lengths[r][sequence]] for r in range(WORLD)], 2) for t in (k, v)
            )
            placed = options.get("causal") or "window" in options or "alibi_slopes" in options
            words = {**options, "causal": "bottom_right" if placed else None}
            if placed and not options.get("causal"):
                # One process has no such alignment without causal: the window of the last query is causal already.
                assert q_len == 1
            expected, expected_lse = rapt.attention(q[sequence : sequence + 1], keys, values, return_lse=True, **words)
            near(out[sequence : sequence + 1], expected, 1e-5, "out")
            near(lse[sequence : sequence + 1], expected_lse, 1e-5, "lse")
    everyone = [torch.empty_like(out) for _ in range(WORLD)]
    dist.all_gather(everyone, out)
    assert all(torch.equal(out, other) for other in everyone), "ranks have other bits"


def tokens_are_dealt_and_brought_together():
    x = random(2, 23, 3)
    for order in ORDERS:
        mine = rd.shard(x, 1, order=order)
        assert torch.equal(mine, x[:, rd.positions(23, order=order)])
        assert torch.equal(rd.unshard(mine, 1, order=order), x)
    few = rd.shard(x[:, :3], 1)
    assert torch.equal(rd.unshard(few, 1), x[:, :3])
    zigzag = [_places.dealt(4096, WORLD, "zigzag"), _places.places(_places.dealt(4096, WORLD, "zigzag"), "zigzag")]
    work = [sum((a + b) * (b - a) for a, b in of) for of in zigzag[1]]
    assert len(set(work)) == 1, "under a causal mask every rank has as much work"


def raises(kind, call, *fragments):
    try:
        call()
    except kind as error:
        assert all(fragment in str(error) for fragment in fragments), f"{error} lacks one of {fragments}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def differences_are_errors_on_every_rank():
    """Of each the same error everywhere, which names the rank; the group serves on."""
    rank = dist.get_rank()
    q = random(1, 4, 6, 8).float()
    odd = rank == 2
    call = lambda *t, **words: lambda: rd.attention(*(t or (q, q, q)), **words)  # noqa: E731
    other = q.double() if odd else q
    raises(rapt.DtypeMismatchError, call(other, other, other), "rank 2", "torch.float64", "t.to(torch.float32)")
    other = q[..., :7] if odd else q
    raises(rapt.ShapeError, call(other, other, q), "rank 2", "head_dim=7", "head_dim=8")
    raises(rapt.OptionError, call(window=(3, 0) if odd else None), "rank 2", "window [3, 0]")
    raises(rapt.OptionError, call(causal=odd), "rank 2", "'top_left'")
    raises(rapt.OptionError, call(method="all_gather" if odd else "ring"), "rank 2", "'all_gather'")
    raises(rapt.OptionError, call(order="zigzag" if odd else "contiguous"), "rank 2", "'zigzag'")
    raises(rapt.OptionError, call(q.clone().requires_grad_(odd), q, q), "rank 2", "needs grad")
    # What one rank cannot serve is its own error there, and names it elsewhere.
    raises(rapt.ShapeError, call(q, q[:, :3] if odd else q, q), "k")
    raises(rapt.OptionError, call(scale=float("nan") if odd else 1.0), *([] if odd else ["rank 2"]))
    raises(rapt.UnsupportedDtypeError, call(*(t.int() if odd else t for t in (q, q, q))), *([] if odd else ["rank 2"]))
    raises(rapt.ShapeError, call(mask=torch.zeros(6, 24 + odd)), "rank 2", "[1, 4, 6, 24]")
    # What is equal to Python, or has no memory of its own, beside what was served before.
    for right, wrong in (({"causal": True}, {"causal": 1}), ({"window": (1, None)}, {"window": (True, None)})):
        call(**right)()
        raises(rapt.OptionError, call(**(wrong if odd else right)), *([] if odd else ["rank 2"]))
    nested = torch.nested.nested_tensor([q[0], q[0, :, :5]]) if odd else q
    raises(rapt.RaptError, call(nested, nested, nested), *([] if odd else ["rank 2"]))
    raises(rapt.UnsupportedError, call(q[:, :3], q[:, :3], q[:, :3], method="ulysses"), 'method="ring"')
    raises(rapt.UnsupportedError, call(method="ulysses", mask=torch.zeros(6, 24)), 'method="ring"')
    raises(rapt.OptionError, call(method="star"), "'ring', 'all_gather', 'ulysses'")
    raises(rd.PeerError, call() if odd else (lambda: rd.decode(q, q, q)), "rank 2", "attention", "decode")
    raises(rapt.OptionError, lambda: rd.decode(q, q, q, causal=True, window=(3 + odd, None)), "rank 2", "window")
    raises(rapt.OptionError, lambda: rd.decode(q, q, q, lengths=[7]), "0 to 6")
    raises(rapt.UnsupportedError, lambda: rd.decode(q.requires_grad_(), q, q), "no_grad")
    q.requires_grad_(False)
    near(rd.attention(q, q, q), rapt.attention(q, torch.cat([q] * WORLD, 2), torch.cat([q] * WORLD, 2)), 1e-5, "after errors")


def a_group_is_a_part_of_the_ranks():
    """Pairs of ranks, each with its own call; and a rank that is in none."""
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    mine = groups[rank in (1, 2)]
    q = random(1, 4, 5 + rank % 3, 8, seed=rank)
    everyone = [random(1, 4, 5 + r % 3, 8, seed=r) for r in ((1, 2) if rank in (1, 2) else (0, 3))]
    keys = torch.cat(everyone, 2)
    near(rd.attention(q, q, q, group=mine, method="all_gather"), rapt.attention(q, keys, keys), 1e-11, "a pair")
    raises(rapt.OptionError, lambda: rd.attention(q, q, q, group=groups[rank in (0, 3)]), "group")


def in_a_mesh():
    """A DeviceMesh of one dimension in place of a group."""
    mesh = init_device_mesh("cpu", (WORLD,))
    q = random(1, 4, 5, 8, seed=dist.get_rank())
    keys = torch.cat([random(1, 4, 5, 8, seed=r) for r in range(WORLD)], 2)
    near(rd.attention(q, q, q, group=mesh), rapt.attention(q, keys, keys), 1e-11, "a mesh")


# --- PyTorch's own -----------------------------------------------------------------------------------------------------------


def served_alone():
    """Whether nothing fell back."""
    counted = rt.stats()
    assert counted["served"] and not counted["fallback"], counted


def dtensors():
    """Sharded by batch, heads and tokens, or replicated: served where they lie, with and without autograd; whatever else is counted."""
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    q, k, v = (random(4, heads, 24, HEAD_DIM, dtype=WIDE, seed=seed) for heads, seed in ((8, 0), (4, 1), (4, 2)))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = rapt.attention(*leaves, causal=True)
    expected.square().sum().backward()
    call = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        with rt.backend():
            rt.reset_stats()
            given = [distribute_tensor(t, mesh, [placement]).requires_grad_() for t in (q, k, v)]
            out = call(*given)
            assert out.placements == (placement,) and out.shape == expected.shape
            near(out.full_tensor().detach(), expected.detach(), limit_of(WIDE), f"{placement}")
            out.full_tensor().square().sum().backward()
            for letter, of, leaf_of in zip("qkv", given, leaves):
                assert of.grad.placements == (placement,)
                near(of.grad.full_tensor(), leaf_of.grad, 10 * limit_of(WIDE), f"d{letter}, {placement}")
            with torch.inference_mode():
                out = call(*(distribute_tensor(t, mesh, [placement]) for t in (q, k, v)))
                near(out.full_tensor(), expected.detach(), limit_of(WIDE), f"{placement} in inference mode")
            served_alone()
    if DEVICE.type != "cpu":
        return  # where PyTorch serves what is handed on
    with rt.backend(), torch.no_grad():
        rt.reset_stats()
        given = [distribute_tensor(t, mesh, [Shard(3)]) for t in (q, k, v)]
        for mode in (torch.no_grad, torch.inference_mode):
            raises(NotImplementedError, lambda mode=mode: mode()(call)(*given), "sharding strategy")
        assert sum(rt.stats()["fallback"].values()) >= 1, rt.stats()
    with torch.inference_mode():
        raises(NotImplementedError, lambda: call(*given), "sharding strategy")


def parallel(is_balanced):
    """`context_parallel` of PyTorch, which on CPUs has no kernel of its own: contiguous, and in the order of its load balancer."""
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    q, k, v = (random(2, 4, 24, HEAD_DIM, dtype=WIDE, seed=seed) for seed in range(3))
    wholes = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = rapt.attention(*wholes, causal=True)
    expected.square().sum().backward()
    order = "zigzag" if is_balanced else "contiguous"
    places = _places.places((24 // WORLD,) * WORLD, order)[dist.get_rank()]
    keeps = context_parallel_module._cp_options.enable_load_balance
    context_parallel_module._cp_options.enable_load_balance = is_balanced
    try:
        with rt.backend():
            rt.reset_stats()
            buffers = [t.clone() for t in (q, k, v)]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        out = torch.nn.functional.scaled_dot_product_attention(*buffers, is_causal=True)
                    assert type(out) is torch.Tensor
                    near(out, rows(expected.detach(), places), limit_of(WIDE), order)
                leaves = [t.clone().requires_grad_() for t in buffers]
                torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True).square().sum().backward()
                for letter, leaf_of, of in zip("qkv", leaves, wholes):
                    near(leaf_of.grad, rows(of.grad, places), 10 * limit_of(WIDE), f"d{letter}, {order}")
            served_alone()
    finally:
        context_parallel_module._cp_options.enable_load_balance = keeps


def a_model_of_transformers():
    """A Llama under `context_parallel`, its logits and gradients beside one process."""
    import transformers

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50, attn_implementation="sdpa"
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    ids, places = torch.randint(0, 50, (2, 24)), torch.arange(24).expand(2, -1).contiguous()
    expected = model(input_ids=ids, position_ids=places, use_cache=False).logits
    expected.square().sum().backward()
    gradients = [of.grad for of in model.parameters()]
    for is_balanced in (False, True):
        context_parallel_module._cp_options.enable_load_balance = is_balanced
        model.zero_grad()
        hooks = []
        if is_balanced:
            # transformers takes jumps of position_ids for sequences packed together, and makes a mask of them.
            plain = lambda _module, args, words: (args, {**words, "attention_mask": None})  # noqa: E731
            hooks = [layer.self_attn.register_forward_pre_hook(plain, with_kwargs=True) for layer in model.model.layers]
        with rt.backend():
            rt.reset_stats()
            mine = [ids.clone(), places.clone()]
            with context_parallel(mesh, buffers=mine, buffer_seq_dims=[1, 1]):
                logits = model(input_ids=mine[0], position_ids=mine[1], use_cache=False).logits
                logits.square().sum().backward()
            served_alone()
        order = "zigzag" if is_balanced else "contiguous"
        near(logits.detach(), rows(expected.detach(), _places.places((6,) * WORLD, order)[dist.get_rank()], 1), 1e-10, order)
        for of, gradient in zip(model.parameters(), gradients):
            dist.all_reduce(of.grad)
            near(of.grad, gradient, 1e-8, "a gradient")
        for hook in hooks:
            hook.remove()


def _others():
    """The modules of more cases, which need this one."""
    import distributed_copies
    import distributed_pages

    return distributed_copies, distributed_pages


def cases(is_whole):
    """{name: what runs}."""
    found = {name: run for module in _others() for name, run in module.cases().items()}
    for name, method, order in itertools.product(OPTIONS, METHODS, ORDERS):
        if "mask" in name and method == "ulysses":
            continue
        all_lengths = list(LENGTHS) if is_whole else ["uneven"] if order == "zigzag" else ["others"]
        for lengths in all_lengths:
            for dtype in (torch.float64, torch.float32) if is_whole else (torch.float64,):
                layout = "bshd" if name == "softcap and scale" else "bhsd"
                found[f"{name}, {method}, {order}, {lengths}, {dtype}"] = functools.partial(option, name, lengths, method, order, dtype, layout)
    few = [("bfloat16", "ring"), ("float16", "all_gather"), ("float32", "ring"), ("bfloat16", "ulysses")]
    for dtype, method in itertools.product(("bfloat16", "float16", "float32"), METHODS) if is_whole else few:
        found[f"rounding of {dtype}, {method}"] = functools.partial(rounded, dtype, method, "zigzag")
    for dtype, method in (("bfloat16", "ring"), ("float16", "all_gather")):
        found[f"rounding of {dtype}, {method}, products as on GPUs"] = functools.partial(rounded, dtype, method, "zigzag", True)
    for q_len, options in ((1, {}), (1, {"window": (6, 0)}), (3, {}), (3, {"causal": True}), (2, {"causal": True, "window": (7, None), "alibi_slopes": torch.linspace(0.1, 1, HEADS)}),
                           (2, {"sinks": torch.linspace(-1, 1, HEADS)})):  # fmt: skip
        for with_lengths in (False, True):
            found[f"decode of {q_len}, {', '.join(options)}, {with_lengths}"] = functools.partial(decode, q_len, options, with_lengths)
    for run in (
        same_bits, batches_pair_by_order_alone, dead_rows_and_nan, values_that_are_infinite, lengths_of_one_layout, varlen, tokens_are_dealt_and_brought_together, differences_are_errors_on_every_rank,
        a_group_is_a_part_of_the_ranks, in_a_mesh, dtensors, *((a_model_of_transformers,) if is_whole else ()),
    ):  # fmt: skip
        found[run.__name__.replace("_", " ")] = run
    for is_balanced in (False, True):
        found[f"context_parallel, balanced: {is_balanced}"] = functools.partial(parallel, is_balanced)
    return found


def cases_on_gpus():
    """The same of ranks with GPUs: gradients of every option, by every method; and how they are rounded. Few kernels, since most are compiled there."""
    import distributed_copies
    import distributed_graphs

    found = distributed_copies.cases_on_gpus() | distributed_graphs.cases_on_gpus()
    for name, method, order in itertools.product(OPTIONS, METHODS, ORDERS):
        if name == "large scores" or "mask" in name and method == "ulysses" or (order == "zigzag") != (name in ("causal", "slopes", "mask")):
            continue
        lengths = "uneven" if order == "zigzag" else "others"
        found[f"{name}, {method}, {order}"] = functools.partial(option, name, lengths, method, order, torch.float32)
    for method in METHODS:
        found[f"rounding of bfloat16, {method}"] = functools.partial(rounded, "bfloat16", method, "zigzag")
    for run in (same_bits, varlen, dtensors):
        found[run.__name__.replace("_", " ")] = run
    for is_balanced in (False, True):
        found[f"context_parallel, balanced: {is_balanced}"] = functools.partial(parallel, is_balanced)
    return found


# --- faults ------------------------------------------------------------------------------------------------------------------


def _expect_lost(call, *fragments):
    begun = time.monotonic()
    raises(rd.PeerError, call, *fragments)
    assert time.monotonic() - begun < 20, "the timeout of the group is shorter"


def dies_before(rank, group, told="its process has ended"):
    """A rank that is gone when others call."""
    q = random(1, 4, 6, 8)
    rd.attention(q, q, q, group=group)
    if rank == 2:
        os._exit(0)
    _expect_lost(lambda: rd.attention(q, q, q, group=group), "rank 2", "call 2", told, "torchrun")


def hangs(rank, group):
    """A rank that makes no call."""
    q = random(1, 4, 6, 8)
    if rank == 2:
        time.sleep(4)
        os._exit(0)
    _expect_lost(lambda: rd.attention(q, q, q, group=group), "rank 2 did not answer", "within 2 s")


def dies_within(rank, group):
    """A rank that is lost while keys go round: whoever waits for it, or for one that waits, hears of it."""
    q = random(1, 4, 6, 8)
    if rank == 2:
        _methods.attend = lambda *_args, **_words: os._exit(0)
    _expect_lost(lambda: rd.attention(q, q, q, group=group), "waited for the keys of rank")


FAULTS = {"dies before": dies_before, "hangs": hangs, "dies within": dies_within}


def faults():
    """{name: what a rank of the world of its own does}."""
    copies, pages = _others()
    return FAULTS | copies.FAULTS | pages.FAULTS


# --- ranks -------------------------------------------------------------------------------------------------------------------


def _each(some, rank, found):
    for name, run in some.items():
        try:
            run()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
            print(f"rank {rank}, {name}: {found[name]}", file=sys.stderr, flush=True)


def _fault(name, rank, found):
    # NCCL takes some seconds to connect.
    group = dist.new_group(list(range(WORLD)), timeout=datetime.timedelta(seconds=15 if DEVICE.type == "cuda" else 2))
    dist.barrier(group)
    _each({name: functools.partial(faults()[name], rank, group)}, rank, found)


def main_on_gpus(folder, world):
    """Prints {case: None or what was wrong} of so many ranks, each with a GPU."""
    global WORLD, DEVICE, WIDE, HEAD_DIM, HEAD_DIM_V, LENGTHS
    WORLD, DEVICE, WIDE, HEAD_DIM, HEAD_DIM_V = world, torch.device("cuda"), torch.float32, 64, 64
    LENGTHS = {name: tuple(of[:world] for of in both) for name, both in LENGTHS_ON_GPUS.items()}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    together = World(functools.partial(_each, cases_on_gpus()), f"{folder}/gpus", world, "nccl").found()
    copies, _ = _others()
    for name in copies.FAULTS:
        together |= World(functools.partial(_fault, name), f"{folder}/{name.replace(' ', '_').replace(',', '')}", world, "nccl").found()
    print(json.dumps(together))
    sys.stdout.flush()


def main(folder):
    """Prints {case: None or what was wrong}."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # All at once: those of the faults wait, most of the time.
    some = cases(bool(os.environ.get("RAPT_WHOLE")))
    worlds = [World(functools.partial(_each, some), f"{folder}/all", WORLD)]
    worlds += [World(functools.partial(_fault, name), f"{folder}/{name.replace(' ', '_').replace(',', '')}", WORLD) for name in faults()]
    together = {}
    for world in worlds:
        together |= world.found()
    print(json.dumps(together))
    sys.stdout.flush()
