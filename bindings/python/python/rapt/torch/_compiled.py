"""What was compiled under one kernel never runs under the other: not from memory, not from disk.

Compile caches outlive a change of kernels: dynamo's by the code object, those on disk by the graph before decomposition. So a
change resets dynamo where something was compiled since the last one, and enters or takes away a part of `cache_key_tag`.
"""

import sys

import torch
from rapt._native import __version__

_PART = f"rapt-{__version__}"
_NAME = "cache_key_tag"


def _has_compiled():
    """Whether dynamo holds code; True where this torch does not say."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    try:
        return bool(frames.input_codes.seen or frames.output_codes.seen)
    except AttributeError:
        return True


class _Tag:
    """`torch.compiler.config.cache_key_tag`. A write through the attribute takes 2.5 µs, a read 5 µs (torch 2.15, 2026-11, EPYC);
    where the module's entry is of the form known here, both go to it, and leave it as the attribute would."""

    def __init__(self, config):
        self.config = config
        try:
            entry = config._config[_NAME]
            self.override = entry.user_override
            self.touch = (config._hash_dirty_var.set, config._mark_get_dict_dirty)
            if entry.alias is not None or entry.hide or not callable(self.override.set):
                self.override = None
        except (AttributeError, KeyError, TypeError):
            self.override = None

    def get(self):
        value = None if self.override is None else self.override.get()
        return value if type(value) is str else getattr(self.config, _NAME)

    def set(self, value):
        if self.override is None:
            setattr(self.config, _NAME, value)
            return
        self.override.set(value)
        dirty, mark = self.touch
        dirty(True)
        mark(_NAME)


def _find():
    try:
        from torch.compiler import config
    except ImportError:  # torch < 2.7
        return None
    return _Tag(config) if hasattr(config, _NAME) else None


_tag = None
_is_found = False


def forget(registered):
    """Call at each change, `registered` being what holds from now on."""
    global _tag, _is_found
    if not _is_found:
        _tag, _is_found = _find(), True
    if _tag is not None:
        old = _tag.get()
        if registered:
            if _PART not in old:
                _tag.set(f"{old}+{_PART}" if old else _PART)
        elif old == _PART:
            _tag.set("")
        elif _PART in old:
            _tag.set("+".join(part for part in old.split("+") if part != _PART))
    if "torch._dynamo" in sys.modules and _has_compiled():
        torch._dynamo.reset()
