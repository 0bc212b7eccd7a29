"""Caffe's layers in PyTorch, so that a network file reads as the table it was published in.

Weights are drawn from torch's global generator, in the order of the layers: the caller seeds it.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

Pair = tuple[float, float]


def network(**layers: nn.Module) -> nn.Sequential:
    """Named layers, one after the other."""
    return nn.Sequential(OrderedDict(layers))


def conv(
    inputs: int,
    outputs: int,
    kernel: int,
    *,
    stride: int = 1,
    pad: int = 0,
    groups: int = 1,
    std: float,
    bias: float = 0.0,
    lr_mult: Pair = (1, 2),
    decay_mult: Pair = (1, 0),
) -> nn.Module:
    """A convolution; the multipliers are those of (weight, bias)."""
    layer = _make_unfilled(nn.Conv2d, inputs, outputs, kernel, stride=stride, padding=pad, groups=groups)
    return _fill(layer, std, bias, lr_mult, decay_mult)


def linear(
    inputs: int,
    outputs: int,
    *,
    std: float,
    bias: float = 0.0,
    lr_mult: Pair = (1, 2),
    decay_mult: Pair = (1, 0),
) -> nn.Module:
    """A fully connected layer (Caffe's inner product); the multipliers are those of (weight, bias)."""
    return _fill(_make_unfilled(nn.Linear, inputs, outputs), std, bias, lr_mult, decay_mult)


def max_pool(kernel: int = 3, stride: int = 2) -> nn.Module:
    """Max pooling whose output size rounds up."""
    return nn.MaxPool2d(kernel, stride, ceil_mode=True)


def average_pool(kernel: int = 3, stride: int = 2) -> nn.Module:
    """Average pooling whose output size rounds up; a window over the edge divides by what it covers."""
    return nn.AvgPool2d(kernel, stride, ceil_mode=True)


def global_average_pool() -> nn.Module:
    """The mean of each map: [B, C, H, W] -> [B, C, 1, 1]."""
    return nn.AdaptiveAvgPool2d(1)


def local_response_norm(size: int = 5, alpha: float = 1e-4, beta: float = 0.75) -> nn.Module:
    """x_c / (1 + alpha / size * sum of x_j^2 over the `size` channels around c)^beta."""
    return nn.LocalResponseNorm(size, alpha, beta, k=1.0)


def _make_unfilled(layer: type[nn.Module], *args: int, **kwargs: int) -> nn.Module:
    """The layer without PyTorch's own initialisation, which would cost as much as the filler."""
    made = layer(*args, **kwargs, device="meta")  # not skip_init, which imports sympy
    for name, parameter in made.named_parameters():
        made.register_parameter(name, nn.Parameter(torch.empty(parameter.shape)))
    return made


def _fill(layer: nn.Module, std: float, bias: float, lr_mult: Pair, decay_mult: Pair) -> nn.Module:
    """Gaussian weights, constant biases, and (lr_mult, decay_mult) of each for the optimizer."""
    nn.init.normal_(layer.get_parameter("weight"), std=std)
    nn.init.constant_(layer.get_parameter("bias"), bias)
    of_weight, of_bias = zip(lr_mult, decay_mult, strict=True)
    layer.multipliers = {"weight": of_weight, "bias": of_bias}  # type: ignore[assignment]  # not a tensor
    return layer
