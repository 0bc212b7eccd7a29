"""CaffeNet's first forward pass against numpy by Caffe's definitions, and what its starting biases do to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mheads.networks import NETWORKS


def convolve(x, layer, stride=1, pad=0, groups=1):
    """Caffe's convolution: the channels in `groups` parts, each seen by its own part of the filters."""
    weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
    side = weight.shape[-1]
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), (2, 3))[:, :, ::stride, ::stride]
    parts = zip(np.split(windows, groups, 1), np.split(weight, groups), strict=True)
    maps = [np.tensordot(part, filters, ((1, 4, 5), (1, 2, 3))) for part, filters in parts]
    return (np.concatenate(maps, -1) + bias).transpose(0, 3, 1, 2)


def pool(x):
    """Max of 3x3 windows at every second place; the last window may reach over the edge."""
    starts = range(0, 2 * -(-(x.shape[-1] - 3) // 2) + 1, 2)
    return np.array([[x[:, :, i : i + 3, j : j + 3].max((2, 3)) for j in starts] for i in starts]).transpose(2, 3, 0, 1)


def normalise(x):
    """x / (1 + 1e-4 / 5 * the sum of squares over 5 channels)^0.75."""
    squares = np.pad(x**2, ((0, 0), (2, 2), (0, 0), (0, 0)))
    sums = sum(squares[:, i : i + x.shape[1]] for i in range(5))
    return x / (1 + 1e-4 / 5 * sums) ** 0.75


def run_by_hand(net, x):
    """The outputs of pool5, relu7 and fc8, without dropout."""

    def rectify(values):
        return np.maximum(values, 0)

    def multiply(values, layer):
        return values @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()

    x = normalise(pool(rectify(convolve(x, net.conv1, stride=4))))
    x = normalise(pool(rectify(convolve(x, net.conv2, pad=2, groups=2))))
    x = rectify(convolve(x, net.conv3, pad=1))
    x = rectify(convolve(x, net.conv4, pad=1, groups=2))
    maps = pool(rectify(convolve(x, net.conv5, pad=1, groups=2)))
    x = rectify(multiply(maps.reshape(len(x), -1), net.fc6))
    features = rectify(multiply(x, net.fc7))
    return {"pool5": maps, "relu7": features, "fc8": multiply(features, net.fc8)}


@pytest.mark.parametrize("bias", [1.0, 0.1])
def test_caffenet_starts_as_caffe_defines_it(bias):
    """With biases of 1 and ten classes, SGD with momentum 0.9 is stable below Caffe's learning rate of 0.01 only."""
    torch.manual_seed(0)
    net = NETWORKS["caffenet"](classes=10, image=71, bias=bias).eval()
    # 71: all three poolings round up
    images = np.random.default_rng(0).normal(0, 70, (6, 3, 71, 71))  # pixels from 0 to 255, less their mean
    expected = run_by_hand(net, images)
    x = torch.tensor(images).float()
    for name, layer in net.named_children():
        x = layer(x)
        if name in expected:
            np.testing.assert_allclose(x.detach(), expected[name], rtol=1e-4, atol=1e-5)
    curvature = (expected["relu7"].mean(0) ** 2).sum() / 10  # uniform answers to C classes: 1/C in every logit
    limit = 2 * (1 + 0.9) / curvature
    assert limit < 0.01 if bias == 1 else limit > 0.1
