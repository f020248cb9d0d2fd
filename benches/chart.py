"""The record's picture: how many times faster than stock torch each engine is, one panel per dtype."""

from peers import PEERS

from rapt.bench.chart import bars

COLOURS = {"rapt": "#d1495b", "rapt-sdpa": "#e8a0a8", "unlocked": "#4f6d7a", "openvino": "#86a873", "onnxruntime": "#c9a227"}
LONGEST = 6  # decode in 16 bits is ten times stock and more: bars end here, and say their number


def chart(figures, title):
    """SVG text, or None where no row has both stock torch and Rapt. Contiguous rows of numbers with work in them, as they stand."""
    rows = [f for f in figures if f["kind"] in ("prefill", "decode") and f["us"].get("stock") and f["us"].get("rapt")]
    rows = [f for f in rows if "codes" not in f["groups"] and not any(word in f["row"] for word in ("permuted", "bshd_cache"))]
    if not rows:
        return None
    times = [(f, {name: f["us"]["stock"] / us for name in COLOURS if (us := f["us"].get(name))}) for f in rows]
    panels = [
        (f"{dtype}: times stock torch", [(f["row"], values) for f, values in times if f["dtype"] == dtype])
        for dtype in dict.fromkeys(f["dtype"] for f in rows)
    ]
    series = {name: (PEERS[name].title, colour) for name, colour in COLOURS.items()}
    longest = min(LONGEST, max(value for _, values in times for value in values.values()))
    return bars(title, series, panels, lead="rapt", longest=longest, mark=1)
