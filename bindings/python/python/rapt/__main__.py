"""`python -m rapt doctor [--json]`, `python -m rapt audit TARGET` and `python -m rapt bench cuda`."""

import argparse
import json
import sys

import rapt
from rapt.bench import cli as bench


def main(arguments=None):
    """The exit code: doctor's is 0, or 1 where the self-test fails; audit's and bench's are told by their files."""
    parser = argparse.ArgumentParser(prog="python -m rapt", description="Attention with an exact tensor boundary.")
    parser.add_argument("--version", action="version", version=f"rapt {rapt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what this machine gets, and a self-test against the law")
    doctor.add_argument("--json", action="store_true", help="print the facts as JSON")
    doctor.set_defaults(run=run_doctor)
    # The auditor needs numpy, which doctor does not.
    if "audit" in (sys.argv[1:] if arguments is None else arguments)[:1]:
        from rapt._audit.cli import add_to

        add_to(commands)
    else:
        commands.add_parser("audit", help="check an attention for boundary bugs (needs numpy)")
    bench.add_arguments(commands.add_parser("bench", help="time attention on the GPU beside its peers (needs torch)"))
    options = parser.parse_args(arguments)
    return options.run(options)


def run_doctor(options):
    try:
        report = rapt.doctor()
    except rapt.RaptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if options.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
