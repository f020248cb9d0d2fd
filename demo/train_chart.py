"""The plot of `train.py`: loss against steps, a line for each run. Plain SVG, no library.

Like the other plots it has no background of its own and colours of middle brightness. Rapt's lines are dashed over stock's.
"""

from xml.sax.saxutils import escape

GREY, COLOURS = "#76808c", {"stock": "#4f6d7a", "rapt": "#d1495b"}
WIDTH, HEIGHT, LEFT, TOP = 640, 300, 60, 50


def line(losses, most, kind):
    points = " ".join(
        f"{LEFT + WIDTH * step / max(1, len(losses) - 1):.1f},{TOP + HEIGHT * (1 - loss / most):.1f}" for step, loss in enumerate(losses)
    )
    dashes = ' stroke-dasharray="4 3"' if kind == "rapt" else ""
    return f'<polyline points="{points}" fill="none" stroke="{COLOURS[kind]}" stroke-width="1.4"{dashes}/>'


def draw(runs):
    """SVG text of {(kind, seed): losses}."""
    most = 1.05 * max(max(losses) for losses in runs.values())
    steps, bottom = max(len(losses) for losses in runs.values()), TOP + HEIGHT
    parts = [f'<path d="M{LEFT} {TOP}V{bottom}H{LEFT + WIDTH}" fill="none" stroke="{GREY}"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = LEFT + WIDTH * share, bottom - HEIGHT * share
        parts.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{steps * share:.0f}</text>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{most * share:.1f}</text>')
    parts += [line(losses, most, kind) for (kind, _), losses in sorted(runs.items(), key=lambda item: item[0][0] == "rapt")]
    for at, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{LEFT + 110 * at}" y="{TOP - 10}" fill="{colour}">{escape(kind)}</text>')
    size = f'width="{LEFT + WIDTH + 30}" height="{bottom + 30}" viewBox="0 0 {LEFT + WIDTH + 30} {bottom + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">'
    return "\n".join([head, f'<text x="{LEFT}" y="20" font-size="13">Training loss (nats) by step, three seeds</text>', *parts, "</svg>"]) + "\n"
