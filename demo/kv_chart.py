"""The plot of `kv.py`: error against memory, and against speed. Plain SVG, no library.

Like the plot of the README it has no background of its own and colours of middle brightness.
"""

import math
from xml.sax.saxutils import escape

GREY, COLOURS = "#76808c", ("#d1495b", "#2f9e8f", "#5b7fe0", "#b06fd0", "#c9a227", "#4f6d7a")
WIDTH, HEIGHT, LEFT, TOP, PANEL = 300, 250, 70, 60, 430


def decades(errors):
    """The powers of ten between which all errors lie."""
    return math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors)))


def panel(at, heading, points, longest, least):
    """One panel's parts. points: [(name, x, error, colour)]; an error of 0 is the bf16 run itself and stands on the axis."""
    lowest, highest = least
    left, bottom = at * PANEL + LEFT, TOP + HEIGHT
    parts = [f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{escape(heading)}</text>']
    parts.append(f'<path d="M{left} {TOP}V{bottom}H{left + WIDTH}" fill="none" stroke="{GREY}"/>')
    for power in range(lowest, highest + 1):
        y = bottom - HEIGHT * (power - lowest) / max(1, highest - lowest) * 0.94 - HEIGHT * 0.06
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="{GREY}" stroke-opacity="0.3"/>')
    for share in (0, 0.5, 1):
        parts.append(f'<text x="{left + WIDTH * share:.0f}" y="{bottom + 18}" text-anchor="middle">{longest * share:.0f}</text>')
    for name, x, error, colour in points:
        up = 0.0 if error == 0 else 0.06 + 0.94 * (math.log10(error) - lowest) / max(1, highest - lowest)
        across, y = left + WIDTH * x / longest, bottom - HEIGHT * up
        parts.append(f'<circle cx="{across:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{escape(name)}</title></circle>')
    return parts


def draw(rows):
    """SVG text of {cache: {"bytes", "attention", "error"}}."""
    least = decades([row["error"] for row in rows.values() if row["error"] > 0])
    parts = []
    for at, (heading, key) in enumerate([("bytes of the cache per token", "bytes"), ("tokens a second, attention alone", "attention")]):
        colours = dict(zip(rows, COLOURS))
        points = [(name, row[key], row["error"], colours[name]) for name, row in rows.items()]
        parts += panel(at, heading, points, 1.05 * max(row[key] for row in rows.values()), least)
    for at, (name, colour) in enumerate(zip(rows, COLOURS)):
        x = LEFT + at * 125
        parts.append(f'<circle cx="{x}" cy="{TOP + HEIGHT + 44}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 10}" y="{TOP + HEIGHT + 48}">{escape(name)}</text>')
    title = "Relative L2 error of the logits against the bf16 cache, whose own is 0"
    size = f'width="{2 * PANEL}" height="{TOP + HEIGHT + 64}" viewBox="0 0 {2 * PANEL} {TOP + HEIGHT + 64}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">'
    return "\n".join([head, f'<text x="{LEFT}" y="22" font-size="13">{escape(title)}</text>', *parts, "</svg>"]) + "\n"
