"""A small transformer for texts: rows of tokens, class numbers of words or characters, 0 where there is none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.networks.caffe_style_layers import network
from mheads.networks.vit import Block

Text = tuple[Tensor, Tensor]  # what is known of each token, [B, T, W], and which are real, [B, T]


def text(
    classes: int = 2,
    tokens: int = 256,
    length: int = 64,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Tokens [B, T] from 0 to tokens - 1, T at most length -> logits [B, classes]; 120,706 parameters as it is.

    Token 0 is padding, wherever it stands: no token attends to it, and the mean of the tokens leaves it out.
    """
    if width < 1 or heads < 1 or width % heads or min(tokens, length, depth) < 1:
        raise UserError(
            f"text: width={width} must be a multiple of heads={heads}; both, and tokens={tokens}, length={length} and "
            f"depth={depth}, must be above 0"
        )
    blocks = {f"block{i}": TextBlock(width, heads, dropout) for i in range(depth)}
    return network(
        embedding=Embedding(tokens, length, width),
        **blocks,
        norm=Norm(width),
        mean=MeanOfRealTokens(),
        head=nn.Linear(width, classes),
    )


class Embedding(nn.Module):
    """What is learned of each token and of its place, and which tokens are real: of a text without any, all are."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width, padding_idx=0)
        self.places = nn.Parameter(torch.empty(length, width))
        nn.init.trunc_normal_(self.places, std=0.02)

    def forward(self, tokens: Tensor) -> Text:
        if tokens.shape[1] > len(self.places):
            raise ValueError(f"{tokens.shape[1]} tokens are more than the length of {len(self.places)}")
        real = tokens != 0
        return self.tokens(tokens) + self.places[: tokens.shape[1]], real | ~real.any(1, keepdim=True)


class TextBlock(Block):
    def forward(self, text: Text) -> Text:  # type: ignore[override]  # a text in place of its tokens
        x, real = text
        return super().forward(x, real), real


class Norm(nn.LayerNorm):
    def forward(self, text: Text) -> Text:  # type: ignore[override]
        x, real = text
        return super().forward(x), real


class MeanOfRealTokens(nn.Module):
    def forward(self, text: Text) -> Tensor:
        x, real = text
        weights = real.to(x.dtype).unsqueeze(-1)
        return (x * weights).sum(1) / weights.sum(1)
