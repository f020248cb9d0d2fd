"""Models of images: ViT, CLIP's and SigLIP's vision models, ResNet, DiT, a UNet block."""

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from zoo import Case, register

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def images(generator, batch, size=16, channels=3):
    return (torch.randn(batch, channels, size, size, generator=generator),), {}


BATCH = {"exported": {"batch": 2}, "others": ({"batch": 3}, {"batch": 5}), "dynamic": lambda dim: ({0: dim("batch")},)}

register(Case("vit", lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL)), images, **BATCH))
register(
    Case("clip_vision", lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL)), images, **BATCH)
)
register(
    Case("siglip_vision", lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL)), images, **BATCH)
)


class Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet-18's parts: a stem with pooling, two stages, the mean, a classifier."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.mean, self.head = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, 5)

    def forward(self, x):
        x = self.stages(self.pool(self.relu(self.bn(self.conv(x)))))
        return self.head(torch.flatten(self.mean(x), 1))


def resnet_inputs(generator, batch, size):
    return images(generator, batch, size)


register(
    Case(
        "resnet",
        ResNet,
        resnet_inputs,
        {"batch": 2, "size": 32},
        ({"batch": 3, "size": 32}, {"batch": 2, "size": 33}),
        lambda dim: ({0: dim("batch"), 2: dim("height"), 3: dim("width")},),
    )
)


class DiTBlock(nn.Module):
    """Attention and MLP whose scales and shifts come from the conditioning."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x, c):
        s1, b1, g1, s2, b2, g2 = self.modulation(F.silu(c)).chunk(6, dim=-1)
        h = self.norm1(x) * (1 + s1[:, None]) + b1[:, None]
        batch, length, width = h.shape
        q, k, v = self.qkv(h).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + g1[:, None] * self.out(h)
        h = self.norm2(x) * (1 + s2[:, None]) + b2[:, None]
        return x + g2[:, None] * self.down(F.gelu(self.up(h), approximate="tanh"))


class DiT(nn.Module):
    """A latent and a time in, noise out."""

    def __init__(self, width=32, patch=2, channels=4, side=8):
        super().__init__()
        self.patch, self.channels = patch, channels
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        self.register_buffer("frequencies", torch.exp(-torch.arange(width // 2) / (width // 2) * 6.0))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([DiTBlock(width, 4) for _ in range(2)])
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, patch * patch * channels)

    def forward(self, x, t):
        batch, _, height, width = x.shape
        h, w = height // self.patch, width // self.patch
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        angles = t[:, None].float() * self.frequencies[None] * torch.exp(-t[:, None].float() / 1000)
        c = self.time(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1))
        for block in self.blocks:
            x = block(x, c)
        x = self.out(self.norm(x)).reshape(batch, h, w, self.patch, self.patch, self.channels)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(batch, self.channels, height, width)


def dit_inputs(generator, batch):
    return (torch.randn(batch, 4, 8, 8, generator=generator), torch.randint(0, 1000, (batch,), generator=generator)), {}


register(
    Case(
        "dit", DiT, dit_inputs, {"batch": 2}, ({"batch": 3},), lambda dim: ({0: dim("batch")}, {0: dim("batch")})
    )
)


class UNetBlock(nn.Module):
    """Group norms, convolutions, attention, down and up again by three ways."""

    def __init__(self, channels=8):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(16, channels)
        self.to_qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up = nn.ConvTranspose2d(channels, channels, 4, 2, 1)
        self.last = nn.Conv2d(3 * channels, 3, 3, padding=1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        h = x + self.conv2(F.silu(self.norm2(h)))
        low = F.avg_pool2d(h, 2)
        batch, channels, height, width = low.shape
        rows = low.permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        q, k, v = (part.unsqueeze(1) for part in self.to_qkv(rows).chunk(3, dim=-1))
        rows = rows + self.proj(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        low = rows.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        ways = [
            self.up(low),
            F.interpolate(low, scale_factor=2.0, mode="nearest"),
            F.interpolate(low, scale_factor=2.0, mode="bilinear", align_corners=False),
        ]
        return self.last(torch.cat(ways, dim=1))


def unet_inputs(generator, batch):
    return (torch.randn(batch, 8, 8, 8, generator=generator), torch.randn(batch, 16, generator=generator)), {}


register(
    Case(
        "unet_block",
        UNetBlock,
        unet_inputs,
        {"batch": 2},
        ({"batch": 3},),
        lambda dim: ({0: dim("batch")}, {0: dim("batch")}),
    )
)
