"""Weights of a compiled graph that are held constant: `torch.compile(model, backend="rapt", options={"freeze": True})`.

Weights that are constants are packed once, and what depends on them alone is computed once. PyTorch has no sign of every change
of a tensor (torch 2.9 to 2.15, CPU):

    noticed before the next call    in-place operations and `load_state_dict` (the version), `p.data = other` (address, strides), another
                                    tensor in its place (identity), a step of an optimizer (a hook: the fused ones leave the version
                                    as it was)
    refused by PyTorch              `torch.utils.swap_tensors`: tensors that are held have weak references
    not noticed                     writes through `p.data`, through numpy, DLPack or the storage, by another process, and to tensors
                                    that were made in inference mode

So nothing is held unless the caller asks for it, which says that he changes weights in no way of the second row.
"""

import threading
import weakref

from rapt import UnsupportedError

from ._stats import log

_lock = threading.RLock()
_live = weakref.WeakSet()
_is_hooked = False


class Held:
    """The models of one graph: one for each set of tensors that it was called with and holds."""

    def __init__(self, template, written):
        self.template, self.written = template, written
        self.places = [place for _, place in written.held]
        is_written = template.written()
        self.writes = [place for place, writes in zip(written.given, is_written) if writes]
        # From the identities of the tensors.
        self.sets = {}
        # How often weights had changed.
        self.renewed = 0

    def program(self, arguments):
        """The program for these arguments."""
        weights = [arguments[place] for place in self.places]
        held = self.sets.get(tuple(map(id, weights)))
        if held is None or not held.is_current(weights):
            held = self._hold(weights, held)
        if self.writes:
            held.check_apart([arguments[place] for place in self.writes])
        return held.program

    def _hold(self, weights, old):
        with _lock:
            if old is not None:
                self.renewed += 1
                log.debug("weights of a compiled graph have changed: they are packed again")
            key = tuple(map(id, weights))
            names = [name for name, _ in self.written.held]
            held = _Set(self.template, names, self.written.constants, weights)
            self.sets[key] = held
            _hook()
            _live.add(held)

            def forget(_, sets=weakref.ref(self), key=key):
                owner = sets()
                if owner is not None:
                    owner.sets.pop(key, None)

            # A tensor that is gone leaves its identity to others.
            held.watch = [weakref.ref(weight, forget) for weight in weights]
            return held


class _Set:
    def __init__(self, template, names, constants, weights):
        self.facts = _facts(weights)
        self.is_stale = False
        self.ids = frozenset(map(id, weights))
        # What keeps the memory: `p.data = other` gives the address to nobody else while it is held.
        kept = [weight.detach() for weight in weights]
        self.storages = {weight.untyped_storage().data_ptr(): name for name, weight in zip(names, kept)}
        self.program = template.with_weights([*zip(names, kept), *constants])

    def is_current(self, weights):
        return not self.is_stale and self.facts == _facts(weights)

    def check_apart(self, written):
        for tensor in written:
            name = self.storages.get(tensor.untyped_storage().data_ptr())
            if name is not None and tensor.numel():
                raise UnsupportedError(
                    f'a call writes a tensor that shares memory with {name}, which options={{"freeze": True}} holds constant'
                )


def _facts(weights):
    try:
        return [(w._version, w.data_ptr(), w.stride()) for w in weights]
    except RuntimeError:
        # Tensors that were made in inference mode have no version.
        return [(0 if w.is_inference() else w._version, w.data_ptr(), w.stride()) for w in weights]


def _hook():
    """From the first set on, a step of an optimizer tells the sets that hold one of its parameters."""
    global _is_hooked
    if _is_hooked:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer, _args, _kwargs):
        ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        with _lock:
            for held in _live:
                held.is_stale = held.is_stale or not held.ids.isdisjoint(ids)

    register_optimizer_step_post_hook(stepped)
    _is_hooked = True
