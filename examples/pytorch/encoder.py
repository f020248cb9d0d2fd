"""A transformer encoder of PyTorch, stock and with Rapt registered, in float32 and bfloat16.

    python examples/pytorch/encoder.py

Needs torch. Prints what Rapt served and how far both results lie from float64.
"""

import torch
import rapt.torch


def relative(result, truth):
    return float((result.double() - truth).norm() / truth.norm())


def main():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(d_model=128, nhead=8, dim_feedforward=256, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False).eval()
    x = torch.randn(3, 50, 128)
    padding = torch.arange(50) >= torch.tensor([50, 33, 7])[:, None]

    with torch.inference_mode():
        truth = model.double()(x.double(), src_key_padding_mask=padding)[~padding]
        for dtype in (torch.float32, torch.bfloat16):
            inputs = x.to(dtype)
            model.to(dtype)
            stock = model(inputs, src_key_padding_mask=padding)[~padding]
            rapt.torch.reset_stats()
            with rapt.torch.backend():
                ours = model(inputs, src_key_padding_mask=padding)[~padding]
            stats = rapt.torch.stats()
            print(f"{dtype}: {stats}, error stock {relative(stock, truth):.1e}, rapt {relative(ours, truth):.1e}")
            assert stats == {"served": 4, "fallback": {}}, stats
            assert relative(ours, truth) < 1.5 * relative(stock, truth) + 1e-6
            # Stock weights back for the next dtype: rounding to bfloat16 is not undone.
            model.double()


if __name__ == "__main__":
    main()
