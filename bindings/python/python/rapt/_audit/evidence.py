"""What a judge says, and from where on a result is wrong."""

from dataclasses import asdict, dataclass, field

import numpy as np

from rapt._reference import errors

# "Wrong" as against "less exact than it should be": this many times the tolerance. Roundings differ by small factors
# between correct implementations; a wrong element is off by its whole size.
GROSS = 32


@dataclass
class Evidence:
    """Why a hazard is found."""

    text: str
    cause: str
    """A name of docs/reference/audit.md's table of causes."""
    numbers: dict = field(default_factory=dict)
    severity: str | None = None
    """Where it differs from the hazard's."""
    diagnosis: dict | None = None
    error_map: list | None = None
    """log10 of |error| / rms of the row, rows × head_dim of the worst head, at most MAP_SIDE each way; None = not finite."""
    check: dict = field(default_factory=dict)
    """What the reproducer needs to know: the limit, the variant."""

    as_dict = asdict


def close(got, want, limit):
    """Whether the tolerance can be met without asking what a peer's error is."""
    if not ((np.isnan(got) & np.isnan(want)) | np.isfinite(got) & np.isfinite(want) | (got == want)).all():
        return False
    error, worst, _ = errors(got, want)
    return error <= limit and worst <= limit
