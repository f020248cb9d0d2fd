"""Writes the programs that the target `c_model` starts from: `python make.py`, with torch 2.15.

Of each the JSON of its graph, without traces, and the table of its weights. Together they have every kind of kernel.
"""

import io
import json
import zipfile
from pathlib import Path

import torch
from torch.nn import functional as F

DYNAMIC = torch.export.Dim.DYNAMIC


class Text(torch.nn.Module):
    """An embedding, a norm, products with what follows them, a softmax."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(16, 8), torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 20), torch.nn.Linear(20, 8)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        return (x + self.down(F.gelu(self.up(x)))).softmax(-1)


class Attend(torch.nn.Module):
    """Attention under a mask of the caller, heads split and merged."""

    def forward(self, x, mask):
        batch, length, _ = x.shape
        q = x.view(batch, length, 2, 4).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])
        return out.transpose(1, 2).reshape(batch, length, 8)


class Cache(torch.nn.Module):
    """A buffer and an input that are written by index."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 6, 4))

    def forward(self, x, position, counts):
        self.keys.index_copy_(2, position, x)
        counts.add_(1)
        return self.keys.sum(-1), self.keys[:, :, position] * 2


class Image(torch.nn.Module):
    """A convolution, a norm of its channels, pooling, a product."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 5)

    def forward(self, x):
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Numbers(torch.nn.Module):
    """Integers and float64: division, order, sums, reading and writing by index, views, casts."""

    def forward(self, n, x, index):
        order = torch.sort(n // 3, dim=0).indices
        parts = torch.cat((x[order], x.flip(0)[:1].expand(2, -1)), 0)
        chosen = torch.where(parts > 0, parts.exp(), parts * 0.5).cumsum(0)
        table = torch.zeros(7, 2, dtype=torch.int64).scatter(0, index[:, None].expand(-1, 2), 1)
        return chosen.gather(0, index[:, None].expand(-1, 2)), n.to(torch.int32) % 5, table.t().reshape(-1), n.sum() / x.shape[0]


def programs():
    long, float64 = torch.int64, torch.float64
    yield "text", Text(), (torch.zeros(2, 3, dtype=long),), ({0: DYNAMIC, 1: DYNAMIC},)
    mask = torch.ones(2, 5, dtype=torch.bool)
    yield "attend", Attend(), (torch.zeros(2, 5, 8), mask), ({0: DYNAMIC, 1: DYNAMIC}, {0: DYNAMIC, 1: DYNAMIC})
    yield "cache", Cache(), (torch.zeros(1, 2, 1, 4), torch.zeros(1, dtype=long), torch.zeros(3, dtype=torch.int32)), None
    yield "image", Image(), (torch.zeros(2, 3, 6, 7),), ({0: DYNAMIC},)
    numbers = torch.zeros(4, dtype=long), torch.zeros(4, 2, dtype=float64), torch.zeros(3, dtype=long)
    yield "numbers", Numbers(), numbers, ({0: DYNAMIC}, {0: DYNAMIC}, None)


def main():
    for name, module, args, shapes in programs():
        with torch.no_grad():
            program = torch.export.export(module.eval(), args, dynamic_shapes=shapes)
        held = io.BytesIO()
        torch.export.save(program, held)
        archive = zipfile.ZipFile(held)
        read = {entry.split("/", 1)[1]: archive.read(entry) for entry in archive.namelist()}
        written = json.loads(read["models/model.json"])
        for node in written["graph_module"]["graph"]["nodes"]:
            node["metadata"] = {}
        folder = Path(__file__).parent
        (folder / f"{name}.json").write_text(json.dumps(written, separators=(", ", ": ")) + "\n")
        (folder / f"{name}.weights.json").write_bytes(read["data/weights/model_weights_config.json"] + b"\n")


if __name__ == "__main__":
    main()
