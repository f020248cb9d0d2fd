"""The models themselves, in plain torch with random weights from a seed: an encoder of MiniLM's form and a decoder of Llama's.

The decoder takes its cache as arguments, keys and values of each layer in turn, [1, heads, cache, head_dim]. It writes them in
place, or, where `in_place` is off (ONNX), gives new ones back. `Kept` holds them in buffers instead, as an archive for a session does.
"""

import torch
from torch import nn
from torch.nn import functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
START = 8  # the first position that a decoding step is timed at; those before it are filled


class EncoderLayer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads = s.heads
        self.q, self.k, self.v, self.out = (nn.Linear(s.width, s.width) for _ in range(4))
        self.up, self.down = nn.Linear(s.width, s.inner), nn.Linear(s.inner, s.width)
        self.norm1, self.norm2 = nn.LayerNorm(s.width, eps=1e-12), nn.LayerNorm(s.width, eps=1e-12)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = (part(x).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(batch, length, width)
        x = self.norm1(x + self.out(h))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Tokens and a padding mask in, one vector of length 1 for each text out."""

    def __init__(self, s):
        super().__init__()
        self.embed, self.position = nn.Embedding(s.vocabulary, s.width), nn.Embedding(512, s.width)
        self.norm = nn.LayerNorm(s.width, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(s) for _ in range(s.layers))

    def forward(self, ids, mask):
        x = self.norm(self.embed(ids) + self.position(torch.arange(ids.shape[1])))
        seen = mask[:, None, None, :].bool().expand(-1, 1, ids.shape[1], -1)
        for layer in self.layers:
            x = layer(x, seen)
        weights = mask[..., None].to(x.dtype)
        return F.normalize((x * weights).sum(1) / weights.sum(1), dim=1)


class DecoderLayer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads = s.heads
        self.q, self.k, self.v, self.out = (nn.Linear(s.width, s.width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(s.width, s.inner, bias=False), nn.Linear(s.width, s.inner, bias=False)
        self.down = nn.Linear(s.inner, s.width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(s.width, eps=1e-5), nn.RMSNorm(s.width, eps=1e-5)

    def forward(self, x, keys, values, position, cos, sin, mask, in_place):
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (part(h).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if in_place:
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
        else:
            keys, values = keys.index_copy(2, position, k), values.index_copy(2, position, v)
        h = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(h)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), keys, values


def rotated(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Decoder(nn.Module):
    """Tokens, their positions and the cache in, the last token's logits out."""

    def __init__(self, s):
        super().__init__()
        self.in_place = True
        self.embed, self.head = nn.Embedding(s.vocabulary, s.width), nn.Linear(s.width, s.vocabulary, bias=False)
        self.norm = nn.RMSNorm(s.width, eps=1e-5)
        self.layers = nn.ModuleList(DecoderLayer(s) for _ in range(s.layers))
        half = s.width // s.heads // 2
        angles = torch.arange(s.cache)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids, position, *cache):
        x = self.embed(ids)
        mask = torch.arange(cache[0].shape[2])[None] <= position[:, None]
        cos, sin = self.cos[position], self.sin[position]
        new = []
        for layer, keys, values in zip(self.layers, cache[0::2], cache[1::2]):
            x, keys, values = layer(x, keys, values, position, cos, sin, mask, self.in_place)
            new += [keys, values]
        logits = self.head(self.norm(x[:, -1]))
        return logits if self.in_place else (logits, *new)


class Kept(nn.Module):
    """The decoder with its cache in buffers."""

    def __init__(self, decoder, cache):
        super().__init__()
        self.decoder, self.count = decoder, len(cache)
        for index, tensor in enumerate(cache):
            self.register_buffer(f"cache{index}", tensor)

    def forward(self, ids, position):
        return self.decoder(ids, position, *(getattr(self, f"cache{index}") for index in range(self.count)))


def model(row, dtype=None):
    """The model of a row; with `dtype` f64 the same numbers wider."""
    torch.manual_seed(20261122)
    built = (Encoder if row.shape.kind == "encoder" else Decoder)(row.shape).eval().requires_grad_(False).to(DTYPES[row.dtype])
    return built if dtype is None else built.to(DTYPES[dtype])


def cache(row, dtype=None):
    s = row.shape
    size = (1, s.heads, s.cache, s.width // s.heads)
    return [torch.zeros(size, dtype=DTYPES[dtype or row.dtype]) for _ in range(2 * s.layers)]


def calls(row):
    """The inputs of successive calls: one for an encoder or a prefill, one for each position of decoding."""
    generator = torch.Generator().manual_seed(1)
    s = row.shape
    if s.kind == "encoder":
        ids = torch.randint(s.vocabulary, (s.batch, s.tokens), generator=generator)
        mask = torch.ones(s.batch, s.tokens, dtype=torch.int64)
        mask[1:, s.tokens * 3 // 4 :] = 0
        return [(ids, mask)]
    if s.kind == "prefill":
        return [(torch.randint(s.vocabulary, (1, s.tokens), generator=generator), torch.arange(s.tokens))]
    return [(torch.randint(s.vocabulary, (1, 1), generator=generator), torch.tensor([n])) for n in range(s.cache)]
