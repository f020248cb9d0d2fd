"""Operators of volumes, sequences and distances: whence their samples come, and how they are judged, as in `op_samples_more`.

Few samples are taken in an ordinary run: the first ones have padding, steps, odd sizes, ties and NaN at once.
"""

import torch
from op_samples_nonfinite import members, of_numbers
from op_samples_written import FLOATS, make, only

A = "aten."
F = "nn.functional."

ROWS = {
    # Volumes.
    A + "conv3d.default": (F + "conv3d", "ulp"),
    A + "conv3d.padding": (F + "conv3d", "ulp"),
    A + "conv_transpose3d.input": (F + "conv_transpose3d", "ulp"),
    A + "max_pool3d.default": (None, "bits"),
    A + "max_pool3d_with_indices.default": (None, "bits"),
    A + "avg_pool3d.default": (None, "ulp"),
    A + "adaptive_avg_pool3d.default": (None, "ulp"),
    A + "_adaptive_avg_pool3d.default": (None, "ulp"),
    A + "adaptive_max_pool3d.default": (None, "bits"),
    # Resizing.
    **{A + f"upsample_{name}.vec": (None, "ulp") for name in ("linear1d", "trilinear3d", "bicubic2d")},
    **{A + f"_upsample_{name}2d_aa.vec": (None, "ulp") for name in ("bilinear", "bicubic")},
    **{A + f"upsample_nearest{n}d.vec": (None, "bits") for n in (1, 3)},
    **{A + f"_upsample_nearest_exact{n}d.vec": (None, "bits") for n in (1, 2, 3)},
    **{A + f"upsample_{name}.default": (None, "ulp") for name in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")},
    **{A + f"_upsample_{name}2d_aa.default": (None, "ulp") for name in ("bilinear", "bicubic")},
    **{A + f"{name}{n}d.default": (None, "bits") for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)},
    A + "grid_sampler_2d.default": (None, "ulp"),
    A + "grid_sampler_3d.default": (None, "ulp"),
    A + "grid_sampler.default": (None, "ulp"),
    # Patches.
    A + "im2col.default": (None, "bits"),
    A + "col2im.default": (None, "ulp"),
    # Sequences.
    **{A + f"{name}.input": (None, "ulp") for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{A + f"{name}_cell.default": (None, "ulp") for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    # Distances and ranks.
    A + "cdist.default": (None, "ulp"),
    A + "_cdist_forward.default": (None, "ulp"),
    A + "pairwise_distance.default": (None, "ulp"),
    **{A + f"{name}.{overload}": (None, "bits") for name in ("median", "nanmedian") for overload in ("default", "dim")},
    A + "kthvalue.default": (None, "bits"),
    A + "mode.default": ("mode", "bits"),
    A + "linalg_matrix_norm.str_ord": (None, "ulp"),
    A + "nuclear_norm.default": (None, "ulp"),
    A + "nuclear_norm.dim": (None, "ulp"),
    A + "_linalg_svd.default": (None, "ulp"),
    # Searches of numbers.
    A + "bucketize.Scalar": (None, "bits"),
    A + "searchsorted.Scalar": (None, "bits"),
    A + "isin.Tensor_Scalar": (None, "bits"),
    A + "isin.Scalar_Tensor": (None, "bits"),
    # Bags, and products of three.
    A + "embedding_bag.default": (None, "ulp"),
    A + "embedding_bag.padding_idx": (None, "ulp"),
    A + "_embedding_bag.default": (None, "ulp"),
    A + "_embedding_bag_forward_only.default": (None, "ulp"),
    A + "_trilinear.default": (None, "ulp"),
    # Products, joins and running sums.
    A + "addbmm.default": ("addbmm", "ulp"),
    **{A + f"{name}.default": (name, "bits") for name in ("hstack", "vstack", "dstack", "column_stack")},
    A + "logcumsumexp.default": (None, "ulp"),
    # Weights of a given length, and zeros.
    A + "_weight_norm.default": (None, "ulp"),
    A + "zero.default": (None, "bits"),
}


@only((*FLOATS, torch.int64))
def _windows(dtype):
    x = make(dtype, 2, 3, 5, 6, 7)
    if dtype.is_floating_point:
        x[0, 0, 2, 2:4, 4] = float("nan")
    yield (x, [2, 3, 3], [2, 1, 2], [1, 1, 0], [1, 1, 2], True), {}
    yield (x, [2], [2]), {}
    yield (x[0], [3, 2, 2]), {}
    yield (x.contiguous(memory_format=torch.channels_last_3d), [2, 2, 2]), {}


@only((torch.float64, torch.float32, torch.int64))
def _means(dtype):
    x = make(dtype, 2, 3, 5, 6, 7)
    yield (x, [2, 3, 3], [2, 1, 2], [1, 1, 0], True, True), {}
    yield (x, [2, 3, 3], [2, 1, 2], [1, 1, 0], True, False), {}
    yield (x[0], [2], [], [0], False, True, 5), {}


@only(FLOATS)
def _greatest(dtype):
    yield (make(dtype, 2, 3, 5, 6, 7), [2, 3, 4]), {}
    yield (make(dtype, 3, 4, 4, 5), [4, 1, 2]), {}


def _resized(spatial, *flags, images=FLOATS):
    """By factors and to sizes, up and down."""
    sizes = (5, 4, 6)[-spatial:]

    @only(images)
    def written(dtype):
        x = make(dtype, 2, 3, *sizes)
        for flag in [(True,), (False,)] if flags else [()]:
            yield (x, None, *flag, [2.0, 1.5, 0.6][:spatial]), {}
            yield (x, [7, 9, 3][:spatial], *flag, None), {}
            yield (x, [1, 12, 4][:spatial], *flag, None), {}
        if spatial > 1:
            form = torch.channels_last if spatial == 2 else torch.channels_last_3d
            yield (x.contiguous(memory_format=form), [3] * spatial, *flags, None), {}

    return written


def _by_name(spatial, *flags, images=FLOATS):
    """The same where each factor has a name."""

    @only(images)
    def written(dtype):
        x, to = make(dtype, 2, 3, *(5, 4, 6)[-spatial:]), [8, 9, 3][:spatial]
        yield (x, to, *flags, *(2.0, 1.6, 0.5)[:spatial]), {}
        yield (x, to, *flags), {}

    return written


@only(FLOATS)
def _sampled(dtype):
    for size in [(4, 5), (3, 4, 5)]:
        x = make(dtype, 2, 3, *size)
        grid = make(dtype, 2, *(2, 4, 3)[: len(size)], len(size), seed=1)
        for mode, border, corners in [(0, 2, False), (0, 0, False), (0, 1, True), (1, 0, True), (0, 2, True)]:
            yield (x, grid, mode, border, corners), {}
        if len(size) == 2:
            yield (x, grid, 2, 0, True), {}
            yield (x, grid, 2, 2, False), {}


def _of_layers(gates, states):
    """`lstm`, `gru`, `rnn`: one layer and two, both directions, batch first, projections of an LSTM."""

    @only(FLOATS)
    def written(dtype):
        for layers, both, first, biases, projected in [
            (2, True, True, True, False),
            (1, False, False, True, False),
            (1, True, False, False, False),
            (2, False, True, True, True),
        ]:
            if projected and states == 1:
                continue
            out, directions = 2 if projected else 3, 2 if both else 1
            params, seed = [], 10

            def weight(*shape):
                nonlocal seed
                seed += 1
                params.append(make(dtype, *shape, seed=seed) / 2)

            for layer in range(layers):
                for _ in range(directions):
                    weight(gates * 3, 4 if layer == 0 else out * directions)
                    weight(gates * 3, out)
                    for _ in range(2 if biases else 0):
                        weight(gates * 3)
                    if projected:
                        weight(out, 3)
            x = make(dtype, *((2, 5) if first else (5, 2)), 4)
            h, c = (make(dtype, layers * directions, 2, size, seed=size) for size in (out, 3))
            hidden = [h, c] if states == 2 else h
            yield (x, hidden, params, biases, layers, 0.0, False, both, first), {}

    return written


def _of_steps(gates, states):
    @only(FLOATS)
    def written(dtype):
        h = make(dtype, 2, 3, seed=1)
        hidden = [h, make(dtype, 2, 3, seed=2)] if states == 2 else h
        weights = make(dtype, gates * 3, 4, seed=3), make(dtype, gates * 3, 3, seed=4)
        yield (make(dtype, 2, 4), hidden, *weights), {}
        yield (make(dtype, 2, 4), hidden, *weights, make(dtype, gates * 3, seed=5), make(dtype, gates * 3, seed=6)), {}

    return written


@only(FLOATS)
def _columns(dtype):
    yield (make(dtype, 12, 4), [5, 4], [2, 2], [2, 1], [1, 0], [3, 2]), {}
    yield (make(dtype, 2, 12, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1]), {}


@only((*FLOATS, torch.bool))
def _images(dtype):
    yield (make(dtype, 2, 3, 5, 6), [2, 3], [1, 2], [1, 1], [2, 1]), {}
    yield (make(dtype, 3, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]), {}


def _ranked(*args):
    """An even number of elements, and rows with NaN."""

    @only((*FLOATS, torch.int64, torch.int32, torch.uint8))
    def written(dtype):
        x = make(dtype, 3, 6)
        if args and dtype.is_floating_point:
            x[1, 2:4] = x[2, :] = float("nan")
        yield (x, *args), {}
        yield (make(dtype, 5, 4).t(), *args), {}

    return written


@only(FLOATS)
def _running(dtype):
    yield (make(dtype, 3, 5), 1), {}
    yield (make(dtype, 3, 5) * float("inf"), 0), {}


@only((*FLOATS, torch.int64, torch.int32, torch.uint8))
def _distances(dtype):
    yield (make(dtype, 3, 5), make(dtype, 5, seed=1), 2.0, 0.5, True), {}
    yield (make(dtype, 2, 3, 5), make(dtype, 2, 3, 5, seed=1), 1.0), {}
    yield (make(dtype, 3, 5), make(dtype, 3, 5, seed=1)), {}


@only(FLOATS)
def _pairs(dtype):
    for p in (2.0, 1.0, 0.0, 3.0, float("inf")):
        yield (make(dtype, 2, 5, 3), make(dtype, 2, 4, 3, seed=1), p, None), {}


@only(FLOATS)
def _matrices(dtype):
    for order in ("fro", "nuc"):
        yield (make(dtype, 2, 3, 4), order), {}
        yield (make(dtype, 2, 3, 4), order, [0, 1], True), {}
        yield (make(dtype, 3, 4), order, [1, 0]), {"dtype": torch.float64}


@only(FLOATS)
def _sums_of_values(dtype):
    yield (make(dtype, 3, 5),), {}
    yield (make(dtype, 3, 5), True), {}


@only(FLOATS)
def _sums_of_values_along(dtype):
    yield (make(dtype, 2, 3, 5), [2, 0]), {}
    yield (make(dtype, 2, 3, 5), [0, 1], True), {}


@only((torch.float64, torch.float32))
def _values_alone(dtype):
    """Tall and wide, without the vectors."""
    yield (make(dtype, 2, 3, 5), False, False), {}
    yield (make(dtype, 5, 3), True, False), {}
    yield (make(dtype, 0, 3), False, False), {}


def _bags(*paddings):
    """Of sums, means and maxima; a bag without indices, and one of padding alone."""

    @only(FLOATS)
    def written(dtype):
        table, offsets = make(dtype, 7, 3), torch.tensor([0, 3, 3, 5, 6])
        indices = torch.tensor([1, 2, 5, 6, 0, 2, 3, 2])
        for padding in [(padding,) for padding in paddings] or [()]:
            for mode in (1, 2):
                yield (table, indices, offsets, False, mode, False, None, False, *padding), {}
            yield (table, indices.int(), offsets.int(), False, 2, False, None, False, *padding), {}
            yield (table, indices[:0], offsets[:2] * 0, False, 1, False, None, False, *padding), {}
            # torch's kernel for sums in bfloat16 leaves out a result that its tracer says is there.
            if dtype != torch.bfloat16:
                yield (table, indices, offsets, False, 0, False, None, False, *padding), {}
                yield (table, indices, offsets, False, 0, False, make(dtype, 8, seed=1), False, *padding), {}
        table = table.clone()
        table[2, 1], table[5, 0], table[3, 2] = float("nan"), float("inf"), -float("inf")
        for mode in (2, 1):
            yield (table, indices, offsets, False, mode, False, None, False, *paddings[:1]), {}

    return written


@only((*FLOATS, torch.int64))
def _products_of_three(dtype):
    a, b, c = make(dtype, 2, 3), make(dtype, 5, 3, 4, seed=1), make(dtype, 2, 4, seed=2)
    yield (a, b, c, [1, 3], [0], [1, 2], [2, 3]), {}
    yield (a, b, c, [1, 3], [0], [1, 2], [2], 0), {}
    yield (a, b, c, [1, 3], [0], [1, 2], []), {}


@only(FLOATS)
def _lengths(dtype):
    """Of the first dimension's slices, of the last one's, of the whole."""
    for dim, shape in [(2, (1, 1, 5)), (0, (4, 1, 1)), (-1, ())]:
        yield (make(dtype, 4, 3, 5), make(dtype, *shape, seed=1), dim), {}


def _zeroed(dtype):
    yield (make(dtype, 3, 5),), {}
    yield (make(dtype, 5, 3).t()[1:],), {}


_BYTES = (*FLOATS, torch.uint8)
_LAYERS = {"lstm": (4, 2), "gru": (3, 1), "rnn_tanh": (1, 1), "rnn_relu": (1, 1)}
OWN = {
    A + "max_pool3d.default": _windows,
    A + "max_pool3d_with_indices.default": _windows,
    A + "adaptive_max_pool3d.default": _greatest,
    A + "upsample_linear1d.vec": _resized(1, False),
    A + "upsample_trilinear3d.vec": _resized(3, False),
    A + "upsample_bicubic2d.vec": _resized(2, False),
    A + "_upsample_bilinear2d_aa.vec": _resized(2, False),
    A + "_upsample_bicubic2d_aa.vec": _resized(2, False),
    **{A + f"upsample_nearest{n}d.vec": _resized(n, images=_BYTES) for n in (1, 3)},
    **{A + f"_upsample_nearest_exact{n}d.vec": _resized(n, images=_BYTES) for n in (1, 2, 3)},
    A + "upsample_linear1d.default": _by_name(1, False),
    A + "upsample_bilinear2d.default": _by_name(2, False),
    A + "upsample_trilinear3d.default": _by_name(3, True),
    A + "upsample_bicubic2d.default": _by_name(2, True),
    A + "_upsample_bilinear2d_aa.default": _by_name(2, True),
    A + "_upsample_bicubic2d_aa.default": _by_name(2, False),
    **{A + f"upsample_nearest{n}d.default": _by_name(n, images=_BYTES) for n in (1, 2, 3)},
    **{A + f"_upsample_nearest_exact{n}d.default": _by_name(n, images=_BYTES) for n in (1, 2, 3)},
    **{A + f"grid_sampler{name}.default": _sampled for name in ("", "_2d", "_3d")},
    A + "avg_pool3d.default": _means,
    **{A + f"{name}adaptive_avg_pool3d.default": _greatest for name in ("", "_")},
    A + "im2col.default": _images,
    **{A + f"{name}.default": _ranked() for name in ("median", "nanmedian")},
    **{A + f"{name}.dim": _ranked(1, True) for name in ("median", "nanmedian")},
    A + "kthvalue.default": _ranked(3, 1, True),
    A + "logcumsumexp.default": _running,
    A + "_weight_norm.default": _lengths,
    A + "zero.default": _zeroed,
    A + "pairwise_distance.default": _distances,
    **{A + f"{name}.input": _of_layers(*kind) for name, kind in _LAYERS.items()},
    **{A + f"{name}_cell.default": _of_steps(*kind) for name, kind in _LAYERS.items()},
    A + "col2im.default": _columns,
    A + "cdist.default": _pairs,
    A + "_cdist_forward.default": _pairs,
    A + "linalg_matrix_norm.str_ord": _matrices,
    A + "bucketize.Scalar": of_numbers(True),
    A + "searchsorted.Scalar": of_numbers(False),
    A + "isin.Tensor_Scalar": members(False),
    A + "isin.Scalar_Tensor": members(True),
    A + "nuclear_norm.default": _sums_of_values,
    A + "nuclear_norm.dim": _sums_of_values_along,
    A + "_linalg_svd.default": _values_alone,
    A + "embedding_bag.default": _bags(),
    A + "embedding_bag.padding_idx": _bags(2, None, -1),
    **{A + f"_embedding_bag{name}.default": _bags(2, -1) for name in ("", "_forward_only")},
    A + "_trilinear.default": _products_of_three,
}
