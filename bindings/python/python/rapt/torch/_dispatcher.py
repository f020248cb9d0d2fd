"""Rapt's kernels in PyTorch's dispatcher, in place of PyTorch's own.

Putting them in and taking them out takes 0.2 ms, so what enters and leaves is a count: after the last leave they are idle. An idle kernel
hands every call on, and takes itself out at the first trace or after a few calls in a row; from then on PyTorch is as before in time too.
"""

import threading
import warnings

import torch

from . import _stock

# Calls in a row that come to an idle kernel before it takes itself out.
_IDLE_CALLS = 16

# One for all, since the backend holds several.
lock = threading.RLock()


class Held:
    """Kernels of one op, which are Rapt's while somebody holds them."""

    def __init__(self, op):
        self.op = op
        self.count, self.idle, self.library = 0, 0, None

    def put(self, library):
        """Enter the kernels into `library`."""
        raise NotImplementedError

    def taken_out(self):
        """What else is undone once they are out."""

    def take(self):
        """Hold them; the first time puts them in."""
        with lock:
            if self.library is None:
                self._install()
            self.idle = 0
            self.count += 1

    def _install(self):
        _stock.ask()
        library = torch.library.Library("aten", "IMPL")
        try:
            # torch < 2.15 warns of every kernel that stands in another's place.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=UserWarning)
                self.put(library)
        except BaseException:
            library._destroy()
            raise
        self.library = library
        self._forget()

    def leave(self):
        """Take back one `take()`; after the last the kernels are idle."""
        with lock:
            self.count -= 1

    def retire(self):
        """Take idle kernels out."""
        with lock:
            library = self.library
            if self.count > 0 or library is None:
                return
            self.library = None
            library._destroy()
            self.taken_out()
            self._forget()

    def is_idle(self, traced=False):
        """Whether nobody holds them, so that the call which asks is PyTorch's; `traced`: this one takes idle kernels out."""
        if self.count > 0:
            return False
        with lock:
            self.idle += 1
            if traced or self.idle >= _IDLE_CALLS:
                self.retire()
        return True

    def _forget(self):
        # Tracing goes through a cache of kernels that a new registration does not clear.
        self.op._dispatch_cache.clear()
