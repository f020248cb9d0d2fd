"""`python -m rapt audit TARGET`.

Exit codes: 0 nothing as grave as --fail-on; 1 findings as grave; 2 wrong usage; 3 the callee cannot be audited (not found, or
it refuses a plain call).
"""

import os
import sys

from .callee import TargetError
from .hazards import BY_NAME, SEVERITIES, TABLE
from .checks import DTYPES, audit, check_options

CANNOT = 3


def add_to(commands):
    """Declare the command."""
    parser = commands.add_parser(
        "audit",
        help="check an attention for boundary bugs",
        description="Check an attention for boundary bugs: torch, rapt, or MODULE:FUNCTION with the signature of "
        "scaled_dot_product_attention or of rapt.attention.",
        epilog="exit codes: 0 nothing as grave as --fail-on, 1 findings as grave, 2 wrong usage, 3 the callee cannot be audited",
    )
    parser.add_argument("target", nargs="?", help="torch, rapt or MODULE:FUNCTION (the current folder is searched)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of float32,bfloat16,float16,float64")
    parser.add_argument("--hazards", default="all", help="all (default) or names, separated by commas")
    parser.add_argument("--kind", default="auto", choices=("auto", "torch", "numpy"), help="the tensors that the callee takes")
    parser.add_argument("--budget", dest="budget_s", type=float, default=60.0, metavar="SECONDS", help="default 60")
    parser.add_argument(
        "--fail-on", default="high", choices=(*SEVERITIES, "never"), help="exit 1 from this severity up (default high)"
    )
    parser.add_argument("--json", metavar="PATH", help="write the report as JSON; - is stdout, in place of the table")
    parser.add_argument("--junit", metavar="PATH", help="write JUnit XML; what --fail-on does not reach is no failure")
    parser.add_argument("--html", metavar="PATH", help="write one self-contained page")
    parser.add_argument("--list", action="store_true", help="list the hazards and end")
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options, parser):
    """The exit code."""
    if options.list:
        width = max(map(len, BY_NAME))
        print("\n".join(f"{hazard.name:{width}}  {hazard.severity:8}  {hazard.title}" for hazard in TABLE))
        return 0
    if options.target is None:
        parser.error("a target is needed: torch, rapt or MODULE:FUNCTION")
    try:
        check_options(options.device, options.dtypes, options.hazards, options.budget_s, options.kind)
    except ValueError as error:
        parser.error(str(error))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        report = audit(options.target, options.device, options.dtypes, options.hazards, options.budget_s, kind=options.kind)
    except TargetError as error:
        print(f"rapt audit: {error}", file=sys.stderr)
        return CANNOT
    if options.json == "-":
        print(report.to_json())
    else:
        print(report)
        if options.json:
            report.to_json(options.json)
    if options.junit:
        report.to_junit(options.junit, fail_on=options.fail_on)
    if options.html:
        report.to_html(options.html)
    return 1 if options.fail_on != "never" and report.at_least(options.fail_on) else 0
