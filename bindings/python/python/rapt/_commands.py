"""Subcommands of `rapt` whose code is Python. Their words are declared in crates/rapt-cli/src/python.rs."""

import json
import sys
from types import SimpleNamespace

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class UsageError(ValueError):
    """An option's value is wrong; the text says what is allowed."""


def run(name, options):
    """Run `audit` or `bench cuda` with its options, a JSON object; the exit code."""
    try:
        if name == "audit":
            from rapt._audit.cli import run as command
        else:
            from rapt.bench.cli import run as command
        return command(SimpleNamespace(**json.loads(options)))
    except UsageError as error:
        print(f"rapt {name}: {error}\n\nFor more information, try 'rapt {name} --help'.", file=sys.stderr)
        return USAGE
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        print(f'rapt {name} needs numpy. Install it: python3 -m pip install "rapt-attention[numpy]"', file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        sys.stdout.flush()
