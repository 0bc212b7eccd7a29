"""A small vision transformer: Dosovitskiy et al. (2021), with the mean of the tokens in place of a class token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.networks.caffe_style_layers import network


def vit(
    classes: int = 10,
    channels: int = 3,
    image: int = 32,
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Images [B, channels, image, image] -> logits [B, classes]; 2,693,194 parameters as it is."""
    if image % patch or width % heads or min(image, patch, width, depth, heads) < 1:
        raise UserError(
            f"vit: image={image} must be a multiple of patch={patch}, and width={width} of heads={heads}, all above 0"
        )
    blocks = {f"block{i}": Block(width, heads, dropout) for i in range(depth)}
    return network(
        patches=nn.Conv2d(channels, width, patch, stride=patch),
        tokens=Tokens((image // patch) ** 2, width),
        **blocks,
        norm=nn.LayerNorm(width),
        mean=MeanOfTokens(),
        head=nn.Linear(width, classes),
    )


class Tokens(nn.Module):
    """Maps [B, W, h, w] to tokens [B, h * w, W], and adds to each what is learned of its place."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.empty(count, width))
        nn.init.trunc_normal_(self.places, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2) + self.places


class Block(nn.Module):
    """Attention, then two layers on each token; both normalise what they take and add to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """Tokens [B, T, W] -> [B, T, W]; where `real` [B, T] is false, nobody attends to the token."""
        x = x + self.drop1(self.attend(self.norm1(x), real))
        y: Tensor = self.drop2(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + y

    def attend(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if real is None else real[:, None, None]
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return y


class MeanOfTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
