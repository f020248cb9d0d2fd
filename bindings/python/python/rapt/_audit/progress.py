"""A progress bar on stderr, where that is a terminal."""

import sys
import time

WIDTH = 24


class Bar:
    """`with Bar(40, None) as bar: bar.at(3, "causal", 0)`; shown on a terminal unless set otherwise."""

    def __init__(self, total, shown):
        self.total, self.start = max(1, total), time.monotonic()
        self.shown = sys.stderr is not None and sys.stderr.isatty() if shown is None else shown

    def __enter__(self):
        return self

    def at(self, done, what, findings):
        """Draw: `done` of the hazards are checked, `what` is next."""
        if not self.shown:
            return
        filled = WIDTH * done // self.total
        seconds = time.monotonic() - self.start
        line = f"[{'█' * filled}{'·' * (WIDTH - filled)}] {done}/{self.total}  {seconds:3.0f} s  {findings} found  {what}"
        sys.stderr.write(f"\r\x1b[2K{line[:110]}")
        sys.stderr.flush()

    def __exit__(self, *_):
        if self.shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
