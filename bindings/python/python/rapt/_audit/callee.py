"""The attention under audit: where it comes from, how it is called, what it offers.

A target is a name ("torch", "rapt", "MODULE:FUNCTION") or any callable. A callable that can be found again by import is
audited in a fresh process; any other (a closure, a lambda, a method of a loaded model) in a fork of this one.
Deliberately absent: probes, and any import of torch that the callee did not make itself.
"""

import importlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from dataclasses import asdict, dataclass

import numpy as np

from .tensors import bits_of, dtype_of, is_torch, to_f64

KNOWN = {
    "torch": "torch.nn.functional:scaled_dot_product_attention",
    "rapt": "rapt:scaled_dot_product_attention",
}


class TargetError(ValueError):
    """The callee cannot be found, or does not answer a plain call."""


@dataclass(frozen=True)
class Target:
    """How a fresh process finds the callee; `module` is None where only a fork can."""

    label: str
    module: str | None
    name: str
    folder: str | None
    """What must stand on sys.path for the import, None where a clean interpreter finds the module."""

    def load(self):
        if self.folder is not None and self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        found = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TargetError(f"{self.label} is {type(found).__name__}, which is not callable")
        return found

    as_dict = asdict


def find(target):
    """(Target, the callable or None). A name is not imported here: the audited code runs in a child only."""
    if isinstance(target, str):
        text = KNOWN.get(target, target)
        module, separator, name = text.partition(":")
        if not separator or not module or not name:
            raise TargetError(f"{target!r} is no callee: torch, rapt or MODULE:FUNCTION, such as mypackage.attention:forward")
        return Target(target, module, name, None if target in KNOWN else _folder(module)), None
    if not callable(target):
        raise TargetError(f"a callee must be callable or a name (torch, rapt, MODULE:FUNCTION), not {type(target).__name__}")
    label = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
    module, name = _importable(target)
    if module is None:
        return Target(label, None, "fn", None), target
    return Target(f"{module}:{name}", module, name, _folder(module)), None


def _importable(target):
    """(module, name) by which a fresh process gets this very object, or (None, None)."""
    names = [getattr(target, "__module__", None), "torch.nn.functional"]
    for module in names:
        loaded = sys.modules.get(module)
        if loaded is None or module == "__main__":
            continue
        spec = getattr(loaded, "__spec__", None)
        if spec is None or (spec.origin is None and not hasattr(loaded, "__path__")):
            continue
        for name in (getattr(target, "__qualname__", None), getattr(target, "__name__", None)):
            found = loaded
            for part in (name or "").split("."):
                found = getattr(found, part, None)
            if found is target and module.partition(".")[0] != "torch" or (found is target and module == names[1]):
                return module, name
        for name, value in vars(loaded).items():
            if value is target:
                return module, name
    return None, None


def _folder(module):
    """The folder that must be on sys.path to import this module; None if it is installed or built in."""
    root = module.partition(".")[0]
    loaded = sys.modules.get(root)
    spec = getattr(loaded, "__spec__", None)
    if spec is None:
        try:
            spec = importlib.util.find_spec(root)
        except (ImportError, ValueError):
            return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    origin = places[0] if places else getattr(spec, "origin", None)
    if not origin or not os.path.exists(origin):
        return None
    folder = os.path.dirname(os.path.abspath(origin))
    installed = [
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
    ]
    return None if folder in {os.path.abspath(place) for place in installed} else folder


class Refused(Exception):
    """The callee raised: it said no, which is honest."""

    def __init__(self, error):
        first = str(error).strip().splitlines()
        super().__init__(f"{type(error).__name__}: {first[0][:200] if first else ''}")


class NotOffered(Exception):
    """The callee's signature has no such option, or its kind of tensor cannot express the probe."""


@dataclass(frozen=True)
class Offer:
    """What the callee takes."""

    style: str
    """"sdpa" (attn_mask, is_causal, enable_gqa) or "attention" (mask, causal, …)."""
    options: tuple
    """Names of the options in its signature."""
    kind: str
    """"torch" or "numpy"."""

    as_dict = asdict


SDPA = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def signature(fn):
    """(style, options) from the parameters' names; a builtin without a signature is taken for SDPA."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return "sdpa", SDPA
    names = set(parameters)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if names & {"attn_mask", "is_causal"}:
        return "sdpa", SDPA if open_ended else tuple(name for name in SDPA if name in names)
    if names & {"mask", "causal", "return_lse", "window", "softcap"}:
        known = ("mask", "causal", "window", "softcap", "scale", "sinks", "alibi_slopes", "return_lse")
        return "attention", tuple(name for name in known if name in names)
    if open_ended:
        return "sdpa", SDPA
    return "sdpa", tuple(name for name in SDPA if name in names)


def kinds(fn, asked):
    """The kinds of tensors to try, likeliest first."""
    if asked != "auto":
        return [asked]
    names = getattr(inspect.unwrap(fn), "__globals__", {}) if callable(fn) else {}
    modules = {getattr(value, "__name__", "").partition(".")[0] for value in names.values() if inspect.ismodule(value)}
    code = getattr(inspect.unwrap(fn), "__code__", None)
    mentioned = set(code.co_names) if code else set()
    if "torch" in sys.modules and ("torch" in modules or "torch" in mentioned or "numpy" not in modules):
        return ["torch", "numpy"]
    return ["numpy", "torch"] if importlib.util.find_spec("torch") else ["numpy"]


class Answer:
    """One output: its values, its bits, and what it says of itself."""

    def __init__(self, out, lse=None):
        self.tensor = out
        self.kind = "torch" if is_torch(out) else "numpy" if isinstance(out, np.ndarray) else type(out).__name__
        if self.kind not in ("torch", "numpy"):
            raise Refused(TypeError(f"the result is {self.kind}, no tensor"))
        self.dtype, self.shape = dtype_of(out), tuple(out.shape)
        self.lse = None if lse is None else to_f64(lse)

    @property
    def values(self):
        return to_f64(self.tensor)

    @property
    def bits(self):
        return bits_of(self.tensor).tobytes()


class Callee:
    """Calls the function with a case's options, in its own words."""

    def __init__(self, fn, offer):
        self.fn, self.offer = fn, offer

    def offers(self, name):
        return name in self.offer.options

    def arguments(self, case, placed, return_lse=False):
        """The options of a case as this callee names them; NotOffered where it has no name for one."""
        sdpa, options = self.offer.style == "sdpa", {}

        def give(name, value):
            if not self.offers(name):
                raise NotOffered(f"its signature has no {name}")
            options[name] = value

        if "mask" in placed:
            give("attn_mask" if sdpa else "mask", placed["mask"].tensor)
        if case.causal is not None:
            if sdpa and case.causal != "top_left":
                raise NotOffered("is_causal has one alignment")
            give("is_causal" if sdpa else "causal", True if sdpa else case.causal)
        if case.scale is not None:
            give("scale", case.scale)
        if case.dropout:
            give("dropout_p", case.dropout)
        if case.heads != case.kv_heads and sdpa:
            give("enable_gqa", True)
        for name, value in case.options:
            give(name, placed[name].tensor if name in placed else value)
        if return_lse:
            give("return_lse", True)
        return options

    def differentiated(self, case, placed):
        """The output of a call with grad mode on; NotOffered if it requires no grad."""
        torch = sys.modules["torch"]
        options = self.arguments(case, placed)
        try:
            with torch.enable_grad():
                out = self.fn(placed["q"].tensor, placed["k"].tensor, placed["v"].tensor, **options)
        except Exception as error:
            raise Refused(error) from error
        out = out[0] if isinstance(out, tuple) and out else out
        if not is_torch(out) or not out.requires_grad:
            raise NotOffered("its output requires no grad where its inputs do: it has no gradients")
        return out

    def __call__(self, case, placed, return_lse=False):
        """An Answer; Refused if the callee raised."""
        options = self.arguments(case, placed, return_lse)
        try:
            if "torch" in sys.modules:
                with sys.modules["torch"].no_grad():
                    out = self.fn(placed["q"].tensor, placed["k"].tensor, placed["v"].tensor, **options)
            else:
                out = self.fn(placed["q"].tensor, placed["k"].tensor, placed["v"].tensor, **options)
        except Exception as error:
            raise Refused(error) from error
        lse = None
        if isinstance(out, tuple) and out:
            out, lse = out[0], out[1] if return_lse and len(out) > 1 else None
        return Answer(out, lse)
