"""A small byte-level language model of Llama's shape, trained here and now on the text of this repository.

    x = embedding[byte];  for each layer: x += attention(norm(x));  x += down(silu(gate(norm(x))) · up(norm(x)));  logits = norm(x) @ embedding.T

RMS norms, rotary positions, grouped query heads, a gated MLP, a shared embedding: the parts of Llama, at a size that two cores train in
a minute and a half. A token is a byte. `Model.forward` leaves attention to its caller, who has the cache.
"""

import math
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = ROOT / "docs/guides/decode.md"
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 256, 704, 8, 2, 64, 256
ROPE_BASE, MOST_POSITIONS = 100_000.0, 8192
# (steps, sequences, length): most of the training sees short sequences, which cost less; the last part all positions of the run.
STAGES = ((320, 4, 256), (8, 1, 4608))
PEAK_RATE, WARM_UP, SEED = 3e-3, 30, 7


class Layer(nn.Module):
    """One layer's weights."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN, 1e-5), nn.RMSNorm(HIDDEN, 1e-5)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.project = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * MLP, bias=False)
        self.down = nn.Linear(MLP, HIDDEN, bias=False)


class Model(nn.Module):
    """`forward(bytes [batch, len], first position, attend)` gives logits [batch, len, 256]; `attend(layer, q, k, v)` takes
    [batch, len, heads, head_dim], with the new keys and values alone."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, 1e-5)
        angle = torch.outer(torch.arange(MOST_POSITIONS).double(), ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM))
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, -1).float()[:, None], persistent=False)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], -1).float()[:, None], persistent=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, first, attend):
        x = self.embedding(tokens)
        where = slice(first, first + tokens.shape[1])
        cos, sin = self.cos[where], self.sin[where]
        for number, layer in enumerate(self.layers):
            heads = layer.qkv(layer.attention_norm(x)).unflatten(-1, (-1, HEAD_DIM))
            turning, v = heads[..., :-KV_HEADS, :], heads[..., -KV_HEADS:, :]
            turned = turning * cos + turning.roll(HEAD_DIM // 2, -1) * sin
            out = attend(number, turned[..., :HEADS, :], turned[..., HEADS:, :], v)
            x = x + layer.project(out.flatten(-2))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        return functional.linear(self.norm(x), self.embedding.weight)


def full_attention(_layer, q, k, v):
    """PyTorch's causal attention of whole sequences, which has gradients."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def texts():
    """(training bytes, held-out bytes): docs and demo/text, of which one page is held out."""
    files = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "demo/text").glob("*.txt")])
    training = b"\n".join(file.read_bytes() for file in files if file != HELD_OUT)
    return as_tokens(training), as_tokens(HELD_OUT.read_bytes())


def as_tokens(text):
    return torch.tensor(list(text))


def rate(step, steps):
    """The learning rate: up in WARM_UP steps, down to a twentieth of its peak along a cosine."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    return PEAK_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def trained(text, progress, seed=SEED, stages=STAGES):
    """(the model, the seconds that its training took)."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    plan = [stage[1:] for stage in stages for _ in range(stage[0])]
    start = time.perf_counter()
    for step, (sequences, length) in enumerate(plan):
        begins = torch.randint(len(text) - length - 1, (sequences,)).tolist()
        batch = torch.stack([text[at : at + length + 1] for at in begins])
        for group in optimizer.param_groups:
            group["lr"] = rate(step, len(plan))
        loss = functional.cross_entropy(model(batch[:, :-1], 0, full_attention).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, len(plan), loss.item())
    return model.eval().requires_grad_(False), time.perf_counter() - start
