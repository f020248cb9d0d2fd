"""What torch says of a case: inputs at each of its sizes, results, and the results of a copy that computes in float64.

`calls` runs the model; `saved` and `read` keep what it said in a file beside archives, which another torch can read.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Call:
    """One call of a model. Results are leaves in the order of torch's pytree."""

    sizes: dict[str, int]
    # (args, kwargs)
    given: Any
    results: list
    # The results of the copy in float64.
    exact: list
    # The inputs after the call: programs may write them.
    after: Any
    exact_after: Any
    # Whether torch itself refuses to run the exported program at these sizes, by form.
    refused: dict[str, bool] = field(default_factory=dict)


def widened(tree):
    """The same with every float in float64."""

    def wide(leaf):
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point else leaf

    return pytree.tree_map(wide, tree)


def copied(tree):
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def wide_model(model):
    """A copy that computes in float64, whatever dtype its caches and constants have."""
    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                setattr(module, name, value.double())
        if hasattr(module, "config"):
            # torch's grouped products have no float64.
            module.config._experts_implementation = "eager"
        if hasattr(module, "static_cache"):
            for index, layer in enumerate(module.static_cache.layers):
                layer.keys, layer.values = getattr(module, f"key_cache_{index}"), getattr(module, f"value_cache_{index}")
                layer.cumulative_length = getattr(module, f"cumulative_length_{index}")
    return wide


def calls(case):
    """The calls of a case at the sizes of its export and at its others, in turn: caches of the model keep what they hold."""
    model = case.model()
    exact_model = wide_model(model)
    for seed, sizes in enumerate((case.exported, *case.others)):
        given = case.sample(sizes, seed)
        after = copied(given)
        exact_after = widened(copied(given))
        with torch.no_grad():
            results = pytree.tree_leaves(model(*after[0], **after[1]))
            exact = pytree.tree_leaves(exact_model(*exact_after[0], **exact_after[1]))
        yield Call(sizes, given, results, exact, after, exact_after)


def refuses(program, given):
    """Whether torch itself refuses these inputs of an exported program."""
    args, kwargs = copied(given)
    try:
        program.module()(*args, **kwargs)
    except (AssertionError, RuntimeError):
        return True
    return False


def saved(said, path):
    """Writes calls as plain tensors, lists and dictionaries, which are read without running code."""
    torch.save([vars(call) for call in said], path)


def read(path):
    return [Call(**call) for call in torch.load(path, weights_only=True)]
