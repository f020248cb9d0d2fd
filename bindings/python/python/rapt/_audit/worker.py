"""The child process: it imports the callee, calls it, and judges; if the callee faults, only the child dies.

One request, one reply, pickled over a socket; the parent is supervisor.py. What the callee prints goes to the child's own
stderr file. Deliberately absent: any decision about what to try next.
"""

import contextlib
import importlib.util
import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection

from . import gpu
from .callee import Callee, NotOffered, Offer, Refused, TargetError, kinds, signature
from .case import Case, place, values
from .hazards import BY_NAME
from .judges import JUDGES, Room


FAULT = 86
"""The exit code of a child whose device faulted."""


class Worker:
    """Answers requests about one callee."""

    def __init__(self, fn=None):
        self.fn, self.callee, self.device = fn, None, "cpu"

    def open(self, target, kind, device, paths):
        """Import the callee; the kinds of tensors to try, and what its signature says."""
        sys.path.extend(path for path in paths if path not in sys.path)
        if device != "cpu":
            try:
                import torch
            except ImportError:
                return {"error": f"device={device!r} needs torch, which is not installed"}
            of_apple = device.startswith("mps")
            if not (torch.backends.mps if of_apple else torch.cuda).is_available():
                kind = "an Apple GPU" if of_apple else "a GPU"
                return {"error": f"device={device!r} needs {kind}, and torch {torch.__version__} sees none"}
        try:
            self.fn = target.load() if self.fn is None else self.fn
        except TargetError as error:
            return {"error": str(error)}
        except BaseException as error:  # noqa: BLE001 - whatever a module does on import
            return {"error": f"{target.label} cannot be imported: {type(error).__name__}: {error}"}
        self.device = device
        style, options = signature(self.fn)
        listed = ["torch"] if device != "cpu" and kind == "auto" else kinds(self.fn, kind)
        return {"style": style, "options": options, "kinds": listed}

    def attempt(self, style, options, kind, dtype):
        """A plain call with this kind of tensors."""
        if kind == "torch":
            if importlib.util.find_spec("torch") is None:
                return {"refused": "torch is not installed"}
            import torch  # noqa: F401 - the user asked for torch tensors, or the callee brought it
        offer = Offer(style, tuple(options), kind)
        self.callee = Callee(self.fn, offer)
        case = Case(dtype, batch=1, heads=2, kv_heads=2, q_len=8, kv_len=8, head_dim=8, head_dim_v=8)
        try:
            answer = self.callee(case, place(case, values(case), kind, self.device))
        except Refused as error:
            return {"refused": str(error)}
        except ImportError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        if answer.kind != kind:
            return {"refused": f"{kind} tensors give a {answer.kind} result"}
        return {"offer": offer}

    def judge(self, hazard, case, time_left):
        """The verdict of one probe."""
        hazard = BY_NAME[hazard]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = JUDGES[hazard.judge](Room(self.callee, self.device, time_left), case, hazard.name)
        except Refused as error:
            return {"verdict": "refused", "note": str(error)}
        except NotOffered as error:
            return {"verdict": "not offered", "note": str(error)}
        except MemoryError:
            return {"verdict": "undecided", "note": "out of memory"}
        except Exception:  # noqa: BLE001 - an answer that no judge foresaw is a reply, not the end of the child
            return {"verdict": "undecided", "note": traceback.format_exc(limit=-2).strip()}
        return {"verdict": "clean"} if found is None else {"verdict": "found", "evidence": found.as_dict()}

    def script(self, text):
        """Run a reproducer here: "asserts" where it shows the hazard."""
        torch = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch is not None else None
        path = list(sys.path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(text, "reproducer", "exec"), {"__name__": "__main__", "fn": self.fn})  # noqa: S102
        except AssertionError as error:
            return {"outcome": "asserts", "message": str(error)}
        except SystemExit:
            return {"outcome": "passes"}
        except Exception as error:  # noqa: BLE001
            return {"outcome": "raises", "message": f"{type(error).__name__}: {error}"}
        finally:
            sys.path[:] = path
            if threads is not None:
                torch.set_num_threads(threads)
        return {"outcome": "passes"}

    def serve(self, connection):
        """Until the parent hangs up."""
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                operation, arguments = connection.recv()
                reply = getattr(self, operation)(*arguments)
                self.settle()
                connection.send(reply)

    def settle(self):
        """On a GPU: wait for the work, and die of a fault in it. It spoils the process, and a later call would seem to refuse."""
        if self.device == "cpu":
            return
        try:
            gpu.api(self.device).synchronize()
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            print(f"{type(error).__name__}: {lines[0] if lines else ''}", file=sys.stderr, flush=True)
            os._exit(FAULT)


def main(descriptor):
    """Entry of a fresh child: `descriptor` is its end of the socket."""
    Worker().serve(Connection(descriptor))
