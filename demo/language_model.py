"""A small byte-level language model of Llama's shape, trained here and now on the text of this repository.

    x = embedding[byte];  for each layer: x += attention(norm(x));  x += down(silu(gate(norm(x))) · up(norm(x)));  logits = norm(x) @ embedding.T

RMS norms, rotary positions, grouped query heads, a gated MLP, a shared embedding: the parts of Llama, at a size that two cores train in
a minute and a half (`SMALL`), or a GPU (`LARGE`: 103 million weights). A token is a byte. `Model.forward` leaves attention to its caller,
who has the cache.
"""

import math
import time
import typing
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = ROOT / "docs/guides/decode.md"
VOCABULARY = 256
ROPE_BASE, MOST_POSITIONS = 100_000.0, 8192
# (steps, sequences, length): most of the training sees short sequences, which cost less; the last part all positions of the run.
STAGES = ((320, 4, 256), (8, 1, 4608))
WARM_UP, SEED = 30, 7


class Size(typing.NamedTuple):
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    peak_rate: float
    """The highest learning rate."""


SMALL = Size(4, 256, 704, 8, 2, 64, 3e-3)
LARGE = Size(8, 1024, 2816, 8, 8, 128, 6e-4)


class Layer(nn.Module):
    """One layer's weights."""

    def __init__(self, size):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(size.hidden, 1e-5), nn.RMSNorm(size.hidden, 1e-5)
        self.qkv = nn.Linear(size.hidden, (size.heads + 2 * size.kv_heads) * size.head_dim, bias=False)
        self.project = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)
        self.gate_up = nn.Linear(size.hidden, 2 * size.mlp, bias=False)
        self.down = nn.Linear(size.mlp, size.hidden, bias=False)


class Model(nn.Module):
    """`forward(bytes [batch, len], first position, attend)` gives logits [batch, len, 256]; `attend(layer, q, k, v)` takes
    [batch, len, heads, head_dim], with the new keys and values alone."""

    def __init__(self, size=SMALL):
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, 1e-5)
        frequencies = ROPE_BASE ** (-torch.arange(0, size.head_dim, 2).double() / size.head_dim)
        angle = torch.outer(torch.arange(MOST_POSITIONS).double(), frequencies)
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, -1).float()[:, None], persistent=False)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], -1).float()[:, None], persistent=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, first, attend):
        x, heads_of_q, dim = self.embedding(tokens), self.size.heads, self.size.head_dim
        where = slice(first, first + tokens.shape[1])
        cos, sin = self.cos[where], self.sin[where]
        for number, layer in enumerate(self.layers):
            heads = layer.qkv(layer.attention_norm(x)).unflatten(-1, (-1, dim))
            turning, v = heads[..., : -self.size.kv_heads, :], heads[..., -self.size.kv_heads :, :]
            turned = (turning * cos + turning.roll(dim // 2, -1) * sin).to(v.dtype)
            out = attend(number, turned[..., :heads_of_q, :], turned[..., heads_of_q:, :], v)
            x = x + layer.project(out.flatten(-2))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        return functional.linear(self.norm(x), self.embedding.weight)


def full_attention(_layer, q, k, v):
    """PyTorch's causal attention of whole sequences, which has gradients."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def texts():
    """(training bytes, held-out bytes): docs and demo/text, of which one page is held out."""
    files = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "demo/text").glob("*.txt")])
    training = b"\n".join(file.read_bytes() for file in files if file != HELD_OUT)
    return as_tokens(training), as_tokens(HELD_OUT.read_bytes())


def as_tokens(text):
    return torch.tensor(list(text))


def rate(step, steps, peak):
    """The learning rate: up in WARM_UP steps, down to a twentieth of its peak along a cosine."""
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def computing(device):
    """The context that forward passes run in: on a GPU products are bfloat16's."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def trained(text, progress, seed=SEED, stages=STAGES, size=SMALL):
    """(the model, the seconds that its training took), where the text lies; `progress(step, steps, loss)` hears of each step."""
    torch.manual_seed(seed)
    model, device = Model(size).to(text.device), text.device.type
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    plan = [stage[1:] for stage in stages for _ in range(stage[0])]
    start = time.perf_counter()
    for step, (sequences, length) in enumerate(plan):
        begins = torch.randint(len(text) - length - 1, (sequences,)).tolist()
        batch = torch.stack([text[at : at + length + 1] for at in begins])
        for group in optimizer.param_groups:
            group["lr"] = rate(step, len(plan), size.peak_rate)
        with computing(device):
            loss = functional.cross_entropy(model(batch[:, :-1], 0, full_attention).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, len(plan), loss)
    return model.eval().requires_grad_(False), time.perf_counter() - start
