"""Three caches of a small random Llama of transformers: static, quantized by transformers, and int8 codes in Rapt's pages.

    python examples/transformers/caches.py

Needs torch and transformers. Nothing is downloaded: the model is built from its configuration.
"""

import rapt
import rapt.torch
import torch
import transformers
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NEW, PAGE = 12, 16


class Int8Layer(DynamicLayer):
    """One layer's keys and values as int8 codes in a `rapt.KVCache`, with a scale for each key and head."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def lazy_initialization(self, key_states, value_states):
        batch, heads, _, head_dim = key_states.shape
        pages = batch * -(-self.most // PAGE)
        self.cache = rapt.KVCache(pages, PAGE, heads, head_dim, dtype="float32", format="int8")
        self.ids = [self.cache.new_sequence() for _ in range(batch)]
        self.is_initialized = True

    def update(self, key_states, value_states, *_args, **_kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cache.append(self.ids, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return key_states, value_states     # the new ones; `attend` reads the others where they lie

    def get_seq_length(self):
        return self.cache.length(self.ids[0]) if self.is_initialized else 0


def int8_cache(config, most):
    """A cache of such layers for `most` tokens, and entered as "rapt-int8" the attention function that reads it. Prompts are of
    one length, without padding."""
    cache = transformers.Cache(layers=[Int8Layer(most) for _ in range(config.num_hidden_layers)])

    def attend(module, query, key, value, attention_mask, scaling=None, **_kwargs):
        layer = cache.layers[module.layer_idx]
        return layer.cache.attention(query.transpose(1, 2), layer.ids, causal=True, scale=scaling), None

    transformers.AttentionInterface.register("rapt-int8", attend)
    AttentionMaskInterface.register("rapt-int8", sdpa_mask)
    return cache


def small_llama():
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def generate(model, prompt, implementation, cache):
    """(tokens, logits of each step, what Rapt served of it) with this attention and this cache."""
    model.set_attn_implementation(implementation)
    rapt.torch.reset_stats()
    with torch.inference_mode():
        written = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=NEW, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return written.sequences, torch.stack(written.logits), rapt.torch.stats()


def replay(model, tokens, implementation, cache):
    """(logits of each step, what Rapt served of it) where these tokens are given one after another."""
    model.set_attn_implementation(implementation)
    rapt.torch.reset_stats()
    steps = [tokens[:, :-NEW], *tokens[:, -NEW:-1].split(1, dim=1)]
    with torch.inference_mode():
        logits = [model(step, past_key_values=cache, use_cache=True).logits[:, -1] for step in steps]
    return torch.stack(logits), rapt.torch.stats()


def main():
    transformers.logging.set_verbosity_error()
    rapt.torch.register_transformers()
    model = small_llama()
    prompt = torch.randint(3, 256, (2, 20))
    most = prompt.shape[1] + NEW
    served = {"served": NEW * model.config.num_hidden_layers, "fallback": {}}

    # Keys and values in tensors of their final size, of which a mask says how much is used.
    def static():
        return transformers.StaticCache(config=model.config, max_cache_len=most)

    eager, logits, stats = generate(model, prompt, "eager", static())
    assert stats == {"served": 0, "fallback": {}}, stats
    ours, _, stats = generate(model, prompt, "rapt", static())
    assert torch.equal(eager, ours) and stats == served, stats
    print(f"StaticCache: the same {NEW} tokens for {len(prompt)} prompts; {stats}")

    # float8_e4m3fn and one scale for all, of which transformers makes float32 again before each call.
    if hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        def fp8():
            return transformers.QuantizedCache(backend="fp8", config=model.config)

        eager_fp8, _, _ = generate(model, prompt, "eager", fp8())
        ours, _, stats = generate(model, prompt, "rapt", fp8())
        assert torch.equal(eager_fp8, ours) and stats == served, stats
        print(f"QuantizedCache (fp8): the same tokens; {stats}")

    # int8 codes that Rapt multiplies as it loads them. What is rounded may change a token: so the logits of the same tokens are compared.
    cache = int8_cache(model.config, most)
    rounded, stats = replay(model, eager, "rapt-int8", cache)
    error = ((rounded - logits).norm(dim=-1) / logits.norm(dim=-1)).max()
    assert stats == served and cache.get_seq_length() == most - 1, stats
    assert error < 0.02, error
    print(f"rapt.KVCache (int8): logits within {error:.1%} of those of float32; {stats}")


if __name__ == "__main__":
    main()
