"""Attention in exported programs where a number is NaN or infinite.

The definition says which rows it may reach, and PyTorch's kernels differ: every row is compared with the formula in float64,
by Rapt's kernel and by the interpreter. What core ATen makes of attention is other operators, which do as PyTorch's do.
"""

import io
import math

import numpy as np
import pytest
import rapt
from rapt import _native, _reference

torch = pytest.importorskip("torch", minversion="2.9")

from one_node import OneNode  # noqa: E402
from pt2_compare import within_rule  # noqa: E402
from reference import to_torch  # noqa: E402
from torch.nn import functional  # noqa: E402

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Queries, keys and values: few keys, values of another size, more keys than one tile has, and one query.
SHAPES = {
    "few": ((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    "another head_dim_v": ((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 6)),
    "many": ((1, 1, 40, 16), (1, 1, 150, 16), (1, 1, 150, 16)),
    "decode": ((1, 2, 1, 8), (1, 2, 33, 8), (1, 2, 33, 8)),
}
MASKS = ("none", "causal", "bool", "float", "lowest")


def make(dtype, *shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mask_of(kind, dtype, rows, keys):
    """A mask under which the first of several rows sees nothing; `lowest` has the dtype's least number where others mask."""
    if kind in ("none", "causal"):
        return None
    keep = torch.rand(rows, keys, generator=torch.Generator().manual_seed(7)) > 0.4
    keep[0] = rows == 1
    if kind == "bool":
        return keep
    unseen = torch.finfo(dtype).min if kind == "lowest" else -INF
    return torch.where(keep, make(dtype, rows, keys, seed=9), torch.tensor(unseen, dtype=dtype))


def marked(tensors):
    """The operands, and with NaN or an infinity in the first, middle or last row of one of them."""
    yield tensors
    for which, x in enumerate(tensors):
        if x is None or x.dtype == torch.bool:
            continue
        for value in (NAN, INF, -INF):
            for row in {0, x.shape[-2] // 2, x.shape[-2] - 1}:
                changed = x.clone()
                changed[..., row, x.shape[-1] // 2] = value
                yield [*tensors[:which], changed, *tensors[which + 1 :]]


def defined(q, k, v, mask, causal):
    """The definition in float64, and the same with the roundings of a flash kernel."""
    wide = [x.double().numpy() for x in (q, k, v)]
    given = None if mask is None else mask.numpy() if mask.dtype == torch.bool else mask.double().numpy()
    options = {"mask": given, "causal": True if causal else None}
    with np.errstate(all="ignore"):
        scores = _reference.scores(*wide[:2])
        keep, bias = _reference.attended(scores.shape, **options)
        scores = np.where(keep, scores if bias is None else scores + np.where(keep, bias, 0), -np.inf)
    # Scores that are all −inf, which only infinite queries and keys give, have no weights: zeros, as where nothing is attended.
    empty = (scores == -np.inf).all(-1)[..., None]
    exact = _reference.attention(*wide, **options)[0]
    rounded = _reference.flash_rounded(*wide, str(q.dtype).removeprefix("torch."), **options)
    return (torch.from_numpy(np.where(empty, 0, x)) for x in (exact, rounded))


def kinds(x):
    return x.isnan() + 2 * (x == INF) + 3 * (x == -INF)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_not_finite_reaches_the_rows_that_attend_it(shape, kind, dtype):
    q, k, v = (make(dtype, *sizes, seed=seed) for seed, sizes in enumerate(SHAPES[shape]))
    mask, causal = mask_of(kind, dtype, q.shape[-2], k.shape[-2]), kind == "causal"
    one = OneNode(aten.scaled_dot_product_attention.default, (q, k, v, mask, 0.0, causal))
    program = _native.Program.from_json(one.json)
    assert any("attention" in line for line, _ in program.explain()), program.explain()
    for operands in marked([q, k, v, mask]):
        given = [x for x in operands if x is not None]
        exact, peer = defined(*operands, causal)
        for name, out in (("kernel", program.run(given)), ("interpreter", program.reference(given, False))):
            out = to_torch(out[0])
            where = f"{name}: {[x.isfinite().logical_not().nonzero().tolist()[:1] for x in given if x.is_floating_point()]}"
            assert torch.equal(kinds(out), kinds(exact.to(dtype))), where
            finite = exact.isfinite().all(-1)
            kept, text = within_rule(out[finite], exact[finite], peer[finite])
            assert kept, f"{where}: {text}"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_the_sum_of_a_row_that_sees_nothing_is_the_logarithm_of_0(dtype):
    """PyTorch's kernel says 0, which is the logarithm of 1."""
    q, k, v = (make(dtype, 1, 2, 5, 8, seed=seed) for seed in range(3))
    mask = torch.zeros(5, 5, dtype=dtype)
    mask[0], mask[1, 2], mask[2, 1], mask[3, 1] = -INF, -INF, NAN, INF
    one = OneNode(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, 0.0, False), {"attn_mask": mask})
    program = _native.Program.from_json(one.json)
    theirs = one.run()[1]
    assert bool((theirs[..., 0] == 0).all())
    for out in (program.run(one.inputs), program.reference(one.inputs, False)):
        out, lse = map(to_torch, out)
        assert bool((lse[..., 0] == -INF).all() and (out[..., 0, :] == 0).all())
        assert bool(lse[..., 2:4].isnan().all() and out[..., 2:4, :].isnan().all())
        torch.testing.assert_close(lse[..., [1, 4]], theirs[..., [1, 4]])


class Attends(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, q, k, v, mask=None):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", MASKS)
def test_what_attention_is_decomposed_into_does_as_pytorch_does(kind, dtype):
    """Each node is an operator of its own: 0 · NaN of a masked value is NaN here."""
    q, k, v = (make(dtype, 2, 2, 5, 8, seed=seed) for seed in range(3))
    mask = mask_of(kind, dtype, 5, 5)
    operands = [x for x in (q, k, v, mask) if x is not None]
    exported = torch.export.export(Attends(kind == "causal"), tuple(operands)).run_decompositions()
    assert "scaled_dot_product" not in str(exported.graph)
    held = io.BytesIO()
    torch.export.save(exported, held)
    model, module = rapt.load(held.getvalue()), exported.module()
    for given in marked(operands):
        expected = module(*given)
        for call in (model, model.reference()):
            assert torch.equal(kinds(call(*given)), kinds(expected)), call
