"""The program zoo: small models with random weights, as `torch.export` writes them.

Each `Case` is a model of tiny widths with the operators of a real one, its inputs at given sizes, and which of those sizes
are dynamic. `export` makes an archive in one of three forms:

    default      what `torch.export.export` gives: in-place operators, views, `to`
    functional   after `run_decompositions({})`: no mutation but what the signature declares
    core         after `run_decompositions()`: core ATen only

`python -m zoo FOLDER` writes all of them, with inputs and PyTorch's outputs; `python -m zoo --check FOLDER` runs them.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FORMS = ("default", "functional", "core")
# The operators of all programs, and how often each occurs in each form: what `python -m zoo` writes.
OPERATORS = Path(__file__).parent / "operators.tsv"


@dataclass(frozen=True)
class Case:
    """A program of the zoo."""

    name: str
    build: Callable[[], torch.nn.Module]
    # (generator, **sizes) -> (args, kwargs)
    inputs: Callable[..., tuple[tuple, dict]]
    # The sizes it is exported at, and others that it must serve.
    exported: dict[str, int]
    others: tuple[dict[str, int], ...] = ()
    # (dim of a size's name) -> dynamic_shapes of torch.export
    dynamic: Callable[[Callable[[str], Any]], Any] | None = None
    # Forms that torch itself cannot make of this model, with torch's error.
    without: dict[str, str] = field(default_factory=dict)
    # Whether its outputs change with each call: caches that live in buffers.
    has_state: bool = False

    def model(self):
        """The model with its weights, the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20261122)
            model = self.build().eval().requires_grad_(False)
        fill(model)
        return model

    def sample(self, sizes=None, seed=0):
        """Inputs at these sizes: (args, kwargs)."""
        return self.inputs(torch.Generator().manual_seed(seed), **(sizes or self.exported))


def fill(model):
    """Weights that keep activations near 1, so that an error anywhere shows in the output."""
    generator = torch.Generator().manual_seed(7)

    def normal(shape, dtype, std, mean=0.0):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.copy_(normal(weight.shape, weight.dtype, weight[0].numel() ** -0.5))
            elif weight.dim() == 1:
                weight.copy_(normal(weight.shape, weight.dtype, 0.1, 1.0 if name.endswith("weight") else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.copy_(normal(buffer.shape, buffer.dtype, 0.1, 1.0).abs())
            elif name.endswith("running_mean"):
                buffer.copy_(normal(buffer.shape, buffer.dtype, 0.1))


_CASES: dict[str, Case] = {}
_MODULES = ("encoders", "decoders", "vision")


def register(case):
    """Adds a case."""
    if case.name in _CASES:
        raise ValueError(f"{case.name} is there twice")
    _CASES[case.name] = case
    return case


def cases():
    """Every case by name."""
    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return _CASES


def export(case, form="default", model=None):
    """The exported program of a case."""
    model = case.model() if model is None else model
    args, kwargs = case.sample()
    dims = {}

    def dim(name):
        return dims.setdefault(name, torch.export.Dim.DYNAMIC)

    shapes = None if case.dynamic is None else case.dynamic(dim)
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    return in_form(program, form)


def in_form(program, form):
    """A program of the default form in another."""
    if form not in FORMS:
        raise ValueError(f"there is no form {form}: {FORMS}")
    with torch.no_grad():
        return {
            "default": lambda: program,
            "functional": lambda: program.run_decompositions({}),
            "core": lambda: program.run_decompositions(),
        }[form]()


def targets(program):
    """How often each operator occurs in a program: `aten.add.Tensor`, `_operator.mul`."""
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            target = node.target
            name = str(target) if isinstance(target, torch._ops.OpOverload) else f"{target.__module__}.{target.__name__}"
            counts[name] = counts.get(name, 0) + 1
    return counts
