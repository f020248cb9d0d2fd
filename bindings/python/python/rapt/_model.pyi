"""Exported programs. Tensors are `Any`: numpy arrays, torch tensors or objects with `__dlpack__`."""

from collections.abc import Callable
from os import PathLike
from typing import Any, final

from rapt._native import Context as _Context
from rapt._native import Program as _Program

def load(path: str | PathLike[str] | bytes | bytearray | memoryview) -> Model:
    """The program of an archive that `torch.export.save` wrote, ready to run without PyTorch."""

def load_on(context: _Context | None, path: str | PathLike[str] | bytes | bytearray | memoryview) -> Model:
    """`load` for the threads of a `Context`."""

@final
class Model:
    """An exported program, called with the arguments that it was exported with."""

    def __init__(self, program: _Program) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def input_dtypes(self) -> dict[str, str | None]: ...
    @property
    def output_dtypes(self) -> dict[str, str | None]: ...
    def explain(self, *args: Any, **kwargs: Any) -> Explanation: ...
    def session(self) -> Session: ...
    def reference(self, *, float64: bool = False) -> Callable[..., Any]: ...

@final
class Session:
    """Calls of a model that share what the program keeps."""

    def __init__(self, model: Model) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def reference(self, *, float64: bool = False) -> Callable[..., Any]: ...
    def reset(self) -> None: ...
    @property
    def model(self) -> Model: ...
    @property
    def held_bytes(self) -> int: ...

class Explanation(dict[str, str]):
    """Rows by name; `str()` is a table."""

class Record(dict[str, Any]):
    """A result of a class that is not loaded: fields as keys and as attributes."""

    def __getattr__(self, name: str) -> Any: ...
