"""What a run says: derived figures, the tables (terminal and Markdown from one source), the JSON record, the check.

    vs stock, vs unlocked, vs best    their median / Rapt's median: above 1, Rapt is faster
    vs base                           Rapt's median / Rapt's median on the row's baseline (contiguous, full, unmasked, of numbers), same rounds
    % ceiling                         flops / time, of the measured ceiling; causal counts half the flops
    cycles, floor                     per score and core: time * GHz * threads / scores, and Row.floor_cycles
"""

import dataclasses
import statistics

import ceilings
import shapes
from peers import PEERS

from rapt.bench import table
from rapt.bench.table import number


def lead(measured):
    """The interface that a row's ratios are about: a call through torch's SDPA for call rows, rapt.attention else."""
    order = ("rapt-sdpa", "rapt") if measured.row.kind in ("call", "first", "train") else ("rapt", "rapt-sdpa", "rapt-avx2")
    return next((name for name in order if name in measured.timings and measured.timings[name].median), None)


def derive(everything):
    """One dict of plain figures per row; everything printed comes from it."""
    rows = [measured.row for measured in everything]
    by_key = {measured.row.key: measured for measured in everything}
    figures = []
    for measured in everything:
        row, found = measured.row, measured.ceilings
        medians = {name: timing.median for name, timing in measured.timings.items()}
        ours = lead(measured)
        us = medians.get(ours)
        peers = {name: median for name, median in medians.items() if median and not PEERS[name].ours}
        best = min(peers, key=peers.get) if peers else None
        width = PEERS[ours].width if ours else None
        peak, unit = ceilings.ceiling(found, row.dtype, width) if found else (None, "")
        base = shapes.baseline(row, rows)
        base_us = by_key[base.key].timings[ours].median if base and ours and ours in by_key[base.key].timings else None
        figure = {
            "row": row.name, "dtype": row.dtype, "dims": row.dims, "kind": row.kind, "groups": row.groups, "lead": ours, "us": medians,
            "spread": {name: timing.spread for name, timing in measured.timings.items()},
            "vs_stock": ratio(medians.get("stock"), us), "vs_unlocked": ratio(medians.get("unlocked"), us),
            "best_peer": best, "vs_best": ratio(peers.get(best), us), "base": base.name if base else None, "vs_base": ratio(us, base_us),
            "ceiling_unit": unit, "ceiling_gflops": peak, "ghz": found.get("ghz"),
            "peak_bytes": {name: timing.peak_bytes for name, timing in measured.timings.items() if timing.peak_bytes is not None},
            "mb_saved": row.copied_bytes / 1e6 if row.layout.endswith("_copy") else None,
            "codes_error": measured.codes_error.relative if measured.codes_error else None,
            "own_codes_error": {
                name: timing.error.relative
                for name, timing in measured.timings.items()
                if row.formats and timing.median and not PEERS[name].ours
            },
        }  # fmt: skip
        # Nothing here measures what products of int8 could reach.
        if row.kind in ("prefill", "train") and peak and row.compute == "exact":
            figure["percent_of_ceiling"] = {}
            for name, median in medians.items():
                own, _ = ceilings.ceiling(found, row.dtype, PEERS[name].width)
                if median and own:
                    figure["percent_of_ceiling"][name] = 100 * row.flops / median / 1e3 / own
        if row.kind == "prefill" and "percent_of_ceiling" in figure:
            flop, f32_flop = (ceilings.flop_per_cycle(found, dtype, width) for dtype in (row.dtype, "f32"))
            figure["flop_per_cycle"] = flop
            figure["floor_cycles"] = row.floor_cycles(flop, f32_flop)
            figure["cycles"] = us * 1e3 * found["ghz"] * found["threads"] / row.scores if us else None
        if row.kind == "decode":
            figure["gbs"] = {name: row.read_bytes / median / 1e3 for name, median in medians.items() if median}
            figure["dram_read_gbs"] = found.get("dram_read_gbs")
            figure["percent_of_dram"] = {
                name: 100 * gbs / found["dram_read_gbs"] for name, gbs in figure["gbs"].items() if found.get("dram_read_gbs")
            }
        figures.append(figure)
    return figures


def ratio(above, below):
    return above / below if above and below else None


# ---- tables


def microseconds(figure, name):
    """`1,234 ±2%`, or – where the peer has no time on this row; of a peer with codes of its own also the error that these make."""
    us = figure["us"].get(name)
    if us is None:
        return "–"
    text = f"{us:,.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"
    spread = figure["spread"][name]
    text += "" if spread is None else f" ±{100 * spread:.0f}%"
    error = figure["own_codes_error"].get(name)
    return text if error is None else f"{text} error {error:.1e}"


def mebibytes(figure, name):
    peak = figure["peak_bytes"].get(name)
    return number(None if peak is None else peak / 2**20, "{:.0f}")


def error_of(measured, ours):
    timing = measured.timings.get(ours)
    return "–" if timing is None or timing.error is None else f"{timing.error.relative:.1e}{' !' if timing.verdict else ''}"


def codes_column(chosen):
    """(header, cell of a figure) of the error of Rapt's codes; of nothing where no row has codes."""
    if any(figure["codes_error"] for _, figure in chosen):
        return ["codes"], lambda figure: [number(figure["codes_error"], "{:.1e}")]
    return [], lambda figure: []


LEADING = ["row", "B,H,S,D", "dtype"]
TRAILING = ["vs stock", "vs unlocked", "vs best", "vs base"]


def peers_of(chosen):
    """Those that have a time on some row, in their order."""
    return [name for name in PEERS if any(figure["us"].get(name) for _, figure in chosen)]


def common(measured, figure, names):
    """The cells of a row before those of its kind."""
    best = f"{figure['vs_best']:.2f} {figure['best_peer']}" if figure["vs_best"] else "–"
    return [
        figure["row"], figure["dims"], figure["dtype"], *(microseconds(figure, name) for name in names),
        number(figure["vs_stock"]), number(figure["vs_unlocked"]), best, number(figure["vs_base"]),
    ]  # fmt: skip


def training_table(chosen):
    """[table] of rows of forward and backward, [] where there are none."""
    if not chosen:
        return []
    names = peers_of(chosen)
    lines = [
        common(measured, figure, names)
        + [
            number(figure.get("percent_of_ceiling", {}).get(figure["lead"]), "{:.0f}%"),
            *(mebibytes(figure, name) for name in names), error_of(measured, figure["lead"]),
        ]
        for measured, figure in chosen
    ]  # fmt: skip
    header = [*LEADING, *(f"{name} us" for name in names), *TRAILING, "% ceiling", *(f"{name} MiB" for name in names), "error"]
    return [("Forward and backward", header, lines, ["MiB: the most that a step holds beyond its output and gradients"])]


def tables(everything, figures):
    """[(title, header, rows, notes)]: training, prefill, decode, copies, calls; those that have rows."""
    pairs = list(zip(everything, figures))
    made = training_table([pair for pair in pairs if pair[1]["kind"] == "train"])

    chosen = [pair for pair in pairs if pair[1]["kind"] == "prefill"]
    if chosen:
        names, (of_codes, codes_cell) = peers_of(chosen), codes_column(chosen)
        lines = [
            common(measured, figure, names)
            + [
                number(figure.get("percent_of_ceiling", {}).get(figure["lead"]), "{:.0f}%"),
                number(figure.get("cycles")), number(figure.get("floor_cycles")), error_of(measured, figure["lead"]),
                *codes_cell(figure),
            ]
            for measured, figure in chosen
        ]  # fmt: skip
        notes = []
        for dtype in dict.fromkeys(figure["dtype"] for _, figure in chosen):
            of_dtype = [figure for _, figure in chosen if figure["dtype"] == dtype and figure["ceiling_gflops"]]
            if of_dtype:
                peak = statistics.median(figure["ceiling_gflops"] for figure in of_dtype)
                ghz = statistics.median(figure["ghz"] for figure in of_dtype)
                flop = of_dtype[0]["flop_per_cycle"]
                notes.append(
                    f"{dtype}: held against {of_dtype[0]['ceiling_unit']}, {peak:,.0f} GFLOP/s at {ghz:.2f} GHz ({flop} flop per cycle and core)"
                )
        header = [*LEADING, *(f"{name} us" for name in names), *TRAILING, "% ceiling", "cycles/score", "floor", "error", *of_codes]
        made.append(("Prefill", header, lines, notes))

    chosen = [pair for pair in pairs if pair[1]["kind"] == "decode"]
    if chosen:
        names, (of_codes, codes_cell) = peers_of(chosen), codes_column(chosen)
        lines = [
            common(measured, figure, names)
            + [
                number(figure["gbs"].get(figure["lead"]), "{:.1f}"),
                number(figure["percent_of_dram"].get(figure["lead"]), "{:.0f}%"), error_of(measured, figure["lead"]),
                *codes_cell(figure),
            ]
            for measured, figure in chosen
        ]  # fmt: skip
        rates = [figure["dram_read_gbs"] for _, figure in chosen if figure["dram_read_gbs"]]
        notes = [f"DRAM read rate measured beside the rows: {statistics.median(rates):.1f} GB/s"] if rates else []
        header = [*LEADING, *(f"{name} us" for name in names), *TRAILING, "GB/s", "% DRAM", "error", *of_codes]
        made.append(("Decode (K and V rotated over at least 4x the last-level cache)", header, lines, notes))

    lines = []
    by_row = {(figure["row"], figure["dtype"]): figure for figure in figures}
    for measured, figure in pairs:
        if figure["mb_saved"] is None or figure["lead"] is None:
            continue
        in_place = dataclasses.replace(measured.row, layout=measured.row.layout.removesuffix("_copy")).name
        contiguous = dataclasses.replace(measured.row, layout="contiguous").name
        three = [by_row.get((name, figure["dtype"])) for name in (contiguous, in_place)] + [figure]
        us = [None if one is None else one["us"].get(figure["lead"]) for one in three]
        lines.append(
            [in_place, figure["dims"], figure["dtype"], *("–" if one is None else microseconds(one, figure["lead"]) for one in three),
             number(ratio(us[1], us[0])), number(ratio(us[2], us[1])), f"{figure['mb_saved']:.2f}"]
        )  # fmt: skip
    if lines:
        header = [*LEADING, "contiguous us", "in place us", "copy, then run us", "in place / contiguous", "copy / in place", "MB saved"]
        made.append(("In place against copy-then-run (rapt.attention)", header, lines, []))

    for kinds, title, note in (
        (("call", "add"), "One tiny call", "add-4: torch.add on 4 elements, for scale"),
        (("first",), "The first call of a process", "each round is a process that has imported what it needs and registered"),
    ):
        chosen = [pair for pair in pairs if pair[1]["kind"] in kinds]
        if chosen:
            names = peers_of(chosen)
            lines = [
                [figure["row"], figure["dims"], figure["dtype"], *(microseconds(figure, name) for name in names), number(figure["vs_stock"])]
                for _, figure in chosen
            ]
            made.append((title, [*LEADING, *(f"{name} us" for name in names), "vs stock"], lines, [note]))
    return made


def notes(everything, lost):
    """Reasons for the dashes, and which form of a peer was measured; each said once."""
    seen = {}
    for measured in everything:
        for name, timing in measured.timings.items():
            if timing.void:
                seen.setdefault((name, timing.void), []).append(measured.row.key)
    said = [f"{name}: {reason}" for name, reason in lost.items()]
    for (name, reason), keys in seen.items():
        where = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
        said.append(f"{name} has no time on {where}: {reason}")
    forms = {}
    for measured in everything:
        for name, timing in measured.timings.items():
            if timing.note and not timing.void and name in ("onnxruntime", "openvino", "stock"):
                forms.setdefault(name, {}).setdefault(timing.note, []).append(measured.row.key)
    for name, used in forms.items():
        said.append(f"{name} ran as: " + "; ".join(f"{form} ({len(keys)} rows)" for form, keys in used.items()))
    return said


def heading(machine, peers):
    commit = machine["commit"][:12] or "no commit"
    dirty = f", {len(machine['uncommitted'])} uncommitted files" if machine["uncommitted"] else ""
    merged = {what: value for found in peers.values() for what, value in found.items() if what not in ("capabilities", "isa")}
    versions = ", ".join(f"{what} {value}" for what, value in merged.items())
    chosen = ", ".join(f"{name} runs {found['isa']}" for name, found in peers.items() if "isa" in found)
    return [
        f"{machine['date']}, {machine['cpu']}, {machine['isa']}, {machine['threads']} threads, load {machine['load_before']} before",
        f"commit {commit}{dirty}",
        f"{versions}; {chosen}" if chosen else versions,
    ]


def markdown(made, machine, peers, said, command):
    return table.markdown(machine["cpu"], [*heading(machine, peers), f"`{command}`"], made, said)


def record(everything, figures, machine, peers, said, command, method):
    """The whole run as one JSON object. A round's sample is the median of its batch, its minimum and the number of timings in it."""
    rows = []
    for measured, figure in zip(everything, figures):
        timings = {}
        for name, timing in measured.timings.items():
            timings[name] = {
                "note": timing.note, "void": timing.void, "verdict": timing.verdict,
                # JSON has no infinity: a result that is not finite has no error figure, and says finite: false
                "error": {key: value if value != float("inf") else None for key, value in dataclasses.asdict(timing.error).items()}
                if timing.error else None,
                "rounds": [
                    {"median_us": round(statistics.median(samples), 3), "min_us": round(min(samples), 3), "timings": len(samples)}
                    for samples in timing.rounds
                ],
            }  # fmt: skip
        limit = dataclasses.asdict(measured.limit) if measured.limit else None
        rows.append({**dataclasses.asdict(measured.row), **figure, "limit": limit, "ceilings": measured.ceilings, "timings": timings})
    return {"machine": machine, "command": command, "method": method, "peers": peers, "notes": said, "rows": rows}


# ---- verdicts


def broken(everything):
    """Our rows that failed or left the tolerance; a run with one exits non-zero."""
    return [
        f"{measured.row.key}: {name}: {timing.verdict}"
        for measured in everything
        for name, timing in measured.timings.items()
        if timing.verdict
    ]


def slower_than_stock(everything):
    """Rows of group "anchors" on which an interface of Rapt has a larger median than stock torch, or lacks one of the two."""
    found = []
    anchors = [measured for measured in everything if "anchors" in measured.row.groups]
    if not anchors:
        return ["no row of group anchors was run"]
    for measured in anchors:
        stock = measured.timings["stock"].median if "stock" in measured.timings else None
        if not stock:
            found.append(f"{measured.row.key}: no time of stock torch")
            continue
        interfaces = [name for name in measured.timings if PEERS[name].ours and not PEERS[name].width]
        if not interfaces:
            found.append(f"{measured.row.key}: no time of rapt")
        for name in interfaces:
            us = measured.timings[name].median
            if not us or us > stock:
                found.append(f"{measured.row.key}: {name} {number(us, '{:,.1f}')} us, stock {stock:,.1f} us ({number(ratio(us, stock))}x)")
    return found
