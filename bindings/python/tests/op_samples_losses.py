"""Operators of losses, diagonals and small products: whence their samples come, and how they are judged, as in `op_samples_more`."""

import torch
from op_samples_written import FLOATS, make, only

A = "aten."
F = "nn.functional."


def _drawn(names):
    return {A + f"{name}.default": (name, "bits") for name in names.split()}


def _spread(args, kwargs):
    """The tensors themselves, which torch's samples pass as arguments of their own."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return (tensors,), {}


ROWS = {
    # Losses.
    **{A + f"{name}.default": (None, "ulp") for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")},
    A + "kl_div.default": (None, "ulp"),
    A + "binary_cross_entropy.default": (None, "ulp"),
    A + "binary_cross_entropy_with_logits.default": (None, "ulp"),
    **{A + f"{name}.default": (None, "ulp") for name in ("nll_loss", "nll_loss_nd", "nll_loss2d", "cross_entropy_loss")},
    # Diagonals and triangles.
    **_drawn("diag_embed diag"),
    A + "tril_indices.default": (None, "bits"),
    A + "triu_indices.default": (None, "bits"),
    # Products.
    A + "cross.default": ("cross", "ulp"),
    A + "linalg_cross.default": ("linalg.cross", "ulp"),
    A + "kron.default": ("kron", "bits"),
    # Others.
    **_drawn("take_along_dim"),
    A + "broadcast_tensors.default": ("broadcast_tensors", "bits", _spread),
    A + "nansum.default": ("nansum", "ulp"),
    A + "nanmean.default": (None, "ulp"),
}


def _losses(*more):
    @only(FLOATS)
    def written(dtype):
        for reduction in (0, 1, 2):
            for rest in more or ((),):
                yield (make(dtype, 3, 4), make(dtype, 3, 4, seed=1), reduction, *rest), {}
        yield (make(dtype, 2, 3, 4), make(dtype, 3, 1, seed=1), 1), {}
        yield (make(dtype, 0, 3), make(dtype, 0, 3), 1), {}

    return written


@only(FLOATS)
def _divergences(dtype):
    for reduction in (0, 1, 2):
        target = make(dtype, 3, 4, seed=1).abs()
        target[0, 1] = 0
        yield (make(dtype, 3, 4), target, reduction), {}
        yield (make(dtype, 3, 4), make(dtype, 3, 4, seed=1), reduction), {"log_target": True}


@only(FLOATS)
def _binary(dtype):
    x, t = make(dtype, 3, 4).sigmoid(), make(dtype, 3, 4, seed=1).sigmoid()
    x[0, :2] = torch.tensor([0, 1]).to(dtype)
    for reduction in (0, 1, 2):
        yield (x, t, None, reduction), {}
        yield (x, t, make(dtype, 4, seed=2), reduction), {}


@only(FLOATS)
def _logits(dtype):
    x, t = make(dtype, 3, 4) * 20, make(dtype, 3, 4, seed=1).sigmoid()
    for reduction in (0, 1, 2):
        yield (x, t, None, None, reduction), {}
        yield (x, t, make(dtype, 3, 4, seed=2), make(dtype, 4, seed=3).abs(), reduction), {}


def _classes(smoothings, ranks=(1, 2, 3, 4)):
    @only(FLOATS)
    def written(dtype):
        for rank in ranks:
            shape = {1: (5,), 2: (4, 5), 3: (2, 5, 3), 4: (2, 5, 2, 3)}[rank]
            x = make(dtype, *shape)
            target = torch.arange(x[..., 0].numel() if rank == 2 else x.numel() // 5).reshape(shape[:1][: rank > 1] + shape[2:]) % 5
            masked = torch.where(target == 3, -100, target)
            for reduction in (0, 1, 2):
                for rest in smoothings:
                    yield (x, target, None, reduction, -100, *rest), {}
                    yield (x, masked, make(dtype, 5, seed=2).abs(), reduction, -100, *rest), {}
                    yield (x, target, make(dtype, 5, seed=2).abs(), reduction, 2, *rest), {}
                    if rest and rank > 1:
                        likely = make(dtype, *shape, seed=3).softmax(1)
                        yield (x, likely, None, reduction, -100, *rest), {}
                        yield (x, likely, make(dtype, 5, seed=2).abs(), reduction, -100, *rest), {}

    return written


def _triangles(dtype):
    if dtype in (torch.int64, torch.int32):
        for sizes in [(4, 5, 0), (5, 3, -2), (3, 4, 1), (2, 6, 3), (3, 3, -3), (3, 3, 9), (0, 2, 0), (4, 2, -1)]:
            yield sizes, {"dtype": dtype}


@only(FLOATS)
def _means(dtype):
    x = make(dtype, 3, 4, 2)
    x[0, 1], x[2] = float("nan"), float("nan")
    yield (x,), {}
    yield (x, [1]), {}
    yield (x, [0, 2], True), {}


_ONE = ((0.0,), (0.3,))
OWN = {
    A + "mse_loss.default": _losses(),
    A + "l1_loss.default": _losses(),
    A + "soft_margin_loss.default": _losses(),
    A + "smooth_l1_loss.default": _losses((1.0,), (0.4,), (0.0,)),
    A + "huber_loss.default": _losses((1.0,), (0.4,)),
    A + "kl_div.default": _divergences,
    A + "binary_cross_entropy.default": _binary,
    A + "binary_cross_entropy_with_logits.default": _logits,
    A + "nll_loss.default": _classes(((),), (1, 2)),
    A + "nll_loss_nd.default": _classes(((),)),
    A + "nll_loss2d.default": _classes(((),), (4,)),
    A + "cross_entropy_loss.default": _classes(_ONE),
    A + "tril_indices.default": _triangles,
    A + "triu_indices.default": _triangles,
    A + "nanmean.default": _means,
}
