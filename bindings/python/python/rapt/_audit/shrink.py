"""Smaller cases that still fail.

Greedy: of the cases one step smaller (case.smaller) the first whose reproducer still fails an assertion replaces the case,
until none does. What is asked is the reproducer itself, so that what is shrunk is what will be shown.
Deliberately absent: cases that kill the callee (each try would cost a process).
"""

import time

from .case import smaller

MOST_TRIES = 150


def shrink(case, write, still_fails, seconds):
    """The smallest case found, and its text; (None, None) where the case's own reproducer does not fail."""
    text = write(case)
    if text is None or not still_fails(text):
        return None, None
    end, tries = time.monotonic() + seconds, 0
    while True:
        for candidate in smaller(case):
            if tries >= MOST_TRIES or time.monotonic() > end:
                return case, text
            tries += 1
            new = write(candidate)
            if new is not None and still_fails(new):
                case, text = candidate, new
                break
        else:
            return case, text
