"""What a run says: derived figures, the tables (terminal and Markdown from one source), the JSON record, the picture, the bars.

    vs best, vs default   the peer's median / Rapt's median: above 1, Rapt is faster
    vs base               Rapt's median / Rapt's median on the row's baseline (contiguous, unmasked, full), same rounds
    floor, % floor        the largest of Row.floors_us at the rates of the row's own rounds, and of it what a time comes to
    TFLOP/s, GB/s         flops / time (causal counts half); what a pass has to move, once / time
"""

import dataclasses

from . import table
from .chart import bars as draw
from .engines import DENSE
from .rows import baseline
from .table import number

SCHEMA = 1


def lead(measured, ours):
    """The interface that a row's ratios are about."""
    order = ("rapt-sdpa", "rapt") if measured.row.kind == "call" else ("rapt", "rapt-sdpa")
    return next((name for name in order if name in ours and name in measured.timings and measured.timings[name].median), None)


def ratio(above, below):
    return above / below if above and below else None


def fastest(us, names):
    timed = {name: us[name] for name in names if us.get(name)}
    return min(timed, key=timed.get) if timed else None


def derive(everything, engines, facts):
    """One dict of plain figures per row; everything printed comes from it."""
    rows = [measured.row for measured in everything]
    by_key = {measured.row.key: measured for measured in everything}
    ours = {name for name, engine in engines.items() if engine.ours}
    figures = []
    for measured in everything:
        row, found = measured.row, measured.ceilings
        us = {name: timing.median for name, timing in measured.timings.items()}
        name = lead(measured, ours)
        own = us.get(name)
        # torch's own choice is one of the others, but where the host is what is timed.
        peers = [peer for peer in us if peer not in ours and (peer != "sdpa" or row.kind == "call")]
        best, dense = fastest(us, peers), fastest(us, [peer for peer in peers if peer in DENSE])
        base = baseline(row, rows)
        base_us = by_key[base.key].timings[name].median if base and name in by_key[base.key].timings else None
        figure = {
            "row": row.name, "dtype": row.dtype, "dims": row.dims, "kind": row.kind, "groups": row.groups, "lead": name, "us": us,
            "spread": {peer: timing.spread for peer, timing in measured.timings.items()},
            "best_peer": best, "vs_best": ratio(us.get(best), own), "best_dense": dense, "vs_best_dense": ratio(us.get(dense), own),
            "default": measured.timings["sdpa"].note or None if "sdpa" in measured.timings else None,
            "vs_default": ratio(us.get("sdpa"), own),
            "base": base.name if base else None, "vs_base": ratio(own, base_us),
        }  # fmt: skip
        if row.kind in ("prefill", "backward", "decode"):
            rates = (found.get("gemm_tflops"), found.get("copy_gbs"), facts.get("exponentials_per_s"))
            floors = row.floors_us(*rates)
            bound = max(floors, key=floors.get) if floors else None
            floor = floors.get(bound)
            figure |= {
                "floors_us": floors, "floor_us": floor, "bound": bound,
                "percent_of_floor": {peer: 100 * floor / value for peer, value in us.items() if value and floor},
                "tflops": {peer: row.flops / value / 1e6 for peer, value in us.items() if value},
                "gbs": {peer: (row.read_bytes + row.mask_bytes) / value / 1e3 for peer, value in us.items() if value},
            }  # fmt: skip
            figure["percent_of_copy"] = {peer: 100 * gbs / rates[1] for peer, gbs in figure["gbs"].items() if rates[1]}
        figure["bars"] = [bar_of(figure, over, least) for over, least in row.bars]
        figures.append(figure)
    return figures


def bar_of(figure, over, least):
    """{over, ratio, reached, met}: met is None where one of the two has no time."""
    own = figure["us"].get(figure["lead"])
    if over == "best":
        reached = figure["vs_best"]
    elif over == "best-dense":
        reached = figure["vs_best_dense"]
    elif over == "default":
        reached = figure["vs_default"]
    elif over == "base":
        reached = 1 / figure["vs_base"] if figure["vs_base"] else None
    elif over == "copy":
        reached = ratio(figure.get("floors_us", {}).get("bytes"), own)
    else:
        reached = ratio(figure["us"].get(over), own)
    return {"over": over, "ratio": least, "reached": reached, "met": None if reached is None else reached >= least}


# ---- tables


def microseconds(figure, name):
    """`1,234 ±2%`, or – where the engine has no time on this row."""
    us = figure["us"].get(name)
    if us is None:
        return "–"
    text = f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"
    spread = figure["spread"].get(name)
    return text if spread is None else f"{text} ±{100 * spread:.0f}%"


def error_of(measured, name):
    timing = measured.timings.get(name)
    return "–" if timing is None or timing.error is None else f"{timing.error.relative:.1e}"


def against(figure, what, peer):
    return "–" if figure[what] is None else f"{figure[what]:.2f} {peer or ''}".rstrip()


def tables(everything, figures):
    """[(title, header, rows, notes)]: prefill, backward, decode, calls; those that have rows."""
    pairs = list(zip(everything, figures))
    made = []
    leading = ["row", "B,H,S,D", "dtype"]

    def of(*kinds):
        chosen = [pair for pair in pairs if pair[1]["kind"] in kinds]
        present = dict.fromkeys(name for _, figure in chosen for name in figure["us"])
        shown = [name for name in present if name != "sdpa" or "call" in kinds]  # else the column "vs default"
        return chosen, [name for name in shown if any(figure["us"].get(name) for _, figure in chosen)]

    def common(figure):
        return [figure["row"], figure["dims"], figure["dtype"]]

    for kind, title in (("prefill", "Prefill (causal counts half)"), ("backward", "Backward alone: dq, dk and dv (causal counts half)")):
        chosen, names = of(kind)
        lines = [
            common(figure)
            + [microseconds(figure, figure["lead"])]
            + [number(figure["tflops"].get(name), "{:.0f}") for name in names]
            + [
                against(figure, "vs_best", figure["best_peer"]), against(figure, "vs_default", figure["default"]),
                number(figure["vs_base"]), number(figure["floor_us"], "{:,.1f}"), figure["bound"] or "–",
                number(figure["percent_of_floor"].get(figure["lead"]), "{:.0f}%"), error_of(measured, figure["lead"]),
            ]
            for measured, figure in chosen
        ]  # fmt: skip
        header = [*leading, "rapt us", *(f"{name} TFLOP/s" for name in names)]
        header += ["vs best", "vs default", "vs base", "floor us", "bound", "% floor", "error"]
        if chosen:
            made.append((title, header, lines, []))

    chosen, names = of("decode")
    if chosen:
        lines = [
            common(figure)
            + [microseconds(figure, name) for name in names]
            + [
                against(figure, "vs_best", figure["best_peer"]), against(figure, "vs_default", figure["default"]),
                number(figure["vs_base"]), number(figure["gbs"].get(figure["lead"]), "{:,.0f}"),
                number(figure["floor_us"], "{:.1f}"), number(figure["percent_of_copy"].get(figure["lead"]), "{:.0f}%"),
                error_of(measured, figure["lead"]),
            ]
            for measured, figure in chosen
        ]  # fmt: skip
        header = [*leading, *(f"{name} us" for name in names)]
        header += ["vs best", "vs default", "vs base", "GB/s", "floor us", "% copy", "error"]
        made.append(("Decode (K and V rotated over at least 4x the L2 cache)", header, lines, []))

    chosen, names = of("call", "add")
    if chosen:
        lines = [
            common(figure) + [microseconds(figure, name) for name in names] + [number(figure["vs_best"])] for _, figure in chosen
        ]
        under = ["wall time of enqueueing, without waiting for the device; add-4: torch.add on 4 elements, for scale"]
        made.append(("One tiny call on the host", [*leading, *(f"{name} us" for name in names), "vs sdpa"], lines, under))
    return made


def bars_table(figures):
    """The bars as a table, those unmet first."""
    lines = [
        [
            figure["row"], figure["dims"], figure["dtype"], f"≥ {bar['ratio']:g}x {bar['over']}", number(bar["reached"]),
            {True: "met", False: "below", None: "not measured"}[bar["met"]],
        ]
        for figure in figures
        for bar in figure["bars"]
    ]  # fmt: skip
    lines.sort(key=lambda line: ("below", "not measured", "met").index(line[-1]))
    return ("Bars", ["row", "B,H,S,D", "dtype", "asked", "reached", ""], lines, [])


def summary(figures):
    """How many bars are met, in a line; "" where no row has any."""
    every = [bar for figure in figures for bar in figure["bars"]]
    missed = sum(bar["met"] is None for bar in every)
    text = f"bars: {sum(bar['met'] is True for bar in every)} of {len(every)} met"
    return (text + (f", {missed} not measured" if missed else "")) if every else ""


def notes(everything, lost, overall):
    """The ceilings, and the reasons for the dashes, each said once."""
    said = []
    if overall:
        said.append(f"copy {overall['copy_gbs']:,.0f} GB/s, bfloat16 GEMM {overall['gemm_tflops']:.0f} TFLOP/s, medians of the run")
    said += [f"{name} is left out: {reason}" for name, reason in lost.items()]
    seen = {}
    for measured in everything:
        for name, timing in measured.timings.items():
            if timing.void:
                seen.setdefault((name, timing.void), []).append(measured.row.key)
    for (name, reason), keys in seen.items():
        where = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
        said.append(f"{name} has no time on {where}: {reason}")
    return said


def heading(facts):
    clock = f" at up to {facts['clock_hz'] / 1e9:.2f} GHz" if facts["clock_hz"] else ""
    gpu = f"{facts['gpu']} ({facts['capability']}, {facts['multiprocessors']} multiprocessors{clock})"
    return [
        f"{facts['date']}, {gpu}, driver {facts['driver']}",
        f"rapt {facts['rapt']}, torch {facts['torch']}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}",
    ]


def page(made, facts, said, command):
    return table.markdown(facts["gpu"], [*heading(facts), f"`{command}`"], made, said)


def record(everything, figures, engines, facts, overall, said, command, method):
    """The whole run as one JSON object; `rounds_us` is each round's time per call."""
    rows = []
    for measured, figure in zip(everything, figures):
        timings = {}
        for name, timing in measured.timings.items():
            error = dataclasses.asdict(timing.error) if timing.error else None
            timings[name] = {
                "note": timing.note, "void": timing.void, "verdict": timing.verdict,
                # JSON has no infinity: a result that is not finite has no error figure, and says finite: false
                "error": {key: None if value == float("inf") else value for key, value in error.items()} if error else None,
                "calls": timing.calls, "rounds_us": [round(us, 3) for us in timing.rounds],
            }  # fmt: skip
        limit = dataclasses.asdict(measured.limit) if measured.limit else None
        rows.append({**dataclasses.asdict(measured.row), **figure, "limit": limit, "ceilings": measured.ceilings, "timings": timings})
    titles = {name: engine.title for name, engine in engines.items()}
    return {
        "schema": SCHEMA, "benchmark": "cuda", "machine": facts, "command": command, "method": method, "ceilings": overall,
        "peers": titles, "notes": said, "rows": rows,
    }  # fmt: skip


def picture(figures, engines, title):
    """SVG text: what part of its floor's speed each engine reaches, or None where there is no floor."""
    panels = {}
    for figure in figures:
        if figure.get("percent_of_floor"):
            heading = figure["kind"] if figure["kind"] in ("decode", "backward") else "dense" if "dense" in figure["groups"] else "the rest"
            values = {name: percent / 100 for name, percent in figure["percent_of_floor"].items() if name != "sdpa"}
            panels.setdefault(f"{heading}: part of the floor", []).append((f"{figure['row']} {figure['dtype']}", values))
    if not panels:
        return None
    series = {name: (engine.title, engine.colour) for name, engine in engines.items()}
    return draw(title, series, list(panels.items()), lead="rapt", longest=1)


# ---- verdicts


def broken(everything):
    """Our rows that failed or left the tolerance; a run with one exits non-zero."""
    return [f"{m.row.key}: {name}: {timing.verdict}" for m in everything for name, timing in m.timings.items() if timing.verdict]


def below(figures):
    """Bars that are not met, or could not be asked."""
    return [
        f"{figure['row']} {figure['dtype']}: {number(bar['reached'])} of {bar['over']}, asked {bar['ratio']:g}"
        for figure in figures
        for bar in figure["bars"]
        if bar["met"] is False
    ]


def slower_than_default(figures):
    """Rows on which Rapt has a larger median than what torch picks by itself (call rows: than its function)."""
    found = []
    for figure in figures:
        us, own = figure["us"].get("sdpa"), figure["us"].get(figure["lead"])
        if us and own and own > us:
            found.append(f"{figure['row']} {figure['dtype']}: {own:,.1f} us, torch {us:,.1f} us ({own / us:.2f}x)")
    return found
