"""Residual networks: He et al. (2016), and the wide ones of Zagoruyko and Komodakis (2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.networks.caffe_style_layers import network


def resnet20(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Images [B, channels, 32, 32] -> logits [B, classes]; 269,722 parameters."""
    return _cifar_resnet(3, classes, channels)


def resnet56(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Images [B, channels, 32, 32] -> logits [B, classes]; 853,018 parameters."""
    return _cifar_resnet(9, classes, channels)


def resnet18(classes: int = 1000, channels: int = 3) -> nn.Sequential:
    """Images [B, channels, 224, 224] -> logits [B, classes]; 11,689,512 parameters, under the names of torchvision."""
    made = network(
        conv1=nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
        layer1=_blocks(2, 64, 64, 1),
        layer2=_blocks(2, 64, 128, 2),
        layer3=_blocks(2, 128, 256, 2),
        layer4=_blocks(2, 256, 512, 2),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(512, classes),
    )
    return _initialise(made)


def wide_resnet(
    depth: int = 16, width: int = 4, classes: int = 10, channels: int = 3, dropout: float = 0.0
) -> nn.Sequential:
    """Images [B, channels, 32, 32] -> logits [B, classes]; 2,748,890 parameters at depth 16 and width 4."""
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1 or width < 1:
        raise UserError(
            f"wide_resnet: depth is {depth} and width {width}; depth is 10, 16, 22, 28, ... and width 1 or more"
        )
    made = network(
        conv1=_conv3(channels, 16),
        layer1=_wide_blocks(blocks, 16, 16 * width, 1, dropout),
        layer2=_wide_blocks(blocks, 16 * width, 32 * width, 2, dropout),
        layer3=_wide_blocks(blocks, 32 * width, 64 * width, 2, dropout),
        bn=nn.BatchNorm2d(64 * width),
        relu=nn.ReLU(),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(64 * width, classes),
    )
    return _initialise(made)


class Block(nn.Module):
    """relu(x + bn(conv(relu(bn(conv(x)))))). A shortcut that changes its size is a projection, or, as in the networks
    for CIFAR, every second pixel and zeros for the channels that are new."""

    def __init__(self, inputs: int, outputs: int, stride: int, projection: bool = True) -> None:
        super().__init__()
        self.conv1 = _conv3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.new = stride, outputs - inputs
        self.downsample = None
        if projection and (stride > 1 or self.new):
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        # In place where only this block has the tensor: a ReLU is a pass over memory.
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.new:
            # Every second pixel. Pooling says it so that the gradient keeps the layout of its input; slices do not.
            x = F.avg_pool2d(x, 1, self.stride)
            x = F.pad(x, (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))
        return F.relu(x + y, inplace=True)


class WideBlock(nn.Module):
    """x + conv(drop(relu(bn(conv(relu(bn(x))))))); where the size changes, the shortcut is a convolution of what the
    first relu gives."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = _conv3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.drop = nn.Dropout(dropout)
        self.conv2 = _conv3(outputs, outputs)
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(x))
        y: Tensor = self.conv2(self.drop(F.relu(self.bn2(self.conv1(h)), inplace=True)))
        return y + (x if self.shortcut is None else self.shortcut(h))


def _cifar_resnet(blocks: int, classes: int, channels: int) -> nn.Sequential:
    made = network(
        conv1=_conv3(channels, 16),
        bn1=nn.BatchNorm2d(16),
        relu=nn.ReLU(),
        layer1=_blocks(blocks, 16, 16, 1, projection=False),
        layer2=_blocks(blocks, 16, 32, 2, projection=False),
        layer3=_blocks(blocks, 32, 64, 2, projection=False),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(64, classes),
    )
    return _initialise(made)


def _blocks(count: int, inputs: int, outputs: int, stride: int, projection: bool = True) -> nn.Sequential:
    first = Block(inputs, outputs, stride, projection)
    return nn.Sequential(first, *(Block(outputs, outputs, 1, projection) for _ in range(count - 1)))


def _wide_blocks(count: int, inputs: int, outputs: int, stride: int, dropout: float) -> nn.Sequential:
    first = WideBlock(inputs, outputs, stride, dropout)
    return nn.Sequential(first, *(WideBlock(outputs, outputs, 1, dropout) for _ in range(count - 1)))


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _initialise(made: nn.Sequential) -> nn.Sequential:
    """With the weights of He et al. (2015) in its convolutions, which keep the variance through relu layers."""
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return made
