"""Samples with NaN and infinities, where an operator's kernel decides what they do: resizing, sampling, distances, searches,
moments, modes, padding, products of three.

`SAMPLES` has (args, kwargs) of each case for a dtype. Few are needed in float16 and bfloat16: the kernels are the same.
"""

import torch
from op_samples_written import FLOATS, make, only

A = "aten."
NAN, INF = float("nan"), float("inf")


def marked(x, *values, seed=0):
    """The tensor with these values at places of their own."""
    x, generator = x.clone(memory_format=torch.preserve_format), torch.Generator().manual_seed(seed)
    for value in values or (NAN, INF, -INF):
        x[tuple(int(torch.randint(0, size, (1,), generator=generator)) for size in x.shape)] = value
    return x


def _resized(spatial, *flags, sizes=((9, 8, 7), (3, 12, 5), (1, 2, 3))):
    def written(dtype):
        shape = (2, 3, *(4, 5, 6)[-spatial:])
        lasts = {2: [torch.channels_last], 3: [torch.channels_last_3d]}.get(spatial, [])
        for seed in range(3):
            x = marked(make(dtype, *shape, seed=seed), seed=seed)
            for to in (*(size[:spatial] for size in sizes), shape[2:], tuple(2 * n for n in shape[2:])):
                for form in [torch.contiguous_format, *lasts]:
                    for flag in [(True,), (False,)] if flags else [()]:
                        yield (x.contiguous(memory_format=form), list(to), *flag, None), {}

    return written


def _distances(dtype):
    for seed in range(3):
        x, y = marked(make(dtype, 2, 5, 3, seed=seed), seed=seed), marked(make(dtype, 2, 4, 3, seed=seed + 9), INF, seed=seed)
        many, others = make(dtype, 30, 3), marked(make(dtype, 7, 3, seed=1), INF, -INF, seed=seed)
        for p in (0.0, 0.5, 1.0, 2.0, 3.0, INF):
            yield (x, y, p, None), {}
            yield (x, x, p, None), {}
            yield (many, others, p, None), {}
        for mode in (0, 1, 2):
            yield (x, y, 2.0, mode), {}


def _sampled(dtype):
    for size in ((4, 5), (3, 4, 5)):
        for seed in range(2):
            image = make(dtype, 2, 3, *size, seed=seed)
            grid = make(dtype, 2, *(3, 4, 3)[: len(size)], len(size), seed=seed + 1)
            for mode in (0, 1) if len(size) == 3 else (0, 1, 2):
                for border in (0, 1, 2):
                    for corners in (True, False):
                        yield (marked(image, seed=seed), grid, mode, border, corners), {}
                        yield (image, marked(grid, seed=seed), mode, border, corners), {}
                    # So far away that an element has no neighbour in this dtype.
                    if border < 2 and mode < 2:
                        yield (image, marked(grid, 2.0**30, -(2.0**45), seed=seed), mode, border, False), {}


def _near(dtype):
    """Places in the middle between two elements, inside and outside, as the dtype rounds them."""
    for size in (1, 2, 3, 5, 8):
        halves = torch.arange(-2 * size, 4 * size + 1) + 0.5
        places = torch.cat([torch.linspace(-3, 3, 31), halves * 2 / max(size - 1, 1) - 1, (halves + 0.5) * 2 / size - 1])
        for rank in (2, 3):
            image = make(dtype, 1, 2, *(1, 1, size)[-rank:])
            grid = torch.zeros(1, *(1,) * (rank - 1), len(places), rank, dtype=dtype)
            grid[..., 0] = places.to(dtype)
            for border in (0, 1, 2):
                for corners in (True, False):
                    yield (image, grid, 1, border, corners), {}


def _grids(dtype):
    yield from _sampled(dtype)
    yield from _near(dtype)


def _moments(dtype):
    """Infinities and NaN at the first place, in the middle and at the last, alone and beside others."""
    for shape, dims in (((3, 5), [1]), ((5, 3), [0]), ((2, 3, 4), [0, 2]), ((7,), None), ((2, 3, 4), [1, 2])):
        for places in ((0,), (-1,), (1,), (0, -1), ()):
            for value in (INF, -INF, NAN):
                x = make(dtype, *shape)
                for place in places:
                    x.view(-1)[place] = value
                    value = INF
                yield (x, dims), {"correction": 1}
                yield (x, dims), {"correction": 0, "keepdim": True}


def _frequent(dtype):
    """Rows with NaN, short ones and ones that are parted before they are sorted."""
    generator = torch.Generator().manual_seed(5)
    for size in (1, 2, 5, 16, 17, 40, 300):
        for kinds in (2, 4, 12):
            x = torch.randint(0, kinds, (6, size), generator=generator).to(dtype)
            x[torch.rand(x.shape, generator=generator) < 0.2] = NAN
            yield (x,), {}
            yield (x.t().contiguous(), 0, True), {}


def _sorted(dtype):
    plain = torch.tensor([-1.0, -0.5, 0.0, 0.5, 2.0, 3.0, 9.0], dtype=dtype)
    for places, values in (((), ()), ((0, 6), (-INF, INF)), ((5, 6), (NAN, NAN)), ((3,), (NAN,)), ((2, 6), (-0.0, NAN))):
        numbers = plain.clone()
        for at, value in zip(places, values, strict=True):
            numbers[at] = value
        yield numbers


def _values(dtype):
    return torch.tensor([[NAN, INF, -INF, 0.0], [-0.0, 0.5, 3.0, 9.0], [1.0, -1.0, 2.0, 100.0]], dtype=dtype)


def _bucketized(dtype):
    for numbers in _sorted(dtype):
        for right in (False, True):
            yield (_values(dtype), numbers), {"right": right}


def _searched(dtype):
    for (values, numbers), kwargs in (sample for sample in _bucketized(dtype)):
        yield (numbers, values), kwargs
        order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(3))
        yield (numbers[order], values), {**kwargs, "sorter": order.argsort()}


def of_numbers(first):
    """Numbers of Python among floats, and floats among integers."""

    @only(FLOATS)
    def written(dtype):
        ints = [torch.tensor([0, 3, 5, 5, 7], dtype=dtype) for dtype in (torch.int32, torch.uint8)]
        # Numbers that no dtype but float64 holds are rounded to the sequence's.
        tenths = torch.tensor([0.1, 0.2, 0.3, 0.7], dtype=torch.float64).to(dtype)
        among = [*_sorted(dtype), tenths, torch.tensor([0, 3, 5, 5, 2**24 + 1]), *ints]
        for numbers in among:
            for number in (NAN, INF, -INF, 0.0, 0.5, 2.5, 5, -1, 4.9, 6.9, 0.1, 0.2, 0.3, 0.7, 16777216.0):
                for right in (False, True):
                    yield ((number, numbers) if first else (numbers, number)), {"right": right}

    return written


def members(first):
    """A number of Python among tensors' numbers, of floats and of integers."""

    @only(FLOATS)
    def written(dtype):
        tenths = torch.tensor([0.1, 0.2, 0.3, -0.0, NAN, INF], dtype=torch.float64).to(dtype)
        for tensor in (tenths, torch.tensor([0, 1, 2, 2**24 + 1, 2**53 + 1]), torch.tensor([0, 1, 2], dtype=torch.uint8)):
            for number in (0.1, 0.2, 0.3, 0.0, NAN, INF, 2.0, 2.5, 1, 2.0**24, 2.0**53, 2**53 + 1):
                for invert in (False, True):
                    yield ((number, tensor) if first else (tensor, number)), {"invert": invert}

    return written


def _logits(dtype):
    for seed in range(3):
        yield (marked(make(dtype, 4, 6, seed=seed), INF, seed=seed), marked(make(dtype, 4, 6, seed=seed + 9), INF, -INF, seed=seed)), {}


def _forms(dtype):
    """Products of two vectors and a matrix, the first of them infinite somewhere."""
    for seed in range(4):
        vectors = marked(make(dtype, 2, 3, seed=seed), INF, seed=seed), make(dtype, 2, 4, seed=seed + 9)
        yield (*vectors, make(dtype, 5, 3, 4, seed=seed + 5), make(dtype, 5)), {}


def _padded(spatial, named):
    """Weights that are NaN or infinite at the corner of their window, which lies over the padding."""

    def written(dtype):
        sizes = (4, 5, 6)[-spatial:]
        for size, dilation in ((3, 1), (2, 1), (2, 2), (3, 2)):
            for value in (NAN, INF):
                x, weight = make(dtype, 2, 3, *sizes), make(dtype, 4, 3, *[size] * spatial, seed=1)
                for corner in (0, -1):
                    marked_weight = weight.clone()
                    marked_weight[(0, 1, *[corner] * spatial)] = value
                    padding = "same" if named else [dilation] * spatial
                    yield (x, marked_weight, None, [1] * spatial, padding, [dilation] * spatial), {}

    return written


def _products_of_three(dtype):
    """Each factor infinite somewhere beside zeros, along each dimension that the kernel may proceed along."""
    factors = [make(dtype, *shape, seed=n) for n, shape in enumerate(((2, 3, 4), (2, 4, 5), (2, 3, 5)))]
    for which in range(3):
        for value in (INF, -INF, NAN):
            tensors = [x.clone() for x in factors]
            tensors[which].view(-1)[3], tensors[(which + 1) % 3].view(-1)[2] = value, 0
            for unrolled in range(4):
                for summed in ([2], [1, 2], [1, 3], [2, 3], [1, 2, 3], []):
                    yield (*tensors, [3], [1], [2], summed, unrolled), {}


SAMPLES = {
    **{A + f"conv{n}d.default": _padded(n, False) for n in (1, 2, 3)},
    **{A + f"conv{n}d.padding": _padded(n, True) for n in (2, 3)},
    A + "_trilinear.default": _products_of_three,
    A + "bilinear.default": _forms,
    A + "binary_cross_entropy_with_logits.default": _logits,
    A + "upsample_linear1d.vec": _resized(1, True),
    A + "upsample_bilinear2d.vec": _resized(2, True),
    A + "upsample_trilinear3d.vec": _resized(3, True),
    A + "upsample_bicubic2d.vec": _resized(2, True),
    # At sizes where no weight is 0 or almost, as its rounding has it.
    **{A + f"_upsample_{name}2d_aa.vec": _resized(2, True, sizes=((7, 9), (4, 7), (5, 2))) for name in ("bilinear", "bicubic")},
    **{A + f"{name}{n}d.vec": _resized(n) for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)},
    A + "cdist.default": _distances,
    A + "_cdist_forward.default": _distances,
    A + "grid_sampler.default": _grids,
    **{A + f"{name}.correction": _moments for name in ("var_mean", "std_mean", "var", "std")},
    A + "mode.default": _frequent,
    A + "bucketize.Tensor": _bucketized,
    A + "bucketize.Scalar": of_numbers(True),
    A + "searchsorted.Tensor": _searched,
    A + "searchsorted.Scalar": of_numbers(False),
}
