"""The engines that are compared. Each runs in a worker process of its own (`python -m peers NAME`), so that each has its own
environment (preload, forced instruction set) and its own thread pool, and none can spoil another's.

An engine is a module with `Engine(threads, arguments)`: `versions()` says what it is, `prepare(row, copies)` makes the row ready
and returns a `Prepared`, or raises `Unsupported` with the reason that the table's notes will print.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable


class Unsupported(Exception):
    """This engine does not do this row; the message says why."""


@dataclasses.dataclass
class Prepared:
    """A row ready to run."""

    calls: list[Callable]  # one per rotated copy of K and V; each does the whole call
    output: Callable  # () -> f32 array [batch, num_q_heads, q_len, head_dim_v]: runs the first call and reads it
    note: str = ""  # which kernel, model form or route
    context: Callable = contextlib.nullcontext  # entered around every call
    rewind: Callable | None = None  # before every timed batch, untimed: undoes what earlier calls left behind
    most_calls: int | None = None  # of a batch, so that what they leave behind does not count
    tight: tuple | None = None  # (statement, names): timed by timeit instead of `calls`, for calls of a microsecond
    second_opinion: Callable | None = None  # (queries) -> the same rows by the engine's own math path, for the tolerance rule
    gradients: Callable | None = None  # training rows, in place of `output`: () -> (bytes of all, (batch, kv_head) -> (finite, [out, dq, dk, dv]))


def quickest(prepared):
    """Seconds of a form's best call, to choose between forms; a long call is not repeated."""
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        prepared.calls[0]()
        took = time.perf_counter() - began
        best = min(best, took)
        if took > 0.05:
            break
    return best


@dataclasses.dataclass(frozen=True)
class Peer:
    name: str
    title: str
    module: str
    arguments: tuple = ()
    dtypes: tuple = ("f32", "bf16", "f16")
    kinds: tuple = ("prefill", "decode")
    groups: tuple = ()  # empty: rows of every group
    codes: tuple = ()  # (dtype, format) of the decode rows with K and V as codes that it takes; it makes codes of its own
    environment: tuple = ()
    preload_unlock: bool = False  # runs with MKL's vendor check answered "Intel"
    ours: bool = False
    width: str | None = None  # held against this vector width's ceiling instead of the machine's best
    default: bool = True

    def takes(self, row):
        if row.formats and not self.ours:
            own = {(row.dtype, format) for format, _ in row.formats} <= set(self.codes)
            if not own or row.kind != "decode" or row.compute != "exact":
                return False
        return row.kind in self.kinds and row.dtype in self.dtypes and (not self.groups or bool(set(self.groups) & set(row.groups)))


CALLS = ("prefill", "decode", "call", "first")
TRAINING = (*CALLS, "train")

PEERS = {
    peer.name: peer
    for peer in (
        Peer("rapt", "rapt.attention", "rapt_interfaces", ("attention",), kinds=CALLS, ours=True),
        # The other interface is the same engine: measured where a claim is made about it.
        Peer("rapt-sdpa", "SDPA with rapt registered", "rapt_interfaces", ("sdpa",), kinds=TRAINING,
             groups=("anchors", "call", "backward"), ours=True),
        Peer("stock", "stock torch", "torch_sdpa", kinds=(*TRAINING, "add")),
        Peer("unlocked", "unlocked torch", "torch_sdpa", kinds=TRAINING, preload_unlock=True),
        Peer("openvino", "OpenVINO", "openvino_sdpa", dtypes=("f32", "bf16"), codes=(("bf16", "int8"), ("bf16", "int4"))),
        Peer("onnxruntime", "onnxruntime", "onnx_attention", dtypes=("f32", "f16"), codes=(("f32", "int8"), ("f32", "int4"))),
        Peer("rapt-avx2", "rapt.attention, RAPT_ISA=avx2", "rapt_interfaces", ("attention",), environment=(("RAPT_ISA", "avx2"),),
             ours=True, width="ymm", default=False),
    )
}  # fmt: skip
