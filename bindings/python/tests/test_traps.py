"""Tensors that are not what they look like: each is refused by name before an element is read, or read as what it is."""

import ml_dtypes
import numpy as np
import pytest
import rapt
from reference import random
from test_dlpack import Counting, Tensor


def three(rng, dtype="float32"):
    return [random(rng, (1, 2, 5, 8), dtype) for _ in range(3)]


class Wrapped:
    """A producer that is not torch's class and exports through a torch tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


def test_int4_of_torch_is_refused_by_its_own_name(torch):
    """DLPack has no word for it and torch exports it as int8, of as many elements: only the torch interface can tell."""
    packed = torch.zeros(1, 1, 4, 8, dtype=torch.uint8)
    for name in ["int4", "uint4", "int2", "uint7"]:
        if not hasattr(torch, name):
            continue
        x = packed.view(getattr(torch, name))
        for call in [rapt.attention, rapt.explain, rapt.scaled_dot_product_attention]:
            with pytest.raises(rapt.UnsupportedDtypeError, match=f"torch.{name}"):
                call(x, x, x)
    if hasattr(torch, "int4"):
        # Behind a foreign producer it says int8, and int8 is refused by that name: never read as numbers either way.
        x = Wrapped(packed.view(torch.int4))
        with pytest.raises((rapt.RaptError, BufferError, RuntimeError)) as told:
            rapt.attention(x, x, x)
        assert "int8" in str(told.value) or "int4" in str(told.value) or "dtype" in str(told.value).lower()


def test_four_bit_floats_are_refused(torch):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has none")
    x = torch.zeros(1, 1, 4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(rapt.UnsupportedDtypeError, match="float4_e2m1fn_x2"):
        rapt.attention(x, x, x)


def test_quantized_tensors_are_refused(torch):
    if not hasattr(torch, "quint8"):
        pytest.skip("this torch has none")
    x = torch.quantize_per_tensor(torch.zeros(1, 1, 4, 8), 0.1, 10, torch.quint8)
    with pytest.raises(rapt.RaptError, match="quint8|strided"):
        rapt.attention(x, x, x)


@pytest.mark.parametrize("place", ["q", "k", "v", "mask", "sinks", "alibi_slopes", "out"])
def test_the_negative_bit_is_refused_wherever_it_is(torch, place):
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(1, 2, 5, 8, generator=generator) for name in ["q", "k", "v"]}
    given["mask"] = torch.randn(5, 5, generator=generator)
    given["sinks"] = given["alibi_slopes"] = torch.randn(2, generator=generator)
    given["out"] = torch.zeros(1, 2, 5, 8)
    rapt.attention(**given)
    # As users meet it: the imaginary part of a conjugate.
    lazy = torch.complex(given[place], given[place]).conj().imag
    assert lazy.is_neg() and lazy.dtype == torch.float32
    for call in [rapt.attention, rapt.explain]:
        with pytest.raises(rapt.LayoutError, match=f"{place} .*lazy negation.*{place}.resolve_neg"):
            call(**{**given, place: lazy})


def test_the_conjugate_bit_is_refused(torch):
    x = torch.zeros(1, 1, 4, 8, dtype=torch.complex64)
    for call in [rapt.attention, rapt.explain]:
        with pytest.raises(rapt.LayoutError, match="lazy negation or conjugation.*resolve_conj"):
            call(x.conj(), x, x)
    with pytest.raises(rapt.UnsupportedDtypeError, match="complex64"):
        rapt.attention(x, x, x)
    # Behind a foreign producer torch itself refuses to export the bit. (The negative bit it exports as if it were not set,
    # to every library: only its own interface can tell.)
    with pytest.raises(rapt.LayoutError, match="conjugate bit"):
        rapt.attention(*[Wrapped(x.conj())] * 3)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("place", ["q", "k", "v", "mask", "sinks", "alibi_slopes", "out"])
def test_the_other_byte_order_is_refused_wherever_it_is(rng, dtype, place):
    q, k, v = three(rng, dtype)
    given = {"q": q, "k": k, "v": v, "mask": random(rng, (5, 5), dtype), "sinks": random(rng, 2, dtype)}
    given |= {"alibi_slopes": random(rng, 2, dtype), "out": np.zeros_like(q)}
    rapt.attention(**given)
    swapped = given[place].astype(given[place].dtype.newbyteorder("S"))
    before = swapped.tobytes()
    with pytest.raises(rapt.LayoutError, match=f"{place} has the other byte order"):
        rapt.attention(**{**given, place: swapped})
    assert swapped.tobytes() == before
    # numpy itself does not export it through DLPack.
    if place == "q":
        with pytest.raises(rapt.LayoutError, match="without a copy"):
            rapt.attention(*[Tensor(swapped)] * 3)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_read_only_arrays_are_inputs_and_never_out(rng, dtype):
    q, k, v = three(rng, dtype)
    mask, sinks = rng.random((5, 5)) < 0.7, random(rng, 2, dtype)
    expected = rapt.attention(q, k, v, mask=mask, sinks=sinks)
    for x in (q, k, v, mask, sinks):
        x.flags.writeable = False
    np.testing.assert_array_equal(rapt.attention(q, k, v, mask=mask, sinks=sinks), expected)
    # Memory that no process may write.
    frozen = np.frombuffer(q.tobytes(), q.dtype).reshape(q.shape)
    np.testing.assert_array_equal(rapt.attention(frozen, k, v, mask=mask, sinks=sinks), expected)
    for out in [frozen, np.broadcast_to(np.zeros(8, q.dtype), q.shape)]:
        before = out.tobytes()
        for call in [rapt.attention, rapt.explain]:
            with pytest.raises(rapt.LayoutError, match="out is read-only"):
                call(q, k, v, out=out)
        assert out.tobytes() == before


def test_an_expanded_array_is_an_input_and_never_out(rng):
    q, k, v = three(rng)
    out = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), q.shape, (0, 0, 0, 4), writeable=True)
    for call in [rapt.attention, rapt.explain]:
        with pytest.raises(rapt.LayoutError, match="writes one address from two places"):
            call(q, k, v, out=out)


def test_uint16_is_numbers_and_ml_dtypes_bfloat16_is_bfloat16(rng):
    q = random(rng, (1, 1, 4, 8), "bfloat16")
    assert rapt.attention(q, q, q).dtype == ml_dtypes.bfloat16
    with pytest.raises(rapt.UnsupportedDtypeError, match="uint16.*view\\(ml_dtypes.bfloat16\\)"):
        rapt.attention(*[q.view(np.uint16)] * 3)


def test_structured_object_and_long_double_arrays_are_refused():
    for dtype in [[("re", "f4"), ("im", "f4")], object, np.longdouble, "S4", "M8[s]", np.complex64]:
        x = np.zeros((1, 1, 4, 8), dtype)
        with pytest.raises(rapt.UnsupportedDtypeError):
            rapt.attention(x, x, x)


class Crooked(Counting):
    """A capsule whose fields do not hold together."""

    def change(self, managed):
        for name, value in self.wrong.items():
            setattr(managed, name, value)


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        ({"ndim": -1}, "LayoutError", "negative number of dimensions"),
        ({"ndim": 2**31 - 1}, "ShapeError", "2147483647 dimensions"),
        ({"shape": None}, "LayoutError", "exports no sizes"),
        ({"data": None, "byte_offset": 0}, "LayoutError", "null data pointer"),
        ({"data": None, "byte_offset": 64}, "LayoutError", "null data pointer"),
        ({"byte_offset": 2}, "LayoutError", "no multiple of 4"),
        ({"device_type": 2}, "LayoutError", "another device"),
        ({"byte_offset": 2**64 - 4, "data": 8}, "LayoutError", "offset beyond the address space"),
    ],
    ids=str,
)
def test_a_capsule_that_does_not_hold_together_is_refused_and_ended(rng, wrong, error, says):
    tensor = Crooked(random(rng, (1, 1, 3, 4)))
    tensor.wrong = wrong
    Counting.calls = 0
    with pytest.raises(getattr(rapt, error), match=says):
        rapt.attention(tensor, tensor, tensor)
    assert Counting.calls >= 1, "its export is ended all the same"
