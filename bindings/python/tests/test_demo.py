"""What is pure in demo/kv.py and demo/train.py: their measures, on numbers whose answer is known, and a plot."""

import importlib
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")
DEMO = Path(__file__).resolve().parents[3] / "demo"


@pytest.fixture
def demo(monkeypatch):
    """Imports a script of the demos."""
    monkeypatch.syspath_prepend(str(DEMO))
    yield importlib.import_module
    for name in ("kv", "kv_chart", "language_model", "train", "train_chart"):
        sys.modules.pop(name, None)


@pytest.fixture
def kv(demo):
    return demo("kv")


@pytest.fixture
def train(demo):
    return demo("train")


def test_runs_are_compared_up_to_their_first_difference(kv):
    assert kv.equal_before([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert kv.equal_before([1, 2], [1, 2]) == 2
    assert kv.equal_before([], []) == 0


def test_a_model_that_knows_nothing_needs_eight_bits_a_byte(kv):
    assert kv.bits_per_byte(torch.zeros(5, 256), torch.tensor([3, 1, 4, 1, 5])) == pytest.approx(8.0, abs=1e-12)
    assert kv.relative_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1, abs=1e-12)


def test_a_position_is_seen_by_later_ones_alone(kv):
    torch.manual_seed(0)
    model = kv.llama.Model().eval()
    with torch.inference_mode():
        one = torch.randint(256, (1, 20))
        other = one.clone()
        other[0, 12] ^= 1
        one, other = (model(tokens, 0, kv.llama.full_attention)[0] for tokens in (one, other))
    assert torch.equal(one[:12], other[:12]) and not torch.equal(one[12:], other[12:])


def test_a_cache_gives_the_logits_of_whole_attention(kv, monkeypatch):
    """In chunks and one by one; bfloat16 keys are within their rounding, codes within their limits."""
    torch.manual_seed(0)
    model = kv.llama.Model().eval()
    with torch.inference_mode():
        tokens = torch.randint(256, (64,))
        keys = kv.keys_of(model, tokens)
        monkeypatch.setattr(kv, "CHUNK", 24)
        monkeypatch.setattr(kv, "PROMPT", 64)
        truth = model(tokens[None], 0, kv.llama.full_attention)[0]
        for name, options in kv.CACHES.items():
            cache = kv.Cache(options, keys)
            steps = torch.cat([cache.logits(model, token[None]) for token in tokens])
            own = kv.relative_l2(steps, truth)
            assert own <= kv.LIMITS.get(name, 0.01), name
            # A last bit of bfloat16 in keys of the next layer: where that is another code of 4 bits, it is a part of what the codes cost.
            assert kv.relative_l2(kv.forced(model, tokens, options, keys), steps) <= max(1e-2, own / 5), name
            assert cache.calls == 64 * kv.llama.SMALL.layers
        sizes = {name: kv.bytes_per_token(options, keys) for name, options in kv.CACHES.items()}
    # 4 layers of 2 tensors of 2 heads of 64: codes, and scales for a head, 32 or 16 elements.
    assert sizes["bf16"] == 2048 and sizes["int8 token"] == 1024 + 64 and sizes["nvfp4"] == 512 + 64


def test_the_plot_is_svg_with_a_point_for_each_cache_and_panel(kv):
    from kv_chart import draw

    rows = {"bf16": {"bytes": 2048, "attention": 900.0, "error": 0.0}, "nvfp4": {"bytes": 576, "attention": 950.0, "error": 0.02}}
    titles = ElementTree.fromstring(draw(rows)).iter("{http://www.w3.org/2000/svg}title")
    assert [title.text for title in titles] == ["bf16", "nvfp4"] * 2


def test_the_nodes_of_attention_in_a_backward_are_counted(train):
    import rapt.torch

    size = train.llama.SMALL._replace(layers=3, hidden=64, mlp=64, heads=2, kv_heads=1, head_dim=32)
    model, tokens = train.llama.Model(size), torch.randint(256, (1, 9))
    with rapt.torch.backend():
        assert train.attention_nodes(model(tokens, 0, train.llama.full_attention).sum()) == {train.NODE: 3}
    found = train.attention_nodes(model(tokens, 0, train.llama.full_attention).sum())
    assert train.NODE not in found and sum(found.values()) in (0, 3)  # torch's math path has no node of its own


def test_what_was_claimed_and_does_not_hold_is_said(train):
    def run(loss, **other):
        return {"losses": [loss], "held_out": loss, "stats": {"served": 8, "fallback": {}}, "nodes": {train.NODE: 4}} | other

    stage, stock = (2, 1, 8), {("stock", seed): run(1.0 + seed / 100) for seed in train.SEEDS}  # seeds alone make 0.02
    right = stock | {("rapt", seed): run(1.01 + seed / 100) for seed in train.SEEDS}
    assert train.check(right, "cpu", stage) == []
    for wrong, said in (
        (run(1.07), "final loss"),
        (run(float("nan")), "held-out loss"),
        (run(1.01, stats={"served": 7, "fallback": {"requires grad": 1}}), "8 calls of attention were made"),
        (run(1.01, nodes={train.NODE: 3, "ScaledDotProductFlashAttentionBackward0": 1}), "its backward goes through"),
    ):
        assert any(said in failure for failure in train.check(right | {("rapt", 1): wrong}, "cpu", stage)), said
