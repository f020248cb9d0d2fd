"""rapt.attention on GPU arrays of any library, as far as it goes without a GPU: producers that record the stream that they are
asked for, in capsules made by hand. What runs on a GPU stands in tests_gpu/test_gpu_dlpack.py."""

import ctypes
import sys
import types

import numpy as np
import pytest
import rapt
from test_dlpack import Tensor

CUDA, ROCM = 2, 10


class Managed(ctypes.Structure):
    """DLManagedTensor of the first DLPack."""


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = [
    ("data", ctypes.c_void_p),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", DELETER),
]


def from_dlpack(_):
    raise AssertionError("nothing was computed that could be taken over")


class OnGpu:
    """An array that says it lies on a GPU. Nobody may follow its pointer."""

    streams = ()
    ended = 0
    kept = ()

    def __init__(self, shape=(1, 2, 5, 8), device=(CUDA, 0), claims=None):
        self.shape, self.device, self.claims = shape, device, claims or device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream="none", max_version=None, dl_device=None, copy=None):
        type(self).streams = (*type(self).streams, stream)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)

        def end(_):
            type(self).ended += 1

        managed = Managed(1 << 32, *self.claims, len(self.shape), 2, 32, 1, shape, None, 0, None, DELETER(end))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        OnGpu.kept = (*OnGpu.kept, managed, shape)
        return new(ctypes.addressof(managed), b"dltensor", None)


@pytest.fixture
def fresh():
    """A class of its own, with an account of its own."""

    def make(name="OnGpu", module=__name__, base=OnGpu):
        return type(name, (base,), {"streams": (), "ended": 0, "__module__": module})

    return make


needs_no_gpu = pytest.mark.skipif(rapt.is_available("cuda"), reason="a GPU is there: the arrays of this file are not")


@needs_no_gpu
def test_arrays_are_asked_for_on_the_default_stream_and_given_back(fresh):
    kind = fresh()
    mask = kind((5, 5))
    for call in (rapt.attention, rapt.explain, rapt.scaled_dot_product_attention):
        kind.streams, kind.ended = (), 0
        with pytest.raises(rapt.DeviceError, match="cuda:0"):
            call(kind(), kind(), kind(), **({} if call is rapt.scaled_dot_product_attention else {"mask": mask}))
        # 1 is DLPack's name of the legacy default stream; 0 would be ambiguous.
        assert kind.streams == (1,) * len(kind.streams) and len(kind.streams) in (3, 4)
        assert kind.ended == len(kind.streams), "an export was not ended"


@needs_no_gpu
def test_cupy_is_asked_for_its_current_stream(fresh, monkeypatch):
    asked, entered = [], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            entered.append(-1)

    def newer(device_id=None):
        asked.append(device_id)
        return types.SimpleNamespace(ptr=4242)

    def older():
        asked.append("current")
        return types.SimpleNamespace(ptr=0)

    for current, stream, question in ((newer, 4242, 3), (older, 1, "current")):
        cupy = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(get_current_stream=current, Device=Device)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        kind = fresh("ndarray", "cupy._core.core")
        asked.clear(), entered.clear()
        array = lambda: kind(device=(CUDA, 3))  # noqa: E731
        with pytest.raises(rapt.DeviceError, match="cuda:3"):
            rapt.attention(array(), array(), array())
        assert kind.streams == (stream,) * 3 and asked == [question] * 3
        assert entered == ([3, -1] * 3 if current is older else [])


@needs_no_gpu
def test_devices_do_not_mix_and_liars_are_refused(fresh):
    kind = fresh()
    with pytest.raises(rapt.DeviceError, match="k is on cuda:1"):
        rapt.attention(kind(), kind(device=(CUDA, 1)), kind())
    with pytest.raises(rapt.LayoutError, match="another device"):
        rapt.attention(kind(claims=(CUDA, 1)), kind(), kind())
    # Neither is exported: another vendor's, and no index at all.
    for device in ((ROCM, 0), (CUDA, -1)):
        kind.streams = ()
        with pytest.raises(rapt.DeviceError, match="NVIDIA GPUs"):
            rapt.attention(kind(device=device), kind(), kind())
        assert kind.streams == ()


@needs_no_gpu
def test_a_capsule_that_does_not_say_whether_it_may_be_written_is_no_out(fresh):
    kind = fresh()
    with pytest.raises(rapt.LayoutError, match="read-only"):
        rapt.attention(kind(), kind(), kind(), out=kind())
    assert kind.ended == 4


def test_host_arrays_are_asked_for_without_a_stream(rng):
    class Strict(Tensor):
        def __dlpack__(self, *, max_version=None, copy=None):
            return self.array.__dlpack__(max_version=max_version)

    x = np.ascontiguousarray(rng.standard_normal((1, 2, 5, 8)), np.float32)
    with pytest.raises(rapt.UnsupportedError, match="from_dlpack"):
        # Only its result has no home: everything was read.
        rapt.attention(*[type("Homeless", (Strict,), {"__module__": "nowhere"})(x)] * 3)


def test_a_result_in_host_memory_has_no_stream(rng):
    seen = []

    class Owner(Tensor):
        @staticmethod
        def from_dlpack(buffer):
            seen.append(buffer)
            return buffer

    Owner.__module__ = "nowhere"
    x = np.ascontiguousarray(rng.standard_normal((1, 2, 5, 8)), np.float32)
    rapt.attention(Owner(x), Owner(x), Owner(x))
    (buffer,) = seen
    assert buffer.__dlpack_device__() == (1, 0)
    for options in ({"stream": 1}, {"copy": True}, {"dl_device": (CUDA, 0)}):
        with pytest.raises(BufferError):
            buffer.__dlpack__(**options)
    np.testing.assert_array_equal(np.from_dlpack(buffer), rapt.attention(x, x, x))
