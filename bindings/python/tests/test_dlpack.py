"""rapt.attention on anything with `__dlpack__`: both capsules, the deleter, read-only producers, other devices."""

import ctypes
import gc
import weakref

import numpy as np
import pytest
import rapt
from capsules import capsule
from reference import random


class Tensor:
    """A producer that is neither numpy nor torch. Its capsules are numpy's own, of either kind."""

    def __init__(self, array, *, versioned=True, device=(1, 0)):
        self.array, self.versioned, self.device, self.exports = array, versioned, device, 0

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        assert self.device == (1, 0), "exported from a device that is not served"
        assert copy is False or not self.versioned
        self.exports += 1
        return self.array.__dlpack__(max_version=max_version if self.versioned else None)


class Old(Tensor):
    """A producer of the first DLPack: no keywords at all."""

    def __dlpack__(self):
        self.exports += 1
        return self.array.__dlpack__()


def from_dlpack(exporter):
    """What this module, as the producer's own, makes of a result."""
    return Tensor(np.from_dlpack(exporter))


@pytest.fixture(params=["versioned", "legacy", "old"])
def make(request):
    return {"versioned": Tensor, "legacy": lambda x: Tensor(x, versioned=False), "old": Old}[request.param]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_answer_is_of_the_producers_type(make, rng, dtype):
    arrays = [random(rng, (2, 3, 5, 8), dtype)[:, ::-1] for _ in range(3)]
    tensors = [make(x) for x in arrays]
    out, lse = rapt.attention(*tensors, causal=True, return_lse=True)
    expected, expected_lse = rapt.attention(*arrays, causal=True, return_lse=True)
    assert type(out) is Tensor and type(lse) is Tensor
    np.testing.assert_array_equal(out.array, expected)
    np.testing.assert_array_equal(lse.array, expected_lse)
    assert [x.exports for x in tensors] == [1, 1, 1]
    mask = np.arange(5) > 2
    np.testing.assert_array_equal(
        rapt.attention(*tensors, mask=make(mask)).array, rapt.attention(*arrays, mask=mask)
    )
    np.testing.assert_array_equal(rapt.scaled_dot_product_attention(*tensors).array, rapt.attention(*arrays))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_numpy_exports_strides_with_their_sign(make, rng, dtype):
    arrays = [random(rng, (2, 3, 5, 8), dtype) for _ in range(3)]
    for axes in [(2,), (3,), (1, 2, 3)]:
        turn = tuple(slice(None, None, -1) if axis in axes else slice(None) for axis in range(4))
        views = [x[turn].copy()[turn] for x in arrays]
        assert min(views[0].strides) < 0
        np.testing.assert_array_equal(rapt.attention(*map(make, views)).array, rapt.attention(*arrays), err_msg=str(axes))


def test_the_result_outlives_everything_and_may_be_written(rng):
    arrays = [random(rng, (1, 1, 4, 4)) for _ in range(3)]
    out = rapt.attention(*map(Tensor, arrays))
    expected = rapt.attention(*arrays)
    gc.collect()
    np.testing.assert_array_equal(out.array, expected)
    exporter = rapt.attention  # keep the name in use while memory is shuffled
    for _ in range(20):
        exporter(*arrays)
    np.testing.assert_array_equal(out.array, expected)


def test_every_export_is_ended_exactly_once(make, rng):
    arrays = [random(rng, (1, 2, 5, 8)) for _ in range(3)]
    for call in [lambda t: rapt.attention(*t), lambda t: rapt.explain(*t)]:
        alive = [np.array(x) for x in arrays]
        dead = [weakref.ref(x) for x in alive]
        call([make(x) for x in alive])
        del alive
        gc.collect()
        assert [ref() for ref in dead] == [None] * 3
    # A refused call ends its exports too.
    alive = [np.array(x) for x in (arrays[0], arrays[1], arrays[2][..., :3, :])]
    dead = [weakref.ref(x) for x in alive]
    with pytest.raises(rapt.ShapeError):
        rapt.attention(*[make(x) for x in alive])
    del alive
    gc.collect()
    assert [ref() for ref in dead] == [None] * 3


class Counting(Tensor):
    """Counts the deleter's calls through a capsule made by hand."""

    calls = 0
    made = ()
    tag = (2, 32, 1)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        def end():
            Counting.calls += 1

        array = self.array
        made, managed = capsule(array.ctypes.data - 64, (1, 0), array.shape, None, self.tag, end, byte_offset=64)
        self.change(managed)
        Counting.made = (*Counting.made, made)
        return made

    def change(self, managed):
        """For those that export something else."""


def test_the_deleter_null_strides_and_byte_offset(rng):
    array = random(rng, (1, 1, 3, 4))
    Counting.calls, Counting.made = 0, ()
    out = rapt.attention(*[Counting(array) for _ in range(3)])
    assert Counting.calls == 3
    np.testing.assert_array_equal(out.array, rapt.attention(array, array, array))
    isvalid = ctypes.pythonapi.PyCapsule_IsValid
    isvalid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    assert all(isvalid(capsule, b"used_dltensor") for capsule in Counting.made)


@pytest.mark.parametrize(
    "tag, says",
    [((2, 8, 1), "DLPack code 2, 8 bits"), ((4, 32, 1), "4, 32 bits"), ((2, 32, 2), "2 lanes"), ((17, 4, 2), "17, 4 bits")],
)
def test_an_unknown_dtype_is_refused_and_its_export_ended(rng, tag, says):
    tensor = Counting(random(rng, (1, 1, 3, 4)))
    tensor.tag = tag
    Counting.calls = 0
    with pytest.raises(rapt.UnsupportedDtypeError, match=says):
        rapt.attention(tensor, tensor, tensor)
    assert Counting.calls == 1


def test_known_dtypes_are_refused_by_name(rng):
    for code, bits, name in [(1, 16, "uint16"), (0, 64, "int64"), (12, 8, "float8_e5m2"), (5, 64, "complex64")]:
        tensor = Counting(np.zeros((1, 1, 3, 4), np.float64))
        tensor.tag = (code, bits, 1)
        with pytest.raises(rapt.UnsupportedDtypeError, match=name):
            rapt.attention(tensor, tensor, tensor)


def test_a_read_only_producer_is_an_input_never_out(rng):
    arrays = [random(rng, (1, 2, 5, 8)) for _ in range(3)]
    expected = rapt.attention(*arrays)
    for x in arrays:
        x.flags.writeable = False
    np.testing.assert_array_equal(rapt.attention(*map(Tensor, arrays)).array, expected)
    out = np.zeros((1, 2, 5, 8), np.float32)
    given = Tensor(out)
    assert rapt.attention(*map(Tensor, arrays), out=given) is given
    np.testing.assert_array_equal(out, expected)
    out.flags.writeable = False
    with pytest.raises(rapt.LayoutError, match="read-only"):
        rapt.attention(*map(Tensor, arrays), out=Tensor(out))
    # The first DLPack cannot say whether memory may be written.
    with pytest.raises(rapt.LayoutError, match="read-only"):
        rapt.attention(*map(Tensor, arrays), out=Tensor(np.zeros_like(out), versioned=False))


def test_another_device_is_refused_before_anything_is_exported(rng):
    x = random(rng, (1, 1, 3, 4))
    for device in [(4, 0), (8, 0)]:
        tensor = Tensor(x, device=device)
        with pytest.raises(rapt.DeviceError, match="served are host memory and that of NVIDIA GPUs"):
            rapt.attention(tensor, tensor, tensor)
        assert tensor.exports == 0


def test_kinds_do_not_mix(rng, torch):
    x = random(rng, (1, 1, 3, 4))

    class Other(Tensor):
        pass

    for q, k in [(x, Tensor(x)), (Tensor(x), x), (Tensor(x), Other(x)), (torch.from_numpy(x), x), (x, torch.from_numpy(x))]:
        with pytest.raises(rapt.KindError):
            rapt.attention(q, k, q)


def test_a_producer_that_fails_is_heard(rng):
    class Broken(Tensor):
        def __dlpack__(self, **_):
            raise RuntimeError("no tensor today")

    class Copier(Tensor):
        def __dlpack__(self, **_):
            raise BufferError("only with a copy")

    class Liar(Tensor):
        def __dlpack__(self, **_):
            return object()

    x = random(rng, (1, 1, 3, 4))
    with pytest.raises(RuntimeError, match="no tensor today"):
        rapt.attention(Broken(x), Broken(x), Broken(x))
    with pytest.raises(rapt.LayoutError, match="only with a copy"):
        rapt.attention(Copier(x), Copier(x), Copier(x))
    with pytest.raises(rapt.KindError, match="capsule"):
        rapt.attention(Liar(x), Liar(x), Liar(x))


def test_without_from_dlpack_an_own_output_is_asked_for(rng):
    class Homeless(Tensor):
        __module__ = "nowhere"

    x = random(rng, (1, 1, 3, 4))
    tensor = Homeless(x)
    with pytest.raises(rapt.UnsupportedError, match="from_dlpack"):
        rapt.attention(tensor, tensor, tensor)
    out = np.zeros_like(x)
    rapt.attention(tensor, tensor, tensor, out=Homeless(out))
    np.testing.assert_array_equal(out, rapt.attention(x, x, x))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_arrays_on_the_cpu(dtype):
    jax = pytest.importorskip("jax")
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 2, 5, 8)).astype(dtype) for i in range(3))
    out, lse = rapt.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, jax.Array) and out.dtype == q.dtype and lse.dtype == "float32"
    expected, _ = rapt.attention(*map(np.asarray, (q, k, v)), causal=True, return_lse=True)
    np.testing.assert_array_equal(np.asarray(out), expected)
    # The answer may be used as jax's own, and is never written through `out`.
    assert jax.numpy.isfinite(jax.jit(lambda x: x.sum())(out))
    with pytest.raises(rapt.LayoutError, match="read-only"):
        rapt.attention(q, k, v, out=jax.numpy.zeros_like(q))
