"""Layers that treat each value by itself, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mheads.caffe.layers.layer_modules import LayerModules, Shape, axis_of
from mheads.caffe.prototxt import CaffeLayer
from mheads.networks.dropout import Dropout


def relu(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    slope = layer.message.relu_param.negative_slope
    return LayerModules([nn.LeakyReLU(slope) if slope else nn.ReLU()])


def elu(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    return LayerModules([nn.ELU(layer.message.elu_param.alpha)])


class Abs(nn.Module):
    """|x|."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def without_options(make: Callable[[], nn.Module]) -> Callable[[CaffeLayer, list[Shape]], LayerModules]:
    """The maker of a layer that is always the same module."""
    return lambda layer, shapes: LayerModules([make()])


class Power(nn.Module):
    """(shift + scale * x) ^ power."""

    def __init__(self, power: float, scale: float, shift: float) -> None:
        super().__init__()
        self.power, self.scale, self.shift = power, scale, shift

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale + self.shift
        return y if self.power == 1 else y.pow(self.power)

    def extra_repr(self) -> str:
        return f"power={self.power:g}, scale={self.scale:g}, shift={self.shift:g}"


def power(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.power_param
    return LayerModules([Power(p.power, p.scale, p.shift)])


class Exp(nn.Module):
    """base ^ (shift + scale * x), given ln(base)."""

    def __init__(self, ln_base: float, scale: float, shift: float) -> None:
        super().__init__()
        self.ln_base, self.scale, self.shift = ln_base, scale, shift

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp((x * self.scale + self.shift) * self.ln_base)

    def extra_repr(self) -> str:
        return f"ln_base={self.ln_base:g}, scale={self.scale:g}, shift={self.shift:g}"


class Logarithm(Exp):
    """The logarithm of shift + scale * x to a base, given ln(base)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x * self.scale + self.shift) / self.ln_base


def exponential(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.exp_param
    return LayerModules([Exp(_ln_base(layer, p.base), p.scale, p.shift)])


def logarithm(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.log_param
    return LayerModules([Logarithm(_ln_base(layer, p.base), p.scale, p.shift)])


def _ln_base(layer: CaffeLayer, base: float) -> float:
    """The natural logarithm of a base; -1 stands for e."""
    if base == -1:
        return 1.0
    if not base > 0 or base == 1 or math.isinf(base):
        raise layer.refuse(f"base: {base:g}: give a number above 0 other than 1, or -1 for e")
    return math.log(base)


def dropout(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.dropout_param
    if not 0 <= p.dropout_ratio < 1:
        raise layer.refuse(f"dropout_ratio: {p.dropout_ratio:g}: give a part from 0 to below 1")
    keep = 1 - p.dropout_ratio
    # Without scale_train, training keeps values as they are, and testing scales instead.
    return LayerModules([Dropout(p.dropout_ratio), *([] if p.scale_train else [Power(1, keep, 0)])])


def softmax(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    axis = axis_of(layer, layer.message.softmax_param.axis, len(shapes[0]))
    if axis == 0:
        raise layer.refuse("axis: 0 goes over the examples of a batch: give 1 or more")
    return LayerModules([nn.Softmax(axis)])
