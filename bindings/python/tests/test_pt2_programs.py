"""The program zoo: small models as torch exports them, run by Rapt, against torch and against a run in float64.

Each is compared at the sizes of its export and at others. A tensor of integers or booleans must have torch's bits; a float
result keeps the tolerance rule of docs/reference/numerics.md, with torch's own run as the peer. `RAPT_WHOLE=1` takes all
programs in all forms; otherwise one form of some.
"""

import copy
import functools
import os

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")
pytest.importorskip("transformers")

import zoo  # noqa: E402
from pt2_compare import same_bits, within_rule  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

# One program for each way in which programs differ: padding masks, a cache that is kept, one that the caller keeps, experts,
# convolutions, two sequences, bfloat16, and each of the three forms.
SOME = [
    ("minilm_pool", "default"),
    ("llama", "core"),
    ("llama_static_cache", "default"),
    ("llama_cache_as_input_mutated", "functional"),
    ("llama_cache_as_input_mutated", "default"),
    ("llama_dyncache_decode", "default"),
    ("qwen3_moe", "functional"),
    ("resnet", "default"),
    ("unet_block", "functional"),
]
WHOLE = os.environ.get("RAPT_WHOLE") == "1"


def programs():
    if not WHOLE:
        return SOME
    return [(name, form) for name, case in zoo.cases().items() for form in zoo.FORMS if form not in case.without]


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


def compare(got, torch_says, exact, where):
    ours, theirs, wide = (pytree.tree_leaves(tree) for tree in (got, torch_says, exact))
    assert len(ours) == len(theirs) == len(wide), where
    for index, (x, peer, reference) in enumerate(zip(ours, theirs, wide, strict=True)):
        at = f"{where}, result {index}"
        if not isinstance(peer, torch.Tensor):
            assert x == peer, at
            continue
        assert x.dtype == peer.dtype and x.shape == peer.shape, f"{at}: {x.dtype} {x.shape}, torch {peer.dtype} {peer.shape}"
        if not peer.dtype.is_floating_point:
            assert same_bits(x, peer), at
            continue
        kept, text = within_rule(x, reference.double(), peer)
        assert kept, f"{at}: {text}"


def refused_by_torch(program, given):
    """That the exported program refuses these sizes itself: exports of torch before 2.12 serve fewer."""
    assert torch.__version__ < "2.12"
    with pytest.raises((AssertionError, RuntimeError)):
        program.module()(*given[0], **given[1])


@functools.cache
def exported(name, form):
    """A program of the zoo: exported once, the other forms made of the default one."""
    return zoo.export(zoo.cases()[name]) if form == "default" else zoo.in_form(exported(name, "default"), form)


@pytest.mark.parametrize(("name", "form"), programs())
def test_a_program_gives_what_torch_gives(name, form, tmp_path):
    case = zoo.cases()[name]
    model = case.model()
    exact_model = wide_model(model)
    program = exported(name, form)
    path = tmp_path / f"{name}.pt2"
    torch.export.save(program, path)
    loaded = rapt.load(path)
    call = loaded.session() if case.has_state else loaded
    model, exact_model = (case.model(), wide_model(case.model())) if case.has_state else (model, exact_model)
    for seed, sizes in enumerate((case.exported, *case.others)):
        args, kwargs = case.sample(sizes, seed)
        ours = copied((args, kwargs))
        theirs = copied((args, kwargs))
        wide = widened(copied((args, kwargs)))
        try:
            got = call(*ours[0], **ours[1])
        except rapt.ShapeError:
            refused_by_torch(program, theirs)
            continue
        with torch.no_grad():
            expected = model(*theirs[0], **theirs[1])
            exact = exact_model(*wide[0], **wide[1])
        compare(got, expected, exact, f"{name}.{form} at {sizes}")
        # What the model writes into its inputs, and nothing else.
        compare(ours, theirs, wide, f"{name}.{form} at {sizes}, inputs")


def test_the_operators_of_the_zoo_are_listed():
    """What these programs hold stands in zoo/operators.tsv, from which test_pt2_ops takes its list."""
    listed = {line.split("\t")[0] for line in zoo.OPERATORS.read_text().splitlines()[1:]}
    for name, form in SOME[:3]:
        assert set(zoo.targets(exported(name, form))) <= listed


def test_a_wrong_answer_is_seen():
    """The comparison itself: one element of a result that is off by a ten-thousandth."""
    case = zoo.cases()["dit"]
    model = case.model()
    args, kwargs = case.sample()
    with torch.no_grad():
        torch_says, exact = model(*args, **kwargs), wide_model(model)(*widened(args), **kwargs)
    compare(torch_says, torch_says, exact, "torch itself")
    off = torch_says.clone()
    off[0, 0, 0, 0] += 1e-4
    with pytest.raises(AssertionError, match="one element, result 0: relative L2"):
        compare(off, torch_says, exact, "one element")
