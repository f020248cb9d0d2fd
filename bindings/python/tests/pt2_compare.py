"""How results of programs are compared with torch's: bit for bit, within one unit in the last place, or by the tolerance rule."""

import math

import torch
from rapt import _reference
from torch.utils import _pytree as pytree

# The words of a float dtype, for distances in units of the last place.
WORDS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def same_bits(got, expected):
    """Equal as bits; every NaN counts as every other."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if not got.dtype.is_floating_point:
        return torch.equal(got, expected)
    nan = got.isnan() & expected.isnan()
    words = WORDS[got.dtype]
    return bool(((got.contiguous().view(words) == expected.contiguous().view(words)) | nan).all())


def ulps(got, expected):
    """The largest distance in units of the last place; infinite where one is NaN or infinite and the other is not."""
    if got.numel() == 0:
        return 0
    nan = got.isnan() & expected.isnan()
    odd = (~got.isfinite() | ~expected.isfinite()) & ~nan & (got != expected)
    if bool(odd.any()):
        return math.inf

    def ordered(x):
        # Integers in the order of the floats: of negative ones the bits count backwards.
        words = x.contiguous().view(WORDS[x.dtype]).long()
        magnitude = words & (2 ** (8 * x.element_size() - 1) - 1)
        return torch.where(words < 0, -magnitude, magnitude)

    distance = (ordered(got) - ordered(expected)).abs()
    return int(torch.where(nan, 0, distance).max())


def within_rule(got, exact, peer):
    """Whether `got` keeps the tolerance rule of docs/reference/numerics.md against `exact` (float64), beside torch's `peer`."""
    name = str(got.dtype).removeprefix("torch.")
    rows = [x.double().reshape(-1, x.shape[-1]) if x.dim() > 0 else x.double().reshape(1, 1) for x in (got, exact, peer)]
    got, exact, peer = (x.numpy() for x in rows)
    limit, row_limit = _reference.limits(name, [peer], exact)
    error, row_error = _reference.errors(got, exact)[:2]
    text = f"relative L2 {error:.3g} of {limit:.3g}, row {row_error:.3g} of {row_limit:.3g}"
    return error <= limit and row_error <= row_limit, text


def compare(got, torch_says, exact, where):
    """Asserts of trees of results: integers and booleans have torch's bits, floats keep the tolerance rule."""
    ours, theirs, wide = (pytree.tree_leaves(tree) for tree in (got, torch_says, exact))
    assert len(ours) == len(theirs) == len(wide), where
    for index, (x, peer, reference) in enumerate(zip(ours, theirs, wide, strict=True)):
        at = f"{where}, result {index}"
        if not isinstance(peer, torch.Tensor):
            assert x == peer, at
            continue
        assert x.dtype == peer.dtype and x.shape == peer.shape, f"{at}: {x.dtype} {x.shape}, torch {peer.dtype} {peer.shape}"
        if not peer.dtype.is_floating_point:
            assert same_bits(x, peer), at
            continue
        kept, text = within_rule(x, reference.double(), peer)
        assert kept, f"{at}: {text}"


def difference(got, torch_says, exact, compare):
    """What is wrong with a result, or None. `exact` is torch's in float64, or None where there is none."""
    if got.dtype != torch_says.dtype:
        return f"dtype {got.dtype}, torch's is {torch_says.dtype}"
    if got.shape != torch_says.shape:
        return f"shape {tuple(got.shape)}, torch's is {tuple(torch_says.shape)}"
    if compare == "form" or same_bits(got, torch_says):
        return None
    if compare == "bits" or not got.dtype.is_floating_point:
        return f"{_first(got, torch_says)}: not torch's bits"
    wanted = torch_says if exact is None else exact
    away = min(ulps(got, wanted.to(got.dtype)), ulps(got, torch_says))
    if away <= 1:
        return None
    if not torch.equal(_kinds(got), _kinds(wanted.to(got.dtype))) and not torch.equal(_kinds(got), _kinds(torch_says)):
        return f"{_first(got, torch_says)}: infinite or NaN elsewhere than torch's"
    kept, text = within_rule(got, wanted, torch_says)
    return None if kept else f"{_first(got, torch_says)}: {away} units in the last place, {text}"


def _kinds(x):
    """Of each element: a number, NaN, or an infinity of which sign."""
    return x.isnan() + 2 * (x == math.inf) + 3 * (x == -math.inf)


def _first(got, expected):
    """The first element that differs."""
    same = (got == expected) | (got.isnan() & expected.isnan()) if got.dtype.is_floating_point else got == expected
    places = (~same).nonzero()
    if len(places) == 0:
        return "signs of zero"
    at = tuple(places[0].tolist())
    return f"at {list(at)} {got[at].item()!r}, torch {expected[at].item()!r}, {len(places)} of {same.numel()} differ"
