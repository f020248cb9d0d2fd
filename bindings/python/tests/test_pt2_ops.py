"""Every operator that exported programs need, sample by sample against torch.

Samples are torch's own (OpInfo) and written ones: every dtype that the operator has, contiguous and strided tensors. Each is
a program of one node, which Rapt reads, verifies (dtype, shape and strides of the result must be what torch's tracer says) and
runs. Integers, booleans, views and what IEEE rounds exactly are compared bit for bit; the rest within one unit in the last
place of torch's float64 result, or by the tolerance rule. `RAPT_WHOLE=1` takes every sample; otherwise a few of each kind.
"""

import io
import math
import os
import warnings

import numpy as np
import pytest
import rapt
from rapt import _native

torch = pytest.importorskip("torch", minversion="2.9")
pytest.importorskip("expecttest")  # torch's own samples need it.
pytest.importorskip("transformers")

from one_node import OneNode  # noqa: E402
from op_samples_nonfinite import SAMPLES as NOT_FINITE  # noqa: E402
from op_samples import DTYPES, MORE, NOT_ON_TENSORS, OVERLOADS, overload_of, samples  # noqa: E402
from op_samples_systems import ROWS as SYSTEMS  # noqa: E402
from pt2_compare import difference  # noqa: E402
from reference import to_torch  # noqa: E402

WHOLE = os.environ.get("RAPT_WHOLE") == "1"
MOST = math.inf if WHOLE else 2
# Of operators beyond the zoo's, fewer: one of each kind, in a dtype of each kind of rounding.
FEWER = DTYPES if WHOLE else (torch.float32, torch.float16, torch.int64)
MOMENTS = ("aten.var_mean.correction", "aten.std_mean.correction")
SUMS = {"aten.sum.dim_IntList": np.sum, "aten.mean.dim": np.mean, "aten.nansum.default": np.nansum}
ATTENTION = "aten.scaled_dot_product_attention.default"
# torch's answer here is one of several right ones, because equal elements may stand in any order; where `dim` stands.
TIES = {
    **{"aten.sort.default": 1, "aten.topk.default": 2, "aten.kthvalue.default": 2},
    **{"aten.median.dim": 1, "aten.nanmedian.dim": 1},
}

# torch reads indices with gaps between them as if there were none, unless it is asked by way of `embedding_bag`.
MISREAD = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")


def shown(sample):
    """A sample in a line."""

    def one(leaf):
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}:{list(leaf.stride())}"
        return repr(leaf)

    return str(torch.utils._pytree.tree_map(one, sample))


def dimension(name, args, kwargs):
    """The dimension of a sample of an operator that names places."""
    return kwargs.get("dim", args[TIES[name]] if len(args) > TIES[name] else -1)


def leads_to(x, indices, values, dim):
    """Whether these indices, each once, lead from x to these values."""
    if x.dim() == 0:
        return True
    if indices.dim() < x.dim():
        indices, values = indices.unsqueeze(dim), values.unsqueeze(dim)
    led = x.gather(dim, indices)
    once = all(len(set(row)) == len(row) for row in indices.movedim(dim, -1).reshape(-1, indices.shape[dim]).tolist())
    return once and bool(((led == values) | (led.isnan() & values.isnan())).all())


def attention_in_longdouble(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention of float64 tensors in the widest floats of this machine: torch's own result is no nearer to it than another."""
    q, k, v = (x.numpy().astype(np.longdouble) for x in (query, key, value))
    if enable_gqa:
        k, v = (x.repeat(q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) * np.longdouble(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        mask = attn_mask.numpy()
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask.astype(np.longdouble)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return torch.from_numpy((weights / weights.sum(-1, keepdims=True) @ v).astype(np.float64))


def mean_in_longdouble(x, dim=None, correction=None, keepdim=False):
    """The mean of a float64 tensor: torch's running mean of `var_mean` loses digits where it nearly cancels."""
    dims = tuple(range(x.dim())) if not dim else tuple([dim] if isinstance(dim, int) else dim)
    return torch.from_numpy(np.asarray(x.numpy().astype(np.longdouble).mean(axis=dims, keepdims=keepdim), dtype=np.float64))


def sum_in_longdouble(name, x, dim=None, keepdim=False, **_):
    """The sum or mean of a float64 tensor, of which little may be left: torch's own lies no nearer."""
    dims = tuple([dim] if isinstance(dim, int) else dim or range(x.dim())) if x.dim() else ()
    wide = x.numpy().astype(np.longdouble)
    return torch.from_numpy(np.asarray(SUMS[name](wide, axis=dims, keepdims=keepdim), np.float64))


def worse(name, theirs, exact, args, kwargs):
    """Of torch's two results, for the tensor as it lies and for a contiguous copy, the one farther from the exact sum."""
    with torch.no_grad():
        other = overload_of(name)(args[0].contiguous(), *args[1:], **kwargs)
    return other if (other - exact).norm() > (theirs - exact).norm() else theirs


def close(leaf):
    """A tensor of integers without gaps."""
    return leaf.contiguous() if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() else leaf


def comparison(name, args, kwargs):
    """How a sample is judged."""
    if name == "aten.grid_sampler.default" and args[2] == 1:
        # Which element is nearest, not what is computed of it.
        return "bits"
    alpha = kwargs.get("alpha", 1)
    if alpha != int(alpha) and args[0].dtype in (torch.float16, torch.bfloat16):
        # torch rounds the product first in whole vectors, and not in what is left of them.
        return "ulp"
    return (OVERLOADS | MORE)[name].compare


def check(name, sample):
    """What is wrong with Rapt's answer to a sample, or None."""
    one = OneNode(overload_of(name), *sample)
    peer = OneNode(overload_of(name), *torch.utils._pytree.tree_map(close, sample)) if name in MISREAD else one
    expected, exact = peer.run(), peer.widened()
    if name == ATTENTION and exact is not None and one.inputs[0].dtype == torch.float64:
        exact = [attention_in_longdouble(*sample[0], **sample[1])]
    is_finite = bool(one.inputs) and bool(one.inputs[0].isfinite().all())
    if name in MOMENTS and exact is not None and is_finite and one.inputs[0].dtype == torch.float64 and one.inputs[0].numel():
        exact = [exact[0], mean_in_longdouble(*sample[0], **sample[1])]
    if name in SUMS and exact is not None and one.inputs[0].dtype == torch.float64 and one.inputs[0].numel():
        args, kwargs = sample
        exact = [sum_in_longdouble(name, *args, **kwargs)]
        expected = [worse(name, expected[0], exact[0], args, kwargs)]
    try:
        program = _native.Program.from_json(one.json)
        got = [to_torch(out).reshape(out.shape) for out in program.run(one.inputs)]
    except rapt.RaptError as error:
        return f"{type(error).__name__}: {error}"
    if name in TIES and not torch.equal(got[1], expected[1]):
        if not leads_to(one.inputs[0], got[1], expected[0], dimension(name, *sample)):
            return "its indices do not lead to torch's values"
        got[1] = expected[1]
    if len(got) != len(expected):
        return f"{len(got)} results, torch has {len(expected)}"
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        wide = exact[index] if exact is not None and exact[index].dtype.is_floating_point else None
        wrong = difference(ours, theirs, wide, comparison(name, *sample))
        if wrong:
            return f"result {index}: {wrong}"
    return None


@pytest.mark.parametrize("name", [*OVERLOADS, *MORE])
def test_an_operator_gives_what_torch_gives(name):
    failures, count = [], 0
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in DTYPES if name in OVERLOADS or name in SYSTEMS else FEWER:
            for sample in samples(name, dtype, MOST if name in OVERLOADS or WHOLE else 1):
                count += 1
                wrong = check(name, sample)
                if wrong:
                    failures.append(f"{str(dtype).removeprefix('torch.')} {shown(sample)}: {wrong}")
    assert count, "no sample"
    assert not failures, f"{len(failures)} of {count} samples:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_follows_torch(name, dtype):
    failures, count = [], 0
    with torch.no_grad():
        for sample in NOT_FINITE[name](dtype):
            count += 1
            wrong = check(name, sample)
            if wrong:
                failures.append(f"{shown(sample)}: {wrong}")
    assert count and not failures, f"{len(failures)} of {count} samples:\n" + "\n".join(failures[:20])


MIDDLE = torch.zeros(7)[2:5]
# What an ordinary run takes no sample of.
KEPT = {
    "no acosh below 1": ("acosh", (torch.tensor([-65504.0, -1e30, -2.0, 1.0, 3.0, math.inf]),), {}),
    "a range of one number is rounded": ("histc", (torch.tensor(7.13671875, dtype=torch.float16), 10, 0, 0), {}),
    "a sum by index lies in rows": ("index_add", (torch.ones(3, 3).t().contiguous().t(), 1, torch.tensor([2, 0]), torch.ones(3, 2)), {}),
    "a tensor broadcasts to its mask": ("masked_scatter", (torch.zeros(3), torch.eye(3).bool(), torch.arange(9.0)), {}),
    "a copy starts where a view does": ("copy", (MIDDLE, torch.arange(3.0)), {}),
    "a diagonal above and before others": ("diag_embed", (torch.arange(6.0).reshape(2, 3), 2, 0, -1), {}),
    "a diagonal below": ("diag_embed", (torch.arange(3), -1), {}),
    "smoothed classes have weights": (
        "cross_entropy_loss",
        (torch.linspace(-2, 2, 12).reshape(3, 4), torch.tensor([3, -100, 1]), torch.tensor([0.5, 2.0, 1.0, 3.0]), 1, -100, 0.25),
        {},
    ),
    "numbers in the order of a sorter": (
        "searchsorted.Tensor",
        (torch.tensor([[5.0, 1.0, 3.0], [2.0, 9.0, 4.0]]), torch.tensor([[3.0, 0.0], [5.0, 3.0]])),
        {"sorter": torch.tensor([[1, 2, 0], [0, 2, 1]])},
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_sample_of_its_own(case):
    name, args, kwargs = KEPT[case]
    name = name if "." in name else f"{name}.default"
    with torch.no_grad():
        assert check(f"aten.{name}", (args, kwargs)) is None


def test_a_sorter_that_leads_out_of_its_row_is_refused():
    x, value = torch.arange(3.0), torch.tensor([1.0])
    program = _native.Program.from_json(OneNode(torch.ops.aten.searchsorted.Tensor, (x, value), {"sorter": torch.arange(3)}).json)
    for bad in (3, -1):
        with pytest.raises(rapt.IndexRangeError, match=f"index {bad}"):
            program.run([x, value, torch.tensor([0, bad, 1])])


def exported(function, *args):
    """The bytes of a program that computes this function."""

    class Model(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    held = io.BytesIO()
    torch.export.save(torch.export.export(Model(), args), held)
    return held.getvalue()


def test_bits_come_back_through_another_dtype():
    bits = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7F800001, -0x00400001], dtype=torch.int64).to(torch.int32).expand(2, 7).contiguous()
    model = rapt.load(exported(lambda x: x.view(torch.float32).view(torch.int16).view(torch.int32), bits))
    assert torch.equal(model(bits), bits)


def test_a_tensor_seen_in_two_dtypes_is_not_written():
    def write_one_of_two(x):
        y = x + 1
        y.view(torch.int32).add_(1)
        return y

    with pytest.raises(rapt.ProgramError, match="node add_ .*sees in another dtype too: clone it before"):
        rapt.load(exported(write_one_of_two, torch.ones(3)))


def test_a_number_that_values_decide_is_refused_with_what_to_write_instead():
    with pytest.raises(rapt.UnsupportedError, match="aten.item.default .*first at item: compute with the tensor itself"):
        rapt.load(exported(lambda x, n: x * n.item(), torch.ones(3), torch.tensor(2)))


def test_repeats_that_make_another_size_are_refused():
    x, repeats = torch.arange(3.0), torch.tensor([2, 0, 1])
    model = rapt.load(exported(lambda x, n: x.repeat_interleave(n, 0, output_size=3), x, repeats))
    assert torch.equal(model(x, repeats), torch.tensor([0.0, 0.0, 2.0]))
    for bad in ([2, 0, 2], [4, -2, 1], [2**62, 2**62, 2**63 - 1]):
        with pytest.raises(rapt.RaptError, match="3 slices that the program says"):
            model(x, torch.tensor(bad))


def test_every_operator_of_the_zoo_has_samples():
    import zoo

    listed = {line.split("\t")[0] for line in zoo.OPERATORS.read_text().splitlines()[1:]}
    assert listed == set(OVERLOADS) | NOT_ON_TENSORS


def test_a_wrong_answer_is_seen():
    """The comparison itself: one element, one bit, one dtype off."""
    right = torch.tensor([1.0, 2.0, 3.0])
    off = right.clone()
    off[1] = 2.0001
    assert difference(right, right, right.double(), "bits") is None
    assert "at [1]" in difference(off, right, right.double(), "bits")
    assert "units in the last place" in difference(off, right, right.double(), "ulp")
    assert "dtype" in difference(right.double(), right, None, "ulp")
    assert "signs of zero" in difference(torch.tensor([-0.0]), torch.tensor([0.0]), None, "bits")
    nan = torch.tensor([float("nan"), 2.0, 3.0])
    assert "infinite or NaN" in difference(nan, right, right.double(), "ulp")
    assert "infinite or NaN" in difference(nan, nan.nan_to_num(float("inf")), nan.nan_to_num(float("inf")).double(), "ulp")
