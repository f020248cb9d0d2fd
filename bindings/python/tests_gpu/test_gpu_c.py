"""The C library on the GPU, by ctypes: what its functions with `cuda` in their names enqueue has the bits of the Python package, gradients, sequences and
captured graphs too. RAPT_C_LIBRARY names librapt.so; without it these tests are skipped, unless RAPT_REQUIRE names `c`.
"""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import pytest
import torch

import rapt
import rapt.torch

OPS = torch.ops.rapt
CODES = {torch.int32: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 13}
CUDA, BSHD, BOTTOM_RIGHT, OK, OUT_OF_MEMORY = 2, 1, 2, 0, 10
WANTED = [True, True, True, False, False]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p), ("dtype", c_int32), ("device", c_int32), ("device_index", c_int32), ("ndim", c_int32),
        ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("storage_bytes", c_int64), ("storage", c_void_p),
    ]  # fmt: skip


class Options(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t), ("given", c_uint32), ("causal", c_int32), ("layout", c_int32), ("out_dtype", c_int32), ("softmax_scale", c_double),
        ("softcap", c_double), ("window_left", c_int64), ("window_right", c_int64), ("mask", POINTER(Tensor)), ("sinks", POINTER(Tensor)),
        ("alibi_slopes", POINTER(Tensor)), ("lse", POINTER(Tensor)), ("q_codes", c_void_p), ("k_codes", c_void_p), ("v_codes", c_void_p),
        ("tolerance", c_void_p), ("compute", c_int32), ("dropout_p", c_double), ("dropout_seed", c_uint64), ("dropout_offset", c_uint64),
        ("dropout_draw", c_void_p),
    ]  # fmt: skip


class Gradients(ctypes.Structure):
    _fields_ = [("size", c_size_t), *((name, POINTER(Tensor)) for name in ("d_lse", "dq", "dk", "dv", "d_mask", "d_sinks"))]


class Queue(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("stream", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_size_t), ("needed_bytes", POINTER(c_size_t))]


@pytest.fixture(scope="module")
def lib():
    path = os.environ.get("RAPT_C_LIBRARY")
    if path is None:
        if "c" in os.environ.get("RAPT_REQUIRE", "").split(","):
            pytest.fail("RAPT_REQUIRE=c, and RAPT_C_LIBRARY names no library")
        pytest.skip("RAPT_C_LIBRARY names no library")
    lib = ctypes.CDLL(path)
    lib.rapt_last_error.restype = lib.rapt_error_name.restype = c_char_p
    lib.rapt_engine_create.restype = c_void_p
    lib.engine = c_void_p(lib.rapt_engine_create(1))
    return lib


def of(tensor):
    """`tensor` as C states it; what it points to lives with it."""
    made = Tensor(tensor.data_ptr(), CODES[tensor.dtype], CUDA, tensor.device.index, tensor.dim())
    made.shape, made.strides = (c_int64 * tensor.dim())(*tensor.shape), (c_int64 * tensor.dim())(*tensor.stride())
    made.storage_bytes = tensor.untyped_storage().nbytes()
    made.storage = tensor.untyped_storage().data_ptr()
    made.kept = tensor
    return made


class Call:
    """One function of the library with its arguments: asked how much scratch it needs, then enqueued as often as `run` is called."""

    def __init__(self, lib, name, tensors, structs):
        self.lib, self.function, self.name = lib, getattr(lib, name), name
        self.kept = [of(tensor) for tensor in tensors], structs
        self.arguments = [lib.engine, *(byref(given) for given in self.kept[0]), *(byref(struct) for struct in structs)]
        needed = c_size_t()
        self.expect(OK, Queue(ctypes.sizeof(Queue), needed_bytes=ctypes.pointer(needed)))
        self.needed = needed.value
        self.workspace = torch.empty(self.needed, dtype=torch.uint8, device="cuda")

    def expect(self, code, queue):
        got = self.function(*self.arguments, byref(queue))
        assert got == code, (self.name, got, self.lib.rapt_last_error())

    def run(self):
        queue = Queue(ctypes.sizeof(Queue), torch.cuda.current_stream().cuda_stream)
        if self.needed:
            queue.workspace, queue.workspace_bytes = self.workspace.data_ptr(), self.needed
        self.expect(OK, queue)


def options_of(lse, **fields):
    return Options(size=ctypes.sizeof(Options), lse=ctypes.pointer(of(lse)), **fields)


def gradients_of(dq, dk, dv):
    return Gradients(ctypes.sizeof(Gradients), **{name: ctypes.pointer(of(made)) for name, made in (("dq", dq), ("dk", dk), ("dv", dv))})


def step_of(lib, name, inputs, outputs, offsets=(), **fields):
    """Forward and backward, each a call; `inputs`: q, k, v, d_o; `outputs`: out, lse, dq, dk, dv."""
    (q, k, v, d_o), (out, lse, *made) = inputs, outputs
    options = options_of(lse, **fields)
    forward = Call(lib, name, [q, k, v, *offsets, out], [options])
    backward = Call(lib, f"{name}_backward", [q, k, v, *offsets, out, d_o], [gradients_of(*made), options])
    return forward, backward


def new(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def blank(*like):
    """Tensors of these sizes and strides, whose bytes are all set."""
    made = [torch.empty_like(x) for x in like]
    for x in made:
        x.view(torch.uint8).fill_(255) if x.is_contiguous() else x.fill_(float("nan"))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_both_passes_have_the_bits_of_the_package(lib, dtype):
    for heads, kv_heads, dims, strided in [(4, 4, 64, False), (4, 2, 128, True), (2, 1, 40, True)]:
        q, d_o = (new(2, 150, heads, dims, dtype=dtype, seed=n) for n in (1, 2))
        k, v = (new(2, 170, kv_heads, dims, dtype=dtype, seed=n) for n in (3, 4))
        if not strided:
            q, k, v, d_o = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, d_o))
        words = {"causal": "bottom_right", "layout": "bshd"}
        out, lse = OPS.attention_lse(q, k, v, **words)
        want = [out, lse, *OPS.attention_backward(d_o, None, q, k, v, out, lse, WANTED, **words)]
        made = blank(q, lse, q, k, v)
        for call in step_of(lib, "rapt_cuda_attention", (q, k, v, d_o), made, causal=BOTTOM_RIGHT, layout=BSHD):
            call.run()
        assert all(torch.equal(a, b) for a, b in zip(made, want)), (heads, kv_heads, dims)


def test_a_captured_step_drops_what_lies_in_memory(lib):
    q, k, v, d_o = (new(1, 4, 130, 64, dtype=torch.bfloat16, seed=n) for n in range(4))
    draw = torch.tensor([1, 2], device="cuda")
    made = blank(q, torch.empty(1, 4, 130, device="cuda"), q, k, v)
    calls = step_of(lib, "rapt_cuda_attention", (q, k, v, d_o), made, dropout_p=0.4, dropout_draw=draw.data_ptr())
    for call in calls:
        call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call.run()
    for seed, offset in [(3, 4), (2**62 + 1, 2**35)]:
        draw.copy_(torch.tensor([seed, offset]))
        graph.replay()
        words = {"dropout_p": 0.4, "dropout_draw": torch.tensor([seed, offset])}
        out, lse = OPS.attention_lse(q, k, v, **words)
        want = [out, lse, *OPS.attention_backward(d_o, None, q, k, v, out, lse, WANTED, **words)]
        assert all(torch.equal(a, b) for a, b in zip(made, want)), seed
        by_numbers = blank(*made)
        for call in step_of(lib, "rapt_cuda_attention", (q, k, v, d_o), by_numbers, dropout_p=0.4, dropout_seed=seed, dropout_offset=offset):
            call.run()
        assert all(torch.equal(a, b) for a, b in zip(by_numbers, want)), seed


def test_sequences_have_the_bits_of_the_package(lib):
    at = torch.tensor([0, 150, 151, 221, 285], dtype=torch.int32, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, d_o = (new(285, 4, 64, dtype=dtype, seed=n) for n in range(4))
        out, lse = OPS.varlen_attention_lse(q, k, v, at, at, causal="bottom_right")
        want = [out, lse, *OPS.varlen_attention_backward(d_o, None, q, k, v, out, lse, at, at, WANTED[:4], causal="bottom_right")]
        made = blank(q, lse, q, k, v)
        for call in step_of(lib, "rapt_cuda_varlen_attention", (q, k, v, d_o), made, (at, at), causal=BOTTOM_RIGHT):
            call.run()
        assert all(torch.equal(a, b) for a, b in zip(made, want)), dtype


def test_too_little_scratch_runs_nothing(lib):
    q, k, v, d_o = (new(1, 4, 130, 64, dtype=torch.bfloat16, seed=n) for n in range(4))
    out, lse = OPS.attention_lse(q, k, v)
    made = blank(out, lse, q, k, v)
    before = [x.clone() for x in made]
    _, backward = step_of(lib, "rapt_cuda_attention", (q, k, v, d_o), made)
    assert backward.needed > 16
    backward.expect(OUT_OF_MEMORY, Queue(ctypes.sizeof(Queue), None, backward.workspace.data_ptr(), backward.needed - 16))
    torch.cuda.synchronize()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(made, before))
    made[0].copy_(out), made[1].copy_(lse)
    backward.run()
    want = OPS.attention_backward(d_o, None, q, k, v, out, lse, WANTED)
    assert all(torch.equal(a, b) for a, b in zip(made[2:], want))
