"""Operators that need no samples of their own: those of torch's OpInfo of the same name, judged as in `op_samples_more`."""

A = "aten."
F = "nn.functional."


def _of(comparison, names, overload="default"):
    return {A + f"{name}.{overload}": (name, comparison) for name in names.split()}


ROWS = {
    # Pointwise.
    **_of("bits", "ceil floor trunc sign sgn square isnan isinf logical_and logical_or logical_xor maximum positive reciprocal"),
    # torch's vectors of roots of float32 are one unit off here and there.
    A + "sqrt.default": ("sqrt", "ulp"),
    **_of("bits", "clamp_max fmod remainder bitwise_or bitwise_xor true_divide", "Tensor"),
    A + "__or__.Tensor": ("bitwise_or", "bits"),
    A + "__xor__.Tensor": ("bitwise_xor", "bits"),
    **_of("ulp", "erf exp2 expm1 log10 log1p log2 tan"),
    A + "round.default": ("round", "bits"),
    # Reductions and order.
    **_of("bits", "amax amin argmin argsort"),
    A + "all.default": ("all", "bits"),
    A + "all.dim": ("all", "bits"),
    A + "max.dim": ("max.reduction_with_dim", "bits"),
    A + "max.default": ("max.reduction_no_dim", "bits"),
    A + "prod.dim_int": ("prod", "ulp"),
    A + "prod.default": ("prod", "ulp"),
    A + "log_softmax.int": ("log_softmax", "ulp"),
    # Shape and place.
    **_of("bits", "broadcast_to flip fliplr flipud index_select roll stack t tril triu unsafe_chunk view_as"),
    **_of("bits", "as_strided diagonal_scatter ravel reshape_as select_scatter"),
    A + "unsafe_split.Tensor": ("unsafe_split", "bits"),
    # Norms and convolutions.
    A + "rms_norm.default": (F + "rms_norm", "ulp"),
    A + "conv_transpose1d.default": (F + "conv_transpose1d", "ulp"),
    A + "linalg_norm.default": ("linalg.norm", "ulp"),
    A + "linalg_norm.ord_str": ("linalg.norm", "ulp"),
    A + "linalg_matrix_norm.default": ("linalg.matrix_norm", "ulp"),
    A + "linalg_svdvals.default": ("linalg.svdvals", "ulp"),
    A + "bilinear.default": (F + "bilinear", "ulp"),
}
