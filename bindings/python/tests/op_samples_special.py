"""Operators of special functions, of parts of tensors, of bits, and of two dtypes: whence their samples come, and how they are judged, as in `op_samples_more`."""

import torch
from op_samples_written import EVERY, FLOATS, INTS, make, only

A = "aten."


def _of(comparison, names, prefix=""):
    return {A + f"{prefix}{name}.default": (f"{'special.' if prefix else ''}{name}", comparison) for name in names.split()}


def _floats(args, kwargs):
    """Of integers torch computes these in float32 alone, of which few digits are right."""
    return (args, kwargs) if args[0].dtype.is_floating_point else None


def _by(what):
    """Parts by a number (an integer) or by indices (a list)."""
    return lambda args, kwargs: (args, kwargs) if isinstance(args[1], what) else None


ROWS = {
    **_of("ulp", "erfinv lgamma i0"),
    **{A + f"{name}.default": (name, "ulp", _floats) for name in ("digamma", "sinc")},
    **_of("ulp", "erfcx ndtr ndtri entr xlog1py i0e i1 i1e zeta", "special_"),
    A + "special_log_ndtr.default": ("special.log_ndtr", "ulp", _floats),
    A + "polygamma.default": (None, "ulp"),
    A + "mvlgamma.default": ("mvlgamma.mvlgamma_p_3", "ulp", _floats),
    A + "round.decimals": (None, "bits"),
    A + "ldexp.Tensor": ("ldexp", "ulp"),
    **_of("bits", "nextafter gcd lcm isclose signbit heaviside aminmax"),
    # Parts and views.
    A + "tensor_split.sections": ("tensor_split", "bits", _by(int)),
    A + "tensor_split.indices": ("tensor_split", "bits", _by((list, tuple))),
    **{A + f"{name}.int": (name, "bits", _by(int)) for name in ("hsplit", "vsplit", "dsplit")},
    **{A + f"{name}.array": (name, "bits", _by((list, tuple))) for name in ("hsplit", "vsplit", "dsplit")},
    **{A + f"atleast_{n}d.default": (None, "bits") for n in (1, 2, 3)},
    A + "linalg_diagonal.default": ("linalg.diagonal", "bits"),
    A + "transpose_.default": ("transpose", "bits"),
    A + "t_.default": ("t", "bits"),
    A + "unsqueeze_.default": ("unsqueeze", "bits"),
    A + "squeeze_.dim": ("squeeze", "bits", lambda args, kwargs: (args, kwargs) if len(args) > 1 and isinstance(args[1], int) else None),
    A + "as_strided_scatter.default": (None, "bits"),
    A + "view.dtype": (None, "bits"),
    # By index, and in order.
    A + "take.default": ("take", "bits"),
    A + "put.default": ("put", "ulp", lambda args, kwargs: (args, kwargs) if args[1].unique().numel() == args[1].numel() or kwargs.get("accumulate") or args[3:] else None),
    A + "index_reduce.default": (None, "ulp"),
    A + "repeat_interleave.self_Tensor": (None, "bits"),
    A + "repeat_interleave.Tensor": (None, "bits"),
    A + "quantile.default": ("quantile", "ulp"),
    A + "quantile.scalar": ("quantile", "ulp"),
    A + "nanquantile.default": (None, "ulp"),
    # Products, distances and diagonals.
    **_of("ulp", "inner addr dist"),
    A + "tensordot.default": (None, "ulp"),
    A + "linalg_vecdot.default": ("linalg.vecdot", "ulp"),
    A + "linalg_multi_dot.default": ("linalg.multi_dot", "ulp"),
    A + "linalg_matrix_power.default": (None, "ulp"),
    A + "pdist.default": (None, "ulp"),
    A + "diagflat.default": ("diagflat", "bits"),
    A + "renorm.default": ("renorm", "ulp"),
    A + "embedding_renorm_.default": (None, "ulp"),
    A + "max_unpool2d.default": (None, "bits"),
    A + "max_unpool3d.default": (None, "bits"),
    A + "affine_grid_generator.default": (None, "ulp"),
    A + "poisson_nll_loss.default": (None, "ulp"),
    A + "_native_batch_norm_legit.no_stats": (None, "ulp"),
    # Losses with a margin.
    **{A + f"{name}.default": (None, "ulp") for name in ("margin_ranking_loss", "hinge_embedding_loss", "cosine_embedding_loss", "triplet_margin_loss")},
    # What has no way of its own to write into a tensor.
    A + "cumsum_.default": ("cumsum", "ulp"),
    A + "tril_.default": ("tril", "bits"),
    A + "erfinv_.default": ("erfinv", "ulp"),
    A + "add.out": (None, "bits"),
    A + "matmul.out": (None, "ulp"),
    # Two dtypes.
    **{A + f"{name}_.Tensor": (None, "bits") for name in ("sub", "mul", "bitwise_and", "remainder", "eq", "copysign")},
    A + "maximum.default": (None, "bits"),
    A + "atan2_.default": (None, "ulp"),
    A + "addcmul_.default": (None, "ulp"),
    A + "xlogy_.Tensor": (None, "ulp"),
    A + "clamp.Tensor": (None, "bits"),
    A + "clamp_.Tensor": (None, "bits"),
}


@only(FLOATS)
def _polygammas(dtype):
    for n in (0, 1, 2, 4):
        yield (n, make(dtype, 3, 5).abs() + 1), {}
    yield (1, torch.tensor([-0.5, -1.25, 0.0, 0.1, 30.0, 1e4, float("inf"), float("nan")], dtype=dtype)), {}
    yield (2, torch.tensor([-0.5, -1.25, 0.1, 30.0], dtype=dtype)), {}


@only((*FLOATS, *INTS))
def _rounded(dtype):
    x = make(dtype, 40)
    for digits in (0, 1, 3, -1, -3):
        yield (x * 1000 if dtype.is_floating_point and digits < 0 else x,), {"decimals": digits}


def _few(dtype):
    for shape in ((), (3,), (2, 3), (2, 3, 4), (1, 2, 3, 2)):
        yield (make(dtype, *shape),), {}


def _strided(dtype):
    x = make(dtype, 4, 6)
    yield (x, make(dtype, 2, 3, seed=1), (2, 3), (6, 2), 1), {}
    yield (x, make(dtype, 3, seed=1), (3,), (7,)), {}


def _bits(dtype):
    for to in EVERY:
        if to == torch.bool and dtype != torch.bool:
            continue
        for x in (make(dtype, 3, 8), make(dtype, 2, 3, 8).transpose(0, 1)):
            yield (x, to), {}
        yield (make(dtype), to), {}


def _mixed(*more, others=EVERY):
    """Each dtype with each other, of equal ranks and of others; what torch refuses is no sample."""

    def written(dtype):
        for other in others:
            x, y = make(dtype, 3, 4), make(other, 3, 4, seed=1)
            rest = [make(other, 4, seed=2 + n) for n in range(len(more))]
            yield (x, y, *rest), {}
            yield (x, y[:1], *rest), {}
            yield (x, make(other, seed=3), *rest), {}

    return written


def _large(dtype):
    """Where the dtype in which it is computed shows."""
    yield from _mixed()(dtype)
    if dtype in (torch.float32, torch.int32):
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        values = [1 + 2.0**-52, 2.0**40 + 1, 3.5] if dtype.is_floating_point else [2**40 + 3, 2**32 - 1, 5]
        yield (torch.tensor([1, 3, 7]).to(dtype), torch.tensor(values, dtype=wide)), {}


@only((*FLOATS, *INTS))
def _clamped(dtype):
    x = make(dtype, 3, 4)
    for other in (*FLOATS, *INTS):
        low, high = make(other, 3, 4, seed=1), make(other, 4, seed=2)
        yield (x, low, None), {}
        yield (x, None, high), {}
        yield (x, low, high), {}
        yield (x, make(torch.float64, 3, 1, seed=4), make(other, 4, seed=5)), {}


def _slices_joined(dtype):
    if dtype == torch.bool:
        return
    for how in ("prod", "mean", "amax", "amin"):
        for own in (True, False):
            yield (make(dtype, 3, 4), 0, torch.tensor([2, 0, 2]), make(dtype, 3, 4, seed=1), how), {"include_self": own}
            yield (make(dtype, 2, 3, 2), 1, torch.tensor([1, 1]), make(dtype, 2, 2, 2, seed=1), how), {"include_self": own}


@only((torch.float64, torch.float32))
def _quantiles(dtype):
    x = make(dtype, 4, 5, 3)
    x[1, 2, 0], x[:, 1, 1] = float("nan"), float("nan")
    q = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=dtype)
    for how in ("linear", "lower", "higher", "midpoint", "nearest"):
        yield (x, q, 1), {"interpolation": how}
        yield (x, q[1], -1, True), {"interpolation": how}
        yield (x, q), {"interpolation": how}


@only(FLOATS)
def _powers(dtype):
    for n in (0, 1, 2, 5):
        yield (make(dtype, 2, 3, 3) / 2, n), {}


@only((torch.float64, torch.float32))
def _among(dtype):
    for p in (2.0, 0.0, 1.0, 3.0, float("inf")):
        yield (make(dtype, 5, 3), p), {}
    yield (make(dtype, 1, 3),), {}


@only(FLOATS)
def _ranked(dtype):
    sign = make(dtype, 3, 4, seed=5).sign()
    for reduction in (0, 1, 2):
        yield (make(dtype, 3, 4), make(dtype, 3, 4, seed=1), sign, 0.5, reduction), {}
        yield (make(dtype, 3, 1), make(dtype, 4, seed=1), sign, 0.0, reduction), {}


@only(FLOATS)
def _hinges(dtype):
    sign = make(dtype, 3, 4, seed=5).sign()
    for reduction in (0, 1, 2):
        yield (make(dtype, 3, 4), sign, 1.5, reduction), {}


@only(FLOATS)
def _angles(dtype):
    for reduction in (0, 1, 2):
        yield (make(dtype, 3, 4), make(dtype, 3, 4, seed=1), torch.tensor([1, -1, 1]).to(dtype), 0.1, reduction), {}
    yield (make(dtype, 4), make(dtype, 4, seed=1), torch.tensor(-1).to(dtype), -0.5, 0), {}


@only(FLOATS)
def _triplets(dtype):
    x = [make(dtype, 3, 4, seed=n) for n in range(3)]
    for reduction in (0, 1, 2):
        yield (*x, 1.0, 2.0, 1e-6, False, reduction), {}
        yield (*x, 0.3, 1.0, 1e-6, True, reduction), {}


def _into(dtype):
    x, y = make(dtype, 3, 4), make(dtype, 4, seed=1)
    yield (x, y), {"out": torch.zeros(3, 4, dtype=dtype)}
    yield (x, y), {"out": torch.zeros(4, 3, dtype=dtype).t()}


@only((*FLOATS, *INTS))
def _contracted(dtype):
    yield (make(dtype, 2, 3, 4), make(dtype, 4, 3, 5, seed=1), [1, 2], [1, 0]), {}
    yield (make(dtype, 2, 3), make(dtype, 3, 4, seed=1), [1], [0]), {}
    yield (make(dtype, 2, 3), make(dtype, 4, seed=1), [], []), {}


@only(FLOATS)
def _product_into(dtype):
    yield (make(dtype, 3, 4), make(dtype, 4, 2, seed=1)), {"out": torch.zeros(3, 2, dtype=dtype)}


def _repeated(dtype):
    x, times = make(dtype, 3, 4), torch.tensor([2, 0, 3])
    yield (x, times, 0), {"output_size": 5}
    yield (x, times.int(), 0), {"output_size": 5}
    yield (x, torch.tensor([2]), 1), {"output_size": 8}
    yield (x[0], torch.tensor([1, 0, 2, 1])), {"output_size": 4}


def _counted(dtype):
    if dtype in (torch.int64, torch.int32):
        yield (torch.tensor([2, 0, 3], dtype=dtype),), {"output_size": 5}


@only((torch.float64, torch.float32))
def _shortened(dtype):
    for p in (1.0, 2.0, 3.0):
        yield (make(dtype, 6, 4), torch.tensor([[0, 5], [3, 0]]), 1.0, p), {}


def _unpooled(sizes):
    @only((*FLOATS, torch.int64))
    def written(dtype):
        for lead in ((2, 3), (3,)):
            small = tuple(n // 2 for n in sizes)
            places = torch.randperm(torch.tensor(sizes).prod().item(), generator=torch.Generator().manual_seed(3))
            count = torch.tensor(small).prod().item()
            indices = places[:count].reshape(small).expand(*lead, *small).contiguous()
            more = ([2] * 3, [0] * 3) if len(sizes) == 3 else ()
            yield (make(dtype, *lead, *small), indices, list(sizes), *more), {}

    return written


@only((torch.float64, torch.float32))
def _affine(dtype):
    for corners in (True, False):
        yield (make(dtype, 2, 2, 3), [2, 3, 4, 5], corners), {}
        yield (make(dtype, 2, 2, 3), [2, 3, 1, 2], corners), {}
        yield (make(dtype, 2, 3, 4), [2, 1, 3, 4, 2], corners), {}


@only(FLOATS)
def _counts(dtype):
    for reduction in (0, 1, 2):
        for full in (True, False):
            x, t = make(dtype, 3, 4), make(dtype, 3, 4, seed=1).abs() * 3
            yield (x, t, True, full, 1e-8, reduction), {}
            yield (x.abs(), t, False, full, 1e-3, reduction), {}


@only(FLOATS)
def _batches(dtype):
    for shape in ((1, 6, 4, 5), (3, 2, 4, 5), (4, 3)):
        weights = make(dtype, shape[1], seed=1), make(dtype, shape[1], seed=2)
        yield (make(dtype, *shape), *weights, True, 0.1, 1e-5), {}
        yield (make(dtype, *shape), None, None, True, 0.1, 1e-3), {}


OWN = {
    A + "_native_batch_norm_legit.no_stats": _batches,
    A + "repeat_interleave.self_Tensor": _repeated,
    A + "repeat_interleave.Tensor": _counted,
    A + "embedding_renorm_.default": _shortened,
    A + "max_unpool2d.default": _unpooled((4, 6)),
    A + "max_unpool3d.default": _unpooled((4, 2, 6)),
    A + "affine_grid_generator.default": _affine,
    A + "poisson_nll_loss.default": _counts,
    A + "index_reduce.default": _slices_joined,
    A + "nanquantile.default": _quantiles,
    A + "linalg_matrix_power.default": _powers,
    A + "pdist.default": _among,
    A + "margin_ranking_loss.default": _ranked,
    A + "hinge_embedding_loss.default": _hinges,
    A + "cosine_embedding_loss.default": _angles,
    A + "triplet_margin_loss.default": _triplets,
    A + "add.out": _into,
    A + "tensordot.default": _contracted,
    A + "matmul.out": _product_into,
    A + "polygamma.default": _polygammas,
    A + "round.decimals": _rounded,
    **{A + f"atleast_{n}d.default": _few for n in (1, 2, 3)},
    A + "as_strided_scatter.default": _strided,
    A + "view.dtype": _bits,
    **{A + f"{name}_.Tensor": _large for name in ("sub", "mul", "bitwise_and", "remainder", "eq", "copysign")},
    A + "maximum.default": _large,
    A + "atan2_.default": _mixed(),
    A + "xlogy_.Tensor": _mixed(),
    A + "addcmul_.default": _mixed(1),
    A + "clamp.Tensor": _clamped,
    A + "clamp_.Tensor": _clamped,
}
