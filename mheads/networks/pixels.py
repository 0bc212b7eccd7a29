"""A small fully convolutional network that gives a class to every pixel."""

from __future__ import annotations

from torch import nn

from mheads.networks.caffe_style_layers import network


def pixels(classes: int = 2, channels: int = 1, width: int = 16) -> nn.Sequential:
    """Images [B, channels, H, W] -> logits [B, classes, H, W]: every pixel sees 11 x 11 around it."""
    return network(
        conv1=nn.Conv2d(channels, width, 5, padding=2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(width, width, 5, padding=2),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(width, classes, 3, padding=1),
    )
