"""Systems of linear equations, incomplete gamma functions and parts of floats: whence their samples come, and how they are judged, as in
`op_samples_more`. torch has the first in float32 and float64 alone, so that all dtypes are tried in an ordinary run too.
"""

import torch

A = "aten."


def _of(names, opinfo, comparison="ulp"):
    return {A + f"{name}.default": (opinfo, comparison) for name in names.split()}


def _both(make):
    """Samples of the dtypes that torch's OpInfo has no samples of."""

    def written(dtype):
        if dtype in (torch.float64, torch.float32):
            yield from make(dtype)

    return written


@_both
def _orders(dtype):
    """Each way of computing the incomplete gamma functions, and the ends."""
    inf, nan = float("inf"), float("nan")
    orders = torch.tensor([0.0, 1e-3, 0.5, 1.0, 3.5, 12.0, 99.0, 150.0, 250.0, inf, -1.0, nan], dtype=dtype)
    places = torch.tensor([0.0, 1e-3, 0.3, 1.4, 4.0, 13.0, 100.0, 160.0, inf, -1.0, nan], dtype=dtype)
    yield (orders[:, None], places), {}
    yield (orders[2:9], torch.tensor(2.0, dtype=torch.float64)), {}


def _parts(dtype):
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        ends = [0.0, -0.0, 1.0, -0.75, 0.5, 3.0, info.max, info.min, info.tiny, info.tiny * info.eps, float("inf"), float("-inf"), float("nan")]
        yield (torch.tensor(ends, dtype=dtype),), {}
        yield (torch.arange(-6, 6).reshape(3, 4).to(dtype),), {}


ROWS = {
    **_of("linalg_inv inverse", "linalg.inv"),
    **_of("linalg_inv_ex", "linalg.inv_ex"),
    **_of("linalg_det det", "linalg.det"),
    **_of("linalg_slogdet slogdet", "linalg.slogdet"),
    **_of("logdet", "logdet"),
    **_of("linalg_solve", "linalg.solve"),
    **_of("linalg_solve_ex", "linalg.solve_ex"),
    **_of("linalg_cholesky", "linalg.cholesky"),
    **_of("linalg_cholesky_ex", "linalg.cholesky_ex"),
    **_of("linalg_solve_triangular", "linalg.solve_triangular"),
    **_of("triangular_solve", "triangular_solve"),
    **_of("cholesky_solve", "cholesky_solve"),
    **_of("cholesky_inverse", "cholesky_inverse"),
    **_of("igamma special_gammainc igammac special_gammaincc", None),
    A + "igamma_.default": ("igamma", "ulp"),
    A + "frexp.Tensor": (None, "bits"),
}
OWN = {
    **{A + f"{name}.default": _orders for name in ("igamma", "special_gammainc", "igammac", "special_gammaincc")},
    A + "frexp.Tensor": _parts,
}
