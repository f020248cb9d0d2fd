"""From Python by ctypes alone: no package, no compiler. `python attention.py path/to/librapt.so`.

(Python programs use the package `rapt`; this shows the C interface to languages that call C.)
"""

import ctypes
import math
import sys
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p

F32, CPU, CAUSAL_TOP_LEFT = 7, 1, 1
OK, BAD_LAYOUT, BAD_POINTER = 0, 4, 9


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("device", c_int32),
        ("device_index", c_int32),
        ("ndim", c_int32),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("storage_bytes", c_int64),
        ("storage", c_void_p),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("given", c_uint32),
        ("causal", c_int32),
        ("layout", c_int32),
        ("out_dtype", c_int32),
        ("softmax_scale", c_double),
        ("softcap", c_double),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("mask", POINTER(Tensor)),
        ("sinks", POINTER(Tensor)),
        ("alibi_slopes", POINTER(Tensor)),
        ("lse", POINTER(Tensor)),
    ]


def load(path):
    lib = ctypes.CDLL(path)
    call = [c_void_p] + [POINTER(Tensor)] * 4 + [POINTER(Options)]
    lib.rapt_version.restype = lib.rapt_last_error.restype = c_char_p
    lib.rapt_engine_create.restype = c_void_p
    lib.rapt_engine_destroy.argtypes = [c_void_p]
    lib.rapt_attention.argtypes = call
    lib.rapt_explain.argtypes = call + [POINTER(c_void_p)]
    lib.rapt_string_free.argtypes = [c_void_p]
    return lib


def tensor(buffer, shape, strides):
    """A view of a ctypes array; the arrays of sizes live as long as the struct that points to them."""
    made = Tensor(ctypes.addressof(buffer), F32, CPU, 0, len(shape))
    made.shape, made.strides = (c_int64 * len(shape))(*shape), (c_int64 * len(shape))(*strides)
    made.storage_bytes = ctypes.sizeof(buffer)
    return made


def main(path):
    lib = load(path)
    length, dim = 4, 2
    rows = [[math.sin(3 * i + d) for d in range(dim)] for i in range(length)]
    # Column-major, so that an offset that ignored strides would be seen.
    q = (c_float * (length * dim))(*[rows[i][d] for d in range(dim) for i in range(length)])
    out = (c_float * (length * dim))()
    tq, tout = tensor(q, (length, dim), (1, length)), tensor(out, (length, dim), (dim, 1))
    options = Options(size=ctypes.sizeof(Options), causal=CAUSAL_TOP_LEFT)

    engine = lib.rapt_engine_create(1)
    code = lib.rapt_attention(engine, byref(tq), byref(tq), byref(tq), byref(tout), byref(options))
    assert code == OK, lib.rapt_last_error()
    for i in range(length):
        weights = [math.exp(sum(a * b for a, b in zip(rows[i], rows[j])) / math.sqrt(dim)) for j in range(i + 1)]
        for d in range(dim):
            expected = sum(w * rows[j][d] for j, w in enumerate(weights)) / sum(weights)
            assert abs(out[i * dim + d] - expected) < 1e-6, (i, d, out[i * dim + d], expected)

    text = c_void_p()
    code = lib.rapt_explain(engine, byref(tq), byref(tq), byref(tq), byref(tout), byref(options), byref(text))
    assert code == OK and b"causal top_left" in ctypes.string_at(text)
    lib.rapt_string_free(text)

    before = list(q)
    code = lib.rapt_attention(engine, byref(tq), byref(tq), byref(tq), byref(tq), None)
    assert code == BAD_LAYOUT and b"shares memory" in lib.rapt_last_error() and list(q) == before
    for missing in range(4):
        given = [byref(tq), byref(tq), byref(tq), byref(tout)]
        given[missing] = None
        assert lib.rapt_attention(engine, *given, None) == BAD_POINTER and b"NULL" in lib.rapt_last_error()
    lib.rapt_engine_destroy(engine)
    print(f"ctypes: strided and causal, as the formula gives them, rapt {lib.rapt_version().decode()}")


if __name__ == "__main__":
    main(sys.argv[1])
