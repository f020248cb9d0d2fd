"""Samples of every operator that the program zoo needs: torch's own (OpInfo), and written ones where torch has none.

`OVERLOADS` has one row an operator: whence its samples come and how its results are compared. `samples` gives (args, kwargs) for
a dtype, first the ordinary ones, then the same with tensors that are not contiguous.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import op_samples_losses
import op_samples_more
import op_samples_plain
import op_samples_special
import op_samples_systems
import op_samples_wider
import torch
from one_node import copy_of
from op_samples_written import SPECIAL, WRITTEN

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
# The most elements of a tensor in a sample.
MOST_ELEMENTS = 4096


@dataclass(frozen=True)
class Row:
    """How an operator is sampled and judged."""

    # The name of torch's OpInfo, or None where the samples are written here.
    opinfo: str | None
    # "bits": the same bits. "ulp": one unit in the last place, or the tolerance rule. "form": dtype and shape only.
    compare: str
    # Which of OpInfo's samples belong to this overload, and with which arguments.
    take: Callable | None = None


def _bool_condition(args, kwargs):
    """torch warns of a condition in uint8, and its tracer refuses it."""
    condition = next((leaf for leaf in args if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool), None)
    return None if condition is None else ((condition, *(leaf for leaf in args if leaf is not condition)), kwargs)


def _tensor_other(args, kwargs):
    return (args, kwargs) if len(args) > 1 and isinstance(args[1], torch.Tensor) else None


def _without_dropout(args, kwargs):
    return (args, kwargs) if not kwargs.get("dropout_p") else None


def _with_todays_bins(args, kwargs):
    """torch before 2.12 rounds the bin of the one number of a float16 tensor without dimensions otherwise."""
    other = torch.__version__ < "2.12" and args[0].dtype == torch.float16 and args[0].dim() == 0
    return None if other else (args, kwargs)


def _axis(args, kwargs):
    """`dim` must be given."""
    return (args, kwargs) if len(args) > 1 or "dim" in kwargs else None


def _duplicate_free(place):
    """Index samples without repeated indices: which of two writes wins is not defined."""

    def take(args, kwargs):
        index = args[place]
        indices = index if isinstance(index, (list, tuple)) else [index]
        for one in indices:
            if isinstance(one, torch.Tensor) and one.dtype != torch.bool and one.unique().numel() != one.numel():
                return None
        return (args, kwargs)

    return take


A = "aten."
OVERLOADS = {
    A + "linear.default": Row("nn.functional.linear", "ulp"),
    A + "add.Tensor": Row("add", "bits"),
    A + "slice.Tensor": Row(None, "bits"),
    A + "transpose.int": Row("transpose", "bits"),
    A + "reshape.default": Row("reshape", "bits"),
    A + "view.default": Row("view", "bits"),
    A + "embedding.default": Row(None, "bits"),
    A + "unsqueeze.default": Row("unsqueeze", "bits"),
    A + "_assert_tensor_metadata.default": Row(None, "bits"),
    A + "arange.default": Row(None, "bits"),
    A + "scaled_dot_product_attention.default": Row("nn.functional.scaled_dot_product_attention", "ulp", _without_dropout),
    A + "mul.Tensor": Row("mul", "bits"),
    A + "expand.default": Row("expand", "bits"),
    A + "to.device": Row(None, "bits"),
    A + "to.dtype": Row(None, "bits"),
    A + "to.dtype_layout": Row(None, "bits"),
    A + "cat.default": Row("cat", "bits"),
    A + "__and__.Tensor": Row("bitwise_and", "bits", _tensor_other),
    A + "index.Tensor": Row(None, "bits"),
    A + "new_ones.default": Row("new_ones", "bits"),
    A + "le.Tensor": Row("le", "bits"),
    A + "cos.default": Row("cos", "ulp"),
    A + "pow.Tensor_Scalar": Row(None, "ulp"),
    A + "sin.default": Row("sin", "ulp"),
    A + "mean.dim": Row("mean", "ulp", _axis),
    A + "neg.default": Row("neg", "bits"),
    A + "rsqrt.default": Row("rsqrt", "ulp"),
    A + "layer_norm.default": Row("nn.functional.layer_norm", "ulp"),
    A + "silu.default": Row("nn.functional.silu", "ulp"),
    A + "gelu.default": Row("nn.functional.gelu", "ulp"),
    A + "dropout.default": Row(None, "bits"),
    A + "select.int": Row("select", "bits"),
    A + "contiguous.default": Row("contiguous", "bits"),
    A + "ge.Scalar": Row(None, "bits"),
    A + "sub.Tensor": Row("sub", "bits"),
    A + "conv2d.default": Row("nn.functional.conv2d", "ulp"),
    A + "flatten.using_ints": Row("flatten", "bits"),
    A + "div.Tensor": Row("div.no_rounding_mode", "bits"),
    A + "softmax.int": Row("softmax", "ulp"),
    A + "tanh.default": Row("tanh", "ulp"),
    A + "add_.Tensor": Row("add", "bits"),
    A + "chunk.default": Row("chunk", "bits"),
    A + "cumsum.default": Row("cumsum", "ulp"),
    A + "gather.default": Row("gather", "bits"),
    A + "permute.default": Row("permute", "bits"),
    A + "sigmoid.default": Row("sigmoid", "ulp"),
    A + "sum.dim_IntList": Row("sum", "ulp", _axis),
    A + "where.ScalarOther": Row(None, "bits"),
    A + "zeros.default": Row(None, "bits"),
    A + "copy_.default": Row(None, "bits"),
    A + "index_copy_.default": Row("index_copy", "bits", _duplicate_free(2)),
    A + "relu.default": Row("nn.functional.relu", "bits"),
    A + "abs.default": Row("abs", "bits"),
    A + "empty_like.default": Row("empty_like", "form"),
    A + "floor_divide.default": Row("floor_divide", "bits"),
    A + "gt.Tensor": Row("gt", "bits"),
    A + "histc.default": Row("histc", "bits", _with_todays_bins),
    A + "matmul.default": Row("matmul", "ulp"),
    A + "repeat.default": Row("repeat", "bits"),
    A + "sort.default": Row("sort", "bits"),
    A + "split_with_sizes.default": Row("split_with_sizes", "bits"),
    A + "topk.default": Row("topk", "bits"),
    A + "type_as.default": Row(None, "bits"),
    A + "unbind.int": Row("unbind", "bits"),
    A + "zeros_like.default": Row("zeros_like", "bits"),
    "transformers.grouped_mm_fallback.default": Row(None, "ulp"),
    A + "alias.default": Row(None, "bits"),
    A + "index_put_.default": Row("index_put", "bits", _duplicate_free(1)),
    A + "split.Tensor": Row("split", "bits"),
    A + "adaptive_avg_pool2d.default": Row("nn.functional.adaptive_avg_pool2d", "ulp"),
    A + "addmm.default": Row("addmm", "ulp"),
    A + "argmax.default": Row("argmax", "bits"),
    A + "avg_pool2d.default": Row("nn.functional.avg_pool2d", "ulp"),
    A + "bitwise_not.default": Row("bitwise_not", "bits"),
    A + "bmm.default": Row("bmm", "ulp"),
    A + "clamp.default": Row(None, "bits"),
    A + "clamp_min.default": Row(None, "bits"),
    A + "conv1d.default": Row("nn.functional.conv1d", "ulp"),
    A + "conv2d.padding": Row("nn.functional.conv2d", "ulp"),
    A + "conv_transpose2d.input": Row("nn.functional.conv_transpose2d", "ulp"),
    A + "diff.default": Row("diff", "ulp"),  # torch rounds each of the repeated differences
    A + "einsum.default": Row(None, "ulp"),
    A + "eq.Tensor": Row("eq", "bits"),
    A + "exp.default": Row("exp", "ulp"),
    A + "full_like.default": Row("full_like", "bits"),
    A + "group_norm.default": Row("nn.functional.group_norm", "ulp"),
    A + "gt.Scalar": Row(None, "bits"),
    A + "le.Scalar": Row(None, "bits"),
    A + "linalg_vector_norm.default": Row("linalg.vector_norm", "ulp"),
    A + "log.default": Row("log", "ulp"),
    A + "lt.Scalar": Row(None, "bits"),
    A + "masked_fill.Scalar": Row("masked_fill", "bits"),
    A + "max_pool2d.default": Row(None, "bits"),
    A + "min.other": Row("minimum", "bits"),
    A + "ne.Scalar": Row(None, "bits"),
    A + "new_empty.default": Row("new_empty", "form"),
    A + "squeeze.dim": Row("squeeze", "bits", _axis),
    A + "upsample_bilinear2d.vec": Row(None, "ulp"),
    A + "upsample_nearest2d.vec": Row(None, "bits"),
    A + "where.self": Row("where", "bits", _bool_condition),
    A + "batch_norm.default": Row(None, "ulp"),
    A + "detach_.default": Row(None, "bits"),
    A + "div_.Tensor": Row("div.no_rounding_mode", "bits"),
    A + "expand_as.default": Row("expand_as", "bits"),
    A + "lift_fresh_copy.default": Row(None, "bits"),
    A + "relu_.default": Row("nn.functional.relu", "bits"),
    A + "scatter_.value": Row("scatter", "bits"),
    A + "unflatten.int": Row("unflatten", "bits"),
    A + "_to_copy.default": Row(None, "bits"),
    A + "clone.default": Row("clone", "bits"),
    A + "_unsafe_view.default": Row(None, "bits"),
    A + "index_put.default": Row("index_put", "bits", _duplicate_free(1)),
    A + "_native_batch_norm_legit_no_training.default": Row(None, "ulp"),
    A + "copy.default": Row(None, "bits"),
    A + "index_copy.default": Row("index_copy", "bits", _duplicate_free(2)),
    A + "scatter.value": Row("scatter", "bits"),
    A + "slice_scatter.default": Row(None, "bits"),
    A + "_softmax.default": Row(None, "ulp"),
    A + "any.dim": Row("any", "bits", _axis),
    # torch adds steps to the first element of each vector, so that its bits depend on the machine's vectors.
    A + "arange.start_step": Row(None, "ulp"),
    A + "bitwise_and.Tensor": Row("bitwise_and", "bits", _tensor_other),
    A + "convolution.default": Row(None, "ulp"),
    A + "div.Tensor_mode": Row("div.floor_rounding", "bits"),
    A + "empty.memory_format": Row(None, "form"),
    A + "empty_permuted.default": Row(None, "form"),
    A + "eq.Scalar": Row(None, "bits"),
    A + "full.default": Row(None, "bits"),
    A + "logical_not.default": Row("logical_not", "bits"),
    A + "max_pool2d_with_indices.default": Row(None, "bits"),
    A + "minimum.default": Row("minimum", "bits"),
    A + "mm.default": Row("mm", "ulp"),
    A + "mul.Scalar": Row(None, "bits"),
    A + "native_group_norm.default": Row(None, "ulp"),
    A + "native_layer_norm.default": Row("native_layer_norm", "ulp"),
    A + "scalar_tensor.default": Row(None, "bits"),
    A + "squeeze.dims": Row(None, "bits"),
}
# Operators that the zoo's programs do not need, and others do.
_FILES = (op_samples_more, op_samples_wider, op_samples_losses, op_samples_plain, op_samples_special, op_samples_systems)
MORE = {name: Row(*row) for file in _FILES for name, row in file.ROWS.items()}
OWN = {name: written for file in _FILES for name, written in getattr(file, "OWN", {}).items()}
# What is no operator on tensors: the arithmetic of sizes and the parts of a result. The zoo's programs have them.
NOT_ON_TENSORS = {"_operator.getitem", "_operator.mul", "_operator.add", "aten.sym_size.int"}


# Functions of one tensor whose ends and special values are tried too.
SPECIAL_VALUES = {
    A + f"{name}.default"
    for name in ("cos", "sin", "tanh", "exp", "log", "rsqrt", "sigmoid", "silu", "gelu", "neg", "abs", "relu", "logical_not")
} | {
    A + f"{name}.default"
    for name in (
        *("hardswish", "hardsigmoid", "leaky_relu", "elu", "selu", "celu", "softplus", "mish", "hardshrink", "softshrink"),
        *("relu6", "hardtanh", "log_sigmoid", "logit", "nan_to_num", "isfinite", "frac", "erfc", "sinh", "cosh", "asin"),
        *("acos", "atan", "asinh", "acosh", "atanh"),
    )
}


def overload_of(name):
    """torch's overload of this name."""
    if name.startswith("transformers."):
        import transformers.integrations.moe  # noqa: F401: defines the operator
    space, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), op), overload)


def _opinfos():
    from torch.testing._internal.common_methods_invocations import op_db

    return {".".join(filter(None, [info.name, info.variant_test_name])): info for info in op_db}


_OPINFOS: dict = {}


def opinfo(name):
    """torch's OpInfo of this name."""
    if not _OPINFOS:
        _OPINFOS.update(_opinfos())
    return _OPINFOS[name]


def _is_small(args, kwargs):
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return all(tensor.numel() <= MOST_ELEMENTS and not tensor.is_complex() for tensor in tensors)


def strided(tensor):
    """The same values with gaps between them, as a view from the middle of a storage. Expanded tensors stay."""
    if tensor.dim() == 0:
        wide = torch.empty(3, dtype=tensor.dtype)
        wide.copy_(tensor.expand(3))
        return wide[1]
    wide = tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
    wide.copy_(torch.zeros((), dtype=tensor.dtype).expand(wide.shape))
    view = wide[..., 1::2]
    view.copy_(tensor)
    return view


def permuted(tensor):
    """The same values, stored with the dimensions in reverse order."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _from_opinfo(row, dtype):
    info = opinfo(row.opinfo)
    if dtype not in info.dtypes:
        return
    # Without what torch's test suite wraps around it, which looks for a unittest in every frame of the stack, each time.
    torch.manual_seed(0)
    for sample in info.sample_inputs_func(info, "cpu", dtype, False):
        taken = ((sample.input, *sample.args), dict(sample.kwargs))
        if isinstance(taken[1].get("device"), str):
            # As in a program, where a device is no text.
            taken[1]["device"] = torch.device(taken[1]["device"])
        if row.take is not None:
            taken = row.take(*taken)
        if taken is not None and _is_small(*taken):
            yield taken


def _accepts(overload, args, kwargs):
    """Whether this is a call of the overload: its schema takes the arguments, and the operator the values."""
    try:
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        leaves = [copy_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        copied, named = torch.utils._pytree.tree_unflatten(leaves, spec)
        overload(*copied, **named)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return False
    return True


def samples(name, dtype, most=math.inf):
    """At most `most` samples of an operator in a dtype, and as many again that are not contiguous."""
    overload, row = overload_of(name), OVERLOADS.get(name) or MORE[name]
    special = (((value,), {}) for value in SPECIAL(dtype)) if name in SPECIAL_VALUES else ()
    written = WRITTEN.get(name) or OWN.get(name)
    source = written(dtype) if row.opinfo is None else _from_opinfo(row, dtype)
    accepted = (sample for sample in itertools.chain(special, source) if _accepts(overload, *sample))
    taken = list(itertools.islice(accepted, None if most == math.inf else 4 * most))
    # Spread over what torch offers: its first samples are often of one kind.
    if len(taken) > most:
        step = len(taken) / most
        taken = [taken[int(i * step)] for i in range(most)]
    yield from taken
    for lie in (strided, permuted):

        def move(leaf, lie=lie):
            return lie(leaf) if isinstance(leaf, torch.Tensor) else leaf

        for sample in taken:
            moved = torch.utils._pytree.tree_map(move, sample)
            if _accepts(overload, *moved):
                yield moved
