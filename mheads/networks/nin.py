"""Network in Network: each convolution is followed by two 1x1 ones (cccp), the last gives a map per class."""

from __future__ import annotations

from torch import nn

from mheads.networks.caffe_style_layers import average_pool, conv, global_average_pool, max_pool, network
from mheads.networks.dropout import Dropout


def nin_cifar100(classes: int = 100, channels: int = 3) -> nn.Sequential:
    """Images [B, channels, 32, 32] -> logits [B, classes]; 984,356 parameters."""
    return network(
        conv1=conv(channels, 192, 5, pad=2, std=0.05),
        relu1=nn.ReLU(),
        cccp1=conv(192, 160, 1, std=0.05),
        relu_cccp1=nn.ReLU(),
        cccp2=conv(160, 96, 1, std=0.05),
        relu_cccp2=nn.ReLU(),
        pool1=max_pool(),  # 16 x 16
        drop1=Dropout(0.5),
        conv2=conv(96, 192, 5, pad=2, std=0.05),
        relu2=nn.ReLU(),
        cccp3=conv(192, 192, 1, std=0.05),
        relu_cccp3=nn.ReLU(),
        cccp4=conv(192, 192, 1, std=0.05),
        relu_cccp4=nn.ReLU(),
        pool2=average_pool(),  # 8 x 8
        drop2=Dropout(0.5),
        conv3=conv(192, 192, 3, pad=1, std=0.05),
        relu3=nn.ReLU(),
        cccp5=conv(192, 192, 1, std=0.05),
        relu_cccp5=nn.ReLU(),
        cccp6=conv(192, classes, 1, std=0.05, lr_mult=(0.1, 0.1)),
        relu_cccp6=nn.ReLU(),
        pool3=global_average_pool(),
        flatten=nn.Flatten(),
    )


def nin_ilsvrc(classes: int = 1000, channels: int = 3, last_bias: float = 0.0) -> nn.Sequential:
    """Images [B, channels, 224, 224] -> logits [B, classes]; 7,595,176 parameters.

    `last_bias` is the constant that biases of cccp8 start from. Softmax does not see it, but the ReLU after cccp8 does:
    from 0, maps of classes can fall below zero in the first steps, where they get no gradient any more.
    """
    return network(
        conv1=conv(channels, 96, 11, stride=4, std=0.01),  # 54 x 54
        relu1=nn.ReLU(),
        cccp1=conv(96, 96, 1, std=0.05),
        relu_cccp1=nn.ReLU(),
        cccp2=conv(96, 96, 1, std=0.05),
        relu_cccp2=nn.ReLU(),
        pool0=max_pool(),  # 27 x 27
        conv2=conv(96, 256, 5, pad=2, std=0.05),
        relu2=nn.ReLU(),
        cccp3=conv(256, 256, 1, std=0.05),
        relu_cccp3=nn.ReLU(),
        cccp4=conv(256, 256, 1, std=0.05),
        relu_cccp4=nn.ReLU(),
        pool2=max_pool(),  # 13 x 13
        conv3=conv(256, 384, 3, pad=1, std=0.01),
        relu3=nn.ReLU(),
        cccp5=conv(384, 384, 1, std=0.05),
        relu_cccp5=nn.ReLU(),
        cccp6=conv(384, 384, 1, std=0.05),
        relu_cccp6=nn.ReLU(),
        pool3=max_pool(),  # 6 x 6
        drop=Dropout(0.5),
        conv4=conv(384, 1024, 3, pad=1, std=0.05),
        relu4=nn.ReLU(),
        cccp7=conv(1024, 1024, 1, std=0.05),
        relu_cccp7=nn.ReLU(),
        cccp8=conv(1024, classes, 1, std=0.01, bias=last_bias),
        relu_cccp8=nn.ReLU(),
        pool4=global_average_pool(),
        flatten=nn.Flatten(),
    )
