"""rapt.attention on GPU arrays of any library, as far as it goes without a GPU: producers that record the stream that they are
asked for, in capsules made by hand. What runs on a GPU stands in tests_gpu/test_gpu_dlpack.py."""

import sys
import types

import numpy as np
import pytest
import rapt
from capsules import capsule
from test_dlpack import Tensor

CUDA, ROCM = 2, 10
ADDRESS = 1 << 32


def from_dlpack(_):
    raise AssertionError("nothing was computed that could be taken over")


class OnGpu:
    """An array that says it lies on a GPU. Nobody may follow its pointer."""

    streams = ()
    ended = 0

    def __init__(self, shape=(1, 2, 5, 8), device=(CUDA, 0), claims=None, strides=None):
        self.shape, self.device, self.claims, self.strides = shape, device, claims or device, strides

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream="none", max_version=None, dl_device=None, copy=None):
        type(self).streams = (*type(self).streams, stream)

        def end():
            type(self).ended += 1

        return capsule(ADDRESS, self.claims, self.shape, self.strides, (2, 32, 1), end)[0]


@pytest.fixture
def fresh():
    """A class of its own, with counters of its own."""

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


class Unsigned(OnGpu):
    """As cupy 14 exports: strides divided by the size of an element as if they had no sign. Its interface has them right."""

    def __init__(self, strides, claims=()):
        super().__init__((1, 2, 5, 8), strides=[stride % 2**64 // 4 for stride in strides])
        self.interface = {
            "shape": self.shape,
            "typestr": "<f4",
            "data": (ADDRESS, False),
            "strides": strides,
            "version": 3,
        } | dict(claims)

    @property
    def __cuda_array_interface__(self):
        type(self).asked = getattr(type(self), "asked", 0) + 1
        return self.interface


@needs_no_gpu
def test_strides_exported_without_their_sign_are_read_from_the_interface(fresh):
    kind = fresh(base=Unsigned)
    turned, straight = (320, 160, -32, 4), (320, 160, 32, 4)
    # Only the device is missing: as the export has them, these strides leave the address space.
    with pytest.raises(rapt.DeviceError, match="cuda:0"):
        rapt.attention(kind(turned), kind(turned), kind((-320, -160, -32, -4)))
    assert kind.asked == 3 and kind.ended == 3
    # What the interface says is what is served: here nothing can be.
    with pytest.raises(rapt.ShapeError, match=r"\[80, 40, -1152921504606846976, 1\]"):
        rapt.attention(kind((320, 160, -(2**62), 4)), kind(turned), kind(turned))
    kind.asked = 0
    with pytest.raises(rapt.DeviceError, match="cuda:0"):
        rapt.attention(kind(straight), kind(straight), kind(straight))
    assert kind.asked == 0, "a sound export was doubted"


@needs_no_gpu
@pytest.mark.parametrize(
    ("claims", "what"),
    [
        ({"data": (ADDRESS + 4, False)}, "another array"),
        ({"shape": (1, 2, 8, 5)}, "another array"),
        ({"typestr": "<i4"}, "another array"),
        ({"typestr": "<f8"}, "another array"),
        ({"typestr": ">f4"}, "another array"),
        ({"strides": (320, 160, -30, 4)}, "is not one"),
        ({"strides": (160, -32, 4)}, "is not one"),
        ({"strides": "none"}, "is not one"),
        ({"shape": None}, "is not one"),
    ],
    ids=str,
)
def test_an_interface_that_disagrees_with_the_export_is_refused(fresh, claims, what):
    kind = fresh(base=Unsigned)
    turned = (320, 160, -32, 4)
    with pytest.raises(rapt.LayoutError, match=what):
        rapt.attention(kind(turned), kind(turned, claims), kind(turned))
    assert kind.ended == 2


@needs_no_gpu
def test_wrong_strides_without_an_interface_are_an_overflow(fresh):
    kind = fresh()
    far = kind(strides=(80, 40, 2**62 - 8, 1))
    with pytest.raises(rapt.ShapeError, match="overflows"):
        rapt.attention(far, far, far)


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
