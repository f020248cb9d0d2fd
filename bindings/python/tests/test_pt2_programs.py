"""The program zoo: small models as torch exports them, run by Rapt, against torch and against a run in float64.

Each is compared at the sizes of its export and at others. A tensor of integers or booleans must have torch's bits; a float
result keeps the tolerance rule of docs/reference/numerics.md, with torch's own run as the peer. `RAPT_WHOLE=1` takes all
programs in all forms; otherwise one form of some.
"""

import functools
import os

import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")
pytest.importorskip("transformers")

import zoo  # noqa: E402
from pt2_compare import compare  # noqa: E402
from zoo import record  # noqa: E402

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


@functools.cache
def exported(name, form):
    """A program of the zoo: exported once, the other forms made of the default one."""
    return zoo.export(zoo.cases()[name]) if form == "default" else zoo.in_form(exported(name, "default"), form)


@pytest.mark.parametrize(("name", "form"), programs())
def test_a_program_gives_what_torch_gives(name, form, tmp_path):
    case = zoo.cases()[name]
    program = exported(name, form)
    path = tmp_path / f"{name}.pt2"
    torch.export.save(program, path)
    loaded = rapt.load(path)
    run = loaded.session() if case.has_state else loaded
    for call in record.calls(case):
        ours = record.copied(call.given)
        try:
            got = run(*ours[0], **ours[1])
        except rapt.ShapeError:
            # Exports of torch before 2.13 serve fewer sizes.
            assert torch.__version__ < "2.13" and record.refuses(program, call.given)
            continue
        compare(got, call.results, call.exact, f"{name}.{form} at {call.sizes}")
        # What the model writes into its inputs, and nothing else.
        compare(ours, call.after, call.exact_after, f"{name}.{form} at {call.sizes}, inputs")


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
        torch_says, exact = model(*args, **kwargs), record.wide_model(model)(*record.widened(args), **kwargs)
    compare(torch_says, torch_says, exact, "torch itself")
    off = torch_says.clone()
    off[0, 0, 0, 0] += 1e-4
    with pytest.raises(AssertionError, match="one element, result 0: relative L2"):
        compare(off, torch_says, exact, "one element")
