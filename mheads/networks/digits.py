"""A small network for 8x8 digits, which trains in seconds on one core: 13,706 parameters."""

from __future__ import annotations

from functools import partial
from math import sqrt

from torch import nn

from mheads.networks import caffe_style_layers
from mheads.networks.caffe_style_layers import max_pool, network

conv = partial(caffe_style_layers.conv, lr_mult=(1, 1))
linear = partial(caffe_style_layers.linear, lr_mult=(1, 1))


def digits(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """Images [B, channels, 8, 8], pixels 0..16 minus the mean image -> logits [B, classes]."""
    return network(
        conv1=conv(channels, 16, 3, pad=1, std=_he(channels * 9) / 4),  # pixels vary by about 4, not 1
        relu1=nn.ReLU(),
        pool1=max_pool(2),  # 4 x 4
        conv2=conv(16, 32, 3, pad=1, std=_he(16 * 9)),
        relu2=nn.ReLU(),
        pool2=max_pool(2),  # 2 x 2
        flatten=nn.Flatten(),
        ip1=linear(32 * 2 * 2, 64, std=_he(32 * 2 * 2)),
        relu3=nn.ReLU(),
        ip2=linear(64, classes, std=0.01),  # small, so that every class starts equally likely
    )


def _he(fan_in: int) -> float:
    """The standard deviation of He et al. (2015), which keeps the variance through relu layers."""
    return sqrt(2 / fan_in)
