"""The report as one HTML page: no script, no font, no image from elsewhere; pictures are inline SVG.

Two pictures are drawn where there is something to see: the error map (rows × head_dim of the worst head, log scale, black where
the output is not finite) and the stride diagram (the memory cells in order, coloured by the row of the tensor that lives there,
above what a reader of contiguous offsets would take them for).
"""

from html import escape

import numpy as np

from .report import versions
from .tensors import ARRANGEMENTS, addresses, lie, packed

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --paper: #fcfcfd; --line: #d9d9e0; --box: #f3f3f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --soft: #b0b4ba; --paper: #111113; --line: #363a3f; --box: #1b1c20; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; border-top: 1px solid var(--line); padding-top: 1.2rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; } td, th { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.badge { display: inline-block; color: #fff; border-radius: 4px; padding: 0 .45rem; font-size: 12px; line-height: 1.5rem; vertical-align: .1rem; }
.critical { background: #b3261e; } .high { background: #b25e09; } .medium { background: #7a6a00; } .low { background: #4a6785; }
.clean { background: #2b7a4b; } .found { background: #b3261e; } .other { background: #6f7377; }
figure { margin: .9rem 0; display: inline-block; margin-right: 2rem; vertical-align: top; } figcaption { font-size: 13px; color: var(--soft); max-width: 36rem; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
"""

# Dark to light: the viridis map at nine points.
SHADES = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
ROWS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#e8871e", "#8a8a8a")


def page(report):
    """The page's text."""
    body = [
        f"<h1>Audit of <code>{escape(report.target)}</code></h1>",
        f'<p class="soft">{escape(subtitle(report))}</p>',
        summary(report),
    ]
    body += [section(number, finding) for number, finding in enumerate(report.findings, 1)]
    body.append(hazards(report))
    title = f"Rapt audit of {escape(report.target)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def subtitle(report):
    kind = f"{report.offer.kind} tensors, {report.offer.style} signature; " if report.offer else ""
    installed = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    return f"{kind}{report.device}; {', '.join(report.dtypes)}; {report.seconds:.1f} s of {report.budget_s:g} s; {installed}"


def badge(text, kind=None):
    return f'<span class="badge {kind or text}">{escape(text)}</span>'


def summary(report):
    if not report.findings:
        return f"<p>{badge('clean')} No hazard was found.</p>"
    rows = "".join(
        f'<tr><td>{badge(f.severity)}</td><td><a href="#f{n}">{escape(f.hazard)}</a></td><td>{escape(f.cause)}</td>'
        f"<td>{escape(', '.join(f.dtypes))}</td><td>{'yes' if f.reproducer['reproduced'] else 'no'}</td></tr>"
        for n, f in enumerate(report.findings, 1)
    )
    return f"<table><tr><th>severity</th><th>hazard</th><th>cause</th><th>dtypes</th><th>reproduced</th></tr>{rows}</table>"


def section(number, finding):
    parts = [
        f'<h2 id="f{number}">{badge(finding.severity)} {escape(finding.hazard)}</h2>',
        f"<p>{escape(finding.title[:1].upper() + finding.title[1:])}. <b>{escape(finding.text)}.</b></p>",
        f'<p class="soft">Probe: <code>{escape(str(finding.case))}</code></p>',
    ]
    diagnosis = finding.evidence["diagnosis"]
    if diagnosis is not None and diagnosis["name"] not in ("unknown", "correct"):
        parts.append(f"<p>Diagnosis: <b>{escape(diagnosis['name'])}</b>, confidence {diagnosis['confidence']:.0%}.</p>")
    if finding.evidence["error_map"]:
        parts.append(error_map(finding))
    parts += [
        stride_diagram(name, arrangement)
        for name, arrangement in dict.fromkeys((n, a) for n, a in finding.case.views if a in ARRANGEMENTS)
    ][:1]
    made = finding.reproducer
    if made["source"]:
        verdict = (
            f"ran in {made.get('ran_in', 'no process')} and {'reproduced it' if made['reproduced'] else 'did not reproduce it'}"
        )
        parts.append(
            f'<p class="soft">Reproducer, {len(made["source"].splitlines())} lines; {escape(verdict)}: {escape(str(made["outcome"]))}</p>'
        )
        parts.append(f"<pre>{escape(made['source'])}</pre>")
    return "\n".join(parts)


def error_map(finding):
    """Rows × head_dim, log10 of the error over the row's size."""
    cells, side = finding.evidence["error_map"], 9
    finite = [x for row in cells for x in row if x is not None and x > -17.5]
    low, high = (min(finite), max(finite)) if finite else (-8.0, 0.0)
    low = min(low, high - 1)
    width, height = 60 + side * len(cells[0]), 34 + side * len(cells)
    drawn = []
    for i, row in enumerate(cells):
        for j, x in enumerate(row):
            shade = "#000" if x is None else SHADES[round(8 * min(1, max(0, (x - low) / (high - low))))]
            drawn.append(f'<rect x="{40 + side * j}" y="{16 + side * i}" width="{side}" height="{side}" fill="{shade}"/>')
    case = finding.case
    labels = (
        f'<text x="40" y="11">head_dim →  ({case.head_dim_v})</text>'
        f'<text x="4" y="26">row ↓</text><text x="4" y="40">({case.q_len})</text>'
    )
    lost = ", black: not finite" if any(x is None for row in cells for x in row) else ""
    caption = f"Error of the worst head, rows × head_dim. |error| / rms of the row: dark 10<sup>{low:.1f}</sup>, light 10<sup>{high:.1f}</sup>{lost}."
    return figure(width, height, labels + "".join(drawn), caption)


def stride_diagram(name, arrangement):
    """Memory in order for a small [1, 2, 3, 4] tensor: whose row lives in each cell, and what contiguous offsets would say."""
    shape = (1, 2, 3, 4)
    where = lie(shape, arrangement)
    at = addresses(shape, where)
    rows = np.arange(6).reshape(1, 2, 3, 1) + np.zeros(shape, int)
    extent = min(where.extent, 48)
    living = [[] for _ in range(extent)]
    for address, row in zip(at.reshape(-1), rows.reshape(-1), strict=True):
        if address < extent:
            living[address].append(int(row))
    side, top = 16, 20
    drawn = [f'<text x="0" y="12">{escape(name)}: memory, element by element</text>']
    for cell, owners in enumerate(living):
        fill = ROWS[owners[0] % 8] if owners else "none"
        dash = "" if owners else ' stroke-dasharray="2 2"'
        drawn.append(
            f'<rect x="{cell * side}" y="{top}" width="{side - 1}" height="18" fill="{fill}" stroke="#888" stroke-width=".6"{dash}/>'
        )
    drawn.append(f'<text x="0" y="{top + 36}">read with contiguous offsets</text>')
    for cell in range(min(24, extent)):
        row = cell // 4
        drawn.append(
            f'<rect x="{(cell + max(0, where.offset)) * side}" y="{top + 42}" width="{side - 1}" height="18" fill="{ROWS[row]}" stroke="#888" stroke-width=".6"/>'
        )
    for row in range(6):
        x = row * 74
        drawn.append(
            f'<rect x="{x}" y="{top + 72}" width="10" height="10" fill="{ROWS[row]}"/><text x="{x + 14}" y="{top + 81}">h{row // 3} row {row % 3}</text>'
        )
    caption = (
        f"{ARRANGEMENTS[arrangement]}. For a [1, 2, 3, 4] tensor: strides {where.strides}, "
        f"contiguous would be {packed(shape)}. Where the two lines differ in colour, contiguous offsets read another row."
    )
    return figure(max(460, (extent + max(0, where.offset)) * side + 2), top + 90, "".join(drawn), escape(caption))


def figure(width, height, drawn, caption):
    return (
        f'<figure><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" xmlns="http://www.w3.org/2000/svg">{drawn}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def hazards(report):
    rows = []
    for hazard in report.hazards:
        kind = hazard.verdict if hazard.verdict in ("clean", "found") else "other"
        rows.append(
            f"<tr><td>{badge(hazard.verdict, kind)}</td><td>{escape(hazard.name)}</td><td>{escape(hazard.title)}</td>"
            f"<td>{hazard.probes}</td><td>{escape(hazard.note[:120]) if hazard.verdict != 'clean' else ''}</td></tr>"
        )
    head = "<tr><th>verdict</th><th>hazard</th><th>what a finding says</th><th>probes</th><th>note</th></tr>"
    return f"<h2>Every hazard</h2><table>{head}{''.join(rows)}</table>"
