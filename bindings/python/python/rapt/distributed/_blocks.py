"""Which keys of a rank's block the rows of another see: pieces, each of which one call of `rapt.attention` computes on views.

Row i (a position of the whole sequence) sees key j where low ≤ j - i ≤ high, by causal and window. Of rows from a and keys from b that is
low + a - b ≤ j' - i' ≤ high + a - b, by their own numbers. Rows that see nothing and keys that nobody sees are left out at both ends, and
then both bounds are a window that a call can have: no mask is made. ALiBi's distance i + d - j is i' - j' + c: where one sign has
all pairs it is a bias of keys and a number for each row (which lse gets); where not, keys or rows are split at c, and what lies on the
diagonal is a call with slopes.
"""

import functools
import typing

import torch


class Rule(typing.NamedTuple):
    """What a row sees: low ≤ j - i ≤ high, None is unbounded; `shift` is d of the definition."""

    low: int | None
    high: int | None
    shift: int


# In the place of causal: no mask, and the last query at the last key for windows and distances.
AT_THE_END = "at the end"


def rule(causal, window, q_len, kv_len):
    """The rule of a sequence of so many queries and keys."""
    shift = kv_len - q_len if causal in ("bottom_right", AT_THE_END) else 0
    left, right = window or (None, None)
    low = None if left is None else shift - left
    bounds = ([shift] if causal not in (None, AT_THE_END) else []) + ([] if right is None else [shift + right])
    return Rule(low, min(bounds) if bounds else None, shift)


class Piece(typing.NamedTuple):
    """Rows and keys that one call attends, by their numbers in their tensors; `columns` is where its keys begin in the whole sequence.

    slopes: None; "direct", or "past" and "future": all its keys lie before, or behind, their rows, and `distance` is i + d - j of its
    first row and its first key.
    """

    rows: tuple
    keys: tuple
    columns: int
    causal: str | None
    window: tuple | None
    slopes: str | None = None
    distance: int = 0

    @property
    def farthest(self):
        """At least every number that lse of a row gets, in slopes (`operands`)."""
        return 0 if self.slopes in (None, "direct") else abs(self.distance) + self.rows[1] - self.rows[0] + self.keys[1] - self.keys[0]

    @property
    def is_full(self):
        return self.causal is None and self.window is None and self.slopes is None


def _trimmed(r, k, nq, nk, column, low, high):
    """(rows, keys, column, low, high) of what is seen, or None."""
    if high is not None and high < 0:
        r, nq, low, high = r - high, nq + high, None if low is None else low - high, 0
    if low is not None and low > 0:
        k, nk, column, high, low = k + low, nk - low, column + low, None if high is None else high - low, 0
    if high is not None:
        nk = min(nk, nq + high)
    if low is not None:
        nq = min(nq, nk - low)
    if nq <= 0 or nk <= 0:
        return None
    high = None if high is None or high >= nk - 1 else high
    low = None if low is None or -low >= nq - 1 else low
    return r, k, nq, nk, column, low, high


def _piece(r, k, nq, nk, column, low, high, slopes=None, distance=0):
    left = None if low is None else -low
    if high == 0:
        causal, window = "top_left", None if left is None else (left, None)
    else:
        causal, window = None, None if left is None and high is None else (left, high)
    return Piece((r, r + nq), (k, k + nk), column, causal, window, slopes, distance)


def _pieces(r, k, nq, nk, column, low, high, distance):
    """The pieces of some rows and keys; `distance` is None without ALiBi."""
    seen = _trimmed(r, k, nq, nk, column, low, high)
    if seen is None:
        return
    if distance is None:
        yield _piece(*seen)
        return
    distance += (seen[0] - r) - (seen[1] - k)
    r, k, nq, nk, column, low, high = seen
    # Where rows are close to the keys that they see, the call has the distances: beside those of its nearest key, biases of keys are rounded little.
    if distance == 0:
        yield _piece(*seen, "direct")
    elif distance >= nk - 1:
        yield _piece(*seen, "past", distance)
    elif distance <= 1 - nq:
        yield _piece(*seen, "future", distance)
    elif distance > 0:
        yield from _pieces(r, k, nq, distance, column, low, high, distance)
        moved = [None if bound is None else bound - distance for bound in (low, high)]
        yield from _pieces(r, k + distance, nq, nk - distance, column + distance, *moved, 0)
    else:
        yield from _pieces(r, k, -distance, nk, column, low, high, distance)
        moved = [None if bound is None else bound - distance for bound in (low, high)]
        yield from _pieces(r - distance, k, nq + distance, nk, column, *moved, 0)


@functools.lru_cache(4096)
def pieces(q_places, k_places, documents, causal, window, with_slopes=False, with_mask=False):
    """The pieces of rows at `q_places` and keys at `k_places`, in a fixed order. `documents` are (first query, end, first key, end) of
    each sequence in the whole one; a row attends the keys of its own."""
    whole = len(documents) == 1 and rule(causal, window, *_sizes(documents[0]))
    if whole and q_places == k_places and whole[:2] == (None, 0) and not with_slopes and not with_mask:
        # Both are in order of position, so the local rows have the triangle of the whole.
        n = sum(stop - start for start, stop in q_places)
        return (_piece(*_trimmed(0, 0, n, n, 0, None, 0)),) if n else ()
    found = []
    k_first = 0
    for k_start, k_stop in k_places:
        q_first = 0
        for q_start, q_stop in q_places:
            for document in documents:
                q0, q1 = max(q_start, document[0]), min(q_stop, document[1])
                k0, k1 = max(k_start, document[2]), min(k_stop, document[3])
                if q0 >= q1 or k0 >= k1:
                    continue
                low, high, shift = rule(causal, window, *_sizes(document))
                apart = (q0 - document[0]) - (k0 - document[2])
                bounds = (None if low is None else low + apart, None if high is None else high + apart)
                distance = apart + shift if with_slopes else None
                found += _pieces(q_first + q0 - q_start, k_first + k0 - k_start, q1 - q0, k1 - k0, k0, *bounds, distance)
            q_first += q_stop - q_start
        k_first += k_stop - k_start
    return tuple(_joined(found, with_mask))


def are_apart(rows):
    """Whether no row is in two of these (start, stop)."""
    rows = sorted(rows)
    return all(one[1] <= other[0] for one, other in zip(rows, rows[1:]))


def _sizes(document):
    return document[1] - document[0], document[3] - document[2]


def _joined(found, with_mask):
    """Full pieces side by side as one: fewer calls on more rows and keys. Their order is that of the first."""
    joined = []
    for piece in found:
        last = joined[-1] if joined else None
        if last and last.is_full and piece.is_full and last.keys == piece.keys and last.rows[1] == piece.rows[0]:
            joined[-1] = last._replace(rows=(last.rows[0], piece.rows[1]))
        else:
            joined.append(piece)
    made = []
    for piece in joined:
        at = next((n for n, other in enumerate(made) if not with_mask and _continues(other, piece)), None)
        if at is None:
            made.append(piece)
        else:
            made[at] = made[at]._replace(keys=(made[at].keys[0], piece.keys[1]))
    return made


def _continues(one, other):
    return one.is_full and other.is_full and one.rows == other.rows and one.keys[1] == other.keys[0]


class Operands(typing.NamedTuple):
    """What a piece's call gets beside q, k and v, and the numbers of its rows that lse gets: None, or [1, heads, rows]."""

    options: dict
    of_rows: torch.Tensor | None


def operands(piece, mask, slopes, accumulation):
    """`mask` has the local rows and the keys of the whole sequence, four sizes, of which any may be 1."""
    options, of_rows = {"causal": piece.causal, "window": piece.window}, None
    if mask is not None:
        options["mask"] = masked(mask, piece)
    if piece.slopes == "direct":
        options["alibi_slopes"] = slopes
    elif piece.slopes is not None:
        nq, nk = piece.rows[1] - piece.rows[0], piece.keys[1] - piece.keys[0]
        slope = slopes.to(accumulation)[:, None]
        keys, rows = (torch.arange(n, dtype=accumulation, device=slopes.device) for n in (nk, nq))
        if piece.slopes == "past":
            # The nearest key has bias 0: what is far from it is rounded more, and weighs less.
            bias, of_rows = slope * (keys - (nk - 1)), -slope * (rows + (piece.distance - (nk - 1)))
        else:
            bias, of_rows = -slope * keys, slope * (rows + piece.distance)
        options["mask"], of_rows = bias[None, :, None], of_rows[None]
    return Operands(options, of_rows)


def masked(mask, piece):
    """The part of a mask, or of its gradient, that a piece has."""
    if mask.shape[2] > 1:
        mask = mask[:, :, piece.rows[0] : piece.rows[1]]
    if mask.shape[3] > 1:
        mask = mask[..., piece.columns : piece.columns + piece.keys[1] - piece.keys[0]]
    return mask
