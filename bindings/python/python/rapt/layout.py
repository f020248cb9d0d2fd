"""Layout algebra and the fragment checker: proof that what one tensor-core instruction writes is what the next one reads.

`Layout` is CuTe's algebra on shape:stride; `check` compares every element of a producer with a consumer and names the fault
and a proven repair; `emulate` runs them on plain memory. `rapt layout` on the command line does the same; docs/reference/layout.md
describes files and reports.
"""

import json as _json
import os as _os

from rapt import _native
from rapt._native import Layout

__all__ = [
    "Layout",
    "Outcome",
    "Quantity",
    "Report",
    "atom",
    "atoms",
    "check",
    "check_text",
    "coalesce",
    "complement",
    "compose",
    "divide",
    "emulate",
    "emulate_text",
    "left_inverse",
    "product",
    "recast",
    "right_inverse",
    "show",
]


def _layout(value):
    return value if isinstance(value, Layout) else Layout(value)


def compose(layout, other):
    """The layout i -> layout(other(i)). Layouts here and below may be text or tuples."""
    # A bare shape is a compact layout, as on the command line; by mode is `Layout.compose` with a tuple, or "<4,8>".
    return _layout(layout).compose(Layout(other) if isinstance(other, (int, tuple)) else other)


def complement(layout, target=None):
    """What covers, with `layout`, 0 to target - 1."""
    return _layout(layout).complement(target)


def divide(layout, tiler, arrangement="logical"):
    """`layout` cut into tiles: "logical", "zipped", "tiled" or "flat"."""
    return _layout(layout).divide(tiler, arrangement)


def product(layout, tiler, arrangement="logical"):
    """`layout` repeated: "logical", "zipped", "tiled", "flat", "blocked" or "raked"."""
    if arrangement == "blocked":
        return _layout(layout).blocked_product(_layout(tiler))
    if arrangement == "raked":
        return _layout(layout).raked_product(_layout(tiler))
    return _layout(layout).product(tiler, arrangement)


def coalesce(layout, by=None):
    """The same function with as few modes as possible."""
    return _layout(layout).coalesce(by)


def right_inverse(layout):
    """R with layout(R(i)) = i."""
    return _layout(layout).right_inverse()


def left_inverse(layout):
    """R with R(layout(i)) = i."""
    return _layout(layout).left_inverse()


def recast(layout, from_bits, to_bits):
    """The same memory counted in elements of another width."""
    return _layout(layout).recast(from_bits, to_bits)


class Quantity:
    """A number with its unit, such as `Quantity(32, "tmem-cells")`. Two units do not compare: `rapt.KindError`."""

    __slots__ = ("number", "unit")

    def __init__(self, number, unit):
        # Refuses an unknown unit here rather than at the first use.
        _native.layout_same(0, unit, 0, unit)
        self.number, self.unit = number, unit

    def to(self, unit):
        """The same place in another unit of the same memory."""
        return Quantity(_native.layout_convert(self.number, self.unit, unit), unit)

    def __eq__(self, other):
        if not isinstance(other, Quantity):
            return NotImplemented
        return _native.layout_same(self.number, self.unit, other.number, other.unit)

    def __hash__(self):
        return hash((self.number, self.unit))

    def __repr__(self):
        return f"Quantity({self.number}, {self.unit!r})"


class Report(dict):
    """The answer of one check, as docs/reference/layout.md describes it; `str()` is for people."""

    def __init__(self, facts, text, svg):
        super().__init__(facts)
        self._text, self._svg = text, svg

    @property
    def proven(self):
        """Whether the consumer reads every element where the producer wrote it."""
        return self["proven"]

    @property
    def faults(self):
        """Classes of the fault, the root first, such as `["unit_mix_up"]`."""
        return [fault["class"] for fault in self["faults"]]

    def svg(self):
        """The map of all elements as an SVG document."""
        return self._svg

    def __str__(self):
        return self._text


class Outcome(dict):
    """What came of one emulated flow; `str()` is one line."""

    def __init__(self, facts, text):
        super().__init__(facts)
        self._text = text

    @property
    def cosine(self):
        """Between the output and the same in f64; None where poison was read."""
        return self["cosine"]

    def __str__(self):
        return self._text


def show(what, *, rows=32, cols=16, svg=False):
    """A layout, or an atom by name, as a grid of text, or as an SVG document."""
    return _native.layout_show(str(what), rows, cols, svg)


def atoms():
    """Names of the atoms that the atlas lists."""
    return _native.layout_atoms()


def atom(name):
    """What the atlas holds of an atom: tile, bits, source, and its map."""
    return _json.loads(_native.layout_atom(name))


def _read(path):
    with open(_os.fspath(path), encoding="utf-8") as file:
        return file.read()


def check_text(text):
    """The reports of the checks of a TOML text, in its order."""
    return [Report(_json.loads(facts), shown, svg) for facts, shown, svg in _native.layout_check(text)]


def check(path):
    """The reports of the checks of a TOML file, in its order."""
    return check_text(_read(path))


def emulate_text(text, *, seeds=(1, 2, 3), softmax=False):
    """S = Q·Kᵀ → P → P·V through each check of a TOML text, for each seed."""
    return [Outcome(_json.loads(facts), shown) for facts, shown in _native.layout_emulate(text, list(seeds), softmax)]


def emulate(path, *, seeds=(1, 2, 3), softmax=False):
    """S = Q·Kᵀ → P → P·V through each check of a TOML file, for each seed."""
    return emulate_text(_read(path), seeds=seeds, softmax=softmax)
