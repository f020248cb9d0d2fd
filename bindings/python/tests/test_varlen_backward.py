"""Gradients of `rapt.varlen_attention`: bit for bit those of each sequence alone, near the float64 reference, in numpy, torch and DLPack, by
autograd and in compiled graphs; and what has none is refused by name."""

import numpy as np
import pytest
import rapt
from reference import assert_close
from test_dlpack import Tensor as Producer
from test_ragged import DIM, DIM_V, HEADS, KV_HEADS, KV_LENS, OPTIONS, Q_LENS, Numpy, Torch, lib, offsets, packed, rng  # noqa: F401

MORE = [*OPTIONS, {"causal": "bottom_right", "window": (16, None), "softcap": 2.0, "sinks": True}]


def call_of(lib, rng, options, q_lens=Q_LENS, kv_lens=KV_LENS):  # noqa: F811
    q, k, v = packed(lib, rng, q_lens, kv_lens)
    vectors = {name: lib.of(rng.standard_normal(HEADS, dtype=np.float32)) for name in ("sinks", "alibi_slopes") if name in options}
    options = options | vectors
    out, lse = rapt.varlen_attention(q, k, v, lib.of(offsets(q_lens)), lib.of(offsets(kv_lens)), return_lse=True, **options)
    d_o = lib.of(rng.standard_normal(tuple(out.shape), dtype=np.float32))
    return q, k, v, out, lse, d_o, options


def slices(n, q_lens=Q_LENS, kv_lens=KV_LENS):
    of_q, of_kv = offsets(q_lens), offsets(kv_lens)
    return slice(of_q[n], of_q[n + 1]), slice(of_kv[n], of_kv[n + 1])


@pytest.mark.parametrize("options", MORE, ids=lambda options: "-".join(options) or "plain")
def test_each_sequence_has_the_gradients_of_a_call_alone(lib, rng, options):  # noqa: F811
    q, k, v, out, lse, d_o, options = call_of(lib, rng, options)
    made = rapt.varlen_attention_backward(d_o, q, k, v, out, lse, lib.of(offsets(Q_LENS)), lib.of(offsets(KV_LENS)), **options)
    assert made._fields == ("dq", "dk", "dv", "d_sinks") if "sinks" in options else made._fields == ("dq", "dk", "dv")
    of_sinks = np.zeros(HEADS)
    for n in range(len(Q_LENS)):
        rows, keys = slices(n)
        one = rapt.attention_backward(d_o[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], layout="bshd", **options)
        for name, got, wanted in zip(("dq", "dk", "dv"), (made.dq[rows], made.dk[keys], made.dv[keys]), one):
            assert lib.equal(got, wanted), f"{name} of sequence {n}"
        if "sinks" in options:
            of_sinks += np.asarray(one.d_sinks.tolist())
    if "sinks" in options:
        assert np.allclose(np.asarray(made.d_sinks.tolist()), of_sinks, rtol=2e-2 if "bfloat16" in str(q.dtype) else 1e-5, atol=2e-2 if "bfloat16" in str(q.dtype) else 1e-5)


def test_strides_dlpack_and_rows_of_no_sequence(rng):  # noqa: F811
    q, k, v, out, lse, d_o, _ = call_of(Numpy(), rng, {})
    at = offsets(Q_LENS), offsets(KV_LENS)
    plain = rapt.varlen_attention_backward(d_o, q, k, v, out, lse, *at)
    strided = [np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2) for x in (d_o, q, k, v, out)]
    made = rapt.varlen_attention_backward(*strided, np.asfortranarray(lse), *at)
    assert all(a.tobytes() == np.ascontiguousarray(b).tobytes() for a, b in zip(plain, made))
    spread = rapt.varlen_attention_backward(np.broadcast_to(d_o[:, :, :1], d_o.shape), q, k, v, out, lse, *at)
    whole = rapt.varlen_attention_backward(np.ascontiguousarray(np.broadcast_to(d_o[:, :, :1], d_o.shape)), q, k, v, out, lse, *at)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(spread, whole))
    produced = rapt.varlen_attention_backward(*map(Producer, (d_o, q, k, v, out, lse, *at)))
    assert all(a.tobytes() == b.array.tobytes() for a, b in zip(plain, produced))
    wide = [np.concatenate([np.full((2, *x.shape[1:]), np.nan, np.float32), x, np.full((1, *x.shape[1:]), np.nan, np.float32)]) for x in (d_o, q, k, v, out)]
    wide_lse = np.concatenate([np.full((HEADS, 2), np.nan, np.float32), lse, np.full((HEADS, 1), np.nan, np.float32)], 1)
    made = rapt.varlen_attention_backward(*wide, wide_lse, *(x + np.int32(2) for x in at))
    for a, b in zip(plain, made):
        assert a.tobytes() == b[2:-1].tobytes() and not b[:2].any() and not b[-1:].any()


REFUSED = [
    ({"cu_seqlens_q": np.array([0, 6, 5], np.int32)}, rapt.IndexRangeError, r"cu_seqlens_q\[2\] is 5"),
    ({"cu_seqlens_kv": np.array([0, 4, 10], np.int32)}, rapt.IndexRangeError, r"cu_seqlens_kv\[2\] is 10; allowed: 9 at most"),
    ({"cu_seqlens_kv": np.array([0, 9], np.int32)}, rapt.ShapeError, "cu_seqlens_kv with 3 offsets"),
    ({"cu_seqlens_kv": np.array([0, 4, 9])}, rapt.UnsupportedDtypeError, r"cu_seqlens_kv\.astype\(numpy\.int32\)"),
    ({"d_o": np.zeros((5, HEADS, DIM_V), np.float64)}, rapt.DtypeMismatchError, "d_o"),
    ({"d_o": np.zeros((5, HEADS, DIM), np.float32)}, rapt.ShapeError, "d_o"),
    ({"lse": np.zeros((5, HEADS), np.float32)}, rapt.ShapeError, "lse"),
    ({"q": np.zeros((1, 5, HEADS, DIM), np.float32)}, rapt.ShapeError, "q has 4 dimensions"),
    ({"k": [1]}, rapt.KindError, "k is a"),
    ({"compute": "int8"}, rapt.RaptError, "int8"),
    ({"d_lse": np.zeros((HEADS, 4), np.float32)}, rapt.ShapeError, "d_lse"),
]


@pytest.mark.parametrize(("bad", "error", "says"), REFUSED, ids=lambda case: "+".join(case) if isinstance(case, dict) else "")
def test_what_cannot_be_is_refused(rng, bad, error, says):  # noqa: F811
    q, k, v, out, lse, d_o, _ = call_of(Numpy(), rng, {}, [2, 3], [4, 5])
    call = {"d_o": d_o, "q": q, "k": k, "v": v, "out": out, "lse": lse, "cu_seqlens_q": offsets([2, 3]), "cu_seqlens_kv": offsets([4, 5])}
    with pytest.raises(error, match=says):
        rapt.varlen_attention_backward(**(call | bad))
    keys = rapt.quantize(k, "int8", granularity="token")
    with pytest.raises(rapt.UnsupportedError, match="codes have no gradient"):
        rapt.varlen_attention_backward(**(call | {"k": keys}))


# --- autograd ----------------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

import rapt.torch as rt  # noqa: E402


def leaves(*tensors):
    return [x if x is None else x.detach().requires_grad_() for x in tensors]


@pytest.mark.parametrize("options", MORE, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_autograd_gives_what_the_function_gives(rng, options, dtype):  # noqa: F811
    lib = Torch(dtype)  # noqa: F811
    q, k, v, out, lse, d_o, options = call_of(lib, rng, options)
    at = lib.of(offsets(Q_LENS)), lib.of(offsets(KV_LENS))
    d_lse = torch.linspace(-1, 1, lse.numel(), dtype=lse.dtype).reshape(lse.shape)
    wanted = rapt.varlen_attention_backward(d_o, q, k, v, out, lse, *at, d_lse=d_lse, **options)
    given = leaves(q, k, v)
    options |= {"sinks": options["sinks"].detach().requires_grad_()} if "sinks" in options else {}
    rt.reset_stats()
    own, own_lse = rapt.varlen_attention(*given, *at, return_lse=True, **options)
    assert torch.equal(own, out) and torch.equal(own_lse, lse), "the same bits as without gradients"
    torch.autograd.backward([own, own_lse], [d_o, torch.where(own_lse.isfinite(), d_lse, 0)])
    assert rt.stats() == {"served": 1, "fallback": {}}
    asked = [*given, *([options["sinks"]] if "sinks" in options else [])]
    assert all(torch.equal(x.grad, y) for x, y in zip(asked, wanted, strict=True))
    # Without lse, and each subset alone.
    plain = rapt.varlen_attention_backward(d_o, q, k, v, out, lse, *at, **options | ({"sinks": options["sinks"].detach()} if "sinks" in options else {}))
    for asking in range(1, 8):
        some = [x.detach().requires_grad_(bool(asking >> n & 1)) for n, x in enumerate((q, k, v))]
        fixed = options | ({"sinks": options["sinks"].detach()} if "sinks" in options else {})
        rapt.varlen_attention(*some, *at, **fixed).backward(d_o)
        assert all(torch.equal(x.grad, y) if x.requires_grad else x.grad is None for x, y in zip(some, plain))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_are_as_near_to_the_reference_as_pytorchs(rng, dtype, is_causal):  # noqa: F811
    from test_autograd import exact, stocks

    lib = Torch(dtype)  # noqa: F811
    q_lens, kv_lens = ([33, 1, 0, 40, 7],) * 2 if is_causal else (Q_LENS, KV_LENS)
    q, k, v, out, lse, d_o, _ = call_of(lib, rng, {"causal": is_causal}, q_lens, kv_lens)
    made = rapt.varlen_attention_backward(d_o, q, k, v, out, lse, lib.of(offsets(q_lens)), lib.of(offsets(kv_lens)), causal=is_causal)
    collected = [[], [], []]  # of dq, dk and dv: what is got, the reference's, and PyTorch's by math and by flash
    for n in range(len(q_lens)):
        rows, keys = slices(n, q_lens, kv_lens)
        own = made.dq[rows], made.dk[keys], made.dv[keys]
        if rows.start == rows.stop or keys.start == keys.stop:
            assert not any(x.any() for x in own)
            continue
        heads = lambda x: x.transpose(0, 1)[None]  # noqa: E731
        d_one, *inputs = (heads(x) for x in (d_o[rows], q[rows], k[keys], v[keys]))
        options = {"is_causal": is_causal, "enable_gqa": True}
        all_of = zip(map(heads, own), exact(d_one, *inputs, **options), *stocks(inputs, d_one, **options))
        for kept, each in zip(collected, all_of):
            kept.append([x.reshape(-1, x.shape[-1]) for x in each])
    for kept in collected:
        got, wanted, *peers = (torch.cat(each) for each in zip(*kept))
        assert_close(got, wanted, dtype, peers)


def test_autograd_keeps_no_more_than_its_inputs_out_and_lse(rng):  # noqa: F811
    q, k, v, *_ = call_of(Torch(), rng, {})
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        rapt.varlen_attention(*leaves(q, k, v), torch.tensor(offsets(Q_LENS)), torch.tensor(offsets(KV_LENS)))
    assert sorted(x.numel() for x in kept) == sorted(n for n in (q.numel(), k.numel(), v.numel(), len(Q_LENS) + 1, len(KV_LENS) + 1, sum(Q_LENS) * HEADS * DIM_V, sum(Q_LENS) * HEADS))


def test_gradcheck(rng):  # noqa: F811
    at = torch.tensor(offsets([2, 0, 3])), torch.tensor(offsets([3, 2, 1]))
    q, k, v = (torch.tensor(rng.standard_normal((n, heads, 3)), requires_grad=True) for n, heads in ((6, 2), (6, 1), (6, 1)))
    sinks = torch.tensor(rng.standard_normal(2), requires_grad=True)

    def call(q, k, v, sinks):
        out, lse = rapt.varlen_attention(q, k, v, *at, sinks=sinks, causal="bottom_right", softcap=2.0, return_lse=True)
        return out, torch.where(lse.isfinite(), lse, 0)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


def test_a_compiled_training_step(rng):  # noqa: F811
    torch._dynamo.reset()
    q, k, v, *_ = call_of(Torch(), rng, {})
    at = torch.tensor(offsets(Q_LENS)), torch.tensor(offsets(KV_LENS))

    def step(q, k, v):
        out, lse = rapt.varlen_attention(q * 2.0, k, v, *at, causal=True, window=(20, None), return_lse=True)
        return out.sin().sum() + torch.where(lse.isfinite(), lse, 0).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    plain, traced = leaves(q, k, v), leaves(q, k, v)
    step(*plain).backward()
    rt.reset_stats()
    compiled(*traced).backward()
    assert rt.stats() == {"served": 1, "fallback": {}}
    for a, b in zip(plain, traced):
        torch.testing.assert_close(a.grad, b.grad)
    torch._dynamo.reset()


def test_the_ops(rng):  # noqa: F811
    q, k, v, out, lse, d_o, _ = call_of(Torch(), rng, {}, [2, 3], [4, 5])
    at = torch.tensor(offsets([2, 3])), torch.tensor(offsets([4, 5]))
    sinks = torch.zeros(HEADS)
    ops = torch.ops.rapt
    for op in (ops.varlen_attention.default, ops.varlen_attention_lse.default):
        torch.library.opcheck(op, (q, k, v, *at), {"causal": "top_left", "sinks": sinks, "window_left": 2})
        torch.library.opcheck(op, (*leaves(q, k, v), *at), {"causal": "top_left"}, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    torch.library.opcheck(ops.varlen_attention_backward.default, (d_o, None, q, k, v, out, lse, *at, [True, False, True, False]))
    made = ops.varlen_attention_backward(d_o, None, q, k, v, out, lse, *at, [True, False, True, False])
    wanted = rapt.varlen_attention_backward(d_o, q, k, v, out, lse, *at)
    assert torch.equal(made[0], wanted.dq) and torch.equal(made[1], wanted.dv)


def test_dropout_is_that_of_each_batch_entry(rng):  # noqa: F811
    from rapt.torch import _varlen

    q, k, v, *_ = call_of(Torch(), rng, {}, [5, 3], [5, 3])
    at, draw = torch.tensor(offsets([5, 3])), torch.tensor([7, 9])
    out = _varlen.attention(q, k, v, at, at, dropout_p=0.5, dropout_draw=draw)
    pad = lambda x: torch.stack([x[:5], torch.nn.functional.pad(x[5:], (0, 0, 0, 0, 0, 2))]).transpose(1, 2)  # noqa: E731
    mask = torch.arange(5) < torch.tensor([5, 3])[:, None]
    padded = torch.ops.rapt.scaled_dot_product_attention(*map(pad, (q, k, v)), mask[:, None, None], enable_gqa=True, dropout_p=0.5, dropout_draw=draw)
    torch.testing.assert_close(out[:5], padded[0].transpose(0, 1))
    torch.testing.assert_close(out[5:], padded[1, :, :3].transpose(0, 1))
    asking, whole = leaves(q, k, v), leaves(*map(pad, (q, k, v)))
    d_o = torch.randn_like(out)
    _varlen.attention(*asking, at, at, dropout_p=0.5, dropout_draw=draw).backward(d_o)
    op = torch.ops.rapt.scaled_dot_product_attention
    op(*whole, mask[:, None, None], enable_gqa=True, dropout_p=0.5, dropout_draw=draw).backward(pad(d_o))
    for own, padded in zip(asking, whole):
        torch.testing.assert_close(own.grad[:5], padded.grad[0].transpose(0, 1))
        torch.testing.assert_close(own.grad[5:], padded.grad[1, :, :3].transpose(0, 1))
    torch.manual_seed(1)
    first = _varlen.attention(q, k, v, at, at, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, _varlen.attention(q, k, v, at, at, dropout_p=0.5)) and not torch.equal(first, out)
    with pytest.raises(rapt.OptionError, match="dropout_draw"):
        torch.ops.rapt.varlen_attention(q, k, v, at, at, dropout_p=0.5)


def test_what_has_no_gradient_is_refused_by_name(rng):  # noqa: F811
    q, k, v, *_ = call_of(Torch(), rng, {}, [2, 3], [4, 5])
    at = torch.tensor(offsets([2, 3])), torch.tensor(offsets([4, 5]))
    (asks,) = leaves(q)
    for says, options in (
        ("out with inputs that require grad", {"out": torch.empty(5, HEADS, DIM_V)}),
        ("alibi_slopes requires grad", {"alibi_slopes": torch.zeros(HEADS, requires_grad=True)}),
        ("approximation", {"compute": "int8"}),
        ("codes", {"k_descale": torch.ones(9, KV_HEADS)}),
    ):
        with pytest.raises(rapt.UnsupportedError, match=says):
            rapt.varlen_attention(asks, k, v, *at, **options)
    (dq,) = torch.autograd.grad(rapt.varlen_attention(asks, k, v, *at).sum(), asks, create_graph=True)
    with pytest.raises(rapt.UnsupportedError, match="MATH"):
        dq.sum().backward()
    with pytest.raises(rapt.UnsupportedError, match="requires grad"):
        rapt.varlen_attention_backward(asks, q, k, v, asks, asks, *at)
