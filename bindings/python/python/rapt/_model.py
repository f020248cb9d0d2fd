"""Exported programs: `rapt.load`, `rapt.Model`, `rapt.Session`.

The native side takes a call as a flat list of leaves. Here arguments are flattened, and results rebuilt, by the tree that the
program states: positional and keyword arguments as they were given to `torch.export.export`, results in the containers that
the model returned. Nothing here looks into a tensor.
"""

import collections as _collections
import os as _os
import sys as _sys

from rapt import _native


def load(path):
    """The program of an archive that `torch.export.save` wrote, ready to run without PyTorch.

    path: a `.pt2` file, or its bytes. The file is mapped, not read: it must not be altered while the model is used.

    Calls run as attention does: on torch's own threads, as many as `torch.get_num_threads()`, for torch tensors, else on
    `RAPT_NUM_THREADS`, else on what the system offers. `Context(threads).load` asks for a number.

    An archive that is not served raises before anything runs: `ProgramError` where it is damaged or contradicts itself,
    `UnsupportedError` with all operators that are missing.
    """
    return load_on(None, path)


def load_on(context, path):
    """`load` for the threads of a `Context`."""
    if isinstance(path, (bytes, bytearray, memoryview)):
        return Model(_native.Program.from_bytes(bytes(path), context))
    return Model(_native.Program.open(_os.fspath(path), context))


class Model:
    """An exported program. Calling it runs it: `model(x, mask=m)` with the arguments that it was exported with.

    Tensors are numpy arrays, torch tensors on the CPU, or objects with `__dlpack__`, all of one kind in one call; results are
    of that kind, own their memory and may be written. An input is never converted: another dtype than the program declares is
    a `DtypeBoundaryError`, raised before any work.
    """

    __slots__ = ("_call", "_program")

    def __init__(self, program):
        self._program = program
        self._call = _Call(program.call(), program.inputs())

    def __call__(self, *args, **kwargs):
        return self._call.rebuild(self._program.run(self._call.flatten(args, kwargs)))

    @property
    def input_dtypes(self):
        """The dtype of each input by its name, such as `{"input_ids": "int64"}`; None for what is no tensor."""
        return {name: dtype for name, dtype, _, _ in self._program.inputs()}

    @property
    def output_dtypes(self):
        """The dtype of each result by its place, such as `{"output[0]": "float32"}`."""
        return {name: dtype for name, dtype, _, _ in self._program.outputs()}

    def explain(self, *args, **kwargs):
        """What runs: inputs and results with their sizes, symbols and guards, bytes of weights, threads, kernels, operators.

        Without arguments for the sizes of the export; with the arguments of a call for that call, which is not made.
        """
        return Explanation(self._program.explain(self._call.flatten(args, kwargs) if args or kwargs else None))

    def session(self):
        """A `Session`: calls that share what the program keeps, such as a cache that it writes in place."""
        return Session(self)

    def reference(self, *, float64=False):
        """The same program by its definition, to be called as the model is: which of two results is wrong?

        Every node is computed in float64 or int64 in plain loops and rounded once to its dtype: no kernels, nothing fused. With
        `float64` nothing is rounded, and floats come back as float64: what errors are measured against. Hundreds of times
        slower than the model. Nothing is written, neither inputs nor what a session keeps.
        """
        return _Reference(self._call, self._program, float64)

    def __repr__(self):
        inputs = ", ".join(_shown(port) for port in self._program.inputs())
        outputs = ", ".join(_shown(port) for port in self._program.outputs())
        return f"rapt.Model({inputs}) -> {outputs}"


class Session:
    """Calls of a model that share what the program keeps. Each session has its own; it starts as the archive has it."""

    __slots__ = ("_model", "_session")

    def __init__(self, model):
        self._model = model
        self._session = model._program.session()

    def __call__(self, *args, **kwargs):
        call = self._model._call
        return call.rebuild(self._session.run(call.flatten(args, kwargs)))

    def reference(self, *, float64=False):
        """As `Model.reference`, with what the session keeps at present."""
        return _Reference(self._model._call, self._session, float64)

    def reset(self):
        """Forgets what the calls so far have left."""
        self._session.reset()

    @property
    def model(self):
        """The model."""
        return self._model

    @property
    def held_bytes(self):
        """The bytes that the session holds beside the archive."""
        return self._session.held_bytes


class _Reference:
    """A program by its definition."""

    __slots__ = ("_call", "_float64", "_program")

    def __init__(self, call, program, float64):
        self._call, self._program, self._float64 = call, program, bool(float64)

    def __call__(self, *args, **kwargs):
        return self._call.rebuild(self._program.reference(self._call.flatten(args, kwargs), self._float64))


class Explanation(dict):
    """The answer of `Model.explain`, by the names of its rows; `str()` is a table."""

    def __init__(self, rows):
        super().__init__(rows)
        self._rows = rows

    def __str__(self):
        width = max((len(name) for name, _ in self._rows), default=0)
        return "\n".join(f"{name:{width}}  {text}" for name, text in self._rows)


def _shown(port):
    name, dtype, sizes, _ = port
    return name if dtype is None else f"{name}: {dtype}[{', '.join(sizes)}]"


class _Call:
    """How a program is called, and what its results become."""

    def __init__(self, call, inputs):
        if call is None:
            # A program that does not say: its inputs in order, its results as a tuple.
            call = ([(port[0], None) for port in inputs], [], None)
        self.positional, self.keyword, self.output = call

    def flatten(self, args, kwargs):
        """The leaves of a call."""
        if len(args) > len(self.positional):
            raise _native.KindError(f"the program takes {self._signature()}, got {len(args)} positional arguments")
        leaves = []
        rest = dict(kwargs)
        for place, (name, tree) in enumerate(self.positional):
            if place < len(args):
                if name is not None and name in rest:
                    raise _native.KindError(f"{name} is given twice: by its place and by its name")
                value = args[place]
            elif name is not None and name in rest:
                value = rest.pop(name)
            else:
                raise _native.KindError(f"the program takes {self._signature()}, {name or f'argument {place}'} is missing")
            _flatten(tree, value, name or f"args[{place}]", leaves)
        for name, tree in self.keyword:
            if name not in rest:
                raise _native.KindError(f"the program takes {self._signature()}, {name} is missing")
            _flatten(tree, rest.pop(name), name, leaves)
        if rest:
            raise _native.KindError(f"the program takes {self._signature()}, got {', '.join(rest)} too")
        return leaves

    def _signature(self):
        names = [name or f"argument {place}" for place, (name, _) in enumerate(self.positional)]
        names += [f"{name}=" for name, _ in self.keyword]
        return ", ".join(names) or "no arguments"

    def rebuild(self, leaves):
        """The results in the containers that the model returned."""
        if self.output is None and len(leaves) != 1:
            return tuple(leaves)
        return _rebuild(self.output, iter(leaves))


def _flatten(tree, value, path, leaves):
    if tree is None:
        leaves.append(value)
        return
    kind, children = tree[0], tree[-1]
    if kind in ("tuple", "list", "deque"):
        if not isinstance(value, (tuple, list, _collections.deque)):
            raise _native.KindError(f"{path} is a {type(value).__name__}, the program takes a {kind}")
        _same_length(path, value, children)
        parts = [(f"{path}[{place}]", part) for place, part in enumerate(value)]
    elif kind == "dict":
        keys = tree[2]
        if not hasattr(value, "keys") or set(value.keys()) != set(keys):
            raise _native.KindError(f"{path} must be a mapping with the keys {', '.join(map(repr, keys))}")
        parts = [(f"{path}[{key!r}]", value[key]) for key in keys]
    elif kind in ("namedtuple", "object"):
        fields = tree[2]
        missing = [name for name in fields if not hasattr(value, name)]
        if missing:
            raise _native.KindError(f"{path} is a {type(value).__name__} without {', '.join(missing)}, the program takes {tree[1]}")
        parts = [(f"{path}.{name}", getattr(value, name)) for name in fields]
    else:
        parts = _flatten_registered(tree[1], value, path)
        _same_length(path, parts, children)
    for child, (where, part) in zip(children, parts, strict=True):
        _flatten(child, part, where, leaves)


def _same_length(path, value, children):
    if len(value) != len(children):
        raise _native.KindError(f"{path} has {len(value)} parts, the program takes {len(children)}")


def _registered(type_name):
    """torch's class of this name, if torch is loaded and a class was registered under it."""
    pytree = _sys.modules.get("torch.utils._pytree")
    known = getattr(pytree, "SERIALIZED_TYPE_TO_PYTHON_TYPE", {})
    return pytree, known.get(type_name)


def _flatten_registered(type_name, value, path):
    pytree, cls = _registered(type_name)
    if cls is None or not isinstance(value, cls):
        raise _native.KindError(f"{path} is a {type(value).__name__}, the program takes {type_name}")
    parts, _ = pytree.SUPPORTED_NODES[cls].flatten_fn(value)
    return [(f"{path}[{place}]", part) for place, part in enumerate(parts)]


class Record(dict):
    """A result of a class that is not loaded here: its fields by name, as keys and as attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _rebuild(tree, leaves):
    if tree is None:
        return next(leaves)
    kind = tree[0]
    parts = [_rebuild(child, leaves) for child in tree[-1]]
    if kind == "tuple":
        return tuple(parts)
    if kind == "list":
        return parts
    if kind == "deque":
        return _collections.deque(parts, tree[1])
    if kind == "dict":
        pairs = zip(tree[2], parts, strict=True)
        return _collections.OrderedDict(pairs) if tree[1] == "collections.OrderedDict" else dict(pairs)
    if kind == "namedtuple":
        _, cls = _registered(tree[1])
        name = tree[1].rsplit(".", 1)[-1]
        if cls is None or getattr(cls, "_fields", None) != tuple(tree[2]):
            cls = _collections.namedtuple(name if name.isidentifier() else "Result", tree[2], rename=True)
        return cls(*parts)
    if kind == "object":
        _, cls = _registered(tree[1])
        named = dict(zip(tree[2], parts, strict=True))
        # Only classes that this process has loaded and registered: an archive names no code to import.
        return Record(named) if cls is None else cls(**named)
    if kind == "opaque" and tree[1].startswith("torch.return_types."):
        # What `torch.max(x, 1)` gives: a tuple whose parts have names.
        cls = getattr(_sys.modules.get("torch.return_types"), tree[1].rsplit(".", 1)[-1], None)
        if isinstance(cls, type) and issubclass(cls, tuple) and getattr(cls, "n_fields", None) == len(parts):
            return cls(parts)
    return tuple(parts)
