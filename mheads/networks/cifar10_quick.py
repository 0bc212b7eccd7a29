"""CIFAR10-Quick: three convolutions and two fully connected layers, 145,578 parameters."""

from __future__ import annotations

from functools import partial

from torch import nn

from mheads.networks import caffe_style_layers
from mheads.networks.caffe_style_layers import average_pool, max_pool, network

# Unlike in the other networks of the paper, biases are decayed too.
conv = partial(caffe_style_layers.conv, decay_mult=(1, 1))
linear = partial(caffe_style_layers.linear, decay_mult=(1, 1))


def cifar10_quick(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Images [B, channels, 32, 32], pixels 0..255 minus the mean image -> logits [B, classes]."""
    return network(
        conv1=conv(channels, 32, 5, pad=2, std=0.0001),
        pool1=max_pool(),  # 16 x 16
        relu1=nn.ReLU(),
        conv2=conv(32, 32, 5, pad=2, std=0.01),
        relu2=nn.ReLU(),
        pool2=average_pool(),  # 8 x 8
        conv3=conv(32, 64, 5, pad=2, std=0.01),
        relu3=nn.ReLU(),
        pool3=average_pool(),  # 4 x 4
        flatten=nn.Flatten(),
        ip1=linear(64 * 4 * 4, 64, std=0.1),
        ip2=linear(64, classes, std=0.1),
    )
