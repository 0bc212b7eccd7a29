"""The network of airbench94 (Jordan 2024): whitened patches, then six convolutions; 1,972,792 parameters."""

from __future__ import annotations

from torch import Tensor, nn

from mheads.networks.caffe_style_layers import network
from mheads.networks.whitening import whitening


def airbench(classes: int = 10, channels: int = 3, width: int = 64) -> nn.Sequential:
    """Images [B, channels, 32, 32], normalised by channel -> logits [B, classes]; blocks of width, 4 and 4 widths."""
    last = 4 * width
    return network(
        whiten=whitening(channels, 2),  # 31 x 31
        gelu=nn.GELU(),
        block1=_block(2 * channels * 4, width),  # 15 x 15
        block2=_block(width, last),  # 7 x 7
        block3=_block(last, last),  # 3 x 3
        pool=nn.MaxPool2d(3),
        flatten=nn.Flatten(),
        head=_head(last, classes),
        scale=Scale(1 / last),
    )


class Scale(nn.Module):
    """x * factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return str(self.factor)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return network(
        conv1=_conv(inputs, outputs),
        pool=nn.MaxPool2d(2),
        norm1=_norm(outputs),
        gelu1=nn.GELU(),
        conv2=_conv(outputs, outputs),
        norm2=_norm(outputs),
        gelu2=nn.GELU(),
    )


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    """A convolution whose first filters hand on one input each; the others are drawn as torch does."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight[:inputs])
    return layer


def _norm(outputs: int) -> nn.BatchNorm2d:
    """A normalisation that learns a bias and no scale; its running statistics follow the last few batches."""
    layer = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def _head(inputs: int, classes: int) -> nn.Linear:
    """A linear layer without bias whose weights have a standard deviation of 1."""
    layer = nn.Linear(inputs, classes, bias=False)
    layer.weight.data /= layer.weight.data.std()
    return layer
