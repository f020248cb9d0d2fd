"""`rapt.diagnose`: each corruption that the issue lists, made by hand here, is named; what fits nothing is "unknown"."""

import pytest
import rapt

np = pytest.importorskip("numpy")
import reference as reference_module  # noqa: E402


def softmax(s):
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


class Inputs:
    """q, k, v of [2, 4, 16, 8] (or as asked) and the right output."""

    def __init__(self, batch=2, heads=4, kv_heads=None, q_len=16, kv_len=16, head_dim=8, dtype=np.float32, seed=3):
        rng = np.random.default_rng(seed)
        self.q = rng.standard_normal((batch, heads, q_len, head_dim)).astype(dtype)
        self.k, self.v = (rng.standard_normal((batch, kv_heads or heads, kv_len, head_dim)).astype(dtype) for _ in range(2))
        self.mask = rng.random((batch, heads, q_len, kv_len)) < 0.6
        self.mask[..., 0] = True

    def reference(self, **options):
        q, k, v = (options.pop(name, getattr(self, name)) for name in "qkv")
        return reference_module.reference(q, k, v, **options)[0].astype(self.q.dtype)

    def name(self, out, expected=None, **options):
        return rapt.diagnose(out, expected, q=self.q, k=self.k, v=self.v, **options)


def test_a_right_output_is_correct():
    x = Inputs()
    diagnosis = x.name(x.reference())
    assert diagnosis.name == "correct" and diagnosis.confidence == 1 and diagnosis.error < 1e-6 and "correct" in str(diagnosis)


def test_noise_is_unknown_and_says_where():
    x = Inputs()
    diagnosis = x.name(np.random.default_rng(9).standard_normal(x.q.shape).astype(np.float32))
    assert diagnosis.name == "unknown" and diagnosis.confidence == 0 and "elements are off" in diagnosis.pattern
    out = x.reference()
    out[1, 2, 5, 3] += 1
    diagnosis = x.name(out)
    assert diagnosis.name == "unknown" and "batches 1; heads 2; rows 5; columns 3" in diagnosis.pattern, diagnosis


def masked(x):
    return {"attn_mask": x.mask}


CORRUPTIONS = {
    "q-k-transposed": lambda x: (x.reference(q=x.k, k=x.q), {}),
    "heads-transposed": lambda x: (np.ascontiguousarray(x.reference().swapaxes(1, 2)).reshape(x.q.shape), {}),
    "only-head-0-computed": lambda x: (x.reference() * (np.arange(4) == 0)[:, None, None].astype(np.float32), {}),
    "scale-missing": lambda x: (x.reference(scale=1.0), {}),
    "scale-squared": lambda x: (x.reference(scale=1 / 8), {}),
    "mask-inverted": lambda x: (x.reference(mask=~x.mask), masked(x)),
    "mask-ignored": lambda x: (x.reference(), masked(x)),
    "mask-misbroadcast": lambda x: (x.reference(mask=x.mask[:, :1]), masked(x)),
    "one-batch-repeated": lambda x: (np.repeat(x.reference()[:1], 2, 0), {}),
    "halves-swapped": lambda x: (np.roll(x.reference(), 4, 3), {}),
    "causal-ignored": lambda x: (x.reference(), {"is_causal": True}),
    "softcap-ignored": lambda x: (x.reference(), {"softcap": 0.7}),
    "window-off-by-one": lambda x: (x.reference(window=(3, 2)), {"window": (2, 2)}),
    "scores-lost": lambda x: (np.broadcast_to(x.v.mean(2, keepdims=True), x.v.shape), {}),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_named(name):
    x = Inputs()
    out, options = CORRUPTIONS[name](x)
    diagnosis = x.name(out, **options)
    assert diagnosis.name == name, diagnosis
    assert diagnosis.confidence > 0.8 and diagnosis.pattern and diagnosis.as_dict()["name"] == name


def test_unnormalised():
    x = Inputs()
    s = x.q @ x.k.swapaxes(2, 3) * 8**-0.5
    diagnosis = x.name(np.exp(s - s.max(-1, keepdims=True)) @ x.v)
    assert diagnosis.name == "unnormalised" and diagnosis.variant == "Σ exp(s − max)·v"


def test_alignment_swapped():
    x = Inputs(q_len=8, kv_len=24)
    diagnosis = x.name(x.reference(causal="bottom_right"), is_causal=True)
    assert diagnosis.name == "alignment-swapped" and "16 keys more" in diagnosis.pattern, diagnosis
    diagnosis = x.name(x.reference(causal="top_left"), causal="bottom_right")
    assert diagnosis.name == "alignment-swapped" and "16 keys fewer" in diagnosis.pattern, diagnosis


def test_wrong_gqa_group():
    x = Inputs(heads=6, kv_heads=2)
    index = np.arange(6) % 2
    diagnosis = x.name(x.reference(k=x.k[:, index], v=x.v[:, index]), enable_gqa=True)
    assert diagnosis.name == "wrong-gqa-group" and "mod" in diagnosis.variant


def test_stale_tail():
    x = Inputs(q_len=41)
    out = x.reference()
    out[:, :, 32:] = np.random.default_rng(1).standard_normal(out[:, :, 32:].shape)
    diagnosis = x.name(out)
    assert diagnosis.name == "stale-tail" and "32–40" in diagnosis.pattern, diagnosis


def test_a_tail_of_keys_dropped_or_padded():
    x = Inputs(kv_len=37)
    assert x.name(x.reference(k=x.k[:, :, :32], v=x.v[:, :, :32])).name == "tail-dropped"
    more = ((0, 0), (0, 0), (0, 27), (0, 0))
    assert x.name(x.reference(k=np.pad(x.k, more), v=np.pad(x.v, more))).name == "tail-padded"


@pytest.mark.parametrize("some", ["qkv", "k", "v"])
def test_contiguous_offsets_on_a_strided_view(some):
    x, read = Inputs(q_len=12, kv_len=12), {}
    for name in some:
        buffer = np.ascontiguousarray(getattr(x, name).swapaxes(1, 2))
        setattr(x, name, buffer.swapaxes(1, 2))
        read[name] = buffer.reshape(getattr(x, name).shape)
    diagnosis = x.name(x.reference(**read))
    assert diagnosis.name == "contiguous-offsets-on-strided-view", diagnosis
    assert diagnosis.variant == " and ".join(some) and "ignored" in diagnosis.pattern


def test_contiguous_offsets_of_a_torch_view():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 10, 4, 8).transpose(1, 2) for _ in range(3))
    wrong = [x.transpose(1, 2).reshape(2, 4, 10, 8) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*wrong)
    diagnosis = rapt.diagnose(out, q=q, k=k, v=v)
    assert diagnosis.name == "contiguous-offsets-on-strided-view", diagnosis


@pytest.mark.parametrize("form", ["rows", "output"])
def test_16_bit_read_as_32_bit(form):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = Inputs(q_len=16, kv_len=24, head_dim=16, dtype=ml_dtypes.bfloat16)
    if form == "output":
        single = reference_module.reference(x.q, x.k, x.v)[0].astype(np.float32)
        out = single.reshape(-1).view(np.uint16)[: x.q.size].view(ml_dtypes.bfloat16).reshape(x.q.shape)
    else:
        with np.errstate(all="ignore"):
            wide = [np.ascontiguousarray(t).view(np.float32) for t in (x.q, x.k, x.v)]
            single = reference_module.reference(*wide, scale=16**-0.5)[0].astype(np.float32)
        out = np.ascontiguousarray(single).view(np.uint16).view(ml_dtypes.bfloat16).reshape(x.q.shape)
    diagnosis = x.name(out)
    assert diagnosis.name == "16-bit-read-as-32-bit" and "odd" in diagnosis.pattern, diagnosis


def test_float64_computed_in_float32():
    x = Inputs(dtype=np.float64)
    diagnosis = x.name(x.reference().astype(np.float32).astype(np.float64))
    assert diagnosis.name == "hidden-cast", diagnosis


def test_expected_takes_the_place_of_reference():
    x = Inputs()
    diagnosis = x.name(x.reference(scale=1.0), x.reference(scale=1.0))
    assert diagnosis.name == "correct"


def test_shapes_layouts_and_options():
    x = Inputs()
    two = [t[0, 0] for t in (x.q, x.k, x.v)]
    out = reference_module.reference(*(t[None, None] for t in two), scale=1.0)[0][0, 0]
    assert rapt.diagnose(out, q=two[0], k=two[1], v=two[2]).name == "scale-missing"
    turned = [np.ascontiguousarray(t.swapaxes(1, 2)) for t in (x.q, x.k, x.v)]
    diagnosis = rapt.diagnose(x.reference(scale=1.0).swapaxes(1, 2), q=turned[0], k=turned[1], v=turned[2], layout="bshd")
    assert diagnosis.name == "scale-missing"
    assert x.name(x.reference()[:, :2]).name == "wrong-shape"
    with pytest.raises(TypeError, match="maks"):
        x.name(x.reference(), maks=x.mask)
    with pytest.raises(ValueError, match="diagnose a part"):
        large = np.broadcast_to(np.float32(0), (1, 24, 4096, 8))
        rapt.diagnose(large, q=large, k=large, v=large)
