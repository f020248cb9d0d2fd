"""The plot of the README: speeds of the records in benches/record, as SVG.

    python benches/speed.py             writes docs/assets/speed.svg
    python benches/speed.py --check     exits with 1 if that file is not what the records give

Bars are a peer's time divided by Rapt's, so that 1 is the peer's speed. The picture has no background of its own and colours of middle
brightness: it is read on white and on black. Needs nothing beyond Python.
"""

import gzip
import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benches/record"
OUT = ROOT / "docs/assets/speed.svg"

TEXT, LINE = "#76808c", "#76808c"
DTYPES = {"f32": ("float32", "#2f9e8f"), "bf16": ("bfloat16", "#5b7fe0"), "f16": ("float16", "#b06fd0")}
BAR, GROUP_GAP, LABEL, BARS, PANEL_GAP, TOP = 13, 11, 206, 225, 34, 86
# A longer bar ends here, and its number says how far it goes.
LONGEST = 4.0

CPU = {
    "record": "2026-11-21-amd-epyc-family-25-model-17-avx2.json.gz",
    "title": "CPU: 2 cores of an AMD EPYC (Zen 4, AVX2)",
    "against": "1 = PyTorch 2.15 as installed; | = with MKL unlocked for AMD",
    "ratio": "vs_stock",
    "tick": "vs_unlocked",
    "rows": [
        ("clip-77", "77 tokens, 12 heads of 64"),
        ("mid-512", "512 tokens, 8 heads of 64"),
        ("dit-1024", "1024 tokens, 24 heads of 128"),
        ("dit-1024/causal", "the same, causal"),
        ("decode-mha-4096", "decode 4096 keys, 32 heads"),
        ("decode-gqa-8192", "decode 8192 keys, 32/8 heads"),
    ],
}
GPU = {
    "record": "2026-11-22-nvidia-h200-all.json.gz",
    "title": "GPU: NVIDIA H200",
    "against": "1 = the fastest of cuDNN and PyTorch 2.11's own kernels",
    "ratio": "vs_best",
    "tick": None,
    "rows": [
        ("d64-4096", "4096 tokens, heads of 64"),
        ("d64-4096/causal", "the same, causal"),
        ("d128-4096", "4096 tokens, heads of 128"),
        ("d128-4096/causal", "the same, causal"),
        ("d256-4096/causal", "4096, heads of 256, causal"),
        ("d80-4096", "4096, heads of 80"),
        ("masks-4096/bool", "4096, boolean mask"),
        ("masks-4096/additive", "4096, additive mask"),
        ("f32-d128-4096", "4096, heads of 128"),
        ("decode-gqa-8k", "decode 8192 keys, 32/8 heads"),
        ("decode-gqa-64k", "decode 65536 keys, 32/8 heads"),
    ],
}


def figures(panel):
    """[(label, [(dtype, ratio, tick)])] of a panel's rows."""
    rows = json.loads(gzip.decompress((RECORDS / panel["record"]).read_bytes()))["rows"]
    of = {(row["row"], row["dtype"]): row for row in rows}
    # On the GPU one dtype a row is enough: the two of 16 bits run alike.
    dtypes = DTYPES if panel is CPU else ("bf16", "f32")
    for name, label in panel["rows"]:
        found = [(dtype, of[name, dtype]) for dtype in dtypes if (name, dtype) in of]
        yield label, [(dtype, row[panel["ratio"]], row[panel["tick"]] if panel["tick"] else None) for dtype, row in found]


def draw(panels):
    width = len(panels) * (LABEL + BARS + 45) + PANEL_GAP
    text = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    parts, lowest = [], TOP
    for at, panel in enumerate(panels):
        x = at * (LABEL + BARS + 45 + PANEL_GAP)
        left, y = x + LABEL, TOP
        parts.append(f'<text x="{x + 4}" y="44" font-size="14" font-weight="bold">{escape(panel["title"])}</text>')
        parts.append(f'<text x="{x + 4}" y="64" font-size="12">{escape(panel["against"])}</text>')
        for label, bars in figures(panel):
            middle = y + len(bars) * BAR / 2
            parts.append(f'<text x="{left - 8}" y="{middle + 4:.1f}" font-size="12" text-anchor="end">{escape(label)}</text>')
            for dtype, ratio, tick in bars:
                length = BARS * min(ratio, LONGEST) / LONGEST
                parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{BAR - 2}" rx="1.5" fill="{DTYPES[dtype][1]}"/>')
                mark = 0
                if tick:
                    mark = BARS * min(ratio / tick, LONGEST) / LONGEST
                    if ratio / tick < LONGEST:
                        parts.append(f'<rect x="{left + mark - 1:.1f}" y="{y - 1}" width="2" height="{BAR}" fill="{TEXT}"/>')
                number = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
                parts.append(f'<text x="{left + length + 5:.1f}" y="{y + BAR - 3.5}" font-size="11">{number}</text>')
                y += BAR
            y += GROUP_GAP
        one = left + BARS / LONGEST
        parts.append(f'<line x1="{one:.1f}" y1="{TOP - 6}" x2="{one:.1f}" y2="{y - GROUP_GAP + 4}" stroke="{LINE}" stroke-dasharray="3 3"/>')
        lowest = max(lowest, y)
    legend, x = [], 4
    for name, colour in DTYPES.values():
        legend.append(f'<rect x="{x}" y="9" width="12" height="12" rx="1.5" fill="{colour}"/>')
        legend.append(f'<text x="{x + 18}" y="20" font-size="12">{name}</text>')
        x += 92
    legend.append(f'<text x="{x}" y="20" font-size="12">Time of PyTorch divided by the time of Rapt: longer is faster.</text>')
    title = "<title>Speed of Rapt beside PyTorch, from benches/record</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {lowest}" width="{width}" height="{lowest}" {text} fill="{TEXT}">'
    return "\n".join([head, title, *legend, *parts, "</svg>"]) + "\n"


def main(arguments):
    drawn = draw([CPU, GPU])
    if arguments == ["--check"]:
        if OUT.read_text(encoding="utf-8") != drawn:
            print(f"{OUT.relative_to(ROOT)} is not current: run `python benches/speed.py`", file=sys.stderr)
            return 1
        return 0
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
