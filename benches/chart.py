"""The record's picture: how many times faster than stock torch each engine is, one panel per dtype. Plain SVG, no library."""

from xml.sax.saxutils import escape

from peers import PEERS

COLOURS = {"rapt": "#d1495b", "rapt-sdpa": "#e8a0a8", "unlocked": "#4f6d7a", "openvino": "#86a873", "onnxruntime": "#c9a227"}
BAR, GAP, LABEL, WIDTH, PANEL = 9, 9, 190, 210, 440
LONGEST = 6  # decode in 16 bits is ten times stock and more: bars end here, and say their number
TEXT = 'font-family="system-ui, sans-serif" font-size="11"'


def chart(figures, title):
    """SVG text, or None where no row has both stock torch and Rapt. Contiguous rows with work in them, as they stand."""
    rows = [f for f in figures if f["kind"] in ("prefill", "decode") and f["us"].get("stock") and f["us"].get("rapt")]
    rows = [f for f in rows if not any(word in f["row"] for word in ("permuted", "bshd_cache"))]
    if not rows:
        return None
    dtypes = list(dict.fromkeys(f["dtype"] for f in rows))
    names = [name for name in COLOURS if any(f["us"].get(name) for f in rows)]
    longest = min(LONGEST, max(f["us"]["stock"] / us for f in rows for name in names if (us := f["us"].get(name))))
    tallest = max(sum(f["dtype"] == dtype for f in rows) for dtype in dtypes)
    height = 70 + tallest * (len(names) * BAR + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PANEL * len(dtypes)}" height="{height}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" {TEXT} font-weight="bold">{escape(title)}</text>',
    ]
    for at, name in enumerate(names):
        x = 10 + at * 190
        parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 15}" y="37" {TEXT}>{escape(PEERS[name].title)}</text>')
    for panel, dtype in enumerate(dtypes):
        left = panel * PANEL + LABEL
        one = left + WIDTH / longest
        parts.append(f'<text x="{panel * PANEL + 10}" y="58" {TEXT} font-weight="bold">{dtype}: times stock torch</text>')
        y = 68
        for f in (f for f in rows if f["dtype"] == dtype):
            parts.append(f'<text x="{left - 6}" y="{y + len(names) * BAR / 2 + 4}" text-anchor="end" {TEXT}>{escape(f["row"])}</text>')
            for name in names:
                if us := f["us"].get(name):
                    times = f["us"]["stock"] / us
                    length = WIDTH * min(times, longest) / longest
                    parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{COLOURS[name]}"/>')
                    if name == "rapt" or times > longest:
                        parts.append(f'<text x="{left + length + 3:.1f}" y="{y + BAR - 1}" {TEXT} fill="#333">{times:.2f}</text>')
                y += BAR
            y += GAP
        parts.append(f'<line x1="{one:.1f}" y1="62" x2="{one:.1f}" y2="{y}" stroke="#333" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"
