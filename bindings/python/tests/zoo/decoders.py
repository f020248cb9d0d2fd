"""Decoders of text: GPT-2, Llama in seven forms, Qwen3, Qwen3-MoE, Gemma 2 and 3, DeepSeek-V3."""

import torch
import transformers
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from zoo import Case, register
from zoo.encoders import TEXT, VOCABULARY, tokens, tokens_and_mask

LAYERS, KV_HEADS, HEAD_DIM, CACHE = 2, 2, 8, 16
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
}


class Logits(torch.nn.Module):
    """A language model without a cache: tokens and mask in, logits out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def decoder(name, make, **more):
    """A case without a cache, at the sizes of text."""
    return register(Case(name, lambda: Logits(make()), tokens_and_mask, **{**TEXT, **more}))


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **more))


def qwen3(**more):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, **more))


def gpt2():
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=LAYERS, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gemma2():
    config = transformers.Gemma2Config(**SHAPE, sliding_window=4, query_pre_attn_scalar=8, attn_implementation="eager")
    return transformers.Gemma2ForCausalLM(config)


def gemma3():
    config = transformers.Gemma3TextConfig(
        **SHAPE, sliding_window=4, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    )
    return transformers.Gemma3ForCausalLM(config)


def deepseek_v3():
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        v_head_dim=12,
        qk_nope_head_dim=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=64,
    )
    return transformers.DeepseekV3ForCausalLM(config)


# Its projections see a permuted result of SDPA's decomposition.
decoder("gpt2", gpt2, without={"core": "torch cannot view the decomposed attention with a dynamic batch"})
decoder("llama", llama)
decoder("llama_eager_attn", lambda: llama(attn_implementation="eager"))
decoder("llama_bf16", lambda: llama().to(torch.bfloat16))
decoder("qwen3", qwen3)
decoder("qwen3_moe", qwen3_moe)
decoder("gemma2", gemma2)
decoder("gemma3", gemma3)
decoder("deepseek_v3", deepseek_v3)


def past(generator, batch, length):
    """Keys and values of each layer in turn."""
    shape = (batch, KV_HEADS, length, HEAD_DIM)
    return [torch.randn(shape, generator=generator) for _ in range(2 * LAYERS)]


class GrowingCache(torch.nn.Module):
    """One step with a cache that is concatenated: the caller keeps it."""

    def __init__(self):
        super().__init__()
        self.model = llama()

    def forward(self, input_ids, attention_mask, past):
        pairs = list(zip(past[0::2], past[1::2], strict=True))
        cache = transformers.DynamicCache(pairs)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return {"logits": out.logits, "past": [t for layer in cache.layers for t in (layer.keys, layer.values)]}


def growing_inputs(generator, batch, length):
    mask = torch.ones(batch, length + 1, dtype=torch.int64)
    mask[-1, 0] = 0
    return (), {"input_ids": tokens(generator, batch, 1), "attention_mask": mask, "past": past(generator, batch, length)}


register(
    Case(
        "llama_dyncache_decode",
        GrowingCache,
        growing_inputs,
        {"batch": 2, "length": 6},
        ({"batch": 3, "length": 11},),
        lambda dim: {
            "input_ids": {0: dim("batch")},
            "attention_mask": {0: dim("batch"), 1: dim("length + 1")},
            "past": [{0: dim("batch"), 2: dim("length")}] * (2 * LAYERS),
        },
    )
)


def static_cache(make):
    model = make()
    model.generation_config.update(use_cache=True, cache_implementation="static")
    return TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=CACHE)


def at_position(generator, seq, position):
    return (), {"input_ids": tokens(generator, 1, seq), "cache_position": torch.arange(position, position + seq)}


NOT_FUNCTIONAL = "torch cannot functionalise a cache whose constants share their storage with buffers"
# A cache that its module keeps: each call writes it.
register(
    Case(
        "llama_static_cache",
        lambda: static_cache(llama),
        at_position,
        {"seq": 1, "position": 0},
        ({"seq": 1, "position": 1}, {"seq": 1, "position": 2}),
        without={"functional": NOT_FUNCTIONAL, "core": NOT_FUNCTIONAL},
        has_state=True,
    )
)
register(
    Case(
        "qwen3_static_cache_dynseq",
        lambda: static_cache(qwen3),
        at_position,
        {"seq": 4, "position": 0},
        ({"seq": 3, "position": 4}, {"seq": 2, "position": 7}),
        lambda dim: {"input_ids": {1: dim("seq")}, "cache_position": {0: dim("seq")}},
        without={"functional": NOT_FUNCTIONAL, "core": NOT_FUNCTIONAL},
        has_state=True,
    )
)


class CacheOfTheCaller(torch.nn.Module):
    """A cache that is an input and is written in place."""

    def __init__(self):
        super().__init__()
        self.model = llama()

    def forward(self, input_ids, position, cache):
        filled = transformers.DynamicCache()
        for index, (keys, values) in enumerate(zip(cache[0::2], cache[1::2], strict=True)):
            filled.layers.append(Slots(keys, values, position))
            filled.layers[index].is_initialized = True
        mask = (torch.arange(CACHE)[None] <= position[:, None])[None, None]
        out = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position[None],
            past_key_values=filled,
            use_cache=True,
        )
        return out.logits


class Slots(transformers.cache_utils.DynamicLayer):
    """One layer: rows at `position` are written, everything is read."""

    def __init__(self, keys, values, position):
        super().__init__()
        self.keys, self.values, self.position = keys, values, position

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.keys, self.values


def caller_inputs(generator, batch, seq, position):
    cache = past(generator, batch, CACHE)
    return (), {"input_ids": tokens(generator, batch, seq), "position": torch.arange(position, position + seq), "cache": cache}


register(
    Case(
        "llama_cache_as_input_mutated",
        CacheOfTheCaller,
        caller_inputs,
        {"batch": 2, "seq": 4, "position": 0},
        ({"batch": 3, "seq": 3, "position": 5},),
        lambda dim: {
            "input_ids": {0: dim("batch"), 1: dim("seq")},
            "position": {0: dim("seq")},
            "cache": [{0: dim("batch")}] * (2 * LAYERS),
        },
    )
)
