"""Programs in a fresh process that need not import torch: it is forked from one that has imported torch, and nothing of Rapt.

    run(code) ─► the server (one of each process of pytest, begun when first asked)
                   └─ fork ─► the program: a `__main__` of its own, ended by the interpreter's own exit

`import torch` takes 2 s of a core in each process; a fork takes milliseconds. The server computes nothing and compiles nothing,
so that a program finds what it finds behind `python -c "import torch"`: no Rapt, nothing that another program left.
Deliberately absent: programs that are about the import of torch or its order, that set a variable which torch reads when it is
imported (OMP_NUM_THREADS, TORCH_COMPILE_CACHE_KEY_TAG), or that have no torch: they begin with `python -c`.
"""

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

SERVER = """
import gc, os, sys, types, warnings
from multiprocessing.connection import Connection
import torch
assert not [name for name in sys.modules if name.partition(".")[0] == "rapt"]

def paths(environment):
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]

requests, rest = Connection({descriptor}), [path for path in sys.path[1:] if path not in paths(os.environ)]
gc.collect()
gc.freeze()  # a collection of the program's own leaves the pages of torch shared
while True:
    try:
        request = requests.recv()
    except EOFError:
        os._exit(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        break
    requests.send(pid)
    requests.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
requests.close()
for descriptor, name in enumerate(request["files"]):
    file = os.open(name, os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY)
    os.dup2(file, descriptor)
    os.close(file)
os.environ.clear()
os.environ.update(request["environment"])
os.chdir(request["cwd"])
sys.argv[:] = request["argv"]
sys.path[:] = [request["first"], *paths(os.environ), *rest]
sys.modules["__main__"] = main = types.ModuleType("__main__")
main.__dict__.update(request["names"], __builtins__=__builtins__)
exec(compile(request["source"], request["names"].get("__file__", "<string>"), "exec"), main.__dict__)
"""


class Server:
    """The process that has imported torch."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", SERVER.format(descriptor=theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()
        self.connection = Connection(ours.detach())
        atexit.register(self.close)

    def close(self):
        self.connection.close()
        self.process.wait()

    def run(self, request, timeout):
        """The exit status, negative where a signal ended it; TimeoutExpired after `timeout` seconds."""
        self.connection.send(request)
        pid = self.connection.recv()  # after the imports, which are not the program's
        late = not self.connection.poll(timeout)
        if late:
            os.kill(pid, signal.SIGKILL)
        status = self.connection.recv()
        if late:
            raise subprocess.TimeoutExpired(request["argv"], timeout)
        return status


server = functools.cache(Server)


def run(source, *arguments, input="", env=None, cwd=None, timeout=300):  # noqa: A002 - subprocess's name
    """What `subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, …)` gives.

    `source` may be the path of a program, for `python PATH`.
    """
    path = source if isinstance(source, Path) else None
    environment, cwd = dict(os.environ if env is None else env), str(cwd or os.getcwd())
    if not hasattr(os, "fork"):
        command = [sys.executable, *([str(path)] if path else ["-c", source]), *arguments]
        return subprocess.run(command, input=input, capture_output=True, text=True, env=environment, cwd=cwd, timeout=timeout, check=False)
    with tempfile.TemporaryDirectory(prefix="rapt-fresh-") as folder:
        files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        for file in files:
            file.write_text(input if file.name == "stdin" else "")
        request = {
            "source": path.read_text(encoding="utf-8") if path else source,
            "names": {"__name__": "__main__", **({"__file__": str(path)} if path else {})},
            "argv": [str(path or "-c"), *arguments],
            "first": str(path.parent) if path else "",
            "environment": environment,
            "cwd": cwd,
            "files": list(map(str, files)),
        }
        status = server().run(request, timeout)
        return subprocess.CompletedProcess(request["argv"], status, *(file.read_text(errors="replace") for file in files[1:]))
