"""Samples of operators that torch's OpInfo does not have, or has in another form: `WRITTEN[name](dtype)` gives (args, kwargs)."""

import torch

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.uint8)
EVERY = (*FLOATS, *INTS, torch.bool)


def make(dtype, *shape, seed=0, low=-4, high=5):
    """Random values: normal floats, small integers (not negative where there are none)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(max(low, 0) if dtype == torch.uint8 else low, high, shape, generator=generator).to(dtype)


def index(high, *shape, dtype=torch.int64, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def large(dtype):
    """Values that a wrong conversion changes: beyond 32 bits, near powers of two, halves."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        numbers = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 100.7, -100.7, 1.0 + 2.0**-7, 60000.0]
        numbers += [1.0 + 2.0**-52, 2.0**24 + 1, 1e30] if dtype == torch.float64 else []
        return torch.tensor(numbers, dtype=torch.float64).to(dtype)
    numbers = [0, 1, 2, 127, 128, 200, 255, -1, -128, -129, 256, 32767, 65535, 65536, 2**24 + 1, 2**31 - 1, -(2**31)]
    numbers += [2**40, 2**31, 2**53 + 1, -(2**63), 2**63 - 1]
    info = torch.iinfo(dtype)
    numbers = [number for number in numbers if info.min <= number <= info.max]
    return torch.tensor(numbers, dtype=dtype)


def special(dtype):
    """The ends of a dtype, and values that a function of one number is often wrong at."""
    yield large(dtype)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        ends = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), info.tiny, -info.tiny, info.smallest_normal / 4]
        ends += [info.max, info.min, info.eps, 1.0, -1.0, 1.0 + info.eps, 1.0 - info.eps]
        yield torch.tensor(ends, dtype=torch.float64).to(dtype)
        yield torch.tensor([-20.0, -9.1, -3.0, -0.7, 1e-5, 0.7, 3.0, 9.1, 20.0, 88.5, 700.0], dtype=torch.float64).to(dtype)
        yield make(dtype, 64)


SPECIAL = special


def compared(dtype):
    """Comparison with a number: of each kind, equal to some of the values, and where float32 is too coarse."""
    x = make(dtype, 3, 4)
    for number in (0, 1, -1, 2, 0.5, True):
        yield (x, number), {}
    if dtype == torch.int64:
        near = torch.tensor([2**24, 2**24 + 1, 2**24 + 2, 2**53 + 1])
        for number in (16777216.0, 2**24 + 1, 2**53, float("inf")):
            yield (near, number), {}
    if dtype.is_floating_point:
        yield (torch.tensor([float("nan"), float("inf"), -0.0, 0.1]).to(dtype), 0.1), {}
        yield (torch.tensor([float("nan"), float("inf"), -0.0, 0.0]).to(dtype), float("-inf")), {}


def powers(dtype):
    if dtype == torch.bool:
        return
    for exponent in (2, 3, 0, 1) + ((0.5, -1, -0.5, 2.5, -2) if dtype.is_floating_point else ()):
        x = make(dtype, 3, 4)
        yield (x.abs() if isinstance(exponent, float) else x, exponent), {}
    if dtype.is_floating_point:
        yield (torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -2.0, -8.0]).to(dtype), 3), {}
        yield (torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -2.0]).to(dtype), 0.5), {}
    elif dtype == torch.int64:
        yield (torch.tensor([2**31, -3, 10]), 3), {}
        yield (make(dtype, 3), 2.0), {}


def scaled(dtype):
    for number in (2, -1, 0, 0.5, True):
        yield (make(dtype, 3, 4), number), {}
    if dtype == torch.int64:
        yield (torch.tensor([2**62, 3]), 4), {}


def casts(keyword):
    """Each dtype to each other, and to itself."""

    def written(dtype):
        for to in EVERY:
            for x in (make(dtype, 3, 4), in_range(large(dtype), to), make(dtype)):
                yield keyword(x, to)

    return written


def in_range(x, to):
    """Without floats that the integer dtype cannot hold: C++ leaves their conversion undefined."""
    if not x.dtype.is_floating_point or to.is_floating_point or to == torch.bool:
        return x
    info = torch.iinfo(to)
    wide = x.double().trunc()
    return x[(wide >= info.min) & (wide <= min(info.max, 2**62))]


def only(dtypes):
    """Samples in these dtypes and in no other."""

    def decorate(function):
        return lambda dtype: function(dtype) if dtype in dtypes else iter(())

    return decorate


def slices(dtype):
    for args in [(0, 1, 3), (1, -2, 2**63 - 1), (-1, 0, 4, 2), (2, 1, -1, 3), (0, 5, 2), (1, None, None, 2), (0, -99, 99)]:
        yield (make(dtype, 4, 5, 6), *args), {}
    yield (make(dtype, 4, 5, 6),), {}
    yield (make(dtype, 0, 3), 0, 0, 2), {}


def embeddings(dtype):
    for shape in [(3,), (2, 4), ()]:
        for index_dtype in (torch.int64, torch.int32):
            yield (make(dtype, 7, 5), index(7, *shape, dtype=index_dtype)), {}
    yield (make(dtype, 7, 5), index(7, 2, 3), 2), {}


def asserts(dtype):
    x = make(dtype, 2, 3)
    yield (x,), {"dtype": dtype}
    if torch.__version__ < "2.12":
        return  # Its tracer takes [2, 3] for other sizes than torch.Size([2, 3]).
    yield (x, [2, 3], [3, 1], dtype), {"device": torch.device("cpu"), "layout": torch.strided}


def arange(dtype):
    if dtype == torch.bool:
        return
    yield (7,), {"dtype": dtype}
    yield (0,), {"dtype": dtype}
    yield (5,), {"dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}
    if dtype == torch.int64:
        yield (6,), {}
    if dtype == torch.float32:
        yield (4.5,), {}
        yield (3.0,), {"layout": torch.strided}


def arange_start_step(dtype):
    if dtype == torch.bool:
        return
    for args in [(1, 9), (0, 10, 3), (2, 2), (5, 20, 4)]:
        yield args, {"dtype": dtype}
    if dtype.is_floating_point:
        yield (0, 1, 0.125), {"dtype": dtype}
        yield (0.5, -3.0, -0.75), {"dtype": dtype}
        yield (0, 2, 0.1), {"dtype": dtype}
    elif dtype != torch.uint8:
        yield (5, -7, -3), {"dtype": dtype}
    if dtype == torch.int64:
        yield (2**40, 2**40 + 3), {}
    if dtype == torch.float32:
        yield (0.0, 2.5, 0.5), {}


def indexing(dtype):
    x = make(dtype, 4, 5, 6)
    i, j = index(4, 3), index(5, 3, seed=2)
    for indices in [
        [i],
        [i, j],
        [None, j],
        [i, None, index(6, 3, seed=4)],
        [index(4, 2, 1), index(5, 3, seed=5)],
        [None, None, index(6, 2, 2, seed=6)],
        [torch.tensor(1)],
        [torch.tensor([-1, -4, 3])],
        [i.int()],
        [index(4, 2, 1), None, index(6, 1, 3, seed=7)],
    ]:
        yield (x, indices), {}
    yield (make(dtype, 5), [torch.zeros(0, dtype=torch.int64)]), {}


def dropouts(dtype):
    for p in (0.0, 0.1, 1.0):
        yield (make(dtype, 3, 4), p, False), {}


def where_scalar(dtype):
    # The result has the dtype of the tensor and the number together.
    condition = make(torch.bool, 3, 4, seed=2)
    for other in (0, 2, -1.5, float("-inf"), True):
        yield (condition, make(dtype, 3, 4), other), {}
    yield (make(torch.bool, 4, seed=2), make(dtype, 3, 1), 0), {}
    yield (condition, make(dtype), 1), {}


def fills(dtype):
    options = {"dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}
    for shape in [[2, 3], [], [0, 4]]:
        yield (shape,), options


def fulls(dtype):
    for shape, value in [([2, 3], 1), ([], 2.5), ([3], 0), ([2], True)]:
        yield (shape, value), {"dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}
    if dtype == torch.float32:
        yield ([2], 1.5), {}
        yield ([2], float("-inf")), {}
    if dtype == torch.int64:
        yield ([2], 2**40), {}
    if dtype == torch.bool:
        yield ([2], True), {}


def scalar_tensors(dtype):
    for value in (0, 1, 3):
        yield (value,), {"dtype": dtype, "layout": torch.strided, "device": torch.device("cpu")}
    if dtype.is_floating_point:
        yield (float("-inf"),), {"dtype": dtype}
        yield (0.1,), {"dtype": dtype}
    if dtype == torch.float32:
        yield (0.1,), {}


def empties(dtype):
    yield ([2, 3],), {"dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}
    yield ([2, 3, 4, 5],), {"dtype": dtype, "memory_format": torch.contiguous_format}


def empties_permuted(dtype):
    yield ([2, 3, 4], [0, 1, 2]), {"dtype": dtype, "device": torch.device("cpu")}
    yield ([2, 3, 4], [2, 0, 1]), {"dtype": dtype, "device": torch.device("cpu")}


def copies(dtype):
    for other in EVERY:
        source = in_range(large(other), dtype)
        yield (make(dtype, source.numel()), source), {}
        yield (make(dtype, 3, 4), make(other, 4)), {}
    yield (make(dtype, 2, 3), make(dtype)), {}


def types_as(dtype):
    for other in EVERY:
        yield (in_range(large(dtype), other), make(other, 2)), {}


@only(FLOATS)
def grouped(dtype):
    x, weight = make(dtype, 9, 6), make(dtype, 3, 6, 5, seed=1)
    for ends in ([2, 5, 9], [0, 4, 9], [3, 3, 9], [9, 9, 9]):
        for index_dtype in (torch.int32, torch.int64):
            yield (x, weight, torch.tensor(ends, dtype=index_dtype)), {}


def itself(dtype):
    for shape in [(3, 4), (), (0, 2)]:
        yield (make(dtype, *shape),), {}


@only((*FLOATS, *INTS))
def clamps(dtype):
    x = make(dtype, 3, 4)
    for bounds in [(0, 2), (None, 1), (1, None), (2, 1)]:
        yield (x, *bounds), {}
    if dtype.is_floating_point:
        yield (torch.tensor([float("nan"), float("inf"), -0.0, 1e4]).to(dtype), 0.0, 1.0), {}
        yield (x, 1e-9), {}
    else:
        yield (x, 0.5, 2.5), {}


@only((*FLOATS, *INTS))
def clamp_mins(dtype):
    yield (make(dtype, 3, 4), 1), {}
    yield (make(dtype, 3, 4), 0.5), {}
    if dtype.is_floating_point:
        yield (torch.tensor([float("nan"), -float("inf"), -0.0]).to(dtype), 1e-12), {}


@only(FLOATS)
def einsums(dtype):
    def x(*shape):
        return make(dtype, *shape, seed=len(shape))

    yield ("nhwpqc->nchpwq", [x(2, 2, 3, 2, 2, 3)]), {}
    yield ("bij,bjk->bik", [x(2, 3, 4), make(dtype, 2, 4, 5, seed=9)]), {}
    yield ("bhid,bhjd->bhij", [x(2, 2, 3, 4), make(dtype, 2, 2, 5, 4, seed=9)]), {}
    yield ("i,j->ij", [x(3), make(dtype, 4, seed=9)]), {}
    # What is the right operand's alone comes first, between, and in a chain.
    yield ("ik,kj->ji", [x(2, 4), make(dtype, 4, 3, seed=9)]), {}
    yield ("bik,bkmn->mbni", [x(2, 3, 4), make(dtype, 2, 4, 5, 3, seed=9)]), {}
    yield ("ijk,kmn->minj", [x(2, 3, 4), make(dtype, 4, 5, 2, seed=9)]), {}
    yield ("ik,kj,jl->li", [x(2, 4), make(dtype, 4, 3, seed=9), make(dtype, 3, 5, seed=8)]), {}
    yield ("ij->ji", [x(3, 4)]), {}
    yield ("ij->i", [x(3, 4)]), {}
    yield ("ii->i", [x(3, 3)]), {}
    yield ("...ij,...jk->...ik", [x(2, 3, 4), make(dtype, 2, 4, 5, seed=9)]), {}


def pools(dtype):
    if dtype == torch.bool:
        return
    x = make(dtype, 2, 3, 7, 8)
    for args in [([2, 2],), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2], [1, 0], [2, 1]), ([3, 3], [2, 2], [0, 0], [1, 1], True)]:
        yield (x, *args), {}
    yield (make(dtype, 3, 5, 5), [2, 2]), {}
    if dtype.is_floating_point:
        holed = make(dtype, 1, 1, 4, 4)
        holed[0, 0, 1, 2] = float("nan")
        yield (holed, [2, 2]), {}


@only(FLOATS)
def bilinear(dtype):
    x = make(dtype, 2, 3, 4, 5)
    yield (x, None, False, [2.0, 2.0]), {}
    yield (x, [7, 3], False, None), {}
    yield (x, [7, 9], True, None), {}
    yield (x, None, False, [1.5, 2.5]), {}
    yield (x, [1, 1], True, None), {}


@only((*FLOATS, torch.uint8))
def nearest(dtype):
    x = make(dtype, 2, 3, 4, 5)
    yield (x, None, [2.0, 2.0]), {}
    yield (x, [7, 3], None), {}
    yield (x, None, [1.5, 0.7]), {}


def statistics(dtype, channels):
    return make(dtype, channels, seed=3), make(dtype, channels, seed=4).abs() + 0.5


@only(FLOATS)
def batch_norms(dtype):
    for shape in [(2, 3, 4, 5), (4, 3), (2, 3, 6)]:
        mean, var = statistics(dtype, 3)
        weight, bias = make(dtype, 3, seed=5), make(dtype, 3, seed=6)
        yield (make(dtype, *shape), weight, bias, mean, var, False, 0.1, 1e-5, False), {}
        yield (make(dtype, *shape), None, None, mean, var, False, 0.1, 1e-3, True), {}


@only(FLOATS)
def native_batch_norms(dtype):
    for shape in [(2, 3, 4, 5), (4, 3)]:
        mean, var = statistics(dtype, 3)
        yield (make(dtype, *shape), make(dtype, 3, seed=5), make(dtype, 3, seed=6), mean, var, 0.1, 1e-5), {}
        yield (make(dtype, *shape), None, None, mean, var, 0.1, 1e-3), {}


@only(FLOATS)
def native_group_norms(dtype):
    yield (make(dtype, 2, 6, 4, 5), make(dtype, 6, seed=5), make(dtype, 6, seed=6), 2, 6, 20, 3, 1e-5), {}
    yield (make(dtype, 2, 6, 7), None, None, 2, 6, 7, 2, 1e-3), {}


@only(FLOATS)
def softmaxes(dtype):
    for shape, dim in [((3, 4), -1), ((3, 4), 0), ((2, 3, 5), 1), ((), 0), ((0, 3), 1)]:
        yield (make(dtype, *shape), dim, False), {}
    masked = make(dtype, 3, 4)
    masked[0, 1:] = float("-inf")
    masked[1, :] = float("-inf")
    yield (masked, -1, False), {}


def views(dtype):
    yield (make(dtype, 3, 4), [12]), {}
    yield (make(dtype, 3, 4), [2, -1]), {}
    yield (make(dtype, 2, 3, 4), [2, 12]), {}


@only(FLOATS)
def convolutions(dtype):
    x2, w2, b = make(dtype, 2, 4, 6, 7), make(dtype, 6, 4, 3, 3, seed=1), make(dtype, 6, seed=2)
    yield (x2, w2, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}
    yield (x2, w2, None, [2, 1], [1, 2], [1, 2], False, [0, 0], 1), {}
    yield (x2, make(dtype, 6, 2, 3, 3, seed=1), b, [1, 1], [1, 1], [1, 1], False, [0, 0], 2), {}
    yield (make(dtype, 2, 4, 9), make(dtype, 6, 4, 3, seed=1), b, [2], [1], [1], False, [0], 1), {}
    yield (x2, make(dtype, 4, 6, 3, 3, seed=1), b, [2, 2], [1, 1], [1, 1], True, [1, 0], 1), {}
    yield (x2, make(dtype, 4, 3, 4, 4, seed=1), b, [2, 2], [1, 1], [1, 1], True, [0, 0], 2), {}
    yield (make(dtype, 2, 4, 3, 4, 5), make(dtype, 6, 2, 2, 3, 3, seed=1), b, [1, 2, 1], [0, 1, 1], [1], False, [0], 2), {}


def slice_scatters(dtype):
    x = make(dtype, 4, 5, 6)
    for args, shape in [((0, 1, 3), (2, 5, 6)), ((-1, 0, 6, 2), (4, 5, 3)), ((1, -2, 2**63 - 1), (4, 2, 6)), ((), (4, 5, 6))]:
        yield (x, make(dtype, *shape, seed=8), *args), {}


def squeezes(dtype):
    x = make(dtype, 1, 3, 1, 4)
    for dims in ([0], [0, 2], [1, 2], [-2, -4], []):
        yield (x, dims), {}


WRITTEN = {
    "aten.slice.Tensor": slices,
    "aten.embedding.default": embeddings,
    "aten._assert_tensor_metadata.default": asserts,
    "aten.arange.default": arange,
    "aten.to.device": casts(lambda x, to: ((x, torch.device("cpu"), to), {})),
    "aten.to.dtype": casts(lambda x, to: ((x, to), {})),
    "aten.to.dtype_layout": casts(lambda x, to: ((x,), {"dtype": to, "layout": torch.strided, "device": torch.device("cpu")})),
    "aten.index.Tensor": indexing,
    "aten.dropout.default": dropouts,
    "aten.where.ScalarOther": where_scalar,
    "aten.zeros.default": fills,
    "aten.copy_.default": copies,
    "aten.copy.default": copies,
    "aten.type_as.default": types_as,
    "transformers.grouped_mm_fallback.default": grouped,
    "aten.alias.default": itself,
    "aten.detach_.default": itself,
    "aten.lift_fresh_copy.default": itself,
    "aten.clamp.default": clamps,
    "aten.clamp_min.default": clamp_mins,
    "aten.einsum.default": einsums,
    "aten.max_pool2d.default": pools,
    "aten.max_pool2d_with_indices.default": pools,
    "aten.upsample_bilinear2d.vec": bilinear,
    "aten.upsample_nearest2d.vec": nearest,
    "aten.batch_norm.default": batch_norms,
    "aten._native_batch_norm_legit_no_training.default": native_batch_norms,
    "aten.native_group_norm.default": native_group_norms,
    "aten._softmax.default": softmaxes,
    "aten._to_copy.default": casts(lambda x, to: ((x,), {"dtype": to})),
    **{f"aten.{name}.Scalar": compared for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "aten.pow.Tensor_Scalar": powers,
    "aten.mul.Scalar": scaled,
    "aten._unsafe_view.default": views,
    "aten.arange.start_step": arange_start_step,
    "aten.convolution.default": convolutions,
    "aten.empty.memory_format": empties,
    "aten.empty_permuted.default": empties_permuted,
    "aten.full.default": fulls,
    "aten.scalar_tensor.default": scalar_tensors,
    "aten.slice_scatter.default": slice_scatters,
    "aten.squeeze.dims": squeezes,
}
