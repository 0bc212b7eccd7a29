"""Networks as people write them: what their forward does is no row of children."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block; with `squeeze` it weighs its channels."""

    def __init__(self, inputs, outputs, stride=1, squeeze=False):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.squeeze = nn.Linear(outputs, 2) if squeeze else None
        self.excite = nn.Linear(2, outputs) if squeeze else None
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.squeeze is not None:
            weights = self.excite(F.relu(self.squeeze(out.mean((2, 3))))).sigmoid()
            out = out * weights[:, :, None, None]
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """Images [B, 1, 8, 8] -> scores [B, 10], with layer1 to layer4 and functions in its forward."""

    def __init__(self, width=4, squeeze=False, drop=0.2):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1, squeeze), Block(width, width, 1, squeeze))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width))
        self.layer3 = nn.Sequential(Block(2 * width, 2 * width, 1))
        self.layer4 = nn.Sequential(Block(2 * width, 2 * width, 1))
        self.fc, self.drop = nn.Linear(2 * width * 4, 10), drop

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer1(out)
        out = self.layer4(self.layer3(self.layer2(out)))
        out = F.avg_pool2d(out, 2)
        out = out.view(out.size(0), -1)
        return self.fc(F.dropout(out, self.drop, self.training))


class UNet(nn.Module):
    """Images [B, 1, 8, 8] -> scores of pixels [B, 3, 8, 8], or their mean: skip connections from end to end."""

    def __init__(self, width=2, pixels=True):
        super().__init__()
        self.pixels = pixels
        self.stem = self._double(1, width)
        self.down1 = self._double(width, width)
        self.down2 = self._double(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join = self._double(2 * width, width)
        self.refine = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _double(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 1),
        )

    def forward(self, x):
        first = self.down1(F.relu(self.stem(x)))
        below = self.down2(F.max_pool2d(first, 2))
        up = self.up(below)
        up = F.pad(up, [0, first.size(3) - up.size(3), 0, first.size(2) - up.size(2)])
        joined = F.relu(self.join(torch.cat([first, up], dim=1)))
        scores = self.out(F.relu(self.refine(joined)))
        return scores if self.pixels else scores.mean((2, 3))


class DenseLayer(nn.Module):
    def __init__(self, inputs, growth):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(1, inputs), nn.Conv2d(inputs, growth, 3, padding=1)

    def forward(self, features):
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class DenseNet(nn.Module):
    """Images [B, 1, 8, 8] -> scores [B, 10]: each layer sees all before it in its block."""

    def __init__(self, growth=2, layers=3):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1))
        self.dense1 = nn.ModuleList(DenseLayer(4 + i * growth, growth) for i in range(layers))
        self.transition = nn.Conv2d(4 + layers * growth, 4, 1)
        self.dense2 = nn.ModuleList(DenseLayer(4 + i * growth, growth) for i in range(layers))
        self.classifier = nn.Linear(4 + layers * growth, 10)

    def forward(self, x):
        x = self._dense(self.dense1, self.features(x))
        x = F.avg_pool2d(self.transition(x), 2)
        x = self._dense(self.dense2, x)
        return self.classifier(F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1))

    @staticmethod
    def _dense(layers, x):
        found = [x]
        for layer in layers:
            found.append(layer(found))
        return torch.cat(found, 1)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(rows, length, width))


class EncoderBlock(nn.Module):
    def __init__(self, width, heads, drop):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Images [B, 1, 8, 8] -> scores [B, 10]: patches, a token of its own and places, as parameters."""

    def __init__(self, width=8, depth=3, drop=0.1):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, 2, drop) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        rows = x.shape[0]
        first = self.cls.expand(rows, -1, -1)
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([first, x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0].reshape(rows, -1))


class CausalBlock(nn.Module):
    """Torch's own attention, with a mask that all blocks of a network share."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x, mask):
        _, length, _ = x.size()
        h = self.norm(x)
        return x + self.attention(h, h, h, attn_mask=mask[:length, :length], need_weights=False)[0]


class Tokens(nn.Module):
    """Tokens [B, T] of int64 -> scores [B, 10]."""

    def __init__(self, width=8, vocabulary=12):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(9, width)
        self.register_buffer("mask", torch.triu(torch.full((9, 9), -math.inf), 1), persistent=False)
        self.blocks = nn.ModuleList(CausalBlock(width) for _ in range(2))
        self.out = nn.Linear(width, 10)

    def forward(self, tokens, scale=None):
        rows, length = tokens.size()
        assert length <= 9, f"{length} tokens are too many"
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device)) / math.sqrt(2)
        if scale is not None:
            x = x * scale
        for block in self.blocks:
            x = block(x, self.mask)
        return self.out(x.mean(1).view(rows, -1))


class Checks(nn.Module):
    """What people put around their layers: checks, lists of parameters, constants, outputs by name, what is unused."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(2, 2)
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.fixed = torch.tensor([2.0])

    def forward(self, x):
        if x.shape[-1] != 4:
            raise ValueError(f"examples of 4 numbers, not {x.shape}")
        assert x.dim() == 2 and x.shape[1] == 4
        weights = self.scales[0].softmax(0) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        h = self.a(x) * weights + torch.ones(x.shape[0], 1)
        return {"scores": self.b(h * self.scales[1] * self.fixed), "sums": (h.sum(1),)}


def group_resnet(drop=0.2):
    """Without batch statistics, so that a batch is cut and members leave examples out."""
    net = ResNet(squeeze=True, drop=drop)
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features))
    return net
