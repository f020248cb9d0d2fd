"""Programs of one operator, in the JSON that `torch.export.save` writes: torch's own serializer makes it of a graph of one node.

A tensor argument becomes an input of the program, with the shape, strides and offset that it has; everything else stands in the
node. What the results look like is what torch's fake tensors say, as in an archive.
"""

import operator

import torch
from torch._export.serde import schema, serialize
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportGraphSignature
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree


class Unread(torch.fx.GraphModule):
    """A module that is neither run nor shown: torch would write Python for it twice, once to compile it and once for a log."""

    def recompile(self):
        return None

    def print_readable(self, *_, **__):
        return ""


def is_tensor(value):
    return isinstance(value, torch.Tensor)


class OneNode:
    """A program of one operator: `json`, the `inputs` it was made of, and the forms `declared` of its results."""

    def __init__(self, overload, args, kwargs=None):
        self.overload, self.args, self.kwargs = overload, tuple(args), dict(kwargs or {})
        leaves, self._spec = pytree.tree_flatten((self.args, self.kwargs))
        self._leaves = leaves
        self.inputs = [leaf for leaf in leaves if is_tensor(leaf)]
        mode = FakeTensorMode(shape_env=ShapeEnv())
        graph = torch.fx.Graph()
        placeholders, values, fakes = [], [], []
        for leaf in leaves:
            if is_tensor(leaf):
                node = graph.placeholder(f"x{len(placeholders)}")
                node.meta["val"] = mode.from_tensor(copy_of(leaf), static_shapes=True)
                placeholders.append(node)
            values.append(placeholders[-1] if is_tensor(leaf) else leaf)
            # Not the placeholder's own, which a view in place would change.
            fakes.append(mode.from_tensor(copy_of(leaf), static_shapes=True) if is_tensor(leaf) else leaf)
        node_args, node_kwargs = pytree.tree_unflatten(values, self._spec)
        node = graph.call_function(overload, node_args, node_kwargs)
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, self._spec)
        with mode:
            node.meta["val"] = overload(*fake_args, **fake_kwargs)
        outputs = [node]
        if node.meta["val"] is None:
            # An assertion: the program gives its operand back.
            outputs = placeholders[:1]
        elif not is_tensor(node.meta["val"]):
            outputs = []
            for index, value in enumerate(node.meta["val"]):
                item = graph.call_function(operator.getitem, (node, index))
                item.meta["val"] = value
                outputs.append(item)
        graph.output(tuple(outputs))
        self.declared = [(out.meta["val"].dtype, tuple(out.meta["val"].shape), out.meta["val"].stride()) for out in outputs]
        self.json = _write(graph, placeholders, outputs)

    def run(self):
        """The operator's results, on copies of the inputs that lie as those do."""
        leaves = [copy_of(leaf) if is_tensor(leaf) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._results(self.overload(*args, **kwargs))

    def _results(self, out):
        if out is None:
            return self.inputs[:1]
        return [out] if is_tensor(out) else list(out)

    def widened(self):
        """The results where every float is a float64, whatever dtype the arguments name; None where torch refuses."""

        def wide(leaf):
            if is_tensor(leaf):
                # Copied in any case: an operator in place writes it.
                return copy_of(leaf).double() if leaf.dtype.is_floating_point else copy_of(leaf)
            return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

        args, kwargs = pytree.tree_unflatten([wide(leaf) for leaf in self._leaves], self._spec)
        try:
            return self._results(self.overload(*args, **kwargs))
        except RuntimeError:
            return None


def copy_of(tensor):
    """A copy with the same strides and offset, over a storage of its own."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _write(graph, placeholders, outputs):
    def named(node):
        return TensorArgument(name=node.name)

    signature = ExportGraphSignature(
        input_specs=[InputSpec(InputKind.USER_INPUT, named(node), None) for node in placeholders],
        output_specs=[OutputSpec(OutputKind.USER_OUTPUT, named(node), None) for node in outputs],
    )
    call = ModuleCallSignature(
        inputs=[named(node) for node in placeholders],
        outputs=[named(node) for node in outputs],
        in_spec=pytree.tree_structure((tuple(range(len(placeholders))), {})),
        out_spec=pytree.tree_structure(tuple(range(len(outputs)))),
        forward_arg_names=[node.name for node in placeholders],
    )
    module = Unread(torch.nn.Module(), graph)
    serializer = serialize.GraphModuleSerializer(signature, [ModuleCallEntry("", call)])
    program = schema.ExportedProgram(
        graph_module=serializer.serialize(module),
        opset_version={"aten": torch._C._get_max_operator_version()},
        range_constraints={},
        schema_version=schema.SchemaVersion(*schema.SCHEMA_VERSION),
        verifiers=["TRAINING"],
        torch_version=torch.__version__,
        guards_code=[],
    )
    return serialize._to_json_bytes(program)
