"""What waits for a module that may never be imported: entered at once where it is loaded, else right after its import."""

import importlib.abc
import importlib.machinery
import sys

_waiting = {}


class _Loader(importlib.abc.Loader):
    """The module's own loader; once it has run, so does what waited."""

    def __init__(self, loader, run):
        self.loader, self.run = loader, run

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.run(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        run = _waiting.pop(name, None)
        if run is None:
            return None
        if not _waiting:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Loader(spec.loader, run)
        return spec


_finder = _Finder()


def when_imported(name, run):
    """Call `run(module)` now where the module `name` is loaded, else when it is; of two for one name the last."""
    if name in sys.modules:
        run(sys.modules[name])
        return
    _waiting[name] = run
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
