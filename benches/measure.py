"""One run: every family of rows prepared in every worker, checked against the f64 reference, then timed in rounds.

    for each round: the ceilings, then for each row of the family: one timed batch of each peer, starting with another one each time;
                    of kind first: one call of a process that is started for it

A round's figure of a peer is the median of its batch; a row's figure is the median over rounds, its spread the interquartile range.
"""

import dataclasses
import pathlib
import statistics

import numpy as np

import ceilings
import gradients
import inputs
import reference
from peers import PEERS
from workers import Died

from rapt.bench import interleaved

WRONG = 0.1  # a peer this far from the reference computed something else: its time is void
# The same of a peer that makes codes of its own, against the numbers that it made them of: 4 bits are that bad.
WRONG_CODES = {"int8": 0.1, "int4": 0.5}
# Its error is at least this part of that of Rapt's codes: what is nearer was computed on numbers.
LEAST_OF_CODES = 0.4

MOST_RESTARTS = 3


@dataclasses.dataclass
class Timing:
    """One peer on one row."""

    note: str = ""
    void: str = ""  # why there is no time
    error: reference.Error | None = None
    rounds: list = dataclasses.field(default_factory=list)  # [[microseconds of each call]] by round
    verdict: str = ""  # ours only: "" within tolerance, else what broke
    peak_bytes: int | None = None  # of a training row: the most that a step holds beyond its output and gradients

    @property
    def by_round(self):
        return [statistics.median(samples) for samples in self.rounds]

    @property
    def median(self):
        return statistics.median(self.by_round) if self.rounds and not self.void else None

    @property
    def spread(self):
        """Interquartile range over rounds, as a fraction of the median."""
        if len(self.rounds) < 2 or self.void:
            return None
        return interleaved.spread(self.by_round)


def wrong(row, error, codes_error):
    """Why a peer with this relative error has no time, "" where it has one."""
    limit = WRONG if row.formats is None else WRONG_CODES[row.formats[0][0]]
    if not error < limit:
        return f"wrong result (relative error {error:.1e})"
    if row.formats and error < LEAST_OF_CODES * codes_error.relative:
        return f"its cache is not of codes (relative error {error:.1e}, that of {row.storage} {codes_error.relative:.1e})"
    return ""


class Run:
    def __init__(self, workers, restart, ceiling_program, rounds, seconds, folder, cache_bytes, memory_bytes, progress):
        self.workers = workers  # {peer name: Worker}; one that dies leaves, and is started anew for the next family
        self.restart = restart  # peer name -> Worker
        self.ceiling_program = ceiling_program
        self.rounds = rounds
        self.seconds = seconds
        self.folder = pathlib.Path(folder)
        self.cache_bytes = cache_bytes
        self.memory_bytes = memory_bytes
        self.progress = progress
        self.deaths = {}  # {peer name: [reason]}

    def copies(self, row):
        """How many K and V a decode row rotates through: together at least 4x the last-level cache, and never one alone."""
        return max(2, -(-4 * self.cache_bytes // row.kv_bytes)) if row.kind == "decode" else 1

    def held_bytes(self, row):
        """What the workers together will hold for `row`, outputs and scratch included by the factor."""
        mask = row.batch * row.q_len * row.kv_len * 4 if row.mask != "none" or row.window else 0
        per_worker = (row.kv_bytes + row.q_bytes) * 2 + row.out_bytes + mask + row.kv_bytes * (self.copies(row) - 1)
        return per_worker * len(self.workers)

    def family(self, rows):
        """Measures rows that belong together; too large for memory all at once, they go one by one."""
        if sum(map(self.held_bytes, rows)) > 0.6 * self.memory_bytes and len(rows) > 1:
            return [measured for row in rows for measured in self.family([row])]
        for name, reasons in self.deaths.items():
            if name not in self.workers and len(reasons) <= MOST_RESTARTS:
                try:
                    self.workers[name] = self.restart(name)
                except Died as reason:
                    reasons.append(str(reason))
        everything = [interleaved.Measured(row, {}) for row in rows]
        for measured in everything:
            self.prepare(measured)
        self.check(everything)
        self.time(everything)
        for measured in everything:
            for name in list(measured.timings):
                self.ask(name, "release", measured, key=measured.row.key)
        return everything

    def ask(self, name, do, measured, **arguments):
        """A worker's answer; None, with the reason in the timing, where it has none."""
        timing = measured.timings[name]
        if name not in self.workers:
            timing.void = timing.void or f"died on a row of this shape: {self.deaths[name][-1]}"
            return None
        try:
            answer = self.workers[name].ask(do, **arguments)
        except Died as reason:
            self.deaths.setdefault(name, []).append(str(reason))
            self.workers.pop(name).end()
            answer = {"failed": str(reason)}
        if reason := answer.get("unsupported") or answer.get("failed"):
            timing.void = reason
            if PEERS[name].ours:
                timing.verdict = reason  # Rapt has every row
            return None
        return answer

    def first(self, name, measured):
        """The first call of a process that is started for it; None, with the reason in the timing, where there is none."""
        key, timing = measured.row.key, measured.timings[name]
        try:
            worker = self.restart(name)
            try:
                worker.ask("prepare", key=key, row=dataclasses.asdict(measured.row), copies=1)
                return worker.ask("first", key=key)
            finally:
                worker.end()
        except Died as reason:
            timing.void = str(reason)
            return None

    def prepare(self, measured):
        row = measured.row
        for name, worker in list(self.workers.items()):
            if worker.peer.takes(row):
                self.progress(row, f"prepare {name}")
                measured.timings[name] = Timing()
                answer = self.ask(name, "prepare", measured, key=row.key, row=dataclasses.asdict(row), copies=self.copies(row))
                if answer:
                    measured.timings[name].note = answer["note"]

    def check(self, everything):
        """Errors of every peer on every row; the reference is computed once for rows that differ only in where they lie."""
        wanted = {}

        def reference_of(row, queries):
            if row.values_key not in wanted:
                made = reference.of_codes(row, inputs.make(dataclasses.replace(row, layout="contiguous")))
                wanted[row.values_key] = made, reference.attention(row, made, queries)
            return wanted[row.values_key]

        for measured in everything:
            row = measured.row
            if row.kind == "add":
                continue
            if row.kind == "train":
                self.check_gradients(measured)
                continue
            self.progress(row, "check")
            queries = inputs.sampled_queries(row)
            made, want = reference_of(row, queries)
            if row.formats:
                # What a peer that makes codes of its own is judged by, and what Rapt's codes cost.
                _, originals = reference_of(dataclasses.replace(row, storage="numbers", compute="exact"), queries)
                measured.codes_error = reference.error(want, originals)
            of_torch, source = [], "torch in this run"
            for name, timing in measured.timings.items():
                out = str(self.folder / f"{name}.npy")
                answer = None if timing.void else self.ask(name, "check", measured, key=row.key, queries=queries, out=out)
                if answer is None:
                    continue
                own_codes = row.formats and not PEERS[name].ours
                timing.error = reference.error(np.load(out), originals if own_codes else want)
                timing.error.finite &= answer["finite"]
                if name == "stock":
                    of_torch = [timing.error]
                    if "math" in answer:
                        of_torch.append(reference.error(np.load(answer["math"]), want))
                    if timing.note != "flash":
                        of_torch.append(reference.error(reference.flash_rounded(row, made, queries), want))
            if not of_torch:
                of_torch, source = [reference.error(reference.flash_rounded(row, made, queries), want)], "flash's roundings"
            measured.limit = reference.limit(row.dtype, of_torch, source) if row.compute == "exact" else interleaved.limit_of_int8()
            for name, timing in measured.timings.items():
                if timing.error is None:
                    continue
                ours = PEERS[name].ours
                if ours and not measured.limit.allows(timing.error):
                    timing.verdict = (
                        f"error {timing.error.relative:.2e} (limit {measured.limit.relative:.2e}), worst row "
                        f"{timing.error.worst_row:.2e} (limit {measured.limit.worst_row:.2e}), by {measured.limit.source}"
                    )
                elif not ours:
                    timing.void = wrong(row, timing.error.relative, measured.codes_error)

    def check_gradients(self, measured):
        """The same of a training row: its output and the gradients by q, k and v, of one key head. The error that is kept is the largest
        beside its limit. With dropout the masks of engines differ: what they give is looked at for numbers that are not finite alone."""
        row = measured.row
        self.progress(row, "check gradients")
        want = None if row.dropout else gradients.of_row(row, inputs.make(row))
        found, of_torch = {}, []
        for name, timing in measured.timings.items():
            out = str(self.folder / f"{name}.npz")
            answer = None if timing.void else self.ask(name, "check_gradients", measured, key=row.key, head=gradients.sampled(row), out=out)
            if answer is None:
                continue
            timing.peak_bytes = answer.get("peak_bytes")
            if not answer["finite"]:
                timing.verdict = timing.void = "numbers that are not finite"
            elif want:
                found[name] = gradients.errors(list(np.load(out).values()), want)
                if name == "stock":
                    of_torch = [found[name]]
                    if "math" in answer:
                        of_torch.append(gradients.errors(list(np.load(answer["math"]).values()), want))
        for name, errors in found.items():
            timing = measured.timings[name]
            limits = [reference.limit(row.dtype, list(peers), "torch in this run") for peers in zip(*of_torch)]
            beside = [error.relative / limit.relative for error, limit in zip(errors, limits)] or [error.relative for error in errors]
            worst = beside.index(max(beside))
            timing.error = errors[worst]
            if PEERS[name].ours:
                measured.limit = limits[worst] if limits else None
                if not limits:
                    timing.verdict = "not judged: the limit of gradients is the error of stock, which is not in the run"
                for what, error, limit in zip(gradients.NAMES, errors, limits):
                    if not limit.allows(error):
                        timing.verdict = (
                            f"{what}: error {error.relative:.2e} (limit {limit.relative:.2e}), worst row {error.worst_row:.2e} "
                            f"(limit {limit.worst_row:.2e}), by {limit.source}"
                        )
            else:
                timing.void = wrong(row, max(error.relative for error in errors), None)

    def time(self, everything):
        samples = []
        for number in range(self.rounds):
            samples.append(self.ceiling_program.ask("compute"))
            if any(measured.row.kind == "decode" for measured in everything):
                samples.append(self.ceiling_program.ask("memory"))
            for measured in everything:
                names = [name for name, timing in measured.timings.items() if not timing.void]
                shift = number % max(1, len(names))
                for name in names[shift:] + names[:shift]:
                    self.progress(measured.row, f"round {number + 1}/{self.rounds} {name}")
                    if measured.row.kind == "first":
                        answer = self.first(name, measured)
                    else:
                        answer = self.ask(name, "time", measured, key=measured.row.key, seconds=self.seconds)
                    if answer:
                        measured.timings[name].rounds.append(answer["samples"])
        found = ceilings.combined(samples)
        for measured in everything:
            measured.ceilings = found
