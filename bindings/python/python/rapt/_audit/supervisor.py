"""The parent: it starts children, sends them one probe at a time, and notices their death.

A callee that can be imported lives in a fresh Python process; one that cannot (a closure) in a fork of this one, served by a
thread of its own, because OpenMP's pool does not outlive a fork in the thread that had one. Deliberately absent: judging.
"""

import contextlib
import faulthandler
import os
import select
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
        self.fn, self.starts = fn, 0
        self._pid = self._process = self._connection = self._errors = None

    @property
    def alive(self):
        return self._connection is not None

    def start(self):
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()
        if self.fn is None:
            root = str(Path(__file__).parents[2])
            # Waiting threads sleep: a thousand small calls would else spin for longer than they compute.
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from rapt._audit.worker import main; main({theirs.fileno()})"],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors,
                env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        else:
            self._fork(ours, theirs)
        theirs.close()
        self._connection = Connection(ours.detach())
        self.starts += 1

    def _fork(self, ours, theirs):
        if not hasattr(os, "fork"):
            raise TargetError('this callee cannot be imported by name, and there is no fork here: pass "MODULE:FUNCTION"')
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
            # The parent reports a fault: this handler would write into the parent's terminal.
            faulthandler.disable()
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


NURSERY = """
import os, runpy, sys
import {library}
for line in sys.stdin:
    path, words = line.rstrip("\\n").split("\\t")
    pid = os.fork()
    if pid == 0:
        file = os.open(words, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.path[0] = os.path.dirname(path)
        os.chdir(sys.path[0])
        code = 1
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


LATE = "did not end in time"


class Nursery:
    """Where reproducers run: each in a new process in which nothing but torch (or numpy) is imported.

    The import takes seconds and is made once: one clean interpreter imports the library, computes nothing, and forks for each
    program. Without fork each program is a `python reproduce.py` of its own.
    """

    def __init__(self, library):
        self._folder = tempfile.TemporaryDirectory(prefix="rapt-audit-")
        self._library, self._process, self._count = library, None, 0
        self._start()

    def _start(self):
        if hasattr(os, "fork"):
            self._process = subprocess.Popen(
                [sys.executable, "-c", NURSERY.format(library=self._library)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )

    def run(self, text, timeout):
        """(whether the program showed the hazard, in words)."""
        self._count += 1
        path = Path(self._folder.name) / f"reproduce_{self._count}.py"
        words = path.with_suffix(".txt")
        path.write_text(text)
        words.touch()
        try:
            code = self._run(path, words, timeout)
        except subprocess.TimeoutExpired:
            return False, LATE
        lines = words.read_text(errors="replace").strip().splitlines()
        # An assertion about a tensor, and a fault of the device, have several lines; the first says which it is.
        raised = [line for line in lines if not line.startswith(" ")]  # not the source that a traceback quotes
        telling = next((line for line in raised if line.startswith("AssertionError") or "CUDA error: " in line), None)
        last = (telling or lines[-1])[:300] if lines else ""
        if code < 0:
            return True, Died(code, "").how
        return code == 1 and last.startswith("AssertionError"), last or f"exit code {code}"

    def _run(self, path, words, timeout):
        if self._process is None:
            with open(words, "w") as file:
                return subprocess.run(
                    [sys.executable, str(path)],
                    cwd=path.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    timeout=timeout,
                ).returncode
        if self._process.poll() is not None:
            self._start()
        self._process.stdin.write(f"{path}\t{words}\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.close()
            raise subprocess.TimeoutExpired(str(path), timeout)
        return int(self._process.stdout.readline() or 70)

    def close(self):
        """End the interpreter and whatever it forked."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


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
