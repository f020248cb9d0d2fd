"""The controller's side of a worker process: start it, ask it, and keep it stopped while another one is timed.

Every engine here has a thread pool, and most of them spin for a while after a call. Rather than ask each not to (which changes
its own timing), an idle worker is stopped with SIGSTOP and woken with SIGCONT: it can take nothing from its neighbours.
"""

import ctypes
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile

BENCHES = pathlib.Path(__file__).resolve().parent

# MKL asks whether the CPU is Intel's and takes its slow path where it is not. This answers yes.
UNLOCK_MKL = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"

# glibc gives freed memory back where it happens to lie on top of its heap, and a step then waits for the system to clear it anew: from process to
# process the same step took 53 or 67 ms (float32 8,12,512,64 forward and backward, two threads, 2026-11). So every engine's process keeps it.
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class Died(Exception):
    """A worker is gone; the message is the end of what it said."""


def compiler():
    return next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)


def compile_c(source, target, *options):
    """Builds `source` (text or a path) into `target`; None, or why it could not."""
    cc = compiler()
    if cc is None:
        return "no C compiler (cc, gcc or clang) on this machine"
    is_path = isinstance(source, pathlib.Path)
    command = [cc, "-O3", *options, "-o", str(target), *(["-x", "c", "-"] if not is_path else [str(source)])]
    built = subprocess.run(command, input=None if is_path else source, capture_output=True, text=True)
    return None if built.returncode == 0 else f"{cc} failed: {built.stderr.strip().splitlines()[0]}"


def die_with_parent():
    """In the child: a stopped worker must not outlive a controller that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def pinned(cpus):
    """In the child: the same, and these CPUs alone, where the system can say so."""

    def prepare():
        die_with_parent()
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus)

    return prepare


class Worker:
    """One peer's process, on `cpus` alone where they are given. `versions` once it has come up; raises Died if it does not."""

    def __init__(self, peer, threads, python, folder, preload=None, package="peers", cpus=None):
        self.peer = peer
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAPT_", "MKL_", "KMP_"))}
        environment.pop("LD_PRELOAD", None)
        environment |= {"OMP_NUM_THREADS": str(threads), "PYTHONDONTWRITEBYTECODE": "1", **KEEP_FREED, **dict(peer.environment)}
        if preload:
            environment["LD_PRELOAD"] = str(preload)
        self.said = tempfile.TemporaryFile("w+", dir=folder)
        self.process = subprocess.Popen(
            [python, "-m", package, peer.name, str(threads)], cwd=BENCHES, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, preexec_fn=pinned(cpus),
        )  # fmt: skip
        self.versions = self.answer(120)
        if "unavailable" in self.versions:
            self.process.wait()
            raise Died(self.versions["unavailable"])
        self.versions = self.versions["versions"]
        self.stop()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def answer(self, timeout_seconds):
        if select.select([self.process.stdout], [], [], timeout_seconds)[0] and (line := self.process.stdout.readline()):
            return json.loads(line)
        try:
            how = f"ended with {self.process.wait(2)}"  # its pipe closed: it is ending by itself
        except subprocess.TimeoutExpired:
            how = f"gave no answer in {timeout_seconds} s"
            self.end()
        self.said.seek(0)
        last = self.said.read().strip().splitlines()[-1:] or ["it said nothing"]
        raise Died(f"{self.peer.name} {how}: {last[0]}")

    def ask(self, do, timeout_seconds=900, **arguments):
        """Wake, command, answer, stop."""
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` finds out what happened
        answer = self.answer(timeout_seconds)
        self.stop()
        return answer

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
