"""CaffeNet, the single-column AlexNet that normalises after pooling: 60,965,224 parameters."""

from __future__ import annotations

from torch import nn

from mheads.networks.caffe_style_layers import conv, linear, local_response_norm, max_pool, network
from mheads.networks.dropout import Dropout


def caffenet(classes: int = 1000, channels: int = 3, image: int = 227, bias: float = 1.0) -> nn.Sequential:
    """Images [B, channels, image, image] -> logits [B, classes].

    `bias` is the constant that biases of conv2, conv4, conv5, fc6 and fc7 start from: 1 in Caffe's CaffeNet, 0.1 in
    its AlexNet.
    """
    return network(
        conv1=conv(channels, 96, 11, stride=4, std=0.01),  # 55 x 55
        relu1=nn.ReLU(),
        pool1=max_pool(),  # 27 x 27
        norm1=local_response_norm(),
        conv2=conv(96, 256, 5, pad=2, groups=2, std=0.01, bias=bias),
        relu2=nn.ReLU(),
        pool2=max_pool(),  # 13 x 13
        norm2=local_response_norm(),
        conv3=conv(256, 384, 3, pad=1, std=0.01),
        relu3=nn.ReLU(),
        conv4=conv(384, 384, 3, pad=1, groups=2, std=0.01, bias=bias),
        relu4=nn.ReLU(),
        conv5=conv(384, 256, 3, pad=1, groups=2, std=0.01, bias=bias),
        relu5=nn.ReLU(),
        pool5=max_pool(),  # 6 x 6
        flatten=nn.Flatten(),
        fc6=linear(256 * _last_side(image) ** 2, 4096, std=0.005, bias=bias),
        relu6=nn.ReLU(),
        drop6=Dropout(0.5),
        fc7=linear(4096, 4096, std=0.005, bias=bias),
        relu7=nn.ReLU(),
        drop7=Dropout(0.5),
        fc8=linear(4096, classes, std=0.01),
    )


def _last_side(image: int) -> int:
    """The side of the maps of pool5: 6 of 227."""
    side = (image - 11) // 4 + 1  # conv1
    for _ in range(3):  # pool1, pool2, pool5: 3x3, stride 2, rounded up
        side = (side - 2) // 2 + 1
    return side
