"""A graph of torch.compile as a program: the JSON that torch's own serializer writes of it, and how results come back.

    graph of AOTAutograd ─► nodes without views that only leave the graph ─► torch._export.serde ─► rapt._native.Program

Parameters and buffers of the graph are inputs of the program, unless they are to be held constant: then they are its weights, as
the graph's own constants are. Either way they are read where they lie; a SymInt is an integer input.
AOTAutograd states of each result which memory it lies in. What is a view of an input, or of another result, leaves the program
as the tensor that owns the memory, and becomes that view again here: results alias what they alias in PyTorch.

Deliberately absent: any rewriting of operators but those that archives do not have (`_as_pytorchs_own`, `_sum`).
"""

import dataclasses
import operator

import sympy
import torch
from rapt import DeviceError, UnsupportedError
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, SymIntArgument, TensorArgument

from . import _fused

_COPY = torch.ops.aten.copy_.default
_SDPA = torch.ops.aten.scaled_dot_product_attention.default


@dataclasses.dataclass(frozen=True)
class View:
    """A result that shares its memory: sizes, strides and offset over `base`, an argument or what the program computes."""

    base: "Argument | Computed"
    numbers: tuple  # sizes, strides, offset: numbers and expressions
    base_numbers: tuple  # those of the base


@dataclasses.dataclass(frozen=True)
class Argument:
    """A result that is an argument of the graph."""

    place: int


@dataclasses.dataclass(frozen=True)
class Computed:
    """A result of the program."""

    place: int


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A result that is the same in every call."""

    value: object


@dataclasses.dataclass
class Written:
    """A program and its call."""

    json: bytes
    given: list  # which arguments of the graph the program takes, in order
    held: list  # (name, argument): those that are weights of the program
    constants: list  # (name, tensor): weights that are the graph's own
    results: list  # View, Argument, Computed or Fixed of each result of the graph
    symbols: dict  # symbol -> (argument, dimension or None): where its value stands


def _is_tensor(node):
    return isinstance(node.meta.get("val"), torch.Tensor)


def _storage(node):
    return node.meta["val"].untyped_storage()._cdata


def _expression(number):
    """A number of a tensor's form: an int, or a sympy expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else int(number)


def _form(node):
    value = node.meta["val"]
    sizes, strides = tuple(map(_expression, value.shape)), tuple(map(_expression, value.stride()))
    return sizes, strides, _expression(value.storage_offset())


def evaluate(form, values):
    """The numbers of a form, with the symbols' values."""

    def one(number):
        return number if isinstance(number, int) else int(number.xreplace(values))

    sizes, strides, offset = form
    return tuple(map(one, sizes)), tuple(map(one, strides)), one(offset)


class _Writer:
    def __init__(self, module, names, held):
        self.held = held
        self.module, self.nodes = module, list(module.graph.nodes)
        self.arguments = [node for node in self.nodes if node.op == "placeholder"]
        self.names = names if len(names) == len(self.arguments) else [node.name for node in self.arguments]
        self.place = {node: place for place, node in enumerate(self.arguments)}
        self.tokens = _tokens(self.nodes)
        self.owners = {}
        for node in self.nodes:
            if _is_tensor(node):
                self.owners.setdefault(_storage(node), node)
        self.kept = {}

    def results(self):
        (outputs,) = next(node for node in self.nodes if node.op == "output").args
        aliases = _aliases(len(outputs))
        return [self._result(node, is_alias) for node, is_alias in zip(outputs, aliases, strict=True)]

    def _result(self, node, is_alias):
        if not isinstance(node, fx.Node):
            return Fixed(node)
        # PyTorch makes the token of a call's effects, and forgets the one that comes back.
        node = self.tokens.get(node, node)
        if node in self.place:
            return Argument(self.place[node])
        if not _is_tensor(node):
            return self._computed(node)
        owner = self.owners[_storage(node)]
        base = self._written_to(owner) if is_alias else None
        if base is None and owner is node:
            return self._computed(node)
        base_node = owner if base is None else base
        base = Argument(self.place[base_node]) if base_node in self.place else self._computed(base_node)
        return View(base, _form(node), _form(base_node))

    def _computed(self, node):
        return Computed(self.kept.setdefault(node, len(self.kept)))

    def _written_to(self, owner):
        """The argument that the graph ends with writing `owner` to: a result that aliases the argument is a view of it."""
        for user in owner.users:
            if user.target is _COPY and user.args[1] is owner and user.args[0] in self.place:
                if _form(user.args[0])[:2] == _form(owner)[:2] and _form(owner)[2] == 0:
                    return user.args[0]
        return None

    def graph(self):
        """(graph, arguments that it takes, arguments and constants that are weights): the nodes again, without what leads to no
        result."""
        graph, new = fx.Graph(), {}
        needed = _needed([node for node in self.nodes if not _says_nothing(node)], self.kept)
        tokens = set(self.tokens.values())
        taken = [node for node in self.arguments if (node in needed or not _is_tensor(node)) and node not in tokens]
        held = [node for node in taken if self.place[node] in self.held]
        taken = [node for node in taken if self.place[node] not in self.held]
        constants = [node for node in self.nodes if node in needed and node.op == "get_attr" and _is_tensor(node)]
        for node in [*taken, *held, *constants]:
            name = self.names[self.place[node]] if node in self.place else node.name
            new[node] = graph.placeholder(name)
            new[node].meta["val"] = node.meta["val"]
        for node in self.nodes:
            if node not in needed or node in new or node.op in ("placeholder", "output") or node in self.tokens:
                continue
            if _has_effect(node):
                _, operator_of, *operands = node.args
                words = {name: new.get(value, value) for name, value in node.kwargs.items()}
                graph.call_function(operator_of, tuple(new.get(value, value) for value in operands), words)
                continue
            if node.target is torch.sym_sum:
                new[node] = _sum(graph, node, new)
                continue
            new[node] = graph.node_copy(node, lambda old: new[old])
            new[node].meta = {"val": self._stated(node)} if "val" in node.meta else {}
            _as_pytorchs_own(new[node])
        graph.output(tuple(new[node] for node in self.kept))
        held = [(new[node].name, self.place[node]) for node in held]
        constants = [(new[node].name, _attribute(self.module, node.target)) for node in constants]
        return graph, [self.place[node] for node in taken], held, constants

    def _stated(self, node):
        """The form that the program states. `aten.copy`'s has the offset of its operand, though it is the first in its memory."""
        value = node.meta["val"]
        if not _is_tensor(node) or self.owners[_storage(node)] is not node or _form(node)[2] == 0:
            return value
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def symbols(self):
        """Where the value of each symbol stands among the arguments."""
        found = {}
        for place, node in enumerate(self.arguments):
            value = node.meta["val"]
            numbers = enumerate(value.shape) if _is_tensor(node) else [(None, value)]
            for dimension, number in numbers:
                if isinstance(number, torch.SymInt) and isinstance(number.node.expr, sympy.Symbol):
                    found.setdefault(number.node.expr, (place, dimension))
        return found


def _sum(graph, node, new):
    """`torch.sym_sum`, for which archives have no name, as additions."""
    first, *others = node.args[0]
    value = first.meta["val"] if isinstance(first, fx.Node) else first
    total = new.get(first, first)
    for term in others:
        value = value + (term.meta["val"] if isinstance(term, fx.Node) else term)
        total = graph.call_function(operator.add, (total, new.get(term, term)))
        total.meta["val"] = value
    return total


def _needed(nodes, kept):
    """What leads to a result, and what has an effect."""
    needed = set()
    for node in reversed(nodes):
        acts = node.op not in ("output", "placeholder") and (node.is_impure() or _has_effect(node))
        if node in kept or acts or any(user in needed for user in node.users):
            needed.add(node)
    return needed


def _has_effect(node):
    """Whether PyTorch orders this node by a token: (token, operator, operands…) gives (token, results…)."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "with_effects"


def _tokens(nodes):
    """The argument that each token among the nodes was at first. A program runs its nodes in their order without them."""
    tokens = {}
    for node in filter(_has_effect, nodes):
        token, operator_of = node.args[:2]
        if operator_of is not torch.ops.aten._linalg_check_errors.default:
            raise UnsupportedError(f"{node.name} has an effect that programs do not have: {operator_of}")
        for user in node.users:
            tokens[user] = tokens.get(token, token)
    return tokens


def _says_nothing(node):
    """Whether this is an assertion that holds whatever its values are.

    torch writes some beside each boolean that a program reads from a tensor: that as a number it is 0 or 1.
    """
    if node.target is not torch.ops.aten._assert_scalar.default:
        return False
    condition = node.args[0]
    value = condition.meta.get("val") if isinstance(condition, fx.Node) else condition
    if not isinstance(value, torch.SymBool):
        return value is True
    return sympy.piecewise_fold(value.node.expr) is sympy.true


def _aliases(count):
    """Of each result, whether PyTorch takes it for a view of an argument, and makes that view from the argument again."""
    context = torch._guards.TracingContext.try_get()
    facts = getattr(context, "fw_metadata", None)
    if facts is None:
        return [False] * count
    kinds = [info.output_type.name in ("alias_of_input", "is_input") for info in facts.output_info]
    kinds = [False] * len(facts.mutated_inp_runtime_indices) + kinds
    return kinds if len(kinds) == count else [False] * count


def _attribute(module, path):
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _as_pytorchs_own(node):
    """An operator that archives do not have, as PyTorch's with the same arguments."""
    if node.target is torch.ops.rapt.scaled_dot_product_attention.default:
        # Graphs carry it while Rapt is registered.
        query, key, value, *rest = node.args
        mask, is_causal = [*rest, *(None, False)[len(rest) :]]
        node.target, node.args = _SDPA, (query, key, value, mask, 0.0, is_causal)
    elif node.target is torch.ops.prims.convert_element_type.default:
        x, dtype = node.args
        node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (x,), {"dtype": dtype}


def _refuse_devices(nodes, names):
    for node in nodes:
        if _is_tensor(node) and node.meta["val"].device.type != "cpu":
            name, device = names.get(node, node.name), node.meta["val"].device
            raise DeviceError(f"{name} is on {device}: programs run on the CPU. Mend: `model.cpu()`")


def held_constant(module):
    """The arguments of the graph that may be held constant: parameters and buffers that it does not write."""
    context = torch._guards.TracingContext.try_get()
    facts = getattr(context, "fw_metadata", None)
    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    if facts is None or len(facts.input_info) != len(arguments):
        return frozenset()
    written = {node.args[0] for node in module.graph.nodes if node.target is _COPY}

    def may(place):
        return _is_tensor(arguments[place]) and arguments[place] not in written and not facts.input_info[place].mutates_data

    return frozenset(filter(may, facts.static_input_indices))


def write(module, names, held=frozenset()):
    """The program of AOTAutograd's inference graph `module`; `names` are what the arguments are called in messages, `held` the
    arguments that are its weights.

    Raises `DeviceError` for what is not on the CPU, `UnsupportedError` for what torch's serializer does not write.
    """
    writer = _Writer(module, names, held)
    _refuse_devices(writer.nodes, dict(zip(writer.arguments, writer.names)))
    results, symbols = writer.results(), writer.symbols()
    graph, given, held, constants = writer.graph()
    for result in results:
        numbers = () if not isinstance(result, View) else (*result.numbers[0], *result.numbers[1], result.numbers[2])
        for number in numbers:
            if not isinstance(number, int) and not number.free_symbols <= symbols.keys():
                raise UnsupportedError(f"a result is a view of size or stride {number}, which the arguments do not determine")
    weights = {name for name, _ in [*held, *constants]}
    return Written(_serialized(fx.GraphModule(module, graph), weights), given, held, constants, results, symbols)


# --- torch's serializer ------------------------------------------------------------------------------------------------------


def _serialized(module, weights):
    # Importing the serializer takes a while, and only compilation needs it.
    from torch._export.serde import schema, serialize
    from torch.export import ExportGraphSignature
    from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
    from torch.utils import _pytree as pytree

    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    (outputs,) = next(node for node in module.graph.nodes if node.op == "output").args

    def named(node):
        return TensorArgument(name=node.name) if _is_tensor(node) else SymIntArgument(name=node.name)

    def spec(node):
        if node.name in weights:
            return InputSpec(InputKind.PARAMETER, named(node), node.name)
        return InputSpec(InputKind.USER_INPUT, named(node), None)

    users = [node for node in placeholders if node.name not in weights]
    signature = ExportGraphSignature(
        input_specs=[spec(node) for node in placeholders],
        output_specs=[OutputSpec(OutputKind.USER_OUTPUT, named(node), None) for node in outputs],
    )
    call = ModuleCallSignature(
        inputs=[named(node) for node in users],
        outputs=[named(node) for node in outputs],
        in_spec=pytree.tree_structure((tuple(range(len(users))), {})),
        out_spec=pytree.tree_structure(tuple(range(len(outputs)))),
        forward_arg_names=[node.name for node in users],
    )
    program = {
        "opset_version": {"aten": torch._C._get_max_operator_version()},
        "range_constraints": {},
        "schema_version": schema.SchemaVersion(*schema.SCHEMA_VERSION),
        "verifiers": ["TRAINING"],
        "torch_version": torch.__version__,
    }
    environment = _shape_environment(placeholders)
    if environment is not None:
        used = set().union(*(_symbols_of(node) for node in module.graph.nodes))
        ranges = {symbol: environment.var_to_range[symbol] for symbol in used if symbol in environment.var_to_range}
        program["range_constraints"] = serialize.serialize_range_constraints(ranges)
        if any(field.name == "guards_code" for field in dataclasses.fields(schema.ExportedProgram)):
            program["guards_code"] = _guards(environment, placeholders)
    try:
        written = serialize.GraphModuleSerializer(signature, [ModuleCallEntry("", call)]).serialize(module)
    except (serialize.SerializeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedError(f"torch's serializer does not write this graph: {error}") from error
    return serialize._to_json_bytes(schema.ExportedProgram(graph_module=written, **program))


def _shape_environment(nodes):
    for node in nodes:
        for number in _symbolic(node):
            return number.node.shape_env
    return None


def _symbolic(node):
    value = node.meta.get("val")
    numbers = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
    return [number for number in numbers if isinstance(number, torch.SymInt)]


def _symbols_of(node):
    return set().union(*(number.node.expr.free_symbols for number in _symbolic(node)))


def _guards(environment, placeholders):
    """What tracing found to hold of the sizes, as an archive has it: the sizes at which a graph is verified satisfy it.

    Dynamo checks it before each call; what archives cannot say is left out.
    """
    from torch.utils._sympy.printers import PythonPrinter

    source = {}
    for node in placeholders:
        value = node.meta["val"]
        numbers = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dimension, number in numbers:
            if isinstance(number, torch.SymInt) and isinstance(number.node.expr, sympy.Symbol):
                text = f"L['{node.name}']" if dimension is None else f"L['{node.name}'].size()[{dimension}]"
                source.setdefault(number.node.expr, text)

    class Printer(PythonPrinter):
        def _print_Symbol(self, symbol):  # noqa: N802
            return source[symbol]

        def _print_Pow(self, power):  # noqa: N802
            base, exponent = power.args
            return "(" + "*".join([f"({self.doprint(base)})"] * int(exponent)) + ")"

    texts = []
    for guard in environment.guards:
        condition = guard.expr.xreplace(environment.replacements)
        if isinstance(condition, sympy.Rel) and condition.free_symbols <= source.keys() and _is_integral(condition):
            texts.append(Printer().doprint(condition))
    return list(dict.fromkeys(texts))


_INTEGRAL = ("Symbol", "Add", "Mul", "FloorDiv", "Mod", "PythonMod")
_MOST_FACTORS = 8


def _is_integral(condition):
    """Whether both sides are sums, products, small powers, quotients and remainders of sizes."""

    def one(part):
        if part.is_Pow:
            return part.args[1].is_Integer and 0 < part.args[1] <= _MOST_FACTORS
        return part.is_Integer or type(part).__name__ in _INTEGRAL

    return all(one(part) for side in condition.args for part in sympy.preorder_traversal(side))


# --- decomposition -----------------------------------------------------------------------------------------------------------


def decomposed(module, missing, arguments):
    """The graph with the operators `missing` taken apart as PyTorch takes them apart; None where it takes none apart."""
    from torch.fx.experimental.proxy_tensor import make_fx

    targets = {node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    missing = [target for target in targets if str(target) in missing]
    table = torch._decomp.get_decompositions(missing) | {op: parts for op, parts in _fused.parts().items() if op in missing}
    mode = torch._guards.detect_fake_mode(arguments)
    if not table or mode is None:
        return None
    with mode, torch.no_grad():
        return make_fx(module, decomposition_table=table)(*arguments)
