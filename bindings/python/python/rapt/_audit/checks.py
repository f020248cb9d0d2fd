"""`rapt.audit`: the whole run of checks.

    open the callee ─► each hazard × dtype × probe, judged in the child ─► findings ─► shrink ─► prove ─► Report

Hazards are taken in the table's order until the budget is spent; part of it is kept for the reproducers. Deliberately absent: how anything is judged (judges.py), how a report looks (report.py, page.py).
"""

import sys

from . import progress
from .callee import Offer, TargetError, find
from .case import Case
from .gradient_script import UNSHRUNK
from .hazards import BY_NAME, SEVERITIES, TABLE
from .report import Finding, HazardResult, Report
from .script import write
from .shrink import shrink
from .supervisor import LATE, Child, Clock, Died, Hung, Nursery

DTYPES = ("float32", "bfloat16", "float16", "float64")


def audit(fn, device="cpu", dtypes=DTYPES, hazards="all", budget_s=60, *, kind="auto", show_progress=None):
    """Check an attention for boundary bugs; see `rapt.audit`."""
    dtypes, chosen = check_options(device, dtypes, hazards, budget_s, kind)
    target, fn = find(fn)
    if fn is not None and device != "cpu":
        raise TargetError(
            'a callee that cannot be imported by name is audited in a fork, which a GPU does not survive: pass "MODULE:FUNCTION"'
        )
    checks = Checks(target, fn, device, dtypes, chosen, Clock(budget_s), kind)
    with progress.Bar(len(chosen), show_progress) as checks.bar:
        return checks.run()


def check_options(device, dtypes, hazards, budget_s, kind):
    """(dtypes, hazards) as tuples; ValueError that lists what is allowed."""
    if isinstance(dtypes, str):
        dtypes = [name for name in dtypes.split(",") if name]
    dtypes = tuple(dict.fromkeys(str(getattr(dtype, "__name__", dtype)).removeprefix("torch.") for dtype in dtypes))
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if str(device).startswith("mps"):
        dtypes = tuple(dtype for dtype in dtypes if dtype != "float64")  # Metal has no 64-bit floats
    if unknown or not dtypes:
        raise ValueError(f"dtypes {unknown or 'empty'}: allowed are {', '.join(DTYPES)}")
    if isinstance(hazards, str):
        every = [hazard.name for hazard in TABLE if hazard.concerns(device)]
        hazards = every if hazards == "all" else [name for name in hazards.split(",") if name]
    unknown = [name for name in hazards if name not in BY_NAME]
    if unknown or not hazards:
        raise ValueError(f'hazards {unknown or "empty"}: allowed are "all" or of {", ".join(BY_NAME)}')
    if not isinstance(budget_s, (int, float)) or isinstance(budget_s, bool) or not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s!r}: seconds, greater than 0")
    if device != "cpu" and str(device).partition(":")[0] not in ("cuda", "mps"):
        raise ValueError(f'device {device!r}: allowed are "cpu", "cuda" and "mps"')
    if kind not in ("auto", "torch", "numpy"):
        raise ValueError(f'kind {kind!r}: allowed are "auto", "torch", "numpy"')
    return dtypes, [hazard for hazard in TABLE if hazard.name in set(hazards)]


class Checks:
    """One audit on its way."""

    def __init__(self, target, fn, device, dtypes, hazards, clock, kind):
        self.target, self.fn, self.device, self.dtypes, self.hazards, self.clock = target, fn, device, dtypes, hazards, clock
        self.kind, self.child, self.offer, self.bar = kind, Child(fn), None, None
        self.boot_s, self.verdicts, self.findings, self.results, self.nursery = 0.0, {}, {}, [], None

    def run(self):
        try:
            plain = self.open()
            if plain is None:
                for number, hazard in enumerate(self.hazards):
                    self.bar.at(number, hazard.name, len(self.findings))
                    self.results.append(self.check(hazard))
            else:
                self.results = [
                    HazardResult(h.name, h.severity, h.title, "blocked", note=f"a plain call {plain}") for h in self.hazards
                ]
                for result in self.results:
                    result.verdict = "found" if result.name == "accuracy" else result.verdict
            found = sorted(self.findings.values(), key=lambda each: -SEVERITIES.index(each.severity))
            self.reproduce(found)
        finally:
            self.child.stop()
            if self.nursery is not None:
                self.nursery.close()
        return Report(
            self.target.label, self.offer, self.device, self.dtypes, self.results, found, self.clock.spent, self.clock.budget_s
        )

    def open(self):
        """Find the kind of tensors that the callee takes. What a plain call did instead of answering, or None."""
        # Processes can be slow to start on a loaded machine; an import is no probe and is not held to the budget.
        before = self.clock.spent
        said = self._open()
        refusals = []
        for kind in said["kinds"]:
            for dtype in self.dtypes:
                try:
                    reply = self.child.ask(
                        "attempt", said["style"], said["options"], kind, dtype, timeout=max(60, self.clock.left)
                    )
                except (Died, Hung) as error:
                    how = f"died by {error.how}" if isinstance(error, Died) else "did not return"
                    case = Case(dtype, batch=1, heads=2, kv_heads=2, q_len=8, kv_len=8, head_dim=8, head_dim_v=8)
                    self.offer = Offer(said["style"], tuple(said["options"]), kind)
                    self.add(BY_NAME["accuracy"], case, crash_evidence(error, "crash"))
                    return how
                if "offer" in reply:
                    self.offer, self.boot_s = reply["offer"], self.clock.spent - before
                    return None
                refusals.append(f"{kind} {dtype}: {reply['refused']}")
        raise TargetError(f"{self.target.label} refuses a plain call: " + "; ".join(dict.fromkeys(refusals)))

    def _open(self):
        try:
            said = self.child.ask("open", self.target, self.kind, self.device, list(sys.path), timeout=120)
        except (Died, Hung) as error:
            raise TargetError(f"{self.target.label} cannot be imported: {error}") from error
        if "error" in said:
            raise TargetError(said["error"])
        return said

    def revive(self):
        """A child that holds the callee again, after a death."""
        said = self._open()
        self.child.ask("attempt", said["style"], said["options"], self.offer.kind, self.dtypes[0], timeout=60)

    def judge(self, hazard, case):
        """The verdict of one probe; a death of the child is one too."""
        if not self.child.alive:
            self.revive()
        # The judge of memory spends some seconds on purpose, and more where others load the machine.
        timeout = max(5.0, min(60.0 if hazard.judge == "memory" else 25.0, self.clock.left))
        try:
            return self.child.ask("judge", hazard.name, case, self.clock.left, timeout=timeout)
        except Died as error:
            cause = (
                "over-read"
                if hazard.judge in ("pages", "bands") or error.how in ("SIGSEGV", "SIGBUS") and case.guard
                else "crash"
            )
            return {"verdict": "found", "evidence": crash_evidence(error, cause)}
        except Hung as error:
            if self.fn is not None or hazard.judge == "memory" or timeout < 10:
                return {"verdict": "undecided", "note": str(error)}
            return {"verdict": "found", "evidence": crash_evidence(error, "hang")}

    def reserve(self):
        """Seconds kept for the reproducers of what is found so far."""
        return min(0.5 * self.clock.budget_s, 2 + 0.7 * len(self.findings))

    def check(self, hazard):
        """All probes of a hazard."""
        dtypes = [dtype for dtype in self.dtypes if hazard.concerns(self.device) and (not hazard.dtypes or dtype in hazard.dtypes)]
        dtypes = dtypes[:1] if hazard.once else dtypes
        seen, notes, probes, begun = {}, {}, 0, self.clock.spent
        for dtype in dtypes:
            blockers = [name for name in hazard.needs if self.verdicts.get((name, dtype)) in ("found", "blocked")]
            if blockers:
                seen[dtype], notes["blocked"] = "blocked", f"{blockers[0]} fails already"
                continue
            verdicts = set()
            for case in hazard.cases(dtype):
                if self.clock.left < self.reserve():
                    verdicts.add("not run")
                    notes["not run"] = f"the budget of {self.clock.budget_s:g} s was spent"
                    break
                reply = self.judge(hazard, case)
                probes += 1
                verdicts.add(reply["verdict"])
                if "note" in reply:
                    notes[reply["verdict"]] = reply["note"]
                if reply["verdict"] == "found":
                    self.add(hazard, case, reply["evidence"])
                    break
            order = ("found", "undecided", "clean", "not run", "refused", "not offered")
            seen[dtype] = next((v for v in order if v in verdicts), "not offered")
        for dtype, verdict in seen.items():
            self.verdicts[hazard.name, dtype] = verdict
        order = ("found", "undecided", "clean", "blocked", "not run", "refused", "not offered")
        verdict = next((v for v in order if v in seen.values()), "not offered")
        if not dtypes:
            notes["not offered"] = "it concerns neither the dtypes nor the device audited"
        return HazardResult(
            hazard.name, hazard.severity, hazard.title, verdict, seen, notes.get(verdict, ""), probes, self.clock.spent - begun
        )

    def add(self, hazard, case, evidence):
        """One finding per hazard and cause; further dtypes join it."""
        finding = self.findings.get((hazard.name, evidence["cause"]))
        if finding is None:
            severity = evidence["severity"] or hazard.severity
            finding = Finding(hazard.name, evidence["cause"], severity, hazard.title, evidence, case, [])
            self.findings[hazard.name, evidence["cause"]] = finding
            if self.nursery is None and self.target.module is not None:
                # It imports while the checks go on.
                self.nursery = Nursery("torch" if self.offer.kind == "torch" else "numpy")
        finding.dtypes.append(case.dtype)

    def reproduce(self, findings):
        """Shrink each finding's case and run its program once in a fresh process."""
        for number, finding in enumerate(findings):
            self.bar.at(len(self.hazards), f"reproducer {number + 1} of {len(findings)}", len(findings))
            self.program(finding, len(findings) - number)
            self.prove(finding)

    def program(self, finding, to_come):
        """The finding's program, shrunk where the callee survives it."""
        judge = BY_NAME[finding.hazard].judge

        def text(case):
            return write(finding.hazard, judge, case, self.target, self.offer, finding.evidence["check"], self.device)

        finding.reproducer = {"source": None, "reproduced": False, "outcome": "none could be written", "shrunk": False}
        source = text(finding.case)
        if source is None and judge == "pages":
            source = text(finding.case.but(mask=None, views=()))
        finding.reproducer["source"] = source
        if (
            source is None
            or self.offer is None
            or "signal" in finding.evidence["numbers"]
            or finding.cause in ("crash", "hang")
            or judge == "memory"
            or judge in UNSHRUNK
        ):
            return
        seconds = max(0.1, min(1.0, self.clock.left / to_come - 0.3))
        case, smaller = None, None
        try:
            if not self.child.alive:
                self.revive()
            case, smaller = shrink(finding.case, text, self.fails, seconds)
        except (Died, Hung):
            pass
        if smaller is not None:
            finding.reproducer |= {"source": smaller, "shrunk": case != finding.case, "original": source}
            finding.shrunk = case

    def fails(self, text):
        return self.child.ask("script", text, timeout=20)["outcome"] == "asserts"

    def prove(self, finding):
        """Run the program; where the shrunk one passes, the unshrunk one."""
        run, place = (self.in_fork, "a fork, with fn given") if self.nursery is None else (self.nursery.run, "a fresh process")
        made, original = finding.reproducer, finding.reproducer.pop("original", None)
        if made["source"] is None:
            return
        hang = finding.cause == "hang"
        timeout = 5.0 if hang else max(20.0, self.clock.left)
        held, outcome = run(made["source"], timeout)
        faulted = "signal" in finding.evidence["numbers"] and "CUDA error" in outcome
        held = held or hang and outcome == LATE or faulted
        if not held and original not in (None, made["source"]):
            held, outcome = run(original, timeout)
            made |= {"source": original, "shrunk": False}
            finding.shrunk = None
        made |= {"reproduced": held, "outcome": outcome, "ran_in": place}

    def in_fork(self, text, timeout):
        """The program of a callee that only this process has, in a fork of its own."""
        child = Child(self.fn)
        try:
            child.ask("open", self.target, self.kind, self.device, [], timeout=timeout)
            said = child.ask("script", text, timeout=timeout)
            return said["outcome"] == "asserts", said.get("message", said["outcome"])
        except Died as error:
            return error.code < 0, error.how
        except Hung as error:
            return False, str(error)
        finally:
            child.stop()


def crash_evidence(error, cause):
    """Evidence of a death or of silence."""
    numbers = {"signal": error.how, "code": error.code} if isinstance(error, Died) else {}
    text = str(error).replace("the process", "the callee's process")
    return {
        "text": text,
        "cause": cause,
        "numbers": numbers,
        "severity": "critical",
        "diagnosis": None,
        "error_map": None,
        "check": {},
    }
