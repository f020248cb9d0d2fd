"""The parent: it starts children, asks them one probe at a time, and learns of their death.

A callee that can be imported lives in a fresh Python process; one that cannot (a closure) in a fork of this one, served by a
thread of its own, because OpenMP's pool does not outlive a fork in the thread that had one. Deliberately absent: judging.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

from .callee import TargetError


class Died(Exception):
    """The child is gone: by a signal, or it left by itself."""

    def __init__(self, code, last_words):
        self.code, self.last_words = code, last_words
        try:
            self.how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            self.how = f"signal {-code}"
        super().__init__(f"the process died by {self.how}" + (f": {last_words}" if last_words else ""))


class Hung(Exception):
    """No answer in time; the child was killed."""


class Child:
    """A process that holds the callee; restarted by whoever asks again after a death."""

    def __init__(self, fn=None):
        self.fn, self.starts, self.boot_s = fn, 0, 0.0
        self._pid = self._process = self._connection = self._errors = None

    @property
    def alive(self):
        return self._connection is not None

    def start(self):
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()
        if self.fn is None:
            root = str(Path(__file__).parents[2])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from rapt._audit.worker import main; main({theirs.fileno()})"],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        else:
            self._fork(ours, theirs)
        theirs.close()
        self._connection = Connection(ours.detach())
        self.starts += 1

    def _fork(self, ours, theirs):
        if not hasattr(os, "fork"):
            raise TargetError("this callee cannot be imported by name, and there is no fork here: pass \"MODULE:FUNCTION\"")
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid:
            return
        code = 0
        try:
            ours.close()
            for stream in (1, 2):
                os.dup2(self._errors.fileno(), stream)
            from .worker import Worker

            thread = threading.Thread(target=Worker(self.fn).serve, args=(Connection(theirs.detach()),))
            thread.start()
            thread.join()
        except BaseException:  # noqa: BLE001 - nothing may unwind into the parent's stack
            code = 70
        os._exit(code)

    def ask(self, operation, *arguments, timeout=60.0):
        """The child's reply; Died or Hung if there is none."""
        if not self.alive:
            self.start()
        try:
            self._connection.send((operation, arguments))
            if not self._connection.poll(timeout):
                self.stop()
                raise Hung(f"no answer within {timeout:.0f} s")
            return self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code, words = self._wait(), self._last_words()
            self._forget()
            raise Died(code, words) from None

    def _wait(self):
        if self._process is not None:
            try:
                return self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                return self._process.wait()
        status = os.waitpid(self._pid, 0)[1]
        return os.waitstatus_to_exitcode(status)

    def _last_words(self):
        self._errors.seek(0)
        lines = self._errors.read()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def stop(self):
        """End the child, if there is one."""
        if not self.alive:
            return
        if self._process is not None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._wait()
        self._forget()

    def _forget(self):
        self._connection.close()
        self._errors.close()
        self._pid = self._process = self._connection = self._errors = None


class Proof:
    """A reproducer running once in a fresh process."""

    def __init__(self, text):
        self._folder = tempfile.TemporaryDirectory(prefix="rapt-audit-")
        path = Path(self._folder.name) / "reproduce.py"
        path.write_text(text)
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, str(path)], cwd=self._folder.name, stdin=subprocess.DEVNULL,
            stdout=self._errors, stderr=self._errors,
        )  # fmt: skip

    def done(self):
        return self._process.poll() is not None

    def outcome(self, timeout):
        """(whether it reproduced, in words)."""
        try:
            code = self._process.wait(max(0.1, timeout))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.close()
        self._folder.cleanup()
        last = lines[-1][:300] if lines else ""
        if code is None:
            return False, "did not end in time"
        if code < 0:
            return True, Died(code, "").how
        return code == 1 and last.startswith("AssertionError"), last or f"exit code {code}"


class Clock:
    """Seconds since the audit began, and what is left of its budget."""

    def __init__(self, budget_s):
        self.budget_s, self._start = float(budget_s), time.monotonic()

    @property
    def spent(self):
        return time.monotonic() - self._start

    @property
    def left(self):
        return self.budget_s - self.spent
