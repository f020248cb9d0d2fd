"""Writes cases.jsonl beside it: operators of torch with their arguments and what torch makes of them.

A float result is what torch computes in float64 of the same numbers, rounded once to the result's dtype; torch's own
result must be close to it. Shapes, strides and dtypes are those of torch's fake tensors, which an exported program records.
Numbers of a tensor follow from a seed, as `cases.rs` has it; special ones are written out.

    python make.py
"""

import json
import logging
import math
import pathlib
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I64, I32, BOOL = torch.int64, torch.int32, torch.bool
NAN, INF = math.nan, math.inf
lines = []
seeds = iter(range(1, 100000))


def numbers(seed, n, dtype):
    raw = [(i * 37 + seed * 101) % 61 - 30 for i in range(n)]
    if dtype == BOOL:
        return torch.tensor([x % 3 == 0 for x in raw], dtype=BOOL)
    return torch.tensor(raw, dtype=F64).div(8 if dtype.is_floating_point else 1).to(dtype)


class T:
    """A tensor with the storage that it is written with."""

    def __init__(self, storage, shape, strides, offset, seed):
        self.storage, self.shape, self.strides, self.offset, self.seed = storage, shape, strides, offset, seed

    def tensor(self, dtype=None):
        storage = self.storage if dtype is None else self.storage.to(dtype)
        return torch.as_strided(storage.clone(), self.shape, self.strides, self.offset)

    def json(self):
        out = {"t": name(self.storage.dtype), "s": self.shape}
        if self.strides != row_major(self.shape):
            out["d"] = self.strides
        if self.offset:
            out["o"] = self.offset
        out["n"] = len(self.storage)
        if self.seed is None:
            out["x"] = [value(x) for x in self.storage.tolist()]
        else:
            out["seed"] = self.seed
        return out


def name(dtype):
    return str(dtype).removeprefix("torch.")


def value(x):
    if isinstance(x, bool):
        return int(x)
    if isinstance(x, float):
        if not math.isfinite(x):
            return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
        return int(x) if x == int(x) and abs(x) < 1e15 and math.copysign(1, x) == math.copysign(1, int(x) or 1) else x
    return x


def row_major(shape):
    strides = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        strides[d - 1] = strides[d] * max(shape[d], 1)
    return strides


def t(*shape, dtype=F32, order=None, step=1, offset=0, expand=()):
    """A seeded tensor; `order` is the order of its dimensions in memory, `step` leaves gaps, `expand` has stride 0."""
    shape = list(shape)
    physical = [shape[d] for d in (order or range(len(shape)))]
    strides = [0] * len(shape)
    for d, stride in zip(order or range(len(shape)), row_major(physical)):
        strides[d] = 0 if d in expand else stride * step
    n = offset + 1 + sum((s - 1) * d for s, d in zip(shape, strides)) if all(shape) else offset
    seed = next(seeds)
    return T(numbers(seed, n, dtype), shape, strides, offset, seed)


def lit(values, dtype=F32):
    x = torch.tensor(values, dtype=dtype)
    return T(x.reshape(-1), list(x.shape), row_major(x.shape), 0, None)


def build(arg, dtype=None):
    if isinstance(arg, T):
        return arg.tensor(dtype if arg.storage.dtype.is_floating_point else None)
    if isinstance(arg, list):
        return [build(a, dtype) for a in arg]
    return arg


def encode(arg):
    if isinstance(arg, T):
        return arg.json()
    if isinstance(arg, list):
        return [encode(a) for a in arg]
    if isinstance(arg, str):
        return {"str": arg}
    if isinstance(arg, torch.dtype):
        return {"dtype": name(arg)}
    if isinstance(arg, float) and not math.isfinite(arg):
        return value(arg)
    return arg


def outs(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def halves(dtype):
    return {F16: 2e-2, BF16: 1e-1, F32: 1e-5, F64: 1e-13}[dtype]


def case(target, own=False, refused=None, infinite=None, **args):
    """One case; `own` takes torch's own result, for what depends on the dtype that is computed in; what is `refused` is an
    error here though not in torch; of result `infinite` the zeros of torch are −∞ here."""
    ns, op, overload = target.split(".")
    op = getattr(getattr(getattr(torch.ops, ns), op), overload)
    given = {k: v for k, v in args.items() if v is not ...}
    line = {"op": target, "in": {k.rstrip("_") if k == "from_" else k: encode(v) for k, v in given.items()}}
    if refused:
        line["error"] = refused
        lines.append(line)
        return
    try:
        own_result = outs(op(**{k: build(v) for k, v in given.items()}))
    except Exception as error:  # noqa: BLE001
        line["error"] = str(error).split("\n")[0][:60]
        lines.append(line)
        return
    built = {k: build(v) for k, v in given.items()}
    with FakeTensorMode() as mode:
        fake = outs(op(**{k: fakes(v, mode) for k, v in built.items()}))
    wide = own_result
    floats = any(r.dtype.is_floating_point for r in own_result)
    if floats and not own:
        wide_args = {k: build(v, F64) for k, v in given.items()}
        if "dtype" in wide_args and isinstance(wide_args["dtype"], torch.dtype):
            wide_args["dtype"] = F64
        wide = outs(op(**wide_args))
    line["out"] = []
    for number, (mine, meta, far) in enumerate(zip(own_result, fake, wide)):
        if mine.dtype.is_floating_point and not own:
            torch.testing.assert_close(
                mine.double(), far.double(), rtol=halves(mine.dtype), atol=halves(mine.dtype), equal_nan=True, msg=target
            )
            mine = far.to(mine.dtype)
        if number == infinite:
            mine = mine.masked_fill(mine == 0, float("-inf"))
        out = {"t": name(meta.dtype), "s": list(meta.shape)}
        if list(meta.stride()) != row_major(list(meta.shape)):
            out["d"] = list(meta.stride())
        out["x"] = [value(x) for x in shortened(mine.reshape(-1)).tolist()]
        line["out"].append(out)
    lines.append(line)


def shortened(x):
    """float32 numbers by their shortest text."""
    if x.dtype in (F32, F16, BF16):
        return torch.tensor([float(f"{v:.9g}") for v in x.double().tolist()], dtype=F64)
    return x


def fakes(arg, mode):
    if isinstance(arg, torch.Tensor):
        return mode.from_tensor(arg)
    if isinstance(arg, list):
        return [fakes(a, mode) for a in arg]
    return arg


def reductions():
    perm = dict(order=[2, 0, 1])
    for dtype in (F32, F64, F16, BF16, I64, I32, BOOL):
        case("aten.sum.dim_IntList", self=t(2, 3, 4, dtype=dtype, **perm), dim=[0, -1])
        case("aten.mean.dim", self=t(2, 3, dtype=dtype, step=2), dim=[-1], keepdim=True)
        case("aten.any.dim", self=t(2, 3, dtype=dtype), dim=-1)
        case("aten.cumsum.default", self=t(2, 3, dtype=dtype, order=[1, 0]), dim=0)
        case("aten.argmax.default", self=t(2, 3, dtype=dtype), dim=-2)
        case("aten.max.dim", self=t(2, 3, dtype=dtype), dim=1, keepdim=True)
        case("aten.amax.default", self=t(2, 3, dtype=dtype), dim=[0])
        case("aten.softmax.int", self=t(2, 3, dtype=dtype, order=[1, 0]), dim=0)
        case("aten.diff.default", self=t(2, 4, dtype=dtype), n=2)
        case("aten.histc.default", own=True, self=t(40, dtype=dtype), bins=5)
        case("aten.linalg_vector_norm.default", self=t(2, 3, dtype=dtype), dim=[1])
        case("aten.prod.dim_int", self=t(3, 2, dtype=dtype), dim=0)
    for dim in (None, [], [1], [0, 1]):
        case("aten.sum.dim_IntList", self=t(2, 3), dim=dim, keepdim=True)
        case("aten.any.dims", self=t(2, 2, dtype=I64), dim=dim)
    case("aten.sum.dim_IntList", self=t(2, 0, 3), dim=[1])
    case("aten.sum.dim_IntList", self=t(2, 3), dim=[0, 0])
    case("aten.sum.dim_IntList", self=t(), dim=[-1])
    case("aten.sum.dim_IntList", self=lit([1.7, -2.2, 3e9], F64), dim=[0], dtype=I64, own=True)
    case("aten.sum.dim_IntList", self=lit([2**62, 2**62, 1], I64), dim=[0])
    case("aten.sum.dim_IntList", self=t(3, dtype=BF16), dim=[0], dtype=F32)
    case("aten.sum.default", self=t(2, 3, expand=(0,)))
    case("aten.mean.default", self=t(2, 3), dtype=F64)
    case("aten.mean.default", self=t(2, 3, dtype=I64), dtype=F32)
    case("aten.mean.dim", self=t(2, 0), dim=[1])
    case("aten.mean.dim", self=lit([[1.0, NAN], [INF, 1.0]]), dim=[1])
    for op in ("max.dim", "min.dim"):
        case(f"aten.{op}", self=lit([[1.0, NAN, NAN, 2.0], [3.0, 3.0, 1.0, 1.0]]), dim=1)
        case(f"aten.{op}", self=t(2, 0), dim=1)
    for op in ("argmax", "argmin"):
        case(f"aten.{op}.default", self=lit([[1.0, NAN, NAN], [3.0, 3.0, 1.0]]), dim=1, keepdim=True)
        case(f"aten.{op}.default", self=t(2, 3, order=[1, 0]))
        case(f"aten.{op}.default", self=lit([[1, 1], [0, 0]], I64), keepdim=True)
    case("aten.argmax.default", self=t(), dim=0)
    for op in ("amax", "amin"):
        case(f"aten.{op}.default", self=lit([[1.0, NAN], [-INF, 2.0]]), dim=[-1])
        case(f"aten.{op}.default", self=t(2, 0), dim=[1])
        case(f"aten.{op}.default", self=t(2, 0), dim=[0])
    for op in ("all", "any"):
        case(f"aten.{op}.default", self=t(2, 3, dtype=BOOL))
        case(f"aten.{op}.dim", self=lit([[0.0, NAN], [1.0, 2.0]]), dim=1, keepdim=True)
        case(f"aten.{op}.dim", self=t(2, 0, dtype=BOOL), dim=1)
    for ord in (0, 1, 2, 3, 0.5, -1, INF, -INF):
        case("aten.linalg_vector_norm.default", self=t(2, 3), ord=ord, dim=[-1], keepdim=True)
        case("aten.linalg_vector_norm.default", self=lit([[1.0, NAN], [0.0, -3.0]]), ord=ord, dim=[1])
        case("aten.linalg_vector_norm.default", self=t(2, 0), ord=ord, dim=[1])
    case("aten.linalg_vector_norm.default", self=t(2, 3, dtype=BF16), dtype=F32)


def scans():
    case("aten.cumsum.default", self=t(2, 3, dtype=I32), dim=-1, dtype=F32)
    case("aten.cumsum.default", self=t(), dim=0)
    case("aten.cumsum.default", self=lit([1.0, NAN, 2.0]), dim=0)
    for op in ("softmax", "log_softmax"):
        case(f"aten.{op}.int", self=lit([[1.0, -INF], [-INF, -INF], [NAN, 1.0], [INF, 1.0], [200.0, -200.0]]), dim=1)
        case(f"aten.{op}.int", self=t(2, 3, dtype=I64), dim=1, dtype=F32)
        case(f"aten.{op}.int", self=t(2, 3, dtype=BF16), dim=-1, dtype=F32)
        case(f"aten.{op}.int", self=t(), dim=0)
        case(f"aten.{op}.int", self=t(2, 0), dim=1)
        case(f"aten._{op}.default", self=t(2, 3, 2, 2, order=[0, 2, 3, 1]), dim=1, half_to_float=False)
    case("aten.diff.default", self=t(2, 3, 4, order=[1, 2, 0]), dim=1)
    case("aten.diff.default", self=t(2, 3, 4, 2, order=[0, 2, 3, 1]), dim=2, n=2)
    case("aten.diff.default", self=t(2, 3, order=[1, 0]), n=0)
    case("aten.diff.default", self=t(2, 3), n=5)
    case("aten.diff.default", self=t(2, 3, order=[1, 0]), prepend=t(2, 1), append=t(2, 2))
    case("aten.diff.default", self=t(5, dtype=I64, step=2), dim=0)
    case("aten.diff.default", self=t())
    case("aten.histc.default", own=True, self=t(2, 9), bins=4, min=-1, max=2.5)
    case("aten.histc.default", own=True, self=lit([1.0, 1.0, 1.0]), bins=3)
    case("aten.histc.default", own=True, self=lit([0.1, 0.2, 0.3, 0.7, 1.0, NAN]), bins=10, min=0, max=1)
    case("aten.histc.default", own=True, self=t(30, dtype=F32), bins=8, min=0, max=7)
    case("aten.histc.default", own=True, self=lit([0.0, NAN]), bins=3)
    case("aten.histc.default", own=True, self=t(0), bins=3)


def products():
    for dtype in (F32, F64, F16, BF16, I64, I32, BOOL):
        case("aten.mm.default", self=t(2, 3, dtype=dtype), mat2=t(3, 4, dtype=dtype, order=[1, 0]))
        case("aten.linear.default", input=t(2, 2, 3, dtype=dtype, order=[1, 0, 2]), weight=t(4, 3, dtype=dtype), bias=t(4, dtype=dtype))
    case("aten.mm.default", self=t(2, 3), mat2=t(3, 4, dtype=F64))
    case("aten.mm.default", self=t(2, 3), mat2=t(2, 3))
    case("aten.mm.default", self=t(2, 0), mat2=t(0, 3))
    case("aten.mm.default", self=lit([[2**40, 3]], I64), mat2=lit([[2**40], [1]], I64))
    case("aten.linear.default", input=t(3), weight=t(4, 3))
    case("aten.linear.default", input=t(2, 3), weight=t(3))
    case("aten.linear.default", input=t(0, 3), weight=t(4, 3), bias=t(4))
    case("aten.linear.default", input=t(2, 3), weight=t(4, 2))
    for bias in (t(4), t(2, 1), t(2, 4, order=[1, 0])):
        case("aten.addmm.default", self=bias, mat1=t(2, 3), mat2=t(3, 4), beta=0.5, alpha=2)
    case("aten.addmm.default", self=lit([NAN, 1.0]), mat1=t(2, 3), mat2=t(3, 2), beta=0)
    case("aten.addmm.default", self=t(2, dtype=I64), mat1=t(2, 3, dtype=I64), mat2=t(3, 2, dtype=I64), beta=2, alpha=-3)
    case("aten.bmm.default", self=t(2, 2, 3, order=[1, 0, 2]), mat2=t(2, 3, 2, order=[0, 2, 1]))
    case("aten.bmm.default", self=t(2, 2, 3), mat2=t(1, 3, 2))
    case("aten.baddbmm.default", self=t(2, 1), batch1=t(2, 2, 3), batch2=t(2, 3, 2), alpha=0.25)
    for a, b in (
        ((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((2, 2, 3), (3,)), ((3,), (2, 3, 2)), ((2, 1, 2, 3), (2, 3, 2)),
        ((2, 3), (2, 2, 3, 2)), ((2, 0, 3), (3, 2)), ((2, 2, 0), (0, 2)), ((0, 2, 3), (0, 3, 2)), ((), (3,)), ((2, 2, 3), (3, 3, 2)),
    ):  # fmt: skip
        case("aten.matmul.default", self=t(*a), other=t(*b))
    e = "aten.einsum.default"
    for equation, operands in (
        ("ij,jk->ik", [t(2, 3), t(3, 4)]), ("bqhd,bkhd->bhqk", [t(2, 3, 2, 4), t(2, 2, 2, 4)]),
        ("nhwpqc->nchpwq", [t(1, 2, 2, 3, 2, 2)]), ("i,j->ij", [t(3), t(2)]), ("ii->i", [t(3, 3)]), ("ii", [t(3, 3)]),
        ("ij->", [t(2, 3)]), ("...ij,...jk->...ik", [t(2, 2, 3), t(3, 2)]), ("bhwkc,hkc->bhwk", [t(2, 3, 2, 2, 2), t(3, 2, 2)]),
        ("ij,k->ijk", [t(2, 3, order=[1, 0]), t(2)]), ("i...,i...->...", [t(3, 2, 2), t(3, 2)]), ("ijk,j->i", [t(2, 3, 2), t(3)]),
        ("abc,cd,de->abe", [t(2, 2, 3), t(3, 2), t(2, 2)]), ("ab,ab,ab->a", [t(2, 3), t(2, 3), t(2, 3)]), ("nd,->nd", [t(2, 3), t()]),
        ("ij,ij->ji", [t(2, 3), t(2, 3)]), ("ij,jk", [t(2, 3), t(3, 2)]), ("iji->j", [t(2, 3, 2)]), ("ij,jk->il", [t(2, 3), t(3, 2)]),
        ("bqd,bkd->bqk", [t(2, 2, 1), t(2, 3, 1)]), ("ij,jk->ik", [t(2, 3, dtype=I64), t(3, 2, dtype=I64)]),
        ("b i, b j -> b i j", [t(2, 2, dtype=BOOL), t(2, 3, dtype=BOOL)]), ("ij,jk->ik", [t(2, 3), t(2, 2)]),
    ):  # fmt: skip
        case(e, equation=equation, tensors=operands)
    case(e, equation="ab,bc,cd->ad", tensors=[t(2, 3), t(3, 2), t(2, 2)], path=[1, 2, 0, 1])


def norms():
    x = dict(order=[1, 0, 2])
    for dtype in (F32, F64, BF16, F16, I64):
        w = F32 if dtype == I64 else dtype
        case("aten.layer_norm.default", input=t(2, 2, 4, dtype=dtype, **x), normalized_shape=[4], weight=t(4, dtype=w), bias=t(4, dtype=w))
        case("aten.rms_norm.default", input=t(2, 2, 4, dtype=dtype, **x), normalized_shape=[4], weight=t(4, dtype=w))
        case("aten.group_norm.default", input=t(2, 4, 2, dtype=dtype, **x), num_groups=2, weight=t(4, dtype=w), bias=t(4, dtype=w))
    case("aten.layer_norm.default", input=t(2, 2, 3), normalized_shape=[2, 3], eps=0.1)
    case("aten.layer_norm.default", input=t(2, 3), normalized_shape=[2])
    case("aten.layer_norm.default", input=t(2, 3), normalized_shape=[3], weight=t(2))
    case("aten.layer_norm.default", input=t(0, 3), normalized_shape=[3])
    case("aten.native_layer_norm.default", input=t(2, 3, 4), normalized_shape=[4], weight=t(4), bias=None, eps=1e-3)
    case("aten.rms_norm.default", input=lit([[1e-3, -1e-3]], F64), normalized_shape=[2])
    case("aten.rms_norm.default", input=t(2, 2, 2, 3, order=[0, 2, 3, 1]), normalized_shape=[3], eps=0.01)
    case("aten.group_norm.default", input=t(2, 4, 2, 2, order=[0, 2, 3, 1]), num_groups=2)
    case("aten.group_norm.default", input=t(2, 4, 2), num_groups=3)
    case("aten.native_group_norm.default", input=t(2, 4, 2, 2), weight=t(4), bias=t(4), N=2, C=4, HxW=4, group=4, eps=1e-5)
    for layout in ([0, 1, 2, 3], [0, 2, 3, 1], [2, 0, 3, 1]):
        stats = dict(running_mean=t(3), running_var=lit([1.0, 0.5, 2.0]))
        p = dict(weight=t(3), bias=t(3))
        image = t(2, 3, 2, 2, order=layout)
        case("aten.batch_norm.default", input=image, **p, **stats, training=False, momentum=0.1, eps=1e-5, cudnn_enabled=True)
        case("aten._native_batch_norm_legit_no_training.default", input=image, **p, **stats, momentum=0.1, eps=1e-5)
    stats = dict(running_mean=t(3), running_var=lit([1.0, 0.5, 2.0]))
    case("aten.batch_norm.default", input=t(2, 3, order=[1, 0]), weight=None, bias=None, **stats, training=False, momentum=0.1, eps=0.5, cudnn_enabled=False)


def convolutions():
    last = [0, 2, 3, 1]
    for dtype in (F32, F64, BF16, I64):
        for layout in (None, last):
            case("aten.conv2d.default", input=t(1, 2, 4, 3, dtype=dtype, order=layout), weight=t(2, 2, 2, 2, dtype=dtype), bias=t(2, dtype=dtype))
    case("aten.conv2d.default", input=t(2, 2, 5, 5, step=2), weight=t(2, 1, 3, 2), stride=[2, 1], padding=[1, 0], dilation=[1, 2], groups=2)
    case("aten.conv2d.default", input=t(1, 2, 3, 3), weight=t(3, 2, 2, 2, order=last))
    case("aten.conv2d.default", input=t(2, 3, 3), weight=t(1, 2, 2, 2))
    case("aten.conv2d.default", input=t(0, 2, 3, 3), weight=t(1, 2, 2, 2))
    case("aten.conv2d.default", input=t(1, 2, 3, 3), weight=t(1, 2, 4, 4))
    case("aten.conv2d.default", input=t(1, 3, 3, 3), weight=t(1, 2, 2, 2))
    case("aten.conv2d.default", input=t(1, 2, 3, 3), weight=t(1, 2, 2, 2, dtype=F64))
    case("aten.conv2d.padding", input=t(1, 2, 3, 4, order=last), weight=t(2, 2, 2, 3), padding="same", dilation=[1, 2])
    case("aten.conv2d.padding", input=t(1, 2, 3, 4), weight=t(2, 2, 2, 3), padding="valid", stride=[2])
    case("aten.conv2d.padding", input=t(1, 2, 3, 4), weight=t(2, 2, 2, 3), padding="same", stride=[2, 2])
    case("aten.conv1d.default", input=t(2, 2, 6, order=[0, 2, 1]), weight=t(4, 1, 3), bias=t(4), stride=[2], padding=[1], groups=2)
    case("aten.conv1d.default", input=t(2, 6), weight=t(2, 2, 3), dilation=[2])
    case("aten.conv1d.default", input=t(2, 2, 4), weight=t(2, 2, 3, order=[0, 2, 1]))
    case("aten.conv1d.padding", input=t(1, 2, 5), weight=t(2, 2, 2), padding="same")
    for kw in (
        dict(), dict(stride=[2, 2], output_padding=[1, 0]), dict(padding=[1, 1], dilation=[2, 1]),
        dict(stride=[3, 2], padding=[1, 0], dilation=[1, 2], output_padding=[2, 1]),
    ):  # fmt: skip
        case("aten.conv_transpose2d.input", input=t(1, 2, 3, 2), weight=t(2, 2, 2, 3), bias=t(2), **kw)
    case("aten.conv_transpose2d.input", input=t(2, 4, 2, 2, order=last), weight=t(4, 1, 2, 2), groups=2, stride=[2, 1])
    case("aten.conv_transpose2d.input", input=t(1, 2, 3, 2), weight=t(2, 2, 2, 3), output_padding=[1, 1])
    case("aten.conv_transpose1d.default", input=t(1, 2, 3), weight=t(2, 1, 3), stride=[2], groups=2)
    conv = dict(stride=[1, 2], padding=[1, 0], dilation=[1, 1], output_padding=[0, 0], groups=1)
    case("aten.convolution.default", input=t(1, 2, 3, 4), weight=t(2, 2, 2, 2), bias=t(2), transposed=False, **conv)
    case("aten.convolution.default", input=t(1, 2, 3, 4), weight=t(2, 2, 2, 2), bias=None, transposed=True, **conv)
    case("aten.convolution.default", input=t(1, 2, 4), weight=t(2, 2, 2), bias=None, stride=[1], padding=[0], dilation=[1], transposed=False, output_padding=[0], groups=1)


def pools():
    last = [0, 2, 3, 1]
    nan = lit([[[1.0, NAN, 2.0, 2.0], [NAN, 0.0, 2.0, -INF], [-INF, -INF, 1.0, 1.0], [-INF, -INF, 1.0, 1.0]]])
    for op in ("max_pool2d", "max_pool2d_with_indices"):
        case(f"aten.{op}.default", self=t(1, 2, 5, 4, order=last), kernel_size=[2, 3], stride=[2], padding=[1], ceil_mode=True)
        case(f"aten.{op}.default", self=t(2, 5, 5, dtype=I64), kernel_size=[2], stride=[1, 2], dilation=[2])
        case(f"aten.{op}.default", self=nan, kernel_size=[2, 2])
    case("aten.max_pool2d.default", self=t(1, 2, 3, 3), kernel_size=[2], padding=[2])
    case("aten.max_pool2d.default", self=t(1, 2, 3, 3), kernel_size=[4])
    case("aten.max_pool2d.default", self=t(1, 2, 0, 3), kernel_size=[1])
    case("aten.max_pool2d.default", self=t(0, 2, 3, 3), kernel_size=[2])
    for kw in (dict(), dict(ceil_mode=True), dict(count_include_pad=False), dict(divisor_override=3), dict(ceil_mode=True, count_include_pad=False)):
        case("aten.avg_pool2d.default", self=t(1, 1, 5, 4), kernel_size=[3, 2], stride=[2, 3], padding=[1, 1], **kw)
    case("aten.avg_pool2d.default", self=t(1, 2, 4, 4, order=last), kernel_size=[2])
    case("aten.avg_pool2d.default", self=t(2, 4, 4, dtype=I64), kernel_size=[3], stride=[1], padding=[1])
    case("aten.avg_pool2d.default", self=nan, kernel_size=[2])
    case("aten.avg_pool2d.default", self=t(1, 1, 2, 2), kernel_size=[2], divisor_override=0)
    for size in ([2, 3], [1, 1], [5, 1]):
        case("aten.adaptive_avg_pool2d.default", self=t(1, 2, 3, 4, order=last), output_size=size)
    case("aten._adaptive_avg_pool2d.default", self=t(2, 3, 4, dtype=BF16), output_size=[2, 2])
    case("aten.adaptive_avg_pool2d.default", self=t(2, 3, 4, dtype=I64), output_size=[2, 2])
    for size, factors in (([4, 6], None), (None, [2.0, 2.0]), (None, [1.5, 0.7]), ([3, 3], None), ([1, 5], None)):
        case("aten.upsample_nearest2d.vec", input=t(1, 2, 2, 3), output_size=size, scale_factors=factors)
        for corners in (False, True):
            case("aten.upsample_bilinear2d.vec", input=t(1, 1, 2, 3), output_size=size, align_corners=corners, scale_factors=factors)
    case("aten.upsample_nearest2d.vec", input=t(1, 2, 2, 2, order=last), output_size=None, scale_factors=[2.0, 1.0])
    case("aten.upsample_bilinear2d.vec", input=t(1, 2, 2, 2, order=last, dtype=F64), output_size=[3, 3], align_corners=False, scale_factors=None)
    case("aten.upsample_nearest2d.vec", input=t(1, 2, 2, 2), output_size=[2, 2], scale_factors=[1.0, 1.0])


def indexing():
    ix = lambda *v, dtype=I64: lit(list(v), dtype)  # noqa: E731
    for dtype in (F32, I32, BOOL, BF16):
        case("aten.embedding.default", weight=t(4, 3, dtype=dtype, order=[1, 0]), indices=lit([[0, 3], [2, 2]], I32), padding_idx=2)
        case("aten.gather.default", self=t(3, 4, dtype=dtype, order=[1, 0]), dim=1, index=lit([[0, 3], [1, 1]], I64))
        case("aten.index.Tensor", self=t(3, 4, dtype=dtype), indices=[None, ix(-1, 0)])
        case("aten.scatter.value", self=t(2, 3, dtype=dtype), dim=-1, index=lit([[2], [0]], I64), value=3.7)
        case("aten.index_put.default", self=t(3, 2, dtype=dtype), indices=[ix(1, 1, -3)], values=t(3, 2, dtype=dtype), accumulate=True)
        case("aten.cat.default", tensors=[t(2, 1, dtype=dtype), t(2, 2, dtype=dtype, order=[1, 0])], dim=-1)
        case("aten.repeat.default", self=t(1, 2, dtype=dtype), repeats=[2, 2, 3])
        case("aten.index_copy.default", self=t(3, 2, dtype=dtype, order=[1, 0]), dim=0, index=ix(2, 0), source=t(2, 2, dtype=dtype))
        case("aten.slice_scatter.default", self=t(3, 4, dtype=dtype, order=[1, 0]), src=t(3, 2, dtype=dtype), dim=1, start=-3, end=2**62, step=2)
    case("aten.embedding.default", weight=t(4, 3), indices=ix(4))
    case("aten.embedding.default", weight=t(4, 3), indices=ix(-1))
    case("aten.embedding.default", weight=t(4, 3), indices=lit([0.0]))
    case("aten.embedding.default", weight=t(4, 3), indices=t(0, 2, dtype=I64))
    x = dict(order=[2, 0, 3, 1])
    for indices in (
        [ix(1, 0, 1)], [None, lit([[0, 1], [2, -1]], I64)], [ix(1, 0), None, ix(0, 1)], [None, ix(1, 0), lit([[0], [2]], I32)],
        [None, None, None, ix(1)], [lit(1, I64), ix(0, 2)], [lit(1, I64), None, lit(0, I64)],
    ):  # fmt: skip
        case("aten.index.Tensor", self=t(2, 3, 3, 2), indices=indices)
        case("aten.index.Tensor", self=t(2, 3, 3, 2, **x), indices=indices)
        case("aten.index_put.default", self=t(2, 3, 3, 2, **x), indices=indices, values=lit(9.0))
    case("aten.index.Tensor", self=t(2, 3), indices=[ix(2)])
    case("aten.index.Tensor", self=t(2, 3), indices=[ix(0), ix(0), ix(0)])
    case("aten.index.Tensor", self=t(2, 3), indices=[ix(0, 1), ix(0, 1, 2)])
    case("aten.index.Tensor", self=t(2, 0), indices=[ix(0, 1)])
    case("aten.index_put.default", self=t(2, 3), indices=[lit([[True, False, True], [False, True, False]], BOOL)], values=lit([7.0, 8.0, 9.0]))
    case("aten.index_put.default", self=t(2, 3), indices=[None, lit([True, False, True], BOOL)], values=lit(5.0))
    case("aten.index_put.default", self=t(2, 3), indices=[lit([True, False, True], BOOL)], values=lit(5.0))
    case("aten.index_put.default", self=t(3), indices=[ix(0, 0)], values=lit([1.0, 2.0]))
    case("aten.index_put.default", self=t(3), indices=[ix(0)], values=lit([1], I64))
    case("aten.index_put.default", self=t(3, dtype=BOOL), indices=[ix(0, 1, 1)], values=lit([True, False, True], BOOL), accumulate=True)
    case("aten.index_put_.default", self=t(3, 2, order=[1, 0], offset=2), indices=[ix(0, -1)], values=t(2))
    case("aten.index_put_.default", self=t(3, 2), indices=[ix(3)], values=t(2))
    for dim, index in ((0, [[0, 1, 2, 0]]), (-1, [[3], [0], [2]])):
        case("aten.gather.default", self=t(3, 4, step=2), dim=dim, index=lit(index, I32))
        case("aten.scatter.src", self=t(3, 4, order=[1, 0]), dim=dim, index=lit(index, I64), src=t(3, 4))
        case("aten.scatter_add.default", self=t(3, 4), dim=dim, index=lit(index, I64), src=t(3, 4))
        case("aten.scatter_.value", self=t(3, 4, order=[1, 0]), dim=dim, index=lit(index, I64), value=-1)
        case("aten.scatter_.src", self=t(3, 4), dim=dim, index=lit(index, I64), src=t(3, 4))
    case("aten.scatter.src", self=t(3), dim=0, index=ix(1, 1, 0), src=t(3))
    case("aten.scatter.src", self=t(3), dim=0, index=ix(1), src=t(3, dtype=F64))
    case("aten.scatter.value", self=t(3), dim=0, index=ix(3), value=1)
    case("aten.scatter.value", self=t(), dim=0, index=ix(0), value=1)
    case("aten.scatter.value", self=t(2, 3), dim=0, index=t(0, 3, dtype=I64), value=1)
    case("aten.gather.default", self=t(), dim=0, index=ix(0, 0))
    case("aten.gather.default", self=t(3), dim=0, index=lit(2, I64))
    case("aten.gather.default", self=t(2, 3), dim=0, index=ix(0))
    case("aten.gather.default", self=t(2, 3), dim=0, index=lit([[2]], I64))
    case("aten.gather.default", self=t(2, 3), dim=1, index=lit([[0], [0], [0]], I64))
    case("aten.index_select.default", self=t(2, 3, 2), dim=1, index=ix(2, 0, 2))
    case("aten.index_select.default", self=t(2, 3), dim=0, index=lit(1, I32))
    case("aten.index_select.default", self=t(), dim=0, index=ix(0))
    case("aten.index_select.default", self=t(2), dim=0, index=ix(-1))
    case("aten.index_copy.default", self=t(2, 3), dim=1, index=lit(1, I64), source=t(2, 1))
    case("aten.index_copy.default", self=t(), dim=0, index=lit(0, I64), source=t())
    case("aten.index_copy.default", self=t(2, 3), dim=1, index=ix(0, 1), source=t(2, 3))
    case("aten.index_copy.default", self=t(2, 3), dim=1, index=ix(3), source=t(2, 1))
    case("aten.index_copy.default", self=t(2, 3), dim=1, index=lit([0], I32), source=t(2, 1))
    case("aten.index_copy_.default", self=t(2, 4, 3, order=[0, 2, 1]), dim=-2, index=ix(3, 1), source=t(2, 2, 3))
    for kw in (dict(), dict(start=1), dict(start=2, end=1), dict(start=-2, end=-1)):
        n = len(range(3)[slice(kw.get("start"), kw.get("end"))])
        case("aten.slice_scatter.default", self=t(3, 2, step=2, offset=1), src=t(n, 2), **kw)
    case("aten.slice_scatter.default", self=t(3, 2, expand=(0,)), src=t(1, 2), end=1)
    case("aten.slice_scatter.default", self=t(3, 2), src=t(2, 2), end=1)
    case("aten.select_scatter.default", self=t(3, 2), src=t(3), dim=1, index=-1)
    case("aten.select_scatter.default", self=t(3, 2), src=t(3), dim=1, index=2)


def arrangements():
    last = [0, 2, 3, 1]
    case("aten.cat.default", tensors=[t(0), t(2, 2), t(0, 2)], dim=0)
    case("aten.cat.default", tensors=[t(0), t(0)], dim=0)
    case("aten.cat.default", tensors=[t(1, 2, 2, 2, order=last), t(1, 1, 2, 2, order=[0, 2, 3, 1])], dim=1)
    case("aten.cat.default", tensors=[t(1, 2, 2, 2, order=last), t(1, 2, 2, 2)], dim=1)
    case("aten.cat.default", tensors=[t(2, dtype=I64), t(1, dtype=F32), t(1, dtype=BF16)])
    case("aten.cat.default", tensors=[t(2, dtype=BOOL), t(1, dtype=I32)])
    case("aten.cat.default", tensors=[t(2, 2), t(2, 3)], dim=0)
    case("aten.cat.default", tensors=[t(), t()])
    for dim in (0, 1, 2, -1):
        case("aten.stack.default", tensors=[t(2, 3), t(2, 3, order=[1, 0])], dim=dim)
    case("aten.stack.default", tensors=[t(2, 3, 2, 2, order=last), t(2, 3, 2, 2, order=last)], dim=1)
    case("aten.stack.default", tensors=[t(), t(dtype=F64)])
    case("aten.stack.default", tensors=[t(2), t(3)])
    case("aten.repeat.default", self=t(), repeats=[2])
    case("aten.repeat.default", self=t(2), repeats=[0])
    case("aten.repeat.default", self=t(2, 1), repeats=[2])
    case("aten.repeat.default", self=t(2), repeats=[-1])
    for shifts, dims in (([1], [0]), ([-2], [1]), ([4], []), ([1, -1], [0, 1]), ([1, 2], [0])):
        case("aten.roll.default", self=t(2, 3, order=[1, 0]), shifts=shifts, dims=dims)
    for dims in ([0], [-1], [0, 1], [], [0, 0]):
        case("aten.flip.default", self=t(2, 3, order=[1, 0]), dims=dims)
    for op in ("tril", "triu"):
        for diagonal in (-1, 0, 2):
            case(f"aten.{op}.default", self=t(2, 3, 3, order=[2, 0, 1]), diagonal=diagonal)
        case(f"aten.{op}.default", self=t(2, 2, dtype=BOOL))
        case(f"aten.{op}.default", self=t(3))


def orders():
    for dtype in (F32, F64, BF16, I64, I32, BOOL):
        for descending in (False, True):
            case("aten.sort.stable", self=t(2, 5, dtype=dtype, order=[1, 0]), stable=True, dim=-1, descending=descending)
        case("aten.argsort.stable", self=t(3, 2, dtype=dtype), stable=True, dim=0)
    ties = lit([[1.0, NAN, 1.0, -INF, NAN, INF, 0.0, -0.0]])
    for descending in (False, True):
        case("aten.sort.stable", self=ties, stable=True, descending=descending)
        case("aten.sort.default", self=t(2, 7), descending=descending)
    case("aten.sort.default", self=t(), dim=0)
    case("aten.sort.default", self=t(2, 0), dim=1)
    case("aten.argsort.default", self=t(2, 5, order=[1, 0]))
    for dtype in (F32, BF16, I64, BOOL):
        for largest in (False, True):
            case("aten.topk.default", self=t(2, 7, dtype=dtype, order=[1, 0]), k=3, largest=largest)
    case("aten.topk.default", self=t(4, 2), k=2, dim=0)
    case("aten.topk.default", self=t(), k=1)
    case("aten.topk.default", self=t(2, 3), k=0)
    case("aten.topk.default", self=t(2, 3), k=4)
    case("aten.topk.default", self=lit([1.0, NAN, 3.0]), k=2)


def attentions():
    op = "aten.scaled_dot_product_attention.default"
    heads_inside = [0, 2, 1, 3]
    for dtype in (F32, F64, BF16, I64):
        q = t(1, 2, 3, 4, dtype=dtype, order=heads_inside)
        case(op, query=q, key=t(1, 2, 2, 4, dtype=dtype), value=t(1, 2, 2, 4, dtype=dtype))
    q, k, v = t(1, 2, 3, 4, order=heads_inside), t(1, 2, 2, 4), t(1, 2, 2, 4, order=heads_inside)
    mask = lit([[True, False], [False, False], [True, True]], BOOL)
    added = lit([[0.0, -INF], [-INF, -INF], [1.5, 0.0]])
    for m in (mask, added, lit([[[[True, False]]]], BOOL), lit([[[[0.5, -1.0]]], [[[0.0, 1.0]]]]), lit([[[0.5], [1.0], [-INF]]])):
        case(op, query=q, key=k, value=v, attn_mask=m, scale=0.3)
    case(op, query=q, key=k, value=v, is_causal=True)
    case(op, query=q, key=k, value=v, is_causal=True, attn_mask=mask)
    case(op, query=q, key=k, value=v, attn_mask=t(3, 2, dtype=F64))
    case(op, query=q, key=k, value=t(1, 2, 2, 3))
    case(op, query=q, key=t(1, 2, 2, 4, order=[0, 1, 3, 2]), value=v)
    case(op, query=q, key=k, value=t(1, 2, 2, 4, dtype=F64))
    case(op, query=q, key=k, value=t(1, 2, 3, 4), refused="the flash kernel leaves out values that have no key")
    case(op, query=q, key=t(1, 2, 0, 4), value=t(1, 2, 0, 4))
    case(op, query=t(2, 2, 3, 4, order=heads_inside), key=k, value=v)
    case(op, query=t(1, 4, 3, 4, order=heads_inside), key=k, value=v, enable_gqa=True, is_causal=True)
    case(op, query=t(1, 4, 3, 4, order=heads_inside), key=k, value=v, enable_gqa=True, attn_mask=mask)
    case(op, query=t(1, 3, 3, 4), key=k, value=v, enable_gqa=True)
    case(op, query=t(2, 3, 4, order=[1, 0, 2]), key=t(2, 2, 4), value=t(2, 2, 4), attn_mask=added)
    case(op, query=t(3, 4), key=t(2, 4), value=t(2, 4))
    case(op, query=t(2, 1, 2, 3, 4, order=[0, 1, 3, 2, 4]), key=t(2, 1, 2, 2, 4), value=t(2, 1, 2, 2, 4))
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    for dtype in (F32, BF16, F64):
        case(flash, query=t(1, 2, 3, 4, dtype=dtype, order=heads_inside), key=t(1, 2, 2, 4, dtype=dtype), value=t(1, 2, 2, 4, dtype=dtype))
    # A row without keys has a sum of 0, whose logarithm torch's kernel says is 0.
    case(flash, query=q, key=k, value=v, attn_mask=added, scale=0.7, infinite=1)
    case(flash, query=q, key=k, value=v, is_causal=True)


def experts():
    import transformers.integrations.moe  # noqa: F401, PLC0415  registers the operator

    op = "transformers.grouped_mm_fallback.default"
    for dtype in (F32, BF16, F64):
        case(op, input=t(5, 3, dtype=dtype, order=[1, 0]), weight=t(3, 3, 2, dtype=dtype, order=[0, 2, 1]), offs=lit([2, 2, 4], I32))
    case(op, input=t(3, 2), weight=t(2, 2, 2), offs=lit([1, 3], I64))
    for dtype in (F32, BF16):
        order = [0, 2, 1]
        case("aten._grouped_mm.default", own=True, self=t(5, 8, dtype=dtype), mat2=t(2, 8, 8, dtype=dtype, order=order), offs=lit([2, 5], I32))


def formulas():
    ends = [0.0, -0.0, 0.5, -0.5, 3.0, -3.0, 6.0, 25.0, -25.0, INF, -INF, NAN]
    for op in ("hardswish", "hardsigmoid", "mish", "softplus", "elu", "selu", "celu", "leaky_relu", "relu6", "logit", "erfc"):
        case(f"aten.{op}.default", self=lit(ends))
        case(f"aten.{op}.default", self=t(2, 3, dtype=F16, order=[1, 0]))
    for op in ("log_sigmoid", "asinh", "atan", "frac", "nan_to_num", "isfinite", "deg2rad"):
        case(f"aten.{op}.default", self=lit(ends, F64))
        case(f"aten.{op}.default", self=t(2, 3, dtype=I64))
    case("aten.hardtanh.default", self=t(2, 3, dtype=I64), min_val=-3, max_val=4)
    case("aten.hardtanh_.default", self=t(2, 3), min_val=-1.5, max_val=0.25)
    case("aten.threshold.default", self=t(2, 3, dtype=I32), threshold=2, value=7)
    case("aten._prelu_kernel.default", self=t(2, 3, 2), weight=t(1, 3, 1))
    case("aten.prelu.default", self=t(2, 3, 2), weight=t(3))
    case("aten.prelu.default", self=t(2, 3, 2), weight=t(2))
    case("aten.glu.default", self=t(2, 6), dim=-1)
    case("aten.glu.default", self=t(2, 5), dim=-1)
    case("aten.lerp.Scalar", self=t(2, 3), end=t(3), weight=0.75)
    case("aten.addcmul.default", self=t(2, 3, dtype=I64), tensor1=t(3, dtype=I64), tensor2=t(2, 1, dtype=I64), value=2)
    case("aten.addcdiv.default", self=t(2, 3, dtype=I64), tensor1=t(3, dtype=I64), tensor2=t(3, dtype=I64))
    case("aten.logaddexp.default", self=lit([INF, -INF, 1.0, NAN]), other=lit([INF, -INF, 2.0, 1.0]))
    case("aten.xlogy.Tensor", self=lit([0.0, 0.0, 2.0]), other=lit([0.0, NAN, 3.0]))
    case("aten.outer.default", self=t(3), vec2=t(2))
    case("aten.bitwise_left_shift.Tensor", self=lit([1, -3, 5], I32), other=lit([3, 40, -1], I32))


def edges():
    for mode in ("constant", "reflect", "replicate", "circular"):
        case("aten.pad.default", self=t(1, 2, 3, 4, order=[0, 2, 3, 1]), pad=[1, 2, 2, 0], mode=mode)
    case("aten.constant_pad_nd.default", self=t(2, 3, dtype=I64), pad=[-1, 2], value=5)
    case("aten.constant_pad_nd.default", self=t(2, 3, order=[1, 0]), pad=[-1, 0])
    case("aten.reflection_pad1d.default", self=t(1, 2, 3), padding=[3, 0])
    case("aten.replication_pad2d.default", self=t(1, 2, 3), padding=[3, 0, 1, -1])
    case("aten.pixel_shuffle.default", self=t(1, 8, 2, 3), upscale_factor=2)
    case("aten.pixel_shuffle.default", self=t(1, 6, 2, 3), upscale_factor=2)
    case("aten.pixel_unshuffle.default", self=t(2, 4, 6), downscale_factor=2)
    case("aten.repeat_interleave.self_int", self=t(2, 3), repeats=2, dim=1)
    case("aten.tile.default", self=t(2, 3), dims=[2, 1, 2])
    case("aten.rot90.default", self=t(2, 3), k=3, dims=[0, 1])


def counted():
    for correction in (0, 1, 3):
        case("aten.var.correction", self=t(2, 3, order=[1, 0]), dim=[1], correction=correction)
    case("aten.std_mean.correction", self=t(2, 3, dtype=BF16), dim=None, correction=0, keepdim=True)
    case("aten.logsumexp.default", self=lit([[1.0, 2.0], [-INF, -INF], [INF, 0.0]]), dim=[1])
    case("aten.cumprod.default", self=t(2, 3, dtype=I32), dim=1)
    case("aten.cummax.default", self=lit([1.0, 3.0, 3.0, NAN, 4.0]), dim=0)
    case("aten.mv.default", self=t(2, 3), vec=t(3))
    case("aten.mv.default", self=t(2, 3), vec=t(2))
    case("aten.searchsorted.Tensor", sorted_sequence=lit([1.0, 2.0, 2.0, 5.0]), self=lit([0.0, 2.0, 9.0]), right=True)
    case("aten.isin.Tensor_Tensor", elements=lit([1, 2, 3], I64), test_elements=lit([3, 1], I64))
    case("aten.one_hot.default", self=lit([0, 2], I64), num_classes=3)
    case("aten.index_add.default", self=t(3, 2), dim=0, index=lit([2, 2], I64), source=t(2, 2), alpha=2)
    for how in ("sum", "prod", "mean", "amax", "amin"):
        case("aten.scatter_reduce.two", self=t(3, 2), dim=0, index=lit([[2, 0], [2, 1]], I64), src=t(2, 2), reduce=how)
    case("aten.masked_scatter.default", self=t(2, 2), mask=lit([True, False, True, True], BOOL), source=t(4))
    case("aten.masked_scatter.default", self=t(2, 2), mask=lit([[True, False], [True, True]], BOOL), source=t(4))


for group in (
    *(reductions, scans, products, norms, convolutions, pools, indexing, arrangements, orders, attentions, experts),
    *(formulas, edges, counted),
):
    group()
text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
(pathlib.Path(__file__).parent / "cases.jsonl").write_text(text)
print(len(lines), "cases,", len(text), "bytes,", sum("error" in line for line in lines), "errors")
