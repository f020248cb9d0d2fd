"""What is pure in demo/kv.py: its measures, on numbers whose answer is known, and its plot."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")
DEMO = Path(__file__).resolve().parents[3] / "demo"


@pytest.fixture
def kv(monkeypatch):
    monkeypatch.syspath_prepend(str(DEMO))
    import kv

    yield kv
    for name in ("kv", "kv_chart", "language_model"):
        sys.modules.pop(name, None)


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
            assert kv.relative_l2(steps, truth) <= kv.LIMITS.get(name, 0.01), name
            assert kv.relative_l2(kv.forced(model, tokens, options, keys), steps) <= 1e-2, name
            assert cache.calls == 64 * kv.llama.LAYERS
        sizes = {name: kv.bytes_per_token(options, keys) for name, options in kv.CACHES.items()}
    # 4 layers of 2 tensors of 2 heads of 64: codes, and scales for a head, 32 or 16 elements.
    assert sizes["bf16"] == 2048 and sizes["int8 token"] == 1024 + 64 and sizes["nvfp4"] == 512 + 64


def test_the_plot_is_svg_with_a_point_for_each_cache_and_panel(kv):
    from kv_chart import draw

    rows = {"bf16": {"bytes": 2048, "attention": 900.0, "error": 0.0}, "nvfp4": {"bytes": 576, "attention": 950.0, "error": 0.02}}
    titles = ElementTree.fromstring(draw(rows)).iter("{http://www.w3.org/2000/svg}title")
    assert [title.text for title in titles] == ["bf16", "nvfp4"] * 2
