"""`rapt audit TARGET`; its words are declared in crates/rapt-cli/src/python.rs."""

import os
import sys

from rapt._commands import UsageError

from . import apple
from .callee import TargetError
from .hazards import BY_NAME, TABLE
from .checks import audit, check_options

CANNOT = 3


def run(options):
    """The exit code."""
    if options.list:
        width = max(map(len, BY_NAME))
        print("\n".join(f"{hazard.name:{width}}  {hazard.severity:8}  {hazard.title}" for hazard in TABLE))
        return 0
    if options.target is None:
        raise UsageError("a target is needed: torch, rapt or MODULE:FUNCTION")
    try:
        check_options(options.device, options.dtypes, options.hazards, options.budget_s, options.kind)
    except ValueError as error:
        raise UsageError(error) from None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        report = audit(options.target, options.device, options.dtypes, options.hazards, options.budget_s, kind=options.kind)
    except TargetError as error:
        print(f"rapt: {error}", file=sys.stderr)
        return CANNOT
    if options.json == "-":
        print(report.to_json())
    else:
        print(report)
        if options.device.startswith("mps"):
            print(f"\n{apple.block(report)}")
        if options.json:
            report.to_json(options.json)
    if options.junit:
        report.to_junit(options.junit, fail_on=options.fail_on)
    if options.html:
        report.to_html(options.html)
    return 1 if options.fail_on != "never" and report.at_least(options.fail_on) else 0
