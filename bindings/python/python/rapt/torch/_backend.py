"""`torch.compile(model, backend="rapt")`: whole graphs run by Rapt.

    torch.compile(model, backend="rapt")                                   refuses what Rapt does not run, by a typed error
    torch.compile(model, backend="rapt", options={"fallback": "eager"})    runs that in PyTorch, and counts it
    torch.compile(model, backend="rapt", options={"freeze": True})         holds parameters and buffers constant (`_weights`)

AOTAutograd makes the inference graph, `_graph` a program of it; torch finds `backend` by the entry point of this package. A graph
that is refused is refused when it is called, so that the error is Rapt's own and not a `BackendCompilerFailed` around it.
"""

import itertools
import re
import weakref

import torch
from rapt import OptionError, RaptError, UnsupportedError, _native
from rapt._model import Explanation

from . import _graph
from ._stats import count_fallback, count_served, log
from ._weights import Held

# The first torch whose serializer writes what Rapt reads.
_LEAST_TORCH = (2, 9)
_OPTIONS = {"fallback": (None, "eager"), "freeze": (False, True)}
# Why a graph is not Rapt's, in `stats()`; the dots stand for the type of the error.
REASON = "compiled graph: …"

# The graphs that are there.
_programs = weakref.WeakSet()
_numbers = itertools.count()


def compiled_graphs():
    """See `rapt.torch.compiled_graphs`."""
    return [program.explain() for program in sorted(_programs, key=lambda program: program.number)]


def backend(gm, example_inputs, *, options=None, mode=None, **others):
    """A backend of torch.compile: the graph of dynamo and its inputs in, what runs it out."""
    try:
        options = _checked(options, mode, others)
    except OptionError as error:
        return _Refused(error)
    try:
        return _compiled(gm, example_inputs, options)
    except RaptError as error:
        return _Refused(error) if options.get("fallback") is None else _Eager(gm, _reason(error))


def _checked(options, mode, others):
    """The options."""
    allowed = 'options={"fallback": "eager", "freeze": True}'
    if mode is not None or others:
        given = f"mode={mode!r}" if mode is not None else ", ".join(others)
        raise OptionError(f'{given} is not an option of backend="rapt"; allowed are {allowed}')
    for name, value in (options or {}).items():
        if not any(value is known or (isinstance(value, str) and value == known) for known in _OPTIONS.get(name, ())):
            raise OptionError(f'options={{{name!r}: {value!r}}}: backend="rapt" takes {allowed}, or fewer')
    return dict(options or {})


def _compiled(gm, example_inputs, options):
    if tuple(map(int, torch.__version__.split(".")[:2])) < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        raise UnsupportedError(f'backend="rapt" needs torch {least} or later, this is {torch.__version__}')
    from torch._dynamo.backends.common import aot_autograd

    names = [_name(node.name) for node in gm.graph.nodes if node.op == "placeholder"]

    def inference(module, arguments):
        return _Program(module, arguments, names, options)

    def training(_module, _arguments):
        grad = [name for name, x in zip(names, example_inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        shown = ", ".join(grad[:3]) + (f" and {len(grad) - 3} more" if len(grad) > 3 else "")
        error = UnsupportedError(
            f"grad mode is on and {shown or 'an input'} requires grad: training is not computed. Mend: `with torch.no_grad():`"
        )
        error.reason = "requires grad"
        raise error

    compiler = aot_autograd(
        fw_compiler=training, bw_compiler=training, inference_compiler=inference, keep_inference_input_mutations=True
    )
    return compiler(gm, example_inputs)


def _name(placeholder):
    """`x` of dynamo's `l_x_`, `modules_head_parameters_weight` of `l_self_modules_head_parameters_weight_`."""
    name = re.sub("^[Ll]_(self_)?", "", placeholder).strip("_")
    return name if name.isidentifier() else placeholder


class _Program:
    """A graph that Rapt runs."""

    # Arguments come as one list.
    _boxed_call = True

    def __init__(self, module, arguments, names, options):
        held = _graph.held_constant(module) if options.get("freeze") else frozenset()
        self.written, self.template = _loaded(module, arguments, names, held)
        self.eager = module if options.get("fallback") == "eager" else None
        self.held = Held(self.template, self.written) if self.written.held else None
        self.program = None
        self.number, self.calls = next(_numbers), 0
        _programs.add(self)

    def __call__(self, arguments):
        written = self.written
        try:
            computed = self._program(arguments).run([arguments[place] for place in written.given])
        except RaptError as error:
            # Nothing was written.
            if self.eager is None:
                raise
            count_fallback(_reason(error))
            return self.eager(*arguments)
        count_served()
        self.calls += 1
        return _results(written, arguments, computed)

    def _program(self, arguments):
        if self.held is not None:
            return self.held.program(arguments)
        if self.program is None:
            self.program = self.template.with_weights(self.written.constants)
        return self.program

    def explain(self):
        program = self.program
        rows = [("graph", str(self.number)), ("calls", str(self.calls))]
        if self.held is not None:
            tensors, sets, renewed = len(self.held.places), len(self.held.sets), self.held.renewed
            rows.append(("held constant", f"{tensors} tensors, {sets} sets, renewed {renewed} times"))
            program = next((held.program for held in reversed(self.held.sets.values())), None)
        return Explanation([*rows, *(program.explain() if program else [])])


def _loaded(module, arguments, names, held):
    """(what was written of the graph, the program but for its weights); operators that are not served are taken apart where
    PyTorch can."""
    written = _graph.write(module, names, held)
    try:
        return written, _native.ProgramTemplate.from_json(written.json)
    except UnsupportedError as error:
        refusal, missing = error, _native.program_missing(written.json)
    taken_apart = _graph.decomposed(module, missing, arguments)
    if taken_apart is None:
        raise refusal
    written = _graph.write(taken_apart, names, held)
    try:
        return written, _native.ProgramTemplate.from_json(written.json)
    except UnsupportedError:
        if set(_native.program_missing(written.json)) <= set(missing):
            raise
        # The operators that the user wrote, not what they were taken apart into.
        raise refusal from None


def _results(written, arguments, computed):
    values = None
    results = []
    for result in written.results:
        if isinstance(result, _graph.Computed):
            results.append(computed[result.place])
        elif isinstance(result, _graph.Argument):
            results.append(arguments[result.place])
        elif isinstance(result, _graph.Fixed):
            results.append(result.value)
        else:
            if values is None:
                values = _values(written.symbols, arguments)
            results.append(_view(result, arguments, computed, values))
    return results


def _values(symbols, arguments):
    def one(place, dimension):
        return int(arguments[place] if dimension is None else arguments[place].shape[dimension])

    return {symbol: one(*source) for symbol, source in symbols.items()}


def _view(result, arguments, computed, values):
    base = (computed if isinstance(result.base, _graph.Computed) else arguments)[result.base.place]
    sizes, strides, offset = _graph.evaluate(result.numbers, values)
    base_sizes, base_strides, base_offset = _graph.evaluate(result.base_numbers, values)
    if any(n > 1 and own != said for n, own, said in zip(base_sizes, base.stride(), base_strides)):
        raise UnsupportedError(f"a result is a view of a tensor of strides {base_strides}, which has strides {base.stride()}")
    return base.as_strided(sizes, strides, base.storage_offset() + offset - base_offset)


class _Refused:
    """A graph that Rapt does not run: each call says why."""

    def __init__(self, error):
        self.error = error

    def __call__(self, *_arguments):
        # A new one each time: an exception keeps the frames that it went through.
        raise type(self.error)(*self.error.args) from self.error.__cause__


class _Eager:
    """A graph that PyTorch runs in Rapt's place, at the user's wish."""

    def __init__(self, gm, reason):
        self.gm, self.reason = gm, reason

    def __call__(self, *arguments):
        count_fallback(self.reason)
        return self.gm(*arguments)


def _reason(error):
    """Why a graph is not Rapt's, as `stats()` counts it; the whole message goes to the logger "rapt"."""
    log.debug("a graph of torch.compile is PyTorch's: %s", error)
    return getattr(error, "reason", REASON.replace("…", type(error).__name__))
