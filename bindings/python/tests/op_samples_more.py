"""Operators beyond those of the program zoo that exported models use: whence their samples come, and how they are judged.

`ROWS` has (OpInfo's name or None, comparison, and what takes a sample where not all are) for each overload, `OWN` the samples of those that torch has no OpInfo for.
"""

import torch
from op_samples_written import FLOATS, INTS, index, make, only

A = "aten."
F = "nn.functional."


def _of(comparison, names):
    """Overloads `default` whose OpInfo has the operator's name."""
    return {A + f"{name}.default": (name, comparison) for name in names.split()}


def _start_is_number(args, kwargs):
    """The other overload has a tensor."""
    return None if isinstance(args[2], torch.Tensor) else (args, kwargs)


def _nn(comparison, names):
    return {A + f"{name}.default": (F + name, comparison) for name in names.split()}


ROWS = {
    # Pointwise.
    **_nn("ulp", "hardswish hardsigmoid leaky_relu elu selu celu softplus mish prelu glu threshold hardshrink softshrink"),
    **_nn("ulp", "relu6 hardtanh"),
    **_of("ulp", "sinh cosh asin acos atan asinh acosh atanh erfc logit deg2rad rad2deg logaddexp logaddexp2"),
    **_of("bits", "frac nan_to_num isfinite isposinf isneginf fmax fmin"),
    A + "addcmul.default": ("addcmul", "ulp"),
    A + "addcdiv.default": ("addcdiv", "ulp"),
    A + "copysign.Tensor": ("copysign", "bits"),
    A + "log_sigmoid.default": (F + "logsigmoid", "ulp"),
    A + "log_sigmoid_forward.default": (F + "logsigmoid", "ulp"),
    A + "_prelu_kernel.default": (None, "ulp"),
    A + "atan2.default": ("atan2", "ulp"),
    A + "hypot.default": ("hypot", "ulp"),
    A + "xlogy.Tensor": ("xlogy", "ulp"),
    A + "lerp.Tensor": ("lerp", "ulp"),
    A + "lerp.Scalar": ("lerp", "ulp"),
    A + "rsub.Tensor": ("rsub", "bits"),
    A + "rsub.Scalar": (None, "bits"),
    A + "float_power.Tensor_Tensor": ("float_power", "ulp"),
    A + "float_power.Tensor_Scalar": (None, "ulp"),
    A + "bitwise_left_shift.Tensor": ("bitwise_left_shift", "bits"),
    A + "bitwise_right_shift.Tensor": ("bitwise_right_shift", "bits"),
    A + "hardtanh_.default": (F + "hardtanh", "ulp"),
    A + "hardswish_.default": (F + "hardswish", "ulp"),
    A + "leaky_relu_.default": (F + "leaky_relu", "ulp"),
    A + "elu_.default": (F + "elu", "ulp"),
    A + "addcmul_.default": ("addcmul", "ulp"),
    A + "feature_dropout.default": (None, "bits"),
    A + "dropout_.default": (None, "bits"),
    # Padding.
    A + "pad.default": (None, "bits"),
    A + "constant_pad_nd.default": (F + "pad.constant", "bits"),
    A + "reflection_pad1d.default": (None, "bits"),
    A + "reflection_pad2d.default": (None, "bits"),
    A + "replication_pad1d.default": (None, "bits"),
    A + "replication_pad2d.default": (None, "bits"),
    # Reductions and products.
    A + "var.correction": ("var", "ulp"),
    A + "var.dim": ("var", "ulp"),
    A + "std.correction": ("std", "ulp"),
    A + "std.dim": ("std", "ulp"),
    A + "var_mean.correction": ("var_mean", "ulp"),
    A + "std_mean.correction": ("std_mean", "ulp"),
    A + "logsumexp.default": ("logsumexp", "ulp"),
    A + "norm.ScalarOpt_dim": (None, "ulp"),
    A + "count_nonzero.dim_IntList": ("count_nonzero", "bits"),
    A + "cumprod.default": ("cumprod", "ulp"),
    A + "cummax.default": ("cummax", "bits"),
    A + "cummin.default": ("cummin", "bits"),
    A + "mv.default": ("mv", "ulp"),
    A + "dot.default": ("dot", "ulp"),
    A + "addmv.default": ("addmv", "ulp"),
    A + "outer.default": ("outer", "bits"),
    A + "baddbmm.default": ("baddbmm", "ulp"),
    A + "cosine_similarity.default": (F + "cosine_similarity", "ulp"),
    # Shape and index.
    A + "repeat_interleave.self_int": (None, "bits"),
    A + "movedim.intlist": ("movedim", "bits"),
    A + "movedim.int": (None, "bits"),
    A + "swapaxes.default": (None, "bits"),
    A + "meshgrid.indexing": (None, "bits"),
    A + "one_hot.default": (None, "bits"),
    A + "eye.m": (None, "bits"),
    A + "linspace.default": (None, "ulp"),
    A + "rot90.default": ("rot90", "bits"),
    A + "diagonal.default": ("diagonal", "bits"),
    A + "unfold.default": ("unfold", "bits"),
    A + "narrow.default": ("narrow", "bits", _start_is_number),
    A + "tile.default": ("tile", "bits"),
    A + "pixel_shuffle.default": (F + "pixel_shuffle", "bits"),
    A + "pixel_unshuffle.default": (F + "pixel_unshuffle", "bits"),
    A + "channel_shuffle.default": (F + "channel_shuffle", "bits"),
    A + "index_add.default": ("index_add", "ulp"),
    A + "index_fill.int_Scalar": ("index_fill", "bits"),
    A + "scatter_reduce.two": ("scatter_reduce.sum", "ulp"),
    A + "masked_scatter.default": ("masked_scatter", "bits"),
    A + "bucketize.Tensor": ("bucketize", "bits"),
    A + "searchsorted.Tensor": ("searchsorted", "bits"),
    A + "isin.Tensor_Tensor": ("isin", "bits"),
    # Pooling and norms.
    A + "max_pool1d.default": (None, "bits"),
    A + "avg_pool1d.default": (F + "avg_pool1d", "ulp"),
    A + "adaptive_avg_pool1d.default": (F + "adaptive_avg_pool1d", "ulp"),
    A + "adaptive_max_pool1d.default": (None, "bits"),
    A + "adaptive_max_pool2d.default": (None, "bits"),
    A + "instance_norm.default": (None, "ulp"),
}


@only((*FLOATS, torch.int64, torch.int32))
def _reversed(dtype):
    yield (make(dtype, 3, 4), 2), {}
    yield (make(dtype, 3, 4), 3, 2), {}


@only(FLOATS)
def _weighted(dtype):
    yield (make(dtype, 2, 3, 4), make(dtype, 2, 3, 4, seed=2)), {}
    yield (make(dtype, 2, 3, 4), make(dtype, 1, 3, 1, seed=2)), {}


def _powers(dtype):
    for exponent in (2, 0.5, -1.0):
        yield (make(dtype, 3, 4), exponent), {}


@only(FLOATS)
def _dropped(dtype):
    yield (make(dtype, 2, 3, 4), 0.5, False), {}


def _padded(dtype):
    for shape, padding in [((2, 3, 5), (1, 2)), ((1, 2, 4, 5), (2, 1, 0, 3)), ((2, 3, 4), (1, 0, 2, 2))]:
        for mode in ("constant", "reflect", "replicate", "circular"):
            yield (make(dtype, *shape), padding, mode), {}
    yield (make(dtype, 3, 4), (1, -1, -1, 2), "constant", 2.0), {}
    yield (make(dtype, 3, 4), (-1, -1), "constant"), {}
    yield (make(dtype, 1, 2, 4, 5).contiguous(memory_format=torch.channels_last), (1, 1), "constant"), {}


def _padded_by(padding):
    @only((*FLOATS, torch.int64))
    def written(dtype):
        for lead in ((2, 3), (2,)):
            yield (make(dtype, *lead, *(5, 6)[: len(padding) // 2]), padding), {}

    return written


@only(FLOATS)
def _norms(dtype):
    for p, dims, keep in [(2, [1], False), (None, [0, 2], True), (1, [-1], False), (float("inf"), [], False)]:
        yield (make(dtype, 2, 3, 4), p, dims, keep), {}


def _interleaved(dtype):
    yield (make(dtype, 2, 3, 4), 2, 1), {}
    yield (make(dtype, 2, 3), 3), {}
    yield (make(dtype, 2, 3), 2, -1), {}


def _grids(dtype):
    for indexing in ("ij", "xy"):
        yield ([make(dtype, 3), make(dtype, 4, seed=1), make(dtype, 2, seed=2)],), {"indexing": indexing}
    yield ([make(dtype, 3), make(dtype)],), {"indexing": "xy"}


@only((torch.int64,))
def _classes(dtype):
    yield (index(5, 3, 2), 5), {}
    yield (index(2, 4), 7), {}


def _eyes(dtype):
    yield (3, 4), {"dtype": dtype}


@only(FLOATS)
def _lines(dtype):
    yield (0, 1, 7), {"dtype": dtype}
    yield (-2.5, 3, 4), {"dtype": dtype}
    yield (1, 5, 1), {"dtype": dtype}


@only(FLOATS + INTS)
def _windows(dtype):
    yield (make(dtype, 2, 3, 9), [3], [2], [1]), {}
    yield (make(dtype, 3, 8), [2]), {}
    yield (make(dtype, 1, 2, 10), [3], [2], [0], [2], True), {}


def _exchanged(dtype):
    yield (make(dtype, 2, 3, 4), 0, -1), {}
    yield (make(dtype, 2, 3, 4), 2, 1), {}


def _greatest(*sizes):
    @only(FLOATS)
    def written(dtype):
        for size in sizes:
            yield (make(dtype, 2, 3, 5, 7)[:, 0] if len(size) == 1 else make(dtype, 2, 3, 5, 7), list(size)), {}

    return written


@only(FLOATS)
def _instances(dtype):
    weights = make(dtype, 3, seed=3), make(dtype, 3, seed=4)
    yield (make(dtype, 2, 3, 4, 5), *weights, None, None, True, 0.1, 1e-5, False), {}
    yield (make(dtype, 2, 3, 7), None, None, None, None, True, 0.1, 1e-5, False), {}


OWN = {
    A + "rsub.Scalar": _reversed,
    A + "_prelu_kernel.default": _weighted,
    A + "float_power.Tensor_Scalar": _powers,
    A + "feature_dropout.default": _dropped,
    A + "dropout_.default": _dropped,
    A + "pad.default": _padded,
    A + "reflection_pad1d.default": _padded_by((1, 3)),
    A + "reflection_pad2d.default": _padded_by((1, 3, 2, 0)),
    A + "replication_pad1d.default": _padded_by((1, 7)),
    A + "replication_pad2d.default": _padded_by((-1, 7, 2, 0)),
    A + "norm.ScalarOpt_dim": _norms,
    A + "repeat_interleave.self_int": _interleaved,
    A + "movedim.int": _exchanged,
    A + "swapaxes.default": _exchanged,
    A + "adaptive_max_pool1d.default": _greatest((3,), (7,)),
    A + "adaptive_max_pool2d.default": _greatest((2, 3), (1, 7)),
    A + "meshgrid.indexing": _grids,
    A + "one_hot.default": _classes,
    A + "eye.m": _eyes,
    A + "linspace.default": _lines,
    A + "max_pool1d.default": _windows,
    A + "instance_norm.default": _instances,
}
