"""A record's picture: bars side by side, one panel of rows beside another. Plain SVG, no library."""

from xml.sax.saxutils import escape

BAR, GAP, LABEL, WIDTH, PANEL = 9, 9, 190, 210, 440
TEXT = 'font-family="system-ui, sans-serif" font-size="11"'


def bars(title, series, panels, *, lead, longest, mark=None):
    """SVG text.

    series: {name: (what it is, colour)}. panels: [(heading, [(row's label, {name: value})])]. lead: the series whose number is
    written beside its bar. longest: values beyond it end there and say their number. mark: where a dashed line stands.
    """
    names = [name for name in series if any(values.get(name) for _, rows in panels for _, values in rows)]
    tallest = max(len(rows) for _, rows in panels)
    height = 70 + tallest * (len(names) * BAR + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PANEL * len(panels)}" height="{height}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" {TEXT} font-weight="bold">{escape(title)}</text>',
    ]
    for at, name in enumerate(names):
        x, (what, colour) = 10 + at * 190, series[name]
        parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="37" {TEXT}>{escape(what)}</text>')
    for panel, (heading, rows) in enumerate(panels):
        left = panel * PANEL + LABEL
        parts.append(f'<text x="{panel * PANEL + 10}" y="58" {TEXT} font-weight="bold">{escape(heading)}</text>')
        y = 68
        for label, values in rows:
            parts.append(f'<text x="{left - 6}" y="{y + len(names) * BAR / 2 + 4}" text-anchor="end" {TEXT}>{escape(label)}</text>')
            for name in names:
                if value := values.get(name):
                    length = WIDTH * min(value, longest) / longest
                    parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{series[name][1]}"/>')
                    if name == lead or value > longest:
                        parts.append(f'<text x="{left + length + 3:.1f}" y="{y + BAR - 1}" {TEXT} fill="#333">{value:.2f}</text>')
                y += BAR
            y += GAP
        if mark is not None:
            x = left + WIDTH * mark / longest
            parts.append(f'<line x1="{x:.1f}" y1="62" x2="{x:.1f}" y2="{y}" stroke="#333" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"
