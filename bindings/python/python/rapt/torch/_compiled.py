"""What was compiled under one kernel never runs under the other: not from memory, not from disk.

Compile caches outlive a change of kernels: dynamo's by the code object, those on disk by the graph before decomposition. So a
change resets dynamo where something was compiled since the last one, and enters or takes away a part of `cache_key_tag`.
"""

import sys

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


def _with_part(tag):
    return tag if _PART in tag else f"{tag}+{_PART}" if tag else _PART


def _without_part(tag):
    return "+".join(part for part in tag.split("+") if part != _PART)


class _Tag:
    """`torch.compiler.config.cache_key_tag`.

    What is written through the attribute is one thread's (torch 2.15), and writing and reading it take 7 µs (2026-11, EPYC). So
    what it falls back to where nobody has written it is changed: for all threads, in 0.1 µs. A value that the thread which
    registers has written gets the part through the attribute."""

    def __init__(self, config):
        self.config, self.entry = config, None
        try:
            from torch.utils._config_module import _UNSET_SENTINEL as unset

            entry = config._config[_NAME]
            self.fallback = "default" if entry.env_value_default is unset else "env_value_default"
            tag = getattr(entry, self.fallback)
            self.values = {False: _without_part(tag), True: _with_part(tag)}
            self.written = getattr(entry.user_override, "get", lambda: entry.user_override)
            self.unset, self.entry = unset, entry
        except (ImportError, AttributeError, KeyError, TypeError):
            pass  # a module of another form: all goes through the attribute

    def set(self, registered):
        if self.entry is not None:
            setattr(self.entry, self.fallback, self.values[registered])
            if self.written() is self.unset:
                return
        old = getattr(self.config, _NAME)
        new = _with_part(old) if registered else _without_part(old)
        if new != old:
            setattr(self.config, _NAME, new)


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
        _tag.set(registered)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and _has_compiled():
        dynamo.reset()
