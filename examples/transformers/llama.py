"""A small random Llama of transformers, with PyTorch's attention and with Rapt's: the same tokens are generated.

    python examples/transformers/llama.py

Needs torch and transformers. Nothing is downloaded: the model is built from its configuration.
"""

import torch
import transformers
import rapt.torch


def main():
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    rapt.torch.register_transformers()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    prompt = torch.randint(3, 256, (2, 12))
    prompt[1, :5] = 0                                    # the second prompt is shorter: padding on the left
    inputs = {"input_ids": prompt, "attention_mask": (prompt != 0).long()}

    with torch.inference_mode():
        stock = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        model.set_attn_implementation("rapt")
        rapt.torch.reset_stats()
        ours = model.generate(**inputs, max_new_tokens=16, do_sample=False)

    stats = rapt.torch.stats()
    print(f"{ours.shape[1] - prompt.shape[1]} tokens for {len(prompt)} prompts; {stats}")
    assert torch.equal(stock, ours)
    assert stats["served"] > 0 and not stats["fallback"], stats


if __name__ == "__main__":
    main()
