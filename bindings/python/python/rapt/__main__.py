"""`python -m rapt …`, and the command `rapt`: the command line of crates/rapt-cli in this process."""

import sys

from rapt import _native


def main(words=None):
    """Run the command line with these words (default: the program's own); the exit code."""
    sys.stdout.flush()  # native code writes to the same file
    return _native.cli(sys.argv[1:] if words is None else list(words))


if __name__ == "__main__":
    sys.exit(main())
